"""When each rank does what, in time: as costs foretell it, or as it was measured."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from functron.errors import Problem, raise_problems
from functron.pipeline import gantt
from functron.pipeline.action import Action, Cell, Kind, Product
from functron.pipeline.place import earliest_ticks, outside_needs

if TYPE_CHECKING:
    from functron.pipeline.schedule import Schedule

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """How long actions take, in seconds or any unit; a number for all stages, or one per stage.

    Attributes:
        forward: of F.
        backward: of B; None: as long as I and W together.
        backward_input: of I.
        backward_weight: of W.
        transfer: from the end of an action until the next stage's rank has what it made: what the
            stage of the action sends, forward or back. Ranks compute meanwhile.
        combined: of a cell of two actions, as a part of their sum: below 1 where one computes while
            the other communicates.
    """

    forward: Cost = 1.0
    backward: Cost | None = None
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    transfer: Cost = 0.0
    combined: float = 1.0

    def of(self, kind: Kind, stage: int) -> float:
        """How long an action of this kind takes at this stage."""
        if kind == "B" and self.backward is None:
            return self.of("I", stage) + self.of("W", stage)
        names = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
        return _at(getattr(self, names[kind]), stage)

    def sending(self, stage: int) -> float:
        """How long what this stage sends is under way."""
        return _at(self.transfer, stage)

    def problems(self, num_stages: int) -> list[Problem]:
        """What is wrong with these costs for so many stages."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            values = [value] if isinstance(value, int | float) else [*value]
            if not isinstance(value, int | float) and len(values) != num_stages:
                wanted, fix = f"{num_stages}, one per stage", "or give one number for all stages"
                found.append(Problem(f"costs.{field.name}", f"{len(values)} numbers", wanted, fix))
            if not all(math.isfinite(v) and v >= 0 for v in values):
                found.append(
                    Problem(f"costs.{field.name}", str(value), "finite numbers, 0 or more")
                )
        return found


def _at(cost: Cost, stage: int) -> float:
    return float(cost) if isinstance(cost, int | float) else float(cost[stage])


