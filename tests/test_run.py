"""``strategy.run``: what enters, what comes out, what is compiled and when."""

import collections
import dataclasses
import enum
import functools
import gc
import re
import threading
import warnings
import weakref

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from replicax.strategies.fence import Fence

import replicax as rx

ONE, TWO, THREE, EIGHT = (
    rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (1, 2, 3, 8)
)
ALL = pytest.mark.parametrize(
    "strategy", [ONE, TWO, THREE, EIGHT], ids=lambda s: f"x{s.num_replicas_in_sync}"
)


def ids(strategy, shape=(), dtype=np.float32):
    """A per-replica value: the replica's id plus one, filled to a shape."""
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: np.full(shape, ctx.replica_id_in_sync_group + 1, dtype)
    )


def context():
    return rx.get_replica_context()


def traces_of(strategy, fn, *calls):
    """Runs ``fn`` on each of ``calls`` and counts how often it was traced."""
    traces = []

    @functools.wraps(fn)
    def counted(*args, **kwargs):
        traces.append(1)
        return fn(*args, **kwargs)

    for args in calls:
        strategy.run(counted, args)
    return len(traces)


# -- kinds of outputs ----------------------------------------------------------------


@ALL
def test_the_kind_of_each_output_follows_from_the_step_not_from_the_replicas(strategy):
    def step(w, x):
        return {"kept": w + 1, "local": x * w, "sum": context().all_reduce("sum", x)}

    out = strategy.run(step, (jnp.float32(2), ids(strategy)))
    n = strategy.num_replicas_in_sync
    assert isinstance(out["local"], rx.PerReplica)
    assert [float(v) for v in out["local"].values] == [2.0 * (i + 1) for i in range(n)]
    for name in ("kept", "sum"):
        assert isinstance(out[name], jax.Array)
        assert out[name].sharding.is_fully_replicated
        assert out[name].sharding.device_set == set(strategy.mesh.devices.flat)
    assert float(out["kept"]) == 3
    assert float(out["sum"]) == n * (n + 1) / 2


@ALL
def test_the_same_training_step_gives_the_single_device_answer(strategy):
    n = strategy.num_replicas_in_sync
    x = np.arange(24 * 3, dtype=np.float32).reshape(24, 3) / 50
    y = x @ np.array([1.0, -2.0, 0.5], np.float32)
    w0 = jnp.zeros(3)

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    def step(w, x, y):
        g = context().all_reduce("mean", jax.grad(loss)(w, x, y))
        return w - 0.1 * g

    def rows(a):
        return strategy.experimental_distribute_values_from_function(
            lambda c: np.split(a, n)[c.replica_id_in_sync_group]
        )

    w, expected = w0, w0
    for _ in range(3):
        w = strategy.run(step, (w, rows(x), rows(y)))
        expected = expected - 0.1 * jax.grad(loss)(expected, x, y)
    np.testing.assert_allclose(w, expected, rtol=1e-6)


def test_one_replica_holds_no_collective():
    def step(x):
        return context().all_reduce("mean", x)

    text = compiled_text(ONE, step, ids(ONE, (4,)))
    assert not re.findall(r"all-(?:reduce|gather)|reduce-scatter", text)


def test_the_kinds_of_gradients_do_not_depend_on_the_number_of_replicas():
    def step(x):
        ctx = context()

        def kinds(f):
            return jax.grad(lambda x: jnp.sum(f(x) * x[0]))(x)

        return [
            kinds(lambda x: ctx.all_reduce("sum", x)),
            jax.grad(lambda y: jnp.sum(ctx.all_reduce("sum", y) * x))(x),
            jax.grad(lambda y: jnp.sum(ctx.all_gather(y)))(x),
            jax.grad(lambda y: jnp.sum(ctx.reduce_scatter("sum", y) * x[0]))(x),
            ctx.all_gather(x),
            ctx.reduce_scatter("mean", x),
            lax.scan(lambda c, x: (c + ctx.all_reduce("sum", x), c), 0.0, x)[0],
        ]

    kinds = [
        [isinstance(o, rx.PerReplica) for o in s.run(step, (ids(s, (6,)),))]
        for s in (ONE, TWO, THREE)
    ]
    assert kinds[0] == kinds[1] == kinds[2]
    assert set(kinds[0]) == {True, False}


def test_one_replica_would_skip_no_collective_but_is_refused_as_many_are():
    def step(x):
        return lax.cond(x > 1, lambda x: context().all_reduce("sum", x), lambda x: x, x)

    with pytest.raises(rx.DivergentCollectiveError, match=r"test_run\.py:\d+"):
        ONE.run(step, (ids(ONE),))


def test_a_step_of_two_replicas_holds_exactly_its_one_collective():
    def step(w, x):
        g = jax.grad(lambda w: jnp.sum((x * w["a"] + w["b"]) ** 2))(w)
        g = context().all_reduce("mean", g)
        return jax.tree.map(lambda p, d: p - d, w, g)

    w = {"a": jnp.ones(4), "b": jnp.ones(4)}
    text = compiled_text(TWO, step, w, ids(TWO, (4,)))
    assert len(re.findall(r"= .* all-reduce(?:-start)?\(", text)) == 1
    assert not re.findall(r"all-gather|all-to-all|collective-permute", text)


def compiled_text(strategy, fn, *args):
    run = jax.jit(lambda *a: strategy.run(fn, a))
    placed = [
        a
        if isinstance(a, rx.PerReplica)
        else strategy.extended.broadcast_to(a)
        if isinstance(a, jax.Array)
        else jax.tree.map(strategy.extended.broadcast_to, a)
        for a in args
    ]
    return run.lower(*placed).compile().as_text()


def test_outputs_that_are_not_arrays_come_back_as_they_are():
    def step(x):
        return {"x": x, "name": "loss", "none": None, "fn": step, "py": 2}

    out = TWO.run(step, (ids(TWO),))
    assert out["name"] == "loss" and out["none"] is None and out["fn"] is step
    assert int(out["py"]) == 2


def test_an_int_or_bool_output_is_an_array():
    out = TWO.run(lambda: (3, True, 1.5, np.float32(2), np.arange(2)))
    assert [np.asarray(v).tolist() for v in out] == [3, True, 1.5, 2.0, [0, 1]]


# -- what enters ---------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


class Pair(collections.namedtuple("Pair", ["a", "b"])):
    pass


@flax.struct.dataclass
class Struct:
    x: jax.Array
    name: str = flax.struct.field(pytree_node=False)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Custom:
    x: object
    tag: str

    def tree_flatten(self):
        return (self.x,), self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(children[0], tag)


