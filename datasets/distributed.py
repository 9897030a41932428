"""Global batches, split over the replicas and laid on their devices in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.values import PerReplica

from .batches import as_host_batch, batch_rows
from .buffers import is_numeric, with_rows
from .options import InputOptions
from .prefetch import Prefetched
from .remainder import check_sizes, pad_batch, padded_size, steps, uneven_error
from .sources import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Source,
    as_source,
)


class DistributedDataset:
    """A dataset whose elements are split over the replicas of a mesh.

    Made by ``strategy.experimental_distribute_dataset``. Iterating yields the structure
    of the global batches with a :class:`~replicax.PerReplica` at each leaf: a batch
    leaf of shape ``[global_batch, ...]`` becomes one array of shape
    ``[num_replicas, global_batch / num_replicas, ...]``, one row on each replica's
    device. Leaves that JAX cannot hold (strings, objects) stay on the host, as one
    numpy array per replica. Replica ``r`` receives the ``r``-th consecutive part.

    Args:
      dataset: Global batches; see ``replicax.datasets.sources.as_source``.
      mesh: The mesh of the replicas.
      options: An :class:`~replicax.InputOptions`, or ``None`` for the defaults.
      axis_name: The mesh axis that runs over the replicas.

    Raises:
      TypeError: ``dataset`` or ``options`` is of the wrong type.
      ValueError: The mesh has no such axis, or ``dataset`` is not batched.
      UnevenBatchError: It is known beforehand that a batch does not divide.

    Example:
      >>> import numpy as np
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy()
      >>> dataset = rx.datasets.from_arrays({"x": np.zeros([64, 3])}).batch(32)
      >>> distributed = strategy.experimental_distribute_dataset(dataset)
      >>> len(distributed)
      2
      >>> batch = next(iter(distributed))
      >>> batch["x"].num_replicas == strategy.num_replicas_in_sync
      True
    """

    def __init__(
        self,
        dataset: Any,
        mesh: Mesh,
        options: InputOptions | None = None,
        axis_name: str = "replica",
    ):
        if isinstance(dataset, DistributedDataset | DistributedIterator):
            raise TypeError(
                "This dataset is distributed already. Pass the dataset of global "
                "batches that it was made from."
            )
        options = InputOptions() if options is None else options
        if not isinstance(options, InputOptions):
            raise TypeError(f"options must be an InputOptions. Got {options!r}.")
        if axis_name not in mesh.shape:
            raise ValueError(
                f"The mesh has no axis {axis_name!r}. Its axes are {mesh.axis_names}."
            )
        self._source: Source = as_source(dataset)
        self._sharding = NamedSharding(mesh, PartitionSpec(axis_name))
        self._num_replicas = mesh.shape[axis_name]
        self._options = options
        self._spec: Any = None
        if self._source.sizes is not None:
            check_sizes(
                self._source.sizes,
                self._num_replicas,
                options.remainder,
                self._source.batch_size,
            )

    def __iter__(self) -> DistributedIterator:
        """Starts a new iteration: for ``from_arrays``, a new epoch."""
        ready = _deliver(
            self._source.batches(),
            self._fit(),
            self._place,
        )
        return DistributedIterator(ready, self._options.prefetch)

    def __repr__(self) -> str:
        return (
            f"DistributedDataset({self._num_replicas} replicas, "
            f"cardinality {self.cardinality}, {self._options})"
        )

    # -- what it holds ---------------------------------------------------------------

    @property
    def cardinality(self) -> int:
        """The number of elements of one iteration.

        ``INFINITE_CARDINALITY`` (-1) if it never ends, ``UNKNOWN_CARDINALITY`` (-2) if
        only iterating will tell.
        """
        source = self._source
        if source.sizes is None:
            return UNKNOWN_CARDINALITY
        one = steps(source.sizes, self._num_replicas, self._options.remainder)
        if source.num_epochs is None:
            return INFINITE_CARDINALITY if one else 0
        return one * source.num_epochs

    def __len__(self) -> int:
        """The number of elements of one iteration.

        Raises:
          TypeError: The number is infinite or unknown.
        """
        if self.cardinality >= 0:
            return self.cardinality
        known = self.cardinality == INFINITE_CARDINALITY
        raise TypeError(
            "This dataset has no len(): "
            + ("it repeats without end." if known else "its length is not known.")
        )

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the first element.

        The structure of an element, with a ``PerReplica`` of one
        ``jax.ShapeDtypeStruct`` of the per-replica shape for each replica. A dataset
        whose batches must be made to be seen makes its first one for this, once.

        Raises:
          ValueError: The dataset is empty, or can be iterated only once.
        """
        if self._spec is None:
            self._spec = jax.tree.map(self._spec_of, self._first_batch())
        return self._spec

    def _first_batch(self) -> Any:
        if self._source.peek is None:
            raise ValueError(
                "The element_spec of a dataset made from an iterator is not known: "
                "looking at its first batch would take it. Pass a generator function "
                "or a list."
            )
        for batch in _deliver(self._source.peek(), self._fit(), lambda batch: batch):
            return batch
        raise ValueError("The dataset is empty: it has no element_spec.")

    def _spec_of(self, leaf: np.ndarray) -> PerReplica:
        dtype = leaf.dtype
        if is_numeric(dtype):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        shape = (leaf.shape[0] // self._num_replicas, *leaf.shape[1:])
        spec = jax.ShapeDtypeStruct(shape, dtype)
        return PerReplica((spec,) * self._num_replicas)

    # -- a batch on its way ----------------------------------------------------------

    def _fit(self) -> Callable[[Any], Any]:
        return _Fit(self._num_replicas, self._options.remainder, self._source.private)

    def _place(self, batch: Any) -> Any:
        """Splits an even host batch and lays it on the devices, in one transfer."""
        leaves, treedef = jax.tree.flatten(batch)
        n = self._num_replicas
        split = [x.reshape(n, x.shape[0] // n, *x.shape[1:]) for x in leaves]
        on_device = [is_numeric(x.dtype) for x in split]
        arrays = iter(
            jax.device_put(
                [x for x, put in zip(split, on_device, strict=True) if put],
                self._sharding,
            )
        )
        values = [
            PerReplica.from_array(next(arrays)) if put else PerReplica(list(x))
            for x, put in zip(split, on_device, strict=True)
        ]
        for value in values:
            value.is_data = True
        return treedef.unflatten(values)


class DistributedIterator(Iterator[Any]):
    """Iterates over the elements of a :class:`DistributedDataset`.

    Dropping the last reference to it ends its background thread; so does ``close``, and
    leaving it as a context manager.

    Args:
      ready: Placed batches, made as they are asked for.
      prefetch: How many may be made before they are asked for.
    """

    def __init__(self, ready: Iterator[Any], prefetch: int):
        self._ready: Any = Prefetched(ready, prefetch) if prefetch else ready

    def __next__(self) -> Any:
        return next(self._ready)

    def close(self) -> None:
        """Ends the iteration and frees what was prepared. May be called twice."""
        self._ready.close()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Fit:
    """Makes each batch of one iteration divide by the replicas, or leaves it out."""

    def __init__(self, num_replicas: int, remainder: str, private: bool):
        self._num_replicas = num_replicas
        self._remainder = remainder
        self._private = private
        self._size = 0
        self._seen = 0

    def __call__(self, batch: Any) -> Any | None:
        batch = as_host_batch(batch)
        rows = batch_rows(batch)
        number, self._seen = self._seen, self._seen + 1
        if self._remainder == "pad":
            # A batch larger than the first one raises the size: no row is lost.
            self._size = max(self._size, padded_size(rows, self._num_replicas))
            return pad_batch(batch, rows, self._size)
        if rows % self._num_replicas:
            if self._remainder == "drop":
                return None
            raise uneven_error(rows, self._num_replicas, f"Batch {number}")
        if self._private:
            return batch
        return jax.tree.map(lambda leaf: with_rows(leaf, rows), batch)


def _deliver(
    batches: Iterator[Any],
    fit: Callable[[Any], Any],
    place: Callable[[Any], Any],
) -> Iterator[Any]:
    try:
        for batch in batches:
            batch = fit(batch)
            if batch is not None:
                yield place(batch)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
