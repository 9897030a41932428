"""A look at how workers will share a dataset, before any of them is started."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .batches import as_host_batch, batch_rows
from .chain import as_integer
from .feeds import looked_at
from .input_context import InputContext
from .options import InputOptions, Remainder
from .remainder import MASK
from .sharding import AutoShardPolicy, resolve_policy, shard
from .sources import INFINITE_CARDINALITY, Source, as_source
from .split_feed import SplitFeed

_ROWS = "rows"
_SHOWN_STEPS = 10
_MEANING = {
    AutoShardPolicy.DATA: "every worker reads all batches and keeps its rows",
    AutoShardPolicy.FILE: "every worker reads files of its own",
    AutoShardPolicy.OFF: "every worker delivers all rows",
    AutoShardPolicy.HINT: "every worker reads a dataset made for it alone",
}


def shard_plan(
    dataset: Any = None,
    *,
    num_workers: int,
    num_replicas_per_worker: int = 1,
    policy: AutoShardPolicy = AutoShardPolicy.AUTO,
    remainder: Remainder = "error",
    rows: int | None = None,
    files: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> ShardPlan:
    """Tells which worker will read which files, and which rows in which step.

    What will share the dataset is asked with the numbers of the rows in place of the
    rows, so what it refuses is refused here. Pass a dataset, or figures: ``batch_size``
    with either ``rows`` or ``files``.

    Args:
      dataset: What ``strategy.experimental_distribute_dataset`` will be given. One that
        does not know the sizes of its batches is gone through once. Rows are numbered
        in the order in which the dataset yields them, over one epoch.
      num_workers: The workers.
      num_replicas_per_worker: The replicas of each.
      policy: As ``InputOptions(auto_shard_policy=...)``.
      remainder: As ``InputOptions(remainder=...)``.
      rows: The rows of an epoch, of a dataset that is not made of files.
      files: The rows of each file.
      batch_size: The rows of a global batch.

    Returns:
      The plan; ``print`` it.

    Raises:
      TypeError: There is neither a dataset nor figures, there is more than one, or a
        figure is not an integer.
      UnevenBatchError: A batch does not divide.
      ValueError: The dataset cannot be shared as the policy says, a figure is too low,
        or the dataset has no end and must be gone through.

    Example:
      >>> import replicax as rx
      >>> plan = rx.datasets.shard_plan(
      ...     rows=21, batch_size=8, num_workers=2, num_replicas_per_worker=2,
      ...     remainder="pad",
      ... )
      >>> print(plan)
      AutoShardPolicy.DATA: every worker reads all batches and keeps its rows
      step | worker 0     | worker 1
      -----+--------------+--------------
         0 | 0-1, 2-3     | 4-5, 6-7
         1 | 8-9, 10-11   | 12-13, 14-15
         2 | 16-17, 18-19 | 20 (+1), (+2)
      Cells list the rows of each replica; (+n) are n rows of filler.
    """
    num_workers = as_integer("num_workers", num_workers, at_least=1)
    num_replicas_per_worker = as_integer(
        "num_replicas_per_worker", num_replicas_per_worker, at_least=1
    )
    source = _numbered(dataset, rows, files, batch_size)
    num_replicas = num_workers * num_replicas_per_worker
    policy = AutoShardPolicy(policy)
    if num_workers == 1:
        policy = AutoShardPolicy.DATA
    policy = resolve_policy(policy, source.num_files, num_workers)
    options = InputOptions(auto_shard_policy=policy, remainder=remainder)
    feeds = [
        SplitFeed(
            source,
            num_replicas_per_worker,
            InputContext(num_workers, worker, num_replicas),
            options,
        )
        for worker in range(num_workers)
    ]
    all_files = range(source.num_files)
    own_files = policy is AutoShardPolicy.FILE
    delivered = tuple(
        tuple(_parts(batch, num_replicas_per_worker) for batch in feed.start())
        for feed in feeds
    )
    return ShardPlan(
        policy=policy,
        files=tuple(
            tuple(shard(all_files, num_workers, worker) if own_files else all_files)
            for worker in range(num_workers)
        ),
        rows=delivered,
        left_out=_left_out(source, delivered),
    )


_Part = tuple[int | None, ...]
_Steps = tuple[tuple[_Part, ...], ...]


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Which worker reads what. Made by :func:`shard_plan`.

    Attributes:
      policy: The policy; what ``AUTO`` stands for.
      files: ``files[worker]`` are the numbers of the files that it reads.
      rows: ``rows[worker][step][replica]`` are the numbers of the rows that this
        replica of the worker receives, with ``None`` for filler.
      left_out: The numbers of the rows that no replica receives.
    """

    policy: AutoShardPolicy
    files: tuple[tuple[int, ...], ...]
    rows: tuple[_Steps, ...]
    left_out: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"AutoShardPolicy.{self.policy.name}: {_MEANING[self.policy]}"]
        lines += _aligned(list(self._table()))
        legend = "Cells list the rows of each replica"
        if any(None in part for part in self._all_parts()):
            legend += "; (+n) are n rows of filler"
        lines.append(f"{legend}.")
        if self.left_out:
            lines.append(f"Left out: {_text_of(self.left_out)}.")
        return "\n".join(lines)

    def _all_parts(self) -> Iterator[_Part]:
        return (part for steps in self.rows for parts in steps for part in parts)

    def _table(self) -> Iterator[list[str]]:
        yield ["step", *(f"worker {worker}" for worker in range(len(self.rows)))]
        if any(self.files):
            yield ["files", *map(_text_of, self.files)]
        num_steps = max(map(len, self.rows))
        for step in range(num_steps):
            if num_steps <= _SHOWN_STEPS or not 7 < step < num_steps - 2:
                yield [str(step), *(_cell(steps, step) for steps in self.rows)]
            elif step == 8:
                yield ["..."] * (1 + len(self.rows))


