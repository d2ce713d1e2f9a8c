"""Sorting by expert, and rows there and back: emulated kernels against loops and float64."""

from __future__ import annotations

import math

import pytest
import torch

from functron.ops import moe
from functron.ops import moe as moe_sort
from functron.ops.moe import (
    ADD_ROWS,
    PERMUTE,
    SORT,
    UNPERMUTE,
    UNPERMUTE_BACKWARD,
    sorted_assignments,
)
from tests.kernels.conformance import CHECKS, Case, conform
from tests.kernels.emulator import Emulator, emulated

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def routing(tokens: int, choices: int, experts: int, keep: float = 1.0):
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :choices]
    return chosen, torch.rand(tokens, choices, generator=generator) < keep


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# ---- sorting


def by_hand(experts, kept, num_experts: int, rows: int):
    """Python's sort, which is stable."""
    flat = list(zip(experts.flatten().tolist(), kept.flatten().tolist(), strict=True))
    keys = [e if keep else num_experts for e, keep in flat]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    slots = [-1] * len(keys)
    for row, assignment in enumerate(order[:rows]):
        slots[assignment] = row
    sizes = [keys.count(e) for e in range(num_experts)]
    return order[:rows], [a // experts.shape[1] for a in order[:rows]], slots, sizes


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "keep", "room"),
    [
        (1, 1, 1, 1.0, 1.0),
        (7, 3, 8, 1.0, 1.0),
        (500, 8, 40, 0.7, 1.0),  # several chunks
        (1100, 2, 3, 0.5, 0.6),
        (300, 5, 300, 1.0, 0.3),
        (130, 4, 64, 0.0, 0.5),
        (0, 2, 4, 1.0, 1.0),
        (2, 33, 33, 1.0, 1.0),
    ],
)
def test_sort(tokens, choices, experts, keep, room):
    chosen, kept = routing(tokens, choices, experts, keep)
    rows = math.ceil(room * tokens * choices)
    args = (chosen, kept, experts, rows)
    got = emulated(moe_sort._sort_kernel, *args)
    wanted = by_hand(*args)
    for a, b in zip(got, wanted, strict=True):
        assert a.flatten().tolist() == b
    for a, b in zip(got, sorted_assignments(*args), strict=True):
        assert torch.equal(a, b)


