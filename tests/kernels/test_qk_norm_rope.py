"""QK-norm and RoPE: emulated kernels against float64, and the registered ops under all transforms."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron.ops.qk_norm_rope import (
    QK_NORM_ROPE,
    QK_NORM_ROPE_,
    QK_NORM_ROPE_BACKWARD,
    QKV_NORM_ROPE,
    QKV_NORM_ROPE_BACKWARD,
    qkv_norm_rope,
)
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import Emulator, emulated, missing
from tests.kernels.norms import FEWER, Draw, conform_uncompiled, near, shifted

EPS = 1e-3
kernels = pytest.mark.skipif(missing() is not None, reason=str(missing()))
SHAPES = {  # batch, seq, heads of q and of k, head_dim, pairs
    "small": (2, 3, 4, 2, 16, 8),
    "grouped": (1, 7, 9, 3, 128, 64),
    "partial": (2, 2, 3, 1, 64, 16),
    "odd": (1, 3, 2, 2, 13, 5),
    "long": (1, 2, 1, 1, 256, 128),
    "other tail": (1, 5, 5, 5, 24, 8),
    "norm alone": (2, 2, 3, 2, 40, 0),
}
ROUNDS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def rotate(x, cosine, sine, interleaved):
    """By complex numbers."""
    pairs = cosine.shape[-1]
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    split = (
        (turning[..., 0::2], turning[..., 1::2])
        if interleaved
        else (turning[..., :pairs], turning[..., pairs:])
    )
    z = torch.complex(*split) * torch.complex(cosine, sine).unsqueeze(-2)
    parts = (z.real, z.imag)
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([joined, rest], -1)


def one(x, scale, cosine, sine, eps, center, interleaved):
    if scale is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (scale + float(center))
    return rotate(x, cosine, sine, interleaved)


def formula(q, k, q_scale, k_scale, *rest):
    return one(q, q_scale, *rest), one(k, k_scale, *rest)


def exact(args):
    return [x.double() if isinstance(x, torch.Tensor) else x for x in args]


def gradients(args, d_q, d_k):
    """Of q, k and those scales that there are."""
    args = exact(args)
    moving = [x.requires_grad_() for x in args[:4] if x is not None]
    results = formula(*args)
    return torch.autograd.grad(results, moving, (d_q.double(), d_k.double()))


def operands(shape, dtype, *, normed=True, packed=False, batched=False, wide=False, seed=0):
    batch, seq, q_heads, k_heads, dim, pairs = shape
    draw = Draw(seed)
    if packed:  # as one projection makes them, values last
        both = draw(batch, seq, q_heads + 2 * k_heads, dim, dtype=dtype)
        q, k, _ = both.split([q_heads, k_heads, k_heads], -2)
    else:
        q = draw(batch, seq, q_heads, dim, dtype=dtype)
        k = draw(batch, k_heads, seq, dim, dtype=dtype).transpose(1, 2)
    kind = torch.float32 if wide else dtype
    scales = [draw(dim, dtype=kind) if normed else None for _ in range(2)]
    angles = draw(*[batch] * batched, seq, pairs)
    return q, k, *scales, angles.cos().to(kind), angles.sin().to(kind)


def cotangents(q, k):
    """One whose heads come before its sequence, as attention makes it."""
    draw = Draw(9)
    batch, seq, heads, dim = q.shape
    d_q = draw(batch, heads, seq, dim, dtype=q.dtype).transpose(1, 2)
    return d_q, draw(*k.shape, dtype=k.dtype)


def compare(args, dtype):
    q, k, q_scale, k_scale, *_ = args
    out = emulated(QK_NORM_ROPE.kernel, *args)
    for got, wanted in zip(out, formula(*exact(args)), strict=True):
        near(got, wanted, dtype)
    given = cotangents(q, k)
    saved = (None if q_scale is None else q, None if k_scale is None else k)
    grads = emulated(QK_NORM_ROPE_BACKWARD.kernel, *given, *saved, *args[2:])
    wanted = gradients(args, *given)
    kinds = [dtype, dtype, *[x.dtype for x in (q_scale, k_scale) if x is not None]]
    for got, expected, kind in zip(
        [g for g in grads if g.dim() == 4 or g.numel()], wanted, kinds, strict=True
    ):
        near(got, expected, kind)


@kernels
@pytest.mark.parametrize("dtype", FEWER, ids=str)
@pytest.mark.parametrize("shape", list(SHAPES))
@ROUNDS
def test_against_float64(shape, dtype, interleaved):
    args = operands(SHAPES[shape], dtype, wide=interleaved)
    compare((*args, EPS, interleaved, interleaved), dtype)


@kernels
@pytest.mark.parametrize("shape", ["small", "partial", "odd"])
@ROUNDS
def test_views_of_one_projection_without_norm_and_with_positions_by_sample(shape, interleaved):
    args = operands(SHAPES[shape], torch.bfloat16, normed=False, packed=True, batched=True)
    compare((*args, EPS, False, interleaved), torch.bfloat16)


@kernels
def test_one_norm_of_two_and_no_keys():
    q, k, q_scale, k_scale, *tables = operands(SHAPES["small"], torch.float32)
    compare((q, k, None, k_scale, *tables, EPS, False, False), torch.float32)
    none = k[:, :, :0]
    out = emulated(QK_NORM_ROPE.kernel, q, none, q_scale, None, *tables, EPS, False, False)
    near(out[0], one(*exact((q, q_scale, *tables, EPS, False, False))), torch.float32)
    assert out[1].shape == none.shape


def joined(q, k, v):
    """By key head: its queries, itself, its value."""
    return torch.cat([q.unflatten(2, (k.shape[2], -1)), k.unsqueeze(3), v.unsqueeze(3)], 3)


@kernels
@pytest.mark.parametrize("dtype", FEWER, ids=str)
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "norm alone"])
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
def test_one_projection_by_key_head(shape, dtype, normed):
    """The bits of the kernels of tensors apart; values are copied, and gaps are left alone."""
    args = operands(SHAPES[shape], dtype, normed=normed, wide=normed, batched=shape == "small")
    q, k, *scales = args[:4]
    v, rest = Draw(7)(*k.shape, dtype=dtype), (*args[2:], EPS, normed, shape == "grouped")
    want = emulated(QK_NORM_ROPE.kernel, q, k, *rest, seeds=(0,))
    both = joined(q, k, v)
    for values in (False, True):
        out = emulated(QKV_NORM_ROPE.kernel, both, *rest, values, seeds=(0, 1))
        assert all(map(torch.equal, out, (*want, v if values else v.new_empty(0))))
    spread = torch.stack([both, both], 2)[:, :, 1]  # rows with gaps
    out = emulated(QKV_NORM_ROPE.kernel, spread, *rest, True, seeds=(0,))
    assert all(map(torch.equal, out, (*want, v)))

    given, saved = cotangents(q, k), (q, k) if normed else (None, None)
    d_q, d_k, *d_scales = emulated(QK_NORM_ROPE_BACKWARD.kernel, *given, *saved, *rest, seeds=(0,))
    d_v = Draw(8)(*k.transpose(1, 2).shape, dtype=dtype).transpose(1, 2)
    got = emulated(
        QKV_NORM_ROPE_BACKWARD.kernel, *given, d_v, both if normed else None, *rest, seeds=(0, 1)
    )
    assert torch.equal(got[0], joined(d_q, d_k, d_v))
    for a, b, scale in zip(got[1:], d_scales, scales, strict=True):  # threads may have other heads
        assert a.shape == b.shape
        assert scale is None or (a - b).norm() <= 4 * torch.finfo(a.dtype).eps * b.norm()


@kernels
@ROUNDS
def test_in_place_is_out_of_place(interleaved):
    for packed in (True, False):
        args = operands(SHAPES["small"], torch.bfloat16, packed=packed)
        rest = (*args[2:], EPS, False, interleaved)
        wanted = emulated(QK_NORM_ROPE.kernel, *args[:2], *rest)
        for seed in (0, 1):
            memory = args[0]._base.clone() if packed else None
            q, k, v = (
                memory.split([4, 2, 2], -2) if packed else (args[0].clone(), args[1].clone(), None)
            )
            values = v.clone() if packed else None
            QK_NORM_ROPE_.kernel(Emulator(seed), q, k, *rest)
            assert torch.equal(q, wanted[0])
            assert torch.equal(k, wanted[1])
            assert values is None or torch.equal(v, values)


@kernels
def test_unaligned_memory_and_gaps_inside_heads():
    args = operands(SHAPES["grouped"], torch.bfloat16)
    rest = (*args[2:], EPS, False, False)
    wanted = emulated(QK_NORM_ROPE.kernel, *args[:2], *rest, seeds=(0,))
    spread = lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2]
    for lay in (lambda x: shifted(x.contiguous()), spread):
        got = emulated(QK_NORM_ROPE.kernel, *map(lay, args[:2]), *rest)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-9)


@kernels
@pytest.mark.parametrize("shape", [(0, 3, 2, 1, 8, 4), (2, 0, 2, 1, 8, 4), (1, 1, 1, 1, 520, 260)])
def test_nothing_to_do_and_heads_that_are_too_long(shape):
    """The latter are torch's."""
    args = (*operands(shape, torch.float32), EPS, False, False)
    compare(args, torch.float32)


