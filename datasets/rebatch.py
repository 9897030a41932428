"""Batches of other sizes, made of the rows of given ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from .batches import as_host_batch, batch_rows, join_batches
from .buffers import take_rows
from .feeds import looked_at
from .position import position
from .sources import Batches, Counted, Source, close


def rebatch(batches: Iterable[Any], sizes: Sequence[int]) -> Rebatched:
    """Goes through the rows of some batches in batches of other sizes.

    Args:
      batches: Pytrees of arrays of shape ``[rows, ...]``.
      sizes: Rows a batch, in turn.

    Returns:
      An iterator of batches.

    Example:
      >>> import numpy as np
      >>> from replicax.datasets.rebatch import rebatch
      >>> [batch.tolist() for batch in rebatch([np.arange(4), np.arange(3)], [3, 1])]
      [[0, 1, 2], [3], [0, 1, 2]]
    """
    return Rebatched(lambda _: Counted(lambda: iter(batches)), sizes, None)


class Rebatched(Iterator[Any]):
    """Goes through the rows of batches in batches of other sizes.

    The sizes repeat. A batch may hold rows of several given ones; the last one has what
    is left. A size of 0 yields a batch without rows. The rule is that of
    ``tf.data.Dataset.rebatch``. Each batch lies in memory of its own.

    Args:
      start: Starts the given batches: anew for ``None``, or from a state of theirs on.
      sizes: Rows a batch, in turn.
      state: What ``get_state`` returned, or ``None``.

    Raises:
      ValueError: The state is that of other batches.
    """

    def __init__(
        self, start: Callable[[Any], Batches], sizes: Sequence[int], state: Any
    ):
        at = position(state, {"turn": 0, "used": 0, "source": None})
        self._sizes = sizes
        self._turn = at["turn"]
        self._batches = start(at["source"])
        self._before = self._batches.get_state()
        self._batch: Any = None
        self._rows = self._used = 0
        if at["used"]:
            self._pull()
            if at["used"] >= self._rows:
                raise ValueError(
                    f"The state is that of another dataset: {at['used']} rows of a "
                    f"batch were used, and that batch has {self._rows} here."
                )
            self._used = at["used"]

    def _pull(self) -> bool:
        """Takes the next given batch; returns whether there was one."""
        self._before = self._batches.get_state()
        for batch in self._batches:
            self._batch = as_host_batch(batch)
            self._rows, self._used = batch_rows(self._batch), 0
            return True
        return False

    def __next__(self) -> Any:
        wanted = self._sizes[self._turn % len(self._sizes)]
        parts, missing = [], wanted
        while True:
            if self._used == self._rows and not self._pull():
                break
            rows = slice(self._used, min(self._rows, self._used + missing))
            # Copied: the next given batch may be made in the memory of this one.
            parts.append(
                jax.tree.map(lambda x, rows=rows: take_rows(x, rows), self._batch)
            )
            self._used = rows.stop
            missing -= rows.stop - rows.start
            if not missing:
                break
        if not parts or (missing == wanted and wanted):
            raise StopIteration
        self._turn += 1
        return parts[0] if len(parts) == 1 else join_batches(parts)

    def get_state(self) -> Any:
        """Which given batch the next row is of, and how many of its rows are used."""
        whole = self._used == self._rows
        return {
            "turn": self._turn,
            "used": 0 if whole else self._used,
            "source": self._batches.get_state() if whole else self._before,
        }

    def close(self) -> None:
        """Closes the given batches."""
        close(self._batches)


def rebatched(source: Source, rows: int) -> Source:
    """Returns the rows of a source in batches of another size.

    Args:
      source: The given batches.
      rows: Rows a batch, at least 1. The last one has what is left.

    Returns:
      The source of the new batches, which may cross the given ones and their epochs.
    """

    def peek() -> Iterator[Any]:
        return Rebatched(lambda _: Counted(lambda: looked_at(source)), [rows], None)

    new = Source(
        start=lambda state: Rebatched(source.start, [rows], state),
        peek=None if source.peek is None else peek,
        batch_size=rows,
        private=True,
    )
    if source.sizes is None:
        return new
    total = sum(size * batches for size, batches in source.sizes.items())
    if source.num_epochs is None:
        sizes = {rows: 1} if total else {}
        return dataclasses.replace(new, sizes=sizes, num_epochs=None)
    full, rest = divmod(total * source.num_epochs, rows)
    sizes = {rows: full, rest: 1 if rest else 0}
    return dataclasses.replace(new, sizes={n: k for n, k in sizes.items() if k})
