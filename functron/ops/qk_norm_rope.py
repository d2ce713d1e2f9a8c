"""RMSNorm of queries and keys per head, and their rotary embedding: ``kernels/qk_norm_rope.cu``.

One launch reads and writes every element of q and k once, as separate tensors or as views of one
projection's result. Without scales nothing is normalised, and backward needs neither q nor k.
`qkv_norm_rope` takes the result of a joint projection, and its backward makes one gradient of it.

`QK_NORM_ROPE` makes new tensors; `QK_NORM_ROPE_` overwrites q and k, for generation and wherever
nothing is differentiated. Backward always makes new tensors, as it cannot know whether its
cotangents are used elsewhere: the tape adds to them, keeps them (hooks, ``retain_grad``) and shares
them (one expanded tensor may be the gradient of q and of k), and ``grad(grad)`` saves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from functron.core import compat
from functron.core.typing import Float, Tensor
from functron.ops.norms import rms_norm_rows, rms_norm_rows_backward
from functron.ops.operations import (
    BACKWARD_THREADS,
    PACK_BYTES,
    Gradient,
    Launch,
    define,
    leading,
    map_one_by_one,
    packable,
    summed_rows,
    type_name,
    upcast,
    vector,
)
from functron.transforms.custom_vjp import custom_vjp

_BLOCKS = (256, 128, 64, 32)  # threads that a block may have
_WARP = 32
_MOST_TOKENS = 2**31
_JOINED_DIMS = 4  # at least: sequence, key heads, what belongs to each, head

_ARGUMENTS = (
    "Tensor? q_scale, Tensor? k_scale, Tensor cosine, Tensor sine, float eps, "
    "bool zero_centered, bool interleaved"
)


def _check(q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> None:
    seq, pairs = cosine.shape[-2:]
    same = q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not same or q.dim() < 3 or q.dtype != k.dtype:
        raise ValueError(
            f"qk_norm_rope: got q {tuple(q.shape)} of {q.dtype} and k {tuple(k.shape)} of "
            f"{k.dtype}; wanted [batch, seq, heads, head_dim] of both, but for heads the same"
        )
    if cosine.shape != sine.shape or seq != q.shape[-3] or 2 * pairs > q.shape[-1]:
        raise ValueError(
            f"qk_norm_rope: got tables {tuple(cosine.shape)} and {tuple(sine.shape)} for q "
            f"{tuple(q.shape)}; wanted [seq, pairs] or [batch, seq, pairs], of at most half as "
            "many pairs as a head has dims"
        )


# ---- in torch's operations ----------------------------------------------------------------------


class _RotatedHalves(torch.autograd.Function):
    """The halves of x rotated by angles with these cosines and sines, for torch's tape alone.

    Four passes over memory where the formula takes seven; backward rotates back.
    """

    @staticmethod
    def forward(ctx, x, cosine, sine):
        ctx.save_for_backward(cosine, sine)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        (first, second), (left, right) = x.chunk(2, -1), out.chunk(2, -1)
        torch.mul(first, cosine, out=left).addcmul_(second, sine, value=-1)
        torch.mul(second, cosine, out=right).addcmul_(first, sine)
        return out

    @staticmethod
    def backward(ctx, *cotangents):
        cosine, sine = ctx.saved_tensors
        return _RotatedHalves.apply(cotangents[0], cosine, -sine), None, None


def rotate_pairs(
    x: Float[Tensor, "*batch seq heads head_dim"],
    cosine: Float[Tensor, "*rows seq pairs"],
    sine: Float[Tensor, "*rows seq pairs"],
    *,
    interleaved: bool,
) -> Float[Tensor, "*batch seq heads head_dim"]:
    """Each pair (a, b) of a head's dims as (a cos - b sin, b cos + a sin), in torch's operations.

    Args:
        x: ``[..., seq, heads, 2 pairs]``.
        cosine, sine: ``[seq, pairs]``, or with dims for samples before.
        interleaved: pairs are dims 2i and 2i + 1; otherwise i and i + half of them.
    """
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)
    plain = x.dtype == cosine.dtype in (torch.float32, torch.float64) and not interleaved
    fixed = not (cosine.requires_grad or sine.requires_grad)
    if plain and fixed and compat.taped_alone(x):
        rotated: Any = _RotatedHalves.apply(x, cosine, sine)
        return rotated
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cosine.shape[-1]
    tables = cosine.to(x.dtype), sine.to(x.dtype)
    rotated = rotate_pairs(x[..., :size], *tables, interleaved=interleaved) if size else x[..., :0]
    return torch.cat([rotated, x[..., size:]], -1)


def _one(x, scale, cosine, sine, eps, center, interleaved) -> Tensor:
    wide = upcast(x)
    wide = wide if scale is None else rms_norm_rows(wide, scale, eps, center)
    return _rotate(wide, cosine, sine, interleaved).to(x.dtype).contiguous()


def _reference(q, k, q_scale, k_scale, cosine, sine, *rest) -> tuple[Tensor, Tensor]:
    _check(q, k, cosine, sine)
    return _one(q, q_scale, cosine, sine, *rest), _one(k, k_scale, cosine, sine, *rest)


def _one_backward(d, x, scale, cosine, sine, eps, center, interleaved) -> tuple[Tensor, Tensor]:
    g = _rotate(upcast(d), cosine, -sine, interleaved)
    if scale is None:
        return g.to(d.dtype).contiguous(), d.new_empty(0)
    dx, d_scale = rms_norm_rows_backward(g, upcast(x), scale, eps, center)
    return dx.to(d.dtype).contiguous(), summed_rows(d_scale).to(scale.dtype)


def _backward(
    d_q, d_k, q, k, q_scale, k_scale, cosine, sine, *rest
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dq_scale = _one_backward(d_q, q, q_scale, cosine, sine, *rest)
    dk, dk_scale = _one_backward(d_k, k, k_scale, cosine, sine, *rest)
    return dq, dk, dq_scale, dk_scale


def _pieces(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, with one dim of heads, of a joint projection."""
    return qkv[..., :-2, :].flatten(-3, -2), qkv[..., -2, :], qkv[..., -1, :]


