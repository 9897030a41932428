"""``rx.function``: a ``jax.jit`` that knows variables."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
from jax.tree_util import tree_flatten

from replicax import _compat
from replicax.errors import StaticArgumentError
from replicax.values import PerReplica

from .arguments import Kind, kind_of
from .context import get_strategy
from .fence import LAUNCHING
from .function_key import static_key
from .merge import is_per_replica
from .replication import prove
from .tables import drop_oldest
from .trace_errors import refuse_problems
from .traced_step import Static, is_value, without_statics
from .variables import frames
from .variables.captured import Bound, Captured, MoreVariables

if TYPE_CHECKING:
    from .variables.variable import Variable


def function(
    fn: Callable[..., Any] | None = None, *, steps_per_execution: int | None = None
) -> Any:
    """Compiles a function that may read and write variables and run steps.

    As ``jax.jit``, but variables that the function finds (in closures, globals,
    attributes or arguments) are inputs and outputs of the compiled program: what it
    writes is written. ``strategy.run`` and ``strategy.reduce`` inside of it become part
    of one program, also in a ``jax.lax.scan`` or ``jax.lax.cond``. Inside of another
    ``rx.function``, or of a step, it is a plain call.

    Args:
      fn: The function. Its arguments enter as those of a step: arrays, PerReplica
        values and numbers are traced, all else is static.
      steps_per_execution: Makes a training loop of it that runs several steps in one
        launch. It is then called with a sequence of batches in place of its first
        argument: ``fn`` is called for each of them in turn, and what it returns is
        stacked. There are to be this many batches, or fewer at the end.

    Returns:
      The compiled function; or a decorator, without ``fn``.

    Raises:
      ValueError: ``steps_per_execution`` is no positive int; or, when called, there are
        more batches, or none.
      StaticArgumentError: An argument is neither an array nor hashable.
      ReplicaxError: The function makes a new variable each time it is traced.

    Example:
      >>> import jax
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> with strategy.scope():
      ...     w = rx.Variable(1.0)
      >>> @rx.function
      ... def train(num_steps):
      ...     step = lambda: w.assign_add(1.0)
      ...     jax.lax.fori_loop(0, num_steps, lambda i, _: strategy.run(step), 0.0)
      >>> train(5)
      >>> float(w)
      6.0
    """
    if steps_per_execution is not None and (
        not isinstance(steps_per_execution, int) or steps_per_execution < 1
    ):
        raise ValueError(
            f"steps_per_execution must be a positive int. Got {steps_per_execution!r}."
        )
    if fn is None:
        return functools.partial(function, steps_per_execution=steps_per_execution)
    if steps_per_execution is None:
        return Function(fn)
    return _Loop(fn, steps_per_execution)


class Function:
    """A compiled function that may read and write variables; see :func:`function`.

    Args:
      fn: The function.
    """

    def __init__(self, fn: Callable[..., Any]):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._programs: dict[Any, _Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        if frames.current() is not None or not _compat.no_trace_is_active():
            return self._fn(*args, **kwargs)
        leaves, treedef = tree_flatten((args, kwargs))
        kinds = [kind_of(type(x)) for x in leaves]
        static = [x for x, k in zip(leaves, kinds, strict=True) if k is Kind.STATIC]
        arrays = [x for x, k in zip(leaves, kinds, strict=True) if k is not Kind.STATIC]
        strategy = get_strategy()
        key, references = _static_key(static)
        key = (treedef, tuple(k is Kind.STATIC for k in kinds), key, id(strategy))
        program = self._programs.get(key)
        if program is None:
            _refuse_objects((args, kwargs))
            template = [
                x if k is Kind.STATIC else None
                for x, k in zip(leaves, kinds, strict=True)
            ]
            program = _Program(self._fn, treedef, template, kinds)
            program.references = [*references, strategy]
            self._programs[key] = program
            drop_oldest(self._programs)
        return program.launch(arrays)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return functools.partial(self, instance)


@dataclasses.dataclass
class _Record:
    """What the tracing of a function leaves behind."""

    jaxpr: Any = None
    out_tree: Any = None
    out_leaves: list[Static | None] = dataclasses.field(default_factory=list)
    offered: list[Variable] = dataclasses.field(default_factory=list)
    frame: Any = None


class _Program:
    """A function compiled for one structure of arguments and set of static ones."""

    def __init__(
        self,
        fn: Callable[..., Any],
        treedef: Any,
        template: Sequence[Any],
        kinds: Sequence[Kind],
    ):
        self._fn = fn
        self._name: str = getattr(fn, "__name__", type(fn).__name__)
        self._treedef = treedef
        self._template = template
        self._kinds = kinds
        self._in_refs: dict[Variable, None] = {}
        self._pending: dict[Any, _Record] = {}
        self._captured = Captured()
        self.references: list[Any] = []
        self._jitted = self._compiled()

    def launch(self, arrays: Sequence[Any]) -> Any:
        """Calls the function on concrete arguments."""
        fence = self._fence()
        fence.pass_gate()
        with LAUNCHING:
            while True:
                try:
                    out = self._captured.launcher(self._jitted)(*arrays)
                    break
                except MoreVariables as more:
                    self._captured = self._captured.including(more.used, more.written)
                    self._jitted = self._compiled()
        fence.after_launch(out)
        return without_statics(out)

    def _fence(self) -> Any:
        for variable in (*self._captured.written, *self._captured.read):
            return variable.strategy.fence
        return get_strategy().fence

    def _compiled(self) -> Callable[..., Any]:
        captured = self._captured

        def program(*arrays: Any) -> Any:
            if not captured:
                return self._evaluate(arrays, captured.bound())[0]
            read, written, *own = arrays
            return self._evaluate(own, captured.bound(read, written))

        program.__name__ = program.__qualname__ = self._name
        return jax.jit(program, donate_argnums=1 if captured else ())

    def _evaluate(self, arrays: Sequence[Any], bound: Bound) -> tuple[Any, list[Any]]:
        signature = tuple(map(jax.typeof, arrays))
        record = self._pending.pop(signature, None) or self._recorded(arrays)
        used, written = [*record.frame.used], [*record.frame.written]
        self._pending[signature] = record  # in case of too few variables
        bound.captured.check_complete(used, written)
        del self._pending[signature]
        inputs = [*arrays, *(bound.get(v, 0.0) for v in record.offered)]
        results = _compat.evaluate(record.jaxpr, inputs)
        num_news = len(written)
        outputs = iter(results[: len(results) - num_news])
        out = record.out_tree.unflatten(
            next(outputs) if x is None else x for x in record.out_leaves
        )
        news = dict(zip(written, results[len(results) - num_news :], strict=True))
        return out, [
            v.layout.traced(news[v]) if v in news else bound[v]
            for v in bound.captured.written
        ]

    def _recorded(self, arrays: Sequence[Any]) -> _Record:
        record = frames.trace_until_settled(
            lambda: self._traced(arrays), self._in_refs, self._name
        )
        if self._in_refs:
            proof = prove(record.jaxpr, [False] * len(record.jaxpr.in_avals))
            refuse_problems([p for p in proof.problems if p.kind in _ABOUT_REFS])
        return record

    def _traced(self, arrays: Sequence[Any]) -> tuple[_Record, frames.Frame, bool]:
        record = _Record(offered=frames.live_variables())
        layouts = [v.layout for v in record.offered]
        variables = [jax.typeof(v.array) for v in record.offered]
        record.jaxpr = jax.make_jaxpr(self._body(record))(
            *map(_shaped, arrays), *map(_shaped, variables)
        )
        has_moved = [v.layout for v in record.offered] != layouts
        return record, record.frame, has_moved

    def _body(self, record: _Record) -> Callable[..., list[Any]]:
        def body(*values: Any) -> list[Any]:
            num_arrays = len(values) - len(record.offered)
            offered = dict(zip(record.offered, values[num_arrays:], strict=True))
            record.frame = frames.Frame(offered, self._in_refs, None)
            given = iter(values[:num_arrays])
            leaves = [
                x if k is Kind.STATIC else next(given)
                for x, k in zip(self._template, self._kinds, strict=True)
            ]
            args, kwargs = self._treedef.unflatten(leaves)
            with frames.entered(record.frame):
                out = self._fn(*args, **kwargs)
            leaves, record.out_tree = tree_flatten(out)
            record.out_leaves = [None if is_value(x) else Static(x) for x in leaves]
            return [x for x in leaves if is_value(x)] + record.frame.finish()

        return body


class _Loop(Function):
    """A function that is called with several batches at once."""

    def __init__(self, fn: Callable[..., Any], most: int):
        super().__init__(_over_batches(fn))
        functools.update_wrapper(self, fn, updated=())
        self._most = most

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step for each batch."""
        batches = args[0] if args else ()
        if not isinstance(batches, (list, tuple)) or not 0 < len(batches) <= self._most:
            held = (
                f"{len(batches)} of them"
                if isinstance(batches, (list, tuple))
                else type(batches).__name__
            )
            raise ValueError(
                "With steps_per_execution the first argument is a list of 1 to "
                f"{self._most} batches. Got {held}."
            )
        return super().__call__(list(batches), *args[1:], **kwargs)


