"""ops.attention against torch's own SDPA and the formula, in all orders of vmap and derivatives."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import functron as ft
from functron.ops import attention as room
from functron.ops.attention import Gpu, attention, implementation
from functron.ops.chunked_attention import CHUNK, Visible, attend, chunked_block

BATCH, SEQ, HEADS, DIM = 2, 5, 3, 4
CAUSAL = pytest.mark.parametrize("causal", [True, False])


def formula(q, k, v, *, causal):
    """softmax(q k^T / sqrt(d) + mask) v with an explicit sum over keys, [batch, seq, heads, dim]."""
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return torch.einsum("...hqk,...khd->...qhd", weights, v)


def qkv(*lead, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, BATCH, SEQ, HEADS, DIM)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]


def energy(function, causal):
    """A scalar that is nonlinear in the output, so that second derivatives see all of it."""
    return lambda q, k, v: function(q, k, v, causal=causal).tanh().square().sum()


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sdpa(causal, dtype):
    q, k, v = (x.requires_grad_() for x in qkv(dtype=dtype))
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
    ).transpose(1, 2)
    expected_grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    with torch.no_grad():
        close(attention(q, k, v, causal=causal), expected, tolerance)
    plain = torch.autograd.grad(attention(q, k, v, causal=causal).square().sum(), (q, k, v))
    close(plain, expected_grads, tolerance)
    func = grad(lambda *x: attention(*x, causal=causal).square().sum(), (0, 1, 2))
    close(func(*(x.detach() for x in (q, k, v))), expected_grads, tolerance)


@CAUSAL
def test_formula(causal):
    operands = qkv()
    close(attention(*operands, causal=causal), formula(*operands, causal=causal))
    out, pullback = vjp(lambda *x: attention(*x, causal=causal), *operands)
    expected, expected_pullback = vjp(lambda *x: formula(*x, causal=causal), *operands)
    cotangent = torch.randn_like(out)
    close(out, expected)
    close(pullback(cotangent), expected_pullback(cotangent))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("seen_by", ["tape", "grad", "vmap"])
def test_a_sequence_in_bands(seen_by, kv_heads, monkeypatch):
    """One long enough that a CPU skips what is hidden, by everything that may look at it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(2, 1, 130, heads, 4) for heads in (2, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    loss = energy(attention, True)
    shared = lambda q, k, v, causal: formula(
        q, *(x.repeat_interleave(2 // kv_heads, -2) for x in (k, v)), causal=causal
    )
    operands = [(q[i], k[i], v[i]) for i in range(2)]
    expected = [grad(energy(shared, True), (0, 1, 2))(*each) for each in operands]
    if seen_by == "vmap":
        found = vmap(grad(loss, (0, 1, 2)))(q, k, v)
        close(found, tuple(map(torch.stack, zip(*expected, strict=True))))
        return
    for each, want in zip(operands, expected, strict=True):
        if seen_by == "tape":
            taped = [x.clone().requires_grad_() for x in each]
            close(torch.autograd.grad(loss(*taped), taped), want)
        else:
            close(grad(loss, (0, 1, 2))(*each), want)


def test_causal_attention_ignores_later_keys():
    q, k, v = qkv()
    before = attention(q, k, v, causal=True)
    k, v = k.clone(), v.clone()
    k[:, -1], v[:, -1] = 100.0, -100.0
    after = attention(q, k, v, causal=True)
    assert torch.equal(after[:, :-1], before[:, :-1])
    assert not torch.allclose(after[:, -1], before[:, -1])


@CAUSAL
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, 1, 3), (0, None, None), (None, 0, 1)])
def test_vmap(causal, in_dims):
    operands = [
        x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(qkv(4), in_dims, strict=True)
    ]
    rows = [
        [x if dim is None else x.select(dim, row) for x, dim in zip(operands, in_dims, strict=True)]
        for row in range(4)
    ]
    out = vmap(lambda *x: attention(*x, causal=causal), in_dims)(*operands)
    close(out, torch.stack([formula(*row, causal=causal) for row in rows]))
    gradients = vmap(grad(energy(attention, causal), (0, 1, 2)), in_dims)(*operands)
    expected = [grad(energy(formula, causal), (0, 1, 2))(*row) for row in rows]
    close(gradients, tuple(torch.stack(column) for column in zip(*expected, strict=True)))


@CAUSAL
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, 0, 0), (0, None, None)])
def test_grad_of_vmap(causal, in_dims):
    operands = [x[0] if dim is None else x for x, dim in zip(qkv(3), in_dims, strict=True)]

    def total(function):
        mapped = vmap(energy(function, causal), in_dims)
        return lambda *x: mapped(*x).square().sum()

    close(grad(total(attention), (0, 1, 2))(*operands), grad(total(formula), (0, 1, 2))(*operands))


