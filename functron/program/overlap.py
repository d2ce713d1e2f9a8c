"""The order in which a compiled program is issued: what starts early, and what waits when.

A collective is asynchronous: it starts where its equation stands in the order, and the first
equation that reads its result waits for it. `functron.compiler` makes code in this order, and
`functron.program.timeline` predicts how long it takes.

**Within a kernel**, the equations between two scans (`order_equations`): a collective starts as
soon as its operands are there, what leads to a collective runs before what leads to none, and
nothing waits while there is something else to compute. At its end a kernel has waited for all that
it started.

**Between the iterations of a scan** (`split_scan_body`, `list_turns`): gathers of a layer's
parameters read slices of xs and nothing that is carried, so those of the next layer can be under
way while this one is computed; reductions of its gradients lead to ys and to nothing that is
carried, so they can still be under way while the next one is. A scan is therefore cut into three
parts, and the executor runs them like a pipeline, one layer ahead and one behind:

    gather 2 ...............
    compute 1 ───────────── compute 2 ─────────────
                            reduce 1 ...............

At most one more layer's gathered parameters and one more layer's gradients are held for it.
Where sums follow sums, as over dp of what was scattered over fsdp, those of the second round run
behind the layer after that one, and so on.

**Gathers and scatters of sequences** (`divide_sequences`) can be cut in parts, each under the
product of another part.

**Sums over ranks of what a scan stacks** (`sink_rank_sums`) are taken into the scan, one row per
iteration, so that they can be reduced behind it: the gradients of layers that data-parallel ranks
hold whole.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from functron.program.cost import equation_bytes, equation_flops, sent_bytes
from functron.program.equations import (
    Block,
    ControlFlow,
    Equation,
    Fresh,
    Scan,
    Var,
    Where,
    canonical_strides,
    contiguous_strides,
    rename_values,
)
from functron.program.recorder import live_equations
from functron.program.text import axis_of

_aten = torch.ops.aten


def order_equations(equations: Sequence[Equation]) -> list[Equation]:
    """The equations of a kernel in the order in which they are issued.

    The same on every rank, since it depends on nothing but the program. Of what could be next, a
    collective is; else what leads to a collective, the first such one; else the first as written.
    Where all that is left waits for collectives, it waits for the one that started first. What
    leads from one collective to another is waited for sooner: as soon as enough was computed
    meanwhile, for a GPU of today, so that what is left lies under the next collective too.
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
    chained = [c and any(leads[j] < count for j in readers[i]) for i, c in enumerate(collective)]
    now, free = 0.0, dict.fromkeys(map(axis_of, equations), 0.0)
    ends: dict[int, float] = {}
    under_way: list[int] = []
    order: list[Equation] = []

    def done(i: int) -> None:
        for reader in readers[i]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (not collective[reader], leads[reader], reader))

    while ready or under_way:
        over = [i for i in under_way if chained[i] and ends[i] <= now]
        if over or not ready:
            i = over[0] if over else under_way[0]
            under_way.remove(i)
            now = max(now, ends[i])
            done(i)
            continue
        *_, i = heapq.heappop(ready)
        order.append(equations[i])
        if collective[i]:
            axis = axis_of(equations[i])
            ends[i] = free[axis] = max(now, free[axis]) + _guess_seconds(equations[i])
            under_way.append(i)
        else:
            now += _guess_seconds(equations[i])
            done(i)
    assert len(order) == count
    return order


_FLOPS, _MEMORY, _LINK, _LATENCY = 5e14, 2e12, 4e10, 2e-5
"""About those of a GPU of 2023 and its links, per second, and a collective's least seconds."""


def _guess_seconds(equation: Equation) -> float:
    """About how long an equation takes, on every machine alike: for an order alone."""
    if axis_of(equation) is not None:
        return _LATENCY + sent_bytes(equation) / _LINK
    if isinstance(equation.op, ControlFlow) or equation.aliases:
        return 0.0
    return max(equation_flops(equation) / _FLOPS, equation_bytes(equation) / _MEMORY)


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


