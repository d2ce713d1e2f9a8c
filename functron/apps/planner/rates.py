"""The seconds of a program's equations on a machine, with equations fused as a compiler fuses them.

Steps of decoders are made of pieces, each traced once: a layer of each kind, the embedding, and the
head with the loss, as one rank computes them for one microbatch, forward and backward. Tracing
takes tenths of a second and no memory, and the same few pieces make plans of any number of layers,
pipelines, replicas and microbatches.

What is computed falls into **products**, **attention** (one operation that never writes its
scores), and the rest, which moves bytes. Of the rest, equations that follow one another with
neither of these, nor a collective, in between become one kernel: it reads what the group reads
from outside and writes what is read outside of it, each once, and takes the time of these bytes or
of its arithmetic, whichever is more. Sums over leading dims end a kernel, since they need all of
its blocks; sums over the last dim, norms and softmax do not.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from functron.apps.planner.machines import GroupReach, Hardware, RankPlacement
from functron.core import random, tree
from functron.models import gpt
from functron.models.config import GPTConfig
from functron.models.options import DEFAULTS, ModelOptions
from functron.pipeline.partition import Part, Partition
from functron.pipeline.stage_backward import Stage, StageCall, trace_stage
from functron.program.cost import equation_bytes, equation_flops
from functron.program.equations import Block, Code, Equation, Scan, Var
from functron.program.overlap import arrange_block
from functron.program.text import axis_of, payload_bytes
from functron.program.timeline import ProgramTimeline, timeline
from functron.program.trace import Program
from functron.spmd import CONTEXT_AXES, FSDP_AXES, Mesh
from functron.spmd.params import param_specs
from functron.spmd.spec import is_spec, local_shape, spec_axes, without_axes
from functron.transforms import Gather

WorkKind = Literal["products", "attention", "memory", "collective", "nothing"]

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm"})
_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})
_FREE = frozenset({"stack", "check_ids", "detach", "empty", "empty_like", "lift_fresh_copy"})


@dataclass(frozen=True)
class Software:
    """How programs are run: what is fused, what overlaps.

    Attributes:
        name: of the software, and its version where that matters.
        fusion: ``"compiler"`` as above; ``"pointwise"``: sums, norms and what differentiates these
            are kernels by themselves, but softmax computes what it reads; ``"none"``: every
            equation is a kernel.
        sums_in_products: products that make gradients of weights add them to their sums.
        overlap: collectives over axes of a layer run behind what does not need them.
        sequence_parts: as of `functron.jit`.
        overlap_grads: reductions of gradients run behind the last backward.
        overlap_params: gathers of updated parameters run behind the next forward.
        async_sends: stages of a pipeline compute while they send.
        scatter_sends: stages send each tensor-parallel rank's part, and gather it there.
        copies: gathers and scatters of sequences copy what they send into its layout, and what is
            computed again begins with a barrier that copies, as functron's do; False: the sequence
            comes first in memory, and memory is freed by hand, as Megatron-LM's do.
        graphs: kernels are launched from graphs, not one by one by the processor.
    """

    name: str = "functron"
    fusion: Literal["compiler", "pointwise", "none"] = "compiler"
    sums_in_products: bool = True
    overlap: bool = True
    sequence_parts: int = 1
    overlap_grads: bool = True
    overlap_params: bool = True
    async_sends: bool = True
    scatter_sends: bool = False
    copies: bool = True
    graphs: bool = False

    def on(self, hardware: Hardware) -> Software:
        """As it runs on a machine: nothing behind anything else where one processor does both."""
        if not hardware.host.computes:
            return self
        return replace(self, overlap=False, overlap_grads=False, overlap_params=False)


FUNCTRON = Software()
"""Functron, its steps compiled."""


def classify_equation(equation: Equation) -> WorkKind:
    """The kind of work that takes the time of an equation that is no scan."""
    if axis_of(equation) is not None:
        return "collective"
    name = equation.name
    if equation.aliases or not equation.results or name in _FREE:
        return "nothing"
    if "attention" in name:
        return "attention"
    if name in _PRODUCTS or equation_flops(equation):
        return "products"
    return "memory"


class EquationWork(NamedTuple):
    """The work of an equation, whatever the machine.

    Attributes:
        kind: of what takes its time.
        num_bytes: read and written, by its whole kernel; of a collective, the payload.
        flops: of products and attention; of the other equations of a kernel, its operations on
            single elements.
        dtype: of products and attention.
        shape: (m, n, k, batch) of a product of matrices.
        what: the operation.
        axis: of a collective.
        share: of its kernel's time.
        kernels: that it launches: 1, or 0 of all but the first of a kernel.
    """

    kind: WorkKind
    num_bytes: float = 0
    flops: float = 0
    dtype: torch.dtype = torch.float32
    shape: tuple[int, int, int, int] | None = None
    what: str = ""
    axis: str = ""
    share: float = 1.0
    kernels: int = 1

    def seconds(self, machine: Hardware, placement: RankPlacement | _GroupReaches) -> float:
        """The time on a machine."""
        if self.kind == "nothing":
            return 0.0
        if self.kind == "collective":
            return machine.collective_seconds(self.what, self.num_bytes, placement.reach(self.axis))
        least = machine.memory_seconds(self.num_bytes)
        if self.kind == "memory":
            least = max(least, self.flops / machine.peak(torch.float32))
        elif self.shape is not None:
            m, n, k, batch = self.shape
            least = max(least, machine.matmul_seconds(m, n, k, self.dtype, batch))
        else:
            backward = "backward" in self.what
            part = machine.attention["backward" if backward else "forward"]
            part = part if self.kind == "attention" else machine.matmul.efficiency
            least = max(least, self.flops / (machine.peak(self.dtype) * part))
        return (least + machine.kernel_seconds) * self.share


def count_work(equation: Equation) -> EquationWork:
    """The work of an equation that is a kernel by itself, and no scan."""
    kind, name = classify_equation(equation), equation.name
    if kind == "nothing":
        return EquationWork(kind, kernels=0)
    if kind == "collective":
        return EquationWork(kind, payload_bytes(equation), what=name, axis=axis_of(equation) or "")
    num_bytes = equation_bytes(equation)
    if kind == "memory":
        return EquationWork(kind, num_bytes, _count_operations(equation), what=name)
    flops = equation_flops(equation)
    if kind == "attention":
        flops *= 0.5 if _is_causal(equation) else 1.0
        return EquationWork(kind, num_bytes, flops, equation.operands[0].dtype, what=name)
    factors = [v for v in equation.operands if len(v.shape) >= 2][-2:]
    shape = None
    if name in _PRODUCTS and len(factors) == 2 and flops:
        m, k, n = *factors[0].shape[-2:], factors[1].shape[-1]
        shape = (m, n, k, max(1, round(flops / (2 * m * n * k))))
    return EquationWork(kind, num_bytes, flops, equation.operands[0].dtype, shape, name)


@dataclass(frozen=True, eq=False)
class FusedProgram:
    """A program as it is compiled for some software: what each of its equations asks.

    Attributes:
        program: in the order in which it is compiled.
        work: of its equations that are no scans.
    """

    program: Code
    work: Mapping[Equation, EquationWork]


@functools.lru_cache(maxsize=4096)
def fuse_program(program: Code, software: Software) -> FusedProgram:
    """A program with its equations fused; kept for programs that were asked for before."""
    many = program.mesh.size > 1 and software.overlap
    parts = software.sequence_parts
    block = arrange_block(program.block, prefetch=many, sequence_parts=parts)
    made = replace(program, block=block)
    found = {
        equation: count_work(equation)
        for equation, _ in block.walk()
        if not isinstance(equation.op, Scan)
    }
    free = (
        set()
        if software.copies
        else {e for x in (block, *_list_bodies(block)) for e in find_copies(x)}
    )
    found.update(dict.fromkeys(free, EquationWork("nothing", kernels=0)))
    if software.fusion != "none":
        for each in (block, *_list_bodies(block)):
            for group in fuse_equations(each, software, free):
                found.update(_share_work(group))
    for each in (block, *_list_bodies(block)):
        for product, part in find_filled(each).items():
            whole = found[product]
            found[product] = whole._replace(
                flops=whole.flops * part, num_bytes=whole.num_bytes * part
            )
    if software.sums_in_products:
        for each in (block, *_list_bodies(block)):
            for product, chain in find_sums_in_products(each):
                if sum(found[e].share for e in chain) > 0.999:  # of a kernel that does only this
                    more = found[product].num_bytes + found[chain[0]].num_bytes
                    more -= 2 * product.results[0].nbytes
                    found[product] = found[product]._replace(num_bytes=more)
                    found.update(dict.fromkeys(chain, EquationWork("nothing", kernels=0)))
    return FusedProgram(made, MappingProxyType(found))


def find_filled(block: Block) -> dict[Equation, float]:
    """Of products of experts that there is more room for than rows, the part of rows on average.

    A ragged exchange has room for all that could come; what comes is on average what was sent.
    """
    rooms = {}
    for equation in block.equations:
        if equation.name == "ragged_all_to_all":
            sent, room = equation.operands[0].shape[0], equation.results[0].shape[0]
            if sent < room:
                rooms[room] = sent / room
    return {
        equation: rooms[rows]
        for equation in block.equations
        if equation.name.startswith("grouped_matmul")
        and (rows := equation.operands[0].shape[0]) in rooms
    }


def count_empty_flops(program: Code) -> float:
    """The FLOPs of a program that are of rows which experts have room for and do not get."""
    total = 0.0
    for equation, times in program.block.walk():
        if isinstance(equation.op, Scan):
            for product, part in find_filled(equation.op.body).items():
                total += equation_flops(product) * (1 - part) * times * equation.op.length
    return total + sum(equation_flops(e) * (1 - x) for e, x in find_filled(program.block).items())


def _list_bodies(block: Block) -> list[Block]:
    return [e.op.body for e, _ in block.walk() if isinstance(e.op, Scan)]


def _share_work(group: FusedKernel) -> dict[Equation, EquationWork]:
    """The work of a kernel, divided among its equations by what each moves in or out of it."""
    total = sum(group.moved_bytes)
    operations = sum(_count_operations(equation) for equation in group.equations)
    found = {}
    for index, (equation, part) in enumerate(zip(*group, strict=True)):
        share = part / total if total else 1 / len(group.equations)
        kernels = int(not index)
        found[equation] = EquationWork(
            "memory", total, operations, what=equation.name, share=share, kernels=kernels
        )
    return found


@dataclass(frozen=True, eq=False)
class HardwareRates:
    """The seconds of equations on a machine: `Seconds` of `Program.timeline`.

    With `program`, its equations are fused, and a kernel's time is divided among its equations by
    the bytes that each moves in or out of it. Any other equation is a kernel by itself.

    Attributes:
        hardware: the machine.
        placement: of the mesh on it.
        software: what is fused and overlaps.
        program: whose equations are fused.
    """

    hardware: Hardware
    placement: RankPlacement | _GroupReaches
    software: Software = FUNCTRON
    program: Code | None = None

    def __call__(self, equation: Equation) -> float:
        """The seconds of one run of an equation that is no scan."""
        work = self._known.get(equation)
        work = count_work(equation) if work is None else work
        return work.seconds(self.hardware, self.placement)

    @functools.cached_property
    def _known(self) -> Mapping[Equation, EquationWork]:
        return {} if self.program is None else fuse_program(self.program, self.software).work


def _is_causal(equation: Equation) -> bool:
    op = equation.op
    assert not isinstance(op, Scan)
    names = (argument.name for argument in op._schema.arguments)
    given = dict(zip(names, equation.args, strict=False)) | dict(equation.kwargs)
    return bool(given.get("is_causal"))


def _count_operations(equation: Equation) -> int:
    """The arithmetic of an elementwise equation: one operation for each element."""
    return max([v.size for v in (*equation.results, *equation.operands)], default=0)


# --- fusion


class FusedKernel(NamedTuple):
    """Equations of one kernel, in their order, and the bytes that each moves into it or out of it.

    A value from outside counts where it is first read, whatever the number of its views; one that
    is read outside where it is made.
    """

    equations: tuple[Equation, ...]
    moved_bytes: tuple[int, ...]


def fuse_equations(
    block: Block, software: Software = FUNCTRON, free: Collection[Equation] = ()
) -> list[FusedKernel]:
    """The kernels of a block's equations that are no products, attention, scans or collectives.

    Args:
        block: of a program or a scan.
        software: which equations become one kernel.
        free: equations that are views in this software.
    """
    bases = _bases(block, free)
    made_by: dict[Var, Equation] = {}
    depth: dict[Equation, int] = {}
    parent: dict[Equation, Equation] = {}

    def root(equation: Equation) -> Equation:
        while parent[equation] is not equation:
            equation = parent[equation]
        return equation

    for equation in block.equations:
        before = [made_by[bases[v]] for v in equation.operands if bases.get(v) in made_by]
        alone = not _is_fusible(equation)
        if equation.aliases or equation in free:
            continue
        begins = not alone and _begins_kernel(equation, software)
        ends = {e: begins or _ends_kernel(e, software) for e in before}
        depth[equation] = max((depth[e] + ends[e] for e in before), default=0)
        if not alone:
            parent[equation] = equation
            for e in before:
                if e in parent and depth[e] == depth[equation] and not ends[e]:
                    parent[root(equation)] = root(e)
        for value in equation.results:
            made_by[value] = equation
    members: dict[Equation, list[Equation]] = defaultdict(list)
    for equation in parent:
        members[root(equation)].append(equation)
    readers = _readers(block, bases, free)
    return [_group(found, bases, readers) for found in members.values()]


def _is_fusible(equation: Equation) -> bool:
    return not isinstance(equation.op, Scan) and classify_equation(equation) == "memory"


def _ends_kernel(equation: Equation, software: Software) -> bool:
    """Whether what reads the results of an equation is another kernel."""
    if not _is_fusible(equation):
        return True
    if software.fusion == "pointwise":
        return not _is_elementwise(equation)
    if equation.name in _SUMS and len(equation.args) > 1:
        rank, dims = len(equation.operands[0].shape), equation.args[1]
        last = [d % rank == rank - 1 for d in dims] if isinstance(dims, list | tuple) else [False]
        return not all(last)
    return False


def _begins_kernel(equation: Equation, software: Software) -> bool:
    """Whether what an equation reads is of other kernels."""
    alone = software.fusion == "pointwise" and not _is_elementwise(equation)
    return alone and equation.name != "_softmax"


def _is_elementwise(equation: Equation) -> bool:
    assert not isinstance(equation.op, Scan)
    return torch.Tag.pointwise in equation.op.tags or equation.name in _COPIES


_SUMS = frozenset({"sum", "mean", "amax"})
_COPIES = frozenset({"clone", "_to_copy", "cat", "copy", "arange", "full", "expand_copy"})


def find_copies(block: Block) -> set[Equation]:
    """Copies into the layout of what collectives send or have brought, and those of barriers."""
    sent = {v for e in block.equations if axis_of(e) is not None for v in e.results}
    found = {equation for equation in block.equations if equation.name == "barrier"}
    while True:  # what is a view makes others copies of what was sent
        bases = _bases(block, found)
        readers = _readers(block, bases, found)
        more = set()
        for equation in block.equations:
            if equation.name not in ("clone", "cat") or equation.aliases or equation in found:
                continue
            after = readers[equation.results[0]]
            sends = after and all(e is not None and axis_of(e) is not None for e in after)
            if sends or all(bases.get(v, v) in sent for v in equation.operands):
                more.add(equation)
        if not more:
            return found
        found |= more


def _bases(block: Block, free: Collection[Equation] = ()) -> dict[Var, Var]:
    """Of every value the one that it is a view of, or itself."""
    found = {value: value for value in block.inputs}
    for equation in block.equations:
        for value in equation.results:
            same = [v for v in equation.operands if v.storage == value.storage]
            same = list(equation.operands) if equation in free else same
            view = same and (equation.aliases or equation in free)
            found[value] = found.get(same[0], same[0]) if view else value
    return found


def _readers(
    block: Block, bases: Mapping[Var, Var], free: Collection[Equation] = ()
) -> dict[Var, list[Equation | None]]:
    """The equations that read a value or a view of it; None stands for what is outside."""
    found: dict[Var, list[Equation | None]] = defaultdict(list)
    for equation in block.equations:
        if not equation.aliases and equation not in free:
            for value in dict.fromkeys(bases.get(v, v) for v in equation.operands):
                found[value].append(equation)
    for value in block.outputs:
        if isinstance(value, Var):
            found[bases.get(value, value)].append(None)
    return found


def find_sums_in_products(block: Block) -> list[tuple[Equation, tuple[Equation, ...]]]:
    """Products of which a sum is made at once that is a result, and the equations that do it.

    That is an addition, perhaps of a cast. A kernel of products reads the sum and writes it while
    it computes.
    """
    bases = _bases(block)
    readers = _readers(block, bases)
    found = []
    for product in block.equations:
        if isinstance(product.op, Scan) or classify_equation(product) != "products":
            continue
        chain: list[Equation] = []
        following = readers[product.results[0]]
        while len(following) == 1 and (last := following[0]) is not None:
            chain.append(last)
            if last.name != "_to_copy":
                break
            following = readers[last.results[0]]
        if chain and chain[-1].name == "add" and readers[chain[-1].results[0]] == [None]:
            found.append((product, tuple(chain)))
    return found


def _group(
    equations: Sequence[Equation],
    bases: Mapping[Var, Var],
    readers: Mapping[Var, Sequence[Equation | None]],
) -> FusedKernel:
    inside, moved = {*equations}, []
    made = {value for e in equations for value in e.results}
    left: dict[Var, int] = {}  # of each value from outside, what was not read yet
    seen: set[Var] = set()
    for equation in equations:
        outside = [v for v in equation.results if any(r not in inside for r in readers[v])]
        num_bytes = sum(map(_count_bytes, outside))
        lookup = equation.name in _LOOKUPS
        for position, value in enumerate(dict.fromkeys(equation.operands)):
            base = bases.get(value, value)
            if base in made or value in seen:
                continue
            seen.add(value)
            size = sum(map(_count_bytes, equation.results)) if lookup and not position else None
            part = min(
                left.get(base, _count_bytes(base)), _count_bytes(value) if size is None else size
            )
            left[base] = left.get(base, _count_bytes(base)) - part
            num_bytes += part
        moved.append(num_bytes)
    return FusedKernel(tuple(equations), tuple(moved))


def _count_bytes(value: Var) -> int:
    """Bytes of a value; those of expanded dims once."""
    sizes = zip(value.shape, value.stride, strict=True)
    count = math.prod(size if stride or not size else 1 for size, stride in sizes)
    return count * value.dtype.itemsize


# --- programs


@dataclass(frozen=True)
class Times:
    """The time of one run of a program on one rank.

    Attributes:
        seconds: from start to end.
        parts: of it, by what takes them: "products", "attention", "memory", and "over AXIS" for
            what is exposed of communication. They add up to `seconds`.
        kernels: how many are launched.
        sent: by axis, the seconds for which its links are busy.
    """

    seconds: float
    parts: Mapping[str, float]
    kernels: int
    sent: Mapping[str, float]

    @property
    def computing(self) -> float:
        """Seconds without what is exposed of communication."""
        return sum(x for name, x in self.parts.items() if not name.startswith("over "))


def time_program(
    program: Code, hardware: Hardware, placement: RankPlacement, software: Software = FUNCTRON
) -> Times:
    """The time of a program, and what takes it; kept for programs that were asked for before."""
    axes = {e.args[1] for e, _ in program.block.walk() if axis_of(e) is not None}
    reaches = tuple((axis, placement.reach(axis)) for axis in sorted(axes))
    return _program_times(program, hardware, _GroupReaches(reaches), software)


@dataclass(frozen=True)
class _GroupReaches:
    """Where the groups of the axes are that a program communicates over, and no more."""

    known: tuple[tuple[str, GroupReach], ...]

    def reach(self, axis: str) -> GroupReach:
        return dict(self.known)[axis]


@functools.lru_cache(maxsize=16384)
def _program_times(
    program: Code, hardware: Hardware, placement: _GroupReaches | RankPlacement, software: Software
) -> Times:
    found, kernels = run_program(program, hardware, placement, software)
    parts: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    launched = 0
    for equation, times in kernels.program.block.walk():
        if isinstance(equation.op, Scan) or equation.name == "check_ids" or not equation.results:
            continue
        work = kernels.work[equation]
        seconds = work.seconds(hardware, placement) * times
        launched += work.kernels * times
        if work.kind == "collective":
            sent[work.axis] += seconds
        elif seconds:
            parts[work.kind] += seconds
    parts |= {f"over {axis}": seconds for axis, seconds in found.exposed.items()}
    missed = found.total - sum(parts.values())
    assert abs(missed) <= 0.01 * found.total, "equations that the timeline has, and nothing counts"
    return Times(found.total, MappingProxyType(dict(parts)), launched, MappingProxyType(dict(sent)))


def run_program(
    program: Code, hardware: Hardware, placement: _GroupReaches | RankPlacement, software: Software
) -> tuple[ProgramTimeline, FusedProgram]:
    """The timeline of a program on a machine, and its kernels."""
    kernels = fuse_program(program, software)

    rates = HardwareRates(hardware, placement, software, program)
    overlap = {"overlap": software.overlap, "prefetch": software.overlap}
    return timeline(kernels.program, rates, **overlap), kernels


# --- the pieces of a decoder


@dataclass(frozen=True, eq=False)
class TracedPiece:
    """A part of a model on one rank, for one microbatch.

    Attributes:
        part: what it computes, of a model that has nothing else.
        joint: forward and backward as one program.
        programs: the same in pieces: F and B, or F, I and W.
        held_bytes: of activations after each of them but the last, its input included.
        sent_bytes: of what it hands on.
        num_params: that this rank holds of it, over the axes of the trace.
        num_expert_params: of these, of experts that data axes divide.
        param_bytes: of all of them.
    """

    part: Part
    joint: Program
    programs: tuple[Program, ...]
    held_bytes: tuple[int, ...]
    sent_bytes: int
    num_params: int
    num_expert_params: int
    param_bytes: int

    @functools.cached_property
    def hardware_flops(self) -> float:
        """Of this rank and one microbatch: what is computed, by torch's formulas, also again.

        Products of experts count by the rows that they get on average, not by those there is room
        for.
        """
        return sum(
            program.cost().hardware_flops - count_empty_flops(program) for program in self.programs
        )

    @functools.cached_property
    def working_bytes(self) -> int:
        """The most that one microbatch takes besides what is held: what it computes again, too.

        Of the program before it is cut, in which forward keeps for backward no more than it holds.
        """
        found = self.joint.memory()
        return max(0, found.peak_bytes - sum(found.at_rest.values()) - self.held_bytes[0])


@dataclass(frozen=True, eq=False)
class TracedPieces:
    """The pieces of a model; made by `trace_pieces`.

    Attributes:
        config: the architecture.
        options: how it is run.
        mesh: of the trace; only the axes that pieces communicate over, or are split by, matter.
        rows: samples of one rank in one microbatch.
        seq: tokens of a whole sample.
        layers: by kind, which is the name of their stack, ``"blocks"`` or ``"dense"``, and the
            window where those of a stack differ: the piece, and the layers that are like it.
        embed: the embedding.
        head: the final norm, the logits and the loss.
        gather: whether parameters are gathered in the pieces, ``"use"`` or ``"keep"``, or by the
            step.
        split: whether backward is two programs.
    """

    config: GPTConfig
    options: ModelOptions
    mesh: Mesh
    rows: int
    seq: int
    layers: Mapping[str, tuple[TracedPiece, tuple[int, ...]]]
    embed: TracedPiece
    head: TracedPiece
    gather: str
    split: bool

    def of(self, part: Part) -> list[tuple[TracedPiece, int]]:
        """The pieces of a stage, and how often it has each."""
        found = [(self.embed, 1)] if part.embed else []
        for piece, same in self.layers.values():
            count = len({*same} & {*part.layers})
            found += [(piece, count)] if count else []
        return [*found, (self.head, 1)] if part.loss else found


def trace_pieces(
    config: GPTConfig,
    mesh: Mesh,
    options: ModelOptions = DEFAULTS,
    *,
    rows: int,
    seq: int,
    gather: Literal["step", "use", "keep"] = "step",
    fsdp: tuple[str, ...] = ("fsdp",),
    expert_axes: tuple[str, ...] = ("ep",),
    split: bool = False,
    grad_dtype: torch.dtype | None = None,
    ends: TracedPieces | None = None,
) -> TracedPieces:
    """Trace the pieces of a model on one rank of `mesh`. Computes nothing.

    Args:
        config: the architecture.
        mesh: the ranks; those of ``pp`` are left out.
        options: how the model is run; its `gather` is made here.
        rows: samples of one rank in one microbatch.
        seq: tokens of a whole sample.
        gather: where parameters that `fsdp` splits are gathered: once per step, before its first
            microbatch; where they are used, again in backward; or there, and kept until then.
        fsdp: the axes that parameters are split over.
        expert_axes: the axes that experts are divided over.
        split: backward as two programs, I and W, for schedules that have these.
        grad_dtype: of the sums of gradients; None: that of the parameters.
        ends: pieces whose embedding and head are taken: those of the same arguments but for what
            backward computes again, which concerns layers alone.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    whole = mesh.without("pp")
    rules = gpt.rules(config, whole, fsdp=fsdp, expert_axes=expert_axes)
    specs = param_specs(gpt.defs(config, options), rules)
    made = Gather() if gather == "step" else Gather(specs, regather=gather == "use")
    tracer = _Tracer(
        config, whole, replace(options, gather=made, expert_axes=expert_axes), rows, seq, rules,
        gather == "step", split, grad_dtype,
    )  # fmt: skip
    layers = {
        name: (tracer.trace(Part(range(1)), one), same)
        for name, (one, same) in _layer_configs(config).items()
    }
    if ends is not None:
        embed, head = ends.embed, ends.head
    else:
        bare = replace(config, num_layers=1, dense_layers=0)
        embed = tracer.trace(Part(range(0), embed=True), bare)
        head = tracer.trace(Part(range(0), loss=True), bare)
    return TracedPieces(
        config, tracer.options, whole, rows, seq, layers, embed, head, gather, split
    )


