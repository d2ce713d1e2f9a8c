"""T5: an encoder, and a decoder that attends to it (Raffel et al. 2020), versions 1.0 and 1.1.

Blocks are pre-norm with RMSNorm and no biases. Scores of self-attention are not divided by
sqrt(head_dim), and have a learned bias per head and bucket of relative positions, which all blocks
of a stack share. Blocks of the decoder attend to the encoder's normed output as well. The decoder
generates the spans that were taken out of a text, or an answer to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from functron import nn
from functron.apps.zoo.denoising import MISSING_SPANS
from functron.apps.zoo.layers import (
    Stack,
    cross_attention,
    cross_keys,
    head_problems,
    masked_attention,
    rate_problems,
    relative_bias,
    relative_buckets,
    share_head_axis,
    size_problems,
    split_keys,
    sum_cross_entropies,
    text_rules,
)
from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import named_scope
from functron.core.settings import choice_problems
from functron.core.tables import shows_differences
from functron.core.typing import Float, Int, Key, Tensor
from functron.models.config import Named, TextConfig
from functron.models.family import UNEVEN, Family
from functron.models.generation import Draw, Steps, check_prompt, drawn
from functron.models.options import DEFAULTS, Batch, ModelOptions, num_targets
from functron.nn.attention import KVCache, empty_cache, write_cache
from functron.program.cost import tokens_attended
from functron.spmd import DATA_AXES, P, params, shard_map
from functron.spmd import collectives as lax
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.params import Normal, ParamDef, param_specs
from functron.transforms import Gather, scan

__all__ = [
    "PRESETS",
    "T5Cache",
    "T5Config",
    "cache_specs",
    "decode",
    "defs",
    "encode",
    "extend",
    "flops_per_token",
    "forward",
    "loss",
    "num_targets",
    "prefill",
    "rules",
    "shift_right",
]


@shows_differences
@dataclass(frozen=True, kw_only=True)
class T5Config(TextConfig):
    """Architecture of a T5 (Raffel et al. 2020), version 1.0 or 1.1.

    Attributes:
        num_layers: number of blocks of the encoder.
        decoder_layers: number of blocks of the decoder; 0: as many.
        embed_dim: width of the residual streams.
        num_heads: number of attention heads.
        head_dim: width of a head; 0: ``embed_dim // num_heads``.
        mlp_dim: width of feed-forward hidden layers.
        num_buckets: number of buckets of relative positions; each stack has a bias per bucket and
            head.
        max_distance: distances from this one on share a bucket.
        activation: of feed-forward layers: relu in 1.0, gelu_tanh in 1.1.
        gated: multiply it by a second projection (1.1).
        tied: one matrix for embedding and unembedding, and the decoder's output is divided by
            sqrt(embed_dim) before the logits (1.0); else two matrices, and no division (1.1).
        start_id: the first token of the decoder's input; the padding token in published models.
        norm_eps: epsilon of the norms.
        dropout: rate on the embeddings, on the outputs of sublayers, and on the outputs of the
            stacks; attention probabilities and hidden features are not dropped.
        init_factor: multiplies the standard deviations of initial matrices, which are those of the
            paper's code.
    """

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
    init_factor: float = 1.0

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
        found += choice_problems(self)
        found += rate_problems(self)
        raise_problems("invalid T5Config", found)

    @property
    def layers(self) -> dict[str, int]:
        """The number of blocks of each stack."""
        return {"encoder": self.num_layers, "decoder": self.decoder_layers or self.num_layers}

    @property
    def attention(self) -> nn.AttentionConfig:
        """The shapes of all attention layers."""
        return nn.AttentionConfig(
            embed_dim=self.embed_dim, num_heads=self.num_heads, head_dim=self.head_dim
        )


def _make_preset_1_1(
    num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, head_dim: int = 64
) -> T5Config:
    return T5Config(
        vocab_size=32128, num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads,
        mlp_dim=mlp_dim, head_dim=head_dim,
    )  # fmt: skip


def _make_preset(*sizes: int, head_dim: int = 64) -> T5Config:
    own = _make_preset_1_1(*sizes, head_dim=head_dim)
    return replace(own, activation="relu", gated=False, tied=True, dropout=0.1)


PRESETS: Mapping[str, T5Config] = Named(
    {
        # of bytes, with one token that ends a text and 127 sentinels
        "t5-tiny": T5Config(vocab_size=384, embed_dim=64, num_heads=4, mlp_dim=128),
        "t5-small": _make_preset(6, 512, 8, 2048),
        "t5-base": _make_preset(12, 768, 12, 3072),
        "t5-large": _make_preset(24, 1024, 16, 4096),
        "t5-3b": _make_preset(24, 1024, 32, 16384, head_dim=128),
        "t5-11b": _make_preset(24, 1024, 128, 65536, head_dim=128),
        "t5-1.1-base": _make_preset_1_1(12, 768, 12, 2048),
        "t5-1.1-large": _make_preset_1_1(24, 1024, 16, 2816),
        "t5-1.1-xl": _make_preset_1_1(24, 2048, 32, 5120),
        "t5-1.1-xxl": _make_preset_1_1(24, 4096, 64, 10240),
    }
)
"""Named configs: "t5-tiny" trains on a laptop; the others have the published sizes."""


@public
def defs(config: T5Config) -> dict:
    """The parameters: ``{"embed", "encoder", "decoder", "unembed"?}``.

    Each stack is ``{"relative", "blocks", "norm"}``; parameters of blocks are stacked on a leading
    "layers" dim.
    """
    c, dtype, factor = config, config.torch_dtype, config.init_factor
    vocab, embed = c.padded_vocab, c.embed_dim
    narrow = Normal(factor / math.sqrt(embed))
    model: dict = {
        "embed": ParamDef((vocab, embed), ("vocab", "embed"), Normal(factor), dtype),
    }
    for name, count in c.layers.items():
        model[name] = {
            "relative": ParamDef((c.num_buckets, c.num_heads), (None, "heads"), narrow, dtype),
            "blocks": params.stack(_block_defs(c, cross=name == "decoder"), count),
            "norm": nn.norm_defs(embed, "rms", axis="embed", dtype=dtype),
        }
    if not c.tied:
        model["unembed"] = ParamDef((embed, vocab), ("embed", "vocab"), narrow, dtype)
    return model


def _block_defs(config: T5Config, *, cross: bool) -> dict:
    c, dtype, factor = config, config.torch_dtype, config.init_factor
    wide, heads = math.sqrt(c.embed_dim), c.attention
    inner = math.sqrt(heads.num_heads * heads.head_size)

    def attention() -> dict:
        stddevs = {"stddev": factor / wide, "out_stddev": factor / inner}
        layer = share_head_axis(nn.attention_defs(heads, **stddevs, dtype=dtype))
        # scores are not divided by sqrt(head_dim) later
        start = Normal(factor / wide / math.sqrt(heads.head_size))
        return layer | {"q": {"w": replace(layer["q"]["w"], init=start)}}

    norm = nn.norm_defs(c.embed_dim, "rms", axis="embed", dtype=dtype)
    mlp = nn.mlp_defs(
        c.embed_dim,
        c.mlp_dim,
        gated=c.gated,
        bias=False,
        stddev=factor / wide,
        out_stddev=factor / math.sqrt(c.mlp_dim),
        dtype=dtype,
    )
    block = {"attention_norm": norm, "attention": attention()}
    block |= {"cross_norm": norm, "cross": attention()} if cross else {}
    return block | {"mlp_norm": norm, "mlp": mlp}


rules = public(text_rules)


@public
def encode(
    config: T5Config,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    options: ModelOptions = DEFAULTS,
    *,
    mask: Tensor | None = None,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
) -> Float[Tensor, "batch own_seq embed"]:
    """The encoder's output: a vector per token, to which the decoder attends.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples.
        mask: ``[batch, seq]``, 0 or False where a token is padding, to which no token attends;
            None: there is no padding.
        options: stream, remat, gather and axes; others are refused.
        rows, key: as in `gpt.forward`.

    Returns:
        ``[batch, seq, embed]`` with spec ``options.stream``. Collectives: see `nn.self_attention`
        and `nn.mlp`.

    Raises:
        ValueError: the sequence does not divide over the ranks that split it.
    """
    stack = Stack("t5", options, key, config.dropout, rows)
    seen = None if mask is None else mask != 0
    return _run_stack(config, "encoder", weights, tokens, stack, None, seen)


@public
def decode(
    config: T5Config,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    memory: Float[Tensor, "batch own_keys embed"],
    options: ModelOptions = DEFAULTS,
    *,
    mask: Tensor | None = None,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
) -> Float[Tensor, "batch seq columns"]:
    """The logits of the decoder's next token at every position.

    Args:
        config, weights, options, rows, key: as in `encode`.
        tokens: int64 ``[batch, seq]``, the decoder's input; see `shift_right`.
        memory: the result of `encode`, with spec ``options.stream``.
        mask: of the encoder's tokens, as in `encode`.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives: `nn.gather_sequence` of the memory once, and for each block those of
        `nn.self_attention`, `functron.apps.zoo.layers.cross_attention` and `nn.mlp`.
    """
    stack = Stack("t5", options, key, config.dropout, rows)
    seen = None if mask is None else mask != 0
    whole = nn.gather_sequence(memory, options.stream)
    x = _run_stack(config, "decoder", weights, tokens, stack, whole, seen)
    return _compute_logits(config, weights, x, stack)


def _run_stack(
    config: T5Config,
    name: str,
    weights: dict,
    tokens: Tensor,
    stack: Stack,
    memory: Tensor | None,
    seen: Tensor | None,
) -> Tensor:
    """The normed output of the encoder, or of the decoder if there is a memory."""
    seq, count = tokens.shape[1], config.layers[name]
    x = _embed_tokens(config, weights, tokens, stack)
    stack, weights = stack.at(name), weights[name]
    keys = stack.keys(count + 2)
    x = stack.drop(x, None if keys is None else keys[-1])
    bias = _make_bias(config, weights, stack, seq, seq, bidirectional=memory is None)
    # the encoder's tokens may be padding; the decoder attends to its earlier tokens
    reads = {"seen": seen} if memory is None else {"causal": True}
    core = stack.core(partial(masked_attention, bias=bias, scale=1.0, **reads))
    block = _make_block(config, stack, core, memory, seen)
    x = stack.at("blocks").over(block, x, weights["blocks"], None if keys is None else keys[:count])
    return stack.drop(
        stack.norm_last(weights, x, config.norm_eps), None if keys is None else keys[-2]
    )


def _embed_tokens(config: T5Config, weights: dict, tokens: Tensor, stack: Stack) -> Tensor:
    with named_scope("embed"):
        return stack.embed(weights, tokens, config)


def _make_bias(
    config: T5Config,
    weights: dict,
    stack: Stack,
    queries: int,
    keys: int,
    *,
    bidirectional: bool = False,
    first: int | Tensor = 0,
) -> Tensor:
    """``[heads, queries, keys]``: the bias of the scores of a stack's self-attention."""
    with named_scope("relative"):
        table = stack.gather.at("relative")(weights["relative"])
        buckets = relative_buckets(
            queries,
            keys,
            num_buckets=config.num_buckets,
            max_distance=config.max_distance,
            bidirectional=bidirectional,
            first=first,
            device=table.device,
        )
        return relative_bias(table, buckets)


