"""``MirroredStrategy(shard_state=True)``: slots, and large variables, in slices."""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

from .compiled import collectives_of, compiled_step

LAYERS = (13, 40, 5)
RANDOM = np.random.default_rng(0)
BATCHES = [
    [RANDOM.normal(size=(24, width)).astype(np.float32) for width in LAYERS[::2]]
    for _ in range(3)
]
INITIAL = [
    {
        "b": np.zeros(size[1], np.float32),
        "scale": np.float32(1.0),
        "w": RANDOM.normal(size=size, scale=0.3).astype(np.float32),
    }
    for size in itertools.pairwise(LAYERS)
]
SLICED = {"shard_state": True}
ALL_SLICED = {"shard_state": True, "shard_variables_above": 0}
LARGE_SLICED = {"shard_variables_above": 400}


def mirrored(n, **settings):
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(n)], **settings)


def loss_fn(params, x, y):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.tanh(layer["scale"] * (x @ layer["w"]) + layer["b"])
    return jnp.mean(jnp.square(last["scale"] * (x @ last["w"]) + last["b"] - y))


def trained(strategy, tx, **settings):
    """Trains for a few steps; returns parameters, optimizer and last norm."""
    with strategy.scope():
        params = rx.variables(INITIAL)
        optimizer = rx.Optimizer(tx, params, **settings)

    def step(x, y):
        grads = jax.grad(loss_fn)(rx.read(params), x, y)
        return optimizer.apply_gradients(grads)

    for batch in BATCHES:
        norm = strategy.run(step, tuple(rows(strategy, b) for b in batch))
    return params, optimizer, norm


def rows(strategy, array):
    return rx.PerReplica(np.split(array, strategy.num_replicas_in_sync))


def arrays_of(tree):
    return [np.asarray(v) for v in jax.tree.leaves(tree)]


def bytes_on(device, tree):
    """The bytes of variables that lie on a device."""
    return sum(
        shard.data.nbytes
        for v in jax.tree.leaves(tree)
        for shard in v.array.addressable_shards
        if shard.device == device
    )


TRANSFORMATIONS = {
    "adamw": optax.adamw(optax.exponential_decay(0.1, 2, 0.5), weight_decay=0.1),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.rmsprop)(0.01),
}


@pytest.mark.parametrize(
    ("n", "name", "settings"),
    [
        (1, "adamw", ALL_SLICED),
        (2, "MultiSteps", SLICED),
        (2, "adamw", LARGE_SLICED),
        (2, "inject_hyperparams", ALL_SLICED),
        (3, "adamw", {**SLICED, **LARGE_SLICED}),
        (8, "adamw", SLICED),
    ],
)
def test_slices_train_as_wholes_do(n, name, settings):
    tx = TRANSFORMATIONS[name]
    ours, optimizer, norm = trained(mirrored(n, **settings), tx)
    theirs, whole, whole_norm = trained(mirrored(n), tx)
    np.testing.assert_allclose(norm, whole_norm, rtol=1e-6)
    for a, b in zip(
        arrays_of((ours, optimizer.state)),
        arrays_of((theirs, whole.state)),
        strict=True,
    ):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_each_device_holds_its_part_of_the_bytes(n):
    with mirrored(n, **SLICED).scope():
        params = rx.variables(INITIAL)
        sliced = rx.Optimizer(optax.adam(0.1), params).state
    with mirrored(n).scope():
        whole_params = rx.variables(INITIAL)
        whole = rx.Optimizer(optax.adam(0.1), whole_params).state
    in_all = bytes_on(jax.devices()[0], whole)
    # Padding adds at most an element a slot; the count and scalars are held whole.
    slack = 4 * len(jax.tree.leaves(whole))
    for device in jax.devices()[:n]:
        assert in_all / n <= bytes_on(device, sliced) <= in_all / n + slack
        assert bytes_on(device, params) == bytes_on(device, whole_params)


