"""Keeping Ctrl-C out of places where it would leave state half written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Lets a Ctrl-C take effect at the end of the block only, which must be short.

    Python interrupts its main thread only, so in others there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, or not Python's
        yield
        return
    caught: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *event: caught.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for event in caught[-1:]:
            handler(*event)
