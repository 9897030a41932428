"""What goes wrong while a step is traced, said in terms of steps."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from replicax.errors import (
    DivergentCollectiveError,
    ReplicaDivergenceError,
    ReplicaxError,
    listed,
)

from .replication import Problem

_REMEDY = (
    "Combine what differs before it is written, for example with "
    "`grads = rx.get_replica_context().all_reduce('mean', grads)`."
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Adds to JAX's and Flax's tracing errors what they mean in a step."""
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as e:
        e.add_note(
            "In `strategy.run` a step is traced once for all replicas, so its values, "
            "the replica id included, are not known to Python. To act differently on "
            "some replicas, select with `jnp.where(replica_id == 0, a, b)`, branch "
            "with `jax.lax.cond`, or index with the id. To branch on a setting, pass "
            "it as a bool, a string or another static argument."
        )
        raise
    except Exception as e:
        flax_errors = sys.modules.get("flax.errors")
        if "trace level" in str(e) or (
            flax_errors and isinstance(e, flax_errors.TraceContextError)
        ):
            e.add_note(
                "The step changes or differentiates an nnx object that it captures. "
                "Pass the object as an argument of `run`: what the step changes is "
                "then written back to it."
            )
        raise


def refuse_unfinished(out: Any) -> None:
    """Raises if a step returned something that has yet to run.

    Raises:
      TypeError: It is a generator or a coroutine.
    """
    if inspect.isgenerator(out) or inspect.iscoroutine(out):
        what = type(out).__name__
        if inspect.iscoroutine(out):
            out.close()
        raise TypeError(
            f"The step returned a {what}, whose body has not run. A step must be an "
            "ordinary function that returns its results."
        )


def refuse_divergence(clauses: Sequence[str]) -> None:
    """Raises if there is state that would differ.

    Args:
      clauses: What would differ, and why, a sentence each.

    Raises:
      ReplicaDivergenceError: There is some.
    """
    if clauses:
        raise ReplicaDivergenceError(f"{listed(clauses)}\n{_REMEDY}")


def refuse_problems(problems: Sequence[Problem]) -> None:
    """Raises what the proof found wrong, the most serious kind first.

    Raises:
      DivergentCollectiveError: Some replicas would skip a collective.
      ReplicaDivergenceError: A value given to ``assert_mirrored`` would differ.
      ReplicaxError: Something else is wrong.
    """
    if not problems:
        return
    hanging = [p.message for p in problems if p.kind == "divergent_collective"]
    if hanging:
        raise DivergentCollectiveError(listed(hanging))
    unequal = [p.message for p in problems if p.kind == "assert_mirrored"]
    if unequal:
        raise ReplicaDivergenceError(listed(unequal))
    raise ReplicaxError(listed([p.message for p in problems]))
