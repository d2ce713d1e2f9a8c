"""Softmax of attention scores: scaled, masked, with sinks, and for one of several blocks of keys.

s = scale x, -inf where hidden; lse = log(sum_j exp(s_j) + exp(sink)); p = exp(s - lse). It reads
scores once in their own dtype, and writes weights in it, where torch's operations make several
float32 copies. A sink is a logit without a key (Xiao et al. 2024). Used where no attention kernel
of torch takes the mask.

`merge` joins attention over two sets of keys by their logsumexps (Liu et al. 2023, ring attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functron.core.typing import Float, Tensor
from functron.ops.operations import (
    AUTO,
    PACK_BYTES,
    Gradient,
    Kernels,
    Launch,
    check_contiguous,
    check_shapes,
    define,
    dense,
    leading,
    map_rows,
    rows_of,
    statistics,
    type_name,
    upcast,
)

_ROWS, _THREADS, _QUAD, _MOST_ROWS = 8, 256, 4, 2**31 - 1


def merge(
    out1: Float[Tensor, "*batch seq value_dim"],
    lse1: Float[Tensor, "*batch seq"],
    out2: Float[Tensor, "*batch seq value_dim"],
    lse2: Float[Tensor, "*batch seq"],
    *,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, "*batch seq value_dim"], Float[Tensor, "*batch seq"]]:
    """The attention over two sets of keys, from that over each: float32 at least.

    lse = log(exp(lse1) + exp(lse2)), out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse). A set in
    which a row sees no key has lse -inf and weight 0; if both are so the result is 0 and -inf,
    without nan in derivatives of any order. No collectives.
    """
    if kernels.takes("lse_merge", out1, out2):
        return LSE_MERGE(out1, lse1, out2, lse2)
    return _merge(out1, lse1, out2, lse2)


def finite(x: Tensor) -> Tensor:
    """`x` with 0 for -inf, so that differences with it are no nan."""
    return torch.where(x == float("-inf"), 0, x)


def _weights(lse1: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of two sets of keys, and the logsumexp of both."""
    top = finite(torch.maximum(lse1, lse2).detach())
    first, second = (lse1 - top).exp(), (lse2 - top).exp()
    total = first + second
    positive = torch.where(total == 0, 1, total)
    lse = torch.where(total == 0, float("-inf"), top + positive.log())
    return first / positive, second / positive, lse


def _merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    first, second, lse = _weights(lse1, lse2)
    return upcast(out1) * first.unsqueeze(-1) + upcast(out2) * second.unsqueeze(-1), lse


