"""A step, compiled for all replicas, and how it is launched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import numpy as np

from replicax import _compat
from replicax._compat import num_signatures
from replicax.errors import ConsumedArgumentError, StaticArgumentError, listed

from .arguments import Kind
from .donation import Donor, holds_deleted
from .fence import LAUNCHING
from .placement import is_numeric
from .traced_step import TracedStep, finish
from .variables.captured import Captured, MoreVariables

if TYPE_CHECKING:
    from .strategy import Strategy


class _Expected(threading.local):
    """Whether this thread is about to trace a program, and knows."""

    active = False


_expected = _Expected()


class NotRepeated(Exception):
    """JAX was about to trace a program for arguments of a kind not seen before."""


class Program:
    """A compiled step for one function, argument structure and set of static values.

    Args:
      strategy: The strategy whose replicas run it.
      step: The step.
      treedef: The structure of ``(args, kwargs)``, if they hold no objects.
    """

    def __init__(
        self,
        strategy: Strategy,
        step: TracedStep,
        treedef: Any = None,
    ):
        self._strategy = strategy
        self._placer = strategy.placer
        self._step = step
        self._positions = step.positions
        self._arrays = step.arrays
        shardings = {
            Kind.PER_REPLICA: self._placer.per_replica,
            Kind.MIRRORED: self._placer.replicated,
        }
        # Of arrays, but not of Python numbers. JAX's outputs carry an equal sharding in
        # another object; remembering the last one makes the usual check an `is`.
        self._shardings = {
            i: shardings[x.kind]
            for i, x in enumerate(self._arrays)
            if x.kind in shardings
        }
        donated = [i for i in self._shardings if self._arrays[i].donated]
        self.donor = (
            Donor(
                self._arrays,
                donated,
                treedef,
                self._placer.num_replicas,
                self._placer.copy,
            )
            if donated
            else None
        )
        self.references: list[Any] = []

        # A program of arrays takes the caller's own arguments, so that a repeated call
        # can hand them to JAX as they are.
        self._treedef = treedef
        self.is_repeatable = (
            treedef is not None and len(self._shardings) == treedef.num_leaves
        )
        self._takes_trees = self.is_repeatable and not donated
        self.num_signatures = 0

        self._donated = donated
        self.variables = Captured()
        self._compile()

    def _compile(self) -> None:
        """Makes the jitted functions, for the variables that are known to be used."""
        variables = self.variables

        def program(*args: Any, **kwargs: Any) -> Any:
            return self._evaluate(args, kwargs, variables.bound())[0]

        def program_with_variables(
            read: Any, written: Any, *args: Any, **kwargs: Any
        ) -> Any:
            bound = variables.bound(read, written)
            out, news = self._evaluate(args, kwargs, bound)
            return out, [news.get(v, bound[v]) for v in variables.written]

        donated = self._donated
        if variables:
            program = program_with_variables
            donated = [1, *(i + 2 for i in donated)]
        program.__name__ = program.__qualname__ = f"run_{self._step.name}"
        self._jitted = jax.jit(program)
        self.donating = (
            jax.jit(program, donate_argnums=donated) if donated else self._jitted
        )

    def _evaluate(self, args: Any, kwargs: Any, bound: Any) -> Any:
        """The step, while it is traced for new kinds of arguments."""
        if not _expected.active:
            raise NotRepeated
        if _compat.is_searched_for_nans():
            raise FloatingPointError(
                f"{self._step.name} returned a NaN or an infinity, which "
                "jax_debug_nans or jax_debug_infs is set to refuse. To find the "
                "operation, call the step's parts outside of `run`, or print with "
                "jax.debug.print."
            )
        return self._step(jax.tree.leaves((args, kwargs)), bound)

    @property
    def captures_tracers(self) -> bool:
        """Whether the step was found to capture values of a trace around it."""
        return self._step.captures_tracers

    # -- launching -------------------------------------------------------------------

    def launch(self, leaves: list[Any]) -> tuple[Any, list[Any], Any]:
        """Runs the step on concrete arguments.

        Args:
          leaves: The flattened arguments. Those that had to be placed are replaced by
            what they became.

        Returns:
          The outputs, the new values of written state, and what the lift needs to
          write them back.

        Raises:
          ConsumedArgumentError: An array was consumed by an earlier run.
        """
        fence = self._strategy.fence
        fence.pass_gate()
        with LAUNCHING:  # the arguments must not be donated by another thread meanwhile
            arrays = self._prepared(leaves)
            result = self._until_complete(
                lambda: self.variables.launcher(self.donating), arrays
            )
        fence.after_launch(result)
        self.num_signatures = num_signatures(self.donating)
        if self.donor is not None:
            self.donor.own(result)
        return finish(result)

    def _prepared(self, leaves: list[Any]) -> list[Any]:
        """The arrays, each where it belongs, and those to be donated our own."""
        given = [leaves[i] for i in self._positions]
        self._refuse_consumed(given)
        arrays = list(given)
        for i, sharding in self._shardings.items():
            if getattr(arrays[i], "sharding", None) is not sharding:
                arrays[i] = leaves[self._positions[i]] = self._place(i, arrays[i])
                self._shardings[i] = arrays[i].sharding
        if self.donor is not None:
            self.donor.prepare(arrays, given)
        return arrays

    def look_closer(self, args: Any, kwargs: Any) -> None:
        """Looks whether new kinds of arguments can be launched with as they are.

        Placing is remembered by :meth:`launch` only: JAX would do it every time.

        Args:
          args: The positional arguments that JAX was given.
          kwargs: The keyword arguments.
        """
        self.num_signatures = num_signatures(self.donating)
        leaves = jax.tree.leaves((args, kwargs))
        self.is_repeatable = all(
            self._placer.lies_as(leaves[i], sharding)
            for i, sharding in self._shardings.items()
        )

    def reconsider(self, error: Exception, args: Any, kwargs: Any) -> None:
        """Raises the error of a repeated launch, unless it came of its arguments."""
        is_other_call = isinstance(error, NotRepeated)
        if is_other_call and self.donor is None:
            return  # perhaps even of another structure
        self.look_closer(args, kwargs)
        if self.is_repeatable and not is_other_call:
            raise error

    def inline(self, leaves: Sequence[Any]) -> tuple[Any, list[Any], Any]:
        """Runs the step inside the trace that the caller is in; see :meth:`launch`."""
        arrays = [leaves[i] for i in self._positions]
        for i, x in enumerate(arrays):
            # Placing is done now, not staged into the trace around us.
            if isinstance(x, (jax.Array, np.ndarray)) and not isinstance(
                x, jax.core.Tracer
            ):
                with jax.ensure_compile_time_eval():
                    arrays[i] = self._place(i, x)
        result = self._until_complete(
            lambda: self.variables.inliner(self._jitted), arrays
        )
        return finish(result)

    def _until_complete(
        self, callable_now: Callable[[], Callable[..., Any]], arrays: list[Any]
    ) -> Any:
        """Calls a program, made for more variables if it turns out to need them."""
        while True:
            try:
                return self._call(callable_now(), arrays)
            except MoreVariables as more:
                self.variables = self.variables.including(more.used, more.written)
                self._compile()

    def named_mirrored(self, leaves: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of each argument that must be mirrored."""
        for i, leaf in zip(self._positions, self._arrays, strict=True):
            if leaf.kind is Kind.MIRRORED:
                yield leaf.name, leaves[i]

    # -- parts of a launch -----------------------------------------------------------

    def _refuse_consumed(self, arrays: Sequence[Any]) -> None:
        gone = [
            leaf.name
            for x, leaf in zip(arrays, self._arrays, strict=True)
            if holds_deleted(x)
        ]
        if gone:
            raise ConsumedArgumentError(
                f"Deleted arrays were passed as {listed(gone, ', ')}. An earlier run "
                "with RunOptions(donate=...) consumed them: use what that run returned."
            )

    def _place(self, i: int, x: Any) -> Any:
        if isinstance(x, np.ndarray) and not is_numeric(x):
            raise StaticArgumentError(
                f"Argument {self._arrays[i].name} is a numpy array of dtype {x.dtype}, "
                "which cannot be sent to devices. Keep strings and objects on the "
                "host, or encode them as numbers."
            )
        if self._arrays[i].kind is Kind.PER_REPLICA:
            return self._placer.stacked(x)
        if self._arrays[i].kind is Kind.MIRRORED:
            return self._placer.mirrored(x)
        return x

    def _call(self, jitted: Callable[..., Any], arrays: list[Any]) -> Any:
        args, kwargs = arrays, {}
        if self._takes_trees:
            args, kwargs = self._treedef.unflatten(arrays)
        mesh = self._strategy.mesh
        foreign = _compat.active_mesh_is_foreign(mesh)
        with _compat.own_mesh(mesh) if foreign else contextlib.nullcontext():
            before, _expected.active = _expected.active, True
            try:
                return jitted(*args, **kwargs)
            finally:
                _expected.active = before
