"""Datasets of other libraries: no row is lost, and what they tell is believed.

Stand-ins have the surface that is looked for. The same tests run with the libraries
themselves where those are installed.
"""

import contextlib
import importlib
import importlib.metadata
import json
import types

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from replicax.datasets import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    InputOptions,
    adapters,
)
from replicax.datasets.distributed import distribute_dataset
from replicax.datasets.sources import as_source

# What torchdata calls when it is imported, torch itself finds outdated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def y_of(batch):
    """The row numbers of a batch, whatever its structure."""
    return np.asarray(batch["y"] if isinstance(batch, dict) else batch[-1]).tolist()


def rows_of(batches):
    return [row for batch in batches for row in y_of(batch)]


# -- stand-ins and the libraries, one maker for each ---------------------------------


class Spec:
    def __init__(self, *shape):
        self.shape = TensorShape(shape)


class TensorShape(tuple):
    @property
    def rank(self):
        return len(self)


class TfStandIn:
    """Looks like a ``tf.data.Dataset``."""

    def __init__(self, batches, spec, cardinality=-2):
        self._batches = batches
        self._cardinality = cardinality
        self.element_spec = spec

    def as_numpy_iterator(self):
        return iter(self._batches)

    def cardinality(self):
        return np.int64(self._cardinality)


class Tensor:
    """Looks like a tensor of torch."""

    def __init__(self, array):
        self._array = array

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self._array


def default_collate(rows):
    x, y = zip(*rows, strict=True)
    return [Tensor(np.stack(x)), Tensor(np.stack(y))]


class LoaderStandIn:
    """Looks like a torch ``DataLoader``."""

    def __init__(self, dataset, batch_size, collate_fn=default_collate):
        self.dataset = self.sampler = dataset
        self.batch_size = batch_size
        self.drop_last = False
        self.collate_fn = collate_fn

    def __len__(self):
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self):
        for start in range(0, len(self.dataset), self.batch_size):
            yield self.collate_fn(self.dataset[start : start + self.batch_size])


class StatefulStandIn(LoaderStandIn):
    """Looks like torchdata's ``StatefulDataLoader``, whose state is not plain."""

    _last = None
    _begin = 0

    def __iter__(self):
        self._last = StatefulIterator(super().__iter__(), self._begin)
        self._begin = 0
        return self._last

    def state_dict(self):
        return {"yielded": self._last.count, "generator": np.arange(3, dtype=np.uint8)}

    def load_state_dict(self, state):
        assert state["generator"].tolist() == [0, 1, 2]
        self._begin = state["yielded"]


class StatefulIterator:
    def __init__(self, batches, begin):
        self._batches = batches
        self.count = 0
        for _ in range(begin):
            next(self)

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._batches)
        self.count += 1
        return batch


def scalar():
    return types.SimpleNamespace(dtype="int64")


def column():
    return types.SimpleNamespace(feature=scalar())


class HuggingFaceStandIn:
    """Looks like a ``datasets.Dataset``."""

    with_format = None

    def __init__(self, batches, features):
        self._batches = batches
        self.features = features
        self.column_names = list(features)

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)


def arrays(rows):
    return np.arange(2.0 * rows).reshape(rows, 2), np.arange(rows)


def parts(rows, size):
    x, y = arrays(rows)
    return [(x[i : i + size], y[i : i + size]) for i in range(0, rows, size)]


def tf_stand_in(rows, size):
    spec = (Spec(None, 2), Spec(None))
    return TfStandIn(parts(rows, size), spec, -(-rows // size))


def torch_stand_in(rows, size):
    return LoaderStandIn(list(zip(*arrays(rows), strict=True)), size)


def stateful_stand_in(rows, size):
    return StatefulStandIn(list(zip(*arrays(rows), strict=True)), size)


def hugging_face_stand_in(rows, size):
    batches = [{"x": x.tolist(), "y": y.tolist()} for x, y in parts(rows, size)]
    return HuggingFaceStandIn(batches, {"x": column(), "y": column()})


def grain_map(rows, size):
    grain = pytest.importorskip("grain")
    x, y = arrays(rows)
    return grain.MapDataset.range(rows).map(lambda i: (x[i], y[i])).batch(size)


def grain_iter(rows, size):
    return grain_map(rows, size).to_iter_dataset()


def grain_loader(rows, size, num_workers=0):
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(rows, num_epochs=1, shuffle=False, seed=0)
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, rows, 1),
        sampler=sampler,
        operations=[Pair(), grain.transforms.Batch(size)],
        worker_count=num_workers,
    )


