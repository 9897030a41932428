"""Datasets of files: the rows that numpy wrote, in any number of files, once each."""

import functools
import gc
import json
import os
import sys
import threading
import weakref

import jax
import numpy as np
import pytest
import replicax.datasets as datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from replicax.datasets.distributed import distribute_dataset
from replicax.datasets.file_rows import FileRows
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


# -- files that are not what they should be ------------------------------------------


class WithTake(list):
    """Rows of a library whose ``take`` means something else."""

    def take(self, indices):
        return self[: indices[0]]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: WithTake(np.load(path)),
        np.load,
        functools.partial(np.load, mmap_mode="r"),
    ],
)
def test_what_take_means_elsewhere_is_not_guessed(tmp_path, make, seed):
    for i, rows in enumerate(np.split(X, [5, 6])):
        np.save(tmp_path / f"{i}.npy", rows)
    dataset = from_files(f"{tmp_path}/*.npy", make)
    dataset = dataset if seed is None else dataset.shuffle(seed)
    got = np.concatenate(list(dataset.batch(4)))
    assert got.shape == X.shape
    np.testing.assert_array_equal(got[np.argsort(got[:, 0])], X)
    assert (seed is None) == np.array_equal(got, X)


def test_arrays_of_files_are_compared(tmp_path):
    np.save(tmp_path / "a.npy", X)
    np.save(tmp_path / "b.npy", X[:, :1])
    with pytest.raises(ValueError, match=r"a\.npy: .*\(2,\).*b\.npy: .*\(1,\)"):
        from_files(f"{tmp_path}/*.npy", np.load)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    "change",
    [
        lambda path: np.savez(path, y=np.arange(3)),
        lambda path: np.savez(path, y=np.arange(300)),
        lambda path: np.savez(path, z=np.arange(9)),
        lambda path: os.utime(path, ns=(1, 1)),
    ],
)
def test_a_file_that_was_changed_is_refused(tmp_path, change, seed):
    path = tmp_path / "a.npz"
    np.savez(path, y=np.arange(9))
    dataset = from_files(path).batch(4)
    if seed is not None:
        dataset = from_files(path).shuffle(seed).batch(4)
    assert sorted(rows_of(dataset)) == list(range(9))
    change(path)
    with pytest.raises(ValueError, match=r"a\.npz has changed since .* its 9 rows"):
        next(iter(dataset))


def test_a_changed_number_of_rows_is_refused(tmp_path):
    (tmp_path / "a").touch()
    lengths = iter([5, 4])
    dataset = from_files(tmp_path / "a", lambda path: range(next(lengths)))
    with pytest.raises(ValueError, match="has changed since"):
        next(iter(dataset))


def test_paths_do_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", y=np.arange(3))
    dataset = from_files("a.npz").batch(3)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    np.savez("a.npz", y=np.arange(3) + 10)
    assert rows_of(dataset) == [0, 1, 2]


@pytest.mark.parametrize("seed", [None, 2])
@pytest.mark.parametrize("kind", ["npz", "txt", "array_record"])
def test_few_files_are_open_at_a_time(folder, monkeypatch, kind, seed):
    monkeypatch.setattr("replicax.datasets.file_rows._MOST_OPEN", 2)
    monkeypatch.setattr("replicax.datasets.file_rows._MOST_OPEN_IN_ORDER", 1)
    files = from_files(f"{folder}/part*.{kind}")
    files = files if seed is None else files.shuffle(seed)
    batches = iter(files.batch(2))
    most = 0
    for _ in batches:
        opened = {name for name in open_files() if str(folder) in name}
        most = max(most, len(opened))
    assert most == (1 if seed is None else 2)


def test_rows_that_are_kept_keep_no_file_open(npz, folder):
    rows = list(npz.map(lambda row: row["x"]))
    gc.collect()
    assert not any(str(folder) in name for name in open_files())
    np.testing.assert_array_equal(rows, X)


def test_a_hundred_shuffled_files_are_open_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("replicax.datasets.file_rows._MOST_OPEN", 8)
    for i in range(100):
        np.savez(tmp_path / f"{i}.npz", y=[2 * i, 2 * i + 1])
    most, got = 0, []
    for batch in from_files(f"{tmp_path}/*.npz").shuffle(0).batch(50):
        most = max(most, sum(str(tmp_path) in name for name in open_files()))
        got += rows_of([batch])
    assert most == 8
    assert sorted(got) == list(range(200))


