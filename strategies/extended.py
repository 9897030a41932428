"""``strategy.extended``: what code that builds on strategies needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from replicax.values import ReduceOp

from .communication import CommunicationOptions
from .context import require_cross_replica
from .cross_device_ops import check_destinations
from .merge import TracedPerReplica, is_per_replica
from .placement import stack

if TYPE_CHECKING:
    from .strategy import Strategy


class StrategyExtended:
    """The lower-level methods of a strategy.

    Args:
      strategy: The strategy.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices that replicas of this process run on, in replica order."""
        return tuple(self._strategy.mesh.local_devices)

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that mirrored values of this process lie on."""
        return self.worker_devices

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a step on all replicas; the same as ``strategy.run``."""
        return self._strategy.run(fn, args, kwargs)

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines a per-replica value and puts the result where it is wanted.

        Args:
          reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN`` or their names.
          value: A per-replica value. A plain value is taken by a mean as it is.
          destinations: A device or its name, for one plain array there; or a value
            whose devices are meant, for a mirrored array. Inside ``merge_call`` the
            result is mirrored, whatever is named.
          options: How it is sent; what is not set here is as the strategy's
            ``communication_options`` say.

        Returns:
          The reduced array.

        Raises:
          ValueError: ``destinations`` is none of the above.
          PerReplicaError: The components have unequal shapes.
          ContextError: Called inside a step or in another strategy's scope.
        """
        require_cross_replica(
            self._strategy, "reduce_to", "get_replica_context().all_reduce()"
        )
        op = ReduceOp.of(reduce_op)
        check_destinations(destinations)
        if not is_per_replica(value) or isinstance(value, TracedPerReplica):
            return self._strategy.reduce(op, value, options=options)
        value = stack(value, self._strategy.placer)
        if is_per_replica(destinations) and not destinations.is_stacked:
            destinations = value  # what was given by hand goes to all replicas
        options = self._strategy.communication_options.merge(options)
        return self._strategy.cross_device_ops.reduce(op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several per-replica values; see :meth:`reduce_to`.

        Inside ``merge_call`` they are sent together, the small ones packed.

        Args:
          reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN`` or their names.
          value_destination_pairs: Pairs of a value and its destinations.
          options: As in :meth:`reduce_to`.

        Returns:
          The reduced arrays, in order.
        """
        traced = {}
        for i, (value, destinations) in enumerate(value_destination_pairs):
            if isinstance(value, TracedPerReplica):
                check_destinations(destinations)
                traced[i] = value
        if traced:
            traced = self._strategy.reduce(reduce_op, traced, options=options)
        return [
            traced[i]
            if i in traced
            else self.reduce_to(reduce_op, value, destinations, options)
            for i, (value, destinations) in enumerate(value_destination_pairs)
        ]

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """Mirrors an array on all replicas' devices.

        Args:
          tensor: An array. Python numbers are returned as they are, as in TF.
          destinations: None or a value of this strategy, for all its devices; or one
            device or its name.

        Returns:
          The mirrored array. A traced array is mirrored already and returned as it is.

        Raises:
          TypeError: ``tensor`` is a PerReplica.
          ValueError: ``destinations`` is none of the above.
        """
        if is_per_replica(tensor):
            raise TypeError(
                "broadcast_to copies one array to all replicas. Got a PerReplica, "
                "which holds one for each: combine it first, for example with `reduce`."
            )
        if destinations is not None:
            check_destinations(destinations)
        if isinstance(tensor, (int, float, jax.core.Tracer)):
            return tensor
        if isinstance(destinations, (str, jax.Device)):
            return self._strategy.cross_device_ops.broadcast(tensor, destinations)
        return self._strategy.placer.mirrored(tensor)

    def value_container(self, value: Any) -> Any:
        """Returns the value that a component belongs to: here, the value itself."""
        return value
