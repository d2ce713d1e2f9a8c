"""Propagation: from the placements of inputs to those of all values, and the moves in between.

Three passes over a block. `Spread` goes forward: it follows which values each split of an input
could reach, and how many bytes of them. `wishes` goes backward: from pins (outputs, constrained
values) and from readers of a value, it finds how the value would best be split; partial sums are
scattered so. The third decides, equation by equation.

A decision gives each letter of a rule the axes that split it. An axis that comes with one letter
stays on it, and operands that are replicated along it are sliced, which costs nothing. Where one
axis comes with several letters, the split that reaches further through the program stays, and
operands split otherwise are gathered: an axis that splits the batch gathers parameters (fully
sharded data parallelism), and one that splits parameters gathers activations (tensor and sequence
parallelism). Where none reaches further, bytes, or seconds, decide, and candidates within a tenth
of each other are refused: `functron.constrain` settles them. Partial sums that are read once pass
through linear operations that make them no larger; others are reduced once, for all readers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from functron.partitioning.backward import BACKWARD, Pullback, pull_back_rule
from functron.partitioning.global_view import TransformCall
from functron.partitioning.labels import Labels, MakeRule, PartitionRule
from functron.partitioning.placement import (
    SUM,
    CollectiveCost,
    Digit,
    Digits,
    Reduction,
    Sizes,
    ValuePlacement,
    blocks_outside,
    bytes_sent,
    fits,
    from_letters,
    local_shape,
    placement_of,
    spec_of,
)
from functron.partitioning.rules import rule_of, whole
from functron.partitioning.shards import EquationSite
from functron.program.equations import Block, Equation, Scan, Var, Where
from functron.spmd.spec import P

Slot = tuple[str, int]
"""A letter, and the blocks of it outside of an axis that splits it."""

DimBlocks = tuple[int, int]
"""A dim, and the blocks of it outside of an axis that splits it."""


@dataclass(frozen=True)
class PartitionSettings:
    """How a program is partitioned.

    Attributes:
        sizes: of the mesh axes with more than one rank.
        rules: of the caller, by operation.
        fallback: "replicate": operations without a rule run on replicated operands.
        pick: "cheapest": of candidates that cost alike the cheapest, or the first, is taken.
        cost: the seconds of collectives; None: they cost the bytes that a rank sends.
        pins: the specs that `constrain` was called with, by number.
    """

    sizes: Sizes
    rules: Mapping[str, MakeRule] = field(default_factory=dict)
    fallback: Literal["replicate"] | None = None
    pick: Literal["cheapest"] | None = None
    cost: CollectiveCost | None = None
    pins: Sequence[P] = ()

    def pin(self, equation: Equation) -> P:
        """The spec of a `constrain`."""
        number: int = equation.args[1]
        return self.pins[number]

    def price(self, op: str, axis: str, payload_bytes: int) -> float:
        """The cost of one collective, in seconds or in the bytes that a rank sends."""
        if self.cost is None:
            return bytes_sent(op, self.sizes[axis], payload_bytes)
        found = self.cost(op, axis, payload_bytes)
        if not 0 <= found < math.inf:
            raise ValueError(
                f"partition: cost({op!r}, {axis!r}, {payload_bytes}) is {found}; wanted seconds, 0 "
                "or more"
            )
        return found

    def cost_text(self, cost: float) -> str:
        """``256 bytes``, or ``1.5 us``."""
        return f"{cost:,.0f} bytes" if self.cost is None else f"{cost * 1e6:.4g} us"

    def rule(self, equation: Equation) -> PartitionRule:
        """The rule of an equation.

        Raises:
            ValueError: there is none.
        """
        if isinstance(equation.op, Pullback):
            return pull_back_rule(equation, self.rule(equation.op.forward))
        found = rule_of(equation, self.rules if equation.name in self.rules else BACKWARD)
        if found is not None:
            return found
        if self.fallback == "replicate":
            return whole(equation)
        raise ValueError(_no_rule(equation))


_IN_SHAPE = "torch.where(mask, values, x), with values in the shape of x"
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "index_put": f"{_IN_SHAPE}: where they are written by a mask, how many places are true is "
        "not known before it runs, and differs by rank; or ",
        "masked_scatter": f"{_IN_SHAPE}: here each goes to a place that depends on how many before "
        "it are true; or ",
        "put": "an index of each dim, x[i, j] = values; or ",
    }
)
"""Code in place of operations that cannot be divided, or not always."""


def _no_rule(equation: Equation) -> str:
    name = equation.name
    shapes = ", ".join(str(list(value.shape)) for value in equation.operands)
    results = ", ".join(str(list(value.shape)) for value in equation.results)
    hint = (
        "differentiate with ft.value_and_grad or ft.grad inside the function, or outside of what "
        "partition returned; or "
        if "backward" in name
        else _INSTEAD.get(name, "")
    )
    return (
        f"partition: at {equation.where.line or 'an unknown line'} the function runs {name} "
        f"({equation.op}) on {shapes} to {results}, for which there is no rule; wanted how its "
        f"dims belong together; fix: {hint}pass rules={{{name!r}: rule}} with a rule of "
        'functron.partitioning, such as product("mk,kn->mn") of its dims, pointwise(), or a '
        "function of the equation that returns a PartitionRule; "
        'or fallback="replicate", which gathers its operands'
    )


class Move(NamedTuple):
    """A value taken from one placement to another.

    Attributes:
        equal: axes over which it is summed, and over which its cotangents are equal on all ranks.
    """

    var: Var
    source: ValuePlacement
    target: ValuePlacement
    equal: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class LocalEquation:
    """An equation as a rank runs it.

    Attributes:
        equation: in global view.
        moves: of operands, before it.
        operands, results: the placements in which they are read, and come.
        rule, site: of an operation.
        body: of a scan or a call.
        backward: of a custom_vjp.
        after: moves of results to the specs of `constrain`.
    """

    equation: Equation
    moves: tuple[Move, ...]
    operands: tuple[ValuePlacement, ...]
    results: tuple[ValuePlacement, ...]
    rule: PartitionRule | None = None
    site: EquationSite | None = None
    body: LocalBlock | None = None
    backward: LocalBlock | None = None
    after: tuple[Move, ...] = ()


class JointGather(NamedTuple):
    """Moves of values of a block that are gathered together, over one mesh axis."""

    axis: str
    moves: tuple[Move, ...]
    where: Where


@dataclass(frozen=True, eq=False)
class LocalBlock:
    """A block as a rank runs it.

    Attributes:
        block: in global view.
        inputs, outputs: their placements; None for outputs that are no values.
        moves: of outputs, at the end.
        gathers: of inputs and of views of them.
        num_views: how many steps, those that make these views, run before `gathers`.
    """

    block: Block
    inputs: tuple[ValuePlacement, ...]
    steps: tuple[LocalEquation, ...]
    moves: tuple[Move, ...]
    outputs: tuple[ValuePlacement | None, ...]
    gathers: tuple[JointGather, ...] = ()
    num_views: int = 0


# --- forward: what reaches how far


class Spread:
    """For every value the places where axes could split it, with the inputs that they come from.

    Attributes:
        places: by value and axis the places, each with a set of inputs as bits.
    """

    def __init__(self, settings: PartitionSettings, block: Block, inputs: Sequence[ValuePlacement]):
        self.settings = settings
        self.places: dict[Var, dict[str, dict[DimBlocks, int]]] = {
            var: {axis: {place: 1 << bit} for axis, place in placement.split.items()}
            for bit, (var, placement) in enumerate(zip(block.inputs, inputs, strict=True))
        }
        self._bytes: dict[tuple[str, int], int] = {}  # per axis and set of inputs
        self.block(block)

    def reach(self, var: Var, axis: str, place: DimBlocks) -> int:
        """The bytes of values that the split of `var` comes to, from the furthest of its inputs."""
        mask = self.places.get(var, {}).get(axis, {}).get(place, 0)
        best = 0
        for bit in (bit for bit in range(mask.bit_length()) if mask >> bit & 1):
            reached = sum(
                size
                for (name, others), size in self._bytes.items()
                if name == axis and others >> bit & 1
            )
            best = max(best, reached)
        return best

    def block(self, block: Block) -> None:
        """Follow the splits of its inputs through a block."""
        for equation in block.equations:
            if isinstance(equation.op, (Scan, TransformCall)):
                self._body(equation)
                continue
            rule = self.settings.rule(equation)
            reached = letters_of(rule, equation.operands, self.places)
            for var, labels in zip(equation.results, rule.results, strict=True):
                found = self.places[var] = {}
                for axis, row in reached.items():
                    for slot, mask in row.items():
                        place = place_of(labels, rule.sizes, slot)
                        if place is not None:
                            found.setdefault(axis, {})[place] = mask
                            key = axis, mask
                            self._bytes[key] = self._bytes.get(key, 0) + var.nbytes

    def _body(self, equation: Equation) -> None:
        op: Any = equation.op
        body = op.body
        scanned = isinstance(op, Scan)
        first_x = op.num_consts + op.num_carry if scanned else len(body.inputs)
        for i, (inner, outer) in enumerate(zip(body.inputs, equation.operands, strict=True)):
            self.places[inner] = _shift_places(self.places.get(outer, {}), -(i >= first_x))
        for _ in range(2 if scanned else 1):
            self.block(body)
            if scanned:
                carry = body.inputs[op.num_consts : first_x]
                for inner, out in zip(carry, body.outputs, strict=False):
                    for axis, row in self.places.get(out, {}).items():
                        mine = self.places[inner].setdefault(axis, {})
                        for place, mask in row.items():
                            mine[place] = mine.get(place, 0) | mask
        if not scanned and op.backward is not None:
            self._backward(equation, op)
        for i, (result, out) in enumerate(zip(equation.results, body.outputs, strict=False)):
            found = self.places.get(out, {}) if isinstance(out, Var) else {}
            self.places[result] = _shift_places(found, int(scanned and i >= op.num_carry))
        if not scanned and op.num_moving:
            grads = equation.results[len(body.outputs) :]
            for result, outer in zip(grads, equation.operands, strict=False):
                self.places[result] = self.places.get(outer, {})

    def _backward(self, equation: Equation, op: TransformCall) -> None:
        assert op.backward is not None
        made = op.body.outputs
        sources = [*made[op.num_outputs :], *(made[i] for i in op.floats)]
        count = len(op.backward.inputs) - len(sources)
        sources += equation.operands[len(equation.operands) - count :]
        for inner, source in zip(op.backward.inputs, sources, strict=True):
            self.places[inner] = _shift_places(self.places.get(source, {}), 0)
        self.block(op.backward)


def _shift_places(found: Mapping, by: int) -> dict:
    """Places in the same dims with one more leading dim (1), or in a slice along it (-1)."""
    return {
        axis: {(dim + by, outer): mask for (dim, outer), mask in row.items() if dim + by >= 0}
        for axis, row in found.items()
    }


def letters_of(
    rule: PartitionRule,
    operands: Sequence[Var],
    places: Mapping[Var, Mapping[str, Mapping[DimBlocks, int]]],
) -> dict[str, dict[Slot, int]]:
    """The slots of an equation's letters that the places of operands are, by axis."""
    found: dict[str, dict[Slot, int]] = {}
    for var, labels in zip(operands, rule.operands, strict=True):
        for axis, row in places.get(var, {}).items():
            for (dim, outer), mask in row.items():
                slot = slot_of(labels[dim], rule.sizes, outer)
                if slot is not None and rule.allows(slot[0], axis):
                    mine = found.setdefault(axis, {})
                    mine[slot] = mine.get(slot, 0) | mask
    return found


