"""Scaled dot-product attention that torch.func can map and differentiate at the speed of SDPA.

O = softmax(Q K^T / sqrt(d) + causal mask) V (Vaswani et al. 2017, eq. 1; computed as in Dao 2023).

Under plain autograd this is `torch.nn.functional.scaled_dot_product_attention`, which picks the
device's best kernel. Under torch.func transforms SDPA has no batching rule and would run one call
per rank; there, on the CPU, an autograd Function calls torch's flash kernels with simulated ranks
folded into the batch dim. Elsewhere, and for derivatives of derivatives, it is the formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional as F

from functron import compat
from functron.program.recorder import active
from functron.typing import Float, Tensor

_aten = torch.ops.aten


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
    if active() is not None and not compat.flash_attention_traces(q.dtype):
        out = reference(q, k, v, causal)
    elif not compat.transforms_active():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    elif q.device.type == "cpu":
        out = _Flash.apply(q, k, v, causal)[0]
    else:
        out = reference(q, k, v, causal)
    return out.transpose(-3, -2)


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula, on ``[..., heads, seq, head_dim]``; softmax in float32 at least."""
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    if causal:
        rows = torch.arange(q.shape[-2], device=q.device)
        future = rows[None, :] > rows[:, None]
        scores = scores.masked_fill(future, float("-inf"))
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return torch.softmax(scores, -1).to(v.dtype) @ v


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """`x` with its vmap dim folded into the batch dim."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


class _Flash(Function):
    """(out, logsumexp) of torch's CPU flash attention, for ``[batch, heads, seq, head_dim]``."""

    generate_vmap_rule = False

    @staticmethod
    def forward(q, k, v, causal):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, ctx.causal = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.save_for_forward(q, k, v)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        return *_FlashBackward.apply(cotangents[0], *ctx.saved_tensors, ctx.causal), None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        compat.refuse_nested_jvp()
        primals, moved = ctx.saved_tensors[:3], []
        for x, t in zip(primals, tangents[:3], strict=True):
            moved.append(torch.zeros_like(x) if t is None else t)
        tangent = torch.func.jvp(
            lambda q, k, v: reference(q, k, v, ctx.causal), primals, tuple(moved)
        )[1]
        return tangent, None

    @staticmethod
    def vmap(info, in_dims, q, k, v, causal):
        size = info.batch_size
        folded = [_fold(x, d, size) for x, d in zip((q, k, v), in_dims[:3], strict=True)]
        made: Any = _Flash.apply(*folded, causal)
        out, lse = made
        return (out.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1))), (0, 0)


class _FlashBackward(Function):
    """The cotangents of q, k and v, from the flash kernel's backward."""

    generate_vmap_rule = False

    @staticmethod
    def forward(cotangent, q, k, v, out, lse, causal):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            cotangent, q, k, v, out, lse, 0.0, causal
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        cotangent, q, k, v, _, _, ctx.causal = inputs
        ctx.save_for_backward(cotangent, q, k, v)
        ctx.save_for_forward(cotangent, q, k, v)

    @staticmethod
    def _formula(causal):
        def backward(cotangent, q, k, v):
            return torch.func.vjp(lambda q, k, v: reference(q, k, v, causal), q, k, v)[1](cotangent)

        return backward

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        pullback = torch.func.vjp(_FlashBackward._formula(ctx.causal), *ctx.saved_tensors)[1]
        first, *rest = pullback(tuple(cotangents))
        return first, *rest, None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        compat.refuse_nested_jvp()
        primals = ctx.saved_tensors
        moved = tuple(
            torch.zeros_like(x) if t is None else t
            for x, t in zip(primals, tangents[:4], strict=True)
        )
        return torch.func.jvp(_FlashBackward._formula(ctx.causal), primals, moved)[1]

    @staticmethod
    def vmap(info, in_dims, *operands):
        *tensors, causal = operands
        size = info.batch_size
        folded = [_fold(x, d, size) for x, d in zip(tensors, in_dims, strict=False)]
        grads: Any = _FlashBackward.apply(*folded, causal)
        return tuple(g.unflatten(0, (size, -1)) for g in grads), (0, 0, 0)
