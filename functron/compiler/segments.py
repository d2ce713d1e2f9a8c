"""Segments: how a block runs when it is compiled, as a short list of steps for a Python executor.

Equations between scans become one kernel each (one graph for the compiler), a scan becomes a loop
over the steps of its body, and views of values that no kernel makes are taken by the executor. The
compiler therefore sees a scanned body once, however often it runs. Each branch of a switch, and the
condition and the body of a loop that runs while it holds, are steps of their own likewise; which of
them run next is for the executor to read, so what they read and return is whole.

What scans hand to other scans is never stacked: such ys stay lists of slices. Other ys are written
into the slices of one preallocated stack, in the kernel that computes them. Donated inputs are
overwritten likewise, by the kernel that computes the value that takes their memory.

**Recomputation.** Backward is a scan of its own, which reads values of the iterations of forward.
Cheap elementwise results of values that it reads anyway, which only elementwise operations read,
cost less to recompute than to store and load (`recompute_slices`).

**Overlap.** A scan's iterations may be cut into parts, which the executor runs one ahead and one
or more behind; see `functron.program.overlap`.

**Alike parts.** The update of a model whose layers' parameters are leaves of their own, as a
module's are, is one long kernel that grows with depth. What is computed apart of each leaf becomes
a kernel of its own where others are like it (`divide_alike`), so that all of these compile as one.

**Placement.** Compilers repeat what is cheap to repeat, and guess what is cheap by counting reads:
a learning-rate schedule or ``1 - b1**t`` has next to none, so it would be computed again for every
element that it scales. Such equations are not compiled into the kernel around them.

Tried and dropped: letting the executor write weight gradients straight into the rows of their
stack, instead of a copy in the kernel. It keeps the factors of all products alive until the kernel
ends, and on CPUs the fresh memory costs more than the copies (a step took 4% to 10% longer). The
kernel does it itself (`functron.compiler.lower`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functron.program.equations import Block, ControlFlow, Equation, Fresh, Scan, Var, While
from functron.program.overlap import OverlapSplit, SumRound, split_scan_body
from functron.program.recorder import live_equations
from functron.program.text import axis_of


@dataclass(frozen=True, eq=False)
class Kernel:
    """Equations that are compiled as one graph.

    Attributes:
        equations: in the order in which they were traced.
        results: what later steps need of what it computes.
        updates: pairs of an operand and the value that overwrites it in the end.
    """

    equations: tuple[Equation, ...]
    reads: tuple[Var, ...]
    results: tuple[Var, ...]
    updates: tuple[tuple[Var, Var], ...] = ()


@dataclass(frozen=True, eq=False)
class Eager:
    """An equation that the executor runs itself: a view, a copy, or a side effect."""

    equation: Equation

    @property
    def reads(self) -> tuple[Var, ...]:
        """Its operands."""
        return tuple(dict.fromkeys(self.equation.operands))

    @property
    def results(self) -> tuple[Var, ...]:
        """The values it makes."""
        return tuple(self.equation.results)


@dataclass(frozen=True, eq=False)
class LatePart:
    """The part of an iteration that the executor ends with an iteration after it.

    Attributes:
        round: the sums that the executor starts where the iteration, or the part before, ends.
        procedure: of constants, xs, the results of the sums, what the round is passed and slices of
            stacks; its outputs are ys of columns, then those of updates, then what the next part
            reads.
        columns, stacks: how many of the loop's it makes: the last ones but for those of parts after
            it.
    """

    round: SumRound
    procedure: Procedure
    columns: int
    stacks: int


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan.

    Attributes:
        body: the steps of an iteration. Its inputs are the body's, then what `ahead` gathered, then
            one slice of each stack; its outputs are the next carry, then the ys of `columns`, then
            those of `updates`, then what the first of `behind` sums and what it is passed.
        columns: results that are lists of slices.
        stacks: results that are written into slices of one tensor.
        updates: results that are written into the slices of an operand, and that operand.
        gathers: collectives of an iteration that the executor starts with the iteration before, and
            waits for where the iteration begins.
        ahead: from constants and xs, its inputs, to their operands; None where there are none.
        behind: the parts of an iteration that end with iterations after it, one for each round of
            sums.
    """

    equation: Equation
    body: Procedure
    columns: tuple[Var, ...]
    stacks: tuple[Var, ...]
    updates: tuple[tuple[Var, Var], ...] = ()
    gathers: tuple[Equation, ...] = ()
    ahead: Procedure | None = None
    behind: tuple[LatePart, ...] = ()

    @property
    def parts(self) -> list[Procedure]:
        """Of all its parts, in the order in which they first run."""
        ahead = [self.ahead] if self.ahead else []
        return [*ahead, self.body, *(part.procedure for part in self.behind)]

    @property
    def op(self) -> Scan:
        """The scan."""
        return self.equation.scan

    @property
    def carries(self) -> tuple[Var | None, ...]:
        """The results that are the last carry."""
        return self.equation.outputs[: self.op.num_carry]

    @property
    def reads(self) -> tuple[Var, ...]:
        """Its operands."""
        return tuple(dict.fromkeys(self.equation.operands))

    @property
    def results(self) -> tuple[Var, ...]:
        """The values it makes."""
        carries = (v for v in self.carries if v is not None)
        return (*carries, *self.columns, *self.stacks, *(value for value, _ in self.updates))


