"""Tensor-parallel causal self-attention: multi-head, grouped-query and multi-query."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from functron.core.typing import Float, Tensor
from functron.nn.linear import column_parallel, gather_sequence, linear_defs, row_parallel, weights
from functron.nn.norm import norm, norm_defs
from functron.nn.rope import apply_rope
from functron.ops.attention import attention
from functron.ops.define import AUTO, Kernels
from functron.ops.qk_norm_rope import QK_NORM_ROPE
from functron.params import Normal, ParamDef, ones, zeros
from functron.spmd import collectives as lax
from functron.spmd.spec import P


@dataclass(frozen=True)
class AttentionConfig:
    """Shapes and options of self-attention.

    Attributes:
        embed_dim: width of the stream.
        num_heads: query heads.
        num_kv_heads: key/value heads; equal to `num_heads` for multi-head, 1 for multi-query
            attention, between for grouped queries (Ainslie et al. 2023).
        head_dim: width of a head.
        bias: biases on the query, key and value projections.
        out_bias: bias on the output projection.
        qk_norm: RMSNorm queries and keys per head (Dehghani et al. 2023; Qwen3).
        norm_eps: epsilon of that norm.
        zero_centered_norm: it multiplies by 1 + scale.
        sinks: a learned logit per head that takes part in the softmax and has no value (GPT-OSS).
        qk_norm_across: the norms of queries and keys are over all heads together (OLMo 2).
        scale: multiplies the scores; 0: 1 / sqrt(head_dim).
        gate: what heads say is multiplied by sigmoid(x W_gate), number by number (Qiu et al. 2025,
            "Gated Attention for Large Language Models"; Qwen3-Next).
        clip: queries, keys and values are brought into [-clip, clip] before all else (MPT; OLMo);
            0: they are not.
        interleaved: rotated dims lie in pairs next to each other; see `apply_rope`.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    zero_centered_norm: bool = False
    sinks: bool = False
    qk_norm_across: bool = False
    scale: float = 0.0
    gate: bool = False
    clip: float = 0.0
    interleaved: bool = False


def attention_defs(
    config: AttentionConfig, *, stddev: float, out_stddev: float, dtype: torch.dtype
) -> dict:
    """Defs ``{"q", "k", "v", "out", "q_norm"?, "k_norm"?, "sinks"?, "gate"?}``."""

    def projection(num_heads: int, axis: str) -> dict:
        shape = (num_heads, config.head_dim)
        return linear_defs(
            (config.embed_dim, *shape),
            ("embed", axis, None),
            stddev=stddev,
            bias=shape if config.bias else None,
            bias_axes=(axis, None),
            dtype=dtype,
        )

    defs = {
        "q": projection(config.num_heads, "heads"),
        "k": projection(config.num_kv_heads, "kv_heads"),
        "v": projection(config.num_kv_heads, "kv_heads"),
        "out": linear_defs(
            (config.num_heads, config.head_dim, config.embed_dim),
            ("heads", None, "embed"),
            stddev=out_stddev,
            bias=(config.embed_dim,) if config.out_bias else None,
            bias_axes=("embed",),
            dtype=dtype,
        ),
    }
    if config.gate:
        defs["gate"] = projection(config.num_heads, "heads")
    if config.qk_norm:
        defs |= _qk_norm_defs(config, dtype)
    if config.sinks:
        shape = (config.num_heads,)
        defs["sinks"] = ParamDef(shape, ("heads",), Normal(stddev), dtype, decay=False)
    return defs


def _qk_norm_defs(config: AttentionConfig, dtype: torch.dtype) -> dict:
    names, zero_centered = ("q_norm", "k_norm"), config.zero_centered_norm
    if not config.qk_norm_across:
        each = {"axis": None, "dtype": dtype, "zero_centered": zero_centered}
        return {name: norm_defs(config.head_dim, "rms", **each) for name in names}
    start = zeros if zero_centered else ones
    counts = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    return {
        name: {"scale": ParamDef((count, config.head_dim), (axis, None), start, dtype, decay=False)}
        for name, (axis, count) in zip(names, counts.items(), strict=True)
    }


def causal_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads value_dim"],
    *,
    scale: float | None = None,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """`functron.ops.attention.attention` of whole sequences, each query seeing keys up to its own.

    Kernels want one width: the narrower of keys and values end in zeros, which add nothing to
    scores and come out as zeros, but are multiplied.

    Args:
        q: ``[batch, seq, heads, head_dim]``.
        k: ``[batch, seq, kv_heads, head_dim]``; each head serves ``heads / kv_heads`` of q's.
        v: as `k`; its width may be another.
        scale: of the scores; None for 1 / sqrt(head_dim).
    """
    width, value_dim = q.shape[-1], v.shape[-1]
    wide = max(width, value_dim)
    # `attention` divides by the root of the width that it is given
    by = math.sqrt(wide / width) if scale is None else scale / (1 / math.sqrt(wide))
    q = q if by == 1 else q * by
    if wide > width:
        q, k = (F.pad(x, (0, wide - width)) for x in (q, k))
    elif wide > value_dim:
        v = F.pad(v, (0, wide - value_dim))
    group = q.shape[-2] // k.shape[-2]
    if group > 1:
        k, v = (
            x.unsqueeze(-2).expand(*x.shape[:-1], group, x.shape[-1]).flatten(-3, -2)
            for x in (k, v)
        )
    y = attention(q, k, v, causal=True)
    return y if value_dim == wide else y[..., :value_dim]


