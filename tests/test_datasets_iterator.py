"""Distributed iterators: their position, their end, and what they leave behind."""

import contextlib
import gc
import json
import sys
import threading
import traceback
import weakref

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from replicax.datasets import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Optional,
    from_arrays,
)
from replicax.datasets import distributed as distributed_module
from replicax.datasets import prefetch as prefetch_module
from replicax.datasets.distributed import distribute_dataset, distribute_from_function

import replicax as rx
from replicax.errors import OutOfRangeError, UnevenBatchError

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
PREFETCHES = [0, 1, 2, 5]


def mesh_of(n):
    return Mesh(np.array(jax.devices()[:n]), ("replica",))


def distribute(dataset, n=2, **options):
    return distribute_dataset(dataset, mesh_of(n), InputOptions(**options))


def values(element):
    """An element as plain data, each leaf as the list of its replicas' rows."""
    return {
        key: [np.asarray(part).tolist() for part in leaf.values]
        for key, leaf in element.items()
    }


def all_values(elements):
    return [values(element) for element in elements]


def real_rows(elements):
    """The rows that are no filler, in the order of the replicas."""
    rows = []
    for element in all_values(elements):
        xs, masks = np.concatenate(element["x"]), np.concatenate(element["mask"])
        rows += xs[masks == 1].tolist()
    return rows


def through_json(state):
    return json.loads(json.dumps(state))


# -- datasets of every kind, made anew at each call ----------------------------------


def batches_of(num_rows, size):
    for start in range(0, num_rows, size):
        yield {"x": np.arange(start, min(start + size, num_rows))}


def arrays_of(rows, batch, seed=None, repeats=1):
    dataset = from_arrays({"x": rows})
    if seed is not None:
        dataset = dataset.shuffle(seed)
    return dataset.batch(batch).repeat(repeats)


def shuffled(num_rows, batch, n, options):
    rows = arrays_of(np.arange(num_rows), batch, seed=3, repeats=2)
    return distribute_dataset(rows, mesh_of(n), options)


def plain(num_rows, batch, n, options):
    return distribute_dataset(
        arrays_of(np.arange(num_rows), batch), mesh_of(n), options
    )


def listed(num_rows, batch, n, options):
    return distribute_dataset(list(batches_of(num_rows, batch)), mesh_of(n), options)


def generated(num_rows, batch, n, options):
    return distribute_dataset(lambda: batches_of(num_rows, batch), mesh_of(n), options)


def rebatched(num_rows, batch, n, options):
    """The second of two workers that both deliver all rows."""
    options = InputOptions(
        prefetch=options.prefetch,
        remainder=options.remainder,
        auto_shard_policy=AutoShardPolicy.OFF,
    )
    rows = arrays_of(np.arange(num_rows), 2 * batch, seed=1)
    return distribute_dataset(rows, mesh_of(n), options, InputContext(2, 1, 2 * n))


