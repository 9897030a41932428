"""``Strategy.reduce`` against numpy, over several numbers of replicas."""

import dataclasses
import typing

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


def placed(strategy, components):
    return strategy.experimental_distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


def random_components(n, shape=(2, 3, 4), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(n)]


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# -- which dimensions ----------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    "axis",
    [None, 0, -1, (0, 2), [-1, 0], (), np.int64(1)],
    ids=["none", "int", "negative", "tuple", "list", "no axes", "numpy int"],
)
def test_axes(strategy, op, axis):
    components = random_components(strategy.num_replicas_in_sync)
    axes = {None: (), (): ()}.get(axis if not isinstance(axis, list) else 0, axis)
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (int(axes),)
    # Replicas become one more dimension, in front of those that are counted from it.
    over = (0, *(a % 3 + 1 for a in axes))
    expected = getattr(np, op)(np.stack(components), axis=over)
    out = strategy.reduce(op, placed(strategy, components), axis=axis)
    close(out, expected)
    assert out.dtype == jnp.float32


def test_the_axis_may_be_left_out(two):
    # It died with a missing-argument TypeError.
    assert two.reduce(rx.ReduceOp.MEAN, placed(two, [1.0, 3.0])) == 2.0
    assert two.reduce("SUM", placed(two, [1.0, 3.0])) == 4.0


def test_the_result_is_one_plain_array_on_all_devices(strategy):
    n = strategy.num_replicas_in_sync
    out = strategy.reduce("sum", placed(strategy, [1.0] * n))
    assert type(out) is type(jnp.ones(()))
    assert out.sharding.is_fully_replicated
    assert out.devices() == set(strategy.mesh.devices.flat)
    assert float(out) == n
    rx.assert_mirrored(out)


@pytest.mark.parametrize(
    ("axis", "kind", "message"),
    [
        (1, ValueError, r"axis 1 .* 1 dimensions"),
        (-2, ValueError, r"axis -2 .* 1 dimensions"),
        ((0, 0), ValueError, "twice"),
        ((0, -1), ValueError, "duplicate"),
        (True, TypeError, "axis is an int"),
        (0.0, TypeError, "axis is an int"),
        ("x", TypeError, "axis is an int"),
    ],
)
def test_wrong_axes(two, axis, kind, message):
    with pytest.raises(kind, match=message):
        two.reduce("sum", placed(two, [np.ones(2)] * 2), axis=axis)


def test_a_scalar_has_no_axis(two):
    with pytest.raises(ValueError, match="at least one dimension"):
        two.reduce("sum", placed(two, [1.0, 2.0]), axis=0)


def test_unknown_ops(two):
    with pytest.raises(ValueError, match="'max' is not a ReduceOp"):
        two.reduce("max", placed(two, [1.0, 2.0]))
    with pytest.raises(TypeError, match="first argument is a ReduceOp"):
        two.reduce(jnp.add, placed(two, [1.0, 2.0]))


# -- unequal components --------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("axis", [0, -2])
def test_a_mean_counts_rows_not_replicas(strategy, op, axis):
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(1)
    components = [rng.normal(size=(1 + 2 * i % 5, 3)) for i in range(n)]
    expected = getattr(np, op)(np.concatenate(components), axis=0)
    close(strategy.reduce(op, rx.PerReplica(components), axis=axis), expected)


def test_an_empty_component_counts_nothing(strategies):
    parts = [np.array([1.0, 2.0]), np.array([]), np.array([6.0])]
    assert strategies[3].reduce("mean", rx.PerReplica(parts), axis=0) == 3.0
    assert strategies[3].reduce("sum", rx.PerReplica(parts), axis=0) == 9.0


def test_the_mean_of_nothing_is_nan(two):
    nothing = rx.PerReplica([np.array([]), np.array([])])
    assert np.isnan(two.reduce("mean", nothing, axis=0))
    assert two.reduce("sum", nothing, axis=0) == 0.0


def test_lists_of_numbers_are_components(two):
    assert two.reduce("mean", rx.PerReplica([[1, 2, 3], [10]]), axis=0) == 4.0


def test_unequal_shapes_need_an_axis(two):
    ragged = rx.PerReplica([np.ones(3), np.ones(1)])
    with pytest.raises(rx.PerReplicaError, match=r"\(3,\).*\(1,\).*axis=0"):
        two.reduce("mean", ragged)


def test_unequal_shapes_on_another_axis_are_refused(two):
    ragged = rx.PerReplica([np.ones((2, 3)), np.ones((2, 1))])
    close(two.reduce("mean", ragged, axis=1), [1.0, 1.0])
    with pytest.raises(rx.PerReplicaError, match="still have unequal shapes"):
        two.reduce("mean", ragged, axis=0)


