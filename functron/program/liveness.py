"""Which values of a block need memory, from when to when, and what for. Static; no sizes.

The rules are those of a program that runs equation by equation, as torch runs it eagerly:

* an equation's results are allocated while its operands are live; what nothing needs any more is
  freed after it; views share memory;
* what `functron.scan` keeps for backward is never stacked: each iteration's part lives from that
  iteration until the same iteration of the reverse scan is done with it;
* in backward, one step of torch's tape frees what it read when all its results are there; equations
  that follow one another and read the same cotangent are taken for one step. (That is a guess: a
  program does not say which equations are one step, nor which were written in place. Temporary
  values inside a step are freed after their last use here, and in torch at the end of their C++
  expression, so elementwise steps such as that of `square` are put up to one value too low.)
* torch's engine sums cotangents in place, in the memory of one that nothing else needs;
* optimizers update donated arguments in place, in fused elementwise kernels (`step_` does, and so
  does a compiler with the pure form): elementwise equations that only lead to such results take no
  memory, and what they read lives until the results are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from functron.program.equations import Block, Equation, Scan, Var
from functron.program.text import COLLECTIVES

Category = Literal["parameters", "optimizer", "gradients", "activations", "workspace", "inputs"]

CATEGORIES: tuple[Category, ...] = get_args(Category)

_COTANGENTS: frozenset[Category] = frozenset({"workspace", "gradients"})

_aten = torch.ops.aten
_ELEMENTWISE = frozenset({_aten._to_copy.default})  # besides those that torch tags


@dataclass(frozen=True, eq=False)
class Plan:
    """What is known of a block's memory before it runs.

    Attributes:
        freed: storages to free after each equation, by its index; by -1, before the first.
        last: the index of the last equation that needs a storage; beyond the last one for results
            of the block.
        category: what each storage is for.
        takes: results that take the memory of a donated input, and the storage of that input.
        fused: storages that never exist, since a fused kernel makes and uses them.
        columns: results of scans that are kept as one value per iteration.
    """

    freed: Mapping[int, tuple[int, ...]]
    last: Mapping[int, int]
    category: Mapping[int, Category]
    takes: Mapping[int, int]
    fused: frozenset[int]
    columns: frozenset[Var]


def plan(
    block: Block,
    forced: Mapping[int, Category],
    kept: Sequence[bool],
    donations: Mapping[Var, Var] | None = None,
) -> Plan:
    """The plan of a block.

    Args:
        block: of a program or a scan.
        forced: what some storages are for, from outside: inputs, and what outputs become.
        kept: for each output, whether it is kept as one value per iteration of the scan around.
        donations: outputs, and the donated inputs that they replace.
    """
    columns = _columns(block, kept)
    category = _categories(block, forced, columns)
    takes, fused, last = _in_place(block, donations or {})
    _extend_to_steps(block, category, last)
    freed: dict[int, list[int]] = defaultdict(list)
    for storage, index in last.items():
        freed[index].append(storage)
    return Plan({k: tuple(v) for k, v in freed.items()}, last, category, takes, fused, columns)


def body_plan(equation: Equation, outer: Plan) -> tuple[Plan, list[bool]]:
    """The plan of a scan's body, and which of its ys are kept as one value per iteration."""
    op = equation.op
    assert isinstance(op, Scan)
    body = op.body
    kept = [False] * op.num_carry
    kept += [value in outer.columns for value in equation.outputs[op.num_carry :]]
    forced: dict[int, Category] = {}
    for inner, operand in zip(body.inputs, equation.args, strict=True):
        if isinstance(operand, Var):
            forced[inner.storage] = outer.category[operand.storage]
    saved = {v.storage for v, keep in zip(body.outputs, kept, strict=True) if keep}
    inputs = {value.storage for value in body.inputs}
    for position, (inner, result) in enumerate(zip(body.outputs, equation.outputs, strict=True)):
        if not isinstance(inner, Var) or result is None or inner.storage in inputs:
            continue
        carried = body.inputs[op.num_consts + position] if position < op.num_carry else None
        if kept[position] or (carried is not None and carried.storage in saved):
            forced[inner.storage] = "activations"
        else:
            forced.setdefault(inner.storage, outer.category[result.storage])
    return plan(body, forced, kept), kept[op.num_carry :]


