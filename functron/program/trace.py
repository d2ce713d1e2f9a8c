"""Tracing: a function and abstract arguments to a program as a value, or to shapes alone.

A `Program` is one rank's whole computation, its inputs and outputs named. Called, it runs equation
by equation on every rank of its mesh, in this process (`functron.program.interpreter`), which is
for small meshes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from functron.core import compat, tree
from functron.core.closure import refuse_holders, refuse_orphans, refuse_tracked, refusing_tracked
from functron.core.errors import Problem, dataclass_fix, nearest, public, raise_problems, refuse
from functron.program import text
from functron.program.check import check
from functron.program.cost import collectives_diff, cost
from functron.program.equations import (
    Block,
    Code,
    ControlFlow,
    Input,
    Output,
    Switch,
    Var,
    While,
    contiguous_strides,
)
from functron.program.interpreter import run_in_lockstep
from functron.program.memory import memory
from functron.program.recorder import Recorder, active, keeper
from functron.program.timeline import timeline
from functron.program.types import ProgramReadings, ValueType, read_program, type_of_value
from functron.spmd.axes import enter, scope
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shard_map import MappedFunction
from functron.spmd.spec import P, is_spec, local_shape, problems, spec_axes


@dataclass(frozen=True, eq=False, repr=False)
class Program(Code):
    """One rank's program; made by `trace`, compiled by `functron.compiler.compile`.

    Called with global arguments it runs on every rank of its mesh, in this process, uncompiled:
    `functron.program.interpreter.run_in_lockstep`. Attributes are those of `Code`.

    >>> program = ft.trace(lambda x: x + 1)(torch.zeros(3))
    >>> program(torch.ones(3))
    tensor([2., 2., 2.])
    """

    __call__ = public(run_in_lockstep)
    html = _repr_html_ = text.html
    check = public(check)
    cost = public(cost)
    memory = public(memory)
    timeline = public(timeline)

    def __str__(self) -> str:
        return text.format(self)

    def __repr__(self) -> str:
        return f"<{text.header(self)}>"

    @public
    def assume_runs(self, runs: Mapping[str, int | Sequence[float]]) -> Program:
        """The same program, with what its costs and timelines count of switches and while loops.

        Derivatives of a switch have its name, and so the same weights:
        ``program.assume_runs({"halve": 12, "dense/experts": (0.9, 0.1)}).cost()``.

        Args:
            runs: by the name of a loop, which is its body's, how many iterations run; by the name
                of a switch, which are its branches', how often each is taken, as parts of 1.

        Raises:
            ValueError: a name that no switch or loop has, or what it cannot run; all are listed.
        """
        found: dict[str, list[ControlFlow]] = {}
        for equation, _ in self.block.walk():
            if isinstance(equation.op, Switch | While):
                found.setdefault(equation.op.name, []).append(equation.op)
        raise_problems(
            f"{self.name} cannot run so",
            [p for name in runs if (p := _find_misfit(name, runs[name], found))],
        )
        return replace(self, block=_assume_runs(self.block, runs))

    @public
    def typeof(self, name: str) -> ValueType:
        """The type of one of its values by name, as `functron.typeof` of the value in the program.

        A value in a scan has the type that holds in all iterations.

        >>> total = ft.shard_map(lambda x: lax.psum(x, "dp"), ft.Mesh(dp=2), P("dp"), P())
        >>> ft.trace(total)(torch.ones(4)).typeof("%psum")
        float32[2] {dp: replicated}

        Raises:
            ValueError: no value has this name; with the nearest ones.
        """
        return type_of_value(self, name, self._readings)

    @cached_property
    def _readings(self) -> ProgramReadings:
        return read_program(self)

    @public
    def diff(
        self, other: Program | str, *, by: Literal["equations", "collectives"] = "equations"
    ) -> str:
        """How another program, or the text of one, differs: a unified diff, "" for no difference.

        Values are renumbered first, so that only real differences count.

        Args:
            other: a program, such as one written by hand; or the text of one.
            by: "collectives": instead, a table of those that one of them runs more often, by axis,
                operation, phase and payload; for it, `other` is a program.

        Raises:
            ValueError: by collectives, `other` is text.
        """
        if by == "equations":
            return text.diff(self, other)
        if isinstance(other, str):
            got, wanted = "the text of one", "a program"
            fix = "give the program whose text it is, or compare by='equations'"
            refuse("cannot compare collectives", "other", got, wanted, fix)
        return collectives_diff(self, other)


def _find_misfit(
    name: str, run: int | Sequence[float], found: Mapping[str, list[ControlFlow]]
) -> Problem | None:
    """The problem with a number of iterations, or with weights of branches; None without one."""
    if name not in found:
        wanted = "the name of a switch or a while loop"
        return Problem("runs", repr(name), wanted, nearest(name, found))
    for op in found[name]:
        if isinstance(op, While):
            if not isinstance(run, int) or run < 0:
                return Problem(f"runs[{name!r}]", repr(run), "how many iterations run, 0 or more")
        elif isinstance(run, int) or len(run) != len(op.blocks) or min(run) < 0:
            wanted = f"{len(op.blocks)} weights, one for each branch"
            return Problem(f"runs[{name!r}]", repr(run), wanted)
        elif abs(sum(run) - 1) > 1e-6:
            return Problem(f"runs[{name!r}]", repr(run), "parts of 1", "divide by their sum")
    return None


def _assume_runs(block: Block, runs: Mapping[str, int | Sequence[float]]) -> Block:
    equations = []
    for equation in block.equations:
        op: Any = equation.op
        if isinstance(op, ControlFlow):
            op = op.with_blocks([_assume_runs(inner, runs) for inner in op.blocks])
            run: Any = runs.get(op.name)
            if isinstance(op, While) and run is not None:
                op = replace(op, trip_count=run)
            elif isinstance(op, Switch) and run is not None:
                op = replace(op, weights=tuple(map(float, run)))
        equations.append(replace(equation, op=op))
    return replace(block, equations=tuple(equations))


@public
def trace(
    fn: Callable,
    *,
    donate: int | Sequence[int] = (),
    mesh: Mesh | BoundMesh | None = None,
    in_specs: tree.Tree = None,
    simulate: bool = False,
) -> Callable[..., Program]:
    """The function that, called with the arguments of `fn`, gives the `Program` of one rank.

    Nothing is computed: `fn` runs once on fake tensors, whatever the mesh's size, without processes
    or devices. The program holds forward, backward, reductions and update as `fn` runs them, with
    collectives by axis name and this rank's indices as inputs, so it is the same on every rank.

    Where layers are scanned, the graph and the time to trace it do not grow with depth (under
    torch.func transforms inside the program, scans are unrolled). Branches of `lax.cond` and
    `lax.switch` and the blocks of `lax.while_loop` are traced once each, and one equation runs
    them; `functron.program.text` shows how they are written.

    >>> total = ft.shard_map(lambda x: lax.psum(x, "dp"), ft.Mesh(dp=2), P("dp"), P())
    >>> ft.trace(total)(torch.ones(4))
    <program <lambda> on Mesh(dp=2): 1 equations>

    Args:
        fn: what `shard_map` returned, or a function that calls such; positional arguments only.
        donate: the positions of arguments whose memory may be reused for results.
        mesh: where `fn` is no `shard_map` result: the ranks, with `in_specs`.
        in_specs: a prefix tree of specs for the tuple of arguments.
        simulate: trace what one process does when it simulates all ranks, on global values.

    The arguments are tensors (also on the meta device, of which only shape and dtype are used),
    numbers and trees of them: global values on a `Mesh`, this rank's shards on a `BoundMesh`.

    Raises:
        ValueError: the program depends on the numbers in a tensor, draws torch's own random
            numbers, modifies an argument in place, uses a tensor of another trace, closes over one
            that is differentiated or mapped outside, or calls what is mapped over another mesh than
            it is traced for; each names the line and the fix.
        TypeError: keyword arguments.
    """
    donated = (donate,) if isinstance(donate, int) else tuple(donate)

    @public
    def traced(*args, **kwargs) -> Program:
        if kwargs:
            raise TypeError(
                f"trace: got keyword arguments {sorted(kwargs)}; wanted positional ones"
            )
        if active() is not None:
            raise ValueError("trace: called while another program is being traced")
        run = _Trace(fn, args, donated, _find_place(fn, mesh, in_specs, simulate))
        with refusing_tracked(run.name, fn):
            return run.program()

    return traced


@dataclass(frozen=True)
class _Place:
    """Where a program runs: the ranks, how arguments are split, and whether they come whole.

    The specs of results are asked for once there are results: `functron.partition` finds them then.
    """

    mesh: Mesh
    in_specs: Any
    out_specs: Callable[[], Any]
    whole: bool
    per_rank: bool
    checked: bool
    stages: str | None = None


def _find_place(fn, mesh, in_specs, simulate: bool) -> _Place:
    if simulate:
        return _Place(Mesh(), P(), P, True, False, False)
    if isinstance(fn, MappedFunction):
        if mesh is not None or in_specs is not None:
            raise ValueError(
                "trace: got mesh or in_specs for a function that shard_map returned; wanted them "
                "there only; fix: leave them out"
            )
        bound = isinstance(fn.mesh, BoundMesh)
        stages = fn.stages if bound else None
        specs = fn.in_specs, lambda: fn.out_specs
        return _Place(fn.mesh.mesh, *specs, not bound, True, fn.check, stages)
    if (mesh is None) != (in_specs is None):
        raise ValueError("trace: got one of mesh and in_specs; wanted both or neither")
    whole, bound = Mesh() if mesh is None else mesh.mesh, isinstance(mesh, BoundMesh)
    specs = P() if in_specs is None else in_specs
    return _Place(whole, specs, lambda: None, not bound, True, mesh is not None)


class _Trace:
    """One run of a function under a recorder."""

    def __init__(self, fn: Callable, args: tuple, donated: tuple[int, ...], place: _Place):
        self.fn, self.args, self.donated, self.place = fn, args, donated, place
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.recorder = Recorder()
        self.indices: dict[str, tuple[torch.Tensor, Var]] = {}
        bad = [p for p in donated if not 0 <= p < len(args)]
        if bad:
            raise ValueError(f"trace: got donate={bad}; wanted positions of {len(args)} arguments")

    def program(self) -> Program:
        leaves, structure = tree.flatten(self.args)
        paths = tree.paths(self.args)
        refuse_orphans(self.name, leaves)
        raise_problems(
            "trace cannot see into these arguments",
            [
                Problem(f"argument {path}", type(leaf).__name__, "a tree of tensors", fix)
                for path, leaf in zip(paths, leaves, strict=True)
                if (fix := dataclass_fix(leaf))
            ],
            TypeError,
        )
        specs = self._flatten_specs(leaves, paths)
        inputs = self.recorder.given
        fakes: list[Any] = []
        for leaf, path, spec in zip(leaves, paths, specs, strict=True):
            if not isinstance(leaf, torch.Tensor):
                fakes.append(leaf)
                continue
            donated = int(path.split("/")[0]) in self.donated
            fake = self._make_local(leaf, spec)
            fixed = None if donated else f"argument {path}"
            var = self.recorder.input(fake, path.partition("/")[2] or f"arg_{path}", fixed=fixed)
            inputs.append(Input(var, path, spec, donated))
            fakes.append(fake)
        axis_index = self._axis_index if self.place.per_rank else None
        with (
            self.recorder.recording(),
            enter(replace(scope(), axis_index=axis_index, traced=self.place.mesh.shape)),
        ):
            result = self.fn(*tree.unflatten(structure, fakes))
            outputs, out_structure = self._flatten_outputs(result)
        if keeper() is None:  # `functron.partition` asks at each call
            refuse_tracked(self.name, self.recorder.constants.values())
        inputs += [
            Input(var, "", P(), role="constant", value=value)
            for var, value in self.recorder.constants.items()
        ]
        block = self.recorder.block([i.var for i in inputs], [o.value for o in outputs])
        _refuse_processes(block)
        used = {value for equation in block.equations for value in equation.operands}
        used |= {value for value in block.outputs if isinstance(value, Var)}
        kept = tuple(i for i in inputs if i.role == "argument" or i.var in used)
        return Program(
            self.name,
            self.place.mesh,
            replace(block, inputs=tuple(i.var for i in kept)),
            kept,
            tuple(outputs),
            structure,
            out_structure,
            {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
            self.place.checked,
            self.place.stages,
        )

    def _flatten_specs(self, leaves: list, paths: list[str]) -> list[P | None]:
        prefix, place = self.place.in_specs, self.place
        prefix = (prefix,) * len(self.args) if is_spec(prefix) else tuple(prefix)
        if len(prefix) != len(self.args):
            raise ValueError(
                f"trace: got {len(self.args)} arguments and in_specs for {len(prefix)}; wanted one "
                "entry per argument"
            )
        specs = tree.broadcast_prefix(prefix, self.args, is_leaf=is_spec, what="in_specs")
        if place.whole:
            rows = zip(leaves, paths, specs, strict=True)
            raise_problems(
                "trace cannot shard the arguments",
                [
                    problem
                    for leaf, path, spec in rows
                    if isinstance(leaf, torch.Tensor) and spec is not None
                    for problem in problems(f"argument {path}", leaf.shape, spec, place.mesh)
                ],
            )
        return specs

    def _make_local(self, leaf: torch.Tensor, spec: P | None) -> torch.Tensor:
        """A fake tensor like this rank's shard of `leaf`."""
        shape, stride = tuple(leaf.shape), tuple(leaf.stride())
        if self.place.whole and spec is not None and spec_axes(spec):
            shape = local_shape(leaf.shape, spec, self.place.mesh)
        if shape != tuple(leaf.shape):
            stride = contiguous_strides(shape)
        device = torch.device("cpu") if leaf.device.type == "meta" else leaf.device
        return self.recorder.empty(shape, stride, leaf.dtype, device)

    def _axis_index(self, name: str) -> torch.Tensor:
        if name not in self.indices:
            fake = self.recorder.empty((), (), torch.int64, "cpu")
            var = self.recorder.input(fake, f"{name}_index", root=True)
            self.indices[name] = (fake, var)
            self.recorder.given.append(Input(var, name, P(name), role="axis_index"))
        return self.indices[name][0]

    def _flatten_outputs(self, result: Any) -> tuple[list[Output], tree.Structure]:
        refuse_holders("trace: the function returns what a program cannot", "output", result)
        leaves, structure = tree.flatten(result)
        prefix = self.place.out_specs()
        specs = (
            [None] * len(leaves)
            if prefix is None
            else tree.broadcast_prefix(prefix, result, is_leaf=is_spec, what="out_specs")
        )
        outputs = []
        bad = []
        for leaf, path, spec in zip(leaves, tree.paths(result), specs, strict=True):
            if isinstance(leaf, torch.Tensor):  # a transform outside wraps all results
                outputs.append(Output(self.recorder.var(compat.plain(leaf)), path, spec))
                continue
            if callable(leaf):
                bad.append(Problem(f"output {path}", type(leaf).__name__, "tensors and numbers"))
            outputs.append(Output(leaf, path, spec))
        raise_problems("trace: the function returns what a program cannot", bad, TypeError)
        return outputs, structure


