"""The ways of running a problem's step on several devices, Replicax among them.

Each function returns a contender for ``_harness.measure``. All of them train on one
batch that already lies on the devices, and consume their state unless told not to.

On CPU with JAX 0.10, a loop that launches programs holding a collective without ever
waiting deadlocks. ``strategy.run`` sees to that by itself; the loops around the other
ways wait on every 8th result, which costs them nothing that can be measured.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Contender
from _problems import LAYERS, LEARNING_RATE, Problem, cross_entropy
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax as rx

AXIS = "replica"
WAIT_EVERY = 8

Step = Callable[[Any, Any], tuple[Any, Any]]


def replica_mesh(devices: int) -> Mesh:
    """The one-dimensional mesh that the hand-written ways use."""
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """A private copy of a pytree on all devices, free to be donated."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.device_put(jax.tree.map(jnp.copy, tree), sharding)


def shard(batch: Any, mesh: Mesh) -> Any:
    """A global batch with its rows spread over the devices."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS)))


def per_replica(batch: Any, strategy: rx.Strategy) -> Any:
    """A global batch as the per-replica value that ``strategy.run`` takes."""
    replicas = strategy.num_replicas_in_sync

    def rows_of(context):
        r = context.replica_id_in_sync_group
        return jax.tree.map(lambda x: x.reshape(replicas, -1, *x.shape[1:])[r], batch)

    return strategy.experimental_distribute_values_from_function(rows_of)


def train_loop(step: Step, state: Any, batch: Any) -> Callable[[int], None]:
    """A loop over a functional step that goes on from the state it left behind."""

    def run(steps: int) -> None:
        nonlocal state
        for number in range(steps):
            state, loss = step(state, batch)
            if number % WAIT_EVERY == 0:
                jax.block_until_ready(loss)
        jax.block_until_ready(state)

    return run


# -- functional steps --------------------------------------------------------------


def shard_map_step(problem: Problem, mesh: Mesh, donate: bool = True) -> Step:
    """The step written by hand with ``jax.jit`` and ``jax.shard_map``."""

    def replica_step(state, batch):
        mean = functools.partial(jax.lax.pmean, axis_name=AXIS)
        state, loss = problem.step(state, batch, mean)
        return state, loss[None]

    everywhere, rows = PartitionSpec(), PartitionSpec(AXIS)
    mapped = jax.shard_map(
        replica_step,
        mesh=mesh,
        in_specs=(everywhere, rows),
        out_specs=(everywhere, rows),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0,) if donate else ())


def hand_shard_map(
    problem: Problem, mesh: Mesh, donate: bool = True, name: str = "jit(shard_map)"
) -> Contender:
    """``jax.jit(jax.shard_map(step))``, written by hand."""
    step = shard_map_step(problem, mesh, donate)
    state = replicate(problem.state, mesh)
    return Contender(name, train_loop(step, state, shard(problem.batch, mesh)))


def pmap(problem: Problem, mesh: Mesh) -> Contender:
    """``jax.pmap``, one stacked copy of the state a device."""
    devices = list(mesh.devices.flat)

    def replica_step(state, batch):
        mean = functools.partial(jax.lax.pmean, axis_name=AXIS)
        return problem.step(state, batch, mean)

    step = jax.pmap(replica_step, AXIS, devices=devices, donate_argnums=(0,))
    place = jax.pmap(lambda tree: tree, AXIS, devices=devices)
    state = place(jax.tree.map(lambda x: jnp.stack([x] * len(devices)), problem.state))
    batch = place(
        jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[1:]), problem.batch)
    )
    return Contender("jax.pmap", train_loop(step, state, batch))


def jit_sharded(problem: Problem, mesh: Mesh) -> Contender:
    """``jax.jit`` of the global step over sharded arrays; XLA finds the collectives."""

    def global_step(state, batch):
        return problem.step(state, batch, lambda gradients: gradients)

    step = jax.jit(global_step, donate_argnums=(0,))
    state = replicate(problem.state, mesh)
    batch = shard(problem.batch, mesh)
    return Contender("jit + NamedSharding", train_loop(step, state, batch))


def average(tree: Any) -> Any:
    """The mean over replicas, inside ``strategy.run``."""
    return rx.get_replica_context().all_reduce("mean", tree)


def replica_step(problem: Problem) -> Step:
    """One replica's step, to be passed to ``strategy.run``."""
    return lambda state, batch: problem.step(state, batch, average)


