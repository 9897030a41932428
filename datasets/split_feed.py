"""Global batches, divided over the replicas of all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from .batches import as_host_batch, batch_rows, own_rows
from .feeds import looked_at
from .input_context import InputContext
from .options import InputOptions
from .position import position
from .rebatch import rebatched
from .remainder import (
    MOST_LEFT_OUT,
    all_left_out_error,
    check_sizes,
    pad_batch,
    padded_size,
    steps,
    uneven_error,
)
from .sharding import (
    AutoShardPolicy,
    resolve_policy,
    rows_of_worker,
    shard,
)
from .sources import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batches,
    Counted,
    Source,
    close,
)

_START = {"batches": 0, "largest": 0, "source": None}


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
        # A batch is cut into equal parts; those from first to last are ours.
        self._parts = self._last = num_replicas
        self._first = 0
        self._least = 0
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
            here = self._parts
            self._parts = context.num_replicas_in_sync
            self._first, self._last = worker * here, (worker + 1) * here
        if policy is AutoShardPolicy.OFF:
            size = source.batch_size or _rows_of_first(source)
            return rebatched(source, rows_of_worker(size, workers)) if size else source
        if policy is AutoShardPolicy.FILE:
            assert source.of_files is not None and source.batch_size is not None
            files = shard(range(source.num_files), workers, worker)
            # What is padded must be as large on workers whose files have few rows.
            self._least = rows_of_worker(source.batch_size, workers)
            return source.of_files(files, self._least)
        return source

    @property
    def cardinality(self) -> int:
        """The rounds of one iteration, or a constant of ``sources``."""
        source = self._source
        if source.sizes is None:
            # Who leaves out batches must know their sizes to know how many stay.
            known = self._remainder != "drop" or source.count <= 0
            return source.count if known else UNKNOWN_CARDINALITY
        one = steps(source.sizes, self._parts, self._remainder)
        if source.num_epochs is None:
            return INFINITE_CARDINALITY if one else 0
        return one * source.num_epochs

    def start(self, state: Any = None) -> Batches:
        """Starts an iteration: the next one, or from a state on."""
        at = position(state, _START)
        return _Split(self, self._source.start(at["source"]), at)

    def peek(self) -> Iterator[Any]:
        """Starts an iteration that does not count, to look at the first round."""
        return _Split(self, Counted(lambda: looked_at(self._source)), _START)


class _Split(Iterator[Any]):
    """The rounds of one iteration over global batches."""

    def __init__(self, feed: SplitFeed, batches: Batches, at: Mapping[str, Any]):
        self._feed = feed
        self._batches = batches
        self._number = at["batches"]
        self._largest = max(at["largest"], feed._least)
        # A position past the start is one after a batch that was not left out.
        self._delivered = at["batches"] > 0

    def __next__(self) -> Any:
        parts = self._feed._parts
        for left_out, batch in enumerate(self._batches, start=1):
            batch = self._fitted(as_host_batch(batch))
            self._number += 1
            if batch is not None:
                self._delivered = True
                return batch
            if left_out == MOST_LEFT_OUT:
                raise all_left_out_error(parts, f"{left_out} batches in a row")
        if self._number and not self._delivered:
            raise all_left_out_error(parts, f"every batch ({self._number} came)")
        raise StopIteration

    def _fitted(self, batch: Any) -> Any | None:
        """Our part of a batch, made to divide; ``None`` if it is left out."""
        feed, rows = self._feed, batch_rows(batch)
        if feed._remainder == "pad":
            # A batch larger than the first one raises the size: no row is lost.
            self._largest = max(self._largest, rows)
            size = padded_size(self._largest, feed._parts)
            return self._part(pad_batch(batch, rows, size), size)
        if rows % feed._parts == 0:
            part = self._part(batch, rows)
            return part if feed._source.private else own_rows(part)
        if feed._remainder == "drop":
            return None
        raise uneven_error(rows, feed._parts, f"Batch {self._number} has")

    def _part(self, batch: Any, rows: int) -> Any:
        """Our rows of a batch that divides."""
        each = rows // self._feed._parts
        ours = slice(self._feed._first * each, self._feed._last * each)
        return jax.tree.map(lambda leaf: leaf[ours], batch)

    def get_state(self) -> Any:
        return {
            "batches": self._number,
            "largest": self._largest,
            "source": self._batches.get_state(),
        }

    def close(self) -> None:
        close(self._batches)


def _rows_of_first(source: Source) -> int:
    """The rows of the first batch that has any; 0 if none has."""
    batches = looked_at(source)
    try:
        sizes = (batch_rows(as_host_batch(batch)) for batch in batches)
        return next((rows for rows in sizes if rows), 0)
    finally:
        close(batches)
