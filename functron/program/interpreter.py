"""The interpreter of programs: equation by equation, here or on all ranks of a mesh in lockstep.

`run_block` runs one rank's block with whatever tensors and axes are at hand. Collectives act over
the axes that are bound where it is called, by name, so that one block runs in plain eager mode,
inside the nested vmaps of a simulated mesh, as one process of a bound mesh, and inside a program
that is being traced, which records its equations once more.

`run_in_lockstep` runs a program on global arguments: every equation on every rank of the program's
mesh, one rank after the other, before the next equation. No operation is batched and no axis is
bound. That is the meaning of a program, which compiled ones are tested against; it is for small
meshes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from functron.core import compat, tree
from functron.core.closure import refuse_orphans, refuse_tracked
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.functions import Function
from functron.core.scopes import in_phase, named_scope, set_during
from functron.program.callbacks import (
    EFFECTS,
    effect_masks,
    effects_where,
    repeat_effect,
    run_effect,
)
from functron.program.check import check, refuse_divided
from functron.program.equations import (
    Block,
    Code,
    ControlFlow,
    Equation,
    Input,
    Scan,
    Strided,
    Switch,
    Var,
    Where,
    While,
    contiguous_strides,
    read_view,
    write_view,
)
from functron.program.recorder import active
from functron.program.text import COLLECTIVES
from functron.spmd import primitives
from functron.spmd.axes import Axis, SimulatedAxis, TracedAxis, bind, lookup
from functron.spmd.mesh import Mesh
from functron.spmd.ragged import RaggedAllToAll, RaggedCall, exchange_of_ranks
from functron.spmd.simulate import as_share, no_share
from functron.spmd.spec import shard, unshard

_aten = torch.ops.aten


def ambient_inputs(inputs: Iterable[Input]) -> dict[Var, torch.Tensor]:
    """The tensors of those inputs of a program that are no arguments, where this is called.

    This rank's index on an axis is what `functron.spmd.axes.axis_index` gives; a constant is
    itself.
    """
    found: dict[Var, torch.Tensor] = {}
    for given in inputs:
        if given.role == "axis_index":
            index = next((axis.index for axis in lookup(given.path)), 0)
            made = index if isinstance(index, torch.Tensor) else torch.tensor(index)
            found[given.var] = made.to(given.var.device)
        elif given.role == "constant":
            assert given.value is not None
            found[given.var] = given.value
    return found


class NumberWatch(Protocol):
    """Looks at the numbers of every equation of a program that runs.

    Attributes:
        rows: the scans around an equation, outermost first, each with the row that is computed.
        quiet: effects are left out.
    """

    rows: list[tuple[str, int]]
    quiet: bool

    def see(self, equation: Equation, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Look at one equation that is no scan: tensors, or `RankValues` of ranks in lockstep."""


_watch: contextvars.ContextVar[NumberWatch | None] = contextvars.ContextVar(
    "functron_number_watch", default=None
)

watching_numbers = functools.partial(set_during, _watch)
"""``watching_numbers(watch)``: a with block in which `watch` sees the numbers of programs."""


@contextlib.contextmanager
def _in_row(name: str, index: int) -> Iterator[None]:
    """Tell who watches that a with block is an iteration of a scan."""
    watch = _watch.get()
    if watch is not None:
        watch.rows.append((name, index))
    yield
    if watch is not None:
        watch.rows.pop()


def run_block(
    block: Block,
    environment: dict[Var, Any],
    *,
    sliced: Collection[Var] = (),
    donated: Mapping[Var, Var] = MappingProxyType({}),
) -> list:
    """The outputs of a block, computed in the scope that this is called in, without a tape.

    Args:
        block: of a program, or of a piece of one.
        environment: the tensors of the block's inputs, and perhaps others. They are taken out of it
            when the block has no more use for them, and with them all that it computes, so that
            what only this dict refers to is freed after its last use. Operands of scans may be
            lists of slices, each of which is freed after the iteration that reads it.
        sliced: results of scans that stay such lists where no transform is active.
        donated: by results of scans, operands of them whose memory they take.

    Raises:
        ValueError: an axis of the block's collectives has another size where this is called.
    """
    with torch.no_grad():
        return _run(block, _last_uses(block), environment, None, {*sliced}, donated)


