"""Programs as text: readable like a jaxpr, stable enough for golden files, and parsable again.

::

    program mlp on Mesh(dp=2, tp=4): 4 equations
    inputs:
      %down: f32[8,8]  0/down  P('tp', None)
      %up: f32[8,8]    0/up    P(None, 'tp')
      %x: f32[4,8]     1       P('dp')
    equations:
      %mm: f32[4,8]   = mm(%x, %up)           # forward    mlp  model.py:9
      %relu: f32[4,8] = relu(%mm)             # forward    mlp  model.py:9
      %mm_1: f32[4,8] = mm(%relu, %down)      # forward    mlp  model.py:9
      %psum: f32[4,8] = psum(%mm_1, 'tp', 4)  # forward    mlp  model.py:9  128 bytes over tp
    outputs:
      %psum: f32[4,8]  ''  P('dp')

After the ``#`` of an equation stand its phase, named scopes and line, with ``-`` for what it lacks,
and for a collective the payload: the bytes that this rank passes in, or, for an all_gather, gets.
Types are ``dtype[shape]``, then ``{strides}`` where these are not contiguous and ``@device`` where
that is not cpu. ATen operations are written without their namespace and default overload.

Operations that run blocks are several lines: what each value of a block is outside, the block's
equations, and what its results are outside. A switch has a block per branch, a loop the one of its
condition and that of an iteration::

    switch[on=%index, branches=2] route {  # forward  -  model.py:9
      const %a: f32[4] = %x
      %sin: f32[4] = sin(%a)               # forward  -  model.py:7
      y     %sin -> %switch: f32[4]
    } or {
      const %b: f32[4] = %x
      y     %b -> %switch: f32[4]
    }
    while[trips=12] halve {                # forward  -  model.py:12
      carry %a: f32[] = %y
      %gt: bool[] = gt.Scalar(%a, 1)       # forward  -  model.py:11
      test  %gt
    } do {
      carry %b: f32[] = %y
      %div: f32[] = div.Tensor(%b, 2)      # forward  -  model.py:12
      carry %div -> %while: f32[]
    }

`functron.program.parse` reads all of it.

`html` is the same for notebooks, coloured and foldable.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import PurePath
from typing import Any

import torch

from functron.core import tree
from functron.core.tables import align_columns, pad_cells
from functron.program.equations import (
    Block,
    Code,
    ControlFlow,
    Equation,
    Input,
    Output,
    Scan,
    Switch,
    TensorType,
    Var,
    Where,
    While,
    contiguous_strides,
    span_of,
)
from functron.spmd.mesh import Mesh
from functron.spmd.spec import P, count_padding

DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "f8_e4m3fn": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
}
"""Short names as JAX writes them; other dtypes go by torch's names."""

_SHORT = {dtype: name for name, dtype in DTYPES.items()}

COLLECTIVES = frozenset(
    {
        "psum", "pmax", "pmin", "pbroadcast", "all_gather", "psum_scatter", "all_to_all",
        "ppermute", "ragged_all_to_all",
    }
)  # fmt: skip
"""The operations of `functron.spmd.axes` and `functron.spmd.ragged` that communicate."""

_WORD = re.compile(r"[\w./<>+*-]+")


@dataclass(frozen=True)
class Opaque:
    """A Python object without notation, in a parsed program: its repr, by which it is known."""

    text: str

    def __eq__(self, other: object) -> bool:
        return value_text(self) == value_text(other)

    def __hash__(self) -> int:
        return hash(self.text)


def declaration(var: Var | None) -> str:
    """``%name: type``; ``_`` for a result that is missing."""
    return "_" if var is None else f"{var!r}: {type_text(var)}"


def type_text(var: Var | TensorType) -> str:
    """``bf16[4,8]``, with ``{1,4}`` for strides of 1 and 4 and ``@cuda:0`` off the cpu."""
    strides = "" if var.stride == contiguous_strides(var.shape) else f"{{{_numbers(var.stride)}}}"
    device = "" if var.device.type == "cpu" else f"@{var.device}"
    return f"{dtype_text(var.dtype)}[{_numbers(var.shape)}]{strides}{device}"


