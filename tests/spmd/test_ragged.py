"""The ragged all-to-all against a loop over senders, receivers and rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.func import vjp, vmap

import functron as ft
from functron import Mesh, P, lax
from functron.spmd.ragged import add_rows, blocks_of, copy_rows, swap_blocks

ROWS, WIDTH = 6, 3
CASES = {
    "one axis": ("ep=2", "ep"),
    "three ranks": ("ep=3", ("ep",)),
    "among others": ("dp=2,ep=2,tp=2", "ep"),
    "two axes": ("ep=2,tp=2", ("ep", "tp")),
    "other order": ("ep=2,tp=3", ("tp", "ep")),
    "three axes": ("dp=2,ep=2,tp=2", ("dp", "ep", "tp")),
    "no axis": ("dp=2", "ep"),
}


def draw_sizes(ranks: int, parts: int, kind: str) -> torch.Tensor:
    """[ranks, parts], each row summing to at most ROWS."""
    generator = torch.Generator().manual_seed(ranks)
    if kind == "all to the last":
        return torch.tensor([[0] * (parts - 1) + [ROWS]] * ranks)
    targets = torch.randint(0, parts + 1, (ranks, ROWS), generator=generator)
    return torch.stack([(targets == part).sum(1) for part in range(parts)], 1)


def groups(mesh: Mesh, axes) -> list[list[int]]:
    """Ranks that exchange with one another, in the row-major order of `axes`."""
    axes = (axes,) if isinstance(axes, str) else axes
    found: dict[tuple, list[tuple]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        mine = tuple(at.get(name, 0) for name in axes)
        found.setdefault(tuple(v for k, v in at.items() if k not in axes), []).append((mine, rank))
    return [[rank for _, rank in sorted(members)] for members in found.values()]


def expected_of(x, sizes, mesh, axes, capacity):
    """x [ranks, ROWS, ...] to [ranks, capacity, ...], and received sizes."""
    out = [[] for _ in range(mesh.size)]
    received = torch.zeros_like(sizes)
    for group in groups(mesh, axes):
        for source, sender in enumerate(group):
            row = 0
            for position, receiver in enumerate(group):
                for _ in range(int(sizes[sender, position])):
                    out[receiver].append(x[sender, row])
                    row += 1
                received[receiver, source] = sizes[sender, position]
    zero = torch.zeros_like(x[0, 0])
    padded = [rows + [zero] * (capacity - len(rows)) for rows in out]
    return torch.stack([torch.stack(rows) for rows in padded]), received


@pytest.mark.parametrize("kind", ["random", "all to the last"])
@pytest.mark.parametrize("case", list(CASES))
def test_values_and_gradients(case, kind):
    text, axes = CASES[case]
    mesh = Mesh.parse(text)
    parts = math.prod(mesh[name] for name in ((axes,) if isinstance(axes, str) else axes))
    every = P(mesh.axis_names)
    x = torch.randn(mesh.size, ROWS, WIDTH, dtype=torch.float64)
    sizes = draw_sizes(mesh.size, parts, kind)
    capacity = parts * ROWS + 1
    expected, received = expected_of(x, sizes, mesh, axes, capacity)

    def local(x, sizes):
        rows, got = lax.ragged_all_to_all(x[0], sizes[0], axes, capacity=capacity)
        return rows.unsqueeze(0), got.unsqueeze(0)

    f = ft.shard_map(local, mesh, (every, every), (every, every))
    rows, got = f(x, sizes)
    assert torch.equal(rows, expected)
    assert torch.equal(got, received)
    moved = lambda x: f(x, sizes)[0]
    oracle = lambda x: expected_of(x, sizes, mesh, axes, capacity)[0]
    cotangent = torch.randn_like(expected)
    (gradient,) = vjp(oracle, x)[1](cotangent)
    assert torch.equal(vjp(moved, x)[1](cotangent)[0], gradient)
    assert torch.equal(torch.func.jvp(moved, (x,), (x.sin(),))[1], oracle(x.sin()))
    double = lambda f: vjp(lambda x: vjp(f, x)[1](cotangent.cos() * f(x))[0], x)[1](x)[0]
    torch.testing.assert_close(double(moved), double(oracle), rtol=1e-12, atol=1e-12)


def test_inside_another_vmap():
    mesh, axes = Mesh(ep=2, tp=2), ("ep", "tp")
    x, sizes = torch.randn(3, 4, ROWS, WIDTH), torch.stack([draw_sizes(4, 4, "random")] * 3)
    sizes[1] = sizes[1].flip(0)
    every = P(mesh.axis_names)

    def local(x, sizes):
        # samples that share their sizes, and samples that do not
        one = lambda x, sizes: lax.ragged_all_to_all(x, sizes, axes, capacity=24)[0]
        shared = vmap(one, (0, None))(torch.stack([x[0], -x[0]]), sizes[0])
        own = vmap(one, (0, 0))(torch.stack([x[0], -x[0]]), torch.stack([sizes[0], sizes[0]]))
        mine = vmap(one, (None, 0))(x[0], torch.stack([sizes[0], sizes[0]]))
        return torch.stack([shared[0], -shared[1], own[0], -own[1], *mine]).unsqueeze(0)

    f = ft.shard_map(local, mesh, (every, every), every)
    for got, rows, counts in zip(vmap(f)(x, sizes), x, sizes, strict=True):
        want = expected_of(rows, counts, mesh, axes, 24)[0]
        for which in range(6):
            assert torch.equal(got[:, which], want)


@pytest.mark.parametrize("case", ["one axis", "two axes", "three axes"])
def test_traced(case):
    text, axes = CASES[case]
    mesh = Mesh.parse(text)
    names = (axes,) if isinstance(axes, str) else axes
    parts = math.prod(mesh[name] for name in names)
    every, capacity = P(mesh.axis_names), parts * ROWS
    x = torch.randn(mesh.size * ROWS, WIDTH)
    sizes = draw_sizes(mesh.size, parts, "random").reshape(-1)

    def step(x, sizes):
        def loss(x):
            rows, _ = lax.ragged_all_to_all(x, sizes, axes, capacity=capacity, room=ROWS)
            return lax.psum((rows.sin() * torch.arange(capacity)[:, None]).sum(), mesh.axis_names)

        return ft.value_and_grad(loss)(x)

    f = ft.shard_map(step, mesh, every, (P(), every))
    program = ft.trace(f)(x, sizes)
    program.check()
    assert not program.diff(str(program))
    found = [e for e in program.block.equations if e.name == "ragged_all_to_all"]
    assert len(found) == 2 * len(names)
    for got, want in zip(program(x, sizes), f(x, sizes), strict=True):
        torch.testing.assert_close(got, want)
    traffic = {(row.axis, row.phase): row for row in program.cost().collectives
               if row.op == "ragged_all_to_all"}  # fmt: skip
    first = traffic[names[0], "forward"]
    size = mesh[names[0]]
    assert first.payload_bytes == x.element_size() * ROWS * WIDTH
    assert first.sent_bytes == round(first.payload_bytes * (size - 1) / size)
    if case == "one axis":  # a cotangent of all that could have come, of which so much goes back
        assert traffic["ep", "backward"].payload_bytes == first.payload_bytes


def test_varies_and_is_checked():
    mesh = Mesh(ep=2)

    def local(x, sizes):
        return lax.ragged_all_to_all(x, sizes, "ep", capacity=4)[0]

    args = torch.ones(2, 1), torch.tensor([1, 1])
    with pytest.raises(ValueError, match="varies over 'ep'"):
        ft.shard_map(local, mesh, (P(), P()), P())(*args)
    rows = ft.shard_map(local, mesh, (P(), P()), P("ep"))(*args)  # the same rows from every rank
    assert torch.equal(rows, torch.tensor([1, 1, 0, 0, 1, 1, 0, 0.0]).unsqueeze(1))


def test_refuses_sizes_for_other_ranks():
    with pytest.raises(ValueError, match=r"wanted int64 \(1,\)"):
        lax.ragged_all_to_all(torch.ones(2, 1), torch.tensor([1, 1]), "ep", capacity=4)


def test_rows_in_other_orders():
    sizes = torch.tensor([[1, 2, 0], [3, 0, 1]])
    x = torch.arange(9.0, dtype=torch.float64)
    assert blocks_of(sizes.flatten(), 9).tolist() == [0, 1, 1, 3, 3, 3, 5, 6, 6]
    swapped = copy_rows(x, *swap_blocks(sizes, (1, 0), 9), whole=True)
    assert swapped.tolist() == [0, 3, 4, 5, 1, 2, 6, 7, 8]


@pytest.mark.parametrize("x_dim", [None, 0, 1])
@pytest.mark.parametrize("at_dim", [None, 0])
def test_copies_and_sums_of_rows(x_dim, at_dim):
    if x_dim is None and at_dim is None:
        pytest.skip("nothing is mapped")
    source = torch.tensor([[2, 0, -1, 2, 1], [0, 0, 3, -1, 2]])
    slots = torch.tensor(
        [[[1, -1], [4, -1], [0, 3], [-1, -1]], [[0, 1], [-1, -1], [4, -1], [2, -1]]]
    )
    if at_dim is None:
        source, slots = source[0], slots[0]
    x = torch.randn(*{None: (4, 2), 0: (2, 4, 2), 1: (4, 2, 2)}[x_dim], dtype=torch.float64)
    dims = (x_dim, at_dim, at_dim)

    def oracle(x, source, slots):
        return (source[:, None] == torch.arange(4)).to(x.dtype) @ x

    results = []
    for f in (copy_rows, oracle):
        inside = lambda x, source, slots, f=f: vjp(lambda x: f(x, source, slots), x)[1](
            torch.arange(10.0, dtype=x.dtype).view(5, 2)
        )[0]
        y, pull = vjp(lambda x, f=f: vmap(f, dims)(x, source, slots), x)
        results.append((y, pull(y.sin())[0], vmap(inside, dims)(x, source, slots)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    y = results[0][0].movedim(0, 1) if x_dim == 1 else results[0][0]
    back = vmap(add_rows, (1 if x_dim == 1 else 0, at_dim, at_dim))(y, source, slots)
    mask = (source[..., None] == torch.arange(4)).to(x.dtype)
    torch.testing.assert_close(back, mask.mT @ results[0][0], rtol=1e-12, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "checks",
    [
        ("values", "refusal", "compiled"),
        # no collective is in what Inductor compiles, and "compiled" cuts the same pieces
        pytest.param(("inductor",), marks=pytest.mark.full),
    ],
    ids="-".join,
)
def test_processes(torchrun, checks):
    done = torchrun(Path(__file__).with_name("gloo_ragged.py"), 4, *checks, timeout=180)
    for check in checks:
        assert f"{check}: ok" in done.stdout
