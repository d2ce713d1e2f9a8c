"""Scan: a function applied along the leading dim of a tree; gradient accumulation is one of them.

In a program that is being traced it is one equation forward and one backward, at any depth: the
body is traced once, forward and backward together, and cut where backward begins. Values of the
forward half that the backward half reads (residuals) become stacked results of the forward scan and
stacked operands of the reverse one; views are taken again instead of kept, and values that are the
same in every iteration are operands of both. This is how JAX differentiates a scan.

`accumulate` makes one large batch a sequence of small ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from functron.core import compat, tree
from functron.core.closure import (
    copy_views,
    find_tensors,
    hoist,
    note_writes,
    refuse_holders,
    refuse_orphans,
)
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.functions import Function
from functron.core.scopes import in_phase
from functron.program.equations import Block, Equation, Scan, Var, contiguous_strides
from functron.program.recorder import Recorder, active, keeper, live_equations
from functron.spmd.axes import user_line
from functron.transforms.capture import (
    ANY_ROW,
    Relay,
    replacing_functions,
    unwatched,
    watched_scope,
)
from functron.transforms.gradient import replace_at
from functron.transforms.look_ahead import computing_shapes, make_fake
from functron.transforms.parameter_gather import by_row


def trace_scan(
    recorder: Recorder,
    f: Callable,
    init: tree.Tree,
    xs: tree.Tree,
    length: int,
    name: str,
    reverse: bool = False,
) -> tuple[tree.Tree, tree.Tree]:
    """`functron.scan` of `f` as equations of `recorder`; differentiable once, by torch's tape.

    Raises:
        ValueError: the carry changes its structure, shape or dtype, or has other leaves than
            tensors.
    """
    # carries are contiguous, so that what an iteration returns fits the next
    carry, carry_structure = tree.flatten(init)
    columns, x_structure = tree.flatten(xs)
    _check_tensors(tree.paths(init), carry)
    carry = [leaf.contiguous() for leaf in carry]
    hidden, close = hoist(f)
    operands = [*hidden, *carry, *columns]
    taped = torch.is_grad_enabled() and any(value.requires_grad for value in operands)
    result: dict[str, Any] = {}

    def body(values: list) -> list[torch.Tensor]:
        consts, rest = values[: len(hidden)], values[len(hidden) :]
        before = tree.unflatten(carry_structure, rest[: len(carry)])
        x = tree.unflatten(x_structure, rest[len(carry) :])
        check_writes = note_writes(f"scan: {name}", values, f)
        after, y = close(consts)(before, x)
        check_writes()
        ys, result["structure"] = tree.flatten(y)
        _check_carry(before, after)
        _check_tensors([f"y/{path}" for path in tree.paths(y)], ys)
        outputs = [*(leaf.contiguous() for leaf in tree.leaves(after)), *ys]
        # each output has a cotangent of its own, also where the same tensor is returned twice
        seen = {id(value): i for i, value in reversed(list(enumerate(outputs)))}
        return [x if seen[id(x)] == i else x.view_as(x) for i, x in enumerate(outputs)]

    made = _trace_body(recorder, body, hidden, carry, columns, length, taped)
    region = _Region(recorder, made, len(hidden), len(carry), len(columns), length, name, reverse)
    outputs: Any = _TracedScan.apply(region, *operands)
    last, ys = outputs[: len(carry)], outputs[len(carry) :]
    stacked = tree.unflatten(result["structure"], list(ys))
    return tree.unflatten(carry_structure, list(last)), stacked


def _check_tensors(paths: list[str], leaves: list) -> None:
    raise_problems(
        "scan: carries and ys that are traced, or have 0 steps, are tensors",
        [
            Problem(path or "carry", repr(leaf), "a tensor", "make it one, or close over it")
            for path, leaf in zip(paths, leaves, strict=True)
            if not isinstance(leaf, torch.Tensor)
        ],
    )


def _check_carry(before: tree.Tree, after: tree.Tree) -> None:
    rows = tree.same_structure(before, after, names=("the carry before", "the carry after"))
    raise_problems(
        "scan: the carry must keep its shapes and dtypes",
        [
            Problem(
                f"carry/{path}" if path else "carry",
                f"{tuple(new.shape)} {new.dtype} after one step",
                f"{tuple(old.shape)} {old.dtype}, as before it",
                "cast or reshape it in the scanned function",
            )
            for path, old, new in zip(tree.paths(before), tree.leaves(before), rows, strict=True)
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
            if (old.shape, old.dtype) != (new.shape, new.dtype)
        ],
    )


@dataclass
class _Body:
    """A body as it was traced; every list holds values of one frame, in which both halves lie."""

    inputs: list[Var]
    outputs: list[Var]
    forward: list[Equation]
    backward: list[Equation] = field(default_factory=list)
    cotangents: list[Var | None] = field(default_factory=list)  # one per output
    sums: list[tuple[Var, Var] | None] = field(default_factory=list)  # per hidden: before, after
    gradients: list[Var | None] = field(default_factory=list)  # one per carry and column
    captured: dict[Var, Var] = field(default_factory=dict)


def _trace_body(recorder, body, hidden, carry, columns, length, taped) -> _Body:
    def fresh(like: torch.Tensor, name: str, *, sliced: bool = False) -> torch.Tensor:
        cut = 1 if sliced else 0
        made = recorder.empty(like.shape[cut:], like.stride()[cut:], like.dtype, like.device)
        recorder.input(made, name)
        return made

    # what is kept whole is differentiated later
    with recorder.frame() as frame, torch.set_grad_enabled(taped or keeper() is not None):
        values = [
            *(fresh(leaf, "const") for leaf in hidden),
            *(fresh(leaf, "carry") for leaf in carry),
            *(fresh(leaf, "x", sliced=True) for leaf in columns),
        ]
        inputs = [recorder.var(value) for value in values]
        # a carry that starts as a constant may depend on parameters after one iteration
        moves = [*(True for _ in (*hidden, *carry)), *(leaf.requires_grad for leaf in columns)]
        wanted = [
            taped and moving and tree.is_inexact(value)
            for value, moving in zip(values, moves, strict=True)
        ]
        for value, wants in zip(values, wanted, strict=True):
            value.requires_grad_(wants)
        outputs = body(values)
        made = _Body(inputs, [recorder.var(value) for value in outputs], [])
        cut = len(frame.equations)
        if taped:
            _trace_backward(recorder, made, values, wanted, outputs, hidden, len(carry), fresh)
        made.forward, made.backward = frame.equations[:cut], frame.equations[cut:]
        made.captured = frame.captured
    return made


def _trace_backward(
    recorder, made: _Body, values, wanted, outputs, hidden, num_carry, fresh
) -> None:
    """Record the pullback of the body, and the running sums of what flows to `hidden`."""
    moving = [value for value, wants in zip(values, wanted, strict=True) if wants]
    taped = [value for value in outputs if value.requires_grad]
    with in_phase("backward"):
        seeds = {id(value): fresh(value.detach().contiguous(), "ct") for value in taped}
        grads = iter(
            torch.autograd.grad(
                taped, moving, [seeds[id(value)] for value in taped], allow_unused=True
            )
            if taped
            else [None] * len(moving)
        )
        found = [next(grads) if wants else None for wants in wanted]
        with torch.no_grad():
            for position, value in enumerate(values):
                grad = found[position]
                if grad is not None and position < len(hidden) + num_carry:
                    grad = grad.contiguous()
                if position < len(hidden):
                    made.sums.append(_record_sum(recorder, grad, value, fresh))
                else:
                    made.gradients.append(None if grad is None else recorder.var(grad))
    made.cotangents = [
        recorder.var(seeds[id(value)]) if id(value) in seeds else None for value in outputs
    ]


def _record_sum(recorder, grad, like: torch.Tensor, fresh) -> tuple[Var, Var] | None:
    if grad is None:
        return None
    before = fresh(like.detach(), "sum")
    after = recorder.var(before + grad)
    return recorder.var(before), after


@dataclass(frozen=True, eq=False)
class _Region:
    """A traced body with its place in the program; opaque to autograd."""

    recorder: Recorder
    body: _Body
    num_hidden: int
    num_carry: int
    num_columns: int
    length: int
    name: str
    reverse: bool

    def kept(self) -> tuple[list[Var], list[Equation]]:
        """The values that backward reads of the forward half, and the views that it takes again."""
        body = self.body
        made_by = {value: e for e in body.forward for value in e.results}
        own = {value for e in body.backward for value in e.results}
        again: list[Equation] = []
        kept: dict[Var, None] = {}
        skip = own | {value for value in body.cotangents if value is not None}
        skip |= {pair[0] for pair in body.sums if pair is not None}

        def need(value: Var) -> None:
            if value in skip:
                return
            equation = made_by.get(value)
            if equation is None or not (equation.aliases or not equation.operands):
                kept.setdefault(value)
                return
            skip.update(equation.results)
            for operand in equation.operands:
                need(operand)
            again.append(equation)

        for value in (
            v for e in live_equations(body.backward, self._gradient_vars()) for v in e.operands
        ):
            need(value)
        for value in self._gradient_vars():
            need(value)
        return list(kept), again

    def _gradient_vars(self) -> list[Var]:
        sums = [pair[1] for pair in self.body.sums if pair is not None]
        return [*sums, *(value for value in self.body.gradients if value is not None)]


def _split_values(values: Sequence[Var], region: _Region) -> tuple[list[Var], list[Var], list[Var]]:
    """Values that are inputs which every iteration shares, slices of columns, and all others."""
    body, start = region.body, region.num_hidden + region.num_carry
    shared = {*body.inputs[: region.num_hidden], *body.captured}
    columns = set(body.inputs[start:])
    return (
        [v for v in values if v in shared],
        [v for v in values if v in columns],
        [v for v in values if v not in shared and v not in columns],
    )


class _TracedScan(Function):
    @staticmethod
    def forward(ctx, region: _Region, *operands: torch.Tensor) -> Any:
        body, recorder = region.body, region.recorder
        given = [recorder.var(value) for value in operands]
        kept, ctx.again = region.kept() if any(ctx.needs_input_grad) else ([], [])
        shared, slices, ctx.residuals = _split_values(kept, region)
        outputs = [*body.outputs, *ctx.residuals]
        consts = [*body.inputs[: region.num_hidden], *body.captured]
        inputs = [*consts, *body.inputs[region.num_hidden :]]
        around = [*given[: region.num_hidden], *body.captured.values(), *given[region.num_hidden :]]
        equations = live_equations(body.forward, outputs)
        block = Block(tuple(inputs), tuple(equations), tuple(outputs))
        op = Scan(block, region.length, len(consts), region.num_carry, region.reverse, region.name)
        results = recorder.emit(op, around, _results(outputs, region.num_carry, region.length))
        outside = dict(zip(inputs, around, strict=True))
        ctx.region = region
        ctx.shared = {value: outside[value] for value in shared}
        ctx.slices = {value: outside[value] for value in slices}
        ctx.likes = given
        ctx.operands = operands  # of a gradient's own derivative, which is refused
        ctx.save_for_backward(*results[len(body.outputs) :])
        finished = results[: len(body.outputs)]
        if body.cotangents:
            pairs = zip(finished, body.cotangents, strict=True)
            ctx.mark_non_differentiable(*(value for value, ct in pairs if ct is None))
        return tuple(finished)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        region: _Region = ctx.region
        recorder = region.recorder
        op, first = _reverse(ctx, [recorder.var(value.contiguous()) for value in cotangents])
        results = recorder.emit(op, first, _results(op.body.outputs, op.num_carry, op.length))
        carried, sums = results[: region.num_carry], iter(results[region.num_carry : op.num_carry])
        stacked = iter(results[op.num_carry :])
        grads: list[Any] = [None if pair is None else next(sums) for pair in region.body.sums]
        grads += [value if tree.is_inexact(value) else None for value in carried]
        columns = region.body.gradients[region.num_carry :]
        grads += [None if gradient is None else next(stacked) for gradient in columns]
        return None, *_refuse_derivatives(grads, [*ctx.operands, *cotangents])


class _Undifferentiable(Function):
    """Gradients of a scan: constants to a tape that would differentiate them again."""

    @staticmethod
    def forward(ctx, count: int, *values: Any) -> Any:
        return tuple(grad.view_as(grad) for grad in values[:count])

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        raise ValueError(
            f"trace: at {user_line()} torch's tape differentiates the gradients of a scan again "
            "(create_graph=True, torch.autograd.functional), which a traced scan has no derivative "
            "for; wanted a transform, under which scans are written out; fix: "
            "ft.grad(lambda x: ... ft.grad(f)(x) ...), or torch.func.jvp(ft.grad(f), ...)"
        )


def _refuse_derivatives(grads: list[Any], of: Sequence[torch.Tensor]) -> list[Any]:
    """The gradients, functions of `of`; a tape that records them cannot differentiate them."""
    moving = [i for i, grad in enumerate(grads) if grad is not None]
    if not torch.is_grad_enabled() or not moving:
        return grads
    marked: Any = _Undifferentiable.apply(len(moving), *(grads[i] for i in moving), *of)
    return replace_at(grads, moving, marked)


def _reverse(ctx, given: list[Var]) -> tuple[Scan, list[Var]]:
    """The scan that takes the cotangents of the results to those of the operands, and its operands.

    It goes the other way. It carries the cotangents of the carry and the running sums of those of
    hidden tensors; its xs are slices of columns, residuals and the cotangents of ys, its ys the
    gradients of columns.
    """
    region: _Region = ctx.region
    body, recorder, num_carry = region.body, region.recorder, region.num_carry
    zeros: list[Equation] = []
    carried_in = [
        ct or _make_unread(recorder, value)
        for value, ct in zip(body.outputs[:num_carry], body.cotangents[:num_carry], strict=True)
    ]
    carried_out = [
        _record_zeros(recorder, value, zeros) if gradient is None else gradient
        for value, gradient in zip(carried_in, body.gradients[:num_carry], strict=True)
    ]
    pairs = [pair for pair in body.sums if pair is not None]
    starts = [
        _make_zeros(recorder, like)
        for like, pair in zip(ctx.likes, body.sums, strict=False)
        if pair is not None
    ]
    rows = list(zip(body.cotangents[num_carry:], given[num_carry:], strict=True))
    inputs = [
        *ctx.shared, *carried_in, *(before for before, _ in pairs),
        *ctx.slices, *ctx.residuals, *(ct for ct, _ in rows if ct is not None),
    ]  # fmt: skip
    operands = [
        *ctx.shared.values(), *given[:num_carry], *starts, *ctx.slices.values(),
        *(recorder.var(value) for value in ctx.saved_tensors),
        *(value for ct, value in rows if ct is not None),
    ]  # fmt: skip
    gradients = [gradient for gradient in body.gradients[num_carry:] if gradient is not None]
    outputs = [*carried_out, *(after for _, after in pairs), *gradients]
    equations = live_equations([*ctx.again, *body.backward, *zeros], outputs)
    block = Block(tuple(inputs), tuple(equations), tuple(outputs))
    size = num_carry + len(pairs)
    op = Scan(block, region.length, len(ctx.shared), size, not region.reverse, region.name)
    return op, operands


def _results(outputs: Sequence[Var], num_carry: int, length: int) -> list[tuple]:
    """Shape, stride, dtype and device of what a scan with these body outputs returns."""
    carry = [(v.shape, v.stride, v.dtype, v.device) for v in outputs[:num_carry]]
    return carry + [(*v.stacked(length), v.dtype, v.device) for v in outputs[num_carry:]]


def _make_zeros(recorder: Recorder, like: Var) -> Var:
    return recorder.var(torch.zeros(like.shape, dtype=like.dtype, device=like.device))


def _make_unread(recorder: Recorder, like: Var) -> Var:
    """A cotangent that the body does not read."""
    stride = contiguous_strides(like.shape)
    return recorder.name(recorder.empty(like.shape, stride, like.dtype, like.device), "ct")


def _record_zeros(recorder: Recorder, like: Var, equations: list[Equation]) -> Var:
    """Zeros like `like`, made by a new equation of the body."""
    with recorder.frame() as frame:
        zero = _make_zeros(recorder, like)
    equations.extend(frame.equations)
    return zero


@public
def scan(
    f: Callable,
    init: tree.Tree,
    xs: tree.Tree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[tree.Tree, tree.Tree]:
    """``carry, y = f(carry, x)`` for each slice x of `xs`, in order: the last carry and stacked ys.

    This is how a stack of layers runs: `xs` holds their parameters, stacked on a leading dim.
    Eagerly it is a loop over views; in backward the slices' gradients are stacked once, so cost
    grows linearly with depth. In a program that is being traced it is one equation forward and one
    backward, of any length. Wrap `f` in `remat` to keep only the carries.

    >>> xs = torch.tensor([1.0, 2.0, 3.0])
    >>> ft.scan(lambda total, x: (total + x, total), torch.tensor(0.0), xs)
    (tensor(6.), tensor([0., 1., 3.]))
    >>> ft.scan(lambda total, x: (total + x, total), torch.tensor(0.0), xs, reverse=True)
    (tensor(6.), tensor([5., 3., 0.]))

    Args:
        f: ``(carry, x) -> (carry, y)``; y may be None.
        xs: a tree of tensors with a common leading dim, or None with `length`.
        length: the number of steps; needed only where `xs` has no leaf. Of 0 steps, `f` runs on
            fake tensors, and ys have 0 rows.
        reverse: whether the last slice of `xs` comes first; y of each stands where its x did.
        unroll: how many steps each iteration of a traced scan makes, with those left over written
            out after it; True: all are written out. Eagerly it changes nothing.

    Raises:
        ValueError: the leading dims differ, or neither `xs` nor `length` gives a number of steps;
            or `unroll` is less than 1; or of 0 steps, `f` reads numbers of tensors.
        TypeError: `init` or `xs` has an object with tensors, such as an unregistered dataclass.
    """
    if unroll is not False and unroll < 1:
        refuse("scan", "unroll", unroll, "a number of steps of at least 1, or True for all of them")
    _check_scan(f, init, xs)
    f, xs = by_row(f, xs)
    return _scan(f, init, xs, length, 0, reverse, unroll)


def _check_scan(f: Callable, init: tree.Tree, xs: tree.Tree) -> None:
    title = "scan cannot see into these"
    refuse_holders(title, "init", init, tracked=True)
    refuse_holders(title, "xs", xs, tracked=True)
    if compat.transforms_active():  # a vmap would take such a tensor for one of its own
        refuse_orphans("scan", find_tensors(f))


class ScanTurn(NamedTuple):
    """Slices of a stack that a scan comes to, one after another.

    Attributes:
        stack: whose next slices they are.
        count: how many.
        f: the function of the carry and a slice.
    """

    stack: str
    count: int
    f: Callable


def scan_in_turn(
    turns: Sequence[ScanTurn],
    init: tree.Tree,
    xs: Mapping[str, tree.Tree],
    first: Mapping[str, int] = MappingProxyType({}),
) -> tuple[tree.Tree, dict[str, tree.Tree]]:
    """`scan` along several stacks: the next slices of one, those of another, and so on.

    Turns that come again and again, as where two kinds of layers alternate, are one equation in a
    program that is being traced, at any depth: its body is the turns of one round.

    Args:
        turns: which slices come when, and the function of each; turns of one kind have the same.
        xs: by stack, a tree of tensors with a common leading dim.
        first: by stack, the number of its first slice in names of captured values, after its name.

    Returns:
        The last carry, and by stack its stacked ys.
    """
    at = {turn.stack: first.get(turn.stack, 0) for turn in turns}
    often = Counter(turn.stack for turn in turns)
    for f, rows in {id(turn.f): (turn.f, xs[turn.stack]) for turn in turns}.values():
        _check_scan(f, init, rows)
    # scattered gradients are known by the identity of whole stacks: look before these are cut
    made = {id(turn.f): by_row(turn.f, xs[turn.stack]) for turn in turns}
    whole = {turn.stack: made[id(turn.f)][1] for turn in turns}
    turns = [turn._replace(f=made[id(turn.f)][0]) for turn in turns]
    recorder = active()
    traced = not (recorder is None or _is_unrolled() or replacing_functions() or Relay())
    rounds = _find_rounds(turns) if traced else [([turn], 1) for turn in turns]
    parts = {}
    for name, rows in whole.items():
        counts = [sum(n for of, n, _ in each if of == name) * times for each, times in rounds]
        parts[name] = iter([rows] if often[name] == 1 else _split(rows, filter(None, counts)))
    carry, found = init, {name: [] for name in whole}
    for each, times in rounds:
        given = {name: next(parts[name]) for name in dict.fromkeys(turn.stack for turn in each)}
        if times > 1:
            assert recorder is not None
            carry, ys = _trace_rounds(recorder, each, carry, given, times)
        else:
            ((name, count, f),) = each
            with watched_scope(name):
                carry, rows = _scan(f, carry, given[name], None, at[name])
            at[name], ys = at[name] + count, {name: rows}
        for name, rows in ys.items():
            found[name].append(rows)
    return carry, {name: _join(rows) for name, rows in found.items()}


def _find_rounds(turns: Sequence[ScanTurn]) -> list[tuple[Sequence[ScanTurn], int]]:
    """The turns as rounds that are repeated so often; what is not repeated is a turn and once."""
    rounds, start = [], 0
    while start < len(turns):
        best, times = 1, 1
        for size in range(2, (len(turns) - start) // 2 + 1):
            one, count = turns[start : start + size], 1
            while turns[start + count * size : start + (count + 1) * size] == one:
                count += 1
            if count > 1 and count * size > best * times:
                best, times = size, count
        rounds.append((turns[start : start + best], times))
        start += best * times
    return rounds


def _split(rows: tree.Tree, counts: Iterable[int]) -> list[tree.Tree]:
    leaves, structure = tree.flatten(rows)
    sizes = list(counts)
    columns = [leaf.split(sizes) for leaf in leaves]
    return [tree.unflatten(structure, list(part)) for part in zip(*columns, strict=True)]


def _join(rows: Sequence[tree.Tree]) -> tree.Tree:
    return rows[0] if len(rows) == 1 else tree.map(lambda *each: torch.cat(each), *rows)


def _trace_rounds(
    recorder: Recorder,
    turns: Sequence[ScanTurn],
    init: tree.Tree,
    xs: Mapping[str, tree.Tree],
    times: int,
) -> tuple[tree.Tree, dict[str, tree.Tree]]:
    """`trace_scan` of the turns of one round, `times` times."""

    def one_round(carry: tree.Tree, x: dict) -> tuple[tree.Tree, dict]:
        at, found = dict.fromkeys(x, 0), {name: [] for name in x}
        for name, count, f in turns:
            rows = slice(at[name], at[name] + count)
            here = tree.map(lambda leaf, rows=rows: leaf[rows], x[name])
            carry, ys = _run_steps(f, carry, here, range(count), False)
            found[name].append(ys)
            at[name] += count
        return carry, {name: _join(rows) for name, rows in found.items()}

    rounds = {
        name: tree.map(lambda leaf: leaf.unflatten(0, (times, -1)), rows)
        for name, rows in xs.items()
    }
    carry, ys = trace_scan(recorder, one_round, init, rounds, times, "rounds")
    return carry, {name: tree.map(lambda y: y.flatten(0, 1), rows) for name, rows in ys.items()}


def _scan(
    f: Callable,
    init: tree.Tree,
    xs: tree.Tree,
    length: int | None,
    first: int = 0,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[tree.Tree, tree.Tree]:
    leaves, _ = tree.flatten(xs)
    steps = _num_steps(tree.paths(xs), leaves, length)
    recorder = active()
    whole = unroll is True or 1 < unroll >= steps
    if recorder is None or whole or _is_unrolled() or replacing_functions():
        return _run_steps(f, init, xs, range(first, first + steps), reverse)
    name, relay = getattr(f, "__name__", "scan"), Relay()
    if relay:
        traced = _trace_watched(relay, recorder, f, init, xs, steps, name, reverse)
        (carry, ys), captured = traced
        relay.take(captured, range(first, first + steps))
        return carry, ys
    if unroll > 1:
        return _trace_blocks(recorder, f, init, xs, steps, name, reverse, unroll)
    return trace_scan(recorder, f, init, xs, steps, name, reverse)


def _run_steps(
    f: Callable, init: tree.Tree, xs: tree.Tree, names: range, reverse: bool
) -> tuple[tree.Tree, tree.Tree]:
    """A scan written out; captured values of each step are named by its number."""
    if not names:
        return copy_views(init, init), _stack_nothing(f, init, xs)
    leaves, structure = tree.flatten(xs)
    slices = [leaf.unbind(0) for leaf in leaves]
    title = f"scan: {getattr(f, '__name__', 'f')}"
    check_given = note_writes(title, leaves, f)
    carry, ys = init, []
    for step in range(len(names))[:: -1 if reverse else 1]:
        check_writes = note_writes(title, carry)
        with watched_scope(names[step]):
            after, y = f(carry, tree.unflatten(structure, [column[step] for column in slices]))
        check_writes()
        _check_carry(carry, after)
        carry = after
        ys.append(y)
    check_given()
    carry = copy_views(carry, init, xs, f)
    rows = ys[::-1] if reverse else ys
    return carry, tree.map(lambda *rows: torch.stack(rows), *rows)


def _stack_nothing(f: Callable, init: tree.Tree, xs: tree.Tree) -> tree.Tree:
    """The ys of no step: with 0 rows, else as a step would make them, which only shapes tell."""
    recorder = active()
    with recorder.frame() if recorder is not None else computing_shapes(), unwatched():
        with torch.no_grad():
            first = tree.map(lambda leaf: leaf.new_zeros(leaf.shape[1:]), xs)
            before = tree.map(make_fake, init)
            try:
                after, y = f(before, first)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                got = f"a function that reads numbers, by {error.func}"
                wanted = "one of shapes alone, as no step runs of which ys could be like"
                fix = "leave the scan out where it has no steps"
                refuse(f"scan of 0 steps at {user_line()}", "f", got, wanted, fix)
        _check_carry(before, after)
        _check_tensors([f"y/{path}" for path in tree.paths(y)], tree.leaves(y))
    return tree.map(lambda y: torch.zeros((0, *y.shape), dtype=y.dtype, device=y.device), y)


def _trace_blocks(
    recorder: Recorder,
    f: Callable,
    init: tree.Tree,
    xs: tree.Tree,
    steps: int,
    name: str,
    reverse: bool,
    unroll: int,
) -> tuple[tree.Tree, tree.Tree]:
    """`trace_scan` of `unroll` steps at a time, and the steps that are left over."""
    left = steps % unroll

    def block(carry: tree.Tree, x: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        return _run_steps(f, carry, x, range(unroll), reverse)

    rest, main = (
        (slice(left), slice(left, None))
        if reverse
        else (slice(steps - left, None), slice(steps - left))
    )
    blocks = tree.map(lambda leaf: leaf[main].unflatten(0, (-1, unroll)), xs)
    carry, ys = trace_scan(recorder, block, init, blocks, steps // unroll, name, reverse)
    ys = tree.map(lambda y: y.flatten(0, 1), ys)
    if not left:
        return carry, ys
    carry, others = _run_steps(
        f, carry, tree.map(lambda leaf: leaf[rest], xs), range(left), reverse
    )
    parts = (others, ys) if reverse else (ys, others)
    return carry, tree.map(lambda *rows: torch.cat(rows), *parts)


def _trace_watched(relay: Relay, recorder: Recorder, f: Callable, *given: Any) -> tuple:
    """`trace_scan`, and the stacked values that were captured in its rows."""
    inner = relay.around(f)

    def step(carry: tree.Tree, x: tree.Tree) -> tuple:
        (carry, y), captured = inner(carry, x)
        return carry, (y, captured)

    with watched_scope(ANY_ROW), unwatched():
        carry, (ys, captured) = trace_scan(recorder, step, *given)
    return (carry, ys), captured


def _is_unrolled() -> bool:
    """Whether a traced scan is unrolled: its equation is only differentiated by torch's tape."""
    return compat.transforms_active() or compat.pushing_forward()


