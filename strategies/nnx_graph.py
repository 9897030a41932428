"""Flax nnx objects that go through nnx's own split and merge.

Slower than :mod:`.nnx_state` by about a millisecond a call, and right for every
object: shared Variables, bare arrays, objects that the step returns, and structure that
it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from . import nnx_metrics
from .arguments import Kind, Leaf, describe_leaves
from .call import Call, ProgramCall
from .interrupts import held_back
from .merge import is_per_replica, replica_structure
from .nnx_variables import NnxLift, Slot, fold_keys, is_object, is_variable
from .options import RunOptions
from .state import StateWrite
from .tables import drop_oldest

if TYPE_CHECKING:
    from .run import Runner
    from .strategy import Strategy

_GRAPH = "replicax"  # the tag under which nnx keeps track of objects during a call


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
            with held_back(), nnx.merge_context(_GRAPH, inner=False) as context:
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
class GraphLift(NnxLift):
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
