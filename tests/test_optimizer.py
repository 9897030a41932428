"""``rx.Optimizer`` against a plain Optax loop over the whole batch on one device."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import replicax as rx

from .compiled import collectives_of, compiled_step

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 8, 3)).astype(np.float32)  # [steps, rows, columns]
Y = RANDOM.normal(size=(4, 8, 2)).astype(np.float32)
INITIAL = {
    "b": np.zeros(2, np.float32),
    "w": RANDOM.normal(size=(3, 2)).astype(np.float32),
}
SCHEDULE = optax.exponential_decay(0.1, 2, 0.5)
LABELS = {"b": "bias", "w": "weight"}

TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(SCHEDULE, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "masked": optax.chain(
        optax.masked(optax.trace(0.9), {"b": False, "w": True}), optax.scale(-0.1)
    ),
    "multi_transform": optax.multi_transform(
        {"bias": optax.sgd(0.1), "weight": optax.adam(0.1)}, LABELS
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "clip_by_global_norm": optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)
    ),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
}


@pytest.fixture
def strategies():
    return {
        n: rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (1, 2, 4, 8)
    }


@pytest.fixture
def two(strategies):
    return strategies[2]


def loss_fn(params, x, y):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"] - y))


def plainly(tx, initial=INITIAL, num_steps=4, **extra_args):
    """Trains on one device, with the whole batch; returns parameters and state."""
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    tx = optax.with_extra_args_support(tx)
    params = jax.tree.map(jnp.asarray, initial)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    for x, y in itertools.islice(zip(X, Y, strict=True), num_steps):
        params, state = step(params, state, x, y)
    return params, state


def rows(strategy, array):
    """The replicas' rows of a global batch."""
    return rx.PerReplica(np.split(array, strategy.num_replicas_in_sync))


def batches(strategy):
    return [(rows(strategy, x), rows(strategy, y)) for x, y in zip(X, Y, strict=True)]


def made(strategy, tx, initial=INITIAL, **settings):
    with strategy.scope():
        params = rx.variables(initial)
        return params, rx.Optimizer(tx, params, **settings)


def step_of(params, optimizer, loss_fn=loss_fn):
    def step(x, y):
        loss, grads = jax.value_and_grad(loss_fn)(rx.read(params), x, y)
        return loss, optimizer.apply_gradients(grads)

    return step


def per_replica_grads(strategy, params, index=0):
    def step(x, y):
        return jax.grad(loss_fn)(rx.read(params), x, y)

    grads = strategy.run(step, batches(strategy)[index])
    assert strategy.num_replicas_in_sync == 1 or isinstance(grads["w"], rx.PerReplica)
    return grads


def norm_of(grads):
    return np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))


def assert_close(ours, expected, **tolerance):
    tolerance = {"rtol": 1e-6, "atol": 1e-6, **tolerance}
    ours, expected = rx.read(ours), rx.read(expected)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert not isinstance(a, rx.PerReplica)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), **tolerance
        )


# -- any transformation, any number of replicas ----------------------------------------


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("n", [2, 8])
def test_the_whole_batch_on_one_device_trains_alike(strategies, name, n):
    tx = TRANSFORMATIONS[name]
    params, optimizer = made(strategies[n], tx)
    step = step_of(params, optimizer)
    for batch in batches(strategies[n]):
        strategies[n].run(step, batch)
    expected, state = plainly(tx)
    assert_close(params, expected)
    assert_close(optimizer.state, state)


@pytest.mark.parametrize("n", [1, 4])
def test_so_do_other_numbers_of_replicas(strategies, n):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))
    params, optimizer = made(strategies[n], tx)
    step = step_of(params, optimizer)
    for batch in batches(strategies[n]):
        strategies[n].run(step, batch)
    assert_close(params, plainly(tx)[0])


def test_transformations_get_extra_arguments(two):
    tx = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1, cooldown=0)
    )
    params, optimizer = made(two, tx)

    def step(x, y):
        grads = jax.grad(loss_fn)(rx.read(params), x, y)
        optimizer.apply_gradients(grads, value=jnp.float32(1.0))

    for batch in batches(two):
        two.run(step, batch)
    expected, state = plainly(tx, value=jnp.float32(1.0))
    assert float(state[1].scale) < 1.0
    assert_close(params, expected)
    assert_close(optimizer.state, state)


