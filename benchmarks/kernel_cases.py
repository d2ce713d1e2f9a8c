"""The cases of `kernels.py` and of tests on a GPU: every kernel's op and its operands."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from kernel_case import Case, Given, Program, backward_of, liger, nbytes, shape_of
from torch.nn import functional as F

from functron.ops.adamw import ADAMW_
from functron.ops.cross_entropy import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD_
from functron.ops.foreach import SUM_OF_SQUARES
from functron.ops.glu import GLU, GLU_BACKWARD, GLU_BACKWARD_AGAIN, GLU_PACKED_BACKWARD_AGAIN
from functron.ops.moe import (
    PERMUTE,
    ROUTER,
    ROUTER_BACKWARD,
    SORT,
    SUM_ROWS,
    UNPERMUTE,
    UNPERMUTE_BACKWARD,
)
from functron.ops.norms import (
    ADD_RMS_NORM,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
)
from functron.ops.qk_norm_rope import (
    QK_NORM_ROPE,
    QK_NORM_ROPE_,
    QK_NORM_ROPE_BACKWARD,
    QKV_NORM_ROPE,
    QKV_NORM_ROPE_BACKWARD,
)
from functron.ops.quantise import QUANTISE, QuantisedFormat, magnitude
from functron.ops.softmax import LSE_MERGE, LSE_MERGE_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD


def rms_norm(g: Given) -> Case:
    x, w = g.normal(g.sizes.tokens, g.sizes.dim), g.normal(g.sizes.dim)
    return Case(
        RMS_NORM, (x, w, 1e-6, False), shape_of(x), nbytes(x, x, w) + 4 * len(x),
        builtin=lambda: F.rms_norm(x, (len(w),), w, 1e-6),
        liger=liger("liger_rms_norm", x, w, 1e-6),
    )  # fmt: skip


def rms_norm_with_residual(g: Given) -> Case:
    x, w = g.normal(g.sizes.tokens, g.sizes.dim), g.normal(g.sizes.dim)
    args = (x, x.flip(0).contiguous(), w, 1e-6, False)
    fused = liger("liger_fused_add_rms_norm", x, args[1], w, 1e-6)
    return Case(ADD_RMS_NORM, args, shape_of(x), nbytes(x, x, x, x, w) + 4 * len(x), liger=fused)


def rms_norm_backward(g: Given) -> Case:
    x, w = g.normal(g.sizes.tokens, g.sizes.dim), g.normal(g.sizes.dim)
    dy = x.flip(0).contiguous()
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    function = liger("liger_rms_norm")
    return Case(
        RMS_NORM_BACKWARD, (dy, None, x, w, rstd, 1e-6, False), shape_of(x),
        nbytes(x, x, x, w, w, rstd),
        builtin=backward_of(lambda x, w: F.rms_norm(x, (len(w),), w, 1e-6), dy, x, w),
        liger=backward_of(function and (lambda x, w: function(x, w, 1e-6)), dy, x, w),
    )  # fmt: skip


def layer_norm(g: Given) -> Case:
    x, w, b = g.normal(g.sizes.tokens, g.sizes.dim), g.normal(g.sizes.dim), g.normal(g.sizes.dim)
    return Case(
        LAYER_NORM, (x, w, b, 1e-5, False), shape_of(x), nbytes(x, x, w, b) + 8 * len(x),
        builtin=lambda: F.layer_norm(x, (len(w),), w, b, 1e-5),
        liger=liger("liger_layer_norm", x, w, b, 1e-5),
    )  # fmt: skip


def layer_norm_backward(g: Given) -> Case:
    x, w, b = g.normal(g.sizes.tokens, g.sizes.dim), g.normal(g.sizes.dim), g.normal(g.sizes.dim)
    dy, wide = x.flip(0).contiguous(), x.float()
    mean, rstd = wide.mean(-1), torch.rsqrt(wide.var(-1, unbiased=False) + 1e-5)
    function = liger("liger_layer_norm")
    return Case(
        LAYER_NORM_BACKWARD, (dy, None, x, w, b, mean, rstd, 1e-5, False), shape_of(x),
        nbytes(x, x, x, w, w, b, mean, rstd),
        builtin=backward_of(lambda x, w, b: F.layer_norm(x, (len(w),), w, b), dy, x, w, b),
        liger=backward_of(function and (lambda x, w, b: function(x, w, b, 1e-5)), dy, x, w, b),
    )  # fmt: skip


def _heads(g: Given, normed: bool) -> tuple[list, list]:
    """q and k as views of what one projection has made, and what follows them as arguments."""
    heads, size = g.sizes.heads, g.sizes.head_dim // 2 * 2
    groups = max(1, heads // 4)
    packed = g.normal(1, g.sizes.tokens, (heads + 2 * groups) * size)
    q, k, _ = packed.unflatten(-1, (-1, size)).split((heads, groups, groups), -2)
    scales = [g.normal(size), g.normal(size + 1)[1:]] if normed else [None, None]
    turns = torch.arange(g.sizes.tokens, device=g.device)[:, None] * 1e-3
    angles = turns * torch.arange(1, size // 2 + 1, device=g.device)
    return [q, k], [*scales, angles.cos(), angles.sin(), 1e-6, False, False]


def rope(g: Given, normed: bool, in_place: bool) -> Case:
    (q, k), rest = _heads(g, normed)
    op = QK_NORM_ROPE_ if in_place else QK_NORM_ROPE
    floor = nbytes(q, k, q, k, *rest[:4])
    table = [torch.cat([one, one], -1)[None].to(q.dtype) for one in rest[2:4]]
    theirs = liger("liger_rope", q.transpose(1, 2), k.transpose(1, 2), *table)
    return Case(op, (q, k, *rest), shape_of(q), floor, liger=None if normed else theirs)


def rope_backward(g: Given) -> Case:
    (q, k), rest = _heads(g, True)
    d_q, d_k = (x.flip(1).contiguous() for x in (q, k))
    args = (d_q, d_k, q, k, *rest)
    return Case(QK_NORM_ROPE_BACKWARD, args, shape_of(q), nbytes(q, k, q, k, q, k, *rest[:4]))


def _groups(g: Given, normed: bool) -> tuple[torch.Tensor, list]:
    """The result of one projection, by key head, and the arguments that follow it."""
    (q, k), rest = _heads(g, normed)
    qkv = g.normal(*k.shape[:3], q.shape[2] // k.shape[2] + 2, k.shape[3])
    return qkv, rest


def rope_of_one(g: Given) -> Case:
    qkv, rest = _groups(g, normed=False)
    return Case(QKV_NORM_ROPE, (qkv, *rest, True), shape_of(qkv), nbytes(qkv, qkv, *rest[2:4]))


def rope_of_one_backward(g: Given) -> Case:
    qkv, rest = _groups(g, normed=True)
    given = [x.flip(1).contiguous() for x in QKV_NORM_ROPE.reference(qkv, *rest, True)]
    args = (*given, qkv, *rest)
    floor = nbytes(qkv, qkv, qkv, *rest[:4])
    return Case(QKV_NORM_ROPE_BACKWARD, args, shape_of(qkv), floor)


def _logits(g: Given) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = g.sizes.logit_rows, g.sizes.vocab
    return g.normal(rows, vocab), g.integers(vocab, rows)


def cross_entropy(g: Given) -> Case:
    x, ids = _logits(g)
    floor = nbytes(x, ids) + 8 * len(x)
    return Case(
        CROSS_ENTROPY, (x, ids, None), shape_of(x), floor, builtin=lambda: F.cross_entropy(x, ids)
    )


@dataclass(frozen=True)
class Both:
    """Cross-entropy's forward and, over the logits, its backward, as one."""

    name: str = "cross_entropy_and_backward_"

    def raw(self, x: torch.Tensor, ids: torch.Tensor, d: torch.Tensor) -> None:
        """By kernels."""
        lse, _ = CROSS_ENTROPY.raw(x, ids, None)
        CROSS_ENTROPY_BACKWARD_.raw(d, -d, x, ids, lse, None)

    def reference(self, x: torch.Tensor, ids: torch.Tensor, d: torch.Tensor) -> None:
        """By their references."""
        lse, _ = CROSS_ENTROPY.reference(x, ids, None)
        CROSS_ENTROPY_BACKWARD_.reference(d, -d, x, ids, lse, None)