def test_nested_containers_keep_their_types():
    x = ids(TWO)
    arg = {"n": None, "p": Pair(x, [x, 1.0]), "s": Struct(x, "s"), "c": Custom(x, "t")}
    out = TWO.run(lambda a: a, (arg,))
    assert out["n"] is None
    assert type(out["p"]) is Pair and type(out["p"].b) is list
    assert type(out["s"]) is Struct and out["s"].name == "s"
    assert type(out["c"]) is Custom and out["c"].tag == "t"
    assert isinstance(out["c"].x, rx.PerReplica)
    assert float(out["p"].b[1]) == 1.0


def test_kwargs_enter_like_args():
    out = TWO.run(lambda a, *, b: a * b, (ids(TWO),), {"b": ids(TWO)})
    assert [float(v) for v in out.values] == [1.0, 4.0]


def test_numbers_are_traced_and_weakly_typed():
    seen = []

    def step(x, scale):
        seen.append(type(scale))
        return x * scale

    half = ids(TWO, dtype=jnp.bfloat16)
    for scale in (2, 3, 4):
        out = TWO.run(step, (half, scale))
    assert len(seen) == 1
    assert out.dtype == jnp.bfloat16
    assert [float(v) for v in out.values] == [4.0, 8.0]


@pytest.mark.parametrize("static", [True, "a", None, Color.RED, jnp.float32, len])
def test_static_arguments_reach_the_step_as_they_are(static):
    def step(x, s):
        assert s is static
        return x

    TWO.run(step, (ids(TWO), static))


def test_another_static_value_is_another_program_and_the_same_one_is_not():
    def step(x, training):
        return x * 2 if training else x

    x = ids(TWO)
    assert traces_of(TWO, step, (x, True), (x, False), (x, True), (x, False)) == 2
    assert [float(v) for v in TWO.run(step, (x, True)).values] == [2, 4]
    assert [float(v) for v in TWO.run(step, (x, False)).values] == [1, 2]


def test_true_and_one_are_not_the_same_argument():
    seen = []
    for arg in (True, 1):
        TWO.run(lambda a: seen.append(isinstance(a, bool)), (arg,))
    assert seen == [True, False]


def test_an_unhashable_object_is_refused_with_its_name():
    class Config:
        __hash__ = None

    with pytest.raises(rx.StaticArgumentError, match=r"cfg\['a'\] is a Config"):
        TWO.run(lambda cfg: 0, ({"a": Config()},))


def test_a_repeated_call_takes_other_kinds_of_arguments():
    def step(x, m):
        return x * (2 if isinstance(m, str) else m)

    x = jnp.ones(3)
    for _ in range(4):
        assert TWO.run(step, (x, jnp.float32(3))).tolist() == [3.0] * 3
    assert TWO.run(step, (x, "two")).tolist() == [2.0] * 3
    for wrong in (np.array(["a"]), {"a"}):
        with pytest.raises(rx.StaticArgumentError, match="m is a"):
            TWO.run(step, (x, wrong))
    for wrong in ([("m", 1)], "ab", 5):
        with pytest.raises(ValueError, match="kwargs must be a dict"):
            TWO.run(step, (x, jnp.float32(3)), wrong)
    assert TWO.run(step, (x, jnp.float32(3))).tolist() == [3.0] * 3


def test_arrays_of_strings_are_refused_with_their_name():
    with pytest.raises(rx.StaticArgumentError, match=r"names.*dtype <U1"):
        TWO.run(lambda names: 0, (np.array(["a", "b"]),))
    each = rx.PerReplica([np.array(["a"]), np.array(["b"])])
    with pytest.raises(rx.StaticArgumentError, match=r"\['names'\].*dtype <U1"):
        TWO.run(lambda batch: 0, ({"names": each},))


def test_components_of_unequal_shape_are_refused_and_both_shapes_named():
    ragged = rx.PerReplica([np.ones(2), np.ones(3)])
    with pytest.raises(rx.PerReplicaError, match=r"\[2\].*\[3\].*Pad"):
        TWO.run(lambda x: x, (ragged,))


@pytest.mark.parametrize("place", ["eagerly", "in a jit"])
def test_a_stacked_array_of_too_many_rows_is_refused(place):
    rows = jax.device_put(jnp.arange(4.0), TWO.placer.per_replica)
    value = rx.PerReplica.from_array(rows)

    def call(value):
        return TWO.run(lambda x: x, (value,))

    TWO.run(lambda x: x, (ids(TWO),))
    with pytest.raises(rx.PerReplicaError, match=r"2 rows for each|holds 4"):
        (call if place == "eagerly" else jax.jit(call))(value)


def test_components_given_by_hand_are_placed():
    out = TWO.run(lambda x: x + 1, (rx.PerReplica([1.0, 2.0]),))
    assert [float(v) for v in out.values] == [2.0, 3.0]


def test_a_value_of_another_number_of_replicas_is_refused():
    with pytest.raises(rx.PerReplicaError, match=r"2 replicas\. Got .* holds 3"):
        TWO.run(lambda x: x, (ids(THREE),))


def test_a_value_of_another_strategy_with_as_many_replicas_is_moved():
    other = rx.MirroredStrategy(["cpu:4", "cpu:5"])
    out = other.run(lambda x: x * 2, (ids(TWO),))
    assert [float(v) for v in out.values] == [2.0, 4.0]
    assert out.array.sharding.device_set == set(other.mesh.devices.flat)


def test_options_names_and_results_of_the_wrong_kind_are_refused():
    with pytest.raises(TypeError, match="options must be a RunOptions"):
        TWO.run(lambda: 0, options={"donate": 0})
    with pytest.raises(TypeError, match="names as keys"):
        TWO.run(lambda: 0, kwargs={1: 2})

    def generator():
        yield 1

    async def coroutine():
        return 1

    for step in (generator, coroutine):
        with pytest.raises(TypeError, match="body has not run"):
            TWO.run(step)
    for bad in ("ab", {"a": 1}):
        with pytest.raises(TypeError, match="list or tuple of components"):
            rx.PerReplica(bad)


@pytest.mark.parametrize("args", [jnp.ones(2), "ab", {"x": 1}, 3])
def test_args_must_be_a_list_or_tuple(args):
    with pytest.raises(ValueError, match="args must be a list or tuple"):
        TWO.run(lambda *a: 0, args)


def test_empty_arrays_bools_and_key_arrays_pass():
    key = jax.random.key(0)
    keys = TWO.experimental_distribute_values_from_function(
        lambda c: jax.random.key(c.replica_id_in_sync_group)
    )
    empty = ids(TWO, (0, 3))
    out = TWO.run(
        lambda *a: a, (key, keys, empty, jnp.array(True), ids(TWO, (2,), np.bool_))
    )
    assert jax.random.key_data(out[0]).tolist() == [0, 0]
    assert jax.random.key_data(out[1].values[1]).tolist() == [0, 1]
    assert out[2].shape == (0, 3)
    assert bool(out[3]) and out[4].dtype == bool


