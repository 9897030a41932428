"""What happens to the Variables of Flax nnx objects in a step, by their kind.

* ``RngState``: keys are folded with the replica's id for the call, so that dropout
  differs per replica; the keys that are written back do not.
* ``BatchStat``: averaged over replicas.
* the states of one ``Metric``: combined together (:mod:`.nnx_metrics`).
* all else (``Param``, optimizer state, ...): must be proved mirrored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from . import collectives, nnx_metrics
from .placement import is_key
from .state import StateWrite

if TYPE_CHECKING:
    from .strategy import Strategy


def is_variable(x: Any) -> bool:
    """Whether ``x`` is an nnx Variable; for ``is_leaf``."""
    return isinstance(x, nnx.Variable)


def is_object(x: Any) -> bool:
    """Whether ``x`` is an nnx object; for ``is_leaf``."""
    return isinstance(x, (nnx.Variable, nnx.Pytree, nnx.Module))


@dataclasses.dataclass(frozen=True)
class Slot:
    """One Variable among the leaves of a call.

    Attributes:
      leaf: Its position among all flattened arguments.
      input: Its position among those that are arrays; None for a new one.
      name: What to call it.
      kind: Its Variable type.
      metric: The path and type of the Metric that owns it, or None.
      donated: Whether the step may consume it.
    """

    leaf: int
    input: int | None
    name: str
    kind: type
    metric: tuple[str, type] | None
    donated: bool

    def write(self, new: Any, in_step: Any = None) -> StateWrite:
        """The record of writing ``new`` to it, where ``in_step`` stood for it."""
        averaged = issubclass(self.kind, nnx.BatchStat)
        return StateWrite(
            name=self.name,
            new=new,
            input=self.input,
            must_be_mirrored=self.metric is None and not averaged,
            average=averaged,
            group=self.metric,
            kept=in_step if issubclass(self.kind, nnx.RngKey) else None,
        )


def fold_keys(leaves: list[Any], slots: Sequence[Slot], strategy: Strategy) -> None:
    """Gives each replica rng keys of its own, in place, for the length of a call."""
    for slot in slots:
        if issubclass(slot.kind, nnx.RngKey):
            replica_id = jax.lax.axis_index(strategy.axis_name)
            leaves[slot.leaf] = _fold_in(leaves[slot.leaf], replica_id)


def _fold_in(keys: jax.Array, data: jax.Array) -> jax.Array:
    fold = jax.random.fold_in
    for _ in range(keys.ndim if is_key(keys) else keys.ndim - 1):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, data)


@dataclasses.dataclass(frozen=True)
class NnxLift:
    """What both ways share.

    Attributes:
      slots: The Variables among the arguments.
    """

    slots: tuple[Slot, ...]

    def settle(
        self,
        jaxpr: Any,
        writes: Sequence[StateWrite],
        values: Sequence[Any],
        varies: Sequence[bool],
        inputs: Sequence[Any],
        strategy: Strategy,
    ) -> list[Any]:
        """Combines over replicas the written values that may vary."""
        settled = list(values)
        averaged = [i for i, w in enumerate(writes) if w.average and varies[i]]
        means = collectives.all_reduce(
            "mean",
            [settled[i] for i in averaged],
            strategy.axis_name,
            strategy.num_replicas_in_sync,
        )
        for i, mean in zip(averaged, means, strict=True):
            settled[i] = mean.astype(settled[i].dtype)
        states = [
            slot.input
            for slot in self.slots
            if slot.input is not None and issubclass(slot.kind, nnx.metrics.MetricState)
        ]
        nnx_metrics.settle(
            jaxpr, writes, settled, varies, inputs, states, strategy.axis_name
        )
        return settled
