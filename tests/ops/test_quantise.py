"""Formats of 8 and 4 bits: encodings against ml_dtypes, scales against torchao and transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from functron import random
from functron.ops import quantise as ops
from functron.ops.quantise import (
    E2M1,
    E8M0,
    ELEMENTS,
    HISTORY,
    MOST,
    WIDTH,
    Quantised,
    QuantisedFormat,
    RoundingDraw,
    copied,
    dequantise,
    hadamard,
    histogram,
    magnitude,
    quantise,
    remember,
    remembered,
    unpacked,
)
from functron.ops.scaled_matmul import swizzled

NUMPY = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
FORMATS = [
    *(f"{e}@{b}" for e in ("e4m3", "e5m2") for b in ("tensor", "row", "1x128", "128x128", "1x32")),
    "e2m1@1x32", "e2m1@1x16", "e2m1@16x16",
]  # fmt: skip


def matrix(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    return x.to(dtype)


def made(x, text, draw=None):
    f = QuantisedFormat.parse(text)
    return quantise(x, f, magnitude(x, f), draw)


def codes(x: torch.Tensor) -> np.ndarray:
    """The code of each number, one in a byte."""
    raw = x.contiguous().view(torch.uint8).numpy()
    if x.dtype != E2M1:
        return raw
    return np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)


def same_numbers(got: torch.Tensor, want: np.ndarray):
    got = got.numpy()
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.array_equal(np.nan_to_num(got), np.nan_to_num(want))
    assert np.array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


@pytest.mark.parametrize("element", NUMPY)
def test_every_code(element):
    """All 256 codes of 8 bits, infinities and NaN among them, and all 16 of 4 mean what they mean."""
    raw = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
    want = raw.view(NUMPY[element]).astype(np.float32)
    if element == "e2m1":
        got = unpacked(torch.from_numpy(raw[::2] | raw[1::2] << 4).view(E2M1))
    else:
        one = torch.ones(1, 1)
        values = torch.from_numpy(raw).view(ELEMENTS[element]).unsqueeze(0)
        got = dequantise(Quantised(values, one, "tensor"))[0]
    same_numbers(got, want)
    scales = torch.arange(256, dtype=torch.uint8).view(E8M0).reshape(-1, 1)
    ones = torch.ones(256, 32).to(torch.float8_e4m3fn)
    powers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    same_numbers(dequantise(Quantised(ones, scales, "1x32"))[:, 0], powers)


def numbers(element):
    """All of its finite numbers, the middles between them, both neighbours of these, and more."""
    raw = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
    known = raw.view(NUMPY[element]).astype(np.float64)
    known = np.unique(known[np.isfinite(known)])
    middles = (known[1:] + known[:-1]) / 2
    beyond = [MOST[ELEMENTS[element]] * by for by in (1.01, 1.5, 100.0, -1.01, -1e9)]
    x = np.concatenate([known, middles, beyond, [1e-30, -1e-30, -0.0]]).astype(np.float32)
    return np.concatenate(
        [x, np.nextafter(x, np.float32(1e38)), np.nextafter(x, np.float32(-1e38))]
    )


@pytest.mark.parametrize("element", NUMPY)
def test_rounding_to_nearest(element):
    """Ties to even, subnormal numbers, signs of zeros, saturation: as ml_dtypes rounds."""
    x = numbers(element)
    x = np.concatenate([x, np.zeros(-len(x) % 32, np.float32)])
    most = MOST[ELEMENTS[element]]
    got = codes(ops._round_to_dtype(torch.from_numpy(x), ELEMENTS[element], None))
    want = np.clip(x, -most, most).astype(NUMPY[element]).view(np.uint8)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("element", NUMPY)
def test_stochastic_rounding(element):
    """Over all 2^16 bits the mean is the number, and only its two neighbours occur."""
    raw = np.arange(8 if element == "e2m1" else 124, dtype=np.uint8)
    known = raw.view(NUMPY[element]).astype(np.float64)[: 127 if element == "e4m3" else None]
    generator = np.random.default_rng(0)
    at = generator.integers(0, len(known) - 1, 24)
    share = generator.integers(0, 2**12, 24) / 2**12  # what float32 and 16 bits have exactly
    share[:4] = [0, 0.5, 1 / 2**12, 1 - 1 / 2**12]
    x = (known[at] * (1 - share) + known[at + 1] * share) * np.where(np.arange(24) % 2, -1, 1)
    assert np.array_equal(x.astype(np.float32), x)
    bits = torch.arange(2**16, dtype=torch.int32)
    wide = torch.from_numpy(x).float().unsqueeze(1).expand(-1, 2**16)
    y = ops._round_to_dtype(wide.contiguous(), ELEMENTS[element], bits.expand(24, -1))
    got = unpacked(y) if element == "e2m1" else y.float()
    assert np.array_equal(got.double().mean(1).numpy(), x)
    for row, i, sign in zip(got, at, np.where(np.arange(24) % 2, -1, 1), strict=True):
        assert {*(sign * row).unique().tolist()} <= {known[i], known[i + 1]}


def test_bits_belong_to_global_positions():
    """A shard is rounded as the whole tensor is; the bits are `random.bits`'."""
    x, key = matrix(32, 64), random.key(3)
    at = torch.arange(32) * 64, torch.arange(64)
    whole = made(x, "e4m3@1x32+stochastic", RoundingDraw(key, *at, 5))
    part = made(x[8:24, 32:], "e4m3@1x32+stochastic", RoundingDraw(key, at[0][8:24], at[1][32:], 5))
    assert np.array_equal(codes(part.values), codes(whole.values)[8:24, 32:])
    drawn = random.bits(random.fold_in(key, 5), (32, 64), bit_width=16).to(torch.int32)
    assert torch.equal(ops._bits_at(key, *at, 5), drawn)
    assert (codes(whole.values) != codes(made(x, "e4m3@1x32").values)).any()
    keys = random.split(key, 2)
    mapped = torch.func.vmap(
        lambda k, i, j: made(x[:16, :32], "e2m1@16x16+stochastic", RoundingDraw(k, i, j)).values
    )(keys, at[0].reshape(2, 16), at[1].reshape(2, 32))
    for i in range(2):
        draw = RoundingDraw(keys[i], at[0][16 * i :][:16], at[1][32 * i :][:32])
        want = made(x[:16, :32], "e2m1@16x16+stochastic", draw).values
        assert np.array_equal(codes(mapped[i]), codes(want))


