"""RMSNorm and LayerNorm of rows, alone or of a sum: ``kernels/rms_norm.cu``, ``layer_norm.cu``.

A pre-norm block adds to its residual stream and then normalises it: `ADD_RMS_NORM` and
`ADD_LAYER_NORM` do both in one pass, and also return the sum, which is rounded to the stream's
dtype before it is normalised, as without kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functron.core import compat
from functron.core.typing import Tensor
from functron.ops.operations import (
    BACKWARD_THREADS,
    FORWARD_THREADS,
    SHARED_BYTES,
    Gradient,
    Launch,
    Op,
    as_rows,
    define,
    dense,
    differentiate,
    layout,
    map_one_by_one,
    map_rows,
    multiplier,
    packable,
    row_stride,
    statistics,
    summed_rows,
    type_name,
    upcast,
    vector,
)
from functron.program.recorder import keeper

RowMoments = Callable[[Tensor, float], tuple[Tensor, ...]]
"""``(rows, eps) -> statistics`` of rows: 1 / sqrt(mean square + eps), or the mean and the like."""


def _rms_moments(x: Tensor, eps: float) -> tuple[Tensor]:
    """1 / sqrt(mean(x^2) + eps) of rows."""
    return (torch.rsqrt(x.square().mean(-1) + eps),)


def _layer_moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean and 1 / sqrt(variance + eps) of rows."""
    mean = x.mean(-1)
    return mean, torch.rsqrt((x - mean.unsqueeze(-1)).square().mean(-1) + eps)


def normalise_rows(x: Tensor, *moments: Tensor) -> Tensor:
    """``(x - mean) / deviation`` of rows; with one statistic, without the mean: RMSNorm's."""
    *means, rstd = moments
    centred = x - means[0].unsqueeze(-1) if means else x
    return centred * rstd.unsqueeze(-1)


def normed_gradient(moved: Tensor, normed: Tensor, *moments: Tensor) -> Tensor:
    """The cotangent of rows from `moved`, that of `normalise_rows` of them."""
    return _gradient_of_normed([moved, normed], moments)


def _gradient_of_normed(rows: list[Tensor], moments: Sequence[Tensor]) -> Tensor:
    """`normed_gradient` of rows that it takes from the list, and frees as soon as it can."""
    *means, rstd = moments
    along = rows[1] * (rows[0] * rows.pop(1)).mean(-1, keepdim=True)
    along = rows[0].mean(-1, keepdim=True) + along if means else along
    across = rows.pop(0) - along
    del along
    return rstd.unsqueeze(-1) * across