@pytest.mark.parametrize("axis", [None, 0])
def test_unequal_dtypes_are_promoted(two, axis):
    mixed = rx.PerReplica([np.array([1], np.int32), np.array([2.5], np.float32)])
    out = two.reduce("sum", mixed, axis=axis)
    assert out.dtype == jnp.float32
    close(out, 3.5 if axis == 0 else [3.5])


def test_another_number_of_replicas_is_refused(two):
    for components in ([1.0, 2.0, 3.0], [[1.0], [2.0], [3.0, 4.0]], [1.0]):
        with pytest.raises(rx.PerReplicaError, match=f"holds {len(components)} comp"):
            two.reduce("sum", rx.PerReplica(components), axis=None)


# -- weights -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
def test_a_mask_makes_the_mean_of_a_padded_batch_exact(strategy, dtype):
    n = strategy.num_replicas_in_sync
    losses = random_components(n, (4,))
    masks = [(np.arange(4) <= i % 4).astype(dtype) for i in range(n)]
    kept = np.concatenate([x[m > 0] for x, m in zip(losses, masks, strict=True)])
    out = strategy.reduce(
        "mean", placed(strategy, losses), axis=0, weights=placed(strategy, masks)
    )
    close(out, kept.mean())
    assert out.dtype == jnp.float32


def test_a_padded_row_may_hold_anything(two):
    losses = placed(two, [np.array([1.0, 2.0]), np.array([6.0, np.nan])])
    mask = placed(two, [np.array([1.0, 1.0]), np.array([1.0, 0.0])])
    assert two.reduce("mean", losses, axis=0, weights=mask) == 3.0
    assert two.reduce("sum", losses, axis=0, weights=mask) == 9.0


def test_without_an_axis_each_replica_has_a_weight(two):
    x = placed(two, [np.array([1.0, 2.0]), np.array([6.0, 7.0])])
    weights = placed(two, [3.0, 2.0])
    close(two.reduce("mean", x, weights=weights), [3.0, 4.0])
    close(two.reduce("sum", x, weights=weights), [15.0, 20.0])


def test_weights_of_one_dimension_are_for_the_reduced_one(two):
    components = random_components(2, (2, 3))
    for axis, length in ((0, 2), (1, 3)):
        weights = [np.arange(length) + 1.0, np.ones(length)]
        expected = sum(
            np.tensordot(w, x, (0, axis))
            for w, x in zip(weights, components, strict=True)
        ) / np.sum(weights)
        out = two.reduce(
            "mean", placed(two, components), axis=axis, weights=placed(two, weights)
        )
        close(out, expected)


def test_weights_of_all_dimensions(two):
    components, weights = random_components(2, (2, 3)), random_components(2, (2, 3), 1)
    out = two.reduce(
        "mean", placed(two, components), axis=(0, 1), weights=placed(two, weights)
    )
    close(out, np.average(components, weights=weights))


def test_weights_may_be_a_structure_like_the_values(two):
    x = placed(two, [1.0, 6.0])
    out = two.reduce(
        "mean",
        {"a": x, "b": [x]},
        weights={"a": placed(two, [3.0, 2.0]), "b": [placed(two, [1.0, 1.0])]},
    )
    assert out == {"a": 3.0, "b": [3.5]}


def test_one_weight_serves_all_values(two):
    x = placed(two, [1.0, 6.0])
    out = two.reduce("mean", {"a": x, "b": x}, weights=placed(two, [3.0, 2.0]))
    assert out == {"a": 3.0, "b": 3.0}
    assert two.reduce("sum", x, weights=2) == 14.0


def test_weights_of_unequal_components(two):
    parts = rx.PerReplica([np.array([1.0, 2.0, 9.0]), np.array([6.0])])
    mask = rx.PerReplica([np.array([1.0, 1.0, 0.0]), np.array([1.0])])
    assert two.reduce("mean", parts, axis=0, weights=mask) == 3.0
    assert two.reduce("mean", parts, axis=0, weights=placed(two, [1.0, 3.0])) == 5.0


def test_wrong_weights(two):
    x = placed(two, [np.ones(2)] * 2)
    with pytest.raises(ValueError, match=r"shape \(3,\) do not fit .* \(2,\)"):
        two.reduce("mean", x, axis=0, weights=placed(two, [np.ones(3)] * 2))
    with pytest.raises(ValueError, match="replicas only"):
        two.reduce("mean", x, weights=placed(two, [np.ones(3)] * 2))
    for weights in ({"a": 1.0}, {}):
        with pytest.raises(ValueError, match="values' structure"):
            two.reduce("mean", {"a": x, "b": x}, weights=weights)
    with pytest.raises(rx.PerReplicaError, match="holds 3"):
        two.reduce("mean", x, weights=rx.PerReplica([1.0, 2.0, 3.0]))


