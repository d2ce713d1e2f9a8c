"""Executables: traced programs compiled by Inductor, and run on this process's rank.

Every kernel of the program (`functron.compiler.segments`) is compiled once and kept on disk
under a hash of its graph, so scanned layers compile once at any depth, ranks share their work, and
the next process does not compile at all.

All ranks must run the same program, or their collectives wait for one another: `check_agreement`.
Results take the memory of arguments that were donated, as `takers` pairs them.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import fx
from torch.utils import _pytree as pytree

from functron.compiler import graph as cuda_graph
from functron.compiler.driver import Compiled, Routine, routine
from functron.compiler.graph import Graph
from functron.compiler.lower import graph_module
from functron.compiler.lower import unroll as unrolled
from functron.compiler.segments import Kernel, procedure
from functron.core import compat, tree
from functron.core.errors import Problem, nearest, raise_problems
from functron.program import text
from functron.program.equations import Code, Scan, Var, canonical_strides, contiguous_strides
from functron.program.order import arranged
from functron.spmd.axes import raise_lost, user_line
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shard_map import FIX, Donated, check_consumable, consume


def check_agreement(program: Code, mesh: BoundMesh) -> None:
    """Check that the ranks of `mesh` have traced the same program.

    Collectives: on each axis of the program one all-gather of 32 bytes, and of the programs' texts
    where they differ.

    Raises:
        ValueError: they have not, on every rank of an axis along which they differ; with what
            differs.
    """
    mine = digest(program)
    for axis, size in program.mesh.axes:
        if size == 1 or axis == program.stages:
            continue
        group = compat.group(mesh.groups[axis])
        digests: list = [None] * size
        try:
            with _entered(mesh, axis):
                dist.all_gather_object(digests, mine, group=group)
        except RuntimeError as error:
            raise_lost(error, f"compiling {program.name} over {axis!r} at {user_line()}")
            raise
        if len(set(digests)) == 1:
            continue
        texts: list = [None] * size
        dist.all_gather_object(texts, anywhere(program), group=group)
        here = mesh.coordinate[axis]
        other = next(i for i, found in enumerate(digests) if found != mine)
        changes = text.diff(texts[here], texts[other]).splitlines()
        raise ValueError(
            f"{program.name}: got one program where {axis}_index is {here} and another where it is "
            f"{other}; wanted the same on all ranks, whose collectives would otherwise wait for "
            "one another for ever; fix: decide by lax.axis_index and torch.where, not by a Python "
            "branch on the rank. The difference:\n" + "\n".join(changes[:20])
        )


def _entered(mesh: BoundMesh, axis: str) -> AbstractContextManager[None]:
    """A with block in which this process waits for others to have traced a program."""
    if mesh.recorder is None:
        return nullcontext()
    return mesh.recorder.entered("agreement about a program", axis, None)


def anywhere(program: Code) -> str:
    """A program's text without the numbers of devices, which differ by rank."""
    return re.sub(r"\bcuda:\d+", "cuda", text.format(program))


def digest(program: Code) -> str:
    """A hash of what a program computes.

    Names and source lines do not count, nor which of its devices a machine gave to a rank: rank 1
    computes on cuda:1 what rank 0 computes on cuda:0.
    """
    numbers: dict[Var, str] = {}

    def number(value: Var | torch.device) -> str:
        if isinstance(value, torch.device):
            return value.type
        shown = f"%{len(numbers)}:{value.shape}:{value.stride}:{value.dtype}:{value.device.type}"
        return numbers.setdefault(value, shown)

    def numbered(values: Any) -> str:
        return repr(pytree.tree_map_only((Var, torch.device), number, values))

    made = hashlib.sha256()
    for value in program.block.inputs:
        made.update(number(value).encode())
    for equation, _ in program.block.walk():
        operands: tuple = (equation.args, dict(equation.kwargs), equation.outputs)
        if isinstance(equation.op, Scan):
            op = equation.op
            operands += op.length, op.num_consts, op.num_carry, op.reverse
            operands += op.body.inputs, op.body.outputs
        made.update(numbered((equation.name, operands)).encode())
    outputs = [output.value for output in program.outputs]
    made.update(numbered(outputs).encode())
    return made.hexdigest()


