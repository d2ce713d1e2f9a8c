"""Attention that is not causal over whole sequences: cached, masked, biased, and across sequences.

`cached_attention` reads keys and values of earlier tokens, which makes generation linear in its
length. `masked_attention` has padding masks and learned biases on scores, and `cross_attention` is
of one sequence to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from functron.core import compat
from functron.core.typing import Bool, Float, Int, Tensor
from functron.nn.attention import AttentionConfig
from functron.nn.layers import column_parallel, gather_sequence, row_parallel, weights
from functron.ops.attention import attention, block, block_backward
from functron.ops.chunked_attention import Visible, attend
from functron.ops.operations import upcast
from functron.spmd.spec import P
from functron.transforms.custom_vjp import custom_vjp

_SEQ, _HEADS = 1, 2


class KVCache(NamedTuple):
    """The keys and values of one layer, this rank's heads.

    Attributes:
        k: ``[batch, length, kv_heads, head_dim]``, rotated; row p is that of the token at place p.
        v: ``[batch, length, kv_heads, value_dim]``.
    """

    k: Tensor
    v: Tensor


def empty_cache(
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads value_dim"],
    length: int,
) -> KVCache:
    """A cache with room for `length` tokens, like these keys and values; it holds zeros."""

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros_like(x[:, :1]).expand(-1, length, -1, -1)

    return KVCache(zeros(k), zeros(v))


def written(
    cache: KVCache,
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads value_dim"],
    places: Int[Tensor, "batch seq"],
) -> KVCache:
    """The cache with new keys and values at their places, distinct within a row; others stay."""

    def put(kept: Tensor, new: Tensor) -> Tensor:
        at = places[..., None, None].expand(new.shape)
        return kept.scatter(_SEQ, at, new.to(kept.dtype))

    return KVCache(put(cache.k, k), put(cache.v, v))


def cached_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    cache: KVCache,
    places: Int[Tensor, "batch seq"],
    *,
    window: int | Int[Tensor, ""] = 0,
    sinks: Float[Tensor, " heads"] | None = None,
    cap: float = 0.0,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v over the kept keys, each query seeing those up to its own.

    Args:
        q: ``[batch, seq, heads, head_dim]``, few of them: scores of all are in memory at once.
        cache: with the keys of these tokens in it already.
        places: int64 ``[batch, seq]``, those of the queries.
        window: how many keys a query sees at most, itself included; 0 for all.
        sinks: ``[heads]`` logits that join the softmax's denominator only.
        cap: scores s are cap tanh(s / cap); 0: as they are.

    Returns:
        ``[batch, seq, heads, value_dim]`` in q's dtype. No collectives.
    """
    keys = torch.arange(cache.k.shape[_SEQ], device=q.device)
    distance = places.unsqueeze(-1) - keys
    seen = distance >= 0
    if isinstance(window, Tensor):
        seen = seen & ((distance < window) | (window == 0))
    elif window:
        seen = seen & (distance < window)
    q, k, v = (x.transpose(_SEQ, _HEADS) for x in (q, cache.k, cache.v))
    out, lse = attend(q, k, v, ~seen.unsqueeze(1), 1 / math.sqrt(q.shape[-1]), cap=cap)
    if sinks is not None:
        share = torch.sigmoid(lse - upcast(sinks).unsqueeze(-1))
        out = out * share.unsqueeze(-1)
    return out.to(q.dtype).transpose(_SEQ, _HEADS)


