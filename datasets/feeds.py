"""What the replicas of one process are fed with, step by step, on the host.

A *feed* makes of a user's batches the *rounds* of the replicas: host batches whose rows
divide by the number of replicas here, so that replica ``r`` gets the ``r``-th of that
many equal, consecutive parts. There are two: :class:`SplitFeed` divides global batches,
:class:`DealtFeed` deals out batches that are made for one replica each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from .batches import as_host_batch, batch_rows, join_batches, no_rows_of
from .buffers import with_rows
from .input_context import InputContext
from .options import InputOptions, InputReplicationMode
from .rebatch import Rebatched
from .remainder import (
    check_sizes,
    missing_error,
    pad_batch,
    padded_size,
    steps,
    unequal_error,
    uneven_error,
)
from .sharding import AutoShardPolicy, resolve_policy, rows_of_worker, shard
from .sources import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batches,
    Counted,
    Source,
    close,
)


class Feed(Protocol):
    """What the replicas of one process are fed with."""

    @property
    def cardinality(self) -> int:
        """The rounds of one iteration, or a constant of ``sources``."""
        ...

    def start(self, state: Any = None) -> Batches:
        """Starts an iteration: the next one, or from a state on."""
        ...

    def peek(self) -> Iterator[Any]:
        """Starts an iteration that does not count, to look at the first round."""
        ...


# -- global batches that are split ---------------------------------------------------


class SplitFeed:
    """Divides global batches over the replicas of all workers; these get their part.

    Args:
      source: Global batches.
      num_replicas: The replicas here.
      context: The place of this worker's pipeline.
      options: The options.

    Raises:
      UnevenBatchError: It is known beforehand that a batch does not divide.
      ValueError: The source cannot be sharded as ``options.auto_shard_policy`` says.
    """

    def __init__(
        self,
        source: Source,
        num_replicas: int,
        context: InputContext,
        options: InputOptions,
    ):
        self._remainder = options.remainder
        self._parts = num_replicas
        self._own: slice | None = None
        self._source = source
        if context.num_input_pipelines > 1:
            self._source = self._shard(context, options.auto_shard_policy)
        if self._source.sizes is not None:
            check_sizes(
                self._source.sizes,
                self._parts,
                self._remainder,
                self._source.batch_size,
            )

    def _shard(self, context: InputContext, policy: AutoShardPolicy) -> Source:
        """Returns this worker's share, as the policy says."""
        source = self._source
        workers, worker = context.num_input_pipelines, context.input_pipeline_id
        policy = resolve_policy(policy, source.num_files, workers)
        if policy is AutoShardPolicy.DATA:
            # Every worker reads all batches, in the same order, and keeps its rows.
            self._parts = context.num_replicas_in_sync
            here = self._parts // workers
            self._own = slice(worker * here, (worker + 1) * here)
        if policy is AutoShardPolicy.OFF:
            rows = rows_of_worker(source.batch_size or self._rows_of_first(), workers)
            return _rebatched(source, rows)
        if policy is AutoShardPolicy.FILE:
            assert source.of_files is not None and source.batch_size is not None
            files = shard(range(source.num_files), workers, worker)
            return source.of_files(files, rows_of_worker(source.batch_size, workers))
        return source

    def _rows_of_first(self) -> int:
        for batch in _looked_at(self._source):
            return batch_rows(as_host_batch(batch))
        return 0

    @property
    def cardinality(self) -> int:
        """The rounds of one iteration, or a constant of ``sources``."""
        source = self._source
        if source.sizes is None:
            return UNKNOWN_CARDINALITY
        one = steps(source.sizes, self._parts, self._remainder)
        if source.num_epochs is None:
            return INFINITE_CARDINALITY if one else 0
        return one * source.num_epochs

    def start(self, state: Any = None) -> Batches:
        """Starts an iteration: the next one, or from a state on."""
        batches = self._source.start(None if state is None else state["source"])
        return _Split(batches, self._fit(state), state)

    def peek(self) -> Iterator[Any]:
        """Starts an iteration that does not count, to look at the first round."""
        return _Split(Counted(lambda: _looked_at(self._source)), self._fit(None), None)

    def _fit(self, state: Any) -> _Fit:
        largest = 0 if state is None else state["largest"]
        return _Fit(
            self._parts, self._own, self._remainder, self._source.private, largest
        )


