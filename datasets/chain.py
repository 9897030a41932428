"""What datasets of rows have in common: the chain, the epochs, and the position.

A dataset that knows its rows beforehand, in memory or in files, says how many there are
and how an iteration makes its elements. All else is here.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from .position import position


class Counter:
    """Counts the iterations of a dataset."""

    def __init__(self) -> None:
        self.next = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple[int]:
        return (self.next,)  # a lock cannot be sent to another process

    def __setstate__(self, state: tuple[int]) -> None:
        (self.next,) = state
        self._lock = threading.Lock()

    def take(self) -> int:
        """The number of the iteration that starts now."""
        with self._lock:
            self.next += 1
            return self.next - 1


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RowsDataset(ABC):
    """Rows that are shuffled, batched and repeated.

    Each iteration is a new epoch: iteration ``k`` of one dataset object is epoch ``k``,
    and the order of an epoch is a function of the seed and the epoch alone. With
    ``repeat(n)`` an iteration runs through ``n`` epochs and the next one continues with
    the epochs after them; an endless iteration ``k`` begins with epoch ``k``.
    """

    _made_by: ClassVar[str]

    _seed: int | None = None
    _batch_size: int | None = None
    _drop_remainder: bool = False
    _repeats: int | None = 1
    _repeated: bool = False
    _iterations: Counter = dataclasses.field(default_factory=Counter, init=False)

    # -- the chain -------------------------------------------------------------------

    def shuffle(self, seed: int) -> Self:
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
        seed = as_integer("shuffle(seed)", seed, at_least=0)
        self._refuse_after(
            "shuffle", shuffle=self._seed is not None, batch=self._is_batched
        )
        return dataclasses.replace(self, _seed=seed)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Self:
        """Groups rows. Distributed, this is the *global* batch of all replicas.

        Args:
          batch_size: Rows a batch, at least 1.
          drop_remainder: Whether an epoch leaves out a last batch of fewer rows.

        Returns:
          The batched dataset. Its elements have leaves of shape ``[batch_size, ...]``.

        Raises:
          TypeError: ``batch_size`` is not an integer, or ``drop_remainder`` no bool.
          ValueError: ``batch_size`` is below 1; or the dataset is already batched or
            repeated.
        """
        batch_size = as_integer("batch(batch_size)", batch_size, at_least=1)
        if not isinstance(drop_remainder, bool):
            raise TypeError(f"drop_remainder is a bool. Got {drop_remainder!r}.")
        self._refuse_after("batch", batch=self._is_batched)
        return dataclasses.replace(
            self, _batch_size=batch_size, _drop_remainder=drop_remainder
        )

    def repeat(self, n: int | None = None) -> Self:
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
            n = as_integer("repeat(n)", n, at_least=0)
        self._refuse_after("repeat")
        return dataclasses.replace(self, _repeats=n, _repeated=True)

    def _refuse_after(self, call: str, **earlier: bool) -> None:
        for name, happened in {**earlier, "repeat": self._repeated}.items():
            if happened:
                raise ValueError(
                    f"{call}() cannot follow {name}(). Chain them in the order "
                    f"{self._made_by}(...).shuffle(seed).batch(batch_size).repeat(), "
                    "each at most once: rows are shuffled, then grouped, and no batch "
                    "crosses two epochs."
                )

    # -- what it holds ---------------------------------------------------------------

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number of rows of one epoch."""

    @property
    def batch_size(self) -> int | None:
        """The rows of a full batch, or ``None`` when elements are single rows."""
        return self._batch_size

    @property
    def num_epochs(self) -> int | None:
        """The epochs of one iteration, or ``None`` when it has no end."""
        return self._repeats

    @property
    def private(self) -> bool:
        """Whether each batch lies in memory that nobody else writes to."""
        return True

    @property
    def keeps_sizes(self) -> bool:
        """Whether each batch has as many rows as were grouped."""
        return True

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
    def _is_batched(self) -> bool:
        return self._batch_size is not None

    def __repr__(self) -> str:
        return ".".join(self._calls())

    def _calls(self) -> list[str]:
        """The calls that make this dataset, for people and for saved states."""
        calls = [f"{self._made_by}({self.num_rows} rows)"]
        if self._seed is not None:
            calls.append(f"shuffle({self._seed})")
        if self._is_batched:
            drop = ", drop_remainder=True" if self._drop_remainder else ""
            calls.append(f"batch({self._batch_size}{drop})")
        if self._repeated:
            calls.append(f"repeat({'' if self._repeats is None else self._repeats})")
        return calls

    # -- iterating -------------------------------------------------------------------

    def __iter__(self) -> RowsIterator:
        """Starts the next epoch, or the next ``repeat`` of epochs."""
        return self.iteration(self._iterations.take())

    @abstractmethod
    def iteration(self, number: int) -> RowsIterator:
        """Starts a given iteration, without counting it."""

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Iterates over one given epoch, without counting as an iteration.

        Args:
          epoch: The epoch, from 0.

        Returns:
          An iterator over the epoch's elements.
        """
        return self._epoch(as_integer("epoch(epoch)", epoch, at_least=0))

    @abstractmethod
    def _epoch(self, epoch: int) -> Iterator[Any]:
        """The elements of an epoch."""


class RowsIterator(Iterator[Any]):
    """One iteration of a dataset of rows; it can be saved and restored.

    Args:
      dataset: The dataset.
      iteration: Which of its iterations this is, from 0.
    """

    def __init__(self, dataset: RowsDataset, iteration: int):
        self._dataset: Any = dataset
        self._made_like = repr(dataset)
        self._begin(iteration, 0)

    def _begin(self, iteration: int, position: int) -> None:
        """Stands before the element at ``position`` of an iteration."""
        self._iteration = iteration
        self._position = position

    @property
    def _first_epoch(self) -> int:
        repeats = self._dataset.num_epochs
        return self._iteration * (1 if repeats is None else repeats)

    def get_state(self) -> dict[str, Any]:
        """Where the next element stands, as plain data that JSON can hold."""
        return {
            "iteration": self._iteration,
            "position": self._position,
            "dataset": self._made_like,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to where :meth:`get_state` was called, also in another process.

        The dataset's next iteration will be the one after this.

        Args:
          state: What ``get_state`` returned, for a dataset that is made alike.

        Raises:
          ValueError: It is the state of another dataset, or beyond its end.
        """
        state = position(state, self.get_state())
        here = self._made_like
        if state["dataset"] != here:
            raise ValueError(
                f"The state is that of another dataset. It was saved from "
                f"{state['dataset']}. This one is {here}: rows, seed, batch size "
                "and epochs must be the same for the order to be the same."
            )
        self._refuse_beyond(state["iteration"], state["position"])
        self._begin(state["iteration"], state["position"])
        self._dataset._iterations.next = state["iteration"] + 1

    def _refuse_beyond(self, iteration: int, position: int) -> None:
        dataset = self._dataset
        per_epoch, epochs = dataset.batches_per_epoch, dataset.num_epochs
        if epochs is None:
            last = sys.maxsize if per_epoch else 0
        else:
            last = per_epoch * epochs
        # Elements are counted through all iterations, and no sequence is longer.
        most = sys.maxsize // max(1, per_epoch * (epochs or 1)) - 1
        if position > last or iteration > most:
            raise ValueError(
                "This is not a state of this dataset: it stands at position "
                f"{position} of iteration {iteration}. An iteration of {dataset!r} "
                f"ends at position {last}, and the last iteration is {most}."
            )


def as_integer(what: str, value: Any, *, at_least: int) -> int:
    """Returns ``value`` as an int, or raises saying what it should have been.

    Args:
      what: The call and argument, for the message.
      value: What was passed.
      at_least: The lowest value allowed.

    Raises:
      TypeError: ``value`` is not an integer.
      ValueError: It is too low.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer. Got {value!r}.") from None
    if number < at_least:
        raise ValueError(f"{what} must be at least {at_least}. Got {number}.")
    return number
