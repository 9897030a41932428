"""TF's answers for options of communication, and for packs of tensors."""

import replicax as rx
from replicax.strategies.communication import group_by_size

from .table import Raises, differs, same

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
    return options.merge(rx.CommunicationOptions(timeout_seconds=7))


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
    differs(
        "comm_options_merge",
        "Options(bytes_per_pack=10,timeout_seconds=7, "
        "implementation=CommunicationImplementation.NCCL)",
        lambda: str(merged()),
        ours="CommunicationOptions(bytes_per_pack=10, timeout_seconds=7, "
        "implementation=<CommunicationImplementation.NCCL: 'NCCL'>, compression=None, "
        "accumulate_dtype=None)",
        reason="The merged values are the same; the text names the class that they are "
        "of, and two more fields.",
    ),
]