# -- placement -----------------------------------------------------------------------


def test_an_array_from_elsewhere_is_sent_once_and_not_again(monkeypatch):
    sent = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, s: (sent.append(x), put(x, s))[1])
    w = put(jnp.ones(5), jax.devices()[3])
    x = ids(TWO, (5,))
    sent.clear()
    for _ in range(3):
        TWO.run(lambda w, x: w * x, (w, x))
    assert len(sent) == 1


def test_what_was_placed_is_forgotten_with_its_original():
    w = jnp.ones(5)
    TWO.run(lambda w: w + 1, (w,))
    key = id(w)
    assert key in TWO.placer._placed
    del w
    gc.collect()
    assert key not in TWO.placer._placed


def test_a_numpy_array_changed_between_calls_is_sent_again():
    w = np.zeros(1000, np.float32)
    first = TWO.run(lambda w: w + 0, (w,))
    w[:] = 5
    second = TWO.run(lambda w: w + 0, (w,))
    assert float(first[0]) == 0.0 and float(second[0]) == 5.0


def test_outputs_of_a_step_enter_the_next_one_without_being_moved(monkeypatch):
    def step(w, x):
        return w + context().all_reduce("sum", x)

    w, x = TWO.run(step, (jnp.zeros(3), ids(TWO, (3,)))), ids(TWO, (3,))
    monkeypatch.setattr(jax, "device_put", None)
    for _ in range(2):
        w = TWO.run(step, (w, x))
    assert w.tolist() == [9.0] * 3


# -- caching -------------------------------------------------------------------------


@ALL
def test_a_loop_over_its_own_outputs_is_traced_once(strategy):
    traced = []

    def step(w, x):
        traced.append(1)
        return w + context().all_reduce("sum", x)

    w = jnp.zeros(3)
    for _ in range(3):
        w = strategy.run(step, (w, ids(strategy, (3,))))
    assert len(traced) == 1


def test_a_step_defined_anew_in_a_loop_is_compiled_once():
    traced = []

    def make(scale, weights):
        def loss(x):
            return jnp.sum(x * weights) * scale

        def step(x):
            traced.append(1)
            return loss(x)

        return step

    weights = jnp.ones(3)
    for _ in range(4):
        TWO.run(make(0.5, weights), (ids(TWO, (3,)),))
    assert len(traced) == 1
    TWO.run(make(0.25, weights), (ids(TWO, (3,)),))
    assert len(traced) == 2
    out = TWO.run(make(0.5, weights + 1), (ids(TWO, (3,)),))
    assert len(traced) == 3
    assert [float(v) for v in out.values] == [3.0, 6.0]


def test_captured_negative_zero_is_not_zero():
    def make(zero):
        return lambda: jnp.copysign(1.0, zero)

    assert float(TWO.run(make(0.0))) == 1.0
    assert float(TWO.run(make(-0.0))) == -1.0


def test_a_rebound_variable_of_the_enclosing_function_is_seen():
    scale = jnp.float32(2)

    def step(x):
        return x * scale

    x = ids(TWO)
    assert [float(v) for v in TWO.run(step, (x,)).values] == [2, 4]
    scale = jnp.float32(3)
    assert [float(v) for v in TWO.run(step, (x,)).values] == [3, 6]


def test_a_rebound_variable_of_a_captured_function_is_seen():
    scale = jnp.float32(2)

    def scaled(x):
        return x * scale

    def step(x):
        return scaled(x)

    x = ids(TWO)
    for _ in range(2):
        assert [float(v) for v in TWO.run(step, (x,)).values] == [2, 4]
    scale = jnp.float32(3)
    assert [float(v) for v in TWO.run(step, (x,)).values] == [3, 6]


def test_a_repeated_call_with_other_kinds_of_arguments_is_another_call():
    seen = []

    def step(x):
        seen.append(type(x))
        return x

    for x in (jnp.ones(2), jnp.ones(2), True, jnp.ones(2), 1, ids(TWO), np.ones(2)):
        TWO.run(step, (x,))
    assert seen.count(bool) == 1
    copies = [
        jax.device_put(np.float32([i]), d) for i, d in enumerate(TWO.mesh.devices)
    ]
    bad = jax.make_array_from_single_device_arrays((1,), TWO.placer.replicated, copies)
    TWO.run(step, (bad,))
    with pytest.raises(rx.ReplicaDivergenceError, match="x"):
        TWO.run(step, (bad,), options=rx.RunOptions(check_values=True))


def test_changed_defaults_and_names_without_a_value_yet_are_seen():
    x = ids(TWO)

    def step(x, scale=2.0):
        if x is None:
            return late
        return x * scale

    for _ in range(3):
        assert [float(v) for v in TWO.run(step, (x,)).values] == [2, 4]
    step.__defaults__ = (3.0,)
    assert [float(v) for v in TWO.run(step, (x,)).values] == [3, 6]
    late = 1.0


def test_no_options_and_default_options_are_the_same_call():
    traced = []
    for options in (None, rx.RunOptions(), None, rx.RunOptions(check_values=True)):
        TWO.run(lambda x: traced.append(1), (1.0,), options=options)
    assert len(traced) == 1


def test_methods_partials_and_jitted_functions_are_compiled_once():
    traced = []

    class Model:
        def __init__(self, scale):
            self.scale = scale

        def step(self, x):
            traced.append(1)
            return x * self.scale

    model, other = Model(2.0), Model(3.0)
    jitted = jax.jit(lambda x: (traced.append(1), x)[1])
    for _ in range(3):
        TWO.run(model.step, (ids(TWO),))
        out = TWO.run(other.step, (ids(TWO),))
        TWO.run(functools.partial(lambda a, x: (traced.append(1), x)[1], 4), (1.0,))
        TWO.run(jitted, (ids(TWO),))
    assert [float(v) for v in out.values] == [3.0, 6.0]
    # The lambda inside partial is one code object; jit traces once more by itself.
    assert len(traced) == 4


def test_a_recursive_step_has_a_key():
    def step(x, depth="aa"):
        return x if not depth else step(x, depth[1:]) + 1

    assert [float(v) for v in TWO.run(step, (ids(TWO),)).values] == [3.0, 4.0]


