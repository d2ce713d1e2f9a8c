"""Blocks of attention that can be put together: each with its logsumexp, and backward from it.

Attention over keys that are split into blocks is computed block by block: every block gives its
own softmax and its logsumexp, `merge` joins two of them, and backward takes the logsumexp of the
whole, which makes each block's cotangents exact without the others (Liu et al. 2023, ring
attention; Dao et al. 2022). On the CPU, and on CUDA in half precision, blocks without masks run
torch's flash kernels, with the ranks of a simulated mesh folded into the batch; others are
`functron.ops.chunked`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional as F

from functron import compat
from functron.ops import chunked
from functron.ops.chunked import Visible, merge
from functron.program.recorder import active
from functron.typing import Float, Tensor

__all__ = ["Visible", "block", "block_backward", "merge"]

_aten = torch.ops.aten


def block(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    visible: Visible | None = None,
    *,
    causal: bool,
    scale: float,
) -> tuple[Float[Tensor, "batch heads seq value_dim"], Float[Tensor, "batch heads seq"]]:
    """softmax(scale q k^T + mask) v, and the logsumexp of the masked scores.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k: ``[batch, kv_heads, keys, head_dim]``; each key head serves heads / kv_heads consecutive
            query heads.
        v: as `k`; its width may be another.
        visible: which keys to see; None for all. Memory is then that of `functron.ops.chunked`.
        causal: mask, besides, the keys that come after the query by their places in this block.
        scale: of the scores.

    Returns:
        ``(out, lse)`` in q's dtype and in float32 at least. Rows that see nothing give 0 and -inf.
        No collectives.
    """
    if visible is not None or not _has_kernel(q, v):
        return chunked.block(q, k, v, visible, causal, scale)
    both: Any = _Flash.apply(q, k, v, causal, scale)
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
) -> tuple[
    Float[Tensor, "batch heads seq head_dim"],
    Float[Tensor, "batch kv_heads keys head_dim"],
    Float[Tensor, "batch kv_heads keys value_dim"],
]:
    """This block's part of the cotangents of q, k and v.

    Args:
        cotangent: of the result over all blocks.
        q, k, v, visible, causal, scale: as in `block`.
        out: the result over all blocks, in q's dtype.
        lse: the logsumexp over all blocks; of a row that should not count, any huge number.

    Returns:
        ``(dq, dk, dv)``: summed over the blocks of a query, dq is its cotangent; dk and dv are
        summed over the heads that share them. In the dtypes of q, k and v. No collectives.
    """
    if visible is not None or not _has_kernel(q, v):
        return chunked.block_backward(cotangent, q, k, v, out, lse, visible, causal, scale)
    grads: Any = _FlashBackward.apply(cotangent, q, k, v, out, lse, causal, scale)
    return grads


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    if q.device.type == "cpu":
        return active() is None or compat.flash_attention_traces(q.dtype)
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


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    operands = _kernel_operands(q, k, v)
    if q.device.type == "cpu":
        flash = _aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(*operands, 0.0, causal, scale=scale)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention(
            *operands, 0.0, causal, False, scale=scale
        )[:2]
    out = out[..., : v.shape[-1]]
    return out.reshape(*q.shape[:3], v.shape[-1]), lse.reshape(q.shape[:3])


def _backward(
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide_q, wide_k, wide_v = _kernel_operands(q, k, v)
    pad = (0, wide_q.shape[-1] - v.shape[-1])
    cotangent, out = (F.pad(x, pad).reshape(wide_q.shape) for x in (cotangent, out))
    operands = (cotangent, wide_q, wide_k, wide_v, out, lse.reshape(wide_q.shape[:-1]))
    if q.device.type == "cpu":
        flash = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = flash(*operands, 0.0, causal, scale=scale)
    else:
        # without dropout the kernel reads neither the lengths of a packed batch nor random state
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            *operands, None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing[:0],
            scale=scale,
        )  # fmt: skip
    if k.shape[1] != q.shape[1]:
        dk, dv = (chunked.upcast(x).sum(1).to(x.dtype) for x in (dk, dv))
    dk, dv = (x.reshape(*k.shape[:3], x.shape[-1]) for x in (dk, dv))
    dq = dq.reshape(*q.shape[:3], dq.shape[-1])
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """`x` with its vmap dim folded into the batch dim."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _unfold(outputs: Any, size: int) -> tuple[Tensor, ...]:
    return tuple(x.unflatten(0, (size, -1)) for x in outputs)


class _Flash(Function):
    """(out, logsumexp) of torch's flash attention; cotangents of both count."""

    generate_vmap_rule = False

    @staticmethod
    def forward(q, k, v, causal, scale):
        return _forward(q, k, v, causal, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *ctx.static = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.save_for_forward(q, k, v)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        q, k, v, out, lse = map(compat.unwrap_if_dead, ctx.saved_tensors)
        d_out, d_lse = cotangents
        if d_out is None and d_lse is None:
            return (None,) * 5
        if d_lse is None:  # as in training, where only merged results are differentiated
            return *_FlashBackward.apply(d_out, q, k, v, out, lse, *ctx.static), None, None
        d_out = torch.zeros_like(out) if d_out is None else d_out
        pullback = torch.func.vjp(_Flash._formula(*ctx.static), q, k, v)[1]
        return *pullback((d_out, d_lse)), None, None

    @staticmethod
    def _formula(causal, scale):
        return lambda q, k, v: chunked.block(q, k, v, None, causal, scale)

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        compat.refuse_nested_jvp()
        return _push(_Flash._formula(*ctx.static), ctx.saved_tensors[:3], tangents)

    @staticmethod
    def vmap(info, in_dims, q, k, v, causal, scale):
        size = info.batch_size
        folded = [_fold(x, d, size) for x, d in zip((q, k, v), in_dims[:3], strict=True)]
        return _unfold(_Flash.apply(*folded, causal, scale), size), (0, 0)


class _FlashBackward(Function):
    """The cotangents of q, k and v, as a function of everything they depend on."""

    generate_vmap_rule = False

    @staticmethod
    def forward(cotangent, q, k, v, out, lse, causal, scale):
        return _backward(cotangent, q, k, v, out, lse, causal, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, causal, scale = inputs
        ctx.static = causal, scale
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def _formula(causal, scale):
        def backward(cotangent, q, k, v, out, lse):
            return chunked.block_backward(cotangent, q, k, v, out, lse, None, causal, scale)

        return backward

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        formula = _FlashBackward._formula(*ctx.static)
        saved = [compat.unwrap_if_dead(value) for value in ctx.saved_tensors]
        pullback = torch.func.vjp(formula, *saved)[1]
        return *pullback(tuple(cotangents)), None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        compat.refuse_nested_jvp()
        return _push(_FlashBackward._formula(*ctx.static), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, *operands):
        *tensors, causal, scale = operands
        size = info.batch_size
        folded = [_fold(x, d, size) for x, d in zip(tensors, in_dims, strict=False)]
        return _unfold(_FlashBackward.apply(*folded, causal, scale), size), (0, 0, 0)


def _push(formula: Any, primals: Any, tangents: Any) -> Any:
    """The tangents of ``formula(*primals)``; a tangent of None is zero."""
    moved = tuple(
        torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=False)
    )
    return torch.func.jvp(formula, tuple(primals), moved)[1]
