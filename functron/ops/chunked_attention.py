"""Attention in chunks of queries and keys: for every device, dtype and mask.

Document and window masks, which may differ between ranks, and scores exist for one chunk of queries
and keys at a time (online softmax: Milakov & Gimelshein 2018). Chunks without a visible pair are
left out where that is known before they are computed. A chunk is computed by `attend`, the
formula in plain operations with derivatives of every order, or by a function of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from functron.core import compat
from functron.core.scopes import in_phase
from functron.core.typing import Bool, Float, Int, Tensor
from functron.ops.operations import AUTO, Kernels, upcast
from functron.ops.softmax import (
    SOFTMAX,
    SOFTMAX_,
    SOFTMAX_BLOCK_BACKWARD,
    SOFTMAX_BLOCK_BACKWARD_,
    finite,
    merge,
)
from functron.program.recorder import active

BlockResult = tuple[
    Float[Tensor, "batch heads seq value_dim"],
    Float[Tensor, "batch heads seq"],
]
"""The attention to a block of keys, and the logsumexp of the scores."""

BlockCotangents = tuple[
    Float[Tensor, "batch heads seq head_dim"],
    Float[Tensor, "batch kv_heads keys head_dim"],
    Float[Tensor, "batch kv_heads keys value_dim"],
]
"""A block's parts of the cotangents of q, k and v."""

CHUNK = 512
"""Queries and keys of one chunk; scores take batch * heads * CHUNK ** 2 numbers."""


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys a query may see, besides causality in the block: integer tests per pair.

    A key is visible if it is in the query's segment and, with a window, at most window - 1
    positions before it. Each field is ``[batch or 1, seq]``, or None where it is not tested; or
    `pairs` says it for each pair.

    Attributes:
        query_segments, key_segments: document numbers of queries and keys.
        query_positions, key_positions: positions of queries and keys; needed with a window only.
        window: number of keys a query sees at most, itself included; 0 for all. An int, or an
            integer scalar tensor.
        apart: a lower bound of the distance between a query and the key of the same index, on every
            rank; with an int window, chunks out of reach are skipped. None: not known.
        pairs: whether each key is visible to each query; None: all pairs that pass the tests.
    """

    query_segments: Int[Tensor, "_ seq"] | None = None
    key_segments: Int[Tensor, "_ keys"] | None = None
    query_positions: Int[Tensor, "_ seq"] | None = None
    key_positions: Int[Tensor, "_ keys"] | None = None
    window: int | Int[Tensor, ""] = 0
    apart: int | None = None
    pairs: Bool[Tensor, "_ seq keys"] | None = None

    def reaches(self, rows: slice, columns: slice) -> bool:
        """Whether some of these queries may see some of these keys."""
        if self.apart is None or isinstance(self.window, Tensor) or not self.window:
            return True
        return self.apart + rows.start - (columns.stop - 1) < self.window

    def chunk(self, rows: slice, columns: slice) -> Bool[Tensor, "_ rows columns"] | None:
        """The test for a chunk of queries and of keys; None where all pass."""
        passed = None if self.pairs is None else self.pairs[:, rows, columns]
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[:, rows, None] == self.key_segments[:, None, columns]
            passed = same if passed is None else passed & same
        if self.query_positions is None or self.key_positions is None:
            return passed
        distance = self.query_positions[:, rows, None] - self.key_positions[:, None, columns]
        near = distance < self.window
        if isinstance(self.window, Tensor):
            near = near | (self.window == 0)
        return near if passed is None else passed & near


def slices(size: int) -> Iterator[slice]:
    """The chunks of a dim."""
    return (slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))


@dataclass(frozen=True, eq=False)
class _ChunkMask:
    visible: Visible | None
    causal: bool
    device: torch.device

    def past(self, rows: slice, size: int) -> Iterator[slice]:
        """The chunks of keys that some of these queries may see."""
        for columns in slices(size):
            later = self.causal and columns.start >= rows.stop
            if not later and (self.visible is None or self.visible.reaches(rows, columns)):
                yield columns

    def needed(self, rows: slice, size: int) -> Iterator[tuple[slice, Tensor | None]]:
        """These chunks, each with its masked pairs, without those where all are masked.

        As far as that is known: on CPUs, where to ask costs nothing, and neither in programs that
        are traced or differentiated, nor between simulated ranks.
        """
        for columns in self.past(rows, size):
            hidden = self.hidden(rows, columns)
            if hidden is None or self.visible is None or not _hides_all(hidden):
                yield columns, hidden

    def hidden(self, rows: slice, columns: slice) -> Tensor | None:
        """The masked pairs, ``[batch or 1, 1, rows, columns]``; None where there are none."""
        seen = None if self.visible is None else self.visible.chunk(rows, columns)
        hidden = None if seen is None else ~seen
        if self.causal and columns.stop - 1 > rows.start:
            queries = torch.arange(rows.start, rows.stop, device=self.device)
            keys = torch.arange(columns.start, columns.stop, device=self.device)
            later = (keys[None, :] > queries[:, None])[None]
            hidden = later if hidden is None else hidden | later
        return None if hidden is None else hidden[:, None]


def _hides_all(hidden: Tensor) -> bool:
    """Whether a mask hides every pair; False where the host cannot ask, or would wait."""
    if hidden.device.type != "cpu" or active() is not None or torch.compiler.is_compiling():
        return False
    # where derivatives are taken of this, all ranks need the same chunks: their collectives
    return compat.unobserved() and bool(hidden.all())


def _fold_groups(x: Tensor, kv_heads: int) -> Tensor:
    """``[batch, heads, rows, ...]`` as ``[batch, kv_heads, group * rows, ...]``."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads)).flatten(2, 3)


