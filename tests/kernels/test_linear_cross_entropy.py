"""Chunked linear layers with cross-entropy against dense formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jvp, vjp, vmap

import functron as ft
from functron import DATA_AXES, Mesh, P, lax, nn, ops
from functron.compiler.lower import graph_module
from functron.compiler.segments import procedure
from functron.ops.cross_entropy import linear_log_sum_exp_and_target
from functron.program.cost import cost
from functron.program.memory import memory
from functron.program.trace import trace
from functron.spmd import collectives
from tests.program.measured_memory import measured_peak

TOKENS, EMBED, VOCAB = 7, 4, 50
CHOICES = {"plain": ops.use("reference"), "kernel": ops.use("kernel")}


@pytest.fixture(params=list(CHOICES))
def kernels(request):
    return CHOICES[request.param]


def draw(*lead, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, w = (
        torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, EMBED), (EMBED, VOCAB))
    )
    return x, w, torch.randint(-1, VOCAB + 1, (*lead, TOKENS), generator=generator)


def formula(x, w, ids, valid=None):
    logits = x @ w
    columns = torch.arange(w.shape[-1])
    picked = torch.where(ids.unsqueeze(-1) == columns, logits, 0.0).sum(-1)
    real = logits[..., : VOCAB if valid is None else int(valid)]
    return real.exp().sum(-1).log(), picked


def scalar(function, *rest):
    """Nonlinear in both outputs, so that second derivatives see all of them."""

    def value(x, w):
        lse, target = function(x, w, *rest)
        return (lse.square() + (lse * target).sin()).sum()

    return value


def chunked(chunk, kernels):
    def of(x, w, ids, valid=None):
        return linear_log_sum_exp_and_target(x, w, ids, valid, chunk_tokens=chunk, kernels=kernels)

    return of


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("valid", [None, 33, torch.tensor(33)], ids=["all", "int", "tensor"])
def test_chunks(chunk, valid, kernels):
    x, w, ids = draw()
    ours = chunked(chunk, kernels)
    close(ours(x, w, ids, valid), formula(x, w, ids, valid))
    expected = grad(scalar(formula, ids, valid), (0, 1))(x, w)
    close(grad(scalar(ours, ids, valid), (0, 1))(x, w), expected)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    scalar(ours, ids, valid)(*leaves).backward()
    close(tuple(leaf.grad for leaf in leaves), expected)


def test_a_tied_table(kernels):
    x, w, ids = draw()
    table = w.mT.contiguous().requires_grad_()
    scalar(lambda x, t: chunked(2, kernels)(x, t.mT, ids))(x, table).backward()
    expected = grad(scalar(formula, ids), 1)(x, w)
    assert table.grad is not None
    close(table.grad, expected.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_half_precision(dtype, kernels):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 32, generator=generator).to(dtype)
    w = (torch.randn(32, 90, generator=generator) / 4).to(dtype)
    ids = torch.randint(0, 90, (40,), generator=generator)
    given = torch.randn(2, 40, generator=generator).unbind()
    outputs, pull = vjp(lambda x, w: chunked(16, kernels)(x, w, ids), x, w)
    assert [value.dtype for value in outputs] == [torch.float32] * 2
    grads = pull(given)
    assert [value.dtype for value in grads] == [dtype] * 2

    def unfused(x, w):
        logits = (x @ w).double()
        return logits.exp().sum(-1).log(), logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    # logits are rounded to the dtype, which is most of the error
    wide, pull = vjp(unfused, x.double(), w.double())
    eps = torch.finfo(dtype).eps
    for got, wanted in zip(
        (*outputs, *grads), (*wide, *pull(tuple(v.double() for v in given))), strict=True
    ):
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < 2 * eps


def test_no_tokens(kernels):
    x, w, ids = draw()
    outputs, pull = vjp(lambda x, w: chunked(2, kernels)(x, w, ids[:0]), x[:0], w)
    assert [value.shape for value in outputs] == [(0,), (0,)]
    dx, dw = pull((torch.zeros(0, dtype=x.dtype),) * 2)
    assert dx.shape == (0, EMBED)
    assert dw.eq(0).all()


def test_chunks_below_one_are_refused():
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        chunked(0, ops.use())(*draw())


def test_second_derivatives(kernels):
    x, w, ids = draw()

    def products(function):
        gradient = grad(scalar(function, ids), (0, 1))
        return vjp(gradient, x, w)[1]((x.sin(), w.cos()))

    close(products(chunked(3, kernels)), products(formula))


def test_forward_mode():
    x, w, ids = draw()
    ours = chunked(3, CHOICES["plain"])
    tangents = x.cos(), w.sin()
    close(
        jvp(lambda x, w: ours(x, w, ids), (x, w), tangents),
        jvp(lambda x, w: formula(x, w, ids), (x, w), tangents),
    )
    close(hessian(scalar(ours, ids))(x, w), hessian(scalar(formula, ids))(x, w))
    by_ops = scalar(chunked(3, CHOICES["kernel"]), ids)
    close(hessian(by_ops)(x, w), hessian(scalar(formula, ids))(x, w))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, 0), (None, 1, None), (None, None, 0)])
def test_vmap(in_dims, kernels):
    x, w, ids = draw(3)
    operands = [
        value[0] if dim is None else value.movedim(0, dim)
        for value, dim in zip((x, w, ids), in_dims, strict=True)
    ]
    got, wanted = (vmap(f, in_dims)(*operands) for f in (chunked(3, kernels), formula))
    close(got, wanted)

    def per_row(function):
        def one(x, w, ids):
            return grad(scalar(function, ids), (0, 1))(x, w)

        return vmap(one, in_dims)(*operands)

    close(per_row(chunked(3, kernels)), per_row(formula))

    def total(function):
        def of(x, w):
            lse, target = vmap(function, in_dims)(x, w, operands[2])
            return (lse.square() + (lse * target).sin()).sum()

        return grad(of, (0, 1))(*operands[:2])

    close(total(chunked(3, kernels)), total(formula))


def losses(x, w, ids, size):
    """The dense loss, with the z term."""
    lse = (x @ w)[..., :size].exp().sum(-1).log()
    picked = (x @ w).gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(ids == nn.IGNORE_INDEX, 0.0, lse - picked + 0.1 * lse.square())


MESHES = ["", "tp=4", "dp=2,tp=2", "tp=2,fsdp=2", "dp=2,cp=2,tp=2"]


@pytest.mark.parametrize("stream", [P(DATA_AXES), P(DATA_AXES, ("cp", "tp"))], ids=["tp", "sp"])
@pytest.mark.parametrize("mesh", MESHES)
def test_on_meshes(mesh, stream, kernels):
    """tp with columns of padding, with the stream split over it or not, and tokens over all axes."""
    mesh, size, columns = Mesh.parse(mesh), 11, 16
    if len(stream) == 1:
        stream = P(DATA_AXES, "cp")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, EMBED, generator=generator, dtype=torch.float64)
    w = torch.randn(EMBED, columns, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, size, (4, 8), generator=generator)
    ids[0, :3] = nn.IGNORE_INDEX
    given = torch.randn(4, 8, generator=generator, dtype=torch.float64)

    def step(x, w, ids, given):
        def loss(x, w):
            whole = nn.gather_sequence(x, stream)
            each = nn.linear_cross_entropy(
                whole, w, ids, vocab_size=size, z_loss=0.1, chunk_tokens=3, kernels=kernels
            )
            return lax.psum((each * given).sum(), (*DATA_AXES, "cp")), each

        (_, each), grads = ft.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return each, *ft.sync_gradients(grads, (stream, P(None, "tp")))

    rows, matrix = P(DATA_AXES, "cp"), P(None, "tp")
    mapped = ft.shard_map(step, mesh, (stream, matrix, rows, rows), (rows, stream, matrix))
    wanted, pull = vjp(lambda x, w: losses(x, w, ids, size), x, w)
    close(mapped(x, w, ids, given), (wanted, *pull(given)))


def test_ranks_exchange_what_cross_entropy_does(monkeypatch):
    sizes = []
    for name in ("psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute"):
        collective = getattr(lax, name)

        def record(x, *args, collective=collective, name=name, **kwargs):
            sizes.append((name, x.numel()))
            return collective(x, *args, **kwargs)

        monkeypatch.setattr(collectives, name, record)
    x, w, ids = draw()
    ids = ids.remainder(44)
    mapped = ft.shard_map(
        lambda x, w: nn.linear_cross_entropy(x, w, ids, vocab_size=44, chunk_tokens=2),
        Mesh(tp=2),
        (P(), P(None, "tp")),
        P(),
    )
    mapped(x, w)
    assert sorted(sizes) == [("pmax", TOKENS), ("psum", TOKENS), ("psum", TOKENS)]


def steps(tokens, embed, vocab, chunk, dtype=torch.float32, kernels=CHOICES["plain"]):
    """Gradients of the mean loss, of logits that are whole and in chunks, and their operands."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, embed, generator=generator).to(dtype)
    w = (torch.randn(embed, vocab, generator=generator) / embed**0.5).to(dtype)
    ids = torch.randint(0, vocab, (tokens,), generator=generator)
    options = {"vocab_size": vocab, "kernels": kernels}

    def whole(x, w):
        return nn.cross_entropy(x @ w, ids, **options).mean()

    def parts(x, w):
        return nn.linear_cross_entropy(x, w, ids, chunk_tokens=chunk, **options).mean()

    return ft.grad(whole, (0, 1)), ft.grad(parts, (0, 1)), (x, w)