def dealt(num_rows, batch, n, options):
    return distribute_from_function(
        lambda context: arrays_of(np.arange(num_rows), max(batch // n, 1), seed=2),
        mesh_of(n),
        options,
    )


def dealt_to_each(num_rows, batch, n, options):
    options = InputOptions(
        prefetch=options.prefetch,
        remainder=options.remainder,
        replication_mode=InputReplicationMode.PER_REPLICA,
    )
    return distribute_from_function(
        lambda context: arrays_of(
            np.arange(num_rows)[context.input_pipeline_id :: n],
            max(batch // n, 1),
            seed=context.input_pipeline_id,
        ),
        mesh_of(n),
        options,
    )


KINDS = [shuffled, plain, listed, generated, rebatched, dealt, dealt_to_each]


@st.composite
def sizes(draw, remainder):
    """A number of replicas, rows, and a batch size that ``remainder`` allows."""
    n = draw(st.integers(1, 3))
    batch = n * draw(st.integers(1, 3))
    if remainder == "pad":
        batch += draw(st.integers(0, 1))
    rows = 2 * batch * draw(st.integers(0, 3))
    if remainder != "error":
        rows += draw(st.integers(0, 2 * batch - 1))
    return n, rows, batch


@contextlib.contextmanager
def unless_all_is_left_out():
    """Passes over a case in which remainder="drop" rightly refuses all batches."""
    try:
        yield
    except UnevenBatchError as error:
        assume("leaves out" not in str(error))
        raise


# -- the position --------------------------------------------------------------------


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("remainder", ["error", "drop", "pad"])
@settings(quick, max_examples=25)
@given(data=st.data(), prefetch=st.sampled_from(PREFETCHES), epoch=st.integers(0, 2))
def test_what_is_left_after_a_restore_is_exactly_what_was_left(
    make, remainder, data, prefetch, epoch
):
    with unless_all_is_left_out():
        _check_what_is_left(make, remainder, data, prefetch, epoch)


def _check_what_is_left(make, remainder, data, prefetch, epoch):
    size = data.draw(sizes(remainder))
    n, num_rows, batch = size
    options = InputOptions(prefetch=prefetch, remainder=remainder)
    dataset = make(num_rows, batch, n, options)
    for _ in range(epoch):
        for _ in dataset:
            pass
    iterator = iter(dataset)
    cut = data.draw(st.integers(0, 8))
    taken = [element for _, element in zip(range(cut), iterator, strict=False)]
    state = through_json(iterator.get_state())
    left = all_values(iterator)

    again = make(num_rows, batch, n, options)
    restored = iter(again)
    for _ in range(data.draw(st.integers(0, 2))):
        next(restored, None)
    restored.set_state(state)
    assert restored.get_state() == state
    assert all_values(restored) == left
    # Nor does the next iteration repeat the epoch or pass one over.
    assert all_values(again) == all_values(dataset)
    assert not left or len(taken) == cut


@quick
@given(
    make=st.sampled_from([shuffled, plain, listed, generated, dealt]),
    num_rows=st.integers(0, 40),
    n=st.integers(1, 8),
    other=st.integers(1, 8),
    cut=st.integers(0, 6),
)
def test_a_position_holds_for_another_number_of_replicas(make, num_rows, n, other, cut):
    def iterator_of(n):
        # `dealt` divides by the replicas: its batches must not depend on them.
        batch = 3 * n if make is dealt else 6
        return iter(make(num_rows, batch, n, InputOptions(remainder="pad", prefetch=0)))

    iterator = iterator_of(n)
    for _ in range(cut):
        next(iterator, None)
    restored = iterator_of(other)
    restored.set_state(through_json(iterator.get_state()))
    assert real_rows(restored) == real_rows(iterator)


def worker_iterators(num_rows, batch, workers, n, seed):
    """The iterators of all workers, of which each has ``n`` replicas."""
    return [
        iter(
            distribute_dataset(
                arrays_of(np.arange(num_rows), batch, seed),
                mesh_of(n),
                InputOptions(remainder="pad", prefetch=0),
                InputContext(workers, worker, workers * n),
            )
        )
        for worker in range(workers)
    ]


def rows_of_all(workers):
    """The rows of all workers' elements: step by step, worker by worker."""
    return [row for step in zip(*workers, strict=True) for row in real_rows(step)]


@quick
@given(
    num_rows=st.integers(0, 40),
    batch=st.integers(1, 9),
    workers=st.integers(1, 4),
    other=st.integers(1, 4),
    n=st.integers(1, 2),
    cut=st.integers(0, 5),
    seed=st.none() | st.integers(0, 3),
)
def test_a_position_holds_for_another_number_of_workers(
    num_rows, batch, workers, other, n, cut, seed
):
    whole = rows_of_all(worker_iterators(num_rows, batch, 1, 1, seed))
    before = worker_iterators(num_rows, batch, workers, n, seed)
    begun = [list(zip(range(cut), w, strict=False)) for w in before]
    states = [through_json(worker.get_state()) for worker in before]
    assert all(state == states[0] for state in states)
    after = worker_iterators(num_rows, batch, other, n, seed)
    for worker in after:
        worker.set_state(states[0])
    seen = rows_of_all([[element for _, element in own] for own in begun])
    assert seen + rows_of_all(after) == whole


def test_restoring_an_endless_iteration():
    def iterator():
        return iter(
            distribute(arrays_of(np.arange(6), 2, seed=0, repeats=None), prefetch=3)
        )

    with iterator() as first, iterator() as second:
        for _ in range(7):
            next(first)
        second.set_state(through_json(first.get_state()))
        for _ in range(5):
            assert values(next(second)) == values(next(first))


def test_what_is_prepared_ahead_is_not_counted():
    made = threading.Semaphore(0)

    def source():
        for batch in batches_of(12, 2):
            yield batch
            made.release()  # asked for the one after it

    iterator = iter(distribute(source, prefetch=3))
    next(iterator)
    for _ in range(3):
        assert made.acquire(timeout=10)
    assert iterator.get_state()["batches"] == 1
    iterator.close()


def test_of_batches_made_on_the_way_those_before_a_position_are_passed_over():
    made = []

    def source():
        for batch in batches_of(8, 2):
            made.append(batch["x"][0])
            yield batch

    first = iter(distribute(source, prefetch=0))
    next(first), next(first)
    state = first.get_state()
    made.clear()
    restored = iter(distribute(source, prefetch=0))
    restored.set_state(state)
    assert made == [0, 2]
    assert [element["x"] for element in all_values(restored)] == [
        [[4], [5]],
        [[6], [7]],
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "other",
    [
        arrays_of(np.arange(8), 2, seed=1),
        arrays_of(np.arange(8), 2),
        arrays_of(np.arange(8), 4, seed=0),
        arrays_of(np.arange(10), 2, seed=0),
        arrays_of(np.arange(8), 2, seed=0, repeats=2),
    ],
    ids=["seed", "order", "batch", "rows", "epochs"],
)
def test_a_state_of_another_dataset_is_refused_and_nothing_is_lost(other, prefetch):
    def dataset():
        return distribute(arrays_of(np.arange(8), 2, seed=0), prefetch=prefetch)

    undisturbed = dataset()
    want = [all_values(undisturbed), all_values(undisturbed)]
    disturbed = dataset()
    iterator = iter(disturbed)
    got = [values(next(iterator))]
    with pytest.raises(ValueError, match=r"another dataset.*must be the same"):
        iterator.set_state(iter(distribute(other)).get_state())
    got += all_values(iterator)
    assert [got, all_values(disturbed)] == want


def test_a_state_past_the_end_is_refused_and_nothing_is_lost():
    long = iter(distribute(lambda: batches_of(8, 2)))
    assert len(list(long)) == 4
    closed = []

    def short():
        try:
            yield from batches_of(6, 2)
        finally:
            closed.append(True)

    iterator = iter(distribute(short, prefetch=0))
    next(iterator)
    with pytest.raises(ValueError, match="after 4 batches, and here are 3"):
        iterator.set_state(long.get_state())
    assert closed == [True]
    assert len(list(iterator)) == 2


def test_a_rebatched_position_in_smaller_batches_is_refused():
    def worker(size):
        return iter(
            distribute_dataset(
                list(batches_of(12, size)),
                mesh_of(1),
                InputOptions(auto_shard_policy=AutoShardPolicy.OFF),
                InputContext(2, 0, 2),
            )
        )

    iterator = worker(6)
    next(iterator)
    assert iterator.get_state()["source"]["used"] == 3
    with pytest.raises(ValueError, match="3 rows of a batch were used"):
        worker(2).set_state(iterator.get_state())


@pytest.mark.parametrize("make", KINDS)
def test_what_is_no_state_is_refused_and_nothing_is_lost(make):
    iterator = iter(make(12, 2, 2, InputOptions(prefetch=0)))
    next(iterator)
    state = iterator.get_state()
    counts = [key for key, value in state.items() if type(value) is int]
    wrong = [
        None,
        {},
        [],
        "state",
        7,
        {**state, "more": 1},
        *[{**state, key: -1} for key in counts],
        *[{**state, key: "1"} for key in counts],
        *[{**state, key: True} for key in counts],
        *[{**state, key: None} for key in state],
    ]
    if "source" in state:
        wrong += [{**state, "source": {}}, {**state, "source": 3}]
    else:
        wrong += [{**state, "sources": [None] * len(state["sources"])}]
        wrong += [{**state, "sources": []}]
    for bad in wrong:
        with pytest.raises(ValueError, match=r"state"):
            iterator.set_state(bad)
    untouched = iter(make(12, 2, 2, InputOptions(prefetch=0)))
    next(untouched)
    assert all_values(iterator) == all_values(untouched)


def test_the_message_about_what_is_no_state_names_the_entries():
    with pytest.raises(ValueError, match=r"'batches', 'largest', 'source'. Got \{\}"):
        iter(distribute(list(batches_of(4, 2)))).set_state({})


def test_a_state_of_dealt_batches_is_none_of_split_ones():
    options = InputOptions()
    split, given_out = plain(8, 4, 2, options), dealt(8, 4, 2, options)
    for one, other in [(split, given_out), (given_out, split)]:
        with pytest.raises(ValueError, match="this kind of dataset"):
            iter(one).set_state(iter(other).get_state())


def test_a_position_of_each_replicas_dataset_holds_for_as_many_replicas():
    state = iter(dealt_to_each(12, 2, 2, InputOptions())).get_state()
    with pytest.raises(ValueError, match=r"of 2 datasets.*made of 3.*as many"):
        iter(dealt_to_each(12, 3, 3, InputOptions())).set_state(state)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_one_shot_iterator_cannot_be_restored_but_goes_on(prefetch):
    iterator = iter(distribute(batches_of(8, 2), prefetch=prefetch))
    next(iterator)
    with pytest.raises(RuntimeError, match="iterated only once"):
        iterator.set_state(iterator.get_state())
    assert len(list(iterator)) == 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_closed_iterator_and_one_at_its_end_can_be_set_back(prefetch):
    iterator = iter(distribute(list(batches_of(8, 2)), prefetch=prefetch))
    start = iterator.get_state()
    want = all_values(iterator)
    iterator.set_state(start)
    assert all_values(iterator) == want
    iterator.close()
    iterator.set_state(start)
    assert all_values(iterator) == want


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_an_error_the_position_is_that_of_the_element_that_failed(prefetch):
    faults = [OSError("the disk was busy")]

    def source():
        for number, batch in enumerate(batches_of(8, 2)):
            if number == 2 and faults:
                raise faults.pop()
            yield batch

    iterator = iter(distribute(source, prefetch=prefetch))
    got = [values(next(iterator)), values(next(iterator))]
    with pytest.raises(OSError, match="busy"):
        next(iterator)
    iterator.set_state(iterator.get_state())
    got += all_values(iterator)
    assert [element["x"] for element in got] == [[[i], [i + 1]] for i in (0, 2, 4, 6)]


def test_the_padded_size_is_part_of_the_position():
    batches = [{"x": np.ones(rows)} for rows in (5, 3, 2, 1)]
    options = InputOptions(remainder="pad")
    for dataset, size in [
        (distribute(batches, remainder="pad"), 3),
        (distribute_from_function(lambda _: batches, mesh_of(2), options), 5),
    ]:
        iterator, restored = iter(dataset), iter(dataset)
        assert next(iterator)["x"].shape == (size,)
        restored.set_state(iterator.get_state())
        assert next(restored)["x"].shape == (size,)


# -- the end -------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_get_next_says_when_there_is_none(prefetch):
    iterator = iter(distribute(list(batches_of(4, 2)), prefetch=prefetch))
    assert values(iterator.get_next()) == {"x": [[0], [1]]}
    assert values(iterator.get_next()) == {"x": [[2], [3]]}
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="get_next_as_optional"):
            iterator.get_next()
    assert issubclass(OutOfRangeError, IndexError)
    assert rx.OutOfRangeError is OutOfRangeError


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_get_next_as_optional_has_no_value_at_the_end(prefetch):
    iterator = iter(distribute(list(batches_of(2, 2)), prefetch=prefetch))
    there = iterator.get_next_as_optional()
    assert there.has_value()
    assert values(there.get_value()) == {"x": [[0], [1]]}
    for _ in range(2):
        gone = iterator.get_next_as_optional()
        assert not gone.has_value()
        with pytest.raises(ValueError, match="has no value"):
            gone.get_value()


def test_an_optional_may_hold_none():
    assert Optional(None).has_value()
    assert Optional(None).get_value() is None
    assert (repr(Optional(3)), repr(Optional())) == ("Optional(3)", "Optional()")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_reduce(prefetch):
    dataset = distribute(arrays_of(np.arange(8), 4), prefetch=prefetch)

    def add(total, element):
        return total + int(np.sum(element["x"].array))

    assert dataset.reduce(100, add) == 128
    nothing = object()
    assert distribute([], prefetch=prefetch).reduce(nothing, add) is nothing


def test_reduce_goes_through_one_epoch_at_each_call():
    dataset = distribute(arrays_of(np.arange(8), 4, seed=0))
    source = arrays_of(np.arange(8), 4, seed=0)
    for epoch in range(2):
        order = dataset.reduce(
            [], lambda seen, e: seen + np.ravel(e["x"].array).tolist()
        )
        assert order == [row for b in source.epoch(epoch) for row in b["x"].tolist()]


def test_an_error_in_reduce_leaves_no_thread():
    def broken(state, element):
        raise KeyError("loss")

    with pytest.raises(KeyError, match="loss"):
        distribute(arrays_of(np.arange(64), 2)).reduce(0, broken)
    assert not prefetch_threads()


# -- what is known beforehand --------------------------------------------------------


def test_the_iterator_knows_its_element_spec():
    dataset = distribute(lambda: batches_of(8, 4))
    iterator = iter(dataset)
    assert iterator.element_spec is dataset.element_spec
    assert iterator.element_spec["x"].shape == (2,)
    assert len(list(iterator)) == 2


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("remainder", ["error", "drop", "pad"])
@settings(quick, max_examples=20)
@given(data=st.data())
def test_lengths_and_specs_are_those_of_what_comes(make, remainder, data):
    with unless_all_is_left_out():
        _check_lengths_and_specs(make, remainder, data)


def _check_lengths_and_specs(make, remainder, data):
    n, num_rows, batch = data.draw(sizes(remainder))
    dataset = make(num_rows, batch, n, InputOptions(remainder=remainder, prefetch=0))
    known = dataset.cardinality
    elements = list(dataset)
    if known != UNKNOWN_CARDINALITY:
        assert known == len(dataset) == len(elements)
    else:
        assert make is generated or (remainder == "drop" and make in KINDS[-2:])
    if elements:
        spec = dataset.element_spec
        assert spec.keys() == elements[0].keys()
        for key, leaf in spec.items():
            assert leaf.num_replicas == n
            assert {part.shape for part in leaf.values} == {elements[0][key].shape}
            assert {part.dtype for part in leaf.values} == {elements[0][key].dtype}


def test_element_spec_of_what_stays_on_the_host_has_the_hosts_dtypes():
    batch = {"x": np.zeros([4, 3]), "name": np.array(["a", "bc", "d", "e"])}
    spec = distribute([batch], fetch_to_device=False).element_spec
    assert spec["x"].values[0].dtype == np.float64
    assert spec["name"].values[0].dtype == np.dtype("U2")


def test_endless_rebatched_batches_are_known_to_be_endless():
    def worker(num_rows):
        return distribute_dataset(
            arrays_of(np.arange(num_rows), 4, repeats=None),
            mesh_of(2),
            InputOptions(auto_shard_policy=AutoShardPolicy.OFF),
            InputContext(2, 0, 4),
        )

    assert worker(6).cardinality == INFINITE_CARDINALITY
    assert worker(0).cardinality == 0


# -- what is left behind -------------------------------------------------------------


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "replicax-prefetch"]


def wait_for_prefetch_threads_to_end():
    for thread in prefetch_threads():
        thread.join(timeout=10)
    assert not prefetch_threads()


def test_closing_lets_go_of_all_threads_that_wait_for_an_element():
    go = threading.Event()

    def source():
        assert go.wait(10)
        yield {"x": np.arange(2)}
        yield {"x": np.arange(2)}

    iterator = iter(distribute(source, prefetch=1))
    waiting = [
        threading.Thread(target=next, args=(iterator, None), daemon=True)
        for _ in range(3)
    ]
    closing = threading.Thread(target=iterator.close, daemon=True)
    for thread in [*waiting, closing]:
        thread.start()
    go.set()
    for thread in [*waiting, closing]:
        thread.join(10)
        assert not thread.is_alive()


class Closeable:
    """Endless batches that hold something to be closed."""

    def __init__(self):
        self.closed = 0

    def __iter__(self):
        return self

    def __next__(self):
        return {"x": np.arange(2)}

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("end", ["close", "drop", "set_state"])
def test_what_the_batches_hold_is_closed_once(prefetch, taken, end):
    opened = []

    def source():
        opened.append(Closeable())
        return opened[-1]

    iterator = iter(distribute(source, prefetch=prefetch))
    for _ in range(taken):
        next(iterator)
    if end == "close":
        iterator.close()
        iterator.close()
    if end == "set_state":
        iterator.set_state(iterator.get_state())
        assert [batches.closed for batches in opened] == [1, 0]
    del iterator
    wait_for_prefetch_threads_to_end()
    assert [batches.closed for batches in opened] == [1] * len(opened)


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("taken", [0, 1])
def test_a_dropped_iterator_leaves_no_thread_and_no_array(prefetch, taken):
    dataset = distribute(arrays_of(np.arange(64), 2, repeats=None), prefetch=prefetch)
    gc.collect()
    before = len(jax.live_arrays())
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    seen = weakref.ref(iterator)
    del iterator
    assert seen() is None
    wait_for_prefetch_threads_to_end()
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_a_dropped_dataset_is_freed_with_its_iterator():
    dataset = distribute(arrays_of(np.arange(64), 2, repeats=None))
    iterator = iter(dataset)
    next(iterator)
    seen = weakref.ref(dataset)
    del dataset
    assert seen() is not None  # the iterator needs it
    del iterator
    wait_for_prefetch_threads_to_end()
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("make", [distribute, "PER_WORKER", "PER_REPLICA"])
def test_an_exception_comes_in_its_turn_with_its_own_traceback(make, prefetch):
    """After the elements before it, whoever takes the batches."""

    def broken_pipeline():
        yield from batches_of(8, 2)
        raise KeyError("row 17")

    if make is distribute:
        dataset = distribute(broken_pipeline, prefetch=prefetch)
    else:
        dataset = distribute_from_function(
            lambda context: broken_pipeline,
            mesh_of(2),
            InputOptions(
                prefetch=prefetch, replication_mode=InputReplicationMode[make]
            ),
        )
    count = 2 if make == "PER_WORKER" else 4
    iterator = iter(dataset)
    assert [next(iterator)["x"].is_data for _ in range(count)] == [True] * count
    with pytest.raises(KeyError, match="row 17") as info:
        next(iterator)
    assert "broken_pipeline" in [f.name for f in traceback.extract_tb(info.tb)]
    with pytest.raises(RuntimeError, match=r"stopped with KeyError: 'row 17'"):
        next(iterator)
    wait_for_prefetch_threads_to_end()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_half_way_through_a_round_delivers_no_part_of_it(prefetch):
    def broken_pipeline():
        yield from batches_of(6, 2)
        raise KeyError("row 6")

    dataset = distribute_from_function(
        lambda context: broken_pipeline, mesh_of(2), InputOptions(prefetch=prefetch)
    )
    iterator = iter(dataset)
    assert values(next(iterator)) == {"x": [[0, 1], [2, 3]]}
    with pytest.raises(KeyError, match="row 6"):
        next(iterator)
    assert iterator.get_state()["rounds"] == 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_ours_comes_in_its_turn_and_ends_the_iteration(prefetch):
    closed = []

    def source():
        try:
            yield {"x": np.arange(2)}
            yield {"x": np.float32(3)}
        finally:
            closed.append(True)

    iterator = iter(distribute(source, prefetch=prefetch))
    next(iterator)
    with pytest.raises(ValueError, match=r"scalar at batch\['x'\]"):
        next(iterator)
    with pytest.raises(RuntimeError, match="stopped with ValueError"):
        next(iterator)
    wait_for_prefetch_threads_to_end()
    assert closed == [True]


# -- interrupts, threads and a late start --------------------------------------------


class Interrupting:
    """Wraps a method so that its call number ``at`` is interrupted, before or after."""

    def __init__(self, method, at, after):
        self.method, self.at, self.after = method, at, after
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at and not self.after:
            raise KeyboardInterrupt
        result = self.method(*args)
        if self.calls == self.at:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", ["peek", "take"])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_while_waiting_loses_no_element(prefetch, name, after):
    iterator = iter(distribute(lambda: batches_of(20, 2), prefetch=prefetch))
    came = [first_rows(next(iterator))]
    ready = iterator._ready
    setattr(ready, name, Interrupting(getattr(ready, name), 3, after))
    interrupts = 0
    while len(came) < 10:
        state = iterator.get_state()
        try:
            came.append(first_rows(next(iterator)))
        except KeyboardInterrupt:
            interrupts += 1
            assert iterator.get_state() == state
    assert interrupts == 1
    assert came == list(range(0, 20, 2))
    assert next(iterator, None) is None


def first_rows(element):
    return int(element["x"].values[0][0])


def interrupted_at(line, iterator):
    """Asks for an element, with an interrupt before the given line of our own code.

    Not once the position has moved: the element is then on its way out.
    """
    files = {distributed_module.__file__, prefetch_module.__file__}
    start, lines, before = iterator.get_state(), 0, sys.gettrace()

    def trace(frame, event, arg):
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines += 1
            if lines == line and iterator.get_state() == start:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        return next(iterator)
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_an_interrupt_at_any_line_loses_no_element(prefetch):
    reached = 0
    for line in range(1, 100):
        iterator = iter(distribute(lambda: batches_of(10, 2), prefetch=prefetch))
        came = [first_rows(next(iterator))]
        state = iterator.get_state()
        try:
            came.append(first_rows(interrupted_at(line, iterator)))
        except KeyboardInterrupt:
            reached += 1
            assert iterator.get_state() == state
        try:
            came += map(first_rows, iterator)
        except RuntimeError:
            assert prefetch == 0  # the interrupt came in the pipeline itself
            iterator.set_state(iterator.get_state())
            came += map(first_rows, iterator)
        assert came == [0, 2, 4, 6, 8]
    assert 10 < reached < 99


@pytest.mark.parametrize("prefetch", [0, 1])
def test_after_an_interrupt_of_the_pipeline_the_position_still_holds(prefetch):
    interrupts = iter([True])

    def pipeline():
        for batch in batches_of(8, 2):
            if batch["x"][0] == 4 and next(interrupts, False):
                raise KeyboardInterrupt
            yield batch

    iterator = iter(distribute(pipeline, prefetch=prefetch))
    assert [first_rows(next(iterator)) for _ in range(2)] == [0, 2]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="stopped with KeyboardInterrupt"):
        next(iterator)
    iterator.set_state(iterator.get_state())
    assert [first_rows(element) for element in iterator] == [4, 6]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_share_an_iterator_and_its_end(prefetch):
    iterator = iter(distribute(lambda: batches_of(80, 2), prefetch=prefetch))
    came, errors = [], []

    def work():
        try:
            for element in iterator:
                came.append(first_rows(element))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert sorted(came) == list(range(0, 80, 2))