@dataclass(frozen=True, eq=False)
class _Tracer:
    """Traces parts of a model on one rank."""

    config: GPTConfig
    mesh: Mesh
    options: ModelOptions
    rows: int
    seq: int
    rules: Any
    whole: bool
    split: bool
    grad_dtype: torch.dtype | None

    def trace(self, part: Part, config: GPTConfig) -> TracedPiece:
        """A part of a model of this config, which has no other layers."""
        options = self.options
        uses = gpt.uses(config, options)
        stacks = config.stacks if not part.layers else {}
        uses = {name: use for name, use in uses.items() if name not in stacks}
        defs = {k: v for k, v in gpt.defs(config, options).items() if k in uses}
        alone = Partition((part,), (((0, 0),),), uses)
        defs = {name: defs[name] for name in alone.names(0)}
        specs = param_specs(defs, self.rules)
        specs = without_axes(specs, FSDP_AXES) if self.whole else specs

        def local(d: Any, spec: Any) -> torch.Tensor:
            return torch.empty(local_shape(d.shape, spec, self.mesh), dtype=d.dtype, device="meta")

        weights = tree.map(local, defs, specs)
        stage, x = self._stage(part, config, alone.stage_params(weights, 0, None))
        reads = [{*piece.block.inputs} for piece in stage.pieces[1:]]
        given = [
            sum(var.nbytes for var in stage.arguments[1] if any(var in r for r in reads[i:]))
            for i in range(len(reads))
        ]
        leaves = tree.leaves(weights)
        divided = [{*spec_axes(s)} & {*options.expert_axes} for s in tree.leaves(specs, is_spec)]
        return TracedPiece(
            part,
            _donate_sums(stage.program),
            tuple(stage.piece_program(index) for index in range(len(stage.pieces))),
            tuple(held + more for held, more in zip(stage.held_bytes, given, strict=False)),
            0 if part.loss else x.nbytes,
            sum(leaf.numel() for leaf in leaves),
            sum(leaf.numel() for leaf, own in zip(leaves, divided, strict=True) if own),
            sum(leaf.nbytes for leaf in leaves),
        )

    def _stage(self, part: Part, config: GPTConfig, params: tree.Tree) -> tuple[Stage, Any]:
        options = self.options
        seq = self.seq // math.prod(self.mesh[axis] for axis in CONTEXT_AXES)
        tokens = torch.empty(self.rows, seq, dtype=torch.int64, device="meta")
        split = self.mesh["tp"] if "tp" in _axes_of(options) else 1
        shape = (self.rows, seq // split, config.embed_dim)
        x = torch.empty(shape, dtype=config.stream_dtype, device="meta")
        batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
        shared = (random.key(0).to("meta"),)

        def function(part, params, x, batch, key):
            key = key if config.dropout else None
            return gpt.stage_loss(config, part, params, x, batch, options, key=key)

        call = StageCall(0, part, part.loss, params, None if part.embed else x, batch, shared, {})
        made = trace_stage(function, call, self.mesh, split=self.split, dtype=self.grad_dtype)
        return made, x


def _donate_sums(program: Program) -> Program:
    """A stage's program that overwrites the sums of gradients, as its pieces do."""
    inputs = tuple(replace(i, donated=i.path.startswith("4/")) for i in program.inputs)
    return replace(program, inputs=inputs)


def _axes_of(options: ModelOptions) -> tuple[str, ...]:
    entry = options.stream[1]
    return entry if isinstance(entry, tuple) else (entry,)


def _layer_configs(config: GPTConfig) -> dict[str, tuple[GPTConfig, tuple[int, ...]]]:
    """By kind of layer: a model of one of them, and which layers of the model are of that kind.

    Kinds differ by their stack and by their window.
    """
    found: dict[str, tuple[GPTConfig, tuple[int, ...]]] = {}
    for stack, layers in config.stacks.items():
        for window in dict.fromkeys(config.windows[i] for i in layers):
            same = tuple(i for i in layers if config.windows[i] == window)
            several = len({config.windows[i] for i in layers}) > 1
            name = f"{stack}, window {window}" if several else stack
            one = replace(
                config, num_layers=1, dense_layers=int(stack == "dense"), window=window,
                global_every=0, nope_every=0,
                local_rope_theta=config.local_rope_theta if window else 0.0,
            )  # fmt: skip
            found[name] = (one, same)
    return found
