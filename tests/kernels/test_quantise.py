"""FP8: emulated kernels bit for bit against torch's float8 casts, and these against ml_dtypes."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType

from functron.ops import quantise as ops
from functron.ops.quantise import (
    E8M0,
    FORMATS,
    MOST,
    QUANTISE,
    Quantised,
    QuantisedFormat,
    dequantise,
    magnitude,
    quantise,
)
from tests.kernels.emulator import emulated

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
VARIANTS = [(BF16, "e4m3"), (F32, "e5m2")]  # of six; each costs a compilation
NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def matrix(shape, dtype=F32, seed=0):
    """Magnitudes over some orders, some zeros, and a block of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    x[..., :2, :40] = 0
    return x.to(dtype)


def text_of(blocks, name, power=False):
    return f"{name}@{blocks}{'+pow2' if power and blocks != '1x32' else ''}"


def kernel_args(x, text, amax=None):
    return x, amax, None, None, None, 0, text, False


def same(got, want):
    """The same bits; any NaN for a NaN of float32."""
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        if a.dtype == F32:
            assert torch.equal(a.isnan(), b.isnan())
            a, b = a.nan_to_num(), b.nan_to_num()
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def by_hand(x, blocks, name, power):
    """An independent oracle: every block in float64 but for the two float32 roundings, in NumPy."""
    rows, cols = BLOCKS[blocks]
    most = MOST[FORMATS[name]]
    y, scales = np.zeros(x.shape, NUMPY[name]), {}
    x = x.float().numpy()
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], cols)):
        part = x[i : i + rows, j : j + cols]
        amax = np.abs(part).max()
        if amax == 0:
            by, back = np.float32(1), np.float32(1)
        elif power or blocks == "1x32":
            exponent = math.ceil(math.log2(float(amax) / most))
            by, back = np.float32(2.0**-exponent), np.float32(2.0**exponent)
        else:
            by = np.float32(most) / amax
            back = np.float32(1) / by
        y[i : i + rows, j : j + cols] = np.clip(part * by, -most, most).astype(NUMPY[name])
        scales[i // rows, j // cols] = back
    table = np.array([scales[key] for key in sorted(scales)], np.float32)
    return y, table.reshape(-(-x.shape[0] // rows), -(-x.shape[1] // cols))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_reference_is_the_definition(name, power, blocks):
    x = matrix((256, 384), BF16)
    odd = [] if blocks == "1x32" else [matrix((576, 320), BF16), matrix((130, 200), BF16).T]
    for value in (x, x.T, *odd):
        got = quantise(value, QuantisedFormat.parse(text_of(blocks, name, power)))
        want, scales = by_hand(value, blocks, name, power)
        assert np.array_equal(got.values.view(torch.uint8).numpy(), want.view(np.uint8))
        assert got.scales.dtype == (E8M0 if blocks == "1x32" else F32)
        assert np.array_equal(got.scales.float().numpy(), scales)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("dtype", "name"), VARIANTS, ids=str)
def test_kernel_is_the_reference_bit_for_bit(dtype, name, blocks, power):
    """Of sizes that tiles divide or not, of rows and of columns."""
    rows, cols = BLOCKS[blocks]
    odd = () if blocks == "1x32" else ((2, 200, 130), (1, 136, 576), (1, 3, 5))
    for batch, height, width in ((1, rows, cols), (2, 128, 256), (1, 5 * rows, 3 * cols), *odd):
        for x in (matrix((batch, height, width), dtype), matrix((batch, width, height), dtype).mT):
            args = kernel_args(x, text_of(blocks, name, power))
            same(emulated(ops._format_kernel, *args, seeds=(0, 1)), QUANTISE(*args))


@pytest.mark.parametrize("blocks", ["tensor", "row", *BLOCKS])
def test_formats_by_kernel(blocks):
    """Of rows and of columns, with gaps; of magnitudes that are less than the largest, 0 or NaN."""
    x = matrix((2, 256, 256), BF16)
    cases = [(x, "e4m3", ""), (x.mT, "e4m3", ""), (x[:, :128], "e4m3", "+pow2")]
    if blocks in ("tensor", "row"):
        odd = matrix((3, 5, 132), BF16)
        cases = [*cases, (odd, "e4m3", ""), (odd.mT, "e4m3", "+pow2")]
    for operand, element, flag in cases:
        form = QuantisedFormat.parse(f"{element}@{blocks}{flag if blocks != '1x32' else ''}")
        amax = magnitude(operand, form)
        for given in [amax] if amax is None else [amax, amax / 3, some(amax)]:
            args = kernel_args(operand, str(form), given)
            same(emulated(ops._format_kernel, *args, seeds=(0,)), QUANTISE(*args))


def some(amax):
    """Magnitudes of which a few are special."""
    flat = amax.flatten().clone()
    flat[:5] = torch.tensor([0.0, math.nan, math.inf, 1e-44, 2.0**-126])[: len(flat)]
    return flat.reshape(amax.shape)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_any_layout(blocks):
    """Unaligned, with gaps between rows, with rows that are columns of other memory, one repeated."""
    wide = matrix((2, 300, 300), BF16)
    for x in (
        wide[:, 3:131, 1:129],
        wide.mT[:, :128, 5:261],
        wide[:1, :128, :128].expand(3, -1, -1),
    ):
        want = QUANTISE(*kernel_args(x.contiguous(), text_of(blocks, "e4m3")))
        args = kernel_args(x, text_of(blocks, "e4m3"))
        same(emulated(ops._format_kernel, *args, seeds=(0, 1)), want)


@pytest.mark.parametrize("shape", [(0, 128, 128), (2, 0, 128), (2, 128, 0)], ids=str)
def test_empty(shape):
    for blocks in BLOCKS:
        args = kernel_args(torch.empty(shape, dtype=BF16), text_of(blocks, "e4m3"))
        same(emulated(ops._format_kernel, *args, seeds=(0,)), QUANTISE(*args))


EXTREMES = [0.0, 1e-45, 1e-40, 2.0**-126, 1.2e-36, 448.0, 448.00003, 464.0, 65504.0, 2.9e38]


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("blocks", ["1x128", "1x32"])
def test_extreme_magnitudes(blocks, power):
    """Every scale is finite and positive, and what comes back is x to the format's precision."""
    x = torch.tensor(EXTREMES)[:, None].repeat(1, 128)
    x[:, 1::2] *= -0.37
    args = kernel_args(x[None], text_of(blocks, "e5m2", power))
    for got in (emulated(ops._format_kernel, *args), QUANTISE(*args)):
        y = Quantised(got[0][0], got[1][0], blocks)
        assert (y.scales.float() > 0).all()
        assert y.scales.float().isfinite().all()
        least = 1e-39 if power or blocks == "1x32" else 1e-43
        assert torch.allclose(dequantise(y), x, rtol=2**-3, atol=least)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_what_is_not_finite_makes_its_block_nan(blocks, bad):
    x = matrix((1, 256, 256), BF16)
    x[0, 129, 131] = bad
    rows, cols = BLOCKS[blocks]
    for value, row, col in ((x, 129, 131), (x.mT, 131, 129)):
        args = kernel_args(value, text_of(blocks, "e4m3"))
        for y, scales, _ in (emulated(ops._format_kernel, *args), QUANTISE(*args)):
            want = torch.zeros(256, 256, dtype=torch.bool)
            top, left = row // rows * rows, col // cols * cols
            want[top : top + rows, left : left + cols] = True
            assert torch.equal(y[0].float().isnan(), want)
            assert scales.float().isnan().sum() == 1
            assert (y[0].view(torch.uint8)[want] == 0x7F).all()


@pytest.mark.parametrize("blocks", ["1x128", "128x128"])
def test_scales_lie_as_products_want_them(blocks):
    """Of both operands, the transposed ones included; `scaled_mm` checks that of tensors on a GPU."""
    recipe = {"1x128": ScalingType.BlockWise1x128, "128x128": ScalingType.BlockWise128x128}
    m, k, n = 256, 640, 384
    shapes = {"activations": (m, k), "weights": (n, k), "weights of gradients": (k, n)}
    made = {}
    for name, shape in shapes.items():
        kind = "1x128" if name == "activations" else blocks
        x = matrix(shape, BF16)
        y, turned = (quantise(each, QuantisedFormat("e4m3", kind)) for each in (x, x.T))
        made[name] = (turned if name == "weights of gradients" else y, kind)
        for one in (y, turned):
            got = one.mm_scales()
            whole = got if kind == "1x128" else got[: one.scales.shape[1]].mT
            assert torch.equal(whole, one.scales)
            if kind == "128x128":
                assert (got[one.scales.shape[1] :] == 0).all()
    fake = FakeTensorMode()

    def product(a, a_scales, b, b_scales, kind):
        operands = []
        for x in (a, b.mT, a_scales, b_scales):
            with fake:
                device = {"dtype": x.dtype, "device": "cuda"}
                operands.append(torch.empty_strided(x.shape, x.stride(), **device))
        left, right, *scales = operands
        recipes = recipe["1x128"], recipe[kind]
        with fake:
            return torch.nn.functional.scaled_mm(
                left, right, scales[0], recipes[0], scales[1], recipes[1]
            )

    a, _ = made["activations"]
    for name in ("weights", "weights of gradients"):
        b, kind = made[name]
        assert product(a.values, a.mm_scales(), b.values, b.mm_scales(), kind).shape == (m, n)
        with pytest.raises(RuntimeError, match="blockwise scaling"):
            product(a.values, a.scales.contiguous(), b.values, b.scales.contiguous(), kind)


def test_leading_dims_and_round_trip():
    """Relative errors of at most half a unit of the last of four significant bits, three for e5m2."""
    x = matrix((2, 3, 128, 256), BF16, seed=3)
    for blocks, name in itertools.product(BLOCKS, FORMATS):
        ulp = 2.0**-4 if name == "e4m3" else 2.0**-3
        y = quantise(x, QuantisedFormat(name, blocks))
        assert y.values.shape == x.shape
        floor = y.scales.float().max() * (2.0**-9 if name == "e4m3" else 2.0**-16)
        error = (dequantise(y) - x.float()).abs()
        assert (error <= x.float().abs() * ulp * 1.001 + floor).all()


def test_scales_of_small_blocks_have_another_layout():
    with pytest.raises(ValueError, match=r"(?s)no layout for scaled_mm.*blocks of 1x32"):
        quantise(torch.ones(32, 32), QuantisedFormat("e4m3", "1x32")).mm_scales()
