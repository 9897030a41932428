"""Flax nnx objects among the arguments of a step: modules, optimizers, rngs, metrics.

Objects are rebuilt around traced arrays for the step, and what it changed is written
back to the caller's. Most objects are trees, and go the quick way here: flatten, call,
write the changed Variables. Those that share Variables, hold bare arrays, are no
pytrees, are returned by the step or change structure in it go the way of
:mod:`.nnx_graph`. What happens to each Variable is said in :mod:`.nnx_variables`.
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
from .nnx_graph import GraphCall
from .nnx_variables import NnxLift, Slot, fold_keys, is_object, is_variable
from .options import RunOptions
from .state import StateWrite

if TYPE_CHECKING:
    from .run import Runner
    from .strategy import Strategy


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
            is_leaf=_ends_leaf,
        )
        found = jax.tree.leaves((args, kwargs), is_leaf=_ends_leaf)
        described = [
            _variable_leaf(leaf, x) if is_variable(x) else leaf
            for leaf, x in zip(described, found, strict=True)
        ]
        self._slots = _slots((args, kwargs), found, described)
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
        with held_back():
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


def _ends_leaf(x: Any) -> bool:
    return is_per_replica(x) or is_variable(x)


def _slots(
    tree: Any, leaves: Sequence[Any], described: Sequence[Leaf]
) -> tuple[Slot, ...]:
    """The Variables among the leaves of ``tree``, in order."""
    owners = nnx_metrics.owners(tree)
    slots, num_arrays = [], 0
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
class TreeLift(NnxLift):
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
