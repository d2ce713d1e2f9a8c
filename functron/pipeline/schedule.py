"""Pipeline schedules as data: a table tick x rank of forwards and backwards of microbatches.

A schedule is placed from columns (`place`), checked (`Schedule.validate`), drawn, and timed
(`Schedule.simulate`). As text it has a line per tick and a column per rank, easy to write by hand
and to compare:

    name: 1f1b
    microbatches: 2
    pipe: 0 1

    # 0   1
      F0  .
      F1  F0
      .   B0
      B0  F1

A cell is an action (``F3``, ``B3``, ``I3``, ``W3``, with ``.1`` for chunk 1), two that run together
(``F4+B2``), or a dot. What follows a # is a comment. All headers may be left out: without a pipe,
rank r holds stage r; with several, each is a line ``pipe: 0 1 1.1 0.1`` that names the rank (and
chunk) of each of its stages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from functron.core.chart import Gantt
from functron.core.errors import Problem, nearest, raise_problems
from functron.core.tables import table
from functron.pipeline import timeline
from functron.pipeline.partition import Pipe
from functron.pipeline.timeline import (
    KINDS,
    Action,
    ActionKind,
    Costs,
    ScheduleCell,
    TimedAction,
    Timeline,
    cell_text,
)

ResultKind = Literal["activation", "cotangent", "gradient"]
_MADE: Mapping[ActionKind, ResultKind] = MappingProxyType(
    {"F": "activation", "B": "cotangent", "I": "cotangent", "W": "gradient"}
)


class ActionResult(NamedTuple):
    """The result of an action that others need, of one microbatch at one stage.

    Attributes:
        what: "activation" (by F), "cotangent" of the stage's input (by B or I) or "gradient" of its
            weights (by W; B makes it too, but nothing waits for it).
    """

    what: ResultKind
    microbatch: int
    pipe: int
    stage: int


class Transfer(NamedTuple):
    """A tensor that goes from one rank to another.

    Attributes:
        action: the sender's: F makes an activation, B or I a cotangent.
        chunk: which of the receiver's chunks needs it.
    """

    sender: int
    receiver: int
    action: Action
    chunk: int


@dataclass(frozen=True, repr=False)
class Schedule:
    """One training step of a pipeline as a table: who computes what, and when.

    An action at tick t may use only what ticks before t made, except that the actions of one cell
    run in order and may use one another's results. After tick t every rank posts what it sends of
    the tick, in the order of `transfers(t)`; what it receives of it, it posts before its own cell.

    Attributes:
        pipes: per pipe, per stage, the (rank, chunk) that holds it. All pipes have the same number
            of stages; the microbatches are divided among them in order. 1F1B on two ranks has the
            one pipe ``((0, 0), (1, 0))``; DualPipe has a second one in the other direction.
        num_microbatches: of all pipes together.
        table: ``table[tick][rank]`` is the cell: no action, one, or two that run together.
    """

    name: str
    pipes: tuple[Pipe, ...]
    num_microbatches: int
    table: tuple[tuple[ScheduleCell, ...], ...]

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks hold stages."""
        return 1 + max(rank for pipe in self.pipes for rank, _ in pipe)

    @property
    def num_stages(self) -> int:
        """How many stages a microbatch goes through."""
        return len(self.pipes[0])

    @cached_property
    def num_chunks(self) -> int:
        """How many stages a rank holds, the most of all ranks."""
        return 1 + max(chunk for pipe in self.pipes for _, chunk in pipe)

    @property
    def num_ticks(self) -> int:
        """How many rows the table has."""
        return len(self.table)

    @cached_property
    def has_backward(self) -> bool:
        """False for a table of forwards only, as evaluation uses."""
        return any(a.kind != "F" for row in self.table for cell in row for a in cell)

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        return {
            at: (number, stage)
            for number, pipe in enumerate(self.pipes)
            for stage, at in enumerate(pipe)
        }

    def stage_of(self, rank: int, chunk: int) -> tuple[int, int]:
        """The (pipe, stage) that a chunk of a rank is.

        Raises:
            KeyError: the rank holds no such chunk.
        """
        return self._places[rank, chunk]

    def holder(self, pipe: int, stage: int) -> tuple[int, int]:
        """The (rank, chunk) that holds a stage of a pipe."""
        return self.pipes[pipe][stage]

    def pipe_of(self, microbatch: int) -> int:
        """The pipe that a microbatch goes through."""
        return microbatch * len(self.pipes) // self.num_microbatches

    def column(self, rank: int) -> list[tuple[int, Action]]:
        """The actions of a rank, in order, each with its tick."""
        return [(tick, a) for tick, row in enumerate(self.table) for a in row[rank]]

    def cells(self, rank: int) -> list[ScheduleCell]:
        """The cells of a rank that are not empty, in order."""
        return [row[rank] for row in self.table if row[rank]]

    def makes(self, rank: int, action: Action) -> ActionResult:
        """The result of an action of a rank."""
        return ActionResult(
            _MADE[action.kind], action.microbatch, *self.stage_of(rank, action.chunk)
        )

    def needs(self, rank: int, action: Action) -> tuple[ActionResult, ...]:
        """The results that must have been made before a rank can do an action.

        F needs the activation of the stage before; B and I their own forward and the cotangent from
        the stage after; W its own I.
        """
        m, (pipe, stage) = action.microbatch, self.stage_of(rank, action.chunk)
        if action.kind == "F":
            return (ActionResult("activation", m, pipe, stage - 1),) if stage else ()
        if action.kind == "W":
            return (ActionResult("cotangent", m, pipe, stage),)
        forward = ActionResult("activation", m, pipe, stage)
        if stage == self.num_stages - 1:
            return (forward,)
        return (forward, ActionResult("cotangent", m, pipe, stage + 1))

    def transfers(self, tick: int) -> list[Transfer]:
        """The transfers after a tick, in the order in which all ranks post them.

        The order is by sender, then by the order of its cell. Every rank posts its sends, and its
        receives, in this one order, so those between two ranks find one another.
        """
        found = []
        for rank, cell in enumerate(self.table[tick]):
            for action in cell:
                pipe, stage = self.stage_of(rank, action.chunk)
                to = stage + 1 if action.kind == "F" else stage - 1
                if action.kind == "W" or not 0 <= to < self.num_stages:
                    continue
                receiver, chunk = self.holder(pipe, to)
                if receiver != rank:
                    found.append(Transfer(rank, receiver, action, chunk))
        return found

    @cached_property
    def transfers_by_rank(self) -> Sequence[Sequence[Sequence[Transfer]]]:
        """For each rank, for each tick, those of `transfers` that the rank has part in."""
        ticks = [self.transfers(tick) for tick in range(self.num_ticks)]
        return [
            [[t for t in tick if rank in (t.sender, t.receiver)] for tick in ticks]
            for rank in range(self.num_ranks)
        ]

    @cached_property
    def links(self) -> frozenset[tuple[int, int]]:
        """The (sender, receiver) of all transfers."""
        ticks = range(self.num_ticks)
        return frozenset((t.sender, t.receiver) for tick in ticks for t in self.transfers(tick))

    def forward_only(self) -> Schedule:
        """The forwards of this schedule, in their order, for evaluation on the same stages."""
        columns = [
            [kept for cell in self.cells(r) if (kept := [a for a in cell if a.kind == "F"])]
            for r in range(self.num_ranks)
        ]
        return place(f"{self.name} forward", self.pipes, self.num_microbatches, columns)

    def validate(self, max_live: int | Sequence[int] | None = None) -> None:
        """Check that the table is a training step, or the forwards of one, that cannot deadlock.

        Every microbatch goes once through every stage of its pipe, on the ranks that hold them:
        forward, and, unless the table has forwards only, backward, whole (B) or split (I and W).
        Every action comes after the ticks that make what it needs, so no order of messages can
        deadlock: what a cell waits for was sent after a tick before, and its receive, which waits
        for cells of still earlier ticks alone, was posted before that.

        Args:
            max_live: the most activations that a rank, or each rank, may hold (`peak_live`).

        Raises:
            ValueError: lists every problem, with its tick, rank, action and fix.
        """
        raise_problems(f"schedule {self.name}", _problems(self, max_live))

    def peak_live(self, rank: int) -> int:
        """The most activations that a rank holds at once: forwards without their B or W yet.

        An activation is what one stage keeps of one microbatch for its backward. The forward of a
        cell of two counts as if it came first, because they run together. 0 without backwards.
        """
        return max(self._count_live(rank), default=0)

    def _count_live(self, rank: int) -> list[int]:
        """How many activations a rank holds during each of its cells; empty without backward."""
        if not self.has_backward:
            return []
        counts, now = [], 0
        for cell in self.cells(rank):
            now += sum(a.kind == "F" for a in cell)
            counts.append(now)
            now -= sum(a.kind in "BW" for a in cell)
        return counts

    def list_held(self, rank: int) -> list[tuple[int, int]]:
        """After each F and I of a rank: how many activations wait for B or I, and for W alone."""
        counts, whole, late = [], 0, 0
        for cell in self.cells(rank):
            for action in sorted(cell, key=lambda action: action.kind != "F"):
                whole += (action.kind == "F") - (action.kind in "BI")
                late += (action.kind == "I") - (action.kind == "W")
                counts += [(whole, late)] if action.kind in "FI" else []
        return counts

    def peak_arriving(self, rank: int) -> int:
        """The most values of other ranks that a rank has room for at once.

        There is room before the rank's cell of the tick that makes a value, and until it is used.
        """
        now, most = 0, 0
        for transfers, row in zip(self.transfers_by_rank[rank], self.table, strict=True):
            now += sum(transfer.receiver == rank for transfer in transfers)
            most = max(most, now)
            values = (n for a in row[rank] for n in self.needs(rank, a) if a.kind != "W")
            now -= sum(self.holder(n.pipe, n.stage)[0] != rank for n in values)
        return most

    def simulate(self, costs: Costs | None = None, *, ahead: bool = True) -> Timeline:
        """The timeline in which every rank does its column in order, each cell as soon as it can.

        A cell starts when its rank is free and what it needs has been made, and has arrived where
        that is another rank. A transfer begins when the value is made, the receiver has posted its
        receive, and the transfer before it between these two ranks has ended. Actions of a cell of
        two share its time. The table must be valid.

        Args:
            costs: how long actions take; by default F, I and W 1, B 2, transfers 0.
            ahead: receives are posted before the receiver's cell of the tick that makes the value,
                as processes do; False: after it.

        Raises:
            ValueError: costs that do not fit, or ranks that wait for one another.
        """
        costs = Costs() if costs is None else costs
        raise_problems(f"costs of schedule {self.name}", costs.problems(self.num_stages))
        _, blocked = _place_earliest(self, self._columns())
        raise_problems(f"schedule {self.name}: the ranks wait for one another", blocked)
        free, exposed = [0.0] * self.num_ranks, [0.0] * self.num_ranks
        made: dict[ActionResult, float] = {}
        arrived: dict[tuple[int, ActionResult], float] = {}
        link_free: dict[tuple[int, int], float] = {}
        rows: list[TimedAction] = []
        for tick, row in enumerate(self.table):
            before = [*free]
            for rank, cell in enumerate(row):
                if not cell:
                    continue
                needs = _needs(self, rank, cell)
                if not all(need in made for need in needs):
                    self.validate()
                ready = max([free[rank], *(made[need] for need in needs)])
                start = max([ready, *(arrived.get((rank, need), 0.0) for need in needs)])
                spent = sum(costs.of(a.kind, self.stage_of(rank, a.chunk)[1]) for a in cell)
                end = start + (spent * costs.combined if len(cell) > 1 else spent)
                free[rank], exposed[rank] = end, exposed[rank] + start - ready
                rows += [TimedAction(rank, action, start, end) for action in cell]
                made.update((self.makes(rank, action), end) for action in cell)
            posted = before if ahead else free
            for sender, receiver, action, _ in self.transfers(tick):
                value, link = self.makes(sender, action), (sender, receiver)
                begin = max(made[value], posted[receiver], link_free.get(link, 0.0))
                link_free[link] = begin + costs.sending(value.stage)
                arrived[receiver, value] = link_free[link]
        rows.sort(key=lambda row: (row.rank, row.start, row.end))
        return Timeline(self.name, tuple(rows), self.num_ranks, tuple(exposed))

    def bubble_fraction(self, costs: Costs | None = None) -> float:
        """The part of the ranks' time in which they wait; as of `simulate`."""
        return self.simulate(costs).bubble_fraction

    def gantt(self) -> str:
        """A Gantt chart of the ticks as text: a line per rank, time to the right.

        ``simulate().gantt()`` draws it in time.
        """
        return timeline.tick_text(self.table, self.num_ranks)

    def svg(self) -> str:
        """A Gantt chart of the ticks as an SVG picture, a colour per kind, a shade per chunk."""
        return self.bars().svg()

    def bars(self) -> Gantt:
        """The chart of the ticks as data."""
        title = f"{self.name}: {self.num_ranks} ranks, {self.num_microbatches} microbatches, "
        title += f"{self.num_ticks} ticks"
        return timeline.gantt(timeline.tick_bars(self.table), self.num_ranks, title)

    def __repr__(self) -> str:
        counts = f"{self.num_ranks} ranks, {self.num_stages} stages"
        return f"<Schedule {self.name}: {counts}, {self.num_microbatches} microbatches>"

    def _repr_html_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        rows = [[cell_text(cell) for cell in row] for row in self.table]
        grid = [[str(rank) for rank in range(self.num_ranks)], *rows]
        lines = table(grid, left=self.num_ranks).splitlines()
        pipes = [" ".join(f"{r}.{c}" if c else f"{r}" for r, c in pipe) for pipe in self.pipes]
        return "\n".join(
            [
                f"name: {self.name}",
                f"microbatches: {self.num_microbatches}",
                *(f"pipe: {pipe}" for pipe in pipes),
                "",
                f"# {lines[0]}",
                *(f"  {line}" for line in lines[1:]),
                "",
            ]
        )

    @staticmethod
    def parse(table: str, name: str = "table") -> Schedule:
        """The schedule that prints as `table`; the format is that of this module.

        The result is not validated.

        Args:
            name: of the schedule, where the text has none.

        Raises:
            ValueError: not the format; the error lists every line and cell at fault.
        """
        headers: dict[str, list[tuple[int, str]]] = {key: [] for key in _HEADERS}
        rows: list[tuple[int, list[str]]] = []
        problems: list[Problem] = []
        for number, line in enumerate(table.splitlines(), 1):
            content = line.partition("#")[0].strip()
            header = _HEADER.fullmatch(content)
            if header and header[1] in headers:
                headers[header[1]].append((number, header[2]))
            elif header:
                wanted, fix = "a header name, microbatches or pipe", nearest(header[1], _HEADERS)
                problems.append(Problem(f"line {number}", header[1], wanted, fix))
            elif content:
                rows.append((number, content.split()))
        problems += [
            Problem(f"line {number}", f"a second {key}: {value}", "one", "delete it")
            for key in _HEADERS[:2]
            for number, value in headers[key][1:]
        ]
        if not rows:
            got, fix = "no line of cells", "write 'F0 .' and so on"
            problems.append(Problem("table", got, "a line per tick", fix))
        pipes = _read_pipes(headers["pipe"], rows, problems)
        cells = tuple(_read_row(number, row, pipes, problems) for number, row in rows)
        count = _read_count(headers["microbatches"], cells, problems)
        raise_problems("this text is no schedule", problems)
        given = headers["name"][0][1] if headers["name"] else ""
        return Schedule(given or name, pipes, count, cells)

    @staticmethod
    def load(path: str | Path) -> Schedule:
        """The schedule in a text file, called like the file where the text has no name.

        Raises:
            ValueError: not the format; the error lists every line and cell at fault.
        """
        return Schedule.parse(Path(path).read_text(), Path(path).stem)

    def save(self, path: str | Path) -> None:
        """Write the schedule into a text file that `load` reads."""
        Path(path).write_text(str(self))

    def _columns(self) -> list[list[ScheduleCell]]:
        return [self.cells(rank) for rank in range(self.num_ranks)]


