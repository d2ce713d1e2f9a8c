"""The work of an action: a stage's forward, and its backward, whole or in two parts.

`Pullbacks` differentiates a stage by `vjp`. `CutStages` traces it once, from parameters, input and
cotangent to output and gradients, and cuts the program (`functron.pipeline.cut`) into forward,
backward for inputs and backward for weights, so that nothing is computed twice and the weights'
gradients can wait. The pieces are evaluated in the scope at hand, or compiled for the processes of
a bound mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functron.compiler.executable import Executable
from functron.compiler.executable import compile as compile_program
from functron.core import compat, tree
from functron.core.errors import Problem, raise_problems
from functron.pipeline.cut import (
    ProgramPiece,
    bytes_held,
    cut_program,
    find_sliced,
    join_programs,
    sink_sums,
)
from functron.pipeline.partition import Part
from functron.program.equations import Input, Var, contiguous_strides
from functron.program.interpreter import ambient_inputs, run_block
from functron.program.recorder import active
from functron.program.trace import Program, trace
from functron.spmd.axes import BoundAxis, Scope, enter, scope
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shard_map import shard_map
from functron.spmd.spec import P
from functron.transforms.gradient import check_loss, loss_seed, rule_vjp

StageFunction = Callable[..., Any]
"""``(part, params, x, batch, *shared) -> y``.

`x` is what the stage before returned, a tree of tensors (None at the first stage); `batch` is one
microbatch, and `shared` what all microbatches share. The last stage returns the microbatch's part
of the loss, a scalar replicated over the mesh, or ``(loss, aux)`` with a tree of tensors to sum.
Where it is traced (backward in two parts, or compiled) tensors that it closes over are constants:
pass what changes as `shared`.
"""


class StageCall(NamedTuple):
    """One stage of one microbatch.

    Attributes:
        last: whether it returns the loss.
        x: what the stage before returned; None at the first.
        memo: what may be remembered for the other microbatches of the stage in this execution.
    """

    stage: int
    part: Part
    last: bool
    params: tree.Tree
    x: tree.Tree
    batch: tree.Tree
    shared: tuple
    memo: dict[str, Any]


StageSteps = Generator["PieceRun", list, Any]
"""A computation that yields each piece of a program that it needs run, and gets its outputs."""


def finish_steps(steps: StageSteps, outputs: Any = None) -> Any:
    """Run steps to their end, from a piece that gave these outputs; their result."""
    try:
        while True:
            run = steps.send(outputs)
            outputs = run.stage.run(run.index, run.values)
    except StopIteration as end:
        return end.value


class Pullbacks:
    """Stages differentiated by `vjp`: both gradients at once, those of weights kept until asked.

    Each method is a generator (`StageSteps`); what its docstring names is what it returns.
    `residuals` are opaque: what backward reads of forward.
    """

    def __init__(self, stage: StageFunction):
        self.stage = stage

    def forward(self, call: StageCall) -> StageSteps:
        """The stage's output, and the residuals that its backward will need."""
        yield from ()

        def f(params: tree.Tree, x: tree.Tree) -> Any:
            return self.stage(call.part, params, x, call.batch, *call.shared)

        y, pull = rule_vjp(f, call.params, call.x)
        check_output(call, y)
        # of the output only the kinds of leaves are kept: the next stage has the numbers
        return y, (seeds(y) if call.last else are_floats(y), call.last, pull)

    def backward(self, residuals: Any, cotangent: list | None, sums: tree.Tree) -> StageSteps:
        """The cotangents of x's floating-point leaves, and `sums` and the weights' gradients.

        `cotangent` has those of y's floating-point leaves; None at the last stage.
        """
        x, gradients = yield from self.backward_input(residuals, cotangent)
        return x, add(sums, gradients)

    def backward_input(self, residuals: Any, cotangent: list | None) -> StageSteps:
        """The cotangents of x's floating-point leaves, and what is needed for the weights'."""
        yield from ()
        y, last, pull = residuals
        params, x = pull(y if last else with_floats(y, cotangent))
        return floats(x), params

    def backward_weight(self, residuals: Any, sums: tree.Tree) -> StageSteps:
        """`sums` and the weights' gradients."""
        yield from ()
        return add(sums, residuals)


