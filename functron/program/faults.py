"""Faults: the first number that is not finite, and wrong derivatives.

`nans` runs a traced program equation by equation; `check_grads` compares derivatives with finite
differences. Both take per-rank programs on any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems
from functron.program.callbacks import effect_masks
from functron.program.check import check, refuse_divided
from functron.program.equations import Equation, Input, Var, Where
from functron.program.interpreter import (
    RankValues,
    ambient_inputs,
    run_block,
    run_in_lockstep,
    watching_numbers,
)
from functron.program.text import dtype_text, word
from functron.program.trace import Program, trace
from functron.spmd.axes import bind
from functron.spmd.mesh import BoundMesh, JointCall, Mesh
from functron.spmd.shard_map import MappedFunction, bound_axes, shard_map
from functron.spmd.spec import P

# --- numbers that are not finite


@public
def nans(f: Callable, *, infs: bool = True) -> Callable:
    """The function `f`, run equation by equation to find the first number that is not finite.

    It is traced, on any mesh, with the backward pass that it has in it, and run by the interpreter:
    on all ranks of a simulated mesh in lockstep, or on the processes of a bound one. Where all
    numbers that results depend on are finite it returns what `f` does; else the error names the
    equation that made the first other one, its line, named scopes and phase, the row of each scan
    around it, the ranks, and the ranges of its operands; or the argument that came with one.

    A NaN that is made and not selected, by ``torch.where`` or in a branch that rows of a vmap do
    not take, is passed over: with a number in its place results are the same. For each equation
    that makes some the program runs once more, without its prints and callbacks.

    >>> try:
    ...     ft.debug.nans(lambda x: torch.sqrt(x - 1).sum())(torch.tensor([2.0, 0.5]))
    ... except ValueError as error:
    ...     print("\\n".join(line.split(" at ")[0] for line in str(error).splitlines()))
    nans: sqrt (forward) makes the first number that is not finite
      result %sqrt f32[2]: 1 NaN of 2, others from 1 to 1
      operand %sub f32[2]: from -0.5 to 1

    Infinities on purpose are none: those of arguments, and of numbers such as the -inf that masks
    scores. The error lists them where a NaN follows. It is slow, for a step that went wrong; take
    the function before `jit`, and from `shard_map`, so that it knows the ranks.

    Args:
        f: a function of positional trees of tensors, as `trace` takes it.
        infs: also end at an infinity that is computed from finite numbers, such as an overflow.

    Raises:
        ValueError: (when called) there is such a number; or `f` cannot be traced, or is not correct
            on its mesh (`Program.check`).
    """
    name = getattr(f, "__name__", type(f).__name__)

    @public
    def searched(*args: tree.Tree) -> tree.Tree:
        program, mesh = trace_ranks(f, args), getattr(f, "mesh", None)
        refuse_divided(program)
        check(program)
        if isinstance(mesh, BoundMesh):
            return _run_bound(name, program, mesh, args, infs)
        leaves = program.flatten(args)
        made = _run_until_told(
            program, infs, leaves,
            run=lambda: tree.leaves(run_in_lockstep(program, *args)),
            gather=lambda one: [({}, one)],
            most=100_000 + 10 * sum(count for _, count in program.block.walk()),
        )  # fmt: skip
        return tree.unflatten(program.out_structure, made)

    return searched


def trace_ranks(f: Callable, args: tuple) -> Program:
    """The program of one rank; of a function that nothing maps, of this process."""
    return trace(f)(*args) if isinstance(f, MappedFunction) else trace(f, simulate=True)(*args)


def _run_bound(name: str, program: Program, mesh: BoundMesh, args: tuple, infs: bool) -> tree.Tree:
    """The results on this process; all of them run to the end, and then raise the same error."""
    axes, absent = bound_axes(mesh)
    leaves = program.flatten(args)

    def run() -> list:
        with bind(axes, absent=absent):
            results = run_block(program.block, {**leaves, **ambient_inputs(program.inputs)})
        return [r if isinstance(o.value, Var) else o.value
                for r, o in zip(results, program.outputs, strict=True)]  # fmt: skip

    def gather(one: Any) -> list:
        everywhere: list = [(mesh.coordinate, one)]
        for axis in axes:
            parts: Any = [None] * axis.size
            dist.all_gather_object(parts, everywhere, compat.group(axis.group))
            everywhere = [row for part in parts for row in part]
        return everywhere

    with JointCall(f"nans of {name}", mesh, alike=None):
        made = _run_until_told(program, infs, leaves, run, gather)
    return tree.unflatten(program.out_structure, made)


def _run_until_told(
    program: Program,
    infs: bool,
    leaves: Mapping[Var, torch.Tensor],
    run: Callable[[], list],
    gather: Callable[[Any], list[tuple[Mapping[str, int], Any]]],
    most: int | None = None,
) -> list:
    """The results of a program, of which no number that is not finite has a part.

    It runs again with finite numbers in place of the first ones that are not. Where the results
    stay, nothing has read those, as where all branches run and one is selected: the next ones are
    looked at, until results differ.

    Args:
        run: the program, to its flat results.
        gather: from a value of this process to each process's, with its coordinate.
        most: the number of equations that may still run after the first such number; None: any.
    """
    replaced: set[int] = set()
    first: list | None = None
    told: tuple[str, BaseException | None] | None = None
    while True:
        search = _Search(program, infs, frozenset(replaced), first is not None, most)
        search.read_inputs(program.inputs, leaves)
        made: list | None = None
        error: Exception | None = None
        try:
            with watching_numbers(search):
                made = run()
            search.read_outputs(program, made)
        except Exception as caught:
            if most is None or (first is None and search.found is None):
                raise
            error = caught
        changed = error is not None or (first is not None and not _are_equal(first, made))
        rows = gather((search.found, changed))
        if told is not None and any(one[1] for _, one in rows):
            raise ValueError(told[0]) from told[1]
        found = [(at, one[0]) for at, one in rows if one[0] is not None]
        first = made if first is None else first
        if not found:
            assert first is not None
            return first
        step = min(one.step for _, one in found)
        rows = [(at, one) for at, one in found if one.step == step]
        cause = None if isinstance(error, _EndlessError) else error
        told = rows[0][1].tell([at for at, _ in rows], program.mesh.size), cause
        if error is not None or rows[0][1].equation is None:
            raise ValueError(told[0]) from cause
        replaced |= {one.equation for _, one in rows if one.equation is not None}


class _EndlessError(Exception):
    """More equations have run than a program has: it may never end."""


def _are_equal(some: Sequence, others: Sequence | None) -> bool:
    """Whether two lists of results have the same numbers, of which NaN are the same."""
    return others is not None and all(
        not isinstance(a, torch.Tensor) or bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(some, others, strict=True)
    )


@dataclass(frozen=True)
class _Finding:
    """The first number that is not finite: after how many equations, and what is said of it.

    Attributes:
        places: the coordinates of ranks in lockstep that have it; none: they are told otherwise.
        equation: the number of the equation that made it; None: none did.
    """

    step: int
    head: str
    lines: tuple[str, ...]
    places: tuple[Mapping[str, int], ...] = ()
    equation: int | None = None

    def tell(self, places: Sequence[Mapping[str, int]], num_ranks: int) -> str:
        """The message, with the ranks."""
        shown = [",".join(f"{k}={v}" for k, v in at.items()) for at in self.places or places]
        named = f"ranks {'; '.join(shown[:_FEW])}" if len(shown) > 1 else f"rank {shown[0]}"
        named += f" and {len(shown) - _FEW} more" if len(shown) > _FEW else ""
        ranked = num_ranks > 1 and shown[0]
        where = "all ranks" if len(shown) == num_ranks else named
        return "\n  ".join([self.head + (f", on {where}" if ranked else ""), *self.lines])


_FEW = 4


class _Search:
    """Looks for the first number that is not finite, in a program that runs, to keep in `found`.

    Args:
        infs: whether an infinity is one.
        replaced: the numbers of equations whose results are made finite.
        quiet: whether effects have been had before.
        most: as of `_run_until_told`.
    """

    def __init__(
        self, program: Program, infs: bool, replaced: frozenset[int], quiet: bool, most: int | None
    ):
        self.mesh, self.infs, self.quiet = program.mesh, infs, quiet
        self.rows: list[tuple[str, int]] = []
        self.found: _Finding | None = None
        self._replaced, self._most = replaced, most
        equations = (e for block in program.block.walk_blocks() for e in block.equations)
        self._numbers = {id(equation): k for k, equation in enumerate(equations)}
        self._sources: dict[str, None] = {}  # of infinities on purpose
        self._step = 0

    def read_inputs(self, inputs: Sequence[Input], leaves: Mapping[Var, torch.Tensor]) -> None:
        """Look at the arguments and constants."""
        for given in inputs:
            value = leaves.get(given.var, given.value)
            if value is None or not (bad := _count_bad(value)):
                continue
            name = f"argument {given.path}" if given.role == "argument" else "a constant"
            if bad.nans:
                head = f"nans: {name} comes with numbers that are not finite"
                self._tell(head, [f"{given.var!r} {_describe(value)}"])
            else:
                self._sources[f"{name}, {_describe(value)}"] = None

    def see(self, equation: Equation, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Look at the results of an equation that others read."""
        self._step += 1
        if equation.name.startswith(_UNWRITTEN):
            for value in results:
                for x in _ranks_of(value):
                    x.zero_()  # whatever was in that memory says nothing
            return
        if self.found is not None:
            if self._most is not None and self._step > self.found.step + self._most:
                raise _EndlessError
            return
        if self._numbers[id(equation)] in self._replaced:
            for x in (x for value in results for x in _ranks_of(value)):
                if _count_bad(x):
                    x.masked_fill_(x.isfinite().logical_not(), _ORDINARY)
            return
        columns = [[_count_bad(x) for x in _ranks_of(value)] for value in results]
        bad = [any(row) and _takes_part(k) for k, row in enumerate(zip(*columns, strict=True))]
        if not any(bad):
            return
        ranks = [rank for rank, is_bad in enumerate(bad) if is_bad]
        if not any(found and found.nans for column in columns for found in column):
            infinite = any(_count_bad(x) for value in operands for x in _ranks_of(value))
            if not infinite and _has_infinity((equation.args, tuple(equation.kwargs.values()))):
                self._sources[f"{equation.name} at {line_of(equation.where)}"] = None
                return
            if infinite or not self.infs:
                return
        self._report(equation, operands, results, columns, ranks)

    def _report(self, equation, operands, results, columns, ranks: list[int]) -> None:
        first, where = ranks[0], equation.where
        scopes = f", in {'/'.join(where.scopes)}" if where.scopes else ""
        rows = "".join(f", row {index} of scan {word(name)}" for name, index in self.rows)
        what = f"{equation.name} ({where.phase}{scopes}{rows})"
        head = f"nans: {what} makes the first number that is not finite at {line_of(where)}"
        names = [v for v in equation.outputs if v is not None]
        lines = [
            f"result {names[k]!r} {_describe(_ranks_of(value)[first])}"
            for k, value in enumerate(results)
            if columns[k][first]
        ]
        seen = dict(zip(equation.operands, operands, strict=True))
        lines += [f"operand {v!r} {_describe(_ranks_of(x)[first])}" for v, x in seen.items()]
        if any(_count_bad(_ranks_of(x)[first]) for x in seen.values()) and self._sources:
            lines.append(f"infinities before it: {'; '.join([*self._sources][:_FEW])}")
        simulated = len(columns[0]) == self.mesh.size
        places = [self.mesh.coordinate(rank) for rank in ranks] if simulated else []
        self._tell(head, lines, places, self._numbers[id(equation)])

    def read_outputs(self, program: Program, leaves: Sequence[Any]) -> None:
        """Look whether infinities of arguments have come through."""
        given = [name for name in self._sources if name.startswith("argument")]
        if self.found is not None or not given or not self.infs:
            return
        for output, value in zip(program.outputs, leaves, strict=True):
            if isinstance(value, torch.Tensor) and _count_bad(value):
                path = output.path or "0"
                head = f"nans: output {path} has infinities that came with arguments"
                lines = [_describe(value), f"infinities before it: {'; '.join(given[:_FEW])}"]
                self._tell(head, lines)
                return

    def _tell(self, head: str, lines: list[str], places: Sequence = (), at: int | None = None):
        self.found = self.found or _Finding(self._step, head, tuple(lines), tuple(places), at)


