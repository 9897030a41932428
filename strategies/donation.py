"""Donating arguments without destroying what was not donated.

JAX reuses the memory of a donated array, and on some versions crashes when that memory
is in use elsewhere: by the same array in another argument, or by another array that
was made without copying. What came out of an earlier donating run is free of that as
long as nobody looked at its shards; all else is copied before it is donated.

What is known of an array is noted on the array itself, and so ends with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from replicax import _compat

from .arguments import Kind, Leaf
from .placement import is_key

_clock = itertools.count(1)

_BORN = "_replicax_born"
"""Set on what came out of a donating run: when."""

_APART = "_replicax_apart"
"""Set on what was found to share no memory with an array about to be donated: when.

It never will with what comes out of later runs.
"""

_SHARED = "addressable_shards"
"""Set by JAX when the shards of an array were asked for, by the user or by JAX itself.

They are arrays of their own in the same memory, and would be consumed with it.
"""


class _Consumed:
    """Whether any array was consumed in this process, so that one may come back."""

    any = False


consumed = _Consumed()


def holds_deleted(tree: Any) -> bool:
    """Whether a pytree holds an array that was consumed or deleted.

    JAX must not be given one: on several devices it may crash the process.
    """
    for x in tree_leaves(tree):
        try:
            if x.is_deleted():
                return True
        except (AttributeError, jax.errors.ConcretizationTypeError):
            pass  # a number, a numpy array; or a tracer
    return False


class Donor:
    """Donates some of the arrays of a program.

    Args:
      arrays: How each array enters.
      donated: The positions of those that are donated.
      treedef: The structure of ``(args, kwargs)``, if they are arrays only.
      num_replicas: The number of replicas.
      copy: Copies an array.
    """

    def __init__(
        self,
        arrays: Sequence[Leaf],
        donated: Sequence[int],
        treedef: Any,
        num_replicas: int,
        copy: Callable[[jax.Array], jax.Array],
    ):
        self._arrays = arrays
        # Flattened apart, because most calls have no keyword arguments.
        if treedef is None:
            treedef = tree_structure(((), {}))
        self._args, self._kwargs = treedef.children()
        self._has_kwargs = self._kwargs != tree_structure({})
        self._donated = donated
        self._num_replicas = num_replicas
        self._copy = copy
        self._kept = sorted(set(range(len(arrays))) - set(donated))
        self._may_share: set[tuple[int, int]] = set()

    def prepare(self, arrays: list[Any], given: Sequence[Any]) -> None:
        """Replaces, in place, donated arrays by copies where somebody needs them.

        Args:
          arrays: The arrays, placed.
          given: The arrays as the caller passed them, who still holds them.
        """
        consumed.any = True
        self._may_share.update(self._alike(arrays))
        seen = {id(arrays[i]) for i in self._kept}
        together = not (self._lie_apart(arrays) and self._lie_apart(given))
        for i in self._donated:
            x = arrays[i]
            is_own = vars(x).pop(_BORN, None) is not None and _SHARED not in vars(x)
            if together or not is_own or id(x) in seen:
                arrays[i] = self._copy(x)
            seen.add(id(x))

    def take(self, args: Any, kwargs: Any) -> tuple[list[Any], list[int]] | None:
        """Takes the donated arrays, if they are known to be free.

        Args:
          args: Positional arguments, as the caller gave them.
          kwargs: Keyword arguments, likewise.

        Returns:
          The arrays, as :meth:`prepare` would leave them, and what is to be given back
          if they are not consumed after all. None if they are not free, or of another
          structure; some may be known no longer then, and will be copied.
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
            for x in arrays:
                if x.is_deleted():
                    return None
            if self._may_share and not self._lie_apart(arrays):
                return None
            known = [arrays[i].__dict__ for i in self._donated]
            for notes in known:
                if _SHARED in notes:
                    return None
            born = [notes.pop(_BORN) for notes in known]
        except (KeyError, AttributeError):
            return None
        return arrays, born

    def give_back(self, arrays: Sequence[Any], born: Sequence[int]) -> None:
        """Undoes :meth:`take`, for a launch that did not come about."""
        for i, when in zip(self._donated, born, strict=True):
            arrays[i]._replicax_born = when

    def _lie_apart(self, arrays: Sequence[Any]) -> bool:
        """Whether no kept array lies in the memory of one that is donated.

        What was looked at before the other one was born never will.
        """
        for k, d in self._may_share:
            kept, donated = arrays[k], arrays[d]
            try:
                if kept._replicax_apart < donated._replicax_born:
                    continue
            except AttributeError:
                pass
            if not _are_apart(kept, donated):
                return False
        return True

    @staticmethod
    def own(outputs: Any) -> None:
        """Notes that ``outputs`` just came out of a donating run."""
        now = next(_clock)
        for x in tree_leaves(outputs):
            x._replicax_born = now

    def _alike(self, arrays: Sequence[Any]) -> Iterator[tuple[int, int]]:
        """The pairs of a kept and a donated array that may lie in the same memory.

        They can only if they are of one size on a device.
        """
        for kept in self._kept:
            if isinstance(arrays[kept], jax.Array):
                size = self._size(kept, arrays)
                for donated in self._donated:
                    if self._size(donated, arrays) == size:
                        yield kept, donated

    def _size(self, i: int, arrays: Sequence[Any]) -> int:
        parts = self._num_replicas if self._arrays[i].kind is Kind.PER_REPLICA else 1
        return arrays[i].nbytes // parts


def _are_apart(kept: Any, donated: Any) -> bool:
    """Looks whether two arrays share no memory, on any device."""
    if not isinstance(kept, jax.Array) or not isinstance(donated, jax.Array):
        return True
    if not _addresses(kept).isdisjoint(_addresses(donated)):
        return False
    setattr(kept, _APART, next(_clock))
    return True


def _addresses(x: jax.Array) -> set[int]:
    if is_key(x):
        x = jax.random.key_data(x)
    return {part.unsafe_buffer_pointer() for part in _compat.parts_of(x)}
