"""When each rank does what, if every rank goes through its column as early as it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from functron.errors import Problem
from functron.pipeline.action import Cell, Product

if TYPE_CHECKING:
    from functron.pipeline.schedule import Schedule


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
