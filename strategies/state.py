"""State that a step changes in place, and how it gets in and out of the trace.

A compiled step is a pure function. A *lift* makes it one: it rebuilds the caller's
arguments around traced arrays, and afterwards tells which state the step wrote. This
module holds what all lifts share; :mod:`.nnx_state` knows the objects of Flax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .strategy import Strategy


@dataclasses.dataclass(frozen=True)
class StateWrite:
    """The new value of one piece of state, inside the trace.

    Attributes:
      name: What to call it, for example ``model.linear.kernel``.
      new: Its traced value after the step; None once the trace is over.
      input: The position of its old value among the step's arrays, or None.
      must_be_mirrored: Whether it is an error that it varies.
      average: Whether it is averaged over replicas if it varies.
      group: The group of states that are combined together, or None.
      kept: The value that stood for the state in the step, where that is not its old
        one. If ``new`` is only that value passed on, the old one is written back.
    """

    name: str
    new: Any
    input: int | None = None
    must_be_mirrored: bool = True
    average: bool = False
    group: Any = None
    kept: Any = None


class Lift(Protocol):
    """Turns a step over objects into a pure function of arrays, and back."""

    def rebuild(
        self, leaves: list[Any], strategy: Strategy
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Returns the arguments made of traced leaves, and a token for ``extract``."""
        ...

    def extract(self, token: Any, out: Any) -> tuple[Any, list[StateWrite], Any]:
        """Returns the outputs without objects, the writes, and a static note."""
        ...

    def settle(
        self,
        jaxpr: Any,
        writes: Sequence[StateWrite],
        values: Sequence[Any],
        varies: Sequence[bool],
        inputs: Sequence[Any],
        strategy: Strategy,
    ) -> list[Any]:
        """Returns the written values, combined over replicas where they vary."""
        ...


@dataclasses.dataclass(frozen=True)
class NoState:
    """The lift of arguments that hold no objects.

    Attributes:
      treedef: The structure of ``(args, kwargs)`` that one replica sees.
    """

    treedef: Any

    def rebuild(self, leaves: list[Any], strategy: Strategy) -> Any:
        """Unflattens the arguments."""
        del strategy
        args, kwargs = self.treedef.unflatten(leaves)
        return args, kwargs, None

    def extract(self, token: Any, out: Any) -> tuple[Any, list[StateWrite], Any]:
        """Finds nothing to write."""
        del token
        return out, [], None

    def settle(
        self,
        jaxpr: Any,
        writes: Sequence[StateWrite],
        values: Sequence[Any],
        varies: Sequence[bool],
        inputs: Sequence[Any],
        strategy: Strategy,
    ) -> list[Any]:
        """Has nothing to combine."""
        del jaxpr, writes, varies, inputs, strategy
        return list(values)
