"""How a dataset is delivered to the replicas."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

Remainder = Literal["error", "drop", "pad"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options of ``strategy.experimental_distribute_dataset``.

    Args:
      prefetch: How many batches may wait on their devices before they are asked for.
        A background thread prepares them. ``0`` prepares each batch when it is asked
        for, in the caller's thread.
      remainder: What happens to a batch whose rows do not divide by the number of
        replicas. A smaller batch that *does* divide is always passed on as it is, save
        under ``"pad"``.

        - ``"error"`` raises ``UnevenBatchError``: when the dataset is distributed if
          its length is known, else when the batch comes.
        - ``"drop"`` leaves the whole batch out, as ``drop_remainder=True`` does.
        - ``"pad"`` fills every batch with zeros up to one static size (that of the
          first batch, rounded up to a multiple of the replicas) and adds a float32 mask
          to every batch: 1 for a row, 0 for filler. A ``dict`` receives it as the key
          ``"mask"``, a tuple ``(x, y)`` as its third entry. Reducing with
          ``weights=mask`` is then exact.

    Raises:
      TypeError: ``prefetch`` is not an integer.
      ValueError: ``prefetch`` is negative, or ``remainder`` is none of the three.

    Example:
      >>> import replicax as rx
      >>> rx.InputOptions(remainder="pad")
      InputOptions(prefetch=2, remainder='pad')
    """

    prefetch: int = 2
    remainder: Remainder = "error"

    def __post_init__(self) -> None:
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int):
            raise TypeError(
                "InputOptions.prefetch is a number of batches. Expected an int. Got "
                f"{self.prefetch!r}."
            )
        if self.prefetch < 0:
            raise ValueError(
                "InputOptions.prefetch is a number of batches, 0 for none. Got "
                f"{self.prefetch}."
            )
        choices = get_args(Remainder)
        if self.remainder not in choices:
            raise ValueError(
                f"InputOptions.remainder must be one of {', '.join(map(repr, choices))}"
                f". Got {self.remainder!r}."
            )
