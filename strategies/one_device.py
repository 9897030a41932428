"""One replica on one device."""

from __future__ import annotations

import jax

from .devices import resolve_device
from .strategy import Strategy


class OneDeviceStrategy(Strategy):
    """One replica on one device: the same program text, without communication.

    Args:
      device: A jax device, or a name such as ``"gpu:0"``.

    Raises:
      DeviceError: The device is unknown or of another process.

    Example:
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> strategy = rx.OneDeviceStrategy("cpu:0")
      >>> float(strategy.run(jnp.square, (3.0,)))
      9.0
    """

    def __init__(self, device: jax.Device | str):
        super().__init__((resolve_device(device),))
