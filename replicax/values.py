"""The values that strategies hand out: one per replica, or one for all.

A value that is equal on all replicas is a plain ``jax.Array``. A value that may differ
is a :class:`PerReplica`. How replicas are combined is named by :class:`ReduceOp`.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import Mesh, get_abstract_mesh

from replicax._compat import mesh_for
from replicax.errors import PerReplicaError


class ReduceOp(enum.Enum):
    """How the values of several replicas become one: ``SUM`` or ``MEAN``.

    Wherever an op is wanted, its name is accepted too, in any case.

    Example:
      >>> import replicax as rx
      >>> rx.ReduceOp("SUM")
      <ReduceOp.SUM: 'SUM'>
      >>> rx.ReduceOp.of("mean")
      <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns ``op`` as a member.

        Args:
          op: A member, or its name in any case.

        Returns:
          The member.

        Raises:
          ValueError: The name is unknown.
          TypeError: ``op`` is neither a member nor a string.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str):
            try:
                return cls[op.upper()]
            except KeyError:
                raise ValueError(
                    f"{op!r} is not a ReduceOp. Use one of "
                    f"{', '.join(repr(m.name) for m in cls)}."
                ) from None
        raise TypeError(
            "The first argument is a ReduceOp or its name. Got a value of type "
            f"{type(op).__name__}."
        )


class DistributedValues:
    """Base class of values that hold one component per replica."""


@jax.tree_util.register_pytree_with_keys_class
class PerReplica(DistributedValues):
    """One value per replica.

    Usually made by a strategy: by ``run`` for outputs that differ between replicas, by
    a distributed dataset, or by ``experimental_distribute_values_from_function``. It
    then holds a single array of shape ``[num_replicas, ...]``, laid out with one row
    on each replica's device. It is a pytree node, so it travels through ``jax.jit`` and
    ``jax.tree.map``.

    Components may also be given by hand. They may then have unequal shapes: ``reduce``,
    ``gather`` and ``experimental_local_results`` accept such values, ``run`` does not.

    Args:
      values: One component per replica, in the order of replica ids.

    Raises:
      ValueError: ``values`` is empty.

    Example:
      >>> import replicax as rx
      >>> v = rx.PerReplica([1.0, 2.0])
      >>> v.values
      (1.0, 2.0)
      >>> v.num_replicas
      2
    """

    is_data = False
    """Whether it was made as data, by a dataset or a function, and not by a step."""

    def __init__(self, values: Sequence[Any]):
        if isinstance(values, (str, bytes, dict)):
            raise TypeError(
                "PerReplica takes a list or tuple of components, one for each replica. "
                f"Got {values!r}."
            )
        if len(values) == 0:
            raise ValueError("PerReplica needs at least one component. Got none.")
        self._parts: tuple[Any, ...] | None = tuple(values)

    @staticmethod
    def from_array(array: Any) -> PerReplica:
        """Wraps an array of shape ``[num_replicas, ...]``, one row per replica.

        Args:
          array: The stacked array. It is not copied, moved or checked.

        Returns:
          The per-replica value whose component ``r`` is ``array[r]``.
        """
        return StackedPerReplica(array=array)

    # -- what it holds ---------------------------------------------------------------

    is_stacked = False
    """Whether one array holds all components (equal shapes, on their devices)."""

    @property
    def array(self) -> Any:
        """The stacked array, shape ``[num_replicas, ...]``.

        Raises:
          PerReplicaError: The components were given by hand and never placed.
        """
        raise PerReplicaError(
            "This PerReplica was made from separate components and has no stacked "
            "array. Use `.values`."
        )

    @property
    def num_replicas(self) -> int:
        """The number of replicas that it holds a component for."""
        return len(self.values)

    @property
    def values(self) -> tuple[Any, ...]:
        """This process's components, of the per-replica shape, in replica order."""
        return self._parts or ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one component.

        Raises:
          PerReplicaError: The components have unequal shapes.
        """
        return self._common(np.shape, "shape")

    @property
    def ndim(self) -> int:
        """The number of dimensions of one component."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the components.

        Raises:
          PerReplicaError: The components have unequal dtypes.
        """
        return self._common(_dtype_of, "dtype")

    def _common(self, of_part: Callable[[Any], Any], what: str) -> Any:
        found = [of_part(v) for v in self.values]
        if any(f != found[0] for f in found):
            raise PerReplicaError(
                f"The components have unequal {what}s: {', '.join(map(str, found))}."
            )
        return found[0]

    # -- as one value ----------------------------------------------------------------

    def _only(self, wanted: str) -> Any:
        if self.num_replicas == 1:
            return self.values[0]
        advice = [
            "`strategy.reduce('mean', value)` to combine them",
            "`strategy.experimental_local_results(value)` to look at each",
        ]
        if all(np.ndim(v) for v in self.values):
            advice.append("`strategy.gather(value, axis=0)` to put them in one array")
        raise PerReplicaError(
            f"A PerReplica of {self.num_replicas} replicas cannot be used as {wanted}: "
            "its replicas hold different values and none of them stands for all. Use "
            f"{', or '.join(advice)}. In a step, pass it to `run` as an argument: each "
            "replica then gets its own."
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._only("a numpy array"), dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return jax.numpy.asarray(self._only("a jax array"))

    def __float__(self) -> float:
        return float(self._only("a float"))

    def __int__(self) -> int:
        return int(self._only("an int"))

    def __complex__(self) -> complex:
        return complex(self._only("a complex number"))

    def __bool__(self) -> bool:
        return bool(self._only("a bool"))

    def __index__(self) -> int:
        return self._only("an index").__index__()

    def item(self) -> Any:
        """The one component as a Python scalar.

        Raises:
          PerReplicaError: There are several replicas.
        """
        return np.asarray(self._only("a Python scalar")).item()

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else format(self._only("text"), spec)

    # Arithmetic is that of the one component, so that a program which adds up losses
    # works on one device, and says what to do on several.

    def __add__(self, other: Any) -> Any:
        return self._only("one value to add to") + other

    def __radd__(self, other: Any) -> Any:
        return other + self._only("one value to add")

    def __sub__(self, other: Any) -> Any:
        return self._only("one value to subtract from") - other

    def __rsub__(self, other: Any) -> Any:
        return other - self._only("one value to subtract")

    def __mul__(self, other: Any) -> Any:
        return self._only("one value to multiply") * other

    def __rmul__(self, other: Any) -> Any:
        return other * self._only("one value to multiply by")

    def __truediv__(self, other: Any) -> Any:
        return self._only("one value to divide") / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self._only("one value to divide by")

    def __neg__(self) -> Any:
        return -self._only("one value to negate")

    def __lt__(self, other: Any) -> Any:
        return self._only("one value to compare") < other

    def __le__(self, other: Any) -> Any:
        return self._only("one value to compare") <= other

    def __gt__(self, other: Any) -> Any:
        return self._only("one value to compare") > other

    def __ge__(self, other: Any) -> Any:
        return self._only("one value to compare") >= other

    def __eq__(self, other: object) -> Any:
        return self._only("one value to compare") == other

    def __ne__(self, other: object) -> Any:
        return self._only("one value to compare") != other

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._only("one value to take the length of"))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._only("one value to iterate over"))

    def __getitem__(self, index: Any) -> Any:
        return self._only("one value to index")[index]

    def __repr__(self) -> str:
        rows = ",\n".join(f"  {i}: {v}" for i, v in enumerate(self.values))
        return f"PerReplica:{{\n{rows}\n}}"

    # -- as a pytree -----------------------------------------------------------------

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Flattens to the components."""
        return self.values, None

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Flattens to the components, named by their places."""
        keyed = [(jax.tree_util.SequenceKey(i), v) for i, v in enumerate(self.values)]
        return keyed, None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[Any]) -> PerReplica:
        """Rebuilds the value around other components."""
        self = object.__new__(cls)
        self._parts = tuple(children)
        return self


class StackedPerReplica(PerReplica, types.SimpleNamespace):
    """A per-replica value in one array: what steps take and return.

    Made on the path of every step, so its ``__init__`` is one that needs no Python.

    Args:
      array: Shape ``[num_replicas, ...]``, one row per replica.
    """

    array: Any = None
    is_stacked = True
    _parts = None
    __init__: Any = types.SimpleNamespace.__init__

    @property
    def num_replicas(self) -> int:
        """The number of replicas that it holds a component for."""
        return self.array.shape[0]

    @property
    def values(self) -> tuple[Any, ...]:
        """This process's components, of the per-replica shape, in replica order."""
        if self._parts is None:
            self._parts = _rows(self.array)
        return self._parts

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one component."""
        return tuple(self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the components."""
        return self.array.dtype

    def __repr__(self) -> str:
        if not _is_concrete(self.array):
            return f"PerReplica(array={self.array!r})"
        return super().__repr__()

    def __reduce__(self) -> Any:
        return PerReplica.from_array, (self.array,)


