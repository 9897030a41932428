"""Options of a single ``strategy.run`` call."""

from __future__ import annotations

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How ``strategy.run`` treats its arguments.

    Attributes:
      donate: Arguments that the step may consume: a position in ``args``, or a tuple
        of positions in ``args`` and names in ``kwargs``. The memory of their arrays is
        reused for outputs. Arrays that an earlier donating run returned are consumed
        and must not be used afterwards, as in ``jax.jit``; all others, and those
        whose shards somebody holds, are copied first, so the caller's originals
        survive the first step of a loop. Random keys are never consumed.
      allow_divergence: Accepts per-replica values where an earlier call of the same
        function had a mirrored one, as in local SGD. Otherwise this raises
        ``ReplicaDivergenceError``.
      check_values: Compares the copies of every mirrored argument bit for bit before
        the step, and raises ``ReplicaDivergenceError`` naming those that differ. Reads
        all of them: for finding faults, not for every step.

    Raises:
      TypeError: ``donate`` is not an int, a name, or a tuple of those.

    Example:
      >>> import replicax as rx
      >>> rx.RunOptions(donate=0).donate
      (0,)
    """

    donate: int | str | tuple[int | str, ...] = ()
    allow_divergence: bool = False
    check_values: bool = False

    def __post_init__(self) -> None:
        donate = self.donate
        if isinstance(donate, (int, str)) and not isinstance(donate, bool):
            donate = (donate,)
        if not isinstance(donate, (tuple, list)) or not all(
            isinstance(d, (int, str)) and not isinstance(d, bool) for d in donate
        ):
            raise TypeError(
                "donate names arguments: a position in args, a name in kwargs, or a "
                f"tuple of those. Got {self.donate!r}."
            )
        object.__setattr__(self, "donate", tuple(dict.fromkeys(donate)))

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """What makes a call with these options another call."""
        return self.donate, self.allow_divergence
