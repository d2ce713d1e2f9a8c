"""Families of models: their name rules and what their config.json says, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from functron.hub import settings
from functron.hub.rules import Rule
from functron.hub.settings import Aspect


@dataclass(frozen=True)
class Family:
    """Models that transformers builds with one class.

    Attributes:
        model_type: transformers' name of the family in config.json.
        architecture: transformers' class of its language models.
        rules: which tensor holds what.
        aspects: what config.json says.
        prefix: of tensors of the model proper; base models are stored without it.
        max_seq: the entry of config.json with the longest sequence.
        unused: regular expressions of tensors that hold nothing learned.
        ignored: entries of config.json that change nothing, beside `settings.GENERAL`.
    """

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    aspects: tuple[Aspect, ...]
    prefix: str = "model."
    max_seq: str = "max_position_embeddings"
    unused: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    ignored: tuple[str, ...] = ()


def _linear(name: str, path: str, weight: str, bias: str) -> tuple[Rule, Rule]:
    """The rules of a linear layer: its weight ``[out, in]``, and its bias where there is one."""
    return (
        Rule(f"{name}.weight", weight, (f"{path}/w",)),
        Rule(f"{name}.bias", bias, (f"{path}/b",)),
    )


def _norm(name: str, path: str, dim: str = "embed") -> tuple[Rule, Rule]:
    return (
        Rule(f"{name}.weight", f"{dim} -> {dim}", (f"{path}/scale",)),
        Rule(f"{name}.bias", f"{dim} -> {dim}", (f"{path}/bias",)),
    )


_LAYER = "model.layers.{layer}"
_HEADS = ("(heads head) embed -> embed heads head", "(heads head) -> heads head")
_OUT = ("embed (heads head) -> heads head embed", "embed -> embed")
_UP = ("mlp embed -> embed mlp", "mlp -> mlp")
_DOWN = ("embed mlp -> mlp embed", "embed -> embed")

_ENDS = (
    Rule("model.embed_tokens.weight", "vocab embed -> vocab embed", ("embed",)),
    *_norm("model.norm", "norm"),
    Rule("lm_head.weight", "vocab embed -> embed vocab", ("unembed",)),
)
_BLOCK = (
    *_norm(f"{_LAYER}.input_layernorm", "blocks/attention_norm"),
    *_linear(f"{_LAYER}.self_attn.o_proj", "blocks/attention/out", *_OUT),
    *_norm(f"{_LAYER}.post_attention_layernorm", "blocks/mlp_norm"),
    *_linear(f"{_LAYER}.mlp.down_proj", "blocks/mlp/down", *_DOWN),
)

LLAMA_RULES = (
    _ENDS[0],
    *_BLOCK,
    *_linear(f"{_LAYER}.self_attn.q_proj", "blocks/attention/q", *_HEADS),
    *_linear(f"{_LAYER}.self_attn.k_proj", "blocks/attention/k", *_HEADS),
    *_linear(f"{_LAYER}.self_attn.v_proj", "blocks/attention/v", *_HEADS),
    *_norm(f"{_LAYER}.self_attn.q_norm", "blocks/attention/q_norm", "head"),
    *_norm(f"{_LAYER}.self_attn.k_norm", "blocks/attention/k_norm", "head"),
    *_linear(f"{_LAYER}.mlp.gate_proj", "blocks/mlp/gate", *_UP),
    *_linear(f"{_LAYER}.mlp.up_proj", "blocks/mlp/up", *_UP),
    *_ENDS[1:],
)
"""Llama's names, with those of the biases and norms that other families add to them."""

_QKV = ("blocks/attention/q/w", "blocks/attention/k/w", "blocks/attention/v/w")

PHI3_RULES = (
    _ENDS[0],
    *_BLOCK,
    Rule(f"{_LAYER}.self_attn.qkv_proj.weight", _HEADS[0], _QKV),
    Rule(f"{_LAYER}.mlp.gate_up_proj.weight", _UP[0], ("blocks/mlp/gate/w", "blocks/mlp/up/w")),
    *_ENDS[1:],
)
"""Llama's, with fused projections."""

_H = "transformer.h.{layer}"

GPT2_RULES = (  # its Conv1D stores weights as we do, [in, out]
    Rule("transformer.wte.weight", "vocab embed -> vocab embed", ("embed",)),
    Rule("transformer.wpe.weight", "position embed -> position embed", ("positions",)),
    *_norm(f"{_H}.ln_1", "blocks/attention_norm"),
    Rule(f"{_H}.attn.c_attn.weight", "embed (heads head) -> embed heads head", _QKV, fused=1),
    Rule(
        f"{_H}.attn.c_attn.bias",
        "(heads head) -> heads head",
        tuple(path.removesuffix("w") + "b" for path in _QKV),
    ),
    *_linear(
        f"{_H}.attn.c_proj",
        "blocks/attention/out",
        "(heads head) embed -> heads head embed",
        "embed -> embed",
    ),
    *_norm(f"{_H}.ln_2", "blocks/mlp_norm"),
    *_linear(f"{_H}.mlp.c_fc", "blocks/mlp/up", "embed mlp -> embed mlp", "mlp -> mlp"),
    *_linear(f"{_H}.mlp.c_proj", "blocks/mlp/down", "mlp embed -> mlp embed", "embed -> embed"),
    *_norm("transformer.ln_f", "norm"),
    Rule("lm_head.weight", "vocab embed -> embed vocab", ("unembed",)),
)
"""GPT-2's names."""


