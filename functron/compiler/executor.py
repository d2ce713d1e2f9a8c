"""The executor: runs the steps of a procedure, with as little Python as possible.

Values live in numbered slots, and a slot is emptied before its last reader runs, so that memory is
free as soon as compiled code is done with it. What scans hand to scans is lists of slices, which
the reader empties as it goes.

Iterations of a loop may overlap, with gathers for the next one and reductions of the last one. The
order in which collectives start is the same on every rank: those of the next layer's gathers before
this layer's own, and the reductions of this layer's gradients after them, then what is summed again
of the layers before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functron.compiler.segments import Choice, Eager, Kernel, Loop, Procedure, ProcedureStep
from functron.program.callbacks import EFFECTS, run_effect
from functron.program.equations import Equation, Scan, Switch, Var
from functron.program.overlap import list_turns
from functron.program.text import axis_of
from functron.spmd.axes import raise_lost, user_line
from functron.spmd.flight import CollectiveKind

_c10d = torch.ops._c10d_functional

RunProcedure = Callable[[list], list]
"""Runs a procedure: takes its inputs in a list, which it empties; gives its outputs."""


@dataclass(frozen=True, eq=False)
class SideProcedure:
    """A procedure beside a loop, and the places of its first inputs in constants and xs."""

    run: RunProcedure
    reads: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ReductionRound:
    """Reductions of an iteration, and what makes late ys of them.

    Attributes:
        starts: each starts a collective; what they return must be waited for.
        num_passed: how many values it is passed beside their operands.
        side: what computes the late ys, and what the next round reads.
        columns, rows: which of the loop's columns, and of its late rows of stacks, it makes.
    """

    starts: tuple[Callable, ...]
    num_passed: int
    side: SideProcedure
    columns: slice
    rows: slice

    @property
    def num_reads(self) -> int:
        return len(self.starts) + self.num_passed


@dataclass(frozen=True, eq=False)
class LoopOverlap:
    """The gathers and reductions that run beside the iterations of a loop.

    Attributes:
        num_columns, num_rows: how many columns, and rows of stacks, an iteration itself makes.
        ahead: what computes the operands of `gathers`.
        gathers: each starts a collective; what they return must be waited for.
    """

    num_carry: int
    num_columns: int
    num_rows: int
    ahead: SideProcedure | None
    gathers: tuple[Callable, ...]
    rounds: tuple[ReductionRound, ...]

    def run(
        self,
        body: RunProcedure,
        order: Sequence[int],
        fixed: list,
        carry: list,
        take: Callable[[int], list],
        give: Callable[[int, Sequence, int], None],
        rows: Sequence[Sequence[torch.Tensor]],
    ) -> list:
        """The last carry.

        Args:
            carry: the first carry; it is emptied.
            take: gives the xs of an index, once.
            give: takes columns of an index, from the column with that number on.
            rows: the slices of each stack.
        """
        early, late = rows[: self.num_rows], rows[self.num_rows :]
        x, ahead = [], take(order[0])  # of this iteration, and of the next one
        under_way: list = []
        inputs: list = []
        kept: list[list] = []
        ends: list = []
        pending: dict[int, Callable[[], Any]] = {}
        for turn, position in list_turns(
            len(order), gathers=self.ahead is not None, rounds=len(self.rounds)
        ):
            index = order[position]
            if turn == "gather":
                ahead = ahead or take(index)
                under_way = self._make_gather(fixed, ahead)
            elif turn == "begin":
                x, ahead = ahead or take(index), []
                gathered = [_wait(value) for value in under_way]
                kept = [_choose_inputs(each.side, fixed, x) for each in self.rounds]
                inputs = [*fixed, *carry, *x, *gathered, *(row[index] for row in early)]
                carry.clear()
                x, under_way = [], []
                del gathered
            elif turn == "compute":
                outputs = body(inputs)
                carry = outputs[: self.num_carry]
                give(index, outputs[self.num_carry : self.num_carry + self.num_columns], 0)
                if self.rounds:
                    ends = outputs[len(outputs) - self.rounds[0].num_reads :]
                del outputs
            elif turn == "reduce":
                to = functools.partial(give, index)
                pending[position] = self._start_round(
                    0, kept, ends, [row[index] for row in late], to
                )
            elif (then := pending.pop(position)()) is not None:
                pending[position] = then
        return carry

    def _make_gather(self, fixed: list, x: list) -> list:
        """The next iteration's gathers, started."""
        if self.ahead is None:
            return []
        operands = self.ahead.run(_choose_inputs(self.ahead, fixed, x))
        return [start(value) for start, value in zip(self.gathers, operands, strict=True)]

    def _start_round(
        self, number: int, kept: list[list], ends: list, rows: list, give: Callable
    ) -> Callable[[], Any]:
        """Starts a round of an iteration's reductions; the result ends it, and starts the next.

        Args:
            kept: what each round reads of the iteration's constants and xs.
            ends: what this one reads of the iteration; it is emptied.
            rows: the iteration's late rows of stacks.
            give: takes columns, from the column with that number on.
        """
        this, count = self.rounds[number], len(self.rounds[number].starts)
        started = [start(value) for start, value in zip(this.starts, ends, strict=False)]
        first = len(kept[number])
        inputs = [*kept[number], *started, *ends[count:], *rows[this.rows]]
        kept[number] = []
        ends.clear()

        def end() -> Callable[[], Any] | None:
            for i in range(first, first + count):
                inputs[i] = _wait(inputs[i])
            outputs = this.side.run(inputs)
            give(outputs[: this.columns.stop - this.columns.start], this.columns.start)
            if number + 1 == len(self.rounds):
                return None
            handed = outputs[len(outputs) - self.rounds[number + 1].num_reads :]
            del outputs
            return self._start_round(number + 1, kept, handed, rows, give)

        return end


