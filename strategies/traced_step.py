"""One step, traced once, and proved.

The step is traced inside a ``shard_map`` over the strategy's mesh, where every value
is one replica's. The recorded jaxpr is then examined for what differs between replicas
(:mod:`.replication`), and what really runs evaluates it in a second ``shard_map`` whose
output layout follows from that proof.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
import numpy as np
from jax.sharding import PartitionSpec

from replicax import _compat
from replicax.errors import PerReplicaError
from replicax.values import PerReplica

from .arguments import Kind, Leaf
from .context import in_replica
from .dataflow import origin
from .merge import split_for_replica
from .replica_context import ReplicaContext
from .replication import prove
from .state import StateWrite
from .trace_errors import (
    explained,
    refuse_divergence,
    refuse_problems,
    refuse_unfinished,
)
from .variables import frames
from .variables.captured import Bound

if TYPE_CHECKING:
    from .state import Lift
    from .strategy import Strategy
    from .variables.variable import Variable


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A value that a compiled program returns without computing it."""

    value: Any


class WithState(NamedTuple):
    """What a compiled step returns that has more to say than its outputs.

    Attributes:
      outputs: What the step returned, other values than arrays as :class:`Static`.
      states: The new values of written state.
      notes: The lift's note, and whether there are such other values.
    """

    outputs: Any
    states: list[Any]
    notes: Static


@dataclasses.dataclass
class _Record:
    """What the tracing of a step leaves behind: no traced value outlives its trace.

    Attributes:
      jaxpr: The step, as a function of one replica's arrays.
      out_tree: The structure of what it returned.
      out_leaves: The leaves that are no arrays, and None for each that is one.
      writes: The state that it wrote, that of variables last.
      offered: The variables that it could use: its last inputs.
      used: The variables that it used.
      written: The variables that it wrote.
      num_kept: How many outputs of the jaxpr, the first ones, only say what stood for
        state in the step.
      are_kept: For each write, whether the state keeps its old value after all.
      aux: The lift's note.
    """

    jaxpr: Any = None
    out_tree: Any = None
    out_leaves: list[Static | None] = dataclasses.field(default_factory=list)
    writes: list[StateWrite] = dataclasses.field(default_factory=list)
    offered: list[Variable] = dataclasses.field(default_factory=list)
    used: list[Variable] = dataclasses.field(default_factory=list)
    written: list[Variable] = dataclasses.field(default_factory=list)
    num_kept: int = 0
    are_kept: list[bool] = dataclasses.field(default_factory=list)
    aux: Any = None


