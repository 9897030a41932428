"""The errors that Replicax defines, in one tree.

::

    ReplicaxError
    ├── ConsumedArgumentError (RuntimeError)   an array that a run has consumed
    ├── ContextError (RuntimeError)            called in the wrong place
    ├── DeviceError (ValueError)               a device that cannot be used as asked
    ├── OutOfRangeError (IndexError)           there is no next element
    ├── PerReplicaError (ValueError)           many values where one was wanted
    ├── ReplicaDivergenceError (ValueError)    replicas would silently drift apart
    ├── DivergentCollectiveError (RuntimeError)  a collective some would skip
    ├── StaticArgumentError (TypeError)        an argument that cannot enter a step
    └── UnevenBatchError (ValueError)          a batch that does not divide

Plain bad arguments (a wrong type, an unknown name, an axis out of range) raise the
builtin ``TypeError`` and ``ValueError``. Every class above also derives from the
builtin named beside it, so that code which catches the builtin keeps working.
"""

from collections.abc import Sequence


def listed(items: Sequence[str], between: str = "\n", most: int = 10) -> str:
    """Joins the first items, and says how many more there are."""
    shown = list(items[:most])
    if len(items) > most:
        shown.append(f"... and {len(items) - most} more")
    return between.join(shown)


class ReplicaxError(Exception):
    """Base class of all errors that Replicax defines."""


class ConsumedArgumentError(ReplicaxError, RuntimeError):
    """An array was passed to ``run`` that an earlier, donating run has consumed."""


class ContextError(ReplicaxError, RuntimeError):
    """A call was made in the wrong context.

    For example ``strategy.run`` inside a replica's step, or ``all_reduce`` outside of
    one. The message says where the call was made and which call belongs there.
    """


class DeviceError(ReplicaxError, ValueError):
    """A device is unknown, repeated, remote, or asked for too late."""


class OutOfRangeError(ReplicaxError, IndexError):
    """``get_next`` was called at the end of an iteration."""


class PerReplicaError(ReplicaxError, ValueError):
    """A per-replica value was used where exactly one value is needed.

    Raised, for example, by ``float(loss)`` when the replicas hold different losses:
    Replicax never picks the first one silently.
    """


class ReplicaDivergenceError(ReplicaxError, ValueError):
    """A value that must stay equal on all replicas would differ between them.

    The message names each leaf and the line of the step that makes it differ.
    Whatever was passed to the refused run is left as it was.
    """


class DivergentCollectiveError(ReplicaxError, RuntimeError):
    """A collective stands where only some replicas would reach it.

    A ``lax.cond`` or ``lax.while_loop`` whose predicate differs between replicas must
    not contain a collective: the replicas that skip it leave the others waiting.
    """


class StaticArgumentError(ReplicaxError, TypeError):
    """An argument of ``run`` is neither an array nor usable as a static value."""


class UnevenBatchError(ReplicaxError, ValueError):
    """A batch cannot be divided evenly over the replicas.

    The message states the batch, the replicas and the remedies.
    """
