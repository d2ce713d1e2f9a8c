"""Partitioning: a function of whole values and a few specs to the per-rank program of a mesh.

The function is written for one device. It is traced once, on fake tensors of global shape, to
equations in global view (`functron.program`); `propagate` decides where every value lies; and the
result is a mapped function as of `shard_map`: the same equations on shards, with the collectives of
`functron.lax` between them. It simulates under vmap, differentiates, traces to a
`functron.Program`, compiles, and runs on processes as a program written by hand does.

A gradient by functron is that of the partitioned function: a call of `functron.value_and_grad` in
the function stays whole in the trace, its function is partitioned, and the per-rank program is
differentiated. Backward then has the transposes of the collectives in forward, as in handwritten
programs; but a sum is not transposed to a sum where its cotangents are known to be equal on all
ranks. Gradients come as partial sums over all axes that do not split the parameter, and the update
follows by the same rules: a norm of them or a sum with replicated moments is an all-reduce, moments
that are split over data axes (ZeRO) a reduce-scatter, and parameters that are not are gathered at
the end. A backward pass that torch makes in the function is a part of the trace, whose operations
have rules as all others (`backward`).

Two operations have per-rank programs written by hand where their dims are split: attention of a
sequence that stays split, if it is annotated (`functron.nn.context_attention`), and experts, which
get tokens in real rows (`functron.nn.moe.mixture`).

GSPMD (Xu et al. 2021) is the idea; partial values and their delay are those of OneFlow and DTensor.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from functron.core import compat, tree
from functron.core.closure import hoist, refuse_tracked, refusing_tracked
from functron.core.errors import Problem, nearest, public, raise_problems
from functron.core.scopes import in_phase, in_scopes
from functron.partitioning.comparison import (
    advise,
    compute_with_gradients,
    find_differences,
    gather_arguments,
)
from functron.partitioning.global_view import (
    TransformCall,
    fake_leaves,
    global_program,
    inline_views,
    pin_scope_results,
    recompute_scopes,
    refuse_second_derivatives,
    scopes_text,
)
from functron.partitioning.labels import MakeRule
from functron.partitioning.placement import (
    CollectiveCost,
    Sizes,
    ValuePlacement,
    gather_together,
    gather_uneven,
    local_shape,
    move,
    move_cost,
    placement_of,
    spec_of,
    steps,
    take_uneven,
    without_uneven,
)
from functron.partitioning.propagate import (
    JointGather,
    LocalBlock,
    LocalEquation,
    Move,
    PartitionSettings,
    plan_block,
)
from functron.partitioning.rules import ATTENTION, attention_over
from functron.partitioning.shards import Travel
from functron.program.equations import Block, Scan, Var, Where
from functron.program.recorder import active, from_line, map_only
from functron.program.trace import Program
from functron.spmd import spec as sharding
from functron.spmd.axes import scope
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shard_map import MappedFunction, check_on_first, check_spec_trees
from functron.spmd.spec import P, is_spec, is_uneven
from functron.transforms.parameter_gather import MERGED_BYTES
from functron.transforms.policies import RematPolicy
from functron.transforms.remat import will_be_differentiated
from functron.transforms.scan import scan

_NONE: Mapping[str, Any] = MappingProxyType({})


@public
def partition(
    fn: Callable,
    mesh: Mesh | BoundMesh,
    in_specs: tree.Tree,
    out_specs: tree.Tree = None,
    *,
    constraints: Mapping[str, P] = _NONE,
    attention: Mapping[str, Travel] = _NONE,
    remat: Mapping[str, RematPolicy] = _NONE,
    rules: Mapping[str, MakeRule] = _NONE,
    fallback: Literal["replicate"] | None = None,
    pick: Literal["cheapest"] | None = None,
    cost: CollectiveCost | None = None,
    check: bool | Literal["gradients"] = True,
    donate: int | Sequence[int] = (),
) -> Partitioned:
    r"""The per-rank program of a function of whole values, mapped over `mesh` as by `shard_map`.

    ``partition(loss, mesh, (specs, P("dp")))`` computes what ``loss`` does; its collectives follow
    from the specs. Read them in ``functron.trace(f)(*args)``, or in `explain`.

    `fn` is traced once for each structure, shapes and dtypes of its arguments, as by `jit`: values
    that it closes over are constants. Arguments count as contiguous tensors, so that ``as_strided``
    of one means the same on every mesh.

    >>> f = ft.partition(lambda w, x: x @ w, ft.Mesh(tp=2), (P("tp"), P(None, "tp")), P())
    >>> f(torch.ones(4, 1), torch.ones(1, 4))
    tensor([[4.]])

    Args:
        fn: a function of whole values, without collectives; positional arguments only. `constrain`
            in it says where a value must lie. It may call `functron.value_and_grad`, `grad`,
            `remat` and `scan`, and other code that `functron.trace` can trace, such as
            `torch.func.grad`, in which `remat` is left out.
        in_specs: a prefix tree of specs for the tuple of arguments; None: static. Dims that are
            `functron.Uneven` are gathered before anything is computed, and results' dims are cut
            after everything; nothing between is split unevenly.
        out_specs: a prefix tree of specs for the result; None: each comes as it was computed,
            without partial sums, and `Partitioned.out_specs` says how.
        constraints: specs by patterns of named scopes (`functron.named_scope`), for code that stays
            as it is: floating-point results of scopes whose path holds the pattern, of at least as
            many dims as the spec, have that spec. ``{"attention|mlp": P("dp", "tp")}`` splits the
            residual stream along the sequence.
        attention: by mesh axes that split sequences, the way in which keys and values reach queries
            in `torch.nn.functional.scaled_dot_product_attention`, causal by ``is_causal`` or not:
            ``{"cp": "ring"}``. The sequence then stays split as it comes, by in_specs or
            `constraints`, and what is computed is `functron.nn.context_attention`:

            * "ring": they travel around the axis; no rank has all of them. Ranks with the end of
              causal sequences have most work, and others wait for them: up to twice the time. It
              takes a mask of booleans that all heads share, and then computes every pair.
            * "zigzag": a ring in which each rank has an early and a late part of a causal sequence,
              and equal work. Outside of attention values lie in order, so that queries, keys and
              values are exchanged before it, and the result after it, which sends their bytes
              besides. (A handwritten program arranges tokens once.) 2 n must divide the sequence.
            * "gather": they are gathered, and only queries are split. In backward less is sent than
              in a ring, since all keys are kept. It takes masks of numbers, or of heads, too.
            * "exchange": heads are exchanged for sequence before, and back after it; the axis must
              divide them. Together with one of the others it is the minor axis of the two:
              ``P("dp", ("cp", "ulysses"))``.

            Over axes that are not listed, queries, keys and values of a split sequence are gathered
            (queries only where attention is causal).
        remat: policies by patterns of named scopes, for code that stays as it is: each scope whose
            path holds the pattern is computed again in backward, as by `functron.remat` with that
            policy. Parameters that are split over data axes are then gathered for each scope as it
            runs, and again in its backward, so that only one scope's are whole at a time:
            ``{r"layers\.\d+$": policies.nothing}``. The outermost scopes count, and the first of
            several patterns. The body of a scan is a scope of the name of the scanned function:
            ``{"^step$": policies.dots}`` for the layers of `functron.gpt`.
        rules: rules of operations by name, before those of `functron.partitioning.rules.TABLE`.
        fallback: "replicate": an operation without a rule runs on replicated operands; None: it is
            an error.
        pick: "cheapest": where candidates cost about the same, the cheapest is taken; None: that is
            an error which lists them.
        cost: the seconds of a collective, ``cost(op, axis, payload_bytes)`` with the bytes of its
            operand (of an all_gather, of its result) on one rank, by which candidates are compared.
            None: they cost the bytes that a rank sends. On a machine that the planner knows::

                machine = ft.plan.hardware("h100")
                ranks = ft.plan.RankPlacement.on(mesh, machine)

                def cost(op, axis, payload_bytes):
                    return machine.collective_seconds(op, payload_bytes, ranks.reach(axis))
        check: as of `shard_map`; or "gradients": as True, and before the first call with given
            shapes its results are compared with those of `fn` on the whole values, and so are the
            gradients of a sum of them, unless `fn` differentiates by itself; see
            `Partitioned.compare`.
        donate: as of `shard_map`.

    Raises:
        ValueError: a spec does not fit; (when it is called) `check` finds other numbers; an
            operation has no rule; an axis
            splits an operation's operands along different dims, and no choice is better; an axis
            of `constraints` or `constrain` does not divide its dim; or one of `attention` splits no
            sequence, or one whose attention has a mask that it does not take.
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
        ]
        + [
            Problem("check", repr(check), "True, False or 'gradients'")
            for _ in range(check not in (True, False, "gradients"))
        ]
        + _travel_problems(attention, mesh),
    )
    over = dict.fromkeys(ATTENTION, attention_over(dict(attention))) if attention else {}
    settings: dict[str, Any] = {
        "rules": {**over, **rules}, "fallback": fallback, "pick": pick, "cost": cost,
    }  # fmt: skip
    by_scope = dict(constraints), dict(remat)
    given = settings, by_scope, dict(attention)
    return Partitioned(fn, mesh, in_specs, out_specs, given, check, donated)


