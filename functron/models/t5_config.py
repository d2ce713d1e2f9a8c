"""The architecture of a T5, and named ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from functron import nn
from functron.errors import Problem, raise_problems
from functron.models.config import Dtype
from functron.models.stack import Named, choice_problems, head_problems, padded, size_problems


@dataclass(frozen=True)
class T5Config:
    """Architecture of a T5 (Raffel et al. 2020), version 1.0 or 1.1.

    Attributes:
        vocab_size: token ids are 0 to ``vocab_size - 1``.
        num_layers: blocks of the encoder.
        decoder_layers: of the decoder; 0: as many.
        embed_dim: width of the streams.
        num_heads: heads of attention.
        head_dim: width of a head; 0: ``embed_dim // num_heads``.
        mlp_dim: width of feed-forward hidden layers.
        num_buckets: of relative positions, of which each stack has a bias per bucket and head.
        max_distance: from which on all are one bucket.
        activation: of feed-forward layers: relu in 1.0, gelu_tanh in 1.1.
        gated: multiply it by a second projection (1.1).
        tied: one matrix for embedding and unembedding, the decoder's result being divided by
            sqrt(embed_dim) before (1.0); else two, and nothing is divided (1.1).
        start_id: the token that the decoder begins with; that of padding in published models.
        norm_eps: epsilon of the norms.
        dropout: rate on the embeddings, on what sublayers add, and on the stacks' results;
            attention probabilities and hidden features are not dropped.
        init_factor: multiplies the deviations of initial matrices, which are those of the paper's
            code.
        vocab_multiple: the vocabulary is padded to a multiple of it.
        dtype: of parameters and activations.
    """

    vocab_size: int = 256
    num_layers: int = 2
    decoder_layers: int = 0
    embed_dim: int = 256
    num_heads: int = 8
    head_dim: int = 0
    mlp_dim: int = 1024
    num_buckets: int = 32
    max_distance: int = 128
    activation: nn.Activation = "gelu_tanh"
    gated: bool = True
    tied: bool = False
    start_id: int = 0
    norm_eps: float = 1e-6
    dropout: float = 0.0
    init_factor: float = 1.0
    vocab_multiple: int = 384
    dtype: Dtype = "float32"

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "mlp_dim")
        found = size_problems(self, *sizes, "vocab_multiple")
        if not self.head_dim and not found:
            found += head_problems("num_heads", self.embed_dim, self.num_heads)
        if self.num_buckets < 4 or self.num_buckets % 4:
            got, fix = str(self.num_buckets), "32 in published models"
            found.append(Problem("num_buckets", got, "a multiple of 4", fix))
        if self.max_distance <= self.num_buckets // 2:
            got = f"{self.max_distance} for num_buckets={self.num_buckets}"
            found.append(Problem("max_distance", got, "more than half the buckets", "raise it"))
        if not 0 <= self.start_id < max(self.vocab_size, 1):
            found.append(Problem("start_id", str(self.start_id), "a token of the vocabulary"))
        found += choice_problems(self, {"activation": nn.Activation, "dtype": Dtype})
        if not 0 <= self.dropout < 1:
            found.append(Problem("dropout", str(self.dropout), "at least 0 and below 1"))
        raise_problems("T5Config describes no model", found)

    @property
    def random(self) -> bool:
        """Whether training draws random numbers."""
        return self.dropout > 0

    @property
    def layers(self) -> dict[str, int]:
        """The blocks of each stack."""
        return {"encoder": self.num_layers, "decoder": self.decoder_layers or self.num_layers}

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        return padded(self.vocab_size, self.vocab_multiple)

    @property
    def attention(self) -> nn.AttentionConfig:
        """The shapes of all attention layers."""
        heads = self.num_heads
        return nn.AttentionConfig(
            self.embed_dim, heads, heads, self.head_dim or self.embed_dim // heads
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return getattr(torch, self.dtype)


def _t5(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, head_dim: int = 64):
    return T5Config(
        vocab_size=32128, num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads,
        mlp_dim=mlp_dim, head_dim=head_dim, activation="relu", gated=False, tied=True, dropout=0.1,
    )  # fmt: skip


def _t5_1_1(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int):
    return T5Config(
        vocab_size=32128, num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads,
        mlp_dim=mlp_dim, head_dim=64,
    )  # fmt: skip


PRESETS: Mapping[str, T5Config] = Named(
    {
        # of bytes, with one token that ends a text and 127 sentinels
        "t5-tiny": T5Config(vocab_size=384, embed_dim=64, num_heads=4, mlp_dim=128),
        "t5-small": _t5(6, 512, 8, 2048),
        "t5-base": _t5(12, 768, 12, 3072),
        "t5-large": _t5(24, 1024, 16, 4096),
        "t5-3b": _t5(24, 1024, 32, 16384, head_dim=128),
        "t5-11b": _t5(24, 1024, 128, 65536, head_dim=128),
        "t5-1.1-base": _t5_1_1(12, 768, 12, 2048),
        "t5-1.1-large": _t5_1_1(24, 1024, 16, 2816),
        "t5-1.1-xl": _t5_1_1(24, 2048, 32, 5120),
        "t5-1.1-xxl": _t5_1_1(24, 4096, 64, 10240),
    }
)
"""Named architectures: "t5-tiny" trains on a laptop; the others have the published sizes."""