# --- pieces of traced programs

_PARAMS, _X, _BATCH, _SHARED, _SUMS, _COTANGENT = range(6)


class Residuals(NamedTuple):
    """The values of one stage and microbatch that its later pieces will read."""

    stage: Stage
    values: dict[Var, Any]  # tensors, and lists of slices


class PieceRun(NamedTuple):
    """A piece of a stage that is to run, and the values that it reads and leaves."""

    stage: Stage
    index: int
    values: dict[Var, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Stage:
    """The pieces of one stage.

    Attributes:
        arguments: the program's inputs by position of the argument they belong to.
        pieces: F, I and W; or F and B.
        y: the structure of what it returns.
        sums: that of the weights' gradients.
        sliced: what pieces keep as lists of slices.
        compiled: an executable per piece; none where they are evaluated.
    """

    program: Program
    arguments: Mapping[int, list[Var]]
    pieces: tuple[ProgramPiece, ...]
    y: tree.Structure
    sums: tree.Structure
    sliced: Collection[Var] = ()
    compiled: tuple[Executable, ...] = ()

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes that a microbatch keeps after each piece, without parameters, batch and input."""
        return bytes_held(self.pieces)

    @cached_property
    def reads(self) -> tuple[tuple[Var, ...], ...]:
        """The values that each piece reads of arguments and of earlier pieces."""
        hidden = {given.var for given in self.program.inputs if given.role != "argument"}
        return tuple(tuple(v for v in p.block.inputs if v not in hidden) for p in self.pieces)

    @cached_property
    def spent(self) -> tuple[tuple[Var, ...], ...]:
        """The values that each piece is the last to read."""
        return tuple(
            tuple(var for var in reads if all(var not in later for later in self.reads[i + 1 :]))
            for i, reads in enumerate(self.reads)
        )

    @cached_property
    def _values_read(self) -> frozenset[Var]:
        return frozenset(var for reads in self.reads for var in reads)

    @cached_property
    def _sums_taken(self) -> dict[Any, Var]:
        """By the new sums of gradients the old ones, which nothing but the last piece reads."""
        old = self.arguments[_SUMS]
        new = self.pieces[-1].outputs[len(self.pieces[-1].outputs) - len(old) :]
        return {self.program.outputs[i].value: v for i, v in zip(new, old, strict=True)}

    def bind(self, position: int, value: tree.Tree) -> dict[Var, torch.Tensor]:
        """The tensors of an argument by the program's values, as far as a piece reads them."""
        tensors = [leaf for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor)]
        if self.compiled:
            tensors = [leaf.contiguous() for leaf in tensors]  # as they were traced
        rows = zip(self.arguments[position], tensors, strict=True)
        return {var: tensor for var, tensor in rows if var in self._values_read}

    def run(self, index: int, values: dict[Var, torch.Tensor]) -> list:
        """The outputs of a piece; what later pieces read is left in, and put into, `values`."""
        piece, given = self.pieces[index], self.take_values(index, values)
        if self.compiled:
            return self.store_outputs(index, values, self.compiled[index].run_owned(given))
        environment = dict(zip(self.reads[index], given, strict=True))
        given.clear()  # so that the environment alone keeps them
        read = set(piece.block.inputs)
        others = (i for i in self.program.inputs if i.role != "argument" and i.var in read)
        environment.update(ambient_inputs(others))
        outputs = run_block(piece.block, environment, sliced=self.sliced, donated=self._sums_taken)
        return self.store_outputs(index, values, outputs)

    def take_values(self, index: int, values: dict[Var, Any]) -> list:
        """The values that a piece reads; those that no later one does are taken out of `values`."""
        given = [values[var] for var in self.reads[index]]
        for var in self.spent[index]:
            del values[var]
        # executables empty the lists that they are given
        return [
            list(v) if isinstance(v, list) and var in values else v
            for var, v in zip(self.reads[index], given, strict=True)
        ]

    def store_outputs(self, index: int, values: dict[Var, torch.Tensor], outputs: list) -> list:
        """The outputs of a piece without what it keeps, which is put into `values`."""
        count = len(self.pieces[index].outputs)
        values.update(zip(self.pieces[index].keeps, outputs[count:], strict=True))
        return outputs[:count]

    def piece_program(self, index: int) -> Program:
        """A piece as a program that overwrites the sums of gradients, and what it spends."""
        piece = self.pieces[index]
        # what an earlier piece returned, such as the loss, is the caller's
        returned = {output.value for output in self.program.outputs}
        spent = {*piece.spends}.difference(self.sliced, returned)
        return piece.program(self.program, {*self.arguments[_SUMS], *spent})


