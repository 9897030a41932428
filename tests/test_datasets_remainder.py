"""Batches that do not divide over the replicas: refused, dropped, or filled up."""

import numpy as np
import pytest
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
    "batch", [np.ones(3), (np.ones(3),), (np.ones(3),) * 3, [np.ones(3), np.ones(3)]]
)
def test_a_batch_without_a_place_for_the_mask_names_the_two_forms(batch):
    with pytest.raises(ValueError, match=r"a dict .* or a tuple \(x, y\)"):
        pad_batch(batch, 3, 4)


def test_the_error_states_rows_replicas_remainder_and_choices():
    text = str(uneven_error(5, 2, "Batch 3"))
    for part in ("Batch 3", "5 rows", "2 replicas", "remainder 1", "drop", "pad"):
        assert part in text


def test_known_sizes_are_checked_beforehand():
    check_sizes({8: 3, 4: 1}, 4, "error", 8)
    check_sizes({8: 3, 3: 1}, 4, "drop", 8)
    check_sizes({9: 3, 3: 1}, 4, "pad", 9)
    with pytest.raises(UnevenBatchError, match=r"The last batch \(of 4\) has 3 rows"):
        check_sizes({8: 3, 3: 1}, 4, "error", 8)
    with pytest.raises(UnevenBatchError, match=r"A batch \(3 of 4\) has 9"):
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
