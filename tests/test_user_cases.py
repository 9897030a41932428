"""Faults that users of distribution layers have hit, and what must happen instead."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import replicax as rx

STRATEGIES = {n: rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (1, 2, 4)}
TWO = STRATEGIES[2]


def all_reduce(op, value):
    return rx.get_replica_context().all_reduce(op, value)


def split(strategy, array):
    n = strategy.num_replicas_in_sync
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: np.split(np.asarray(array), n)[ctx.replica_id_in_sync_group]
    )


def collectives_of(strategy, fn, *args):
    text = jax.jit(lambda *a: strategy.run(fn, a)).lower(*args).compile().as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"^\s*\S+ = .*? ({kinds})(?:-start)?\(", text, re.MULTILINE)


X = np.random.RandomState(0).randn(8, 3).astype(np.float32)
Y = np.random.RandomState(1).randn(8).astype(np.float32)


def squared_error(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


# -- losses and gradients ------------------------------------------------------------


def test_loss_and_parameters_after_a_step_do_not_depend_on_the_replicas():
    def step(w, x, y):
        loss, grad = jax.value_and_grad(squared_error)(w, x, y)
        return w - 0.1 * all_reduce("mean", grad), loss

    seen = []
    for strategy in STRATEGIES.values():
        x, y = split(strategy, X), split(strategy, Y)
        w, loss = strategy.run(step, (jnp.ones(3), x, y))
        seen.append((float(strategy.reduce("mean", loss)), np.asarray(w)))
    expected = np.ones(3) - 0.1 * np.asarray(jax.grad(squared_error)(jnp.ones(3), X, Y))
    for loss, w in seen:
        np.testing.assert_allclose(loss, squared_error(jnp.ones(3), X, Y), rtol=1e-6)
        np.testing.assert_allclose(w, expected, rtol=1e-6)


def test_a_loss_divided_by_the_global_batch_is_summed_not_averaged():
    ones_and_threes = split(TWO, np.repeat([1.0, 3.0], 4).astype(np.float32))
    losses = TWO.run(lambda x: jnp.sum(x) / 8, (ones_and_threes,))
    assert [float(v) for v in losses.values] == [0.5, 1.5]
    assert float(TWO.reduce("sum", losses)) == 2.0


def test_a_regularisation_loss_counts_once_under_mean():
    def step(w, x):
        loss = lambda w: jnp.mean(x) * 0 + jnp.sum(w**2)  # noqa: E731
        return all_reduce("mean", jax.grad(loss)(w))

    for strategy in STRATEGIES.values():
        grad = strategy.run(step, (jnp.ones(2), split(strategy, X)))
        assert grad.tolist() == [2.0, 2.0]


def test_the_gradient_inside_the_step_is_that_of_the_replicas_own_loss():
    def step(w, x, y):
        return jax.grad(squared_error)(w, x, y)

    local = TWO.run(step, (jnp.ones(3), split(TWO, X), split(TWO, Y)))
    for got, x, y in zip(local.values, np.split(X, 2), np.split(Y, 2), strict=True):
        np.testing.assert_allclose(
            got, jax.grad(squared_error)(jnp.ones(3), x, y), rtol=1e-6
        )


def test_a_summed_gradient_is_n_times_the_mean_one_and_not_more():
    def step(w, x, y):
        grad = jax.grad(squared_error)(w, x, y)
        return all_reduce("sum", grad), all_reduce("mean", grad)

    for n, strategy in STRATEGIES.items():
        args = (jnp.ones(3), split(strategy, X), split(strategy, Y))
        total, mean = strategy.run(step, args)
        np.testing.assert_allclose(total, n * np.asarray(mean), rtol=1e-6)


def test_clipping_sees_the_reduced_gradient():
    tx = optax.clip_by_global_norm(1.0)

    def step(grad):
        reduced = all_reduce("mean", grad)
        return tx.update(reduced, tx.init(reduced))[0]

    grads = rx.PerReplica([np.float32([10, 0]), np.float32([0, 1])])
    clipped = TWO.run(step, (grads,))
    np.testing.assert_allclose(clipped, [0.99503719, 0.09950372], rtol=1e-6)


@pytest.mark.parametrize("poisoned", [True, False])
def test_loss_scaling_checks_the_reduced_gradient_so_that_all_replicas_skip(poisoned):
    def step(state, grad):
        w, scale = state
        grad = all_reduce("mean", grad)
        finite = jnp.all(jnp.isfinite(grad))
        w = jnp.where(finite, w - grad / scale, w)
        return w, jnp.where(finite, scale, scale / 2)

    bad = np.float32([np.inf if poisoned else 1.0])
    grads = rx.PerReplica([np.float32([3.0]), bad])
    w, scale = TWO.run(step, ((jnp.ones(1), jnp.float32(8)), grads))
    assert isinstance(w, jax.Array) and isinstance(scale, jax.Array)
    assert (float(w[0]), float(scale)) == ((1.0, 4.0) if poisoned else (0.75, 8.0))


# -- what is compiled ----------------------------------------------------------------


def test_twenty_dropouts_add_no_communication():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(20)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = self.dropout(layer(x))
            return jnp.sum(x)

    model = Model(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, key, x):
        model = nnx.merge(graphdef, params, rest, copy=True)
        del key
        return all_reduce("mean", nnx.grad(lambda m: m(x))(model))

    found = collectives_of(TWO, step, params, rest, jax.random.key(0), split(TWO, X))
    assert found == ["all-reduce"]


def test_gradient_accumulation_reduces_once():
    def step(w, xs, ys):
        def body(total, xy):
            return total + jax.grad(squared_error)(w, *xy), None

        total, _ = lax.scan(body, jnp.zeros_like(w), (xs, ys))
        return w - 0.1 * all_reduce("mean", total / xs.shape[0])

    xs, ys = split(TWO, X.reshape(8, 1, 3)), split(TWO, Y.reshape(8, 1))
    assert collectives_of(TWO, step, jnp.ones(3), xs, ys) == ["all-reduce"]
    expected = np.ones(3) - 0.1 * np.asarray(jax.grad(squared_error)(jnp.ones(3), X, Y))
    np.testing.assert_allclose(
        TWO.run(step, (jnp.ones(3), xs, ys)), expected, rtol=1e-6
    )


def test_loops_of_unequal_length_do_not_wait_for_each_other():
    def step(n):
        return lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)

    lengths = TWO.experimental_distribute_values_from_function(
        lambda ctx: [10, 1000][ctx.replica_id_in_sync_group]
    )
    assert collectives_of(TWO, step, lengths) == []
    assert [int(v) for v in TWO.run(step, (lengths,)).values] == [10, 1000]


def test_a_changing_python_number_and_a_fresh_lambda_do_not_compile_again():
    traced = []
    x = split(TWO, X)
    for i in range(5):
        TWO.run(lambda x, i: (traced.append(1), x * i)[1], (x, i))
    assert len(traced) == 1


# -- randomness and initialisation ---------------------------------------------------


def test_the_same_key_gives_the_same_noise_unless_it_is_folded():
    def draw(key):
        ctx = rx.get_replica_context()
        return jax.random.normal(key), jax.random.normal(ctx.fold_in(key))

    same, own = TWO.run(draw, (jax.random.key(0),))
    assert isinstance(same, jax.Array)
    assert float(own.values[0]) != float(own.values[1])


def test_initial_parameters_are_bit_equal_at_any_number_of_replicas():
    def init(key):
        return nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(key)))

    seen = set()
    for strategy in STRATEGIES.values():
        state = strategy.run(init, (jax.random.key(7),))
        rx.assert_mirrored(state)
        seen.add(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state)))
        with strategy.scope():
            model = nnx.Linear(3, 2, rngs=nnx.Rngs(7))
        seen.add(
            b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.state(model)))
        )
    assert len(seen) == 1


def test_replicas_of_unequal_weight_make_a_weighted_mean():
    values = rx.PerReplica([10.0, 20.0])
    weights = rx.PerReplica([3.0, 2.0])
    assert float(TWO.reduce("mean", values, weights=weights)) == 14.0


# -- state from elsewhere ------------------------------------------------------------


def test_state_committed_to_a_foreign_device_is_adopted():
    w = jax.device_put(jnp.ones(3), jax.devices()[3])
    tx = optax.sgd(0.1, momentum=0.9)
    state = (w, tx.init(w))

    def step(state, x):
        w, opt = state
        updates, opt = tx.update(all_reduce("mean", jnp.mean(x, 0)), opt)
        return w + updates, opt

    for _ in range(2):
        state = TWO.run(step, (state, split(TWO, X)))
    leaves = jax.tree.leaves(state)
    assert all(a.sharding.device_set == set(jax.devices()[:2]) for a in leaves)


def test_the_scope_leaves_no_mesh_that_breaks_other_libraries():
    with TWO.scope():
        assert jax.sharding.get_abstract_mesh().empty
        value = split(TWO, X)
        assert (value.values[0] + 1).shape == (4, 3)
