"""TF's answers for ``Strategy.reduce``, ``gather`` and the looking at values."""

import enum
import math

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
    placed,
    same,
    values,
)

MATRICES = ([[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]])
PLAIN = [1.0, 2.0]
TF_INT_MEAN = (
    "The quotient is the same. TF divides in float64; JAX's default float is float32 "
    "unless jax_enable_x64 is set."
)


class VariableAggregation(enum.Enum):
    """An enum that is not a ReduceOp but has a member of the same name."""

    SUM = 1


def reduce(op, *components, **axis):
    return mirrored(len(components)).reduce(op, values(*components), **axis)


def gather(axis, *components):
    return mirrored(len(components)).gather(values(*components), axis=axis)


def mirrored_by_a_step(strategy):
    """A value that TF would call Mirrored."""
    return strategy.run(lambda x: x + 1.0, (jnp.float32(2.0),))


def with_dtype(x):
    return {"value": x, "dtype": str(x.dtype)}


def in_a_step(call):
    """Runs ``call(strategy, x)`` where only a replica context is allowed."""
    strategy = mirrored(2)
    return strategy.run(lambda x: call(strategy, x), (values(1.0, 2.0),))


def after_a_mismatch():
    try:
        gather(0, [[1.0, 2.0]], [[3.0]])
    except ValueError:
        return gather(0, [1.0], [2.0])


def means_of_partial_batches():
    batches = [([0.0, 1.0], [2.0, 3.0]), ([4.0, 5.0], [6.0, 7.0]), ([8.0], [])]
    return [
        reduce("mean", *(jnp.mean(jnp.asarray(part)) for part in parts))
        for parts in batches
    ]


