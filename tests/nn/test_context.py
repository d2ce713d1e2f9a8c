"""Context parallelism against the full matrix of scores in float64, on every kind of split."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax
from functron.nn.context import context_attention, needed_steps, to_balanced, to_contiguous
from functron.ops import chunked_attention

BATCH, SEQ, HEADS, DIM = 2, 16, 4, 4
STREAM = P("dp", ("cp", "ulysses"))
MESHES = [Mesh(cp=2), Mesh(cp=4), Mesh(cp=8), Mesh(cp=2, ulysses=2), Mesh(cp=4, ulysses=2)]
KIND = pytest.mark.parametrize("kind", ["ring", "gather"])
BALANCED = pytest.mark.parametrize("balanced", [False, True], ids=["contiguous", "zigzag"])
ON = pytest.mark.parametrize("mesh", MESHES, ids=str)
# boundaries on and off the boundaries of ranks and chunks; a document of one token
SEGMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 7 + [3] * 3, [4] * 8 + [5] * 8])


def formula(window=0, segments=None, scale=None, causal=True):
    """Every score of every pair; the mask from the places in the sequence and the documents."""

    def dense(q, k, v, sinks=None):
        group = q.shape[2] // k.shape[2]
        rows = []
        for head in range(q.shape[2]):
            keys, values = k[:, :, head // group], v[:, :, head // group]
            scores = torch.einsum("btd,bsd->bts", q[:, :, head], keys)
            scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
            t = torch.arange(q.shape[1])
            distance = t[:, None] - t[None, :]
            seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
            if window:
                seen = seen & (distance < window)
            seen = seen[None]
            if segments is not None:
                seen = seen & (segments[:, :, None] == segments[:, None, :])
            weights = torch.where(seen, scores.exp(), 0)
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + sinks[head].exp()
            rows.append((weights / total) @ values)
        return torch.stack(rows, 2)

    return dense


def layer(balanced, **options):
    """The program of a rank: from the contiguous order and back to it."""

    def program(q, k, v, *rest):
        rest = list(rest)
        sinks = rest.pop(0) if rest and rest[0].is_floating_point() else None
        segments = rest.pop(0) if rest else None
        if balanced:
            q, k, v = (to_balanced(x, 1) for x in (q, k, v))
            segments = None if segments is None else to_balanced(segments, 1)
        out = context_attention(
            q, k, v, segments=segments, sinks=sinks, balanced=balanced, **options
        )
        return to_contiguous(out, 1) if balanced else out

    return program


@pytest.fixture
def check(agrees, randn):
    def run(
        mesh, *, kv_heads=2, heads=HEADS, value_dim=DIM, window=0, sinks=False, segments=None,
        static=True, seq=SEQ, **options,
    ):  # fmt: skip
        args = [
            randn(BATCH, seq, heads, DIM),
            randn(BATCH, seq, kv_heads, DIM),
            randn(BATCH, seq, kv_heads, value_dim),
        ]
        specs = [STREAM] * 3
        if sinks:
            args.append(randn(heads))
            specs.append(P())
        balanced = options.pop("balanced", False)
        given = window if static else torch.tensor(window)
        program = layer(balanced, window=given, **options)
        dense = formula(window, segments, options.get("scale"), options.get("causal", True))
        others = () if segments is None else (segments,)
        agrees(
            program,
            lambda *x: dense(*[y for y in x if y.is_floating_point()]),
            tuple(args), mesh, tuple(specs), STREAM, others, (STREAM,) * len(others),
        )  # fmt: skip

    return run


@pytest.mark.pairwise
@KIND
@BALANCED
@ON
def test_causal(check, mesh, kind, balanced):
    check(mesh, kind=kind, balanced=balanced)


@pytest.mark.pairwise(of=lambda mesh, kind, packed: [{"kind": kind, "packed": packed}])
@KIND
@pytest.mark.parametrize("packed", [False, True])
@ON
def test_every_key_is_seen(check, mesh, kind, packed):
    check(mesh, kind=kind, causal=False, sinks=packed, segments=SEGMENTS if packed else None)


@pytest.mark.pairwise
@KIND
@BALANCED
@ON
def test_packed_documents_with_sinks(check, mesh, kind, balanced):
    check(mesh, kind=kind, balanced=balanced, segments=SEGMENTS, sinks=True)


@pytest.mark.pairwise
@KIND
@BALANCED
@pytest.mark.parametrize("window", [1, 3, 6, 40])
def test_windows(check, kind, balanced, window):
    check(Mesh(cp=4), kind=kind, balanced=balanced, window=window)


@BALANCED
@ON
def test_window_packed(check, mesh, balanced):
    check(mesh, balanced=balanced, window=4, segments=SEGMENTS, sinks=True)


@pytest.mark.parametrize("window", [0, 3])
def test_a_window_that_is_a_tensor(check, window):
    check(Mesh(cp=4), balanced=True, window=window, static=False)


@KIND
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6, 12])
def test_key_heads_on_four_ranks_of_ulysses(check, kind, kv_heads):
    check(Mesh(ulysses=4), kind=kind, heads=12, kv_heads=kv_heads)
    check(Mesh(cp=2, ulysses=4), kind=kind, heads=12, kv_heads=kv_heads, balanced=True)


def test_ulysses_alone_with_everything(check):
    check(Mesh(ulysses=2), window=5, segments=SEGMENTS, sinks=True)


@pytest.mark.parametrize("value_dim", [2, 6])
def test_values_of_another_width(check, value_dim):
    check(Mesh(cp=4), value_dim=value_dim, scale=0.3)
    check(Mesh(), value_dim=value_dim, scale=0.3)
    check(Mesh(cp=2), value_dim=value_dim, window=3)


def test_one_device(check):
    for options in ({}, {"window": 3}, {"sinks": True}, {"segments": SEGMENTS}):
        check(Mesh(), **options)
        check(Mesh(dp=2), **options)


def test_with_other_axes(check):
    check(Mesh(dp=2, cp=2, tp=2), balanced=True, segments=SEGMENTS)
    check(Mesh(cp=2, ulysses=2, dp=2))


def arrangement(lengths, size):
    """Where each token of the balanced order comes from, and its document: every document in 2n
    chunks, of which rank r has r, then 2n - 1 - r; early ones of all documents come first."""
    source, documents, place = [], [], []
    for rank in range(size):
        for chunk_of in (lambda rank: rank, lambda rank: 2 * size - 1 - rank):
            start = 0
            for number, length in enumerate(lengths):
                chunk = length // (2 * size)
                first = chunk_of(rank) * chunk
                source += range(start + first, start + first + chunk)
                documents += [number] * chunk
                place += range(first, first + chunk)
                start += length
    return torch.tensor(source), torch.tensor([documents]), torch.tensor([place])


@pytest.mark.pairwise
@KIND
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(cp=2, ulysses=2), Mesh(cp=4)], ids=str)
def test_documents_balanced_by_the_data(agrees, randn, mesh, kind, window):
    lengths = (8, 16) if mesh["cp"] == 4 else (4, 12, 8)
    source, documents, places = arrangement(lengths, mesh["cp"])
    back = torch.argsort(source)
    segments, places = documents.expand(BATCH, -1), places.expand(BATCH, -1)

    def dense(q, k, v, *_):
        ordered = (x[:, back] for x in (q, k, v))
        return formula(window, segments[:, back])(*ordered)[:, source]

    def program(q, k, v, segments, places):
        return context_attention(
            q, k, v, segments=segments, positions=places, window=window, kind=kind, balanced=True
        )

    args = tuple(randn(BATCH, 24, heads, DIM) for heads in (4, 2, 2))
    agrees(program, dense, args, mesh, (STREAM,) * 3, STREAM, (segments, places), (STREAM,) * 2)


@pytest.mark.pairwise
@BALANCED
@pytest.mark.parametrize("ring_size", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 3])
def test_rings_of_some_ranks(agrees, randn, balanced, ring_size, window):
    """Each aligned group of ranks has a sequence of its own."""
    seq, groups = 16, 4 // ring_size
    segments = torch.arange(seq)[None].expand(BATCH, -1) // (seq // groups)
    source = torch.arange(seq)
    if balanced:
        order, _, _ = arrangement([seq // groups], ring_size)
        source = torch.cat([order + group * (seq // groups) for group in range(groups)])
    back = torch.argsort(source)

    def dense(q, k, v):
        return formula(window, segments)(*(x[:, back] for x in (q, k, v)))[:, source]

    def program(q, k, v):
        return context_attention(q, k, v, balanced=balanced, ring_size=ring_size, window=window)

    args = tuple(randn(BATCH, seq, heads, DIM) for heads in (4, 2, 2))
    agrees(program, dense, args, Mesh(cp=4), (STREAM,) * 3, STREAM)


def test_needed_steps():
    assert needed_steps(8, 4, 0, False) == needed_steps(8, 4, 0, True) == tuple(range(1, 8))
    assert needed_steps(8, 4, 1, False) == needed_steps(8, 4, 1, True) == ()
    assert needed_steps(8, 4, 5, False) == (1,)
    assert needed_steps(8, 4, 6, False) == (1, 2)
    # chunks of two: the late neighbour's keys come the other way round the ring
    assert needed_steps(8, 4, 3, True) == (1, 7)
    assert needed_steps(8, 4, 4, True) == (1, 2, 6, 7)
    assert needed_steps(1, 4, 3, True) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ring_size": 3}, "a divisor of the 4 ranks of 'cp'"),
        ({"exchange_size": 2}, "a divisor of the 1 ranks of 'ulysses'"),
        ({"window": -1}, "0 for no window"),
        ({"pairs": torch.ones(1, 4, 4, dtype=torch.bool)}, "in order"),
        ({"window": 2, "causal": False}, "leave a window out"),
        ({"balanced": True, "causal": False}, "leave balanced out"),
        ({"heads": 3}, "a divisor of q's 3"),
        ({"seq": 4, "balanced": True}, "two halves"),
    ],
)
def test_refusals(randn, options, message):
    seq, heads = options.pop("seq", 16), options.pop("heads", 4)
    q, k, v = (randn(1, seq, n, DIM) for n in (heads, 2, 2))
    run = lambda *x: context_attention(*x, **options)
    with pytest.raises(ValueError, match=message):
        ft.shard_map(run, Mesh(cp=4), STREAM, STREAM)(q, k, v)


def test_too_few_heads(randn):
    mapped = ft.shard_map(lambda *x: context_attention(*x), Mesh(ulysses=4), STREAM, STREAM)
    with pytest.raises(ValueError, match="a multiple of the 4 ranks of 'ulysses'"):
        mapped(*(randn(1, 16, 2, DIM) for _ in range(3)))


def both_energies(mesh, kind, balanced, randn):
    """Scalars of (q, k, v, sinks), ours and the formula's, nonlinear in the output."""
    program, weights = layer(balanced, kind=kind, window=6), randn(BATCH, SEQ, HEADS, DIM)
    specs = (*[STREAM] * 3, P(), STREAM, STREAM)

    def local(q, k, v, sinks, segments, weights):
        out = program(q, k, v, sinks, segments)
        return lax.psum((out.sin() * weights).sum(), ("dp", "cp", "ulysses"))

    mapped = ft.shard_map(local, mesh, specs, P())
    dense = formula(6, SEGMENTS)
    ours = lambda *x: mapped(*x, SEGMENTS, weights)
    return ours, lambda *x: (dense(*x).sin() * weights).sum()


