"""Decoders of transformers at tiny size, from what their configurations have in common.

``python -m tests.apps.zoo.tiny_modules`` prints the table of docs/modules.md.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import functron as ft
from functron import DATA_AXES, Mesh, P, lora, tree
from functron.apps.zoo import modules
from functron.apps.zoo.modules import ModuleConfig, build_module, flatten, nest
from functron.models.family import list_presets
from functron.models.lora import LoRA
from functron.pipeline import pipelined
from functron.training.config import configure
from functron.training.setup import make_setup
from functron.transforms import Gather

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim",
                     "n_inner", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers",
                     "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads",
                     "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "qk_nope_head_dim", "v_head_dim", "index_head_dim",
                     "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts",
                     "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk",
                     "index_n_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size",
                     "shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group",
                     "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    "qk_rope_head_dim": 4, "rotary_dim": 4, "index_topk": 32, "sliding_window": 8,
    "window_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 64,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_chunk_size": 4, "state_size": 8,
    "time_step_rank": 4, "initializer_range": 0.3, "init_std": 0.3, "multiple_of": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""By names of fields, which no configuration has all of."""

MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "max_seq_len": 64,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
}
"""Settings that a model type needs besides."""


def write_folder(kind: str, folder: Path, **changes: Any) -> str:
    """Writes config.json of a tiny model without dropout; returns its origin."""
    transformers = __import__("transformers")
    usual = transformers.CONFIG_MAPPING[kind]()
    drops = {name: 0.0 for name, x in vars(usual).items() if "drop" in name and type(x) is float}
    drops |= {name: 0.0 for name in vars(usual) if name.endswith("pdrop")}
    own = {name: x for name, x in SIZES.items() if name in vars(usual)}
    if "qk_rope_head_dim" in own:
        own |= {"num_key_value_heads": 4, "head_dim": SIZES["qk_rope_head_dim"]}
    for name, value in vars(usual).items():  # lists of one entry for each layer follow from it
        if isinstance(value, list) and name.endswith(("_types", "_type", "_layers")):
            own[name] = None
    given = {**own, **drops, **MORE.get(kind, {}), **changes}
    made = transformers.CONFIG_MAPPING[kind](**given)
    made.save_pretrained(folder)
    return f"{modules.HUB}:{folder}"


MESHES = {
    "dp=2": {"dp": 2}, "fsdp=2": {"fsdp": 2}, "tp=2": {"tp": 2}, "dp=2,tp=2": {"dp": 2, "tp": 2},
}  # fmt: skip


@functools.lru_cache(1)
def batch(vocab: int) -> dict[str, torch.Tensor]:
    """Tokens and targets, some of which do not count."""
    tokens = torch.arange(4 * 17).reshape(4, 17) * 7 % min(vocab, 61) + 1
    targets = tokens[:, 1:].clone()
    targets[1, 3:9] = -100
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


def dense(
    config: ModuleConfig, microbatches: int = 1
) -> tuple[dict, torch.Tensor, dict[str, torch.Tensor]]:
    """The module's own parameters, and its loss and gradients by torch's autograd."""
    module: Any = build_module(config.origin).double()
    parts = [_dense_part(module, slice(m, None, microbatches)) for m in range(microbatches)]
    (params, total, grads), *others = parts
    for _, more, each in others:
        total, grads = total + more, tree.map(torch.add, grads, each)
    return params, total, grads


def _dense_part(module: Any, samples: slice):
    given = {name: x[samples] for name, x in batch(module.config.vocab_size).items()}
    own = {name: x for name, x in module.named_parameters() if x.requires_grad}
    names = __import__("inspect").signature(module.forward).parameters
    fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    out = module(input_ids=given["tokens"], **fixed)
    total = F.cross_entropy(out.logits.mT, given["targets"], reduction="sum")
    if getattr(out, "aux_loss", None) is not None:
        count = (given["targets"] != -100).sum()
        total = total + module.config.router_aux_loss_coef * out.aux_loss * count
    found = torch.autograd.grad(total, [*own.values()], allow_unused=True)
    grads = {
        name: torch.zeros_like(own[name]) if g is None else g
        for name, g in zip(own, found, strict=True)
    }
    return {name: x.detach() for name, x in own.items()}, total.detach(), grads


def adapted_defs(config: ModuleConfig, adapters: LoRA | None) -> dict:
    """The definitions of a module's parameters, with low-rank additions."""
    defs = modules.defs(config)
    return defs if adapters is None else lora.lora_defs(defs, adapters)


