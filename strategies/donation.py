"""Donating arguments without destroying what was not donated.

JAX reuses the memory of a donated array, and on some versions crashes when that memory
is in use elsewhere: by the same array in another argument, or by another array that
was made without copying. What came out of an earlier donating run is known to be free
of that, unless it was shared since; all else is copied before it is donated.

What is known of an array is noted on the array itself, and so ends with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_leaves

from replicax.errors import ConsumedArgumentError, listed

from .arguments import Leaf

_clock = itertools.count(1)

_BORN = "_replicax_born"
"""Set on what came out of a donating run: when."""

_APART = "_replicax_apart"
"""Set on what was found to share no memory with arrays about to be donated: when.

It never will with what comes out of later runs.
"""


class Donor:
    """Donates some of the arrays of a program.

    Args:
      arrays: How each array enters.
      donated: The positions of those that are donated.
      treedef: The structure of ``(args, kwargs)``, if they are arrays only.
      num_replicas: The number of replicas.
    """

    def __init__(
        self,
        arrays: Sequence[Leaf],
        donated: Sequence[int],
        treedef: Any,
        num_replicas: int,
    ):
        self._arrays = arrays
        # Flattened apart, because most calls have no keyword arguments.
        self._args, self._kwargs, self._has_kwargs = None, None, False
        if treedef is not None:
            self._args, self._kwargs = treedef.children()
            self._has_kwargs = self._kwargs.num_leaves > 0
        self._donated = donated
        self._num_replicas = num_replicas
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
        together = not all(_set_apart(arrays[i], donated) for i in self._may_share)
        for i in self._donated:
            x = arrays[i]
            if together or id(x) in seen or vars(x).pop(_BORN, None) is None:
                arrays[i] = x.copy()
            seen.add(id(x))

    def take(self, args: Any, kwargs: Any) -> Sequence[Any] | None:
        """Takes the donated arrays, if they are known to be free.

        Args:
          args: Positional arguments, as the caller gave them.
          kwargs: Keyword arguments, likewise.

        Returns:
          The arrays, as :meth:`prepare` would leave them. None if they are not free, or
          of another structure; some may be known no longer then, and will be copied.
        """
        arrays, treedef = tree_flatten(args)
        if treedef != self._args:
            return None
        if kwargs or self._has_kwargs:
            more, treedef = tree_flatten(kwargs)
            if treedef != self._kwargs:
                return None
            arrays += more
        if len({*map(id, arrays)}) < len(arrays):
            return None
        try:
            born = [arrays[i].__dict__.pop(_BORN) for i in self._donated]
        except (KeyError, AttributeError):
            return None
        if self._may_share and not self._lie_apart(arrays, min(born)):
            return None
        return arrays

    def _lie_apart(self, arrays: Sequence[Any], oldest: int) -> bool:
        """Whether kept arrays were looked at before the oldest donated one was born."""
        return all(getattr(arrays[i], _APART, oldest) < oldest for i in self._may_share)

    @staticmethod
    def own(outputs: Any) -> None:
        """Notes that ``outputs`` just came out of a donating run."""
        now = next(_clock)
        for x in tree_leaves(outputs):
            x._replicax_born = now

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
        return [
            i
            for i in self._kept
            if isinstance(arrays[i], jax.Array)
            and not sizes.isdisjoint(
                (arrays[i].nbytes, arrays[i].nbytes // self._num_replicas)
            )
        ]


def _set_apart(x: jax.Array, others: Sequence[jax.Array]) -> bool:
    """Looks whether ``x`` shares memory with other arrays, on any device."""
    mine = _addresses(x)
    if any(not mine.isdisjoint(_addresses(other)) for other in others):
        return False
    setattr(x, _APART, next(_clock))
    return True


def _addresses(x: jax.Array) -> set[int]:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