def test_variables_above_a_size_are_in_slices_too():
    n = 2
    strategy = mirrored(n, **SLICED, shard_variables_above=400)
    params, optimizer, _ = trained(strategy, optax.adam(0.1))
    large = [layer["w"] for layer in params]
    small = [layer[name] for layer in params for name in ("b", "scale")]
    assert min(v.size for v in large) * 4 > 400 >= max(v.size for v in small) * 4
    for device in jax.devices()[:n]:
        for v in large:
            assert bytes_on(device, v) == v.size * 4 // n
        for v in small:
            assert bytes_on(device, v) == v.size * 4
    with strategy.scope():
        buffer = rx.Variable(np.zeros(1000, np.float32), trainable=False)
    assert bytes_on(jax.devices()[0], buffer) == 4000
    del optimizer


@pytest.mark.parametrize("settings", [SLICED, ALL_SLICED, LARGE_SLICED])
def test_collectives_of_a_step(settings):
    strategy = mirrored(2, **settings)
    with strategy.scope():
        w = rx.Variable(np.ones((40, 50), np.float32))
        optimizer = rx.Optimizer(optax.adam(0.1), w)

    def step(x):
        optimizer.apply_gradients(jax.grad(lambda w: jnp.sum(w**2 * x))(w.read_value()))

    x = strategy.run(lambda x: x, (rx.PerReplica([1.0, 2.0]),))
    expected = (
        ["all-gather", "reduce-scatter"]
        if "shard_state" in settings
        else ["all-gather", "all-reduce"]
    )
    assert collectives_of(compiled_step(strategy, step, x)) == expected


@pytest.mark.parametrize(
    ("name", "tx"),
    [
        ("clip_by_global_norm", optax.clip_by_global_norm(0.1)),
        ("scale_by_trust_ratio", optax.lamb(0.1)),
        ("scale_by_factored_rms", optax.adafactor(0.1, min_dim_size_to_factor=2)),
    ],
)
def test_what_mixes_elements_is_refused(name, tx):
    strategy = mirrored(2, **SLICED)
    with strategy.scope():
        params = rx.variables(INITIAL)
        with pytest.raises(ValueError, match="cannot be sliced") as error:
            rx.Optimizer(tx, params)
    text = str(error.value)
    assert "['w']" in text
    assert "on_gradients" in text
    assert f", in {name}" in text


