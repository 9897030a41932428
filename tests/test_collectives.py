"""What replicas do together inside a step: values, dtypes, gradients, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import replicax as rx


def placed(strategy, *components):
    return strategy.experimental_distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


def all_reduce(op, value, **kwargs):
    return rx.get_replica_context().all_reduce(op, value, **kwargs)


def all_gather(value, axis=0):
    return rx.get_replica_context().all_gather(value, axis=axis)


def reduce_scatter(op, value, axis=0):
    return rx.get_replica_context().reduce_scatter(op, value, axis=axis)


def merge_call(fn, *args, **kwargs):
    return rx.get_replica_context().merge_call(fn, args, kwargs)


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


def lists(value):
    """What each replica holds; a plain array is the same on all of them."""
    if isinstance(value, rx.PerReplica):
        return [v.tolist() for v in value.values]
    return value.tolist()


# -- all of them, against numpy ------------------------------------------------------


def test_against_numpy(strategy):
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    components = [rng.normal(size=(n, 2 * n)).astype(np.float32) for _ in range(n)]
    stacked = np.stack(components)

    def step(x):
        return {
            "sum": all_reduce("sum", x),
            "mean": all_reduce("mean", x),
            "gather": [all_gather(x, axis) for axis in (0, 1, -1)],
            "scatter": [
                reduce_scatter("sum", x),
                reduce_scatter("mean", x, -1),
            ],
        }

    out = strategy.run(step, (placed(strategy, *components),))
    scattered = out.pop("scatter")
    for leaf in jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, rx.PerReplica)):
        assert isinstance(leaf, jax.Array)  # proved equal on all replicas
        assert leaf.devices() == set(strategy.mesh.devices.flat)
    close = np.testing.assert_allclose
    close(out["sum"], stacked.sum(0), rtol=1e-5, atol=1e-6)
    close(out["mean"], stacked.mean(0), rtol=1e-5, atol=1e-6)
    for axis, got in zip((0, 1, -1), out["gather"], strict=True):
        close(got, np.concatenate(components, axis))
    for r in range(n):
        by_row, by_column = (v.values[r] for v in scattered)
        close(by_row, stacked.sum(0)[r : r + 1], rtol=1e-5, atol=1e-6)
        close(by_column, stacked.mean(0)[:, 2 * r : 2 * r + 2], rtol=1e-5, atol=1e-6)


def test_structures_are_kept(two):
    def step(x):
        tree = {"a": x, "b": (x[None], None), "c": []}
        return (
            all_reduce("sum", tree),
            all_gather(tree, axis=-1),
            reduce_scatter("sum", tree, axis=-1),
        )

    x = placed(two, np.array([1.0, 2.0]), np.array([3.0, 5.0]))
    summed, gathered, scattered = two.run(step, (x,))
    for out in (summed, gathered, scattered):
        assert out.keys() == {"a", "b", "c"}
        assert out["b"][1] is None
        assert out["c"] == []
    assert lists(summed["b"][0]) == [[4.0, 7.0]]
    assert lists(gathered["a"]) == [1.0, 2.0, 3.0, 5.0]
    assert lists(gathered["b"][0]) == [[1.0, 2.0, 3.0, 5.0]]
    assert lists(scattered["a"]) == [[4.0], [7.0]]


def test_numbers_are_values_too(two):
    out = two.run(lambda: (all_reduce("sum", 1.5), all_reduce("mean", {"a": 3})))
    assert (float(out[0]), float(out[1]["a"])) == (3.0, 3.0)


# -- dtypes --------------------------------------------------------------------------


def test_dtype_rules(two):
    components = {
        "int8": (np.int8(100), np.int8(120)),
        "uint8": (np.uint8(200), np.uint8(220)),
        "int32": (np.int32(2_000_000_000), np.int32(1_000_000_000)),
        "bfloat16": (jnp.bfloat16(1.5), jnp.bfloat16(2.5)),
        "complex": (np.complex64(1 + 1j), np.complex64(3j)),
    }
    tree = {k: placed(two, *v) for k, v in components.items()}
    mean = two.run(lambda t: all_reduce("mean", t), (tree,))
    assert {k: (v.item(), v.dtype) for k, v in mean.items()} == {
        "int8": (110.0, jnp.float32),
        "uint8": (210.0, jnp.float32),
        "int32": (1.5e9, jnp.float32),
        "bfloat16": (2.0, jnp.bfloat16),
        "complex": (0.5 + 2j, jnp.complex64),
    }
    del tree["int8"], tree["uint8"], tree["int32"]
    total = two.run(lambda t: all_reduce("sum", t), (tree,))
    assert total["bfloat16"].dtype == jnp.bfloat16
    assert (total["complex"].item(), total["complex"].dtype) == (1 + 4j, jnp.complex64)


def test_sums_keep_integers_and_may_be_wider(strategies):
    eight = strategies[8]

    def step(i, x):
        return (
            all_reduce("sum", i),
            all_reduce("sum", i, accumulate_dtype=jnp.int32),
            all_reduce("mean", x),
            all_reduce("mean", x, accumulate_dtype=jnp.float32),
        )

    small = placed(eight, *[np.int8(50)] * 8)
    large = placed(eight, *[np.float16(60_000)] * 8)
    wrapped, wide, infinite, finite = eight.run(step, (small, large))
    assert (int(wrapped), wrapped.dtype) == (400 - 256 - 256, jnp.int8)
    assert (int(wide), wide.dtype) == (400, jnp.int32)
    assert (float(infinite), infinite.dtype) == (np.inf, jnp.float16)
    assert (float(finite), finite.dtype) == (60_000.0, jnp.float16)


def test_reduce_scatter_of_small_integers_divides_truly(two):
    x = placed(two, np.array([100, 101], np.int8), np.array([100, 120], np.int8))
    out = two.run(lambda x: reduce_scatter("mean", x), (x,))
    assert out.dtype == jnp.float32
    assert lists(out) == [[100.0], [110.5]]


# -- nothing to combine --------------------------------------------------------------


def test_empty_arrays(two):
    def step(x):
        return (
            all_reduce("mean", x),
            [all_gather(x, axis) for axis in (0, 1)],
            [reduce_scatter("sum", x, axis) for axis in (0, 1)],
        )

    empty = np.ones((0, 2), np.float32)
    mean, gathered, scattered = two.run(step, (placed(two, empty, empty),))
    assert mean.shape == (0, 2)
    assert [x.shape for x in gathered] == [(0, 2), (0, 4)]
    assert [x.shape for x in scattered] == [(0, 2), (0, 1)]


# -- errors --------------------------------------------------------------------------

ODD = np.ones(3)


@pytest.mark.parametrize(
    ("step", "kind", "message"),
    [
        (lambda x: all_reduce("max", x), ValueError, "not a ReduceOp"),
        (lambda x: all_reduce("sum", x > 0), TypeError, r"bool.*astype"),
        (lambda x: reduce_scatter("mean", x[:2] > 0), TypeError, "bool"),
        (lambda x: reduce_scatter("sum", x), ValueError, r"multiple of 2.*\(3,\)"),
        (lambda x: reduce_scatter("sum", x[0]), ValueError, "scalar"),
        (lambda x: reduce_scatter("sum", x, 1), ValueError, "axis 1"),
        (lambda x: all_gather(x[0]), ValueError, "scalar"),
        (lambda x: all_gather(x, 1), ValueError, "axis 1"),
        (lambda x: all_gather(x, -2), ValueError, "axis -2"),
        (lambda x: all_gather(x, None), ValueError, "needs an int"),
    ],
)
def test_wrong_arguments(two, step, kind, message):
    with pytest.raises(kind, match=message):
        two.run(step, (placed(two, ODD, ODD),))


def test_a_context_kept_after_its_step_is_refused(two):
    kept = []
    two.run(lambda: kept.append(rx.get_replica_context()))
    (context,) = kept
    for call in (
        lambda: context.all_reduce("sum", 1.0),
        lambda: context.all_gather(np.ones(1)),
        lambda: context.reduce_scatter("sum", np.ones(2)),
        lambda: context.merge_call(lambda strategy: None),
        lambda: context.replica_id_in_sync_group,
    ):
        with pytest.raises(rx.ContextError, match="outside of any step"):
            call()


def test_in_the_default_context_there_is_one_replica():
    context = rx.get_replica_context()
    assert context.all_reduce("mean", {"a": 3})["a"] == 3.0
    assert context.all_gather(np.array([3])).tolist() == [3]
    assert context.reduce_scatter("sum", np.array([3])).tolist() == [3]
    for call in (context.all_gather, lambda x: context.reduce_scatter("sum", x)):
        with pytest.raises(ValueError, match="scalar"):
            call(3)
    with pytest.raises(TypeError, match="bool"):
        context.all_reduce("sum", True)


# -- gradients -----------------------------------------------------------------------


def test_gradients_are_tensorflows(two):
    def step(one, row):
        weight = replica_id() + 1

        def reduced(op):
            return jax.grad(lambda x: all_reduce(op, x) * weight)(one)

        def gathered(x):
            return jnp.sum(all_gather(x) * jnp.arange(1.0, 5.0))

        def scattered(x):
            return jnp.sum(reduce_scatter("sum", x) * weight)

        return (
            reduced("sum"),
            reduced("mean"),
            jax.grad(gathered)(row),
            jax.grad(scattered)(row),
        )

    total, mean, gathered, scattered = two.run(step, (1.0, jnp.ones(2)))
    assert total == 3.0
    assert mean == 1.5
    assert lists(gathered) == [[2.0, 4.0], [6.0, 8.0]]
    assert lists(scattered) == [1.0, 2.0]  # each slice's cotangent, from its replica


def mean_loss(w, x):
    return jnp.mean(w * x)


def test_a_gradient_in_the_step_is_the_replicas_own(two):
    # Where gradients of mirrored values were summed unasked, 8 came out for 4.
    def step(w, x):
        grad = jax.grad(mean_loss)(w, x)
        return grad, all_reduce("mean", grad)

    x = placed(two, np.array([1.0, 3.0]), np.array([5.0, 7.0]))
    local, mean = two.run(step, (jnp.float32(1.0), x))
    assert lists(local) == [2.0, 6.0]
    assert float(mean) == jax.grad(mean_loss)(1.0, jnp.array([1.0, 3.0, 5.0, 7.0]))
    assert float(mean) == 4.0


@pytest.mark.parametrize(
    "mean",
    [lambda x: all_reduce("mean", x), lambda x: lax.pmean(x, "replica")],
    ids=["all_reduce", "pmean"],
)
def test_the_gradient_of_a_reduced_loss_is_local_too(two, mean):
    # Through a psum in the loss the gradient stays unreduced: combine gradients.
    x = placed(two, np.array([1.0, 3.0]), np.array([5.0, 7.0]))
    grad = jax.grad(lambda w, x: mean(mean_loss(w, x)))
    assert lists(two.run(grad, (jnp.float32(1.0), x))) == [2.0, 6.0]


# -- under transformations -----------------------------------------------------------


def test_under_vmap(two):
    def step(x):
        return (
            jax.vmap(lambda v: all_reduce("sum", v))(x),
            jax.vmap(all_gather)(x),
            jax.vmap(lambda v: reduce_scatter("mean", v))(x),
        )

    rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    total, gathered, scattered = two.run(step, (placed(two, rows, 10 * rows),))
    assert lists(total) == [[11.0, 22.0], [33.0, 44.0]]
    assert lists(gathered) == [[1.0, 2.0, 10.0, 20.0], [3.0, 4.0, 30.0, 40.0]]
    assert lists(scattered) == [[[5.5], [16.5]], [[11.0], [22.0]]]


def test_under_scan_loops_and_a_nested_jit(two):
    def step(x):
        summed, each = lax.scan(
            lambda c, v: (c + all_reduce("sum", v), all_gather(v[None])), 0.0, x
        )
        looped = lax.fori_loop(0, 3, lambda i, c: all_reduce("mean", c), x)
        return summed, each, looped, jax.jit(lambda v: all_reduce("sum", v))(x)

    x = placed(two, np.array([1.0, 2.0]), np.array([10.0, 20.0]))
    summed, each, looped, jitted = two.run(step, (x,))
    assert summed == 33.0
    assert lists(each) == [[1.0, 10.0], [2.0, 20.0]]
    # Not proved equal: a loop that runs no time would hand x back.
    assert lists(looped) == [[5.5, 11.0], [5.5, 11.0]]
    assert lists(jitted) == [11.0, 22.0]


@pytest.mark.parametrize(("flag", "expected"), [(1, 11.0), (-1, 2.5)])
def test_under_a_condition_that_is_the_same_everywhere(two, flag, expected):
    def step(x, flag):
        return lax.cond(
            flag > 0,
            lambda x: all_reduce("sum", x),
            lambda x: all_reduce("mean", x) - 3.0,
            x,
        )

    assert two.run(step, (placed(two, 1.0, 10.0), flag)) == expected


def test_not_under_a_condition_that_differs(two):
    def step(x):
        return lax.cond(x > 5, lambda x: all_reduce("sum", x), lambda x: x, x)

    with pytest.raises(rx.DivergentCollectiveError, match="predicate differs"):
        two.run(step, (placed(two, 1.0, 10.0),))


# -- merge_call ----------------------------------------------------------------------


def test_merge_call_runs_its_function_once_for_all_replicas(strategy):
    calls = []

    def merge(seen, x, scale, *, name):
        calls.append(
            (
                seen is strategy,
                rx.get_strategy() is strategy,
                rx.in_cross_replica_context(),
                rx.get_replica_context(),
                isinstance(x, rx.PerReplica),
                x.num_replicas,
                x.shape,
                x.dtype,
                scale,
                name,
            )
        )
        return seen.reduce("sum", x) * scale

    n = strategy.num_replicas_in_sync
    out = strategy.run(
        lambda x: merge_call(merge, x, 10, name="sgd"),
        (placed(strategy, *np.arange(n, dtype=np.float32)),),
    )
    assert calls == [(True, True, True, None, True, n, (), jnp.float32, 10, "sgd")]
    assert out == 10 * sum(range(n))


def test_what_a_merge_function_can_do(two):
    def merge(strategy, tree, mask):
        x = tree["x"]
        return {
            "sum": strategy.reduce("sum", x),
            "mean": strategy.reduce("mean", x, axis=0),
            "list": strategy.reduce("mean", [x, None], axis=[0])[0],
            "weighted": strategy.reduce("mean", x, axis=0, weights=mask),
            "gather": strategy.gather(x, axis=-1),
            "second": x.values[1],
            "local": strategy.experimental_local_results({"a": x, "b": 3})[1]["a"],
            "reduce_to": strategy.extended.reduce_to("sum", x, x),
            "batch": strategy.extended.batch_reduce_to("mean", [(x, x)])[0],
            "broadcast": strategy.extended.broadcast_to(strategy.reduce("sum", x)),
            "jit": jax.jit(lambda v: strategy.reduce("sum", v))(x),
            "mapped": jax.tree.map(lambda v: 2 * v, x),
            "same": x,
            "plain": 5,
            "text": "ok",
            "none": None,
        }

    a, b = [1.0, 2.0], [3.0, 10.0]
    out = two.run(
        lambda x, mask: merge_call(merge, {"x": x}, mask),
        (
            placed(two, np.array(a), np.array(b)),
            placed(two, np.array([1.0, 1.0]), np.array([1.0, 0.0])),
        ),
    )
    assert out.pop("text") == "ok"
    assert out.pop("none") is None
    assert {k: lists(v) for k, v in out.items()} == {
        "sum": [4.0, 12.0],
        "mean": 4.0,
        "list": 4.0,
        "weighted": 2.0,
        "gather": [*a, *b],
        "second": b,
        "local": b,
        "reduce_to": [4.0, 12.0],
        "batch": [2.0, 6.0],
        "broadcast": [4.0, 12.0],
        "jit": [4.0, 12.0],
        "mapped": [[2.0, 4.0], [6.0, 20.0]],
        "same": [a, b],
        "plain": 5,
    }


def test_each_replica_gets_its_component_of_what_is_merged(two):
    def merge(strategy, x):
        first, second = x.values
        made = strategy.experimental_distribute_values_from_function(
            lambda context: 100.0 * context.replica_id_in_sync_group
        )
        return rx.PerReplica([second, first]), made

    def step(x):
        swapped, made = merge_call(merge, x)
        return swapped + 1, made + x

    swapped, made = two.run(step, (placed(two, 1.0, 5.0),))
    assert lists(swapped) == [6.0, 2.0]
    assert lists(made) == [1.0, 105.0]


def test_merged_components_must_be_one_for_each_replica(two):
    for components, kind in [
        ([1.0, 2.0, 3.0], rx.PerReplicaError),
        ([np.ones(1), np.ones(2)], ValueError),
    ]:
        merged = rx.PerReplica(components)
        with pytest.raises(kind, match=r"3 components|same shape"):
            two.run(lambda merged=merged: merge_call(lambda strategy: merged))


def test_merge_call_under_control_flow_and_gradients(two):
    def summed(x):
        return merge_call(lambda strategy, x: strategy.reduce("sum", x), x)

    def step(x, flag):
        return (
            lax.cond(flag > 0, summed, lambda x: all_reduce("mean", x), x),
            lax.scan(lambda c, v: (c + summed(v), None), 0.0, x)[0],
            jax.vmap(summed)(x),
            jax.grad(lambda v: summed(v) * (replica_id() + 1))(1.0),
            jax.jit(summed)(x),
        )

    x = placed(two, np.array([1.0, 2.0]), np.array([10.0, 20.0]))
    out = two.run(step, (x, 1))
    assert [lists(v) for v in out] == [[11.0, 22.0], 33.0, [11.0, 22.0], 3.0, [11, 22]]


def test_a_merge_function_sees_no_concrete_values(two):
    for convert, kind in [
        (lambda strategy, x: float(x), rx.PerReplicaError),
        (
            lambda strategy, x: float(strategy.reduce("sum", x)),
            jax.errors.ConcretizationTypeError,
        ),
    ]:
        with pytest.raises(kind):
            two.run(
                lambda x, convert=convert: merge_call(convert, x),
                (placed(two, 1.0, 5.0),),
            )


def test_an_error_in_a_merge_function_leaves_no_context_behind(two):
    def merge(strategy):
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        two.run(lambda: merge_call(merge))
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()


def test_in_a_merge_function_collectives_of_the_step_are_refused(two):
    def step(x):
        context = rx.get_replica_context()
        return context.merge_call(
            lambda strategy, x: context.all_reduce("sum", 1.0), (x,)
        )

    with pytest.raises(rx.ContextError, match="cross-replica context"):
        two.run(step, (placed(two, 1.0, 5.0),))


def test_run_in_a_merge_function_steps_back_into_the_replicas():
    two = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def merge(strategy, v):
        doubled = strategy.run(lambda y: y * 2, (v,))
        total = strategy.run(
            lambda y, k: rx.get_replica_context().all_reduce("sum", y * k),
            (doubled,),
            {"k": 10.0},
        )
        return doubled, strategy.reduce("mean", total)

    def step(x):
        return rx.get_replica_context().merge_call(merge, (x,))

    doubled, total = two.run(step, (rx.PerReplica([1.0, 2.0]),))
    assert [float(v) for v in doubled.values] == [2.0, 4.0]
    assert float(total) == 60.0
    assert not rx.has_strategy()
