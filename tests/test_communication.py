"""Options of communication, packs, and sums that are sent in fewer bytes."""

import copy
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from replicax.strategies.communication import group_by_size
from replicax.strategies.packing import packs_of
from sklearn.datasets import load_digits

import replicax as rx

Options = rx.CommunicationOptions
BFLOAT16 = Options(compression="bfloat16")
BFLOAT16_SUMMED_WIDE = Options(compression="bfloat16", accumulate_dtype="float32")
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter)(?:-start)?\((.*?)\), "
)


def placed(strategy, *components):
    return strategy.experimental_distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


def random_tree(strategy, shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    trees = [
        {str(i): rng.normal(size=s).astype(dtype) for i, s in enumerate(shapes)}
        for _ in range(strategy.num_replicas_in_sync)
    ]
    return placed(strategy, *trees)


def stacked(tree):
    def is_leaf(x):
        return isinstance(x, rx.PerReplica)

    return jax.tree.map(lambda x: np.stack(x.values), tree, is_leaf=is_leaf)


def all_reduce(op, value, options=None, **kwargs):
    return rx.get_replica_context().all_reduce(op, value, options, **kwargs)


def all_reduce_int8(op, value, residual=None):
    return rx.get_replica_context().all_reduce_int8(op, value, residual)


def collectives(strategy, step, *args):
    """Kind, dtypes and number of arrays of each collective of the compiled step."""
    program = jax.jit(lambda *args: strategy.run(step, args)).lower(*args)
    return [
        (kind, set(re.findall(r"\b([a-z]+\d+)\[", types)), len(sent.split(", ")))
        for types, kind, sent in COLLECTIVE.findall(program.compile().as_text())
    ]


def assert_mirrored_and_equal(tree):
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, rx.PerReplica)):
        assert isinstance(x, jax.Array)
        first, *others = [np.asarray(s.data) for s in x.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(other, first)


# -- options -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bytes_per_pack": -1}, ValueError),
        ({"timeout_seconds": 0}, ValueError),
        ({"implementation": "nccl"}, ValueError),
        ({"implementation": None}, ValueError),
        ({"compression": "zip"}, ValueError),
        ({"accumulate_dtype": "bool"}, TypeError),
        ({"accumulate_dtype": "no dtype"}, TypeError),
    ],
)
def test_what_options_refuse(fields, error):
    with pytest.raises(error):
        Options(**fields)


def test_int8_is_refused_and_says_what_to_call():
    with pytest.raises(ValueError, match="all_reduce_int8"):
        Options(compression="int8")


def test_options_are_frozen_values():
    assert Options(accumulate_dtype="float32") == Options(accumulate_dtype=jnp.float32)
    assert hash(Options(implementation="NCCL")) == hash(
        Options(implementation=rx.CommunicationImplementation.NCCL)
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().bytes_per_pack = 1


def test_merging_takes_what_was_set():
    ours = Options(10, 5.0, "RING", "bfloat16", "float32")
    assert Options(accumulate_dtype="float64") != Options()
    assert ours.merge(None) == ours.merge(Options()) == ours
    assert Options().merge(ours) == ours
    merged = ours.merge(Options(bytes_per_pack=3, accumulate_dtype="float64"))
    assert merged == Options(3, 5.0, "RING", "bfloat16", "float64")
    with pytest.raises(TypeError, match="CommunicationOptions"):
        ours.merge({"bytes_per_pack": 1})


def test_old_names():
    assert rx.CollectiveCommunication is rx.CommunicationImplementation
    assert rx.CollectiveHints(5, 1.0) == Options(5, 1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda two, x: two.run(lambda x: all_reduce("sum", x, 3), (x,)),
        lambda two, x: two.run(
            lambda x: rx.get_replica_context().all_gather(x[None], options=3), (x,)
        ),
        lambda two, x: two.reduce("sum", x, options=3),
        lambda two, x: two.extended.reduce_to("sum", x, "cpu:0", 3),
        lambda two, x: rx.CrossDeviceOps().reduce("sum", x, "cpu:0", 3),
        lambda two, x: rx.get_replica_context().all_reduce("sum", 1.0, 3),
        lambda two, x: rx.MirroredStrategy(["cpu:0"], communication_options=3),
    ],
)
def test_other_options_are_refused(call, two):
    with pytest.raises(TypeError, match="CommunicationOptions"):
        call(two, placed(two, jnp.float32(1), jnp.float32(2)))


