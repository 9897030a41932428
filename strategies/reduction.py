"""From one value per replica to one: reduce and gather, outside of a step.

Both are steps themselves: equal components are combined by the same collectives that a
user's step calls. Components of unequal shape are combined one by one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from replicax.errors import PerReplicaError
from replicax.values import PerReplica, ReduceOp

from . import collectives
from .communication import DEFAULT, CommunicationOptions
from .cross_device_ops import CrossDeviceOps
from .merge import TracedPerReplica, is_per_replica, split_for_replica
from .options import RunOptions
from .placement import as_array, from_components, is_numeric, replicas_of

if TYPE_CHECKING:
    from .strategy import Strategy

Axes = tuple[int, ...] | None
_ANY_KIND = RunOptions(allow_divergence=True)


# -- reduce --------------------------------------------------------------------------


def reduce(
    strategy: Strategy,
    op: ReduceOp,
    value: Any,
    axis: int | Sequence[int] | None,
    weights: Any,
    options: CommunicationOptions,
) -> Any:
    """Combines the replicas' values; see ``Strategy.reduce``."""
    axes = _as_axes(axis)
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    _check_replicas(strategy, (value, weights), "reduce")
    weights_of = _weights_for(weights, len(leaves), treedef)
    how = {"op": op, "axes": axes, "options": options}
    reduced: list[Any] = [None] * len(leaves)
    together = []
    for i, x in enumerate(leaves):
        if not is_per_replica(x) and axes is None and weights is None:
            reduced[i] = _reduce_plain(strategy, op, x)
        elif isinstance(x, PerReplica) and not _is_uniform(x):
            reduced[i] = _reduce_ragged(strategy, x, weights_of[i], **how)
        else:
            together.append(i)
    rows = [(leaves[i], weights_of[i]) for i in together]
    for i, x in zip(together, _reduce_rows(strategy, rows, how), strict=True):
        reduced[i] = x
    return treedef.unflatten(reduced)


def _reduce_rows(strategy: Strategy, rows: list[Any], how: dict[str, Any]) -> list[Any]:
    if not rows:
        return []
    step = _step(
        _reduce_step,
        axis_name=strategy.axis_name,
        num_replicas=strategy.num_replicas_in_sync,
        **how,
    )
    if any(isinstance(x, TracedPerReplica) for x, _ in rows):
        return step(split_for_replica(rows))
    if type(strategy.cross_device_ops).accumulate is not CrossDeviceOps.accumulate:
        return _reduce_by(strategy, rows, how)
    return strategy.run(step, (rows,), options=_ANY_KIND)


@functools.cache
def _step(step: Callable[..., Any], **how: Any) -> Callable[[list[Any]], list[Any]]:
    """The step for one way of reducing: the same object each time, for ``run``."""
    return functools.partial(step, **how)


def _reduce_by(strategy: Strategy, rows: list[Any], how: dict[str, Any]) -> list[Any]:
    """Reduces with the strategy's own way of adding up, outside of a step."""

    def combined(x: Any) -> Any:
        if not isinstance(x, PerReplica):  # the same on all replicas
            x = PerReplica([x] * strategy.num_replicas_in_sync)
        return strategy.extended.broadcast_to(strategy.cross_device_ops.accumulate(x))

    partials = strategy.run(_step(_partial_step, **how), (rows,), options=_ANY_KIND)
    return [
        collectives.after_sum(
            combined(total),
            how["op"],
            strategy.num_replicas_in_sync if count is None else combined(count),
            dtype,
        )
        for total, count, dtype in partials
    ]


def _reduce_step(
    rows: list[Any],
    axis_name: str,
    num_replicas: int,
    op: ReduceOp,
    axes: Axes,
    options: CommunicationOptions,
) -> list[Any]:
    """Reduces one replica's rows together with the other replicas'."""
    partials = _partial_step(rows, op, axes, options)
    totals = collectives.sum_arrays(
        [total for total, _, _ in partials],
        [dtype for _, _, dtype in partials],
        axis_name,
        num_replicas,
        options,
    )
    weights = {i: c for i, (_, c, _) in enumerate(partials) if isinstance(c, jax.Array)}
    if weights:  # counts are sent as they are
        weights = collectives.psum(weights, axis_name, num_replicas)
    return [
        collectives.after_sum(
            total,
            op,
            weights.get(i, num_replicas * (1 if count is None else count)),
            dtype,
        )
        for i, (total, (_, count, dtype)) in enumerate(
            zip(totals, partials, strict=True)
        )
    ]