def cross_entropy_and_backward(g: Given) -> Case:
    """The peer of Liger-Kernel's: it makes the gradient in its forward."""
    x, ids = _logits(g)
    d = torch.full((len(x),), 1 / len(x), device=x.device)

    def torch_own() -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf, ids), leaf)

    leaf = x.detach().clone().requires_grad_()
    floor = nbytes(x, x, x, ids, ids, d)
    args, theirs = (x, ids, d), liger("liger_cross_entropy", leaf, ids)
    return Case(Both(), args, shape_of(x), floor, builtin=torch_own, liger=theirs)


def cross_entropy_backward(g: Given) -> Case:
    x, ids = _logits(g)
    lse = torch.logsumexp(x.float(), -1)
    d = torch.full_like(lse, 1 / len(x))
    return Case(
        CROSS_ENTROPY_BACKWARD_, (d, -d, x, ids, lse, None), shape_of(x),
        nbytes(x, x, ids, d, d, lse),
        builtin=backward_of(lambda x: F.cross_entropy(x, ids), torch.ones_like(d[0]), x),
    )  # fmt: skip


def softmax(g: Given, causal: bool) -> Case:
    """Scores of heads; under a causal mask half of them count, but all weights are written."""
    size = min(g.sizes.tokens, 4096)
    x = g.normal(2, g.sizes.heads // 2, size, size)
    own = None if causal else lambda: torch.softmax(x, -1)
    theirs = None if causal else liger("liger_softmax", x)
    floor = nbytes(x, x) - (nbytes(x) // 2 if causal else 0)
    return Case(SOFTMAX, (x, 0.1, None, causal, None), shape_of(x), floor, own, theirs)


def softmax_backward(g: Given) -> Case:
    size = min(g.sizes.tokens, 4096)
    x = g.normal(2, g.sizes.heads // 2, size, size)
    p, lse = SOFTMAX.reference(x, 0.1, None, False, None)
    return Case(
        SOFTMAX_BACKWARD, (x, torch.zeros_like(lse), p, 0.1), shape_of(x),
        nbytes(x, x, p, lse, lse),
        builtin=lambda: torch.ops.aten._softmax_backward_data(x, p, -1, x.dtype),
    )  # fmt: skip


def lse_merge(g: Given) -> Case:
    shape = (1, g.sizes.tokens, g.sizes.heads, g.sizes.head_dim)
    out1, out2 = g.normal(*shape, dtype=torch.float32), g.normal(*shape)
    lse1 = g.normal(*shape[:3], dtype=torch.float32)
    args = (out1, lse1, out2, lse1.flip(1).contiguous())
    return Case(LSE_MERGE, args, shape_of(out1), nbytes(out1, out1, out2, lse1, lse1, lse1))


def lse_merge_backward(g: Given) -> Case:
    shape = (1, g.sizes.tokens, g.sizes.heads, g.sizes.head_dim)
    out1, out2 = g.normal(*shape, dtype=torch.float32), g.normal(*shape)
    lse1 = g.normal(*shape[:3], dtype=torch.float32)
    given = (out1.flip(1).contiguous(), lse1.flip(2).contiguous())
    args = (*given, out1, lse1, out2, lse1.flip(1).contiguous())
    return Case(LSE_MERGE_BACKWARD, args, shape_of(out1), 2 * nbytes(*args) - nbytes(*given))


def adamw(g: Given, *, master: bool = True) -> Case:
    """A parameter of the dtype of activations, with float32 moments and master."""
    grad = g.normal(g.sizes.numel)
    wide = grad.float()
    param, moments = grad.flip(0).contiguous(), (wide * 0.1, wide.square() * 0.1)
    args = (
        param, param.float() if master else None, *moments, grad, g.scalar(1e-3), g.scalar(0.5),
        g.scalar(0.0), g.scalar(10, torch.int64), None, 0.9, 0.95, 1e-8, 0.1, 0,
        [0, 1 << 62, 0, 1, 0, 1, 0],
    )  # fmt: skip
    floor = nbytes(param, grad, *moments, *moments) + nbytes(args[1], args[1])
    floor += 0 if master else nbytes(param)
    return Case(ADAMW_, args, shape_of(grad), floor, builtin=_fused_adamw(wide))


def _fused_adamw(like: torch.Tensor) -> Program:
    """torch's, on float32 alone: it has neither masters nor moments of another dtype."""
    columns = [[like.clone()] for _ in range(3)] + [[like.square()]]
    step = [torch.ones((), device=like.device)]
    params, grads, means, squares = columns
    return lambda: torch._fused_adamw_(
        params, grads, means, squares, [], step, lr=1e-3, beta1=0.9, beta2=0.95,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def sum_of_squares(g: Given) -> Case:
    x = g.normal(1, g.sizes.numel)
    norm = torch.linalg.vector_norm
    args, builtin = (x,), lambda: norm(x, dtype=torch.float32)
    return Case(SUM_OF_SQUARES, args, shape_of(x), nbytes(x), builtin=builtin)


def sum_rows(g: Given) -> Case:
    """The gradient of an embedding; half of the tokens are of a few rows."""
    x, vocab = g.normal(g.sizes.tokens, g.sizes.dim // 2), g.sizes.vocab
    share = g.normal(g.sizes.tokens, dtype=torch.float32).abs().clamp(max=1) ** 3
    ids = (share * (vocab - 1)).long()
    floor = nbytes(x, ids) + nbytes(x[:1]) * vocab

    def builtin() -> torch.Tensor:
        return torch.ops.aten.embedding_dense_backward(x, ids, vocab, -1, False)

    return Case(SUM_ROWS, (x, ids, vocab), f"{shape_of(x)}, V = {vocab}", floor, builtin)


def quantise(g: Given, text: str, columns: bool = False) -> Case:
    """Of rows, or of a matrix that lies column by column, whose transpose is read."""
    form = QuantisedFormat.parse(text)
    rows, cols = (-(-size // 128) * 128 for size in (g.sizes.tokens, g.sizes.dim))
    x = g.normal(1, cols, rows).mT if columns else g.normal(1, rows, cols)
    args = (x, magnitude(x, form), None, None, None, 0, text, False)
    scales = 4 if form.shared else x.numel() // math.prod(form.block) * form.scale_dtype.itemsize
    return Case(QUANTISE, args, shape_of(x), nbytes(x) + x.numel() + scales, compared=(0, 1))


def moe_router(g: Given) -> Case:
    logits = g.normal(g.sizes.tokens, g.sizes.experts, dtype=torch.float32)
    balance = g.normal(g.sizes.experts, dtype=torch.float32) * 1e-2
    top_k = g.sizes.top_k
    floor = nbytes(logits, logits, balance) + len(logits) * top_k * 12
    return Case(ROUTER, (logits, balance, top_k, 1, 1, 8, 4, 1), shape_of(logits), floor)


def moe_router_backward(g: Given) -> Case:
    logits = g.normal(g.sizes.tokens, g.sizes.experts, dtype=torch.float32)
    chosen, weights, scores = ROUTER.reference(logits, None, g.sizes.top_k, 1, 1, 1, 1, 1)
    args = (weights * 0.5, logits, chosen, weights, scores, 1, 1)
    return Case(ROUTER_BACKWARD, args, shape_of(logits), nbytes(*args[:5]) + nbytes(logits))


def _sorted(g: Given) -> tuple[torch.Tensor, ...]:
    """Of tokens that chose top_k experts each: their rows' tokens, and the rows of each token."""
    scores = g.normal(g.sizes.tokens, g.sizes.experts, dtype=torch.float32)
    experts = scores.topk(g.sizes.top_k).indices
    kept = torch.ones_like(experts, dtype=torch.bool)
    return experts, kept, *SORT.reference(experts, kept, g.sizes.experts, experts.numel())


def moe_sort(g: Given) -> Case:
    experts, kept, order, tokens, slots, sizes = _sorted(g)
    floor = nbytes(experts, kept, order, tokens, slots, sizes)
    args = (experts, kept, g.sizes.experts, experts.numel())
    flat = experts.flatten()
    return Case(SORT, args, shape_of(experts), floor, lambda: torch.sort(flat, stable=True))


def _half(g: Given) -> torch.Tensor:
    """Activations of half the width: there are top_k copies of them."""
    return g.normal(g.sizes.tokens, g.sizes.dim // 2)


def moe_permute(g: Given) -> Case:
    x, (_, _, _, tokens, slots, _) = _half(g), _sorted(g)
    floor = nbytes(x, tokens) + len(tokens) * nbytes(x[:1])
    args = (x, tokens, slots)
    return Case(PERMUTE, args, f"{shape_of(x)}, k = {g.sizes.top_k}", floor, lambda: x[tokens])


def moe_unpermute(g: Given) -> Case:
    _, _, order, tokens, slots, _ = _sorted(g)
    x = _half(g)
    rows, weights = x[tokens], g.normal(*slots.shape, dtype=torch.float32)
    floor = nbytes(x, rows, weights, slots)
    args = (rows, weights, order, slots)
    return Case(UNPERMUTE, args, f"{shape_of(x)}, k = {g.sizes.top_k}", floor)


def moe_unpermute_backward(g: Given) -> Case:
    _, _, order, tokens, slots, _ = _sorted(g)
    x = _half(g)
    rows, weights = x[tokens], g.normal(*slots.shape, dtype=torch.float32)
    floor = nbytes(x, rows, rows, weights, weights, order)
    args = (x, rows, weights, order, slots)
    return Case(UNPERMUTE_BACKWARD, args, f"{shape_of(x)}, k = {g.sizes.top_k}", floor)


def glu(g: Given, activation: str) -> Case:
    gate, up = g.normal(g.sizes.tokens, g.sizes.dim), g.normal(g.sizes.tokens + 1, g.sizes.dim)[1:]
    name = {"silu": "liger_swiglu", "gelu_tanh": "liger_geglu"}.get(activation, "none")
    own = (lambda: F.silu(gate) * up) if activation == "silu" else None
    args, theirs = (gate, up, activation), liger(name, gate, up)
    return Case(GLU, args, shape_of(gate), nbytes(gate, gate, up), own, theirs)


def glu_backward(g: Given, activation: str) -> Case:
    gate, up = g.normal(g.sizes.tokens, g.sizes.dim), g.normal(g.sizes.tokens + 1, g.sizes.dim)[1:]
    dy = gate.flip(0).contiguous()
    name = {"silu": "liger_swiglu", "gelu_tanh": "liger_geglu"}.get(activation, "none")
    return Case(
        GLU_BACKWARD, (dy, gate, up, activation), shape_of(gate), nbytes(gate, gate, up, up, dy),
        liger=backward_of(liger(name), dy, gate, up),
    )  # fmt: skip


def glu_backward_again(g: Given, activation: str) -> Case:
    gate, up = g.normal(g.sizes.tokens, g.sizes.dim), g.normal(g.sizes.tokens + 1, g.sizes.dim)[1:]
    dy, floor = gate.flip(0).contiguous(), 6 * nbytes(gate)
    return Case(GLU_BACKWARD_AGAIN, (dy, gate, up, activation), shape_of(gate), floor)


def glu_packed_backward_again(g: Given) -> Case:
    both = g.normal(g.sizes.tokens, 2 * g.sizes.dim)
    dy = both[:, : g.sizes.dim].flip(0).contiguous()
    floor = 3 * nbytes(both)
    return Case(GLU_PACKED_BACKWARD_AGAIN, (dy, both, "silu"), shape_of(dy), floor)


CASES: Mapping[str, Callable[[Given], Case]] = MappingProxyType(
    {
        "rms_norm": rms_norm,
        "rms_norm + residual": rms_norm_with_residual,
        "rms_norm backward": rms_norm_backward,
        "layer_norm": layer_norm,
        "layer_norm backward": layer_norm_backward,
        "rope": functools.partial(rope, normed=False, in_place=False),
        "rope, in place": functools.partial(rope, normed=False, in_place=True),
        "qk_norm + rope": functools.partial(rope, normed=True, in_place=False),
        "qk_norm + rope backward": rope_backward,
        "rope of one projection": rope_of_one,
        "qk_norm + rope of one projection, backward": rope_of_one_backward,
        "swiglu": functools.partial(glu, activation="silu"),
        "swiglu backward": functools.partial(glu_backward, activation="silu"),
        "swiglu backward + hidden": functools.partial(glu_backward_again, activation="silu"),
        "swiglu of one projection, backward + hidden": glu_packed_backward_again,
        "geglu": functools.partial(glu, activation="gelu_tanh"),
        "geglu backward": functools.partial(glu_backward, activation="gelu_tanh"),
        "cross_entropy": cross_entropy,
        "cross_entropy backward, in place": cross_entropy_backward,
        "cross_entropy and backward": cross_entropy_and_backward,
        "softmax": functools.partial(softmax, causal=False),
        "softmax, causal": functools.partial(softmax, causal=True),
        "softmax backward": softmax_backward,
        "lse_merge": lse_merge,
        "lse_merge backward": lse_merge_backward,
        "adamw, float32 master": adamw,
        "adamw, no master": functools.partial(adamw, master=False),
        "sum of squares": sum_of_squares,
        "quantise 1x128": functools.partial(quantise, text="e4m3@1x128"),
        "quantise 1x128 of columns": functools.partial(quantise, text="e4m3@1x128", columns=True),
        "quantise 128x128": functools.partial(quantise, text="e4m3@128x128"),
        "quantise MX 1x32": functools.partial(quantise, text="e4m3@1x32"),
        "quantise by tensor": functools.partial(quantise, text="e4m3@tensor"),
        "sum_rows": sum_rows,
        "moe_router": moe_router,
        "moe_router backward": moe_router_backward,
        "moe_sort": moe_sort,
        "moe_permute": moe_permute,
        "moe_unpermute": moe_unpermute,
        "moe_unpermute backward": moe_unpermute_backward,
    }
)
"""Every case, in the order to show them."""
