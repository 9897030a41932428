"""Several workers share a dataset: no row is lost or read twice, whatever the sizes."""

import itertools
import warnings

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from replicax.datasets import (
    AutoShardPolicy,
    DistributedDataset,
    InputContext,
    InputOptions,
    from_arrays,
    from_files,
    shard_plan,
)
from replicax.datasets.distributed import distribute_dataset
from replicax.datasets.rebatch import rebatch
from replicax.datasets.sharding import batch_sizes_for_worker, ceil_split, shard
from replicax.datasets.sources import Source, as_source
from replicax.datasets.split_feed import SplitFeed

from replicax.errors import UnevenBatchError

AUTO, DATA, FILE, HINT, OFF = (
    AutoShardPolicy[name] for name in ("AUTO", "DATA", "FILE", "HINT", "OFF")
)

many = settings(max_examples=200, deadline=None, derandomize=True, database=None)
quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)
counts = st.integers(1, 8)
# Workers and replicas of each, which the eight devices suffice for.
CLUSTERS = [(w, r) for w in range(1, 9) for r in range(1, 9) if w * r <= 8]
clusters = st.sampled_from(CLUSTERS)


several = clusters.filter(lambda cluster: cluster[0] > 1)


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def balanced(sizes):
    return max(sizes) - min(sizes) <= 1


# -- the rules -----------------------------------------------------------------------


@given(st.integers(0, 60), counts)
@many
def test_shards_are_disjoint_complete_and_balanced(num_items, num_shards):
    shards = [shard(range(num_items), num_shards, i) for i in range(num_shards)]
    assert sorted(item for own in shards for item in own) == list(range(num_items))
    assert balanced([len(own) for own in shards])
    assert all(item % num_shards == i for i, own in enumerate(shards) for item in own)


@given(st.integers(0, 60), counts)
@many
def test_ceil_split_cuts_a_batch_in_order_into_equal_parts_and_a_rest(rows, parts):
    batch = list(range(rows))
    split = [batch[part] for part in ceil_split(rows, parts)]
    assert len(split) == parts
    assert joined(split) == batch
    share = -(-rows // parts)
    sizes = [len(part) for part in split]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(size not in (0, share) for size in sizes) <= 1


@given(st.integers(0, 60), counts, counts)
@many
def test_the_sizes_of_every_step_make_up_the_batch(batch, workers, replicas):
    sizes = [
        batch_sizes_for_worker(batch, workers, replicas, worker)
        for worker in range(workers)
    ]
    for own in sizes:
        assert len(own) == workers * replicas
        assert sum(own) == batch
        assert balanced(own)
    steps = np.array(sizes).reshape(workers, workers, replicas)
    assert (steps.sum(axis=(0, 2)) == batch).all()


@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
)
@many
def test_rebatching_keeps_rows_and_order(given_sizes, sizes):
    edges = np.cumsum([0, *given_sizes])
    batches = [np.arange(a, b) for a, b in itertools.pairwise(edges)]
    new = [batch.tolist() for batch in rebatch(batches, sizes)]
    assert joined(new) == list(range(edges[-1]))
    wanted = [sizes[i % len(sizes)] for i in range(len(new))]
    assert [len(batch) for batch in new[:-1]] == wanted[:-1]
    assert not new or len(new[-1]) <= wanted[-1]


@given(st.integers(0, 40), st.integers(1, 12), clusters)
@many
def test_cyclic_sizes_cut_all_rows_for_the_replicas_of_a_worker(rows, batch, cluster):
    workers, replicas = cluster
    for worker in range(workers):
        sizes = batch_sizes_for_worker(batch, workers, replicas, worker)
        parts = list(rebatch(from_arrays(np.arange(rows)).batch(batch), sizes))
        assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(rows))


# -- workers, simulated in one process -----------------------------------------------


def mesh_of_worker(worker, replicas):
    devices = jax.devices()[worker * replicas : (worker + 1) * replicas]
    return Mesh(np.array(devices), ("replica",))