def _partial_step(
    rows: list[Any], op: ReduceOp, axes: Axes, options: CommunicationOptions
) -> list[tuple[Any, Any, Any]]:
    return [_partial(x, w, op, axes, options.accumulate_dtype) for x, w in rows]


def _partial(
    x: Any, weights: Any, op: ReduceOp, axes: Axes, accumulate_dtype: Any
) -> tuple[jax.Array, jax.Array | int | None, Any]:
    """One replica's share: its sum, what it counts for, and the result's dtype.

    The count is None where each replica counts once, the number of summed elements
    where an axis is reduced too, and the sum of the weights where there are some.
    """
    x = jnp.asarray(x)
    if accumulate_dtype is None and op is ReduceOp.MEAN and _is_half(x.dtype):
        accumulate_dtype = jnp.float32  # as jnp.mean does: many halves overflow
    total = collectives.for_sum(x, op, accumulate_dtype)
    if axes is not None:
        axes = tuple(collectives.normalize_axis(a, x.ndim, "reduce") for a in axes)
    if weights is not None:
        w = _aligned(_as_counts(jnp.asarray(weights)), x, axes)
        # What has no weight may hold anything, such as the NaN of a padded row.
        if jnp.issubdtype(total.dtype, jnp.inexact):
            w_like = w.astype(total.dtype)
        else:
            w_like = w
        total = jnp.where(w == 0, jnp.zeros_like(total), total * w_like)
        count = jnp.broadcast_to(w, x.shape)
        if axes is not None:
            total, count = (jnp.sum(a, axes, dtype=a.dtype) for a in (total, count))
        return total, count, x.dtype
    if axes is None:
        return total, None, x.dtype
    count = math.prod(x.shape[a] for a in axes)
    return jnp.sum(total, axes, dtype=total.dtype), count, x.dtype


def _is_half(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _as_counts(weights: jax.Array) -> jax.Array:
    """Weights in a dtype that many of them can be summed in."""
    if not jnp.issubdtype(weights.dtype, jnp.inexact):
        return weights.astype(jnp.int32)
    return weights.astype(jnp.promote_types(weights.dtype, jnp.float32))


def _aligned(weights: jax.Array, x: jax.Array, axes: Axes) -> jax.Array:
    """Weights of the reduced dimensions, ready to multiply ``x``."""
    aligned = weights
    if axes is not None and weights.ndim == len(axes) != x.ndim:
        shape = [1] * x.ndim
        for a, length in zip(sorted(axes), weights.shape, strict=True):
            shape[a] = length
        aligned = weights.reshape(shape)
    fits = aligned.ndim in (0, x.ndim) and all(
        n in (1, wanted) for n, wanted in zip(aligned.shape, x.shape, strict=False)
    )
    if not fits:
        raise ValueError(
            f"weights of shape {weights.shape} do not fit values of shape {x.shape} "
            f"reduced over {'replicas only' if axes is None else f'axes {axes}'}: give "
            "one weight per reduced element, or one per value."
        )
    return aligned


def _reduce_plain(strategy: Strategy, op: ReduceOp, x: Any) -> Any:
    if op is ReduceOp.SUM and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"Cannot SUM a value that is the same on all "
            f"{strategy.num_replicas_in_sync} replicas ({_brief(x)}): it is either "
            "reduced already, so use it as it is, or it stands for one replica, so "
            "multiply it by strategy.num_replicas_in_sync. 'mean' returns it as it is."
        )
    return x


def _reduce_ragged(
    strategy: Strategy,
    value: PerReplica,
    weights: Any,
    op: ReduceOp,
    axes: Axes,
    options: CommunicationOptions,
) -> jax.Array:
    """Reduces components of unequal shape or dtype: each for itself, then together."""
    parts = [as_array(p) for p in value.values]
    for part in parts:
        collectives.check_reducible(part.dtype, op)
    shapes = ", ".join(f"replica {i}: {np.shape(p)}" for i, p in enumerate(parts))
    if axes is None and len({p.shape for p in parts}) > 1:
        raise PerReplicaError(
            "Reducing over replicas only (axis=None) works element by element, so the "
            f"components need equal shapes. Got {shapes}. Name the axis to reduce "
            "as well, for example axis=0."
        )
    devices = strategy.mesh.devices.flat
    weight_parts = (
        weights.values if isinstance(weights, PerReplica) else [weights] * len(parts)
    )
    placed = [jax.device_put(p, d) for p, d in zip(parts, devices, strict=True)]
    dtype = jnp.result_type(*placed)
    partials = [
        _partial(p.astype(dtype), w, op, axes, options.accumulate_dtype)
        for p, w in zip(placed, weight_parts, strict=True)
    ]
    if len({t.shape for t, _, _ in partials}) > 1:
        raise PerReplicaError(
            f"After reducing axis {axes} the components still have unequal shapes: "
            f"{shapes}."
        )
    totals, counts, dtypes = zip(*partials, strict=True)

    def combined(parts: Sequence[Any]) -> Any:
        rows = from_components(list(parts), strategy.placer.per_replica)
        row = PerReplica.from_array(rows)
        return reduce(strategy, ReduceOp.SUM, row, None, None, DEFAULT)

    if weights is not None:
        count = combined(counts)
    else:
        count = len(parts) if axes is None else sum(counts)
    return collectives.after_sum(combined(totals), op, count, dtypes[0])


