"""Quantisation to 8-bit floating point: by blocks, by tensors with delayed scaling, and back.

The quantised values are ``x * by``, rounded to nearest with ties to even, and come with ``1 / by``.
Numbers beyond the largest one of the format become that one; by blocks there are none, as the
largest magnitude of a block becomes it. What is not finite becomes NaN, with all of its block,
whose scale is NaN too: nothing that overflowed is hidden. Blocks of zeros have scale 1.

Recipes: blocks of 1x128 for activations and of 128x128 for weights (DeepSeek-V3,
https://arxiv.org/abs/2412.19437); MX (OCP's Microscaling formats), 1x32 with powers of two, which
are rounded up, as in NVIDIA's libraries, so that nothing saturates (OCP's conversion rounds down);
and per tensor, with delayed scaling, the recipe of NVIDIA's Transformer Engine: to know a tensor's
largest magnitude before it is cast takes a pass over it; so the scale is that of the steps before,
and the cast finds the magnitude for those to come in the same pass (`cast_fp8`). All in torch's
operations on small tensors: keep the states of many tensors in one, and update them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.ops.define import PACK_BYTES, Launch, define, type_name

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FORMATS: Mapping[str, torch.dtype] = MappingProxyType({"e4m3": E4M3, "e5m2": E5M2})
MOST: Mapping[torch.dtype, float] = MappingProxyType({E4M3: 448.0, E5M2: 57344.0})
"""The largest number of each format."""

_MACROS = {E4M3: "__NV_E4M3", E5M2: "__NV_E5M2"}
_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"1x128": (1, 128), "128x128": (128, 128), "mx": (1, 32)}
)
_TILE, _THREADS, _PAD = 128, 256, 4
_LARGEST = torch.finfo(torch.float32).max
_NAN = 0x7F  # in both formats
_ROWS_OF_A_GRID = 1 << 20


class Quantised(NamedTuple):
    """A matrix, or a batch of them, in 8-bit floating point.

    Attributes:
        values: float8, [..., rows, cols].
        scales: what the values of each block are to be multiplied by: float32, or E8M0 of "mx".
            [..., rows, cols / 128], [..., rows / 128, cols / 128] or [..., rows, cols / 32],
            rounded up.
        blocks: what shares a scale: "1x128", "128x128" or "mx".
    """

    values: torch.Tensor
    scales: torch.Tensor
    blocks: str

    def mm_scales(self) -> torch.Tensor:
        """The scales of a matrix in the layout that `torch.nn.functional.scaled_mm` takes.

        No copy of what `quantise_fp8` made. Of ``values`` ``[rows, cols]``, as the left operand, or
        as ``values.mT`` the right one: of 1x128 (``ScalingType.BlockWise1x128``) ``[rows, cols /
        128]`` with strides ``[1, rows]``; of 128x128 (``BlockWise128x128``) ``[padded, rows /
        128]`` with strides ``[1, padded]``, where padded is ``cols / 128`` rounded up to 4.

        Raises:
            ValueError: a batch of matrices, or "mx", whose scales it wants in another order
                (``SwizzleType.SWIZZLE_32_4_4``).
        """
        if self.blocks == "mx" or self.scales.dim() != 2:
            got = f"blocks of {self.blocks} and scales of shape {tuple(self.scales.shape)}"
            wanted = 'one matrix, by blocks of "1x128" or "128x128"'
            refuse("no layout for scaled_mm", "quantised", got, wanted, "multiply one at a time")
        tall, wide = self.scales.shape
        if self.blocks == "1x128":
            turned = self.scales.mT.contiguous()
            return turned.as_strided((tall, wide), (1, tall), turned.storage_offset())
        whole, padded = self.scales, -(-wide // _PAD) * _PAD
        known = all(
            size == 1 or found == made
            for size, found, made in zip((tall, wide), whole.stride(), (padded, 1), strict=True)
        )
        end = (whole.storage_offset() + tall * padded) * whole.element_size()
        if not known or whole.untyped_storage().nbytes() < end:
            whole = F.pad(whole, (0, padded - wide))
        return whole.as_strided((padded, tall), (1, padded), whole.storage_offset())


def quantise_fp8(
    x: torch.Tensor,
    blocks: str = "1x128",
    format: str = "e4m3",  # noqa: A002  (what it is called)
    *,
    power_of_two: bool = False,
    transpose: bool = False,
) -> tuple[Quantised, Quantised | None]:
    """x in 8 bits, and its transpose in 8 bits, from one pass over x.

    Every block's scale is its largest magnitude over that of the format, 448 or 57344. Blocks of
    the transpose lie along its rows, that is x's columns, so that of "1x128" and "mx" it holds
    other values; of "128x128" it is the transpose. See the module for what is not finite. No
    derivative: it is piecewise constant. No collectives.

    Args:
        x: [..., rows, cols], of any size; bfloat16, float16 or float32.
        blocks: what shares a scale: "1x128", "128x128", or "mx": 1x32 with scales in E8M0. At the
            edges they are smaller.
        format: "e4m3", or "e5m2" with more range and less precision.
        power_of_two: round scales up to powers of two, which lose no digits; always so with "mx".
        transpose: whether to make the second result, None without.

    Raises:
        ValueError: x is no matrix or of another dtype, or unknown blocks or format.
    """
    _check(x, blocks, format)
    rows, cols = _BLOCKS[blocks]
    power = power_of_two or blocks == "mx"
    y, scales, turned, turned_scales, _ = QUANTISE_FP8(
        x.reshape(-1, *x.shape[-2:]), None, rows, cols, format == "e5m2", power, transpose
    )

    def whole(values: torch.Tensor, scales: torch.Tensor) -> Quantised:
        if blocks == "mx":
            scales = scales.view(E8M0)
        elif blocks == "1x128":
            scales = scales.mT
        else:
            scales = scales[..., : -(-values.shape[-1] // cols)]
        lead = x.shape[:-2]
        return Quantised(_with_lead(lead, values), _with_lead(lead, scales), blocks)

    return whole(y, scales), whole(turned, turned_scales) if transpose else None


def cast_fp8(
    x: torch.Tensor,
    scale: torch.Tensor,
    format: str = "e4m3",  # noqa: A002
    *,
    transpose: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """``x * scale`` in 8 bits, saturating; its transpose; and the largest magnitude of x.

    One pass over x. The last result is not finite where an element of x is not; such elements
    become NaN, alone. No derivative, no collectives.

    Args:
        x: [..., rows, cols].
        scale: float32, [...]: one per matrix.
        format: "e4m3" or "e5m2".
        transpose: whether to make the second result, None without.

    Returns:
        float8 [..., rows, cols], float8 [..., cols, rows] or None, and float32 [...].

    Raises:
        ValueError: x is no matrix or of another dtype; scale is not float32 or of another shape.
    """
    _check(x, "1x128", format)
    lead = x.shape[:-2]
    if scale.dtype != torch.float32 or scale.shape != lead:
        raise ValueError(
            f"cast_fp8: got scale of {scale.dtype} and shape {tuple(scale.shape)}; wanted float32 "
            f"of shape {tuple(lead)}, one per matrix; fix: scale.float().expand(x.shape[:-2])"
        )
    y, _, turned, _, amax = QUANTISE_FP8(
        x.reshape(-1, *x.shape[-2:]), scale.reshape(-1), 0, 0, format == "e5m2", False, transpose
    )
    turned = _with_lead(lead, turned) if transpose else None
    return _with_lead(lead, y), turned, _with_lead(lead, amax)


def dequantise_fp8(x: Quantised, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``values * scales`` of every block, in float32, rounded to `dtype`. No derivative.

    Raises:
        TypeError: on CUDA, a dtype that is none of bfloat16, float16 and float32.
    """
    values, scales, blocks = x
    rows, cols = _BLOCKS[blocks]
    lead = values.shape[:-2]
    scales = scales.view(torch.uint8) if blocks == "mx" else scales
    like = torch.empty(0, dtype=dtype, device=values.device)
    y = DEQUANTISE_FP8(
        values.reshape(-1, *values.shape[-2:]), scales.reshape(-1, *scales.shape[-2:]), like,
        rows, cols,
    )  # fmt: skip
    return y.reshape(*lead, *y.shape[1:])


