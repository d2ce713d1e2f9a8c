"""The seconds of a program's equations on a machine, fused as a compiler fuses them.

Steps of decoders are composed of traced pieces: a layer of each kind, the embedding, and the head
with the loss, as one rank computes them for one microbatch, forward and backward. Tracing takes
tenths of a second and no memory; the same pieces serve any number of layers, pipeline stages,
replicas and microbatches.

Equations are **matrix products**, **attention** (one fused operation), or bound by memory. The
latter are fused into one kernel, up to the next product, attention or collective: it reads the
group's inputs and writes its outputs once, and takes the time of these bytes or of its arithmetic,
whichever is longer. Sums over leading dims end a kernel, since they need all of its blocks; sums
over the last dim, norms and softmax do not.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from functron import pipeline
from functron.apps.planner.machines import GroupReach, Hardware, RankPlacement
from functron.apps.planner.software import FUNCTRON, Software
from functron.core import random, tree
from functron.models import gpt
from functron.models.config import GPTConfig
from functron.models.options import DEFAULTS, ModelOptions
from functron.pipeline.stage_backward import StageCall, trace_stage
from functron.program.cost import (
    equation_bytes,
    equation_flops,
    find_filled,
    find_rooms,
    walk_dearest,
)
from functron.program.equations import Block, Code, ControlFlow, Equation, Var
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


def classify_equation(equation: Equation) -> WorkKind:
    """The kind of an equation that is not a scan, by what takes its time."""
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
    """The work of an equation, on any machine.

    Attributes:
        kind: by what takes its time.
        num_bytes: that its kernel reads and writes; the payload of a collective.
        flops: of products and attention; otherwise the kernel's elementwise operations.
        dtype: of products and attention.
        shape: (m, n, k, batch) of a matrix product; (tokens, size) of attention's keys.
        what: the operation.
        axis: of a collective.
        share: fraction of its kernel's time.
        kernels: launches: 1, or 0 for all but the first equation of a kernel.
    """

    kind: WorkKind
    num_bytes: float = 0
    flops: float = 0
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] | None = None
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
        elif self.kind == "attention":
            tokens, size = self.shape or (0, 0)
            phase = "backward" if "backward" in self.what else "forward"
            part = machine.attention_share(phase, tokens, size)
            least = max(least, self.flops / (machine.peak(self.dtype) * part))
        elif self.shape is not None:
            m, n, k, batch = self.shape
            least = max(least, machine.matmul_seconds(m, n, k, self.dtype, batch))
        else:
            part = machine.matmul.efficiency
            least = max(least, self.flops / (machine.peak(self.dtype) * part))
        return (least + machine.kernel_seconds) * self.share


def count_work(equation: Equation) -> EquationWork:
    """The work of an unfused equation that is not a scan."""
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
        dtype, keys = equation.operands[0].dtype, _find_keys(equation)
        return EquationWork(kind, num_bytes, flops, dtype, keys, name)
    factors = [v for v in equation.operands if len(v.shape) >= 2][-2:]
    shape = None
    if name in _PRODUCTS and len(factors) == 2 and flops:
        m, k, n = *factors[0].shape[-2:], factors[1].shape[-1]
        shape = (m, n, k, max(1, round(flops / (2 * m * n * k))))
    return EquationWork(kind, num_bytes, flops, equation.operands[0].dtype, shape, name)


def _find_keys(equation: Equation) -> tuple[int, int] | None:
    """Tokens and size of the heads that torch's attention has as keys: ``[..., tokens, size]``."""
    heads = [v.shape for v in equation.operands if len(v.shape) == 4]
    return (max(heads[1][-2], 1), heads[1][-1]) if len(heads) > 1 else None


@dataclass(frozen=True, eq=False)
class FusedProgram:
    """A program, and the work of its equations once they are fused.

    Attributes:
        program: in compiled order.
        work: of equations that are not scans.
    """

    program: Code
    work: Mapping[Equation, EquationWork]


@dataclass(frozen=True)
class ExpertLoad:
    """The rows of experts on the rank that has most of them, which the others wait for.

    Attributes:
        imbalance: times those of a rank on average; these are multiplied, and sent.
        rooms: of `functron.program.cost.find_rooms`, of the program that others are parts of.
    """

    imbalance: float = 1.0
    rooms: tuple[tuple[int, float], ...] = ()


BALANCED = ExpertLoad()


