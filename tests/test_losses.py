"""Losses whose shares add up: the figures, and training that N does not change."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

COUNTS = (1, 2, 4, 8)
STRATEGIES = {n: rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in COUNTS}
TWO = STRATEGIES[2]

LOSSES = rx.PerReplica([np.float32([1, 2]), np.float32([3, 4])])
MASK = rx.PerReplica([np.float32([1, 1]), np.float32([1, 0])])


def all_reduce(op, value):
    return rx.get_replica_context().all_reduce(op, value)


def shares(step, *args, **kwargs):
    out = TWO.run(step, args, kwargs)
    return [float(share) for share in TWO.experimental_local_results(out)]


def number_of_all_reduces(step, *args):
    text = jax.jit(lambda *a: TWO.run(step, a)).lower(*args).compile().as_text()
    return len(re.findall(r"^\s*\S+ = .*? all-reduce(?:-start)?\(", text, re.MULTILINE))


# -- training does not depend on the number of replicas ------------------------------

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
Y = (np.tanh(X @ [1.0, -2.0, 0.5]) + RNG.normal(size=24)).astype(np.float32)
START = {
    "in": jnp.float32(RNG.normal(size=(3, 4))),
    "out": jnp.float32(RNG.normal(size=4)),
}
RATE = 0.1


def losses_of(params, x, y):
    return (jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2


def penalty_of(params):
    return 0.1 * sum(jnp.sum(w**2) for w in params.values())


def descend(params, grads):
    return jax.tree.map(lambda w, g: w - RATE * g, params, grads)


def trained_without_replicas(rows, batch_size):
    def loss(params, x, y):
        return losses_of(params, x, y).mean() + penalty_of(params)

    params = START
    for first in range(0, rows, batch_size):
        batch = slice(first, min(first + batch_size, rows))
        params = descend(params, jax.grad(loss)(params, X[batch], Y[batch]))
    return params


def trained(n, way, rows, batch_size):
    """The parameters after an epoch of three steps, of batches padded to one size."""
    loss_of, op = way

    def step(params, x, y, mask):
        loss = lambda params: loss_of(params, losses_of(params, x, y), mask)  # noqa: E731
        return descend(params, all_reduce(op, jax.grad(loss)(params)))

    strategy = STRATEGIES[n]
    dataset = rx.datasets.from_arrays((X[:rows], Y[:rows])).batch(batch_size)
    options = rx.InputOptions(remainder="pad", prefetch=0)
    params, steps = START, 0
    for batch in strategy.experimental_distribute_dataset(dataset, options):
        params = strategy.run(step, (params, *batch))
        steps += 1
    assert steps == 3
    return params


def farthest(a, b):
    gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), a, b)
    return max(jax.tree.leaves(gaps))


def masked(params, losses, mask):
    loss = rx.compute_average_loss(losses, mask=mask)
    return loss + rx.scale_regularization_loss(penalty_of(params))


def weighted_and_counted(params, losses, mask):
    rows = all_reduce("sum", jnp.count_nonzero(mask))
    loss = rx.compute_average_loss(losses, mask, global_batch_size=rows)
    return loss + rx.scale_regularization_loss(penalty_of(params))


def unmasked(params, losses, mask):
    loss = rx.compute_average_loss(losses)
    return loss + rx.scale_regularization_loss(penalty_of(params))


def replicas_mean(params, losses, mask):
    return losses.mean() + penalty_of(params)


def replicas_masked_mean(params, losses, mask):
    mean = (losses * mask).sum() / jnp.maximum(mask.sum(), 1)
    return mean + penalty_of(params)


# At 8 replicas, a last batch of 3 rows leaves five of them with nothing but filler.
@pytest.mark.parametrize("rows", [24, 21, 19], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("loss_of", [masked, weighted_and_counted])
def test_padded_batches_train_alike_on_any_number_of_replicas(loss_of, rows):
    by_count = [trained(n, (loss_of, "sum"), rows, 8) for n in COUNTS]
    for params in [*by_count[1:], trained_without_replicas(rows, 8)]:
        assert farthest(params, by_count[0]) <= 1e-6


@pytest.mark.parametrize("way", [(unmasked, "sum"), (replicas_mean, "mean")])
def test_whole_batches_train_alike_on_any_number_of_replicas(way):
    by_count = [trained(n, way, 24, 8) for n in COUNTS]
    for params in [*by_count[1:], trained_without_replicas(24, 8)]:
        assert farthest(params, by_count[0]) <= 1e-6


@pytest.mark.parametrize(
    ("way", "rows"),
    [
        pytest.param((replicas_masked_mean, "mean"), 19, id="a mean of masked means"),
        pytest.param((unmasked, "sum"), 19, id="filler that counts"),
        pytest.param((replicas_mean, "sum"), 24, id="a sum of means"),
        pytest.param((masked, "mean"), 24, id="a mean of shares"),
    ],
)
def test_other_ways_do_not_train_alike(way, rows):
    gap = farthest(trained(4, way, rows, 8), trained_without_replicas(rows, 8))
    assert gap > 1e-2


def test_a_short_last_batch_that_divides_needs_no_mask():
    def step(params, x, y):
        loss = lambda params: unmasked(params, losses_of(params, x, y), None)  # noqa: E731
        return descend(params, all_reduce("sum", jax.grad(loss)(params)))

    dataset = rx.datasets.from_arrays((X[:20], Y[:20])).batch(8)
    params = START
    for batch in STRATEGIES[4].experimental_distribute_dataset(dataset):
        params = STRATEGIES[4].run(step, (params, *batch))
    assert farthest(params, trained_without_replicas(20, 8)) <= 1e-6


# -- what is divided by --------------------------------------------------------------


def test_the_default_size_is_that_of_all_replicas():
    assert shares(rx.compute_average_loss, LOSSES) == [0.75, 1.75]


@pytest.mark.parametrize("size", [8, np.int64(8), np.array(8), jnp.int32(8)])
def test_a_size_may_be_any_integer(size):
    step = lambda x: rx.compute_average_loss(x, global_batch_size=size)  # noqa: E731
    assert shares(step, LOSSES) == [0.375, 0.875]
    assert shares(rx.compute_average_loss, LOSSES, None, size) == [0.375, 0.875]


def test_a_size_may_be_larger_than_an_int32():
    loss = rx.compute_average_loss([3.0], global_batch_size=3_000_000_000)
    np.testing.assert_allclose(loss, 1e-9)


@pytest.mark.parametrize("size", [8.0, True, "8", [8], np.array([8]), jnp.ones(())])
def test_a_size_that_is_no_integer_is_refused(size):
    with pytest.raises(TypeError, match=r"one integer.*count_nonzero"):
        rx.compute_average_loss([1.0], global_batch_size=size)


def test_a_traced_size_that_is_no_integer_is_refused():
    with pytest.raises(TypeError, match=r"one integer.*float32"):
        TWO.run(rx.compute_average_loss, (LOSSES, None, 8.0))


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=r"negative. Got -1"):
        rx.compute_average_loss([1.0], global_batch_size=-1)


def test_a_size_that_differs_between_replicas_is_refused():
    def step(losses, mask):
        rows = jnp.count_nonzero(mask)
        return rx.compute_average_loss(losses, global_batch_size=rows)

    with pytest.raises(rx.ReplicaDivergenceError, match=r"global_batch_size.*mask"):
        TWO.run(step, (LOSSES, MASK))


@pytest.mark.parametrize("how", [{"global_batch_size": 0}, {"mask": [0, 0]}])
def test_a_loss_of_nothing_is_zero_and_so_is_its_gradient(how):
    average = lambda x: rx.compute_average_loss(x, **how)  # noqa: E731
    for f in (average, jax.jit(average)):
        loss, grad = jax.value_and_grad(f)(jnp.ones(2))
        assert (float(loss), grad.tolist()) == (0.0, [0.0, 0.0])


def test_no_rows_at_all_have_the_loss_zero():
    assert float(rx.compute_average_loss(jnp.zeros((0, 3)))) == 0.0


def test_a_traced_size_of_zero_gives_zero():
    grad = jax.grad(rx.compute_average_loss)
    step = lambda x, size: grad(x, global_batch_size=size).sum()  # noqa: E731
    assert shares(step, LOSSES, 0) == [0.0]
    assert shares(step, LOSSES, 4) == [0.5]


# -- weights and masks ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "weight", "expected"),
    [
        ((2,), 3.0, 3.0),
        ((2,), [1, 0], 0.5),
        ((2,), [[1.0], [3.0]], 2.0),
        ((2,), [True, False], 0.5),
        ((2, 3), [1.0, 0.0], 1.5),
        ((2, 3), [[1.0, 0.0, 0.0]], 1.0),
        ((3, 3), [1.0, 0.0, 0.0], 1.0),
        ((2, 3, 4), np.ones((2, 3)) / 4, 3.0),
    ],
)
def test_weights_are_aligned_with_the_examples(shape, weight, expected):
    loss = rx.compute_average_loss(jnp.ones(shape), weight)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 3, 1), (3, 1)])
def test_weights_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=re.escape(f"sample_weight of shape {shape}")):
        rx.compute_average_loss(jnp.ones(2), jnp.ones(shape))


@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 1)])
def test_a_mask_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match=re.escape(f"mask of shape {shape}")):
        rx.compute_average_loss(jnp.ones(2), mask=jnp.ones(shape))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
def test_a_mask_counts_the_rows_of_all_replicas(dtype):
    mask = rx.PerReplica([v.astype(dtype) for v in MASK.values])
    assert shares(rx.compute_average_loss, LOSSES, mask=mask) == [1.0, 1.0]


def test_a_mask_selects_and_a_size_that_is_given_divides():
    step = lambda x, m: rx.compute_average_loss(x, None, 4, mask=m)  # noqa: E731
    assert shares(step, LOSSES, MASK) == [0.75, 0.75]


def test_weights_scale_what_a_mask_lets_pass():
    weight = rx.PerReplica([np.float32([2, 0]), np.float32([1, 9])])
    out = shares(rx.compute_average_loss, LOSSES, weight, mask=MASK)
    np.testing.assert_allclose(out, [2 / 3, 1.0])


def test_a_mask_of_tokens_counts_tokens_and_one_of_rows_counts_rows():
    losses = jnp.ones((2, 3))
    tokens = np.array([[1, 1, 0], [0, 0, 0]])
    assert float(rx.compute_average_loss(losses, mask=tokens)) == 1.0
    assert float(rx.compute_average_loss(losses, mask=tokens[:, 0])) == 3.0


def test_what_is_masked_may_be_nan():
    losses = jnp.float32([1, np.nan])
    loss, grad = jax.value_and_grad(
        lambda x: rx.compute_average_loss(x, mask=jnp.array([1, 0]))
    )(losses)
    assert (float(loss), grad.tolist()) == (1.0, [1.0, 0.0])
    assert np.isnan(rx.compute_average_loss(losses, jnp.array([1, 0])))


def test_a_weight_of_zero_has_a_gradient():
    grad = jax.grad(lambda w: rx.compute_average_loss(jnp.float32([1, 6]), w))
    assert grad(jnp.zeros(2)).tolist() == [0.5, 3.0]


def test_only_counting_a_mask_costs_a_collective():
    masked_loss = lambda x, m: rx.compute_average_loss(x, mask=m)  # noqa: E731
    assert number_of_all_reduces(masked_loss, LOSSES, MASK) == 1
    assert number_of_all_reduces(rx.compute_average_loss, LOSSES, MASK) == 0
    sized = lambda x, m: rx.compute_average_loss(x, None, 4, mask=m)  # noqa: E731
    assert number_of_all_reduces(sized, LOSSES, MASK) == 0


# -- dtypes --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_loss_keeps_its_dtype_and_many_do_not_overflow(dtype):
    losses = jnp.full(1001, 60_000, dtype)
    loss = rx.compute_average_loss(losses, jnp.ones(1001))
    assert loss.dtype == dtype
    assert loss == losses[0]
    total = rx.scale_regularization_loss(jnp.ones(300, dtype))
    assert (total.dtype, float(total)) == (dtype, 300.0)


def test_integers_have_a_mean_of_floats():
    loss = rx.compute_average_loss(jnp.array([1, 2]), jnp.array([0.5, 0.5]))
    assert (loss.dtype, float(loss)) == (jnp.float32, 0.75)
    scaled = TWO.run(rx.scale_regularization_loss, (jnp.array([1, 2]),))
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 1.5)


@pytest.mark.parametrize(
    "call", [rx.compute_average_loss, rx.scale_regularization_loss]
)
def test_bools_are_no_losses(call):
    with pytest.raises(TypeError, match="bool"):
        call(jnp.array([True, False]))


# -- where they are called -----------------------------------------------------------


def both(losses, mask):
    total = rx.compute_average_loss(losses, mask=mask)
    return total + rx.scale_regularization_loss([losses[0], 1.0])


@pytest.mark.parametrize("call", [both, jax.jit(both)])
def test_without_a_strategy_there_is_one_replica(call):
    losses, mask = jnp.float32([1, 2, 6]), jnp.array([1, 0, 1])
    assert float(call(losses, mask)) == 3.5 + 2.0
    assert float(rx.OneDeviceStrategy("cpu:0").run(call, (losses, mask))) == 5.5
    with rx.get_strategy().scope():
        assert float(call(losses, mask)) == 5.5


def test_in_a_scope_a_size_is_needed():
    with TWO.scope():
        for how in ({}, {"mask": [1, 1]}):
            with pytest.raises(rx.ContextError, match="pass global_batch_size"):
                rx.compute_average_loss([1.0, 2.0], **how)
        with pytest.raises(rx.ContextError, match=r"function passed to `strategy.run`"):
            rx.scale_regularization_loss(1.0)
        assert float(rx.compute_average_loss([1.0, 3.0], global_batch_size=8)) == 0.5


def test_a_list_of_penalties_is_added_up():
    step = lambda w: rx.scale_regularization_loss([w, 2 * w, 1.0])  # noqa: E731
    assert shares(step, jnp.float32(3)) == [5.0]


def test_a_mask_is_counted_in_a_loop_too():
    def step(losses, mask):
        def add(total, _):
            return total + rx.compute_average_loss(losses, mask=mask), None

        return jax.lax.scan(add, 0.0, length=3)[0]

    assert shares(step, LOSSES, MASK) == [3.0, 3.0]
