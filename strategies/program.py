"""One step, traced once, proved, and compiled for all replicas.

The step is traced inside a ``shard_map`` over the strategy's mesh, where every value
is one replica's. The recorded jaxpr is then examined for what differs between replicas
(:mod:`.replication`), and the program that really runs evaluates it in a second
``shard_map`` whose output layout follows from that proof.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.extend.core
import numpy as np
from jax.sharding import PartitionSpec

from replicax import _compat
from replicax.errors import (
    ConsumedArgumentError,
    DivergentCollectiveError,
    PerReplicaError,
    ReplicaDivergenceError,
    ReplicaxError,
    StaticArgumentError,
    listed,
)
from replicax.values import PerReplica

from .arguments import Kind, Leaf
from .context import in_replica
from .dataflow import origin
from .fence import LAUNCHING
from .merge import split_for_replica
from .placement import is_numeric
from .replica_context import ReplicaContext
from .replication import Problem, prove

if TYPE_CHECKING:
    from .placement import Placer
    from .state import Lift, StateWrite
    from .strategy import Strategy


_REMEDY = (
    "Combine what differs before it is written, for example with "
    "`grads = rx.get_replica_context().all_reduce('mean', grads)`."
)


class _Expected(threading.local):
    """Whether this thread is about to trace a program, and knows."""

    active = False


_expected = _Expected()


class _NotRepeated(Exception):
    """JAX was about to trace a program for arguments of a kind not seen before."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A value that a compiled program returns without computing it."""

    value: Any


@dataclasses.dataclass
class _Record:
    """What the tracing of a step leaves behind: no traced value outlives its trace.

    Attributes:
      jaxpr: The step, as a function of one replica's arrays.
      out_tree: The structure of what it returned.
      out_leaves: The leaves that are no arrays, and None for each that is one.
      writes: The state that it wrote.
      num_kept: How many outputs of the jaxpr, the first ones, only say what stood for
        state in the step.
      are_kept: For each write, whether the state keeps its old value after all.
      aux: The lift's note.
    """

    jaxpr: Any = None
    out_tree: Any = None
    out_leaves: list[Static | None] = dataclasses.field(default_factory=list)
    writes: list[StateWrite] = dataclasses.field(default_factory=list)
    num_kept: int = 0
    are_kept: list[bool] = dataclasses.field(default_factory=list)
    aux: Any = None


