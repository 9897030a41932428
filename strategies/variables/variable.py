"""State that a step reads and writes: :class:`Variable`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from replicax import _compat
from replicax.errors import ContextError, ReplicaDivergenceError
from replicax.values import DistributedValues, PerReplica, ReduceOp

from .. import collectives
from ..context import get_strategy, has_strategy
from ..fence import LAUNCHING
from ..merge import TracedPerReplica, is_per_replica, join_replicas
from ..placement import Placer, stack
from . import frames
from .aggregation import aggregated
from .arithmetic import ArrayOperators
from .places import Place, place
from .scatter import IndexedSlices, scatter
from .synchronization import VariableAggregation, VariableSynchronization, checked

if TYPE_CHECKING:
    from ..strategy import Strategy

_Aggregation = VariableAggregation
_Synchronization = VariableSynchronization


class Variable(ArrayOperators, DistributedValues):
    """An array that a step can change, kept on every replica's device.

    A step uses variables from wherever it finds them: a closure, a global, an object's
    attribute or its arguments. What it reads becomes an input of the compiled program,
    what it writes an output that takes the input's memory.

    Where replicas write different values, ``synchronization`` and ``aggregation`` say
    what becomes of them, as in TF. With one difference: without an aggregation, a write
    in a step must be the same on all replicas. That is proved when the step is traced.

    Args:
      initial_value: An array, a number, or a function that returns one. It is copied;
        of an array that lies on several devices, the copy on the first one.
      trainable: Whether it is meant to be trained; default: True, or False for
        ``ON_READ``. An optimizer trains what it is given, but only trainable variables
        are sharded because of their size.
      name: What errors call it.
      dtype: The dtype; default: that of ``initial_value``.
      synchronization: When the replicas' copies are combined; see
        :class:`VariableSynchronization`.
      aggregation: How; see :class:`VariableAggregation`.
      is_sharded: Whether each replica is to hold a slice only. What an optimizer needs
        to update slices; a step that reads the value gathers it.

    Raises:
      ValueError: Synchronization and aggregation do not go together, or
        ``initial_value`` is missing, or depends on a step's arguments.
      TypeError: It is no number or array.

    Example:
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> with strategy.scope():
      ...     w = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)
      >>> def step():
      ...     w.assign_add(rx.get_replica_context().replica_id_in_sync_group * 1.0)
      >>> strategy.run(step)
      >>> float(w)
      1.5
    """

    is_replicax_variable = True

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = _Synchronization.AUTO,
        aggregation: VariableAggregation = _Aggregation.NONE,
        *,
        is_sharded: bool = False,
    ):
        self.name = name or "Variable"
        value = _initial(initial_value, dtype, self.name)
        self._strategy = get_strategy()
        self.is_free = not has_strategy()
        self.synchronization = synchronization
        self.aggregation = aggregation
        self._shape, self._dtype = value.shape, value.dtype
        self._is_sharded = is_sharded
        self._check_for(self._strategy)
        is_on_read = self.synchronization is _Synchronization.ON_READ
        self.trainable = bool(not is_on_read if trainable is None else trainable)
        self._lay_out(value)
        frames.register(self)

    def _check_for(self, strategy: Strategy) -> None:
        """Resolves how it is synchronized in a strategy; one replica needs no rules."""
        if strategy.num_replicas_in_sync > 1:
            self.synchronization, self.aggregation = checked(
                self.synchronization, self.aggregation, self._dtype, self.name
            )
        elif self.synchronization is _Synchronization.AUTO:
            self.synchronization = _Synchronization.ON_WRITE

    def _lay_out(self, value: Any) -> None:
        self.layout = self._strategy.variable_layout(self, self._is_sharded)
        with jax.ensure_compile_time_eval():  # also while a step is traced
            self.set_array(self.layout.born(self.layout.of_whole(value)))

    # -- what it is ------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy whose scope it was made in, or that first ran a step with it."""
        return self._strategy

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one replica's value."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self._shape))

    def __repr__(self) -> str:
        kind = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"<Variable {self.name!r} {kind}>"

    def belongs_to(self, strategy: Strategy) -> bool:
        """Whether steps of ``strategy`` may use it."""
        return self._strategy is strategy

    def adopt(self, strategy: Strategy) -> None:
        """Moves a variable that was made in no scope to a strategy, for good."""
        with jax.ensure_compile_time_eval():
            value = self.layout.to_whole(self.array)
        self._check_for(strategy)
        self._strategy, self.is_free = strategy, False
        self._lay_out(value)

    def join_step(self) -> None:
        """Is adopted by the strategy of the step that is traced, if it has none."""
        frame = frames.current()
        if frame is not None:
            frame.use(self)

    # -- where it lies ---------------------------------------------------------------

    def set_array(self, array: jax.Array) -> None:
        """Lets it hold an array that is nobody else's, laid out as its layout says."""
        self.array = array
        self.is_exposed = False

    def take_array(self) -> jax.Array:
        """The array, to be donated: a copy, if the caller may hold it too."""
        if self.is_exposed:
            self.set_array(self.layout.placer.copy(self.array))
        return self.array

    def initial_in(self, frame: frames.Frame) -> Any:
        """What it holds in the frame that it was made in."""
        array = np.asarray(self.array)
        return array[0] if frame.is_replica and self.layout.is_stacked else array

    # -- reading ---------------------------------------------------------------------

    def read_value(self) -> Any:
        """Returns the value.

        Returns:
          This replica's value, in a step. Elsewhere, an array that is the same on all
          devices, which for ``ON_READ`` is the combined value.

        Raises:
          ValueError: Outside of a step, for ``ON_READ`` without an aggregation.
          ContextError: In a ``jax.jit`` that is not ``rx.function``, or in a step of
            another strategy.

        Example:
          >>> import replicax as rx
          >>> rx.Variable([1, 2]).read_value().tolist()
          [1, 2]
        """
        with LAUNCHING:  # nobody must donate it meanwhile
            value = self.for_operator()
            if value is self.array:
                self.is_exposed = True
        return value

    value = read_value

    def numpy(self) -> np.ndarray:
        """Returns a copy of the value on the host.

        Example:
          >>> import replicax as rx
          >>> rx.Variable([1, 2]).numpy()
          array([1, 2], dtype=int32)
        """
        return np.array(self)

    def __jax_array__(self) -> Any:
        return self.read_value()

    def distributed(self) -> Any:
        """The values of the replicas together; a plain array, if they are one."""
        if not self._has_rows:
            return self.read_value()
        frame = frames.current()
        if frame is not None and frame.is_replica:  # in merge_call
            return join_replicas(self.array_here(), self._strategy)
        with LAUNCHING:
            self.is_exposed = True
            return PerReplica.from_array(self.array_here())

    @property
    def values(self) -> tuple[Any, ...]:
        """What the replicas of this process read, in replica order.

        One array, if there is only one copy.

        Raises:
          ContextError: In a step.
        """
        if frames.current() is not None:
            raise ContextError(
                f"The copies of {self!r} can be seen only between steps. In a step, "
                "`read_value()` is this replica's."
            )
        if self._has_rows:
            with LAUNCHING:
                self.is_exposed = True
                return PerReplica.from_array(self.array).values
        with LAUNCHING:
            whole = self.layout.to_whole(self.array)
            return tuple(jnp.copy(part) for part in _compat.parts_of(whole))

    def for_operator(self) -> Any:
        """The value, for an operation that will not hand it on."""
        value = self._value_here()
        if self._has_rows and place() is Place.CROSS_REPLICA:
            return self._combined(value)
        return value

    @property
    def _has_rows(self) -> bool:
        """Whether each replica has a value of its own."""
        return self.layout.is_local and self.layout.is_stacked

    def _value_here(self) -> Any:
        frame = frames.current()
        array = self.array_here()
        if frame is not None and frame.is_replica:
            return self.layout.opened(array)
        return self.layout.to_whole(array)

    def _combined(self, array: Any) -> Any:
        """The value of an ``ON_READ`` variable, seen from outside of the replicas."""
        if self.aggregation is _Aggregation.NONE:
            raise ValueError(
                f"{self!r} is ON_READ without an aggregation, so its copies cannot be "
                "combined. Give it one, or read the copies with "
                "`experimental_local_results`."
            )
        frame = frames.current()
        if frame is not None and frame.is_replica:
            return self._over_replicas(array)
        return _combined_rows(self.aggregation, array, self.layout.placer)

    def _over_replicas(self, value: Any) -> Any:
        strategy = self._strategy
        return aggregated(
            self.aggregation,
            value,
            strategy.axis_name,
            strategy.num_replicas_in_sync,
        )

    def array_here(self) -> Any:
        """The array, or what stands for it in the function that is being traced.

        Raises:
          ContextError: In a trace that Replicax knows nothing of.
        """
        frame = frames.current()
        if frame is not None:
            return frame.load(self)
        if not _compat.no_trace_is_active() and _compat.is_staged():
            raise ContextError(
                f"{self!r} was used in a jax.jit (or another compiled function), which "
                "would go on seeing the value of today. Use rx.function in its place, "
                "or pass the value as an argument."
            )
        return self.array

    # -- writing ---------------------------------------------------------------------

    def assign(self, value: Any) -> Any:
        """Sets the value.

        In a step, all replicas must call it; ``aggregation`` combines what they pass,
        unless the variable is ``ON_READ``. Elsewhere the value is set on all replicas;
        with ``ON_READ`` and ``SUM``, each gets its part, so that the sum is the value.

        Args:
          value: An array or number of the variable's shape and dtype. Numbers and
            numpy arrays are cast where nothing but precision is lost.

        Returns:
          In a step, this replica's new value. Elsewhere, the variable.

        Raises:
          ValueError: The shape differs.
          TypeError: The dtype differs.
          ReplicaDivergenceError: There is no aggregation, and replicas would hold
            different values.
          ContextError: In a ``jax.jit`` that is not ``rx.function``, or in a step of
            another strategy.

        Example:
          >>> import replicax as rx
          >>> v = rx.Variable([1.0, 2.0])
          >>> v.assign([3.0, 4.0]).numpy()
          array([3., 4.], dtype=float32)
        """
        return self._write("assign", value, lambda old, new: new)

    def assign_add(self, delta: Any) -> Any:
        """Adds to the value; see :meth:`assign`.

        With ``SUM``, in a step, the replicas' deltas are summed: a delta that is the
        same on all replicas is added once for each.

        Args:
          delta: What to add.

        Returns:
          As :meth:`assign`.

        Raises:
          ValueError: As :meth:`assign`; or outside of a step, for ``ON_READ`` with
            ``SUM``, where it could mean two things.

        Example:
          >>> import replicax as rx
          >>> v = rx.Variable(1.0)
          >>> float(v.assign_add(2.0))
          3.0
        """
        return self._write("assign_add", delta, lambda old, new: old + new)

    def assign_sub(self, delta: Any) -> Any:
        """Subtracts from the value; see :meth:`assign_add`.

        Args:
          delta: What to subtract.

        Returns:
          As :meth:`assign`.

        Example:
          >>> import replicax as rx
          >>> v = rx.Variable(1.0)
          >>> float(v.assign_sub(2.0))
          -1.0
        """
        return self._write("assign_sub", delta, lambda old, new: old - new)

    def scatter_add(self, sparse_delta: IndexedSlices) -> Any:
        """Adds to some rows.

        In a step, all replicas must call it, and ``aggregation`` combines the rows that
        they name: with ``SUM`` all are added, with ``MEAN`` each divided by the number
        of replicas.

        Args:
          sparse_delta: The rows; see :class:`IndexedSlices`.

        Returns:
          As :meth:`assign`.

        Raises:
          TypeError: It is no IndexedSlices, or of another dtype.
          ValueError: The shapes do not fit.
          IndexError: There is no such row. In a step, such rows are dropped.
          NotImplementedError: The variable is ``ON_READ``.
        """
        return scatter(self, "add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Any:
        """Subtracts from some rows; see :meth:`scatter_add`."""
        return scatter(self, "sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Any:
        """Multiplies some rows; see :meth:`scatter_add`."""
        return scatter(self, "mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Any:
        """Divides some rows; see :meth:`scatter_add`."""
        return scatter(self, "div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Any:
        """Lowers some rows to the given ones; see :meth:`scatter_update`."""
        return scatter(self, "min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Any:
        """Raises some rows to the given ones; see :meth:`scatter_update`."""
        return scatter(self, "max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Any:
        """Overwrites some rows; see :meth:`scatter_add`.

        Raises:
          NotImplementedError: The variable is ``ON_READ``, or its aggregation is
            ``SUM`` or ``MEAN``, which could not combine what overwrites.
        """
        return scatter(self, "update", sparse_delta)

    def sparse_read(self, indices: Any) -> Any:
        """Returns the rows that are named.

        Args:
          indices: Integers of any shape. A negative one counts from the last row.

        Returns:
          An array ``[*indices.shape, *shape[1:]]``. As with ``jnp.take``, a row that
          does not exist reads as NaN, or as the least integer.

        Example:
          >>> import replicax as rx
          >>> rx.Variable([[1, 2], [3, 4]]).sparse_read([1, 1]).tolist()
          [[3, 4], [3, 4]]
        """
        with LAUNCHING:
            return jnp.take(self.for_operator(), jnp.asarray(indices), axis=0)

    def _write(self, call: str, value: Any, combine: Any) -> Any:
        self._refuse_foreign_scope(call)
        self.join_step()
        here = place()
        value = self._checked(value, call, here)
        if here is Place.REPLICA:
            value = self.agreed(value)
        elif here is Place.CROSS_REPLICA and self._has_rows:
            value = self._for_rows(value, call)
        with LAUNCHING:  # nobody must write it meanwhile
            return self.store(combine(self._value_here(), value))

    def store(self, new: Any) -> Any:
        """Lets it hold a value, which replicas have agreed on where they must.

        Args:
          new: The value of one replica, or of all.

        Returns:
          What a write returns.
        """
        frame = frames.current()
        if frame is None:
            self._store_now(new)
            return self
        new = jax.lax.stop_gradient(jnp.asarray(new, self.dtype))
        if frame.is_replica:
            frame.store(self, self.layout.closed(new))
        else:
            frame.store(self, self.layout.traced(self._of_all(new)))
        return self if place() is Place.CROSS_REPLICA else new

    def _of_all(self, value: Any) -> Any:
        """The array for a value that was computed outside of a step."""
        return value if self._has_rows else self.layout.of_whole(value)

    def hold(self, own: Any) -> None:
        """Lets this replica hold an array of its own copy or slice, in a step."""
        frame = frames.current()
        assert frame is not None and frame.is_replica
        frame.store(self, jax.lax.stop_gradient(jnp.asarray(own, self.dtype)))

    def _store_now(self, new: Any) -> None:
        if isinstance(new, jax.core.Tracer):
            raise ContextError(
                f"{self!r} was written in a jax transformation that Replicax knows "
                "nothing of. Use rx.function in place of jax.jit, and write after "
                "jax.grad or jax.vmap, not inside."
            )
        self.set_array(self.layout.born(self._of_all(new)))

    def agreed(self, value: Any) -> Any:
        """What becomes of a value that all replicas pass."""
        if self.layout.is_local:
            return value
        if self.aggregation is not _Aggregation.NONE:
            return self._over_replicas(jax.lax.stop_gradient(value))
        if self.layout.needs_aggregation:
            raise ValueError(
                f"{self!r} lies on one device, so a step must say how the replicas' "
                "values are combined. Give the variable an aggregation."
            )
        return value  # the proof looks after it

    def _for_rows(self, value: Any, call: str) -> Any:
        """What each replica gets of a value that is set from outside."""
        if is_per_replica(value):
            return value.array
        if self.aggregation is _Aggregation.NONE:
            raise ValueError(
                f"{self!r} is ON_READ without an aggregation. Outside of a step, "
                f"`{call}` cannot tell what its copies are to be: pass a PerReplica."
            )
        if self.aggregation is _Aggregation.SUM:
            if call != "assign":
                raise ValueError(
                    f"{self!r} is ON_READ with SUM. Outside of a step, `{call}` could "
                    "mean each replica's value or their sum: `assign` the sum that you "
                    "want."
                )
            value = self._share(value)
        frame = frames.current()
        return value if frame and frame.is_replica else self.layout.of_whole(value)

    def _share(self, value: Any) -> Any:
        """A replica's part of a sum; for integers rounded towards zero, as in TF."""
        num_replicas = jnp.asarray(self._strategy.num_replicas_in_sync, self.dtype)
        return jax.lax.div(value, num_replicas)

    def _refuse_foreign_scope(self, call: str) -> None:
        if has_strategy() and get_strategy() is not self._strategy and not self.is_free:
            raise ContextError(
                f"{call} of {self!r}, which belongs to {self._strategy!r}, was called "
                f"in the scope of {get_strategy()!r}. Strategies must not be mixed: "
                "leave that scope first."
            )

    # -- checks ----------------------------------------------------------------------

    def _checked(self, value: Any, call: str, here: Place) -> Any:
        """``value`` as an array of the right shape and dtype."""
        if isinstance(value, Variable):
            value = value.for_operator()
        if is_per_replica(value):
            return self._component(value, call, here)
        array = self.as_dtype(value, call)
        if array.shape != self.shape:
            raise ValueError(
                f"{call} of {self!r} needs a value of shape {self.shape}. Got shape "
                f"{array.shape}."
            )
        return array

    def as_dtype(self, value: Any, call: str) -> Any:
        """``value`` as an array of the dtype, cast if the user must have meant that."""
        if isinstance(value, (jax.Array, jax.core.Tracer)):
            found = value.dtype
            is_weak = jax.typeof(value).weak_type
            if found == self.dtype and not is_weak:
                return value
            if is_weak and _kind(found) in range(_kind(self.dtype) + 1):
                return value.astype(self.dtype)
        else:
            found = np.asarray(value).dtype
            if _kind(found) in range(_kind(self.dtype) + 1):
                self._check_range(value, call)
                return jnp.asarray(value, self.dtype)
        raise TypeError(
            f"{call} of {self!r} needs a value of its dtype. Got {found}: cast it with "
            f"`.astype({str(self.dtype)!r})`."
        )

    def _check_range(self, value: Any, call: str) -> None:
        if not jnp.issubdtype(self.dtype, jnp.integer) or not np.size(value):
            return
        limits = jnp.iinfo(self.dtype)
        low, high = np.min(value), np.max(value)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{call} of {self!r} needs numbers from {limits.min} to {limits.max}. "
                f"Got {low if low < limits.min else high}."
            )

    def _component(self, value: PerReplica, call: str, here: Place) -> Any:
        if isinstance(value, TracedPerReplica):  # in merge_call
            return self._checked(value.local, call, here)
        if here is not Place.CROSS_REPLICA or not self._has_rows:
            raise ReplicaDivergenceError(
                f"{call} of {self!r} got a PerReplica, but the variable holds one "
                "value for all replicas. Combine it first, for example with "
                "`strategy.reduce`."
            )
        value = stack(value, self.layout.placer, f"The value of {call}")
        if value.array.shape[1:] != self.shape or value.array.dtype != self.dtype:
            raise ValueError(
                f"{call} of {self!r} needs components of that shape and dtype. Got "
                f"{value.array.dtype}{list(value.array.shape[1:])}."
            )
        return value

    # -- copying ---------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        new = object.__new__(Variable)
        memo[id(self)] = new
        with LAUNCHING:
            new.__dict__.update(self.__dict__)
            new.set_array(self.layout.placer.copy(self.array))
        frames.register(new)
        return new

    def __copy__(self) -> Variable:
        raise TypeError(
            f"{self!r} cannot be copied with copy.copy, because two variables cannot "
            "share their memory. Use copy.deepcopy."
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled: it lies on the devices of its strategy. Save "
            "its value, `variable.numpy()`."
        )


def _initial(value: Any, dtype: Any, name: str) -> Any:
    """The initial value as an array, computed now even while a step is traced."""
    with jax.ensure_compile_time_eval():
        if callable(value) and not hasattr(value, "shape"):
            value = value()
        if value is None:
            raise ValueError(f"Variable {name} needs an initial_value.")
        if isinstance(value, Variable):
            value = value.read_value()
        if is_per_replica(value):
            raise ValueError(
                f"Variable {name} needs one initial_value for all replicas. Got a "
                "PerReplica: make the variable first, and assign it."
            )
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"The initial_value of variable {name} is computed from the arguments "
                "of a step, so there is no value yet to begin with. Make the variable "
                "before the step, or pass a function that returns the value."
            )
        if not isinstance(value, (jax.Array, np.ndarray)):
            value = jnp.asarray(value, dtype)  # a number takes JAX's default dtype
        value = _one_copy(jnp.asarray(value))
        return jnp.asarray(value, dtype or value.dtype)  # says so: no weak type


def _one_copy(x: jax.Array) -> jax.Array:
    """The copy on the first device, of an array that has a copy on each.

    JAX takes it for granted that they are equal. They need not be, where the array was
    put together from what each device had.
    """
    has_copies = x.is_fully_replicated and len(x.devices()) > 1
    return x.addressable_data(0) if has_copies and x.is_fully_addressable else x


def _kind(dtype: Any) -> int:
    kinds = [jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating]
    return next((i for i, k in enumerate(kinds) if jnp.issubdtype(dtype, k)), -1)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _combined_rows(
    aggregation: VariableAggregation, rows: jax.Array, placer: Placer
) -> jax.Array:
    """Combines the rows of all replicas, as an array that is whole on every device."""
    if aggregation is _Aggregation.ONLY_FIRST_REPLICA:
        combined = rows[0]
    else:
        op = ReduceOp[aggregation.name]
        total = collectives.for_sum(rows, op).sum(axis=0, dtype=None)
        combined = collectives.after_sum(total, op, rows.shape[0], rows.dtype)
    return jax.lax.with_sharding_constraint(
        combined.astype(rows.dtype), placer.replicated
    )
