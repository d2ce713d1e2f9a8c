"""What a program holds in memory: the bytes that are live at every equation, their peak, and why.

`functron.program.liveness` states the rules, `functron.program.memory` follows them through a
run, and this gives the result as text, a picture and numbers.

Stacked areas over steps as SVG text, in the style of `functron.core.plot`.

What running a program allocates and frees, on values that have a size and no numbers.

`functron.program.liveness` says which values exist from when to when; here they are made, shared
and dropped. A scan's iterations are alike, so a few are simulated and the others follow from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from types import MappingProxyType

from functron.core.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ticks
from functron.program.cost import bytes_text, html_table
from functron.program.equations import Block, Code, Equation, Scan, Var, Where
from functron.program.liveness import (
    CATEGORIES,
    Category,
    Plan,
    accumulates,
    body_plan,
    plan,
    scratch_bytes,
)
from functron.program.text import aligned, short_line

_COLOURS = MappingProxyType(
    {
        "parameters": "#08519c",
        "optimizer": "#6baed6",
        "gradients": "#e6550d",
        "activations": "#31a354",
        "workspace": "#bdbdbd",
        "inputs": "#756bb1",
    }
)
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_MAX_POINTS = 1000


def area_chart(
    series: Mapping[str, Sequence[int]], *, title: str, x_label: str, y_label: str
) -> str:
    """Areas stacked on one another, in bytes, with a legend, as an SVG document.

    Args:
        series: by category, the bottom one first; all of one length.
        title: above the chart.
        x_label: below it.
        y_label: beside it; the unit is added.
    """
    rows = _thin([*zip(*series.values(), strict=True)])
    top = max((sum(row) for row in rows), default=0)
    scale, unit = next((pair for pair in _UNITS if top >= pair[0]), _UNITS[-1])
    y_ticks = ticks(0, top / scale)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(step: int) -> float:
        return LEFT + width * step / max(len(rows), 1)

    def up(count: float) -> float:
        return HEIGHT - BOTTOM - height * count / (y_ticks[-1] * scale)

    parts = []
    for tick in y_ticks:
        at = up(tick * scale)
        parts.append(
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#e5e5e5"/>'
        )
        parts.append(_text(LEFT - 8, at + 4, f"{tick:g}", anchor="end"))
    below = [0] * len(rows)
    for index, name in enumerate(series):
        above = [base + row[index] for base, row in zip(below, rows, strict=True)]
        edge = _steps(above, across, up) + _steps(below, across, up)[::-1]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge)
        colour = _COLOURS.get(name, "#636363")
        parts.append(f'<polygon points="{points}" fill="{colour}"><title>{name}</title></polygon>')
        below = above
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 18 {middle:g})"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *parts,
            *_legend(list(series)),
            _text(WIDTH / 2, 20, title, more='font-size="13" font-weight="bold"'),
            _text(LEFT + width / 2, HEIGHT - 10, x_label),
            _text(18, middle, f"{y_label} ({unit})", more=turned),
            "</svg>\n",
        ]
    )


def _thin(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """At most `_MAX_POINTS` rows: of neighbours the highest, so that peaks stay."""
    stride = -(-len(rows) // _MAX_POINTS) or 1
    return [max(rows[k : k + stride], key=sum) for k in range(0, len(rows), stride)]


def _steps(values: Sequence[int], across, up) -> list[tuple[float, float]]:
    points = []
    for step, value in enumerate(values):
        points += [(across(step), up(value)), (across(step + 1), up(value))]
    return points


def _legend(names: list[str]) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x = LEFT + index * (WIDTH - LEFT - RIGHT) / max(len(names), 1)
        colour = _COLOURS.get(name, "#636363")
        parts.append(f'<rect x="{x:.1f}" y="28" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, 37, name, anchor="start"))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


_DIRECT = 3  # iterations of a scan that are simulated before one stands for those that follow


@dataclass(frozen=True)
class Moment:
    """What is live while one equation runs.

    Attributes:
        equation: the operation's short name.
        where: its phase, scopes and line.
        iteration: of the scans around it, outermost first, in the order in which they run.
        live: bytes by category, in the order of `CATEGORIES`; results included, operands not yet
            freed.
    """

    equation: str
    where: Where
    iteration: tuple[int, ...]
    live: tuple[int, ...]

    @property
    def total(self) -> int:
        """The live bytes of all categories."""
        return sum(self.live)


@dataclass(eq=False)
class Buffer:
    """Memory that is live while something refers to it."""

    size: int
    category: int
    references: int = 1


@dataclass(eq=False)
class Column:
    """One value per iteration of a scan, in the order of xs."""

    rows: list[Value]
    references: int = 1


Value = Buffer | Column


@dataclass(eq=False)
class _Iteration:
    """What one iteration of a scan took and gave, and what was live while it ran."""

    carry: list[Value]
    slices: list[Value]
    outputs: list[Value]
    start: list[int]
    moments: list[Moment]


@dataclass(eq=False)
class Machine:
    """Runs blocks on values without numbers."""

    live: list[int] = field(default_factory=lambda: [0] * len(CATEGORIES))
    timeline: list[Moment] = field(default_factory=list)
    iteration: tuple[int, ...] = ()
    plans: dict[Equation, tuple[Plan, list[bool]]] = field(default_factory=dict)

    def inputs(self, program: Code, outline: Plan) -> list[Value]:
        """The program's inputs; those that are not donated stay live."""
        made: dict[int, Value] = {}
        values = []
        for given in program.inputs:
            var = given.var
            if var.storage in made:
                values.append(self.share(made[var.storage]))
            else:
                values.append(self.make(var.storage_bytes, outline.category[var.storage]))
                made[var.storage] = values[-1]
            if not given.donated:
                self.share(values[-1])
        return values

    # --- values

    def make(self, size: int, category: Category) -> Buffer:
        """New memory."""
        index = CATEGORIES.index(category)
        self.live[index] += size
        return Buffer(size, index)

    def share(self, value: Value) -> Value:
        """`value`, referred to once more."""
        value.references += 1
        return value

    def drop(self, value: Value) -> None:
        """One reference less; the last one frees it."""
        value.references -= 1
        if value.references:
            return
        if isinstance(value, Column):
            for row in value.rows:
                self.drop(row)
        else:
            self.live[value.category] -= value.size

    def _move(self, buffer: Buffer, category: Category) -> Buffer:
        """Memory that goes on to serve for something else."""
        self.live[buffer.category] -= buffer.size
        buffer.category = CATEGORIES.index(category)
        self.live[buffer.category] += buffer.size
        return buffer

    def copy(self, value: Value, known: dict[Value, Value]) -> Value:
        """What stands for `value` one iteration later; a new reference."""
        if value in known:
            return self.share(known[value])
        if isinstance(value, Column):
            known[value] = Column([self.copy(row, known) for row in value.rows])
        else:
            known[value] = self.make(value.size, CATEGORIES[value.category])
        return known[value]

    # --- equations

    def block(self, block: Block, outline: Plan, values: Sequence[Value]) -> list[Value]:
        """The outputs of a block, whose inputs are handed over to it."""
        environment: dict[int, Value] = {}
        for var, value in zip(block.inputs, values, strict=True):
            if var.storage in environment:
                self.drop(value)
            else:
                environment[var.storage] = value
        self._free(environment, outline.freed.get(-1, ()))
        for index, equation in enumerate(block.equations):
            if isinstance(equation.op, Scan):
                self._scan(equation, outline, environment, index)
            else:
                self._equation(equation, outline, environment, index)
            self._free(environment, outline.freed.get(index, ()))
        outputs = [
            self.share(environment[v.storage]) if isinstance(v, Var) else Buffer(0, 0)
            for v in block.outputs
        ]
        self._free(environment, tuple(environment))
        return outputs

    def _free(self, environment: dict[int, Value], storages: Sequence[int]) -> None:
        for storage in storages:
            if storage in environment:
                self.drop(environment.pop(storage))

    def _equation(self, equation: Equation, outline: Plan, environment, index: int) -> None:
        for var in equation.results:
            s = var.storage
            if s in environment or s in outline.fused:
                continue
            if s in outline.takes and outline.takes[s] in environment:
                environment[s] = environment.pop(outline.takes[s])
                continue
            place = _sum_place(equation, outline, environment, index)
            if place is not None:
                value = environment.pop(place)
                assert isinstance(value, Buffer)
                environment[s] = self._move(value, outline.category[s])
            else:
                environment[s] = self.make(var.storage_bytes, outline.category[s])
        if not equation.aliases:
            self._record(equation)

    def _record(self, equation: Equation) -> None:
        live = list(self.live)
        live[CATEGORIES.index("workspace")] += scratch_bytes(equation)
        moment = Moment(equation.name, equation.where, self.iteration, tuple(live))
        self.timeline.append(moment)

    # --- scans

    def _scan(self, equation: Equation, outline: Plan, environment, index: int) -> None:
        op = equation.op
        assert isinstance(op, Scan)
        if equation not in self.plans:
            self.plans[equation] = body_plan(equation, outline)
        inner, kept = self.plans[equation]
        start = op.num_consts + op.num_carry
        uses: dict[int, int] = defaultdict(int)
        for var in equation.operands:
            uses[var.storage] += 1

        def take(var: Var) -> Value:
            """The value, without the reference of this block if nothing else needs it."""
            dies = outline.last[var.storage] == index and uses[var.storage] == 1
            value = environment[var.storage]
            return environment.pop(var.storage) if dies else self.share(value)

        consts = [environment[var.storage] for var in equation.args[: op.num_consts]]
        carry = [take(var) for var in equation.args[op.num_consts : start]]
        columns = [take(var) for var in equation.args[start:]]
        rows: list[_Iteration] = []
        for step in range(op.length):
            at = op.length - 1 - step if op.reverse else step
            slices = [self._slice(value, at) for value in columns]
            if _DIRECT <= step < op.length - 1:
                rows.append(self._repeat(rows[-1], consts, carry, slices, step))
            else:
                rows.append(self._iterate(op, inner, consts, carry, slices, step))
            carry = rows[-1].outputs[: op.num_carry]
        for value in columns:
            self.drop(value)
        for var, value in zip(equation.outputs, carry, strict=False):
            self._bind(environment, var, value)
        ys = [iteration.outputs[op.num_carry :] for iteration in rows]
        self._stack(equation, outline, environment, ys, kept)

    def _slice(self, value: Value, at: int) -> Value:
        """What iteration `at` sees of a stacked operand; the last user of a column takes it."""
        if isinstance(value, Buffer):
            return self.share(value)
        row = value.rows[at]
        if value.references > 1:
            return self.share(row)
        value.rows[at] = Buffer(0, 0)
        return row

    def _iterate(self, op: Scan, inner: Plan, consts, carry, slices, step: int) -> _Iteration:
        outer = self.iteration
        self.iteration = (*outer, step)
        before, first = list(self.live), len(self.timeline)
        given = [*(self.share(value) for value in consts), *carry, *slices]
        outputs = self.block(op.body, inner, given)
        self.iteration = outer
        return _Iteration(list(carry), list(slices), outputs, before, self.timeline[first:])

    def _repeat(self, last: _Iteration, consts, carry, slices, step: int) -> _Iteration:
        """An iteration like the one before it."""
        before = list(self.live)
        known: dict[Value, Value] = {value: value for value in consts}
        for old, new in zip([*last.carry, *last.slices], [*carry, *slices], strict=True):
            known.setdefault(old, new)
        outputs = [self.copy(value, known) for value in last.outputs]
        for value in [*carry, *slices]:
            self.drop(value)
        moments = []
        if last.moments:
            top = max(last.moments, key=lambda moment: moment.total)
            rise = zip(top.live, before, last.start, strict=True)
            live = tuple(value + now - then for value, now, then in rise)
            at = (*self.iteration, step, *top.iteration[len(self.iteration) + 1 :])
            moments = [replace(top, iteration=at, live=live)]
        self.timeline += moments
        return _Iteration(list(carry), list(slices), outputs, before, moments)

    def _stack(self, equation: Equation, outline: Plan, environment, ys, kept) -> None:
        """Bind the results ys: columns as they are, others in new memory.

        Forward, `functron.scan` stacks all leaves before it lets go of the slices. In backward, the
        slices' gradients are stacked leaf by leaf, the last leaf first.
        """
        op = equation.op
        assert isinstance(op, Scan)
        order = range(len(kept))
        pending: list[Value] = []
        for position in reversed(order) if op.reverse else order:
            var = equation.outputs[op.num_carry + position]
            rows = [outputs[position] for outputs in ys]
            if kept[position]:
                self._bind(environment, var, Column(rows[::-1] if op.reverse else rows))
                continue
            if var is not None:
                value = self.make(var.storage_bytes, outline.category[var.storage])
                self._bind(environment, var, value)
                self._record(equation)
            pending += rows
            if op.reverse:
                while pending:
                    self.drop(pending.pop())
        for value in pending:
            self.drop(value)

    def _bind(self, environment: dict[int, Value], var: Var | None, value: Value) -> None:
        if var is None:
            self.drop(value)
        else:
            environment[var.storage] = value


