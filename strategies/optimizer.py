"""Training variables with an Optax transformation: :class:`Optimizer`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from .context import get_replica_context, get_strategy, has_strategy
from .merge import is_per_replica
from .strategy import Strategy
from .traced_step import is_value
from .updates import Held, SlicedUpdate, Updated, WholeUpdate
from .variables.frames import is_variable
from .variables.synchronization import VariableAggregation, VariableSynchronization
from .variables.trees import variables as make_variables
from .variables.variable import Variable

if TYPE_CHECKING:
    import optax

Reduce = Literal["mean", "sum", "none"]


class Optimizer:
    """Updates variables with gradients, in a step of any strategy.

    Each call reduces the gradients over replicas, shows the reduced ones to
    ``on_gradients``, and hands them to the transformation: so clipping and checks for
    NaNs see the same gradient on all replicas. The transformation's state is held in
    variables too, which lie where the trained ones do.

    Args:
      tx: An Optax transformation, or ``optax.MultiSteps``.
      variables: A nested structure of :class:`Variable`, as ``rx.variables`` makes it.
      reduce: How the gradients of the replicas become one: ``"mean"``, for losses that
        are a mean over a replica's examples; ``"sum"``, for losses that are divided by
        the global batch size; or ``"none"``, for gradients that are reduced already.
      on_gradients: A function of the reduced gradients that returns what to use in
        their place. All replicas must get the same.
      accumulate_steps: Updates only at every so many-th call, with the mean of the
        gradients since the last one. Until then, each replica adds up its own, without
        communication.

    Attributes:
      variables: The trained variables.

    Raises:
      TypeError: ``tx`` is no transformation, or a leaf of ``variables`` no variable.
      ValueError: ``reduce`` is none of the above, ``accumulate_steps`` is not positive
        or the strategy has no variables of a replica's own, the variables are of
        several strategies, or the strategy shards state and ``tx`` cannot be sliced.

    Example:
      >>> import jax
      >>> import optax
      >>> import replicax as rx
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> with strategy.scope():
      ...     params = rx.variables({"w": 1.0})
      ...     optimizer = rx.Optimizer(optax.sgd(0.1), params)
      >>> def step(x):
      ...     loss = lambda params: params["w"] * x
      ...     grads = jax.grad(loss)(rx.read(params))
      ...     return optimizer.apply_gradients(grads)
      >>> float(strategy.run(step, (rx.PerReplica([1.0, 3.0]),)))
      2.0
      >>> round(float(params["w"]), 4)
      0.8
    """

    def __init__(
        self,
        tx: Any,
        variables: Any,
        *,
        reduce: Reduce = "mean",
        on_gradients: Callable[[Any], Any] | None = None,
        accumulate_steps: int = 1,
    ):
        if reduce not in ("mean", "sum", "none"):
            raise ValueError(f'reduce must be "mean", "sum" or "none". Got {reduce!r}.')
        if not isinstance(accumulate_steps, int) or accumulate_steps < 1:
            raise ValueError(
                f"accumulate_steps must be a positive int. Got {accumulate_steps!r}."
            )
        self._tx = _transformation(tx)
        self._leaves, self._structure = _flattened(variables)
        self._reduce = reduce
        self.variables = variables
        way = SlicedUpdate if self._is_sharded() else WholeUpdate
        hook = None if on_gradients is None else _Hook(on_gradients, self._in_order)
        with self._scope():
            self._update = way(self._tx, variables, hook)
            self._accumulator = (
                _Accumulator(variables, accumulate_steps)
                if accumulate_steps > 1
                else None
            )

    @property
    def state(self) -> Any:
        """The transformation's state, a structure of variables.

        Hyperparameters that ``optax.inject_hyperparams`` put there can be assigned.
        """
        return self._update.state

    def _is_sharded(self) -> bool:
        return self.strategy.shard_state and self.strategy.num_replicas_in_sync > 1

    @property
    def strategy(self) -> Strategy:
        """The strategy of the variables."""
        return self._leaves[0].strategy

    def _scope(self) -> contextlib.AbstractContextManager[Any]:
        """Where slots are made: beside the variables."""
        strategy = self.strategy
        if self._leaves[0].is_free or (has_strategy() and get_strategy() is strategy):
            return contextlib.nullcontext()
        return strategy.scope()

    # -- applying --------------------------------------------------------------------

    def apply_gradients(self, grads: Any, **extra_args: Any) -> jax.Array:
        """Reduces gradients over replicas and updates the variables with them.

        In a step, all replicas must call it, with their own gradients; it may stand
        under a ``lax.cond`` whose predicate is the same for all of them. Between steps,
        per-replica gradients are reduced, and plain ones are taken as reduced already.

        Args:
          grads: Gradients, in the structure of ``variables``. Or, as in TF, pairs of a
            gradient and its variable, for all of them.
          **extra_args: For transformations that want more, such as ``value=loss``.

        Returns:
          The global norm of the reduced gradients, before ``on_gradients``. XLA leaves
          out its computation if it is not used. When gradients are accumulated, the
          norm at the call that updates, and zero at the others.

        Raises:
          ValueError: ``grads`` is of another structure, or a shape differs.
          ReplicaDivergenceError: Replicas would apply different gradients, with
            ``reduce="none"`` or because of ``on_gradients``.
        """
        grads = self._in_order(grads)
        context = get_replica_context()
        if context is not None and context.is_traced:
            return self._apply(grads, extra_args, self._reduce)
        if self._reduce != "none":
            grads = jax.tree.map(self._reduced_already, grads, is_leaf=is_per_replica)
        return self.strategy.run(self._apply, (grads, extra_args, "none"))

    def _reduced_already(self, grad: Any) -> Any:
        if not is_per_replica(grad):
            return grad
        return self.strategy.reduce(self._reduce, grad)

    def _apply(self, grads: Any, extra_args: Any, reduce: str) -> jax.Array:
        """Updates everything; a part of a step."""
        context = get_replica_context()
        held = Held(_held(self.variables), _held(self.state))

        def update(grads: Any) -> Updated:
            return self._update(context, grads, reduce, held, extra_args)

        if self._accumulator is None:
            new = update(grads)
        else:
            new = self._accumulator.add(grads, held, update)
        _hold(self.variables, new.held.variables)
        _hold(self.state, new.held.state)
        return new.norm

    # -- checking --------------------------------------------------------------------

    def _in_order(self, grads: Any) -> Any:
        """Gradients in the structure of the variables, each of its variable's shape."""
        if isinstance(grads, zip) or _are_pairs(grads):
            grads = self._of_pairs(list(grads))
        leaves, structure = jax.tree.flatten(grads, is_leaf=is_per_replica)
        if structure != self._structure:
            raise ValueError(
                "Gradients must have the structure of the optimizer's variables, "
                f"{self._structure}. Got {structure}."
            )
        for grad, variable in zip(leaves, self._leaves, strict=True):
            if not is_per_replica(grad) and not is_value(grad):
                raise TypeError(
                    f"The gradient of {variable!r} must be an array. Got {grad!r}."
                )
            shape = grad.shape if is_per_replica(grad) else jnp.shape(grad)
            if shape != variable.shape:
                raise ValueError(
                    f"The gradient of {variable!r} must have its shape. Got shape "
                    f"{shape}."
                )
        return grads

    def _of_pairs(self, pairs: list[tuple[Any, Variable]]) -> Any:
        """Gradients in the structure of the variables, of pairs in any order."""
        given = {variable: grad for grad, variable in pairs}
        known = set(self._leaves)  # a list would compare values
        missing = [v for v in self._leaves if v not in given]
        foreign = [v for v in given if v not in known]
        if missing or foreign or len(given) < len(pairs):
            raise ValueError(
                "apply_gradients needs one gradient for each of the optimizer's "
                f"{len(self._leaves)} variables. Got {len(pairs)} pairs; missing: "
                f"{missing}; not the optimizer's: {foreign}; given twice: "
                f"{[v for v, n in Counter(v for _, v in pairs).items() if n > 1]}."
            )
        return self._structure.unflatten(given[v] for v in self._leaves)


