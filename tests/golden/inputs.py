"""TF's answers for iterators, dataset functions, and what both are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

from .datasets import batches_of, distributed, padded, steps, steps_of
from .table import (
    Raises,
    differs,
    mirrored,
    not_applicable,
    one_device,
    same,
    tf_name,
)

CPU_0 = "/job:localhost/replica:0/task:0/device:CPU:0"
CPU_1 = "/job:localhost/replica:0/task:0/device:CPU:1"

INT32 = "JAX's default integer is int32 unless jax_enable_x64 is set."
PLACE_ON_DEVICE = (
    "There is no option that lays a whole dataset on a device: batches are laid on "
    "their devices one by one, before they are asked for."
)


# -- looking at datasets and iterators -----------------------------------------------


def spec_of(dataset, replicas=2, **options):
    spec = distributed(dataset, replicas, **options).element_spec
    spec = spec[0] if isinstance(spec, tuple) else spec
    return [[list(s.shape), s.dtype.name] for s in spec.values]


def names_of_the_errors_at_the_end():
    iterator = iter(distributed(batches_of(4, 4)))
    next(iterator)
    names = []
    for ask in (lambda: next(iterator), iterator.get_next):
        try:
            ask()
        except (StopIteration, rx.OutOfRangeError) as error:
            names.append(type(error).__name__)
    return names


def value_of_an_empty_optional():
    return iter(distributed([])).get_next_as_optional().get_value()


def sum_of(x):
    strategy = mirrored(2)
    return strategy.reduce("SUM", strategy.run(jnp.sum, (x,)), axis=None)


def sum_while_there_is_an_element():
    iterator, total = iter(distributed(batches_of(10, 4))), 0
    while (element := iterator.get_next_as_optional()).has_value():
        total = total + sum_of(element.get_value())
    return total


def devices(**options):
    """Where the parts of each element are; what is on the host is on the first CPU."""
    host = jax.local_devices(backend="cpu")[0]
    return [
        sorted(
            {
                tf_name(host if isinstance(part, np.ndarray) else part.device)
                for part in x.values
            }
        )
        for x in distributed(batches_of(2, 2), **options)
    ]


LOOKING = [
    differs(
        "ds_element_spec_dropped",
        [[[2], "int64"], [[2], "int64"]],
        lambda: spec_of(batches_of(8, 4, drop=True)),
        ours=[[[2], "int32"], [[2], "int32"]],
        reason=INT32,
    ),
    differs(
        "ds_element_spec_dropped_uneven",
        [[[None], "int64"], [[None], "int64"]],
        lambda: spec_of([(b, b) for b in batches_of(10, 5)], remainder="pad"),
        ours=[[[3], "int32"], [[3], "int32"]],
        reason=f"Padded batches have one static size. {INT32}",
    ),
    same(
        "it_next_stopiteration",
        ["StopIteration", "OutOfRangeError"],
        names_of_the_errors_at_the_end,
    ),
    same(
        "it_get_next_as_optional_empty_get_value",
        Raises("InvalidArgumentError"),
        value_of_an_empty_optional,
    ),
    same(
        "it_last_partial_single_replica",
        [[[2, 3], [2, 3]], [[1, 3], [0, 3]]],
        lambda: padded(
            rx.datasets.from_arrays(np.ones([5, 3])).batch(4),
            look=lambda rows: list(rows.shape),
        ),
    ),
    same(
        "it_static_shape_drop_partial",
        [[[0], [1]], [[2], [3]], [[4], [5]]],
        lambda: steps(batches_of(7, 2, drop=True)),
    ),
    not_applicable(
        "it_for_in_tf_function",
        45,
        "A jitted function cannot take elements from the host: the loop over a dataset "
        "stands in Python, around the step.",
    ),
    same(
        "ds_reduce",
        45,
        lambda: distributed(batches_of(10, 4)).reduce(
            jnp.int32(0), lambda total, x: total + sum_of(x)
        ),
    ),
    same("optional_in_loop", 45, sum_while_there_is_an_element),
    same("ds_fetch_to_device_false", [[CPU_0]], lambda: devices(fetch_to_device=False)),
    same("ds_fetch_to_device_true", [[CPU_0, CPU_1]], devices),
]


# -- datasets from functions, contexts and options -----------------------------------


def from_function(dataset_fn, replicas=2, **options):
    return mirrored(replicas).distribute_datasets_from_function(
        dataset_fn, rx.InputOptions(**options)
    )


def figures(context):
    return [
        context.num_input_pipelines,
        context.input_pipeline_id,
        context.num_replicas_in_sync,
    ]


def contexts_seen(distribute, **options):
    """What a dataset function is told, and the elements that its dataset becomes."""
    seen = []

    def dataset_fn(context):
        seen.append(figures(context))
        rows = np.arange(4)[context.input_pipeline_id :: context.num_input_pipelines]
        return rx.datasets.from_arrays(rows).batch(1)

    elements = steps_of(distribute(dataset_fn, **options))
    return [seen, elements]


def context_of_two():
    seen = []

    def dataset_fn(context):
        seen.append(context)
        return batches_of(8, context.get_per_replica_batch_size(8))

    from_function(dataset_fn)
    return [[*figures(c), c.get_per_replica_batch_size(8), str(c)] for c in seen]


def context_after_one_for_each_replica():
    mode = rx.InputReplicationMode.PER_REPLICA
    contexts_seen(from_function, replication_mode=mode)
    told, _ = contexts_seen(from_function)
    return [context[:2] for context in told]


def dropped():
    """Three batches for two replicas, which the default refuses."""

    def dataset_fn(context):
        return batches_of(6, 2, drop=True)

    with pytest.raises(rx.UnevenBatchError):
        steps_of(from_function(dataset_fn))
    return steps_of(from_function(dataset_fn, remainder="drop"))


def default_options():
    options = rx.InputOptions()
    return {
        "fetch_to_device": options.fetch_to_device,
        "replication_mode": options.replication_mode.value,
        "prefetch": options.prefetch,
    }


FUNCTIONS = [
    differs(
        "dsfn_input_context",
        [[1, 0, 2, 4, "tf.distribute.InputContext(input pipeline id 0, total: 1)"]],
        context_of_two,
        ours=[[1, 0, 2, 4, "InputContext(input pipeline id 0, total: 1)"]],
        reason="The figures are the same. The printed name is that of Replicax.",
    ),
    same(
        "dsfn_elements",
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        lambda: steps_of(from_function(lambda _: batches_of(8, 2))),
    ),
    same("dsfn_odd_elements_static", [[[0, 1], [2, 3]]], dropped),
    same(
        "dsfn_one_device_ctx",
        [[1, 0, 1]],
        lambda: contexts_seen(one_device().distribute_datasets_from_function)[0],
    ),
    differs(
        "dsfn_default_strategy",
        "_RangeDataset",
        lambda: (
            type(
                rx.get_strategy().distribute_datasets_from_function(
                    lambda _: batches_of(4, 2)
                )
            ).__name__
        ),
        ours="DistributedDataset",
        reason="The default strategy distributes to its one device, as all others do.",
    ),
    differs(
        "ds_per_replica_option_error",
        Raises("NotImplementedError"),
        lambda: steps(
            batches_of(4, 2), replication_mode=rx.InputReplicationMode.PER_REPLICA
        ),
        ours=Raises(ValueError),
        reason="A dataset of global batches has no function to call for each replica, "
        "so the option is a wrong value rather than something that is missing.",
    ),
    same(
        "dsfn_per_replica_mode",
        [[[2, 0, 2], [2, 1, 2]], [[[0], [1]], [[2], [3]]]],
        lambda: contexts_seen(
            from_function, replication_mode=rx.InputReplicationMode.PER_REPLICA
        ),
    ),
    differs(
        "dsfn_per_replica_mode_leaks",
        [[2, 0], [2, 1]],
        context_after_one_for_each_replica,
        ours=[[1, 0]],
        reason="Options are those of one dataset. In TF they stay with the strategy.",
    ),
    not_applicable(
        "dsfn_place_on_device_needs_per_replica", Raises("ValueError"), PLACE_ON_DEVICE
    ),
    not_applicable(
        "dsfn_place_on_device_and_fetch", Raises("ValueError"), PLACE_ON_DEVICE
    ),
    differs(
        "input_options_defaults",
        {
            "experimental_fetch_to_device": True,
            "experimental_replication_mode": "PER_WORKER",
            "experimental_place_dataset_on_device": False,
            "experimental_per_replica_buffer_size": 1,
        },
        default_options,
        ours={"fetch_to_device": True, "replication_mode": "PER_WORKER", "prefetch": 2},
        reason="The names are without 'experimental', one more batch is prepared "
        "ahead, and no whole dataset is laid on a device.",
    ),
    differs(
        "input_context_defaults",
        [1, 0, 1, 7, "tf.distribute.InputContext(input pipeline id 0, total: 1)"],
        lambda: [
            *figures(rx.InputContext()),
            rx.InputContext().get_per_replica_batch_size(7),
            str(rx.InputContext()),
        ],
        ours=[1, 0, 1, 7, "InputContext(input pipeline id 0, total: 1)"],
        reason="The figures are the same. The printed name is that of Replicax.",
    ),
    same(
        "input_context_ok",
        3,
        lambda: rx.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(12),
    ),
    same(
        "input_context_error",
        Raises("ValueError"),
        lambda: rx.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10),
    ),
]

CASES = [*LOOKING, *FUNCTIONS]
