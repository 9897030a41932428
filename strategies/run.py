"""``strategy.run``: finds or makes the compiled program of a call and launches it.

A call is looked up by the function's code and captures, the structure of its
arguments, and the types and static values of their leaves. What a repeated call costs
is one flattening, one look-up and an identity check of each array's sharding.
"""

from __future__ import annotations

import collections
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax.tree_util import tree_flatten

from replicax.values import PerReplica

from .arguments import Leaf, describe_leaves
from .call import Call, ProgramCall
from .captured_state import captured_variables, have_changed
from .function_key import (
    code_key,
    function_key,
    function_references,
    have_other_values,
    reachable_globals,
)
from .merge import is_per_replica, replica_structure
from .mirrored_guard import MirroredGuard
from .options import RunOptions
from .placement import stack
from .program import Program
from .shortcut import make_shortcut
from .state import Lift, NoState
from .tables import drop_oldest
from .traced_step import TracedStep

if TYPE_CHECKING:
    from .strategy import Strategy

_MANY_TRACES = 16
_DEFAULT_OPTIONS = RunOptions()


class Runner:
    """The programs of one strategy.

    Args:
      strategy: The strategy.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._calls: dict[Any, Call] = {}
        self.shortcuts: dict[int, Callable[..., Any]] = {}
        """For the id of a function object, the short way of its last call."""
        self._guard = MirroredGuard()
        self._traces: collections.Counter[Any] = collections.Counter()
        self._lock = threading.Lock()

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._strategy

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions | None,
    ) -> Any:
        """Runs ``fn`` on every replica; see ``Strategy.run``."""
        leaves, treedef = tree_flatten((args, kwargs))
        options = options or _DEFAULT_OPTIONS
        key = (function_key(fn), treedef, tuple(map(type, leaves)), options.key)
        call = self._calls.get(key)
        again = call is not None and call.last_fn is fn
        if (
            call is None
            or (call.watched and have_changed(fn, call.watched))
            # As in jax.jit, only another function object sees other globals at depth.
            or (not again and have_other_values(call.reachable))
        ):
            call = self._plan(fn, args, kwargs, options, key, leaves)
        call.last_fn = fn
        if call.repeatable_program is not None:
            self._note_shortcut(call, fn, options, again)
        return call(leaves, args, kwargs, options)

    def _note_shortcut(
        self, call: Call, fn: Any, options: RunOptions, again: bool
    ) -> None:
        """Prepares the short way for a function object that is seen again."""
        program = call.repeatable_program
        if program is None or not program.is_repeatable:
            self.shortcuts.pop(id(fn), None)
        elif again and not options.check_values:
            given = None if options is _DEFAULT_OPTIONS else options
            drop_oldest(self.shortcuts)
            self.shortcuts[id(fn)] = make_shortcut(self._strategy, fn, given, program)

    # -- a call not seen before ------------------------------------------------------

    def _plan(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions,
        key: Any,
        leaves: list[Any],
    ) -> Call:
        """Makes the call for a function or a structure of arguments not seen before."""
        references = function_references(fn)
        tracing = any(isinstance(x, jax.core.Tracer) for x in (*references, *leaves))
        call: Call
        if _has_loose_components((args, kwargs)):
            call = _StackFirst(self, fn)
        else:
            described = describe_leaves(fn, args, kwargs, options.donate)
            if not tracing:
                self._check_guard(fn, described, (args, kwargs), options)
            call = self._plan_program(fn, args, kwargs, options, described)
        call.references = references
        call.code = code_key(fn)
        call.watched = captured_variables(fn)
        call.reachable = reachable_globals(fn)
        if not tracing:
            with self._lock:
                self._calls[key] = call
                drop_oldest(self._calls)
        call.forget = lambda: self._calls.pop(key, None)
        return call

    def _check_guard(
        self,
        fn: Callable[..., Any],
        described: Sequence[Leaf],
        arguments: Any,
        options: RunOptions,
    ) -> None:
        code = code_key(fn)
        if self._guard.check(fn, code, described, arguments, options.allow_divergence):
            with self._lock:
                for key in [k for k, call in self._calls.items() if call.code == code]:
                    del self._calls[key]
                self.shortcuts.clear()

    def _plan_program(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions,
        described: Sequence[Leaf],
    ) -> Call:
        if "flax.nnx" in sys.modules:
            from . import nnx_state  # Flax takes long to import: only where it is used

            call = nnx_state.plan(self, fn, args, kwargs, options)
            if call is not None:
                return call
        lift = NoState(replica_structure((args, kwargs)))
        treedef = jax.tree.structure((args, kwargs))
        return ProgramCall(self, fn, described, lift, treedef)

    def new_program(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[Leaf],
        statics: dict[int, Any],
        lift: Lift,
        treedef: Any,
    ) -> Program:
        """Makes a program whose traces are counted."""

        def on_trace() -> None:
            self._count_trace(fn)

        step = TracedStep(self._strategy, fn, leaves, statics, lift, on_trace)
        return Program(self._strategy, step, treedef)

    def _count_trace(self, fn: Callable[..., Any]) -> None:
        code = getattr(fn, "__code__", None)
        if code is None or (fn.__module__ or "").startswith("replicax."):
            return
        self._traces[code] += 1
        if self._traces[code] == _MANY_TRACES:
            warnings.warn(
                f"{fn.__qualname__} ({code.co_filename}:{code.co_firstlineno}) was "
                f"traced and compiled {_MANY_TRACES} times. Usual causes: an array or "
                "object that it captures, or a global that it reads, is made anew or "
                "changed for each call (pass it as an argument), a bool, string or "
                "function among its arguments keeps changing, or shapes keep changing "
                "(pad them to a few sizes).",
                stacklevel=2,
            )


class _StackFirst(Call):
    """Places per-replica values that were given as loose components, then runs."""

    def __init__(self, runner: Runner, fn: Callable[..., Any]):
        self._runner = runner
        self._fn = fn

    def __call__(
        self, leaves: list[Any], args: Any, kwargs: Any, options: RunOptions
    ) -> Any:
        placer = self._runner.strategy.placer
        args, kwargs = jax.tree_util.tree_map_with_path(
            lambda path, x: (
                stack(x, placer, f"Argument {jax.tree_util.keystr(path[1:])}")
                if isinstance(x, PerReplica)
                else x
            ),
            (args, kwargs),
            is_leaf=_is_kept_whole,
        )
        return self._runner.run(self._fn, args, kwargs, options)


def _is_kept_whole(x: Any) -> bool:
    """Whether ``x`` is a per-replica value, or an object that the step may write to."""
    if "flax.nnx" not in sys.modules:
        return is_per_replica(x)
    from .nnx_variables import is_object

    return is_per_replica(x) or is_object(x)


def _has_loose_components(tree: Any) -> bool:
    return any(
        isinstance(x, PerReplica) and not x.is_stacked
        for x in jax.tree.leaves(tree, is_leaf=is_per_replica)
    )
