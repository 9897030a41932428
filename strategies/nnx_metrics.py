"""Combining the states of nnx metrics over replicas.

A metric's states belong together. The count of an ``Average`` is often the same on all
replicas (it follows from the batch's shape) while its total is not: combining only
what differs would make the mean wrong by a factor. So if one state of a metric varies,
all of them are combined by the metric's own rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from replicax._compat import open_jaxpr
from replicax.errors import ReplicaDivergenceError

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
    axis_name: str,
) -> None:
    """Combines, in place, the states of every metric of which one varies.

    Args:
      jaxpr: The recorded step.
      writes: What was written; metrics are told apart by their group.
      values: The new values, replaced by the combined ones.
      varies: Whether each differs between replicas.
      inputs: The step's arrays, to find old values in.
      axis_name: The mesh axis of the replicas.

    Raises:
      ReplicaDivergenceError: The metric's rule is not known.
    """
    first_write = len(open_jaxpr(jaxpr).outvars) - len(writes)
    for group in {w.group for w in writes if w.group is not None}:
        members = [i for i, w in enumerate(writes) if w.group == group]
        if not any(varies[i] for i in members):
            continue
        states = {}
        for i in members:
            w = writes[i]
            if w.input is not None and _depends(jaxpr, first_write + i, w.input):
                old = inputs[w.input]
            else:
                old = jnp.zeros_like(values[i])
            states[w.name.rsplit(".", 1)[-1]] = (i, old, values[i])
        kind = group[1]
        if issubclass(kind, nnx.metrics.Average):
            combined = _average(states, axis_name)
        elif issubclass(kind, nnx.metrics.Welford):
            combined = _welford(states, axis_name)
        else:
            raise ReplicaDivergenceError(
                f"The metric {writes[members[0]].name.rsplit('.', 1)[0]} "
                f"({kind.__name__}) differs between replicas, and how to combine its "
                "states is not known. Derive it from nnx.metrics.Average or "
                "nnx.metrics.Welford, or update it with values that were combined "
                "with all_reduce or all_gather."
            )
        for i, value in combined.items():
            values[i] = value.astype(values[i].dtype)


_States = dict[str, tuple[int, jax.Array, jax.Array]]


def _average(states: _States, axis_name: str) -> dict[int, jax.Array]:
    """Sums of sums: what each replica added is added once."""
    added = lax.psum({i: new - old for i, old, new in states.values()}, axis_name)
    return {i: old + added[i] for i, old, _ in states.values()}


def _welford(states: _States, axis_name: str) -> dict[int, jax.Array]:
    """Merges counts, means and squared deviations of batches seen by the replicas.

    The pairwise rule is that of Chan, Golub and LeVeque, "Algorithms for computing
    the sample variance" (1983), applied to the old state and each replica's batch.
    """
    (i_n, n0, n1), (i_mean, mean0, mean1) = states["count"], states["mean"]
    i_m2, m2_0, m2_1 = states["m2"]
    n0, n1 = n0.astype(m2_1.dtype), n1.astype(m2_1.dtype)
    batch = n1 - n0
    nonzero = jnp.maximum(batch, 1)
    batch_mean = jnp.where(batch > 0, (n1 * mean1 - n0 * mean0) / nonzero, mean0)
    batch_m2 = m2_1 - m2_0 - (batch_mean - mean0) ** 2 * n0 * batch / jnp.maximum(n1, 1)
    total = n0 + lax.psum(batch, axis_name)
    mean = mean0 + lax.psum(batch * (batch_mean - mean0), axis_name) / jnp.maximum(
        total, 1
    )
    spread = batch_m2 + batch * (batch_mean - mean) ** 2
    m2 = m2_0 + n0 * (mean0 - mean) ** 2 + lax.psum(spread, axis_name)
    return {i_n: total, i_mean: mean, i_m2: m2}


def _depends(jaxpr: Any, output: int, input_: int) -> bool:
    """Whether an output may depend on an input; else the state was reset."""
    jaxpr = open_jaxpr(jaxpr)
    reached = {jaxpr.invars[input_]}
    for eqn in jaxpr.eqns:
        if any(v in reached for v in eqn.invars if not hasattr(v, "val")):
            reached.update(eqn.outvars)
    out = jaxpr.outvars[output]
    return not hasattr(out, "val") and out in reached
