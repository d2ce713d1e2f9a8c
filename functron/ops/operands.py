"""What host code of kernels asks about its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "float",
        torch.float16: "__half",
        torch.bfloat16: "__nv_bfloat16",
    }
)
"""The C++ names of the floating-point types that kernels are compiled for."""

PACK_BYTES = 16


def type_name(x: torch.Tensor, op: str) -> str:
    """The C++ name of `x`'s dtype, for a macro of a kernel.

    Raises:
        TypeError: kernels have no such type.
    """
    if x.dtype not in TYPES:
        known = ", ".join(str(dtype) for dtype in TYPES)
        raise TypeError(
            f"{op}: got {x.dtype}; wanted one of {known}; fix: convert it, or pass "
            f'kernels=functron.ops.use("reference")'
        )
    return TYPES[x.dtype]


def check_shapes(op: str, **operands: tuple[torch.Tensor | None, Sequence[int]]) -> None:
    """Refuse operands that are not of the shapes given beside them: kernels would read elsewhere.

    Raises:
        ValueError: one has another shape. None has any.
    """
    for name, (x, wanted) in operands.items():
        if x is not None and tuple(x.shape) != tuple(wanted):
            raise ValueError(
                f"{op}: got {name} of shape {tuple(x.shape)}; wanted {tuple(wanted)}; "
                "fix: expand it, or correct the operand"
            )


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as ``[rows, dim]`` with a contiguous last dim; a view where the layout allows it."""
    dim = x.shape[-1]
    rows = x.reshape(-1, dim) if x.numel() else x.reshape(x.shape[:-1].numel(), dim)
    return rows if dim <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def packable(dim: int, *tensors: torch.Tensor | None) -> bool:
    """Whether rows of `dim` elements can be read and written 16 bytes at a time.

    All tensors are as `rows_of` returns them: their bases, their row strides and `dim` must be
    multiples of 16 bytes.
    """
    for x in tensors:
        if x is None:
            continue
        size = x.element_size()
        strides = [x.stride(i) for i in range(x.dim() - 1) if x.shape[i] > 1]
        if x.data_ptr() % PACK_BYTES or any(s * size % PACK_BYTES for s in (dim, *strides)):
            return False
    return True
