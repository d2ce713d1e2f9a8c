"""A decoder as a per-rank program, stage by stage: embedding, stacks of blocks, logits and loss.

How large the residual stream is after the embedding and after every layer.

Predicting tokens further ahead: the modules of DeepSeek-V3 around blocks of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functron import nn, params
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems
from functron.core.scopes import named_scope
from functron.core.typing import Float, Tensor
from functron.models import mup
from functron.models.block import (
    Details,
    How,
    Passed,
    Routed,
    Watched,
    block,
    block_defs,
    check_whole,
    joined,
    norm,
    own_norm,
    patterns,
)
from functron.models.config import GPTConfig
from functron.models.sequence import Sequence, check_length, check_positions
from functron.nn import zigzag
from functron.nn.linear import sequence_axes
from functron.pipeline.layout import Part
from functron.spmd import CONTEXT_AXES, P
from functron.spmd import collectives as lax
from functron.spmd.spec import spec_axes
from functron.transforms import scan


def squares_of(x: Float[Tensor, "batch seq embed"]) -> Float[Tensor, ""]:
    """sum over tokens of mean(x^2), in float32 at least, without a derivative."""
    wide = lax.stop_gradient(x).to(torch.promote_types(x.dtype, torch.float32))
    return wide.square().mean(-1).sum()


def watched(layer: Callable) -> Callable:
    """`layer`, for `scan`, that returns with what it says the size of the stream that it makes."""

    def block(x: Tensor, row: tuple) -> tuple[Tensor, tuple[Any, Tensor]]:
        x, said = layer(x, row)
        return x, (said, squares_of(x))

    return block


def placed(before: Tensor | None, rows: Tensor, start: int, total: int) -> Tensor:
    """`before` (None: zeros) with `rows`, which are those from `start` on of `total`, added."""
    after = rows.new_zeros(total - start - rows.shape[0])
    mine = torch.cat([rows.new_zeros(start), rows, after])
    return mine if before is None else before + mine


def summed(squares: Tensor, x: Float[Tensor, "batch seq embed"], stream: P) -> dict[str, Tensor]:
    """The sums over all ranks' tokens, and how many tokens these are.

    One all-reduce of a number per layer.

    Args:
        squares: of `Watched`.
        x: the stream, for its shape.
        stream: its spec.
    """
    axes = spec_axes(stream)
    tokens = x.shape[0] * x.shape[1] * lax.axis_size(axes)
    count = torch.full((), tokens, dtype=torch.int64, device=x.device)
    return {"squares": lax.psum(lax.stop_gradient(squares), axes), "count": count}


def watched_names(config: GPTConfig) -> tuple[str, ...]:
    """What the rows of `Watched.squares` are of: ``embed``, ``blocks/0``, ``blocks/1``, ..."""
    stacks = config.stacks.items()
    return ("embed", *(f"{name}/{row}" for name, layers in stacks for row in range(len(layers))))


def ahead_defs(config: GPTConfig) -> dict:
    """Defs of all modules, stacked: those of `nn.multi_token_defs`, and a block."""
    norms = {"kind": config.norm, "zero_centered": config.zero_centered_norm}
    stddev, dtype = config.init_stddev, config.torch_dtype
    module = nn.multi_token_defs(config.embed_dim, stddev=stddev, dtype=dtype, **norms)
    module["block"] = block_defs(config, experts=config.moe is not None)
    return params.stack(module, config.mtp_depth)


def predict_ahead(
    config: GPTConfig,
    weights: dict,
    x: Tensor,
    sequence: Sequence,
    how: How,
    *,
    embed: Callable,
    head: Callable,
) -> tuple[Float[Tensor, " depth"], list[Routed]]:
    """The sums of the losses of each module over this rank's targets, and what their routers say.

    Args:
        config: the architecture.
        weights: this rank's part of `ahead_defs`.
        x: the residual stream after all layers.
        sequence: the rank's tokens.
        how: the settings of the model.
        embed: ``tokens -> stream``: the model's embedding.
        head: ``(stream, targets) -> losses``: the model's unembedding and loss.
    """
    assert sequence.targets is not None
    gather = how.gather.at("mtp").rows()
    rows = [tree.map(lambda w, k=k: w[k], weights) for k in range(config.mtp_depth)]
    without = ("embed_norm", "stream_norm", "norm") if config.norm == "bare_layer" else ()
    outer = [
        {name: {} for name in without}
        | {name: gather.at(name)(part) for name, part in row.items() if name != "block"}
        for row in rows
    ]

    def layer(depth: int, x: Tensor, tokens: Tensor, targets: Tensor) -> tuple:
        here = sequence._replace(tokens=tokens, targets=targets)
        key = how.key
        if key is not None:
            key = random.fold_in(key, config.num_layers + 1 + depth)
        return block(config, here, how, gather.at("block"))(x, (rows[depth]["block"], key, {}))

    losses, said = nn.multi_token(
        outer,
        x,
        sequence.tokens,
        sequence.targets,
        embed=embed,
        block=layer,
        head=head,
        eps=config.norm_eps,
        zero_centered=config.zero_centered_norm,
        order=how.context.order,
        segments=sequence.segments,
        positions=sequence.positions,
        kernels=how.kernels,
    )
    return losses, [each for each in said if each is not None]


def loss(
    config: GPTConfig, part: Part, weights: dict, x: Passed | None, sequence: Sequence, how: How
) -> Any:
    """What the stage `part` makes of what the one before made; the loss at the last.

    Returns:
        What `stream` returns, or at the last stage the sum of the losses over the batch of all
        ranks; with layers of experts, tokens further ahead or ``how.watch``, a pair of that and
        `Details`.
    """
    x, said = stream(config, part, weights, x, sequence, how)
    if not part.loss:
        return x if said is None else (x, said)
    return _total(config, weights, x, said, sequence, how)


def _total(
    config: GPTConfig,
    weights: dict,
    x: Tensor,
    said: Routed | Watched | None,
    sequence: Sequence,
    how: How,
) -> Any:
    """The loss of the stream after all layers, and `Details` if it has any."""
    targets = sequence.targets
    if targets is None:
        problem = Problem("targets", "nothing", "the next token of each", "put them into the batch")
        raise_problems("the batch has no loss", [problem])
        raise AssertionError("unreachable")
    if config.logit_cap and how.loss_chunk_tokens:
        got, fix = f"{how.loss_chunk_tokens} with logit_cap", "leave it out"
        found = Problem("loss_chunk_tokens", got, "0: capped logits are made at once", fix)
        raise_problems("the loss of capped logits", [found])
    with named_scope("norm"):
        normed = _last_norm(config, weights, x, how)
    with named_scope("unembed"):
        matrix = _unembedding(config, weights, how)

    def losses(x: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
        settings = {"vocab_size": config.vocab_size, "z_loss": z_loss, "kernels": how.kernels}
        with named_scope("unembed"):
            x = nn.gather_sequence(_scaled(config, x), how.stream)
            if how.loss_chunk_tokens:
                chunk = how.loss_chunk_tokens
                return nn.linear_cross_entropy(x, matrix, targets, chunk_tokens=chunk, **settings)
            out = _capped(config, nn.column_parallel(x, matrix))
        with named_scope("loss"):
            return nn.cross_entropy(out, targets, **settings)

    first = losses(normed, targets, config.z_loss).sum()
    if not config.has_details and not how.watch:
        with named_scope("loss"):
            return lax.psum(first, how.axes)
    routed, squares = said if isinstance(said, Watched) else (said, None)
    share, further = first, None
    if config.mtp_depth:
        with named_scope("ahead"):
            further, ahead = predict_ahead(
                config,
                weights["mtp"],
                normed,
                sequence,
                how,
                embed=lambda tokens: _tokens(config, weights, tokens, how),
                head=losses,
            )
        share = share + config.mtp_weight * further.mean()
        for depth, each in enumerate(ahead):
            row = Routed(each.share, tree.map(lambda s: s[None], each.sums))
            start = config.num_routers - config.mtp_depth + depth
            routed = joined(routed, row, start, config.num_routers)
    if routed is not None:
        share = share + routed.share
    details: Details = {"targets": (targets != nn.IGNORE_INDEX).sum(), "next_token": first}
    if further is not None:
        details["ahead"] = further
    if routed is not None:
        details["routers"] = routed.sums
    total = lax.psum(share, how.axes)
    details = lax.psum(lax.stop_gradient(details), how.axes)
    if squares is not None:
        details["stream"] = summed(squares, x, how.stream)
    return total, details


def logits(config: GPTConfig, weights: dict, x: Tensor, how: How) -> Tensor:
    """The logits of the stream after all layers, in the order that the batch came in."""
    with named_scope("norm"):
        x = _last_norm(config, weights, x, how)
    with named_scope("unembed"):
        x = nn.gather_sequence(_scaled(config, x), how.stream)
        if how.context.order == "zigzag":
            x = zigzag.to_contiguous(x, 1)
        return _capped(config, nn.column_parallel(x, _unembedding(config, weights, how)))


def _last_norm(config: GPTConfig, weights: dict, x: Tensor, how: How) -> Tensor:
    own = own_norm(config, weights, "norm")
    return norm(config, how.gather.at("norm")(own) if own else own, x, how.kernels)


def _scaled(config: GPTConfig, x: Tensor) -> Tensor:
    """What is unembedded, so that logits are multiplied by muP's factor, if there is one."""
    factor = mup.logit_scale(config)
    return x if factor == 1 else x * factor


