"""Batches from arrays in memory: shuffled, gathered and repeated.

Only what an array in memory makes quick is done here: a batch is gathered with one
indexed copy a leaf. Pipelines with per-row work, worker processes or record files are
better made with a data loading library, and distributed just the same.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .buffers import take_rows


def from_arrays(arrays: Any) -> ArrayDataset:
    """Makes a dataset of the rows of some arrays.

    Args:
      arrays: A pytree of arrays of shape ``[num_rows, ...]``, all with the same number
        of rows: numpy arrays, memory-mapped ones (only the rows of a batch are read)
        or jax arrays (kept on the host). They are not copied, so leave them as they
        are while the dataset is in use.

    Returns:
      An :class:`ArrayDataset`. Its elements are single rows until it is batched.

    Raises:
      ValueError: There is no array, an array has no rows axis, or the numbers of rows
        differ.

    Example:
      >>> import numpy as np
      >>> import replicax as rx
      >>> x, y = np.zeros([10, 3]), np.arange(10)
      >>> dataset = rx.datasets.from_arrays((x, y)).shuffle(seed=0).batch(4)
      >>> [x.shape for x, y in dataset]
      [(4, 3), (4, 3), (2, 3)]
    """
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(arrays)
    if not paths_and_leaves:
        raise ValueError(
            f"from_arrays needs at least one array. Got {arrays!r}, which holds none."
        )
    rows_of: dict[str, int] = {}
    leaves = []
    for path, leaf in paths_and_leaves:
        name = "arrays" + jax.tree_util.keystr(path)
        leaf = np.asarray(leaf)
        if leaf.ndim == 0:
            raise ValueError(
                f"{name} has no rows: its shape is (). Every leaf must be an array of "
                "shape [num_rows, ...]; turn a Python list of numbers into one with "
                "np.asarray."
            )
        rows_of[name] = leaf.shape[0]
        leaves.append(leaf)
    if len(set(rows_of.values())) > 1:
        found = ", ".join(f"{name}: {rows}" for name, rows in rows_of.items())
        raise ValueError(
            f"The arrays must have equally many rows (first axis). Got {found}."
        )
    return ArrayDataset(tuple(leaves), treedef)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ArrayDataset:
    """Rows of in-memory arrays. Made by :func:`from_arrays`.

    ``shuffle``, ``batch`` and ``repeat`` return a new dataset and leave this one as it
    is; each may be called once, ``repeat`` last.

    Each iteration is a new epoch: iteration ``k`` of one dataset object is epoch ``k``,
    and the order of an epoch is a function of the seed and the epoch alone. With
    ``repeat(n)`` an iteration runs through ``n`` epochs and the next one continues with
    the epochs after them; an endless iteration ``k`` begins with epoch ``k``.
    """

    _leaves: tuple[np.ndarray, ...]
    _treedef: Any
    _seed: int | None = None
    _batch_size: int | None = None
    _drop_remainder: bool = False
    _repeats: int | None = 1
    _repeated: bool = False
    _iterations: _Counter = dataclasses.field(
        default_factory=lambda: _Counter(), init=False
    )

    # -- the chain -------------------------------------------------------------------

    def shuffle(self, seed: int) -> ArrayDataset:
        """Visits the rows in a random order, another one in every epoch.

        Args:
          seed: A non-negative integer.

        Returns:
          The shuffled dataset.

        Raises:
          TypeError: ``seed`` is not an integer.
          ValueError: ``seed`` is negative; or the dataset is already shuffled, batched
            or repeated.
        """
        seed = _integer("shuffle(seed)", seed, at_least=0)
        self._refuse_after(
            "shuffle", shuffle=self._seed is not None, batch=self._is_batched
        )
        return dataclasses.replace(self, _seed=seed)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> ArrayDataset:
        """Groups rows. Distributed, this is the *global* batch of all replicas.

        Args:
          batch_size: Rows a batch, at least 1.
          drop_remainder: Whether an epoch leaves out a last batch of fewer rows.

        Returns:
          The batched dataset. Its elements have leaves of shape ``[batch_size, ...]``.

        Raises:
          TypeError: ``batch_size`` is not an integer.
          ValueError: ``batch_size`` is below 1; or the dataset is already batched or
            repeated.
        """
        batch_size = _integer("batch(batch_size)", batch_size, at_least=1)
        self._refuse_after("batch", batch=self._is_batched)
        return dataclasses.replace(
            self, _batch_size=batch_size, _drop_remainder=bool(drop_remainder)
        )

    def repeat(self, n: int | None = None) -> ArrayDataset:
        """Runs through several epochs in one iteration.

        A batch never holds rows of two epochs.

        Args:
          n: The number of epochs, or ``None`` for no end.

        Returns:
          The repeated dataset.

        Raises:
          TypeError: ``n`` is not an integer.
          ValueError: ``n`` is negative, or the dataset is already repeated.
        """
        if n is not None:
            n = _integer("repeat(n)", n, at_least=0)
        self._refuse_after("repeat")
        return dataclasses.replace(self, _repeats=n, _repeated=True)

    def _refuse_after(self, call: str, **earlier: bool) -> None:
        for name, happened in {**earlier, "repeat": self._repeated}.items():
            if happened:
                raise ValueError(
                    f"{call}() cannot follow {name}(). Chain them in the order "
                    "from_arrays(...).shuffle(seed).batch(batch_size).repeat(), each "
                    "at most once: rows are shuffled, then grouped, and no batch "
                    "crosses two epochs."
                )

    # -- what it holds ---------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """The number of rows of one epoch."""
        return self._leaves[0].shape[0]

    @property
    def batch_size(self) -> int | None:
        """The rows of a full batch, or ``None`` when elements are single rows."""
        return self._batch_size

    @property
    def num_epochs(self) -> int | None:
        """The epochs of one iteration, or ``None`` when it has no end."""
        return self._repeats

    @property
    def batches_per_epoch(self) -> int:
        """The elements of one epoch: batches, or rows when there is no batch size."""
        full, rest = divmod(self.num_rows, self._batch_size or 1)
        return full + (rest > 0 and not self._drop_remainder)

    def __len__(self) -> int:
        """The number of elements of one iteration.

        Raises:
          TypeError: The dataset repeats without end.
        """
        if self._repeats is None:
            raise TypeError("This dataset repeats without end: it has no len().")
        return self.batches_per_epoch * self._repeats

    @property
    def element_spec(self) -> Any:
        """A ``jax.ShapeDtypeStruct`` for each leaf of the first element."""
        rows = (min(self._batch_size, self.num_rows),) if self._batch_size else ()
        return self._treedef.unflatten(
            jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), leaf.dtype)
            for leaf in self._leaves
        )

    @property
    def _is_batched(self) -> bool:
        return self._batch_size is not None

    def __repr__(self) -> str:
        parts = [f"from_arrays({self.num_rows} rows)"]
        if self._seed is not None:
            parts.append(f"shuffle({self._seed})")
        if self._is_batched:
            drop = ", drop_remainder=True" if self._drop_remainder else ""
            parts.append(f"batch({self._batch_size}{drop})")
        if self._repeated:
            parts.append(f"repeat({'' if self._repeats is None else self._repeats})")
        return ".".join(parts)

    # -- iterating -------------------------------------------------------------------

    def __iter__(self) -> ArrayIterator:
        """Starts the next epoch, or the next ``repeat`` of epochs."""
        return ArrayIterator(self, self._iterations.take())

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Iterates over one given epoch, without counting as an iteration.

        Args:
          epoch: The epoch, from 0.

        Returns:
          An iterator over the epoch's elements.
        """
        order = self._order(_integer("epoch(epoch)", epoch, at_least=0))
        return (self._element(order, i) for i in range(self.batches_per_epoch))

    def _order(self, epoch: int) -> np.ndarray | None:
        """The order of an epoch's rows; ``None`` for the order they lie in."""
        if self._seed is None:
            return None
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_rows)

    def _element(self, order: np.ndarray | None, index: int) -> Any:
        if self._batch_size is None:
            row = index if order is None else order[index]
            return self._treedef.unflatten(leaf[row] for leaf in self._leaves)
        start = index * self._batch_size
        rows = slice(start, min(start + self._batch_size, self.num_rows))
        chosen = rows if order is None else order[rows]
        return self._treedef.unflatten(take_rows(leaf, chosen) for leaf in self._leaves)


