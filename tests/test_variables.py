"""Variables: how they are made, read and written, and what becomes of their memory."""

import copy
import dataclasses
import gc
import operator
import pickle
import re
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from replicax.strategies import program as _program

import replicax as rx

AUTO, NONE, ON_WRITE, ON_READ = rx.VariableSynchronization
AGGREGATIONS = {a.name: a for a in rx.VariableAggregation}
COLLECTIVE = re.compile(r"\b(?:all-reduce|all-gather|reduce-scatter|all-to-all)\(")


def made_in(strategy, *args, **settings):
    with strategy.scope():
        return rx.Variable(*args, **settings)


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


def program_of(strategy, step):
    """The text of the compiled program of a step without arguments."""
    strategy.run(step)
    (program,) = [
        call._only_program
        for call in strategy._runner._calls.values()
        if call._fn is step
    ]
    variables = program.variables
    arrays = [v.array for v in variables.read], [v.array for v in variables.written]
    before, _program._expected.active = False, True
    try:
        return program.donating.lower(*arrays).compile().as_text()
    finally:
        _program._expected.active = before


# -- making them ---------------------------------------------------------------------


def test_what_a_variable_is():
    calls = []
    v = rx.Variable(lambda: calls.append(1) or np.ones((2, 3)), name="w")
    assert (v.name, v.shape, v.dtype, v.ndim, v.size) == ("w", (2, 3), "float32", 2, 6)
    assert repr(v) == "<Variable 'w' float32[2,3]>"
    assert v.trainable and calls == [1]
    assert rx.Variable(1, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert not rx.Variable(1, trainable=False).trainable
    with pytest.raises(ValueError, match="needs an initial_value"):
        rx.Variable(name="w")
    with pytest.raises(ValueError, match="make the variable first"):
        rx.Variable(rx.PerReplica([1.0, 2.0]))
    with pytest.raises(TypeError):
        rx.Variable("three")


@pytest.mark.parametrize("aggregation", AGGREGATIONS.values(), ids=AGGREGATIONS)
def test_how_a_variable_is_synchronized(two, aggregation):
    for given, resolved in ((AUTO, ON_WRITE), (ON_WRITE, ON_WRITE), (ON_READ, ON_READ)):
        v = made_in(two, 1.0, synchronization=given, aggregation=aggregation)
        assert (v.synchronization, v.aggregation) == (resolved, aggregation)
        assert v.trainable is (given is not ON_READ)
    with pytest.raises(ValueError, match="synchronization NONE"):
        made_in(two, 1.0, synchronization=NONE, aggregation=aggregation)
    is_mean = aggregation.name == "MEAN"
    for synchronization in (AUTO, ON_READ):
        settings = {"synchronization": synchronization, "aggregation": aggregation}
        if is_mean:
            with pytest.raises(ValueError, match="cannot hold a mean"):
                made_in(two, 1, **settings)
        else:
            assert made_in(two, 1, **settings).dtype == jnp.int32
    with pytest.raises(ValueError, match="VariableSynchronization"):
        made_in(two, 1.0, synchronization="auto")
    with pytest.raises(ValueError, match="VariableAggregation"):
        made_in(two, 1.0, aggregation="sum")


def test_initial_values_are_copied(strategy):
    mirrored = strategy.extended.broadcast_to(jnp.arange(3.0))
    given = [jnp.arange(3.0), np.arange(3.0, dtype=np.float32), mirrored]
    variables = [made_in(strategy, x) for x in given]
    variables.append(made_in(strategy, variables[0]))

    def step():
        for v in variables:
            v.assign_add([1.0, 1.0, 1.0])

    for _ in range(3):
        strategy.run(step)
    for x in given:
        np.testing.assert_array_equal(x, np.arange(3.0))
    for v in variables:
        np.testing.assert_array_equal(v, np.arange(3.0) + 3)


def test_variables_of_a_tree():
    tree = {"a": [1.0, None], "b": {"c": jnp.zeros((2,))}}
    made = rx.variables(tree, trainable=lambda path: "b" not in str(path[0]))
    assert made["a"][1] is None
    assert made["b"]["c"].name == "b/c" and made["a"][0].name == "a/0"
    assert made["a"][0].trainable and not made["b"]["c"].trainable
    read = rx.read({"v": made, "other": 3})
    assert float(read["v"]["a"][0]) == 1.0 and read["other"] == 3


# -- as arrays -----------------------------------------------------------------------

BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "ge", "eq"]
BITWISE = ["and_", "xor", "lshift", "rshift"]