class CutStages:
    """Stages by the pieces of their traced programs, with the methods of `Pullbacks`.

    Attributes:
        split: whether backward is cut in two.
        dtype: of the sums of gradients; None: that of the parameters.
        settings: of `functron.compiler.compile`; None evaluates the pieces.
        pairs: whether some pieces run two as one program.
        joint: executables of two pieces as one program.
    """

    def __init__(
        self,
        stage: StageFunction,
        split: bool,
        dtype: torch.dtype | None,
        settings: Mapping[str, Any] | None,
        *,
        pairs: bool = False,
    ):
        self.stage, self.split, self.dtype, self.settings = stage, split, dtype, settings
        self.pairs = pairs
        self.stages: dict[Any, Stage] = {}
        self.joint: dict[Any, Executable] = {}

    def forward(self, call: StageCall) -> StageSteps:
        if "stage" not in call.memo:  # microbatches are alike, and share all else
            stage = self._find_stage(call)
            fixed = stage.bind(_PARAMS, call.params) | stage.bind(_SHARED, call.shared)
            call.memo.update(stage=stage, fixed=fixed)
        stage: Stage = call.memo["stage"]
        values = dict(call.memo["fixed"])
        values.update(stage.bind(_X, call.x))
        values.update(stage.bind(_BATCH, call.batch))
        y = tree.unflatten(stage.y, (yield PieceRun(stage, 0, values)))
        return y, Residuals(stage, values)

    def backward(self, residuals: Residuals, cotangent: list | None, sums: tree.Tree) -> StageSteps:
        if self.split:
            x, residuals = yield from self.backward_input(residuals, cotangent)
            return x, (yield from self.backward_weight(residuals, sums))
        stage, values = residuals
        values.update(stage.bind(_COTANGENT, cotangent))
        values.update(stage.bind(_SUMS, sums))
        outputs = yield PieceRun(stage, 1, values)
        count = len(outputs) - stage.sums.num_leaves
        return outputs[:count], tree.unflatten(stage.sums, outputs[count:])

    def backward_input(self, residuals: Residuals, cotangent: list | None) -> StageSteps:
        stage, values = residuals
        values.update(stage.bind(_COTANGENT, cotangent))
        return (yield PieceRun(stage, 1, values)), residuals

    def backward_weight(self, residuals: Residuals, sums: tree.Tree) -> StageSteps:
        stage, values = residuals
        values.update(stage.bind(_SUMS, sums))
        return tree.unflatten(stage.sums, (yield PieceRun(stage, 2, values)))

    def together(self, first: StageSteps, second: StageSteps) -> list:
        """The results of both, of actions that do not need one another, compiled as one program.

        So what one of them communicates lies under what the other computes.
        """
        both = [next(first), next(second)]
        given = [x for run in both for x in run.stage.take_values(run.index, run.values)]
        made = self._compile_joint(*both).run_owned(given)
        count = len(both[0].stage.pieces[both[0].index].block.outputs)
        parts = zip(both, (made[:count], made[count:]), strict=True)
        outputs = [run.stage.store_outputs(run.index, run.values, part) for run, part in parts]
        rows = zip((first, second), outputs, strict=True)
        return [finish_steps(steps, part) for steps, part in rows]

    def _compile_joint(self, first: PieceRun, second: PieceRun) -> Executable:
        key = (first.stage, first.index, second.stage, second.index)
        if key not in self.joint:
            program = join_programs(
                *(run.stage.piece_program(run.index) for run in (first, second))
            )
            self.joint[key] = compile_program(
                program, _bind_mesh(program.mesh), **self.settings or {}
            )
        return self.joint[key]

    def _find_stage(self, call: StageCall) -> Stage:
        axes = tuple(
            (name, axis.size if axis is not None else 1) for name, axis in scope().axes.items()
        )
        inputs = (call.params, call.x, call.batch, call.shared)
        leaves, structure = tree.flatten(inputs)
        signature = (call.stage, axes, structure, tuple(_leaf_key(leaf) for leaf in leaves))
        if signature not in self.stages:
            mesh = Mesh(**dict(axes))
            made = trace_stage(self.stage, call, mesh, split=self.split, dtype=self.dtype)
            self.stages[signature] = self._compile_stage(made, mesh)
        return self.stages[signature]

    def _compile_stage(self, stage: Stage, mesh: Mesh) -> Stage:
        if self.settings is None:
            return stage
        bound, written_out = _bind_mesh(mesh), self.pairs or self.settings.get("unroll")
        stage = replace(stage, sliced=()) if written_out else stage
        compiled = tuple(
            compile_program(stage.piece_program(index), bound, sliced=stage.sliced, **self.settings)
            for index in range(len(stage.pieces))
        )
        return replace(stage, compiled=compiled)