def make_overlap(
    step: Loop, routine: Callable[[Procedure], RunProcedure], groups: Mapping[str, str]
) -> LoopOverlap | None:
    """The work that overlaps with the iterations of a loop; None: there is none.

    Args:
        routine: makes a procedure ready to run.
        groups: the name of the process group of every axis.
    """
    op = step.op
    if step.ahead is None and not step.behind:
        return None
    inputs = op.body.inputs
    fixed = (*inputs[: op.num_consts], *inputs[op.first_x :])
    place = {value: i for i, value in enumerate(fixed)}

    def side(procedure: Procedure) -> SideProcedure:
        return SideProcedure(
            routine(procedure), tuple(place[v] for v in procedure.inputs if v in place)
        )

    first = len(step.columns) - sum(part.columns for part in step.behind)
    column, row = first, 0
    rounds = []
    makers = (step.body, *(part.procedure for part in step.behind))
    for part, maker in zip(step.behind, makers, strict=False):
        columns, rows = (slice(column, column + part.columns), slice(row, row + part.stacks))
        column, row = columns.stop, rows.stop
        starts = tuple(_make_reduction(e, groups, maker) for e in part.round.sums)
        passed, tail = len(part.round.passed), side(part.procedure)
        rounds.append(ReductionRound(starts, passed, tail, columns, rows))
    return LoopOverlap(
        op.num_carry,
        first,
        len(step.stacks) - row,
        side(step.ahead) if step.ahead else None,
        tuple(_make_gather(equation, groups) for equation in step.gathers),
        tuple(rounds),
    )


def _choose_inputs(part: SideProcedure, fixed: list, x: list) -> list:
    count = len(fixed)
    return [fixed[i] if i < count else x[i - count] for i in part.reads]


def _make_gather(equation: Equation, groups: Mapping[str, str]) -> Callable:
    _, axis, size = equation.args
    group = groups[axis]

    def start(x: torch.Tensor) -> torch.Tensor:
        row = x.contiguous().unsqueeze(0)
        return _c10d.all_gather_into_tensor(row, size, group)

    return start


def _make_reduction(equation: Equation, groups: Mapping[str, str], maker: Procedure) -> Callable:
    """Starts a reduction of one of the outputs of `maker`."""
    operand, axis, size = equation.args
    group = groups[axis]
    assert isinstance(operand, Var)
    shown = [v.storage for v in (*maker.inputs, *maker.outputs) if isinstance(v, Var)]
    is_own = shown.count(operand.storage) == 1

    def start(x: torch.Tensor) -> torch.Tensor:
        if equation.name != "psum":
            return _c10d.reduce_scatter_tensor(x.contiguous(), "sum", size, group).squeeze(0)
        if is_own or not x.is_contiguous():
            return _c10d.all_reduce_(x.contiguous(), "sum", group)
        return _c10d.all_reduce(x, "sum", group)

    return start


