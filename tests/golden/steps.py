"""TF's answers for ``run``, contexts, collectives in a step and ``merge_call``."""

import collections
import copy

import jax
import jax.numpy as jnp
from jax import lax

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

Pair = collections.namedtuple("Pair", "x y")

ONE_TRACE = (
    "A step is traced once for all replicas, so Python cannot take another path in one "
    "of them."
)
MERGES_ANYWHERE = (
    "TF refuses because its merge_call waits for other threads. Here the step is one "
    "trace, so a merge function may stand under control flow and nested jits."
)


def run(fn, *args, replicas=2):
    return mirrored(replicas).run(fn, args)


def context():
    return rx.get_replica_context()


def replica_id():
    return context().replica_id_in_sync_group


# -- run -----------------------------------------------------------------------------


def boom():
    raise KeyError("boom")


def types_in_a_step():
    names = run(
        lambda: [
            replica_id().dtype.name,
            type(context().num_replicas_in_sync).__name__,
        ]
    )
    per_replica = mirrored(2).experimental_local_results(names)
    return [rx.PerReplica(parts) for parts in zip(*per_replica, strict=True)]


def devices_of_a_varying_result():
    out = run(replica_id)
    return rx.PerReplica([tf_name(*v.devices()) for v in out.values])


def whole_step_in_a_jit():
    strategy = mirrored(2)

    @jax.jit
    def step(x):
        squares = strategy.run(lambda x: x * x, (x,))
        fourfold = strategy.run(lambda x: 4 * x, (x,))
        return (
            strategy.reduce("SUM", squares, axis=None),
            strategy.reduce("SUM", fourfold, axis=None),
            strategy.reduce("MEAN", fourfold, axis=None),
        )

    return list(step(values(1.0, 2.0)))


def run_in_a_step():
    strategy = mirrored(2)
    return run(lambda: strategy.run(lambda: 1.0))


RUN = [
    same(
        "run_returns_per_replica",
        Each(2.0, 3.0),
        lambda: run(lambda x: x + 1, values(1.0, 2.0)),
    ),
    same(
        "run_one_device_strategy_unwrapped",
        1.0,
        lambda: one_device().run(lambda: jnp.float32(1.0)),
    ),
    same(
        "run_default_strategy",
        1.0,
        lambda: rx.get_strategy().run(lambda: jnp.float32(1.0)),
    ),
    same("run_none", None, lambda: run(lambda: None)),
    same(
        "run_python_diff_objects",
        Each(1000, 2000),
        lambda: run(lambda: replica_id() * 1000 + 1000),
    ),
    same(
        "run_nested_result",
        {"a": [Each(1.0, 1.0), [Each(2.0, 2.0)]]},
        lambda: run(lambda: {"a": (jnp.float32(1.0), [jnp.float32(2.0)])}),
    ),
    same(
        "run_namedtuple_result",
        {"namedtuple": {"x": Each(1.0, 1.0), "y": Each(2.0, 2.0)}},
        lambda: run(lambda: Pair(jnp.float32(1.0), jnp.float32(2.0))),
    ),
    same(
        "run_non_per_replica_arg",
        [5.0, 6.0],
        lambda: run(lambda x: x, jnp.asarray([5.0, 6.0])),
    ),
    same(
        "run_nested_args_kwargs",
        Each(111.0, 212.0),
        lambda: mirrored(2).run(
            lambda tree, scale: tree["a"] + tree["b"][0] + scale,
            ({"a": values(1.0, 2.0), "b": [10.0]},),
            {"scale": values(100.0, 200.0)},
        ),
    ),
    same(
        "run_args_not_list",
        Raises("ValueError"),
        lambda: mirrored(2).run(lambda x: x, jnp.float32(1.0)),
    ),
    same("run_replica_ids", Each(0, 1, 2, 3), lambda: run(replica_id, replicas=4)),
    same(
        "run_replica_id_type",
        [Each("int32", "int32"), Each("int", "int")],
        types_in_a_step,
    ),
    same(
        "run_devices_order",
        Each(
            "/job:localhost/replica:0/task:0/device:CPU:0",
            "/job:localhost/replica:0/task:0/device:CPU:1",
        ),
        devices_of_a_varying_result,
    ),
    same("run_in_replica_ctx_error", Raises("RuntimeError"), run_in_a_step),
    same("run_exception_propagates", Raises("KeyError"), lambda: run(boom)),
    not_applicable("run_dict_key_mismatch", Raises("AssertionError"), ONE_TRACE),
    same(
        "run_tf_function",
        Each(2.0, 4.0),
        lambda: run(jax.jit(lambda x: 2 * x), values(1.0, 2.0)),
    ),
    same("run_in_tf_function", [5.0, 12.0, 6.0], whole_step_in_a_jit),
]


# -- contexts ------------------------------------------------------------------------


def inside_a_scope():
    strategy = mirrored(2)
    with strategy.scope():
        return [
            rx.has_strategy(),
            rx.get_strategy() is strategy,
            rx.in_cross_replica_context(),
            rx.get_replica_context() is None,
        ]


def entering_a_scope_gives_the_strategy():
    with mirrored(2).scope() as strategy:
        return strategy is mirrored(2)


def the_same_scope_twice():
    with mirrored(2).scope(), mirrored(2).scope():
        return rx.get_strategy() is mirrored(2)


def in_another_scope(call):
    with mirrored(4).scope():
        return call()


def enter(scope):
    with scope:
        return True


def entering_a_replica_context():
    with rx.ReplicaContext(mirrored(2), replica_id_in_sync_group=0) as bound:
        return bound is None


