"""Quantisation to floating point of 8 and 4 bits: by tensors, rows and blocks, and back.

The quantised values are ``x * by``, rounded to nearest with ties to even, and come with ``1 / by``.
Numbers beyond the format's largest one saturate; in blocks there are none, as a block's largest
magnitude becomes it. Elements that are not finite become NaN, with all of their block, whose scale
is NaN too: no overflow is hidden. Blocks of zeros have scale 1. Those of 128 may be incomplete at a
matrix's ends, as in DeepSeek-V3's weights: ``ceil(rows / 128)`` rows of 128x128 blocks.

`QuantisedFormat` names the format of an operand, and `quantise` makes it:

| format       | scales                                    | source                             |
|--------------|-------------------------------------------|------------------------------------|
| e4m3@tensor  | one float32, of a magnitude that is given | Transformer Engine, current scales |
| e4m3@row     | one float32 per row                       | torchao, "rowwise"                 |
| e4m3@1x128   | float32                                   | DeepSeek-V3's activations          |
| e4m3@128x128 | float32                                   | DeepSeek-V3's weights              |
| e4m3@1x32    | E8M0: powers of two, rounded up           | OCP's Microscaling formats, MXFP8  |
| e2m1@1x16    | E4M3 under one float32 of the tensor      | NVFP4                              |
| e2m1@16x16   | the same, in squares                      | NVFP4's weights                    |

(https://arxiv.org/abs/2412.19437, https://arxiv.org/abs/2509.25149.) Blocks lie along rows, the dim
that a product sums. Scales of MX are rounded up as in NVIDIA's libraries, so that nothing saturates
(OCP's conversion rounds down). Magnitudes of tensors and rows are arguments, as they are those of
the whole tensor, of which a rank may have a shard.

Stochastic rounding and the signs of `hadamard`, which spreads outliers over their neighbours, take
random bits of an element's global position: shards are rounded as the whole tensor is.

Delayed scaling (Transformer Engine): current scales take a pass over a tensor before it is cast,
and communication between ranks with shards of it. Delayed ones come from a *history* of the
magnitudes of earlier steps, a leaf of the state. The magnitudes of a step leave it as the history's
cotangent: not a derivative, but a `histogram`. Gradients are summed over microbatches, ranks and
pipeline stages, whatever the program, and sums of histograms are the histograms of all, whose last
nonempty bin is the maximum. So there are no side effects, and no communication but that of every
gradient. A recomputed layer reads the same history twice; a scan over layers has stacked ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from functron.core import compat
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.random import fold_in, threefry
from functron.ops.operations import (
    PACK_BYTES,
    TYPES,
    Launch,
    define,
    leading,
    map_batch,
    type_name,
)

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
E2M1 = torch.float4_e2m1fn_x2
"""Two numbers in a byte, the first in its low bits."""

FORMATS: Mapping[str, torch.dtype] = MappingProxyType({"e4m3": E4M3, "e5m2": E5M2})
ELEMENTS: Mapping[str, torch.dtype] = MappingProxyType({**FORMATS, "e2m1": E2M1})
MOST: Mapping[torch.dtype, float] = MappingProxyType({E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0})
"""The largest number of each format."""

_MACROS = {E4M3: "__NV_E4M3", E5M2: "__NV_E5M2"}
_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16), "16x16": (16, 16)}
)
_TWO_LEVELS = ("1x16", "16x16")
_TILE, _THREADS, _PAD = 128, 256, 4
_LARGEST = torch.finfo(torch.float32).max
_NAN = 0x7F  # in both formats


@dataclass(frozen=True)
class QuantisedFormat:
    """The storage of an operand's numbers: ``QuantisedFormat("e4m3", "1x128")``.

    As text ``e4m3@1x128``, followed by ``+stochastic`` and ``+pow2`` if set;
    `QuantisedFormat.parse` reads it back.

    Attributes:
        element: "e4m3" (three bits of mantissa, to 448), "e5m2" (two, to 57344) or "e2m1" (one, to
            6).
        blocks: the elements that share a scale: the "tensor", a "row", or "1x128", "128x128",
            "1x32", "1x16" or "16x16" blocks; see the module.
        stochastic: rounded to one of the two neighbours, with probabilities that make the mean
            exact, by random bits of the global position; False: to nearest, ties to even.
        power_of_two: scales are rounded up to powers of two, which keep all digits.

    Raises:
        ValueError: an unknown element or blocks, or a combination that no device and no paper has.
    """

    element: str
    blocks: str
    stochastic: bool = False
    power_of_two: bool = False

    def __post_init__(self) -> None:
        known = {"element": tuple(ELEMENTS), "blocks": ("tensor", "row", *_BLOCKS)}
        found = [
            Problem(name, repr(value), "a known one", nearest(value, allowed))
            for name, allowed in known.items()
            if (value := getattr(self, name)) not in allowed
        ]
        small = self.blocks in ("1x32", *_TWO_LEVELS)
        if not found and self.element == "e2m1" and not small:
            fix = "take 1x16, 16x16 (of weights) or 1x32, or e4m3"
            found.append(Problem("blocks", self.blocks, "small blocks for 4 bits", fix))
        if not found and self.element != "e2m1" and self.blocks in _TWO_LEVELS:
            fix = "take 1x32, or e2m1"
            found.append(Problem("element", self.element, f"e2m1 by blocks of {self.blocks}", fix))
        if not found and self.power_of_two and small:
            fix = "leave pow2 out: scales of 1x32 always are powers of two, those of e2m1 in E4M3"
            found.append(Problem("power_of_two", "True", "scales in float32", fix))
        raise_problems("a format", found)

    @property
    def dtype(self) -> torch.dtype:
        """The values' dtype; of "e2m1" each is two numbers."""
        return ELEMENTS[self.element]

    @property
    def scale_dtype(self) -> torch.dtype:
        """That of `Quantised.scales`."""
        own = {"1x32": E8M0, **dict.fromkeys(_TWO_LEVELS, E4M3)}
        return own.get(self.blocks, torch.float32)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block; (1, 1) where the tensor or the row shares a scale."""
        return _BLOCKS.get(self.blocks, (1, 1))

    @property
    def complete(self) -> bool:
        """Whether blocks must divide a matrix; False: those at its ends may be smaller."""
        return _TILE not in self.block

    @property
    def shared(self) -> Literal["tensor", "row", ""]:
        """Whose largest magnitude `quantise` must be given; "" where blocks find their own."""
        if self.blocks == "row":
            return "row"
        return "tensor" if self.blocks in ("tensor", *_TWO_LEVELS) else ""

    def __str__(self) -> str:
        flags = "+stochastic" * self.stochastic + "+pow2" * self.power_of_two
        return f"{self.element}@{self.blocks}{flags}"

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> QuantisedFormat:
        """The format of its text.

        Raises:
            ValueError: it is none; see also the class.
        """
        body, *flags = text.strip().split("+")
        element, at, blocks = body.partition("@")
        bad = [flag for flag in flags if flag not in ("stochastic", "pow2")]
        if not at or bad or len({*flags}) != len(flags):
            wanted = "ELEMENT@BLOCKS, +stochastic, +pow2"
            refuse(
                "a format", "text", repr(text), wanted, "such as e4m3@1x128 or e2m1@1x16+stochastic"
            )
        return cls(element, blocks, "stochastic" in flags, "pow2" in flags)


class Quantised(NamedTuple):
    """A matrix, or a batch of them, in floating point of 8 or 4 bits.

    Attributes:
        values: float8, [..., rows, cols]; of FP4 [..., rows, cols / 2].
        scales: the factor of each block's values: float32; E8M0 for "1x32"; E4M3 for "1x16" and
            "16x16". A matrix with one number for each block; for "tensor" [..., 1, 1], for "row"
            [..., rows, 1].
        blocks: the elements that share a scale, as in `QuantisedFormat`.
        whole: for "1x16" and "16x16" a factor of all scales, float32 [..., 1, 1].
    """

    values: torch.Tensor
    scales: torch.Tensor
    blocks: str
    whole: torch.Tensor | None = None

    @property
    def block(self) -> tuple[int, int]:
        """As of `QuantisedFormat`."""
        return _BLOCKS.get(self.blocks, (1, 1))

    def mm_scales(self) -> torch.Tensor:
        """The scales of a matrix in the layout that `torch.nn.functional.scaled_mm` takes.

        Of ``values`` ``[rows, cols]``, as the left operand, or as ``values.mT`` the right one: of
        1x128 (``ScalingType.BlockWise1x128``) ``[rows, cols / 128]`` with strides ``[1, rows]``; of
        128x128 (``BlockWise128x128``) ``[padded, rows / 128]`` with strides ``[1, padded]``, where
        padded is ``cols / 128`` rounded up to 4. torch wants complete blocks.

        Raises:
            ValueError: a batch of matrices, or other blocks (of those of 32 and 16 it wants scales
                in another order: `swizzled`).
        """
        if self.blocks not in ("1x128", "128x128") or self.scales.dim() != 2:
            got = f"blocks of {self.blocks} and scales of shape {tuple(self.scales.shape)}"
            wanted = 'one matrix, by blocks of "1x128" or "128x128"'
            refuse("no layout for scaled_mm", "quantised", got, wanted, "multiply one at a time")
        found = self.scales
        if self.blocks == "128x128":
            found = F.pad(found, (0, -found.shape[1] % _PAD)).mT
        return found.new_empty_strided(found.shape, (1, found.shape[0])).copy_(found)


def _copy(y: torch.Tensor) -> torch.Tensor:
    """In memory of its own, with the strides that a new tensor has: also of dims of size 1."""
    return torch.empty(y.shape, dtype=y.dtype, device=y.device).copy_(y)


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


class RoundingDraw(NamedTuple):
    """The random bits of stochastic rounding, which belong to an element's position in the whole
    tensor.

    Element (i, j) has those of the counter ``outer[i] + inner[j]``: ``random.bits(fold_in(key,
    salt), shape, bit_width=16)`` at that position.

    Attributes:
        key: of `functron.random`, int64 [2].
        outer: int64, [rows].
        inner: int64, [cols].
        salt: in [0, 2^32); differs between tensors.
    """

    key: torch.Tensor
    outer: torch.Tensor
    inner: torch.Tensor
    salt: int = 0


def magnitude(x: torch.Tensor, format: QuantisedFormat) -> torch.Tensor | None:  # noqa: A002
    """The largest magnitude that `quantise` needs of x: of each matrix, of each row, or None.

    float32 [...] or [..., rows]; infinite where an element is not finite. For a shard of a tensor
    take the maximum over the ranks that have the other shards.
    """
    if not format.shared:
        return None
    x = x.detach().abs().float()  # Inductor 2.13 writes wrong C++ for some maxima in bfloat16
    dims = (-1,) if format.shared == "row" else (-2, -1)
    most = x.amax(dims) if x.numel() else x.sum(dims)
    # a maximum over ranks may lose NaN, but not infinity
    return most.nan_to_num(nan=torch.inf, posinf=torch.inf)


def quantise(
    x: torch.Tensor,
    format: QuantisedFormat,  # noqa: A002
    amax: torch.Tensor | None = None,
    draw: RoundingDraw | None = None,
    *,
    emulate: bool = False,
) -> Quantised:
    """The matrix x in this format, blocks along its last dim; an equation of a traced program.

    Scales: of "tensor" and "row" ``amax / most``, with `most` the largest number of the format. Of
    "1x16" and "16x16" the tensor's is ``amax / (6 * 448)`` and a block's is the E4M3 number nearest
    to ``its magnitude / 6 / the tensor's``, at least 2^-6, so that a block may saturate by as much
    as that rounding, 1/16. No derivative, no collectives.

    Args:
        x: [..., rows, cols], floating point; blocks divide both, where they must be `complete`.
        format: of the result.
        amax: as `magnitude` makes it; None for blocks that find their own.
        draw: the bits, for a stochastic format.
        emulate: on CUDA too in torch's operations.

    Raises:
        ValueError: blocks do not divide x; or amax or draw are missing, superfluous or of another
            shape.
    """
    _check_format(x, format, amax, draw)
    batch, (rows, cols) = x.shape[:-2], x.shape[-2:]
    many = math.prod(batch)
    flat = amax if amax is None else amax.reshape(many, *amax.shape[len(batch) :])
    places = [None] * 3 if draw is None else [part.expand(many, -1) for part in draw[:3]]
    salt = 0 if draw is None else draw.salt
    values, scales, whole = QUANTISE(
        x.reshape(many, rows, cols), flat, *places, salt, str(format), emulate
    )
    parts = [part.reshape(*batch, *part.shape[1:]) for part in (values, scales, whole)]
    two_levels = format.blocks in _TWO_LEVELS
    return Quantised(parts[0], parts[1], format.blocks, parts[2] if two_levels else None)


def dequantise(x: Quantised) -> torch.Tensor:
    """``values * scales`` in float32, one product, exactly rounded; of two levels of scales two.

    In torch's operations. The scale of a block is ``scales * whole`` where there are two levels.
    """
    values, scales, _, whole = x
    values = unpacked(values) if values.dtype == E2M1 else _numbers(values)
    scales = scales.float() if whole is None else scales.float() * whole
    rows, cols = x.block
    scales = scales.repeat_interleave(rows, -2) if rows > 1 else scales
    scales = scales.repeat_interleave(cols, -1) if cols > 1 else scales
    return values * scales[..., : values.shape[-2], : values.shape[-1]]


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """float32 of FP8 codes, which torch looks up faster on CPUs than it converts them."""
    if values.dtype != E4M3 or values.device.type != "cpu":
        return values.float()
    table = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    codes = values.view(torch.uint8).int().flatten()
    return table.index_select(0, codes).reshape(values.shape)


def copied(
    x: torch.Tensor, dtype: torch.dtype | None = None, *, turn: bool = False
) -> torch.Tensor:
    """x's bits as another dtype of that size, in memory of its own; one equation, no derivative.

    Of dtypes of 4 and 8 bits compilers have no views, nor has torch 2.11 under vmap.

    Args:
        x: [..., rows, cols].
        dtype: of the result; None: x's.
        turn: transposed, [..., cols, rows]; of E2M1, before or after, numbers and not their pairs.
    """
    return COPIED(x.detach(), dtype or x.dtype, turn)


def _copy_codes(x, dtype, turn) -> torch.Tensor:
    raw = x.view(torch.int32 if x.itemsize == 4 else torch.uint8)
    if turn and E2M1 in (x.dtype, dtype):
        codes = torch.stack([raw & 0xF, raw >> 4], -1).flatten(-2).mT
        low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
        raw = low | high << 4
    elif turn:
        raw = raw.mT
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


def _copied_fake(x, dtype, turn) -> torch.Tensor:
    *lead, rows, cols = x.shape
    if turn:
        pair = 2 if E2M1 in (x.dtype, dtype) else 1
        rows, cols = cols * pair, rows // pair
    return x.new_empty((*lead, rows, cols), dtype=dtype)


COPIED = define(
    "copied(Tensor x, ScalarType dtype, bool turn) -> Tensor",
    kernel=lambda launch, *args: _copy_codes(*args),
    reference=_copy_codes,
    fake=_copied_fake,
    batch=lambda size, in_dims, args, op: (op(leading(args[0], in_dims[0], size), *args[1:]), 0),
)


_NUMBERS_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS_E2M1 += tuple(-number for number in _NUMBERS_E2M1)
_PAIRS_E2M1 = tuple((low, high) for high in _NUMBERS_E2M1 for low in _NUMBERS_E2M1)


def unpacked(values: torch.Tensor) -> torch.Tensor:
    """The numbers of E2M1 pairs, float32 [..., 2 n] of [..., n]."""
    table = compat.constant(_PAIRS_E2M1, values.device)
    codes = values.view(torch.uint8).int().flatten()
    return table.index_select(0, codes).reshape(*values.shape[:-1], -1)


def _pack_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., 2 n] as pairs of E2M1 [..., n], rounded to nearest, ties to even; NaN is 6."""
    size = x.abs()
    binade = (size.view(torch.int32) >> 23).clamp_(127, 129) - 127  # of [0, 2), [2, 4), [4, 8)
    steps = (size * ((128 - binade) << 23).view(torch.float32)).round_().nan_to_num_(0.0)
    code = steps.to(torch.uint8) + (binade << 1).to(torch.uint8)
    code = torch.where(x.isnan(), 7, code + (x.signbit().to(torch.uint8) << 3))
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).view(E2M1)