def test_an_extra_argument_that_differs_between_replicas_is_refused(two):
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5))
    params, optimizer = made(two, tx)

    def step(x, y):
        loss, grads = jax.value_and_grad(loss_fn)(rx.read(params), x, y)
        optimizer.apply_gradients(grads, value=loss)

    with pytest.raises(rx.ReplicaDivergenceError, match="best_value"):
        two.run(step, batches(two)[0])
    assert_close(params, INITIAL)


def test_hyperparameters_can_be_assigned(two):
    tx = optax.inject_hyperparams(optax.sgd)(0.1)
    params, optimizer = made(two, tx)
    step = step_of(params, optimizer)
    optimizer.state.hyperparams["learning_rate"].assign(0.25)
    two.run(step, batches(two)[0])
    assert_close(params, plainly(optax.sgd(0.25), num_steps=1)[0])
    optimizer.state.hyperparams["learning_rate"].assign(0.0)
    two.run(step, batches(two)[1])
    assert_close(params, plainly(optax.sgd(0.25), num_steps=1)[0])


def test_a_step_that_is_not_finite_on_one_replica_is_skipped_by_all(two):
    params, optimizer = made(two, optax.apply_if_finite(optax.sgd(0.1), 3))
    step = step_of(params, optimizer)
    x = X[0].copy()
    x[-1] = np.inf  # on the last replica
    two.run(step, (rows(two, x), rows(two, Y[0])))
    assert int(optimizer.state.notfinite_count) == 1
    assert_close(params, INITIAL)


def test_one_device_needs_another_strategy_only():
    def train(strategy):
        params, optimizer = made(strategy, optax.adam(0.1))
        step = step_of(params, optimizer)
        for batch in batches(strategy):
            strategy.run(step, batch)
        return params

    everywhere = [
        train(rx.get_strategy()),
        train(rx.OneDeviceStrategy("cpu:1")),
        train(rx.MirroredStrategy(["cpu:0", "cpu:1"])),
        train(rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state=True)),
        train(rx.CentralStorageStrategy(["cpu:0", "cpu:1"])),
    ]
    for params in everywhere:
        assert_close(params, plainly(optax.adam(0.1))[0])


# -- how gradients are reduced ---------------------------------------------------------


def test_gradients_are_averaged_added_or_taken_as_they_are(strategies):
    four = strategies[4]

    def moved(reduce, grad):
        params, optimizer = made(four, optax.sgd(1.0), {"w": 0.0}, reduce=reduce)
        four.run(lambda g: optimizer.apply_gradients({"w": g}), (grad,))
        return float(params["w"])

    differing = rx.PerReplica([1.0, 2.0, 3.0, 6.0])
    assert moved("mean", differing) == -3.0
    assert moved("sum", differing) == -12.0
    assert moved("none", jnp.float32(5.0)) == -5.0
    assert moved("sum", jnp.float32(5.0)) == -20.0
    with pytest.raises(rx.ReplicaDivergenceError, match="w"):
        moved("none", differing)


def test_a_step_reduces_its_gradients_in_one_collective(two):
    params, optimizer = made(two, optax.adam(0.1))
    step = step_of(params, optimizer)
    batch = [two.extended.broadcast_to(b) for b in (X[0], Y[0])]
    rows_ = [
        two.experimental_distribute_values_from_function(lambda _, b=b: b[:4])
        for b in batch
    ]
    assert collectives_of(compiled_step(two, step, *rows_)) == ["all-reduce"]


def test_the_hook_sees_reduced_gradients_and_the_norm_is_from_before_it(two):
    clip = optax.clip_by_global_norm(0.1)

    def clipped(grads):
        return clip.update(grads, clip.init(grads))[0]

    params, optimizer = made(two, optax.adam(0.1), on_gradients=clipped)
    step = step_of(params, optimizer)
    norms = [two.run(step, batch)[1] for batch in batches(two)]
    assert not isinstance(norms[0], rx.PerReplica)
    grads = jax.grad(loss_fn)(INITIAL, X[0], Y[0])
    np.testing.assert_allclose(norms[0], norm_of(grads), rtol=1e-6)
    assert norms[0] > 0.1
    assert_close(params, plainly(optax.chain(clip, optax.adam(0.1)))[0])