# -- packs ---------------------------------------------------------------------------


def test_packs_hold_small_arrays_of_one_dtype_in_reverse():
    small, large = jnp.zeros(100), jnp.zeros(65536)
    half, number = jnp.zeros(8, jnp.bfloat16), jnp.float32(1)
    arrays = [small, half, large, small, half, number, small]
    assert packs_of(arrays, 0) == [[6, 5, 3, 0], [4, 1]]
    assert packs_of(arrays, 15) == [[5, 3]]  # the others are full alone
    assert packs_of(arrays, 400) == [[6, 5], [3, 0], [4, 1]]
    assert packs_of([large, large], 0) == []
    assert packs_of([], 0) == []
    weak = jax.eval_shape(lambda x: x, 1.0)
    assert weak.weak_type
    assert packs_of([weak, small, small], 0) == [[2, 1]]  # it would not stay weak


@pytest.mark.parametrize("sizes", [[], [5], [0, 0, 3], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("bytes_per_pack", [0, 1, 3, 100])
def test_groups_keep_order_and_close_once_they_are_full(sizes, bytes_per_pack):
    groups = group_by_size(sizes, bytes_per_pack)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    assert bytes_per_pack or len(groups) <= 1
    for group in groups[:-1]:
        assert sum(sizes[i] for i in group) > bytes_per_pack
        assert sum(sizes[i] for i in group[:-1]) <= bytes_per_pack


SHAPES = [(3,), (), (5, 7), (300, 300), (0,), (2000,), (1, 1), (256, 257)]


@pytest.mark.parametrize("bytes_per_pack", [0, 8, 5000])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_packing_does_not_change_a_bit(strategy, op, bytes_per_pack):
    tree = random_tree(strategy, SHAPES)
    tree["half"] = random_tree(strategy, [(4,), (9,)], jnp.bfloat16)
    options = Options(bytes_per_pack=bytes_per_pack)

    def one_by_one(tree):
        return jax.tree.map(lambda x: all_reduce(op, x), tree)

    packed = strategy.run(lambda tree, o: all_reduce(op, tree, o), (tree, options))
    alone = strategy.run(one_by_one, (tree,))
    assert_mirrored_and_equal(packed)
    jax.tree.map(np.testing.assert_array_equal, packed, alone)
    assert jax.tree.map(jnp.result_type, packed) == jax.tree.map(jnp.result_type, alone)


def test_what_is_sent(two):
    tree = {
        "small": random_tree(two, [(9,), (2, 3)] * 20),
        "large": random_tree(two, [(256, 256)] * 3),
        "integers": random_tree(two, [(4,)] * 2, np.int32),
    }

    def step(tree, options=None):
        return all_reduce("sum", tree, options)

    def unpacked(tree):
        return lax.psum(tree, "replica")

    def sent(step):
        return sorted(n for _, _, n in collectives(two, step, tree))

    assert sum(sent(unpacked)) == 45
    assert sum(sent(step)) == 3 + 1 + 1
    assert len(sent(step)) == len(sent(unpacked))  # XLA joins what one call sums
    in_packs = functools.partial(step, options=Options(bytes_per_pack=300))
    assert sum(sent(in_packs)) == 3 + 4 + 1


def test_the_gradient_is_the_all_reduce_of_cotangents(two):
    tree = random_tree(two, [(3,), (2, 2), (1200,)])
    weights = random_tree(two, [(3,), (2, 2), (1200,)])

    def step(tree, weights, options):
        def weighted(tree):
            summed = all_reduce("sum", tree, options)
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, weights, summed)))

        return jax.grad(weighted)(tree)

    expected = jax.tree.map(lambda w: w.sum(0), stacked(weights))
    for options, rtol in [(None, 1e-6), (BFLOAT16, 0.02), (BFLOAT16_SUMMED_WIDE, 0.02)]:
        got = two.run(step, (tree, weights, options))
        assert_mirrored_and_equal(got)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=rtol, atol=rtol / 2),
            got,
            expected,
        )