def _compute_logits(config: T5Config, weights: dict, x: Tensor, stack: Stack) -> Tensor:
    """``[batch, seq, padded_vocab / tp]`` logits of the decoder's normed output."""
    divisor = math.sqrt(config.embed_dim) if config.tied else 1.0
    return stack.logits(weights, x, tied=config.tied, divisor=divisor)


def _make_block(
    config: T5Config,
    stack: Stack,
    core: Callable,
    memory: Tensor | KVCache | None = None,
    seen: Tensor | None = None,
) -> Callable:
    """``(parameters, x, key) -> x``: one block of the encoder; of the decoder if it has a memory.

    Args:
        config: the architecture.
        stack: how it is run.
        core: of self-attention.
        memory: the encoder's output, or this block's keys and values of it.
        seen: False where a token of the encoder is padding.
    """
    look = stack.core(partial(masked_attention, seen=seen, scale=1.0))
    stream, shape = stack.stream, config.attention

    def norm(scale: dict, x: Tensor) -> Tensor:
        return nn.rms_norm(x, scale["scale"], eps=config.norm_eps)

    def block(weights: dict, x: Tensor, key: Tensor | None) -> Tensor:
        first, second, third = split_keys(key, 3)
        with named_scope("attention"):
            y = norm(weights["attention_norm"], x)
            layer = weights["attention"]
            y = nn.self_attention(layer, y, shape, rope=None, stream=stream, core=core)
            x = x + stack.drop(y, first)
        if memory is not None:
            with named_scope("cross"):
                y = norm(weights["cross_norm"], x)
                y = cross_attention(weights["cross"], y, memory, shape, stream=stream, core=look)
                x = x + stack.drop(y, second)
        with named_scope("mlp"):
            y = norm(weights["mlp_norm"], x)
            y = nn.mlp(weights["mlp"], y, activation=config.activation, stream=stream)
            return x + stack.drop(y, third)

    return block


