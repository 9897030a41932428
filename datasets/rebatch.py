"""Batches of other sizes, made of the rows of given ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .batches import as_host_batch, batch_rows, join_batches
from .sources import Batches, close


class Rebatched(Iterator[Any]):
    """Goes through the rows of batches in batches of other sizes.

    The sizes repeat. A batch may hold rows of several given ones; the last one has what
    is left. A size of 0 yields a batch without rows. The rule is that of
    ``tf.data.Dataset.rebatch``.

    Args:
      start: Starts the given batches: anew for ``None``, or from a state of theirs on.
      sizes: Rows a batch, in turn.
      state: What ``get_state`` returned, or ``None``.
    """

    def __init__(
        self, start: Callable[[Any], Batches], sizes: Sequence[int], state: Any
    ):
        self._sizes = sizes
        self._turn = 0 if state is None else state["turn"]
        self._batches = start(None if state is None else state["source"])
        self._before = self._batches.get_state()
        self._batch: Any = None
        self._rows = self._used = 0
        if state is not None and state["used"]:
            self._pull()
            self._used = state["used"]

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
            end = min(self._rows, self._used + missing)
            own = slice(self._used, end)
            parts.append(jax.tree.map(lambda leaf, own=own: leaf[own], self._batch))
            missing -= end - self._used
            self._used = end
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
