"""Per-replica values: made, looked at, converted, and sent through JAX."""

import copy
import dataclasses
import pickle
import typing

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


def values(strategy, *components):
    return strategy.experimental_distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


def lists(value):
    return [np.asarray(v).tolist() for v in value.values]


# -- as one value --------------------------------------------------------------------

CONVERSIONS = {
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
    "index": lambda v: range(10)[v],
    "item": lambda v: v.item(),
    "numpy": np.asarray,
    "numpy of a dtype": lambda v: np.asarray(v, dtype=np.float64),
    "jax": jnp.asarray,
    "jax arithmetic": lambda v: jnp.add(v, 1),
    "format": lambda v: f"{v:3d}",
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_the_first_replica_never_stands_for_all(strategies, convert):
    # A logged loss was silently the first replica's.
    unequal = values(strategies[2], 1, 3)
    with pytest.raises(rx.PerReplicaError, match=r"2 replicas.*reduce\('mean'"):
        convert(unequal)
    equal = values(strategies[2], 1, 1)
    with pytest.raises(rx.PerReplicaError):
        convert(equal)


def test_the_value_of_one_replica_converts_by_itself(strategies):
    one = values(strategies[1], 3)
    assert float(one) == 3.0
    assert int(one) == 3
    assert complex(one) == 3 + 0j
    assert bool(one) is True
    assert range(10)[one] == 3
    assert one.item() == 3
    assert f"{one:03d}" == "003"
    assert np.asarray(one).shape == ()
    assert np.asarray(one, dtype=np.float64).dtype == np.float64
    assert jnp.add(one, 1) == 4
    vector = values(strategies[1], np.arange(3.0))
    np.testing.assert_array_equal(np.asarray(vector), [0.0, 1.0, 2.0])
    assert jnp.sum(jnp.asarray(vector)) == 3.0


def test_a_component_given_by_hand_converts_too():
    assert rx.PerReplica([2.5]).item() == 2.5
    assert float(rx.PerReplica([np.float32(2.5)])) == 2.5
    assert rx.PerReplica(["x"]).values == ("x",)


def test_results_have_the_same_type_for_any_number_of_replicas(strategy):
    # A script broke on one device, where `run` handed out the bare value.
    n = strategy.num_replicas_in_sync
    out = strategy.run(lambda x: x * 2, (values(strategy, *range(n)),))
    assert isinstance(out, rx.PerReplica)
    local = strategy.experimental_local_results(out)
    assert isinstance(local, tuple)
    assert [int(v) for v in local] == [2 * i for i in range(n)]


def test_text_shows_every_replica(strategies):
    unequal = values(strategies[2], 0, 1)
    text = "PerReplica:{\n  0: 0,\n  1: 1\n}"
    assert repr(unequal) == str(unequal) == f"{unequal}" == text


# -- what it holds -------------------------------------------------------------------


def test_components_lie_on_their_replicas_devices(strategy):
    n = strategy.num_replicas_in_sync
    value = values(strategy, *(np.full(2, i, np.float32) for i in range(n)))
    assert value.is_stacked
    assert value.array.shape == (n, 2)
    assert value.num_replicas == n
    assert value.shape == (2,)
    assert value.dtype == jnp.float32
    assert lists(value) == [[i, i] for i in range(n)]
    for part, device in zip(value.values, strategy.mesh.devices.flat, strict=True):
        assert part.devices() == {device}


def test_components_given_by_hand_are_kept_as_they_are():
    parts = [np.ones(2), np.ones(3)]
    ragged = rx.PerReplica(parts)
    assert not ragged.is_stacked
    assert ragged.num_replicas == 2
    assert ragged.values[1] is parts[1]
    with pytest.raises(rx.PerReplicaError, match=r"unequal shapes: \(2,\), \(3,\)"):
        _ = ragged.shape
    with pytest.raises(rx.PerReplicaError, match="separate components"):
        _ = ragged.array


@pytest.mark.parametrize(
    ("parts", "shape", "dtype"),
    [
        pytest.param([1.0, 2.0], (), jnp.float32, id="floats"),
        pytest.param([1, 2], (), jnp.int32, id="ints"),
        pytest.param([[1.0], [2.0]], (1,), jnp.float32, id="lists"),
        pytest.param([np.int8(1), np.int8(2)], (), jnp.int8, id="numpy"),
        pytest.param([jnp.bfloat16(1)] * 2, (), jnp.bfloat16, id="bfloat16"),
    ],
)
def test_shape_and_dtype_of_components_given_by_hand(parts, shape, dtype):
    value = rx.PerReplica(parts)
    assert value.shape == shape
    assert value.dtype == dtype


def test_unequal_dtypes_have_no_common_one():
    with pytest.raises(rx.PerReplicaError, match="unequal dtypes: float32, int32"):
        _ = rx.PerReplica([np.float32(1), np.int32(1)]).dtype


def test_no_components_are_refused():
    with pytest.raises(ValueError, match="at least one component"):
        rx.PerReplica([])


# -- as a pytree ---------------------------------------------------------------------


def test_it_travels_through_jit_and_tree_map(strategies):
    for value in (values(strategies[2], 1.0, 3.0), rx.PerReplica([1.0, 3.0])):
        doubled = jax.jit(lambda v: jax.tree.map(lambda x: 2 * x, v))(value)
        assert isinstance(doubled, rx.PerReplica)
        assert lists(doubled) == [2.0, 6.0]
        assert lists(jax.tree.map(lambda x: x + 1, value)) == [2.0, 4.0]


def test_jit_keeps_components_on_their_devices(strategies):
    doubled = jax.jit(lambda v: jax.tree.map(lambda x: 2 * x, v))(
        values(strategies[3], 1.0, 3.0, 5.0)
    )
    assert [v.devices() for v in doubled.values] == [
        {d} for d in strategies[3].mesh.devices.flat
    ]


def test_its_leaves_have_names(strategies):
    placed = {"a": values(strategies[2], 1.0, 3.0)}
    ((path, _),) = jax.tree_util.tree_leaves_with_path(placed)
    assert jax.tree_util.keystr(path) == "['a'].array"
    paths = jax.tree_util.tree_leaves_with_path(rx.PerReplica([1.0, 3.0]))
    assert [jax.tree_util.keystr(p) for p, _ in paths] == ["[0]", "[1]"]


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_it_can_be_copied_and_pickled(strategies, clone):
    for value in (values(strategies[2], 1.0, 3.0), rx.PerReplica([1.0, 3.0])):
        again = clone(value)
        assert isinstance(again, rx.PerReplica)
        assert again.is_stacked == value.is_stacked
        assert lists(again) == [1.0, 3.0]


# -- values from a function ----------------------------------------------------------


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
    step: typing.Any
    name: str = flax.struct.field(pytree_node=False)


def test_the_function_is_told_which_replica_it_makes_a_value_for(strategy):
    asked = []

    def value_fn(context):
        asked.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return context.replica_id_in_sync_group

    value = strategy.experimental_distribute_values_from_function(value_fn)
    n = strategy.num_replicas_in_sync
    assert asked == [(i, n) for i in range(n)]
    assert lists(value) == list(range(n))


def test_structures_are_kept(strategies):
    made = strategies[2].experimental_distribute_values_from_function(
        lambda context: {
            "point": Point(context.replica_id_in_sync_group, None),
            "pair": Pair(np.ones(2), (3.0,)),
            "state": State(1.0, "adam"),
        }
    )
    assert isinstance(made["point"], Point)
    assert made["point"].y is None
    assert lists(made["point"].x) == [0, 1]
    assert isinstance(made["pair"], Pair)
    assert lists(made["pair"].b[0]) == [3.0, 3.0]
    assert isinstance(made["state"], State)
    assert made["state"].name == "adam"


@pytest.mark.parametrize(
    "components",
    [
        pytest.param((np.ones(1), np.ones(2)), id="unequal shapes"),
        pytest.param((1, 1.5), id="unequal dtypes"),
        pytest.param(("a", "bc"), id="strings"),
        pytest.param((len, max), id="functions"),
    ],
)
def test_what_cannot_be_stacked_stays_as_it_is(strategies, components):
    value = values(strategies[2], *components)
    assert not value.is_stacked
    assert all(a is b for a, b in zip(value.values, components, strict=True))


@pytest.mark.parametrize(
    "components",
    [
        pytest.param(({"a": 1}, {"b": 1}), id="keys"),
        pytest.param(((1, 2), (1,)), id="lengths"),
        pytest.param((1, None), id="None"),
    ],
)
def test_unequal_structures_are_refused_by_name_of_the_replica(strategies, components):
    with pytest.raises(rx.PerReplicaError, match=r"replica 0 and .* for replica 1"):
        values(strategies[2], *components)


def test_a_later_change_of_a_numpy_component_is_not_seen(strategies):
    parts = [np.zeros(2), np.ones(2)]
    value = values(strategies[2], *parts)
    parts[0][:] = 7.0
    assert lists(value) == [[0.0, 0.0], [1.0, 1.0]]


def test_value_context_has_defaults():
    context = rx.ValueContext()
    assert context.replica_id_in_sync_group == 0
    assert context.num_replicas_in_sync == 1
    assert "replica id 0" in repr(context)


# -- local results -------------------------------------------------------------------


def test_local_results_are_always_a_tuple(strategy):
    n = strategy.num_replicas_in_sync
    local = strategy.experimental_local_results
    assert [int(v) for v in local(values(strategy, *range(n)))] == list(range(n))
    assert local(5) == (5,)
    assert local(None) == (None,)
    assert local("text") == ("text",)
    array = jnp.ones(3)
    assert local(array)[0] is array
    assert len(local(array)) == 1
    assert local([1, 2]) == ([1, 2],) * n
    assert local({}) == ({},) * n


def test_local_results_of_a_structure_are_one_structure_a_replica(strategies):
    mixed = {"a": values(strategies[2], 1, 2), "b": 9, "c": Point(None, 3)}
    assert strategies[2].experimental_local_results(mixed) == (
        {"a": 1, "b": 9, "c": Point(None, 3)},
        {"a": 2, "b": 9, "c": Point(None, 3)},
    )


def test_local_results_accept_unequal_shapes(strategies):
    ragged = rx.PerReplica([[1.0, 2.0], [3.0]])
    assert strategies[2].experimental_local_results(ragged) == ([1.0, 2.0], [3.0])


# -- ops and errors ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "SUM", "Sum", rx.ReduceOp.SUM])
def test_an_op_is_named_in_any_case(name):
    assert rx.ReduceOp.of(name) is rx.ReduceOp.SUM


def test_unknown_ops_are_refused():
    with pytest.raises(ValueError, match="Use one of 'SUM', 'MEAN'"):
        rx.ReduceOp.of("max")
    with pytest.raises(TypeError, match="first argument is a ReduceOp"):
        rx.ReduceOp.of(None)


ERRORS = [
    getattr(rx, name)
    for name in rx.__all__
    if isinstance(getattr(rx, name), type)
    and issubclass(getattr(rx, name), rx.ReplicaxError)
]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_can_be_sent_to_another_process(kind):
    error = pickle.loads(pickle.dumps(kind("what was wanted")))
    assert type(error) is kind
    assert str(error) == "what was wanted"


BUILTINS = (ValueError, TypeError, RuntimeError, IndexError)


def test_errors_are_also_the_builtins_that_people_catch():
    assert len(ERRORS) >= 8
    for kind in ERRORS:
        if kind is not rx.ReplicaxError:
            assert issubclass(kind, BUILTINS), kind


def test_one_component_is_iterated_compared_and_measured_and_many_are_not(strategies):
    one = strategies[1].experimental_distribute_values_from_function(
        lambda ctx: np.float32([1, 2, 3])
    )
    assert [float(v) for v in one] == [1, 2, 3]
    assert len(one) == 3 and float(one[1]) == 2
    assert (one == np.float32([1, 0, 3])).tolist() == [True, False, True]
    assert (one != 1).tolist() == [False, True, True]
    assert len({one, one}) == 1
    two = values(strategies[2], 1, 2)
    for use in (iter, len, lambda v: v == 1.0, lambda v: v[0]):
        with pytest.raises(rx.PerReplicaError, match="2 replicas"):
            use(two)


def test_advice_fits_the_value_and_the_name_is_the_public_one(strategies):
    scalars = values(strategies[2], 1, 2)
    with pytest.raises(rx.PerReplicaError) as e:
        float(scalars)
    assert "gather" not in str(e.value)
    vectors = strategies[2].experimental_distribute_values_from_function(
        lambda ctx: np.ones(3)
    )
    with pytest.raises(rx.PerReplicaError, match="gather"):
        np.asarray(vectors)
    assert type(vectors).__name__ == "PerReplica" and vectors.ndim == 1
    again = pickle.loads(pickle.dumps(vectors))
    assert [v.tolist() for v in again.values] == [[1.0] * 3] * 2
    assert "1: [1. 1. 1.]" in repr(jax.device_get(vectors))
