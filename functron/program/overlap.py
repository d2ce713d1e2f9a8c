"""Overlap: what of a scan's iteration can run beside its neighbours.

Gathers of a layer's parameters read slices of xs and nothing that is carried, so those of the next
layer can be under way while this one is computed; reductions of its gradients lead to ys and to
nothing that is carried, so they can still be under way while the next one is. A scan is therefore
cut into three parts, and the driver runs them like a pipeline, one layer ahead and one behind:

    gather 2 ...............
    compute 1 ───────────── compute 2 ─────────────
                            reduce 1 ...............

At most one more layer's gathered parameters and one more layer's gradients are held for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from functron.program.equations import Block, Equation, Scan, Var
from functron.program.recorder import live_equations

_CHEAP = frozenset(
    f"aten::{name}"
    for name in ("_to_copy", "_unsafe_view", "alias", "cat", "clone", "reshape", "view")
)


@dataclass(frozen=True, eq=False)
class Split:
    """The body of a scan in three parts.

    Attributes:
        head: from constants and xs to the operands of `gathers`.
        gathers: all-gathers that depend on xs alone.
        core: from the body's inputs, and the gathers' results, to the next carry, the ys that are
            not `late`, the operands of `scatters` and `passed`.
        scatters: reduce-scatters that lead to ys alone.
        tail: from the constants, xs, results of `scatters` and `passed` to the ys that are `late`.
        passed: what the tail reads of the core, besides.
        late: the body's outputs that the tail makes.
    """

    head: Block
    gathers: tuple[Equation, ...]
    core: Block
    scatters: tuple[Equation, ...]
    tail: Block
    passed: tuple[Var, ...]
    late: frozenset[Var]


def split(op: Scan, wanted: Sequence[Any]) -> Split | None:
    """The body of a scan in three parts; None where one iteration has nothing to do for others.

    Args:
        op: the scan.
        wanted: those outputs of the body that are needed.
    """
    body, start = op.body, op.num_consts + op.num_carry
    if op.length < 2:
        return None
    carries = {v for v in body.outputs[: op.num_carry] if isinstance(v, Var)}
    needed = [v for v in wanted if isinstance(v, Var)]
    equations = live_equations(body.equations, needed)
    fixed = [*body.inputs[: op.num_consts], *body.inputs[start:]]
    early, gathers = _early(equations, fixed, body.inputs[start:])
    scatters, after = _after(equations, carries)
    if not gathers and not scatters:
        return None
    made = {v for e in after for v in e.results} | {v for e in scatters for v in e.results}
    late = frozenset(v for v in needed if v in made)
    scattered = [v for e in scatters for v in e.results]
    reads = dict.fromkeys(v for e in after for v in e.operands if v not in made)
    passed = tuple(v for v in reads if v not in fixed)
    gathered = [v for e in gathers for v in e.results]
    tail = Block(
        (*(v for v in fixed if v in reads), *scattered, *passed), tuple(after), tuple(late)
    )
    ends = [*needed, *(v for e in scatters for v in e.operands), *passed]
    ends = [v for v in ends if v not in late]
    gone = {*gathers, *scatters, *after}
    rest = live_equations([e for e in equations if e not in gone], ends)
    core = Block((*body.inputs, *gathered), tuple(rest), tuple(ends))
    operands = [v for e in gathers for v in e.operands]
    first = live_equations(early, operands)
    used = {*operands, *(v for e in first for v in e.operands)}
    head = Block(tuple(v for v in fixed if v in used), tuple(first), tuple(operands))
    return Split(head, tuple(gathers), core, tuple(scatters), tail, passed, late)


def _early(
    equations: Sequence[Equation], fixed: Collection[Var], xs: Collection[Var]
) -> tuple[list[Equation], list[Equation]]:
    """Cheap equations of constants and xs, and the all-gathers of what depends on xs."""
    known, moving = set(fixed), set(xs)
    early: list[Equation] = []
    gathers: list[Equation] = []
    for equation in equations:
        operands = equation.operands
        if isinstance(equation.op, Scan) or not operands or not known.issuperset(operands):
            continue
        if equation.op.name() == "functron::all_gather":
            if not moving.isdisjoint(operands):
                gathers.append(equation)
        elif equation.aliases or equation.op._schema.name in _CHEAP:
            early.append(equation)
            known.update(equation.results)
            if not moving.isdisjoint(operands):
                moving.update(equation.results)
    return early, gathers


def _after(
    equations: Sequence[Equation], carries: Collection[Var]
) -> tuple[list[Equation], list[Equation]]:
    """Reduce-scatters that lead to no carry, and all that is computed from them."""
    barred = set(carries)  # what leads to a carry
    for equation in reversed(equations):
        if not barred.isdisjoint(equation.results):
            barred.update(equation.operands)
    scatters: list[Equation] = []
    after: list[Equation] = []
    made: set[Var] = set()
    for equation in equations:
        if not made.isdisjoint(equation.operands):
            after.append(equation)
            made.update(equation.results)
        elif not isinstance(equation.op, Scan) and (
            equation.op.name() == "functron::psum_scatter" and barred.isdisjoint(equation.results)
        ):
            scatters.append(equation)
            made.update(equation.results)
    return scatters, after