def test_sort_where_all_choose_one():
    chosen, kept = torch.full((600, 2), 5), torch.ones(600, 2, dtype=torch.bool)
    order, tokens, slots, sizes = emulated(moe_sort._sort_kernel, chosen, kept, 9, 1200)
    assert torch.equal(order, torch.arange(1200))
    assert torch.equal(tokens, torch.arange(1200) // 2)
    assert torch.equal(slots.flatten(), order)
    assert sizes.tolist() == [0] * 5 + [1200] + [0] * 3


def test_sort_of_more_chunks_than_lanes():
    chosen, kept = routing(40_000, 1, 2, 0.9)
    got = moe_sort._sort_kernel(Emulator(), chosen, kept, 2, 40_000)
    for a, b in zip(got, sorted_assignments(chosen, kept, 2, 40_000), strict=True):
        assert torch.equal(a, b)


def test_sort_of_views():
    chosen, kept = routing(50, 6, 8)
    args = (chosen[:, ::2], kept[:, ::2], 8, 150)
    for a, b in zip(emulated(moe_sort._sort_kernel, *args), sorted_assignments(*args), strict=True):
        assert torch.equal(a, b)


def test_sort_of_too_many_experts():
    with pytest.raises(ValueError, match="got 5000 experts; wanted at most 4096; fix: "):
        moe_sort._sort_kernel(Emulator(), *routing(2, 2, 5000), 5000, 4)


# ---- rows


def order_of(tokens: int, choices: int, experts: int, keep: float = 1.0, room: float = 1.0):
    """order, source and slots of some routing; rows that have no room, and padding, are -1."""
    rows = math.ceil(room * tokens * choices)
    order, source, slots, _ = sorted_assignments(
        *routing(tokens, choices, experts, keep), experts, rows
    )
    order, source = (torch.cat([x, x.new_full((3,), -1)]) for x in (order, source))
    return order, source, slots


def loop(rows, weights, slots):
    """In float64, choice by choice."""
    y = torch.zeros(slots.shape[0], rows.shape[1], dtype=torch.float64)
    for n in range(slots.shape[0]):
        for j in range(slots.shape[1]):
            if slots[n, j] >= 0:
                weight = 1.0 if weights is None else weights[n, j].double()
                y[n] = y[n] + weight * rows[slots[n, j]].double()
    return y


def assert_rounded(got, exact, size, terms: int):
    """The tolerance of sums of so many float32 terms, rounded once; `size` is that of absolute values."""
    info = torch.finfo(got.dtype)
    bound = info.eps / 2 * exact.abs() + (terms + 1) * 2**-24 * size + info.tiny * info.eps
    assert ((got.double() - exact).abs() <= bound).all()


ROUTINGS = [
    (1, 1, 1, 1.0, 1.0),
    (9, 3, 8, 1.0, 1.0),
    (9, 3, 8, 0.6, 0.7),
    (5, 40, 40, 0.2, 1.0),  # more choices than lanes, most of them not kept
]
WIDTHS = (1, 7, 64, 1040, 1100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routed", ROUTINGS, ids=str)
@pytest.mark.parametrize("dim", WIDTHS)
def test_there_and_back(dim, routed, dtype):
    order, source, slots = order_of(*routed)
    x, weights = draw(routed[0], dim, dtype=dtype), draw(*slots.shape, dtype=torch.float32, seed=1)
    seeds = (0, 1, 2) if dim < 1000 else (0, 3)
    rows = emulated(PERMUTE.kernel, x, source, slots, seeds=seeds)
    assert torch.equal(rows[:-3], x[source[:-3]])
    assert (rows[-3:] == 0).all()

    rows = draw(*rows.shape, dtype=dtype, seed=2)
    y = emulated(UNPERMUTE.kernel, rows, weights, order, slots, seeds=seeds)
    size = loop(rows.abs(), weights.abs(), slots)
    assert_rounded(y, loop(rows, weights, slots), size, slots.shape[1])
    y = emulated(ADD_ROWS.kernel, rows, source, slots, seeds=seeds)
    assert_rounded(y, loop(rows, None, slots), loop(rows.abs(), None, slots), slots.shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routed", ROUTINGS, ids=str)
@pytest.mark.parametrize("dim", WIDTHS)
def test_gradients(dim, routed, dtype):
    order, _, slots = order_of(*routed)
    rows, dy = draw(order.shape[0], dim, dtype=dtype), draw(routed[0], dim, dtype=dtype, seed=1)
    weights = draw(*slots.shape, dtype=torch.float32, seed=2)
    wide = rows.double().requires_grad_(), weights.double().requires_grad_()
    wanted = torch.autograd.grad(loop(wide[0], wide[1], slots), wide, dy.double())
    args = (dy, rows, weights, order, slots)
    d_rows, d_weights = emulated(moe._unpermute_backward_kernel, *args)
    assert_rounded(d_rows, wanted[0], wanted[0].abs(), 1)
    size = torch.autograd.grad(loop(wide[0].abs(), wide[1], slots), wide[1], dy.double().abs())[0]
    assert_rounded(d_weights, wanted[1], size, dim)
    other_rows, other_weights = moe._unpermute_backward(*args)
    assert_rounded(other_rows, wanted[0], wanted[0].abs(), 1)
    assert_rounded(other_weights, wanted[1], size, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_where_memory_is_not_aligned(dtype):
    order, source, slots = order_of(6, 3, 8)
    x, rows = draw(6, 72, dtype=dtype), draw(order.shape[0], 72, dtype=dtype, seed=1)
    weights = draw(6, 3, dtype=torch.float32, seed=2)

    def unaligned(x):
        memory = torch.zeros(x.shape[0], 79, dtype=dtype)
        memory[:, 3:75] = x
        return memory[:, 3:75]

    for kernel, args in (
        (PERMUTE.kernel, (x, source, slots)),
        (UNPERMUTE.kernel, (rows, weights, order, slots)),
        (moe._unpermute_backward_kernel, (x, rows, weights, order, slots)),
    ):
        other = [unaligned(a) if a.dtype == dtype and a.shape[-1] == 72 else a for a in args]
        transposed = [a.t().contiguous().t() for a in args[:1]]
        want = emulated(kernel, *args)
        for same in (other, [*transposed, *args[1:]]):
            got = emulated(kernel, *same)
            for a, b in zip(
                *[x if isinstance(x, tuple) else (x,) for x in (got, want)], strict=True
            ):
                assert torch.equal(a, b)


def test_rows_that_no_token_has_may_be_nan():
    """Rows beyond the last are whatever an exchange left there."""
    order, _, slots = order_of(4, 2, 4)
    rows = draw(order.shape[0], 8, dtype=torch.float32)
    rows[-3:] = math.nan
    weights = draw(4, 2, dtype=torch.float32)
    assert emulated(UNPERMUTE.kernel, rows, weights, order, slots).isfinite().all()
    args = (draw(4, 8, dtype=torch.float32), rows, weights, order, slots)
    d_rows, d_weights = emulated(moe._unpermute_backward_kernel, *args)
    assert (d_rows[-3:] == 0).all()
    assert d_weights.isfinite().all()


@pytest.mark.parametrize(("tokens", "rows", "dim"), [(0, 0, 8), (0, 3, 8), (3, 0, 8), (3, 6, 0)])
def test_nothing_to_move(tokens, rows, dim):
    source = torch.full((rows,), -1)
    slots = torch.full((tokens, 2), -1)
    x, there = torch.ones(tokens, dim), torch.ones(rows, dim)
    weights = torch.ones(tokens, 2)
    y = emulated(PERMUTE.kernel, x, source, slots)
    assert y.shape == (rows, dim)
    assert (y == 0).all()
    y = emulated(UNPERMUTE.kernel, there, weights, source, slots)
    assert y.shape == (tokens, dim)
    assert (y == 0).all()
    d_rows, d_weights = emulated(moe._unpermute_backward_kernel, x, there, weights, source, slots)
    assert (d_rows.shape, d_weights.shape) == (there.shape, weights.shape)
    assert (d_rows == 0).all()
    assert (d_weights == 0).all()


def test_what_kernels_refuse():
    order, source, slots = order_of(2, 2, 4)
    with pytest.raises(TypeError, match=r"moe_permute: got torch\.float64"):
        PERMUTE.kernel(Emulator(), draw(2, 4), source, slots)
    wide = torch.zeros(1, dtype=torch.float32).expand(2, 2**30)
    with pytest.raises(ValueError, match="rows of 1073741824 elements; wanted fewer"):
        moe._permute_grid(2, wide.shape[1])
    assert order.shape == source.shape


def cases() -> list[Case]:
    order, source, slots = order_of(5, 3, 4, 0.7, 0.7)
    x, rows, weights = draw(5, 4), draw(order.shape[0], 4, seed=1), draw(5, 3, seed=2)
    return [
        Case(PERMUTE, PERMUTE.reference, (x, source, slots)),
        Case(ADD_ROWS, ADD_ROWS.reference, (rows, source, slots)),
        Case(UNPERMUTE, UNPERMUTE.reference, (rows, weights, order, slots), moving=(0, 1)),
        Case(
            UNPERMUTE_BACKWARD,
            moe._unpermute_backward,
            (x, rows, weights, order, slots),
            moving=(0, 1, 2),
        ),
    ]


PERMUTED, ADDED, UNPERMUTED, BACKWARD = cases()


@conform([PERMUTED, UNPERMUTED])
def test_conformance(case, check):
    check(case)


@pytest.mark.parametrize("case", [ADDED, BACKWARD], ids=str)
@pytest.mark.parametrize("name", [name for name in CHECKS if "compiled" not in name])
def test_conformance_of_gradients(case, name):
    """They are compiled in gradients of the others."""
    CHECKS[name](case)


def test_sort_is_an_op():
    args = (*routing(5, 3, 4), 4, 12)
    case = Case(SORT, sorted_assignments, args)
    CHECKS["values"](case)
    CHECKS["fakes"](case)
    chosen, kept = (torch.stack([x, x.flip(0)]) for x in args[:2])
    got = torch.func.vmap(lambda a, b: SORT(a, b, 4, 12))(chosen, kept)
    for i in range(2):
        for a, b in zip(got, sorted_assignments(chosen[i], kept[i], 4, 12), strict=True):
            assert torch.equal(a[i], b)