CONTEXTS = [
    same("ctx_in_scope", [True, True, True, True], inside_a_scope),
    same("ctx_scope_returns_strategy", True, entering_a_scope_gives_the_strategy),
    same("ctx_nested_same_scope_ok", True, the_same_scope_twice),
    same(
        "ctx_nested_other_scope_error",
        Raises("RuntimeError"),
        lambda: in_another_scope(lambda: enter(mirrored(2).scope())),
    ),
    same(
        "ctx_default_scope_nested_error",
        Raises("RuntimeError"),
        lambda: default_scope_in_a_scope(),
    ),
    same(
        "ctx_scope_inside_run_error",
        Raises("RuntimeError"),
        lambda: run(lambda: enter(mirrored(2).scope())),
    ),
    same(
        "ctx_other_strategy_reduce_error",
        Raises("RuntimeError"),
        lambda: reduce_in_another_scope(),
    ),
    same(
        "ctx_set_strategy_in_scope_error",
        Raises("RuntimeError"),
        lambda: in_another_scope(lambda: rx.experimental_set_strategy(mirrored(2))),
    ),
    same("strategy_copy_error", Raises("RuntimeError"), lambda: copy.copy(mirrored(2))),
    same("replica_context_enter_returns", True, entering_a_replica_context),
]


def default_scope_in_a_scope():
    default = rx.get_strategy()
    return in_another_scope(lambda: enter(default.scope()))


def reduce_in_another_scope():
    x = values(1.0, 2.0)
    return in_another_scope(lambda: mirrored(2).reduce("SUM", x, axis=None))


# -- collectives ---------------------------------------------------------------------


def all_reduced_ids(op, replicas):
    return run(
        lambda: context().all_reduce(op, replica_id() + jnp.float32(1.0)),
        replicas=replicas,
    )


def gradient_of_all_reduce(op):
    def loss(x):
        return context().all_reduce(op, x) * (replica_id() + 1)

    return run(jax.grad(loss), jnp.float32(1.0))


def gradient_of_all_gather():
    def loss(x):
        return jnp.sum(context().all_gather(x, axis=0) * jnp.arange(1.0, 5.0))

    return run(jax.grad(loss), jnp.ones(2))


COLLECTIVES = [
    same(
        "all_reduce_sum_scalar",
        Each(10.0, 10.0, 10.0, 10.0),
        lambda: all_reduced_ids("SUM", replicas=4),
    ),
    same(
        "all_reduce_mean_scalar",
        Each(2.5, 2.5, 2.5, 2.5),
        lambda: all_reduced_ids("MEAN", replicas=4),
    ),
    same(
        "all_reduce_sum_scalar_x2",
        Each(3.0, 3.0),
        lambda: all_reduced_ids("SUM", replicas=2),
    ),
    same(
        "all_reduce_mean_scalar_x2",
        Each(1.5, 1.5),
        lambda: all_reduced_ids("MEAN", replicas=2),
    ),
    same(
        "all_reduce_int_mean",
        Each(0.5, 0.5),
        lambda: run(lambda: context().all_reduce("MEAN", replica_id())),
    ),
    same(
        "all_reduce_gradient_sum",
        Each(3.0, 3.0),
        lambda: gradient_of_all_reduce("SUM"),
    ),
    same(
        "all_reduce_gradient_mean",
        Each(1.5, 1.5),
        lambda: gradient_of_all_reduce("MEAN"),
    ),
    not_applicable(
        "all_gather_uneven",
        Each([0, 0, 1], [0, 0, 1]),
        "A step is one program, whose arrays have the same shape on all replicas: "
        "range(id + 1) cannot be written in it. strategy.gather takes uneven values.",
    ),
    same(
        "all_gather_gradient",
        Each([2.0, 4.0], [6.0, 8.0]),
        gradient_of_all_gather,
    ),
]


# -- merge_call ----------------------------------------------------------------------


def calls_of_a_merge_function():
    calls = []
    run(lambda: context().merge_call(lambda strategy: calls.append(1)), replicas=4)
    return len(calls)


def merge_call_after_the_step():
    saved = []
    run(lambda: saved.append(context()))
    return saved[0].merge_call(lambda strategy: 1)


def summed_by_merge_call(x):
    return context().merge_call(
        lambda strategy, x: strategy.reduce("SUM", x, axis=None), args=(x,)
    )


MERGE_CALL = [
    same("merge_call_called_once", 1, calls_of_a_merge_function),
    not_applicable("merge_call_mismatched_count", Raises("RuntimeError"), ONE_TRACE),
    same(
        "merge_call_default_ctx",
        [4, True],
        lambda: list(
            context().merge_call(
                lambda strategy, x: (x + 1, rx.in_cross_replica_context()), args=(3,)
            )
        ),
    ),
    same(
        "merge_call_outside_ctx_error",
        Raises("RuntimeError"),
        merge_call_after_the_step,
    ),
    differs(
        "nested_tf_function_merge_call_error",
        Raises("RuntimeError"),
        lambda: run(jax.jit(summed_by_merge_call), values(1.0, 2.0)),
        ours=Each(3.0, 3.0),
        reason=MERGES_ANYWHERE,
    ),
    differs(
        "cond_merge_call_error",
        Raises("RuntimeError"),
        lambda: run(
            lambda x, flag: lax.cond(flag > 0, summed_by_merge_call, jnp.negative, x),
            values(1.0, 2.0),
            1,
        ),
        ours=Each(3.0, 3.0),
        reason=MERGES_ANYWHERE,
    ),
]

CASES = [*RUN, *CONTEXTS, *COLLECTIVES, *MERGE_CALL]