def _over_batches(fn: Callable[..., Any]) -> Callable[..., Any]:
    def loop(batches: list[Any], *args: Any, **kwargs: Any) -> Any:
        def step(carry: None, batch: Any) -> Any:
            return carry, fn(batch, *args, **kwargs)

        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *batches)
        outputs = jax.lax.scan(step, None, stacked)[1]
        return jax.tree.map(_replicas_first, outputs, is_leaf=is_per_replica)

    return loop


def _replicas_first(x: Any) -> Any:
    """Puts the axis of the steps behind that of the replicas."""
    if is_per_replica(x):
        return PerReplica.from_array(jnp.moveaxis(x.array, 0, 1))
    return x


_ABOUT_REFS = ("effect_under_checkpoint", "ref_in_loop_predicate")


def _shaped(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


def _static_key(static: Sequence[Any]) -> Any:
    for x in static:
        try:
            hash(x)
        except TypeError:
            raise StaticArgumentError(
                f"An argument of rx.function is a {type(x).__name__}, which is neither "
                "an array nor hashable, so it can be neither traced nor compared with "
                "an earlier call's."
            ) from None
    return static_key(static)


def _refuse_objects(tree: Any) -> None:
    if "flax.nnx" in sys.modules:
        from .nnx_variables import is_object

        if any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object))):
            raise StaticArgumentError(
                "rx.function cannot take Flax nnx objects as arguments. Pass them to "
                "`strategy.run`, or hold their state in rx.Variables: "
                "`rx.variables(nnx.state(model))`."
            )