def _takes_part(rank: int) -> bool:
    """Whether a rank wants what runs here, or only runs it as others do (`effects_where`)."""
    return all(bool(m[rank] if isinstance(m, RankValues) else m) for m in effect_masks())


_UNWRITTEN = ("empty", "new_empty")
_ORDINARY = 0.7371  # that no operation is likely to give in place of what is not finite


def _ranks_of(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, RankValues) else [value]


@dataclass(frozen=True)
class _Bad:
    """How many numbers of a tensor are not finite."""

    nans: int
    infs: int


def _count_bad(value: Any) -> _Bad | None:
    """None where all are finite."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    value = value.float() if value.dtype.itemsize == 1 else value
    if bool(value.isfinite().all()):
        return None
    return _Bad(int(value.isnan().sum()), int(value.isinf().sum()))


def _has_infinity(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and value in (math.inf, -math.inf)


def _describe(value: torch.Tensor) -> str:
    """``f32[2]: 1 NaN of 2, others from 0 to 1``."""
    shape = ",".join(map(str, value.shape))
    head = f"{dtype_text(value.dtype)}[{shape}]"
    if value.numel() == 0 or value.dtype == torch.bool:
        return head
    value = value.abs() if value.is_complex() else value
    wide = value.double() if value.is_floating_point() else value
    finite, bad = wide[wide.isfinite()], _count_bad(value)
    counts = [(bad.nans, "NaN"), (bad.infs, "inf")] if bad else []
    parts = [f"{count} {name}" for count, name in counts if count]
    text = f"{' and '.join(parts)} of {value.numel()}" if parts else ""
    if finite.numel():
        low, high = finite.min().item(), finite.max().item()
        text += f"{', others ' if parts else ''}from {low:.6g} to {high:.6g}"
    return f"{head}: {text}"


def line_of(where: Where) -> str:
    """The user's line, in words."""
    return where.line or "an unknown line"


