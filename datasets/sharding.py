"""How several workers share a dataset: arithmetic only."""

from __future__ import annotations

import enum
import itertools
import warnings
from collections.abc import Sequence
from typing import TypeVar

from replicax.errors import UnevenBatchError

_T = TypeVar("_T")


class AutoShardPolicy(enum.IntEnum):
    """How several workers share the global batches of a dataset.

    With one worker, the policies do not differ.

    * ``AUTO``: ``FILE`` for a dataset of at least one file a worker, else ``DATA``.
    * ``DATA``: every worker reads all batches and keeps its replicas' rows.
    * ``FILE``: every worker reads files of its own, in batches of its share of rows.
    * ``OFF``: every worker delivers all rows, in batches of its share of rows: *each*
      worker sees each row.
    * ``HINT``: the dataset is sharded by its maker: it yields this worker's batches.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


def resolve_policy(
    policy: AutoShardPolicy, num_files: int, num_workers: int
) -> AutoShardPolicy:
    """Returns what ``AUTO`` stands for, and refuses what cannot be.

    Args:
      policy: A policy.
      num_files: The files of the dataset, 0 if it is not made of files.
      num_workers: The workers.

    Raises:
      ValueError: ``FILE`` is asked for, and there are too few files.
    """
    if policy is AutoShardPolicy.AUTO:
        if num_files >= num_workers:
            return AutoShardPolicy.FILE
        if num_files:
            warnings.warn(
                f"The dataset has {num_files} files for {num_workers} workers, so "
                "every worker reads all of them and keeps its rows "
                "(AutoShardPolicy.DATA). Write it to at least one file a worker to "
                "read each file once.",
                stacklevel=2,
            )
        return AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and num_files < num_workers:
        got = f"{num_files} files" if num_files else "a dataset that is not of files"
        raise ValueError(
            f"AutoShardPolicy.FILE needs a file for each of the {num_workers} workers. "
            f"Got {got}. Choose AutoShardPolicy.DATA, by which every worker reads all "
            "batches and keeps its rows."
        )
    return policy


def check_workers(num_replicas: int, num_workers: int, num_replicas_here: int) -> None:
    """Refuses workers of unequally many replicas, which rows would be lost on.

    Args:
      num_replicas: The replicas of all workers.
      num_workers: The workers.
      num_replicas_here: The replicas of this worker.

    Raises:
      ValueError: This worker's replicas are not its equal share.
    """
    if num_replicas_here * num_workers != num_replicas:
        raise ValueError(
            f"Every worker must have the same number of replicas. Got {num_replicas} "
            f"replicas of {num_workers} workers, of which this one has "
            f"{num_replicas_here}."
        )


def rows_of_worker(batch_size: int, num_workers: int) -> int:
    """The rows of each worker's batches, of which one of each make a global batch.

    Raises:
      UnevenBatchError: The workers cannot share a batch evenly.
    """
    rows, rest = divmod(batch_size, num_workers)
    if rest:
        raise UnevenBatchError(
            f"A global batch of {batch_size} rows cannot be shared evenly by "
            f"{num_workers} workers (remainder {rest}). Choose a global batch size "
            f"that {num_workers} divides, or AutoShardPolicy.DATA with "
            'InputOptions(remainder="pad").'
        )
    return rows


# -- the rules -----------------------------------------------------------------------


def shard(items: Sequence[_T], num_shards: int, index: int) -> Sequence[_T]:
    """Every ``num_shards``-th of some items, from ``index`` on.

    The shards of all indices are disjoint, hold all items, and their lengths differ by
    one at most. Files are shared so under ``AutoShardPolicy.FILE``.

    Args:
      items: Files, or elements.
      num_shards: The shards.
      index: Which of them is wanted, from 0.

    Example:
      >>> from replicax.datasets.sharding import shard
      >>> [shard("abcdefg", 3, i) for i in range(3)]
      ['adg', 'be', 'cf']
    """
    return items[index::num_shards]


def ceil_split(num_rows: int, num_parts: int) -> list[slice]:
    """Consecutive parts of a batch, all but the last ones of the rounded-up share.

    No row crosses to another batch. TensorFlow does so under ``AutoShardPolicy.DATA``,
    and to batches of unknown size. ``InputOptions(remainder="pad")`` puts the rows of a
    full batch into the same parts, and fills these up.

    Args:
      num_rows: The rows of the batch.
      num_parts: The replicas of all workers.

    Returns:
      For each part, its rows. The last parts may have fewer, or none.

    Example:
      >>> from replicax.datasets.sharding import ceil_split
      >>> ["abcde"[rows] for rows in ceil_split(5, 4)]
      ['ab', 'cd', 'e', '']
    """
    share = -(-num_rows // num_parts)
    edges = [min(part * share, num_rows) for part in range(num_parts + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def batch_sizes_for_worker(
    global_batch_size: int,
    num_workers: int,
    num_replicas_per_worker: int,
    worker_index: int,
) -> list[int]:
    """The sizes by which a worker cuts the rows that it reads, in turn.

    With :func:`~replicax.datasets.rebatch.rebatch` this is TensorFlow's other rule, for
    batches of a known size. The replicas of a worker take the sizes one by one, and in
    every step those of all workers make up the global batch. When all have come once,
    the worker has cut one global batch as well, so it begins anew.

    Args:
      global_batch_size: The rows of a batch of all replicas together.
      num_workers: The workers.
      num_replicas_per_worker: The replicas of each.
      worker_index: Which worker is meant, from 0.

    Returns:
      A size for each replica of all workers; they differ by one at most.

    Example:
      >>> from replicax.datasets.sharding import batch_sizes_for_worker
      >>> [batch_sizes_for_worker(5, 2, 1, worker) for worker in (0, 1)]
      [[3, 2], [2, 3]]
    """
    parts = num_workers * num_replicas_per_worker
    size, larger = divmod(global_batch_size, parts)
    sizes = [size + 1] * larger + [size] * (parts - larger)
    first = worker_index * num_replicas_per_worker
    return sizes[first:] + sizes[:first]
