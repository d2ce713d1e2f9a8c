"""Ctrl-C and SIGTERM as a request that a running step outlives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Request:
    """Whether someone asked to stop.

    Attributes:
        signal: the signal that asked, or None.
    """

    signal: int | None = None


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Turn the first SIGINT or SIGTERM within the with block into a `Request`.

    The second one raises KeyboardInterrupt at once. The handlers that were installed before are
    put back at the end. Outside the main thread, where Python allows no handlers, nothing changes.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: object) -> None:
        if request.signal is not None:
            raise KeyboardInterrupt
        request.signal = number

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            # a handler that was not installed from Python comes as None and cannot be put back
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
