"""The mean and variance of a batch, of one replica or of all of them together.

Of what counts, the sum, the sum of squares and the number are added up. The first two
are taken of the distance from the running mean: a variance made from sums of squares
loses its digits where the mean is large beside the spread, and the running mean, which
all replicas share without a word between them, is soon near. This is the shifted
algorithm of Chan, Golub and LeVeque, "Algorithms for computing the sample variance"
(1983). Merging the variances of single replicas would be exact from the first step, but
needs the mean of all before: a second all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Moments(NamedTuple):
    """What a batch is normalised with.

    Attributes:
      mean: The mean, of the shape of the features.
      variance: The biased variance, of the same shape.
    """

    mean: jax.Array
    variance: jax.Array

    def toward(self, new: Moments, momentum: float) -> Moments:
        """Moves running averages by ``1 - momentum`` of the way to ``new``.

        Args:
          new: The moments of a batch.
          momentum: How much of the old averages stays.

        Returns:
          The new averages, without a gradient and in the dtype of the old ones; these
          exactly where ``new`` equals them.
        """
        new = Moments(*lax.stop_gradient(tuple(new)))
        return Moments(
            *(
                (old + (1 - momentum) * (n - old)).astype(old.dtype)
                for old, n in zip(self, new, strict=True)
            )
        )


def batch_moments(
    x: jax.Array,
    axes: Sequence[int],
    running: Moments,
    *,
    mask: jax.Array | None = None,
    total: Callable[[Any], Any] = lambda sums: sums,
    fast: bool = True,
) -> Moments:
    """Computes the mean and the variance of a batch.

    Args:
      x: The batch, in the dtype that sums are made in.
      axes: The dimensions to reduce.
      running: What stands in where nothing counts, shape ``x`` without ``axes``. Its
        mean must be the same on all replicas that ``total`` adds up.
      mask: Booleans of as many dimensions as ``x`` that broadcast to it: what counts.
      total: Adds a structure of arrays up over replicas.
      fast: Whether to call ``total`` once. Otherwise it is called twice, and the
        variance is exact also where the running mean is far off.

    Returns:
      The moments of all that counts on all replicas, of the shape of ``running``.

    Raises:
      ValueError: The mask has another number of dimensions than ``x``.
    """
    axes = tuple(axes)
    shift = lax.stop_gradient(running.mean).astype(x.dtype)
    count = _count(x, axes, mask)

    def deviations(center: jax.Array) -> jax.Array:
        values = x - jnp.expand_dims(center, axes)
        return values if mask is None else jnp.where(mask, values, 0)

    distance = deviations(shift)
    sums = count, jnp.sum(distance, axes)
    if fast:
        sums = *sums, jnp.sum(_squared(distance), axes)
    count, first, *second = total(sums)
    divisor = jnp.maximum(count, 1)
    offset = first / divisor
    mean = shift + offset
    if fast:
        variance = second[0] / divisor - _squared(offset)
        variance = jnp.maximum(variance, 0)
    else:
        variance = total(jnp.sum(_squared(deviations(mean)), axes)) / divisor
    return Moments(
        jnp.where(count > 0, mean, running.mean),
        jnp.where(count > 0, variance, running.variance),
    )


def _count(x: jax.Array, axes: tuple[int, ...], mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return jnp.asarray(math.prod(x.shape[a] for a in axes), x.real.dtype)
    if mask.ndim != x.ndim:
        ones = ", 1" * (x.ndim - 1)
        raise ValueError(
            f"A mask needs as many dimensions as the batch, {x.ndim}, of length 1 "
            f"where it does not matter. Got shape {mask.shape} for a batch of shape "
            f"{x.shape}. For a mask of rows, give `mask.reshape(-1{ones})`."
        )
    return jnp.sum(jnp.broadcast_to(mask, x.shape), axes, dtype=x.real.dtype)


def _squared(x: jax.Array) -> jax.Array:
    return (x * x.conj()).real
