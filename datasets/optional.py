"""An element that may not be there."""

from __future__ import annotations

from typing import Any

_NOTHING = object()


class Optional:
    """What ``DistributedIterator.get_next_as_optional`` returns.

    Args:
      value: The element; left out, there is none.

    Example:
      >>> from replicax.datasets import Optional
      >>> Optional(3).has_value(), Optional().has_value()
      (True, False)
    """

    def __init__(self, value: Any = _NOTHING):
        self._value = value

    def has_value(self) -> bool:
        """Whether there is an element."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
          ValueError: There is none.
        """
        if self._value is _NOTHING:
            raise ValueError(
                "This Optional has no value: the iteration is at its end. Ask "
                "has_value() first."
            )
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"
