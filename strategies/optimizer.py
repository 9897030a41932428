"""Training variables with an Optax transformation: :class:`Optimizer`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .context import (
    cross_replica,
    get_replica_context,
    get_strategy,
    has_strategy,
)
from .strategy import Strategy
from .variables.frames import is_variable
from .variables.synchronization import VariableAggregation, VariableSynchronization
from .variables.trees import variables
from .variables.variable import Variable

Reduce = Literal["mean", "sum", "none"]


class Optimizer:
    """Updates variables with gradients, in a step of any strategy.

    Each call reduces the gradients over replicas, shows the reduced ones to
    ``on_gradients``, and hands them to the transformation: so clipping and checks for
    NaNs see the same gradient on all replicas. The transformation's state is held in
    variables too, which lie where the trained ones do.

    Args:
      tx: An Optax transformation, or ``optax.MultiSteps``.
      variables: A nested structure of :class:`Variable`, such as ``rx.variables`` makes.
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
      state: The transformation's state, a structure of variables. Hyperparameters that
        ``optax.inject_hyperparams`` put there can be assigned.

    Raises:
      TypeError: ``tx`` is no transformation, or a leaf of ``variables`` no variable.
      ValueError: ``reduce`` is none of the above, ``accumulate_steps`` is not positive,
        or the variables are of several strategies.

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
        self._tx = _transformation(tx)
        self._leaves, self._structure = _checked_variables(variables)
        if reduce not in ("mean", "sum", "none"):
            raise ValueError(f'reduce must be "mean", "sum" or "none". Got {reduce!r}.')
        if not isinstance(accumulate_steps, int) or accumulate_steps < 1:
            raise ValueError(
                f"accumulate_steps must be a positive int. Got {accumulate_steps!r}."
            )
        self._reduce = reduce
        self._on_gradients = on_gradients
        self.variables = variables
        with self._scope():
            self.state = _slots(self._tx.init(_values(variables)), "slot")
            self._accumulated = self._accumulators(accumulate_steps)

    def _accumulators(self, num_steps: int) -> tuple[Any, Variable, int] | None:
        if num_steps == 1:
            return None
        zeros = jax.tree.map(
            lambda v: jnp.zeros(v.shape, v.dtype), self.variables, is_leaf=is_variable
        )
        local = VariableSynchronization.ON_READ, VariableAggregation.MEAN
        sums = variables(
            zeros, trainable=False, synchronization=local[0], aggregation=local[1]
        )
        return sums, Variable(jnp.int32(0), trainable=False, name="calls"), num_steps

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
          grads: Gradients, in the structure of ``variables``. Or pairs of a gradient and
            its variable, as in TF; all of them.
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
        if context is not None and (has_strategy() or context.is_traced):
            return self._apply(grads, extra_args, self._reduce)
        return self.strategy.run(self._apply_from_outside, (grads, extra_args))

    def _apply_from_outside(self, grads: Any, extra_args: Any) -> jax.Array:
        raise NotImplementedError

    def _apply(self, grads: Any, extra_args: Mapping[str, Any], how: str) -> Any:
        with cross_replica(self.strategy, is_updating=True):
            raise NotImplementedError
