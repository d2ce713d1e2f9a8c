"""RMSNorm and LayerNorm of rows, alone or of a sum: ``kernels/rms_norm.cu``, ``layer_norm.cu``.

A pre-norm block adds to its residual stream and then normalises it: `ADD_RMS_NORM` and
`ADD_LAYER_NORM` do both in one pass, and return the sum, which the stream goes on with. It is
rounded to the stream's dtype before it is normalised, as it is without kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from functron.core.typing import Tensor
from functron.ops.define import (
    BACKWARD_THREADS,
    FORWARD_THREADS,
    SHARED_BYTES,
    Gradient,
    Launch,
    Op,
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


def _define_both(
    name: str,
    vectors: Sequence[str],
    num_statistics: int,
    kernel: Callable,
    reference: Callable,
    backward: Op,
) -> tuple[Op, Op]:
    """The op `name` of x, and ``add_name`` of x + residual, which returns the sum as well.

    Args:
        name: of the op.
        vectors: its operands after x, and after residual, that all rows share.
        num_statistics: how many float32 numbers of each row follow its results.
        kernel, reference: ``([launch,] x, residual or None, *vectors, eps, center)``.
        backward: ``(dy, d_sum or None, x, *vectors, *statistics, eps, center)``.
    """
    count = len(vectors)
    operands = ", ".join([*(f"Tensor {each}" for each in vectors), "float eps, bool zero_centered"])
    results = ", ".join(["Tensor"] * (1 + num_statistics))

    def fakes(x: Tensor) -> list[Tensor]:
        return [statistics(x) for _ in range(num_statistics)]

    def gradient_of_sum(saved: Sequence, cotangents: tuple) -> tuple:
        dx, *rest = backward(cotangents[0], cotangents[1], *saved)
        return dx, dx, *rest, None, None

    alone = define(
        f"{name}(Tensor x, {operands}) -> ({results})",
        kernel=lambda launch, x, *rest: kernel(launch, x, None, *rest),
        reference=lambda x, *rest: reference(x, None, *rest),
        fake=lambda x, *rest: (x.new_empty(x.shape), *fakes(x)),
        batch=of_rows(whole=range(1, 1 + count)),
        gradient=Gradient(
            save=lambda args, outputs: (*args[: 1 + count], *outputs[1:], *args[1 + count :]),
            backward=lambda saved, ct: (*backward(ct[0], None, *saved), None, None),
            auxiliary=tuple(range(1, 1 + num_statistics)),
        ),
    )
    of_sum = define(
        f"add_{name}(Tensor x, Tensor residual, {operands}) -> (Tensor, {results})",
        kernel=kernel,
        reference=reference,
        fake=lambda x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape), *fakes(x)),
        batch=of_rows(whole=range(2, 2 + count)),
        gradient=Gradient(
            save=lambda args, outputs: (
                outputs[1],
                *args[2 : 2 + count],
                *outputs[2:],
                *args[2 + count :],
            ),
            backward=gradient_of_sum,
            auxiliary=tuple(range(2, 2 + num_statistics)),
        ),
    )
    return alone, of_sum


def _rms_kernel(
    launch: Launch, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, center: bool
) -> tuple[Tensor, ...]:
    if not x.numel():
        return _rms_reference(x, residual, scale, eps, center)
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


def _rms_reference(
    x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, center: bool
) -> tuple[Tensor, ...]:
    total = x if residual is None else x + residual
    wide = upcast(total)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd.unsqueeze(-1) * multiplier(scale, wide, center)
    y = y.to(x.dtype)
    return dense(y, rstd) if residual is None else dense(y, total, rstd)


def _rms_backward_kernel(
    launch: Launch, dy: Tensor, d_sum: Tensor | None, x: Tensor, scale: Tensor, rstd: Tensor,
    eps: float, center: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dim = x.shape[-1]
    shape = layout(dim, x.element_size(), BACKWARD_THREADS)
    shared_bytes = 4 * shape.rows * shape.columns
    if not x.numel() or shared_bytes > SHARED_BYTES:
        return _rms_backward(dy, d_sum, x, scale, rstd, eps, center)
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


def _rms_backward(
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


RMS_NORM_BACKWARD = define(
    "rms_norm_backward(Tensor dy, Tensor? d_sum, Tensor x, Tensor scale, Tensor rstd, float eps, "
    "bool zero_centered) -> (Tensor, Tensor)",
    kernel=_rms_backward_kernel,
    reference=_rms_backward,
    fake=lambda dy, d_sum, *like: tuple(v.new_empty(v.shape) for v in like[:2]),
    batch=one_by_one,
    gradient=lambda dy, d_sum, x, scale, rstd, *rest: _rms_backward(
        dy, d_sum, x, scale, None, *rest
    ),
)
"""(dx, dscale): dx = r (w dy - n mean(w dy n)) + d_sum, dscale = sum over rows of dy n, n = x r."""


RMS_NORM, ADD_RMS_NORM = _define_both(
    "rms_norm", ("scale",), 1, _rms_kernel, _rms_reference, RMS_NORM_BACKWARD
)
"""(y, r): y = x r (scale, or 1 + scale) and r = 1 / sqrt(mean(x^2) + eps), of the last dim; and