def _num_steps(paths: list[str], leaves: list[torch.Tensor], length: int | None) -> int:
    sizes = [leaf.shape[0] if leaf.dim() else None for leaf in leaves]
    steps = length if length is not None else next(iter(sizes), None)
    if steps is None:
        raise ValueError("scan: got no leaves in xs; wanted the number of steps: pass length=")
    raise_problems(
        "scan needs one leading dim of the same size on every leaf",
        [
            Problem(f"xs/{path}" if path else "xs", f"shape {tuple(leaf.shape)}", f"({steps}, ...)")
            for path, leaf, size in zip(paths, leaves, sizes, strict=True)
            if size != steps
        ],
    )
    return steps


@public
def accumulate(
    f: Callable,
    num_microbatches: int,
    *,
    argnums: int | tuple[int, ...] = 1,
    dtype: torch.dtype | None = None,
) -> Callable:
    """The sum of ``f`` over microbatches: F(p, b) = sum over m of f(p, b[m::num_microbatches]).

    Of a `value_and_grad` function, activations are then those of a microbatch. Results are *added*,
    so `f` should return its microbatch's part of the loss: the sum of its tokens' losses divided by
    the token count of the whole batch. That is exact also when microbatches hold different numbers
    of tokens, where a mean of means is not.

    Microbatch m is every `num_microbatches`-th sample from sample m on, of a rank's own contiguous
    part of a batch as of the whole: the ranks' microbatches m together are the same samples on
    every mesh, as losses need that couple the samples of a microbatch
    (`functron.nn.moe.MoEConfig.aux` "batch").

    >>> gradients = ft.accumulate(ft.grad(lambda w, x: (w * x).sum()), num_microbatches=2)
    >>> gradients(torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor(10.)

    Args:
        f: returns a tree of tensors, such as ``(loss, gradients)``.
        argnums: the position of the batch argument, or of several; each a tree whose leaves share
            their leading dim.
        dtype: accumulate floating-point results in this dtype, such as torch.float32 for bf16
            gradients; None: their own.

    Raises:
        ValueError: a leading dim does not divide into `num_microbatches`; all offenders are listed.
    """
    if num_microbatches < 1:
        raise ValueError(f"accumulate: got num_microbatches={num_microbatches}; wanted at least 1")

    @public
    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        recorder = active()
        if recorder is not None and num_microbatches > 1 and not _is_unrolled():

            def one(batch: tuple) -> tree.Tree:
                value = f(*replace_at(args, positions, batch), **kwargs)
                return tree.map(lambda leaf: _cast(leaf, dtype), value)

            for p in positions:
                microbatches(args[p], num_microbatches, f"argument {p}")  # raises if uneven
            shape = -1, num_microbatches
            batch = tree.map(
                lambda leaf: leaf.unflatten(0, shape).movedim(1, 0).contiguous(),
                tuple(args[p] for p in positions),
            )
            return _scan_microbatches(recorder, one, batch)
        parts = [microbatches(args[p], num_microbatches, f"argument {p}") for p in positions]
        total = _Total(dtype)
        for m, batch in enumerate(zip(*parts, strict=True)):
            with watched_scope(*(["microbatches", m] if num_microbatches > 1 else [])):
                total.add(f(*replace_at(args, positions, batch), **kwargs))
        return total.value

    return wrapped