def run_in_lockstep(program: Code, *args: tree.Tree) -> tree.Tree:
    """The results of `program` on global arguments: all ranks in lockstep, in this process.

    Nothing is compiled, donated or differentiated (trace the gradient instead).

    Args:
        args: trees as those that were traced: global values, which are split by their specs.

    Raises:
        ValueError: the arguments differ from what was traced in structure, shape or dtype, or they
            or what the program closes over are differentiated; or the program is not correct by
            `functron.program.check`, as in simulation (but for what was mapped with
            ``check=False``).
    """
    leaves = program.flatten(args)
    refuse_orphans(program.name, leaves.values())
    refuse_derivatives(program, leaves)
    refuse_divided(program)
    check(program)
    mesh = program.mesh
    values = {given.var: _values_of_ranks(program, given, leaves) for given in program.inputs}
    with torch.no_grad(), bind([], absent=mesh.axis_names):
        results = _run(program.block, _last_uses(program.block), values, mesh)
    outputs = [
        value
        if not isinstance(value, RankValues)
        else value[0]
        if output.spec is None
        else unshard(value, output.spec, mesh)
        for value, output in zip(results, program.outputs, strict=True)
    ]
    return tree.unflatten(program.out_structure, outputs)


def refuse_derivatives(program: Code, leaves: Mapping[Var, torch.Tensor]) -> None:
    """Refuse derivatives, in reverse or forward: a program does not say where gradients stop.

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


class RankValues(tuple):
    """The value of a variable on every rank of a mesh, in rank order, in lockstep."""


def _values_of_ranks(program: Code, given: Input, leaves: Mapping[Var, torch.Tensor]) -> RankValues:
    mesh = program.mesh
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    if given.role == "axis_index":
        return RankValues(torch.tensor(at[given.path]) for at in coordinates)
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
        return RankValues([given.value.detach()] * mesh.size)
    value, spec = leaves[given.var], given.spec
    ranks = [value if spec is None else shard(value, spec, mesh, at) for at in coordinates]
    shape, dtype = tuple(ranks[0].shape), ranks[0].dtype
    if (shape, dtype) != (given.var.shape, given.var.dtype):
        refuse(
            f"cannot run {program.name}",
            f"argument {given.path}",
            f"{shape} {dtype} on each rank",
            f"{given.var.shape} {given.var.dtype}, as it was traced",
            "trace again with these arguments",
        )
    if given.var.stride == contiguous_strides(given.var.shape):
        ranks = [part.contiguous() for part in ranks]  # as traced: a cut of a minor dim is not
    return RankValues(ranks)


# --- blocks: `mesh` is that of ranks in lockstep, of `RankValues`; None: of one rank, here


def _run(
    block: Block,
    dead: Sequence[Sequence[Var]],
    values: dict[Var, Any],
    mesh: Mesh | None,
    sliced: AbstractSet[Var] = frozenset(),
    donated: Mapping[Var, Var] = MappingProxyType({}),
) -> list:
    watch = _watch.get()
    for value in dead[-1]:
        values.pop(value, None)
    for equation, last in zip(block.equations, dead, strict=False):
        marked = contextlib.nullcontext() if active() is None else _mark_place(equation.where)
        with marked:
            if isinstance(equation.op, Scan):
                places = _find_places(equation, last, donated)
                operands = _take_operands(equation, values, last)
                results = _run_scan(equation, operands, mesh, sliced, places)
            elif isinstance(equation.op, ControlFlow):
                results = _run_flow(equation, [values[v] for v in equation.args], mesh)
            elif watch is not None and watch.quiet and not equation.outputs:
                results = []
            else:
                results = _run_equation(equation, values, mesh)
                if watch is not None:
                    rows = zip(equation.outputs, results, strict=True)
                    read = [x for value, x in rows if value is not None and value not in last]
                    watch.see(equation, [values[value] for value in equation.operands], read)
        for value in last:
            values.pop(value, None)
        for value, result in zip(equation.outputs, results, strict=True):
            if value is not None and value not in last:
                values[value] = result
        del results
    return [values[value] if isinstance(value, Var) else value for value in block.outputs]


def _last_uses(block: Block) -> list[list[Var]]:
    """For each equation, the values that nothing reads after it; last, those never read."""
    seen = {value for value in block.outputs if isinstance(value, Var)}
    dead: list[list[Var]] = []
    for equation in reversed(block.equations):
        here = dict.fromkeys([*equation.operands, *equation.results])
        dead.append([value for value in here if value not in seen])
        seen.update(here)
    return [*dead[::-1], [value for value in block.inputs if value not in seen]]


@contextlib.contextmanager
def _mark_place(where: Where) -> Iterator[None]:
    """Equations recorded in this with block get the place of the equation that they come of."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_phase(where.phase))
        for name in where.scopes:
            stack.enter_context(named_scope(name))
        yield