def test_parameters_and_slots_are_updated_in_their_memory(two):
    params, optimizer = made(two, optax.adam(0.1))
    x, y = (two.run(lambda x: x, (x,)) for x in batches(two)[0])
    memory = compiled_step(two, step_of(params, optimizer), x, y).memory_analysis()
    state = jax.tree.leaves((params, optimizer.state))
    assert memory.alias_size_in_bytes == sum(v.array.nbytes for v in state)


def by_replica(grads):
    r = rx.get_replica_context().replica_id_in_sync_group
    return jax.tree.map(lambda g: g * (r + 1.0), grads)


@pytest.mark.parametrize(
    "settings",
    [{}, {"shard_state": True}, {"shard_state": True, "shard_variables_above": 0}],
)
def test_a_hook_that_differs_between_replicas_is_refused(settings):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], **settings)
    params, optimizer = made(strategy, optax.adam(0.1), on_gradients=by_replica)
    with pytest.raises(rx.ReplicaDivergenceError):
        strategy.run(step_of(params, optimizer), batches(strategy)[0])
    assert_close(params, INITIAL)


@pytest.mark.parametrize(
    "settings",
    [{}, {"shard_state": True}, {"shard_state": True, "shard_variables_above": 0}],
)
def test_gradients_said_to_be_reduced_that_are_not_are_refused(settings):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], **settings)
    params, optimizer = made(strategy, optax.adam(0.1), reduce="none")
    with pytest.raises(rx.ReplicaDivergenceError):
        strategy.run(step_of(params, optimizer), batches(strategy)[0])
    assert_close(params, INITIAL)


@pytest.mark.parametrize("shard_state", [False, True])
def test_the_norm_of_low_precision_gradients_is_precise(shard_state):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state=shard_state)
    initial = {"w": jnp.zeros(1001, jnp.bfloat16)}
    params, optimizer = made(strategy, optax.sgd(0.0), initial)
    grads = {"w": jnp.ones(1001, jnp.bfloat16)}
    norm = strategy.run(lambda: optimizer.apply_gradients(grads))
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, np.sqrt(1001), rtol=1e-6)
    del params


# -- what is refused -------------------------------------------------------------------


def test_pairs_of_gradients_and_variables_are_taken_as_in_tf(two):
    expected, _ = plainly(optax.sgd(0.1), num_steps=1)
    for pair in (
        lambda grads, params: zip(grads.values(), params.values(), strict=True),
        lambda grads, params: [(grads["w"], params["w"]), (grads["b"], params["b"])],
    ):
        params, optimizer = made(two, optax.sgd(0.1))

        def step(x, y, params=params, optimizer=optimizer, pair=pair):
            grads = jax.grad(loss_fn)(rx.read(params), x, y)
            optimizer.apply_gradients(pair(grads, params))

        two.run(step, batches(two)[0])
        assert_close(params, expected)


def test_pairs_are_for_all_variables_and_no_others(two):
    params, optimizer = made(two, optax.sgd(0.1))
    other = rx.Variable(1.0, name="other")
    with pytest.raises(ValueError, match=r"one gradient for each.*missing: .*'w'"):
        optimizer.apply_gradients([(jnp.zeros(2), params["b"])])
    pairs = [(jnp.zeros(v.shape), v) for v in (params["b"], params["w"], other)]
    with pytest.raises(ValueError, match=r"one gradient for each.*'other'"):
        optimizer.apply_gradients(pairs)
    pairs = [(jnp.zeros(v.shape), v) for v in (params["b"], params["w"], params["b"])]
    with pytest.raises(ValueError, match=r"one gradient for each.*twice: .*'b'"):
        optimizer.apply_gradients(pairs)


