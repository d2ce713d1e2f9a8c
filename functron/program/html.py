"""Programs for notebooks: the text of `functron.program.text`, coloured and foldable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING

from functron.program.equations import Block, Equation, Scan
from functron.program.notation import axis_of
from functron.program.text import (
    equation_cells,
    header,
    input_rows,
    output_cells,
    padded,
    scan_opening,
    scan_rows,
    where_cells,
)

if TYPE_CHECKING:
    from functron.program.program import Program

_FEW = 12  # so many inputs or outputs are shown unfolded
_HUES = (210, 30, 140, 330, 265, 55)  # of axes, in the order of the mesh
_PHASES = {"forward": "128 128 128", "recompute": "205 140 20", "backward": "150 90 220"}

# Text has the page's own colour and backgrounds are translucent, so that light and dark themes both
# stay readable without asking which one it is.
_STYLE = """
.functron-program { font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; }
.functron-program .row { white-space: pre; padding: 0 .5em; border-left: 3px solid transparent; }
.functron-program .scan { border-left: 3px solid transparent; }
.functron-program details > :not(summary) { margin-left: 1.5em; }
.functron-program summary { white-space: pre; cursor: pointer; }
.functron-program .title { font-weight: bold; }
.functron-program .note { opacity: .7; }
.functron-program .key { padding: 0 .6em; margin-right: .6em; border-left: 3px solid transparent; }
"""


def html(program: Program) -> str:
    """A program as HTML that needs nothing but itself: no scripts, nothing from the network.

    Collectives are highlighted by their axis, phases by the colour at the left edge; scans, and
    long lists of inputs and outputs, fold. Hovering over a line shows the user's source.
    """
    axes = {name: k for k, name in enumerate(program.mesh.axis_names)}
    inputs = _plain(input_rows(program))
    outputs = _plain([output_cells(entry) for entry in program.outputs])
    parts = [
        f'<div class="functron-program"><style>{_STYLE}{_colours(axes)}</style>',
        f'<div class="title">{escape(header(program))}</div>',
        _legend(program, axes),
        _fold(f"inputs: {len(inputs)}", inputs, len(inputs) <= _FEW),
        _fold("equations", _block(program.block, axes), True),
        _fold(f"outputs: {len(outputs)}", outputs, len(outputs) <= _FEW),
        "</div>",
    ]
    return "\n".join(parts)


def _colours(axes: Mapping[str, int]) -> str:
    lines = [
        f".functron-program .{phase} {{ border-left-color: rgb({rgb}); }}"
        for phase, rgb in _PHASES.items()
    ]
    lines += [
        f".functron-program .axis{k} {{ background: hsl({_HUES[k % len(_HUES)]} 90% 50% / .22); }}"
        for k in axes.values()
    ]
    return "\n".join(lines) + "\n"


def _legend(program: Program, axes: Mapping[str, int]) -> str:
    keys = [f'<span class="key {phase}">{phase}</span>' for phase in _PHASES]
    keys += [
        f'<span class="key axis{k}">{escape(name)}={program.mesh[name]}</span>'
        for name, k in axes.items()
    ]
    return f"<div>{''.join(keys)}</div>"


def _fold(summary: str, lines: Iterable[str], is_open: bool) -> str:
    state = " open" if is_open else ""
    return "\n".join(
        [f"<details{state}><summary>{escape(summary)}</summary><div>", *lines, "</div></details>"]
    )


def _plain(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f'<div class="row">{escape("".join(cells).rstrip())}</div>' for cells in padded(rows)]


def _block(block: Block, axes: Mapping[str, int]) -> list[str]:
    """The lines of a block's equations; a scan is one foldable element."""
    simple = [equation for equation in block.equations if not isinstance(equation.op, Scan)]
    lines = iter(padded([equation_cells(equation) for equation in simple]))
    return [
        _scan(equation, axes)
        if isinstance(equation.op, Scan)
        else _equation(equation, next(lines), axes)
        for equation in block.equations
    ]


def _equation(equation: Equation, cells: Sequence[str], axes: Mapping[str, int]) -> str:
    axis = axis_of(equation)
    mark = f" axis{axes[axis]}" if axis is not None and axis in axes else ""
    head, tail = escape("".join(cells[:2])), escape("".join(cells[2:]).rstrip())
    return (
        f'<div class="row {equation.where.phase}{mark}" title="{_source(equation)}">'
        f'{head}<span class="note">{tail}</span></div>'
    )


def _source(equation: Equation) -> str:
    """``file.py:12: `source` ``, without the folder."""
    path, colon, rest = equation.where.line.partition(".py:")
    return escape(f"{PurePath(path).name}{colon}{rest}" if colon else path)


def _scan(equation: Equation, axes: Mapping[str, int]) -> str:
    scan = equation.op
    assert isinstance(scan, Scan)
    inner = [each for each, _ in scan.body.walk()]
    found = Counter(f"{each.name} over {axis}" for each in inner if (axis := axis_of(each)))
    counts = [f"{len(inner)} equations", *(f"{count} {name}" for name, count in found.items())]
    where = "  ".join(cell.rstrip() for cell in where_cells(equation.where))
    operands, results = scan_rows(equation)
    lines = [*_plain(operands), *_block(scan.body, axes), *_plain(results)]
    folded = _fold(f"{scan_opening(scan)}: {', '.join(counts)}  {where}", lines, True)
    return f'<div class="scan {equation.where.phase}">{folded}</div>'
