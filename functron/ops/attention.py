"""Scaled dot-product attention that torch.func can map and differentiate at the speed of SDPA.

O = softmax(Q K^T / sqrt(d) + causal mask) V (Vaswani et al. 2017, eq. 1; computed as in Dao 2023).
Under plain autograd `attention` is `torch.nn.functional.scaled_dot_product_attention`, which picks
the device's best kernel. Under torch.func transforms SDPA has no batching rule and would run one
call per rank; there it is `block`, whose autograd Functions call torch's flash kernels with
simulated ranks folded into the batch dim: on the CPU all, masked ones in chunks; on CUDA in half
precision those without masks. Others are the formula.

Attention over keys that are split into blocks is computed block by block: every block gives its own
softmax and its logsumexp, `functron.ops.softmax.merge` joins two of them, and `block_backward`
takes the logsumexp of the whole, which makes each block's cotangents exact without the others (Liu
et al. 2023, ring attention; Dao et al. 2022).

Masks by document and by window, which may differ between ranks, exist for one chunk of queries and
one chunk of keys at a time, and so do scores (online softmax: Milakov & Gimelshein 2018). A chunk
is computed by a kernel, or by `attend`, the formula in plain operations for every dtype and device,
with derivatives of every order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from functron.core import compat
from functron.core.compat import Function
from functron.core.scopes import in_phase
from functron.core.typing import Bool, Float, Int, Tensor
from functron.ops.define import AUTO, Kernels
from functron.ops.softmax import (
    SOFTMAX,
    SOFTMAX_,
    SOFTMAX_BLOCK_BACKWARD,
    SOFTMAX_BLOCK_BACKWARD_,
    finite,
    merge,
    upcast,
)
from functron.program.recorder import active

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
        """The masked pairs, ``[batch or 1, 1, rows, columns]``; None where there are none."""
        seen = None if self.visible is None else self.visible.chunk(rows, columns)
        hidden = None if seen is None else ~seen
        if self.causal and columns.stop - 1 > rows.start:
            queries = torch.arange(rows.start, rows.stop, device=self.device)
            keys = torch.arange(columns.start, columns.stop, device=self.device)
            later = (keys[None, :] > queries[:, None])[None]
            hidden = later if hidden is None else hidden | later
        return None if hidden is None else hidden[:, None]


def _folded(x: Tensor, kv_heads: int) -> Tensor:
    """``[batch, heads, rows, ...]`` as ``[batch, kv_heads, group * rows, ...]``."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads)).flatten(2, 3)