class Row(NamedTuple):
    """An action of a rank, and when it ran. Actions of one cell may have the same interval."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """When each rank did what; prints as a Gantt chart, and is drawn as one in notebooks.

    Times are in the unit of the costs, seconds where they were measured, on one clock; 0 is when
    the step began.

    Attributes:
        name: of the schedule.
        rows: what was done.
        num_ranks: how many ranks there are.
    """

    name: str
    rows: tuple[Row, ...]
    num_ranks: int

    @staticmethod
    def of(name: str, rows: Iterable[tuple[int, Action, float, float]]) -> Timeline:
        """The timeline of measured rows (rank, action, start, end), on the ranks they name.

        Times are shifted so that the first action starts at 0.
        """
        found = [Row(*row) for row in rows]
        first = min((row.start for row in found), default=0.0)
        shifted = (Row(r, a, start - first, end - first) for r, a, start, end in found)
        ordered = tuple(sorted(shifted, key=lambda row: (row.rank, row.start, row.end)))
        return Timeline(name, ordered, 1 + max((row.rank for row in found), default=-1))

    @property
    def total(self) -> float:
        """When the last action ends."""
        return max((row.end for row in self.rows), default=0.0)

    def busy(self, rank: int) -> float:
        """How long a rank computes. Time that two actions share counts once."""
        busy, until = 0.0, 0.0
        for row in sorted((r for r in self.rows if r.rank == rank), key=lambda row: row.start):
            busy += max(0.0, row.end - max(row.start, until))
            until = max(until, row.end)
        return busy

    @property
    def bubble_fraction(self) -> float:
        """1 - (time computing) / (ranks x total): the part of the ranks' time that is idle."""
        if not self.total:
            return 0.0
        return 1 - sum(map(self.busy, range(self.num_ranks))) / (self.num_ranks * self.total)

    def costs(self, schedule: Schedule) -> Costs:
        """What actions of each kind took at each stage, the median over microbatches.

        An action that shares its interval with another counts for its part, as if both took equally
        long. What the timeline does not have takes 0; transfers are not seen, and take 0.
        """
        seen: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        shared: dict[tuple[int, float, float], int] = defaultdict(int)
        for row in self.rows:
            shared[row.rank, row.start, row.end] += 1
        for rank, action, start, end in self.rows:
            _, stage = schedule.stage_of(rank, action.chunk)
            seen[action.kind, stage].append((end - start) / shared[rank, start, end])

        def median(kind: Kind) -> tuple[float, ...]:
            stages = range(schedule.num_stages)
            return tuple(statistics.median(seen.get((kind, stage)) or [0.0]) for stage in stages)

        whole = median("B") if any(kind == "B" for kind, _ in seen) else None
        return Costs(median("F"), whole, median("I"), median("W"))

    def gantt(self, width: int = 240) -> str:
        """A Gantt chart as text: a line per rank, time to the right.

        Args:
            width: of a line, at most.
        """
        return gantt.text(self._bars(), self.num_ranks, width=width)

    def svg(self, width: float | None = None) -> str:
        """A Gantt chart as an SVG picture, a colour per kind, a shade per chunk.

        Args:
            width: in pixels; None: such that most bars have room for their microbatch.
        """
        return gantt.svg(self._bars(), self.num_ranks, self._title(), width)

    def __str__(self) -> str:
        return f"{self._title()}\n{self.gantt()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.svg()

    def _title(self) -> str:
        return f"{self.name}: total {self.total:.4g}, bubble {self.bubble_fraction:.1%}"

    def _bars(self) -> list[gantt.Bar]:
        cells: dict[tuple[int, float, float], list[Action]] = defaultdict(list)
        for rank, action, start, end in self.rows:
            cells[rank, start, end].append(action)
        return [gantt.Bar(*at, tuple(actions)) for at, actions in cells.items()]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline in which every rank does its column in order, each cell as soon as it can.

    A cell starts when its rank is free and what it needs has arrived: at the end of the cell that
    made it, plus the transfer where that is another rank. Actions of a cell of two share its time.

    Args:
        schedule: a valid one.
        costs: how long actions take; by default F, I and W 1, B 2, transfers 0.

    Raises:
        ValueError: costs that do not fit, or ranks that wait for one another.
    """
    costs = Costs() if costs is None else costs
    raise_problems(f"costs of schedule {schedule.name}", costs.problems(schedule.num_stages))
    columns = [schedule.cells(rank) for rank in range(schedule.num_ranks)]
    arrivals: dict[Product, tuple[int, float, float]] = {}  # rank, end there, when it is elsewhere
    waiting: dict[Product, list[int]] = defaultdict(list)
    done, free = [0] * len(columns), [0.0] * len(columns)
    rows: list[Row] = []
    ready = [*range(len(columns))]
    while ready:
        rank = ready.pop()
        if done[rank] == len(columns[rank]):
            continue
        cell = columns[rank][done[rank]]
        needs = outside_needs(schedule, rank, cell)
        missing = next((need for need in needs if need not in arrivals), None)
        if missing is not None:
            waiting[missing].append(rank)
            continue
        there = (arrivals[need] for need in needs)
        start = max([free[rank], *(end if at == rank else later for at, end, later in there)])
        end = start + _duration(schedule, rank, cell, costs)
        for action in cell:
            product = schedule.makes(rank, action)
            arrivals[product] = rank, end, end + costs.sending(product.stage)
            ready += waiting.pop(product, [])
            rows.append(Row(rank, action, start, end))
        done[rank], free[rank] = done[rank] + 1, end
        ready.append(rank)
    if any(waiting.values()):
        title = f"schedule {schedule.name}: the ranks wait for one another"
        raise_problems(title, earliest_ticks(schedule, columns)[1])
    ordered = sorted(rows, key=lambda row: (row.rank, row.start, row.end))
    return Timeline(schedule.name, tuple(ordered), schedule.num_ranks)


def _duration(schedule: Schedule, rank: int, cell: Cell, costs: Costs) -> float:
    spent = sum(costs.of(a.kind, schedule.stage_of(rank, a.chunk)[1]) for a in cell)
    return spent * costs.combined if len(cell) > 1 else spent