def partitioned(
    config: ModuleConfig, params: dict, given=None, key=None, adapters=None, **sizes: int
):
    """The loss and gradients on a simulated mesh, as a step computes them."""
    mesh, family = Mesh(**sizes), modules.make_family()
    defs = adapted_defs(config, adapters)
    specs = ft.param_specs(defs, family.rules(config, mesh))
    options = ft.ModelOptions(gather=Gather(specs))

    def step(params, batch, key):
        def loss(params):
            return family.loss(config, params, batch, options, key=key)

        value, grads = ft.value_and_grad(loss)(params)
        return value, ft.sync_gradients(grads, specs)

    mapped = ft.shard_map(step, mesh, (specs, P(DATA_AXES), P()), (P(), specs))
    leaves = [params[name] for name in flatten(defs)]
    whole = tree.unflatten(tree.structure(defs), leaves)
    value, grads = mapped(whole, given or batch(config.vocab_size), key)
    return value, flatten(grads)


def staged(config: ModuleConfig, params: dict, mesh: str, schedule: str = "1f1b"):
    """The loss and gradients of two microbatches in the stages of a run's pipeline, simulated."""
    settings: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "microbatches": 2, "seq": 16}
    run = configure(model=config.origin, global_batch=4, format="mock", **settings)
    run = replace(run, module=config)
    setup = make_setup(run, Mesh.parse(mesh))
    stages = pipelined(setup.stage, setup.partition, setup.schedule)

    def step(params, batch):
        one = torch.ones((), dtype=torch.float64)
        value, grads = stages.value_and_grad(params, batch, None, one)
        return value, ft.sync_gradients(grads, setup.specs)

    rows = {name: P(DATA_AXES) for name in batch(config.vocab_size)}
    mapped = ft.shard_map(step, setup.mesh, (setup.specs, rows), (P(), setup.specs), stages="pp")
    value, grads = mapped(nest(params), batch(config.vocab_size))
    return value, flatten(grads)


def largest_error(got: dict, wanted: dict) -> float:
    """The largest difference of a gradient, over the largest entry of that parameter's."""
    most = max(float(x.abs().max()) for x in tree.leaves(wanted))
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted) / most


FAMILIES = (
    "apertus", "arcee", "bamba", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2",
    "cohere2_moe", "ctrl", "cwm", "diffllama", "doge", "dots1", "ernie4_5", "exaone4",
    "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "gpt_oss",
    "gptj", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "llama", "llama4_text", "minimax", "minimax_m2", "ministral", "mistral", "mixtral",
    "modernbert-decoder", "mpt", "nanochat", "olmo", "olmo2", "olmo3", "olmoe", "openai-gpt",
    "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
"""Model types whose losses and gradients are those of the module on every mesh."""

REFUSED = {
    "dbrx": "asks for the number in a tensor|asks for the number",
    "jetmoe": "asks for the number in a tensor",
}
"""Model types that are not, with what their errors say."""


def print_table(kinds: Sequence[str]) -> None:
    """Prints a row of Markdown for each model type: the largest errors on each mesh, or why not."""
    print("| model type |", *(f" {mesh} |" for mesh in MESHES), " packed |", sep="")
    print("|---|", *("---|" for _ in MESHES), "---|", sep="")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            cells = _fill_row(kind, Path(folder))
        print(f"| {kind} |", *(f" {cell} |" for cell in cells), sep="", flush=True)


def _fill_row(kind: str, folder: Path) -> list[str]:
    """Errors of the loss and of gradients on each mesh, and how packed documents are told apart."""
    cells = []
    try:
        found = list_presets()[write_folder(kind, folder)]
        assert isinstance(found, ModuleConfig)
        config = replace(found, dtype="float64", dropouts="off")
        params, total, grads = dense(config)
        for sizes in MESHES.values():
            value, got = partitioned(config, params, **sizes)
            far = abs(float(value / total) - 1)
            cells.append(f"{far:.0e}, {largest_error(got, grads):.0e}")
        return [*cells, modules.open_module(config).packing or "refused"]
    except Exception as error:  # of whatever it is
        why = " ".join(str(error).split()).replace("|", "/").rpartition("` ")[2]
        return [*cells, why.partition(")")[0] + ")", *[""] * (len(MESHES) - len(cells))]


if __name__ == "__main__":  # python -m tests.apps.zoo.tiny_modules
    print_table(sys.argv[1:] or sorted([*FAMILIES, *REFUSED]))
