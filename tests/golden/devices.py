"""TF's answers for making strategies, and for moving values between their devices."""

from unittest import mock

import jax
import jax.numpy as jnp

import replicax as rx

from .table import (
    Each,
    Raises,
    differs,
    mirrored,
    not_applicable,
    one_device,
    same,
    tf_name,
    values,
)

CPU_0 = "/job:localhost/replica:0/task:0/device:CPU:0"
CPU_1 = "/job:localhost/replica:0/task:0/device:CPU:1"


def with_four_devices(devices):
    """The replicas of a strategy on a machine of four CPU devices."""
    four = jax.local_devices()[:4]
    with mock.patch.object(jax, "local_devices", lambda *args, **kwargs: four):
        return rx.MirroredStrategy(devices).num_replicas_in_sync


def properties(strategy):
    return [
        strategy.num_replicas_in_sync,
        [tf_name(d) for d in strategy.extended.worker_devices],
        [tf_name(d) for d in strategy.extended.parameter_devices],
    ]


STRATEGIES = [
    same(
        "mirrored_props",
        [2, [CPU_0, CPU_1], [CPU_0, CPU_1], "None"],
        lambda: [*properties(mirrored(2)), str(mirrored(2).cluster_resolver)],
    ),
    same("mirrored_default_devices", 4, lambda: with_four_devices(None)),
    same("mirrored_empty_devices", 4, lambda: with_four_devices([])),
    same(
        "mirrored_duplicate_devices",
        Raises("AssertionError"),
        lambda: rx.MirroredStrategy(["cpu:0", "cpu:0"]),
    ),
    differs(
        "mirrored_remote_devices",
        Raises("RuntimeError"),
        lambda: rx.MirroredStrategy(
            ["/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"]
        ),
        ours=Raises(rx.DeviceError),
        reason="Refused too, as a wrong argument: TF has a mode in which such devices "
        "are right, so there the state of the program is at fault.",
    ),
    same(
        "mirrored_mixed_local_remote",
        Raises("ValueError"),
        lambda: rx.MirroredStrategy(
            ["/job:localhost/device:CPU:0", "/job:worker/task:1/device:CPU:0"]
        ),
    ),
    same("one_device_props", [1, [CPU_1], [CPU_1]], lambda: properties(one_device())),
    same(
        "default_strategy_worker_devices",
        Raises("RuntimeError"),
        lambda: rx.get_strategy().extended.worker_devices,
    ),
    not_applicable(
        "update_config_proto",
        True,
        reason="It sets up sessions of TF1, which do not exist here.",
    ),
]


# -- cross-device ops ----------------------------------------------------------------


def largest(parts):
    return jnp.max(jnp.stack(parts), axis=0)


def with_ops(ops):
    return rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)


def reduced_by(ops):
    return with_ops(ops).reduce("SUM", values(1.0, 5.0), axis=None)


def reduced_to_a_device():
    x = mirrored(2).extended.reduce_to("SUM", values(1.0, 5.0), "cpu:0")
    plain = isinstance(x, jax.Array) and len(x.devices()) == 1
    return ["EagerTensor" if plain else "Mirrored", x]


CROSS_DEVICE_OPS = [
    differs(
        "reduction_to_one_device_accum",
        6.0,
        lambda: reduced_by(rx.ReductionToOneDevice(accumulation_fn=largest)),
        ours=5.0,
        reason="TF's Strategy.reduce adds up on the CPU whatever was asked for. Here "
        "the accumulation_fn of the strategy's cross_device_ops is used.",
    ),
    same(
        "reduction_to_one_device_accum_direct",
        5.0,
        lambda: rx.ReductionToOneDevice(accumulation_fn=largest).reduce(
            "SUM", values(1.0, 5.0), destinations="cpu:0"
        ),
    ),
    same(
        "crossops_reduce_destinations",
        Each(6.0, 6.0),
        lambda: rx.ReductionToOneDevice().reduce(
            "SUM", values(1.0, 5.0), destinations=values(1.0, 5.0)
        ),
    ),
    same(
        "crossops_batch_reduce",
        [3.0, 5.0],
        lambda: rx.ReductionToOneDevice().batch_reduce(
            "MEAN", [(values(1.0, 5.0), "CPU:0"), (values(2.0, 8.0), "CPU:1")]
        ),
    ),
    same(
        "crossops_broadcast",
        3.0,
        lambda: rx.ReductionToOneDevice().broadcast(jnp.float32(3.0), "CPU:1"),
    ),
    same(
        "crossops_bad_destination",
        Raises("ValueError"),
        lambda: rx.ReductionToOneDevice().reduce("SUM", values(1.0, 5.0), 3),
    ),
    same("nccl_negative_packs", Raises("ValueError"), lambda: rx.NcclAllReduce(-1)),
    same(
        "hierarchical_negative_packs",
        Raises("ValueError"),
        lambda: rx.HierarchicalCopyAllReduce(num_packs=-1),
    ),
    same(
        "hierarchical_cpu_reduce",
        6.0,
        lambda: reduced_by(rx.HierarchicalCopyAllReduce()),
    ),
    same("reduce_to_destinations_str", ["EagerTensor", 6.0], reduced_to_a_device),
    same(
        "batch_reduce_to_list",
        [Each(3.0, 3.0), Each(5.0, 5.0)],
        lambda: mirrored(2).extended.batch_reduce_to(
            "MEAN", [(x, x) for x in (values(1.0, 5.0), values(2.0, 8.0))]
        ),
    ),
    same(
        "broadcast_to",
        Each(3.0, 3.0),
        lambda: mirrored(2).extended.broadcast_to(jnp.float32(3.0), None),
    ),
    same(
        "broadcast_to_python_float",
        3.0,
        lambda: mirrored(2).extended.broadcast_to(3.0, None),
    ),
]

CASES = [*STRATEGIES, *CROSS_DEVICE_OPS]
