"""Preparing batches in the background, a stated number ahead.

The producing thread never holds a reference to the :class:`Prefetched` iterator, so an
iterator that is dropped half-way is collected, and its finalizer ends the thread.
Everything the two sides share goes through ``queue.SimpleQueue``, whose ``put`` may be
called from a finalizer at any moment: a lock there could be held by the very thread
that the garbage collector interrupted.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import jax

_VALUE, _ERROR, _END = "value", "error", "end"


class _Channel:
    """What the two threads share."""

    def __init__(self, ahead: int):
        self.closed = False
        self.results: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(ahead):
            self.permits.put(None)

    def close(self) -> None:
        self.closed = True
        self.permits.put(None)


# The threads that live, so that none is running while the interpreter goes down.
_running: dict[threading.Thread, _Channel] = {}


class Prefetched(Iterator[Any]):
    """Iterates over ``iterator``, which a background thread runs ahead of the caller.

    An exception of ``iterator`` is raised to the caller with its own traceback, after
    the elements that came before it.

    Args:
      iterator: What to iterate over. From here on, only the thread touches it.
      ahead: How many elements may be ready and not yet asked for, at least 1.
    """

    def __init__(self, iterator: Iterator[Any], ahead: int):
        self._channel = channel = _Channel(ahead)
        self._ended = False
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

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if os.getpid() != self._process:
            raise RuntimeError(
                "This iterator was made before the process was forked, and the thread "
                "that prepares its batches is not here. Make the iterator afterwards."
            )
        channel = self._channel  # `close` puts another one in its place
        kind, value = channel.results.get()
        if kind is _VALUE:
            channel.permits.put(None)
            return value
        self._ended = True
        channel.results.put((_END, None))  # for other threads that wait here
        if kind is _ERROR:
            # A local name for the error would tie it and this frame in a cycle.
            raise value.pop()
        raise StopIteration

    def close(self) -> None:
        """Drops what is prepared and ends the thread.

        Waits for the element that the thread is making, if any. May be called twice.
        """
        self._ended = True
        self._finalizer.detach()
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._channel = _Channel(0)


def _produce(iterator: Iterator[Any], channel: _Channel, x64: bool) -> None:
    # JAX's settings belong to a thread; this one decides what 64 bit arrays become.
    with jax.enable_x64(x64):
        _produce_all(iterator, channel)


def _produce_all(iterator: Iterator[Any], channel: _Channel) -> None:
    thread = threading.current_thread()
    _running[thread] = channel
    try:
        while True:
            channel.permits.get()
            if channel.closed:
                channel.results.put((_END, None))
                return
            try:
                value = next(iterator)
            except StopIteration:
                channel.results.put((_END, None))
                return
            channel.results.put((_VALUE, value))
            del value
    except BaseException as error:
        channel.results.put((_ERROR, [error]))
    finally:
        try:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
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