@pytest.mark.parametrize(
    ("names", "dtype"), [(BINARY, np.float32), (BITWISE, np.int32)]
)
def test_binary_operators(names, dtype):
    x, y = np.array([1, 2, 3], dtype), np.array([2, 2, 5], dtype)
    v, w = rx.Variable(x), rx.Variable(y)
    for name in [getattr(operator, name) for name in names]:
        wanted = np.asarray(name(jnp.asarray(x), jnp.asarray(y)))
        for left, right in ((v, w), (v, y), (x, w), (jnp.array(x), w)):
            got = name(left, right)
            assert isinstance(got, jax.Array), (name, left, right)
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(name(2, v), name(2, jnp.asarray(x)))
    np.testing.assert_array_equal(operator.sub(dtype(2), v), 2 - x)
    np.testing.assert_array_equal(v - 2, x - 2)


def test_other_operators():
    v, i = rx.Variable([[1.25, -2.0], [3.0, 4.0]]), rx.Variable([5, -2])
    x = v.numpy()
    np.testing.assert_array_equal(v @ v, x @ x)
    np.testing.assert_array_equal(x @ v, x @ x)
    np.testing.assert_array_equal(-v, -x)
    np.testing.assert_array_equal(+v, x)
    np.testing.assert_array_equal(abs(v), abs(x))
    np.testing.assert_array_equal(~i, [-6, 1])
    np.testing.assert_array_equal(round(v, 1), np.round(x, 1))
    np.testing.assert_array_equal(divmod(i, 2), [[2, -1], [1, 0]])
    np.testing.assert_array_equal(divmod(7, i), [[1, -4], [2, -1]])
    np.testing.assert_array_equal(v[0], x[0])
    np.testing.assert_array_equal(v[:, None, ::-1], x[:, None, ::-1])
    np.testing.assert_array_equal(v[..., jnp.array([1])], x[..., [1]])
    np.testing.assert_array_equal(list(v), list(x))
    np.testing.assert_array_equal(v.sparse_read([[1], [0]]), x[[[1], [0]]])
    assert len(v) == 2
    np.testing.assert_array_equal(np.asarray(v, np.float64), x)
    np.testing.assert_array_equal(jnp.asarray(v), x)


def test_conversion_of_a_scalar():
    v, i = rx.Variable(2.5), rx.Variable(3)
    assert (float(v), int(i), bool(v), complex(v)) == (2.5, 3, True, 2.5 + 0j)
    assert [10, 20, 30, 40][i] == 40
    assert f"{v:.2f}|{i:03d}|{v}" == f"2.50|003|{v!r}"
    with pytest.raises(TypeError):
        operator.index(v)


def test_variables_are_keys_by_identity_and_equal_by_element():
    v, w = rx.Variable([1, 2]), rx.Variable([1, 3])
    assert {v: "v", w: "w"}[w] == "w"
    assert (v == w).tolist() == [True, False]
    assert (v != np.array([1, 3])).tolist() == [False, True]


def test_copies(two):
    for settings in (
        {},
        {"synchronization": ON_READ, "aggregation": rx.VariableAggregation.SUM},
    ):
        v = made_in(two, [1.0, 2.0], **settings)
        twin = copy.deepcopy({"a": v, "b": [v]})
        assert twin["a"] is twin["b"][0] is not v
        before = v.numpy()
        two.run(
            lambda a, b: [a.assign_add([1.0, 1.0]), b.assign_sub([1.0, 1.0])],
            (twin["a"], v),
        )
        n = 2 if settings else 1
        np.testing.assert_array_equal(twin["a"], before + n)
        np.testing.assert_array_equal(v, before - n)
    with pytest.raises(TypeError, match="deepcopy"):
        copy.copy(v)
    with pytest.raises(TypeError, match="numpy"):
        pickle.dumps(v)


# -- where a step finds them ---------------------------------------------------------

WEIGHT = None  # a test sets it


def by_global():
    WEIGHT.assign_add(1.0)


