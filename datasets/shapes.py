"""Tells users whose batches keep changing their shape, since each is a compile."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_MANY = 8


class ShapeWatch:
    """Counts shapes and structures of batches, and warns once when they are many."""

    def __init__(self) -> None:
        self._seen: dict[Any, set[Any]] = {}
        self._warned = False

    def note(self, treedef: Any, leaves: Sequence[np.ndarray]) -> None:
        """Notes a batch.

        Args:
          treedef: Its structure.
          leaves: Its leaves, of shape ``[num_replicas, rows, ...]``.
        """
        if self._warned:
            return
        seen = self._seen.setdefault(treedef, set())
        seen.add(tuple(leaf.shape[1:] for leaf in leaves))
        if len(seen) >= _MANY:
            self._warn(_many_shapes(treedef, seen))
        elif len(self._seen) >= _MANY:
            self._warn(_many_structures(list(self._seen)))

    def _warn(self, message: str) -> None:
        self._warned = True
        self._seen.clear()
        warnings.warn(message, stacklevel=3)


def _many_structures(treedefs: Sequence[Any]) -> str:
    first, last = treedefs[0], treedefs[-1]
    return (
        f"The batches of a replica came in {_MANY} structures so far, and a step is "
        f"compiled for each of them (the first: {first}; the latest: {last}). Give all "
        "batches the same keys and nesting."
    )


def _many_shapes(treedef: Any, seen: set[Any]) -> str:
    numbered = treedef.unflatten(range(treedef.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
    changing = [
        f"batch{jax.tree_util.keystr(path)}: {', '.join(map(str, sorted(set(shapes))))}"
        for path, shapes in zip(paths, zip(*seen, strict=True), strict=True)
        if len(set(shapes)) > 1
    ]
    return (
        f"The batches of a replica came in {_MANY} shapes so far, and a step is "
        f"compiled for each of them ({'; '.join(changing)}). Pad them to a few "
        'sizes; for a number of rows that changes, InputOptions(remainder="pad") '
        "does."
    )