def _travel_problems(attention: Mapping[str, Travel], mesh: Mesh | BoundMesh) -> list[Problem]:
    known, names = get_args(Travel), mesh.axis_names
    found = [
        Problem("attention", repr(axis), "axes of the mesh", nearest(axis, names))
        for axis in attention
        if axis not in names
    ]
    found += [
        Problem(f"attention[{axis!r}]", repr(kind), " or ".join(known), nearest(kind, known))
        for axis, kind in attention.items()
        if kind not in known
    ]
    kinds = sorted(attention.values())
    if len({kind == "exchange" for kind in kinds}) < len(kinds) or kinds == ["exchange", "zigzag"]:
        wanted = "one axis, or two of which one exchanges and the other is a ring or gathers"
        found.append(Problem("attention", repr(dict(attention)), wanted))
    return found


class Partitioned(MappedFunction):
    """The result of `partition`: a mapped function whose per-rank program is found at each call.

    Attributes:
        fn: the function of whole values.
    """

    def __init__(self, fn, mesh, in_specs, out_specs, given, check, donate):
        self._settings, (self._constraints, self._policies), self._attention = given
        self.fn, self._given = fn, tree.map(lambda spec: spec, out_specs, is_leaf=is_spec)
        # the shapes that were compared; None: none are to be
        self._compared: set[Any] | None = set() if check == "gradients" else None
        self._plans: dict[Any, FunctionPlan] = {}
        self._last: FunctionPlan | None = None
        super().__init__(self._rank, mesh, in_specs, P(), bool(check), None, donate)
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
        pass  # `MappedFunction` sets what it is given; these are found

    @public
    def __call__(self, *args, **kwargs) -> Any:
        """The results, as of a `MappedFunction`.

        Raises:
            ValueError: it closes over what is differentiated or mapped outside; or see `partition`.
        """
        hidden, _ = hoist(self.fn)
        if compat.transforms_active():
            refuse_tracked(self.name, hidden)
        elif self._compares_next(args, kwargs):
            self.compare(*args)
        return super().__call__(*args, **kwargs)

    @public
    def compare(self, *args: tree.Tree) -> None:
        """Compare results and gradients with those of `fn`, as ``check="gradients"`` does.

        The mesh is simulated in one process: on a bound one, whose ranks all call it, that of
        rank 0, of values that are gathered before. Values are not changed. Traced or under
        torch.func, a function with that check refuses shapes that were not compared before.

        Args:
            args: as of a call; concrete.

        Collectives: on a bound mesh those that gather all arguments on every rank, and an
        all-reduce of 8 bytes per axis.

        Raises:
            ValueError: some differ by more than the order of sums explains
                (`functron.partitioning.comparison`); all leaves are listed.
        """
        key, mesh = self._find_shapes(args), self.mesh
        if isinstance(mesh, BoundMesh):
            given = gather_arguments(mesh, self.in_specs, args)
            error = check_on_first(mesh, lambda: self._find_error(given))
        else:
            error = self._find_error(args)
        if error is not None:
            raise error
        if self._compared is not None:
            self._compared.add(key)

    def _compares_next(self, args: tuple, kwargs: dict) -> bool:
        if self._compared is None or kwargs or scope().axis_index is not None:
            return False
        return not compat.dispatch_modes_active() and self._find_shapes(args) not in self._compared

    def _find_shapes(self, args: tuple) -> Any:
        leaves, structure = tree.flatten(args)
        looks = ((x.shape, x.dtype) for x in leaves if isinstance(x, torch.Tensor))
        return structure, tuple(looks)

    def _find_error(self, args: tuple) -> ValueError | None:
        """The result of a comparison of these whole values."""
        mesh, given = self.mesh.mesh, (self._settings, (self._constraints, self._policies))
        simulated = Partitioned(
            self.fn, mesh, self.in_specs, self._given, (*given, self._attention), False, self.donate
        )
        made = simulated.plan_for(args, whole=True)
        own = made.rules_used or any(
            isinstance(op := step.equation.op, TransformCall) and op.transform == "value_and_grad"
            for step in _walk_plan(made.plan)
        )
        wanted, got = (
            compute_with_gradients(fn, args, differentiate=not own) for fn in (self.fn, simulated)
        )
        problems = find_differences(got, wanted).problems
        if not problems:
            return None
        title = f"partition: on {mesh}, simulated, {self.name} has other numbers than unpartitioned"
        return ValueError("\n".join([title, *(f"  - {x}" for x in problems), advise(mesh)]))

    @public
    def explain(self, *args: tree.Tree) -> str:
        """Where every value lies, equation by equation, with moves and costs.

        Arguments are global values, which may be abstract.
        """
        made = self.plan_for(args, whole=True)
        return "\n".join(_lines(made.plan, "", made.settings))

    @public
    def local(self, *args: tree.Tree) -> Any:
        """The results of one rank, of its shards: a per-rank program, for use in another one.

        It is called inside of `functron.shard_map` over a mesh with the axes of this one's, and may
        be differentiated there as what a program computes by hand.

        >>> mesh = ft.Mesh(tp=2)
        >>> total = ft.partition(lambda w, x: (x @ w).sum(), mesh, (P(None, "tp"), P()), P())
        >>> f = ft.shard_map(lambda w, x: 2 * total.local(w, x), mesh, total.in_specs, P())
        >>> f(torch.ones(2, 4), torch.ones(1, 2))
        tensor(16.)

        Collectives: those of `explain`.
        """
        return self._rank(*args)

    def _rank(self, *args):
        self._refuse_unknown(args)
        made = self._last = self.plan_for(args, whole=False)
        given = tree.broadcast_prefix(
            self._spec_prefix(args), args, is_leaf=is_spec, what="in_specs"
        )
        rows = zip(tree.leaves(args), given, strict=True)
        leaves = [
            gather_uneven(leaf, spec) if is_uneven(spec) else leaf
            for leaf, spec in rows
            if isinstance(leaf, torch.Tensor)
        ]
        refuse_tracked(self.name, made.constants)
        constants = [x.detach() for x in made.constants]
        # differentiated from outside, gradients in the function are differentiated a second time
        once = not will_be_differentiated(leaves)
        refuse_second_derivatives(() if once else made.rules_used)
        results = iter(run_plan(made.plan, made.sizes, once, *leaves, *constants))
        outputs = [next(results) if isinstance(o, Var) else o for o in made.plan.block.outputs]
        out = tree.unflatten(made.out_structure, outputs)
        flat = tree.broadcast_prefix(self.out_specs, out, is_leaf=is_spec, what="out_specs")
        outputs = [
            take_uneven(x, spec) if is_uneven(spec) else x
            for x, spec in zip(outputs, flat, strict=True)
        ]
        return tree.unflatten(made.out_structure, outputs)

    def _refuse_unknown(self, shards: tuple) -> None:
        """Refuse shards of values that were to be compared, and were not."""
        if self._compared is None:
            return
        leaves, structure = tree.flatten(shards)
        prefix = self._spec_prefix(shards)
        specs = tree.broadcast_prefix(prefix, shards, is_leaf=is_spec, what="in_specs")
        bound = isinstance(self.mesh, BoundMesh)
        looks = tuple(
            (
                x.shape if bound else torch.Size(sharding.global_shape(x.shape, spec, self.mesh)),
                x.dtype,
            )
            for x, spec in zip(leaves, specs, strict=True)
            if isinstance(x, torch.Tensor)
        )
        if (structure, looks) not in self._compared:
            raise ValueError(
                f'partition: {self.name} has check="gradients", which compares values; got shapes '
                "that are traced, transformed, or inside of another program before they were "
                "compared; fix: call compare(...) with values of these shapes first"
            )

    def plan_for(self, args: tuple, *, whole: bool) -> FunctionPlan:
        """The plan for arguments: of `whole` values, or of one rank's shards."""
        leaves, structure = tree.flatten(args)
        prefix = self._spec_prefix(args)
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

    def _plan(self, leaves, looks, structure, specs) -> FunctionPlan:
        fakes = fake_leaves(leaves, [look[0] for look in looks])
        with refusing_tracked(self.name, self.fn, aside=True):
            program, pins, rules_used = global_program(self.fn, tree.unflatten(structure, fakes))
        mesh = self.mesh.mesh
        block = self._recompute(self._constrain(inline_views(program.block), pins))
        raise_problems(
            "partition cannot use these constraints",
            [
                problem
                for i, spec in enumerate(pins)
                for problem in sharding.problems(f"constrain number {i}", None, spec, mesh)
            ],
        )
        sizes = {name: size for name, size in mesh.axes if size > 1}
        settings = PartitionSettings(sizes, **self._settings, pins=tuple(pins))
        rows = zip(leaves, specs, strict=True)
        given = [spec for leaf, spec in rows if isinstance(leaf, torch.Tensor)]
        inputs = []
        for value in program.inputs:
            spec = given[len(inputs)] if value.role == "argument" else P()
            inputs.append(placement_of(without_uneven(spec), len(value.var.shape), sizes))
        plan = plan_block(block, settings, inputs, self._pin_outputs(program, mesh, sizes))
        _check_travel(plan, [axis for axis in self._attention if axis in sizes], self.name)
        plan = with_gathers_together(with_equal_cotangents(plan, sizes), sizes)
        return FunctionPlan(plan, program, settings, self._given, tuple(rules_used))

    def _constrain(self, block: Block, pins: list[P]) -> Block:
        """`block`, with the results of the scopes of `constraints` constrained."""
        for pattern, spec in self._constraints.items():
            pins.append(spec)
            block, count = pin_scope_results(block, pattern, spec, len(pins) - 1)
            if not count:
                raise ValueError(
                    f"partition: got a constraint for the scope {pattern!r}, which no value of "
                    f"{self.name} with {len(spec)} dims or more leaves; wanted one of "
                    + scopes_text(block)
                )
        return block

    def _recompute(self, block: Block) -> Block:
        """`block`, with the scopes of `remat` as calls of it."""
        block, found = recompute_scopes(block, self._policies)
        for pattern in self._policies:
            if pattern not in found:
                raise ValueError(
                    f"partition: got remat of the scope {pattern!r}, in which {self.name} runs "
                    "nothing, or nothing that a pattern before has not; wanted one of "
                    + scopes_text(block, scans=True)
                )
        return block

    def _pin_outputs(self, program: Program, mesh: Mesh, sizes) -> list[ValuePlacement | None]:
        """The placements that outputs must have; None: any."""
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
            placement_of(without_uneven(spec or P()), len(output.value.shape), sizes)
            if isinstance(output.value, Var)
            else None
            for output, spec in rows
        ]


