"""The processes of the ranks, as the notebook sees them: started, asked, interrupted, ended.

The notebook's process blocks while the ranks compute: it waits for the first of answers, output and
ends. Output comes into the cell line by line, once where all ranks say the same.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import linecache
import os
import pickle
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from typing import Any, NamedTuple

from functron.apps.notebook.shipping import load, receive_message, send_message
from functron.apps.notebook.worker import Answer, Failure, Hello, WorkerPlace, read_answers
from functron.core.errors import refuse
from functron.spmd.flight import list_ranks
from functron.spmd.mesh import listen_for_ranks

START_SECONDS = 120.0
HOSTS_SECONDS = 900.0
INTERRUPT_SECONDS = 2.0
"""How long an interrupted program has to return on all ranks."""
GRACE_SECONDS = 0.3
"""For which Ctrl-C lets a call that consumes values end by itself."""
HANG_SECONDS = 8.0
"""After which a rank that others wait for is named."""
_RELEASE_SECONDS = 0.8  # of an interrupt, after which ranks leave their groups
_SOON_SECONDS = 0.02  # after which Ctrl-C is raised that came as a call ended
_STUCK_SECONDS = 3.0  # of Ctrl-C, after which another one gives up sending
_LOOPBACK = "127.0.0.1"
_PROGRAM = (  # it finds this library where the notebook does, and its classes have one name
    "import json, sys; given = json.loads(sys.stdin.readline()); sys.path[:] = given['path']; "
    f"from {WorkerPlace.__module__} import main; main(given)"
)
_FAIL_SECONDS = 1.5  # after the first failure, in which others may fail alike
_LOOK_SECONDS = 0.25
_MERGE_SECONDS = 0.3  # for which a line waits for the same one of other ranks


_signal: Any = importlib.import_module("_signal")
"""`signal` without its enumerations, which cost more than the call does."""
_NEWLINE = "\n"
RESTART = "ranks.restart()"
_FOLLOWS = ("LostRanksError", "DistBackendError", "HostError", "KeyboardInterrupt")
"""Errors of ranks that others have left."""


class RankError(RuntimeError):
    """A rank died, or raised what cannot be raised here."""


@dataclass
class Rank:
    """A rank's process.

    Attributes:
        number: of the rank.
        process: None: another host has started it.
        requests, questions: the two connections; see `functron.apps.notebook.worker`.
        died: how it ended; "": it runs.
        late: answers that it owes to requests that were given up.
        where: what it said last of where it is, and when.
        free: values of which it is to be told that nobody refers to them any more.
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
    free: list[int] = field(default_factory=list)


class InterruptedCallError(Exception):
    """Ctrl-C ended a request.

    Attributes:
        answers: those that came, by rank.
        busy: ranks that could not be waited for.
        sent: whether the request was sent.
    """

    def __init__(self, answers: dict[int, list[Answer]], busy: Sequence[int], *, sent: bool):
        super().__init__()
        self.answers, self.busy, self.sent = answers, busy, sent


class SentRequests(NamedTuple):
    """Requests that ranks were sent.

    Attributes:
        serial: their number.
        generation: of the groups.
        asked: the ranks.
        interruptible: see `Processes.ask`.
        grace_seconds: see `_Interrupt`.
    """

    serial: int
    generation: int
    asked: list[Rank]
    interruptible: bool
    grace_seconds: float


@dataclass(frozen=True)
class Hosts:
    """Where the ranks of a mesh run.

    Attributes:
        address: of this machine, "host:port", where processes of other hosts join; "": none do.
        num_local: ranks on this machine, the first ones.
        token: that the others have in their environment; "": a new one.
    """

    address: str
    num_local: int
    token: str = ""

    def where(self) -> tuple[str, int]:
        """The host and the port."""
        host, _, port = self.address.rpartition(":")
        return (host, int(port)) if self.address else (_LOOPBACK, 0)

    def listens(self) -> tuple[str, int] | str:
        """Where processes connect: a socket of this machine alone, if all ranks are here.

        It costs half of what one of TCP does; of the kind that has no file, which Linux has.
        """
        alone = not self.address and sys.platform == "linux"
        return f"\0functron-{secrets.token_hex(16)}" if alone else self.where()


