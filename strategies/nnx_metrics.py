"""Combining the states of nnx metrics over replicas.

A metric's states belong together. The count of an ``Average`` is often the same on all
replicas (it follows from the batch's shape) while its total is not: combining only
what differs would make the mean wrong by a factor. So if one state of a metric varies,
all of them are combined by the metric's own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from replicax._compat import open_jaxpr
from replicax.errors import ReplicaDivergenceError

from .dataflow import dependent, is_increment
from .state import StateWrite


def is_metric(x: Any) -> bool:
    """Whether ``x`` is a metric with states of its own."""
    return isinstance(x, nnx.metrics.Metric) and not isinstance(x, nnx.MultiMetric)


def owners(tree: Any) -> dict[int, tuple[str, type]]:
    """Returns which metric each Variable belongs to.

    Args:
      tree: A pytree with live nnx objects.

    Returns:
      For the id of each Variable that a metric owns, the metric's path and type.
    """
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_metric):
        if is_metric(x):
            for v in jax.tree.leaves(x, is_leaf=lambda y: isinstance(y, nnx.Variable)):
                found[id(v)] = (jax.tree_util.keystr(path), type(x))
    return found


def paths_of(objects: Any) -> dict[tuple[Any, ...], tuple[str, type]]:
    """Returns the metrics among nnx objects, by their path in the objects' graph."""
    return {
        tuple(path): (str(path), type(x))
        for path, x in nnx.iter_graph(objects)
        if is_metric(x)
    }


def settle(
    jaxpr: Any,
    writes: Sequence[StateWrite],
    values: list[Any],
    varies: Sequence[bool],
    inputs: Sequence[Any],
    states: Sequence[int],
    axis_name: str,
) -> None:
    """Combines, in place, the states of every metric of which one varies.

    Args:
      jaxpr: The recorded step.
      writes: What was written; metrics are told apart by their group.
      values: The new values, replaced by the combined ones.
      varies: Whether each differs between replicas.
      inputs: The step's arrays, to find old values in.
      states: Which of them are states of metrics.
      axis_name: The mesh axis of the replicas.

    Raises:
      ReplicaDivergenceError: How to combine the states is not known.
    """
    jaxpr = open_jaxpr(jaxpr)
    outputs = jaxpr.outvars[len(jaxpr.outvars) - len(writes) :]
    reached = dependent(jaxpr, (jaxpr.invars[i] for i in states))
    for group in {w.group for w in writes if w.group is not None}:
        members = [i for i, w in enumerate(writes) if w.group == group]
        if not any(varies[i] for i in members):
            continue
        found = {}
        for i in members:
            write = writes[i]
            if write.input is None:
                start, old = None, jnp.zeros_like(values[i])
            else:
                start, old = jaxpr.invars[write.input], inputs[write.input]
            found[write.name.rpartition(".")[2]] = _State(
                place=i,
                old=old,
                new=values[i],
                is_reset=_is_literal(outputs[i]) or outputs[i] not in reached,
                is_added_to=start is not None
                and is_increment(jaxpr, outputs[i], start, reached),
            )
        name = writes[members[0]].name.rpartition(".")[0]
        for i, value in _rule(name, group[1])(name, found, axis_name).items():
            values[i] = value.astype(values[i].dtype)


class _State(NamedTuple):
    """One state of a metric.

    Attributes:
      place: Its place among the writes.
      old: What it held before the step.
      new: What it holds after the step, on this replica.
      is_reset: Whether ``new`` depends on no metric's old state.
      is_added_to: Whether ``new`` is ``old`` plus something that depends on none.
    """

    place: int
    old: jax.Array
    new: jax.Array
    is_reset: bool
    is_added_to: bool


_States = dict[str, _State]


def _rule(name: str, kind: type) -> Callable[[str, _States, str], dict[int, Any]]:
    if issubclass(kind, nnx.metrics.Average):
        return _average
    if issubclass(kind, nnx.metrics.Welford) and (
        kind.update is nnx.metrics.Welford.update
    ):
        return _welford
    raise _unknown(name, f"nothing is known about a {kind.__name__}")


def _unknown(name: str, why: str) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        f"The metric {name} differs between replicas, and how to combine its states is "
        f"not known: {why}. Derive it from nnx.metrics.Average, whose states are only "
        "added to or reset in a step (not reset in a branch), or update it with values "
        "that were combined with all_reduce or all_gather."
    )


def _average(name: str, states: _States, axis_name: str) -> dict[int, jax.Array]:
    """Sums of sums: what each replica added is added once."""
    olds = {}
    for label, state in states.items():
        if not (state.is_reset or state.is_added_to):
            raise _unknown(name, f"its {label} is not the old one plus something new")
        olds[label] = jnp.zeros_like(state.old) if state.is_reset else state.old
    added = lax.psum({k: s.new - olds[k] for k, s in states.items()}, axis_name)
    return {s.place: olds[k] + added[k] for k, s in states.items()}


def _welford(name: str, states: _States, axis_name: str) -> dict[int, jax.Array]:
    """Merges counts, means and squared deviations of batches seen by the replicas.

    The pairwise rule is that of Chan, Golub and LeVeque, "Algorithms for computing
    the sample variance" (1983), applied to the old state and each replica's batch.
    """
    count, mean_state, m2_state = states["count"], states["mean"], states["m2"]
    is_reset = all(s.is_reset for s in states.values())
    if not (is_reset or count.is_added_to):
        raise _unknown(name, "its count is not the old one plus something new")
    dtype = m2_state.new.dtype
    n0, mean0, m2_0 = (
        jnp.zeros((), dtype) if is_reset else s.old.astype(dtype)
        for s in (count, mean_state, m2_state)
    )
    n1, mean1, m2_1 = count.new.astype(dtype), mean_state.new, m2_state.new
    one = jnp.ones((), dtype)
    batch = n1 - n0
    batch_mean = jnp.where(
        batch > 0, (n1 * mean1 - n0 * mean0) / jnp.maximum(batch, one), mean0
    )
    shift = batch_mean - mean0
    batch_m2 = m2_1 - m2_0 - shift * shift * n0 * batch / jnp.maximum(n1, one)
    total = n0 + lax.psum(batch, axis_name)
    mean = mean0 + lax.psum(batch * shift, axis_name) / jnp.maximum(total, one)
    away, back = batch_mean - mean, mean0 - mean
    spread = lax.psum(batch_m2 + batch * away * away, axis_name)
    m2 = m2_0 + n0 * back * back + spread
    return {count.place: total, mean_state.place: mean, m2_state.place: m2}


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")
