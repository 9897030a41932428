"""Batches from arrays in memory: shuffled, gathered and repeated.

Only what an array in memory makes quick is done here: a batch is gathered with one
indexed copy a leaf. Pipelines with per-row work, worker processes or record files are
better made with a data loading library, and distributed just the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import numpy as np

from .buffers import take_rows
from .chain import RowsDataset, RowsIterator


def from_arrays(arrays: Any) -> ArrayDataset:
    """Makes a dataset of the rows of some arrays.

    Args:
      arrays: A pytree of arrays of shape ``[num_rows, ...]``, all with the same number
        of rows: numpy arrays, memory-mapped ones (only the rows of a batch are read)
        or jax arrays (kept on the host). They are not copied, so leave them as they
        are while the dataset is in use.

    Returns:
      An :class:`ArrayDataset`. Its elements are single rows until it is batched.

    Raises:
      ValueError: There is no array, an array has no rows axis, or the numbers of rows
        differ.

    Example:
      >>> import numpy as np
      >>> import replicax as rx
      >>> x, y = np.zeros([10, 3]), np.arange(10)
      >>> dataset = rx.datasets.from_arrays((x, y)).shuffle(seed=0).batch(4)
      >>> [x.shape for x, y in dataset]
      [(4, 3), (4, 3), (2, 3)]
    """
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(arrays)
    if not paths_and_leaves:
        raise ValueError(
            f"from_arrays needs at least one array. Got {arrays!r}, which holds none."
        )
    rows_of: dict[str, int] = {}
    leaves = []
    for path, leaf in paths_and_leaves:
        name = "arrays" + jax.tree_util.keystr(path)
        leaf = np.asarray(leaf)
        if leaf.ndim == 0:
            raise ValueError(
                f"{name} has no rows: its shape is (). Every leaf must be an array of "
                "shape [num_rows, ...]; turn a Python list of numbers into one with "
                "np.asarray."
            )
        rows_of[name] = leaf.shape[0]
        leaves.append(leaf)
    if len(set(rows_of.values())) > 1:
        found = ", ".join(f"{name}: {rows}" for name, rows in rows_of.items())
        raise ValueError(
            f"The arrays must have equally many rows (first axis). Got {found}."
        )
    return ArrayDataset(tuple(leaves), treedef)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ArrayDataset(RowsDataset):
    """Rows of in-memory arrays. Made by :func:`from_arrays`.

    ``shuffle``, ``batch`` and ``repeat`` return a new dataset and leave this one as it
    is; each may be called once, ``repeat`` last.

    Each iteration is a new epoch: iteration ``k`` of one dataset object is epoch ``k``,
    and the order of an epoch is a function of the seed and the epoch alone. With
    ``repeat(n)`` an iteration runs through ``n`` epochs and the next one continues with
    the epochs after them; an endless iteration ``k`` begins with epoch ``k``.
    """

    _made_by: ClassVar[str] = "from_arrays"

    _leaves: tuple[np.ndarray, ...]
    _treedef: Any

    @property
    def num_rows(self) -> int:
        """The number of rows of one epoch."""
        return self._leaves[0].shape[0]

    @property
    def element_spec(self) -> Any:
        """A ``jax.ShapeDtypeStruct`` for each leaf of the first element."""
        rows = (min(self._batch_size, self.num_rows),) if self._batch_size else ()
        return self._treedef.unflatten(
            jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), leaf.dtype)
            for leaf in self._leaves
        )

    def iteration(self, number: int) -> ArrayIterator:
        """Starts a given iteration, without counting it."""
        return ArrayIterator(self, number)

    def _epoch(self, epoch: int) -> Iterator[Any]:
        order = self._order(epoch)
        return (self._element(order, i) for i in range(self.batches_per_epoch))

    def to_grain(self) -> Any:
        """Returns the same rows or batches as a ``grain.MapDataset``.

        Its transformations, threads and worker processes follow from there. Element
        ``i`` is that of :meth:`epoch` 0; an index past the end is one of the epochs
        after it, so that grain's ``repeat`` goes on with them.

        Returns:
          A ``grain.MapDataset`` of :func:`len` elements.

        Raises:
          ImportError: grain is not installed.

        Example:
          >>> import numpy as np
          >>> import replicax as rx
          >>> dataset = rx.datasets.from_arrays(np.arange(5)).batch(2)
          >>> [x.tolist() for x in dataset.to_grain().map(lambda x: -x)]
          [[0, -1], [-2, -3], [-4]]
        """
        from .grains import Epochs, repeated

        def element(epoch: int, index: int) -> Any:
            order = kept.get(epoch)
            if order is None and self._seed is not None:
                order = self._order(epoch)
                kept.clear()
                kept[epoch] = order
            return self._element(order, index)

        kept: dict[int, Any] = {}
        one = Epochs(self.batches_per_epoch, element)
        return repeated(one, self._repeats)

    def _order(self, epoch: int) -> np.ndarray | None:
        """The order of an epoch's rows; ``None`` for the order they lie in."""
        if self._seed is None:
            return None
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_rows)

    def _element(self, order: np.ndarray | None, index: int) -> Any:
        if self._batch_size is None:
            row = index if order is None else order[index]
            return self._treedef.unflatten(leaf[row] for leaf in self._leaves)
        start = index * self._batch_size
        rows = slice(start, min(start + self._batch_size, self.num_rows))
        chosen = rows if order is None else order[rows]
        return self._treedef.unflatten(take_rows(leaf, chosen) for leaf in self._leaves)


class ArrayIterator(RowsIterator):
    """One iteration of an :class:`ArrayDataset`; it can be saved and restored."""

    _dataset: ArrayDataset

    def _begin(self, iteration: int, position: int) -> None:
        super()._begin(iteration, position)
        self._order_of: int | None = None
        self._order: np.ndarray | None = None

    def __next__(self) -> Any:
        dataset = self._dataset
        per_epoch, repeats = dataset.batches_per_epoch, dataset.num_epochs
        if per_epoch == 0:
            raise StopIteration
        turn, index = divmod(self._position, per_epoch)
        if repeats is not None and turn >= repeats:
            raise StopIteration
        epoch = self._first_epoch + turn
        if self._order_of != epoch:
            self._order_of, self._order = epoch, dataset._order(epoch)
        self._position += 1
        return dataset._element(self._order, index)
