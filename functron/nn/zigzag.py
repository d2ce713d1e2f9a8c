"""The balanced order of a sequence that is split over ranks: an early and a late part on each.

Under causal attention the rank with the end of a sequence has most to do. So the sequence is cut
into 2n chunks for the n ranks of `cp`, and rank r holds chunks r and 2n - 1 - r, in this order
(Brandon et al. 2023, striped attention; the zig-zag of Llama 3's context parallelism):

| cp = 2     | rank 0       | rank 1       |
|------------|--------------|--------------|
| contiguous | chunks 0, 1  | chunks 2, 3  |
| zigzag     | chunks 0, 3  | chunks 1, 2  |

With a second axis `ulysses`, cp's rank is a group of ranks that hold consecutive slices of what it
holds: joined in rank order, these are its early half and its late half.
"""

from __future__ import annotations

from typing import Literal

import torch

from functron.core.errors import refuse
from functron.core.typing import Int, Tensor
from functron.spmd import collectives as lax

Order = Literal["contiguous", "zigzag"]


def positions(
    local_seq: int,
    order: Order,
    *,
    axis: str = "cp",
    ulysses: str = "ulysses",
    device: torch.device | str = "cpu",
) -> Int[Tensor, " seq"]:
    """The places in the whole sequence, int64 ``[local_seq]``, of this rank's tokens.

    ``positions(2, "zigzag")`` is [0, 1, 6, 7] on both `ulysses` ranks of rank 0 together, on
    ``Mesh(cp=2, ulysses=2)``.

    Raises:
        ValueError: 2 cp does not divide the sequence; order is none of the two.
    """
    contiguous = lax.global_index(local_seq, (axis, ulysses), device=device)
    if order == "contiguous":
        return contiguous
    if order != "zigzag":
        refuse("positions", "order", repr(order), "contiguous or zigzag")
    size, chunk = lax.axis_size(axis), _chunk(local_seq, axis, ulysses)
    rank = lax.axis_index(axis)
    place = contiguous - rank * 2 * chunk  # in what the whole cp rank holds
    late = (2 * size - 1 - rank) * chunk + place - chunk
    return torch.where(place < chunk, rank * chunk + place, late)


def to_balanced(x: Tensor, dim: int, axis: str = "cp", ulysses: str = "ulysses") -> Tensor:
    """x split contiguously over ``(axis, ulysses)`` along `dim`, in the balanced order instead.

    Varying -> varying, of the same shape. Two ppermutes over `axis` of half of what its rank holds
    each; the ranks of `ulysses` first all-gather that (result: ulysses times x's bytes) and in the
    end take their slices, which is meant for token ids and other small values. Backward: the same
    exchange back, and a reduce-scatter. Identity where `axis` has size 1.

    Raises:
        ValueError: 2 cp does not divide the sequence.
    """
    size, dim = lax.axis_size(axis), dim % x.dim()
    chunk = _chunk(x.shape[dim], axis, ulysses)
    if size == 1:
        return x
    first, second = _whole(x, dim, ulysses).split(chunk, dim)
    even, odd = _routes(size)
    first, second = lax.ppermute(first, axis, even), lax.ppermute(second, axis, odd)
    # an even rank's early chunk and an odd rank's late chunk have even numbers
    return own_part(_ordered(first, second, axis, dim), x.shape[dim], dim, ulysses)


def to_contiguous(x: Tensor, dim: int, axis: str = "cp", ulysses: str = "ulysses") -> Tensor:
    """The inverse of `to_balanced`, at the same cost.

    Raises:
        ValueError: 2 cp does not divide the sequence.
    """
    size, dim = lax.axis_size(axis), dim % x.dim()
    chunk = _chunk(x.shape[dim], axis, ulysses)
    if size == 1:
        return x
    early, late = _whole(x, dim, ulysses).split(chunk, dim)
    halves = _ordered(early, late, axis, dim).split(chunk, dim)
    parts = [
        lax.ppermute(half, axis, [(target, source) for source, target in route])
        for half, route in zip(halves, _routes(size), strict=True)
    ]
    return own_part(torch.cat(parts, dim), x.shape[dim], dim, ulysses)


def _chunk(local_seq: int, axis: str, ulysses: str) -> int:
    """The length of one of the 2n chunks."""
    size, per_rank = lax.axis_size(axis), local_seq * lax.axis_size(ulysses)
    if per_rank % 2 and size > 1:
        got = f"{per_rank * size} on {size} ranks of {axis!r}"
        wanted = f"a multiple of {2 * size}: two chunks for each"
        fix = 'pad it, or use the "contiguous" order'
        refuse("the zigzag order cannot split the sequence", "sequence length", got, wanted, fix)
    return per_rank // 2 if size > 1 else per_rank


def _routes(size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where ranks send their chunk 2r, and where their chunk 2r + 1."""
    home = [min(chunk, 2 * size - 1 - chunk) for chunk in range(2 * size)]
    return [(r, home[2 * r]) for r in range(size)], [(r, home[2 * r + 1]) for r in range(size)]


def _ordered(even: Tensor, odd: Tensor, axis: str, dim: int) -> Tensor:
    """(even, odd) joined on ranks of even number, (odd, even) on the others; its own inverse."""
    is_even = torch.as_tensor(lax.axis_index(axis) % 2 == 0, device=even.device)
    return torch.cat([torch.where(is_even, even, odd), torch.where(is_even, odd, even)], dim)


def _whole(x: Tensor, dim: int, ulysses: str) -> Tensor:
    return lax.all_gather(x, ulysses, axis=dim, tiled=True)


def own_part(x: Tensor, size: int, dim: int, axis: str) -> Tensor:
    """Of a value that all ranks of `axis` hold whole, this rank's `size` rows of dim `dim`.

    Replicated -> varying; no collectives. A sum over all parts but one masked, not an index:
    Inductor (torch 2.13) compiles the gradient of an index that differs between simulated ranks to
    an addition into memory that several of them share.
    """
    count = lax.axis_size(axis)
    if count == 1:
        return x
    parts = x.unflatten(dim, (count, size))
    mine = torch.arange(count, device=x.device) == lax.axis_index(axis)
    mine = mine.view(-1, *[1] * (x.dim() - dim))
    return torch.where(mine, parts, torch.zeros((), dtype=x.dtype, device=x.device)).sum(
        dim, dtype=x.dtype
    )