def list_turns(length: int, *, gathers: bool, rounds: int) -> Iterator[tuple[Turn, int]]:
    """The turns of a scan's executor, and for which iteration each is, in order.

    "gather" starts its gathers and "begin" waits for them; "reduce" starts its first round of
    reductions. Each "end" waits for a round, computes what follows, and starts the next one.
    """
    if gathers and length:
        yield "gather", 0
    for index in range(length):
        yield "begin", index
        if gathers and index + 1 < length:
            yield "gather", index + 1
        yield "compute", index
        if rounds:
            yield "reduce", index
        for before in range(min(rounds, index)):
            yield "end", index - 1 - before
    for index in range(length, length + rounds):
        for before in range(index - length, min(rounds, index)):
            yield "end", index - 1 - before


_CHEAP = frozenset(
    f"aten::{name}"
    for name in ("_to_copy", "_unsafe_view", "alias", "cat", "clone", "reshape", "view")
)


@dataclass(frozen=True, eq=False)
class SumRound:
    """Sums over ranks that an iteration starts together, and what follows from them.

    Attributes:
        sums: of whole values, or scattered; they lead to ys alone.
        block: from the constants, xs, results of `sums` and `passed` to the ys that are `late`,
            then, where there is a next round, its operands and what it is passed.
        passed: what the block reads, or hands on, that constants, xs and `sums` are not.
        late: the body's outputs that the block makes.
    """

    sums: tuple[Equation, ...]
    block: Block
    passed: tuple[Var, ...]
    late: tuple[Var, ...]

    @property
    def reads(self) -> tuple[Var, ...]:
        """The operands of its sums, and what it is passed."""
        return (*(value for equation in self.sums for value in equation.operands), *self.passed)


@dataclass(frozen=True, eq=False)
class OverlapSplit:
    """The body of a scan in parts.

    Attributes:
        head: from constants and xs to the operands of `gathers`.
        gathers: all-gathers that depend on xs alone.
        core: from the body's inputs, and the gathers' results, to the next carry, the ys that no
            round makes, and what the first round reads.
        rounds: of sums over ranks, each of results of the one before.
        late: by output of the body that a round makes, which one: 1 for the first.
    """

    head: Block
    gathers: tuple[Equation, ...]
    core: Block
    rounds: tuple[SumRound, ...]
    late: Mapping[Var, int]


def split_scan_body(op: Scan, wanted: Sequence[Any]) -> OverlapSplit | None:
    """The body of a scan in parts; None where its iterations cannot overlap.

    Args:
        wanted: those outputs of the body that are needed.
    """
    body, start = op.body, op.first_x
    if op.length < 2:
        return None
    carries = {v for v in body.outputs[: op.num_carry] if isinstance(v, Var)}
    needed = [v for v in wanted if isinstance(v, Var)]
    equations = live_equations(body.equations, needed)
    fixed = [*body.inputs[: op.num_consts], *body.inputs[start:]]
    early, gathers = _find_early(equations, fixed, body.inputs[start:])
    found = _find_rounds(equations, carries)
    if not gathers and not found:
        return None
    rounds = _make_rounds(found, fixed, needed)
    late = {v: number for number, each in enumerate(rounds, 1) for v in each.late}
    gathered = [v for e in gathers for v in e.results]
    ends = [v for v in needed if v not in late]
    ends += rounds[0].reads if rounds else ()
    gone = {*gathers, *(e for sums, after in found for e in (*sums, *after))}
    rest = live_equations([e for e in equations if e not in gone], ends)
    core = Block((*body.inputs, *gathered), tuple(rest), tuple(ends))
    operands = [v for e in gathers for v in e.operands]
    first = live_equations(early, operands)
    used = {*operands, *(v for e in first for v in e.operands)}
    head = Block(tuple(v for v in fixed if v in used), tuple(first), tuple(operands))
    return OverlapSplit(head, tuple(gathers), core, rounds, late)


_Rounds = list[tuple[list[Equation], list[Equation]]]
"""Sums, and what is computed from them and from none of the next round."""


