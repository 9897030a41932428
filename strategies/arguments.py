"""How the arguments of one call enter a step.

A call's arguments are flattened once. Each leaf is then one of four kinds: a row of a
per-replica value, an array that every replica sees whole, a number that is traced with
a weak type, or a static value that the program is specialised on.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from replicax.errors import StaticArgumentError

from .merge import is_per_replica
from .placement import may_be_key


class Kind(enum.Enum):
    """How a leaf enters the step."""

    PER_REPLICA = enum.auto()
    MIRRORED = enum.auto()
    NUMBER = enum.auto()
    STATIC = enum.auto()


@functools.cache
def kind_of(leaf_type: type) -> Kind:
    """Returns how a leaf of this type enters a step, outside of a PerReplica."""
    if issubclass(leaf_type, (jax.Array, np.ndarray, np.generic, jax.core.Tracer)):
        return Kind.MIRRORED
    if issubclass(leaf_type, (int, float, complex)) and not issubclass(
        leaf_type, (bool, enum.Enum)
    ):
        return Kind.NUMBER
    return Kind.STATIC


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One flattened argument.

    Attributes:
      name: What to call it in an error, for example ``batch['image']``.
      kind: How it enters the step.
      donated: Whether the step may consume it. A random key it never may: it is
        small, and ``jax.random.key_data`` and ``wrap_key_data`` share its memory
        without a trace.
    """

    name: str
    kind: Kind
    donated: bool


def describe_leaves(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    donate: Any,
    is_leaf: Callable[[Any], bool] = is_per_replica,
) -> list[Leaf]:
    """Describes every leaf of a call.

    Args:
      fn: The step, for its parameters' names.
      args: Positional arguments; their per-replica values are stacked.
      kwargs: Keyword arguments.
      donate: As in ``RunOptions``.
      is_leaf: Holds for nodes of exactly one leaf that end a name.

    Returns:
      The leaves, in the order of ``jax.tree.flatten((args, kwargs))``.

    Raises:
      ValueError: ``donate`` names an argument that was not passed.
      StaticArgumentError: A leaf is a ``jax.Ref``.
    """
    _refuse_refs(args, kwargs)
    donated = _resolve_donate(donate, len(args), kwargs)
    parameters = _positional_names(fn)
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        (args, kwargs), is_leaf=is_leaf
    ):
        group, argument = path[0].idx, path[1]
        if group == 0:
            position = argument.idx
            key: int | str = position
            root = (
                parameters[position]
                if position < len(parameters)
                else f"args[{position}]"
            )
        else:
            key = root = argument.key
        leaves.append(
            Leaf(
                name=root + jax.tree_util.keystr(path[2:]),
                kind=Kind.PER_REPLICA if is_per_replica(leaf) else kind_of(type(leaf)),
                donated=key in donated and not may_be_key(jax.tree.leaves(leaf)[0]),
            )
        )
    return leaves


def check_static(value: Any, name: str) -> Any:
    """Returns a static argument, which must be hashable.

    Raises:
      StaticArgumentError: It is not.
    """
    try:
        hash(value)
    except TypeError:
        raise StaticArgumentError(
            f"Argument {name} is a {type(value).__name__}, which is neither an array "
            "nor hashable, so it can be neither traced nor compared with an earlier "
            "call's. Register the class as a pytree if it holds arrays, or make it "
            "hashable if it is configuration."
        ) from None
    return value


def _refuse_refs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if isinstance(leaf, jax.Ref):
            raise StaticArgumentError(
                f"Argument {jax.tree_util.keystr(path[1:])} is a jax.Ref, which a step "
                "cannot take. Pass its value, `ref[...]`, and write the result back "
                "after the run."
            )


def _resolve_donate(
    donate: Sequence[int | str], num_args: int, kwargs: dict[str, Any]
) -> set[int | str]:
    resolved: set[int | str] = set()
    for which in donate:
        if isinstance(which, str):
            known = which in kwargs
        else:
            known = -num_args <= which < num_args
            which = which % num_args if known else which
        if not known:
            raise ValueError(
                f"donate names {which!r}, but the call has {num_args} positional "
                f"arguments and the keywords {sorted(kwargs)}."
            )
        resolved.add(which)
    return resolved


def _positional_names(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    names = []
    for p in parameters:
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            break
        names.append(p.name)
    return names
