"""Blocks of attention with their logsumexps, against sums over every pair of query and key."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

from functron.ops import attention
from functron.ops import chunked_attention as chunked
from functron.ops.attention import Implementation, block, block_backward
from functron.ops.chunked_attention import Visible
from functron.ops.softmax import merge

BATCH, SEQ, KEYS, DIM = 2, 7, 5, 4
SCALE = 0.3
FORMULA = Implementation("formula", "")
HEADS = pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=["mha", "gqa", "mqa"])


@pytest.fixture(autouse=True, params=["kernel", "formula"])
def route(monkeypatch, request):
    """By torch's kernels and without, in chunks that end inside of the blocks."""
    monkeypatch.setattr(chunked, "CHUNK", 3)
    if request.param == "formula":
        monkeypatch.setattr(attention, "implementation", lambda *_, **__: FORMULA)


def operands(heads=(4, 2), keys=KEYS, value_dim=DIM, lead=(), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads[0], SEQ, DIM), (heads[1], keys, DIM), (heads[1], keys, value_dim)]
    return tuple(
        torch.randn(*lead, BATCH, *shape, generator=generator, dtype=dtype) for shape in shapes
    )


def mask_of(visible: Visible | None, causal: bool, keys: int) -> torch.Tensor:
    """``[batch or 1, seq, keys]``, by a loop over pairs."""
    rows = []
    size = 1
    if visible is not None:
        known = [visible.query_segments, visible.query_positions]
        size = next(x.shape[0] for x in known if x is not None)
    for b in range(size):
        for t in range(SEQ):
            for s in range(keys):
                seen = not causal or s <= t
                if visible is not None and visible.query_segments is not None:
                    seen &= bool(visible.query_segments[b, t] == visible.key_segments[b, s])
                if visible is not None and visible.query_positions is not None:
                    distance = visible.query_positions[0, t] - visible.key_positions[0, s]
                    seen &= bool(distance < visible.window or visible.window == 0)
                rows.append(seen)
    return torch.tensor(rows).view(size, SEQ, keys)


def formula(visible=None, causal=False, scale=SCALE):
    def dense(q, k, v):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = torch.einsum("...td,...sd->...ts", q, k) * scale
        mask = mask_of(visible, causal, k.shape[-2])[:, None]
        weights = torch.where(mask, scores.exp(), 0)
        total = weights.sum(-1)
        positive = torch.where(total == 0, 1, total)
        lse = torch.where(total == 0, -math.inf, positive.log())
        return (weights / positive[..., None]) @ v, lse

    return dense


def ours(visible=None, causal=False, scale=SCALE):
    return lambda q, k, v: block(q, k, v, visible, causal=causal, scale=scale)


SEGMENTS = {
    "query_segments": torch.tensor([[0, 0, 1, 1, 1, 2, 9], [5, 5, 5, 5, 6, 6, 6]]),
    "key_segments": torch.tensor([[0, 1, 1, 2, 3], [5, 5, 6, 6, 7]]),
}
PLACES = {
    "query_positions": torch.arange(7)[None] + 4,
    "key_positions": torch.arange(5)[None],
}
MASKS = {
    "none": None,
    "segments": Visible(**SEGMENTS),
    "window": Visible(**PLACES, window=3),
    "window tensor": Visible(**PLACES, window=torch.tensor(3)),
    "no window": Visible(**PLACES, window=torch.tensor(0)),
    "both": Visible(**SEGMENTS, **PLACES, window=6),
}
MASK = pytest.mark.parametrize("mask", list(MASKS))


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@HEADS
@MASK
@pytest.mark.parametrize("value_dim", [4, 2, 6])
def test_block(heads, mask, value_dim):
    visible, x = MASKS[mask], operands(heads, value_dim=value_dim)
    close(ours(visible)(*x), formula(visible)(*x))