WIDTH = 16
"""Elements that `hadamard` mixes."""


def hadamard(x: torch.Tensor, key: torch.Tensor, places: torch.Tensor, salt: int) -> torch.Tensor:
    """Each 16 consecutive elements of rows times a Hadamard matrix of random signs, orthogonal.

    ``x_j' = sum_i signs_i (-1)^popcount(i & j) x_i / 4``: one large element becomes 16 of a quarter
    of its size. The product of two matrices whose rows are mixed with the same signs is that of
    the matrices (Ashkboos et al. 2024, QuaRot). Sums in a fixed order; one equation of a traced
    program. No derivative.

    A sign is minus where the lowest bit of ``random.bits(fold_in(key, salt), ...)`` is 1 at the
    column's place.

    Args:
        x: [..., rows, cols], 16 dividing cols.
        key: of `functron.random`, int64 [2].
        places: int64 [cols], the columns' global positions.
        salt: in [0, 2^32).

    Returns:
        float32, of x's shape.

    Raises:
        ValueError: 16 does not divide the columns.
    """
    if x.shape[-1] % WIDTH:
        refuse("hadamard", "dim -1 of x", *undivided(x.shape[-1], WIDTH, f"1x{WIDTH}"))
    many = math.prod(x.shape[:-2])
    flat = x.reshape(many, *x.shape[-2:])
    return HADAMARD(flat, key.expand(many, -1), places.expand(many, -1), salt).reshape(x.shape)


