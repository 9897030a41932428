"""The base of all strategies: what they offer between steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from replicax.values import ReduceOp, ValueContext

from ..datasets.distributed import (
    DistributedDataset,
    distribute_dataset,
    distribute_from_function,
)
from ..datasets.input_context import InputContext
from ..datasets.options import InputOptions
from . import reduction
from .communication import DEFAULT, CommunicationOptions, chosen
from .context import (
    cross_replica,
    in_default_context,
    in_merge_call,
    in_replica,
    require_cross_replica,
    require_scope_allowed,
)
from .cross_device_ops import CrossDeviceOps
from .devices import device_name
from .distribute_values import local_results, values_from_function
from .extended import StrategyExtended
from .fence import Fence, fence_for
from .merge import component_for_replica, join_replicas
from .options import RunOptions
from .placement import Placer
from .replica_context import ReplicaContext
from .run import Runner
from .shortcut import NOT_REPEATED
from .variables.frames import copies
from .variables.layouts import Layout, ShardedLayout, StackedLayout
from .variables.synchronization import VariableSynchronization

if TYPE_CHECKING:
    from .variables.variable import Variable


class Strategy:
    """Runs one replica's step on every device of a mesh.

    Use a subclass, such as :class:`MirroredStrategy`. A strategy holds no state of a
    training run: only its devices and the programs compiled for them.

    Args:
      devices: The replicas' devices, in the order of replica ids.
      cross_device_ops: How ``reduce`` combines values; default: an XLA all-reduce.
      communication_options: What holds for every sum over the replicas, unless the call
        says otherwise.
    """

    axis_name = "replica"
    """The name of the mesh axis that the replicas lie on."""

    shard_state = False
    """Whether optimizers hold their state in slices, one on each replica."""

    def __init__(
        self,
        devices: Sequence[jax.Device],
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        if cross_device_ops is not None and not isinstance(
            cross_device_ops, CrossDeviceOps
        ):
            raise TypeError(
                f"cross_device_ops must be a CrossDeviceOps. Got {cross_device_ops!r}."
            )
        self._devices = tuple(devices)
        self.cross_device_ops = cross_device_ops or CrossDeviceOps()
        self.communication_options = DEFAULT.merge(communication_options)
        self._runner = Runner(self)
        self._shortcuts = self._runner.shortcuts
        self.extended = StrategyExtended(self)

    # -- what it is ------------------------------------------------------------------

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The one-dimensional mesh of the replicas, with axis ``"replica"``."""
        return mesh_of(self._devices, self.axis_name)

    @functools.cached_property
    def placer(self) -> Placer:
        """Places values on the mesh."""
        return Placer(self.mesh, self.axis_name)

    @functools.cached_property
    def fence(self) -> Fence:
        """Paces the launches on CPU devices."""
        return fence_for(self.mesh)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose values are combined by collectives."""
        return len(self._devices)

    @property
    def cluster_resolver(self) -> None:
        """None: this strategy runs in one process."""
        return None

    def variable_layout(self, variable: Variable, is_sharded: bool) -> Layout:
        """How a variable lies on the devices.

        Args:
          variable: The variable.
          is_sharded: Whether each replica is to hold a slice of it.
        """
        is_local = variable.synchronization is VariableSynchronization.ON_READ
        if self.num_replicas_in_sync > 1 and is_local:
            return StackedLayout(self.placer)
        if self.num_replicas_in_sync > 1 and is_sharded:
            return ShardedLayout(self.placer, variable.shape, variable.dtype)
        return Layout(self.placer, is_local)

    def __repr__(self) -> str:
        names = ", ".join(repr(device_name(d)) for d in self._devices)
        return f"{type(self).__name__}([{names}])"

    def __copy__(self) -> Strategy:
        raise RuntimeError(
            "A strategy cannot be copied with copy.copy, because the copy would share "
            "its programs. Use the strategy itself, or copy.deepcopy for another one "
            "over the same devices."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        new = object.__new__(type(self))
        memo[id(self)] = new
        Strategy.__init__(
            new, self._devices, self.cross_device_ops, self.communication_options
        )
        return new

    # -- scope and run ---------------------------------------------------------------

    @contextlib.contextmanager
    def _scope(self) -> Any:
        require_scope_allowed(self)
        with cross_replica(self):
            yield self

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Makes this strategy the current one of this thread, inside a ``with``.

        It changes nothing else: arrays are born where JAX puts them, and reach the
        replicas when they are first used. May be entered again while it is current.

        Returns:
          A context manager that yields the strategy.

        Raises:
          ContextError: On entering, inside a step or another strategy's scope.

        Example:
          >>> import replicax as rx
          >>> with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope() as strategy:
          ...     rx.get_strategy() is strategy
          True
        """
        return self._scope()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs one replica's step on all replicas.

        ``fn`` is traced once, as under ``jax.jit``, and compiled into one program for
        all replicas. Leaves of the arguments enter by their kind:

        * :class:`PerReplica`: each replica gets its component;
        * arrays: whole on every replica; placed there once;
        * int, float, complex: traced, so that another number does not compile again;
        * bool, str, None, functions and other hashable objects: static, as part of
          what is compiled;
        * Flax nnx objects: rebuilt for the step, and updated in place after it.
          Their ``Param`` and optimizer state must stay equal on all replicas,
          ``BatchStat`` is averaged, metrics are combined, rng keys differ per replica.

        The step may be called in a ``jax.jit``, ``jax.lax.scan``, ``jax.grad`` or
        ``jax.vmap`` of the caller's.

        Args:
          fn: The step, called as ``fn(*args, **kwargs)`` in a replica context.
          args: A list or tuple of positional arguments.
          kwargs: Keyword arguments.
          options: See :class:`RunOptions`.

        Returns:
          What ``fn`` returns. Leaves that are proved equal on all replicas are plain
          arrays (mirrored: whole on every device), the others :class:`PerReplica`.
          Which is which does not depend on the number of replicas.

        Raises:
          ReplicaDivergenceError: State that must stay equal would differ. Nothing is
            changed then.
          DivergentCollectiveError: A collective stands where only some replicas would
            reach it.
          PerReplicaError: A PerReplica has components of unequal shape, or of another
            number of replicas.
          StaticArgumentError: An argument is neither an array nor hashable.
          ReplicaxError: The step writes a ref where it might be written twice.
          ValueError: ``args`` or ``kwargs`` is of the wrong type, or ``donate`` names
            what was not passed.
          ConsumedArgumentError: An array was consumed by an earlier, donating run.
          ContextError: Called inside a step or in another strategy's scope.

        Example:
          >>> import jax.numpy as jnp
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def step(w, x):
          ...     loss = jnp.sum((w * x) ** 2)
          ...     return rx.get_replica_context().all_reduce("mean", loss), loss
          >>> x = strategy.experimental_distribute_values_from_function(
          ...     lambda ctx: jnp.arange(2.0) + ctx.replica_id_in_sync_group)
          >>> mean, losses = strategy.run(step, (jnp.float32(2.0), x))
          >>> float(mean), [float(v) for v in losses.values]
          (12.0, [4.0, 20.0])
        """
        shortcut = self._shortcuts.get(id(fn))
        if shortcut is not None:
            out = shortcut(fn, args, kwargs, options)
            if out is not NOT_REPEATED:
                return out
        if type(args) is not tuple:
            if not isinstance(args, (list, tuple)):
                raise ValueError(
                    f"args must be a list or tuple. Got {type(args).__name__}: for one "
                    "argument write `(x,)`."
                )
            args = tuple(args)
        if options is not None and not isinstance(options, RunOptions):
            raise TypeError(f"options must be a RunOptions. Got {options!r}.")
        kwargs = _checked_kwargs(kwargs) if kwargs else {}
        if not in_default_context():
            require_cross_replica(self, "run", "a plain function call")
            if in_merge_call():
                return self._run_in_merge_call(fn, args, kwargs)
        return self._runner.run(fn, args, kwargs, options)

    def _run_in_merge_call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Steps back into the replicas whose step is being traced around us."""
        args, kwargs = component_for_replica((args, kwargs), self)
        with in_replica(ReplicaContext(self)):
            out = fn(*args, **kwargs)
        return join_replicas(out, self)

    # -- combining -------------------------------------------------------------------

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | Sequence[int] | None = None,
        *,
        weights: Any = None,
        accumulate_dtype: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines per-replica values into one.

        With ``axis``, each replica's value is reduced over it first. A mean is then
        the mean over all elements of all replicas, however many each has: uneven and
        even empty components count right.

        Args:
          reduce_op: ``ReduceOp.SUM``, ``ReduceOp.MEAN`` or their names.
          value: A nested structure of per-replica values. Components may have unequal
            lengths on ``axis``.
          axis: The dimension of one component to reduce, or several, or None for
            replicas only. Negative counts from the end.
          weights: One weight per reduced element, for example the mask of a padded
            batch: one per-replica value for all of ``value``, or the same structure.
            A mean divides by their sum. What has weight 0 is left out, NaN included.
            Integers are then summed in at least 32 bits.
          accumulate_dtype: The dtype to sum in, for example ``jnp.float32`` for
            ``bfloat16`` values. Floats are returned in their own dtype, integers in
            this one.
          options: How the values are sent; what is not set here is as the strategy's
            ``communication_options`` say.

        Returns:
          The same structure of plain arrays, mirrored on all devices. A mean of
          integers is a float. A leaf that is not per-replica is returned as it is by
          a mean over replicas only.

        Raises:
          ValueError: The axis does not exist, a plain value is summed over several
            replicas (it would be counted more than once), or the op is unknown.
          TypeError: Values are bool or not numeric.
          PerReplicaError: Components have shapes that cannot be combined.
          ContextError: Called inside a step or in another strategy's scope.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> uneven = rx.PerReplica([[1.0, 2.0, 3.0], [10.0]])
          >>> float(strategy.reduce("mean", uneven, axis=0))
          4.0
        """
        op = ReduceOp.of(reduce_op)
        require_cross_replica(self, "reduce", "get_replica_context().all_reduce()")
        options = chosen(self.communication_options, options, accumulate_dtype)
        value = copies(value)
        return reduction.reduce(self, op, value, axis, weights, options)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates per-replica values in the order of replicas.

        Args:
          value: A nested structure of per-replica arrays, rank at least 1. Components
            may differ in length on ``axis``. Strings stay numpy arrays on the host.
          axis: The dimension to concatenate on; may be negative.

        Returns:
          The same structure of plain arrays, mirrored on all devices. Leaves that are
          not per-replica are returned once, as they are.

        Raises:
          ValueError: A component is a scalar or has no such axis.
          PerReplicaError: Components differ in more than the length on ``axis``.
          ContextError: Called inside a step or in another strategy's scope.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> strategy.gather(rx.PerReplica([[1, 2], [3]]), axis=0).tolist()
          [1, 2, 3]
        """
        require_cross_replica(self, "gather", "get_replica_context().all_gather()")
        return reduction.gather(self, copies(value), axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns this process's components of a value, always as a tuple.

        Args:
          value: A per-replica value, or a nested structure with some in it.

        Returns:
          The components of a per-replica value; for a structure, one structure for
          each replica, plain leaves repeated; for any other leaf, a 1-tuple of it.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> strategy.experimental_local_results({"a": rx.PerReplica([1, 2]), "b": 9})
          ({'a': 1, 'b': 9}, {'a': 2, 'b': 9})
        """
        return local_results(self, value)

    # -- distributing ----------------------------------------------------------------

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a per-replica value by calling a function for each replica.

        Args:
          value_fn: Called once per local replica with its :class:`ValueContext`. May
            return a nested structure, the same for each replica.

        Returns:
          The structure, with :class:`PerReplica` leaves on the replicas' devices.
          Components that are not numeric, or of unequal shape, stay where they are.

        Raises:
          PerReplicaError: ``value_fn`` returned unequal structures.
          ContextError: Called inside a step or in another strategy's scope.

        Example:
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> strategy.experimental_distribute_values_from_function(
          ...     lambda ctx: ctx.replica_id_in_sync_group * 10)
          PerReplica:{
            0: 0,
            1: 10
          }
        """
        require_cross_replica(
            self,
            "experimental_distribute_values_from_function",
            "get_replica_context().replica_id_in_sync_group",
        )
        return values_from_function(self, value_fn)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Splits a dataset's global batches over the replicas.

        Args:
          dataset: ``rx.datasets.from_arrays(...)``, or any iterable or generator
            function of global batches: nested structures of arrays whose first
            dimension is the batch.
          options: See :class:`InputOptions`.

        Returns:
          An iterable of the same structures with :class:`PerReplica` leaves, already
          on their devices.

        Raises:
          UnevenBatchError: A batch does not divide evenly over the replicas, and
            ``options.remainder`` is ``"error"``.
          ContextError: Called inside a step or in another strategy's scope.

        Example:
          >>> import numpy as np
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> data = rx.datasets.from_arrays({"x": np.arange(8)}).batch(4)
          >>> for batch in strategy.experimental_distribute_dataset(data):
          ...     print([v.tolist() for v in batch["x"].values])
          [[0, 1], [2, 3]]
          [[4, 5], [6, 7]]
        """
        require_cross_replica(
            self, "experimental_distribute_dataset", "it before the step"
        )
        return distribute_dataset(dataset, self.mesh, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Deals the batches of a dataset that a function makes to the replicas.

        Nothing is split: each batch is one replica's. Replica 0 gets the first one,
        replica 1 the second one, and so on, round after round.

        Args:
          dataset_fn: Called once in each process with its :class:`InputContext`; or
            once for each replica, with ``InputReplicationMode.PER_REPLICA``. Returns
            what :meth:`experimental_distribute_dataset` takes, of batches of
            ``context.get_per_replica_batch_size(global_batch_size)`` rows.
          options: See :class:`InputOptions`. ``remainder`` says what happens when the
            last round is incomplete, or a batch has fewer rows than its round's others.

        Returns:
          An iterable of the same structures with :class:`PerReplica` leaves, already
          on their devices.

        Raises:
          TypeError: ``dataset_fn`` is not a function, or returns no dataset.
          UnevenBatchError: A round is uneven, and ``options.remainder`` is ``"error"``.
          ContextError: Called inside a step or in another strategy's scope.

        Example:
          >>> import numpy as np
          >>> import replicax as rx
          >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def dataset_fn(context):
          ...     rows = context.get_per_replica_batch_size(4)
          ...     return rx.datasets.from_arrays({"x": np.arange(8)}).batch(rows)
          >>> for batch in strategy.distribute_datasets_from_function(dataset_fn):
          ...     print([v.tolist() for v in batch["x"].values])
          [[0, 1], [2, 3]]
          [[4, 5], [6, 7]]
        """
        require_cross_replica(
            self, "distribute_datasets_from_function", "it before the step"
        )
        return distribute_from_function(dataset_fn, self.mesh, options)


def _checked_kwargs(kwargs: Any) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"kwargs must be a dict. Got {type(kwargs).__name__}.")
    if not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"kwargs must have names as keys. Got {list(kwargs)}.")
    return dict(kwargs)


def mesh_of(devices: Sequence[jax.Device], axis_name: str) -> Mesh:
    """Returns the one-dimensional mesh of some devices."""
    auto = (jax.sharding.AxisType.Auto,)
    return Mesh(np.asarray(devices), (axis_name,), axis_types=auto)
