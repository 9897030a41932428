"""Where an iteration stands, as plain data that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def position(state: Any, start: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checks a state that comes back, perhaps from another process or program.

    Args:
      state: What a ``get_state`` returned, or ``None`` for the beginning.
      start: The state at the beginning. Its integers are counts; ``None``, also in a
        list, stands for the state of what is beneath, which checks it itself.

    Returns:
      The state.

    Raises:
      ValueError: ``state`` has other entries, or a count that is none.
    """
    if state is None:
        return start
    if not isinstance(state, Mapping) or state.keys() != start.keys():
        raise _no_state(state, start)
    for name, first in start.items():
        if not _fits(state[name], first):
            raise _no_state(state, start)
    return state


def _fits(entry: Any, first: Any) -> bool:
    if first is None:
        return entry is not None
    if isinstance(first, list):
        return isinstance(entry, list) and None not in entry
    return type(entry) is type(first) and (type(first) is not int or entry >= 0)


def _no_state(state: Any, start: Mapping[str, Any]) -> ValueError:
    return ValueError(
        "This is not a state of this kind of dataset. Pass what get_state() returned, "
        f"here with the entries {', '.join(map(repr, start))}. Got {state!r}."
    )
