"""Cutting a program into pieces that run one after another and together compute what it computes.

A pipeline cuts the joint program of a stage, from parameters, input and cotangent to output and
gradients, into a forward piece (F), the gradient of the stage's input (I) and the gradients of its
weights (W). Nothing is computed twice: what a later piece reads is kept by the one that makes it.
This is the split of the backward pass of Qi et al. 2023, "Zero Bubble Pipeline Parallelism".

**Levels** are the numbers of the pieces that a program is cut in. An equation runs at the lowest
level of the outputs that it leads to, through scans of any nesting (a set of outputs is a whole
number whose bits are outputs, so that unions are cheap). Equations that give views, or
that cost next to nothing, have no level: they are made again wherever they are read. A scan whose
results are wanted at several levels becomes a scan per level: an early one stacks what a late one
reads of its iterations.

Cheap equations move to an earlier level where less is then kept: the gradient of a norm's scale is
a sum over all tokens, so it is computed where its operands are at hand, instead of keeping these.

**Sums over repeated calls** are taken into the scans that make what is added. Gradients of scanned
layers are stacked by the scan of the backward pass and then added to the sums of earlier
microbatches. Inside the scan each layer's gradient is added to its own row instead: the stack of
gradients is never made, and where the sums are donated their rows are updated in place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch

from functron.compiler.executable import match_donations
from functron.compiler.lower import unroll
from functron.core import tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.program.equations import (
    Block,
    ControlFlow,
    Equation,
    Fresh,
    Input,
    Output,
    Scan,
    Var,
    contiguous_strides,
    rename_values,
)
from functron.program.recorder import live_equations
from functron.program.trace import Program

EFFECT = 1
"""The bit of values that lead to a side effect, such as a print."""

AROUND = 2
"""The bit of values that lead to something through later iterations of a scan."""

FIRST = 2
"""Outputs have the bits from this one on."""


def _holds_ordered(equation: Equation) -> bool:
    """Whether it, or an equation of its body, is an effect that keeps the order of such."""
    return any(each.ordered for each, _ in Block((), (equation,), ()).walk())


def is_effect(equation: Equation) -> bool:
    """Whether an equation is there for its side effect, and not for its results."""
    return not isinstance(equation.op, Scan) and bool(live_equations([equation], ()))


def reach(block: Block, wanted: Sequence[int]) -> Mapping[Var, int]:
    """The bits of every value of a block; values that lead nowhere are missing.

    Args:
        block: of a program, or the body of a scan.
        wanted: the bits of each of its outputs.
    """
    found: defaultdict[Var, int] = defaultdict(int)
    for value, bits in zip(block.outputs, wanted, strict=True):
        if isinstance(value, Var) and bits:
            found[value] |= bits
    for equation in reversed(block.equations):
        if isinstance(equation.op, Scan):
            inner, _ = reach_in_scan(equation.op, result_bits(equation, found))
            for value, operand in zip(equation.op.body.inputs, equation.args, strict=True):
                if value in inner:
                    found[operand] |= inner[value]
            continue
        bits = EFFECT if is_effect(equation) else 0
        for value in equation.results:
            bits |= found.get(value, 0)
        for operand in equation.operands if bits else ():
            found[operand] |= bits
    return dict(found)


def result_bits(equation: Equation, found: Mapping[Var, int]) -> list[int]:
    """The bits of each output of an equation, 0 for missing ones."""
    return [0 if value is None else found.get(value, 0) for value in equation.outputs]


def reach_in_scan(op: Scan, bits: Sequence[int]) -> tuple[Mapping[Var, int], list[int]]:
    """The bits of every value of a scan's body, and those of the body's outputs.

    A carry leads to whatever the next iteration's carry leads to, and the first one to the last.
    """
    carried = [0] * op.num_carry
    inputs = op.body.inputs[op.num_consts :][: op.num_carry]
    while True:
        wanted = [own | more for own, more in zip(bits, carried, strict=False)]
        wanted += bits[op.num_carry :]
        found = reach(op.body, wanted)
        before, carried = carried, [found.get(value, 0) for value in inputs]
        for position, own in enumerate(bits[: op.num_carry]):
            if carried[position] & ~own & ~(EFFECT | AROUND):
                carried[position] |= AROUND
        if carried == before:
            break
    rows = zip(inputs, wanted, strict=False)
    return {**found, **{v: found.get(v, 0) | bits for v, bits in rows if bits}}, wanted


_aten = torch.ops.aten
_CHEAP = frozenset({"sum", "mean", "amax", "amin", "_to_copy"})  # besides pointwise ones
_CONE = 64  # equations that are moved together, at most

LevelRule = Callable[[int], int]
"""From the bits of a value (`functron.pipeline.cut`) to its level."""


@dataclass(frozen=True, eq=False)
class LevelPart:
    """The equations that run at one level of a block.

    Attributes:
        inputs: the inputs of the block that it reads, without those of `arrivals`.
        arrivals: what it reads of lower levels: values, and carries that lower levels have.
        keeps: what higher levels read of it.
    """

    equations: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    arrivals: tuple[Var, ...]
    keeps: tuple[Var, ...] = ()


class Levels:
    """A block whose equations have levels, and whose scans each have one.

    Args:
        block: of a program, or the body of a scan.
        wanted: the bits of each of its outputs.
        rule: from bits to a level.
        inputs: the level at which each input is there; None: at which it is first needed.
        carries: the inputs that only their own level has: the carries of a scan.
        charged: the inputs that cost memory while higher levels wait for them.
    """

    def __init__(
        self,
        block: Block,
        wanted: Sequence[int],
        rule: LevelRule,
        fresh: Fresh,
        inputs: Mapping[Var, int] | None = None,
        carries: AbstractSet[Var] = frozenset(),
        charged: AbstractSet[Var] = frozenset(),
    ):
        self.rule, self.fresh, self.carries, self.charged = rule, fresh, carries, charged
        self.level: dict[Equation, int] = {}
        self._order: list[Equation] = []
        self._made_by: dict[Var, Equation] = {}
        self._roots: dict[Var, tuple[Var, ...]] = {value: (value,) for value in block.inputs}
        self.found = reach(block, wanted)
        self._inputs = inputs or {v: self._lowest(v) for v in block.inputs}
        for equation in block.equations:
            self._add(equation)
        self._refuse_disorder(in_scan=inputs is not None)
        self._ends = self._find_ends(block.outputs, wanted)
        self._readers = self._list_readers()
        self._move_earlier()

    def _lowest(self, value: Var) -> int:
        bits = self.found.get(value, 0)
        return self.rule(bits) if bits & ~EFFECT else 0

    def _add(self, equation: Equation) -> None:
        bits = EFFECT if is_effect(equation) else 0
        for value in equation.results:
            bits |= self.found.get(value, 0)
        if isinstance(equation.op, Scan):
            for level, part in split_scan(equation, self):
                self._append(part, level)
        elif bits & ~EFFECT and self._is_remade(equation):
            found = dict.fromkeys(r for v in equation.operands for r in self._roots[v])
            self._append(equation, None, tuple(found))
        elif bits:
            at_hand = max(map(self.available, equation.operands), default=0)
            self._append(equation, self.rule(bits) if bits & ~EFFECT else at_hand)

    def _refuse_disorder(self, *, in_scan: bool) -> None:
        """Refuse ordered effects that levels take apart: each runs all iterations of its scans."""
        ordered = [e for e in self._order if e in self.level and _holds_ordered(e)]
        levels = [self.level[e] for e in ordered]
        if len({*levels}) < 2 or (not in_scan and levels == sorted(levels)):
            return
        lines = [e.where.line or "an unknown line" for e in ordered]
        refuse(
            "cannot cut backward in parts",
            f"ordered=True at {lines[0]}",
            f"another at {lines[-1]}, which another part of backward reaches",
            "effects in one part",
            "leave ordered out, or take a schedule that runs backward as one",
        )

    def _append(self, equation: Equation, level: int | None, roots: tuple | None = None) -> None:
        self._order.append(equation)
        if level is not None:
            self.level[equation] = level
        for value in equation.results:
            self._made_by[value] = equation
            self._roots[value] = (value,) if roots is None else roots

    def _is_remade(self, equation: Equation) -> bool:
        """Whether it is made again at every level that reads it, since keeping it costs more."""
        if is_effect(equation):
            return False
        operands = equation.operands
        if equation.aliases or not operands:
            return True
        if equation.op is not _aten._to_copy.default or set(equation.kwargs) - {"dtype"}:
            return False
        widens = equation.results[0].nbytes >= operands[0].nbytes
        return widens or not self.costs(operands[0])

    # --- where values come from

    def roots(self, value: Var) -> tuple[Var, ...]:
        """The inputs and results of equations with levels that a value is made of."""
        return self._roots[value]

    def available(self, value: Var) -> int:
        """The lowest level at which a value can be had."""
        return max(map(self._find_home, self._roots[value]), default=0)

    def costs(self, value: Var) -> bool:
        """Whether it costs memory to keep it: it is not made of free inputs alone."""
        return any(root in self._made_by or root in self.charged for root in self._roots[value])

    def _find_home(self, root: Var) -> int:
        maker = self._made_by.get(root)
        return self._inputs[root] if maker is None else self.level[maker]

    # --- one part per level

    def divide(self, wanted: Mapping[int, Iterable[Any]]) -> dict[int, LevelPart]:
        """The equations that run at each level.

        Args:
            wanted: for every level that must be there, the values that it must give.
        """
        levels = sorted({*self.level.values(), *wanted})
        parts = {level: self._make_part(level, wanted.get(level, ())) for level in levels}
        read = dict.fromkeys(value for part in parts.values() for value in part.arrivals)
        homes: dict[int, list[Var]] = defaultdict(list)
        for value in read:
            homes[self._find_home(value)].append(value)
        return {level: replace(part, keeps=tuple(homes[level])) for level, part in parts.items()}

    def _make_part(self, level: int, wanted: Iterable[Any]) -> LevelPart:
        chosen = {e: None for e in self._order if self.level.get(e) == level}
        inputs: dict[Var, None] = {}
        arrivals: dict[Var, None] = {}
        todo = [v for v in wanted if isinstance(v, Var)][::-1]
        todo += [v for e in reversed(chosen) for v in reversed(e.operands)]
        while todo:
            value = todo.pop()
            maker = self._made_by.get(value)
            if maker is not None and maker not in self.level:
                if maker not in chosen:
                    chosen[maker] = None
                    todo += reversed(maker.operands)
                continue
            home = level if maker is None and value not in self.carries else self._find_home(value)
            assert home <= level, f"{value} is needed at level {level} and made at {home}"
            if home < level:
                arrivals[value] = None
            elif maker is None:
                inputs[value] = None
        equations = tuple(equation for equation in self._order if equation in chosen)
        return LevelPart(equations, tuple(inputs), tuple(arrivals))

    # --- cheap equations, where less is kept

    def _find_ends(self, outputs: Sequence[Any], wanted: Sequence[int]) -> dict[Var, int]:
        """The level at which each root is returned, as part of an output."""
        ends: dict[Var, int] = {}
        for value, bits in zip(outputs, wanted, strict=True):
            if isinstance(value, Var) and bits & ~EFFECT:
                for root in self._roots[value]:
                    ends[root] = max(ends.get(root, 0), self.rule(bits))
        return ends

    def _list_readers(self) -> dict[Var, list[Equation]]:
        readers: dict[Var, list[Equation]] = defaultdict(list)
        for equation in self.level:
            for root in self._roots_read(equation):
                readers[root].append(equation)
        return readers

    def _roots_read(self, equation: Equation) -> Iterable[Var]:
        return dict.fromkeys(root for v in equation.operands for root in self._roots[v])

    def _move_earlier(self) -> None:
        moved = True
        while moved:
            moved = False
            for equation in self.level:
                cone, level = self._find_cone(equation)
                if cone and self._try_moving(cone, level):
                    moved = True

    def _find_cone(self, equation: Equation) -> tuple[list[Equation], int]:
        """The cheap equations of its level that it needs, and the level at which they could run."""
        here, level = self.level[equation], 0
        cone, todo = {equation: None}, [equation]
        while todo:
            next_one = todo.pop()
            if not _is_cheap(next_one) or len(cone) > _CONE:
                return [], 0
            for root in self._roots_read(next_one):
                maker = self._made_by.get(root)
                if self._find_home(root) < here or maker is None:
                    level = max(level, self._find_home(root))
                elif maker not in cone:
                    cone[maker] = None
                    todo.append(maker)
        return (list(cone), level) if level < here else ([], 0)

    def _try_moving(self, cone: Sequence[Equation], level: int) -> bool:
        """Move equations to a level if less is kept then; whether they were moved."""
        touched = {root for equation in cone for root in self._roots_read(equation)}
        touched |= {value for equation in cone for value in equation.results}
        before, here = sum(map(self._held_bytes, touched)), self.level[cone[0]]
        self.level.update(dict.fromkeys(cone, level))
        gains = sum(map(self._held_bytes, touched)) < before
        if not gains:
            self.level.update(dict.fromkeys(cone, here))
        return gains

    def _held_bytes(self, root: Var) -> int:
        """The bytes of a value, times the levels that it waits for its last reader."""
        if not (root in self._made_by or root in self.charged):
            return 0
        last = max((self.level[e] for e in self._readers.get(root, ())), default=0)
        return root.nbytes * max(0, max(last, self._ends.get(root, 0)) - self._find_home(root))


def _is_cheap(equation: Equation) -> bool:
    op = equation.op
    if isinstance(op, ControlFlow) or is_effect(equation):
        return False
    return torch.Tag.pointwise in op.tags or (op.namespace == "aten" and equation.name in _CHEAP)


# --- scans


def split_scan(equation: Equation, outer: Levels) -> list[tuple[int, Equation]]:
    """A scan as one scan per level at which its results are wanted, with these levels.

    Args:
        equation: of a block.
        outer: the levels of what comes before it in this block.
    """
    op = equation.scan
    found, wanted = reach_in_scan(op, result_bits(equation, outer.found))
    rows = list(zip(op.body.inputs, equation.args, strict=True))
    live = [(value, operand) for value, operand in rows if value in found]
    inputs = {value: outer.available(operand) for value, operand in live}
    real = {position: bits for position, bits in enumerate(wanted) if bits & ~EFFECT}
    last = max([*map(outer.rule, real.values()), *inputs.values()], default=0)
    levels = {p: outer.rule(bits) if p in real else last for p, bits in enumerate(wanted) if bits}
    _, carries, _ = op.divide(op.body.inputs)
    inputs |= {
        carries[position]: level for position, level in levels.items() if position < op.num_carry
    }
    charged = {
        value for value, operand in rows[op.first_x :] if value in found and outer.costs(operand)
    }
    charged |= {*carries}
    inner = Levels(op.body, wanted, outer.rule, outer.fresh, inputs, {*carries}, charged)
    needs: dict[int, list[Var]] = defaultdict(list)
    for position, level in levels.items():
        value = op.body.outputs[position]
        if position >= op.num_carry and inner.costs(value):
            levels[position] = level = inner.available(value)
        needs[level].append(value)
    parts = inner.divide(needs)
    whole = len(levels) == len(wanted) and len(live) == len(rows)
    if len(parts) == 1 and whole:
        return [(level, equation) for level in parts]
    return _make_scans(equation, parts, levels, outer.fresh)


def _make_scans(
    equation: Equation, parts: Mapping[int, LevelPart], levels: Mapping[int, int], fresh: Fresh
) -> list[tuple[int, Equation]]:
    """A scan per part of its body; `levels` has those of its live outputs, by position."""
    op = equation.scan
    given_consts, given_carry, given_xs = op.divide(
        list(zip(op.body.inputs, equation.args, strict=True))
    )
    results = list(zip(op.body.outputs, equation.outputs, strict=True))
    stacks: dict[Var, Var] = {}  # of values that later parts read
    made = []
    for level, part in parts.items():
        here = [position for position, at in levels.items() if at == level]
        mine = [position for position in here if position < op.num_carry]
        ys = [results[position] for position in here if position >= op.num_carry]
        stacked = {value: result for value, result in ys if result is not None}
        ys += [(v, fresh.stacked(v, op.length)) for v in part.keeps if v not in stacked]
        stacks |= {**dict(ys), **stacked}
        read = set(part.inputs)
        consts = [row for row in given_consts if row[0] in read]
        carry = [given_carry[position] for position in mine]
        xs = [row for row in given_xs if row[0] in read]
        xs += [(value, stacks[value]) for value in part.arrivals]
        given, out = [*consts, *carry, *xs], [*(results[position] for position in mine), *ys]
        body = Block(tuple(v for v, _ in given), part.equations, tuple(v for v, _ in out))
        scan = replace(op, body=body, num_consts=len(consts), num_carry=len(carry))
        around = tuple(operand for _, operand in given)
        made.append((level, Equation(scan, around, {}, tuple(r for _, r in out), equation.where)))
    return made


@dataclass(frozen=True, eq=False)
class ProgramPiece:
    """A part of a program; made by `cut_program`.

    Attributes:
        block: its inputs are values of the whole program: those of its arguments that the piece
            reads, then what earlier pieces keep for it, then the axis indices and constants that it
            reads. Its outputs are those of `outputs`, then `keeps`.
        outputs: the positions of the program's outputs that it computes.
        keeps: values that later pieces read, each in memory of its own. One of them may be an
            output of this piece as well, and an output may be a view of one.
        spends: those of `arrivals` that no later piece reads: their memory can be given up.
    """

    block: Block
    outputs: tuple[int, ...]
    keeps: tuple[Var, ...]
    arrivals: tuple[Var, ...]
    spends: tuple[Var, ...]

    @property
    def kept_bytes(self) -> int:
        """The bytes of what it keeps for later pieces."""
        return sum(value.nbytes for value in self.keeps)

    def program(self, original: Program, donate: Collection[Var] = ()) -> Program:
        """The piece as a program, from flat tensors to flat tensors, which can be compiled.

        Its arguments are those of ``block.inputs`` that are no axis indices or constants, in order;
        its result is a list of the block's outputs. `functron.compiler.Executable.run` takes the
        arguments as a list that it empties, so what only this list refers to is freed after its
        last use.

        Args:
            donate: inputs whose memory results may take: accumulators, and what the piece spends.
                Only those are donated that some result is like, in shape, layout and dtype.
        """
        known = {given.var: given for given in original.inputs}
        inputs: list[Input] = []
        for position, var in enumerate(self.block.inputs):
            given = known.get(var)
            if given is None:
                given = Input(var, f"{position}/kept_{var.name}")
            elif given.role == "argument":
                given = replace(given, path=_renumber(given.path, position))
            inputs.append(replace(given, donated=var in donate and given.role == "argument"))
        chosen = [original.outputs[position] for position in self.outputs]
        outputs = [
            replace(output, path=_renumber(output.path, i)) for i, output in enumerate(chosen)
        ]
        for value in self.keeps:
            outputs.append(Output(value, f"{len(outputs)}/kept_{value.name}"))
        arguments = [_argument_tree(given) for given in inputs if given.role == "argument"]
        made = Program(
            original.name,
            original.mesh,
            self.block,
            tuple(inputs),
            tuple(outputs),
            tree.structure(tuple(arguments)),
            tree.structure([0] * len(outputs)),
            checked=False,
            stages=original.stages,
        )
        taken = {*match_donations(made).values()}
        kept = tuple(replace(given, donated=given.var in taken) for given in inputs)
        return replace(made, inputs=kept)


def _renumber(path: str, index: int) -> str:
    """A path in the argument, or result, with another number."""
    inner = path.partition("/")[2]
    return f"{index}/{inner}" if inner else f"{index}"


def _argument_tree(given: Input) -> tree.Tree:
    """A tree whose one leaf has the path of an input, behind its position."""
    inner = given.path.partition("/")[2]
    return {inner: 0} if inner else 0


def find_sliced(pieces: Sequence[ProgramPiece]) -> set[Var]:
    """The kept values that can stay lists of slices: ys of scans that only scans read, as xs."""
    found: set[Var] = set()
    other: set[Var] = set()
    for piece in pieces:
        own = len(piece.outputs)
        other.update(value for value in piece.block.outputs[:own] if isinstance(value, Var))
        for equation in piece.block.equations:
            op, operands = equation.op, equation.operands
            if isinstance(op, Scan):
                ys = [v for v in equation.outputs[op.num_carry :] if v is not None]
                found.update(value for value in ys if value in piece.keeps)
                operands = equation.args[: op.first_x]
            other.update(operands)
    return found - other


def bytes_held(pieces: Sequence[ProgramPiece]) -> tuple[int, ...]:
    """The bytes of what is kept for later pieces after each piece has run."""
    kept, after = 0, []
    for piece in pieces:
        kept += piece.kept_bytes - sum(value.nbytes for value in piece.spends)
        after.append(kept)
    return tuple(after)


def cut_program(
    program: Program, groups: Sequence[Sequence[int]], *, early: bool = True
) -> tuple[ProgramPiece, ...]:
    """The pieces of a program, one per group of its outputs.

    An equation runs in the first piece with an output that it leads to, and its results are kept
    for later pieces that read them, as they are. Views are made again instead of kept, and so are
    constants, and casts of what is no larger or an input. Equations there for a side effect run as
    soon as their operands are there. Cheap elementwise equations and sums run earlier where that
    makes less to keep.

    A scan is cut like the program: the first piece with one of its results runs it, without what
    only other results need; a later piece runs another scan of the same length for these, which
    reads what it needs of the first one's iterations, stacked.

    Args:
        groups: positions of the program's outputs, each in one group; later groups may need what
            earlier ones compute, never the other way round.
        early: let a group that is empty, but not the first, take from the next one the equations
            that lead to two or more of its outputs. A pipeline's first stage has no gradient of its
            input; its chain of activations' cotangents then still runs in the piece of I, and only
            the weights' gradients at its sides are left for W.

    Raises:
        ValueError: the groups do not have each output once.
    """
    _check_groups(program, groups)
    values = [output.value for output in program.outputs]
    distinct = dict.fromkeys(value for value in values if isinstance(value, Var))
    bit = {value: 1 << (FIRST + position) for position, value in enumerate(distinct)}
    wanted = [bit[value] if isinstance(value, Var) else 0 for value in values]
    masks = [sum({wanted[position] for position in group}) for group in groups]
    levels = Levels(program.block, wanted, _level_rule(masks, early), Fresh(program.block))
    parts = levels.divide(
        {level: [values[position] for position in group] for level, group in enumerate(groups)}
    )
    pieces = []
    for level, group in enumerate(groups):
        later = {v for other, part in parts.items() if other > level for v in part.arrivals}
        pieces.append(_make_piece(program, parts[level], tuple(group), later))
    return tuple(pieces)


def _check_groups(program: Program, groups: Sequence[Sequence[int]]) -> None:
    counts = Counter(position for group in groups for position in group)
    known = range(len(program.outputs))
    raise_problems(
        f"cannot cut {program.name}",
        [
            Problem(
                f"output {position}",
                f"in {counts[position]} groups",
                "in one group" if position in known else f"outputs 0 to {len(known) - 1}",
                "give every output of the program to one group",
            )
            for position in sorted({*known, *counts})
            if counts[position] != 1 or position not in known
        ],
    )


def _level_rule(masks: Sequence[int], early: bool) -> Callable[[int], int]:
    """From the outputs that a value leads to, as bits, to the piece that makes it."""

    def level_of(bits: int) -> int:
        level = next(level for level, mask in enumerate(masks) if bits & mask)
        before = level - 1
        if early and before > 0 and not masks[before]:
            several = (bits & masks[level]).bit_count() > 1 or bits & AROUND
            return before if several else level
        return level

    return level_of


def _make_piece(
    program: Program, part: LevelPart, group: tuple[int, ...], later: set[Var]
) -> ProgramPiece:
    read = set(part.inputs)
    arguments = [i.var for i in program.inputs if i.role == "argument" and i.var in read]
    hidden = [i.var for i in program.inputs if i.role != "argument" and i.var in read]
    outputs = (*(program.outputs[position].value for position in group), *part.keeps)
    block = Block((*arguments, *part.arrivals, *hidden), part.equations, outputs)
    spends = tuple(value for value in part.arrivals if value not in later)
    return ProgramPiece(block, group, part.keeps, part.arrivals, spends)


def join_programs(first: Program, second: Program) -> Program:
    """Two programs as one, from the arguments of both to the results of both, flat.

    Neither reads what the other makes, so that collectives of each may lie under what the other
    computes, as `functron.program.overlap` has it. Scans are written out, since each would else run
    as a whole.

    Args:
        first, second: what `ProgramPiece.program` returned, for the same mesh.
    """
    inputs: list[Input] = []
    outputs: list[Output] = []
    equations: list[Equation] = []
    for number, program in enumerate((first, second)):
        block = unroll(program).block
        values = [*block.inputs, *(v for e in block.equations for v in e.results)]
        new = {
            v: replace(v, name=f"{v.name}_of_{number}", storage=2 * v.storage + number)
            for v in values
        }
        equations += [rename_values(equation, new) for equation in block.equations]
        inputs += [replace(given, var=new[given.var]) for given in program.inputs]
        results = [new[value] if isinstance(value, Var) else value for value in block.outputs]
        rows = zip(program.outputs, results, strict=True)
        outputs += [replace(output, value=value) for output, value in rows]
    inputs.sort(key=lambda given: given.role != "argument")
    inputs = [
        replace(given, path=_renumber(given.path, i)) if given.role == "argument" else given
        for i, given in enumerate(inputs)
    ]
    outputs = [replace(output, path=_renumber(output.path, i)) for i, output in enumerate(outputs)]
    given, results = (tuple(i.var for i in inputs), tuple(o.value for o in outputs))
    arguments = tuple(_argument_tree(given) for given in inputs if given.role == "argument")
    return replace(
        first,
        name=f"{first.name}+{second.name}",
        block=Block(given, tuple(equations), results),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        in_structure=tree.structure(arguments),
        out_structure=tree.structure([0] * len(outputs)),
    )


_add = torch.ops.aten.add.Tensor
_cast = torch.ops.aten._to_copy.default


def sink_sums(program: Program, sums: Collection[Var]) -> Program:
    """The program with ``sum + ys`` computed by the scan that stacks ys, row by row.

    Args:
        program: whose results are to be the same.
        sums: its inputs to which something is added. Only such are moved as nothing else reads.
    """
    block = program.block
    reads = Counter(value for equation in block.equations for value in equation.operands)
    reads.update(value for value in block.outputs if isinstance(value, Var))
    makers = {value: equation for equation in block.equations for value in equation.results}
    found: dict[Equation, list[_Sum]] = {}
    for equation in block.equations:
        row = _find_sum(equation, makers, {v for v in sums if reads[v] == 1}, reads)
        if row is not None:
            found.setdefault(row.scan, []).append(row)
    gone = {e for rows in found.values() for row in rows for e in (row.add, row.cast)}
    fresh = Fresh(block)
    equations = tuple(
        _move_sums(equation, found[equation], fresh) if equation in found else equation
        for equation in block.equations
        if equation not in gone
    )
    return replace(program, block=replace(block, equations=equations))


@dataclass(frozen=True, eq=False)
class _Sum:
    """``add(total, cast(y))`` where y is a stacked result of a scan that nothing else reads."""

    scan: Equation
    position: int
    total: Var
    cast: Equation | None
    add: Equation


def _find_sum(
    equation: Equation, makers: dict[Var, Equation], sums: set[Var], reads: Counter[Var]
) -> _Sum | None:
    if equation.op is not _add or equation.kwargs or len(equation.operands) != 2:
        return None
    total, value = equation.operands
    cast = makers.get(value)
    if (
        cast is not None
        and cast.op is _cast
        and reads[value] == 1
        and set(cast.kwargs) == {"dtype"}
    ):
        value = cast.operands[0]
    else:
        cast = None
    scan = makers.get(value)
    if total not in sums or reads[value] != 1 or scan is None or not isinstance(scan.op, Scan):
        return None
    position = scan.outputs.index(value)
    plain = all(v.stride == contiguous_strides(v.shape) for v in (total, value))
    alike = total.shape == value.shape and position >= scan.op.num_carry and value.shape[0] > 0
    return _Sum(scan, position, total, cast, equation) if plain and alike else None


def _make_row(fresh: Fresh, total: Var) -> Var:
    """A row of a stacked value."""
    shape = total.shape[1:]
    return fresh.like(total, "row", shape=shape, stride=contiguous_strides(shape))


def _move_sums(equation: Equation, rows: list[_Sum], fresh: Fresh) -> Equation:
    """A scan that takes the totals as xs and returns the sums as ys."""
    op: Any = equation.op
    inputs, equations = [*op.body.inputs], [*op.body.equations]
    inner, outer = [*op.body.outputs], [*equation.outputs]
    for row in rows:
        given, made, value = (
            _make_row(fresh, row.total),
            _make_row(fresh, row.total),
            inner[row.position],
        )
        if row.cast is not None:
            cast = _make_row(fresh, row.total)
            equations.append(
                Equation(_cast, (value,), dict(row.cast.kwargs), (cast,), row.cast.where)
            )
            value = cast
        equations.append(Equation(_add, (given, value), {}, (made,), row.add.where))
        inputs.append(given)
        inner[row.position], outer[row.position] = made, row.add.outputs[0]
    body = Block(tuple(inputs), tuple(equations), tuple(inner))
    totals = tuple(row.total for row in rows)
    return replace(
        equation, op=replace(op, body=body), args=(*equation.args, *totals), outputs=tuple(outer)
    )