def test_what_is_refused():
    q, k, q_scale, k_scale, cosine, sine = operands(SHAPES["small"], torch.float32)
    rest = EPS, False, False
    with pytest.raises(ValueError, match="wanted"):
        QK_NORM_ROPE(q, k[..., :8], None, None, cosine, sine, *rest)
    with pytest.raises(ValueError, match="tables"):
        QK_NORM_ROPE(q, k, None, None, cosine[1:], sine[1:], *rest)
    wide = [x.double() for x in (q, k)]
    with pytest.raises(TypeError, match=r"float64.*fix"):
        QK_NORM_ROPE.kernel(Emulator(), *wide, None, None, cosine, sine, *rest)
    with pytest.raises(ValueError, match=r"wanted \[batch, seq, kv_heads"):
        QKV_NORM_ROPE(q[..., :2, :], None, None, cosine, sine, *rest, True)
    with pytest.raises(ValueError, match="tape"):
        QK_NORM_ROPE_(q.requires_grad_(), k, q_scale, k_scale, cosine, sine, *rest)


def test_in_place_on_the_cpu():
    args = (*operands(SHAPES["partial"], torch.float32), EPS, True, False)
    wanted = QK_NORM_ROPE(*args)
    QK_NORM_ROPE_(*args)
    assert all(torch.equal(a, b) for a, b in zip(args[:2], wanted, strict=True))


