"""``Strategy.gather`` against numpy, over several numbers of replicas."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


def placed(strategy, components):
    return strategy.experimental_distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_even_components(strategy, axis):
    n = strategy.num_replicas_in_sync
    components = [np.arange(6.0).reshape(2, 3) + 10 * i for i in range(n)]
    out = strategy.gather(placed(strategy, components), axis=axis)
    np.testing.assert_array_equal(out, np.concatenate(components, axis))
    assert isinstance(out, jax.Array)
    assert out.devices() == set(strategy.mesh.devices.flat)
    assert out.sharding.is_fully_replicated


@pytest.mark.parametrize("axis", [0, -2])
def test_uneven_components_come_in_replica_order(strategy, axis):
    # Unequal first dimensions froze or failed.
    n = strategy.num_replicas_in_sync
    components = [np.full((3 - i % 3, 4), i, np.float32) for i in range(n)]
    out = strategy.gather(rx.PerReplica(components), axis=axis)
    np.testing.assert_array_equal(out, np.concatenate(components))
    assert out.devices() == set(strategy.mesh.devices.flat)


def test_uneven_on_the_last_axis(two):
    parts = rx.PerReplica([np.ones((2, 1)), np.zeros((2, 3))])
    np.testing.assert_array_equal(two.gather(parts, axis=-1), [[1, 0, 0, 0]] * 2)


def test_an_empty_component_adds_nothing(two):
    parts = rx.PerReplica([np.array([], np.int32), np.array([1, 2], np.int32)])
    out = two.gather(parts)
    assert out.tolist() == [1, 2]
    assert out.dtype == jnp.int32
    assert two.gather(rx.PerReplica([np.ones((0, 2))] * 2)).shape == (0, 2)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, jnp.bfloat16, np.complex64])
def test_dtypes_are_kept(two, dtype):
    even = [jnp.ones(1, dtype), jnp.zeros(1, dtype)]
    uneven = [jnp.ones(1, dtype), jnp.zeros(2, dtype)]
    for value in (placed(two, even), rx.PerReplica(uneven)):
        out = two.gather(value)
        assert out.dtype == dtype
        assert out.tolist()[:2] == [1, 0]


def test_keys_can_be_gathered(two):
    keys = [jax.random.split(jax.random.key(i), 1) for i in range(2)]
    out = two.gather(placed(two, keys))
    np.testing.assert_array_equal(
        jax.random.key_data(out), jax.random.key_data(jnp.concatenate(keys))
    )


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([np.array(["a"]), np.array(["b"])], id="even"),
        pytest.param([np.array(["a"]), np.array(["bcd", "e"])], id="uneven"),
        pytest.param([["a"], ["b", "c"]], id="lists"),
    ],
)
def test_strings_stay_on_the_host(two, parts):
    out = two.gather(rx.PerReplica(parts))
    assert isinstance(out, np.ndarray)
    assert out.tolist() == np.concatenate(parts).tolist()


class Point(typing.NamedTuple):
    x: typing.Any
    y: typing.Any


def test_structures_are_kept(two):
    # The first replica's part of a dict came back as if it were all.
    x = placed(two, [np.array([1]), np.array([2])])
    ragged = rx.PerReplica([np.array([1.0]), np.array([2.0, 3.0])])
    out = two.gather({"a": x, "b": Point(ragged, None), "c": [x, 3]})
    assert out["a"].tolist() == [1, 2]
    assert isinstance(out["b"], Point)
    assert out["b"].x.tolist() == [1.0, 2.0, 3.0]
    assert out["b"].y is None
    assert out["c"][0].tolist() == [1, 2]
    assert out["c"][1] == 3


def test_a_plain_value_is_returned_once(strategy):
    plain = jnp.arange(3.0)
    assert strategy.gather(plain) is plain
    assert strategy.gather(5) == 5


@pytest.mark.parametrize("axis", [1, -2, None, True, 0.5])
def test_wrong_axes(two, axis):
    even = placed(two, [np.ones(1), np.ones(1)])
    uneven = rx.PerReplica([np.ones(1), np.ones(2)])
    for value in (even, uneven):
        with pytest.raises(ValueError, match="axis"):
            two.gather(value, axis=axis)


def test_scalars_have_no_axis(two):
    for value in (placed(two, [1.0, 2.0]), rx.PerReplica([1, 2.0])):
        with pytest.raises(ValueError, match=r"scalar.*x\[None\]"):
            two.gather(value)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([np.ones((1, 2)), np.ones((1, 3))], id="another axis"),
        pytest.param([np.ones((1, 2)), np.ones(2)], id="rank"),
    ],
)
def test_a_mismatch_is_refused_and_harms_nothing(two, parts):
    with pytest.raises(rx.PerReplicaError, match=r"replica 0: \(1, 2\), replica 1:"):
        two.gather(rx.PerReplica(parts), axis=0)
    assert two.gather(rx.PerReplica([[1], [2, 3]])).tolist() == [1, 2, 3]


def test_another_number_of_replicas_is_refused(two):
    for components in ([[1], [2], [3]], [[1], [2], [3, 4]], [[1]]):
        with pytest.raises(rx.PerReplicaError, match=f"holds {len(components)} comp"):
            two.gather(rx.PerReplica(components))


def test_in_a_jit_of_the_callers(two):
    x = placed(two, [np.ones((1, 2)), np.zeros((1, 2))])
    out = jax.jit(lambda v: two.gather(v, axis=-1))(x)
    assert out.tolist() == [[1.0, 1.0, 0.0, 0.0]]


def test_not_in_a_step(two):
    x = placed(two, [np.ones(1), np.ones(1)])
    with pytest.raises(rx.ContextError, match="all_gather"):
        two.run(lambda x: two.gather(x), (x,))


def test_gathering_scalars_says_what_lists_them():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    scalars = strategy.experimental_distribute_values_from_function(lambda ctx: 1.0)
    with pytest.raises(ValueError, match=r"^gather needs.*experimental_local_results"):
        strategy.gather(scalars)
