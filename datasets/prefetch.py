"""Elements of an iteration, made on demand or in the background a stated number ahead.

Both kinds are looked at first (``peek``) and taken afterwards (``take``), and both
steps may be repeated: whoever is interrupted in between finds the same element again.
Only one thread at a time may call them.

The producing thread never holds a reference to the :class:`Prefetched` object, so one
that is dropped half-way is collected, and its finalizer ends the thread. The two sides
share a ``deque``, and wake each other through ``queue.SimpleQueue``, whose ``put`` may
be called from a finalizer at any moment: a lock there could be held by the very thread
that the garbage collector interrupted.
"""

from __future__ import annotations

import atexit
import contextvars
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import jax

from .sources import close

_VALUE, _ERROR, _END = "value", "error", "end"


class OnDemand:
    """The elements of ``iterator``, each made when it is asked for.

    Args:
      iterator: What to iterate over.
    """

    runs_here = False

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self._made: deque[Any] = deque()
        self._failure = ""

    def peek(self) -> Any:
        """Returns the next element without taking it.

        Raises:
          StopIteration: There is none.
          RuntimeError: The iteration has failed before.
        """
        if not self._made:
            self._make()
        if not self._made:
            raise StopIteration
        return self._made[0]

    def _make(self) -> None:
        if self._failure:
            raise _stopped(self._failure)
        one = itertools.islice(self._iterator, 1)
        try:
            # In one call, so that no interrupt can come between making and keeping.
            self._made.extend(one)
        except BaseException as error:
            if not self._made:
                self._failure = _named(error)
            raise

    def take(self, element: Any) -> None:
        """Takes what ``peek`` returned, unless it is taken."""
        if self._made and self._made[0] is element:
            self._made.popleft()

    def refuse_fork(self) -> None:
        """Does nothing: there is no thread to miss."""

    def stop(self) -> None:
        """Does nothing: nobody waits here."""

    def close(self) -> None:
        """Ends the iteration. May be called twice."""
        self._failure = ""
        self._made.clear()
        close(self._iterator)


class _Channel:
    """What the two threads share.

    Each waits for a condition and is only woken by the queues, so that a token too many
    or one that an interrupt swallowed does no harm.
    """

    def __init__(self, ahead: int):
        self.ahead = ahead
        self.closed = False
        self.awaited = False
        self.results: deque[tuple[str, Any]] = deque()
        self.close_errors: list[BaseException] = []
        self._came: SimpleQueue[None] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()

    def close(self) -> None:
        self.closed = True
        self._room.put(None)
        self.results.clear()

    # -- the producer's side ---------------------------------------------------------

    def wait_for_room(self) -> bool:
        """Waits until another element may be made; returns whether it is wanted."""
        while not self.closed and len(self.results) >= self.ahead:
            self._room.get()
        return not self.closed

    def put(self, kind: str, value: Any = None) -> None:
        self.results.append((kind, value))
        _wake(self._came)

    # -- the consumer's side ---------------------------------------------------------

    def head(self) -> tuple[str, Any]:
        """Waits for a result and returns it without taking it."""
        while not self.results:
            _wake(self._room)  # an interrupt may have come before it was woken
            self._came.get()
        return self.results[0]

    def take(self, value: Any) -> None:
        if self.results and self.results[0][1] is value:
            self.results.popleft()
        _wake(self._room)


def _wake(queue: SimpleQueue[None]) -> None:
    if queue.empty():
        queue.put(None)


# The threads that live, so that none is running while the interpreter goes down.
_running: dict[threading.Thread, _Channel] = {}


class Prefetched:
    """The elements of ``iterator``, which a background thread runs ahead of the caller.

    An exception of ``iterator`` is raised to the caller with its own traceback, after
    the elements that came before it.

    Args:
      iterator: What to iterate over. From here on, only the thread touches it.
      ahead: How many elements may be ready and not yet taken, at least 1.
    """

    def __init__(self, iterator: Iterator[Any], ahead: int):
        self._channel = channel = _Channel(ahead)
        self._failure = ""
        self._process = os.getpid()
        # The thread sees the context variables of the code that asked for the data.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run,
            args=(
                _produce,
                iterator,
                channel,
                jax.numpy.result_type(float) == "float64",
            ),
            name="replicax-prefetch",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, channel.close)
        self._finalizer.atexit = False
        self._thread.start()

    @property
    def runs_here(self) -> bool:
        """Whether the caller is the thread that makes the elements."""
        return self._thread is threading.current_thread()

    def peek(self) -> Any:
        """Waits for the next element and returns it without taking it.

        Raises:
          StopIteration: There is none.
          RuntimeError: The iteration has failed before.
        """
        if self._channel.closed:
            raise StopIteration
        if self._failure:
            raise _stopped(self._failure)
        kind, value = self._channel.head()
        if kind is _VALUE:
            return value
        if kind is _ERROR:
            self._failure = _named(value[0])
            # A local name for the error would tie it and this frame in a cycle.
            raise value.pop()
        raise StopIteration

    def refuse_fork(self) -> None:
        """Raises if the process was forked since.

        Raises:
          RuntimeError: It was.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "This iterator was made before the process was forked, and the thread "
                "that prepares its batches is not here. Make the iterator afterwards."
            )

    def take(self, element: Any) -> None:
        """Takes what ``peek`` returned, unless it is taken, and makes room."""
        self._channel.take(element)

    def stop(self) -> None:
        """Wakes whoever waits for an element, and lets the thread end."""
        self._channel.awaited = True
        self._channel.close()

    def close(self) -> None:
        """Drops what is prepared and ends the thread. May be called twice.

        Waits for the element that the thread is making, if any. Raises what closing
        ``iterator`` raised.
        """
        self.stop()
        self._finalizer.detach()
        if not self.runs_here:
            self._thread.join()
        self._channel.results.clear()
        if self._channel.close_errors:
            raise self._channel.close_errors.pop()


def _named(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}".rstrip(":. ")
    except Exception:  # its __str__ is at fault too
        return name


def _stopped(failure: str) -> RuntimeError:
    return RuntimeError(
        f"This iteration has stopped with {failure}. To go on with the element that "
        "did not come, call iterator.set_state(iterator.get_state()); to start anew, "
        "make another iterator with iter(dataset)."
    )


def _produce(iterator: Iterator[Any], channel: _Channel, x64: bool) -> None:
    # JAX's settings belong to a thread; this one decides what 64 bit arrays become.
    with jax.enable_x64(x64):
        _produce_all(iterator, channel)


def _produce_all(iterator: Iterator[Any], channel: _Channel) -> None:
    thread = threading.current_thread()
    _running[thread] = channel
    try:
        while channel.wait_for_room():
            channel.put(_VALUE, next(iterator))
        channel.put(_END)
    except StopIteration:
        channel.put(_END)
    except BaseException as error:
        channel.put(_ERROR, [error])
    finally:
        try:
            close(iterator)
        except BaseException as error:
            if not channel.awaited:
                raise
            channel.close_errors.append(error)
        finally:
            del _running[thread]


@atexit.register
def _stop_at_exit() -> None:
    """Ends the threads while the interpreter and the devices still stand.

    A thread that hangs in the user's pipeline is left behind after a moment: it is a
    daemon, and holds nothing of ours.
    """
    for thread, channel in list(_running.items()):
        channel.close()
        thread.join(timeout=1.0)
