"""How a variable lies on the devices of its strategy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..placement import Placer, as_array


class Layout:
    """One copy on each device, all of them equal.

    Args:
      placer: Places values on the strategy's devices.
      is_local: Whether a replica's writes concern itself only.

    Attributes:
      is_stacked: Whether the array has a row for each replica.
      is_direct: Whether programs take the array as it lies.
      needs_aggregation: Whether a step's write must be aggregated.
    """

    is_stacked = False
    is_direct = True
    needs_aggregation = False

    def __init__(self, placer: Placer, is_local: bool = False):
        self.placer = placer
        self.is_local = is_local
        self.sharding = placer.replicated

    def born(self, value: Any) -> jax.Array:
        """Lays out a copy of ``value`` that shares no memory with it.

        Args:
          value: The value of all replicas; or a row for each, if the array is stacked.
        """
        with jax.ensure_compile_time_eval():
            return self.placer.copy(jax.device_put(as_array(value), self.sharding))

    def traced(self, value: Any) -> Any:
        """Lays out a traced value, outside of a step."""
        return jax.lax.with_sharding_constraint(value, self.sharding)

    def whole(self, value: Any) -> Any:
        """Makes the array that says that all replicas hold ``value``."""
        return value

    def enter(self, array: jax.Array) -> jax.Array:
        """What programs take for the array."""
        return array

    def leave(self, array: jax.Array) -> jax.Array:
        """What to keep of the array that a program returned."""
        return array


class StackedLayout(Layout):
    """A row of its own on each replica's device.

    Args:
      placer: Places values on the strategy's devices.
    """

    is_stacked = True

    def __init__(self, placer: Placer):
        super().__init__(placer, is_local=True)
        self.sharding = placer.per_replica

    def whole(self, value: Any) -> Any:
        """Repeats ``value`` for each replica."""
        return jnp.broadcast_to(value, (self.placer.num_replicas, *jnp.shape(value)))