def place(
    name: str,
    pipes: Sequence[Sequence[tuple[int, int]]],
    num_microbatches: int,
    columns: Sequence[Sequence[Action | Sequence[Action]]],
) -> Schedule:
    """The schedule in which each rank does its column in order, every action as early as it can.

    An action takes one tick and starts after the ticks that make what it needs.

    Args:
        pipes: as in `Schedule`.
        columns: per rank its cells in order: actions, or tuples of two that run together.

    Raises:
        ValueError: ranks wait for one another, or for what no column makes; the error names what
            each one waits for.
    """
    fixed = tuple(tuple((rank, chunk) for rank, chunk in pipe) for pipe in pipes)
    empty = Schedule(name, fixed, num_microbatches, ())
    cells = [[(c,) if isinstance(c, Action) else tuple(c) for c in column] for column in columns]
    wanted, fix = "a chunk that this rank holds", "correct pipes or chunk"
    raise_problems(
        f"{name}: columns that do not fit the pipes",
        [
            Problem(f"rank {rank}", f"{a}", wanted, fix)
            for rank, column in enumerate(cells)
            for cell in column
            for a in cell
            if (rank, a.chunk) not in empty._places
        ],
    )
    ticks, blocked = _place_earliest(empty, cells)
    raise_problems(f"{name}: the ranks wait for one another", blocked)
    placed = [dict(zip(*pair, strict=True)) for pair in zip(ticks, cells, strict=True)]
    rows = range(1 + max((column[-1] for column in ticks if column), default=-1))
    table = tuple(tuple(column.get(tick, ()) for column in placed) for tick in rows)
    return replace(empty, table=table)