def Pair():
    grain = pytest.importorskip("grain")

    class Pair(grain.transforms.Map):
        def map(self, row):
            return np.array([2.0 * row, 2.0 * row + 1]), row

    return Pair()


def tf_data(rows, size):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices(arrays(rows)).batch(size)


def torch_loader(rows, size):
    torch = pytest.importorskip("torch")
    x, y = map(torch.from_numpy, arrays(rows))
    dataset = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(dataset, batch_size=size)


def torch_stateful(rows, size):
    torch = pytest.importorskip("torch")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    x, y = map(torch.from_numpy, arrays(rows))
    dataset = torch.utils.data.TensorDataset(x, y)
    return loaders.StatefulDataLoader(dataset, batch_size=size)


def hugging_face_library():
    # The folder `datasets` of this tree takes the name when the tree is on sys.path:
    # `python -P -m pytest` keeps it off.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("datasets")
        library = importlib.import_module("datasets")
        if hasattr(library, "Dataset"):
            return library
    pytest.skip("The library datasets is not there, or another folder has its name.")


def hugging_face(rows, size):
    library = hugging_face_library()
    x, y = arrays(rows)
    made = library.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    return made.batch(size)


def hugging_face_numpy(rows, size):
    return hugging_face(rows, size).with_format("numpy")


def hugging_face_iterable(rows, size):
    x, y = arrays(rows)
    library = hugging_face_library()
    made = library.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    return made.to_iterable_dataset().batch(size)


COUNTED = [
    tf_stand_in,
    torch_stand_in,
    stateful_stand_in,
    hugging_face_stand_in,
    grain_map,
    tf_data,
    torch_loader,
    torch_stateful,
    hugging_face,
    hugging_face_numpy,
]
MAKERS = [*COUNTED, grain_iter, grain_loader, hugging_face_iterable]
each = pytest.mark.parametrize("make", MAKERS)


# -- every library -------------------------------------------------------------------


@each
@given(rows=st.integers(1, 40), size=st.integers(1, 9))
@settings(parent=quick, max_examples=8)
def test_every_row_comes_once_and_in_order(make, rows, size):
    source = as_source(make(rows, size))
    for batches in (source.start(None), source.peek(), source.start(None)):
        seen = list(batches)
        assert rows_of(seen) == list(range(rows))
        for batch in seen:
            x = np.asarray(batch["x"] if isinstance(batch, dict) else batch[0])
            np.testing.assert_array_equal(x, arrays(rows)[0][y_of(batch)])


@each
def test_replicas_get_the_rows(make):
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    dataset = distribute_dataset(make(34, 16), mesh, InputOptions(remainder="error"))
    values = [b["y"] if isinstance(b, dict) else b[1] for b in dataset]
    rows = [row for value in values for row in np.ravel(value.array).tolist()]
    assert rows == list(range(34))
    assert values[-1].shape == (1,)


@each
def test_state_is_exact_and_json(make):
    source = as_source(make(20, 3))
    batches = source.start(None)
    for taken in range(8):
        state = json.loads(json.dumps(batches.get_state()))
        rest = as_source(make(20, 3)).start(state)
        assert rows_of(rest) == list(range(3 * taken, 20))
        next(batches, None)


@pytest.mark.parametrize("make", COUNTED)
def test_cardinality_is_what_the_library_tells(make):
    mesh = Mesh(np.array(jax.devices()[:1]), ("replica",))
    assert as_source(make(20, 3)).cardinality == 7
    assert len(distribute_dataset(make(20, 3), mesh)) == 7


@pytest.mark.parametrize("make", [grain_iter, grain_loader, hugging_face_iterable])
def test_cardinality_is_unknown_otherwise(make):
    assert as_source(make(20, 3)).cardinality == UNKNOWN_CARDINALITY


@each
def test_an_iteration_is_closed_half_way(make):
    batches = as_source(make(20, 3)).start(None)
    next(batches)
    close = getattr(batches, "close", lambda: None)
    close()
    close()


def test_batches_that_are_left_out_make_the_number_unknown():
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    dataset = distribute_dataset(
        hugging_face_stand_in(20, 3), mesh, InputOptions(remainder="drop")
    )
    assert dataset.cardinality == UNKNOWN_CARDINALITY
    assert len(list(dataset)) == 1


