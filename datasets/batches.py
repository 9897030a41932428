"""What a global batch is: a pytree of arrays that agree on their first axis."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


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
