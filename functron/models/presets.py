"""Named architectures: the published sizes of GPT-2, GPT-3 and Llama 3, and small ones to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from functron import nn
from functron.errors import nearest
from functron.models.config import GPTConfig


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
        "llama3-1b": _llama3(16, 2048, 32, 8192, tied=True, max_seq=131072,
                             rope_scaling=nn.RopeScaling(factor=32.0)),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248, **_LONG),
    }
)  # fmt: skip
"""Named architectures: "tiny" trains on a laptop; the others have their papers' sizes."""
