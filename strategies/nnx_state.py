"""Flax nnx objects among the arguments of a step: modules, optimizers, rngs, metrics.

Objects are rebuilt around traced arrays for the step, and what it changed is written
back to the caller's. Most objects are trees, and go the quick way (:class:`TreeLift`):
flatten, call, write the changed Variables. Objects that share Variables, hold bare
arrays, are no pytrees, are returned by the step or change structure in it go through
nnx's own graph machinery (:class:`GraphCall`).

What happens to state that differs between replicas follows from its kind:

* ``RngState``: keys are folded with the replica's id for the call, so that dropout
  differs per replica; the keys that are written back do not.
* ``BatchStat``: averaged over replicas.
* the states of one ``Metric``: combined together (:mod:`.nnx_metrics`).
* all else (``Param``, optimizer state, ...): must be proved mirrored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import collectives, nnx_metrics
from .arguments import Kind, Leaf, describe_leaves
from .call import Call, ProgramCall
from .merge import is_per_replica, replica_structure
from .options import RunOptions
from .state import StateWrite
from .tables import drop_oldest

if TYPE_CHECKING:
    from .run import Runner
    from .strategy import Strategy

_GRAPH = "replicax"  # the tag under which nnx keeps track of objects during a call


def is_variable(x: Any) -> bool:
    """Whether ``x`` is an nnx Variable; for ``is_leaf``."""
    return isinstance(x, nnx.Variable)


def is_object(x: Any) -> bool:
    """Whether ``x`` is an nnx object; for ``is_leaf``."""
    return isinstance(x, (nnx.Variable, nnx.Pytree, nnx.Module))


def plan(
    runner: Runner,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RunOptions,
) -> Call | None:
    """Returns the call for arguments that hold nnx objects, or None if none do."""
    objects = [
        x for x in jax.tree.leaves((args, kwargs), is_leaf=is_object) if is_object(x)
    ]
    if not objects:
        return None
    if not _are_plain_trees(objects):
        return GraphCall(runner, fn)
    return TreeCall(runner, fn, args, kwargs, options)


def _are_plain_trees(objects: list[Any]) -> bool:
    """Whether flattening ``objects`` finds each Variable once, and nothing else."""
    leaves = jax.tree.leaves(objects, is_leaf=is_variable)
    return (
        all(map(is_variable, leaves))
        and len({id(v) for v in leaves}) == len(leaves)
        and all(isinstance(v.get_raw_value(), jax.Array) for v in leaves)
    )


# -- the kinds of state --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slot:
    """One Variable among the leaves of a call.

    Attributes:
      leaf: Its position among all flattened arguments.
      input: Its position among those that are arrays; None for a new one.
      name: What to call it.
      kind: Its Variable type.
      metric: The path and type of the Metric that owns it, or None.
      donated: Whether the step may consume it.
    """

    leaf: int
    input: int | None
    name: str
    kind: type
    metric: tuple[str, type] | None
    donated: bool

    def write(self, new: Any, in_step: Any = None) -> StateWrite:
        """The record of writing ``new`` to it, where ``in_step`` stood for it."""
        averaged = issubclass(self.kind, nnx.BatchStat)
        return StateWrite(
            name=self.name,
            new=new,
            input=self.input,
            must_be_mirrored=self.metric is None and not averaged,
            average=averaged,
            group=self.metric,
            kept=in_step if issubclass(self.kind, nnx.RngKey) else None,
        )


def fold_keys(leaves: list[Any], slots: Sequence[Slot], strategy: Strategy) -> None:
    """Gives each replica rng keys of its own, in place, for the length of a call."""
    for slot in slots:
        if issubclass(slot.kind, nnx.RngKey):
            replica_id = jax.lax.axis_index(strategy.axis_name)
            leaves[slot.leaf] = _fold_in(leaves[slot.leaf], replica_id)


def _fold_in(keys: jax.Array, data: jax.Array) -> jax.Array:
    fold = jax.random.fold_in
    for _ in range(keys.ndim if _is_typed_key(keys) else keys.ndim - 1):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, data)


def _is_typed_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@dataclasses.dataclass(frozen=True)
class _Lift:
    """What both ways share.

    Attributes:
      slots: The Variables among the arguments.
    """

    slots: tuple[Slot, ...]

    def settle(
        self,
        jaxpr: Any,
        writes: Sequence[StateWrite],
        values: Sequence[Any],
        varies: Sequence[bool],
        inputs: Sequence[Any],
        strategy: Strategy,
    ) -> list[Any]:
        """Combines over replicas the written values that may vary."""
        settled = list(values)
        averaged = [i for i, w in enumerate(writes) if w.average and varies[i]]
        means = collectives.all_reduce(
            "mean",
            [settled[i] for i in averaged],
            strategy.axis_name,
            strategy.num_replicas_in_sync,
        )
        for i, mean in zip(averaged, means, strict=True):
            settled[i] = mean.astype(settled[i].dtype)
        states = [
            slot.input
            for slot in self.slots
            if slot.input is not None and issubclass(slot.kind, nnx.metrics.MetricState)
        ]
        nnx_metrics.settle(
            jaxpr, writes, settled, varies, inputs, states, strategy.axis_name
        )
        return settled


# -- objects that are trees ----------------------------------------------------------


class TreeCall(Call):
    """A call whose objects are plain trees of Variables.

    Args:
      runner: The programs' owner.
      fn: The step.
      args: Positional arguments of the first such call.
      kwargs: Keyword arguments of the first such call.
      options: Its options.
    """

    def __init__(
        self,
        runner: Runner,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions,
    ):
        self._runner = runner
        self._fn = fn
        described = describe_leaves(
            fn,
            args,
            kwargs,
            options.donate,
            is_leaf=lambda x: is_per_replica(x) or is_variable(x),
        )
        found = jax.tree.leaves(
            (args, kwargs), is_leaf=lambda x: is_per_replica(x) or is_variable(x)
        )
        described = [
            _variable_leaf(leaf, x) if is_variable(x) else leaf
            for leaf, x in zip(described, found, strict=True)
        ]
        self._slots = _slots((args, kwargs), described)
        lift = TreeLift(self._slots, replica_structure((args, kwargs)))
        self._call = ProgramCall(runner, fn, described, lift)
        self._call.forget = lambda: self.forget()
        self._graph_call = GraphCall(runner, fn)
        self._changes_structure = False

    def __call__(
        self, leaves: list[Any], args: Any, kwargs: Any, options: RunOptions
    ) -> Any:
        """Runs the step and writes the Variables that it changed."""
        if not self._changes_structure:
            variables = _live_variables((args, kwargs))
            if len({id(v) for v in variables}) == len(variables):
                try:
                    return self._launch(leaves, variables, options)
                except _StructureChanged:
                    self._changes_structure = True
        return self._graph_call(leaves, args, kwargs, options)

    def _launch(
        self, leaves: list[Any], variables: list[Any], options: RunOptions
    ) -> Any:
        out, values, written = self._call.launch(leaves, options)
        for variable, slot in zip(variables, self._slots, strict=True):
            if leaves[slot.leaf] is not variable.get_raw_value():
                variable.set_raw_value(leaves[slot.leaf])  # placed on the devices
        for i, value in zip(written, values, strict=True):
            variables[i].set_raw_value(value)
        return out


def _variable_leaf(leaf: Leaf, variable: Any) -> Leaf:
    # A key enters folded and is not written: donating it would leave nothing behind.
    donated = leaf.donated and not isinstance(variable, nnx.RngKey)
    return dataclasses.replace(leaf, kind=Kind.MIRRORED, donated=donated)


def _live_variables(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(x)]


def _slots(tree: Any, described: Sequence[Leaf]) -> tuple[Slot, ...]:
    """The Variables among the leaves of ``tree``, in order."""
    owners = nnx_metrics.owners(tree)
    slots, num_arrays = [], 0
    leaves = jax.tree.leaves(
        tree, is_leaf=lambda x: is_per_replica(x) or is_variable(x)
    )
    for i, (x, leaf) in enumerate(zip(leaves, described, strict=True)):
        if is_variable(x):
            slots.append(
                Slot(i, num_arrays, leaf.name, type(x), owners.get(id(x)), leaf.donated)
            )
        num_arrays += leaf.kind is not Kind.STATIC
    return tuple(slots)


class _StructureChanged(Exception):
    """The step changed the structure of an object, or returns one."""


@dataclasses.dataclass(frozen=True)
class TreeLift(_Lift):
    """Rebuilds objects as pytrees and finds the Variables that a step wrote.

    Attributes:
      treedef: The structure of ``(args, kwargs)`` that one replica sees.
    """

    treedef: Any

    def rebuild(self, leaves: list[Any], strategy: Strategy) -> Any:
        """Unflattens the arguments, rng keys folded with the replica's id."""
        leaves = list(leaves)
        fold_keys(leaves, self.slots, strategy)
        args, kwargs = self.treedef.unflatten(leaves)
        objects = [
            x
            for x in jax.tree.leaves((args, kwargs), is_leaf=is_object)
            if is_object(x)
        ]
        before = [leaves[slot.leaf] for slot in self.slots]
        return args, kwargs, (objects, before, jax.tree.structure(objects))

    def extract(self, token: Any, out: Any) -> tuple[Any, list[StateWrite], Any]:
        """Compares the Variables with what they held before the step."""
        objects, before, structure = token
        returned = any(
            isinstance(x, (nnx.Pytree, nnx.Module))
            for x in jax.tree.leaves(out, is_leaf=is_object)
        )
        after, structure_after = jax.tree.flatten(objects)
        if returned or structure_after != structure:
            raise _StructureChanged
        changed = [
            i
            for i, slot in enumerate(self.slots)
            if after[i] is not before[i] or slot.donated
        ]
        writes = [self.slots[i].write(after[i], before[i]) for i in changed]
        return out, writes, tuple(changed)


