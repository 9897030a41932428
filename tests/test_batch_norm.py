"""Batch normalisation over replicas, against the whole batch on one device."""

import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.test_util import check_grads
from replicax.strategies.batch_statistics import Moments, batch_moments

import replicax as rx

SWITCH = ["averaged", "local", "synchronized"]
ROWS, FEATURES = 24, 3
RNG = np.random.RandomState(0)
X = RNG.randn(ROWS, FEATURES).astype(np.float32) * [1, 2, 3] + [0, 5, -5]
X = X.astype(np.float32)
PULL = RNG.randn(ROWS, FEATURES).astype(np.float32)
UNEVEN = (np.arange(ROWS) < 10)[:, None]  # at 3 and 8 replicas, the last ones are empty


def split(strategy, array):
    n = strategy.num_replicas_in_sync
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: np.split(np.asarray(array), n)[ctx.replica_id_in_sync_group]
    )


class OfNnx:
    """The layer for nnx, behind what both have in common."""

    def __init__(self, features=FEATURES, **options):
        self.layer = rx.BatchNorm(features, rngs=nnx.Rngs(0), **options)

    def __call__(self, strategy, x, mask=None, use_running_average=False):
        def step(layer, x, mask):
            return layer(x, use_running_average, mask=mask)

        return strategy.run(step, (self.layer, x, mask))

    def moments(self):
        return np.asarray(self.layer.mean), np.asarray(self.layer.var)


class OfLinen:
    """The layer for linen, behind the same."""

    def __init__(self, features=FEATURES, **options):
        self.layer = rx.LinenBatchNorm(**options)
        x = jnp.ones((1, features))
        self.variables = self.layer.init(jax.random.key(0), x, False)

    def __call__(self, strategy, x, mask=None, use_running_average=False):
        layer = self.layer

        def step(variables, x, mask):
            return layer.apply(
                variables, x, use_running_average, mask=mask, mutable="batch_stats"
            )

        y, new = strategy.run(step, (self.variables, x, mask))
        self.variables = {**self.variables, **new}
        return y

    def moments(self):
        stats = rx.assert_mirrored(self.variables["batch_stats"])
        return np.asarray(stats["mean"]), np.asarray(stats["var"])


@pytest.fixture
def strategies():
    """New ones for each test, since all tests run the same few steps."""
    sizes = 1, 2, 3, 8
    return {n: rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in sizes}


@pytest.fixture(params=[OfNnx, OfLinen], ids=["nnx", "linen"])
def norm(request):
    return request.param


def of_whole_batch(x=X, **options):
    """What Flax makes of the rows in ``x`` on one device: output, mean and variance."""
    layer = nnx.BatchNorm(x.shape[-1], rngs=nnx.Rngs(0), **options)
    y = layer(jnp.asarray(x))
    return y, np.asarray(layer.mean), np.asarray(layer.var)


def close(got, wanted, rtol=2e-5, atol=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, wanted
    )


# -- what users have hit -----------------------------------------------------------

ZEROS_AND_TENS = np.float32([[0], [0], [10], [10]])


@pytest.mark.parametrize(
    ("statistics", "mean", "variance", "outputs"),
    [
        ("averaged", 5, 0, [0, 0, 0, 0]),
        ("local", 0, 0, [0, 0, 0, 0]),
        ("synchronized", 5, 25, [-1, -1, 1, 1]),
    ],
)
def test_what_the_switch_does(norm, two, statistics, mean, variance, outputs):
    layer = norm(1, momentum=0.0, statistics=statistics)
    y = layer(two, split(two, ZEROS_AND_TENS))
    assert [m.tolist() for m in layer.moments()] == [[mean], [variance]]
    close(np.ravel(two.gather(y, axis=0)), np.float32(outputs))


def test_averaging_is_the_default(norm):
    assert norm().layer.statistics == "averaged"


def test_evaluation_does_not_depend_on_the_replicas(norm, strategies):
    layer = norm(momentum=0.5)
    layer(strategies[2], split(strategies[2], X))
    before = layer.moments()
    seen = [
        strategy.gather(layer(strategy, split(strategy, X), None, True), axis=0)
        for strategy in strategies.values()
    ]
    for y in seen:
        np.testing.assert_array_equal(y, seen[0])
    np.testing.assert_array_equal(layer.moments(), before)


