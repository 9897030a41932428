"""Batches that do not divide over the replicas: refused, dropped, or filled up."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicax.datasets.options import InputOptions
from replicax.datasets.remainder import (
    check_sizes,
    pad_batch,
    padded_size,
    steps,
    uneven_error,
)

import replicax as rx
from replicax.errors import UnevenBatchError


@pytest.mark.parametrize(
    ("rows", "replicas", "size"),
    [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (3, 1, 3)],
)
def test_padded_size(rows, replicas, size):
    assert padded_size(rows, replicas) == size


def test_a_dict_receives_the_mask_as_a_key():
    batch = {"x": np.ones([3, 2]), "name": np.array(["a", "b", "c"])}
    padded = pad_batch(batch, 3, 4)
    assert sorted(batch) == ["name", "x"]
    np.testing.assert_array_equal(padded["x"], [[1, 1], [1, 1], [1, 1], [0, 0]])
    assert padded["name"].tolist() == ["a", "b", "c", ""]
    assert padded["mask"].dtype == np.float32
    assert padded["mask"].tolist() == [1, 1, 1, 0]


def test_a_pair_receives_the_mask_as_its_third_entry():
    x, y, mask = pad_batch((np.ones(3), {"y": np.arange(3)}), 3, 6)
    assert (x.shape, y["y"].shape) == ((6,), (6,))
    assert mask.tolist() == [1, 1, 1, 0, 0, 0]


def test_objects_are_filled_with_none():
    padded = pad_batch({"o": np.array([b"a", b"b"], object)}, 2, 4)
    assert padded["o"].tolist() == [b"a", b"b", None, None]


def test_a_dict_that_has_a_mask_already_is_refused():
    with pytest.raises(ValueError, match="already has"):
        pad_batch({"x": np.ones(3), "mask": np.ones(3)}, 3, 4)


@pytest.mark.parametrize(
    "batch", [np.ones(3), (np.ones(3),), (np.ones(3),) * 3, [np.ones(3)] * 3]
)
def test_a_batch_without_a_place_for_the_mask_names_the_two_forms(batch):
    with pytest.raises(ValueError, match=r"a dict .* or a pair \(x, y\)"):
        pad_batch(batch, 3, 4)


def test_the_error_states_rows_replicas_remainder_and_choices():
    text = str(uneven_error(5, 2, "Batch 3 has"))
    for part in ("Batch 3", "5 rows", "2 replicas", "remainder 1", "drop", "pad"):
        assert part in text


def test_known_sizes_are_checked_beforehand():
    check_sizes({8: 3, 4: 1}, 4, "error", 8)
    check_sizes({8: 3, 3: 1}, 4, "drop", 8)
    check_sizes({9: 3, 3: 1}, 4, "pad", 9)
    with pytest.raises(UnevenBatchError, match=r"The last batch \(of 4\) has 3 rows"):
        check_sizes({8: 3, 3: 1}, 4, "error", 8)
    with pytest.raises(UnevenBatchError, match="3 of 4 batches have 9"):
        check_sizes({9: 3, 4: 1}, 4, "error", 9)


def test_dropping_every_full_batch_is_an_error_not_an_empty_epoch():
    with pytest.raises(UnevenBatchError, match="every full batch"):
        check_sizes({9: 3, 4: 1}, 4, "drop", 9)


def test_steps():
    sizes = {8: 3, 3: 1}
    assert [steps(sizes, 4, choice) for choice in ("error", "drop", "pad")] == [4, 3, 4]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"prefetch": -1}, ValueError, "prefetch"),
        ({"prefetch": 1.5}, TypeError, "Expected an int. Got 1.5"),
        ({"prefetch": True}, TypeError, "Expected an int"),
        ({"remainder": "keep"}, ValueError, "'error', 'drop', 'pad'. Got 'keep'"),
        ({"remainder": None}, ValueError, "Got None"),
    ],
)
def test_options_are_validated(options, error, match):
    with pytest.raises(error, match=match):
        InputOptions(**options)


def test_the_error_is_a_value_error_of_the_tree():
    assert issubclass(UnevenBatchError, ValueError)
    assert rx.datasets.InputOptions is InputOptions


# -- evaluation with filler ----------------------------------------------------------

STRATEGIES = {
    n: rx.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in range(1, 9)
}
traces = collections.Counter()


def evaluate(batch):
    """Predictions, and the sum of their losses and their number over all replicas."""
    context = rx.get_replica_context()
    traces[context.num_replicas_in_sync, batch["x"].shape] += 1
    predictions = 3 * batch["x"] - 1
    losses = (predictions - batch["y"]) ** 2 * batch["mask"]
    sums = context.all_reduce("sum", jnp.stack([losses.sum(), batch["mask"].sum()]))
    return predictions, sums


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    num_rows=st.integers(0, 40),
    batch_size=st.integers(1, 9),
    n=st.integers(1, 8),
    kind=st.sampled_from(["arrays", "generator", "dealt"]),
)
def test_evaluation_equals_that_of_one_device_exactly(num_rows, batch_size, n, kind):
    """Small whole numbers, so that sums are exact in whatever order."""
    strategy, options = STRATEGIES[n], InputOptions(remainder="pad")
    x = np.arange(num_rows, dtype=np.float32)
    y = np.float32(7) + x % 5
    rows = rx.datasets.from_arrays({"x": x, "y": y}).batch(batch_size)
    if kind == "dealt":
        dataset = strategy.distribute_datasets_from_function(lambda _: rows, options)
    else:
        source = rows if kind == "arrays" else lambda: rows.epoch(0)
        dataset = strategy.experimental_distribute_dataset(source, options)

    predictions, sums = [], np.zeros(2)
    for batch in dataset:
        predicted, sums_of_batch = strategy.run(evaluate, (batch,))
        sums += np.asarray(sums_of_batch)
        mask = np.asarray(strategy.gather(batch["mask"]))
        predictions += np.asarray(strategy.gather(predicted))[mask == 1].tolist()
    assert predictions == (3 * x - 1).tolist()
    assert sums.tolist() == [np.sum((3 * x - 1 - y) ** 2), num_rows]
    # A shape is compiled once, however many batches and datasets have it.
    assert set(traces.values()) <= {1}


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("num_rows", [5, 19, 24])
def test_padding_is_one_trace_from_the_first_batch_on(n, num_rows):
    strategy = STRATEGIES[n]
    traced = []

    def step(batch):
        traced.append(1)
        return batch["x"] * batch["mask"]

    rows = rx.datasets.from_arrays({"x": np.ones(num_rows, np.float32)}).batch(8)
    dataset = strategy.experimental_distribute_dataset(
        rows, InputOptions(remainder="pad")
    )
    for _ in range(2):
        outputs = [strategy.run(step, (batch,)) for batch in dataset]
        assert sum(float(strategy.reduce("sum", out, axis=0)) for out in outputs) == (
            num_rows
        )
    assert len(traced) == 1


def test_the_weighted_mean_of_padded_batches_is_that_of_the_rows():
    x = np.array([1, 2, 6, 7, 9], np.float32)
    strategy = STRATEGIES[4]
    (batch,) = strategy.experimental_distribute_dataset(
        [{"x": x}], InputOptions(remainder="pad")
    )
    mean = strategy.reduce("mean", batch["x"], axis=0, weights=batch["mask"])
    assert float(mean) == x.mean()


def test_strings_gathered_back_are_in_their_order():
    names = np.array([f"row {i}" for i in range(5)])
    strategy = STRATEGIES[3]
    (batch,) = strategy.experimental_distribute_dataset(
        [{"name": names}], InputOptions(remainder="pad")
    )
    mask = np.asarray(strategy.gather(batch["mask"]))
    assert strategy.gather(batch["name"])[mask == 1].tolist() == names.tolist()


def test_keys_that_the_mask_cannot_be_sorted_among_are_named():
    with pytest.raises(ValueError, match=r"cannot sort that among .* keys: 1, 2"):
        pad_batch({1: np.zeros(3), 2: np.zeros(3)}, 3, 4)


def test_a_list_of_two_gets_its_mask_as_its_third_entry():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    batches = [[np.arange(3.0), np.arange(3)]]
    (batch,) = strategy.experimental_distribute_dataset(
        batches, rx.InputOptions(remainder="pad")
    )
    assert type(batch) is list
    assert strategy.gather(batch[2], axis=0).tolist() == [1.0, 1.0, 1.0, 0.0]
