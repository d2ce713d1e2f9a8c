"""BERT: a bidirectional encoder that predicts masked tokens (Devlin et al. 2019).

Tokens, places and segments are embedded and normed; blocks add attention to all tokens that are no
padding, and a feed-forward layer, and norm after each. A transformed stream times the embedding
gives the logits of the tokens at masked places. There is no next-sentence loss, which later work
found no use for (Liu et al. 2019, section 4.2). `functron.data.denoising` makes masked batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from functron import nn
from functron.apps.zoo.layers import (
    Stack,
    choice_problems,
    head_problems,
    keys_of,
    masked_attention,
    rate_problems,
    size_problems,
    summed_loss,
    text_rules,
    whole_heads,
)
from functron.core.errors import public, raise_problems
from functron.core.scopes import named_scope
from functron.core.typing import Float, Int, Key, Scalar, Tensor
from functron.models.config import Dtype, Named, TextConfig
from functron.models.family import Family
from functron.models.options import DEFAULTS, ModelOptions, check_length, num_targets, require
from functron.nn.layers import linear_defs, sequence_axes
from functron.spmd import collectives as lax
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


@dataclass(frozen=True, kw_only=True)
class BertConfig(TextConfig):
    """Architecture of a BERT.

    Attributes:
        num_layers: blocks.
        embed_dim: width of the stream.
        num_heads: heads of attention.
        mlp_dim: width of the feed-forward hidden layer.
        max_seq: longest sequence, in tokens.
        num_types: kinds of segments of a sample.
        activation: of feed-forward layers and before the logits.
        norm_eps: epsilon of the norms.
        init_stddev: of all matrices.
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
        found += choice_problems(self, {"activation": nn.Activation, "dtype": Dtype})
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
"""Named architectures: "bert-tiny" trains on a laptop; the others have the paper's sizes."""


@public
def defs(config: BertConfig) -> dict:
    """The parameters: ``{"embed", "positions", "types", "embed_norm", "blocks", "head"}``.

    Those of all blocks are stacked on a leading "layers" dim. The head is a dense layer with a
    norm, and a bias per token of the vocabulary.
    """
    c, dtype = config, config.torch_dtype
    normal = Normal(c.init_stddev)
    norm = nn.norm_defs(c.embed_dim, "layer", axis="embed", dtype=dtype)
    block = {
        "attention": whole_heads(
            nn.attention_defs(
                c.attention, stddev=c.init_stddev, out_stddev=c.init_stddev, dtype=dtype
            )
        ),
        "attention_norm": norm,
        "mlp": nn.mlp_defs(
            c.embed_dim,
            c.mlp_dim,
            gated=False,
            bias=True,
            stddev=c.init_stddev,
            out_stddev=c.init_stddev,
            dtype=dtype,
        ),
        "mlp_norm": norm,
    }
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
        "blocks": params.stack(block, c.num_layers),
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
    """The stream after all blocks: a vector per token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples.
        types: int64 ``[batch, seq]``, the kind of each token's segment; None: 0.
        mask: ``[batch, seq]``, 0 or False where a token is padding, which none attends to; None: no
            token is.
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
    check_length(tokens.shape[1], config.max_seq, lax.axis_size(sequence_axes(stream)))
    with named_scope("embed"):
        x = stack.embed(weights, tokens, config)
        x = nn.add_positions(x, gather.at("positions")(weights["positions"]), stream=stream)
        types = torch.zeros_like(tokens) if types is None else types
        own = nn.stream_positions(x, stream, types)
        x = x + F.embedding(own, gather.at("types")(weights["types"]))
        x = nn.norm(gather.at("embed_norm")(weights["embed_norm"]), x, eps=config.norm_eps)
    stack = stack.at("blocks")
    keys = stack.keys(config.num_layers + 1)
    x = stack.drop(x, None if keys is None else keys[-1])
    block = _block(config, stack, None if mask is None else mask != 0)
    return stack.over(block, x, weights["blocks"], None if keys is None else keys[:-1])


def _block(config: BertConfig, stack: Stack, seen: Tensor | None) -> Callable:
    """``(parameters, x, key) -> x``: one block, normed after each sublayer."""
    core = stack.core(partial(masked_attention, seen=seen))
    stream, eps = stack.stream, config.norm_eps

    def block(weights: dict, x: Tensor, key: Tensor | None) -> Tensor:
        first, second = keys_of(key, 2)
        with named_scope("attention"):
            attention = weights["attention"]
            y = nn.self_attention(
                attention, x, config.attention, rope=None, stream=stream, core=core
            )
            x = nn.norm(weights["attention_norm"], x + stack.drop(y, first), eps=eps)
        with named_scope("mlp"):
            y = nn.mlp(weights["mlp"], x, activation=config.activation, stream=stream)
            return nn.norm(weights["mlp_norm"], x + stack.drop(y, second), eps=eps)

    return block


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
    """The logits of the token at every place; the arguments are those of `encode`.

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


@public
def loss(
    config: BertConfig,
    weights: dict,
    batch: Mapping[str, Tensor],
    options: ModelOptions = DEFAULTS,
    *,
    key: Key | None = None,
) -> Scalar:
    """The sum of the losses at masked places over the batch of all ranks, as `gpt.loss`.

    Args:
        batch: this rank's ``tokens`` and ``targets``, int64 ``[batch, seq]``, targets being
            `nn.IGNORE_INDEX` except at masked places; perhaps ``types`` and ``mask``, see `encode`,
            and ``rows``.
    """
    require(batch, "tokens", "targets")
    given = {name: batch.get(name) for name in ("types", "mask", "rows")}
    logits = forward(config, weights, batch["tokens"], options, key=key, **given)
    return summed_loss(logits, batch["targets"], config.vocab_size, options)


def flops_per_token(config: BertConfig, seq: int, *, whole: bool = False) -> int:
    """Model FLOPs of forward and backward per token: 6 N + 12 L H D T.

    Attention is not causal, so it is whole by any convention; see `gpt.flops_per_token`.

    N counts the parameters that multiply a token's activations: look-ups of tokens, positions and
    types do not, but the embedding does where it gives the logits, of all places.
    """
    c = config
    total = params.num_params(defs(c)) - (c.max_seq + c.num_types) * c.embed_dim
    return 6 * total + 12 * c.num_layers * c.embed_dim * seq


def make_family() -> Family:
    """The family of BERTs."""
    return Family(
        "bert", "a BERT", BertConfig, PRESETS, defs, rules, loss, num_targets, flops_per_token,
        objective="masked",
    )  # fmt: skip