def on_workers(dataset, workers, replicas, **options):
    """What each worker distributes to its own devices."""
    made = []
    for worker in range(workers):
        mesh = mesh_of_worker(worker, replicas)
        context = InputContext(workers, worker, workers * replicas)
        chosen = InputOptions(prefetch=0, **options)
        if isinstance(dataset, Source):
            feed = SplitFeed(dataset, replicas, context, chosen)
            made.append(DistributedDataset(feed, mesh, chosen))
        else:
            made.append(distribute_dataset(dataset, mesh, chosen, context))
    return made


def rows_of(value):
    """The rows of the replicas of one worker, in their order."""
    return np.concatenate([np.asarray(part) for part in value.values]).tolist()


def real_rows_of(batch):
    """The rows of a padded batch that are no filler."""
    mask = np.array(rows_of(batch["mask"]), bool)
    return np.array(rows_of(batch["x"]))[mask].tolist()


def in_steps(workers):
    """The rows of all workers in each step, in worker and replica order."""
    steps = zip(*workers, strict=True)
    return [joined(map(rows_of, step)) for step in steps]


def of_files(files, batch_size):
    """A source of files, given as lists of rows."""

    def source_of(numbers, rows):
        joined = np.array([row for n in numbers for row in files[n]], np.int32)
        return as_source(from_arrays({"x": joined}).batch(rows))

    source = source_of(range(len(files)), batch_size)
    return Source(
        start=source.start,
        peek=source.peek,
        sizes=source.sizes,
        batch_size=batch_size,
        num_files=len(files),
        of_files=source_of,
    )


@given(st.integers(0, 40), st.integers(1, 4), clusters, st.sampled_from([AUTO, DATA]))
@quick
def test_data_the_parts_of_all_workers_are_the_global_batch(rows, each, cluster, how):
    workers, replicas = cluster
    batch = each * workers * replicas
    dataset = from_arrays(np.arange(rows)).batch(batch, drop_remainder=True)
    found = in_steps(on_workers(dataset, workers, replicas, auto_shard_policy=how))
    assert found == [x.tolist() for x in dataset]


@given(st.integers(0, 40), st.integers(1, 9), clusters)
@quick
def test_data_padded_parts_are_the_global_batch_and_filler(rows, batch, cluster):
    workers, replicas = cluster
    dataset = from_arrays({"x": np.arange(rows)}).batch(batch)
    found = on_workers(dataset, workers, replicas, remainder="pad")
    steps = list(zip(*found, strict=True))
    assert len(steps) == len(dataset)
    for step, wanted in zip(steps, dataset, strict=True):
        real = wanted["x"].tolist()
        x = joined(rows_of(part["x"]) for part in step)
        mask = joined(rows_of(part["mask"]) for part in step)
        assert x[: len(real)] == real
        assert mask == [1.0] * len(real) + [0.0] * (len(x) - len(real))
        assert len({part["x"].shape for part in step}) == 1


@given(st.integers(0, 40), st.integers(1, 9), clusters)
@quick
def test_data_without_a_choice_all_workers_refuse_or_none(rows, batch, cluster):
    workers, replicas = cluster
    dataset = from_arrays(np.arange(rows)).batch(batch)
    even = all(len(x) % (workers * replicas) == 0 for x in dataset)
    for worker in range(workers):
        context = InputContext(workers, worker, workers * replicas)
        ask = (dataset, mesh_of_worker(worker, replicas), None, context)
        if even:
            assert len(distribute_dataset(*ask)) == len(dataset)
        else:
            with pytest.raises(UnevenBatchError):
                distribute_dataset(*ask)


