"""RMSNorm: emulated kernels against float64, and the registered ops under all transforms."""

from __future__ import annotations

import pytest
import torch

from functron.ops.norms import ADD_RMS_NORM, RMS_NORM, RMS_NORM_BACKWARD
from functron.ops.operations import FORWARD_THREADS, layout
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import Emulator, emulated, missing
from tests.kernels.norms import DTYPES, LAYOUTS, SHAPES, Draw, conform_uncompiled, near, seeds

EPS = 1e-3
kernels = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def formula(x, scale, zero_centered=False):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (scale + float(zero_centered))


def gradients(x, scale, zero_centered, dy, d_sum):
    """Of float64 rows and scale."""
    x, scale = x.double().requires_grad_(), scale.double().requires_grad_()
    total = (formula(x, scale, zero_centered) * dy.double()).sum()
    if d_sum is not None:
        total = total + (x * d_sum.double()).sum()
    return torch.autograd.grad(total, (x, scale))


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("summed", [False, True])
def test_against_float64(shape, dtype, summed):
    draw = Draw()
    x, dy, residual, d_sum = (draw(*shape, dtype=dtype) for _ in range(4))
    orders = seeds(shape)
    for scale_dtype in {dtype, torch.float32} if len(orders) > 2 else {torch.float32}:
        scale = draw(shape[-1], dtype=scale_dtype)
        center = summed  # either way of either
        if summed:
            y, total, rstd = emulated(
                ADD_RMS_NORM.kernel, x, residual, scale, EPS, center, seeds=orders
            )
            assert torch.equal(total, x + residual)
        else:
            y, rstd = emulated(RMS_NORM.kernel, x, scale, EPS, center, seeds=orders)
            total, d_sum = x, None
        near(y, formula(total.double(), scale.double(), center), dtype)
        near(rstd, (total.double().square().mean(-1) + EPS).rsqrt(), torch.float32)
        dx, dscale = emulated(
            RMS_NORM_BACKWARD.kernel, dy, d_sum, total, scale, rstd, EPS, center, seeds=orders
        )
        wanted = gradients(total, scale, center, dy, d_sum)
        near(dx, wanted[0], dtype)
        near(dscale, wanted[1], scale_dtype)


@kernels
@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_rows_keep_their_layout(kind):
    draw, shape = Draw(1), (5, 96)
    x, residual, dy, d_sum = (draw(*shape, dtype=torch.bfloat16) for _ in range(4))
    scale = draw(96)
    args = x, residual, scale, EPS, False
    y, total, rstd = emulated(ADD_RMS_NORM.kernel, *args)
    back = dy, d_sum, total, scale, rstd, EPS, False
    wanted = (y, total, rstd, *emulated(RMS_NORM_BACKWARD.kernel, *back))
    lay = lambda some: [
        LAYOUTS[kind](one) if torch.is_tensor(one) and one.dim() == 2 else one for one in some
    ]
    got = emulated(ADD_RMS_NORM.kernel, *lay(args))
    got = (*got, *emulated(RMS_NORM_BACKWARD.kernel, *lay(back)))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


@kernels
def test_weights_of_a_third_dtype():
    """Neither the rows' nor float32: their gradient is rounded to it."""
    draw = Draw()
    x, dy = draw(3, 40), draw(3, 40)
    scale = draw(40, dtype=torch.bfloat16)
    y, rstd = emulated(RMS_NORM.kernel, x, scale, EPS, False)
    near(y, formula(x.double(), scale.double()), torch.float32)
    _, dscale = emulated(RMS_NORM_BACKWARD.kernel, dy, None, x, scale, rstd, EPS, False)
    near(dscale, gradients(x, scale, False, dy, None)[1], torch.bfloat16)


@kernels
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_rows(shape):
    x, scale = torch.zeros(shape), torch.ones(8)
    y, rstd = emulated(RMS_NORM.kernel, x, scale, EPS, False)
    assert y.shape == shape
    dx, dscale = emulated(RMS_NORM_BACKWARD.kernel, x, None, x, scale, rstd, EPS, False)
    assert dx.shape == shape
    assert dscale.eq(0).all()


@kernels
def test_rows_of_zeros_and_wide_rows():
    """Zeros stay finite; rows that do not fit in shared memory are differentiated by torch."""
    x, scale = torch.zeros(2, 8), torch.ones(8)
    y, rstd = emulated(RMS_NORM.kernel, x, scale, EPS, False)
    dx, _ = emulated(RMS_NORM_BACKWARD.kernel, x, None, x, scale, rstd, EPS, False)
    assert y.eq(0).all()
    assert dx.eq(0).all()
    draw = Draw()
    x, scale, dy = draw(1, 30_000), draw(30_000), draw(1, 30_000)
    y, rstd = emulated(RMS_NORM.kernel, x, scale, EPS, False, seeds=(0,))
    near(y, formula(x.double(), scale.double()), torch.float32)
    grads = emulated(RMS_NORM_BACKWARD.kernel, dy, None, x, scale, rstd, EPS, False, seeds=(0,))
    for got, wanted in zip(grads, gradients(x, scale, False, dy, None), strict=True):
        near(got, wanted, torch.float32)


def test_what_kernels_refuse():
    x = torch.ones(2, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"float64.*fix"):
        RMS_NORM.kernel(Emulator(), x, x[0], EPS, False)
    with pytest.raises(ValueError, match=r"rows of 1073741825.*fix"):
        layout(2**30 + 1, 2, FORWARD_THREADS)


def _operands():
    draw = Draw(2)
    x, residual, dy, d_sum = (draw(3, 4, 6).double() for _ in range(4))
    return x, residual, draw(6).double(), dy, d_sum


def _cases() -> list[Case]:
    x, residual, scale, _, _ = _operands()

    def added(x, residual, scale, eps, center):
        return formula(x + residual, scale, center), x + residual

    return [Case(ADD_RMS_NORM, added, (x, residual, scale, EPS, False), (0, 1, 2), (0, 1))]


def _other_cases() -> list[Case]:
    x, _, scale, dy, d_sum = _operands()
    rstd = (x.square().mean(-1) + EPS).rsqrt()

    def plain(dy, d_sum, x, scale, rstd, eps, center):
        _, pull = torch.func.vjp(lambda x, scale: formula(x, scale, center), x, scale)
        dx, dscale = pull(dy)
        return dx + d_sum, dscale

    alone = lambda x, scale, eps, center: (formula(x, scale, center),)
    return [
        Case(RMS_NORM, alone, (x, scale, EPS, True), (0, 1), (0,)),
        Case(RMS_NORM_BACKWARD, plain, (dy, d_sum, x, scale, rstd, EPS, True), (0, 1, 3)),
    ]


@conform(_cases())
def test_conformance(case, check):
    check(case)


@conform_uncompiled(_other_cases())
def test_conformance_of_others(case, check):
    check(case)