@functools.lru_cache(maxsize=4096)
def fuse_program(program: Code, software: Software, load: ExpertLoad = BALANCED) -> FusedProgram:
    """Fuse a program's equations (cached)."""
    many = program.mesh.size > 1 and software.overlap
    parts = software.sequence_parts
    block = arrange_block(program.block, prefetch=many, sequence_parts=parts)
    made = replace(program, block=block)
    found = {
        equation: count_work(equation)
        for equation, _ in block.walk()
        if not isinstance(equation.op, ControlFlow)
    }
    blocks = list(block.walk_blocks())
    free = set() if software.copies else {e for each in blocks for e in find_copies(each)}
    found.update(dict.fromkeys(free, EquationWork("nothing", kernels=0)))
    if software.fusion != "none":
        for each in blocks:
            for group in fuse_equations(each, software, free):
                found.update(_share_work(group))
    if software.fused_casts:
        found.update({e: _fuse_cast(e, work) for e, work in found.items() if e.name in _CASTS})
    for product, part in find_filled(made, dict(load.rooms) or None).items():
        part = min(1.0, part * load.imbalance)
        whole = found[product]
        found[product] = whole._replace(flops=whole.flops * part, num_bytes=whole.num_bytes * part)
    quantised = any(equation.name.startswith("scaled_") for equation in found)
    sent = load.imbalance * (software.sent_part if quantised else 1.0)
    for equation, work in found.items():
        if work.what == "ragged_all_to_all":
            found[equation] = work._replace(num_bytes=work.num_bytes * sent)
    if software.sums_in_products:
        for each in blocks:
            for product, chain in find_sums_in_products(each):
                if sum(found[e].share for e in chain) > 0.999:  # a kernel of nothing else
                    more = found[product].num_bytes + found[chain[0]].num_bytes
                    more -= 2 * product.results[0].nbytes
                    found[product] = found[product]._replace(num_bytes=more)
                    found.update(dict.fromkeys(chain, EquationWork("nothing", kernels=0)))
    return FusedProgram(made, MappingProxyType(found))


_CASTS = frozenset({"quantise", "abs", "amax", "nan_to_num"})


def _fuse_cast(equation: Equation, work: EquationWork) -> EquationWork:
    """The work of a cast in the kernel before it: the writes of quantised values."""
    if equation.name != "quantise":
        return EquationWork("nothing", kernels=0)  # magnitudes are known from the steps before
    return work._replace(num_bytes=sum(v.nbytes for v in equation.results), share=1.0)


def count_empty_flops(program: Code, rooms: Mapping[int, float] | None = None) -> float:
    """The FLOPs of a program on rows of experts that have no tokens; see `find_filled`."""
    filled = find_filled(program, rooms)
    each = walk_dearest(program.block, equation_flops)
    return sum(equation_flops(e) * (1 - filled[e]) * times for e, times in each if e in filled)


def _share_work(group: FusedKernel) -> dict[Equation, EquationWork]:
    """The work of a kernel, divided among its equations by the bytes that each moves."""
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

    Attributes:
        hardware: the machine.
        placement: of the mesh on it.
        software: fusion and overlap.
        program: whose equations are fused, and share a kernel's time by the bytes that each moves;
            other equations are kernels of their own.
        load: of the program's experts.
    """

    hardware: Hardware
    placement: RankPlacement | _GroupReaches
    software: Software = FUNCTRON
    program: Code | None = None
    load: ExpertLoad = BALANCED

    def __call__(self, equation: Equation) -> float:
        """The seconds of an equation that has no blocks."""
        work = self._known.get(equation)
        work = count_work(equation) if work is None else work
        return work.seconds(self.hardware, self.placement)

    @functools.cached_property
    def _known(self) -> Mapping[Equation, EquationWork]:
        return (
            {}
            if self.program is None
            else fuse_program(self.program, self.software, self.load).work
        )


def _is_causal(equation: Equation) -> bool:
    op = equation.op
    assert not isinstance(op, ControlFlow)
    names = (argument.name for argument in op._schema.arguments)
    given = dict(zip(names, equation.args, strict=False)) | dict(equation.kwargs)
    return bool(given.get("is_causal"))


def _count_operations(equation: Equation) -> int:
    """The operations of an elementwise equation: one per element."""
    return max([v.size for v in (*equation.results, *equation.operands)], default=0)


# --- fusion


class FusedKernel(NamedTuple):
    """The equations of a kernel, and the bytes that each moves into it or out of it.

    Inputs count where they are first read, outputs where they are computed.
    """

    equations: tuple[Equation, ...]
    moved_bytes: tuple[int, ...]


def fuse_equations(
    block: Block, software: Software = FUNCTRON, free: Collection[Equation] = ()
) -> list[FusedKernel]:
    """The kernels of a block's equations that are bound by memory.

    Args:
        block: of a program or a scan.
        free: equations that are views in this software.
    """
    bases = _find_bases(block, free)
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
    readers = _find_readers(block, bases, free)
    return [_make_kernel(found, bases, readers) for found in members.values()]


def _is_fusible(equation: Equation) -> bool:
    return not isinstance(equation.op, ControlFlow) and classify_equation(equation) == "memory"


def _ends_kernel(equation: Equation, software: Software) -> bool:
    """Whether readers of an equation's results are other kernels."""
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
    """Whether an equation's inputs are of other kernels."""
    alone = software.fusion == "pointwise" and not _is_elementwise(equation)
    return alone and equation.name != "_softmax"


