"""Scaled dot-product attention that torch.func can map and differentiate at the speed of SDPA.

O = softmax(Q K^T / sqrt(d) + causal mask) V (Vaswani et al. 2017, eq. 1; computed as in Dao 2023),
where several query heads may share a key head, which is then read, not copied. `implementation`
chooses what computes it: a kernel of torch's that gives the logsumexp (cuDNN or FlashAttention on
CUDA, in half precision; flash attention on CPUs), in autograd Functions that fold simulated ranks
into the batch dim; SDPA, where neither the logsumexp is needed nor a torch.func transform runs
(SDPA has no batching rule: it would run once per rank); or the formula.

Attention over keys that are split into blocks is computed block by block: each block gives its
softmax and logsumexp, `functron.ops.softmax.merge` joins two of them, and `block_backward` takes
the logsumexp over all blocks, which makes each block's cotangents exact without the others (Liu et
al. 2023, ring attention; Dao et al. 2022).

Document and window masks, which may differ between ranks, and score caps are one kernel on CUDA
(`functron.ops.flex_attention`). Elsewhere they exist for one chunk of queries and keys at a time
(`functron.ops.chunked_attention`), computed by a kernel or the formula.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from functron.core import compat
from functron.core.functions import Function
from functron.core.typing import Float, Tensor
from functron.ops.chunked_attention import (
    CHUNK,
    BlockCotangents,
    BlockResult,
    Visible,
    attend,
    attend_backward,
    chunked_block,
    chunked_block_backward,
)
from functron.ops.flex_attention import (
    MASKED_ATTENTION,
    MASKED_ATTENTION_BACKWARD,
    fold,
    laid_out,
    narrow,
    tests_of,
    unfold,
)
from functron.ops.operations import AUTO, Kernels, leading, upcast
from functron.ops.softmax import finite
from functron.program.recorder import active

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
) -> BlockResult:
    """softmax(scale q k^T + mask) v, and the logsumexp of the masked scores.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k: ``[batch, kv_heads, keys, head_dim]``; each key head serves heads / kv_heads consecutive
            query heads.
        v: as `k`; its width may differ.
        visible: which keys each query sees; None for all. Memory is then that of one chunk at most.
        causal: also mask keys after the query, by their positions in this block.
        scale: of the scores.
        cap: scores s become cap tanh(s / cap); 0: unchanged.
        kernels: of ``"attention"``: one kernel for masks and caps (if chosen explicitly, an op that
            on CPUs is the formula); of ``"softmax"``: for masked blocks that no other kernel takes
            (if chosen explicitly, all masked ones); and of ``"lse_merge"``.

    Returns:
        ``(out, lse)`` in q's dtype and in float32 at least. Queries that see no key give 0 and
        -inf. No collectives.
    """
    chosen = implementation(q, k, v, visible, cap=cap, kernels=kernels)
    if chosen.name == "flex":
        return MASKED_ATTENTION(*laid_out(q, k, v), *tests_of(q, k, visible), causal, scale, cap)
    if chosen.name == "formula":
        fn = functools.partial(attend, kernels=kernels, cap=cap)
        return chunked_block(q, k, v, visible, causal, scale, fn, kernels)
    if visible is not None:
        return chunked_block(q, k, v, visible, causal, scale, _attend, kernels)
    both: Any = _Flash.apply(q, k, v, None, causal, scale, chosen.name)
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
) -> BlockCotangents:
    """This block's part of the cotangents of q, k and v.

    Args:
        cotangent: of the result over all blocks.
        q, k, v, visible, causal, scale, cap, kernels: as in `block`.
        out: the result over all blocks, in q's dtype.
        lse: the logsumexp over all blocks; any huge number for rows that do not count.

    Returns:
        ``(dq, dk, dv)``, dk and dv summed over the query heads that share them, in the dtypes of q,
        k and v. The cotangent of a query is the sum of dq over its blocks. No collectives.
    """
    operands = (cotangent, q, k, v, out, lse)
    chosen = implementation(q, k, v, visible, cap=cap, kernels=kernels)
    if chosen.name == "flex":
        laid = laid_out(cotangent.to(q.dtype), q, k, v, out)
        return MASKED_ATTENTION_BACKWARD(
            *laid, lse, None, *tests_of(q, k, visible), causal, scale, cap
        )
    if chosen.name == "formula":
        backward = functools.partial(attend_backward, kernels=kernels, cap=cap)
        return chunked_block_backward(*operands, visible, causal, scale, backward)
    if visible is not None:
        return chunked_block_backward(*operands, visible, causal, scale, _attend_backward)
    grads: Any = _FlashBackward.apply(*operands, None, causal, scale, chosen.name)
    return grads


def _attend(q, k, v, hidden, scale) -> Any:
    return _Flash.apply(q, k, v, hidden, False, scale, "flash")


def _attend_backward(cotangent, q, k, v, out, lse, hidden, scale) -> Any:
    # as in _Flash.backward
    operands = (cotangent, q, k, v, out, finite(lse))
    return _FlashBackward.apply(*operands, hidden, False, scale, "flash")


KernelName = Literal["sdpa", "cudnn", "flash", "flex", "formula"]


@dataclass(frozen=True)
class Implementation:
    """The kernel that computes an attention; `implementation` chooses it.

    Attributes:
        name: ``"cudnn"`` and ``"flash"`` are kernels of torch that give the logsumexp (the latter
            also on CPUs, where it computes masked blocks chunk by chunk); ``"flex"`` is one kernel
            for all masks and caps, torch's FlexAttention; ``"sdpa"`` is
            `torch.nn.functional.scaled_dot_product_attention`, without logsumexp; ``"formula"`` is
            written in plain operations, in chunks.
        reason: why it was chosen, and why no faster one.
    """

    name: KernelName
    reason: str


@dataclass(frozen=True)
class Gpu:
    """The facts besides the operands that the choice of a kernel depends on.

    Attributes:
        capability: compute capability of the device, such as (9, 0).
        cudnn: the version of cuDNN as torch gives it, such as 91900; 0 where it is missing or
            disabled for attention (`torch.backends.cuda.enable_cudnn_sdp`).
        flash: the FlashAttention behind torch's operation: "FA2", or the one activated by
            `torch.nn.attention.activate_flash_attention_impl`.
        deterministic: whether `torch.use_deterministic_algorithms` is on.
        triton: whether Triton is installed.
    """

    capability: tuple[int, int]
    cudnn: int = 0
    flash: str = "FA2"
    deterministic: bool = False
    triton: bool = True


def gpu(device: torch.device) -> Gpu | None:
    """The facts of a GPU of CUDA and of this process; None where torch has none to ask."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()
    return Gpu(
        torch.cuda.get_device_capability(device),
        (torch.backends.cudnn.version() or 0) if allowed else 0,
        torch.nn.attention.current_flash_attention_impl() or "FA2",
        torch.are_deterministic_algorithms_enabled(),
        importlib.util.find_spec("triton") is not None,
    )