def test_many_traces_of_one_step_are_warned_about_once():
    strategy = rx.MirroredStrategy(["cpu:0"])

    def step(x):
        return x

    with pytest.warns(UserWarning, match=r"step .*was traced and compiled 16 times"):
        for n in range(1, 17):
            strategy.run(step, (jnp.zeros(n),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(step, (jnp.zeros(20),))


def test_what_a_dropped_strategy_compiled_is_freed():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    big = jnp.ones(1000)
    watch = weakref.ref(big)
    strategy.run(functools.partial(jnp.multiply, big), (ids(strategy),))
    del big, strategy
    jax.clear_caches()
    gc.collect()
    assert watch() is None


def test_programs_are_kept_up_to_a_number(monkeypatch):
    from replicax.strategies import run, tables

    monkeypatch.setattr(
        run, "drop_oldest", functools.partial(tables.drop_oldest, most=4)
    )
    strategy = rx.MirroredStrategy(["cpu:0"])
    steps = [(lambda x, i=i: x + i) for i in range(6)]
    for step in (*steps, steps[0]):
        assert float(strategy.run(step, (1.0,))) == 1.0 + step.__defaults__[0]
    assert len(strategy._runner._calls) == 4


_GLOBAL = 1.0


def _scaled(x):
    return x * _GLOBAL


def test_a_global_that_a_step_reads_is_seen_when_it_changes():
    global _GLOBAL
    x, placed = jnp.ones(2), TWO.run(lambda x: x, (jnp.ones(2),))

    @functools.wraps(_scaled)
    def decorated(x):
        return _scaled(x) + 0 * _GLOBAL

    for value in (1.0, 2.0, 3.0, 3.0):
        _GLOBAL = value
        results = [
            TWO.run(lambda x: x * _GLOBAL, (x,)),  # noqa: B023
            TWO.run(lambda x: _scaled(x), (x,)),
            *(TWO.run(_scaled, (placed,)) for _ in range(3)),
            *(TWO.run(decorated, (placed,)) for _ in range(3)),
        ]
        assert [float(r[0]) for r in results] == [value] * 8


_OPTIONAL = None


def test_a_global_that_is_gone_is_not_none():
    global _OPTIONAL

    def step(x):
        try:
            return x if _OPTIONAL is None else x * 2
        except NameError:
            return x * 8

    for _ in range(4):
        assert float(TWO.run(step, (1.0,))) == 1.0
    del _OPTIONAL
    assert float(TWO.run(step, (1.0,))) == 8.0
    _OPTIONAL = None
    assert float(TWO.run(step, (1.0,))) == 1.0


def test_functions_that_call_each_other_are_looked_at_once():
    names = [f"f{i}" for i in range(20)]
    calls = " + ".join(f"{name}(x)" for name in names)
    namespace = {}
    for name in names:
        exec(f"def {name}(x):\n    return x if True else {calls}", namespace)
    for _ in range(3):
        step = eval("lambda x: f0(x)", namespace)
        assert float(TWO.run(step, (1.0,))) == 1.0


_turn = 0


def _note(x):
    return x, _turn


def test_a_changing_global_of_a_function_that_is_called_does_not_trace_again():
    global _turn
    traces = []

    def step(x):
        traces.append(1)
        jax.debug.callback(_note, x)
        return x

    for turn in range(5):
        _turn = turn
        TWO.run(step, (jnp.ones(2),))
    assert len(traces) == 1


# -- donation ------------------------------------------------------------------------


def sgd_step(w, x):
    return jax.tree.map(lambda p: p - context().all_reduce("mean", x), w)


def test_a_donated_argument_is_reused_and_the_callers_original_survives():
    w = jnp.ones(4)
    donate = rx.RunOptions(donate=0)
    state = TWO.run(sgd_step, (w, ids(TWO, (4,))), options=donate)
    assert w.tolist() == [1.0] * 4
    again = TWO.run(sgd_step, (state, ids(TWO, (4,))), options=donate)
    assert state.is_deleted()
    assert again.tolist() == [-2.0] * 4


def test_what_shares_memory_with_a_donated_array_survives():
    w = jnp.arange(4.0)
    placed = jax.device_put(w, TWO.placer.replicated)
    for _ in range(2):
        TWO.run(sgd_step, (placed, ids(TWO, (4,))), options=rx.RunOptions(donate=(0,)))
    assert w.tolist() == placed.tolist() == [0, 1, 2, 3]


def test_aliased_leaves_can_be_donated():
    a = TWO.extended.broadcast_to(jnp.ones(4))
    state = {"params": a, "ema": a}
    out = TWO.run(sgd_step, (state, ids(TWO, (4,))), options=rx.RunOptions(donate=0))
    out = TWO.run(sgd_step, (out, ids(TWO, (4,))), options=rx.RunOptions(donate=0))
    np.testing.assert_allclose(out["ema"], -2.0)
    np.testing.assert_allclose(out["params"], -2.0)


def test_an_array_donated_and_also_passed_survives():
    a = TWO.run(lambda x: x + 1, (jnp.ones(4),), options=rx.RunOptions(donate=0))
    out = TWO.run(lambda s, k: (s + k, k), (a, a), options=rx.RunOptions(donate=0))
    assert out[0].tolist() == [4.0] * 4
    assert a.tolist() == [2.0] * 4


def test_names_and_negative_positions_can_be_donated():
    def step(a, *, b):
        return a + 1, b + 1

    options = rx.RunOptions(donate=(-1, "b"))
    a, b = TWO.run(step, (jnp.ones(2),), {"b": jnp.ones(2)}, options)
    TWO.run(step, (a,), {"b": b}, options)
    assert a.is_deleted() and b.is_deleted()


@pytest.mark.parametrize("donate", [3, "x", (0, 5)])
def test_donating_an_argument_that_was_not_passed_is_refused(donate):
    with pytest.raises(ValueError, match="donate names"):
        TWO.run(lambda a: a, (1.0,), options=rx.RunOptions(donate=donate))


@pytest.mark.parametrize("donate", [1.5, True, [0.5], None])
def test_donate_of_another_type_is_refused(donate):
    with pytest.raises(TypeError, match="donate names arguments"):
        rx.RunOptions(donate=donate)


def test_nothing_is_donated_when_the_step_raises():
    a = TWO.run(lambda x: x + 1, (jnp.ones(4),), options=rx.RunOptions(donate=0))

    def bad(x):
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        TWO.run(bad, (a,), options=rx.RunOptions(donate=0))
    assert a.tolist() == [2.0] * 4


@pytest.mark.parametrize("strategy", [ONE, TWO], ids=["x1", "x2"])
def test_passing_what_was_consumed_is_refused_by_name(strategy):
    donate = rx.RunOptions(donate=0)
    state = {"w": strategy.run(lambda w: w + 1, (jnp.ones(4),), options=donate)}

    def step(s):
        return {"w": s["w"] * 2}

    strategy.run(step, (state,), options=donate)
    for _ in range(2):
        with pytest.raises(rx.ConsumedArgumentError, match=r"s\['w'\].*earlier run"):
            strategy.run(step, (state,), options=donate)


@pytest.mark.parametrize(
    "rate",
    [
        lambda: jnp.float32(0.5),
        functools.lru_cache(lambda: jnp.float32(0.5)),
        lambda: np.float32(0.5),
        lambda: ids(TWO, ()),
    ],
    ids=["fresh", "the same", "numpy", "per replica"],
)
def test_donation_goes_on_beside_a_kept_array_of_the_same_size(rate):
    def step(state, rate):
        w, count = state
        return w - context().all_reduce("mean", rate * 1.0), count + 1

    state, donated = (jnp.ones(100), jnp.int32(0)), []
    for _ in range(8):
        before = state
        state = TWO.run(step, (state, rate()), options=rx.RunOptions(donate=0))
        donated.append(before[0].is_deleted())
    assert donated[2:] == [True] * 6  # the first states are copied


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("strategy", [ONE, TWO, EIGHT], ids=["x1", "x2", "x8"])
def test_donation_goes_on_beside_arrays_that_must_be_placed(strategy, size):
    def step(a, b):
        return a + b

    x, held, donated = jnp.zeros(size), jnp.ones(size), []
    for number in range(8):
        before = x
        kept = held if number % 2 else jnp.ones(size)
        x = strategy.run(step, (x, kept), options=rx.RunOptions(donate=0))
        donated.append(before.is_deleted())
    assert donated == [False] + [True] * 7
    assert x.tolist() == [8.0] * size


def test_a_kept_array_in_the_memory_of_donated_components_survives():
    each = TWO.run(lambda: context().replica_id_in_sync_group * 0.0 + jnp.ones(1000))
    options = rx.RunOptions(donate=0, allow_divergence=True)
    for _ in range(5):
        shards = [s.data for s in each.array.addressable_shards]
        kept = jax.make_array_from_single_device_arrays(
            (1, 1000), TWO.placer.replicated, shards
        )
        each, total = TWO.run(
            lambda a, b: (a + 1, b.sum()), (each, kept), options=options
        )
    assert float(total) == 5000.0


def test_an_omitted_argument_is_not_taken_for_none_when_donating():
    def step(x, m=5.0):
        return x * (2.0 if m is None else m)

    x, options = jnp.ones(3), rx.RunOptions(donate=0)
    for _ in range(3):
        x = TWO.run(step, (x,), {"m": None}, options)
    assert TWO.run(step, (x,), None, options).tolist() == [40.0] * 3


def test_consumed_arrays_are_named_by_steps_that_do_not_donate():
    options = rx.RunOptions(donate=0)
    state = TWO.run(lambda w: w + 1, (jnp.ones(3),), options=options)
    TWO.run(lambda w: w + 1, (state,), options=options)
    good = jnp.ones(3)

    def step(w):
        return w + 1

    def evaluate(w):
        return w * 2

    deleted = TWO.run(lambda w: w + 1, (jnp.ones(3),), options=options)
    for _ in range(3):
        deleted = TWO.run(step, (deleted,), options=options)
    deleted.delete()
    with pytest.raises(rx.ConsumedArgumentError, match="passed as w"):
        TWO.run(step, (deleted,), options=options)

    for weights in (state, good, good, good, state):
        if weights is state:
            with pytest.raises(rx.ConsumedArgumentError, match="passed as w"):
                TWO.run(evaluate, (weights,))
        else:
            assert TWO.run(evaluate, (weights,)).tolist() == [2.0] * 3


def test_memory_that_another_argument_shares_with_a_donated_one_survives():
    donate = rx.RunOptions(donate=0)
    p = TWO.run(lambda p: p + 1, (jnp.ones(1000),), options=donate)
    first = jax.device_put(p, TWO.mesh.devices[0])
    shards = [s.data for s in p.addressable_shards]
    whole = jax.make_array_from_single_device_arrays(
        p.shape, TWO.placer.replicated, shards
    )
    out = TWO.run(
        lambda p, a, b, c: (p * 2, (p - a + b - c).sum()),
        (p, first, whole, shards[1]),
        options=donate,
    )
    assert float(out[0].sum()) == 4000.0 and float(out[1]) == 0.0
    assert float(whole.sum()) == float(first.sum()) == 2000.0


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.addressable_shards[0].data,
        lambda x: jax.device_put(x, x.sharding.mesh.devices.flat[-1]),
        lambda x: jax.random.key_data(x) if "key" in str(x.dtype) else jnp.copy(x),
    ],
)
@pytest.mark.parametrize("make", [lambda: jnp.ones(9), lambda: jax.random.key(3)])
def test_donation_deletes_nothing_that_was_made_of_a_donated_array(devices, view, make):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(devices)])

    def step(x):
        return jax.random.fold_in(x, 1) if "key" in str(x.dtype) else x + 1

    x, held = make(), []
    for i in range(8):
        if i % 3:  # sometimes by the short way, sometimes not
            held.append(view(x))
        x = strategy.run(step, (x,), options=rx.RunOptions(donate=0))
    if x.dtype == jnp.float32:
        assert [float(h[0]) for h in held] == [2.0, 3.0, 5.0, 6.0, 8.0]
    assert not any(h.is_deleted() for h in held)


