"""How an optimizer updates variables: whole on every replica, or a slice on each.

Both ways are functions of what a replica holds, so that an update can stand in a
``lax.cond``. Reading and writing the variables is the optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from . import collectives, state_sharding
from .assertion import assert_mirrored
from .elementwise import ElementwiseProof, prove_elementwise
from .replica_context import ReplicaContext
from .variables.layouts import ShardedLayout
from .variables.trees import variables as make_variables
from .variables.variable import Variable

if TYPE_CHECKING:
    import optax


class Held(NamedTuple):
    """What a replica holds of everything that an update changes.

    Attributes:
      variables: Of the trained variables.
      state: Of the transformation's state.
    """

    variables: Any
    state: Any


class Updated(NamedTuple):
    """What an update leads to.

    Attributes:
      held: What to hold from now on.
      norm: The global norm of the reduced gradients.
    """

    held: Held
    norm: jax.Array


class WholeUpdate:
    """Updates everything on each replica, the same on all.

    Args:
      tx: The transformation.
      variables: The trained variables.
      on_gradients: Changes the reduced gradients; or None.

    Attributes:
      state: The transformation's state, a structure of variables.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        variables: Any,
        on_gradients: Callable[[Any], Any] | None,
    ):
        self._tx = tx
        self._variables = variables
        self._on_gradients = on_gradients
        self.state = make_variables(tx.init(values(variables)), trainable=False)

    def __call__(
        self,
        context: ReplicaContext,
        grads: Any,
        reduce: str,
        held: Held,
        extra_args: dict[str, Any],
    ) -> Updated:
        """Reduces gradients over replicas, and updates what is held.

        Args:
          context: The replica's.
          grads: This replica's gradients.
          reduce: ``"mean"``, ``"sum"``, or ``"none"`` if they are reduced already.
          held: What the replica holds.
          extra_args: More arguments of the transformation.
        """
        grads, norm = _reduced_whole(context, grads, reduce, self._on_gradients)
        params = self._each(lambda v, own: v.layout.opened(own), held.variables)
        updates, state = self._tx.update(grads, held.state, params, **extra_args)
        news = _applied(params, updates)
        news = self._each(lambda v, new: v.layout.closed(new), news)
        return Updated(Held(news, state), norm)

    def _each(self, fn: Callable[[Variable, Any], Any], arrays: Any) -> Any:
        return jax.tree.map(fn, self._variables, arrays)


