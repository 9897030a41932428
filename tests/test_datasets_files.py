"""Datasets of files: the rows that numpy wrote, in any number of files, once each."""

import gc
import json
import os
import threading

import jax
import numpy as np
import pytest
import replicax.datasets as datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from replicax.datasets.distributed import distribute_dataset
from replicax.datasets.sources import as_source

import replicax as rx
from replicax.errors import UnevenBatchError

grain = pytest.importorskip("grain")
from_arrays, from_files = datasets.from_arrays, datasets.from_files
quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)

COUNTS = (5, 1, 11)
X = np.arange(34, dtype=np.float32).reshape(17, 2)
Y = np.arange(17)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files of each format with 17 rows in all."""
    folder = tmp_path_factory.mktemp("files")
    parts = np.split(np.arange(17), np.cumsum(COUNTS)[:-1])
    for i, rows in enumerate(parts):
        np.savez(folder / f"part{i}.npz", x=X[rows], y=Y[rows])
        np.savez_compressed(folder / f"small{i}.npz", x=X[rows], y=Y[rows])
        (folder / f"part{i}.txt").write_text("".join(f"row {r}\n" for r in rows))
        write_records(folder / f"part{i}.array_record", [b"%d\0" % r for r in rows])
    return folder


def write_records(path, records):
    writer = pytest.importorskip("array_record.python.array_record_module")
    file = writer.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        file.write(record)
    file.close()


@pytest.fixture
def npz(folder):
    return from_files(f"{folder}/part*.npz")


def rows_of(batches):
    return [row for batch in batches for row in batch["y"].tolist()]


def open_files():
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        pytest.skip("Open files cannot be listed here.")
    return [os.path.realpath(f"{folder}/{number}") for number in os.listdir(folder)]


# -- what is read --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["part", "small"])
def test_npz_files_hold_the_rows_that_numpy_wrote(folder, name):
    dataset = from_files(f"{folder}/{name}*.npz").batch(4)
    for got, want in zip(dataset, from_arrays({"x": X, "y": Y}).batch(4), strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert got["x"].dtype == np.float32


def test_shuffled_batches_hold_the_rows_of_all_files_in_their_order(npz):
    one = from_arrays({"x": X, "y": Y})
    for batch in npz.shuffle(3).batch(6):
        want = next(iter(from_arrays(X[batch["y"]]).batch(6)))
        np.testing.assert_array_equal(batch["x"], want)
    assert sorted(rows_of(npz.shuffle(3).batch(6))) == rows_of(one.batch(6))


def test_arrays_of_fortran_order_and_without_rows(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(X), e=np.empty((17, 0)))
    (batch,) = from_files(tmp_path / "a.npz").batch(17)
    np.testing.assert_array_equal(batch["x"], X)
    assert batch["e"].shape == (17, 0)


def test_text_lines_are_strings(folder):
    dataset = from_files(f"{folder}/part*.txt").batch(5)
    lines = [line for batch in dataset for line in batch.tolist()]
    assert lines == [f"row {i}" for i in range(17)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("one", ["one"]),
        ("\n\nb\n", ["", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("ä\nß", ["ä", "ß"]),
    ],
)
def test_line_ends(tmp_path, text, lines):
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert list(from_files(tmp_path / "a.txt")) == lines


def test_lines_across_the_chunks_that_are_searched(tmp_path, monkeypatch):
    monkeypatch.setattr("replicax.datasets.records._CHUNK", 3)
    (tmp_path / "a.txt").write_text("abc\nde\n\nfghijk\nl")
    assert list(from_files(tmp_path / "a.txt")) == ["abc", "de", "", "fghijk", "l"]


def test_array_records_are_bytes_with_all_their_zeros(folder):
    dataset = from_files(f"{folder}/part*.array_record")
    assert list(dataset) == [b"%d\0" % i for i in range(17)]
    assert next(iter(dataset.batch(3))).tolist() == [b"0\0", b"1\0", b"2\0"]


def test_a_function_opens_other_formats(tmp_path):
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", Y + 17 * i)
    dataset = from_files(f"{tmp_path}/*.npy", np.load)
    assert np.concatenate(list(dataset.batch(6))).tolist() == list(range(34))


def test_patterns_are_sorted_and_lists_are_not(folder):
    first, last = f"{folder}/part0.npz", folder / "part2.npz"
    assert from_files(f"{folder}/part*.npz").files[0] == first
    assert from_files([last, first]).files == (str(last), first)
    assert from_files([last, f"{folder}/part[01].npz"]).num_rows == 17


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ("{}/none*.npz", FileNotFoundError, r"No file matches .*none\*\.npz"),
        (["{}/part0.npz", "{}/gone.npz"], FileNotFoundError, r"gone\.npz"),
        ([], ValueError, "at least one file"),
        ("{}/part0.*", ValueError, r"must be one of .*'npz'.*Got files ending in"),
    ],
)
def test_files_that_are_not_there(folder, files, error, match):
    one = isinstance(files, str)
    files = files.format(folder) if one else [f.format(folder) for f in files]
    with pytest.raises(error, match=match):
        from_files(files)


def test_an_unknown_format(folder):
    with pytest.raises(ValueError, match="Got 'csv'"):
        from_files(f"{folder}/part0.npz", "csv")


def test_files_must_hold_the_same_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", x=X)
    np.savez(tmp_path / "b.npz", x=X.astype(int))
    with pytest.raises(ValueError, match=r"a\.npz: .*float32.*b\.npz: .*int64"):
        from_files(f"{tmp_path}/*.npz")


def test_arrays_of_a_file_must_have_equally_many_rows(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y[1:])
    with pytest.raises(ValueError, match=r"a\.npz must have equally many rows"):
        from_files(tmp_path / "a.npz")


# -- the chain -----------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    st.integers(1, 7),
    st.none() | st.integers(0, 2**40),
    st.booleans(),
    st.integers(0, 2),
)
@quick
def test_every_row_once_an_epoch(counts, size, seed, drop, repeats):
    rows = sum(counts)
    parts = np.split(np.arange(rows), np.cumsum(counts)[:-1])
    names = tuple(map(str, range(len(parts))))
    dataset = datasets.FileDataset(names, lambda name: parts[int(name)], tuple(counts))
    dataset = dataset if seed is None else dataset.shuffle(seed)
    dataset = dataset.batch(size, drop).repeat(repeats)
    batches = list(dataset)
    assert len(batches) == len(dataset) == repeats * dataset.batches_per_epoch
    kept = rows - rows % size if drop else rows
    for epoch in range(repeats):
        first = epoch * dataset.batches_per_epoch
        own = [b.tolist() for b in batches[first : first + dataset.batches_per_epoch]]
        got = [row for batch in own for row in batch]
        assert len(got) == len(set(got)) == kept
        assert all(len(batch) == size for batch in own[:-1])
        assert seed is not None or got == list(range(kept))


def test_order_is_a_function_of_seed_and_epoch(npz):
    dataset = npz.shuffle(5).batch(4)
    epochs = [rows_of(dataset) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [rows_of(dataset.epoch(e)) for e in range(3)] == epochs
    assert rows_of(npz.shuffle(5).batch(4).repeat(3)) == [
        row for epoch in epochs for row in epoch
    ]
    assert rows_of(npz.shuffle(6).batch(4).epoch(0)) not in epochs


def test_endless_iterations_begin_with_the_epochs_that_they_count(npz):
    dataset = npz.shuffle(5).batch(17).repeat()
    with pytest.raises(TypeError, match="without end"):
        len(dataset)
    for first in range(2):
        batches = iter(dataset)
        for epoch in range(first, first + 2):
            assert rows_of([next(batches)]) == rows_of(dataset.epoch(epoch))


def test_map_before_batch_sees_rows_and_after_it_batches(npz):
    def row(row):
        assert row["x"].shape == (2,)
        return row["x"].sum(), int(row["y"])

    def batch(batch):
        assert batch[0].shape == batch[1].shape
        return {"sum": batch[0], "y": batch[1] * 10}

    dataset = npz.map(row).shuffle(0).batch(5).map(batch)
    got = list(dataset)
    assert sorted(rows_of(got)) == (Y * 10).tolist()
    np.testing.assert_array_equal(got[0]["sum"], X[got[0]["y"] // 10].sum(1))


def test_map_of_single_rows(npz):
    assert list(npz.map(lambda row: int(row["y"]) + 1)) == list(range(1, 18))


def test_rows_of_different_shapes_say_what_to_do(npz):
    dataset = npz.map(lambda row: {"a": np.zeros(row["y"])}).batch(2)
    with pytest.raises(ValueError, match=r"row\['a'\] has the shapes \(0,\), \(1,\)"):
        next(iter(dataset))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda d: d.map(3), TypeError, "takes a function"),
        (lambda d: d.repeat().map(len), ValueError, "cannot follow repeat"),
        (lambda d: d.batch(2).shuffle(0), ValueError, r"from_files\(...\)"),
        (lambda d: d.read(num_threads=-1), ValueError, "at least 0"),
        (lambda d: d.read(num_workers=1.5), TypeError, "must be an integer"),
    ],
)
def test_wrong_values_and_orders(npz, call, error, match):
    with pytest.raises(error, match=match):
        call(npz)


def test_repr(npz):
    dataset = npz.map(len).shuffle(1).batch(4, drop_remainder=True).repeat()
    assert repr(dataset) == (
        "from_files(3 files, 17 rows).map(len).shuffle(1)"
        ".batch(4, drop_remainder=True).repeat()"
    )


# -- positions -----------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_state_is_exact_in_the_middle_of_an_epoch(npz, num_threads):
    def make():
        return npz.shuffle(2).batch(4).repeat(2).read(num_threads=num_threads)

    batches = make().iteration(2)
    states, want = [batches.get_state()], []
    for batch in batches:
        states.append(batches.get_state())
        want.append(rows_of([batch]))
    assert len(want) == len(make())
    for taken in (0, 1, 5, 9, 10):
        again = make().iteration(0)
        again.set_state(json.loads(json.dumps(states[taken])))
        assert [rows_of([batch]) for batch in again] == want[taken:]


def test_the_state_of_another_dataset_is_refused(npz):
    state = iter(npz.shuffle(2).batch(4)).get_state()
    with pytest.raises(ValueError, match=r"shuffle\(2\).*This one is .*shuffle\(3\)"):
        iter(npz.shuffle(3).batch(4)).set_state(state)


def test_distributed_state(npz):
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    options = rx.InputOptions(remainder="pad")
    dataset = distribute_dataset(npz.shuffle(1).batch(4), mesh, options)
    with iter(dataset) as batches:
        next(batches)
        state = json.loads(json.dumps(batches.get_state()))
        want = [np.asarray(batch["y"].array).tolist() for batch in batches]
    with iter(dataset) as again:
        again.set_state(state)
        assert [np.asarray(b["y"].array).tolist() for b in again] == want
    assert len(want) == 4


# -- as a source ---------------------------------------------------------------------


def test_what_is_known_beforehand(npz):
    source = as_source(npz.batch(4).repeat(2))
    assert source.sizes == {4: 4, 1: 1}
    assert (source.cardinality, source.batch_size, source.num_files) == (10, 4, 3)
    with pytest.raises(ValueError, match=r"\.batch\(batch_size\)"):
        as_source(npz)


def test_peeking_does_not_count_as_an_iteration(npz):
    dataset = npz.shuffle(1).batch(4)
    first = rows_of(dataset.epoch(0))
    assert rows_of(as_source(dataset).peek()) == first
    assert rows_of(dataset) == first


@pytest.mark.parametrize("seed", [None, 7])
def test_the_files_of_workers_are_disjoint_and_complete(npz, seed):
    dataset = npz.batch(4) if seed is None else npz.shuffle(seed).batch(4)
    source = as_source(dataset)
    shares = []
    for worker in range(2):
        own = source.of_files(range(3)[worker::2], 2)
        batches = list(own.start(None))
        assert own.cardinality == len(batches)
        assert own.batch_size == 2
        shares.append(rows_of(batches))
    assert sorted(shares[0]) == [*range(5), *range(6, 17)]
    assert shares[1] == [5]


def test_remainders_are_found_beforehand(npz):
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    with pytest.raises(UnevenBatchError):
        distribute_dataset(npz.batch(4), mesh)


# -- threads, processes, files -------------------------------------------------------


def doubled(batch):
    return {"y": batch["y"] * 2}


def test_worker_processes_keep_the_order_and_every_row(tmp_path):
    # Two workers and a last batch of two rows: none is split or lost.
    np.savez(tmp_path / "a.npz", y=np.arange(34))
    dataset = from_files(tmp_path / "a.npz").shuffle(0).batch(16).map(doubled)
    want = [rows_of([batch]) for batch in dataset.epoch(0)]
    assert [len(rows) for rows in want] == [16, 16, 2]
    assert sorted(row for rows in want for row in rows) == list(range(0, 68, 2))
    batches = iter(dataset.read(num_workers=2))
    assert [rows_of([batch]) for batch in batches] == want
    batches.close()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_an_iterator_left_half_way_leaves_nothing(npz, folder, end):
    before = set(threading.enumerate())
    batches = iter(npz.batch(2).read(num_threads=2))
    next(batches)
    assert any(str(folder) in name for name in open_files())
    assert set(threading.enumerate()) > before
    if end == "close":
        batches.close()
    else:
        del batches
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()
    gc.collect()
    assert not [name for name in open_files() if str(folder) in name]


def test_an_error_of_the_users_function_keeps_its_place(npz):
    def broken(batch):
        raise ZeroDivisionError("in the pipeline")

    with pytest.raises(ZeroDivisionError, match="in the pipeline") as caught:
        next(iter(npz.batch(2).map(broken).read(num_threads=1)))
    assert caught.traceback[-1].name == "broken"


# -- grain ---------------------------------------------------------------------------


def test_to_grain_goes_on_with_the_epochs(npz):
    dataset = npz.shuffle(4).batch(5)
    both = dataset.to_grain().repeat(2).map(lambda batch: batch["y"])
    rows = [row for batch in both for row in batch.tolist()]
    assert rows == rows_of(dataset.epoch(0)) + rows_of(dataset.epoch(1))


@pytest.mark.parametrize("repeats", [0, 1, 3])
@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("size", [None, 5])
def test_arrays_to_grain(seed, size, repeats):
    def make():
        dataset = from_arrays({"y": np.arange(13)})
        dataset = dataset if seed is None else dataset.shuffle(seed)
        return (dataset if size is None else dataset.batch(size)).repeat(repeats)

    made = make().to_grain()
    assert isinstance(made, grain.MapDataset)
    assert len(made) == len(make())
    want = [batch["y"].tolist() for batch in make()]
    assert [batch["y"].tolist() for batch in made] == want
    assert [made[i]["y"].tolist() for i in range(len(made))] == want
    assert [b["y"].tolist() for b in made[1::2]] == want[1::2]


def test_arrays_to_grain_without_end():
    dataset = from_arrays(np.arange(6)).shuffle(1).batch(6)
    endless = iter(dataset.repeat().to_grain())
    for epoch in range(3):
        (want,) = dataset.epoch(epoch)
        np.testing.assert_array_equal(next(endless), want)
