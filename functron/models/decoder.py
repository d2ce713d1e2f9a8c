"""A decoder as a per-rank program, stage by stage: embedding, stacks of blocks, logits and loss.

Besides the loss of the next token it computes those of tokens further ahead, if `GPTConfig` has
any (the modules of DeepSeek-V3, each around a block of the model), and with `ModelOptions.watch`
how large the residual stream is after the embedding and after every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functron import nn, params
from functron.core import random, tree
from functron.core.errors import refuse
from functron.core.scopes import named_scope
from functron.core.typing import Float, Key, Tensor
from functron.models.block import (
    Auxiliary,
    add_auxiliary,
    block,
    block_defs,
    dropout,
    norm,
    own_norm,
    patterns,
)
from functron.models.config import GPTConfig
from functron.models.options import DEFAULTS, ModelOptions, check_gathered
from functron.models.sequence import SAMPLE_AXES, Sequence, check_length, check_positions
from functron.nn import zigzag
from functron.nn.linear import sequence_axes
from functron.pipeline.layout import Part
from functron.spmd import CONTEXT_AXES
from functron.spmd import collectives as lax
from functron.spmd.spec import spec_axes
from functron.transforms import scan

Details = dict[str, Any]
"""The terms of a loss, and what made them: sums over the batch of all ranks.

* ``targets``: int64, how many count;
* ``next_token``: the sum of their losses;
* ``ahead``: ``[depth]``, the sums of the losses of tokens further ahead, if any are predicted;
* ``routers``: `nn.moe.RouterSums`, a row for each layer of experts, if there are any;
* ``stream``: ``squares``, the sums over all tokens of the mean square of the residual stream after
  the embedding and after each layer, and ``count``, the number of tokens; if they were asked for.
