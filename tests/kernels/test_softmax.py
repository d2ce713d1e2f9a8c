"""kernels/softmax.cu and its ops, against formulas in float64."""

from __future__ import annotations

import pytest
import torch

from functron import ops
from functron.ops import attention, softmax
from functron.ops import chunked_attention as chunked
from functron.ops.chunked_attention import Visible
from functron.ops.softmax import (
    SOFTMAX,
    SOFTMAX_,
    SOFTMAX_BACKWARD,
    SOFTMAX_BLOCK_BACKWARD,
    SOFTMAX_BLOCK_BACKWARD_,
)
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import emulated

KERNEL = ops.use("kernel")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = {torch.float32: 3e-6, torch.float16: 1.1e-3, torch.bfloat16: 8.5e-3}
SCALE = 0.37
MASKS = ("none", "one", "heads", "batch")


def draw(shape, dtype=torch.float32, mask="none", seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = (6 * torch.randn(shape, generator=generator)).to(dtype)
    batch, heads, rows, columns = shape
    first = {"none": None, "one": (1, 1), "heads": (batch, 1), "batch": (1, heads)}[mask]
    if first is None:
        return scores, None
    return scores, torch.rand(*first, rows, columns, generator=generator) < 0.4


def masked(scores, scale, hidden, causal):
    s = scores.double() * scale
    rows, columns = s.shape[-2:]
    if causal:
        later = torch.arange(columns) > torch.arange(rows).unsqueeze(1)
        s = torch.where(later, float("-inf"), s)
    return s if hidden is None else torch.where(hidden, float("-inf"), s)


def formula(scores, scale, hidden=None, causal=False, sinks=None):
    """In float64, by the definition; 0 and -inf of nothing."""
    weights = masked(scores, scale, hidden, causal).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + sinks.double().exp()[:, None, None]
    return weights / torch.where(total == 0, 1.0, total), total.log().squeeze(-1)


def close(got, wanted, dtype):
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(got.double(), wanted, rtol=EPS[dtype], atol=2e-6 * scale + 1e-7)


def check(scores, hidden=None, causal=False, sinks=None):
    dtype = scores.dtype
    operands = scores, SCALE, hidden, causal, sinks
    p, lse = emulated(softmax._kernel, *operands)
    wanted_p, wanted_lse = formula(*operands)
    assert (p.dtype, lse.dtype) == (dtype, torch.float32)
    assert p.is_contiguous()
    close(p, wanted_p, dtype)
    close(lse, wanted_lse, torch.float32)
    generator = torch.Generator().manual_seed(3)
    d_p = torch.randn(scores.shape, generator=generator).to(dtype)
    d_lse = torch.randn(lse.shape, generator=generator)
    d_x, rest = emulated(softmax._kernel_backward, d_p, d_lse, p, SCALE)
    weights, given = p.double(), d_p.double()
    wanted_rest = d_lse.double() - (weights * given).sum(-1)
    close(d_x, SCALE * weights * (given + wanted_rest.unsqueeze(-1)), dtype)
    close(rest, wanted_rest, torch.float32)
    return p, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 5, 40, 300])
def test_numbers(dtype, columns):
    check(draw((2, 1, 3, columns), dtype)[0])


def test_columns_beyond_the_reach_of_a_block():
    check(draw((1, 1, 1, 5003), torch.bfloat16)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS[1:])
