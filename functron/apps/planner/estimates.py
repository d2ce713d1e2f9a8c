"""Estimates of the time and memory of a training step on a machine, with their uncertainty.

`estimate` is for any traced step. `estimate_step` composes steps of any size from traced pieces:
microbatches go through the pipeline by its schedule, before and after which are the reductions of
gradients, the update, the gathers of parameters, the CPU's overhead, and the wait for the slowest
GPU. The parts of an estimate are those of the rank that computes longest, and add up to the step.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType

from functron import pipeline
from functron.apps.planner.machines import Hardware, RankPlacement
from functron.apps.planner.rates import (
    ExpertLoad,
    Times,
    TracedPiece,
    TracedPieces,
    run_program,
    stream_axes,
    time_program,
)
from functron.apps.planner.report import Estimate, Lane, list_doubts
from functron.apps.planner.software import FUNCTRON, Software
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.models import gpt
from functron.program.timeline import COMPUTE
from functron.program.trace import Program
from functron.spmd import CONTEXT_AXES, DATA_AXES, FSDP_AXES, Mesh
from functron.training.rooms import EXPERT_ROOM, MARGIN

# --- a traced step


@public
def estimate(
    program: Program,
    hardware: Hardware,
    *,
    software: Software = FUNCTRON,
    tokens: int = 0,
) -> Estimate:
    """Estimate the time and memory of any traced program, such as a whole training step.

    >>> step = ft.trace(make_step(...))(state, batch)
    >>> ft.plan.estimate(step, ft.plan.hardware("h100"))

    Args:
        tokens: of all ranks; 0: unknown, and rates of tokens are 0.
    """
    placement = RankPlacement.on(program.mesh, hardware)
    software, hardware = software.on(hardware), software.adjust(hardware)
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
        doubts=list_doubts(hardware, software, quantised=is_quantised(program)), sent=times.sent,
    )  # fmt: skip


def _add_surroundings(
    parts: dict[str, float], kernels: float, num_gpus: int, hardware: Hardware, software: Software
) -> dict[str, float]:
    """The parts of a rank's step, with the CPU's overhead and the wait for the slowest GPU."""
    total = sum(parts.values())
    launching = 0.0 if software.graphs else kernels * hardware.host.launch_seconds
    computing = sum(x for name, x in parts.items() if not name.startswith("over "))
    parts["slowest GPU"] = computing * hardware.jitter * _expect_largest(num_gpus)
    parts["processor"] = max(0.0, launching - total) + hardware.host.step_seconds
    return {name: x for name, x in parts.items() if x > 0}


def _expect_largest(count: int) -> float:
    """The expected maximum of `count` standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


# --- steps of any size


