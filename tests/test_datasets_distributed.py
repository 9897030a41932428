"""Distributed datasets: every row once, on its device, and nothing left behind."""

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from replicax.datasets import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    from_arrays,
)
from replicax.datasets.distributed import distribute_dataset, distribute_from_function
from replicax.datasets.sources import as_source
from replicax.datasets.split_feed import SplitFeed

from replicax.errors import UnevenBatchError
from replicax.values import PerReplica

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def mesh_of(n, axis_name="replica"):
    return Mesh(np.array(jax.devices()[:n]), (axis_name,))


def distribute(dataset, n=2, **options):
    return distribute_dataset(dataset, mesh_of(n), InputOptions(**options))


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "replicax-prefetch"]


def wait_for_prefetch_threads_to_end():
    for thread in prefetch_threads():
        thread.join(timeout=10)
    assert not prefetch_threads()


def gathered(value):
    """The rows of a per-replica value, in replica order."""
    return np.concatenate([np.asarray(part) for part in value.values])


# -- what arrives --------------------------------------------------------------------


def test_leaves_are_per_replica_arrays_on_their_devices():
    mesh = mesh_of(4)
    dataset = from_arrays({"x": np.arange(16.0).reshape(8, 2), "y": np.arange(8)})
    (batch,) = distribute_dataset(dataset.batch(8), mesh)
    for leaf in batch.values():
        assert isinstance(leaf, PerReplica)
        assert leaf.is_data
        assert leaf.array.sharding == NamedSharding(mesh, PartitionSpec("replica"))
    assert batch["x"].shape == (2, 2)
    for replica, part in enumerate(batch["y"].values):
        assert part.tolist() == [2 * replica, 2 * replica + 1]
        assert part.devices() == {mesh.devices[replica]}


def test_dtypes_become_what_jax_makes_of_them():
    x = np.arange(4)
    batch = next(iter(distribute([{"f": x.astype("f8"), "i": x, "b": x > 1}])))
    assert batch["f"].dtype == jnp.asarray(x.astype("f8")).dtype
    assert batch["i"].dtype == jnp.asarray(x).dtype
    assert batch["b"].dtype == np.bool_


def test_extended_dtypes_go_to_the_devices():
    (batch,) = distribute([jnp.arange(4, dtype=jnp.bfloat16)])
    assert batch.is_stacked
    assert batch.dtype == jnp.bfloat16


def test_the_axis_may_have_another_name():
    dataset = distribute_dataset([np.arange(4)], mesh_of(2, "data"))
    assert gathered(next(iter(dataset))).tolist() == [0, 1, 2, 3]


def test_string_field_breaks_distributed_iteration():
    batch = {"text": np.array(["a", "b", "c", "d"], object), "x": np.arange(4)}
    (out,) = distribute([batch])
    assert [part.tolist() for part in out["text"].values] == [["a", "b"], ["c", "d"]]
    assert all(isinstance(part, np.ndarray) for part in out["text"].values)
    assert out["text"].is_data


def test_none_entries_are_kept():
    (out,) = distribute([{"x": np.arange(4), "extra": None}])
    assert out["extra"] is None


# -- what may be distributed ---------------------------------------------------------


def batches():
    yield np.arange(4)
    yield np.arange(4, 8)


class Reiterable:
    def __iter__(self):
        return batches()


@pytest.mark.parametrize("source", [list(batches()), batches, Reiterable()])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_iterables_can_be_iterated_again(source, prefetch):
    dataset = distribute(source, prefetch=prefetch)
    for _ in range(2):
        rows = [row for batch in dataset for row in gathered(batch).tolist()]
        assert rows == list(range(8))


def test_one_shot_iterator_silently_empty_the_second_time():
    dataset = distribute(batches())
    assert len(list(dataset)) == 2
    with pytest.raises(RuntimeError, match="iterated only once"):
        next(iter(dataset))


