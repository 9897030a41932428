"""TF's answers for making, writing and reading variables."""

import jax
import jax.numpy as jnp
from replicax.strategies.variables.layouts import StackedLayout

import replicax as rx

from .steps import ONE_TRACE, replica_id, run
from .table import Each, Raises, differs, mirrored, not_applicable, same

DRIFTS = (
    "TF lets the copies of a variable become different, without a word. Here a write "
    "without an aggregation must be the same on all replicas, which is proved."
)
ONE_COPY = "JAX has no resources behind arrays, so there are no handles to hand out."


def variable(
    initial_value=1.0,
    synchronization="AUTO",
    aggregation="NONE",
    *,
    strategy=None,
    **settings,
):
    """A variable of the strategy of two replicas, or of another one."""
    with (strategy or mirrored(2)).scope():
        return rx.Variable(
            initial_value,
            synchronization=rx.VariableSynchronization[synchronization],
            aggregation=rx.VariableAggregation[aggregation],
            **settings,
        )


def copies(v):
    return rx.PerReplica(v.values)


def tf_class(v):
    """What TF calls a variable that lies as this one does."""
    if v.is_free:
        return "ResourceVariable"
    is_stacked = isinstance(v.layout, StackedLayout)
    return "SyncOnReadVariable" if is_stacked else "MirroredVariable"


def error_or(call):
    """The value of a call, or the error that it raises, as a part of an answer."""
    try:
        return call()
    except Exception as error:
        return error


# -- making --------------------------------------------------------------------------


def settings_of(v):
    return [tf_class(v), v.synchronization.name, v.aggregation.name, v.trainable]


def creation(synchronization, aggregation, *tf):
    return same(
        f"create_{synchronization}_{aggregation}",
        list(tf) or Raises("ValueError"),
        lambda: settings_of(variable(1.0, synchronization, aggregation)),
    )


def creation_of_integers(aggregation, tf):
    return same(
        f"create_int_{aggregation}",
        tf,
        lambda: tf_class(variable(1, aggregation=aggregation)),
    )


def trainable_on_read():
    v = variable(1.0, "ON_READ", "SUM", trainable=True)
    return [tf_class(v), v.trainable]


def invalid_aggregation():
    with mirrored(2).scope():
        return rx.Variable(1.0, aggregation="foo")


def outside_of_a_scope():
    kinds = rx.VariableSynchronization
    return [
        tf_class(rx.Variable(1.0, synchronization=kind))
        for kind in (kinds.NONE, kinds.ON_READ)
    ]


def callable_initial_value():
    keys = iter(jax.random.split(jax.random.key(0)))
    calls = []
    v = variable(lambda: (calls.append(1), jax.random.uniform(next(keys)))[1])
    first, second = map(float, v.values)
    return [len(calls), first == second]


def made_in_a_step():
    made = []

    def step():
        if not made:
            made.append(rx.Variable(1.0))
        return made[0]

    v, again = run(step), run(step)
    return [tf_class(v), len(v.values), v is again, tf_class(again)]


def made_in_every_step():
    return run(lambda: rx.Variable(1.0) + rx.Variable(2.0))


