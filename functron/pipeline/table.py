"""What a rank does in a cell of a schedule: F3, B3, I3 or W3, with .1 for its second chunk.

When each rank does what, if every rank goes through its column as early as it can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from functron.core.errors import Problem

if TYPE_CHECKING:
    from functron.pipeline.schedule import Schedule


Kind = Literal["F", "B", "I", "W"]
What = Literal["activation", "cotangent", "gradient"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

_PATTERN = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Action:
    """One computation on one microbatch; prints as ``F3`` (chunk 0) or ``F3.1`` (chunk 1).

    Attributes:
        kind: "F" forward; "B" whole backward; or its parts, "I" backward for the stage's input and
            "W" backward for its weights.
        microbatch: from 0.
        chunk: which of its rank's chunks of layers, from 0.
    """

    kind: Kind
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
        kind = cast(Kind, found[1])
        return Action(kind, int(found[2]), int(found[3] or 0))


Cell = tuple[Action, ...]
Pipe = tuple[tuple[int, int], ...]  # per stage the (rank, chunk) that holds it


class Product(NamedTuple):
    """What an action makes and others need, of one microbatch at one stage.

    Attributes:
        what: "activation" (by F), "cotangent" of the stage's input (by B or I) or "gradient" of its
            weights (by W; B makes it too, but nothing waits for it).
        microbatch: from 0.
        pipe: the pipe of the stage.
        stage: the stage.
    """

    what: What
    microbatch: int
    pipe: int
    stage: int


def earliest_ticks(
    schedule: Schedule, columns: Sequence[Sequence[Cell]]
) -> tuple[list[list[int]], list[Problem]]:
    """Per rank the ticks of its cells, and a problem for each rank that cannot go on.

    A cell takes one tick and starts after the ticks that make what it needs.

    Args:
        schedule: whose pipes these are; its table is not read.
        columns: per rank its cells in order.
    """
    made: dict[Product, int] = {}  # the tick after which it is there
    ticks: list[list[int]] = [[] for _ in columns]
    progress = True
    while progress:
        progress = False
        for rank, column in enumerate(columns):
            while len(ticks[rank]) < len(column):
                cell = column[len(ticks[rank])]
                needs = outside_needs(schedule, rank, cell)
                if any(need not in made for need in needs):
                    break
                free = ticks[rank][-1] + 1 if ticks[rank] else 0
                tick = max([free, *(made[need] + 1 for need in needs)])
                for action in cell:
                    made.setdefault(schedule.makes(rank, action), tick)
                ticks[rank].append(tick)
                progress = True
    left = [column[len(ticks[rank]) :] for rank, column in enumerate(columns)]
    return ticks, _blocked(schedule, left, made)


def outside_needs(schedule: Schedule, rank: int, cell: Cell) -> list[Product]:
    """What a cell needs that it does not make itself, earlier in the cell."""
    inside: set[Product] = set()
    needs: list[Product] = []
    for action in cell:
        needs += [need for need in schedule.needs(rank, action) if need not in inside]
        inside.add(schedule.makes(rank, action))
    return needs


def cell_text(cell: Cell) -> str:
    """A cell as text: ``F4+B2``, or a dot for an empty one."""
    return "+".join(map(str, cell)) or "."


def _blocked(
    schedule: Schedule, left: Sequence[Sequence[Cell]], made: Mapping[Product, int]
) -> list[Problem]:
    """A problem per rank with cells left: what the first one waits for, and who would make it."""
    later = {
        schedule.makes(rank, action): f"{action} of rank {rank}"
        for rank, column in enumerate(left)
        for cell in column
        for action in cell
    }
    problems = []
    for rank, column in enumerate(left):
        if not column:
            continue
        waits = [
            f"the {need.what} of microbatch {need.microbatch} ({later.get(need, 'made by nobody')})"
            for need in outside_needs(schedule, rank, column[0])
            if need not in made
        ]
        text = cell_text(column[0])
        problems.append(
            Problem(
                f"rank {rank}, {text}",
                f"a wait for {' and '.join(waits)}",
                "an order in which what a cell needs comes before it",
                f"move {text} down, or what it waits for up",
            )
        )
    return problems