@HEADS
@pytest.mark.parametrize("mask", ["none", "both"])
def test_causal_blocks(heads, mask):
    x = operands(heads, SEQ)
    visible = MASKS[mask] and Visible(
        SEGMENTS["query_segments"], SEGMENTS["query_segments"],
        PLACES["query_positions"], PLACES["query_positions"], 3,
    )  # fmt: skip
    close(ours(visible, True)(*x), formula(visible, True)(*x))
    energy = lambda f: lambda *x: f(*x)[0].tanh().square().sum()
    close(
        grad(energy(ours(visible, True)), (0, 1, 2))(*x),
        grad(energy(formula(visible, True)), (0, 1, 2))(*x),
    )


def two_blocks(f):
    """The attention over two blocks of keys, as a function of all of them."""

    def whole(q, k, v):
        first = f(q, k[..., :3, :], v[..., :3, :])
        return merge(*first, *f(q, k[..., 3:, :], v[..., 3:, :]))

    return whole


@HEADS
def test_merge(heads):
    x = operands(heads)
    close(two_blocks(ours())(*x), formula()(*x))
    t = tuple(y.cos() for y in x)
    energy = lambda f: lambda *x: sum(y.sin().square().sum() for y in f(*x))
    dense, joined = energy(formula()), energy(two_blocks(ours()))
    close(grad(joined, (0, 1, 2))(*x), grad(dense, (0, 1, 2))(*x))
    second = lambda e: vjp(grad(e, (0, 1, 2)), *x)[1](t)
    close(second(joined), second(dense))
    close(jvp(joined, x, t), jvp(dense, x, t))


@HEADS
@MASK
@pytest.mark.parametrize("value_dim", [4, 2, 6])
def test_backward_of_each_block_from_the_whole(heads, mask, value_dim):
    """dq sums up over blocks; dk and dv of each are their own."""
    q, k, v = operands(heads, value_dim=value_dim)
    visible = MASKS[mask]
    (out, lse), pullback = vjp(formula(visible), q, k, v)
    cotangent = torch.randn_like(out)
    expected = pullback((cotangent, torch.zeros_like(lse)))
    expected = [torch.nan_to_num(x, nan=7e7) for x in expected]
    total = torch.zeros_like(q)
    for keys in (slice(0, 2), slice(2, 5)):
        there = None
        if visible is not None:
            there = Visible(
                visible.query_segments,
                None if visible.key_segments is None else visible.key_segments[:, keys],
                visible.query_positions,
                None if visible.key_positions is None else visible.key_positions[:, keys],
                visible.window,
            )
        dq, dk, dv = block_backward(
            cotangent, q, k[:, :, keys], v[:, :, keys], out, lse, there, causal=False, scale=SCALE
        )
        total = total + dq
        close(dk, expected[1][:, :, keys])
        close(dv, expected[2][:, :, keys])
    close(total, expected[0])


def test_rows_that_see_nothing():
    q, k, v = operands()
    visible = MASKS["segments"]
    out, lse = block(q, k, v, visible, causal=False, scale=SCALE)
    blind = torch.tensor([[False] * 6 + [True], [False] * 7])
    assert torch.equal(lse == -math.inf, blind[:, None].expand(lse.shape))
    assert torch.equal(out[0, :, 6], torch.zeros_like(out[0, :, 6]))
    dq, dk, dv = block_backward(out, q, k, v, out, lse, visible, causal=False, scale=SCALE)
    assert torch.equal(dq[0, :, 6], torch.zeros_like(dq[0, :, 6]))
    assert all(x.isfinite().all() for x in (dq, dk, dv))

    def energy(q, k, v):
        out, lse = block(q, k, v, visible, causal=False, scale=SCALE)
        out, _ = merge(out, lse, 2 * out, lse)
        return out.square().sum()

    gradient = grad(energy, (0, 1, 2))
    assert all(x.isfinite().all() for x in gradient(q, k, v))
    second = vjp(gradient, q, k, v)[1]((q, k, v))
    assert all(x.isfinite().all() for x in second)
    nothing = (torch.zeros(1, 2), torch.full((1,), -math.inf))
    out, lse = merge(*nothing, *nothing)
    assert out.tolist() == [[0, 0]]
    assert lse == -math.inf


