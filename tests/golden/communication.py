"""TF's answers for options of communication, and for packs of tensors."""

from replicax.strategies.communication import group_by_size

import replicax as rx

from .table import Raises, same

TENSOR_BYTES = [4, 8, 16, 4, 4]


def packs(bytes_per_pack):
    return [
        [TENSOR_BYTES[i] for i in pack]
        for pack in group_by_size(TENSOR_BYTES, bytes_per_pack)
    ]


def merged():
    options = rx.CommunicationOptions(
        bytes_per_pack=10,
        timeout_seconds=5,
        implementation=rx.CommunicationImplementation.NCCL,
    )
    options = options.merge(rx.CommunicationOptions(timeout_seconds=7))
    return [
        options.bytes_per_pack,
        options.timeout_seconds,
        options.implementation.name,
    ]


CASES = [
    same("group_by_size_0", [[4, 8, 16, 4, 4]], lambda: packs(0)),
    same("group_by_size_1", [[4], [8], [16], [4], [4]], lambda: packs(1)),
    same("group_by_size_8", [[4, 8], [16], [4, 4]], lambda: packs(8)),
    same("group_by_size_16", [[4, 8, 16], [4, 4]], lambda: packs(16)),
    same(
        "comm_options_bad_str",
        Raises("ValueError"),
        lambda: rx.CommunicationOptions(implementation="FOO"),
    ),
    same(
        "comm_options_bad_type",
        Raises("ValueError"),
        lambda: rx.CommunicationOptions(implementation=3),
    ),
    same("comm_options_merge", [10, 7, "NCCL"], merged),
]
