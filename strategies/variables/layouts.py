"""How a variable lies on the devices of its strategy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from ..assertion import assert_mirrored
from ..placement import Placer, as_array
from ..state_sharding import ShardLayout, all_gather, shard_layout


class Layout:
    """One copy on each device, all of them equal.

    Args:
      placer: Places values on the strategy's devices.
      is_local: Whether a replica's writes concern itself only.

    Attributes:
      is_stacked: Whether the array has a row for each replica.
      varies: Whether a replica may hold something else than the others.
      is_direct: Whether programs take the array as it lies.
      needs_aggregation: Whether a step's write must be aggregated.
    """

    is_stacked = False
    is_direct = True
    needs_aggregation = False

    def __init__(self, placer: Placer, is_local: bool = False):
        self.placer = placer
        self.is_local = self.varies = is_local
        self.sharding = placer.replicated

    # -- between steps ---------------------------------------------------------------

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

    def of_whole(self, value: Any) -> Any:
        """Makes the array that says that the value of all replicas is ``value``."""
        return value

    def to_whole(self, array: Any) -> Any:
        """The value of all replicas that an array says; :meth:`of_whole` backwards."""
        return array

    def enter(self, array: jax.Array) -> jax.Array:
        """What programs take for the array."""
        return array

    def leave(self, array: jax.Array) -> jax.Array:
        """What to keep of the array that a program returned."""
        return array

    # -- inside of a step ------------------------------------------------------------

    def opened(self, own: Any) -> Any:
        """The value that a replica reads, of what it holds."""
        return own

    def closed(self, value: Any) -> Any:
        """What a replica is to hold, of the value that it writes."""
        return value


class StackedLayout(Layout):
    """A row of its own on each replica's device.

    Args:
      placer: Places values on the strategy's devices.
    """

    is_stacked = True

    def __init__(self, placer: Placer):
        super().__init__(placer, is_local=True)
        self.sharding = placer.per_replica

    def of_whole(self, value: Any) -> Any:
        """Repeats ``value`` for each replica."""
        return jnp.broadcast_to(value, (self.placer.num_replicas, *jnp.shape(value)))


class ShardedLayout(Layout):
    """A slice on each replica's device: the whole is there once.

    A step that reads the value gathers the slices of all replicas.

    Args:
      placer: Places values on the strategy's devices.
      shape: The shape of the whole.
      dtype: Its dtype.
    """

    is_stacked = True

    def __init__(self, placer: Placer, shape: tuple[int, ...], dtype: Any):
        super().__init__(placer)
        self.varies = True
        self.sharding = placer.per_replica
        self.slices = shard_layout(shape, dtype, placer.num_replicas)

    def of_whole(self, value: Any) -> Any:
        """Cuts the value into slices."""
        return self.slices.to_shards(value)

    def to_whole(self, array: Any) -> Any:
        """Joins the slices."""
        if isinstance(array, jax.core.Tracer):
            return self.slices.from_shards(array)
        return _joined(self.slices, self.placer.replicated, array)

    def opened(self, own: Any) -> Any:
        """Gathers the slices of all replicas."""
        axis_name = self.placer.axis_name
        return all_gather([own], [self.slices], axis_name)[0]

    def closed(self, value: Any) -> Any:
        """Keeps this replica's slice of a value that must be the same on all."""
        replica_id = jax.lax.axis_index(self.placer.axis_name)
        return self.slices.own_slice(assert_mirrored(value), replica_id)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _joined(slices: ShardLayout, sharding: Any, array: jax.Array) -> jax.Array:
    whole = slices.from_shards(array)
    return jax.lax.with_sharding_constraint(whole, sharding)
