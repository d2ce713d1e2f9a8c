"""Pipelined training steps to compare: functron's under a schedule, and torch's pipelining.

Every `make` builds this rank's program and returns ``step() -> loss``, the loss on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from models import LEARNING_RATE, SEED, WEIGHT_DECAY, Plain, plain_model
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

import functron as ft
from functron import Mesh, gpt, optim, random
from functron.pipeline import Part, Partition, Pipeline, Schedule, even_layout

Step = Callable[[], float]


def functron_step(
    c: gpt.GPTConfig, batch: dict, schedule: Schedule, compile_with: Mapping[str, Any] | None
) -> tuple[Step, Pipeline, list[Tensor]]:
    """functron under `schedule`, its stages and update compiled or not.

    Also the pipeline, for what can be observed of it, and this rank's parameters.
    """
    mesh = Mesh(pp=schedule.num_ranks).bind()
    layout = even_layout(schedule.num_stages, c.num_layers)
    partition = Partition(layout, schedule.pipes, gpt.uses(c))
    defs = partition.local_defs(gpt.defs(c), mesh.coordinate["pp"])
    specs = ft.param_specs(defs, gpt.rules(c, mesh))
    optimizer = optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    state = ft.init_state(random.key(SEED), defs, specs, optimizer, mesh)

    def stage(part, params, x, batch, key, total):
        y = gpt.stage_loss(c, part, params, x, batch)
        return y / total if part.loss else y

    stages = ft.pipeline.pipelined(stage, partition, schedule, compile=compile_with)
    train = ft.make_step(ft.pipelined_gradients(stages, gpt.num_targets), optimizer, mesh, specs)

    def step() -> float:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"].item()

    return step, stages, ft.tree.leaves(state.params)


class Slice(nn.Module):
    """One stage of `Plain`; the last one returns the mean loss, so that it is compiled with it."""

    def __init__(self, model: Plain, part: Part):
        super().__init__()
        self.config = model.config
        self.embed = model.embed if part.embed else None
        self.blocks = nn.ModuleList(model.blocks[i] for i in part.layers)
        self.norm = model.norm if part.loss else None
        self.unembed = model.unembed if part.loss else None

    def forward(self, x, targets=None):
        cos, sin = self.rope(x.shape[1], x.device)
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        if self.unembed is None or self.norm is None:
            return x
        assert targets is not None
        logits = self.unembed(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())

    def rope(self, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
        c = self.config
        half = c.head_size // 2
        exponent = torch.arange(half, dtype=torch.float32, device=device) / half
        angles = torch.arange(seq, device=device)[:, None] * c.rope_theta**-exponent
        return angles.cos().to(c.torch_dtype), angles.sin().to(c.torch_dtype)


CLASSES: dict[str, tuple[Callable, int]] = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
}
"""Of each name the class, and how many stages a rank has."""


def torch_step(
    c: gpt.GPTConfig, batch: dict, name: str, microbatches: int, *, compiled: bool
) -> Step:
    """`torch.distributed.pipelining` with this schedule, fused AdamW on this rank's stages."""
    make, chunks = CLASSES[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = even_layout(ranks * chunks, c.num_layers)
    mine = [rank, 2 * ranks - 1 - rank] if name == "zbv" else [*range(rank, len(layout), ranks)]
    model = plain_model(c)
    modules = [Slice(model, layout[i]) for i in mine]
    del model
    parameters = [p for module in modules for p in module.parameters()]
    if compiled:
        for module in modules:
            module.compile(fullgraph=True)
    stages = [
        pipelining.PipelineStage(module, i, len(layout), torch.device("cpu"))
        for module, i in zip(modules, mine, strict=True)
    ]
    # gradients of microbatches' means are divided by their number, as torch does by default
    schedule = make(stages if chunks > 1 else stages[0], microbatches, _given)
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    first, last = 0 in mine, len(layout) - 1 in mine
    inputs = (batch["tokens"],) if first else ()
    targets = batch["targets"]
    keywords = {"targets": targets} if last else {}

    def step() -> float:
        losses: list[Tensor] = []
        schedule.step(
            *inputs, **keywords, target=targets if last else None, losses=losses,
            return_outputs=False,
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).detach().mean() if last else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()

    return step


def _given(output: Tensor, target: Tensor) -> Tensor:
    return output  # which is the loss already