def _make_rounds(
    found: _Rounds, fixed: Sequence[Var], needed: Sequence[Var]
) -> tuple[SumRound, ...]:
    """Rounds with what each hands to the next."""
    rounds: list[SumRound] = []
    for sums, after in reversed(found):
        handed = rounds[-1].reads if rounds else ()
        summed = [v for e in sums for v in e.results]
        made = {*summed, *(v for e in after for v in e.results)}
        late = tuple(v for v in needed if v in made)
        reads = dict.fromkeys([*(v for e in after for v in e.operands), *handed])
        passed = tuple(v for v in reads if v not in made and v not in fixed)
        inputs = (*(v for v in fixed if v in reads), *summed, *passed)
        block = Block(inputs, tuple(after), (*late, *handed))
        rounds.append(SumRound(tuple(sums), block, passed, late))
    return tuple(reversed(rounds))


def _find_early(
    equations: Sequence[Equation], fixed: Collection[Var], xs: Collection[Var]
) -> tuple[list[Equation], list[Equation]]:
    """Cheap equations of constants and xs, and the all-gathers of what depends on xs."""
    known, moving = set(fixed), set(xs)
    early: list[Equation] = []
    gathers: list[Equation] = []
    for equation in equations:
        operands = equation.operands
        if isinstance(equation.op, ControlFlow) or not operands or not known.issuperset(operands):
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


def _find_rounds(equations: Sequence[Equation], carries: Collection[Var]) -> _Rounds:
    """Sums over ranks that lead to no carry, by how many of them come before, and what follows."""
    barred = set(carries)  # what leads to a carry, or to an effect that must not come later
    for equation in reversed(equations):
        if not barred.isdisjoint(equation.results) or equation.ordered:
            barred.update(equation.operands)
    rounds: _Rounds = []
    number: dict[Var, int] = {}  # of the round that a value comes from, from 1
    for equation in equations:
        last = max((number.get(v, 0) for v in equation.operands), default=0)
        if _is_sum(equation) and barred.isdisjoint(equation.results):
            rounds += [([], [])] if last == len(rounds) else []
            rounds[last][0].append(equation)
            last += 1
        elif last:
            rounds[last - 1][1].append(equation)
        number.update(dict.fromkeys(equation.results, last))
    return rounds


def _is_sum(equation: Equation) -> bool:
    return axis_of(equation) is not None and equation.name in ("psum", "psum_scatter")


_STATEMENTS = frozenset(
    ("vary", "assume_replicated", "require_replicated", "assume_share", "require_share")
)
"""Operations that say something of a value, and return it."""


def is_statement(equation: Equation) -> bool:
    """Whether an equation says something of a value, and returns it."""
    op = equation.op
    own = not isinstance(op, ControlFlow) and op.namespace == "functron"
    return own and equation.name in _STATEMENTS


_MERGED_BYTES = 1 << 20
"""Rows below this size travel together: starting a collective takes as long as sending this many
bytes."""


def arrange_block(block: Block, *, prefetch: bool, sequence_parts: int) -> Block:
    """The block as it is compiled for processes; see `sink_rank_sums` and `divide_sequences`."""
    block = sink_rank_sums(block) if prefetch else block
    return block if sequence_parts == 1 else divide_sequences(block, sequence_parts)


def sink_rank_sums(block: Block) -> Block:
    """The block with sums over ranks of what scans stack computed by the scans, row by row.

    Only where nothing else reads what is summed. Rows of less than a MiB that every rank gets are
    summed together.
    Where microbatches are added up first, the last one is written out behind their scan.
    """
    block = _peel_last_iterations(block)
    links = _Links(block)
    fresh, gone = Fresh(block), set[Equation]()
    equations: list[Equation] = []
    for equation in block.equations:
        op = equation.op
        if isinstance(op, Scan):
            equation = replace(equation, op=replace(op, body=sink_rank_sums(op.body)))
            chains = links.of_rows(equation)
            gone.update(link.equation for chain in chains.values() for link in chain)
            equation = _add_sums(equation, chains, fresh) if chains else equation
        equations.append(equation)
    kept = tuple(equation for equation in equations if equation not in gone)
    return replace(block, equations=kept)