def span_bytes(var: Var | TensorType) -> int:
    """The bytes from the first element to the last."""
    return span_of(var.shape, var.stride) * var.dtype.itemsize


def _numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def dtype_text(dtype: torch.dtype) -> str:
    """``f32`` for float32."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def word(text: str) -> str:
    """`text`, quoted unless it is made of letters, digits and ``_./<>+*-``."""
    return text if _WORD.fullmatch(text) else repr(text)


def value_text(value: Any) -> str:
    """An operand or a constant: ``%x``, ``1e-05``, ``[1, 2]``, ``f32``, ``'tp'``."""
    if isinstance(value, (list, torch.Size)):
        return f"[{', '.join(map(value_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(value_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, (torch.layout, torch.memory_format, torch.device)):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):  # also a function's name, which has the function
        return repr(str(value))
    if value is None or isinstance(value, (Var, P)) or type(value) in (bool, int, float):
        return repr(value)
    if type(value) is complex:  # Python's own notation loses the signs of zeros
        return f"complex({value.real!r}, {value.imag!r})"
    if isinstance(value, Opaque):
        return f"opaque({value.text!r})"
    without_address = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return f"opaque({without_address!r})"


def op_text(op: torch._ops.OpOverload) -> str:
    """``mm``, ``add.Tensor``, ``prims::sum``: ATen's and functron's names stand alone."""
    namespace, name = op.name().split("::")
    hidden = namespace == "functron" or (
        namespace == "aten" and not hasattr(torch.ops.functron, name.split(".")[0])
    )
    return name if hidden else f"{namespace}::{name}"


def call_text(equation: Equation) -> str:
    """``op(operands, keyword=value)`` without keywords that have their default value."""
    op = equation.op
    assert not isinstance(op, ControlFlow)
    defaults = {
        argument.name: argument.default_value
        for argument in op._schema.arguments
        if argument.has_default_value()
    }
    arguments = [value_text(value) for value in equation.args]
    arguments += [
        f"{name}={value_text(value)}"
        for name, value in equation.kwargs.items()
        if (type(value), value) != (type(defaults.get(name, ...)), defaults.get(name, ...))
    ]
    return f"{op_text(op)}({', '.join(arguments)})"


def axis_of(equation: Equation) -> str | None:
    """The mesh axis of a collective; None for other equations."""
    op = equation.op
    if (
        isinstance(op, ControlFlow)
        or op.namespace != "functron"
        or equation.name not in COLLECTIVES
    ):
        return None
    return equation.args[1] if len(equation.args) > 1 else equation.kwargs["axis"]


def expected_rows(equation: Equation) -> int:
    """The rows of a ragged exchange that a rank sends and gets on average; 0: not said."""
    return min((*equation.args, 0, 0)[7], equation.operands[0].shape[0])


def payload_bytes(equation: Equation) -> int:
    """The bytes of a collective's operand, or of an all_gather's result, on one rank.

    Of a ragged exchange, the smaller of operand and result: what ranks send on average is what they
    receive, and each has room for more than that on the side where it cannot know.
    """
    if equation.name == "ragged_all_to_all":
        sent, got = equation.operands[0], equation.results[0]
        known = expected_rows(equation)
        return known * sent.nbytes // sent.shape[0] if known else min(sent.nbytes, got.nbytes)
    gathers = equation.name == "all_gather"
    return (equation.results if gathers else equation.operands)[0].nbytes


def format(program: Code) -> str:  # noqa: A001  (read as text.format)
    """The text of a program: header, inputs, equations, outputs.

    The same on every machine for the same program: only the last part of file names is shown.
    Constants (tensors that the function closed over) are given by type only.
    """
    inputs = align_columns(input_rows(program))
    outputs = align_columns([output_cells(entry) for entry in program.outputs])
    lines = [header(program), "inputs:", *_indent_lines(inputs), "equations:"]
    lines += _indent_lines(block_lines(program.block))
    return "\n".join([*lines, "outputs:", *_indent_lines(outputs)]) + "\n"


def header(program: Code) -> str:
    """The first line: name, mesh, the number of equations, those of each block once, and padding.

    That is the bytes by which all parts together of `functron.Uneven` inputs exceed the whole.
    """
    mesh = ", ".join(f"{name}={size}" for name, size in program.mesh.axes)
    count = sum(1 for _ in program.block.walk())
    unchecked = "" if program.checked else ", unchecked"
    size = sum(_padding_bytes(entry, program.mesh) for entry in program.inputs)
    padding = f", {size} bytes of padding" if size else ""
    return f"program {word(program.name)} on Mesh({mesh}): {count} equations{unchecked}{padding}"


def _padding_bytes(entry: Input, mesh: Mesh) -> int:
    return count_padding(entry.var.shape, entry.spec, mesh) * entry.var.dtype.itemsize


def input_rows(program: Code) -> list[list[str]]:
    """``%name: type`` or a static value, path, spec and remarks of every input, as cells."""
    paths = program.paths
    if paths is None:
        count = program.in_structure.num_leaves
        paths = tree.paths(tree.unflatten(program.in_structure, range(count)))
    rest = iter(program.inputs)
    rows = []
    for position, path in enumerate(paths):
        if position in program.static:
            rows.append([value_text(program.static[position]), word(path), "", "static"])
        else:
            rows.append(_input_cells(next(rest), program))
    return rows + [_input_cells(entry, program) for entry in rest]


def _input_cells(entry: Input, program: Code) -> list[str]:
    inputs, size = program.block.inputs, _padding_bytes(entry, program.mesh)
    notes = [f"with {size} bytes of padding"] if size else []
    notes += [entry.role] if entry.role != "argument" else []
    notes += ["donated"] if entry.donated else []
    notes += storage_notes(entry.var, inputs)
    return [declaration(entry.var), word(entry.path), _spec_text(entry.spec), " ".join(notes)]


def output_cells(entry: Output) -> list[str]:
    """``%name: type`` or a Python value, path and spec of an output."""
    value = entry.value
    shown = declaration(value) if isinstance(value, Var) else value_text(value)
    return [shown, word(entry.path), _spec_text(entry.spec)]


def _spec_text(spec: P | None) -> str:
    return "" if spec is None else repr(spec)


def storage_notes(var: Var, inputs: Sequence[Var]) -> list[str]:
    """Remarks on the memory of a block's input that its type does not give."""
    owner = next(other for other in inputs if other.storage == var.storage)
    if owner is not var:
        return [f"shares {owner!r}"]
    return [] if var.storage_bytes == span_bytes(var) else [f"of {var.storage_bytes} bytes"]


