"""Windows: reads and writes of parts of memory, against torch's strided views and their tape."""

from __future__ import annotations

import random

import pytest
import torch

from functron.program.equations import (
    Strided,
    as_memory,
    as_value,
    contiguous_strides,
    overlaps,
    read_view,
    strided_of,
    window_of,
    write_view,
)

BASE = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
STEPS = [
    lambda v: v[..., 1:],
    lambda v: v[..., ::2],
    lambda v: v[1::3],
    lambda v: v[-1],
    lambda v: v[:, 1],
    lambda v: v[:, None],
    lambda v: v.transpose(0, -1),
    lambda v: v.flatten(0, 1),
    lambda v: v.unflatten(0, (2, -1)),
    lambda v: v.diagonal(),
    lambda v: v.unfold(-1, 2, 2),
    lambda v: v.view(-1),
    lambda v: v[:0],
]


def _view(rng: random.Random, base: torch.Tensor) -> torch.Tensor:
    found = base
    for _ in range(rng.randrange(4)):
        try:
            made = rng.choice(STEPS)(found)
        except (RuntimeError, IndexError):
            continue
        found = made if made._is_view() else found  # flatten may copy
    return found


@pytest.mark.parametrize("turned", [False, True])
def test_a_window_is_the_view(turned):
    rng, kinds = random.Random(0), set()
    for _ in range(200):
        base = BASE.clone().permute(2, 0, 1) if turned else BASE.clone()
        view = _view(rng, base)
        layout = strided_of(view, base)
        memory = as_memory(base, base)
        assert memory.stride() == contiguous_strides(memory.shape)
        assert read_view(memory, layout).equal(view)
        kinds.add(window_of(memory.shape, layout) is None)

        source = torch.randn(view.shape, dtype=torch.float64).requires_grad_()
        leaf = base.clone().requires_grad_()
        assert leaf.stride() == base.stride()
        written = write_view(as_memory(leaf, leaf), source, layout)
        wanted = base.clone()
        wanted.as_strided(*layout).copy_(source.detach())
        assert as_value(written, base).equal(wanted)
        weights = torch.randn(wanted.shape, dtype=torch.float64)
        total = (as_value(written, base) * weights).sum()
        grads = torch.autograd.grad(total, [leaf, source], allow_unused=True)
        outside = base.clone().fill_(1)
        outside.as_strided(*layout).zero_()
        shown = torch.empty_like(base).copy_(weights).as_strided(*layout)
        for got, value in zip(grads, (weights * outside, shown), strict=True):
            assert torch.zeros_like(value).equal(value) if got is None else got.equal(value)
    assert kinds == {True, False}


def test_a_view_of_everything_costs_reshapes_alone():
    def cut(size, stride, offset=0):
        found = window_of((8, 5), Strided(size, stride, offset))
        assert found is not None
        return found.shape, found.cut, found.order

    assert cut((2, 4, 5), (20, 5, 1)) == ((2, 4, 5), [], [0, 1, 2])
    assert cut((5, 4, 2), (1, 5, 20)) == ((2, 4, 5), [], [2, 1, 0])
    assert cut((2, 5), (20, 1), 10) == ((2, 4, 5), [1], [0, 1])


def test_overlaps_are_known():
    assert overlaps((4, 3), (0, 1))
    assert overlaps((3, 2), (1, 1))
    assert not overlaps((2, 3), (1, 7))
    assert read_view(BASE.view(-1), Strided((3, 2), (1, 1), 2)).equal(
        BASE.view(-1)[2:].as_strided((3, 2), (1, 1))
    )
