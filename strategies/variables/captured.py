"""The variables that one compiled program takes."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

    def launcher(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A program as a function of its other arguments, which writes what it wrote.

        Args:
          call: The compiled program. Takes the arrays of the variables first, returns
            its outputs and the new arrays.
        """
        if not self:
            return call
        is_direct = all(v.layout.is_direct for v in self._everything)
        launch = self._launch if is_direct else self._launch_with_copies
        return functools.partial(launch, call)

    def _launch(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Every line of this is on the path of every step.
        if any(map(_is_exposed, self.written)):
            for v in self.written:
                v.take_array()
        arrays = [*map(_array_of, self.read)], [*map(_array_of, self.written)]
        return _kept(call, (*arrays, *args), kwargs, self.written)

    def _launch_with_copies(
        self, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The same where arrays lie elsewhere between the calls."""
        read = [v.layout.enter(v.array) for v in self.read]
        written = [v.layout.enter(v.take_array()) for v in self.written]
        out = _kept(call, (read, written, *args), kwargs, self.written)
        for v in self.written:
            v.array = v.layout.leave(v.array)
        return out

    # -- inside of a trace -----------------------------------------------------------

    def inliner(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same in a function that is being traced, where variables are traced."""
        return functools.partial(self._inline, call) if self else call

    def _inline(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        read = [v.array_here() for v in self.read]
        written = [v.array_here() for v in self.written]
        with frames.any_trace():
            result, news = call(read, written, *args, **kwargs)
        frame = frames.current()
        for v, new in zip(self.written, news, strict=True):
            if frame is None:
                v.store(new)  # refuses, unless nothing is traced about it
            else:
                frame.store(v, new)
        return result


def _kept(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Any,
    written: Sequence[Variable],
) -> Any:
    """Calls a program, lets the variables hold what it returns, returns the rest.

    Python handles a Ctrl-C between its own steps only. There is none between the call,
    which consumes arrays, and keeping the new ones: both happen while one step draws
    from iterators.
    """
    if kwargs:
        call = functools.partial(call, **kwargs)
    results, again = itertools.tee(itertools.starmap(call, (args,)))
    news = itertools.chain.from_iterable(map(_news_of, results))
    collections.deque(map(setattr, written, itertools.repeat("array"), news), maxlen=0)
    return next(again)[0]


_array_of = operator.attrgetter("array")
_is_exposed = operator.attrgetter("is_exposed")
_news_of = operator.itemgetter(1)
