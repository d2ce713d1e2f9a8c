"""Attention to keys and values that are kept: what makes generation linear in its length."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from functron.ops import chunked
from functron.typing import Float, Int, Tensor

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
    out, lse = chunked.attend(q, k, v, ~seen.unsqueeze(1), 1 / math.sqrt(q.shape[-1]), cap=cap)
    if sinks is not None:
        share = torch.sigmoid(lse - chunked.upcast(sinks).unsqueeze(-1))
        out = out * share.unsqueeze(-1)
    return out.to(q.dtype).transpose(_SEQ, _HEADS)
