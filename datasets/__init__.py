"""How input batches reach the replicas.

Batches of in-memory arrays come from :func:`from_arrays`; any iterable of global
batches will do as well. ``strategy.experimental_distribute_dataset`` turns either into
a :class:`DistributedDataset`.
"""

from .arrays import ArrayDataset as ArrayDataset
from .arrays import from_arrays as from_arrays
from .distributed import DistributedDataset as DistributedDataset
from .distributed import DistributedIterator as DistributedIterator
from .files import FileDataset as FileDataset
from .files import from_files as from_files
from .input_context import InputContext as InputContext
from .optional import Optional as Optional
from .options import InputOptions as InputOptions
from .options import InputReplicationMode as InputReplicationMode
from .shard_plan import ShardPlan as ShardPlan
from .shard_plan import shard_plan as shard_plan
from .sharding import AutoShardPolicy as AutoShardPolicy
from .sources import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from .sources import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArrayDataset",
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedIterator",
    "FileDataset",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Optional",
    "ShardPlan",
    "from_arrays",
    "from_files",
    "shard_plan",
]
