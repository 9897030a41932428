"""Keeps a loop of launches from running too far ahead of a CPU.

On CPU, each launch of a program that holds a collective needs a host thread per
device until all of them have met. A loop that never waits piles up launches until
their threads starve each other, and XLA then aborts the process. The limit here
is far below that, and high enough for devices and host to stay busy.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import jax
from jax.sharding import Mesh

LAUNCHING = threading.RLock()
"""Held while a program with collectives is launched, and while a launch waits.

Launches of two threads must reach all devices in the same order: otherwise one device
waits in the first program for another one that waits in the second.
"""


class Fence:
    """Lets only so many launches on the devices of one strategy be under way.

    Now and then a launch waits, not for itself but for the one that waited before it:
    so the devices do not run out of work. Others must not launch meanwhile.

    Args:
      num_devices: The number of devices.

    Attributes:
      launches: Counts the launches.
      between_waits: A launch in so many waits. Up to twice as many are under way.
    """

    def __init__(self, num_devices: int) -> None:
        self.between_waits = max(1, min(16, 32 // num_devices))
        self.launches = itertools.count(1)
        self._earlier: Any = None
        self._position = -1  # training steps tend to return their loss last

    def after_launch(self, outputs: Any) -> None:
        """Notes a launch, and waits when it is its turn."""
        if next(self.launches) % self.between_waits == 0:
            self.wait(outputs)

    def wait(self, outputs: Any) -> None:
        """Waits for the launch that had its turn before this one.

        Args:
          outputs: The outputs of the launch that was just made.
        """
        leaves = jax.tree.leaves(outputs)
        earlier, self._earlier = self._earlier, None
        if earlier is None or _wait_for(earlier):
            self._earlier = self._one_of(leaves)
            return
        self._position -= 1  # that one is donated, or large: try another next time
        if leaves:  # nobody can have donated the newest yet
            leaves[0].block_until_ready()
        else:  # a step that only has effects, such as printing
            jax.effects_barrier()

    def _one_of(self, leaves: list[Any]) -> Any:
        """An output to wait for later, unless it would hold much memory until then."""
        if leaves:
            x = leaves[self._position % len(leaves)]
            if x.size <= _SMALL:
                return x
        return _NOTHING


_SMALL = 10_000  # elements
_NOTHING = object()


def _wait_for(x: Any) -> bool:
    """Waits for an output; returns whether that was possible."""
    if x is _NOTHING:
        return False
    try:
        x.block_until_ready()
    except RuntimeError:
        if x.is_deleted():
            return False
        raise
    return True


def fence_for(mesh: Mesh) -> Fence | None:
    """Returns a fence for the devices of a mesh, or None where none is needed."""
    cpu = mesh.devices.flat[0].platform == "cpu"
    return Fence(mesh.size) if cpu and mesh.size > 1 else None
