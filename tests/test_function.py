"""``rx.function``: a compiled function that knows variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import replicax as rx

MEAN, SUM = rx.VariableAggregation.MEAN, rx.VariableAggregation.SUM


def made_in(strategy, *args, **settings):
    with strategy.scope():
        return rx.Variable(*args, **settings)


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


def rows_of(strategy, rows):
    return strategy.experimental_distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )


def test_arguments_and_results(two):
    v = made_in(two, 1.0)
    traces = []

    @rx.function
    def fn(tree, mode, *, number):
        traces.append(mode)
        v.assign_add(tree["x"].sum() * number)
        return {"none": None, "mode": mode, "v": v, "value": v.read_value()}

    for i in range(1, 4):
        out = fn({"x": np.ones(2, np.float32)}, "a", number=float(i))
        assert (out["none"], out["mode"], out["v"]) == (None, "a", v)
        assert float(out["value"]) == 1.0 + i * (i + 1)
    assert traces == ["a"]
    fn({"x": np.ones(2, np.float32)}, "b", number=1.0)
    fn({"x": np.ones(3, np.float32)}, "a", number=1.0)
    fn({"x": np.ones(2, np.float32)}, "a", number=1.0)
    assert traces == ["a", "b", "a"]
    assert fn.__name__ == "fn"
    with pytest.raises(rx.StaticArgumentError, match="neither an array nor hashable"):
        rx.function(lambda x: None)({1, 2})


def test_run_and_reduce_inside(strategy):
    n = strategy.num_replicas_in_sync
    v = made_in(strategy, 0.0, aggregation=MEAN)
    traces = []

    def step(x):
        traces.append(1)
        v.assign_add(x)
        return x * 2

    @rx.function
    def train(x):
        doubled = strategy.run(step, (x,))
        return doubled, strategy.reduce("sum", doubled, axis=None)

    x = rows_of(strategy, np.arange(n, dtype=np.float32) + 1)
    for _ in range(3):
        doubled, total = train(x)
    assert len(traces) == 1
    local = strategy.experimental_local_results(doubled)
    np.testing.assert_array_equal(local, 2 * np.arange(n) + 2)
    assert float(total) == n * (n + 1)
    assert float(v) == pytest.approx(3 * (n + 1) / 2)


def test_loops_over_steps(two):
    v, own = made_in(two, 0.0), made_in(two, 0.0, aggregation=SUM)

    def step(x):
        v.assign_add(x)
        own.assign_add(replica_id() * x)
        return v.read_value()

    @rx.function
    def scanned(xs):
        return lax.scan(lambda c, x: (c, two.run(step, (x,))), None, xs)[1]

    @rx.function
    def looped(count):
        lax.fori_loop(0, count, lambda i, c: (two.run(step, (1.0,)), c)[1], 0)

    np.testing.assert_array_equal(scanned(jnp.arange(1.0, 4.0)), [1.0, 3.0, 6.0])
    looped(4)
    assert (float(v), float(own)) == (10.0, 10.0)


def test_a_branch_that_all_replicas_take(two):
    v = made_in(two, 0.0, aggregation=MEAN)

    def step(apply, x):
        lax.cond(apply, lambda: [v.assign_add(x * replica_id())][0:0], list)

    @rx.function
    def train(apply):
        two.run(step, (apply, 4.0))

    for apply in (True, False, True):
        train(jnp.bool_(apply))
    assert float(v) == 4.0

    def differs():
        step(replica_id() == 0, 1.0)

    with pytest.raises(rx.DivergentCollectiveError):
        rx.function(lambda: two.run(differs))()
    assert float(v) == 4.0


class Model:
    def __init__(self, strategy):
        self.v = made_in(strategy, 0.0)

    @rx.function
    def add(self, x):
        self.v.assign_add(x)
        return self.v.read_value()


def test_methods_and_functions_in_functions(two):
    model, other = Model(two), Model(two)
    assert float(model.add(1.0)) == 1.0
    assert float(other.add(5.0)) == 5.0
    outer = rx.function(lambda x: model.add(x) + other.add(x))
    assert float(outer(2.0)) == 10.0
    two.run(lambda: [model.add(1.0)][0:0])
    assert (float(model.v), float(other.v)) == (4.0, 7.0)


def test_several_steps_in_one_launch(two):
    v = made_in(two, 0.0, aggregation=SUM)
    traces = []

    @rx.function(steps_per_execution=3)
    def train(batch, scale):
        traces.append(1)

        def step(x):
            v.assign_add(x.sum() * scale)
            return x.sum(), v.read_value()

        return two.run(step, (batch,))

    def batch(i):
        return rows_of(two, np.float32([[i], [i + 1]]))

    batches = [batch(i) for i in range(8)]
    sums, values = train(batches[:3], 2.0)
    assert [np.asarray(x).tolist() for x in sums.values] == [[0, 1, 2], [1, 2, 3]]
    assert values.tolist() == [2.0, 8.0, 18.0]
    num_traces = len(traces)
    train(batches[3:6], 2.0)
    assert len(traces) == num_traces
    assert train(batches[6:], 2.0)[1].tolist() == [98.0, 128.0]
    assert len(traces) > num_traces
    for wrong in ([], batches[:4], batches[0]):
        with pytest.raises(ValueError, match="a list of 1 to 3 batches"):
            train(wrong, 2.0)
    with pytest.raises(ValueError, match="positive int"):
        rx.function(steps_per_execution=0)


def test_what_jax_knows_nothing_of_is_refused(two):
    v = made_in(two, 3.0)
    assert float(jax.grad(lambda x: x * v)(2.0)) == 3.0
    np.testing.assert_array_equal(jax.vmap(lambda x: x * v)(jnp.arange(2.0)), [0, 3])
    for use in (v.read_value, lambda: v + 1.0, lambda: v.assign(1.0)):
        with pytest.raises(rx.ContextError, match=r"rx\.function"):
            jax.jit(lambda use=use: [use()][0:0])()
    with pytest.raises(rx.ContextError, match=r"after jax\.grad"):
        jax.grad(lambda x: (v.assign(x), x)[1])(1.0)
    with pytest.raises(rx.ContextError):
        jax.jit(rx.function(lambda: v.read_value()))()
    assert float(v) == 3.0


def test_exceptions_leave_variables_as_they_were(two):
    a, b = made_in(two, 0.0), made_in(two, 0.0)

    @rx.function
    def fn(x, fails):
        a.assign_add(x)
        two.run(lambda: [b.assign(replica_id() * 1.0 if fails else x)][0:0])

    with pytest.raises(rx.ReplicaDivergenceError):
        fn(1.0, "yes")
    assert (float(a), float(b)) == (0.0, 0.0)
    fn(2.0, "")
    assert (float(a), float(b)) == (2.0, 2.0)


def test_variables_made_inside(two):
    made = []

    @rx.function
    def once():
        if not made:
            with two.scope():
                made.append(rx.Variable(1.0))
        return made[0].assign_add(1.0).read_value()

    assert [float(once()) for _ in range(3)] == [2.0, 3.0, 4.0]
    with pytest.raises(rx.ReplicaxError, match="new variable each time"):
        rx.function(lambda: [rx.Variable(1.0)][0:0])()


def test_results_and_arguments_share_no_memory_with_variables(strategy):
    v, w = made_in(strategy, [1.0, 1.0]), made_in(strategy, [2.0, 2.0])
    x = strategy.extended.broadcast_to(jnp.array([5.0, 5.0]))

    @rx.function
    def add():
        v.assign_add([1.0, 1.0])
        return v.read_value()

    @rx.function
    def take(x):
        v.assign(x)
        return w.read_value(), x

    read, first = rx.function(lambda: v.read_value())(), add()
    again = take(x)
    add()
    add()
    np.testing.assert_array_equal(read, [1.0, 1.0])
    np.testing.assert_array_equal(first, [2.0, 2.0])
    np.testing.assert_array_equal(again, [[2.0, 2.0], [5.0, 5.0]])
    np.testing.assert_array_equal(x, [5.0, 5.0])
    np.testing.assert_array_equal(v, [7.0, 7.0])

    @rx.function
    def swap():
        x, y = v.read_value(), w.read_value()
        v.assign(y)
        w.assign(x)

    for _ in range(3):
        swap()
    add()
    np.testing.assert_array_equal(v, [3.0, 3.0])
    np.testing.assert_array_equal(w, [7.0, 7.0])


def test_two_strategies_in_one_function_need_variables_of_their_own(strategies):
    a, b = made_in(strategies[2], 0.0), made_in(strategies[1], 0.0)
    wrong = rx.function(lambda: strategies[1].run(lambda: [a.assign(1.0)][0:0]))
    with pytest.raises(rx.ContextError, match="Strategies must not be mixed"):
        wrong()
    assert (float(a), float(b)) == (0.0, 0.0)
