"""Executables: traced programs compiled by Inductor, and run on this process's rank.

Every kernel of the program (`functron.compiler.segments`) is compiled once and kept on disk
under a hash of its graph, so scanned layers compile once at any depth, ranks share their work, and
the next process does not compile at all.

All ranks must run the same program, or their collectives wait for one another: `check_agreement`.
Results take the memory of arguments that were donated, as `match_donations` pairs them.

A step of small kernels is bounded by the time that Python and the executor take to launch them. A
CUDA graph launches all of them by one call, on the same memory each time (`torch.cuda.CUDAGraph`):

| tensors                              | in a graph                                             |
|--------------------------------------|--------------------------------------------------------|
| donated arguments                    | read and written where they are: results take over     |
| arguments that stay the same tensor  | read where they are                                    |
| other arguments                      | copied into a buffer first                             |
| results in memory of their own       | copied out, since the next launch overwrites them      |
| random numbers                       | functions of a key (`functron.core.random`), an input  |

Recording runs nothing, so the first calls run as they would without: they load kernels and begin
the communication of process groups, which cannot be recorded.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import fx
from torch.utils import _pytree as pytree

from functron.compiler.executor import GraphKernel, Routine, make_routine
from functron.compiler.lower import graph_module
from functron.compiler.lower import unroll as unrolled
from functron.compiler.segments import Kernel, procedure, recompute_slices
from functron.core import compat, tree
from functron.core.errors import Problem, nearest, public, raise_problems
from functron.program import text
from functron.program.callbacks import EFFECTS
from functron.program.equations import (
    Code,
    ControlFlow,
    Equation,
    Scan,
    Var,
    canonical_strides,
    contiguous_strides,
    span_of,
)
from functron.program.interpreter import refuse_derivatives
from functron.program.overlap import arrange_block
from functron.spmd.axes import raise_lost, user_line
from functron.spmd.donation import (
    Donated,
    Donation,
    check_consumable,
    describe_fate,
    keeps_snapshots,
)
from functron.spmd.mesh import BoundMesh, JointCall, Mesh


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
        recorder, waiting = mesh.recorder, nullcontext()
        if recorder is not None:
            waiting = recorder.record("agreement about a program", axis, None)
        try:
            with waiting:
                dist.all_gather_object(digests, mine, group=group)
        except RuntimeError as error:
            raise_lost(error, f"compiling {program.name} over {axis!r} at {user_line()}")
            raise
        if len(set(digests)) == 1:
            continue
        texts: list = [None] * size
        dist.all_gather_object(texts, without_device_numbers(program), group=group)
        here = mesh.coordinate[axis]
        other = next(i for i, found in enumerate(digests) if found != mine)
        changes = text.diff(texts[here], texts[other]).splitlines()
        raise ValueError(
            f"{program.name}: got one program where {axis}_index is {here} and another where it is "
            f"{other}; wanted the same on all ranks, whose collectives would otherwise wait for "
            "one another for ever; fix: decide by lax.axis_index and torch.where, not by a Python "
            "branch on the rank. The difference:\n" + "\n".join(changes[:20])
        )


def without_device_numbers(program: Code) -> str:
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
        if isinstance(equation.op, ControlFlow):
            operands += equation.op.key
            operands += tuple((block.inputs, block.outputs) for block in equation.op.blocks)
        made.update(numbered((equation.name, operands)).encode())
    outputs = [output.value for output in program.outputs]
    made.update(numbered(outputs).encode())
    return made.hexdigest()


def match_donations(program: Code) -> dict[Var, Var]:
    """Results, and the donated input whose memory each may take: by path, else by likeness."""
    returned = [output for output in program.outputs if isinstance(output.value, Var)]
    outputs = {output.value for output in returned}
    free = {i.path: i.var for i in program.inputs if i.donated and i.var not in outputs}
    inputs = set(program.block.inputs)
    returned = [output for output in returned if output.value not in inputs]  # these have memory
    found: dict[Var, Var] = {}

    def take(value: Var, path: str) -> bool:
        fits = value not in found and path in free and free[path].type == value.type
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
        code: what Inductor generated, one text per kernel, in the order in which they first run.
        updated: paths of the donated arguments whose memory results take.
    """

    program: Code
    code: tuple[str, ...]
    updated: tuple[str, ...]
    _routine: Routine | Graph
    _donated: Mapping[int, str]
    _hidden_inputs: tuple[torch.Tensor, ...]
    _mesh: Mesh | BoundMesh | None

    def __call__(self, *args: tree.Tree) -> tree.Tree:
        """The results for arguments like those that were traced; on a bound mesh, shards.

        Donated arguments are consumed: results take their memory, and they are left empty.

        Raises:
            ValueError: another structure, shape, dtype or device, or other static values; or they
                are differentiated.
        """
        leaves = self.program.flatten(args)
        refuse_derivatives(self.program, leaves)
        arguments = [given for given in self.program.inputs if given.role == "argument"]
        raise_problems(
            f"{self.program.name} was compiled for other arguments",
            [
                Problem(f"argument {given.path}", describe(leaf), describe(given.var))
                for given in arguments
                for leaf in (leaves[given.var],)
                if describe(leaf) != describe(given.var)
            ],
        )
        return self.run([leaves[given.var] for given in arguments])

    def run(self, tensors: list[torch.Tensor]) -> tree.Tree:
        """The results for the tensors among the arguments, in order; only donation is checked.

        Args:
            tensors: the operands; the list is consumed.
        """
        check_consumable(tensors, self._donated)
        if self._donated and keeps_snapshots() and isinstance(self._routine, Graph):
            raise ValueError(
                f"{self.program.name}: got a CUDA graph within snapshot_donated; wanted a program "
                "that is given copies, and a graph updates the memory that it was recorded with; "
                "fix: leave graph=True out"
            )
        # collectives of compiled code are not counted, so how far others came is not known
        with (
            JointCall(self.program.name, self._mesh, alike=False) as call,
            Donation(call) as donation,
        ):
            for position, path in self._donated.items():
                tensors[position] = donation.take(path, tensors[position])
            donation.start()
            out = tree.unflatten(self.program.out_structure, self.run_owned(tensors))
            donation.finish()
        return out

    def run_owned(self, tensors: list[torch.Tensor]) -> list:
        """The flat results, like `run` for tensors whose donated ones have no other owner.

        Nothing is checked, and donated tensors are not marked as gone.
        """
        with torch.no_grad():
            tensors += self._hidden_inputs
            return self._routine.run(tensors)


