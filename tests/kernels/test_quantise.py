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
    DEQUANTISE_FP8,
    E8M0,
    FORMATS,
    MOST,
    QUANTISE,
    QUANTISE_FP8,
    Quantised,
    QuantisedFormat,
    cast_fp8,
    dequantise_fp8,
    magnitude,
    quantise_fp8,
)
from tests.kernels.conformance import Case, conform
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


def kernel_args(x, blocks, name, power=False, transpose=True):
    rows, cols = BLOCKS[blocks]
    return x, None, rows, cols, name == "e5m2", power or blocks == "1x32", transpose


def by_block(scales, blocks, cols):
    """The op's scales, as they lie, with a row for every row of blocks."""
    if blocks == "1x128":
        return scales.mT
    return scales if blocks == "1x32" else scales[..., : -(-cols // 128)]


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
    """And the transpose is what the transposed matrix would be."""
    x = matrix((150, 260), BF16)
    first, second = quantise_fp8(x, blocks, name, power_of_two=power, transpose=True)
    for got, value in ((first, x), (second, x.T)):
        want, scales = by_hand(value, blocks, name, power)
        assert np.array_equal(got.values.view(torch.uint8).numpy(), want.view(np.uint8))
        assert got.scales.dtype == (E8M0 if blocks == "1x32" else F32)
        assert np.array_equal(got.scales.float().numpy(), scales)


SHAPES = [(1, 1, 1), (2, 128, 128), (1, 130, 132), (1, 33, 7), (3, 5, 260), (1, 144, 40)]


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("dtype", "name"), VARIANTS, ids=str)
def test_kernel_is_the_reference_bit_for_bit(dtype, name, blocks, power):
    for shape in SHAPES:
        for transpose in (False, True):
            args = kernel_args(matrix(shape, dtype), blocks, name, power, transpose)
            same(emulated(ops._kernel, *args, seeds=(0, 1)), QUANTISE_FP8(*args))


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
            args = (operand, given, None, None, None, 0, str(form), False)
            same(emulated(ops._format_kernel, *args, seeds=(0,)), QUANTISE(*args))


def some(amax):
    """Magnitudes of which a few are special."""
    flat = amax.flatten().clone()
    flat[:5] = torch.tensor([0.0, math.nan, math.inf, 1e-44, 2.0**-126])[: len(flat)]
    return flat.reshape(amax.shape)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_any_layout(blocks):
    """Unaligned, with gaps between rows, with rows that are columns of other memory, one repeated."""
    wide = matrix((2, 70, 181), BF16)
    for x in (
        wide[:, :, 1:133],
        wide[:, 3:, :64],
        wide.mT,
        wide[:1].expand(3, -1, -1),
        wide[:, :, 5:6],
    ):
        args = kernel_args(x, blocks, "e4m3")
        same(
            emulated(ops._kernel, *args, seeds=(0, 1)),
            QUANTISE_FP8(*kernel_args(x.contiguous(), blocks, "e4m3")),
        )


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_empty(shape):
    for blocks in BLOCKS:
        args = kernel_args(torch.empty(shape, dtype=BF16), blocks, "e4m3")
        same(emulated(ops._kernel, *args, seeds=(0,)), QUANTISE_FP8(*args))
    given = (torch.empty(shape, dtype=BF16), torch.ones(shape[0]), 0, 0, False, False, True)
    same(emulated(ops._kernel, *given, seeds=(0,)), QUANTISE_FP8(*given))


EXTREMES = [0.0, 1e-45, 1e-40, 2.0**-126, 1.2e-36, 448.0, 448.00003, 464.0, 65504.0, 2.9e38]


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("blocks", ["1x128", "1x32"])
def test_extreme_magnitudes(blocks, power):
    """Every scale is finite and positive, and what comes back is x to the format's precision."""
    x = torch.tensor(EXTREMES)[:, None].repeat(1, 32)
    x[:, 1::2] *= -0.37
    for got in (
        emulated(ops._kernel, *kernel_args(x[None], blocks, "e5m2", power))[:2],
        QUANTISE_FP8(*kernel_args(x[None], blocks, "e5m2", power))[:2],
    ):
        kind = E8M0 if blocks == "1x32" else F32
        y = Quantised(got[0][0], by_block(got[1], blocks, 32)[0].view(kind), blocks)
        assert (y.scales.float() > 0).all()
        assert y.scales.float().isfinite().all()
        back = dequantise_fp8(y, F32)
        assert torch.allclose(
            back, x, rtol=2**-3, atol=1e-43 if not (power or blocks == "1x32") else 1e-39
        )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_what_is_not_finite_makes_its_block_nan(blocks, bad):
    x = matrix((1, 140, 140), BF16)
    x[0, 129, 131] = bad
    args = kernel_args(x, blocks, "e4m3")
    for out in (emulated(ops._kernel, *args), QUANTISE_FP8(*args)):
        y, scales, turned, _, _ = out
        rows, cols = BLOCKS[blocks]
        want = torch.zeros(140, 140, dtype=torch.bool)
        want[
            129 // rows * rows : 129 // rows * rows + rows,
            131 // cols * cols : 131 // cols * cols + cols,
        ] = True
        assert torch.equal(y[0].float().isnan(), want)
        scales = scales.view(E8M0) if blocks == "1x32" else scales
        assert scales.float().isnan().sum() == 1
        across = torch.zeros(140, 140, dtype=torch.bool)  # [cols, rows]
        across[
            131 // rows * rows : 131 // rows * rows + rows,
            129 // cols * cols : 129 // cols * cols + cols,
        ] = True
        assert torch.equal(turned[0].float().isnan(), across)
        assert (y[0].view(torch.uint8)[want] == 0x7F).all()


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("dtype", "name"), VARIANTS, ids=str)
def test_dequantise(dtype, name, blocks):
    """The kernel's bits are the reference's, which are a product in float64, rounded once or twice."""
    rows, cols = BLOCKS[blocks]
    for shape in SHAPES:
        y, stored, *_ = QUANTISE_FP8(*kernel_args(matrix(shape, dtype), blocks, name))
        scales = by_block(stored, blocks, shape[2])
        if blocks != "1x32":
            scales[0, 0, 0] = math.nan
        else:
            scales.view(-1)[:2] = torch.tensor([255, 0], dtype=torch.uint8)[: scales.numel()]
        args = (y, scales, torch.empty(0, dtype=dtype), rows, cols)
        want = DEQUANTISE_FP8(*args)
        same([emulated(ops._dequantise, *args, seeds=(0, 1)).float()], [want.float()])
        real = (scales.view(E8M0) if blocks == "1x32" else scales).double()
        i, j = torch.arange(shape[1]) // rows, torch.arange(shape[2]) // cols
        exact = y.double() * real[:, i][:, :, j]
        assert torch.equal(
            want.double().nan_to_num(), exact.float().to(dtype).double().nan_to_num()
        )


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
        y, turned = quantise_fp8(x, kind, transpose=True)
        made[name] = (turned if name == "weights of gradients" else y, kind)
        for one in (y, turned):
            got = one.mm_scales()
            assert got.untyped_storage().data_ptr() == one.scales.untyped_storage().data_ptr()
            whole = got if kind == "1x128" else got[: one.scales.shape[1]].mT
            assert torch.equal(whole, one.scales)
            if kind == "128x128":
                assert (got[one.scales.shape[1] :] == 0).all()
            loose = one._replace(scales=one.scales.contiguous().clone())
            assert torch.equal(loose.mm_scales(), got)
            assert loose.mm_scales().stride() == got.stride()
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
    x = matrix((2, 3, 64, 96), BF16, seed=3)
    for blocks, name in itertools.product(BLOCKS, FORMATS):
        first, second = quantise_fp8(x, blocks, name, transpose=True)
        assert second is not None
        ulp = 2.0**-4 if name == "e4m3" else 2.0**-3
        for y, value in ((first, x), (second, x.mT)):
            assert y.values.shape == value.shape
            floor = y.scales.float().max() * (2.0**-9 if name == "e4m3" else 2.0**-16)
            error = (dequantise_fp8(y, F32) - value.float()).abs()
            assert (error <= value.float().abs() * ulp * 1.001 + floor).all()
        assert quantise_fp8(x, blocks, name)[1] is None