REDUCE = [
    same(
        "reduce_sum_axis_none_scalars",
        10.0,
        lambda: reduce(rx.ReduceOp.SUM, 1.0, 2.0, 3.0, 4.0, axis=None),
    ),
    same(
        "reduce_mean_axis_none_scalars",
        2.5,
        lambda: reduce(rx.ReduceOp.MEAN, 1.0, 2.0, 3.0, 4.0, axis=None),
    ),
    same(
        "reduce_sum_axis_none_vectors",
        [11.0, 22.0],
        lambda: reduce("SUM", [1.0, 2.0], [10.0, 20.0], axis=None),
    ),
    same(
        "reduce_sum_axis0_even",
        33.0,
        lambda: reduce("SUM", [1.0, 2.0], [10.0, 20.0], axis=0),
    ),
    same(
        "reduce_sum_axis0_uneven",
        16.0,
        lambda: reduce("SUM", [1.0, 2.0, 3.0], [10.0], axis=0),
    ),
    same(
        "reduce_mean_axis_none_uneven_shapes",
        Raises("InvalidArgumentError"),
        lambda: reduce("MEAN", [1.0, 2.0, 3.0], [10.0], axis=None),
    ),
    same(
        "reduce_mean_axis1",
        [3.5, 5.5],
        lambda: reduce("MEAN", *MATRICES, axis=1),
    ),
    same(
        "reduce_mean_axis_minus1_uneven",
        [4.0],
        lambda: reduce("MEAN", [[1.0, 2.0, 3.0]], [[10.0]], axis=-1),
    ),
    same(
        "reduce_mean_axis_tuple",
        4.5,
        lambda: reduce("MEAN", *MATRICES, axis=(0, 1)),
    ),
    differs(
        "reduce_mean_int_axis_none",
        {"value": 1.5, "dtype": "float64"},
        lambda: with_dtype(reduce("MEAN", 1, 2, axis=None)),
        ours={"value": 1.5, "dtype": "float32"},
        reason=TF_INT_MEAN,
    ),
    differs(
        "reduce_mean_int_axis0",
        {"value": 2.3333333333333335, "dtype": "float64"},
        lambda: with_dtype(reduce("MEAN", [1, 2], [4], axis=0)),
        ours={"value": 2.3333333333333335, "dtype": "float32"},
        reason=TF_INT_MEAN,
    ),
    same(
        "reduce_sum_bool",
        Raises("InvalidArgumentError"),
        lambda: reduce("SUM", True, False, axis=None),
    ),
    same(
        "reduce_nonper_replica_sum_2rep",
        Raises("ValueError"),
        lambda: mirrored(2).reduce("SUM", jnp.float32(3.0), axis=None),
    ),
    same(
        "reduce_nonper_replica_mean_2rep",
        3.0,
        lambda: mirrored(2).reduce("MEAN", jnp.float32(3.0), axis=None),
    ),
    same(
        "reduce_nonper_replica_sum_py_zero",
        Raises("AttributeError"),
        lambda: mirrored(2).reduce("SUM", 0.0, axis=None),
    ),
    same(
        "reduce_nonper_replica_sum_tf_zero",
        Raises("ValueError"),
        lambda: mirrored(2).reduce("SUM", jnp.float32(0.0), axis=None),
    ),
    same(
        "reduce_nonper_replica_sum_axis0_2rep",
        6.0,
        lambda: mirrored(2).reduce("SUM", jnp.asarray(PLAIN), axis=0),
    ),
    same(
        "reduce_nonper_replica_mean_axis0_2rep",
        1.5,
        lambda: mirrored(2).reduce("MEAN", jnp.asarray(PLAIN), axis=0),
    ),
    same(
        "reduce_nested_axis_none",
        {"a": 3.0, "b": [7.0]},
        lambda: mirrored(2).reduce(
            "SUM", {"a": values(1.0, 2.0), "b": [values(3.0, 4.0)]}, axis=None
        ),
    ),
    same(
        "reduce_bad_op_type_axis_none",
        Raises("AssertionError"),
        lambda: reduce(VariableAggregation.SUM, 1.0, 2.0, axis=None),
    ),
    same(
        "reduce_bad_op_type_axis0",
        Raises("TypeError"),
        lambda: reduce(VariableAggregation.SUM, [1.0], [2.0], axis=0),
    ),
    differs(
        "reduce_axis_required_v2",
        Raises("TypeError"),
        lambda: reduce("SUM", 1.0, 2.0),
        ours=3.0,
        reason="The axis may be left out and means replicas only, as in TF's V1: "
        "forgetting it was a common error that nobody profits from.",
    ),
    same(
        "reduce_one_device_sum",
        [1.0, 2.0],
        lambda: one_device().reduce("SUM", placed(one_device(), PLAIN), axis=None),
    ),
    same(
        "reduce_default_strategy",
        [[1.0, 2.0], 3.0],
        lambda: [
            rx.get_strategy().reduce("SUM", jnp.asarray(PLAIN), axis=axis)
            for axis in (None, 0)
        ],
    ),
    same(
        "reduce_mirrored_sum_asserts",
        Raises("AssertionError"),
        lambda: mirrored(2).reduce("SUM", mirrored_by_a_step(mirrored(2)), axis=None),
    ),
    not_applicable(
        "reduce_indexed_slices_mean",
        {"values": [[0.5, 0.5], [1.0, 1.0], [1.5, 1.5]], "indices": [0, 0, 2]},
        reason="JAX has no IndexedSlices: the gradient of a look-up is a dense array.",
    ),
    same(
        "reduce_in_replica_ctx_error",
        Raises("RuntimeError"),
        lambda: in_a_step(lambda strategy, x: strategy.reduce("SUM", x, axis=None)),
    ),
    same(
        "v1_reduce_default_axis",
        4.0,
        lambda: mirrored(2).reduce(rx.ReduceOp.SUM, values(1.0, 3.0)),
    ),
    same(
        "mean_per_replica_mean_of_partial_batches",
        [1.5, 5.5, math.nan],
        means_of_partial_batches,
    ),
]