@given(st.lists(st.integers(0, 6), min_size=8, max_size=12), counts, several)
@quick
def test_file_every_row_of_every_file_is_read_by_one_worker(sizes, each, cluster):
    workers, replicas = cluster
    files = [[100 * n + row for row in range(size)] for n, size in enumerate(sizes)]
    source = of_files(files, each * workers)
    found = on_workers(
        source, workers, replicas, auto_shard_policy=FILE, remainder="pad"
    )
    batches = [list(worker) for worker in found]
    assert len({batch["x"].shape for worker in batches for batch in worker}) <= 1
    seen = [joined(map(real_rows_of, worker)) for worker in batches]
    assert sorted(joined(seen)) == joined(files)
    for worker, own in enumerate(seen):
        assert {row // 100 for row in own} <= set(range(worker, len(files), workers))


def test_auto_reads_files_of_its_own_if_there_is_one_a_worker():
    source = of_files([[0, 1], [2, 3], [4, 5]], 4)
    found = [
        [rows_of(batch["x"]) for batch in worker] for worker in on_workers(source, 2, 1)
    ]
    assert found == [[[0, 1], [4, 5]], [[2, 3]]]


def test_auto_falls_back_to_rows_with_a_notice_if_files_are_too_few():
    source = of_files([[0, 1, 2, 3]], 4)
    with pytest.warns(UserWarning, match="1 files for 2 workers"):
        workers = on_workers(source, 2, 1)
    assert [[rows_of(b["x"]) for b in worker] for worker in workers] == [
        [[0, 1]],
        [[2, 3]],
    ]


def test_one_worker_hears_nothing_about_sharding():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (worker,) = on_workers(of_files([[0, 1]], 2), 1, 2)
    assert [rows_of(batch["x"]) for batch in worker] == [[0, 1]]


@given(st.integers(0, 9), st.integers(1, 3), st.integers(1, 2), several)
@quick
def test_off_each_worker_sees_all_rows(num_shares, each, epochs, cluster):
    workers, replicas = cluster
    share = each * replicas
    rows = num_shares * share
    dataset = from_arrays(np.arange(rows)).batch(share * workers).repeat(epochs)
    for worker in on_workers(dataset, workers, replicas, auto_shard_policy=OFF):
        parts = [rows_of(batch) for batch in worker]
        assert joined(parts) == list(range(rows)) * epochs
        assert [len(part) for part in parts] == [share] * len(worker)


def test_off_refuses_beforehand_what_will_not_divide():
    dataset = from_arrays(np.arange(9)).batch(6)
    for remainder in ("error", "drop"):
        with pytest.raises(UnevenBatchError, match="3 rows"):
            on_workers(dataset, 2, 2, auto_shard_policy=OFF, remainder=remainder)


def test_off_takes_the_share_of_the_first_batch_that_has_rows():
    batches = [np.arange(0), np.arange(4), np.arange(4, 8)]
    for worker in on_workers(lambda: iter(batches), 2, 1, auto_shard_policy=OFF):
        assert [rows_of(b) for b in worker] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_off_of_nothing_is_nothing():
    for worker in on_workers([], 2, 1, auto_shard_policy=OFF):
        assert list(worker) == []


@given(st.integers(1, 5), st.integers(1, 4), clusters)
@quick
def test_hint_leaves_the_batches_as_they_are(num_batches, each, cluster):
    workers, replicas = cluster
    rows = each * replicas
    dataset = from_arrays(np.arange(num_batches * rows)).batch(rows)
    for worker in on_workers(dataset, workers, replicas, auto_shard_policy=HINT):
        assert [rows_of(batch) for batch in worker] == [x.tolist() for x in dataset]


@pytest.mark.parametrize("policy", list(AutoShardPolicy))
def test_workers_of_unequally_many_replicas_are_refused(policy):
    options = InputOptions(auto_shard_policy=policy)
    with pytest.raises(ValueError, match=r"5 replicas.*2 workers.*one has 2"):
        distribute_dataset(
            from_arrays(np.arange(10)).batch(10),
            mesh_of_worker(0, 2),
            options,
            InputContext(2, 0, 5),
        )


# -- the plan ------------------------------------------------------------------------


def planned_steps(plan):
    steps = zip(*plan.rows, strict=True)
    return [joined(joined(worker) for worker in step) for step in steps]


@given(st.integers(0, 40), st.integers(1, 9), clusters)
@quick
def test_the_plan_is_what_arrives(rows, batch, cluster):
    workers, replicas = cluster
    dataset = from_arrays({"x": np.arange(rows)}).batch(batch)
    plan = shard_plan(
        dataset,
        num_workers=workers,
        num_replicas_per_worker=replicas,
        remainder="pad",
    )
    assert plan.left_out == ()
    for planned, worker in zip(
        plan.rows,
        on_workers(dataset, workers, replicas, remainder="pad"),
        strict=True,
    ):
        arrived = [
            tuple(
                tuple(
                    row if real else None
                    for row, real in zip(x.tolist(), m.tolist(), strict=True)
                )
                for x, m in zip(batch["x"].values, batch["mask"].values, strict=True)
            )
            for batch in worker
        ]
        assert list(planned) == arrived


def test_the_plan_of_figures_is_that_of_a_dataset():
    by_figures = shard_plan(rows=12, batch_size=4, num_workers=2)
    assert by_figures == shard_plan(from_arrays(np.zeros(12)).batch(4), num_workers=2)
    assert planned_steps(by_figures) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert by_figures == shard_plan([np.zeros(4)] * 3, num_workers=2)


def test_the_plan_of_files(tmp_path):
    for n, rows in enumerate([3, 1, 2]):
        np.savez(tmp_path / f"{n}.npz", x=np.zeros(rows))
    dataset = from_files(f"{tmp_path}/*.npz").batch(4)
    plan = shard_plan(dataset, num_workers=2, remainder="pad")
    assert plan == shard_plan(
        files=[3, 1, 2], batch_size=4, num_workers=2, remainder="pad"
    )
    assert plan.policy is FILE
    assert plan.files == ((0, 2), (1,))
    assert plan.rows == ((((0, 1),), ((2, 4),), ((5, None),)), (((3, None),),))
    assert "files | 0 2" in str(plan)
    assert "at its end" in str(plan)


def test_the_plan_tells_what_is_left_out():
    plan = shard_plan(rows=7, batch_size=4, num_workers=2, remainder="drop")
    assert plan.left_out == (4, 5, 6)
    assert str(plan).endswith("Left out: 4-6.")


def test_the_plan_of_one_worker_has_all_rows_and_files():
    plan = shard_plan(files=[2, 2], batch_size=2, num_workers=1)
    assert plan.files == ((0, 1),)
    assert planned_steps(plan) == [[0, 1], [2, 3]]


def test_a_long_plan_is_shown_in_part():
    lines = str(shard_plan(rows=200, batch_size=2, num_workers=2)).splitlines()
    assert len(lines) < 20
    assert any(line.startswith(" ...") for line in lines)
    assert "198" in lines[-2]


def test_the_plan_refuses_what_the_dataset_will():
    with pytest.raises(UnevenBatchError, match="last batch"):
        shard_plan(rows=5, batch_size=4, num_workers=2)
    with pytest.raises(ValueError, match="1 files"):
        shard_plan(files=[4], batch_size=4, num_workers=2, policy=FILE)


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"rows": 4},
        {"batch_size": 2},
        {"rows": 4, "files": [4], "batch_size": 2},
        {"dataset": [np.zeros(2)], "rows": 4, "batch_size": 2},
        {"dataset": [np.zeros(2)], "batch_size": 2},
    ],
)
def test_the_plan_wants_a_dataset_or_figures(figures):
    with pytest.raises(TypeError, match="takes a dataset; or batch_size="):
        shard_plan(**figures, num_workers=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("num_workers", 0),
        ("num_replicas_per_worker", 0),
        ("rows", -1),
        ("files", [3, -1]),
    ],
)
def test_the_plan_refuses_figures_that_are_too_low(name, value):
    figures = {"rows": 4, "batch_size": 2, "num_workers": 2, name: value}
    if name == "files":
        del figures["rows"]
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        shard_plan(**figures)


def test_the_plan_does_not_go_through_a_dataset_without_end(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(4))
    files = from_files(tmp_path / "a.npz").batch(2)
    endless = files.map(lambda batch: batch).repeat()
    with pytest.raises(ValueError, match="has no end"):
        shard_plan(endless, num_workers=2, policy=DATA)
    known = shard_plan(files.repeat(), num_workers=2, policy=DATA)
    assert planned_steps(known) == [[0, 1], [2, 3]]
