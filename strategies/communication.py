"""How replicas talk to each other: options of sums, and packs of small arrays."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

SMALL = 256 * 1024
"""Bytes from which an array is worth a message of its own."""

COMPRESSION_PAYS = 4 * 1024
"""Bytes from which an array is worth compressing: losses, counts and norms are not."""


class CommunicationImplementation(enum.Enum):
    """Which library carries the communication, by TF's three names.

    XLA takes the one that belongs to the devices (NCCL for GPUs, gloo between processes
    on CPUs), so all three mean the same. They are here for programs that name one.

    Example:
      >>> import replicax as rx
      >>> rx.CommunicationImplementation("NCCL").name
      'NCCL'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """How values are summed over replicas.

    Given to one call (``all_reduce(..., options=)``, ``extended.reduce_to``), or to a
    strategy for all of its sums (``communication_options=``).

    Attributes:
      bytes_per_pack: Arrays of less than 256 KB travel in packs, one array of them
        all; a pack is closed once it holds more bytes than this. 0: one pack for each
        dtype.
      timeout_seconds: How long a collective may take, where the replicas are in several
        processes. Those of one process cannot lose each other.
      implementation: A :class:`CommunicationImplementation` or its name.
      compression: ``"bfloat16"`` sends float arrays of 4 KB and more as ``bfloat16``;
        None sends them as they are. For ``int8`` see
        :meth:`ReplicaContext.all_reduce_int8`.
      accumulate_dtype: The dtype to sum in, for example ``"float32"``; None: the dtype
        that is sent. Kept as its name.

    Raises:
      ValueError: ``bytes_per_pack`` is negative, ``timeout_seconds`` is not positive,
        or ``implementation`` or ``compression`` is unknown.
      TypeError: ``accumulate_dtype`` is not a numeric dtype.

    Example:
      >>> import replicax as rx
      >>> options = rx.CommunicationOptions(implementation="NCCL", bytes_per_pack=1024)
      >>> options.merge(rx.CommunicationOptions(bytes_per_pack=2048)).bytes_per_pack
      2048
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    compression: str | None = None
    accumulate_dtype: Any = None

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"bytes_per_pack must not be negative. Got {self.bytes_per_pack}. 0 "
                "makes one pack of all small arrays."
            )
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(
                "timeout_seconds must be positive, or None to wait as long as it "
                f"takes. Got {self.timeout_seconds}."
            )
        if self.compression not in (None, "bfloat16"):
            raise ValueError(
                f"compression must be None or 'bfloat16'. Got {self.compression!r}. "
                "int8 needs a residual that the caller keeps: call "
                "ReplicaContext.all_reduce_int8."
            )
        _set(self, "implementation", _implementation(self.implementation))
        if self.accumulate_dtype is not None:
            _set(self, "accumulate_dtype", _numeric(self.accumulate_dtype))

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options with the others' in their place, where those were set.

        Args:
          options: Its fields win wherever they are not the defaults. None changes
            nothing.

        Returns:
          New options.

        Raises:
          TypeError: ``options`` is something else.
        """
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise TypeError(f"options must be a CommunicationOptions. Got {options!r}.")
        chosen = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(options)
            if getattr(options, field.name) != field.default
        }
        return dataclasses.replace(self, **chosen) if chosen else self


def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """The old name of :class:`CommunicationOptions`, with two of its fields.

    Args:
      bytes_per_pack: See there.
      timeout_seconds: See there.

    Returns:
      The options.

    Example:
      >>> import replicax as rx
      >>> rx.CollectiveHints(bytes_per_pack=10) == rx.CommunicationOptions(10)
      True
    """
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


CollectiveCommunication = CommunicationImplementation


def group_by_size(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Divides arrays into packs, in their order, by TF's arithmetic.

    Args:
      sizes: The bytes of each array.
      bytes_per_pack: A pack is closed once it holds more than this. 0: a single pack.

    Returns:
      The indices of each pack's arrays.
    """
    packs: list[list[int]] = []
    room = -1
    for index, size in enumerate(sizes):
        if room < 0 and (bytes_per_pack or not packs):
            packs.append([])
            room = bytes_per_pack
        packs[-1].append(index)
        room -= size
    return packs


def _set(options: CommunicationOptions, name: str, value: Any) -> None:
    object.__setattr__(options, name, value)


def _implementation(which: Any) -> CommunicationImplementation:
    if isinstance(which, (str, CommunicationImplementation)):
        return CommunicationImplementation(which)  # raises a ValueError
    raise ValueError(
        "implementation must be a CommunicationImplementation or its name: AUTO, RING "
        f"or NCCL. Got {which!r}."
    )


def _numeric(dtype: Any) -> str:
    """The dtype's name: a dtype itself may be equal to None, as float64 is in numpy."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.number):
        return dtype.name
    raise TypeError(f"accumulate_dtype must be a dtype of numbers. Got {dtype}.")


DEFAULT = CommunicationOptions()
"""Nothing set."""


def chosen(
    default: CommunicationOptions,
    options: CommunicationOptions | None,
    accumulate_dtype: Any = None,
) -> CommunicationOptions:
    """The options of a call: its arguments win over the strategy's default."""
    if options is None and accumulate_dtype is None:
        return default
    merged = default.merge(options)
    if accumulate_dtype is None:
        return merged
    return dataclasses.replace(merged, accumulate_dtype=accumulate_dtype)