def _run_equation(equation: Equation, values: dict[Var, Any], mesh: Mesh | None) -> Sequence[Any]:
    op: Any = equation.op
    args = [_fill(value, values) for value in equation.args]
    kwargs = {name: _fill(value, values) for name, value in equation.kwargs.items()}
    own = op.namespace == "functron"
    if mesh is not None and own and equation.name in COLLECTIVES:
        return [_communicate_in_lockstep(equation, args, kwargs, mesh)]
    run: Callable = op if own else _find_call(equation)
    if own and equation.outputs:
        run = functools.partial(_run_own, equation)
    elif mesh is not None and own and equation.name in EFFECTS:
        run = run_effect(equation)
        kwargs["where"] = [*kwargs.get("where", ()), *effect_masks()]
    elif own and mesh is None:  # in lockstep its operands say which rank it is of
        run = functools.partial(_run_effect, equation)
    results = _map_ranks(mesh, run, args, kwargs)
    return results if equation.outputs else []


def _map_ranks(mesh: Mesh | None, run: Callable, args: Sequence, kwargs: Mapping) -> Sequence[Any]:
    """The results of ``run(*args, **kwargs)``, flat: here, or each of them as the ranks' own."""
    if mesh is None:
        return _flatten(run(*args, **kwargs))
    rows = []
    for rank in range(mesh.size):
        named = {name: _pick_rank(value, rank) for name, value in kwargs.items()}
        rows.append(_flatten(run(*(_pick_rank(value, rank) for value in args), **named)))
    return [RankValues(column) for column in zip(*rows, strict=True)]


def _flatten(out: Any) -> Sequence[Any]:
    return [out] if isinstance(out, torch.Tensor) else pytree.tree_leaves(out)


def _fill(argument: Any, values: Mapping[Var, Any]) -> Any:
    """An argument of an operation, with tensors for variables."""
    if isinstance(argument, Var):
        return values[argument]
    if isinstance(argument, (list, tuple)):
        return [_fill(item, values) for item in argument]
    return argument


def _pick_rank(argument: Any, rank: int) -> Any:
    """An argument of an operation, as one of the ranks in lockstep has it."""
    if isinstance(argument, RankValues):
        return argument[rank]
    if isinstance(argument, list):
        return [_pick_rank(item, rank) for item in argument]
    return argument


# --- scans


def _take_operands(equation: Equation, values: dict[Var, Any], last: Sequence[Var]) -> list:
    """The operands of a scan, without those in `values` that nothing else reads."""
    found = [values[value] for value in equation.args]
    for value in last:
        values.pop(value, None)
    return [[*value] if type(value) is list else value for value in found]


