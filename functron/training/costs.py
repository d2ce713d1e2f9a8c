"""The cost of a training step before it runs: FLOPs and memory by rank and stage, the bubble.

Everything is counted in programs of a `RunSetup` that are traced without data.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from functron import checkpoint, optim
from functron.core import random, tree
from functron.core.errors import refuse
from functron.core.settings import value_at
from functron.core.tables import Table, align_columns, bytes_text, count_text
from functron.models.config import GPTConfig
from functron.pipeline.partition import Part
from functron.pipeline.registry import NAMES
from functron.pipeline.schedule import Schedule
from functron.pipeline.stage_backward import Stage, StageCall, trace_stage
from functron.pipeline.timeline import Costs, Timeline
from functron.program.displays import show
from functron.spmd import CONTEXT_AXES, DATA_AXES, BoundMesh, P
from functron.spmd.params import ParamDef, abstract_params, param_specs
from functron.spmd.spec import local_shape
from functron.training.config import TrainConfig, configure
from functron.training.setup import RunSetup, has_experts, make_setup


@dataclass(frozen=True)
class StageCost:
    """The cost of a microbatch at one stage, on one rank.

    Attributes:
        part: what the stage computes.
        flops: of the actions F, I and W.
        held_bytes: activations held after F and after I, until W.
        sent_bytes: activations sent to the next stage.
    """

    part: Part
    flops: tuple[float, float, float]
    held_bytes: tuple[int, int]
    sent_bytes: int


@dataclass(frozen=True)
class RankCost:
    """The memory of one pipeline rank.

    Attributes:
        stages: numbers of its stages.
        state_bytes: parameters, optimizer state and accumulated gradients.
        activation_bytes: activations at their peak under the schedule, with those being received.
    """

    stages: tuple[int, ...]
    state_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class PipelineCost:
    """The cost of a step on one pipeline (one rank of every other axis); prints as tables.

    Attributes:
        schedule: of the pipeline.
        stages: by number.
        ranks: by number.
        timeline: of the step, in FLOPs, with free transfers.
    """

    schedule: Schedule
    stages: tuple[StageCost, ...]
    ranks: tuple[RankCost, ...]
    timeline: Timeline

    def __str__(self) -> str:
        rows = [["stage", "computes", "F FLOPs", "I FLOPs", "W FLOPs", "held after F", "after I",
                 "hands on"]]  # fmt: skip
        for number, stage in enumerate(self.stages):
            part = stage.part
            layers = f"{len(part.layers)} layers" if part.layers else ""
            names = ["embed" * part.embed, layers, "loss" * part.loss]
            counts = map(count_text, stage.flops)
            sizes = map(bytes_text, (*stage.held_bytes, stage.sent_bytes))
            rows.append([str(number), "+".join(filter(None, names)), *counts, *sizes])
        ranks = [["rank", "stages", "state", "activations at peak", "live", "busy"]]
        for number, rank in enumerate(self.ranks):
            busy = self.timeline.busy(number) / self.timeline.total
            ranks.append([
                str(number), ",".join(map(str, rank.stages)), bytes_text(rank.state_bytes),
                bytes_text(rank.activation_bytes), str(self.schedule.peak_live(number)),
                f"{busy:.0%}",
            ])  # fmt: skip
        title = f"{self.schedule.name}: {self.schedule.num_microbatches} microbatches"
        bubble = f"bubble {self.timeline.bubble_fraction:.1%} by FLOPs, with free transfers"
        per = "per microbatch and stage, one rank of every other axis"
        return "\n".join(
            [f"{title}, {bubble}", "", per, *align_columns(rows), "", *align_columns(ranks)]
        )


def step_report(setup: RunSetup, *, program: bool = False) -> str:
    """The cost and memory of one rank in a training step, as text.

    Args:
        setup: of the run, on a simulated mesh.
        program: include the whole program (not with pp).

    Raises:
        ValueError: the model cannot run on the mesh, or the batch does not divide.
    """
    config, mesh = setup.config, setup.plain_mesh
    samples = f"{config.data.global_batch} samples of {config.data.seq} tokens"
    title = (
        f"{config.title}, one of {mesh.size} ranks ({str(mesh) or 'no mesh'}), {samples} per step"
    )
    title += f"\n{room_note(setup)}" if room_note(setup) else ""
    if not setup.is_pipelined:
        traced = setup.program()
        whole = f"{traced}\n" if program else ""
        return f"{whole}{title}\n\n{traced.cost()}\n\n{traced.memory()}"
    if program:
        raise ValueError(
            "program: got a mesh with pp, whose ranks run a schedule and not one program; "
            "wanted pp=1; fix: leave --program out"
        )
    return f"{title}\n\n{pipeline_cost(setup)}"


def room_note(setup: RunSetup) -> str:
    """The rows for which ranks that divide experts have room, as text; "" without these."""
    if not has_experts(setup.config):
        return ""
    assert setup.config.gpt.moe is not None
    axes = [a for a in setup.config.parallelism.expert_axis_names if setup.mesh[a] > 1]
    if not axes:
        return ""
    over = " x ".join(f"{axis}={setup.mesh[axis]}" for axis in axes)
    if setup.config.gpt.moe.capacity_factor:
        most = f"no more than capacity_factor={setup.config.gpt.moe.capacity_factor:g} keeps"
    elif setup.room:
        most = f"{setup.room:g} times the balanced ones (expert_room, of the fullest rank)"
    else:
        most = "all rows of all ranks (expert_room=1.25 bounds them, and learns the bound)"
    return (
        f"rows on the experts of a rank, of {over}: room for {most}; model FLOPs of balanced ones"
    )


def step_peak_bytes(setup: RunSetup) -> int:
    """The memory of the fullest rank in a training step; of `setup` on a simulated mesh."""
    if not setup.is_pipelined:
        return setup.program().memory().peak_bytes
    return max(rank.state_bytes + rank.activation_bytes for rank in pipeline_cost(setup).ranks)


_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""The `capacity_factor` that are tried for a model that does not fit without."""