def block_lines(block: Block) -> list[str]:
    """The equations of a block as aligned lines; one that runs blocks of its own is several."""
    lines = []
    openings = align_columns([equation_cells(equation) for equation in block.equations])
    for equation, opening in zip(block.equations, openings, strict=True):
        lines.append(opening)
        if isinstance(equation.op, ControlFlow):
            for position, inner in enumerate(equation.op.blocks):
                operands, results = flow_rows(equation, position)
                lines += [SEPARATORS[equation.op.kind]] if position else []
                lines += _indent_lines(align_columns(operands))
                lines += [
                    *_indent_lines(block_lines(inner)),
                    *_indent_lines(align_columns(results)),
                ]
            lines.append("}")
    return lines


SEPARATORS: Mapping[str, str] = {"scan": "", "switch": "} or {", "while": "} do {"}
"""The lines between blocks, by the kind of the operation."""


def flow_rows(equation: Equation, position: int) -> tuple[list[list[str]], list[list[str]]]:
    """The lines ``const %inner: type = %outer`` and ``carry %inner -> %outer: type`` as cells.

    Args:
        equation: that runs blocks.
        position: which of them.
    """
    op, args = equation.op, list(equation.args)
    if isinstance(op, Scan):
        kinds = ["const"] * op.num_consts + ["carry"] * op.num_carry + ["x"] * len(args)
        ends = ["carry"] * op.num_carry + ["y"] * len(equation.outputs)
    elif isinstance(op, Switch):
        args = args[1:]
        kinds, ends = ["const"] * len(args), ["y"] * len(equation.outputs)
    else:
        assert isinstance(op, ControlFlow)
        kinds, ends = (["const"] * op.num_consts + ["carry"] * len(args)), ["carry"] * len(args)
    block, operands = op.blocks[position], []
    for kind, inner, outer in zip(kinds, block.inputs, args, strict=False):
        notes = " ".join(storage_notes(inner, block.inputs))
        operands.append([f"{kind:5} {declaration(inner)}", f"= {value_text(outer)}", notes])
    if isinstance(op, While) and position == 0:
        return operands, [[f"test  {value_text(block.outputs[0])}", ""]]
    rows = zip(ends, block.outputs, equation.outputs, strict=False)
    return operands, [
        [f"{kind:5} {value_text(inner)}", f"-> {declaration(outer)}"] for kind, inner, outer in rows
    ]