# -- tf.data -------------------------------------------------------------------------


def test_tf_single_rows_are_refused_at_once():
    for spec in ({"x": Spec(3), "y": Spec()}, Spec()):
        with pytest.raises(ValueError, match=r"tf\.data\.Dataset.*single rows"):
            as_source(TfStandIn([], spec))


def test_real_tf_single_rows_are_refused_at_once():
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(ValueError, match="single rows"):
        as_source(tf.data.Dataset.range(3))


def test_tf_static_batches_have_known_sizes():
    source = as_source(TfStandIn([], (Spec(4, 2), Spec(4)), 5))
    assert (source.sizes, source.batch_size) == ({4: 5}, 4)
    endless = as_source(TfStandIn([], Spec(4), -1))
    assert endless.cardinality == INFINITE_CARDINALITY
    assert as_source(TfStandIn([], Spec(4), -2)).cardinality == UNKNOWN_CARDINALITY
    assert as_source(TfStandIn([], Spec(None), -1)).cardinality == INFINITE_CARDINALITY


class Ragged:
    """Looks like a ``RaggedTensorValue``."""

    row_splits = None

    def __init__(self, rows):
        self._rows = rows

    def to_list(self):
        return self._rows


def check_ragged_and_strings(dataset):
    (batch,) = as_source(dataset).start(None)
    assert [row.tolist() for row in batch["tokens"]] == [[1, 2], [], [3]]
    assert batch["text"].tolist() == [b"a", b"bc\0", b""]


def test_tf_ragged_and_string_batches():
    batch = {
        "tokens": Ragged([[1, 2], [], [3]]),
        "text": np.array([b"a", b"bc\0", b""], object),
    }
    spec = {"tokens": Spec(None, None), "text": Spec(None)}
    check_ragged_and_strings(TfStandIn([batch], spec))


def test_real_tf_ragged_and_string_batches():
    tf = pytest.importorskip("tensorflow")
    rows = {
        "tokens": tf.ragged.constant([[1, 2], [], [3]]),
        "text": tf.constant([b"a", b"bc\0", b""]),
    }
    check_ragged_and_strings(tf.data.Dataset.from_tensor_slices(rows).batch(3))


# -- torch ---------------------------------------------------------------------------


def test_torch_batches_are_tuples_over_the_tensors_memory():
    x = np.arange(6.0)
    batch = [Tensor(x), {"a": Tensor(x)}, ["p", "q"], (Tensor(x), [Tensor(x)])]
    got = adapters._from_torch(batch)
    assert isinstance(got, tuple) and isinstance(got[3][1], tuple)
    assert got[0] is x and got[1]["a"] is x
    assert got[2].tolist() == ["p", "q"]


def test_real_torch_memory_and_dtypes():
    torch = pytest.importorskip("torch")
    x = torch.arange(6.0, requires_grad=True)
    half = torch.arange(6).to(torch.bfloat16)
    got = adapters._from_torch([x, half])
    assert got[0].ctypes.data == x.data_ptr()
    assert got[1].dtype == ml_dtypes.bfloat16
    assert got[1].astype(float).tolist() == [0, 1, 2, 3, 4, 5]


def test_torch_sizes_are_known_unless_rows_may_change():
    assert as_source(torch_stand_in(20, 3)).sizes == {3: 6, 2: 1}
    loader = torch_stand_in(20, 3)
    loader.collate_fn = lambda rows: rows
    assert as_source(loader).sizes is None
    loader.sampler = iter(())
    assert as_source(loader).cardinality == UNKNOWN_CARDINALITY


def test_looking_does_not_move_a_stateful_loader():
    source = as_source(stateful_stand_in(20, 3))
    batches = source.start(None)
    next(batches), next(batches)
    state = batches.get_state()
    next(source.peek())
    assert batches.get_state() == state


# -- Hugging Face --------------------------------------------------------------------


@pytest.mark.parametrize(
    "features", [{"x": scalar()}, {"x": column(), "label": scalar()}]
)
def test_hugging_face_single_rows_are_refused_at_once(features):
    with pytest.raises(ValueError, match=r"Hugging Face .*one value of .*single rows"):
        as_source(HuggingFaceStandIn([], features))


