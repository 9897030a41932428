"""Every test sees eight virtual CPU devices and leaves no strategy current."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

import replicax as rx

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def no_strategy_left_behind():
    """Fails the test that leaves a scope open, not the next one."""
    yield
    has_strategy = getattr(rx, "has_strategy", None)
    if has_strategy is not None:
        assert not has_strategy(), "The test ended inside a strategy's scope."