# --- the earliest that ranks can do their columns


def _place_earliest(
    schedule: Schedule, columns: Sequence[Sequence[ScheduleCell]]
) -> tuple[list[list[int]], list[Problem]]:
    """Per rank the ticks of its cells, and a problem for each rank that cannot go on.

    Of `schedule` only the pipes are read; `columns` are per rank its cells in order.
    """
    made: dict[ActionResult, int] = {}  # the first tick after
    waiting: dict[ActionResult, list[int]] = defaultdict(list)
    starts: list[list[int]] = [[] for _ in columns]
    free = [0] * len(columns)
    ready = [*reversed(range(len(columns)))]
    while ready:
        rank = ready.pop()
        if len(starts[rank]) == len(columns[rank]):
            continue
        cell = columns[rank][len(starts[rank])]
        needs = _needs(schedule, rank, cell)
        missing = next((need for need in needs if need not in made), None)
        if missing is not None:
            waiting[missing].append(rank)
            continue
        start = max([free[rank], *(made[need] for need in needs)])
        free[rank] = end = start + 1
        starts[rank].append(start)
        ready.append(rank)
        for action in cell:
            product = schedule.makes(rank, action)
            made.setdefault(product, end)
            ready += waiting.pop(product, [])
    left = [column[len(starts[rank]) :] for rank, column in enumerate(columns)]
    return starts, _find_blocked(schedule, left, made)


