"""What replicas do together inside a step: all-reduce, all-gather, reduce-scatter.

These functions are traced once, for every replica at the same time, with the mesh
axis named. All of them take nested structures.

Dtype rules, the same wherever Replicax reduces:

* ``SUM`` keeps the dtype. Sums of ``bfloat16`` and ``float16`` are made in that dtype
  unless ``accumulate_dtype`` says otherwise.
* ``MEAN`` of floats and complex numbers keeps the dtype. ``MEAN`` of integers is a true
  division, made as ``jnp.mean`` makes it: summed in JAX's default float, which does not
  overflow, and returned in it.
* ``bool`` has no sum or mean: cast it first.
* With ``compression="bfloat16"`` a summand is rounded to ``bfloat16`` first, and so is
  the sum, which is made in ``accumulate_dtype``. Without that, the backend adds up in
  ``bfloat16`` or in what it has instead. A mean divides after that, in the old dtype.

Their gradients are TF's: the gradient of an all-reduce is the same all-reduce of the
cotangents, and the gradient of an all-gather is this replica's slice of their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _compat
from replicax.values import ReduceOp

from .communication import DEFAULT, CommunicationOptions
from .compression import exchanged_sum, is_worth_it
from .packing import in_packs


def check_reducible(dtype: Any, op: ReduceOp) -> None:
    """Raises if values of ``dtype`` have no sum.

    Raises:
      TypeError: ``dtype`` is bool, a PRNG key, or not numeric.
    """
    if dtype == jnp.bool_ or not jnp.issubdtype(dtype, jnp.number):
        is_bool = dtype == jnp.bool_
        hint = " Cast it in the step, e.g. `x.astype(jnp.int32)`." if is_bool else ""
        raise TypeError(f"{op.name} needs numbers. Got values of dtype {dtype}.{hint}")


def for_sum(x: jax.Array, op: ReduceOp, accumulate_dtype: Any = None) -> jax.Array:
    """Casts ``x`` to the dtype that its sum is made in.

    Args:
      x: One replica's value, any shape.
      op: What the sum is for: a mean of integers must not overflow.
      accumulate_dtype: The dtype to sum in, or None for the module's rules.

    Returns:
      ``x``, perhaps in another dtype.

    Raises:
      TypeError: The dtype has no sum.
    """
    check_reducible(x.dtype, op)
    if accumulate_dtype is not None:
        return x.astype(accumulate_dtype)
    if op is ReduceOp.MEAN and jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.result_type(float))
    return x


def after_sum(total: jax.Array, op: ReduceOp, count: Any, dtype: Any) -> jax.Array:
    """Turns a sum into the result of ``op``.

    Args:
      total: The sum.
      op: ``SUM`` or ``MEAN``.
      count: What a mean divides by.
      dtype: The dtype that the values had before :func:`for_sum`. The result returns
        to it, unless it is an integer's.

    Returns:
      The reduced value.
    """
    if op is ReduceOp.MEAN:
        if isinstance(count, jax.Array) and jnp.issubdtype(total.dtype, jnp.inexact):
            wide = jnp.promote_types(total.dtype, jnp.float32)  # many weights count
            total, count = total.astype(wide), count.astype(wide)
        total = total / count
    return total.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total


def all_reduce(
    op: ReduceOp | str,
    value: Any,
    axis_name: str,
    num_replicas: int,
    options: CommunicationOptions = DEFAULT,
) -> Any:
    """Combines ``value`` over all replicas, element by element.

    Args:
      op: ``SUM`` or ``MEAN``.
      value: A nested structure of this replica's values.
      axis_name: The mesh axis of the replicas.
      num_replicas: Its size.
      options: How it is sent and summed.

    Returns:
      The same structure, equal on all replicas.

    Raises:
      TypeError: A leaf is not numeric.
    """
    op = ReduceOp.of(op)
    leaves, treedef = jax.tree.flatten(value)
    if not leaves:
        return value
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    summands = [for_sum(a, op, options.accumulate_dtype) for a in arrays]
    dtypes = [a.dtype for a in arrays]
    totals = sum_arrays(summands, dtypes, axis_name, num_replicas, options)
    return treedef.unflatten(
        after_sum(total, op, num_replicas, a.dtype)
        for total, a in zip(totals, arrays, strict=True)
    )


def sum_arrays(
    arrays: list[jax.Array],
    dtypes: Sequence[Any],
    axis_name: str,
    num_replicas: int,
    options: CommunicationOptions,
) -> list[jax.Array]:
    """Sums arrays over replicas, packed and compressed as the options say.

    Args:
      arrays: This replica's summands, in the dtypes to sum in.
      dtypes: The dtypes that they had before :func:`for_sum`.
      axis_name: The mesh axis of the replicas.
      num_replicas: Its size.
      options: How they are sent.

    Returns:
      The sums, in their summands' dtypes.
    """
    where = {"axis_name": axis_name, "num_replicas": num_replicas}
    if num_replicas == 1:
        return psum(arrays, **where)
    sent, sums_in = arrays, None
    if options.compression is not None:
        sums_in = options.accumulate_dtype
        sent = [
            x.astype(jnp.bfloat16) if is_worth_it(dtype, x.dtype, x.size) else x
            for x, dtype in zip(arrays, dtypes, strict=True)
        ]

    def send(buffers: list[jax.Array]) -> list[jax.Array]:
        if sums_in is None:
            return psum(buffers, **where)
        whole = {i: x for i, x in enumerate(buffers) if x.dtype != jnp.bfloat16}
        totals = psum(whole, **where) if whole else {}
        return [
            totals[i] if i in totals else exchanged_sum(x, sums_in, x.dtype, **where)
            for i, x in enumerate(buffers)
        ]

    totals = in_packs(send, sent, options.bytes_per_pack)
    return [total.astype(x.dtype) for total, x in zip(totals, arrays, strict=True)]


def psum(tree: Any, axis_name: str, num_replicas: int) -> Any:
    """Sums a nested structure of arrays over replicas, with nobody to ask if alone.

    One psum of all leaves is one equation, which XLA combines as it sees fit.
    """
    if num_replicas == 1:
        return jax.tree.map(lambda x: _compat.collective_of_one(x, "all_reduce"), tree)
    return lax.psum(tree, axis_name)


def all_gather(value: Any, axis: int, axis_name: str, num_replicas: int) -> Any:
    """Concatenates ``value`` over replicas along ``axis``, in replica order.

    Args:
      value: A nested structure of this replica's arrays, rank at least 1.
      axis: The dimension to concatenate on; negative counts from the end.
      axis_name: The mesh axis of the replicas.
      num_replicas: Its size.

    Returns:
      The same structure, equal on all replicas, ``num_replicas`` times longer on
      ``axis``.

    Raises:
      ValueError: A leaf has no such dimension.
    """

    def gather(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        dim = normalize_axis(axis, x.ndim, "all_gather")
        if num_replicas == 1 or x.shape[dim] == 0:  # XLA gathers no empty arrays
            return _compat.collective_of_one(x, "all_gather")
        return lax.all_gather(x, axis_name, axis=dim, tiled=True)

    return jax.tree.map(gather, value)


def reduce_scatter(
    op: ReduceOp | str, value: Any, axis: int, axis_name: str, num_replicas: int
) -> Any:
    """Combines ``value`` over replicas and leaves each replica its slice of the result.

    Args:
      op: ``SUM`` or ``MEAN``.
      value: A nested structure of this replica's arrays, rank at least 1.
      axis: The dimension to split; its length must be a multiple of
        ``num_replicas``. Negative counts from the end.
      axis_name: The mesh axis of the replicas.
      num_replicas: Its size.

    Returns:
      The same structure; slice ``r`` of the reduced value on replica ``r``.

    Raises:
      ValueError: A leaf has no such dimension or it does not divide evenly.
      TypeError: A leaf is not numeric.
    """
    op = ReduceOp.of(op)

    def scatter(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        dim = normalize_axis(axis, x.ndim, "reduce_scatter")
        if x.shape[dim] % num_replicas:
            raise ValueError(
                f"reduce_scatter splits dimension {dim} over {num_replicas} replicas, "
                f"so its length must be a multiple of {num_replicas}. Got shape "
                f"{x.shape}. Pad it, or use all_reduce."
            )
        summand = for_sum(x, op)
        if num_replicas == 1 or x.shape[dim] == 0:  # XLA scatters no empty arrays
            total = _compat.collective_of_one(summand, "reduce_scatter")
        else:
            total = lax.psum_scatter(
                summand, axis_name, scatter_dimension=dim, tiled=True
            )
        return after_sum(total, op, num_replicas, x.dtype)

    return jax.tree.map(scatter, value)


def normalize_axis(axis: int, ndim: int, call: str) -> int:
    """Returns ``axis`` counted from the front.

    Raises:
      ValueError: There is no such dimension, or ``axis`` is not an int.
    """
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise ValueError(f"{call} needs an int as axis. Got {axis!r}.")
    axis = axis.__index__()
    if ndim == 0:
        raise ValueError(
            f"{call} needs arrays of at least one dimension. Got a scalar: in a step, "
            "add one with `x[None]`; outside, `experimental_local_results` returns the "
            "scalars of all replicas."
        )
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{call} got axis {axis} for an array of {ndim} dimensions: it must be "
            f"in [{-ndim}, {ndim - 1}]."
        )
    return axis % ndim
