"""Switches and loops of unknown length in programs that are traced: one equation each, with blocks.

Every branch, condition and body is recorded in a frame of its own, from operands to results. What
they close over is an operand too (`CallSite`). Each is one function to
torch's tape and to torch.func, whose levels are taken off one by one until none is left, where the
equation is recorded:

* the derivative of a switch in reverse is a switch over the same index, whose branches compute
  forward again and pull cotangents back; in forward mode one whose branches push tangents forward.
  These are switches as well, so that derivatives of any order are;
* under vmap a switch whose index is the same for all is one over mapped branches; where the index
  is mapped all branches run, and each element has the results of its own;
* a loop in forward mode is one over values and tangents; under vmap it runs while the condition
  holds for any element, and those for which it does not keep what they have. It has no derivative
  in reverse, for which each iteration would have to be kept, and their number is not known.

This is what JAX does with ``cond`` and ``while``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.closure import hoist, refuse_holders
from functron.core.errors import Problem, raise_problems
from functron.core.functions import Function
from functron.core.scopes import in_phase
from functron.program.callbacks import effects_where
from functron.program.equations import Block, Switch, Var, While
from functron.program.recorder import Recorder, active, keeper, live_equations
from functron.spmd.axes import user_line
from functron.transforms.capture import unwatched
from functron.transforms.gradient import IrreversibleError, replace_at
from functron.transforms.look_ahead import BranchResult, check_alike
from functron.transforms.remat import CallSite, map_level, pull_back

_Tensors = Sequence[torch.Tensor]
_Flat = Callable[[_Tensors], Sequence[torch.Tensor]]


def trace_switch(
    recorder: Recorder,
    index: torch.Tensor,
    branches: Mapping[str, Callable],
    operands: Sequence,
    *,
    word: str = "switch",
    name: str | None = None,
) -> tree.Tree:
    """``branches[index](*operands)`` as an equation of `recorder`.

    Args:
        index: an integer or a bool, a scalar; out of range, the nearest in range.
        branches: by what messages call them; of `operands`, to trees of tensors that are alike.
        operands: trees of tensors and static values.
        word: the name of what was called.
        name: of the operation; None: those of the branches.

    Raises:
        ValueError: results of branches differ in structure, shape or dtype, or are no tensors; or
            the program is partitioned.
    """
    _refuse_keeper("switch", "compute all branches and choose by torch.where")
    refuse_holders("a switch cannot see into these", "operand", tuple(operands), tracked=True)
    every, labels = tuple(branches.values()), tuple(branches)
    hidden, close = hoist(lambda: every)
    every = close(hidden)()  # backward runs them again: lists that they read may have grown by then
    site, given = CallSite.of(lambda: every, tuple(operands))
    are_complex = [value.is_complex() for value in given]
    made: dict[str, tree.Tree] = {}
    title = f"{word} at {user_line()}"

    def run(position: int, values: _Tensors) -> Sequence[torch.Tensor]:
        with site.entered(_from_real(values, are_complex)) as (functions, args):
            out = functions()[position](*args)
        leaves, structure = tree.flatten(out)
        label = labels[position]
        _check_tensors(f"{label} of a {word}", tree.paths(out), leaves)
        made[label] = tree.unflatten(structure, list(map(BranchResult.here, leaves)))
        if len(made) == len(labels):
            check_alike(title, {each: made[each] for each in labels}, branches)
        leaves = _to_real(leaves)
        # each result has a cotangent of its own, also where the same tensor is returned twice
        seen = {id(value): i for i, value in reversed(list(enumerate(leaves)))}
        return [x if seen[id(x)] == i else x.view_as(x) for i, x in enumerate(leaves)]

    flat = tuple(functools.partial(run, position) for position in range(len(every)))
    name = name or "/".join(dict.fromkeys(map(_name_of, every)))
    outputs: Any = _SwitchFunction.apply(_SwitchProgram(flat, name), index, *_to_real(given))
    kinds, structure = tree.flatten(made[labels[0]])
    are_pairs = [kind.dtype.is_complex for kind in kinds]
    return tree.unflatten(structure, _from_real(outputs, are_pairs))


def trace_while(
    recorder: Recorder,
    cond_fun: Callable,
    body_fun: Callable,
    init: tree.Tree,
    *,
    name: str | None = None,
) -> tree.Tree:
    """The last carry of ``while cond_fun(carry): carry = body_fun(carry)``, as an equation.

    Args:
        cond_fun: of the carry, to a bool, a scalar.
        body_fun: of the carry, to one of the same structure, shapes and dtypes.
        init: the first carry, of tensors.
        name: of the operation; None: the body's.

    Raises:
        ValueError: the carry changes its structure, a shape or a dtype, or the condition is not a
            bool; the program is partitioned; or, in backward, a cotangent reaches the loop.
    """
    fix = "bounds that are Python numbers (lax.fori_loop, lax.scan)"
    _refuse_keeper("while loop", fix)
    refuse_holders("a while loop cannot see into these", "carry", init, tracked=True)
    carry, structure = tree.flatten(init)
    _check_tensors("the carry of a while loop", tree.paths(init), carry)
    site, given = CallSite.of(lambda: (cond_fun, body_fun), init)
    num_consts = site.first_argument
    are_complex = [value.is_complex() for value in given]

    def holds(values: _Tensors) -> Sequence[torch.Tensor]:
        with site.entered(_from_real(values, are_complex)) as (functions, before):
            out = functions()[0](before)
        _check_condition(out)
        return [out]

    def step(values: _Tensors) -> Sequence[torch.Tensor]:
        with site.entered(_from_real(values, are_complex)) as (functions, before):
            after = functions()[1](before)
        _check_carry(before, after)
        return _to_real(tree.leaves(after))

    program = _WhileProgram(holds, step, num_consts, name or _name_of(body_fun), user_line())
    outputs: Any = _WhileFunction.apply(program, *_to_real(given))
    return tree.unflatten(structure, _from_real(outputs, are_complex[num_consts:]))


def _to_real(values: _Tensors) -> list[torch.Tensor]:
    """The values, complex ones as pairs: all that is floating-point has derivatives then."""
    return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in values]


def _from_real(values: _Tensors, are_complex: Sequence[bool]) -> list[torch.Tensor]:
    rows = zip(values, are_complex, strict=True)
    return [torch.view_as_complex(x.contiguous()) if pair else x for x, pair in rows]


def _name_of(function: Callable) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _refuse_keeper(what: str, fix: str) -> None:
    if keeper() is not None:
        raise ValueError(
            f"partition: at {user_line()} the function runs a {what}, whose blocks have no rule of "
            f"placement; wanted operations of torch, and scans; fix: {fix}; or ft.shard_map of "
            "that part, between two functions that are partitioned, with the specs it has there"
        )


def _check_tensors(what: str, paths: list[str], leaves: list) -> None:
    raise_problems(
        f"{what} in a program has tensors only",
        [
            Problem(path or "result", repr(leaf), "a tensor", "make it one: torch.tensor(...)")
            for path, leaf in zip(paths, leaves, strict=True)
            if not isinstance(leaf, torch.Tensor)
        ],
    )


def _check_condition(out: Any) -> None:
    if isinstance(out, torch.Tensor) and out.dtype == torch.bool and out.dim() == 0:
        return
    got = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, torch.Tensor) else repr(out)
    raise ValueError(
        f"while_loop at {user_line()}: the condition gives {got}; wanted a bool, a scalar; fix: "
        "compare, and join comparisons by .any() or .all()"
    )


def _check_carry(before: tree.Tree, after: tree.Tree) -> None:
    rows = tree.same_structure(before, after, names=("the carry before", "the carry after"))
    _check_tensors("the carry of a while loop", tree.paths(before), rows)
    raise_problems(
        "while_loop: the carry must keep its shapes and dtypes",
        [
            Problem(
                f"carry/{path}" if path else "carry",
                f"{tuple(new.shape)} {new.dtype} after one iteration",
                f"{tuple(old.shape)} {old.dtype}, as before it",
                "cast or reshape it in the body",
            )
            for path, old, new in zip(tree.paths(before), tree.leaves(before), rows, strict=True)
            if (old.shape, old.dtype) != (new.shape, new.dtype)
        ],
    )


# --- blocks, recorded where no transform is left


@dataclass
class _Recorded:
    """Blocks from the same operands, of which those are left out that none of them reads.

    Attributes:
        blocks: their inputs are what they captured, then the operands.
        captured: what is captured, outside.
        used: the places of the operands that are read.
    """

    blocks: list[Block] = field(default_factory=list)
    captured: list[Var] = field(default_factory=list)
    used: list[int] = field(default_factory=list)


def _record_blocks(
    recorder: Recorder, functions: Sequence[_Flat], operands: _Tensors, kept: Sequence[int] = ()
) -> _Recorded:
    """The functions as blocks.

    Args:
        kept: places of operands that are inputs in any case, and others in each iteration.
    """
    found: list[tuple[list[Var], list, list[Var]]] = []
    captured: dict[Var, Var] = {}
    outside = [recorder.var(value) for value in operands]
    for function in functions:
        with recorder.frame() as frame, torch.no_grad():
            values = []
            for like in operands:
                made = recorder.empty(like.shape, like.stride(), like.dtype, like.device)
                recorder.input(made, "operand")
                values.append(made)
            inputs = [recorder.var(value) for value in values]
            pairs = enumerate(zip(inputs, outside, strict=True))
            frame.stands_for |= {i: o for k, (i, o) in pairs if k not in kept}
            outputs = [recorder.var(value) for value in _separate(function(values))]
        captured |= frame.captured
        found.append((inputs, live_equations(frame.equations, outputs), outputs))
    read = [{*outputs, *(v for e in body for v in e.operands)} for _, body, outputs in found]
    used = [
        place
        for place in range(len(operands))
        if place in kept
        or any(inputs[place] in own for (inputs, _, _), own in zip(found, read, strict=True))
    ]
    outer = {inner: around for inner, around in captured.items() if any(inner in r for r in read)}
    blocks = [
        Block((*outer, *(inputs[place] for place in used)), tuple(body), tuple(outputs))
        for inputs, body, outputs in found
    ]
    return _Recorded(blocks, list(outer.values()), used)


def _separate(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous results, so that those of one branch fit where those of another are read."""
    return [value.detach().contiguous() for value in outputs]


