"""Training steps to compare: functron's and those of its peers, each a function that takes a step.

Every `make` builds one program for this process (or rank) and returns ``step() -> loss``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from models import LEARNING_RATE, SEED, WEIGHT_DECAY, plain_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import functron as ft
from functron import BoundMesh, Mesh, P, gpt, optim, random

Step = Callable[[], float]


def functron_training(
    c: gpt.GPTConfig, mesh: Mesh | BoundMesh, *, stream: P = gpt.STREAM, device: str = "cpu"
) -> tuple[Callable, ft.State]:
    """functron's eager ``(state, batch) -> (state, metrics)`` on `mesh`, and the first state."""
    defs = gpt.defs(c)
    specs = ft.param_specs(defs, gpt.rules(c, mesh))
    optimizer = optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    state = ft.init_state(random.key(SEED, device=device), defs, specs, optimizer, mesh)

    def loss(params, batch, key):
        return gpt.loss(c, params, batch, ft.ModelOptions(stream=stream), key=key)

    return ft.make_step(ft.gradients(loss, gpt.num_targets), optimizer, mesh, specs), state


def functron_step(
    c: gpt.GPTConfig,
    batch: dict,
    mesh: Mesh | BoundMesh,
    *,
    stream: P = gpt.STREAM,
    compile_with: Callable | None = None,
    device: str = "cpu",
) -> Step:
    """functron's step on `mesh`, eager or as `compile_with` makes it; on its part of the batch."""
    train, state = functron_training(c, mesh, stream=stream, device=device)
    if compile_with is not None:
        train = compile_with(train)
    if isinstance(mesh, BoundMesh):
        batch = ft.shard(batch, P(ft.DATA_AXES), mesh)

    def step() -> float:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"].item()

    return step


def module_step(model: Callable, parameters: list, tokens, targets) -> Step:
    """``.backward()`` and fused AdamW on ``model(tokens, targets)``."""
    # the fused kernel takes plain tensors or DTensors, not both in one call
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups if group],
        lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True,
    )  # fmt: skip

    def step() -> float:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def plain_step(c: gpt.GPTConfig, batch: dict, device: str = "cpu", *, compiled: bool) -> Step:
    """The plain module: the whole forward and, through AOTAutograd, backward as one graph each."""
    model = plain_model(c, device)
    run = torch.compile(model, fullgraph=True) if compiled else model
    return module_step(run, list(model.parameters()), batch["tokens"], batch["targets"])


def local_rows(batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens and targets under data parallelism."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return batch["tokens"].chunk(size)[rank], batch["targets"].chunk(size)[rank]


def mean_over_ranks(step: Step) -> Step:
    """`step`, whose loss is over this rank's rows, with that over all rows: 4 bytes more."""

    def averaged() -> float:
        loss = torch.tensor(step())
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return averaged


def ddp_step(c: gpt.GPTConfig, batch: dict) -> Step:
    """DistributedDataParallel, then `torch.compile`, which splits the graph at its buckets."""
    model = nn.parallel.DistributedDataParallel(plain_model(c))
    step = module_step(torch.compile(model), list(model.parameters()), *local_rows(batch))
    return mean_over_ranks(step)


def fsdp_step(c: gpt.GPTConfig, batch: dict, *, reshard: bool) -> Step:
    """FSDP2, one unit per block and each compiled; weights freed after forward if `reshard`."""
    model = plain_model(c)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        block.compile(fullgraph=True)  # one graph for all, between FSDP2's hooks
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return mean_over_ranks(module_step(model, list(model.parameters()), *local_rows(batch)))


def tensor_parallel_plan(c: gpt.GPTConfig, *, sequence: bool) -> dict:
    """Megatron's splits in DTensor's terms, as torchtitan has them for Llama."""
    stream = Shard(1) if sequence else Replicate()
    enter = {"input_layouts": stream, "desired_input_layouts": Replicate()}
    plan: dict = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "unembed": ColwiseParallel(input_layouts=stream, use_local_output=False),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for i in range(c.num_layers):
        plan |= {
            f"blocks.{i}.attention.out": RowwiseParallel(output_layouts=stream),
            f"blocks.{i}.mlp.down": RowwiseParallel(output_layouts=stream),
            **{f"blocks.{i}.attention.{name}": ColwiseParallel() for name in "qkv"},
            **{f"blocks.{i}.mlp.{name}": ColwiseParallel() for name in ("up", "gate")},
        }
        if sequence:
            plan |= {
                f"blocks.{i}.norm1": SequenceParallel(),
                f"blocks.{i}.norm2": SequenceParallel(),
                f"blocks.{i}.attention": PrepareModuleInput(
                    input_layouts=(stream, None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                f"blocks.{i}.mlp": PrepareModuleInput(**enter),
            }
    return plan


def dtensor_step(c: gpt.GPTConfig, batch: dict, *, sequence: bool) -> Step:
    """DTensor tensor parallelism, the whole forward compiled, with its loss on split logits."""
    model = plain_model(c)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, tensor_parallel_plan(c, sequence=sequence))
    run = torch.compile(model, fullgraph=True)
    step = module_step(run, list(model.parameters()), batch["tokens"], batch["targets"])

    def in_parallel() -> float:
        with loss_parallel():
            return step()

    return in_parallel
