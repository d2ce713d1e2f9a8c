"""The seconds of a program's equations on a machine, with equations fused as a compiler fuses them.

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
from typing import Literal, NamedTuple

import torch

from functron.plan.hardware import Hardware, Placement, Reach
from functron.program.cost import equation_bytes, equation_flops
from functron.program.equations import Block, Code, Equation, Scan, Var
from functron.program.order import arranged
from functron.program.text import axis_of, payload_bytes
from functron.program.timeline import ProgramTimeline, timeline

Kind = Literal["products", "attention", "memory", "collective", "nothing"]

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


def kind_of(equation: Equation) -> Kind:
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


class Work(NamedTuple):
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

    kind: Kind
    num_bytes: float = 0
    flops: float = 0
    dtype: torch.dtype = torch.float32
    shape: tuple[int, int, int, int] | None = None
    what: str = ""
    axis: str = ""
    share: float = 1.0
    kernels: int = 1

    def seconds(self, machine: Hardware, placement: Placement | _Reaches) -> float:
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


def work_of(equation: Equation) -> Work:
    """The work of an equation that is a kernel by itself, and no scan."""
    kind, name = kind_of(equation), equation.name
    if kind == "nothing":
        return Work(kind, kernels=0)
    if kind == "collective":
        return Work(kind, payload_bytes(equation), what=name, axis=axis_of(equation) or "")
    num_bytes = equation_bytes(equation)
    if kind == "memory":
        return Work(kind, num_bytes, _operations(equation), what=name)
    flops = equation_flops(equation)
    if kind == "attention":
        flops *= 0.5 if _causal(equation) else 1.0
        return Work(kind, num_bytes, flops, equation.operands[0].dtype, what=name)
    factors = [v for v in equation.operands if len(v.shape) >= 2][-2:]
    shape = None
    if name in _PRODUCTS and len(factors) == 2 and flops:
        m, k, n = *factors[0].shape[-2:], factors[1].shape[-1]
        shape = (m, n, k, max(1, round(flops / (2 * m * n * k))))
    return Work(kind, num_bytes, flops, equation.operands[0].dtype, shape, name)


@dataclass(frozen=True, eq=False)
class Kernels:
    """A program as it is compiled for some software: what each of its equations asks.

    Attributes:
        program: in the order in which it is compiled.
        work: of its equations that are no scans.
    """

    program: Code
    work: Mapping[Equation, Work]


@functools.lru_cache(maxsize=4096)
def kernels_of(program: Code, software: Software) -> Kernels:
    """A program with its equations fused; kept for programs that were asked for before."""
    many = program.mesh.size > 1 and software.overlap
    parts = software.sequence_parts
    block = arranged(program.block, prefetch=many, sequence_parts=parts)
    made = replace(program, block=block)
    found = {
        equation: work_of(equation)
        for equation, _ in block.walk()
        if not isinstance(equation.op, Scan)
    }
    free = set() if software.copies else {e for x in (block, *_bodies(block)) for e in copies(x)}
    found.update(dict.fromkeys(free, Work("nothing", kernels=0)))
    if software.fusion != "none":
        for each in (block, *_bodies(block)):
            for group in fused(each, software, free):
                found.update(_shared(group))
    for each in (block, *_bodies(block)):
        for product, part in filled(each).items():
            whole = found[product]
            found[product] = whole._replace(
                flops=whole.flops * part, num_bytes=whole.num_bytes * part
            )
    if software.sums_in_products:
        for each in (block, *_bodies(block)):
            for product, chain in sums_in_products(each):
                if sum(found[e].share for e in chain) > 0.999:  # of a kernel that does only this
                    more = found[product].num_bytes + found[chain[0]].num_bytes
                    more -= 2 * product.results[0].nbytes
                    found[product] = found[product]._replace(num_bytes=more)
                    found.update(dict.fromkeys(chain, Work("nothing", kernels=0)))
    return Kernels(made, MappingProxyType(found))


def filled(block: Block) -> dict[Equation, float]:
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


def empty_flops(program: Code) -> float:
    """The FLOPs of a program that are of rows which experts have room for and do not get."""
    total = 0.0
    for equation, times in program.block.walk():
        if isinstance(equation.op, Scan):
            for product, part in filled(equation.op.body).items():
                total += equation_flops(product) * (1 - part) * times * equation.op.length
    return total + sum(equation_flops(e) * (1 - x) for e, x in filled(program.block).items())


def _bodies(block: Block) -> list[Block]:
    return [e.op.body for e, _ in block.walk() if isinstance(e.op, Scan)]


def _shared(group: Group) -> dict[Equation, Work]:
    """The work of a kernel, divided among its equations by what each moves in or out of it."""
    total = sum(group.moved_bytes)
    operations = sum(_operations(equation) for equation in group.equations)
    found = {}
    for index, (equation, part) in enumerate(zip(*group, strict=True)):
        share = part / total if total else 1 / len(group.equations)
        kernels = int(not index)
        found[equation] = Work(
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
    placement: Placement | _Reaches
    software: Software = FUNCTRON
    program: Code | None = None

    def __call__(self, equation: Equation) -> float:
        """The seconds of one run of an equation that is no scan."""
        work = self._known.get(equation)
        work = work_of(equation) if work is None else work
        return work.seconds(self.hardware, self.placement)

    @functools.cached_property
    def _known(self) -> Mapping[Equation, Work]:
        return {} if self.program is None else kernels_of(self.program, self.software).work


def _causal(equation: Equation) -> bool:
    op = equation.op
    assert not isinstance(op, Scan)
    names = (argument.name for argument in op._schema.arguments)
    given = dict(zip(names, equation.args, strict=False)) | dict(equation.kwargs)
    return bool(given.get("is_causal"))


def _operations(equation: Equation) -> int:
    """The arithmetic of an elementwise equation: one operation for each element."""
    return max([v.size for v in (*equation.results, *equation.operands)], default=0)


# --- fusion


class Group(NamedTuple):
    """Equations of one kernel, in their order, and the bytes that each moves into it or out of it.

    A value from outside counts where it is first read, whatever the number of its views; one that
    is read outside where it is made.
    """

    equations: tuple[Equation, ...]
    moved_bytes: tuple[int, ...]


def fused(
    block: Block, software: Software = FUNCTRON, free: Collection[Equation] = ()
) -> list[Group]:
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
        alone = not _fusible(equation)
        if equation.aliases or equation in free:
            continue
        begins = not alone and _begins(equation, software)
        ends = {e: begins or _apart(e, software) for e in before}
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


def _fusible(equation: Equation) -> bool:
    return not isinstance(equation.op, Scan) and kind_of(equation) == "memory"


def _apart(equation: Equation, software: Software) -> bool:
    """Whether what reads the results of an equation is another kernel."""
    if not _fusible(equation):
        return True
    if software.fusion == "pointwise":
        return not _elementwise(equation)
    if equation.name in _SUMS and len(equation.args) > 1:
        rank, dims = len(equation.operands[0].shape), equation.args[1]
        last = [d % rank == rank - 1 for d in dims] if isinstance(dims, list | tuple) else [False]
        return not all(last)
    return False


def _begins(equation: Equation, software: Software) -> bool:
    """Whether what an equation reads is of other kernels."""
    alone = software.fusion == "pointwise" and not _elementwise(equation)
    return alone and equation.name != "_softmax"


def _elementwise(equation: Equation) -> bool:
    assert not isinstance(equation.op, Scan)
    return torch.Tag.pointwise in equation.op.tags or equation.name in _COPIES


_SUMS = frozenset({"sum", "mean", "amax"})
_COPIES = frozenset({"clone", "_to_copy", "cat", "copy", "arange", "full", "expand_copy"})


def copies(block: Block) -> set[Equation]:
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


def sums_in_products(block: Block) -> list[tuple[Equation, tuple[Equation, ...]]]:
    """Products of which a sum is made at once that is a result, and the equations that do it.

    That is an addition, perhaps of a cast. A kernel of products reads the sum and writes it while
    it computes.
    """
    bases = _bases(block)
    readers = _readers(block, bases)
    found = []
    for product in block.equations:
        if isinstance(product.op, Scan) or kind_of(product) != "products":
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
) -> Group:
    inside, moved = {*equations}, []
    made = {value for e in equations for value in e.results}
    left: dict[Var, int] = {}  # of each value from outside, what was not read yet
    seen: set[Var] = set()
    for equation in equations:
        outside = [v for v in equation.results if any(r not in inside for r in readers[v])]
        num_bytes = sum(map(_nbytes, outside))
        lookup = equation.name in _LOOKUPS
        for position, value in enumerate(dict.fromkeys(equation.operands)):
            base = bases.get(value, value)
            if base in made or value in seen:
                continue
            seen.add(value)
            size = sum(map(_nbytes, equation.results)) if lookup and not position else None
            part = min(left.get(base, _nbytes(base)), _nbytes(value) if size is None else size)
            left[base] = left.get(base, _nbytes(base)) - part
            num_bytes += part
        moved.append(num_bytes)
    return Group(tuple(equations), tuple(moved))


def _nbytes(value: Var) -> int:
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


def program_times(
    program: Code, hardware: Hardware, placement: Placement, software: Software = FUNCTRON
) -> Times:
    """The time of a program, and what takes it; kept for programs that were asked for before."""
    axes = {e.args[1] for e, _ in program.block.walk() if axis_of(e) is not None}
    reaches = tuple((axis, placement.reach(axis)) for axis in sorted(axes))
    return _program_times(program, hardware, _Reaches(reaches), software)


@dataclass(frozen=True)
class _Reaches:
    """Where the groups of the axes are that a program communicates over, and no more."""

    known: tuple[tuple[str, Reach], ...]

    def reach(self, axis: str) -> Reach:
        return dict(self.known)[axis]


@functools.lru_cache(maxsize=16384)
def _program_times(
    program: Code, hardware: Hardware, placement: _Reaches | Placement, software: Software
) -> Times:
    found, kernels = run_on(program, hardware, placement, software)
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


def run_on(
    program: Code, hardware: Hardware, placement: _Reaches | Placement, software: Software
) -> tuple[ProgramTimeline, Kernels]:
    """The timeline of a program on a machine, and its kernels."""
    kernels = kernels_of(program, software)

    rates = HardwareRates(hardware, placement, software, program)
    overlap = {"overlap": software.overlap, "prefetch": software.overlap}
    return timeline(kernels.program, rates, **overlap), kernels