# It is a PerReplica to everyone who looks at it.
StackedPerReplica.__name__ = StackedPerReplica.__qualname__ = "PerReplica"

# Registered like a dataclass because JAX flattens those without calling Python.
jax.tree_util.register_dataclass(
    StackedPerReplica, data_fields=["array"], meta_fields=[]
)


def _dtype_of(part: Any) -> Any:
    return jax.dtypes.result_type(part if hasattr(part, "dtype") else np.asarray(part))


def _is_concrete(array: Any) -> bool:
    return isinstance(array, np.ndarray) or (
        isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    )


def _rows(array: Any) -> tuple[Any, ...]:
    """The rows of a stacked array, each on the device that already holds it."""
    if isinstance(array, jax.ShapeDtypeStruct):
        row = jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
        return (row,) * array.shape[0]
    if isinstance(array, jax.Array) and _is_concrete(array):
        shards = sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)
        if all(s.data.shape[0] == 1 for s in shards) and len(
            {s.index[0].start for s in shards}
        ) == len(shards):
            return tuple(_row(s.data) for s in shards)
    return tuple(array[i] for i in range(array.shape[0]))


def _row(shard: jax.Array) -> jax.Array:
    if get_abstract_mesh().empty:
        return shard.reshape(shard.shape[1:])
    with mesh_for(Mesh(np.array([shard.device]), ("replica",))):
        return shard.reshape(shard.shape[1:])


class ValueContext:
    """What a ``value_fn`` is told about the replica that it makes a value for.

    Args:
      replica_id_in_sync_group: The replica's id, ``0`` to
        ``num_replicas_in_sync - 1``.
      num_replicas_in_sync: The number of replicas.
    """

    __slots__ = ("_num_replicas", "_replica_id")

    def __init__(
        self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1
    ):
        self._replica_id = replica_id_in_sync_group
        self._num_replicas = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica's id."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._num_replicas

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica id {self._replica_id}, "
            f"total replicas in sync: {self._num_replicas})"
        )