def _wait(value: Any) -> torch.Tensor:
    return _c10d.wait_tensor(value)


GraphKernel = Callable[[list], Sequence[torch.Tensor]]
"""A compiled kernel: takes a list of tensors, which it may empty; gives the results."""

Slots = list[Any]

_SHOWN = 4  # collectives of one step, in a message

_aten = torch.ops.aten
_FROM_START = frozenset(
    (
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.expand.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
    )
)


@dataclass(frozen=True, eq=False)
class Routine:
    """A procedure that is ready to run.

    Attributes:
        size: the number of slots; inputs come first.
        steps: in order; each works on the slots.
        outputs: for each output its slot, or (None, value) for a constant.
    """

    size: int
    steps: tuple[Callable[[Slots], None], ...]
    procedure: Procedure
    outputs: tuple[tuple[int | None, Any], ...]

    def run(self, inputs: list) -> list:
        """The outputs; `inputs` is emptied, donated ones overwritten. Call it without gradients.

        Raises:
            RuntimeError: another process ended; with the collectives in which this was noticed.
        """
        slots: Slots = [*inputs, *[None] * (self.size - len(inputs))]
        inputs.clear()
        index = 0
        try:
            for index, step in enumerate(self.steps):  # noqa: B007
                step(slots)
        except RuntimeError as error:
            raise_lost(error, _collectives(self.procedure.steps[index]))
            raise
        return [value if slot is None else slots[slot] for slot, value in self.outputs]


def make_routine(
    procedure: Procedure,
    compiled: Mapping[Kernel, GraphKernel],
    groups: Mapping[str, str] | None = None,
    *,
    tells: bool = False,
) -> Routine:
    """A procedure with its compiled kernels, ready to run.

    With `tells` it counts a version of the input that its steps write to first, before they do:
    compiled code itself does not say that it wrote.
    """
    slots: dict[Var, int] = {value: i for i, value in enumerate(procedure.inputs)}
    for step in procedure.steps:
        for value in step.results:
            slots.setdefault(value, len(slots))
    size = len(slots)
    for value, memory in procedure.inside.items():
        slots[value] = slots[memory]
    last: dict[int, int] = {}
    for index, step in enumerate(procedure.steps):
        last.update((slots[value], index) for value in step.reads)
    kept = {slots[value] for value in procedure.outputs if isinstance(value, Var)}
    kept |= {slots[memory] for memory in procedure.inside.values()}
    dead: dict[int, list[int]] = {}
    for slot, index in last.items():
        if slot not in kept:
            dead.setdefault(index, []).append(slot)
    steps = tuple(
        _make_step(step, slots, tuple(sorted(dead.get(index, ()))), compiled, groups or {})
        for index, step in enumerate(procedure.steps)
    )
    if tells:
        steps = _count_versions(procedure, steps, slots)
    outputs = tuple(
        (slots[value], None) if isinstance(value, Var) else (None, value)
        for value in procedure.outputs
    )
    return Routine(size, steps, procedure, outputs)


def _count_versions(procedure: Procedure, steps: tuple, slots: Mapping[Var, int]) -> tuple:
    """The steps; before the first that writes to an input, that input's version is counted."""
    inputs = set(procedure.inputs)
    for index, step in enumerate(procedure.steps):
        written = next((target for target in _targets(step) if target in inputs), None)
        if written is not None:
            told = _count_version(steps[index], slots[written])
            return (*steps[:index], told, *steps[index + 1 :])
    return steps


def _count_version(step: Callable, slot: int) -> Callable:
    def run(slots: Slots) -> None:
        torch.autograd.graph.increment_version(slots[slot])
        step(slots)

    return run


def _targets(step: ProcedureStep) -> list[Var]:
    """The operands that a step overwrites."""
    if isinstance(step, Kernel):
        return [target for target, _ in step.updates]
    if isinstance(step, Loop):
        return [operand for _, operand in step.updates]
    return [step.equation.args[0]] if step.equation.op is _aten.copy_.default else []


