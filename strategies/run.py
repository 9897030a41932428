"""``strategy.run``: finds or makes the compiled program of a call and launches it.

A call is looked up by the function's code and captures, the structure of its
arguments, and the types and static values of their leaves. What a repeated call costs
is one flattening, one look-up and an identity check of each array's sharding.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
from jax.tree_util import tree_flatten

from replicax._compat import no_trace_is_active
from replicax.errors import ReplicaDivergenceError
from replicax.values import PerReplica

from .arguments import Kind, Leaf, check_static, describe_leaves
from .captured_state import captured_variables, have_changed
from .function_key import (
    captured_cells,
    function_key,
    function_references,
    static_key,
)
from .merge import is_per_replica, replica_structure
from .options import RunOptions
from .placement import stack
from .program import Program
from .state import Lift, NoState

if TYPE_CHECKING:
    from .strategy import Strategy

_MOST_CALLS_KEPT = 512
_MOST_STATICS_KEPT = 128
_MANY_TRACES = 16


class Runner:
    """The programs of one strategy.

    Args:
      strategy: The strategy.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._calls: dict[Any, _Call] = {}
        self._mirrored: dict[Any, _Mirrored] = {}
        self._repeats: dict[tuple[int, Any], _Repeat] = {}
        self._traces: collections.Counter[Any] = collections.Counter()
        self._lock = threading.Lock()

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions | None,
    ) -> Any:
        """Runs ``fn`` on every replica; see ``Strategy.run``."""
        leaves, treedef = tree_flatten((args, kwargs))
        repeat = self._repeats.get((id(fn), treedef))
        if repeat is not None and repeat.holds_for(fn, options):
            result = repeat.program.launch_placed(leaves)
            if result:
                return result[0]
        types = tuple(map(type, leaves))
        donate = None if options is None else options.donate
        key = (function_key(fn), treedef, types, donate)
        call = self._calls.get(key)
        if call is None or (call.watched and have_changed(call.watched)):
            call = self._plan(fn, args, kwargs, options or RunOptions(), key, leaves)
        if call.repeatable_program is not None:
            self._note_repeat(call, fn, treedef, options)
        return call(leaves, args, kwargs, options)

    def _note_repeat(
        self, call: _Call, fn: Any, treedef: Any, options: RunOptions | None
    ) -> None:
        """Prepares the short way for a function object that is seen again."""
        again, call.last_fn = call.last_fn is fn, fn
        if again and not (options is not None and options.check_values):
            assert call.repeatable_program is not None
            if len(self._repeats) >= _MOST_CALLS_KEPT:
                self._repeats.clear()
            self._repeats[id(fn), treedef] = _Repeat(
                fn, captured_cells(fn), options, call.repeatable_program
            )

    def _plan(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions,
        key: Any,
        leaves: list[Any],
    ) -> _Call:
        """Makes the call for arguments of a structure not seen before."""
        call: _Call
        references = function_references(fn)
        if _has_loose_components((args, kwargs)):
            call = _StackFirst(self, fn)
        else:
            self._guard_mirrored(fn, args, kwargs, options, key[0], references)
            call = self._plan_program(fn, args, kwargs, options)
        call.references = references
        call.watched = captured_variables(fn)
        tracing = any(isinstance(x, jax.core.Tracer) for x in (*references, *leaves))
        if not tracing:
            with self._lock:
                self._calls[key] = call
                _drop_oldest(self._calls)
        call.forget = lambda: self._calls.pop(key, None)
        return call

    def _plan_program(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions,
    ) -> _Call:
        if "flax.nnx" in sys.modules:
            from . import nnx_state

            call = nnx_state.plan(self, fn, args, kwargs, options)
            if call is not None:
                return call
        described = describe_leaves(fn, args, kwargs, options.donate)
        return ProgramCall(
            self, fn, described, NoState(replica_structure((args, kwargs)))
        )

    def new_program(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[Leaf],
        statics: dict[int, Any],
        lift: Lift,
    ) -> Program:
        """Makes a program whose traces are counted."""
        return Program(
            self._strategy, fn, leaves, statics, lift, lambda: self._count_trace(fn)
        )

    def _guard_mirrored(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions,
        fn_key: Any,
        references: list[Any],
    ) -> None:
        """Refuses per-replica values where the function once had a mirrored one.

        Functional state that has silently become per-replica comes back to the same
        step as an argument; this is where it is caught.
        """
        diverged = []
        with self._lock:
            known = self._mirrored.setdefault(fn_key, _Mirrored(set(), references))
            _drop_oldest(self._mirrored)
        mirrored = known.names
        for leaf, value in zip(
            describe_leaves(fn, args, kwargs, ()),
            jax.tree.leaves((args, kwargs), is_leaf=is_per_replica),
            strict=True,
        ):
            if leaf.kind is Kind.MIRRORED:
                mirrored.add(leaf.name)
            elif leaf.kind is Kind.ROW and leaf.name in mirrored and not value.is_data:
                diverged.append(leaf.name)
        if diverged and not options.allow_divergence:
            name = getattr(fn, "__qualname__", repr(fn))
            raise ReplicaDivergenceError(
                f"{name} got a mirrored value at an earlier call and a PerReplica now "
                f"for: {', '.join(diverged[:10])}"
                f"{f' and {len(diverged) - 10} more' if len(diverged) > 10 else ''}. "
                "If this is state that the step returned, its replicas have drifted "
                "apart: combine what makes it differ, usually gradients, with "
                "`rx.get_replica_context().all_reduce('mean', ...)`. If replicas are "
                "meant to hold different values here, pass "
                "`options=rx.RunOptions(allow_divergence=True)`."
            )

    def _count_trace(self, fn: Callable[..., Any]) -> None:
        code = getattr(fn, "__code__", None)
        if code is None or fn.__module__.startswith("replicax."):
            return
        self._traces[code] += 1
        if self._traces[code] == _MANY_TRACES:
            warnings.warn(
                f"{fn.__qualname__} ({code.co_filename}:{code.co_firstlineno}) was "
                f"traced and compiled {_MANY_TRACES} times. Usual causes: an array or "
                "object that it captures is made anew or changed for each call (pass "
                "it as an argument), a bool, string or function among its arguments "
                "keeps changing, or shapes keep changing (pad them to a few sizes).",
                stacklevel=2,
            )

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._strategy


