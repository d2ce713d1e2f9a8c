"""Which assignments there is room for, against counts in Python."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import pytest
import torch

import functron as ft
from functron import Mesh, P
from functron.nn.moe.layer import dispatched
from functron.nn.moe.room import (
    ROOMS,
    RowBounds,
    fit_rows,
    needed_room,
    overflowed,
    room_at_least,
    room_problems,
)
from functron.ops.grouped_matmul import grouped_matmul

EXPERTS, CHOICES, TOKENS, EMBED = 8, 2, 6, 3

MESHES = {
    "": ("ep",),
    "ep=2": ("ep",),
    "ep=4": ("ep",),
    "ep=2,tp=2": ("ep", "tp"),
    "dp=2,ep=2 ep": ("ep",),
    "dp=2,ep=2,tp=2": ("tp", "ep", "dp"),
}


def draw(ranks: int, seed: int, uneven: bool):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(ranks * TOKENS, EXPERTS, generator=generator)
    if uneven:
        scores[: 2 * TOKENS, :2] += 1
    experts = scores.argsort(1, descending=True)[:, :CHOICES]
    return experts, torch.rand(ranks * TOKENS, CHOICES, generator=generator) < 0.9


def count_rows(mesh: Mesh, axes: tuple[str, ...], experts, kept) -> dict[int, list[int]]:
    """By rank: the rows that it gets, or passes on, after each axis that rows go along."""
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    local = EXPERTS // math.prod(mesh[axis] for axis in axes)
    held = {rank: [0] * len(axes) for rank in range(mesh.size)}
    for rank, token in itertools.product(range(mesh.size), range(TOKENS)):
        for expert, there in zip(
            experts[rank * TOKENS + token].tolist(),
            kept[rank * TOKENS + token].tolist(),
            strict=True,
        ):
            if not there:
                continue
            left, at = expert // local, dict(places[rank])
            owner = {}
            for axis in reversed(axes):
                left, owner[axis] = divmod(left, mesh[axis])
            for step, axis in enumerate(axes):
                if axis in at:
                    at[axis] = owner[axis]
                held[places.index(at)][step] += 1
    return held


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("where", list(MESHES))
def test_rows_that_fit(where, uneven):
    mesh, axes = Mesh.parse(where.split()[0] if where else ""), MESHES[where]
    experts, kept = draw(mesh.size, 1, uneven)
    held = {rank: max(rows) for rank, rows in count_rows(mesh, axes, experts, kept).items()}
    split = P(mesh.axis_names)
    for room in (*ROOMS[:12], 0.0):

        def program(experts, kept, room=room):
            found = fit_rows(experts, kept, room, num_experts=EXPERTS, axes=axes, most=TOKENS)
            assert found.bounds.rows <= TOKENS * CHOICES * mesh.size
            return found.kept, ft.lax.psum(found.fill, mesh.axis_names)

        found = ft.shard_map(program, mesh, (split, split), (split, P()), check=False)
        left, fill = found(experts, kept)
        most = math.ceil(room * TOKENS * CHOICES) if room else 10**9
        wanted = next(r for r in ROOMS if math.ceil(r * TOKENS * CHOICES) >= max(held.values()))
        assert overflowed(fill, room) == (max(held.values()) > most)
        assert needed_room(fill) == wanted
        assert int(fill.sum()) == mesh.size
        if not overflowed(fill, room):
            assert torch.equal(left, kept)
        # whatever is left fits
        assert max(max(r) for r in count_rows(mesh, axes, experts, left).values()) <= most


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("room", [1.0, 1.125, 1.25, 0.0])
def test_tokens_of_nodes_that_fit(room, most):
    """By hand: rank (node, place) gets a token of its place once if any expert is in the node."""
    mesh, axes = Mesh(ep_node=2, ep=2), ("ep_node", "ep")
    experts, kept = draw(mesh.size, 3, uneven=False)
    half = EXPERTS // 2
    if most:  # all choices of a token in one node
        experts = torch.where(torch.arange(CHOICES) > 0, experts[:, :1] // half * half, experts)
        kept &= (experts != experts[:, :1]) | (torch.arange(CHOICES) == 0)
    held = {}
    for place in itertools.product(range(2), range(2)):
        ranks = [source * 2 + place[1] for source in range(2)]
        rows = [row for rank in ranks for row in range(rank * TOKENS, (rank + 1) * TOKENS)]
        going = [{e // half for e, k in zip(experts[r].tolist(), kept[r].tolist(), strict=True) if k}
                 for r in rows]  # fmt: skip
        held[place] = sum(place[0] in each for each in going)
    # an even draw of 2 of 8 is on both nodes in 4 of 7 cases
    mean = math.ceil(TOKENS * (1 if most else 11 / 7))
    limits: Any = {"num_experts": EXPERTS, "axes": axes, "most": TOKENS, "nodes": most}

    def program(experts, kept):
        found = fit_rows(experts, kept, room, **limits)
        wanted = min(2 * TOKENS, math.ceil(room * mean)) if room else 2 * TOKENS
        assert found.bounds.tokens == wanted
        return found.kept, ft.lax.psum(found.fill, mesh.axis_names)

    split = P(mesh.axis_names)
    left, fill = ft.shard_map(program, mesh, (split, split), (split, P()), check=False)(
        experts, kept
    )
    rows = count_rows(mesh, axes, experts, kept)
    needed = max(
        next(r for r in ROOMS if math.ceil(r * mean) >= max(held.values())),
        next(r for r in ROOMS if math.ceil(r * TOKENS * CHOICES) >= max(map(max, rows.values()))),
    )
    assert needed_room(fill) == needed
    assert torch.equal(left, kept) == (not overflowed(fill, room))


@pytest.mark.parametrize("kind", ["alltoall", "gather", "two-hop"])
@pytest.mark.parametrize("where", list(MESHES))
def test_dispatch_with_just_enough_room(randn, where, kind):
    mesh, axes = Mesh.parse(where.split()[0] if where else ""), MESHES[where]
    experts, kept = draw(mesh.size, 2, uneven=True)
    rows = max(max(r) for r in count_rows(mesh, axes, experts, kept).values())
    x, w = randn(TOKENS * mesh.size, EMBED), randn(EXPERTS, EMBED, EMBED)
    weights, split = randn(TOKENS * mesh.size, CHOICES), P(mesh.axis_names)

    def layer(x, weights, w, experts, kept, most_rows):
        def compute(rows, sizes):
            if most_rows is not None and mesh.size > 1:
                assert rows.shape[0] <= most_rows
            return grouped_matmul(rows, w, sizes).tanh()

        y = dispatched(
            x, experts, weights, kept, compute, num_experts=EXPERTS, axes=axes, kind=kind,
            bounds=RowBounds(most_rows),
        )  # fmt: skip
        return y, ft.lax.psum(y.square().sum(), mesh.axis_names)

    def run(most_rows):
        specs = (split, split, P(axes), split, split)
        mapped = ft.shard_map(
            lambda *args: layer(*args, most_rows=most_rows), mesh, specs, (split, P()), check=False
        )
        loss: Any = torch.func.grad_and_value(
            lambda *args: cast(Any, mapped)(*args)[1], argnums=(0, 1, 2)
        )
        return mapped(x, weights, w, experts, kept)[0], *loss(x, weights, w, experts, kept)[0]

    for got, want in zip(run(rows), run(None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_rooms():
    assert ROOMS[:10] == (1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875, 2, 2.25)
    assert room_at_least(1.0) == 1
    assert room_at_least(1.0001) == 1.125
    assert room_at_least(ROOMS[-1]) == ROOMS[-1]
    assert room_at_least(ROOMS[-1] * 1.01) == 0
    assert [*room_problems(0.0), *room_problems(None), *room_problems(1.25)] == []
    (problem,) = room_problems(1.3)
    assert problem.fix == "take 1.375"
    with pytest.raises(ValueError, match=r"expert_room: got 1.3; .* fix: take 1.375"):
        ft.ModelOptions(expert_room=1.3)


def test_more_than_the_largest_room():
    fill = torch.zeros(2, len(ROOMS) + 1, dtype=torch.int64)
    fill[0, 0] = fill[1, -1] = 1
    assert needed_room(fill) == 0
    assert overflowed(fill, ROOMS[-1])
    assert not overflowed(fill, 0.0)
