"""Search: the specs of parameters that send least within a bound of memory, by integer programming.

`partition` derives a program from specs; `search` finds these, by the same rules and costs. Along
each axis an equation has a few strategies, those of its rule: one letter is split, none is, or
partial sums pass. A value has the placement of its equation's strategy, and is moved once to each
placement that readers want. Costs are of moves, forward and backward, and of the sums of gradients
of parameters that an axis does not split; the bound is on a rank's bytes of parameters. This is the
intra-operator level of Alpa (Zheng et al. 2022, section 4), where each reader pays for its move.
HiGHS (Huangfu and Hall 2018) solves it, by `scipy.optimize.milp`.

Only specs are decided, and `partition` derives the program from them; a strategy is therefore
allowed only where an operand arrives split so, which is when `partition` would take it. Products
are always divided where they can be: computing all of one on every rank costs no bytes.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functron.core import tree
from functron.core.errors import Problem, public, raise_problems
from functron.partitioning.global_view import (
    TransformCall,
    fake_leaves,
    global_program,
    inline_views,
)
from functron.partitioning.labels import MakeRule, PartitionRule
from functron.partitioning.placement import CollectiveCost, local_shape, placement_of
from functron.partitioning.propagate import (
    DimBlocks,
    PartitionSettings,
    place_of,
    plan_block,
    slot_of,
)
from functron.program.cost import equation_flops
from functron.program.equations import Block, Equation, Scan, Var
from functron.spmd.mesh import Mesh
from functron.spmd.spec import P, is_spec

AxisState = DimBlocks | str
"""Along one axis a value is split at a place, or is one of these."""

WHOLE, PARTIAL = "whole", "partial"


@dataclass(frozen=True)
class FoundSpecs:
    """Specs that `search` found.

    Attributes:
        specs: of the argument that was searched, in its structure.
        cost: of moves and sums, forward and backward, in bytes that a rank sends, or in seconds.
        memory_bytes: what a rank holds of the argument.
    """

    specs: tree.Tree
    cost: float
    memory_bytes: int


@dataclass(frozen=True)
class _Strategy:
    """A way to divide one equation along one axis.

    Attributes:
        operands, results: the state in which each is read, and comes.
        splits: whether it splits a letter, which an operand must arrive with.
    """

    operands: tuple[AxisState, ...]
    results: tuple[AxisState, ...]
    splits: bool


@public
def search(
    fn: Callable,
    mesh: Mesh,
    in_specs: tree.Tree,
    *args: tree.Tree,
    axes: Sequence[str],
    memory_bytes: int,
    cost: CollectiveCost | None = None,
    rules: Mapping[str, MakeRule] | None = None,
) -> FoundSpecs:
    """The specs over `axes` of the first argument's leaves with which a step of `fn` costs least.

    For one layer, or a few; what holds for a layer holds for all of a stack.

    Args:
        fn: a function of whole values, without collectives, and without scans, remat and gradients.
            Of functions with a backward of their own what they compute forward counts.
            `functron.constrain` in it holds, such as of a residual stream that is split.
        in_specs: prefix trees of specs of the other arguments, and of the first over other axes.
        args: arguments, which may be abstract. The first is a tree of tensors, of which those of
            floating point are searched.
        axes: of the mesh, of more than one rank; each splits at most one dim of a leaf, and no dim
            that another axis splits.
        memory_bytes: what a rank may hold of the first argument. Gradients and moments lie as it
            does: for a budget of all of them, a part of it.
        cost, rules: as of `partition`.

    Raises:
        ValueError: an axis is not one of the mesh; `fn` has calls of transforms; nothing fits.
        ModuleNotFoundError: scipy is not installed: ``pip install "functron[search]"``.
    """
    _check(mesh, args[:1], axes, memory_bytes)
    leaves, structure = tree.flatten(args)
    specs = tree.broadcast_prefix(tuple(in_specs), args, is_leaf=is_spec, what="in_specs")
    rows = [(x, s) for x, s in zip(leaves, specs, strict=True) if isinstance(x, torch.Tensor)]
    fakes = fake_leaves(leaves, [getattr(x, "shape", ()) for x in leaves])
    program, pins, _ = global_program(fn, tree.unflatten(structure, fakes))
    block = inline_views(_inline_rules(program.block))
    _refuse_calls(block)
    own = [i.var for i in program.inputs if i.role == "argument"]
    given = {var: spec for var, (_, spec) in zip(own, rows, strict=True)}
    first = own[: len(tree.leaves(args[0]))]
    searched = [v for v in first if v.dtype.is_floating_point]
    sizes = {name: size for name, size in mesh.axes if size > 1}
    settings = PartitionSettings(
        {a: sizes[a] for a in axes}, dict(rules or {}), None, "cheapest", cost, tuple(pins)
    )
    held = _bytes_by_value(
        block, given, {a: n for a, n in sizes.items() if a not in axes}, settings
    )
    model = _Model(block, settings, given, searched, held)
    chosen = model.solve(memory_bytes)
    found = [_spec(var, given[var], chosen.get(var, {})) for var in first]
    total = sum(model.memory(v, tuple(chosen[v].values())) for v in searched)
    return FoundSpecs(tree.unflatten(tree.flatten(args[0])[1], found), model.cost, total)


def _check(mesh: Mesh, args: tuple, axes: Sequence[str], memory_bytes: int) -> None:
    known = [name for name, size in mesh.axes if size > 1]
    problems = [
        Problem("axes", repr(axis), f"axes of more than one rank: {', '.join(known) or 'none'}")
        for axis in axes
        if axis not in known
    ]
    problems += [
        Problem(path, type(leaf).__name__, "a tensor", "pass it as another argument")
        for path, leaf in zip(tree.paths(args), tree.leaves(args), strict=True)
        if not isinstance(leaf, torch.Tensor)
    ]
    if memory_bytes <= 0:
        problems.append(Problem("memory_bytes", str(memory_bytes), "more than 0"))
    raise_problems("search", problems)


def _inline_rules(block: Block) -> Block:
    """The block, with the forward of a custom_vjp in the place of its call."""
    same: dict[Var, Var] = {}
    equations: list[Equation] = []

    def rename(equation: Equation, names: Mapping[Var, Var]) -> Equation:
        args, kwargs = pytree.tree_map_only(
            Var, lambda v: names.get(v, v), (equation.args, dict(equation.kwargs))
        )
        outputs = tuple(v and names.get(v, v) for v in equation.outputs)
        return replace(equation, args=args, kwargs=kwargs, outputs=outputs)

    for equation in (rename(each, same) if same else each for each in block.equations):
        op = equation.op
        if not (isinstance(op, TransformCall) and op.transform == "custom_vjp"):
            equations.append(equation)
            continue
        body = _inline_rules(op.body)
        inside = dict(zip(body.inputs, equation.operands, strict=True))
        same |= {
            result: inside.get(made, made)
            for result, made in zip(equation.results, body.outputs, strict=False)
            if isinstance(made, Var)
        }
        equations += [rename(each, inside) for each in body.equations]
    outputs = tuple(same.get(v, v) if isinstance(v, Var) else v for v in block.outputs)
    return replace(block, equations=tuple(equations), outputs=outputs)


def _refuse_calls(block: Block) -> None:
    for equation in block.equations:
        if isinstance(equation.op, (Scan, TransformCall)):
            raise ValueError(
                f"search: at {equation.where.line or 'an unknown line'} the function calls "
                f"{equation.name}; wanted a function without scans, remat and gradients; fix: "
                "search the specs of one layer's forward, which hold for all of a stack"
            )


def _bytes_by_value(
    block: Block, given: Mapping[Var, P], sizes: Mapping[str, int], settings: PartitionSettings
) -> dict[Var, int]:
    """The bytes of every value on a rank of a mesh of the axes that are not searched."""
    settings = replace(settings, sizes=sizes, cost=None)
    inputs = [placement_of(given.get(v, P()), len(v.shape), sizes) for v in block.inputs]
    plan = plan_block(block, settings, inputs, [None] * len(block.outputs))
    placed = dict(zip(block.inputs, inputs, strict=True))
    for step in plan.steps:
        placed.update(zip(step.equation.results, step.results, strict=True))
    return {
        var: math.prod(local_shape(var.shape, placement, sizes)) * var.dtype.itemsize
        for var, placement in placed.items()
    }


def _spec(var: Var, spec: P, states: Mapping[str, AxisState]) -> P:
    entries: list[Any] = [*spec, *(None for _ in var.shape)][: len(var.shape)]
    for axis, state in states.items():
        if isinstance(state, tuple):
            entries[state[0]] = axis
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def strategies(
    equation: Equation,
    rule: PartitionRule,
    axis: str,
    n: int,
    states: Sequence[Collection[AxisState]],
) -> list[_Strategy]:
    """The ways to divide an equation along an axis of n ranks; operands come in these states."""

    slots = {
        slot_of(labels[place[0]], rule.sizes, place[1]): None  # in order, each once
        for labels, places in zip(rule.operands, states, strict=True)
        for place in places
        if isinstance(place, tuple)
    }
    found = []
    for slot in slots:
        if slot is None or not rule.may_split(slot[0], axis) or rule.sizes[slot[0]] % (slot[1] * n):
            continue
        sides = rule.operands, rule.results
        operands, results = (
            tuple(place_of(labels, rule.sizes, slot) or WHOLE for labels in side) for side in sides
        )
        if slot[0] in rule.combined:
            results = (PARTIAL,) * len(rule.results)
        found.append(_Strategy(operands, results, True))
    if not (found and equation_flops(equation)):
        operands, results = (WHOLE,) * len(rule.operands), (WHOLE,) * len(rule.results)
        found.append(_Strategy(operands, results, False))
    for linear in rule.linear:
        before = sum(equation.operands[i].nbytes for i in linear)
        if sum(var.nbytes for var in equation.results) <= before:
            operands = tuple(PARTIAL if i in linear else WHOLE for i in range(len(rule.operands)))
            found.append(_Strategy(operands, (PARTIAL,) * len(rule.results), False))
    return found


class _Model:
    """The integer program, and the cost of its solution."""

    def __init__(self, block: Block, settings: PartitionSettings, given, searched, held):
        self.settings, self.held = settings, held
        self.costs: list[float] = []
        self.binary: list[bool] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.joint: dict[Var, dict[tuple[AxisState, ...], int]] = {}
        self.cost = 0.0
        self._sums: dict[tuple[str, Var], int] = {}
        for var in searched:
            self.joint[var] = self._placements(var, given[var])
        for axis in settings.sizes:
            self._axis(block, axis, given)

    def _variable(self, cost: float = 0.0, *, binary: bool = True) -> int:
        self.costs.append(cost)
        self.binary.append(binary)
        return len(self.costs) - 1

    def _row(self, terms: Mapping[int, float], low: float, high: float) -> None:
        self.rows.append((dict(terms), low, high))

    def memory(self, var: Var, states: Sequence[AxisState]) -> int:
        """The bytes of a leaf on a rank, split so."""
        sizes = zip(states, self.settings.sizes.values(), strict=True)
        return self.held[var] // math.prod(n for state, n in sizes if state != WHOLE)

    def _placements(self, var: Var, spec: P) -> dict[tuple[AxisState, ...], int]:
        """A variable for every way in which the axes can split a leaf: one of them is taken."""
        ways: list[list[AxisState]] = []
        for n in self.settings.sizes.values():
            taken = {dim for dim, entry in enumerate(spec) if entry is not None}
            dims = [d for d, size in enumerate(var.shape) if size % n == 0 and d not in taken]
            ways.append([WHOLE, *((dim, 1) for dim in dims)])
        found = {}
        for states in itertools.product(*ways):
            dims = [state for state in states if state != WHOLE]
            if len({*dims}) == len(dims):
                found[states] = self._variable()
        self._row(dict.fromkeys(found.values(), 1.0), 1, 1)
        return found

    def _axis(self, block: Block, axis: str, given: Mapping[Var, P]) -> None:
        place = [*self.settings.sizes].index(axis)
        made: dict[Var, dict[AxisState, list[int]]] = {}
        for var in block.inputs:
            if var in self.joint:
                rows = made.setdefault(var, {})
                for states, number in self.joint[var].items():
                    rows.setdefault(states[place], []).append(number)
                # an axis that does not split a parameter sums its gradient
                for number in rows[WHOLE]:
                    self.costs[number] += self.settings.price("psum", axis, self.held[var])
            else:
                split = placement_of(given.get(var, P()), len(var.shape), self.settings.sizes).split
                fixed = self._variable()
                self._row({fixed: 1.0}, 1, 1)
                made[var] = {split.get(axis, WHOLE): [fixed]}
        wanted: dict[Var, dict[AxisState, list[int]]] = {}
        for equation in block.equations:
            self._equation(equation, axis, made, wanted)
        for value in {v for v in block.outputs if isinstance(v, Var)}:  # none ends as partial sums
            self._price_reduction(axis, value, made[value].get(PARTIAL, ()), None, scattered=False)
        for var, states in wanted.items():
            for target, readers in states.items():
                self._price_move(axis, var, target, readers, made[var])

    def _equation(self, equation: Equation, axis: str, made, wanted) -> None:
        rule, n = self.settings.rule(equation), self.settings.sizes[axis]
        if equation.name == "constrain":
            (var,) = equation.results
            pin = placement_of(self.settings.pin(equation), len(var.shape), self.settings.sizes)
            state = pin.split.get(axis, WHOLE)
            ways = [_Strategy((state,), (state,), False)]
        else:
            states = [made[var] for var in equation.operands]
            ways = strategies(equation, rule, axis, n, states)
        chosen = {self._variable(): strategy for strategy in ways}
        self._row(dict.fromkeys(chosen, 1.0), 1, 1)
        for number, strategy in chosen.items():
            arrive: dict[int, float] = {number: -1.0}
            for var, state in zip(equation.operands, strategy.operands, strict=True):
                wanted.setdefault(var, {}).setdefault(state, []).append(number)
                if strategy.splits and isinstance(state, tuple):
                    for other in made[var].get(state, ()):
                        arrive[other] = 1.0
            if strategy.splits:
                self._row(arrive, 0, math.inf)
            for var, state in zip(equation.results, strategy.results, strict=True):
                made.setdefault(var, {}).setdefault(state, []).append(number)

    def _price_move(self, axis: str, var: Var, target: AxisState, readers, made) -> None:
        """A value is moved once to each placement that readers want."""
        if not readers or all(state == target for state in made):
            return
        wants = self._variable(binary=False)
        for number in readers:
            self._row({wants: 1.0, number: -1.0}, 0, math.inf)
        for source, makers in made.items():
            if source == target or source == WHOLE != target != PARTIAL:
                continue  # there, or sliced, which sends nothing
            if target == PARTIAL:
                self._row({wants: -1.0, **dict.fromkeys(makers, -1.0)}, -1, math.inf)
            elif source == PARTIAL:
                self._price_reduction(axis, var, makers, wants, scattered=target != WHOLE)
            else:
                cost = self._move(axis, var, target)
                self._both(makers, wants, [self._variable(cost, binary=False)])

    def _price_reduction(
        self, axis: str, var: Var, makers: Sequence[int], wants: int | None, *, scattered: bool
    ) -> None:
        """Partial sums are reduced, once for all that want the value, or scattered for these."""
        if not makers:
            return
        price, size = self.settings.price, self.held[var]
        if (axis, var) not in self._sums:
            cost = 2 * price("psum", axis, size)  # and in backward again
            self._sums[axis, var] = self._variable(cost, binary=False)
        moved = [self._sums[axis, var]]
        if scattered:
            cost = price("psum_scatter", axis, size) + price("all_gather", axis, size)
            moved.append(self._variable(cost, binary=False))
        self._both(makers, wants, moved)

    def _both(self, makers: Sequence[int], wants: int | None, moved: Sequence[int]) -> None:
        """One of the moves happens where the value is made so, and wanted."""
        row = {**dict.fromkeys(moved, 1.0), **dict.fromkeys(makers, -1.0)}
        if wants is None:
            self._row(row, 0, math.inf)
        else:  # moved >= made + wanted - 1
            self._row({**row, wants: -1.0}, -1, math.inf)

    def _move(self, axis: str, var: Var, target: AxisState) -> float:
        """The cost of the move of a split value, with its transpose in backward."""
        price, size = self.settings.price, self.held[var]
        if target == WHOLE:
            return price("all_gather", axis, size) + price("psum_scatter", axis, size)
        return 2 * price("all_to_all", axis, size // self.settings.sizes[axis])

    def solve(self, memory_bytes: int) -> dict[Var, dict[str, AxisState]]:
        """The states of the leaves, by axis, in the cheapest solution.

        Raises:
            ValueError: none fits.
        """
        optimize, sparse = _scipy()
        held = {
            number: self.memory(var, states) / memory_bytes
            for var, rows in self.joint.items()
            for states, number in rows.items()
        }
        self._row(held, 0, 1)
        scale = max(self.costs) or 1.0  # HiGHS takes differences below 1e-6 for none
        objective = [cost / scale for cost in self.costs]
        # of what costs about the same, what has the fewest collectives, then what is split least
        for number, (cost, binary) in enumerate(zip(self.costs, self.binary, strict=True)):
            objective[number] += 1e-4 * (cost > 0 and not binary)
        for rows in self.joint.values():
            for states, number in rows.items():
                objective[number] += 1e-5 * sum(state != WHOLE for state in states) / len(held)
        matrix = sparse.lil_array((len(self.rows), len(self.costs)))
        for i, (terms, _, _) in enumerate(self.rows):
            for number, weight in terms.items():
                matrix[i, number] = weight
        lows, highs = zip(*((low, high) for _, low, high in self.rows), strict=True)
        made = optimize.milp(
            objective,
            integrality=[int(binary) for binary in self.binary],
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(matrix.tocsr(), lows, highs),
            options={"mip_rel_gap": 1e-6},
        )
        if made.x is None:
            least = sum(min(self.memory(v, states) for states in self.joint[v]) for v in self.joint)
            raise ValueError(
                f"search: got memory_bytes={memory_bytes:,}, in which no specs fit; wanted at "
                f"least the {least:,} of parameters that all axes split; fix: more memory, or more "
                f"ranks on {', '.join(self.settings.sizes)} (HiGHS: {made.message})"
            )
        self.cost = float(sum(cost * x for cost, x in zip(self.costs, made.x, strict=True)))
        return {
            var: dict(zip(self.settings.sizes, states, strict=True))
            for var, rows in self.joint.items()
            for states, number in rows.items()
            if made.x[number] > 0.5
        }


def _scipy() -> tuple[Any, Any]:
    try:
        return importlib.import_module("scipy.optimize"), importlib.import_module("scipy.sparse")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "search needs scipy, whose HiGHS solves integer programs; fix: pip install "
            '"functron[search]"'
        ) from error