# --- generation


class T5Cache(NamedTuple):
    """Keys and values of each block of the decoder: of its own tokens, and of the encoder's output.

    Attributes:
        own: ``[layers, batch, room, heads, head_dim]``, of the decoder's tokens so far; then zeros.
        memory: ``[layers, batch, keys, heads, head_dim]``, of the encoder's output.
    """

    own: KVCache
    memory: KVCache


def cache_specs(config: T5Config) -> T5Cache:
    """The specs of a cache: samples are split over data axes, heads over tp."""
    row: Any = P(None, DATA_AXES, None, "tp")
    return T5Cache(KVCache(row, row), KVCache(row, row))


def prefill(
    config: T5Config,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    options: ModelOptions = DEFAULTS,
    *,
    room: int,
    mask: Tensor | None = None,
) -> T5Cache:
    """Run the encoder, and make the cache of the decoder before its first token.

    Args:
        config, weights, tokens, options, mask: as in `encode`; of the options only ``gather``.
        room: number of tokens of the decoder that the cache has room for.

    Returns:
        The cache. Collectives: those of `encode`, and of `gather` for each block of the decoder.
    """
    memory = encode(config, weights, tokens, options, mask=mask)
    once = options.gather.at("decoder").at("blocks").at("cross").rows().around(cross_keys)

    def layer(memory: Tensor, params: dict) -> tuple[Tensor, T5Cache]:
        kept = once(params, memory)
        return memory, T5Cache(empty_cache(kept.k, kept.v, room), kept)

    return scan(layer, memory, weights["decoder"]["blocks"]["cross"])[1]