@pytest.mark.parametrize(
    "bare",
    [
        {"x": np.zeros(4)},
        (np.zeros(4), np.zeros(4)),
        np.zeros([4, 2]),
        jnp.zeros([4, 2]),
        "train.csv",
        PerReplica([1, 2]),
    ],
)
def test_bare_arrays_taken_for_batches(bare):
    with pytest.raises(TypeError, match="from_arrays"):
        distribute(bare)


def test_other_things_are_refused():
    with pytest.raises(TypeError, match="iterable of global batches"):
        distribute(42)
    with pytest.raises(TypeError, match="must return an iterable"):
        next(iter(distribute(lambda: 42)))
    with pytest.raises(TypeError, match="distributed already"):
        distribute(distribute([np.arange(4)]))
    with pytest.raises(TypeError, match="InputOptions"):
        distribute_dataset([np.arange(4)], mesh_of(2), {"prefetch": 2})
    with pytest.raises(ValueError, match=r"Call \.batch\(batch_size\)"):
        distribute(from_arrays(np.arange(4)))


def test_scalar_in_a_batch_is_named():
    with pytest.raises(ValueError, match=r"scalar at batch\['step'\]"):
        list(distribute(lambda: [{"x": np.zeros(4), "step": 3}]))


def test_leaves_of_unequal_rows_are_named():
    with pytest.raises(ValueError, match=r"batch\['x'\]: 4, batch\['y'\]: 2"):
        list(distribute(lambda: [{"x": np.zeros(4), "y": np.zeros(2)}]))


def test_user_buffer_reused_by_a_generator_changes_earlier_batches():
    def reusing():
        # Aligned to a page, so that a device could adopt it without a copy.
        raw = np.empty(8192, np.float32)
        start = (-raw.ctypes.data % 4096) // 4
        buffer = raw[start : start + 64]
        for step in range(4):
            buffer[:] = step
            yield buffer

    for n in (1, 2):
        out = list(distribute(reusing, n, prefetch=0))
        assert [gathered(v)[0] for v in out] == [0, 1, 2, 3]


# -- rows are never lost or doubled --------------------------------------------------


@quick
@given(
    num_rows=st.integers(0, 40),
    batch_size=st.integers(1, 9),
    n=st.integers(1, 8),
    prefetch=st.sampled_from([0, 2]),
    seed=st.none() | st.integers(0, 3),
)
def test_padding_keeps_every_row_once(num_rows, batch_size, n, prefetch, seed):
    source = from_arrays({"x": np.arange(1, num_rows + 1)})
    if seed is not None:
        source = source.shuffle(seed)
    source = source.batch(batch_size)
    want = np.concatenate([np.zeros(0), *[b["x"] for b in source.epoch(0)]])
    dataset = distribute(source, n, remainder="pad", prefetch=prefetch)
    out = list(dataset)
    assert len(out) == len(dataset) == len(source)
    assert len({batch["x"].shape for batch in out}) <= 1
    assert all(batch["mask"].dtype == np.float32 for batch in out)
    x = np.concatenate([np.zeros(0), *[gathered(batch["x"]) for batch in out]])
    mask = np.concatenate([np.zeros(0), *[gathered(batch["mask"]) for batch in out]])
    assert set(mask.tolist()) <= {0.0, 1.0}
    np.testing.assert_array_equal(x[mask == 1], want)
    np.testing.assert_array_equal(x[mask == 0], 0)
    if num_rows:
        # The mean that an evaluation computes with weights=mask.
        np.testing.assert_allclose(np.sum(x * mask) / np.sum(mask), want.mean())