def _find_places(
    equation: Equation, last: Sequence[Var], donated: Mapping[Var, Var]
) -> dict[Var, int]:
    """By results of a scan, the positions of operands in whose memory they are put together."""
    args, first = list(equation.args), equation.scan.first_x
    found = {}
    for new in equation.results if donated else ():
        old = donated.get(new)
        if old is not None and old in last and args.count(old) == 1 and old.type == new.type:
            found[new] = args.index(old)
    return {new: at for new, at in found.items() if at >= first}


def _run_scan(
    equation: Equation,
    operands: list,
    mesh: Mesh | None,
    sliced: AbstractSet[Var],
    places: Mapping[Var, int],
) -> Sequence[Any]:
    op, recorder = equation.scan, active()
    if recorder is not None and mesh is None and _can_record(equation, operands):
        results = [(v.shape, v.stride, v.dtype, v.device) for v in equation.results]
        return recorder.emit(op, [recorder.var(x) for x in operands], results)
    consts, carry, xs = op.divide(operands)
    columns = [x if type(x) is list else [*_map_ranks(mesh, torch.unbind, [x], {})] for x in xs]
    dead, ranks = _last_uses(op.body), range(1 if mesh is None else mesh.size)
    stacks, place = [], None
    for value, result in list(zip(op.body.outputs, equation.outputs, strict=True))[op.num_carry :]:
        place = operands[places[result]] if result is not None and result in places else None
        is_sliced = result in sliced
        stacks.append([_Stack(value, op.length, is_sliced, place) for _ in ranks])
    del place
    operands.clear()
    xs.clear()
    for index in range(op.length)[:: -1 if op.reverse else 1]:
        given = [*consts, *carry, *_take_row(columns, index)]
        inner = dict(zip(op.body.inputs, given, strict=True))
        given.clear()
        carry = []
        with _in_row(op.name, index):
            out = _run(op.body, dead, inner, mesh)
        carry = out[: op.num_carry]
        for stack, row in zip(stacks, out[op.num_carry :], strict=True):
            for rank, own in zip(ranks, stack, strict=True):
                own.put(index, _pick_rank(row, rank))
        del inner, out
    taken = (RankValues(own.take() for own in stack) for stack in stacks)
    return [*carry, *(ranks_ if mesh is not None else ranks_[0] for ranks_ in taken)]


def _take_row(columns: Iterable[list], index: int) -> Iterator[Any]:
    """A slice of each column, which lets go of it."""
    for column in columns:
        row, column[index] = column[index], None
        yield row


class _Stack:
    """A result of a scan that is being put together, in the layout of `Var.stacked`.

    Args:
        sliced: leave it the list of its slices.
        into: a tensor whose memory it may take, slice by slice.
    """

    def __init__(self, like: Var, length: int, sliced: bool, into: torch.Tensor | None):
        self.like, (self.shape, self.stride) = like, like.stacked(length)
        # plain rows are written to their place at once; others cannot be: they are stacked at last
        self.plain = not compat.transforms_active() and not compat.dispatch_modes_active()
        self.rows: list[Any] = [None] * length
        self.sliced = sliced and self.plain
        self.whole: torch.Tensor | None = None
        if self.plain and into is not None and into.stride() == self.stride:
            self.whole = into

    def put(self, index: int, row: torch.Tensor) -> None:
        """Let `row` be the slice at `index`."""
        if self.sliced and row.stride() != self.stride[1:]:
            kind = {"dtype": row.dtype, "device": row.device}
            row = torch.empty_strided(self.shape[1:], self.stride[1:], **kind).copy_(row)
        if self.sliced or not self.plain:
            self.rows[index] = row
            return
        if self.whole is None:
            kind = {"dtype": row.dtype, "device": row.device}
            self.whole = torch.empty_strided(self.shape, self.stride, **kind)
        self.whole[index].copy_(row)

    def take(self) -> Any:
        """The stack, or the list of its slices."""
        if self.sliced:
            return self.rows
        if self.whole is not None:
            return self.whole
        if not self.rows:
            return torch.zeros(self.shape, dtype=self.like.dtype, device=self.like.device)
        order = sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim))
        inner = [dim - 1 for dim in order if dim]  # the leading dim has the largest stride
        stacked = torch.stack([row.permute(inner) for row in self.rows])
        self.rows.clear()
        return stacked.permute([0, *(1 + inner.index(dim) for dim in range(len(inner)))])


