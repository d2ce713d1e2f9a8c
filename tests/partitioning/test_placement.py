"""Placements and moves: every digit layout, against plain indexing, and bytes against the program's."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import P
from functron.partitioning.placement import (
    Digit,
    ValuePlacement,
    fits,
    from_letters,
    local_shape,
    move,
    move_cost,
    placement_of,
    spec_of,
    steps,
)
from functron.partitioning.propagate import slot_of

SHAPE = (8, 16)
WHOLE = ValuePlacement(((), ()))
MESHES = {"2": {"tp": 2}, "4": {"tp": 4}, "2x2": {"dp": 2, "tp": 2}, "2x4": {"dp": 2, "tp": 4}}


def placements(sizes: dict[str, int]) -> list[ValuePlacement]:
    """Every way in which the axes can split a value of this shape, inside of blocks too."""
    found = []
    outers = [[None, *((d, o) for d in range(2) for o in (1, 2, 4, 8))] for _ in sizes]
    for places in itertools.product(*outers):
        dims: list[list[Digit]] = [[], []]
        for axis, place in zip(sizes, places, strict=True):
            if place is not None:
                dims[place[0]].append(Digit(place[1], axis))
        made = ValuePlacement(tuple(tuple(sorted(row)) for row in dims))
        if all(fits(d, n, sizes) for d, n in zip(made.dims, SHAPE, strict=True)):
            found.append(made)
    return found


def held(x: torch.Tensor, placement: ValuePlacement, sizes, at) -> torch.Tensor:
    """A rank's part, by indices: those whose digits are the rank's coordinates."""
    for dim, digits in enumerate(placement.dims):
        rows = [
            g
            for g in range(SHAPE[dim])
            if all(
                g // (SHAPE[dim] // (outer * sizes[axis])) % sizes[axis] == at[axis]
                for outer, axis in digits
            )
        ]
        x = x.index_select(dim, torch.tensor(rows))
    return x


@given(st.data())
def test_moves_between_any_placements(data):
    sizes = data.draw(st.sampled_from(list(MESHES.values())))
    source, target = (data.draw(st.sampled_from(placements(sizes))) for _ in range(2))
    mesh, x = ft.Mesh(**sizes), torch.arange(128.0, dtype=torch.float64).view(SHAPE)

    def program(x):
        part = move(x, WHOLE, source, sizes)
        return move(part, source, target, sizes)[None]

    axes = tuple(sizes)
    every = ft.shard_map(program, mesh, P(), P(axes), check=False)(x)
    for rank, part in enumerate(every):
        assert torch.equal(part, held(x, target, sizes, mesh.coordinate(rank)))
    assert local_shape(SHAPE, target, sizes) == every.shape[1:]

    def there_and_back(x):
        return move(move(move(x, WHOLE, source, sizes), source, target, sizes),
                    target, WHOLE, sizes)  # fmt: skip

    mapped = ft.shard_map(there_and_back, mesh, P(), P(), check=False)
    grad = torch.func.grad(lambda x: (mapped(x) * x.detach()).sum())(x)
    assert torch.equal(grad, x)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(v, id=k, marks=[pytest.mark.full] if k == "2x2" else [])
        for k, v in MESHES.items()
    ],
)
def test_partial_values_are_reduced_once(sizes):
    mesh, x = ft.Mesh(**sizes), torch.randn(SHAPE, dtype=torch.float64)
    source = ValuePlacement(((), ()), tuple((axis, "sum") for axis in sizes))
    for target in placements(sizes):

        def program(x, target=target):
            shares = x * (1.0 + sum(ft.lax.axis_index(axis) for axis in sizes))
            part = move(shares, source, target, sizes)
            return move(part, target, WHOLE, sizes)

        out = ft.shard_map(program, mesh, P(), P())(x)
        ranks = itertools.product(*(range(n) for n in sizes.values()))
        torch.testing.assert_close(out, x * sum(1.0 + sum(at) for at in ranks))
        back = move_back(target, source, sizes)
        torch.testing.assert_close(ft.shard_map(back, mesh, P(), P())(x), x)


def move_back(target, source, sizes):
    """From a placement to partial sums, and their sum."""

    def program(x):
        part = move(x, WHOLE, target, sizes)
        return move(move(part, target, source, sizes), source, WHOLE, sizes)

    return program


@given(st.data())
def test_bytes_are_those_of_the_program(data):
    sizes = data.draw(st.sampled_from(list(MESHES.values())))
    specs = [P(), P("tp"), P(None, "tp"), P("dp", "tp"), P(("dp", "tp")), P(None, ("dp", "tp"))]
    specs = [spec for spec in specs if "dp" in sizes or "dp" not in str(spec)]
    source, target = (data.draw(st.sampled_from(specs)) for _ in range(2))
    before, after = (placement_of(spec, 2, sizes) for spec in (source, target))

    def program(x):
        return move(x, before, after, sizes)

    mapped = ft.shard_map(program, ft.Mesh(**sizes), (source,), target, check=False)
    traced = ft.trace(mapped)(torch.empty(SHAPE, dtype=torch.float64))
    sent = sum(row.sent_bytes for row in traced.cost().collectives)
    assert move_cost(SHAPE, 8, before, after, sizes) == sent
    assert len(steps(before, after, sizes)) >= (source != target)


def test_specs_there_and_back():
    sizes = {"dp": 2, "tp": 4}
    for spec in (P(), P("dp"), P(None, ("dp", "tp")), P("tp", "dp"), P(("tp", "dp"))):
        assert spec_of(placement_of(spec, 2, sizes), sizes) == spec
    assert spec_of(ValuePlacement(((Digit(2, "tp"),), ())), sizes) is None
    assert spec_of(ValuePlacement(((), ()), (("tp", "sum"),)), sizes) is None
    assert str(ValuePlacement(((Digit(2, "tp"),), ()), (("dp", "max"),))) == (
        "P('tp@2', None), partial max over 'dp'"
    )


@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3), st.data())
def test_letters_of_a_dim(letters, data):
    sizes = {"dp": 2, "tp": 4}
    size = math.prod(letters)
    outer = data.draw(st.sampled_from([o for o in range(1, size + 1) if size % o == 0]))
    axis, names = data.draw(st.sampled_from(["dp", "tp"])), "abc"[: len(letters)]
    digits = (Digit(outer, axis),)
    slot = slot_of(names, dict(zip(names, letters, strict=True)), outer)
    if slot is None or not fits(digits, size, sizes):
        return
    rows = zip(names, letters, strict=True)
    inside = ((n, (Digit(slot[1], axis),) if name == slot[0] else ()) for name, n in rows)
    assert from_letters(inside) == digits
