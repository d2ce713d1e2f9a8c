"""Scaled dot-product attention that torch.func can map and differentiate at the speed of SDPA.

O = softmax(Q K^T / sqrt(d) + causal mask) V (Vaswani et al. 2017, eq. 1; computed as in Dao 2023).

Under plain autograd this is `torch.nn.functional.scaled_dot_product_attention`, which picks the
device's best kernel. Under torch.func transforms SDPA has no batching rule and would run one call
per rank; there it is `functron.ops.flash.block`, whose autograd Functions call torch's flash
kernels with simulated ranks folded into the batch dim.
"""

from __future__ import annotations

import math

from torch.nn import functional as F

from functron import compat
from functron.ops.flash import block
from functron.program.recorder import active
from functron.typing import Float, Tensor


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