CREATION = [
    creation("AUTO", "SUM", "MirroredVariable", "ON_WRITE", "SUM", True),
    creation(
        "AUTO",
        "ONLY_FIRST_REPLICA",
        "MirroredVariable",
        "ON_WRITE",
        "ONLY_FIRST_REPLICA",
        True,
    ),
    creation("NONE", "SUM"),
    creation("NONE", "MEAN"),
    creation("ON_WRITE", "NONE", "MirroredVariable", "ON_WRITE", "NONE", True),
    creation("ON_WRITE", "SUM", "MirroredVariable", "ON_WRITE", "SUM", True),
    creation("ON_WRITE", "MEAN", "MirroredVariable", "ON_WRITE", "MEAN", True),
    creation(
        "ON_WRITE",
        "ONLY_FIRST_REPLICA",
        "MirroredVariable",
        "ON_WRITE",
        "ONLY_FIRST_REPLICA",
        True,
    ),
    creation("ON_READ", "SUM", "SyncOnReadVariable", "ON_READ", "SUM", False),
    creation("ON_READ", "MEAN", "SyncOnReadVariable", "ON_READ", "MEAN", False),
    creation(
        "ON_READ",
        "ONLY_FIRST_REPLICA",
        "SyncOnReadVariable",
        "ON_READ",
        "ONLY_FIRST_REPLICA",
        False,
    ),
    same(
        "create_ON_READ_trainable_true",
        ["SyncOnReadVariable", True],
        trainable_on_read,
    ),
    creation_of_integers("NONE", "MirroredVariable"),
    creation_of_integers("MEAN", Raises("ValueError")),
    creation_of_integers("ONLY_FIRST_REPLICA", "MirroredVariable"),
    same("create_invalid_agg", Raises("ValueError"), invalid_aggregation),
    same(
        "create_outside_scope_sync_none",
        ["ResourceVariable", "ResourceVariable"],
        outside_of_a_scope,
    ),
    same("var_init_copy", [1, True], callable_initial_value),
    same(
        "var_create_in_replica_fn",
        ["MirroredVariable", 2, True, "MirroredVariable"],
        made_in_a_step,
    ),
    differs(
        "var_same_name_reuse_in_run",
        [Each(3.0, 3.0), [2, 2]],
        made_in_every_step,
        ours=Raises(rx.ReplicaxError),
        reason="TF makes new variables in every call of such a step. Here the step is "
        "compiled once, so it must keep the variables that it makes.",
    ),
    not_applicable("var_mismatched_names_in_run", Raises("RuntimeError"), ONE_TRACE),
]


# -- combined when written -----------------------------------------------------------


def unequal():
    return (replica_id() + 1) * 10.0


def written(call, value, **settings):
    v = variable(**settings)
    result = run(lambda: getattr(v, call)(value()))
    return {"components": copies(v), "run_result": result}


def on_write(call, aggregation, *tf):
    name = f"onwrite_{call}_{aggregation}"
    tf = {"components": Each(*tf), "run_result": Each(*tf)}
    ask = lambda: written(call, unequal, aggregation=aggregation)  # noqa: E731
    if aggregation == "NONE":
        ours = Raises(rx.ReplicaDivergenceError)
        return differs(name, tf, ask, ours=ours, reason=DRIFTS)
    return same(name, tf, ask)


def after_adding(value, aggregation):
    return written("assign_add", value, aggregation=aggregation)["components"]


def adding_equal_arrays(aggregation, tf):
    return same(
        f"onwrite_assign_add_sameconst_{aggregation}",
        Each(tf, tf),
        lambda: after_adding(lambda: jnp.float32(1.0), aggregation),
    )


def adding_one_array(aggregation):
    one = jnp.float32(1.0)
    return after_adding(lambda: one, aggregation)


def between_steps(call, value, **settings):
    v = variable(**settings)
    with mirrored(2).scope():
        getattr(v, call)(value)
    return v


def local_results():
    v = variable()
    parts = mirrored(2).experimental_local_results(v)
    pairs = zip(parts, v.values, strict=True)
    return [
        len(parts),
        all(a.devices() == b.devices() and a == b for a, b in pairs),
    ]


def returned_from_a_step():
    v = variable()
    return run(lambda: v) is v


def written_in_the_scope_of_another():
    v = variable()
    with mirrored(4).scope():
        return v.assign(2.0)


SUMS_EQUAL_VALUES = (
    "TF cannot sum one value for all replicas. Here it counts once for each of them, "
    "as equal values of the replicas do in TF."
)