def _sum_place(equation: Equation, outline: Plan, environment, index: int) -> int | None:
    """The storage in which torch's engine puts a sum of cotangents; None for a new one."""
    if not accumulates(equation):
        return None
    for var in equation.args[:2]:
        value = environment.get(var.storage)
        if (
            isinstance(value, Buffer)
            and value.references == 1
            and outline.last[var.storage] == index
            and value.size == equation.results[0].storage_bytes
        ):
            return var.storage
    return None


@dataclass(frozen=True)
class Memory:
    """What one rank holds in memory in one run of a program; `memory` makes it.

    Attributes:
        name: of the program.
        timeline: what is live at each equation that is no view, in the order in which they run; of
            the middle iterations of a scan, at their highest equation only.
        at_rest: bytes by category before the first equation: the inputs.
        peak: the equation at which most is live, the first of equals.
    """

    name: str
    timeline: tuple[Moment, ...]
    at_rest: Mapping[Category, int]
    peak: Moment

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are live at once, inputs included."""
        return self.peak.total

    @property
    def at_peak(self) -> Mapping[Category, int]:
        """Bytes by category at the peak."""
        return MappingProxyType(dict(zip(CATEGORIES, self.peak.live, strict=True)))

    def rows(self) -> list[list[str]]:
        """Category, bytes before the first equation and at the peak, and share, headings first."""
        rows = [["", "at rest", "at the peak", ""]]
        for category, count in self.at_peak.items():
            share = f"{count / self.peak_bytes:.0%}" if count else ""
            rows.append([category, bytes_text(self.at_rest[category]), bytes_text(count), share])
        total = bytes_text(sum(self.at_rest.values()))
        return [*rows, ["total", total, bytes_text(self.peak_bytes), ""]]

    def _place(self) -> str:
        peak = self.peak
        scopes = "/".join(peak.where.scopes)
        inside = [f"iteration {'.'.join(map(str, peak.iteration))}"] if peak.iteration else []
        parts = [peak.where.phase, scopes, *inside, short_line(peak.where.line)]
        return f"{peak.equation} ({', '.join(part for part in parts if part)})"

    def __str__(self) -> str:
        lines = [f"memory of {self.name}, per rank: peak {bytes_text(self.peak_bytes)}"]
        lines.append(f"  at {self._place()}")
        return "\n".join([*lines, "", *(f"  {row}" for row in aligned(self.rows()))])

    def svg(self) -> str:
        """The timeline as stacked areas, one colour per category, as an SVG document."""
        columns = list(zip(*(moment.live for moment in self.timeline), strict=True))
        series = {c: column for c, column in zip(CATEGORIES, columns, strict=True) if any(column)}
        return area_chart(
            series,
            title=f"memory of {self.name}: peak {bytes_text(self.peak_bytes)} at {self._place()}",
            x_label="equations, in the order in which they run",
            y_label="live",
        )

    def _repr_html_(self) -> str:
        title = f"memory of {self.name}, per rank: peak {bytes_text(self.peak_bytes)}"
        table = html_table(self.rows(), heading=True)
        return (
            f"<div><b>{escape(title)}</b><p>at {escape(self._place())}</p>{table}{self.svg()}</div>"
        )


def memory(program: Code) -> Memory:
    """The live bytes of one run of `program` on one rank, equation by equation.

    This is what running it eagerly allocates: `functron.program.liveness` states the rules. Inputs
    are live throughout; those that are donated take results of the same path, shape and dtype, or
    are freed after their last use. A path with ``params`` or ``opt_state`` in it makes an input a
    parameter or part of the optimizer.

    Of 30 drawn settings of small decoders on the CPU, the peaks of 27 were within 5% of those that
    torch's profiler measured. Where eager execution does other work than the program says, it is
    off by more: random draws (other algorithm), several microbatches with few tokens
    (`accumulate` keeps gradients longer), remat of many layers (it keeps their inputs to the end),
    `optim.with_fp32_masters` (float32 gradients). Most of the 30 peaked in the loss.

    Not counted: what the allocator rounds up or caches, and what kernels reserve per thread.
    """
    forced: dict[int, Category] = {}
    for given in program.inputs:
        forced.setdefault(given.var.storage, _category(given.path) or "inputs")
    for output in program.outputs:
        category = _category(output.path)
        if isinstance(output.value, Var) and category is not None:
            forced.setdefault(output.value.storage, category)
    kept = [False] * len(program.outputs)
    outline = plan(program.block, forced, kept, _donations(program))
    machine = Machine()
    values = machine.inputs(program, outline)
    start = Moment("inputs", Where(), (), tuple(machine.live))
    machine.block(program.block, outline, values)
    peak = max([start, *machine.timeline], key=lambda moment: moment.total)
    at_rest = dict(zip(CATEGORIES, start.live, strict=True))
    return Memory(program.name, tuple(machine.timeline), MappingProxyType(at_rest), peak)


def _category(path: str) -> Category | None:
    parts = path.split("/")
    if "opt_state" in parts:
        return "optimizer"
    return "parameters" if "params" in parts else None


def _donations(program: Code) -> dict[Var, Var]:
    """The donated input that each output replaces."""
    donated = {given.path: given.var for given in program.inputs if given.donated}
    found = {}
    for output in program.outputs:
        new, old = output.value, donated.get(output.path)
        if isinstance(new, Var) and old and (new.shape, new.dtype) == (old.shape, old.dtype):
            found[new] = old
    return found
