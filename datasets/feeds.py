"""What the replicas of one process are fed with, step by step, on the host.

A *feed* makes of a user's batches the *rounds* of the replicas: host batches whose rows
divide by the number of replicas here, so that replica ``r`` gets the ``r``-th of that
many equal, consecutive parts. There are two: ``split_feed`` divides global batches,
``dealt_feed`` deals out batches that are made for one replica each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from .sources import Batches, Source


class Feed(Protocol):
    """What the replicas of one process are fed with."""

    @property
    def cardinality(self) -> int:
        """The rounds of one iteration, or a constant of ``sources``."""
        ...

    def start(self, state: Any = None) -> Batches:
        """Starts an iteration: the next one, or from a state on."""
        ...

    def peek(self) -> Iterator[Any]:
        """Starts an iteration that does not count, to look at the first round."""
        ...


def looked_at(source: Source) -> Iterator[Any]:
    """Starts an iteration over a source that does not count.

    Raises:
      ValueError: To look at a batch would take it.
    """
    if source.peek is None:
        raise ValueError(
            "The shapes of a dataset that is made from an iterator are not known: "
            "looking at its first batch would take it. Pass a generator function or a "
            "list."
        )
    return source.peek()
