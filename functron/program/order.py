"""The order in which a compiled program is issued: what starts early, and what waits when.

A collective is asynchronous: it starts where its equation stands in the order, and the first
equation that reads its result waits for it. `functron.compiler` makes code in this order, and
`functron.program.timeline` foretells the time that it takes.

**Within a kernel**, the equations between two scans (`issued`): a collective starts as soon as its
operands are there, what leads to a collective runs before what leads to none, and nothing waits
while there is something else to compute. At its end a kernel has waited for all that it started.

**Between the iterations of a scan** (`split`, `overlapped`): gathers of a layer's parameters read
slices of xs and nothing that is carried, so those of the next layer can be under way while this one
is computed; reductions of its gradients lead to ys and to nothing that is carried, so they can
still be under way while the next one is. A scan is therefore cut into three parts, and the driver
runs them like a pipeline, one layer ahead and one behind:

    gather 2 ...............
    compute 1 ───────────── compute 2 ─────────────
                            reduce 1 ...............

At most one more layer's gathered parameters and one more layer's gradients are held for it.

**Sums over ranks of what a scan stacks** (`sunk`) are taken into the scan, one row per iteration,
so that they can be reduced behind it: the gradients of layers that data-parallel ranks hold whole.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from functron.program.equations import (
    Block,
    Equation,
    Fresh,
    Scan,
    Var,
    contiguous_strides,
)
from functron.program.recorder import live_equations
from functron.program.text import axis_of

_aten = torch.ops.aten


def issued(equations: Sequence[Equation]) -> list[Equation]:
    """The equations of a kernel in the order in which they are issued.

    The same on every rank, since it depends on nothing but the program. Of what could be next, a
    collective is; else what leads to a collective, the first such one; else the first as written.
    Where all that is left waits for collectives, it waits for the one that started first.
    """
    count = len(equations)
    collective = [axis_of(equation) is not None for equation in equations]
    if not any(collective):
        return list(equations)
    made_by = {value: i for i, equation in enumerate(equations) for value in equation.results}
    needs = [{made_by[v] for v in e.operands if v in made_by} for e in equations]
    leads = [count] * count  # to which collective first, itself included
    for i in reversed(range(count)):
        leads[i] = min(leads[i], i) if collective[i] else leads[i]
        for before in needs[i]:
            leads[before] = min(leads[before], leads[i])
    readers: dict[int, list[int]] = defaultdict(list)
    for i, before in enumerate(needs):
        for j in before:
            readers[j].append(i)
    missing = [len(before) for before in needs]
    ready = [(not collective[i], leads[i], i) for i in range(count) if not missing[i]]
    heapq.heapify(ready)
    under_way: list[int] = []
    order: list[Equation] = []

    def done(i: int) -> None:
        for reader in readers[i]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (not collective[reader], leads[reader], reader))

    while ready or under_way:
        if not ready:
            done(under_way.pop(0))
            continue
        *_, i = heapq.heappop(ready)
        order.append(equations[i])
        if collective[i]:
            under_way.append(i)
        else:
            done(i)
    assert len(order) == count
    return order


def waits(equations: Sequence[Equation]) -> list[list[Equation]]:
    """The collectives that are waited for before each equation, and last, those at the end."""
    under_way: dict[Var, Equation] = {}
    found: list[list[Equation]] = []
    for equation in equations:
        found.append([])
        for value in dict.fromkeys(equation.operands):
            if value in under_way:
                found[-1].append(under_way.pop(value))
        if axis_of(equation) is not None:
            under_way[equation.results[0]] = equation
    return [*found, list(under_way.values())]


Turn = Literal["gather", "begin", "compute", "reduce", "end"]


def overlapped(length: int, *, gathers: bool, reduces: bool) -> Iterator[tuple[Turn, int]]:
    """What the driver of a scan does for which iteration, in order.

    "gather" starts its gathers and "begin" waits for them; "reduce" starts its reductions, and
    "end" waits for them and computes what is left.
    """
    if gathers and length:
        yield "gather", 0
    for index in range(length):
        yield "begin", index
        if gathers and index + 1 < length:
            yield "gather", index + 1
        yield "compute", index
        if reduces:
            yield "reduce", index
            if index:
                yield "end", index - 1
    if reduces and length:
        yield "end", length - 1


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
        scatters: sums over ranks, whole or scattered, that lead to ys alone.
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
    """Sums over ranks that lead to no carry, and all that is computed from them."""
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
        elif _sums(equation) and barred.isdisjoint(equation.results):
            scatters.append(equation)
            made.update(equation.results)
    return scatters, after


def _sums(equation: Equation) -> bool:
    return axis_of(equation) is not None and equation.name in ("psum", "psum_scatter")


_STATEMENTS = frozenset(
    ("vary", "assume_replicated", "require_replicated", "assume_share", "require_share")
)
"""Operations that say something of a value, and return it."""

_MERGED_BYTES = 1 << 20
"""Rows below this size travel together: a collective costs as much as sending so many bytes."""


def sunk(block: Block) -> Block:
    """The block with sums over ranks of what scans stack computed by the scans, row by row.

    Only where nothing else reads what is summed, and where the iteration has not to wait for a
    reduction of its own first. Rows of less than a MiB that every rank gets are summed together.
    """
    reads = Counter(value for equation in block.equations for value in equation.operands)
    reads.update(value for value in block.outputs if isinstance(value, Var))
    reader = {value: equation for equation in block.equations for value in equation.operands}
    fresh, gone = Fresh(block), set[Equation]()
    equations: list[Equation] = []
    for equation in block.equations:
        op = equation.op
        if isinstance(op, Scan):
            equation = replace(equation, op=replace(op, body=sunk(op.body)))
            chains = _chains(equation, reads, reader)
            gone.update(link.equation for chain in chains.values() for link in chain)
            equation = _with_sums(equation, chains, fresh) if chains else equation
        equations.append(equation)
    kept = tuple(equation for equation in equations if equation not in gone)
    return replace(block, equations=kept)


@dataclass(frozen=True, eq=False)
class _Link:
    """An equation of a stack: its other arguments for a row, and the dim along which rows lie."""

    equation: Equation
    args: tuple[Any, ...]
    dim: int


def _chains(
    scan: Equation, reads: Counter[Var], reader: dict[Var, Equation]
) -> dict[int, list[_Link]]:
    """By the position of a stack: the equations that sum it over ranks, which act on each row."""
    op = scan.op
    assert isinstance(op, Scan)
    if op.length < 2:
        return {}
    carries = {v for v in op.body.outputs[: op.num_carry] if isinstance(v, Var)}
    scatters, after = _after(op.body.equations, carries)
    late = {value for equation in (*scatters, *after) for value in equation.results}
    found: dict[int, list[_Link]] = {}
    for position, row in enumerate(op.body.outputs):
        value, chain, dim = scan.outputs[position], [], 0
        if position < op.num_carry or value is None or not isinstance(row, Var) or row in late:
            continue
        while reads[value] == 1 and value in reader:
            link = _by_row(reader[value], dim)
            if link is None:
                break
            chain.append(link)
            value, dim = link.equation.results[0], link.dim
        while chain and not (_sums(chain[-1].equation) and chain[-1].dim == 0):
            chain.pop()
        if chain:
            found[position] = chain
    return found


def _by_row(equation: Equation, dim: int) -> _Link | None:
    """What an equation of a stack whose rows lie along `dim` does to each; None: it joins them."""
    args, name = equation.args[1:], equation.name
    if isinstance(equation.op, Scan) or len(equation.results) != 1:
        return None
    plain = name in _STATEMENTS or equation.op is _aten.clone.default
    cast = equation.op is _aten._to_copy.default and not set(equation.kwargs) - {"dtype"}
    if name == "psum" or plain or cast:
        return _Link(equation, args, dim)
    if equation.op is _aten.constant_pad_nd.default:
        padded = len(equation.results[0].shape) - len(args[0]) // 2
        return _Link(equation, args, dim) if dim < padded else None
    if name == "psum_scatter" and dim:
        return _Link(equation, args, dim - 1)
    if equation.op is _aten.permute.default:
        rest = [d - (d > dim) for d in args[0] if d != dim]
        return _Link(equation, (rest,), args[0].index(dim))
    if equation.op is _aten.view.default:
        old, new = equation.operands[0].shape, equation.results[0].shape
        before = math.prod(old[:dim])
        places = [d for d in range(len(new)) if math.prod(new[:d]) == before]
        there = next((d for d in places if new[d] == old[dim]), None)
        if there is not None and 0 not in old:
            return _Link(equation, ([*new[:there], *new[there + 1 :]],), there)
    return None


def _with_sums(scan: Equation, chains: dict[int, list[_Link]], fresh: Fresh) -> Equation:
    """The scan that sums its rows over ranks; what is small, in one piece."""
    op = scan.op
    assert isinstance(op, Scan)
    equations, rows, outputs = [*op.body.equations], [*op.body.outputs], [*scan.outputs]

    def add(like: Equation, made: Any, *args: Any, **kwargs: Any) -> list[Var]:
        """The results of an operation, whose first argument is a value or a list of them."""
        first = args[0] if isinstance(args[0], Var) else args[0][0]
        metas = [_meta(v) for v in (args[0] if isinstance(args[0], list) else (first,))]
        given = metas if isinstance(args[0], list) else metas[0]
        out = made(given, *args[1:], **kwargs)
        views = made in (_aten.view.default, _aten.permute.default, _aten.split_with_sizes.default)
        shared = {"storage": first.storage} if views or (like.op is made and like.aliases) else {}
        results = [
            fresh.like(
                first, shape=tuple(x.shape), stride=tuple(x.stride()), dtype=x.dtype, **shared
            )
            for x in (out if isinstance(out, list | tuple) else (out,))
        ]
        equations.append(Equation(made, args, kwargs, tuple(results), like.where))
        return results

    def summed(value: Var, chain: list[_Link]) -> Var:
        for link in chain:
            e = link.equation
            if e.name != "clone" or value.stride != contiguous_strides(value.shape):
                (value,) = add(e, e.op, value, *link.args, **e.kwargs)
        return value

    groups: dict[Any, list[int]] = defaultdict(list)
    for position, chain in chains.items():
        row, steps = rows[position], [link.equation for link in chain]
        whole = all(e.name == "psum" or e.name in _STATEMENTS for e in steps)
        small = whole and row.nbytes < _MERGED_BYTES
        small = small and row.stride == contiguous_strides(row.shape)
        same = repr([(e.op, e.args[1:], tuple(e.kwargs.items())) for e in steps])
        groups[row.dtype, row.device, same, -1 if small else position].append(position)
    for positions in groups.values():
        chain = chains[positions[0]]
        like, last = chain[0].equation, chain[-1].equation
        if len(positions) == 1:
            rows[positions[0]] = summed(rows[positions[0]], chain)
        else:
            sizes = [rows[position].size for position in positions]
            flat = [add(like, _aten.view.default, rows[p], [-1])[0] for p in positions]
            total = summed(add(like, _aten.cat.default, flat)[0], chain)
            parts = add(last, _aten.split_with_sizes.default, total, sizes)
            for position, part in zip(positions, parts, strict=True):
                shape = list(rows[position].shape)
                (rows[position],) = add(last, _aten.view.default, part, shape)
        for position in positions:
            outputs[position] = chains[position][-1].equation.results[0]
    body = replace(op.body, equations=tuple(equations), outputs=tuple(rows))
    return replace(scan, op=replace(op, body=body), outputs=tuple(outputs))


def _meta(value: Var) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