compat.mark_constant(gpu)


def implementation(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    visible: Visible | None = None,
    *,
    cap: float = 0.0,
    logsumexp: bool = True,
    kernels: Kernels = AUTO,
    on: Gpu | None = None,
) -> Implementation:
    """The kernel that computes this attention, here and now, and why no faster one does.

    `attention` and `block`, of which all other attention is made (context parallelism, simulated
    ranks), call it. It depends on shapes, dtypes and devices, and on the transforms of torch.func
    and the trace that are active, but not on values.

    Args:
        q, k, v, visible, cap, kernels: as in `block`.
        logsumexp: whether it is needed, as in `block` but not in `attention`.
        on: the GPU to choose for; None for that of q (or, where torch has none, an unknown one).
    """
    on = on or gpu(q.device)
    if cap or visible is not None:
        why_not = _no_flex(q, k, v, kernels, on)
        if visible is not None and visible.pairs is not None:
            why_not = "no kernel takes pairs of queries and keys"
        if not why_not:
            return Implementation("flex", "one kernel for masks and caps")
        if cap or q.device.type != "cpu" or kernels.takes("softmax", q, v):
            return Implementation("formula", why_not)
    kind = q.device.type
    bare = not (logsumexp or compat.transforms_active())
    if bare and torch.compiler.is_compiling():
        return Implementation("sdpa", "dynamo knows no Functions with a rule for forward mode")
    if kind == "cpu":
        if active() is not None and not compat.flash_attention_traces(q.dtype):
            version = f"torch {torch.__version__}"
            return Implementation("formula", f"{version} cannot trace it in {_of(q.dtype)}")
        if bare and q.shape[1] == k.shape[1] and q.shape[-1] == v.shape[-1]:
            return Implementation("sdpa", "torch's choice for a CPU")
        return Implementation("flash", "the kernel of a CPU")
    why_not = f"no flash attention for {kind}" if kind != "cuda" else _no_flash(q, v, on)
    if why_not:
        return Implementation("sdpa" if bare else "formula", why_not)
    if on is None:
        return Implementation("flash", "no GPU here to ask for a faster kernel")
    if on.flash != "FA2":
        return Implementation("flash", f"{on.flash}, which the process activated")
    slower = _no_cudnn(q, k, v, on)
    if slower:
        return Implementation("flash", f"{on.flash}, not cuDNN: {slower}")
    return Implementation("cudnn", f"the fastest on compute capability {on.capability}")