def _cases() -> list[Case]:
    normed = exact(operands((2, 3, 2, 1, 8, 2), torch.float32, batched=True))
    return [Case(QK_NORM_ROPE, formula, (*normed, EPS, True, False), (0, 1, 2, 3))]


def _other_cases() -> list[Case]:
    plain = exact(operands((2, 3, 2, 1, 8, 4), torch.float32, normed=False))
    normed = exact(operands((2, 3, 2, 1, 8, 2), torch.float32))

    def backward(d_q, d_k, q, k, q_scale, k_scale, *rest):
        if q_scale is None:
            q, k = d_q, d_k  # any: it is linear
            _, pull = torch.func.vjp(lambda q, k: formula(q, k, None, None, *rest), q, k)
            return pull((d_q, d_k))
        return torch.func.vjp(lambda *some: formula(*some, *rest), q, k, q_scale, k_scale)[1](
            (d_q, d_k)
        )

    def apart(qkv):
        return qkv[..., :-2, :].flatten(-3, -2), qkv[..., -2, :], qkv[..., -1, :]

    def of_joined(qkv, *rest):
        q, k, v = apart(qkv)
        return *formula(q, k, *rest[:-1]), v

    def back_joined(d_q, d_k, d_v, qkv, q_scale, k_scale, *rest):
        moving = (qkv, q_scale, k_scale)
        return torch.func.vjp(lambda *some: of_joined(*some, *rest, True), *moving)[1](
            (d_q, d_k, d_v)
        )

    given = [x.contiguous().double() for x in cotangents(*plain[:2])]
    rest, back = (EPS, True, False), QK_NORM_ROPE_BACKWARD
    groups = joined(*normed[:2], given[1])
    joint = (*given, groups[..., -1, :].cos(), groups, *normed[2:])
    return [
        Case(QKV_NORM_ROPE, of_joined, (groups, *normed[2:], *rest, True), (0, 1, 2)),
        Case(QKV_NORM_ROPE_BACKWARD, back_joined, (*joint, *rest), (0, 1, 2, 3, 4, 5)),
        Case(QK_NORM_ROPE, formula, (*plain, EPS, False, True), (0, 1)),
        Case(back, backward, (*given, *normed, *rest), (0, 1, 2, 3, 4, 5)),
        Case(back, backward, (*given, None, None, *plain[2:], *rest), (0, 1), (0, 1)),
    ]