@dataclass(frozen=True, eq=False)
class _Link:
    """An equation of a stack as one of its rows: its arguments, and the dim along which rows lie.

    `args` has None for the row itself, and other stacks for their rows.
    """

    equation: Equation
    args: tuple[Any, ...]
    dim: int


class _Links:
    """The chains of equations that a block's values lead to."""

    def __init__(self, block: Block):
        self.reads = Counter(value for e in block.equations for value in e.operands)
        self.reads.update(value for value in block.outputs if isinstance(value, Var))
        self.reader = {value: e for e in block.equations for value in e.operands}
        self.made = {v: i for i, e in enumerate(block.equations) for v in e.results}

    def of_rows(self, scan: Equation) -> dict[int, list[_Link]]:
        """By the position of a stack: the equations that sum it over ranks."""
        op = scan.scan
        if op.length < 2:
            return {}
        found: dict[int, list[_Link]] = {}
        for position, row in enumerate(op.body.outputs):
            stack = scan.outputs[position]
            if position >= op.num_carry and isinstance(row, Var) and stack:
                chain = self.to_sum(stack)
                if chain:
                    found[position] = chain
        return found

    def to_sum(self, value: Var) -> list[_Link]:
        """The equations that sum a stack over ranks, as they act on each of its rows."""
        chain: list[_Link] = []
        dim, before = 0, self.made.get(value, -1)
        while self.reads[value] == 1 and value in self.reader:
            link = _act_on_rows(self.reader[value], value, dim)
            others = [v for v in link.args if isinstance(v, Var)] if link else []
            if link is None or any(self.made.get(v, -1) >= before for v in others):
                break
            chain.append(link)
            value, dim = link.equation.results[0], link.dim
        while chain and not (_is_sum(chain[-1].equation) and chain[-1].dim == 0):
            chain.pop()
        return chain


def _peel_last_iterations(block: Block) -> Block:
    """The block with the last iteration of scans written out whose sums are summed over ranks."""
    links = _Links(block)
    fresh = Fresh(block)
    equations: list[Equation] = []
    for equation in block.equations:
        op = equation.op
        if isinstance(op, Scan) and op.length > 1 and len(equation.outputs) == op.num_carry:
            makers = {v: e for e in op.body.equations for v in e.results}
            rows = list(zip(op.body.outputs, equation.outputs, strict=True))
            distinct = len({*op.body.outputs}) == len(rows)
            own = all(x in makers and not makers[x].aliases for x in op.body.outputs)
            sums = (_is_sum_with_stack(x, makers) and v and links.to_sum(v) for x, v in rows)
            if distinct and own and any(sums):
                equations += _peel_scan(equation, op, fresh)
                continue
        equations.append(equation)
    return replace(block, equations=tuple(equations))


def _is_sum_with_stack(value: Var, makers: dict[Var, Equation]) -> bool:
    """Whether a value is something plus what a scan stacks."""
    added = makers.get(value)
    if added is None or added.op is not _aten.add.Tensor:
        return False
    for term in added.operands:
        maker = makers.get(term)
        while maker is not None and (maker.name in _STATEMENTS or maker.name == "_to_copy"):
            term = maker.operands[0]
            maker = makers.get(term)
        if maker is not None and isinstance(maker.op, Scan):
            return term not in maker.outputs[: maker.op.num_carry]
    return False