def masked_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    k: Float[Tensor, "batch keys heads head_dim"],
    v: Float[Tensor, "batch keys heads head_dim"],
    *,
    seen: Bool[Tensor, "_ keys"] | None = None,
    bias: Float[Tensor, "heads seq keys"] | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "batch seq heads head_dim"]:
    """softmax(scale q k^T + bias) v over the keys that are seen.

    A `core` for `nn.self_attention` and `cross_attention`. Without a bias, torch's flash kernels
    compute it where `functron.ops.attention` has them; with one, whole matrices of scores exist.

    Args:
        q: ``[batch, seq, heads, head_dim]``.
        k: ``[batch, keys, heads, head_dim]``.
        v: as `k`.
        seen: ``[batch or 1, keys]``, False where a key is padding; None: all are seen. A query that
            sees no key gets zeros.
        bias: ``[heads, seq, keys]``, added to the scores; differentiated.
        causal: each query sees keys up to its own place only.
        scale: of the scores; None for 1 / sqrt(head_dim).

    Returns:
        ``[batch, seq, heads, head_dim]`` in q's dtype. No collectives.
    """
    if bias is None and seen is None and scale is None:
        return attention(q, k, v, causal=causal)
    q, k, v = (x.transpose(_SEQ, _HEADS) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if bias is None:
        y = _block(q, k, v, seen, causal, scale)
    else:
        y = _attend_with_bias(q, k, v, seen, bias, causal, scale)
    return y.transpose(_SEQ, _HEADS)


def _block(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """By kernels; with their backward, which knows what to do where a query sees nothing."""
    options: dict[str, Any] = {"causal": causal, "scale": scale}

    def forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None):
        out, lse = block(q, k, v, _visible(q, seen), **options)
        return out, (q, k, v, seen, out, lse)

    def backward(kept: tuple, cotangent: Tensor):
        q, k, v, seen, out, lse = kept
        return *block_backward(cotangent, q, k, v, out, lse, _visible(q, seen), **options), None

    return custom_vjp(lambda *args: forward(*args)[0], forward, backward)(q, k, v, seen)


def _visible(q: Tensor, seen: Tensor | None) -> Visible | None:
    if seen is None:
        return None
    queries = torch.zeros(1, q.shape[2], dtype=torch.int32, device=q.device)
    return Visible(query_segments=queries, key_segments=(~seen).to(torch.int32))


def _attend_with_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    bias: Tensor,
    causal: bool,
    scale: float,
) -> Tensor:
    """The formula, with scores and softmax in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(wide) * scale + bias.to(wide)
    lowest = torch.finfo(wide).min  # not -inf, so that rows that see nothing have derivatives
    hidden = None if seen is None else ~seen[:, None, None, :]
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        hidden = later if hidden is None else hidden | later
    if hidden is not None:
        scores = scores.masked_fill(hidden, lowest)
    p = torch.softmax(scores, -1)
    if hidden is not None:
        p = p.masked_fill(hidden, 0)
    return p.to(v.dtype) @ v


def cross_keys(params: dict, memory: Float[Tensor, "batch keys embed"]) -> KVCache:
    """The keys and values that `cross_attention` makes of a memory: to be kept, if read often.

    Args:
        params: as in `cross_attention`.
        memory: ``[batch, keys, embed]``, whole on every rank that splits heads.

    Returns:
        ``[batch, keys, heads, head_dim]`` each, of this rank's heads. No collectives.
    """
    return KVCache(*(column_parallel(memory, *weights(params[n])) for n in ("k", "v")))


def cross_attention(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    memory: Float[Tensor, "batch keys embed"] | KVCache,
    config: AttentionConfig,
    *,
    stream: P,
    axis: str = "tp",
    core: Callable = masked_attention,
) -> Float[Tensor, "batch seq embed"]:
    """Attention of one sequence to another, with the heads split over `axis`.

    Args:
        params: this rank's part of `nn.attention_defs`, with as many key heads as query heads.
        x: ``[batch, seq, embed]`` with spec `stream`: what queries are made of.
        memory: ``[batch, keys, embed]``, whole on every rank of `axis`: keys and values; or these
            themselves, as `cross_keys` makes them.
        stream: the spec of x and of the result.
        core: computes softmax(q k^T) v; for example `masked_attention` with a mask.

    Returns:
        ``[batch, seq, embed]`` with spec `stream`. Collectives: as `nn.self_attention`.

    Raises:
        ValueError: the config has grouped heads, norms of queries, or sinks.
    """
    if config.kv_heads != config.num_heads or config.qk_norm or config.sinks:
        raise ValueError(
            f"cross_attention: got {config}; wanted a key head per query head, without qk_norm and "
            "sinks; set num_kv_heads=num_heads and leave these out"
        )
    x = gather_sequence(x, stream, axis)
    q = column_parallel(x, *weights(params["q"]))
    kept = memory if isinstance(memory, KVCache) else cross_keys(params, memory)
    return row_parallel(core(q, *kept), *weights(params["out"]), stream=stream, axis=axis)


def relative_buckets(
    queries: int,
    keys: int,
    *,
    num_buckets: int,
    max_distance: int,
    bidirectional: bool,
    first: int | Int[Tensor, ""] = 0,
    device: torch.device | str | None = None,
) -> Int[Tensor, "queries keys"]:
    """The bucket of each query's distance to each key (Raffel et al. 2020, section 2.1).

    Half the buckets are for one distance each, the others for ranges that grow geometrically up to
    `max_distance`, beyond which all is one. Between distance e, the number of the first ones, and
    M = `max_distance` the bucket of distance d is ``e + floor((n - e) log(d / e) / log(M / e))``,
    computed in integers. If `bidirectional`, keys after the query have buckets of their own, half
    of all; else they count as at distance 0. The first query is at the place of key `first`.

    Returns:
        int64 ``[queries, keys]`` in ``[0, num_buckets)``.
    """
    places = torch.arange(queries, device=device) + first
    ahead = torch.arange(keys, device=device) - places[:, None]
    count = num_buckets // 2 if bidirectional else num_buckets
    distance = ahead.abs() if bidirectional else (-ahead).clamp(min=0)
    exact = count // 2
    starts = compat.constant(_starts(exact, count - exact, max_distance), places.device)
    far = exact + torch.bucketize(distance, starts, right=True)
    bucket = torch.where(distance < exact, distance, far)
    return bucket + (ahead > 0) * count if bidirectional else bucket


def _starts(exact: int, ranges: int, max_distance: int) -> list[int]:
    """The first distance of each range but the first: least d with d^n >= M^k e^(n - k)."""
    starts, distance = [], exact
    for k in range(1, ranges):
        least = max_distance**k * exact ** (ranges - k)
        while distance**ranges < least:
            distance += 1
        starts.append(distance)
    return starts


def relative_bias(
    table: Float[Tensor, "buckets heads"], buckets: Int[Tensor, "queries keys"]
) -> Float[Tensor, "heads queries keys"]:
    """T5's biases on scores: a number per bucket and head, of this rank's heads."""
    return F.embedding(buckets, table).permute(2, 0, 1).contiguous()
