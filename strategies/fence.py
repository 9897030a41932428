"""Keeps a loop of launches from running too far ahead of a CPU.

On CPU, each launch of a program that holds a collective needs a host thread per
device until all of them have met. A loop that never waits piles up launches until
their threads starve each other, and XLA then aborts the process. The limit here
is far below that, and high enough for devices and host to stay busy.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from typing import Any

import jax
from jax.sharding import Mesh

LAUNCHING = threading.RLock()
"""Held while a program with collectives is launched.

Launches of two threads must reach all devices in the same order: otherwise one device
waits in the first program for another one that waits in the second.
"""


class Fence:
    """Lets only so many launches on one set of devices be under way.

    Now and then a launch waits, not for itself but for the one that waited before it:
    so the devices do not run out of work. Others stop at the gate meanwhile.

    Args:
      between_waits: A launch in so many waits; by default, none does.

    Attributes:
      launches: Counts the launches.
      between_waits: A launch in so many waits. Up to twice as many are under way.
      is_closed: Whether a launch is waiting, so that others must :meth:`pass_gate`.
    """

    def __init__(self, between_waits: int = sys.maxsize) -> None:
        self.between_waits = between_waits
        self.launches = itertools.count(1)
        self.is_closed = False
        self._gate = threading.Lock()
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
        with self._gate:
            self.is_closed = True
            try:
                self._wait(jax.tree.leaves(outputs))
            finally:
                self.is_closed = False

    def pass_gate(self) -> None:
        """Lets a launch of another thread wait first."""
        with self._gate:
            pass

    def _wait(self, leaves: list[Any]) -> None:
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
    except RuntimeError:  # it was donated; or its step failed, as whoever reads it sees
        return not x.is_deleted()
    return True


_fences: weakref.WeakValueDictionary[frozenset[jax.Device], Fence] = (
    weakref.WeakValueDictionary()
)
_making = threading.Lock()


def fence_for(mesh: Mesh) -> Fence:
    """Returns the fence of the devices of a mesh, which waits only where it must.

    Strategies over the same devices share one: their launches add up.
    """
    if mesh.devices.flat[0].platform != "cpu" or mesh.size == 1:
        return Fence()
    devices = frozenset(mesh.devices.flat)
    with _making:
        fence = _fences.get(devices)
        if fence is None:
            between_waits = max(1, min(16, 32 // mesh.size))
            fence = _fences[devices] = Fence(between_waits)
        return fence