def _as_axes(axis: int | Sequence[int] | None) -> Axes:
    if axis is None:
        return None
    axes: tuple[Any, ...]
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    for a in axes:
        if isinstance(a, bool) or not hasattr(a, "__index__"):
            raise TypeError(
                f"axis is an int, a tuple or list of ints, or None. Got {axis!r}."
            )
    axes = tuple(a.__index__() for a in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis names a dimension twice: {axis!r}.")
    return axes


def _weights_for(weights: Any, num_leaves: int, treedef: Any) -> list[Any]:
    """Returns the weights of each leaf: one for all, or a structure of them."""
    found, structure = jax.tree.flatten(weights, is_leaf=is_per_replica)
    if weights is None or structure == jax.tree.structure(0):
        return [weights] * num_leaves
    if structure != treedef:
        raise ValueError(
            "weights must be one array for all values, or have the values' structure. "
            f"Got {structure} for values of {treedef}."
        )
    return found


# -- gather --------------------------------------------------------------------------


def gather(strategy: Strategy, value: Any, axis: int) -> Any:
    """Concatenates the replicas' values; see ``Strategy.gather``."""
    _check_replicas(strategy, value, "gather")

    def gather_leaf(x: Any) -> Any:
        if not is_per_replica(x):
            return x
        if isinstance(x, TracedPerReplica):
            return collectives.all_gather(
                x.local, axis, strategy.axis_name, strategy.num_replicas_in_sync
            )
        if _is_uniform(x):
            collectives.normalize_axis(axis, x.ndim, "gather")
            step = _step(
                collectives.all_gather,
                axis=axis,
                axis_name=strategy.axis_name,
                num_replicas=strategy.num_replicas_in_sync,
            )
            return strategy.run(step, (x,), options=_ANY_KIND)
        return _gather_ragged(strategy, x, axis)

    return jax.tree.map(gather_leaf, value, is_leaf=is_per_replica)


def _gather_ragged(strategy: Strategy, value: PerReplica, axis: int) -> Any:
    parts = [as_array(p) for p in value.values]
    if len({p.ndim for p in parts}) == 1:
        axis = collectives.normalize_axis(axis, parts[0].ndim, "gather")
    if len({(p.ndim, p.shape[:axis], p.shape[axis + 1 :]) for p in parts}) > 1:
        shapes = ", ".join(f"replica {i}: {p.shape}" for i, p in enumerate(parts))
        raise PerReplicaError(
            f"gather(axis={axis}) needs components that differ in length on axis "
            f"{axis} only. Got {shapes}."
        )
    traced = any(isinstance(p, jax.core.Tracer) for p in parts)
    whole = jnp.concatenate(parts, axis) if traced else np.concatenate(parts, axis)
    # Strings and objects have no place on a device.
    return strategy.placer.mirrored(whole) if is_numeric(whole) else whole


def _check_replicas(strategy: Strategy, tree: Any, call: str) -> None:
    """Raises if a per-replica value belongs to another number of replicas."""
    wanted = strategy.num_replicas_in_sync
    for x in jax.tree.leaves(tree, is_leaf=is_per_replica):
        if is_per_replica(x) and x.num_replicas != wanted:
            raise PerReplicaError(
                f"{replicas_of(wanted)} {call} got a PerReplica that holds "
                f"{x.num_replicas} components."
            )


def _is_uniform(value: PerReplica) -> bool:
    """Whether all components are numeric, of one shape and dtype."""
    if value.is_stacked:
        return True
    parts = [as_array(p) for p in value.values]
    return (
        len({(p.shape, p.dtype) for p in parts}) == 1
        and parts[0].dtype.kind not in "OSU"
    )


def _brief(x: Any) -> str:
    shape, dtype = np.shape(x), getattr(x, "dtype", type(x).__name__)
    return f"{dtype}{list(shape)}"
