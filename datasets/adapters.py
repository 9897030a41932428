"""Datasets of other libraries, known by what they can do and never imported.

Each library has a function here that says how its batches are iterated over, what they
become, and what is known of them beforehand. ``sources`` makes a source of that.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .records import as_objects

_INFINITE = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapted:
    """A dataset of another library.

    Attributes:
      iterate: Starts an iteration over its batches.
      resume: Starts one that keeps its own state, given such a state or ``None``.
        ``None`` if the library has no states.
      count: The batches of one iteration, -1 for no end, ``None`` if unknown.
      sizes: Those batches as ``{rows: how many}``, or ``None`` if unknown.
      batch_size: The rows of a full batch, or ``None`` if unknown.
    """

    iterate: Callable[[], Iterator[Any]]
    resume: Callable[[Any], OwnState] | None = None
    count: int | None = None
    sizes: Mapping[int, int] | None = None
    batch_size: int | None = None


def adapted(dataset: Any) -> Adapted | None:
    """Looks at a dataset of another library.

    Args:
      dataset: Anything.

    Returns:
      How to go through it, or ``None`` if it is of no library that is known here.

    Raises:
      ValueError: It is known that the dataset yields single rows.
    """
    if _has(dataset, "as_numpy_iterator", "cardinality", "element_spec"):
        return _tf_dataset(dataset)
    if _has(dataset, "collate_fn", "batch_size", "sampler", "dataset"):
        return _torch_loader(dataset)
    if _has(dataset, "features", "column_names", "with_format"):
        return _hugging_face(dataset)
    if _has(dataset, "mp_prefetch") or _has(dataset, "to_iter_dataset"):
        return _grain(dataset)
    return None


def _has(dataset: Any, *names: str) -> bool:
    return not isinstance(dataset, type) and all(hasattr(dataset, n) for n in names)


def _rows_error(what: str, how: str) -> ValueError:
    return ValueError(
        f"{what} yields single rows, and batches are wanted. Call {how}, with the "
        "global batch size, before distributing it."
    )


def _converted(batches: Iterator[Any], convert: Callable[[Any], Any]) -> Iterator[Any]:
    try:
        for batch in batches:
            yield convert(batch)
    finally:
        _close(batches)


def _close(batches: Any) -> None:
    if hasattr(batches, "close"):
        batches.close()


# -- positions that a library keeps itself -------------------------------------------


def keeps_state(batches: Any) -> bool:
    """Whether an iterator can say where it stands, and go there."""
    return hasattr(batches, "get_state") and hasattr(batches, "set_state")


class OwnState(Iterator[Any]):
    """Batches whose position is what their library says.

    Args:
      batches: The iterator.
      get_state: Returns its position.
      convert: Called on each batch.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        get_state: Callable[[], Any],
        convert: Callable[[Any], Any] = lambda batch: batch,
    ):
        self._batches = batches
        self._get_state = get_state
        self._convert = convert

    @classmethod
    def of(cls, batches: Any, state: Any, *convert: Callable[[Any], Any]) -> OwnState:
        """Takes an iterator with ``get_state`` and ``set_state``, from a state on."""
        if state is not None:
            own = from_plain(state)
            with _refusing(state):
                _check_like(own, batches.get_state())
                batches.set_state(own)
        return cls(batches, batches.get_state, *convert)

    def __next__(self) -> Any:
        return self._convert(next(self._batches))

    def get_state(self) -> Any:
        """The library's state, as plain data that JSON can hold."""
        return to_plain(self._get_state())

    def close(self) -> None:
        """Closes the iterator and lets go of it, which ends its processes."""
        _close(self._batches)
        self._batches, self._get_state = iter(()), lambda: None


