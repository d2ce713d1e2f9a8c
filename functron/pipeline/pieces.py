"""Stages as traced programs, cut into forward, backward for inputs, and backward for weights.

A stage, from parameters, input and cotangent to output and gradients, is traced once and cut
(`functron.compiler.cut`), so that nothing is computed twice and weights' gradients can wait.
The pieces are evaluated in the scope at hand, or compiled for the processes of a bound mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functron.compiler.cut import Piece, cut, held_bytes, sink_sums
from functron.compiler.executable import Executable
from functron.compiler.executable import compile as compile_program
from functron.core import compat, tree
from functron.pipeline.evaluate import ambient, evaluate
from functron.pipeline.work import (
    Call,
    StageFunction,
    add,
    are_floats,
    check_output,
    floats,
    seeds,
    with_floats,
)
from functron.program.equations import Input, Var, contiguous_strides
from functron.program.program import Program
from functron.program.recorder import active
from functron.program.trace import trace
from functron.spmd.axes import BoundAxis, Scope, enter, scope
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shard_map import shard_map
from functron.spmd.spec import P
from functron.transforms.gradient import rule_vjp

_PARAMS, _X, _BATCH, _SHARED, _SUMS, _COTANGENT = range(6)


class Held(NamedTuple):
    """A stage of a microbatch between its pieces: what those to come will read."""

    stage: Stage
    values: dict[Var, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Stage:
    """The pieces of one stage.

    Attributes:
        program: that was cut.
        arguments: the program's inputs by position of the argument they belong to.
        pieces: F, I and W; or F and B.
        y: the structure of what it returns.
        sums: that of the weights' gradients.
        compiled: an executable per piece; none where they are evaluated.
    """

    program: Program
    arguments: Mapping[int, list[Var]]
    pieces: tuple[Piece, ...]
    y: tree.Structure
    sums: tree.Structure
    compiled: tuple[Executable, ...] = ()

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """What a microbatch holds after each piece, without parameters, batch and the stage's x."""
        return held_bytes(self.pieces)

    @cached_property
    def reads(self) -> tuple[tuple[Var, ...], ...]:
        """What each piece reads of arguments and of earlier pieces."""
        hidden = {given.var for given in self.program.inputs if given.role != "argument"}
        return tuple(tuple(v for v in p.block.inputs if v not in hidden) for p in self.pieces)

    @cached_property
    def spent(self) -> tuple[tuple[Var, ...], ...]:
        """What each piece is the last to read."""
        return tuple(
            tuple(var for var in reads if all(var not in later for later in self.reads[i + 1 :]))
            for i, reads in enumerate(self.reads)
        )

    @cached_property
    def _used(self) -> frozenset[Var]:
        return frozenset(var for reads in self.reads for var in reads)

    def bind(self, position: int, value: tree.Tree) -> dict[Var, torch.Tensor]:
        """The tensors of an argument by the program's values, as far as a piece reads them."""
        tensors = [leaf for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor)]
        if self.compiled:
            tensors = [leaf.contiguous() for leaf in tensors]  # as they were traced
        rows = zip(self.arguments[position], tensors, strict=True)
        return {var: tensor for var, tensor in rows if var in self._used}

    def run(self, index: int, values: dict[Var, torch.Tensor]) -> list:
        """The outputs of a piece; what later pieces read is left in, and put into, `values`."""
        piece, reads = self.pieces[index], self.reads[index]
        given = [values[var] for var in reads]
        for var in self.spent[index]:
            del values[var]
        if self.compiled:
            outputs = self.compiled[index].run_owned(given)
        else:
            environment = dict(zip(reads, given, strict=True))
            given.clear()  # so that the environment alone keeps them
            environment.update(ambient(_hidden(self.program, piece)))
            outputs = evaluate(piece.block, environment)
        count = len(piece.outputs)
        values.update(zip(piece.keeps, outputs[count:], strict=True))
        return outputs[:count]


def _hidden(program: Program, piece: Piece) -> list[Input]:
    reads = set(piece.block.inputs)
    return [i for i in program.inputs if i.role != "argument" and i.var in reads]