class FunctionPlan:
    """The plan of a function for one structure of arguments.

    Attributes:
        constants: tensors that the function closes over.
        rules_used: see `global_program`.
        out_structure, out_specs: of its results.
    """

    def __init__(
        self,
        plan: LocalBlock,
        program: Program,
        settings: PartitionSettings,
        out_specs,
        rules_used: tuple[str, ...],
    ):
        self.rules_used = rules_used
        self.plan, self.settings, self.out_structure = plan, settings, program.out_structure
        self.sizes = sizes = settings.sizes
        self.constants = [i.value for i in program.inputs if i.value is not None]
        specs = [spec_of(p, sizes) if p is not None else None for p in plan.outputs]
        found = tree.unflatten(program.out_structure, specs)
        self.out_specs = found if out_specs is None else out_specs


def _check_travel(plan: LocalBlock, axes: Sequence[str], name: str) -> None:
    """Refuse an annotation of attention that nothing is about.

    Raises:
        ValueError: no attention has a sequence that one of the axes splits.
    """
    sites = [
        s.site for s in _walk_plan(plan) if s.equation.name in ATTENTION and s.site is not None
    ]
    for axis in axes:
        if not any(axis in site.names("s") for site in sites):
            raise ValueError(
                f"partition: got attention over {axis!r}, which splits the sequence of none of the "
                f"{len(sites)} calls of scaled_dot_product_attention in {name}; fix: split the "
                "sequence by it in in_specs or constraints; "
                + ("" if sites else "and call torch.nn.functional.scaled_dot_product_attention, as "
                   'modules of Hugging Face do with attn_implementation="sdpa", on what a kernel '
                   "takes: keys and values of one width; ")
                + "or leave it out"
            )  # fmt: skip


