"""Pipeline schedules as data: a table tick x rank of forwards and backwards of microbatches.

What is wrong with a table: all that keeps it from being a training step that ends.

Schedules as text: a line per tick, a column per rank, easy to write by hand and to compare.

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
from typing import TYPE_CHECKING, NamedTuple

from functron.core.errors import Problem, nearest, raise_problems
from functron.pipeline import timeline
from functron.pipeline.table import (
    KINDS,
    Action,
    Cell,
    Kind,
    Pipe,
    Product,
    What,
    cell_text,
    earliest_ticks,
)
from functron.pipeline.timeline import Costs, Timeline, simulate

if TYPE_CHECKING:
    pass


class Spot(NamedTuple):
    """Where in the table an action stands.

    Attributes:
        tick: its row.
        rank: its column.
        index: its position in the cell.
    """

    tick: int
    rank: int
    index: int


Spots = dict[tuple[int, Action], list[Spot]]  # by (rank, action)


def problems(schedule: Schedule, max_live: int | Sequence[int] | None = None) -> list[Problem]:
    """Everything that `Schedule.validate` complains about."""
    shape = [*_pipes(schedule)] or [*_rows(schedule)]
    if shape:  # nothing else can be said of a table whose ranks are not known
        return shape
    spots, found = _spots(schedule)
    counts = [*_counts(schedule, spots)]
    late = [*_order(schedule, spots)]
    # in columns that lack actions every rank would wait, which says nothing new
    circles = [] if found or counts else earliest_ticks(schedule, _columns(schedule))[1]
    bound = [] if max_live is None else [*_live_bound(schedule, max_live)]
    return [*found, *counts, *late, *circles, *bound]


def live(schedule: Schedule, rank: int) -> list[int]:
    """How many activations a rank holds while it does each of its cells; empty without backward."""
    if not schedule.has_backward:
        return []
    counts, now = [], 0
    for cell in schedule.cells(rank):
        now += sum(a.kind == "F" for a in cell)
        counts.append(now)
        now -= sum(a.kind in "BW" for a in cell)
    return counts


def _pipes(schedule: Schedule) -> Iterable[Problem]:
    """What is wrong with the pipes and the number of microbatches."""
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
    for what, numbers in [
        ("ranks", set(chunks)),
        *((f"chunks of rank {r}", chunks[r]) for r in chunks),
    ]:
        if numbers != set(range(len(numbers))):
            wanted = f"{what} numbered from 0 without gaps"
            yield Problem("pipes", f"{what} {sorted(numbers)}", wanted)
    if schedule.num_microbatches < 1:
        yield Problem("num_microbatches", str(schedule.num_microbatches), "1 or more")


def _rows(schedule: Schedule) -> Iterable[Problem]:
    """Rows that do not have a cell per rank."""
    for tick, row in enumerate(schedule.table):
        if len(row) != schedule.num_ranks:
            wanted = f"{schedule.num_ranks}, one per rank"
            yield Problem(f"tick {tick}", f"{len(row)} cells", wanted, "leave idle cells empty")


def _columns(schedule: Schedule) -> list[list[Cell]]:
    return [schedule.cells(rank) for rank in range(schedule.num_ranks)]


def _spots(schedule: Schedule) -> tuple[Spots, list[Problem]]:
    """Where each (rank, action) stands, and the problems of those that no table may have there."""
    spots: Spots = defaultdict(list)
    found = []
    for tick, row in enumerate(schedule.table):
        for rank, cell in enumerate(row):
            if len(cell) > 2:
                path, got = f"tick {tick}, rank {rank}, {cell_text(cell)}", f"{len(cell)} actions"
                found.append(Problem(path, got, "two at most", "use more ticks"))
            for index, action in enumerate(cell):
                spot = Spot(tick, rank, index)
                problem = _misplaced(schedule, spot, action)
                if problem is None:
                    spots[rank, action].append(spot)
                else:
                    found.append(problem)
    return spots, found


def _misplaced(schedule: Schedule, spot: Spot, action: Action) -> Problem | None:
    path = _path(spot, action)
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


def _path(spot: Spot, action: object) -> str:
    return f"tick {spot.tick}, rank {spot.rank}, {action}"


def _counts(schedule: Schedule, spots: Spots) -> Iterable[Problem]:
    """Actions that are missing, twice in the table, or of both kinds of backward."""
    missing: dict[tuple[int, int, Kind], list[int]] = defaultdict(list)
    for m in range(schedule.num_microbatches):
        for rank, chunk in schedule.pipes[schedule.pipe_of(m)]:
            found: dict[Kind, list[Spot]] = {
                k: spots.get((rank, Action(k, m, chunk)), []) for k in KINDS
            }
            split = bool(found["I"] or found["W"])
            backward = ("I", "W") if split else ("B",) if schedule.has_backward else ()
            wanted: tuple[Kind, ...] = ("F", *backward)
            for kind, at in found.items():
                action = Action(kind, m, chunk)
                if kind in wanted and not at:
                    missing[rank, chunk, kind].append(m)
                for spot in at[1:]:
                    first = f"a second one, after the one of tick {at[0].tick}"
                    yield Problem(_path(spot, action), first, "one", "delete it")
            if split and found["B"]:
                path, got = (
                    _path(found["B"][0], Action("B", m, chunk)),
                    "B besides its parts I or W",
                )
                yield Problem(path, got, "one backward", "keep B, or I and W")
    for (rank, chunk, kind), microbatches in missing.items():
        actions = " ".join(str(Action(kind, m, chunk)) for m in microbatches)
        fix = f"add {'them' if len(microbatches) > 1 else 'it'}"
        yield Problem(f"rank {rank}", f"no {actions}", "one of each", fix)


def _order(schedule: Schedule, spots: Spots) -> Iterable[Problem]:
    """Actions that come too early, and ranks that wait for one another."""
    made: dict[Product, Spot] = {}
    for (rank, action), at in spots.items():
        product = schedule.makes(rank, action)
        made[product] = min(at[0], made.get(product, at[0]))
    for (rank, action), at in spots.items():
        for need in schedule.needs(rank, action):
            source = made.get(need)  # none: it is missing, which was said
            if source is None or _before(source, at[0]):
                continue
            wanted = f"it after that, at tick {source.tick + 1} or later"
            got = f"it needs the {need.what} that rank {source.rank} makes at tick {source.tick}"
            yield Problem(
                _path(at[0], action), got, wanted, f"move it down to tick {source.tick + 1}"
            )


def _before(source: Spot, user: Spot) -> bool:
    """Whether what is made at `source` can be used at `user`."""
    same_cell = source[:2] == user[:2] and source.index < user.index
    return source.tick < user.tick or same_cell


def _live_bound(schedule: Schedule, max_live: int | Sequence[int]) -> Iterable[Problem]:
    for rank in range(schedule.num_ranks):
        bound = max_live if isinstance(max_live, int) else max_live[rank]
        counts = live(schedule, rank)
        if max(counts, default=0) > bound:
            first = next(index for index, count in enumerate(counts) if count > bound)
            cell = cell_text(schedule.cells(rank)[first])
            got = f"{max(counts)} live activations, over {bound} from {cell} on"
            fix = f"move backwards before {cell}"
            yield Problem(f"rank {rank}", got, f"at most {bound}", fix)


_HEADER = re.compile(r"(\w+)\s*:\s*(.*)")
_HOLDER = re.compile(r"(\d+)(?:\.(\d+))?")
_HEADERS = ("name", "microbatches", "pipe")


class Fields(NamedTuple):
    """The fields of a schedule."""

    name: str
    pipes: tuple[Pipe, ...]
    num_microbatches: int
    table: tuple[tuple[Cell, ...], ...]


def write(schedule: Schedule) -> str:
    """The text of a schedule, which `read` takes."""
    rows = [[cell_text(cell) for cell in row] for row in schedule.table]
    grid = [[str(rank) for rank in range(schedule.num_ranks)], *rows]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in grid]
    pipes = [" ".join(f"{r}.{c}" if c else f"{r}" for r, c in pipe) for pipe in schedule.pipes]
    return "\n".join(
        [
            f"name: {schedule.name}",
            f"microbatches: {schedule.num_microbatches}",
            *(f"pipe: {pipe}" for pipe in pipes),
            "",
            f"# {lines[0]}".rstrip(),
            *(f"  {line}".rstrip() for line in lines[1:]),
            "",
        ]
    )


def read(text: str, name: str = "table") -> Fields:
    """The fields of the schedule that `text` says.

    Args:
        text: the text.
        name: of the schedule, where the text has none.

    Raises:
        ValueError: not the format; the error lists every line and cell at fault.
    """
    headers: dict[str, list[tuple[int, str]]] = {key: [] for key in _HEADERS}
    rows: list[tuple[int, list[str]]] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        header = _HEADER.fullmatch(content)
        if header and header[1] in headers:
            headers[header[1]].append((number, header[2]))
        elif header:
            wanted = "a header name, microbatches or pipe"
            problems.append(
                Problem(f"line {number}", header[1], wanted, nearest(header[1], _HEADERS))
            )
        elif content:
            rows.append((number, content.split()))
    for key in _HEADERS[:2]:
        for number, value in headers[key][1:]:
            problems.append(
                Problem(f"line {number}", f"a second {key}: {value}", "one", "delete it")
            )
    if not rows:
        problems.append(
            Problem("table", "no line of cells", "a line per tick", "write 'F0 .' and so on")
        )
    pipes = _pipes_text(headers["pipe"], rows, problems)
    table = tuple(_row(number, cells, pipes, problems) for number, cells in rows)
    count = _count(headers["microbatches"], table, problems)
    raise_problems("this text is no schedule", problems)
    given = headers["name"][0][1] if headers["name"] else ""
    return Fields(given or name, pipes, count, table)


def _pipes_text(
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


def _row(
    number: int, cells: list[str], pipes: tuple[Pipe, ...], problems: list[Problem]
) -> tuple[Cell, ...]:
    """The cells of a line."""
    held = {at for pipe in pipes for at in pipe}
    num_ranks = 1 + max((rank for rank, _ in held), default=-1)
    if len(cells) != num_ranks:
        wanted = f"{num_ranks}, one per rank"
        fix = "write a dot for a rank that does nothing"
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


def _count(
    lines: list[tuple[int, str]], table: tuple[tuple[Cell, ...], ...], problems: list[Problem]
) -> int:
    """The number of microbatches of this header line; without one, of the table."""
    if not lines:
        return 1 + max((a.microbatch for row in table for cell in row for a in cell), default=0)
    number, text = lines[0]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(Problem(f"line {number}", f"microbatches: {text}", "a positive number"))
    return 1


_MADE: Mapping[Kind, What] = MappingProxyType(
    {"F": "activation", "B": "cotangent", "I": "cotangent", "W": "gradient"}
)


class Transfer(NamedTuple):
    """A tensor that goes from one rank to another.

    Attributes:
        sender: the rank that made it.
        receiver: the rank that needs it.
        action: what the sender did: F makes an activation, B or I a cotangent.
        chunk: which of the receiver's chunks needs it.
    """

    sender: int
    receiver: int
    action: Action
    chunk: int


@dataclass(frozen=True, repr=False)
class Schedule:
    """Who computes what when: what one training step of a pipeline does, as a table.

    An action at tick t may use only what ticks before t made, except that the actions of one cell
    run in order and may use one another's results. After tick t every rank posts the transfers that
    the tick made necessary, in the order of `transfers(t)`.

    Attributes:
        name: what it is called.
        pipes: per pipe, per stage, the (rank, chunk) that holds it. All pipes have the same number
            of stages; the microbatches are divided among them in order. 1F1B on two ranks has the
            one pipe ``((0, 0), (1, 0))``; DualPipe has a second one in the other direction.
        num_microbatches: of all pipes together.
        table: ``table[tick][rank]`` is the cell: no action, one, or two that run together.
    """

    name: str
    pipes: tuple[Pipe, ...]
    num_microbatches: int
    table: tuple[tuple[Cell, ...], ...]

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
        """What a rank does, in order, each with its tick."""
        return [(tick, a) for tick, row in enumerate(self.table) for a in row[rank]]

    def cells(self, rank: int) -> list[Cell]:
        """The cells of a rank that are not empty, in order."""
        return [row[rank] for row in self.table if row[rank]]

    def makes(self, rank: int, action: Action) -> Product:
        """What an action of a rank makes that others wait for."""
        return Product(_MADE[action.kind], action.microbatch, *self.stage_of(rank, action.chunk))

    def needs(self, rank: int, action: Action) -> tuple[Product, ...]:
        """What must have been made before a rank can do an action.

        F needs the activation of the stage before; B and I their own forward and the cotangent from
        the stage after; W its own I.
        """
        m, (pipe, stage) = action.microbatch, self.stage_of(rank, action.chunk)
        if action.kind == "F":
            return (Product("activation", m, pipe, stage - 1),) if stage else ()
        if action.kind == "W":
            return (Product("cotangent", m, pipe, stage),)
        forward = Product("activation", m, pipe, stage)
        if stage == self.num_stages - 1:
            return (forward,)
        return (forward, Product("cotangent", m, pipe, stage + 1))

    def transfers_of(self, rank: int) -> Sequence[Sequence[Transfer]]:
        """For each tick those of `transfers` that a rank has part in."""
        return self._transfers_by_rank[rank]

    @cached_property
    def _transfers_by_rank(self) -> Sequence[Sequence[Sequence[Transfer]]]:
        ticks = [self.transfers(tick) for tick in range(self.num_ticks)]
        return [
            [[t for t in tick if rank in (t.sender, t.receiver)] for tick in ticks]
            for rank in range(self.num_ranks)
        ]

    def transfers(self, tick: int) -> list[Transfer]:
        """What ranks send one another after a tick, in the order in which all of them post it.

        The order is by sender, then by the order of its cell. Every rank posts its sends and
        receives in this one order, so blocking sends cannot wait for each other in a circle.
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

    def validate(self, max_live: int | Sequence[int] | None = None) -> None:
        """Check that the table is a training step, or the forwards of one, that cannot deadlock.

        Every microbatch goes once through every stage of its pipe, on the ranks that hold them:
        forward, and, unless the table has forwards only, backward, whole (B) or split (I and W).
        Every action comes after the ticks that make what it needs, so no order of messages can
        deadlock: all ranks post the transfers of a tick in one order (`transfers`), and what a cell
        waits for was posted before it. This holds for blocking sends and for asynchronous ones.

        Args:
            max_live: the most activations that a rank, or each rank, may hold (`peak_live`).

        Raises:
            ValueError: lists every problem, with its tick, rank, action and fix.
        """
        raise_problems(f"schedule {self.name}", problems(self, max_live))

    def peak_live(self, rank: int) -> int:
        """The most activations that a rank holds at once: forwards without their B or W yet.

        An activation is what one stage keeps of one microbatch for its backward. The forward of a
        cell of two counts as if it came first, because they run together. 0 without backwards.
        """
        return max(live(self, rank), default=0)

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """The timeline in which every rank does its column in order, as soon as it can.

        See `functron.pipeline.timeline.simulate`.

        Args:
            costs: how long actions take; by default F, I and W 1, B 2, transfers 0.
        """
        return simulate(self, costs)

    def bubble_fraction(self, costs: Costs | None = None) -> float:
        """The part of the ranks' time in which they wait, if actions take so long.

        Args:
            costs: how long actions take; by default F, I and W 1, B 2, transfers 0.
        """
        return self.simulate(costs).bubble_fraction

    def gantt(self) -> str:
        """A Gantt chart of the ticks as text: a line per rank, time to the right.

        ``simulate().gantt()`` draws it in time.
        """
        return timeline.tick_text(self)

    def svg(self) -> str:
        """A Gantt chart of the ticks as an SVG picture, a colour per kind, a shade per chunk."""
        title = f"{self.name}: {self.num_ranks} ranks, {self.num_microbatches} microbatches, "
        title += f"{self.num_ticks} ticks"
        return timeline.svg(timeline.tick_bars(self), self.num_ranks, title)

    def __repr__(self) -> str:
        counts = f"{self.num_ranks} ranks, {self.num_stages} stages"
        return f"<Schedule {self.name}: {counts}, {self.num_microbatches} microbatches>"

    def _repr_html_(self) -> str:
        return self.svg()

    def forward_only(self) -> Schedule:
        """The forwards of this schedule, in their order, for evaluation on the same stages."""
        columns = [
            [kept for cell in self.cells(r) if (kept := [a for a in cell if a.kind == "F"])]
            for r in range(self.num_ranks)
        ]
        return place(f"{self.name} forward", self.pipes, self.num_microbatches, columns)

    def __str__(self) -> str:
        return write(self)

    @staticmethod
    def parse(table: str, name: str = "table") -> Schedule:
        """The schedule that prints as `table`; the format is that of this module.

        The result is not validated.

        Args:
            table: the text.
            name: of the schedule, where the text has none.

        Raises:
            ValueError: not the format; the error lists every line and cell at fault.
        """
        return Schedule(*read(table, name))

    @staticmethod
    def load(path: str | Path) -> Schedule:
        """The schedule in a text file, called like the file if it says no name.

        Raises:
            ValueError: not the format; the error lists every line and cell at fault.
        """
        return Schedule.parse(Path(path).read_text(), Path(path).stem)

    def save(self, path: str | Path) -> None:
        """Write the schedule into a text file that `load` reads."""
        Path(path).write_text(str(self))


