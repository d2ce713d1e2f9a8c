"""Runs and schedules as text, before anything is computed: cost, memory, parameters, bubble."""

from __future__ import annotations

import math

from functron.core import tree
from functron.core.table import table
from functron.params import num_params, param_specs
from functron.pipeline import Schedule
from functron.spmd import Mesh
from functron.spmd.spec import local_shape
from functron.training.config import TrainConfig
from functron.training.plan import defs_of, rules_of, step_program
from functron.training.stage_costs import pipeline_cost


def step_report(config: TrainConfig, mesh: Mesh, *, program: bool = False) -> str:
    """The cost and memory of one rank in the training step of `config`, as text.

    Args:
        config: the run.
        mesh: its ranks.
        program: have the whole program in it as well (not with pp).

    Raises:
        ValueError: the model cannot run on the mesh, or the batch does not divide.
    """
    samples = f"{config.global_batch} samples of {config.seq} tokens"
    title = (
        f"{config.title}, one of {mesh.size} ranks ({str(mesh) or 'no mesh'}), {samples} per step"
    )
    if mesh["pp"] > 1:
        if program:
            raise ValueError(
                "program: got a mesh with pp, whose ranks run a schedule and not one program; "
                "wanted pp=1; fix: leave --program out"
            )
        return f"{title}\n\n{pipeline_cost(config, mesh)}"
    traced = step_program(config, mesh)
    whole = f"{traced}\n" if program else ""
    return f"{whole}{title}\n\n{traced.cost()}\n\n{traced.memory()}"


def parameter_table(config: TrainConfig, mesh: Mesh) -> str:
    """The parameters of a run, with those of LoRA, and their shards on `mesh`, as text.

    Raises:
        ValueError: it cannot run on the mesh.
    """
    defs = defs_of(config)
    specs = param_specs(defs, rules_of(config, mesh))
    rows = [("path", "shape", "logical axes", "spec", "local shape", "parameters", "bytes")]
    total_bytes = local_bytes = 0
    for path, d, spec in zip(tree.paths(defs), tree.leaves(defs), tree.leaves(specs), strict=True):
        count, local = math.prod(d.shape), local_shape(d.shape, spec, mesh)
        total_bytes += count * d.dtype.itemsize
        local_bytes += math.prod(local) * d.dtype.itemsize
        axes = " ".join(name or "-" for name in d.axes)
        size = f"{count * d.dtype.itemsize:,}"
        rows.append((path, str(d.shape), axes, str(spec), str(local), f"{count:,}", size))
    total = f"{num_params(defs):,} parameters, {total_bytes:,} bytes"
    return f"{table(rows, left=5)}\n\n{total}; {local_bytes:,} bytes per rank"


def schedule_report(schedule: Schedule) -> str:
    """The Gantt chart of a schedule, its bubble and its live activations, as text.

    F, I and W take 1 each, B 2.
    """
    timeline = schedule.simulate()
    each = [schedule.peak_live(rank) for rank in range(schedule.num_ranks)]
    chunks = f", {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
    lines = [
        f"{schedule.name}: {schedule.num_ranks} ranks{chunks}, "
        f"{schedule.num_microbatches} microbatches",
        "",
        timeline.gantt(),
        "",
        f"bubble            {timeline.bubble_fraction:.1%} of the ranks' time",
        f"live activations  {' '.join(map(str, each))}: the most per rank, of one microbatch "
        "and stage each",
    ]
    return "\n".join(lines) + "\n"
