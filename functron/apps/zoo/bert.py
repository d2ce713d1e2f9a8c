"""BERT: a bidirectional encoder that predicts masked tokens (Devlin et al. 2019).

Token, position and segment embeddings are summed and normed. Each block adds attention, to all
tokens but padding, and a feed-forward layer, with a norm after each. A dense layer, a norm and the
transposed embedding give the logits. There is no next-sentence loss, which later work found to be
useless (Liu et al. 2019, section 4.2). `functron.apps.zoo.denoising` makes masked batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from functron import nn
from functron.apps.zoo.denoising import MASKED_TOKENS
from functron.apps.zoo.layers import (
    Stack,
    encoder_block,
    encoder_defs,
    head_problems,
    rate_problems,
    size_problems,
    sum_cross_entropies,
    text_rules,
)
from functron.core.errors import public, raise_problems
from functron.core.scopes import named_scope
from functron.core.settings import choice_problems
from functron.core.tables import shows_differences
from functron.core.typing import Float, Int, Key, Tensor
from functron.models.config import Named, TextConfig
from functron.models.family import UNEVEN, Family
from functron.models.options import DEFAULTS, Batch, ModelOptions, num_targets
from functron.nn.layers import linear_defs
from functron.ops.moe import look_up
from functron.spmd import params
from functron.spmd.params import Normal, ParamDef, zeros

__all__ = [
    "PRESETS",
    "BertConfig",
    "defs",
    "encode",
    "flops_per_token",
    "forward",
    "loss",
    "num_targets",
    "rules",
]


@shows_differences
@dataclass(frozen=True, kw_only=True)
class BertConfig(TextConfig):
    """Architecture of a BERT.

    Attributes:
        num_layers: number of blocks.
        embed_dim: width of the residual stream.
        num_heads: number of attention heads.
        mlp_dim: width of the feed-forward hidden layer.
        max_seq: longest sequence, in tokens.
        num_types: number of segment types.
        activation: of feed-forward layers, and of the dense layer before the logits.
        norm_eps: epsilon of the norms.
        init_stddev: standard deviation of all initial matrices.
    """

    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 8
    mlp_dim: int = 1024
    max_seq: int = 512
    num_types: int = 2
    activation: nn.Activation = "gelu"
    norm_eps: float = 1e-12
    init_stddev: float = 0.02

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "mlp_dim", "max_seq")
        found = size_problems(self, *sizes, "num_types", "vocab_multiple")
        found += [] if found else head_problems("num_heads", self.embed_dim, self.num_heads)
        found += choice_problems(self)
        found += rate_problems(self)
        raise_problems("invalid BertConfig", found)

    @property
    def attention(self) -> nn.AttentionConfig:
        """The shapes of the attention layers."""
        return nn.AttentionConfig(embed_dim=self.embed_dim, num_heads=self.num_heads, bias=True)


_WORDS: dict[str, Any] = {"vocab_size": 30522, "dropout": 0.1}
PRESETS: Mapping[str, BertConfig] = Named(
    {
        # of bytes, with one token that ends a text and one that hides others
        "bert-tiny": BertConfig(
            vocab_size=258, num_layers=2, embed_dim=64, num_heads=4, mlp_dim=192
        ),
        "bert-base": BertConfig(num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072, **_WORDS),
        "bert-large": BertConfig(
            num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=4096, **_WORDS
        ),
    }
)
"""Named configs: "bert-tiny" trains on a laptop; the others have the paper's sizes."""


@public
def defs(config: BertConfig) -> dict:
    """The parameters: ``{"embed", "positions", "types", "embed_norm", "blocks", "head"}``.

    Parameters of blocks are stacked on a leading "layers" dim. The head is a dense layer with a
    norm, and a bias per token of the vocabulary.
    """
    c, dtype = config, config.torch_dtype
    normal = Normal(c.init_stddev)
    norm = nn.norm_defs(c.embed_dim, "layer", axis="embed", dtype=dtype)
    dense = linear_defs(
        (c.embed_dim, c.embed_dim),
        ("embed", None),
        stddev=c.init_stddev,
        bias=(c.embed_dim,),
        bias_axes=("embed",),
        dtype=dtype,
    )
    vocab = ParamDef((c.padded_vocab,), ("vocab",), zeros, dtype, decay=False)
    return {
        "embed": ParamDef((c.padded_vocab, c.embed_dim), ("vocab", "embed"), normal, dtype),
        "positions": ParamDef((c.max_seq, c.embed_dim), (None, "embed"), normal, dtype),
        "types": ParamDef((c.num_types, c.embed_dim), (None, "embed"), normal, dtype),
        "embed_norm": norm,
        "blocks": params.stack(encoder_defs(c), c.num_layers),
        "head": {"dense": dense, "norm": norm, "bias": vocab},
    }