def _is_elementwise(equation: Equation) -> bool:
    assert not isinstance(equation.op, ControlFlow)
    return torch.Tag.pointwise in equation.op.tags or equation.name in _COPIES


_SUMS = frozenset({"sum", "mean", "amax"})
_COPIES = frozenset({"clone", "_to_copy", "cat", "copy", "arange", "full", "expand_copy"})


def find_copies(block: Block) -> set[Equation]:
    """Copies before and after collectives, and those of barriers."""
    sent = {v for e in block.equations if axis_of(e) is not None for v in e.results}
    found = {equation for equation in block.equations if equation.name == "barrier"}
    while True:  # what is a view makes others copies of what was sent
        bases = _find_bases(block, found)
        readers = _find_readers(block, bases, found)
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


def _find_bases(block: Block, free: Collection[Equation] = ()) -> dict[Var, Var]:
    """By value the one that it is a view of, or itself."""
    found = {value: value for value in block.inputs}
    for equation in block.equations:
        for value in equation.results:
            same = [v for v in equation.operands if v.storage == value.storage]
            same = list(equation.operands) if equation in free else same
            view = same and (equation.aliases or equation in free)
            found[value] = found.get(same[0], same[0]) if view else value
    return found


def _find_readers(
    block: Block, bases: Mapping[Var, Var], free: Collection[Equation] = ()
) -> dict[Var, list[Equation | None]]:
    """The equations that read a value or a view of it; None: it is an output."""
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
    """Products that are only added to an accumulator, and the equations of the addition.

    A kernel of products can add to the accumulator itself.
    """
    bases = _find_bases(block)
    readers = _find_readers(block, bases)
    found = []
    for product in block.equations:
        if isinstance(product.op, ControlFlow) or classify_equation(product) != "products":
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


def _make_kernel(
    equations: Sequence[Equation],
    bases: Mapping[Var, Var],
    readers: Mapping[Var, Sequence[Equation | None]],
) -> FusedKernel:
    inside, moved = {*equations}, []
    made = {value for e in equations for value in e.results}
    left: dict[Var, int] = {}  # bytes of each input that were not read yet
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
    """Bytes of a value, without expanded dims."""
    sizes = zip(value.shape, value.stride, strict=True)
    count = math.prod(size if stride or not size else 1 for size, stride in sizes)
    return count * value.dtype.itemsize


# --- programs


@dataclass(frozen=True)
class Times:
    """The time of a program on one rank.

    Attributes:
        seconds: from start to end.
        parts: seconds by "products", "attention", "memory", and "over AXIS" for exposed
            communication; they add up to `seconds`.
        kernels: number of launches.
        sent: by axis, seconds of communication.
    """

    seconds: float
    parts: Mapping[str, float]
    kernels: int
    sent: Mapping[str, float]

    @property
    def computing(self) -> float:
        """Seconds without exposed communication."""
        return sum(x for name, x in self.parts.items() if not name.startswith("over "))


def time_program(
    program: Code,
    hardware: Hardware,
    placement: RankPlacement,
    software: Software = FUNCTRON,
    load: ExpertLoad = BALANCED,
) -> Times:
    """The time of a program, and what takes it (cached)."""
    axes = {e.args[1] for e, _ in program.block.walk() if axis_of(e) is not None}
    reaches = tuple((axis, placement.reach(axis)) for axis in sorted(axes))
    return _sum_times(program, hardware, _GroupReaches(reaches), software, load)


