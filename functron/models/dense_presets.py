"""Published sizes of dense families after Llama: Qwen, Mistral, Gemma, OLMo, Phi, GLM, Nemotron."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from functron import nn
from functron.models.config import GPTConfig


def _qwen25(num_layers: int, embed_dim: int, num_heads: int, kv: int, mlp_dim: int, **changes):
    settings: dict[str, Any] = {
        "vocab_size": 152064,
        "num_kv_heads": kv,
        "max_seq": 131072,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "qkv_bias": True,
        **changes,
    }
    return _sized(num_layers, embed_dim, num_heads, mlp_dim, settings)


def _qwen3(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **changes):
    settings: dict[str, Any] = {
        "vocab_size": 151936,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_seq": 40960,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "qk_norm": True,
        **changes,
    }
    return _sized(num_layers, embed_dim, num_heads, mlp_dim, settings)


def _gemma(num_layers: int, embed_dim: int, num_heads: int, kv: int, mlp_dim: int, **changes):
    settings: dict[str, Any] = {
        "vocab_size": 256000,
        "num_kv_heads": kv,
        "head_dim": 256,
        "max_seq": 8192,
        "norm_eps": 1e-6,
        "activation": "gelu_tanh",
        "zero_centered_norm": True,
        "embed_scale": embed_dim**0.5,
        "tied": True,
        **changes,
    }
    return _sized(num_layers, embed_dim, num_heads, mlp_dim, settings)


def _gemma2(*sizes: int, scalar: int = 256, **changes):
    options = {
        "sublayer_norms": "both",
        "attention_scale": scalar**-0.5,
        "score_cap": 50.0,
        "logit_cap": 30.0,
        "window": 4096,
        "global_every": 2,
    }
    return _gemma(*sizes, **options, **changes)


def _gemma3(*sizes: int, scalar: int = 256, **changes):
    options: dict[str, Any] = {
        "vocab_size": 262208,
        "max_seq": 131072,
        "sublayer_norms": "both",
        "attention_scale": scalar**-0.5,
        "qk_norm": True,
        "window": 1024,
        "global_every": 6,
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
        "rope_scaling": nn.RopeScaling(8.0, kind="linear"),
    }
    return _gemma(*sizes, **{**options, **changes})


def _olmo2(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **changes):
    settings: dict[str, Any] = {
        "vocab_size": 100352,
        "max_seq": 4096,
        "rope_theta": 500000.0,
        "norm_eps": 1e-6,
        "sublayer_norms": "after",
        "qk_norm": True,
        "qk_norm_across": True,
        **changes,
    }
    return _sized(num_layers, embed_dim, num_heads, mlp_dim, settings)


def _olmo(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **changes):
    settings: dict[str, Any] = {
        "vocab_size": 50304,
        "max_seq": 2048,
        "norm": "bare_layer",
        **changes,
    }
    return _sized(num_layers, embed_dim, num_heads, mlp_dim, settings)


def _glm(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **changes):
    settings: dict[str, Any] = {
        "vocab_size": 151552,
        "num_kv_heads": 2,
        "head_dim": 128,
        "max_seq": 131072,
        "norm_eps": 1.5625e-7,
        "qkv_bias": True,
        "rope_pairs": "neighbours",
        "rope_fraction": 0.5,
        **changes,
    }
    return _sized(num_layers, embed_dim, num_heads, mlp_dim, settings)


def _nemotron(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **changes):
    settings: dict[str, Any] = {
        "vocab_size": 256000,
        "num_kv_heads": 8,
        "max_seq": 4096,
        "norm": "layer",
        "zero_centered_norm": True,
        "activation": "relu2",
        "gated": False,
        "rope_fraction": 0.5,
        **changes,
    }
    return _sized(num_layers, embed_dim, num_heads, mlp_dim, settings)


def _sized(
    num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, settings: Mapping[str, Any]
) -> GPTConfig:
    sizes = {"num_layers": num_layers, "embed_dim": embed_dim, "num_heads": num_heads}
    return GPTConfig(**sizes, mlp_dim=mlp_dim, **settings)


_MISTRAL: Mapping[str, Any] = MappingProxyType(
    {"vocab_size": 32000, "num_kv_heads": 8, "max_seq": 32768, "window": 4096}
)
_SMALL: Mapping[str, Any] = MappingProxyType({"vocab_size": 151936, "tied": True, "max_seq": 32768})
_TINY: Mapping[str, Any] = MappingProxyType({"vocab_size": 256, "max_seq": 256})

DENSE_PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "mistral-7b": _sized(32, 4096, 32, 14336, _MISTRAL),
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
        "gemma2-tiny": _gemma2(2, 64, 4, 2, 192, scalar=16, head_dim=16, **_TINY),
        "gemma2-2b": _gemma2(26, 2304, 8, 4, 9216),
        "gemma2-9b": _gemma2(42, 3584, 16, 8, 14336),
        "gemma2-27b": _gemma2(46, 4608, 32, 16, 36864, scalar=144, head_dim=128),
        "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, vocab_size=262144, max_seq=32768, window=512,
                             rope_scaling=None),
        "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240),
        "gemma3-12b": _gemma3(48, 3840, 16, 8, 15360),
        "gemma3-27b": _gemma3(62, 5376, 32, 16, 21504, scalar=168, head_dim=128),
        "olmo-tiny": _olmo(2, 64, 4, 192, qkv_clip=8.0, **_TINY),
        "olmo-1b": _olmo(16, 2048, 16, 8192, tied=True),
        "olmo-7b": _olmo(32, 4096, 32, 11008),
        "olmo2-7b": _olmo2(32, 4096, 32, 11008),
        "olmo2-13b": _olmo2(40, 5120, 40, 13824),
        "olmo2-32b": _olmo2(64, 5120, 40, 27648, num_kv_heads=8),
        "phi3-mini": _sized(32, 3072, 32, 8192, {"vocab_size": 32064, "max_seq": 4096,
                                                 "window": 2047}),
        "glm-tiny": _glm(2, 64, 4, 192, head_dim=16, **_TINY),
        "glm4-9b": _glm(40, 4096, 32, 13696),
        "nemotron-tiny": _nemotron(2, 64, 4, 192, num_kv_heads=2, **_TINY),
        "nemotron-4-15b": _nemotron(32, 6144, 48, 24576),
        "nemotron-4-340b": _nemotron(96, 18432, 96, 73728),
    }
)  # fmt: skip
"""Named architectures, with their papers' and files' sizes; "tiny" ones to try."""