class _Split(Iterator[Any]):
    """The rounds of one iteration over global batches."""

    def __init__(self, batches: Batches, fit: _Fit, state: Any):
        self._batches = batches
        self._fit = fit
        self._number = 0 if state is None else state["batches"]

    def __next__(self) -> Any:
        while True:
            batch = self._fit(next(self._batches), self._number)
            self._number += 1
            if batch is not None:
                return batch

    def get_state(self) -> Any:
        return {
            "batches": self._number,
            "largest": self._fit.largest,
            "source": self._batches.get_state(),
        }

    def close(self) -> None:
        close(self._batches)


class _Fit:
    """Makes a global batch divide by the replicas, or leaves it out.

    Attributes:
      largest: The rows of the largest batch so far, which all are padded to.
    """

    def __init__(
        self,
        parts: int,
        own: slice | None,
        remainder: str,
        private: bool,
        largest: int,
    ):
        self._parts = parts
        self._own = own
        self._remainder = remainder
        self._private = private
        self.largest = largest

    def __call__(self, batch: Any, number: int) -> Any | None:
        batch = as_host_batch(batch)
        rows = batch_rows(batch)
        if self._remainder == "pad":
            # A batch larger than the first one raises the size: no row is lost.
            self.largest = max(self.largest, rows)
            rows, size = padded_size(self.largest, self._parts), rows
            return self._part(pad_batch(batch, size, rows), rows)
        if rows % self._parts:
            if self._remainder == "drop":
                return None
            raise uneven_error(rows, self._parts, f"Batch {number}")
        if not self._private:
            batch = jax.tree.map(lambda leaf: with_rows(leaf, rows), batch)
        return self._part(batch, rows)

    def _part(self, batch: Any, rows: int) -> Any:
        """This worker's part of a batch that divides."""
        if self._own is None:
            return batch
        each = rows // self._parts
        own = slice(self._own.start * each, self._own.stop * each)
        return jax.tree.map(lambda leaf: leaf[own], batch)


def _looked_at(source: Source) -> Iterator[Any]:
    if source.peek is None:
        raise ValueError(
            "The element_spec of a dataset made from an iterator is not known: looking "
            "at its first batch would take it. Pass a generator function or a list."
        )
    return source.peek()


def _rebatched(source: Source, rows: int) -> Source:
    def start(state: Any) -> Batches:
        return Rebatched(source.start, [rows], state)

    def peek() -> Iterator[Any]:
        return Rebatched(lambda _: Counted(lambda: _looked_at(source)), [rows], None)

    return Source(start=start, peek=peek, batch_size=rows, num_epochs=source.num_epochs)


# -- batches of one replica that are dealt -------------------------------------------


class DealtFeed:
    """Deals batches out to the replicas, one for each.

    Args:
      sources: One source of per-replica batches that replica 0, 1, ... take in turn; or
        one for each replica.
      num_replicas: The replicas here.
      options: The options.

    Raises:
      UnevenBatchError: It is known beforehand that the last round is incomplete.
    """

    def __init__(
        self, sources: Sequence[Source], num_replicas: int, options: InputOptions
    ):
        self._sources = sources
        self._num_replicas = num_replicas
        self._remainder = options.remainder
        whole, rest = self._rounds()
        if rest and self._remainder == "error":
            raise missing_error(rest, num_replicas, f"Round {whole}")

    def _rounds(self) -> tuple[int, int]:
        """How many rounds are whole, and how many batches the last one has."""
        sizes = [source.cardinality for source in self._sources]
        if UNKNOWN_CARDINALITY in sizes:
            return UNKNOWN_CARDINALITY, 0
        if len(sizes) == 1:
            if sizes[0] == INFINITE_CARDINALITY:
                return INFINITE_CARDINALITY, 0
            return divmod(sizes[0], self._num_replicas)
        finite = [size for size in sizes if size != INFINITE_CARDINALITY]
        if not finite:
            return INFINITE_CARDINALITY, 0
        whole = min(finite)
        return whole, sum(size != whole for size in sizes)

    @property
    def cardinality(self) -> int:
        """The rounds of one iteration, or a constant of ``sources``."""
        whole, rest = self._rounds()
        if not rest or self._remainder != "pad":
            return whole
        if len(self._sources) == 1:
            return whole + 1
        sizes = [source.cardinality for source in self._sources]
        return INFINITE_CARDINALITY if min(sizes) < 0 else max(sizes)

    def start(self, state: Any = None) -> Batches:
        """Starts an iteration: the next one, or from a state on."""
        states = [None] * len(self._sources) if state is None else state["sources"]
        batches = [
            source.start(state)
            for source, state in zip(self._sources, states, strict=True)
        ]
        return _Dealt(batches, self._num_replicas, self._remainder, state)

    def peek(self) -> Iterator[Any]:
        """Starts an iteration that does not count, to look at the first round."""
        batches = [_looked_at(source) for source in self._sources]
        return _Dealt(batches, self._num_replicas, self._remainder, None)


