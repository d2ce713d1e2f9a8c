"""Tiny models of every family, made and stored by transformers: the oracle of these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

VOCAB, LAYERS, EMBED, HEADS, MLP, MAX_SEQ = 61, 3, 32, 4, 48, 24
VOCAB_MULTIPLE = 8  # so that 3 rows of padding follow the vocabulary

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_SEQ,
}
# in their small vocabularies; embeddings of a token for padding would have no gradients
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": EMBED,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": MAX_SEQ,
    **TOKENS,
}
# wavelengths of the four pairs of dims are 6, 63, 628 and 6283: kept, blended, and stretched
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_theta": 5000.0, "factor": 4.0}
LINEAR_ROPE = {"rope_type": "linear", **LINEAR}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.5, 3.0, 6.0, 12.0],
        "original_max_position_embeddings": 8,
    },
    "original_max_position_embeddings": 8,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}

NEOX: dict[str, Any] = {
    **{name: LLAMA[name] for name in LLAMA if name != "num_key_value_heads"}, **TOKENS,
}  # fmt: skip
FALCON = {name: NEOX[name] for name in NEOX if name != "intermediate_size"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama3.1": ("Llama", {**LLAMA, "rope_parameters": LLAMA3_ROPE, "head_dim": 8}),
    "llama-linear": ("Llama", {**LLAMA, "rope_parameters": LINEAR_ROPE}),
    "llama-attention-biases": ("Llama", {**LLAMA, "attention_bias": True}),
    "llama-mlp-biases": ("Llama", {**LLAMA, "mlp_bias": True}),
    "llama-dynamic": ("Llama", {**LLAMA, "rope_parameters": {"rope_type": "dynamic", **LINEAR}}),
    "llama-biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**LLAMA, "head_dim": 12, "sliding_window": MAX_SEQ}),
    "mistral-window": ("Mistral", {**LLAMA, "sliding_window": 5}),
    "llama-yarn": ("Llama", {**LLAMA, "rope_parameters": YARN}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2-windows": (
        "Qwen2",
        {
            **LLAMA,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 12, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {**LLAMA, "head_dim": 12, "num_key_value_heads": 1, **TOKENS}),
    "phi3": ("Phi3", {**LLAMA, **TOKENS}),
    "phi3-partial": (
        "Phi3",
        {
            **LLAMA,
            **TOKENS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            **LLAMA,
            **TOKENS,
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **LLAMA,
            **TOKENS,
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "olmo2": ("Olmo2", {**LLAMA, **TOKENS}),
    "nemotron": ("Nemotron", {**LLAMA, **TOKENS}),
    "olmo": ("Olmo", {**LLAMA, **TOKENS, "clip_qkv": 0.4}),
    "olmo-tied": ("Olmo", {**LLAMA, **TOKENS, "tie_word_embeddings": True}),
    "glm": ("Glm", {**LLAMA, **TOKENS, "head_dim": 12}),
    "glm4": ("Glm4", {**LLAMA, **TOKENS, "head_dim": 8, "attention_bias": False}),
    "smollm3": ("SmolLM3", {**LLAMA, **TOKENS, "no_rope_layer_interval": 2}),
    "arcee": ("Arcee", {**LLAMA, **TOKENS, "mlp_bias": True}),
    "seed-oss": ("SeedOss", {**LLAMA, **TOKENS, "head_dim": 12}),
    "ernie": ("Ernie4_5", {**LLAMA, **TOKENS, "head_dim": 12, "use_bias": True}),
    "granite": (
        "Granite",
        {
            **LLAMA,
            **TOKENS,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    "exaone4": ("Exaone4", {**LLAMA, **TOKENS, "sliding_window": 4, "sliding_window_pattern": 2}),
    "exaone4-full": (
        "Exaone4",
        {
            **LLAMA,
            **TOKENS,
            "sliding_window": None,
            "layer_types": ["full_attention"] * LAYERS,
            "tie_word_embeddings": True,
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            **LLAMA,
            **TOKENS,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": LLAMA3_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "starcoder2": ("Starcoder2", {**LLAMA, **TOKENS, "sliding_window": 5}),
    "stablelm": ("StableLm", {**LLAMA, **TOKENS, "rope_parameters": PARTIAL}),
    "stablelm-parallel": (
        "StableLm",
        {
            **LLAMA,
            **TOKENS,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "rope_parameters": PARTIAL,
        },
    ),
    "gpt-neox": ("GPTNeoX", NEOX),
    "gpt-neox-sequential": (
        "GPTNeoX",
        {**NEOX, "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5,
         "rotary_emb_base": 500.0, "tie_word_embeddings": True},
    ),
    "falcon": ("Falcon", FALCON),
    "falcon-new": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-sequential": (
        "Falcon",
        {**FALCON, "bias": True, "multi_query": False, "parallel_attn": False,
         "ffn_hidden_size": MLP, "tie_word_embeddings": False},
    ),
    "phi": ("Phi", {**LLAMA, **TOKENS}),
    "cohere": ("Cohere", {**LLAMA, **TOKENS, "logit_scale": 0.5}),
    "cohere-norms": ("Cohere", {**LLAMA, **TOKENS, "use_qk_norm": True, "logit_scale": 0.5}),
    "phi-norms": ("Phi", {**LLAMA, **TOKENS, "qk_layernorm": True}),
    "cohere2": (
        "Cohere2",
        {**LLAMA, **TOKENS, "sliding_window": 4, "logit_scale": 0.5, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "apertus": ("Apertus", {**LLAMA, **TOKENS}),
    "hunyuan": ("HunYuanDenseV1", {**LLAMA, **TOKENS, "head_dim": 12, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 7.0, "factor": 1.0}}),
    "ministral3": ("Ministral3", {**LLAMA, **TOKENS, "head_dim": 12, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "llama_4_scaling_beta": 0.4,
        "original_max_position_embeddings": 4, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", {**GPT2, "n_inner": MLP, "tie_word_embeddings": False}),
}  # fmt: skip
"""Transformers' name of the family and its settings, by a name for the test."""

DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_nextn_predict_layers": 0,
    **TOKENS,
}
QWEN3_MOE = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
             "head_dim": 12, "norm_topk_prob": True}  # fmt: skip
GPT_OSS = {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12,
           "sliding_window": 4, **TOKENS}  # fmt: skip

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 6, **TOKENS}),
    "mixtral-window": ("Mixtral", {**LLAMA, "num_local_experts": 4, "sliding_window": 5}),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3-moe-dense": (
        "Qwen3Moe",
        {**QWEN3_MOE, "mlp_only_layers": [0], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen3-moe-biases": ("Qwen3Moe", {**QWEN3_MOE, "attention_bias": True}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "rope_parameters": YARN,
            "rope_interleave": False,
            "rms_norm_eps": 1e-3,  # latents have another
        },
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-rope": (
        "GptOss",
        {
            **GPT_OSS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "layer_types": ["sliding_attention"] * LAYERS,
        },
    ),
}
BALANCED = {
    **LLAMA, **TOKENS, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
}  # fmt: skip
MIXTURES |= {
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **LLAMA, **TOKENS, "num_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("Olmoe", {**LLAMA, **TOKENS, "num_experts": 6, "num_experts_per_tok": 2}),
    "glm4-moe": (
        "Glm4Moe",
        {
            **BALANCED, "use_qk_norm": True, "attention_bias": True, "head_dim": 12,
            "num_nextn_predict_layers": 0,
        },
    ),
    "dots1": ("Dots1", {**BALANCED, "sliding_window": 4, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {
            **LLAMA, **TOKENS, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20,
            "moe_num_shared_experts": 2,
        },
    ),
    "ernie-moe-interval": (
        "Ernie4_5_Moe",
        {
            **LLAMA, **TOKENS, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20,
            "moe_num_shared_experts": 0, "moe_layer_interval": 2,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            **LLAMA, **TOKENS, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12,
            "rotary_dim": 6,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {**LLAMA, **TOKENS, "num_experts": 6, "moe_topk": 2, "intermediate_size": 20,
         "head_dim": 12},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": None, "topk_group": None, "rope_parameters": YARN},
    ),
}  # fmt: skip
"""The same of models with layers of experts."""


def make(name: str, **changes: Any) -> torch.nn.Module:
    """A random model in float32, in which no parameter is special: no norm is 1, no bias 0."""
    family, settings = {**CASES, **MIXTURES}[name]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**settings, **changes})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def store(model: torch.nn.Module, path: Path, files: int = 1) -> Path:
    """The model saved by transformers, in about so many files."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    # transformers reads sizes as text with decimal units
    limit = f"{max(size // files // 1000, 1)}KB" if files > 1 else "1GB"
    model.save_pretrained(path, max_shard_size=limit)
    return path


def tokens() -> torch.Tensor:
    """int64 [4, 12], the same ones each time."""
    return torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))


def read_back(path: Path, dtype: torch.dtype | str = "auto") -> torch.nn.Module:
    """The model in a folder, by transformers, with nothing missing, too much or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    model.config._experts_implementation = "eager"
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    return model.eval()


def read_back_main(path: Path) -> torch.nn.Module:
    """As `read_back`, of a model with tensors that transformers passes over."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    return model.eval()