(y, x + residual, r): the same of the sum; residual has x's shape and dtype."""


def _layer_kernel(
    launch: Launch, x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor,
    eps: float, center: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not x.numel():
        return _layer_reference(x, residual, scale, bias, eps, center)
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


def _layer_reference(
    x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor, eps: float, center: bool
) -> tuple[Tensor, ...]:
    total = x if residual is None else x + residual
    wide = upcast(total)
    mean, rstd = _moments(wide, eps)
    normed = (wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    y = (normed * multiplier(scale, wide, center) + bias.to(wide.dtype)).to(x.dtype)
    return dense(y, mean, rstd) if residual is None else dense(y, total, mean, rstd)


def _layer_backward_kernel(
    launch: Launch, dy: Tensor, d_sum: Tensor | None, x: Tensor, scale: Tensor, bias: Tensor,
    mean: Tensor, rstd: Tensor, eps: float, center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dim = x.shape[-1]
    shape = layout(dim, x.element_size(), BACKWARD_THREADS)
    shared_bytes = 8 * shape.rows * shape.columns
    if not x.numel() or shared_bytes > SHARED_BYTES:
        return _layer_backward(dy, d_sum, x, scale, bias, mean, rstd, eps, center)
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


def _layer_backward(
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


LAYER_NORM_BACKWARD = define(
    "layer_norm_backward(Tensor dy, Tensor? d_sum, Tensor x, Tensor scale, Tensor bias, "
    "Tensor mean, Tensor rstd, float eps, bool zero_centered) -> (Tensor, Tensor, Tensor)",
    kernel=_layer_backward_kernel,
    reference=_layer_backward,
    fake=lambda dy, d_sum, *like: tuple(v.new_empty(v.shape) for v in like[:3]),
    batch=one_by_one,
    gradient=lambda dy, d_sum, x, scale, bias, mean, rstd, *rest: _layer_backward(
        dy, d_sum, x, scale, bias, None, None, *rest
    ),
)
"""(dx, dscale, dbias): dx = r (w dy - mean(w dy) - n mean(w dy n)) + d_sum, n = (x - mean) r."""


LAYER_NORM, ADD_LAYER_NORM = _define_both(
    "layer_norm", ("scale", "bias"), 2, _layer_kernel, _layer_reference, LAYER_NORM_BACKWARD
)
"""(y, mean, r): y = (x - mean) r (scale, or 1 + scale) + bias, r = 1 / sqrt(variance + eps); and

(y, x + residual, mean, r): the same of the sum; residual has x's shape and dtype."""
