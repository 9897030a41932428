"""When the copies of a variable are brought together, and how: TF's two enums."""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp


class VariableSynchronization(enum.Enum):
    """When a variable's copies are combined.

    * ``ON_WRITE``: each write is combined, so that all replicas hold the same value.
    * ``ON_READ``: each replica writes its own copy. They are combined when the variable
      is read outside of a step.
    * ``AUTO``: ``ON_WRITE``.
    * ``NONE``: one copy. Only outside of a strategy's scope.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values of several replicas become one.

    * ``NONE``: they are not combined. A write must be the same on all replicas.
    * ``SUM`` and ``MEAN``: element by element.
    * ``ONLY_FIRST_REPLICA``: the value of replica 0 of the whole group.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


def checked(
    synchronization: Any, aggregation: Any, dtype: Any, name: str
) -> tuple[VariableSynchronization, VariableAggregation]:
    """Returns how a variable of a strategy is synchronized, by TF's rules.

    Args:
      synchronization: As given to the variable.
      aggregation: As given to the variable.
      dtype: The variable's dtype.
      name: What to call it in an error.

    Returns:
      Both, ``AUTO`` resolved.

    Raises:
      ValueError: The combination is not allowed, or one is no member of its enum.
    """
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            f"Variable {name} needs a VariableSynchronization. Got {synchronization!r}."
        )
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            f"Variable {name} needs a VariableAggregation. Got {aggregation!r}."
        )
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"Variable {name} of a strategy has synchronization NONE, which leaves its "
            "copies to themselves. Use ON_READ for a value of each replica's own, or "
            "AUTO."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(
        dtype, jnp.inexact
    ):
        raise ValueError(
            f"Variable {name} is of dtype {dtype}, which cannot hold a mean. Use "
            "another aggregation, or a float dtype."
        )
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return synchronization, aggregation