"""


class Activations(NamedTuple):
    """The results of layers beside the stream, where its size is measured.

    Attributes:
        auxiliary: that of experts, if there are any.
        squares: sums over this rank's tokens of the mean square of the stream: after the embedding,
            and after each of all layers, 0 where that was not computed yet.
    """

    auxiliary: Auxiliary | None
    squares: Tensor


StageOutput = Tensor | tuple[Tensor, Auxiliary | Activations]
"""The result of a stage of a pipeline: the stream, in a pair with what layers gave beside it."""


def stream(
    config: GPTConfig,
    part: Part,
    weights: dict,
    received: StageOutput | None,
    sequence: Sequence,
    options: ModelOptions,
    key: Key | None,
) -> tuple[Tensor, Auxiliary | Activations | None]:
    """The residual stream after the layers of `part`, and what layers gave beside it so far."""
    split = lax.axis_size(tuple(a for a in sequence_axes(options.stream) if a not in CONTEXT_AXES))
    longest = config.max_seq if sequence.segments is None else None
    check_length(sequence.tokens.shape[1], longest, split)
    check_positions(sequence, config.rope_sections, options.context)
    x, beside = received if isinstance(received, tuple) else (received, None)
    auxiliary, squares = beside if isinstance(beside, Activations) else (beside, None)
    keys = None if key is None else random.split(key, config.num_layers + 1)
    if part.embed:
        with named_scope("embed"):
            x = embedded(config, weights, sequence, options, None if keys is None else keys[-1])
        if options.watch:
            squares = _placed(None, _squares(x).reshape(1), 0, 1 + config.num_layers)
    assert x is not None
    differing = patterns(config, x.device)
    for name, layers in config.stacks.items():
        start, stop = max(part.layers.start, layers.start), min(part.layers.stop, layers.stop)
        if start >= stop:
            continue
        layer = block(config, sequence, options, options.gather.at(name).rows())
        layer = _measured(layer) if options.watch else layer
        own = {what: rows[start:stop] for what, rows in differing.items()}
        xs = (weights[name], None if keys is None else keys[start:stop], own)
        x, new = scan(layer, x, xs)
        if options.watch:
            new, rows = new
            squares = _placed(squares, rows, 1 + start, 1 + config.num_layers)
        if new is not None:
            new = Auxiliary(new.loss.sum(), new.sums)
            auxiliary = add_auxiliary(auxiliary, new, start - layers.start, config.num_routers)
    return x, auxiliary if squares is None else Activations(auxiliary, squares)


def embedded(
    config: GPTConfig,
    weights: dict,
    sequence: Sequence,
    options: ModelOptions,
    key: Tensor | None = None,
) -> Tensor:
    """The residual stream before the first layer; `key` is that of its dropout."""
    x = embedded_tokens(config, weights, sequence.tokens, options)
    return positioned(config, weights, sequence, options, x, key)


def embedded_tokens(
    config: GPTConfig, weights: dict, tokens: Tensor, options: ModelOptions
) -> Tensor:
    """The embeddings of tokens alone, with spec ``options.stream``."""
    table = options.gather.at("embed")(weights["embed"])
    check_gathered("embed_dim", table.shape[1], config.embed_dim)
    given = {"scale": config.embed_scale, "vocab_size": config.vocab_size}
    return nn.embed_tokens(table, tokens, stream=options.stream, **given)


def positioned(
    config: GPTConfig,
    weights: dict,
    sequence: Sequence,
    options: ModelOptions,
    x: Tensor,
    key: Tensor | None,
) -> Tensor:
    """Embeddings with learned positions, where the model has them, and dropout."""
    if config.positions == "learned":
        table = options.gather.at("positions")(weights["positions"])
        x = nn.add_positions(x, table, stream=options.stream, positions=sequence.positions)
    return dropout(config, sequence, options, x, key)


def logits(config: GPTConfig, weights: dict, x: Tensor, options: ModelOptions) -> Tensor:
    """The logits of the stream after all layers, in the order that the batch came in."""
    with named_scope("norm"):
        x = _last_norm(config, weights, x, options)
    with named_scope("unembed"):
        x = nn.gather_sequence(_scaled(config, x), options.stream)
        if options.context.order == "zigzag":
            x = zigzag.to_contiguous(x, 1)
        return _capped(config, nn.column_parallel(x, _unembedding(config, weights, options)))


def loss(
    config: GPTConfig,
    part: Part,
    weights: dict,
    received: StageOutput | None,
    sequence: Sequence,
    options: ModelOptions,
    key: Key | None,
) -> Any:
    """`stream`, and at the last stage the loss.

    Returns:
        A `StageOutput`, or at the last stage the sum of the losses over the batch of all ranks;
        with layers of experts, tokens further ahead or ``options.watch``, a pair of that and
        `Details`.
    """
    x, beside = stream(config, part, weights, received, sequence, options, key)
    if not part.loss:
        return x if beside is None else (x, beside)
    targets = sequence.targets
    if targets is None:
        fix = "put them into the batch"
        refuse("the batch has no loss", "targets", "nothing", "the next token of each", fix)
    if config.logit_cap and options.loss_chunk_tokens:
        got = f"{options.loss_chunk_tokens} with logit_cap"
        wanted = "0: capped logits are made at once"
        refuse("the loss of capped logits", "loss_chunk_tokens", got, wanted, "leave it out")
    with named_scope("norm"):
        normed = _last_norm(config, weights, x, options)
    with named_scope("unembed"):
        matrix = _unembedding(config, weights, options)

    def losses(x: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
        given = {"vocab_size": config.vocab_size, "z_loss": z_loss, "kernels": options.kernels}
        with named_scope("unembed"):
            x = nn.gather_sequence(_scaled(config, x), options.stream)
            if chunk := options.loss_chunk_tokens:
                return nn.linear_cross_entropy(x, matrix, targets, chunk_tokens=chunk, **given)
            out = _capped(config, nn.column_parallel(x, matrix))
        with named_scope("loss"):
            return nn.cross_entropy(out, targets, **given)

    first = losses(normed, targets, config.z_loss).sum()
    if not config.has_details and not options.watch:
        with named_scope("loss"):
            return lax.psum(first, options.axes)
    auxiliary, squares = beside if isinstance(beside, Activations) else (beside, None)
    details: Details = {"targets": (targets != nn.IGNORE_INDEX).sum(), "next_token": first}
    share = first
    if config.mtp_depth:
        with named_scope("ahead"):
            details["ahead"], routers = _predict_ahead(
                config, weights, normed, sequence, options, key, head=losses
            )
        share = share + config.mtp_weight * details["ahead"].mean()
        for depth, each in enumerate(routers, config.num_routers - config.mtp_depth):
            row = Auxiliary(each.loss, tree.map(lambda s: s[None], each.sums))
            auxiliary = add_auxiliary(auxiliary, row, depth, config.num_routers)
    if auxiliary is not None:
        share = share + auxiliary.loss
        details["routers"] = auxiliary.sums
    total = lax.psum(share, options.axes)
    details = lax.psum(lax.stop_gradient(details), options.axes)
    if squares is not None:
        details["stream"] = _summed(squares, x, options)
    return total, details


def _last_norm(config: GPTConfig, weights: dict, x: Tensor, options: ModelOptions) -> Tensor:
    own = own_norm(config, options, weights, "norm")
    return norm(config, options, options.gather.at("norm")(own) if own else own, x)


def _scaled(config: GPTConfig, x: Tensor) -> Tensor:
    """The stream, times muP's factor of logits if there is one."""
    factor = 1.0 / config.mup_width
    return x if factor == 1 else x * factor


