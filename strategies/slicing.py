"""An interpreter of jaxprs in which some arrays are held in slices.

To every value belongs a kind:

* ``WHOLE``: every replica holds all of it, and it follows from no slice.
* ``FILLED``: likewise, and its elements are all equal; held as a scalar.
* ``Sliced(i)``: element ``k`` of the flattened array follows from elements ``k`` of
  arrays that belong to parameter ``i``; held as a slice of the flattened array.
* ``Mixed(why)``: it needs other elements than its own, and cannot be held.

The interpreter either only follows the kinds, or computes as well. The same rules do
both, so that what was found out is what is run. They stand in ``slicing_rules.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend import core

from replicax import _compat

from .variation import Enclosing


@dataclasses.dataclass(frozen=True)
class Whole:
    """Held whole by every replica; ``filled`` if all elements are equal."""

    filled: bool


@dataclasses.dataclass(frozen=True)
class Sliced:
    """Held as a slice, like parameter number ``leaf``."""

    leaf: int


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Not to be had from slices; ``why`` follows "it"."""

    why: str


Kind: TypeAlias = Whole | Sliced | Mixed
WHOLE = Whole(False)
FILLED = Whole(True)


class Value(NamedTuple):
    """A value of the interpreted program.

    Attributes:
      kind: How it is held.
      array: What is held, or None where only kinds are followed.
    """

    kind: Kind
    array: Any = None


Rule: TypeAlias = Callable[["Walk", core.JaxprEqn, list[Value]], list[Value]]


class Walk:
    """One interpretation of a program.

    Args:
      rule_for: From a primitive to its rule.
      lengths: The length of each parameter's slice, or None to follow kinds only.
      names: What reasons call each parameter.
    """

    def __init__(
        self,
        rule_for: Callable[[core.Primitive], Rule],
        lengths: Mapping[int, int] | None = None,
        names: Sequence[str] = (),
    ):
        self._rule_for = rule_for
        self._lengths = lengths or {}
        self.computes = lengths is not None
        self._names = names
        self.enclosing: Enclosing | None = None

    def run(
        self, jaxpr: Any, values: Sequence[Value], inside: core.JaxprEqn | None = None
    ) -> list[Value]:
        """Interprets a jaxpr.

        Args:
          jaxpr: The jaxpr, open or closed.
          values: One per input.
          inside: The equation that it is a parameter of, if any.

        Returns:
          One value per output.
        """
        around = self.enclosing
        if inside is not None:
            self.enclosing = Enclosing(inside, around)
        env: dict[Any, Value] = {}

        def read(variable: Any) -> Value:
            if isinstance(variable, core.Literal):
                return _constant(variable.val)
            return env[variable]

        opened = _compat.open_jaxpr(jaxpr)
        if opened.constvars:
            constants = map(_constant, jaxpr.consts)
            env.update(zip(opened.constvars, constants, strict=True))
        env.update(zip(opened.invars, values, strict=True))
        for eqn in opened.eqns:
            outputs = self._rule_for(eqn.primitive)(self, eqn, [*map(read, eqn.invars)])
            env.update(zip(eqn.outvars, outputs, strict=True))
        self.enclosing = around
        return [*map(read, opened.outvars)]

    def kinds_only(self) -> Walk:
        """An interpretation that starts here and does not compute."""
        walk = Walk(self._rule_for, names=self._names)
        walk.enclosing = self.enclosing
        return walk

    def name(self, kind: Kind) -> str:
        """What to call the parameter that a value belongs to."""
        if isinstance(kind, Sliced) and kind.leaf < len(self._names):
            return self._names[kind.leaf]
        return "a parameter"

    def array_as(self, value: Value, kind: Kind, shape: Sequence[int]) -> Any:
        """What is held for a value of a whole ``shape``, once it is held as ``kind``.

        Args:
          value: A value of that kind, or a filled one.
          kind: ``WHOLE``, ``FILLED`` or a ``Sliced``.
          shape: The shape of the whole array.
        """
        if not self.computes or value.kind == kind or isinstance(kind, Mixed):
            return value.array
        if isinstance(kind, Sliced):
            shape = (self._lengths[kind.leaf],)
        if jnp.shape(value.array) == tuple(shape):  # random keys are not broadcast
            return value.array
        return jnp.broadcast_to(value.array, shape)

    @staticmethod
    def shapes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
        """The whole shapes of variables of a jaxpr."""
        return [variable.aval.shape for variable in variables]


def join(a: Kind, b: Kind) -> Kind:
    """The kind of a value that is the one or the other."""
    if a == b or isinstance(a, Mixed) or b == FILLED:
        return a
    if isinstance(b, Mixed) or a == FILLED:
        return b
    if isinstance(a, Sliced) and isinstance(b, Sliced):
        return Mixed("depends on another parameter")
    return Mixed("depends on an array that is no slot of this parameter")


def whole(variable: Any) -> Kind:
    """The kind of a variable that is held whole: a scalar is filled."""
    return WHOLE if getattr(variable.aval, "shape", ()) else FILLED


def _constant(value: Any) -> Value:
    return Value(WHOLE if jnp.ndim(value) else FILLED, value)
