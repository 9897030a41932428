"""Making per-replica values, and looking at their components."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from replicax.errors import PerReplicaError
from replicax.values import PerReplica, ValueContext

from .merge import is_per_replica
from .placement import as_array, from_components, is_numeric
from .variables.frames import is_variable

if TYPE_CHECKING:
    from .strategy import Strategy


def values_from_function(
    strategy: Strategy, value_fn: Callable[[ValueContext], Any]
) -> Any:
    """Calls ``value_fn`` for each replica and puts the values together."""
    n = strategy.num_replicas_in_sync
    results = [value_fn(ValueContext(i, n)) for i in range(n)]
    flattened = [jax.tree.flatten(r) for r in results]
    treedef = flattened[0][1]
    for i, (_, other) in enumerate(flattened):
        if other != treedef:
            raise PerReplicaError(
                "value_fn must return the same structure for each replica. Got "
                f"{treedef} for replica 0 and {other} for replica {i}."
            )
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return treedef.unflatten([_together(strategy, list(parts)) for parts in columns])


def _together(strategy: Strategy, parts: list[Any]) -> PerReplica:
    arrays = [as_array(p) for p in parts]
    if all(map(is_numeric, arrays)) and len({(a.shape, a.dtype) for a in arrays}) == 1:
        value = PerReplica.from_array(
            from_components(arrays, strategy.placer.per_replica)
        )
    else:
        value = PerReplica(parts)
    value.is_data = True
    return value


def local_results(strategy: Strategy, value: Any) -> tuple[Any, ...]:
    """Returns the components of ``value``, one structure for each replica."""
    if is_per_replica(value) or is_variable(value):
        return value.values
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    if treedef == jax.tree.structure(0) or value is None:
        return (value,)
    columns = [
        x.values
        if is_per_replica(x) or is_variable(x)
        else (x,) * strategy.num_replicas_in_sync
        for x in leaves
    ]
    return tuple(
        treedef.unflatten([column[i] for column in columns])
        for i in range(strategy.num_replicas_in_sync)
    )
