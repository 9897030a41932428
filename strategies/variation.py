"""Which values of a traced step vary between replicas, and why.

The step's jaxpr is interpreted with flags instead of arrays. To every value belongs

* ``None``: *uniform*, the same bits on all replicas;
* a :class:`Cause`: it may *vary*, and this is how that came about; or
* a :class:`Cell`, for a ref: whether anything that varies was ever written into it.

Only what is sure to be uniform is called so. What each primitive does to the flags is
said in ``variation_rules.py``. Flags only ever go from uniform to varying, so that
loops are interpreted again and again until nothing changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, final

from jax.extend import core

from replicax import _compat

ASSERT_MIRRORED = "replicax.assert_mirrored:"
"""Prefix of ``checkpoint_name``s whose value must not vary; its path follows."""


# -- values --------------------------------------------------------------------------


class Enclosing(NamedTuple):
    """The equations whose inner jaxprs an equation stands in, innermost first."""

    eqn: core.JaxprEqn
    outer: Enclosing | None


class Cause:
    """Why a value varies: one step back towards where the variation began.

    Attributes:
      eqn: The equation that the value comes out of; ``None`` for an input.
      parent: The cause of the operand that made ``eqn`` vary; ``None`` at the origin.
      enclosing: The equations around ``eqn``.
      origin: At the origin, what varies by itself, in words; else ``""``.
      input: For an input of the step, its index; else ``None``.
    """

    __slots__ = ("enclosing", "eqn", "input", "origin", "parent")

    def __init__(
        self,
        eqn: core.JaxprEqn | None,
        parent: Cause | None = None,
        enclosing: Enclosing | None = None,
        *,
        origin: str = "",
        input: int | None = None,
    ):
        self.eqn = eqn
        self.parent = parent
        self.enclosing = enclosing
        self.origin = origin
        self.input = input


@final
class Cell:
    """What is known about the array behind a ref.

    All variables that hold the same ref share one cell, however it was passed around.

    Attributes:
      cause: Why the contents vary; ``None`` as long as they are uniform.
      serial: The number of cells that were made before this one.
    """

    __slots__ = ("cause", "serial")

    def __init__(self, cause: Cause | None, serial: int):
        self.cause = cause
        self.serial = serial


Value: TypeAlias = Cause | Cell | None


def cause_of(value: Value) -> Cause | None:
    """Why a value varies, or ``None``. A ref varies as its contents do."""
    return value.cause if isinstance(value, Cell) else value


def first_cause(values: Sequence[Value]) -> Cause | None:
    """The cause of the first value that varies."""
    for value in values:
        if value is not None:
            cause = value.cause if type(value) is Cell else value
            if cause is not None:
                return cause
    return None


# -- findings ------------------------------------------------------------------------

ProblemKind: TypeAlias = Literal[
    "divergent_collective",
    "effect_under_checkpoint",
    "ref_in_loop_predicate",
    "assert_mirrored",
]


class Divergence(NamedTuple):
    """A ``cond`` or ``while`` that replicas may pass through in different ways."""

    eqn: core.JaxprEqn
    enclosing: Enclosing | None
    predicate: Cause


@dataclasses.dataclass(frozen=True)
class Finding:
    """An equation that is wrong whatever the outputs are.

    Attributes:
      kind: What is wrong.
      eqn: The equation.
      enclosing: The equations around it.
      cause: For an asserted value, why it varies.
      divergence: For a collective, what not all replicas would reach it through.
    """

    kind: ProblemKind
    eqn: core.JaxprEqn
    enclosing: Enclosing | None
    cause: Cause | None = None
    divergence: Divergence | None = None


# -- the interpreter -----------------------------------------------------------------

Rule: TypeAlias = Callable[["Walk", core.JaxprEqn, list[Value]], list[Value]]


class Walk:
    """One interpretation of a step.

    Args:
      axis_name: The mesh axis that replicas are counted along.
      rule_for: From a primitive to its rule.

    Attributes:
      findings: What was found wrong so far, in the order of the program.
      divergence: The innermost ``cond`` or ``while`` around the current equation whose
        predicate varies.
      written: The cell of every write so far.
    """

    def __init__(self, axis_name: str, rule_for: Callable[[core.Primitive], Rule]):
        self.axis_name = axis_name
        self._rule_for = rule_for
        self.findings: list[Finding] = []
        self.divergence: Divergence | None = None
        self.written: list[Cell] = []
        self._enclosing: Enclosing | None = None
        self._cells = 0
        self._tainted: list[int] = []  # serials of the cells that began to vary
        self._checkpoint_floor = 0
        self._seen: set[tuple[str, int]] = set()
        self._once: dict[int, Any] = {}

    def run(
        self,
        jaxpr: Any,
        values: Sequence[Value],
        inside: core.JaxprEqn | None = None,
    ) -> list[Value]:
        """Interprets a jaxpr.

        Args:
          jaxpr: The jaxpr, open or closed.
          values: One per input.
          inside: The equation that it is a parameter of, if any.

        Returns:
          One value per output.
        """
        jaxpr = _compat.open_jaxpr(jaxpr)
        around = self._enclosing
        if inside is not None:
            self._enclosing = Enclosing(inside, around)
        env: dict[Any, Value] = {
            var: self.new_cell(None) if _compat.is_ref(var) else None
            for var in jaxpr.constvars
        }
        env.update(zip(jaxpr.invars, values, strict=True))
        for eqn in jaxpr.eqns:
            operands = [
                None if isinstance(v, core.Literal) else env[v] for v in eqn.invars
            ]
            outputs = self._rule_for(eqn.primitive)(self, eqn, operands)
            env.update(zip(eqn.outvars, outputs, strict=True))
        self._enclosing = around
        return [None if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    def through(self, eqn: core.JaxprEqn, parent: Cause) -> Cause:
        """The cause of what ``eqn`` makes of a value that varies."""
        return Cause(eqn, parent, self._enclosing)

    def origin(self, eqn: core.JaxprEqn, what: str) -> Cause:
        """The cause of what varies by itself: ``what``, in words."""
        return Cause(eqn, None, self._enclosing, origin=what)

    def new_cell(self, cause: Cause | None) -> Cell:
        """A cell for a ref that is made here."""
        self._cells += 1
        return Cell(cause, self._cells - 1)

    def write(self, eqn: core.JaxprEqn, cell: Cell, cause: Cause | None) -> None:
        """Notes that ``eqn`` writes into a ref a value that varies due to ``cause``.

        Where only some replicas pass, any write makes the ref vary.
        """
        if cause is None and self.divergence is not None:
            cause = self.divergence.predicate
        if cause is not None and cell.cause is None:
            cell.cause = self.through(eqn, cause)
            self._tainted.append(cell.serial)
        self.written.append(cell)
        if cell.serial < self._checkpoint_floor:
            self.find("effect_under_checkpoint", eqn)

    def collective(self, eqn: core.JaxprEqn) -> None:
        """Notes that ``eqn`` needs all replicas to take part."""
        if self.divergence is not None:
            self.find("divergent_collective", eqn, divergence=self.divergence)

    def find(self, kind: ProblemKind, eqn: core.JaxprEqn, **details: Any) -> None:
        """Adds a finding, once per equation."""
        if (kind, id(eqn)) not in self._seen:
            self._seen.add((kind, id(eqn)))
            self.findings.append(Finding(kind, eqn, self._enclosing, **details))

    def once(self, eqn: core.JaxprEqn, derive: Callable[[core.JaxprEqn], Any]) -> Any:
        """What ``derive`` makes of an equation, however often a loop comes by."""
        if id(eqn) not in self._once:
            self._once[id(eqn)] = derive(eqn)
        return self._once[id(eqn)]

    def run_diverging(
        self,
        jaxpr: Any,
        values: Sequence[Value],
        inside: core.JaxprEqn,
        predicate: Cause | None,
    ) -> list[Value]:
        """Interprets a jaxpr that runs as ``predicate`` says, if that varies."""
        before = self.divergence
        if predicate is not None:
            self.divergence = Divergence(inside, self._enclosing, predicate)
        outputs = self.run(jaxpr, values, inside)
        self.divergence = before
        return outputs

    def run_checkpointed(
        self, jaxpr: Any, values: Sequence[Value], inside: core.JaxprEqn
    ) -> list[Value]:
        """Interprets a jaxpr that may run twice: only its own refs may be written."""
        before, self._checkpoint_floor = self._checkpoint_floor, self._cells
        outputs = self.run(jaxpr, values, inside)
        self._checkpoint_floor = before
        return outputs

    def settle(
        self,
        step: Callable[[list[Value]], list[Value]],
        carry: Sequence[Value],
    ) -> tuple[list[Value], list[Value]]:
        """Repeats a loop's body until neither its carry nor a ref changes.

        Args:
          step: From a carry to the outputs of one iteration, which begin with the next
            carry.
          carry: The first carry.

        Returns:
          The carry that holds for every iteration, and the outputs that follow from it.
        """
        carry = list(carry)
        outer_cells = self._cells  # the body makes its own refs anew every time
        while True:
            before = len(self._tainted)
            outputs = step(carry)
            joined = [a or b for a, b in zip(carry, outputs, strict=False)]
            refs_changed = any(s < outer_cells for s in self._tainted[before:])
            if joined == carry and not refs_changed:
                return carry, outputs
            carry = joined
