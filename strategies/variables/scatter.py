"""Writes to some rows of a variable, which name the rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .. import collectives
from ..fence import LAUNCHING
from .places import Place, place
from .synchronization import VariableAggregation

if TYPE_CHECKING:
    from .variable import Variable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedSlices:
    """Some rows of an array, and which ones they are.

    Attributes:
      values: The rows, ``[n, ...]``.
      indices: Which rows of the whole they are, ``[n]``, integers. A row may be named
        several times.
      dense_shape: The shape of the whole, if known.

    Example:
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> v = rx.Variable(jnp.zeros((3, 2)))
      >>> rows = rx.IndexedSlices(values=jnp.ones((2, 2)), indices=jnp.array([0, 0]))
      >>> v.scatter_add(rows).numpy().tolist()
      [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    """

    values: Any
    indices: Any
    dense_shape: Any = dataclasses.field(default=None, metadata={"static": True})


_OVERWRITING = ("update", "min", "max")


def scatter(variable: Variable, how: str, slices: Any) -> Any:
    """Writes rows of a variable.

    Args:
      variable: The variable.
      how: ``"add"``, ``"sub"``, ``"mul"``, ``"div"``, ``"min"``, ``"max"`` or
        ``"update"``.
      slices: The rows.

    Returns:
      As ``Variable.assign``.
    """
    call = f"scatter_{how}"
    variable.join_step()
    _refuse(variable, how, call)
    values, indices = _checked(variable, slices, call)
    if place() is Place.REPLICA:
        values, indices = _agreed(variable, values, indices)
    method = {"update": "set", "mul": "multiply", "div": "divide"}.get(how, how)
    if how == "sub":
        method, values = "add", -values
    with LAUNCHING:  # nobody must write it meanwhile
        rows = jnp.asarray(variable.for_operator()).at[indices]
        # A negative index is no row, in a step (where it is dropped) as between steps.
        write = functools.partial(
            getattr(rows, method), mode="drop", wrap_negative_indices=False
        )
        return variable.store(write(values))


def _agreed(variable: Variable, values: Any, indices: Any) -> tuple[Any, Any]:
    """The rows of all replicas together, as the variable aggregates them."""
    aggregation = variable.aggregation
    if aggregation is VariableAggregation.NONE:
        return variable.agreed(values), indices
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return variable.agreed(values), variable.agreed(indices)
    strategy = variable.strategy
    num_replicas = strategy.num_replicas_in_sync
    values = jax.lax.stop_gradient(values)
    if aggregation is VariableAggregation.MEAN:
        values = values / num_replicas
    return collectives.all_gather(
        (values, indices), 0, strategy.axis_name, num_replicas
    )


def _refuse(variable: Variable, how: str, call: str) -> None:
    if variable.layout.is_local:
        raise NotImplementedError(
            f"{call} of {variable!r}: an ON_READ variable has no rows to scatter to, "
            "since each replica holds a part of the value. Use assign."
        )
    aggregation = variable.aggregation
    if how in _OVERWRITING and aggregation in (
        VariableAggregation.SUM,
        VariableAggregation.MEAN,
    ):
        raise NotImplementedError(
            f"{call} of {variable!r} overwrites rows, which cannot be combined by "
            f"{aggregation.name}. Use a variable with aggregation NONE or "
            "ONLY_FIRST_REPLICA."
        )


def _checked(variable: Variable, slices: Any, call: str) -> tuple[Any, Any]:
    if not isinstance(slices, IndexedSlices):
        raise TypeError(
            f"{call} takes rx.IndexedSlices(values, indices). Got "
            f"{type(slices).__name__}."
        )
    indices = jnp.asarray(slices.indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"{call} needs integer indices. Got {indices.dtype}.")
    values = variable.as_dtype(slices.values, call)
    wanted = (*indices.shape, *variable.shape[1:])
    if variable.ndim == 0 or values.shape not in (wanted, ()):
        raise ValueError(
            f"{call} of {variable!r} with indices of shape {indices.shape} needs "
            f"values of shape {wanted}. Got {values.shape}."
        )
    values = jnp.broadcast_to(values, wanted)
    if indices.ndim != 1:
        indices, values = indices.reshape(-1), values.reshape(-1, *variable.shape[1:])
    if indices.size and not isinstance(indices, jax.core.Tracer):
        rows = np.asarray(indices)  # also while a step is traced
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= variable.shape[0]:
            raise IndexError(
                f"{call} of {variable!r} got index {low if low < 0 else high}, but its "
                f"rows are 0 to {variable.shape[0] - 1}."
            )
    return values, indices