# Whole tensors


@pytest.mark.parametrize(("dtype", "name"), VARIANTS, ids=str)
def test_cast_with_given_scales(dtype, name):
    """Saturating, with amax of what is cast, per matrix; the kernel bit for bit."""
    x = matrix((3, 130, 140), dtype)
    x[0, 3, 5], x[2, 129, 139] = 3e4, -2e4
    scale = torch.tensor([0.5, 3.0, 1e-3])
    for transpose in (False, True):
        args = (x, scale, 0, 0, name == "e5m2", False, transpose)
        same(emulated(ops._kernel, *args), QUANTISE_FP8(*args))
    y, turned, amax = cast_fp8(x, scale, name, transpose=True)
    most = MOST[FORMATS[name]]
    want = np.clip((x.float() * scale[:, None, None]).numpy(), -most, most).astype(NUMPY[name])
    assert np.array_equal(y.view(torch.uint8).numpy(), want.view(np.uint8))
    assert torch.equal(turned.view(torch.uint8), y.view(torch.uint8).mT)
    assert torch.equal(amax, x.float().abs().amax((1, 2)))
    assert cast_fp8(x, scale, name)[1] is None


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_cast_of_what_is_not_finite(bad):
    x = matrix((2, 3, 4), BF16)
    x[1, 2, 1] = bad
    args = (x, torch.ones(2), 0, 0, False, False, True)
    for y, _, turned, _, amax in (emulated(ops._kernel, *args), QUANTISE_FP8(*args)):
        assert y.float().isnan().nonzero().tolist() == [[1, 2, 1]]
        assert turned.float().isnan().nonzero().tolist() == [[1, 1, 2]]
        assert amax.isfinite().tolist() == [True, False]