@dataclass(frozen=True)
class _GroupReaches:
    """The placement of the groups that a program communicates in: all that its time depends on."""

    known: tuple[tuple[str, GroupReach], ...]

    def reach(self, axis: str) -> GroupReach:
        return dict(self.known)[axis]


@functools.lru_cache(maxsize=16384)
def _sum_times(
    program: Code,
    hardware: Hardware,
    placement: _GroupReaches | RankPlacement,
    software: Software,
    load: ExpertLoad,
) -> Times:
    found, kernels = run_program(program, hardware, placement, software, load)
    parts: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    launched = 0.0  # of weighted branches a part
    rates = HardwareRates(hardware, placement, software, program, load)
    for equation, times in walk_dearest(kernels.program.block, rates):
        if equation.name == "check_ids" or not equation.results:
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
    return Times(
        found.total, MappingProxyType(dict(parts)), round(launched), MappingProxyType(dict(sent))
    )


def run_program(
    program: Code,
    hardware: Hardware,
    placement: _GroupReaches | RankPlacement,
    software: Software,
    load: ExpertLoad = BALANCED,
) -> tuple[ProgramTimeline, FusedProgram]:
    """The timeline of a program on a machine, and its kernels."""
    kernels = fuse_program(program, software, load)
    rates = HardwareRates(hardware, placement, software, program, load)
    return timeline(kernels.program, rates, eager=not software.overlap), kernels


# --- the pieces of a decoder


@dataclass(frozen=True, eq=False)
class TracedPiece:
    """A part of a model on one rank, for one microbatch.

    Attributes:
        part: layers, embedding or head.
        joint: forward and backward as one program.
        programs: the same as two (F and B) or three (F, I and W).
        held_bytes: activations after each of them but the last, with its input.
        sent_bytes: of its output.
        num_params: of this rank.
        num_expert_params: those of sharded experts among them.
        param_bytes: of all of them.
    """

    part: pipeline.Part
    joint: Program
    programs: tuple[Program, ...]
    held_bytes: tuple[int, ...]
    sent_bytes: int
    num_params: int
    num_expert_params: int
    param_bytes: int

    @functools.cached_property
    def hardware_flops(self) -> float:
        """FLOPs of this rank and one microbatch, with recomputation, by torch's formulas.

        Products of experts count by the average number of their rows that have tokens.
        """
        return sum(
            program.cost().hardware_flops - count_empty_flops(program, self.rooms)
            for program in self.programs
        )

    @functools.cached_property
    def rooms(self) -> Mapping[int, float]:
        """Of forward and backward together, for each of `programs`; see `ExpertLoad`."""
        return MappingProxyType(find_rooms(self.joint))

    @functools.cached_property
    def working_bytes(self) -> int:
        """The peak memory of one microbatch besides `held_bytes`, with recomputation."""
        found = self.joint.memory()
        return max(0, found.peak_bytes - sum(found.at_rest.values()) - self.held_bytes[0])