def self_attention(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    config: AttentionConfig,
    *,
    rope: tuple[Tensor, Tensor] | None,
    stream: P,
    axis: str = "tp",
    core: Callable = causal_attention,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "batch seq embed"]:
    """Causal self-attention over the stream, with the heads split over `axis`.

    Args:
        params: this rank's part of `attention_defs`.
        x: ``[batch, seq, embed]`` with spec `stream`.
        rope: tables of `rope_table` for the tokens of all ranks of `axis` together, or None without
            rotary positions. Where they are of fewer dims than a head has, its first are rotated.
        stream: the spec of x and of the result.
        core: computes softmax(q k^T) v as `causal_attention` does, of this rank's heads; for
            example `context_attention`, where axes of the mesh split the sequence, or where there
            are sinks, which it is given as ``sinks=``.
        kernels: of ``"qk_norm_rope"`` and ``"rms_norm"``.

    Returns:
        ``[batch, seq, embed]`` with spec `stream`. Collectives: one all-reduce of the result's
        bytes forward and one backward; with a split sequence, all-gather and reduce-scatter each.
        With `qk_norm_across`, two all-reduces of one number per token besides, in either direction.
    """
    x = gather_sequence(x, stream, axis)
    q, k, v = (column_parallel(x, *weights(params[n])) for n in ("q", "k", "v"))
    if config.clip:
        q, k, v = (y.clamp(-config.clip, config.clip) for y in (q, k, v))
    q, k = _placed(params, q, k, config, rope, kernels, axis)
    if config.scale:  # what computes scores divides them by the root of their width
        q = q * (config.scale * math.sqrt(config.head_dim))
    k, v = (_own_heads(y, q.shape[-2], config, axis) for y in (k, v))
    y = core(q, k, v, sinks=params["sinks"]) if config.sinks else core(q, k, v)
    if config.gate:
        y = y * torch.sigmoid(column_parallel(x, *weights(params["gate"])))
    return row_parallel(y, *weights(params["out"]), stream=stream, axis=axis)


def _placed(
    params: dict,
    q: Tensor,
    k: Tensor,
    config: AttentionConfig,
    rope: tuple[Tensor, Tensor] | None,
    kernels: Kernels,
    axis: str,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalised and rotated."""
    eps, zero_centered = config.norm_eps, config.zero_centered_norm
    whole = rope is not None and 2 * rope[0].shape[-1] == config.head_dim
    at_once = whole and not config.qk_norm_across
    if rope is not None and at_once and kernels.takes("qk_norm_rope", q, k, *rope):
        scales = [params[n]["scale"] if config.qk_norm else None for n in ("q_norm", "k_norm")]
        return QK_NORM_ROPE(q, k, *scales, *rope, eps, zero_centered, config.interleaved)
    if config.qk_norm_across:
        q = _norm_across(params["q_norm"], q, config.num_heads, config, axis)
        k = _norm_across(params["k_norm"], k, config.num_kv_heads, config, axis)
    elif config.qk_norm:
        settings = {"eps": eps, "zero_centered": zero_centered, "kernels": kernels}
        q, k = norm(params["q_norm"], q, **settings), norm(params["k_norm"], k, **settings)
    if rope is not None:
        q, k = (_rotated(x, rope, config.interleaved, kernels) for x in (q, k))
    return q, k


def _rotated(x: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool, kernels: Kernels) -> Tensor:
    """Heads whose first dims are rotated, as many as there are angles for."""
    size = 2 * rope[0].shape[-1]
    first = apply_rope(x[..., :size], rope, interleaved=interleaved, kernels=kernels)
    return first if size == x.shape[-1] else torch.cat([first, x[..., size:]], -1)


def _norm_across(
    params: dict, x: Tensor, num_heads: int, config: AttentionConfig, axis: str
) -> Tensor:
    """RMSNorm over the dims of all heads, of which this rank may have a part."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, scale = x.to(wide), params["scale"].to(wide)
    squares = y.square().sum((-2, -1), keepdim=True)
    if x.shape[-2] < num_heads:
        squares = lax.psum(squares, axis)
    y = y * torch.rsqrt(squares / (num_heads * config.head_dim) + config.norm_eps)
    return (y * (1 + scale if config.zero_centered_norm else scale)).to(x.dtype)


def _own_heads(x: Tensor, num_local: int, config: AttentionConfig, axis: str) -> Tensor:
    """The heads of keys or values that this rank's `num_local` query heads use."""
    group = config.num_heads // config.num_kv_heads
    if x.shape[-2] * group == num_local:
        return x
    # fewer key heads than ranks: every rank holds all of them and takes the one of its queries,
    # by a mask, since Inductor compiles the gradient of such an index wrongly (see `own_part`)
    head = lax.global_index(num_local, axis, device=x.device)[:1] // group
    own = (torch.arange(x.shape[-2], device=x.device) == head).unsqueeze(-1)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(own, x, zero).sum(-2, keepdim=True, dtype=x.dtype)