def _fresh_results(block: Block) -> list[tuple]:
    return [(v.shape, v.stride, v.dtype, v.device) for v in block.outputs]


def _emit(recorder: Recorder, op: Any, operands: Sequence[Var]) -> tuple[torch.Tensor, ...]:
    return tuple(recorder.emit(op, operands, _fresh_results(op.blocks[-1])))


@contextlib.contextmanager
def _look_ahead() -> Iterator[None]:
    """Record aside what runs in this with block, only to know what it gives."""
    recorder = active()
    assert recorder is not None
    with recorder.frame():
        yield


# --- switches


@dataclass(frozen=True, eq=False)
class _SwitchProgram:
    """The branches of a switch as functions of the operands; opaque to functorch."""

    functions: tuple[_Flat, ...]
    name: str

    def record(self, index: torch.Tensor, operands: _Tensors) -> tuple[torch.Tensor, ...]:
        """The results of a switch that is recorded here."""
        recorder = active()
        assert recorder is not None
        made = _record_blocks(recorder, self.functions, operands)
        around = [*made.captured, *(recorder.var(operands[place]) for place in made.used)]
        op = Switch(tuple(made.blocks), name=self.name)
        return _emit(recorder, op, [recorder.var(index), *around])

    def derive(self, functions: Sequence[_Flat]) -> _SwitchProgram:
        """A switch over other branches, on the same index."""
        return _SwitchProgram(tuple(functions), self.name)

    def pull(self, count: int, moving: Sequence[int], given: Sequence[int]) -> _SwitchProgram:
        """The pullback: of the operands and of cotangents of the results `given`.

        Args:
            count: the number of operands.
            moving: those that have cotangents, which the branches return.
        """

        def pull(function: _Flat, values: _Tensors) -> list[torch.Tensor]:
            operands = list(values[:count])

            def run(values: _Tensors) -> list[torch.Tensor]:
                made = function(values)
                return [made[i] for i in given]  # others may have no derivative

            with in_phase("recompute"), unwatched():
                _, pullback = pull_back(run, operands, moving)
            with in_phase("backward"):
                found = pullback(list(values[count:]))
            return [torch.zeros_like(operands[i]) if found[i] is None else found[i] for i in moving]

        return self.derive([functools.partial(pull, function) for function in self.functions])

    def push(self, count: int, moving: Sequence[int]) -> _SwitchProgram:
        """Forward mode: of the operands and of tangents of those `moving`, to the results' own."""

        def push(function: _Flat, values: _Tensors) -> Sequence[torch.Tensor]:
            return _push(function, values[:count], moving, values[count:])[1]

        return self.derive([functools.partial(push, function) for function in self.functions])

    def over(self, size: int, in_dims: Sequence[int | None]) -> tuple[Any, list[bool]]:
        """The switch over mapped branches, as a function of index and operands.

        Also which results are batched, once it has run. The first of `in_dims` is the index's.
        """
        if in_dims[0] is not None:
            return map_level(self._choose, size, in_dims)
        mapped = [map_level(function, size, in_dims[1:]) for function in self.functions]
        varying: list[bool] = []

        def alike(function: Callable, own: list[bool], values: _Tensors) -> list[torch.Tensor]:
            rows = zip(function(values), own, varying, strict=True)
            return [x.expand(size, *x.shape) if v and not b else x for x, b, v in rows]

        def run(values: _Tensors) -> Any:
            for function, _ in mapped:  # a result is batched if it is one in any branch
                with _look_ahead():
                    function(values[1:])
            varying[:] = [any(column) for column in zip(*(own for _, own in mapped), strict=True)]
            made = [functools.partial(alike, function, own) for function, own in mapped]
            program = replace(self, functions=tuple(made))
            return _SwitchFunction.apply(program, *values)

        return run, varying

    def _choose(self, values: _Tensors) -> list[torch.Tensor]:
        """All branches, and of each result that of the index's own.

        Operands of branches that are not chosen have no derivative, also where it is not finite.
        """
        index = values[0].to(torch.int64).clamp(0, len(self.functions) - 1)
        results: list[torch.Tensor] = []
        for position, function in enumerate(self.functions):
            chosen = index == position
            given = [
                torch.where(chosen, x, x.detach()) if x.is_floating_point() else x
                for x in values[1:]
            ]
            with effects_where(chosen):
                rows = function(given)
            results = [
                torch.where(chosen, *pair) for pair in zip(rows, results or rows, strict=True)
            ]
        return results