ON_WRITE = [
    on_write("assign", "NONE", 10.0, 20.0),
    on_write("assign", "SUM", 30.0, 30.0),
    on_write("assign", "MEAN", 15.0, 15.0),
    on_write("assign_add", "NONE", 11.0, 21.0),
    on_write("assign_add", "SUM", 31.0, 31.0),
    on_write("assign_add", "MEAN", 16.0, 16.0),
    on_write("assign_add", "ONLY_FIRST_REPLICA", 11.0, 11.0),
    on_write("assign_sub", "NONE", -9.0, -19.0),
    on_write("assign_sub", "MEAN", -14.0, -14.0),
    on_write("assign_sub", "ONLY_FIRST_REPLICA", -9.0, -9.0),
    adding_equal_arrays("SUM", 3.0),
    adding_equal_arrays("MEAN", 2.0),
    adding_equal_arrays("ONLY_FIRST_REPLICA", 2.0),
    same(
        "onwrite_assign_add_pyfloat_MEAN",
        {"components": Each(2.0, 2.0), "run_result": Each(2.0, 2.0)},
        lambda: written("assign_add", lambda: 1.0, aggregation="MEAN"),
    ),
    same(
        "onwrite_assign_add_sharedtensor_ONLY_FIRST_REPLICA",
        Each(2.0, 2.0),
        lambda: adding_one_array("ONLY_FIRST_REPLICA"),
    ),
    differs(
        "onwrite_assign_add_sharedtensor_SUM",
        Raises("ValueError"),
        lambda: adding_one_array("SUM"),
        ours=Each(3.0, 3.0),
        reason=SUMS_EQUAL_VALUES,
    ),
    differs(
        "onwrite_assign_add_zero_SUM",
        Raises("AttributeError"),
        lambda: after_adding(lambda: 0.0, "SUM"),
        ours=Each(1.0, 1.0),
        reason=SUMS_EQUAL_VALUES,
    ),
    same(
        "onwrite_int_assign_first",
        {"components": Each(10, 10), "run_result": Each(10, 10)},
        lambda: written(
            "assign",
            lambda: (replica_id() + 1) * 10,
            initial_value=1,
            aggregation="ONLY_FIRST_REPLICA",
        ),
    ),
    same(
        "onwrite_cross_assign_add",
        Each(6.0, 6.0),
        lambda: copies(between_steps("assign_add", 5.0, aggregation="SUM")),
    ),
    differs(
        "onwrite_cross_assign_result_type",
        "Mirrored",
        lambda: type(variable().assign(2.0)).__name__,
        ours="Variable",
        reason="Between steps an assignment returns the variable, which is the same in "
        "rx.function and outside of it. TF does so in a tf.function only.",
    ),
    same(
        "onwrite_assign_shape_mismatch",
        Raises("ValueError"),
        lambda: between_steps("assign", [1.0], initial_value=[1.0, 2.0]),
    ),
    not_applicable(
        "onwrite_read_replica",
        Each(1.0, 2.0),
        "It reads copies that were made different before, which cannot be done here.",
    ),
    same("onwrite_arith_cross", 7.0, lambda: variable(3.0) * 2 + 1),
    same(
        "onwrite_values_prop",
        ["tuple", 2],
        lambda: [type(variable().values).__name__, len(variable().values)],
    ),
    same("onwrite_local_results", [2, True], local_results),
    not_applicable("onwrite_handle_cross_error", Raises("ValueError"), ONE_COPY),
    not_applicable("onwrite_handle_default_ctx", True, ONE_COPY),
    same("onwrite_run_returns_var", True, returned_from_a_step),
    same(
        "onwrite_assign_other_strategy",
        Raises("RuntimeError"),
        written_in_the_scope_of_another,
    ),
]


# -- combined when read --------------------------------------------------------------


def on_read(call, aggregation, first, second, combined):
    def ask():
        v = variable(1.0, "ON_READ", aggregation)
        run(lambda: getattr(v, call)(unequal()))
        answer = {"components": copies(v), "cross_read": error_or(v.read_value)}
        if aggregation != "NONE":
            answer["cross_read_dtype"] = v.read_value().dtype.name
        return answer

    tf = {"components": Each(first, second), "cross_read": combined}
    if aggregation != "NONE":
        tf["cross_read_dtype"] = "float32"
    return same(f"onread_{call}_{aggregation}", tf, ask)


