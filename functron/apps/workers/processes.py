"""The processes of the ranks, as the notebook sees them: started, asked, interrupted, ended.

The notebook's process blocks while the ranks compute: it waits for the first of answers, output and
ends. Output comes into the cell line by line, once where all ranks say the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

import torch.distributed as dist

from functron.apps.workers.worker import Answer, Place
from functron.spmd.flight import list_ranks

START_SECONDS = 120.0
INTERRUPT_SECONDS = 2.0
"""How long an interrupted program has to return on all ranks."""
HANG_SECONDS = 8.0
"""After which a rank that others wait for is named."""
_RELEASE_SECONDS = 1.0  # of an interrupt, after which ranks leave their groups
_LOOPBACK = "127.0.0.1"
_PROGRAM = "from functron.apps.workers.worker import main; main()"  # its classes have one name
_LOOK_SECONDS = 0.25
_MERGE_SECONDS = 0.3  # for which a line waits for the same one of other ranks


@dataclass
class Rank:
    """A rank's process.

    Attributes:
        number: of the rank.
        process: None: another host has started it.
        requests, questions: the two connections; see `functron.apps.workers.worker`.
        died: how it ended; "": it runs.
        late: answers that it owes to requests that were given up.
        where: what it said last of where it is, and when.
    """

    number: int
    process: subprocess.Popen | None
    requests: Any = None
    questions: Any = None
    died: str = ""
    late: int = 0
    where: Mapping[str, Any] = field(default_factory=dict)
    asked: float = 0.0
    answered: float = 0.0
    texts: dict[Any, bytes] = field(default_factory=dict)


class Interrupted(Exception):
    """Ctrl-C ended a request; `answers` are those that came, by rank."""

    def __init__(self, answers: dict[int, list[Answer]], busy: Sequence[int]):
        super().__init__()
        self.answers, self.busy = answers, busy


class Processes:
    """The processes of all ranks of a mesh.

    Args:
        mesh: names and sizes of its axes.
        device: "cpu" or "cuda".
        timeout_seconds: of collectives.
        write: shows text that ranks print: ``write(text, is_error)``.
    """

    def __init__(
        self,
        mesh: tuple[tuple[str, int], ...],
        device: str,
        timeout_seconds: float,
        write: Callable[[str, bool], None],
    ):
        self._mesh, self.device, self._timeout = mesh, device, timeout_seconds
        self._write, self.generation = write, 0
        self._token = secrets.token_bytes(32)
        self._owner = os.getpid()
        with socket.socket() as listener:
            listener.bind((_LOOPBACK, 0))
            listener.listen(4096)
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                _LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        self._store_at = _LOOPBACK, port
        self.ranks: list[Rank] = []
        self._lines: dict[bool, dict[int, deque]] = {False: {}, True: {}}

    def start(self, numbers: Sequence[int]) -> None:
        """Start the processes of these ranks, and wait until they are there.

        Raises:
            RuntimeError: one ended, or did not come in time; with what it printed.
        """
        with Listener((_LOOPBACK, 0), backlog=64, authkey=self._token) as listener:
            new = [Rank(number, self._spawn(number, listener.address)) for number in numbers]
            try:
                self._accept(listener, {rank.number: rank for rank in new})
            except BaseException:
                for rank in new:
                    _kill(rank)
                raise
        kept = [rank for rank in self.ranks if rank.number not in numbers]
        self.ranks = sorted([*kept, *new], key=lambda rank: rank.number)

    def _spawn(self, number: int, address: Any) -> subprocess.Popen:
        rest = number, number, self._mesh, self.device, self._timeout
        place = Place(tuple(address), self._token.hex(), *rest, tuple(sys.path))
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", _PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps(place._asdict()).encode() + b"\n")
        process.stdin.close()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return process

    def _accept(self, listener: Listener, new: Mapping[int, Rank]) -> None:
        deadline, missing = time.monotonic() + START_SECONDS, 2 * len(new)
        inner: Any = listener._listener  # the public class has no time limit
        inner._socket.settimeout(0.2)
        while missing:
            for rank in new.values():
                if rank.process is not None and rank.process.poll() is not None:
                    text = "".join(text for _, text in _read_pipes(rank)).strip()
                    ended = f"rank {rank.number} ended as it started ({_ending(rank.process)})"
                    raise RuntimeError(f"{ended}:\n{text}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ranks did not start in {START_SECONDS:.0f} s")
            try:
                connection = listener.accept()
            except TimeoutError:
                continue
            number, kind, _ = connection.recv()
            setattr(new[number], kind, connection)
            missing -= 1
        for rank in new.values():
            rank.requests.send(self._store_at)

    @property
    def living(self) -> list[Rank]:
        """The ranks that run."""
        return [rank for rank in self.ranks if not rank.died]

    def ask(
        self,
        requests: Mapping[int, Sequence[tuple[str, tuple]]],
        free: Sequence[int] = (),
        *,
        interruptible: bool = True,
    ) -> dict[int, list[Answer]]:
        """Ask ranks, each for a few things in order, and wait for their answers.

        A rank that ends meanwhile has no answer; `Rank.died` says why. The first request of a rank
        that fails is its last.

        Raises:
            Interrupted: Ctrl-C came: the ranks were interrupted, and those that could be waited
                for have answered.
        """
        if os.getpid() != self._owner:
            raise RuntimeError("the ranks were started by another process, which forked this one")
        asked = [rank for rank in self.living if rank.number in requests]
        with _taking_interrupts(interruptible, asked) as interrupt:
            self._await_late(asked, interrupt)
            for rank in asked:
                data = pickle.dumps((list(free), list(requests[rank.number])), protocol=5)
                with contextlib.suppress(OSError):  # its end is noticed below
                    rank.requests.send_bytes(data)
            answers = self._collect(asked, interrupt)
        if interrupt.at is not None:
            busy = [rank.number for rank in asked if rank.number not in answers and not rank.died]
            raise Interrupted(answers, busy)
        return answers

    def _await_late(self, asked: Sequence[Rank], interrupt: _Interrupt) -> None:
        """Let ranks end what Ctrl-C could not interrupt."""
        while any(rank.late and not rank.died for rank in asked):
            if interrupt.overdue():
                return
            late = [rank for rank in asked if rank.late]
            for rank in self._ready(late, _LOOK_SECONDS):
                if self._receive(rank) is not None:
                    rank.late -= 1

    def _collect(self, asked: Sequence[Rank], interrupt: _Interrupt) -> dict[int, list[Answer]]:
        answers: dict[int, list[Answer]] = {}
        began, told = time.monotonic(), set()
        while True:
            left = [r for r in asked if r.number not in answers and not r.died]
            if not left:
                break
            if interrupt.overdue():
                for rank in left:
                    rank.late += 1
                break
            for rank in self._ready(left, _LOOK_SECONDS):
                answer = self._receive(rank)
                if answer is not None:
                    answers[rank.number] = answer
            self.show_output()
            interrupt.go_on(left)
            if time.monotonic() - began > 1.0 and interrupt.at is None:
                self._look(asked, left, told)
                if any(rank.died for rank in asked):
                    interrupt.begin([rank for rank in left if not rank.died], asked_for=False)
            elif any(rank.died for rank in asked):
                interrupt.begin([rank for rank in left if not rank.died], asked_for=False)
        self.show_output(last=True)
        return answers

    def _ready(self, ranks: Sequence[Rank], seconds: float) -> list[Rank]:
        """The ranks of which there is an answer or an end, after what they print is shown."""
        by_connection = {rank.requests: rank for rank in ranks}
        pipes = [
            pipe
            for rank in self.ranks
            if rank.process is not None
            for pipe in (rank.process.stdout, rank.process.stderr)
            if pipe is not None and not pipe.closed
        ]
        found = wait([*by_connection, *pipes], seconds)
        if any(each not in by_connection for each in found):
            self.show_output()
        return [by_connection[each] for each in found if each in by_connection]

    def _receive(self, rank: Rank) -> list[Answer] | None:
        """An answer; None: the rank has ended."""
        try:
            return pickle.loads(rank.requests.recv_bytes())
        except (EOFError, OSError):
            self._bury(rank)
            return None

    def _bury(self, rank: Rank) -> None:
        process = rank.process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            rank.died = _ending(process)
        else:
            rank.died = "its connection was closed"
        self.show_output(last=True)
        _kill(rank)

    def find_dead(self) -> None:
        """Notice ranks that have ended since they were asked last."""
        for rank in self.living:
            if rank.process is not None and rank.process.poll() is not None:
                self._bury(rank)

    def _look(self, asked: Sequence[Rank], left: Sequence[Rank], told: set) -> None:
        """Name ranks that the others wait for."""
        now = time.monotonic()
        for rank in left:
            with contextlib.suppress(EOFError, OSError):
                while rank.questions.poll():
                    rank.where, rank.answered = rank.questions.recv(), now
                if rank.asked <= rank.answered:
                    rank.questions.send("where")
                    rank.asked = now
        silent = [r for r in left if r.asked > r.answered and now - r.asked > HANG_SECONDS]
        for rank in silent:
            if rank.number not in told:
                told.add(rank.number)
                text = f"rank {rank.number} has not answered for {HANG_SECONDS:.0f} s: its process"
                self._write(f"{text} ({_pid(rank)}) may be stopped\n", True)
        waiting = {r.number: r.where["waiting"] for r in left if r.where.get("waiting")}
        long = {n: (kind, s) for n, (kind, s) in waiting.items() if s > HANG_SECONDS - 1}
        others = [r for r in left if r.number not in waiting and r.where and r not in silent]
        if not long or not others:
            return
        kind, seconds = next(iter(long.values()))
        for rank in others:
            if rank.number not in told:
                told.add(rank.number)
                line = rank.where.get("line")
                at = f" at {line.file}:{line.number}, in {line.name}" if line else ""
                text = f"rank {rank.number} is{at or ' busy'}, while {list_ranks([*long])} "
                text += f"{'waits' if len(long) == 1 else 'wait'} for it in {kind}"
                self._write(f"{text} (for {seconds:.0f} s)\n", True)

    def show_output(self, *, last: bool = False) -> None:
        """Show the lines that ranks have printed: once, if all ranks have printed the same.

        Args:
            last: whether the ranks are done, so that what is left is shown too.
        """
        now = time.monotonic()
        for rank in self.ranks:
            for is_error, text in _read_pipes(rank, last=last):
                self._lines[is_error].setdefault(rank.number, deque()).append((now, text))
        for is_error, lines in self._lines.items():
            before = now if last else now - _MERGE_SECONDS
            for text in _merge(lines, len(self.ranks), before):
                self._write(text, is_error)

    def close(self) -> None:
        """End all processes."""
        if os.getpid() != self._owner:
            return
        for rank in self.ranks:
            _kill(rank)
            rank.died = rank.died or "it was closed"


def _read_pipes(rank: Rank, *, last: bool = True) -> Iterator[tuple[bool, str]]:
    """What a rank has printed: whole lines, and with `last` the rest; of errors or not."""
    if rank.process is None:
        return
    for is_error, pipe in ((False, rank.process.stdout), (True, rank.process.stderr)):
        if pipe is None or pipe.closed:
            continue
        text = rank.texts.pop(is_error, b"")
        while True:
            try:
                more = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not more:
                pipe.close()
                break
            text += more
        whole, newline, rest = text.rpartition(b"\n")
        if last and rest:
            whole, newline, rest = text, b"\n", b""
        if rest:
            rank.texts[is_error] = rest
        if newline:
            for line in whole.decode(errors="replace").split("\n"):
                if line or not last:
                    yield is_error, line


def _merge(lines: dict[int, deque], num_ranks: int, before: float) -> Iterator[str]:
    """Lines by rank, each with its time, merged: those of all ranks once and without a name.

    Lines that are not of all ranks stay in `lines` for a while, unless they are from `before`.
    """
    while any(lines.values()):
        first = min(number for number, found in lines.items() if found)
        at, line = lines[first][0]
        having = [n for n, found in lines.items() if any(text == line for _, text in found)]
        if len(having) < num_ranks:
            if at > before:
                return
            having = [n for n in having if lines[n][0][1] == line]
        for number in having:  # what a rank has printed before it
            while (text := lines[number].popleft()[1]) != line:
                yield f"[rank {number}] {text}\n"
        name = "" if len(having) == num_ranks else f"[{list_ranks(sorted(having))}] "
        yield f"{name}{line}\n"


def _ending(process: subprocess.Popen) -> str:
    code = process.poll()
    if code is None:
        return "its connection was closed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _pid(rank: Rank) -> str:
    return "of another host" if rank.process is None else f"pid {rank.process.pid}"


def _kill(rank: Rank) -> None:
    """End a rank's process and what it started."""
    for connection in (rank.requests, rank.questions):
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
    process = rank.process
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None and not pipe.closed:
            pipe.close()


