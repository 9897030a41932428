"""Losses of which the replicas' shares add up to the loss of the global batch.

Each replica divides by the size of the *global* batch, and so its gradient is a share
too, to be combined with ``all_reduce("sum", ...)``. The rules are those of
``tf.nn.compute_average_loss`` and ``tf.nn.scale_regularization_loss``.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from replicax.errors import ContextError
from replicax.values import ReduceOp

from . import collectives
from .assertion import assert_mirrored
from .context import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)


def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
    *,
    mask: Any = None,
) -> jax.Array:
    """Returns this replica's share of the mean loss over the global batch.

    The shares of all replicas add up to ``sum(loss * weight) / global_batch_size``:
    combine them, and their gradients, with ``"sum"``. Outside of any strategy there is
    one replica, and its share is the mean. As in ``tf.nn.compute_average_loss``, the
    weights are not divided by, and an empty batch has the loss 0.

    With a ``mask`` and no ``global_batch_size``, the replicas count their examples
    together, which costs one all-reduce of one integer, and all of them must call.

    Args:
      per_example_loss: This replica's losses, ``[batch, ...]``. All are added up.
      sample_weight: Factors: a number, ``[batch]``, ``[batch, 1]``, or a shape that
        broadcasts to the losses' from the first dimension on.
      global_batch_size: What to divide by, an integer that is the same on all
        replicas, of Python or traced. Left out, it is ``batch`` times the number of
        replicas, or what ``mask`` lets pass, over all replicas.
      mask: Zero or False for what is not there at all, such as the rows of a padded
        batch: ``[batch]``, or more of the losses' dimensions if those are counted
        too, as ``[batch, time]`` for the mean over tokens. The losses of what is
        masked may hold anything, also NaN.

    Returns:
      A scalar in the losses' dtype, summed in float32 or wider; of integers, in JAX's
      default float.

    Raises:
      ContextError: In a cross-replica context without a ``global_batch_size``.
      ReplicaDivergenceError: From ``run``, if ``global_batch_size`` may differ between
        replicas, as a count that was not all-reduced does.
      TypeError: The losses are bool or not numeric, or ``global_batch_size`` is not one
        integer.
      ValueError: The losses are one number, the weights or the mask do not fit them,
        or ``global_batch_size`` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> losses = rx.PerReplica([jnp.float32([1, 2]), jnp.float32([3, 0])])
      >>> shares = strategy.run(rx.compute_average_loss, (losses,))
      >>> [float(share) for share in shares.values]
      [0.75, 0.75]
      >>> mask = rx.PerReplica([jnp.float32([1, 1]), jnp.float32([1, 0])])
      >>> shares = strategy.run(rx.compute_average_loss, (losses,), {"mask": mask})
      >>> float(strategy.reduce("sum", shares))
      2.0
    """
    losses = jnp.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "compute_average_loss takes a loss for each example, of at least one "
            "dimension. Got a scalar: leave out the mean or sum over the batch."
        )
    if mask is not None:
        mask = _real(mask, losses)
    if global_batch_size is not None:
        size = _checked_size(global_batch_size)
    else:
        _require_replica("compute_average_loss", ", or pass global_batch_size")
        size = _global_size(losses, mask)
    return _share(losses, sample_weight, mask, size)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Returns this replica's share of a loss that all replicas compute alike.

    A penalty of the parameters is the same on every replica, and would be counted once
    for each in a sum. So it is added up and divided by their number, as in
    ``tf.nn.scale_regularization_loss``. Do not use it together with
    ``all_reduce("mean", ...)``, which divides already.

    Args:
      regularization_loss: The loss, any shape, or a list of scalars.

    Returns:
      A scalar in the loss' dtype, or of integers, in JAX's default float.

    Raises:
      ContextError: In a cross-replica context.
      TypeError: The loss is bool or not numeric.

    Example:
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> float(strategy.run(rx.scale_regularization_loss, (3.0,)))
      1.5
    """
    _require_replica("scale_regularization_loss")
    loss = jnp.asarray(regularization_loss)
    return _sum_over(_wide(loss), get_strategy().num_replicas_in_sync, loss.dtype)