# --- derivatives


_RULE = (
    "look for a backward rule (custom_vjp, autograd.Function) that forgot a collective: ranks sum "
    "what they return over the ranks that used a value, so psum transposes to psum, all_gather to "
    "psum_scatter, and ppermute to its inverse; or for a stop_gradient"
)


def check_grads(
    f: Callable,
    mesh: Mesh | BoundMesh,
    *args: Any,
    in_specs: tree.Tree = None,
    order: int = 1,
    modes: Sequence[str] = ("rev",),
    eps: float = 1e-5,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    seed: int = 0,
) -> None:
    """Check the derivatives of a per-rank program against finite differences, on all ranks.

    For every floating-point argument x_i, a random direction v and random cotangents u of what each
    rank returns, it compares ``<u, df/dx_i v>`` with ``<u, f(x_i + eps v) - f(x_i - eps v)> / 2
    eps``, in float64 on the simulated mesh, as `jax.test_util.check_grads` does for one device. So
    it finds wrong transposes of what ranks exchange, such as a `custom_vjp` whose backward lacks a
    psum, which single-device checks cannot.

    Args:
        f: of this rank's shards, as `shard_map` takes it, or what `shard_map` returned. Its
            results may vary over any axes.
        mesh: the ranks; simulated here also where it is bound.
        args: global values, of which those that are no floats stay fixed.
        in_specs: how they are split, as for `shard_map`. None: those of `f`, or not at all.
        order: 2 checks the derivative of the gradient too, and so on.
        modes: "rev" (vjp) and "fwd" (jvp), which functions with a `custom_vjp` lack.
        eps: the length of a step.
        rtol: tolerated, in multiples of the lengths of u and of the difference quotient.

    Raises:
        ValueError: derivatives differ, by argument with both numbers; an order below 1 or an
            unknown mode; nothing to differentiate.
    """
    problems = [Problem("order", repr(order), "at least 1")] if order < 1 else []
    problems += [Problem("modes", repr(m), '"rev" or "fwd"') for m in modes if m not in _MODES]
    leaves, structure = tree.flatten(args)
    moving = [i for i, leaf in enumerate(leaves) if tree.is_float(leaf)]
    if not moving:
        got = "no floating-point tensor"
        problems.append(Problem("args", got, "something to differentiate by"))
    raise_problems("check_grads", problems)
    if isinstance(f, MappedFunction):
        f, in_specs = f.f, f.in_specs if in_specs is None else in_specs
    whole = mesh.mesh

    def rows(*local: Any) -> tuple[torch.Tensor, ...]:
        return tuple(leaf.unsqueeze(0) for leaf in tree.leaves(f(*local)) if tree.is_float(leaf))

    ranks = P(tuple(name for name, size in whole.axes if size > 1))
    mapped = shard_map(rows, whole, P() if in_specs is None else in_specs, ranks, check=False)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = list(leaves)
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        return mapped(*tree.unflatten(structure, full))

    paths = tree.paths(args)
    generator = torch.Generator().manual_seed(seed)
    values = tuple(leaves[i].detach().to(torch.float64) for i in moving)
    for degree in range(1, order + 1):
        u = _directions(function(*values), generator)
        names = [f"{'gradient of ' * (degree - 1)}argument {paths[i]}" for i in moving]
        found = [
            _compare_derivatives(function, values, i, u, mode, (eps, rtol, atol, generator))
            for mode in modes
            for i in range(len(values))
        ]
        raise_problems(
            f"derivatives of order {degree} on Mesh({whole}) are not those of finite differences",
            [
                Problem(name, *parts, _RULE)
                for name, parts in zip(names * len(modes), found, strict=True)
                if parts is not None
            ],
        )
        function = _pull_back(function, u)


