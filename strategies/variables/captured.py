"""The variables that one compiled program takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from . import frames

if TYPE_CHECKING:
    from .variable import Variable


class MoreVariables(Exception):
    """A function was found to use variables that its program does not take yet.

    Attributes:
      used: All variables that it uses.
      written: Those of them that it writes.
    """

    def __init__(self, used: Sequence[Variable], written: Sequence[Variable]):
        super().__init__("the program takes too few variables")
        self.used = used
        self.written = written


class Bound(dict[Any, Any]):
    """What stands for the variables of a program while it is traced."""

    def __init__(self, captured: Captured, values: Mapping[Variable, Any]):
        super().__init__(values)
        self.captured = captured


class Captured:
    """Variables that a program only reads, and those that it may write.

    Args:
      read: The former.
      written: The latter. Their arrays are donated, so the program returns all of them.
    """

    def __init__(self, read: Sequence[Variable] = (), written: Sequence[Variable] = ()):
        self.read = tuple(read)
        self.written = tuple(written)
        self._writable = frozenset(written)
        self._everything = self._writable.union(read)

    def __len__(self) -> int:
        return len(self.read) + len(self.written)

    def check_complete(
        self, used: Sequence[Variable], written: Sequence[Variable]
    ) -> None:
        """Raises unless all of these are among them.

        Raises:
          MoreVariables: Some are not, or are only read.
        """
        if self._everything.issuperset(used) and self._writable.issuperset(written):
            return
        raise MoreVariables(used, written)

    def including(
        self, used: Sequence[Variable], written: Sequence[Variable]
    ) -> Captured:
        """These and more."""
        everything = dict.fromkeys([*self.read, *self.written, *used])
        all_written = dict.fromkeys([*self.written, *written])
        return Captured([v for v in everything if v not in all_written], [*all_written])

    def bound(self, read: Sequence[Any] = (), written: Sequence[Any] = ()) -> Bound:
        """What stands for each in a trace."""
        return Bound(
            self,
            {
                **dict(zip(self.read, read, strict=True)),
                **dict(zip(self.written, written, strict=True)),
            },
        )

    # -- between traces --------------------------------------------------------------

    def take(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """The arrays for a launch, after which :meth:`write` must follow."""
        return (
            [v.layout.enter(v.array) for v in self.read],
            [v.layout.enter(v.take_array()) for v in self.written],
        )

    def write(self, news: Sequence[jax.Array]) -> None:
        """Lets the written ones hold what the launch returned."""
        for v, new in zip(self.written, news, strict=True):
            v.set_array(v.layout.leave(new))

    # -- inside of a trace -----------------------------------------------------------

    def load(self) -> tuple[list[Any], list[Any]]:
        """What stands for them in the function that is being traced."""
        return [v.array_here() for v in self.read], [
            v.array_here() for v in self.written
        ]

    def store(self, news: Sequence[Any]) -> None:
        """Lets the written ones hold traced arrays there."""
        frame = frames.current()
        for v, new in zip(self.written, news, strict=True):
            if frame is None:
                v.store(new)  # refuses
            else:
                frame.store(v, new)