@pytest.mark.pairwise
@KIND
@BALANCED
@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(cp=2, ulysses=2)], ids=str)
def test_hessian_vector_products(randn, mesh, kind, balanced):
    ours, dense = both_energies(mesh, kind, balanced, randn)
    shapes = [(BATCH, SEQ, heads, DIM) for heads in (4, 2, 2)]
    args = (*(randn(*shape) for shape in shapes), randn(HEADS))
    along = (*(randn(*shape) for shape in shapes), randn(HEADS))
    every = (0, 1, 2, 3)
    want = torch.func.vjp(torch.func.grad(dense, every), *args)[1](along)
    got = torch.func.vjp(torch.func.grad(ours, every), *args)[1](along)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    taped = tuple(x.clone().requires_grad_() for x in args)
    first = torch.autograd.grad(ours(*taped), taped, create_graph=True)
    got = torch.autograd.grad(first, taped, along)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_hessian_vector_product_of_plain_blocks(randn):
    """The kernels' own second derivatives."""
    args = tuple(randn(1, 8, heads, DIM) for heads in (2, 1, 1))
    along = tuple(x.cos() for x in args)
    mapped = ft.shard_map(layer(True), Mesh(cp=2), STREAM, STREAM)
    energy = lambda f: lambda *x: f(*x).sin().square().sum()
    product = lambda f: torch.func.vjp(torch.func.grad(energy(f), (0, 1, 2)), *args)[1](along)
    torch.testing.assert_close(product(mapped), product(formula()), rtol=1e-10, atol=1e-10)

    def inside(*args):
        def loss(*x):
            return lax.psum(energy(layer(True))(*x), ("cp",))

        def along(*x):
            rows = zip(ft.grad(loss, (0, 1, 2))(*x), args, strict=True)
            return lax.psum(sum((g * y.cos()).sum() for g, y in rows), ("cp",))

        return ft.grad(along, (0, 1, 2))(*args)

    got = ft.shard_map(inside, Mesh(cp=2), STREAM, (STREAM,) * 3)(*args)
    torch.testing.assert_close(got, product(formula()), rtol=1e-10, atol=1e-10)


