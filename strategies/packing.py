"""Sending many small arrays as a few larger ones.

A message costs time however small it is, and copying costs time by the byte. So arrays
under 256 KB are copied into packs, and those above travel as they are. (One all-reduce
of many operands is still one message for each of them on CPU.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .communication import SMALL, group_by_size

Arrays = list[jax.Array]


def in_packs(
    send: Callable[[Arrays], Arrays], arrays: Arrays, bytes_per_pack: int
) -> Arrays:
    """Applies an elementwise collective to arrays, the small ones packed.

    Args:
      send: Takes arrays and returns as many of equal shapes, perhaps of other dtypes.
      arrays: Arrays of any shapes and dtypes.
      bytes_per_pack: As in :class:`CommunicationOptions`.

    Returns:
      What ``send`` makes of the arrays, in their order and shapes.
    """
    packs = packs_of(arrays, bytes_per_pack)
    packed = {i for pack in packs for i in pack}
    alone = [i for i in range(len(arrays)) if i not in packed]
    buffers = [jnp.concatenate([arrays[i].ravel() for i in pack]) for pack in packs]
    sent = send(buffers + [arrays[i] for i in alone])
    results = dict(zip(alone, sent[len(packs) :], strict=True))
    for pack, buffer in zip(packs, sent, strict=False):
        shapes = [arrays[i].shape for i in pack]
        results.update(zip(pack, _unpack(buffer, shapes), strict=True))
    return [results[i] for i in range(len(arrays))]


def packs_of(arrays: Sequence[jax.Array], bytes_per_pack: int) -> list[list[int]]:
    """Chooses what travels together: small arrays of one dtype, the last one first.

    Gradients of the last layers are there first, so TF packs in reverse order too. A
    pack would take the weak dtype of a Python number away, so those stay out.

    Args:
      arrays: The arrays.
      bytes_per_pack: As in :class:`CommunicationOptions`.

    Returns:
      The indices of the arrays of each pack, at least two.
    """
    by_dtype: dict[jnp.dtype, list[int]] = {}
    for i in reversed(range(len(arrays))):
        if _bytes(arrays[i]) < SMALL and not arrays[i].weak_type:
            by_dtype.setdefault(arrays[i].dtype, []).append(i)
    return [
        [small[k] for k in pack]
        for small in by_dtype.values()
        for pack in group_by_size([_bytes(arrays[i]) for i in small], bytes_per_pack)
        if len(pack) > 1
    ]


def _bytes(x: jax.Array) -> int:
    return x.size * x.dtype.itemsize


def _unpack(buffer: jax.Array, shapes: list[tuple[int, ...]]) -> Arrays:
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    parts = jnp.split(buffer, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