def _equations(step: ProcedureStep) -> tuple[Equation, ...]:
    """Those of a step itself; the steps of a loop's parts tell of their own."""
    if isinstance(step, Kernel):
        return step.equations
    if isinstance(step, Loop):
        return (*step.gathers, *(e for part in step.behind for e in part.round.sums))
    return ()


def _collectives(step: ProcedureStep) -> str:
    """The collectives of a step itself, their axes and the user's lines."""
    equations = _equations(step)
    found = dict.fromkeys(
        f"{equation.name} over {axis!r} at {equation.where.line or 'an unknown line'}"
        for equation in equations
        if (axis := axis_of(equation)) is not None
    )
    if not found:
        return f"the program that is called at {user_line()}"
    shown, more = list(found)[:_SHOWN], len(found) - _SHOWN
    return ", or ".join([*shown, *([f"{more} other collectives"] if more > 0 else [])])


def lines_of(frame: FrameType, kind: CollectiveKind) -> list[str]:
    """The lines of the collectives like `kind` in the step that a thread is running.

    Args:
        frame: the innermost one of a thread that waits in compiled code.
        kind: what it waits for, as the flight recorder has it.
    """
    inner: FrameType | None = frame
    while inner is not None and inner.f_code is not Routine.run.__code__:
        inner = inner.f_back
    if inner is None:
        return []
    values = inner.f_locals
    step = values["self"].procedure.steps[values["index"]]
    over = [e for e in _equations(step) if axis_of(e) == kind.axis]
    same = [e for e in over if e.name == kind.op] or over
    size = lambda e: e.operands[0].nbytes if hasattr(e.operands[0], "nbytes") else None  # noqa: E731
    alike = [e for e in same if size(e) == kind.bytes] or same
    return list(dict.fromkeys(map(_describe_place, alike)))[:_SHOWN]


def _describe_place(equation: Equation) -> str:
    """The scopes and the line of an equation, as far as they are known."""
    where = equation.where
    scope = f"{'/'.join(where.scopes)} in {where.phase}" if where.scopes else where.phase
    return f"{scope} of {where.line}" if where.line else scope


def _make_step(step, slots: dict[Var, int], dead: tuple[int, ...], compiled, groups) -> Callable:
    if isinstance(step, Kernel):
        reads = tuple(slots[value] for value in step.reads)
        return _make_kernel(compiled[step], reads, tuple(slots[v] for v in step.results), dead)
    if isinstance(step, Eager):
        return _make_eager(step, slots, dead)
    if isinstance(step, Choice):
        return _make_choice(step, slots, dead, compiled, groups)
    return _make_loop(step, slots, dead, compiled, groups)


def _make_kernel(fn: GraphKernel, reads: tuple, results: tuple, dead: tuple) -> Callable:
    def run(slots: Slots) -> None:
        operands = [slots[i] for i in reads]
        for i in dead:
            slots[i] = None
        for i, value in zip(results, fn(operands), strict=True):
            slots[i] = value

    return run


def _make_eager(step: Eager, slots: dict[Var, int], dead: tuple) -> Callable:
    equation = step.equation
    run = (_make_view if equation.op in _FROM_START else _make_call)(equation, slots)
    if not dead:
        return run

    def and_free(slots: Slots) -> None:
        run(slots)
        for i in dead:
            slots[i] = None

    return and_free


def _make_view(equation: Equation, slots: dict[Var, int]) -> Callable:
    """A view that starts where its operand does is a matter of shape and strides, known before."""
    (source,), (made,) = equation.operands, equation.results
    start, end, expected = slots[source], slots[made], source.stride
    shape, stride = made.shape, made.stride
    general = _make_call(equation, slots)

    def run(slots: Slots) -> None:
        value = slots[start]
        if value.stride() == expected:
            slots[end] = value.as_strided(shape, stride)
        else:
            general(slots)

    return run


