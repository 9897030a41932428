"""How ``strategy.reduce`` combines values across devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.values import DistributedValues, PerReplica, ReduceOp

from . import collectives
from .communication import DEFAULT, CommunicationOptions
from .compression import is_worth_it
from .devices import resolve_device


class CrossDeviceOps:
    """Combines per-replica values across devices: an all-reduce that XLA plans.

    ``MirroredStrategy(cross_device_ops=...)`` uses it for ``reduce`` and
    ``extended.reduce_to``. A subclass overrides :meth:`accumulate`. Collectives inside
    a step (``all_reduce`` and kin) are always XLA's.

    Example:
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> x = strategy.experimental_distribute_values_from_function(
      ...     lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
      >>> float(rx.CrossDeviceOps().reduce("sum", x, destinations="cpu:1"))
      3.0
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> jax.Array:
        """Combines a per-replica value.

        Args:
          reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN`` or their names.
          per_replica_value: A placed per-replica value.
          destinations: Where the result shall lie: a device or its name for one plain
            array there, or a value whose devices are meant, for a mirrored array.
          options: Their ``compression`` and ``accumulate_dtype`` are used.

        Returns:
          The reduced array.

        Raises:
          TypeError: ``per_replica_value`` is no PerReplica, or not numeric.
          PerReplicaError: Its components were given by hand and never placed.
          ValueError: ``destinations`` is none of the above.
        """
        op = ReduceOp.of(reduce_op)
        if not isinstance(per_replica_value, PerReplica):
            raise TypeError(
                f"reduce needs a PerReplica. Got {type(per_replica_value).__name__}."
            )
        check_destinations(destinations)
        options = DEFAULT.merge(options)
        return self._send(self._reduce(op, per_replica_value, options), destinations)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[jax.Array]:
        """Combines several values; see :meth:`reduce`.

        Args:
          reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN`` or their names.
          value_destination_pairs: Pairs of a value and its destinations.
          options: As in :meth:`reduce`.

        Returns:
          The reduced arrays, in order.
        """
        return [
            self.reduce(reduce_op, v, d, options) for v, d in value_destination_pairs
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> jax.Array:
        """Copies an array to all devices of ``destinations``.

        Args:
          tensor: An array or number.
          destinations: As in :meth:`reduce`.

        Returns:
          The array, mirrored on those devices.

        Raises:
          ValueError: ``destinations`` is no device or value.
        """
        check_destinations(destinations)
        return self._send(jnp.asarray(tensor), destinations)

    def accumulate(self, value: PerReplica) -> jax.Array:
        """Sums the components of a value: what a subclass overrides.

        Args:
          value: A per-replica value.

        Returns:
          One array, on any devices.
        """
        sharding = value.array.sharding
        assert isinstance(sharding, NamedSharding)
        return jax.block_until_ready(_all_reduce(sharding.mesh, value.array))

    def _reduce(
        self, op: ReduceOp, value: PerReplica, options: CommunicationOptions
    ) -> jax.Array:
        def summand(x: jax.Array) -> jax.Array:
            dtype = x.dtype
            x = collectives.for_sum(x, op, options.accumulate_dtype)
            size = math.prod(value.shape)
            if options.compression is None or not is_worth_it(dtype, x.dtype, size):
                return x
            short = x.astype(jnp.bfloat16)
            return short if options.accumulate_dtype is None else short.astype(x.dtype)

        if value.is_stacked:
            summands = PerReplica.from_array(summand(value.array))
        else:
            summands = PerReplica([summand(jnp.asarray(p)) for p in value.values])
        total = self.accumulate(summands)
        return collectives.after_sum(total, op, value.num_replicas, value.dtype)

    def _send(self, x: jax.Array, destinations: Any) -> jax.Array:
        if isinstance(destinations, (str, jax.Device)):
            return jax.device_put(x, resolve_device(destinations))
        if isinstance(destinations, PerReplica):
            sharding = destinations.array.sharding
        elif isinstance(destinations, jax.Array):
            sharding = destinations.sharding
        else:
            sharding = None
        if isinstance(sharding, NamedSharding):
            return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))
        return x if sharding is None else jax.device_put(x, sharding)


@functools.partial(jax.jit, static_argnums=0)
def _all_reduce(mesh: Mesh, rows: jax.Array) -> jax.Array:
    (axis_name,) = mesh.axis_names
    return jax.shard_map(
        lambda row: collectives.psum(row[0], axis_name, mesh.size),
        mesh=mesh,
        in_specs=PartitionSpec(axis_name),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(rows)


class NcclAllReduce(CrossDeviceOps):
    """TF's name for an all-reduce by NCCL, which is what XLA uses on NVIDIA GPUs.

    Args:
      num_packs: Accepted for TF's signature: XLA decides how to pack.

    Raises:
      ValueError: ``num_packs`` is negative.
    """

    def __init__(self, num_packs: int = 1):
        if num_packs < 0:
            raise ValueError(f"num_packs must not be negative. Got {num_packs}.")
        self.num_packs = num_packs


class HierarchicalCopyAllReduce(NcclAllReduce):
    """TF's name for an all-reduce along a tree of copies.

    XLA chooses the algorithm from the machine's topology, so this is the same
    all-reduce as the others.

    Args:
      num_packs: Accepted for TF's signature: XLA decides how to pack.

    Raises:
      ValueError: ``num_packs`` is negative.
    """


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all components to one device, combines them there, and copies back.

    Deterministic in its order (that of the replicas), and without collectives.

    Args:
      reduce_to_device: The device or its name; default: the first replica's.
      accumulation_fn: Combines a list of arrays into one; default: their sum.

    Example:
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> ops = rx.ReductionToOneDevice(
      ...     accumulation_fn=lambda xs: jnp.max(jnp.stack(xs)))
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
      >>> x = strategy.experimental_distribute_values_from_function(
      ...     lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
      >>> float(strategy.reduce("sum", x))
      2.0
    """

    def __init__(
        self,
        reduce_to_device: jax.Device | str | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ):
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn or _add_all

    def accumulate(self, value: PerReplica) -> jax.Array:
        """Combines the components on the one device, without dividing.

        Args:
          value: A per-replica value.

        Returns:
          What ``accumulation_fn`` makes of the components. In a ``jax.jit``, where
          arrays have no device yet, XLA chooses the place.
        """
        parts = value.values
        if any(isinstance(p, jax.core.Tracer) for p in parts):
            return self.accumulation_fn(list(parts))
        if self.reduce_to_device is not None:
            device = resolve_device(self.reduce_to_device)
        elif isinstance(parts[0], jax.Array):
            device = next(iter(parts[0].devices()))
        else:
            device = None
        return self.accumulation_fn([jax.device_put(p, device) for p in parts])


def _add_all(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def check_destinations(destinations: Any) -> None:
    """Raises unless ``destinations`` says where a result shall lie.

    Raises:
      ValueError: It is no device, device name, array or distributed value.
    """
    if not isinstance(destinations, (str, jax.Device, jax.Array, DistributedValues)):
        raise ValueError(
            "destinations must be a device, its name, or a value whose devices are "
            f"meant. Got {destinations!r}."
        )
