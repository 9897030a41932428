"""Synchronous training on the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .communication import CommunicationOptions
from .cross_device_ops import CrossDeviceOps
from .devices import resolve_devices
from .strategy import Strategy
from .variables.layouts import Layout
from .variables.variable import Variable


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one process, one replica on each.

    Args:
      devices: jax devices or names such as ``"gpu:0"`` and ``"cpu:1"``; default: all
        devices of the default backend.
      cross_device_ops: How ``reduce`` combines values; default: an XLA all-reduce.
      communication_options: What holds for every sum over the replicas, unless the call
        says otherwise; see :class:`CommunicationOptions`.
      shard_state: Whether a :class:`Optimizer` holds the state of its transformation in
        slices, one on each replica (ZeRO). Gradients are then reduce-scattered, and
        updated slices of the variables gathered. The same numbers, with about 1/N of
        the memory and of the work.
      shard_variables_above: Trainable variables of more bytes than this are held in
        slices too, and gathered by each step that reads them. Default: none are.

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
        *,
        shard_state: bool = False,
        shard_variables_above: int | None = None,
    ):
        super().__init__(
            resolve_devices(devices), cross_device_ops, communication_options
        )
        self.shard_state = shard_state
        self.shard_variables_above = shard_variables_above

    def variable_layout(self, variable: Variable, is_sharded: bool) -> Layout:
        """How a variable lies on the devices: large ones in slices, if so wished."""
        limit = self.shard_variables_above
        if limit is not None and variable.trainable and variable.ndim > 0:
            is_sharded |= variable.size * variable.dtype.itemsize > limit
        return super().variable_layout(variable, is_sharded)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        new = super().__deepcopy__(memo)
        assert isinstance(new, MirroredStrategy)
        new.shard_state = self.shard_state
        new.shard_variables_above = self.shard_variables_above
        return new
