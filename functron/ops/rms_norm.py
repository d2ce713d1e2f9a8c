"""RMSNorm of rows, alone or of a sum: ``kernels/rms_norm.cu``.

A pre-norm block adds to its residual stream and then normalises it: `ADD_RMS_NORM` does both in one
pass, and returns the sum, which the stream goes on with. It is rounded to the stream's dtype before
it is normalised, as it is without kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from functron.core.typing import Tensor
from functron.ops.define import (
    BACKWARD_THREADS,
    FORWARD_THREADS,
    SHARED_BYTES,
    Gradient,
    Launch,
    as_rows,
    define,
    dense,
    layout,
    multiplier,
    of_rows,
    one_by_one,
    packable,
    row_stride,
    statistics,
    summed_rows,
    type_name,
    upcast,
    vector,
)


def _kernel(
    launch: Launch, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, center: bool
) -> tuple[Tensor, ...]:
    if not x.numel():
        return _reference(x, residual, scale, eps, center)
    y, total = x.new_empty(x.shape), None if residual is None else x.new_empty(x.shape)
    rstd = statistics(x)
    rows, more = as_rows(x, residual)
    weights, wide = vector(x, scale)
    dim = x.shape[-1]
    shape = layout(dim, x.element_size(), FORWARD_THREADS)
    packed = packable(dim, rows, more, weights)
    launch(
        "rms_norm", "rms_norm_forward", shape.grid(launch, rows, FORWARD_THREADS), shape.block,
        rows, more, weights, total, y, rstd, rows.shape[0], dim, row_stride(rows), row_stride(more),
        shape.lanes, int(packed), wide, float(center), eps,
        defines={"ELEMENT": type_name(x, "rms_norm")},
    )  # fmt: skip
    return (y, rstd) if total is None else (y, total, rstd)


def _reference(
    x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, center: bool
) -> tuple[Tensor, ...]:
    total = x if residual is None else x + residual
    wide = upcast(total)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd.unsqueeze(-1) * multiplier(scale, wide, center)
    y = y.to(x.dtype)
    return dense(y, rstd) if residual is None else dense(y, total, rstd)


def _backward_kernel(
    launch: Launch, dy: Tensor, d_sum: Tensor | None, x: Tensor, scale: Tensor, rstd: Tensor,
    eps: float, center: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dim = x.shape[-1]
    shape = layout(dim, x.element_size(), BACKWARD_THREADS)
    shared_bytes = 4 * shape.rows * shape.columns
    if not x.numel() or shared_bytes > SHARED_BYTES:
        return _backward(dy, d_sum, x, scale, rstd, eps, center)
    dx = x.new_empty(x.shape)
    weights, wide = vector(x, scale)
    dy, d_sum, x = as_rows(dy, d_sum, x)
    packed = packable(dim, dy, d_sum, x, weights)
    blocks = shape.grid(launch, x, BACKWARD_THREADS)
    partials = x.new_empty(blocks, shape.columns, dtype=torch.float32)
    defines = {"ELEMENT": type_name(x, "rms_norm_backward")}
    launch(
        "rms_norm", "rms_norm_backward", blocks, shape.block,
        dy, d_sum, x, weights, rstd.contiguous(), dx, partials, x.shape[0], dim,
        row_stride(dy), row_stride(d_sum), row_stride(x),
        shape.lanes, int(packed), wide, float(center),
        defines=defines, shared_bytes=shared_bytes,
    )  # fmt: skip
    summed = scale.new_empty(dim, dtype=x.dtype if scale.dtype == x.dtype else torch.float32)
    launch(
        "rms_norm", "rms_norm_scale_gradient", shape.columns // 32, 32 * min(32, blocks),
        partials, summed, blocks, shape.columns, dim, shape.lanes, int(summed.dtype != x.dtype),
        defines=defines,
    )  # fmt: skip
    return dx, summed.to(scale.dtype)


def _backward(
    dy: Tensor, d_sum: Tensor | None, x: Tensor, scale: Tensor, rstd: Tensor | None,
    eps: float, center: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide, g = upcast(x), upcast(dy)
    if rstd is None:
        rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    normed = wide * rstd.unsqueeze(-1)
    moved = g * multiplier(scale, wide, center)
    dx = rstd.unsqueeze(-1) * (moved - normed * (moved * normed).mean(-1, keepdim=True))
    dx = dx if d_sum is None else dx + upcast(d_sum)
    return dx.to(x.dtype).contiguous(), summed_rows(g * normed).to(scale.dtype)


def _backward_fake(dy, d_sum, x, scale, rstd, eps, center) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), scale.new_empty(scale.shape)


RMS_NORM_BACKWARD = define(
    "rms_norm_backward(Tensor dy, Tensor? d_sum, Tensor x, Tensor scale, Tensor rstd, float eps, "
    "bool zero_centered) -> (Tensor, Tensor)",
    kernel=_backward_kernel,
    reference=_backward,
    fake=_backward_fake,
    batch=one_by_one,
    gradient=lambda dy, d_sum, x, scale, rstd, *rest: _backward(dy, d_sum, x, scale, None, *rest),
)
"""(dx, dscale): dx = r (w dy - n mean(w dy n)) + d_sum, dscale = sum over rows of dy n, n = x r."""


def _gradient(saved: Sequence, cotangents: tuple) -> tuple:
    dx, dscale = RMS_NORM_BACKWARD(cotangents[0], None, *saved)
    return dx, dscale, None, None


def _gradient_of_sum(saved: Sequence, cotangents: tuple) -> tuple:
    dx, dscale = RMS_NORM_BACKWARD(cotangents[0], cotangents[1], *saved)
    return dx, dx, dscale, None, None


RMS_NORM = define(
    "rms_norm(Tensor x, Tensor scale, float eps, bool zero_centered) -> (Tensor, Tensor)",
    kernel=lambda launch, x, *rest: _kernel(launch, x, None, *rest),
    reference=lambda x, *rest: _reference(x, None, *rest),
    fake=lambda x, *rest: (x.new_empty(x.shape), statistics(x)),
    batch=of_rows(whole=(1,)),
    gradient=Gradient(
        save=lambda args, outputs: (*args[:2], outputs[1], *args[2:]),
        backward=_gradient,
        auxiliary=(1,),
    ),
)
"""(y, r): y = x r (scale, or 1 + scale) and r = 1 / sqrt(mean(x^2) + eps), of the last dim."""

ADD_RMS_NORM = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor scale, float eps, bool zero_centered) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=lambda x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape), statistics(x)),
    batch=of_rows(whole=(2,)),
    gradient=Gradient(
        save=lambda args, outputs: (outputs[1], args[2], outputs[2], *args[3:]),
        backward=_gradient_of_sum,
        auxiliary=(2,),
    ),
)
"""(y, x + residual, r): `RMS_NORM` of the sum; residual has x's shape and dtype."""