def _walk_plan(plan: LocalBlock) -> Iterator[LocalEquation]:
    """Every equation as a rank runs it, those of bodies too."""
    for step in plan.steps:
        yield step
        for body in (step.body, step.backward):
            if body is not None:
                yield from _walk_plan(body)


# --- gradients: where cotangents are equal on all ranks


LeafAxes = frozenset[str]


def with_equal_cotangents(plan: LocalBlock, sizes: Sizes) -> LocalBlock:
    """The plan, with sums marked whose cotangents are equal, so that backward sends none.

    A rank's cotangent of a replicated value is its share of the whole, and a sum's transpose adds
    them up. Where all that reads the sum up to the loss is computed alike by all ranks of an axis,
    the shares over it are equal. A function that is differentiated twice keeps its sums: in the
    derivative of a gradient, the cotangents of values that backward reads are of each rank's own.
    """
    done = []
    for step in plan.steps:
        op, body = step.equation.op, step.body
        if body is not None and isinstance(op, TransformCall) and op.num_moving:
            inner = (equation.op for equation, _ in body.block.walk())
            if not any(isinstance(each, TransformCall) and each.num_moving for each in inner):
                nothing: list[LeafAxes] = [frozenset()] * len(body.outputs)
                step = replace(step, body=_Cotangents(sizes).block(body, nothing)[0])
        elif body is not None and step.backward is None:
            step = replace(step, body=with_equal_cotangents(body, sizes))
        done.append(step)
    return replace(plan, steps=tuple(done))