@CAUSAL
def test_nested_vmaps(causal):
    q, k, v = qkv(2, 3)
    k, v = k[:, 0], v[0]  # k varies over the outer level only, v over the inner one only

    def two_levels(function):
        return vmap(vmap(function, (0, None, 0)), (0, 0, None))

    expected = torch.stack(
        [
            torch.stack([formula(q[i, j], k[i], v[j], causal=causal) for j in range(3)])
            for i in range(2)
        ]
    )
    close(two_levels(lambda *x: attention(*x, causal=causal))(q, k, v), expected)
    inside = two_levels(grad(energy(attention, causal), (0, 1, 2)))(q, k, v)
    close(inside, two_levels(grad(energy(formula, causal), (0, 1, 2)))(q, k, v))

    def outside(function):
        mapped = two_levels(energy(function, causal))
        return grad(lambda *x: mapped(*x).square().sum(), (0, 1, 2))(q, k, v)

    close(outside(attention), outside(formula))

    def between(function):
        inner = vmap(energy(function, causal), (0, None, 0))
        return vmap(grad(lambda *x: inner(*x).square().sum(), (0, 1, 2)), (0, 0, None))(q, k, v)

    close(between(attention), between(formula))


@CAUSAL
def test_jvp(causal):
    operands, tangents = tuple(qkv()), tuple(qkv(seed=1))
    actual = jvp(lambda *x: attention(*x, causal=causal), operands, tangents)
    close(actual, jvp(lambda *x: formula(*x, causal=causal), operands, tangents))
    one = jvp(
        lambda k: attention(operands[0], k, operands[2], causal=causal),
        operands[1:2],
        tangents[1:2],
    )
    close(
        one,
        jvp(
            lambda k: formula(operands[0], k, operands[2], causal=causal),
            operands[1:2],
            tangents[1:2],
        ),
    )


@CAUSAL
def test_jvp_under_vmap(causal):
    operands, tangents = tuple(qkv(3)), tuple(qkv(3, seed=1))

    def pushed(function):
        return vmap(lambda x, t: jvp(lambda *y: function(*y, causal=causal), x, t))(
            operands, tangents
        )

    close(pushed(attention), pushed(formula))


@CAUSAL
@pytest.mark.parametrize("wrap", ["plain", "vmap"])
def test_hessian_vector_products(causal, wrap):
    lead = () if wrap == "plain" else (2,)
    operands, tangents = tuple(qkv(*lead)), tuple(qkv(*lead, seed=1))

    def reverse_over_reverse(function):
        def product(x, t):
            gradient = grad(energy(function, causal), (0, 1, 2))
            return vjp(gradient, *x)[1](t)

        return product if wrap == "plain" else vmap(product)

    def forward_over_reverse(function):
        def product(x, t):
            return jvp(grad(energy(function, causal), (0, 1, 2)), x, t)[1]

        return product if wrap == "plain" else vmap(product)

    expected = reverse_over_reverse(formula)(operands, tangents)
    close(reverse_over_reverse(attention)(operands, tangents), expected)
    close(forward_over_reverse(attention)(operands, tangents), expected)


def test_full_hessian():
    q, k, v = (x[:1, :3, :1] for x in qkv())
    actual = hessian(lambda k: energy(attention, True)(q, k, v))(k)
    expected = hessian(lambda k: energy(formula, True)(q, k, v))(k)
    close(actual, expected)
    close(jacrev(jacfwd(lambda k: energy(attention, True)(q, k, v)))(k), expected)


def test_forward_over_forward():
    # torch's rule of Functions would give wrong numbers without a word
    q, k, v = qkv()
    scaled = lambda s: energy(attention, True)(q, s * k, v)
    s = torch.tensor(2.0, dtype=q.dtype)
    close(jacfwd(jacfwd(scaled))(s), torch.func.grad(torch.func.grad(scaled))(s))


def test_functron_grad_of_grad():
    q, k, v = qkv()
    t = torch.randn_like(q)

    def product(function, transform):
        inner = transform(lambda q: energy(function, True)(q, k, v))
        return transform(lambda q: (inner(q) * t).sum())(q)

    close(product(attention, ft.grad), product(formula, grad))


def of_a_gpu(dtype=torch.bfloat16, dim=16, value_dim=16, keys=64):
    """Operands that only have shapes, with three heads for each head of keys."""
    sizes = ((6, 64, dim), (2, keys, dim), (2, keys, value_dim))
    return [torch.empty(2, n, h, d, dtype=dtype, device="cuda") for h, n, d in sizes]