def test_under_vmap_scan_and_jit(two):
    tree = random_tree(two, [(4, 3), (4, 2)])

    def step(tree, options):
        def body(carry, row):
            return carry, all_reduce("mean", row, options)

        mapped = jax.vmap(lambda row: all_reduce("mean", row, options))(tree)
        return mapped, lax.scan(body, 0, tree)[1]

    for options in (None, Options(bytes_per_pack=4)):
        mapped, scanned = two.run(step, (tree, options))
        expected = jax.tree.map(lambda x: x.mean(0), stacked(tree))
        for got in (mapped, scanned):
            assert_mirrored_and_equal(got)
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-6), got, expected
            )


# -- where options come from ---------------------------------------------------------


@pytest.fixture(scope="module")
def short():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"], communication_options=BFLOAT16)


def thirds(strategy, size=2048):
    return placed(strategy, *[np.full(size, 1 / 3, np.float32)] * 2)


ROUNDED = float(jnp.bfloat16(1 / 3)) * 2
EXACT = float(np.float32(1 / 3) * 2)


def merged(strategy, x):
    def step(x):
        return rx.get_replica_context().merge_call(
            lambda strategy, x: strategy.extended.batch_reduce_to("sum", [(x, x)])[0],
            (x,),
        )

    return strategy.run(step, (x,))