def to_plain(state: Any) -> Any:
    """Returns a library's state as data that JSON can hold.

    Args:
      state: Plain data, ``bytes``, or any other object that can be pickled.

    Returns:
      A dict that :func:`from_plain` turns back.
    """
    try:
        if json.loads(json.dumps(state)) == state:
            return {"plain": copy.deepcopy(state)}
    except (TypeError, ValueError):
        pass
    kind = "bytes" if isinstance(state, bytes) else "pickle"
    data = state if kind == "bytes" else pickle.dumps(state)
    return {kind: base64.b64encode(data).decode()}


def from_plain(plain: Any) -> Any:
    """Returns the state that :func:`to_plain` was given.

    Raises:
      ValueError: ``plain`` is not what that returned.
    """
    kinds = list(plain) if isinstance(plain, Mapping) else []
    if len(kinds) != 1 or kinds[0] not in ("plain", "bytes", "pickle"):
        raise _no_state(plain)
    kind, data = kinds[0], plain[kinds[0]]
    if kind == "plain":
        return copy.deepcopy(data)
    with _refusing(plain):
        data = base64.b64decode(data, validate=True)
        return data if kind == "bytes" else pickle.loads(data)


def _no_state(state: Any) -> ValueError:
    return ValueError(
        "This is not a state of this kind of dataset. Pass what get_state() returned. "
        f"Got {state!r}."
    )


@contextlib.contextmanager
def _refusing(state: Any) -> Iterator[None]:
    """Says of whatever a library raises that it is about a state."""
    try:
        yield
    except Exception as error:
        raise _no_state(state) from error


def _check_like(state: Any, other: Any) -> None:
    """Compares a state with another one of its kind, as far as those are alike.

    Libraries take some wrong states as they are, and fail when they read, or worse.

    Raises:
      TypeError: An entry is missing, or something else where a whole number belongs.
    """
    if isinstance(other, Mapping):
        if not isinstance(state, Mapping) or not other.keys() <= state.keys():
            raise TypeError(f"The entries {list(other)} are wanted. Got {state!r}.")
        for name in other:
            _check_like(state[name], other[name])
    elif type(other) is int and type(state) is not int and state is not None:
        raise TypeError(f"A whole number is wanted. Got {state!r}.")


# -- grain ---------------------------------------------------------------------------


def _grain(dataset: Any) -> Adapted:
    """A ``MapDataset`` or ``IterDataset``."""

    def batch_of(batch: Any) -> Any:
        if any(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(batch)):
            raise _rows_error(f"This grain dataset ({dataset})", ".batch(batch_size)")
        return batch

    count = None
    if hasattr(dataset, "__len__"):
        count = len(dataset)
        count = _INFINITE if count >= sys.maxsize else count
    return Adapted(
        iterate=lambda: _converted(iter(dataset), batch_of),
        resume=lambda state: OwnState.of(iter(dataset), state, batch_of),
        count=count,
    )


# -- tf.data -------------------------------------------------------------------------


def _tf_dataset(dataset: Any) -> Adapted:
    shapes = [spec.shape for spec in jax.tree.leaves(dataset.element_spec)]
    if any(shape.rank == 0 for shape in shapes):
        raise _rows_error(
            f"This tf.data.Dataset ({dataset.element_spec})", ".batch(batch_size)"
        )
    count = int(dataset.cardinality())
    rows = {shape[0] if shape.rank else None for shape in shapes}
    size = rows.pop() if len(rows) == 1 else None
    sizes = None
    if size is not None and count >= _INFINITE:
        sizes = {int(size): 1 if count == _INFINITE else count}
    return Adapted(
        iterate=lambda: _converted(
            dataset.as_numpy_iterator(),
            lambda batch: jax.tree.map(_from_ragged, batch),
        ),
        count=count if count >= _INFINITE else None,
        sizes=sizes,
        batch_size=None if size is None else int(size),
    )


def _from_ragged(leaf: Any) -> Any:
    """Rows of different lengths become an array of arrays."""
    if hasattr(leaf, "row_splits") and hasattr(leaf, "to_list"):
        return as_objects([np.asarray(row) for row in leaf.to_list()])
    return leaf


