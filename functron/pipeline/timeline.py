"""Actions of the ranks of a pipeline, and when they run: as costs foretell it, or as measured.

Timelines and the tables of schedules are drawn as Gantt charts, as text and as SVG.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, cast

from functron.core import chart
from functron.core.errors import Problem

ActionKind = Literal["F", "B", "I", "W"]
KINDS: tuple[ActionKind, ...] = ("F", "B", "I", "W")

_PATTERN = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Action:
    """One computation on one microbatch; prints as ``F3`` (chunk 0) or ``F3.1`` (chunk 1).

    Attributes:
        kind: "F" forward; "B" whole backward; or its parts, "I" backward for the stage's input and
            "W" backward for its weights.
        chunk: which of its rank's chunks of layers, from 0.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`.

        Raises:
            ValueError: it is not of the form F3 or F3.1.
        """
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise ValueError(
                f"action: got {text!r}; wanted one of F B I W, then the microbatch, then .chunk "
                "where that is not 0; fix: write F3 or F3.1"
            )
        kind = cast(ActionKind, found[1])
        return Action(kind, int(found[2]), int(found[3] or 0))


ScheduleCell = tuple[Action, ...]


def cell_text(cell: ScheduleCell) -> str:
    """A cell as text: ``F4+B2``, or a dot for an empty one."""
    return "+".join(map(str, cell)) or "."


ActionCost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """How long actions take, in seconds or any unit; a number for all stages, or one per stage.

    Attributes:
        forward: of F.
        backward: of B; None: as long as I and W together.
        backward_input: of I.
        backward_weight: of W.
        transfer: of what a stage sends, forward or back, to another rank. Ranks compute meanwhile.
        combined: of a cell of two actions, as a part of their sum: below 1 where one computes while
            the other communicates.
    """

    forward: ActionCost = 1.0
    backward: ActionCost | None = None
    backward_input: ActionCost = 1.0
    backward_weight: ActionCost = 1.0
    transfer: ActionCost = 0.0
    combined: float = 1.0

    def of(self, kind: ActionKind, stage: int) -> float:
        """How long an action of this kind takes at this stage."""
        if kind == "B" and self.backward is None:
            return self.of("I", stage) + self.of("W", stage)
        names = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
        return _cost_at(getattr(self, names[kind]), stage)

    def sending(self, stage: int) -> float:
        """How long what this stage sends is under way."""
        return _cost_at(self.transfer, stage)

    def problems(self, num_stages: int) -> list[Problem]:
        """Costs that are not one per stage, or not finite and at least 0."""
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


def _cost_at(cost: ActionCost, stage: int) -> float:
    return float(cost) if isinstance(cost, int | float) else float(cost[stage])


class Stages(Protocol):
    """The stages that ranks hold: of a `functron.pipeline.Schedule`."""

    @property
    def num_stages(self) -> int: ...
    def stage_of(self, rank: int, chunk: int) -> tuple[int, int]: ...


class TimedAction(NamedTuple):
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
        exposed: how long each rank waited for transfers: for what had been made, and had not
            arrived; () where that was not measured.
    """

    name: str
    rows: tuple[TimedAction, ...]
    num_ranks: int
    exposed: tuple[float, ...] = ()

    @staticmethod
    def of(name: str, rows: Iterable[tuple[int, Action, float, float]]) -> Timeline:
        """The timeline of measured rows (rank, action, start, end), on the ranks they name.

        Times are shifted so that the first action starts at 0.
        """
        found = [TimedAction(*row) for row in rows]
        first = min((row.start for row in found), default=0.0)
        shifted = (TimedAction(r, a, start - first, end - first) for r, a, start, end in found)
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

    def costs(self, schedule: Stages) -> Costs:
        """The times that actions of each kind took at each stage, medians over microbatches.

        An action that shares its interval with another counts for its part, as if both took equally
        long. Kinds that the timeline does not have take 0, and so do transfers.
        """
        seen: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
        shared: dict[tuple[int, float, float], int] = defaultdict(int)
        for row in self.rows:
            shared[row.rank, row.start, row.end] += 1
        for rank, action, start, end in self.rows:
            _, stage = schedule.stage_of(rank, action.chunk)
            seen[action.kind, stage].append((end - start) / shared[rank, start, end])

        def median(kind: ActionKind) -> tuple[float, ...]:
            stages = range(schedule.num_stages)
            return tuple(statistics.median(seen.get((kind, stage)) or [0.0]) for stage in stages)

        whole = median("B") if any(kind == "B" for kind, _ in seen) else None
        return Costs(median("F"), whole, median("I"), median("W"))

    def gantt(self, width: int = 240) -> str:
        """A Gantt chart as text: a line per rank, time to the right.

        Args:
            width: of a line, at most.
        """
        return time_text(self._bars(), self.num_ranks, width)

    def svg(self, width: float | None = None) -> str:
        """A Gantt chart as an SVG picture, a colour per kind, a shade per chunk.

        Args:
            width: in pixels; None: such that most bars have room for their microbatch.
        """
        return self.bars().svg(width)

    def bars(self) -> chart.Gantt:
        """The chart as data: a row per rank, a colour per kind, a shade per chunk."""
        return gantt(self._bars(), self.num_ranks, self._title())

    def __str__(self) -> str:
        return f"{self._title()}\n{self.gantt()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.svg()

    def _title(self) -> str:
        return f"{self.name}: total {self.total:.4g}, bubble {self.bubble_fraction:.1%}"

    def _bars(self) -> list[ActionBar]:
        cells: dict[tuple[int, float, float], list[Action]] = defaultdict(list)
        for rank, action, start, end in self.rows:
            cells[rank, start, end].append(action)
        return [ActionBar(*at, tuple(actions)) for at, actions in cells.items()]