@quick
@given(num_rows=st.integers(0, 40), batch_size=st.integers(1, 9), n=st.integers(1, 8))
def test_dropping_leaves_out_whole_batches_only(num_rows, batch_size, n):
    source = from_arrays(np.arange(num_rows)).batch(batch_size)
    if batch_size % n and num_rows >= batch_size:
        with pytest.raises(UnevenBatchError, match="every full batch"):
            distribute(source, n, remainder="drop")
        source = list(source)
    rows = range(0, num_rows, batch_size)
    chunks = [list(range(i, min(i + batch_size, num_rows))) for i in rows]
    kept = [chunk for chunk in chunks if len(chunk) % n == 0]
    if chunks and not kept:
        with pytest.raises(UnevenBatchError, match=r"leaves out (the only|all)"):
            distribute(source, n, remainder="drop")
        return
    dataset = distribute(source, n, remainder="drop", prefetch=0)
    assert [gathered(batch).tolist() for batch in dataset] == kept
    assert len(dataset) == len(kept)


def dealt_in_unequal_rounds(**options):
    return distribute_from_function(
        lambda context: lambda: iter([np.zeros(2), np.zeros(3)] * 2),
        mesh_of(2),
        InputOptions(remainder="drop", **options),
    )


def split_unevenly(**options):
    return distribute(lambda: iter([np.arange(3)] * 2), remainder="drop", **options)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [dealt_in_unequal_rounds, split_unevenly])
def test_dropping_everything_is_an_error_not_an_empty_epoch(make, prefetch):
    with pytest.raises(UnevenBatchError, match="leaves out every"):
        list(make(prefetch=prefetch))


def test_dropping_the_only_round_is_known_beforehand():
    with pytest.raises(UnevenBatchError, match="leaves out the only round"):
        distribute_from_function(
            lambda context: from_arrays(np.arange(10)).batch(5),
            mesh_of(3),
            InputOptions(remainder="drop"),
        )


@quick
@given(num_rows=st.integers(0, 40), batch_size=st.integers(1, 9), n=st.integers(1, 8))
def test_by_default_an_uneven_batch_is_an_error(num_rows, batch_size, n):
    source = from_arrays(np.arange(num_rows)).batch(batch_size)
    uneven = [len(batch) for batch in source if len(batch) % n]
    if uneven:
        with pytest.raises(UnevenBatchError, match=rf"{uneven[0]} rows?, .* {n} rep"):
            distribute(source, n)
    else:
        out = distribute(source, n, prefetch=0)
        rows = [row for batch in out for row in gathered(batch).tolist()]
        assert rows == list(range(num_rows))


def test_an_even_last_batch_is_passed_on_smaller():
    shapes = [b.shape for b in distribute(from_arrays(np.arange(12)).batch(8), 4)]
    assert shapes == [(2,), (1,)]


def test_uneven_batch_of_unknown_length_is_an_error_when_it_comes():
    dataset = distribute(lambda: [np.arange(4), np.arange(5)])
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(UnevenBatchError, match="Batch 1 has 5 rows"):
        next(iterator)


def test_a_last_batch_with_an_empty_replica_gives_a_nan_mean():
    """Three rows over four replicas: the mean is that of the three rows."""
    x = np.array([1.0, 2.0, 6.0], np.float32)
    (batch,) = distribute([{"x": x}], 4, remainder="pad")
    total = sum(float((p * m).sum()) for p, m in each(batch, "x", "mask"))
    count = sum(float(m.sum()) for m in batch["mask"].values)
    assert total / count == 3.0


def test_a_batch_that_devices_do_not_divide_crashes_with_a_zero_division():
    with pytest.raises(UnevenBatchError, match=r"5 rows, .* 2 replicas"):
        distribute([np.zeros([5, 3])])
    (batch,) = distribute([{"x": np.zeros([5, 3])}], remainder="pad")
    assert batch["x"].shape == (3, 3)


