"""The watchdog: notices that a job hangs, finds out which rank never arrived where, and ends it.

A thread of each process listens to the loop, which names its phases as it goes. After silence each
rank writes what it waits for into the run folder, `HANGS`: the collective, its line and its place
in the step, the stacks of all threads, and from which ranks it still hears. From these reports the
`verdict` follows, a pure function; one rank of each machine says it, and all end with the exit
code 124 long before a collective would give up. Nothing needs a blocked thread, a process group
that the run uses, or the machine of rank 0.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from functron.compiler import executor
from functron.core import compat
from functron.core.settings import Need, setting
from functron.core.tables import shows_differences
from functron.spmd import BoundMesh
from functron.spmd.flight import (
    CollectiveKind,
    FlightRecorder,
    describe,
    list_ranks,
)
from functron.training.loop import COMPILE_SECONDS, LoopHook, PhaseHook, WaitingConfig
from functron.training.records import EVENTS, event_log

if TYPE_CHECKING:
    from functron.training.run import Session

HANGS = "hangs"
"""The folder of reports, in the run folder."""
VERDICT = "verdict.json"

REPORT_SECONDS = 10.0
"""How long the reports of the others are waited for."""

PROBE_SECONDS = 5.0
POLL_SECONDS = 0.5
_PATIENCE = 0.9  # of what a collective waits: the watchdog knows more than its error
_TELL_SECONDS, _AFTER_SECONDS = 5.0, 0.3
_LONGEST = 3.0  # steps may take so many times as long as the longest did
_NEIGHBOURS = 8  # ranks that one listens to

PATIENT = frozenset({"start", "first step", "evaluate", "save", "body", "restore", "end"})
"""Phases that may take as long as a collective waits; the others: `hang_after`."""


ON_PROCESSES = Need(
    lambda config: config.parallelism.nproc > 0,
    "a run on processes",
    "start them: --nproc N, or torchrun",
    whole=True,
)


@shows_differences
@dataclass(frozen=True)
class WatchdogConfig(WaitingConfig):
    """When a step counts as hanging, and what is done to find out why.

    Attributes:
        hang_after: seconds in which nothing of a step moves after which the processes find out
            which rank never came to which collective, and end: see hangs/ in the run folder. At
            most half of timeout_seconds; steps may take three times as long as the longest one did,
            and the first one, saves and evaluations almost timeout_seconds. While a rank compiles
            nobody counts as hanging, unless a kernel takes half an hour. 0: never.
    """

    hang_after: float = setting(150.0, least=0, need=ON_PROCESSES)

    @property
    def reads_recorder(self) -> bool:
        """Whether collectives are recorded for it."""
        return self.hang_after > 0 or super().reads_recorder

    def hook(self, session: Session) -> LoopHook | None:
        """Ends the process where the job hangs; told by the phases of the loop. Collective."""
        out, mesh = session.out, session.run.mesh
        watched = self.hang_after > 0 and out is not None
        if not (watched and isinstance(mesh, BoundMesh) and mesh.recorder is not None):
            return None

        assert out is not None
        dog = Watchdog.of(
            mesh,
            out,
            session.job.across(time.time(), dist.ReduceOp.MAX),
            hang_after=self.hang_after,
            timeout=self.timeout_seconds,
            fresh=lambda step: session.run.is_first_of_kind(step),
            end=session.end_process,
            group=session.job.group,
        )
        session.blocks.enter_context(dog.watching())
        return PhaseHook(dog.phase)


@dataclass(frozen=True)
class Verdict:
    """Why a job hangs.

    Attributes:
        reason: silent (a rank tells nothing: its process is stopped or its machine is lost);
            elsewhere (it is in no collective); mismatch (it entered another one than the others);
            connection (all are there, and what one of them sends does not arrive); unknown.
        ranks: that did not arrive, or entered another collective, or cannot be heard.
        step: from 0.
        at: the collective that the others wait in, as a report has it; None: none is known.
        text: all of that, in words.
    """

    reason: str
    ranks: tuple[int, ...]
    step: int
    at: Mapping[str, Any] | None
    text: str


Report = Mapping[str, Any]


def verdict(reports: Mapping[int, Report], size: int) -> Verdict:
    """The verdict of all ranks' reports together.

    The ranks that wait in a collective wait for those of its axis that are not in it, which may
    wait elsewhere for others in their turn; at the end of these chains are the ranks that are to
    blame. They have told nothing, are in no collective, entered another one than their like, or,
    where all have come, cannot be heard.

    Args:
        reports: of those ranks that have told something, as `Watchdog` writes them.
        size: how many ranks there are.
    """
    silent = tuple(rank for rank in range(size) if rank not in reports)
    step = max((report["step"] for report in reports.values()), default=0)
    if silent:
        at = _earliest(reports, silent)
        what = "told nothing: the process is stopped, its machine lost, or its network dead"
        return _make_verdict("silent", silent, step, at, reports, what)
    idle = tuple(rank for rank, report in reports.items() if report["waiting"] is None)
    if idle:
        behind = min(reports[rank]["step"] for rank in idle)
        late = tuple(rank for rank in idle if reports[rank]["step"] == behind)
        here = reports[late[0]]
        what = f"is in no collective, but in {here['phase']!r} at {here['at']}"
        return _make_verdict("elsewhere", late, step, _earliest(reports, late), reports, what)
    odd = _odd(reports)
    if odd is not None:
        ranks, theirs, usual, place = odd
        what = f"entered {theirs} as collective {place} of the step, where others have {usual}"
        waiting = [report["waiting"] for rank, report in reports.items() if rank not in ranks]
        at = next((w for w in waiting if w["ordinal"] == place), None) or _earliest(reports, ranks)
        return _make_verdict("mismatch", ranks, step, at, reports, what)
    deaf = _unheard(reports)
    what = "cannot be heard, though it has come: what it sends does not arrive"
    at = _earliest(reports, deaf or tuple(reports))
    if deaf:
        return _make_verdict("connection", deaf, step, at, reports, what)
    what = "is to blame: all have come, and hear one another; the backend does not end it"
    return _make_verdict("unknown", (), step, at, reports, what)


def _earliest(reports: Mapping[int, Report], late: Sequence[int]) -> Mapping[str, Any] | None:
    """The first collective that somebody waits in for one of these ranks."""
    rows = [
        (report["step"], waiting["ordinal"], rank)
        for rank, report in reports.items()
        if (waiting := report["waiting"]) is not None and set(waiting["ranks"]) & {*late}
    ]
    # those that wait for it, rather than what it waits in itself
    rows = [row for row in rows if row[2] not in late] or rows
    return reports[min(rows)[2]]["waiting"] if rows else None


def _odd(reports: Mapping[int, Report]) -> tuple[tuple[int, ...], str, str, int] | None:
    """The ranks that entered another collective than their like, what, what is usual, and where.

    A rank that is behind, whose collectives are the first of the others', did not.
    """
    for stage in sorted({report["stage"] for report in reports.values()}):
        alike = {r: report for r, report in reports.items() if report["stage"] == stage}
        newest = max(report["step"] for report in alike.values())
        rows = {rank: _entries(report, newest) for rank, report in alike.items()}
        for matched in (lambda kind: kind["matched"], lambda kind: (kind["matched"], kind["line"])):
            found = _fork(rows, alike, matched)
            if found is not None:
                return found
    return None


def _entries(report: Report, step: int) -> list[int]:
    """The collectives a rank entered in a step; a rank that is behind has not begun with it."""
    return report["sequence"] if report["step"] == step else []


def _fork(
    rows: Mapping[int, list[int]], reports: Mapping[int, Report], matched: Callable[[Any], Any]
) -> tuple[tuple[int, ...], str, str, int] | None:
    for place in range(max(map(len, rows.values()), default=0)):
        at = {
            rank: reports[rank]["kinds"][row[place]]
            for rank, row in rows.items()
            if place < len(row)
        }
        keys = {rank: json.dumps(matched(kind)) for rank, kind in at.items()}
        if len(set(keys.values())) < 2:
            continue
        counts = Counter(keys.values()).most_common()
        usual = counts[0][0]
        if counts[0][1] == counts[1][1]:  # as many of both: what was usual in the step before?
            before = Counter(
                json.dumps(matched(report["kinds"][report["before"][place]]))
                for report in reports.values()
                if place < len(report["before"])
            )
            usual = next((key for key, _ in before.most_common() if key in keys.values()), usual)
        odd = tuple(rank for rank, key in keys.items() if key != usual)
        like = next(rank for rank, key in keys.items() if key == usual)
        dropped = reports[odd[0]]["dropped"]
        return odd, at[odd[0]]["text"], at[like]["text"], place + dropped
    return None


def _unheard(reports: Mapping[int, Report]) -> tuple[int, ...]:
    """The fewest ranks that all dead connections have an end at: one, or both of a single one."""
    dead = {
        frozenset((rank, int(other)))
        for rank, report in reports.items()
        for other, heard in report["heard"].items()
        if not heard
    }
    found: list[int] = []
    while dead:
        ends = Counter(rank for pair in dead for rank in pair)
        most = max(ends.values())
        worst = [rank for rank, count in ends.items() if count == most]
        found += worst if most == 1 else worst[:1]
        dead = {pair for pair in dead if not pair & {*found}}
    return tuple(sorted(found))


def _make_verdict(
    reason: str,
    ranks: tuple[int, ...],
    step: int,
    at: Mapping[str, Any] | None,
    reports: Mapping[int, Report],
    what: str,
) -> Verdict:
    names = list_ranks(ranks) if ranks else "no rank"
    hosts = sorted({reports[rank]["host"] for rank in ranks if rank in reports})
    on = f" (on {', '.join(hosts)})" if hosts else ""
    where = "at any collective"
    if at is not None:
        where = (
            f"at {at['text']}, collective {at['ordinal']} of the step "
            f"(number {at['ordinal_over_axis']} over {at['axis']!r})"
        )
    waiting = sorted(r for r, report in reports.items() if report["waiting"] and r not in ranks)
    arrived = "did not come through" if reason in ("connection", "unknown") else "never arrived"
    lines = [
        f"step {step + 1} hangs: {names}{on} {arrived} {where}",
        f"  - {names}: {what}",
        f"  - {list_ranks(waiting)} wait"
        if len(waiting) > 1
        else f"  - {list_ranks(waiting)} waits",
        f"  - wanted: a sign of life from all; fix: {_FIXES[reason]}; then go on with --resume",
    ]
    return Verdict(reason, ranks, step, at, "\n".join(lines))


_FIXES = {
    "silent": "look at that process and its machine",
    "elsewhere": "look at its stack in its report",
    "mismatch": "decide by lax.axis_index and torch.where, not by a Python branch on the rank",
    "connection": "look at the network of its machine",
    "unknown": "look at the stacks in the reports, and at the devices",
}


# --- this process


@dataclass(frozen=True)
class Place:
    """A process of the job: where another one finds it."""

    host: str
    pid: int
    namespace: str

    @classmethod
    def here(cls) -> Place:
        """This one."""
        try:  # a number means the same process only where these are the same
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            namespace = ""
        return cls(socket.gethostname(), os.getpid(), namespace)


@dataclass
class _Heard:
    """The last that was heard of the loop."""

    phase: str
    step: int
    since: float
    limit: float


@dataclass
class Watchdog:
    """Listens to the loop of one process.

    Attributes:
        out: the run folder, which all ranks reach.
        recorder: what this process enters and leaves.
        rank: of this process.
        stage: its rank among the stages of a pipeline; ranks of one stage run one program.
        places: of all ranks.
        job: what the reports of this attempt have in common, and no others.
        hang_after: seconds of silence.
        patience: seconds of silence in a phase that takes long.
        fresh: whether a step, by its number, is the first of its kind, which compiles.
        peers: a process group of this thread's own, to hear others by; None: nobody is heard.
        end: called once with the verdict's text, and whether this process is the one of its machine
            to say it.
    """

    out: Path
    recorder: FlightRecorder
    rank: int
    stage: int
    places: Sequence[Place]
    job: float
    hang_after: float
    patience: float
    fresh: Callable[[int], bool]
    peers: dist.ProcessGroup | None
    end: Callable[[str, bool], None]
    _last: _Heard = field(init=False)
    _longest: float = field(default=0.0, init=False)
    _closed: threading.Event = field(default_factory=threading.Event, init=False)
    _main: int = field(default_factory=threading.get_ident, init=False)

    @classmethod
    def of(
        cls,
        mesh: BoundMesh,
        out: Path,
        job: float,
        *,
        hang_after: float,
        timeout: float,
        fresh: Callable[[int], bool],
        end: Callable[[str, bool], None],
        group: dist.ProcessGroup | None = None,
    ) -> Watchdog:
        """That of this process. Collective.

        Collectives: a gather of the processes' places, and what a new group of gloo takes.

        Args:
            mesh: bound with a recorder.
            out, job, fresh, end: as `Watchdog` has them.
            hang_after: seconds of silence; at most half of `timeout`, lest a collective give up
                first.
            timeout: seconds after which collectives give up.
            group: for what processes tell one another on the host; None: the default one.
        """
        assert mesh.recorder is not None
        if mesh.rank == 0:
            shutil.rmtree(out / HANGS, ignore_errors=True)
        places: list[Any] = [None] * mesh.size
        dist.all_gather_object(places, Place.here(), group=group)
        after = min(hang_after, timeout / 2)
        patience = max(after, _PATIENCE * timeout)
        peers: Any = dist.new_group(backend="gloo")
        who = mesh.recorder, mesh.rank, mesh.coordinate.get("pp", 0), places
        return cls(out, *who, job, after, patience, fresh, peers, end)

    @property
    def folder(self) -> Path:
        """That of the reports."""
        return self.out / HANGS

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch within the with block, in a thread."""
        thread = threading.Thread(target=self.run, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closed.set()
            thread.join(PROBE_SECONDS)

    def __post_init__(self) -> None:
        self._last = _Heard("start", 0, time.monotonic(), self.patience)

    def phase(self, name: str, step: int) -> None:
        """The loop is in this phase of `step` from now on."""
        now = time.monotonic()
        last = self._last
        if last.phase == "step":
            self._longest = max(self._longest, now - last.since)
        if name == "step" and self.fresh(step):
            name = "first step"
        limit = self.patience
        if name not in PATIENT:
            limit = min(self.patience, max(self.hang_after, _LONGEST * self._longest))
        self._last = _Heard(name, step, now, limit)

    def run(self) -> None:
        """Watch; end the process where the job hangs."""
        while not self._closed.wait(POLL_SECONDS):
            last = self._last
            hangs = self._silent_seconds(last) > last.limit
            asks = time.monotonic() - last.since >= self.hang_after / 2
            if not hangs and not (asks and self._reports()):
                continue
            if (self.folder / VERDICT).exists():  # this process was stopped meanwhile
                self.end(self._read_first_report(), self._speaks())
                return
            found = self._find_verdict()
            if found is not None:
                self._end(found)
                return

    def _compiled(self) -> float:
        """When this process last compiled, of `time.monotonic`: now, if it is about to."""
        recorder, now = self.recorder, time.monotonic()
        began = recorder.compiling
        if began is None:
            return recorder.compiled
        return now if now - began <= COMPILE_SECONDS else began

    def _silent_seconds(self, last: _Heard) -> float:
        """For how long the loop has told nothing, and nothing was compiled."""
        compiled = self._compiled()
        return max(0.0, time.monotonic() - max(last.since, compiled))

    def _find_verdict(self) -> Verdict | None:
        """The verdict, once reports are here; None where the loop goes on after all."""
        last, until = self._last, time.monotonic() + REPORT_SECONDS
        size = len(self.places)
        heard: dict[int, bool] = {}
        self._tell(heard, False)
        probe = threading.Thread(target=self._listen, args=(heard,), daemon=True)
        probe.start()
        told, reports = False, self._reports()
        while time.monotonic() < until:
            if self._last is not last:
                self._withdraw()
                return None
            if not told and not probe.is_alive():
                told = True
                self._tell(heard, True)
            reports = self._reports()
            if any(report["patient"] for report in reports.values()):
                break
            if len(reports) == size and all(report["complete"] for report in reports.values()):
                break
            time.sleep(0.1)
        if not told:
            self._tell(heard, True)
        reports |= self._reports()
        if any(report["patient"] for report in reports.values()):
            # somebody has more time than that; ask again, once all have read it
            self._closed.wait(2 * POLL_SECONDS)
            self._withdraw()
            return None
        return verdict(reports, size)

    def _listen(self, heard: dict[int, bool]) -> None:
        """Exchange a number with other ranks over connections like those that the run uses."""
        group, size = self.peers, len(self.places)
        if group is None:
            return
        others = [rank for rank in range(size) if rank != self.rank]
        if len(others) > _NEIGHBOURS:
            reach = range(1, _NEIGHBOURS // 2 + 1)
            steps = [sign * away for away in reach for sign in (1, -1)]
            others = [(self.rank + step) % size for step in steps]
        heard.update(dict.fromkeys(others, False))
        threads = [
            threading.Thread(target=self._exchange, args=(group, other, heard), daemon=True)
            for other in others
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PROBE_SECONDS + 1)

    def _exchange(self, group: dist.ProcessGroup, other: int, heard: dict[int, bool]) -> None:
        mine, theirs = torch.zeros(1), torch.zeros(1)
        with suppress(RuntimeError):
            sent = group.send([mine], other, 0)
            group.recv([theirs], other, 0).wait(timedelta(seconds=PROBE_SECONDS))
            heard[other] = True
            sent.wait(timedelta(seconds=PROBE_SECONDS))

    def _tell(self, heard: Mapping[int, bool], complete: bool) -> None:
        report = {**self.report(), "heard": dict(heard), "complete": complete}
        file = self.folder / f"rank-{self.rank}.json"
        beside = file.with_name(file.name + ".new")
        with suppress(OSError):  # then there is no report, which says something too
            self.folder.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(report, indent=1), encoding="utf-8")
            beside.replace(file)

    def _withdraw(self) -> None:
        with suppress(OSError):
            (self.folder / f"rank-{self.rank}.json").unlink()

    def _reports(self) -> dict[int, Report]:
        """The reports of this attempt that are here."""
        found = {}
        with suppress(OSError):
            for file in self.folder.glob("rank-*.json"):
                with suppress(OSError, ValueError):
                    report = json.loads(file.read_text(encoding="utf-8"))
                    if report["job"] == self.job:
                        found[int(report["rank"])] = report
        return dict(sorted(found.items()))

    def report(self) -> dict[str, Any]:
        """The report of this process: its stacks, and the collective that it waits for."""
        last, recorder = self._last, self.recorder
        silent = self._silent_seconds(last)
        patient = last.phase in PATIENT or self._compiled() > last.since
        frames = sys._current_frames()
        main = frames.get(self._main)
        waiting = recorder.waiting
        if waiting is None and recorder.device is not None:
            waiting = recorder.device.stuck()
        about = describe(recorder, waiting)
        if about is not None and waiting is not None:
            lines = () if about["line"] or main is None else executor.lines_of(main, waiting.kind)
            at = about["line"] or " or ".join(lines) or None
            kind = waiting.kind._replace(line=None)
            about = {**about, "line": at, "text": f"{kind}{f' at {at}' if at else ''}"}
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        trace = compat.nccl_trace()
        return {
            "job": self.job,
            "rank": self.rank,
            "stage": self.stage,
            "host": self.places[self.rank].host,
            "pid": os.getpid(),
            "step": last.step,
            "phase": last.phase,
            "silent_seconds": round(silent, 3),
            "patient": patient and silent <= last.limit,
            "compiling": recorder.compiling is not None,
            "waiting": about,
            "at": _line(main),
            "kinds": [_kind(kind) for kind in recorder.kinds],
            "sequence": list(recorder.sequence),
            "before": list(recorder.before),
            "dropped": recorder.dropped,
            "stacks": {
                f"{names.get(ident, '?')} ({ident})": traceback.format_stack(frame)
                for ident, frame in frames.items()
            },
            **({} if trace is None else {"nccl": trace}),
        }

    def _end(self, found: Verdict) -> None:
        text = f"{found.text}\n  - reports of all ranks: {self.folder}"
        if self._claim(VERDICT):
            at = found.at or {}
            about = {name: at.get(name) for name in ("op", "axis", "ordinal", "line")}
            one = found.ranks[0] if len(found.ranks) == 1 else None
            with suppress(OSError):
                more = {"reason": found.reason, "ranks": list(found.ranks), **about}
                with event_log(self.out / EVENTS) as write:
                    write("hang", found.step + 1, rank=one, **more)
                (self.folder / VERDICT).write_text(json.dumps({"text": text, **more}))
        else:
            text = self._read_first_report() or text
        for rank in found.ranks if found.reason == "silent" else ():
            self._wake(self.places[rank])
        self.end(text, self._speaks())

    def _speaks(self) -> bool:
        """Whether this process is the one of its machine to say it: each has a log of its own."""
        return self._claim(f"said-on-{self.places[self.rank].host}")

    def _claim(self, name: str) -> bool:
        """Whether this is the first process that comes with this name."""
        try:
            (self.folder / name).open("x").close()
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def _read_first_report(self) -> str:
        """The text of the process that came first, once it is there; the others end after it.

        The end of any process is an error in those that wait for it, which then say that instead.
        """
        until = time.monotonic() + _TELL_SECONDS
        while time.monotonic() < until:
            with suppress(OSError, ValueError):
                found = json.loads((self.folder / VERDICT).read_text(encoding="utf-8"))["text"]
                time.sleep(_AFTER_SECONDS)
                return found
            time.sleep(0.05)
        return ""

    def _wake(self, place: Place) -> None:
        """Have a stopped process of this machine go on, so that its launcher can end it."""
        here = self.places[self.rank]
        if (place.host, place.namespace) == (here.host, here.namespace) and here.namespace:
            with suppress(OSError):
                os.kill(place.pid, signal.SIGCONT)


def _kind(kind: CollectiveKind) -> dict[str, Any]:
    return {"text": str(kind), "matched": kind.matched, "line": str(kind.line)}


def _line(frame: FrameType | None) -> str:
    """The innermost line of a thread that is not Python's or torch's own."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in sys.stdlib_module_names and name != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
