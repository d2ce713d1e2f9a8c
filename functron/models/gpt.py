"""One decoder, driven by its config: GPT-2, GPT-3 and Llama 3 are presets of it.

`defs` says what the parameters are, `rules` how a mesh splits them, and `forward` and `loss` are
per-rank programs: pure functions of this rank's parameters and batch.
"""

from __future__ import annotations

from typing import Any

import torch

from functron import nn, params, random
from functron.models.block import (
    RING,
    SEQUENCE_PARALLEL_STREAM,
    STREAM,
    WHOLE,
    How,
    Passed,
    Remat,
    Routed,
    block,
    block_defs,
    check_whole,
    joined,
    norm,
    norm_defs,
)
from functron.models.config import GPTConfig
from functron.models.presets import PRESETS
from functron.models.rules import rules
from functron.models.sequence import (
    SAMPLE_AXES,
    Batch,
    Context,
    Sequence,
    arranged,
    check_length,
)
from functron.nn import zigzag
from functron.nn.linear import sequence_axes
from functron.nn.moe import RouterSums
from functron.params import Normal, ParamDef
from functron.pipeline.layout import Part, whole
from functron.scopes import named_scope
from functron.spmd import CONTEXT_AXES, DATA_AXES, P
from functron.spmd import collectives as lax
from functron.transforms import Gather, scan
from functron.typing import Float, Int, Key, Scalar, Tensor

__all__ = [
    "PRESETS",
    "SAMPLE_AXES",
    "SEQUENCE_PARALLEL_STREAM",
    "STREAM",
    "WHOLE",
    "Context",
    "GPTConfig",
    "Remat",
    "batch_specs",
    "defs",
    "flops_per_token",
    "forward",
    "loss",
    "loss_and_routing",
    "num_targets",
    "rules",
    "stage",
    "stage_loss",
    "uses",
]


def defs(config: GPTConfig) -> dict:
    """The parameters: ``{"embed", "positions"?, "dense"?, "blocks", "norm", "unembed"?}``.

    Those of all blocks are stacked on a leading "layers" dim; where the first blocks are dense and
    the others have experts, these are "dense" and those "blocks".
    """
    c, dtype = config, config.torch_dtype
    normal = Normal(c.init_stddev)
    model = {
        "embed": ParamDef((c.padded_vocab, c.embed_dim), ("vocab", "embed"), normal, dtype),
        "norm": norm_defs(c),
    }
    for name, layers in c.stacks.items():
        layer = block_defs(c, experts=c.moe is not None and name == "blocks")
        model[name] = params.stack(layer, len(layers))
    if c.positions == "learned":
        model["positions"] = ParamDef((c.max_seq, c.embed_dim), (None, "embed"), normal, dtype)
    if not c.tied:
        model["unembed"] = ParamDef(
            (c.embed_dim, c.padded_vocab), ("embed", "vocab"), normal, dtype
        )
    return model


def forward(
    config: GPTConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    *,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
) -> Float[Tensor, "batch seq columns"]:
    """The logits of every next token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples; where axes of the mesh split sequences
            (`CONTEXT_AXES`), its part of each, in order.
        rows: int64 ``[batch]``, the samples' indices in the global batch, for dropout; None where
            each data rank's tokens are its whole part of that batch, in order.
        key: the key of dropout's masks; None switches dropout off.
        stream: `STREAM` or `SEQUENCE_PARALLEL_STREAM`.
        remat: what backward computes again; see `Remat`.
        gather: how parameters that data axes split are gathered where they are used: the specs of
            all of the model's, ``param_specs(defs(config), rules(config, mesh))``, and more; what
            each block needs by itself, and again in backward.
        context: how attention reaches across the ranks that split sequences.
        experts: the axes that experts are divided over, as the rules have it; see `rules`.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives per block: see `nn.self_attention`, `nn.context_attention`, `nn.mlp`
        and `transforms.fsdp`.

    Raises:
        ValueError: the sequence is longer than `max_seq`, or does not divide over the axes that
            split it.
    """
    batch = {"tokens": tokens} if rows is None else {"tokens": tokens, "rows": rows}
    part = whole(config.num_layers)
    how = How(key, stream, remat, gather, context, experts)
    sequence = arranged(batch, context)
    x, _ = _stream(config, part, weights, None, sequence, how)
    return _logits(config, weights, x, how, in_order=True)


