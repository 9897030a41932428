"""The strategy that is current when none was chosen."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from replicax.errors import ContextError

from .context import has_strategy, use_default
from .extended import StrategyExtended
from .replica_context import ReplicaContext
from .strategy import Strategy, mesh_of


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
        return mesh_of(jax.local_devices()[:1], self.axis_name)

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
          ContextError: Always.
        """
        raise ContextError(
            "The default strategy has no worker_devices: no devices were chosen. Enter "
            "the scope of a strategy, or use strategy.mesh."
        )


def _default_context() -> ReplicaContext:
    return ReplicaContext(DefaultStrategy(), 0)


use_default(_default_context)
