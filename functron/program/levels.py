"""Which level of a block each equation runs at: the numbers of the pieces that a program is cut in.

An equation runs at the lowest level of the outputs that it leads to. Equations that give views, or
that cost next to nothing, have no level: they are made again wherever they are read. A scan whose
results are wanted at several levels becomes a scan per level: an early one stacks what a late one
reads of its iterations.

Cheap equations move to an earlier level where less is then kept: the gradient of a norm's scale is
a sum over all tokens, so it is computed where its operands are at hand, instead of keeping these.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch

from functron.program.equations import Block, Equation, Scan, Var
from functron.program.reach import EFFECT, is_effect, reach, reach_in_scan, result_bits

_aten = torch.ops.aten
_CHEAP = frozenset({"sum", "mean", "amax", "amin", "_to_copy"})  # besides pointwise ones
_CONE = 64  # equations that are moved together, at most

Rule = Callable[[int], int]
"""From the bits of a value (`functron.program.reach`) to its level."""


class Fresh:
    """Makes values that a program does not have yet."""

    def __init__(self, block: Block):
        values = [*block.inputs, *(v for e, _ in block.walk() for v in e.results)]
        bodies = (e.op.body for e, _ in block.walk() if isinstance(e.op, Scan))
        values += [v for body in bodies for v in body.inputs]
        self._names = {value.name for value in values}
        self._storages = itertools.count(1 + max((v.storage for v in values), default=0))

    def stacked(self, like: Var, length: int) -> Var:
        """What stands for `length` values like this one, stacked."""
        shape, stride = like.stacked(length)
        names = (f"{like.name}_kept_{i}" for i in itertools.count(1))
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        made = replace(like, name=name, shape=shape, stride=stride, storage=next(self._storages))
        return replace(made, storage_bytes=made.nbytes)


@dataclass(frozen=True, eq=False)
class Part:
    """What runs at one level of a block.

    Attributes:
        equations: in order.
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
        fresh: makes values.
        inputs: the level at which each input is there; None: at which it is first needed.
        carries: the inputs that only their own level has: the carries of a scan.
        charged: the inputs that cost memory while higher levels wait for them.
    """

    def __init__(
        self,
        block: Block,
        wanted: Sequence[int],
        rule: Rule,
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
        self._inputs = inputs or {v: self._needed(v) for v in block.inputs}
        for equation in block.equations:
            self._add(equation)
        self._ends = self._ends_of(block.outputs, wanted)
        self._readers = self._readers_of()
        self._hoist()

    def _needed(self, value: Var) -> int:
        bits = self.found.get(value, 0)
        return self.rule(bits) if bits & ~EFFECT else 0

    def _add(self, equation: Equation) -> None:
        bits = EFFECT if is_effect(equation) else 0
        for value in equation.results:
            bits |= self.found.get(value, 0)
        if isinstance(equation.op, Scan):
            for level, part in split_scan(equation, self):
                self._append(part, level)
        elif bits & ~EFFECT and self._remade(equation):
            found = dict.fromkeys(r for v in equation.operands for r in self._roots[v])
            self._append(equation, None, tuple(found))
        elif bits:
            at_hand = max(map(self.available, equation.operands), default=0)
            self._append(equation, self.rule(bits) if bits & ~EFFECT else at_hand)

    def _append(self, equation: Equation, level: int | None, roots: tuple | None = None) -> None:
        self._order.append(equation)
        if level is not None:
            self.level[equation] = level
        for value in equation.results:
            self._made_by[value] = equation
            self._roots[value] = (value,) if roots is None else roots

    def _remade(self, equation: Equation) -> bool:
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
        return max(map(self._home, self._roots[value]), default=0)

    def costs(self, value: Var) -> bool:
        """Whether it costs memory to keep it: it is not made of free inputs alone."""
        return any(root in self._made_by or root in self.charged for root in self._roots[value])

    def _home(self, root: Var) -> int:
        maker = self._made_by.get(root)
        return self._inputs[root] if maker is None else self.level[maker]

    # --- one part per level

    def divide(self, wanted: Mapping[int, Iterable[Any]]) -> dict[int, Part]:
        """What runs at each level.

        Args:
            wanted: for every level that must be there, the values that it must give.
        """
        levels = sorted({*self.level.values(), *wanted})
        parts = {level: self._part(level, wanted.get(level, ())) for level in levels}
        read = dict.fromkeys(value for part in parts.values() for value in part.arrivals)
        homes: dict[int, list[Var]] = defaultdict(list)
        for value in read:
            homes[self._home(value)].append(value)
        return {level: replace(part, keeps=tuple(homes[level])) for level, part in parts.items()}

    def _part(self, level: int, wanted: Iterable[Any]) -> Part:
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
            home = level if maker is None and value not in self.carries else self._home(value)
            assert home <= level, f"{value} is needed at level {level} and made at {home}"
            if home < level:
                arrivals[value] = None
            elif maker is None:
                inputs[value] = None
        equations = tuple(equation for equation in self._order if equation in chosen)
        return Part(equations, tuple(inputs), tuple(arrivals))

    # --- cheap equations, where less is kept

    def _ends_of(self, outputs: Sequence[Any], wanted: Sequence[int]) -> dict[Var, int]:
        """The level at which each root is returned, as part of an output."""
        ends: dict[Var, int] = {}
        for value, bits in zip(outputs, wanted, strict=True):
            if isinstance(value, Var) and bits & ~EFFECT:
                for root in self._roots[value]:
                    ends[root] = max(ends.get(root, 0), self.rule(bits))
        return ends

    def _readers_of(self) -> dict[Var, list[Equation]]:
        readers: dict[Var, list[Equation]] = defaultdict(list)
        for equation in self.level:
            for root in self._reads(equation):
                readers[root].append(equation)
        return readers

    def _reads(self, equation: Equation) -> Iterable[Var]:
        return dict.fromkeys(root for v in equation.operands for root in self._roots[v])

    def _hoist(self) -> None:
        moved = True
        while moved:
            moved = False
            for equation in self.level:
                cone, level = self._cone(equation)
                if cone and self._gains(cone, level):
                    moved = True

    def _cone(self, equation: Equation) -> tuple[list[Equation], int]:
        """The cheap equations of its level that it needs, and the level at which they could run."""
        here, level = self.level[equation], 0
        cone, todo = {equation: None}, [equation]
        while todo:
            next_one = todo.pop()
            if not _cheap(next_one) or len(cone) > _CONE:
                return [], 0
            for root in self._reads(next_one):
                maker = self._made_by.get(root)
                if self._home(root) < here or maker is None:
                    level = max(level, self._home(root))
                elif maker not in cone:
                    cone[maker] = None
                    todo.append(maker)
        return (list(cone), level) if level < here else ([], 0)

    def _gains(self, cone: Sequence[Equation], level: int) -> bool:
        """Move equations to a level if less is kept then; whether they were moved."""
        touched = {root for equation in cone for root in self._reads(equation)}
        touched |= {value for equation in cone for value in equation.results}
        before, here = sum(map(self._held, touched)), self.level[cone[0]]
        self.level.update(dict.fromkeys(cone, level))
        gains = sum(map(self._held, touched)) < before
        if not gains:
            self.level.update(dict.fromkeys(cone, here))
        return gains

    def _held(self, root: Var) -> int:
        """The bytes of a value, times the levels that it waits for its last reader."""
        if not (root in self._made_by or root in self.charged):
            return 0
        last = max((self.level[e] for e in self._readers.get(root, ())), default=0)
        return root.nbytes * max(0, max(last, self._ends.get(root, 0)) - self._home(root))


def _cheap(equation: Equation) -> bool:
    op = equation.op
    if isinstance(op, Scan) or is_effect(equation):
        return False
    return torch.Tag.pointwise in op.tags or (op.namespace == "aten" and equation.name in _CHEAP)


# --- scans


def split_scan(equation: Equation, outer: Levels) -> list[tuple[int, Equation]]:
    """A scan as one scan per level at which its results are wanted, with these levels.

    Args:
        equation: of a block.
        outer: the levels of what comes before it in this block.
    """
    op = equation.op
    assert isinstance(op, Scan)
    found, wanted = reach_in_scan(op, result_bits(equation, outer.found))
    rows = list(zip(op.body.inputs, equation.args, strict=True))
    live = [(value, operand) for value, operand in rows if value in found]
    inputs = {value: outer.available(operand) for value, operand in live}
    real = {position: bits for position, bits in enumerate(wanted) if bits & ~EFFECT}
    last = max([*map(outer.rule, real.values()), *inputs.values()], default=0)
    levels = {p: outer.rule(bits) if p in real else last for p, bits in enumerate(wanted) if bits}
    stop = op.num_consts + op.num_carry
    carries = op.body.inputs[op.num_consts : stop]
    inputs |= {
        carries[position]: level for position, level in levels.items() if position < op.num_carry
    }
    charged = {value for value, operand in rows[stop:] if value in found and outer.costs(operand)}
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
    return _scans(equation, parts, levels, outer.fresh)


def _scans(
    equation: Equation, parts: Mapping[int, Part], levels: Mapping[int, int], fresh: Fresh
) -> list[tuple[int, Equation]]:
    """A scan per part of its body; `levels` has those of its live outputs, by position."""
    op = equation.op
    assert isinstance(op, Scan)
    stop = op.num_consts + op.num_carry
    rows = list(zip(op.body.inputs, equation.args, strict=True))
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
        consts = [row for row in rows[: op.num_consts] if row[0] in read]
        carry = [rows[op.num_consts + position] for position in mine]
        xs = [row for row in rows[stop:] if row[0] in read]
        xs += [(value, stacks[value]) for value in part.arrivals]
        given, out = [*consts, *carry, *xs], [*(results[position] for position in mine), *ys]
        body = Block(tuple(v for v, _ in given), part.equations, tuple(v for v, _ in out))
        scan = replace(op, body=body, num_consts=len(consts), num_carry=len(carry))
        around = tuple(operand for _, operand in given)
        made.append((level, Equation(scan, around, {}, tuple(r for _, r in out), equation.where)))
    return made
