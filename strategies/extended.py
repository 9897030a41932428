"""``strategy.extended``: what code that builds on strategies needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from replicax.values import ReduceOp

from .communication import CommunicationOptions
from .context import (
    cross_replica,
    get_replica_context,
    get_strategy,
    in_merge_call,
    require_cross_replica,
)
from .cross_device_ops import check_destinations
from .merge import (
    TracedPerReplica,
    component_for_replica,
    is_per_replica,
    join_replicas,
)
from .placement import stack
from .variables.frames import is_variable
from .variables.variable import Variable

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

    # -- variables -------------------------------------------------------------------

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls a function that updates a variable, where each copy of it lies.

        The function is traced once for all copies. Writes in it are not aggregated: it
        gets what the others passed by way of the arguments, for example a reduced
        gradient. A copy that would become different from the others is refused.

        Args:
          var: A variable of this strategy.
          fn: Called as ``fn(var, *args, **kwargs)``; per-replica values among the
            arguments arrive as the component that belongs to the copy.
          args: Positional arguments.
          kwargs: Keyword arguments.
          group: Whether to return one value rather than a tuple of local results.

        Returns:
          What ``fn`` returns. In a step, or without ``group``, this replica's or a
          tuple of all of this process's.

        Raises:
          TypeError: ``var`` is no variable.
          ReplicaDivergenceError: The copies would become different.
          ContextError: In another strategy's scope.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> with strategy.scope():
          ...     w = rx.Variable(1.0)
          >>> gradients = rx.PerReplica([1.0, 2.0])
          >>> total = strategy.extended.reduce_to("sum", gradients, w)
          >>> _ = strategy.extended.update(
          ...     w, lambda w, g: w.assign_sub(0.1 * g), args=(total,))
          >>> round(float(w), 4)
          0.7
        """
        if not is_variable(var):
            raise TypeError(f"update needs an rx.Variable. Got {type(var).__name__}.")
        return self._updated("update", fn, (var, *args), kwargs, group)

    def _updated(
        self, call: str, fn: Any, args: Sequence[Any], kwargs: Any, group: bool
    ) -> Any:
        given = tuple(args), dict(kwargs or {})
        context = get_replica_context()
        if context is not None and context.is_traced:
            return context.merge_call(_update_in_step, (fn, given))
        require_cross_replica(self._strategy, call, "it in a scope")
        if in_merge_call():
            out = _update_in_step(self._strategy, fn, given)
        else:
            out = self._strategy.run(_update, (fn, *given))
        return out if group else self._of_each_copy(out)

    def _of_each_copy(self, out: Any) -> tuple[Any, ...]:
        """The result for each copy, also where all copies have the same."""
        # Of a structure, plain leaves are repeated; of a leaf alone they are not.
        return tuple(x for (x,) in self._strategy.experimental_local_results((out,)))

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls a function where state lies that belongs to no variable.

        Args:
          colocate_with: Accepted for TF's signature: it lies on all replicas' devices.
          fn: Called as ``fn(*args, **kwargs)``; see :meth:`update`.
          args: Positional arguments.
          kwargs: Keyword arguments.
          group: As in :meth:`update`.

        Returns:
          As :meth:`update`.
        """
        del colocate_with
        return self._updated("update_non_slot", fn, args, kwargs, group)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[jax.Device, ...]:
        """Returns the devices of state that belongs to none of the variables."""
        del var_list
        return self.parameter_devices

    def read_var(self, v: Variable) -> Any:
        """Returns a variable's value; see ``Variable.read_value``."""
        return v.read_value()

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether ``v`` is a variable that was made in this strategy's scope."""
        return is_variable(v) and v.belongs_to(self._strategy)

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """In its ``with``, variables are made where another one lies.

        All variables of this strategy lie on all its devices, so there is only to be
        checked that the other one is of this strategy.

        Raises:
          ValueError: It is not.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "colocate_vars_with needs a variable that was made in this strategy's "
                f"scope. Got {colocate_with_variable!r}."
            )
        return contextlib.nullcontext()


def _update_in_step(strategy: Any, fn: Any, given: Any) -> Any:
    """Calls an updating function while a step is traced around us."""
    args, kwargs = component_for_replica(given, strategy)
    with cross_replica(strategy, is_updating=True):
        return join_replicas(fn(*args, **kwargs), strategy)


def _update(fn: Any, args: Any, kwargs: Any) -> Any:
    """The step that calls an updating function, from between steps."""
    with cross_replica(get_strategy(), is_updating=True):
        return fn(*args, **kwargs)