class Holder:
    def __init__(self, v):
        self.v = v

    def step(self):
        self.v.assign_add(1.0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    v: object


class Layer(nnx.Module):
    def __init__(self, v):
        self.v = v
        self.kernel = nnx.Param(jnp.ones(2))


def test_variables_are_found_wherever_they_are(two):
    global WEIGHT
    WEIGHT = v = made_in(two, 0.0)
    holder, frozen, box = Holder(v), Frozen(v), {"in": [v]}

    def of_layer(layer):
        layer.v.assign_add(layer.kernel[...].sum() / 2)
        layer.kernel[...] = layer.kernel[...] * 1.0

    ways = [
        lambda: two.run(lambda: [v.assign_add(1.0)]),
        lambda: two.run(by_global),
        lambda: two.run(holder.step),
        lambda: two.run(lambda: [frozen.v.assign_add(1.0)]),
        lambda: two.run(lambda: [box["in"][0].assign_add(1.0)]),
        lambda: two.run(lambda x: [x.assign_add(1.0)], (v,)),
        lambda: two.run(lambda tree: [tree["a"][1].assign_add(1.0)], ({"a": (0, v)},)),
        lambda: two.run(lambda *, x: [x.assign_add(1.0)], kwargs={"x": v}),
        lambda: two.run(of_layer, (Layer(v),)),
        lambda: two.run(lambda f: [f.v.assign_add(1.0)], (frozen,)),
    ]
    for i, way in enumerate(ways):
        for _ in range(3):
            way()
        assert float(v) == 3 * (i + 1), i
    assert two.run(lambda: v) is v


def test_another_variable_by_the_same_name(two):
    """Also on the short way of calls that are made again and again."""
    global WEIGHT
    a, b, c = (made_in(two, x) for x in (0.0, 10.0, 20.0))
    cell = a

    def by_cell():
        cell.assign_add(1.0)

    box = [a]

    def by_box():
        box[0].assign_add(1.0)

    for v in (a, b, c):
        WEIGHT = cell = box[0] = v
        for _ in range(4):
            two.run(by_global)
            two.run(by_cell)
    assert [float(v) for v in (a, b, c)] == [8.0, 18.0, 28.0]


def test_which_variables_are_used_may_change(two):
    a, b = made_in(two, 0.0), made_in(two, 0.0)

    def by_flag(x, which):
        (a if which else b).assign_add(x)

    def by_shape(x):
        (b if x.ndim else a).assign_add(x.sum())

    for which in (True, False, True, True):
        two.run(by_flag, (1.0, which))
    assert (float(a), float(b)) == (3.0, 1.0)
    for x in (1.0, np.ones(2), np.ones(2), 1.0, np.ones(2), np.ones(3), 1.0):
        two.run(by_shape, (jnp.float32(x),))
    assert (float(a), float(b)) == (6.0, 10.0)


# -- what a step writes --------------------------------------------------------------


def test_reads_see_what_was_written(strategy):
    v, w = made_in(strategy, [1.0, 2.0]), made_in(strategy, [3.0, 4.0])

    def step():
        x, y = v.read_value(), w.read_value()
        v.assign(y)
        w.assign(x)
        return v.assign_add([1.0, 1.0]), v.value(), w * 2

    written, read, doubled = strategy.run(step)
    again = strategy.run(step)
    np.testing.assert_array_equal(written, [4.0, 5.0])
    np.testing.assert_array_equal(read, [4.0, 5.0])
    np.testing.assert_array_equal(doubled, [2.0, 4.0])
    np.testing.assert_array_equal(again[0], [2.0, 3.0])
    np.testing.assert_array_equal(w, [4.0, 5.0])


DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool", "complex64"]
SHAPES = [(), (2,), (0,), (), (2, 0), (2,)]


@pytest.mark.parametrize("n", [1, 3])
def test_all_dtypes_and_shapes(strategies, n):
    strategy = strategies[n]
    first = rx.VariableAggregation.ONLY_FIRST_REPLICA
    variables = [
        made_in(strategy, jnp.zeros(shape, dtype), **settings)
        for dtype, shape in zip(DTYPES, SHAPES, strict=True)
        for settings in (
            {},
            {"aggregation": first},
            {"synchronization": ON_READ, "aggregation": first},
        )
    ]

    def step():
        for v in variables:
            own = jnp.where(replica_id() == 0, 1, 0) if v.aggregation is first else 1
            v.assign(jnp.full(v.shape, own).astype(v.dtype))

    strategy.run(step)
    for v in variables:
        np.testing.assert_array_equal(v, np.ones(v.shape, v.dtype))
        v.assign(np.zeros(v.shape, v.dtype))
        np.testing.assert_array_equal(v.values[-1], np.zeros(v.shape))


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
def test_random_keys(strategy, synchronization):
    first = rx.VariableAggregation.ONLY_FIRST_REPLICA
    keys = made_in(
        strategy,
        jax.random.split(jax.random.key(0), 3),
        synchronization=synchronization,
        aggregation=first,
    )

    def step():
        keys.assign(keys.read_value()[::-1])
        return jax.random.uniform(keys[0])

    got = strategy.run(step)
    wanted = jax.random.uniform(jax.random.split(jax.random.key(0), 3)[2])
    for x in strategy.experimental_local_results(got):
        assert float(x) == float(wanted)
    assert len(keys.values) == strategy.num_replicas_in_sync
    assert float(jax.random.uniform(keys.values[-1][0])) == float(wanted)
    assert keys.assign(copy.deepcopy(keys).read_value()) is keys


def scanned(write):
    lax.scan(lambda c, x: (write(x), (c, None))[1], 0.0, jnp.ones(3))


def looped(write):
    lax.fori_loop(0, 3, lambda i, c: (write(1.0), c)[1], 0)


def while_looped(write):
    lax.while_loop(lambda i: i < 3, lambda i: (write(1.0), i + 1)[1], 0)


def branched(write):
    x = jnp.float32(1.0)
    lax.cond(x > 0, lambda: drop(write(3.0)), lambda: None)
    lax.cond(x < 0, lambda: drop(write(9.0)), lambda: None)


def switched(write):
    lax.switch(jnp.int32(1), [lambda: None, lambda: drop(write(3.0))])


def jitted(write):
    jax.jit(lambda x: drop(write(x)))(jnp.float32(3.0))


def in_a_loss(write):
    jax.grad(lambda x: (write(3 * x), x)[1])(1.0)


def in_a_loss_of_a_scan(write):
    def loss(w):
        return lax.scan(lambda c, x: (write(w * x), (c + w, x))[1], 0.0, jnp.ones(3))[0]

    jax.value_and_grad(loss)(1.0)


def drop(x):
    del x


INSIDE = [
    *(scanned, looped, while_looped, branched, switched),
    *(jitted, in_a_loss, in_a_loss_of_a_scan),
]


def test_writes_inside_of_control_flow(strategies):
    for n in (1, 3):
        variables = [made_in(strategies[n], 1.0) for _ in INSIDE]

        def step(variables=variables):
            for inside, v in zip(INSIDE, variables, strict=True):
                inside(v.assign_add)
            return [v.read_value() for v in variables]

        assert [float(x) for x in strategies[n].run(step)] == [4.0] * len(INSIDE)
        strategies[n].run(step)
        assert [float(v) for v in variables] == [7.0] * len(INSIDE)


REMEMBERED = {
    "jit": lambda fn: jax.jit(fn),
    "scan": lambda fn: lambda x: lax.scan(_as_body(fn), 0.0, x[None]),
    "cond": lambda fn: lambda x: lax.cond(x > 0, fn, drop, x),
}


def _as_body(fn):
    if fn not in _bodies:
        _bodies[fn] = lambda carry, x: (fn(x), (carry, None))[1]
    return _bodies[fn]


_bodies = {}


@pytest.mark.parametrize("way", REMEMBERED)
def test_functions_whose_traces_jax_remembers(two, way):
    """JAX calls such a function once, but each trace of a step has to hear of it."""
    v, w = made_in(two, 0.0), made_in(two, 1.0)

    def write(x):
        v.assign(x * w)

    helper = REMEMBERED[way](write)
    two.run(lambda x: drop(helper(x)), (jnp.float32(3.0),))
    assert float(v) == 3.0
    two.run(lambda x: drop(helper(2 * x)), (jnp.float32(4.0),))
    assert float(v) == 8.0
    rx.function(lambda x: drop(helper(x + 1)))(jnp.float32(5.0))
    assert float(v) == 6.0


def test_writes_that_cannot_be_are_refused(two):
    v = made_in(two, 0.0)

    def mapped():
        jax.vmap(lambda x: (v.assign(x), x)[1])(jnp.arange(3.0))

    def checkpointed():
        jax.grad(jax.checkpoint(lambda x: (v.assign(2 * x), jnp.sin(x))[1]))(1.0)

    for run in (two.run, lambda step: rx.function(step)()):
        with pytest.raises(rx.ContextError, match=r"jax\.vmap"):
            run(mapped)
        with pytest.raises(rx.ReplicaxError, match=r"jax\.checkpoint"):
            run(checkpointed)
    assert float(v) == 0.0


# -- checks --------------------------------------------------------------------------


def test_shapes_and_dtypes_are_checked(two):
    f, i, u = (made_in(two, np.ones(2, t)) for t in (np.float32, np.int32, np.uint8))
    for write in (f.assign, f.assign_add, f.assign_sub):
        with pytest.raises(ValueError, match=r"needs a value of shape \(2,\)"):
            write(1.0)
    with pytest.raises(TypeError, match="needs a value of its dtype"):
        i.assign([1.5, 2.0])
    with pytest.raises(TypeError, match=r"astype\('float32'\)"):
        f.assign(jnp.ones(2, jnp.bfloat16))
    with pytest.raises(TypeError, match="dtype"):  # a number that is traced
        two.run(lambda x: drop(i[0]) or drop(i.assign(jnp.full(2, x))), (1.5,))
    scalar = made_in(two, 1)
    with pytest.raises(TypeError, match="dtype"):
        two.run(lambda x: drop(scalar.assign(x)), (1.5,))
    for bad in (256, -1):
        with pytest.raises(ValueError, match=f"from 0 to 255. Got {bad}"):
            u.assign([1, bad])
    with pytest.raises(ValueError, match="Got 4294967296"):
        i.assign(np.array([0, 2**32]))
    assert f.assign([1, 2]).numpy().tolist() == [1.0, 2.0]
    assert f.assign(np.array([3.0, 4.0])).numpy().tolist() == [3.0, 4.0]
    assert u.assign([255, 0]).numpy().tolist() == [255, 0]


def test_a_sum_is_shared_out_exactly(two):
    total = {"synchronization": ON_READ, "aggregation": rx.VariableAggregation.SUM}
    v = made_in(two, 0, **total)
    for value, read in ((5, 4), (-5, -4), (33554434, 33554434)):
        assert int(v.assign(value)) == read


# -- contexts ------------------------------------------------------------------------


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_writes_in_every_context(strategy, name):
    n = strategy.num_replicas_in_sync
    aggregation = AGGREGATIONS[name]
    v = made_in(strategy, 1.0, aggregation=aggregation)
    ids = np.arange(n, dtype=np.float32) + 1
    combined = {"SUM": ids.sum(), "MEAN": ids.mean()}.get(name, 1.0)

    def in_replica():
        own = jnp.float32(1.0) if name == "NONE" else replica_id() + 1.0
        v.assign(own * 1.0)
        v.assign_add(own)
        v.assign_sub(own)
        return v.assign_add(own)

    assert float(strategy.run(in_replica)) == pytest.approx(2 * combined)
    np.testing.assert_allclose(v, 2 * combined, rtol=1e-6)

    def merged():
        def merge(strategy, x):
            strategy.extended.update(v, lambda v, x: v.assign_add(x), (x,))
            v.assign_add(1.0)  # once for all

        rx.get_replica_context().merge_call(merge, (jnp.float32(2.0),))

    v.assign(0.0)
    strategy.run(merged)
    assert float(v) == 3.0
    with strategy.scope():
        assert v.assign_add(1.0) is v
    extended = strategy.extended
    assert float(extended.update(v, lambda v, x: v.assign_sub(x), (2.0,))) == 2.0
    out = extended.update(v, lambda v, x: v.assign_add(x), (1.0,), group=False)
    assert isinstance(out, tuple) and float(out[-1]) == 3.0
    strategy.run(lambda: extended.update(v, lambda v: v.assign_sub(1.0)))
    assert float(v) == 2.0


def test_updates_of_no_variable(two):
    calls = []

    def double(x):
        calls.append(1)
        return 2 * x

    for _ in range(3):
        assert float(two.extended.update_non_slot(None, double, (3.0,))) == 6.0
    assert len(calls) == 1

    def step(x):
        return two.extended.update_non_slot(None, double, (x,))

    assert float(two.run(step, (4.0,))) == 8.0


def test_copies_must_not_become_different(strategies):
    for n in (2, 3):
        v, w = made_in(strategies[n], 0.0), made_in(strategies[n], 0.0)

        def step(v=v, w=w):
            w.assign(1.0)
            v.assign(replica_id() * 1.0)

        with pytest.raises(rx.ReplicaDivergenceError, match="would differ"):
            strategies[n].run(step)
        with pytest.raises(rx.ReplicaDivergenceError, match="PerReplica"):
            v.assign(rx.PerReplica([1.0] * n))
        assert (float(v), float(w)) == (0.0, 0.0)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_each_replica_writes_its_own(strategy, name):
    n = strategy.num_replicas_in_sync
    v = made_in(strategy, 1.0, synchronization=ON_READ, aggregation=AGGREGATIONS[name])
    copies = strategy.run(lambda: v.assign_add(replica_id() * 1.0))
    wanted = 1.0 + np.arange(n)
    np.testing.assert_array_equal(strategy.experimental_local_results(copies), wanted)
    np.testing.assert_array_equal(strategy.experimental_local_results(v), wanted)
    if name == "NONE" and n > 1:
        with pytest.raises(ValueError, match="cannot be combined"):
            v.read_value()
        with pytest.raises(ValueError, match="pass a PerReplica"):
            v.assign(1.0)
        return
    read = {"SUM": wanted.sum(), "MEAN": wanted.mean()}.get(name, 1.0)
    assert float(v) == pytest.approx(read)

    def in_merge():
        return rx.get_replica_context().merge_call(lambda _: v.read_value())

    assert float(strategy.run(in_merge)) == pytest.approx(read)
    assert float(v.assign(6.0)) == pytest.approx(6.0)


@pytest.mark.parametrize("how", ["add", "sub", "mul", "div", "min", "max", "update"])
def test_scatters(two, how):
    rows = rx.IndexedSlices(jnp.full((1, 2), 2.0), jnp.array([1]))
    same = made_in(two, jnp.full((3, 2), 8.0))
    two.run(lambda: drop(getattr(same, f"scatter_{how}")(rows)))
    at = jnp.full((3, 2), 8.0).at[1]
    method = {"sub": "add", "mul": "multiply", "div": "divide", "update": "set"}
    wanted = getattr(at, method.get(how, how))(-2.0 if how == "sub" else 2.0)
    np.testing.assert_array_equal(same, wanted)
    of_sum = made_in(two, jnp.ones((3, 2)), aggregation=rx.VariableAggregation.SUM)

    def step():
        own = rx.IndexedSlices(jnp.full((1, 2), 2.0), replica_id()[None])
        getattr(of_sum, f"scatter_{how}")(own)

    if how in ("min", "max", "update"):
        with pytest.raises(NotImplementedError, match="overwrites rows"):
            two.run(step)
        return
    two.run(step)
    row = {"add": 3.0, "sub": -1.0, "mul": 2.0, "div": 0.5}[how]
    np.testing.assert_array_equal(of_sum, [[row] * 2, [row] * 2, [1.0] * 2])
    with pytest.raises(IndexError, match="rows are 0 to 2"):
        of_sum.scatter_add(rx.IndexedSlices(jnp.ones((1, 2)), [3]))


def test_variables_of_another_strategy_are_refused(strategies):
    two, three = strategies[2], strategies[3]
    v = made_in(two, 0.0)
    for use in (v.read_value, lambda: v.assign(1.0)):
        with pytest.raises(
            rx.ContextError, match=r"must not be mixed|another strategy"
        ):
            three.run(lambda use=use: drop(use()))
    with three.scope(), pytest.raises(rx.ContextError, match="mixed"):
        v.assign(1.0)
    assert float(v) == 0.0


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_a_variable_of_no_scope_goes_to_the_first_strategy(strategies, synchronization):
    mean = rx.VariableAggregation.MEAN
    v = rx.Variable(1.0, synchronization=synchronization, aggregation=mean)
    assert float(v.assign_add(1.0)) == 2.0
    strategies[3].run(lambda: drop(v.assign_add(replica_id() * 1.0)))
    assert v.strategy is strategies[3]
    assert float(v) == 3.0
    with pytest.raises(rx.ContextError, match="another strategy"):
        strategies[2].run(lambda: drop(v.read_value()))


def test_variables_made_in_a_step(two):
    holder = Holder(None)

    def lazily():
        if holder.v is None:
            holder.v = rx.Variable(lambda: 5.0)
        return holder.v.assign_add(1.0)

    assert [float(two.run(lazily)) for _ in range(3)] == [6.0, 7.0, 8.0]
    with pytest.raises(rx.ReplicaxError, match="new variable each time"):
        two.run(lambda: drop(rx.Variable(1.0)))
    with pytest.raises(ValueError, match="computed from the arguments"):
        two.run(lambda x: drop(rx.Variable(x)), (1.0,))


def test_an_exception_leaves_variables_as_they_were(two):
    v = made_in(two, 1.0)

    def step(fails):
        v.assign_add(1.0)
        if fails:
            raise KeyError("mine")

    two.run(step, (False,))
    with pytest.raises(KeyError, match="mine"):
        two.run(step, (True,))
    assert float(v) == 2.0
    two.run(step, (False,))
    assert float(v) == 3.0


# -- memory --------------------------------------------------------------------------


def test_what_was_handed_out_outlives_later_steps(strategy):
    v = made_in(strategy, jnp.zeros(3))
    own = made_in(strategy, jnp.zeros(3), synchronization=ON_READ)
    u = made_in(strategy, jnp.zeros(3, jnp.uint8))

    def step(read):
        read.append((v.read_value(), v.assign_add(jnp.ones(3)))[0:0])
        own.assign_add(jnp.ones(3))
        u.assign_add(jnp.ones(3, jnp.uint8))
        return v.read_value()

    def advance():
        return strategy.run(lambda: step([]))

    returned = advance()
    local = strategy.experimental_local_results
    held = [
        *(v.read_value(), v.value(), jnp.asarray(v), v[...], v[:], +v, v**1, returned),
        *(abs(u), round(u), u | 0, u.sparse_read([0, 1, 2]), v.numpy()),
        *(*v.values, *local(v), *own.values, *local(own)),
        strategy.run(lambda: v.read_value()),
    ]
    for _ in range(3):
        advance()
    for i, x in enumerate(held):
        np.testing.assert_array_equal(x, np.ones(3), err_msg=str(i))
    np.testing.assert_array_equal(v, np.full(3, 4.0))


def test_memory_is_never_shared(strategy):
    a, b = made_in(strategy, [1.0, 1.0]), made_in(strategy, [2.0, 2.0])
    x = strategy.extended.broadcast_to(jnp.array([5.0, 5.0]))
    ones = [1.0, 1.0]

    def both(x):
        a.assign(x)
        b.assign(x)
        return x

    strategy.run(lambda: drop(a.assign(b)))
    strategy.run(lambda: drop(a.assign_add(ones)))
    np.testing.assert_array_equal(b, [2.0, 2.0])
    for run in (lambda: strategy.run(both, (x,)), lambda: rx.function(both)(x)):
        y = run()
        strategy.run(lambda: drop(a.assign_add(ones)))
        strategy.run(lambda: drop(a.assign_add(ones)))
        for kept in (b, x, y):
            np.testing.assert_array_equal(kept, [5.0, 5.0])
        np.testing.assert_array_equal(a, [7.0, 7.0])


def test_written_memory_is_used_again(strategies):
    two = strategies[2]
    v, w = made_in(two, jnp.zeros(1000)), made_in(two, jnp.ones(1000))

    def step():
        v.assign_add(w)

    assert re.search(r"input_output_alias=\{ *\{[^}]*\}: ", program_of(two, step))
    two.run(step)
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    for _ in range(10):
        two.run(step)
        assert sum(x.nbytes for x in jax.live_arrays()) == before
    shard = v.array.addressable_shards[0].data
    addresses = set()
    del shard
    for _ in range(10):
        two.run(step)
        addresses.add(v.array.addressable_shards[0].data.unsafe_buffer_pointer())
    assert len(addresses) <= 2


def test_idle_variables_cost_no_inputs(two):
    idle = [made_in(two, jnp.zeros(2)) for _ in range(300)]
    v = idle[7]

    def step():
        v.assign_add(jnp.ones(2))

    assert program_of(two, step).count(" parameter(0)") >= 1
    (program,) = [
        call._only_program for call in two._runner._calls.values() if call._fn is step
    ]
    assert program.variables.written == (v,) and program.variables.read == ()


def test_variables_are_collected():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    unused, used = made_in(strategy, 0.0), made_in(strategy, 0.0)

    def step():
        used.assign_add(1.0)

    strategy.run(step)
    dying = weakref.ref(unused)
    del unused
    gc.collect()
    assert dying() is None
    dying = weakref.ref(used)
    used = step = strategy = None
    gc.collect()
    assert dying() is None


def collectives_of(strategy, step):
    return len(COLLECTIVE.findall(program_of(strategy, step)))


def test_only_what_must_be_sent_is_sent(two):
    mean, total = rx.VariableAggregation.MEAN, rx.VariableAggregation.SUM
    plain = made_in(two, jnp.zeros(4))
    of_mean = made_in(two, jnp.zeros(4), aggregation=mean)
    of_sum = made_in(two, jnp.zeros(4), aggregation=total)
    own = made_in(two, jnp.zeros(4), synchronization=ON_READ, aggregation=total)

    def mirrored():
        plain.assign_add(jnp.ones(4))
        of_mean.assign(plain + 1.0)
        of_sum.assign_add(jnp.ones(4))

    def on_read():
        own.assign_add(jnp.full(4, replica_id() * 1.0))

    def varying():
        of_mean.assign(jnp.full(4, replica_id() * 1.0))

    assert collectives_of(two, mirrored) == 0
    assert collectives_of(two, on_read) == 0
    assert collectives_of(two, varying) == 1
    np.testing.assert_array_equal(of_sum, np.full(4, 2.0))


# -- together with other state -------------------------------------------------------


def test_variables_donated_arguments_and_nnx_objects(two):
    v = made_in(two, jnp.zeros(3))
    layer = Layer(v)
    options = rx.RunOptions(donate=(0,))

    def step(state, layer):
        v.assign_add(state)
        layer.kernel[...] = layer.kernel[...] + state[:2]
        return state + 1

    def functional(state):
        v.assign_add(state)
        return state + 1

    first = state = jnp.zeros(3)
    for _ in range(4):
        state = two.run(functional, (state,), options=options)
    np.testing.assert_array_equal(first, np.zeros(3))
    np.testing.assert_array_equal(v, np.full(3, 6.0))
    for _ in range(3):
        state = two.run(step, (state, layer), options=options)
    np.testing.assert_array_equal(state, np.full(3, 7.0))
    np.testing.assert_array_equal(v, np.full(3, 21.0))
    np.testing.assert_array_equal(layer.kernel[...], np.full(2, 16.0))
    value = v.read_value()
    two.run(functional, (value,), options=options)
    np.testing.assert_array_equal(value, np.full(3, 21.0))
    np.testing.assert_array_equal(v, np.full(3, 42.0))


# -- interrupts and threads ----------------------------------------------------------


def in_threads(*loops):
    errors = []

    def guarded(loop):
        try:
            loop()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_threads(two):
    shared, one, other = (made_in(two, jnp.zeros(4)) for _ in range(3))
    ones = jnp.ones(4)

    def steps(v):
        def step(x):
            shared.assign_add(x)
            v.assign_add(x)

        def loop():
            for _ in range(60):
                two.run(step, (ones,))

        return loop

    def read():
        for _ in range(60):
            for x in (shared.numpy(), shared[...], shared + 0.0, copy.deepcopy(shared)):
                x = np.asarray(x)
                assert (x == x[0]).all()

    def write():
        for _ in range(60):
            shared.assign_add(ones)
            shared.scatter_add(rx.IndexedSlices(ones, [0, 1, 2, 3]))

    in_threads(steps(one), steps(other), read, write)
    np.testing.assert_array_equal(shared, np.full(4, 240.0))
    np.testing.assert_array_equal(one, np.full(4, 60.0))


def test_a_step_with_variables_leaks_no_tracer():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v, w = rx.Variable(1.0), rx.Variable(2.0)

    def step():
        jax.lax.fori_loop(0, 2, lambda i, _: v.assign_add(w + 1.0), 0.0)
        return w.read_value()

    with jax.checking_leaks():
        strategy.run(step)
        rx.function(lambda: v.assign_add(1.0))()
    assert float(v) == 8.0