def is_backward(equation: Equation) -> bool:
    """Whether an equation belongs to the backward pass: reverse scans do."""
    return equation.where.phase == "backward" or (
        isinstance(equation.op, Scan) and equation.op.reverse
    )


def accumulates(equation: Equation) -> bool:
    """Whether an equation is torch's engine summing two cotangents of one value."""
    if equation.op is not _aten.add.Tensor or equation.where.phase != "backward":
        return False
    values, result = equation.args[:2], equation.results[0]
    return all(isinstance(v, Var) and v.shape == result.shape for v in values)


def scratch_bytes(equation: Equation) -> int:
    """Memory that an operation needs besides its operands and results."""
    if equation.op is _aten.logsumexp.default:  # torch exponentiates a copy
        return equation.operands[0].nbytes
    return 0


def _elementwise(equation: Equation) -> bool:
    op = equation.op
    return not isinstance(op, Scan) and (torch.Tag.pointwise in op.tags or op in _ELEMENTWISE)


def _vars(values: Iterable[Any]) -> list[Var]:
    return [value for value in values if isinstance(value, Var)]


def _columns(block: Block, kept: Sequence[bool]) -> frozenset[Var]:
    """Results ys of forward scans that nothing but reverse scans reads, slice by slice."""
    found = set()
    for equation in block.equations:
        if isinstance(equation.op, Scan) and not equation.op.reverse:
            found |= set(_vars(equation.outputs[equation.op.num_carry :]))
    used = set()
    for equation in block.equations:
        operands = equation.operands
        if isinstance(equation.op, Scan) and equation.op.reverse:
            start = equation.op.num_consts + equation.op.num_carry
            used |= set(_vars(equation.args[start:]))
            operands = _vars(equation.args[:start])
        found -= set(operands)
    outputs = list(zip(block.outputs, kept, strict=True))
    used |= {value for value, keep in outputs if keep}
    return frozenset((found & used) - {value for value, keep in outputs if not keep})


def _categories(
    block: Block, forced: Mapping[int, Category], columns: frozenset[Var]
) -> dict[int, Category]:
    """What every storage is for.

    Gradients are results of backward that leave it (the optimizer, a norm or a collective reads
    them, or they are returned), and what elementwise equations and collectives make of gradients
    alone. Activations are results of forward or recomputation that backward reads. All else that
    the block computes is workspace.
    """
    backward, others, saved = set[int](), set[int](), {value.storage for value in columns}
    sums: set[int] = set()
    for equation in block.equations:
        (backward if is_backward(equation) else others).update(
            value.storage for value in equation.operands
        )
        if isinstance(equation.op, Scan):
            saved |= _saved_carries(equation, columns)
            sums |= _summed_gradients(equation)
    others |= {value.storage for value in _vars(block.outputs)}
    for equation in reversed(block.equations):  # what is synchronised or summed is one already
        ends = is_backward(equation) and all(v.storage in others for v in equation.results)
        if ends and (accumulates(equation) or equation.name in COLLECTIVES):
            others |= {value.storage for value in equation.operands}
    category: dict[int, Category] = dict(forced)
    for equation in block.equations:
        for value in equation.results:
            s = value.storage
            if s in category:
                continue
            if is_backward(equation):
                category[s] = "gradients" if s in others else "workspace"
            elif s in sums or _of_gradients(equation, value, category):
                category[s] = "gradients"
            else:
                category[s] = "activations" if s in backward or s in saved else "workspace"
    return category


def _saved_carries(equation: Equation, columns: frozenset[Var]) -> set[int]:
    """First carries of a scan that keeps its carries for backward."""
    op = equation.op
    assert isinstance(op, Scan)
    pairs = zip(op.body.outputs, equation.outputs, strict=True)
    kept = {inner.storage for inner, result in pairs if result in columns}
    start, stop = op.num_consts, op.num_consts + op.num_carry
    carries = zip(op.body.inputs[start:stop], equation.args[start:stop], strict=True)
    return {outer.storage for inner, outer in carries if inner.storage in kept}


