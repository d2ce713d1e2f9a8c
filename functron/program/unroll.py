"""Unrolling: the same program without scans, every iteration written out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from functron.program.equations import Block, Equation, Scan, Var, Where, contiguous_strides

if TYPE_CHECKING:
    from functron.program.program import Program

_aten = torch.ops.aten


def unroll(program: Program) -> Program:
    """The program with the body of every scan repeated in its place.

    What a scan hands to another one, slice by slice, is then never stacked.
    """
    block = _Unroller().block(program.block)
    rows = zip(program.outputs, block.outputs, strict=True)
    outputs = tuple(replace(output, value=value) for output, value in rows)
    return replace(program, block=block, outputs=outputs)


class _Unroller:
    """Copies equations, giving their results new names."""

    def __init__(self):
        self.count = 0
        self.columns: dict[Var, list[Var]] = {}  # of a stacked value, its slices

    def fresh(self, like: Var, **changes: Any) -> Var:
        self.count += 1
        numbered = {"name": f"{like.name}_u{self.count}", "storage": 1_000_000 + self.count}
        return replace(like, **{**numbered, **changes})

    def block(self, block: Block) -> Block:
        known: dict[Var, Var] = {value: value for value in block.inputs}
        equations: list[Equation] = []
        self.run(block, known, equations)
        outputs = tuple(known[v] if isinstance(v, Var) else v for v in block.outputs)
        return Block(block.inputs, tuple(equations), outputs)

    def run(self, block: Block, known: dict[Var, Var], into: list[Equation]) -> None:
        """Append the equations of a block, whose inputs are `known`."""
        storages = {old.storage: new.storage for old, new in known.items()}
        for equation in block.equations:
            if isinstance(equation.op, Scan):
                self.scan(equation, known, into)
                storages |= {v.storage: known[v].storage for v in equation.results}
                continue
            args, kwargs = pytree.tree_map_only(
                Var, known.__getitem__, (equation.args, dict(equation.kwargs))
            )
            for value in equation.results:
                storage = storages.get(value.storage)
                known[value] = self.fresh(
                    value, **({} if storage is None else {"storage": storage})
                )
                storages[value.storage] = known[value].storage
            outputs = tuple(None if v is None else known[v] for v in equation.outputs)
            into.append(Equation(equation.op, args, kwargs, outputs, equation.where))

    def scan(self, equation: Equation, known: dict[Var, Var], into: list[Equation]) -> None:
        op = equation.op
        assert isinstance(op, Scan)
        operands = [known[value] for value in equation.args]
        split = op.num_consts + op.num_carry
        consts, carry = operands[: op.num_consts], operands[op.num_consts : split]
        made: list[list[Any]] = [[None] * op.length for _ in op.body.outputs[op.num_carry :]]
        for index in range(op.length)[:: -1 if op.reverse else 1]:
            x = [self.slice(value, index, into, equation.where) for value in operands[split:]]
            inner = dict(zip(op.body.inputs, [*consts, *carry, *x], strict=True))
            self.run(op.body, inner, into)
            results = [inner[value] for value in op.body.outputs]
            carry = results[: op.num_carry]
            for column, value in zip(made, results[op.num_carry :], strict=True):
                column[index] = value
        known.update(
            (v, c) for v, c in zip(equation.outputs[: op.num_carry], carry, strict=True) if v
        )
        for result, column in zip(equation.outputs[op.num_carry :], made, strict=True):
            if result is not None:
                known[result] = self.stack(result, column, into, equation.where)

    def slice(self, value: Var, index: int, into: list[Equation], where: Where) -> Var:
        """One slice of a stacked value: what was stacked, or a view."""
        if value in self.columns:
            return self.columns[value][index]
        shape, stride = value.shape[1:], value.stride[1:]
        out = self.fresh(value, shape=shape, stride=stride, storage=value.storage)
        into.append(Equation(_aten.select.int, (value, 0, index), {}, (out,), where))
        return out

    def stack(self, like: Var, column: list[Var], into: list[Equation], where: Where) -> Var:
        """The stacked value, in the layout of `like`; dead if only slices of it are read."""
        order = sorted(range(len(like.shape)), key=lambda dim: (-like.stride[dim], dim))
        inverse = [order.index(dim) for dim in range(len(order))]
        inner = [dim - 1 for dim in order if dim]  # the leading dim has the largest stride

        def permuted(value: Var, dims: list[int]) -> Var:
            out = self.fresh(
                value,
                shape=tuple(value.shape[d] for d in dims),
                stride=tuple(value.stride[d] for d in dims),
                storage=value.storage,
            )
            into.append(Equation(_aten.permute.default, (value, dims), {}, (out,), where))
            return out

        same = inner == list(range(len(inner)))
        rows = column if same else [permuted(value, inner) for value in column]
        shape = tuple(like.shape[dim] for dim in order)
        stacked = self.fresh(like, shape=shape, stride=contiguous_strides(shape))
        if rows:
            into.append(Equation(_aten.stack.default, (rows,), {}, (stacked,), where))
        else:  # no iteration has run
            kwargs = {"dtype": like.dtype, "device": like.device}
            into.append(Equation(_aten.full.default, (shape, 0), kwargs, (stacked,), where))
        out = stacked if same else permuted(stacked, inverse)
        self.columns[out] = column
        return out