@conform(_cases())
def test_conformance(case, check):
    check(case)


@conform_uncompiled(_other_cases())
def test_conformance_of_others(case, check):
    check(case)


def test_mapped_tables():
    """A simulated rank of a split sequence has positions of its own, for all of its samples."""
    q, k, q_scale, k_scale, cosine, sine = exact(operands((2, 3, 2, 1, 8, 4), torch.float32))
    tables = torch.stack([cosine, cosine.roll(1, 0)]), torch.stack([sine, sine.roll(1, 0)])

    def total(function):
        def of_rank(q, k, q_scale, cosine, sine):
            out = function(q, k, q_scale, k_scale, cosine, sine, EPS, False, False)
            return sum(x.square().mul(x.exp()).sum() for x in out)

        mapped = torch.func.vmap(of_rank, (None, None, None, 0, 0))
        return lambda q, k, q_scale: mapped(q, k, q_scale, *tables).square().sum()

    for scale in (q_scale, None):
        argnums = (0, 1) if scale is None else (0, 1, 2)
        got, wanted = (
            torch.func.grad(total(f), argnums)(q, k, scale) for f in (QK_NORM_ROPE, formula)
        )
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normed", [False, True])
def test_one_projection_keeps_no_more_than_several(normed):
    """Its gradients are those of tensors apart; without scales it is not kept, but values are."""
    q, k, *args = exact(operands((2, 3, 4, 2, 8, 4), torch.float32, normed=normed))
    v = Draw(7)(*k.shape).double()
    scales, tables, rest = args[:2], args[2:], (EPS, False, False)

    def total(split):
        def of(qkv, *scales):
            return sum((i * x).sin().sum() for i, x in enumerate(split(qkv, *scales), 1))

        return of

    def several(qkv, *scales):
        q, k, v = qkv[..., :-2, :].flatten(-3, -2), qkv[..., -2, :], qkv[..., -1, :]
        return *formula(q, k, *(scales or (None, None)), *tables, *rest), v

    def ours(qkv, *scales):
        return qkv_norm_rope(qkv, *(scales or (None, None)), *tables, *rest)

    moving = joined(q, k, v), *[x for x in scales if x is not None]
    wanted = torch.func.grad(total(several), tuple(range(len(moving))))(*moving)
    for grad in (ft.grad, torch.func.grad):
        got = grad(total(ours), tuple(range(len(moving))))(*moving)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)

    qkv, kept = moving[0].clone().requires_grad_(), {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        q, k, v = ours(qkv, *moving[1:])
    assert (qkv.untyped_storage().data_ptr() in kept) == normed
    assert (v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()) == normed