def extend(
    config: T5Config,
    weights: dict,
    cache: T5Cache,
    tokens: Int[Tensor, " batch"],
    place: Int[Tensor, ""],
    options: ModelOptions = DEFAULTS,
    *,
    mask: Tensor | None = None,
) -> tuple[Float[Tensor, "batch vocab"], T5Cache]:
    """The logits of the decoder's next token after `tokens`, and the cache with `tokens` in it.

    The result is that of `decode` for all tokens so far, at the last one.

    Args:
        config, weights: as in `decode`.
        cache: the result of `prefill`, or of this function for the token before.
        tokens: int64 ``[batch]``, at first ``config.start_id``.
        place: int64 scalar, the number of the decoder's tokens before.
        options: as in `prefill`.
        mask: of the encoder's tokens, as for `prefill`.

    Returns:
        ``[batch, vocab_size]`` in float32 at least, the same on all ranks of tp, and the cache.
        Collectives: those of `decode` without that of the memory, and one all-gather of the logits
        over tp.
    """
    whole = Stack("t5", options)
    x = _embed_tokens(config, weights, tokens[:, None], whole)
    stack, params = whole.at("decoder"), weights["decoder"]
    room = cache.own.k.shape[2]
    bias = _make_bias(config, params, stack, 1, room, first=place)
    before = (torch.arange(room, device=tokens.device) <= place)[None]
    places = place.expand(len(tokens), 1)
    seen = None if mask is None else mask != 0

    def layer(weights: dict, x: Tensor, kept: T5Cache) -> tuple[Tensor, KVCache]:
        after = []

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = write_cache(kept.own, k, v, places)
            after.append(own)
            return masked_attention(q, *own, seen=before, bias=bias, scale=1.0)

        return _make_block(config, stack, core, kept.memory, seen)(weights, x, None), after[0]

    once = stack.gather.at("blocks").rows().around(layer)
    x, own = scan(lambda x, row: once(row[0], x, row[1]), x, (params["blocks"], cache))
    x = stack.norm_last(params, x, config.norm_eps)
    logits = _compute_logits(config, weights, x, whole).squeeze(1)
    logits = lax.all_gather(logits, "tp", axis=-1, tiled=True)[:, : config.vocab_size]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits, cache._replace(own=own)


