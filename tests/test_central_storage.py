"""``CentralStorageStrategy``: variables on one device, replicas on several."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicax as rx

from .compiled import collectives_of, compiled_step

CPU = jax.devices("cpu")
MEAN = rx.VariableAggregation.MEAN
SUM = rx.VariableAggregation.SUM


@pytest.fixture(params=[0, 2], ids=["among the replicas", "on its own"])
def central(request):
    return rx.CentralStorageStrategy(CPU[:2], CPU[request.param])


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group + 0.0


def lies_on(variable):
    return variable.array.devices()


def test_compute_devices_and_the_parameter_device():
    strategy = rx.CentralStorageStrategy()
    assert strategy.num_replicas_in_sync == len(CPU)
    assert strategy.parameter_device == CPU[0]
    assert strategy.extended.parameter_devices == (CPU[0],)
    assert rx.CentralStorageStrategy(["cpu:3"]).parameter_device == CPU[3]
    strategy = rx.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:4")
    assert strategy.extended.worker_devices == (CPU[1], CPU[2])
    assert strategy.extended.parameter_devices == (CPU[4],)
    for compute, parameter in ((["cpu:1", "cpu:1"], None), (None, "cpu:99")):
        with pytest.raises(rx.DeviceError):
            rx.CentralStorageStrategy(compute, parameter)


def test_a_variable_lies_once_also_after_it_was_written(central):
    home = {central.parameter_device}
    with central.scope():
        v = rx.Variable([1.0, 2.0], aggregation=MEAN)
    assert lies_on(v) == v.read_value().devices() == home
    np.testing.assert_array_equal(v, [1, 2])
    for expected in ([1.5, 2.5], [2.0, 3.0]):
        central.run(lambda: v.assign(v + replica_id()))
        assert lies_on(v) == home
        np.testing.assert_array_equal(v, expected)
    v.assign([5.0, 6.0])
    v.assign_add([1.0, 1.0])
    assert lies_on(v) == home
    np.testing.assert_array_equal(v, [6, 7])


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 5.0), (MEAN, 3.0)])
def test_writes_of_replicas_are_combined(central, aggregation, expected):
    with central.scope():
        v = rx.Variable(2.0, aggregation=aggregation)
    central.run(lambda: v.assign_add(1.0 + replica_id() if aggregation is SUM else 1.0))
    assert float(v) == expected


def test_a_write_of_a_step_must_be_aggregated(central):
    with central.scope():
        v = rx.Variable(1.0, name="v")
    with pytest.raises(ValueError, match=r"'v'.*lies on one device.*an aggregation"):
        central.run(lambda: v.assign(2.0))
    assert float(v) == 1.0
    v.assign(2.0)
    assert float(v) == 2.0


def test_what_was_read_before_a_step_keeps_its_value(central):
    with central.scope():
        v = rx.Variable([1.0, 2.0], aggregation=MEAN)
    before = v.read_value()
    given = jnp.asarray([3.0, 4.0])
    central.run(lambda: v.assign_add([1.0, 1.0]))
    v.assign(given)
    central.run(lambda: v.assign_add([1.0, 1.0]))
    np.testing.assert_array_equal(before, [1, 2])
    np.testing.assert_array_equal(given, [3, 4])
    np.testing.assert_array_equal(v, [4, 5])


def test_a_step_that_fails_changes_nothing(central):
    with central.scope():
        v = rx.Variable(1.0, aggregation=MEAN)

    def step():
        v.assign(7.0)
        raise KeyError("no")

    with pytest.raises(KeyError):
        central.run(step)
    assert float(v) == 1.0


def test_functions_and_loops_write_it(central):
    with central.scope():
        v = rx.Variable(0.0, aggregation=SUM)

    @rx.function
    def train(steps):
        def step():
            return v.assign_add(replica_id())

        lax.fori_loop(0, steps, lambda i, _: central.run(step), 0.0)
        v.assign_add(100.0)

    train(5)
    assert float(v) == 105.0
    assert lies_on(v) == {central.parameter_device}


def test_a_copy_is_a_variable_of_its_own(central):
    with central.scope():
        v = rx.Variable(1.0, aggregation=MEAN)
    w = copy.deepcopy(v)
    central.run(lambda: w.assign(3.0))
    assert (float(v), float(w)) == (1.0, 3.0)
    assert lies_on(w) == lies_on(v)


def test_training_keeps_parameters_and_slots_on_the_one_device(central):
    x = np.linspace(0.0, 1.0, 8, dtype=np.float32)
    tx = optax.adam(0.1)

    def loss_fn(w, x):
        return jnp.mean(jnp.square(w["a"] * x + w["b"] - 1.0))

    initial = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    with central.scope():
        params = rx.variables(initial)
        optimizer = rx.Optimizer(tx, params)

    def step(x):
        optimizer.apply_gradients(jax.grad(loss_fn)(rx.read(params), x))

    batch = rx.PerReplica(np.split(x, 2))
    expected, state = initial, tx.init(initial)
    for _ in range(3):
        central.run(step, (batch,))
        updates, state = tx.update(jax.grad(loss_fn)(expected, x), state, expected)
        expected = optax.apply_updates(expected, updates)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-6)
    for v in jax.tree.leaves((params, optimizer.state)):
        assert lies_on(v) == {central.parameter_device}
    batch = central.run(lambda x: x, (batch,))
    assert collectives_of(compiled_step(central, step, batch)) == ["all-reduce"]