def describe(value: torch.Tensor | Var) -> str:
    """Shape, layout, dtype and device in words."""
    if isinstance(value, Donated):
        return f"a tensor that {describe_fate(value)}"
    stride = value.stride() if isinstance(value, torch.Tensor) else value.stride
    stride = canonical_strides(value.shape, stride)
    layout = "" if stride == contiguous_strides(value.shape) else f" with strides {stride}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}{layout} on {value.device}"


@public
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
    sliced: Collection[Var] = (),
    backend: Backend = "inductor",
) -> Executable:
    """The executable of a program, for this process's rank.

    Args:
        mesh: the processes, where the program is for more than one rank: this one's place among
            them, or a started mesh, whose ranks are sent the program and take whole values.
        cache: where artefacts are kept; None: where `torch.compile` keeps its own. On a mesh, all
            processes of a machine should have the same: each compiles a part of the kernels and
            reads the others'.
        options, overlap, prefetch, sequence_parts, unroll, backend: as of `functron.jit`.
        graph: launch the whole program as one CUDA graph after its first calls; see
            `Graph`.
        sliced: operands and results that are lists of slices, for `Executable.run_owned`: ys of
            scans, and what nothing but scans reads, as xs. Lists that it is given are emptied.

    Raises:
        ValueError: the mesh is not the program's, an option is unknown, a donated argument is a
            constant of the program, an operation cannot be lowered, or it cannot be in a graph.
    """
    from functron.compiler import inductor  # takes two seconds, and only compiling needs it

    compat.keep_freed_memory()
    overlap = overlap and program.mesh.size > 1
    settings = _make_settings(options, overlap)
    _check_options(program, mesh, settings, backend, inductor.known_options(), sequence_parts)
    if graph:
        title = f"{program.name} cannot be recorded as a CUDA graph"
        raise_problems(title, graph_problems(program))
    if isinstance(mesh, BoundMesh):
        check_agreement(program, mesh)
    if unroll:
        program = unrolled(program)
    donations = match_donations(program)
    prefetch = prefetch and program.mesh.size > 1
    block = arrange_block(
        recompute_slices(program.block), prefetch=prefetch, sequence_parts=sequence_parts
    )
    results = {value for value in sliced if value in block.outputs}
    steps = procedure(
        block, block.outputs, donated=donations, prefetch=prefetch, sliced=results, alike=True
    )
    groups = mesh.compiled_groups if isinstance(mesh, BoundMesh) else {}
    folder = None if cache is None else Path(cache)
    graphs = {k: graph_module(k, groups, overlap=overlap) for k in steps.kernels()}
    made = _compile_kernels(graphs, mesh, settings, folder, backend)
    arguments = [given for given in program.inputs if given.role == "argument"]
    inside = set(steps.inside.values()) | {v for v in steps.outputs if isinstance(v, Var)}
    warn_unused(program, donations)
    donated = {i: given.path for i, given in enumerate(arguments) if given.donated}
    kernels = {kernel: function for kernel, (function, _) in made.items()}
    ready = make_routine(steps, kernels, groups, tells=bool(donated))
    return Executable(
        program,
        tuple(dict.fromkeys(text for _, text in made.values())),
        tuple(given.path for given in arguments if given.donated and given.var in inside),
        Graph(ready.run, donated, program.name) if graph else ready,
        donated,
        tuple(_hidden_inputs(program, mesh)),
        mesh,
    )


