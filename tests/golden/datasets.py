"""TF's answers for how one worker's global batches reach its replicas.

Where TF gives the replicas unequally many rows, Replicax raises by default. Such
questions are asked with ``remainder="pad"``, of which the rows that the mask keeps are
the answer: ``padded`` makes sure that the default refuses.
"""

import itertools

import numpy as np
import pytest

import replicax as rx

from .table import Raises, differs, mirrored, one_device, same

OFF, AUTO, FILE, DATA, HINT = (
    rx.AutoShardPolicy[name] for name in ("OFF", "AUTO", "FILE", "DATA", "HINT")
)
FILLS_THE_FIRST = (
    "Every batch is padded to the size of the first one, so that a step has one shape, "
    "and a smaller batch fills the first replicas. TF divides each batch anew."
)
ONE_RULE = (
    "How a batch is divided depends on its rows alone. TF divides it in another way "
    "when the policy or the kind of source is another one, even with one worker."
)


def batches_of(num_rows, batch_size, drop=False):
    return rx.datasets.from_arrays(np.arange(num_rows)).batch(batch_size, drop)


def distributed(dataset, replicas=2, **options):
    return mirrored(replicas).experimental_distribute_dataset(
        dataset, rx.InputOptions(**options)
    )


def steps_of(elements):
    """The rows of each replica in each step."""
    return [[np.asarray(part).tolist() for part in x.values] for x in elements]


def steps(dataset, replicas=2, **options):
    return steps_of(distributed(dataset, replicas, **options))


def masked(elements, look=np.ndarray.tolist):
    """The rows of each replica in each step whose mask is 1."""
    return [
        [
            look(np.asarray(part)[np.asarray(mask) == 1])
            for part, mask in zip(x.values, masks.values, strict=True)
        ]
        for x, _, masks in elements
    ]


def padded(dataset, replicas=2, look=np.ndarray.tolist, **options):
    """The rows that arrive with padding, of what is refused without."""
    with pytest.raises(rx.UnevenBatchError):
        steps(dataset, replicas, **options)

    def with_place_for_a_mask():
        return ((batch, batch) for batch in dataset)

    options["remainder"] = "pad"
    return masked(distributed(with_place_for_a_mask, replicas, **options), look)


# -- global batches over the replicas ------------------------------------------------


SPLIT = [
    same(
        "ds_10_b4_r2",
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]],
        lambda: steps(batches_of(10, 4)),
    ),
    same(
        "ds_10_b4_r2_drop",
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        lambda: steps(batches_of(10, 4, drop=True)),
    ),
    same(
        "ds_9_b4_r2",
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]],
        lambda: padded(batches_of(9, 4)),
    ),
    same(
        "ds_11_b4_r2",
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10]]],
        lambda: padded(batches_of(11, 4)),
    ),
    same("ds_1_b2_r2", [[[0], []]], lambda: padded(batches_of(1, 2))),
    same(
        "ds_10_b5_r2",
        [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]]],
        lambda: padded(batches_of(10, 5)),
    ),
    same(
        "ds_10_b5_r2_drop",
        [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]]],
        lambda: padded(batches_of(10, 5, drop=True)),
    ),
    differs(
        "ds_10_b4_r3",
        [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]],
        lambda: padded(batches_of(10, 4), 3),
        ours=[[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8, 9], [], []]],
        reason=FILLS_THE_FIRST,
    ),
    same(
        "ds_10_b4_r4",
        [[[0], [1], [2], [3]], [[4], [5], [6], [7]], [[8], [9], [], []]],
        lambda: padded(batches_of(10, 4), 4),
    ),
    differs(
        "ds_10_b6_r4",
        [[[0, 1], [2, 3], [4, 5], []], [[6], [7], [8], [9]]],
        lambda: padded(batches_of(10, 6), 4),
        ours=[[[0, 1], [2, 3], [4, 5], []], [[6, 7], [8, 9], [], []]],
        reason=FILLS_THE_FIRST,
    ),
    same(
        "ds_7_b7_r3",
        [[[0, 1, 2], [3, 4, 5], [6]]],
        lambda: padded(batches_of(7, 7), 3),
    ),
    same("ds_3_b8_r4", [[[0], [1], [2], []]], lambda: padded(batches_of(3, 8), 4)),
    same(
        "ds_8_b3_r4",
        [[[0], [1], [2], []], [[3], [4], [5], []], [[6], [7], [], []]],
        lambda: padded(batches_of(8, 3), 4),
    ),
    same(
        "ds_10_b1_r2",
        [[[n], []] for n in range(10)],
        lambda: padded(batches_of(10, 1)),
    ),
    same(
        "ds_6_b4_r1",
        [[[0, 1, 2, 3]], [[4, 5]]],
        lambda: steps(batches_of(6, 4), 1),
    ),
    same("ds_0_b4_r2", [], lambda: steps(batches_of(0, 4))),
    same(
        "ds_5_b4_r2_drop",
        [[[0, 1], [2, 3]]],
        lambda: steps(batches_of(5, 4, drop=True)),
    ),
    differs(
        "ds_from_tensor_slices_policy",
        [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]],
        lambda: padded(batches_of(10, 4), 3),
        ours=[[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8, 9], [], []]],
        reason=FILLS_THE_FIRST,
    ),
    differs(
        "ds_generator_source",
        [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]],
        lambda: padded([np.arange(4), np.arange(4, 8), np.arange(8, 10)], 3),
        ours=[[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8, 9], [], []]],
        reason=FILLS_THE_FIRST,
    ),
]