def step(mesh, program, num_args=3):
    """Loss and gradients of a layer, as a training step computes them."""
    specs = (STREAM,) * num_args

    def run(*args):
        def loss(*x):
            return lax.psum(program(*x, *args[3:]).sin().sum(), ("dp", "cp", "ulysses"))

        value, grads = ft.value_and_grad(loss, (0, 1, 2))(*args[:3])
        return value, ft.sync_gradients(grads, specs[:3])

    return ft.shard_map(run, mesh, specs, (P(), specs[:3]))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled(randn, backend):
    args = tuple(randn(1, SEQ, heads, DIM) for heads in (2, 1, 1))
    run = step(Mesh(cp=2, ulysses=2), layer(True))
    got = ft.jit(run, backend=backend)(*args)
    torch.testing.assert_close(got, run(*args), rtol=1e-10, atol=1e-10)


def test_a_compiled_ring(randn):
    """Forward: the backward of a ring is compiled in tests/transforms/test_custom_vjp.py."""
    args = tuple(randn(1, 4, 1, 2) for _ in range(3))
    run = ft.shard_map(layer(True), Mesh(cp=2), STREAM, STREAM)
    torch.testing.assert_close(ft.jit(run)(*args), formula()(*args), rtol=1e-10, atol=1e-10)