def test_donation_goes_on_once_nobody_looks_at_shards():
    x, deleted = jnp.ones(3), []
    for i in range(6):
        before = x
        x = TWO.run(lambda x: x + 1, (x,), options=rx.RunOptions(donate=0))
        deleted.append(before.is_deleted())
        if i == 2:
            assert len(x.addressable_shards) == 2
    assert deleted == [False, True, True, False, True, True]


def test_a_donated_array_survives_in_an_argument_that_has_to_be_placed():
    x, options = jnp.ones(3), rx.RunOptions(donate=0)
    for _ in range(4):
        part = x.addressable_data(0)
        x, same = TWO.run(lambda x, part: (x + 1, part), (x, part), options=options)
        assert same.tolist() == part.tolist()


def test_raw_keys_are_not_consumed_either():
    key, donate = jax.random.PRNGKey(0), rx.RunOptions(donate=0)
    for _ in range(4):
        typed = jax.random.wrap_key_data(key)
        key = TWO.run(lambda k: jax.random.split(k)[0], (key,), options=donate)
        assert not typed.is_deleted()


@pytest.mark.parametrize("strategy", [TWO, ONE])
def test_a_thread_may_use_the_state_that_another_one_donates(strategy):
    state, donate, seen = [jnp.zeros(4)], rx.RunOptions(donate=0), []

    def evaluate():
        while not seen or seen[-1] < 200:
            try:
                seen.append(float(strategy.run(lambda s: s.max(), (state[0],))))
            except rx.ConsumedArgumentError:
                seen.append(seen[-1] if seen else 0)

    thread = threading.Thread(target=evaluate)
    thread.start()
    while thread.is_alive():
        state[0] = strategy.run(lambda s: s + 1, (state[0],), options=donate)
    assert seen == sorted(seen)


