"""The architecture of a Mamba-2 model or a hybrid of it, and named ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from functron import nn
from functron.errors import Problem, raise_problems
from functron.models.config import Dtype
from functron.models.stack import Named, choice_problems, padded, size_problems
from functron.nn.mamba import Mamba2Config

KINDS: Mapping[str, str] = MappingProxyType({"M": "mamba", "*": "attention", "-": "mlp"})
"""What the letters of a pattern stand for, as in Megatron."""


@dataclass(frozen=True)
class MambaConfig:
    """Architecture of a Mamba-2 model, or a hybrid.

    Attributes:
        pattern: a letter per layer: ``M`` a state space, ``*`` attention, ``-`` a feed-forward
            layer.
        vocab_size: token ids are 0 to ``vocab_size - 1``.
        embed_dim: width of the residual stream.
        num_heads: heads of the state space, of `head_dim` each; twice `embed_dim` together in
            Mamba-2.
        head_dim: width of a head of the state space.
        num_groups: groups of B and C; see `nn.Mamba2Config`.
        state_dim: numbers of state per feature.
        conv_width: tokens that the short convolution sees.
        chunk: tokens per chunk of the state space; the numbers do not depend on it.
        conv_bias: biases on the convolution.
        dt_min: step sizes are at least this (0.001 in Nemotron-H).
        attention_heads: query heads of attention layers.
        attention_kv_heads: their key/value heads; 0: as many.
        attention_head_dim: width of these; 0: ``embed_dim // attention_heads``.
        mlp_dim: width of feed-forward layers.
        activation: of feed-forward layers.
        gated: multiply it by a second projection.
        bias: biases on all linear layers.
        norm_eps: epsilon of all norms.
        tied: one matrix for embedding and unembedding.
        dropout: rate on the embedding and on what each layer adds.
        init_stddev: of all matrices; those that write to the stream are divided by
            sqrt(2 layers).
        vocab_multiple: the vocabulary is padded to a multiple of it.
        dtype: of parameters and activations; decays and steps are float32 at least.
    """

    pattern: str = "MMMM"
    vocab_size: int = 256
    embed_dim: int = 256
    num_heads: int = 8
    head_dim: int = 64
    num_groups: int = 1
    state_dim: int = 64
    conv_width: int = 4
    chunk: int = 64
    conv_bias: bool = True
    dt_min: float = 0.0
    attention_heads: int = 8
    attention_kv_heads: int = 0
    attention_head_dim: int = 0
    mlp_dim: int = 1024
    activation: nn.Activation = "relu2"
    gated: bool = False
    bias: bool = False
    norm_eps: float = 1e-5
    tied: bool = True
    dropout: float = 0.0
    init_stddev: float = 0.02
    vocab_multiple: int = 384
    dtype: Dtype = "float32"

    def __post_init__(self):
        raise_problems("MambaConfig describes no model", self._problems())

    def _problems(self) -> list[Problem]:
        sizes = ("vocab_size", "embed_dim", "num_heads", "head_dim", "num_groups", "state_dim")
        sizes = (*sizes, "conv_width", "chunk", "attention_heads", "mlp_dim", "vocab_multiple")
        found = size_problems(self, *sizes)
        others = sorted(set(self.pattern) - set(KINDS))
        if others or not self.pattern:
            known = ", ".join(f"{letter} ({kind})" for letter, kind in KINDS.items())
            found.append(Problem("pattern", repr(self.pattern), f"a letter per layer: {known}"))
        if not found and self.num_heads % self.num_groups:
            got = f"{self.num_groups} for num_heads={self.num_heads}"
            found.append(Problem("num_groups", got, "a divisor of num_heads"))
        if self.attention_heads > 0 and self.attention_heads % max(self.kv_heads, 1):
            got = f"{self.kv_heads} for attention_heads={self.attention_heads}"
            found.append(Problem("attention_kv_heads", got, "a divisor of attention_heads"))
        found += choice_problems(self, {"activation": nn.Activation, "dtype": Dtype})
        if self.dt_min < 0:
            found.append(Problem("dt_min", str(self.dt_min), "at least 0"))
        if not 0 <= self.dropout < 1:
            found.append(Problem("dropout", str(self.dropout), "at least 0 and below 1"))
        return found

    @property
    def counts(self) -> dict[str, int]:
        """How many layers there are of each kind, by its name in the parameters."""
        each = {name: self.pattern.count(letter) for letter, name in KINDS.items()}
        return {name: count for name, count in each.items() if count}

    @property
    def kv_heads(self) -> int:
        """Key/value heads of attention layers."""
        return self.attention_kv_heads or self.attention_heads

    @property
    def random(self) -> bool:
        """Whether training draws random numbers."""
        return self.dropout > 0

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        return padded(self.vocab_size, self.vocab_multiple)

    @property
    def mixer(self) -> Mamba2Config:
        """The shapes of the state-space layers."""
        return Mamba2Config(
            self.embed_dim,
            self.num_heads,
            self.head_dim,
            self.num_groups,
            self.state_dim,
            self.conv_width,
            self.chunk,
            bias=self.bias,
            conv_bias=self.conv_bias,
            norm_eps=self.norm_eps,
            dt_limit=(self.dt_min, math.inf),
        )

    @property
    def attention(self) -> nn.AttentionConfig:
        """The shapes of the attention layers."""
        return nn.AttentionConfig(
            self.embed_dim,
            self.attention_heads,
            self.kv_heads,
            self.attention_head_dim or self.embed_dim // self.attention_heads,
            bias=self.bias,
            out_bias=self.bias,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return getattr(torch, self.dtype)


def _mamba2(num_layers: int, embed_dim: int) -> MambaConfig:
    return MambaConfig(
        pattern="M" * num_layers,
        vocab_size=50277,
        embed_dim=embed_dim,
        num_heads=2 * embed_dim // 64,
        state_dim=128,
        chunk=256,
        vocab_multiple=16,
    )


_SMALL: dict[str, Any] = {
    "embed_dim": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_dim": 16,
    "chunk": 16,
}
PRESETS: Mapping[str, MambaConfig] = Named(
    {
        "mamba2-tiny": MambaConfig(pattern="MM", **_SMALL),
        "mamba2-hybrid-tiny": MambaConfig(
            pattern="M-M*-", num_groups=4, mlp_dim=192, attention_kv_heads=4, **_SMALL
        ),
        "mamba2-130m": _mamba2(24, 768),
        "mamba2-370m": _mamba2(48, 1024),
        "mamba2-780m": _mamba2(48, 1536),
        "mamba2-1.3b": _mamba2(48, 2048),
        "mamba2-2.7b": _mamba2(64, 2560),
        "nemotron-h-8b": MambaConfig(
            pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            vocab_size=131072, embed_dim=4096, num_heads=128, num_groups=8, state_dim=128,
            chunk=128, dt_min=1e-3, attention_heads=32, attention_kv_heads=8,
            attention_head_dim=128, mlp_dim=21504, tied=False, vocab_multiple=128,
        ),
    }
)  # fmt: skip
"""Named architectures: the tiny ones train on a laptop; the others have their papers' sizes."""
