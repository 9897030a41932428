"""Questions about how values of a traced step follow from each other.

All of them look into calls (``jit``, ``remat``), whose inner jaxprs have the equation's
own operands and outputs, and take any other equation as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from replicax import _compat

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint"})
_SUMS = frozenset({"add", "add_any"})


def origin(jaxpr: Any, variable: Any) -> Any:
    """Follows a variable back through calls that hand it on unchanged.

    Args:
      jaxpr: The jaxpr that it belongs to.
      variable: One of its variables.

    Returns:
      The variable of ``jaxpr`` that it first was: an input, or the output of an
      equation that computes something.
    """
    made_by = _producers(jaxpr)
    while not _is_literal(variable) and variable in made_by:
        eqn, i = made_by[variable]
        if eqn.primitive.name not in _CALLS:
            break
        inner = _inner(eqn)
        first = origin(inner, inner.outvars[i])
        if _is_literal(first) or first not in inner.invars:
            break
        variable = eqn.invars[inner.invars.index(first)]
    return variable


def dependent(jaxpr: Any, inputs: Iterable[Any]) -> set[Any]:
    """Returns the variables of a jaxpr that may depend on some of its inputs."""
    reached = set(inputs)
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        given = [not _is_literal(v) and v in reached for v in eqn.invars]
        if _overwrites_scalar(eqn):
            given[0] = False
        if not any(given):
            continue
        if eqn.primitive.name in _CALLS:
            inner = _inner(eqn)
            within = dependent(
                inner, (v for v, g in zip(inner.invars, given, strict=True) if g)
            )
            reached.update(
                out
                for out, v in zip(eqn.outvars, inner.outvars, strict=True)
                if not _is_literal(v) and v in within
            )
        else:
            reached.update(eqn.outvars)
    return reached


def is_increment(jaxpr: Any, variable: Any, start: Any, reached: set[Any]) -> bool:
    """Whether a variable is ``start`` plus something that does not depend on it.

    Args:
      jaxpr: The jaxpr that both belong to.
      variable: The variable.
      start: The variable that it may be a sum with.
      reached: What must not be in the rest of the sum; see :func:`dependent`.
    """
    if _is_literal(variable):
        return False
    if variable is start:
        return True
    eqn, i = _producers(jaxpr).get(variable, (None, 0))
    if eqn is None:
        return False
    if eqn.primitive.name in _SUMS:
        a, b = eqn.invars
        return any(
            is_increment(jaxpr, one, start, reached)
            and (_is_literal(other) or other not in reached)
            for one, other in ((a, b), (b, a))
        )
    if _overwrites_scalar(eqn):
        return is_increment(jaxpr, eqn.invars[2], start, reached)
    if eqn.primitive.name not in _CALLS:
        return False
    inner = _inner(eqn)
    given = [
        v
        for v, outer in zip(inner.invars, eqn.invars, strict=True)
        if not _is_literal(outer) and outer in reached
    ]
    within = dependent(inner, given)
    return any(
        is_increment(inner, inner.outvars[i], v, within)
        and is_increment(jaxpr, eqn.invars[inner.invars.index(v)], start, reached)
        for v in given
    )


def _overwrites_scalar(eqn: Any) -> bool:
    """Whether this is ``x[...] = y`` of scalars: then nothing is left of ``x``."""
    return eqn.primitive.name == "scatter" and eqn.outvars[0].aval.ndim == 0


def _producers(jaxpr: Any) -> dict[Any, tuple[Any, int]]:
    return {
        out: (eqn, i)
        for eqn in _compat.open_jaxpr(jaxpr).eqns
        for i, out in enumerate(eqn.outvars)
    }


def _inner(eqn: Any) -> Any:
    return _compat.open_jaxpr(_compat.sub_jaxprs(eqn.params)[0])


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")
