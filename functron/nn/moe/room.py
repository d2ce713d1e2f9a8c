"""Room for experts' rows: a bound smaller than all tokens of all ranks, and who went over it.

Shapes are static where programs are simulated, traced and compiled, and how many rows a rank's
experts get is data. The worst case is all rows of all ranks; balanced ones are as many as a rank
sends. A *room* is a multiple of the latter, of `ROOMS`, for which shapes are made. Counts are
exchanged before rows: where a rank would get more than there is room for, nobody sends it any, and
`Fit.fill`, summed over ranks, says so. The numbers of such a step are of no use, but finite: take
it again with more, as `functron.training.rooms` does.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from functron.core import compat
from functron.core.errors import Problem
from functron.core.typing import Bool, Int, Tensor
from functron.spmd import collectives as lax

ROOMS: tuple[float, ...] = tuple(2.0**e * (1 + part / 8) for e in range(10) for part in range(8))
"""The rooms that there are: 1, 1.125, ..., 1.875, 2, 2.25, ...: eight for each doubling."""


def room_at_least(wanted: float) -> float:
    """The smallest room of `ROOMS` for so many times the balanced rows; 0, the worst case, beyond.

    >>> room_at_least(1.3), room_at_least(1e6)
    (1.375, 0.0)
    """
    at = bisect.bisect_left(ROOMS, wanted)
    return ROOMS[at] if at < len(ROOMS) else 0.0


def room_problems(room: float | None) -> list[Problem]:
    """A problem where this is a room for which no shapes are made."""
    if room in (None, 0, *ROOMS):
        return []
    near = room_at_least(room)
    return [Problem("expert_room", f"{room:g}", "one of nn.moe.room.ROOMS", f"take {near:g}")]


def rows_for(room: float, balanced: int) -> int:
    """The rows that a room is for, where a rank sends so many."""
    return math.ceil(room * balanced)


def find_part(index: Any, size: int, counts: Iterable[int]) -> tuple[Any, Any]:
    """The rank that has entry `index` of a dim, row-major, and its place in that rank's part.

    Parts are those of `functron.Uneven`.

    >>> find_part(4, 5, (2, 2))  # of parts [0, 1], [2], [3, 4] and padding alone
    (2, 1)

    Args:
        index: an int, or a tensor of them.
        counts: how many ranks cut the dim, for each axis in turn.
    """
    rank = 0
    for count in counts:
        size = -(-size // count)
        rank, index = rank * count + index // size, index % size
    return rank, index


class RowBounds(NamedTuple):
    """How many rows an exchange has room for on every rank, whatever the data.

    Attributes:
        rows: the most kept assignments that a rank gets, or passes on; None: all of all ranks.
        tokens: the most tokens that a rank gets for its node ("two-hop"); None: all.
        nodes: of one token, at most; 0: all, or as many as it has choices.
    """

    rows: int | None = None
    tokens: int | None = None
    nodes: int = 0


class Fit(NamedTuple):
    """Which assignments there is room for; `fit_rows` makes it.

    Attributes:
        kept: bool ``[tokens, choices]``: those that were, without those to ranks that are too full.
        bounds: what there is room for.
        fill: int64 ``[len(ROOMS) + 1]``: 1 at the place in `ROOMS` of the smallest room that this
            rank's rows need, behind all of them where none is enough. Sums over ranks, layers and
            microbatches say how many needed how much.
    """

    kept: Tensor
    bounds: RowBounds
    fill: Tensor


def goes_to(
    owner: Int[Tensor, "tokens choices"], kept: Bool[Tensor, "tokens choices"], count: int
) -> Bool[Tensor, "tokens owners"]:
    """Whether a token has a kept choice of each of `count` owners."""
    each = torch.arange(count, device=owner.device)
    return ((owner.unsqueeze(-1) == each) & kept.unsqueeze(-1)).any(1)


def mean_nodes(num_experts: int, top_k: int, nodes: int, most: int = 0) -> float:
    """How many of `nodes` have some of `top_k` experts, on average over even draws.

    Args:
        most: that a token goes to; 0: any number.

    >>> round(mean_nodes(8, 2, 2), 3)  # 2 of 8, of which the second is on the same node in 3 of 7
    1.571
    """
    others = num_experts - num_experts // nodes
    found = nodes * (1 - math.comb(others, top_k) / math.comb(num_experts, top_k))
    return min(found, float(most or nodes))


def fit_rows(
    experts: Int[Tensor, "tokens choices"],
    kept: Bool[Tensor, "tokens choices"],
    room: float,
    *,
    num_experts: int,
    axes: tuple[str, ...],
    most: int,
    nodes: int | None = None,
) -> Fit:
    """Leave out all assignments to ranks that would get more rows than `room` is for.

    A rank also passes on what has to cross several of `axes`, for which there is as much room; in a
    two-hop exchange it gets tokens for its node before, with room as a multiple of `mean_nodes`.

    Args:
        experts: int64.
        room: of `ROOMS`; 0: for the worst case.
        num_experts: over all ranks.
        axes: the mesh axes that split them.
        most: the most tokens of one rank that an expert can have.
        nodes: in a two-hop exchange, along the first of `axes`, the most that a token goes to, or
            0; None: rows go in one hop.

    Returns:
        See `Fit`. Collectives: of each axis one psum of a number for every rank of `axes`; with
        `nodes`, one more over the first, of a number for each of its ranks.
    """
    sizes = tuple(lax.axis_size(name) for name in axes)
    ranks = math.prod(sizes)
    balanced = min(experts.numel(), num_experts * most)
    worst = ranks * min(experts.numel(), num_experts // ranks * most)
    rows = min(worst, rows_for(room, balanced)) if room else worst
    owner = torch.div(experts, num_experts // ranks, rounding_mode="floor").flatten()
    counts = owner.new_zeros(ranks).scatter_add(0, owner, kept.flatten().to(owner.dtype))
    counts = counts.view(sizes)
    fits = torch.ones_like(counts, dtype=torch.bool)
    needed = counts.new_zeros(())
    for position, name in enumerate(axes):
        counts = lax.psum(counts, name)
        # what each rank holds after rows went along this axis: for all ranks behind it on others
        held = counts.flatten(position + 1).sum(-1) if position + 1 < len(axes) else counts
        fits = fits & (held <= rows).view(*held.shape, *[1] * (len(axes) - position - 1))
        here = lax.axis_index(axes[: position + 1])
        own = held.flatten().index_select(0, compat.constant(here, held.device).view(1))
        needed = torch.maximum(needed, own.squeeze(0))
    bounds = [rows_for(each, balanced) for each in ROOMS]
    place = (compat.constant(bounds, needed.device) < needed).sum()
    tokens = None
    if nodes is not None:
        count, each = sizes[0], experts.shape[0]
        node = torch.div(experts, num_experts // count, rounding_mode="floor")
        mean = math.ceil(each * mean_nodes(num_experts, experts.shape[1], count, nodes))
        held = lax.psum(goes_to(node, kept, count).sum(0), axes[0])
        tokens = min(each * count, rows, rows_for(room, mean)) if room else min(each * count, rows)
        bounds = [rows_for(x, mean) for x in ROOMS]
        here = compat.constant(lax.axis_index(axes[0]), held.device).view(1)
        own = held.index_select(0, here).squeeze(0)
        place = torch.maximum(place, (compat.constant(bounds, held.device) < own).sum())
        fits = fits & (held <= tokens).view(-1, *[1] * (len(axes) - 1))
    fill = (torch.arange(len(ROOMS) + 1, device=needed.device) == place).to(torch.int64)
    made = RowBounds(rows, tokens, nodes or 0)
    if worst == rows and tokens in (None, experts.shape[0] * sizes[0]):
        return Fit(kept, made, fill)
    return Fit(kept & fits.flatten().index_select(0, owner).view(kept.shape), made, fill)


def overflowed(fill: Int[Tensor, "*layers rooms"], room: float) -> Bool[Tensor, ""]:
    """Whether some rank had more rows than `room` is for, by the summed `Fit.fill` of all ranks."""
    if not room:
        return torch.zeros_like(fill, dtype=torch.bool).any()
    return (fill[..., ROOMS.index(room) + 1 :] > 0).any()


def needed_room(fill: Int[Tensor, "*layers rooms"]) -> float:
    """The room that would have been enough, on the host: that of the fullest rank; 0 if none is."""
    found = fill.detach().reshape(-1, fill.shape[-1]).sum(0).nonzero()
    last = int(found[-1]) if len(found) else 0
    return ROOMS[last] if last < len(ROOMS) else 0.0
