"""nnx objects that a step captures instead of taking them as arguments.

What a step captures is compiled into its program as constants. An nnx object is made
to be changed in place, so a step that reads a captured one would go on seeing its old
parameters. The Variables found here are watched, and the step is traced again when one
of them holds another array.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .function_key import global_names

# Their objects hold no user's state, and much of their own.
_LIBRARIES = frozenset(
    {"builtins", "jax", "jaxlib", "numpy", "flax", "optax", "replicax"}
)


def captured_variables(fn: Callable[..., Any]) -> list[tuple[Any, Any]]:
    """Finds the nnx Variables that a function can reach without its arguments.

    Looks into closures, defaults, partials, bound methods, the globals that the code
    names and the attributes of objects; and so on, through what is found there.

    Args:
      fn: The step.

    Returns:
      Pairs of a Variable and what it holds now. Empty where Flax nnx is not in use.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    found: dict[int, Any] = {}
    for value in _reachable(fn, set()):
        if isinstance(value, (nnx.Variable, nnx.Pytree, nnx.Module)):
            for x in jax.tree.leaves(
                value, is_leaf=lambda y: isinstance(y, nnx.Variable)
            ):
                if isinstance(x, nnx.Variable):
                    found[id(x)] = x
    return [(v, v.get_raw_value()) for v in found.values()]


def have_changed(fn: Callable[..., Any], watched: Sequence[tuple[Any, Any]]) -> bool:
    """Whether the function can now reach other Variables, or other arrays in them."""
    now = captured_variables(fn)
    return len(now) != len(watched) or any(
        variable is not before or held is not held_before
        for (variable, held), (before, held_before) in zip(now, watched, strict=True)
    )


def _reachable(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for inner in _parts(value):
        yield from _reachable(inner, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from _named_globals(value)
    elif isinstance(value, (list, tuple)) and len(value) < 100:
        yield from value
    elif isinstance(value, dict) and len(value) < 100:
        yield from value.values()
    elif type(value).__module__.partition(".")[0] not in _LIBRARIES:
        yield from getattr(value, "__dict__", {}).values()
        yield getattr(value, "__wrapped__", None)


def _named_globals(fn: types.FunctionType) -> Iterator[Any]:
    """The values of globals that the code, or code nested in it, reads."""
    for name in global_names(fn.__code__):
        value = fn.__globals__.get(name)
        if value is not None and not isinstance(value, (types.ModuleType, type)):
            yield value
