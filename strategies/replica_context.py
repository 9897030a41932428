"""What a step sees of the other replicas: :class:`ReplicaContext`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.errors import ContextError
from replicax.values import ReduceOp

from . import collectives
from .communication import CommunicationOptions, chosen
from .compression import all_reduce_int8
from .context import cross_replica, in_replica, require_current
from .merge import component_for_replica, is_per_replica, join_replicas

if TYPE_CHECKING:
    from .strategy import Strategy


class ReplicaContext:
    """The replica that a step is traced for.

    Taken with :func:`replicax.get_replica_context` inside a function passed to
    ``strategy.run``. A step is traced once for all replicas, so the id is a traced
    value, and every collective is called by all replicas together.

    Args:
      strategy: The strategy.
      replica_id_in_sync_group: Fixes the replica's id. Leave it None inside ``run``.

    Example:
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> def step():
      ...     ctx = rx.get_replica_context()
      ...     return ctx.all_reduce("sum", ctx.replica_id_in_sync_group + 1)
      >>> int(strategy.run(step))
      3
    """

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int | None = None):
        if replica_id_in_sync_group is not None and not isinstance(
            replica_id_in_sync_group, (int, jax.Array)
        ):
            raise ValueError(
                "replica_id_in_sync_group must be an int, an array or None. Got "
                f"{replica_id_in_sync_group!r}."
            )
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        manager = in_replica(self)
        manager.__enter__()
        self._entered.append(manager)

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)

    def __repr__(self) -> str:
        which = "traced" if self._replica_id is None else self._replica_id
        return f"ReplicaContext({self._strategy!r}, replica {which})"

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._strategy

    @property
    def is_traced(self) -> bool:
        """Whether this is the context of a step, and not one made by hand."""
        return self._replica_id is None

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take part in collectives."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array | int:
        """This replica's id, an int32 scalar from 0 to ``num_replicas_in_sync - 1``.

        Traced inside ``run``: select with it (``jnp.where``, ``lax.cond``, indexing)
        instead of branching on it in Python.
        """
        if self._replica_id is not None:
            return self._replica_id
        require_current(self, "replica_id_in_sync_group")
        return lax.axis_index(self._strategy.axis_name)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process's replicas: all of them share one trace."""
        return self._strategy.extended.worker_devices

    # -- collectives -----------------------------------------------------------------

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        accumulate_dtype: Any = None,
    ) -> Any:
        """Combines a value over all replicas, element by element.

        All replicas must call it. Its gradient is the same all-reduce of the
        cotangents.

        Args:
          reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN`` or their names.
          value: A nested structure of this replica's arrays.
          options: How it is sent; what is not set here is as the strategy's
            ``communication_options`` say.
          accumulate_dtype: The dtype to sum in, for example ``jnp.float32`` for
            ``bfloat16`` values. Floats are returned in their own dtype, integers in
            this one.

        Returns:
          The same structure, proved equal on all replicas. A mean of integers is a
          float.

        Raises:
          TypeError: A leaf is bool or not numeric.
          ContextError: Called outside of this context's step.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def step(grads):
          ...     return rx.get_replica_context().all_reduce("mean", grads)
          >>> float(strategy.run(step, (rx.PerReplica([1.0, 2.0]),)))
          1.5
        """
        options = chosen(
            self._strategy.communication_options, options, accumulate_dtype
        )
        if self._is_alone("all_reduce"):
            return _alone(reduce_op, value)
        return collectives.all_reduce(
            reduce_op,
            value,
            self._strategy.axis_name,
            self.num_replicas_in_sync,
            options,
        )

    def all_reduce_int8(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        residual: Any = None,
        options: CommunicationOptions | None = None,
    ) -> tuple[Any, Any]:
        """Combines gradients that are sent as ``int8``, with error feedback.

        All replicas must call it. Each array is divided into 255 levels, whose distance
        the largest absolute value on any replica decides. The levels are added up as
        integers wide enough never to overflow, so the result is equal on all replicas
        to the bit. What rounding took away is the residual. The caller keeps it and
        hands it to the next call, which adds it to its values: nothing is lost, only
        late. An array with a NaN or an infinity becomes NaN on all replicas, and leaves
        its residual as it was.

        Args:
          reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN`` or their names.
          value: A nested structure of this replica's float arrays. No gradient flows
            through it.
          residual: What the last call returned, or None at first: float32 arrays of the
            values' structure, another one on each replica.
          options: Their ``bytes_per_pack`` is used.

        Returns:
          The reduced structure in its values' dtypes, equal on all replicas, and the
          new residual of this replica.

        Raises:
          TypeError: A leaf is not a float.
          ValueError: ``residual`` is not of the values' structure and shapes.
          ContextError: Called outside of this context's step.

        Example:
          >>> import jax.numpy as jnp
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def step(g, residual):
          ...     ctx = rx.get_replica_context()
          ...     return ctx.all_reduce_int8("sum", g, residual)
          >>> g = rx.PerReplica([[127.0, 0.25], [127.0, 0.5]])
          >>> total, residual = strategy.run(step, (g, None))
          >>> total.tolist(), [r.tolist() for r in residual.values]
          ([254.0, 0.0], [[0.0, 0.25], [0.0, 0.5]])
          >>> total, residual = strategy.run(step, (g, residual))
          >>> total.tolist(), [r.tolist() for r in residual.values]
          ([254.0, 1.0], [[0.0, 0.5], [0.0, 0.0]])
        """
        options = chosen(self._strategy.communication_options, options)
        alone = self._is_alone("all_reduce_int8")
        return all_reduce_int8(
            reduce_op,
            value,
            residual,
            self._strategy.axis_name,
            1 if alone else self.num_replicas_in_sync,
            options.bytes_per_pack,
        )

    def all_gather(
        self, value: Any, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Concatenates a value over all replicas, in replica order.

        All replicas must call it. Its gradient is this replica's slice of the sum of
        all replicas' cotangents.

        Args:
          value: A nested structure of arrays of equal shape on all replicas, rank at
            least 1.
          axis: The dimension to concatenate on; may be negative.
          options: Accepted as in TF. What they say of packs and sums does not concern
            a gather, which sends values as they are.

        Returns:
          The same structure, equal on all replicas.

        Raises:
          ValueError: A leaf has no such dimension.
          ContextError: Called outside of this context's step.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def step(x):
          ...     return rx.get_replica_context().all_gather(x, axis=0)
          >>> strategy.run(step, (rx.PerReplica([[1, 2], [3, 4]]),)).tolist()
          [1, 2, 3, 4]
        """
        chosen(self._strategy.communication_options, options)
        if self._is_alone("all_gather"):
            return _checked(value, axis, "all_gather")
        return collectives.all_gather(
            value, axis, self._strategy.axis_name, self.num_replicas_in_sync
        )

    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, axis: int = 0
    ) -> Any:
        """Combines a value over all replicas and keeps this replica's slice.

        All replicas must call it.

        Args:
          reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN`` or their names.
          value: A nested structure of arrays whose length on ``axis`` is a multiple
            of the number of replicas.
          axis: The dimension to split; may be negative.

        Returns:
          The same structure, ``num_replicas_in_sync`` times shorter on ``axis``.

        Raises:
          ValueError: A leaf has no such dimension, or it does not divide evenly.
          TypeError: A leaf is bool or not numeric.
          ContextError: Called outside of this context's step.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def step(x):
          ...     return rx.get_replica_context().reduce_scatter("sum", x)
          >>> out = strategy.run(step, (rx.PerReplica([[1, 2], [3, 4]]),))
          >>> [v.tolist() for v in out.values]
          [[4], [6]]
        """
        if self._is_alone("reduce_scatter"):
            return _alone(reduce_op, _checked(value, axis, "reduce_scatter"))
        return collectives.reduce_scatter(
            reduce_op,
            value,
            axis,
            self._strategy.axis_name,
            self.num_replicas_in_sync,
        )

    def fold_in(self, key: jax.Array) -> jax.Array:
        """Makes a key of this replica's own from one that all replicas share.

        Without it, the same key gives the same random numbers on every replica.

        Args:
          key: A PRNG key, typed or of raw ``uint32``.

        Returns:
          ``jax.random.fold_in(key, replica_id)``: distinct per replica, and the same
          for the same replica id whatever the number of replicas.

        Example:
          >>> import jax
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def draw(key):
          ...     return jax.random.normal(rx.get_replica_context().fold_in(key))
          >>> a, b = strategy.run(draw, (jax.random.key(0),)).values
          >>> float(a) == float(b)
          False
        """
        return jax.random.fold_in(key, self.replica_id_in_sync_group)

    # -- merge_call ------------------------------------------------------------------

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Leaves the replicas for a cross-replica function and comes back.

        Args:
          merge_fn: Called once as ``merge_fn(strategy, *args, **kwargs)`` in the
            cross-replica context. Traced arrays among the arguments arrive as
            :class:`PerReplica`; what is the same for all replicas by nature, such as
            Python numbers and arrays that the step captured, arrives as it is.
          args: Positional arguments of ``merge_fn``.
          kwargs: Keyword arguments of ``merge_fn``.

        Returns:
          What ``merge_fn`` returns: each replica gets its component of PerReplica
          leaves and all of the others. It may stand under ``lax.cond``, ``lax.scan``
          and gradients.

        Raises:
          ContextError: Called outside of this context's step.
          PerReplicaError: ``merge_fn`` returned a PerReplica of another number of
            replicas.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def step(x):
          ...     return rx.get_replica_context().merge_call(
          ...         lambda strategy, v: strategy.reduce("sum", v), args=(x,))
          >>> float(strategy.run(step, (rx.PerReplica([1.0, 2.0]),)))
          3.0
        """
        require_current(self, "merge_call")
        given = (tuple(args), dict(kwargs or {}))
        with cross_replica(self._strategy):
            if self._replica_id is not None:
                return merge_fn(self._strategy, *given[0], **given[1])
            joined_args, joined_kwargs = join_replicas(given, self._strategy)
            merged = merge_fn(self._strategy, *joined_args, **joined_kwargs)
            return component_for_replica(merged, self._strategy)

    def _is_alone(self, call: str) -> bool:
        """Whether this is a hand-made context: then there is nobody to talk to."""
        require_current(self, call)
        if self._replica_id is None:
            return False
        if self.num_replicas_in_sync > 1:
            raise ContextError(
                f"`{call}` needs all {self.num_replicas_in_sync} replicas, but this "
                "ReplicaContext was made by hand for one of them. Call it inside a "
                "function passed to `strategy.run`."
            )
        return True


def _checked(value: Any, axis: int, call: str) -> Any:
    """The arrays of ``value``, if all of them have the dimension ``axis``."""
    arrays = jax.tree.map(jnp.asarray, value)
    for x in jax.tree.leaves(arrays):
        collectives.normalize_axis(axis, x.ndim, call)
    return arrays


def _alone(op: ReduceOp | str, value: Any) -> Any:
    """The reduction of one replica's value with itself."""
    op = ReduceOp.of(op)

    def reduce(x: Any) -> jax.Array:
        x = jnp.asarray(x)  # refuses the values of several replicas
        return collectives.after_sum(collectives.for_sum(x, op), op, 1, x.dtype)

    return jax.tree.map(reduce, value, is_leaf=is_per_replica)
