"""Arrays held in slices: one slice of the flattened array on every replica.

An array of ``n`` elements is flattened, padded with zeros to a multiple of the number
of replicas ``N``, and replica ``r`` holds elements ``r * k`` to ``(r + 1) * k``, where
``k = ceil(n / N)``. Inside a step, :func:`reduce_scatter` leaves each replica its slice
of the reduced gradients, and :func:`all_gather` makes whole arrays of updated slices.

Each array costs one collective of each sort; small ones of one dtype share one.
This is stage 1 and 2 of ZeRO (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.values import ReduceOp

from . import collectives

BYTES_PER_PACK = 1 << 12
"""Arrays of at most so many bytes share a collective: copying them is quicker."""


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """How an array is cut into slices.

    Attributes:
      shape: The shape of the whole array.
      dtype: Its dtype.
      num_replicas: The number of slices, ``N``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    num_replicas: int

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """The number of elements of a slice, padding included: ``k``."""
        return -(-self.size // self.num_replicas)

    @property
    def nbytes(self) -> int:
        """The bytes of all slices together."""
        return self.length * self.num_replicas * self.dtype.itemsize

    def to_shards(self, x: Any) -> jax.Array:
        """The slices of an array, stacked.

        Args:
          x: The whole array.

        Returns:
          An array `[N, k]` with replica ``r``'s slice in row ``r``.

        Raises:
          ValueError: ``x`` has another shape.
        """
        x = jnp.asarray(x)
        if x.shape != self.shape:
            raise ValueError(f"Expected an array of shape {self.shape}. Got {x.shape}.")
        flat = x.reshape(-1)
        padding = self.length * self.num_replicas - self.size
        if padding:
            flat = jnp.pad(flat, (0, padding))
        return flat.reshape(self.num_replicas, self.length)

    def from_shards(self, shards: Any) -> jax.Array:
        """The whole array of slices `[N, k]`.

        Raises:
          ValueError: ``shards`` is not `[N, k]`.
        """
        wanted = (self.num_replicas, self.length)
        shards = jnp.asarray(shards)
        if shards.shape != wanted:
            raise ValueError(f"Expected slices of shape {wanted}. Got {shards.shape}.")
        return shards.reshape(-1)[: self.size].reshape(self.shape)

    def own_slice(self, x: Any, replica_id: Any) -> jax.Array:
        """The slice `[k]` of a whole array that a replica holds.

        Args:
          x: The whole array.
          replica_id: The replica's number, perhaps traced.
        """
        return lax.dynamic_index_in_dim(
            self.to_shards(x), replica_id, axis=0, keepdims=False
        )


def shard_layout(shape: Sequence[int], dtype: Any, num_replicas: int) -> ShardLayout:
    """Decides how an array is cut into slices.

    Args:
      shape: The shape of the whole array; scalars and empty arrays are fine.
      dtype: Its dtype.
      num_replicas: How many replicas hold a slice each.

    Returns:
      The layout.

    Raises:
      ValueError: ``num_replicas`` is less than 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from replicax.strategies.state_sharding import shard_layout
      >>> layout = shard_layout((5,), jnp.float32, 2)
      >>> layout.to_shards(jnp.arange(5.0)).tolist()
      [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]
    """
    if num_replicas < 1:
        raise ValueError(f"Expected at least one replica. Got {num_replicas}.")
    return ShardLayout(tuple(shape), np.dtype(dtype), num_replicas)


def reduce_scatter(
    op: ReduceOp | str,
    arrays: Sequence[Any],
    layouts: Sequence[ShardLayout],
    axis_name: str,
    bytes_per_pack: int = BYTES_PER_PACK,
) -> list[jax.Array]:
    """Combines arrays over replicas and leaves each replica its slices of the results.

    All replicas must call it.

    Args:
      op: ``SUM`` or ``MEAN``.
      arrays: This replica's whole arrays.
      layouts: How each is cut.
      axis_name: The mesh axis of the replicas.
      bytes_per_pack: Arrays of at most so many bytes share one collective a dtype.

    Returns:
      A slice `[k]` of each reduced array.

    Raises:
      TypeError: An array is not numeric.
      ValueError: An array has another shape than its layout.
    """

    def scatter(shards: jax.Array, replicas: int) -> jax.Array:
        return collectives.reduce_scatter(op, shards, 0, axis_name, replicas)[0]

    shards = [layout.to_shards(x) for layout, x in zip(layouts, arrays, strict=True)]
    return _in_packs(scatter, shards, layouts, bytes_per_pack)


def all_gather(
    slices: Sequence[Any],
    layouts: Sequence[ShardLayout],
    axis_name: str,
    bytes_per_pack: int = BYTES_PER_PACK,
) -> list[jax.Array]:
    """Makes whole arrays, equal on all replicas, of the slices that replicas hold.

    All replicas must call it.

    Args:
      slices: This replica's slice `[k]` of each array.
      layouts: How each is cut.
      axis_name: The mesh axis of the replicas.
      bytes_per_pack: Arrays of at most so many bytes share one collective a dtype.

    Returns:
      The whole arrays.

    Raises:
      ValueError: A slice has another length than its layout says.
    """

    def gather(row: jax.Array, replicas: int) -> jax.Array:
        return collectives.all_gather(row, 0, axis_name, replicas)

    rows = [jnp.asarray(x)[None] for x in slices]
    gathered = _in_packs(gather, rows, layouts, bytes_per_pack)
    return [layout.from_shards(x) for layout, x in zip(layouts, gathered, strict=True)]


def _in_packs(
    collective: Callable[[jax.Array, int], jax.Array],
    rows: Sequence[jax.Array],
    layouts: Sequence[ShardLayout],
    bytes_per_pack: int,
) -> list[jax.Array]:
    """Calls a collective on arrays `[rows, k]`, small ones side by side.

    Its results may have other leading dimensions; the last one stays.
    """
    results: dict[int, jax.Array] = {}
    for pack in _packs(rows, layouts, bytes_per_pack):
        columns = [rows[i] for i in pack]
        joined = columns[0] if len(pack) == 1 else jnp.concatenate(columns, axis=1)
        made = collective(joined, layouts[pack[0]].num_replicas)
        ends = np.cumsum([layouts[i].length for i in pack])[:-1]
        results.update(zip(pack, jnp.split(made, ends, axis=-1), strict=True))
    return [results[i] for i in range(len(rows))]


def _packs(
    rows: Sequence[jax.Array], layouts: Sequence[ShardLayout], bytes_per_pack: int
) -> list[list[int]]:
    """The indices of arrays that share a collective, in the order of the first ones."""
    packs: list[list[int]] = []
    open_packs: dict[Any, list[int]] = {}
    for i, (row, layout) in enumerate(zip(rows, layouts, strict=True)):
        if layout.nbytes > bytes_per_pack:
            packs.append([i])
        elif (key := row.dtype) in open_packs:
            open_packs[key].append(i)
        else:
            open_packs[key] = [i]
            packs.append(open_packs[key])
    return packs