_FITTING = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0)
"""The rooms that are tried."""


def check_expert_memory(setup: RunSetup, device_bytes: int) -> None:
    """Refuse a compiled step whose experts without a capacity cannot fit on a device.

    Shapes of compiled programs are those of the worst case, all tokens of all ranks on one rank's
    experts, or those of the room that they have. Programs that are not compiled have room for the
    tokens that came, and are let by.

    Args:
        setup: of the run.
        device_bytes: the memory of a device.

    Raises:
        ValueError: with the memory that the step takes, and the largest room and capacity that fit.
    """
    moe = getattr(setup.config.architecture, "moe", None)
    if moe is None or moe.capacity_factor or not setup.is_compiled:
        return
    room = setup.room or 0.0
    if (needed := peak_bytes_with(setup, room)) <= device_bytes:
        return
    name, got = "expert_room", f"{room:g}"
    if not room:
        name, got = "capacity_factor", "no capacity"
    got = f"{got}, with which a rank takes up to {bytes_text(needed)}"
    _refuse_to_fit(setup, device_bytes, name, got)


def check_room(setup: RunSetup, room: float, device_bytes: int = 0) -> None:
    """Refuse steps with a room for rows of experts that a device does not hold.

    Args:
        setup: of the run.
        room: what steps are to have from now on; 0: for the worst case.
        device_bytes: the memory of a device; 0: of the GPU of this process, if it has one.

    Raises:
        ValueError: with the memory that they take, and the largest room that fits.
    """
    mesh = setup.mesh
    on_gpu = isinstance(mesh, BoundMesh) and mesh.device_type == "cuda"
    if not device_bytes and setup.is_compiled and on_gpu:
        current = torch.cuda.current_device()
        device_bytes = torch.cuda.get_device_properties(current).total_memory
    if not device_bytes or (needed := peak_bytes_with(setup, room)) <= device_bytes:
        return
    said = f"{room:g} times balanced rows" if room else "all rows of all ranks"
    got = f"{said}, as routing needs, with which a rank takes up to {bytes_text(needed)}"
    _refuse_to_fit(setup, device_bytes, "expert_room", got)