def _make_settings(options: Mapping[str, Any] | None, overlap: bool) -> dict[str, Any]:
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


def _check_options(
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
    whole = None if mesh is None else mesh.mesh
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


def _compile_kernels(
    graphs: Mapping[Kernel, fx.GraphModule],
    mesh,
    settings: Mapping[str, Any],
    cache: Path | None,
    backend: Backend,
) -> dict[Kernel, tuple[GraphKernel, str]]:
    rank, kernels = mesh.rank if isinstance(mesh, BoundMesh) else 0, list(graphs)
    if backend == "eager":
        return {kernel: (_run_eagerly(graph), "") for kernel, graph in graphs.items()}
    from functron.compiler import inductor  # as above

    texts = {k: inductor.GraphDevices.of(graph, k.reads).text for k, graph in graphs.items()}
    first = {text: kernel for kernel, text in reversed(texts.items())}  # of those that are alike
    kernels = [kernel for kernel in kernels if first[texts[kernel]] is kernel]
    made: dict[Kernel, tuple[GraphKernel, str]] = {}
    on_cpu = all(value.device.type == "cpu" for kernel in kernels for value in kernel.reads)
    beside = inductor.compile_in_background() if on_cpu else nullcontext()
    recorder = mesh.recorder if isinstance(mesh, BoundMesh) else None
    compiling = nullcontext(lambda: None) if recorder is None else recorder.compile()
    with compiling as go_on, inductor.directory(cache) as folder, beside:
        # each process begins with another kernel, leaves out those that others are compiling, and
        # finds them on disk later
        start = rank % max(1, len(kernels))
        for wait in (False, True):
            for kernel in [*kernels[start:], *kernels[:start]]:
                options = {**_threefry_options(kernel), **settings}
                given = graphs[kernel], kernel.reads, options, folder
                found = made.get(kernel) or inductor.compile_graph(*given, wait=wait)
                made |= {} if found is None else {kernel: found}
                go_on()
    return {kernel: made[first[text]] for kernel, text in texts.items()}


def _run_eagerly(graph: fx.GraphModule) -> GraphKernel:
    return lambda operands: graph(*operands)


def _threefry_options(kernel: Kernel) -> dict[str, Any]:
    """Random bits are long chains of sums that are each used twice: do not inline them twice.

    With Inductor's own limit, generating code takes three times as long.
    """
    mixes = sum(equation.name == "bitwise_xor" for equation in kernel.equations)
    return {"realize_opcount_threshold": 10} if mixes > 10 else {}


def _hidden_inputs(program: Code, mesh) -> list[torch.Tensor]:
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


WARM_UP_CALLS = 2
"""Calls before the one that is recorded."""

_MOVES = 4  # recordings after which a donated argument that still moves is a mistake

_RAGGED = "ragged_all_to_all"
_GROUPED = frozenset(("grouped_matmul", "grouped_matmul_weight"))
_READS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def graph_problems(program: Code) -> Iterator[Problem]:
    """Why a program cannot be recorded: numbers that the host reads, and memory of the host."""
    for given in program.inputs:
        if given.role == "argument" and given.var.device.type != "cuda":
            yield Problem(
                f"argument {given.path}",
                f"a tensor on {given.var.device}",
                "one on a CUDA GPU",
                "move it there",
            )
    for equation, _ in program.block.walk():
        if not isinstance(equation.op, Scan) and (reason := _find_obstacle(equation)):
            got, fix = reason
            where = equation.where.line or "an unknown line"
            yield Problem(f"{equation.name} at {where}", got, "launches alone", fix)


def _find_obstacle(equation: Equation) -> tuple[str, str] | None:
    """Why an equation cannot be recorded, and what to do instead."""
    if isinstance(equation.op, ControlFlow):
        fix = "compute both and choose by torch.where, give a loop a known length, or graph=False"
        return "what it runs next, which the host reads", fix
    if equation.name == _RAGGED and not any(equation.args[6:7]):  # the room for rows of each rank
        fix = "bound what ranks send, such as by capacity_factor, or graph=False"
        return "as many rows as there are, which the host reads", fix
    if equation.name in EFFECTS or _READS.intersection(equation.op.tags):
        return "numbers that the host reads", "leave it out, or graph=False"
    if equation.name in _GROUPED and not _has_kernel(equation):
        fix = "compute in bfloat16 with rows of whole 16 bytes, or graph=False"
        return "sizes of groups that the host reads", fix
    there = {value.device.type for value in equation.operands}
    here = {value.device.type for value in equation.results}
    if equation.name in ("_to_copy", "copy_", "copy") and there | here != here & there:
        return "a copy between host and device", "make it where it is used, or graph=False"
    return None


def _has_kernel(equation: Equation) -> bool:
    """Whether torch's kernel computes a grouped product; see `functron.ops.grouped_matmul`."""
    x, y = equation.operands[:2]
    aligned = x.shape[-1] % 8 == 0 and y.shape[-1] % 8 == 0
    return x.dtype == torch.bfloat16 and aligned and len(equation.operands[2].shape) == 1


def record(
    run: Callable[[list], list], tensors: list[torch.Tensor]
) -> tuple[list, Callable[[], None]]:
    """The results of ``run(tensors)``, recorded as a CUDA graph, and what launches it."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        # other threads, which pin batches and write checkpoints, go on
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run(list(tensors))
    return results, graph.replay


class Graph:
    """A function of tensors, launched as one CUDA graph after its first calls.

    The graph keeps its memory, and that of the arguments that it reads where they are. It is
    recorded anew, which takes as long as a few calls, where one of these is elsewhere.

    Args:
        run: takes a list of tensors, which it may empty, and gives the results. What it reads of
            them but their addresses is the same in every call.
        donated: positions of the tensors whose memory results may take.
    """

    def __init__(self, run: Callable[[list], list], donated: Collection[int], name: str):
        self._run, self._donated, self._name = run, frozenset(donated), name
        self._num_calls = self._num_recorded = 0
        self._moving: set[int] = set()
        self._taken: set[int] = set()
        self._seen: dict[int, torch.Tensor] = {}
        self._inputs: list[torch.Tensor] = []
        self._results: list = []
        self._launch: Callable[[], None] | None = None

    def run(self, tensors: list[torch.Tensor]) -> list:
        """The results; `tensors` is emptied, donated ones are overwritten.

        Raises:
            RuntimeError: CUDA cannot record what is launched.
        """
        self._num_calls += 1
        if self._num_calls <= WARM_UP_CALLS:
            # kept until the next call, as memory that was freed may come back at the same address
            rows = enumerate(tensors)
            self._seen = {i: tensor.detach() for i, tensor in rows if i not in self._donated}
            return self._run(tensors)
        if self._launch is None or self._has_moved(tensors):
            self._record(tensors)
        for position in self._moving:
            _flat_memory(self._inputs[position]).copy_(_flat_memory(tensors[position]))
        if self._donated:  # a graph does not say that it wrote
            torch.autograd.graph.increment_version([tensors[i] for i in self._donated])
        tensors.clear()
        assert self._launch is not None
        self._launch()
        kept = {_address(self._inputs[position]) for position in self._taken}
        return [_give_result(result, kept) for result in self._results]

    def _has_moved(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a tensor that is read where it was is elsewhere."""
        rows = enumerate(zip(tensors, self._inputs, strict=True))
        moved = {
            position
            for position, (tensor, known) in rows
            if position not in self._moving and tensor.data_ptr() != known.data_ptr()
        }
        self._moving |= moved - self._taken
        if moved & self._taken and self._num_recorded == _MOVES:
            warnings.warn(
                f"{self._name}: got donated arguments in other memory for the {_MOVES}th time, and "
                "each time its CUDA graph is recorded anew; wanted the results of the last call; "
                "fix: pass these, or graph=False",
                stacklevel=2,
            )
        return bool(moved)

    def _record(self, tensors: list[torch.Tensor]) -> None:
        if self._num_recorded == 0:
            seen = self._seen.items()
            self._moving = {i for i, known in seen if known.data_ptr() != tensors[i].data_ptr()}
            self._seen = {}
        self._launch, self._results, self._inputs = None, [], []  # the memory of the graph before
        self._inputs = [
            _clone_layout(tensor) if position in self._moving else tensor.detach()
            for position, tensor in enumerate(tensors)
        ]
        self._results, self._launch = record(self._run, self._inputs)
        made = {_address(result) for result in self._results if isinstance(result, torch.Tensor)}
        self._taken = {i for i in self._donated if _address(self._inputs[i]) in made}
        self._num_recorded += 1


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _give_result(result: object, kept: Collection[int]) -> object:
    """A result as the caller's: another tensor in donated memory, or else a copy."""
    if not isinstance(result, torch.Tensor):
        return result
    return result.detach() if _address(result) in kept else _clone_layout(result)


def _clone_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also where entries share memory: of the same signature."""
    return _flat_memory(tensor).clone().as_strided(tensor.shape, tensor.stride())


def _flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements from a tensor's first to its last in memory, with those between them."""
    if tensor.numel() == 0:
        return tensor.flatten()
    return tensor.as_strided((span_of(tensor.shape, tensor.stride()),), (1,))