def _needs(schedule: Schedule, rank: int, cell: ScheduleCell) -> list[ActionResult]:
    """The results that a cell needs and does not make itself, earlier in the cell."""
    inside: set[ActionResult] = set()
    needs: list[ActionResult] = []
    for action in cell:
        needs += [need for need in schedule.needs(rank, action) if need not in inside]
        inside.add(schedule.makes(rank, action))
    return needs


def _find_blocked(
    schedule: Schedule, left: Sequence[Sequence[ScheduleCell]], made: Mapping[ActionResult, Any]
) -> list[Problem]:
    """A problem per rank with cells left: what the first one waits for, and who would make it."""
    later = {
        schedule.makes(rank, action): f"{action} of rank {rank}"
        for rank, column in enumerate(left)
        for cell in column
        for action in cell
    }
    problems = []
    wanted = "an order in which what a cell needs comes before it"
    for rank, column in enumerate(left):
        if not column:
            continue
        waits = [
            f"the {need.what} of microbatch {need.microbatch} ({later.get(need, 'made by nobody')})"
            for need in _needs(schedule, rank, column[0])
            if need not in made
        ]
        text, got = cell_text(column[0]), f"a wait for {' and '.join(waits)}"
        fix = f"move {text} down, or what it waits for up"
        problems.append(Problem(f"rank {rank}, {text}", got, wanted, fix))
    return problems