def _peel_scan(scan: Equation, op: Scan, fresh: Fresh) -> list[Equation]:
    """A scan without ys as one of all iterations but the last, and that written out."""
    made: list[Equation] = []
    last = op.length - 1
    consts, first_carry, stacks = op.divide(scan.args)

    def view(what: Any, value: Var, shape: tuple[int, ...], *args: int) -> Var:
        stride = value.stride if len(shape) == len(value.shape) else value.stride[1:]
        out = fresh.like(value, shape=shape, stride=stride, storage=value.storage)
        made.append(Equation(what, (value, 0, *args), {}, (out,), scan.where))
        return out

    first, place = (1, 0) if op.reverse else (0, last)
    xs, rows = [], []
    for value in stacks:
        shape = (last, *value.shape[1:])
        xs.append(view(_aten.slice.Tensor, value, shape, first, first + last))
        rows.append(view(_aten.select.int, value, value.shape[1:], place))
    carry = [fresh.like(value) for value in op.divide(op.body.inputs)[1]]
    args = (*consts, *first_carry, *xs)
    made.append(replace(scan, op=replace(op, length=last), args=args, outputs=tuple(carry)))
    known: dict[Var, Var] = dict(zip(op.body.inputs, [*consts, *carry, *rows], strict=True))
    storages = {old.storage: new.storage for old, new in known.items()}
    wanted = {v: result for v, result in zip(op.body.outputs, scan.outputs, strict=True) if result}
    for equation in op.body.equations:
        for value in equation.results:
            if value in wanted:
                known[value] = wanted[value]
            else:
                known[value] = fresh.like(value, storage_bytes=value.storage_bytes)
                if value.storage in storages:
                    known[value] = replace(known[value], storage=storages[value.storage])
            storages.setdefault(value.storage, known[value].storage)
        made.append(rename_values(equation, known))
    return made


def _act_on_rows(equation: Equation, value: Var, dim: int) -> _Link | None:
    """The work of an equation on each row of a stack along `dim`; None: it joins them."""
    name, args = equation.name, tuple[Any, ...]([None, *equation.args[1:]])
    if isinstance(equation.op, ControlFlow) or len(equation.results) != 1:
        return None
    plain = name in _STATEMENTS or equation.op is _aten.clone.default
    cast = equation.op is _aten._to_copy.default and not set(equation.kwargs) - {"dtype"}
    if name == "psum" or plain or cast:
        return _Link(equation, args, dim)
    if name == "psum_scatter" and dim:
        return _Link(equation, args, dim - 1)
    if equation.op is _aten.add.Tensor and not equation.kwargs and dim == 0:
        alike = [v for v in equation.operands if v.shape == value.shape]
        given = tuple(None if v is value else v for v in equation.args)
        return _Link(equation, given, 0) if len(alike) == 2 and given.count(None) == 1 else None
    if equation.op is _aten.constant_pad_nd.default:
        padded = len(equation.results[0].shape) - len(args[1]) // 2
        return _Link(equation, args, dim) if dim < padded else None
    if equation.op is _aten.permute.default:
        rest = [d - (d > dim) for d in args[1] if d != dim]
        return _Link(equation, (None, rest), args[1].index(dim))
    if equation.op is _aten.view.default:
        old, new = value.shape, equation.results[0].shape
        before = math.prod(old[:dim])
        places = [d for d in range(len(new)) if math.prod(new[:d]) == before]
        there = next((d for d in places if new[d] == old[dim]), None)
        if there is not None and 0 not in old:
            return _Link(equation, (None, [*new[:there], *new[there + 1 :]]), there)
    return None