def peak_bytes_with(setup: RunSetup, room: float, capacity_factor: float = 0.0) -> int:
    """`step_peak_bytes` of a step with this room for rows of experts, or with a capacity.

    Args:
        setup: of a run of a GPT with experts.
        room: of `functron.nn.moe.room.ROOMS`; 0: for the worst case.
        capacity_factor: of the model's experts.
    """
    model, config = setup.config.gpt, setup.config
    assert model.moe is not None
    limited = replace(model, moe=replace(model.moe, capacity_factor=capacity_factor))
    compute = replace(config.compute, expert_room=room)
    return step_peak_bytes(
        make_setup(replace(config, gpt=limited, compute=compute), setup.plain_mesh)
    )


def _refuse_to_fit(setup: RunSetup, device_bytes: int, name: str, got: str) -> NoReturn:
    """Raise ValueError for experts that a device does not hold, with what it does hold."""
    tries = functools.partial(peak_bytes_with, setup)
    fits = bisect.bisect_right(_FITTING, device_bytes, key=tries)
    fix = "more ranks for experts (ep) or fewer tokens a microbatch (microbatches)"
    factors = bisect.bisect_right(_FACTORS, device_bytes, key=lambda x: tries(0.0, x))
    if factors:
        fix = f"capacity_factor={_FACTORS[factors - 1]:g} of the model's moe fits; or {fix}"
    if fits:
        fix = f"expert_room={_FITTING[fits - 1]:g} fits, if routing is as even as that; or {fix}"
    wanted = f"at most the {bytes_text(device_bytes)} of a device"
    refuse("a step does not fit in memory", name, got, wanted, fix)


def pipeline_cost(setup: RunSetup) -> PipelineCost:
    """The cost of a training step on the ranks of a pipeline.

    Each kind of stage is traced once.

    Raises:
        ValueError: the model cannot run on the mesh, or with the schedule.
    """
    partition, schedule = setup.partition, setup.schedule
    known: dict[tuple, StageCost] = {}
    stages, x = [], None
    for number, part in enumerate(partition.layout):
        kind = (partition.kind(number), setup.high(part))
        if kind not in known:
            known[kind], x = _stage_cost(setup, number, x)
        stages.append(replace(known[kind], part=part))
    forward, inner, weights = zip(*(stage.flops for stage in stages), strict=True)
    costs = Costs(forward, None, inner, weights)
    ranks = tuple(
        RankCost(
            partition.stages(rank),
            _state_bytes(setup, rank),
            _activation_bytes(schedule, stages, rank),
        )
        for rank in range(schedule.num_ranks)
    )
    return PipelineCost(schedule, tuple(stages), ranks, schedule.simulate(costs))


def _stage_cost(setup: RunSetup, number: int, given: Any) -> tuple[StageCost, Any]:
    """The cost of a stage that gets `given` where it is no GPT's, and what it passes on."""
    stage, x = _trace_stage(setup, number, given)
    part = setup.partition.layout[number]
    programs = [piece.program(stage.program) for piece in stage.pieces]
    flops = tuple(float(program.cost().hardware_flops) for program in programs)
    after = stage.held_bytes
    reads = [{*piece.block.inputs} for piece in stage.pieces[1:]]
    given = [
        sum(var.nbytes for var in stage.arguments[1] if any(var in r for r in reads[i:]))
        for i in range(2)
    ]
    made = [output.value for output in stage.program.outputs if output.path.startswith("0/")]
    made = [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in made]
    passed = tree.unflatten(stage.y, made)
    sent = 0 if part.loss else tree.nbytes(x if setup.family.name == "gpt" else passed)
    held = (after[0] + given[0], after[1] + given[1])
    return StageCost(part, (flops[0], flops[1], flops[2]), held, sent), passed