def test_errors():
    with pytest.raises(
        ValueError,
        match=r"(?s)x: got shape \(3,\).*x: got torch.int64.*blocks: got '2x2'.*format: got 'e3m4'",
    ):
        quantise_fp8(torch.arange(3), "2x2", "e3m4")
    with pytest.raises(
        ValueError,
        match=r"cast_fp8: got scale of torch.float32 and shape \(2,\); wanted float32 of shape \(3,\)",
    ):
        cast_fp8(torch.ones(3, 4, 4), torch.ones(2))
    with pytest.raises(ValueError, match=r"(?s)no layout for scaled_mm.*blocks of 1x32"):
        quantise_fp8(torch.ones(32, 32), "1x32")[0].mm_scales()


CASE = Case(
    DEQUANTISE_FP8,
    lambda values, scales, like, rows, cols: values.to(like) * scales,
    (torch.randn(2, 3, 32).to(torch.float8_e4m3fn), torch.rand(2, 3, 1), torch.empty(0), 1, 32),
    moving=(1,),
)


@conform([CASE])
def test_conformance(case, check):
    check(case)


@pytest.mark.parametrize("given", [False, True])
def test_mapped(given):
    """One kernel for all that is mapped, in either order of dims."""
    x = matrix((4, 5, 2, 6), BF16)
    scale = torch.rand(4, 5) + 0.5 if given else None
    call = lambda x, scale: QUANTISE_FP8(
        x, scale, *((0, 0) if given else (1, 32)), False, True, True
    )
    got = torch.func.vmap(call, (0, 0 if given else None))(x, scale)
    want = [call(x[i], scale[i] if given else None) for i in range(4)]
    for part, rows in zip(got, zip(*want, strict=True), strict=True):
        assert torch.equal(
            part.view(torch.uint8), torch.stack([row.view(torch.uint8) for row in rows])
        )
    if not given:
        values = torch.func.vmap(lambda v, s: DEQUANTISE_FP8(v, s, x[:0], 1, 32))(got[0], got[1])
        each = [DEQUANTISE_FP8(v, s, x[:0], 1, 32) for v, s in zip(got[0], got[1], strict=True)]
        assert torch.equal(values, torch.stack(each))
