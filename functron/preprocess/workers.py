"""Worker processes that take tasks from one parent, and end when it does, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from functron.errors import Problem, raise_problems

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL = "TOKENIZERS_PARALLELISM"
"""What keeps the package tokenizers from starting threads of its own in every process."""


def run(
    count: int,
    start: Callable[[], Callable[[T], R]],
    tasks: Sequence[T],
    name: Callable[[T], str],
) -> Generator[tuple[T, R], None, None]:
    """Tasks with their results as they come in, of `count` processes, or of this one for one.

    Closing the iterator ends the processes. They are forked from a server that has this package
    imported and nothing else running, where the system can; each waits at a pipe of its own, so
    that none outlives its parent by more than a task.

    Args:
        count: at least 1.
        start: called once in every process, gives what does the tasks; can be pickled.
        tasks: in the order in which they are begun.
        name: what to call a task when its process dies.

    Raises:
        ValueError: a process died, which is what happens when memory is short.
        RuntimeError: a task failed; with its traceback.
    """
    if count == 1 or len(tasks) <= 1:
        with _one_thread():
            work = start() if tasks else None
            for task in tasks:
                assert work is not None
                yield task, work(task)
        return
    workers: dict[Connection, BaseProcess] = {}
    running: dict[Connection, T] = {}
    waiting = iter(tasks)
    try:
        for _ in range(min(count, len(tasks))):
            connection, process = _begin(start)
            workers[connection] = process
            _give(connection, waiting, running)
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                task = running.pop(ready)
                result = _answer(ready, workers[ready], name(task))
                _give(ready, waiting, running)
                yield task, result
    finally:
        _end(workers, idle=not running)


def _begin(start: Callable[[], Any]) -> tuple[Connection, BaseProcess]:
    context: Any = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["functron.preprocess"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, start), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _serve(connection: Connection, start: Callable[[], Callable[[Any], Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and decides
    os.environ[_PARALLEL] = "false"
    work = None
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            work = work or start()
            answer = work(task), ""
        except Exception:
            answer = None, traceback.format_exc()
        try:
            connection.send(answer)
        except BrokenPipeError:
            return


def _give(connection: Connection, waiting: Iterator[T], running: dict[Connection, T]) -> None:
    for task in waiting:
        running[connection] = task
        # to a dead process nothing can be sent; reading from it will say so
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send(task)
        return


def _answer(connection: Connection, process: BaseProcess, task: str) -> Any:
    try:
        result, failure = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        got = f"a process that died ({how}) in {task}"
        fix = "start again to go on; where memory is short, with fewer --workers"
        raise_problems("stopped", [Problem("workers", got, "its tokens", fix)])
        raise AssertionError("unreachable") from None
    if failure:
        raise RuntimeError(f"a worker failed in {task}\n{failure}")
    return result


def _end(workers: dict[Connection, Any], idle: bool) -> None:
    for connection in workers:
        connection.close()
    for process in workers.values():
        if not idle:
            process.terminate()
        process.join()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep tokenizers to this thread: one process is one process."""
    before = os.environ.get(_PARALLEL)
    os.environ[_PARALLEL] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_PARALLEL, None)
        else:
            os.environ[_PARALLEL] = before