def traffic(program):
    return {
        (row.axis, row.op, row.phase): (row.count, row.payload_bytes)
        for row in program.cost().collectives
        if row.op != "psum"
    }


@pytest.mark.pairwise(of=lambda dtype, window, steps: [{"dtype": dtype}, {"window": window}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "steps"), [(0, 3), (3, 2)])
def test_bytes_of_the_ring(dtype, window, steps):
    batch, seq, kv_heads, dim, value_dim = 2, 16, 2, 8, 4
    shapes = [(batch, seq, 4, dim), (batch, seq, kv_heads, dim), (batch, seq, kv_heads, value_dim)]
    args = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    segments = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    tokens = batch * seq // 4
    numbers = tokens * kv_heads * (dim + value_dim)

    def program(q, k, v, segments):
        return context_attention(q, k, v, segments=segments, balanced=True, window=window)

    got = traffic(ft.trace(step(Mesh(cp=4), program, 4))(*args, segments))
    # without a window 3 steps; of the window's two steps the ring jumps over the one between
    assert got == {
        ("cp", "ppermute", "forward"): (
            3 * steps, steps * (numbers * dtype.itemsize + 4 * tokens)
        ),
        ("cp", "ppermute", "backward"): (4 * steps, steps * numbers * (dtype.itemsize + 4)),
    }  # fmt: skip


