"""The notice about batches whose shapes keep changing."""

import warnings

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from replicax.datasets import InputOptions, from_arrays
from replicax.datasets.distributed import distribute_dataset
from replicax.datasets.shapes import ShapeWatch


def distribute(dataset, n=2, **options):
    mesh = Mesh(np.array(jax.devices()[:n]), ("replica",))
    return distribute_dataset(dataset, mesh, InputOptions(**options))


def sequences(lengths):
    for length in lengths:
        yield {"label": np.zeros(4), "text": np.zeros([4, length])}


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("prefetch", [0, 2])
def test_many_shapes_are_told_of_once_by_leaf_and_shape(prefetch):
    dataset = distribute(lambda: sequences(range(1, 12)), prefetch=prefetch)
    with pytest.warns(UserWarning, match="8 shapes") as notices:
        for _ in range(2):
            assert len(list(dataset)) == 11
    assert len(notices) == 1
    text = str(notices[0].message)
    assert "batch['text']: (2, 1), (2, 2), (2, 3)" in text
    assert "(2, 8)" in text and "(2, 9)" not in text
    assert "label" not in text
    assert 'remainder="pad"' in text


def test_shapes_are_counted_over_all_iterations():
    lengths = iter(range(1, 20))
    dataset = distribute(lambda: sequences([next(lengths)]), prefetch=0)
    for _ in range(7):
        list(dataset)
    with pytest.warns(UserWarning, match=r"batch\['text'\]"):
        list(dataset)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_smaller_last_batch_is_no_reason(prefetch):
    dataset = distribute(from_arrays(np.arange(20)).batch(8), prefetch=prefetch)
    for _ in range(10):
        assert [batch.shape for batch in dataset] == [(4,), (4,), (2,)]


@pytest.mark.usefixtures("no_warning")
def test_a_few_sizes_are_no_reason():
    dataset = distribute(lambda: sequences([*range(1, 8)] * 3))
    assert len(list(dataset)) == 21


@pytest.mark.usefixtures("no_warning")
def test_padded_numbers_of_rows_are_one_shape():
    batches = [{"x": np.zeros([rows, 3])} for rows in range(20, 0, -1)]
    shapes = {b["x"].shape for b in distribute(batches, remainder="pad")}
    assert shapes == {(10, 3)}


def test_changing_numbers_of_rows_are_told_of():
    with pytest.warns(UserWarning, match=r"batch: \(1,\), \(2,\), \(3,\)"):
        list(distribute([np.zeros(2 * rows) for rows in range(1, 10)]))


@pytest.mark.usefixtures("no_warning")
def test_ragged_rows_are_kept_on_the_host_for_each_replica():
    def ragged(*lengths):
        rows = np.empty(len(lengths), object)
        rows[:] = [np.arange(n) for n in lengths]
        return {"tokens": rows, "id": np.arange(len(lengths))}

    dataset = distribute([ragged(*np.arange(4) + k) for k in range(12)])
    for k, batch in enumerate(dataset):
        lengths = [[len(row) for row in part] for part in batch["tokens"].values]
        assert lengths == [[k, k + 1], [k + 2, k + 3]]
        assert all(part.dtype == object for part in batch["tokens"].values)
        assert batch["id"].is_stacked


def test_the_structure_that_has_many_shapes_is_the_one_named():
    def source():
        for batch in sequences(range(1, 9)):
            yield batch
            yield batch["text"][:, :1]

    with pytest.warns(UserWarning, match=r"batch\['text'\]: \(2, 1\)"):
        list(distribute(source))


def test_structures_that_keep_changing_are_noticed_and_forgotten():
    watch = ShapeWatch()
    with pytest.warns(UserWarning, match="8 structures so far"):
        for number in range(100):
            batch = {f"key{number}": np.zeros([2, 3])}
            watch.note(jax.tree.structure(batch), list(batch.values()))
    assert not watch._seen
