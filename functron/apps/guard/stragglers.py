"""Stragglers: where each rank spends its steps, and which rank the others wait for.

A rank that waits in a collective is not slow: the slow one works long and waits little. So what is
compared between ranks is what each does by itself: its data, its computation, its update, and the
time in which its process did not run. Where nobody works longer and yet one group of an axis sends
longer than its like, that is the network.

Machines are noisy. A rank is named where it was behind the middle of the others in most steps of
three windows in a row, by a share that matters and by more than the noise between steps; after two
of them where it stands out more.
"""

from __future__ import annotations

import bisect
import math
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from functron.apps.guard.watchdog import ON_PROCESSES
from functron.core import chart
from functron.core.settings import Mark, setting
from functron.core.tables import shows_differences
from functron.spmd import BoundMesh, Mesh
from functron.spmd.flight import EVERYWHERE, DeviceClock, FlightRecorder
from functron.training.loop import At, LoopHook

if TYPE_CHECKING:
    from functron.training.run import Session

PICTURE = "stragglers.svg"
OWN = ("data", "compute", "update", "host")
"""The sections of a step that are a rank's own work: it waits for its batch; it computes gradients,
and the update where the step is not compiled; its process does not run (it sleeps, swaps, or others
use its processor)."""

NOISE: Mapping[int, float] = MappingProxyType({2: 4.5, 3: 3.0})
"""By how many windows in a row: the standard errors that a rank must be behind to be named."""

MOST_SHOWN = 64
"""Ranks whose numbers stand in records; of more, the slowest and the middle do."""

_SHARE = 0.06  # of a step that a rank must be behind
_STEPS = 0.7  # the share of steps in which it must be
_NETWORK = 0.2  # of a step: what is sent is noisier
_TINY = 1e-9  # seconds
_AGAIN = 10  # windows after which a rank is named once more
_REDRAW_SECONDS = 10.0


@shows_differences
@dataclass(frozen=True)
class StragglersConfig:
    """How ranks that the others wait for are found.

    Attributes:
        every: compare after every so many steps how long ranks were at work, and name one that the
            others wait for, which takes three such windows; 0: never.
    """

    MARK: ClassVar[Mark] = Mark(box="parallelism")

    every: int = setting(5, short="stragglers_every", least=0, need=ON_PROCESSES)

    @property
    def reads_recorder(self) -> bool:
        """Whether collectives are recorded for it."""
        return self.every > 0

    def hook(self, session: Session) -> Comparison | None:
        """The search for ranks that are slow; None: there is one, or nobody asks. Collective."""
        mesh, out, job = session.run.mesh, session.out, session.job
        if not (self.every and isinstance(mesh, BoundMesh) and mesh.size > 1):
            return None
        if (recorder := mesh.recorder) is None:
            return None

        def gather(mine: torch.Tensor) -> torch.Tensor:
            found = [torch.empty_like(mine) for _ in range(mesh.size)]
            dist.all_gather(found, mine, group=job.group)
            return torch.stack(found)

        def say(text: str) -> None:
            print(f"functron: {text}", file=sys.stderr, flush=True)

        clock = DeviceClock() if session.run.device.type == "cuda" else None
        watch = Stopwatch(recorder, axes_of(mesh), clock)
        hosts = job.gather(socket.gethostname())
        file = out / PICTURE if out is not None and job.main else None
        told = say if job.main else None
        return Comparison(mesh, hosts, self.every, watch, gather, session.write, told, file)


@dataclass(frozen=True)
class Straggler:
    """A rank, or the ranks of a group, that the others wait for.

    Attributes:
        ranks: one, or those of a group whose network is slow.
        what: a section of `OWN`, or ``"network"``.
        share: how much longer a step of theirs is than those of others.
        seconds: the same per step.
        axis: of the network.
    """

    ranks: tuple[int, ...]
    what: str
    share: float
    seconds: float
    axis: str = ""