@pytest.mark.parametrize("fast", [True, False])
def test_unequal_counts_are_weighed(norm, two, fast):
    layer = norm(1, momentum=0.0, statistics="synchronized", use_fast_variance=fast)
    x = split(two, np.float32([[1], [2], [3], [10], [99], [99]]))
    layer(two, x, split(two, np.array([[1], [1], [1], [1], [0], [0]])))
    close(layer.moments(), ([4.0], [12.5]))


def test_an_empty_replica_adds_nothing(norm, two):
    layer = norm(1, momentum=0.0, statistics="synchronized")
    x = split(two, np.float32([[1], [2], [3], [99], [99], [99]]))
    y = layer(two, x, split(two, np.array([[1], [1], [1], [0], [0], [0]])))
    close(layer.moments(), ([2.0], [2 / 3]))
    assert np.isfinite(two.gather(y, axis=0)).all()


def test_an_empty_replica_that_averages_keeps_its_share_of_the_old(norm, two):
    layer = norm(1, momentum=0.0)
    x = split(two, np.float32([[1], [3], [99], [99]]))
    layer(two, x, split(two, np.array([[1], [1], [0], [0]])))
    close(layer.moments(), ([1.0], [1.0]))  # between (2, 1) and the initial (0, 1)


@pytest.mark.parametrize(
    ("statistics", "fast"), [(s, True) for s in SWITCH] + [("synchronized", False)]
)
def test_where_nothing_counts_the_statistics_stay(norm, two, statistics, fast):
    layer = norm(momentum=0.7, statistics=statistics, use_fast_variance=fast)
    layer(two, split(two, X))
    before = layer.moments()
    y = layer(two, split(two, X), split(two, np.zeros((ROWS, 1))))
    np.testing.assert_array_equal(layer.moments(), before)
    assert np.isfinite(two.gather(y, axis=0)).all()


def test_a_batch_without_rows_leaves_the_statistics_alone(norm, two):
    layer = norm(statistics="synchronized")
    y = layer(two, split(two, X[:0]))
    assert two.gather(y, axis=0).shape == (0, FEATURES)
    np.testing.assert_array_equal(layer.moments(), ([0] * FEATURES, [1] * FEATURES))


def test_filler_that_is_not_a_number_does_not_reach_the_statistics(norm, two):
    layer = norm(statistics="synchronized", momentum=0.0)
    x = np.where(UNEVEN, X, np.nan)
    layer(two, split(two, x), split(two, UNEVEN))
    close(layer.moments(), of_whole_batch(X[:10], momentum=0.0)[1:])


# -- the whole batch on one device --------------------------------------------------


def test_synchronized_is_the_whole_batch(norm, strategy):
    layer = norm(statistics="synchronized")
    for _ in range(2):  # the second time, distances are taken from another mean
        y = layer(strategy, split(strategy, X))
    expected = nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(0))
    expected(jnp.asarray(X))
    close(strategy.gather(y, axis=0), expected(jnp.asarray(X)))
    close(layer.moments(), (expected.mean[...], expected.var[...]))


def test_synchronized_over_a_mask_is_the_rows_that_count(norm, strategy):
    layer = norm(statistics="synchronized", momentum=0.0)
    y = layer(strategy, split(strategy, X), split(strategy, UNEVEN))
    expected, *moments = of_whole_batch(X[:10], momentum=0.0)
    close(strategy.gather(y, axis=0)[:10], expected)
    close(layer.moments(), tuple(moments))


def test_averaged_is_the_mean_over_the_parts(norm, strategy):
    layer = norm(momentum=0.5)
    y = layer(strategy, split(strategy, X))
    parts = np.split(X, strategy.num_replicas_in_sync)
    expected = [of_whole_batch(part, momentum=0.5) for part in parts]
    close(strategy.gather(y, axis=0), np.concatenate([e[0] for e in expected]))
    close(layer.moments(), tuple(np.mean([e[i] for e in expected], 0) for i in (1, 2)))


