"""How a write of all replicas becomes one value.

Whether that needs communication is not known while a step is traced: it depends on
whether the written value differs between replicas, which the proof that follows finds
out. So a step records *that* it aggregates, and the decision is made when the program
is lowered: a value that is the same on all replicas is summed by multiplying it, and is
its own mean and its own first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax._compat import Aggregated, aggregate
from replicax.values import ReduceOp

from ..collectives import check_reducible
from .synchronization import VariableAggregation


def aggregated(
    aggregation: VariableAggregation, value: Any, axis_name: str, num_replicas: int
) -> jax.Array:
    """Combines a value that each replica has traced.

    Args:
      aggregation: ``SUM``, ``MEAN`` or ``ONLY_FIRST_REPLICA``.
      value: This replica's value.
      axis_name: The mesh axis of the replicas.
      num_replicas: Its size.

    Returns:
      The combined value, the same on all replicas, in the dtype of ``value``.

    Raises:
      TypeError: The dtype has no sum.
    """
    value = jnp.asarray(value)
    if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
        check_reducible(value.dtype, ReduceOp[aggregation.name])
    communicate, without = _WAYS[aggregation]
    return aggregate(
        value,
        axis_name,
        Aggregated(
            lambda x: communicate(x, axis_name, num_replicas),
            lambda x: without(x, num_replicas),
        ),
    )


def _sum(x: jax.Array, axis_name: str, num_replicas: int) -> jax.Array:
    del num_replicas
    return lax.psum(x, axis_name)


def _times(x: jax.Array, num_replicas: int) -> jax.Array:
    return x * jnp.asarray(num_replicas, x.dtype)


def _mean(x: jax.Array, axis_name: str, num_replicas: int) -> jax.Array:
    return lax.psum(x, axis_name) / jnp.asarray(num_replicas, x.dtype)


def _first(x: jax.Array, axis_name: str, num_replicas: int) -> jax.Array:
    """Replica 0's value, bit for bit: a sum of its bits with zeros."""
    del num_replicas
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _first(jax.random.key_data(x), axis_name, 0)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.iscomplexobj(x):
        return lax.complex(_first(x.real, axis_name, 0), _first(x.imag, axis_name, 0))
    bits = x
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    wide = bits.astype(jnp.promote_types(bits.dtype, jnp.uint32))
    is_first = lax.axis_index(axis_name) == 0
    total = lax.psum(jnp.where(is_first, wide, 0), axis_name).astype(bits.dtype)
    return total if bits is x else lax.bitcast_convert_type(total, x.dtype)


def _itself(x: jax.Array, num_replicas: int) -> jax.Array:
    del num_replicas
    return x


_WAYS = {
    VariableAggregation.SUM: (_sum, _times),
    VariableAggregation.MEAN: (_mean, _itself),
    VariableAggregation.ONLY_FIRST_REPLICA: (_first, _itself),
}
