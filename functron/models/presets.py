"""Named decoders: published sizes of well-known families, and small ones to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from functron import nn
from functron.models.config import GPTConfig, Named
from functron.nn.moe import MoEConfig

_SIZES = ("num_layers", "embed_dim", "num_heads", "mlp_dim")
_GROUPED = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim")
_EXPERTS = ("num_layers", "embed_dim", "num_heads", "moe")


def _family(names: Sequence[str], **settings: Any) -> Callable[..., GPTConfig]:
    """``(*sizes, **changes) -> GPTConfig``, with what the models of a family have in common.

    Args:
        names: the fields that differ from model to model, in the order of `sizes`.
        settings: the other fields, as far as the family does not have `GPTConfig`'s defaults.
    """

    def config(*sizes: Any, **changes: Any) -> GPTConfig:
        return GPTConfig(**{**settings, **dict(zip(names, sizes, strict=True)), **changes})

    return config


_plain = _family(_SIZES)
_qwen25 = _family(
    _GROUPED, vocab_size=152064, max_seq=131072, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True,
)  # fmt: skip
_qwen3 = _family(
    _SIZES, vocab_size=151936, num_kv_heads=8, head_dim=128, max_seq=40960, rope_theta=1e6,
    norm_eps=1e-6, qk_norm=True,
)  # fmt: skip
_olmo = _family(_SIZES, vocab_size=50304, max_seq=2048, norm="bare_layer")
_olmo2 = _family(
    _SIZES, vocab_size=100352, max_seq=4096, rope_theta=500000.0, norm_eps=1e-6,
    sublayer_norms="after", qk_norm=True, qk_norm_across=True,
)  # fmt: skip
_glm = _family(
    _SIZES, vocab_size=151552, num_kv_heads=2, head_dim=128, max_seq=131072, norm_eps=1.5625e-7,
    qkv_bias=True, rope_pairs="neighbours", rope_fraction=0.5,
)  # fmt: skip
_nemotron = _family(
    _SIZES, vocab_size=256000, num_kv_heads=8, max_seq=4096, norm="layer", zero_centered_norm=True,
    activation="relu2", gated=False, rope_fraction=0.5,
)  # fmt: skip


def _gemma(num_layers: int, embed_dim: int, *sizes: int, **changes: Any) -> GPTConfig:
    family = _family(
        _GROUPED, vocab_size=256000, head_dim=256, max_seq=8192, norm_eps=1e-6,
        activation="gelu_tanh", zero_centered_norm=True, embed_scale=embed_dim**0.5, tied=True,
    )  # fmt: skip
    return family(num_layers, embed_dim, *sizes, **changes)


def _gemma2(*sizes: int, scalar: int = 256, **changes: Any) -> GPTConfig:
    options: dict[str, Any] = {
        "sublayer_norms": "both", "attention_scale": scalar**-0.5, "score_cap": 50.0,
        "logit_cap": 30.0, "window": 4096, "global_every": 2,
    }  # fmt: skip
    return _gemma(*sizes, **options, **changes)


def _gemma3(*sizes: int, scalar: int = 256, **changes: Any) -> GPTConfig:
    options: dict[str, Any] = {
        "vocab_size": 262208, "max_seq": 131072, "sublayer_norms": "both", "qk_norm": True,
        "attention_scale": scalar**-0.5, "window": 1024, "global_every": 6, "rope_theta": 1e6,
        "local_rope_theta": 1e4, "rope_scaling": nn.RopeScaling(8.0, kind="linear"),
    }  # fmt: skip
    return _gemma(*sizes, **{**options, **changes})


_MISTRAL: Mapping[str, Any] = MappingProxyType(
    {"vocab_size": 32000, "num_kv_heads": 8, "max_seq": 32768, "window": 4096}
)
_SMALL: Mapping[str, Any] = MappingProxyType({"vocab_size": 151936, "tied": True, "max_seq": 32768})
_DENSE_TINY: Mapping[str, Any] = MappingProxyType({"vocab_size": 256, "max_seq": 256})

DENSE_PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "mistral-7b": _plain(32, 4096, 32, 14336, **_MISTRAL),
        "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, **_SMALL),
        "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, **{**_SMALL, "max_seq": 131072}),
        "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, **_SMALL),
        "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944),
        "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824, norm_eps=1e-5),
        "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648, norm_eps=1e-5),
        "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568, norm_eps=1e-5),
        "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
        "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
        "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
        "qwen3-8b": _qwen3(36, 4096, 32, 12288),
        "qwen3-14b": _qwen3(40, 5120, 40, 17408),
        "qwen3-32b": _qwen3(64, 5120, 64, 25600),
        "gemma-2b": _gemma(18, 2048, 8, 1, 16384),
        "gemma-7b": _gemma(28, 3072, 16, 16, 24576),
        "gemma2-tiny": _gemma2(2, 64, 4, 2, 192, scalar=16, head_dim=16, **_DENSE_TINY),
        "gemma2-2b": _gemma2(26, 2304, 8, 4, 9216),
        "gemma2-9b": _gemma2(42, 3584, 16, 8, 14336),
        "gemma2-27b": _gemma2(46, 4608, 32, 16, 36864, scalar=144, head_dim=128),
        "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, vocab_size=262144, max_seq=32768, window=512,
                             rope_scaling=None),
        "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240),
        "gemma3-12b": _gemma3(48, 3840, 16, 8, 15360),
        "gemma3-27b": _gemma3(62, 5376, 32, 16, 21504, scalar=168, head_dim=128),
        "olmo-tiny": _olmo(2, 64, 4, 192, qkv_clip=8.0, **_DENSE_TINY),
        "olmo-1b": _olmo(16, 2048, 16, 8192, tied=True),
        "olmo-7b": _olmo(32, 4096, 32, 11008),
        "olmo2-7b": _olmo2(32, 4096, 32, 11008),
        "olmo2-13b": _olmo2(40, 5120, 40, 13824),
        "olmo2-32b": _olmo2(64, 5120, 40, 27648, num_kv_heads=8),
        "phi3-mini": _plain(32, 3072, 32, 8192, vocab_size=32064, max_seq=4096, window=2047),
        "glm-tiny": _glm(2, 64, 4, 192, head_dim=16, **_DENSE_TINY),
        "glm4-9b": _glm(40, 4096, 32, 13696),
        "nemotron-tiny": _nemotron(2, 64, 4, 192, num_kv_heads=2, **_DENSE_TINY),
        "nemotron-4-15b": _nemotron(32, 6144, 48, 24576),
        "nemotron-4-340b": _nemotron(96, 18432, 96, 73728),
    }
)  # fmt: skip
"""Named architectures, with their papers' and files' sizes; "tiny" ones to try."""


def _gpt2(num_layers: int, embed_dim: int, num_heads: int, **changes: Any) -> GPTConfig:
    family = _family(
        _SIZES, vocab_size=50257, max_seq=1024, norm="layer", activation="gelu_tanh", gated=False,
        bias=True, positions="learned", tied=True,
    )  # fmt: skip
    return family(num_layers, embed_dim, num_heads, 4 * embed_dim, **changes)


_llama3 = _family(_SIZES, vocab_size=128256, num_kv_heads=8, max_seq=8192, rope_theta=500000.0)


def _mixtral(*sizes: int, **changes: Any) -> GPTConfig:
    # transformers' coefficient 0.02 counts the load of both experts of a token: twice ours
    moe = MoEConfig(8, 2, sizes[3], renormalise=True, aux_loss=0.04, aux="batch")
    family = _family(
        _SIZES, vocab_size=32000, num_kv_heads=8, max_seq=32768, rope_theta=1e6, moe=moe
    )
    return family(*sizes, **changes)


def _qwen3_moe(num_layers: int, embed_dim: int, *sizes: Any, **changes: Any) -> GPTConfig:
    family = _family(
        _EXPERTS, vocab_size=151936, num_kv_heads=4, head_dim=128, mlp_dim=3 * embed_dim,
        max_seq=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True,
    )  # fmt: skip
    return family(num_layers, embed_dim, *sizes, **changes)


_gpt_oss = _family(
    ("num_layers", "moe"), vocab_size=201088, embed_dim=2880, num_heads=64, num_kv_heads=8,
    head_dim=64, mlp_dim=2880, max_seq=131072, activation="clamped_swiglu", bias=True,
    rope_theta=150000.0, window=128, global_every=2, sinks=True,
    rope_scaling=nn.RopeScaling(32.0, original_max_seq=4096, kind="yarn", truncate=False),
)  # fmt: skip
_deepseek = _family(
    _EXPERTS, vocab_size=129280, head_dim=128, q_rank=1536, kv_rank=512, rope_head_dim=64,
    v_head_dim=128, mlp_dim=18432, max_seq=163840, norm_eps=1e-6, dense_layers=3, mtp_depth=1,
    rope_scaling=nn.RopeScaling(
        40.0, original_max_seq=4096, kind="yarn", mscale=1.0, mscale_all_dim=1.0
    ),
)  # fmt: skip
_V3 = MoEConfig(
    256, 8, 2048, score="sigmoid", renormalise=True, scale=2.5, num_groups=8, top_groups=4,
    balance_bias=True, aux_loss=1e-4, shared_dim=2048,
)  # fmt: skip
_OSS = MoEConfig(32, 4, 2880, normalise="after", router_bias=True, expert_bias=True, aux_loss=4e-2)
_QWEN3 = MoEConfig(128, 8, 768, renormalise=True, aux_loss=8e-3, aux="batch")
_TINY = {"vocab_size": 256, "max_seq": 256}
_LONG = {"rope_scaling": nn.RopeScaling(), "max_seq": 131072}

PRESETS: Mapping[str, GPTConfig] = Named(
    {
        "tiny": GPTConfig(),
        "gpt2-tiny": _gpt2(2, 64, 4, vocab_size=256, max_seq=256),
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "gpt3-175b": _gpt2(96, 12288, 96, max_seq=2048),
        "llama3-tiny": _llama3(2, 64, 8, 192, num_kv_heads=4, vocab_size=256, max_seq=256),
        "llama-tiny": _llama3(2, 64, 4, 192, num_kv_heads=2, vocab_size=256, max_seq=131072),
        "llama3-1b": _llama3(16, 2048, 32, 8192, tied=True, max_seq=131072,
                             rope_scaling=nn.RopeScaling(factor=32.0)),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248, **_LONG),
        "mixtral-tiny": _mixtral(2, 64, 8, 96, num_kv_heads=4, **_TINY),
        "mixtral-8x7b": _mixtral(32, 4096, 32, 14336),
        "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, max_seq=65536),
        "qwen3-moe-tiny": _qwen3_moe(
            2, 64, 8, replace(_QWEN3, num_experts=8, top_k=2, expert_dim=48), head_dim=8, **_TINY
        ),
        "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, _QWEN3),
        "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, replace(_QWEN3, expert_dim=1536)),
        "gpt-oss-tiny": _gpt_oss(
            2, replace(_OSS, num_experts=8, top_k=2, expert_dim=64), embed_dim=64, num_heads=8,
            num_kv_heads=2, head_dim=8, mlp_dim=64, window=16, **_TINY,
        ),
        "gpt-oss-20b": _gpt_oss(24, _OSS),
        "gpt-oss-120b": _gpt_oss(36, replace(_OSS, num_experts=128)),
        "deepseek-v3-tiny": _deepseek(
            3, 64, 8, replace(_V3, num_experts=8, top_k=2, expert_dim=32, shared_dim=32,
                              num_groups=4, top_groups=2),
            dense_layers=1, head_dim=8, q_rank=32, kv_rank=16, rope_head_dim=8, v_head_dim=8,
            mlp_dim=192, **_TINY,
        ),
        "deepseek-v3": _deepseek(61, 7168, 128, _V3),
        **DENSE_PRESETS,
    }
)  # fmt: skip
"""Named architectures: "tiny" trains on a laptop; the others have their papers' sizes."""
