"""TF's answers for ``extended.update``, reductions of variables, central storage."""

import numpy as np

import replicax as rx

from .devices import CPU_0, CPU_1
from .steps import context, run
from .table import (
    Each,
    Raises,
    differs,
    mirrored,
    same,
    tf_name,
    values,
)
from .variables import DRIFTS, copies, tf_class, unequal, variable

# -- extended ------------------------------------------------------------------------


def update(v, fn, *args, **how):
    with mirrored(2).scope() as strategy:
        return strategy.extended.update(v, fn, args, **how)


def unequals():
    return values(10.0, 20.0)


def updated_by_a_replicas_own():
    v = variable()
    out = update(v, lambda v, x: v.assign_add(x), unequals())
    return {"type": "Mirrored", "components": out}


def local_results_of_an_update():
    out = update(variable(), lambda v, x: v.assign_add(x), 1.0, group=False)
    return {"type": type(out).__name__, "value": list(out)}


def updated_in_a_step():
    v = variable()
    extended = mirrored(2).extended
    run(lambda x: extended.update(v, lambda v, x: v.assign_add(x), (x,)), unequals())
    return copies(v)


def assigned_in_an_update():
    v = variable()
    update(v, lambda _, x: v.assign_add(x), unequals())
    return copies(v)


def colocated():
    v = variable()
    with mirrored(2).scope() as strategy, strategy.extended.colocate_vars_with(v):
        new = rx.Variable(2.0)
    return [tf_class(new), [tf_name(*part.devices()) for part in new.values]]


def created_in_scope():
    extended = mirrored(2).extended
    return [
        extended.variable_created_in_scope(variable()),
        extended.variable_created_in_scope(rx.Variable(1.0)),
    ]


def container_of_a_copy():
    v = variable()
    return mirrored(2).extended.value_container(v.values[0]) is v


def step_of_a_users_optimizer():
    v = variable()

    def apply(strategy, grad):
        total = strategy.extended.reduce_to("SUM", grad, v)
        strategy.extended.update(v, lambda v, g: v.assign_sub(0.1 * g), (total,))

    run(lambda grad: context().merge_call(apply, (grad,)), values(1.0, 2.0))
    return copies(v)


EXTENDED = [
    differs(
        "update_group_true",
        {"type": "Mirrored", "components": Each(11.0, 21.0)},
        updated_by_a_replicas_own,
        ours=Raises(rx.ReplicaDivergenceError),
        reason=DRIFTS,
    ),
    same(
        "update_group_false",
        {"type": "tuple", "value": [2.0, 2.0]},
        local_results_of_an_update,
    ),
    same(
        "update_group_true_tensor",
        Each(2.0, 2.0),
        lambda: update(variable(), lambda v, x: v + x, 1.0),
    ),
    differs(
        "update_in_replica_ctx",
        Each(11.0, 21.0),
        updated_in_a_step,
        ours=Raises(rx.ReplicaDivergenceError),
        reason=DRIFTS,
    ),
    differs(
        "assign_in_update_fn_distributed",
        Each(11.0, 21.0),
        assigned_in_an_update,
        ours=Raises(rx.ReplicaDivergenceError),
        reason=DRIFTS,
    ),
    same(
        "update_non_variable",
        Raises("AssertionError"),
        lambda: update(1.0, lambda v: v),
    ),
    same("colocate_vars_with", ["MirroredVariable", [CPU_0, CPU_1]], colocated),
    same(
        "colocate_vars_with_foreign",
        Raises("ValueError"),
        lambda: mirrored(2).extended.colocate_vars_with(1.0),
    ),
    same("variable_created_in_scope", [True, False], created_in_scope),
    differs(
        "value_container",
        True,
        container_of_a_copy,
        ours=False,
        reason="TF's copies are variables that know the whole. Here a copy is a plain "
        "array, and only the variable itself is its own container.",
    ),
    same("optimizer_like_update", Each(0.7, 0.7), step_of_a_users_optimizer),
]


# -- reducing ------------------------------------------------------------------------


def reduced(op):
    return mirrored(2).reduce(op, variable(3.0), axis=None)


def mean_of_a_variable():
    mean = reduced("MEAN")
    is_variable = isinstance(mean, rx.Variable)
    return ["ResourceVariable" if is_variable else "EagerTensor", mean]


REDUCING = [
    differs(
        "reduce_of_mirrored_variable_mean",
        ["ResourceVariable", 3.0],
        mean_of_a_variable,
        ours=["EagerTensor", 3.0],
        reason="TF hands out a copy of the variable that can be assigned, behind the "
        "back of the others. Here the mean is a value.",
    ),
    same(
        "reduce_of_mirrored_variable_sum",
        Raises("AssertionError"),
        lambda: reduced("SUM"),
    ),
]


# -- central storage -----------------------------------------------------------------


def central():
    return rx.CentralStorageStrategy(["cpu:0", "cpu:1"])


def central_properties():
    strategy = central()
    return [
        strategy.num_replicas_in_sync,
        [tf_name(d) for d in strategy.extended.worker_devices],
        [
            tf_name(d).rpartition("device:")[2]
            for d in strategy.extended.parameter_devices
        ],
    ]


def central_class(v):
    lies_once = len(v.read_value().devices()) == 1
    return "AggregatingVariable" if lies_once else "MirroredVariable"


def central_after_adding(*how):
    strategy = central()
    v = variable(1.0, *how, strategy=strategy)
    strategy.run(lambda: v.assign_add(unequal()))
    return v


def central_answer(aggregation):
    v = central_after_adding("AUTO", aggregation)
    return [central_class(v), v.read_value()]


def central_on_read():
    v = central_after_adding("ON_READ", "SUM")
    return [central_class(v), v.read_value(), v.synchronization.name]


def central_dataset():
    dataset = central().experimental_distribute_dataset(
        rx.datasets.from_arrays(np.arange(4)).batch(4), rx.InputOptions()
    )
    return next(iter(dataset))


CENTRAL_STORAGE = [
    same("central_storage_props", [2, [CPU_0, CPU_1], ["CPU:0"]], central_properties),
    same(
        "central_storage_assign_add_NONE",
        Raises("ValueError"),
        lambda: central_answer("NONE"),
    ),
    same(
        "central_storage_assign_add_MEAN",
        ["AggregatingVariable", 16.0],
        lambda: central_answer("MEAN"),
    ),
    same(
        "central_storage_assign_add_ONLY_FIRST_REPLICA",
        ["AggregatingVariable", 11.0],
        lambda: central_answer("ONLY_FIRST_REPLICA"),
    ),
    same(
        "central_storage_on_read",
        ["AggregatingVariable", 31.0, "ON_READ"],
        central_on_read,
    ),
    differs(
        "central_storage_distribute_dataset_options_bug",
        Raises("AttributeError"),
        central_dataset,
        ours=Each([0, 1], [2, 3]),
        reason="TF misspells the name of an option, and fails whenever options are "
        "given. Here they are taken.",
    ),
]

CASES = [*EXTENDED, *REDUCING, *CENTRAL_STORAGE]
