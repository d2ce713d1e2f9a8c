"""Sums of squares: emulated kernels against float64, in an order that nothing but sizes decides."""

from __future__ import annotations

import math

import pytest
import torch

from functron.ops import foreach
from functron.ops.foreach import CHUNK, SUM_OF_SQUARES, sum_of_squares
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import emulated

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(num_rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, dim, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 777), (1, CHUNK), (2, 2 * CHUNK + 5)], ids=str)
def test_against_float64(shape, dtype):
    x = rows(*shape, dtype)
    sums, flags = emulated(foreach._kernel, x)
    want = x.double().square().sum(1)
    assert torch.allclose(sums.double(), want, rtol=2e-6, atol=0)
    assert flags.tolist() == [0.0] * shape[0]
    reference, _ = SUM_OF_SQUARES(x)
    assert torch.allclose(reference.double(), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_where_memory_is_not_aligned(dtype):
    """The scalar path adds in the order of the vector path."""
    x = rows(1, CHUNK + 96, dtype)
    memory = torch.empty(x.numel() + 1, dtype=dtype)
    memory[1:] = x
    shifted = memory[1:].view(1, -1)
    assert shifted.data_ptr() % 16
    assert not x.data_ptr() % 16
    want, got = (emulated(foreach._kernel, y)[0] for y in (x, shifted))
    assert torch.equal(got, want)


def test_a_row_is_itself_among_others():
    """So what is mapped or batched has the bits of what is not; rows may have gaps between them."""
    x = rows(3, CHUNK + 4, seed=1)
    want = torch.cat([emulated(foreach._kernel, row[None])[0] for row in x])
    assert torch.equal(emulated(foreach._kernel, x)[0], want)
    wide = rows(3, CHUNK + 9)
    wide[:, : CHUNK + 4] = x
    assert torch.equal(emulated(foreach._kernel, wide[:, : CHUNK + 4])[0], want)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, CHUNK + 6])
def test_what_is_not_finite_goes_through(value, at):
    x = rows(2, CHUNK + 7)
    x[1, at] = value
    for sums, flags in (emulated(foreach._kernel, x, seeds=(0, 1)), SUM_OF_SQUARES(x)):
        assert flags.tolist() == [0.0, 1.0]
        assert sums[0].isfinite()
        assert sums[1].isnan() if math.isnan(value) else sums[1].item() == math.inf


def test_a_sum_overflows_although_every_element_is_finite():
    x = torch.full((1, 3), 1e30)
    for sums, flags in (emulated(foreach._kernel, x), SUM_OF_SQUARES(x)):
        assert (sums.item(), flags.item()) == (math.inf, 0.0)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
def test_empty(shape):
    x = torch.empty(shape)
    for results in (emulated(foreach._kernel, x), SUM_OF_SQUARES(x)):
        assert [y.tolist() for y in results] == [[0.0] * shape[0]] * 2


def test_of_a_leaf():
    """Any shape and dense layout; float64 stays so."""
    x = torch.arange(24.0, dtype=torch.float64).view(2, 3, 4)
    for y in (x, x.permute(2, 0, 1), x[:, :, 0], x.float(), torch.tensor(3.0)):
        total, flag = sum_of_squares(y)
        assert (total.dtype, total.shape, flag.item()) == (y.dtype, (), 0.0)
        assert total.item() == y.double().square().sum().item()


def test_errors():
    with pytest.raises(TypeError, match=r"sum_of_squares: got torch.float64; wanted one of"):
        emulated(foreach._kernel, torch.ones(1, 1, dtype=torch.float64))


CASE = Case(
    SUM_OF_SQUARES, lambda x: (x.square().sum(1), torch.zeros(len(x))), (rows(3, 4).double(),),
    outputs=(0,),
)  # fmt: skip


@conform([CASE])
def test_conformance(case, check):
    check(case)
