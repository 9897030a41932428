"""Flax nnx objects as arguments of ``run``."""

import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx

TWO, FOUR = (rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (2, 4))
ONE = rx.OneDeviceStrategy("cpu:0")


def all_reduce(op, value):
    return rx.get_replica_context().all_reduce(op, value)


def split(strategy, array):
    n = strategy.num_replicas_in_sync
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: np.split(array, n)[ctx.replica_id_in_sync_group]
    )


class MLP(nnx.Module):
    def __init__(self, rngs, dropout=0.0, norm=False):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        x = self.inner(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.outer(self.dropout(nnx.relu(x)))[:, 0]


X = np.random.RandomState(0).randn(8, 3).astype(np.float32)
Y = np.random.RandomState(1).randn(8).astype(np.float32)


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, all_reduce("mean", grads))
    return loss


def arrays_of(*objects):
    return [np.asarray(a) for a in jax.tree.leaves(nnx.state(objects, nnx.Param))]


def test_an_interrupt_leaves_no_model_half_written(monkeypatch):
    model = MLP(nnx.Rngs(0))

    def step(model):
        for variable in jax.tree.leaves(
            model, is_leaf=lambda x: isinstance(x, nnx.Variable)
        ):
            if isinstance(variable, nnx.Param):
                variable[...] = jnp.zeros_like(variable[...])

    TWO.run(step, (MLP(nnx.Rngs(0)),))
    write = nnx.Variable.set_raw_value

    def interrupted(self, value, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return write(self, value, **kwargs)

    monkeypatch.setattr(nnx.Variable, "set_raw_value", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TWO.run(step, (model,))
    monkeypatch.undo()
    assert not any(x.any() for x in arrays_of(model))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- training ------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_training_on_many_replicas_equals_training_on_one(donate):
    results = []
    for strategy in (ONE, TWO, FOUR):
        model = MLP(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        x, y = split(strategy, X), split(strategy, Y)
        for _ in range(3):
            loss = strategy.run(
                train_step,
                (model, optimizer, x, y),
                options=rx.RunOptions(donate=donate),
            )
            assert isinstance(loss, rx.PerReplica)
        assert int(optimizer.step.get_value()) == 3
        results.append(arrays_of(model))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def test_what_was_trained_lies_on_all_replicas_and_stays_there():
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    args = (model, optimizer, split(TWO, X), split(TWO, Y))
    shardings = []
    for _ in range(2):
        TWO.run(train_step, args)
        leaves = jax.tree.leaves(nnx.state((model, optimizer), nnx.Not(nnx.RngState)))
        assert all(leaf.sharding.is_fully_replicated for leaf in leaves)
        assert all(len(leaf.sharding.device_set) == 2 for leaf in leaves)
        shardings.append([leaf.sharding for leaf in leaves])
    assert shardings[0] == shardings[1]


def test_the_caller_keeps_an_array_that_the_model_held():
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    args = (model, optimizer, split(TWO, X), split(TWO, Y))
    for options in (None, rx.RunOptions(donate=(0, 1))):
        held = model.inner.kernel.get_value()
        TWO.run(train_step, args, options=options)
        assert np.isfinite(np.asarray(held)).all()


def test_a_step_is_traced_once_and_again_when_the_mode_changes():
    traced = []

    def step(model, x):
        traced.append(1)
        return model(x)

    model = MLP(nnx.Rngs(0), dropout=0.5)
    x = split(TWO, X)
    for _ in range(3):
        TWO.run(step, (model, x))
    assert len(traced) == 1
    model.eval()
    a, b = TWO.run(step, (model, x)), TWO.run(step, (model, x))
    assert len(traced) == 2
    np.testing.assert_array_equal(a.array, b.array)


def test_a_gradient_that_was_not_reduced_is_refused_and_nothing_changes():
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = arrays_of(model)

    def step(model, optimizer, x, y):
        optimizer.update(model, nnx.grad(loss_fn)(model, x, y))

    with pytest.raises(
        rx.ReplicaDivergenceError,
        match=r"model\.inner\.kernel would differ between replicas: it depends on a "
        r"gradient computed at test_nnx\.py:\d+(.|\n)*all_reduce\('mean', grads\)",
    ):
        TWO.run(step, (model, optimizer, split(TWO, X), split(TWO, Y)))
    for a, b in zip(before, arrays_of(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(optimizer.step.get_value()) == 0


# -- the kinds of state --------------------------------------------------------------


def test_dropout_differs_per_replica_and_per_step_but_the_key_stays():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key = jax.random.key_data(model.rngs.key.get_value()).tolist()
    ones = split(TWO, np.ones((64,), np.float32))
    masks = [TWO.run(lambda m, x: m(x), (model, ones)).array for _ in range(2)]
    rows = [np.asarray(r).tolist() for m in masks for r in m]
    assert len({tuple(r) for r in rows}) == 4
    assert jax.random.key_data(model.rngs.key.get_value()).tolist() == key
    assert int(model.rngs.count.get_value()) == 2
    assert model.rngs.count.get_value().sharding.is_fully_replicated


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_under_nnx_jit_may_use_dropout(shared):
    model = MLP(nnx.Rngs(0), dropout=0.5)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    key = jax.random.key_data(model.dropout.rngs.key.get_value()).tolist()
    step = nnx.jit(lambda model, optimizer, x, y, m: train_step(model, optimizer, x, y))
    again = model if shared else None  # a second reference needs nnx's graphs
    args = (model, optimizer, split(TWO, X), split(TWO, Y), again)
    losses = [TWO.run(step, args) for _ in range(2)]
    assert float(losses[0].values[0]) != float(losses[1].values[0])
    assert jax.random.key_data(model.dropout.rngs.key.get_value()).tolist() == key
    assert int(model.dropout.rngs.count.get_value()) == 2


def test_a_key_that_the_step_replaces_by_its_own_is_refused():
    def step(rngs):
        rngs.default.key[...] = jax.random.fold_in(rngs.default.key[...], 1)

    with pytest.raises(rx.ReplicaDivergenceError, match="key would differ"):
        TWO.run(step, (nnx.Rngs(0),))


def test_batch_statistics_are_averaged():
    model = nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
    x = np.array([[0.0], [0.0], [10.0], [30.0]], np.float32)
    TWO.run(lambda m, x: m(x), (model, split(TWO, x)))
    np.testing.assert_allclose(model.mean.get_value(), [10.0])
    np.testing.assert_allclose(model.var.get_value(), [50.0])  # mean of 0 and 100
    assert model.mean.get_value().sharding.is_fully_replicated


def test_batch_norm_over_the_replica_axis_is_synchronised():
    model = nnx.BatchNorm(1, momentum=0.0, axis_name="replica", rngs=nnx.Rngs(0))
    x = np.array([[0.0], [0.0], [10.0], [10.0]], np.float32)
    TWO.run(lambda m, x: m(x), (model, split(TWO, x)))
    np.testing.assert_allclose(model.mean.get_value(), [5.0])
    np.testing.assert_allclose(model.var.get_value(), [25.0])


@pytest.mark.parametrize("strategy", [ONE, TWO, FOUR], ids=["x1", "x2", "x4"])
def test_metrics_count_every_row_of_every_replica_once(strategy):
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), spread=nnx.metrics.Welford("loss")
    )

    def step(metrics, x):
        metrics.update(loss=x)

    for batch in (X[:, 0], X[:, 1] * 3 + 1):
        strategy.run(step, (metrics, split(strategy, batch)))
    seen = np.concatenate([X[:, 0], X[:, 1] * 3 + 1])
    got = metrics.compute()
    np.testing.assert_allclose(got["loss"], seen.mean(), rtol=1e-6)
    np.testing.assert_allclose(got["spread"].mean, seen.mean(), rtol=1e-5)
    np.testing.assert_allclose(got["spread"].standard_deviation, seen.std(), rtol=1e-5)
    assert int(metrics.loss.count.get_value()) == 16


def test_a_metric_that_is_reset_in_the_step_counts_that_step_only():
    metric = nnx.metrics.Average("x")

    def step(metric, x):
        metric.reset()
        metric.update(x=x)

    for _ in range(2):
        TWO.run(step, (metric, split(TWO, X[:, 0])))
    np.testing.assert_allclose(metric.compute(), X[:, 0].mean(), rtol=1e-6)


METRICS = {"Average": nnx.metrics.Average, "Welford": nnx.metrics.Welford}


@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_that_is_reset_and_updated_in_a_nested_jit(kind):
    metric = METRICS[kind]("x")

    @nnx.jit
    def inner(metric, x):
        metric.reset()
        metric.update(x=x)

    for column in (0, 1):
        TWO.run(lambda m, x: inner(m, x), (metric, split(TWO, X[:, column])))
        mean = metric.compute() if kind == "Average" else metric.compute().mean
        np.testing.assert_allclose(mean, X[:, column].mean(), rtol=1e-5)


def test_a_metric_that_is_reset_in_a_branch_is_refused_rather_than_wrong():
    metric = nnx.metrics.Average("x")

    def step(metric, first, x):
        nnx.cond(first, lambda m: m.reset(), lambda m: None, metric)
        metric.update(x=x)

    with pytest.raises(rx.ReplicaDivergenceError, match="not the old one plus"):
        TWO.run(step, (metric, jnp.array(True), split(TWO, X[:, 0])))
    assert float(metric.total.get_value()) == 0.0


def test_metrics_that_change_places_are_refused_rather_than_wrong():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.metrics.Average("x"), nnx.metrics.Average("x")

    def step(pair, x):
        pair.a.update(x=x)
        pair.a.total[...], pair.b.total[...] = pair.b.total[...], pair.a.total[...]

    with pytest.raises(rx.ReplicaDivergenceError, match="not the old one plus"):
        TWO.run(step, (Pair(), split(TWO, X[:, 0])))


def test_a_metric_that_forgets_is_refused_rather_than_wrong():
    class Decaying(nnx.metrics.Average):
        def update(self, **kwargs):
            self.total[...] *= 0.9
            super().update(**kwargs)

    with pytest.raises(rx.ReplicaDivergenceError, match="not the old one plus"):
        TWO.run(lambda m, x: m.update(x=x), (Decaying("x"), split(TWO, X[:, 0])))


def test_the_models_memory_is_its_own_once_it_was_placed():
    kernel = jnp.ones((3, 2))
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model.kernel.set_value(kernel)
    TWO.run(lambda m, x: m(x), (model, split(TWO, X)))
    kernel.delete()
    assert model.kernel.get_value().sum() == 6.0


def test_a_metric_updated_with_a_reduced_value_counts_it_once():
    metric = nnx.metrics.Average("x")
    step = lambda m, x: m.update(x=all_reduce("mean", jnp.mean(x)))  # noqa: E731
    TWO.run(step, (metric, split(TWO, X[:, 0])))
    assert int(metric.count.get_value()) == 1
    np.testing.assert_allclose(metric.compute(), X[:, 0].mean(), rtol=1e-6)


def test_a_metric_of_an_unknown_rule_is_refused():
    class Largest(nnx.metrics.Metric):
        def __init__(self):
            self.top = nnx.metrics.MetricState(jnp.array(0.0))

        def update(self, x):
            self.top[...] = jnp.maximum(self.top[...], jnp.max(x))

    with pytest.raises(rx.ReplicaDivergenceError, match=r"metric.*a Largest.*Average"):
        TWO.run(lambda metric, x: metric.update(x), (Largest(), split(TWO, X)))


# -- structure -----------------------------------------------------------------------


def test_objects_anywhere_in_args_and_kwargs_are_updated():
    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.array(0))

    a, b, c = Counter(), Counter(), Counter()

    def step(d, *, extra):
        d["a"].n[...] += 1
        d["rest"][0].n[...] += 2
        extra.n[...] += 3
        return d["x"]

    TWO.run(step, ({"a": a, "rest": [b], "x": 1.0},), {"extra": c})
    assert [int(m.n.get_value()) for m in (a, b, c)] == [1, 2, 3]


@pytest.mark.parametrize(
    "components",
    [
        lambda n: list(range(n)),
        lambda n: np.arange(n, dtype=np.float32),
        lambda n: [jnp.float32(i) for i in range(n)],
    ],
    ids=["numbers", "numpy", "arrays"],
)
def test_objects_are_updated_beside_components_given_by_hand(strategy, components):
    class Counter(nnx.Variable):
        pass

    class Counting(nnx.Module):
        def __init__(self):
            self.calls = Counter(jnp.zeros(()))

    def step(model, batch):
        model.calls[...] += 1
        return batch["x"] * 2

    model = Counting()
    x = rx.PerReplica(components(strategy.num_replicas_in_sync))
    for calls in (1, 2, 3):
        strategy.run(step, (model,), {"batch": {"x": x, "none": None}})
        assert float(model.calls[...]) == calls


def test_a_bare_variable_is_updated():
    v = nnx.Variable(jnp.array(1.0))

    def step(v, x):
        v[...] += all_reduce("sum", jnp.sum(x))

    TWO.run(step, (v, split(TWO, np.ones(4, np.float32))))
    assert float(v.get_value()) == 5.0


def test_the_same_module_passed_twice_is_one_module():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step(a, b):
        a.kernel[...] = a.kernel[...] * 0 + 7
        return b.kernel[...]

    out = TWO.run(step, (model, model))
    assert float(out[0, 0]) == 7.0
    assert float(model.kernel.get_value()[0, 0]) == 7.0


def test_tied_weights_stay_tied():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(1))
            self.b.kernel = self.a.kernel

    model = Tied()

    def step(model, x):
        g = nnx.grad(lambda m: jnp.sum(m.b(m.a(x))))(model)
        g = all_reduce("mean", g)
        model.a.kernel[...] -= 0.1 * jax.tree.leaves(g)[0]

    expected = model.a.kernel.get_value() - 0.1 * jax.grad(
        lambda k: jnp.mean(jnp.sum((X[:, :2] @ k) @ k, 1)) * 4
    )(model.a.kernel.get_value())
    TWO.run(step, (model, split(TWO, X[:, :2])))
    assert model.a.kernel is model.b.kernel
    np.testing.assert_allclose(model.a.kernel.get_value(), expected, rtol=1e-5)


def test_structure_that_the_step_changes_changes_outside():
    class Growing(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    model = Growing()

    def step(model, x):
        model.extra = nnx.Param(model.w[...] * 3)
        model.tag = "grown"
        return x * model.w[...]

    for _ in range(2):
        out = TWO.run(step, (model, split(TWO, np.ones((2, 2), np.float32))))
    assert isinstance(out, rx.PerReplica)
    assert model.tag == "grown" and model.extra.get_value().tolist() == [3.0, 3.0]


def test_a_step_may_return_objects():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(model):
        fresh = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        return {"same": model, "fresh": fresh, "x": 1.0}

    out = TWO.run(step, (model,))
    assert out["same"] is model
    assert isinstance(out["fresh"], nnx.Linear) and float(out["x"]) == 1.0


def test_modules_that_are_no_pytrees_work():
    class Plain(nnx.Module, pytree=False):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    model = Plain()

    def step(model, x):
        model.w[...] += all_reduce("sum", jnp.sum(x))

    for _ in range(2):
        TWO.run(step, (model, split(TWO, np.ones(4, np.float32))))
    assert model.w.get_value().tolist() == [9.0, 9.0]


def test_divergence_is_found_in_graphs_too():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step(a, b, x):
        a.kernel[...] += jnp.sum(x)

    with pytest.raises(rx.ReplicaDivergenceError, match=r"a\.kernel would differ"):
        TWO.run(step, (model, model, split(TWO, X)))


def test_batch_norm_metrics_and_rngs_in_a_graph_follow_the_same_rules():
    norm = nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
    metric = nnx.metrics.Average("x")
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key = jax.random.key_data(dropout.rngs.key.get_value()).tolist()

    def step(objects, again, x):
        norm, metric, dropout = objects
        norm(x)
        metric.update(x=x)
        return dropout(jnp.ones(32))

    x = np.array([[0.0], [0.0], [10.0], [30.0]], np.float32)
    out = TWO.run(step, ((norm, metric, dropout), norm, split(TWO, x)))
    np.testing.assert_allclose(norm.mean.get_value(), [10.0])
    np.testing.assert_allclose(metric.compute(), 10.0)
    assert out.values[0].tolist() != out.values[1].tolist()
    assert jax.random.key_data(dropout.rngs.key.get_value()).tolist() == key


def test_a_metric_made_in_the_step_is_combined_too():
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.ones((1, 1))

    def step(model, x):
        metric = nnx.metrics.Average("x")
        metric.update(x=model(x))
        return metric

    x = np.array([[1.0], [2.0], [3.0], [6.0]], np.float32)
    metric = TWO.run(step, (model, split(TWO, x)))
    assert float(metric.total.get_value()) == 12.0
    assert float(metric.compute()) == 3.0


def test_modules_that_come_to_share_a_variable_are_traced_once_more_only():
    traced = []

    def step(a, b):
        traced.append(1)
        a.kernel[...] += 1
        return b.kernel[...]

    a, b = (nnx.Linear(1, 1, rngs=nnx.Rngs(i)) for i in range(2))
    TWO.run(step, (a, b))
    b.kernel = a.kernel
    for _ in range(3):
        out = TWO.run(step, (a, b))
    assert len(traced) == 2
    assert out[0, 0] == a.kernel.get_value()[0, 0]


def test_differentiating_a_captured_module_is_explained():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def step(x):
        return nnx.grad(lambda m: jnp.sum(m(x)))(model)

    with pytest.raises(Exception) as e:
        TWO.run(step, (split(TWO, X),))
    assert "Pass the object as an argument of `run`" in "".join(e.value.__notes__)


def test_a_captured_stateful_module_is_explained():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(Exception) as e:
        TWO.run(lambda x: dropout(x), (split(TWO, X),))
    assert "Pass the object as an argument of `run`" in "".join(e.value.__notes__)


def test_a_captured_module_may_be_read():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    out = TWO.run(lambda x: model(x), (split(TWO, X),))
    np.testing.assert_allclose(np.concatenate(out.values), model(X), rtol=1e-5)


scale = nnx.Variable(jnp.array(2.0))


def scaled_by_global(x):
    return x * scale[...]


def test_a_captured_module_that_changed_is_not_seen_as_it_was():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    class Evaluator:
        def __init__(self):
            self.models = [model]

        def step(self, x):
            return self.models[0](x)

    evaluator = Evaluator()
    steps = [lambda x: model(x), evaluator.step]
    for _ in range(2):
        for step in steps:
            out = TWO.run(step, (split(TWO, X),))
            np.testing.assert_allclose(np.concatenate(out.values), model(X), rtol=1e-5)
        model.kernel[...] = model.kernel[...] + 1
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(5))
    evaluator.models[0] = model
    for step in steps:
        out = TWO.run(step, (split(TWO, X),))
        np.testing.assert_allclose(np.concatenate(out.values), model(X), rtol=1e-5)

    class Trainer:
        def __init__(self):
            self.state = types.SimpleNamespace(model=model)

        def __call__(self, x):
            return self.state.model(x)

    trainer = Trainer()
    for _ in range(2):
        for step in (trainer, trainer.__call__):
            out = TWO.run(step, (split(TWO, X),))
            np.testing.assert_allclose(np.concatenate(out.values), model(X), rtol=1e-5)
        model.kernel[...] = model.kernel[...] + 1
    x = split(TWO, X)
    TWO.run(lambda x: scaled_by_global(x), (x,))
    scale[...] = 3.0
    out = TWO.run(lambda x: scaled_by_global(x), (x,))
    np.testing.assert_allclose(np.concatenate(out.values), X * 3, rtol=1e-6)


def test_a_model_that_is_only_read_is_placed_once_and_for_good():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    TWO.run(lambda m, x: m(x), (model, split(TWO, X)))
    kernel = model.kernel.get_value()
    assert kernel.sharding.device_set == set(TWO.mesh.devices.flat)
    TWO.run(lambda m, x: m(x), (model, split(TWO, X)))
    assert model.kernel.get_value() is kernel


def test_states_of_objects_are_pytrees_like_others():
    model = MLP(nnx.Rngs(0))
    graphdef, state = nnx.split(model, nnx.Param, ...)[0:2]
    del graphdef
    out = TWO.run(lambda s: jax.tree.map(lambda a: a * 2, s), (state,))
    assert jax.tree.structure(out) == jax.tree.structure(state)


def test_run_with_objects_inside_nnx_jit():
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    other = MLP(nnx.Rngs(0))
    other_optimizer = nnx.Optimizer(other, optax.sgd(0.1), wrt=nnx.Param)
    x, y = split(TWO, X), split(TWO, Y)

    @nnx.jit
    def outer(model, optimizer, x, y):
        return TWO.run(train_step, (model, optimizer, x, y))

    outer(model, optimizer, x, y)
    TWO.run(train_step, (other, other_optimizer, x, y))
    for a, b in zip(arrays_of(model), arrays_of(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
