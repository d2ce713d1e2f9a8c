"""Look-ups and the sums that are their derivatives: the emulated kernel, and the op, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron.ops.moe import SUM_ROWS, look_up
from functron.program.memory import memory
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import emulated

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def ids_of(count: int, rows: int, kind: str) -> torch.Tensor:
    """Rows of a table that some tokens have, by chance, all the same, or in part none."""
    generator = torch.Generator().manual_seed(count)
    if kind == "equal":
        return torch.full((count,), rows // 2)
    if kind == "outside":  # as where other ranks have the rows
        return torch.randint(-2 * rows, 3 * rows, (count,), generator=generator)
    if kind == "nowhere":
        return torch.randint(0, rows, (count,), generator=generator) - rows
    return (torch.rand(count, generator=generator) ** 3 * rows).long()  # some have many


def by_one_hot(x: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """In float64, as a product."""
    return (ids == torch.arange(rows)[:, None]).double() @ x.double()


def assert_rounded(got: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, rows: int) -> None:
    """The tolerance of sums of float32 terms, rounded once."""
    exact, size = by_one_hot(x, ids, rows), by_one_hot(x.abs(), ids, rows)
    info, terms = torch.finfo(got.dtype), len(ids)
    bound = info.eps / 2 * exact.abs() + (terms + 1) * 2**-24 * size + info.tiny * info.eps
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["drawn", "equal", "outside", "nowhere"])
@pytest.mark.parametrize(
    ("count", "rows", "dim"),
    [(1, 1, 1), (31, 5, 7), (32, 40, 64), (33, 2, 64), (200, 9, 40), (70, 30, 1100)],
)
def test_kernel(count, rows, dim, kind, dtype):
    ids, x = ids_of(count, rows, kind), draw(count, dim, dtype=dtype)
    seeds = (0, 1, 2) if dim < 1000 else (0,)
    assert_rounded(emulated(SUM_ROWS.kernel, x, ids, rows, seeds=seeds), x, ids, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_adds_in_the_order_of_tokens(dtype):
    """Bit for bit, where a row's tokens are in one chunk: no other order gives these sums."""
    ids, x = torch.tensor([4, 1, 4, 4, 1, 0, 4]), draw(7, 24, dtype=dtype)
    wanted = torch.zeros(6, 24)
    for at, row in zip(ids, x, strict=True):
        wanted[at] += row.float()
    assert torch.equal(emulated(SUM_ROWS.kernel, x, ids, 6), wanted.to(dtype))
    assert torch.equal(SUM_ROWS(x, ids, 6), wanted.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_where_memory_is_not_aligned(dtype):
    ids, x = ids_of(100, 7, "drawn"), draw(100, 72, dtype=dtype)
    memory = torch.zeros(100, 79, dtype=dtype)
    memory[:, 3:75] = x
    wanted = emulated(SUM_ROWS.kernel, x, ids, 7)
    for same in (memory[:, 3:75], x.t().contiguous().t()):
        assert torch.equal(emulated(SUM_ROWS.kernel, same, ids, 7), wanted)


@pytest.mark.parametrize(("count", "rows", "dim"), [(0, 3, 8), (3, 0, 8), (3, 4, 0)])
def test_nothing_to_add(count, rows, dim):
    ids, x = torch.zeros(count, dtype=torch.int64), torch.ones(count, dim)
    for op in (SUM_ROWS, lambda *args: emulated(SUM_ROWS.kernel, *args)):
        y = op(x, ids, rows)
        assert y.shape == (rows, dim)
        assert (y == 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["drawn", "outside", "nowhere"])
def test_op(kind, dtype):
    ids, x = ids_of(500, 12, kind), draw(500, 6, dtype=dtype)
    assert_rounded(SUM_ROWS(x, ids, 12), x, ids, 12)


def test_what_only_one_rank_has():
    """Values and gradients of a part of a table, and of those of second order."""
    table, ids = draw(5, 3).requires_grad_(), torch.tensor([[0, 4, 7], [-1, 4, 5]])
    wanted = F.pad(
        F.one_hot(ids.clamp(0, 5) * (ids >= 0) + 5 * (ids < 0), 6)[..., :5], (0, 0)
    ).double()

    def total(look, table):
        return look(table).sin().square().sum()

    rows = {"ours": lambda t: look_up(t, ids), "dense": lambda t: wanted @ t}
    found = {}
    for name, look in rows.items():
        (first,) = torch.autograd.grad(total(look, table), table, create_graph=True)
        (second,) = torch.autograd.grad(first.cos().sum(), table)
        hessian = torch.func.hessian(lambda t, look=look: total(look, t))(table.detach())
        found[name] = first, second, hessian, torch.func.jvp(look, (table,), (table.cos(),))[1]
    for ours, dense in zip(found["ours"], found["dense"], strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)


def test_ids_that_are_to_be_rows_are_checked():
    with pytest.raises(IndexError):
        look_up(draw(4, 2), torch.tensor([4]), whole=True)


@pytest.mark.parametrize("mapped", ["table", "ids", "both"])
def test_maps_of_gradients(mapped):
    tables, ids = draw(3, 5, 2), ids_of(12, 5, "outside").view(3, 4)
    dims = {"table": (0, None), "ids": (None, 0), "both": (0, 0)}[mapped]
    args = tables if dims[0] == 0 else tables[0], ids if dims[1] == 0 else ids[0]

    def gradient(table, ids):
        return torch.func.grad(lambda t: look_up(t, ids).sin().sum())(table)

    found = torch.func.vmap(gradient, dims)(*args)
    for i in range(3):
        one = [x if dim is None else x[i] for x, dim in zip(args, dims, strict=True)]
        wanted = by_one_hot(
            one[0].cos(), torch.arange(5), 5
        )  # of each row, times how often it is read
        counts = (one[1] == torch.arange(5)[:, None]).sum(1, keepdim=True)
        torch.testing.assert_close(found[i], wanted * counts, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("embed", ["vocabulary", "positions"])
def test_traced_and_compiled_gradients_of_embeddings(embed):
    """One operation, whose memory is promised, and whose bits are those of the uncompiled program."""
    rows, dim, seq = 40, 16, 24
    table, x = draw(rows, dim, dtype=torch.bfloat16), draw(8, seq, dim, dtype=torch.bfloat16)
    tokens = ids_of(8 * seq, rows, "drawn").view(8, seq)

    def loss(table, tokens, x):
        if embed == "vocabulary":
            return (ft.nn.embed_tokens(table, tokens, stream=ft.P()) * x).float().sum()
        return (ft.nn.add_positions(x, table, stream=ft.P()).float() * x.float()).sum()

    gradient = ft.grad(loss)
    program = ft.trace(gradient)(table, tokens, x)
    names = [equation.name for equation in program.block.equations]
    assert names.count("sum_rows") == 1
    assert "embedding_dense_backward" not in names
    (moment,) = [m for m in memory(program).timeline if m.equation == "sum_rows"]
    count = tokens.numel() if embed == "vocabulary" else seq
    given = table.nbytes + tokens.nbytes + x.nbytes
    # ids and their order twice, sums of one row in 16 in float32, the rows, and what they are of
    assert moment.total >= given + 4 * 8 * count + count // 16 * dim * 4 + (rows + count) * dim * 2
    wanted = gradient(table, tokens, x)
    ids = tokens.flatten() if embed == "vocabulary" else torch.arange(seq)
    each = x.flatten(0, 1) if embed == "vocabulary" else x.float().sum(0).bfloat16()
    assert_rounded(wanted, each, ids, rows)
    compiled = ft.jit(gradient)
    for _ in range(2):
        assert torch.equal(compiled(table, tokens, x), wanted)


CASES = [
    Case(
        SUM_ROWS,
        lambda x, ids, rows: by_one_hot(x, ids, rows),
        (draw(40, 3), ids_of(40, 6, kind), 6),
    )
    for kind in ("drawn", "outside")
]


@conform(CASES)
def test_conformance(case, check):
    check(case)