def _with_lead(lead: Sequence[int], part: torch.Tensor) -> torch.Tensor:
    return part.reshape(*lead, *part.shape[1:])


def _check(x: torch.Tensor, blocks: str, name: str) -> None:
    found = []
    if x.dim() < 2:
        found.append(Problem("x", f"shape {tuple(x.shape)}", "a matrix", "use x[None]"))
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        wanted = "bfloat16, float16 or float32"
        found.append(Problem("x", str(x.dtype), wanted, "use x.float()"))
    for what, value, known in (("blocks", blocks, _BLOCKS), ("format", name, FORMATS)):
        if value not in known:
            found.append(Problem(what, repr(value), "a known one", nearest(value, known)))
    raise_problems("FP8", found)


def _kernel(launch: Launch, x, given, block_rows, block_cols, e5m2, power, transpose) -> tuple:
    out = _fake(x, given, block_rows, block_cols, e5m2, power, transpose)
    y, scales, turned, turned_scales, amax = out
    amax.zero_()
    batch, rows, cols = x.shape
    if not x.numel():
        return out
    x = x if x.stride(2) == 1 or cols == 1 else x.contiguous()
    aligned = [x.data_ptr(), *(x.stride(i) * x.element_size() for i in (0, 1) if x.shape[i] > 1)]
    tiles = batch * -(-rows // _TILE) * -(-cols // _TILE)
    pitch = _TILE + 4 // x.element_size()
    launch(
        "quantise", "quantise", tiles, _THREADS,
        x, given, y.view(torch.uint8), scales, turned.view(torch.uint8) if transpose else None,
        turned_scales, amax, rows, cols, x.stride(0), x.stride(1),
        0 if block_rows != 1 else block_cols, int(power),
        int(not any(n % PACK_BYTES for n in aligned)),
        int(cols * x.element_size() % PACK_BYTES == 0), int(rows % PACK_BYTES == 0),
        defines={"ELEMENT": type_name(x, "quantise_fp8"), "FORMAT": _MACROS[y.dtype]},
        shared_bytes=_TILE * pitch * x.element_size(),
    )  # fmt: skip
    return out


def _fake(x, given, block_rows, block_cols, e5m2, power, transpose) -> tuple:
    batch, rows, cols = x.shape
    dtype = E5M2 if e5m2 else E4M3
    kind = torch.uint8 if block_cols == 32 else torch.float32
    sizes = back = (0, 0)
    if block_rows:
        sizes = _as_stored(-(-rows // block_rows), -(-cols // block_cols), block_rows, block_cols)
    if block_rows and transpose:
        back = _as_stored(-(-cols // block_rows), -(-rows // block_cols), block_rows, block_cols)
    return (
        x.new_empty((batch, rows, cols), dtype=dtype),
        x.new_empty((batch, *sizes), dtype=kind),
        x.new_empty((batch, cols, rows) if transpose else (batch, 0, 0), dtype=dtype),
        x.new_empty((batch, *back), dtype=kind),
        x.new_empty(batch if given is not None else 0, dtype=torch.float32),
    )


def _as_stored(tall: int, wide: int, block_rows: int, block_cols: int) -> tuple[int, int]:
    """How a matrix of scales lies in memory: turned for 1x128, padded for 128x128."""
    if block_cols != _TILE:
        return tall, wide
    return (wide, tall) if block_rows == 1 else (tall, -(-wide // _PAD) * _PAD)


def _reference(x, given, block_rows, block_cols, e5m2, power, transpose) -> tuple:
    dtype = E5M2 if e5m2 else E4M3
    x = x.float()
    none = x.new_empty((len(x), 0, 0), dtype=dtype)
    if given is not None:
        y = _cast(x, given[:, None, None], dtype)
        amax = x.abs().flatten(1).amax(1) if x[0:1].numel() else x.new_zeros(len(x))
        empty = x.new_empty((len(x), 0, 0))
        turned = _copy(y.view(torch.uint8).mT).view(dtype) if transpose else none
        return y, empty, turned, empty.clone(), amax
    y, scales = _by_blocks(x, block_rows, block_cols, dtype, power)
    turned, turned_scales = none, scales.new_empty((len(x), 0, 0))
    if transpose:
        turned, turned_scales = _by_blocks(x.mT, block_rows, block_cols, dtype, power)
    return y, scales, turned, turned_scales, x.new_empty(0)


def _copy(y: torch.Tensor) -> torch.Tensor:
    """In memory of its own, with the strides that a new tensor has: also of dims of size 1."""
    return torch.empty(y.shape, dtype=y.dtype, device=y.device).copy_(y)


def _by_blocks(x: torch.Tensor, rows: int, cols: int, dtype: torch.dtype, power: bool) -> tuple:
    batch, height, width = x.shape
    padded = F.pad(x, (0, -width % cols, 0, -height % rows))
    tall, wide = padded.shape[1] // rows, padded.shape[2] // cols
    parts = padded.reshape(batch, tall, rows, wide, cols)
    if parts.numel():
        amax = parts.abs().amax((2, 4))
    else:
        amax = x.new_zeros(batch, tall, wide)
    by, back = _scales(amax, MOST[dtype], power)
    y = _cast(parts, by[:, :, None, :, None], dtype).reshape(padded.shape)
    if cols == 32:
        back = (back.view(torch.int32) >> 23).to(torch.uint8)
    elif rows == 1:
        back = back.mT
    else:
        back = F.pad(back, (0, -wide % _PAD))
    return _copy(y.view(torch.uint8)[:, :height, :width]).view(dtype), _copy(back)


def _scales(amax: torch.Tensor, largest: float, power: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of each block, and its inverse."""
    most = torch.full_like(amax, largest)  # torch divides numbers by their reciprocals
    if power:
        ratio = (amax / most).view(torch.int32)
        exponent = ((ratio >> 23) + ((ratio & 0x7FFFFF) != 0)).clamp(1, 253)
        by, back = ((254 - exponent) << 23, exponent << 23)
        by, back = by.to(torch.int32).view(torch.float32), back.to(torch.int32).view(torch.float32)
    else:
        by = (most / amax).clamp(max=_LARGEST)
        back = torch.ones_like(by) / by
    zero, bad = amax == 0, ~amax.isfinite()
    nan = torch.full_like(amax, torch.nan)
    by, back = (torch.where(bad, nan, part.masked_fill(zero, 1.0)) for part in (by, back))
    return by, back


def _cast(x: torch.Tensor, by: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scaled = x * by + x * 0  # NaN of infinities
    most = MOST[dtype]
    y = scaled.clamp(-most, most).to(dtype)
    return y.view(torch.uint8).masked_fill(scaled.isnan(), _NAN).view(dtype)


def _batch(size: int, in_dims: tuple, args: tuple, op) -> tuple:
    x, given, *rest = args
    x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(size, *x.shape)
    if given is not None:
        given = given.expand(size, -1) if in_dims[1] is None else given.movedim(in_dims[1], 0)
        given = given.reshape(-1)
    out = op(x.reshape(-1, *x.shape[2:]), given, *rest)
    parts = [part.reshape(size, len(part) // size, *part.shape[1:]) for part in out]
    return tuple(parts), (0,) * 5


def _dequantise(launch: Launch, x, scales, like, block_rows, block_cols) -> torch.Tensor:
    y = x.new_empty(x.shape, dtype=like.dtype)
    batch, rows, cols = x.shape
    x = x.contiguous()
    if not x.numel():
        return y
    packed = cols % PACK_BYTES == 0 and x.data_ptr() % PACK_BYTES == 0
    launch(
        "quantise", "dequantise", min(batch * rows, _ROWS_OF_A_GRID), _THREADS,
        x.view(torch.uint8), scales, y, batch, rows, cols,
        block_rows.bit_length() - 1, block_cols.bit_length() - 1, *scales.stride(),
        int(scales.dtype == torch.uint8), int(packed),
        defines={"ELEMENT": type_name(like, "dequantise_fp8"), "FORMAT": _MACROS[x.dtype]},
    )  # fmt: skip
    return y


def _dequantise_reference(x, scales, like, block_rows, block_cols) -> torch.Tensor:
    if scales.dtype == torch.uint8:
        scales = scales.view(E8M0).float()
    rows = scales.repeat_interleave(block_rows, 1)[:, : x.shape[1]]
    return (x.float() * rows.repeat_interleave(block_cols, 2)[:, :, : x.shape[2]]).to(like.dtype)


def _dequantise_batch(size: int, in_dims: tuple, args: tuple, op) -> tuple:
    x, scales, like, *rest = args
    x, scales = (
        y.expand(size, *y.shape) if dim is None else y.movedim(dim, 0)
        for y, dim in zip((x, scales), in_dims[:2], strict=True)
    )
    y = op(x.reshape(-1, *x.shape[2:]), scales.reshape(-1, *scales.shape[2:]), like, *rest)
    return y.reshape(x.shape), 0


QUANTISE_FP8 = define(
    "quantise_fp8(Tensor x, Tensor? scale, int block_rows, int block_cols, bool e5m2, "
    "bool power_of_two, bool transpose) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=_fake,
    batch=_batch,
)
"""Of x, [batch, rows, cols]: values, scales, those of the transpose, amax; empty where not asked
for. With `scale`, [batch], blocks are 0; MX scales are bytes."""

DEQUANTISE_FP8 = define(
    "dequantise_fp8(Tensor values, Tensor scales, Tensor like, int block_rows, int block_cols) "
    "-> Tensor",
    kernel=_dequantise,
    reference=_dequantise_reference,
    fake=lambda x, scales, like, block_rows, block_cols: x.new_empty(x.shape, dtype=like.dtype),
    batch=_dequantise_batch,
)
"""Of values [batch, rows, cols], in the dtype of `like`."""


Of = Literal["max", "latest"]


class DelayedScale(NamedTuple):
    """The scale of the next cast of each of some tensors, and the history it comes from.

    Attributes:
        scale: float32, [...], one for each tensor.
        history: float32, [length, ...], their largest magnitudes in the last steps, the latest
            last; 0 where nothing is known.
    """

    scale: torch.Tensor
    history: torch.Tensor


def delayed_scale(
    length: int, shape: Sequence[int] = (), *, device: torch.device | str | None = None
) -> DelayedScale:
    """The state before the first step: scales of 1, and nothing known.

    Args:
        length: how many steps are remembered.
        shape: of the tensors that are scaled: () is one.

    Raises:
        ValueError: length is not positive.
    """
    if length < 1:
        raise ValueError(f"delayed_scale: got length={length}; wanted at least 1 step to remember")
    history = torch.zeros(length, *shape, dtype=torch.float32, device=device)
    return DelayedScale(torch.ones_like(history[0]), history)


def advance(
    state: DelayedScale,
    amax: torch.Tensor,
    format: str = "e4m3",  # noqa: A002  (what it is called)
    *,
    of: Of = "max",
    margin: int = 0,
) -> DelayedScale:
    """The state after a step in which the tensors' largest magnitudes were `amax`. Pure.

    The scale becomes ``most / (2**margin * a)``, with `most` the format's largest number and a the
    largest, or the latest, magnitude remembered; it stays where that is 0. Magnitudes that are not
    finite are remembered as 0: one overflow does not stop the scale for as long as it would be
    remembered. No collectives: take the maximum of `amax` over the ranks that share a tensor first.

    Args:
        state: before.
        amax: float32, [...], as `cast_fp8` returns it.
        format: of the casts, "e4m3" or "e5m2".
        of: "max", or "latest".
        margin: binary orders of magnitude to leave free.
    """
    latest = torch.where(amax.isfinite(), amax, torch.zeros_like(amax))
    history = torch.cat([state.history[1:], latest[None]])
    known = history.amax(0) if of == "max" else latest
    most = torch.full_like(known, MOST[FORMATS[format]])
    scale = (most / known / 2.0**margin).clamp(max=torch.finfo(torch.float32).max)
    return DelayedScale(torch.where(known > 0, scale, state.scale), history)
