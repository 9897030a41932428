"""``assert_mirrored``: saying that a value must be the same on all replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
from jax.ad_checkpoint import checkpoint_name

from replicax.errors import ReplicaDivergenceError, listed

from .context import get_replica_context, has_strategy
from .merge import is_per_replica
from .replication import ASSERT_MIRRORED


def assert_mirrored(tree: Any) -> Any:
    """Raises unless every array of ``tree`` is the same on all replicas.

    Inside a step, the values are marked, and the step is refused when they are not
    proved equal; the error names the line that makes them differ. Outside, no leaf may
    be a :class:`PerReplica`.

    Args:
      tree: A nested structure of arrays.

    Returns:
      ``tree``.

    Raises:
      ReplicaDivergenceError: A leaf differs, or may differ, between replicas.

    Example:
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> rx.assert_mirrored({"w": jnp.ones(2)})["w"].tolist()
      [1.0, 1.0]
      >>> rx.assert_mirrored({"w": rx.PerReplica([1.0, 2.0])})
      Traceback (most recent call last):
        ...
      replicax.ReplicaDivergenceError: ['w'] holds one value per replica...
    """
    if has_strategy() and get_replica_context() is not None:
        return jax.tree_util.tree_map_with_path(_mark, tree, is_leaf=is_per_replica)
    diverged = [
        jax.tree_util.keystr(path) or "The value"
        for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_per_replica)
        if is_per_replica(x)
    ]
    if diverged:
        raise ReplicaDivergenceError(
            f"{listed(diverged, ', ')} holds one value per replica, where a mirrored "
            "value is wanted. Combine it with `strategy.reduce`, or all-reduce what it "
            "is computed from inside the step."
        )
    return tree


def _mark(path: Any, x: Any) -> Any:
    if is_per_replica(x):
        raise ReplicaDivergenceError(
            f"{jax.tree_util.keystr(path) or 'The value'} is a PerReplica that the "
            "step captured: it holds one value per replica."
        )
    if not isinstance(x, jax.core.Tracer):
        return x
    return checkpoint_name(
        x, ASSERT_MIRRORED + (jax.tree_util.keystr(path) or "The value")
    )