class Processes:
    """The processes of all ranks of a mesh.

    Args:
        mesh: names and sizes of its axes.
        device: "auto", "cpu" or "cuda".
        hosts: where they run.
        timeout_seconds: of collectives.
        write: shows text that ranks print: ``write(text, is_error)``.

    Attributes:
        device: "cpu" or "cuda", once they run.
        generation: of their groups.
    """

    def __init__(
        self,
        mesh: tuple[tuple[str, int], ...],
        device: str,
        hosts: Hosts,
        timeout_seconds: float,
        write: Callable[[str, bool], None],
    ):
        self._mesh, self.device, self._hosts = mesh, device, hosts
        self._timeout, self._write, self.generation = timeout_seconds, write, 0
        self._token = hosts.token or secrets.token_hex(16)
        self._owner, (host, _) = os.getpid(), hosts.where()
        self._store, port = listen_for_ranks(host)
        self._store_at = host, port
        self.ranks: list[Rank] = []
        self._lines: dict[bool, dict[int, deque]] = {False: {}, True: {}}
        self._drawing: dict[bool, int] = {}  # ranks that draw a bar, on standard output and error
        self.lock = threading.RLock()
        self._interrupt: _Interrupt | None = None
        self._soon: threading.Timer | None = None
        self._prints = False  # whether ranks have printed what may not all be shown yet
        self._serial = self._known = 0
        self._outstanding: deque[SentRequests] = deque()

    def start(self, numbers: Sequence[int]) -> None:
        """Start the processes of these ranks, or wait for them from other hosts.

        Raises:
            ValueError: they have not the same kind of device.
            RuntimeError: one ended, or did not come in time; with what it printed.
        """
        key, new, at = self._token.encode(), dict[int, Rank](), self._hosts.listens()
        with (
            self.alone() as interrupt,
            Listener(at, backlog=64, authkey=key) as listener,
        ):
            try:
                for number in numbers:
                    if number < self._hosts.num_local:
                        found = at if isinstance(at, str) else listener.address
                        new[number] = Rank(number, self._spawn(number, found))
                others = [number for number in numbers if number not in new]
                self._accept(listener, new, others, interrupt)
            except BaseException:
                for rank in new.values():
                    _kill(rank)
                raise
        kept = [rank for rank in self.ranks if rank.number not in numbers]
        self.ranks = sorted([*kept, *new.values()], key=lambda rank: rank.number)

    def _spawn(self, number: int, address: Any) -> subprocess.Popen:
        # as torchrun does: ranks that each start a thread for every core wait for one another
        threads = {"OMP_NUM_THREADS": "1"} if self._hosts.num_local > 1 else {}
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-c", _PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, env=threads | os.environ,
        )  # fmt: skip
        assert process.stdin is not None
        given = {
            "address": address, "token": self._token.encode().hex(), "number": number,
            "num_local": self._hosts.num_local, "device": self.device, "path": sys.path,
        }  # fmt: skip
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.close()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return process

    def _accept(
        self, listener: Listener, new: dict[int, Rank], others: Sequence[int], interrupt: _Interrupt
    ) -> None:
        """Take the connections of the local ranks, `new`, and of as many of other hosts."""
        if others:
            self._write(self._invite(len(others)), True)
        limit = HOSTS_SECONDS if others else START_SECONDS
        deadline, missing = time.monotonic() + limit, 2 * (len(new) + len(others))
        inner: Any = vars(listener)["_listener"]  # the public class has no time limit
        inner._socket.settimeout(0.2)
        told, joined = {}, {}
        while missing:
            for rank in new.values():
                if rank.process is not None and rank.process.poll() is not None:
                    text = "".join(f"{text}\n" for _, text in _read_pipes(rank)).strip()
                    ended = f"rank {rank.number} ended as it started ({_ending(rank.process)})"
                    raise RuntimeError(f"{ended}:\n{text}")
            if interrupt.at is not None:
                raise KeyboardInterrupt("the ranks were not started")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{missing // 2} ranks did not come within {limit:.0f} s")
            try:
                connection = listener.accept()
            except (TimeoutError, AuthenticationError):
                continue
            hello = Hello(*connection.recv())
            if hello.host:
                at = hello.host, hello.local_rank
                rank = joined.setdefault(at, Rank(-1, None))
                told.setdefault(at, hello)
            else:
                rank = new[hello.number]
                told[hello.number] = hello
            setattr(rank, hello.kind, connection)
            missing -= 1
        places = _order_hosts([told[at] for at in joined])
        for number, hello in zip(others, places, strict=True):
            rank = new[number] = joined[hello.host, hello.local_rank]
            rank.number, told[number] = number, hello
        self.device = _one_device({number: told[number].device for number in new})
        for number, rank in new.items():
            at = told[number].local_rank, told[number].num_local
            rest = self._mesh, self.device, self._timeout, self._store_at
            rank.requests.send(tuple(WorkerPlace(number, *at, *rest)))

    def _invite(self, count: int) -> str:
        command = f"torchrun --nproc-per-node N -m functron join {self._hosts.address}"
        return (
            f"waiting for {count} ranks of other hosts; start them there, N on each, by\n"
            f"  FUNCTRON_TOKEN={self._token} {command}\n"
        )

    @property
    def living(self) -> list[Rank]:
        """The ranks that run."""
        return [rank for rank in self.ranks if not rank.died]

    @contextlib.contextmanager
    def alone(self, grace_seconds: float = 0.0) -> Iterator[_Interrupt]:
        """For one thread at a time; Ctrl-C raises nothing in it: half a request would be left.

        Where the block ends all the same, KeyboardInterrupt is raised soon after it, so that its
        results are assigned before, or at the beginning of the next block.

        Args:
            grace_seconds: see `_Interrupt`.
        """
        self.check_owner()
        with self.lock:
            if self._interrupt is not None:
                yield self._interrupt
                return
            main = threading.current_thread() is threading.main_thread()
            if main and self._soon is not None:
                soon, self._soon = self._soon, None
                if soon.is_alive():
                    soon.cancel()
                    raise KeyboardInterrupt
            interrupt = self._interrupt = _Interrupt(grace_seconds)
            before = _signal.signal(signal.SIGINT, interrupt.signal) if main else None
            try:
                yield interrupt
            finally:
                self._interrupt = None
                if main:
                    _signal.signal(signal.SIGINT, before)
        if interrupt.at is not None:
            ident = threading.get_ident()
            self._soon = threading.Timer(_SOON_SECONDS, signal.pthread_kill, (ident, signal.SIGINT))
            self._soon.daemon = True
            self._soon.start()

    def check_owner(self) -> None:
        """Raise RuntimeError in a process that was forked from the one that started the ranks."""
        if os.getpid() != self._owner:
            raise RuntimeError(
                "got a started mesh in a process that was forked from the one that started it; "
                "wanted that one; fix: start a mesh of its own"
            )

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

        Args:
            requests: of each rank: names and arguments.
            free: values that nobody refers to any more.
            interruptible: whether Ctrl-C interrupts what the ranks do; else they end it.

        Raises:
            InterruptedCallError: Ctrl-C came: the ranks were interrupted, and those that could be
                waited for have answered.
        """
        with self.alone():
            return self.collect(self.send(requests, free, interruptible=interruptible))

    def send(
        self,
        requests: Mapping[int, Sequence[tuple[str, tuple]]],
        free: Sequence[int] = (),
        *,
        interruptible: bool = True,
        grace_seconds: float = 0.0,
    ) -> SentRequests:
        """Ask ranks without waiting for their answers, which `collect` returns; see `ask`.

        Where ranks have others to answer yet, and fail in these, they leave calls of this out. Only
        in a block of `alone`.
        """
        interrupt, living = self._interrupt, self.living
        assert interrupt is not None
        interrupt.since = time.monotonic()
        for rank in living:
            rank.free += free
        asked = [rank for rank in living if rank.number in requests]
        self._await_late(asked, interrupt)
        if interrupt.at is not None and (interruptible or any(rank.late for rank in asked)):
            late = [rank.number for rank in asked if rank.late]
            raise InterruptedCallError({}, late, sent=False)
        self._serial += 1
        before, data = None, b""
        for rank in asked:
            each = requests[rank.number]
            if before is None or each is not before[0] or rank.free != before[1]:
                told = self._serial, self._known, rank.free, each
                data = pickle.dumps(told, protocol=5)
            before, rank.free = (each, rank.free), []
            self._send(rank, data, interrupt)
        sent = SentRequests(self._serial, self.generation, asked, interruptible, grace_seconds)
        self._outstanding.append(sent)
        return sent

    def collect(self, sent: SentRequests, *, ends: bool = False) -> dict[int, list[Answer]]:
        """The answers to what was sent, the earliest first; see `ask`.

        Args:
            sent: of these, the earliest that were not collected.
            ends: whether the ranks are to leave it, as Ctrl-C has them.
        """
        interrupt, asked = self._interrupt, sent.asked
        assert interrupt is not None
        assert self._outstanding.popleft() is sent
        interrupt.follow(sent)
        if ends:
            interrupt.begin()
        interrupt.go_on()
        try:
            answers = self._collect(asked, interrupt)
        finally:
            interrupt.ranks, self._known = [], sent.serial
        if interrupt.at is not None:
            busy = [rank.number for rank in asked if rank.number not in answers and not rank.died]
            failed = any(answer[-1].failure for answer in answers.values())
            if busy or (sent.interruptible and failed):
                raise InterruptedCallError(answers, busy, sent=True)
        return answers

    def _end_outstanding(self) -> None:
        """Wait a little for what nobody has collected, and tell what failed in it."""
        deadline = time.monotonic() + INTERRUPT_SECONDS
        while self._outstanding:
            answers, sent = dict[int, list[Answer]](), self._outstanding.popleft()
            while left := [r for r in sent.asked if r.number not in answers and not r.died]:
                if (seconds := deadline - time.monotonic()) <= 0:
                    return
                for rank in self._ready(left, seconds):
                    if (answer := self._receive(rank)) is not None:
                        answers[rank.number] = answer
            self.show_output(last=True)
            try:
                raise_failures("a call", answers, sent.asked, len(self.ranks))
            except Exception as error:
                text = _NEWLINE.join([str(error), *getattr(error, "__notes__", ())])
                self._write(f"{type(error).__name__}: {text}\n", True)

    def _send(self, rank: Rank, data: bytes, interrupt: _Interrupt) -> None:
        try:
            interrupt.is_sending = True
            with contextlib.suppress(OSError):  # its end is noticed below
                send_message(rank.requests, data)
        except KeyboardInterrupt:
            rank.died = "Ctrl-C came while it did not take what it was sent"
            _kill(rank)
        finally:
            interrupt.is_sending = False

    def _await_late(self, asked: Sequence[Rank], interrupt: _Interrupt) -> None:
        """Let ranks end what Ctrl-C could not interrupt."""
        while late := [rank for rank in asked if rank.late and not rank.died]:
            if interrupt.overdue():
                return
            for rank in self._ready(late, _LOOK_SECONDS):
                if self._receive(rank) is not None:
                    rank.late -= 1

    def _collect(self, asked: Sequence[Rank], interrupt: _Interrupt) -> dict[int, list[Answer]]:
        answers: dict[int, list[Answer]] = {}
        began, failed, told = time.monotonic(), None, set()
        while left := [r for r in asked if r.number not in answers and not r.died]:
            if interrupt.overdue():
                for rank in left:
                    rank.late += 1
                break
            seconds = _LOOK_SECONDS if interrupt.at is None else 0.05
            for rank in self._ready(left, seconds):
                answer = self._receive(rank)
                if answer is not None:
                    answers[rank.number] = answer
                    if answer[-1].failure is not None:
                        failed = failed or time.monotonic()
            interrupt.go_on()
            if (now := time.monotonic()) - began > 1.0 and interrupt.at is None:
                self._look(asked, left, told)
            if any(rank.died for rank in asked) or (failed and now - failed > _FAIL_SECONDS):
                interrupt.begin()
        if self._prints or any(rank.texts or rank.process is None for rank in self.ranks):
            self._prints = False
            self.show_output(last=True)
        return answers

    def _ready(self, ranks: Sequence[Rank], seconds: float) -> list[Rank]:
        """The ranks of which there is an answer or an end, after what they print is shown."""
        connections, poller = {rank.requests.fileno(): rank for rank in ranks}, select.poll()
        for number in connections:  # before the pipes: what was printed before an answer is seen
            poller.register(number, select.POLLIN)
        for process in [rank.process for rank in self.ranks if rank.process is not None]:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None and not pipe.closed:
                    poller.register(pipe.fileno(), select.POLLIN)
        found = [number for number, _ in poller.poll(1000 * seconds)]
        self._prints = self._prints or any(number not in connections for number in found)
        if self._prints:
            self.show_output()
        return [connections[number] for number in found if number in connections]

    def _receive(self, rank: Rank) -> list[Answer] | None:
        """An answer; None: the rank has ended."""
        try:
            return read_answers(receive_message(rank.requests))
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
        self.check_owner()
        for rank in self.living if _may_have_ended() else ():
            if rank.process is not None and rank.process.poll() is not None:
                self._bury(rank)

    def _look(self, asked: Sequence[Rank], left: Sequence[Rank], told: set) -> None:
        """Name ranks that the others wait for."""
        now = time.monotonic()
        for rank in left:
            _read_questions(rank)
            if rank.asked <= rank.answered:
                _tell([rank], "where")
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
                if not text.endswith("\r"):
                    self._lines[is_error].setdefault(rank.number, deque()).append((now, text))
                elif text[:-1] and self._drawing.setdefault(is_error, rank.number) == rank.number:
                    self._write(f"\r{text[:-1]}", is_error)
        for is_error, lines in self._lines.items():
            before = now if last else now - _MERGE_SECONDS
            text = "".join(_merge(lines, len(self.ranks), before))
            if text:
                over = "" if self._drawing.pop(is_error, None) is None else "\r"
                self._write(over + text, is_error)

    def end(self, numbers: Sequence[int], why: str) -> None:
        """End the processes of these ranks."""
        for rank in self.ranks:
            if rank.number in numbers:
                _kill(rank)
                rank.died = rank.died or why

    def close(self) -> None:
        """End all processes."""
        if os.getpid() != self._owner:
            return
        with self.alone():
            self._end_outstanding()
            for rank in self.ranks:
                _kill(rank, seconds=0.0)
            for rank in self.ranks:
                _kill(rank)
                rank.died = rank.died or "it was closed"


def _order_hosts(given: Sequence[Hello]) -> list[Hello]:
    """Processes of other hosts in the order of ranks: each host's together."""
    first: dict[str, int] = {}
    for hello in given:
        first[hello.host] = min(first.get(hello.host, hello.number), hello.number)
    return sorted(given, key=lambda hello: (first[hello.host], hello.host, hello.local_rank))


def _one_device(devices: Mapping[int, str]) -> str:
    if len(kinds := {*devices.values()}) > 1:
        got = ", ".join(f"{device} on rank {number}" for number, device in devices.items())
        refuse(
            "the ranks cannot compute together", "device", got, "one kind", 'say "cpu" or "cuda"'
        )
    return kinds.pop()


def _read_pipes(rank: Rank, *, last: bool = True) -> Iterator[tuple[bool, str]]:
    """The lines that a rank has printed, and with `last` the rest; whether of errors."""
    if rank.process is None:
        yield from _read_forwarded(rank)
        return
    for is_error, pipe in ((False, rank.process.stdout), (True, rank.process.stderr)):
        if pipe is None or pipe.closed:
            continue
        closed = False
        while not closed:
            try:
                more = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                break
            rank.texts[is_error] = rank.texts.get(is_error, b"") + more
            closed = not more
        if closed:
            pipe.close()
        yield from ((is_error, line) for line in _take_lines(rank, is_error, last=last))


def _read_forwarded(rank: Rank) -> Iterator[tuple[bool, str]]:
    """The lines that a rank of another host has printed."""
    _read_questions(rank)
    for is_error in (False, True):
        yield from ((is_error, line) for line in _take_lines(rank, is_error, last=False))


def _take_lines(rank: Rank, is_error: bool, *, last: bool) -> Iterator[str]:
    """The lines among what a rank has printed; those that are written over keep their "\\r"."""
    text = rank.texts.pop(is_error, b"")
    if not text:
        return
    *found, rest = re.split(rb"(\r(?!\n|\Z)|\r?\n)", text)
    for line, end in zip(found[::2], found[1::2], strict=True):
        yield line.decode(errors="replace") + ("\r" if end == b"\r" else "")
    if rest and last:
        yield rest.decode(errors="replace").removesuffix("\r")
    elif rest:
        rank.texts[is_error] = rest


def _read_questions(rank: Rank) -> None:
    """Take what a rank has said aside of its answers: where it is, and what it has printed."""
    with contextlib.suppress(EOFError, OSError):
        while rank.questions.poll():
            found = rank.questions.recv()
            if isinstance(found, tuple):
                _, is_error, text = found
                rank.texts[is_error] = rank.texts.get(is_error, b"") + text.encode()
            else:
                rank.where, rank.answered = found, time.monotonic()


def _merge(lines: dict[int, deque], num_ranks: int, before: float) -> Iterator[str]:
    """Lines by rank, each with its time, merged: those of all ranks once and without a name.

    Lines that are not of all ranks stay in `lines` for a while, unless they are from `before`.
    """
    counts = {number: Counter(text for _, text in found) for number, found in lines.items()}
    while any(lines.values()):
        first = min(number for number, found in lines.items() if found)
        at, line = lines[first][0]
        having = [number for number, found in counts.items() if found[line]]
        if len(having) < num_ranks:
            if at > before:
                return
            having = [n for n in having if lines[n][0][1] == line]
        for number in having:  # what a rank has printed before it
            while (text := lines[number].popleft()[1]) != line:
                counts[number][text] -= 1
                yield f"[rank {number}] {text}\n"
            counts[number][line] -= 1
        name = "" if len(having) == num_ranks else f"[{list_ranks(sorted(having))}] "
        yield f"{name}{line}\n"


def _may_have_ended() -> bool:
    """Whether one of all the processes that this one has started may have ended."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except (AttributeError, ChildProcessError):  # not on this system; or there is none
        return True


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


def _kill(rank: Rank, seconds: float = 5.0) -> None:
    """End a rank's process and what it started, and wait for its end."""
    for connection in (rank.requests, rank.questions):
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
    process = rank.process
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if not seconds:
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None and not pipe.closed:
            pipe.close()


class _Interrupt:
    """An interrupt of a request: when it came, and what was done.

    Args:
        grace_seconds: for which a first Ctrl-C lets the ranks end what they do.

    Attributes:
        at: when Ctrl-C came; None: it has not.
        ranks: whose program it interrupts.
        since: when the request began.
        request: which one: its serial number, and the generation of the groups.
        is_sending: whether a rank is being sent a request.
    """

    def __init__(self, grace_seconds: float):
        self.at: float | None = None
        self.ranks: Sequence[Rank] = ()
        self.since = 0.0
        self.request: tuple[int, int] = 0, 0
        self.is_sending = False
        self._grace = grace_seconds
        self._begun: float | None = None
        self._released = False

    def signal(self, number: int, frame: Any) -> None:
        """The handler of SIGINT."""
        now = time.monotonic()
        if self.is_sending and self.at is not None and now - self.at > _STUCK_SECONDS:
            raise KeyboardInterrupt
        if self.at is not None or not self._grace:
            self.begin()
        self.at = self.at or now

    def follow(self, sent: SentRequests) -> None:
        """Interrupt these from now on."""
        self.ranks = sent.asked if sent.interruptible else []
        self.request, self._begun, self._released = sent[:2], None, False
        self.since = self.since or time.monotonic()
        self._grace = max(self._grace, sent.grace_seconds)

    def begin(self) -> None:
        """Interrupt the program on the ranks, once."""
        if self._begun is None and self.ranks:
            self._begun = time.monotonic()
            _tell(self.ranks, ("interrupt", self.request[0]))

    def go_on(self) -> None:
        """Interrupt after the time of grace; and have all ranks leave groups in which one waits."""
        now = time.monotonic()
        if self.at is not None and now - self.at > self._grace:
            self.begin()
        if self._begun is not None and now - self._begun > _RELEASE_SECONDS and not self._released:
            self._released = True
            _tell(self.ranks, ("release", self.request[1]))

    def overdue(self) -> bool:
        """Whether Ctrl-C came so long ago that nothing is waited for any more."""
        now = time.monotonic()
        return self.at is not None and now - max(self.at, self.since) > INTERRUPT_SECONDS - 0.3


def show_text(text: str, is_error: bool) -> None:
    """Write what ranks or this library say into the cell."""
    stream = sys.stderr if is_error else sys.stdout
    stream.write(text)
    stream.flush()


def _tell(ranks: Sequence[Rank], what: Any) -> None:
    for rank in ranks:
        if not rank.died:
            with contextlib.suppress(OSError):
                rank.questions.send(what)


def show_warnings(answers: Mapping[int, list[Answer]], num_ranks: int) -> None:
    """Warn of what ranks warned of."""
    found: dict[tuple, list[int]] = {}
    for number, each in answers.items():
        for warned in each[-1].warned:
            found.setdefault(warned, []).append(number)
    for (category, text, file, line), numbers in found.items():
        name = "" if len(numbers) == num_ranks else f"[{list_ranks(numbers)}] "
        warnings.warn_explicit(f"{name}{text}", category, file, line)


def raise_failures(
    name: str,
    answers: Mapping[int, list[Answer]],
    asked: Sequence[Rank],
    num_ranks: int,
    where: str = "",
) -> None:
    """Raise what ranks raised: one error, with the ranks and the line that it is about.

    Args:
        name: of what was asked for.
        answers: by rank.
        asked: the ranks.
        num_ranks: of the mesh.
        where: the line of the notebook that asked for it, if it went on after that.
    """
    failures = {n: a[-1].failure for n, a in sorted(answers.items()) if a[-1].failure}
    dead = [rank for rank in asked if rank.died and rank.number not in answers]
    if dead:
        ends = ", ".join(f"rank {rank.number} died ({rank.died})" for rank in dead)
        rest = "the others live; " if len(dead) < num_ranks else ""
        error: BaseException = RankError(f"{ends} in {name}; {rest}fix: {RESTART}")
        if where:
            error.add_note(where)
        _add_places(error, failures)
        raise error
    if not failures:
        return
    own = {n: f for n, f in failures.items() if f.kind not in _FOLLOWS}
    number, failure = next(iter((own or failures).items()))
    error = _error_of(failure)
    if where:
        error.add_note(where)
    same = [n for n, f in failures.items() if (f.kind, f.text) == (failure.kind, failure.text)]
    if num_ranks > 1:
        everywhere = "all ranks" if len(same) == num_ranks else list_ranks(same)
        error.add_note(f"raised on {everywhere} in {name}")
    _add_places(error, {number: failure})
    for other, each in own.items():
        if other not in same:
            error.add_note(f"rank {other} raised {each.kind}: {each.text.partition(_NEWLINE)[0]}")
    raise error


def _error_of(failure: Failure) -> BaseException:
    if failure.error:
        try:
            error = load(failure.error)
        except Exception:  # of a class that cannot be made here
            error = None
        if isinstance(error, BaseException) and not isinstance(
            error, KeyboardInterrupt | SystemExit
        ):
            return error
    return RankError(f"{failure.kind}: {failure.text}")


def _add_places(error: BaseException, failures: Mapping[int, Failure]) -> None:
    """Add the user's lines of where ranks failed."""
    for number, failure in failures.items():
        own = [frame for frame in failure.frames if frame.own]
        lines = [f"on rank {number}:"]
        for frame in own[-4:]:
            lines.append(f"  {frame.file}:{frame.number}, in {frame.name}")
            if source := linecache.getline(frame.file, frame.number).strip():
                lines.append(f"    {source}")
        if own:
            error.add_note(_NEWLINE.join(lines))