def equation_cells(equation: Equation) -> list[str]:
    """``%name: type``, ``= op(...)`` and the comment of an equation; or the opening of a block."""
    if isinstance(equation.op, ControlFlow):
        return [f"{flow_opening(equation)} {{", "", *where_cells(equation.where)]
    results = ", ".join(map(declaration, equation.outputs))
    call = call_text(equation)
    note = f"{payload_bytes(equation)} bytes over {axis}" if (axis := axis_of(equation)) else ""
    head = [results, f"= {call}"] if results else [call, ""]
    return [*head, *where_cells(equation.where), note]


def flow_opening(equation: Equation) -> str:
    """``scan[length=8, reverse] name``, ``switch[on=%x, branches=2] name``, ``while[] name``."""
    op = equation.op
    assert isinstance(op, ControlFlow)
    if isinstance(op, Scan):
        parts = [f"length={op.length}", *(["reverse"] if op.reverse else [])]
    elif isinstance(op, Switch):
        parts = [f"on={value_text(equation.args[0])}", f"branches={len(op.branches)}"]
        parts += [f"weights={value_text(op.weights)}"] if op.weights else []
    else:
        parts = [] if op.trip_count is None else [f"trips={op.trip_count}"]
    return f"{op.kind}[{', '.join(parts)}] {word(op.name)}"


def where_cells(where: Where) -> list[str]:
    """``# phase``, named scopes and the short line."""
    scopes = "/".join(where.scopes)
    simple = all(word(name) == name for name in where.scopes) and scopes != "-"
    line = short_line(where.line)
    plain = word(line.replace(":", "")) == line.replace(":", "")
    return [
        f"# {where.phase:9}",
        (scopes if simple else repr(scopes)) if scopes else "-",
        (line if plain else repr(line)) if line else "-",
    ]


def short_line(line: str) -> str:
    """``file.py:12`` of ``/folder/file.py:12: `source` ``; "" of ""."""
    found = re.match(r"(.+?):(\d+)(?::\s|$)", line)
    return f"{PurePath(found[1]).name}:{found[2]}" if found else line


