"""The time and memory of a training step on a machine, before it runs, with how sure that is.

`estimate` is of any traced step. `estimate_step` is of steps of any size, made of traced pieces:
microbatches go through the pipeline as its schedule says, and around it come the reductions of
gradients, the update, the gathers of parameters, the processor and the slowest GPU. Every estimate
divides its step into parts that add up to it, by what the rank that computes longest does.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import NamedTuple

from functron.apps.planner.machines import Hardware, RankPlacement
from functron.apps.planner.rates import (
    FUNCTRON,
    Software,
    Times,
    TracedPiece,
    TracedPieces,
    run_program,
    time_program,
)
from functron.core import chart
from functron.core.chart import table
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.models import gpt
from functron.pipeline.partition import Layout, even_layout
from functron.pipeline.registry import make
from functron.pipeline.schedule import Schedule
from functron.pipeline.timeline import Action, Costs, Timeline
from functron.program.cost import bytes_text, count_text
from functron.program.timeline import COMPUTE
from functron.program.trace import Program
from functron.spmd import CONTEXT_AXES, DATA_AXES, FSDP_AXES, Mesh

CONFIDENCE = 0.9
"""The probability that measured steps lie in an estimate's interval, as far as calibration goes."""


class Lane(NamedTuple):
    """Something that a row of the picture does.

    Attributes:
        row: such as ``"rank 0"`` or ``"rank 0, tp"``.
        what: it does.
        start, end: in seconds.
        kind: "F", "B", "I", "W"; "compute"; "hidden" or "exposed" communication; "update".
    """

    row: str
    what: str
    start: float
    end: float
    kind: str


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """The time and memory of a step; it prints as `explain`, and is drawn in notebooks.

    Attributes:
        name: of the step.
        hardware: the machine.
        software: that the program is run by.
        num_gpus: of the mesh.
        tokens: of a step, of all ranks.
        step_seconds: the most likely time.
        parts: of it, by what takes them; they add up to `step_seconds`.
        exposed: by axis, the seconds of communication that nothing hides.
        bubble_seconds: for which the rank waits for others of the pipeline.
        model_flops: of a step on all GPUs, causal attention as half; see `functron.program.cost`.
        model_flops_whole: with causal attention as whole.
        hardware_flops: with all that is computed again.
        memory: of the fullest rank, bytes by category; empty where it was not asked for.
        lanes: the picture.
        notes: what these figures do not see.
    """

    name: str
    hardware: Hardware
    software: Software
    num_gpus: int
    tokens: int
    step_seconds: float
    parts: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble_seconds: float
    model_flops: float
    model_flops_whole: float
    hardware_flops: float
    memory: Mapping[str, int] = field(default_factory=dict)
    lanes: tuple[Lane, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def interval(self) -> tuple[float, float]:
        """Between which seconds a step will lie, with probability `CONFIDENCE`.

        By the spread of the machine's calibration, which is of other model sizes than it had seen.
        """
        z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
        factor = math.exp(z * self.hardware.calibration.spread)
        return self.step_seconds / factor, self.step_seconds * factor

    @property
    def bubble_fraction(self) -> float:
        """The part of the step for which the rank waits for others of the pipeline."""
        return self.bubble_seconds / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.step_seconds

    def _utilisation(self, flops: float) -> float:
        peak = self.hardware.peak_flops.get("bfloat16") or max(self.hardware.peak_flops.values())
        return flops / self.step_seconds / self.num_gpus / peak

    @property
    def mfu(self) -> float:
        """Model FLOPs, causal attention as half, over the bfloat16 peak of all GPUs."""
        return self._utilisation(self.model_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs over the bfloat16 peak of all GPUs."""
        return self._utilisation(self.hardware_flops)

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOPs of a second and GPU, causal attention as whole, as tables have it."""
        return self.model_flops_whole / self.step_seconds / self.num_gpus

    def gpu_hours(self, tokens: float) -> float:
        """GPU hours to train on so many tokens."""
        return tokens / self.tokens_per_second * self.num_gpus / 3600

    def energy_joules(self, tokens: float) -> float:
        """The energy of that, at the power of the machines."""
        return self.gpu_hours(tokens) * 3600 * self.hardware.power_watts

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank; 0 where it was not asked for."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of a GPU."""
        return self.memory_bytes <= self.hardware.memory_bytes

    @property
    def limits(self) -> str:
        """The largest losses, in words."""
        lost = [(x, name) for name, x in self.parts.items() if name != "products"]
        rows = sorted(lost, reverse=True)[:3]
        return ", ".join(f"{name} {x / self.step_seconds:.0%}" for x, name in rows if x > 0)

    def explain(self) -> str:
        """The figures, and the parts that the step's seconds add up from, as text."""
        low, high = self.interval
        head = [
            f"{self.name} on {self.num_gpus:,} x {self.hardware.name}",
            f"step {self.step_seconds:.4g} s ({CONFIDENCE:.0%}: {low:.4g} to {high:.4g} s), "
            f"{self.tokens_per_second:,.0f} tokens/s, MFU {self.mfu:.1%}, HFU {self.hfu:.1%}, "
            f"{count_text(self.flops_per_gpu)}FLOP/s a GPU with whole attention",
            "",
        ]
        rows = [["part", "seconds", "of the step", "made of"]]
        for name, seconds in sorted(self.parts.items(), key=lambda row: -row[1]):
            share = f"{seconds / self.step_seconds:.1%}"
            rows.append([name, f"{seconds:.4g}", share, _MADE_OF.get(name, _OVER)])
        rows.append(["all", f"{sum(self.parts.values()):.4g}", "100.0%", ""])
        lines = [*head, table(rows)]
        if self.memory:
            sizes = [["memory of the fullest rank", "bytes"]]
            sizes += [[name, bytes_text(x)] for name, x in self.memory.items()]
            has = f"{bytes_text(self.memory_bytes)} of {bytes_text(self.hardware.memory_bytes)}"
            lines += ["", table([*sizes, ["all", has]])]
        return "\n".join([*lines, "", *self._remarks()])

    def _remarks(self) -> list[str]:
        made = self.hardware.calibration
        if made.rows:
            seen = f"compared with {made.rows} measured runs of {made.software}"
        else:
            kin = f", efficiencies are those of {made.kin}" if made.kin else ""
            seen = f"never compared with a run{kin}"
        rows = [f"{self.hardware.name}: {seen}; spread {made.spread:.1%}"]
        if self.software.name not in made.software:
            rows.append(
                f"this is {self.software.name}, other software than that of the calibration: the "
                "interval does not know how well it runs"
            )
        return [*rows, *self.notes]

    def svg(self) -> str:
        """The timeline as an SVG picture: a row per rank, or per stream of one."""
        names = list(dict.fromkeys(lane.row for lane in self.lanes))
        boxes = [
            chart.SvgBar(
                names.index(lane.row), lane.start, lane.end, lane.what,
                f"{lane.what}: {lane.end - lane.start:.3g} s", _COLOURS[lane.kind],
            )
            for lane in self.lanes
        ]  # fmt: skip
        kinds = dict.fromkeys(lane.kind for lane in self.lanes)
        legend = [(_KINDS[kind], _COLOURS[kind]) for kind in kinds]
        return chart.gantt_svg(boxes, names, f"{self.name}: {self.step_seconds:.4g} s", legend)

    def chrome_trace(self, path: str | Path) -> None:
        """Write the timeline as a trace that chrome://tracing and Perfetto open, as JSON."""
        names = list(dict.fromkeys(lane.row for lane in self.lanes))
        events: list[dict] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}}
            for i, name in enumerate(names)
        ]
        for lane in self.lanes:
            start, end = round(lane.start * 1e9), round(lane.end * 1e9)  # whole nanoseconds
            row = {"ph": "X", "name": lane.what, "cat": lane.kind, "pid": 0}
            row |= {"tid": names.index(lane.row), "ts": start / 1e3, "dur": (end - start) / 1e3}
            events.append(row)
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        content = {"traceEvents": events, "displayTimeUnit": "ms"}
        unfinished.write_text(json.dumps(content) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def __str__(self) -> str:
        return self.explain()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        picture = self.svg() if self.lanes else ""
        return f"<div><pre>{self.explain()}</pre>{picture}</div>"


_MADE_OF = MappingProxyType(
    {
        "products": "FLOPs over what tiles and waves reach of the peak",
        "attention": "FLOPs over what fused attention reaches of the peak",
        "memory": "bytes that fused kernels read and write over the memory's rate, and launches",
        "bubble": "the schedule's own simulation, or its formula",
        "sends": "of stages of the pipeline to the next",
        "update": "bytes of gradients, moments and masters over the memory's rate",
        "processor": "what a step does between two, and launches that take longer than kernels",
        "slowest GPU": "the expected maximum of so many GPUs' times",
    }
)
_OVER = "bytes over the slowest link, and steps, that nothing hides"
_KINDS = MappingProxyType(
    {
        "F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights",
        "compute": "computed", "hidden": "hidden", "exposed": "exposed", "update": "update",
    }
)  # fmt: skip
_COLOURS = MappingProxyType(
    {
        "F": "hsl(215,60%,66%)", "B": "hsl(135,60%,66%)", "I": "hsl(175,60%,66%)",
        "W": "hsl(35,60%,66%)", "compute": "hsl(215,60%,66%)", "hidden": "hsl(35,60%,76%)",
        "exposed": "hsl(10,70%,50%)", "update": "hsl(280,40%,66%)",
    }
)  # fmt: skip


# --- a traced step


@public
def estimate(
    program: Program,
    hardware: Hardware,
    placement: RankPlacement | None = None,
    *,
    software: Software = FUNCTRON,
    tokens: int = 0,
) -> Estimate:
    """The time and memory of one run of any traced program, such as a whole training step.

    >>> step = ft.trace(make_step(...))(state, batch)
    >>> ft.plan.estimate(step, ft.plan.hardware("h100"))

    Args:
        program: of one rank.
        hardware: the machine.
        placement: of the mesh; None: in its order, so many ranks to a domain as it has GPUs.
        software: what is fused and overlaps.
        tokens: that all ranks train on in a run; 0: not known, and rates of tokens are 0.
    """
    placement = RankPlacement.on(program.mesh, hardware) if placement is None else placement
    software = software.on(hardware)
    times = time_program(program, hardware, placement, software)
    found, _ = run_program(program, hardware, placement, software)
    lanes = []
    for row in found.rows:
        kind = "compute" if row.axis is None else "exposed" if row.exposed else "hidden"
        stream = "computes" if row.stream == COMPUTE else row.stream
        lanes.append(Lane(stream, row.what, row.start, row.end, kind))
    cost, size = program.cost(), program.mesh.size
    parts = _add_surroundings(dict(times.parts), times.kernels, size, hardware, software)
    usage = program.memory()
    return Estimate(
        program.name, hardware, software, size, tokens, sum(parts.values()),
        MappingProxyType(parts), found.exposed, 0.0, cost.model_flops * size,
        cost.model_flops_whole * size, cost.hardware_flops * size,
        MappingProxyType({name: x for name, x in usage.at_peak.items() if x}), tuple(lanes),
    )  # fmt: skip


def _add_surroundings(
    parts: dict[str, float], kernels: float, num_gpus: int, hardware: Hardware, software: Software
) -> dict[str, float]:
    """The parts of a rank's step with those of its processor and of waiting for the slowest."""
    total = sum(parts.values())
    launching = 0.0 if software.graphs else kernels * hardware.host.launch_seconds
    computing = sum(x for name, x in parts.items() if not name.startswith("over "))
    parts["slowest GPU"] = computing * hardware.jitter * _expect_largest(num_gpus)
    parts["processor"] = max(0.0, launching - total) + hardware.host.step_seconds
    return {name: x for name, x in parts.items() if x > 0}


def _expect_largest(count: int) -> float:
    """The expected maximum of so many standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


# --- steps of any size


@dataclass(frozen=True)
class StateBytes:
    """The bytes that a rank keeps for each parameter, besides the parameter.

    Attributes:
        grad: of the sum of gradients.
        optimizer: of moments, and of a master copy where there is one: 12 with both in float32.
        reduce: that gradients travel in between data-parallel ranks; 0: as they are summed.
    """

    grad: int = 4
    optimizer: int = 12
    reduce: int = 0


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A training step of a decoder on a mesh, to be estimated.

    Attributes:
        pieces: of the model, traced with the sizes of `mesh` on all axes that they communicate
            over.
        mesh: of all ranks, in their order, the last axis fastest.
        num_microbatches: of one step.
        schedule: of the pipeline, by the name that `functron.pipeline.make` has.
        chunks: stages of a rank.
        layout: of the layers; None: even.
        zero: 0: every data-parallel rank has all optimizer state; 1: its part; 2: and its part of
            the gradients' sums; 3: and of the parameters, which `trace_pieces` were traced with.
        state: bytes per parameter.
        offload: optimizer state is in the processor's memory.

    Raises:
        ValueError: the mesh is not that of the pieces, or layers, schedule and microbatches do not
            go together.
    """

    pieces: TracedPieces
    mesh: Mesh
    num_microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1
    layout: Layout | None = None
    zero: int = 0
    state: StateBytes = StateBytes()
    offload: bool = False

    def __post_init__(self):
        traced = self.pieces.mesh
        used = {axis for piece in self.all_pieces for p in piece.programs for axis in _axes(p)}
        split = () if self.pieces.gather == "step" else FSDP_AXES
        found = [
            Problem(f"mesh.{axis}", str(self.mesh[axis]), f"{traced[axis]}, as it was traced")
            for axis in sorted({*used, "tp", *CONTEXT_AXES, "ep", *split} & {*traced.axis_names})
            if self.mesh[axis] != traced[axis] and axis != "dp"
        ]
        if self.num_microbatches < 1:
            found.append(Problem("num_microbatches", str(self.num_microbatches), "at least 1"))
        if self.zero not in (0, 1, 2, 3):
            found.append(Problem("zero", str(self.zero), "0, 1, 2 or 3"))
        raise_problems("this step cannot be estimated", found)
        if not self.pieces.split and _is_split(self):
            got, fix = f"{self.schedule} with whole backwards", "trace pieces(..., split=True)"
            refuse("this step cannot be estimated", "pieces", got, "backwards in two", fix)
        _ = self.stages  # whether the layers can be laid out

    @property
    def all_pieces(self) -> list[TracedPiece]:
        """Every piece once."""
        return [*(p for p, _ in self.pieces.layers.values()), self.pieces.embed, self.pieces.head]

    @property
    def num_ranks(self) -> int:
        """Of the pipeline."""
        return self.mesh["pp"]

    @functools.cached_property
    def stages(self) -> tuple[list[tuple[TracedPiece, int]], ...]:
        """The pieces of each stage, and how often it has them."""
        layers = self.pieces.config.num_layers
        layout = self.layout or even_layout(self.num_stages, layers)
        return tuple(self.pieces.of(part) for part in layout)

    def held_by(self, rank: int) -> list[tuple[TracedPiece, int]]:
        """The pieces of a rank of the pipeline, over all of its stages."""
        return [row for stage in self.stages_of(rank) for row in self.stages[stage]]

    def num_params(self, rank: int) -> tuple[int, int, int]:
        """Of a rank of the pipeline: all, those of experts that data axes divide, and the bytes."""
        rows = self.held_by(rank)
        whole = sum(piece.num_params * n for piece, n in rows)
        experts = sum(piece.num_expert_params * n for piece, n in rows)
        num_bytes = sum(piece.param_bytes * n for piece, n in rows)
        ends = [piece for piece, _ in rows if not piece.part.layers]
        if self.pieces.config.tied and len(ends) == 2:  # which have one matrix in common
            embed = self.pieces.embed
            shared = min(embed.num_params, self.pieces.head.num_params)
            shared -= shared % self.pieces.config.embed_dim  # without the norm and positions
            whole, num_bytes = (
                whole - shared,
                num_bytes - shared * embed.param_bytes // embed.num_params,
            )
        return whole, experts, num_bytes

    @property
    def num_stages(self) -> int:
        """Of the pipeline, over all ranks and chunks."""
        if self.schedule in _ROUND:
            return self.num_ranks * self.chunks
        return _table_of(self).num_stages

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, over all of its chunks."""
        if self.schedule in _ROUND:
            return [chunk * self.num_ranks + rank for chunk in range(self.chunks)]
        table = _table_of(self)
        return [table.stage_of(rank, chunk)[1] for chunk in range(table.num_chunks)]

    @property
    def num_pipes(self) -> int:
        """How many times all layers are held: by DualPipe twice, for half of the microbatches."""
        return 1 if self.schedule in _ROUND else len(_table_of(self).pipes)

    @property
    def data_size(self) -> int:
        """Ranks that have the same parameters, but for those of experts, and other tokens."""
        return math.prod(self.mesh[axis] for axis in _REDUCED_OVER)

    @property
    def samples(self) -> int:
        """Of a step."""
        data = math.prod(self.mesh[axis] for axis in DATA_AXES)
        return self.pieces.rows * self.num_microbatches * data


_REDUCED_OVER = (*DATA_AXES, *CONTEXT_AXES)


def _axes(program: Program) -> set[str]:
    return {row.axis for row in program.cost().collectives}


_ROUND = ("gpipe", "1f1b", "eager-1f1b", "interleaved")
"""Schedules whose stages go round the ranks, chunk after chunk, and that have a formula."""


def _is_split(step: PlannedStep) -> bool:
    """Whether the schedule has the two parts of backward apart."""
    if step.schedule in _ROUND:
        return False
    return any(a.kind in "IW" for row in _table_of(step).table for cell in row for a in cell)


def _table_of(step: PlannedStep) -> Schedule:
    few = _count_repeating(step.schedule, step.num_ranks, step.num_microbatches)
    return _table(step.schedule, step.num_ranks, few, step.chunks)


@public
def estimate_memory(step: PlannedStep, software: Software = FUNCTRON) -> Mapping[str, int]:
    """The bytes of the fullest rank of the pipeline in a step, by category, without any times.

    ``parameters``, ``gradients`` (their sums), ``optimizer``, ``activations`` (as many microbatches
    as the schedule keeps alive) and ``workspace`` (of the largest piece). What the runtime and its
    libraries take is not in it: `Hardware.memory_bytes` leaves room for that.
    """
    ranks = {*range(min(step.num_ranks, 2)), step.num_ranks - 1}
    found = [_rank_memory(step, rank) for rank in sorted(ranks)]
    return MappingProxyType(max(found, key=lambda row: sum(row.values())))


def _rank_memory(step: PlannedStep, rank: int) -> dict[str, int]:
    rows, state = step.held_by(rank), step.state
    whole, experts, params = step.num_params(rank)
    own = _count_owned(step, whole, experts)
    gradients = state.grad * (own if step.zero >= 2 else whole)
    if step.num_ranks == step.num_microbatches == 1:
        at_peak = max(_walk_backward(rows, gradients), key=sum)
    else:
        live = _count_live(step.schedule, step.num_ranks, step.num_microbatches, step.chunks, rank)
        each = sum(piece.held_bytes[0] * n for piece, n in rows if piece is not step.pieces.head)
        head = sum(piece.held_bytes[0] * n for piece, n in rows if piece is step.pieces.head)
        activations = live * each / len(step.stages_of(rank)) + head
        at_peak = gradients, activations, max(piece.working_bytes for piece, _ in rows)
    gradients, activations, workspace = map(round, at_peak)
    return {
        "parameters": params,
        "gradients": gradients,
        "optimizer": 0 if step.offload else round(state.optimizer * own),
        "activations": activations,
        "workspace": workspace,
    }


def _walk_backward(
    rows: Sequence[tuple[TracedPiece, int]], gradients: float
) -> Iterator[tuple[float, float, float]]:
    """Bytes of gradients, activations and workspace while each piece goes back, the last one first.

    Gradients of a step's only microbatch are made as the activations before them are freed.
    """
    made, held = 0.0, float(sum(piece.held_bytes[0] * n for piece, n in rows))
    each = gradients / sum(piece.num_params * n for piece, n in rows)
    for piece, n in reversed(rows):
        yield made, held, piece.working_bytes
        made += each * piece.num_params * (n - 1)
        held -= piece.held_bytes[0] * (n - 1)
        yield made, held, piece.working_bytes
        made += each * piece.num_params
        held -= piece.held_bytes[0]


def _count_owned(step: PlannedStep, whole: int, experts: int) -> float:
    """Of the parameters of a rank those that it keeps optimizer state of."""
    split = 1 if step.pieces.gather == "step" else math.prod(step.pieces.mesh[a] for a in FSDP_AXES)
    over = step.data_size if step.zero else step.mesh["fsdp"]
    of_experts = step.data_size // step.mesh["ep"] if step.zero else step.mesh["fsdp"]
    return (whole - experts) / max(1, over / split) + experts / max(1, of_experts / split)


@functools.lru_cache(maxsize=4096)
def _count_live(schedule: str, p: int, m: int, v: int, rank: int) -> int:
    """The most stages' activations of microbatches that a rank keeps at a time."""
    if p == 1:
        return v
    if schedule == "1f1b":
        return min(m, p - rank)
    if schedule in ("gpipe", "breadth-first"):
        return m * v
    if schedule == "interleaved":
        return min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
    return _table(schedule, p, _count_repeating(schedule, p, m), v).peak_live(rank)


@functools.lru_cache(maxsize=64)
def _table(schedule: str, p: int, m: int, v: int) -> Schedule:
    return make(schedule, p, m, v if v > 1 else None)


def _count_repeating(schedule: str, p: int, m: int) -> int:
    """So many microbatches that a schedule of more repeats itself."""
    every = 2 * p  # DualPipe takes microbatches in pairs
    return m if m <= 2 * every else every + m % every


@public
def estimate_step(
    step: PlannedStep,
    hardware: Hardware,
    *,
    placement: RankPlacement | None = None,
    software: Software = FUNCTRON,
    exact: bool = True,
) -> Estimate:
    """The time and memory of a training step, by its pieces.

    Args:
        step: the step.
        hardware: the machine.
        placement: of the mesh; None: in its order, so many ranks to a domain as it has GPUs.
        software: what is fused and overlaps.
        exact: simulate the pipeline, and draw it; False: by the formulas of uniform stages where
            the schedule has one, in about a millisecond.
    """
    placement = RankPlacement.on(step.mesh, hardware) if placement is None else placement
    software = software.on(hardware)
    timed = _StepTimes(step, hardware, placement, software)
    rank = max(range(step.num_ranks), key=lambda r: timed.busy(r).seconds)
    busy = timed.busy(rank)
    total, lanes = timed.pipeline(rank, exact)
    parts = {name: x * step.num_microbatches for name, x in busy.parts.items()}
    parts["bubble"] = total - busy.seconds * step.num_microbatches
    timed.around(parts, rank)
    launched = busy.kernels * step.num_microbatches
    parts = _add_surroundings(parts, launched, step.mesh.size, hardware, software)
    flops = _step_flops(step)
    exposed: dict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        if name.startswith("over "):
            exposed[name.removeprefix("over ")] += seconds
    samples = step.samples
    title = f"{samples:,} samples of {step.pieces.seq:,} tokens on {step.mesh or 'one GPU'}"
    lanes = _with_update(lanes, total, sum(parts.values()))
    return Estimate(
        title, hardware, software, step.mesh.size, samples * step.pieces.seq,
        sum(parts.values()), MappingProxyType(parts), MappingProxyType(dict(exposed)),
        parts.get("bubble", 0.0), *flops, estimate_memory(step, software), tuple(lanes),
        tuple(_notes(step, lanes)),
    )  # fmt: skip


def _notes(step: PlannedStep, lanes: Sequence[Lane]) -> Iterator[str]:
    """Notes on what an estimate of a step does not see."""
    config = step.pieces.config
    shown = len({lane.what for lane in lanes if lane.kind == "F"})
    of = step.num_microbatches * step.num_stages // step.num_ranks
    if lanes and shown < of:
        yield f"the picture has {shown:,} of {of:,} forwards of a rank"
    if config.moe is not None:
        yield "experts get equally many tokens"
    if config.score_cap:
        yield "attention with a cap on its scores is that of CPUs: the formula, in chunks"


def _step_flops(step: PlannedStep) -> tuple[float, float, float]:
    """Model FLOPs with half and whole attention, and hardware FLOPs, of all ranks."""
    config, seq = step.pieces.config, step.pieces.seq
    tokens = step.samples * seq
    half, whole = (gpt.flops_per_token(config, seq, whole=x) * tokens for x in (False, True))
    rows = [row for stage in step.stages for row in stage]
    each = sum(piece.hardware_flops * n for piece, n in rows)
    return half, whole, each * step.num_microbatches * step.mesh.size / step.num_ranks


def _with_update(lanes: Sequence[Lane], pipeline: float, total: float) -> list[Lane]:
    """The lanes with what comes around the pipeline, behind it."""
    rows = dict.fromkeys(lane.row for lane in lanes)
    shown = max((lane.end for lane in lanes), default=0.0)
    return [*lanes, *(Lane(r, "update", shown, shown + total - pipeline, "update") for r in rows)]


@dataclass(frozen=True, eq=False)
class _StepTimes:
    """The times of a step's stages on a machine."""

    step: PlannedStep
    hardware: Hardware
    placement: RankPlacement
    software: Software

    @functools.cached_property
    def stages(self) -> list[list[Times]]:
        """By stage the times of its programs, with sends that it waits for."""
        known: dict[tuple, list[Times]] = {}
        found = []
        last = len(self.step.stages) - 1
        for number, rows in enumerate(self.step.stages):
            ends = (number == 0, number == last)
            key = (tuple((id(piece), count) for piece, count in rows), ends)
            if key not in known:
                known[key] = self._stage(rows, ends)
            found.append(known[key])
        return found

    def _stage(
        self, rows: Sequence[tuple[TracedPiece, int]], ends: tuple[bool, bool]
    ) -> list[Times]:
        made = []
        for index in range(len(rows[0][0].programs)):
            each = [(self._measure_times(piece, index), n) for piece, n in rows]
            parts: dict[str, float] = defaultdict(float)
            for times, n in each:
                for name, seconds in times.parts.items():
                    parts[name] += seconds * n
            # what is sent: forward by all but the last stage, backward by all but the first
            sends = index < 2 and not (ends[1] if index == 0 else ends[0])
            if sends and not self.software.async_sends and self.step.num_ranks > 1:
                parts["sends"] += self.transfer
            kernels = sum(times.kernels * n for times, n in each)
            made.append(Times(sum(parts.values()), parts, kernels, {}))
        return made

    def _measure_times(self, piece: TracedPiece, index: int) -> Times:
        """Of a piece; parameters of the next layer are gathered, and gradients of the last one
        scattered, while this one is computed."""
        program = piece.programs[index]
        found = time_program(program, self.hardware, self.placement, self.software)
        behind = self.software.overlap and self.step.pieces.gather != "step"
        if not behind or not piece.part.layers:
            return found
        parts = dict(found.parts)
        for axis in FSDP_AXES:
            if f"over {axis}" in parts:
                rest = max(0.0, found.sent[axis] - found.computing)
                parts[f"over {axis}"] = min(parts[f"over {axis}"], rest)
        return replace(found, seconds=sum(parts.values()), parts=parts)

    @functools.cached_property
    def transfer(self) -> float:
        """Seconds from the end of an action to where its result is needed."""
        step, hardware = self.step, self.hardware
        if step.num_ranks == 1:
            return 0.0
        num_bytes = max(piece.sent_bytes for piece in step.all_pieces)
        reach = self.placement.reach("pp")
        tp = self.placement.reach("tp")
        if not self.software.scatter_sends or tp.size == 1 or "tp" in _stream_axes(step):
            return hardware.collective_seconds("ppermute", num_bytes, reach)
        sent = hardware.collective_seconds("ppermute", num_bytes / tp.size, reach)
        return sent + hardware.collective_seconds("all_gather", num_bytes, tp)

    def busy(self, rank: int) -> Times:
        """The work of a rank of the pipeline for one microbatch."""
        parts: dict[str, float] = defaultdict(float)
        kernels, pipes = 0, self.step.num_pipes
        for stage in self.step.stages_of(rank):
            for times in self.stages[stage]:
                kernels += times.kernels
                for name, seconds in times.parts.items():
                    parts[name] += seconds / pipes
        return Times(sum(parts.values()), parts, round(kernels / pipes), {})

    def _of(self, rank: int, index: int) -> float:
        """Seconds of all forwards (0) or backwards of a microbatch on a rank."""
        stages = [self.stages[stage] for stage in self.step.stages_of(rank)]
        which = slice(0, 1) if index == 0 else slice(1, None)
        return sum(times.seconds for stage in stages for times in stage[which])

    # --- the pipeline

    def pipeline(self, slowest: int, exact: bool) -> tuple[float, list[Lane]]:
        """Seconds from the first forward to the last backward, and the picture."""
        step = self.step
        m, p, v = step.num_microbatches, step.num_ranks, step.chunks
        if p == 1:
            lanes = self._draw_one_rank(m) if exact else []
            return m * self.busy(0).seconds, lanes
        formula = self._formula(slowest)
        if formula is not None and (not exact or p * m * v > _LARGEST):
            return formula, []
        few = m if p * m * v <= _LARGEST else _count_repeating(step.schedule, p, m)
        schedule = _table(step.schedule, p, few, v)
        found = schedule.simulate(self._costs())
        lanes = _draw_lanes(found)
        if few == m:
            return found.total, lanes
        more = _table(step.schedule, p, few + 2 * p, v).simulate(self._costs())
        return found.total + (more.total - found.total) / (2 * p) * (m - few), lanes

    def _draw_one_rank(self, m: int) -> list[Lane]:
        lanes, now = [], 0.0
        stage = [times for each in self.stages for times in each]
        for microbatch in range(min(m, 16)):
            for kind, times in zip("FB" if len(stage) == 2 else "FIW", stage, strict=False):
                end = now + times.seconds
                lanes.append(Lane("rank 0", f"{kind}{microbatch}", now, end, kind))
                now = end
        return lanes

    def _costs(self) -> Costs:
        columns = [[t.seconds for t in stage] for stage in self.stages]
        transfer = self.transfer if self.software.async_sends else 0.0
        if len(columns[0]) == 3:
            forward, inner, weights = zip(*columns, strict=True)
            return Costs(forward, None, inner, weights, transfer)
        forward, backward = zip(*columns, strict=True)
        return Costs(forward, backward, transfer=transfer)

    def _formula(self, slowest: int) -> float | None:
        """The total by the schedule's critical path; None where there is no formula for it.

        One microbatch goes through all ranks, and every further one takes as long as the slowest:
        or, under 1F1B, as long as the way of p microbatches to the last rank and back takes, where
        transfers make that longer. With v chunks others are waited for 1 / v as long.
        """
        step = self.step
        m, p, v = step.num_microbatches, step.num_ranks, step.chunks
        if step.schedule not in _ROUND:
            return None
        each = [self.busy(rank).seconds for rank in range(p)]
        wait = 2 * self.transfer if self.software.async_sends else 0.0
        first = each[slowest] + (sum(each) - each[slowest]) / v + wait * (v * p - 1)
        around = sum(each) + wait * (p - 1) if step.schedule == "1f1b" else 0.0
        return first + (m - 1) * max(each[slowest], around / p)

    # --- around the pipeline

    def around(self, parts: dict[str, float], rank: int) -> None:
        """Add what a step does besides its microbatches."""
        step, hardware = self.step, self.hardware
        rows = step.held_by(rank)
        whole, experts, num_bytes = step.num_params(rank)
        params = num_bytes / max(whole, 1)
        layers = max(1, sum(n for piece, n in rows if piece.part.layers))
        for axes, count in ((_REDUCED_OVER, whole - experts), (_list_axes_of_dense(), experts)):
            self._add_reductions(parts, axes, count, params, layers, rank)
        self._add_tied_embedding(parts)
        own = _count_owned(step, whole, experts)
        state = step.state
        moved = own * (state.grad + params + (0 if step.offload else 2 * state.optimizer))
        moved += 2 * state.grad * (own if step.zero >= 2 else whole)  # zeroed, and the norm's
        parts["update"] = hardware.memory_seconds(moved)
        if step.offload:
            over = 2 * own * state.optimizer / hardware.host.bytes_per_second
            parts["update"] += over / 2  # both directions at a time

    def _add_reductions(
        self,
        parts: dict[str, float],
        axes: tuple[str, ...],
        count: float,
        param_bytes: float,
        layers: int,
        rank: int,
    ) -> None:
        """The reductions of gradients over data-parallel ranks, and the gathers of parameters."""
        step, hardware, software = self.step, self.hardware, self.software
        inside = step.pieces.gather != "step"
        axes = tuple(a for a in axes if step.mesh[a] > 1)
        axes = tuple(a for a in axes if not (inside and step.pieces.mesh[a] > 1 and a in FSDP_AXES))
        if not axes or not count:
            return
        reach, state = self.placement.reach(axes), step.state
        num_bytes = count * (state.reduce or state.grad)
        name = f"over {'+'.join(axes)}"
        divided = step.zero > 0 or ("fsdp" in axes and not inside)
        op = "psum_scatter" if divided else "psum"
        reduced = hardware.collective_seconds(op, num_bytes, reach)
        last = self._of(rank, 1) * self._ahead
        parts[name] = parts.get(name, 0.0) + _hide_behind(
            reduced, last if software.overlap_grads else 0.0, layers
        )
        if step.zero == 2:  # every microbatch's are divided at once
            window = self._of(rank, 1) if software.overlap_grads else 0.0
            parts[name] += (step.num_microbatches - 1) * _hide_behind(reduced, window, layers)
        if divided:
            gathered = hardware.collective_seconds("all_gather", count * param_bytes, reach)
            first = self._of(rank, 0) * self._ahead
            parts[name] += _hide_behind(gathered, first if software.overlap_params else 0.0, layers)

    @property
    def _ahead(self) -> float:
        """How many microbatches are computed while gradients are reduced, and parameters gathered.

        The last one; with chunks, gradients of the last chunk are there when p microbatches of the
        other chunks are still to come.
        """
        step = self.step
        if step.schedule != "interleaved":
            return 1.0
        few = min(step.num_ranks, step.num_microbatches)
        return (few * (step.chunks - 1) + 1) / step.chunks

    def _add_tied_embedding(self, parts: dict[str, float]) -> None:
        """The sum of the gradients of an embedding that two stages have."""
        step, config = self.step, self.step.pieces.config
        if not config.tied or step.num_ranks == 1:
            return
        shared = config.padded_vocab * config.embed_dim / step.mesh["tp"]
        reach = replace(self.placement.reach("pp"), size=2)
        reach = replace(reach, per_domain=min(2, reach.per_domain))
        num_bytes = shared * (step.state.reduce or step.state.grad)
        parts["over pp"] = self.hardware.collective_seconds("psum", num_bytes, reach)


def _draw_lanes(found: Timeline) -> list[Lane]:
    """The actions of a pipeline; those of one cell one after the other, each for its share."""
    cells: dict[tuple[int, float, float], list[Action]] = defaultdict(list)
    for row in found.rows:
        cells[row.rank, row.start, row.end].append(row.action)
    lanes = []
    for (rank, start, end), actions in cells.items():
        each = (end - start) / len(actions)
        for i, action in enumerate(actions):
            at = start + i * each
            lanes.append(Lane(f"rank {rank}", str(action), at, at + each, action.kind))
    return lanes


_LARGEST = 6000
"""Actions of a table that is simulated whole."""


def _list_axes_of_dense() -> tuple[str, ...]:
    return tuple(axis for axis in _REDUCED_OVER if axis != "ep")


def _stream_axes(step: PlannedStep) -> tuple[str, ...]:
    entry = step.pieces.options.stream[1]
    return entry if isinstance(entry, tuple) else (entry,)


def _hide_behind(seconds: float, window: float, layers: int) -> float:
    """The exposed seconds of communication, layer by layer, behind `window` seconds of work.

    What the last layer sends nothing hides.
    """
    return max(seconds - window * (1 - 1 / layers), seconds / layers) if window else seconds
