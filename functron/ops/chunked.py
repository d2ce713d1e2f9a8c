"""One attention block with its logsumexp, for any mask, in pieces that bound its memory.

The formula of `functron.ops.flash` in plain operations: masks by document and by window that may
differ between ranks, every dtype and device, and derivatives of every order. Scores exist for one
chunk of queries and one chunk of keys at a time (online softmax: Milakov & Gimelshein 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from functron.typing import Bool, Float, Int, Tensor

CHUNK = 512
"""Queries and keys of one chunk; scores take batch * heads * CHUNK ** 2 numbers."""


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys a query may see, besides causality by place: a test of integers per pair.

    A key is visible if it is of the query's segment and, with a window, at most window - 1
    positions before it. Each is ``[batch or 1, seq]``, or None where it is not tested.

    Attributes:
        query_segments: document numbers of the queries.
        key_segments: of the keys.
        query_positions: positions of the queries; needed with a window only.
        key_positions: of the keys.
        window: how many keys a query sees at most, itself included; 0 for all. An int, or an
            integer scalar tensor.
        apart: at least so many positions lie between a query and the key of its number, on every
            rank; with an int for a window, chunks out of reach are not computed. None: not known.
    """

    query_segments: Int[Tensor, "_ seq"] | None = None
    key_segments: Int[Tensor, "_ keys"] | None = None
    query_positions: Int[Tensor, "_ seq"] | None = None
    key_positions: Int[Tensor, "_ keys"] | None = None
    window: int | Int[Tensor, ""] = 0
    apart: int | None = None

    def reaches(self, rows: slice, columns: slice) -> bool:
        """Whether some of these queries may see some of these keys."""
        if self.apart is None or isinstance(self.window, Tensor) or not self.window:
            return True
        return self.apart + rows.start - (columns.stop - 1) < self.window

    def chunk(self, rows: slice, columns: slice) -> Bool[Tensor, "_ rows columns"] | None:
        """The test for a chunk of queries and of keys; None where all pass."""
        passed = None
        if self.query_segments is not None and self.key_segments is not None:
            passed = self.query_segments[:, rows, None] == self.key_segments[:, None, columns]
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


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def _scores(q: Tensor, k: Tensor, rows: slice, columns: slice, mask: _Mask, scale: float) -> Tensor:
    """Masked scores ``[batch, kv_heads, group * rows, columns]`` of a chunk, float32 at least."""
    s = upcast(q[..., rows, :].flatten(2, 3) @ k[..., columns, :].mT) * scale
    hidden = mask.hidden(rows, columns)
    if hidden is None:
        return s
    split = s.unflatten(2, (q.shape[2], -1))
    return split.masked_fill(hidden, float("-inf")).flatten(2, 3)


@dataclass(frozen=True, eq=False)
class _Mask:
    visible: Visible | None
    causal: bool
    device: torch.device

    def past(self, rows: slice, size: int) -> Iterator[slice]:
        """The chunks of keys that some of these queries may see."""
        for columns in slices(size):
            later = self.causal and columns.start >= rows.stop
            if not later and (self.visible is None or self.visible.reaches(rows, columns)):
                yield columns

    def hidden(self, rows: slice, columns: slice) -> Tensor | None:
        """What is masked, ``[batch or 1, 1, 1, rows, columns]``; None where nothing is."""
        seen = None if self.visible is None else self.visible.chunk(rows, columns)
        hidden = None if seen is None else ~seen
        if self.causal and columns.stop - 1 > rows.start:
            queries = torch.arange(rows.start, rows.stop, device=self.device)
            keys = torch.arange(columns.start, columns.stop, device=self.device)
            later = (keys[None, :] > queries[:, None])[None]
            hidden = later if hidden is None else hidden | later
        return None if hidden is None else hidden[:, None, None]


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """``[batch, heads, ...]`` as ``[batch, kv_heads, group, ...]``."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def block(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    visible: Visible | None,
    causal: bool,
    scale: float,
) -> tuple[Float[Tensor, "batch heads seq value_dim"], Float[Tensor, "batch heads seq"]]:
    """`functron.ops.flash.block` in plain operations; memory grows with CHUNK squared."""
    q5 = _grouped(q, k.shape[1])
    mask = _Mask(visible, causal, q.device)
    outs, sums = [], []
    for rows in slices(q.shape[2]):
        total: tuple[Tensor, Tensor] | None = None
        for columns in mask.past(rows, k.shape[2]):
            part = _softmax(_scores(q5, k, rows, columns, mask, scale), v[..., columns, :])
            total = part if total is None else merge(*total, *part)
        if total is None:
            empty = upcast(q5[..., rows, :].flatten(2, 3))
            out = torch.zeros_like(empty[..., :1]).expand(*empty.shape[:-1], v.shape[-1])
            total = out, torch.full_like(empty[..., 0], float("-inf"))
        outs.append(total[0].unflatten(2, (q5.shape[2], -1)))
        sums.append(total[1].unflatten(2, (q5.shape[2], -1)))
    out, lse = torch.cat(outs, 3).flatten(1, 2), torch.cat(sums, 3).flatten(1, 2)
    return out.to(q.dtype), lse


def _softmax(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(scores) v and the logsumexp; 0 and -inf in rows that are all -inf."""
    top = _finite(scores.amax(-1, keepdim=True).detach())
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    positive = torch.where(total == 0, 1, total)
    out = upcast(weights.to(v.dtype) @ v) / positive
    lse = torch.where(total == 0, float("-inf"), top + positive.log())
    return out, lse.squeeze(-1)


