"""Global batches, split over the replicas and laid on their devices in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.errors import OutOfRangeError
from replicax.values import PerReplica

from .buffers import is_numeric
from .dealt_feed import DealtFeed
from .feeds import Feed
from .input_context import InputContext, contexts_of_replicas
from .optional import Optional
from .options import InputOptions, InputReplicationMode
from .prefetch import OnDemand, Prefetched
from .shapes import ShapeWatch
from .sharding import check_workers
from .sources import INFINITE_CARDINALITY, Batches, Source, as_source, close
from .split_feed import SplitFeed


def distribute_dataset(
    dataset: Any,
    mesh: Mesh,
    options: InputOptions | None = None,
    context: InputContext | None = None,
) -> DistributedDataset:
    """Splits global batches over the replicas of a mesh.

    Args:
      dataset: Global batches; see ``sources.as_source``.
      mesh: The mesh of this process's replicas, of one axis.
      options: The options, or ``None`` for the defaults.
      context: The place of this process among the workers; default: the only one.

    Returns:
      The distributed dataset.

    Raises:
      TypeError: ``dataset`` or ``options`` is of the wrong type.
      ValueError: ``dataset`` is not batched, the options do not fit it, or the workers
        have unequally many replicas.
      UnevenBatchError: It is known beforehand that a batch does not divide.
    """
    options = _checked(options)
    if options.replication_mode is InputReplicationMode.PER_REPLICA:
        raise ValueError(
            "InputReplicationMode.PER_REPLICA calls a function for each replica: pass "
            "one to distribute_datasets_from_function. A dataset of global batches is "
            "split instead."
        )
    context = _of_this_process(context, mesh)
    feed = SplitFeed(_as_source(dataset), mesh.size, context, options)
    return DistributedDataset(feed, mesh, options)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    mesh: Mesh,
    options: InputOptions | None = None,
    context: InputContext | None = None,
) -> DistributedDataset:
    """Deals the batches of a function's dataset to the replicas of a mesh.

    Args:
      dataset_fn: Called with an :class:`InputContext`; returns batches of one replica.
      mesh: The mesh of this process's replicas, of one axis.
      options: The options, or ``None`` for the defaults.
      context: The place of this process among the workers; default: the only one.

    Returns:
      The distributed dataset.

    Raises:
      TypeError: ``dataset_fn`` is not a function, or returns no dataset.
      ValueError: The workers have unequally many replicas.
      UnevenBatchError: It is known beforehand that a round is uneven.
    """
    if not callable(dataset_fn):
        raise TypeError(
            "distribute_datasets_from_function takes a function that is called with "
            f"an InputContext and returns a dataset. Got {dataset_fn!r}. For a dataset "
            "itself use experimental_distribute_dataset."
        )
    options = _checked(options)
    context = _of_this_process(context, mesh)
    contexts = [context]
    if options.replication_mode is InputReplicationMode.PER_REPLICA:
        contexts = contexts_of_replicas(context)
    sources = [_made_by(dataset_fn, context) for context in contexts]
    return DistributedDataset(DealtFeed(sources, mesh.size, options), mesh, options)


def _made_by(
    dataset_fn: Callable[[InputContext], Any], context: InputContext
) -> Source:
    dataset = dataset_fn(context)
    if dataset is None:
        raise TypeError(
            f"{dataset_fn!r} must return a dataset of batches for one replica. Got "
            "None: does it lack a return statement?"
        )
    return _as_source(dataset)


def _as_source(dataset: Any) -> Source:
    if isinstance(dataset, DistributedDataset | DistributedIterator):
        raise TypeError(
            "This dataset is distributed already. Pass the dataset of batches that it "
            "was made from."
        )
    return as_source(dataset)


def _of_this_process(context: InputContext | None, mesh: Mesh) -> InputContext:
    context = context or InputContext(num_replicas_in_sync=mesh.size)
    check_workers(context.num_replicas_in_sync, context.num_input_pipelines, mesh.size)
    return context


def _checked(options: Any) -> InputOptions:
    options = InputOptions() if options is None else options
    if not isinstance(options, InputOptions):
        raise TypeError(f"options must be an InputOptions. Got {options!r}.")
    return options


class DistributedDataset:
    """A dataset whose elements are split over the replicas of a mesh.

    Made by ``strategy.experimental_distribute_dataset`` or
    ``strategy.distribute_datasets_from_function``. Iterating yields the structure
    of the global batches with a :class:`~replicax.PerReplica` at each leaf: a batch
    leaf of shape ``[global_batch, ...]`` becomes one array of shape
    ``[num_replicas, global_batch / num_replicas, ...]``, one row on each replica's
    device. Leaves that JAX cannot hold (strings, objects) stay on the host, as one
    numpy array per replica. Replica ``r`` receives the ``r``-th consecutive part.

    Args:
      feed: What the replicas get, on the host.
      mesh: The mesh of the replicas, of one axis.
      options: How it is delivered.

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

    def __init__(self, feed: Feed, mesh: Mesh, options: InputOptions):
        self._feed = feed
        self._sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        self._num_replicas = mesh.size
        self._options = options
        self._spec: Any = None
        self._shapes = ShapeWatch()

    def __iter__(self) -> DistributedIterator:
        """Returns a new iteration: for ``from_arrays``, a new epoch.

        It starts when its first element or its state is asked for.
        """
        return DistributedIterator(self)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Goes through one iteration, carrying a state along.

        Args:
          initial_state: The first state, of any type.
          reduce_func: Called as ``reduce_func(state, element)`` outside of the
            replicas, so that it may use ``strategy.run`` and ``strategy.reduce``.
            Returns the next state.

        Returns:
          The last state; ``initial_state`` if there is no element.
        """
        state = initial_state
        with iter(self) as elements:
            for element in elements:
                state = reduce_func(state, element)
        return state

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
        return self._feed.cardinality

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
        rounds = self._feed.peek()
        try:
            for batch in rounds:
                return batch
        finally:
            close(rounds)
        raise ValueError("The dataset is empty: it has no element_spec.")

    def _spec_of(self, leaf: np.ndarray) -> PerReplica:
        dtype = leaf.dtype
        if self._goes_to_device(dtype):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        shape = (leaf.shape[0] // self._num_replicas, *leaf.shape[1:])
        spec = jax.ShapeDtypeStruct(shape, dtype)
        return PerReplica((spec,) * self._num_replicas)

    # -- a batch on its way ----------------------------------------------------------

    def _goes_to_device(self, dtype: np.dtype) -> bool:
        return self._options.fetch_to_device and is_numeric(dtype)

    def _place(self, batch: Any) -> Any:
        """Splits an even host batch and lays it on the devices."""
        leaves, treedef = jax.tree.flatten(batch)
        n = self._num_replicas
        split = [x.reshape(n, x.shape[0] // n, *x.shape[1:]) for x in leaves]
        self._shapes.note(treedef, split)
        return treedef.unflatten(map(self._placed, split))

    def _placed(self, split: np.ndarray) -> PerReplica:
        if self._goes_to_device(split.dtype):
            # Takes less than half the time of jax.device_put.
            value = PerReplica.from_array(
                jax.make_array_from_callback(
                    split.shape, self._sharding, split.__getitem__
                )
            )
        else:
            value = PerReplica(list(split))
        value.is_data = True
        return value


class DistributedIterator(Iterator[Any]):
    """Iterates over the elements of a :class:`DistributedDataset`.

    The dataset is started when the first element or the state is asked for, so that
    ``set_state`` on a new iterator starts it once, at the right place. Several threads
    may share an iterator. An interrupt (Ctrl-C) while it waits for an element that is
    prepared in the background loses nothing. After an error in the pipeline, asking for
    more raises ``RuntimeError``; ``iterator.set_state(iterator.get_state())`` goes on.

    Dropping the last reference to it ends its background thread; so does ``close``, and
    leaving it as a context manager.

    Args:
      dataset: The distributed dataset.
    """

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self._ready: OnDemand | Prefetched | None = None
        self._state: Any = None
        self._held: Any = None
        # Of those who take elements only, never of a finalizer. Reentrant, since a
        # signal's handler may ask for the state, or close.
        self._lock = threading.RLock()

    def _go(self, rounds: Batches) -> OnDemand | Prefetched:
        self._held, self._state = None, rounds.get_state()
        placed = _placed(rounds, self._dataset._place)
        next(placed)
        prefetch = self._dataset._options.prefetch
        self._ready = Prefetched(placed, prefetch) if prefetch else OnDemand(placed)
        return self._ready

    def __next__(self) -> Any:
        if self._ready is not None:
            self._ready.refuse_fork()  # before the lock, which the fork may have copied
        with self._lock:
            ready = self._ready or self._go(self._dataset._feed.start())
            # An interrupt up to here leaves all as it was, and from here on the element
            # is held for the next call, until the step that also moves the state.
            if self._held is None:
                self._held = ready.peek()
            ready.take(self._held)
            state, element = self._held
            self._state, self._held = state, None
            return element

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
          OutOfRangeError: There is none.
        """
        for element in self:
            return element
        raise OutOfRangeError(
            "The iteration is at its end. Iterate with `for`, or ask "
            "get_next_as_optional() whether there is another element."
        )

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, or an empty :class:`Optional` at the end."""
        for element in self:
            return Optional(element)
        return Optional()

    @property
    def element_spec(self) -> Any:
        """See :attr:`DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def get_state(self) -> Any:
        """Where the element stands that is asked for next.

        What was prepared ahead does not count. The position is one in the dataset that
        was distributed, so it holds for any number of replicas, and of workers that
        read the same batches. Only datasets that were made for single replicas
        (``InputReplicationMode.PER_REPLICA``) need as many replicas again.

        Returns:
          Plain data, which ``json.dumps`` accepts.

        Example:
          >>> import replicax as rx, numpy as np
          >>> data = rx.datasets.from_arrays(np.arange(6)).shuffle(0).batch(2)
          >>> with rx.OneDeviceStrategy("cpu:0").scope() as strategy:
          ...     dataset = strategy.experimental_distribute_dataset(data)
          >>> iterator = iter(dataset)
          >>> _ = next(iterator)
          >>> state = iterator.get_state()
          >>> expected = next(iterator).array.tolist()
          >>> iterator.set_state(state)
          >>> next(iterator).array.tolist() == expected
          True
        """
        if self._state is None:
            with self._lock:
                closed = self._ready is not None
                if self._state is None:
                    self._go(self._dataset._feed.start())
                    if closed:
                        self.close()
        return self._state

    def set_state(self, state: Any) -> None:
        """Goes to where :meth:`get_state` was called, also in another process.

        Datasets that know their position (``from_arrays``, ``from_files``, grain) go
        there directly; of others, the elements before it are made and passed over. If
        the state is refused, the iterator stays where it is.

        Args:
          state: What ``get_state`` returned, for a dataset that is made alike.

        Raises:
          ValueError: It is no state, or seen to be that of another dataset.
          RuntimeError: The dataset can be iterated only once.
        """
        if state is None:
            raise ValueError("set_state() takes what get_state() returned. Got None.")
        with self._lock:
            rounds = self._dataset._feed.start(state)
            try:
                if self._ready is not None:
                    self._ready.close()
            finally:
                self._go(rounds)

    def close(self) -> None:
        """Ends the iteration and frees what was prepared. May be called twice.

        Waits for the element that is being made, if any. What the dataset's own end
        raises (the ``finally`` of a generator) is raised here.
        """
        if self._ready is not None:
            self._ready.stop()
            if self._ready.runs_here:
                return  # called by the pipeline, which cannot wait for its own end
        with self._lock:
            self._held = None
            if self._ready is None:
                self._ready = OnDemand(iter(()))
            self._ready.close()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _placed(rounds: Batches, place: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the elements of an iteration, each with the state after it."""
    try:
        yield None, None  # begun, so that it is closed even if nothing is asked for
        for batch in rounds:
            yield rounds.get_state(), place(batch)
    finally:
        close(rounds)
