"""The balanced order: who holds which chunk, there and back, and its derivative."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import Mesh, P
from functron.nn.context import own_positions, to_balanced, to_contiguous

STREAM = P(None, ("cp", "ulysses"))
MESHES = [
    *(Mesh(cp=n) for n in (1, 2, 3, 4, 5, 8)), Mesh(cp=2, ulysses=2), Mesh(cp=3, ulysses=2),
    Mesh(cp=2, ulysses=3), Mesh(ulysses=2), Mesh(ulysses=2, cp=2),
]  # fmt: skip
ON = pytest.mark.parametrize("mesh", MESHES, ids=str)


def order(size: int, seq: int) -> torch.Tensor:
    """Rank by rank, the places of the tokens that it holds."""
    chunks = torch.arange(seq).chunk(2 * size)
    held = [x for rank in range(size) for x in (chunks[rank], chunks[2 * size - 1 - rank])]
    return torch.cat(held) if size > 1 else torch.arange(seq)


def seq_of(mesh: Mesh) -> int:
    return 2 * mesh.size * 3


@ON
def test_tokens_are_where_positions_say(mesh):
    seq = seq_of(mesh)
    tokens = torch.arange(seq)[None] * 10
    mapped = ft.shard_map(lambda x: to_balanced(x, 1), mesh, STREAM, STREAM)
    want = order(mesh["cp"], seq)
    assert torch.equal(mapped(tokens)[0], 10 * want)

    def places(x):
        return own_positions(x.shape[1], "zigzag", device=x.device)[None].expand(x.shape)

    assert torch.equal(ft.shard_map(places, mesh, STREAM, STREAM)(tokens)[0], want)
    contiguous = ft.shard_map(
        lambda x: own_positions(x.shape[1], "contiguous")[None] + 0 * x, mesh, STREAM, STREAM
    )
    assert torch.equal(contiguous(tokens)[0], torch.arange(seq))


@ON
@pytest.mark.parametrize("dim", [1, -2])
def test_there_and_back(mesh, dim):
    x = torch.randn(2, seq_of(mesh), 3, dtype=torch.float64)
    back = ft.shard_map(lambda x: to_contiguous(to_balanced(x, dim), dim), mesh, STREAM, STREAM)
    assert torch.equal(back(x), x)
    weights = torch.randn_like(x)
    for move, places in (
        (to_balanced, order(mesh["cp"], seq_of(mesh))),
        (to_contiguous, torch.argsort(order(mesh["cp"], seq_of(mesh)))),
    ):
        moved = ft.shard_map(lambda x, move=move: move(x, dim), mesh, STREAM, STREAM)
        got = torch.func.grad(lambda x, moved=moved: (moved(x).sin() * weights).sum())(x)
        want = torch.func.grad(lambda x, at=places: (x[:, at].sin() * weights).sum())(x)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_bytes():
    tokens = torch.empty(2, 16, dtype=torch.int64, device="meta")
    mapped = ft.shard_map(lambda x: to_balanced(x, 1), Mesh(cp=4), STREAM, STREAM)
    rows = ft.trace(mapped)(tokens).cost().collectives
    assert [(row.op, row.count, row.payload_bytes) for row in rows] == [("ppermute", 2, 2 * 4 * 8)]


@pytest.mark.parametrize("move", [to_balanced, to_contiguous])
def test_a_sequence_that_does_not_split(move):
    mapped = ft.shard_map(lambda x: move(x, 1), Mesh(cp=4), STREAM, STREAM)
    with pytest.raises(ValueError, match=r"12 on 4 ranks of 'cp'; wanted a multiple of 8"):
        mapped(torch.zeros(2, 12))
