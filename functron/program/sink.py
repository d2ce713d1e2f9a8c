"""Sums over repeated calls, taken into the scans that make what is added.

Gradients of scanned layers are stacked by the scan of the backward pass and then added to the sums
of earlier microbatches. Inside the scan each layer's gradient is added to its own row instead: the
stack of gradients is never made, and where the sums are donated their rows are updated in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from functron.program.equations import Block, Equation, Scan, Var, contiguous_strides
from functron.program.program import Program

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
        row = _sum(equation, makers, {v for v in sums if reads[v] == 1}, reads)
        if row is not None:
            found.setdefault(row.scan, []).append(row)
    gone = {e for rows in found.values() for row in rows for e in (row.add, row.cast)}
    fresh = _Fresh(program)
    equations = tuple(
        _moved(equation, found[equation], fresh) if equation in found else equation
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


def _sum(
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


class _Fresh:
    """New values with names and storages that a program does not have."""

    def __init__(self, program: Program):
        known = [*program.block.inputs]
        for equation, _ in program.block.walk():
            known += equation.results
            if isinstance(equation.op, Scan):
                known += equation.op.body.inputs
        self.storage = max((value.storage for value in known), default=0)
        self.names = {value.name for value in known}

    def row(self, total: Var) -> Var:
        """A row of a stacked value."""
        name = next(n for i in range(len(self.names) + 1) if (n := f"row_{i}") not in self.names)
        self.names.add(name)
        self.storage += 1
        shape, nbytes = total.shape[1:], total.nbytes // total.shape[0]
        strides = contiguous_strides(shape)
        return Var(name, shape, strides, total.dtype, total.device, self.storage, nbytes)


def _moved(equation: Equation, rows: list[_Sum], fresh: _Fresh) -> Equation:
    """A scan that takes the totals as xs and returns the sums as ys."""
    op: Any = equation.op
    inputs, equations = [*op.body.inputs], [*op.body.equations]
    inner, outer = [*op.body.outputs], [*equation.outputs]
    for row in rows:
        given, made, value = fresh.row(row.total), fresh.row(row.total), inner[row.position]
        if row.cast is not None:
            cast = fresh.row(row.total)
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