def _hadamard(x, key, places, salt) -> torch.Tensor:
    words = [_words(fold_in(k, salt), place) for k, place in zip(key, places, strict=True)]
    signs = 1.0 - 2.0 * (torch.stack(words) & 1).float()
    x = (x.float() * signs.unsqueeze(1)).unflatten(-1, (-1, *[2] * 4))
    for dim in range(-4, 0):
        a, b = x.unbind(dim)
        x = torch.stack([a + b, a - b], dim)
    return (x.flatten(-5) / 4).contiguous()


HADAMARD = define(
    "hadamard(Tensor x, Tensor key, Tensor places, int salt) -> Tensor",
    kernel=lambda launch, *args: _hadamard(*args),
    reference=_hadamard,
    fake=lambda x, key, places, salt: x.new_empty(x.shape, dtype=torch.float32),
    batch=map_batch(3),
)
"""Of x [batch, rows, cols], with keys [batch, 2] and places [batch, cols]."""


def _check_format(
    x: torch.Tensor,
    format: QuantisedFormat,  # noqa: A002
    amax: torch.Tensor | None,
    draw: RoundingDraw | None,
) -> None:
    found = []
    if x.dim() < 2 or not x.is_floating_point():
        got = f"{x.dtype} of shape {tuple(x.shape)}"
        found.append(Problem("x", got, "a matrix of floating-point numbers", "use x[None].float()"))
    checked = not found and format.complete
    for dim, block in zip((-2, -1), format.block, strict=True) if checked else ():
        if x.shape[dim] % block:
            found.append(Problem(f"dim {dim} of x", *undivided(x.shape[dim], block, format.blocks)))
    rows = x.shape[:-1] if format.shared == "row" else x.shape[:-2]
    wanted = tuple(rows) if format.shared else None
    got_shape = None if amax is None else tuple(amax.shape)
    if not found and got_shape != wanted:
        fix = "pass magnitude(x, format), its maximum over the ranks that split x"
        found.append(Problem("amax", f"shape {got_shape}", f"{wanted}, for {format}", fix))
    if not found and (draw is not None) != format.stochastic:
        got_draw = "no bits" if draw is None else "bits"
        fix = "pass draw=Draw(key, outer, inner)" if format.stochastic else "leave draw out"
        found.append(Problem("draw", got_draw, f"what {format} needs", fix))
    raise_problems("quantise", found)