def _unfolded(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_folded`."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def _scores(
    q: Tensor, k: Tensor, hidden: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor | None]:
    """Masked scores ``[batch, kv_heads, group * rows, columns]``, float32 at least.

    And the derivative of capping, 1 - (s / cap)^2; None where nothing is capped.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    s, slope = upcast(_folded(q, kv_heads) @ k.mT) * scale, None
    if cap:
        bent = torch.tanh(s / cap)
        s, slope = bent * cap, 1 - bent.square()
    if hidden is None:
        return s, slope
    return _folded(_unfolded(s, heads).masked_fill(hidden, float("-inf")), kv_heads), slope


def attend(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    hidden: Bool[Tensor, "#batch 1 seq keys"] | None,
    scale: float,
    kernels: Kernels = AUTO,
    cap: float = 0.0,
) -> tuple[Float[Tensor, "batch heads seq value_dim"], Float[Tensor, "batch heads seq"]]:
    """softmax(scale q k^T) v without the keys that are `hidden`, and the logsumexp.

    The whole matrix of scores at once; softmax by the op ``"softmax"`` where `kernels` takes it.
    Both float32 at least; 0 and -inf in rows that see nothing. With a `cap` other than 0 scores s
    are cap tanh(s / cap), which no kernel computes (Gemma 2).
    """
    if not cap and kernels.takes("softmax", q, k, v):
        s = _unfolded(_folded(q, k.shape[1]) @ k.mT, q.shape[1])
        if compat.unobserved():
            weights, lse = s, SOFTMAX_(s, scale, hidden, False, None)
        else:
            weights, lse = SOFTMAX(s, scale, hidden, False, None)
        out = upcast(_folded(weights, k.shape[1]) @ v)
        return _unfolded(out, q.shape[1]), lse
    scores, _ = _scores(q, k, hidden, scale, cap)
    top = finite(scores.amax(-1, keepdim=True).detach())
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    positive = torch.where(total == 0, 1, total)
    out = upcast(weights.to(v.dtype) @ v) / positive
    lse = torch.where(total == 0, float("-inf"), top + positive.log())
    return _unfolded(out, q.shape[1]), _unfolded(lse.squeeze(-1), q.shape[1])


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
) -> tuple[
    Float[Tensor, "batch heads seq head_dim"],
    Float[Tensor, "batch kv_heads keys head_dim"],
    Float[Tensor, "batch kv_heads keys value_dim"],
]:
    """The cotangents of q, k and v, from the result and the logsumexp over all keys.

    P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K, dK = scale
    dS^T Q, all of these summed over the queries that share a key head (Dao et al. 2022, section
    B.2). All float32 at least. With a `cap`, dS is multiplied by 1 - (S / cap)^2 besides.
    """
    delta = (upcast(cotangent) * upcast(out)).sum(-1)
    if not cap and kernels.takes("softmax", q, k, v):
        return _chunk_backward(cotangent, q, k, v, delta, lse, hidden, scale)
    lse, delta = (_folded(x, k.shape[1]).unsqueeze(-1) for x in (finite(lse), delta))
    queries, given = (_folded(x, k.shape[1]) for x in (q, cotangent))
    with in_phase("recompute"):
        scores, slope = _scores(q, k, hidden, scale, cap)
    p = (scores - lse).exp()
    ds = p * (upcast(given @ v.mT) - delta) * scale
    ds = (ds if slope is None else ds * slope).to(q.dtype)
    dv = p.to(v.dtype).mT @ given
    return _unfolded(upcast(ds @ k), q.shape[1]), upcast(ds.mT @ queries), upcast(dv)


def _chunk_backward(
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    hidden: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` by the op, from delta = rowsum(dO O)."""
    heads, kv_heads = q.shape[1], k.shape[1]
    queries, given = _folded(q, kv_heads), _folded(cotangent.to(v.dtype), kv_heads)
    with in_phase("recompute"):
        s = _unfolded(queries @ k.mT, heads)
    dp = _unfolded(given @ v.mT, heads)
    if compat.unobserved():
        SOFTMAX_BLOCK_BACKWARD_(s, dp, lse, delta, scale, hidden, False)
        p, ds = s, dp
    else:
        p, ds = SOFTMAX_BLOCK_BACKWARD(s, dp, lse, delta, scale, hidden, False)
    p, ds = (_folded(x, kv_heads) for x in (p, ds))
    return _unfolded(upcast(ds @ k), heads), upcast(ds.mT @ queries), upcast(p.mT @ given)


def chunked_block(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    visible: Visible | None,
    causal: bool,
    scale: float,
    fn: Callable = attend,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, "batch heads seq value_dim"], Float[Tensor, "batch heads seq"]]:
    """`block`, every chunk by `fn`, which is as `attend`.

    Memory grows with CHUNK squared. `kernels` is that of merges; that of `fn` is its own.
    """
    mask = _Mask(visible, causal, q.device)
    outs, sums = [], []
    for rows in slices(q.shape[2]):
        mine = q[..., rows, :]
        total: tuple[Tensor, Tensor] | None = None
        for columns in mask.past(rows, k.shape[2]):
            there = k[..., columns, :], v[..., columns, :]
            part = fn(mine, *there, mask.hidden(rows, columns), scale)
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
) -> tuple[
    Float[Tensor, "batch heads seq head_dim"],
    Float[Tensor, "batch kv_heads keys head_dim"],
    Float[Tensor, "batch kv_heads keys value_dim"],
]:
    """`block_backward`, every chunk by `fn`, which is as `attend_backward`."""
    mask = _Mask(visible, causal, q.device)
    dq: dict[int, Tensor] = {}
    dk: dict[int, Tensor] = {}
    dv: dict[int, Tensor] = {}
    for rows in slices(q.shape[2]):
        given, mine, out_mine = (x[..., rows, :] for x in (cotangent, q, out))
        for columns in mask.past(rows, k.shape[2]):
            there = k[..., columns, :], v[..., columns, :]
            moved = fn(
                given, mine, *there, out_mine, lse[..., rows], mask.hidden(rows, columns), scale
            )
            places = (rows.start, columns.start, columns.start)
            for total, at, part in zip((dq, dk, dv), places, moved, strict=True):
                total[at] = upcast(part) + total[at] if at in total else upcast(part)
    return _joined(dq, q), _joined(dk, k), _joined(dv, v)


def _joined(parts: dict[int, Tensor], like: Tensor) -> Tensor:
    """The chunks by their starts, joined; zeros where there is none."""
    chunks = [
        parts[c.start].to(like.dtype) if c.start in parts else torch.zeros_like(like[..., c, :])
        for c in slices(like.shape[2])
    ]
    return torch.cat(chunks, 2)


_aten = torch.ops.aten


def block(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    visible: Visible | None = None,
    *,
    causal: bool,
    scale: float,
    cap: float = 0.0,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, "batch heads seq value_dim"], Float[Tensor, "batch heads seq"]]:
    """softmax(scale q k^T + mask) v, and the logsumexp of the masked scores.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k: ``[batch, kv_heads, keys, head_dim]``; each key head serves heads / kv_heads consecutive
            query heads.
        v: as `k`; its width may be another.
        visible: which keys to see; None for all. Memory is then that of one chunk.
        causal: mask, besides, the keys that come after the query by their places in this block.
        scale: of the scores.
        cap: scores s are cap tanh(s / cap), by the formula; 0: as they are.
        kernels: of ``"softmax"``, for blocks with masks that no kernel of torch takes (if chosen
            outright, all with masks), and of ``"lse_merge"``.

    Returns:
        ``(out, lse)`` in q's dtype and in float32 at least. Rows that see nothing give 0 and -inf.
        No collectives.
    """
    if cap or not _has_kernel(q, v, visible, kernels):
        fn = functools.partial(attend, kernels=kernels, cap=cap)
        return chunked_block(q, k, v, visible, causal, scale, fn, kernels)
    if visible is not None:
        return chunked_block(q, k, v, visible, causal, scale, _attend, kernels)
    both: Any = _Flash.apply(q, k, v, None, causal, scale)
    return both


def block_backward(
    cotangent: Float[Tensor, "batch heads seq value_dim"],
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    out: Float[Tensor, "batch heads seq value_dim"],
    lse: Float[Tensor, "batch heads seq"],
    visible: Visible | None = None,
    *,
    causal: bool,
    scale: float,
    cap: float = 0.0,
    kernels: Kernels = AUTO,
) -> tuple[
    Float[Tensor, "batch heads seq head_dim"],
    Float[Tensor, "batch kv_heads keys head_dim"],
    Float[Tensor, "batch kv_heads keys value_dim"],
]:
    """This block's part of the cotangents of q, k and v.

    Args:
        cotangent: of the result over all blocks.
        q, k, v, visible, causal, scale, cap, kernels: as in `block`.
        out: the result over all blocks, in q's dtype.
        lse: the logsumexp over all blocks; of a row that should not count, any huge number.

    Returns:
        ``(dq, dk, dv)``: summed over the blocks of a query, dq is its cotangent; dk and dv are
        summed over the heads that share them. In the dtypes of q, k and v. No collectives.
    """
    operands = (cotangent, q, k, v, out, lse)
    if cap or not _has_kernel(q, v, visible, kernels):
        backward = functools.partial(attend_backward, kernels=kernels, cap=cap)
        return chunked_block_backward(*operands, visible, causal, scale, backward)
    if visible is not None:
        return chunked_block_backward(*operands, visible, causal, scale, _attend_backward)
    grads: Any = _FlashBackward.apply(*operands, None, causal, scale)
    return grads


def _attend(q, k, v, hidden, scale) -> Any:
    return _Flash.apply(q, k, v, hidden, False, scale)


def _attend_backward(cotangent, q, k, v, out, lse, hidden, scale) -> Any:
    # as in _Flash.backward
    return _FlashBackward.apply(cotangent, q, k, v, out, finite(lse), hidden, False, scale)


def _has_kernel(q: Tensor, v: Tensor, visible: Visible | None, kernels: Kernels) -> bool:
    """Whether torch's flash kernel is to compute a block."""
    if visible is not None and kernels.takes("softmax", q, v):
        return False
    if q.device.type == "cpu":
        return active() is None or compat.flash_attention_traces(q.dtype)
    if visible is not None:
        return False
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and half and max(q.shape[-1], v.shape[-1]) <= 256


def _kernel_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands as kernels want them: one head of keys per query head, all of one width."""
    batch, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    width = max(q.shape[-1], v.shape[-1])
    if q.device.type == "cuda":
        width = -(-width // 8) * 8
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    if group > 1:  # the group's heads read one head of keys, which is not copied
        q = q.reshape(batch * kv_heads, group, *q.shape[2:])
        k, v = (
            x.reshape(batch * kv_heads, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in (k, v)
        )
    return q, k, v


def _bias(hidden: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias that a kernel adds to the scores: -inf where hidden."""
    if hidden is None:
        return None
    if hidden.shape[0] > 1 and q.shape[1] > k.shape[1]:
        hidden = hidden.repeat_interleave(k.shape[1], 0)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(
        hidden, float("-inf")
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    operands = _kernel_operands(q, k, v)
    if q.device.type == "cpu":
        flash = _aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(*operands, 0.0, causal, attn_mask=_bias(hidden, q, k), scale=scale)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention(
            *operands, 0.0, causal, False, scale=scale
        )[:2]
    out = out[..., : v.shape[-1]].reshape(*q.shape[:3], v.shape[-1])
    lse = lse.reshape(q.shape[:3])
    if hidden is not None:  # the kernel says 0
        lse = lse.masked_fill(hidden.all(-1), float("-inf"))
    return out, lse


def _backward(
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    hidden: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide_q, wide_k, wide_v = _kernel_operands(q, k, v)
    pad = (0, wide_q.shape[-1] - v.shape[-1])
    cotangent, out = (F.pad(x, pad).reshape(wide_q.shape) for x in (cotangent, out))
    operands = (cotangent, wide_q, wide_k, wide_v, out, lse.reshape(wide_q.shape[:-1]))
    if q.device.type == "cpu":
        flash = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        bias = _bias(hidden, q, k)
        dq, dk, dv = flash(*operands, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        # without dropout the kernel reads neither the lengths of a packed batch nor random state
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            *operands, None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing[:0],
            scale=scale,
        )  # fmt: skip
    if k.shape[1] != q.shape[1]:
        dk, dv = (upcast(x).sum(1).to(x.dtype) for x in (dk, dv))
    dk, dv = (x.reshape(*k.shape[:3], x.shape[-1]) for x in (dk, dv))
    dq = dq.reshape(*q.shape[:3], dq.shape[-1])
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """`x` with its vmap dim folded into the batch dim."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _fold_mask(hidden: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """`hidden` ``[batch or 1, ...]`` for operands of a batch that was folded."""
    if hidden is None or (dim is None and hidden.shape[0] == 1):
        return hidden
    hidden = hidden.expand(size, *hidden.shape) if dim is None else hidden.movedim(dim, 0)
    return hidden.expand(size, batch, *hidden.shape[2:]).flatten(0, 1)


def _unfold(outputs: Any, size: int) -> tuple[Tensor, ...]:
    return tuple(x.unflatten(0, (size, -1)) for x in outputs)


class _Flash(Function):
    """(out, logsumexp) of torch's flash attention; cotangents of both count."""

    generate_vmap_rule = False

    @staticmethod
    def forward(q, k, v, hidden, causal, scale):
        return _forward(q, k, v, hidden, causal, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, causal, scale = inputs
        ctx.static = causal, scale
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        q, k, v, hidden, out, lse = _saved(ctx)
        d_out, d_lse = cotangents
        if d_out is None and d_lse is None:
            return (None,) * 6
        if d_lse is None:  # as in training, where only merged results are differentiated
            # the logsumexp of a row that sees nothing must be finite: its scores are all -inf
            known = lse if hidden is None else finite(lse)
            grads: Any = _FlashBackward.apply(d_out, q, k, v, out, known, hidden, *ctx.static)
            return *grads, None, None, None
        d_out = torch.zeros_like(out) if d_out is None else d_out
        pullback = torch.func.vjp(_formula(hidden, *ctx.static), q, k, v)[1]
        return *pullback((d_out, d_lse)), None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        compat.refuse_nested_jvp()
        *primals, hidden = ctx.saved_tensors[:4]
        return _push(_formula(hidden, *ctx.static), primals, tangents)

    @staticmethod
    def vmap(info, in_dims, q, k, v, hidden, causal, scale):
        size = info.batch_size
        folded = [_fold(x, d, size) for x, d in zip((q, k, v), in_dims[:3], strict=True)]
        mask = _fold_mask(hidden, in_dims[3], size, folded[0].shape[0] // size)
        return _unfold(_Flash.apply(*folded, mask, causal, scale), size), (0, 0)


class _FlashBackward(Function):
    """The cotangents of q, k and v, as a function of everything they depend on."""

    generate_vmap_rule = False

    @staticmethod
    def forward(cotangent, q, k, v, out, lse, hidden, causal, scale):
        return _backward(cotangent, q, k, v, out, lse, hidden, causal, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, causal, scale = inputs
        ctx.static = causal, scale
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        *saved, hidden = _saved(ctx)
        pullback = torch.func.vjp(_formula_backward(hidden, *ctx.static), *saved)[1]
        return *pullback(tuple(cotangents)), None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        compat.refuse_nested_jvp()
        *primals, hidden = ctx.saved_tensors
        return _push(_formula_backward(hidden, *ctx.static), primals, tangents)

    @staticmethod
    def vmap(info, in_dims, *operands):
        *tensors, hidden, causal, scale = operands
        size = info.batch_size
        folded = [_fold(x, d, size) for x, d in zip(tensors, in_dims[:6], strict=True)]
        mask = _fold_mask(hidden, in_dims[6], size, folded[0].shape[0] // size)
        return _unfold(_FlashBackward.apply(*folded, mask, causal, scale), size), (0, 0, 0)


def _saved(ctx: Any) -> list:
    """The saved tensors, without wrappers of torch.func levels that have returned."""
    return [None if x is None else compat.unwrap_if_dead(x) for x in ctx.saved_tensors]


def _formula(hidden: Tensor | None, causal: bool, scale: float) -> Any:
    """The formula of `_Flash`, of q, k and v."""
    if hidden is None:
        return lambda q, k, v: chunked_block(q, k, v, None, causal, scale)

    def masked(q, k, v):
        out, lse = attend(q, k, v, hidden, scale)
        return out.to(q.dtype), lse

    return masked


def _formula_backward(hidden: Tensor | None, causal: bool, scale: float) -> Any:
    """The formula of `_FlashBackward`, of the cotangent, q, k, v, out and lse."""

    def backward(cotangent, q, k, v, out, lse):
        operands = (cotangent, q, k, v, out, lse)
        if hidden is None:
            return chunked_block_backward(*operands, None, causal, scale)
        moved = attend_backward(*operands, hidden, scale)
        return tuple(x.to(y.dtype) for x, y in zip(moved, (q, k, v), strict=True))

    return backward


def _push(formula: Any, primals: Any, tangents: Any) -> Any:
    """The tangents of ``formula(*primals)``; a tangent of None is zero."""
    moved = tuple(
        torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=False)
    )
    return torch.func.jvp(formula, tuple(primals), moved)[1]


def attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    k: Float[Tensor, "batch keys heads head_dim"],
    v: Float[Tensor, "batch keys heads head_dim"],
    *,
    causal: bool,
) -> Float[Tensor, "batch seq heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v per head, each query seeing keys up to its own position.

    Args:
        q: ``[batch, seq, heads, head_dim]``.
        k: ``[batch, seq, heads, head_dim]``; repeat the heads of grouped keys first.
        v: as `k`.
        causal: mask keys after the query.

    Returns:
        ``[batch, seq, heads, head_dim]`` in q's dtype. No collectives.
    """
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    traces = active() is None or compat.flash_attention_traces(q.dtype)
    if traces and not compat.transforms_active():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    else:
        out, _ = block(q, k, v, causal=causal, scale=1 / math.sqrt(q.shape[-1]))
    return out.transpose(-3, -2)
