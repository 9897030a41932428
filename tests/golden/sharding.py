"""TF's answers for datasets that several workers share, asked of simulated workers.

As in ``datasets``, what the default refuses is asked with padding, of which the rows
that the mask keeps are the answer.
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from replicax.datasets.distributed import distribute_dataset
from replicax.datasets.rebatch import rebatch
from replicax.datasets.sharding import batch_sizes_for_worker, shard
from replicax.datasets.sources import as_source

import replicax as rx

from .datasets import AUTO, DATA, FILE, HINT, OFF, batches_of, masked, steps_of
from .table import Raises, differs, not_applicable, same

IN_ORDER = (
    "The replicas of a worker get neighbouring parts, so that what all replicas "
    "return, one after the other, is in the order of the rows. In TF, worker w of W "
    "gets the parts w, w + W, and so on."
)
EQUAL_SHARES = (
    "The replicas of all workers run one program, so a batch that the workers cannot "
    "share evenly is refused. TF gives them unequally many rows."
)
INTERNAL = (
    "TF looks into a pipeline to choose between two ways of dividing its batches. Here "
    "there is one, and no pipeline is looked into."
)
NEEDS_PROCESSES = (
    "Workers that tell each other of their end need several processes, which these "
    "tests do not start."
)


def on_workers(dataset, num_workers=2, replicas=1, **options):
    """The dataset as several workers distribute it, each to devices of its own."""
    return [
        distribute_dataset(
            dataset,
            Mesh(
                np.array(jax.devices()[worker * replicas : (worker + 1) * replicas]),
                ("replica",),
            ),
            rx.InputOptions(**options),
            rx.InputContext(num_workers, worker, num_workers * replicas),
        )
        for worker in range(num_workers)
    ]


def steps(dataset, **options):
    """The rows of each replica in each step, for each worker."""
    return [steps_of(worker) for worker in on_workers(dataset, **options)]


def padded(dataset, **options):
    with pytest.raises(rx.UnevenBatchError):
        steps(dataset, **options)

    def with_place_for_a_mask():
        return ((batch, batch) for batch in dataset)

    workers = on_workers(with_place_for_a_mask, remainder="pad", **options)
    return [masked(worker) for worker in workers]


def parts(workers):
    """The batches of the replicas of each worker, one after the other."""
    return [[part for step in worker for part in step] for worker in workers]


def rows(workers):
    """All rows of each worker."""
    return [[row for part in worker for row in part] for worker in parts(workers)]


def named(workers):
    return {f"worker{number}": worker for number, worker in enumerate(workers)}


def of_three_files(ask, batch_size, policy=AUTO):
    """Asks about three files of three lines, which tell their file and place."""
    with tempfile.TemporaryDirectory() as folder:
        for file in range(3):
            lines = "".join(f"{file}{line}\n" for line in range(3))
            (Path(folder) / f"{file}.txt").write_text(lines)
        dataset = rx.datasets.from_files(f"{folder}/*.txt").batch(batch_size)
        return ask(steps(dataset, auto_shard_policy=policy))


# -- elements and files --------------------------------------------------------------


def sharded(items, num_shards):
    return [list(shard(items, num_shards, index)) for index in range(num_shards)]


def made_for_each_worker():
    """A dataset that its maker has sharded."""
    answer = []
    for worker in range(2):
        own = rx.datasets.from_arrays(np.arange(8)[worker::2]).batch(2)
        answer += [parts(steps(own, auto_shard_policy=HINT))[worker]]
    return answer


EIGHT_FOR_ALL = [list(range(8))] * 2
THREE_FILES = [["00", "01", "02", "20", "21", "22"], ["10", "11", "12"]]

SHARDS = [
    same(
        "shard_range8_w2_DATA",
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        lambda: sharded(range(8), 2),
    ),
    same(
        "shard_range8_w2_OFF",
        EIGHT_FOR_ALL,
        lambda: rows(steps(batches_of(8, 2), auto_shard_policy=OFF)),
    ),
    same(
        "shard_range8_w2_FILE",
        Raises("NotFoundError"),
        lambda: steps(batches_of(8, 2), auto_shard_policy=FILE),
    ),
    same(
        "shard_range7_w3_DATA",
        [[0, 3, 6], [1, 4], [2, 5]],
        lambda: sharded(range(7), 3),
    ),
    differs(
        "shard_range1_w2_DATA",
        [Raises("InvalidArgumentError"), []],
        lambda: sharded(range(1), 2),
        ours=[[0], []],
        reason="A worker may be without elements. TF raises where there is one.",
    ),
    same(
        "shard_batched_w2_AUTO",
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]],
        lambda: [
            [batch.tolist() for batch in own]
            for own in sharded(list(batches_of(8, 2)), 2)
        ],
    ),
    same("shard_hint_w2", [[[0, 2], [4, 6]], [[1, 3], [5, 7]]], made_for_each_worker),
    same("shard_3files_w2_AUTO", THREE_FILES, lambda: of_three_files(rows, 2)),
    same("shard_3files_w2_FILE", THREE_FILES, lambda: of_three_files(rows, 2, FILE)),
    same("shard_textline_direct_w2_AUTO", THREE_FILES, lambda: of_three_files(rows, 2)),
    not_applicable(
        "shard_interleave_w2_AUTO",
        [["00", "20", "01", "21", "02", "22"], ["10", "11", "12"]],
        "from_files reads the rows of its files one after the other, or shuffled: "
        "there is nothing that interleaves files.",
    ),
    not_applicable(
        "shard_files_shuffled_w2_AUTO",
        [["0", "2"], ["1"]],
        "from_files shuffles rows, not files, so there is no order of files that the "
        "sharding could be moved before.",
    ),
    same(
        "shard_dataset_api",
        [[0, 3, 6], [1, 4], [2, 5]],
        lambda: sharded(range(7), 3),
    ),
]


# -- global batches over two workers -------------------------------------------------


PIPELINES = [
    *(
        same(
            f"pipe_range16_b4_w2r1_{policy.name}",
            [
                [[0, 1], [4, 5], [8, 9], [12, 13]],
                [[2, 3], [6, 7], [10, 11], [14, 15]],
            ],
            lambda policy=policy: parts(
                steps(batches_of(16, 4), auto_shard_policy=policy)
            ),
        )
        for policy in (AUTO, DATA)
    ),
    *(
        differs(
            f"pipe_range16_b8_w2r2_{policy.name}",
            [
                [[0, 1], [4, 5], [8, 9], [12, 13]],
                [[2, 3], [6, 7], [10, 11], [14, 15]],
            ],
            lambda policy=policy: parts(
                steps(batches_of(16, 8), replicas=2, auto_shard_policy=policy)
            ),
            ours=[
                [[0, 1], [2, 3], [8, 9], [10, 11]],
                [[4, 5], [6, 7], [12, 13], [14, 15]],
            ],
            reason=IN_ORDER,
        )
        for policy in (AUTO, DATA)
    ),
    *(
        same(
            f"pipe_range9_b4_w2r1_{policy.name}",
            [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], []]],
            lambda policy=policy: parts(
                padded(batches_of(9, 4), auto_shard_policy=policy)
            ),
        )
        for policy in (AUTO, DATA)
    ),
    *(
        same(
            f"pipe_range{num_rows}_b4_w2r1_OFF",
            [[list(range(n, min(n + 2, num_rows))) for n in range(0, num_rows, 2)]] * 2,
            lambda num_rows=num_rows: parts(
                steps(batches_of(num_rows, 4), auto_shard_policy=OFF)
            ),
        )
        for num_rows in (16, 10, 9)
    ),
    same(
        "pipe_range10_b5_w2r1_AUTO",
        [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]]],
        lambda: parts(padded(batches_of(10, 5))),
    ),
    differs(
        "pipe_range10_b5_w2r1_OFF",
        [
            [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]],
            [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]],
        ],
        lambda: steps(batches_of(10, 5), auto_shard_policy=OFF),
        ours=Raises(rx.UnevenBatchError),
        reason=EQUAL_SHARES,
    ),
    differs(
        "pipe_3files_b3_w2r1_AUTO",
        [[["00", "01"], ["02"], ["20", "21"], ["22"]], [["10"], ["11", "12"]]],
        lambda: of_three_files(parts, 3),
        ours=Raises(rx.UnevenBatchError),
        reason=EQUAL_SHARES,
    ),
]


def shape_of_an_element():
    workers = on_workers(batches_of(8, 4, drop=True))
    specs = [worker.element_spec for worker in workers]
    return named([[list(s.shape) for s in spec.values] for spec in specs])


MULTI_WORKER = [
    same(
        "mw_ds_16_b4_AUTO",
        {
            "worker0": [[[0, 1]], [[4, 5]], [[8, 9]], [[12, 13]]],
            "worker1": [[[2, 3]], [[6, 7]], [[10, 11]], [[14, 15]]],
        },
        lambda: named(steps(batches_of(16, 4))),
    ),
    same(
        "mw_ds_10_b4_AUTO",
        {
            "worker0": [[[0, 1]], [[4, 5]], [[8]]],
            "worker1": [[[2, 3]], [[6, 7]], [[9]]],
        },
        lambda: named(steps(batches_of(10, 4))),
    ),
    same(
        "mw_ds_10_b4_OFF",
        {
            "worker0": [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8, 9]]],
            "worker1": [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8, 9]]],
        },
        lambda: named(steps(batches_of(10, 4), auto_shard_policy=OFF)),
    ),
    same(
        "mw_ds_9_b4_drop_AUTO",
        {"worker0": [[[0, 1]], [[4, 5]]], "worker1": [[[2, 3]], [[6, 7]]]},
        lambda: named(steps(batches_of(9, 4, drop=True))),
    ),
    same(
        "mw_ds_10_b5_AUTO",
        {"worker0": [[[0, 1, 2]], [[5, 6, 7]]], "worker1": [[[3, 4]], [[8, 9]]]},
        lambda: named(padded(batches_of(10, 5))),
    ),
    not_applicable(
        "mw_dsfn_uneven_workers",
        {"worker0": [[[0]], [[1]], [[2]]], "worker1": [[[0]], [[]], [[]]]},
        NEEDS_PROCESSES,
    ),
    not_applicable(
        "mw_dsfn_uneven_workers_optional",
        {
            "worker0": [*([True, [[n]]] for n in range(3)), [False, None]],
            "worker1": [[True, [[0]]], [True, [[]]], [True, [[]]], [False, None]],
        },
        NEEDS_PROCESSES,
    ),
    differs(
        "mw_element_spec_dynamic",
        {
            "worker0": ["PerReplicaSpec", [[None]]],
            "worker1": ["PerReplicaSpec", [[None]]],
        },
        shape_of_an_element,
        ours={"worker0": [[2]], "worker1": [[2]]},
        reason="The shapes of arrays in a step are always static, and a spec is a "
        "PerReplica of them.",
    ),
    same(
        "mw_element_type",
        {"worker0": "PerReplica", "worker1": "PerReplica"},
        lambda: named(
            [type(next(iter(w))).__name__ for w in on_workers(batches_of(8, 4))]
        ),
    ),
]


# -- the rules -----------------------------------------------------------------------


def sizes(batch, workers, replicas):
    return lambda: [
        batch_sizes_for_worker(batch, workers, replicas, worker)
        for worker in range(workers)
    ]


def batch_size_of(dataset):
    return lambda: as_source(dataset).batch_size


RULES = [
    same(
        "policy_values",
        {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3},
        lambda: {policy.name: int(policy) for policy in rx.AutoShardPolicy},
    ),
    not_applicable(
        "distribute_options_defaults",
        ["AUTO", None],
        "These options belong to tf.data, whose second is internal. Here the policy, "
        "AUTO by default too, is given to InputOptions.",
    ),
    *(
        same(
            f"batch_sizes_for_worker_{batch}_{workers}x{replicas}",
            answer,
            sizes(batch, workers, replicas),
        )
        for batch, workers, replicas, answer in [
            (10, 2, 1, [[5, 5], [5, 5]]),
            (5, 2, 2, [[2, 1, 1, 1], [1, 1, 2, 1]]),
            (7, 3, 1, [[3, 2, 2], [2, 2, 3], [2, 3, 2]]),
            (8, 2, 2, [[2, 2, 2, 2], [2, 2, 2, 2]]),
            (3, 2, 2, [[1, 1, 1, 0], [1, 0, 1, 1]]),
            (10, 2, 2, [[3, 3, 2, 2], [2, 2, 3, 3]]),
            (1, 2, 1, [[1, 0], [0, 1]]),
            (11, 2, 3, [[2, 2, 2, 2, 2, 1], [2, 2, 1, 2, 2, 2]]),
        ]
    ),
    same(
        "rebatch_public",
        [[0, 1], [2], [3], [4, 5], [6], [7], [8]],
        lambda: [batch.tolist() for batch in rebatch(batches_of(9, 4), [2, 1, 1])],
    ),
    not_applicable(
        "rebatch_drop",
        [[0, 1, 2], [3, 4, 5]],
        "Rows that are left over after rebatching are treated as "
        "InputOptions(remainder=...) says; rebatching itself never drops any.",
    ),
    *(
        same(f"compute_batch_size_{name}", 4, batch_size_of(dataset))
        for name, dataset in [
            ("batch4", batches_of(10, 4)),
            ("batch4_drop", batches_of(10, 4, drop=True)),
            ("repeat", batches_of(10, 4).repeat(2)),
            ("shuffle", rx.datasets.from_arrays(np.arange(10)).shuffle(0).batch(4)),
        ]
    ),
    *(
        not_applicable(f"compute_batch_size_{name}", size, INTERNAL)
        for name, size in [
            ("map_after", -1),
            ("prefetch", 4),
            ("filter", 4),
            ("padded3", 3),
            ("flat_map", -1),
            ("zip", 2),
            ("batch4_parallel2", -1),
        ]
    ),
]

CASES = [*SHARDS, *PIPELINES, *MULTI_WORKER, *RULES]