def _can_record(equation: Equation, operands: Sequence[torch.Tensor]) -> bool:
    """Whether this can be recorded as it is: its blocks hold for operands of these layouts."""
    if compat.transforms_active() or None in equation.outputs:
        return False
    rows = zip(equation.args, operands, strict=True)
    return all(value.stride == tuple(operand.stride()) for value, operand in rows)


# --- switches and loops that run while something holds


def _run_flow(equation: Equation, operands: list, mesh: Mesh | None) -> Sequence[Any]:
    """The results of the branch that the index chooses, or the last carry of a loop.

    Where ranks are at different branches, or are done at different iterations, all blocks run for
    all ranks, and each rank has the results that it chose.
    """
    op, recorder = equation.op, active()
    if recorder is not None and mesh is None and _can_record(equation, operands):
        results = [(v.shape, v.stride, v.dtype, v.device) for v in equation.results]
        return recorder.emit(op, [recorder.var(x) for x in operands], results)
    if isinstance(op, Switch):
        return _run_switch(op, operands, mesh)
    assert isinstance(op, While)
    return _run_while(op, equation, operands, mesh)


def _run_inner(block: Block, operands: Sequence[Any], mesh: Mesh | None) -> list:
    return _run(block, _last_uses(block), dict(zip(block.inputs, operands, strict=True)), mesh)


def _run_switch(op: Switch, operands: list, mesh: Mesh | None) -> Sequence[Any]:
    index, *rest = operands
    known = _read_numbers(index)
    taken = range(len(op.branches)) if known is None else sorted({*map(op.clamp, known)})
    last = len(op.branches) - 1
    results: Any = None
    for branch in taken:  # an index below the range means the first, one above it the last
        test = torch.ge if branch == last else torch.le if branch == 0 else torch.eq
        (chosen,) = _map_ranks(mesh, test, [index, branch], {})
        with effects_where(*([chosen] if len(taken) > 1 else [])):
            others = _run_inner(op.branches[branch], rest, mesh)
        results = others if results is None else _select(chosen, others, results, mesh)
    if len(taken) == 1 and _is_mapped(known, mesh):
        results = _select(index == index, results, results, mesh)
    return results


def _run_while(op: While, equation: Equation, operands: list, mesh: Mesh | None) -> Sequence[Any]:
    consts, carry = operands[: op.num_consts], operands[op.num_consts :]
    while True:
        (holds,) = _run_inner(op.cond, [*consts, *carry], mesh)
        known = _read_numbers(holds)
        if known is None and active() is not None:
            line = equation.where.line or "an unknown line"
            raise ValueError(
                f"a program that is traced again has a while loop, at {line}, under a map or in "
                "other layouts than it was traced with, and how often it runs is not known; wanted "
                "the function itself; fix: trace what the program was traced from, in place of it"
            )
        if known is not None and not any(known):
            return carry
        with effects_where(*([] if known and all(known) else [holds])):
            after = _run_inner(op.body, [*consts, *carry], mesh)
        alike = known and all(known) and not _is_mapped(known, mesh)
        carry = after if alike else _select(holds, after, carry, mesh)
        if known is None:  # of shapes alone
            return carry


def _is_mapped(known: list[int] | None, mesh: Mesh | None) -> bool:
    """Whether results must count as different on simulated ranks, though they are at one branch."""
    return mesh is None and known is not None and len(known) > 1


def _read_numbers(value: Any) -> list[int] | None:
    """The numbers of a scalar on all ranks that are here; None: they are not known."""
    if isinstance(value, RankValues):
        return [int(each) for each in value]
    plain = compat.plain(value)
    if active() is not None or compat.faking() or plain.is_meta:
        return None
    with compat.no_transforms():
        return [int(each) for each in plain.flatten().tolist()]


