"""Partitioning: a function of whole values and a few specs to the per-rank program of a mesh.

The function is written for one device. It is traced once, on fake tensors of global shape, to
equations in global view (`functron.program`); `propagate` decides where every value lies; and what
is returned is what `shard_map` would have made of the per-rank program: the same equations on
shards, with the collectives of `functron.lax` between them. So it simulates under vmap,
differentiates, traces to a `functron.Program` that prints, checks and costs, compiles, and runs on
processes, as a program written by hand does.

A gradient is that of the partitioned function, not the partition of a traced gradient: a call of
`functron.value_and_grad` in the function stays whole in the trace, its function is partitioned, and
the per-rank program is differentiated. Backward then has exactly the transposes of the collectives
in forward, the same as handwritten programs have, and needs no rules of its own. The gradients come
as partial sums over all axes that do not split the parameter, and the update goes on with them by
the same rules: a norm of them or a sum with replicated moments is an all-reduce, moments that are
split over data axes (ZeRO) a reduce-scatter, and parameters that are not are gathered at the end.

GSPMD (Xu et al. 2021) is the idea; partial values and their delay are those of OneFlow and DTensor.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from functron.core import compat, tree
from functron.core.compat import Function
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import in_phase, in_scopes
from functron.partitioning.calls import Call, Keeper, rematerialized
from functron.partitioning.placement import Placement, described, move, of_spec, spec_of
from functron.partitioning.propagate import (
    LocalBlock,
    LocalEquation,
    Move,
    Planner,
    Settings,
    Spread,
)
from functron.partitioning.rules import MakeRule, inlined
from functron.program.equations import Block, Equation, Fresh, Scan, Var
from functron.program.program import Program
from functron.program.recorder import active, aside, from_line, keeping
from functron.program.trace import trace
from functron.spmd import spec as sharding
from functron.spmd.axes import Scope, enter
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shard_map import Mapped, check_spec_trees
from functron.spmd.spec import P, is_spec
from functron.transforms.policies import Policy
from functron.transforms.scan import scan

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("constrain(Tensor(a) x, int pin) -> Tensor(a)")
_LIBRARY.impl("constrain", lambda x, pin: compat.alias(x), "CompositeExplicitAutograd")

_pins: contextvars.ContextVar[list[P] | None] = contextvars.ContextVar(
    "functron_pins", default=None
)

_NO_RULES: Mapping[str, MakeRule] = MappingProxyType({})
_NO_CONSTRAINTS: Mapping[str, P] = MappingProxyType({})
_NO_POLICIES: Mapping[str, Policy] = MappingProxyType({})


@public
def constrain(x: tree.Tree, spec: P) -> tree.Tree:
    """y = x, which lies as `spec` says in what `partition` makes of the function around it.

    The cotangent is left where it comes. Outside of `partition` it is x itself.

    Args:
        x: tensors, in global view.
        spec: for each of them.

    Raises:
        ValueError: (from `partition`) an axis that the mesh lacks, or that does not divide its dim.
    """
    pins = _pins.get()
    if pins is None:
        return x

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        pins.append(spec)
        return _Constrain.apply(leaf, len(pins) - 1)

    return tree.map(one, x)


class _Constrain(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x, pin):
        return torch.ops.functron.constrain(x, pin)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        return cotangents[0], None

    @staticmethod
    def vmap(info, in_dims, x, pin):
        return x, in_dims[0]  # one of several samples has no spec


@public
def partition(
    fn: Callable,
    mesh: Mesh | BoundMesh,
    in_specs: tree.Tree,
    out_specs: tree.Tree = None,
    *,
    constraints: Mapping[str, P] = _NO_CONSTRAINTS,
    remat: Mapping[str, Policy] = _NO_POLICIES,
    rules: Mapping[str, MakeRule] = _NO_RULES,
    fallback: Literal["replicate"] | None = None,
    pick: Literal["cheapest"] | None = None,
    check: bool = True,
    donate: int | Sequence[int] = (),
) -> Partitioned:
    r"""The per-rank program of a function of whole values, mapped over `mesh` as by `shard_map`.

    ``partition(loss, mesh, (specs, P("dp")))`` computes what ``loss`` does; which collectives that
    takes follows from the specs. Read them in ``functron.trace(f)(*args)``, or in `explain`.

    `fn` is traced once for each structure, shapes and dtypes of its arguments, as by `jit`: what it
    closes over, tensors or Python values, stays what it was then.

    Args:
        fn: a function of whole values, without collectives; positional arguments only. `constrain`
            in it says where a value must lie. It may call `functron.value_and_grad`, `grad`,
            `remat` and `scan`, and other code that `functron.trace` can trace.
        mesh: the ranks.
        in_specs: a prefix tree of specs for the tuple of arguments; None: static.
        out_specs: a prefix tree of specs for the result; None: each comes as it was computed,
            without partial sums, and `Partitioned.out_specs` says how.
        constraints: specs by patterns of named scopes (`functron.named_scope`), for code that stays
            as it is: what leaves a scope whose path holds the pattern, floating-point values of at
            least as many dims, lies as the spec says. ``{"attention|mlp": P("dp", "tp")}`` splits
            the residual stream along the sequence.
        remat: policies by patterns of named scopes, for code that stays as it is: each scope whose
            path holds the pattern is computed again in backward, as `functron.remat` with that
            policy would. Parameters that are split over data axes are then gathered for each scope
            as it runs, and again in its backward, so that no more than one scope's are ever whole:
            ``{r"layers\.\d+$": policies.nothing}``. The outermost scopes count, and the first of
            several patterns.
        rules: rules of operations by name, before those of `functron.partitioning.rules.TABLE`.
        fallback: "replicate": an operation without a rule runs on replicated operands; None: it is
            an error.
        pick: "cheapest": where candidates cost about the same, the cheapest is taken; None: that is
            an error which lists them.
        check: as of `shard_map`.
        donate: as of `shard_map`.

    Raises:
        ValueError: a spec does not fit; (when it is called) an operation has no rule; or an axis
            splits an operation's operands along different dims, and no choice is better.
    """
    check_spec_trees(in_specs, P() if out_specs is None else out_specs, mesh, None)
    donated = (donate,) if isinstance(donate, int) else tuple(donate)
    raise_problems(
        "partition",
        [
            Problem(name, repr(value), f"{wanted!r} or None")
            for name, value, wanted in (
                ("fallback", fallback, "replicate"),
                ("pick", pick, "cheapest"),
            )
            if value not in (None, wanted)
        ],
    )
    settings: dict[str, Any] = {"rules": dict(rules), "fallback": fallback, "pick": pick}
    by_scope = dict(constraints), dict(remat)
    return Partitioned(fn, mesh, in_specs, out_specs, settings, by_scope, check, donated)


class Partitioned(Mapped):
    """The result of `partition`: a mapped function whose per-rank program is found at each call.

    Attributes:
        fn: the function of whole values.
    """

    def __init__(self, fn, mesh, in_specs, out_specs, settings, by_scope, check, donate):
        self.fn, self._settings, self._given = fn, settings, out_specs
        self._constraints, self._policies = by_scope
        self._plans: dict[Any, _Made] = {}
        self._last: _Made | None = None
        super().__init__(self._rank, mesh, in_specs, P(), check, None, donate)
        self.name = self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    @property
    def out_specs(self) -> tree.Tree:
        """The specs of results: those given, or of the call before.

        Raises:
            ValueError: none were given, and it was not called yet.
        """
        if self._given is not None:
            return self._given
        if self._last is None:
            raise ValueError(
                f"partition: the out_specs of {self.name} are found when it is first called; fix: "
                "give out_specs, or call or trace it first"
            )
        return self._last.out_specs

    @out_specs.setter
    def out_specs(self, specs: tree.Tree) -> None:
        pass  # `Mapped` sets what it is given; these are found

    @public
    def explain(self, *args: tree.Tree) -> str:
        """Where every value lies for such arguments, equation by equation, with the moves.

        Args:
            args: global values, which may be abstract.
        """
        made = self._made(args, whole=True)
        return "\n".join(_lines(made.plan, ""))

    def _rank(self, *args):
        made = self._last = self._made(args, whole=False)
        leaves = [leaf for leaf in tree.leaves(args) if isinstance(leaf, torch.Tensor)]
        constants = [x.detach() for x in made.constants]
        results = iter(run(made.plan, [*leaves, *constants], made.sizes))
        outputs = [next(results) if isinstance(o, Var) else o for o in made.plan.block.outputs]
        return tree.unflatten(made.out_structure, outputs)

    def _made(self, args: tuple, *, whole: bool) -> _Made:
        prefix = (self.in_specs,) * len(args) if is_spec(self.in_specs) else tuple(self.in_specs)
        leaves, structure = tree.flatten(args)
        specs = tree.broadcast_prefix(prefix, args, is_leaf=is_spec, what="in_specs")
        looks = []
        for leaf, spec in zip(leaves, specs, strict=True):
            if isinstance(leaf, torch.Tensor):
                shape = tuple(leaf.shape)
                shape = shape if whole else sharding.global_shape(shape, spec, self.mesh)
                looks.append((shape, leaf.dtype, leaf.device))
            else:
                looks.append((type(leaf), leaf))
        key = structure, tuple(looks)
        try:
            known = self._plans.get(key)
        except TypeError:  # a static argument without a hash: anew every time
            return self._plan(leaves, looks, structure, specs)
        if known is None:
            known = self._plans[key] = self._plan(leaves, looks, structure, specs)
        return known

    def _plan(self, leaves, looks, structure, specs) -> _Made:
        with aside(), FakeTensorMode():
            fakes = [
                torch.empty(look[0], dtype=look[1], device=look[2])
                if isinstance(leaf, torch.Tensor)
                else leaf
                for leaf, look in zip(leaves, looks, strict=True)
            ]
        program, pins = global_program(self.fn, tree.unflatten(structure, fakes))
        mesh = self.mesh.mesh if isinstance(self.mesh, BoundMesh) else self.mesh
        block = self._recomputed(self._constrained(inlined(program.block), pins))
        _check_pins(pins, mesh)
        sizes = {name: size for name, size in mesh.axes if size > 1}
        settings = Settings(sizes, **self._settings, pins=tuple(pins))
        given = [spec for leaf, spec in zip(leaves, specs, strict=True) if _is_tensor(leaf)]
        inputs = []
        for value in program.inputs:
            spec = given[len(inputs)] if value.role == "argument" else P()
            inputs.append(of_spec(spec, len(value.var.shape), sizes))
        spread = Spread(settings)
        for bit, (value, placement) in enumerate(zip(program.inputs, inputs, strict=True)):
            spread.start(value.var, placement, bit)
        spread.block(block)
        plan = Planner(settings, spread).plan(block, inputs, self._pinned(program, mesh, sizes))
        return _Made(plan, program, sizes, self._given)

    def _constrained(self, block: Block, pins: list[P]) -> Block:
        """`block`, with what leaves the scopes of `constraints` pinned."""
        for pattern, spec in self._constraints.items():
            pins.append(spec)
            block, count = leaving(block, pattern, spec, len(pins) - 1)
            if not count:
                raise ValueError(
                    f"partition: got a constraint for the scope {pattern!r}, which no value of "
                    f"{self.name} with {len(spec)} dims or more leaves; wanted one of "
                    + _scopes_text(block)
                )
        return block

    def _recomputed(self, block: Block) -> Block:
        """`block`, with the scopes of `remat` as calls of it."""
        block, found = recomputed(block, self._policies)
        for pattern in self._policies:
            if pattern not in found:
                raise ValueError(
                    f"partition: got remat of the scope {pattern!r}, in which {self.name} runs "
                    "nothing, or nothing that a pattern before has not; wanted one of "
                    + _scopes_text(block)
                )
        return block

    def _pinned(self, program: Program, mesh: Mesh, sizes) -> list[Placement | None]:
        """Where the outputs must lie."""
        if self._given is None:
            return [None] * len(program.outputs)
        skeleton = tree.unflatten(program.out_structure, [o.value for o in program.outputs])
        flat = tree.broadcast_prefix(self._given, skeleton, is_leaf=is_spec, what="out_specs")
        rows = list(zip(program.outputs, flat, strict=True))
        raise_problems(
            f"partition cannot split what {self.name} returns",
            [
                problem
                for output, spec in rows
                if isinstance(output.value, Var) and spec is not None
                for problem in sharding.problems(
                    f"output {output.path}", output.value.shape, spec, mesh
                )
            ],
        )
        return [
            of_spec(spec or P(), len(output.value.shape), sizes)
            if isinstance(output.value, Var)
            else None
            for output, spec in rows
        ]


class _Made:
    """A plan, and what is around it.

    Attributes:
        plan: of the whole function.
        sizes: of the axes with more than one rank.
        constants: tensors that the function closes over.
        out_structure: of its results.
        out_specs: a spec per result, in that structure.
    """

    def __init__(self, plan: LocalBlock, program: Program, sizes, out_specs):
        self.plan, self.sizes, self.out_structure = plan, sizes, program.out_structure
        self.constants = [i.value for i in program.inputs if i.value is not None]
        if any(compat.is_wrapped(x) or x.requires_grad for x in self.constants):
            raise ValueError(
                f"partition: {program.name} closes over a tensor that is differentiated; wanted it "
                "among the arguments, where it has a spec; fix: make it an argument"
            )
        specs = [spec_of(p, sizes) if p is not None else None for p in plan.outputs]
        found = tree.unflatten(program.out_structure, specs)
        self.out_specs = found if out_specs is None else out_specs


def leaving(block: Block, pattern: str, spec: P, pin: int) -> tuple[Block, int]:
    """The block with a `constrain` of what leaves scopes that hold a pattern, and how many."""
    fresh = Fresh(block)

    def inside(equation: Equation) -> bool:
        return re.search(pattern, "/".join(equation.where.scopes)) is not None

    def one(block: Block) -> tuple[Block, int]:
        read = {v for v in block.outputs if isinstance(v, Var)}
        read |= {v for e in block.equations if not inside(e) for v in e.operands}
        renamed: dict[Var, Var] = {}
        equations, count = [], 0
        for equation in block.equations:
            op: Any = equation.op
            if hasattr(op, "body"):
                body, found = one(op.body)
                op, count = replace(op, body=body), count + found
            args, kwargs = pytree.tree_map_only(
                Var, lambda v: renamed.get(v, v), (equation.args, dict(equation.kwargs))
            )
            equations.append(replace(equation, op=op, args=args, kwargs=kwargs))
            for var in equation.results if inside(equation) else ():
                if var in read and var.dtype.is_floating_point and len(var.shape) >= len(spec):
                    renamed[var] = fresh.like(var, "pinned", storage=var.storage)
                    constrained = torch.ops.functron.constrain.default
                    outputs = (renamed[var],)
                    equations.append(Equation(constrained, (var, pin), {}, outputs, equation.where))
        outputs = tuple(renamed.get(v, v) if isinstance(v, Var) else v for v in block.outputs)
        return replace(block, equations=tuple(equations), outputs=outputs), count + len(renamed)

    return one(block)


def recomputed(block: Block, policies: Mapping[str, Policy]) -> tuple[Block, set[str]]:
    """The block with what runs in scopes as calls of `remat`, and the patterns that were found.

    Equations of one scope that follow one another are one call. Its results are what others read.
    """
    found: set[str] = set()

    def scope_of(equation: Equation) -> tuple[str, tuple[str, ...]] | None:
        """The pattern that holds, and the outermost scope that it does for."""
        scopes = equation.where.scopes
        for pattern in policies:
            for end in range(1, len(scopes) + 1):
                if re.search(pattern, "/".join(scopes[:end])):
                    return pattern, scopes[:end]
        return None

    def inner(equation: Equation) -> Equation:
        op: Any = equation.op
        if not hasattr(op, "body") or getattr(op, "transform", "") == "custom_vjp":
            return equation
        return replace(equation, op=replace(op, body=one(op.body)))

    def one(block: Block) -> Block:
        runs = [(key, [*run]) for key, run in itertools.groupby(block.equations, scope_of)]
        reads = Counter(v for e in block.equations for v in {*e.operands})
        reads.update({v for v in block.outputs if isinstance(v, Var)})
        equations: list[Equation] = []
        for key, run in runs:
            if key is None:
                equations += map(inner, run)
                continue
            pattern, scopes = key
            found.add(pattern)
            inside = Counter(v for e in run for v in {*e.operands})
            made = [v for e in run for v in e.results]
            given = tuple(dict.fromkeys(v for e in run for v in e.operands if v not in {*made}))
            outputs = tuple(v for v in made if reads[v] > inside[v])
            wrap = functools.partial(rematerialized, policies[pattern])
            op: Any = Call(Block(given, tuple(run), outputs), "remat", wrap)
            where = replace(run[0].where, scopes=scopes)
            equations.append(Equation(op, given, {}, outputs, where))
        return replace(block, equations=tuple(equations))

    return one(block), found


def _scopes_text(block: Block) -> str:
    scopes = {"/".join(e.where.scopes) for e in nested(block)} - {""}
    return ", ".join(sorted(scopes)) or "no scopes: the function names none"


def nested(block: Block) -> Iterator[Equation]:
    """Every equation, those of bodies too."""
    for equation in block.equations:
        yield equation
        if isinstance(equation.op, (Scan, Call)):
            yield from nested(equation.op.body)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _check_pins(pins: Sequence[P], mesh: Mesh) -> None:
    raise_problems(
        "partition cannot use these constraints",
        [
            problem
            for i, spec in enumerate(pins)
            for problem in sharding.problems(f"constrain number {i}", None, spec, mesh)
        ],
    )


def global_program(fn: Callable, args: tuple) -> tuple[Program, list[P]]:
    """The program of a function in global view, calls of transforms whole, and its constraints.

    Args:
        fn: of whole values.
        args: fake tensors, and static values.
    """
    pins: list[P] = []
    token = _pins.set(pins)
    try:
        keeper = Keeper()
        with aside(), enter(Scope()), torch.enable_grad(), keeper, keeping(keeper):
            return trace(fn, simulate=True)(*args), pins
    finally:
        _pins.reset(token)


# --- running


def run(plan: LocalBlock, inputs: Sequence[torch.Tensor], sizes) -> list[torch.Tensor]:
    """The outputs of a plan on one rank's shards; inside of a mapped program."""
    return _Run(plan, sizes).outputs(inputs)


