"""Batches made in the background, a few ahead of the steps that need them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


@contextmanager
def prefetched(
    batch: Callable[[int], T], start: int, stop: int, depth: int = 2
) -> Iterator[Callable[[int], T]]:
    """`batch`, whose values for steps `start` to ``stop - 1`` one thread makes before they are due.

    Since a batch is a pure function of its step, this changes no value: steps that nobody was
    expected to ask for are made when asked for. At the end of the block the thread ends, after the
    batch that it is at.

    Args:
        batch: what makes the batch of a step; called by one thread, in the order of the steps.
        start: the first step.
        stop: one more than the last.
        depth: the most batches that wait, beside the one being made; 0: no thread, the block has
            `batch` itself.

    Yields:
        A function of the step; what `batch` raised for a step, it raises when asked for that step.
    """
    if depth < 1 or stop <= start:
        yield batch
        return
    ahead = _Ahead(batch, start, stop, depth)
    try:
        yield ahead.take
    finally:
        ahead.close()


class _Ahead(Generic[T]):
    """The thread, and the batches that wait: what it has made and nobody has taken."""

    def __init__(self, batch: Callable[[int], T], start: int, stop: int, depth: int):
        self._batch, self._next, self._stop, self._depth = batch, start, stop, depth
        self._made: deque[tuple[T | None, BaseException | None]] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for step in range(self._next, self._stop):
            try:
                made = self._batch(step), None
            except BaseException as error:
                made = None, error
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._made) < self._depth)
                if self._closed:
                    return
                self._made.append(made)
                self._changed.notify_all()
            if made[1] is not None:
                return

    def take(self, step: int) -> T:
        """The batch of `step`; waits for it where it is the next one."""
        if step != self._next or self._closed:
            return self._batch(step)
        with self._changed:
            self._changed.wait_for(lambda: self._made)
            value, error = self._made.popleft()
            self._next += 1
            self._changed.notify_all()
        if error is not None:
            self._next = self._stop  # the thread has ended
            raise error
        return value  # type: ignore[return-value]  (there is one unless there is an error)

    def close(self) -> None:
        """End the thread, and drop what waits."""
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()
        self._thread.join()