def test_gradients_of_another_structure_or_shape_are_refused(two):
    params, optimizer = made(two, optax.sgd(0.1))
    grads = {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}
    with pytest.raises(ValueError, match="must have the structure of the optimizer's"):
        optimizer.apply_gradients({"w": grads["w"]})
    with pytest.raises(ValueError, match="must have the structure"):
        optimizer.apply_gradients({**grads, "b": None})
    with pytest.raises(ValueError, match=r"gradient of .*'w'.*\(2, 3\)"):
        optimizer.apply_gradients({**grads, "w": grads["w"].T})
    with pytest.raises(ValueError, match=r"gradient of .*'b'.*\(\)"):
        two.run(lambda: optimizer.apply_gradients({**grads, "b": 0.0}))
    parts = rx.PerReplica([np.zeros((1, 2), np.float32)] * 2)
    with pytest.raises(ValueError, match=r"gradient of .*'b'.*\(1, 2\)"):
        optimizer.apply_gradients({**grads, "b": parts})
    with pytest.raises(
        TypeError, match=r"gradient of .*'b'.* must be an array. Got 'x'"
    ):
        optimizer.apply_gradients({**grads, "b": "x"})
    assert_close(params, INITIAL)


def test_a_hook_must_keep_the_structure(two):
    _, optimizer = made(two, optax.sgd(0.1), on_gradients=lambda grads: grads["w"])
    grads = {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}
    with pytest.raises(ValueError, match="must have the structure"):
        two.run(lambda: optimizer.apply_gradients(grads))


def test_what_no_optimizer_can_be_made_of_is_refused(two):
    with two.scope():
        params = rx.variables(INITIAL)
    tx = optax.sgd(0.1)
    with pytest.raises(TypeError, match=r"needs an Optax transformation.*Got 0.1"):
        rx.Optimizer(0.1, params)
    with pytest.raises(TypeError, match=r"trains rx.Variables.*Got a ndarray"):
        rx.Optimizer(tx, INITIAL)
    with pytest.raises(ValueError, match="at least one variable"):
        rx.Optimizer(tx, {})
    with pytest.raises(ValueError, match="given to the optimizer twice"):
        rx.Optimizer(tx, [params["w"], params["w"]])
    with pytest.raises(ValueError, match="of one strategy"):
        rx.Optimizer(tx, [params["w"], rx.Variable(1.0)])
    with pytest.raises(ValueError, match=r'"mean", "sum" or "none". Got \'max\''):
        rx.Optimizer(tx, params, reduce="max")
    for steps in (0, -1, 1.5):
        with pytest.raises(ValueError, match="accumulate_steps must be a positive int"):
            rx.Optimizer(tx, params, accumulate_steps=steps)


# -- where it can be called ------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8])
def test_between_steps_replicas_are_reduced_and_plain_gradients_are_not(strategies, n):
    strategy = strategies[n]
    expected, _ = plainly(optax.adam(0.1), num_steps=1)
    params, optimizer = made(strategy, optax.adam(0.1))
    norm = optimizer.apply_gradients(per_replica_grads(strategy, params))
    assert_close(params, expected)
    grads = jax.grad(loss_fn)(INITIAL, X[0], Y[0])
    np.testing.assert_allclose(norm, norm_of(grads), rtol=1e-6)
    for plain in (grads, jax.tree.map(np.asarray, grads)):
        params, optimizer = made(strategy, optax.adam(0.1), reduce="sum")
        optimizer.apply_gradients(plain)
        assert_close(params, expected)


def test_a_function_runs_several_steps(two):
    params, optimizer = made(two, optax.adam(0.1))
    step = step_of(params, optimizer)

    @functools.partial(rx.function, steps_per_execution=4)
    def train(batch):
        return two.run(step, batch)[1]

    norms = train(
        [
            tuple(
                two.experimental_distribute_values_from_function(
                    lambda c, x=x: np.split(x, 2)[c.replica_id_in_sync_group]
                )
                for x in batch
            )
            for batch in zip(X, Y, strict=True)
        ]
    )
    assert norms.shape == (4,)
    assert_close(params, plainly(optax.adam(0.1))[0])


def test_a_function_applies_gradients_between_its_steps(two):
    params, optimizer = made(two, optax.adam(0.1))

    @rx.function
    def train(x, y):
        grads = two.run(lambda x, y: jax.grad(loss_fn)(rx.read(params), x, y), (x, y))
        return optimizer.apply_gradients(grads)

    for batch in batches(two):
        train(*(two.run(lambda x: x, (x,)) for x in batch))
    assert_close(params, plainly(optax.adam(0.1))[0])