@pytest.mark.parametrize("donate", [(), 0])
@pytest.mark.parametrize("strategy", [TWO, ONE])
def test_an_error_of_the_devices_is_the_callers_and_the_step_runs_once(
    strategy, donate
):
    calls = []

    def host(x):
        calls.append(x)
        if len(calls) > 4 * strategy.num_replicas_in_sync:
            raise ValueError("disk full")
        return x

    def step(s):
        x = jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), s[0])
        return s + rx.get_replica_context().all_reduce("mean", x)

    state, options = jnp.ones(3), rx.RunOptions(donate=donate)
    for _ in range(4):
        state = jax.block_until_ready(strategy.run(step, (state,), options=options))
    with pytest.raises(Exception, match="disk full"):
        jax.block_until_ready(strategy.run(step, (state,), options=options))
    assert len(calls) == 5 * strategy.num_replicas_in_sync


# -- divergence ----------------------------------------------------------------------


def test_state_that_drifted_is_refused_when_it_comes_back():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(w * x))(w)

    w = TWO.run(step, (jnp.ones(2), ids(TWO, (2,))))
    assert isinstance(w, rx.PerReplica)
    with pytest.raises(rx.ReplicaDivergenceError, match=r"mirrored value.*for: w\b"):
        TWO.run(step, (w, ids(TWO, (2,))))
    local = TWO.run(
        step, (w, ids(TWO, (2,))), options=rx.RunOptions(allow_divergence=True)
    )
    assert [v.tolist() for v in local.values] == [[-1.0, -1.0], [-3.0, -3.0]]


def test_drift_is_found_though_the_step_captures_something_else_each_time():
    w = jnp.ones(2)
    with pytest.raises(rx.ReplicaDivergenceError, match="drifted"):
        for i in range(3):
            w = TWO.run(lambda w, x, i=i: w - i * x, (w, ids(TWO, (2,))))


def test_drift_is_found_in_state_that_began_as_a_number():
    def moving_average(average, x):
        return {"m": 0.9 * average["m"] + 0.1 * x.mean()}

    state = TWO.run(moving_average, ({"m": 0.0}, ids(TWO, (2,))))
    with pytest.raises(rx.ReplicaDivergenceError, match=r"average\['m'\]"):
        TWO.run(moving_average, (state, ids(TWO, (2,))))


def test_drift_is_found_whichever_kind_came_first():
    def step(w):
        return w * 2

    state = TWO.run(lambda x: x * 1.0, (ids(TWO, (2,)),))
    TWO.run(step, (state,))
    TWO.run(step, (jnp.ones(2),))
    with pytest.raises(rx.ReplicaDivergenceError, match="drifted"):
        TWO.run(step, (state,))


def test_asserting_a_captured_per_replica_value_is_refused():
    captured = ids(TWO)
    with pytest.raises(rx.ReplicaDivergenceError, match="captured"):
        TWO.run(lambda: rx.assert_mirrored(captured))


def test_allowing_divergence_once_does_not_allow_it_for_good():
    def step(w):
        return w * 2

    step(1.0)
    TWO.run(step, (jnp.ones(2),))
    state = TWO.run(lambda x: x * 1.0, (ids(TWO, (2,)),))
    TWO.run(step, (state,), options=rx.RunOptions(allow_divergence=True))
    for _ in range(2):
        with pytest.raises(rx.ReplicaDivergenceError, match=r"is data.*allow_diverg"):
            TWO.run(step, (state,))


def test_data_may_be_plain_once_and_per_replica_later():
    def evaluate(x):
        return x * 2

    TWO.run(evaluate, (jnp.ones(2),))
    out = TWO.run(evaluate, (ids(TWO, (2,)),))
    assert [v.tolist() for v in out.values] == [[2.0, 2.0], [4.0, 4.0]]


def test_assert_mirrored_names_leaf_and_line_inside_a_step():
    def step(w, x):
        g = {"a": jax.grad(lambda w: jnp.sum(w * x))(w)}
        rx.assert_mirrored(g)
        return g

    with pytest.raises(
        rx.ReplicaDivergenceError, match=r"\['a'\] would differ.*test_run\.py:\d+"
    ):
        TWO.run(step, (jnp.ones(2), ids(TWO, (2,))))


def test_assert_mirrored_passes_what_is():
    def step(x):
        return rx.assert_mirrored(context().all_reduce("sum", x))

    assert float(TWO.run(step, (ids(TWO),))) == 3.0


def test_a_collective_that_some_replicas_would_skip_is_refused():
    def step(x):
        return lax.cond(x > 1, lambda x: context().all_reduce("sum", x), lambda x: x, x)

    with pytest.raises(rx.DivergentCollectiveError, match=r"test_run\.py:\d+"):
        TWO.run(step, (ids(TWO),))


def test_unequal_copies_of_an_argument_are_found_on_request():
    parts = [jax.device_put(np.float32([i]), d) for i, d in enumerate(TWO.mesh.devices)]
    bad = jax.make_array_from_single_device_arrays((1,), TWO.placer.replicated, parts)
    options = rx.RunOptions(check_values=True)
    with pytest.raises(rx.ReplicaDivergenceError, match=r"w\['k'\]"):
        TWO.run(lambda w: w, ({"k": bad},), options=options)
    TWO.run(lambda w: w, ({"k": jnp.ones(2)},), options=options)


# -- the step's own world ------------------------------------------------------------


def test_a_python_branch_on_the_replica_id_is_explained():
    def step():
        if context().replica_id_in_sync_group == 0:
            return 1
        return 2

    with pytest.raises(jax.errors.TracerBoolConversionError) as e:
        TWO.run(step)
    assert "jnp.where(replica_id == 0" in "".join(e.value.__notes__)


def test_randomness_differs_per_replica_and_is_reproducible():
    def draw(key):
        return jax.random.normal(key), jax.random.normal(context().fold_in(key))

    key = jax.random.key(3)
    same, own = EIGHT.run(draw, (key,))
    assert isinstance(same, jax.Array)
    assert len({float(v) for v in own.values}) == 8
    _, fewer = TWO.run(draw, (key,))
    assert [float(v) for v in fewer.values] == [float(v) for v in own.values[:2]]