def slot_of(letters: Sequence[str], sizes: Mapping[str, int], outer: int) -> Slot | None:
    """The letter of a dim in which a place is; None where it is in none."""
    start = 1
    for letter in letters:
        end = start * sizes[letter]
        if start <= outer < end:
            return (letter, outer // start) if outer % start == 0 else None
        start = end
    return None


def place_of(labels: Labels, sizes: Mapping[str, int], slot: Slot) -> DimBlocks | None:
    """The place of a slot in a value with these labels, if it has the letter; see `slot_of`."""
    for dim, letters in enumerate(labels):
        if slot[0] in letters:
            before = letters[: letters.index(slot[0])]
            return dim, slot[1] * math.prod(sizes[letter] for letter in before)
    return None


# --- backward: how values would best be split


Wishes = dict[Var, dict[str, DimBlocks]]


def wishes(settings: PartitionSettings, block: Block, spread: Spread, pins: Wishes) -> Wishes:
    """For every value the places where pins, and what is computed with it, ask for a split."""
    found: Wishes = {var: dict(row) for var, row in pins.items()}
    for equation in reversed(block.equations):
        if isinstance(equation.op, (Scan, TransformCall)):
            continue
        rule = settings.rule(equation)
        slots: dict[str, Slot] = {}
        if len(equation.operands) > 1 and not rule.combined:
            # what other operands bring, such as optimizer state split further than a gradient
            reached = letters_of(rule, equation.operands, spread.places)
            slots = {axis: next(iter(row)) for axis, row in reached.items() if row}
        for var, labels in zip(equation.results, rule.results, strict=True):
            row = found.get(var, {})
            if equation.name == "constrain":
                placement = placement_of(settings.pin(equation), len(var.shape), settings.sizes)
                row = placement.split
            for axis, (dim, outer) in row.items():
                slot = slot_of(labels[dim], rule.sizes, outer)
                if slot is not None:
                    slots[axis] = slot
        for var, labels in zip(equation.operands, rule.operands, strict=True):
            for axis, slot in slots.items():
                place = place_of(labels, rule.sizes, slot)
                if place is not None:
                    found.setdefault(var, {})[axis] = place
    return found


# --- deciding


def plan_block(
    block: Block,
    settings: PartitionSettings,
    inputs: Sequence[ValuePlacement],
    outputs: Sequence[ValuePlacement | None],
) -> LocalBlock:
    """The plan of a program's block; placements of inputs and outputs are as of `Planner.plan`."""
    return Planner(settings, Spread(settings, block, inputs)).plan(block, inputs, outputs)


class Planner:
    """Decides where all values of a program lie."""

    def __init__(self, settings: PartitionSettings, spread: Spread):
        self.settings, self.spread, self.sizes = settings, spread, settings.sizes

    def plan(
        self,
        block: Block,
        inputs: Sequence[ValuePlacement],
        outputs: Sequence[ValuePlacement | None],
        *,
        partial: bool = False,
    ) -> LocalBlock:
        """The plan of a block.

        Args:
            inputs: the placements of inputs.
            outputs: those that outputs must have; None: as they come, without partial values and
                dims that are split inside of blocks.
            partial: outputs without a placement may be partial.
        """
        pins: Wishes = {}
        for value, placement in zip(block.outputs, outputs, strict=True):
            if placement is not None and isinstance(value, Var):
                pins[value] = placement.split
        state = _State(self, block, wishes(self.settings, block, self.spread, pins))
        state.placed.update(zip(block.inputs, inputs, strict=True))
        steps = [state.step(equation) for equation in block.equations]
        moves, placed = [], []
        for value, wanted in zip(block.outputs, outputs, strict=True):
            if not isinstance(value, Var):
                placed.append(None)
                continue
            source = state.placed[value]
            target = wanted or (source if partial else self._as_spec(source))
            if target != source:
                moves.append(Move(value, source, target))
            placed.append(target)
        return LocalBlock(block, tuple(inputs), tuple(steps), tuple(moves), tuple(placed))

    def _as_spec(self, placement: ValuePlacement) -> ValuePlacement:
        """The nearest placement that a spec can express."""
        placement = placement.whole
        while spec_of(placement, self.sizes) is None:
            bad = next(
                digits
                for digits in placement.dims
                if spec_of(ValuePlacement((digits,)), self.sizes) is None
            )
            placement = placement.without(bad[-1].axis)
        return placement


class _State:
    """Where the values of one block lie so far."""

    def __init__(self, planner: Planner, block: Block, wanted: Wishes):
        self.planner, self.settings = planner, planner.settings
        self.readers = Counter(v for e in block.equations for v in {*e.operands})
        self.readers.update(v for v in block.outputs if isinstance(v, Var))
        self.sizes, self.wanted = planner.sizes, wanted
        self.placed: dict[Var, ValuePlacement] = {}
        self.copies: dict[Var, list[ValuePlacement]] = {}

    def step(self, equation: Equation) -> LocalEquation:
        """Decide one equation."""
        if isinstance(equation.op, Scan):
            return self._scan(equation, equation.op)
        if isinstance(equation.op, TransformCall):
            return self._call(equation, equation.op)
        rule = self.settings.rule(equation)
        operands, results, letters = AxisChoice(self, equation, rule).decide()
        moves = self._moves(equation.operands, operands)
        shapes = [
            local_shape(var.shape, placement, self.sizes)
            for var, placement in zip(equation.results, results, strict=True)
        ]
        site = EquationSite(equation, rule.operands, letters, rule.sizes, shapes, self.sizes)
        self.placed.update(zip(equation.results, results, strict=True))
        after = self._pin(equation) if equation.name == "constrain" else ()
        return LocalEquation(equation, moves, operands, results, rule, site, after=after)

    def _moves(self, operands: Sequence[Var], wanted: Sequence[ValuePlacement]) -> tuple[Move, ...]:
        moves = []
        for var, target in zip(operands, wanted, strict=True):
            source = self.placed[var]
            if target == source or target in self.copies.get(var, ()):
                continue
            moves.append(Move(var, source, target))
            self.copies.setdefault(var, []).append(target)
            if source.partial and not target.partial:
                # reduced once, for whatever else reads it
                self.copies[var].append(source)
                self.placed[var] = target
        return tuple(moves)

    def _pin(self, equation: Equation) -> tuple[Move, ...]:
        (var,) = equation.results
        spec = self.settings.pin(equation)
        source, target = self.placed[var], placement_of(spec, len(var.shape), self.sizes)
        for dim, (digits, size) in enumerate(zip(target.dims, var.shape, strict=True)):
            if not fits(digits, size, self.sizes):
                ranks = math.prod(self.sizes[digit.axis] for digit in digits)
                below = size - size % ranks
                nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
                raise ValueError(
                    f"partition: at {equation.where.line} got constrain to {spec} of shape "
                    f"{tuple(var.shape)}, whose dim {dim} of {size} the {ranks} ranks of "
                    f"{spec[dim]!r} do not divide; wanted a multiple of {ranks}, such as "
                    f"{nearest}; fix: choose sizes that give one of these, pad the dim to "
                    f"{below + ranks} in the function and mask what is added, or constrain another"
                )
        self.placed[var] = target
        return (Move(var, source, target),) if source != target else ()

    def _scan(self, equation: Equation, op: Scan) -> LocalEquation:
        given = [self.placed[var] for var in equation.operands]
        start = op.num_consts + op.num_carry
        consts = [placement.whole for placement in given[: op.num_consts]]
        columns = [ValuePlacement(placement.dims[1:]) for placement in given[start:]]
        carry = [placement.whole for placement in given[op.num_consts : start]]
        free = [None] * len(op.body.outputs)
        for _ in range(3):  # until it comes out as it went in
            plan = self.planner.plan(op.body, [*consts, *carry, *columns], free)
            after = _place_outputs(plan.outputs[: op.num_carry])
            if after == carry:
                break
            carry = after
        carry = self._keep_sums_partial(op, plan, consts, carry, columns)
        ys = plan.outputs[op.num_carry :]
        plan = self.planner.plan(op.body, [*consts, *carry, *columns], [*carry, *ys])
        wanted = [*consts, *carry, *(ValuePlacement(((), *p.dims)) for p in columns)]
        moves = self._moves(equation.operands, wanted)
        results = [*carry, *(ValuePlacement(((), *p.dims)) for p in _place_outputs(ys))]
        self.placed.update(zip(equation.results, results, strict=True))
        return LocalEquation(equation, moves, tuple(wanted), tuple(results), body=plan)

    def _keep_sums_partial(
        self, op: Scan, plan: LocalBlock, consts, carry, columns
    ) -> list[ValuePlacement]:
        """The placements of the carry, of which sums that are only added to stay partial."""
        reads = Counter(v for e in op.body.equations for v in e.operands)
        made = {var: step for step in plan.steps for var in step.equation.results}
        found = list(carry)
        pairs = zip(op.body.inputs[op.num_consts :], op.body.outputs[: op.num_carry], strict=False)
        for i, (before, after) in enumerate(pairs):
            step = made.get(after)
            if step is None or step.equation.name != "add" or before not in step.equation.operands:
                continue
            for each in step.moves:
                reduced = each.source.partial and each.var is not before
                if reduced and reads[before] == 1 and each.source.dims == carry[i].dims:
                    found[i] = each.source
        if found == carry:
            return carry
        inputs, free = [*consts, *found, *columns], [None] * len(op.body.outputs)
        again = self.planner.plan(op.body, inputs, free, partial=True)
        return found if _place_outputs(again.outputs[: op.num_carry]) == found else carry

    def _call(self, equation: Equation, op: TransformCall) -> LocalEquation:
        operands = [self.placed[var].whole for var in equation.operands]
        moves = self._moves(equation.operands, operands)
        if op.backward is not None:
            return self._custom_vjp(equation, op, operands, moves)
        pins: list[ValuePlacement | None] = [None] * len(op.body.outputs)
        if op.num_moving:
            pins[0] = ValuePlacement(())
        plan = self.planner.plan(op.body, operands, pins)
        results = [*_place_outputs(plan.outputs), *map(self._share, operands[: op.num_moving])]
        self.placed.update(zip(equation.results, results, strict=True))
        return LocalEquation(equation, moves, tuple(operands), tuple(results), body=plan)

    def _custom_vjp(self, equation: Equation, op: TransformCall, operands, moves) -> LocalEquation:
        """A custom_vjp: forward, and backward from the placements of residuals and results."""
        plan = self.planner.plan(op.body, operands, [None] * len(op.body.outputs))
        made = _place_outputs(plan.outputs)
        outs, residuals = made[: op.num_outputs], made[op.num_outputs :]
        assert op.backward is not None
        captured = operands[len(operands) - len(op.backward.inputs) + len(residuals)
                            + len(op.floats) :]  # fmt: skip
        cotangents = [self._share(outs[i]) for i in op.floats]
        shares = [self._share(operands[i]) for i in op.pulled]
        inputs = [*residuals, *cotangents, *captured]
        back = self.planner.plan(op.backward, inputs, shares)
        self.placed.update(zip(equation.results, outs, strict=True))
        return LocalEquation(
            equation, moves, tuple(operands), tuple(outs), body=plan, backward=back
        )

    def _share(self, placement: ValuePlacement) -> ValuePlacement:
        """The placement of a rank's share of the cotangent of a value with this one."""
        rest = [(axis, SUM) for axis in self.sizes if axis not in placement.split]
        return replace(placement, partial=tuple(rest))


def _place_outputs(outputs: Sequence[ValuePlacement | None]) -> list[ValuePlacement]:
    return [placement or ValuePlacement(()) for placement in outputs]


def _has(labels: Labels, letter: str) -> bool:
    return any(letter in letters for letters in labels)


class AxisChoice:
    """The axes of the letters of one equation, decided axis by axis."""

    def __init__(self, state: _State, equation: Equation, rule: PartitionRule):
        self.state, self.equation, self.rule = state, equation, rule
        self.settings, self.sizes = state.settings, state.sizes
        self.placed = [state.placed[v] for v in equation.operands]
        self.rows = [*zip(equation.operands, rule.operands, self.placed, strict=True)]
        self.letters: dict[str, Digits] = {}
        self.passing: dict[str, Reduction] = {}

    def decide(
        self,
    ) -> tuple[tuple[ValuePlacement, ...], tuple[ValuePlacement, ...], dict[str, Digits]]:
        """Where operands are read and results come, and the axes of letters."""
        for axis in self.sizes:
            slot = self._slot(axis)
            for letter, outer in () if slot is None else (slot, *self._beside(axis, slot[0])):
                digits = (*self.letters.get(letter, ()), Digit(outer, axis))
                self.letters[letter] = tuple(sorted(digits))
        linear, passing = self._linear(), tuple(self.passing.items())
        operands = tuple(
            ValuePlacement(self._dims(labels), passing if i in linear else ())
            for i, labels in enumerate(self.rule.operands)
        )
        results = tuple(
            ValuePlacement(self._dims(row), self._sums(row)) for row in self.rule.results
        )
        return operands, results, self.letters

    def _sums(self, labels: Labels) -> tuple[tuple[str, Reduction], ...]:
        """How ranks hold parts of a result: of combined letters that it lacks, and what passes."""
        sums: dict[str, Reduction] = dict(self.passing)
        for letter, kind in self.rule.combined.items():
            for digit in self.letters.get(letter, ()) if not _has(labels, letter) else ():
                sums[digit.axis] = kind
        return tuple((axis, sums[axis]) for axis in self.sizes if axis in sums)

    def _dims(self, labels: Labels) -> tuple[Digits, ...]:
        sizes = self.rule.sizes
        return tuple(
            from_letters((sizes[letter], self.letters.get(letter, ())) for letter in letters)
            for letters in labels
        )

    def _linear(self) -> frozenset[int]:
        """The operands that are partial where partial values pass."""
        axes = set(self.passing)
        found = (i for i, p in enumerate(self.placed) if axes & {axis for axis, _ in p.partial})
        return frozenset(found)

    def _slot(self, axis: str) -> Slot | None:
        """The letter that an axis splits, and where."""
        slots: dict[Slot, list[int]] = {}
        for i, (_, labels, placement) in enumerate(self.rows):
            slot = self._slot_at(axis, labels, placement.split.get(axis))
            if slot is not None:
                slots.setdefault(slot, []).append(i)
        for slot in [slot for slot in slots if slot[0] in self.rule.beside]:
            del slots[slot]
            main = self._innermost(axis, self.rule.beside[slot[0]])
            if not slots and main is not None:  # a slice of what all ranks have
                return main
        if not slots:
            return self._without_split(axis)
        if len(slots) > 1:
            return self._choose_slot(axis, slots)
        ((slot, holders),) = slots.items()
        if slot[0] in self.rule.combined:
            others = any(
                i not in holders and any(slot[0] in dim for dim in labels)
                for i, labels in enumerate(self.rule.operands)
            )
            if others and self.cost(axis, slot) > self.cost(axis, None):
                return None
        return slot

    def _beside(self, axis: str, letter: str) -> list[Slot]:
        """The slots of letters that the axis splits besides this one."""
        found = {}
        for _, labels, placement in self.rows:
            slot = self._slot_at(axis, labels, placement.split.get(axis))
            if slot is not None and self.rule.beside.get(slot[0]) == letter:
                found[slot[0]] = slot
        return list(found.values())

    def _slot_at(self, axis: str, labels: Labels, place: DimBlocks | None) -> Slot | None:
        """The letter of a value's dim that a place is in, if the axis may split it."""
        if place is None:
            return None
        return self._valid(axis, slot_of(labels[place[0]], self.rule.sizes, place[1]))

    def _innermost(self, axis: str, letter: str) -> Slot | None:
        """A letter, split inside of the axes that split it already, if this one may."""
        before = self.letters.get(letter, ())
        return self._valid(axis, (letter, blocks_outside(before, self.sizes)))

    def _valid(self, axis: str, slot: Slot | None) -> Slot | None:
        """`slot`, where the rule, the size and axes decided before allow it; or the nearest."""
        if slot is None or not self.rule.may_split(slot[0], axis):
            return None
        letter, _ = slot
        before, size = self.letters.get(letter, ()), self.rule.sizes[letter]
        for outer in (slot[1], blocks_outside(before, self.sizes)):
            digits = tuple(sorted((*before, Digit(outer, axis))))
            if fits(digits, size, self.sizes):
                return letter, outer
        return None

    def _without_split(self, axis: str) -> Slot | None:
        """The slot of an axis with partial values, or with dims that must be whole."""
        kinds = {i: dict(p.partial).get(axis) for i, p in enumerate(self.placed)}
        partial = frozenset(i for i, kind in kinds.items() if kind is not None)
        if partial:
            wished = self._wanted_slot(axis)
            if self._passes(axis, partial, kinds):
                self.passing[axis] = "sum"
                return None
            return wished
        for _, labels, placement in self.rows:
            place = placement.split.get(axis)
            for letter in labels[place[0]] if place is not None else ():
                slot = self._innermost(axis, letter)
                if slot is not None and self.rule.is_kept(letter):
                    return slot
        wished = self._wanted_slot(axis)  # of a dim that no operand has, such as of a table
        if wished and not any(_has(labels, wished[0]) for labels in self.rule.operands):
            return wished
        return None

    def _passes(self, axis: str, partial: frozenset[int], kinds: Mapping) -> bool:
        if any(kinds[i] != "sum" for i in partial) or partial not in self.rule.linear:
            return False
        # all axes that pass must do so through the same operands
        if self.passing and self._linear() != partial:
            return False
        values = {self.equation.operands[i] for i in partial}
        if any(self.state.readers[var] > 1 for var in values):
            return False
        before = sum(var.nbytes for var in values)
        return sum(var.nbytes for var in self.equation.results) <= before

    def _wanted_slot(self, axis: str) -> Slot | None:
        """The slot that readers of the result, or of the operand, want."""
        wanted = self.state.wanted
        rows = [
            *zip(self.equation.results, self.rule.results, strict=True),
            *zip(self.equation.operands, self.rule.operands, strict=True),
        ]
        for var, labels in rows:
            slot = self._slot_at(axis, labels, wanted.get(var, {}).get(axis))
            if slot is not None and self.rule.is_kept(slot[0]):
                return slot
        return None

    def _choose_slot(self, axis: str, slots: Mapping[Slot, list[int]]) -> Slot:
        """One of several letters that an axis comes with."""
        reached = {}
        for slot, holders in slots.items():
            split = [(self.equation.operands[i], self.placed[i].split[axis]) for i in holders]
            reached[slot] = max(
                self.state.planner.spread.reach(v, axis, place) for v, place in split
            )
        first, second = sorted(reached.values(), reverse=True)[:2]
        best = max(slots, key=reached.__getitem__)
        one_letter = len({letter for letter, _ in slots}) == 1
        if second < 0.9 * first or one_letter:
            return best
        costs = {slot: self.cost(axis, slot) for slot in slots}
        cheapest = min(costs, key=costs.__getitem__)
        alike = [slot for slot in costs if costs[slot] <= 1.1 * costs[cheapest]]
        if len(alike) > 1 and self.settings.pick is None:
            raise ValueError(self._ambiguous(axis, costs))
        return cheapest

    def cost(self, axis: str, slot: Slot | None) -> float:
        """The cost of splitting this letter by an axis: moves of operands, sums of results."""
        n, price, total = self.sizes[axis], self.settings.price, 0.0
        seen: set[Var] = set()
        for var, labels, placement in self.rows:
            if var in seen:
                continue
            seen.add(var)
            target = None if slot is None else place_of(labels, self.rule.sizes, slot)
            source = placement.split.get(axis)
            kind = dict(placement.partial).get(axis)
            if any(
                copy.split.get(axis) == target and axis not in dict(copy.partial)
                for copy in self.state.copies.get(var, ())
            ):
                continue
            held = var.nbytes // math.prod(self.sizes[a] for a in placement.split if a != axis)
            if kind is not None:
                total += price("psum_scatter" if target else f"p{kind}", axis, held)
            elif source is not None and target != source:
                op, payload = ("all_to_all", held // n) if target else ("all_gather", held)
                total += price(op, axis, payload)
        if slot is not None and slot[0] in self.rule.combined:
            op = f"p{self.rule.combined[slot[0]]}"
            for var, labels in zip(self.equation.results, self.rule.results, strict=True):
                if _has(labels, slot[0]):
                    continue
                split = [d.axis for dim in labels for x in dim for d in self.letters.get(x, ())]
                ranks = math.prod(self.sizes[name] for name in split if name != axis)
                total += price(op, axis, var.nbytes // ranks)
        return total

    def _ambiguous(self, axis: str, costs: Mapping[Slot, float]) -> str:
        lines = []
        for slot, cost in costs.items():
            pins = []
            for var, labels, placement in self.rows:
                place = place_of(labels, self.rule.sizes, slot)
                target = placement.without(axis)
                target = target if place is None else target.splitting(axis, *place)
                if target != placement:
                    spec = spec_of(target.whole, self.sizes)
                    pins.append(
                        f"ft.constrain(x, {spec}) of its operand of shape {tuple(var.shape)}"
                    )
            lines.append(
                f"  - {axis!r} on {self._where(slot)}: {self.settings.cost_text(cost)}; "
                f"{' and '.join(pins)}"
            )
        where = self.equation.where.line or "an unknown line"
        operands = ", ".join(map(str, self.placed))
        by_bytes, hint = self.settings.cost is None, ""
        costs_are = "bytes that a rank sends" if by_bytes else "time that a rank communicates"
        if self.equation.name == "bmm":
            hint = (
                f"; where these are queries and keys of a sequence that {axis!r} splits, call "
                "torch.nn.functional.scaled_dot_product_attention, and pass "
                f'attention={{{axis!r}: "ring"}}'
            )
        return (
            f"partition: at {where} {self.equation.name} gets operands {operands}, which axis "
            f"{axis!r} splits along different dims, and no choice is better than the others. "
            f"Candidates, with the {costs_are}, and the line that settles it:\n"
            + "\n".join(lines)
            + '\nor pass pick="cheapest" to partition'
            + hint
        )

    def _where(self, slot: Slot) -> str:
        rows = [(f"operand {i}", labels) for i, labels in enumerate(self.rule.operands)]
        rows += [(f"result {i}", labels) for i, labels in enumerate(self.rule.results)]
        return ", ".join(
            f"dim {dim} of {what}"
            for what, labels in rows
            for dim, letters in enumerate(labels)
            if slot[0] in letters
        )