def rms_norm_rows(x: Tensor, scale: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """RMSNorm of rows in torch's operations, in x's dtype."""
    return normalise_rows(x, *_rms_moments(x, eps)) * multiplier(scale, x, zero_centered)


def rms_norm_rows_backward(
    g: Tensor, x: Tensor, scale: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The cotangents of `rms_norm_rows`: of x, and of the scale by each row."""
    moments = _rms_moments(x, eps)
    normed = normalise_rows(x, *moments)
    moved = g * multiplier(scale, x, zero_centered)
    return normed_gradient(moved, normed, *moments), g * normed


def _reference(
    moments_of: RowMoments, x: Tensor, residual: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *vectors, eps, center = rest
    total = x if residual is None else x + residual
    wide = upcast(total)
    moments = moments_of(wide, eps)
    y = normalise_rows(wide, *moments) * multiplier(vectors[0], wide, center)
    for bias in vectors[1:]:
        y = y + bias.to(wide.dtype)
    y = y.to(x.dtype)
    return dense(y, *moments) if residual is None else dense(y, total, *moments)


def _backward(
    moments_of: RowMoments, again: bool, dy: Tensor, d_sum: Tensor | None, x: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """The cotangents in torch's operations; `again`: statistics are recomputed."""
    *operands, eps, center = rest
    vectors, moments = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    wide, g = upcast(x), upcast(dy)
    moments = moments_of(wide, eps) if again else moments
    normed, by = normalise_rows(wide, *moments), multiplier(vectors[0], wide, center)
    del wide  # rows in float32 may be most of a step's memory: none lives longer than needed
    sums = [summed_rows(g * normed).to(vectors[0].dtype)]
    sums += [summed_rows(g).to(bias.dtype) for bias in vectors[1:]]
    rows = [g * by, normed]
    del g, normed
    dx = _gradient_of_normed(rows, moments)
    dx = dx if d_sum is None else dx + upcast(d_sum)
    return dx.to(x.dtype).contiguous(), *sums


def _kernel(
    name: str,
    moments_of: RowMoments,
    launch: Launch,
    x: Tensor,
    residual: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    *vectors, eps, center = rest
    if not x.numel():
        return _reference(moments_of, x, residual, *rest)
    y, total = x.new_empty(x.shape), None if residual is None else x.new_empty(x.shape)
    moments = [statistics(x) for _ in vectors]
    rows, more = as_rows(x, residual)
    weights, wide = zip(*(vector(x, each) for each in vectors), strict=True)
    dim = x.shape[-1]
    shape = layout(dim, x.element_size(), FORWARD_THREADS)
    packed = packable(dim, rows, more, *weights)
    launch(
        name, f"{name}_forward", shape.grid(launch, rows, FORWARD_THREADS), shape.block,
        rows, more, *weights, total, y, *moments, rows.shape[0], dim,
        row_stride(rows), row_stride(more), shape.lanes, int(packed), *wide,
        float(center), eps, defines={"ELEMENT": type_name(x, name)},
    )  # fmt: skip
    return (y, *moments) if total is None else (y, total, *moments)


def _backward_kernel(
    name: str, moments_of: RowMoments, launch: Launch, dy: Tensor, d_sum: Tensor | None, x: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *operands, _, center = rest
    count = len(operands) // 2
    vectors, moments = operands[:count], operands[count:]
    dim = x.shape[-1]
    shape = layout(dim, x.element_size(), BACKWARD_THREADS)
    shared_bytes = 4 * count * shape.rows * shape.columns
    if not x.numel() or shared_bytes > SHARED_BYTES:
        return _backward(moments_of, False, dy, d_sum, x, *rest)
    dx = x.new_empty(x.shape)
    weights, wide = vector(x, vectors[0])
    dy, d_sum, x = as_rows(dy, d_sum, x)
    packed = packable(dim, dy, d_sum, x, weights)
    blocks = shape.grid(launch, x, BACKWARD_THREADS)
    partials = x.new_empty(blocks, count, shape.columns, dtype=torch.float32)
    defines = {"ELEMENT": type_name(x, f"{name}_backward")}
    launch(
        name, f"{name}_backward", blocks, shape.block,
        dy, d_sum, x, weights, *[each.contiguous() for each in moments], dx, partials,
        x.shape[0], dim, row_stride(dy), row_stride(d_sum), row_stride(x),
        shape.lanes, int(packed), wide, float(center),
        defines=defines, shared_bytes=shared_bytes,
    )  # fmt: skip
    sums = [
        like.new_empty(dim, dtype=x.dtype if like.dtype == x.dtype else torch.float32)
        for like in vectors
    ]
    launch(
        name, f"{name}_scale_gradient", shape.columns * count // 32, 32 * min(32, blocks),
        partials, *sums, blocks, shape.columns, dim, shape.lanes,
        *[int(each.dtype != x.dtype) for each in sums], defines=defines,
    )  # fmt: skip
    return dx, *(each.to(like.dtype) for each, like in zip(sums, vectors, strict=True))


def _define_norm(
    name: str, vectors: Sequence[str], statistics_of_rows: Sequence[str], moments_of: RowMoments
) -> tuple[Op, Op, Op]:
    """The op `name` of x; ``add_name`` of x + residual, which returns the sum too; the backward.

    Args:
        name: of the op.
        vectors: operands after x (and residual) that all rows share.
        statistics_of_rows: float32 numbers of each row that follow the results, as many.
        moments_of: computes these numbers in torch's operations.
    """
    count, settings = len(vectors), "float eps, bool zero_centered"
    operands = ", ".join([*(f"Tensor {each}" for each in vectors), settings])
    results = ", ".join(["Tensor"] * (1 + count))
    saved = ", ".join(f"Tensor {each}" for each in (*vectors, *statistics_of_rows))
    kernel = functools.partial(_kernel, name, moments_of)
    reference = functools.partial(_reference, moments_of)
    backward = define(
        f"{name}_backward(Tensor dy, Tensor? d_sum, Tensor x, {saved}, {settings}) -> ({results})",
        kernel=functools.partial(_backward_kernel, name, moments_of),
        reference=functools.partial(_backward, moments_of, False),
        fake=lambda dy, d_sum, *like: tuple(v.new_empty(v.shape) for v in like[: 1 + count]),
        batch=map_one_by_one,
        gradient=functools.partial(_backward, moments_of, True),
    )

    def fakes(x: Tensor) -> list[Tensor]:
        return [statistics(x) for _ in vectors]

    def gradient_of_sum(saved: Sequence, cotangents: tuple) -> tuple:
        dx, *rest = backward(cotangents[0], cotangents[1], *saved)
        return dx, dx, *rest, None, None

    alone = define(
        f"{name}(Tensor x, {operands}) -> ({results})",
        kernel=lambda launch, x, *rest: kernel(launch, x, None, *rest),
        reference=lambda x, *rest: reference(x, None, *rest),
        fake=lambda x, *rest: (x.new_empty(x.shape), *fakes(x)),
        batch=map_rows(whole=range(1, 1 + count)),
        gradient=Gradient(
            save=lambda args, outputs: (*args[: 1 + count], *outputs[1:], *args[1 + count :]),
            backward=lambda saved, ct: (*backward(ct[0], None, *saved), None, None),
            auxiliary=tuple(range(1, 1 + count)),
        ),
    )
    of_sum = define(
        f"add_{name}(Tensor x, Tensor residual, {operands}) -> (Tensor, {results})",
        kernel=kernel,
        reference=reference,
        fake=lambda x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape), *fakes(x)),
        batch=map_rows(whole=range(2, 2 + count)),
        gradient=Gradient(
            save=lambda args, outputs: (
                outputs[1],
                *args[2 : 2 + count],
                *outputs[2:],
                *args[2 + count :],
            ),
            backward=gradient_of_sum,
            auxiliary=tuple(range(2, 2 + count)),
        ),
    )
    return alone, of_sum, backward


def is_lean() -> bool:
    """Whether norms in torch's operations have derivatives of their own here.

    They have none in forward mode and in `functron.partition`. Where vmap stands for ranks torch's
    are several times faster, and their memory is not a rank's; dynamo's compiler chooses itself.
    """
    if torch.compiler.is_compiling():
        return False
    mapped = "vmap" in compat.transform_names() or compat.pushing_forward()
    return not mapped and keeper() is None


def _compute(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """y and statistics of rows, by torch's own norms where it has them."""
    *vectors, eps, center = rest
    if len(vectors) == 1 and not x.is_cuda:
        return _reference(_rms_moments, x, None, *rest)
    wide = upcast(x)
    weights = multiplier(vectors[0], wide, center), *(v.to(wide.dtype) for v in vectors[1:])
    fused = torch.ops.aten._fused_rms_norm
    norm: Any = fused if len(vectors) == 1 else torch.native_layer_norm
    y, *moments = norm(wide, wide.shape[-1:], *weights, eps)
    return y.to(x.dtype), *(each.squeeze(-1) for each in moments)


def _define_lean(name: str, count: int, moments_of: RowMoments) -> Callable[..., tuple]:
    """``(x, *vectors, eps, zero_centered)`` to y and statistics, in torch's operations.

    As the op `name`, x, the vectors and the statistics are kept for backward, where torch would
    keep x and the normed rows in float32.
    """
    again = functools.partial(_backward, moments_of, True)
    backward = differentiate(
        f"lean_{name}_backward", functools.partial(_backward, moments_of, False), again
    )
    gradient = Gradient(
        save=lambda args, outputs: (*args[: 1 + count], *outputs[1:], *args[1 + count :]),
        backward=lambda saved, ct: (*backward(ct[0], None, *saved), None, None),
        auxiliary=tuple(range(1, 1 + count)),
    )
    return differentiate(f"lean_{name}", _compute, gradient)


LEAN_RMS_NORM = _define_lean("rms_norm", 1, _rms_moments)
"""`RMS_NORM` in torch's operations; programs show these. With a derivative in reverse mode."""

LEAN_LAYER_NORM = _define_lean("layer_norm", 2, _layer_moments)
"""`LAYER_NORM` in torch's operations."""

RMS_NORM, ADD_RMS_NORM, RMS_NORM_BACKWARD = _define_norm(
    "rms_norm", ("scale",), ("rstd",), _rms_moments
)
"""(y, r): y = x r (scale, or 1 + scale) and r = 1 / sqrt(mean(x^2) + eps), of the last dim; and

(y, x + residual, r): the same of the sum; residual has x's shape and dtype; and backward

(dx, dscale): dx = r (w dy - n mean(w dy n)) + d_sum, dscale = sum over rows of dy n, n = x r."""

LAYER_NORM, ADD_LAYER_NORM, LAYER_NORM_BACKWARD = _define_norm(
    "layer_norm", ("scale", "bias"), ("mean", "rstd"), _layer_moments
)
"""(y, mean, r): y = (x - mean) r (scale, or 1 + scale) + bias, r = 1 / sqrt(variance + eps); and

(y, x + residual, mean, r): the same of the sum; residual has x's shape and dtype; and backward

(dx, dscale, dbias): dx = r (w dy - mean(w dy) - n mean(w dy n)) + d_sum, n = (x - mean) r."""