def on_read_between_steps(call, aggregation, tf):
    return same(
        f"onread_cross_{call}_{aggregation}",
        tf,
        lambda: copies(
            between_steps(call, 5.0, synchronization="ON_READ", aggregation=aggregation)
        ),
    )


def summed(value=1.0):
    return variable(value, "ON_READ", "SUM")


def assigned_integers(value):
    v = summed(1).assign(value)
    return [copies(v), v.read_value()]


def read_in_a_step():
    v = summed()
    run(lambda: v.assign(unequal()))
    return run(v.read_value)


REFUSED = Raises("ValueError")

ON_READ = [
    on_read("assign", "SUM", 10.0, 20.0, 30.0),
    on_read("assign", "MEAN", 10.0, 20.0, 15.0),
    on_read("assign_add", "NONE", 11.0, 21.0, REFUSED),
    on_read("assign_add", "SUM", 11.0, 21.0, 32.0),
    on_read("assign_add", "MEAN", 11.0, 21.0, 16.0),
    on_read("assign_add", "ONLY_FIRST_REPLICA", 11.0, 21.0, 11.0),
    on_read("assign_sub", "NONE", -9.0, -19.0, REFUSED),
    on_read("assign_sub", "SUM", -9.0, -19.0, -28.0),
    on_read("assign_sub", "MEAN", -9.0, -19.0, -14.0),
    on_read("assign_sub", "ONLY_FIRST_REPLICA", -9.0, -19.0, -9.0),
    on_read_between_steps("assign", "NONE", REFUSED),
    on_read_between_steps("assign_add", "NONE", REFUSED),
    on_read_between_steps("assign_sub", "NONE", REFUSED),
    on_read_between_steps("assign", "SUM", Each(2.5, 2.5)),
    on_read_between_steps("assign_add", "SUM", REFUSED),
    on_read_between_steps("assign_sub", "SUM", REFUSED),
    on_read_between_steps("assign", "MEAN", Each(5.0, 5.0)),
    on_read_between_steps("assign_add", "MEAN", Each(6.0, 6.0)),
    on_read_between_steps("assign_sub", "MEAN", Each(-4.0, -4.0)),
    on_read_between_steps("assign", "ONLY_FIRST_REPLICA", Each(5.0, 5.0)),
    on_read_between_steps("assign_add", "ONLY_FIRST_REPLICA", Each(6.0, 6.0)),
    on_read_between_steps("assign_sub", "ONLY_FIRST_REPLICA", Each(-4.0, -4.0)),
    same(
        "onread_initial_SUM",
        [Each(1.0, 1.0), 2.0],
        lambda: [copies(summed()), summed().read_value()],
    ),
    same(
        "onread_int_cross_assign_SUM",
        [Each(2, 2), 4],
        lambda: assigned_integers(5),
    ),
    same(
        "onread_int_cross_assign_neg_SUM",
        Each(-2, -2),
        lambda: assigned_integers(-5)[0],
    ),
    same("onread_replica_read", Each(10.0, 20.0), read_in_a_step),
    not_applicable(
        "onread_sync_on_read_context2",
        Each(30.0, 30.0),
        "The context is internal to TF. A step that wants the combined value asks for "
        "it: `get_replica_context().all_reduce`.",
    ),
    same("onread_arith_cross", 3.0, lambda: summed() + 1),
    same("onread_trainable_default", False, lambda: summed().trainable),
    same(
        "read_var",
        [4.0, 3.0],
        lambda: [
            mirrored(2).extended.read_var(v) for v in (summed(2.0), variable(3.0))
        ],
    ),
]


CASES = [*CREATION, *ON_WRITE, *ON_READ]