def trace_stage(
    function: StageFunction,
    call: StageCall,
    mesh: Mesh,
    *,
    split: bool = True,
    dtype: torch.dtype | None = None,
) -> Stage:
    """The pieces of a stage on one rank of `mesh`, which has no axis of stages. Computes nothing.

    Args:
        call: of any microbatch; of its tensors only shape, dtype and device count: this rank's.
        mesh: the ranks of the other axes.
        split: F, I and W; otherwise F and B.
        dtype: of the sums of gradients; None: that of the parameters.
    """
    part, last = call.part, call.last
    bare = call._replace(params=None, x=None, batch=None, shared=())  # tensors would be traced
    made: list[Any] = []

    def joint(params, x, batch, shared, sums):
        y, pull = rule_vjp(lambda params, x: function(part, params, x, batch, *shared), params, x)
        check_output(bare, y)
        cotangent, late = ([], []) if last else _declare_cotangents(y)
        made[:] = [tree.structure(y), late]
        dparams, dx = pull(seeds(y) if last else with_floats(are_floats(y), cotangent))
        return tree.leaves(y), floats(dx), tree.leaves(add(sums, dparams))

    given = [_make_abstract(value) for value in (call.params, call.x, call.batch, call.shared)]
    sums = _make_abstract(call.params, dtype)
    with compat.no_transforms(), enter(Scope()):
        program = trace(shard_map(joint, mesh, P(), P(), check=False))(*given, sums)
    structure, late = made
    program = replace(
        program,
        inputs=(*program.inputs, *(Input(var, f"{_COTANGENT}/{var.name}", P()) for var in late)),
        block=replace(program.block, inputs=(*program.block.inputs, *late)),
    )
    arguments: dict[int, list[Var]] = {position: [] for position in range(6)}
    for i in program.inputs:
        if i.role == "argument":
            arguments[int(i.path.split("/")[0])].append(i.var)
    program = sink_sums(program, arguments[_SUMS])
    positions: list[list[int]] = [[], [], []]
    for index, output in enumerate(program.outputs):
        positions[int(output.path.split("/")[0])].append(index)
    y, dx, gradients = positions
    pieces = cut_program(program, [y, dx, gradients] if split else [y, dx + gradients])
    sums_structure, sliced = tree.structure(sums), find_sliced(pieces)
    return Stage(program, arguments, pieces, structure, sums_structure, sliced)


def _declare_cotangents(y: tree.Tree) -> tuple[list[torch.Tensor], list[Var]]:
    """The cotangents of y, inputs of the program whose shapes were not known before."""
    recorder = active()
    assert recorder is not None
    tensors, inputs = [], []
    for leaf in floats(y):
        strides = contiguous_strides(leaf.shape)
        fake = recorder.empty(leaf.shape, strides, leaf.dtype, leaf.device)
        inputs.append(recorder.input(fake, "cotangent", root=True))
        tensors.append(fake)
    return tensors, inputs


def _bind_mesh(mesh: Mesh) -> BoundMesh | None:
    """`mesh` on the process groups of the axes in force, if there are processes."""
    axes = {name: axis for name, axis in scope().axes.items() if isinstance(axis, BoundAxis)}
    coordinate = {name: axes[name].index if name in axes else 0 for name in mesh.axis_names}
    rank = mesh.rank_at(coordinate)
    groups = {name: axis.group for name, axis in axes.items()}
    stages = scope().stages
    recorder = next((axis.recorder for axis in axes.values()), stages and stages.recorder)
    bound = BoundMesh(mesh, rank, coordinate, groups, "cpu", recorder)
    return bound if axes or recorder is not None else None


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return leaf