def _run(plan: LocalBlock, sizes, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return run(plan, inputs, sizes)


class _Run:
    """The values of one rank while a plan runs, by where they lie."""

    def __init__(self, plan: LocalBlock, sizes):
        self.plan, self.sizes = plan, sizes
        self.values: dict[tuple[Var, Placement], torch.Tensor] = {}
        self.shares: set[Var] = set()

    def outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        plan = self.plan
        self.values.update(
            zip(zip(plan.block.inputs, plan.inputs, strict=True), inputs, strict=True)
        )
        last = _last_uses(plan)
        for number, step in enumerate(plan.steps):
            self._step(step)
            for key in last.get(number, ()):
                self.values.pop(key, None)
        for each in plan.moves:
            self._move(each)
        rows = zip(plan.block.outputs, plan.outputs, strict=True)
        return [
            self.values[value, p] for value, p in rows if isinstance(value, Var) and p is not None
        ]

    def _move(self, each: Move) -> None:
        x = self.values[each.var, each.source]
        if each.var in self.shares:  # of gradients: their sums are the end of backward
            with in_phase("backward"):
                self.values[each.var, each.target] = move(x, each.source, each.target, self.sizes)
            return
        self.values[each.var, each.target] = move(x, each.source, each.target, self.sizes)

    def _step(self, step: LocalEquation) -> None:
        with _origin(step):
            for each in step.moves:
                self._move(each)
            equation = step.equation
            keys = zip(equation.operands, step.operands, strict=True)
            operands = [self.values[key] for key in keys]
            if isinstance(equation.op, Scan):
                results = self._scan(step, equation.op, operands)
            elif isinstance(equation.op, Call):
                body = step.body
                assert body is not None
                parts = [body] if step.backward is None else [body, step.backward]
                ranked = equation.op.wrap(*(functools.partial(_run, p, self.sizes) for p in parts))
                results = list(ranked(*operands))
                if equation.op.num_moving:
                    self.shares.update(equation.results[-equation.op.num_moving :])
            else:
                results = _computed(step, operands)
            rows = zip(equation.results, step.results, results, strict=True)
            self.values.update(((var, placement), x) for var, placement, x in rows)
            for each in step.after:
                self._move(each)

    def _scan(
        self, step: LocalEquation, op: Scan, operands: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        body, start = step.body, op.num_consts + op.num_carry
        assert body is not None
        consts, carry, xs = (
            operands[: op.num_consts],
            operands[op.num_consts : start],
            operands[start:],
        )

        def scanned(before, x):
            out = run(body, [*consts, *before, *x], self.sizes)
            return out[: op.num_carry], out[op.num_carry :]

        scanned.__name__ = op.name
        flip = op.reverse and [x.flip(0) for x in xs]
        after, ys = scan(scanned, carry, flip or xs, op.length)
        return [*after, *(y.flip(0) if op.reverse else y for y in ys)]


def _computed(step: LocalEquation, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of an operation on shards."""
    equation, values = step.equation, iter(operands)
    args, kwargs = _filled(equation.args, values), _filled(dict(equation.kwargs), values)
    rule = step.rule
    assert rule is not None
    if rule.run is None:
        op: Any = equation.op
        out = op(*args, **kwargs)
    else:
        out = rule.run(step.site, *args, **kwargs)
    leaves = list(out) if isinstance(out, (tuple, list)) else [out]
    return [x for x, var in zip(leaves, equation.outputs, strict=False) if var is not None]


def _filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Arguments with tensors in the place of values, in order."""
    if isinstance(value, Var):
        return next(tensors)
    if type(value) in (list, tuple):
        return type(value)([_filled(item, tensors) for item in value])
    if type(value) is dict:
        return {name: _filled(item, tensors) for name, item in value.items()}
    return value


@contextlib.contextmanager
def _origin(step: LocalEquation) -> Iterator[None]:
    """Say where equations come from, while the per-rank program is traced."""
    if active() is None:
        yield
        return
    where = step.equation.where
    with in_scopes(where.scopes), from_line(where.line):
        yield


def _last_uses(plan: LocalBlock) -> dict[int, list[tuple[Var, Placement]]]:
    """By step, the values that nothing reads after it."""
    last: dict[tuple[Var, Placement], int] = {}
    for number, step in enumerate(plan.steps):
        for each in (*step.moves, *step.after):
            last[each.var, each.source] = last[each.var, each.target] = number
        keys = [*zip(step.equation.operands, step.operands, strict=True),
                *zip(step.equation.results, step.results, strict=True)]  # fmt: skip
        last.update(dict.fromkeys(keys, number))
    for each in plan.moves:
        last.pop((each.var, each.source), None)
    for value, placement in zip(plan.block.outputs, plan.outputs, strict=True):
        if isinstance(value, Var) and placement is not None:
            last.pop((value, placement), None)
    found: dict[int, list[tuple[Var, Placement]]] = {}
    for key, number in last.items():
        found.setdefault(number, []).append(key)
    return found


def _lines(plan: LocalBlock, indent: str) -> Iterator[str]:
    for step in plan.steps:
        for each in step.moves:
            yield f"{indent}%{each.var.name}: {described(each.source)} -> {described(each.target)}"
        equation = step.equation
        rows = zip(equation.results, step.results, strict=True)
        results = ", ".join(f"%{v.name}{list(v.shape)} {described(p)}" for v, p in rows)
        rows = zip(equation.operands, step.operands, strict=True)
        operands = ", ".join(f"%{v.name} {described(p)}" for v, p in rows)
        yield f"{indent}{results} = {equation.name}({operands})"
        if step.body is not None:
            yield from _lines(step.body, indent + "  ")
        for each in step.after:
            yield f"{indent}%{each.var.name}: {described(each.source)} -> {described(each.target)}"
    for each in plan.moves:
        yield f"{indent}%{each.var.name}: {described(each.source)} -> {described(each.target)}"