def run_options(donate: bool) -> rx.RunOptions | None:
    """Options that consume the state, if wanted."""
    return rx.RunOptions(donate=(0,)) if donate else None


def replicax_step(problem: Problem, strategy: rx.Strategy, donate: bool = True) -> Step:
    """The step under ``strategy.run``, as a function like the other ways'."""
    step, options = replica_step(problem), run_options(donate)
    return lambda state, batch: strategy.run(step, (state, batch), options=options)


def replicax(
    problem: Problem,
    strategy: rx.Strategy,
    donate: bool = True,
    name: str = "strategy.run",
) -> Contender:
    """``strategy.run`` with functional state; it waits by itself where it must."""
    step, options = replica_step(problem), run_options(donate)
    state = jax.tree.map(jnp.copy, problem.state)
    batch = per_replica(problem.batch, strategy)

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, _ = strategy.run(step, (state, batch), options=options)
        jax.block_until_ready(state)

    return Contender(name, run)


# -- steps with closures over variables --------------------------------------------


class WithVariables:
    """A training step that closes over variables and an optimizer of Replicax.

    Args:
      problem: What is trained.
      strategy: The strategy of the variables.

    Attributes:
      variables: The parameters and the optimizer's state.
    """

    def __init__(self, problem: Problem, strategy: rx.Strategy):
        with strategy.scope():
            params = rx.variables(problem.params)
            optimizer = rx.Optimizer(problem.optimizer, params)

        def step(batch):
            loss_and_gradients = jax.value_and_grad(problem.loss_fn)
            loss, gradients = loss_and_gradients(rx.read(params), batch)
            optimizer.apply_gradients(gradients)
            return loss

        self.variables = (params, optimizer.state)
        self._strategy = strategy
        self._step = step
        self._batch = per_replica(problem.batch, strategy)

    def run(self, steps: int) -> None:
        """Runs steps, and waits for the last one."""
        loss = None
        for _ in range(steps):
            loss = self._strategy.run(self._step, (self._batch,))
        jax.block_until_ready(loss)


# -- steps on nnx objects ----------------------------------------------------------


class MLP(nnx.Module):
    """The perceptron of ``_problems.mlp`` as a module."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = itertools.pairwise(LAYERS)
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits `[rows, 10]` of `[rows, 784]`."""
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


def _model_and_optimizer() -> tuple[MLP, nnx.Optimizer]:
    model = MLP(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)


def _loss_fn(model: MLP, batch: Any) -> jax.Array:
    return cross_entropy(model(batch["image"]), batch["label"])


def nnx_jit_sharded(batch: Any, mesh: Mesh) -> Contender:
    """``nnx.jit`` of the global step over sharded arrays, updated in place."""

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(_loss_fn)(model, batch)
        optimizer.update(model, gradients)
        return loss

    model, optimizer = _model_and_optimizer()
    nnx.update(model, replicate(nnx.state(model), mesh))
    nnx.update(optimizer, replicate(nnx.state(optimizer), mesh))
    batch = shard(batch, mesh)

    def run(steps: int) -> None:
        for number in range(steps):
            loss = step(model, optimizer, batch)
            if number % WAIT_EVERY == 0:
                jax.block_until_ready(loss)
        jax.block_until_ready(nnx.state(model))

    return Contender("nnx.jit + NamedSharding", run)


def replicax_nnx(batch: Any, strategy: rx.Strategy) -> Contender:
    """``strategy.run`` with the module and its optimizer as arguments."""

    def replica_step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(_loss_fn)(model, batch)
        optimizer.update(model, average(gradients))
        return loss

    model, optimizer = _model_and_optimizer()
    batch = per_replica(batch, strategy)
    options = rx.RunOptions(donate=(0, 1))

    def run(steps: int) -> None:
        for _ in range(steps):
            strategy.run(replica_step, (model, optimizer, batch), options=options)
        jax.block_until_ready(nnx.state(model))

    return Contender("strategy.run, nnx objects", run)