@dataclass(frozen=True)
class StateBytes:
    """Bytes of training state per parameter, besides the parameter itself.

    Attributes:
        grad: of the accumulated gradient.
        optimizer: of moments and master copy: 12 in float32.
        reduce: of gradients between data-parallel ranks; 0: as accumulated.
    """

    grad: int = 4
    optimizer: int = 12
    reduce: int = 0


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A training step of a decoder, in traced pieces.

    Settings are those of `functron.training.config.ParallelismConfig`; unlike a configuration, a
    step may be of any software, such as Megatron-LM.

    Attributes:
        pieces: of the model, traced on axes of the same sizes.
        mesh: of all ranks, the last axis fastest.
        num_microbatches, schedule, zero: as configured; ZeRO-3 must be in the pieces, too.
        chunks: stages per pipeline rank.
        layout: layers of the stages; None: even.
        state: bytes per parameter.
        offload: optimizer state is in host memory.

    Raises:
        ValueError: the mesh is not that of the pieces, or layers, schedule and microbatches do not
            fit together.
    """

    pieces: TracedPieces
    mesh: Mesh
    num_microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1
    layout: pipeline.Layout | None = None
    zero: int = 0
    state: StateBytes = StateBytes()
    offload: bool = False

    def __post_init__(self):
        traced = self.pieces.mesh
        used = {axis for piece in self.all_pieces for p in piece.programs for axis in _list_axes(p)}
        split = () if self.pieces.gather == "step" else FSDP_AXES
        found = [
            Problem(f"mesh.{axis}", str(self.mesh[axis]), f"{traced[axis]}, as it was traced")
            for axis in sorted(
                {*used, "tp", *CONTEXT_AXES, "ep_node", "ep", *split} & {*traced.axis_names}
            )
            if self.mesh[axis] != traced[axis] and axis != "dp"
        ]
        if self.num_microbatches < 1:
            found.append(Problem("num_microbatches", str(self.num_microbatches), "at least 1"))
        if self.zero not in (0, 1, 2, 3):
            found.append(Problem("zero", str(self.zero), "0, 1, 2 or 3"))
        raise_problems("this step cannot be estimated", found)
        if not self.pieces.split and _is_split(self):
            got, fix = f"{self.schedule} with one backward", "trace_pieces(..., split=True)"
            refuse("this step cannot be estimated", "pieces", got, "backwards in two", fix)
        _ = self.stages  # checks the layout

    @property
    def all_pieces(self) -> list[TracedPiece]:
        """Every piece once."""
        return [*(p for p, _ in self.pieces.layers.values()), self.pieces.embed, self.pieces.head]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.mesh["pp"]

    @functools.cached_property
    def stages(self) -> tuple[list[tuple[TracedPiece, int]], ...]:
        """The pieces of each stage, with counts."""
        layers = self.pieces.config.num_layers
        layout = self.layout or pipeline.even_layout(self.num_stages, layers)
        return tuple(self.pieces.of(part) for part in layout)

    def held_by(self, rank: int) -> list[tuple[TracedPiece, int]]:
        """The pieces of a pipeline rank, with counts."""
        return [row for stage in self.stages_of(rank) for row in self.stages[stage]]

    def num_params(self, rank: int) -> tuple[int, int, int]:
        """Parameters of a pipeline rank: all, those of sharded experts, and bytes of all."""
        rows = self.held_by(rank)
        whole = sum(piece.num_params * n for piece, n in rows)
        experts = sum(piece.num_expert_params * n for piece, n in rows)
        num_bytes = sum(piece.param_bytes * n for piece, n in rows)
        ends = [piece for piece, _ in rows if not piece.part.layers]
        if self.pieces.config.tied and len(ends) == 2:  # share one matrix
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
        """Stages of the pipeline."""
        if self.schedule in _ROUND:
            return self.num_ranks * self.chunks
        return _find_table(self).num_stages

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank."""
        if self.schedule in _ROUND:
            return [chunk * self.num_ranks + rank for chunk in range(self.chunks)]
        table = _find_table(self)
        return [table.stage_of(rank, chunk)[1] for chunk in range(table.num_chunks)]

    @property
    def imbalance(self) -> float:
        """The rows on the fullest rank's experts, times the balanced ones, which others wait for.

        Those that the room for them is learned from; without one, as many as of the default one.
        """
        return (self.pieces.options.expert_room or EXPERT_ROOM) / MARGIN

    @property
    def num_pipes(self) -> int:
        """Copies of all layers: DualPipe has two, for half of the microbatches each."""
        return 1 if self.schedule in _ROUND else len(_find_table(self).pipes)

    @property
    def data_size(self) -> int:
        """Data-parallel ranks, with those of context parallelism."""
        return math.prod(self.mesh[axis] for axis in _REDUCED_OVER)

    @property
    def samples(self) -> int:
        """Samples per step."""
        data = math.prod(self.mesh[axis] for axis in DATA_AXES)
        return self.pieces.rows * self.num_microbatches * data


_REDUCED_OVER = (*DATA_AXES, *CONTEXT_AXES)


def _list_axes(program: Program) -> set[str]:
    return {row.axis for row in program.cost().collectives}


_ROUND = ("gpipe", "1f1b", "eager-1f1b", "interleaved")
"""Schedules with a formula, whose stages are on ranks round-robin."""


def _is_split(step: PlannedStep) -> bool:
    if step.schedule in _ROUND:
        return False
    return any(a.kind in "IW" for row in _find_table(step).table for cell in row for a in cell)


def _find_table(step: PlannedStep) -> pipeline.Schedule:
    few = _count_repeating(step.schedule, step.num_ranks, step.num_microbatches)
    return _make_table(step.schedule, step.num_ranks, few, step.chunks)