def test_clipping_as_a_hook_sees_the_whole_gradient():
    clip = optax.clip_by_global_norm(0.1)

    def clipped(grads):
        assert [g.shape for g in jax.tree.leaves(grads)] == [
            np.shape(p) for p in jax.tree.leaves(INITIAL)
        ]
        return clip.update(grads, clip.init(grads))[0]

    tx = optax.adam(0.1)
    theirs, _, norm = trained(mirrored(2), optax.chain(clip, tx))
    for settings in (SLICED, ALL_SLICED):
        ours, _, our_norm = trained(mirrored(2, **settings), tx, on_gradients=clipped)
        for a, b in zip(arrays_of(ours), arrays_of(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert norm > 0.1
        np.testing.assert_allclose(our_norm, norm, rtol=1e-6)


@pytest.mark.parametrize("settings", [SLICED, {**SLICED, **LARGE_SLICED}])
def test_steps_of_one_launch_train_as_steps_of_many(settings):
    strategy = mirrored(2, **settings)
    with strategy.scope():
        params = rx.variables(INITIAL)
        optimizer = rx.Optimizer(optax.adam(0.1), params)

    def step(xs, ys):
        def one(_, batch):
            grads = jax.grad(loss_fn)(rx.read(params), *batch)
            return None, optimizer.apply_gradients(grads)

        return jax.lax.scan(one, None, (xs, ys))[1]

    @rx.function
    def train(*batches):
        return strategy.run(step, batches)

    def halves_of_all(arrays):
        halves = np.split(np.stack(arrays), 2, axis=1)
        return strategy.run(lambda x: x, (rx.PerReplica(halves),))

    norms = train(*map(halves_of_all, zip(*BATCHES, strict=True)))
    theirs, whole, norm = trained(mirrored(2), optax.adam(0.1))
    np.testing.assert_allclose(norms[-1], norm, rtol=1e-5)
    for a, b in zip(
        arrays_of((params, optimizer.state)),
        arrays_of((theirs, whole.state)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# -- variables in slices ---------------------------------------------------------------


@pytest.fixture(params=[1, 2, 3])
def sharded(request):
    """A strategy, and a variable of five elements in slices."""
    strategy = mirrored(request.param, shard_variables_above=0)
    with strategy.scope():
        return strategy, rx.Variable(np.arange(5, dtype=np.float32), name="v")


def test_it_is_read_and_assigned_as_a_whole(sharded):
    _, v = sharded
    assert v.shape == (5,)
    np.testing.assert_array_equal(v, [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(v.read_value(), [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(v + 1, [1, 2, 3, 4, 5])
    assert float(v[3]) == 3.0
    before = v.read_value()
    v.assign([5.0, 4.0, 3.0, 2.0, 1.0])
    v.assign_add(np.ones(5))
    np.testing.assert_array_equal(v, [6, 5, 4, 3, 2])
    np.testing.assert_array_equal(before, [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="needs a value of shape"):
        v.assign(np.zeros(6))


def test_one_element_becomes_a_number():
    with mirrored(3, shard_variables_above=0).scope():
        v = rx.Variable([2.5])
    assert float(v[0]) == float(v.read_value()[0]) == 2.5
    assert v.numpy().tolist() == [2.5]


@pytest.mark.parametrize("n", [2, 3])
def test_a_scalar_can_be_held_in_slices(n):
    strategy = mirrored(n, **SLICED)
    with strategy.scope():
        v = rx.Variable(2.5, is_sharded=True)
        optimizer = rx.Optimizer(optax.adam(0.5), v)
    assert float(v) == 2.5
    strategy.run(lambda: optimizer.apply_gradients(1.0))
    assert float(v) == pytest.approx(2.0, rel=1e-5)
    assert v.shape == v.read_value().shape == ()


def test_a_step_reads_and_writes_the_whole(sharded):
    strategy, v = sharded

    def step(x):
        assert v.read_value().shape == (5,)
        x = rx.get_replica_context().all_reduce("sum", x)
        v.assign_add(v * x)

    ones = rx.PerReplica([np.float32(1)] * strategy.num_replicas_in_sync)
    strategy.run(step, (ones,))
    n = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(v, np.arange(5) * (1 + n))


def test_a_step_must_write_the_same_on_all_replicas(sharded):
    strategy, v = sharded

    def step():
        r = rx.get_replica_context().replica_id_in_sync_group
        v.assign(jnp.full(5, r + 1.0))

    with pytest.raises(rx.ReplicaDivergenceError):
        strategy.run(step)
    np.testing.assert_array_equal(v, [0, 1, 2, 3, 4])


def test_a_copy_shares_nothing(sharded):
    strategy, v = sharded
    w = copy.deepcopy(v)
    strategy.run(lambda: w.assign_add(np.ones(5)))
    np.testing.assert_array_equal(v, [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(w, [1, 2, 3, 4, 5])
    assert w.array.sharding == v.array.sharding


def test_functions_read_write_and_run_steps_with_it(sharded):
    strategy, v = sharded

    @rx.function
    def train(steps):
        def body(_, carry):
            strategy.run(lambda: v.assign_add(np.ones(5)))
            return carry + v.read_value()

        total = jax.lax.fori_loop(0, steps, body, jnp.zeros(5))
        v.assign_add(v * 10.0)
        return total

    np.testing.assert_array_equal(train(2), 2 * np.arange(5) + 3)
    np.testing.assert_array_equal(v, 11 * (np.arange(5) + 2))


def test_a_sharded_strategy_can_be_copied():
    strategy = copy.deepcopy(mirrored(2, **ALL_SLICED))
    ours, _, _ = trained(strategy, optax.adam(0.1))
    theirs, _, _ = trained(mirrored(2), optax.adam(0.1))
    assert bytes_on(jax.devices()[1], ours[0]["w"]) == 13 * 40 * 4 // 2
    for a, b in zip(arrays_of(ours), arrays_of(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_state_of_optimizers_in_slices_can_be_assigned():
    strategy = mirrored(3, **SLICED)
    _, optimizer, _ = trained(strategy, optax.adam(0.1))
    mu = optimizer.state[0].mu[0]["b"]
    mu.assign(np.arange(40.0, dtype=np.float32))
    np.testing.assert_array_equal(mu, np.arange(40))
    assert mu.array.shape == (3, 14)
