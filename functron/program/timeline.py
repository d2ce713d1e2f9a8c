"""A program's timeline: what one rank computes and communicates when, and what it waits for.

There is one stream that computes, and one per axis that communicates, as NCCL has one for every
process group. Each does what it was given in the order in which it was issued
(`functron.program.overlap`):

* an equation runs when the one before it on its stream has ended;
* an asynchronous collective starts when all that was issued before it has been computed, and the
  one before it over its axis has ended. What reads its result waits for it, and so does all that is
  issued after that;
* a collective that is not asynchronous is waited for where it starts, as all are in programs that
  are not compiled.

How long the computing stream waits is **exposed** communication; of all else that is sent, it is
hidden behind what is computed. So the total is what is computed and what is exposed. Bytes are
exposed as seconds of their collective are. Two actions of a combined cell of a pipeline's schedule
are one program (`functron.pipeline.cut.join_programs`): what one sends lies under what the other
computes.

Ranks are alike, so one of them is modelled, whatever the size of the mesh. Switches take the branch
that takes longest, or each by its weight, and loops of unknown length run once, as in costs; that
the host waits for their index and condition is not modelled. Not modelled are ranks
that arrive late at a collective, links that several axes share, fused equations, reductions that a
compiler merges, and the processors that communication takes from computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from functron.core import chart
from functron.core.tables import align_columns, bytes_text, html_table
from functron.program.cost import dearest_runs, equation_bytes, equation_flops, sent_bytes
from functron.program.equations import Block, Code, ControlFlow, Equation, Scan
from functron.program.overlap import (
    arrange_block,
    list_turns,
    order_equations,
    split_scan_body,
    waits,
)
from functron.program.text import axis_of

COMPUTE = "compute"
"""The stream that computes; the others have the names of axes."""

Seconds = Callable[[Equation], float]
"""The seconds that an equation takes that has no blocks: of a collective, from start to end."""

Rate = float | Mapping[str, float]


@dataclass(frozen=True)
class Rates:
    """The seconds of equations by a roofline: the larger of arithmetic and memory, or the wire.

    What is computed takes ``max(FLOPs / flops, bytes / memory)``, each equation by itself; a
    collective ``latency + bytes sent / links``, with the bytes of ring algorithms (`Traffic`).
    Views take nothing, nor does stacking: compilers write rows where they are to be.

    Attributes:
        flops: floating-point operations per second.
        memory: bytes per second read and written.
        links: bytes per second that a rank sends, over every axis or by axis.
        latency: seconds of a collective besides, over every axis or by axis.
    """

    flops: float
    memory: float
    links: Rate
    latency: Rate = 0.0

    def __call__(self, equation: Equation) -> float:
        """The seconds of one run of an equation that has no blocks."""
        axis = axis_of(equation)
        if axis is not None:
            return _rate_over(self.latency, axis) + sent_bytes(equation) / _rate_over(
                self.links, axis
            )
        if equation.aliases or not equation.results or equation.name == "stack":
            return 0.0
        return max(equation_flops(equation) / self.flops, equation_bytes(equation) / self.memory)


def _rate_over(rate: Rate, axis: str) -> float:
    return rate if isinstance(rate, int | float) else rate[axis]


class StreamInterval(NamedTuple):
    """An interval of a stream.

    Attributes:
        what: the collective; or the equation that takes longest of those that were computed.
        stream: `COMPUTE`, or the axis.
        start, end: in seconds from the start of the program.
        axis: of a collective; None of what is computed.
        exposed: of a collective, how much of it the computing stream waited for.
        sent_bytes: of a collective, what a rank sends.
    """

    what: str
    stream: str
    start: float
    end: float
    axis: str | None
    exposed: float = 0.0
    sent_bytes: float = 0.0

    @property
    def exposed_bytes(self) -> float:
        """Of what is sent, the part that is sent while the computing stream waits for it."""
        length = self.end - self.start
        return self.sent_bytes * self.exposed / length if length else 0.0


class ExposedTraffic(NamedTuple):
    """Of one kind of collective over one axis: all that it sends, and how much nothing hides.

    Attributes:
        count: how many run.
        seconds: from start to end.
        exposed_seconds: of these, for which the computing stream waited.
        sent_bytes: by each rank, as in costs (`functron.program.cost.Traffic`).
        exposed_bytes: of these, those that were sent meanwhile.
    """

    count: int
    seconds: float
    exposed_seconds: float
    sent_bytes: float
    exposed_bytes: float


@dataclass(frozen=True, repr=False)
class ProgramTimeline:
    """When one rank computes and communicates in a program; `Program.timeline` makes it.

    It prints as a chart, and is drawn as one in notebooks.

    Attributes:
        rows: in the order in which they start on each stream. What is computed between one start
            or wait of a collective and the next is one row.
        total: seconds from the start to the end.
        exposed: by axis the seconds for which nothing is computed, since a collective over it has
            not ended.
    """

    name: str
    rows: tuple[StreamInterval, ...]
    total: float
    exposed: Mapping[str, float]

    @cached_property
    def busy(self) -> Mapping[str, float]:
        """By stream the seconds in which it does something."""
        found: dict[str, float] = {}
        for row in self.rows:
            found[row.stream] = found.get(row.stream, 0.0) + row.end - row.start
        return MappingProxyType(found)

    @cached_property
    def traffic(self) -> Mapping[tuple[str, str], ExposedTraffic]:
        """By axis and collective what is sent, and what of it is exposed."""
        found: dict[tuple[str, str], ExposedTraffic] = {}
        for row in self.rows:
            if row.axis is not None:
                key, last = (row.axis, row.what), (row.exposed, row.sent_bytes, row.exposed_bytes)
                count, seconds, *rest = found.get(key, ExposedTraffic(0, 0.0, 0.0, 0.0, 0.0))
                sums = (a + b for a, b in zip(rest, last, strict=True))
                found[key] = ExposedTraffic(count + 1, seconds + row.end - row.start, *sums)
        return MappingProxyType(dict(sorted(found.items())))

    @property
    def streams(self) -> list[str]:
        """The computing one first."""
        return [COMPUTE, *sorted(self.exposed)]

    def gantt(self, width: int = 120) -> str:
        """A Gantt chart as text, a line per stream, time to the right."""
        place = {stream: row for row, stream in enumerate(self.streams)}
        bars = [
            chart.TextBar(place[stream], start, end, (what,), "=" if axis is None else "·")
            for what, stream, start, end, axis, *_ in self.rows
        ]
        return chart.gantt_text(bars, self.streams, width)

    def svg(self) -> str:
        """A Gantt chart as an SVG picture, exposed communication darker."""
        return self.bars().svg()

    def bars(self) -> chart.Gantt:
        """The chart as data."""
        place = {stream: row for row, stream in enumerate(self.streams)}
        boxes = [
            chart.SvgBar(
                place[stream], start, end, what,
                f"{what}: {end - start:.3g} s, {exposed:.3g} s exposed",
                _COLOURS[0 if axis is None else 1 + (exposed > 0)],
            )
            for what, stream, start, end, axis, exposed, _ in self.rows
        ]  # fmt: skip
        legend = list(zip(("computed", "hidden", "exposed"), _COLOURS, strict=True))
        return chart.Gantt(boxes, self.streams, self._title(), legend)

    def table(self) -> list[list[str]]:
        """The streams, and the collectives of each axis, as a table of text, headings first."""
        rows = [["stream", "busy", "exposed", "sent", "of it exposed"]]
        for stream in self.streams:
            exposed = f"{self.exposed[stream]:.4g} s" if stream in self.exposed else ""
            own = [row for (axis, _), row in self.traffic.items() if axis == stream]
            sums = [sum(each[i] for each in own) for i in (3, 4)]
            sent = [bytes_text(round(each)) for each in sums] if own else ["", ""]
            rows.append([stream, f"{self.busy.get(stream, 0.0):.4g} s", exposed, *sent])
            for (axis, what), (count, seconds, waited, *both) in self.traffic.items():
                if axis == stream:
                    cells = f"{seconds:.4g} s", f"{waited:.4g} s"
                    sent = (bytes_text(round(each)) for each in both)
                    rows.append([f"  {count} {what}", *cells, *sent])
        return rows

    def _title(self) -> str:
        return f"timeline of {self.name}, per rank: {self.total:.4g} s"

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {row}" for row in align_columns(self.table()))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<div>{html_table(self.table(), heading=True)}{self.svg()}</div>"


_COLOURS = ("hsl(215,60%,66%)", "hsl(35,60%,76%)", "hsl(10,70%,50%)")


def timeline(
    program: Code,
    costs: Seconds,
    *,
    overlap: bool = True,
    prefetch: bool = True,
    sequence_parts: int = 1,
    eager: bool = False,
) -> ProgramTimeline:
    """When one rank computes and communicates; see `functron.program.timeline`.

    Args:
        costs: the seconds of an equation: `Rates`, or another function.
        overlap: within kernels, as of `compile`; False: collectives are waited for at once.
        prefetch: across iterations of scans, as of `compile`.
        sequence_parts: as of `compile`.
        eager: as it runs uncompiled, whatever is said above: in its own order, each collective
            waited for where it starts, so that all communication is exposed.
    """
    apart, parts = eager or program.mesh.size == 1, 1 if eager else sequence_parts
    overlap, prefetch = (overlap and not apart, prefetch and not apart)
    clock = _Clock()
    block = arrange_block(program.block, prefetch=prefetch, sequence_parts=parts)
    _Planner(costs, overlap, prefetch).block(block)(clock)
    rows = sorted(clock.rows, key=lambda row: (row.stream != COMPUTE, row.stream, row.start))
    axes = {e.args[1] for e, _ in program.block.walk() if axis_of(e) is not None}
    exposed = {axis: clock.exposed.get(axis, 0.0) for axis in sorted(axes)}
    return ProgramTimeline(program.name, tuple(rows), clock.now, MappingProxyType(exposed))


@dataclass(eq=False)
class _Work:
    """A collective under way."""

    axis: str
    what: str
    start: float
    end: float
    sent_bytes: float


@dataclass(eq=False)
class _Clock:
    """The streams while the program runs: when each is free, and what was done.

    Attributes:
        now: when all that was issued to the computing stream has been done.
        free: by axis, when the collectives that were started have ended.
        under_way: by value, or by what else stands for it, what was not waited for yet.
    """

    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    under_way: dict[Any, _Work] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    rows: list[StreamInterval] = field(default_factory=list)

    def compute(self, seconds: float, what: str) -> None:
        if seconds:
            self.rows.append(StreamInterval(what, COMPUTE, self.now, self.now + seconds, None))
            self.now += seconds

    def start(self, key: Any, axis: str, what: str, seconds: float, sent: float) -> None:
        begin = max(self.now, self.free.get(axis, 0.0))
        self.free[axis] = begin + seconds
        self.under_way[key] = _Work(axis, what, begin, begin + seconds, sent)

    def wait(self, key: Any) -> None:
        work = self.under_way.pop(key)
        exposed = max(0.0, work.end - self.now)
        self.exposed[work.axis] = self.exposed.get(work.axis, 0.0) + exposed
        self.now += exposed
        share = min(exposed, work.end - work.start)
        axis = work.axis
        row = StreamInterval(work.what, axis, work.start, work.end, axis, share, work.sent_bytes)
        self.rows.append(row)


_Step = Callable[[_Clock], None]


@dataclass(frozen=True, eq=False)
class _Planner:
    """Blocks as steps of a clock, worked out once for all iterations."""

    costs: Seconds
    overlap: bool
    prefetch: bool

    def block(self, block: Block) -> _Step:
        """The steps of a block."""
        steps: list[_Step] = []
        kernel: list[Equation] = []
        for equation in block.equations:
            if isinstance(equation.op, Scan):
                steps += [*self._kernel(kernel), self._scan(equation, equation.op)]
                kernel = []
            elif isinstance(equation.op, ControlFlow):
                steps += [*self._kernel(kernel), *self._runs(equation.op)]
                kernel = []
            elif equation.name == "check_ids":
                continue  # before all kernels, and nearly free
            elif not equation.outputs:  # for its side effect, which cuts kernels
                steps += self._kernel(kernel)
                kernel = []
            else:
                kernel.append(equation)
        return _join([*steps, *self._kernel(kernel)])

    def _runs(self, op: ControlFlow) -> list[_Step]:
        """The blocks of an operation as often as costs count them, the dearest of a switch."""
        steps: list[_Step] = []
        for block, times in dearest_runs(op, self.costs):
            whole = int(times)
            steps += [self.block(block)] * whole
            if part := times - whole:  # of weighted branches, each at a part of its time
                share = replace(self, costs=lambda e, part=part: part * self.costs(e))
                steps.append(share.block(block))
        return steps

    def _kernel(self, equations: Sequence[Equation]) -> list[_Step]:
        order = order_equations(equations) if self.overlap else equations
        steps: list[_Step] = []
        together: list[Equation] = []

        def computed() -> None:
            if together:
                rows = [(self.costs(equation), equation.name) for equation in together]
                steps.append(_compute(sum(seconds for seconds, _ in rows), max(rows)[1]))
                together.clear()

        *due, at_end = waits(order)
        for equation, waited in zip(order, due, strict=True):
            ends = waited if self.overlap else []
            axis = axis_of(equation)
            if ends or axis is not None:
                computed()
            steps += [_wait(collective) for collective in ends]
            if axis is None:
                together.append(equation)
                continue
            steps.append(self._start(equation))
            steps += [] if self.overlap else [_wait(equation)]
        computed()
        return [*steps, *(_wait(equation) for equation in at_end if self.overlap)]

    def _start(self, equation: Equation, key: Any = None) -> _Step:
        axis, what, seconds = equation.args[1], equation.name, self.costs(equation)
        key, sent = equation if key is None else key, sent_bytes(equation)
        return lambda clock: clock.start(key, axis, what, seconds, sent)

    def _scan(self, equation: Equation, op: Scan) -> _Step:
        parts = split_scan_body(op, _find_needed(equation, op)) if self.prefetch else None
        if parts is None:
            return _join([self.block(op.body)] * op.length)
        gathers, rounds = parts.gathers, parts.rounds
        head, core = self.block(parts.head), self.block(parts.core)
        tails = [self.block(each.block) for each in rounds]
        turns: dict[tuple[str, int], list[_Step]] = {}
        for odd in (0, 1):  # two iterations' reductions of a round are under way at once
            keys = [[(equation, odd) for equation in each.sums] for each in rounds]
            starts = [[*map(self._start, r.sums, k)] for r, k in zip(rounds, keys, strict=True)]
            turns["gather", odd] = [head, *map(self._start, gathers)]
            turns["begin", odd] = [*map(_wait, gathers)]
            turns["compute", odd] = [core]
            turns["reduce", odd] = starts[0] if rounds else []
            for number, tail in enumerate(tails):
                then = starts[number + 1] if number + 1 < len(rounds) else []
                turns[f"end {number}", odd] = [*map(_wait, keys[number]), tail, *then]
        steps: list[_Step] = []
        ended: dict[int, int] = defaultdict(int)
        for turn, index in list_turns(op.length, gathers=bool(gathers), rounds=len(rounds)):
            name = f"end {ended[index]}" if turn == "end" else turn
            ended[index] += turn == "end"
            steps += turns[name, index % 2]
        return _join(steps)


def _find_needed(equation: Equation, op: Scan) -> list[Any]:
    """The outputs of a scan's body that are carried, or that something is made of."""
    rows = list(zip(op.body.outputs, equation.outputs, strict=True))
    return [v for i, (v, made) in enumerate(rows) if i < op.num_carry or made is not None]


def _join(steps: Sequence[_Step]) -> _Step:
    def run(clock: _Clock) -> None:
        for step in steps:
            step(clock)

    return run


def _compute(seconds: float, what: str) -> _Step:
    return lambda clock: clock.compute(seconds, what)


def _wait(key: Any) -> _Step:
    return lambda clock: clock.wait(key)