def _refuse_processes(block: Block) -> None:
    for equation, _ in block.walk():
        if not isinstance(equation.op, ControlFlow) and equation.op.namespace == "_c10d_functional":
            raise ValueError(
                f"trace: at {equation.where.line} the program communicates with real processes "
                f"({equation.op}); wanted collectives of functron.lax over the mesh it is traced "
                "for; fix: give trace or jit what shard_map returned over a bound mesh, not a "
                "caller of it"
            )


@public
def eval_shape(fn: Callable) -> Callable[..., tree.Tree]:
    """The function that gives the shapes and dtypes of what `fn` returns, computing nothing.

    As `jax.eval_shape`. Arguments are trees of tensors, of which only shape, dtype and device are
    used (so they may be on the meta device), and of static values. Results are contiguous tensors
    on the meta device in the place of `fn`'s tensors; other leaves stay what they are. Over a
    `Mesh` they are global values, as in simulation; over a `BoundMesh` this rank's shards, without
    communication. Works inside programs, also while they are traced.

    ``eval_shape(lambda key: ft.init_params(key, defs))(ft.random.key(0))`` describes parameters of
    any size without memory for them.

    >>> ft.eval_shape(lambda x: x @ x.mT)(torch.zeros(2, 3)).shape
    torch.Size([2, 2])

    Raises:
        ValueError: as `functron.trace`: shapes must not depend on the numbers in tensors, random
            numbers come from keys, and tensors that `fn` closes over are not modified.
    """

    @public
    def shaped(*args, **kwargs) -> tree.Tree:
        outer = active()
        recorder = Recorder() if outer is None else outer
        place = (
            _record_alone(recorder) if outer is None else recorder.frame()
        )  # which is thrown away
        # stand-ins vary over no axis, whatever the arguments do
        title = "eval_shape cannot see into these"
        refuse_holders(title, "argument", (args, kwargs) if kwargs else args, tracked=True)
        with enter(replace(scope(), check=False)), place:
            args, kwargs = tree.map(lambda leaf: _make_fake(recorder, leaf), (args, kwargs))
            out = fn(*args, **kwargs)
        refuse_holders(title, "output", out)
        return tree.map(_make_abstract, out)

    return shaped


@contextlib.contextmanager
def _record_alone(recorder: Recorder) -> Iterator[None]:
    """Record out of sight of outer modes."""
    with compat.no_dispatch_modes(), recorder.recording():
        yield


def _make_fake(recorder: Recorder, leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    refuse_orphans("eval_shape", [leaf])
    device = torch.device("cpu") if leaf.device.type == "meta" else leaf.device
    made = recorder.empty(leaf.shape, leaf.stride(), leaf.dtype, device)
    recorder.input(made, "argument")
    taped = leaf.requires_grad and not compat.transforms_active()  # under which torch refuses it
    return made.requires_grad_() if taped else made


def _make_abstract(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with compat.no_dispatch_modes():
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