class _Counter:
    """Counts the iterations of a dataset."""

    def __init__(self) -> None:
        self.next = 0
        self._lock = threading.Lock()

    def take(self) -> int:
        with self._lock:
            self.next += 1
            return self.next - 1


class ArrayIterator(Iterator[Any]):
    """One iteration of an :class:`ArrayDataset`; it can be saved and restored.

    Args:
      dataset: The dataset.
      iteration: Which of its iterations this is, from 0.
    """

    def __init__(self, dataset: ArrayDataset, iteration: int):
        self._dataset = dataset
        self._begin(iteration, 0)

    def _begin(self, iteration: int, position: int) -> None:
        """Stands before the element at ``position`` of an iteration."""
        self._iteration = iteration
        self._position = position
        self._order_of: int | None = None
        self._order: np.ndarray | None = None

    def __next__(self) -> Any:
        dataset = self._dataset
        per_epoch, repeats = dataset.batches_per_epoch, dataset.num_epochs
        if per_epoch == 0:
            raise StopIteration
        turn, index = divmod(self._position, per_epoch)
        if repeats is not None and turn >= repeats:
            raise StopIteration
        epoch = turn + self._iteration * (1 if repeats is None else repeats)
        if self._order_of != epoch:
            self._order_of, self._order = epoch, dataset._order(epoch)
        self._position += 1
        return dataset._element(self._order, index)

    def get_state(self) -> dict[str, Any]:
        """Where the next element stands, as plain data that JSON can hold."""
        return {
            "iteration": self._iteration,
            "position": self._position,
            "dataset": repr(self._dataset),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where :meth:`get_state` was called, also in another process.

        The dataset's next iteration will be the one after this.

        Args:
          state: What ``get_state`` returned, for a dataset that is made alike.

        Raises:
          ValueError: It is the state of another dataset.
        """
        here = repr(self._dataset)
        if state.get("dataset") != here:
            raise ValueError(
                f"The state is that of another dataset. It was saved from "
                f"{state.get('dataset')}. This one is {here}: rows, seed, batch size "
                "and epochs must be the same for the order to be the same."
            )
        self._begin(state["iteration"], state["position"])
        self._dataset._iterations.next = state["iteration"] + 1


def _integer(what: str, value: Any, *, at_least: int) -> int:
    """Returns ``value`` as an int, or raises saying what it should have been."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer. Got {value!r}.") from None
    if number < at_least:
        raise ValueError(f"{what} must be at least {at_least}. Got {number}.")
    return number