def test_a_step_scans_over_batches(two):
    params, optimizer = made(two, optax.adam(0.1))
    step = step_of(params, optimizer)

    def train(xs, ys):
        return lax.scan(lambda _, batch: (None, step(*batch)[1]), None, (xs, ys))[1]

    batch = [rx.PerReplica(np.split(b, 2, axis=1)) for b in (X, Y)]
    assert two.run(train, batch).shape == (4,)
    assert_close(params, plainly(optax.adam(0.1))[0])


def test_a_step_applies_gradients_under_a_condition_that_replicas_share(two):
    params, optimizer = made(two, optax.adam(0.1))

    def step(x, y, is_wanted):
        grads = jax.grad(loss_fn)(rx.read(params), x, y)
        return lax.cond(
            is_wanted, optimizer.apply_gradients, lambda _: jnp.float32(0), grads
        )

    assert two.run(step, (*batches(two)[0], np.bool_(False))) == 0
    assert_close(params, INITIAL)
    assert two.run(step, (*batches(two)[0], np.bool_(True))) > 0
    assert_close(params, plainly(optax.adam(0.1), num_steps=1)[0])
    with pytest.raises(rx.DivergentCollectiveError):
        two.run(step, (*batches(two)[0], rx.PerReplica([np.bool_(True)] * 2)))


def test_a_merge_function_applies_gradients(two):
    params, optimizer = made(two, optax.adam(0.1))

    def step(x, y):
        grads = jax.grad(loss_fn)(rx.read(params), x, y)

        def apply(strategy, grads):
            assert strategy is two
            optimizer.apply_gradients(grads)

        rx.get_replica_context().merge_call(apply, (grads,))

    two.run(step, batches(two)[0])
    assert_close(params, plainly(optax.adam(0.1), num_steps=1)[0])


def test_a_jit_that_knows_no_variables_is_refused(two):
    params, optimizer = made(two, optax.sgd(0.1))
    with pytest.raises(rx.ContextError, match=r"rx.function"):
        jax.jit(optimizer.apply_gradients)(rx.read(params))


def test_variables_of_no_scope_are_adopted(strategies):
    for n in (1, 2):
        params = rx.variables(INITIAL)
        optimizer = rx.Optimizer(optax.adam(0.1), params)
        step = step_of(params, optimizer)
        for batch in batches(strategies[n]):
            strategies[n].run(step, batch)
        assert_close(params, plainly(optax.adam(0.1))[0])
    params = rx.variables(INITIAL)
    optimizer = rx.Optimizer(optax.adam(0.1), params)
    optimizer.apply_gradients(jax.grad(loss_fn)(rx.read(params), X[0], Y[0]))
    assert_close(params, plainly(optax.adam(0.1), num_steps=1)[0])


# -- gradient accumulation -------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"shard_state": True}])
def test_gradients_of_several_steps_make_one_update(settings):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], **settings)
    params, optimizer = made(strategy, optax.adam(0.1), accumulate_steps=2)
    step = step_of(params, optimizer)
    halves = [
        (rows(strategy, x), rows(strategy, y))
        for xs, ys in zip(X, Y, strict=True)
        for x, y in zip(np.split(xs, 2), np.split(ys, 2), strict=True)
    ]
    norms = [float(strategy.run(step, half)[1]) for half in halves]
    assert norms[::2] == [0.0] * 4
    grads = jax.grad(loss_fn)(INITIAL, X[0], Y[0])
    np.testing.assert_allclose(norms[1], norm_of(grads), rtol=1e-6)
    assert_close(params, plainly(optax.adam(0.1))[0])


def test_only_the_step_that_updates_communicates(two):
    params, optimizer = made(two, optax.adam(0.1), accumulate_steps=4)
    step = step_of(params, optimizer)
    batch = [
        two.experimental_distribute_values_from_function(lambda _, b=b: b[0, :4])
        for b in (X, Y)
    ]
    program = compiled_step(two, step, *batch)
    assert collectives_of(program) == ["all-reduce"]
    assert branches_with_collectives(program.as_text()) == [False, True]


