"""How several workers share a dataset: arithmetic only."""

from __future__ import annotations

import enum
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


def shard(items: Sequence[_T], num_shards: int, index: int) -> Sequence[_T]:
    """Every ``num_shards``-th of some items, from ``index`` on."""
    return items[index::num_shards]