def _make_call(equation: Equation, slots: dict[Var, int]) -> Callable:
    leaves, structure = pytree.tree_flatten((equation.args, dict(equation.kwargs)))
    places = [(i, slots[leaf]) for i, leaf in enumerate(leaves) if isinstance(leaf, Var)]
    op: Any = run_effect(equation) if equation.name in EFFECTS else equation.op
    positions = tuple(
        (i, slots[v]) for i, v in enumerate(equation.outputs) if v is not None and v in slots
    )

    def run(slots: Slots) -> None:
        filled = list(leaves)
        for i, slot in places:
            filled[i] = slots[slot]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        out = op(*args, **kwargs)
        results = out if isinstance(out, (tuple, list)) else (out,)
        for i, slot in positions:
            slots[slot] = results[i]

    return run


def _make_choice(step: Choice, slots: dict[Var, int], dead: tuple, compiled, groups) -> Callable:
    """Runs the blocks of a switch or while loop; reading what decides waits for its device."""
    op: Any = step.equation.op
    runs = [make_routine(part, compiled, groups).run for part in step.parts]
    places = tuple(slots[value] for value in step.equation.args)
    results = [
        (i, slots[v]) for i, v in enumerate(step.equation.outputs) if v is not None and v in slots
    ]

    def switch(given: list) -> list:
        return runs[op.clamp(int(given.pop(0)))](given)

    def loop(given: list) -> list:
        fixed, carry = given[: op.num_consts], given[op.num_consts :]
        given.clear()
        while runs[0]([*fixed, *carry])[0]:
            inputs = [*fixed, *carry]
            del carry
            carry = runs[1](inputs)
        return carry

    decide = switch if isinstance(op, Switch) else loop

    def run(slots: Slots) -> None:
        given = [slots[i] for i in places]
        for i in dead:
            slots[i] = None
        outputs = decide(given)
        for i, slot in results:
            slots[slot] = outputs[i]

    return run


def _make_loop(step: Loop, slots: dict[Var, int], dead: tuple, compiled, groups) -> Callable:
    op: Scan = step.op
    body = make_routine(step.body, compiled, groups)
    beside = make_overlap(
        step, lambda procedure: make_routine(procedure, compiled, groups).run, groups
    )
    consts, carries, xs = op.divide([slots[value] for value in step.equation.args])
    # a list of slices is emptied as it is read, unless it is read again
    taken = tuple(slot in dead and xs.count(slot) == 1 for slot in xs)
    finals = tuple(None if v is None else slots[v] for v in step.carries)
    columns = tuple(slots[v] for v in step.columns)
    stacks = tuple((slots[v], v.shape, v.stride, v.dtype, v.device) for v in step.stacks)
    updates = tuple((slots[value], slots[operand]) for value, operand in step.updates)
    order = range(op.length)[:: -1 if op.reverse else 1]
    num_carry = op.num_carry

    def run(slots: Slots) -> None:
        fixed = [slots[i] for i in consts]
        carry = [slots[i] for i in carries]
        sources = [v if isinstance(v, list) else v.unbind(0) for v in [slots[i] for i in xs]]
        emptied = [v for v, take in zip(sources, taken, strict=True) if take and type(v) is list]
        updated = [(value, slots[operand]) for value, operand in updates]
        for i in dead:
            slots[i] = None
        for value, tensor in updated:
            slots[value] = tensor
        rows: list[Sequence[torch.Tensor]] = []
        for slot, shape, stride, dtype, device in stacks:
            slots[slot] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            rows.append(slots[slot].unbind(0))
        made: list[list] = [[None] * len(order) for _ in columns]

        def take(index: int) -> list:
            x = [source[index] for source in sources]
            for source in emptied:
                source[index] = None
            return x

        def give(index: int, values: Sequence, first: int) -> None:
            for column, value in zip(made[first:], values, strict=False):  # then updates
                column[index] = value

        if beside is not None and order:
            carry = beside.run(body.run, order, fixed, carry, take, give, rows)
        else:
            for index in order:
                inputs = [*fixed, *carry, *take(index), *(row[index] for row in rows)]
                del carry
                outputs = body.run(inputs)
                carry = outputs[:num_carry]
                give(index, outputs[num_carry:], 0)
        for slot, value in zip(finals, carry, strict=True):
            if slot is not None:
                slots[slot] = value
        for slot, column in zip(columns, made, strict=True):
            slots[slot] = column

    return run