class _Total:
    """A running sum of trees, `value`, with floating-point leaves in `dtype` (None: theirs)."""

    def __init__(self, dtype: torch.dtype | None):
        self.dtype, self.value = dtype, None
        self._own: list[bool] = []

    def add(self, summand: tree.Tree) -> None:
        """Add a tree; in place where the sum so far is memory that only this has seen."""
        leaves, structure = tree.flatten(summand)
        if self.value is None:
            after = [_cast(leaf, self.dtype) for leaf in leaves]
            new = [a is not b for a, b in zip(after, leaves, strict=True)]
        else:
            before = tree.same_structure(summand, self.value)
            in_place = not compat.transforms_active()
            own = zip(before, leaves, self._own, strict=True)
            after = [
                a.add_(b)
                if in_place and mine and not _is_tracked(a, b)
                else a + _cast(b, self.dtype)
                for a, b, mine in own
            ]
            new = [True] * len(after)
        self.value, self._own = tree.unflatten(structure, after), new


def _is_tracked(*leaves: Any) -> bool:
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)


def _scan_microbatches(recorder: Recorder, one: Callable, batch: tuple) -> tree.Tree:
    """The sum over microbatches as one scan, so that a program does not grow with their number."""
    with recorder.frame(), unwatched():  # thrown away: it tells what the sum looks like
        like = one(tree.map(lambda leaf: leaf[0], batch))
    zeros = tree.map(
        lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device), like
    )

    def microbatch(total, part):
        return tree.map(torch.add, total, one(part)), None

    with watched_scope("microbatches"):
        return scan(microbatch, zeros, batch)[0]


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf.to(dtype) if dtype is not None and tree.is_float(leaf) else leaf


def microbatches(batch: tree.Tree, count: int, where: str = "batch") -> Iterator[tree.Tree]:
    """`count` equal parts of a batch, one after another: part m is of samples m, m + count, ...

    Ranks that hold equal, contiguous parts of a batch so have their parts of the same microbatches.
    Contiguous copies, made when asked for; the batch itself where `count` is 1.

    Raises:
        ValueError: a leading dim does not divide; all offenders are listed, as paths under `where`.
    """
    leaves, structure = tree.flatten(batch)
    raise_problems(
        f"cannot cut the batch into {count} microbatches",
        [
            Problem(
                f"{where}/{path}" if path else where,
                f"shape {tuple(leaf.shape)}",
                f"a leading dim that is a multiple of {count}",
                "change the batch size or num_microbatches",
            )
            for path, leaf in zip(tree.paths(batch), leaves, strict=True)
            if leaf.dim() == 0 or leaf.shape[0] % count
        ],
    )
    if count == 1:
        return iter([batch])
    return (
        tree.unflatten(structure, [leaf[index::count].contiguous() for leaf in leaves])
        for index in range(count)
    )
