"""Schedules as text: a line per tick, a column per rank, easy to write by hand and to compare.

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
from typing import TYPE_CHECKING, NamedTuple

from functron.errors import Problem, nearest, raise_problems
from functron.pipeline.action import Action, Cell, Pipe
from functron.pipeline.place import cell_text

if TYPE_CHECKING:
    from functron.pipeline.schedule import Schedule

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
    pipes = _pipes(headers["pipe"], rows, problems)
    table = tuple(_row(number, cells, pipes, problems) for number, cells in rows)
    count = _count(headers["microbatches"], table, problems)
    raise_problems("this text is no schedule", problems)
    given = headers["name"][0][1] if headers["name"] else ""
    return Fields(given or name, pipes, count, table)


def _pipes(
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