def _indent_lines(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


# --- differences


def diff(a: Code | str, b: Code | str, context: int = 3) -> str:
    """The lines to remove from `a` (``-``) and to add (``+``) to have `b`; "" where they agree.

    Names of variables, columns and line numbers of the user's source do not count: lines are first
    matched without names, then `b`'s variables are renamed to those of `a` that they match; one
    that matches none and would pass for another gets a quote (``%x'``).

    Args:
        a: a program or its text.
        b: the same.
        context: how many lines that agree to show around each difference.
    """
    ours, theirs = (_cut_lines(side if isinstance(side, str) else format(side)) for side in (a, b))
    names = _match_names(ours, theirs)
    old = [line.show({}) for line in ours]
    new = [line.show(names) for line in theirs]
    lines = []
    matcher = difflib.SequenceMatcher(
        None, _comparison_keys(old), _comparison_keys(new), autojunk=False
    )
    for group in matcher.get_grouped_opcodes(context):
        (_, a0, _, b0, _), (_, _, a1, _, b1) = group[0], group[-1]
        lines.append(f"@@ -{a0 + 1},{a1 - a0} +{b0 + 1},{b1 - b0} @@")
        for tag, a0, a1, b0, b1 in group:
            if tag == "equal":
                lines += [f"  {line}" for line in old[a0:a1]]
            else:
                lines += [f"- {line}" for line in old[a0:a1]]
                lines += [f"+ {line}" for line in new[b0:b1]]
    return "".join(f"{line}\n" for line in lines)


_Name = tuple[int, str]  # the block it belongs to, and the name


@dataclass(frozen=True)
class _Line:
    """A line of a program's text, cut at the names of variables."""

    pieces: tuple[str, ...]
    names: tuple[_Name, ...]

    def show(self, names: Mapping[_Name, str]) -> str:
        """The line with some names replaced."""
        shown = [*(names.get(name, name[1]) for name in self.names), ""]
        return "".join(piece + name for piece, name in zip(self.pieces, shown, strict=True))


def _cut_lines(text: str) -> list[_Line]:
    lines, blocks, count = [], [0], 0
    for raw in text.splitlines():
        stripped = raw.strip()
        line = raw[: len(raw) - len(raw.lstrip())] + re.sub(" {2,}", "  ", stripped)
        if stripped in _CLOSINGS and len(blocks) > 1:
            blocks.pop()
        # "const %inner: type = %outer" and "y %inner -> %outer: type" name variables of two blocks
        two = re.match(" *(const|carry|x|y) ", line)
        names = [
            (blocks[-2:][0] if two and line[: name.start()].endswith(("= ", "> ")) else blocks[-1],
             name[0])
            for name in _NAME.finditer(line)
        ]  # fmt: skip
        lines.append(_Line(tuple(_NAME.split(line)), tuple(names)))
        if _OPENING.match(stripped) or stripped in _CLOSINGS - {"}"}:
            count += 1
            blocks.append(count)
    return lines


_OPENING = re.compile(r"(?:scan|switch|while)\[")
_CLOSINGS = {"}", "} or {", "} do {"}
_NAME = re.compile(r"%\w+")
_SOURCE = re.compile(r"(# (?:forward|recompute|backward) +(?:'[^']*'|\S+)) +(?:'[^']*'|\S+)")


def _comparison_keys(lines: Iterable[str]) -> list[str]:
    """Lines without columns and lines of the user's source, for comparison."""
    return [" ".join(_SOURCE.sub(r"\1", line).split()) for line in lines]


def _match_names(ours: Sequence[_Line], theirs: Sequence[_Line]) -> dict[_Name, str]:
    """New names for the variables of `theirs`."""
    erased = [_comparison_keys("%".join(line.pieces) for line in side) for side in (ours, theirs)]
    found: dict[_Name, _Name] = {}
    taken = set()
    for ours_at, theirs_at in _match_lines(*erased):
        for mine, other in zip(ours[ours_at].names, theirs[theirs_at].names, strict=True):
            if other not in found and mine not in taken:
                found[other] = mine
                taken.add(mine)
    used = {name for line in ours for _, name in line.names}
    every = {name for line in theirs for name in line.names}
    own = {name: f"{name[1]}'" if name[1] in used else name[1] for name in every}
    return {**own, **{other: mine[1] for other, mine in found.items()}}


def _match_lines(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of positions of lines that agree, in order.

    What agrees at both ends is paired first: among many equal lines, such as those of a chain of
    layers, difflib would pair the longest runs wherever they are.
    """
    shorter = min(len(a), len(b))
    head = next((k for k in range(shorter) if a[k] != b[k]), shorter)
    tail = next((k for k in range(shorter - head) if a[~k] != b[~k]), shorter - head)
    matcher = difflib.SequenceMatcher(
        None, a[head : len(a) - tail], b[head : len(b) - tail], autojunk=False
    )
    pairs = [(k, k) for k in range(head)]
    for first, second, size in matcher.get_matching_blocks():
        pairs += [(head + first + k, head + second + k) for k in range(size)]
    return pairs + [(len(a) - tail + k, len(b) - tail + k) for k in range(tail)]


_FEW = 12  # inputs or outputs that are shown unfolded
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


def html(program: Code) -> str:
    """A program as HTML that needs nothing but itself: no scripts, nothing from the network.

    Collectives are highlighted by their axis, phases by the colour at the left edge; scans and
    their like, and long lists of inputs and outputs, fold. Hovering over a line shows the user's
    source.
    """
    axes = {name: k for k, name in enumerate(program.mesh.axis_names)}
    inputs = _row_html(input_rows(program))
    outputs = _row_html([output_cells(entry) for entry in program.outputs])
    parts = [
        f'<div class="functron-program"><style>{_STYLE}{_style_colours(axes)}</style>',
        f'<div class="title">{escape(header(program))}</div>',
        _legend_html(program, axes),
        _fold_html(f"inputs: {len(inputs)}", inputs, len(inputs) <= _FEW),
        _fold_html("equations", _block_html(program.block, axes), True),
        _fold_html(f"outputs: {len(outputs)}", outputs, len(outputs) <= _FEW),
        "</div>",
    ]
    return "\n".join(parts)


def _style_colours(axes: Mapping[str, int]) -> str:
    lines = [
        f".functron-program .{phase} {{ border-left-color: rgb({rgb}); }}"
        for phase, rgb in _PHASES.items()
    ]
    lines += [
        f".functron-program .axis{k} {{ background: hsl({_HUES[k % len(_HUES)]} 90% 50% / .22); }}"
        for k in axes.values()
    ]
    return "\n".join(lines) + "\n"


def _legend_html(program: Code, axes: Mapping[str, int]) -> str:
    keys = [f'<span class="key {phase}">{phase}</span>' for phase in _PHASES]
    keys += [
        f'<span class="key axis{k}">{escape(name)}={program.mesh[name]}</span>'
        for name, k in axes.items()
    ]
    return f"<div>{''.join(keys)}</div>"


def _fold_html(summary: str, lines: Iterable[str], is_open: bool) -> str:
    state = " open" if is_open else ""
    return "\n".join(
        [f"<details{state}><summary>{escape(summary)}</summary><div>", *lines, "</div></details>"]
    )


def _row_html(rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f'<div class="row">{escape("".join(cells).rstrip())}</div>' for cells in pad_cells(rows)
    ]


def _block_html(block: Block, axes: Mapping[str, int]) -> list[str]:
    """The lines of a block's equations; one that runs blocks is one foldable element."""
    simple = [equation for equation in block.equations if not isinstance(equation.op, ControlFlow)]
    lines = iter(pad_cells([equation_cells(equation) for equation in simple]))
    return [
        _flow_html(equation, axes)
        if isinstance(equation.op, ControlFlow)
        else _equation_html(equation, next(lines), axes)
        for equation in block.equations
    ]


def _equation_html(equation: Equation, cells: Sequence[str], axes: Mapping[str, int]) -> str:
    axis = axis_of(equation)
    mark = f" axis{axes[axis]}" if axis is not None and axis in axes else ""
    head, tail = escape("".join(cells[:2])), escape("".join(cells[2:]).rstrip())
    return (
        f'<div class="row {equation.where.phase}{mark}" title="{_source_text(equation)}">'
        f'{head}<span class="note">{tail}</span></div>'
    )


def _source_text(equation: Equation) -> str:
    """``file.py:12: `source` ``, without the folder."""
    path, colon, rest = equation.where.line.partition(".py:")
    return escape(f"{PurePath(path).name}{colon}{rest}" if colon else path)


def _flow_html(equation: Equation, axes: Mapping[str, int]) -> str:
    op: Any = equation.op
    inner = [each for block in op.blocks for each, _ in block.walk()]
    found = Counter(f"{each.name} over {axis}" for each in inner if (axis := axis_of(each)))
    counts = [f"{len(inner)} equations", *(f"{count} {name}" for name, count in found.items())]
    where = "  ".join(cell.rstrip() for cell in where_cells(equation.where))
    lines = []
    for position, block in enumerate(op.blocks):
        operands, results = flow_rows(equation, position)
        lines += _row_html([[SEPARATORS[op.kind]]]) if position else []
        lines += [*_row_html(operands), *_block_html(block, axes), *_row_html(results)]
    folded = _fold_html(f"{flow_opening(equation)}: {', '.join(counts)}  {where}", lines, True)
    return f'<div class="scan {equation.where.phase}">{folded}</div>'