GOLDEN = json.loads((Path(__file__).parent / "torchao_quantised.json").read_text())


def golden(name, part, dtype, *shape):
    raw = np.frombuffer(bytes.fromhex(GOLDEN[name][part]), np.uint8).copy()
    return torch.from_numpy(raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("text", [name for name in GOLDEN if name != "x"])
def test_as_torchao(text):
    """Bit for bit; the file is torchao_quantised.py's."""
    x = golden("x", "values", torch.bfloat16, 16, 64)
    got = made(x, text)
    width = 32 if text.startswith("e2m1") else 64
    want = golden(text, "values", torch.uint8, 16, width)
    used = torch.ones(16, 64, dtype=torch.bool)
    if text.endswith("1x32"):
        scales = golden(text, "scales", torch.uint8, 16, 2)
        used[0, :32] = False  # of blocks of zeros it has the smallest scale, and this 1
        zero = torch.zeros(16, 2, dtype=torch.bool)
        zero[0, 0] = True
        assert torch.equal(got.scales.view(torch.uint8)[~zero], scales[~zero])
        assert (got.values.view(torch.uint8)[0, : width // 2] == 0).all()
    elif "1x16" in text:
        assert torch.equal(got.scales.view(torch.uint8), golden(text, "scales", torch.uint8, 16, 4))
        assert torch.equal(got.whole.reshape(1), golden(text, "whole", torch.float32, 1))
    else:
        rows = 1 if "tensor" in text else 16
        inverse = golden(text, "inverse", torch.float32, rows, 1)
        assert torch.equal(got.scales, 1 / inverse)
    assert torch.equal(got.values.view(torch.uint8), want)


@pytest.mark.full  # transformers takes seconds to import
def test_deepseek_weights_as_transformers_reads_them():
    """Values and ``weight_scale_inv`` of 128x128, back in float32."""
    fine = pytest.importorskip("transformers.integrations.finegrained_fp8")
    w = matrix(256, 384, seed=1)
    q = made(w, "e4m3@128x128")
    read = fine.Fp8Dequantize(None)._dequantize_one(q.values, q.scales, torch.float32)
    assert torch.equal(read, dequantise(q))
    assert ((read - w).abs() <= w.abs() / 16 + q.scales.max() * 2.0**-10).all()


@pytest.mark.parametrize("text", FORMATS)
def test_error_and_what_is_not_finite(text):
    """Half a unit of the last bit of what is normal; NaN where, and only where, a scale is shared."""
    f = QuantisedFormat.parse(text)
    x = matrix(2, 128, 256, seed=2)
    back = dequantise(made(x, text))
    half = {"e4m3": 1 / 16, "e5m2": 1 / 8, "e2m1": 1 / 4}[f.element]
    rows, cols = f.block
    shared = {"tensor": x.abs().amax((1, 2), True), "row": x.abs().amax(2, True)}.get(f.blocks)
    if shared is None:
        parts = x.reshape(2, 128 // rows, rows, 256 // cols, cols).abs().amax((2, 4), True)
        shared = parts.expand(-1, -1, rows, -1, cols).reshape(x.shape)
    # of the scale: amax / most, twice that where it is a power of two; in E4M3 it is off by 1/16,
    # by which a block may saturate too, or the smallest one under that of the tensor
    mantissa, least = ops._MANTISSA[f.dtype]
    step = shared / MOST[f.dtype] * 2.0 ** (least - mantissa) * (2 if f.blocks == "1x32" else 1.07)
    floor = x.abs().amax((1, 2), True) / (6 * 448) * ops._LEAST_E4M3 if f.element == "e2m1" else 0
    bound = torch.maximum(x.abs() * half, step / 2) + floor
    bound = bound + (shared / 16 if f.blocks in ("1x16", "16x16") else 0)
    assert ((back - x).abs() <= bound * 1.0001).all()
    for bad in (math.inf, -math.inf, math.nan):
        y = x.clone()
        y[1, 37, 130] = bad
        back = dequantise(made(y, text))
        want = torch.zeros_like(y, dtype=torch.bool)
        if f.shared == "tensor":
            want[1] = True
        elif f.shared == "row":
            want[1, 37] = True
        else:
            at = (slice(37 // rows * rows, 37 // rows * rows + rows),
                  slice(130 // cols * cols, 130 // cols * cols + cols))  # fmt: skip
            want[(1, *at)] = True
        assert torch.equal(back.isnan(), want)
    zeros = made(torch.zeros(2, 128, 256), text)
    assert (dequantise(zeros) == 0).all()
    assert zeros.scales.float().isfinite().all()
    assert (zeros.scales.float() > 0).all()
    parts = [0, 1, 3] if f.blocks in ("1x16", "16x16") else [0, 1]
    mapped = torch.func.vmap(lambda x: [made(x, text)[i] for i in parts], 1)(x.transpose(0, 1))
    again = Quantised(mapped[0], mapped[1], f.blocks, *mapped[2:])
    assert torch.equal(dequantise(again), dequantise(made(x, text)))


@pytest.mark.parametrize("shape", [(576, 320), (200, 130), (1, 1), (600, 600)], ids=str)
@pytest.mark.parametrize("text", ["e4m3@1x128", "e4m3@128x128", "e5m2@128x128+pow2"])
def test_incomplete_blocks(text, shape):
    """At a matrix's ends: the blocks' own numbers and scales, as those of a matrix of one block."""
    x, rows = matrix(2, *shape), QuantisedFormat.parse(text).block[0]
    got = made(x, text)
    grid = (-(-shape[0] // rows), -(-shape[1] // 128))
    assert (got.values.shape, got.scales.shape) == (x.shape, (2, *grid))
    for i, j in np.ndindex(*grid):
        if 3 < i < grid[0] - 1:  # rows within
            continue
        at = (slice(None), slice(rows * i, rows * (i + 1)), slice(128 * j, 128 * (j + 1)))
        part = torch.zeros(2, rows, 128)
        height, width = x[at].shape[1:]
        part[:, :height, :width] = x[at]
        want = made(part, text)
        assert np.array_equal(codes(got.values[at]), codes(want.values[:, :height, :width]))
        assert torch.equal(got.scales[:, i, j], want.scales[:, 0, 0])
    back = dequantise(got)
    assert back.shape == x.shape
    assert ((back - x).norm() / x.norm()) < 0.1
    x[1, -1, -1] = math.nan
    here = dequantise(made(x, text)).isnan()
    assert here[1, rows * (grid[0] - 1) :, 128 * (grid[1] - 1) :].all()
    assert here.sum() == (shape[0] - rows * (grid[0] - 1)) * (shape[1] - 128 * (grid[1] - 1))


@pytest.mark.parametrize("text", ["e4m3@tensor", "e4m3@128x128", "e2m1@16x16"])
@pytest.mark.parametrize("odd", [False, True])
def test_the_transpose_of_squares(text, odd):
    """Has the bits of the transpose, quantised."""
    x = matrix(2, *((200, 130) if odd and "16" not in text else (128, 256)))
    straight, want = made(x, text), made(x.mT, text)
    values, scales = (copied(part, turn=True) for part in straight[:2])
    got = straight._replace(values=values, scales=scales)
    assert np.array_equal(codes(got.values), codes(want.values))
    assert torch.equal(dequantise(got), dequantise(want))


def test_hadamard():
    """The matrix of that name, orthogonal; products are kept; signs belong to positions."""
    key, at = random.key(1), torch.arange(64)
    signs = 1 - 2.0 * (random.bits(random.fold_in(key, 3), (64,)).to(torch.int64) % 2)
    x, y = matrix(5, 64), matrix(7, 64, seed=1)
    sylvester = [[(-1) ** (i & j).bit_count() for j in range(WIDTH)] for i in range(WIDTH)]
    dense = np.kron(np.eye(4), np.array(sylvester) / 4) * signs.numpy()[:, None]
    assert np.allclose(dense @ dense.T, np.eye(64))
    assert 16 < (signs > 0).sum() < 48
    got = hadamard(x, key, at, 3)
    assert np.allclose(got.numpy(), x.double().numpy() @ dense, atol=1e-6)
    # five roundings of each mixed number, relative to the norm of its sixteen
    kept = (got.double() @ hadamard(y, key, at, 3).double().T - x.double() @ y.double().T).abs()
    assert (kept <= 10 * 2.0**-24 * x.norm(dim=1)[:, None] * y.norm(dim=1)).all()
    assert torch.equal(hadamard(x[:, 32:], key, at[32:], 3), got[:, 32:])
    mapped = torch.func.vmap(lambda x, at: hadamard(x, key, at, 3), (1, 0), 1)
    assert torch.equal(mapped(x.reshape(5, 2, 32), at.reshape(2, 32)).reshape(5, 64), got)
    with pytest.raises(ValueError, match=r"dim -1 of x: got 24; .*make it 16 or 32"):
        hadamard(x[:, :24], key, at[:24], 3)


@pytest.mark.parametrize("shape", [(128, 4), (130, 5), (16, 3), (300, 9)], ids=str)
def test_swizzled_scales(shape):
    """cuBLAS's "block scaling factors layout", one scale after the other."""
    rows, cols = shape
    wide = -(-cols // 4)
    want = np.zeros(-(-rows // 128) * 128 * wide * 4, np.uint8)
    scales = torch.randint(0, 255, shape, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = r // 128 * wide + c // 4
            want[512 * tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    assert np.array_equal(swizzled(scales).numpy(), want)


def test_text_of_formats():
    for text in (*FORMATS, "e2m1@1x16+stochastic", "e4m3@1x128+stochastic+pow2"):
        assert str(QuantisedFormat.parse(text)) == text
    assert made(matrix(1, 128), "e4m3@1x128+pow2").scales.log2().frac().item() == 0
    for text, match in {
        "e4m3": "ELEMENT@BLOCKS",
        "e4m3@1x128+fast": "ELEMENT@BLOCKS",
        "e3m4@1x12": r"(?s)element: got 'e3m4'.*e4m3.*blocks: got '1x12'.*1x128",
        "e2m1@tensor": "small blocks for 4 bits; fix: take 1x16",
        "e4m3@1x16": "wanted e2m1 by blocks of 1x16",
        "e4m3@1x32+pow2": "leave pow2 out",
    }.items():
        with pytest.raises(ValueError, match=match):
            QuantisedFormat.parse(text)


def test_bad_operands():
    with pytest.raises(
        ValueError, match=r"dim -1 of x: got 100; wanted a multiple of 32.*make it 96 or 128"
    ):
        made(torch.ones(4, 100), "e4m3@1x32")
    with pytest.raises(
        ValueError, match=r"dim -2 of x: got 40; wanted a multiple of 16.*make it 32 or 48"
    ):
        made(torch.ones(40, 32), "e2m1@16x16")
    with pytest.raises(ValueError, match=r"amax: got shape None; wanted \(4,\), for e4m3@row"):
        quantise(torch.ones(4, 32), QuantisedFormat.parse("e4m3@row"))
    with pytest.raises(ValueError, match=r"draw: got no bits.*Draw"):
        made(torch.ones(4, 32), "e4m3@1x32+stochastic")
    with pytest.raises(ValueError, match=r"x: got torch.int64 of shape \(3,\)"):
        quantise(torch.arange(3), QuantisedFormat.parse("e4m3@1x32"))


def test_histories():
    """The maximum, rounded up by less than a quarter, of however many magnitudes are added up."""
    values = torch.tensor([0.0, 1e-30, 1.0, 1.01, 1.25, 447.0, 448.0, 2.0**27 * 1.25, 1e30])
    counts = histogram(values)
    assert (counts.sum(-1) == 1).all()
    history = torch.arange(HISTORY).float().expand(len(values), -1)
    next_ = remember(history, counts)
    assert torch.equal(next_[:, :-1], history[:, 1:])
    want = [0.0, 2.0**-36, 1.0, 1.25, 1.25, 448.0, 448.0, 2.0**27 * 1.25, 2.0**27 * 1.25]
    assert next_[:, -1].tolist() == want
    assert remembered(torch.zeros(3, HISTORY)).tolist() == [0.0] * 3
    x = matrix(1000).abs()
    got = remember(torch.zeros(HISTORY), histogram(x).bfloat16().sum(0) / 3)[-1]
    assert x.max() <= got < 1.25 * x.max()
    for bad in (math.nan, math.inf):
        seen = histogram(torch.tensor([3.0, bad]))
        assert remember(torch.ones(HISTORY), seen.sum(0))[-1] == 0
    mapped = torch.func.vmap(lambda v: remember(torch.ones(HISTORY), histogram(v)))(values)
    assert torch.equal(mapped[:, -1], next_[:, -1])
