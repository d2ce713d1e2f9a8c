"""Products of quantised matrices: the reference, and what tensor cores are given."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from functron.ops.quantise import Quantised, QuantisedFormat, dequantise, magnitude, quantise
from functron.ops.scaled_matmul import (
    grouped_on_cuda,
    on_cuda,
    scaled_grouped_matmul,
    scaled_grouped_weight,
    scaled_matmul,
    why_not,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
M, N, K = 128, 256, 384
PAIRS = [
    ("e4m3@tensor", "e4m3@tensor"), ("e5m2@tensor", "e4m3@tensor"), ("e4m3@tensor", "e5m2@tensor"),
    ("e4m3@row", "e4m3@row"), ("e4m3@1x128", "e4m3@128x128"), ("e4m3@1x128", "e4m3@1x128"),
    ("e4m3@1x32", "e4m3@1x32"), ("e5m2@1x32", "e4m3@1x32"), ("e2m1@1x16", "e2m1@16x16"),
    ("e2m1@1x16", "e2m1@1x16"), ("e2m1@1x32", "e2m1@1x32"),
]  # fmt: skip


def matrix(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def made(x, text):
    f = QuantisedFormat.parse(text)
    return quantise(x, f, magnitude(x, f))


def by_hand(q: Quantised, element: str) -> np.ndarray:
    """Values times scales, by ml_dtypes' numbers and NumPy's products in float32."""
    raw = q.values.view(torch.uint8).numpy()
    if element == "e2m1":
        raw = np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)
    kind = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn"}[element]
    values = raw.view(getattr(ml_dtypes, kind)).astype(np.float32)
    scales = q.scales.float().numpy()
    if q.whole is not None:
        scales = scales * q.whole.numpy()
    by = [n // m for n, m in zip(values.shape, scales.shape, strict=True)]
    return values * np.kron(scales, np.ones(by, np.float32))


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_reference(left, right):
    """The decoded values exactly; their products summed in float64, and in float32 as torch sums."""
    x, w = matrix(M, K), matrix(N, K, seed=1)
    a, b = made(x, left), made(w, right)
    x_, w_ = by_hand(a, left[:4]), by_hand(b, right[:4])
    assert np.array_equal(dequantise(a).numpy(), x_)
    y = scaled_matmul(a, b, F64)
    exact = x_.astype(np.float64) @ w_.astype(np.float64).T
    assert np.allclose(y.numpy(), exact, rtol=1e-13, atol=1e-12)
    want = torch.from_numpy(x_) @ torch.from_numpy(w_).mT
    assert torch.equal(scaled_matmul(a, b, F32), want)
    assert torch.equal(scaled_matmul(a, b, BF16), want.to(BF16))
    # many at once, and mapped: the same bits
    both = [Quantised(*[p if p is None else torch.stack([p, p]) for p in (q[0], q[1])], q.blocks,
                      None if q.whole is None else torch.stack([q.whole, q.whole])) for q in (a, b)]  # fmt: skip
    assert torch.equal(scaled_matmul(*both, F32)[1], want)
    mapped = torch.func.vmap(lambda w: scaled_matmul(made(x, left), made(w, right), F32), 1)
    assert torch.equal(mapped(torch.stack([w, -w], 1)), torch.stack([want, -want]))


BY_128 = [("e4m3@1x128", "e4m3@128x128"), ("e4m3@128x128", "e4m3@1x128"), ("e4m3@1x128",) * 2]


@pytest.mark.parametrize(("left", "right"), BY_128)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 576, 320), (130, 200, 576), (7, 130, 200)], ids=str)
def test_incomplete_blocks(left, right, m, n, k):
    """The float64 product of every element times its block's scale; as complete ones with zeros."""
    a, b = made(matrix(m, k), left), made(matrix(n, k, seed=1), right)

    def decoded(q):
        numbers = q.values.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        i, j = np.indices(numbers.shape)
        return numbers.astype(np.float64) * q.scales.double().numpy()[i // q.block[0], j // 128]

    x_, w_ = decoded(a), decoded(b)
    off = np.abs(scaled_matmul(a, b, F32).double().numpy() - x_ @ w_.T)
    # sums of k products in float32, of values that are rounded to it
    assert (off <= (k + 2) * 2.0**-24 * (np.abs(x_) @ np.abs(w_).T)).all()
    exact = (x.astype(np.float32).astype(np.float64) for x in (x_, w_.T))
    assert np.allclose(scaled_matmul(a, b, F64).numpy(), np.matmul(*exact), rtol=1e-13, atol=1e-12)
    with FlopCounterMode(display=False) as counter:
        scaled_matmul(a, b, F32)
    assert counter.get_total_flops() == 2 * m * n * k


@pytest.mark.parametrize(("left", "right"), PAIRS[:4])
def test_as_torch_on_a_cpu(left, right):
    """torch's own, which scales a float32 sum of the values at its end."""
    a, b = made(matrix(M, K), left), made(matrix(N, K, seed=1), right)
    if not torch.__version__ >= "2.13":
        pytest.skip("torch has none before 2.13")
    got = on_cuda(a, b, F32)
    torch.testing.assert_close(got, scaled_matmul(a, b, F32), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("left", "right", "shape"),
    [*((*pair, (M, N, K)) for pair in PAIRS), *((*pair, (200, 576, 320)) for pair in BY_128)],
)
def test_tensor_cores(left, right, shape):
    """Quantised and multiplied on the GPU, where it has the product: the reference's numbers.

    Codes are the same bits. Sums differ by their order, and on Hopper by tensor cores that keep 14
    bits of each: by at most K units of 2^-13 of the largest product.
    """
    capability = torch.cuda.get_device_capability()
    rows, columns, inner = shape
    x, w = matrix(rows, inner), matrix(columns, inner, seed=1)
    ours = [made(m.cuda(), text) for m, text in ((x, left), (w, right))]
    want = [made(m, text) for m, text in ((x, left), (w, right))]
    for a, b in zip(ours, want, strict=True):
        assert torch.equal(a.values.view(torch.uint8).cpu(), b.values.view(torch.uint8))
        assert torch.equal(a.scales.view(torch.uint8).cpu(), b.scales.view(torch.uint8))
    reason = why_not(*map(QuantisedFormat.parse, (left, right)), BF16, capability)
    if reason is not None:
        with pytest.raises(ValueError, match="a quantised product"):
            scaled_matmul(*ours, BF16)
        y = scaled_matmul(*ours, BF16, emulate=True)
    else:
        y = scaled_matmul(*ours, BF16)
    exact = scaled_matmul(*want, F64)
    largest = dequantise(want[0]).abs().max() * dequantise(want[1]).abs().max()
    bound = inner * 2.0**-13 * float(largest) + exact.abs() * 2.0**-8
    assert ((y.cpu().double() - exact).abs() <= bound).all()


FAKE = FakeTensorMode()


def on_fake(x):
    """The same strides on a GPU that is not there."""
    if not isinstance(x, torch.Tensor):
        return [on_fake(y) for y in x] if isinstance(x, list) else x
    with FAKE:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


@pytest.mark.parametrize(("left", "right"), PAIRS[:-1])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_what_tensor_cores_are_given(left, right, dtype, monkeypatch):
    """torch checks shapes, strides, dtypes and orders of scales on fake tensors of a GPU.

    Of scales nothing any more in 2.15, where the kernels themselves do.
    """
    real = torch.nn.functional.scaled_mm

    def double(*args, **named):
        with FAKE:
            return real(*map(on_fake, args), **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", double)
    for rows, columns in ((M, N), (M + 4, N + 8)):
        form = QuantisedFormat.parse(right)
        if columns % form.block[0] and form.complete:
            continue
        a, b = made(matrix(rows, K), left), made(matrix(columns, K, seed=1), right)
        y = on_cuda(a, b, dtype)
        assert (y.shape, y.dtype, y.device.type) == ((rows, columns), dtype, "cuda")
        wrong = b._replace(blocks={"tensor": "row"}.get(b.blocks, "tensor"))
        if torch.__version__ < "2.14":
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                on_cuda(a, wrong, dtype)


@pytest.mark.parametrize(("left", "right"), BY_128)
def test_tensor_cores_are_given_complete_blocks(left, right, monkeypatch):
    """Padded with zeros, as torch wants them, which adds nothing to the sums."""
    m, n, k = 200, 576, 320
    real = torch.nn.functional.scaled_mm

    def double(a, b, a_scales, a_kind, b_scales, b_kind, **named):
        operands = [on_fake(x) for x in (a, b, a_scales, a_kind, b_scales, b_kind)]
        with FAKE:
            assert real(*operands, **named).shape == (a.shape[0], b.shape[1])
        decoded = []
        for x, (scales,), text in ((a, a_scales, left), (b.mT, b_scales, right)):
            block = QuantisedFormat.parse(text).block
            assert [size % by for size, by in zip(x.shape, block, strict=True)] == [0, 0]
            table = (scales.mT if block[0] > 1 else scales).numpy()
            i, j = np.indices(x.shape)
            decoded.append(x.double() * table[i // block[0], j // 128])
        return (decoded[0] @ decoded[1].mT).to(named["output_dtype"])

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", double)
    a, b = made(matrix(m, k), left), made(matrix(n, k, seed=1), right)
    want = dequantise(a).double() @ dequantise(b).double().mT
    torch.testing.assert_close(on_cuda(a, b, F32), want.float(), rtol=1e-5, atol=1e-5)


def test_no_elements():
    a, b = made(matrix(M, K), "e4m3@tensor"), made(matrix(N, K), "e4m3@tensor")
    empty = a._replace(values=a.values[:0])
    assert scaled_matmul(empty, b, F32).shape == (0, N)
    assert on_cuda(empty, b, BF16).shape == (0, N)


KNOWN = {  # compute capability: pairs of blocks that it has (ScaledBlas.cpp of torch 2.13)
    (8, 0): set(),
    (8, 9): {"tensor", "row"},
    (9, 0): {"tensor", "row", "1x128 128x128", "1x128 1x128", "128x128 1x128"},
    (10, 0): {"tensor", "row", "1x32", "nvfp4"},
    (12, 0): {"tensor", "row", "1x32", "nvfp4"},
}


@pytest.mark.parametrize("capability", KNOWN)
def test_which_device_has_what(capability):
    known = KNOWN[capability]
    names = {"tensor", "row", "1x128 128x128", "1x128 1x128", "128x128 1x128", "1x32", "nvfp4"}
    for name in names:
        texts = [f"e4m3@{blocks}" for blocks in (name.split() * 2)[:2]]
        if name == "nvfp4":
            texts = ["e2m1@1x16", "e2m1@16x16"]
        reason = why_not(*map(QuantisedFormat.parse, texts), BF16, capability)
        assert (reason is None) == (name in known), (name, reason)
        if reason is not None:
            assert "compute capability" in reason
    pairs = {
        ("e5m2@tensor", "e5m2@tensor"): "no GPU multiplies e5m2 by e5m2",
        ("e4m3@tensor", "e4m3@row"): "blocks of one kind",
        ("e4m3@row", "e5m2@row"): "right operand of row x row is e4m3",
        ("e2m1@1x32", "e2m1@1x32"): "take 1x16",
    }
    for (left, right), match in pairs.items():
        assert match in why_not(
            QuantisedFormat.parse(left), QuantisedFormat.parse(right), BF16, capability
        )
    assert "float64" in why_not(*[QuantisedFormat.parse("e4m3@tensor")] * 2, F64, capability)
    grouped = why_not(*[QuantisedFormat.parse("e4m3@row")] * 2, BF16, capability, grouped=True)
    assert (grouped is None) == (capability == (9, 0))


def test_flops():
    """Of FP4 as of any other: 2 M N K, whatever a byte holds."""
    for left, right in (PAIRS[0], PAIRS[8]):
        a, b = made(matrix(M, K), left), made(matrix(N, K), right)
        with FlopCounterMode(display=False) as counter:
            scaled_matmul(a, b, F32)
        assert counter.get_total_flops() == 2 * M * N * K


def test_groups_of_rows(monkeypatch):
    """The reference by a loop; what tensor cores are given passes torch's checks; FLOPs."""
    sizes = torch.tensor([3, 0, 9])
    x, w = matrix(16, K), matrix(3, N, K, seed=1)
    rows = QuantisedFormat.parse("e4m3@row")
    a, b = quantise(x.unsqueeze(1), rows, magnitude(x.unsqueeze(1), rows)), made(w, "e4m3@tensor")
    with FlopCounterMode(display=False) as counter:
        y = scaled_grouped_matmul(a, b, sizes, F32)
    assert counter.get_total_flops() == 2 * 16 * N * K
    for g, at in ((0, slice(0, 3)), (2, slice(3, 12))):
        want = dequantise(a)[at, 0] @ dequantise(b)[g].mT
        assert torch.equal(y[at], want)
    assert (y[12:] == 0).all()
    with FlopCounterMode(display=False) as counter:
        dw = scaled_grouped_weight(
            a.values[:, 0], a.scales[:, 0], a.values[:, 0], a.scales[:, 0], sizes, F32
        )
    assert counter.get_total_flops() == 2 * 16 * K * K
    flat = dequantise(a)[:, 0]
    torch.testing.assert_close(dw[2], flat[3:12].mT @ flat[3:12])
    real = torch._scaled_grouped_mm

    def double(*args, offs, out_dtype):
        with FAKE:
            made = real(*map(on_fake, args), offs=on_fake(offs), out_dtype=out_dtype)
        return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", double)
    y = grouped_on_cuda(a.values, a.scales, b.values, b.scales, sizes, BF16, True)
    assert (y.shape, y.dtype) == ((16, N), BF16)