# --- problems of tables


class _Spot(NamedTuple):
    """The place of an action in the table: row, column, and position in the cell."""

    tick: int
    rank: int
    index: int

    def path(self, action: object) -> str:
        return f"tick {self.tick}, rank {self.rank}, {action}"


_Spots = dict[tuple[int, Action], list[_Spot]]  # by (rank, action)


def _problems(schedule: Schedule, max_live: int | Sequence[int] | None) -> list[Problem]:
    """The complaints of `Schedule.validate`."""
    shape = [*_pipe_problems(schedule)] or [
        Problem(
            f"tick {tick}",
            f"{len(row)} cells",
            f"{schedule.num_ranks}, one per rank",
            "leave idle cells empty",
        )
        for tick, row in enumerate(schedule.table)
        if len(row) != schedule.num_ranks
    ]
    if shape:  # no more is known of a table whose ranks are not
        return shape
    spots, found = _find_spots(schedule)
    counts = [*_count_problems(schedule, spots)]
    late = [*_order_problems(schedule, spots)]
    # in columns that lack actions every rank would wait, which is nothing new
    circles = [] if found or counts else _place_earliest(schedule, schedule._columns())[1]
    bound = [] if max_live is None else [*_live_problems(schedule, max_live)]
    return [*found, *counts, *late, *circles, *bound]