def _check_joined(qkv: Tensor, cosine: Tensor, sine: Tensor) -> None:
    if qkv.dim() < _JOINED_DIMS or qkv.shape[-2] <= 2:
        raise ValueError(
            f"qkv_norm_rope: got {tuple(qkv.shape)}; wanted [batch, seq, kv_heads, group + 2, "
            "head_dim]: of each key head its queries, itself and its value"
        )
    _check(qkv[..., 0, :], qkv[..., -2, :], cosine, sine)


def _joined_reference(qkv, *rest) -> tuple[Tensor, Tensor, Tensor]:
    *settings, values = rest
    _check_joined(qkv, *settings[2:4])
    q, k, v = _pieces(qkv)
    copy = v.clone(memory_format=torch.contiguous_format) if values else v.new_empty(0)
    return *_reference(q, k, *settings), copy


def _joined_backward(d_q, d_k, d_v, qkv, q_scale, k_scale, *rest) -> tuple[Tensor, Tensor, Tensor]:
    q, k = (None, None) if qkv is None else _pieces(qkv)[:2]
    dq, dk, dq_scale, dk_scale = _backward(d_q, d_k, q, k, q_scale, k_scale, *rest)
    groups = dq.unflatten(-2, (dk.shape[-2], -1))
    return torch.cat([groups, dk.unsqueeze(-2), d_v.unsqueeze(-2)], -2), dq_scale, dk_scale


# ---- by kernels ---------------------------------------------------------------------------------


def _heads(x: Tensor | None, like: Tensor) -> Tensor:
    """``[batch, seq, heads, head_dim]`` with a contiguous last dim; a view where it can be."""
    x = like if x is None else x
    x = x.reshape(x.shape[:-3].numel(), *x.shape[-3:]) if x.dim() != 4 else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(like: Tensor, *tables: Tensor) -> list[Tensor]:
    """Tables with dims for the batch and the sequence, both of like's dtype or of float32."""
    if any(table.dtype != like.dtype for table in tables):
        tables = tuple(table.float() for table in tables)
    batched = [
        t.expand(*like.shape[:-3], *t.shape[-2:]).reshape(like.shape[:-3].numel(), *t.shape[-2:])
        for t in tables
    ]
    together = {t.stride() for t in batched}
    dense = len(together) == 1 and all(t.stride(-1) == 1 for t in batched)
    return batched if dense else [t.contiguous() for t in batched]