def stragglers(
    steps: Sequence[Mapping[str, Sequence[float]]],
    groups: Mapping[str, Sequence[Sequence[int]]],
    noise: float = NOISE[3],
) -> list[Straggler]:
    """The ranks that were behind in most of these steps, for their own reasons.

    Computation is compared as a share of what others need for the same step: a machine that is
    busy with something else slows all of them down, for a while.

    Args:
        steps: by section, the seconds of every rank: those of `OWN`, and ``wait/AXIS``.
        groups: by axis, the ranks that meet there.
        noise: the standard errors that the middle of the steps must be behind.
    """
    found: list[Straggler] = []
    if not steps:
        return found
    size = len(steps[0]["compute"])
    whole = statistics.median(sum(_of(step, rank)) for step in steps for rank in range(size))
    compute, update = (
        statistics.median(step[name][rank] for step in steps for rank in range(size))
        for name in ("compute", "update")
    )
    # of what ranks do, however long they wait
    bases = {"data": whole, "compute": compute, "update": compute + update, "host": whole}
    bases = {name: max(seconds, _TINY) for name, seconds in bases.items()}
    if size < 2:
        return found
    usual = {name: [_middles(step[name]) for step in steps] for name in OWN}
    for rank in range(size):
        behind = {
            name: [step[name][rank] - of[rank] for step, of in zip(steps, usual[name], strict=True)]
            for name in OWN
        }
        name = max(OWN, key=lambda name: statistics.median(behind[name]))
        base, late = bases[name], [seconds / bases[name] for seconds in behind[name]]
        if name == "compute":
            of = [max(row[rank], _TINY) for row in usual[name]]
            late = [seconds / other for seconds, other in zip(behind[name], of, strict=True)]
        share = statistics.median(late)
        if _matters(late, _SHARE, noise) and share * base > _SHARE / 3 * whole:
            found.append(Straggler((rank,), name, share, share * base))
    return found or _networks(steps, groups, whole, noise)


def _of(step: Mapping[str, Sequence[float]], rank: int) -> list[float]:
    return [step[name][rank] for name in step]


def _middles(values: Sequence[float]) -> list[float]:
    """For every value, the median of the others; of two values at least."""
    ordered, others = sorted(values), len(values) - 1
    below, above = (others - 1) // 2, others // 2

    def median(value: float) -> float:
        left_out = bisect.bisect_left(ordered, value)
        return (ordered[below + (below >= left_out)] + ordered[above + (above >= left_out)]) / 2

    return [median(value) for value in values]