def test_partial_evaluation_batches_are_dropped_or_retraced():
    """Ten examples, batches of four, four replicas: exact, with one shape."""
    correct = np.array([1, 0, 1, 1, 0, 1, 1, 1, 0, 1], np.float32)
    out = list(
        distribute([{"c": c} for c in np.split(correct, [4, 8])], 4, remainder="pad")
    )
    assert {(b["c"].shape, b["mask"].shape) for b in out} == {((1,), (1,))}
    hits = sum(float((c * m).sum()) for b in out for c, m in each(b, "c", "mask"))
    count = sum(float(m.sum()) for b in out for m in b["mask"].values)
    assert hits / count == np.mean(correct, dtype=np.float64)


def test_padding_repeats_real_samples_so_that_metrics_count_them_twice():
    ones = np.ones(10, np.float32)
    (x_y,) = distribute([(ones, ones)], 4, remainder="pad")
    _x, _y, mask = x_y
    assert gathered(mask).tolist() == [1.0] * 10 + [0.0] * 2
    assert gathered(x_y[0]).tolist() == [1.0] * 10 + [0.0] * 2


def test_the_uneven_message_does_not_help():
    with pytest.raises(UnevenBatchError) as info:
        distribute([np.zeros(5)])
    for part in ("5 rows", "2 replicas", "remainder 1", "divides", "drop", "pad"):
        assert part in str(info.value)


def test_zero_size_arrays_crash_with_a_zero_division():
    (batch,) = distribute([np.zeros([0, 0])])
    assert batch.shape == (0, 0)
    assert list(distribute(from_arrays(np.zeros([0, 0])).batch(4))) == []
    (masked,) = distribute([{"x": np.zeros([0, 0])}], remainder="pad")
    assert masked["mask"].shape == (0,)


def test_padding_always_carries_the_mask_even_with_one_replica():
    out = list(
        distribute(from_arrays({"x": np.arange(6)}).batch(4), 1, remainder="pad")
    )
    assert [gathered(b["mask"]).tolist() for b in out] == [[1] * 4, [1, 1, 0, 0]]


def test_a_later_larger_batch_loses_no_row():
    sizes = [3, 5, 2]
    out = list(distribute([{"x": np.ones(s)} for s in sizes], 2, remainder="pad"))
    assert [gathered(b["mask"]).sum() for b in out] == sizes
    assert [b["x"].shape for b in out] == [(2,), (3,), (3,)]


def each(batch, *keys):
    return zip(*[batch[key].values for key in keys], strict=True)


# -- several workers, one after the other in this process ----------------------------


def workers(make, count, n=1, **options):
    """The datasets of ``count`` workers of ``n`` replicas each."""
    return [
        distribute_dataset(
            make(),
            mesh_of(n),
            InputOptions(**options),
            InputContext(count, worker, count * n),
        )
        for worker in range(count)
    ]


def test_workers_see_the_same_or_overlapping_rows_after_a_shuffle():
    datasets = workers(lambda: from_arrays(np.arange(8)).shuffle(0).batch(4), 2)
    for _ in range(2):  # in every epoch
        one, other = [
            [row for batch in dataset for row in gathered(batch)]
            for dataset in datasets
        ]
        assert len(one) == len(other) == 4
        assert sorted(one + other) == list(range(8))


def test_sharding_warns_with_one_worker(recwarn):
    source = from_arrays(np.arange(8)).batch(4)
    for policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA, AutoShardPolicy.FILE):
        for _ in range(2):
            dataset = distribute(source, auto_shard_policy=policy)
            assert len(list(dataset)) == 2
    assert list(recwarn) == []