def _trace_stage(setup: RunSetup, number: int, given: Any) -> tuple[Stage, Any]:
    """The traced actions of a stage, and what the stage before sends: of others than GPTs given."""
    config, mesh, partition = setup.config, setup.mesh, setup.partition
    model, plain, part = setup.model, setup.without_pipeline, partition.layout[number]
    rank = partition.holders(number)[0]
    defs = partition.local_defs(setup.whole_defs, rank)

    def local(d: ParamDef, spec: P) -> torch.Tensor:
        shape = local_shape(d.shape, spec, plain.plain_mesh)
        return torch.empty(shape, dtype=d.dtype, device="meta")

    weights = tree.map(local, defs, partition.local(setup.used(setup.whole_specs), rank))
    rows = (
        config.data.global_batch
        // config.parallelism.microbatches
        // math.prod(mesh[a] for a in DATA_AXES)
    )
    seq = config.data.seq // math.prod(mesh[axis] for axis in CONTEXT_AXES)
    tokens = torch.empty(rows, seq, dtype=torch.int64, device="meta")
    seq = seq // mesh["tp"] if config.parallelism.sequence_parallel else seq
    x = given
    if isinstance(model, GPTConfig):
        x = torch.empty(rows, seq, model.embed_dim, dtype=model.stream_dtype, device="meta")
    batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
    if config.data.packed:
        batch |= {"positions": tokens, "segments": tokens}
    shared = (random.key(0).to("meta"), torch.empty((), dtype=torch.int64, device="meta"))
    params = partition.stage_params(weights, number, rank)
    call = StageCall(number, part, part.loss, params, None if part.embed else x, batch, shared, {})
    return trace_stage(plain.stage, call, plain.plain_mesh), x


def _state_bytes(setup: RunSetup, rank: int) -> int:
    """Bytes of a pipeline rank's state between steps, and of its accumulated gradients."""
    mesh, partition = setup.plain_mesh, setup.partition
    here = next(r for r in range(mesh.size) if mesh.coordinate(r)["pp"] == rank)
    defs = partition.local_defs(setup.whole_defs, rank)
    specs = param_specs(defs, setup.rules)
    if setup.config.parallelism.zero == 2:
        specs = optim.shard_specs(defs, specs, mesh)
    specs = setup.used(specs)
    dtype = optim.torch_dtype(setup.config.optimizer.grad_dtype)
    sums = tree.map(lambda leaf: leaf.to(dtype or leaf.dtype), abstract_params(defs))
    placed = checkpoint.Placement.of(sums, partition.storage_specs(specs), mesh)
    both = (setup.pipeline_placement, replace(placed, rank=here))
    shapes = [(leaf, each.local_shape(leaf, here)) for each in both for leaf in each.leaves]
    return sum(
        math.prod(shape) * leaf.dtype.itemsize for leaf, shape in shapes if shape is not None
    )


def _activation_bytes(schedule: Schedule, stages: Sequence[StageCost], rank: int) -> int:
    """The peak of activation bytes that a rank holds under the schedule, and has room for.

    Receives of a tick are posted before the rank's own cell, and used after it.
    """
    held: dict[tuple[int, int], int] = {}
    arriving: dict[tuple[bool, int, int], int] = {}
    most = 0
    for row, transfers in zip(schedule.table, schedule.transfers_by_rank[rank], strict=True):
        for _, receiver, action, chunk in transfers:
            if receiver == rank:
                forward, (_, stage) = action.kind == "F", schedule.stage_of(rank, chunk)
                sent = stages[stage - 1 if forward else stage].sent_bytes
                arriving[forward, chunk, action.microbatch] = sent
        most = max(most, sum(held.values()) + sum(arriving.values()))
        for action in row[rank]:
            _, stage = schedule.stage_of(rank, action.chunk)
            key = (action.chunk, action.microbatch)
            after = {"F": stages[stage].held_bytes[0], "I": stages[stage].held_bytes[1]}
            held[key] = after.get(action.kind, 0)
            arriving.pop((action.kind == "F", *key), None)
            most = max(most, sum(held.values()) + sum(arriving.values()))
    return most


