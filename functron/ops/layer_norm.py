"""LayerNorm of rows, alone or of a sum: ``kernels/layer_norm.cu``; see `functron.ops.rms_norm`."""

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
    launch: Launch, x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor,
    eps: float, center: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not x.numel():
        return _reference(x, residual, scale, bias, eps, center)
    y, total = x.new_empty(x.shape), None if residual is None else x.new_empty(x.shape)
    mean, rstd = statistics(x), statistics(x)
    rows, more = as_rows(x, residual)
    (weights, wide), (biases, wide_bias) = vector(x, scale), vector(x, bias)
    dim = x.shape[-1]
    shape = layout(dim, x.element_size(), FORWARD_THREADS)
    packed = packable(dim, rows, more, weights, biases)
    launch(
        "layer_norm", "layer_norm_forward", shape.grid(launch, rows, FORWARD_THREADS), shape.block,
        rows, more, weights, biases, total, y, mean, rstd, rows.shape[0], dim,
        row_stride(rows), row_stride(more), shape.lanes, int(packed), wide, wide_bias,
        float(center), eps, defines={"ELEMENT": type_name(x, "layer_norm")},
    )  # fmt: skip
    return (y, mean, rstd) if total is None else (y, total, mean, rstd)


def _moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean and 1 / sqrt(variance + eps) of rows."""
    mean = x.mean(-1)
    return mean, torch.rsqrt((x - mean.unsqueeze(-1)).square().mean(-1) + eps)


def _reference(
    x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor, eps: float, center: bool
) -> tuple[Tensor, ...]:
    total = x if residual is None else x + residual
    wide = upcast(total)
    mean, rstd = _moments(wide, eps)
    normed = (wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    y = (normed * multiplier(scale, wide, center) + bias.to(wide.dtype)).to(x.dtype)
    return dense(y, mean, rstd) if residual is None else dense(y, total, mean, rstd)


def _backward_kernel(
    launch: Launch, dy: Tensor, d_sum: Tensor | None, x: Tensor, scale: Tensor, bias: Tensor,
    mean: Tensor, rstd: Tensor, eps: float, center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dim = x.shape[-1]
    shape = layout(dim, x.element_size(), BACKWARD_THREADS)
    shared_bytes = 8 * shape.rows * shape.columns
    if not x.numel() or shared_bytes > SHARED_BYTES:
        return _backward(dy, d_sum, x, scale, bias, mean, rstd, eps, center)
    dx = x.new_empty(x.shape)
    weights, wide = vector(x, scale)
    dy, d_sum, x = as_rows(dy, d_sum, x)
    packed = packable(dim, dy, d_sum, x, weights)
    blocks = shape.grid(launch, x, BACKWARD_THREADS)
    partials = x.new_empty(blocks, 2, shape.columns, dtype=torch.float32)
    defines = {"ELEMENT": type_name(x, "layer_norm_backward")}
    launch(
        "layer_norm", "layer_norm_backward", blocks, shape.block,
        dy, d_sum, x, weights, mean.contiguous(), rstd.contiguous(), dx, partials, x.shape[0], dim,
        row_stride(dy), row_stride(d_sum), row_stride(x),
        shape.lanes, int(packed), wide, float(center),
        defines=defines, shared_bytes=shared_bytes,
    )  # fmt: skip
    summed = [
        like.new_empty(dim, dtype=x.dtype if like.dtype == x.dtype else torch.float32)
        for like in (scale, bias)
    ]
    launch(
        "layer_norm", "layer_norm_scale_gradient", shape.columns // 16, 32 * min(32, blocks),
        partials, *summed, blocks, shape.columns, dim, shape.lanes,
        *[int(one.dtype != x.dtype) for one in summed], defines=defines,
    )  # fmt: skip
    return dx, summed[0].to(scale.dtype), summed[1].to(bias.dtype)


def _backward(
    dy: Tensor, d_sum: Tensor | None, x: Tensor, scale: Tensor, bias: Tensor,
    mean: Tensor | None, rstd: Tensor | None, eps: float, center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide, g = upcast(x), upcast(dy)
    if mean is None or rstd is None:
        mean, rstd = _moments(wide, eps)
    normed = (wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    moved = g * multiplier(scale, wide, center)
    along = moved.mean(-1, keepdim=True) + normed * (moved * normed).mean(-1, keepdim=True)
    dx = rstd.unsqueeze(-1) * (moved - along)
    dx = dx if d_sum is None else dx + upcast(d_sum)
    dscale, dbias = (summed_rows(rows) for rows in (g * normed, g))
    return dx.to(x.dtype).contiguous(), dscale.to(scale.dtype), dbias.to(bias.dtype)


def _backward_fake(dy, d_sum, x, scale, bias, *rest) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), scale.new_empty(scale.shape), bias.new_empty(bias.shape)


LAYER_NORM_BACKWARD = define(
    "layer_norm_backward(Tensor dy, Tensor? d_sum, Tensor x, Tensor scale, Tensor bias, "
    "Tensor mean, Tensor rstd, float eps, bool zero_centered) -> (Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    reference=_backward,
    fake=_backward_fake,
    batch=one_by_one,
    gradient=lambda dy, d_sum, x, scale, bias, mean, rstd, *rest: _backward(
        dy, d_sum, x, scale, bias, None, None, *rest
    ),
)
"""(dx, dscale, dbias): dx = r (w dy - mean(w dy) - n mean(w dy n)) + d_sum, n = (x - mean) r."""


def _gradient(saved: Sequence, cotangents: tuple) -> tuple:
    return *LAYER_NORM_BACKWARD(cotangents[0], None, *saved), None, None


def _gradient_of_sum(saved: Sequence, cotangents: tuple) -> tuple:
    dx, dscale, dbias = LAYER_NORM_BACKWARD(cotangents[0], cotangents[1], *saved)
    return dx, dx, dscale, dbias, None, None


LAYER_NORM = define(
    "layer_norm(Tensor x, Tensor scale, Tensor bias, float eps, bool zero_centered) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=lambda launch, x, *rest: _kernel(launch, x, None, *rest),
    reference=lambda x, *rest: _reference(x, None, *rest),
    fake=lambda x, *rest: (x.new_empty(x.shape), statistics(x), statistics(x)),
    batch=of_rows(whole=(1, 2)),
    gradient=Gradient(
        save=lambda args, outputs: (*args[:3], *outputs[1:], *args[3:]),
        backward=_gradient,
        auxiliary=(1, 2),
    ),
)
"""(y, mean, r): y = (x - mean) r (scale, or 1 + scale) + bias, r = 1 / sqrt(variance + eps)."""

ADD_LAYER_NORM = define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor scale, Tensor bias, float eps, "
    "bool zero_centered) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=lambda x, *rest: (
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        statistics(x),
        statistics(x),
    ),
    batch=of_rows(whole=(2, 3)),
    gradient=Gradient(
        save=lambda args, outputs: (outputs[1], *args[2:4], *outputs[2:], *args[4:]),
        backward=_gradient_of_sum,
        auxiliary=(2, 3),
    ),
)
"""(y, x + residual, mean, r): `LAYER_NORM` of the sum; residual has x's shape and dtype."""