@pytest.mark.parametrize("chunk", [3, 100])  # the results of many chunks are merged, one is not
def test_gradients_where_a_row_sees_nothing(monkeypatch, chunk):
    monkeypatch.setattr(chunked, "CHUNK", chunk)
    visible = MASKS["segments"]

    def energy(attend):
        return lambda q, k, v: attend(q, k, v)[0].square().sum()

    found, wanted = (
        grad(energy(attend), (0, 1, 2))(*operands()) for attend in (ours(visible), formula(visible))
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@HEADS
def test_rows_that_should_not_count(heads):
    """A huge logsumexp switches a row off, whatever the scores."""
    q, k, v = operands(heads)
    out, lse = block(q, k, v, causal=False, scale=SCALE)
    huge = torch.full_like(lse, torch.finfo(lse.dtype).max / 4)
    for visible in (None, MASKS["no window"]):
        grads = block_backward(out, q, 1e3 * k, v, out, huge, visible, causal=False, scale=SCALE)
        assert all(torch.equal(x, torch.zeros_like(x)) for x in grads)


@HEADS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, 1, 3), (0, None, None), (None, 0, 1)])
def test_vmap(heads, causal, in_dims):
    x = [
        y[0] if dim is None else y.movedim(0, dim)
        for y, dim in zip(operands(heads, SEQ, lead=(3,)), in_dims, strict=True)
    ]
    energy = lambda f: lambda *x: f(*x)[0].tanh().square().sum()
    for f in (lambda e: e, lambda e: lambda *x: grad(energy(e), (0, 1, 2))(*x)):
        close(
            vmap(f(ours(None, causal)), in_dims)(*x),
            vmap(f(formula(None, causal)), in_dims)(*x),
        )
    product = lambda e: lambda *x: vjp(grad(energy(e), (0, 1, 2)), *x)[1](tuple(y.cos() for y in x))
    close(
        vmap(product(ours(None, causal)), in_dims)(*x),
        vmap(product(formula(None, causal)), in_dims)(*x),
    )
    outside = lambda e: grad(lambda *x: vmap(energy(e), in_dims)(*x).square().sum(), (0, 1, 2))(*x)
    close(outside(ours(None, causal)), outside(formula(None, causal)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["none", "both"])
def test_half_precision(dtype, mask):
    x = operands(dtype=dtype)
    expected = formula(MASKS[mask])(*(y.double() for y in x))
    out, lse = ours(MASKS[mask])(*x)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected[1], rtol=2e-2, atol=2e-2)
    grads = block_backward(out, *x, out, lse, MASKS[mask], causal=False, scale=SCALE)
    assert [g.dtype for g in grads] == [dtype] * 3


def test_large_scores_do_not_overflow():
    q, k, v = operands()
    out, lse = block(1e3 * q, 1e3 * k, v, MASKS["no window"], causal=False, scale=SCALE)
    expected = block(1e3 * q, 1e3 * k, v, causal=False, scale=SCALE)
    close((out, lse), expected)
    assert out.isfinite().all()


@pytest.mark.gpu
@HEADS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_cuda_kernels(monkeypatch, heads, causal, name):
    monkeypatch.setattr(attention, "implementation", lambda *_, **__: Implementation(name, ""))
    x = operands(heads, SEQ, value_dim=6, dtype=torch.bfloat16)
    there = [y.cuda() for y in x]
    out, lse = ours(None, causal)(*there)
    expected = formula(None, causal)(*(y.double() for y in x))
    close((out.double().cpu(), lse.double().cpu()), expected, 2e-2)
    grads = block_backward(out, *there, out, lse, causal=causal, scale=SCALE)
    _, pullback = vjp(formula(None, causal), *(y.double() for y in x))
    wanted = pullback((expected[0], torch.zeros_like(expected[1])))
    close([g.double().cpu() for g in grads], list(wanted), 5e-2)