@public
def estimate_memory(step: PlannedStep) -> Mapping[str, int]:
    """The bytes of the fullest pipeline rank in a step, by category.

    ``parameters``, ``gradients`` (accumulated), ``optimizer``, ``activations`` (of the microbatches
    that the schedule keeps alive) and ``workspace`` (of the largest piece, and what other stages
    send). Memory of the runtime and libraries is not in it, nor in `Hardware.memory_bytes`.
    """
    ranks = {*range(min(step.num_ranks, 2)), step.num_ranks - 1, _find_deepest(step)}
    if step.schedule not in _ROUND:  # gradients of weights may wait on any rank
        ranks = {*range(step.num_ranks)}
    found = [_rank_memory(step, rank) for rank in sorted(ranks)]
    return MappingProxyType(max(found, key=lambda row: sum(row.values())))


def _find_deepest(step: PlannedStep) -> int:
    """The first pipeline rank that has the most layers."""
    each = [sum(n for piece, n in stage if piece.part.layers) for stage in step.stages]
    return max(
        range(step.num_ranks), key=lambda rank: sum(each[stage] for stage in step.stages_of(rank))
    )


def _rank_memory(step: PlannedStep, rank: int) -> dict[str, int]:
    rows, state = step.held_by(rank), step.state
    whole, experts, params = step.num_params(rank)
    own = _count_owned(step, whole, experts)
    gradients = state.grad * (own if step.zero >= 2 else whole)
    if step.num_ranks == step.num_microbatches == 1:
        at_peak = max(_walk_backward(rows, gradients), key=sum)
    else:
        counts = step.schedule, step.num_ranks, step.num_microbatches, step.chunks
        activations = max(_hold(step, rank, *held) for held in _list_held(*counts, rank))
        received = _count_arriving(*counts, rank) * max(piece.sent_bytes for piece, _ in rows)
        working = max(piece.working_bytes for piece, _ in rows)
        at_peak = gradients, activations, working + received
    gradients, activations, workspace = map(round, at_peak)
    return {
        "parameters": params,
        "gradients": gradients,
        "optimizer": 0 if step.offload else round(state.optimizer * own),
        "activations": activations,
        "workspace": workspace,
    }


def _hold(step: PlannedStep, rank: int, whole: int, late: int) -> float:
    """Bytes of a rank's activations that wait for backward, and that wait for W alone."""
    share = 1 / len(step.stages_of(rank))
    # backward begins with the head, right after forward where the schedule can
    num_heads = whole * share if step.schedule in _WAITING else min(whole, 1)
    return sum(
        n * piece.held_bytes[0] * (num_heads if piece is step.pieces.head else whole * share)
        + n * piece.held_bytes[-1] * late * share
        for piece, n in step.held_by(rank)
    )


