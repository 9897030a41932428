"""Is a value of a traced step another one that was only passed on?"""

from __future__ import annotations

from typing import Any

from replicax import _compat

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint"})


def origin(jaxpr: Any, variable: Any) -> Any:
    """Follows a variable back through calls that hand it on unchanged.

    Args:
      jaxpr: The jaxpr that it belongs to.
      variable: One of its variables.

    Returns:
      The variable of ``jaxpr`` that it first was: an input, or the output of an
      equation that computes something.
    """
    made_by = {
        out: (eqn, i)
        for eqn in _compat.open_jaxpr(jaxpr).eqns
        if eqn.primitive.name in _CALLS
        for i, out in enumerate(eqn.outvars)
    }
    while not hasattr(variable, "val") and variable in made_by:
        eqn, i = made_by[variable]
        inner = _compat.sub_jaxprs(eqn.params)[0]
        first = origin(inner, inner.outvars[i])
        if hasattr(first, "val") or first not in inner.invars:
            break
        variable = eqn.invars[inner.invars.index(first)]
    return variable
