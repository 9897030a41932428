"""Keeps a loop of launches from running too far ahead of a CPU.

On CPU, each launch of a program that holds a collective needs a host thread per
device until all of them have met. A loop that never waits piles up launches until
their threads starve each other, and XLA then aborts the process. Waiting for one
launch in eight keeps far below that limit and costs nothing that can be measured.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import jax
from jax.sharding import Mesh

LAUNCHING = threading.RLock()
"""Held while a program with collectives is launched.

Launches of two threads must reach all devices in the same order: otherwise one device
waits in the first program for another one that waits in the second.
"""


class Fence:
    """Waits for every eighth launch on the devices of one strategy.

    Attributes:
      launches: Counts the launches.
      between_waits: A launch in so many is waited for.
    """

    between_waits = 8

    def __init__(self) -> None:
        self.launches = itertools.count(1)

    def after_launch(self, outputs: Any) -> None:
        """Notes a launch, and waits for it when it is its turn."""
        if next(self.launches) % self.between_waits == 0:
            self.wait_for(outputs)

    def wait_for(self, outputs: Any) -> None:
        """Waits for a launch.

        Args:
          outputs: The outputs of the launch that was just made. Waiting on the newest
            ones is always safe: nobody can have donated them yet.
        """
        leaves = jax.tree.leaves(outputs)
        if leaves:
            leaves[0].block_until_ready()
        else:  # a step that only has effects, such as printing
            jax.effects_barrier()


def fence_for(mesh: Mesh) -> Fence | None:
    """Returns a fence for the devices of a mesh, or None where none is needed."""
    cpu = mesh.devices.flat[0].platform == "cpu"
    return Fence() if cpu and mesh.size > 1 else None