class _Dealt(Iterator[Any]):
    """The rounds of one iteration over batches of one replica."""

    def __init__(self, batches: Sequence[Any], parts: int, remainder: str, state: Any):
        self._batches = batches
        self._parts = parts
        self._remainder = remainder
        self._number = 0 if state is None else state["rounds"]
        self._largest = 0 if state is None else state["largest"]

    def __next__(self) -> Any:
        while True:
            parts = self._deal()
            if self._remainder == "pad":
                return join_batches(self._padded(parts))
            dealt = [part for part in parts if part is not None]
            number = self._number - 1
            if len(dealt) < self._parts:
                if self._remainder == "error":
                    raise missing_error(len(dealt), self._parts, f"Round {number}")
                if len(self._batches) > 1 or len(dealt) < self._parts:
                    raise StopIteration
            rows = [batch_rows(part) for part in dealt]
            if len(set(rows)) == 1:
                return join_batches(dealt)
            if self._remainder == "error":
                raise unequal_error(rows, f"Round {number}")

    def _deal(self) -> list[Any]:
        """One batch for each replica, ``None`` where there is none left."""
        parts: list[Any] = []
        for replica in range(self._parts):
            batches = self._batches[replica % len(self._batches)]
            part = next(batches, None)
            parts.append(None if part is None else as_host_batch(part))
        if all(part is None for part in parts):
            raise StopIteration
        self._number += 1
        return parts

    def _padded(self, parts: list[Any]) -> list[Any]:
        some = next(part for part in parts if part is not None)
        parts = [no_rows_of(some) if part is None else part for part in parts]
        rows = [batch_rows(part) for part in parts]
        self._largest = max(self._largest, *rows)
        return [
            pad_batch(part, n, self._largest)
            for part, n in zip(parts, rows, strict=True)
        ]

    def get_state(self) -> Any:
        return {
            "rounds": self._number,
            "largest": self._largest,
            "sources": [batches.get_state() for batches in self._batches],
        }

    def close(self) -> None:
        for batches in self._batches:
            close(batches)


def sources_of_function(
    dataset_fn: Callable[[InputContext], Any],
    num_replicas: int,
    context: InputContext,
    options: InputOptions,
    as_source: Callable[[Any], Source],
) -> list[Source]:
    """Calls a function that makes datasets, as often as the options say.

    Args:
      dataset_fn: The function.
      num_replicas: The replicas here.
      context: The place of this worker's pipeline.
      options: With ``InputReplicationMode.PER_REPLICA`` it is called for each replica.
      as_source: Looks at what it returns.

    Returns:
      One source, or one for each replica.
    """
    if options.replication_mode is InputReplicationMode.PER_WORKER:
        return [as_source(dataset_fn(context))]
    first = context.input_pipeline_id * num_replicas
    return [
        as_source(
            dataset_fn(
                InputContext(
                    context.num_replicas_in_sync,
                    first + replica,
                    context.num_replicas_in_sync,
                )
            )
        )
        for replica in range(num_replicas)
    ]
