"""The one place that touches private or moving parts of JAX.

Each function says which symbol it stands on. ``tests/test_compat.py`` has a test for
every one of them, run on the oldest and the newest JAX that Replicax supports.
"""

from __future__ import annotations

import jax
import jax.extend.core
from jax._src import core as _core


def is_tracing() -> bool:
    """Whether the caller runs inside a JAX transformation.

    Stands on the private ``jax._src.core.trace_state_clean``.
    """
    return not _core.trace_state_clean()
