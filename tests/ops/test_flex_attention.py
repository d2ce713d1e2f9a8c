"""Masked attention as one op: its kernel's graph, run on the CPU, and its reference, to the formula."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vjp

import functron as ft
from functron import Mesh, P, nn
from functron.compiler import inductor
from functron.ops import attention, chunked_attention, flex_attention, use
from functron.ops.attention import Gpu, block, implementation
from functron.ops.chunked_attention import Visible, attend
from functron.program.equations import Var
from functron.program.trace import trace
from functron.transforms import policies

OP = use(attention="kernel")
BATCH, SEQ, KEYS, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 300, 200, 4, 2, 16, 24


def operands(dtype=torch.float64, seq=SEQ, keys=KEYS):
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, seq, DIM), (KV_HEADS, keys, DIM), (KV_HEADS, keys, VALUE_DIM)]
    return [torch.randn(BATCH, *shape, generator=generator, dtype=dtype) for shape in shapes]


def masks(seq=SEQ, keys=KEYS):
    """Documents, a window, and both; the second sample's last queries see nothing."""
    places = [torch.arange(n)[None] for n in (seq, keys)]
    segments = [torch.stack([x[0] // 70, x[0] // 40 + (x[0] >= 190) * 9]) for x in places]
    return {
        "documents": Visible(*segments),
        "window": Visible(None, None, *places, 90),
        "both": Visible(*segments, *places, torch.tensor(33)),
        "none": None,
    }


def dense(q, k, v, visible, causal, scale, cap):
    """The formula over whole matrices of scores."""
    seq, keys = q.shape[2], k.shape[2]
    seen = torch.ones(1, seq, keys, dtype=torch.bool)
    if visible is not None and visible.chunk(slice(0, seq), slice(0, keys)) is not None:
        seen = visible.chunk(slice(0, seq), slice(0, keys))
    if causal:
        seen = seen & torch.ones(seq, keys, dtype=torch.bool).tril()
    return attend(q, k, v, ~seen.unsqueeze(1), scale, cap=cap)


CASES = pytest.mark.parametrize(
    ("mask", "causal", "cap"),
    [("both", True, 0.0), ("documents", False, 5.0), ("window", True, 5.0), ("none", True, 5.0)],
)


@CASES
@pytest.mark.parametrize("by", ["kernel", "reference"])
def test_the_op_and_its_backward(monkeypatch, mask, causal, cap, by):
    # what Inductor would compile for a GPU, as operations of the CPU
    eager = lambda *key: lambda values: flex_attention.graph(*key)(*values)
    monkeypatch.setattr(flex_attention, "_program", eager)
    monkeypatch.setattr(chunked_attention, "CHUNK", 150)
    q, k, v = operands()
    visible = masks()[mask]
    rest = (*flex_attention.tests_of(q, k, visible), causal, 0.3, cap)
    forward, backward = {
        "kernel": (
            functools.partial(flex_attention._masked_kernel, None),
            functools.partial(flex_attention._masked_backward_kernel, None),
        ),
        "reference": (flex_attention._attend_in_chunks, flex_attention._masked_backward),
    }[by]
    formula = functools.partial(dense, visible=visible, causal=causal, scale=0.3, cap=cap)
    (out, lse), pullback = vjp(formula, q, k, v)
    close(forward(q, k, v, *rest), (out, lse))
    cotangents = torch.randn_like(out), torch.where(lse.isfinite(), torch.randn_like(lse), 0)
    found = backward(cotangents[0], q, k, v, out, lse, cotangents[1], *rest)
    close(found, [torch.nan_to_num(x, nan=7e7) for x in pullback(cotangents)])
    without = backward(cotangents[0], q, k, v, out, lse, None, *rest)
    close(without, pullback((cotangents[0], torch.zeros_like(lse))))


def close(found, wanted, tolerance=1e-10):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mask", ["documents", "window", "both", "none"])
def test_no_chunk_is_left_out_that_has_something_to_see(mask):
    q, k, _ = operands(seq=700, keys=700)
    visible = masks(700, 700)[mask]
    tests = flex_attention.tests_of(q, k, visible)
    static = flex_attention.FlexSettings(True, 1.0, 0.0, tests[0] is not None, tests[2] is not None)
    given = [x for x in tests if x is not None]
    needed = flex_attention.chunks(BATCH, 700, 700, given, static, q.device)
    lse = dense(q, k, k, visible, True, 1.0, 0.0)[1]
    assert lse.isfinite().all()
    whole = slice(0, 700)
    seen = torch.ones(BATCH, 700, 700, dtype=torch.bool).tril()
    if visible is not None:
        seen = seen & visible.chunk(whole, whole)
    size = -(-700 // flex_attention.SIZE)
    padded = torch.nn.functional.pad(seen, (0, size * 128 - 700) * 2)
    any_seen = padded.unflatten(2, (size, 128)).unflatten(1, (size, 128)).any(4).any(2)
    assert torch.equal(needed | any_seen, needed)
    # numbers that grow along the sequence are judged exactly
    assert torch.equal(needed, any_seen) or mask == "both"
    assert mask == "none" or needed.sum() < torch.ones(BATCH, size, size).tril().sum()


def test_gradients_of_every_order_under_maps_and_recomputation():
    q, k, v = operands(seq=7, keys=5)
    visible = masks(7, 5)["both"]
    visible = replace(visible, window=torch.tensor(3))

    def energy(kernels):
        def f(q, k, v):
            out, lse = block(q, k, v, visible, causal=True, scale=0.3, cap=3.0, kernels=kernels)
            return out.sin().square().sum() + lse.cos().sum()

        return f

    ours, formula = energy(OP), energy(use("reference"))
    first = lambda f: grad(f, (0, 1, 2))
    second = lambda f: first(lambda *x: sum(y.sin().sum() for y in first(f)(*x)))
    mapped = lambda f: (
        lambda *x: torch.vmap(first(f), (0, None, 1))(
            torch.stack([x[0], -x[0]]), x[1], torch.stack([x[2], x[2] + 1], 1)
        )
    )
    for derivative in (first, second, mapped):
        close(derivative(ours)(q, k, v), derivative(formula)(q, k, v))
    remat = ft.remat(ours, policy=policies.dots)
    program = trace(ft.grad(lambda q: remat(q, k, v)))(q)
    names = [x for x in str(program).split() if x.startswith("masked_attention")]
    assert [x.split("(")[0] for x in names] == ["masked_attention", "masked_attention_backward"]
    pairs = BATCH * HEADS * 7 * 5 // 2
    assert program.cost().hardware_flops >= pairs * 2 * (3 * (DIM + VALUE_DIM) + DIM)


def test_rings_of_simulated_ranks():
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    x = [torch.randn(BATCH, 16, *shape, dtype=torch.float64) for shape in shapes]
    segments = torch.arange(16).expand(BATCH, -1) // 7
    sinks = torch.randn(HEADS, dtype=torch.float64)

    def gradients(mesh, kernels):
        def loss(values, sinks, segments):
            y = nn.context_attention(
                *values, segments=segments, window=5, sinks=sinks, cap=3.0, kernels=kernels
            )
            return ft.lax.psum(y.sin().sum(), "cp")

        def program(values, sinks, segments):
            moved = ft.grad(loss, argnums=(0, 1))(values, sinks, segments)
            return moved[0], ft.lax.psum(moved[1], "cp")

        cut = P(None, "cp")
        return ft.shard_map(program, mesh, ((cut,) * 3, P(), cut), ((cut,) * 3, P()))(
            tuple(x), sinks, segments
        )

    wanted, found = gradients(Mesh(), use("reference")), gradients(Mesh(cp=2), OP)
    close((*found[0], found[1]), (*wanted[0], wanted[1]))


HOPPER = Gpu((9, 0), cudnn=91900)


@pytest.mark.parametrize(
    ("facts", "kernels", "dtype", "dim", "seq", "name", "reason"),
    [
        (HOPPER, use(), torch.bfloat16, 128, 1024, "flex", "one kernel"),
        (None, use(), torch.bfloat16, 128, 1024, "flex", "one kernel"),
        (HOPPER, use(), torch.float32, 128, 1024, "formula", "no tensor cores in float32"),
        (HOPPER, use(), torch.bfloat16, 8, 1024, "formula", "heads of 16 to 256 dims"),
        (HOPPER, use(), torch.bfloat16, 128, 512, "formula", "are one chunk"),
        (HOPPER, use("reference"), torch.bfloat16, 128, 1024, "formula", "asked for"),
        (HOPPER, use(softmax="kernel"), torch.bfloat16, 128, 1024, "formula", "softmax kernel"),
        (replace(HOPPER, triton=False), use(), torch.bfloat16, 128, 1024, "formula", "Triton"),
    ],
)
@pytest.mark.parametrize("masked", [True, False])
def test_the_choice_for_masks_and_caps(facts, kernels, dtype, dim, seq, name, reason, masked):
    with FakeTensorMode():
        q = torch.empty(1, 2, seq, dim, dtype=dtype, device="cuda")
        chosen = implementation(
            q, q, q, Visible() if masked else None, cap=0.0 if masked else 3.0,
            kernels=kernels, on=facts,
        )  # fmt: skip
    assert chosen.name == name
    assert reason in chosen.reason


def test_kept_kernels_of_different_caps_are_different():
    # the graphs differ only in what their operation calls
    shape = (1, 1, 256, 16)
    stride = (4096, 4096, 16, 1)
    facts = [(shape, stride, torch.float32, torch.device("cpu"))] * 3
    variables = [Var(f"x{i}", *facts[i], i, 4 * 4096) for i in range(3)]
    keys = set()
    for cap in (30.0, 50.0):
        static = flex_attention.FlexSettings(True, 0.3, cap, False, False)
        made = flex_attention.graph(False, facts, static)
        keys.add(inductor._key(inductor.GraphDevices.of(made, variables), {}))
    assert len(keys) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["documents", "window", "both", "none"])
@pytest.mark.parametrize("dim", [64, 128])
def test_cuda_kernel(mask, dim):
    seq = 1000
    x = [torch.randn(BATCH, n, seq, dim, dtype=torch.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS)]
    there = [y.cuda() for y in x]
    visible = masks(seq, seq)[mask]
    moved = None
    if visible is not None:
        fields = {n: y.cuda() if torch.is_tensor(y) else y for n, y in vars(visible).items()}
        moved = Visible(**fields)
    cap = 5.0 if mask in ("none", "both") else 0.0
    options = {"causal": True, "scale": dim**-0.5, "cap": cap}
    assert implementation(*there, moved, cap=cap).name == "flex"
    out, lse = block(*there, moved, **options)
    formula = functools.partial(dense, visible=visible, **options)
    wide = [y.double() for y in x]
    wanted, pullback = vjp(formula, *wide)
    close([out.double().cpu(), lse.double().cpu()], wanted, 2e-2)
    grads = attention.block_backward(out, *there, out, lse, moved, **options)
    close(
        [g.double().cpu() for g in grads],
        pullback((wanted[0], torch.zeros_like(wanted[1]))),
        5e-2,
    )