# -- what a dataset may be -----------------------------------------------------------


def ragged(*lengths):
    """Rows of several lengths, as JAX has no array for them."""
    rows = np.empty(len(lengths), object)
    rows[:] = [[n] * n for n in lengths]
    return rows


def columns(*rows):
    """A batch of rows filled up to the longest."""
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows])


LENGTHS = [[n] * n for n in range(1, 7)]

KINDS = [
    same(
        "ds_one_device",
        [[0, 1], [2, 3], [4]],
        lambda: list(one_device().experimental_distribute_dataset(batches_of(5, 2))),
    ),
    differs(
        "ds_one_replica_types",
        ["EagerTensor", "EagerTensor"],
        lambda: [type(x).__name__ for x in distributed(batches_of(4, 2), 1)],
        ours=["PerReplica", "PerReplica"],
        reason="An element is per-replica with one replica too, so that code which "
        "looks at elements need not tell one replica from several.",
    ),
    same(
        "ds_unbatched_scalars",
        Raises("IndexError"),
        lambda: steps(rx.datasets.from_arrays(np.arange(4))),
    ),
    same(
        "ds_batch_then_map",
        [[[0, 2], [4, 6]], [[8], [10]]],
        lambda: steps(lambda: (2 * batch for batch in batches_of(6, 4))),
    ),
    same(
        "ds_batch_prefetch",
        [[[0, 1], [2, 3]], [[4], [5]]],
        lambda: steps(batches_of(6, 4), prefetch=1),
    ),
    same(
        "ds_batch_repeat",
        [[[0, 1], [2, 3]], [[4], [5]]] * 2,
        lambda: steps(batches_of(6, 4).repeat(2)),
    ),
    differs(
        "ds_repeat_batch",
        [[[0, 1], [2, 0]], [[1], [2]]],
        lambda: steps(rx.datasets.from_arrays(np.arange(3)).repeat(2).batch(4)),
        ours=Raises(ValueError),
        reason="A batch of from_arrays never holds rows of two epochs. A pipeline of "
        "the user's own may make such batches.",
    ),
    same(
        "ds_batch_take",
        [[[0, 1], [2, 3]]],
        lambda: steps(lambda: itertools.islice(batches_of(8, 4), 1)),
    ),
    same(
        "ds_batch_unbatch_batch",
        [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]],
        lambda: steps(rx.datasets.from_arrays(np.arange(8).reshape(4, 2)).batch(2)),
    ),
    same(
        "ds_padded_batch",
        [
            [[[1, 0, 0, 0], [2, 2, 0, 0]], [[3, 3, 3, 0], [4, 4, 4, 4]]],
            [[[5, 5, 5, 5, 5, 0]], [[6, 6, 6, 6, 6, 6]]],
        ],
        lambda: steps([columns(*LENGTHS[:4]), columns(*LENGTHS[4:])]),
    ),
    differs(
        "ds_uneven_batch_sizes_dataset",
        [[[0, 1], [2]], [[3], []], [[4], [5]]],
        lambda: padded([np.array(batch) for batch in ([0, 1, 2], [3], [4, 5])]),
        ours=[[[0, 1], [2]], [[3], []], [[4, 5], []]],
        reason=FILLS_THE_FIRST,
    ),
    same(
        "ds_ragged",
        [[[[1]], [[2, 2]]], [[[3, 3, 3]], []]],
        lambda: padded([ragged(1, 2), ragged(3)]),
    ),
    same(
        "ds_auto_keeps_batch_boundaries",
        [[[0, 1], [2, 3]], [[4], []]] * 2,
        lambda: padded(batches_of(5, 4).repeat(2)),
    ),
]


