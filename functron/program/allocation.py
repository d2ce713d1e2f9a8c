"""What running a program allocates and frees, on values that have a size and no numbers.

`functron.program.liveness` says which values exist from when to when; here they are made, shared
and dropped. A scan's iterations are alike, so a few are simulated and the others follow from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from functron.program.equations import Block, Equation, Scan, Var, Where
from functron.program.liveness import (
    CATEGORIES,
    Category,
    Plan,
    accumulates,
    body_plan,
    scratch_bytes,
)

if TYPE_CHECKING:
    from functron.program.program import Program

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

    def inputs(self, program: Program, outline: Plan) -> list[Value]:
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