def test_traced_and_run_as_a_program(kernels):
    whole, parts, operands = steps(24, 8, 50, 8, kernels=kernels)
    expected = whole(*operands)
    torch.testing.assert_close(parts(*operands), expected)
    program = ft.jit(parts, backend="eager")
    torch.testing.assert_close(program(*operands), expected)
    if kernels.takes("cross_entropy", *operands):  # cotangents lie over the logits, block by block
        traced = program.trace(*operands)
        made = procedure(traced.block, traced.block.outputs).kernels()
        nodes = [n for k in made for n in graph_module(k, {}).graph.nodes]
        found = [str(n.target) for n in nodes if "cross_entropy_backward" in str(n.target)]
        assert set(found) == {"functron.cross_entropy_backward_.default"}


def test_work():
    """A third more than of whole logits, which counts as recomputation."""
    tokens, embed, vocab = 24, 8, 64
    whole, parts, operands = steps(tokens, embed, vocab, 8)
    before, after = (cost(trace(step)(*operands)) for step in (whole, parts))
    product = 2 * tokens * embed * vocab
    assert before.hardware_flops == before.model_flops == after.model_flops == 3 * product
    assert after.hardware_flops == 4 * product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(dtype):
    """Beyond the operands and their gradients, which both have."""
    tokens, embed, vocab, chunk = 1024, 16, 4096, 32
    whole, parts, operands = steps(tokens, embed, vocab, chunk, dtype)
    size = operands[0].element_size()
    rest = 2 * size * (tokens * embed + embed * vocab)
    unfused, fused = (measured_peak(step, *operands) - rest for step in (whole, parts))
    assert unfused > 1.9 * tokens * vocab * size
    assert fused < 0.05 * unfused
    predicted = [memory(trace(step)(*operands)).peak_bytes - rest for step in (whole, parts)]
    assert predicted[1] < 0.05 * predicted[0]