HOPPER = Gpu((9, 0), cudnn=91900)
CHOICES = [
    ({}, HOPPER, "cudnn", "fastest on compute capability"),
    ({"dim": 192, "value_dim": 128}, HOPPER, "cudnn", "fastest"),
    ({"dim": 192}, Gpu((10, 0), cudnn=91900), "flash", "cuDNN: it wants heads of 128 dims"),
    ({"keys": 1}, HOPPER, "flash", "several keys"),
    ({}, Gpu((9, 0), cudnn=91500), "flash", "its version is 91500"),
    ({}, Gpu((9, 0)), "flash", "there is none"),
    ({}, Gpu((8, 0), cudnn=91900), "flash", "no faster on compute capability"),
    ({}, Gpu((9, 0), 91900, deterministic=True), "flash", "not deterministic"),
    ({}, Gpu((9, 0), 91900, "FA3"), "flash", "FA3, which the process activated"),
    ({}, None, "flash", "no GPU here"),
    ({}, Gpu((7, 5), 91900), "sdpa", "wants compute capability 8.0"),
    ({"dtype": torch.float32}, HOPPER, "sdpa", "wants float16 or bfloat16, and this is float32"),
    ({"dim": 264}, HOPPER, "sdpa", "256 dims at most, and these have 264"),
]


def test_the_choice_of_an_implementation():
    with FakeTensorMode():
        for shapes, on, name, reason in CHOICES:
            operands = [x.transpose(1, 2) for x in of_a_gpu(**shapes)]
            bare = implementation(*operands, on=on, logsumexp=False)
            assert bare.name == name
            assert reason in bare.reason
            # the same where the logsumexp is wanted, as of a ring, or of simulated ranks
            ringed = implementation(*operands, on=on)
            assert ringed.name == name.replace("sdpa", "formula")
            mapped = []
            vmap(lambda *x: mapped.append(implementation(*x, on=on, logsumexp=False)) or x[0])(  # noqa: B023
                *(x.unsqueeze(0) for x in operands)
            )
            assert mapped == [ringed]


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_kernels_of_a_gpu_are_given_the_shared_heads(monkeypatch, name):
    monkeypatch.setattr(room, "implementation", lambda *_, **__: room.Implementation(name, ""))
    asked = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "attention" in str(op):
                asked.append((op, [x.shape[1] for x in args if getattr(x, "ndim", 0) == 4]))
            return op(*args, **(kwargs or {}))

    with FakeTensorMode(), Asked():
        q, k, v = (x.transpose(1, 2) for x in of_a_gpu())
        out, lse = room.block(q, k, v, causal=True, scale=0.3)
        grads = room.block_backward(out, q, k, v, out, lse, causal=True, scale=0.3)
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
    assert lse.shape == q.shape[:3]
    (forward, heads), (backward, heads_back) = asked
    assert f"_{name}_attention" in str(forward)
    assert f"_{name}_attention_backward" in str(backward)
    assert (heads, heads_back) == ([6, 2, 2], [6, 6, 2, 2, 6] + [6] * (name == "cudnn"))


def test_dynamo_is_given_sdpa(monkeypatch):
    # it cannot look into Functions with a rule for forward mode
    q, k, v = qkv()
    k, v = k[:, :, :1], v[:, :, :1, :2]
    each = attention(q, k, v, causal=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    assert implementation(*heads, logsumexp=False).name == "sdpa"
    assert implementation(*heads).name == "flash"
    close(attention(q, k, v, causal=True), each)


@CAUSAL
def test_bfloat16(causal):
    operands = [x.bfloat16() for x in qkv()]
    expected = formula(*(x.double() for x in operands), causal=causal)
    for out in (
        attention(*operands, causal=causal),
        vmap(lambda *x: attention(*x, causal=causal))(*(x[None] for x in operands))[0],
    ):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_large_scores_do_not_overflow():
    q, k, v = (x * scale for x, scale in zip(qkv(), (1e3, 1e3, 1), strict=True))
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    close(vmap(lambda *x: attention(*x, causal=True))(*(x[None] for x in (q, k, v)))[0], expected)
    assert expected.isfinite().all()


def test_chunks_in_which_nothing_is_visible_are_left_out():
    size = 3 * CHUNK
    q, k, v = (torch.randn(1, 2, size, 4, dtype=torch.float64) for _ in range(3))
    # documents that end with chunks, but for the last, which begins in the second of them
    segments = torch.tensor([0] * CHUNK + [1] * (CHUNK - 8) + [2] * (CHUNK + 8))[None]
    same = segments[:, :, None] == segments[:, None, :]
    mask = same & torch.ones(size, size, dtype=torch.bool).tril()
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    calls = []

    def chunk(*given):
        calls.append(given[0].shape)
        return attend(*given)

    def run(q):
        calls.clear()
        return chunked_block(q, k, v, Visible(segments, segments), True, 0.5, chunk)[0]

    with torch.no_grad():
        torch.testing.assert_close(run(q), want)
    assert len(calls) == 4  # of 6 below the diagonal
    nobody = Visible(segments, segments + 3)
    with torch.no_grad():
        out, lse = chunked_block(q, k, v, nobody, False, 0.5)
    assert not out.any()
    assert (lse == -torch.inf).all()
    # where derivatives are taken of it, ranks must agree which chunks there are
    torch.testing.assert_close(vjp(run, q)[0], want)
    assert len(calls) == 6