# -- objects that are graphs ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Here:
    """Marks where an object stood in arguments or outputs."""

    index: int


def _take_out(tree: Any, is_taken: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Returns ``tree`` with marks in place of objects, and the objects."""
    objects: list[Any] = []

    def take(x: Any) -> Any:
        if not is_taken(x):
            return x
        objects.append(x)
        return _Here(len(objects) - 1)

    return jax.tree.map(take, tree, is_leaf=is_taken), objects


def _put_back(tree: Any, objects: Sequence[Any]) -> Any:
    return jax.tree.map(lambda x: objects[x.index] if isinstance(x, _Here) else x, tree)


class GraphCall(Call):
    """A call whose objects go through nnx's split and merge.

    Slower by about a millisecond a call, and right for every object: shared Variables,
    bare arrays, objects that the step returns, and structure that it changes.

    Args:
      runner: The programs' owner.
      fn: The step.
    """

    def __init__(self, runner: Runner, fn: Callable[..., Any]):
        self._runner = runner
        self._fn = fn
        self._calls: dict[Any, ProgramCall] = {}

    def __call__(
        self, leaves: list[Any], args: Any, kwargs: Any, options: RunOptions
    ) -> Any:
        """Runs the step and merges what it changed into the caller's objects."""
        donate = options.donate
        with nnx.update_context(_GRAPH):
            pure, objects = _take_out((args, kwargs), is_object)
            with nnx.split_context(_GRAPH) as context:
                graphdef, state = context.split(objects)
            leaves, treedef = jax.tree.flatten((pure, state))
            key = (graphdef, treedef, tuple(map(type, leaves)), donate)
            call = self._calls.get(key)
            if call is None:
                call = self._calls[key] = self._plan(
                    args, kwargs, pure, graphdef, state, donate
                )
                call.forget = lambda: self._calls.pop(key, None)
                drop_oldest(self._calls)
            out, values, (graphdef, statedef) = call.launch(leaves, options)
            with nnx.merge_context(_GRAPH, inner=False) as context:
                _, returned = context.merge(graphdef, statedef.unflatten(values))
        return _put_back(out, returned)

    def _plan(
        self,
        args: Any,
        kwargs: Any,
        pure: Any,
        graphdef: Any,
        state: Any,
        donate: Any,
    ) -> ProgramCall:
        def ends_name(x: Any) -> bool:
            return is_per_replica(x) or is_object(x)

        found = describe_leaves(self._fn, args, kwargs, donate, is_leaf=ends_name)
        is_taken = [
            is_object(x) for x in jax.tree.leaves((args, kwargs), is_leaf=ends_name)
        ]
        described = [
            dataclasses.replace(leaf, kind=Kind.STATIC, donated=False)
            if taken
            else leaf
            for leaf, taken in zip(found, is_taken, strict=True)
        ]
        roots = [leaf for leaf, taken in zip(found, is_taken, strict=True) if taken]
        slots = []
        num_arrays = sum(x.kind is not Kind.STATIC for x in described)
        for path, variable in _variables_of(state):
            root = roots[path[0]]
            donated = root.donated and not isinstance(variable, nnx.RngKey)
            for _ in jax.tree.leaves(variable):
                leaf = Leaf(root.name + _dotted(path[1:]), Kind.MIRRORED, donated)
                slots.append(
                    Slot(
                        leaf=len(described),
                        input=num_arrays,
                        name=leaf.name,
                        kind=type(variable),
                        metric=None,
                        donated=donated,
                    )
                )
                described.append(leaf)
                num_arrays += 1
        lift = GraphLift(
            slots=tuple(slots),
            treedef=replica_structure((pure, state)),
            graphdef=graphdef,
            roots=tuple(r.name for r in roots),
        )
        return ProgramCall(self._runner, self._fn, described, lift)


def _variables_of(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The Variables (or bare arrays) of a State with their paths, in order."""
    return [
        (tuple(getattr(k, "key", getattr(k, "idx", None)) for k in path), variable)
        for path, variable in jax.tree_util.tree_leaves_with_path(
            state, is_leaf=is_variable
        )
    ]


def _dotted(path: Sequence[Any]) -> str:
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path)


@dataclasses.dataclass(frozen=True)
class GraphLift(_Lift):
    """Rebuilds objects with nnx's merge and takes them apart with its split.

    Attributes:
      treedef: The structure of the marked arguments and the state, as replicas see it.
      graphdef: The objects' static part.
      roots: The objects' names.
    """

    treedef: Any
    graphdef: Any
    roots: tuple[str, ...]

    def rebuild(self, leaves: list[Any], strategy: Strategy) -> Any:
        """Merges the objects, rng keys folded with the replica's id."""
        fold_keys(leaves, self.slots, strategy)
        pure, state = self.treedef.unflatten(leaves)
        with nnx.merge_context(_GRAPH, inner=True) as context:
            objects = context.merge(self.graphdef, state)
        args, kwargs = _put_back(pure, objects)
        return args, kwargs, (objects, leaves)

    def extract(self, token: Any, out: Any) -> tuple[Any, list[StateWrite], Any]:
        """Splits the objects, those that the step returns included."""
        objects, leaves = token
        out, returned = _take_out(
            out, lambda x: isinstance(x, (nnx.Pytree, nnx.Module))
        )
        metrics = nnx_metrics.paths_of((objects, returned))
        with nnx.split_context(_GRAPH) as context:
            graphdef, state = context.split((objects, returned))
        inputs = {slot.name: slot for slot in self.slots}
        writes = []
        for path, variable in _variables_of(state):
            root = self.roots[path[1]] if path[0] == 0 else f"output object {path[1]}"
            name = root + _dotted(path[2:])
            known = inputs.get(name)
            slot = Slot(
                leaf=-1,
                input=None if known is None else known.input,
                name=name,
                kind=type(variable),
                metric=metrics.get(path[:-1]),
                donated=False,
            )
            for leaf in jax.tree.leaves(variable):
                in_step = None if known is None else leaves[known.leaf]
                writes.append(slot.write(leaf, in_step))
        return out, writes, (graphdef, jax.tree.structure(state))
