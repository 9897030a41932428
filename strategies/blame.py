"""Says in words why a value varies between replicas, and where the user wrote it.

An equation remembers the calls that made it. Frames of JAX, Flax, Optax and Replicax
are skipped, so that the line named is the user's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

from replicax import _compat

from .variation import Cause, Enclosing
from .variation_rules import analyse


def explain(
    jaxpr: Any,
    varying_inputs: Sequence[bool],
    output: int,
    input_names: Sequence[str],
    axis_name: str = "replica",
) -> str:
    """Why an output of a step varies between replicas.

    Args:
      jaxpr: What ``jax.make_jaxpr`` returned in the body of the ``shard_map``.
      varying_inputs: For each input, whether replicas may hold different values.
      output: The index of an output that varies.
      input_names: What to call each input, for example ``"batch['x']"``.
      axis_name: The mesh axis that replicas are counted along.

    Returns:
      A clause to follow "it", for example "depends on the replica id (axis_index) at
      step.py:23 (step)".

    Raises:
      ValueError: The output does not vary.
    """
    causes, _ = analyse(jaxpr, varying_inputs, axis_name)
    cause = causes[output]
    if cause is None:
        raise ValueError(
            f"Expected an output that varies. Output {output} is equal on all replicas."
        )
    return clause(cause, input_names)


def clause(cause: Cause, input_names: Sequence[str] = ()) -> str:
    """The clause of :func:`explain`, for a cause already known."""
    steps = list(_backwards(cause))
    for step in steps:
        if step.eqn is not None and _in_backward_pass(step.eqn, step.enclosing):
            where = gradient_line(step.eqn, step.enclosing)
            return (
                f"depends on a gradient computed{where} that no all_reduce has combined"
            )
    origin = steps[-1]
    if origin.eqn is not None:
        return f"depends on {origin.origin}{user_line(origin.eqn, origin.enclosing)}"
    index = origin.input
    what = "an input"
    if index is not None and index < len(input_names):
        what = f"input {input_names[index]}"
    used = steps[-2] if len(steps) > 1 else None
    where = user_line(used.eqn, used.enclosing) if used and used.eqn else ""
    return f"depends on {what} (one value per replica){where}"


def _backwards(cause: Cause) -> Iterator[Cause]:
    """The steps from a value back to where its variation began."""
    step: Cause | None = cause
    while step is not None:
        yield step
        step = step.parent


def _in_backward_pass(eqn: core.JaxprEqn, enclosing: Enclosing | None) -> bool:
    return any("transpose(" in _compat.name_stack(e) for e in _around(eqn, enclosing))


def user_line(eqn: core.JaxprEqn, enclosing: Enclosing | None) -> str:
    """``" at file.py:line (function)"`` of the user's call that made an equation.

    Empty where no frame is the user's.
    """
    return _first_of_user(_frames(eqn, enclosing))


def gradient_line(eqn: core.JaxprEqn, enclosing: Enclosing | None) -> str:
    """The line of the user's call to ``grad``, for an equation of a backward pass.

    Such an equation has the frames of the forward operation that it belongs to; the
    call to ``grad`` is among the outer ones.
    """
    frames = list(_frames(eqn, enclosing))
    for i, (file, _, function) in enumerate(frames):
        if _compat.is_gradient_call(file, function):
            return _first_of_user(frames[i:]) or _first_of_user(frames)
    return _first_of_user(frames)


def _around(eqn: core.JaxprEqn, enclosing: Enclosing | None) -> Iterator[core.JaxprEqn]:
    """An equation and those whose inner jaxprs it stands in, innermost first."""
    yield eqn
    while enclosing is not None:
        yield enclosing.eqn
        enclosing = enclosing.outer


def _frames(
    eqn: core.JaxprEqn, enclosing: Enclosing | None
) -> Iterator[tuple[str, int, str]]:
    for each in _around(eqn, enclosing):
        yield from _compat.frames(each)


def _first_of_user(frames: Iterator[tuple[str, int, str]] | list) -> str:
    for file, line, function in frames:
        if not _compat.is_library_file(file):
            return f" at {os.path.basename(file)}:{line} ({_short(function)})"
    return ""


def _short(function: str) -> str:
    """A function's name without the functions that it is defined in."""
    return function.rsplit("<locals>.", 1)[-1]
