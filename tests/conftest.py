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
    assert not rx.has_strategy(), "The test ended inside a strategy's scope."


@pytest.fixture(scope="module")
def strategies():
    """Mirrored strategies by their number of replicas."""
    return {
        n: rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (1, 2, 3, 8)
    }


@pytest.fixture(params=[1, 2, 3, 8])
def strategy(request, strategies):
    """One of each size in turn."""
    return strategies[request.param]


@pytest.fixture
def two(strategies):
    """The one of two replicas."""
    return strategies[2]
