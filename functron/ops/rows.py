"""How rows are given to the threads of kernels: the host's side of ``kernels/rows.cuh``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from functron.ops.define import Launch
from functron.ops.operands import PACK_BYTES, rows_of
from functron.typing import Tensor

FORWARD_THREADS = 1024
"""Of a multiprocessor, and the most of a block: 64 registers for each."""

BACKWARD_THREADS = 512
"""The same, with 128 registers."""

SHARED_BYTES = 96 * 1024
"""Of a block: what small GPUs have; others have as much for two blocks."""

_KEPT = 2  # packs of a row that a thread keeps
_MOST_COLUMNS = 2**30


@dataclass(frozen=True)
class Layout:
    """How rows are given to threads; see ``kernels/rows.cuh``.

    Attributes:
        lanes: threads of a row.
        block: threads of a block, one row or, with a warp for each, several.
        columns: of a row of sums: the row's, and what is missing to a whole turn of all lanes.
    """

    lanes: int
    block: int
    columns: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.block // self.lanes

    def grid(self, launch: Launch, x: Tensor, resident: int) -> int:
        """As many blocks as run at a time, where multiprocessors hold `resident` threads each."""
        at_a_time = launch.processors(x.device) * max(1, resident // self.block)
        return min(-(-x.shape[0] // self.rows), at_a_time)


def check_columns(dim: int, op: str) -> None:
    """Raise ValueError where rows are longer than 32-bit columns reach."""
    if dim > _MOST_COLUMNS:
        raise ValueError(
            f"{op}: got rows of {dim} elements; wanted at most {_MOST_COLUMNS}; "
            'fix: pass kernels=functron.ops.use("reference")'
        )


def layout(dim: int, element_size: int, most: int) -> Layout:
    """The layout of rows of `dim` elements, for blocks of `most` threads or less.

    Raises:
        ValueError: see `check_columns`.
    """
    check_columns(dim, "norm")
    size = PACK_BYTES // element_size
    lanes = min(most, 32 * -(-dim // (size * _KEPT * 32)))
    width = lanes * size
    # blocks of backward each end with a row of sums: fewer, larger ones
    block = lanes if lanes > 32 else 256 if most > BACKWARD_THREADS else BACKWARD_THREADS
    return Layout(lanes, block, -(-dim // width) * width)


def vector(x: Tensor, weights: Tensor) -> tuple[Tensor, int]:
    """Weights as kernels take them, and whether they are float32 where the rows are narrower."""
    if weights.dtype != x.dtype:
        weights = weights.float()
    return weights.contiguous(), int(weights.dtype != x.dtype)


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def multiplier(scale: Tensor, like: Tensor, zero_centered: bool) -> Tensor:
    """The scale, or 1 + scale, in the dtype of `like`."""
    scale = scale.to(like.dtype)
    return 1 + scale if zero_centered else scale


def as_rows(*tensors: Tensor | None) -> list[Any]:
    """Each as `rows_of` makes it."""
    return [None if x is None else rows_of(x) for x in tensors]


def row_stride(x: Tensor | None) -> int:
    """Elements from a row to the next."""
    return 0 if x is None else x.stride(0)


def dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each contiguous, as results of ops are."""
    return tuple(x.contiguous() for x in tensors)


def summed_rows(rows: Tensor) -> Tensor:
    """The sum over all dims but the last."""
    return rows.sum(list(range(rows.dim() - 1))) if rows.dim() > 1 else rows.clone()


def statistics(x: Tensor) -> Tensor:
    """An empty number for every row, in the dtype of `upcast`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[:-1], dtype=wide)
