"""Naming devices: JAX's own, or strings as in TF."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from replicax.errors import DeviceError

_NAME = re.compile(
    r"^(?P<host>(?:/(?:job|replica|task):\w+)*)"
    r"/?(?:device:)?(?P<kind>[a-z]+)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)


def set_virtual_devices(num_devices: int) -> None:
    """Makes the CPU appear as several devices, to try strategies without accelerators.

    Call it before anything starts JAX's backends, that is, before the first array or
    device is asked for. Every process of a job calls it for itself.

    Args:
      num_devices: How many CPU devices there shall be, at least 1.

    Raises:
      ValueError: ``num_devices`` is not a positive int.
      DeviceError: A backend was already started with another number of CPU devices.

    Example:
      >>> import replicax as rx
      >>> rx.set_virtual_devices(8)
      >>> import jax
      >>> len(jax.devices("cpu"))
      8
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise ValueError(f"num_devices must be an int. Got {num_devices!r}.")
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1. Got {num_devices}.")
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as e:
        started = len(jax.local_devices(backend="cpu"))
        if started == num_devices:
            return
        raise DeviceError(
            f"set_virtual_devices({num_devices}) came too late: JAX's backends are "
            f"already started with {started} CPU device(s). Call it before the first "
            "use of JAX arrays or devices, best right after the imports, or set the "
            f"environment variable JAX_NUM_CPU_DEVICES={num_devices}."
        ) from e


def resolve_device(device: jax.Device | str) -> jax.Device:
    """Returns the device of this process that ``device`` names.

    Args:
      device: A jax device, or a string such as ``"cpu:0"``, ``"gpu:1"``, ``"/gpu:0"``
        or ``"/job:localhost/device:CPU:1"``. Numbers count this process's devices of
        that kind.

    Returns:
      The device.

    Raises:
      DeviceError: It is unknown, or belongs to another process.
      TypeError: ``device`` is neither a device nor a string.
    """
    if not isinstance(device, str):
        return _device_of_this_process(device)
    match = _NAME.match(device.strip())
    if match is None:
        raise DeviceError(
            f"Cannot read {device!r} as a device. Write, for example, 'cpu:0' or "
            "'gpu:1'."
        )
    _refuse_remote(device, match["host"])
    kind, index = match["kind"].lower(), int(match["index"] or 0)
    try:
        known = jax.local_devices(backend=kind)
    except RuntimeError as e:
        raise DeviceError(
            f"There is no {kind!r} device for {device!r}. This process has: "
            f"{', '.join(map(device_name, jax.local_devices()))}. For a GPU, install "
            "JAX's build for it."
        ) from e
    if index >= len(known):
        raise DeviceError(
            f"There is no device {device!r}: this process has {len(known)} "
            f"{kind} device(s), {device_name(known[0])} to {device_name(known[-1])}. "
            "For more virtual CPU devices call rx.set_virtual_devices(n) first."
        )
    return known[index]


def _device_of_this_process(device: Any) -> jax.Device:
    if not isinstance(device, jax.Device):
        raise TypeError(f"A device is a jax.Device or a string. Got {device!r}.")
    if device.process_index != jax.process_index():
        raise DeviceError(
            f"{device} belongs to process {device.process_index}, and this is "
            f"process {jax.process_index()}. Use the devices of this process."
        )
    return device


def _refuse_remote(device: str, host: str) -> None:
    for part in host.lower().split("/"):
        field, _, value = part.partition(":")
        if (field == "job" and value != "localhost") or (
            field == "task" and value != "0"
        ):
            raise DeviceError(
                f"{device!r} names another task ({part}). A MirroredStrategy uses the "
                "devices of one process."
            )


def resolve_devices(
    devices: Sequence[jax.Device | str] | None,
) -> tuple[jax.Device, ...]:
    """Returns distinct devices of this process.

    Args:
      devices: Devices or their names; None or empty means all devices of the default
        backend.

    Returns:
      The devices, in the order given.

    Raises:
      DeviceError: One is unknown, remote or repeated.
      TypeError: ``devices`` is not a sequence of devices.
    """
    if isinstance(devices, (str, int, jax.Device)):
        names = devices.split(",") if isinstance(devices, str) else [devices]
        raise TypeError(
            f"devices is a list of devices. Got {devices!r}: write {names!r}."
        )
    if devices is None or len(devices) == 0:
        return tuple(jax.local_devices())
    resolved = tuple(resolve_device(d) for d in devices)
    repeated = {device_name(d) for d in resolved if resolved.count(d) > 1}
    if repeated:
        raise DeviceError(
            f"Each device may be given once. Repeated: {', '.join(sorted(repeated))} "
            f"in {list(devices)!r}."
        )
    platforms = {d.platform for d in resolved}
    if len(platforms) > 1:
        raise DeviceError(
            "One program runs on all replicas, so their devices must be of one kind. "
            f"Got {', '.join(sorted(platforms))}."
        )
    return resolved


def device_name(device: jax.Device) -> str:
    """Returns the short name of a device of this process, for example ``cpu:1``."""
    known = jax.local_devices(backend=device.platform)
    index = known.index(device) if device in known else device.id
    return f"{device.platform}:{index}"
