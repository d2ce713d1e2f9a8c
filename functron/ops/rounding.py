"""Stochastic rounding: to one of the two neighbours, so that the mean is the number itself.

Where it is done at every step, updates far below a parameter's last bit add up, on average, as they
do in a float32 master copy, which costs 4 bytes per parameter; to nearest they would all be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import Function

from functron.threefry import Index, sample

_SMALLEST_NORMAL = 2.0**-14  # of float16
_STEP = 2.0**-24  # between its subnormal numbers


def random_bits(key: torch.Tensor, shape: Sequence[int], index: Index = None) -> torch.Tensor:
    """16 random bits for each element, int32: the values of ``random.bits(..., bit_width=16)``.

    Args:
        key: a key of `functron.random`.
        shape: the global shape.
        index: which part of it, as there.
    """
    return sample(key, shape, index, lambda hi, lo: (hi ^ lo) & 0xFFFF)


def stochastic_round(x: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, rounded away from 0 with the probability that makes the mean x.

    That probability is exact to 2^-16. What is beyond the largest number goes to it or to infinity,
    infinities stay, and NaN stays NaN.

    Args:
        x: float32.
        bits: 16 random bits for each element, int32, as `random_bits` makes them.
        dtype: bfloat16 or float16; float32 stays as it is.

    No derivative: it is piecewise constant.

    Raises:
        TypeError: another dtype.
    """
    if dtype == torch.float32:
        return x
    if dtype not in (torch.bfloat16, torch.float16) or x.dtype != torch.float32:
        raise TypeError(
            f"stochastic_round: got {x.dtype} to {dtype}; wanted float32 to bfloat16 or float16"
        )
    drop = 16 if dtype == torch.bfloat16 else 13
    mask = (1 << drop) - 1
    rounded = _Bits.apply((_Bits.apply(x, torch.int32) + (bits & mask)) & ~mask, torch.float32)
    if dtype == torch.float16:  # below its normal numbers the grid is even
        steps = (x.abs() * (2**16 / _STEP)).to(torch.int32) + bits
        small = (torch.bitwise_right_shift(steps, 16) * _STEP).copysign(x)
        rounded = torch.where(x.abs() < _SMALLEST_NORMAL, small, rounded)
    return torch.where(x.isfinite(), rounded, x).to(dtype)


class _Bits(Function):
    """The bits of x as another dtype of that width: torch 2.11 cannot vmap ``x.view(dtype)``."""

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.view(
            dtype
        ).clone()  # a Function whose results are views is treated as one in place

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, grad):
        return None, None

    @staticmethod
    def vmap(info, in_dims, x: torch.Tensor, dtype: torch.dtype) -> tuple:
        return _Bits.apply(x, dtype), in_dims[0]