def shift_right(targets: Int[Tensor, "batch seq"], start: int) -> Int[Tensor, "batch seq"]:
    """The decoder's input that predicts these targets: `start`, and each target but the last.

    Targets of `nn.IGNORE_INDEX` become `start` as well.
    """
    before = torch.cat([torch.full_like(targets[:, :1], start), targets[:, :-1]], 1)
    return torch.where(before == nn.IGNORE_INDEX, start, before)


@public
def forward(
    config: T5Config,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    given: Int[Tensor, "batch decoded"],
    options: ModelOptions = DEFAULTS,
    *,
    mask: Tensor | None = None,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
) -> Float[Tensor, "batch decoded columns"]:
    """The logits of the decoder's next token after each `given`: `decode` of `encode`."""
    given_too: dict[str, Any] = {"mask": mask, "rows": rows, "key": key}
    memory = encode(config, weights, tokens, options, **given_too)
    return decode(config, weights, given, memory, options, **given_too)


@sum_cross_entropies("tokens", "targets")
def loss(config: T5Config, weights: dict, batch: Batch, options: ModelOptions, key: Key | None):
    """The sum of all targets' losses over the batch of all ranks; replicated, as `gpt.loss`.

    Args:
        batch: this rank's ``tokens`` int64 ``[batch, seq]``, the encoder's input, perhaps with a
            ``mask``; ``targets`` int64 ``[batch, decoded]``, of which `nn.IGNORE_INDEX` do not
            count; perhaps ``rows``.

    Raises:
        ValueError: the batch has no targets.
    """
    others = {name: batch.get(name) for name in ("mask", "rows")}
    given = shift_right(batch["targets"], config.start_id)
    return forward(config, weights, batch["tokens"], given, options, key=key, **others)


def flops_per_token(config: T5Config, seq: int, said: int, *, whole: bool = False) -> int:
    """Model FLOPs of forward and backward per token of the encoder.

    6 for each parameter that multiplies a token's activations (of the decoder and the unembedding
    ``said / seq`` tokens per token of the encoder), and 12 H D per pair of tokens of attention;
    the decoder's causal self-attention counts as half; see `gpt.flops_per_token`. Keys and values
    of cross-attention are computed for the encoder's tokens.

    Args:
        config: the architecture.
        seq: number of the encoder's tokens.
        said: number of the decoder's tokens.
        whole: count the decoder's self-attention as whole.
    """
    c = config
    model, heads = defs(c), c.num_heads * c.attention.head_size
    read, answer = (params.num_params(model[name]) for name in c.layers)
    tables = c.num_buckets * c.num_heads  # look-ups
    decoder = c.layers["decoder"]
    memory = 2 * decoder * c.embed_dim * heads
    unembed = c.padded_vocab * c.embed_dim
    matrices = (read - tables + memory) * seq + (answer - tables - memory + unembed) * said
    pairs = c.num_layers * seq * seq + decoder * (
        said * tokens_attended(said, whole=whole) + said * seq
    )
    return round((6 * matrices + 12 * heads * pairs) / seq)