def takers(program: Code) -> dict[Var, Var]:
    """Results, and the donated input whose memory each may take: by path, else by likeness."""
    returned = [output for output in program.outputs if isinstance(output.value, Var)]
    outputs = {output.value for output in returned}
    free = {i.path: i.var for i in program.inputs if i.donated and i.var not in outputs}
    inputs = set(program.block.inputs)
    returned = [output for output in returned if output.value not in inputs]  # these have memory
    found: dict[Var, Var] = {}

    def take(value: Var, path: str) -> bool:
        fits = value not in found and path in free and _alike(free[path], value)
        if fits:
            found[value] = free.pop(path)
        return fits

    inner = {path.partition("/")[2]: path for path in free}
    for output in returned:
        _ = take(output.value, output.path) or take(
            output.value, inner.get(output.path.partition("/")[2], "")
        )
    for output in returned:
        any(take(output.value, path) for path in list(free))
    return found


def _alike(a: Var, b: Var) -> bool:
    return (a.shape, a.stride, a.dtype, a.device) == (b.shape, b.stride, b.dtype, b.device)


def warn_unused(program: Code, taken: Mapping[Var, Var]) -> None:
    """Warn of donated arguments whose memory no result takes."""
    returned = {output.value for output in program.outputs if isinstance(output.value, Var)}
    used = {*taken.values(), *returned}
    left = [i.path for i in program.inputs if i.donated and i.var not in used]
    if left:
        warnings.warn(
            f"{program.name}: got donated arguments whose memory no result can take: "
            f"{', '.join(left)}; wanted a result of the same shape, layout and dtype for each; "
            "fix: do not donate them, or return their new values",
            stacklevel=4,
        )


Backend = Literal["inductor", "eager"]

