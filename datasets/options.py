"""How a dataset is delivered to the replicas."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal, get_args

from .sharding import AutoShardPolicy

Remainder = Literal["error", "drop", "pad"]


class InputReplicationMode(enum.Enum):
    """How often a function that makes a dataset is called.

    ``PER_WORKER``: once in each process; the replicas take batches in turn.
    ``PER_REPLICA``: once for each replica, which gets that dataset's batches.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class InputOptions:
    """How a dataset is delivered to the replicas.

    Args:
      prefetch: How many batches may wait on their devices before they are asked for.
        A background thread prepares them, from the first one asked for on. ``0``
        prepares each batch when it is asked for, in the caller's thread.
      remainder: What happens to a batch whose rows do not divide by the number of
        replicas. A smaller batch that *does* divide is always passed on as it is, save
        under ``"pad"``.

        - ``"error"`` raises ``UnevenBatchError``: when the dataset is distributed if
          its length is known, else when the batch comes.
        - ``"drop"`` leaves the whole batch out, as ``drop_remainder=True`` does. That
          no batch is left raises ``UnevenBatchError``.
        - ``"pad"`` fills every batch with zeros up to one static size (that of the
          first batch, rounded up to a multiple of the replicas) and adds a float32 mask
          to every batch: 1 for a row, 0 for filler. A ``dict`` receives it as the key
          ``"mask"``, a tuple ``(x, y)`` as its third entry. Reducing with
          ``weights=mask`` is then exact.

      auto_shard_policy: How several workers share a dataset; see
        :class:`AutoShardPolicy`. With one worker it makes no difference.
      replication_mode: How often ``strategy.distribute_datasets_from_function`` calls
        its function; see :class:`InputReplicationMode`.
      fetch_to_device: Whether batches are laid on the devices. If not, each replica's
        part stays a numpy array on the host.

    Raises:
      TypeError: An option is of the wrong type.
      ValueError: ``prefetch`` is negative, or ``remainder`` is none of the three.

    Example:
      >>> import replicax as rx
      >>> rx.InputOptions(remainder="pad")
      InputOptions(remainder='pad')
    """

    prefetch: int = 2
    remainder: Remainder = "error"
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    fetch_to_device: bool = True

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
        for name in ("auto_shard_policy", "replication_mode", "fetch_to_device"):
            wanted = type(getattr(type(self), name))
            if type(getattr(self, name)) is not wanted:
                raise TypeError(
                    f"InputOptions.{name} must be of type {wanted.__name__}. Got "
                    f"{getattr(self, name)!r}."
                )

    def __repr__(self) -> str:
        changed = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"InputOptions({changed})"
