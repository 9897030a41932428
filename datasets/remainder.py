"""Batches whose rows do not divide by the number of replicas.

Pure functions on host batches; which of them applies is chosen by
``InputOptions(remainder=...)``. Replica ``r`` of ``N`` receives the ``r``-th of ``N``
equal, consecutive parts of a batch, so that what the replicas return, gathered in
replica order, is in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.errors import UnevenBatchError

from .buffers import aligned_empty, with_rows

MASK = "mask"


def padded_size(rows: int, num_replicas: int) -> int:
    """The smallest multiple of ``num_replicas`` that holds ``rows``."""
    return -(-rows // num_replicas) * num_replicas


def pad_batch(batch: Any, rows: int, size: int) -> Any:
    """Fills a batch up to ``size`` rows and adds the mask that tells rows from filler.

    Args:
      batch: A dict, or a tuple ``(x, y)``, of arrays of shape ``[rows, ...]``.
      rows: The rows of the batch.
      size: The rows wanted, at least ``rows``.

    Returns:
      A copy with leaves of shape ``[size, ...]`` and the float32 mask of shape
      ``[size]``: the key ``"mask"`` of a dict, the third entry of a tuple.

    Raises:
      ValueError: The batch has no place for the mask.
    """
    place = _place_of_mask(batch)
    mask = aligned_empty((size,), np.dtype(np.float32))
    mask[:rows] = 1.0
    mask[rows:] = 0.0
    batch = jax.tree.map(lambda leaf: with_rows(leaf, size), batch)
    if place == MASK:
        batch = batch.copy()
        batch[MASK] = mask
        _check_keys(batch)
        return batch
    return type(batch)((*batch, mask))


def _place_of_mask(batch: Any) -> str | int:
    if isinstance(batch, dict):
        if MASK in batch:
            raise ValueError(
                f'remainder="pad" adds its mask to a batch as the key {MASK!r}, which '
                f"this batch already has (keys: {sorted(map(str, batch))}). Rename "
                "that key."
            )
        return MASK
    if type(batch) in (tuple, list) and len(batch) == 2:
        return 2
    what = type(batch).__name__
    if isinstance(batch, tuple | list):
        what += f" of {len(batch)}"
    raise ValueError(
        'remainder="pad" needs a place for its mask: a batch must be a dict (the mask '
        f"becomes its key {MASK!r}) or a pair (x, y) (the mask becomes its third "
        f"entry). Got a {what}."
    )


def _check_keys(batch: Any) -> None:
    try:
        jax.tree.structure(batch)
    except ValueError:
        keys = ", ".join(repr(key) for key in batch if key is not MASK)
        raise ValueError(
            f'remainder="pad" adds its mask to a batch as the key {MASK!r}, and JAX '
            f"cannot sort that among this batch's keys: {keys}. Make them strings."
        ) from None


def uneven_error(rows: int, num_replicas: int, which: str) -> UnevenBatchError:
    """The error for a batch that does not divide.

    Args:
      rows: The rows of the batch.
      num_replicas: The replicas.
      which: How the message begins, for example ``"Batch 3 has"``.

    Returns:
      The error, to be raised.
    """
    amount = "1 row" if rows == 1 else f"{rows} rows"
    return UnevenBatchError(
        f"{which} {amount}, which cannot be divided evenly over {num_replicas} "
        f"replicas (remainder {rows % num_replicas}). Choose a global batch size that "
        f"{num_replicas} divides; or "
        'InputOptions(remainder="drop") to leave out batches that do not divide; or '
        'InputOptions(remainder="pad") to fill batches up and receive a mask that is 0 '
        "for the filler."
    )


MOST_LEFT_OUT = 1000
"""With ``"drop"``, how many batches in a row are left out before that is an error."""


def all_left_out_error(num_replicas: int, which: str) -> UnevenBatchError:
    """The error for a dataset of which ``"drop"`` leaves nothing.

    Args:
      num_replicas: The replicas.
      which: What is left out, for example ``"all 3 batches"``.

    Returns:
      The error, to be raised.
    """
    return UnevenBatchError(
        f'remainder="drop" leaves out {which}, because they cannot be divided evenly '
        f"over {num_replicas} replicas. Choose a batch size (and a number of batches, "
        f"where they are dealt out) that {num_replicas} divides; or "
        'InputOptions(remainder="pad").'
    )


def missing_error(dealt: int, num_replicas: int, which: str) -> UnevenBatchError:
    """The error for a round in which some replicas get no batch."""
    return UnevenBatchError(
        f"{which} has a batch for only {dealt} of {num_replicas} replicas. Let the "
        f"dataset have a number of batches that {num_replicas} divides; or choose "
        'InputOptions(remainder="drop") to leave out what is over; or '
        'InputOptions(remainder="pad") to give the others filler with a mask of 0.'
    )


def unequal_error(rows: Sequence[int], which: str) -> UnevenBatchError:
    """The error for a round in which replicas get unequally many rows."""
    listed = ", ".join(f"replica {r}: {n}" for r, n in enumerate(rows))
    return UnevenBatchError(
        f"{which} has unequally many rows for the replicas ({listed}){_UNEQUAL}"
    )


def surely_unequal_error(sizes: Sequence[int], num_replicas: int) -> UnevenBatchError:
    """The error for batches that make some round unequal, in whatever order."""
    listed = " and ".join(map(str, sizes))
    return UnevenBatchError(
        f"The dataset has batches of {listed} rows, which cannot be dealt out so that "
        f"{num_replicas} replicas have equally many in every round{_UNEQUAL}"
    )


_UNEQUAL = (
    ", but the replicas run one program. Let the function's dataset drop its last, "
    'smaller batch; or choose InputOptions(remainder="drop") to leave such a round '
    'out; or InputOptions(remainder="pad") to fill batches up and receive a mask.'
)


def check_sizes(
    sizes: Mapping[int, int], num_replicas: int, remainder: str, full: int | None
) -> None:
    """Refuses, before the first batch, what is known not to work.

    Args:
      sizes: How many batches of how many rows there are, ``{rows: batches}``.
      num_replicas: The replicas.
      remainder: The choice of ``InputOptions``.
      full: The rows of a full batch, if the source has a batch size.

    Raises:
      UnevenBatchError: With ``"error"``, a batch does not divide; with ``"drop"``, no
        full batch divides, or none at all, so that nothing would be left.
    """
    uneven = [rows for rows in sizes if rows % num_replicas]
    if remainder == "error" and uneven:
        rows = uneven[0]
        count, total = sizes[rows], sum(sizes.values())
        have = "has" if count == 1 else "have"
        which = f"{count} of {total} batches {have}"
        if count == total:
            which = "Each batch has"
        elif full is not None and rows != full:
            which = f"The last batch (of {total}) has"
        raise uneven_error(rows, num_replicas, which)
    if remainder == "drop" and full in uneven:
        raise UnevenBatchError(
            f"Batches of {full} rows do not divide by {num_replicas} replicas "
            f'(remainder {full % num_replicas}), so remainder="drop" would leave out '
            "every full batch. Choose a global batch size that "
            f'{num_replicas} divides, or InputOptions(remainder="pad").'
        )
    if remainder == "drop" and uneven and len(uneven) == len(sizes):
        total = sum(sizes.values())
        which = "the only batch" if total == 1 else f"all {total} batches"
        raise all_left_out_error(num_replicas, which)


def steps(sizes: Mapping[int, int], num_replicas: int, remainder: str) -> int:
    """How many of the batches are delivered.

    Args:
      sizes: How many batches of how many rows there are, ``{rows: batches}``.
      num_replicas: The replicas.
      remainder: The choice of ``InputOptions``.

    Returns:
      The number of steps.
    """
    return sum(
        batches
        for rows, batches in sizes.items()
        if remainder != "drop" or rows % num_replicas == 0
    )