def _push(
    function: _Flat, operands: _Tensors, moving: Sequence[int], tangents: _Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The results of a function, and the tangents of those that are floating-point."""
    floats: list[int] = []

    def of(*chosen: torch.Tensor) -> tuple[tuple, list]:
        outputs = list(function(replace_at(list(operands), moving, chosen)))
        floats[:] = [i for i, x in enumerate(outputs) if x.is_floating_point()]
        return tuple(outputs[i] for i in floats), outputs

    chosen = tuple(operands[i] for i in moving)
    made: Any = torch.func.jvp(of, chosen, tuple(tangents), has_aux=True)
    return replace_at(made[2], floats, made[0]), list(made[1])


class _SwitchFunction(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(program: _SwitchProgram, index, *operands):
        return program.record(index, operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.program = inputs[0]
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))
        ctx.floats = [x.is_floating_point() for x in output]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        index, *operands = [compat.unwrap_if_dead(value) for value in ctx.saved_tensors]
        needed = ctx.needs_input_grad[2:]
        moving = [i for i, x in enumerate(operands) if needed[i] and x.is_floating_point()]
        given = [i for i, ct in enumerate(cotangents) if ct is not None]
        if not given or not moving:
            return None, None, *(None for _ in operands)
        program = ctx.program.pull(len(operands), moving, given)
        seeds = [cotangents[i].contiguous() for i in given]
        grads: Any = _SwitchFunction.apply(program, index, *operands, *seeds)
        return None, None, *replace_at([None] * len(operands), moving, grads)

    @staticmethod
    def jvp(ctx, _, index_tangent, *tangents) -> Any:
        index, *operands = ctx.saved_tensors
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
        program = ctx.program.push(len(operands), moving)
        made: Any = _SwitchFunction.apply(program, index, *operands, *(tangents[i] for i in moving))
        rows = iter(made)
        return tuple(next(rows) if moves else None for moves in ctx.floats)

    @staticmethod
    def vmap(info, in_dims, program, *values) -> Any:
        run, varying = program.over(info.batch_size, in_dims[1:])
        outputs = run(values)
        return tuple(outputs), tuple(0 if batched else None for batched in varying)


# --- loops


@dataclass(frozen=True, eq=False)
class _WhileProgram:
    """The condition and the body of a loop as functions of the operands; opaque to functorch."""

    holds: _Flat
    step: _Flat
    num_consts: int
    name: str
    line: str

    def record(self, operands: _Tensors) -> tuple[torch.Tensor, ...]:
        """The last carry of a loop that is recorded here."""
        recorder = active()
        assert recorder is not None
        first = self.num_consts
        values = [*operands[:first], *(value.contiguous() for value in operands[first:])]
        carried = range(first, len(values))
        made = _record_blocks(recorder, (self.holds, self.step), values, carried)
        num_consts = len(made.captured) + sum(place < first for place in made.used)
        around = [*made.captured, *(recorder.var(values[place]) for place in made.used)]
        op = While(made.blocks[0], made.blocks[1], num_consts, name=self.name)
        return _emit(recorder, op, around)

    def push(self, moving: Sequence[int], count: int) -> _WhileProgram:
        """The loop over consts and carry, and over tangents of those `moving`.

        Args:
            moving: among them all carries that are floating-point.
            count: the number of operands.
        """
        first = self.num_consts
        fixed = [i for i in moving if i < first]

        def split(values: _Tensors) -> tuple[list, list]:
            # (*consts, *tangents of consts, *carry, *tangents of carry)
            consts, rest = values[:first], values[first:]
            tangents, rest = rest[: len(fixed)], rest[len(fixed) :]
            carry, moved = rest[: count - first], rest[count - first :]
            return [*consts, *carry], [*tangents, *moved]

        def holds(values: _Tensors) -> Sequence[torch.Tensor]:
            return self.holds(split(values)[0])

        def step(values: _Tensors) -> Sequence[torch.Tensor]:
            operands, tangents = split(values)
            after, moved = _push(self.step, operands, moving, tangents)
            return [*after, *moved]

        return replace(self, holds=holds, step=step, num_consts=first + len(fixed))

    def over(self, size: int, in_dims: Sequence[int | None]) -> tuple[_Flat, list[bool]]:
        """The loop under one vmap, and, once it has run, which results are batched."""
        first, varying = self.num_consts, [dim is not None for dim in in_dims]

        def run(values: _Tensors) -> Any:
            rows = list(zip(values, in_dims, strict=True))
            while True:  # what an iteration makes of the carry may be batched
                given = [
                    x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape) if own else x
                    for (x, dim), own in zip(rows, varying, strict=True)
                ]
                dims = [0 if batched else None for batched in varying]
                holds, apart = map_level(self.holds, size, dims)
                step, after = map_level(self.step, size, dims)
                with _look_ahead():
                    holds(given)
                    step(given)
                own = [b or a or apart[0] for b, a in zip(varying[first:], after, strict=True)]
                if own == varying[first:]:
                    break
                varying[first:] = own
            program = replace(
                self,
                holds=functools.partial(_any_holds, holds),
                step=functools.partial(_step_where, self, size, dims, step, apart[0], after, own),
            )
            return _WhileFunction.apply(program, *given)

        return run, varying


def _any_holds(holds: _Flat, values: _Tensors) -> list[torch.Tensor]:
    return [holds(values)[0].any()]


def _step_where(
    program: _WhileProgram, size: int, dims, step: _Flat, apart: bool, after, own, values: _Tensors
) -> list[torch.Tensor]:
    """An iteration under one vmap; where the condition differs, of those that it holds for."""
    if not apart:
        rows = zip(step(values), after, own, strict=True)
        return [x.expand(size, *x.shape) if v and not b else x for x, b, v in rows]

    def chosen(given: _Tensors) -> list[torch.Tensor]:
        (holds,) = program.holds(given)
        with effects_where(holds):
            made = program.step(given)
        rows = zip(made, given[program.num_consts :], strict=True)
        return [torch.where(holds, new, old) for new, old in rows]

    return list(map_level(chosen, size, dims)[0](values))


class _WhileFunction(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(program: _WhileProgram, *operands):
        return program.record(operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.program = inputs[0]
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        raise IrreversibleError(
            f"while_loop at {ctx.program.line} is differentiated in reverse, for which every "
            "iteration would have to be kept, and their number is not known; wanted a loop of a "
            "known length; fix: lax.fori_loop with Python numbers for bounds, or lax.scan; or "
            "forward mode, torch.func.jvp; or x.detach() before the loop, if nothing is to flow "
            "through it"
        )

    @staticmethod
    def jvp(ctx, _, *tangents) -> Any:
        program, operands = ctx.program, list(ctx.saved_tensors)
        first, count = program.num_consts, len(operands)
        fixed = [i for i in range(first) if tangents[i] is not None]
        floats = [i for i in range(first, count) if operands[i].is_floating_point()]
        moved = [
            torch.zeros_like(operands[i]) if tangents[i] is None else tangents[i] for i in floats
        ]
        pushed = program.push([*fixed, *floats], count)
        made: Any = _WhileFunction.apply(
            pushed, *operands[:first], *(tangents[i] for i in fixed), *operands[first:], *moved
        )
        rows = iter(made[count - first :])
        return tuple(next(rows) if x.is_floating_point() else None for x in operands[first:])

    @staticmethod
    def vmap(info, in_dims, program, *values) -> Any:
        run, varying = program.over(info.batch_size, in_dims[1:])
        outputs = run(values)
        batched = varying[program.num_consts :]
        return tuple(outputs), tuple(0 if each else None for each in batched)