@pytest.mark.parametrize("count", [1, 2])
def test_user_code_is_run_again_with_a_smaller_batch(count):
    """It is run as it is, and what it makes is split afterwards."""

    def batches():
        batch = np.arange(12)
        for step in range(2):
            yield batch * (batch[11] + step)

    for dataset in workers(lambda: batches, count, 4 // count):
        assert [batch.shape for batch in dataset] == [(3,), (3,)]
    parts = [list(d) for d in workers(lambda: batches, count, 4 // count)]
    whole = np.concatenate([gathered(own[1]) for own in parts])
    assert whole.tolist() == (np.arange(12) * 12).tolist()


def test_a_batch_that_workers_cannot_share_is_truncated():
    def source():
        return from_arrays(np.arange(20)).batch(10)

    for policy in (AutoShardPolicy.DATA, AutoShardPolicy.OFF):
        with pytest.raises(UnevenBatchError, match=r"10 rows.*remainder 2"):
            workers(source, 4, auto_shard_policy=policy)


def test_the_last_batch_loses_rows_with_several_workers():
    def source():
        return from_arrays({"x": np.arange(34)}).batch(16)

    seen = []
    for dataset in workers(source, 2, 2, remainder="pad"):
        batches = list(dataset)
        assert len(batches) == len(dataset) == 3
        for batch in batches:
            for x, mask in each(batch, "x", "mask"):
                seen += np.asarray(x)[np.asarray(mask) == 1].tolist()
    assert sorted(seen) == list(range(34))


def feed_of_one_file(worker, policy):
    rows = [{"x": np.arange(4)}, {"x": np.arange(4, 8)}]
    source = dataclasses.replace(as_source(rows), num_files=1, batch_size=4)
    options = InputOptions(auto_shard_policy=policy)
    return SplitFeed(source, 1, InputContext(2, worker, 2), options)


def test_one_file_for_two_workers_leaves_one_without_rows():
    rows = []
    for worker in range(2):
        with pytest.warns(UserWarning, match="1 files for 2 workers"):
            feed = feed_of_one_file(worker, AutoShardPolicy.AUTO)
        rows.append([batch["x"].tolist() for batch in feed.start()])
    assert rows == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    for worker in range(2):  # on all workers alike
        with pytest.raises(ValueError, match=r"each of the 2 workers.*Got 1 file"):
            feed_of_one_file(worker, AutoShardPolicy.FILE)


def test_workers_of_unequally_many_replicas_are_refused():
    with pytest.raises(ValueError, match="same number of replicas"):
        distribute_dataset([np.arange(6)], mesh_of(2), context=InputContext(2, 0, 3))
    with pytest.raises(ValueError, match="same number of replicas"):
        distribute_from_function(
            lambda context: [np.arange(2)], mesh_of(2), context=InputContext(2, 0, 3)
        )


def test_the_first_batch_of_an_iterator_is_taken_to_see_its_rows():
    """Without a batch size, equal shares of the first batch are what workers get."""
    options = {"auto_shard_policy": AutoShardPolicy.OFF}
    datasets = workers(lambda: [np.arange(6), np.arange(6, 12)], 2, **options)
    for dataset in datasets:
        rows = [gathered(batch).tolist() for batch in dataset]
        assert rows == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    with pytest.raises(ValueError, match="would take it"):
        workers(lambda: iter([np.arange(6)]), 2, **options)
    assert [list(dataset) for dataset in workers(list, 2, **options)] == [[], []]


# -- what is known beforehand --------------------------------------------------------


def test_an_endless_dataset_of_which_nothing_divides_ends_in_an_error():
    def batches():
        while True:
            yield {"x": np.zeros(3)}

    def of_unequal_rows(context):
        def batches():
            while True:
                yield np.zeros(2)
                yield np.zeros(3)

        return batches

    with pytest.raises(UnevenBatchError, match="1000 batches in a row"):
        next(iter(distribute(batches, remainder="drop")))
    dealt = distribute_from_function(
        of_unequal_rows, mesh_of(2), InputOptions(remainder="drop")
    )
    with pytest.raises(UnevenBatchError, match="1000 rounds of batches in a row"):
        next(iter(dealt))


def test_lengths():
    rows = from_arrays({"x": np.arange(10)})
    assert len(distribute(rows.batch(4))) == 3
    assert len(distribute(rows.batch(4).repeat(2))) == 6
    assert len(distribute(rows.batch(4), 4, remainder="drop")) == 2
    endless = distribute(rows.batch(4).repeat())
    assert endless.cardinality == INFINITE_CARDINALITY
    unknown = distribute(batches)
    assert unknown.cardinality == UNKNOWN_CARDINALITY
    for dataset in (endless, unknown):
        with pytest.raises(TypeError, match="no len"):
            len(dataset)


def test_element_spec():
    source = from_arrays((np.zeros([10, 3]), np.array(["a"] * 10))).shuffle(0).batch(4)
    spec = distribute(source, 4, remainder="pad").element_spec
    assert [leaf.num_replicas for leaf in spec] == [4, 4, 4]
    assert [leaf.shape for leaf in spec] == [(1, 3), (1,), (1,)]
    assert spec[0].values[0].dtype == np.float32
    # To look is not to take: the first iteration is still epoch 0.
    np.testing.assert_array_equal(next(iter(source))[0], next(source.epoch(0))[0])
    assert distribute(batches).element_spec.shape == (2,)


def test_element_spec_of_what_can_only_be_taken():
    with pytest.raises(ValueError, match="would take it"):
        _ = distribute(batches()).element_spec
    with pytest.raises(ValueError, match="empty"):
        _ = distribute([]).element_spec


# -- prefetching ---------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_never_more_than_the_stated_number_ahead(prefetch):
    made = [threading.Event() for _ in range(8)]

    def source():
        for event in made:
            event.set()
            yield np.arange(2)

    iterator = iter(distribute(source, prefetch=prefetch))
    assert not made[0].is_set()
    iterator.get_state()  # starts it
    for taken in range(3):
        if taken:
            next(iterator)
        assert made[taken + prefetch - 1].wait(10)
        # The thread now waits for a permit, which only the next line could give.
        assert not made[taken + prefetch].is_set()
    iterator.close()


def test_without_prefetching_nothing_is_made_before_it_is_asked_for():
    made = []

    def source():
        for step in range(3):
            made.append((step, threading.current_thread()))
            yield np.arange(2)

    iterator = iter(distribute(source, prefetch=0))
    assert made == []
    next(iterator)
    assert made == [(0, threading.current_thread())]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_arrives_late_or_without_its_traceback(prefetch):
    def broken_pipeline():
        yield np.arange(2)
        raise KeyError("row 17")

    iterator = iter(distribute(broken_pipeline, prefetch=prefetch))
    assert gathered(next(iterator)).tolist() == [0, 1]
    with pytest.raises(KeyError, match="row 17") as info:
        next(iterator)
    assert "broken_pipeline" in [f.name for f in traceback.extract_tb(info.tb)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"stopped with KeyError: 'row 17'"):
            next(iterator)
    wait_for_prefetch_threads_to_end()


def test_an_iterator_dropped_half_way_leaves_a_thread():
    closed = []

    def endless():
        try:
            while True:
                yield np.arange(2)
        finally:
            closed.append(threading.current_thread().name)

    dataset = distribute(endless)
    for batch in dataset:
        assert batch.shape == (1,)
        break
    del batch
    wait_for_prefetch_threads_to_end()
    assert closed == ["replicax-prefetch"]


def test_an_iterator_in_a_cycle_leaves_a_thread():
    iterator = iter(distribute(from_arrays(np.arange(2)).batch(2).repeat()))
    next(iterator)
    cycle = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()
    wait_for_prefetch_threads_to_end()


def test_a_program_that_ends_half_way_crashes_at_exit():
    program = """
import jax, numpy as np
from jax.sharding import Mesh
from replicax.datasets import from_arrays
from replicax.datasets.distributed import distribute_dataset, distribute_from_function
from replicax.datasets.sources import as_source
from replicax.datasets.split_feed import SplitFeed
jax.config.update("jax_num_cpu_devices", 2)
endless = from_arrays(np.zeros([1024, 99])).shuffle(0).batch(64).repeat()
mesh = Mesh(np.array(jax.devices()), ("replica",))
iterator = iter(distribute_dataset(endless, mesh))
for _ in range(20):
    next(iterator)
print("end")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_dropped_batches_leave_device_arrays_behind():
    gc.collect()
    before = len(jax.live_arrays())
    iterator = iter(distribute(from_arrays(np.arange(64)).batch(2).repeat()))
    next(iterator)
    iterator.close()
    assert not prefetch_threads()
    del iterator
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_close_and_context_manager(prefetch):
    dataset = distribute(from_arrays(np.arange(8)).batch(2), prefetch=prefetch)
    with iter(dataset) as iterator:
        next(iterator)
    assert not prefetch_threads()
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_finished_iterator_stays_finished_and_its_thread_ends():
    iterator = iter(distribute(from_arrays(np.arange(4)).batch(2)))
    assert len(list(iterator)) == 2
    wait_for_prefetch_threads_to_end()
    with pytest.raises(StopIteration):
        next(iterator)


def test_fifty_epochs_leave_as_many_threads_as_before():
    dataset = distribute(from_arrays(np.arange(8)).shuffle(0).batch(4))
    for _ in range(50):
        assert sum(1 for _ in dataset) == 2
    wait_for_prefetch_threads_to_end()


def test_prefetching_does_not_change_what_arrives():
    def epochs(prefetch):
        source = from_arrays(np.arange(24)).shuffle(5).batch(8)
        dataset = distribute(source, 4, prefetch=prefetch)
        return [[gathered(b).tolist() for b in dataset] for _ in range(2)]

    assert epochs(0) == epochs(1) == epochs(4)


def test_threads_that_share_an_iterator_all_come_to_its_end():
    data = from_arrays(np.arange(40)).batch(2)
    iterator = iter(distribute_dataset(data, Mesh(jax.devices()[:2], ("replica",))))
    counts, lock = [], threading.Lock()

    def consume():
        seen = 0
        for _ in iterator:
            seen += 1
        with lock:
            counts.append(seen)

    threads = [threading.Thread(target=consume, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(counts) == 3 and sum(counts) == 20


@pytest.mark.parametrize("prefetch", [0, 2])
def test_64_bit_values_keep_their_bits_where_jax_is_told_so(prefetch):
    big = np.array([2**40 + 1, 5])
    dataset = distribute_dataset(
        from_arrays(big).batch(2),
        Mesh(jax.devices()[:2], ("replica",)),
        InputOptions(prefetch=prefetch),
    )
    with jax.enable_x64(True):
        (batch,) = dataset
        assert [int(v[0]) for v in batch.values] == [2**40 + 1, 5]


def test_time_differences_stay_on_the_host():
    days = np.array([1, 2], "timedelta64[D]")
    dataset = distribute_dataset([{"t": days}], Mesh(jax.devices()[:2], ("replica",)))
    (batch,) = dataset
    assert [v.tolist() for v in batch["t"].values] == [[d.item()] for d in days]


@pytest.mark.parametrize(
    "made",
    [
        (np.arange(8), np.arange(8)),
        {"x": np.arange(8)},
        np.arange(8).reshape(2, 4),
        from_arrays(np.arange(8)).batch(2),
    ],
)
def test_what_a_function_returns_is_refused_as_a_dataset_would_be(made):
    dataset = distribute(lambda: made)
    with pytest.raises(TypeError, match="iterator of global batches"):
        next(iter(dataset))


def test_an_error_that_cannot_be_printed_stops_the_iteration_as_any_other():
    class Bad(Exception):
        def __str__(self):
            raise ValueError("no text")

    def batches():
        yield np.zeros(4)
        raise Bad

    for prefetch in (0, 2):
        iterator = iter(distribute(batches, prefetch=prefetch))
        next(iterator)
        with pytest.raises(Bad):
            next(iterator)
        with pytest.raises(RuntimeError, match="stopped with Bad"):
            next(iterator)