@pytest.mark.parametrize("rows", [[0, 17], [-1, 0]])
def test_rows_beyond_the_end_are_not_taken_from_elsewhere(npz, rows):
    files = FileRows(npz._files, npz._open_file, in_order=True)
    with pytest.raises(IndexError, match="of 17 in files"):
        files.take(np.array(rows))


def test_compressed_files_are_let_go_in_order(folder, monkeypatch):
    alive = []

    def open_file(path):
        rows = np.load(path)["y"]
        alive.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr("replicax.datasets.file_rows._MOST_OPEN_IN_ORDER", 1)
    batches = iter(from_files(f"{folder}/small*.npz", open_file).batch(2))
    assert sum(len(batch) for batch in batches) == 17
    gc.collect()
    assert len(alive) == 6
    assert sum(rows() is not None for rows in alive) <= 1


def test_names_in_another_order_and_strings_of_other_lengths(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, s=np.array(["a"] * 17))
    np.savez(tmp_path / "b.npz", s=np.array(["bcd"] * 17), x=X + 1)
    batches = list(from_files(f"{tmp_path}/*.npz").batch(34))
    assert batches[0]["s"].tolist() == ["a"] * 17 + ["bcd"] * 17
    np.testing.assert_array_equal(batches[0]["x"], np.concatenate([X, X + 1]))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.npz", b""), ("a.npz", b"no archive"), ("a.array_record", b"")],
)
def test_files_of_another_format_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} cannot be read as"):
        from_files(tmp_path / name)


def test_arrays_of_objects_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([1, None], object))
    with pytest.raises(ValueError, match=r"a\.npz cannot be read as npz: Object"):
        from_files(tmp_path / "a.npz")


def test_a_line_that_is_no_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok\n\xff\n")
    with pytest.raises(ValueError, match=r"Line 2 of .*a\.txt cannot be .*UTF-8"):
        list(from_files(tmp_path / "a.txt").batch(2))


@pytest.mark.parametrize("made", [{}, 3, None, iter(()), np.array(1)])
def test_a_format_function_must_return_rows(tmp_path, made):
    (tmp_path / "a").touch()
    with pytest.raises(TypeError, match=r"function .* with len\(\) and .*For .*/a it"):
        from_files(tmp_path / "a", lambda path: made)


@pytest.mark.parametrize("files", [3, None, b"a.npz", [b"a.npz"], ["a", 3]])
def test_what_is_no_path_is_refused(files):
    with pytest.raises(TypeError, match="takes a path or a pattern"):
        from_files(files)


def test_endings_in_capitals(tmp_path):
    (tmp_path / "A.TXT").write_text("x")
    np.savez(tmp_path / "a.npz", y=Y)
    os.rename(tmp_path / "a.npz", tmp_path / "A.NPZ")
    assert list(from_files(tmp_path / "A.TXT")) == ["x"]
    assert rows_of(from_files(tmp_path / "A.NPZ").batch(17)) == Y.tolist()


def test_brackets_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"glob\.escape"):
        from_files(f"{tmp_path}/run[1].npz")
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder"):
        from_files(tmp_path)


def test_without_grain_it_is_refused_at_once(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "replicax.datasets.grains", raising=False)
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r'extra `data`.*pip install "\.\[data\]"'):
        from_files(f"{folder}/part*.npz")


# -- the chain -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def empty_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    for number in range(4):
        (folder / str(number)).touch()
    return folder


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    size=st.integers(1, 7),
    seed=st.none() | st.integers(0, 2**40),
    drop=st.booleans(),
    repeats=st.integers(0, 2),
)
@quick
def test_every_row_once_an_epoch(empty_files, counts, size, seed, drop, repeats):
    rows = sum(counts)
    parts = np.split(np.arange(rows), np.cumsum(counts)[:-1])
    names = [f"{empty_files}/{number}" for number in range(len(parts))]
    dataset = from_files(names, lambda name: parts[int(os.path.basename(name))])
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


@pytest.mark.parametrize("wrong", [{"position": 6}, {"iteration": 2**63}])
@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_a_state_beyond_the_end_is_refused(npz, kind, wrong):
    source = npz if kind == "files" else from_arrays({"y": Y})
    batches = iter(source.batch(4))
    state = batches.get_state()
    with pytest.raises(ValueError, match="not a state of this dataset"):
        batches.set_state({**state, **wrong})
    batches.set_state({**state, "position": 5})
    assert list(batches) == []


