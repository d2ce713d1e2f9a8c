"""A program as a value: one rank's whole computation, its inputs and outputs named.

A program is run here equation by equation, on every rank of its mesh at once, in this process.
That is its meaning, which compiled programs are tested against; it is for small meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from functron.core import compat, tree
from functron.core.closure import refuse_orphans, refuse_tracked
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.program import text
from functron.program.check import check
from functron.program.cost import Cost, collectives_diff, cost
from functron.program.equations import Block, Code, Equation, Input, Scan, Var, contiguous_strides
from functron.program.memory import Memory, memory
from functron.program.timeline import ProgramTimeline, Seconds, timeline
from functron.spmd.mesh import Mesh
from functron.spmd.spec import shard, unshard


@dataclass(frozen=True, eq=False)
class Program(Code):
    """One rank's program; made by `trace`, compiled by `functron.compiler.compile`.

    Attributes: as in `Code`.
    """

    @public
    def __call__(self, *args: tree.Tree) -> tree.Tree:
        """The results for global arguments: every rank, in lockstep, in this process.

        Nothing is compiled, donated or differentiated (trace the gradient instead). For small
        meshes; see `functron.program.program`.
        """
        return interpret(self, *args)

    def __str__(self) -> str:
        """The program as text, which `functron.program.parse.parse` reads."""
        return text.format(self)

    def html(self) -> str:
        """The program as HTML: scans and phases fold, collectives have the colour of their axis."""
        return text.html(self)

    def _repr_html_(self) -> str:
        return text.html(self)

    @public
    def diff(
        self, other: Program | str, *, by: Literal["equations", "collectives"] = "equations"
    ) -> str:
        """How another program, or the text of one, differs: a unified diff, "" for no difference.

        Values are renumbered first, so that only real differences count.

        Args:
            other: a program, such as one written by hand; or the text of one.
            by: "collectives": instead, a table of those that one of them runs more often, by axis,
                operation, phase and payload; for it, `other` is a program.

        Raises:
            ValueError: by collectives, `other` is text.
        """
        if by == "equations":
            return text.diff(self, other)
        if isinstance(other, str):
            got, wanted = "the text of one", "a program"
            fix = "give the program whose text it is, or compare by='equations'"
            refuse("cannot compare collectives", "other", got, wanted, fix)
        return collectives_diff(self, other)

    @public
    def check(self) -> None:
        """Check which values are equal on which ranks, as `shard_map` does in simulation.

        Raises:
            ValueError: an output varies over an axis that its spec lacks, or a reduction is
                redundant; all offenders are listed, each with the user's line and the fix.
        """
        check(self)

    @public
    def cost(self) -> Cost:
        """FLOPs, bytes moved and bytes communicated per axis, of one rank."""
        return cost(self)

    @public
    def memory(self) -> Memory:
        """The bytes that one rank holds while the program runs: timeline, peak and categories."""
        return memory(self)

    @public
    def timeline(
        self,
        costs: Seconds,
        *,
        overlap: bool = True,
        prefetch: bool = True,
        sequence_parts: int = 1,
    ) -> ProgramTimeline:
        """When one rank computes and communicates, and the communication that nothing hides.

        In the order in which it is compiled; `functron.program.timeline` states the rules.

        Args:
            costs: the seconds of an equation: `functron.program.Rates`, or a function.
            overlap, prefetch, sequence_parts: as of `functron.jit`.
        """
        options = {"overlap": overlap, "prefetch": prefetch, "sequence_parts": sequence_parts}
        return timeline(self, costs, **options)


Ranks = list[Any]
"""One value per rank, in rank order."""


def interpret(program: Code, *args: tree.Tree) -> tree.Tree:
    """The results of `program` on global arguments: all ranks in lockstep, in this process.

    Nothing is donated; the arguments stay as they are.

    Args:
        args: trees as those that were traced: global values, which are split by their specs.

    Raises:
        ValueError: the arguments differ from what was traced in structure, shape or dtype, or they
            or what the program closes over are differentiated.
    """
    leaves = program.flatten(args)
    refuse_orphans(program.name, leaves.values())
    refuse_derivatives(program, leaves)
    environment: dict[Var, Ranks] = {}
    for given in program.inputs:
        environment[given.var] = _input(program, given, leaves)
    with torch.no_grad():
        outputs = _block(program.block, environment, program.mesh)
    results = [
        _join(value, output.spec, program.mesh) if isinstance(output.value, Var) else output.value
        for value, output in zip(outputs, program.outputs, strict=True)
    ]
    return tree.unflatten(program.out_structure, results)


def refuse_derivatives(program: Code, leaves: Mapping[Var, torch.Tensor]) -> None:
    """Refuse derivatives, in reverse or forward: a program does not say where gradients stop.

    Args:
        program: that is called.
        leaves: its arguments.

    Raises:
        ValueError: an argument, or a constant of the program, is differentiated where it is called.
    """
    wanted = "values: what detached or stopped gradients is not part of a program"
    fix = f"differentiate what was traced, as in ft.trace(ft.grad({program.name})), or detach"
    got = "a tensor that requires gradients, or has a tangent"
    raise_problems(
        f"{program.name} is a traced program, and would be differentiated",
        [
            Problem(f"argument {given.path}", got, wanted, fix)
            for given in program.inputs
            if given.var in leaves and compat.is_tracked(leaves[given.var], mapped=False)
        ],
    )
    refuse_tracked(program.name, [x.value for x in program.inputs if x.value is not None])


def _input(program: Code, given: Input, leaves: dict[Var, torch.Tensor]) -> Ranks:
    mesh = program.mesh
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    if given.role == "axis_index":
        return [torch.tensor(at[given.path]) for at in coordinates]
    if given.role == "constant":
        if given.value is None:
            refuse(
                f"cannot run {program.name}",
                f"{given.var!r}",
                f"a constant {given.var.shape} {given.var.dtype} without numbers: it was read from "
                "its text, which holds none",
                "arguments alone",
                "pass it to the function as an argument, and trace that",
            )
        return [given.value.detach()] * mesh.size
    value, spec = leaves[given.var], given.spec
    ranks = [value if spec is None else shard(value, spec, mesh, at) for at in coordinates]
    raise_problems(
        f"cannot run {program.name}",
        [
            Problem(
                f"argument {given.path}",
                f"{tuple(part.shape)} {part.dtype} on each rank",
                f"{given.var.shape} {given.var.dtype}, as it was traced",
                "trace again with these arguments",
            )
            for part in ranks[:1]
            if (tuple(part.shape), part.dtype) != (given.var.shape, given.var.dtype)
        ],
    )
    if given.var.stride == contiguous_strides(given.var.shape):
        ranks = [part.contiguous() for part in ranks]  # as traced: a cut of a minor dim is not
    return ranks


def _join(ranks: Ranks, spec: Any, mesh: Mesh) -> torch.Tensor:
    return ranks[0] if spec is None else unshard(ranks, spec, mesh)


def _block(block: Block, environment: dict[Var, Ranks], mesh: Mesh) -> list[Ranks]:
    for equation in block.equations:
        results = _equation(equation, environment, mesh)
        environment.update(zip(equation.results, results, strict=True))
    return [
        environment[value] if isinstance(value, Var) else [value] * mesh.size
        for value in block.outputs
    ]


def _equation(equation: Equation, environment: dict[Var, Ranks], mesh: Mesh) -> list[Ranks]:
    if isinstance(equation.op, Scan):
        operands = [environment[value] for value in equation.operands]
        return _scan(equation.op, operands, mesh)
    collective = _COLLECTIVES.get(equation.name)
    if collective is not None and equation.op.namespace == "functron":
        ranks = [environment[x] if isinstance(x, Var) else x for x in equation.args]
        return [collective(ranks[0], mesh, *ranks[1:])]
    outputs = []
    for rank in range(mesh.size):
        args, kwargs = pytree.tree_map_only(
            Var, lambda value, rank=rank: environment[value][rank], (equation.args, equation.kwargs)
        )
        leaves = pytree.tree_leaves(equation.op(*args, **kwargs))
        outputs.append([x for x in leaves if isinstance(x, torch.Tensor)])
    return [list(ranks) for ranks in zip(*outputs, strict=True)]


def _scan(op: Scan, operands: list[Ranks], mesh: Mesh) -> list[Ranks]:
    consts = operands[: op.num_consts]
    carry = operands[op.num_consts : op.num_consts + op.num_carry]
    columns = operands[op.num_consts + op.num_carry :]
    rows: dict[int, list[Ranks]] = {}
    order = range(op.length)
    for index in reversed(order) if op.reverse else order:
        x = [[value[index] for value in ranks] for ranks in columns]
        inner = dict(zip(op.body.inputs, [*consts, *carry, *x], strict=True))
        out = _block(op.body, inner, mesh)
        carry, rows[index] = out[: op.num_carry], out[op.num_carry :]
    stacked = [
        [_stack([rows[i][column][rank] for i in order], value) for rank in range(mesh.size)]
        for column, value in enumerate(op.body.outputs[op.num_carry :])
    ]
    return [*carry, *stacked]


def _stack(slices: list[torch.Tensor], like: Var) -> torch.Tensor:
    shape, stride = like.stacked(len(slices))
    out = torch.empty_strided(shape, stride, dtype=like.dtype, device=slices[0].device)
    for row, value in zip(out.unbind(0), slices, strict=True):
        row.copy_(value)
    return out


def _groups(mesh: Mesh, axis: str) -> list[list[int]]:
    """The ranks that differ only along `axis`, in order, for every such group."""
    groups: dict[tuple, list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        groups.setdefault(tuple(v for k, v in at.items() if k != axis), []).append(rank)
    return list(groups.values())


def _among(fn: Callable[..., Sequence[torch.Tensor]], others: int = 0) -> Callable:
    """A collective from what it does to the values of one group.

    Args:
        fn: takes the group's values, the axis' size, for each of `others` the group's values of
            another operand, and what else the operation takes.
        others: how many operands there are besides the first.
    """

    def collective(values: Ranks, mesh: Mesh, axis: str, size: int, *rest: Any) -> Ranks:
        out: Ranks = [None] * mesh.size
        for group in _groups(mesh, axis):
            more = [[ranks[rank] for rank in group] for ranks in rest[:others]]
            results = fn([values[rank] for rank in group], size, *more, *rest[others:])
            for rank, result in zip(group, results, strict=True):
                out[rank] = result
        return out

    return collective


def _reduce(reduction: Callable) -> Callable:
    return lambda xs, size: [reduction(torch.stack(list(xs)))] * size


def _permute(xs, size, sources, destinations):
    out = [torch.zeros_like(x) for x in xs]
    for source, destination in zip(sources, destinations, strict=True):
        out[destination] = xs[source]
    return out


def _ragged(xs, size, sends, receives, capacity, room=0):
    blocks = [x[: sum(sizes)].split(sizes) for x, s in zip(xs, sends, strict=True)
              for sizes in (s.tolist(),)]  # fmt: skip
    out = []
    for rank in range(size):
        rows = torch.cat([sent[rank] for sent in blocks])
        out.append(torch.cat([rows, rows.new_zeros(capacity - len(rows), *rows.shape[1:])]))
    return out


_COLLECTIVES = {
    "psum": _among(_reduce(lambda stacked: stacked.sum(0, dtype=stacked.dtype))),
    "pmax": _among(_reduce(lambda stacked: stacked.amax(0))),
    "pmin": _among(_reduce(lambda stacked: stacked.amin(0))),
    "pbroadcast": _among(lambda xs, size, source: [xs[source]] * size),
    "all_gather": _among(lambda xs, size: [torch.stack(list(xs))] * size),
    "psum_scatter": _among(
        lambda xs, size: list(torch.stack(list(xs)).sum(0, dtype=xs[0].dtype).unbind(0))
    ),
    "all_to_all": _among(lambda xs, size: [torch.stack([x[r] for x in xs]) for r in range(size)]),
    "ppermute": _among(_permute),
    "ragged_all_to_all": _among(_ragged, others=2),
}