class Program:
    """A compiled step for one function, argument structure and set of static values.

    Args:
      strategy: The strategy whose replicas run it.
      fn: The step.
      leaves: How each flattened argument enters.
      statics: The value of each static leaf, by its position.
      lift: Rebuilds the arguments from their leaves, and tells what state was written.
      on_trace: Called at each trace, after it was recorded.
      treedef: The structure of ``(args, kwargs)``, if they hold no objects.
    """

    def __init__(
        self,
        strategy: Strategy,
        fn: Callable[..., Any],
        leaves: Sequence[Leaf],
        statics: dict[int, Any],
        lift: Lift,
        on_trace: Callable[[], None],
        treedef: Any = None,
    ):
        self._strategy = strategy
        self._placer: Placer = strategy.placer
        self._fn = fn
        self._statics = statics
        self._num_leaves = len(leaves)
        self._lift = lift
        self._on_trace = on_trace
        self._positions = [i for i, x in enumerate(leaves) if x.kind is not Kind.STATIC]
        self._arrays = [leaves[i] for i in self._positions]
        shardings = {
            Kind.PER_REPLICA: self._placer.per_replica,
            Kind.MIRRORED: self._placer.replicated,
        }
        self._shardings = [shardings.get(x.kind) for x in self._arrays]
        # JAX's outputs carry an equal sharding that is another object; remembering the
        # last one seen makes the check of a repeated call an `is`.
        self._last_shardings = {
            i: s for i, s in enumerate(self._shardings) if s is not None
        }
        self._donated = [
            i for i, x in enumerate(self._arrays) if x.donated and self._shardings[i]
        ]
        self._kept = sorted(set(range(len(self._arrays))) - set(self._donated))
        self._fence = strategy.fence
        self._plain = True
        self.captures_tracers = False
        self.references: list[Any] = []

        arrays_only = len(self._last_shardings) == self._num_leaves
        self.is_repeatable = arrays_only and treedef is not None
        self._treedef = treedef
        # A program of arrays takes the caller's own arguments, so that a repeated call
        # can hand them to JAX as they are.
        self._takes_trees = self.is_repeatable and not self._donated
        self._num_signatures = 0
        self._may_share: list[int] = []

        def program(*args: Any, **kwargs: Any) -> Any:
            if not _expected.active:
                raise _NotRepeated
            return self._traced(*jax.tree.leaves((args, kwargs)))

        program.__name__ = program.__qualname__ = (
            f"run_{getattr(fn, '__name__', type(fn).__name__)}"
        )
        self._jitted = jax.jit(program)
        self._jitted_donating = (
            jax.jit(program, donate_argnums=self._donated)
            if self._donated
            else self._jitted
        )

    # -- launching -------------------------------------------------------------------

    def launch(self, leaves: list[Any]) -> tuple[Any, list[Any], Any]:
        """Runs the step on concrete arguments.

        Args:
          leaves: The flattened arguments. Those that had to be placed are replaced by
            what they became.

        Returns:
          The outputs, the new values of written state, and what the lift needs to
          write them back.
        """
        arrays = [leaves[i] for i in self._positions] if self._statics else leaves
        for i, sharding in self._last_shardings.items():
            if getattr(arrays[i], "sharding", None) is not sharding:
                arrays[i] = leaves[self._positions[i]] = self._place(i, arrays[i])
                self._last_shardings[i] = arrays[i].sharding
        if self._donated:
            self._refuse_consumed(arrays)
            self._may_share = sorted({*self._may_share, *self._alike(arrays)})
            self._make_private(arrays)
        with LAUNCHING:
            result = self._call(self._jitted_donating, arrays)
        self._num_signatures = _compat.num_signatures(self._jitted_donating)
        return _finish(*self._launched(result))

    def _launched(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._donated:
            self._placer.own(jax.tree.leaves(result))
        if self._fence is not None:
            self._fence.after_launch(result)
        return result

    def launch_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Runs the step on arguments of the kinds that it was launched with before.

        JAX looks at them anyway: whether it knows their structure, shapes and places.
        So they are not looked at here, unless JAX came to know another kind, or some
        are donated.

        Args:
          args: Positional arguments, as the caller gave them.
          kwargs: Keyword arguments, likewise.

        Returns:
          As :meth:`launch`; or ``()``, having done nothing, if they are of another
          structure, shape or type.
        """
        if self._donated:
            args = self._donatable(args, kwargs)
            if not args:
                return ()
            kwargs = {}
        try:
            with LAUNCHING:
                result = self._jitted_donating(*args, **kwargs)
        except _NotRepeated:
            return ()
        if self._donated:
            return self._finished(self._launched(result))
        if _compat.num_signatures(self._jitted) != self._num_signatures:
            self._num_signatures = _compat.num_signatures(self._jitted)
            # Placing is remembered on the long way only: JAX would do it every time.
            self.is_repeatable = all(
                self._placer.lies_as(x, sharding)
                for x, sharding in zip(
                    jax.tree.leaves((args, kwargs)), self._shardings, strict=True
                )
            )
        return self._finished(self._launched(result))

    def _finished(self, result: Any) -> tuple[Any, ...]:
        return result if self._plain else _finish(*result)

    def _donatable(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """The arrays of a call, if those to be donated are ours; else ``()``."""
        arrays, treedef = jax.tree_util.tree_flatten((args, kwargs))
        if treedef != self._treedef:
            return ()
        for i, sharding in self._last_shardings.items():
            if getattr(arrays[i], "sharding", None) is not sharding:
                return ()
        given = {id(x) for x in arrays}
        if len(given) < len(arrays):
            return ()
        runs = [self._placer.owns(arrays[i]) for i in self._donated]
        if not all(runs) or any(arrays[i].is_deleted() for i in self._donated):
            return ()
        for i in self._may_share:
            if not self._placer.is_apart(arrays[i], min(runs)):
                return ()
        return tuple(arrays)

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
        return _finish(*self._call(self._jitted, arrays))

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

    def _refuse_consumed(self, arrays: list[Any]) -> None:
        """Refuses arrays that are gone: some JAX versions crash on them."""
        gone = [
            leaf.name
            for x, leaf in zip(arrays, self._arrays, strict=True)
            if isinstance(x, jax.Array) and x.is_deleted()
        ]
        if gone:
            raise ConsumedArgumentError(
                f"Deleted arrays were passed as {listed(gone, ', ')}. An earlier run "
                "with RunOptions(donate=...) consumed them: use what that run returned."
            )

    def _make_private(self, arrays: list[Any]) -> None:
        """Sees to it that donating destroys nothing that the caller did not donate.

        Only what an earlier donating run returned is known to share its memory with
        nothing else, and is donated as it is.
        """
        seen = {id(arrays[i]) for i in self._kept}
        donated = [arrays[i] for i in self._donated]
        together = not all(
            self._placer.set_apart(arrays[i], donated) for i in self._may_share
        )
        for i in self._donated:
            x = arrays[i]
            if together or id(x) in seen or not self._placer.owns(x):
                arrays[i] = x.copy()
            seen.add(id(x))

    def _alike(self, arrays: list[Any]) -> list[int]:
        """The arrays that are kept and may lie in the memory of one that is donated.

        Two arrays can only if they are of one size, in whole (a mirrored array) or on
        each device.
        """
        sizes = {arrays[i].nbytes for i in self._donated}
        n = self._placer.num_replicas
        return [
            i
            for i in self._kept
            if self._shardings[i] is not None
            and not sizes.isdisjoint((arrays[i].nbytes, arrays[i].nbytes // n))
        ]

    def named_mirrored(self, leaves: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of each argument that must be mirrored."""
        for i, leaf in zip(self._positions, self._arrays, strict=True):
            if leaf.kind is Kind.MIRRORED:
                yield leaf.name, leaves[i]

    # -- tracing ---------------------------------------------------------------------

    def _traced(self, *arrays: Any) -> Any:
        with _compat.captured_arrays_as_constants():
            record = self._recorded(arrays)
            varies = self._prove(record)
            outputs, states = self._mapped(record, varies, arrays)
        self.captures_tracers |= any(
            isinstance(c, jax.core.Tracer) for c in record.jaxpr.consts
        )
        self._on_trace()
        out = _assemble(record, outputs, varies)
        has_statics = len(outputs) < len(record.out_leaves)
        self._plain = self._plain and not has_statics and record.aux is None
        return out, states, None if self._plain else Static((record.aux, has_statics))

    def _recorded(self, arrays: Sequence[Any]) -> _Record:
        """Traces the step, as one replica sees it."""
        record = _Record()

        def probe(*locals_: Any) -> tuple[()]:
            record.jaxpr = jax.make_jaxpr(self._replica_step(record))(*locals_)
            return ()

        jax.eval_shape(self._shard_map(probe, PartitionSpec()), *arrays)
        record.are_kept = _are_kept(record)
        record.writes = [dataclasses.replace(w, kept=None) for w in record.writes]
        return record

    def _mapped(
        self, record: _Record, varies: Sequence[bool], arrays: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Evaluates the recorded step on all replicas, laid out as was proved."""
        num_outputs = len(varies) - len(record.writes)
        evaluate = jax.extend.core.jaxpr_as_fun(record.jaxpr)

        def body(*locals_: Any) -> Any:
            results = evaluate(*locals_)[record.num_kept :]
            outputs = [
                jax.numpy.expand_dims(x, 0) if v else x
                for x, v in zip(results[:num_outputs], varies, strict=False)
            ]
            written = record.writes, record.are_kept, results[num_outputs:]
            states = self._lift.settle(
                record.jaxpr,
                record.writes,
                [
                    locals_[write.input] if kept and write.input is not None else new
                    for write, kept, new in zip(*written, strict=True)
                ],
                varies[num_outputs:],
                locals_,
                self._strategy,
            )
            return outputs, states

        rows, whole = PartitionSpec(self._strategy.axis_name), PartitionSpec()
        specs = [rows if v else whole for v in varies[:num_outputs]]
        return self._shard_map(body, (specs, whole))(*arrays)

    def _shard_map(self, fn: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        rows, whole = PartitionSpec(self._strategy.axis_name), PartitionSpec()
        return jax.shard_map(
            fn,
            mesh=self._strategy.mesh,
            in_specs=tuple(
                rows if x.kind is Kind.PER_REPLICA else whole for x in self._arrays
            ),
            out_specs=out_specs,
            check_vma=False,  # gradients stay the replica's own
        )

    def _replica_step(self, record: _Record) -> Callable[..., list[Any]]:
        """The step as a function of one replica's arrays, noting its structure."""

        def step(*locals_: Any) -> list[Any]:
            leaves: list[Any] = [None] * self._num_leaves
            for i, value in self._statics.items():
                leaves[i] = value
            for i, x, leaf in zip(self._positions, locals_, self._arrays, strict=True):
                leaves[i] = _own_row(x, leaf) if leaf.kind is Kind.PER_REPLICA else x
            args, kwargs, token = self._lift.rebuild(leaves, self._strategy)
            with in_replica(ReplicaContext(self._strategy)), _explained():
                out = self._fn(*args, **kwargs)
            _refuse_unfinished(out)
            out, writes, record.aux = self._lift.extract(token, out)
            leaves, record.out_tree = jax.tree.flatten(split_for_replica(out))
            record.out_leaves = [None if _is_value(x) else Static(x) for x in leaves]
            arrays = [x for x in leaves if _is_value(x)]
            kept = [w.kept for w in writes if w.kept is not None]
            record.num_kept = len(kept)
            record.writes = [
                dataclasses.replace(w, new=None, kept=w.kept is not None or None)
                for w in writes
            ]
            return kept + arrays + [w.new for w in writes]

        return step

    def _prove(self, record: _Record) -> tuple[bool, ...]:
        """Returns what varies, having refused what must not.

        Raises:
          DivergentCollectiveError: Some replicas would skip a collective.
          ReplicaDivergenceError: State that must be mirrored, or a value given to
            ``assert_mirrored``, would differ.
        """
        inputs = [x.kind is Kind.PER_REPLICA for x in self._arrays]
        axis_name = self._strategy.axis_name
        names = [x.name for x in self._arrays]
        proof = prove(record.jaxpr, inputs, axis_name, names)
        _raise_problems(proof.problems)
        first_write = len(proof.varies) - len(record.writes)
        varies, clauses = list(proof.varies), []
        for i, write in enumerate(record.writes):
            output = first_write + i
            varies[output] &= not record.are_kept[i]
            if varies[output] and write.must_be_mirrored:
                why = proof.why(output)
                clauses.append(f"{write.name} would differ between replicas: it {why}")
        if clauses:
            raise ReplicaDivergenceError(f"{listed(clauses)}\n{_REMEDY}")
        return tuple(varies[record.num_kept :])


def _are_kept(record: _Record) -> list[bool]:
    """For each write, whether it only passes on what stood for the state."""
    outputs = _compat.open_jaxpr(record.jaxpr).outvars
    stand_ins = iter(outputs[: record.num_kept])
    news = outputs[len(outputs) - len(record.writes) :]
    return [
        write.kept is not None and origin(record.jaxpr, new) is next(stand_ins)
        for write, new in zip(record.writes, news, strict=True)
    ]


def _refuse_unfinished(out: Any) -> None:
    if inspect.isgenerator(out) or inspect.iscoroutine(out):
        what = type(out).__name__
        if inspect.iscoroutine(out):
            out.close()
        raise TypeError(
            f"The step returned a {what}, whose body has not run. A step must be an "
            "ordinary function that returns its results."
        )


def _own_row(rows: Any, leaf: Leaf) -> Any:
    """A replica's component of a per-replica value, which has one row on each."""
    if rows.shape[0] != 1:
        raise PerReplicaError(
            f"Argument {leaf.name} has {rows.shape[0]} rows for each replica, where a "
            "PerReplica has one. Its array must have shape [num_replicas, ...]."
        )
    return rows[0]


def _is_value(x: Any) -> bool:
    return isinstance(
        x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    ) or hasattr(x, "__jax_array__")


def _assemble(record: _Record, outputs: list[Any], varies: Sequence[bool]) -> Any:
    """Puts the outputs back into the structure that the step returned."""
    values = iter(
        PerReplica.from_array(x) if v else x
        for x, v in zip(outputs, varies, strict=False)
    )
    return record.out_tree.unflatten(
        next(values) if static is None else static for static in record.out_leaves
    )


def _finish(
    outputs: Any, states: list[Any], notes: Static | None
) -> tuple[Any, list[Any], Any]:
    """Unwraps what the compiled program returned."""
    if notes is None:
        return outputs, states, None
    aux, has_statics = notes.value
    if has_statics:
        outputs = jax.tree.map(
            lambda x: x.value if isinstance(x, Static) else x,
            outputs,
            is_leaf=lambda x: isinstance(x, Static),
        )
    return outputs, states, aux


def _raise_problems(problems: Sequence[Problem]) -> None:
    if not problems:
        return
    hanging = [p.message for p in problems if p.kind == "divergent_collective"]
    if hanging:
        raise DivergentCollectiveError(listed(hanging))
    unequal = [p.message for p in problems if p.kind == "assert_mirrored"]
    if unequal:
        raise ReplicaDivergenceError(listed(unequal))
    raise ReplicaxError(listed([p.message for p in problems]))


@contextlib.contextmanager
def _explained() -> Iterator[None]:
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
