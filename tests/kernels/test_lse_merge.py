"""kernels/lse_merge.cu and its op, against softmax over the joined keys in float64."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import Mesh, P, nn, ops
from functron.nn.context import to_balanced, to_contiguous
from functron.ops import softmax
from functron.ops.softmax import LSE_MERGE, LSE_MERGE_BACKWARD, merge
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import emulated

KERNEL = ops.use("kernel")
TYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
]
EPS = {torch.float32: 4e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def draw(*shape, types=TYPES[0], seed=0):
    generator = torch.Generator().manual_seed(seed)
    out1, out2 = (torch.randn(shape, generator=generator).to(dtype) for dtype in types)
    lse1, lse2 = 5 * torch.randn(2, *shape[:-1], generator=generator)
    return out1, lse1, out2, lse2


def formula(out1, lse1, out2, lse2):
    """In float64, by the definition; -inf and 0 of nothing."""
    out1, lse1, out2, lse2 = (x.double() for x in (out1, lse1, out2, lse2))
    first, second = lse1.exp(), lse2.exp()
    total = first + second
    divisor = torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return (out1 * first.unsqueeze(-1) + out2 * second.unsqueeze(-1)) / divisor, total.log()


def cotangents(d_out, d_lse, out1, lse1, out2, lse2):
    """Of operands without -inf, as torch differentiates `formula`."""
    operands = [x.double() for x in (out1, lse1, out2, lse2)]
    return torch.func.vjp(formula, *operands)[1]((d_out.double(), d_lse.double()))


def check(*operands):
    out, lse = emulated(softmax._merge_kernel, *operands)
    assert out.dtype == lse.dtype == torch.float32
    assert out.is_contiguous()
    wanted = formula(*operands)
    torch.testing.assert_close(out.double(), wanted[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-6, atol=1e-6)
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(x.shape, generator=generator) for x in (out, lse)]
    got = emulated(softmax._merge_kernel_backward, *given, *operands)
    for moved, expected, like in zip(got, cotangents(*given, *operands), operands, strict=True):
        assert moved.dtype == like.dtype
        assert moved.is_contiguous()
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        eps = EPS[like.dtype]
        torch.testing.assert_close(moved.double(), expected, rtol=eps, atol=5e-6 * scale)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 6, 64, 200])
def test_numbers(types, dim):
    check(*draw(2, 3, 5, dim, types=types))


@pytest.mark.parametrize("shape", [(7, 8), (2, 2, 1, 3, 12), (1, 4, 1, 8)], ids=str)
def test_dims_of_rows(shape):
    check(*draw(*shape))


def test_one_row():
    check(*draw(8))


def test_layouts():
    """Halves of a sequence, heads inside of the sequence, and rows that begin anywhere."""
    out1, lse1, out2, lse2 = draw(2, 3, 8, 16, types=(torch.float32, torch.bfloat16))
    check(out1[:, :, 4:], lse1[:, :, 4:], out2[:, :, :4], lse2[:, :, ::2])
    inside = out2.transpose(1, 2).contiguous().transpose(1, 2)
    check(out1, lse1, inside, lse2)
    check(out1[..., 1:13], lse1, out2[..., 3:15], lse2)
    check(out1.mT.contiguous().mT, lse1, out2, lse2)


def test_rows_that_see_nothing():
    out1, lse1, out2, lse2 = draw(2, 3, 4)
    low = float("-inf")
    lse1[0] = low
    lse2[:, 0] = low
    out1[0], out2[:, 0] = 0, 0
    out, lse = emulated(softmax._merge_kernel, out1, lse1, out2, lse2)
    assert lse[0, 0] == low
    assert out[0, 0].eq(0).all()
    assert torch.equal(lse[0, 1:], lse2[0, 1:])
    assert torch.equal(out[0, 1:], out2[0, 1:])
    assert torch.equal(out[1, 0], out1[1, 0])
    given = torch.ones_like(out), torch.ones_like(lse)
    for moved in (
        emulated(softmax._merge_kernel_backward, *given, out1, lse1, out2, lse2),
        softmax._merge_backward(*given, out1, lse1, out2, lse2),
    ):
        assert all(x.isfinite().all() for x in moved)
        d_out1, d_lse1, d_out2, d_lse2 = moved
        assert d_out1[0].eq(0).all()
        assert d_lse1[0].eq(0).all()
        assert d_out2[:, 0].eq(0).all()
        assert d_lse2[:, 0].eq(0).all()


def test_logarithms_far_apart():
    out1, lse1, out2, lse2 = draw(3, 8)
    lse1 = torch.tensor([1e4, -1e4, 0.0])
    lse2 = torch.tensor([-1e4, 1e4, 1e4])
    out, lse = emulated(softmax._merge_kernel, out1, lse1, out2, lse2)
    assert torch.equal(lse, torch.full((3,), 1e4))
    assert torch.equal(out, torch.stack([out1[0], out2[1], out2[2]]))


def test_no_rows():
    operands = draw(0, 3, 8)
    out, lse = emulated(softmax._merge_kernel, *operands)
    assert (out.shape, lse.shape) == ((0, 3, 8), (0, 3))
    moved = emulated(softmax._merge_kernel_backward, out, lse, *operands)
    assert [x.shape for x in moved] == [x.shape for x in operands]


def test_bad_operands_are_refused():
    out1, lse1, out2, lse2 = draw(2, 8)
    with pytest.raises(TypeError, match=r'ops\.use\("reference"\)'):
        emulated(softmax._merge_kernel, out1, lse1, out2.double(), lse2)
    with pytest.raises(ValueError, match="got out2 of shape"):
        emulated(softmax._merge_kernel, out1, lse1, out2[:1], lse2)


def plain_backward(d_out, d_lse, out1, lse1, out2, lse2):
    """The cotangents by the weights that they are made of."""
    first = 1 / (1 + (lse2 - lse1).exp())
    second = 1 - first
    dot1, dot2 = ((d_out * x).sum(-1) for x in (out1, out2))
    out_dot = first * dot1 + second * dot2
    return (
        d_out * first.unsqueeze(-1),
        first * (d_lse + dot1 - out_dot),
        d_out * second.unsqueeze(-1),
        second * (d_lse + dot2 - out_dot),
    )


OPERANDS = tuple(x.double() for x in draw(2, 3, 4))
GIVEN = tuple(x.double() for x in draw(2, 3, 4, seed=9)[:2])
CASES = [
    Case(LSE_MERGE, formula, OPERANDS, moving=(0, 1, 2, 3)),
    Case(LSE_MERGE_BACKWARD, plain_backward, (*GIVEN, *OPERANDS), moving=(0, 1, 2, 3, 4, 5)),
]


@conform(CASES)
def test_conformance(case, check):
    check(case)


def test_the_choice():
    assert merge(*OPERANDS, kernels=KERNEL)[0].is_contiguous()
    for a, b in zip(merge(*OPERANDS, kernels=KERNEL), merge(*OPERANDS), strict=True):
        assert torch.equal(a, b)


SEGMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 12 + [1] * 4])


@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "cp=2,ulysses=2"])
@pytest.mark.parametrize("balanced", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
def test_ring_attention(mesh, balanced, masked):
    """Sequences over cp: blocks joined by this op, masked ones by "softmax", to one softmax."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 16, 4, 3, generator=generator, dtype=torch.float64).unbind()
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    rows, options = P(None, ("cp", "ulysses")), {"balanced": balanced, "kernels": KERNEL}

    def attend(q, k, v, sinks, segments):
        operands = q, k, v, segments
        if balanced:
            operands = (to_balanced(x, 1) for x in operands)
        q, k, v, segments = operands
        if masked:
            out = nn.context_attention(q, k, v, sinks=sinks, segments=segments, **options)
        else:
            out = nn.context_attention(q, k, v, sinks=sinks, **options)
        return to_contiguous(out, 1) if balanced else out

    mapped = ft.shard_map(attend, Mesh.parse(mesh), (rows, rows, rows, P(), rows), rows)

    def dense(q, k, v, sinks):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 3**0.5
        hidden = torch.ones(16, 16).triu(1).bool()[None, None]
        if masked:
            hidden = hidden | (SEGMENTS[:, None, :, None] != SEGMENTS[:, None, None, :])
        weights = torch.where(hidden, 0.0, scores.exp())
        total = weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None]
        return torch.einsum("bhqk,bkhd->bqhd", weights / total, v)

    got, pull = torch.func.vjp(lambda *xs: mapped(*xs, SEGMENTS), q, k, v, sinks)
    wanted, pull_dense = torch.func.vjp(dense, q, k, v, sinks)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    given = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(pull(given), pull_dense(given), rtol=1e-10, atol=1e-10)