# -- numbers in place of rows --------------------------------------------------------


def _numbered(
    dataset: Any,
    rows: int | None,
    files: Sequence[int] | None,
    batch_size: int | None,
) -> Source:
    """A source like the one that is meant, with the numbers of the rows for rows."""
    figures = (rows is None) != (files is None) and batch_size is not None
    none = rows is files is batch_size is None
    if (dataset is None) is not figures or not (figures or none):
        raise TypeError(
            "shard_plan takes a dataset; or batch_size= with either rows= or files=. "
            f"Got dataset={dataset!r}, rows={rows!r}, files={files!r}, "
            f"batch_size={batch_size!r}."
        )
    if batch_size is None:
        return _numbered_like(as_source(dataset))
    batch_size = as_integer("batch_size", batch_size, at_least=1)
    if rows is not None:
        rows = as_integer("rows", rows, at_least=0)
        return _source(range(rows), _cut(rows, batch_size), batch_size)

    counts = [as_integer("files", count, at_least=0) for count in files or ()]

    def sizes_of(chosen: Sequence[int], size: int) -> list[int]:
        return _cut(sum(counts[number] for number in chosen), size)

    return _source_of_files(sizes_of, len(counts), batch_size)


def _numbered_like(source: Source) -> Source:
    of_files, batch_size = source.of_files, source.batch_size
    if of_files is None or batch_size is None:
        sizes = _sizes(source)
        return _source(range(sum(sizes)), sizes, batch_size)
    return _source_of_files(
        lambda chosen, size: _sizes(of_files(chosen, size)),
        source.num_files,
        batch_size,
    )


def _source_of_files(
    sizes_of: Callable[[Sequence[int], int], list[int]], num_files: int, batch_size: int
) -> Source:
    """A source of files, given the sizes of the batches of some of them."""
    rows = [sum(sizes_of([number], 1)) for number in range(num_files)]
    edges = [0, *itertools.accumulate(rows)]

    def of_files(chosen: Sequence[int], size: int) -> Source:
        numbers = [n for file in chosen for n in range(edges[file], edges[file + 1])]
        return _source(numbers, sizes_of(chosen, size), size)

    return dataclasses.replace(
        of_files(range(num_files), batch_size), num_files=num_files, of_files=of_files
    )


def _source(
    numbers: Sequence[int], sizes: Sequence[int], batch_size: int | None
) -> Source:
    rows = np.asarray(numbers, np.int64)
    edges = itertools.pairwise([0, *itertools.accumulate(sizes)])
    batches = [{_ROWS: rows[start:stop]} for start, stop in edges]
    return dataclasses.replace(as_source(batches), batch_size=batch_size)


def _sizes(source: Source) -> list[int]:
    """The rows of each batch of an epoch."""
    if source.sizes is None or source.batch_size is None:
        if source.cardinality == INFINITE_CARDINALITY:
            raise ValueError(
                "shard_plan goes through a dataset that does not know the sizes of its "
                "batches, and this one has no end. Pass it without repeat(), or pass "
                "batch_size= with rows= or files=."
            )
        return [batch_rows(as_host_batch(batch)) for batch in looked_at(source)]
    # Of batches of one size, only the last may have fewer rows.
    ordered = sorted(source.sizes.items(), reverse=True)
    return [rows for rows, count in ordered for _ in range(count)]


def _cut(rows: int, batch_size: int) -> list[int]:
    full, rest = divmod(rows, batch_size)
    return [batch_size] * full + [rest] * (rest > 0)


def _parts(batch: Any, num_replicas: int) -> tuple[_Part, ...]:
    """The rows of each replica in one step."""
    rows = batch[_ROWS].astype(object)
    rows[batch.get(MASK, np.ones(len(rows))) == 0] = None
    return tuple(map(tuple, rows.reshape(num_replicas, -1).tolist()))


def _left_out(source: Source, delivered: Sequence[_Steps]) -> tuple[int, ...]:
    numbers = {int(n) for batch in looked_at(source) for n in batch[_ROWS]}
    for steps in delivered:
        for parts in steps:
            numbers.difference_update(*parts)
    return tuple(sorted(numbers))


# -- the table -----------------------------------------------------------------------


def _cell(steps: _Steps, step: int) -> str:
    return ", ".join(map(_text_of, steps[step])) if step < len(steps) else "at its end"


def _text_of(numbers: Sequence[int | None]) -> str:
    """Numbers as ranges, and how many of them are filler."""
    spans: list[list[int]] = []
    for number in numbers:
        if number is None:
            continue
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    if filler := sum(number is None for number in numbers):
        words.append(f"(+{filler})")
    return " ".join(words) or "none"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, of which the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        " | ".join(
            [row[0].rjust(widths[0])]
            + [cell.ljust(n) for cell, n in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in table
    ]
    return [lines[0], "-+-".join("-" * width for width in widths), *lines[1:]]
