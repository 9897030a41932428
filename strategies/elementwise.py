"""The proof that an optimizer's update may run on slices of its arrays.

An update is *elementwise* when element ``k`` of what it makes for a parameter depends
on the elements ``k`` of that parameter's gradient, slots and value, and on values that
all elements share, such as a step count. Then replicas can each hold a slice of the
slots and update a slice of the parameters, and get the numbers of the whole update.

:func:`prove_elementwise` decides that from the update's jaxpr, traced with the whole
arrays. What it proves can be run: :meth:`ElementwiseProof.update` evaluates that same
jaxpr on slices. So a Python condition on ``x.ndim`` or ``x.size`` (a weight decay mask,
say) is decided by the whole array, as it is without slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from .slicing import FILLED, WHOLE, Kind, Mixed, Sliced, Value, Walk
from .slicing_rules import rule_for


@dataclasses.dataclass(frozen=True)
class ElementwiseProof:
    """What is known about an optimizer's update.

    Attributes:
      param_sliced: For each leaf of the parameters, whether it is held in slices.
      slot_owners: For each leaf of the optimizer's state, the index of the parameter
        that it is sliced like; ``None`` where every replica holds all of it.
      reasons: Why the update cannot run on slices: a sentence for each output that
        needs other elements than its own. Empty if it can.
    """

    param_sliced: tuple[bool, ...]
    slot_owners: tuple[int | None, ...]
    reasons: tuple[str, ...]
    _jaxpr: Any = dataclasses.field(repr=False, compare=False)
    _kinds: tuple[Kind, ...] = dataclasses.field(repr=False, compare=False)
    _wanted: tuple[Kind, ...] = dataclasses.field(repr=False, compare=False)
    _trees: tuple[Any, Any] = dataclasses.field(repr=False, compare=False)

    @property
    def holds(self) -> bool:
        """Whether the update can run on slices."""
        return not self.reasons

    def update(
        self, grads: Any, state: Any, params: Any, **extra: Any
    ) -> tuple[Any, Any]:
        """Runs the update on slices.

        Args:
          grads: Gradients, a slice `[k]` of each flattened leaf that is sliced. All
            slices of one parameter, its slots' included, are of one length.
          state: The optimizer's state, in slices where ``slot_owners`` says so.
          params: The parameters, in slices like the gradients.
          **extra: What else the update takes, whole.

        Returns:
          Updates and the next state, in slices like the arguments.

        Raises:
          ValueError: The update is not elementwise, or the arguments are not those of
            the proof.
        """
        if self.reasons:
            raise ValueError("\n".join(self.reasons))
        arrays, tree = jax.tree.flatten((grads, state, params, extra))
        if tree != self._trees[0]:
            raise ValueError(
                f"Expected the arguments that the proof was made with, {self._trees[0]}"
                f". Got {tree}."
            )
        values = [
            Value(kind, jnp.asarray(array))
            for kind, array in zip(self._kinds, arrays, strict=True)
        ]
        lengths = {
            value.kind.leaf: value.array.size
            for value in values
            if isinstance(value.kind, Sliced)
        }
        walk = Walk(rule_for, lengths)
        outputs = walk.run(self._jaxpr, values)
        return jax.tree.unflatten(
            self._trees[1],
            [
                jnp.asarray(walk.array_as(value, kind, shape))
                for value, kind, shape in zip(
                    outputs, self._wanted, walk.shapes(self._jaxpr.outvars), strict=True
                )
            ],
        )


def prove_elementwise(
    update: Callable[..., tuple[Any, Any]],
    grads: Any,
    state: Any,
    params: Any,
    *,
    sliced: Sequence[bool] | None = None,
    **extra: Any,
) -> ElementwiseProof:
    """Decides whether an optimizer's update can run on slices of its arrays.

    A slot belongs to the parameter whose path its own path ends with, if it has that
    parameter's shape. Other slots are held whole, and must stay free of anything that
    depends on a slice.

    Args:
      update: ``tx.update`` of an optax transformation.
      grads: Gradients, a tree like ``params``. Like all arguments, arrays or
        ``jax.ShapeDtypeStruct``s, in their whole shapes.
      state: What ``tx.init(params)`` returned.
      params: The parameters.
      sliced: For each leaf of ``params``, whether it is held in slices. The default
        slices all but scalars.
      **extra: What else ``update`` takes, the same on all replicas.

    Returns:
      The proof, with the reasons where the update is not elementwise.

    Raises:
      ValueError: The number of flags is not the number of leaves, or ``grads`` and
        ``params`` have different structures.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from replicax.strategies.elementwise import prove_elementwise
      >>> params = {"b": jnp.zeros(3), "w": jnp.zeros((2, 3))}
      >>> adam = optax.adam(0.1)
      >>> proof = prove_elementwise(adam.update, params, adam.init(params), params)
      >>> proof.holds, proof.slot_owners
      (True, (None, 0, 1, 0, 1))
      >>> clip = optax.clip_by_global_norm(1.0)
      >>> proof = prove_elementwise(clip.update, params, clip.init(params), params)
      >>> print(proof.reasons[0])
      The update of ['b'] depends on a sum over elements of ['b'] at optax/...
    """
    named, param_tree = tree_flatten_with_path(params)
    if jax.tree.structure(grads) != param_tree:
        raise ValueError(
            f"Expected gradients of the structure of the parameters, {param_tree}. Got "
            f"{jax.tree.structure(grads)}."
        )
    flags = [jnp.ndim(x) > 0 for _, x in named] if sliced is None else list(sliced)
    if len(flags) != len(named):
        raise ValueError(
            f"Expected one flag per parameter, {len(named)}. Got {len(flags)}."
        )
    slots, _ = tree_flatten_with_path(state)
    owners = [_owner(path, slot, named, flags) for path, slot in slots]
    leaf_kinds: list[Kind] = [
        Sliced(i) if flag else _whole(x)
        for i, ((_, x), flag) in enumerate(zip(named, flags, strict=True))
    ]
    slot_kinds: list[Kind] = [
        _whole(x) if owner is None else Sliced(owner)
        for (_, x), owner in zip(slots, owners, strict=True)
    ]
    rest = [_whole(x) for x in jax.tree.leaves(extra)]
    kinds = [*leaf_kinds, *slot_kinds, *leaf_kinds, *rest]

    jaxpr, made = jax.make_jaxpr(
        lambda g, s, p, e: update(g, s, p, **e), return_shape=True
    )(grads, state, params, extra)
    names = [keystr(path) or "the parameter" for path, _ in named]
    outputs = Walk(rule_for, names=names).run(jaxpr, [Value(kind) for kind in kinds])
    wanted = [*leaf_kinds, *slot_kinds]
    titles = [f"The update of {name}" for name in names]
    titles += [f"The slot {keystr(path)}" for path, _ in slots]
    if jax.tree.structure(made) != jax.tree.structure((params, state)):
        reasons = ["The update changes the structure of the optimizer's state."]
    else:
        reasons = [
            reason
            for title, value, want in zip(titles, outputs, wanted, strict=True)
            if (reason := _objection(title, value.kind, want))
        ]
    return ElementwiseProof(
        param_sliced=tuple(flags),
        slot_owners=tuple(owners),
        reasons=tuple(reasons),
        _jaxpr=jaxpr,
        _kinds=tuple(kinds),
        _wanted=tuple(wanted),
        _trees=(
            jax.tree.structure((grads, state, params, extra)),
            jax.tree.structure(made),
        ),
    )


def _whole(x: Any) -> Kind:
    return WHOLE if jnp.ndim(x) else FILLED


def _owner(path: Any, slot: Any, named: Any, flags: Sequence[bool]) -> int | None:
    """The parameter that a slot is sliced like: the one with the longest common end."""
    fitting = [
        (len(name), i)
        for i, (name, x) in enumerate(named)
        if path[len(path) - len(name) :] == name and jnp.shape(x) == jnp.shape(slot)
    ]
    if not fitting:
        return None
    _, i = max(fitting)
    return i if flags[i] else None


def _objection(title: str, kind: Kind, want: Kind) -> str:
    if isinstance(kind, Mixed):
        return f"{title} {kind.why}."
    if kind in (want, FILLED):
        return ""
    if isinstance(kind, Sliced) and isinstance(want, Sliced):
        return f"{title} depends on another parameter."
    if isinstance(want, Sliced):
        return f"{title} is an array that does not follow from its gradient's slices."
    return f"{title} has a shape of its own, and depends on elements of a parameter."