def _pipe_problems(schedule: Schedule) -> Iterable[Problem]:
    """Mistakes in the pipes and in the number of microbatches."""
    if not schedule.pipes or not all(schedule.pipes):
        fix = "name the rank of each stage, such as ((0, 0), (1, 0))"
        yield Problem("pipes", "a pipe without stages", "a stage or more", fix)
        return
    lengths = {len(pipe) for pipe in schedule.pipes}
    if len(lengths) > 1:
        wanted = "pipes through as many stages each, as they are the same model's"
        yield Problem("pipes", f"{sorted(lengths)} stages", wanted)
    held = [at for pipe in schedule.pipes for at in pipe]
    for at in sorted({at for at in held if held.count(at) > 1}):
        wanted = "one: chunks are numbered per rank"
        yield Problem(f"pipes: chunk {at[1]} of rank {at[0]}", "two stages", wanted)
    chunks: dict[int, set[int]] = defaultdict(set)
    for rank, chunk in held:
        chunks[rank].add(chunk)
    numbered = {"ranks": set(chunks), **{f"chunks of rank {r}": chunks[r] for r in chunks}}
    for what, numbers in numbered.items():
        if numbers != set(range(len(numbers))):
            wanted = f"{what} numbered from 0 without gaps"
            yield Problem("pipes", f"{what} {sorted(numbers)}", wanted)
    if schedule.num_microbatches < 1:
        yield Problem("num_microbatches", str(schedule.num_microbatches), "1 or more")