def test_local_keeps_what_replica_0_has_seen(norm, two):
    layer = norm(momentum=0.5, statistics="local")
    layer(two, split(two, X))
    first = np.split(X, 2)[0]
    close(layer.moments(), of_whole_batch(first, momentum=0.5)[1:])


def test_a_padded_batch_is_the_batch(norm, two):
    rows = rx.datasets.from_arrays({"x": np.concatenate([X, X])[:34]}).batch(ROWS)
    options = rx.InputOptions(remainder="pad")
    layer = norm(momentum=0.0, statistics="synchronized")
    for batch in two.experimental_distribute_dataset(rows, options):
        by_row = two.run(lambda mask: mask[:, None], (batch["mask"],))
        layer(two, batch["x"], by_row)
    close(layer.moments(), of_whole_batch(X[:10], momentum=0.0)[1:])


@pytest.mark.parametrize("axis", [-1, 1, (1, 3)])
def test_images_and_their_feature_axes_are_flax_s(axis):
    x = jnp.asarray(RNG.randn(4, 3, 2, 3).astype(np.float32))
    mask = RNG.rand(4, 1, 2, 3) < 0.7
    options = {"axis": axis, "use_running_average": False}
    ours = rx.LinenBatchNorm(**options)
    theirs = nn.BatchNorm(**options)
    variables = theirs.init(jax.random.key(0), x)
    close(ours.init(jax.random.key(0), x), variables)
    got, wanted = (
        layer.apply(variables, x, mask=mask, mutable="batch_stats")
        for layer in (ours, theirs)
    )
    close(got, wanted)


# -- gradients -----------------------------------------------------------------------

WEIGHTS = RNG.randn(FEATURES, FEATURES).astype(np.float32)


def pulled(y, pull, mask):
    return jnp.sum(jnp.where(mask, jnp.tanh(y) * pull, 0)) / 10