def test_bytes_of_gathers_and_ulysses():
    batch, seq, heads, kv_heads, dim = 2, 16, 8, 2, 8
    args = [
        torch.empty(batch, seq, n, dim, dtype=torch.bfloat16, device="meta")
        for n in (heads, kv_heads, kv_heads)
    ]
    mesh = Mesh(cp=2, ulysses=4)
    program = ft.trace(step(mesh, lambda *x: context_attention(*x, kind="gather")))(*args)
    tokens = batch * seq // 8
    # two heads of keys are too few for four ranks: each is sent twice
    exchanged = tokens * dim * 2 * (heads + 2 * 4 + heads)
    gathered = 2 * 2 * tokens * 4 * dim * 2
    assert traffic(program) == {
        ("ulysses", "all_to_all", "forward"): (4, exchanged),
        ("ulysses", "all_to_all", "backward"): (4, exchanged),
        ("cp", "all_gather", "forward"): (2, gathered),
        ("cp", "psum_scatter", "backward"): (2, gathered),
    }


def most_numbers(program):
    """Of any tensor that a traced program makes."""
    made = [var for equation in program.block.equations for var in equation.results]
    return max(math.prod(var.shape) for var in made)


def test_long_sequences_make_no_matrix_of_scores():
    seq, heads, dim = 2**17, 2, 8
    args = [torch.empty(1, seq, heads, dim, device="meta") for _ in range(3)]
    plain = ft.trace(step(Mesh(cp=8), layer(True)))(*args)
    assert most_numbers(plain) == seq // 8 * heads * dim
    args = [x[:, : 2**15] for x in args]
    segments = torch.empty(1, 2**15, dtype=torch.int64, device="meta")
    program = lambda q, k, v, s: context_attention(q, k, v, segments=s, window=2000)
    masked = ft.trace(step(Mesh(cp=16), program, 4))(*args, segments)
    local = 2**15 // 16
    assert most_numbers(masked) == chunked_attention.CHUNK**2 < local**2 / 8  # a mask


def test_a_long_sequence_on_simulated_ranks(randn):
    """Rows of the result against their own formula; the whole matrix would have 2 ** 30 scores."""
    seq, dim = 2**15, 4
    q, k, v = (randn(1, seq, 1, dim) for _ in range(3))
    out = ft.shard_map(layer(True), Mesh(cp=8), STREAM, STREAM)(*(x.float() for x in (q, k, v)))
    for row in (0, 5000, seq - 1):
        scores = (k[0, : row + 1, 0] @ q[0, row, 0]) / math.sqrt(dim)
        want = torch.softmax(scores, 0) @ v[0, : row + 1, 0]
        torch.testing.assert_close(out[0, row, 0].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.pairwise(of=lambda balanced, window: [{"balanced": balanced}, {"window": window}])
@BALANCED
@pytest.mark.parametrize("window", [1, 3, 7, 12])
def test_chunks_out_of_a_windows_reach_are_left_out(check, monkeypatch, balanced, window):
    monkeypatch.setattr(chunked_attention, "CHUNK", 2)
    segments = torch.cat([SEGMENTS, 6 + SEGMENTS], 1)
    for mesh in (Mesh(), Mesh(cp=2), Mesh(cp=4)):
        check(mesh, balanced=balanced, window=window, seq=32)
        check(mesh, balanced=balanced, window=window, seq=32, segments=segments, sinks=True)


def test_work_is_half_where_halves_are_balanced():
    def products(balanced):
        args = [torch.empty(1, 64, 1, 8, device="meta") for _ in range(3)]
        program = lambda *x: context_attention(*x, balanced=balanced)
        return ft.trace(step(Mesh(cp=4), program))(*args).cost().hardware_flops

    # counted in squares of a rank's tokens, its own without a discount for causality
    assert products(True) / products(False) == (1 + 3 * 2 / 4) / (1 + 3)


def test_work_of_a_window_does_not_grow_with_the_sequence():
    def products(seq, ranks):
        args = [torch.empty(1, seq, 1, 8, device="meta") for _ in range(3)]
        program = lambda *x: context_attention(*x, window=500)
        return ft.trace(step(Mesh(cp=ranks), program))(*args).cost().hardware_flops

    assert products(2**15, 16) == products(2**14, 8)  # of one rank
    assert products(2**15, 8) < 2.1 * products(2**14, 8)


@pytest.mark.distributed
def test_processes(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_context.py"), 4, timeout=180)
    assert "cp=4: ok" in done.stdout
    assert "cp=2,ulysses=2: ok" in done.stdout