def _merge_backward(
    d_out: Tensor, d_lse: Tensor, out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> tuple[Tensor, ...]:
    first, second, _ = _weights(lse1, lse2)
    apart = (d_out * (upcast(out1) - upcast(out2))).sum(-1)
    return dense(
        (d_out * first.unsqueeze(-1)).to(out1.dtype),
        first * (d_lse + second * apart),
        (d_out * second.unsqueeze(-1)).to(out2.dtype),
        second * (d_lse - first * apart),
    )


# --- the kernels: rows are [outer, middle, inner], wherever they lie


def _three(x: Tensor, own: int) -> Tensor:
    """`x`, whose last `own` dims are of a row, with three dims of rows."""
    dims = x.dim() - own
    return x.flatten(0, dims - 3) if dims > 3 else x.reshape(*[1] * (3 - dims), *x.shape)


def _rows(x: Tensor) -> Tensor:
    x = _three(x, 1)
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _is_packable(*rows: Tensor) -> bool:
    """Whether every access to `_QUAD` elements is aligned."""
    for x in rows:
        if x.shape[-1] % _QUAD or x.data_ptr() % (_QUAD * x.element_size()):
            return False
        if any(x.stride(i) % _QUAD for i in range(x.dim() - 1) if x.shape[i] > 1):
            return False
    return True


def _launch(
    launch: Launch, kernel: str, given: Sequence, operands: Sequence, made: Sequence, wide: Sequence
) -> None:
    """`given` and `made` are contiguous; `operands` are out1, lse1, out2, lse2; `wide` are rows."""
    out1, _, out2, _ = operands
    count = out1.shape[:-1].numel()
    if count > _MOST_ROWS:
        raise ValueError(
            f"lse_merge: got {count} rows; wanted at most {_MOST_ROWS}; "
            'fix: pass kernels=functron.ops.use("reference")'
        )
    if not count:
        return
    strides = [stride for x in operands for stride in x.stride()[:3]]
    launch(
        "lse_merge", kernel, -(-count // _ROWS), _THREADS, *given, *operands, *made, count,
        out1.shape[-1], *out1.shape[1:3], *strides, int(_is_packable(out1, out2, *wide)),
        defines={"ELEMENT": type_name(out2, "lse_merge")},
    )  # fmt: skip


def _merge_operands(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, ...]:
    shapes = (out1.shape, out1.shape[:-1])
    check_shapes(
        "lse_merge", out2=(out2, shapes[0]), lse1=(lse1, shapes[1]), lse2=(lse2, shapes[1])
    )
    return _rows(out1.float()), _three(lse1.float(), 0), _rows(out2), _three(lse2.float(), 0)


def _merge_kernel(launch: Launch, out1: Tensor, lse1: Tensor, *rest: Tensor) -> tuple:
    out, lse = (x.new_empty(x.shape, dtype=torch.float32) for x in (out1, lse1))
    operands = _merge_operands(out1, lse1, *rest)
    _launch(launch, "lse_merge_forward", (), operands, (out, lse), (out,))
    return out, lse


def _merge_kernel_backward(launch: Launch, d_out: Tensor, d_lse: Tensor, *given: Tensor) -> tuple:
    out1, lse1, *_ = given
    check_shapes("lse_merge", d_out=(d_out, out1.shape), d_lse=(d_lse, lse1.shape))
    cotangents = d_out.float().contiguous(), d_lse.float().contiguous()
    operands = _merge_operands(*given)
    made = [x.new_empty(x.shape, dtype=like.dtype) for x, like in zip(given, operands, strict=True)]
    wide = cotangents[0], made[0], made[2]
    _launch(launch, "lse_merge_backward", cotangents, operands, made, wide)
    return made[0].to(out1.dtype), *made[1:]


LSE_MERGE_BACKWARD = define(
    "lse_merge_backward(Tensor d_out, Tensor d_lse, Tensor out1, Tensor lse1, Tensor out2, "
    "Tensor lse2) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_merge_kernel_backward,
    reference=_merge_backward,
    fake=lambda d_out, d_lse, *operands: tuple(x.new_empty(x.shape) for x in operands),
    batch=map_rows(whole=()),
    gradient=_merge_backward,
)
LSE_MERGE = define(
    "lse_merge(Tensor out1, Tensor lse1, Tensor out2, Tensor lse2) -> (Tensor, Tensor)",
    kernel=_merge_kernel,
    reference=lambda *operands: dense(*_merge(*operands)),
    fake=lambda out1, lse1, *rest: (
        out1.new_empty(out1.shape, dtype=statistics(out1).dtype),
        lse1.new_empty(lse1.shape),
    ),
    batch=map_rows(whole=()),
    gradient=Gradient(
        backward=lambda saved, cotangents: LSE_MERGE_BACKWARD(*cotangents, *saved),
    ),
)


_WARP, _MOST_THREADS, _MOST_COLUMNS = 32, 512, 2**31 - 1
_PACKS = 4  # of a thread: few, so that the second pass over a row finds it in a cache


def _mask_scores(scores: Tensor, scale: float, hidden: Tensor | None, causal: bool) -> Tensor:
    s = upcast(scores) * scale
    if causal:
        rows, columns = (torch.arange(n, device=s.device) for n in s.shape[-2:])
        s = s.masked_fill(columns > rows.unsqueeze(1), float("-inf"))
    return s if hidden is None else s.masked_fill(hidden, float("-inf"))


def _reference(
    scores: Tensor, scale: float, hidden: Tensor | None, causal: bool, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    s = _mask_scores(scores, scale, hidden, causal)
    top = s.amax(-1, keepdim=True)
    sink = None if sinks is None else upcast(sinks)[:, None, None]
    top = finite(top if sink is None else torch.maximum(top, sink)).detach()
    weights = (s - top).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if sink is None else total + (sink - top).exp()
    positive = torch.where(total == 0, 1, total)
    lse = torch.where(total == 0, float("-inf"), top + positive.log())
    return (weights / positive).to(scores.dtype).contiguous(), lse.squeeze(-1).contiguous()


def _overwrite(scores: Tensor, *rest: Any) -> Tensor:
    p, lse = _reference(scores, *rest)
    scores.copy_(p)
    return lse


def _backward(d_p: Tensor, d_lse: Tensor, p: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    given, weights = upcast(d_p), upcast(p)
    rest = d_lse - (given * weights).sum(-1)
    d_x = scale * weights * (given + rest.unsqueeze(-1))
    return d_x.to(p.dtype).contiguous(), rest.contiguous()


def _block_backward(*args: Any) -> tuple[Tensor, Tensor]:
    scores, d_p, lse, delta, scale, hidden, causal = args
    p = (_mask_scores(scores, scale, hidden, causal) - finite(lse).unsqueeze(-1)).exp()
    d_x = scale * p * (upcast(d_p) - delta.unsqueeze(-1))
    return p.to(scores.dtype).contiguous(), d_x.to(scores.dtype).contiguous()


def _block_overwrite(scores: Tensor, d_p: Tensor, *rest: Any) -> None:
    p, d_x = _block_backward(scores, d_p, *rest)
    scores.copy_(p)
    d_p.copy_(d_x)


# --- the kernels


def _threads(rows: Tensor) -> int:
    count, columns = rows.shape
    if not 1 <= columns <= _MOST_COLUMNS or count > _MOST_COLUMNS:
        raise ValueError(
            f"softmax: got {count} rows of {columns} scores; wanted at most {_MOST_COLUMNS} of "
            '1 or more; fix: pass kernels=functron.ops.use("reference")'
        )
    packs = -(-columns * rows.element_size() // (PACK_BYTES * _PACKS))
    return min(_MOST_THREADS, -(-packs // _WARP) * _WARP)


def _mask(hidden: Tensor | None, scores: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
    """The mask and the strides of its first three dims, 0 where it is the same for all."""
    if hidden is None:
        return None, (0, 0, 0)
    if hidden.dtype != torch.bool or hidden.dim() != 4:
        raise TypeError(
            f"softmax: got a mask of {hidden.dtype} {tuple(hidden.shape)}; wanted bool [batch or "
            "1, heads or 1, rows, columns], True where hidden; fix: convert it"
        )
    hidden = hidden.expand(scores.shape)
    hidden = hidden if hidden.stride(3) == 1 else hidden.contiguous()
    return hidden, hidden.stride()[:3]


def _kernel(
    launch: Launch, scores, scale, hidden, causal, sinks, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """The weights, over the scores if `in_place`, and the logsumexp."""
    check_shapes("softmax", sinks=(sinks, scores.shape[1:2]))
    if in_place:
        check_contiguous("softmax_", scores)
    p = scores if in_place else scores.new_empty(scores.shape)
    x = rows_of(scores)
    mask, strides = _mask(hidden, scores)
    lse = scores.new_empty(scores.shape[:3], dtype=torch.float32)
    if len(x):
        launch(
            "softmax", "softmax_forward", len(x), _threads(x),
            x, mask, None if sinks is None else sinks.float().contiguous(), p, lse,
            *scores.shape[1:], x.stride(0), x.shape[1], *strides, int(causal), float(scale),
            defines={"ELEMENT": type_name(x, "softmax")},
        )  # fmt: skip
    return p, lse


def _kernel_backward(launch: Launch, d_p, d_lse, p, scale) -> tuple[Tensor, Tensor]:
    check_shapes("softmax_backward", d_p=(d_p, p.shape), d_lse=(d_lse, p.shape[:-1]))
    given, weights = rows_of(d_p.to(p.dtype)), rows_of(p)
    d_x, rest = p.new_empty(p.shape), p.new_empty(d_lse.shape, dtype=torch.float32)
    if len(given):
        launch(
            "softmax", "softmax_backward", len(given), _threads(given),
            given, d_lse.float().contiguous(), weights, d_x, rest, given.shape[1],
            given.stride(0), weights.stride(0), given.shape[1], float(scale),
            defines={"ELEMENT": type_name(p, "softmax")},
        )  # fmt: skip
    return d_x, rest


def _block_kernel(
    launch: Launch, scores, d_p, lse, delta, scale, hidden, causal, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """The weights, and the cotangent of scores; over the first two operands if `in_place`."""
    tokens = scores.shape[:-1]
    operands = {"d_p": (d_p, scores.shape), "lse": (lse, tokens), "delta": (delta, tokens)}
    check_shapes("softmax_block_backward", **operands)
    if in_place:
        check_contiguous("softmax_block_backward_", scores, d_p)
        if d_p.dtype != scores.dtype:
            raise TypeError(
                f"softmax_block_backward_: got {d_p.dtype} cotangents of {scores.dtype} weights; "
                "wanted one dtype; fix: convert them"
            )
    d_p = d_p.to(scores.dtype)
    p, d_x = (scores, d_p) if in_place else (x.new_empty(x.shape) for x in (scores, d_p))
    x, given = rows_of(scores), rows_of(d_p)
    mask, strides = _mask(hidden, scores)
    if len(x):
        launch(
            "softmax", "softmax_block_backward", len(x), _threads(x),
            x, mask, given, *(value.float().contiguous() for value in (lse, delta)), p, d_x,
            *scores.shape[1:], x.stride(0), given.stride(0), x.shape[1], x.shape[1], *strides,
            int(causal), float(scale), defines={"ELEMENT": type_name(x, "softmax")},
        )  # fmt: skip
    return p, d_x


def _block_kernel_(*args: Any) -> None:
    _block_kernel(*args, in_place=True)


# --- shapes and vmaps: a mapped dim joins the heads, which have sinks of their own


def _heads(x: Tensor, dim: int | None, size: int, at: int = 1) -> Tensor:
    """`x` with its vmap dim joined to the heads, which are dim `at`."""
    return leading(x, dim, size).movedim(0, at).flatten(at, at + 1)


def _mapped_mask(hidden: Tensor | None, dim: int | None, size: int, heads: int) -> Tensor | None:
    if hidden is None or (dim is None and hidden.shape[1] == 1):
        return hidden
    hidden = hidden.unsqueeze(1) if dim is None else hidden.movedim(dim, 1)
    return hidden.expand(-1, size, heads, -1, -1).flatten(1, 2)


def _unfold_mapped(outputs: tuple, size: int) -> tuple:
    return tuple(x.unflatten(1, (size, x.shape[1] // size)) for x in outputs), (1,) * len(outputs)


def _batch(size: int, in_dims: tuple, args: tuple, op: Any) -> tuple:
    scores, scale, hidden, causal, sinks = args
    scores = _heads(scores, in_dims[0], size)
    hidden = _mapped_mask(hidden, in_dims[2], size, scores.shape[1] // size)
    sinks = None if sinks is None else _heads(sinks, in_dims[4], size, 0)
    return _unfold_mapped(op(scores, scale, hidden, causal, sinks), size)


def _batch_block_backward(size: int, in_dims: tuple, args: tuple, op: Any) -> tuple:
    *tensors, scale, hidden, causal = args
    tensors = [_heads(x, dim, size) for x, dim in zip(tensors, in_dims, strict=False)]
    hidden = _mapped_mask(hidden, in_dims[5], size, tensors[0].shape[1] // size)
    return _unfold_mapped(op(*tensors, scale, hidden, causal), size)


def _pullback(saved: Any, cotangents: tuple) -> tuple:
    p, lse, scale, sinks = saved
    d_scores, rest = SOFTMAX_BACKWARD(*cotangents, p, scale)
    d_sinks = None
    if sinks is not None:
        weight = (upcast(sinks)[:, None] - lse).exp()
        d_sinks = (weight * rest).sum((0, 2)).to(sinks.dtype)
    return d_scores, None, None, None, d_sinks


SOFTMAX_BACKWARD = define(
    "softmax_backward(Tensor d_p, Tensor d_lse, Tensor p, float scale) -> (Tensor, Tensor)",
    kernel=_kernel_backward,
    reference=_backward,
    fake=lambda d_p, d_lse, p, scale: (p.new_empty(p.shape), statistics(p)),
    batch=map_rows(whole=()),
    gradient=_backward,
)
"""The cotangent of scores ``[..., columns]``, and d_lse less the row sum of p d_p."""
SOFTMAX = define(
    "softmax(Tensor scores, float scale, Tensor? hidden, bool causal, Tensor? sinks) "
    "-> (Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=lambda x, *rest: (x.new_empty(x.shape), statistics(x)),
    batch=_batch,
    gradient=Gradient(save=lambda args, outputs: (*outputs, args[1], args[4]), backward=_pullback),
)
"""Weights p in the scores' dtype, and lse in float32 at least; rows that see nothing: 0 and -inf.

scores: ``[batch, heads, rows, columns]``; hidden: bool ``[batch or 1, heads or 1, rows, columns]``,
True for what is not seen; causal: column j > row i is hidden; sinks: ``[heads]``, not scaled.
"""
SOFTMAX_ = define(
    "softmax_(Tensor(a!) scores, float scale, Tensor? hidden, bool causal, Tensor? sinks) "
    "-> Tensor",
    kernel=lambda *args: _kernel(*args, in_place=True)[1],
    reference=_overwrite,
    fake=lambda scores, *rest: statistics(scores),
)
"""`SOFTMAX` over contiguous scores in place; returns lse."""
SOFTMAX_BLOCK_BACKWARD = define(
    "softmax_block_backward(Tensor scores, Tensor d_p, Tensor lse, Tensor delta, float scale, "
    "Tensor? hidden, bool causal) -> (Tensor, Tensor)",
    kernel=_block_kernel,
    reference=_block_backward,
    fake=lambda *args: tuple(args[0].new_empty(args[0].shape) for _ in "12"),
    batch=_batch_block_backward,
    gradient=_block_backward,
)
"""p = exp(s - lse) and scale p (d_p - delta) of a block of keys, from the lse over all keys."""
SOFTMAX_BLOCK_BACKWARD_ = define(
    "softmax_block_backward_(Tensor(a!) scores, Tensor(b!) d_p, Tensor lse, Tensor delta, "
    "float scale, Tensor? hidden, bool causal) -> ()",
    kernel=_block_kernel_,
    reference=_block_overwrite,
)
"""`SOFTMAX_BLOCK_BACKWARD`, p over the scores and the other over d_p."""
