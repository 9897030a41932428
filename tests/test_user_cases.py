"""Faults that users of distribution layers have hit, and what must happen instead."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx

from .compiled import collectives_of as collectives_in
from .compiled import compiled_step

STRATEGIES = {n: rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (1, 2, 4)}
TWO = STRATEGIES[2]
TWO_DEVICES = jax.devices()[:2]


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


@pytest.mark.parametrize(
    ("synchronization", "aggregation", "varies", "expected"),
    [
        ("ON_WRITE", "ONLY_FIRST_REPLICA", False, []),
        ("ON_WRITE", "ONLY_FIRST_REPLICA", True, ["all-reduce"]),
        ("ON_WRITE", "MEAN", False, []),
        ("ON_WRITE", "MEAN", True, ["all-reduce"]),
        ("ON_WRITE", "SUM", False, []),
        ("ON_WRITE", "NONE", False, []),
        ("ON_READ", "SUM", True, []),
        ("ON_READ", "MEAN", True, []),
        ("ON_READ", "ONLY_FIRST_REPLICA", True, []),
    ],
)
def test_writes_communicate_only_where_replicas_may_disagree(
    synchronization, aggregation, varies, expected
):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        w = rx.Variable(jnp.ones(3))
        u = rx.Variable(
            jnp.zeros(3),
            synchronization=rx.VariableSynchronization[synchronization],
            aggregation=rx.VariableAggregation[aggregation],
        )

    def step(x):
        u.assign(0.9 * u.read_value() + w.read_value() * (x if varies else 2.0))

    x = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )
    assert collectives_in(compiled_step(strategy, step, x)) == expected


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


def test_variables_and_an_optimizer_of_no_scope_join_the_replicas():
    w = jax.device_put(jnp.ones(3), jax.devices()[3])
    params = rx.variables({"w": w})
    optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), params)

    def step(x, y):
        return optimizer.apply_gradients(
            {"w": jax.grad(squared_error)(params["w"].read_value(), x, y)}
        )

    tx = optax.sgd(0.1, momentum=0.9)
    expected, state = jnp.ones(3), tx.init(jnp.ones(3))
    for _ in range(2):
        TWO.run(step, (split(TWO, X), split(TWO, Y)))
        grad = jax.grad(squared_error)(expected, X, Y)
        updates, state = tx.update(grad, state)
        expected = expected + updates
    held = jax.tree.leaves((params, optimizer.state))
    assert len(held) == 2
    assert all(v.array.sharding.device_set == set(jax.devices()[:2]) for v in held)
    np.testing.assert_allclose(params["w"].numpy(), expected, rtol=1e-6)
    assert w.tolist() == [1.0] * 3


def test_a_variable_of_another_strategy_is_refused_by_name():
    with STRATEGIES[4].scope():
        w = rx.Variable(jnp.ones(3), name="kernel")
    with pytest.raises(rx.ContextError, match=r"'kernel' .*scope"):
        TWO.run(lambda x: x @ w.read_value(), (split(TWO, X),))


def test_copies_that_differ_between_devices_do_not_become_a_variable():
    parts = [jax.device_put(jnp.full(3, i), d) for i, d in enumerate(TWO_DEVICES)]
    unequal = jax.make_array_from_single_device_arrays(
        (3,), NamedSharding(TWO.mesh, PartitionSpec()), parts
    )
    with TWO.scope():
        w = rx.Variable(unequal, dtype=jnp.float32, name="kernel")
    rx.assert_mirrored(w.read_value())
    assert [v.tolist() for v in w.values] == [[0.0] * 3, [0.0] * 3]
    with pytest.raises(rx.ReplicaDivergenceError, match="w"):
        check = rx.RunOptions(check_values=True)
        TWO.run(lambda w: w * 2, (unequal,), options=check)


# -- the memory and the placement of state -------------------------------------------


def test_no_leaf_of_a_model_or_optimizer_moves_from_step_to_step():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, all_reduce("mean", grads))

    def shardings():
        state = nnx.state((model, optimizer))
        return jax.tree.map(lambda x: x.sharding, nnx.to_pure_dict(state))

    TWO.run(step, (model, optimizer, split(TWO, X)))
    first = shardings()
    assert len(jax.tree.leaves(first)) == 8
    mirrored = NamedSharding(TWO.mesh, PartitionSpec())
    assert set(jax.tree.leaves(first)) == {mirrored}
    TWO.run(step, (model, optimizer, split(TWO, X)))
    assert shardings() == first


def test_no_variable_of_an_optimizer_moves_from_step_to_step():
    with TWO.scope():
        params = rx.variables({"w": jnp.ones(3)})
        optimizer = rx.Optimizer(optax.adam(0.1), params)
    held = jax.tree.leaves((params, optimizer.state))
    before = [v.array.sharding for v in held]
    assert len(before) == 4
    for _ in range(2):
        TWO.run(lambda g: optimizer.apply_gradients({"w": g}), (jnp.ones(3),))
        assert [v.array.sharding for v in held] == before


def test_variables_made_of_one_array_share_no_memory():
    a = TWO.extended.broadcast_to(jnp.ones(4))
    with TWO.scope():
        params, ema = rx.Variable(a), rx.Variable(a)

    def step():
        params.assign_sub(jnp.ones(4))
        ema.assign(0.5 * (ema.read_value() + params.read_value()))

    for _ in range(2):
        TWO.run(step)
    assert params.numpy().tolist() == [-1.0] * 4
    assert ema.numpy().tolist() == [-0.25] * 4
    ema.assign(params)
    ema.assign(params.read_value())
    TWO.run(step)
    assert ema.numpy().tolist() == [-1.5] * 4
    assert a.tolist() == [1.0] * 4


def test_the_memory_of_every_written_variable_is_reused():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        params, moments, rate = map(rx.Variable, (jnp.ones(99), jnp.zeros(99), 0.1))

    def step(x):
        moments.assign(0.9 * moments.read_value() + all_reduce("mean", x))
        params.assign_sub(rate * moments.read_value())

    x = strategy.extended.broadcast_to(jnp.ones(99))
    compiled = compiled_step(strategy, step, x)
    written = 2 * 99 * 4  # bytes on each device; the rate is only read
    assert compiled.memory_analysis().alias_size_in_bytes == written
    consumed = params.array, moments.array
    strategy.run(step, (x,))
    assert all(array.is_deleted() for array in consumed)
    assert not rate.array.is_deleted()