# -- dtypes --------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        pytest.param(np.int8, 100, id="int8"),
        pytest.param(np.uint8, 200, id="uint8"),
        pytest.param(np.int16, 30_000, id="int16"),
        pytest.param(np.int32, 2_000_000_000, id="int32"),
        pytest.param(np.uint32, 4_000_000_000, id="uint32"),
    ],
)
def test_a_mean_of_integers_divides_truly_and_does_not_overflow(
    two, dtype, number, axis
):
    out = two.reduce("mean", placed(two, [np.full(2, number, dtype)] * 2), axis=axis)
    assert out.dtype == jnp.float32
    close(out, np.full(2, number) if axis is None else number)
    ragged = rx.PerReplica([np.full(2, number, dtype), np.full(1, number, dtype)])
    close(two.reduce("mean", ragged, axis=0), number)


def test_dtype_rules(two):
    # A sum of bfloat16 loses what is small, a mean of int32 is a float.
    assert two.reduce("sum", placed(two, [jnp.bfloat16(256), jnp.bfloat16(1)])) == 256
    mean = two.reduce("mean", placed(two, [np.int32(1), np.int32(2)]))
    assert (float(mean), mean.dtype) == (1.5, jnp.float32)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_inexact_dtypes_are_kept(two, dtype, op):
    x = placed(two, [jnp.array([1, 2], dtype), jnp.array([3, 6], dtype)])
    weights = placed(two, [jnp.ones(2, jnp.float32)] * 2)
    for axis in (None, 0):
        for kwargs in ({}, {"accumulate_dtype": dtype}, {"weights": weights}):
            out = two.reduce(op, x, axis=axis, **kwargs)
            assert out.dtype == dtype
            expected = [4, 8] if axis is None else 12
            counts = 2 if axis is None else 4
            close(
                np.asarray(out, np.complex64),
                np.array(expected) / (counts if op == "mean" else 1),
            )


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8])
def test_sums_of_integers_are_kept(two, dtype):
    out = two.reduce("sum", placed(two, [dtype(3), dtype(4)]))
    assert (int(out), out.dtype) == (7, dtype)


def test_a_sum_may_be_made_in_a_wider_dtype(strategies):
    two, eight = strategies[2], strategies[8]
    x = placed(eight, [jnp.bfloat16(256)] + [jnp.bfloat16(1)] * 7)
    wide = eight.reduce("sum", x, accumulate_dtype=jnp.float32)
    assert (float(wide), wide.dtype) == (264.0, jnp.bfloat16)  # 263, rounded once
    large = placed(two, [np.float16(60_000)] * 2)  # their sum is infinite
    assert np.isinf(two.reduce("sum", large))
    assert float(two.reduce("mean", large)) == 60_000.0
    many = placed(two, [np.full(4096, 100, np.float16)] * 2)
    assert float(two.reduce("mean", many, axis=0)) == 100.0
    wide = two.reduce("mean", large, accumulate_dtype=jnp.float32)
    assert (float(wide), wide.dtype) == (60_000.0, jnp.float16)
    ones = placed(two, [jnp.ones(300, jnp.bfloat16)] * 2)
    wide = two.reduce("sum", ones, axis=0, accumulate_dtype=jnp.float32)
    assert (float(wide), wide.dtype) == (600.0, jnp.bfloat16)
    ragged = rx.PerReplica([jnp.ones(257, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)])
    wide = two.reduce("sum", ragged, axis=0, accumulate_dtype=jnp.float32)
    assert (float(wide), wide.dtype) == (260.0, jnp.bfloat16)
    exact = two.reduce("sum", placed(two, [np.int8(100)] * 2), accumulate_dtype="int32")
    assert (int(exact), exact.dtype) == (200, jnp.int32)


def test_many_bfloat16_weights_are_counted_right(two):
    x = placed(two, [np.ones(301, np.float32), np.zeros(301, np.float32)])
    mask = placed(two, [jnp.ones(301, jnp.bfloat16), jnp.zeros(301, jnp.bfloat16)])
    assert two.reduce("mean", x, axis=0, weights=mask) == 1.0


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_bools_have_no_sum(two, op, axis):
    true = np.array([True])
    for value in (placed(two, [true, true]), rx.PerReplica([true, true.repeat(2)])):
        with pytest.raises(TypeError, match=r"bool.*astype"):
            two.reduce(op, value, axis=axis)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["a", "b"], id="strings"),
        pytest.param([["a"], ["b", "c"]], id="unequal strings"),
        pytest.param([len, max], id="functions"),
    ],
)
def test_what_is_no_number_has_no_sum(two, parts):
    with pytest.raises(TypeError, match="SUM needs numbers"):
        two.reduce("sum", rx.PerReplica(parts), axis=0)


# -- structures and plain values -----------------------------------------------------


class Point(typing.NamedTuple):
    x: typing.Any
    y: typing.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: typing.Any
    b: typing.Any


