"""What a global batch is: a pytree of arrays that agree on their first axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .buffers import concatenated, is_numeric, with_rows


def as_host_batch(batch: Any) -> Any:
    """Returns ``batch`` with numpy leaves.

    Args:
      batch: A pytree of numpy arrays, jax arrays, or anything that numpy can read.

    Returns:
      The same structure; leaves that are numpy arrays already are kept as they are.
    """
    return jax.tree.map(np.asarray, batch)


def batch_rows(batch: Any) -> int:
    """The number of rows of a batch.

    Args:
      batch: A pytree of arrays, each of shape ``[rows, ...]``.

    Returns:
      The rows.

    Raises:
      ValueError: There is no leaf, a leaf has no rows axis, or leaves disagree.
    """
    rows = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(rows) == 1 and () not in rows:
        return rows.pop()[0]
    raise ValueError(_what_is_wrong(batch))


def own_rows(batch: Any) -> Any:
    """Copies a batch into memory that nobody else writes to.

    Args:
      batch: A batch with numpy leaves.

    Returns:
      The copy.

    Raises:
      ValueError: As :func:`batch_rows` does.
    """
    rows = batch_rows(batch)
    return jax.tree.map(lambda leaf: with_rows(leaf, rows), batch)


def join_batches(parts: Sequence[Any]) -> Any:
    """Puts batches one after the other.

    Args:
      parts: Batches with numpy leaves, of one structure.

    Returns:
      One batch of all rows, in memory of its own.

    Raises:
      ValueError: Structures, dtypes or the shapes of rows differ. Strings may differ
        in length.
    """
    structures = {jax.tree.structure(part) for part in parts}
    if len(structures) > 1:
        found = " and ".join(sorted(map(str, structures)))
        raise ValueError(f"Batches must have one structure. Got {found}.")
    flat = [jax.tree_util.tree_leaves_with_path(part) for part in parts]
    leaves = []
    for same in zip(*flat, strict=True):
        arrays = [leaf for _, leaf in same]
        kinds = {(kind_of(a.dtype), a.shape[1:]) for a in arrays}
        if len(kinds) > 1:
            name = "batch" + jax.tree_util.keystr(same[0][0])
            found = " and ".join(sorted(f"{d}{list(s)}" for d, s in kinds))
            raise ValueError(
                f"Batches that are put together must have rows of one dtype and shape. "
                f"{name} has rows of {found}."
            )
        leaves.append(concatenated(arrays))
    return structures.pop().unflatten(leaves)


def kind_of(dtype: np.dtype) -> Any:
    """What must be the same in arrays that are put together: strings may be longer."""
    return dtype if is_numeric(dtype) else dtype.kind


def no_rows_of(batch: Any) -> Any:
    """A batch of the same structure, without rows."""
    return jax.tree.map(lambda leaf: leaf[:0], batch)


def _what_is_wrong(batch: Any) -> str:
    named = [
        ("batch" + jax.tree_util.keystr(path), np.shape(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    ]
    if not named:
        return f"A batch must hold at least one array. Got {batch!r}."
    scalars = [name for name, shape in named if not shape]
    if scalars:
        return (
            f"Every leaf of a batch must have shape [global_batch, ...]. Got a scalar "
            f"at {', '.join(scalars)}. Pass what is the same for all rows to `run` "
            "beside the batch, or repeat it for each row."
        )
    found = ", ".join(f"{name}: {shape[0]}" for name, shape in named)
    return (
        f"The leaves of a batch must have equally many rows (first axis). Got {found}."
    )