_HALF = (torch.float16, torch.bfloat16)


def _of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_flash(q: Tensor, v: Tensor, on: Gpu | None) -> str:
    """Why no flash kernel of a GPU computes a block; empty where one does."""
    width = max(q.shape[-1], v.shape[-1])
    if q.dtype not in _HALF:
        return f"flash attention wants float16 or bfloat16, and this is {_of(q.dtype)}"
    if width > 256:
        return f"flash attention wants heads of 256 dims at most, and these have {width}"
    if on is not None and on.capability < (8, 0):
        return f"flash attention wants compute capability 8.0, and this GPU has {on.capability}"
    return ""


def _no_flex(q: Tensor, k: Tensor, v: Tensor, kernels: Kernels, on: Gpu | None) -> str:
    """Why FlexAttention does not compute a masked block; empty where it does."""
    if kernels.wants_reference("attention"):
        return "the reference is asked for"
    if kernels.by_op.get("attention") == "kernel":
        return ""
    if kernels.by_op.get("softmax") == "kernel":
        return "chunks by functron's softmax kernel are asked for"
    if q.device.type != "cuda":
        return f"no kernel for {q.device.type} takes masks and caps at once"
    widths = q.shape[-1], v.shape[-1]
    if on is not None and not (on.triton and on.capability >= (8, 0)):
        return "FlexAttention wants Triton and compute capability 8.0"
    if q.dtype not in _HALF:
        return f"FlexAttention has no tensor cores in {_of(q.dtype)}"
    if min(widths) < 16 or max(widths) > 256:
        return f"FlexAttention wants heads of 16 to 256 dims, and these have {widths}"
    if max(q.shape[2], k.shape[2]) <= CHUNK:
        return f"{CHUNK} queries and keys are one chunk of the formula"
    if compat.pushing_forward():
        return "forward-mode differentiation is of the formula"
    return ""


def _no_cudnn(q: Tensor, k: Tensor, v: Tensor, on: Gpu) -> str:
    """Why cuDNN does not compute a block; empty where it does.

    These are torch's conditions (``sdp_utils.cpp``, 2.11 to 2.13): what it can, and where it is
    both right for all lengths and faster, which is what torch's own choice goes by.
    """
    major, minor = on.capability
    widest = 256 if on.capability == (9, 0) else 128
    if not on.cudnn:
        return "there is none, or this process forbids it"
    if on.cudnn <= 91500:
        return f"its version is {on.cudnn}, and lengths that 128 does not divide want 9.15.1"
    if major not in (9, 10) or minor not in (0, 3):
        return f"it is no faster on compute capability {on.capability}"
    if on.deterministic:
        return "its gradients are not deterministic"
    if max(q.shape[-1], v.shape[-1]) > widest:
        return f"it wants heads of {widest} dims at most here"
    if k.shape[2] == 1 or max(q.shape[:2]) > 65535:
        return "it wants several keys, and no more than 65535 samples and heads"
    return ""