# --- Gantt charts

KIND_NAMES: Mapping[ActionKind, str] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
)
_FILL: Mapping[ActionKind, str] = MappingProxyType({"F": "·", "B": "=", "I": "-", "W": "~"})
_HUE: Mapping[ActionKind, int] = MappingProxyType({"F": 215, "B": 135, "I": 175, "W": 35})
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


class ActionBar(NamedTuple):
    """The interval in which a rank does one action, or some together."""

    rank: int
    start: float
    end: float
    actions: ScheduleCell


def tick_bars(table: Sequence[Sequence[ScheduleCell]]) -> list[ActionBar]:
    """The cells of a schedule's table, each a tick long."""
    return [
        ActionBar(rank, tick, tick + 1, cell)
        for tick, row in enumerate(table)
        for rank, cell in enumerate(row)
        if cell
    ]


def tick_text(table: Sequence[Sequence[ScheduleCell]], num_ranks: int) -> str:
    """A line per rank, ticks to the right; F3₁ is the forward of microbatch 3 in chunk 1."""
    columns = []
    for row in table:
        labels = ["+".join(map(_label, cell)) for cell in row]
        width = max(map(len, labels))
        columns.append([label.ljust(width) for label in labels])
    lines = zip(*columns, strict=True) if columns else [()] * num_ranks
    return chart.draw_frame([" ".join(line) for line in lines], _ranks(num_ranks))


def time_text(bars: Sequence[ActionBar], num_ranks: int, width: int) -> str:
    """A line per rank, time to the right; F3₁ is the forward of microbatch 3 in chunk 1.

    A bar starts with its label, as far as it fits, and goes on with a sign of its kind.

    `width`, of a line, is the most.
    """
    shown = [
        chart.TextBar(bar.rank, bar.start, bar.end, _labels(bar), _FILL[bar.actions[-1].kind])
        for bar in bars
    ]
    return chart.gantt_text(shown, _ranks(num_ranks), width)


def _ranks(count: int) -> list[str]:
    return [f"rank {rank}" for rank in range(count)]


def _label(action: Action) -> str:
    chunk = str(action.chunk).translate(_SUBSCRIPTS) if action.chunk else ""
    return f"{action.kind}{action.microbatch}{chunk}"


def _labels(bar: ActionBar) -> list[str]:
    """The labels that a bar may have, best first."""
    whole, first = "+".join(map(_label, bar.actions)), bar.actions[0]
    return [whole, whole.replace("+", ""), _label(first)[1:], str(first.microbatch)]


def gantt(bars: Sequence[ActionBar], num_ranks: int, title: str) -> chart.Gantt:
    """A row per rank, a colour per kind, darker for higher chunks."""
    chunks = 1 + max((a.chunk for bar in bars for a in bar.actions), default=0)
    boxes = [
        chart.SvgBar(
            bar.rank, bar.start, bar.end, str(action.microbatch), f"{action}",
            _colour(action.kind, action.chunk, chunks), _light(action.chunk, chunks) < 55,
            (index, len(bar.actions)),
        )
        for bar in bars
        for index, action in enumerate(bar.actions)
    ]  # fmt: skip
    return chart.Gantt(boxes, _ranks(num_ranks), title, _legend(bars, chunks))


def _light(chunk: int, chunks: int) -> float:
    """Lightness in percent: from 76 for the first chunk down to 40 for the last."""
    return 76 - 36 * chunk / max(chunks - 1, 1)


def _colour(kind: ActionKind, chunk: int, chunks: int) -> str:
    return f"hsl({_HUE[kind]},60%,{_light(chunk, chunks):.0f}%)"


def _legend(bars: Sequence[ActionBar], chunks: int) -> list[tuple[str, ...]]:
    used = {action.kind for bar in bars for action in bar.actions}
    rows = [
        (name, *(_colour(kind, (chunks - 1) * chunk, chunks) for chunk in range(min(chunks, 2))))
        for kind, name in KIND_NAMES.items()
        if kind in used
    ]
    return [*rows, *([(f"(first and last of {chunks} chunks)",)] if chunks > 1 else ())]
