"""From where a variable is read or written."""

from __future__ import annotations

import enum

from ..context import get_replica_context, is_updating
from . import frames


class Place(enum.Enum):
    """Where the caller stands.

    * ``REPLICA``: in a step, as one of the replicas.
    * ``UPDATE``: in a function that ``extended.update`` calls: as one replica that
      looks after its own copy, without asking the others.
    * ``CROSS_REPLICA``: anywhere else, which sees the variable as a whole.
    """

    REPLICA = enum.auto()
    UPDATE = enum.auto()
    CROSS_REPLICA = enum.auto()


def place() -> Place:
    """Returns where the caller stands."""
    frame = frames.current()
    if frame is None or not frame.is_replica:
        return Place.CROSS_REPLICA
    if is_updating():
        return Place.UPDATE
    return Place.CROSS_REPLICA if get_replica_context() is None else Place.REPLICA
