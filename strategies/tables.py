"""Tables that forget."""

from __future__ import annotations

from typing import Any

MOST_KEPT = 128


def drop_oldest(table: dict[Any, Any], most: int = MOST_KEPT) -> None:
    """Drops entries of a dict, oldest first, until it holds no more than ``most``."""
    while len(table) > most:
        table.pop(next(iter(table)), None)