class SlicedUpdate:
    """Updates a slice of everything on each replica.

    The same numbers as :class:`WholeUpdate`, computed once instead of by all, of state
    that is there once. It is proved that the transformation makes each element of a
    variable from that element's gradient and state alone; others are refused.

    Args:
      tx: The transformation.
      variables: The trained variables, of several replicas.
      on_gradients: Changes the reduced gradients, which it gets whole; or None.

    Attributes:
      state: The transformation's state, a structure of variables, most in slices.

    Raises:
      ValueError: The transformation needs other elements than an element's own.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        variables: Any,
        on_gradients: Callable[[Any], Any] | None,
    ):
        self._tx = tx
        self._on_gradients = on_gradients
        self._leaves: list[Variable] = jax.tree.leaves(variables)
        num_replicas = self._leaves[0].strategy.num_replicas_in_sync
        self._slices = [
            state_sharding.shard_layout(v.shape, v.dtype, num_replicas)
            for v in self._leaves
        ]
        params = values(variables)
        state = tx.init(params)
        owners = iter(self._proof(params, state, {}).slot_owners)
        self.state = make_variables(
            state, trainable=False, is_sharded=lambda _: next(owners) is not None
        )

    def _proof(self, params: Any, state: Any, extra_args: Any) -> ElementwiseProof:
        proof = prove_elementwise(self._tx.update, params, state, params, **extra_args)
        if proof.holds:
            return proof
        raise ValueError(
            "With shard_state, each replica updates a slice of every variable. This "
            "transformation cannot be sliced:\n"
            + "\n".join(proof.reasons)
            + "\nWhat only changes gradients, such as clipping by their norm, can be "
            "given to the optimizer as on_gradients. Or leave out shard_state."
        )

    def __call__(
        self,
        context: ReplicaContext,
        grads: Any,
        reduce: str,
        held: Held,
        extra_args: dict[str, Any],
    ) -> Updated:
        """Reduces gradients over replicas, and updates what is held.

        Args:
          context: The replica's.
          grads: This replica's gradients, whole.
          reduce: ``"mean"``, ``"sum"``, or ``"none"`` if they are reduced already.
          held: What the replica holds.
          extra_args: More arguments of the transformation.
        """
        structure = jax.tree.structure(grads)
        state = jax.tree.map(_shape_of, self.state)
        whole = structure.unflatten(map(_shape_of, self._leaves))
        proof = self._proof(whole, state, extra_args)
        slices, norm = self._reduced(context, proof.param_sliced, grads, reduce)
        params = structure.unflatten(
            x
            if isinstance(v.layout, ShardedLayout) or not sliced
            else layout.own_slice(x, context.replica_id_in_sync_group)
            for x, v, layout, sliced in zip(
                jax.tree.leaves(held.variables),
                self._leaves,
                self._slices,
                proof.param_sliced,
                strict=True,
            )
        )
        updates, new_state = proof.update(
            structure.unflatten(slices), held.state, params, **extra_args
        )
        news = jax.tree.leaves(_applied(params, updates))
        news = self._gathered(context, proof.param_sliced, news)
        return Updated(Held(structure.unflatten(news), new_state), norm)

    def _reduced(
        self,
        context: ReplicaContext,
        is_sliced: Sequence[bool],
        grads: Any,
        reduce: str,
    ) -> tuple[list[Any], jax.Array]:
        """The reduced gradients and their norm: slices, and wholes of the others."""
        if self._on_gradients is not None or reduce == "none":
            return self._cut(context, is_sliced, grads, reduce)
        cut, rest = _split(is_sliced, jax.tree.leaves(grads))
        layouts, _ = _split(is_sliced, self._slices)
        cut = state_sharding.reduce_scatter(
            reduce, cut, layouts, context.strategy.axis_name
        )
        rest = context.all_reduce(reduce, rest)
        return _joined(is_sliced, cut, rest), self._norm(context, cut, rest)

    def _cut(
        self,
        context: ReplicaContext,
        is_sliced: Sequence[bool],
        grads: Any,
        reduce: str,
    ) -> tuple[list[Any], jax.Array]:
        """The same, of gradients that are needed whole, or are reduced already."""
        grads, norm = _reduced_whole(context, grads, reduce, self._on_gradients)
        grads = assert_mirrored(grads)  # slices of different wholes would go unnoticed
        slices = [
            layout.own_slice(x, context.replica_id_in_sync_group) if sliced else x
            for x, layout, sliced in zip(
                jax.tree.leaves(grads), self._slices, is_sliced, strict=True
            )
        ]
        return slices, norm

    def _norm(
        self, context: ReplicaContext, cut: list[Any], rest: list[Any]
    ) -> jax.Array:
        total = collectives.all_reduce(
            "sum",
            _sum_of_squares(cut),
            context.strategy.axis_name,
            context.num_replicas_in_sync,
        )
        return jnp.sqrt(total + _sum_of_squares(rest))

    def _gathered(
        self, context: ReplicaContext, is_sliced: Sequence[bool], news: list[Any]
    ) -> list[Any]:
        """What to hold of updated variables: most are held whole."""
        is_held_whole = [
            sliced and not isinstance(v.layout, ShardedLayout)
            for sliced, v in zip(is_sliced, self._leaves, strict=True)
        ]
        cut, rest = _split(is_held_whole, news)
        layouts, _ = _split(is_held_whole, self._slices)
        whole = state_sharding.all_gather(cut, layouts, context.strategy.axis_name)
        return _joined(is_held_whole, whole, rest)


def _reduced_whole(
    context: ReplicaContext,
    grads: Any,
    reduce: str,
    on_gradients: Callable[[Any], Any] | None,
) -> tuple[Any, jax.Array]:
    """The reduced gradients, as changed by ``on_gradients``, and their norm before."""
    if reduce != "none":
        grads = context.all_reduce(reduce, grads)
    norm = jnp.sqrt(_sum_of_squares(jax.tree.leaves(grads)))
    return (grads if on_gradients is None else on_gradients(grads)), norm


def values(tree: Any) -> Any:
    """The values of a structure of variables, not to be handed on."""
    return jax.tree.map(lambda v: v.for_operator(), tree)


def _applied(params: Any, updates: Any) -> Any:
    import optax  # takes long: only where it is used

    return optax.apply_updates(params, updates)


def _shape_of(variable: Variable) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(variable.shape, variable.dtype)


def _sum_of_squares(arrays: Sequence[Any]) -> jax.Array:
    squares = [_square_of(x).astype(float) for x in arrays]
    return jnp.sum(jnp.stack(squares)) if squares else jnp.zeros(())


def _square_of(x: Any) -> jax.Array:
    dtype = jnp.promote_types(jnp.result_type(x), jnp.float32)  # bfloat16 adds badly
    return jnp.vdot(x, x, preferred_element_type=dtype).real


def _split(flags: Sequence[bool], items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The items whose flag is set, and the others."""
    pairs = list(zip(flags, items, strict=True))
    return [x for flag, x in pairs if flag], [x for flag, x in pairs if not flag]


def _joined(flags: Sequence[bool], yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    """The items that :func:`_split` parted, in their order."""
    parts = {True: iter(yes), False: iter(no)}
    return [next(parts[bool(flag)]) for flag in flags]
