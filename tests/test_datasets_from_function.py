"""Batches that a function makes for single replicas, dealt out to them."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from replicax.datasets import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    InputContext,
    InputOptions,
    InputReplicationMode,
    from_arrays,
)
from replicax.datasets.dealt_feed import DealtFeed
from replicax.datasets.distributed import distribute_from_function
from replicax.datasets.sources import as_source
from replicax.datasets.split_feed import SplitFeed

import replicax as rx
from replicax.errors import UnevenBatchError

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
PER_REPLICA = InputReplicationMode.PER_REPLICA


def distribute(dataset_fn, n=2, *, context=None, **options):
    mesh = Mesh(np.array(jax.devices()[:n]), ("replica",))
    return distribute_from_function(dataset_fn, mesh, InputOptions(**options), context)


def of(*batches):
    """A function that returns these batches, whatever the context."""
    return lambda context: [np.asarray(batch) for batch in batches]


def per_replica(*datasets):
    """A function that returns one of these for each replica."""
    return lambda context: datasets[context.input_pipeline_id]


def rows(value):
    return [np.asarray(part).tolist() for part in value.values]


def rows_and_masks(batch):
    return rows(batch["x"]), rows(batch["mask"])


# -- the function and its context ----------------------------------------------------


def contexts_given(n, **kwargs):
    seen = []

    def dataset_fn(context):
        seen.append(context)
        return [np.arange(2)] * n

    distribute(dataset_fn, n, **kwargs)
    return seen


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_function_is_called_once_with_the_replicas_of_all_workers(n):
    assert contexts_given(n) == [InputContext(1, 0, n)]
    worker = InputContext(3, 2, 3 * n)
    assert contexts_given(n, context=worker) == [worker]


@pytest.mark.parametrize("n", [1, 2, 8])
def test_or_once_for_each_replica(n):
    contexts = contexts_given(n, replication_mode=PER_REPLICA)
    assert contexts == [InputContext(n, replica, n) for replica in range(n)]


def test_the_replicas_of_several_workers_are_counted_through():
    contexts = contexts_given(
        2, replication_mode=PER_REPLICA, context=InputContext(3, 1, 6)
    )
    assert contexts == [InputContext(6, 2, 6), InputContext(6, 3, 6)]


def test_the_context_of_a_strategy_and_a_batch_size_from_it(strategy):
    n = strategy.num_replicas_in_sync
    seen = []

    def dataset_fn(context):
        seen.append(context)
        size = context.get_per_replica_batch_size(2 * n)
        return from_arrays(np.arange(4 * n)).batch(size)

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    assert seen == [InputContext(1, 0, n)]
    flat = [row for batch in dataset for part in rows(batch) for row in part]
    assert flat == list(range(4 * n))


def test_context_validates_and_shows_itself():
    context = InputContext(2, 1, 4)
    assert str(context) == "InputContext(input pipeline id 1, total: 2)"
    assert context.get_per_replica_batch_size(12) == 3
    with pytest.raises(ValueError, match=r"10 .* 4 replicas \(remainder 2\).* is 12"):
        context.get_per_replica_batch_size(10)
    for wrong in [(0, 0, 1), (1, 0, 0), (2, 2, 4), (2, -1, 4)]:
        with pytest.raises(ValueError):
            InputContext(*wrong)


def test_a_plain_iterator_is_only_gone_through_once():
    def dataset_fn(context):
        yield from [np.arange(2), np.arange(2)]

    dataset = distribute(dataset_fn)
    assert len(list(dataset)) == 1
    with pytest.raises(RuntimeError, match="iterated only once"):
        next(iter(dataset))


# -- dealing -------------------------------------------------------------------------


def test_batches_are_dealt_to_the_replicas_in_turn():
    dataset = distribute(lambda _: from_arrays(np.arange(8)).batch(2))
    assert [rows(batch) for batch in dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert len(dataset) == 2


def test_each_replica_gets_the_batches_of_its_own_dataset():
    dataset = distribute(
        lambda context: from_arrays(np.arange(8)[context.input_pipeline_id :: 2]).batch(
            2
        ),
        replication_mode=PER_REPLICA,
    )
    assert [rows(batch) for batch in dataset] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    assert len(dataset) == 2


def test_every_iteration_is_the_next_epoch():
    dataset = distribute(lambda _: from_arrays(np.arange(12)).shuffle(3).batch(2), 3)
    source = from_arrays(np.arange(12)).shuffle(3).batch(4)
    for epoch in range(2):
        flat = [row for batch in dataset for part in rows(batch) for row in part]
        assert flat == [row for batch in source.epoch(epoch) for row in batch]


def test_parts_lie_on_the_devices_of_their_replicas():
    (batch,) = distribute(of([1, 2], [3, 4]))
    assert batch.is_stacked and batch.is_data
    assert [part.devices() for part in batch.values] == [{d} for d in jax.devices()[:2]]


def test_nested_structures():
    def dataset_fn(context):
        for step in range(4):
            yield {"a": (np.full([2, 3], step), None), "b": [np.full(2, -step)]}

    first, second = distribute(dataset_fn)
    assert first["a"][0].shape == (2, 3) and first["a"][1] is None
    assert rows(second["b"][0]) == [[-2, -2], [-3, -3]]


def test_strings_stay_on_the_host_also_when_their_lengths_differ():
    names = [np.array(["a", "bc"]), np.array(["defg", "h"])]
    (batch,) = distribute(lambda _: [{"name": name} for name in names])
    assert rows(batch["name"]) == [["a", "bc"], ["defg", "h"]]
    assert all(isinstance(part, np.ndarray) for part in batch["name"].values)


def test_ragged_rows_stay_on_the_host_for_each_replica():
    def ragged(*lengths):
        out = np.empty(len(lengths), object)
        out[:] = [np.arange(n) for n in lengths]
        return out

    (batch,) = distribute(lambda _: [{"r": ragged(1, 3)}, {"r": ragged(0, 2)}])
    lengths = [[len(row) for row in part] for part in batch["r"].values]
    assert lengths == [[1, 3], [0, 2]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_left_on_the_host_parts_are_numpy_arrays(prefetch):
    dataset = distribute(
        of([0.5, 1.5], [2.5, 3.5]), prefetch=prefetch, fetch_to_device=False
    )
    (batch,) = dataset
    assert rows(batch) == [[0.5, 1.5], [2.5, 3.5]]
    assert batch.is_data
    for part in batch.values:
        assert type(part) is np.ndarray and part.dtype == np.float64
    assert dataset.element_spec.values[0].dtype == np.float64


def test_parts_on_the_host_can_enter_a_step(two):
    dataset = two.distribute_datasets_from_function(
        of([1.0, 2.0], [3.0, 4.0]), InputOptions(fetch_to_device=False)
    )
    (batch,) = dataset
    total = two.run(lambda x: rx.get_replica_context().all_reduce("sum", x), (batch,))
    assert np.asarray(total).tolist() == [4.0, 6.0]


@pytest.mark.parametrize("mode", list(InputReplicationMode))
@pytest.mark.parametrize("remainder", ["error", "pad"])
def test_a_buffer_that_a_generator_uses_again_does_not_change_what_was_dealt(
    mode, remainder
):
    def reusing():
        buffer = np.empty(2)
        for step in range(4):
            buffer[:] = step
            yield {"x": buffer}

    dataset = distribute(
        lambda context: reusing, remainder=remainder, replication_mode=mode
    )
    got = [rows(batch["x"]) for batch in dataset]
    if mode is PER_REPLICA:
        assert got == [[[k, k], [k, k]] for k in range(4)]
    else:
        assert got == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


# -- the last round and unequal rows -------------------------------------------------


def test_a_known_incomplete_last_round_is_refused_beforehand():
    with pytest.raises(UnevenBatchError, match=r"Round 1 has .* only 1 of 2 replicas"):
        distribute(of([1], [2], [3]))
    with pytest.raises(UnevenBatchError, match=r"Round 1 has .* only 1 of 2 replicas"):
        distribute(
            per_replica([np.ones(1)], [np.ones(1)] * 2), replication_mode=PER_REPLICA
        )


def test_an_unknown_one_when_it_comes():
    iterator = iter(distribute(lambda _: lambda: iter([np.ones(2)] * 3)))
    next(iterator)
    with pytest.raises(UnevenBatchError, match=r"Round 1 has .* only 1 of 2 replicas"):
        next(iterator)


def test_known_unequal_rows_are_refused_beforehand():
    def shard(n):
        return from_arrays(np.arange(n)).batch(4)

    with pytest.raises(
        UnevenBatchError, match=r"batches of 2 and 4 rows, .* 3 replicas"
    ):
        distribute(lambda _: shard(10), 3)
    with pytest.raises(
        UnevenBatchError, match=r"batches of 2 and 4 rows, .* 2 replicas"
    ):
        distribute(per_replica(shard(8), shard(6)), replication_mode=PER_REPLICA)
    assert len(distribute(lambda _: shard(10), 1)) == 3
    both = distribute(per_replica(shard(6), shard(6)), replication_mode=PER_REPLICA)
    assert [batch.shape for batch in both] == [(4,), (2,)]


def test_unequal_rows_are_refused_when_they_come():
    iterator = iter(distribute(of([1, 2], [3, 4], [5, 6], [7], [8, 9], [10])))
    next(iterator)
    with pytest.raises(UnevenBatchError, match=r"Round 1 .*replica 0: 2, replica 1: 1"):
        next(iterator)


@pytest.mark.parametrize(
    ("remainder", "split", "dealt"),
    [
        ("error", 4, 2),
        ("pad", 4, 2),
        ("drop", UNKNOWN_CARDINALITY, UNKNOWN_CARDINALITY),
    ],
)
def test_lengths_where_only_the_number_of_batches_is_known(remainder, split, dealt):
    source = dataclasses.replace(as_source(lambda: [{"x": np.ones(2)}] * 4), count=4)
    options = InputOptions(remainder=remainder)
    assert SplitFeed(source, 2, InputContext(1, 0, 2), options).cardinality == split
    assert DealtFeed([source], 2, options).cardinality == dealt


@pytest.mark.parametrize("mode", list(InputReplicationMode))
@pytest.mark.parametrize("repeats", [None, 0])
def test_no_batches_at_all_are_even(mode, repeats):
    def dataset_fn(context):
        num_rows = 0 if repeats is None else 5 + context.input_pipeline_id
        return from_arrays(np.zeros(num_rows)).batch(4).repeat(repeats)

    dataset = distribute(dataset_fn, replication_mode=mode)
    assert len(dataset) == 0
    assert list(dataset) == []


@pytest.mark.parametrize("error", [of([1], [2], [3]), of([1, 2], [3])])
def test_the_uneven_messages_name_the_choices(error):
    with pytest.raises(UnevenBatchError) as info:
        list(distribute(error))
    for part in ('remainder="drop"', 'remainder="pad"', "mask"):
        assert part in str(info.value)


def test_dropping_leaves_out_incomplete_and_unequal_rounds():
    dataset = distribute(
        of([0, 1], [2], [3, 4], [5, 6], [7, 8], [9], [10]), remainder="drop"
    )
    assert [rows(batch) for batch in dataset] == [[[3, 4], [5, 6]]]
    assert dataset.cardinality == UNKNOWN_CARDINALITY
    alike = distribute(of([0], [1], [2]), remainder="drop")
    assert [rows(batch) for batch in alike] == [[[0], [1]]]
    assert len(alike) == 1


def test_dropping_ends_with_the_shortest_dataset():
    endless = from_arrays(np.arange(4)).batch(2).repeat()
    short = from_arrays(np.arange(10, 16)).batch(2)
    dataset = distribute(
        per_replica(endless, short), remainder="drop", replication_mode=PER_REPLICA
    )
    assert len(dataset) == 3
    assert [rows(batch)[1] for batch in dataset] == [[10, 11], [12, 13], [14, 15]]


def test_padding_fills_an_incomplete_last_round():
    dataset = distribute(
        lambda _: from_arrays({"x": np.arange(1, 6)}).batch(2), remainder="pad"
    )
    assert len(dataset) == 2
    assert [rows_and_masks(batch) for batch in dataset] == [
        ([[1, 2], [3, 4]], [[1, 1], [1, 1]]),
        ([[5, 0], [0, 0]], [[1, 0], [0, 0]]),
    ]


def test_padding_goes_on_to_the_longest_dataset():
    def dataset_fn(context):
        count = (3, 1, 0)[context.input_pipeline_id]
        return [{"x": np.full(2, k + 1)} for k in range(count)]

    dataset = distribute(dataset_fn, 3, remainder="pad", replication_mode=PER_REPLICA)
    assert len(dataset) == 3
    zeros, ones = [0, 0], [1, 1]
    assert [rows_and_masks(batch) for batch in dataset] == [
        ([[1, 1], [1, 1], zeros], [ones, ones, zeros]),
        ([[2, 2], zeros, zeros], [ones, zeros, zeros]),
        ([[3, 3], zeros, zeros], [ones, zeros, zeros]),
    ]


def test_padding_fills_strings_and_pairs_too():
    batches = [(np.array(["a", "b"]), np.ones(2)), (np.array(["c"]), np.ones(1))]
    ((name, y, mask),) = distribute(lambda _: batches, 3, remainder="pad")
    assert rows(name) == [["a", "b"], ["c", ""], ["", ""]]
    assert rows(y) == rows(mask) == [[1, 1], [1, 0], [0, 0]]


@quick
@given(
    sizes=st.lists(st.integers(0, 4), max_size=9),
    n=st.integers(1, 4),
    prefetch=st.sampled_from([0, 2]),
)
def test_padding_loses_no_row_and_keeps_their_order(sizes, n, prefetch):
    ends = np.cumsum([0, *sizes])
    batches = [{"x": np.arange(a, b)} for a, b in itertools.pairwise(ends)]
    dataset = distribute(lambda _: batches, n, remainder="pad", prefetch=prefetch)
    out = [rows_and_masks(batch) for batch in dataset]
    assert len(out) == len(dataset) == -(-len(sizes) // n)
    real = [
        row
        for xs, masks in out
        for x, mask in zip(xs, masks, strict=True)
        for row, there in zip(x, mask, strict=True)
        if there
    ]
    assert real == list(range(sum(sizes)))
    if sizes and sizes[0] == max(sizes):
        assert len({len(part) for xs, masks in out for part in [*xs, *masks]}) == 1


def test_lengths_that_are_not_finite():
    endless = from_arrays(np.arange(4)).batch(2).repeat()
    for options in ({}, {"remainder": "pad"}, {"remainder": "drop"}):
        assert distribute(lambda _: endless, **options).cardinality == (
            INFINITE_CARDINALITY
        )
    both = {"replication_mode": PER_REPLICA}
    dataset = distribute(per_replica(endless, endless), **both)
    assert dataset.cardinality == INFINITE_CARDINALITY
    mixed = per_replica(endless, [np.ones(2)])
    assert (
        distribute(mixed, remainder="pad", **both).cardinality == INFINITE_CARDINALITY
    )
    with pytest.raises(UnevenBatchError, match=r"only 1 of 2 replicas"):
        distribute(mixed, **both)
    unknown = distribute(lambda _: lambda: iter([np.ones(2)]), **both)
    assert unknown.cardinality == UNKNOWN_CARDINALITY


# -- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset_fn", "error", "match"),
    [
        ([np.ones(2)], TypeError, "takes a function .* use experimental_distribute_"),
        (None, TypeError, "takes a function"),
        (lambda context: None, TypeError, r"Got None.*return statement"),
        (lambda context: 42, TypeError, "Got 42"),
        (lambda context: np.ones([2, 2]), TypeError, "from_arrays"),
        (lambda context: {"x": np.ones(2)}, TypeError, "from_arrays"),
        (
            lambda context: from_arrays(np.ones(4)),
            ValueError,
            r"Call \.batch\(batch_size\)",
        ),
        (lambda context: distribute(of([1], [2])), TypeError, "distributed already"),
        (lambda: [np.ones(2)], TypeError, "positional argument"),
    ],
)
@pytest.mark.parametrize("mode", list(InputReplicationMode))
def test_what_is_no_function_or_makes_no_dataset(dataset_fn, error, match, mode):
    with pytest.raises(error, match=re.compile(match, re.DOTALL)):
        distribute(dataset_fn, replication_mode=mode)


def test_an_error_of_the_function_is_passed_on():
    def dataset_fn(context):
        raise FileNotFoundError("train.csv")

    with pytest.raises(FileNotFoundError, match=r"train\.csv"):
        distribute(dataset_fn)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([{"x": np.ones(2)}, {"y": np.ones(2)}], "must have one structure"),
        ([np.ones([2, 3]), np.ones([2, 4])], r"rows of float64\[3\] and float64\[4\]"),
        ([np.ones(2), np.ones(2, int)], r"rows of float64\[\] and int64\[\]"),
        ([np.ones(2), None], "at least one array"),
        ([np.ones(2), 3], "scalar at batch"),
    ],
)
def test_batches_of_a_round_that_do_not_fit_together(parts, match):
    with pytest.raises(ValueError, match=match):
        list(distribute(lambda _: lambda: iter(parts)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"replication_mode": "PER_REPLICA"}, "replication_mode must be of type Input"),
        ({"auto_shard_policy": 1}, "auto_shard_policy must be of type AutoShardPolicy"),
        ({"fetch_to_device": 0}, "fetch_to_device must be of type bool. Got 0"),
    ],
)
def test_options_of_a_wrong_type(options, match):
    with pytest.raises(TypeError, match=match):
        InputOptions(**options)


def test_options_that_are_none(two):
    for distribute in (
        two.distribute_datasets_from_function,
        two.experimental_distribute_dataset,
    ):
        with pytest.raises(TypeError, match=r"an InputOptions\. Got 2"):
            distribute(of([1], [2]), 2)


def test_a_dataset_cannot_be_made_for_each_replica(two):
    with pytest.raises(ValueError, match="distribute_datasets_from_function"):
        two.experimental_distribute_dataset(
            [np.ones(2)], InputOptions(replication_mode=PER_REPLICA)
        )


def test_not_inside_of_a_step(two):
    def step(x):
        two.distribute_datasets_from_function(of([1], [2]))
        return x

    with pytest.raises(rx.ContextError, match="distribute_datasets_from_function"):
        two.run(step, (1.0,))


def test_an_uneven_round_across_epochs_is_known_beforehand():
    with pytest.raises(UnevenBatchError, match="batches of 4 and 8 rows"):
        distribute(lambda _: from_arrays(np.arange(20)).batch(8).repeat(2))


@pytest.mark.parametrize("repeats", [1, 2, 3, 4, None])
@pytest.mark.parametrize("num_rows", [3, 8, 10, 20])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_what_is_refused_beforehand_is_uneven_and_all_else_is_even(
    num_rows, n, repeats
):
    def dataset_fn(context):
        return from_arrays(np.arange(num_rows)).batch(4).repeat(repeats)

    sizes = [len(batch) for batch in itertools.islice(dataset_fn(None), 10 * n)]
    rounds = [sizes[start : start + n] for start in range(0, len(sizes), n)]
    if all(len(sizes) == n and len({*sizes}) == 1 for sizes in rounds):
        dataset = distribute(dataset_fn, n, prefetch=0)
        assert len(list(itertools.islice(dataset, 10))) == len(rounds)
    else:
        with pytest.raises(UnevenBatchError):
            distribute(dataset_fn, n)


@pytest.mark.parametrize("repeats", [2, None])
def test_the_epochs_of_each_replicas_dataset_are_compared_beforehand(repeats):
    def made(*shards):
        datasets = [
            from_arrays(np.arange(num_rows)).batch(batch).repeat(repeats)
            for num_rows, batch in shards
        ]
        return distribute(per_replica(*datasets), replication_mode=PER_REPLICA)

    for uneven in [((10, 4), (12, 4)), ((12, 4), (6, 2))]:
        with pytest.raises(UnevenBatchError, match=r"2 and 4 rows, .* 2 replicas"):
            made(*uneven)
    alike = itertools.islice(made((10, 4), (10, 4)), 6)
    assert [batch.shape for batch in alike] == [(4,), (4,), (2,)] * 2
    if repeats is None:  # an epoch may hold more batches, if all have as many rows
        endless = itertools.islice(made((4, 4), (12, 4)), 4)
        assert [batch.shape for batch in endless] == [(4,)] * 4
