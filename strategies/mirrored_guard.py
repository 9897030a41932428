"""State that came in mirrored must not come back per-replica.

State that a caller carries through a step, such as a tuple of parameters, is not known
to be state. What can be known is that an argument was the same on all replicas at one
call of a function and differs at a later one: then the replicas have drifted apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from replicax.errors import ReplicaDivergenceError, listed

from .arguments import Kind, Leaf
from .merge import is_per_replica
from .tables import drop_oldest


class _Seen(NamedTuple):
    """The arguments of a function, by how they came in at some call of it.

    Attributes:
      mirrored: The names of those that were mirrored.
      per_replica: The names of those that were not, and were no data.
    """

    mirrored: set[str]
    per_replica: set[str]


class MirroredGuard:
    """Remembers which arguments of which functions were mirrored."""

    def __init__(self) -> None:
        self._seen: dict[Any, _Seen] = {}
        self._lock = threading.Lock()

    def check(
        self,
        fn: Callable[..., Any],
        fn_key: Any,
        leaves: Sequence[Leaf],
        arguments: Any,
        allow_divergence: bool,
    ) -> bool:
        """Notes what is mirrored in a call, and refuses what was once.

        Args:
          fn: The function.
          fn_key: Its code: what it captures may change from step to step.
          leaves: How each flattened argument enters.
          arguments: ``(args, kwargs)``.
          allow_divergence: Whether to refuse nothing.

        Returns:
          Whether an earlier call, which was fine then, must be looked at again.

        Raises:
          ReplicaDivergenceError: An argument was mirrored before and is not now. Data
            are not meant: what a dataset or a ``value_fn`` made may be either.
        """
        with self._lock:
            seen = self._seen.setdefault(fn_key, _Seen(set(), set()))
            drop_oldest(self._seen)
        values = jax.tree.leaves(arguments, is_leaf=is_per_replica)
        known, diverged = len(seen.mirrored & seen.per_replica), []
        for leaf, value in zip(leaves, values, strict=True):
            if leaf.kind in (Kind.MIRRORED, Kind.NUMBER):
                seen.mirrored.add(leaf.name)
            elif leaf.kind is Kind.PER_REPLICA and not value.is_data:
                seen.per_replica.add(leaf.name)
                if leaf.name in seen.mirrored:
                    diverged.append(leaf.name)
        if diverged and not allow_divergence:
            raise ReplicaDivergenceError(
                f"{getattr(fn, '__qualname__', repr(fn))} got a mirrored value at an "
                f"earlier call and a PerReplica now for: {listed(diverged, ', ')}. "
                "If this is state that the step returned, its replicas have drifted "
                "apart: combine what makes it differ, such as gradients "
                "or statistics of its batches, with "
                "`rx.get_replica_context().all_reduce('mean', ...)`. If it is data, or "
                "replicas are meant to hold different values here, pass "
                "`options=rx.RunOptions(allow_divergence=True)`."
            )
        return len(seen.mirrored & seen.per_replica) > known
