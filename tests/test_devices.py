"""Naming devices, and making virtual ones."""

import subprocess
import sys

import jax
import pytest
from replicax.strategies.devices import device_name, resolve_device

import replicax as rx


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("cpu:0", 0),
        ("CPU:3", 3),
        ("/cpu:1", 1),
        ("cpu", 0),
        ("/device:CPU:2", 2),
        ("/job:localhost/replica:0/task:0/device:CPU:1", 1),
    ],
)
def test_names(name, index):
    assert resolve_device(name) is jax.devices()[index]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpu:99", r"8 cpu device\(s\), cpu:0 to cpu:7"),
        ("gpu:0", "no 'gpu' device .* cpu:0"),
        ("nonsense device", "Cannot read"),
        ("", "Cannot read"),
        ("cpu:-1", "Cannot read"),
        ("/job:worker/task:1/device:CPU:0", "another task"),
        ("/job:localhost/task:1/cpu:0", "another task"),
    ],
)
def test_devices_that_do_not_exist_are_refused(name, message):
    with pytest.raises(rx.DeviceError, match=message):
        rx.MirroredStrategy([name])
    with pytest.raises(rx.DeviceError, match=message):
        rx.OneDeviceStrategy(name)


def test_repeated_devices_are_refused():
    with pytest.raises(rx.DeviceError, match="Repeated: cpu:1"):
        rx.MirroredStrategy(["cpu:0", "cpu:1", "/cpu:1"])


@pytest.mark.parametrize("devices", ["cpu:0", jax.devices()[0]])
def test_a_bare_device_is_refused(devices):
    with pytest.raises(TypeError, match="devices is a list"):
        rx.MirroredStrategy(devices)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"jax\.Device or a string"):
        rx.MirroredStrategy([0, 1])
    with pytest.raises(TypeError, match="CrossDeviceOps"):
        rx.MirroredStrategy(["cpu:0"], cross_device_ops="nccl")


@pytest.mark.parametrize("devices", [None, [], ()])
def test_the_default_is_all_local_devices(devices):
    assert rx.MirroredStrategy(devices).num_replicas_in_sync == 8


def test_the_order_of_devices_is_the_order_of_replicas():
    strategy = rx.MirroredStrategy(["cpu:5", jax.devices()[2]])
    assert strategy.extended.worker_devices == (jax.devices()[5], jax.devices()[2])
    assert repr(strategy) == "MirroredStrategy(['cpu:5', 'cpu:2'])"
    value = strategy.experimental_distribute_values_from_function(
        lambda c: c.replica_id_in_sync_group
    )
    assert [next(iter(v.devices())) for v in value.values] == [
        jax.devices()[5],
        jax.devices()[2],
    ]
    assert device_name(jax.devices()[5]) == "cpu:5"


@pytest.mark.parametrize("number", [0, -1, 1.5, "4", True, None])
def test_the_number_of_virtual_devices_is_checked(number):
    with pytest.raises(ValueError, match="num_devices"):
        rx.set_virtual_devices(number)


def test_virtual_devices_asked_for_too_late_are_refused():
    jax.devices()
    rx.set_virtual_devices(8)  # there are so many already
    with pytest.raises(rx.DeviceError, match=r"too late.*8 CPU.*JAX_NUM_CPU_DEVICES=3"):
        rx.set_virtual_devices(3)


def test_virtual_devices_in_a_fresh_process():
    code = (
        "import replicax as rx; rx.set_virtual_devices(3); rx.get_strategy();"
        "rx.set_virtual_devices(5); import jax; print(len(jax.devices('cpu')))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "5"
