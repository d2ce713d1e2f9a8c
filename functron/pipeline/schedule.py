"""Pipeline schedules as data: a table tick x rank of forwards and backwards of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from functron.errors import Problem, raise_problems
from functron.pipeline import gantt, text
from functron.pipeline.action import Action, Cell, Kind, Pipe, Product, What
from functron.pipeline.place import earliest_ticks
from functron.pipeline.timeline import Costs, Timeline, simulate
from functron.pipeline.validate import live, problems

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
        return gantt.tick_text(self)

    def svg(self) -> str:
        """A Gantt chart of the ticks as an SVG picture, a colour per kind, a shade per chunk."""
        title = f"{self.name}: {self.num_ranks} ranks, {self.num_microbatches} microbatches, "
        title += f"{self.num_ticks} ticks"
        return gantt.svg(gantt.tick_bars(self), self.num_ranks, title)

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
        return text.write(self)

    @staticmethod
    def parse(table: str, name: str = "table") -> Schedule:
        """The schedule that prints as `table`; the format is described in `functron.pipeline.text`.

        The result is not validated.

        Args:
            table: the text.
            name: of the schedule, where the text has none.

        Raises:
            ValueError: not the format; the error lists every line and cell at fault.
        """
        return Schedule(*text.read(table, name))

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