# -- torch ---------------------------------------------------------------------------


def _torch_loader(loader: Any) -> Adapted:
    def resume(state: Any) -> OwnState:
        batches = iter(loader) if state is None else restored(state)
        return OwnState(batches, loader.state_dict, _from_torch)

    def restored(state: Any) -> Iterator[Any]:
        own = from_plain(state)
        with _refusing(state):
            loader.load_state_dict(own)
            return iter(loader)

    stateful = _has(loader, "state_dict", "load_state_dict")
    sizes = _torch_sizes(loader)
    return Adapted(
        # A stateful loader knows its last iterator only: another one is for a copy.
        iterate=lambda: _converted(
            iter(copy.copy(loader) if stateful else loader), _from_torch
        ),
        resume=resume if stateful else None,
        count=None if _torch_rows(loader) is None else len(loader),
        sizes=sizes,
        batch_size=loader.batch_size,
    )


def _torch_rows(loader: Any) -> int | None:
    """How many rows are drawn; what iterable datasets say of it need not be so."""
    try:
        return len(loader.sampler)
    except TypeError:
        return None


def _torch_sizes(loader: Any) -> Mapping[int, int] | None:
    rows, size = _torch_rows(loader), loader.batch_size
    plain = getattr(loader.collate_fn, "__name__", "") == "default_collate"
    if rows is None or size is None or not plain:
        return None
    full, rest = divmod(rows, size)
    sizes = {size: full} if full else {}
    if rest and not loader.drop_last:
        sizes[rest] = 1
    return sizes


def _from_torch(batch: Any) -> Any:
    """Tensors become arrays over the same memory, lists of them tuples."""
    if hasattr(batch, "detach"):
        return _from_tensor(batch.detach().cpu())
    if isinstance(batch, Mapping):
        return {key: _from_torch(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        if batch and all(isinstance(x, str | bytes | int | float) for x in batch):
            return _column(batch)
        parts = [_from_torch(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch


def _from_tensor(tensor: Any) -> np.ndarray:
    try:
        return tensor.numpy()
    except TypeError:  # a dtype that JAX has and numpy has not, as bfloat16
        return np.asarray(jax.dlpack.from_dlpack(tensor.contiguous()))


# -- Hugging Face --------------------------------------------------------------------


def _hugging_face(dataset: Any) -> Adapted:
    features = dataset.features or {}
    rows = [name for name, feature in features.items() if _is_one_value(feature)]
    if rows:
        raise _rows_error(
            f"This Hugging Face dataset (a row has one value of {', '.join(rows)})",
            ".batch(batch_size)",
        )
    return Adapted(
        iterate=lambda: _converted(iter(dataset), _from_columns),
        count=len(dataset) if hasattr(dataset, "__len__") else None,
    )


def _is_one_value(feature: Any) -> bool:
    many = isinstance(feature, list | dict) or hasattr(feature, "feature")
    return not many and hasattr(feature, "dtype") and not hasattr(feature, "shape")


def _from_columns(batch: Mapping[str, Any]) -> Any:
    columns = {
        name: _column(value) if isinstance(value, list) else _from_torch(value)
        for name, value in batch.items()
    }
    single = [name for name, value in columns.items() if np.ndim(value) == 0]
    if single:
        raise _rows_error(
            f"This Hugging Face dataset (a row has one value of {', '.join(single)})",
            ".batch(batch_size)",
        )
    return columns


def _column(values: Sequence[Any]) -> np.ndarray:
    """Values of one kind, each of a row, as an array."""
    if isinstance(values[0], bytes):
        return as_objects(values)
    values = [
        _from_torch(value) if hasattr(value, "detach") else value for value in values
    ]
    try:
        return np.asarray(values)
    except ValueError:  # rows of different lengths
        return as_objects([np.asarray(value) for value in values])
