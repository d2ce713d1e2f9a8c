"""Training steps of torch and transformers: eager, compiled, and on several processes.

Every maker builds the program of this process (or rank) and returns ``step() -> loss``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peers.models import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Plain,
    Step,
    layout,
    named_weights,
    plain_model,
    rope,
)
from torch import Tensor, nn
from torch.distributed import pipelining
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
from torch.nn import functional as F

from functron import gpt
from functron.pipeline import Part


def module_step(
    model: Callable,
    parameters: list,
    tokens,
    targets,
    reduce: Callable | None = None,
    *,
    low: bool = False,
) -> Step:
    """``.backward()``, `reduce` of the gradients and fused AdamW on ``model(tokens, targets)``.

    With `low` the model's products are in bfloat16, by torch's autocast.
    """
    products = partial(torch.autocast, tokens.device.type, torch.bfloat16) if low else nullcontext
    # the fused kernel takes plain tensors or DTensors, not both in one call
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups if group],
        lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True,
    )  # fmt: skip

    def step() -> float:
        with products():
            loss = model(tokens, targets)
        loss.backward()
        if reduce is not None:
            reduce()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def plain_step(
    c: gpt.GPTConfig, batch: dict, device: str = "cpu", *, compiled: bool, low: bool = False
) -> Step:
    """The plain module: the whole forward and, through AOTAutograd, backward as one graph each.

    `low` is as in `module_step`.
    """
    model = plain_model(c, device)
    run = torch.compile(model, fullgraph=True) if compiled else model
    return module_step(run, list(model.parameters()), batch["tokens"], batch["targets"], low=low)


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


def hugging_face_step(
    c: gpt.GPTConfig,
    batch: dict,
    device: str = "cpu",
    *,
    compiled: bool,
    low: bool = False,
    liger: bool = False,
) -> Step:
    """`LlamaForCausalLM` with SDPA attention and its own loss, from functron's initial weights.

    `low` is as in `module_step`. With `liger` its norms, rotations, gated activations and loss are
    those of Liger-Kernel.
    """
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig

        patched: Any = importlib.import_module("liger_kernel.transformers") if liger else None
    except ImportError as error:
        raise SystemExit(f"skip: {error}") from None
    config = LlamaConfig(
        vocab_size=c.padded_vocab, hidden_size=c.embed_dim, intermediate_size=c.mlp_dim,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.kv_heads, max_position_embeddings=c.max_seq,
        rms_norm_eps=c.norm_eps, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=c.torch_dtype, attn_implementation="sdpa"
        )
    model.load_state_dict(hugging_face_weights(c, device))
    model.train()
    if patched is not None:
        patched.apply_liger_kernel_to_llama(model=model)
    if compiled:
        # as one graph it would build a mask, which keeps SDPA from its fast causal kernels
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
        model.loss_function = torch.compile(model.loss_function)

    def loss(tokens, targets):
        # the targets are shifted already, and given as labels they would be once more
        return model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss

    return module_step(loss, list(model.parameters()), batch["tokens"], batch["targets"], low=low)


def hugging_face_weights(c: gpt.GPTConfig, device: str) -> dict[str, torch.Tensor]:
    """The initial weights by the names of `LlamaForCausalLM`."""
    names = {
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
        "mlp.up": "mlp.up_proj", "mlp.gate": "mlp.gate_proj", "mlp.down": "mlp.down_proj",
    }  # fmt: skip
    top = ("model.embed_tokens", "model.norm", "lm_head")
    return named_weights(c, top, "model.layers", names, device)


def ddp_step(c: gpt.GPTConfig, batch: dict, *, compiled: bool) -> Step:
    """DistributedDataParallel; `torch.compile` of it splits the graph at its buckets."""
    model = nn.parallel.DistributedDataParallel(plain_model(c))
    run = torch.compile(model) if compiled else model
    return mean_over_ranks(module_step(run, list(model.parameters()), *local_rows(batch)))


def fsdp_step(c: gpt.GPTConfig, batch: dict, *, reshard: bool, compiled: bool) -> Step:
    """FSDP2, one unit per block, compiled or not; weights freed after forward if `reshard`."""
    model = plain_model(c)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        if compiled:
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


def dtensor_step(c: gpt.GPTConfig, batch: dict, *, sequence: bool, compiled: bool) -> Step:
    """DTensor tensor parallelism with its loss on split logits; the whole forward compiled."""
    model = plain_model(c)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, tensor_parallel_plan(c, sequence=sequence))
    run = torch.compile(model, fullgraph=True) if compiled else model
    step = module_step(run, list(model.parameters()), batch["tokens"], batch["targets"])

    def in_parallel() -> float:
        with loss_parallel():
            return step()

    return in_parallel


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
        cos, sin = rope(self.config, x.shape[1], x.device)
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        if self.unembed is None or self.norm is None:
            return x
        assert targets is not None
        logits = self.unembed(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


SCHEDULES: dict[str, tuple[Callable, int]] = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
}
"""Of each name the class, and how many stages a rank has."""


def pipelined_step(
    c: gpt.GPTConfig,
    batch: dict,
    name: str,
    microbatches: int,
    *,
    compiled: bool,
    balanced: bool = False,
) -> Step:
    """`torch.distributed.pipelining` with this schedule, fused AdamW on this rank's stages."""
    make, chunks = SCHEDULES[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = layout(c, ranks * chunks, balanced=balanced)
    mine = [rank, 2 * ranks - 1 - rank] if name == "zbv" else [*range(rank, len(parts), ranks)]
    model = plain_model(c)
    modules = [Slice(model, parts[i]) for i in mine]
    del model
    parameters = [p for module in modules for p in module.parameters()]
    if compiled:
        for module in modules:
            module.compile(fullgraph=True)
    stages = [
        pipelining.PipelineStage(module, i, len(parts), torch.device("cpu"))
        for module, i in zip(modules, mine, strict=True)
    ]
    # gradients of microbatches' means are divided by their number, as torch does by default
    schedule = make(stages if chunks > 1 else stages[0], microbatches, _given)
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    first, last = 0 in mine, len(parts) - 1 in mine
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
