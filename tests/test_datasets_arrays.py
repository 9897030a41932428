"""In-memory datasets: rows, order, epochs, and what is refused."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicax.datasets as datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from replicax.datasets.buffers import is_numeric

import replicax as rx

from_arrays = datasets.from_arrays
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def rows_of(batches):
    return [row for batch in batches for row in np.asarray(batch).tolist()]


# -- what goes in --------------------------------------------------------------------


def test_structure_is_kept():
    tree = {"a": np.arange(6), "b": (np.zeros([6, 2]), None)}
    batch = next(iter(from_arrays(tree).batch(4)))
    assert jax.tree.map(np.shape, batch) == {"a": (4,), "b": ((4, 2), None)}


def test_unequal_lengths_name_every_leaf():
    with pytest.raises(ValueError, match=r"arrays\['x'\]: 3, arrays\['y'\]\[0\]: 4"):
        from_arrays({"x": np.zeros(3), "y": (np.zeros(4),)})


@pytest.mark.parametrize("empty", [{}, (), None, []])
def test_a_tree_without_arrays_is_refused(empty):
    with pytest.raises(ValueError, match="at least one array"):
        from_arrays(empty)


def test_a_scalar_leaf_is_refused_by_name():
    with pytest.raises(ValueError, match=r"arrays\['step'\] has no rows"):
        from_arrays({"x": np.zeros(3), "step": 7})


def test_a_python_list_of_numbers_says_to_make_an_array():
    with pytest.raises(ValueError, match=r"np\.asarray"):
        from_arrays([1, 2, 3])


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, np.asfortranarray])
def test_array_kinds_give_the_same_batches(make):
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    got = np.concatenate(list(from_arrays(make(x)).shuffle(1).batch(3)))
    want = np.concatenate(list(from_arrays(x).shuffle(1).batch(3)))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.sort(got, axis=0), x)


def test_other_memory_layouts_give_the_rows_that_they_show():
    x = np.arange(60, dtype=np.int32).reshape(10, 6)
    for view in (x[:, ::2], x[::-1], x.astype(">i4"), x.T):
        got = np.concatenate(list(from_arrays(view).shuffle(3).batch(4)))
        order = np.random.default_rng((3, 0)).permutation(len(view))
        np.testing.assert_array_equal(got, view[order])


def test_memory_mapped_arrays(tmp_path):
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    batches = list(from_arrays(mapped).batch(4))
    np.testing.assert_array_equal(np.concatenate(batches), x)


def test_strings_are_rows_too():
    names = np.array(["ada", "bob", "eve"])
    dataset = from_arrays({"name": names, "id": np.arange(3)}).shuffle(0).batch(2)
    pairs = [(n, i) for b in dataset for n, i in zip(b["name"], b["id"], strict=True)]
    assert sorted(pairs, key=lambda p: p[1]) == [("ada", 0), ("bob", 1), ("eve", 2)]


def test_batches_do_not_share_memory_with_the_arrays():
    x = np.arange(8)
    for dataset in (from_arrays(x).batch(4), from_arrays(x).shuffle(0).batch(4)):
        for batch in dataset:
            assert not np.shares_memory(batch, x)
            batch[:] = -1
    assert x.tolist() == list(range(8))


# -- rows, batches, epochs -----------------------------------------------------------


@quick
@given(
    num_rows=st.integers(0, 40),
    batch_size=st.integers(1, 9),
    drop=st.booleans(),
    seed=st.none() | st.integers(0, 5),
    epochs=st.integers(0, 3),
)
def test_every_row_once_an_epoch(num_rows, batch_size, drop, seed, epochs):
    dataset = from_arrays(np.arange(num_rows))
    if seed is not None:
        dataset = dataset.shuffle(seed)
    dataset = dataset.batch(batch_size, drop_remainder=drop).repeat(epochs)
    batches = list(dataset)
    assert len(batches) == len(dataset)
    per_epoch = len(batches) // epochs if epochs else 0
    kept = num_rows - num_rows % batch_size if drop else num_rows
    for epoch in range(epochs):
        own = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        rows = rows_of(own)
        assert len(rows) == len(set(rows)) == kept
        assert all(len(batch) == batch_size for batch in own[:-1])
        if seed is None:
            assert rows == list(range(kept))


def test_order_is_a_function_of_seed_and_epoch():
    def epochs(seed, n=3):
        dataset = from_arrays(np.arange(50)).shuffle(seed).batch(7)
        return [rows_of(dataset) for _ in range(n)]

    assert epochs(1) == epochs(1)
    orders = [*epochs(1), *epochs(2)]
    assert len({tuple(order) for order in orders}) == 6


def test_order_does_not_depend_on_the_batch_size():
    shuffled = from_arrays(np.arange(50)).shuffle(4)
    assert rows_of(shuffled.batch(7)) == rows_of(shuffled.batch(50))
    assert [int(row) for row in shuffled] == rows_of(shuffled.batch(9))


def test_leaves_are_shuffled_together():
    x = np.arange(30)
    for a, b in from_arrays((x, x * 10)).shuffle(0).batch(8):
        np.testing.assert_array_equal(a * 10, b)


def test_repeat_runs_the_epochs_that_separate_iterations_would():
    once = from_arrays(np.arange(20)).shuffle(3).batch(6)
    twice = once.repeat(2)
    separate = [rows_of(once) for _ in range(4)]
    assert rows_of(twice) == separate[0] + separate[1]
    assert rows_of(twice) == separate[2] + separate[3]


def test_endless_repeat():
    dataset = from_arrays(np.arange(4)).shuffle(0).batch(4).repeat()
    first = [rows_of([b]) for b in itertools.islice(dataset, 3)]
    second = [rows_of([b]) for b in itertools.islice(dataset, 2)]
    assert second == first[1:]
    with pytest.raises(TypeError, match="without end"):
        len(dataset)


def test_endless_repeat_of_nothing_ends():
    assert list(from_arrays(np.zeros([0, 2])).batch(4).repeat()) == []


def test_epoch_fixed_when_iteration_starts_not_at_its_first_batch():
    dataset = from_arrays(np.arange(20)).shuffle(0).batch(20)
    first, second = iter(dataset), iter(dataset)
    later = rows_of(second)
    assert rows_of(first) == rows_of(dataset.epoch(0))
    assert later == rows_of(dataset.epoch(1))


def test_chaining_leaves_the_dataset_as_it_was():
    plain = from_arrays(np.arange(6))
    plain.shuffle(0).batch(2).repeat(5)
    assert plain.batch_size is None
    assert len(plain) == 6
    assert rows_of([list(plain)]) == list(range(6))


def test_properties():
    dataset = from_arrays((np.zeros([10, 3], np.float32), np.zeros(10, np.int32)))
    row = dataset.element_spec
    assert [leaf.shape for leaf in row] == [(3,), ()]
    dataset = dataset.shuffle(1).batch(4, drop_remainder=True).repeat()
    assert (dataset.num_rows, dataset.batch_size) == (10, 4)
    assert dataset.batches_per_epoch == 2
    spec = dataset.element_spec
    assert [leaf.shape for leaf in spec] == [(4, 3), (4,)]
    assert [leaf.dtype for leaf in spec] == [np.float32, np.int32]
    assert repr(dataset) == (
        "from_arrays(10 rows).shuffle(1).batch(4, drop_remainder=True).repeat()"
    )


# -- as a source ---------------------------------------------------------------------


def test_looking_goes_through_as_many_batches_as_iterating():
    strategy = rx.MirroredStrategy(jax.devices())
    dataset = from_arrays(np.arange(8)).batch(2).repeat()
    dealt = strategy.distribute_datasets_from_function(lambda context: dataset)
    spec = dealt.element_spec
    batch = next(iter(dealt))
    # Four batches an epoch: the round of eight replicas takes two epochs.
    want = [[0, 1], [2, 3], [4, 5], [6, 7]] * 2
    assert [part.tolist() for part in batch.values] == want
    assert [part.shape for part in spec.values] == [(2,)] * 8


# -- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda d: d.batch(0), ValueError, "at least 1. Got 0"),
        (lambda d: d.batch(-3), ValueError, "at least 1"),
        (lambda d: d.batch(2.5), TypeError, "must be an integer. Got 2.5"),
        (lambda d: d.batch(True), TypeError, "must be an integer"),
        (lambda d: d.shuffle(-1), ValueError, "at least 0"),
        (lambda d: d.shuffle(None), TypeError, "must be an integer"),
        (lambda d: d.repeat(-1), ValueError, "at least 0"),
        (lambda d: d.repeat("2"), TypeError, "must be an integer"),
        (lambda d: d.batch(2).batch(2), ValueError, r"batch\(\) cannot follow batch"),
        (lambda d: d.batch(2).shuffle(0), ValueError, r"cannot follow batch"),
        (lambda d: d.shuffle(0).shuffle(0), ValueError, r"cannot follow shuffle"),
        (lambda d: d.repeat().batch(2), ValueError, r"cannot follow repeat"),
        (lambda d: d.repeat(2).repeat(2), ValueError, r"cannot follow repeat"),
    ],
)
def test_wrong_values_and_orders(call, error, match):
    with pytest.raises(error, match=match):
        call(from_arrays(np.arange(6)))


def test_numpy_integers_are_integers():
    dataset = from_arrays(np.arange(6)).shuffle(np.int64(1)).batch(np.int32(4))
    assert len(list(dataset)) == 2


# -- memory --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_numbers_that_jax_cannot_hold_are_none(dtype):
    dtype = np.dtype(dtype)
    if dtype in (np.dtype(np.float64), np.dtype(np.complex128)):
        pytest.skip("This platform has no longer numbers.")
    assert not is_numeric(dtype)
    (batch,) = from_arrays(np.arange(3).astype(dtype)).batch(3)
    assert batch.dtype == dtype and batch.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.int64, np.bool_])
def test_numbers_that_jax_holds(dtype):
    assert is_numeric(np.dtype(dtype))


def test_a_dataset_can_be_copied_and_sent_to_another_process():
    dataset = rx.datasets.from_arrays(np.arange(8)).shuffle(1).batch(4)
    next(iter(dataset))  # the second epoch comes next
    copies = copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))
    wanted = [b.tolist() for b in dataset]
    assert [[b.tolist() for b in c] for c in copies] == [wanted, wanted]
