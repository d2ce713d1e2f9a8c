"""Pipeline schedules as data: a table tick x rank of forwards and backwards of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from functron.errors import Problem, raise_problems
from functron.pipeline.action import Action, Kind, Product, What

Cell = tuple[Action, ...]
Pipe = tuple[tuple[int, int], ...]

_MADE: Mapping[Kind, What] = {
    "F": "activation",
    "B": "cotangent",
    "I": "cotangent",
    "W": "gradient",
}


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


@dataclass(frozen=True)
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
    made: dict[Product, int] = {}  # the tick after which it is there
    placed: list[dict[int, Cell]] = [{} for _ in cells]
    done, free = [0] * len(cells), [0] * len(cells)
    progress = True
    while progress:
        progress = False
        for rank, column in enumerate(cells):
            while done[rank] < len(column):
                cell = column[done[rank]]
                waits = _outside_needs(empty, rank, cell)
                if any(need not in made for need in waits):
                    break
                tick = max([free[rank], *(made[need] + 1 for need in waits)])
                placed[rank][tick] = cell
                for action in cell:
                    made.setdefault(empty.makes(rank, action), tick)
                done[rank], free[rank], progress = done[rank] + 1, tick + 1, True
    raise_problems(f"{name}: the ranks wait for one another", _blocked(empty, cells, done, made))
    rows = range(max(free, default=0))
    table = tuple(tuple(column.get(tick, ()) for column in placed) for tick in rows)
    return replace(empty, table=table)


def _outside_needs(schedule: Schedule, rank: int, cell: Cell) -> list[Product]:
    """What a cell needs that it does not make itself, earlier in the cell."""
    inside: set[Product] = set()
    needs: list[Product] = []
    for action in cell:
        needs += [need for need in schedule.needs(rank, action) if need not in inside]
        inside.add(schedule.makes(rank, action))
    return needs


def _blocked(
    schedule: Schedule,
    columns: Sequence[Sequence[Cell]],
    done: Sequence[int],
    made: Mapping[Product, int],
) -> list[Problem]:
    """A problem per rank that could not finish its column."""
    later = {
        schedule.makes(rank, action): (rank, action)
        for rank, column in enumerate(columns)
        for cell in column[done[rank] :]
        for action in cell
    }
    problems = []
    for rank, column in enumerate(columns):
        if done[rank] == len(column):
            continue
        cell = column[done[rank]]
        text = "+".join(map(str, cell))
        waits = []
        for need in _outside_needs(schedule, rank, cell):
            if need not in made:
                by = "{1} of rank {0}".format(*later[need]) if need in later else "nobody makes it"
                waits.append(f"the {need.what} of microbatch {need.microbatch} ({by})")
        problems.append(
            Problem(
                f"rank {rank}, cell {done[rank]} ({text})",
                f"a wait for {' and '.join(waits)}",
                "an order in which what a cell needs comes before it",
                f"move {text} down, or what it waits for up",
            )
        )
    return problems
