"""What is made of grain, the library. Imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

try:
    import grain
    from absl import flags
except ImportError as error:
    raise ImportError(
        "This needs the library grain, which the extra `data` brings: "
        'pip install ".[data]"'
    ) from error


class Epochs(grain.MapDataset):
    """Elements that are made by their epoch and their index in it.

    Args:
      num_elements: The elements of one epoch.
      element: Called with the epoch and the index; makes the element.
    """

    def __init__(self, num_elements: int, element: Callable[[int, int], Any]):
        super().__init__()
        self._num_elements = num_elements
        self._element = element

    def __len__(self) -> int:
        return self._num_elements

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._element(*divmod(index, self._num_elements))


def shuffled_range(num_rows: int, seed: int | None) -> Any:
    """Row numbers, in an order that is another one in every epoch.

    Args:
      num_rows: The rows.
      seed: A non-negative integer, or ``None`` for rising numbers.

    Returns:
      A ``grain.MapDataset`` of integers.
    """
    rows = grain.MapDataset.range(num_rows)
    # grain takes 32 bits, and seed + 1 would be the same orders an epoch later.
    if seed is None:
        return rows
    (mixed,) = np.random.SeedSequence(seed).generate_state(1)
    return rows.shuffle(seed=int(mixed))


def repeated(dataset: Any, num_epochs: int | None) -> Any:
    """Repeats a ``grain.MapDataset``, which may also be none or one times.

    Args:
      dataset: The dataset of one epoch.
      num_epochs: How many epochs, or ``None`` for no end.

    Returns:
      A ``grain.MapDataset``.
    """
    if num_epochs == 0:
        return dataset.slice(slice(0))
    return dataset if num_epochs == 1 else dataset.repeat(num_epochs)


def read(
    dataset: Any,
    start: int,
    stop: int | None,
    num_threads: int = 0,
    num_workers: int = 0,
) -> Iterator[Any]:
    """Iterates over a part of a dataset's epochs, one after the other.

    Args:
      dataset: The ``grain.MapDataset`` of one epoch.
      start: The first element, counted through all epochs.
      stop: The element after the last one, or ``None`` for no end.
      num_threads: Threads that make elements ahead; none reads when it is asked.
      num_workers: Processes that make elements ahead.

    Returns:
      A ``grain.DatasetIterator``.
    """
    options = grain.ReadOptions(
        num_threads=num_threads, prefetch_buffer_size=2 * num_threads
    )
    part = dataset.repeat()[start:stop].to_iter_dataset(options, allow_nones=True)
    if num_workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads flags, and this is no app
        part = part.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
    return iter(part)
