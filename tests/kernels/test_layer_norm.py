"""LayerNorm: emulated kernels against float64, and the registered ops under all transforms."""

from __future__ import annotations

import pytest
import torch

from functron.ops.norms import ADD_LAYER_NORM, LAYER_NORM, LAYER_NORM_BACKWARD
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import Emulator, emulated, missing
from tests.kernels.norms import FEWER, LAYOUTS, SHAPES, Draw, conform_uncompiled, near, seeds

EPS = 1e-3
kernels = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def formula(x, scale, bias, zero_centered=False):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + EPS).sqrt() * (scale + float(zero_centered)) + bias


def gradients(x, scale, bias, zero_centered, dy, d_sum):
    """Of float64 rows, scale and bias."""
    moving = [one.double().requires_grad_() for one in (x, scale, bias)]
    total = (formula(*moving, zero_centered) * dy.double()).sum()
    if d_sum is not None:
        total = total + (moving[0] * d_sum.double()).sum()
    return torch.autograd.grad(total, moving)


@kernels
@pytest.mark.parametrize("dtype", FEWER, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("summed", [False, True])
def test_against_float64(shape, dtype, summed):
    draw = Draw()
    x, dy, residual, d_sum = (draw(*shape, dtype=dtype) for _ in range(4))
    orders = seeds(shape)
    for wide in {dtype, torch.float32} if len(orders) > 2 else {torch.float32}:
        scale, bias = draw(shape[-1], dtype=wide), draw(shape[-1], dtype=dtype)
        center = summed  # either way of either
        if summed:
            y, total, *moments = emulated(
                ADD_LAYER_NORM.kernel, x, residual, scale, bias, EPS, center, seeds=orders
            )
            assert torch.equal(total, x + residual)
        else:
            y, *moments = emulated(LAYER_NORM.kernel, x, scale, bias, EPS, center, seeds=orders)
            total, d_sum = x, None
        exact = total.double()
        near(y, formula(exact, scale.double(), bias.double(), center), dtype)
        near(moments[0], exact.mean(-1), torch.float32)
        near(moments[1], (exact.var(-1, unbiased=False) + EPS).rsqrt(), torch.float32)
        args = dy, d_sum, total, scale, bias, *moments, EPS, center
        grads = emulated(LAYER_NORM_BACKWARD.kernel, *args, seeds=orders)
        wanted = gradients(total, scale, bias, center, dy, d_sum)
        for got, exact, kind in zip(grads, wanted, (dtype, wide, dtype), strict=True):
            near(got, exact, kind)


@kernels
def test_a_mean_far_from_zero_costs_no_variance():
    """One pass, mean(x^2) - mean(x)^2, would leave nothing of it in float32."""
    draw = Draw()
    x, scale, bias = 3000 + draw(3, 2048), draw(2048), draw(2048)
    y, _, rstd = emulated(LAYER_NORM.kernel, x, scale, bias, EPS, False)
    exact = x.double()
    wanted = (exact.var(-1, unbiased=False) + EPS).rsqrt()
    torch.testing.assert_close(rstd.double(), wanted, rtol=1e-6, atol=0)
    # what the rounding of the mean to float32 leaves
    exact = formula(exact, scale.double(), bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=3000 * 2**-23 * 4)


@kernels
@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_rows_keep_their_layout(kind):
    draw, shape = Draw(1), (5, 96)
    x, residual, dy, d_sum = (draw(*shape, dtype=torch.bfloat16) for _ in range(4))
    scale, bias = draw(96), draw(96)
    args = x, residual, scale, bias, EPS, False
    y, total, mean, rstd = emulated(ADD_LAYER_NORM.kernel, *args)
    back = dy, d_sum, total, scale, bias, mean, rstd, EPS, False
    wanted = (y, total, mean, rstd, *emulated(LAYER_NORM_BACKWARD.kernel, *back))
    lay = lambda some: [
        LAYOUTS[kind](one) if torch.is_tensor(one) and one.dim() == 2 else one for one in some
    ]
    got = emulated(ADD_LAYER_NORM.kernel, *lay(args))
    got = (*got, *emulated(LAYER_NORM_BACKWARD.kernel, *lay(back)))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


@kernels
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_rows(shape):
    x, scale = torch.zeros(shape), torch.ones(8)
    y, *moments = emulated(LAYER_NORM.kernel, x, scale, scale, EPS, False)
    assert y.shape == shape
    back = x, None, x, scale, scale, *moments, EPS, False
    dx, *others = emulated(LAYER_NORM_BACKWARD.kernel, *back)
    assert dx.shape == shape
    assert all(one.eq(0).all() for one in others)


@kernels
def test_rows_of_zeros_and_wide_rows():
    """Zeros stay finite; rows that do not fit in shared memory are differentiated by torch."""
    x, scale = torch.zeros(2, 8), torch.ones(8)
    y, *moments = emulated(LAYER_NORM.kernel, x, scale, scale, EPS, False)
    dx, *_ = emulated(LAYER_NORM_BACKWARD.kernel, x, None, x, scale, scale, *moments, EPS, False)
    assert y.eq(1).all()
    assert dx.eq(0).all()
    draw = Draw()
    x, scale, bias, dy = draw(1, 15_000), draw(15_000), draw(15_000), draw(1, 15_000)
    y, *moments = emulated(LAYER_NORM.kernel, x, scale, bias, EPS, False, seeds=(0,))
    near(y, formula(x.double(), scale.double(), bias.double()), torch.float32)
    back = dy, None, x, scale, bias, *moments, EPS, False
    grads = emulated(LAYER_NORM_BACKWARD.kernel, *back, seeds=(0,))
    for got, wanted in zip(grads, gradients(x, scale, bias, False, dy, None), strict=True):
        near(got, wanted, torch.float32)


def test_what_kernels_refuse():
    x = torch.ones(2, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"float64.*fix"):
        LAYER_NORM.kernel(Emulator(), x, x[0], x[0], EPS, False)


def _operands():
    draw = Draw(2)
    x, residual, dy, d_sum = (draw(3, 4, 6).double() for _ in range(4))
    return x, residual, draw(6).double(), draw(6).double(), dy, d_sum


def _cases() -> list[Case]:
    x, residual, scale, bias, _, _ = _operands()

    def added(x, residual, scale, bias, eps, center):
        return formula(x + residual, scale, bias, center), x + residual

    return [
        Case(ADD_LAYER_NORM, added, (x, residual, scale, bias, EPS, False), (0, 1, 2, 3), (0, 1))
    ]


def _other_cases() -> list[Case]:
    x, _, scale, bias, dy, d_sum = _operands()
    mean, rstd = x.mean(-1), (x.var(-1, unbiased=False) + EPS).rsqrt()

    def plain(dy, d_sum, x, scale, bias, mean, rstd, eps, center):
        _, pull = torch.func.vjp(lambda *some: formula(*some, center), x, scale, bias)
        dx, dscale, dbias = pull(dy)
        return dx + d_sum, dscale, dbias

    args = dy, d_sum, x, scale, bias, mean, rstd, EPS, True
    alone = lambda x, scale, bias, eps, center: (formula(x, scale, bias, center),)
    return [
        Case(LAYER_NORM, alone, (x, scale, bias, EPS, True), (0, 1, 2), (0,)),
        Case(LAYER_NORM_BACKWARD, plain, args, (0, 1, 3)),
    ]


@conform(_cases())
def test_conformance(case, check):
    check(case)


@conform_uncompiled(_other_cases())
def test_conformance_of_others(case, check):
    check(case)