class _Hook:
    """Changes reduced gradients, and checks what came of it."""

    def __init__(self, change: Callable[[Any], Any], check: Callable[[Any], Any]):
        self._change = change
        self._check = check

    def __call__(self, grads: Any) -> Any:
        return self._check(self._change(grads))


class _Accumulator:
    """Adds up each replica's gradients until it is time to reduce them.

    Args:
      variables: The trained variables.
      num_steps: How many gradients make an update.
    """

    def __init__(self, variables: Any, num_steps: int):
        zeros = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), variables)
        self._sums = make_variables(
            zeros,
            trainable=False,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        if not all(v.layout.is_local for v in jax.tree.leaves(self._sums)):
            raise ValueError(
                "accumulate_steps needs variables of which each replica has its own, "
                f"and {get_strategy()!r} has none. Add up gradients within a step, "
                "with rx.accumulate_gradients."
            )
        self._calls = Variable(jnp.int32(0), trainable=False, name="calls")
        self._num_steps = num_steps

    def add(self, grads: Any, held: Held, update: Callable[[Any], Updated]) -> Updated:
        """Returns what the gradients lead to: an update, now and then."""
        sums = jax.tree.map(jnp.add, _held(self._sums), grads)
        calls = self._calls.read_value() + 1
        is_time = calls >= self._num_steps

        def now(sums: Any) -> Any:
            means = jax.tree.map(lambda x: x / self._num_steps, sums)
            return update(means), jax.tree.map(jnp.zeros_like, sums)

        def later(sums: Any) -> Any:
            return Updated(held, jnp.zeros((), float)), sums

        new, sums = jax.lax.cond(is_time, now, later, sums)
        _hold(self._sums, sums)
        _hold(self._calls, jnp.where(is_time, 0, calls))
        return new


def accumulate_gradients(
    fn: Callable[[Any], Any], batch: Any, num_microbatches: int
) -> Any:
    """Calls a function for parts of a batch in turn, and returns the mean of it all.

    For batches whose activations do not fit in memory: only one part is worked on at a
    time. Reduce the result over replicas once, as ``Optimizer.apply_gradients`` does.

    Args:
      fn: A function of a part of the batch, for example the ``jax.grad`` or
        ``jax.value_and_grad`` of a mean loss. Returns a nested structure of arrays.
      batch: A nested structure of arrays ``[rows, ...]``.
      num_microbatches: The number of parts. Divides the number of rows.

    Returns:
      The mean over the parts of what ``fn`` returns, in its structure.

    Raises:
      ValueError: The number of rows is no multiple of ``num_microbatches``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> x = jnp.arange(8.0)
      >>> grad = jax.grad(lambda w, x: jnp.mean(w * x))
      >>> float(rx.accumulate_gradients(lambda x: grad(1.0, x), x, 4))
      3.5
    """
    leaves = jax.tree.leaves(batch)
    rows = sorted({jnp.shape(x)[0] for x in leaves})
    if num_microbatches < 1 or any(n % num_microbatches for n in rows):
        raise ValueError(
            f"A batch of {', '.join(map(str, rows))} rows cannot be split into "
            f"{num_microbatches} microbatches of equal size."
        )
    parts = jax.tree.map(
        lambda x: jnp.reshape(x, (num_microbatches, -1, *jnp.shape(x)[1:])), batch
    )
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, first)
    )

    def add(sums: Any, part: Any) -> Any:
        return jax.tree.map(jnp.add, sums, fn(part)), None

    sums, _ = jax.lax.scan(add, zeros, parts)
    return jax.tree.map(lambda x: x / num_microbatches, sums)


