"""Threefry-2x32 over the positions of an array: the generator underneath `functron.random`.

Element `i` (row-major, in the global array) gets the hash of the key and the 64-bit counter `i`,
as two 32-bit words, so any part of an array can be made by itself. Words are int32 tensors, which
wrap like uint32, for which torch has no kernels.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from functron import compat

Index = Sequence[Tensor | None] | None

WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA  # Skein's key-schedule constant, truncated to 32 bits


def sample(
    key: Tensor, shape: Sequence[int], index: Index, finish: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`finish(hi, lo)` of the two words of every wanted position, shaped like the local array.

    Works in blocks that stay in the cache, so `finish` must be elementwise.

    Args:
        key: int64 [2], the high and the low word; may be batched by vmap.
        shape: the global shape.
        index: None, or for each dim None or the 1-D global positions along it.
        finish: takes two int32 tensors [n], gives one tensor [n].
    """
    local = local_shape(shape, index)
    blocks = (finish(*threefry(key, hi, lo)) for hi, lo in _counters(key, shape, index))
    first = next(blocks)
    size = math.prod(local)
    if first.numel() == size:
        return first.reshape(local)
    out = first.new_empty((size,))  # batched at the levels of `first`, so blocks can be written
    out[: len(first)] = first
    start = len(first)
    for block in blocks:
        out[start : start + len(block)] = block
        start += len(block)
    return out.reshape(local)


