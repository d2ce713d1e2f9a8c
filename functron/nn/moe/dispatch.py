"""Bringing tokens to their experts, and what these make of them back.

Every rank has tokens of its own and experts of its own. Sorted by expert, a token's k assignments
are rows; rows go to the owners of their experts and come back, where they are weighted and added
up. Weights never leave the rank of their token, so the router's gradient arises there, whole.

| kind       | there                                     | back                    |
|------------|-------------------------------------------|-------------------------|
| "alltoall" | each row to the owner of its expert       | each row to its token   |
| "gather"   | all tokens and their routing to all ranks | sums, by reduce-scatter |

The first sends k copies of a token, the second n: gathering is for few ranks, or for many experts
to a token. Shapes are static: results have room for the worst case, all tokens of all ranks on one
rank's experts, but what is sent between processes, and what is multiplied, are real rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from functron import compat
from functron.errors import Problem, raise_problems
from functron.nn.moe.config import Dispatch
from functron.ops.kernels import AUTO, Kernels
from functron.ops.moe_permute import PERMUTE, UNPERMUTE
from functron.ops.moe_sort import SORT, sorted_assignments
from functron.spmd import collectives as lax
from functron.spmd.axes import lookup
from functron.spmd.ragged import arrived, exchange
from functron.spmd.rows import add_rows, copy_rows, pick, swap_blocks
from functron.typing import Bool, Float, Int, Tensor

Compute = Callable[[Tensor, Tensor], Tensor]
"""``(rows [R, D], sizes int64 [experts])`` to ``[R, D_out]``: rows are sorted by expert, and those
beyond the sum of sizes belong to none."""


class Order(NamedTuple):
    """The assignments of some tokens, sorted by expert; `sort_by_expert` makes it.

    Attributes:
        assignment: int64 ``[R]``: of each row, token * choices + choice.
        token: int64 ``[R]``.
        slots: int64 ``[N, choices]``: the row of each assignment; -1 where there is no room.
        sizes: int64 ``[experts]``: the rows of each expert; after them come dropped assignments.
        whole: every assignment has a row.
    """

    assignment: Tensor
    token: Tensor
    slots: Tensor
    sizes: Tensor
    whole: bool


def sort_by_expert(
    experts: Int[Tensor, "tokens choices"],
    kept: Bool[Tensor, "tokens choices"],
    num_experts: int,
    *,
    rows: int,
    kernels: Kernels = AUTO,
) -> Order:
    """Sort assignments by expert, tokens in order within each, and those not kept last.

    Args:
        experts: int64 ``[N, k]``.
        kept: bool ``[N, k]``.
        num_experts: experts.
        rows: how many to make room for: at least as many as are kept, at most N k.
        kernels: of ``"moe_sort"``.
    """
    sort = SORT if kernels.takes("moe_sort", experts) else sorted_assignments
    found = sort(experts, kept, num_experts, rows)
    return Order(*found, whole=rows >= experts.numel())


def permute(
    x: Float[Tensor, "tokens dim"], order: Order, *, kernels: Kernels = AUTO
) -> Float[Tensor, "rows dim"]:
    """The token of every row. Transpose: the sum over a token's rows. Gathers both ways.

    By kernels if they take ``"moe_permute"``.
    """
    if kernels.takes("moe_permute", x):
        return PERMUTE(x, order.token, order.slots)
    return copy_rows(x, order.token, order.slots, whole=order.whole)


def unpermute(
    rows: Float[Tensor, "rows dim"],
    weights: Float[Tensor, "tokens choices"],
    order: Order,
    *,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "tokens dim"]:
    """y[n] = sum over a token's assignments j of weights[n, j] times its row.

    In the wider dtype; by kernels, if they take ``"moe_permute"``, rounded to that of rows. Rows of
    assignments that are not kept must have weight 0.
    """
    if kernels.takes("moe_permute", rows, weights):
        return UNPERMUTE(rows, weights, order.assignment, order.slots)
    if compat.transforms_active():
        scaled = rows * _of_rows(weights, order).unsqueeze(1)
        return add_rows(scaled, order.token, order.slots, whole=order.whole)
    out: Any = _Unpermute.apply(rows, weights, order)
    return out


def _of_rows(values: Tensor, order: Order) -> Tensor:
    """``[N, choices]`` by assignment as ``[R]`` by row."""
    places = order.slots.flatten().unsqueeze(1)
    return copy_rows(values.flatten(), order.assignment, places, whole=order.whole)


class _Unpermute(Function):
    """`unpermute` on torch's tape, without the intermediates that the tape would keep."""

    @staticmethod
    def forward(rows, weights, order):
        total = pick(rows, order.slots[:, 0], order.whole) * weights[:, :1]
        for choice in range(1, weights.shape[1]):
            row = pick(rows, order.slots[:, choice], order.whole)
            total.addcmul_(row.to(total.dtype), weights[:, choice : choice + 1])
        return total

    @staticmethod
    def setup_context(ctx, inputs, output):
        rows, weights, ctx.order = inputs
        ctx.save_for_backward(rows, weights)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        (rows, weights), order = ctx.saved_tensors, ctx.order
        gradient = copy_rows(cotangents[0], order.token, order.slots, whole=order.whole)
        of_row = _of_rows(weights, order).unsqueeze(1)
        product = (gradient * rows).sum(1, dtype=weights.dtype)
        at = order.slots.flatten()
        for_weights = add_rows(product, order.assignment, at.unsqueeze(1), whole=order.whole)
        if torch.is_grad_enabled():
            gradient = gradient * of_row
        else:
            gradient.mul_(of_row)
        return gradient.to(rows.dtype), for_weights.view(weights.shape), None