@pytest.mark.parametrize("placed", [True, False])
def test_arrays_that_a_step_captures_can_be_used_in_any_way(placed):
    c = jnp.arange(12.0).reshape(4, 3)
    if placed:
        c = TWO.extended.broadcast_to(c)
    i = jnp.array([2, 0])
    uses = [
        lambda j: c[0],
        lambda j: c[1:3],
        lambda j: c[i],
        lambda j: c[j.astype(int)],
        lambda j: jnp.where(c > 2, c, 0),
        lambda j: c.at[0].set(1),
        lambda j: jax.nn.one_hot(i, 4) @ c,
        lambda j: c.T @ c,
        lambda j: jnp.take(c, i, axis=0),
        lambda j: lax.dynamic_slice(c, (j.astype(int), 0), (1, 3)),
    ]
    got = TWO.run(lambda j: [u(j) for u in uses], (ids(TWO),))
    for r in range(2):
        j = jnp.float32(r + 1)
        for value, use in zip(got, uses, strict=True):
            part = TWO.experimental_local_results(value)[-1 if r else 0]
            np.testing.assert_array_equal(part, use(j))


def test_captured_arrays_are_not_sent_at_each_call(monkeypatch):
    c = jnp.arange(8.0)

    def step(x):
        return x * c

    x = ids(TWO, (8,))
    TWO.run(step, (x,))
    monkeypatch.setattr(jax, "device_put", None)
    assert TWO.run(step, (x,)).values[1].tolist() == (c * 2).tolist()


def test_an_exception_of_the_step_arrives_unchanged_and_leaves_no_context():
    class Boom(Exception):
        pass

    def step():
        raise Boom("here")

    with pytest.raises(Boom, match="here"):
        TWO.run(step)
    assert not rx.has_strategy()


# -- inside and around transformations -----------------------------------------------


def sum_step(x):
    return context().all_reduce("sum", x * x)


def test_run_inlines_in_an_outer_jit():
    f = jax.jit(lambda x: TWO.run(sum_step, (x,)) + 1)
    assert float(f(ids(TWO))) == 6.0
    assert float(f(ids(TWO))) == 6.0


def test_run_scans():
    def train(w, x):
        def body(w, _):
            return w - TWO.run(sum_step, (x,)) * 0.5, w

        return lax.scan(body, w, None, length=3)

    w, history = jax.jit(train)(jnp.float32(10), ids(TWO))
    assert float(w) == 2.5 and history.tolist() == [10.0, 7.5, 5.0]


def test_a_scan_over_steps_inside_run():
    def epoch(w, xs):
        def body(w, x):
            return w + context().all_reduce("sum", x), None

        return lax.scan(body, w, xs)[0]

    w = TWO.run(epoch, (jnp.zeros(()), ids(TWO, (4,))))
    assert isinstance(w, jax.Array) and float(w) == 12.0


def test_run_differentiates():
    def loss(w, x):
        return TWO.run(lambda w, x: context().all_reduce("sum", w * x), (w, x))

    grad = jax.grad(loss)(jnp.float32(2), ids(TWO))
    assert float(grad) == 3.0


def test_run_under_vmap():
    out = jax.vmap(lambda w: TWO.run(lambda w: context().all_reduce("sum", w), (w,)))(
        jnp.arange(3.0)
    )
    assert out.tolist() == [0.0, 2.0, 4.0]


def test_a_step_that_captures_a_tracer_is_not_kept():
    @jax.jit
    def f(a):
        return TWO.run(lambda x: x * a, (ids(TWO),))

    assert [float(v) for v in f(jnp.float32(2)).values] == [2, 4]
    assert [float(v) for v in jax.jit(lambda a: f(a))(jnp.float32(3)).values] == [3, 6]


def test_an_outer_gradient_through_a_captured_value():
    def loss(a):
        out = TWO.run(lambda x: context().all_reduce("sum", x * a), (ids(TWO),))
        return out**2

    assert float(jax.grad(loss)(2.0)) == 36.0


@pytest.mark.parametrize("donate", [(), (0,)])
def test_arrays_are_placed_under_another_mesh_of_the_user(donate):
    mesh = jax.make_mesh((3,), ("model",), devices=jax.devices()[4:7])
    keys = jax.random.split(jax.random.key(0), 3)
    expected = jax.random.key_data(keys).tolist()
    with jax.set_mesh(mesh):
        x, k = np.arange(5.0, dtype=np.float32), keys
        for _ in range(4):
            x, k = TWO.run(
                lambda x, k: (x * 2, k), (x, k), options=rx.RunOptions(donate=donate)
            )
    assert x.tolist() == [0.0, 16.0, 32.0, 48.0, 64.0]
    assert jax.random.key_data(k).tolist() == expected