@dataclass(frozen=True, eq=False)
class Choice:
    """A switch, or a loop that runs while something holds: the executor reads which block is next.

    Attributes:
        parts: the branches; or the condition and the body.
    """

    equation: Equation
    parts: tuple[Procedure, ...]

    @property
    def reads(self) -> tuple[Var, ...]:
        """Its operands."""
        return tuple(dict.fromkeys(self.equation.operands))

    @property
    def results(self) -> tuple[Var, ...]:
        """The values it makes."""
        return tuple(self.equation.results)


ProcedureStep = Kernel | Eager | Loop | Choice


@dataclass(frozen=True, eq=False)
class Procedure:
    """A block as steps for the executor; `procedure` makes it.

    Attributes:
        inputs: of the block, then those that are only written to.
        outputs: of the block: values and constants.
        inside: values that live in the memory of an input, and that input.
    """

    inputs: tuple[Var, ...]
    steps: tuple[ProcedureStep, ...]
    outputs: tuple[Any, ...]
    inside: Mapping[Var, Var] = field(default_factory=dict)

    def kernels(self) -> list[Kernel]:
        """All kernels, those of loops' bodies and of branches included."""
        found: list[Kernel] = []
        for step in self.steps:
            if isinstance(step, Kernel):
                found.append(step)
            elif isinstance(step, (Loop, Choice)):
                found += [kernel for part in step.parts for kernel in part.kernels()]
        return found