def stage(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: Passed | None,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
) -> Passed:
    """What one stage of a pipeline makes of the residual stream that the stage before made.

    Args:
        config: the architecture, of the whole model.
        part: what the stage computes.
        weights: this rank's part of the stage's parameters: those that `uses` says, of stacked ones
            the rows of its layers.
        x: what the stage before returned; None for the stage with the embedding.
        batch: ``tokens``, of which the stage with the embedding needs the numbers, and ``rows``,
            without which each data rank's samples are taken to be its whole part of the batch.
        key, stream, remat, context, experts: as in `forward`.
        gather: as in `forward`, with the specs of the whole model's parameters.

    Returns:
        The residual stream with spec `stream`, in a pair with what routers have said so far where
        there are layers of experts up to here; at the stage with the loss, the logits of `forward`.
    """
    how = How(key, stream, remat, gather, context, experts)
    x, routed = _stream(config, part, weights, x, arranged(batch, context), how)
    if part.loss:
        return _logits(config, weights, x, how, in_order=True)
    return x if routed is None else (x, routed)


def _logits(config: GPTConfig, weights: dict, x: Tensor, how: How, *, in_order: bool) -> Tensor:
    """The logits of the stream after all layers: `in_order`, or where the tokens are."""
    with named_scope("norm"):
        x = norm(config, how.gather.at("norm")(weights["norm"]), x)
    with named_scope("unembed"):
        name = "embed" if config.tied else "unembed"
        unembed = how.gather.at(name)(weights[name])
        unembed = unembed.mT if config.tied else unembed
        x = nn.gather_sequence(x, how.stream)
        if in_order and how.context.order == "zigzag":
            x = zigzag.to_contiguous(x, 1)
        return nn.column_parallel(x, unembed)


def _stream(
    config: GPTConfig,
    part: Part,
    weights: dict,
    passed: Passed | None,
    sequence: Sequence,
    how: How,
) -> tuple[Tensor, Routed | None]:
    """The residual stream after the layers of `part`, and what routers have said so far."""
    split = lax.axis_size(tuple(a for a in sequence_axes(how.stream) if a not in CONTEXT_AXES))
    check_length(sequence.tokens.shape[1], config.max_seq, split)
    x, routed = passed if isinstance(passed, tuple) else (passed, None)
    keys = None if how.key is None else random.split(how.key, config.num_layers + 1)
    if part.embed:
        with named_scope("embed"):
            x = _embedded(config, weights, sequence, how, None if keys is None else keys[-1])
    assert x is not None
    windows = None
    if config.global_every:
        windows = torch.tensor(config.windows, device=x.device)
    for name, layers in config.stacks.items():
        start, stop = max(part.layers.start, layers.start), min(part.layers.stop, layers.stop)
        if start >= stop:
            continue
        layer = block(config, sequence, how, how.gather.at(name).rows())
        own = (None if rows is None else rows[start:stop] for rows in (keys, windows))
        x, said = scan(layer, x, (weights[name], *own))
        if said is not None:
            said = Routed(said.share.sum(), said.sums)
            routed = joined(routed, said, start - layers.start, len(layers))
    return x, routed


def _embedded(
    config: GPTConfig, weights: dict, sequence: Sequence, how: How, key: Tensor | None
) -> Tensor:
    table = how.gather.at("embed")(weights["embed"])
    check_whole(config, table.shape[1])
    x = nn.embed_tokens(table, sequence.tokens, stream=how.stream, scale=config.embed_scale)
    if config.positions == "learned":
        table = how.gather.at("positions")(weights["positions"])
        x = nn.add_positions(x, table, stream=how.stream, positions=sequence.positions)
    return how.drop(config, sequence, x, key)


