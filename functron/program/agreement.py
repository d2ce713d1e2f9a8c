"""Agreement: all ranks must run the same program, or their collectives wait for one another."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.utils import _pytree as pytree

from functron import compat
from functron.program import text
from functron.program.equations import Scan, Var
from functron.spmd.axes import raise_lost, user_line
from functron.spmd.mesh import BoundMesh

if TYPE_CHECKING:
    from functron.program.program import Program


def check_agreement(program: Program, mesh: BoundMesh) -> None:
    """Check that the ranks of `mesh` have traced the same program.

    Collectives: on each axis of the program one all-gather of 32 bytes, and of the programs' texts
    where they differ.

    Raises:
        ValueError: they have not, on every rank of an axis along which they differ; with what
            differs.
    """
    mine = digest(program)
    for axis, size in program.mesh.axes:
        if size == 1 or axis == program.stages:
            continue
        group = compat.group(mesh.groups[axis])
        digests: list = [None] * size
        try:
            dist.all_gather_object(digests, mine, group=group)
        except RuntimeError as error:
            raise_lost(error, f"compiling {program.name} over {axis!r} at {user_line()}")
            raise
        if len(set(digests)) == 1:
            continue
        texts: list = [None] * size
        dist.all_gather_object(texts, text.format(program), group=group)
        here = mesh.coordinate[axis]
        other = next(i for i, found in enumerate(digests) if found != mine)
        changes = text.diff(program, texts[other]).splitlines()
        raise ValueError(
            f"{program.name}: got one program where {axis}_index is {here} and another where it is "
            f"{other}; wanted the same on all ranks, whose collectives would otherwise wait for "
            "one another for ever; fix: decide by lax.axis_index and torch.where, not by a Python "
            "branch on the rank. The difference:\n" + "\n".join(changes[:20])
        )


def digest(program: Program) -> str:
    """A hash of what a program computes; names and source lines do not count."""
    numbers: dict[Var, str] = {}

    def number(value: Var) -> str:
        shown = f"%{len(numbers)}:{value.shape}:{value.stride}:{value.dtype}:{value.device}"
        return numbers.setdefault(value, shown)

    made = hashlib.sha256()
    for value in program.block.inputs:
        made.update(number(value).encode())
    for equation, _ in program.block.walk():
        operands: tuple = (equation.args, dict(equation.kwargs), equation.outputs)
        if isinstance(equation.op, Scan):
            op = equation.op
            operands += op.length, op.num_consts, op.num_carry, op.reverse
            operands += op.body.inputs, op.body.outputs
        made.update(repr((equation.name, pytree.tree_map_only(Var, number, operands))).encode())
    outputs = [output.value for output in program.outputs]
    made.update(repr(pytree.tree_map_only(Var, number, outputs)).encode())
    return made.hexdigest()