def dispatched(
    x: Float[Tensor, "tokens dim"],
    experts: Int[Tensor, "tokens choices"],
    weights: Float[Tensor, "tokens choices"],
    kept: Bool[Tensor, "tokens choices"],
    compute: Compute,
    *,
    num_experts: int,
    axes: tuple[str, ...] = ("ep",),
    kind: Dispatch = "alltoall",
    per_expert: int | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "tokens out_dim"]:
    """y[n] = sum over the kept choices j of weights[n, j] * expert experts[n, j] of x[n].

    Args:
        x: ``[N, D]``, this rank's tokens.
        experts: int64 ``[N, k]``, no expert twice among a token's kept ones.
        weights: ``[N, k]``.
        kept: bool ``[N, k]``; others are computed nowhere and sent nowhere.
        compute: what this rank's experts do with their rows.
        num_experts: experts over all ranks.
        axes: the mesh axes over which tokens, and experts, are split: rank r of them, row-major,
            owns experts r E / n to (r + 1) E / n - 1.
        kind: see the module.
        per_expert: the most tokens among one rank's N that an expert can have, where routing limits
            them (capacity); it makes results smaller. None: all N.
        meanwhile: called when tokens are on their way to other ranks, before they are waited for:
            for what the program has to do besides, such as an expert of all tokens.
        kernels: of ``"moe_permute"`` and ``"moe_sort"``.

    Returns:
        ``[N, D_out]`` in x's dtype. Collectives: "alltoall": one of ``[E]`` integers, and two of
        rows, forward, and two of rows backward; "gather": all-gathers of x, experts, weights and
        kept, and a reduce-scatter of N n rows, forward, and their transposes backward. With one
        rank, none, and N k rows.

    Raises:
        ValueError: experts do not divide over the ranks.
    """
    ranks = lax.axis_size(axes)
    if num_experts % ranks:
        wanted = f"a multiple of {ranks}, the ranks of {axes}"
        fix = "choose another number of experts, or split them over fewer axes"
        raise_problems("dispatch", [Problem("num_experts", str(num_experts), wanted, fix)])
    weights = torch.where(kept, weights, torch.zeros_like(weights))
    most = x.shape[0] if per_expert is None else min(per_expert, x.shape[0])
    if ranks > 1 and kind == "gather":
        meanwhile()
        return _gathered(
            x, experts, weights, kept, compute, num_experts // ranks, axes, most, kernels
        )
    rows = min(experts.numel(), num_experts * most)
    order = sort_by_expert(experts, kept, num_experts, rows=rows, kernels=kernels)
    permuted = permute(x, order, kernels=kernels)
    if ranks == 1:
        meanwhile()
        made = compute(permuted, order.sizes)
    else:
        room = min(x.shape[0] * experts.shape[1], num_experts // ranks * most)
        made = _exchanged(permuted, order.sizes, compute, axes, ranks * room, meanwhile, kernels)
    return unpermute(made, weights, order, kernels=kernels).to(x.dtype)


def _exchanged(
    rows: Tensor,
    sizes: Tensor,
    compute: Compute,
    axes: tuple[str, ...],
    capacity: int,
    meanwhile: Callable[[], None],
    kernels: Kernels,
) -> Tensor:
    """What experts make of this rank's rows, sorted by expert over all ranks; rows there and back.

    `capacity` bounds the rows that one rank's experts have.
    """
    found = lookup(axes)
    ranks = tuple(axis.size for axis in found)
    by_rank = tuple(range(len(ranks) + 1))  # dims of sizes: the other rank, then the expert there
    by_expert = (by_rank[-1], *by_rank[:-1])
    outgoing = sizes.view(*ranks, sizes.shape[0] // lax.axis_size(axes))
    there, incoming, layout = exchange(rows, outgoing, found, capacity=capacity, wait=False)
    meanwhile()
    there = _reordered(arrived(there, found), incoming, layout, by_expert, kernels)
    made = compute(there, incoming.flatten(0, -2).sum(0))
    made = _reordered(made, incoming, by_expert, by_rank, kernels)
    back, returned, layout = exchange(made, incoming, found, capacity=rows.shape[0])
    back = _reordered(back, returned, layout, by_rank, kernels)
    missing = rows.shape[0] - back.shape[0]  # processes return only what they were sent
    return torch.cat([back, back.new_zeros(missing, back.shape[1])]) if missing else back


def _reordered(
    rows: Tensor, sizes: Tensor, now: tuple[int, ...], wanted: tuple[int, ...], kernels: Kernels
) -> Tensor:
    """Rows in blocks by the dims `now` of sizes, in blocks by the dims `wanted`."""
    if [d for d in now if sizes.shape[d] > 1] == [d for d in wanted if sizes.shape[d] > 1]:
        return rows
    dims = tuple(now.index(dim) for dim in wanted)
    source, slots = swap_blocks(sizes.permute(now), dims, rows.shape[0])
    if kernels.takes("moe_permute", rows):
        return PERMUTE(rows, source, slots)
    return copy_rows(rows, source, slots, whole=True)


def _gathered(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    kept: Tensor,
    compute: Compute,
    local: int,
    axes: tuple[str, ...],
    most: int,
    kernels: Kernels,
) -> Tensor:
    """All tokens on every rank, which adds up what its own experts make of them."""
    ranks, dtype = lax.axis_size(axes), x.dtype
    x, experts, weights, kept = (
        lax.all_gather(value, axes, tiled=True) for value in (x, experts, weights, kept)
    )
    here = experts - lax.axis_index(axes) * local
    mine = kept & (here >= 0) & (here < local)
    rows = min(x.shape[0] * min(experts.shape[1], local), local * most * ranks)
    here = torch.where(mine, here, 0)
    order = sort_by_expert(here, mine, local, rows=rows, kernels=kernels)
    weights = torch.where(mine, weights, torch.zeros_like(weights))
    made = compute(permute(x, order, kernels=kernels), order.sizes)
    y = unpermute(made, weights, order, kernels=kernels)
    return lax.psum_scatter(y.to(dtype), axes, tiled=True)