rules = public(text_rules)


@public
def encode(
    config: BertConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    options: ModelOptions = DEFAULTS,
    *,
    types: Int[Tensor, "batch seq"] | None = None,
    mask: Tensor | None = None,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
) -> Float[Tensor, "batch own_seq embed"]:
    """The residual stream after the last block: a vector per token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples.
        types: int64 ``[batch, seq]``, the segment type of each token; None: 0.
        mask: ``[batch, seq]``, 0 or False where a token is padding, to which no token attends;
            None: there is no padding.
        options: stream, remat, gather and axes; others are refused.
        rows, key: as in `gpt.forward`.

    Returns:
        ``[batch, seq, embed]`` with spec ``options.stream``. Collectives: see `nn.self_attention`
        and `nn.mlp`.

    Raises:
        ValueError: the sequence is longer than `max_seq`, or does not divide over the ranks that
            split it.
    """
    stack = Stack("bert", options, key, config.dropout, rows)
    stream, gather = options.stream, options.gather
    with named_scope("embed"):
        x = stack.embed(weights, tokens, config)
        x = nn.add_positions(x, gather.at("positions")(weights["positions"]), stream=stream)
        types = torch.zeros_like(tokens) if types is None else types
        own = nn.stream_positions(x, stream, types)
        x = x + look_up(gather.at("types")(weights["types"]), own, whole=True)
        x = nn.norm(gather.at("embed_norm")(weights["embed_norm"]), x, eps=config.norm_eps)
    stack = stack.at("blocks")
    keys = stack.keys(config.num_layers + 1)
    x = stack.drop(x, None if keys is None else keys[-1])
    mlp = partial(nn.mlp, activation=config.activation, stream=stream)
    seen = None if mask is None else mask != 0
    block = encoder_block(config, stack, seen, mlp, norm_first=False)
    return stack.over(block, x, weights["blocks"], None if keys is None else keys[:-1])


@public
def forward(
    config: BertConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    options: ModelOptions = DEFAULTS,
    *,
    types: Int[Tensor, "batch seq"] | None = None,
    mask: Tensor | None = None,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
) -> Float[Tensor, "batch seq columns"]:
    """The logits of the token at every position; the arguments are those of `encode`.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives: those of `encode`, and `nn.gather_sequence`.
    """
    x = encode(config, weights, tokens, options, types=types, mask=mask, rows=rows, key=key)
    gather = options.gather
    with named_scope("head"):
        head = gather.at("head")(weights["head"])
        x = nn.column_parallel(x, head["dense"]["w"], head["dense"]["b"])
        x = nn.ACTIVATIONS[config.activation](x)
        x = nn.gather_sequence(nn.norm(head["norm"], x, eps=config.norm_eps), options.stream)
        matrix = gather.at("embed")(weights["embed"]).mT
        return nn.column_parallel(x, matrix, head["bias"])


@sum_cross_entropies("tokens", "targets")
def loss(config: BertConfig, weights: dict, batch: Batch, options: ModelOptions, key: Key | None):
    """The sum of the losses at masked positions over the batch of all ranks, as `gpt.loss`.

    Args:
        batch: this rank's ``tokens`` and ``targets``, int64 ``[batch, seq]``; targets are
            `nn.IGNORE_INDEX` except at masked positions; perhaps ``types`` and ``mask``, see
            `encode`, and ``rows``.
    """
    given = {name: batch.get(name) for name in ("types", "mask", "rows")}
    return forward(config, weights, batch["tokens"], options, key=key, **given)


def flops_per_token(config: BertConfig, seq: int, *, whole: bool = False) -> int:
    """Model FLOPs of forward and backward per token: 6 N + 12 L H D T.

    Attention is not causal, so `whole` changes nothing; see `gpt.flops_per_token`.

    N counts the parameters that multiply a token's activations. Looking up tokens, positions and
    types does not multiply, but the product with the embedding that gives the logits does.
    """
    c = config
    total = params.num_params(defs(c)) - (c.max_seq + c.num_types) * c.embed_dim
    return 6 * total + 12 * c.num_layers * c.embed_dim * seq


def make_family() -> Family:
    """The family of BERTs."""
    return Family(
        "bert", "a BERT", BertConfig, PRESETS, defs, rules, loss, num_targets, flops_per_token,
        objective=MASKED_TOKENS, draws=lambda config, options: config.dropout > 0,
        rules_settings=UNEVEN,
    )  # fmt: skip
