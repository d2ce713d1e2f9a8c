"""The tests of norms' shared parts: rows of many kinds, and comparison with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conformance import CHECKS, Case

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# all packs of float16 are those of pack.cuh, which test_rms_norm.py and others compile by default
FEWER = (torch.float32, pytest.param(torch.float16, marks=pytest.mark.full), torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Of results relative to their largest element; of halves, one unit in the last place."""

SHAPES = [(130, 5), (2, 3, 100), (60, 64), (20, 1027), (4, 8192)]
"""With a warp for each row and a block, in one turn of the emulator's three multiprocessors and in
more; the last beyond what backward keeps in registers."""


class Draw:
    """Random tensors."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)


def gaps(x: Tensor) -> Tensor:
    """The same rows with elements between them: still packs of 16 bytes, if the rows were."""
    return torch.cat([x, x.new_full((*x.shape[:-1], 16), torch.nan)], -1)[..., : x.shape[-1]]


def shifted(x: Tensor) -> Tensor:
    """The same rows in memory that starts beside a boundary of 16 bytes."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    view = memory[1:].view(x.shape)
    view.copy_(x)
    assert view.data_ptr() % 16
    return view


LAYOUTS = {"gaps": gaps, "shifted": shifted, "transposed": lambda x: x.mT.contiguous().mT}


def seeds(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the emulator: two orders of threads and of memory, for what is small also a random one."""
    return (0, 1, 2) if shape[-1] <= 100 else (0, 1)


def near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Assert that `got` is `wanted`, which is float64, rounded to dtype."""
    assert got.dtype == dtype
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    if wanted.numel():
        error, size = (got.double() - wanted).abs().max(), wanted.abs().max()
        assert error <= TOLERANCE[dtype] * size, f"{error:.1e} beside {size:.1e}"


def conform_uncompiled(cases: list[Case]) -> Any:
    """`conform` without compilation, for ops that others contain when they are compiled."""
    pairs = [
        pytest.param(case, check, id=f"{case}-{name}")
        for case in cases
        for name, check in CHECKS.items()
        if not name.startswith("compiled")
    ]
    return pytest.mark.parametrize(("case", "check"), pairs)
