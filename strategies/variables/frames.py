"""What stands for variables while a function that uses them is traced.

A compiled step is a pure function, so the variables that it uses become its inputs, and
those that it writes its outputs too. While it is traced, a *frame* holds the traced
value of each. All live variables are offered, because which ones a step uses is known
only afterwards.

A value that is written at an inner level of the trace, such as the body of a
``lax.scan``, cannot be kept in a dictionary: it belongs to the inner trace. Such a
variable is held in a ``jax.Ref`` instead, which JAX carries through loops and branches.
That becomes known when it happens, and then the function is traced once more.

JAX remembers the traces of functions that a step calls by way of ``jax.jit`` or
``lax.scan``, and would not call them again, so that their reads and writes would go
unnoticed. Each frame therefore is a context of its own to JAX's caches.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.ref

from replicax import _compat
from replicax.errors import ContextError, ReplicaxError, listed

from ..merge import is_per_replica

if TYPE_CHECKING:
    from ..strategy import Strategy
    from .variable import Variable

T = TypeVar("T")

_live: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
_serials = itertools.count()
_registering = threading.Lock()
_trace_of_its_own = jax.make_user_context(0)
_traces = itertools.count(1)


def register(variable: Variable) -> None:
    """Notes that a variable was made."""
    with _registering:
        _live[next(_serials)] = variable
    frame = current()
    if frame is not None:
        frame.created[variable] = None


def is_variable(x: Any) -> bool:
    """Whether ``x`` is a variable; for ``is_leaf``."""
    return getattr(type(x), "is_replicax_variable", False)


def copies(tree: Any) -> Any:
    """Puts its copies, or its one value, in the place of each variable of a tree."""
    return jax.tree.map(
        lambda x: x.distributed() if is_variable(x) else x,
        tree,
        is_leaf=lambda x: is_variable(x) or is_per_replica(x),
    )


def live_variables(strategy: Strategy | None = None) -> list[Variable]:
    """The variables that a function may use, in the order they were made.

    Args:
      strategy: Whose variables, besides those of no strategy; or None, for all.
    """
    with _registering:
        variables = list(_live.values())
    if strategy is None:
        return variables
    return [v for v in variables if v.belongs_to(strategy) or v.is_free]


class Frame:
    """The traced values of variables, at one place in one trace.

    Args:
      values: For each variable on offer, what stands for it.
      in_refs: The variables to hold in refs, because they are written at inner levels.
      strategy: The strategy whose replica the values belong to; None, if they are all
        replicas' together.

    Attributes:
      used: The variables that were read or written, in order.
      written: Those that were written.
      created: Those that were made while the frame was current.
      inner_writes: Those that were written at an inner level and are in no ref.
    """

    def __init__(
        self,
        values: dict[Variable, Any],
        in_refs: Iterable[Variable],
        strategy: Strategy | None,
    ):
        self._strategy = strategy
        self.is_replica = strategy is not None
        self.used: dict[Variable, None] = {}
        self.written: dict[Variable, None] = {}
        self.created: dict[Variable, None] = {}
        self.inner_writes: dict[Variable, None] = {}
        self._values = dict(values)
        self._level = _compat.trace_level()
        self._refs = {
            v: jax.new_ref(self._values[v]) for v in in_refs if v in self._values
        }

    def load(self, variable: Variable) -> Any:
        """What the variable holds now."""
        self.use(variable)
        ref = self._refs.get(variable)
        return self._values[variable] if ref is None else ref[...]

    def store(self, variable: Variable, value: Any) -> None:
        """Lets the variable hold ``value``, which has its shape and dtype."""
        self.use(variable)
        self.written[variable] = None
        ref = self._refs.get(variable)
        if ref is not None:
            _set(ref, value, variable)
        elif _compat.trace_level() == self._level:
            self._values[variable] = value
        else:  # what is traced from here on will be traced again
            self.inner_writes[variable] = None

    def finish(self) -> list[Any]:
        """The last values of the written variables, in order."""
        for variable, ref in self._refs.items():
            self._values[variable] = jax.ref.freeze(ref)
        news = [self._values[v] for v in self.written]
        self._values, self._refs = {}, {}  # no traced value outlives its trace
        return news

    def use(self, variable: Variable) -> None:
        """Notes that the variable is used; one of no strategy joins the frame's."""
        if variable not in self._values:
            if variable in self.created:
                self._values[variable] = variable.initial_in(self)
            else:
                raise ContextError(
                    f"{variable!r} was used in a step of another strategy. A step can "
                    "use the variables that were made in its strategy's scope, or in "
                    "no scope."
                )
        if variable.is_free and self._strategy not in (None, variable.strategy):
            variable.adopt(self._strategy)
        self.used[variable] = None


def _set(ref: Any, value: Any, variable: Variable) -> None:
    try:
        ref[...] = value
    except Exception as error:
        if "vmapped" not in str(error):
            raise
        raise ContextError(
            f"{variable!r} was written in a jax.vmap with a value for each element of "
            "the batch, but it holds one. Return the values from the mapped function, "
            "combine them, and write after jax.vmap."
        ) from error


def trace_until_settled(
    trace: Callable[[], tuple[T, Frame, bool]],
    in_refs: dict[Variable, None],
    name: str,
) -> T:
    """Traces a function again for as long as its frame asks for it.

    Args:
      trace: Traces once. Returns the record, the frame, and whether some variable came
        to lie differently meanwhile.
      in_refs: The variables that frames hold in refs; more are added here.
      name: What the function is called.

    Returns:
      The last record.

    Raises:
      ReplicaxError: The function makes a new variable each time that it is traced.
    """
    has_created = False
    while True:
        record, frame, has_moved = trace()
        if frame.created and has_created:
            raise ReplicaxError(
                f"{name} makes a new variable each time that it is traced: "
                f"{listed([repr(v) for v in frame.created], ', ')}. Make variables "
                "once, before the call or where the function finds none yet."
            )
        has_created |= bool(frame.created)
        in_refs.update(frame.inner_writes)
        if not (frame.created or frame.inner_writes or has_moved):
            return record


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_thread = _PerThread()


def current() -> Frame | None:
    """The innermost frame of this thread."""
    return _thread.frames[-1] if _thread.frames else None


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[Frame]:
    """Makes a frame the current one, in a ``with``."""
    _thread.frames.append(frame)
    try:
        with _trace_of_its_own(next(_traces)):
            yield frame
    finally:
        _thread.frames.pop()


def any_trace() -> contextlib.AbstractContextManager[None]:
    """In its ``with``, JAX may use the trace of an earlier frame.

    For functions that take the arrays of variables as arguments.
    """
    return _trace_of_its_own(0)
