"""Whatever a user calls a dataset, seen as batches.

:func:`as_source` is the one place that knows the kinds of datasets. A new kind is a new
function that returns a :class:`Source`, and a line there.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from replicax.values import DistributedValues

from .adapters import Adapted, OwnState, adapted, keeps_state
from .batches import batch_rows
from .chain import RowsDataset
from .files import FileDataset
from .position import position

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


class Batches(Protocol):
    """One iteration over batches, which knows where it stands."""

    def __iter__(self) -> Iterator[Any]:
        """Returns itself."""
        ...

    def __next__(self) -> Any:
        """The next batch."""
        ...

    def get_state(self) -> Any:
        """Where the next batch stands: plain data that JSON can hold."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Batches that can be asked for, and what is known of them beforehand.

    Attributes:
      start: Starts an iteration: the next one, given ``None``; or that of a state which
        ``Batches.get_state`` returned, from there on. Batches that hold threads or
        files have a method ``close``.
      peek: Starts an iteration that is only looked at; ``None`` if looking takes.
      sizes: The batches of one epoch as ``{rows: how many}``, or ``None`` if unknown.
      count: The batches of one iteration where only that is known, not their sizes; or
        one of the two constants above.
      num_epochs: The epochs of one iteration, or ``None`` for no end.
      batch_size: The rows of a full batch, or ``None`` if unknown.
      private: Whether each batch lies in memory that nobody else writes to.
      num_files: The number of files that it reads, 0 if it is not made of files.
      of_files: Returns the source of some of the files only, given their numbers and
        the rows of a batch. ``None`` if it is not made of files.
    """

    start: Callable[[Any], Batches]
    peek: Callable[[], Iterator[Any]] | None
    sizes: Mapping[int, int] | None = None
    count: int = UNKNOWN_CARDINALITY
    num_epochs: int | None = 1
    batch_size: int | None = None
    private: bool = False
    num_files: int = 0
    of_files: Callable[[Sequence[int], int], Source] | None = None

    @property
    def cardinality(self) -> int:
        """The batches of one iteration, or one of the two constants above."""
        if self.sizes is None:
            return self.count
        one = sum(self.sizes.values())
        if self.num_epochs is None:
            return INFINITE_CARDINALITY if one else 0
        return one * self.num_epochs


class Counted(Iterator[Any]):
    """Batches whose position is their number: those before a state are passed over.

    Args:
      make: Starts an iteration from its beginning.
      state: What ``get_state`` returned, or ``None``.

    Raises:
      ValueError: There are fewer batches than the state says.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], state: Any = None):
        self._count = 0
        self._batches = make()
        for _ in range(position(state, {"batches": 0})["batches"]):
            if next(self, None) is None:
                close(self)
                raise ValueError(
                    f"The state is that of another dataset: it stands after "
                    f"{state['batches']} batches, and here are {self._count}."
                )

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._count += 1
        return batch

    def get_state(self) -> Any:
        """The number of batches so far."""
        return {"batches": self._count}

    def close(self) -> None:
        """Closes what the batches come from."""
        close(self._batches)


def close(batches: Any) -> None:
    """Closes an iteration, if it holds anything to close."""
    method = getattr(batches, "close", None)
    if method is not None:
        method()


def as_source(dataset: Any) -> Source:
    """Returns ``dataset`` as a :class:`Source`.

    Args:
      dataset: A batched ``ArrayDataset`` or ``FileDataset``, a dataset of another
        library (see ``adapters``), a list of global batches, a function without
        arguments that returns an iterator of them (a generator function), or any other
        iterable of global batches. One that can be iterated only once is accepted, and
        raises when it is iterated again.

    Returns:
      The source.

    Raises:
      TypeError: ``dataset`` is arrays rather than batches of them, or not iterable.
      ValueError: ``dataset`` yields single rows, as far as can be seen beforehand.
    """
    _refuse_bare_arrays(dataset)
    if isinstance(dataset, RowsDataset):
        return _from_rows(dataset)
    if (other := adapted(dataset)) is not None:
        return _from_adapted(other)
    if isinstance(dataset, list):
        sizes = collections.Counter(batch_rows(batch) for batch in dataset)
        return dataclasses.replace(_counted(lambda: iter(dataset)), sizes=sizes)
    if isinstance(dataset, Iterator):
        return dataclasses.replace(_counted(_only_once(dataset)), peek=None)
    if isinstance(dataset, Iterable):
        return Source(
            start=lambda state: _started(iter(dataset), state),
            peek=lambda: iter(dataset),
        )
    if callable(dataset):
        return _counted(lambda: _called(dataset))
    raise TypeError(
        "A dataset must be an iterable of global batches, a generator function, or "
        f"rx.datasets.from_arrays(...).batch(batch_size). Got {dataset!r}."
    )