LARGE_BUBBLE = 0.25
"""Idle fraction of pipeline ranks from which on `bubble_note` suggests other settings."""


def bubble_note(setup: RunSetup) -> str | None:
    """The bubble of the pipeline, and settings that make it smaller.

    Schedules are timed on stages of equal cost, backward twice as long as forward. Suggested are
    the fewest microbatches with a bubble below `LARGE_BUBBLE` (or the most that fit the batch), and
    for the present and that number of microbatches the schedule with the smallest bubble, among
    those that hold parameters once.

    Returns:
        A line; None without a pipeline, or where the bubble is below `LARGE_BUBBLE`.
    """
    if not setup.is_pipelined:
        return None
    config, now = setup.config, setup.schedule.bubble_fraction()
    if now < LARGE_BUBBLE:
        return None
    larger = list(_more_microbatches(setup))
    more = next((c for c, least in larger if least < LARGE_BUBBLE), None)
    if more is None and larger:
        more = max(larger, key=lambda row: -row[1])[0]
    ways = [] if more is None else [more]
    for base in (config, *ways):
        named = [
            configure(base, schedule=name, chunks=0)
            for name in NAMES
            if name != base.parallelism.schedule
        ]
        found = [(least, c) for c in named if (least := _bubble(setup, c, pipes=1)) is not None]
        best = min(found, key=lambda row: row[0], default=None)
        if best is not None and best[0] < (_bubble(setup, base) or 1.0) - 0.01:
            ways.append(best[1])
    listed = ", ".join(f"{_options(config, way)}: {_bubble(setup, way):.0%}" for way in ways)
    count = config.parallelism.microbatches
    return (
        f"{config.parallelism.schedule} with {count} microbatch{'es' if count > 1 else ''} a step "
        f"leaves the {setup.mesh['pp']} ranks of the pipeline idle {now:.0%} of the time; "
        f"{f'less: {listed}' if listed else 'a larger --global-batch has room for more of them'}"
    )


def _more_microbatches(setup: RunSetup) -> Iterator[tuple[TrainConfig, float]]:
    """Configurations with more microbatches, as far as the batch divides, and their bubbles."""
    config = setup.config
    sizes = config.data.batches.sizes[len(config.data.batches.earlier) :]
    samples = math.gcd(*sizes) // math.prod(setup.mesh[axis] for axis in DATA_AXES)
    for count in range(config.parallelism.microbatches + 1, samples + 1):
        changed = configure(config, microbatches=count)
        if samples % count == 0 and (least := _bubble(setup, changed)) is not None:
            yield changed, least


def _bubble(setup: RunSetup, config: TrainConfig, pipes: int = 0) -> float | None:
    """The bubble of a schedule; None where it does not fit the model or the counts.

    Args:
        setup: of the model on its mesh.
        config: with the schedule.
        pipes: the most copies of the parameters; 0: any number.
    """
    changed = replace(setup, config=config)
    try:
        schedule, _ = changed.schedule, changed.partition
    except ValueError:
        return None
    return None if 0 < pipes < len(schedule.pipes) else schedule.bubble_fraction()


def _options(config: TrainConfig, changed: TrainConfig) -> str:
    """The options that turn `config` into `changed`."""
    given = {name: value_at(changed, name) for name in ("schedule", "microbatches")}
    return " ".join(
        f"--{name} {value}" for name, value in given.items() if value != value_at(config, name)
    )


def parameter_table(setup: RunSetup) -> Table:
    """The parameters of a model, with those of LoRA, and their shards on its mesh."""
    return show(setup.whole_defs, setup.whole_specs, setup.plain_mesh)