def _find_spots(schedule: Schedule) -> tuple[_Spots, list[Problem]]:
    """The places of each (rank, action), and the problems of those that no table may have there."""
    spots: _Spots = defaultdict(list)
    found = []
    for tick, row in enumerate(schedule.table):
        for rank, cell in enumerate(row):
            if len(cell) > 2:
                path, got = f"tick {tick}, rank {rank}, {cell_text(cell)}", f"{len(cell)} actions"
                found.append(Problem(path, got, "two at most", "use more ticks"))
            for index, action in enumerate(cell):
                spot = _Spot(tick, rank, index)
                problem = _find_misplaced(schedule, spot, action)
                if problem is None:
                    spots[rank, action].append(spot)
                else:
                    found.append(problem)
    return spots, found


def _find_misplaced(schedule: Schedule, spot: _Spot, action: Action) -> Problem | None:
    path = spot.path(action)
    if action.kind not in KINDS:
        return Problem(path, f"kind {action.kind!r}", "F, B, I or W")
    if not 0 <= action.microbatch < schedule.num_microbatches:
        wanted = f"0 to {schedule.num_microbatches - 1}"
        return Problem(path, f"microbatch {action.microbatch}", wanted, "correct one of the counts")
    pipe = schedule.pipe_of(action.microbatch)
    chunks = [chunk for rank, chunk in schedule.pipes[pipe] if rank == spot.rank]
    if action.chunk in chunks:
        return None
    held = f"chunk {' or '.join(map(str, sorted(chunks)))}" if chunks else "another rank"
    return Problem(
        path,
        f"chunk {action.chunk} of rank {spot.rank}, no stage of pipe {pipe}",
        f"{held}, where microbatch {action.microbatch} passes",
        "move it to the rank and chunk that hold the stage",
    )


def _count_problems(schedule: Schedule, spots: _Spots) -> Iterable[Problem]:
    """Actions that are missing, twice in the table, or of both kinds of backward."""
    missing: dict[tuple[int, int, ActionKind], list[int]] = defaultdict(list)
    for m in range(schedule.num_microbatches):
        for rank, chunk in schedule.pipes[schedule.pipe_of(m)]:
            found: dict[ActionKind, list[_Spot]] = {
                k: spots.get((rank, Action(k, m, chunk)), []) for k in KINDS
            }
            split = bool(found["I"] or found["W"])
            backward = ("I", "W") if split else ("B",) if schedule.has_backward else ()
            wanted: tuple[ActionKind, ...] = ("F", *backward)
            for kind, at in found.items():
                if kind in wanted and not at:
                    missing[rank, chunk, kind].append(m)
                for spot in at[1:]:
                    first = f"a second one, after the one of tick {at[0].tick}"
                    yield Problem(spot.path(Action(kind, m, chunk)), first, "one", "delete it")
            if split and found["B"]:
                path, got = found["B"][0].path(Action("B", m, chunk)), "B besides its parts I or W"
                yield Problem(path, got, "one backward", "keep B, or I and W")
    for (rank, chunk, kind), microbatches in missing.items():
        actions = " ".join(str(Action(kind, m, chunk)) for m in microbatches)
        fix = f"add {'them' if len(microbatches) > 1 else 'it'}"
        yield Problem(f"rank {rank}", f"no {actions}", "one of each", fix)