def _summed_gradients(equation: Equation) -> set[int]:
    """Carries of a scan over whole backward passes that add up gradients, as microbatches do."""
    op = equation.op
    assert isinstance(op, Scan)
    if op.reverse or not any(is_backward(inner) for inner in op.body.equations):
        return set()
    start, stop = op.num_consts, op.num_consts + op.num_carry
    carries = op.body.inputs[start:stop]
    forced: dict[int, Category] = {v.storage: "workspace" for v in op.body.inputs}
    forced |= {v.storage: "gradients" for v in carries}
    category = _categories(op.body, forced, frozenset())
    rows = zip(op.body.outputs, equation.args[start:stop], equation.outputs, strict=False)
    return {
        value.storage
        for inner, *outer in rows
        if inner not in carries and category[inner.storage] == "gradients"
        for value in _vars(outer)
    }


def _of_gradients(equation: Equation, value: Var, category: Mapping[int, Category]) -> bool:
    """Whether a result is a gradient since all that it comes from are: synchronised, or summed."""
    if isinstance(equation.op, Scan):
        return False
    if not (_elementwise(equation) or equation.name in COLLECTIVES):
        return False
    large = [v for v in equation.operands if v.size > 1]
    return bool(large) and value.size > 1 and all(
        category.get(v.storage) == "gradients" for v in large
    )  # fmt: skip


def _in_place(
    block: Block, donations: Mapping[Var, Var]
) -> tuple[dict[int, int], frozenset[int], dict[int, int]]:
    """Results that take a donated input's memory, storages that are fused away, and last uses."""
    makers: dict[int, int] = {}
    for index, equation in enumerate(block.equations):
        if not equation.aliases:
            makers.update((value.storage, index) for value in equation.results)
    takes = {
        new.storage: old.storage
        for new, old in donations.items()
        if new.storage != old.storage and new.storage in makers
    }
    while True:
        fused = _fused(block, takes)
        last = _last_uses(block, fused)
        early = [new for new, old in takes.items() if last[old] > makers[new]]
        if not early:
            return takes, fused, last
        for new in early:  # the old value is still needed after the new one is made
            del takes[new]


def _fused(block: Block, takes: Mapping[int, int]) -> frozenset[int]:
    """Results of elementwise equations that only lead, so, to results in donated memory."""
    found: set[int] = set()
    returned = {value.storage for value in _vars(block.outputs)}
    barred: set[int] = set()  # read by what is not fused
    read: set[int] = set()
    for equation in reversed(block.equations):
        if equation.aliases:
            continue
        storages = {value.storage for value in equation.results}
        inner = bool(storages) and storages <= read and not storages & (barred | returned)
        target = storages <= takes.keys() and not storages & barred
        if _elementwise(equation) and not is_backward(equation) and (inner or target):
            found |= storages if inner else set()
        else:
            barred |= {value.storage for value in equation.operands}
        read |= {value.storage for value in equation.operands}
    return frozenset(found)


def _last_uses(block: Block, fused: frozenset[int]) -> dict[int, int]:
    """The last equation that needs each storage; of what is fused, the one that writes the end."""
    last = {value.storage: len(block.equations) for value in _vars(block.outputs)}
    for index in reversed(range(len(block.equations))):
        equation = block.equations[index]
        storages = [value.storage for value in equation.results]
        until = max((last.get(s, index) for s in storages if s in fused), default=index)
        for storage in [*storages, *(value.storage for value in equation.operands)]:
            last[storage] = max(last.get(storage, -1), until)
    for value in block.inputs:
        last.setdefault(value.storage, -1)
    return last


def _extend_to_steps(block: Block, category: Mapping[int, Category], last: dict[int, int]) -> None:
    """Let what a step of the tape reads live until its last equation."""
    step: list[int] = []
    shared: set[int] = set()
    for index, equation in enumerate(block.equations):
        if equation.aliases:
            continue
        read = {v.storage for v in equation.operands if category[v.storage] in _COTANGENTS}
        joins = is_backward(equation) and not isinstance(equation.op, Scan)
        joins = joins and not accumulates(equation)
        if not (joins and shared & read):
            _close_step(block, step, last)
            step, shared = [], read if joins else set()
        step.append(index)
    _close_step(block, step, last)


def _close_step(block: Block, step: Sequence[int], last: dict[int, int]) -> None:
    made = {value.storage for index in step for value in block.equations[index].results}
    for index in step[:-1]:
        for value in block.equations[index].operands:
            if value.storage not in made:
                last[value.storage] = max(last[value.storage], step[-1])