class _Cotangents:
    """The axes over which cotangents of the values of a differentiated plan may vary."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes

    def block(
        self, plan: LocalBlock, outputs: Sequence[LeafAxes]
    ) -> tuple[LocalBlock, list[LeafAxes]]:
        """The plan with what is equal, and the axes of its inputs, from those of its outputs."""
        found: dict[tuple[Var, ValuePlacement], LeafAxes] = {}
        for value, placement, axes in zip(plan.block.outputs, plan.outputs, outputs, strict=True):
            if isinstance(value, Var) and placement is not None:
                _vary(found, value, placement, axes | _axes_of(placement))
        moves = self._moves(plan.moves, found)
        done = [self._step(step, found) for step in reversed(plan.steps)]
        inputs = zip(plan.block.inputs, plan.inputs, strict=True)
        made = replace(plan, steps=tuple(reversed(done)), moves=moves)
        return made, [found.get(key, frozenset()) for key in inputs]

    def _moves(self, moves: Sequence[Move], found: dict) -> tuple[Move, ...]:
        """The moves, last first: each from the cotangent of its target to that of its source."""
        done = []
        for each in reversed(moves):
            axes, equal = found.get((each.var, each.target), frozenset()), set()
            for name, axis, _ in reversed(steps(each.source, each.target, self.sizes)):
                if name == "psum" and axis not in axes:
                    equal.add(axis)
                reduces = name in ("psum", "pmax", "pmin", "psum_scatter")
                axes = axes - {axis} if reduces else axes | {axis}
            _vary(found, each.var, each.source, axes)
            done.append(each._replace(equal=frozenset(equal)))
        return tuple(reversed(done))

    def _step(self, step: LocalEquation, found: dict) -> LocalEquation:
        after = self._moves(step.after, found)
        keys = zip(step.equation.results, step.results, strict=True)
        results = [found.get(key, frozenset()) for key in keys]
        made, operands = self._equation(step, results)
        rows = zip(step.equation.operands, step.operands, operands, strict=True)
        for var, placement, axes in rows:
            _vary(found, var, placement, axes)
        return replace(made, moves=self._moves(step.moves, found), after=after)

    def _equation(
        self, step: LocalEquation, results: list[LeafAxes]
    ) -> tuple[LocalEquation, list[LeafAxes]]:
        """The equation with equal cotangents marked, and the axes of its operands."""
        op, body = step.equation.op, step.body
        if isinstance(op, Scan):
            return self._scan(step, op, results)
        if isinstance(op, TransformCall):
            assert body is not None
            if step.backward is not None:  # its shares of cotangents are wherever its rule says
                return step, [frozenset(self.sizes)] * len(step.operands)
            made, operands = self.block(body, results)
            return replace(step, body=made), operands
        axes = frozenset().union(*results)
        touched = frozenset().union(*map(_axes_of, (*step.operands, *step.results)))
        assert step.site is not None
        site = replace(step.site, equal=frozenset(self.sizes) - axes)
        return replace(step, site=site), [axes | touched] * len(step.operands)

    def _scan(
        self, step: LocalEquation, op: Scan, results: list[LeafAxes]
    ) -> tuple[LocalEquation, list[LeafAxes]]:
        assert step.body is not None
        carry, ys = results[: op.num_carry], results[op.num_carry :]
        while True:  # until no iteration before brings more
            made, operands = self.block(step.body, [*carry, *ys])
            before = operands[op.num_consts : op.num_consts + op.num_carry]
            more = [a | b for a, b in zip(carry, before, strict=True)]
            if more == carry:
                return replace(step, body=made), operands
            carry = more


def _vary(found: dict, var: Var, placement: ValuePlacement, axes: LeafAxes) -> None:
    key = var, placement
    found[key] = found.get(key, frozenset()) | axes


def _axes_of(placement: ValuePlacement) -> LeafAxes:
    return frozenset((*placement.split, *(axis for axis, _ in placement.partial)))


# --- gathers: few, of the parameters of a layer


def with_gathers_together(plan: LocalBlock, sizes: Sizes) -> LocalBlock:
    """The plan, in which bodies of scans and of remat gather small inputs, or views, together.

    Of such a body a layer's fully sharded parameters are inputs. One collective gathers those of
    one dtype that the same other axes split.
    """
    done = []
    for step in plan.steps:
        op, body = step.equation.op, step.body
        if body is not None and step.backward is None:
            body = with_gathers_together(body, sizes)
            layer = isinstance(op, Scan) or (
                isinstance(op, TransformCall) and op.transform == "remat"
            )
            step = replace(step, body=_join_gathers(body, sizes) if layer else body)
        done.append(step)
    return replace(plan, steps=tuple(done))


def _join_gathers(plan: LocalBlock, sizes: Sizes) -> LocalBlock:
    ready = {*zip(plan.block.inputs, plan.inputs, strict=True)}
    views, others = [], []
    for step in plan.steps:
        equation, moved = step.equation, step.moves or step.after
        keys = {*zip(equation.operands, step.operands, strict=True)}
        if equation.aliases and keys <= ready and not moved:
            ready.update(zip(equation.results, step.results, strict=True))
            views.append(step)
        else:
            others.append(step)
    groups: dict[Any, list[tuple[Move, Where]]] = {}
    for step in others:
        for each in step.moves:
            var, order = each.var, steps(each.source, each.target, sizes)
            num_bytes = math.prod(local_shape(var.shape, each.source, sizes)) * var.dtype.itemsize
            gathers = [name for name, *_ in order] == ["all_gather"]
            if gathers and (var, each.source) in ready and num_bytes < MERGED_BYTES:
                key = order[0][1], var.dtype, var.device, frozenset(each.target.split)
                groups.setdefault(key, []).append((each, step.equation.where))
    found = []
    for (axis, *_), rows in groups.items():
        if len(rows) > 1:
            wheres = [where for _, where in rows]
            levels = zip(*(where.scopes for where in wheres), strict=False)
            shared = itertools.takewhile(lambda level: len({*level}) == 1, levels)
            where = replace(wheres[0], scopes=(*(level[0] for level in shared), "gather"))
            found.append(JointGather(axis, tuple(each for each, _ in rows), where))
    if not found:
        return plan
    done = {each for gather in found for each in gather.moves}
    rest = [
        replace(step, moves=tuple(each for each in step.moves if each not in done))
        for step in others
    ]
    return replace(plan, steps=(*views, *rest), gathers=tuple(found), num_views=len(views))


# --- running


def run_plan(
    plan: LocalBlock, sizes: Sizes, once: bool, *shards: torch.Tensor
) -> list[torch.Tensor]:
    """The outputs of a plan on one rank's shards; inside of a mapped program.

    `once`: nothing is differentiated twice, so that cotangents are equal where the plan says so.
    """
    return _PlanRun(plan, sizes, once).outputs(shards)


class _PlanRun:
    """The values of one rank while a plan runs, by where they lie."""

    def __init__(self, plan: LocalBlock, sizes, once: bool):
        self.plan, self.sizes, self.once = plan, sizes, once
        self.values: dict[tuple[Var, ValuePlacement], torch.Tensor] = {}
        self.shares: set[Var] = set()

    def outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        plan = self.plan
        self.values.update(
            zip(zip(plan.block.inputs, plan.inputs, strict=True), inputs, strict=True)
        )
        last = _last_uses(plan)
        for number, step in enumerate(plan.steps):
            for gather in plan.gathers if number == plan.num_views else ():
                self._gather(gather)
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
        x, equal = self.values[each.var, each.source], each.equal if self.once else ()
        # of shares of gradients: their sums are the end of backward
        shared = in_phase("backward") if each.var in self.shares else contextlib.nullcontext()
        with shared:
            moved = move(x, each.source, each.target, self.sizes, equal)
        self.values[each.var, each.target] = moved

    def _gather(self, gather: JointGather) -> None:
        sources = [each.source for each in gather.moves]
        xs = [self.values[each.var, each.source] for each in gather.moves]
        with _origin(gather.where):
            whole = gather_together(xs, sources, gather.axis, self.sizes)
        for each, x in zip(gather.moves, whole, strict=True):
            self.values[each.var, each.target] = x

    def _step(self, step: LocalEquation) -> None:
        with _origin(step.equation.where):
            for each in step.moves:
                self._move(each)
            equation = step.equation
            keys = zip(equation.operands, step.operands, strict=True)
            operands = [self.values[key] for key in keys]
            if isinstance(equation.op, Scan):
                results = self._scan(step, equation.op, operands)
            elif isinstance(equation.op, TransformCall):
                body = step.body
                assert body is not None
                parts = [body] if step.backward is None else [body, step.backward]
                runs = [functools.partial(run_plan, p, self.sizes, self.once) for p in parts]
                ranked = equation.op.wrap(*runs)
                results = list(ranked(*operands))
                if equation.op.num_moving:
                    self.shares.update(equation.results[-equation.op.num_moving :])
            else:
                results = _run_operation(step, operands, self.once)
            rows = zip(equation.results, step.results, results, strict=True)
            self.values.update(((var, placement), x) for var, placement, x in rows)
            for each in step.after:
                self._move(each)

    def _scan(
        self, step: LocalEquation, op: Scan, operands: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        body, first, start = step.body, op.num_consts, op.num_consts + op.num_carry
        assert body is not None
        consts, carry, xs = operands[:first], operands[first:start], operands[start:]

        def scanned(before, x):
            out = run_plan(body, self.sizes, self.once, *consts, *before, *x)
            return out[: op.num_carry], out[op.num_carry :]

        scanned.__name__ = op.name
        flip = op.reverse and [x.flip(0) for x in xs]
        after, ys = scan(scanned, carry, flip or xs, op.length)
        return [*after, *(y.flip(0) if op.reverse else y for y in ys)]


def _run_operation(
    step: LocalEquation, operands: list[torch.Tensor], once: bool
) -> list[torch.Tensor]:
    """The results of an operation on shards."""
    equation, values = step.equation, iter(operands)
    given = equation.args, dict(equation.kwargs)
    args, kwargs = map_only(Var, lambda _: next(values), given)
    rule = step.rule
    assert rule is not None
    if rule.run is None:
        op: Any = equation.op
        out = op(*args, **kwargs)
    else:
        assert step.site is not None
        site = step.site if once else replace(step.site, equal=frozenset())
        out = rule.run(site, *args, **kwargs)
    leaves = list(out) if isinstance(out, (tuple, list)) else [out]
    return [x for x, var in zip(leaves, equation.outputs, strict=False) if var is not None]


@contextlib.contextmanager
def _origin(where: Where) -> Iterator[None]:
    """Say where equations come from, while the per-rank program is traced."""
    if active() is None:
        yield
        return
    with in_scopes(where.scopes), from_line(where.line):
        yield


def _last_uses(plan: LocalBlock) -> dict[int, list[tuple[Var, ValuePlacement]]]:
    """The values that are last read in each step."""
    last: dict[tuple[Var, ValuePlacement], int] = {}
    gathered = [each for gather in plan.gathers for each in gather.moves]
    for number, step in enumerate(plan.steps):
        before = gathered if number == plan.num_views else ()
        for each in (*before, *step.moves, *step.after):
            last[each.var, each.source] = last[each.var, each.target] = number
        keys = [*zip(step.equation.operands, step.operands, strict=True),
                *zip(step.equation.results, step.results, strict=True)]  # fmt: skip
        last.update(dict.fromkeys(keys, number))
    for each in plan.moves:
        last.pop((each.var, each.source), None)
    for value, placement in zip(plan.block.outputs, plan.outputs, strict=True):
        if isinstance(value, Var) and placement is not None:
            last.pop((value, placement), None)
    found: dict[int, list[tuple[Var, ValuePlacement]]] = {}
    for key, number in last.items():
        found.setdefault(number, []).append(key)
    return found


def _notes(step: LocalEquation) -> Iterator[str]:
    """The bytes that attention sends by itself, or the annotation with which it gathers nothing."""
    if step.site is not None and step.rule is not None and step.rule.sent is not None:
        for axis, num_bytes in step.rule.sent(step.site).items():
            yield f"  sends {num_bytes:,} bytes over {axis!r}"
    elif step.equation.name in ATTENTION:
        for var, source, target, _ in step.moves:
            for digit in source.dims[2]:
                if digit not in target.dims[2]:
                    yield (
                        f"  gathers the sequence of %{var.name} over {digit.axis!r}; "
                        f'attention={{{digit.axis!r}: "ring"}} would leave it split'
                    )


def _lines(plan: LocalBlock, indent: str, settings: PartitionSettings) -> Iterator[str]:
    def moves(rows: Iterable[Move]) -> Iterator[str]:
        for var, source, target, _ in rows:
            args = var.shape, var.dtype.itemsize, source, target, settings.sizes
            cost = settings.cost_text(move_cost(*args, settings.price))
            move = f"{source} -> {target}"
            yield f"{indent}%{var.name}: {move}, {cost}"

    for number, step in enumerate(plan.steps):
        for gather in plan.gathers if number == plan.num_views else ():
            names = ", ".join(f"%{each.var.name}" for each in gather.moves)
            yield f"{indent}{names}: gathered together over {gather.axis!r}"
            yield from moves(gather.moves)
        yield from moves(step.moves)
        equation = step.equation
        rows = zip(equation.results, step.results, strict=True)
        results = ", ".join(f"%{v.name}{list(v.shape)} {p}" for v, p in rows)
        rows = zip(equation.operands, step.operands, strict=True)
        operands = ", ".join(f"%{v.name} {p}" for v, p in rows)
        yield f"{indent}{results} = {equation.name}({operands})"
        yield from (indent + note for note in _notes(step))
        if step.body is not None:
            yield from _lines(step.body, indent + "  ", settings)
        yield from moves(step.after)
    yield from moves(plan.moves)