def _transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    import optax  # takes long: only where it is used

    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            "Optimizer needs an Optax transformation, such as optax.adam(1e-3). Got "
            f"{tx!r}."
        )
    return optax.with_extra_args_support(tx)


def _flattened(variables: Any) -> tuple[list[Variable], Any]:
    leaves, structure = jax.tree.flatten(variables)
    for x in leaves:
        if not is_variable(x):
            raise TypeError(
                "Optimizer trains rx.Variables, such as rx.variables(params) makes of "
                f"parameters. Got a {type(x).__name__}."
            )
    if not leaves:
        raise ValueError("Optimizer needs at least one variable. Got none.")
    if len({id(v.strategy) for v in leaves}) > 1:
        raise ValueError(
            "An optimizer's variables must be of one strategy. Got variables of "
            f"{', '.join({repr(v.strategy) for v in leaves})}."
        )
    if len({id(v) for v in leaves}) < len(leaves):
        raise ValueError("A variable was given to the optimizer twice.")
    return leaves, structure


def _are_pairs(grads: Any) -> bool:
    return (
        isinstance(grads, (list, tuple))
        and len(grads) > 0
        and all(
            isinstance(x, tuple) and len(x) == 2 and is_variable(x[1]) for x in grads
        )
    )


def _held(tree: Any) -> Any:
    """What this replica holds of each variable of a structure."""
    return jax.tree.map(lambda v: v.array_here(), tree)


def _hold(tree: Any, arrays: Any) -> None:
    """Lets this replica hold other arrays: its own copy or slice, not aggregated."""
    jax.tree.map(lambda v, x: v.hold(x), tree, arrays)
