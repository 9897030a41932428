"""Host memory for batches: gathered once, then lent to the devices.

A CPU device takes a numpy array as it is, without copying, when the array starts on a
64 byte boundary. Batches are therefore built in aligned memory that nobody writes to
again. Memory that someone else may still write to is copied first, for the same reason.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np

_ALIGNMENT = 64


@functools.cache
def is_numeric(dtype: np.dtype) -> bool:
    """Whether JAX can hold values of ``dtype``; strings and objects it cannot."""
    widest = 16 if dtype.kind == "c" else 8
    # numpy counts time differences among the integers, and has longer floats.
    if dtype.kind == "m" or dtype.itemsize > widest:
        return False
    return jax.dtypes.issubdtype(dtype, np.number) or dtype == np.bool_


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that starts on a 64 byte boundary, in native byte order.

    Args:
      shape: The shape.
      dtype: A numeric dtype.

    Returns:
      The array. It is C-contiguous.
    """
    dtype = dtype.newbyteorder("=")
    raw = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT - 1, np.uint8)
    start = raw.__array_interface__["data"][0]
    return np.ndarray(shape, dtype, raw, offset=-start % _ALIGNMENT)


def take_rows(array: np.ndarray, rows: slice | np.ndarray) -> np.ndarray:
    """Copies some rows of ``array`` into memory of their own.

    Args:
      array: Shape ``[num_rows, ...]``, possibly memory-mapped.
      rows: A slice, or an array of indices, which are not checked.

    Returns:
      Shape ``[number of rows asked for, ...]``.
    """
    if not is_numeric(array.dtype):
        return array[rows].copy() if isinstance(rows, slice) else array[rows]
    if isinstance(rows, slice):
        part = array[rows]
        out = aligned_empty(part.shape, array.dtype)
        out[...] = part
        return out
    out = aligned_empty((len(rows), *array.shape[1:]), array.dtype)
    # np.take is the quickest gather, but it would copy *all* of an array that does not
    # lie plainly in memory, at every call.
    plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    if plain:
        np.take(array, rows, axis=0, out=out, mode="clip")
    else:
        out[...] = array[rows]
    return out


def with_rows(array: np.ndarray, size: int) -> np.ndarray:
    """Copies ``array`` and appends filler until it has ``size`` rows.

    Args:
      array: Shape ``[rows, ...]``.
      size: At least ``rows``.

    Returns:
      Shape ``[size, ...]``. Filler is zero, an empty string, or ``None`` for objects.
    """
    rows, shape = array.shape[0], (size, *array.shape[1:])
    if is_numeric(array.dtype):
        out = aligned_empty(shape, array.dtype)
    else:
        out = np.empty(shape, array.dtype)
    out[:rows] = array
    out[rows:] = None if array.dtype == object else np.zeros((), array.dtype)
    return out


def concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Copies arrays one after the other into memory of their own.

    Args:
      arrays: Shape ``[rows, ...]`` each, equal but for the rows, of one dtype.

    Returns:
      Shape ``[all rows, ...]``.
    """
    if not is_numeric(arrays[0].dtype):
        return np.concatenate(arrays)
    rows = sum(a.shape[0] for a in arrays)
    out = aligned_empty((rows, *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=out)
