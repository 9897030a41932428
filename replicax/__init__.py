"""Replicax brings ``tf.distribute`` to JAX.

Write one replica's step, pick a strategy, and run it on every device::

    import replicax as rx

    strategy = rx.MirroredStrategy()
    outputs = strategy.run(step, args=(state, batch))
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from replicax.errors import (
    ConsumedArgumentError,
    ContextError,
    DeviceError,
    DivergentCollectiveError,
    OutOfRangeError,
    PerReplicaError,
    ReplicaDivergenceError,
    ReplicaxError,
    StaticArgumentError,
    UnevenBatchError,
)
from replicax.values import DistributedValues, PerReplica, ReduceOp, ValueContext

from . import datasets
from .datasets.distributed import DistributedDataset, DistributedIterator
from .datasets.input_context import InputContext
from .datasets.options import InputOptions, InputReplicationMode
from .datasets.sharding import AutoShardPolicy
from .strategies.assertion import assert_mirrored
from .strategies.central_storage import CentralStorageStrategy
from .strategies.communication import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from .strategies.context import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from .strategies.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from .strategies.devices import set_virtual_devices
from .strategies.extended import StrategyExtended
from .strategies.function import function
from .strategies.losses import compute_average_loss, scale_regularization_loss
from .strategies.mirrored import MirroredStrategy
from .strategies.one_device import OneDeviceStrategy
from .strategies.optimizer import Optimizer, accumulate_gradients
from .strategies.options import RunOptions
from .strategies.replica_context import ReplicaContext
from .strategies.strategy import Strategy
from .strategies.variables.scatter import IndexedSlices
from .strategies.variables.synchronization import (
    VariableAggregation,
    VariableSynchronization,
)
from .strategies.variables.trees import read, variables
from .strategies.variables.variable import Variable

if _TYPE_CHECKING:
    from .strategies.linen_batch_norm import LinenBatchNorm
    from .strategies.nnx_batch_norm import BatchNorm

__version__ = _version("replicax")

__all__ = [
    "AutoShardPolicy",
    "BatchNorm",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ConsumedArgumentError",
    "ContextError",
    "CrossDeviceOps",
    "DeviceError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "DivergentCollectiveError",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LinenBatchNorm",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "Optimizer",
    "OutOfRangeError",
    "PerReplica",
    "PerReplicaError",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ReplicaDivergenceError",
    "ReplicaxError",
    "RunOptions",
    "StaticArgumentError",
    "Strategy",
    "StrategyExtended",
    "UnevenBatchError",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "accumulate_gradients",
    "assert_mirrored",
    "compute_average_loss",
    "datasets",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "read",
    "scale_regularization_loss",
    "set_virtual_devices",
    "variables",
]

# Flax takes long to import: it is, when one of its layers is asked for.
_FLAX_LAYERS = {"BatchNorm": "nnx_batch_norm", "LinenBatchNorm": "linen_batch_norm"}


def __getattr__(name: str) -> _Any:
    if name not in _FLAX_LAYERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f".strategies.{_FLAX_LAYERS[name]}", __name__)
    layer = globals()[name] = getattr(module, name)
    layer.__module__ = __name__
    return layer


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Errors, reprs and pickles show the public path of a name, not the file it lives in.
for _name in __all__:
    if _name != "datasets" and _name not in _FLAX_LAYERS:
        globals()[_name].__module__ = "replicax"