class Pieces:
    """Stages computed by the pieces of their traced programs.

    Attributes:
        stage: the function of one stage.
        split: whether backward is cut in two.
        dtype: of the sums of gradients; None: that of the parameters.
        settings: of `functron.compiler.compile`; None evaluates the pieces.
    """

    def __init__(
        self,
        stage: StageFunction,
        split: bool,
        dtype: torch.dtype | None,
        settings: Mapping[str, Any] | None,
    ):
        self.stage, self.split, self.dtype, self.settings = stage, split, dtype, settings
        self.stages: dict[Any, Stage] = {}

    def forward(self, call: Call) -> tuple[tree.Tree, Held]:
        """What the stage returns, and what its backward will read."""
        if "stage" not in call.memo:  # microbatches are alike, and share all else
            stage = self._stage(call)
            fixed = stage.bind(_PARAMS, call.params) | stage.bind(_SHARED, call.shared)
            call.memo.update(stage=stage, fixed=fixed)
        stage: Stage = call.memo["stage"]
        values = dict(call.memo["fixed"])
        values.update(stage.bind(_X, call.x))
        values.update(stage.bind(_BATCH, call.batch))
        y = tree.unflatten(stage.y, stage.run(0, values))
        return y, Held(stage, values)

    def backward(
        self, held: Held, cotangent: list | None, sums: tree.Tree
    ) -> tuple[list, tree.Tree]:
        """The cotangents of x, and `sums` with the weights' gradients."""
        if self.split:
            x, held = self.backward_input(held, cotangent)
            return x, self.backward_weight(held, sums)
        stage, values = held
        values.update(stage.bind(_COTANGENT, cotangent))
        values.update(stage.bind(_SUMS, sums))
        outputs = stage.run(1, values)
        count = len(outputs) - stage.sums.num_leaves
        return outputs[:count], tree.unflatten(stage.sums, outputs[count:])

    def backward_input(self, held: Held, cotangent: list | None) -> tuple[list, Held]:
        """The cotangents of x, and what the weights' gradients will read."""
        stage, values = held
        values.update(stage.bind(_COTANGENT, cotangent))
        return stage.run(1, values), held

    def backward_weight(self, held: Held, sums: tree.Tree) -> tree.Tree:
        """`sums` with the weights' gradients."""
        stage, values = held
        values.update(stage.bind(_SUMS, sums))
        return tree.unflatten(stage.sums, stage.run(2, values))

    def _stage(self, call: Call) -> Stage:
        axes = tuple(
            (name, axis.size if axis is not None else 1) for name, axis in scope().axes.items()
        )
        inputs = (call.params, call.x, call.batch, call.shared)
        leaves, structure = tree.flatten(inputs)
        signature = (call.stage, axes, structure, tuple(_kind(leaf) for leaf in leaves))
        if signature not in self.stages:
            mesh = Mesh(**dict(axes))
            made = trace_stage(self.stage, call, mesh, split=self.split, dtype=self.dtype)
            self.stages[signature] = replace(made, compiled=self._compiled(made, mesh))
        return self.stages[signature]

    def _compiled(self, stage: Stage, mesh: Mesh) -> tuple[Executable, ...]:
        if self.settings is None:
            return ()
        bound, sums = _bound(mesh), stage.arguments[_SUMS]
        return tuple(
            compile_program(
                piece.program(stage.program, {*sums, *piece.spends}), bound, **self.settings
            )
            for piece in stage.pieces
        )


def trace_stage(
    function: StageFunction,
    call: Call,
    mesh: Mesh,
    *,
    split: bool = True,
    dtype: torch.dtype | None = None,
) -> Stage:
    """The pieces of a stage on one rank of `mesh`, which has no axis of stages. Computes nothing.

    Args:
        function: of one stage.
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
        cotangent, late = ([], []) if last else _late(y)
        made[:] = [tree.structure(y), late]
        dparams, dx = pull(seeds(y) if last else with_floats(are_floats(y), cotangent))
        return tree.leaves(y), floats(dx), tree.leaves(add(sums, dparams))

    given = [_abstract(value) for value in (call.params, call.x, call.batch, call.shared)]
    sums = _abstract(call.params, dtype)
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
    pieces = cut(program, [y, dx, gradients] if split else [y, dx + gradients])
    return Stage(program, arguments, pieces, structure, tree.structure(sums))


def _late(y: tree.Tree) -> tuple[list[torch.Tensor], list[Var]]:
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


def _bound(mesh: Mesh) -> BoundMesh | None:
    """`mesh` on the process groups of the axes in force."""
    axes = {name: axis for name, axis in scope().axes.items() if isinstance(axis, BoundAxis)}
    coordinate = {name: axes[name].index if name in axes else 0 for name in mesh.axis_names}
    rank = 0
    for name, size in mesh.axes:
        rank = rank * size + coordinate[name]
    groups = {name: axis.group for name, axis in axes.items()}
    return BoundMesh(mesh, rank, coordinate, groups, "cpu") if axes else None


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return leaf


def _abstract(value: tree.Tree, dtype: torch.dtype | None = None) -> tree.Tree:
    """`value` with tensors that have its shapes, dtypes and devices, contiguous, and no numbers."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with compat.no_transforms(), FakeTensorMode():
            return torch.empty(tuple(leaf.shape), dtype=dtype or leaf.dtype, device=leaf.device)

    return tree.map(one, value)