class _Interrupt:
    """An interrupt of a request: when it came, and what was done.

    Attributes:
        at: when Ctrl-C came; None: it has not.
    """

    def __init__(self, ranks: Sequence[Rank]):
        self.at: float | None = None
        self._begun: float | None = None
        self._released = False
        self._ranks = ranks

    def signal(self, number: int, frame: Any) -> None:
        """The handler of SIGINT."""
        self.at = self.at or time.monotonic()
        self.begin([rank for rank in self._ranks if not rank.died])

    def begin(self, ranks: Sequence[Rank], *, asked_for: bool = True) -> None:
        """Interrupt the program on these ranks, once."""
        if self._begun is None:
            self._begun = time.monotonic()
            _tell(ranks, "interrupt")

    def go_on(self, ranks: Sequence[Rank]) -> None:
        """Have ranks that still wait for others leave their groups."""
        late = self._begun is not None and time.monotonic() - self._begun > _RELEASE_SECONDS
        if late and not self._released:
            self._released = True
            _tell([rank for rank in ranks if not rank.died], "release")

    def overdue(self) -> bool:
        """Whether Ctrl-C came so long ago that nothing is waited for any more."""
        return self.at is not None and time.monotonic() - self.at > INTERRUPT_SECONDS - 0.3


def _tell(ranks: Sequence[Rank], what: str) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.questions.send(what)


@contextlib.contextmanager
def _taking_interrupts(wanted: bool, ranks: Sequence[Rank]) -> Iterator[_Interrupt]:
    """Pass Ctrl-C on to the ranks in this with block, where handlers are allowed.

    Nothing is raised within: half a request would be left with the ranks.
    """
    interrupt = _Interrupt(ranks)
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.signal)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