def _walk_backward(
    rows: Sequence[tuple[TracedPiece, int]], gradients: float
) -> Iterator[tuple[float, float, float]]:
    """Bytes of gradients, activations and workspace during the backward of each piece, in order.

    With one microbatch, gradients are allocated while activations are freed.
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
    """Parameters of a rank whose optimizer state it has."""
    split = 1 if step.pieces.gather == "step" else math.prod(step.pieces.mesh[a] for a in FSDP_AXES)
    over = step.data_size if step.zero else step.mesh["fsdp"]
    apart = math.prod(step.mesh[a] for a in step.pieces.options.expert_axes if a in _REDUCED_OVER)
    of_experts = step.data_size // apart if step.zero else step.mesh["fsdp"]
    return (whole - experts) / max(1, over / split) + experts / max(1, of_experts / split)


_WAITING = ("gpipe", "breadth-first")
"""Schedules with all forwards before all backwards."""


@functools.lru_cache(maxsize=4096)
def _list_held(schedule: str, p: int, m: int, v: int, rank: int) -> frozenset[tuple[int, int]]:
    """The activations, of a microbatch and stage each, that a rank keeps: see `list_held`."""
    whole = {
        "1f1b": min(m, p - rank),
        **dict.fromkeys(_WAITING, m * v),
        "interleaved": min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1),
    }
    if p == 1 or schedule in whole:
        return frozenset({(v if p == 1 else whole[schedule], 0)})
    table = _make_table(schedule, p, _count_repeating(schedule, p, m), v)
    return frozenset(table.list_held(rank))


@functools.lru_cache(maxsize=4096)
def _count_arriving(schedule: str, p: int, m: int, v: int, rank: int) -> int:
    """The most values of other ranks that a rank has room for at a time."""
    if p == 1:
        return 0
    if schedule in _ROUND:  # the fullest rank is among the first
        return 3 if schedule in ("eager-1f1b", "interleaved") else 2
    return _make_table(schedule, p, _count_repeating(schedule, p, m), v).peak_arriving(rank)


@functools.lru_cache(maxsize=64)
def _make_table(schedule: str, p: int, m: int, v: int) -> pipeline.Schedule:
    return pipeline.make(schedule, p, m, v if v > 1 else None)


def _count_repeating(schedule: str, p: int, m: int) -> int:
    """A number of microbatches after which a schedule repeats itself."""
    every = 2 * p  # DualPipe takes microbatches in pairs
    return m if m <= 2 * every else every + m % every


@public
def estimate_step(
    step: PlannedStep,
    hardware: Hardware,
    *,
    software: Software = FUNCTRON,
    exact: bool = True,
) -> Estimate:
    """Estimate the time and memory of a training step, by its pieces.

    Args:
        exact: simulate and draw the pipeline; False: use a formula of uniform stages if the
            schedule has one, in about a millisecond.
    """
    placement = RankPlacement.on(step.mesh, hardware)
    software, hardware = software.on(hardware), software.adjust(hardware)
    timed = _StepTimes(step, hardware, placement, software)
    rank = max(range(step.num_ranks), key=lambda r: timed.busy(r).seconds)
    busy = timed.busy(rank)
    total, lanes = timed.time_pipeline(rank, exact)
    parts = {name: x * step.num_microbatches for name, x in busy.parts.items()}
    parts["bubble"] = total - busy.seconds * step.num_microbatches
    sent: dict[str, float] = defaultdict(float)
    sent |= {axis: x * step.num_microbatches for axis, x in busy.sent.items()}
    timed.add_update(parts, rank, sent)
    launched = busy.kernels * step.num_microbatches
    parts = _add_surroundings(parts, launched, step.mesh.size, hardware, software)
    flops = _count_flops(step)
    exposed: dict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        if name.startswith("over "):
            exposed[name.removeprefix("over ")] += seconds
    exposed["pp"] += parts.get("sends", 0.0)
    samples = step.samples
    title = f"{samples:,} samples of {step.pieces.seq:,} tokens on {step.mesh or 'one GPU'}"
    lanes = _add_update_lanes(lanes, total, sum(parts.values()))
    return Estimate(
        title, hardware, software, step.mesh.size, samples * step.pieces.seq,
        sum(parts.values()), MappingProxyType(parts), MappingProxyType(dict(exposed)),
        parts.get("bubble", 0.0), *flops, estimate_memory(step), tuple(lanes),
        tuple(_list_notes(step, lanes, timed, rank)),
        list_doubts(
            hardware, software, quantised=any(map(is_quantised, _list_programs(step.pieces))),
            experts=step.pieces.config.moe is not None, seq=step.pieces.seq,
        ),
        MappingProxyType({axis: x for axis, x in sent.items() if x}),
    )  # fmt: skip


def _list_programs(pieces: TracedPieces) -> list[Program]:
    return [program for piece, _ in pieces.layers.values() for program in piece.programs]


@functools.lru_cache(maxsize=4096)
def is_quantised(program: Program) -> bool:
    """Whether a program has products of quantised values."""
    return any(equation.name.startswith("scaled_") for equation, _ in program.block.walk())


def _list_notes(
    step: PlannedStep, lanes: Sequence[Lane], timed: _StepTimes, rank: int
) -> Iterator[str]:
    """Limits of the estimate."""
    config = step.pieces.config
    used, gpus = timed.placement.gpus_per_domain, timed.hardware.domain.gpus
    if used < gpus:
        yield f"ranks are on {used} of the {gpus} GPUs of each domain, so that groups are on few"
    shown = len({lane.what for lane in lanes if lane.kind == "F"})
    of = step.num_microbatches * step.num_stages // step.num_ranks
    if lanes and shown < of:
        yield f"the timeline shows {shown:,} of {of:,} forwards of a rank"
    if step.zero == 2 and timed.software.overlap_grads:
        shown = replace(timed, software=replace(timed.software, overlap_grads=False))
        hidden, waited = (each.sum_update(rank) for each in (timed, shown))
        if waited > hidden:
            yield (
                "ZeRO-2 reduces gradients after every microbatch, which is assumed to hide under "
                f"backward: {waited - hidden:.3g} s more a step if it does not"
            )
    if config.moe is not None:
        yield _describe_room(step)
    if config.score_cap:
        yield "attention with capped scores is costed as on CPUs: unfused, in chunks"


def _describe_room(step: PlannedStep) -> str:
    """The assumption on rows of experts: in time, and in memory, where ranks divide experts."""
    options, moe = step.pieces.options, step.pieces.config.moe
    if all(step.mesh[axis] == 1 for axis in options.expert_axes):
        return "tokens are assumed to be balanced among experts"
    said = f"the fullest rank's experts are assumed to have {step.imbalance:.3g} times the balanced"
    said += " rows, which take its time"
    if moe is None or moe.capacity_factor:
        return f"{said}, if capacity_factor lets them"
    room = options.expert_room
    rows = f"{room:g} times as many (expert_room)" if room else "all rows of all ranks"
    return f"{said}, and memory to have room for {rows}"


def _count_flops(step: PlannedStep) -> tuple[float, float, float]:
    """Model FLOPs with half and whole attention, and hardware FLOPs, of all ranks."""
    config, seq = step.pieces.config, step.pieces.seq
    tokens = step.samples * seq
    half, whole = (gpt.flops_per_token(config, seq, whole=x) * tokens for x in (False, True))
    rows = [row for stage in step.stages for row in stage]
    each = sum(piece.hardware_flops * n for piece, n in rows)
    return half, whole, each * step.num_microbatches * step.mesh.size / step.num_ranks


def _add_update_lanes(lanes: Sequence[Lane], pipeline: float, total: float) -> list[Lane]:
    """The lanes, followed by the rest of the step."""
    rows = dict.fromkeys(lane.row for lane in lanes)
    shown = max((lane.end for lane in lanes), default=0.0)
    return [*lanes, *(Lane(r, "update", shown, shown + total - pipeline, "update") for r in rows)]


@dataclass(frozen=True, eq=False)
class _StepTimes:
    step: PlannedStep
    hardware: Hardware
    placement: RankPlacement
    software: Software

    @functools.cached_property
    def stages(self) -> list[list[Times]]:
        """By stage the times of its programs, with blocking sends."""
        known: dict[tuple, list[Times]] = {}
        found = []
        last = len(self.step.stages) - 1
        for number, rows in enumerate(self.step.stages):
            ends = (number == 0, number == last)
            key = (tuple((id(piece), count) for piece, count in rows), ends)
            if key not in known:
                known[key] = self._time_stage(rows, ends)
            found.append(known[key])
        return found

    def _time_stage(
        self, rows: Sequence[tuple[TracedPiece, int]], ends: tuple[bool, bool]
    ) -> list[Times]:
        made = []
        for index in range(len(rows[0][0].programs)):
            each = [(self._measure_times(piece, index), n) for piece, n in rows]
            parts: dict[str, float] = defaultdict(float)
            sent: dict[str, float] = defaultdict(float)
            for times, n in each:
                for name, seconds in times.parts.items():
                    parts[name] += seconds * n
                for axis, seconds in times.sent.items():
                    sent[axis] += seconds * n
            # what is sent: forward by all but the last stage, backward by all but the first
            sends = index < 2 and not (ends[1] if index == 0 else ends[0])
            if sends and self.step.num_ranks > 1:
                sent["pp"] += self.transfer
                if not self.software.async_sends:
                    parts["sends"] += self.transfer
            kernels = sum(times.kernels * n for times, n in each)
            made.append(Times(sum(parts.values()), parts, kernels, sent))
        return self._hide_exchanges(made)

    def _hide_exchanges(self, made: list[Times]) -> list[Times]:
        """The times, if exchanges of experts hide under the other half of a combined cell.

        DualPipe computes a microbatch's forward with another one's whole backward, all but about
        one in p / m of them. Such a cell takes as long as all that it computes, all that it sends,
        or one microbatch's forward, or its backward but for gradients of weights, with what these
        send and wait for: the longest. Exchanges take a share of the multiprocessors meanwhile, by
        which they slow what hides them.
        """
        step = self.step
        if step.schedule not in _COMBINED or not self.software.overlap:
            return made
        names = {f"over {axis}" for axis in step.pieces.options.expert_axes}
        sent = [sum(x for name, x in t.parts.items() if name in names) for t in made]
        busy = [times.computing for times in made]
        if not sum(sent):
            return made
        longest = max(sum(busy), sum(sent), busy[0] + sent[0], busy[1] + sent[1])
        paired = max(0.0, 1 - step.num_ranks / step.num_microbatches)
        hidden = paired * (sum(busy) + sum(sent) - longest) / sum(sent)
        left = 1 - hidden * (1 - _TAKEN)
        found = []
        for times in made:
            parts = {name: x * (left if name in names else 1) for name, x in times.parts.items()}
            found.append(replace(times, seconds=sum(parts.values()), parts=parts))
        return found

    def _measure_times(self, piece: TracedPiece, index: int) -> Times:
        """A piece's times, if gathers and scatters of other layers overlap with it."""
        program = piece.programs[index]
        load = ExpertLoad(self.step.imbalance, tuple(sorted(piece.rooms.items())))
        found = time_program(program, self.hardware, self.placement, self.software, load)
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
        """Seconds to send a stage's result to the next."""
        step, hardware = self.step, self.hardware
        if step.num_ranks == 1:
            return 0.0
        num_bytes = max(piece.sent_bytes for piece in step.all_pieces)
        reach = self.placement.reach("pp")
        tp = self.placement.reach("tp")
        if (
            not self.software.scatter_sends
            or tp.size == 1
            or "tp" in stream_axes(step.pieces.options)
        ):
            return hardware.collective_seconds("ppermute", num_bytes, reach)
        sent = hardware.collective_seconds("ppermute", num_bytes / tp.size, reach)
        return sent + hardware.collective_seconds("all_gather", num_bytes, tp)

    def busy(self, rank: int) -> Times:
        """The times of a pipeline rank for one microbatch."""
        parts: dict[str, float] = defaultdict(float)
        sent: dict[str, float] = defaultdict(float)
        kernels, pipes = 0, self.step.num_pipes
        for stage in self.step.stages_of(rank):
            for times in self.stages[stage]:
                kernels += times.kernels
                for axis, seconds in times.sent.items():
                    sent[axis] += seconds / pipes
                for name, seconds in times.parts.items():
                    parts[name] += seconds / pipes
        return Times(sum(parts.values()), parts, round(kernels / pipes), sent)

    def _sum_seconds(self, rank: int, index: int) -> float:
        """Seconds of all forwards (0) or backwards (1) of a microbatch on a rank."""
        stages = [self.stages[stage] for stage in self.step.stages_of(rank)]
        which = slice(0, 1) if index == 0 else slice(1, None)
        return sum(times.seconds for stage in stages for times in stage[which])

    # --- the pipeline

    def time_pipeline(self, slowest: int, exact: bool) -> tuple[float, list[Lane]]:
        """Seconds from the first forward to the last backward, and the timeline."""
        step = self.step
        m, p, v = step.num_microbatches, step.num_ranks, step.chunks
        if p == 1:
            lanes = self._draw_one_rank(m) if exact else []
            return m * self.busy(0).seconds, lanes
        formula = self._apply_formula(slowest)
        if formula is not None and (not exact or p * m * v > _LARGEST):
            return formula, []
        few = m if p * m * v <= _LARGEST else _count_repeating(step.schedule, p, m)
        schedule = _make_table(step.schedule, p, few, v)
        found = schedule.simulate(self._make_costs())
        lanes = _draw_lanes(found)
        if few == m:
            return found.total, lanes
        more = _make_table(step.schedule, p, few + 2 * p, v).simulate(self._make_costs())
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

    def _make_costs(self) -> pipeline.Costs:
        columns = [[t.seconds for t in stage] for stage in self.stages]
        transfer = self.transfer if self.software.async_sends else 0.0
        if len(columns[0]) == 3:
            forward, inner, weights = zip(*columns, strict=True)
            return pipeline.Costs(forward, None, inner, weights, transfer)
        forward, backward = zip(*columns, strict=True)
        return pipeline.Costs(forward, backward, transfer=transfer)

    def _apply_formula(self, slowest: int) -> float | None:
        """The length of the schedule's critical path; None: there is no formula.

        One microbatch goes through all ranks. Every further one takes as long as the slowest rank,
        or, under 1F1B, 1 / p of the round trip of p microbatches if transfers make that longer.
        With v chunks, waits for other ranks are 1 / v as long.
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

    # --- before and after the pipeline

    def sum_update(self, rank: int) -> float:
        """Seconds before and after the pipeline."""
        parts: dict[str, float] = {}
        self.add_update(parts, rank, defaultdict(float))
        return sum(parts.values())

    def add_update(self, parts: dict[str, float], rank: int, sent: dict[str, float]) -> None:
        """Add the reductions of gradients, the update, and the gathers of parameters.

        To `parts` what is exposed of them, and to `sent`, by axis, all communication.
        """
        step, hardware = self.step, self.hardware
        rows = step.held_by(rank)
        whole, experts, num_bytes = step.num_params(rank)
        params = num_bytes / max(whole, 1)
        layers = max(1, sum(n for piece, n in rows if piece.part.layers))
        apart = step.pieces.options.expert_axes
        of_experts = tuple(axis for axis in _REDUCED_OVER if axis not in apart)
        for axes, count in ((_REDUCED_OVER, whole - experts), (of_experts, experts)):
            self._add_reductions(parts, sent, axes, count, params, layers, rank)
        self._add_tied_embedding(parts, sent)
        own = _count_owned(step, whole, experts)
        state = step.state
        moved = own * (state.grad + params + (0 if step.offload else 2 * state.optimizer))
        moved += 2 * state.grad * (own if step.zero >= 2 else whole)  # zeroed, and the norm's
        parts["update"] = hardware.memory_seconds(moved)
        if step.offload:
            over = 2 * own * state.optimizer / hardware.host.bytes_per_second
            parts["update"] += over / 2  # both directions in parallel

    def _add_reductions(
        self,
        parts: dict[str, float],
        sent: dict[str, float],
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
        joined = "+".join(axes)
        name = f"over {joined}"
        divided = step.zero > 0 or ("fsdp" in axes and not inside)
        op = "psum_scatter" if divided else "psum"
        reduced = hardware.collective_seconds(op, num_bytes, reach)
        sent[joined] += reduced * (step.num_microbatches if step.zero == 2 else 1)
        last = self._sum_seconds(rank, 1) * self._overlapped
        parts[name] = parts.get(name, 0.0) + _hide_behind(
            reduced, last if software.overlap_grads else 0.0, layers
        )
        if step.zero == 2:  # after every microbatch
            window = self._sum_seconds(rank, 1) if software.overlap_grads else 0.0
            parts[name] += (step.num_microbatches - 1) * _hide_behind(reduced, window, layers)
        if divided:
            gathered = hardware.collective_seconds("all_gather", count * param_bytes, reach)
            sent[joined] += gathered
            first = self._sum_seconds(rank, 0) * self._overlapped
            parts[name] += _hide_behind(gathered, first if software.overlap_params else 0.0, layers)

    @property
    def _overlapped(self) -> float:
        """Microbatches during which gradients are reduced, and parameters gathered.

        The last one; with chunks, gradients of the last chunk are complete p microbatches of the
        other chunks earlier.
        """
        step = self.step
        if step.schedule != "interleaved":
            return 1.0
        few = min(step.num_ranks, step.num_microbatches)
        return (few * (step.chunks - 1) + 1) / step.chunks

    def _add_tied_embedding(self, parts: dict[str, float], sent: dict[str, float]) -> None:
        """The reduction of a tied embedding's gradients over the first and last stage."""
        step, config = self.step, self.step.pieces.config
        if not config.tied or step.num_ranks == 1:
            return
        shared = config.padded_vocab * config.embed_dim / step.mesh["tp"]
        reach = self.placement.reach("pp").pair()
        num_bytes = shared * (step.state.reduce or step.state.grad)
        parts["over pp"] = self.hardware.collective_seconds("psum", num_bytes, reach)
        sent["pp"] += parts["over pp"]


def _draw_lanes(found: pipeline.Timeline) -> list[Lane]:
    """The actions of a pipeline; those of one cell share its time."""
    cells: dict[tuple[int, float, float], list[pipeline.Action]] = defaultdict(list)
    for row in found.rows:
        cells[row.rank, row.start, row.end].append(row.action)
    lanes = []
    for (rank, start, end), actions in cells.items():
        each = (end - start) / len(actions)
        for i, action in enumerate(actions):
            at = start + i * each
            lanes.append(Lane(f"rank {rank}", str(action), at, at + each, action.kind))
    return lanes


_COMBINED = ("dualpipe", "dualpipe-half", "dualpipev")
_TAKEN = 20 / 132
"""Multiprocessors of an H800 that exchanges take: DeepSeek-V3's report, section 3.2."""
_LARGEST = 6000
"""The most actions of a pipeline that is simulated completely."""


def _hide_behind(seconds: float, window: float, layers: int) -> float:
    """The exposed seconds of communication, layer by layer, during `window` seconds of work.

    The last layer's communication is not overlapped.
    """
    return max(seconds - window * (1 - 1 / layers), seconds / layers) if window else seconds