def _order_problems(schedule: Schedule, spots: _Spots) -> Iterable[Problem]:
    """Actions that come before what they need."""
    made: dict[ActionResult, _Spot] = {}
    for (rank, action), at in spots.items():
        product = schedule.makes(rank, action)
        made[product] = min(at[0], made.get(product, at[0]))
    for (rank, action), at in spots.items():
        for need in schedule.needs(rank, action):
            user, source = at[0], made.get(need)
            if source is None or source.tick < user.tick:  # none: that it is missing is known
                continue
            if source[:2] == user[:2] and source.index < user.index:
                continue
            later = source.tick + 1
            got = f"it needs the {need.what} that rank {source.rank} makes at tick {source.tick}"
            wanted = f"it after that, at tick {later} or later"
            yield Problem(user.path(action), got, wanted, f"move it down to tick {later}")


def _live_problems(schedule: Schedule, max_live: int | Sequence[int]) -> Iterable[Problem]:
    for rank in range(schedule.num_ranks):
        bound = max_live if isinstance(max_live, int) else max_live[rank]
        counts = schedule._count_live(rank)
        if max(counts, default=0) > bound:
            first = next(index for index, count in enumerate(counts) if count > bound)
            cell = cell_text(schedule.cells(rank)[first])
            got = f"{max(counts)} live activations, over {bound} from {cell} on"
            fix = f"move backwards before {cell}"
            yield Problem(f"rank {rank}", got, f"at most {bound}", fix)


# --- tables as text

_HEADER = re.compile(r"(\w+)\s*:\s*(.*)")
_HOLDER = re.compile(r"(\d+)(?:\.(\d+))?")
_HEADERS = ("name", "microbatches", "pipe")


def _read_pipes(
    lines: list[tuple[int, str]], rows: list[tuple[int, list[str]]], problems: list[Problem]
) -> tuple[Pipe, ...]:
    """The pipes of these header lines; without any, one stage per rank."""
    if not lines:
        return (tuple((rank, 0) for rank in range(len(rows[0][1]) if rows else 0)),)
    pipes = []
    for number, line in lines:
        stages = []
        for stage, text in enumerate(line.split()):
            found = _HOLDER.fullmatch(text)
            if found is None:
                wanted, fix = "a rank, or rank.chunk", "write such as 0 1 1.1 0.1"
                problems.append(Problem(f"line {number}, stage {stage}", repr(text), wanted, fix))
            else:
                stages.append((int(found[1]), int(found[2] or 0)))
        pipes.append(tuple(stages))
    return tuple(pipes)


def _read_row(
    number: int, cells: list[str], pipes: tuple[Pipe, ...], problems: list[Problem]
) -> tuple[ScheduleCell, ...]:
    """The cells of a line."""
    held = {at for pipe in pipes for at in pipe}
    num_ranks = 1 + max((rank for rank, _ in held), default=-1)
    if len(cells) != num_ranks:
        wanted, fix = f"{num_ranks}, one per rank", "write a dot for a rank that does nothing"
        problems.append(Problem(f"line {number}", f"{len(cells)} cells", wanted, fix))
    row = []
    for rank, text in enumerate(cells):
        path, actions = f"line {number}, rank {rank}", []
        for part in text.split("+") if text != "." else ():
            try:
                actions.append(Action.parse(part))
            except ValueError:
                wanted = "an action such as F3, B3, I3, W3 or F3.1, two with a + between, or a dot"
                problems.append(Problem(path, repr(text), wanted))
        for action in actions:
            if (rank, action.chunk) not in held and rank < num_ranks:
                wanted = f"a chunk of rank {rank}: {sorted(c for r, c in held if r == rank)}"
                fix = "add the stage to a header such as pipe: 0 1 0.1 1.1"
                problems.append(Problem(path, str(action), wanted, fix))
        row.append(tuple(actions))
    return tuple(row)


def _read_count(
    lines: list[tuple[int, str]],
    table: tuple[tuple[ScheduleCell, ...], ...],
    problems: list[Problem],
) -> int:
    """The number of microbatches of this header line; without one, of the table."""
    if not lines:
        return 1 + max((a.microbatch for row in table for cell in row for a in cell), default=0)
    number, text = lines[0]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(Problem(f"line {number}", f"microbatches: {text}", "a positive number"))
    return 1