def _lanes(head_dim: int, pairs: int, element_size: int) -> int:
    """The number of threads per head; more than a warp for heads too long for the kernels."""
    size = PACK_BYTES // element_size
    units = -(-pairs // size) + -(-(head_dim - 2 * pairs) // (2 * size))
    return 1 << max(0, units - 1).bit_length()


def _block(heads: int, lanes: int) -> int:
    """The number of threads of a block: the most with at most a tenth idle in the last turn."""
    for threads in _BLOCKS:
        groups = threads // lanes
        if heads >= 0.9 * groups * -(-heads // groups):
            return threads
    return _BLOCKS[-1]


def _fits(q: Tensor, cosine: Tensor) -> bool:
    tokens = q.shape[:-2].numel()
    return (
        tokens < _MOST_TOKENS
        and _lanes(q.shape[-1], cosine.shape[-1], q.element_size()) <= _WARP
        and q.shape[-1] > 0
    )


class _Operands(NamedTuple):
    """The operands of both kernels.

    Attributes:
        heads: ``[batch, seq, heads, head_dim]`` each.
        weights: scales, or None.
        wide: of each scale, whether it is float32 where heads are narrower.
        tables: cosines and sines.
        lanes: threads that share a head.
        rest: the last arguments of either kernel: sizes, strides and settings.
    """

    heads: list[Tensor]
    weights: list[Tensor | None]
    wide: list[int]
    tables: list[Tensor]
    lanes: int
    rest: list[int | float]


def _operands(
    tensors: Sequence, q_scale, k_scale, cosine, sine, eps, center, interleaved
) -> _Operands:
    """The operands of a launch; the first tensor stands in for missing ones."""
    tables = _tables(tensors[0], cosine, sine)
    like, pairs = _heads(tensors[0], tensors[0]), cosine.shape[-1]
    heads = [like, *(_heads(x, like) for x in tensors[1:])]
    lanes = _lanes(like.shape[-1], pairs, like.element_size())
    scales = [(None, 0) if s is None else vector(like, s) for s in (q_scale, k_scale)]
    weights, wide = [w for w, _ in scales], [each for _, each in scales]
    size = PACK_BYTES // like.element_size()
    packed = (
        pairs % size == 0
        and packable(like.shape[-1], *heads, *weights)
        and packable(pairs, *[table for table in tables if pairs])
    )
    rest = [
        like.shape[3], pairs, *[stride for x in heads for stride in x.stride()[:3]],
        *tables[0].stride()[:2], *wide, int(tables[0].dtype != like.dtype), int(interleaved), lanes,
        int(packed), float(center), eps,
    ]  # fmt: skip
    return _Operands(heads, weights, wide, tables, lanes, rest)


def _into(
    launch: Launch, q, k, out: Sequence[Tensor | None], *settings: Any, group: int = 0
) -> None:
    """Write queries, keys and, if `group` is not 0, values to `out` by the forward kernel.

    With `group` q has all heads, `group` queries of each key head one after another, and k is not
    read.
    """
    given = _operands((q, k, *out), *settings)
    q, k, q_out, k_out, values = given.heads
    launch(
        "qk_norm_rope", "qk_norm_rope_forward", q.shape[:2].numel(),
        _block(q.shape[2] + (0 if group else k.shape[2]), given.lanes),
        q, k, q_out, k_out, None if out[2] is None else values, *given.weights, *given.tables,
        *q_out.shape[:3], k_out.shape[2], group, *given.rest,
        defines={"ELEMENT": type_name(q, "qk_norm_rope")},
    )  # fmt: skip


def _kernel(launch: Launch, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, rest[2], rest[3])
    if not (q.numel() + k.numel() and _fits(q, rest[2])):
        return _reference(q, k, *rest)
    out = q.new_empty(q.shape), k.new_empty(k.shape)
    _into(launch, q, k, (*out, None), *rest)
    return out


def _in_place_kernel(launch: Launch, q: Tensor, k: Tensor, *rest: Any) -> None:
    _check(q, k, rest[2], rest[3])
    views = all(x.stride(-1) == 1 and x.dim() == 4 for x in (q, k))
    if views and q.numel() + k.numel() and _fits(q, rest[2]):
        _into(launch, q, k, (q, k, None), *rest)
    else:
        _copy(q, k, _kernel(launch, q, k, *rest))


def _copy(q: Tensor, k: Tensor, results: Sequence[Tensor]) -> None:
    q.copy_(results[0])
    k.copy_(results[1])


def _joined_kernel(launch: Launch, qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *settings, values = rest
    _check_joined(qkv, *settings[2:4])
    if not (qkv.numel() and _fits(qkv[..., 0, :], settings[2])):
        return _joined_reference(qkv, *rest)
    q, k, v = _joined_fake(qkv, *rest)
    flat, group = qkv.flatten(-3, -2), qkv.shape[-2] - 2
    _into(launch, flat, flat, (q, k, v if values else None), *settings, group=group)
    return q, k, v


def _backward_kernel(
    launch: Launch, d_q, d_k, q, k, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not (d_q.numel() + d_k.numel() and _fits(d_q, settings[2])):
        return _backward(d_q, d_k, q, k, *settings)
    out = d_q.new_empty(d_q.shape), d_k.new_empty(d_k.shape)
    return *out, *_backward_into(launch, (d_q, d_k, None), (q, k), out, *settings)


def _joined_backward_kernel(
    launch: Launch, d_q, d_k, d_v, qkv, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if not (d_q.numel() and _fits(d_q, settings[2])):
        return _joined_backward(d_q, d_k, d_v, qkv, *settings)
    group = d_q.shape[-2] // d_k.shape[-2]
    out = d_q.new_empty(*d_k.shape[:-1], group + 2, d_q.shape[-1])
    flat, read = out.flatten(-3, -2), None if qkv is None else qkv.flatten(-3, -2)
    given = d_q, d_k, d_v
    d_scales = _backward_into(launch, given, (read, read), (flat, flat), *settings, group=group)
    return out, *d_scales


def _backward_into(
    launch: Launch, given: Sequence, read: Sequence, out: Sequence[Tensor], *settings: Any,
    group: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of queries and keys, or of all heads (see `_into`), to `out`; of scales."""
    # without a scale `read` is not read
    own = _operands((*given, *read, *out), *settings)
    d_q, d_k, *_ = own.heads
    block = _block(d_q.shape[2] + d_k.shape[2] * (2 if group else 1), own.lanes)
    blocks, scales = d_q.shape[:2].numel(), settings[:2]
    columns, partials, shared_bytes = 4 * own.lanes * PACK_BYTES // d_q.element_size(), None, 0
    if any(weights is not None for weights in own.weights):
        blocks = min(blocks, launch.processors(d_q.device) * (BACKWARD_THREADS // block))
        partials = d_q.new_empty(blocks, columns, dtype=torch.float32)
        shared_bytes = 4 * columns * block // own.lanes
    defines = {"ELEMENT": type_name(d_q, "qk_norm_rope_backward")}
    launch(
        "qk_norm_rope", "qk_norm_rope_backward", blocks, block,
        *own.heads, *own.weights, *own.tables, partials, *d_q.shape[:3], d_k.shape[2], group,
        *own.rest, defines=defines, shared_bytes=shared_bytes,
    )  # fmt: skip
    sums = [
        d_q.new_empty(0) if scale is None
        else scale.new_empty(scale.shape, dtype=torch.float32 if wide else d_q.dtype)
        for scale, wide in zip(scales, own.wide, strict=True)
    ]  # fmt: skip
    if partials is not None:
        pairs, interleaved = settings[2].shape[-1], settings[-1]
        launch(
            "qk_norm_rope", "qk_norm_rope_scale_gradient", -(-columns // 32),
            32 * min(32, blocks), partials, *[one if one.numel() else None for one in sums],
            blocks, d_q.shape[3], pairs, *own.wide, int(interleaved), own.lanes, defines=defines,
        )  # fmt: skip
    dq_scale, dk_scale = (
        one if scale is None else one.to(scale.dtype)
        for one, scale in zip(sums, scales, strict=True)
    )
    return dq_scale, dk_scale


# ---- registration -------------------------------------------------------------------------------


def _batched_tables(size: int, dims: Sequence, tables: Sequence[Tensor], like: Tensor) -> list:
    """Tables for `like`, whose first dim is the mapped one."""
    if all(dim is None and table.dim() == 2 for table, dim in zip(tables, dims, strict=True)):
        return list(tables)
    ahead = [leading(table, dim, size) for table, dim in zip(tables, dims, strict=True)]
    missing = like.dim() - 1 - ahead[0].dim()
    return [table[(slice(None), *[None] * missing)] for table in ahead]


def _batch(num_mapped: int, scales: int) -> Callable:
    """The vmap rule of an op whose first operands are mapped, and whose tables may be.

    Args:
        num_mapped: number of the first operands.
        scales: position of the two scales, which the two tables follow. In a backward more than
            `num_mapped` precede them, which are read only if there are scales.
    """

    def rule(size: int, in_dims: tuple, args: tuple, op: Callable) -> tuple:
        # scales of their own, or sums of scales, which are of each alone
        alone = in_dims if scales == num_mapped else args
        if any(each is not None for each in alone[scales : scales + 2]):
            return map_one_by_one(size, in_dims, args, op)
        mapped = zip(args[:num_mapped], in_dims[:num_mapped], strict=True)
        given, at = [leading(x, dim, size) for x, dim in mapped], scales + 2
        like = given[0][..., 0, :] if scales == 1 else given[0]  # of joined projections
        tables = _batched_tables(size, in_dims[at : at + 2], args[at : at + 2], like)
        results = op(*given, *args[num_mapped:at], *tables, *args[at + 2 :])
        return results, tuple(None if x.dim() == 1 else 0 for x in results)  # empty ones

    return rule


def _scale_fakes(like: Tensor, *scales: Tensor | None) -> list[Tensor]:
    return [like.new_empty(0) if s is None else s.new_empty(s.shape) for s in scales]


def _backward_fake(d_q, d_k, q, k, q_scale, k_scale, *rest) -> tuple[Tensor, ...]:
    scales = _scale_fakes(d_q, q_scale, k_scale)
    return d_q.new_empty(d_q.shape), d_k.new_empty(d_k.shape), *scales


def _joined_fake(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *before, kv_heads, slots, dim = qkv.shape
    q = qkv.new_empty(*before, kv_heads * (slots - 2), dim)
    k = qkv.new_empty(*before, kv_heads, dim)
    return q, k, qkv.new_empty(k.shape if rest[-1] else (0,))


def _joined_backward_fake(d_q, d_k, d_v, qkv, q_scale, k_scale, *rest) -> tuple[Tensor, ...]:
    slots = d_q.shape[-2] // d_k.shape[-2] + 2
    scales = _scale_fakes(d_q, q_scale, k_scale)
    return d_q.new_empty(*d_k.shape[:-1], slots, d_k.shape[-1]), *scales


def _of_scales(scales: Sequence, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
    """The cotangents of scales, None of those that are not there."""
    return [None if s is None else d for s, d in zip(scales, cotangents, strict=True)]


QK_NORM_ROPE_BACKWARD = define(
    f"qk_norm_rope_backward(Tensor d_q, Tensor d_k, Tensor? q, Tensor? k, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    reference=_backward,
    fake=_backward_fake,
    batch=_batch(2, scales=4),
    gradient=_backward,
)
"""The cotangents of q, k and the scales; of a scale that is None, an empty tensor."""


def _saved(args: tuple, outputs: tuple) -> tuple:
    q, k, q_scale, k_scale, *rest = args
    return (
        None if q_scale is None else q, None if k_scale is None else k, q_scale, k_scale, *rest,
    )  # fmt: skip


def _gradient(saved: Sequence, cotangents: tuple) -> tuple:
    dq, dk, *d_scales = QK_NORM_ROPE_BACKWARD(*cotangents, *saved)
    return dq, dk, *_of_scales(saved[2:4], d_scales), *[None] * 5


QK_NORM_ROPE = define(
    f"qk_norm_rope(Tensor q, Tensor k, {_ARGUMENTS}) -> (Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=lambda q, k, *rest: (q.new_empty(q.shape), k.new_empty(k.shape)),
    batch=_batch(2, scales=2),
    gradient=Gradient(save=_saved, backward=_gradient),
)
"""(q, k), normed where there is a scale and rotated: ``[batch, seq, heads, head_dim]`` each.

Tables of cos and sin are ``[seq, pairs]`` or ``[batch, seq, pairs]``, and are not differentiated;
the first 2 pairs dims of a head are rotated, pair i being dims (i, i + pairs), or (2i, 2i + 1)
where `interleaved`. Scales are ``[head_dim]``; `zero_centered` multiplies by 1 + scale.
"""

QK_NORM_ROPE_ = define(
    f"qk_norm_rope_(Tensor(a!) q, Tensor(b!) k, {_ARGUMENTS}) -> ()",
    kernel=_in_place_kernel,
    reference=lambda q, k, *rest: _copy(q, k, _reference(q, k, *rest)),
)
"""`QK_NORM_ROPE` in place; where q and k overlap each other the result is undefined."""

QKV_NORM_ROPE_BACKWARD = define(
    f"qkv_norm_rope_backward(Tensor d_q, Tensor d_k, Tensor d_v, Tensor? qkv, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=_joined_backward_kernel,
    reference=_joined_backward,
    fake=_joined_backward_fake,
    batch=_batch(3, scales=4),
    gradient=_joined_backward,
)
"""The cotangents of qkv and the scales; of a scale that is None, an empty tensor."""


def _joined_saved(args: tuple, outputs: tuple) -> tuple:
    qkv, q_scale, k_scale, *rest = args
    return None if q_scale is None and k_scale is None else qkv, q_scale, k_scale, *rest


def _joined_gradient(saved: Sequence, cotangents: tuple) -> tuple:
    *saved, values = saved
    d_q, d_k, d_v = cotangents
    d_v = d_v if values else torch.zeros_like(d_k)
    d_qkv, *d_scales = QKV_NORM_ROPE_BACKWARD(d_q, d_k, d_v, *saved)
    return d_qkv, *_of_scales(saved[1:3], d_scales), *[None] * 6


QKV_NORM_ROPE = define(
    f"qkv_norm_rope(Tensor qkv, {_ARGUMENTS}, bool values) -> (Tensor, Tensor, Tensor)",
    kernel=_joined_kernel,
    reference=_joined_reference,
    fake=_joined_fake,
    batch=_batch(1, scales=1),
    gradient=Gradient(save=_joined_saved, backward=_joined_gradient),
)
"""`QK_NORM_ROPE` of ``[batch, seq, kv_heads, group + 2, head_dim]``: of each key head its queries,
itself and its value. The third result has the values, or is empty without `values`."""


def qkv_norm_rope(
    qkv: Float[Tensor, "*batch kv_heads slots head_dim"],
    q_scale: Float[Tensor, " head_dim"] | None,
    k_scale: Float[Tensor, " head_dim"] | None,
    cosine: Float[Tensor, "*rows pairs"],
    sine: Float[Tensor, "*rows pairs"],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed where there is a scale and rotated, and values, of one projection.

    One launch, and one in backward, which makes a single gradient of the projection. Without scales
    qkv is not saved for it; with them values are a view of qkv, which is kept anyway.

    Args:
        qkv: ``[batch, seq, kv_heads, group + 2, head_dim]``.
        q_scale, k_scale, cosine, sine: as in `QK_NORM_ROPE`.
        settings: eps, zero_centered and interleaved.

    Returns:
        ``[batch, seq, heads, head_dim]``, and twice ``[batch, seq, kv_heads, head_dim]``.
    """
    args = qkv, q_scale, k_scale, cosine, sine
    if (q_scale is None and k_scale is None) or compat.pushing_forward():
        return QKV_NORM_ROPE(*args, *settings, True)

    def split(qkv, *rest):
        return *QKV_NORM_ROPE(qkv, *rest, *settings, False)[:2], qkv[..., -1, :]

    def forward(qkv, *rest):
        return split(qkv, *rest), (qkv, *rest)

    def backward(residuals, cotangents):
        d_qkv, *d_scales = QKV_NORM_ROPE_BACKWARD(*cotangents, *residuals, *settings)
        return d_qkv, *_of_scales(residuals[1:3], d_scales), None, None

    return custom_vjp(split, forward, backward)(*args)