def local_shape(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    """The shape of the part of an array of this shape that `index` selects."""
    if index is None:
        return tuple(shape)
    return tuple(n if at is None else at.shape[0] for n, at in zip(shape, index, strict=True))


def threefry(key: Tensor, hi: int | Tensor, lo: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 with 20 rounds: two int32 words for each counter (hi, lo).

    In place where operations run at once, which is 2.5 times faster; what is traced stays free of
    mutation. The first sum is out of place, so that both words are batched at every vmap level
    that the key or the counter is.
    """
    k0, k1 = key.to(torch.int32).unbind()
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    mix = _mix_ if _eager() else _mix
    y = lo + k1
    x = (k0 + hi) + y  # the first key addition and the first sum of the first round
    for block in range(5):
        for turn, rotation in enumerate(_ROTATIONS[block % 2]):
            x, y = mix(x, y, rotation, add=block + turn > 0)
        x = x + keys[(block + 1) % 3]
        y = y + (keys[(block + 2) % 3] + (block + 1))
    return x, y


def _mix(x: Tensor, y: Tensor, rotation: int, add: bool) -> tuple[Tensor, Tensor]:
    x = x + y if add else x
    # The right shift keeps the sign, so its copies are masked away.
    low = torch.bitwise_right_shift(y, 32 - rotation) & ((1 << rotation) - 1)
    return x, (torch.bitwise_left_shift(y, rotation) | low) ^ x


def _mix_(x: Tensor, y: Tensor, rotation: int, add: bool) -> tuple[Tensor, Tensor]:
    x = x.add_(y) if add else x
    low = torch.bitwise_right_shift(y, 32 - rotation).bitwise_and_((1 << rotation) - 1)
    return x, y.bitwise_left_shift_(rotation).bitwise_or_(low).bitwise_xor_(x)


def _eager() -> bool:
    """Whether operations run now, rather than being recorded or faked."""
    return not torch.compiler.is_compiling() and not compat.dispatch_modes_active()


def _block_size(device: torch.device) -> int:
    """Positions to make at once, a power of two: what fits a CPU's cache, or bounds memory.

    Where nothing is computed now, all of them, so that a trace does not grow with the array.
    """
    if not _eager() or device.type == "meta":
        return 1 << 63
    if device.type != "cpu":
        return 1 << 24
    return 1 << 17 + min(torch.get_num_threads(), 16).bit_length()


def _counters(
    key: Tensor, shape: Sequence[int], index: Index
) -> Iterator[tuple[int | Tensor, Tensor]]:
    """The wanted positions, flat and in order, as blocks of high and low words. At least one."""
    limit, size = _block_size(key.device), math.prod(shape)
    parts = [None] * len(shape) if index is None else index
    in_words = min(size, limit) < 2**31  # a block of consecutive positions has one high word
    if not in_words or any(at is not None for at in parts):
        yield from _indexed_counters(key, shape, parts, limit)
        return
    base = torch.arange(min(size, limit), dtype=torch.int32, device=key.device)
    for start in range(0, max(size, 1), limit):
        block = base if size - start >= limit else base[: size - start]
        yield start >> 32, block + signed(start & WORD) if start else block


def _indexed_counters(
    key: Tensor, shape: Sequence[int], index: Sequence[Tensor | None], limit: int
) -> Iterator[tuple[Tensor, Tensor]]:
    local = local_shape(shape, index)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    terms = [
        (torch.arange(n, device=key.device) if at is None else at.to(torch.int64)) * stride
        for n, at, stride in zip(shape, index, strides, strict=True)
    ]
    cut = len(local)  # the dims from here on make one row, which fits into a block
    while cut and math.prod(local[cut - 1 :]) <= limit:
        cut -= 1
    zero = torch.zeros(1, dtype=torch.int64, device=key.device)
    rows, columns = _outer_sum(terms[:cut], zero), _outer_sum(terms[cut:], zero)
    step = max(1, limit // max(1, len(columns)))
    for start in range(0, max(len(rows), 1), step):
        place = (rows[start : start + step, None] + columns).reshape(-1)
        yield (place >> 32).to(torch.int32), place.to(torch.int32)


def _outer_sum(terms: Sequence[Tensor], total: Tensor) -> Tensor:
    for term in terms:
        total = (total[:, None] + term).reshape(-1)
    return total


def signed(value: int, width: int = 32) -> int:
    """The two's complement number that has the bits of an unsigned one."""
    return value - 2**width if value >= 2 ** (width - 1) else value


def integer(hi: Tensor, lo: Tensor, width: int) -> Tensor:
    """`width` random bits of two words, as int64: not negative, but for width 64."""
    if width == 64:
        return torch.bitwise_left_shift(hi.to(torch.int64), 32) | (lo.to(torch.int64) & WORD)
    return (hi ^ lo).to(torch.int64) & ((1 << width) - 1)


def unsigned(hi: Tensor, lo: Tensor, width: int) -> Tensor:
    """`width` random bits of two words, in torch's unsigned dtype of that width."""
    if width == 64:
        return integer(hi, lo, 64).to(torch.uint64)
    word = hi ^ lo
    if width == 32:
        return word.to(torch.uint32)
    return word.to(torch.uint8) if width == 8 else word.to(torch.int16).to(torch.uint16)


def unit_floats(hi: Tensor, lo: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats in [0, 1): a multiple of 2^-mantissa, from the top bits of the dtype's width."""
    if dtype == torch.float64:
        top = torch.bitwise_right_shift(integer(hi, lo, 64), 12) & ((1 << 52) - 1)
        return top.to(dtype) * 2.0**-52
    drop, mantissa = {torch.float32: (9, 23), torch.float16: (6, 10), torch.bfloat16: (1, 7)}[dtype]
    top = torch.bitwise_right_shift(hi ^ lo, drop) & ((1 << mantissa) - 1)
    return top.to(dtype) * 2.0**-mantissa


def residue(value: Tensor, span: int, width: int) -> Tensor:
    """The `width`-bit unsigned integer in int64 `value`, modulo `span`; span 2^width keeps it."""
    if width < 64:
        value = value & ((1 << width) - 1)
        return value if span == 1 << width else value % span
    if span == 1 << 64:
        return value
    if span > 1 << 63:  # at most one subtraction; compare as unsigned by flipping the sign bit
        flip = -(1 << 63)
        return torch.where(
            (value ^ flip) < (signed(span, 64) ^ flip), value, value - signed(span, 64)
        )
    if span == 1 << 63:
        return value & ((1 << 63) - 1)
    rest = value % span  # torch's % is never negative; a set sign bit stands for 2^64 more
    extra = (1 << 64) % span
    return torch.where(value < 0, (rest - (span - extra)) % span, rest)