WAYS = {
    "all_reduce": lambda s, x: s.run(lambda x: all_reduce("sum", x), (x,)),
    "reduce": lambda s, x: s.reduce("sum", x),
    "reduce_to": lambda s, x: s.extended.reduce_to("sum", x, x),
    "batch_reduce_to": lambda s, x: s.extended.batch_reduce_to("sum", [(x, x)])[0],
    "merge_call": merged,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_strategys_options_hold_for_all_sums(way, two, short):
    assert float(WAYS[way](two, thirds(two))[0]) == EXACT
    assert float(WAYS[way](short, thirds(short))[0]) == ROUNDED
    few = thirds(short, 1023)  # not worth rounding
    assert float(WAYS[way](short, few)[0]) == EXACT


def test_options_of_the_call(two):
    x = thirds(two)
    for got in [
        two.run(lambda x: all_reduce("sum", x, BFLOAT16), (x,)),
        two.reduce("sum", x, options=BFLOAT16),
        two.extended.reduce_to("sum", x, x, BFLOAT16),
        two.extended.batch_reduce_to("sum", [(x, "cpu:1")], BFLOAT16)[0],
        rx.CrossDeviceOps().reduce("sum", x, x, BFLOAT16),
    ]:
        assert (float(got[0]), got.dtype) == (ROUNDED, jnp.float32)


def test_the_accumulation_dtype(two):
    x = placed(two, jnp.bfloat16(256), jnp.bfloat16(1))
    wide = Options(accumulate_dtype="float32")

    def step(x):
        # In bfloat16, 257 is 256; so is the exact mean of 256 and 1.
        scaled = all_reduce("mean", [x, x], wide, accumulate_dtype=jnp.bfloat16)
        return all_reduce("mean", x, wide), scaled

    got, narrow = two.run(step, (x,))
    assert got.dtype == narrow[0].dtype == jnp.bfloat16
    assert float(got) == float(jnp.bfloat16(128.5))
    assert [float(n) for n in narrow] == [128.0] * 2


def test_a_copy_keeps_the_options(short):
    assert copy.deepcopy(short).communication_options == BFLOAT16


def test_a_merge_call_packs_what_it_reduces_together(two):
    values = list(random_tree(two, [(3,), (4,), (5,)]).values())

    def step(*values):
        def merge(strategy, *values):
            return strategy.extended.batch_reduce_to("mean", [(v, v) for v in values])

        return rx.get_replica_context().merge_call(merge, values)

    assert [n for _, _, n in collectives(two, step, *values)] == [1]
    for got, x in zip(two.run(step, tuple(values)), values, strict=True):
        np.testing.assert_allclose(got, np.mean(x.values, 0), rtol=1e-6)


# -- bfloat16 ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [BFLOAT16, BFLOAT16_SUMMED_WIDE])
def test_bfloat16_rounds_floats_alone(strategy, options):
    tree = random_tree(strategy, [(2000,), (300, 300), (100,)])
    tree["integers"] = placed(
        strategy, *[np.arange(2000)] * strategy.num_replicas_in_sync
    )
    got = strategy.run(lambda tree, o: all_reduce("sum", tree, o), (tree, options))
    assert_mirrored_and_equal(got)
    expected = jax.tree.map(lambda x: x.sum(0), stacked(tree))
    for name in ("0", "1"):
        assert got[name].dtype == jnp.float32
        np.testing.assert_allclose(got[name], expected[name], rtol=2**-6, atol=0.05)
    np.testing.assert_allclose(got["2"], expected["2"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["integers"], expected["integers"])


def test_a_sum_of_bfloat16_in_float32_is_rounded_once(strategies):
    eight = strategies[8]
    x = placed(eight, *[np.full(1200, 256.0 if i == 0 else 1.0) for i in range(8)])

    def step(x, options):
        return all_reduce("sum", x.astype(jnp.float32), options)

    # 263 lies between the bfloat16 numbers 262 and 264.
    assert float(eight.run(step, (x, BFLOAT16_SUMMED_WIDE))[0]) == 264.0
    assert collectives(
        eight, functools.partial(step, options=BFLOAT16_SUMMED_WIDE), x
    ) == [("all-to-all", {"u16"}, 8), ("all-gather", {"u16"}, 1)]


# -- int8 ----------------------------------------------------------------------------


def test_int8_is_what_travels(two):
    tree = random_tree(two, [(3,), (300, 1000), (7, 2)])
    step = functools.partial(all_reduce_int8, "mean")
    assert sorted(collectives(two, step, tree), key=str) == [
        ("all-gather", {"s16"}, 1),
        ("all-gather", {"s16"}, 1),
        ("all-reduce", {"f32"}, 1),
        ("all-to-all", {"s8"}, 2),
        ("all-to-all", {"s8"}, 2),
    ]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_int8_against_numpy(strategy, op):
    n = strategy.num_replicas_in_sync
    tree = random_tree(strategy, [(31,), (), (5, 7), (0,)])
    got, residual = strategy.run(all_reduce_int8, (op, tree, None))
    assert_mirrored_and_equal(got)
    for name, x in stacked(tree).items():
        level = np.abs(x).max(initial=0) / 127
        rounded = np.round(x / level) * level if x.size else x
        expected = getattr(np, op)(rounded, axis=0)
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6)
        assert isinstance(residual[name], rx.PerReplica)
        left = np.stack(residual[name].values)
        np.testing.assert_allclose(left, x - rounded, rtol=1e-4, atol=1e-6)
        assert left.shape == (n, *x.shape[1:])


def test_int8_sums_do_not_overflow(strategies):
    eight = strategies[8]
    x = placed(eight, *[np.float32([1.0, -1.0, 0.5])] * 8)
    got, _ = eight.run(all_reduce_int8, ("sum", x, None))
    np.testing.assert_allclose(got, [8.0, -8.0, 4.0], rtol=0.01)


def test_what_rounding_takes_away_arrives_later(two):
    x = placed(two, np.float32([1.0, 1e-3]), np.float32([-1.0, 2e-3]))
    total, lost, residual = np.zeros(2), np.zeros(2), None
    for _ in range(20):
        got, residual = two.run(all_reduce_int8, ("sum", x, residual))
        total += got
        lost += two.run(all_reduce_int8, ("sum", x, None))[0]
    outstanding = np.sum(residual.values, axis=0)
    np.testing.assert_allclose(total + outstanding, [0.0, 0.06], atol=1e-5)
    assert np.all(np.abs(outstanding) <= 2 * 0.5 / 127 + 1e-6)
    assert lost[1] == 0


def test_zeros_and_tiny_values(two):
    tree = [placed(two, *[np.full(3, v, np.float32)] * 2) for v in (0.0, 1e-44, 1e30)]
    got, residual = two.run(all_reduce_int8, ("mean", tree, None))
    assert np.all(np.isfinite(np.stack(got)))
    assert got[0].tolist() == [0.0] * 3
    np.testing.assert_allclose(got[2], 1e30, rtol=1e-5)
    assert all(np.all(np.isfinite(r.values)) for r in residual)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_everywhere_and_is_forgotten(two, bad):
    good = placed(two, np.float32([1.0, 0.3]), np.float32([2.0, 0.3]))
    broken = placed(two, np.float32([1.0, 0.3]), np.float32([bad, 0.3]))
    _, before = two.run(all_reduce_int8, ("sum", [good, good], None))
    got, after = two.run(all_reduce_int8, ("sum", [broken, good], before))
    assert np.isnan(got[0]).all()
    assert_mirrored_and_equal(got)
    assert np.isfinite(got[1]).all()
    np.testing.assert_array_equal(after[0].values, before[0].values)


@pytest.mark.parametrize(
    ("value", "residual", "error", "match"),
    [
        (jnp.ones(2, jnp.int32), None, TypeError, "all_reduce"),
        (jnp.ones(2), jnp.ones(3), ValueError, "residual"),
        ([jnp.ones(2)], jnp.ones(2), ValueError, "residual"),
    ],
)
def test_what_int8_refuses(two, value, residual, error, match):
    with pytest.raises(error, match=match):
        two.run(all_reduce_int8, ("sum", value, residual))


def test_int8_of_nothing_of_halves_and_alone(two):
    assert two.run(all_reduce_int8, ("sum", {}, None)) == ({}, {})
    x = placed(two, jnp.bfloat16([1.0]), jnp.bfloat16([3.0]))
    got, residual = two.run(all_reduce_int8, ("mean", x, None))
    assert (got.dtype, float(got[0])) == (
        jnp.bfloat16,
        255 / 128,
    )  # 42 of 127 levels for 1.0
    assert residual.dtype == jnp.float32
    got, _ = rx.get_replica_context().all_reduce_int8("mean", jnp.float32([2.0]))
    np.testing.assert_allclose(got, [2.0], rtol=1e-6)


# -- training ------------------------------------------------------------------------


def digits():
    images, labels = load_digits(return_X_y=True)
    return np.float32(images / 16), np.int32(labels)


def train(strategy, combine, steps=60):
    """Parameters of a small network after some steps, and its accuracy on the rest."""
    images, labels = digits()
    key = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(key[0], (64, 32)) / 8,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(key[1], (32, 10)) / 6,
        "b2": jnp.zeros(10),
    }

    def logits(params, x):
        return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    def step(params, residual, image, label):
        def loss_fn(params):
            return optax.softmax_cross_entropy_with_integer_labels(
                logits(params, image), label
            ).mean()

        grads, residual = combine(jax.grad(loss_fn)(params), residual)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        return params, residual

    residual = None
    for i in range(steps):
        rows = np.arange(i * 128, (i + 1) * 128) % 1400
        batch = [x[rows].reshape(2, 64, *x.shape[1:]) for x in (images, labels)]
        batch = [placed(strategy, *x) for x in batch]
        params, residual = strategy.run(step, (params, residual, *batch))
    right = jnp.argmax(logits(params, images[1400:]), -1) == labels[1400:]
    return params, float(right.mean())


def distance(a, b):
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)))


def test_training_with_int8_is_as_good_and_feedback_keeps_it_near(two):
    def exact(grads, residual):
        return all_reduce("mean", grads), residual

    def feedback(grads, residual):
        return all_reduce_int8("mean", grads, residual)

    def forgetful(grads, residual):
        return all_reduce_int8("mean", grads)[0], residual

    params, accuracy = train(two, exact)
    assert accuracy > 0.8
    with_feedback, accuracy_with = train(two, feedback)
    without, _ = train(two, forgetful)
    assert abs(accuracy_with - accuracy) <= 0.01
    assert distance(with_feedback, params) < 0.01 * float(optax.tree.norm(params))
    assert distance(with_feedback, params) < distance(without, params) / 3


def test_training_with_bfloat16_is_as_good(two):
    _, accuracy = train(two, lambda g, r: (all_reduce("mean", g), r))
    _, rounded = train(two, lambda g, r: (all_reduce("mean", g, BFLOAT16), r))
    assert abs(rounded - accuracy) <= 0.01