def test_gradients_are_those_of_the_whole_batch(norm, strategy):
    mask, kept = UNEVEN, UNEVEN[:, 0]
    # The moments' own gradients are tested below, for both algorithms.
    options = {"statistics": "synchronized"}
    if norm is OfNnx:
        graph, *state = nnx.split(norm(**options).layer, nnx.Param, ...)

        def apply(params, x, mask):
            return nnx.merge(graph, params, state[1], copy=True)(x, mask=mask)

        params = state[0]
    else:
        layer = norm(**options)

        def apply(params, x, mask):
            variables = {**layer.variables, "params": params}
            call = layer.layer.apply
            return call(variables, x, False, mask=mask, mutable="batch_stats")[0]

        params = layer.variables["params"]

    def step(params, w, x, pull, mask):
        def loss(params, w, x):
            return pulled(apply(params, x @ w, mask), pull, mask)

        params, w, x = jax.grad(loss, (0, 1, 2))(params, w, x)
        return rx.get_replica_context().all_reduce("sum", (params, w)), x

    def expected(scale, bias, w, x):
        x = x @ w
        mean, var = x[kept].mean(0), x[kept].var(0)
        y = (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias
        return pulled(y, PULL, mask)

    arrays = [split(strategy, a) for a in (X, PULL, mask)]
    (params, w), x = strategy.run(step, (params, jnp.asarray(WEIGHTS), *arrays))
    scale, bias, *others = jax.grad(expected, (0, 1, 2, 3))(
        jnp.ones(FEATURES), jnp.zeros(FEATURES), WEIGHTS, X
    )
    got = dict(nnx.to_pure_dict(params) if norm is OfNnx else params)
    close(got, {"scale": scale, "bias": bias})
    close([w, strategy.gather(x, axis=0)], others)


@pytest.mark.parametrize("fast", [True, False])
def test_gradients_of_the_moments(fast):
    running = Moments(jnp.ones(2), jnp.ones(2))
    x = jnp.asarray(X[:4, :2])
    mask = jnp.asarray([[True, False], [True, True], [False, True], [True, True]])
    check_grads(
        lambda x: tuple(batch_moments(x, (0,), running, mask=mask, fast=fast)),
        (x,),
        order=1,
        modes=["rev"],
        rtol=1e-2,
    )


# -- numbers -------------------------------------------------------------------------


def test_half_precision_is_summed_in_float32(norm, two):
    x = jnp.asarray(1 + RNG.rand(4096, 1), jnp.bfloat16)
    layer = norm(1, momentum=0.0, statistics="synchronized", dtype=jnp.bfloat16)
    y = layer(two, split(two, x))
    whole = np.asarray(x, np.float64)
    close(layer.moments(), (whole.mean(0), whole.var(0)), rtol=1e-5)
    assert y.dtype == jnp.bfloat16
    wanted = (whole - whole.mean(0)) / np.sqrt(whole.var(0) + 1e-5)
    got = np.asarray(two.gather(y, axis=0), np.float64)
    np.testing.assert_allclose(got, wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
def test_the_result_has_the_dtype_that_flax_gives_it(dtype):
    x = jnp.ones((2, 1), jnp.bfloat16)
    for scaled in (True, False):
        options = {"dtype": dtype, "use_scale": scaled, "use_bias": scaled}
        ours = rx.BatchNorm(1, rngs=nnx.Rngs(0), **options)
        theirs = nnx.BatchNorm(1, rngs=nnx.Rngs(0), **options)
        assert ours(x).dtype == theirs(x).dtype
        options["use_running_average"] = False
        ours, theirs = rx.LinenBatchNorm(**options), nn.BatchNorm(**options)
        dtypes = [
            layer.init_with_output(jax.random.key(0), x)[0].dtype
            for layer in (ours, theirs)
        ]
        assert dtypes[0] == dtypes[1]


def test_a_small_spread_beside_a_large_mean(two):
    x = (1000 + RNG.randn(ROWS, 1) / 100).astype(np.float32)
    wanted = x.astype(np.float64).var(0)

    def variance(fast, running_mean):
        def step(x, running):
            return batch_moments(
                x,
                (0,),
                running,
                total=lambda sums: rx.get_replica_context().all_reduce("sum", sums),
                fast=fast,
            )

        running = Moments(jnp.asarray([running_mean]), jnp.ones(1))
        return np.asarray(two.run(step, (split(two, x), running)).variance)

    np.testing.assert_allclose(variance(True, 999.9), wanted, rtol=1e-3)
    np.testing.assert_allclose(variance(False, 999.9), wanted, rtol=1e-3)
    # Without a running mean that is near, the digits are lost, unless asked for.
    assert abs(variance(True, 0.0) / wanted - 1) > 0.5
    np.testing.assert_allclose(variance(False, 0.0), wanted, rtol=1e-2)


# -- what is communicated ------------------------------------------------------------


class Deep(nn.Module):
    """Two layers of linen with a batch norm each."""

    options: dict

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            norm = rx.LinenBatchNorm(use_running_average=False, **self.options)
            x = jnp.tanh(norm(nn.Dense(FEATURES)(x)))
        return jnp.mean(x)


class DeepNnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, options):
        rngs = nnx.Rngs(0)
        layers = []
        for _ in range(2):
            layers.append(nnx.Linear(FEATURES, FEATURES, rngs=rngs))
            layers.append(rx.BatchNorm(FEATURES, rngs=rngs, **options))
            layers.append(jnp.tanh)
        self.layers = nnx.Sequential(*layers)

    def __call__(self, x):
        return jnp.mean(self.layers(x))


def linen_program(strategy, options):
    model = Deep(options)
    variables = model.init(jax.random.key(0), X)

    def step(variables, x):
        def loss(params):
            changed = {**variables, "params": params}
            return model.apply(changed, x, mutable=["batch_stats"])

        grads, new = jax.grad(loss, has_aux=True)(variables["params"])
        return rx.get_replica_context().all_reduce("mean", grads), new

    run = jax.jit(lambda variables, x: strategy.run(step, (variables, x)))
    return run.lower(variables, split(strategy, X))


def nnx_program(strategy, options):
    def step(model, x):
        grads = nnx.grad(lambda model: model(x))(model)
        return rx.get_replica_context().all_reduce("mean", grads)

    run = nnx.jit(lambda model, x: strategy.run(step, (model, x)))
    return run.lower(DeepNnx(options), split(strategy, X))


@pytest.mark.parametrize("program", [nnx_program, linen_program])
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"statistics": "averaged"}, 1),
        ({"statistics": "local"}, 1),
        # Forwards and backwards one for each layer, and one for the gradients.
        ({"statistics": "synchronized"}, 2 + 2 + 1),
        ({"statistics": "synchronized", "use_fast_variance": False}, 4 + 4 + 1),
    ],
)
def test_how_often_replicas_communicate(two, program, options, count):
    text = program(two, options).compile().as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"^\s*\S+ = .*? ({kinds})(?:-start)?\(", text, re.MULTILINE)
    assert found == ["all-reduce"] * count


