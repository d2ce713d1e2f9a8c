"""``functron trace``: what one rank of a mesh computes, sends and holds in a training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import tyro

from functron import launch
from functron.config import TrainConfig, with_model
from functron.models import gpt
from functron.recipe import step_program
from functron.spmd import DATA_AXES, Mesh
from functron.stage_costs import pipeline_cost

_SEQ = 2048  # of models that take sequences of any length


@dataclass(frozen=True)
class TraceOptions:
    """Show what one rank computes, sends and holds in a training step. Nothing is run.

    Attributes:
        model: name of a preset.
        mesh: axes and sizes, such as dp=64,tp=8; empty: one rank.
        seq: tokens per sample; 0: the longest that the model takes, or 2048 where it takes any.
        global_batch: samples per step over all ranks; 0: one per data-parallel rank and microbatch.
        microbatches: parts of each rank's batch, one after another.
        schedule: who computes which microbatch when, where the mesh has pp; then what each rank of
            the pipeline computes, hands on and holds is shown, stage by stage.
        chunks: stages per pipeline rank; 0: what the schedule is made for.
        layout: which stage has which layers, as in functron train.
        vocab_over_pp: divide the vocabulary among the ranks of the pipeline, as in functron train.
        zero: what data-parallel ranks divide, as in functron train.
        gather: when parameters that are so divided are gathered, as in functron train.
        sequence_parallel: split the residual stream's sequence over tp.
        context: what the ranks of cp do, as in functron train.
        zigzag: ranks of cp have an early and a late part of every sequence, as in functron train.
        expert_axes: the axes that experts are divided over, as in functron train.
        remat: what backward recomputes, as in functron train.
        program: print the whole program as well (not with pp).
    """

    model: str = "tiny"
    mesh: str = ""
    seq: int = 0
    global_batch: int = 0
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    layout: str = ""
    vocab_over_pp: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    gather: Literal["use", "keep", "step"] = "use"
    sequence_parallel: bool = False
    context: Literal["ring", "gather"] = "ring"
    zigzag: bool = True
    expert_axes: str = "ep"
    remat: gpt.Remat = "none"
    program: bool = False


def run(arguments: Sequence[str]) -> int:
    """Print cost and memory, and the program where that is asked for."""
    options = tyro.cli(TraceOptions, args=arguments, prog="functron trace")
    with launch.mistakes():
        mesh = Mesh.parse(options.mesh)
        config = with_model(TrainConfig(), options.model)
        data_ranks = math.prod(mesh[axis] for axis in DATA_AXES)
        config = replace(
            config,
            mesh=options.mesh,
            seq=options.seq or getattr(config.architecture, "max_seq", _SEQ),
            global_batch=options.global_batch or data_ranks * options.microbatches,
            microbatches=options.microbatches,
            schedule=options.schedule,
            chunks=options.chunks,
            layout=options.layout,
            vocab_over_pp=options.vocab_over_pp,
            zero=options.zero,
            gather=options.gather,
            sequence_parallel=options.sequence_parallel,
            context=options.context,
            zigzag=options.zigzag,
            expert_axes=options.expert_axes,
            remat=options.remat,
        )
        samples = f"{config.global_batch} samples of {config.seq} tokens"
        title = (
            f"{options.model}, one of {mesh.size} ranks ({mesh or 'no mesh'}), {samples} per step"
        )
        if mesh["pp"] > 1:
            if options.program:
                raise ValueError(
                    "program: got a mesh with pp, whose ranks run a schedule and not one program; "
                    "wanted pp=1; fix: leave --program out"
                )
            print(f"{title}\n\n{pipeline_cost(config, mesh)}")
            return 0
        program = step_program(config, mesh)
    if options.program:
        print(program)
    print(f"{title}\n")
    print(f"{program.cost()}\n\n{program.memory()}")
    return 0