def _select(chosen: Any, new: Sequence, old: Sequence, mesh: Mesh | None) -> list:
    """`new` where `chosen` is true, else `old`; on each rank."""
    rows = zip(new, old, strict=True)
    return [_map_ranks(mesh, torch.where, [chosen, *row], {})[0] for row in rows]


# --- collectives, and other operations of functron's own


def _communicate_in_lockstep(
    equation: Equation, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh
) -> RankValues:
    """A collective among stacked ranks: what its primitive does across a simulated axis."""
    x, name, size, *more = args
    axis = SimulatedAxis(name, size, torch.arange(size))
    out: list[Any] = [None] * mesh.size
    for group in _groups(mesh, name):
        stacked = torch.stack([x[rank] for rank in group])
        if equation.name == "ragged_all_to_all":
            sends = torch.stack([more[0][rank] for rank in group])
            result, dim = exchange_of_ranks(stacked, sends, more[2]), 0
        else:
            primitive, options = _primitive(equation.name, more, kwargs)
            result, dim = primitive.across(stacked, primitives.PrimitiveCall(axis, **options))
        rows = [result] * size if dim is None else result.unbind(dim)
        for rank, row in zip(group, rows, strict=True):
            out[rank] = row.contiguous()
    return RankValues(out)


def _groups(mesh: Mesh, axis: str) -> list[list[int]]:
    """The ranks that differ only along `axis`, in order, for every such group."""
    groups: dict[tuple, list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        groups.setdefault(tuple(v for k, v in at.items() if k != axis), []).append(rank)
    return list(groups.values())


def _primitive(
    name: str, more: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """The primitive of a collective, and its options, from what follows its axis and size."""
    if name == "ppermute":
        return primitives.Ppermute, {"perm": tuple(zip(*more, strict=True))}
    if name == "pbroadcast":
        return primitives.Broadcast, {"source": more[0]}
    return _COLLECTIVES[name], kwargs


def _run_own(equation: Equation, *args: Any, **kwargs: Any) -> Any:
    """An operation of functron's, where axes are bound or none is."""
    name = equation.name
    if name in _OTHERS:
        return _OTHERS[name](equation.op, *args)
    if name not in COLLECTIVES and name not in _STATEMENTS:  # it brings its own vmap rule
        op: Any = equation.op
        return op(*args, **kwargs)
    x, axis, *sizes = args
    found = lookup(axis)
    if name in _STATEMENTS:
        return _STATEMENTS[name](x, found[0]) if found else x
    here = found[0].size if found else 1
    if here != sizes[0]:
        raise ValueError(
            f"a traced program: {name} over {axis!r} was traced for {sizes[0]} ranks, and there "
            f"are {here} here; wanted the mesh that the program was traced for; fix: trace it for "
            "this one"
        )
    if name == "ragged_all_to_all":
        _, sends, receives, capacity, room, expected = (*sizes, 0, 0)[:6]
        call = RaggedCall(found[0], capacity, room=room, expected=expected)
        return RaggedAllToAll.apply(x, sends, receives, found[0].token, call)
    primitive, options = _primitive(name, sizes[1:], kwargs)
    return primitive.call(x, found[0], **options)


def _run_effect(equation: Equation, *args: Any, **kwargs: Any) -> None:
    """An operation without results: of simulated ranks, on the plain value of them all."""
    if equation.name in EFFECTS:
        repeat_effect(equation, *args, **kwargs)
        return
    op: Any = equation.op
    plain = pytree.tree_map_only(torch.Tensor, compat.plain, args)
    with compat.no_transforms():
        recorder = active()
        op(*plain) if recorder is None else recorder.effect(op, *plain)


_OTHERS: Mapping[str, Callable[..., torch.Tensor]] = {
    "barrier": lambda op, x, dep: x if active() is None else op(x, dep),
    "checkpoint_name": lambda op, x, name: x if active() is None else op(x, name),
    "assume_share": lambda op, x: as_share(x),
    "require_share": lambda op, x, axes: no_share(x, axes),
}
_STATEMENTS: Mapping[str, Callable[[torch.Tensor, Axis], torch.Tensor]] = {
    "vary": primitives.Vary.call,
    "assume_replicated": primitives.AssumeReplicated.call,
    "require_replicated": lambda x, axis: (
        axis.mark(x, "require_replicated") if isinstance(axis, TracedAxis) else x
    ),
}
_COLLECTIVES: Mapping[str, Any] = {
    each.op: each
    for each in (
        primitives.Psum,
        primitives.Pmax,
        primitives.Pmin,
        primitives.AllGather,
        primitives.PsumScatter,
        primitives.AllToAll,
    )
}


# --- operations of torch that need more than a call


def _find_call(equation: Equation) -> Callable:
    """A function that does an equation's operation on values of any layout, also under vmaps."""
    op: Any = equation.op
    if op in (_aten.view.default, _aten._unsafe_view.default):
        return torch.reshape  # values may be laid out otherwise than they were traced
    if op in _STRIDED and equation.args[0].stride == contiguous_strides(equation.args[0].shape):
        return _STRIDED[op]
    if compat.transforms_active():
        if op in _BATCHED and equation.kwargs.get("attn_mask") is None:
            return lambda *args, **kwargs: _run_folded(op, *args, **kwargs)
        if op._schema.name.startswith("aten::_foreach_"):
            return lambda *args, **kwargs: _run_foreach(op, args, kwargs)
    return op


_STRIDED: Mapping[Any, Callable] = {
    _aten.as_strided.default: lambda x, size, stride, offset=None: read_view(
        x, Strided(tuple(size), tuple(stride), offset or 0)
    ),
    _aten.as_strided_scatter.default: lambda x, source, size, stride, offset=None: write_view(
        x, source, Strided(tuple(size), tuple(stride), offset or 0)
    ),
}

_BATCHED: Mapping[Any, int] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 2,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
    _aten._scaled_dot_product_flash_attention.default: 2,
    _aten._scaled_dot_product_flash_attention_backward.default: 3,
    _aten._scaled_dot_product_cudnn_attention.default: 2,
    _aten._scaled_dot_product_cudnn_attention_backward.default: 3,
}
"""Operations without a batching rule, and how many of their results there are without dropout.

These results lead with a dim of samples, and so do the operands that are no vectors.
"""


def _run_folded(op: Any, *args: Any, **kwargs: Any) -> list:
    """An operation of `_BATCHED` under vmaps; None for the results that dropout has."""
    found = _Folded.apply(functools.partial(op, **kwargs), _BATCHED[op], *args)
    return [*found, *[None] * (len(op._schema.returns) - len(found))]


class _Folded(Function):
    """The first `count` results of an operation, with simulated ranks among the samples."""

    generate_vmap_rule = False

    @staticmethod
    def forward(op, count, *args):
        return tuple(op(*args)[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, op, count, *args):
        size = info.batch_size

        def fold(x: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None and x.dim() == 1:
                return x  # what dropout would need
            x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        rows = zip(args, in_dims[2:], strict=True)
        folded = [fold(x, dim) if isinstance(x, torch.Tensor) else x for x, dim in rows]
        out: Any = _Folded.apply(op, count, *folded)
        return tuple(x.unflatten(0, (size, -1)) for x in out), (0,) * len(out)


def _norm(x: torch.Tensor, order: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.linalg.vector_norm(x, order, dtype=dtype)


def _run_foreach(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list:
    """A multi-tensor operation, which vmap does not know, tensor by tensor."""
    name = op._schema.name.removeprefix("aten::_foreach_")
    one: Callable = _norm if name == "norm" else getattr(torch, name)
    if name in ("addcmul", "addcdiv") and len(args) == 4:
        args, kwargs = args[:3], {"value": args[3]}

    def at(index: int, value: Any) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    return [
        one(*(at(i, x) for x in args), **{key: at(i, x) for key, x in kwargs.items()})
        for i in range(len(args[0]))
    ]