@torch.no_grad()
def respond(
    params: tree.Tree,
    config: T5Config,
    tokens: Tensor,
    num_tokens: int,
    *,
    draw: Draw,
    mask: Tensor | None = None,
    key: Tensor | None = None,
    stop: Collection[int] = (),
    mesh: Mesh | BoundMesh | None = None,
    options: ModelOptions | None = None,
) -> Tensor:
    """Generate the decoder's answer to the encoder's input, token by token.

    The encoder runs once (`t5.prefill`); keys and values of its output and of the decoder's tokens
    are cached (`t5.extend`).

    Args:
        params: the parameters of `t5.defs(config)`, as `mesh` splits them.
        config: the architecture.
        tokens: int64 ``[batch, seq]``, the encoder's input, with its end token; on a bound mesh,
            the samples of this rank's data-parallel part.
        num_tokens: largest number of tokens to generate.
        draw: how a token is drawn from logits.
        mask: ``[batch, seq]``, 0 or False where a token is padding; None: there is no padding.
        key: random key of the draws; not needed at temperature 0.
        stop: tokens that end a row, which repeats its last token while other rows go on.
        mesh: data and tensor-parallel axes, simulated or bound; None: one rank.
        options: whose `gather` has the specs of the parameters; None: they are split as by
            ``t5.rules(config, mesh)``.

    Returns:
        int64 ``[batch, drawn]``.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, a missing key, or a mesh on
            which the model cannot run.
    """
    check_prompt(config, tokens, num_tokens, draw, key)
    mesh = Mesh() if mesh is None else mesh
    if options is None:
        options = ModelOptions(gather=Gather(param_specs(defs(config), rules(config, mesh))))
    first, later = _map_generation(config, mesh, num_tokens, mask, options)
    start = torch.full_like(tokens[:, :1], config.start_id)

    def steps() -> Steps:
        cache, last = first(params, tokens), start[:, 0]
        for index in range(num_tokens):
            place = compat.constant(index, tokens.device)
            found, cache = later(params, cache, last, place)
            last = yield found.float()

    return drawn(steps(), draw, start, num_tokens, key, stop, mesh=mesh)[:, 1:]


def _map_generation(
    config: T5Config,
    mesh: Mesh | BoundMesh,
    room: int,
    mask: Tensor | None,
    options: ModelOptions,
) -> tuple[Callable, Callable]:
    """`t5.prefill` and `t5.extend` over a mesh."""
    specs = options.gather.specs
    rows, kept = P(DATA_AXES), cache_specs(config)
    masks = None if mask is None else rows

    def read(params, tokens, mask):
        return prefill(config, params, tokens, options, room=room, mask=mask)

    def say(params, cache, tokens, place, mask):
        return extend(config, params, cache, tokens, place, options, mask=mask)

    first = shard_map(read, mesh, (specs, rows, masks), kept)
    later = shard_map(say, mesh, (specs, kept, rows, P(), masks), (rows, kept))
    return (
        lambda params, tokens: first(params, tokens, mask),
        lambda *given: later(*given, mask),
    )


def make_family() -> Family:
    """The family of T5s."""
    return Family(
        "t5", "a T5", T5Config, PRESETS, defs, rules, loss, num_targets, flops_per_token,
        objective=MISSING_SPANS, free=("dropout", "init_factor", "vocab_multiple", "dtype"),
        canonical=_write_out, respond=respond, draws=lambda config, options: config.dropout > 0,
        rules_settings=UNEVEN,
    )  # fmt: skip


def _write_out(config: T5Config) -> T5Config:
    """The config with derived sizes written out."""
    layers, head_dim = config.layers["decoder"], config.attention.head_size
    return replace(config, decoder_layers=layers, head_dim=head_dim)