def _add_sums(scan: Equation, chains: dict[int, list[_Link]], fresh: Fresh) -> Equation:
    """The scan that sums its rows over ranks; what is small, in one piece."""
    op = scan.scan
    inputs, operands = [*op.body.inputs], [*scan.args]
    equations, rows, outputs = [*op.body.equations], [*op.body.outputs], [*scan.outputs]
    add = _Adder(fresh, equations)

    def row_of(stack: Var) -> Var:
        """A row of another stack, an input of the body from here on."""
        row = fresh.like(stack, "row", shape=stack.shape[1:], stride=stack.stride[1:])
        inputs.append(row)
        operands.append(stack)
        return row

    def apply_chain(row: Var, chain: Sequence[_Link]) -> Var:
        for link in chain:
            e = link.equation
            if e.name == "clone" and row.stride == contiguous_strides(row.shape):
                continue
            args = [row if v is None else row_of(v) if isinstance(v, Var) else v for v in link.args]
            (row,) = add(e.where, e.op, *args, **e.kwargs)
        return row

    groups: dict[Any, list[int]] = defaultdict(list)
    last: dict[int, list[_Link]] = {}  # from the first sum on
    for position, chain in chains.items():
        start = next(i for i, link in enumerate(chain) if _is_sum(link.equation))
        last[position] = chain[start:]
        row = rows[position] = apply_chain(rows[position], chain[:start])
        steps = [link.equation for link in chain[start:]]
        small = all(e.name == "psum" or e.name in _STATEMENTS for e in steps)
        small = small and row.nbytes < _MERGED_BYTES
        small = small and row.stride == contiguous_strides(row.shape)
        same = repr([(e.op, e.args[1:], tuple(e.kwargs.items())) for e in steps])
        groups[row.dtype, row.device, same, -1 if small else position].append(position)
        outputs[position] = chain[-1].equation.results[0]
    for positions in groups.values():
        chain = last[positions[0]]
        if len(positions) == 1:
            rows[positions[0]] = apply_chain(rows[positions[0]], chain)
            continue
        where = chain[0].equation.where
        sizes = [rows[position].size for position in positions]
        flat = [add(where, _aten.view.default, rows[p], [-1])[0] for p in positions]
        total = apply_chain(add(where, _aten.cat.default, flat)[0], chain)
        parts = add(where, _aten.split_with_sizes.default, total, sizes)
        for position, part in zip(positions, parts, strict=True):
            shape = list(rows[position].shape)
            (rows[position],) = add(where, _aten.view.default, part, shape)
    body = Block(tuple(inputs), tuple(equations), tuple(rows))
    scanned = replace(op, body=body)
    return replace(scan, op=scanned, args=tuple(operands), outputs=tuple(outputs))


_VIEWS = (
    _aten.view.default,
    _aten.permute.default,
    _aten.slice.Tensor,
    _aten.split_with_sizes.default,
)


@dataclass(frozen=True, eq=False)
class _Adder:
    """Appends equations, and works out what their results look like."""

    fresh: Fresh
    into: list[Equation]

    def __call__(
        self, where: Where, op: Any, *args: Any, storage: int | None = None, **kwargs: Any
    ) -> list[Var]:
        """The results of an operation; views are of its first argument. `storage`: theirs."""
        first = args[0][0] if isinstance(args[0], list) else args[0]
        out = op(*pytree.tree_map_only(Var, Var.meta, args), **kwargs)
        results = [
            self.fresh.like(first, shape=tuple(x.shape), stride=tuple(x.stride()), dtype=x.dtype)
            for x in (out if isinstance(out, list | tuple) else (out,))
        ]
        if op in _VIEWS or (op.namespace == "functron" and op._opname in _STATEMENTS):
            memory = {"storage": first.storage, "storage_bytes": first.storage_bytes}
            results = [replace(result, **memory) for result in results]
        elif storage is not None:
            results = [replace(result, storage=storage) for result in results]
        self.into.append(Equation(op, args, kwargs, tuple(results), where))
        return results


def divide_sequences(block: Block, parts: int) -> Block:
    """The block with gathers and scatters of sequences, and the products beside them, in parts.

    Tensor parallelism gathers a sequence in front of a product, and scatters one behind another,
    and each waits for all of the other. In parts of each rank's rows, the next part is gathered
    while the product of this one is computed, and the last one scattered: only the first part of a
    gather, and the last one of a scatter, are exposed. Rows of a product do not depend on one
    another, so numbers are the same but for rounding.

    A gather is cut where its result is the first operand of a product, a scatter where it is of
    one product alone; both if `parts` divides the rows of a rank. Where there is nothing to cut,
    the block itself.
    """
    division = _Division(block, parts)
    for equation in block.equations:
        op = equation.op
        if isinstance(op, Scan) and (body := divide_sequences(op.body, parts)) is not op.body:
            equation = replace(equation, op=replace(op, body=body))
        division.add(equation)
    if division.into == list(block.equations):
        return block
    return replace(block, equations=tuple(live_equations(division.into, block.outputs)))


