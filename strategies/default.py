"""The strategy that is current when none was chosen."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from replicax.errors import ContextError

from .context import has_strategy
from .extended import StrategyExtended
from .strategy import Strategy


class DefaultStrategy(Strategy):
    """One replica on JAX's default device.

    Returned by ``rx.get_strategy()`` outside of any scope, so that code written for
    strategies runs without one. It looks for its device when it first needs it.
    """

    def __init__(self) -> None:
        super().__init__(())
        self.extended = _DefaultExtended(self)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """A mesh of the one device."""
        return Mesh(
            np.asarray(jax.local_devices()[:1]),
            (self.axis_name,),
            axis_types=(jax.sharding.AxisType.Auto,),
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1."""
        return 1

    def __repr__(self) -> str:
        return "DefaultStrategy()"

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        return self

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Makes the default strategy current; see ``Strategy.scope``.

        Raises:
          ContextError: Inside another strategy's scope.
        """
        if has_strategy():
            raise ContextError(
                "The default strategy's scope must not be nested in another "
                "strategy's. Leave that scope first."
            )
        return super().scope()


class _DefaultExtended(StrategyExtended):
    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """Refused, as in TF: no devices were chosen.

        Raises:
          RuntimeError: Always.
        """
        raise RuntimeError(
            "The default strategy has no worker_devices: no devices were chosen. Enter "
            "the scope of a strategy, or use strategy.mesh."
        )


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Returns the one default strategy of this process."""
    return DefaultStrategy()
