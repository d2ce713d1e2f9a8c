"""Frozen matrices in 4 bits, made numbers again where they are multiplied (QLoRA).

"QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al. 2023), with OCP's Microscaling
format MXFP4 in place of NF4: 32 neighbours of the last dim share a scale, a power of two, so that a
weight takes 4.25 bits. Blocks lie in the last dim, and both tensors have the dims of the matrix: a
shard whose last dim is a multiple of 32 is packed as the whole is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functron.core.typing import Float, Tensor
from functron.ops.quantise import E2M1, E8M0, Quantised, QuantisedFormat, dequantise, quantise
from functron.spmd.simulate import product
from functron.transforms.custom_vjp import custom_vjp

BLOCK, PER_BYTE = 32, 2
_FORMAT = QuantisedFormat("e2m1", "1x32")


class PackedMatrix(NamedTuple):
    """A frozen matrix in MXFP4, in the place of ``"w"`` in a layer's parameters.

    Attributes:
        values: uint8 ``[..., size / 2]``, two E2M1 numbers each.
        scales: uint8 ``[..., size / 32]``, E8M0.
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, as `dim`."""
        return (*self.values.shape[:-1], PER_BYTE * self.values.shape[-1])

    def dim(self) -> int:
        return self.values.dim()

    def flatten(self, start: int = 0, end: int = -1) -> PackedMatrix:
        """The same matrix, with dims flattened."""
        return PackedMatrix(*(part.flatten(start, end) for part in self))


def pack(w: Float[Tensor, "*rows size"]) -> PackedMatrix:
    """w rounded to MXFP4: to the nearest, ties to even. No collectives.

    Raises:
        ValueError: 32 does not divide the last dim.
    """
    made = quantise(w.unsqueeze(0) if w.dim() == 1 else w, _FORMAT)
    parts = (made.values.view(torch.uint8), made.scales.view(torch.uint8))
    return PackedMatrix(*(part.reshape(*w.shape[:-1], -1) for part in parts))


def unpack(w: PackedMatrix, dtype: torch.dtype) -> Float[Tensor, "*rows size"]:
    """The numbers of a packed matrix, which float32 and bfloat16 hold exactly."""
    values, scales = w.values.view(E2M1), w.scales.view(E8M0)
    return dequantise(Quantised(values, scales, _FORMAT.blocks)).to(dtype)


def as_numbers(w: Any, dtype: torch.dtype) -> Tensor:
    """A matrix that may be packed, of `dtype` then, or is itself."""
    return unpack(w, dtype) if isinstance(w, PackedMatrix) else w


def multiply_packed(
    x: Float[Tensor, "*batch inputs"], w: PackedMatrix
) -> Float[Tensor, "*batch outputs"]:
    """x w, of which backward keeps the bits and makes the numbers again: w gets no gradient."""

    def forward(x: Tensor, w: PackedMatrix) -> tuple[Tensor, PackedMatrix]:
        return product(x, unpack(w, x.dtype)), w

    def backward(w: PackedMatrix, dy: Tensor) -> tuple[Tensor, None]:
        return product(dy, unpack(w, dy.dtype).mT), None

    multiply: Any = custom_vjp(lambda x, w: forward(x, w)[0], forward, backward)
    return multiply(x, w)