def test_hugging_face_single_rows_are_refused_when_they_come():
    source = as_source(HuggingFaceStandIn([{"x": [1, 2], "label": 3}], {}))
    with pytest.raises(ValueError, match=r"one value of label.*\.batch\(batch_size\)"):
        next(source.start(None))


def test_real_hugging_face_single_rows_are_refused():
    library = hugging_face_library()
    made = library.Dataset.from_dict({"x": [[1, 2], [3, 4]], "label": [0, 1]})
    with pytest.raises(ValueError, match="one value of label"):
        as_source(made)


def check_columns(dataset):
    (batch,) = as_source(dataset).start(None)
    assert batch["text"].tolist() == ["a", "bcd"]
    assert batch["image"].shape == (2, 1, 2)
    assert [np.asarray(row).tolist() for row in batch["tokens"]] == [[1], [2, 3]]


COLUMNS = {"text": ["a", "bcd"], "image": [[[1, 2]], [[3, 4]]], "tokens": [[1], [2, 3]]}


def test_hugging_face_columns_become_arrays():
    check_columns(HuggingFaceStandIn([COLUMNS], dict.fromkeys(COLUMNS, column())))


@pytest.mark.parametrize("format", [None, "numpy", "torch"])
def test_real_hugging_face_columns_become_arrays(format):
    library = hugging_face_library()
    if format == "torch":
        pytest.importorskip("torch")
    check_columns(library.Dataset.from_dict(COLUMNS).batch(2).with_format(format))


# -- grain ---------------------------------------------------------------------------


def test_grain_single_rows_are_refused_when_they_come():
    grain = pytest.importorskip("grain")
    for dataset in (grain.MapDataset.range(3), grain.MapDataset.range(3).seed(1)):
        with pytest.raises(ValueError, match=r"grain dataset \(.*single rows"):
            next(as_source(dataset).start(None))


def test_grain_without_end():
    source = as_source(grain_map(6, 2).repeat())
    assert source.cardinality == INFINITE_CARDINALITY


def test_grain_workers_lose_no_row():
    grain_map(1, 1)
    from absl import flags  # grain's: its processes want them to be parsed

    flags.FLAGS.mark_as_parsed()
    # Each of two workers makes batches of its own rows, so two of them are not full.
    batches = as_source(grain_loader(34, 16, num_workers=2)).start(None)
    seen = [y_of(batch) for batch in batches]
    batches.close()
    assert [len(rows) for rows in seen] == [16, 16, 1, 1]
    assert sorted(row for rows in seen for row in rows) == list(range(34))


# -- any iterable --------------------------------------------------------------------


class Positioned:
    """Batches that know where they stand."""

    def __init__(self):
        self.passed_over = []

    def __iter__(self):
        return PositionedIterator(self)


class PositionedIterator:
    def __init__(self, dataset):
        self._dataset = dataset
        self._at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._at == 4:
            raise StopIteration
        self._at += 1
        self._dataset.passed_over.append(self._at)
        return [np.arange(2) + self._at]

    def get_state(self):
        return b"at %d" % self._at

    def set_state(self, state):
        self._at = int(state.removeprefix(b"at "))


def test_iterators_that_know_their_position_are_asked():
    batches = as_source(Positioned()).start(None)
    next(batches), next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    dataset = Positioned()
    assert len(list(as_source(dataset).start(state))) == 2
    assert dataset.passed_over == [3, 4]


@pytest.mark.parametrize("state", [{"batches": 2}, {}, 3, {"plain": 1, "bytes": ""}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="not a state of this kind"):
        as_source(Positioned()).start(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"plain": 3},
        {"plain": None},
        {"plain": {}},
        {"plain": {"next_index": 1.5}},
        {"plain": {"next_index": True}},
        {"plain": {"next_index": -1}},
        {"plain": {"next_index": 100}},
        {"bytes": "!"},
        {"pickle": "aaaa"},
        {"pickle": 3},
    ],
)
@pytest.mark.parametrize("make", [grain_map, grain_iter])
def test_wrong_states_of_grain_are_refused(make, wrong):
    with pytest.raises(ValueError, match="not a state of this kind"):
        as_source(make(20, 3)).start(wrong)


def test_wrong_states_of_a_stateful_loader_are_refused():
    for wrong in ({"plain": 3}, {"plain": {"yielded": 2}}):
        with pytest.raises(ValueError, match="not a state of this kind"):
            as_source(stateful_stand_in(20, 3)).start(wrong)