# -- sizes ---------------------------------------------------------------------------


def _global_size(losses: jax.Array, mask: jax.Array | None) -> Any:
    if mask is None:
        return losses.shape[0] * get_strategy().num_replicas_in_sync
    count, context = jnp.count_nonzero(mask), get_replica_context()
    return count if context is None else context.all_reduce("sum", count)


def _checked_size(size: Any) -> Any:
    """The size as a Python int if it is known, else traced and marked as mirrored."""
    if isinstance(size, jax.core.Tracer):
        if size.ndim or not jnp.issubdtype(size.dtype, jnp.integer):
            raise _no_integer(size)
        return assert_mirrored({"global_batch_size": size})["global_batch_size"]
    try:
        known = operator.index(size)
    except TypeError:
        raise _no_integer(size) from None
    if isinstance(size, bool):
        raise _no_integer(size)
    if known < 0:
        raise ValueError(f"global_batch_size must not be negative. Got {known}.")
    return known


def _no_integer(size: Any) -> TypeError:
    return TypeError(
        f"global_batch_size must be one integer. Got {size!r}. What a mask lets pass "
        "is counted by `compute_average_loss(losses, mask=mask)`, or by "
        '`context.all_reduce("sum", jnp.count_nonzero(mask))`.'
    )


def _require_replica(call: str, or_else: str = "") -> None:
    if has_strategy() and in_cross_replica_context():
        raise ContextError(
            f"`{call}` belongs in a replica's step, but was called in a cross-replica "
            "context (a scope or a merge function). Call it inside a function passed "
            f"to `strategy.run`{or_else}."
        )


# -- sums ----------------------------------------------------------------------------


def _share(losses: jax.Array, weight: Any, mask: jax.Array | None, size: Any) -> Any:
    total = _wide(losses)
    if mask is not None:
        # Not times zero: that would let a NaN through.
        total = jnp.where(mask, total, jnp.zeros_like(total))
    if weight is not None:
        total = total * _aligned(weight, losses).astype(total.dtype)
    return _sum_over(total, size, losses.dtype)


def _wide(x: jax.Array) -> jax.Array:
    """``x`` in a dtype that sums of many halves and quotients of integers fit in."""
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    wide = jnp.promote_types(x.dtype, jnp.float32) if is_float else None
    return collectives.for_sum(x, ReduceOp.MEAN, wide)


def _sum_over(x: jax.Array, size: Any, dtype: Any) -> jax.Array:
    """The sum of ``x`` over ``size``, or 0 where the size is 0, as TF divides."""
    if isinstance(size, int):
        mean = jnp.sum(x) / float(size) if size else jnp.zeros_like(x, shape=())
    else:
        mean = jnp.where(size == 0, 0, jnp.sum(x) / jnp.where(size == 0, 1, size))
    return mean.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else mean


# -- shapes --------------------------------------------------------------------------


def _real(mask: Any, losses: jax.Array) -> jax.Array:
    """What is not masked, ready to select from the losses."""
    mask = jnp.asarray(mask)
    if mask.ndim == 0 or mask.shape != losses.shape[: mask.ndim]:
        raise ValueError(
            f"A mask has the first dimensions of the losses, {losses.shape}. Got a "
            f"mask of shape {mask.shape}."
        )
    return _with_dims(mask != 0, losses.ndim)


def _aligned(weight: Any, losses: jax.Array) -> jax.Array:
    """Weights that start with the losses' first dimension, ready to multiply them."""
    weight = jnp.asarray(weight)
    aligned = weight
    if weight.ndim == losses.ndim + 1 and weight.shape[-1] == 1:
        aligned = weight[..., 0]
    fits = aligned.ndim <= losses.ndim and all(
        n in (1, wanted) for n, wanted in zip(aligned.shape, losses.shape, strict=False)
    )
    if not fits:
        raise ValueError(
            f"sample_weight of shape {weight.shape} does not fit losses of shape "
            f"{losses.shape}: give one number, or one weight for each example."
        )
    return _with_dims(aligned, losses.ndim)


def _with_dims(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))
