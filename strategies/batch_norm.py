"""Which replicas' rows a batch is normalised with, and whose statistics are kept.

What the layers for Flax nnx and linen have in common.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from .assertion import assert_mirrored
from .batch_statistics import Moments, batch_moments
from .context import get_replica_context

Statistics = Literal["averaged", "local", "synchronized"]


def check_options(
    statistics: str, axis_name: str | None, axis_index_groups: Any
) -> None:
    """Raises unless the switch has one of its values, and is the only one.

    Raises:
      ValueError: ``statistics`` is unknown, or an axis is named.
    """
    if statistics not in get_args(Statistics):
        wanted = ", ".join(map(repr, get_args(Statistics)))
        raise ValueError(f"statistics must be one of {wanted}. Got {statistics!r}.")
    if axis_name is not None or axis_index_groups is not None:
        raise ValueError(
            "The current strategy says which replicas there are, so no axis is named "
            f"here. Got axis_name={axis_name!r} and "
            f"axis_index_groups={axis_index_groups!r}. For the statistics of the whole "
            'global batch, give statistics="synchronized".'
        )


def reduction_axes(x: jax.Array, feature_axis: Any) -> tuple[int, ...]:
    """Returns the dimensions of ``x`` that are not those of the features.

    Args:
      x: A batch.
      feature_axis: One dimension or several; negative ones count from the end.
    """
    features = (feature_axis,) if isinstance(feature_axis, int) else feature_axis
    kept = {axis % x.ndim for axis in features}
    return tuple(axis for axis in range(x.ndim) if axis not in kept)


def moments_of(
    x: jax.Array,
    axes: tuple[int, ...],
    running: Moments,
    mask: jax.Array | None,
    statistics: Statistics,
    fast: bool,
) -> Moments:
    """Returns what to normalise ``x`` with; see :func:`.batch_moments`.

    Args:
      x: One replica's batch.
      axes: The dimensions to reduce.
      running: The running averages.
      mask: What counts, or None.
      statistics: Whose rows count.
      fast: Whether one all-reduce must do.

    Raises:
      ValueError: The mask has another number of dimensions than ``x``.
      ReplicaDivergenceError: The statistics are synchronized, but the running mean
        differs between replicas.
    """
    context = get_replica_context()
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    if statistics != "synchronized" or context is None:
        return batch_moments(x, axes, running, mask=mask, fast=fast)
    # Distances from different means do not add up.
    shift = assert_mirrored({"running mean": running.mean})["running mean"]
    return batch_moments(
        x,
        axes,
        running._replace(mean=shift),
        mask=mask,
        total=lambda sums: context.all_reduce("sum", sums),
        fast=fast,
    )


def shared(running: Moments, statistics: Statistics) -> Moments:
    """Returns the running averages that all replicas keep.

    Args:
      running: This replica's.
      statistics: What to make of them: their mean over replicas if ``"averaged"``,
        those of replica 0 if ``"local"``; if ``"synchronized"``, they are shared.
    """
    context = get_replica_context()
    if context is None or statistics == "synchronized":
        return running
    if statistics == "averaged":
        return context.all_reduce("mean", running)
    is_first = context.replica_id_in_sync_group == 0
    of_first = (jnp.where(is_first, x, jnp.zeros_like(x)) for x in running)
    return context.all_reduce("sum", Moments(*of_first))


def normalize(
    x: jax.Array,
    axes: tuple[int, ...],
    moments: Moments,
    scale: jax.Array | None,
    bias: jax.Array | None,
    epsilon: float,
) -> jax.Array:
    """Normalises ``x``, then scales and shifts it.

    Args:
      x: A batch.
      axes: The dimensions that ``moments`` lacks.
      moments: The mean and variance.
      scale: What to multiply with, of the shape of the moments, or None.
      bias: What to add, of the same shape, or None.
      epsilon: Added to the variance.

    Returns:
      The result, in the shape of ``x``.
    """
    mean, variance = (jnp.expand_dims(m, axes) for m in moments)
    y = jax.nn.standardize(x, mean=mean, variance=variance, epsilon=epsilon)
    if scale is not None:
        y *= jnp.expand_dims(scale, axes)
    if bias is not None:
        y += jnp.expand_dims(bias, axes)
    return y
