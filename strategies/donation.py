"""Donating arguments without destroying what was not donated.

JAX reuses the memory of a donated array, and on some versions crashes when that memory
is in use elsewhere: by the same array in another argument, or by another array that
was made without copying. What came out of an earlier donating run is known to be free
of that, unless it was shared since; all else is copied before it is donated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax.errors import ConsumedArgumentError, listed

from .arguments import Leaf

if TYPE_CHECKING:
    from .placement import Placer


class Donor:
    """Donates some of the arrays of a program.

    Args:
      placer: Knows which arrays are free to be donated.
      arrays: How each array enters.
      donated: The positions of those that are donated.
    """

    def __init__(self, placer: Placer, arrays: Sequence[Leaf], donated: Sequence[int]):
        self._placer = placer
        self._arrays = arrays
        self._donated = donated
        self._kept = sorted(set(range(len(arrays))) - set(donated))
        self._may_share: list[int] = []

    def prepare(self, arrays: list[Any]) -> None:
        """Replaces, in place, donated arrays by copies where somebody needs them.

        Args:
          arrays: The arrays, placed.

        Raises:
          ConsumedArgumentError: One was consumed by an earlier run.
        """
        self._refuse_consumed(arrays)
        self._may_share = sorted({*self._may_share, *self._alike(arrays)})
        seen = {id(arrays[i]) for i in self._kept}
        donated = [arrays[i] for i in self._donated]
        together = not all(
            self._placer.set_apart(arrays[i], donated) for i in self._may_share
        )
        for i in self._donated:
            x = arrays[i]
            if together or id(x) in seen or not self._placer.owns(x):
                arrays[i] = x.copy()
            seen.add(id(x))

    def take(self, arrays: Sequence[Any]) -> bool:
        """Takes the donated arrays, if they are known to be free.

        Returns:
          Whether the arrays are as :meth:`prepare` would leave them. If not, some may
          be known no longer, and will be copied.
        """
        if len(set(map(id, arrays))) < len(arrays):
            return False
        disown = self._placer.disown
        runs = [disown(arrays[i]) for i in self._donated]
        if not all(runs):
            return False
        oldest = min(runs)
        return all(self._placer.is_apart(arrays[i], oldest) for i in self._may_share)

    def _refuse_consumed(self, arrays: Sequence[Any]) -> None:
        gone = [
            leaf.name
            for x, leaf in zip(arrays, self._arrays, strict=True)
            if isinstance(x, jax.Array) and x.is_deleted()
        ]
        if gone:
            raise ConsumedArgumentError(
                f"Deleted arrays were passed as {listed(gone, ', ')}. An earlier run "
                "with RunOptions(donate=...) consumed them: use what that run returned."
            )

    def _alike(self, arrays: Sequence[Any]) -> list[int]:
        """The arrays that are kept and may lie in the memory of one that is donated.

        Two arrays can only if they are of one size, in whole (a mirrored array) or on
        each device.
        """
        sizes = {arrays[i].nbytes for i in self._donated}
        n = self._placer.num_replicas
        return [
            i
            for i in self._kept
            if isinstance(arrays[i], jax.Array)
            and not sizes.isdisjoint((arrays[i].nbytes, arrays[i].nbytes // n))
        ]