def test_evaluation_communicates_nothing(norm, two):
    layer = norm(statistics="synchronized").layer
    variables = {"batch_stats": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}
    variables["params"] = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}

    def step(x):
        if norm is OfNnx:
            return layer(x, use_running_average=True)
        return layer.apply(variables, x, use_running_average=True)

    run = jax.jit(lambda x: two.run(step, (x,)))
    assert "all-reduce" not in run.lower(split(two, X)).compile().as_text()


# -- where there is nobody to talk to ------------------------------------------------


@pytest.mark.parametrize("statistics", SWITCH)
def test_without_a_strategy_and_in_a_scope_it_is_flax_s(two, statistics):
    wanted = of_whole_batch(X)

    def nnx_result():
        layer = rx.BatchNorm(FEATURES, statistics=statistics, rngs=nnx.Rngs(0))
        return layer(jnp.asarray(X)), layer.mean[...], layer.var[...]

    def linen_result():
        layer = rx.LinenBatchNorm(use_running_average=False, statistics=statistics)
        variables = layer.init(jax.random.key(0), X)
        y, new = layer.apply(variables, X, mutable="batch_stats")
        return y, new["batch_stats"]["mean"], new["batch_stats"]["var"]

    for result in (nnx_result, linen_result):
        close(result(), wanted)
        with two.scope():
            close(result(), wanted)


def test_it_trains_and_evaluates_as_its_mode_says():
    layer = rx.BatchNorm(FEATURES, rngs=nnx.Rngs(0))
    layer.eval()
    close(layer(jnp.asarray(X)), X)
    layer.train()
    close(layer(jnp.asarray(X)), of_whole_batch(X)[0])
    layer = rx.BatchNorm(FEATURES, use_running_average=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="No `use_running_average` argument"):
        layer(jnp.asarray(X))


# -- what is refused -----------------------------------------------------------------


def test_other_values_of_the_switch_are_refused(norm):
    with pytest.raises(ValueError, match=r"one of 'averaged'.*Got 'sync'"):
        norm(statistics="sync")


def test_a_named_axis_is_refused(norm):
    with pytest.raises(ValueError, match=r"statistics=.synchronized."):
        norm(axis_name="replica")


def test_a_mask_of_rows_alone_is_refused(norm, two):
    # Of as many rows as there are features, it would mask features.
    with pytest.raises(ValueError, match=r"mask\.reshape\(-1, 1\)"):
        norm()(two, split(two, X), split(two, UNEVEN[:, 0]))


def test_running_means_that_differ_are_refused(two):
    layer = OfLinen(1, statistics="synchronized")
    means = rx.PerReplica([jnp.zeros(1), jnp.ones(1)])
    layer.variables["batch_stats"]["mean"] = means
    with pytest.raises(rx.ReplicaDivergenceError, match="running mean"):
        layer(two, split(two, ZEROS_AND_TENS))


# -- the face ------------------------------------------------------------------------


def test_flax_is_loaded_when_a_layer_is_asked_for(tmp_path):
    code = """
import sys
import replicax as rx
assert {"BatchNorm", "LinenBatchNorm"} <= set(dir(rx)) and "flax" not in sys.modules
assert rx.BatchNorm.__module__ == rx.LinenBatchNorm.__module__ == "replicax"
assert "flax" in sys.modules and not hasattr(rx, "LayerNorm")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == 0


def test_layers_are_pickled_by_their_public_name():
    assert pickle.loads(pickle.dumps(rx.BatchNorm)) is rx.BatchNorm
