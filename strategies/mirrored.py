"""Synchronous training on the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from .communication import CommunicationOptions
from .cross_device_ops import CrossDeviceOps
from .devices import resolve_devices
from .strategy import Strategy


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one process, one replica on each.

    Args:
      devices: jax devices or names such as ``"gpu:0"`` and ``"cpu:1"``; default: all
        devices of the default backend.
      cross_device_ops: How ``reduce`` combines values; default: an XLA all-reduce.
      communication_options: What holds for every sum over the replicas, unless the call
        says otherwise; see :class:`CommunicationOptions`.

    Raises:
      DeviceError: A device is unknown, repeated, of another process, or of another
        kind than the first.

    Example:
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> strategy.num_replicas_in_sync
      2
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        super().__init__(
            resolve_devices(devices), cross_device_ops, communication_options
        )