# -- as a source ---------------------------------------------------------------------


def test_what_is_known_beforehand(npz):
    source = as_source(npz.batch(4).repeat(2))
    assert source.sizes == {4: 4, 1: 1}
    assert (source.cardinality, source.batch_size, source.num_files) == (10, 4, 3)
    with pytest.raises(ValueError, match=r"\.batch\(batch_size\)"):
        as_source(npz)


def halved(batch):
    return {"y": batch["y"][::2]}


@pytest.mark.parametrize("repeats", [2, None])
def test_rows_of_mapped_batches_are_not_known_beforehand(npz, repeats):
    source = as_source(npz.batch(4).map(halved).repeat(repeats))
    assert source.sizes is None
    assert source.cardinality == (-1 if repeats is None else 10)
    assert as_source(npz.map(halved).batch(4)).sizes == {4: 4, 1: 1}


def test_mapped_batches_may_divide(npz):
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    mapped = npz.batch(3, drop_remainder=True).map(
        lambda batch: {"y": np.repeat(batch["y"], 2)}
    )
    dataset = distribute_dataset(mapped, mesh)
    assert len(list(dataset)) == len(dataset) == 5
    dropping = distribute_dataset(
        npz.batch(4).map(halved), mesh, rx.InputOptions(remainder="drop")
    )
    with pytest.raises(TypeError, match="not known"):
        len(dropping)
    assert len(list(dropping)) == 4


def test_peeking_goes_through_all_epochs(npz):
    for source in (npz, from_arrays({"y": Y})):
        dataset = source.shuffle(1).batch(4).repeat(2)
        first = rows_of(as_source(dataset).peek())
        assert len(first) == 34
        assert rows_of(dataset) == first


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


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_iteration_ends_with_its_error(npz, num_threads):
    broken = True

    def sometimes(batch):
        if broken and 4 in batch["y"]:
            raise ZeroDivisionError("at four")
        return batch

    batches = iter(npz.batch(2).map(sometimes).read(num_threads=num_threads))
    next(batches), next(batches)
    with pytest.raises(ZeroDivisionError):
        next(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ended with an error: .*at four"):
            next(batches)
    broken = False
    batches.set_state(batches.get_state())
    assert rows_of(batches) == list(range(4, 17))


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_interrupted_element_comes_again(npz, num_threads):
    interrupted = iter([True])

    def interrupting(batch):
        if 4 in batch["y"] and next(interrupted, False):
            raise KeyboardInterrupt
        return batch

    batches = iter(npz.batch(2).map(interrupting).read(num_threads=num_threads))
    got = [next(batches), next(batches)]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert rows_of([*got, *batches]) == list(range(17))


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("where", ["row", "batch"])
def test_stop_iteration_of_a_function_is_no_end(npz, where, num_threads):
    def stopping(element):
        return next(iter(()))

    mapped = (
        npz.map(stopping).batch(2) if where == "row" else npz.batch(2).map(stopping)
    )
    with pytest.raises(
        RuntimeError, match=r"stopping.* raised StopIteration"
    ) as caught:
        next(iter(mapped.read(num_threads=num_threads)))
    assert isinstance(caught.value.__cause__, StopIteration)


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


def test_trailing_zeros_of_text_stay(tmp_path):
    path = tmp_path / "zeros.txt"
    path.write_bytes(b"a\x00\nb\x00\x00\n\x00c\n")
    (batch,) = rx.datasets.from_files(path).batch(3)
    assert list(batch) == ["a\x00", "b\x00\x00", "\x00c"]


def test_a_file_that_is_named_twice_is_told(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x\n")
    with pytest.warns(UserWarning, match=r"more than once.*a\.txt"):
        rx.datasets.from_files([path, str(tmp_path / "*.txt")])


def test_an_array_with_fewer_rows_than_its_header_says_is_named(tmp_path):
    path = tmp_path / "short.npz"
    np.savez(path, x=np.arange(200_000))
    content = path.read_bytes()
    assert content.count(b"(200000,)") == 1
    path.write_bytes(content.replace(b"(200000,)", b"(900000,)"))
    with pytest.raises(ValueError, match=r"short\.npz"):
        list(rx.datasets.from_files(path).batch(1000))