_COSTLY = frozenset(
    f"aten::{name}" for name in ("pow", "exp", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh")
)


_aten = torch.ops.aten
_CHEAP = frozenset(
    {
        _aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.mul.Tensor, _aten.mul.Scalar,
        _aten.neg.default, _aten.relu.default, _aten.silu.default, _aten.sigmoid.default,
    }
)  # fmt: skip
_ELEMENTWISE = _CHEAP | {
    _aten.div.Tensor, _aten.pow.Tensor_Scalar, _aten.where.self, _aten.sum.dim_IntList,
    _aten.mean.dim, _aten.silu_backward.default, _aten.threshold_backward.default,
}  # fmt: skip
"""The operations that fuse with those which make their operands."""
_REPEATED = _CHEAP | {_aten._to_copy.default, _aten.div.Tensor}
"""Operations that are rather computed again than stored, of operands that are there anyway."""


def recompute_slices(block: Block) -> Block:
    """The block, whose backward scans compute cheap values again from slices that they read anyway.

    Its results are the same numbers.
    """
    made, fresh = {value: e for e in block.equations for value in e.results}, Fresh(block)
    current: dict[Equation, Equation] = {}
    for equation in block.equations:
        for value in dict.fromkeys(equation.operands) if isinstance(equation.op, Scan) else ():
            ahead = made.get(value)
            if ahead is not None and isinstance(ahead.op, Scan) and ahead.op != equation.op:
                pair = (current.get(ahead, ahead), current.get(equation, equation))
                rest = [current.get(e, e) for e in block.equations if e is not ahead]
                rest = [e for e in rest if e is not pair[1]]
                others = {v for e in rest for v in e.operands} | {*block.outputs}
                current[ahead], current[equation] = _recompute(*pair, others, fresh)
    equations = tuple(current.get(e, e) for e in block.equations)
    return replace(block, equations=equations)


def _recompute(
    ahead: Equation, back: Equation, others: Collection[Any], fresh: Fresh
) -> tuple[Equation, Equation]:
    """Two scans, of which the second makes again what it can of what the first hands to it."""
    forward, op = ahead.scan, back.scan
    known = _find_shared(ahead, back) if forward.length == op.length else {}
    handed = dict(zip(op.body.inputs[op.first_x :], back.args[op.first_x :], strict=True))
    readers: dict[Var, list[Equation]] = {}
    for equation in op.body.equations:
        for value in equation.operands:
            readers.setdefault(value, []).append(equation)
    made: list[Equation] = []
    gone: set[Var] = set()
    for equation in forward.body.equations:
        if len(equation.results) != 1 or not all(v in known for v in equation.operands):
            continue
        result = equation.results[0]
        value, view = known.get(result), equation.aliases and result not in known
        if view:
            base = known[equation.operands[0]]
            whole = {"storage": base.storage, "storage_bytes": base.storage_bytes}
            known[result] = value = fresh.like(result, "again", **whole)
        elif value is None or equation.op not in _CHEAP or value in op.body.outputs:
            continue
        else:
            fuses = all(reader.op in _ELEMENTWISE for reader in readers.get(value, []))
            stack = handed.get(value)
            if not fuses or stack is None or back.args.count(stack) > 1 or stack in others:
                continue
            gone.add(value)
        names = {v: known[v] for v in equation.operands}
        args = tuple(names.get(a, a) if isinstance(a, Var) else a for a in equation.args)
        made.append(replace(equation, args=args, outputs=(value,)))
    made = live_equations(made, list(gone))
    stacks = {handed[value] for value in gone}
    ys = [out in stacks for out in ahead.outputs]
    kept = [
        y for y, out in zip(forward.body.outputs, ahead.outputs, strict=True) if out not in stacks
    ]
    inputs = tuple(v for v in op.body.inputs if v not in gone)
    body = Block(inputs, (*made, *op.body.equations), op.body.outputs)
    shorter = replace(forward, body=replace(forward.body, outputs=tuple(kept)))
    outputs = tuple(out for out, y in zip(ahead.outputs, ys, strict=True) if not y)
    args = tuple(a for a in back.args if a not in stacks)
    return replace(ahead, op=shorter, outputs=outputs), replace(
        back, op=replace(op, body=body), args=args
    )


def _find_shared(ahead: Equation, back: Equation) -> dict[Var, Var]:
    """Values of the first scan's iterations that the second has, with their names there.

    These are constants and slices of both, and what the first hands to the second.
    """

    def roles(equation: Equation) -> list[tuple[tuple[bool, Any], Var]]:
        rows = zip(equation.args, equation.scan.body.inputs, strict=True)
        consts, _, xs = equation.scan.divide(list(rows))
        found = [((True, outer), inner) for outer, inner in consts]
        return found + [((False, outer), inner) for outer, inner in xs]

    there = dict(reversed(roles(back)))
    known = {inner: there[role] for role, inner in roles(ahead) if role in there}
    ys = list(zip(ahead.outputs, ahead.scan.body.outputs, strict=True))[ahead.scan.num_carry :]
    for stack, value in ys:
        if isinstance(value, Var) and (False, stack) in there:
            known[value] = there[False, stack]
    return known


def costly_scalars(equations: Sequence[Equation], inputs: Sequence[Var]) -> list[Equation]:
    """Equations that lead from scalar inputs to scalars that take long to compute, in order."""
    scalars = {value for value in inputs if not value.shape}
    made_by: dict[Var, Equation] = {}
    wanted: list[Equation] = []
    for equation in equations:
        op, results = equation.op, equation.results
        if isinstance(op, ControlFlow) or not results or any(value.shape for value in results):
            continue
        if all(value in scalars for value in equation.operands):
            scalars.update(results)
            made_by.update((value, equation) for value in results)
            if op._schema.name in _COSTLY:
                wanted.append(equation)
    chosen: set[Equation] = set()
    while wanted:
        equation = wanted.pop()
        if equation not in chosen:
            chosen.add(equation)
            wanted += [made_by[value] for value in equation.operands if value in made_by]
    return [equation for equation in equations if equation in chosen]


def procedure(
    block: Block,
    outputs: Sequence[Any],
    *,
    into: Mapping[Var, Var] | None = None,
    donated: Mapping[Var, Var] | None = None,
    prefetch: bool = False,
    sliced: Collection[Var] = (),
    alike: bool = False,
) -> Procedure:
    """The steps that compute `outputs` of a block.

    Args:
        block: of a program, or the body of a scan.
        outputs: those outputs of the block that are needed.
        into: new inputs that must be overwritten, and the values of the block to write there.
        donated: values that may take the memory of an input, and that input. Those that cannot,
            since the old value is needed afterwards, are left out of `Procedure.inside`.
        prefetch: let iterations of scans overlap; see `functron.compiler.segments`.
        sliced: those of `outputs` that stay lists of slices: ys of scans, which nothing but scans
            reads.
        alike: make kernels of their own of parts that are alike (`divide_alike`), outside of scans.
    """
    divider = _Divider(block, outputs, dict(into or {}), dict(donated or {}), prefetch, {*sliced})
    return divider.procedure(alike)


class _Divider:
    """Cuts one block into steps."""

    def __init__(
        self,
        block: Block,
        outputs: Sequence[Any],
        into: dict[Var, Var],
        donated: dict[Var, Var],
        prefetch: bool,
        sliced: set[Var],
    ):
        self.sliced = sliced
        self.block, self.outputs, self.into, self.donated = block, tuple(outputs), into, donated
        self.prefetch = prefetch
        self.wanted = [v for v in [*outputs, *self.into.values()] if isinstance(v, Var)]
        self.equations = _sort_checks(live_equations(block.equations, self.wanted), block)
        self.operands = {e: e.operands for e in self.equations}
        self.made_by = {value: e for e in self.equations for value in e.results}
        self.views = {e for e in self.equations if not _is_eager(e) and e.aliases}
        self.classes: dict[int, int] = {}  # of storages that may be one memory when it runs
        self.group_of: dict[Equation, int] = {}  # the kernel that an equation belongs to
        self.again: set[Equation] = set()  # what each reader computes for itself

    def procedure(self, alike: bool) -> Procedure:
        groups = self._divide_alike(self._group()) if alike else self._group()
        xs_only = self._slice_only()
        steps: list[ProcedureStep] = []
        for group in groups:
            first = group[0]
            if not _is_eager(first):
                steps.append(self._make_kernel(group))
                continue
            steps += self._take_views(self.operands[first], steps)
            if isinstance(first.op, Scan):
                steps.append(self._make_loop(first, xs_only))
            elif isinstance(first.op, ControlFlow):
                parts = (procedure(b, b.outputs, prefetch=self.prefetch) for b in first.op.blocks)
                steps.append(Choice(first, tuple(parts)))
            else:
                steps.append(Eager(first))
        steps += self._take_views(self.wanted, steps)
        steps = self._keep_results(steps)
        steps, inside = self._place_updates(steps)
        inputs = (*self.block.inputs, *self.into)
        return Procedure(inputs, tuple(steps), self.outputs, inside)

    def _group(self) -> list[list[Equation]]:
        """The equations, cut around those that the executor runs, costly scalars first.

        Views of memory that no kernel makes are left out: each reader takes its own.
        """
        groups: list[list[Equation]] = []
        current: list[Equation] = []
        first = costly_scalars(self.equations, self.block.inputs)
        if first:
            groups.append(first)
            self.group_of.update(dict.fromkeys(first, 0))
        for equation in self.equations:
            if equation in self.group_of:
                continue
            if _is_eager(equation):
                groups += [current] if current else []
                groups.append([equation])
                current = []
                self._join_classes(equation)
            elif not self._is_floating(equation):
                self.group_of[equation] = len(groups)
                current.append(equation)
        return [*groups, current] if current else groups

    def _divide_alike(self, groups: list[list[Equation]]) -> list[list[Equation]]:
        """The groups, with parts that are alike as groups of their own.

        What these would hand to one another, and is cheap, each of them computes for itself.
        """
        readers: dict[Var, set[Equation]] = {value: set() for value in self.wanted}
        for equation, operands in self.operands.items():
            for value in operands:
                readers.setdefault(value, set()).add(equation)
        found: list[list[Equation]] = []
        for group in groups:
            parts = [group] if _is_eager(group[0]) else divide_alike(group)
            for part in parts if len(parts) > 1 else ():
                crossing = (e for e in part if not _read(e, readers) <= {*part})
                self._repeat_cheap(crossing, {*group}, readers)
            rest = ([e for e in part if e not in self.again] for part in parts)
            found += [part for part in rest if part]
        self.views |= self.again
        return found

    def _repeat_cheap(
        self,
        crossing: Iterable[Equation],
        group: Collection[Equation],
        readers: Mapping[Var, Collection[Equation]],
    ) -> None:
        """Leave results that are cheap, of what is there, to those that read them."""
        for equation in crossing:
            chain, left = [], [equation]
            while left and len(chain) < _CHAIN:
                chain.append(left.pop())
                made = dict.fromkeys(self.made_by.get(v) for v in self.operands[chain[-1]])
                new = (e for e in made if e in group and e not in self.again)
                left += [e for e in new if e not in chain and e not in left]
            results = {value for each in chain for value in each.results}
            cheap = all(each.op in _REPEATED or each in self.views for each in chain)
            own = results.isdisjoint(self.wanted) and all(
                _read(each, readers) <= {*group} for each in chain
            )
            if cheap and own and not left:
                self.again.update(chain)
                for each in chain:
                    self.group_of.pop(each, None)

    def _is_floating(self, equation: Equation) -> bool:
        if equation not in self.views:
            return False
        makers = [self.made_by.get(value) for value in self.operands[equation]]
        return all(maker not in self.group_of for maker in makers if maker is not None)

    def _join_classes(self, equation: Equation) -> None:
        """Results that may be operands of an equation with blocks: values that these pass on."""
        op = equation.op
        if not isinstance(op, ControlFlow):
            return
        carries: Sequence[Any] = ()
        if isinstance(op, Scan):
            carries = op.divide(equation.args)[1]
        elif isinstance(op, While):  # which may not run at all
            carries = equation.args[op.num_consts :]
            for result, operand in zip(equation.outputs, carries, strict=True):
                self._join(result, operand)
        for block in op.blocks:
            given = equation.args[len(equation.args) - len(block.inputs) :]
            owners = {v.storage: o for v, o in zip(block.inputs, given, strict=True)}
            for inner, result in zip(block.outputs, equation.outputs, strict=False):
                if not isinstance(inner, Var) or result is None or inner.storage not in owners:
                    continue
                owner = owners[inner.storage]
                for operand in (owner, *(carries if owner in carries else ())):
                    self._join(result, operand)

    def _join(self, result: Var | None, operand: Var) -> None:
        if result is not None:
            old, new = self._class(result), self._class(operand)
            self.classes = {k: new if v == old else v for k, v in self.classes.items()}

    def _class(self, value: Var) -> int:
        return self.classes.setdefault(value.storage, value.storage)

    def _slice_only(self) -> set[Var]:
        """Results of scans that only scans read, slice by slice, or that are wanted so."""
        other = set(self.wanted) - self.sliced
        used: set[Var] = set(self.sliced)
        for equation in self.equations:
            operands = self.operands[equation]
            if isinstance(equation.op, Scan):
                used |= set(equation.args[equation.op.first_x :])
                operands = equation.args[: equation.op.first_x]
            other |= set(operands)
        return used - other

    def _view_chain(self, value: Var) -> Iterable[Equation]:
        """The views that lead to a value from one that the executor holds, in order."""
        equation = self.made_by.get(value)
        if equation not in self.views:
            return
        for operand in self.operands[equation]:
            yield from self._view_chain(operand)
        yield equation

    def _make_kernel(self, group: list[Equation]) -> Kernel:
        own = dict.fromkeys(value for equation in group for value in equation.results)
        pulled: dict[Equation, None] = {}
        for equation in group:
            for operand in self.operands[equation]:
                if operand not in own:
                    pulled.update(dict.fromkeys(self._view_chain(operand)))
        equations = (*pulled, *group)
        made = {value for equation in equations for value in equation.results}
        reads = dict.fromkeys(v for e in equations for v in self.operands[e] if v not in made)
        return Kernel(equations, tuple(reads), tuple(own))

    def _take_views(
        self, values: Sequence[Any], steps: Sequence[ProcedureStep]
    ) -> list[ProcedureStep]:
        """Steps that take the floating views among `values` and have not been taken before."""
        taken = {step.equation for step in steps if isinstance(step, Eager)}
        chains = [e for value in values if isinstance(value, Var) for e in self._view_chain(value)]
        new = dict.fromkeys(e for e in chains if e not in self.group_of and e not in taken)
        return [Eager(equation) for equation in new]

    def _make_loop(self, equation: Equation, xs_only: set[Var]) -> Loop:
        op = equation.scan
        used = {v for operands in self.operands.values() for v in operands} | set(self.wanted)
        ys = list(
            zip(op.body.outputs[op.num_carry :], equation.outputs[op.num_carry :], strict=True)
        )
        columns = [(inner, y) for inner, y in ys if y in xs_only]
        stacks = [(inner, y) for inner, y in ys if y in used and y not in xs_only]
        carry = list(op.body.outputs[: op.num_carry])
        wanted = [*carry, *(inner for inner, _ in [*columns, *stacks])]
        parts = split_scan_body(op, wanted) if self.prefetch else None
        late = parts.late if parts else {}
        # what is made late comes last
        columns.sort(key=lambda row: late.get(row[0], 0))
        stacks.sort(key=lambda row: late.get(row[0], 0))
        made = [*carry, *(inner for inner, _ in columns)]
        updates = self._find_updates(equation, made, self._find_donated(equation, stacks), parts)
        updated = {y for _, y, _, _ in updates}
        stacks = [(inner, y) for inner, y in stacks if y not in updated]
        rows = {_make_row(y, position): inner for position, (inner, y) in enumerate(stacks)}
        slots = {inner: slot for inner, _, slot, _ in updates}
        loop = Loop(
            equation, self._make_core(op, [*made, *slots], rows, slots, parts),
            tuple(y for _, y in columns), tuple(y for _, y in stacks),
            tuple((y, operand) for _, y, _, operand in updates),
        )  # fmt: skip
        return loop if parts is None else self._overlap(loop, parts, columns, rows, slots)

    def _make_core(
        self, op: Scan, outputs: Sequence[Any], rows, slots, parts: OverlapSplit | None
    ) -> Procedure:
        """The procedure of an iteration, or of that part of it that waits for the one before."""
        if parts is None:
            return procedure(op.body, outputs, into=rows, donated=slots, prefetch=self.prefetch)
        early = [v for v in outputs if v not in parts.late]
        return procedure(
            parts.core, [*early, *(parts.rounds[0].reads if parts.rounds else ())],
            prefetch=self.prefetch,
            into={row: v for row, v in rows.items() if v not in parts.late},
            donated={v: slot for v, slot in slots.items() if v not in parts.late},
        )  # fmt: skip

    def _make_tails(
        self, parts: OverlapSplit, columns: Sequence[Any], rows, slots
    ) -> list[Procedure]:
        """The procedure of each round of sums."""
        found = []
        for each in parts.rounds:
            late = {v: slot for v, slot in slots.items() if v in each.late}
            ends = [*(v for v in columns if v in each.late), *late]
            ends += each.block.outputs[len(each.late) :]
            into = {row: v for row, v in rows.items() if v in each.late}
            found.append(
                procedure(each.block, ends, prefetch=self.prefetch, into=into, donated=late)
            )
        return found

    def _overlap(self, loop: Loop, parts: OverlapSplit, columns, rows, slots) -> Loop:
        """The loop with what runs beside neighbouring iterations."""
        ahead = procedure(parts.head, parts.head.outputs) if parts.gathers else None
        inner = [v for v, _ in columns]
        behind = []
        for each, tail in zip(
            parts.rounds, self._make_tails(parts, inner, rows, slots), strict=True
        ):
            counts = [sum(v in each.late for v in group) for group in (inner, rows.values())]
            behind.append(LatePart(each, tail, *counts))
        return replace(loop, gathers=parts.gathers, ahead=ahead, behind=tuple(behind))

    def _find_updates(
        self, scan: Equation, made: list, taken: Sequence[tuple], parts: OverlapSplit | None
    ) -> list[tuple[Var, Var, Var, Var]]:
        """Those of `taken` whose row nothing else of an iteration reads after it was updated."""
        op: Any = scan.op
        if not taken:
            return []
        slots = {inner: slot for inner, _, slot, _ in taken}
        inside = set(self._make_core(op, [*made, *slots], {}, slots, parts).inside)
        if parts is not None:
            tails = self._make_tails(parts, made, {}, slots)
            for each, tail in zip(parts.rounds, tails, strict=True):
                shown = {v.storage for v in each.block.inputs}
                inside = {v for v in inside if slots[v].storage not in shown}
                inside |= set(tail.inside)
        return [row for row in taken if row[0] in inside]

    def _find_donated(
        self, scan: Equation, stacks: Sequence[tuple]
    ) -> list[tuple[Var, Var, Var, Var]]:
        """Stacks that may take the memory of an operand that only this scan reads, row by row.

        Each as (its value in the body, the stack, the operand's slice in the body, the operand).
        """
        op: Any = scan.op
        others = [v for e, operands in self.operands.items() if e is not scan for v in operands]
        memory = [self._class(v) for v in (*others, *scan.args, *self.wanted)]
        found = []
        for inner, y in stacks:
            operand = self.donated.get(y)
            if operand is None or operand not in scan.args[op.first_x :]:
                continue
            if memory.count(self._class(operand)) == 1:
                slot = op.body.inputs[scan.args.index(operand)]
                single = op.body.outputs.count(inner) == 1
                if single and isinstance(inner, Var) and slot.stride == inner.stride:
                    found.append((inner, y, slot, operand))
        return found

    def _keep_results(self, steps: list[ProcedureStep]) -> list[ProcedureStep]:
        """The steps, with only those results of kernels that others need."""
        needed = set(self.wanted)
        out: list[ProcedureStep] = []
        for step in reversed(steps):
            if isinstance(step, Kernel):
                results = tuple(value for value in step.results if value in needed)
                step = Kernel(step.equations, step.reads, results)
            needed |= set(step.reads)
            out.append(step)
        return out[::-1]

    def _place_updates(
        self, steps: list[ProcedureStep]
    ) -> tuple[list[ProcedureStep], dict[Var, Var]]:
        """The steps, with the kernels writing to donated inputs and to `into`."""
        inside: dict[Var, Var] = {}
        maker = {value: i for i, step in enumerate(steps) for value in step.results}
        kernels = {i: [] for i, step in enumerate(steps) if isinstance(step, Kernel)}
        for value, target in self.donated.items():
            index = maker.get(value)
            if index in kernels and self._is_unread(target, value, steps, index):
                kernels[index].append((target, value))
                inside[value] = target
        copies: list[ProcedureStep] = []
        for target, value in self.into.items():
            index = maker.get(value)
            if index in kernels:
                kernels[index].append((target, value))
            else:
                copies.append(Eager(Equation(_aten.copy_.default, (target, value))))
        kept = {v for v in self.outputs if isinstance(v, Var)}
        kept |= {v for step in [*steps, *copies] for v in step.reads}
        out: list[ProcedureStep] = []
        for index, step in enumerate(steps):
            pairs = kernels.get(index, ())
            if isinstance(step, Kernel) and pairs:
                reads = tuple(dict.fromkeys([*step.reads, *(target for target, _ in pairs)]))
                results = tuple(v for v in step.results if v in kept and v not in inside)
                step = Kernel(step.equations, reads, results, tuple(pairs))
            out.append(step)
        return [*out, *copies], inside

    def _is_unread(
        self, target: Var, value: Var, steps: Sequence[ProcedureStep], index: int
    ) -> bool:
        """Whether nothing but `target` itself shows its memory to the step, or to later ones."""
        memory = self._class(target)
        if self._class(value) == memory:
            return False
        here = [v for v in steps[index].reads if v is not target]
        later = [v for step in steps[index + 1 :] for v in step.reads]
        ends = [v for v in self.outputs if isinstance(v, Var)]
        return all(self._class(v) != memory for v in (*here, *later, *ends))


_MANY, _ALIKE, _SMALL, _LEAST, _CHAIN = 8, 6, 1024, 24, 5
"""Values that so many parts share come before them, if they have few elements; parts are kernels of
their own where so many are alike, and save so many equations; so many are repeated at most."""


def divide_alike(equations: Sequence[Equation]) -> list[list[Equation]]:
    """Equations that are one kernel, in groups that run in this order.

    Parts that share nothing but operands and small values, such as the updates of parameters, are
    groups of their own if there are many that are alike. Collectives, and what joins many parts,
    such as a norm of all gradients, stay together as far as they can.
    """
    levels, parts = _find_parts(equations)
    named: dict[str, list[list[Equation]]] = {}
    for part in parts:
        named.setdefault(_describe_part(part), []).append(part)
    chosen = [
        part
        for alike in named.values()
        if len(alike) >= _ALIKE and (len(alike) - 1) * len(alike[0]) >= _LEAST
        for part in alike
    ]
    if not chosen:
        return [[*equations]]
    places = {equation: place for place, equation in enumerate(equations)}
    apart: dict[int, list[list[Equation]]] = {}
    for part in sorted(chosen, key=lambda part: places[part[0]]):
        apart.setdefault(levels[part[0]], []).append(part)
    inside = {equation for part in chosen for equation in part}
    rest = [equation for equation in equations if equation not in inside]
    found: list[list[Equation]] = []
    for level in sorted(apart):
        found.append([equation for equation in rest if levels[equation] <= level])
        rest = [equation for equation in rest if levels[equation] > level]
        found += apart[level]
    return [group for group in [*found, rest] if group]


def _find_parts(
    equations: Sequence[Equation],
) -> tuple[dict[Equation, int], list[list[Equation]]]:
    """The level of each equation, and connected parts, each of one level.

    A level reads what those before it make: where collectives are, where many parts are joined, and
    where a small value is read by many. No collective is of a lower level than those before it:
    they stay in the order in which they were traced, also where stages of a pipeline have other
    parts than one another and would meet in sums of other values.
    """
    made = {value: equation for equation in equations for value in equation.results}
    read = Counter(v for e in equations for v in {*e.operands} if v in made)
    shared = {v for v, count in read.items() if count >= _MANY and v.size <= _SMALL}
    levels: dict[Equation, int] = {}
    roots: dict[Equation, Equation] = {}
    barriers: set[Equation] = set()
    latest = 0  # the level of the last collective

    def find(equation: Equation) -> Equation:
        while roots[equation] is not equation:
            roots[equation] = equation = roots[roots[equation]]
        return equation

    for equation in equations:
        own = {value: made[value] for value in equation.operands if value in made}
        joined = {find(each) for each in own.values()}
        alone = axis_of(equation) is not None or len(joined) >= _MANY
        barriers |= {equation} if alone else set()
        after = {v for v, each in own.items() if alone or v in shared or each in barriers}
        levels[equation] = max((levels[e] + (v in after) for v, e in own.items()), default=0)
        if axis_of(equation) is not None:
            levels[equation] = latest = max(latest, levels[equation])
        roots[equation] = equation
        for value, each in own.items():
            if value not in after and levels[each] == levels[equation]:
                roots[find(each)] = equation
    parts: dict[Equation, list[Equation]] = {}
    for equation in equations:
        parts.setdefault(find(equation), []).append(equation)
    return levels, [part for root, part in parts.items() if root not in barriers]


def _read(equation: Equation, readers: Mapping[Var, Collection[Equation]]) -> set[Equation]:
    """The equations that read a result of this one."""
    return {e for value in equation.results for e in readers.get(value, ())}


def _describe_part(part: Sequence[Equation]) -> str:
    """The equations of a part, without names."""
    numbers: dict[Var, str] = {}

    def number(value: Var) -> str:
        shown = f"%{len(numbers)}:{value.shape}:{value.stride}:{value.dtype}:{value.device}"
        return numbers.setdefault(value, shown)

    rows = [(str(e.op), e.args, dict(e.kwargs), e.outputs) for e in part]
    return repr(pytree.tree_map_only(Var, number, rows))


def _sort_checks(equations: Sequence[Equation], block: Block) -> list[Equation]:
    """The equations, checks of inputs before all others: between them they would cut kernels."""
    inputs = set(block.inputs)
    first = [e for e in equations if e.name == "check_ids" and inputs.issuperset(e.operands)]
    early = {id(e) for e in first}
    return [*first, *(e for e in equations if id(e) not in early)]


def _is_eager(equation: Equation) -> bool:
    """Whether the executor runs an equation itself."""
    return isinstance(equation.op, ControlFlow) or not equation.outputs


def _make_row(stack: Var, position: int) -> Var:
    """A slice of a stacked value, as an input of the body that writes it."""
    size = stack.size // stack.shape[0] * stack.dtype.itemsize if stack.shape[0] else 0
    shape, stride = stack.shape[1:], stack.stride[1:]
    return Var(f"row_{position}", shape, stride, stack.dtype, stack.device, -1 - position, size)