_BARE = (np.ndarray, jax.Array, DistributedValues, Mapping, tuple, str, bytes)


def _refuse_bare_arrays(dataset: Any) -> None:
    if isinstance(dataset, _BARE):
        raise TypeError(
            f"Got a {type(dataset).__name__} where a dataset was wanted: an iterable "
            "of global batches. For arrays in memory write "
            "rx.datasets.from_arrays(arrays).batch(batch_size); for batches that exist "
            "already, pass a list of them."
        )


def _from_rows(dataset: RowsDataset) -> Source:
    size = dataset.batch_size
    if size is None:
        raise ValueError(
            f"{dataset!r} yields single rows. Call .batch(batch_size), with the global "
            "batch size, before distributing it."
        )
    epochs = dataset.num_epochs or 0
    endless = dataset.num_epochs is None and dataset.batches_per_epoch > 0
    full, rest = divmod(dataset.num_rows, size)
    sizes = {size: full} if full else {}
    if dataset.batches_per_epoch > full:
        sizes[rest] = 1

    def start(state: Any) -> Batches:
        if state is None:
            return iter(dataset)
        batches = dataset.iteration(0)
        batches.set_state(state)
        return batches

    source = Source(
        start=start,
        peek=lambda: dataset.iteration(0),
        sizes=sizes if dataset.keeps_sizes else None,
        count=INFINITE_CARDINALITY if endless else dataset.batches_per_epoch * epochs,
        num_epochs=dataset.num_epochs,
        batch_size=size,
        private=dataset.private,
    )
    if not isinstance(dataset, FileDataset):
        return source

    def of_files(numbers: Sequence[int], rows: int) -> Source:
        return _from_rows(dataset.of_files(numbers).rebatched(rows))

    return dataclasses.replace(source, num_files=len(dataset.files), of_files=of_files)


def _from_adapted(other: Adapted) -> Source:
    def start(state: Any) -> Batches:
        if other.resume is not None:
            return other.resume(state)
        return Counted(other.iterate, state)

    return Source(
        start=start,
        peek=other.iterate,
        sizes=other.sizes,
        count=UNKNOWN_CARDINALITY if other.count is None else other.count,
        num_epochs=None if other.count == INFINITE_CARDINALITY else 1,
        batch_size=other.batch_size,
    )


def _started(batches: Iterator[Any], state: Any) -> Batches:
    """Starts batches whose iterator may keep its position itself."""
    if keeps_state(batches):
        return OwnState.of(batches, state)
    return Counted(lambda: batches, state)


def _counted(make: Callable[[], Iterator[Any]]) -> Source:
    return Source(start=lambda state: Counted(make, state), peek=make)


def _only_once(iterator: Iterator[Any]) -> Callable[[], Iterator[Any]]:
    taken = iter([iterator])

    def batches() -> Iterator[Any]:
        for once in taken:
            return once
        raise RuntimeError(
            f"This dataset was made from an iterator ({type(iterator).__name__}), "
            "which can be iterated only once, and it has been. Pass a list, an object "
            "whose __iter__ starts anew, or the generator function itself instead of "
            "its result."
        )

    return batches


def _called(function: Callable[[], Any]) -> Iterator[Any]:
    made = function()
    if isinstance(made, (*_BARE, RowsDataset)):
        raise TypeError(
            f"{function!r} was called as a generator function and must return an "
            f"iterator of global batches. Got a {type(made).__name__}: pass what it "
            "returns as the dataset, or yield batches."
        )
    if not isinstance(made, Iterable):
        raise TypeError(
            f"{function!r} was called as a generator function and must return an "
            f"iterable of global batches. Got {made!r}."
        )
    return iter(made)