@pytest.mark.parametrize("columns", [13, 64])
def test_masks(dtype, mask, columns):
    """Masks that vary over batch, heads or neither, with causality and sinks."""
    scores, hidden = draw((2, 3, 4, columns), dtype, mask)
    check(scores, hidden)
    check(scores, hidden, causal=True, sinks=torch.tensor([0.3, -1.0, 4.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(dtype):
    """Rows that are not contiguous, begin anywhere, and masks of other alignment than scores."""
    scores, hidden = draw((2, 2, 3, 80), dtype, "one")
    check(scores[..., 3:70], hidden[..., 3:70])
    check(scores[..., 8:72], hidden[..., 1:65])
    check(scores[..., 8:72], hidden[..., 8:72].mT.contiguous().mT)
    check(scores[:, :, ::2], hidden[:, :, ::2], causal=True)
    check(scores.transpose(0, 1), hidden)


def test_rows_that_see_nothing():
    scores, hidden = draw((1, 2, 3, 20), mask="one")
    hidden[0, 0, 1] = True
    p, lse = check(scores, hidden)
    assert p[:, :, 1].eq(0).all()
    assert lse[:, :, 1].eq(float("-inf")).all()
    _, lse = check(scores, hidden, sinks=torch.tensor([0.5, -2.0]))
    assert torch.equal(lse[0, :, 1], torch.tensor([0.5, -2.0]))


def test_what_is_not_a_number_shows():
    scores, _ = draw((1, 1, 3, 20))
    scores[0, 0, 0, 19] = float("nan")
    p, lse = emulated(softmax._kernel, scores, 1.0, None, False, None)
    assert p[0, 0, 0].isnan().all()
    assert lse[0, 0].isnan().tolist() == [True, False, False]
    hidden = scores.isnan()
    p, _ = emulated(softmax._kernel, scores, 1.0, hidden, False, None)
    assert p.isfinite().all()


def test_large_scores():
    scores = torch.tensor([[[[3e4, 3e4, -3e4], [-3e4, -3e4, -3e4]]]])
    p, lse = emulated(softmax._kernel, scores, 1.0, None, False, None)
    expected = torch.tensor([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(p[0, 0], expected)
    torch.testing.assert_close(lse[0, 0], torch.tensor([3e4, -3e4]) + torch.tensor([2, 3]).log())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [7, 64])
def test_blocks(dtype, columns):
    """One block of keys from the logsumexp over more, rows that do not count, and in place."""
    scores, hidden = draw((2, 2, 9, columns), dtype, "heads")
    generator = torch.Generator().manual_seed(4)
    d_p = torch.randn(scores.shape, generator=generator).to(dtype)
    delta = torch.randn(scores.shape[:3], generator=generator)
    for causal in (False, True):
        lse = formula(scores, SCALE, hidden, causal)[1].float() + 0.5
        lse[0, 0, 1] = torch.finfo(lse.dtype).max / 4
        lse[0, 0, 2], hidden[0, 0, 2] = float("-inf"), True
        operands = scores, d_p, lse, delta, SCALE, hidden, causal
        p, d_x = emulated(softmax._block_kernel, *operands)
        logs = torch.where(lse == float("-inf"), 0.0, lse).double().unsqueeze(-1)
        wanted = (masked(scores, SCALE, hidden, causal) - logs).exp()
        close(p, wanted, dtype)
        close(d_x, SCALE * wanted * (d_p.double() - delta.double().unsqueeze(-1)), dtype)
        assert p[0, 0, 1].eq(0).all()

        def overwritten(launch, operands=operands):
            mine = operands[0].clone(), operands[1].clone()
            softmax._block_kernel_(launch, *mine, *operands[2:])
            return mine

        for got, expected in zip(emulated(overwritten), (p, d_x), strict=True):
            assert torch.equal(got, expected)
        mine = scores.clone(), d_p.clone()
        SOFTMAX_BLOCK_BACKWARD_(*mine, *operands[2:])
        close(mine[0], wanted, dtype)


@pytest.mark.parametrize("columns", [7, 64])
def test_in_place(columns):
    scores, hidden = draw((2, 2, 3, columns), torch.bfloat16, "one")
    rest = SCALE, hidden, True, torch.tensor([0.1, 0.2])
    wanted = emulated(softmax._kernel, scores, *rest)

    def overwritten(launch):
        mine = scores.clone()
        return mine, softmax.SOFTMAX_.kernel(launch, mine, *rest)

    for got, expected in zip(emulated(overwritten), wanted, strict=True):
        assert torch.equal(got, expected)
    mine = scores.clone()
    lse = SOFTMAX_(mine, *rest)
    for got, expected in zip((mine, lse), formula(scores, *rest), strict=True):
        close(got, expected, got.dtype)


def test_no_rows():
    scores, _ = draw((0, 2, 3, 8))
    p, lse = emulated(softmax._kernel, scores, SCALE, None, False, None)
    assert (p.shape, lse.shape) == ((0, 2, 3, 8), (0, 2, 3))
    d_x, _ = emulated(softmax._kernel_backward, p, lse, p, SCALE)
    assert d_x.shape == p.shape


def test_bad_operands_are_refused():
    scores, hidden = draw((1, 1, 2, 8), mask="one")
    with pytest.raises(TypeError, match="bool"):
        emulated(softmax._kernel, scores, SCALE, hidden.float(), False, None)
    with pytest.raises(ValueError, match="got sinks of shape"):
        emulated(softmax._kernel, scores, SCALE, None, False, torch.ones(2))
    with pytest.raises(ValueError, match="0 scores"):
        emulated(softmax._kernel, scores[..., :0], SCALE, None, False, None)
    with pytest.raises(TypeError, match=r'ops\.use\("reference"\)'):
        emulated(softmax._kernel, scores.double(), SCALE, None, False, None)
    with pytest.raises(ValueError, match="contiguous"):
        emulated(softmax.SOFTMAX_.kernel, scores.mT, SCALE, None, False, None)
    operands = scores, scores.half(), scores[..., 0], scores[..., 0], SCALE, None, False
    with pytest.raises(TypeError, match="one dtype"):
        emulated(softmax._block_kernel_, *operands)


def double(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


X, HIDDEN = draw((2, 3, 4, 5), torch.float64, "one", seed=5)
SINKS, LSE = double(3, 6), X.logsumexp(-1) + 0.3
D_P, D_LSE = double(X.shape, 7), double(X.shape[:3], 8)


def plain_backward(d_p, d_lse, p, scale):
    rest = d_lse - (p * d_p).sum(-1)
    return scale * p * (d_p + rest.unsqueeze(-1)), rest


def plain_block(scores, d_p, lse, delta, scale, hidden, causal):
    p = (masked(scores, scale, hidden, causal) - lse.unsqueeze(-1)).exp()
    return p, scale * p * (d_p - delta.unsqueeze(-1))


CASES = [
    Case(SOFTMAX, formula, (X, SCALE, HIDDEN, True, SINKS), moving=(0, 4)),
    Case(SOFTMAX_BACKWARD, plain_backward, (D_P, D_LSE, X.sigmoid(), SCALE), moving=(0, 1, 2)),
    Case(
        SOFTMAX_BLOCK_BACKWARD,
        plain_block,
        (X, D_P, LSE, D_LSE, SCALE, HIDDEN, False),
        moving=(0, 1, 2, 3),
    ),
]


@conform(CASES)
def test_conformance(case, check):
    check(case)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_mapped_masks_and_sinks(mask, sinks):
    """Masks and sinks that are mapped, alone or with the scores."""
    rows = [draw((2, 3, 4, 5), torch.float64, mask, seed) for seed in range(3)]
    scores = torch.stack([row[0] for row in rows])
    hidden = None if mask == "none" else torch.stack([row[1] for row in rows])
    logits = double((3, 3), 1) if sinks else None
    for dims in ((0, 0, 0), (None, 0, 0), (0, None, 0), (0, 0, None), (None, 0, None)):
        given = [
            x if x is None or d is not None else x[0]
            for x, d in zip((scores, hidden, logits), dims, strict=True)
        ]
        used = tuple(None if x is None else d for x, d in zip(given, dims, strict=True))
        if used == (None, None, None):
            continue
        got, wanted = (
            torch.func.vmap(lambda x, h, s, f=f: f(x, SCALE, h, False, s), used)(*given)
            for f in (SOFTMAX, formula)
        )
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alone", [True, False])
def test_attention_of_masked_blocks(alone):
    """Documents in chunks, grouped heads, values of another width: op against formula."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 9, width, generator=generator, dtype=torch.float64)
        for heads, width in ((4, 5), (2, 5), (2, 3))
    )
    segments = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    visible = Visible(segments, segments)
    options = {"causal": True, "scale": 0.4}

    def both(kernels):
        out, lse = attention.block(q, k, v, visible, kernels=kernels, **options)
        given = out.cos(), q, k, v, out, lse
        return out, lse, *attention.block_backward(*given, visible, kernels=kernels, **options)

    expected = both(ops.use("reference"))
    if alone:
        with torch.no_grad():
            got = both(KERNEL)
    else:
        got = both(KERNEL)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)

    def total(q, k, v, kernels):
        out, lse = attention.block(q, k, v, visible, kernels=kernels, **options)
        return (out.sin().sum(-1) * lse).sum()

    grads = [torch.func.grad(total, (0, 1, 2))(q, k, v, x) for x in (KERNEL, ops.use())]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


def test_attention_in_half_precision_is_as_near_as_the_formula():
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(1, 2, 33, 8, generator=generator).bfloat16() for _ in range(3)]
    hidden = torch.rand(1, 1, 33, 33, generator=generator) < 0.3
    exact = chunked.attend(*[x.double() for x in wide], hidden, 0.3)
    with torch.no_grad():
        got = chunked.attend(*wide, hidden, 0.3, KERNEL)
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 8e-3