# -- policies with one worker --------------------------------------------------------


def with_policy(policy, num_rows, batch_size, replicas, ask=padded):
    return lambda: ask(
        batches_of(num_rows, batch_size), replicas, auto_shard_policy=policy
    )


CYCLIC_3 = [[[0, 1], [2], [3]], [[4, 5], [6], [7]], [[8, 9], [], []]]
CYCLIC_4 = [[[0, 1], [2, 3], [4], [5]], [[6, 7], [8, 9], [], []]]
CEIL_3 = [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]]
PADDED_3 = [*CEIL_3[:2], [[8, 9], [], []]]
PADDED_4 = [[[0, 1], [2, 3], [4, 5], []], [[6, 7], [8, 9], [], []]]
CYCLIC_2 = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]]
EVEN_2 = [*CYCLIC_2[:2], [[8], [9]]]


def of_text(policy):
    lines = [np.array([str(n) for n in b]) for b in (range(4), range(4, 8), (8, 9))]
    return lambda: padded(lines, 3, auto_shard_policy=policy)


def as_text(answer):
    return [[[str(n) for n in part] for part in parts] for parts in answer]


POLICIES = [
    *(
        differs(
            f"ds_policy_{policy.name}_10_b4_r2",
            CYCLIC_2,
            with_policy(policy, 10, 4, 2, ask=steps),
            ours=EVEN_2,
            reason=ONE_RULE,
        )
        for policy in (OFF, FILE)
    ),
    same("ds_policy_DATA_10_b4_r2", EVEN_2, with_policy(DATA, 10, 4, 2, ask=steps)),
    *(
        differs(
            f"ds_policy_{policy.name}_10_b4_r3",
            CYCLIC_3,
            with_policy(policy, 10, 4, 3),
            ours=PADDED_3,
            reason=ONE_RULE,
        )
        for policy in (FILE, HINT)
    ),
    differs(
        "ds_policy_AUTO_10_b4_r3",
        CEIL_3,
        with_policy(AUTO, 10, 4, 3),
        ours=PADDED_3,
        reason=FILLS_THE_FIRST,
    ),
    *(
        differs(
            f"ds_policy_{policy.name}_10_b6_r4",
            CYCLIC_4,
            with_policy(policy, 10, 6, 4),
            ours=PADDED_4,
            reason=ONE_RULE,
        )
        for policy in (OFF, FILE, HINT)
    ),
    differs(
        "ds_policy_OFF_map_after",
        CEIL_3,
        lambda: padded([b * 1 for b in batches_of(10, 4)], 3, auto_shard_policy=OFF),
        ours=PADDED_3,
        reason=FILLS_THE_FIRST,
    ),
    *(
        differs(
            f"ds_filesource_{name}_10_b4_r3",
            as_text(CYCLIC_3),
            of_text(policy),
            ours=as_text(PADDED_3),
            reason=ONE_RULE,
        )
        for name, policy in (("default", AUTO), ("OFF", OFF), ("FILE", FILE))
    ),
    differs(
        "ds_off_crosses_batch_boundaries",
        [[[0, 1], [2, 3]], [[4, 0], [1, 2]], [[3, 4], []]],
        lambda: padded(batches_of(5, 4).repeat(2), auto_shard_policy=OFF),
        ours=[[[0, 1], [2, 3]], [[4], []]] * 2,
        reason=ONE_RULE,
    ),
]

CASES = [*SPLIT, *KINDS, *POLICIES]