_SHAPES = (_aten.view.default, _aten._unsafe_view.default)


class _Division:
    """The equations of a block, some of them in parts; `add` one after the other to `into`."""

    def __init__(self, block: Block, parts: int):
        self.parts, self.into = parts, list[Equation]()
        self.makers = {v: e for e in block.equations for v in e.results}
        self.readers: dict[Var, list[Equation]] = defaultdict(list)
        for equation in block.equations:
            for value in dict.fromkeys(equation.operands):
                self.readers[value].append(equation)
        self.outputs = {value for value in block.outputs if isinstance(value, Var)}
        self.make = _Adder(Fresh(block), self.into)
        # parts of rows, and their dims: of first operands of products, and of what else there is
        self.rows: dict[Var, tuple[list[Var], tuple[int, ...]]] = {}
        self.wholes: dict[Var, tuple[list[Var], tuple[int, ...]]] = {}

    def add(self, equation: Equation) -> None:
        """Append an equation, or what is in its place."""
        first = equation.operands[0] if equation.operands else None
        if equation.name == "all_gather" and (found := self._find_gathered_products(equation)):
            self._gather(equation, *found)
        elif equation.op is _aten.mm.default and first in self.rows:
            parts, lead = self.rows[first]
            weight, where = equation.args[1], equation.where
            made = [self.make(where, _aten.mm.default, part, weight)[0] for part in parts]
            self._join(equation, made, lead)
        elif equation.results and equation.results[0] in self.wholes:
            self._join(equation, *self.wholes[equation.results[0]])
        elif equation.name == "psum_scatter" and (found := self._find_scattered_product(equation)):
            self._scatter(equation, *found)
        else:
            self.into.append(equation)

    def _join(self, equation: Equation, parts: list[Var], lead: tuple[int, ...]) -> None:
        """The result of an equation from parts of its rows; `lead` are the dims of one part's."""
        (result,), where = equation.results, equation.where
        shaped = [
            self.make(where, _aten.view.default, part, [*lead, part.shape[-1]])[0] for part in parts
        ]
        dim, storage = len(lead) - 1, result.storage
        (whole,) = self.make(where, _aten.cat.default, shaped, dim, storage=storage)
        shape = list(result.shape)
        self.into.append(Equation(_aten.view.default, (whole, shape), {}, (result,), where))

    def _make_contiguous(self, where: Where, value: Var) -> Var:
        """A value in the layout of a new tensor, copied where it has another."""
        if canonical_strides(value.shape, value.stride) == contiguous_strides(value.shape):
            return value
        plain = torch.contiguous_format
        return self.make(where, _aten.clone.default, value, memory_format=plain)[0]

    def _find_gathered_products(self, gather: Equation) -> tuple[Var, int, list[Var]] | None:
        """The copy of ranks' rows, their dim, and the operands of products that it becomes."""
        (x,), value, dim = gather.operands, gather.results[0], 0
        whole = value
        while True:
            read = self.readers[value]
            kept = value in self.outputs and value not in (gather.results[0], whole)
            if len(read) != 1 or kept or len(read[0].results) != 1:
                return None
            step, value = read[0], read[0].results[0]
            if step.op is _aten.permute.default:
                dims = list(step.args[1])
                dim = dims.index(0)
                if [d for d in dims if d] != list(range(1, len(dims))):
                    return None
            elif step.op in _SHAPES and value.shape != step.operands[0].shape:
                break
            elif step.op is _aten.clone.default:
                whole = value
            elif step.op not in _SHAPES:
                return None
        whole = value if whole is gather.results[0] else whole
        wanted = [n * (gather.args[2] if d == dim else 1) for d, n in enumerate(x.shape)]
        if list(value.shape) != wanted or dim != len(x.shape) - 2 or x.shape[dim] % self.parts:
            return None
        flats = [e.results[0] for e in self.readers[value] if e.op in _SHAPES]
        flats = [v for v in flats if v.shape == (math.prod(wanted[:-1]), wanted[-1])]
        products = [e for v in flats for e in self.readers[v] if e.op is _aten.mm.default]
        flats = [v for v in flats if any(e.args[0] is v for e in products)]
        return (whole, dim, flats) if flats else None

    def _gather(self, gather: Equation, whole: Var, dim: int, flats: list[Var]) -> None:
        (x,), (_, axis, size), where = gather.operands, gather.args, gather.where
        rows = x.shape[dim] // self.parts
        lead = (*x.shape[:dim], size, rows)
        parts: list[Var] = []
        gathered: list[Var] = []
        for start in range(0, x.shape[dim], rows):
            (part,) = self.make(where, _aten.slice.Tensor, x, dim, start, start + rows)
            part = self._make_contiguous(where, part)
            (part,) = self.make(where, gather.op, part, axis, size)
            gathered.append(part)
            dims = [*range(1, dim + 1), 0, *range(dim + 1, len(part.shape))]
            (part,) = self.make(where, _aten.permute.default, part, dims)
            part = self._make_contiguous(where, part)
            shape = [math.prod(lead), x.shape[-1]]
            parts += self.make(where, _aten.view.default, part, shape)
        self.rows.update((flat, (parts, lead)) for flat in flats)
        (result,) = gather.results
        if result in self.outputs:
            self.into.append(Equation(_aten.cat.default, (gathered, dim + 1), {}, (result,), where))
        else:
            self.wholes[whole] = parts, lead

    def _find_scattered_product(self, scatter: Equation) -> tuple[Equation, int] | None:
        """The product whose rows are scattered, and along which dim of the result."""
        value, dim, split = scatter.operands[0], 0, False
        while len(self.readers[value]) == 1 and value not in self.outputs:
            step = self.makers.get(value)
            if step is None:
                return None
            if step.op is _aten.mm.default:
                left = step.args[0]
                rows = scatter.results[0].shape
                fits = split and dim == len(rows) - 2 and rows[dim] % self.parts == 0
                fits = fits and value.shape[1] == rows[-1]
                plain = left.stride == contiguous_strides(left.shape)
                return (step, dim) if fits and plain and left not in self.rows else None
            if step.op is _aten.permute.default:
                dims = list(step.args[1])
                dim = dims[0]
                if [d for d in dims if d != dim] != [d for d in range(len(dims)) if d != dim]:
                    return None
            elif step.op in _SHAPES:
                split = split or value.shape != step.operands[0].shape
            elif step.op is not _aten.clone.default:
                return None
            value = step.operands[0]
        return None

    def _scatter(self, scatter: Equation, product: Equation, dim: int) -> None:
        (_, axis, size), where = scatter.args, scatter.where
        left, weight = product.args
        (result,) = scatter.results
        rows = result.shape[dim] // self.parts
        shape = [*result.shape[:dim], size, result.shape[dim], left.shape[1]]
        (whole,) = self.make(where, _aten.view.default, left, shape)
        lead, parts = [*result.shape[:dim], size, rows], []
        for start in range(0, result.shape[dim], rows):
            (part,) = self.make(where, _aten.slice.Tensor, whole, dim + 1, start, start + rows)
            part = self._make_contiguous(where, part)
            flat = [math.prod(lead), left.shape[1]]
            (part,) = self.make(where, _aten.view.default, part, flat)
            (part,) = self.make(where, _aten.mm.default, part, weight)
            (part,) = self.make(where, _aten.view.default, part, [*lead, weight.shape[1]])
            dims = [dim, *(d for d in range(len(lead) + 1) if d != dim)]
            (part,) = self.make(where, _aten.permute.default, part, dims)
            part = self._make_contiguous(where, part)
            parts += self.make(where, scatter.op, part, axis, size, **scatter.kwargs)
        self.into.append(Equation(_aten.cat.default, (parts, dim), {}, (result,), where))