def undivided(size: int, block: int, blocks: str) -> tuple[str, str, str]:
    """Of a size that `block` does not divide what was got, what is wanted, and the nearest."""
    below, above = size // block * block, -(-size // block) * block
    near = f"{below} or {above}" if below else f"{above}"
    return str(size), f"a multiple of {block}, for blocks of {blocks}", f"make it {near}"


_LEAST_E4M3 = 2.0**-6
"""Its smallest normal number: the smallest scale of a block, as torchao has it."""

_MANTISSA: Mapping[torch.dtype, tuple[int, int]] = MappingProxyType(
    {E4M3: (3, -6), E5M2: (2, -14), E2M1: (1, 0)}
)
"""Bits of the mantissa, and the exponent below which the grid is even."""


def _format_reference(x, amax, key, outer, inner, salt, text, emulate) -> tuple:
    f = QuantisedFormat.parse(text)
    rows = f.block[0]
    many = _AT_ONCE // max(len(x) * x.shape[2] * rows, 1) if x.device.type == "cpu" else x.shape[1]
    step = max(many, 1) * rows
    if step >= x.shape[1]:
        return _format_rows(f, x, amax, key, outer, inner, salt)
    made = _format_fake(x, amax, key, outer, inner, salt, text, emulate)
    for start in range(0, x.shape[1], step):
        own = slice(start, start + step)
        of_rows = amax[:, own] if f.blocks == "row" else amax
        places = outer if outer is None else outer[:, own]
        values, scales, whole = _format_rows(f, x[:, own], of_rows, key, places, inner, salt)
        made[0][:, own].copy_(values)
        blocks = slice(None) if f.blocks == "tensor" else slice(start // rows, None)
        made[1][:, blocks][:, : scales.shape[1]].copy_(scales)
        made[2].copy_(whole)
    return made


_AT_ONCE = 1 << 16
"""Elements that the reference has at a time on a CPU: what comes between stays in its cache."""


def _format_rows(f: QuantisedFormat, x, amax, key, outer, inner, salt) -> tuple:
    x = x.float()
    bits = None
    if key is not None:
        bits = torch.stack([_bits_at(*one, salt) for one in zip(key, outer, inner, strict=True)])
    (rows, cols), (height, width) = f.block, x.shape[1:]
    tall, wide = -(-height // rows), -(-width // cols)
    more = (0, wide * cols - width, 0, tall * rows - height)
    parts = (F.pad(x, more) if any(more) else x).reshape(len(x), tall, rows, wide, cols)
    whole = x.new_empty(len(x), 0, 0)
    most = _largest(parts) if amax is None else amax.reshape(*amax.shape, *[1] * (3 - amax.dim()))
    if f.blocks in _TWO_LEVELS:
        by, scales, whole = _two_levels(_largest(parts), most)
    else:
        by, scales = _scales(most, MOST[f.dtype], f.power_of_two or f.blocks == "1x32")
    scaled = parts * by[:, :, None, :, None] if f.blocks in _BLOCKS else x * by
    # 0 times an infinity is NaN, which a largest magnitude from elsewhere does not tell
    scaled = scaled.reshape(len(x), tall * rows, wide * cols)[:, :height, :width].add_(x, alpha=0)
    if f.blocks == "1x32":
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(E8M0)
    values = _round_to_dtype(scaled, f.dtype, bits)
    return tuple(part if part.is_contiguous() else _copy(part) for part in (values, scales, whole))


def _largest(parts: torch.Tensor) -> torch.Tensor:
    """[batch, row blocks, column blocks] of blocks at dims 2 and 4."""
    if not parts.numel():
        return parts.new_zeros(*parts.shape[:2], parts.shape[3])
    return parts.abs().amax((2, 4))


def _two_levels(amax: torch.Tensor, of_tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The factor of each block, its scale in E4M3, and the tensor's scale."""
    most = MOST[E2M1] * MOST[E4M3]
    whole = of_tensor / torch.full_like(of_tensor, most)
    whole = torch.where(of_tensor == 0, torch.ones_like(whole), whole)
    # of magnitudes below what float32 can divide
    whole = whole.clamp(min=torch.finfo(torch.float32).tiny)
    whole = torch.where(of_tensor.isfinite(), whole, torch.full_like(whole, torch.nan))
    wanted = amax / torch.full_like(amax, MOST[E2M1]) / whole
    scales = wanted.clamp(_LEAST_E4M3, MOST[E4M3]).to(E4M3)  # NaN stays NaN
    return 1.0 / whole / scales.float(), scales, whole


def _bits_at(
    key: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor, salt: int
) -> torch.Tensor:
    return _words(fold_in(key, salt), outer.unsqueeze(1) + inner) & 0xFFFF


def _words(key: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    hi, lo = threefry(key, (place >> 32).to(torch.int32), place.to(torch.int32))
    return hi ^ lo


def _round_to_dtype(x: torch.Tensor, dtype: torch.dtype, bits: torch.Tensor | None) -> torch.Tensor:
    """x, which it may overwrite, in a dtype of 8 or 4 bits, saturating."""
    most = MOST[dtype]
    y = x.clamp_(-most, most)
    if bits is not None:
        mantissa, least = _MANTISSA[dtype]
        exponent = ((y.view(torch.int32) >> 23) & 0xFF).clamp_(min=least + 127) - mantissa
        step = (exponent << 23).view(torch.float32)  # between neighbours
        steps = (y.abs() / step * 2.0**16).nan_to_num_(0.0).to(torch.int32) + bits
        number = torch.bitwise_right_shift(steps, 16) * step
        y = torch.where(y.isnan(), y, number.clamp_(max=most).copysign_(y))
    if dtype == E2M1:
        return _pack_e2m1(y)
    code = y.to(dtype).view(torch.uint8)
    # without the sign of NaN
    return (code & ~(((code & _NAN) == _NAN).to(torch.uint8) << 7)).view(dtype)


def _format_kernel(launch: Launch, x, amax, key, outer, inner, salt, text, emulate) -> tuple:
    f = QuantisedFormat.parse(text)
    plain = not emulate and key is None and f.element in FORMATS and x.dtype in TYPES
    if not plain or not x.numel():
        return _format_reference(x, amax, key, outer, inner, salt, text, emulate)
    # a view of columns is read by its rows, and its transpose is the result
    turned = x.stride(2) != 1 and x.stride(1) == 1
    read = x.mT if turned else x
    y, scales = _kernel_results(read, f, amax)
    values, found = _kernel_results(x, f, amax) if turned else (y, scales)
    _launch(launch, f, read, amax, (y, scales), (values, found) if turned else (None, None))
    found = scales if f.shared else found
    if f.blocks == "1x128":
        found = found.mT
    elif f.blocks == "128x128":
        found = found[..., : -(-x.shape[2] // f.block[1])]
    found = found if f.shared else _copy(found)
    found = found.view(E8M0) if f.blocks == "1x32" else found
    return values, found, x.new_empty(len(x), 0, 0, dtype=torch.float32)


def _kernel_results(x: torch.Tensor, f: QuantisedFormat, amax: torch.Tensor | None) -> tuple:
    """Room for values and scales as the kernel writes them; see ``kernels/quantise.cu``."""
    (height, width), (rows, cols) = x.shape[1:], f.block
    tall, wide = -(-height // rows), -(-width // cols)
    if amax is not None:
        sizes = (*amax.shape[1:], *[1] * (3 - amax.dim()))
    else:
        padded = (tall, -(-wide // _PAD) * _PAD)
        sizes = {"1x128": (wide, tall), "128x128": padded}.get(f.blocks, (tall, wide))
    kind = torch.uint8 if f.blocks == "1x32" else torch.float32
    return x.new_empty(x.shape, dtype=f.dtype), x.new_empty((len(x), *sizes), dtype=kind)


def _launch(
    launch: Launch, f: QuantisedFormat, x, amax: torch.Tensor | None, made: tuple, turned: tuple
) -> None:
    batch, rows, cols = x.shape
    x = x if x.stride(2) == 1 or cols == 1 else x.contiguous()
    aligned = [x.data_ptr(), *(x.stride(i) * x.element_size() for i in (0, 1) if x.shape[i] > 1)]
    values = [None if y is None else y.view(torch.uint8) for y in (made[0], turned[0])]
    by_rows = f.shared == "row"
    power = int(f.power_of_two or f.blocks == "1x32")
    macros = {"ELEMENT": type_name(x, "quantise"), "FORMAT": _MACROS[f.dtype]}
    launch(
        "quantise", "quantise", batch * -(-rows // _TILE) * -(-cols // _TILE), _THREADS,
        x, amax, values[0], made[1], values[1], turned[1], rows, cols, x.stride(0),
        x.stride(1), f.block[1] if f.block[0] == 1 < f.block[1] else 0, power,
        int(not any(n % PACK_BYTES for n in aligned)),
        int(cols * x.element_size() % PACK_BYTES == 0), int(rows % PACK_BYTES == 0),
        defines={**macros, "ROWS": str(int(by_rows))},
        shared_bytes=_TILE * (_TILE * x.element_size() + 4),
    )  # fmt: skip


def _format_fake(x, amax, key, outer, inner, salt, text, emulate) -> tuple:
    f = QuantisedFormat.parse(text)
    batch, height, width = x.shape
    rows, cols = f.block
    grid = (-(-height // rows), -(-width // cols))
    sizes = {"tensor": (1, 1), "row": (height, 1)}.get(f.blocks, grid)
    two = f.blocks in _TWO_LEVELS
    return (
        x.new_empty((batch, height, width // 2 if f.dtype == E2M1 else width), dtype=f.dtype),
        x.new_empty((batch, *sizes), dtype=f.scale_dtype),
        x.new_empty((batch, 1, 1) if two else (batch, 0, 0), dtype=torch.float32),
    )


QUANTISE = define(
    "quantise(Tensor x, Tensor? amax, Tensor? key, Tensor? outer, Tensor? inner, int salt, "
    "str format, bool emulate) -> (Tensor, Tensor, Tensor)",
    kernel=_format_kernel,
    reference=_format_reference,
    fake=_format_fake,
    batch=map_batch(5),
)
"""Of x, [batch, rows, cols]: values, scales, and the scale of all, empty where there is none; amax
is [batch] or [batch, rows], and what bits are drawn by is of each matrix its own."""


# --- delayed scaling

HISTORY = 256
"""Steps that a history holds, and bins of the histogram of one step."""

_LEAST_EDGE = (127 - 36) * 4  # the bits of 2^-36 above the 21 lowest, as an integer


def _edges(device: torch.device) -> torch.Tensor:
    """The largest magnitude of each bin but the last, float32 [255]: made where it is wanted."""
    at = torch.arange(HISTORY - 1, device=device)
    edges = torch.bitwise_left_shift(at - 1 + _LEAST_EDGE, 21).to(torch.int32).view(torch.float32)
    return torch.where(at > 0, edges, 0.0)


def remembered(history: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of the steps in a history, float32 [...]; 0 before the first step.

    Args:
        history: float32 [..., 256], the latest last; see `remember`.
    """
    return history.amax(-1)


def histogram(amax: torch.Tensor) -> torch.Tensor:
    """One count in the bin of a magnitude, float32 [..., 256].

    Sums of these, over ranks, microbatches and pipeline stages, in any order and dtype and with any
    positive factor, are histograms of all magnitudes, whose last nonempty bin tells `remember` the
    maximum. Bins are four to an octave, from 2^-36 to 2^27; zeros have the first, and non-finite
    magnitudes the last.
    """
    amax = amax.detach().float().unsqueeze(-1)
    beyond = (amax > _edges(amax.device)).sum(-1, keepdim=True).clamp(max=HISTORY - 2)
    bin_ = torch.where(amax.isfinite(), beyond, HISTORY - 1)
    return (torch.arange(HISTORY, device=amax.device) == bin_).float()


def remember(history: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The history after a step whose magnitudes have this sum of histograms; float32 [..., 256].

    It stores the upper edge of the last nonempty bin: at most a quarter more than the maximum.
    Steps with a non-finite magnitude are stored as 0, so that one overflow does not spoil the scale
    for 256 steps. Pure; no collectives.
    """
    at = torch.arange(HISTORY, device=counts.device)
    last = torch.where(counts != 0, at, 0).amax(-1)  # NaN counts too: then something was NaN
    most = F.pad(_edges(counts.device), (0, 1))[last]
    return torch.cat([history[..., 1:], most.unsqueeze(-1)], -1)