def _wide(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _pad_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands with heads of one width: zeros add nothing to scores, and come out as such."""
    width = max(q.shape[-1], v.shape[-1])
    if q.device.type == "cuda":
        width = -(-width // 8) * 8
    return _wide(q, width), _wide(k, width), _wide(v, width)


def _fold_groups(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands with the heads of a group for heads, which read one head of keys, not copied."""
    batch, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    if group == 1:
        return q, k, v
    q = q.reshape(batch * kv_heads, group, *q.shape[2:])
    k, v = (x.reshape(batch * kv_heads, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in (k, v))
    return q, k, v


def _bias(hidden: Tensor | None, q: Tensor, groups: int = 1) -> Tensor | None:
    """The bias that a kernel adds to the scores: -inf where hidden; of each group of a sample."""
    if hidden is None:
        return None
    if hidden.shape[0] > 1 and groups > 1:
        hidden = hidden.repeat_interleave(groups, 0)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(
        hidden, float("-inf")
    )


def _by_bands(q: Tensor, k: Tensor, hidden: Tensor | None, causal: bool) -> bool:
    """Whether a CPU skips what is hidden; traced programs say torch's operation instead."""
    traced = active() is not None or torch.compiler.is_compiling()
    return causal and hidden is None and not traced and compat.skips_hidden(q, k)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    causal: bool,
    scale: float,
    name: KernelName,
) -> tuple[Tensor, Tensor]:
    operands = _pad_widths(q, k, v)
    if _by_bands(q, k, hidden, causal):
        out, lse = compat.causal_flash(*operands, scale)
    elif q.device.type == "cpu":
        bias = _bias(hidden, q)
        out, lse = compat.FLASH(*operands, 0.0, causal, attn_mask=bias, scale=scale)
    elif name == "cudnn":
        operands = laid_out(*operands)
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            *operands, None, True, 0.0, causal, False, scale=scale
        )[:2]
        lse = lse.reshape(q.shape[:3])
    else:
        out, lse = _aten._scaled_dot_product_flash_attention(
            *operands, 0.0, causal, False, scale=scale
        )[:2]
    if hidden is not None:  # the kernel says 0
        lse = lse.masked_fill(hidden.all(-1), float("-inf"))
    return narrow(out, v), lse


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
    name: KernelName,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _pad_widths(q, k, v)
    cotangent, out = (_wide(x, wide[2].shape[-1]) for x in (cotangent, out))
    if _by_bands(q, k, hidden, causal):
        dq, dk, dv = compat.causal_flash_backward(cotangent, *wide, out, lse, scale)
    elif q.device.type == "cpu":
        # it takes shared heads; below float32 it would round each head's part of their sum
        apart = q.dtype not in (torch.float32, torch.float64) and k.shape[1] != q.shape[1]
        wide = _fold_groups(*wide) if apart else wide
        given, made = (x.reshape(wide[0].shape) for x in (cotangent, out))
        bias = _bias(hidden, q, wide[0].shape[0] // q.shape[0])
        dq, dk, dv = compat.FLASH_BACKWARD(
            given, *wide, made, lse.reshape(wide[0].shape[:-1]), 0.0, causal,
            attn_mask=bias, scale=scale,
        )  # fmt: skip
        if apart:
            dk, dv = (upcast(x).sum(1).to(x.dtype) for x in (dk, dv))
            dq, dk, dv = (
                x.reshape(*y.shape[:3], x.shape[-1])
                for x, y in zip((dq, dk, dv), (q, k, v), strict=True)
            )
    elif name == "cudnn":
        # it wants the layout of forward's result; without dropout it reads no random state, but
        # that must be there
        given, *wide, made = laid_out(cotangent, *wide, out)
        nothing = torch.zeros(1, dtype=torch.int64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            given, *wide, made, lse.contiguous().unsqueeze(-1), nothing, nothing, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip
    else:
        # without dropout the kernel reads neither the lengths of a packed batch nor random state
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            cotangent, *wide, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
            nothing, nothing, scale=scale,
        )  # fmt: skip
    return narrow(dq, q), narrow(dk, k), narrow(dv, v)


def _fold_samples(function: Any, size: int, in_dims: tuple, operands: tuple) -> tuple:
    """The vmap rule of both functions: simulated ranks among the samples."""
    *tensors, hidden, causal, scale, name = operands
    *dims, dim, _, _, _ = in_dims
    folded = [fold(x, d, size) for x, d in zip(tensors, dims, strict=True)]
    if hidden is not None and (dim is not None or hidden.shape[0] > 1):
        ranks, batch = leading(hidden, dim, size), folded[0].shape[0] // size
        hidden = ranks.expand(size, batch, *ranks.shape[2:]).flatten(0, 1)
    out = unfold(function.apply(*folded, hidden, causal, scale, name), size)
    return out, (0,) * len(out)


class _Flash(Function):
    """(out, logsumexp) of torch's flash attention; cotangents of both count."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*operands):  # by this name partition finds its module
        return _forward(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, causal, scale, name = inputs
        ctx.static, ctx.name = (causal, scale), name
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        q, k, v, hidden, out, lse = _saved(ctx)
        d_out, d_lse = cotangents
        if d_out is None and d_lse is None:
            return (None,) * 7
        if d_lse is None:  # as in training, where only merged results are differentiated
            # the logsumexp of a row that sees nothing must be finite: its scores are all -inf
            known = lse if hidden is None else finite(lse)
            grads: Any = _FlashBackward.apply(
                d_out, q, k, v, out, known, hidden, *ctx.static, ctx.name
            )
            return *grads, None, None, None, None
        d_out = torch.zeros_like(out) if d_out is None else d_out
        pullback = torch.func.vjp(_formula(hidden, *ctx.static), q, k, v)[1]
        return *pullback((d_out, d_lse)), None, None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        *primals, hidden = ctx.saved_tensors[:4]
        return _push(_formula(hidden, *ctx.static), primals, tangents)

    @staticmethod
    def vmap(info, in_dims, *operands):
        return _fold_samples(_Flash, info.batch_size, in_dims, operands)


class _FlashBackward(Function):
    """The cotangents of q, k and v, as a function of everything they depend on."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*operands):  # by this name partition finds its module
        return _backward(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, causal, scale, _ = inputs
        ctx.static = causal, scale
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        *saved, hidden = _saved(ctx)
        pullback = torch.func.vjp(_formula_backward(hidden, *ctx.static), *saved)[1]
        return *pullback(tuple(cotangents)), None, None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        *primals, hidden = ctx.saved_tensors
        return _push(_formula_backward(hidden, *ctx.static), primals, tangents)

    @staticmethod
    def vmap(info, in_dims, *operands):
        return _fold_samples(_FlashBackward, info.batch_size, in_dims, operands)


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
    k: Float[Tensor, "batch keys kv_heads head_dim"],
    v: Float[Tensor, "batch keys kv_heads value_dim"],
    *,
    causal: bool,
    scale: float | None = None,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """softmax(scale q k^T) v per head, each query seeing keys up to its own position.

    Neither keys nor values are copied for the query heads that share them.

    Args:
        q: ``[batch, seq, heads, head_dim]``.
        k: ``[batch, keys, kv_heads, head_dim]``; each key head serves heads / kv_heads consecutive
            query heads.
        v: as `k`; its width may be another.
        causal: mask keys after the query.
        scale: of the scores; None for 1 / sqrt(head_dim).

    Returns:
        ``[batch, seq, heads, value_dim]`` in q's dtype. No collectives.
    """
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    by = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    sdpa = implementation(q, k, v, logsumexp=False).name == "sdpa"
    if sdpa and not _by_bands(q, k, None, causal):
        out = _sdpa(q, k, v, causal, by)
    else:
        out, _ = block(q, k, v, causal=causal, scale=by)
    return out.transpose(-3, -2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    operands = _pad_widths(q, k, v)
    shared = q.shape[1] > k.shape[1]
    # flash and cuDNN's kernels read shared heads; where these are not taken, SDPA copies them
    native = shared and (q.device.type == "cpu" or not _no_flash(q, v, gpu(q.device)))
    if shared and not native:
        operands = _fold_groups(*operands)
    options: dict[str, Any] = {"enable_gqa": True} if native else {}
    out = F.scaled_dot_product_attention(*operands, is_causal=causal, scale=scale, **options)
    return narrow(out, v).reshape(*q.shape[:3], v.shape[-1])