def branches_with_collectives(text):
    """For each branch of the only conditional, whether it communicates; sorted."""
    computations = dict(re.findall(r"^%?(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    (branches,) = re.findall(r" conditional\(.*branch_computations=\{(.*?)\}", text)
    names = [name.strip().lstrip("%") for name in branches.split(",")]
    return sorted("all-reduce" in computations[name] for name in names)


def test_microbatches_of_a_step_are_reduced_once(two):
    params, optimizer = made(two, optax.adam(0.1))

    def grads_of(batch):
        return jax.value_and_grad(loss_fn)(rx.read(params), *batch)

    def step(x, y):
        loss, grads = rx.accumulate_gradients(grads_of, (x, y), 4)
        optimizer.apply_gradients(grads)
        return loss

    losses = [two.run(step, batch) for batch in batches(two)]
    np.testing.assert_allclose(
        np.mean(losses[0].values), loss_fn(INITIAL, X[0], Y[0]), rtol=1e-6
    )
    assert_close(params, plainly(optax.adam(0.1))[0])
    batch = [
        two.experimental_distribute_values_from_function(lambda _, b=b: b[0, :4])
        for b in (X, Y)
    ]
    assert collectives_of(compiled_step(two, step, *batch)) == ["all-reduce"]


def test_microbatches_take_the_memory_of_one(two):
    def wide_loss(w, x):
        return jnp.mean(jnp.square(jnp.tanh(jnp.tanh(x @ w) @ w.T)))

    with two.scope():
        w = rx.Variable(np.full((8, 512), 0.1, np.float32))
        optimizer = rx.Optimizer(optax.sgd(0.1), w)

    def temporary_bytes(num_microbatches):
        def step(x):
            def grads_of(x):
                return jax.grad(wide_loss)(w.read_value(), x)

            optimizer.apply_gradients(
                rx.accumulate_gradients(grads_of, x, num_microbatches)
            )

        x = two.experimental_distribute_values_from_function(
            lambda _: np.ones((256, 8), np.float32)
        )
        return compiled_step(two, step, x).memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < temporary_bytes(1) / 4


def test_a_batch_that_cannot_be_split_is_refused():
    for num in (3, 0, -1):
        with pytest.raises(ValueError, match=f"8 rows cannot be split into {num}"):
            rx.accumulate_gradients(jnp.sum, X[0], num)


# -- models ----------------------------------------------------------------------------


def test_an_nnx_model(two):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    with two.scope():
        params = rx.variables(state)
        optimizer = rx.Optimizer(optax.adam(0.1), params)

    def nnx_loss(state, x, y):
        return jnp.mean(jnp.square(nnx.merge(graphdef, state)(x) - y))

    step = step_of(params, optimizer, nnx_loss)
    for batch in batches(two):
        two.run(step, batch)
    trained = nnx.merge(graphdef, rx.read(params))
    initial = {"w": model.kernel[...], "b": model.bias[...]}
    expected, _ = plainly(optax.adam(0.1), initial)
    assert_close({"w": trained.kernel[...], "b": trained.bias[...]}, expected)


def test_a_linen_model(two):
    model = linen.Dense(2)
    initial = model.init(jax.random.key(0), X[0])
    params, optimizer = made(two, optax.adam(0.1), initial)

    def linen_loss(params, x, y):
        return jnp.mean(jnp.square(model.apply(params, x) - y))

    step = step_of(params, optimizer, linen_loss)
    for batch in batches(two):
        two.run(step, batch)
    dense = initial["params"]
    expected, _ = plainly(optax.adam(0.1), {"w": dense["kernel"], "b": dense["bias"]})
    dense = params["params"]
    assert_close({"w": dense["kernel"], "b": dense["bias"]}, expected)


@pytest.mark.parametrize("settings", [{}, {"shard_state": True}])
def test_low_precision_parameters_keep_their_dtype(settings):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], **settings)
    initial = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), INITIAL)
    tx = optax.adam(0.1, mu_dtype=jnp.float32)
    params, optimizer = made(strategy, tx, initial, accumulate_steps=1)
    step = step_of(params, optimizer)
    for batch in batches(strategy):
        strategy.run(step, batch)
    expected, state = plainly(tx, initial)
    assert_close(params, expected, rtol=2**-6, atol=2**-6)
    assert_close(optimizer.state, state, rtol=2**-5, atol=2**-5)
