"""Which strategy is current in this thread, and where the caller stands.

There are three places to stand, as in ``tf.distribute``:

* *cross-replica*: inside ``strategy.scope()`` or a ``merge_call`` function;
* *replica*: inside a function that ``strategy.run`` traces;
* *default*: neither. Then a default strategy of one replica is current.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from replicax.errors import ContextError

if TYPE_CHECKING:
    from .replica_context import ReplicaContext
    from .strategy import Strategy


class _Frame(NamedTuple):
    """One entry of a thread's stack; no replica context means cross-replica."""

    strategy: Strategy
    replica_context: ReplicaContext | None
    is_updating: bool = False


class _PerThread(threading.local):
    """The stack of this thread and what ``experimental_set_strategy`` put under it."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.strategy: Strategy | None = None


_thread = _PerThread()


def _top() -> _Frame | None:
    if _thread.frames:
        return _thread.frames[-1]
    if _thread.strategy is not None:
        return _Frame(_thread.strategy, None)
    return None


_make_default: Callable[[], ReplicaContext]


def use_default(make: Callable[[], ReplicaContext]) -> None:
    """Says how to make the replica context that holds outside of any scope."""
    global _make_default
    _make_default = make


@functools.cache
def _default() -> _Frame:
    context = _make_default()
    return _Frame(context.strategy, context)


# -- public queries ------------------------------------------------------------------


def get_strategy() -> Strategy:
    """Returns the current strategy of this thread.

    Returns:
      The strategy whose scope or step the caller is in, else the default strategy
      (one replica on JAX's default device). Never None.

    Example:
      >>> import replicax as rx
      >>> rx.get_strategy().num_replicas_in_sync
      1
      >>> strategy = rx.OneDeviceStrategy("cpu:0")
      >>> with strategy.scope():
      ...     rx.get_strategy() is strategy
      True
    """
    top = _top()
    return _default().strategy if top is None else top.strategy


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current in this thread.

    Example:
      >>> import replicax as rx
      >>> rx.has_strategy()
      False
    """
    top = _top()
    return top is not None and top.strategy is not _default().strategy


def in_cross_replica_context() -> bool:
    """Whether the caller is in a scope or a merge function, and not in a step.

    False outside of any scope too, as in TF.

    Example:
      >>> import replicax as rx
      >>> rx.in_cross_replica_context()
      False
      >>> with rx.OneDeviceStrategy("cpu:0").scope():
      ...     rx.in_cross_replica_context()
      True
    """
    top = _top()
    return top is not None and top.replica_context is None


def get_replica_context() -> ReplicaContext | Any:
    """Returns the replica context that the caller is in.

    Returns:
      Inside ``strategy.run``: the context of the traced replica. In a scope or a merge
      function: None. Outside of both: the default strategy's context, with one
      replica.

    Example:
      >>> import replicax as rx
      >>> rx.get_replica_context().num_replicas_in_sync
      1
      >>> with rx.OneDeviceStrategy("cpu:0").scope():
      ...     print(rx.get_replica_context())
      None
    """
    top = _top()
    return _default().replica_context if top is None else top.replica_context


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy current in this thread, until another one is set.

    Args:
      strategy: The strategy, or None to return to the default one.

    Raises:
      ContextError: The caller is inside a ``with strategy.scope():`` or a step.

    Example:
      >>> import replicax as rx
      >>> rx.experimental_set_strategy(rx.OneDeviceStrategy("cpu:0"))
      >>> rx.has_strategy()
      True
      >>> rx.experimental_set_strategy(None)
    """
    if _thread.frames:
        raise ContextError(
            "experimental_set_strategy must not be called inside a strategy's scope. "
            "Leave the `with strategy.scope():` block first."
        )
    _thread.strategy = strategy


def in_default_context() -> bool:
    """Whether the caller is in no scope and no step."""
    return not _thread.frames and _thread.strategy is None


def stands_outside(strategy: Strategy) -> bool:
    """Whether the caller may run ``strategy``, being in no scope or just in its own."""
    frames = _thread.frames
    if not frames:
        return _thread.strategy is None or _thread.strategy is strategy
    only = frames[-1]
    return (
        len(frames) == 1 and only.replica_context is None and only.strategy is strategy
    )


def is_updating() -> bool:
    """Whether the caller is in a function that ``extended.update`` calls."""
    frames = _thread.frames
    return bool(frames) and frames[-1].is_updating


def in_merge_call() -> bool:
    """Whether the caller is in a function that a step passed to ``merge_call``."""
    frames = _thread.frames
    return bool(frames) and any(
        f.replica_context is not None and f.replica_context.is_traced
        for f in frames[:-1]
    )


# -- entering ------------------------------------------------------------------------


@contextlib.contextmanager
def cross_replica(strategy: Strategy, is_updating: bool = False) -> Iterator[Strategy]:
    """Puts the caller in the cross-replica context of ``strategy``."""
    _thread.frames.append(_Frame(strategy, None, is_updating))
    try:
        yield strategy
    finally:
        _thread.frames.pop()


@contextlib.contextmanager
def in_replica(context: ReplicaContext) -> Iterator[None]:
    """Puts the caller in a replica of ``context``'s strategy."""
    _thread.frames.append(_Frame(context.strategy, context))
    try:
        yield
    finally:
        _thread.frames.pop()


# -- checks --------------------------------------------------------------------------


def require_cross_replica(strategy: Strategy, call: str, instead: str) -> None:
    """Raises unless ``strategy``'s cross-replica methods may be called here.

    Args:
      strategy: The strategy whose method is called.
      call: The method, for the message.
      instead: What to call in a replica context, for the message.

    Raises:
      ContextError: The caller is inside a step, or in another strategy's scope.
    """
    top = _top()
    if top is None:
        return
    if top.replica_context is not None:
        raise ContextError(
            f"`{call}` belongs in a cross-replica context, but was called inside a "
            f"replica's step (a function passed to `run`). Use {instead}, or call it "
            "in a function passed to `get_replica_context().merge_call()`."
        )
    if top.strategy is not strategy:
        raise ContextError(
            f"`{call}` of {strategy!r} was called in the scope of another strategy, "
            f"{top.strategy!r}. Strategies must not be mixed: leave that scope first."
        )


def require_scope_allowed(strategy: Strategy) -> None:
    """Raises unless ``strategy.scope()`` may be entered here.

    Raises:
      ContextError: The caller is inside a step, or in another strategy's scope.
    """
    require_cross_replica(
        strategy, "scope()", "the strategy that is already current in the step"
    )


def require_current(context: ReplicaContext, call: str) -> None:
    """Raises unless ``context`` is the replica context that the caller is in.

    Raises:
      ContextError: It was saved and used after its step, or in another context.
    """
    if get_replica_context() is context:
        return
    top = _top()
    if top is None and context.strategy is get_strategy():
        return
    where = (
        "outside of any step"
        if top is None
        else "in a cross-replica context"
        if top.replica_context is None
        else "in the step of another run"
    )
    raise ContextError(
        f"`{call}` of a ReplicaContext was called {where}. It works only inside the "
        "step that it was taken in: call `rx.get_replica_context()` there."
    )
