"""Families of models: their name rules and what their config.json says, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from functron.hub import settings
from functron.hub.dense import DENSE
from functron.hub.family import (
    ALL_DENSE,
    AROUND,
    ATTENTION,
    DECODER,
    DOWN,
    END,
    HEADS,
    LAYER,
    MLP,
    NO_BIASES,
    NO_LATENT,
    NO_QK_NORM,
    NO_WINDOW,
    PLAIN,
    START,
    UNSCALED,
    UP,
    Family,
    Rule,
    common,
    linear,
    llama_like,
    norm,
)
from functron.hub.mixtures import MIXTURES
from functron.hub.rope import rope

LLAMA_RULES = (*START, *ATTENTION, *MLP, *END)
"""Llama's names, with those of the biases and norms that other families add to them."""

_QKV = ("blocks/attention/q/w", "blocks/attention/k/w", "blocks/attention/v/w")

PHI3_RULES = (
    *START,
    *AROUND,
    *linear(f"{LAYER}.mlp.down_proj", "blocks/mlp/down", *DOWN),
    Rule(f"{LAYER}.self_attn.qkv_proj.weight", HEADS[0], _QKV),
    Rule(f"{LAYER}.mlp.gate_up_proj.weight", UP[0], ("blocks/mlp/gate/w", "blocks/mlp/up/w")),
    *END,
)
"""Llama's, with fused projections."""

_H = "transformer.h.{layer}"

GPT2_RULES = (  # its Conv1D stores weights as we do, [in, out]
    Rule("transformer.wte.weight", "vocab embed -> vocab embed", ("embed",)),
    Rule("transformer.wpe.weight", "position embed -> position embed", ("positions",)),
    *norm(f"{_H}.ln_1", "blocks/attention_norm"),
    Rule(f"{_H}.attn.c_attn.weight", "embed (heads head) -> embed heads head", _QKV, fused=1),
    Rule(
        f"{_H}.attn.c_attn.bias",
        "(heads head) -> heads head",
        tuple(path.removesuffix("w") + "b" for path in _QKV),
    ),
    *linear(
        f"{_H}.attn.c_proj",
        "blocks/attention/out",
        "(heads head) embed -> heads head embed",
        "embed -> embed",
    ),
    *norm(f"{_H}.ln_2", "blocks/mlp_norm"),
    *linear(f"{_H}.mlp.c_fc", "blocks/mlp/up", "embed mlp -> embed mlp", "mlp -> mlp"),
    *linear(f"{_H}.mlp.c_proj", "blocks/mlp/down", "mlp embed -> mlp embed", "embed -> embed"),
    *norm("transformer.ln_f", "norm"),
    Rule("lm_head.weight", "vocab embed -> embed vocab", ("unembed",)),
)
"""GPT-2's names."""


_Sizes = dict[str, Any]
_QWEN: _Sizes = {"vocab_size": 151936, "embed_dim": 4096, "mlp_dim": 22016, "num_layers": 32,
         "num_heads": 32, "num_kv_heads": 32, "max_seq": 32768}  # fmt: skip
_MISTRAL: _Sizes = {"vocab_size": 32000, "embed_dim": 4096, "mlp_dim": 14336, "num_layers": 32,
            "num_heads": 32, "num_kv_heads": 8, "max_seq": 131072}  # fmt: skip
_LLAMA: _Sizes = {"vocab_size": 32000, "embed_dim": 4096, "mlp_dim": 11008, "num_layers": 32,
          "num_heads": 32, "num_kv_heads": None, "max_seq": 2048}  # fmt: skip
_PHI3: _Sizes = {"vocab_size": 32064, "embed_dim": 3072, "mlp_dim": 8192, "num_layers": 32,
         "num_heads": 32, "num_kv_heads": None, "max_seq": 4096}  # fmt: skip
