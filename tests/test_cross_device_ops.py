"""Cross-device ops: where values are combined, and where the result lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

ALL_OPS = [
    rx.CrossDeviceOps,
    rx.NcclAllReduce,
    rx.HierarchicalCopyAllReduce,
    rx.ReductionToOneDevice,
]


@pytest.fixture(scope="module")
def two():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def three():
    return rx.MirroredStrategy(["cpu:2", "cpu:3", "cpu:4"])


def placed(strategy, *components):
    return strategy.experimental_distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


def cpus(*indices):
    return {jax.local_devices(backend="cpu")[i] for i in indices}


class Spy:
    """An ``accumulation_fn`` that notes what it is given, and where that lies."""

    def __init__(self, combine=sum):
        self.combine = combine
        self.calls = []

    def __call__(self, parts):
        self.calls.append([(float(p), p.devices()) for p in parts])
        return self.combine(parts)


# -- as the ops of a strategy --------------------------------------------------------


@pytest.mark.parametrize("make", ALL_OPS)
def test_all_of_them_reduce_alike(make, two):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=make())
    tree = {
        "even": placed(two, np.array([1.0, 2.0]), np.array([3.0, 4.0])),
        "int": placed(two, np.array([100], np.int8), np.array([100], np.int8)),
        "ragged": rx.PerReplica([[1.0, 2.0, 3.0], [10.0]]),
        "plain": np.array([1.0, 3.0]),
    }
    mask = np.array([1.0, 0.0])
    cases = [
        ("sum", {"axis": 0}),
        ("mean", {"axis": 0}),
        ("mean", {"axis": -1, "accumulate_dtype": jnp.float32}),
    ]
    for op, kwargs in cases:
        out, expected = (s.reduce(op, tree, **kwargs) for s in (strategy, two))
        for got, wanted in zip(
            jax.tree.leaves(out), jax.tree.leaves(expected), strict=True
        ):
            assert (float(got), got.dtype) == (float(wanted), wanted.dtype)
            assert got.devices() == cpus(0, 1)
    weighted = strategy.reduce("mean", tree["even"], axis=0, weights=mask)
    assert weighted == 2.0
    assert strategy.reduce("mean", tree["even"]).tolist() == [2.0, 3.0]


def test_reduction_to_one_device_happens_on_that_device_once():
    spy = Spy()
    ops = rx.ReductionToOneDevice(reduce_to_device="cpu:5", accumulation_fn=spy)
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], cross_device_ops=ops)
    out = strategy.reduce("mean", placed(strategy, 1.0, 2.0, 6.0))
    assert spy.calls == [[(1.0, cpus(5)), (2.0, cpus(5)), (6.0, cpus(5))]]
    assert out == 3.0
    assert out.devices() == cpus(0, 1, 2)


def test_the_one_device_is_the_first_replicas_by_default(three):
    spy = Spy()
    ops = rx.ReductionToOneDevice(accumulation_fn=spy)
    ops.reduce("sum", placed(three, 1.0, 2.0, 6.0), destinations="cpu:0")
    assert spy.calls == [[(1.0, cpus(2)), (2.0, cpus(2)), (6.0, cpus(2))]]


def test_each_value_is_accumulated_by_itself(two):
    spy = Spy()
    ops = rx.ReductionToOneDevice(accumulation_fn=spy)
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    strategy.reduce("sum", {"a": placed(two, 1.0, 2.0), "b": placed(two, 3.0, 4.0)})
    assert [[v for v, _ in call] for call in spy.calls] == [[1.0, 2.0], [3.0, 4.0]]


def test_another_accumulation(two):
    largest = rx.ReductionToOneDevice(accumulation_fn=lambda xs: jnp.max(jnp.stack(xs)))
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=largest)
    x = placed(two, 1.0, 5.0)
    assert strategy.reduce("sum", x) == 5.0
    assert jax.jit(lambda v: strategy.reduce("sum", v))(x) == 5.0
    assert strategy.extended.reduce_to("sum", x, "cpu:1") == 5.0
    assert two.reduce("sum", x) == 6.0


def test_only_cross_device_ops_are_accepted():
    with pytest.raises(TypeError, match="CrossDeviceOps"):
        rx.MirroredStrategy(["cpu:0"], cross_device_ops="nccl")


def test_packs_are_not_negative():
    assert rx.NcclAllReduce(num_packs=0).num_packs == 0
    for make in (rx.NcclAllReduce, rx.HierarchicalCopyAllReduce):
        with pytest.raises(ValueError, match="num_packs"):
            make(num_packs=-1)


# -- called directly -----------------------------------------------------------------


@pytest.fixture(params=ALL_OPS)
def ops(request):
    return request.param()


@pytest.mark.parametrize(
    ("op", "total", "mean_dtype"), [("sum", 6, "int32"), ("mean", 3.0, "float32")]
)
def test_reduce_to_a_device(ops, two, op, total, mean_dtype):
    out = ops.reduce(op, placed(two, np.int32(1), np.int32(5)), destinations="cpu:3")
    assert (out.item(), out.dtype) == (total, mean_dtype)
    assert out.devices() == cpus(3)


def test_reduce_to_the_devices_of_a_value(ops, two, three):
    x = placed(two, 1.0, 5.0)
    for destination, devices in [
        (x, cpus(0, 1)),
        (placed(three, 1.0, 1.0, 1.0), cpus(2, 3, 4)),
        (three.run(lambda: jnp.ones(2)), cpus(2, 3, 4)),
        (jax.device_put(1.0, *cpus(6)), cpus(6)),
        (next(iter(cpus(7))), cpus(7)),
    ]:
        out = ops.reduce(rx.ReduceOp.SUM, x, destinations=destination)
        assert out == 6.0
        assert out.devices() == devices
        assert out.sharding.is_fully_replicated


def test_batch_reduce_keeps_the_order(ops, two):
    pairs = [(placed(two, 1.0, 5.0), "cpu:0"), (placed(two, 2.0, 8.0), "cpu:1")]
    out = ops.batch_reduce("mean", pairs)
    assert out == [3.0, 5.0]
    assert [x.devices() for x in out] == [cpus(0), cpus(1)]
    assert ops.batch_reduce("mean", []) == []


def test_broadcast(ops, two):
    assert ops.broadcast(3.0, "cpu:4").devices() == cpus(4)
    mirrored = ops.broadcast(np.arange(2), placed(two, 1.0, 5.0))
    assert mirrored.devices() == cpus(0, 1)
    assert [s.data.tolist() for s in mirrored.addressable_shards] == [[0, 1]] * 2


@pytest.mark.parametrize("destination", [None, 3, ["cpu:0"], np.ones(1)])
def test_destinations_are_devices_or_values(ops, two, destination):
    x = placed(two, 1.0, 5.0)
    for call in (
        lambda: ops.reduce("sum", x, destination),
        lambda: ops.batch_reduce("sum", [(x, destination)]),
        lambda: ops.broadcast(1.0, destination),
        lambda: two.extended.reduce_to("sum", x, destination),
    ):
        with pytest.raises(ValueError, match="destinations must be"):
            call()


def test_unknown_destinations(ops, two):
    for name in ("cpu:99", "nothing", "/job:worker/task:1/cpu:0"):
        with pytest.raises(rx.DeviceError):
            ops.reduce("sum", placed(two, 1.0, 5.0), name)


def test_what_cannot_be_reduced(ops, two):
    with pytest.raises(TypeError, match="needs a PerReplica"):
        ops.reduce("sum", 1.0, "cpu:0")
    with pytest.raises(TypeError, match="bool"):
        ops.reduce("sum", placed(two, np.True_, np.False_), "cpu:0")
    with pytest.raises(ValueError, match="not a ReduceOp"):
        ops.reduce("max", placed(two, 1.0, 5.0), "cpu:0")


# -- strategy.extended ---------------------------------------------------------------


def test_reduce_to(two):
    x = placed(two, 1.0, 5.0)
    assert two.extended.reduce_to("sum", x, "cpu:1").devices() == cpus(1)
    assert two.extended.reduce_to("mean", x, x).devices() == cpus(0, 1)
    assert two.extended.batch_reduce_to("mean", [(x, x), (x, "cpu:0")]) == [3.0, 3.0]
    plain = jnp.float32(2.0)
    assert two.extended.reduce_to("mean", plain, "cpu:0") == 2.0
    with pytest.raises(ValueError, match="same on all 2 replicas"):
        two.extended.reduce_to("sum", plain, "cpu:0")


def test_reduce_to_takes_components_given_by_hand(two):
    x = rx.PerReplica([1.0, 5.0])
    assert two.extended.reduce_to("sum", x, "cpu:1") == 6.0
    assert two.extended.reduce_to("sum", x, x).devices() == cpus(0, 1)
    with pytest.raises(rx.PerReplicaError, match="equal shapes"):
        two.extended.reduce_to("sum", rx.PerReplica([[1.0], [1.0, 2.0]]), "cpu:1")


def test_broadcast_to(two):
    assert two.extended.broadcast_to(3.0) == 3.0
    assert two.extended.broadcast_to(True) is True
    for destination in (None, placed(two, 1.0, 5.0)):
        out = two.extended.broadcast_to(np.arange(2), destination)
        assert out.devices() == cpus(0, 1)
        assert out.tolist() == [0, 1]
    assert two.extended.broadcast_to(np.arange(2), "cpu:3").devices() == cpus(3)
    with pytest.raises(ValueError, match="destinations must be"):
        two.extended.broadcast_to(np.arange(2), 3)
    with pytest.raises(TypeError, match="combine it first"):
        two.extended.broadcast_to(placed(two, 1.0, 5.0))


def test_not_in_a_step(two):
    x = placed(two, 1.0, 5.0)
    with pytest.raises(rx.ContextError, match="all_reduce"):
        two.run(lambda x: two.extended.reduce_to("sum", x, "cpu:0"), (x,))


def test_a_subclass_decides_how_values_are_added_up():
    seen = []

    class OnHost(rx.CrossDeviceOps):
        def accumulate(self, value):
            seen.append(value.num_replicas)
            return jnp.asarray(sum(np.asarray(v) for v in value.values))

    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=OnHost())
    value = rx.PerReplica([1.0, 2.0])
    assert float(strategy.reduce("sum", value)) == 3.0
    assert float(strategy.reduce("mean", value)) == 1.5
    assert float(strategy.reduce("mean", rx.PerReplica([[1.0], [3.0]]), axis=0)) == 2.0
    assert float(strategy.extended.reduce_to("mean", value, "cpu:1")) == 1.5
    assert len(seen) >= 4 and set(seen) == {2}