_MODES = ("rev", "fwd")


def _pull_back(function: Callable, u: tuple[torch.Tensor, ...]) -> Callable:
    """The gradient of ``<u, function(...)>``."""
    return lambda *values: torch.func.vjp(function, *values)[1](u)


def _directions(
    like: Sequence[torch.Tensor], generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Random tensors of these shapes, together of length 1."""
    drawn = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in like]
    length = sum(float(x.square().sum()) for x in drawn) ** 0.5 or 1.0
    return tuple((x / length).to(one.device) for x, one in zip(drawn, like, strict=True))


def _dot(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


def _compare_derivatives(
    function: Callable, values: tuple, index: int, u: tuple, mode: str, settings: tuple
) -> tuple[str, str] | None:
    """The derivatives by one argument, got and wanted, where they differ."""
    eps, rtol, atol, generator = settings
    (v,) = _directions([values[index]], generator)
    along = tuple(v if i == index else torch.zeros_like(x) for i, x in enumerate(values))
    ends = [
        function(*(x + sign * eps * d for x, d in zip(values, along, strict=True)))
        for sign in (1, -1)
    ]
    quotient = [(a - b) / (2 * eps) for a, b in zip(*ends, strict=True)]
    want = _dot(u, quotient)
    if mode == "rev":
        got = _dot(torch.func.vjp(function, *values)[1](u), along)
    else:
        got = _dot(u, torch.func.jvp(function, values, along)[1])
    if abs(got - want) <= atol + rtol * _dot(quotient, quotient) ** 0.5:
        return None
    return f"{got:.9g} by {mode}", f"{want:.9g}, the difference quotient"