def _make_abstract(value: tree.Tree, dtype: torch.dtype | None = None) -> tree.Tree:
    """`value` with tensors that have its shapes, dtypes and devices, contiguous, and no numbers."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with compat.no_transforms(), FakeTensorMode():
            return torch.empty(tuple(leaf.shape), dtype=dtype or leaf.dtype, device=leaf.device)

    return tree.map(one, value)


# --- outputs and cotangents


def loss_of(y: Any) -> Any:
    """The loss in the output of a last stage."""
    return y[0] if isinstance(y, tuple) else y


def seeds(y: Any) -> Any:
    """The cotangent of a last stage's output: of the loss its share of 1, of the rest 0."""
    seed = loss_seed(loss_of(y))
    return (seed, tree.map(torch.zeros_like, y[1])) if isinstance(y, tuple) else seed


def add(sums: tree.Tree, gradients: tree.Tree) -> tree.Tree:
    """`sums` plus `gradients`, in the dtypes of `sums`, and in their memory if nobody watches."""
    watched = compat.transforms_active() or compat.dispatch_modes_active() or active() is not None

    def one(total: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        if watched or (torch.is_grad_enabled() and (total.requires_grad or leaf.requires_grad)):
            return total + leaf.to(total.dtype)
        fits = torch.promote_types(total.dtype, leaf.dtype) == total.dtype
        return total.add_(leaf if fits else leaf.to(total.dtype))

    return tree.map(one, sums, gradients)


def floats(value: tree.Tree) -> list[torch.Tensor]:
    """The floating-point leaves, which have cotangents."""
    return [leaf for leaf in tree.leaves(value) if leaf.is_floating_point()]


def are_floats(value: tree.Tree) -> tree.Tree:
    """A tree of bools: which leaves are floating-point."""
    return tree.map(lambda leaf: leaf.is_floating_point(), value)


def with_floats(flags: tree.Tree, leaves: list | None) -> tree.Tree:
    """`leaves` in the places where `flags`, of `are_floats`, are True; None in the others."""
    given = iter(leaves or ())
    return tree.map(lambda is_float: next(given) if is_float else None, flags)


def check_output(call: StageCall, y: tree.Tree) -> None:
    """Raise ValueError or TypeError where a last stage returns no loss, or a stage no tensors."""
    if call.last:
        check_loss(loss_of(y))
    check_tensors(call, y)


def check_tensors(call: StageCall, y: tree.Tree) -> None:
    """Raise TypeError where an output of a stage is no tensor: it could not be sent."""
    raise_problems(
        f"stage {call.stage} ({call.part}) returned what cannot be sent to other ranks",
        [
            Problem(f"output {path}", type(leaf).__name__, "a tensor", "return tensors only")
            for path, leaf in zip(tree.paths(y), tree.leaves(y), strict=True)
            if not isinstance(leaf, torch.Tensor)
        ],
        TypeError,
    )


def stage_flops(
    stage: Callable,
    weights: tree.Tree,
    x: torch.Tensor,
    batch: tree.Tree,
    key: torch.Tensor,
    specs: tuple,
    mesh: Mesh,
    *,
    loss: bool = False,
) -> float:
    """Floating-point operations of one rank for one microbatch of a stage, with its backward.

    Counted in the program that is traced for it; nothing is computed.

    Args:
        stage: ``(weights, x, batch, key) -> y``.
        weights, x, batch, key: global values, which may be abstract.
        specs: of these four.
        loss: whether y is the loss, which is all that backward begins with.
    """

    def both(weights, x, batch, key):
        y, pull = rule_vjp(lambda w, x: stage(w, x, batch, key), weights, x)
        ones = with_floats(are_floats(y), [torch.ones_like(leaf) for leaf in floats(y)])
        return pull(seeds(y) if loss else ones)

    mapped = shard_map(both, mesh, specs, P(), check=False)
    return trace(mapped)(weights, x, batch, key).cost().hardware_flops
