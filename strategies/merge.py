"""Values on their way through ``merge_call``: one trace, seen as all replicas.

Inside a step each replica holds a traced value of its own. A merge function sees them
together, as a :class:`PerReplica` whose components are fetched only when asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax import lax

from replicax.errors import PerReplicaError
from replicax.values import PerReplica

if TYPE_CHECKING:
    from .strategy import Strategy


@jax.tree_util.register_pytree_node_class
class TracedPerReplica(PerReplica):
    """A step's traced value, presented as the values of all replicas.

    Args:
      local: This replica's value, as traced.
      axis_name: The mesh axis of the replicas.
      num_replicas: Its size.
    """

    def __init__(self, local: Any, axis_name: str, num_replicas: int):
        super().__init__((local,))
        self.local = local
        self._axis_name = axis_name
        self._num_replicas = num_replicas

    is_stacked = True

    @property
    def array(self) -> jax.Array:
        """All components, ``[num_replicas, ...]``, gathered from the replicas."""
        return lax.all_gather(self.local, self._axis_name)

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self._num_replicas

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of all replicas, gathered."""
        array = self.array
        return tuple(array[i] for i in range(self._num_replicas))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one component."""
        return tuple(jax.numpy.shape(self.local))

    @property
    def dtype(self) -> Any:
        """The dtype of the components."""
        return jax.dtypes.result_type(self.local)

    def __repr__(self) -> str:
        return f"PerReplica(traced, {self._num_replicas} replicas: {self.local})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Flattens to this replica's value."""
        return (self.local,), (self._axis_name, self._num_replicas)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> TracedPerReplica:
        """Rebuilds the value around another local one."""
        return cls(children[0], *aux)


def is_per_replica(x: Any) -> bool:
    """Whether ``x`` is a PerReplica; for ``is_leaf``."""
    return isinstance(x, PerReplica)


def replica_structure(tree: Any) -> Any:
    """The structure that one replica sees: per-replica values are its leaves."""
    return jax.tree.structure(tree, is_leaf=is_per_replica)


def join_replicas(tree: Any, strategy: Strategy) -> Any:
    """Turns the traced leaves of a step into per-replica values."""

    def join(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            return TracedPerReplica(
                x, strategy.axis_name, strategy.num_replicas_in_sync
            )
        return x

    return jax.tree.map(join, tree)


def split_for_replica(tree: Any) -> Any:
    """Turns per-replica values that :func:`join_replicas` made into traced leaves."""

    def split(x: Any) -> Any:
        return x.local if isinstance(x, TracedPerReplica) else x

    return jax.tree.map(split, tree, is_leaf=is_per_replica)


def component_for_replica(tree: Any, strategy: Strategy) -> Any:
    """Hands each replica its component of the per-replica leaves of ``tree``.

    Raises:
      PerReplicaError: A leaf holds another number of components.
      ValueError: Its components have unequal shapes.
    """

    def component(x: Any) -> Any:
        if isinstance(x, TracedPerReplica):
            return x.local
        if not isinstance(x, PerReplica):
            return x
        if x.num_replicas != strategy.num_replicas_in_sync:
            raise PerReplicaError(
                f"The merge function returned a PerReplica of {x.num_replicas} "
                f"components to {strategy.num_replicas_in_sync} replicas."
            )
        rows = x.array if x.is_stacked else jax.numpy.stack(x.values)
        replica_id = lax.axis_index(strategy.axis_name)
        return lax.dynamic_index_in_dim(rows, replica_id, keepdims=False)

    return jax.tree.map(component, tree, is_leaf=is_per_replica)
