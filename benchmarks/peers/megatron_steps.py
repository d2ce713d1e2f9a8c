"""Training steps of megatron-core (``pip install --no-deps megatron-core==0.16.1``) on CPUs.

Its local layers, over gloo, under tensor parallelism with and without a split sequence. The wheel
names GPUs in its source, which `tests/apps/megatron/make_megatron.py` reads with CPUs in their
place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers.models import Step, block_weights, initial_weights
from peers.torch_steps import module_step
from torch import Tensor, nn
from torch.nn import functional as F

from functron import gpt


def tensor_parallel_step(c: gpt.GPTConfig, batch: dict, *, sequence: bool) -> Step:
    """`GPTModel` of this rank of all, and fused AdamW; norms' gradients are summed as it does."""
    if importlib.util.find_spec("megatron") is None:
        raise SystemExit("skip: pip install --no-deps megatron-core==0.16.1")
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "apps" / "megatron"))
    sys.meta_path.insert(0, importlib.import_module("make_megatron").Loader())
    core("parallel_state").initialize_model_parallel(dist.get_world_size())
    tracker = core("tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda self, name="": contextlib.nullcontext()  # there is no dropout
    model = build(c, sequence=sequence)
    rows = torch.arange(c.max_seq).expand_as(batch["tokens"])

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, rows, None, labels=targets).mean()

    whole = [p for name, p in model.named_parameters() if "norm." in name]

    def reduce() -> None:
        flat = torch.cat([p.grad for p in whole if p.grad is not None])
        dist.all_reduce(flat)
        for p, grad in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
            p.grad = grad

    parameters = list(model.parameters())
    return module_step(
        loss, parameters, batch["tokens"], batch["targets"], reduce if sequence else None
    )


def core(name: str) -> Any:
    """A module of megatron-core, which need not be there when this is read."""
    return importlib.import_module(f"megatron.core.{name}")


def build(c: gpt.GPTConfig, *, sequence: bool) -> nn.Module:
    """The model with functron's initial weights, this rank's part of them."""
    config = core("transformer.transformer_config").TransformerConfig(
        num_layers=c.num_layers, hidden_size=c.embed_dim, num_attention_heads=c.num_heads,
        num_query_groups=c.kv_heads, kv_channels=c.head_size, ffn_hidden_size=c.mlp_dim,
        normalization="RMSNorm", layernorm_epsilon=c.norm_eps, gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=sequence,
        use_cpu_initialization=True, params_dtype=torch.float32, pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    spec = core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization="RMSNorm")
    model = core("models.gpt").GPTModel(
        config, spec, c.padded_vocab, c.max_seq,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
        rotary_base=int(c.rope_theta),
    )  # fmt: skip
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, value in weights(c).items():
            own.pop(f"{name}.weight").copy_(value)
    assert not own, own.keys()
    return model


def weights(c: gpt.GPTConfig) -> dict[str, Tensor]:
    """This rank's part of the initial weights by megatron-core's names."""
    size, rank = dist.get_world_size(), dist.get_rank()
    start = initial_weights(c)

    def part(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(size, dim)[rank]

    found = {
        "embedding.word_embeddings": part(start["embed"]),
        "decoder.final_layernorm": start["norm"]["scale"],
        "output_layer": part(start["unembed"].T),
    }
    for i in range(c.num_layers):
        w, at = block_weights(start["blocks"], i), f"decoder.layers.{i}"
        heads = [w[f"attention.{x}"].unflatten(0, (c.kv_heads, -1)) for x in "qkv"]
        found |= {
            f"{at}.input_layernorm": w["norm1"],
            f"{at}.pre_mlp_layernorm": w["norm2"],
            f"{at}.self_attention.linear_qkv": part(torch.cat(heads, 1)).flatten(0, 1),
            f"{at}.self_attention.linear_proj": part(w["attention.out"], 1),
            f"{at}.mlp.linear_fc1": torch.cat([part(w["mlp.gate"]), part(w["mlp.up"])]),
            f"{at}.mlp.linear_fc2": part(w["mlp.down"], 1),
        }
    return found
