"""``functron trace``: what one rank of a mesh computes, sends and holds in a training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from functron import launch
from functron.commands.run_options import parse_run, step_report
from functron.config import TrainConfig
from functron.spmd import DATA_AXES, Mesh

_SEQ = 2048  # of models that take sequences of any length


@dataclass(frozen=True)
class TraceOptions:
    """Show what one rank computes, sends and holds in a training step. Nothing is run.

    Of a pipeline it is what each of its ranks computes, hands on and holds, stage by stage.

    Attributes:
        run: a run folder, or a file like its config.toml, whose options the others override; none:
            a preset, by --model, with the longest samples that it takes (--seq), or 2048 tokens
            where it takes any, and one of them for each data-parallel rank and microbatch
            (--global-batch).
        program: print the whole program as well (not with pp).
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    program: bool = False
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def run(arguments: Sequence[str]) -> int:
    """Print cost and memory, and the program where that is asked for."""
    with launch.mistakes():
        options = parse_run(TraceOptions, arguments, "trace", seq=0, global_batch=0)
        config: TrainConfig = options.options
        mesh = Mesh.parse(config.mesh)
        data_ranks = math.prod(mesh[axis] for axis in DATA_AXES)
        config = replace(
            config,
            seq=config.seq or getattr(config.architecture, "max_seq", _SEQ),
            global_batch=config.global_batch or data_ranks * config.microbatches,
        )
        text = step_report(config, mesh, program=options.program)
    print(text)
    return 0