def _matters(values: Sequence[float], least: float, noise: float) -> bool:
    """Whether most values are over `least`, and their middle is more than noise."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    often = sum(value > least for value in values) >= _STEPS * len(values)
    return often and middle > noise * spread / math.sqrt(len(values))


def _networks(
    steps: Sequence[Mapping[str, Sequence[float]]],
    groups: Mapping[str, Sequence[Sequence[int]]],
    whole: float,
    noise: float,
) -> list[Straggler]:
    """Groups of an axis in which even the rank that comes last waits longer than in the others."""
    found = []
    for axis, members in groups.items():
        if len(members) < 2:
            continue
        sent = [
            [min(step[f"wait/{axis}"][r] for r in ranks) for ranks in members] for step in steps
        ]
        others = [_middles(row) for row in sent]
        for number, ranks in enumerate(members):
            behind = [row[number] - of[number] for row, of in zip(sent, others, strict=True)]
            seconds = statistics.median(behind)
            usual = statistics.median(row[number] for row in sent) - seconds
            if _matters(behind, _NETWORK * whole, noise) and seconds > usual:
                found.append(Straggler((*ranks,), "network", seconds / whole, seconds, axis))
    return found


def groups_of(mesh: Mesh) -> dict[str, list[list[int]]]:
    """By axis of more than one rank, the ranks that meet there."""
    found: dict[str, list[list[int]]] = {}
    for axis, size in mesh.axes:
        rows: dict[tuple, list[int]] = {}
        for rank in range(mesh.size) if size > 1 else ():
            at = mesh.coordinate(rank)
            rows.setdefault(tuple(v for name, v in at.items() if name != axis), []).append(rank)
        if rows:
            found[axis] = list(rows.values())
    return found


@dataclass
class _Step:
    """The seconds of a step of this rank, by section; those of a device are on their way."""

    seconds: dict[str, float]
    device: tuple[Any, Any] | None = None


@dataclass
class Stopwatch:
    """The seconds of the steps of one rank, by section; told by the phases of the loop.

    Attributes:
        recorder: what it waits for.
        axes: over which it does.
        device: the clock of a GPU, which computes after the host has gone on; None: there is none.
        now, used: the clocks of the machine, and of this thread on a processor.
    """

    recorder: FlightRecorder
    axes: Sequence[str]
    device: DeviceClock | None = None
    now: Callable[[], float] = time.perf_counter
    used: Callable[[], float] = time.thread_time
    _phase: str = field(default="", init=False)
    _mark: tuple[float, float, dict[str, float], float] = field(
        default=(0.0, 0.0, {}, 0.0), init=False
    )
    _step: _Step | None = field(default=None, init=False)
    _begun: Any = field(default=None, init=False)
    _taken: deque[_Step] = field(default_factory=lambda: deque(maxlen=64), init=False)

    @property
    def sections(self) -> tuple[str, ...]:
        """The names of what is measured."""
        return (*OWN, *(f"wait/{axis}" for axis in self.axes))

    def phase(self, name: str, step: int) -> None:
        """The loop goes over to this phase."""
        recorder = self.recorder
        wall, used, marked = self.now(), self.used(), recorder.marked.get("update", 0.0)
        before_wall, before_used, waited, before_marked = self._mark
        if self._phase == "data":
            self._step = _Step(dict.fromkeys(self.sections, 0.0))
            self._step.seconds["data"] = wall - before_wall
        elif self._phase == "step" and self._step is not None:
            seconds = self._step.seconds
            waits = {a: recorder.seconds.get(a, 0.0) - waited.get(a, 0.0) for a in self.axes}
            own = max(wall - before_wall - sum(waits.values()), 0.0)
            busy = min(used - before_used, own)
            seconds["update"] = min(marked - before_marked, busy)
            seconds["compute"] = busy - seconds["update"]
            seconds["host"] = own - busy
            seconds.update({f"wait/{axis}": value for axis, value in waits.items()})
            if self.device is not None:
                end = self.device.mark()
                self._step.device = None if None in (self._begun, end) else (self._begun, end)
                seconds["update"] = 0.0
            self._taken.append(self._step)
            self._step = None
        if name == "step" and self.device is not None:
            self._begun = self.device.mark()
        self._phase = name
        self._mark = (self.now(), self.used(), dict(recorder.seconds), marked)

    def rows(self, count: int) -> list[list[float]] | None:
        """The last `count` steps whose seconds are known, by section; None: there are not so many.

        A device's are those of its own clock, and its collectives' the mean of what has ended.
        """
        steps = list(self._taken)
        if self.device is not None:
            steps = [step for step in steps if step.device is None or step.device[1].query()]
        steps = steps[-count:]
        if len(steps) < count:
            return None
        if self.device is not None:
            self._on_device(steps)
        return [[step.seconds[name] for name in self.sections] for step in steps]

    def _on_device(self, steps: Sequence[_Step]) -> None:
        assert self.device is not None
        waits = {axis: s / len(steps) for axis, s in self.device.collect().items()}
        for step in steps:
            if step.device is None:
                continue
            start, end = step.device
            whole, host = start.elapsed_time(end) / 1000, sum(step.seconds[n] for n in OWN[1:])
            for axis in self.axes:
                step.seconds[f"wait/{axis}"] = waits.get(axis, 0.0)
            step.seconds["compute"] = max(whole - sum(waits.values()), 0.0)
            step.seconds["host"] = max(host - whole, 0.0)
            step.device = None


@dataclass
class Comparison(LoopHook):
    """The measurements of all ranks, gathered every so many steps, and who is slow.

    Collective: every rank has this hook, before those that write records.

    Attributes:
        mesh: the ranks.
        hosts: their machines.
        every: steps of a window.
        stopwatch: of this rank.
        gather: the numbers of all ranks, by rank: a collective on the host.
        write: an event of a run; see `functron.training.records.event_log`.
        say: tells the user; None: another rank looks for who is slow, and tells.
        picture: the file of the heat map; None: nobody draws it.
    """

    mesh: BoundMesh
    hosts: Sequence[str]
    every: int
    stopwatch: Stopwatch
    gather: Callable[[torch.Tensor], torch.Tensor]
    write: Callable[..., None]
    say: Callable[[str], None] | None
    picture: Path | None
    _windows: deque[list[dict[str, list[float]]]] = field(
        default_factory=lambda: deque(maxlen=max(NOISE)), init=False
    )
    _named: dict[tuple, int] = field(default_factory=dict, init=False)
    _drawn: float = field(default=-math.inf, init=False)
    _count: int = field(default=0, init=False)

    def phase(self, name: str, index: int) -> None:
        """Tell the stopwatch."""
        self.stopwatch.phase(name, index)

    def after(self, at: At) -> None:
        """Add the entries of all ranks to the record."""
        at.record.update(self.gathered(at.index))

    def end(self, at: At) -> None:
        """Draw the heat map once more."""
        self.draw()

    def gathered(self, index: int) -> Mapping[str, Any]:
        """The entries of all ranks in the record of step `index`: none but at the end of a window.

        Collective. Collectives: at the end of a window a gather of a few numbers per step.
        """
        self._count += 1
        if self._count % self.every:
            return {}
        names, own = self.stopwatch.sections, self.stopwatch.rows(self.every)
        missing = torch.full((self.every, len(names)), math.nan, dtype=torch.float64)
        mine = missing if own is None else torch.tensor(own, dtype=torch.float64)
        everywhere = self.gather(mine)  # [ranks, steps, sections]
        if not bool(torch.isfinite(everywhere).all()):
            return {}
        rows = everywhere.permute(1, 2, 0).tolist()
        window = [dict(zip(names, row, strict=True)) for row in rows]
        self._windows.append(window)
        if self.say is not None:
            self._name(index, self.say)
        if self.picture is not None and time.monotonic() - self._drawn > _REDRAW_SECONDS:
            self.draw()
        return {"ranks": _summary(medians(window))}

    def _name(self, index: int, say: Callable[[str], None]) -> None:
        for each in self._slow():
            key = each.ranks, each.what, each.axis
            last, self._named[key] = self._named.get(key), self._count
            if last is not None and self._count - last <= _AGAIN * self.every:
                continue
            hosts = sorted({self.hosts[rank] for rank in each.ranks})
            about = {"what": each.what, "share": round(each.share, 4), "hosts": hosts}
            about |= {"seconds": each.seconds, "ranks": list(each.ranks)}
            about |= {"axis": each.axis} if each.axis else {}
            one = each.ranks[0] if len(each.ranks) == 1 else None
            self.write("straggler", index + 1, rank=one, **about)
            say(f"step {index + 1}: {described(each, hosts)}")

    @cached_property
    def _groups(self) -> dict[str, list[list[int]]]:
        return groups_of(self.mesh.mesh)

    def _slow(self) -> list[Straggler]:
        windows = list(self._windows)
        for count, noise in NOISE.items():
            steps = [step for window in windows[-count:] for step in window]
            if len(windows) >= count and (found := stragglers(steps, self._groups, noise)):
                return found
        return []

    def draw(self) -> None:
        """Draw the heat map of what is known."""
        if self.picture is None or not self._windows:
            return
        rows = medians([step for window in self._windows for step in window])
        self.picture.write_text(picture(rows, self.hosts), encoding="utf-8")
        self._drawn = time.monotonic()


def described(found: Straggler, hosts: Sequence[str]) -> str:
    """A straggler in words."""
    on, how = ", ".join(hosts), f"{found.seconds * 1000:.3g} ms a step ({found.share:.0%})"
    names = ", ".join(map(str, found.ranks))
    if found.what == "network":
        return f"ranks {names} (on {on}) are slow: they send {how} longer over {found.axis!r}"
    doing = {
        "data": "it waits for its batches",
        "compute": "it computes",
        "update": "it updates",
        "host": "its process does not run",
    }
    return f"rank {names} (on {on}) is slow: {doing[found.what]} {how} longer than others"


def medians(steps: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """By section, the median seconds of every rank."""
    return {
        name: [statistics.median(column) for column in zip(*(s[name] for s in steps), strict=True)]
        for name in steps[0]
    }


def _summary(rows: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Rank by rank, or the slowest and the middle of many, by section."""
    count = len(rows["compute"])
    shown: dict[str, dict[str, float]]
    if count <= MOST_SHOWN:
        shown = {str(r): {n: round(v[r], 6) for n, v in rows.items()} for r in range(count)}
    else:
        shown = {
            "slowest": {name: round(max(values), 6) for name, values in rows.items()},
            "middle": {name: round(statistics.median(v), 6) for name, v in rows.items()},
        }
    return shown


def picture(rows: Mapping[str, Sequence[float]], hosts: Sequence[str]) -> str:
    """A heat map of seconds, rank x section, as an SVG document."""
    names = [f"{rank} {host}" for rank, host in enumerate(hosts)]
    values = [[1000 * rows[name][rank] for name in rows] for rank in range(len(hosts))]
    return chart.heat_map(values, names, list(rows), title="Milliseconds of a step, by rank")


def axes_of(mesh: BoundMesh) -> list[str]:
    """The axes that a rank may wait over, and what is over all ranks."""
    return [*(axis for axis, size in mesh.shape.items() if size > 1), EVERYWHERE]