_GEMMA: _Sizes = {"vocab_size": 256000, "embed_dim": 3072, "mlp_dim": 24576, "num_layers": 28,
          "num_heads": 16, "num_kv_heads": 16, "max_seq": 8192, "head_dim": 256}  # fmt: skip

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    LLAMA_RULES,
    (
        *llama_like(**_LLAMA),
        *PLAIN,
        NO_QK_NORM,
        ALL_DENSE,
        NO_WINDOW,
        settings.biases(),
        settings.heads_divide(),
    ),
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    LLAMA_RULES,
    (
        *llama_like(**_MISTRAL),
        *PLAIN,
        NO_QK_NORM,
        ALL_DENSE,
        settings.window(4096, switched=False),
        *NO_BIASES,
    ),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    LLAMA_RULES,
    (
        *llama_like(**_QWEN),
        *PLAIN,
        NO_QK_NORM,
        ALL_DENSE,
        settings.window(4096, switched=True, layered=True),
        settings.biases("qkv_bias"),
    ),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    LLAMA_RULES,
    (
        *llama_like(**_QWEN, head_dim=128),
        *PLAIN,
        settings.fixed("qk_norm", True),
        ALL_DENSE,
        settings.window(4096, switched=True, layered=True),
        settings.only("attention_bias", False, why="biases on attention alone"),
        *NO_BIASES,
    ),
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    PHI3_RULES,
    (
        *llama_like(**_PHI3, norm_eps=1e-5, rope_aspect=rope(partial=1.0)),
        *PLAIN,
        NO_QK_NORM,
        ALL_DENSE,
        settings.window(None, switched=False),
        *NO_BIASES,
    ),
    ignored=("original_max_position_embeddings",),
)
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    LLAMA_RULES,
    (
        *llama_like(**_GEMMA, tied=True),
        # the first releases say "gelu" and mean its tanh approximation
        settings.activation("hidden_act", "gelu_pytorch_tanh", gelu="gelu_tanh"),
        settings.only("hidden_activation", None, "gelu_pytorch_tanh", why="second activation"),
        settings.only("use_bidirectional_attention", None, False, why="attention to later tokens"),
        settings.only("attention_bias", False, why="biases on attention alone"),
        ALL_DENSE,
        NO_WINDOW,
        settings.fixed("zero_centered_norm", True),
        settings.scaled_embedding(),
        NO_QK_NORM,
        *NO_BIASES,
    ),
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    GPT2_RULES,
    (
        settings.same("vocab_size", "vocab_size", 50257),
        settings.same("n_embd", "embed_dim", 768),
        settings.same("n_layer", "num_layers", 12),
        settings.same("n_head", "num_heads", 12),
        settings.same("n_positions", "max_seq", 1024),
        settings.same("layer_norm_epsilon", "norm_eps", 1e-5),
        settings.same("tie_word_embeddings", "tied", True),
        settings.inner_size("n_inner"),
        settings.activation("activation_function", "gelu_new"),
        settings.fixed("norm", "layer"),
        settings.fixed("positions", "learned"),
        settings.fixed("bias", True),
        settings.fixed("gated", False),
        settings.square_heads(),
        NO_QK_NORM,
        *UNSCALED,
        ALL_DENSE,
        common(),
        NO_LATENT,
        NO_WINDOW,
        settings.only("scale_attn_weights", True, why="unscaled attention"),
        settings.only(
            "scale_attn_by_inverse_layer_idx", False, why="attention scaled by its layer"
        ),
        *DECODER,
    ),
    prefix="transformer.",
    max_seq="n_positions",
    unused=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
    ignored=(
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, PHI3, GPT2, *DENSE, *MIXTURES)
    }
)
"""Families by transformers' name in config.json. Of those that fit a model, the first is chosen."""

LACKING: Mapping[str, str] = MappingProxyType(
    {
        "qwen2_moe": "names for the tensors of Qwen2-MoE",
        "llama4_text": "layers without rope, attention in chunks and temperatures of queries",
        "deepseek_v2": "names for the tensors of DeepSeek-V2",
        "gemma3": "images of Gemma 3; its text model alone is gemma3_text",
        "qwen2_vl": "images of Qwen2-VL, though positions of its kind (rope_sections)",
    }
)
"""What this decoder lacks for families that people ask for."""