def _finite(x: Tensor) -> Tensor:
    """`x` with 0 for -inf, so that differences with it are no nan."""
    return torch.where(x == float("-inf"), 0, x)


def merge(
    out1: Float[Tensor, "*batch seq value_dim"],
    lse1: Float[Tensor, "*batch seq"],
    out2: Float[Tensor, "*batch seq value_dim"],
    lse2: Float[Tensor, "*batch seq"],
) -> tuple[Float[Tensor, "*batch seq value_dim"], Float[Tensor, "*batch seq"]]:
    """The attention over two sets of keys, from that over each: float32 at least.

    lse = log(exp(lse1) + exp(lse2)), out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse). A set of
    which a row sees nothing has lse -inf and counts nothing, and if both are so the result is
    -inf and 0; there is no nan in derivatives of any order. No collectives.
    """
    top = _finite(torch.maximum(lse1, lse2).detach())
    first, second = (lse1 - top).exp(), (lse2 - top).exp()
    total = first + second
    positive = torch.where(total == 0, 1, total)
    lse = torch.where(total == 0, float("-inf"), top + positive.log())
    first, second = first / positive, second / positive
    out = upcast(out1) * first.unsqueeze(-1) + upcast(out2) * second.unsqueeze(-1)
    return out, lse


def block_backward(
    cotangent: Float[Tensor, "batch heads seq value_dim"],
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    out: Float[Tensor, "batch heads seq value_dim"],
    lse: Float[Tensor, "batch heads seq"],
    visible: Visible | None,
    causal: bool,
    scale: float,
) -> tuple[
    Float[Tensor, "batch heads seq head_dim"],
    Float[Tensor, "batch kv_heads keys head_dim"],
    Float[Tensor, "batch kv_heads keys value_dim"],
]:
    """`functron.ops.flash.block_backward` in plain operations; memory grows with CHUNK squared.

    P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K, dK = scale
    dS^T Q, all of these summed over the queries that share a key head (Dao et al. 2022, section
    B.2).
    """
    mask = _Mask(visible, causal, q.device)
    delta = (upcast(cotangent) * upcast(out)).sum(-1)
    q5, cotangent5, lse4, delta4 = (
        _grouped(x, k.shape[1]) for x in (q, cotangent, _finite(lse), delta)
    )
    dk: dict[int, Tensor] = {}
    dv: dict[int, Tensor] = {}
    dq: list[Tensor] = []
    for rows in slices(q.shape[2]):
        queries, given = (x[..., rows, :].flatten(2, 3) for x in (q5, cotangent5))
        row_lse, row_delta = (x[..., rows].flatten(2, 3).unsqueeze(-1) for x in (lse4, delta4))
        total = None
        for columns in mask.past(rows, k.shape[2]):
            keys, values = k[..., columns, :], v[..., columns, :]
            p = (_scores(q5, k, rows, columns, mask, scale) - row_lse).exp()
            ds = (p * (upcast(given @ values.mT) - row_delta) * scale).to(q.dtype)
            total = _add(total, ds @ keys)
            at = columns.start
            dk[at] = _add(dk.get(at), ds.mT @ queries)
            dv[at] = _add(dv.get(at), p.to(v.dtype).mT @ given)
        if total is None:
            total = torch.zeros_like(upcast(queries))
        dq.append(total.unflatten(2, (q5.shape[2], -1)))
    return (
        torch.cat(dq, 3).flatten(1, 2).to(q.dtype),
        _joined(dk, k),
        _joined(dv, v),
    )


def _joined(parts: dict[int, Tensor], like: Tensor) -> Tensor:
    """The chunks by their starts, joined; zeros where there is none."""
    chunks = [
        parts[c.start].to(like.dtype) if c.start in parts else torch.zeros_like(like[..., c, :])
        for c in slices(like.shape[2])
    ]
    return torch.cat(chunks, 2)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    part = upcast(part)
    return part if total is None else total + part
