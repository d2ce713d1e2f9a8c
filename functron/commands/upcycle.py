"""``functron upcycle``: a mixture of experts of a dense run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from functron import config, launch, run_folder
from functron.commands.parsing import parse
from functron.nn.moe import MoEConfig
from functron.upcycle import upcycle_run


@dataclass(frozen=True)
class UpcycleOptions:
    """Make a run of a mixture of experts that begins as a dense run's newest checkpoint.

    Attributes:
        source: the run folder of the dense model.
        target: the run folder to make; train it with functron train --resume --out TARGET.
        experts: how many experts each layer has.
        top_k: how many of them a token uses.
        expert_dim: hidden width of an expert, a fraction of the dense layer's; 0: all of it.
        aux_loss: weight of the load-balancing loss.
        seed: of the routers' random weights.
        averaged: begin as the average of the parameters that the run keeps (--optimizer.ema-decay).
    """

    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SOURCE")]]
    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
    experts: int = 8
    top_k: int = 2
    expert_dim: int = 0
    aux_loss: float = 0.01
    seed: int = 0
    averaged: bool = False


def run(arguments: Sequence[str]) -> int:
    """Make it, and print what was made."""
    options = parse(UpcycleOptions, arguments, "upcycle")
    with launch.mistakes():
        dense = config.load(Path(options.source) / run_folder.CONFIG).gpt
        moe = MoEConfig(
            options.experts,
            options.top_k,
            options.expert_dim or dense.mlp_dim,
            renormalise=True,
            aux_loss=options.aux_loss,
            expert_bias=dense.bias,
        )
        source, target = Path(options.source), Path(options.target)
        done = upcycle_run(source, target, moe, seed=options.seed, averaged=options.averaged)
        print(done)
    return 0
