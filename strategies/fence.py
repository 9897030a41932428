"""Keeps a loop of launches from running too far ahead of a CPU.

On CPU, each launch of a program that holds a collective needs a host thread per
device until all of them have met. A loop that never waits piles up launches until
their threads starve each other, and XLA then aborts the process. Waiting for one
launch in eight keeps far below that limit and costs nothing that can be measured.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax

LAUNCHES_BETWEEN_WAITS = 8
"""A launch in so many is waited for."""

launches = itertools.count(1)
"""Counts the launches of this process that have to be fenced."""


def wait_for(outputs: Any) -> None:
    """Waits for a launch.

    Args:
      outputs: The outputs of the launch that was just made. Waiting on the newest
        ones is always safe: nobody can have donated them yet.
    """
    for array in jax.tree.leaves(outputs)[:1]:
        array.block_until_ready()