GATHER = [
    same("gather_axis0_even", [1, 2, 3, 4], lambda: gather(0, [1, 2], [3, 4])),
    same("gather_axis0_uneven", [1, 2, 3, 4], lambda: gather(0, [1, 2, 3], [4])),
    same(
        "gather_axis1_uneven",
        [[1.0, 2.0, 3.0]],
        lambda: gather(1, [[1.0, 2.0]], [[3.0]]),
    ),
    same("gather_scalars", Raises("ValueError"), lambda: gather(0, 1.0, 2.0)),
    same(
        "gather_non_distributed",
        [1.0, 2.0],
        lambda: mirrored(2).gather(jnp.asarray(PLAIN), axis=0),
    ),
    same(
        "gather_one_device",
        [1.0, 2.0],
        lambda: one_device().gather(placed(one_device(), PLAIN), axis=0),
    ),
    same(
        "gather_mismatch_other_axis",
        Raises("InvalidArgumentError"),
        lambda: gather(0, [[1.0, 2.0]], [[3.0]]),
    ),
    differs(
        "collectives_poisoned_after_mismatch",
        Raises("InvalidArgumentError"),
        after_a_mismatch,
        ours=[1.0, 2.0],
        reason="Shapes are compared before anything is sent, so a refused call leaves "
        "nothing half done. TF's runtime refuses every later collective.",
    ),
    same(
        "gather_partial",
        [[0, 1, 2, 3], [4, 5, 6, 7], [8]],
        lambda: [
            gather(0, *(jnp.asarray(part, jnp.int32) for part in parts))
            for parts in [([0, 1], [2, 3]), ([4, 5], [6, 7]), ([8], [])]
        ],
    ),
]

VALUES = [
    same(
        "values_from_function_nested",
        {"a": Each(0, 1), "b": [Each(0, 1)]},
        lambda: mirrored(2).experimental_distribute_values_from_function(
            lambda context: {
                "a": context.replica_id_in_sync_group,
                "b": (context.replica_id_in_sync_group,),
            }
        ),
    ),
    differs(
        "value_context",
        [0, 1, "tf.distribute.ValueContext(replica id 0,  total replicas in sync: 1)"],
        lambda: [
            rx.ValueContext().replica_id_in_sync_group,
            rx.ValueContext().num_replicas_in_sync,
            str(rx.ValueContext()),
        ],
        ours=[0, 1, "ValueContext(replica id 0, total replicas in sync: 1)"],
        reason="The defaults are the same; the text does not name TF's package.",
    ),
    same(
        "local_results_per_replica",
        ["tuple", [1.0, 2.0]],
        lambda: local_results(values(1.0, 2.0)),
    ),
    same("local_results_plain", ["tuple", [5]], lambda: local_results(5)),
    same(
        "local_results_nested",
        ["tuple", [{"a": 1.0, "b": 9}, {"a": 2.0, "b": 9}]],
        lambda: local_results({"a": values(1.0, 2.0), "b": 9}),
    ),
    same(
        "local_results_plain_nested",
        ["tuple", [[1, 2], [1, 2]]],
        lambda: local_results([1, 2]),
    ),
    same(
        "local_results_one_device",
        ["tuple", [5]],
        lambda: local_results(5, one_device()),
    ),
    same(
        "per_replica_to_tensor_cross_error",
        Raises("ValueError"),
        lambda: jnp.asarray(values(1.0, 2.0)),
    ),
    same(
        "per_replica_str",
        "PerReplica:{\n  0: 0,\n  1: 1\n}",
        lambda: str(values(0, 1)),
    ),
    not_applicable(
        "unwrap_and_group",
        [[1.0, 2.0], "None"],
        reason="TF has deprecated both. experimental_local_results is what unwrap was; "
        "group ties together operations of a graph, and here there is none.",
    ),
]


def local_results(value, strategy=None):
    found = (strategy or mirrored(2)).experimental_local_results(value)
    return [type(found).__name__, [jax.tree.map(lambda x: x, r) for r in found]]


CASES = [*REDUCE, *GATHER, *VALUES]