_DECODER = (
    settings.only("is_encoder_decoder", False, why="encoder"),
    settings.only("add_cross_attention", False, why="attention to another sequence"),
)


def _llama_like(
    *,
    vocab_size: int,
    embed_dim: int,
    mlp_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None,
    max_seq: int,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    tied: bool = False,
) -> tuple[Aspect, ...]:
    """What Llama and its descendants say in the same words; numbers are transformers' defaults."""
    same, fixed = settings.same, settings.fixed
    return (
        same("vocab_size", "vocab_size", vocab_size),
        same("hidden_size", "embed_dim", embed_dim),
        same("intermediate_size", "mlp_dim", mlp_dim),
        same("num_hidden_layers", "num_layers", num_layers),
        same("num_attention_heads", "num_heads", num_heads),
        same("max_position_embeddings", "max_seq", max_seq),
        same("rms_norm_eps", "norm_eps", norm_eps),
        same("tie_word_embeddings", "tied", tied),
        settings.derived("num_key_value_heads", "num_kv_heads", num_kv_heads, "kv_heads"),
        settings.derived("head_dim", "head_dim", head_dim, "head_size"),
        settings.rope(),
        fixed("norm", "rms"),
        fixed("gated", True),
        fixed("positions", "rope"),
        settings.only("rope_interleaved", False, why="interleaved rope"),
        settings.only("use_mrope", False, why="positions of images"),
        *_DECODER,
    )


_PLAIN = (
    settings.activation("hidden_act", "silu"),
    settings.fixed("zero_centered_norm", False),
    settings.fixed("embed_scale", 1.0),
)
_NO_QK_NORM = settings.fixed("qk_norm", False)
_NO_BIASES = (settings.fixed("bias", False), settings.fixed("qkv_bias", False))

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
    (*_llama_like(**_LLAMA), *_PLAIN, _NO_QK_NORM, settings.biases(), settings.heads_divide()),
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    LLAMA_RULES,
    (
        *_llama_like(**_MISTRAL),
        *_PLAIN,
        _NO_QK_NORM,
        settings.window(4096, switched=False),
        *_NO_BIASES,
    ),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    LLAMA_RULES,
    (
        *_llama_like(**_QWEN),
        *_PLAIN,
        _NO_QK_NORM,
        settings.window(4096, switched=True),
        settings.biases("qkv_bias"),
    ),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    LLAMA_RULES,
    (
        *_llama_like(**_QWEN, head_dim=128),
        *_PLAIN,
        settings.fixed("qk_norm", True),
        settings.window(4096, switched=True),
        settings.only("attention_bias", False, why="biases on attention alone"),
        *_NO_BIASES,
    ),
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    PHI3_RULES,
    (
        *_llama_like(**_PHI3, norm_eps=1e-5),
        *_PLAIN,
        _NO_QK_NORM,
        settings.window(None, switched=False),
        *_NO_BIASES,
    ),
    ignored=("original_max_position_embeddings",),
)
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    LLAMA_RULES,
    (
        *_llama_like(**_GEMMA, tied=True),
        # the first releases say "gelu" and mean its tanh approximation
        settings.activation("hidden_act", "gelu_pytorch_tanh", gelu="gelu_tanh"),
        settings.only("hidden_activation", None, "gelu_pytorch_tanh", why="second activation"),
        settings.only("use_bidirectional_attention", None, False, why="attention to later tokens"),
        settings.only("attention_bias", False, why="biases on attention alone"),
        settings.fixed("zero_centered_norm", True),
        settings.scaled_embedding(),
        _NO_QK_NORM,
        *_NO_BIASES,
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
        _NO_QK_NORM,
        settings.fixed("zero_centered_norm", False),
        settings.fixed("embed_scale", 1.0),
        settings.only("scale_attn_weights", True, why="unscaled attention"),
        settings.only(
            "scale_attn_by_inverse_layer_idx", False, why="attention scaled by its layer"
        ),
        *_DECODER,
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
    {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, PHI3, GPT2)}
)
"""Families by transformers' name in config.json. Of those that fit a model, the first is chosen."""

LACKING: Mapping[str, str] = MappingProxyType(
    {
        "mixtral": "experts",
        "qwen2_moe": "experts",
        "qwen3_moe": "experts",
        "llama4_text": "experts",
        "deepseek_v2": "experts and latent attention",
        "deepseek_v3": "experts and latent attention",
        "gpt_oss": "experts and attention sinks",
        "gemma2": "soft-capped logits, norms after sublayers and local attention layers",
        "gemma3": "norms after sublayers and local attention layers, or images",
        "gemma3_text": "norms after sublayers and local attention layers",
    }
)
"""What this decoder lacks for families that people ask for."""
