"""Sums over replicas of numbers that are sent in fewer bytes than they have.

An all-reduce of ``n`` replicas sends each number about twice, once as a summand and
once as part of a sum. Here these are two collectives, so that each may have a dtype of
its own, and the sums are made in a third: each replica is sent its share of all
replicas' summands, adds them up, and sends the sums to everybody. Both collectives only
move bits, which works for dtypes that a backend cannot add: XLA on CPU would send
``bfloat16`` as ``float32``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _compat
from replicax.values import ReduceOp

from .communication import COMPRESSION_PAYS
from .packing import Arrays, in_packs

LEVELS = 127
"""The largest number that is sent as an int8: symmetric, so -128 is not."""


def is_worth_it(dtype: Any, sum_dtype: Any, size: int) -> bool:
    """Whether to send an array as bfloat16: a float one that is wide and large enough.

    Args:
      dtype: The dtype of the values: integers are never rounded.
      sum_dtype: The dtype that they would be sent in otherwise.
      size: How many there are.
    """
    is_wide = jnp.issubdtype(dtype, jnp.floating) and sum_dtype.itemsize > 2
    return is_wide and size * sum_dtype.itemsize >= COMPRESSION_PAYS


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
def exchanged_sum(
    x: jax.Array, sum_dtype: Any, sent_dtype: Any, axis_name: str, num_replicas: int
) -> jax.Array:
    """Sums an array over replicas in two steps.

    Its gradient is the all-reduce of the cotangents.

    Args:
      x: One replica's summand, of the dtype that it is sent in.
      sum_dtype: The dtype that is summed in.
      sent_dtype: The dtype that sums are sent in.
      axis_name: The mesh axis of the replicas.
      num_replicas: Its size.

    Returns:
      The sum, of ``sent_dtype``, equal on all replicas to the bit.
    """
    if num_replicas == 1 or not x.size:  # XLA has no collectives of empty arrays
        return _compat.collective_of_one(x.astype(sent_dtype), "all_reduce")
    padded = jnp.pad(x.ravel(), (0, -x.size % num_replicas))
    rows = padded.reshape(num_replicas, -1)
    deal = functools.partial(
        lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0
    )
    collect = functools.partial(lax.all_gather, axis_name=axis_name, tiled=True)
    sums = jnp.sum(_as_bits(deal, rows), axis=0, dtype=sum_dtype).astype(sent_dtype)
    return _as_bits(collect, sums)[: x.size].reshape(x.shape)


@exchanged_sum.defjvp
def _exchanged_sum_jvp(
    sum_dtype: Any,
    sent_dtype: Any,
    axis_name: str,
    num_replicas: int,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    how = (sum_dtype, sent_dtype, axis_name, num_replicas)
    return exchanged_sum(*primals, *how), lax.psum(*tangents, axis_name)


def _as_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Moves an array, a ``bfloat16`` one in the guise of integers."""
    if x.dtype != jnp.bfloat16:
        return move(x)
    moved = move(lax.bitcast_convert_type(x, jnp.uint16))
    return lax.bitcast_convert_type(moved, jnp.bfloat16)


def all_reduce_int8(
    op: ReduceOp | str,
    value: Any,
    residual: Any,
    axis_name: str,
    num_replicas: int,
    bytes_per_pack: int = 0,
) -> tuple[Any, Any]:
    """Combines values that are sent as int8; see ``ReplicaContext.all_reduce_int8``.

    Error feedback is that of Seide et al., "1-Bit Stochastic Gradient Descent and its
    Application to Data-Parallel Distributed Training of Speech DNNs" (2014): what
    rounding took away is added to the next value.
    """
    op = ReduceOp.of(op)
    leaves, treedef = jax.tree.flatten(value)
    if not leaves:
        return value, value
    leaves = [_float(leaf) for leaf in leaves]
    residuals = _residuals(residual, leaves, treedef)
    whole = [x.astype(jnp.float32) + r for x, r in zip(leaves, residuals, strict=True)]
    scales = _scales(whole, axis_name, num_replicas)
    rounded = [_rounded(x, s) for x, s in zip(whole, scales, strict=True)]
    counts = jnp.int16 if LEVELS * num_replicas <= jnp.iinfo(jnp.int16).max else "int32"
    send = functools.partial(
        exchanged_sum,
        axis_name=axis_name,
        num_replicas=num_replicas,
        sum_dtype=counts,
        sent_dtype=counts,
    )
    totals = in_packs(lambda xs: list(map(send, xs)), rounded, bytes_per_pack)
    divisor = num_replicas if op is ReduceOp.MEAN else 1
    reduced = [
        (total * scale / divisor).astype(leaf.dtype)
        for total, scale, leaf in zip(totals, scales, leaves, strict=True)
    ]
    # What is not finite was not sent: it must not stay in the residual for good.
    left = [
        jnp.where(jnp.isfinite(s), x - q * s, r)
        for x, q, s, r in zip(whole, rounded, scales, residuals, strict=True)
    ]
    return treedef.unflatten(reduced), treedef.unflatten(left)


def _float(leaf: Any) -> jax.Array:
    x = jnp.asarray(leaf)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"all_reduce_int8 rounds floats. Got values of dtype {x.dtype}: combine "
            "them with all_reduce."
        )
    return lax.stop_gradient(x)


def _residuals(residual: Any, leaves: Arrays, treedef: Any) -> Arrays:
    if residual is None:
        return [jnp.zeros(x.shape, jnp.float32) for x in leaves]
    found, structure = jax.tree.flatten(residual)
    shapes, wanted = [jnp.shape(r) for r in found], [x.shape for x in leaves]
    if structure != treedef or shapes != wanted:
        raise ValueError(
            "residual must be what the last all_reduce_int8 of such values returned, "
            f"or None at first. Got {structure} of shapes {shapes} for values of "
            f"{treedef} and shapes {wanted}."
        )
    return [lax.stop_gradient(jnp.asarray(r, jnp.float32)) for r in found]


def _scales(arrays: Arrays, axis_name: str, num_replicas: int) -> jax.Array:
    """For each array what one level stands for, on all replicas; inf if none can.

    Not every backend's maximum passes a NaN on, but each passes an infinity on.
    """
    peaks = jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in arrays])
    peaks = jnp.where(jnp.isfinite(peaks), peaks, jnp.inf)
    if num_replicas == 1:
        peaks = _compat.collective_of_one(peaks, "all_reduce")
    else:
        peaks = lax.pmax(peaks, axis_name)
    scales = peaks / LEVELS
    return jnp.where(scales > 0, scales, 1)


def _rounded(x: jax.Array, scale: jax.Array) -> jax.Array:
    levels = jnp.clip(jnp.round(x / scale), -LEVELS, LEVELS)
    return jnp.where(jnp.isfinite(scale), levels, 0).astype(jnp.int8)
