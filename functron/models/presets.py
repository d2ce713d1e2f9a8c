"""Named architectures: published sizes of well-known families, and small ones to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from functron import nn
from functron.errors import nearest
from functron.models.config import GPTConfig
from functron.models.dense_presets import DENSE_PRESETS
from functron.nn.moe import MoEConfig


def _gpt2(num_layers: int, embed_dim: int, num_heads: int, **changes) -> GPTConfig:
    settings = {
        "vocab_size": 50257,
        "mlp_dim": 4 * embed_dim,
        "max_seq": 1024,
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated": False,
        "bias": True,
        "positions": "learned",
        "tied": True,
        **changes,
    }
    return GPTConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads, **settings)


def _llama3(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **changes) -> GPTConfig:
    settings = {
        "vocab_size": 128256,
        "num_kv_heads": 8,
        "max_seq": 8192,
        "rope_theta": 500000.0,
        **changes,
    }
    return GPTConfig(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        **settings,
    )


@dataclass(frozen=True)
class _Presets(Mapping[str, GPTConfig]):
    """Named configs; an unknown name is an error that suggests the nearest."""

    configs: Mapping[str, GPTConfig] = field(default_factory=dict)

    def __getitem__(self, name: str) -> GPTConfig:
        if name not in self.configs:
            raise ValueError(f"model: got {name!r}; {nearest(name, self.configs)}")
        return self.configs[name]

    def __contains__(self, name: object) -> bool:
        return name in self.configs

    def __iter__(self):
        return iter(self.configs)

    def __len__(self) -> int:
        return len(self.configs)


def _mixtral(
    num_layers: int, embed_dim: int, num_heads: int, expert_dim: int, **changes
) -> GPTConfig:
    # transformers' coefficient 0.02 counts the load of both experts of a token: twice ours
    moe = MoEConfig(8, 2, expert_dim, renormalise=True, aux_loss=0.04, aux="batch")
    settings = {
        "vocab_size": 32000,
        "num_kv_heads": 8,
        "mlp_dim": expert_dim,
        "max_seq": 32768,
        "rope_theta": 1e6,
        "moe": moe,
        **changes,
    }
    return GPTConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads, **settings)


def _qwen3_moe(
    num_layers: int, embed_dim: int, num_heads: int, moe: MoEConfig, **changes
) -> GPTConfig:
    settings = {
        "vocab_size": 151936,
        "num_kv_heads": 4,
        "head_dim": 128,
        "mlp_dim": 3 * embed_dim,
        "max_seq": 40960,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "qk_norm": True,
        "moe": moe,
        **changes,
    }
    return GPTConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads, **settings)


def _gpt_oss(num_layers: int, moe: MoEConfig, **changes) -> GPTConfig:
    settings = {
        "vocab_size": 201088,
        "embed_dim": 2880,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 64,
        "mlp_dim": 2880,
        "max_seq": 131072,
        "activation": "clamped_swiglu",
        "bias": True,
        "rope_theta": 150000.0,
        "rope_scaling": nn.RopeScaling(32.0, original_max_seq=4096, kind="yarn", truncate=False),
        "window": 128,
        "global_every": 2,
        "sinks": True,
        "moe": moe,
        **changes,
    }
    return GPTConfig(num_layers=num_layers, **settings)


def _deepseek(
    num_layers: int, embed_dim: int, num_heads: int, moe: MoEConfig, **changes
) -> GPTConfig:
    settings = {
        "vocab_size": 129280,
        "head_dim": 128,
        "q_rank": 1536,
        "kv_rank": 512,
        "rope_head_dim": 64,
        "v_head_dim": 128,
        "mlp_dim": 18432,
        "max_seq": 163840,
        "norm_eps": 1e-6,
        "rope_scaling": nn.RopeScaling(
            40.0, original_max_seq=4096, kind="yarn", mscale=1.0, mscale_all_dim=1.0
        ),
        "dense_layers": 3,
        "mtp_depth": 1,
        "moe": moe,
        **changes,
    }
    return GPTConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads, **settings)


_V3 = MoEConfig(
    256, 8, 2048, score="sigmoid", renormalise=True, scale=2.5, num_groups=8, top_groups=4,
    balance_bias=True, aux_loss=1e-4, shared_dim=2048,
)  # fmt: skip
_OSS = MoEConfig(32, 4, 2880, normalise="after", router_bias=True, expert_bias=True, aux_loss=4e-2)
_QWEN3 = MoEConfig(128, 8, 768, renormalise=True, aux_loss=8e-3, aux="batch")
_TINY = {"vocab_size": 256, "max_seq": 256}
_LONG = {"rope_scaling": nn.RopeScaling(), "max_seq": 131072}

PRESETS: Mapping[str, GPTConfig] = _Presets(
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
