"""The product of two quantised matrices, on tensor cores or exactly.

y = a b^T for a ``[M, K]`` and b ``[N, K]`` in 8 or 4 bits with scales (`functron.ops.quantise`),
the summed dim last, as tensor cores want it. On CUDA it is `torch.nn.functional.scaled_mm`, with
scales in the layout that the device takes. Elsewhere it is the reference: values times scales,
rounded to float32, and their matrix product in float32 (float64 for results of that dtype).

`why_not` tells from formats, dtype and device alone whether a device has the product, so that runs
can be refused before they start. The rules are those of torch 2.11 and 2.13 (``ScaledBlas.cpp``),
and of cuBLAS:

| operands                                 | compute capability    |
|------------------------------------------|-----------------------|
| tensor x tensor, row x row               | 8.9, or 9.0 and later |
| 1x128 or 128x128 x 1x128, 1x128 x 128x128 | 9.x (Hopper)         |
| 1x32 (MXFP8), 1x16 and 16x16 (NVFP4)      | 10.0 and later        |

Tensor cores want complete blocks of 128. Sides that 128 does not divide are padded with zeros,
which change no sum, and cost a copy of the values of each operand that has one, and of the result
where it is one of a 128x128 operand's rows. Of DeepSeek-V3's kv_down, 7168 x 576, these are a ninth
more FLOPs, 4.6 MB of w in forward and backward, and 1.3 KB and 0.6 KB for each token.

A grouped product multiplies each group of rows by its own matrix, as `functron.ops.grouped_matmul`
does for experts. There every row of activations is a matrix for `quantise`, so that rows of a group
can share a scale. Tensor cores have it on Hopper, for e4m3 with scales per row or tensor; not for
gradients of weights, whose groups would have to begin at multiples of 16 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from functron.core.errors import refuse
from functron.ops.grouped_matmul import clear_rows, grouped_matmul, grouped_matmul_weight
from functron.ops.operations import Launch, define, map_batch, map_one_by_one
from functron.ops.quantise import E2M1, ELEMENTS, Quantised, QuantisedFormat, dequantise

_BY_128 = (("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128"))
_SQUARE = ("16x16", "1x16")  # tensor cores take the scales of squares once for each of their rows
_ALIGNED = 16  # elements: what rows of operands and of the result must be multiples of
_COMPLETE = 128  # what `F.scaled_mm` wants sides of blocks of that size to be multiples of


def scaled_matmul(
    a: Quantised, b: Quantised, dtype: torch.dtype, *, emulate: bool = False
) -> torch.Tensor:
    """y = a b^T in `dtype`: one equation of a traced program, of 2 M N K FLOPs.

    No derivative: see `functron.precision.matmul`. No collectives.

    Args:
        a: ``[..., M, K]``, as `quantise` makes it.
        b: ``[..., N, K]``, with the same leading dims.
        dtype: of the result.
        emulate: on CUDA too the reference.

    Returns:
        ``[..., M, N]``.

    Raises:
        ValueError: on CUDA, a product that the device does not have; see `why_not`.
    """
    lead = a.values.shape[:-2]
    y = SCALED_MATMUL(*_flat(a), *_flat(b), a.blocks, b.blocks, dtype, emulate)
    return y.reshape(*lead, *y.shape[1:])


def _flat(x: Quantised) -> list[Any]:
    many = math.prod(x.values.shape[:-2])
    parts = (x.values, x.scales, x.whole)
    return [part if part is None else part.reshape(many, *part.shape[-2:]) for part in parts]


def why_not(
    a: QuantisedFormat,
    b: QuantisedFormat,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    grouped: bool = False,
) -> str | None:
    """Why a GPU of this compute capability has no product of such operands; None where it has.

    Args:
        a: of the left operand.
        b: of the right one.
        dtype: of the result.
        capability: major and minor, as `torch.cuda.get_device_capability` gives them.
        grouped: of a product per group of rows.
    """
    blocks = (a.blocks, b.blocks)
    name = f"{a.element}@{a.blocks} x {b.element}@{b.blocks}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"tensor cores give bfloat16, float16 or float32, not {dtype}"
    if a.element == b.element == "e5m2":
        return f"no GPU multiplies e5m2 by e5m2 ({name}); let one operand be e4m3"
    if grouped:
        fits = {*blocks} <= {"tensor", "row"} and (a.element, b.element) == ("e4m3", "e4m3")
        if not fits or dtype != torch.bfloat16 or capability[0] != 9:
            return (
                "grouped products on GPUs are of e4m3 by tensors or rows with results in bfloat16, "
                f"on compute capability 9.x; not of {name} in {dtype} on {_join_dots(capability)}"
            )
        return None
    if blocks in (("tensor", "tensor"), ("row", "row")):
        if blocks[0] == "row" and b.element != "e4m3":
            return f"the right operand of row x row is e4m3 on GPUs, not {b.element}"
        return _least(capability, (8, 9), name, "NVIDIA L4, H100 or later")
    if blocks in _BY_128:
        if capability[0] != 9:
            return (
                f"{name} is for compute capability 9.x (NVIDIA H100, H200), not "
                f"{_join_dots(capability)}; on later ones take 1x32 (mxfp8)"
            )
        return None
    if blocks == ("1x32", "1x32"):
        if "e2m1" in (a.element, b.element):
            return f"torch's own builds have no product of {name}; take 1x16 (nvfp4)"
        return _least(capability, (10, 0), name, "NVIDIA B200 or later")
    if blocks[0] in _SQUARE and blocks[1] in _SQUARE:
        return _least(capability, (10, 0), name, "NVIDIA B200 or later")
    return f"no GPU multiplies {a.blocks} by {b.blocks} ({name}); let both have blocks of one kind"


def _least(
    capability: tuple[int, int], wanted: tuple[int, int], name: str, which: str
) -> str | None:
    if capability >= wanted:
        return None
    return (
        f"{name} wants compute capability {_join_dots(wanted)} ({which}), and this GPU has "
        f"{_join_dots(capability)}"
    )


def _join_dots(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """A matrix of scales in the order of ``SwizzleType.SWIZZLE_32_4_4``, flat.

    Padded with zeros to whole tiles of 128 x 4, one after the other; row r and column c of a tile
    is its element ``16 (r % 32) + 4 (r // 32) + c``.
    """
    rows, cols = scales.shape
    bytes_ = F.pad(scales.view(torch.uint8), (0, -cols % 4, 0, -rows % 128))
    tiles = bytes_.view(-(-rows // 128), 4, 32, -(-cols // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def operands(x: Quantised, *, wide: Quantised | None = None) -> tuple[list, list, list]:
    """Scales, their kinds and their orders, of a matrix, as `F.scaled_mm` takes them.

    Args:
        x: values ``[rows, K]``.
        wide: x is the right operand of this left one; of "row" its scales lie along columns.
    """
    kind, order = F.ScalingType, F.SwizzleType
    scales = x.scales
    if x.blocks == "tensor":
        return [scales.reshape(())], [kind.TensorWise], [order.NO_SWIZZLE]
    if x.blocks == "row":
        lying = scales.reshape(1, -1) if wide is not None else scales.reshape(-1, 1)
        return [lying.contiguous()], [kind.RowWise], [order.NO_SWIZZLE]
    if x.blocks in ("1x128", "128x128"):
        which = kind.BlockWise1x128 if x.blocks == "1x128" else kind.BlockWise128x128
        return [x.mm_scales()], [which], [order.NO_SWIZZLE]
    if x.blocks == "1x32":
        return [swizzled(scales)], [kind.BlockWise1x32], [order.SWIZZLE_32_4_4]
    assert x.whole is not None, x.blocks
    if x.blocks == "16x16":
        scales = scales.view(torch.uint8).repeat_interleave(16, 0).view(scales.dtype)
    return (
        [swizzled(scales), x.whole.reshape(())],
        [kind.BlockWise1x16, kind.TensorWise],
        [order.SWIZZLE_32_4_4, order.NO_SWIZZLE],
    )


def on_cuda(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """`scaled_matmul` of two matrices by `F.scaled_mm`; layouts are checked on fake ones."""
    (rows, cols), columns = a.values.shape, b.values.shape[0]
    if not rows or not columns or not cols:
        return a.values.new_zeros(rows, columns, dtype=dtype)
    # rows of the result may be any; its columns are the right operand's rows
    lower = -rows % a.block[0]
    more = -columns % max(b.block[0], _ALIGNED)
    deeper = -cols % {1: _ALIGNED, _COMPLETE: _COMPLETE}.get(a.block[1], 1)
    a, b = _pad_with_zeros(a, lower, deeper), _pad_with_zeros(b, more, deeper)
    left, right = operands(a), operands(b, wide=a)
    y = F.scaled_mm(
        a.values.contiguous(), b.values.contiguous().mT, *left[:2], *right[:2],
        swizzle_a=left[2], swizzle_b=right[2], output_dtype=dtype,
    )  # fmt: skip
    y = y.narrow(0, 0, rows) if lower else y
    return y.narrow(1, 0, columns) if more else y


def _pad_with_zeros(x: Quantised, rows: int, cols: int) -> Quantised:
    """With so many rows and columns of zeros more."""
    if not rows and not cols:
        return x
    values = F.pad(x.values.view(torch.uint8), (0, cols, 0, rows)).view(x.values.dtype)
    if not rows or x.blocks == "tensor" or x.block[0] > 1:
        return x._replace(values=values)  # blocks of several rows have scales for all of them
    raw = x.scales if x.scales.dtype == torch.float32 else x.scales.view(torch.uint8)
    scales = F.pad(raw, (0, 0, 0, rows)).view(x.scales.dtype)
    return x._replace(values=values, scales=scales)


def _of_parts(parts: Sequence, left: str, right: str) -> tuple[Quantised, Quantised]:
    """The two operands, or two batches of them, of their values, scales and scales of all."""
    a, a_scales, a_whole, b, b_scales, b_whole = parts
    return Quantised(a, a_scales, left, a_whole), Quantised(b, b_scales, right, b_whole)


def _matrices(x: Quantised) -> list[Quantised]:
    wholes = [None] * len(x.values) if x.whole is None else list(x.whole)
    rows = zip(x.values, x.scales, wholes, strict=True)
    return [x._replace(values=v, scales=s, whole=w) for v, s, w in rows]


def _reference(*args) -> torch.Tensor:
    *parts, a_blocks, b_blocks, dtype, _ = args
    wide = torch.promote_types(dtype, torch.float32)
    left, right = (dequantise(x).to(wide) for x in _of_parts(parts, a_blocks, b_blocks))
    y = left.new_empty(len(left), left.shape[1], right.shape[1])
    for one, x, w in zip(y, left, right, strict=True):  # the same bits for one and for many
        torch.mm(x, w.mT, out=one)
    return y.to(dtype)


def _kernel(launch: Launch, *args) -> torch.Tensor:
    *parts, a_blocks, b_blocks, dtype, emulate = args
    if emulate:
        return _reference(*args)
    a, b = _of_parts(parts, a_blocks, b_blocks)
    _check_gpu(a, b, dtype)
    rows = zip(_matrices(a), _matrices(b), strict=True)
    made = [on_cuda(x, w, dtype) for x, w in rows]
    return made[0].contiguous().unsqueeze(0) if len(made) == 1 else torch.stack(made)


def _check_gpu(a: Quantised, b: Quantised, dtype: torch.dtype, *, grouped: bool = False) -> None:
    left, right = (QuantisedFormat(_element(x.values), x.blocks) for x in (a, b))
    capability = torch.cuda.get_device_capability(a.values.device)
    _refuse(why_not(left, right, dtype, capability, grouped=grouped))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        fix = 'another recipe, or kernels=functron.ops.use("reference") to compute it slowly'
        refuse("a quantised product", "recipe", reason, "one that this GPU has", fix)


def _element(x: torch.Tensor) -> str:
    return next(name for name, dtype in ELEMENTS.items() if dtype == x.dtype)


_OPERAND = "Tensor {0}, Tensor {0}_scales, Tensor? {0}_whole"

SCALED_MATMUL = define(
    f"scaled_matmul({_OPERAND.format('a')}, {_OPERAND.format('b')}, str a_blocks, str b_blocks, "
    "ScalarType dtype, bool emulate) -> Tensor",
    kernel=_kernel,
    reference=_reference,
    fake=lambda a, _, __, b, *rest: a.new_empty((*a.shape[:2], b.shape[1]), dtype=rest[-2]),
    batch=map_batch(6),
)
"""Of a ``[batch, M, K]`` and b ``[batch, N, K]``: ``[batch, M, N]``."""


@register_flop_formula(torch.ops.functron.scaled_matmul, get_raw=True)
def _flops(a, a_scales, a_whole, b, *args, out_val=None, **kwargs) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] * _width(a)


def _width(x: torch.Tensor) -> int:
    return x.shape[-1] * (2 if x.dtype == E2M1 else 1)


# --- products of groups of rows


def scaled_grouped_matmul(
    a: Quantised,
    b: Quantised,
    sizes: torch.Tensor,
    dtype: torch.dtype,
    *,
    zeros: bool = True,
    emulate: bool = False,
) -> torch.Tensor:
    """y[r] = a[r] b[g]^T in `dtype`, where g is the group of row r; see `grouped_matmul`.

    Args:
        a: ``[R, 1, K]``, sorted by group: every row is a matrix.
        b: ``[G, N, K]``.
        sizes: int64 ``[G]``.
        dtype: of the result.
        zeros: False: rows of no group may be anything.
        emulate: on CUDA too the reference.

    Returns:
        ``[R, N]``. No derivative, no collectives; one equation of 2 R N K FLOPs.

    Raises:
        ValueError: on CUDA, a product that the device does not have; see `why_not`.
    """
    parts = (a.values, a.scales, a.whole, b.values, b.scales, b.whole)
    return SCALED_GROUPED_MATMUL(*parts, sizes, a.blocks, b.blocks, dtype, zeros, emulate)


def scaled_grouped_weight(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    y: torch.Tensor,
    y_scales: torch.Tensor,
    sizes: torch.Tensor,
    dtype: torch.dtype,
    *,
    emulate: bool = False,
) -> torch.Tensor:
    """w[g] = sum over the rows r of group g of x[r]^T y[r], of values times scales.

    Args:
        x: float8 ``[R, D]``, sorted by group.
        x_scales: float32, ``[R, 1]`` or ``[R, D]``.
        y: float8 ``[R, F]``.
        y_scales: as those of x.
        sizes: int64 ``[G]``.
        dtype: of the result.
        emulate: on CUDA too, where there is no other.

    Returns:
        ``[G, D, F]``. No derivative, no collectives; one equation of 2 R D F FLOPs.
    """
    return SCALED_GROUPED_WEIGHT(x, x_scales, y, y_scales, sizes, dtype, emulate)


def _grouped_reference(*args) -> torch.Tensor:
    *parts, sizes, a_blocks, b_blocks, dtype, zeros, _ = args
    wide = torch.promote_types(dtype, torch.float32)
    rows, w = (dequantise(x).to(wide) for x in _of_parts(parts, a_blocks, b_blocks))
    return grouped_matmul(rows.squeeze(1), w.mT, sizes, zeros).to(dtype)


def _grouped_kernel(launch: Launch, *args) -> torch.Tensor:
    *parts, sizes, a_blocks, b_blocks, dtype, zeros, emulate = args
    if emulate:
        return _grouped_reference(*args)
    a, b = _of_parts(parts, a_blocks, b_blocks)
    _check_gpu(a, b, dtype, grouped=True)
    return grouped_on_cuda(a.values, a.scales, b.values, b.scales, sizes, dtype, zeros)


def grouped_on_cuda(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    sizes: torch.Tensor,
    dtype: torch.dtype,
    zeros: bool,
) -> torch.Tensor:
    """`scaled_grouped_matmul` by torch's kernel; nothing waits for sizes."""
    ends = sizes.cumsum(0)
    y = torch._scaled_grouped_mm(
        a.squeeze(1).contiguous(),
        b.contiguous().mT,
        a_scales.reshape(-1).contiguous(),
        b_scales.squeeze(-1).expand(b.shape[:2]).contiguous(),
        offs=ends.to(torch.int32),
        out_dtype=dtype,
    )
    return clear_rows(y, ends[-1]) if zeros else y


SCALED_GROUPED_MATMUL = define(
    f"scaled_grouped_matmul({_OPERAND.format('a')}, {_OPERAND.format('b')}, Tensor sizes, "
    "str a_blocks, str b_blocks, ScalarType dtype, bool zeros, bool emulate) -> Tensor",
    kernel=_grouped_kernel,
    reference=_grouped_reference,
    fake=lambda a, _, __, b, *rest: a.new_empty((len(a), b.shape[1]), dtype=rest[-3]),
    batch=map_one_by_one,
)
"""Of a ``[R, 1, K]`` and b ``[G, N, K]``: ``[R, N]``."""


def _weight_reference(x, x_scales, y, y_scales, sizes, dtype, emulate) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    left, right = ((v.float() * s).to(wide) for v, s in ((x, x_scales), (y, y_scales)))
    return grouped_matmul_weight(left, right, sizes, len(sizes)).to(dtype)


def _weight_kernel(launch: Launch, x, x_scales, y, y_scales, sizes, dtype, emulate) -> torch.Tensor:
    if not emulate:
        _refuse("gradients of experts' weights have no quantised product on GPUs; take wgrad=high")
    return _weight_reference(x, x_scales, y, y_scales, sizes, dtype, emulate)


SCALED_GROUPED_WEIGHT = define(
    "scaled_grouped_weight(Tensor x, Tensor x_scales, Tensor y, Tensor y_scales, Tensor sizes, "
    "ScalarType dtype, bool emulate) -> Tensor",
    kernel=_weight_kernel,
    reference=_weight_reference,
    fake=lambda x, x_scales, y, y_scales, sizes, dtype, emulate: x.new_empty(
        (len(sizes), x.shape[1], y.shape[1]), dtype=dtype
    ),
    batch=map_one_by_one,
)
"""Of x ``[R, D]`` and y ``[R, F]``: ``[G, D, F]``."""


@register_flop_formula(torch.ops.functron.scaled_grouped_matmul, get_raw=True)
def _grouped_flops(a, a_scales, a_whole, b, *args, out_val=None, **kwargs) -> int:
    return 2 * a.shape[0] * b.shape[1] * _width(a)


@register_flop_formula(torch.ops.functron.scaled_grouped_weight, get_raw=True)
def _weight_flops(x, x_scales, y, *args, out_val=None, **kwargs) -> int:
    return 2 * x.shape[0] * x.shape[1] * y.shape[1]
