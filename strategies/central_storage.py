"""Variables on one device, computation on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from .devices import resolve_device, resolve_devices
from .extended import StrategyExtended
from .placement import Placer, as_array
from .strategy import Strategy
from .variables.layouts import Layout
from .variables.variable import Variable


class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices, with the variables on one of them.

    Between steps, each variable lies once, on the parameter device. A step gets copies
    of those that it uses, and what it writes is brought back: this saves memory between
    steps and costs a copy to every device in each. Each write in a step must be
    aggregated.

    Args:
      compute_devices: jax devices or names, one replica on each; default: all devices
        of the default backend.
      parameter_device: Where variables lie; default: the compute device, if there is
        only one, else the first CPU.

    Raises:
      DeviceError: A device is unknown, repeated, of another process, or of another
        kind than the first.

    Example:
      >>> import replicax as rx
      >>> strategy = rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
      >>> with strategy.scope():
      ...     v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
      >>> _ = strategy.run(lambda: v.assign_add(1.0))
      >>> float(v), len(v.read_value().devices())
      (3.0, 1)
    """

    def __init__(
        self,
        compute_devices: Sequence[jax.Device | str] | None = None,
        parameter_device: jax.Device | str | None = None,
    ):
        devices = resolve_devices(compute_devices)
        super().__init__(devices)
        if parameter_device is not None:
            self.parameter_device = resolve_device(parameter_device)
        elif len(devices) == 1:
            self.parameter_device = devices[0]
        else:
            self.parameter_device = jax.local_devices(backend="cpu")[0]
        self.extended = _CentralExtended(self)

    def variable_layout(self, variable: Variable, is_sharded: bool) -> Layout:
        """Where variables lie, all of them on the one device."""
        del variable, is_sharded  # there is one copy to read
        return CentralLayout(self.placer, self.parameter_device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        new = super().__deepcopy__(memo)
        assert isinstance(new, CentralStorageStrategy)
        new.parameter_device = self.parameter_device
        new.extended = _CentralExtended(new)
        return new


class CentralLayout(Layout):
    """One copy, on the parameter device.

    Args:
      placer: Places values on the devices that compute.
      device: The parameter device.
    """

    is_direct = False
    needs_aggregation = True

    def __init__(self, placer: Placer, device: jax.Device):
        super().__init__(placer)
        self._home = SingleDeviceSharding(device)

    def born(self, value: Any) -> jax.Array:
        """Copies ``value`` to the parameter device."""
        with jax.ensure_compile_time_eval():
            return self.placer.copy(jax.device_put(as_array(value), self._home))

    def enter(self, array: jax.Array) -> jax.Array:
        """Copies the array to all devices that compute."""
        return jax.device_put(array, self.sharding)

    def leave(self, array: jax.Array) -> jax.Array:
        """Brings back what a step has written."""
        return jax.device_put(array, self._home)


class _CentralExtended(StrategyExtended):
    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The device that variables lie on."""
        assert isinstance(self._strategy, CentralStorageStrategy)
        return (self._strategy.parameter_device,)