class ShuffledByItsOwnState:
    """A loader whose order depends on how often it was iterated."""

    def __init__(self):
        self.random = np.random.default_rng(0)
        self.started = 0

    def __iter__(self):
        self.started += 1
        order = self.random.permutation(16)
        return iter([{"x": order[i : i + 4]} for i in range(0, 16, 4)])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_restoring_starts_the_dataset_once(prefetch):
    def all_rows(elements):
        return [v.tolist() for element in elements for v in element["x"].values]

    iterator = iter(distribute(ShuffledByItsOwnState(), prefetch=prefetch))
    taken = all_rows([next(iterator)])
    state = through_json(iterator.get_state())
    loader = ShuffledByItsOwnState()
    resumed = iter(distribute(loader, prefetch=prefetch))
    assert loader.started == 0
    resumed.set_state(state)
    left = all_rows(resumed)
    assert loader.started == 1
    assert left == all_rows(iterator)
    assert sorted(row for rows in taken + left for row in rows) == list(range(16))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_the_end_of_a_generator_raises_is_raised_by_close(prefetch):
    def pipeline():
        try:
            yield from batches_of(8, 2)
        finally:
            raise OSError("the disk is gone")

    iterator = iter(distribute(pipeline, prefetch=prefetch))
    next(iterator)
    with pytest.raises(OSError, match="the disk is gone"):
        iterator.close()
    wait_for_prefetch_threads_to_end()


def test_closing_an_iterator_that_never_started_starts_nothing():
    loader = ShuffledByItsOwnState()
    iterator = iter(distribute(loader))
    iterator.close()
    assert next(iterator, None) is None
    assert loader.started == 0