class TracedStep:
    """A step as a function of the arrays of all replicas, to be compiled.

    Args:
      strategy: The strategy whose replicas run it.
      fn: The step.
      leaves: How each flattened argument enters.
      statics: The value of each static leaf, by its position.
      lift: Rebuilds the arguments from their leaves, and tells what state was written.
      on_trace: Called at each trace, after it was recorded.

    Attributes:
      name: What the step is called.
      positions: Which of the flattened arguments are arrays.
      arrays: How each of those enters.
      captures_tracers: Whether it was found to capture values of a trace around it.
    """

    def __init__(
        self,
        strategy: Strategy,
        fn: Callable[..., Any],
        leaves: Sequence[Leaf],
        statics: dict[int, Any],
        lift: Lift,
        on_trace: Callable[[], None],
    ):
        self._strategy = strategy
        self._fn = fn
        self._statics = statics
        self._num_leaves = len(leaves)
        self._lift = lift
        self._on_trace = on_trace
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self.positions = [i for i, x in enumerate(leaves) if x.kind is not Kind.STATIC]
        self.arrays = [leaves[i] for i in self.positions]
        self.captures_tracers = False
        self._in_refs: dict[Variable, None] = {}
        self._pending: dict[Any, _Record] = {}

    def __call__(
        self, arrays: Sequence[Any], bound: Bound
    ) -> tuple[Any, dict[Variable, Any]]:
        """Traces the step for arrays of these shapes, and evaluates it on them.

        Args:
          arrays: Per-replica values stacked, all others whole.
          bound: The arrays of the variables that the program takes.

        Returns:
          The outputs, or a :class:`WithState`, if there is more to say; and the new
          arrays of the variables that the step wrote.

        Raises:
          DivergentCollectiveError: Some replicas would skip a collective.
          ReplicaDivergenceError: State that must be mirrored, or a value given to
            ``assert_mirrored``, would differ.
          MoreVariables: The step uses others than are bound. When it is called again
            for arrays of these shapes, it is not traced anew.
        """
        signature = tuple(map(jax.typeof, arrays))
        with _compat.captured_arrays_as_constants():
            record = self._pending.pop(signature, None) or self._recorded(arrays)
            self._pending[signature] = record  # in case of too few variables
            bound.captured.check_complete(record.used, record.written)
            del self._pending[signature]
            varies = self._prove(record)
            outputs, states, news = self._mapped(record, varies, arrays, bound)
        self.captures_tracers |= any(
            isinstance(c, jax.core.Tracer) for c in record.jaxpr.consts
        )
        self._on_trace()
        out = _assemble(record, outputs, varies)
        has_statics = len(outputs) < len(record.out_leaves)
        if states or has_statics or record.aux is not None:
            out = WithState(out, states, Static((record.aux, has_statics)))
        return out, dict(zip(record.written, news, strict=True))

    def _recorded(self, arrays: Sequence[Any]) -> _Record:
        """Traces the step, as one replica sees it."""
        record = frames.trace_until_settled(
            lambda: self._traced(arrays), self._in_refs, self.name
        )
        record.are_kept = _are_kept(record)
        record.writes = [dataclasses.replace(w, kept=None) for w in record.writes]
        return record

    def _traced(self, arrays: Sequence[Any]) -> tuple[_Record, frames.Frame, bool]:
        record = _Record(offered=frames.live_variables(self._strategy))
        entered: list[frames.Frame] = []

        def probe(*locals_: Any) -> tuple[()]:
            num = len(arrays)
            own = locals_[:num], _own_values(record.offered, locals_[num:])
            step = self._replica_step(record, entered)
            record.jaxpr = jax.make_jaxpr(step)(*own[0], *own[1])
            return ()

        specs = self._specs(record.offered)
        variables = [
            jax.ShapeDtypeStruct(v.array.shape, v.dtype) for v in record.offered
        ]
        jax.eval_shape(
            self._shard_map(probe, specs, PartitionSpec()), *arrays, *variables
        )
        return record, entered[0], False

    def _mapped(
        self,
        record: _Record,
        varies: Sequence[bool],
        arrays: Sequence[Any],
        bound: Bound,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Evaluates the recorded step on all replicas, laid out as was proved."""
        num_outputs = len(varies) - len(record.writes)
        num_states = len(record.writes) - len(record.written)

        def body(*locals_: Any) -> Any:
            own = _own_values(record.used, locals_[len(arrays) :])
            values = dict(zip(record.used, own, strict=True))
            locals_ = locals_[: len(arrays)]
            # What the step does not use may be anything.
            inputs = [*locals_, *(values.get(v, 0.0) for v in record.offered)]
            results = _compat.evaluate(record.jaxpr, inputs)[record.num_kept :]
            outputs = [
                jax.numpy.expand_dims(x, 0) if v else x
                for x, v in zip(results[:num_outputs], varies, strict=False)
            ]
            results = results[num_outputs:]
            written = record.writes, record.are_kept, results
            states = self._lift.settle(
                record.jaxpr,
                record.writes[:num_states],
                [
                    locals_[write.input] if kept and write.input is not None else new
                    for write, kept, new in itertools.islice(
                        zip(*written, strict=True), num_states
                    )
                ],
                varies[num_outputs : num_outputs + num_states],
                locals_,
                self._strategy,
            )
            news = [
                jax.numpy.expand_dims(x, 0) if v.layout.is_stacked else x
                for v, x in zip(record.written, results[num_states:], strict=True)
            ]
            return outputs, states, news

        rows, whole = PartitionSpec(self._strategy.axis_name), PartitionSpec()
        specs = [rows if v else whole for v in varies[:num_outputs]]
        news = [rows if v.layout.is_stacked else whole for v in record.written]
        mapped = self._shard_map(body, self._specs(record.used), (specs, whole, news))
        return mapped(*arrays, *(bound[v] for v in record.used))

    def _specs(self, variables: Sequence[Variable]) -> tuple[PartitionSpec, ...]:
        rows, whole = PartitionSpec(self._strategy.axis_name), PartitionSpec()
        kinds = [x.kind is Kind.PER_REPLICA for x in self.arrays]
        kinds += [v.layout.is_stacked for v in variables]
        return tuple(rows if stacked else whole for stacked in kinds)

    def _shard_map(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        return jax.shard_map(
            fn,
            mesh=self._strategy.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # gradients stay the replica's own
        )

    def _replica_step(
        self, record: _Record, entered: list[frames.Frame]
    ) -> Callable[..., list[Any]]:
        """The step as a function of one replica's arrays, noting its structure."""

        def step(*locals_: Any) -> list[Any]:
            leaves: list[Any] = [None] * self._num_leaves
            for i, value in self._statics.items():
                leaves[i] = value
            for i, x, leaf in zip(self.positions, locals_, self.arrays, strict=False):
                leaves[i] = _own_row(x, leaf) if leaf.kind is Kind.PER_REPLICA else x
            values = dict(zip(record.offered, locals_[len(self.arrays) :], strict=True))
            frame = frames.Frame(values, self._in_refs, self._strategy)
            entered.append(frame)
            args, kwargs, token = self._lift.rebuild(leaves, self._strategy)
            context = in_replica(ReplicaContext(self._strategy))
            with context, frames.entered(frame), explained():
                out = self._fn(*args, **kwargs)
            refuse_unfinished(out)
            out, writes, record.aux = self._lift.extract(token, out)
            leaves, record.out_tree = jax.tree.flatten(split_for_replica(out))
            record.out_leaves = [None if is_value(x) else Static(x) for x in leaves]
            arrays = [x for x in leaves if is_value(x)]
            kept = [w.kept for w in writes if w.kept is not None]
            record.num_kept = len(kept)
            news = [*(w.new for w in writes), *frame.finish()]
            record.used, record.written = [*frame.used], [*frame.written]
            record.writes = [
                *(
                    dataclasses.replace(w, new=None, kept=w.kept is not None or None)
                    for w in writes
                ),
                *(
                    StateWrite(repr(v), new=None, must_be_mirrored=not v.layout.varies)
                    for v in record.written
                ),
            ]
            return kept + arrays + news

        return step

    def _prove(self, record: _Record) -> tuple[bool, ...]:
        """Returns what varies, having refused what must not."""
        inputs = [x.kind is Kind.PER_REPLICA for x in self.arrays]
        inputs += [v.layout.varies for v in record.offered]
        axis_name = self._strategy.axis_name
        names = [x.name for x in self.arrays] + [repr(v) for v in record.offered]
        proof = prove(record.jaxpr, inputs, axis_name, names)
        refuse_problems(proof.problems)
        first_write = len(proof.varies) - len(record.writes)
        varies, clauses = list(proof.varies), []
        for i, write in enumerate(record.writes):
            output = first_write + i
            varies[output] &= not record.are_kept[i]
            if varies[output] and write.must_be_mirrored:
                why = proof.why(output)
                clauses.append(f"{write.name} would differ between replicas: it {why}")
        refuse_divergence(clauses)
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


def _own_row(rows: Any, leaf: Leaf) -> Any:
    """A replica's component of a per-replica value, which has one row on each."""
    if rows.shape[0] != 1:
        raise PerReplicaError(
            f"Argument {leaf.name} has {rows.shape[0]} rows for each replica, where a "
            "PerReplica has one. Its array must have shape [num_replicas, ...]."
        )
    return rows[0]


def _own_values(variables: Sequence[Variable], locals_: Sequence[Any]) -> list[Any]:
    """A replica's values of variables, of which some have a row on each."""
    return [
        x[0] if v.layout.is_stacked else x
        for v, x in zip(variables, locals_, strict=True)
    ]


def is_value(x: Any) -> bool:
    """Whether a leaf that a step returned is an array or number."""
    if frames.is_variable(x):
        return False  # handed back as it is
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


def finish(result: Any) -> tuple[Any, list[Any], Any]:
    """Unwraps what the compiled step returned.

    Returns:
      The outputs, the new values of written state, and the lift's note.
    """
    if type(result) is not WithState:
        return result, [], None
    outputs, states, notes = result
    aux, has_statics = notes.value
    if has_statics:
        outputs = without_statics(outputs)
    return outputs, states, aux


def without_statics(outputs: Any) -> Any:
    """Unwraps what was returned without being computed."""
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Static) else x,
        outputs,
        is_leaf=lambda x: isinstance(x, Static),
    )