def _capped(config: GPTConfig, logits: Tensor) -> Tensor:
    """cap tanh(logits / cap), if there is a cap."""
    cap = config.logit_cap
    return cap * torch.tanh(logits / cap) if cap else logits


def _unembedding(config: GPTConfig, weights: dict, how: How) -> Tensor:
    name = "embed" if config.tied else "unembed"
    matrix = how.gather.at(name)(weights[name])
    return matrix.mT if config.tied else matrix


def stream(
    config: GPTConfig,
    part: Part,
    weights: dict,
    passed: Passed | None,
    sequence: Sequence,
    how: How,
) -> tuple[Tensor, Routed | Watched | None]:
    """The residual stream after the layers of `part`, and what layers have said so far."""
    split = lax.axis_size(tuple(a for a in sequence_axes(how.stream) if a not in CONTEXT_AXES))
    longest = config.max_seq if sequence.segments is None else None
    check_length(sequence.tokens.shape[1], longest, split)
    check_positions(sequence, config.rope_sections, how.context)
    x, said = passed if isinstance(passed, tuple) else (passed, None)
    routed, squares = said if isinstance(said, Watched) else (said, None)
    keys = None if how.key is None else random.split(how.key, config.num_layers + 1)
    if part.embed:
        with named_scope("embed"):
            x = embedded(config, weights, sequence, how, None if keys is None else keys[-1])
        if how.watch:
            squares = placed(None, squares_of(x).reshape(1), 0, 1 + config.num_layers)
    assert x is not None
    differing = patterns(config, x.device)
    for name, layers in config.stacks.items():
        start, stop = max(part.layers.start, layers.start), min(part.layers.stop, layers.stop)
        if start >= stop:
            continue
        layer = block(config, sequence, how, how.gather.at(name).rows())
        layer = watched(layer) if how.watch else layer
        own = {what: rows[start:stop] for what, rows in differing.items()}
        x, said = scan(layer, x, (weights[name], None if keys is None else keys[start:stop], own))
        if how.watch:
            said, rows = said
            squares = placed(squares, rows, 1 + start, 1 + config.num_layers)
        if said is not None:
            said = Routed(said.share.sum(), said.sums)
            routed = joined(routed, said, start - layers.start, config.num_routers)
    return x, routed if squares is None else Watched(routed, squares)


def embedded(
    config: GPTConfig,
    weights: dict,
    sequence: Sequence,
    how: How,
    key: Tensor | None = None,
) -> Tensor:
    """The residual stream before the first layer; `key` is that of its dropout."""
    x = _tokens(config, weights, sequence.tokens, how)
    if config.positions == "learned":
        table = how.gather.at("positions")(weights["positions"])
        x = nn.add_positions(x, table, stream=how.stream, positions=sequence.positions)
    return how.drop(config, sequence, x, key)


def _tokens(config: GPTConfig, weights: dict, tokens: Tensor, how: How) -> Tensor:
    table = how.gather.at("embed")(weights["embed"])
    check_whole(config, table.shape[1])
    settings = {"scale": config.embed_scale, "vocab_size": config.vocab_size}
    return nn.embed_tokens(table, tokens, stream=how.stream, **settings)
