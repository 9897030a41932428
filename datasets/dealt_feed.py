"""Batches of one replica each, dealt out to the replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .batches import as_host_batch, batch_rows, join_batches, no_rows_of, own_rows
from .feeds import looked_at
from .options import InputOptions
from .position import position
from .remainder import (
    MOST_LEFT_OUT,
    all_left_out_error,
    missing_error,
    pad_batch,
    surely_unequal_error,
    unequal_error,
)
from .sources import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batches,
    Counted,
    Source,
    close,
)


class DealtFeed:
    """Deals batches out to the replicas, one for each.

    Args:
      sources: One source of per-replica batches that replica 0, 1, ... take in turn; or
        one for each replica.
      num_replicas: The replicas here.
      options: The options.

    Raises:
      UnevenBatchError: It is known beforehand that a round is uneven.
    """

    def __init__(
        self, sources: Sequence[Source], num_replicas: int, options: InputOptions
    ):
        self._sources = sources
        self._num_replicas = num_replicas
        self._remainder = options.remainder
        if self._remainder != "pad":
            self._check()

    def _check(self) -> None:
        """Refuses, before the first batch, what is known not to work."""
        whole, rest = self._rounds()
        if self._remainder == "drop":
            if whole == 0 and rest:
                raise all_left_out_error(self._num_replicas, "the only round")
            return
        if rest:
            raise missing_error(rest, self._num_replicas, f"Round {whole}")
        if whole in (0, UNKNOWN_CARDINALITY):
            return
        counts = [_counts_of(source) for source in self._sources if source.sizes]
        if len(counts) < len(self._sources):
            return
        if len(counts) == 1:
            uneven = self._is_uneven(self._sources[0], counts[0])
        else:
            uneven = any(_differ(count, counts[0]) for count in counts)
        if uneven:
            sizes = sorted({rows for count in counts for rows in count})
            raise surely_unequal_error(sizes, self._num_replicas)

    def _is_uneven(self, source: Source, counts: Mapping[int, int]) -> bool:
        """Whether a round of one source's batches surely has unequal rows."""
        if source.batch_size is not None:
            # Each epoch ends with its smaller batch, beside a full one in some round.
            return len(counts) > 1 and self._num_replicas > 1
        return any(n % self._num_replicas for n in counts.values())

    def _rounds(self) -> tuple[int, int]:
        """How many rounds are whole, and how many batches the last one has."""
        sizes = [source.cardinality for source in self._sources]
        if UNKNOWN_CARDINALITY in sizes:
            return UNKNOWN_CARDINALITY, 0
        finite = [size for size in sizes if size != INFINITE_CARDINALITY]
        if not finite:
            return INFINITE_CARDINALITY, 0
        if len(sizes) == 1:
            return divmod(sizes[0], self._num_replicas)
        whole = min(finite)
        return whole, sum(size != whole for size in sizes)

    @property
    def cardinality(self) -> int:
        """The rounds of one iteration, or a constant of ``sources``."""
        whole, rest = self._rounds()
        if self._remainder == "drop":
            # Where the smaller batches lie decides which rounds are left out.
            rows = {n for source in self._sources for n in source.sizes or (None,)}
            alike = len(rows) == 1 and None not in rows
            return whole if alike or whole == 0 else UNKNOWN_CARDINALITY
        if not rest or self._remainder == "error":
            return whole
        if len(self._sources) == 1:
            return whole + 1
        sizes = [source.cardinality for source in self._sources]
        return INFINITE_CARDINALITY if min(sizes) < 0 else max(sizes)

    def start(self, state: Any = None) -> Batches:
        """Starts an iteration: the next one, or from a state on."""
        at = position(state, self._start)
        if len(at["sources"]) != len(self._sources):
            raise ValueError(
                f"The state is that of {len(at['sources'])} datasets dealt to the "
                f"replicas, and this is made of {len(self._sources)}. With "
                "InputReplicationMode.PER_REPLICA, a position holds for as many "
                "replicas only."
            )
        batches = [
            source.start(state)
            for source, state in zip(self._sources, at["sources"], strict=True)
        ]
        return _Dealt(self, batches, at)

    def peek(self) -> Iterator[Any]:
        """Starts an iteration that does not count, to look at the first round."""
        batches = [Counted(lambda s=s: looked_at(s)) for s in self._sources]
        return _Dealt(self, batches, self._start)

    @property
    def _start(self) -> Mapping[str, Any]:
        return {"rounds": 0, "largest": 0, "sources": [None] * len(self._sources)}


def _counts_of(source: Source) -> dict[int, int]:
    """The batches of one iteration by their rows; of an endless one, of an epoch."""
    epochs = 1 if source.num_epochs is None else source.num_epochs
    return {rows: n * epochs for rows, n in (source.sizes or {}).items()}


def _differ(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    """Whether two sources surely have unequal rows in some round of as many rounds."""
    alike = len(one) == 1 and one.keys() == other.keys()
    return not alike and one != other


class _Dealt(Iterator[Any]):
    """The rounds of one iteration over batches of one replica."""

    def __init__(
        self, feed: DealtFeed, batches: Sequence[Batches], at: Mapping[str, Any]
    ):
        self._feed = feed
        self._batches = batches
        self._number = at["rounds"]
        self._largest = at["largest"]
        # A position past the start is one after a round that was not left out.
        self._delivered = at["rounds"] > 0
        self._came = False

    def __next__(self) -> Any:
        for _ in range(MOST_LEFT_OUT):
            parts = self._deal()
            if not parts:
                break
            batch = self._fitted(parts)
            if batch is not None:
                self._delivered = True
                return batch
            if len(parts) < self._feed._num_replicas:
                break
        else:
            which = f"{MOST_LEFT_OUT} rounds of batches in a row"
            raise all_left_out_error(self._feed._num_replicas, which)
        if self._came and not self._delivered:
            raise all_left_out_error(self._feed._num_replicas, "every round")
        raise StopIteration

    def _fitted(self, parts: dict[int, Any]) -> Any | None:
        """The round's batches as one, made to fit; ``None`` if it is left out."""
        num_replicas, remainder = self._feed._num_replicas, self._feed._remainder
        if remainder == "pad":
            return join_batches(self._padded(parts))
        rows = [batch_rows(part) for part in parts.values()]
        missing = len(rows) < num_replicas
        if not missing and len(set(rows)) == 1:
            return join_batches(list(parts.values()))
        if remainder == "drop":
            return None
        which = f"Round {self._number - 1}"
        if missing:
            raise missing_error(len(rows), num_replicas, which)
        raise unequal_error(rows, which)

    def _deal(self) -> dict[int, Any]:
        """A batch for each replica, without those for which none is left."""
        self._number += 1
        sources, parts = self._feed._sources, {}
        for replica in range(self._feed._num_replicas):
            turn = replica % len(sources)
            for part in self._batches[turn]:
                part = as_host_batch(part)
                # The next batch may be made in the memory of this one.
                parts[replica] = part if sources[turn].private else own_rows(part)
                break
        self._came = self._came or bool(parts)
        return parts

    def _padded(self, parts: dict[int, Any]) -> list[Any]:
        """The batches with filler up to one size, and filler alone where none is."""
        nothing = no_rows_of(next(iter(parts.values())))
        whole = [parts.get(r, nothing) for r in range(self._feed._num_replicas)]
        rows = [batch_rows(part) for part in whole]
        self._largest = max(self._largest, *rows)
        return [
            pad_batch(part, n, self._largest)
            for part, n in zip(whole, rows, strict=True)
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
