"""What each rank of a pipeline computes, sends and holds in a training step, before it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from functron import checkpoint, optim
from functron.core import random, tree
from functron.params import ParamDef, abstract_params, param_specs
from functron.pipeline.layout import Part
from functron.pipeline.partition import Partition
from functron.pipeline.schedule import Schedule
from functron.pipeline.timeline import Costs, Timeline
from functron.pipeline.work import Call, Stage, trace_stage
from functron.program.cost import bytes_text, count_text
from functron.program.text import aligned
from functron.spmd import CONTEXT_AXES, DATA_AXES, Mesh, P
from functron.spmd.spec import local_shape
from functron.training import plan
from functron.training.config import TrainConfig
from functron.training.plan import placement


@dataclass(frozen=True)
class StageCost:
    """What one rank does for one microbatch at one stage.

    Attributes:
        part: what the stage computes.
        flops: of F, I and W, by the traced program.
        held_bytes: of activations after F and after I, until W.
        sent_bytes: of what it hands on.
    """

    part: Part
    flops: tuple[float, float, float]
    held_bytes: tuple[int, int]
    sent_bytes: int


@dataclass(frozen=True)
class RankCost:
    """What one rank of the pipeline holds.

    Attributes:
        stages: its stages, by number.
        state_bytes: of parameters, optimizer state and sums of gradients.
        activation_bytes: of activations at their peak, by the table.
    """

    stages: tuple[int, ...]
    state_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class PipelineCost:
    """A training step on one rank of every other axis; prints as tables.

    Attributes:
        schedule: of the pipeline.
        stages: by number.
        ranks: by number.
        timeline: of the step, in floating-point operations, transfers free.
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
        return "\n".join([f"{title}, {bubble}", "", per, *aligned(rows), "", *aligned(ranks)])


def pipeline_cost(config: TrainConfig, mesh: Mesh) -> PipelineCost:
    """What the training step that `config` describes costs on the ranks of `mesh`.

    Each kind of stage is traced once, without data, memory or processes.

    Raises:
        ValueError: the model cannot run on the mesh, or under the schedule.
    """
    schedule = plan.schedule_for(config, mesh)
    partition = plan.partition_for(config, mesh, schedule)
    known: dict[tuple, StageCost] = {}
    stages = []
    for number, part in enumerate(partition.layout):
        kind = partition.kind(number)
        if kind not in known:
            known[kind] = _stage_cost(config, mesh, partition, number)
        found = known[kind]
        stages.append(StageCost(part, found.flops, found.held_bytes, found.sent_bytes))
    forward, inner, weights = zip(*(stage.flops for stage in stages), strict=True)
    costs = Costs(forward, None, inner, weights)
    where = placement(config, mesh, partition)
    ranks = tuple(
        RankCost(
            partition.stages(rank),
            _state_bytes(config, mesh, partition, where, rank),
            _activation_bytes(schedule, stages, rank),
        )
        for rank in range(schedule.num_ranks)
    )
    return PipelineCost(schedule, tuple(stages), ranks, schedule.simulate(costs))


def _stage_cost(config: TrainConfig, mesh: Mesh, partition: Partition, number: int) -> StageCost:
    stage, x = _traced(config, mesh, partition, number)
    programs = [piece.program(stage.program) for piece in stage.pieces]
    flops = tuple(float(program.cost().hardware_flops) for program in programs)
    after = stage.held_bytes
    reads = [{*piece.block.inputs} for piece in stage.pieces[1:]]
    given = [
        sum(var.nbytes for var in stage.arguments[1] if any(var in r for r in reads[i:]))
        for i in range(2)
    ]
    sent = 0 if partition.layout[number].loss else tree.nbytes(x)
    held = (after[0] + given[0], after[1] + given[1])
    return StageCost(partition.layout[number], (flops[0], flops[1], flops[2]), held, sent)


def _traced(
    config: TrainConfig, mesh: Mesh, partition: Partition, number: int
) -> tuple[Stage, torch.Tensor]:
    """The pieces of a stage, and what it would be sent by the one before."""
    model, plain, part = config.gpt, mesh.without("pp"), partition.layout[number]
    specs = param_specs(plan.defs_of(config), plan.rules_of(config, mesh))
    specs = plan.used_specs(config, specs)
    rank = partition.holders(number)[0]
    defs = partition.local_defs(plan.defs_of(config), rank)

    def local(d: ParamDef, spec: P) -> torch.Tensor:
        return torch.empty(local_shape(d.shape, spec, plain), dtype=d.dtype, device="meta")

    weights = tree.map(local, defs, partition.local(specs, rank))
    rows = config.global_batch // config.microbatches // math.prod(mesh[a] for a in DATA_AXES)
    seq = config.seq // math.prod(mesh[axis] for axis in CONTEXT_AXES)
    tokens = torch.empty(rows, seq, dtype=torch.int64, device="meta")
    seq = seq // mesh["tp"] if config.sequence_parallel else seq
    x = torch.empty(rows, seq, model.embed_dim, dtype=model.torch_dtype, device="meta")
    batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
    if config.packed:
        batch |= {"positions": tokens, "segments": tokens}
    shared = (random.key(0).to("meta"), torch.empty((), dtype=torch.int64, device="meta"))
    params = partition.stage_params(weights, number, rank)
    call = Call(number, part, part.loss, params, None if part.embed else x, batch, shared, {})
    return trace_stage(plan.stage_of(config, plain), call, plain), x


def _state_bytes(
    config: TrainConfig, mesh: Mesh, partition: Partition, where: checkpoint.Placement, rank: int
) -> int:
    """What a pipeline's rank holds between steps, and the sums of its gradients."""
    here = next(r for r in range(mesh.size) if mesh.coordinate(r)["pp"] == rank)
    defs = partition.local_defs(plan.defs_of(config), rank)
    specs = param_specs(defs, plan.rules_of(config, mesh))
    if config.zero == 2:
        specs = optim.shard_specs(defs, specs, mesh)
    specs = plan.used_specs(config, specs)
    dtype = optim.torch_dtype(config.optimizer.grad_dtype)
    sums = tree.map(lambda leaf: leaf.to(dtype or leaf.dtype), abstract_params(defs))
    held = (
        where,
        replace(checkpoint.place(sums, partition.storage_specs(specs), mesh), rank=here),
    )
    shapes = [(leaf, each.local_shape(leaf, here)) for each in held for leaf in each.leaves]
    return sum(
        math.prod(shape) * leaf.dtype.itemsize for leaf, shape in shapes if shape is not None
    )


def _activation_bytes(schedule: Schedule, stages: Sequence[StageCost], rank: int) -> int:
    """The most that a rank holds between the actions of its column."""
    held: dict[tuple[int, int], int] = {}
    most = 0
    for _, action in schedule.column(rank):
        _, stage = schedule.stage_of(rank, action.chunk)
        key = (action.chunk, action.microbatch)
        after = {"F": stages[stage].held_bytes[0], "I": stages[stage].held_bytes[1]}
        held[key] = after.get(action.kind, 0)
        most = max(most, sum(held.values()))
    return most
