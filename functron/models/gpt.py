"""One decoder, driven by its config: GPT-2, GPT-3 and Llama 3 are presets of it.

`defs` says what the parameters are, `rules` how a mesh splits them, and `forward` and `loss` are
per-rank programs: pure functions of this rank's parameters and batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch

from functron import nn, params, random
from functron.errors import nearest
from functron.models.config import GPTConfig
from functron.models.presets import PRESETS
from functron.models.rules import rules
from functron.ops.attention import attention
from functron.params import Normal, ParamDef
from functron.pipeline.layout import Part, whole
from functron.scopes import named_scope
from functron.spmd import DATA_AXES, P
from functron.spmd import collectives as lax
from functron.spmd.spec import entry_axes
from functron.transforms import Gather, policies, scan
from functron.transforms import remat as rematerialise
from functron.typing import Float, Int, Key, Scalar, Tensor

__all__ = [
    "PRESETS",
    "SEQUENCE_PARALLEL_STREAM",
    "STREAM",
    "WHOLE",
    "GPTConfig",
    "defs",
    "flops_per_token",
    "forward",
    "loss",
    "num_targets",
    "rules",
    "stage",
    "stage_loss",
    "uses",
]

STREAM = P(DATA_AXES)
"""The residual stream ``[batch, seq, embed]`` split by batch."""
SEQUENCE_PARALLEL_STREAM = P(DATA_AXES, "tp")
"""The residual stream with its sequence split over the tensor-parallel ranks as well."""

WHOLE = Gather()
"""Parameters that no data axis splits: there is nothing to gather."""

Remat = Literal["none", "full", "selective", "dots"]
"""What backward computes again: nothing; each block from its input; the attention core
softmax(q k^T) v alone (Korthikanti et al. 2022, section 5); all but matrix products and attention.
"""

Batch = Mapping[str, Tensor]
"""``tokens`` and ``targets`` int64 [B, T], and ``rows`` int64 [B], indices in the global batch."""


def defs(config: GPTConfig) -> dict:
    """The parameters of the model: ``{"embed", "positions"?, "blocks", "norm", "unembed"?}``.

    The parameters of all blocks are stacked on a leading "layers" dim.
    """
    c, dtype = config, config.torch_dtype
    out_stddev = c.init_stddev / math.sqrt(2 * c.num_layers)
    stream_norm = nn.norm_defs(
        c.embed_dim, c.norm, axis="embed", dtype=dtype, zero_centered=c.zero_centered_norm
    )
    block = {
        "attention_norm": stream_norm,
        "attention": nn.attention_defs(
            c.attention, stddev=c.init_stddev, out_stddev=out_stddev, dtype=dtype
        ),
        "mlp_norm": stream_norm,
        "mlp": nn.mlp_defs(
            c.embed_dim,
            c.mlp_dim,
            gated=c.gated,
            bias=c.bias,
            stddev=c.init_stddev,
            out_stddev=out_stddev,
            dtype=dtype,
        ),
    }
    normal = Normal(c.init_stddev)
    model = {
        "embed": ParamDef((c.padded_vocab, c.embed_dim), ("vocab", "embed"), normal, dtype),
        "blocks": params.stack(block, c.num_layers),
        "norm": stream_norm,
    }
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
) -> Float[Tensor, "batch seq columns"]:
    """The logits of every next token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples, whole sequences.
        rows: int64 ``[batch]``, the samples' indices in the global batch, for dropout; None where
            each data rank's tokens are its whole part of that batch, in order.
        key: the key of dropout's masks; None switches dropout off.
        stream: `STREAM` or `SEQUENCE_PARALLEL_STREAM`.
        remat: what backward computes again; see `Remat`.
        gather: how parameters that data axes split are gathered where they are used: the specs of
            all of the model's, ``param_specs(defs(config), rules(config, mesh))``, and more; what
            each block needs by itself, and again in backward.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives per block: see `nn.self_attention`, `nn.mlp` and `transforms.fsdp`.

    Raises:
        ValueError: the sequence is longer than `max_seq`, or does not divide over the axes that
            split it.
    """
    batch = {"tokens": tokens} if rows is None else {"tokens": tokens, "rows": rows}
    part = whole(config.num_layers)
    return stage(
        config, part, weights, None, batch, key=key, stream=stream, remat=remat, gather=gather
    )


def stage(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: Float[Tensor, "batch seq embed"] | None,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
) -> Float[Tensor, "batch out_seq features"]:
    """What one stage of a pipeline makes of the residual stream that the stage before made.

    Args:
        config: the architecture, of the whole model.
        part: what the stage computes.
        weights: this rank's part of the stage's parameters: those that `uses` says, of stacked ones
            the rows of its layers.
        x: the residual stream after the layers before; None for the stage with the embedding.
        batch: ``tokens``, of which the stage with the embedding needs the numbers, and ``rows``,
            without which each data rank's samples are taken to be its whole part of the batch.
        key, stream, remat: as in `forward`.
        gather: as in `forward`, with the specs of the whole model's parameters.

    Returns:
        The residual stream with spec `stream`; at the stage with the loss, the logits of `forward`.
    """
    tokens = batch["tokens"]
    _check_sequence(config, tokens.shape[1], stream)
    keys = None if key is None else random.split(key, config.num_layers + 1)
    rows = batch.get("rows")
    if rows is None:
        rows = lax.global_index(tokens.shape[0], DATA_AXES, device=tokens.device)

    def drop(x: Tensor, drop_key: Tensor | None) -> Tensor:
        return nn.dropout(x, drop_key, rate=config.dropout, rows=rows, stream=stream)

    if part.embed:
        with named_scope("embed"):
            table = gather.at("embed")(weights["embed"])
            _check_whole(config, table.shape[1])
            x = nn.embed_tokens(table, tokens, stream=stream, scale=config.embed_scale)
            if config.positions == "learned":
                x = nn.add_positions(x, gather.at("positions")(weights["positions"]), stream=stream)
            x = drop(x, None if keys is None else keys[-1])
    if part.layers:
        rope = _rope(config, tokens, gather.compute_dtype or config.torch_dtype)
        block = _block(config, rope, stream, drop, remat, gather.at("blocks").rows())
        start, stop = part.layers.start, part.layers.stop
        x, _ = scan(block, x, (weights["blocks"], None if keys is None else keys[start:stop]))
    assert x is not None
    if not part.loss:
        return x
    with named_scope("norm"):
        x = _norm(config, gather.at("norm")(weights["norm"]), x)
    with named_scope("unembed"):
        name = "embed" if config.tied else "unembed"
        unembed = gather.at(name)(weights[name])
        unembed = unembed.mT if config.tied else unembed
        return nn.column_parallel(nn.gather_sequence(x, stream), unembed)


def uses(config: GPTConfig) -> dict[str, str]:
    """Which stages of a pipeline use each entry of `defs`, as `pipeline.Partition` wants it."""
    table = {"embed": "EL" if config.tied else "E", "blocks": "t", "norm": "L"}
    if config.positions == "learned":
        table["positions"] = "E"
    if not config.tied:
        table["unembed"] = "L"
    return table


def _norm(config: GPTConfig, weights: dict, x: Tensor) -> Tensor:
    return nn.norm(weights, x, eps=config.norm_eps, zero_centered=config.zero_centered_norm)


def _rope(config: GPTConfig, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    if config.positions != "rope":
        return None
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return nn.rope_table(positions, config.head_size, config.rope_theta, config.rope_scaling, dtype)


def _block(
    config: GPTConfig,
    rope: tuple[Tensor, Tensor] | None,
    stream: P,
    drop: Callable,
    remat: Remat,
    gather: Gather,
) -> Callable:
    """``(x, (parameters, key)) -> (x, None)``: one pre-norm transformer block, for `scan`."""
    _check_remat(remat)
    core = rematerialise(attention) if remat == "selective" else attention

    def layer(weights: dict, x: Tensor, key: Tensor | None) -> Tensor:
        keys = (None, None) if key is None else random.split(key).unbind(0)
        _check_whole(config, weights["attention_norm"]["scale"].shape[0])
        with named_scope("attention"):
            y = _norm(config, weights["attention_norm"], x)
            y = nn.self_attention(
                weights["attention"], y, config.attention, rope=rope, stream=stream, core=core
            )
            x = x + drop(y, keys[0])
        with named_scope("mlp"):
            y = _norm(config, weights["mlp_norm"], x)
            y = nn.mlp(weights["mlp"], y, activation=config.activation, stream=stream)
            return x + drop(y, keys[1])

    policy = {"full": policies.nothing, "dots": policies.dots}.get(remat, policies.everything)
    # what is recomputed is inside what is gathered: so gathering depends on parameters alone
    gathered = gather.around(rematerialise(layer, policy=policy))

    def block(x: Tensor, row: tuple) -> tuple[Tensor, None]:
        return gathered(row[0], x, row[1]), None

    return block


def _check_whole(config: GPTConfig, size: int) -> None:
    if size != config.embed_dim:
        raise ValueError(
            f"forward: got parameters with {size} of embed_dim={config.embed_dim} on this rank; "
            "wanted all of them where they are used; fix: pass gather=transforms.Gather(specs), "
            "with the specs by which they are split"
        )


def _check_remat(remat: str) -> None:
    known = get_args(Remat)
    if remat not in known:
        raise ValueError(f"forward: got remat={remat!r}; {nearest(str(remat), known)}")


def _check_sequence(config: GPTConfig, seq: int, stream: P) -> None:
    if seq > config.max_seq:
        raise ValueError(
            f"forward: got {seq} tokens per sample; wanted at most max_seq={config.max_seq}; "
            "shorten the samples or raise max_seq"
        )
    parts = lax.axis_size(entry_axes(stream[1])) if len(stream) > 1 else 1
    if seq % parts:
        raise ValueError(
            f"forward: got {seq} tokens per sample; wanted a multiple of {parts}, the ranks that "
            f"split the sequence under {stream}; change the sequence length"
        )


def loss(
    config: GPTConfig,
    weights: dict,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
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
    part = whole(config.num_layers)
    return stage_loss(
        config, part, weights, None, batch, key=key, stream=stream, remat=remat, gather=gather
    )


def stage_loss(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: Float[Tensor, "batch seq embed"] | None,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
) -> Tensor:
    """`stage`, but the stage with the loss returns that: what `loss` does, for one stage.

    Of the batch, the stage with the loss needs the ``targets`` as well.
    """
    x = stage(config, part, weights, x, batch, key=key, stream=stream, remat=remat, gather=gather)
    if not part.loss:
        return x
    with named_scope("loss"):
        losses = nn.cross_entropy(
            x, batch["targets"], vocab_size=config.vocab_size, z_loss=config.z_loss
        )
        return lax.psum(losses.sum(), DATA_AXES)


def num_targets(batch: Batch) -> Int[Tensor, ""]:
    """How many targets count, over the batch of all ranks: an int64 scalar; one all-reduce."""
    return lax.psum((batch["targets"] != nn.IGNORE_INDEX).sum(), DATA_AXES)


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