def test_run_under_another_mesh_of_the_user():
    mesh = jax.make_mesh(
        (4,),
        ("model",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[4:],
    )
    with jax.set_mesh(mesh):
        assert float(TWO.run(sum_step, (ids(TWO),))) == 5.0
        for _ in range(3):
            doubled = TWO.run(lambda x: x * 2, (ids(TWO, (3,)),))
            assert [v.tolist() for v in doubled.values] == [[2.0] * 3, [4.0] * 3]
        assert TWO.reduce("sum", doubled).tolist() == [6.0] * 3


def test_nested_jit_remat_and_custom_vjp_in_a_step():
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

    @jax.jit
    def loss(w, x):
        return jnp.sum(clip(jax.checkpoint(jnp.sin)(w * x)) * 10)

    def step(w, x):
        return context().all_reduce("mean", jax.grad(loss)(w, x))

    out = TWO.run(step, (jnp.float32(0.0), ids(TWO)))
    assert float(out) == 1.5


def test_a_step_leaks_no_tracer_and_runs_without_jit():
    def step(w, x):
        return {"s": "static", "w": w + context().all_reduce("sum", x)}

    with jax.checking_leaks():
        assert float(TWO.run(step, (1.0, ids(TWO)))["w"]) == 4.0
    with jax.disable_jit():
        assert float(TWO.run(step, (1.0, ids(TWO)))["w"]) == 4.0


def test_the_shape_of_a_run_can_be_asked_for():
    out = jax.eval_shape(lambda x: TWO.run(lambda x: (x, 1.0), (x,)), ids(TWO, (3,)))
    assert out[0].shape == (3,) and out[0].values[1].shape == (3,)
    assert "PerReplica(array=ShapeDtypeStruct" in repr(out[0])


def test_refs_are_refused():
    with pytest.raises(rx.StaticArgumentError, match=r"jax\.Ref"):
        TWO.run(lambda r: r[...], (jax.new_ref(jnp.ones(2)),))


def test_debug_callbacks_and_io_callbacks_run_once_a_replica():
    seen = []

    def step(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return x

    TWO.run(step, (ids(TWO),))
    jax.effects_barrier()
    assert sorted(seen) == [1.0, 2.0]


# -- two strategies, two threads -----------------------------------------------------


def test_overlapping_strategies_in_turn():
    for _ in range(3):
        assert float(TWO.run(sum_step, (ids(TWO),))) == 5.0
        assert float(THREE.run(sum_step, (ids(THREE),))) == 14.0


def test_overlapping_strategies_from_two_threads():
    results, errors = {}, []

    def work(strategy, expected):
        try:
            with strategy.scope():
                x = ids(strategy)
                got = {float(strategy.run(sum_step, (x,))) for _ in range(30)}
            results[expected] = got
        except Exception as e:
            errors.append(e)

    threads = [
        threading.Thread(target=work, args=(s, e))
        for s, e in ((TWO, 5.0), (THREE, 14.0))
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors
    assert results == {5.0: {5.0}, 14.0: {14.0}}


def test_a_tight_loop_of_steps_that_only_print_does_not_starve_itself():
    seen = []

    def step(x):
        jax.debug.callback(lambda v: seen.append(1), context().all_reduce("sum", x))

    for _ in range(100):
        EIGHT.run(step, (ids(EIGHT),))
    jax.effects_barrier()
    assert len(seen) == 800


def test_one_strategy_from_four_threads():
    x, errors = ids(EIGHT, (8,)), []

    def work():
        try:
            w = jnp.zeros(8)
            for _ in range(60):
                w = EIGHT.run(lambda w, x: w + context().all_reduce("mean", x), (w, x))
            assert w.tolist() == [60 * 4.5] * 8
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(100)
    assert not errors and not any(t.is_alive() for t in threads)


def test_a_tight_loop_of_collectives_does_not_starve_itself():
    x = ids(EIGHT, (8,))
    w = jnp.zeros(8)

    def step(w, x):
        return w + context().all_reduce("mean", x)

    for _ in range(300):
        w = EIGHT.run(step, (w, x))
    assert w.tolist() == [300 * 4.5] * 8


class Output:
    """Stands for an output of a launch."""

    size = 1

    def __init__(self, log, number, deleted=False):
        self.log, self.number, self.deleted = log, number, deleted

    def is_deleted(self):
        return self.deleted

    def block_until_ready(self):
        if self.deleted:
            raise RuntimeError("deleted")
        self.log.append(self.number)


@pytest.mark.parametrize("devices, every", [(2, 16), (3, 10), (8, 4)])
def test_a_launch_waits_for_an_earlier_one(devices, every):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    assert strategy.fence.between_waits == every
    waited, fence = [], Fence(every)
    for number in range(1, 4 * every + 1):
        fence.after_launch([Output(waited, number)])
    assert waited == [every, 2 * every, 3 * every]


def test_strategies_over_the_same_devices_share_their_fence():
    assert TWO.fence is rx.MirroredStrategy(["cpu:1", "cpu:0"]).fence
    assert TWO.fence is not rx.MirroredStrategy(["cpu:2", "cpu:3"]).fence
    assert ONE.fence.between_waits > 1_000_000


def test_outputs_that_were_donated_are_not_waited_for():
    waited, fence = [], Fence(4)
    for number in range(1, 25):
        state = Output(waited, f"state {number}")
        fence.after_launch([Output(waited, number), state])
        state.deleted = True
    # The last output turns out to be donated; from then on, the first is waited for.
    assert waited == [8, 12, 16, 20]


def test_large_outputs_are_not_held():
    waited, fence = [], Fence(4)
    for number in range(1, 17):
        large = Output(waited, number)
        large.size = 1_000_000
        fence.after_launch([large])
    assert waited == [8, 16]


# -- JAX's search for NaN -----------------------------------------------------------


@pytest.fixture
def debug_nans():
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


@pytest.mark.parametrize("calls_before", [0, 3])
def test_a_nan_is_refused_where_jax_is_told_to(debug_nans, calls_before):
    def step(x):
        return jnp.log(x), context().all_reduce("sum", x)

    for _ in range(calls_before):
        TWO.run(step, (jnp.ones(3),))
    for x in (-jnp.ones(3), -ids(TWO, (3,)).array):
        with pytest.raises(FloatingPointError, match="step returned a NaN"):
            TWO.run(step, (x,))
    assert TWO.run(step, (jnp.ones(3),))[1].tolist() == [2.0] * 3


def test_steps_run_without_jit_too():
    def step(x):
        return x * 2, context().all_reduce("sum", x)

    with jax.disable_jit():
        out = TWO.run(step, (ids(TWO, (3,)),))
    assert [v.tolist() for v in out[0].values] == [[2.0] * 3, [4.0] * 3]
    assert out[1].tolist() == [3.0] * 3


def test_other_strategies_may_launch_while_one_waits():
    far, fence, sums = rx.MirroredStrategy(["cpu:2", "cpu:3"]), Fence(1), []

    def launch_elsewhere():
        sums.append(float(far.run(sum_step, (ids(far),))))

    class Slow(Output):
        def block_until_ready(self):
            thread = threading.Thread(target=launch_elsewhere, daemon=True)
            thread.start()
            thread.join(60)
            super().block_until_ready()

    waited = []
    for number in (1, 2):
        fence.after_launch([Slow(waited, number)])
    assert (waited, sums) == ([1], [5.0])


# -- the other strategies ------------------------------------------------------------


def test_the_default_strategy_runs_a_step():
    out = rx.get_strategy().run(
        lambda x: (x * 2, context().all_reduce("sum", x)), (3.0,)
    )
    assert [float(v) for v in out] == [6.0, 3.0]


def test_one_device_strategy_runs_on_its_device():
    strategy = rx.OneDeviceStrategy("cpu:3")
    out = strategy.run(lambda x: x + 1, (jnp.ones(2),))
    assert out.devices() == {jax.devices()[3]}


def test_optax_state_stays_mirrored():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}

    def step(params, opt, x):
        g = jax.grad(lambda p: jnp.sum((x @ p["w"] + p["b"]) ** 2))(params)
        updates, opt = tx.update(context().all_reduce("mean", g), opt, params)
        return optax.apply_updates(params, updates), opt

    state = (params, tx.init(params))
    for _ in range(2):
        state = THREE.run(
            step, (*state, ids(THREE, (4, 3))), options=rx.RunOptions(donate=(0, 1))
        )
    rx.assert_mirrored(state)
    for leaf in jax.tree.leaves(state):
        copies = [np.asarray(s.data).tobytes() for s in leaf.addressable_shards]
        assert len(set(copies)) == 1