def _capped(config: GPTConfig, logits: Tensor) -> Tensor:
    """cap tanh(logits / cap), if there is a cap."""
    cap = config.logit_cap
    return cap * torch.tanh(logits / cap) if cap else logits


def _unembedding(config: GPTConfig, weights: dict, options: ModelOptions) -> Tensor:
    name = "embed" if config.tied else "unembed"
    matrix = options.gather.at(name)(weights[name])
    return matrix.mT if config.tied else matrix


# --- tokens further ahead


def ahead_defs(config: GPTConfig, options: ModelOptions = DEFAULTS) -> dict:
    """Defs of all modules, stacked: those of `nn.multi_token_defs`, and a block."""
    norms = {"kind": config.norm, "zero_centered": config.zero_centered_norm}
    stddev, dtype = config.init_stddev, config.torch_dtype
    module = nn.multi_token_defs(config.embed_dim, stddev=stddev, dtype=dtype, **norms)
    module["block"] = block_defs(config, experts=config.moe is not None, options=options)
    return params.stack(module, config.mtp_depth)


def _predict_ahead(
    config: GPTConfig,
    weights: dict,
    x: Tensor,
    sequence: Sequence,
    options: ModelOptions,
    key: Key | None,
    *,
    head: Callable,
) -> tuple[Float[Tensor, " depth"], list[Auxiliary]]:
    """The sums of the losses of each module over this rank's targets, and those of its experts.

    Args:
        x: the normed stream after all layers.
        head: ``(stream, targets) -> losses``: the model's unembedding and loss.
    """
    assert sequence.targets is not None
    gather, stacked = options.gather.at("mtp").rows(), weights["mtp"]
    rows = [tree.map(lambda w, k=k: w[k], stacked) for k in range(config.mtp_depth)]
    without = ("embed_norm", "stream_norm", "norm") if config.norm == "bare_layer" else ()
    outer = [
        {name: {} for name in without}
        | {name: gather.at(name)(part) for name, part in row.items() if name != "block"}
        for row in rows
    ]

    def layer(depth: int, x: Tensor, tokens: Tensor, targets: Tensor) -> tuple:
        here = sequence._replace(tokens=tokens, targets=targets)
        own = None if key is None else random.fold_in(key, config.num_layers + 1 + depth)
        return block(config, here, options, gather.at("block"))(x, (rows[depth]["block"], own, {}))

    losses, found = nn.multi_token(
        outer,
        x,
        sequence.tokens,
        sequence.targets,
        embed=lambda tokens: embedded_tokens(config, weights, tokens, options),
        block=layer,
        head=head,
        eps=config.norm_eps,
        zero_centered=config.zero_centered_norm,
        order=options.context.order,
        segments=sequence.segments,
        positions=sequence.positions,
        kernels=options.kernels,
    )
    return losses, [each for each in found if each is not None]


# --- the size of the residual stream


def watched_names(config: GPTConfig) -> tuple[str, ...]:
    """The names of the rows of `Activations.squares`: ``embed``, ``blocks/0``, ``blocks/1``, ..."""
    stacks = config.stacks.items()
    return ("embed", *(f"{name}/{row}" for name, layers in stacks for row in range(len(layers))))


def _squares(x: Float[Tensor, "batch seq embed"]) -> Float[Tensor, ""]:
    """sum over tokens of mean(x^2), in float32 at least, without a derivative."""
    wide = lax.stop_gradient(x).to(torch.promote_types(x.dtype, torch.float32))
    return wide.square().mean(-1).sum()


def _measured(layer: Callable) -> Callable:
    """`layer`, for `scan`, that returns the size of its stream too."""

    def measured(x: Tensor, row: tuple) -> tuple[Tensor, tuple[Any, Tensor]]:
        x, auxiliary = layer(x, row)
        return x, (auxiliary, _squares(x))

    return measured


def _placed(before: Tensor | None, rows: Tensor, start: int, total: int) -> Tensor:
    """`before` (None: zeros) with `rows`, which are those from `start` on of `total`, added."""
    after = rows.new_zeros(total - start - rows.shape[0])
    mine = torch.cat([rows.new_zeros(start), rows, after])
    return mine if before is None else before + mine


def _summed(
    squares: Tensor, x: Float[Tensor, "batch seq embed"], options: ModelOptions
) -> dict[str, Tensor]:
    """The sums over all ranks' tokens, and how many tokens these are: one all-reduce."""
    alone = set(SAMPLE_AXES) - set(options.axes)
    axes = tuple(axis for axis in spec_axes(options.stream) if axis not in alone)
    tokens = x.shape[0] * x.shape[1] * lax.axis_size(axes)
    count = torch.full((), tokens, dtype=torch.int64, device=x.device)
    return {"squares": lax.psum(lax.stop_gradient(squares), axes), "count": count}