@flax.struct.dataclass
class State:
    loss: typing.Any
    name: str = flax.struct.field(pytree_node=False)


def test_structures_are_kept(two):
    x = placed(two, [1.0, 3.0])
    vector = placed(two, [np.ones(2), np.zeros(2)])
    tree = {"p": Point(x, None), "q": Pair(vector, (x,)), "s": State(x, "sgd")}
    out = two.reduce("mean", tree)
    assert out["p"] == Point(2.0, None)
    assert isinstance(out["q"], Pair)
    assert out["q"].a.tolist() == [0.5, 0.5]
    assert out["q"].b == (2.0,)
    assert isinstance(out["s"], State)
    assert (float(out["s"].loss), out["s"].name) == (2.0, "sgd")
    assert two.reduce("mean", {}) == {}
    assert two.reduce("mean", None) is None


def test_equal_and_unequal_components_mix(two):
    tree = [placed(two, [np.ones(2), np.zeros(2)]), rx.PerReplica([[1.0], [2.0, 6.0]])]
    assert two.reduce("mean", tree, axis=0) == [0.5, 3.0]


def test_a_plain_value_is_not_summed_over_replicas(strategies):
    plain = jnp.float32(3.0)
    for n in (2, 3, 8):
        with pytest.raises(ValueError, match=f"same on all {n} replicas"):
            strategies[n].reduce("sum", plain)
        with pytest.raises(ValueError, match="same on all"):
            strategies[n].reduce("sum", {"a": 0.0})
    assert strategies[1].reduce("sum", plain) is plain


def test_a_mean_of_a_plain_value_is_the_value(strategy):
    plain = jnp.arange(3.0)
    assert strategy.reduce("mean", plain) is plain
    assert strategy.reduce("mean", {"a": 3, "b": None}) == {"a": 3, "b": None}


def test_with_an_axis_a_plain_value_stands_on_every_replica(strategy):
    n = strategy.num_replicas_in_sync
    assert strategy.reduce("sum", jnp.array([1.0, 2.0]), axis=0) == 3.0 * n
    assert strategy.reduce("mean", np.array([1.0, 2.0]), axis=0) == 1.5


def test_summed_shares_of_the_global_batch_are_summed_not_averaged(two):
    # Losses divided by the global batch and then averaged came out N times too small.
    def step(losses):
        return jnp.sum(losses) / 8

    shares = two.run(step, (placed(two, [np.full(4, 1.0), np.full(4, 3.0)]),))
    assert [float(v) for v in shares.values] == [0.5, 1.5]
    assert two.reduce("sum", shares) == 2.0
    assert two.reduce("mean", shares) == 1.0


# -- where it may be called ----------------------------------------------------------


def test_in_a_jit_of_the_callers(two):
    x = placed(two, random_components(2, (2, 3)))
    out = jax.jit(lambda v: two.reduce("mean", v, axis=-1))(x)
    close(out, two.reduce("mean", x, axis=-1))


def test_its_gradient(two):
    x = placed(two, [1.0, 3.0])

    def loss(w):
        return two.reduce("mean", two.run(lambda w, x: w * w * x, (w, x)))

    assert jax.grad(loss)(2.0) == 8.0


def test_not_in_a_step(two):
    x = placed(two, [1.0, 3.0])
    with pytest.raises(rx.ContextError, match="all_reduce"):
        two.run(lambda x: two.reduce("sum", x), (x,))


def test_not_in_the_scope_of_another_strategy(strategies):
    x = placed(strategies[2], [1.0, 3.0])
    with strategies[3].scope(), pytest.raises(rx.ContextError, match="another"):
        strategies[2].reduce("sum", x)
    with strategies[2].scope():
        assert strategies[2].reduce("sum", x) == 4.0


def test_weights_that_could_be_meant_in_two_ways_are_refused():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    square = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.ones((4, 4), np.float32)
    )
    rows = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.float32([1, 1, 0, 0])
    )
    with pytest.raises(ValueError, match=r"\(4,\) do not fit values of shape \(4, 4\)"):
        strategy.reduce("mean", square, axis=(0, 1), weights=rows)
    assert strategy.reduce("sum", square, axis=0, weights=rows).tolist() == [4.0] * 4


def test_weights_of_another_dtype_need_no_implicit_promotion(two):
    x = placed(two, [np.float32([1, 2]), np.float32([3, 4])])
    mask = placed(two, [np.array([True, True]), np.array([True, False])])
    with jax.numpy_dtype_promotion("strict"):
        assert float(two.reduce("mean", x, axis=0, weights=mask)) == 2.0
        half = placed(two, [jnp.bfloat16(1), jnp.bfloat16(3)])
        weights = rx.PerReplica([np.float32(1), np.float32(3)])
        assert float(two.reduce("mean", half, weights=weights)) == 2.5