_INDUCTOR_GRAPHS = "triton.cudagraphs"
_BUCKET_MEGABYTES = 25.0  # torch's DistributedDataParallel has found it good


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program; `compile` makes it.

    Attributes:
        program: what was compiled.
        code: what Inductor generated, one text per kernel, in the order in which they first run.
        updated: paths of the donated arguments whose memory results take.
    """

    program: Code
    code: tuple[str, ...]
    updated: tuple[str, ...]
    _routine: Routine | Graph
    _donated: Mapping[int, str]
    _hidden: tuple[torch.Tensor, ...]

    def __call__(self, *args: tree.Tree) -> tree.Tree:
        """The results for arguments like those that were traced; on a bound mesh, shards.

        Donated arguments are consumed: results take their memory, and they are left empty.

        Raises:
            ValueError: another structure, shape, dtype or device, or other static values.
        """
        leaves = self.program.flatten(args)
        arguments = [given for given in self.program.inputs if given.role == "argument"]
        raise_problems(
            f"{self.program.name} was compiled for other arguments",
            [
                Problem(f"argument {given.path}", describe(leaf), describe(given.var))
                for given in arguments
                for leaf in (leaves[given.path],)
                if describe(leaf) != describe(given.var)
            ],
        )
        return self.run([leaves[given.path] for given in arguments])

    def run(self, tensors: list[torch.Tensor]) -> tree.Tree:
        """The results for the tensors among the arguments, in order; only donation is checked.

        Args:
            tensors: the operands; the list is consumed.
        """
        check_consumable(tensors, self._donated)
        for position, path in self._donated.items():
            tensors[position] = consume(tensors[position], path, self.program.name)
        return tree.unflatten(self.program.out_structure, self.run_owned(tensors))

    def run_owned(self, tensors: list[torch.Tensor]) -> list:
        """The flat results, like `run` for tensors of which the donated ones are nobody else's.

        Nothing is checked, and donated tensors are not marked as gone.
        """
        with torch.no_grad():
            tensors += self._hidden
            return self._routine.run(tensors)


def describe(value: torch.Tensor | Var) -> str:
    """Shape, layout, dtype and device in words."""
    if isinstance(value, Donated):
        return f"a tensor that {vars(value)['consumed']}; {FIX}"
    stride = value.stride() if isinstance(value, torch.Tensor) else value.stride
    stride = canonical_strides(value.shape, stride)
    layout = "" if stride == contiguous_strides(value.shape) else f" with strides {stride}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}{layout} on {value.device}"


def compile(  # noqa: A001  (read as functron.compiler.compile)
    program: Code,
    mesh: Mesh | BoundMesh | None = None,
    *,
    cache: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    overlap: bool = True,
    prefetch: bool = True,
    sequence_parts: int = 1,
    unroll: bool = False,
    graph: bool = False,
    backend: Backend = "inductor",
) -> Executable:
    """The executable of a program, for this process's rank.

    Args:
        program: of one rank, as `trace` makes it.
        mesh: the processes, where the program is for more than one rank.
        cache: where artefacts are kept; None: where `torch.compile` keeps its own. On a mesh, all
            processes of a machine should have the same: each compiles a part of the kernels and
            reads the others'.
        options: of Inductor (`torch._inductor.config`), such as ``{"max_autotune": True}``.
        overlap: issue collectives early and wait for them late, and merge small reductions.
        prefetch: gather the parameters of a scanned layer while the one before is computed, and
            reduce its gradients while the next one is; see `functron.program.order`.
        sequence_parts: cut gathers and scatters of sequences, as tensor parallelism has them, and
            the products beside them in so many parts, each under the product of another; see
            `functron.program.order`. Products are smaller then.
        unroll: compile scans as one long graph instead of their body once: compile time then grows
            with depth, and kernels may fuse across iterations.
        graph: launch the whole program as one CUDA graph after its first calls; see
            `functron.compiler.graph`.
        backend: "eager" runs the same graphs without compiling them, for tests.

    Raises:
        ValueError: the mesh is not the program's, an option is unknown, a donated argument is a
            constant of the program, an operation cannot be lowered, or it cannot be in a graph.
    """
    from functron.compiler import inductor  # takes two seconds, and only compiling needs it

    overlap = overlap and program.mesh.size > 1
    settings = _settings(options, overlap)
    _check(program, mesh, settings, backend, inductor.known_options(), sequence_parts)
    if graph:
        title = f"{program.name} cannot be recorded as a CUDA graph"
        raise_problems(title, cuda_graph.problems(program))
    if isinstance(mesh, BoundMesh):
        check_agreement(program, mesh)
    if unroll:
        program = unrolled(program)
    donations = takers(program)
    prefetch = prefetch and program.mesh.size > 1
    block = arranged(program.block, prefetch=prefetch, sequence_parts=sequence_parts)
    steps = procedure(block, block.outputs, donated=donations, prefetch=prefetch)
    groups, folder = _groups(mesh), None if cache is None else Path(cache)
    graphs = {k: graph_module(k, groups, overlap=overlap) for k in steps.kernels()}
    made = _compiled(graphs, mesh, settings, folder, backend)
    arguments = [given for given in program.inputs if given.role == "argument"]
    inside = set(steps.inside.values()) | {v for v in steps.outputs if isinstance(v, Var)}
    warn_unused(program, donations)
    donated = {i: given.path for i, given in enumerate(arguments) if given.donated}
    kernels = {kernel: function for kernel, (function, _) in made.items()}
    ready = routine(steps, kernels, groups)
    return Executable(
        program,
        tuple(dict.fromkeys(text for _, text in made.values())),
        tuple(given.path for given in arguments if given.donated and given.var in inside),
        Graph(ready.run, donated, program.name) if graph else ready,
        donated,
        tuple(_hidden(program, mesh)),
    )


def _settings(options: Mapping[str, Any] | None, overlap: bool) -> dict[str, Any]:
    passes: dict[str, Any] = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
        "bucket_all_reduces_fx": "all",
        "bucket_all_reduces_fx_bucket_size_determinator": _bucket_megabytes,
        "bucket_reduce_scatters_fx": "all",
        "bucket_reduce_scatters_fx_bucket_size_determinator": _bucket_megabytes,
    }
    return {**(passes if overlap else {}), **(options or {})}


def _bucket_megabytes(index: int) -> float:
    return _BUCKET_MEGABYTES


def _check(
    program: Code, mesh, settings: Mapping[str, Any], backend, known: set[str], parts: int
) -> None:
    found = [
        Problem("options", repr(name), "an option of Inductor", nearest(name, known))
        for name in settings
        if name not in known
    ]
    if settings.get(_INDUCTOR_GRAPHS):  # it finds no arguments that stay where they are
        fix = "leave it out, and say graph=True"
        found.append(Problem("options", _INDUCTOR_GRAPHS, "a graph of the whole program", fix))
    if parts < 1:
        found.append(Problem("sequence_parts", str(parts), "1 or more"))
    if backend not in get_args(Backend):
        wanted = " or ".join(map(repr, get_args(Backend)))
        found.append(Problem("backend", repr(backend), wanted))
    whole = mesh.mesh if isinstance(mesh, BoundMesh) else mesh
    if program.mesh.size > 1 and not isinstance(mesh, BoundMesh):
        fix = "pass mesh.bind(), in processes started by torchrun"
        if whole is None or whole == program.mesh:
            got = "no processes" if whole is None else "a simulated mesh"
            fix += ", or compile trace(fn, simulate=True)(...), which one process runs for all"
            found.append(Problem("mesh", got, f"the bound mesh of {program.mesh.size} ranks", fix))
    if whole is not None and whole != program.mesh and program.mesh.size * whole.size > 1:
        found.append(
            Problem("mesh", f"Mesh({whole})", f"Mesh({program.mesh})", "trace for the same mesh")
        )
    raise_problems(f"cannot compile {program.name}", found)


def _compiled(
    graphs: Mapping[Kernel, fx.GraphModule],
    mesh,
    settings: Mapping[str, Any],
    cache: Path | None,
    backend: Backend,
) -> dict[Kernel, tuple[Compiled, str]]:
    rank, kernels = mesh.rank if isinstance(mesh, BoundMesh) else 0, list(graphs)
    if backend == "eager":
        return {kernel: (_eager(graph), "") for kernel, graph in graphs.items()}
    from functron.compiler import inductor  # as above

    made: dict[Kernel, tuple[Compiled, str]] = {}
    with inductor.directory(cache) as folder:
        # each process begins with another kernel, and finds the others' on disk
        start = rank % max(1, len(kernels))
        for kernel in [*kernels[start:], *kernels[:start]]:
            options = {**_threefry_options(kernel), **settings}
            made[kernel] = inductor.compiled(graphs[kernel], kernel.reads, options, folder)
    return {kernel: made[kernel] for kernel in kernels}


def _groups(mesh: Mesh | BoundMesh | None) -> dict[str, str]:
    return mesh.compiled_groups if isinstance(mesh, BoundMesh) else {}


def _eager(graph: fx.GraphModule) -> Compiled:
    return lambda operands: graph(*operands)


def _threefry_options(kernel: Kernel) -> dict[str, Any]:
    """Random bits are long chains of sums that are each used twice: do not inline them twice.

    With Inductor's own limit, generating code takes three times as long.
    """
    mixes = sum(equation.name == "bitwise_xor" for equation in kernel.equations)
    return {"realize_opcount_threshold": 10} if mixes > 10 else {}


def _hidden(program: Code, mesh) -> list[torch.Tensor]:
    """The inputs that are no arguments."""
    found = []
    for given in program.inputs:
        if given.role == "axis_index":
            index = mesh.coordinate[given.path] if isinstance(mesh, BoundMesh) else 0
            found.append(torch.tensor(index, device=given.var.device))
        elif given.role == "constant":
            assert given.value is not None
            found.append(given.value.detach())
    return found