def place(
    name: str,
    pipes: Sequence[Sequence[tuple[int, int]]],
    num_microbatches: int,
    columns: Sequence[Sequence[Action | Sequence[Action]]],
) -> Schedule:
    """The schedule in which each rank does its column in order, every action as early as it can.

    An action takes one tick and starts after the ticks that make what it needs.

    Args:
        name: of the schedule.
        pipes: as in `Schedule`.
        num_microbatches: as in `Schedule`.
        columns: per rank its cells in order: actions, or tuples of two that run together.

    Raises:
        ValueError: ranks wait for one another, or for what no column makes; the error names what
            each one waits for.
    """
    fixed = tuple(tuple((rank, chunk) for rank, chunk in pipe) for pipe in pipes)
    empty = Schedule(name, fixed, num_microbatches, ())
    cells = [[(c,) if isinstance(c, Action) else tuple(c) for c in column] for column in columns]
    raise_problems(
        f"{name}: columns that do not fit the pipes",
        [
            Problem(
                f"rank {rank}", f"{a}", "a chunk that this rank holds", "correct pipes or chunk"
            )
            for rank, column in enumerate(cells)
            for cell in column
            for a in cell
            if (rank, a.chunk) not in empty._places
        ],
    )
    ticks, blocked = earliest_ticks(empty, cells)
    raise_problems(f"{name}: the ranks wait for one another", blocked)
    placed = [dict(zip(*pair, strict=True)) for pair in zip(ticks, cells, strict=True)]
    rows = range(1 + max((column[-1] for column in ticks if column), default=-1))
    table = tuple(tuple(column.get(tick, ()) for column in placed) for tick in rows)
    return replace(empty, table=table)
