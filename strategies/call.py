"""What to do for calls of one function with one structure of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicax._compat import no_trace_is_active

from .arguments import Kind, Leaf, check_static
from .function_key import Global, static_key
from .options import RunOptions
from .program import Program
from .state import Lift
from .tables import drop_oldest

if TYPE_CHECKING:
    from .run import Runner


class Call:
    """What to do for one function and structure of arguments."""

    references: list[Any]
    """What the call's key holds by identity, kept alive."""
    code: Any = None
    """The function's code."""
    watched: Sequence[tuple[Any, Any]] = ()
    """nnx Variables that the function captures, with what they held."""
    reachable: Sequence[Global] = ()
    """Globals that the function, or one that it calls, can read, and what they held."""
    forget: Callable[[], Any]
    """Takes the call out of the cache."""
    repeatable_program: Program | None = None
    """The program, if arrays are all that can differ between two such calls."""
    last_fn: Any = None
    """The function object of the last call."""

    def __call__(
        self, leaves: list[Any], args: Any, kwargs: Any, options: RunOptions
    ) -> Any:
        """Runs the step on flattened ``(args, kwargs)``."""
        raise NotImplementedError


class ProgramCall(Call):
    """Launches the program for the static values at hand.

    Args:
      runner: The programs' owner.
      fn: The step.
      described: How each leaf enters.
      lift: How state gets in and out.
      treedef: The structure of ``(args, kwargs)``, if they hold no objects.
    """

    def __init__(
        self,
        runner: Runner,
        fn: Callable[..., Any],
        described: Sequence[Leaf],
        lift: Lift,
        treedef: Any = None,
    ):
        self._runner = runner
        self._fn = fn
        self._described = described
        self._lift = lift
        self._treedef = treedef
        self._static = [i for i, x in enumerate(described) if x.kind is Kind.STATIC]
        self._programs: dict[Any, Program] = {}
        self._only_program: Program | None = None

    def __call__(
        self, leaves: list[Any], args: Any, kwargs: Any, options: RunOptions
    ) -> Any:
        """Runs the step."""
        return self.launch(leaves, options)[0]

    def launch(
        self, leaves: list[Any], options: RunOptions
    ) -> tuple[Any, list[Any], Any]:
        """Runs the step; see ``Program.launch``."""
        program = self._only_program or self._program_for(leaves)
        if options.check_values:
            self._runner.strategy.placer.check_copies_equal(
                program.named_mirrored(leaves)
            )
        if no_trace_is_active():
            return program.launch(leaves)
        result = program.inline(leaves)
        if program.captures_tracers:
            self.forget()
        return result

    def _program_for(self, leaves: list[Any]) -> Program:
        values = [leaves[i] for i in self._static]
        for i, value in zip(self._static, values, strict=True):
            check_static(value, self._described[i].name)
        key, references = static_key(values)
        program = self._programs.get(key)
        if program is None:
            statics = dict(zip(self._static, values, strict=True))
            program = self._runner.new_program(
                self._fn, self._described, statics, self._lift, self._treedef
            )
            program.references = references
            self._programs[key] = program
            drop_oldest(self._programs)
            if not self._static:
                self._only_program = program
                if program.is_repeatable and not self.watched:
                    self.repeatable_program = program
        return program