@dataclasses.dataclass
class _Mirrored:
    """The arguments of a function that were mirrored at some call of it.

    Attributes:
      names: Their names.
      references: What the function's key holds by identity, kept alive.
    """

    names: set[str]
    references: list[Any]


class _Repeat(NamedTuple):
    """What a call that was made before with the same function object comes down to.

    The short way of most calls: arguments of the same structure, which are all arrays
    that lie where they should, need no key to find their program.

    Attributes:
      fn: The function object.
      cells: What it captured, as pairs of a closure cell and its contents.
      options: The options object.
      program: The program.
    """

    fn: Callable[..., Any]
    cells: list[tuple[Any, Any]]
    options: RunOptions | None
    program: Program

    def holds_for(self, fn: Any, options: RunOptions | None) -> bool:
        """Whether the key of the call would be the same, told without making it."""
        if fn is not self.fn or options is not self.options:
            return False
        for cell, contents in self.cells:
            if cell.cell_contents is not contents:
                return False
        return no_trace_is_active()


class _Call:
    """What to do for one function and structure of arguments."""

    references: list[Any]
    """What the call's key holds by identity, kept alive."""
    watched: Sequence[tuple[Any, Any]] = ()
    """nnx Variables that the function captures, with what they held."""
    forget: Callable[[], Any]
    """Takes the call out of the cache."""
    repeatable_program: Program | None = None
    """The program, if arrays are all that can differ between two such calls."""
    last_fn: Any = None
    """The function object of the last such call."""

    def __call__(
        self, leaves: list[Any], args: Any, kwargs: Any, options: RunOptions | None
    ) -> Any:
        raise NotImplementedError


class _StackFirst(_Call):
    """Places per-replica values that were given as loose components, then runs."""

    def __init__(self, runner: Runner, fn: Callable[..., Any]):
        self._runner = runner
        self._fn = fn

    def __call__(
        self, leaves: list[Any], args: Any, kwargs: Any, options: RunOptions | None
    ) -> Any:
        placer = self._runner.strategy.placer
        args, kwargs = jax.tree_util.tree_map_with_path(
            lambda path, x: (
                stack(x, placer, f"Argument {jax.tree_util.keystr(path[1:])}")
                if isinstance(x, PerReplica)
                else x
            ),
            (args, kwargs),
            is_leaf=is_per_replica,
        )
        return self._runner.run(self._fn, args, kwargs, options)


class ProgramCall(_Call):
    """Launches the program for the static values at hand.

    Args:
      runner: The programs' owner.
      fn: The step.
      described: How each leaf enters.
      lift: How state gets in and out.
    """

    def __init__(
        self, runner: Runner, fn: Callable[..., Any], described: Any, lift: Any
    ):
        self._runner = runner
        self._fn = fn
        self._described = described
        self._lift = lift
        self._static = [i for i, x in enumerate(described) if x.kind is Kind.STATIC]
        self._programs: dict[Any, Program] = {}
        self._only_program: Program | None = None

    def __call__(
        self, leaves: list[Any], args: Any, kwargs: Any, options: RunOptions | None
    ) -> Any:
        """Runs the step."""
        program = self._only_program
        if program is None or options is not None or not no_trace_is_active():
            return self.launch(leaves, options)[0]
        return program.launch(leaves)[0]

    def launch(
        self, leaves: list[Any], options: RunOptions | None
    ) -> tuple[Any, list[Any], Any]:
        """Runs the step; see ``Program.launch``."""
        program = self._only_program or self._program_for(leaves)
        if options is not None and options.check_values:
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
                self._fn, self._described, statics, self._lift
            )
            program.references = references
            if len(self._programs) >= _MOST_STATICS_KEPT:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = program
            if not self._static:
                self._only_program = program
                if program.takes_arrays_only and not self.watched:
                    self.repeatable_program = program
        return program


def _drop_oldest(table: dict[Any, Any]) -> None:
    while len(table) > _MOST_CALLS_KEPT:
        del table[next(iter(table))]


def _has_loose_components(tree: Any) -> bool:
    return any(
        isinstance(x, PerReplica) and not x.is_stacked
        for x in jax.tree.leaves(tree, is_leaf=is_per_replica)
    )