def batch_specs(*, packed: bool = False) -> dict[str, P]:
    """How the entries of a batch are split: for `make_step`, and to `shard` it by.

    Args:
        packed: whether it has the positions and segments of packed documents.
    """
    names = ("tokens", "targets", *(("positions", "segments") if packed else ()))
    return {**dict.fromkeys(names, P(DATA_AXES, CONTEXT_AXES)), "rows": P(DATA_AXES)}


def uses(config: GPTConfig) -> dict[str, str | range]:
    """Which stages of a pipeline use each entry of `defs`, as `pipeline.Partition` wants it."""
    embed = "EL" if config.tied else "E"
    table: dict[str, str | range] = {"embed": embed, **config.stacks, "norm": "L"}
    if config.positions == "learned":
        table["positions"] = "E"
    if not config.tied:
        table["unembed"] = "L"
    return table


def loss(
    config: GPTConfig,
    weights: dict,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
) -> Scalar:
    """The sum of all tokens' losses over the batch of all ranks; replicated over the mesh.

    Divide it by `num_targets` for the mean. Sums, unlike means, add up over ranks and microbatches
    also when these hold different numbers of tokens.

    Args:
        batch: this rank's samples; targets of `nn.IGNORE_INDEX` do not count.

    Returns:
        A scalar in float32 at least. Collectives: those of `forward` and `nn.cross_entropy`, and
        one all-reduce of a scalar.
    """
    how = How(key, stream, remat, gather, context, experts)
    out = _loss(config, whole(config.num_layers), weights, None, batch, how)
    return out if config.moe is None else out[0]


def loss_and_routing(
    config: GPTConfig,
    weights: dict,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
) -> tuple[Scalar, RouterSums]:
    """`loss` of a model with experts, and what its routers did over the batch of all ranks.

    For `make_step` with ``has_aux=True``; `nn.moe.summary` says it in a few numbers. Collectives:
    one more all-reduce of a few numbers per expert and layer.
    """
    how = How(key, stream, remat, gather, context, experts)
    return _loss(config, whole(config.num_layers), weights, None, batch, how)


def stage_loss(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: Passed | None,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
) -> Any:
    """`stage`, but the stage with the loss returns that: what `loss` does, for one stage.

    With layers of experts it returns what `loss_and_routing` does. Of the batch, the stage with the
    loss needs the ``targets`` as well, and so do those with layers of experts.
    """
    how = How(key, stream, remat, gather, context, experts)
    return _loss(config, part, weights, x, batch, how)


def _loss(
    config: GPTConfig, part: Part, weights: dict, x: Passed | None, batch: Batch, how: How
) -> Any:
    sequence = arranged(batch, how.context)
    x, routed = _stream(config, part, weights, x, sequence, how)
    if not part.loss:
        return x if routed is None else (x, routed)
    logits = _logits(config, weights, x, how, in_order=False)
    with named_scope("loss"):
        targets, settings = sequence.targets, {"vocab_size": config.vocab_size}
        losses = nn.cross_entropy(logits, targets, z_loss=config.z_loss, **settings)
        total = losses.sum()
        if routed is None:
            return lax.psum(total, SAMPLE_AXES)
        return lax.psum(total + routed.share, SAMPLE_AXES), lax.psum(routed.sums, SAMPLE_AXES)


def num_targets(batch: Batch) -> Int[Tensor, ""]:
    """How many targets count, over the batch of all ranks: an int64 scalar; one all-reduce."""
    return lax.psum((batch["targets"] != nn.IGNORE_INDEX).sum(), SAMPLE_AXES)


def flops_per_token(config: GPTConfig, seq: int) -> int:
    """Model FLOPs of forward and backward per token: 6 N + 12 L H D T.

    N counts the parameters that multiply activations (embedding look-ups do not); the second term
    is attention over `seq` tokens, uncorrected for causality (Chowdhery et al. 2022, appendix B).
    """
    total = params.num_params(defs(config))
    lookups = 0 if config.tied else config.padded_vocab * config.embed_dim
    if config.positions == "learned":
        lookups += config.max_seq * config.embed_dim
    attention = 12 * config.num_layers * config.num_heads * config.head_size * seq
    return 6 * (total - lookups) + attention