def _unfold_groups(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_fold_groups`."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def _scores(
    q: Tensor, k: Tensor, hidden: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor | None]:
    """Masked scores ``[batch, kv_heads, group * rows, columns]``, float32 at least.

    And the derivative of capping, 1 - (s / cap)^2; None where nothing is capped.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    s, slope = upcast(_fold_groups(q, kv_heads) @ k.mT) * scale, None
    if cap:
        bent = torch.tanh(s / cap)
        s, slope = bent * cap, 1 - bent.square()
    if hidden is not None:
        s = _fold_groups(_unfold_groups(s, heads).masked_fill(hidden, float("-inf")), kv_heads)
    return s, slope


def attend(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    hidden: Bool[Tensor, "#batch 1 seq keys"] | None,
    scale: float,
    kernels: Kernels = AUTO,
    cap: float = 0.0,
) -> BlockResult:
    """softmax(scale q k^T) v without the keys that are `hidden`, and the logsumexp.

    The whole score matrix at once; softmax by the op ``"softmax"`` where `kernels` takes it. Both
    float32 at least; 0 and -inf in rows that see no key. A `cap` other than 0 makes scores s cap
    tanh(s / cap) (Gemma 2), which no kernel computes.
    """
    if not cap and kernels.takes("softmax", q, k, v):
        s = _unfold_groups(_fold_groups(q, k.shape[1]) @ k.mT, q.shape[1])
        if compat.unobserved():
            weights, lse = s, SOFTMAX_(s, scale, hidden, False, None)
        else:
            weights, lse = SOFTMAX(s, scale, hidden, False, None)
        out = upcast(_fold_groups(weights, k.shape[1]) @ v)
        return _unfold_groups(out, q.shape[1]), lse
    scores, _ = _scores(q, k, hidden, scale, cap)
    top = finite(scores.amax(-1, keepdim=True).detach())
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    positive = torch.where(total == 0, 1, total)
    out = upcast(weights.to(v.dtype) @ v) / positive
    lse = torch.where(total == 0, float("-inf"), top + positive.log())
    return _unfold_groups(out, q.shape[1]), _unfold_groups(lse.squeeze(-1), q.shape[1])


def attend_backward(
    cotangent: Float[Tensor, "batch heads seq value_dim"],
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    out: Float[Tensor, "batch heads seq value_dim"],
    lse: Float[Tensor, "batch heads seq"],
    hidden: Bool[Tensor, "#batch 1 seq keys"] | None,
    scale: float,
    kernels: Kernels = AUTO,
    cap: float = 0.0,
) -> BlockCotangents:
    """The cotangents of q, k and v, from the result and the logsumexp over all keys.

    P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K, dK = scale
    dS^T Q, all of these summed over the queries that share a key head (Dao et al. 2022, section
    B.2). All float32 at least. With a `cap`, dS is multiplied by 1 - (S / cap)^2 besides.
    """
    delta = (upcast(cotangent) * upcast(out)).sum(-1)
    if not cap and kernels.takes("softmax", q, k, v):
        return _backward_by_op(cotangent, q, k, v, delta, lse, hidden, scale)
    lse, delta = (_fold_groups(x, k.shape[1]).unsqueeze(-1) for x in (finite(lse), delta))
    queries, given = (_fold_groups(x, k.shape[1]) for x in (q, cotangent))
    with in_phase("recompute"):
        scores, slope = _scores(q, k, hidden, scale, cap)
    p = (scores - lse).exp()
    ds = p * (upcast(given @ v.mT) - delta) * scale
    ds = (ds if slope is None else ds * slope).to(q.dtype)
    dv = p.to(v.dtype).mT @ given
    return _unfold_groups(upcast(ds @ k), q.shape[1]), upcast(ds.mT @ queries), upcast(dv)


def _backward_by_op(cotangent, q, k, v, delta, lse, hidden, scale) -> BlockCotangents:
    """`attend_backward` by the op ``"softmax"``, from delta = rowsum(dO O)."""
    heads, kv_heads = q.shape[1], k.shape[1]
    queries, given = _fold_groups(q, kv_heads), _fold_groups(cotangent.to(v.dtype), kv_heads)
    with in_phase("recompute"):
        s = _unfold_groups(queries @ k.mT, heads)
    dp = _unfold_groups(given @ v.mT, heads)
    if compat.unobserved():
        SOFTMAX_BLOCK_BACKWARD_(s, dp, lse, delta, scale, hidden, False)
        p, ds = s, dp
    else:
        p, ds = SOFTMAX_BLOCK_BACKWARD(s, dp, lse, delta, scale, hidden, False)
    p, ds = (_fold_groups(x, kv_heads) for x in (p, ds))
    return _unfold_groups(upcast(ds @ k), heads), upcast(ds.mT @ queries), upcast(p.mT @ given)


def chunked_block(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    visible: Visible | None,
    causal: bool,
    scale: float,
    fn: Callable = attend,
    kernels: Kernels = AUTO,
) -> BlockResult:
    """`block`, every chunk by `fn`, which is as `attend`.

    Memory grows with CHUNK squared. `kernels` is that of merges; that of `fn` is its own.
    """
    mask = _ChunkMask(visible, causal, q.device)
    outs, sums = [], []
    for rows in slices(q.shape[2]):
        mine = q[..., rows, :]
        total: tuple[Tensor, Tensor] | None = None
        for columns, hidden in mask.needed(rows, k.shape[2]):
            there = k[..., columns, :], v[..., columns, :]
            part = fn(mine, *there, hidden, scale)
            total = part if total is None else merge(*total, *part, kernels=kernels)
        if total is None:
            nothing = torch.zeros_like(upcast(mine[..., :1]))
            out = nothing.expand(*mine.shape[:-1], v.shape[-1])
            total = out, torch.full_like(nothing[..., 0], float("-inf"))
        outs.append(total[0].to(q.dtype))
        sums.append(total[1])
    return torch.cat(outs, 2), torch.cat(sums, 2)


def chunked_block_backward(
    cotangent: Float[Tensor, "batch heads seq value_dim"],
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    out: Float[Tensor, "batch heads seq value_dim"],
    lse: Float[Tensor, "batch heads seq"],
    visible: Visible | None,
    causal: bool,
    scale: float,
    fn: Callable = attend_backward,
) -> BlockCotangents:
    """`block_backward`, every chunk by `fn`, which is as `attend_backward`."""
    mask = _ChunkMask(visible, causal, q.device)
    sums: tuple[dict[int, Tensor], ...] = ({}, {}, {})
    for rows in slices(q.shape[2]):
        given, mine, out_mine = (x[..., rows, :] for x in (cotangent, q, out))
        for columns, hidden in mask.needed(rows, k.shape[2]):
            there = k[..., columns, :], v[..., columns, :]
            moved = fn(given, mine, *there, out_mine, lse[..., rows], hidden, scale)
            places = (rows.start, columns.start, columns.start)
            for total, at, part in zip(sums, places, moved, strict=True):
                total[at] = upcast(part) + total[at] if at in total else upcast(part)
    dq, dk, dv = (_join_chunks(*row) for row in zip(sums, (q, k, v), strict=True))
    return dq, dk, dv


def _join_chunks(parts: dict[int, Tensor], like: Tensor) -> Tensor:
    """The chunks by their starts, joined; zeros where there is none."""
    chunks = [
        parts[c.start].to(like.dtype) if c.start in parts else torch.zeros_like(like[..., c, :])
        for c in slices(like.shape[2])
    ]
    return torch.cat(chunks, 2)