@dataclass(frozen=True, eq=False)
class TracedPieces:
    """The pieces of a model; made by `trace_pieces`.

    Attributes:
        config: the architecture.
        options: how it is run.
        mesh: of the trace.
        rows: samples per rank and microbatch.
        seq: tokens per sample.
        layers: the piece and the layers of each kind: their stack, ``"blocks"`` or ``"dense"``, and
            the window if it differs within the stack.
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

    def of(self, part: pipeline.Part) -> list[tuple[TracedPiece, int]]:
        """The pieces of a stage, with counts."""
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
    uneven: tuple[str, ...] = (),
    split: bool = False,
    grad_dtype: torch.dtype | None = None,
) -> TracedPieces:
    """Trace the pieces of a model on one rank of `mesh`, without computing.

    Args:
        mesh: the ranks, of which ``pp`` is ignored.
        options: of the model; its `gather` is replaced.
        rows: samples per rank and microbatch.
        seq: tokens per sample.
        gather: when parameters that `fsdp` splits are gathered: once per step; where they are used,
            and again in backward; or where they are used, and kept until backward.
        fsdp: the axes that parameters are sharded over.
        expert_axes: the axes that experts are sharded over.
        uneven: logical axes that ranks need not divide; see `gpt.rules`.
        split: split backward into two programs, I and W.
        grad_dtype: of accumulated gradients; None: that of the parameters.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    whole = mesh.without("pp")
    rules = gpt.rules(config, whole, fsdp=fsdp, expert_axes=expert_axes, uneven=uneven)
    specs = param_specs(gpt.defs(config, options), rules)
    made = Gather() if gather == "step" else Gather(specs, regather=gather == "use")
    options = replace(options, gather=made, expert_axes=expert_axes)
    seq_here = seq // math.prod(whole[axis] for axis in CONTEXT_AXES)
    tokens = torch.empty(rows, seq_here, dtype=torch.int64, device="meta")

    def find_specs(defs: tree.Tree) -> tree.Tree:
        found = param_specs(defs, rules)
        return without_axes(found, FSDP_AXES) if gather == "step" else found

    trace = functools.partial(
        _trace_part, whole, options, tokens, find_specs, split=split, dtype=grad_dtype
    )
    layers = {
        name: (trace(pipeline.Part(range(1)), one), same)
        for name, (one, same) in _list_layer_kinds(config).items()
    }
    bare = replace(config, num_layers=1, dense_layers=0, dense_at=())
    embed = trace(pipeline.Part(range(0), embed=True), bare)
    head = trace(pipeline.Part(range(0), loss=True), bare)
    return TracedPieces(config, options, whole, rows, seq, layers, embed, head, gather, split)


def _trace_part(
    mesh: Mesh,
    options: ModelOptions,
    tokens: torch.Tensor,
    find_specs: Callable[[tree.Tree], tree.Tree],
    part: pipeline.Part,
    config: GPTConfig,
    *,
    split: bool,
    dtype: torch.dtype | None,
) -> TracedPiece:
    """Trace a part of a model of `config`, which has no other layers, on one rank."""
    uses = gpt.uses(config, options)
    stacks = config.stacks if not part.layers else {}
    uses = {name: use for name, use in uses.items() if name not in stacks}
    defs = {k: v for k, v in gpt.defs(config, options).items() if k in uses}
    alone = pipeline.Partition((part,), (((0, 0),),), uses)
    defs = {name: defs[name] for name in alone.names(0)}
    specs = find_specs(defs)

    def local(d: Any, spec: Any) -> torch.Tensor:
        return torch.empty(local_shape(d.shape, spec, mesh), dtype=d.dtype, device="meta")

    def function(part, params, x, batch, key):
        key = key if config.dropout else None
        return gpt.stage_loss(config, part, params, x, batch, options, key=key)

    weights = tree.map(local, defs, specs)
    rows, seq = tokens.shape
    seq //= mesh["tp"] if "tp" in stream_axes(options) else 1
    x = torch.empty(rows, seq, config.embed_dim, dtype=config.stream_dtype, device="meta")
    batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
    params, shared = alone.stage_params(weights, 0, None), (random.key(0).to("meta"),)
    call = StageCall(0, part, part.loss, params, None if part.embed else x, batch, shared, {})
    stage = trace_stage(function, call, mesh, split=split, dtype=dtype)
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


def _donate_sums(program: Program) -> Program:
    """A stage's program with accumulated gradients donated, as in its pieces."""
    inputs = tuple(replace(i, donated=i.path.startswith("4/")) for i in program.inputs)
    return replace(program, inputs=inputs)


def stream_axes(options: ModelOptions) -> tuple[str, ...]:
    """The mesh axes that the sequence of a model's residual stream is split over."""
    entry = options.stream[1]
    return entry if isinstance(entry, tuple) else (entry,)


def _list_layer_kinds(config: GPTConfig) -> dict[str, tuple[GPTConfig, tuple[int, ...]]]:
    """By kind of layer (stack and window): a model of one layer, and the layers of that kind."""
    found: dict[str, tuple[GPTConfig, tuple[int, ...]]] = {}
    for stack, layers in config.stacks.items():
        for window in dict.fromkeys(config.windows[i] for i in layers):
            same = tuple(i for i in layers if config.windows[i] == window)
            several = len({config.windows[i] for i in layers}) > 1
            name = f"{stack}, window {window}" if several else stack
            one = replace(
                config, num_layers=1, dense_layers=int(stack == "dense"), dense_at=(),
                window=window, global_every=0, nope_every=0,
                local_rope_theta=config.local_rope_theta if window else 0.0,
            )  # fmt: skip
            found[name] = (one, same)
    return found
