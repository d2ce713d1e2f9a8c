"""Moving rows by gathers alone, in both directions.

A matrix of zeros and at most one 1 per row copies rows: y[r] = x[source[r]]. Its transpose adds up
the copies of each row. Torch's own derivative of indexing scatters with atomic additions, in no
fixed order; here the caller also says where every row went, so the transpose is a gather too: the
same bits on every run, and no atomics.

Copying tokens to their experts, bringing rows that arrived from many ranks into order, and the ways
back are all of this kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from functron import compat
from functron.typing import Int, Shaped, Tensor


def copy_rows(
    x: Shaped[Tensor, "rows *rest"],
    source: Int[Tensor, " slots"],
    slots: Int[Tensor, "rows copies"],
    *,
    whole: bool = False,
) -> Shaped[Tensor, "slots *rest"]:
    """y[r] = x[source[r]], and zeros where ``source[r] < 0``.

    Args:
        x: ``[N, ...]``.
        source: int64 ``[R]``, from -1 to N - 1.
        slots: int64 ``[N, K]``: all r with ``source[r] == n``, in any order, then -1.
        whole: neither has a -1.

    Returns:
        ``[R, ...]``. Transpose: `add_rows`. No collectives.
    """
    out: Any = _Copy.apply(x, source, slots, whole)
    return out


def add_rows(
    y: Shaped[Tensor, "slots *rest"],
    source: Int[Tensor, " slots"],
    slots: Int[Tensor, "rows copies"],
    *,
    whole: bool = False,
) -> Shaped[Tensor, "rows *rest"]:
    """x[n] = sum over j of y[slots[n, j]], without those below 0: the transpose of `copy_rows`."""
    out: Any = _Add.apply(y, source, slots, whole)
    return out


def inverse(order: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """The permutation p with ``p[order[i]] == i``."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.zeros_like(order).scatter(0, order, places)


def blocks_of(sizes: Int[Tensor, "*batch blocks"], rows: int) -> Int[Tensor, "*batch rows"]:
    """For each of `rows` rows, its block, where block b has ``sizes[b]`` consecutive rows.

    ``blocks_of(tensor([2, 0, 1]), 4)`` is ``[0, 0, 2, 3]``: what is left has the number of blocks.
    """
    ends = sizes.cumsum(-1)
    # each block's end raises the number of the rows from there on by one
    steps = sizes.new_zeros(*sizes.shape[:-1], rows + 1)
    return steps.scatter_add(-1, ends, torch.ones_like(ends)).cumsum(-1)[..., :rows]


def swap_blocks(
    sizes: Int[Tensor, "*dims"], dims: tuple[int, ...], rows: int
) -> tuple[Int[Tensor, " rows"], Int[Tensor, "rows 1"]]:
    """How to bring consecutive blocks of rows into another order of blocks.

    Args:
        sizes: int64, the rows of every block; blocks are in row-major order.
        dims: of `sizes`, the order in which blocks are wanted: row-major over ``permute(dims)``.
        rows: how many there are, at least the sum; what is beyond it stays where it is.

    Returns:
        ``source`` and ``slots`` of `copy_rows`, which together are a permutation of the rows.
    """
    swapped = sizes.permute(dims).reshape(-1)
    old = torch.arange(sizes.numel(), device=sizes.device).view(sizes.shape).permute(dims)
    starts = (sizes.reshape(-1).cumsum(0) - sizes.reshape(-1)).index_select(0, old.reshape(-1))
    moved = starts - (swapped.cumsum(0) - swapped)  # by how much each block, in the new order
    moved = torch.cat([moved, torch.zeros_like(moved[:1])])
    places = torch.arange(rows, device=sizes.device)
    source = places + moved.index_select(0, blocks_of(swapped, rows))
    return source, inverse(source).unsqueeze(1)


def pick(x: Tensor, at: Tensor, whole: bool = False) -> Tensor:
    """x[at], and zeros where ``at < 0``, which it nowhere is if `whole`; for plain tensors."""
    if whole:
        return x.index_select(0, at)
    if x.shape[0] == 0:
        return x.new_zeros(at.shape[0], *x.shape[1:])
    found = x.index_select(0, at.clamp(min=0))
    real = (at >= 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(real, found, torch.zeros((), dtype=x.dtype, device=x.device))


def shifted(at: Tensor, by: int) -> Tensor:
    """[S, ...] indices into S tensors of `by` rows each as indices into their concatenation."""
    offsets = torch.arange(at.shape[0], device=at.device).view(-1, *[1] * (at.dim() - 1)) * by
    return torch.where(at >= 0, at + offsets, at)


def _lead(value: Tensor, dim: int | None, size: int) -> Tensor:
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


class _Moved(Function):
    """What both directions share: the indices have no derivative, and x enters linearly."""

    generate_vmap_rule = False
    transpose: Any

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, source, slots, ctx.whole = inputs
        ctx.save_for_backward(source, slots)
        ctx.save_for_forward(source, slots)
        ctx.set_materialize_grads(False)

    @classmethod
    def backward(cls, ctx, *cotangents) -> Any:
        if cotangents[0] is None:
            return None, None, None, None
        moved = cls.transpose().apply(cotangents[0], *ctx.saved_tensors, ctx.whole)
        return moved, None, None, None

    @classmethod
    def jvp(cls, ctx, *tangents) -> Any:
        compat.refuse_nested_jvp()
        return (
            None if tangents[0] is None else cls.apply(tangents[0], *ctx.saved_tensors, ctx.whole)
        )


class _Copy(_Moved):
    @staticmethod
    def transpose():
        return _Add

    @staticmethod
    def forward(x, source, slots, whole):
        return pick(x, source, whole)

    @staticmethod
    def vmap(info, in_dims, x, source, slots, whole) -> Any:
        size = info.batch_size
        if in_dims[1] is None and in_dims[2] is None:
            return _Copy.apply(x.movedim(in_dims[0], 1), source, slots, whole), 1
        source, slots = _lead(source, in_dims[1], size), _lead(slots, in_dims[2], size)
        length, rows = source.shape[1], slots.shape[1]
        slots = shifted(slots, length)
        if (
            in_dims[0] is None
        ):  # copies of one tensor's rows for all: slots of one row, side by side
            slots = slots.transpose(0, 1).flatten(1)
        else:
            x, slots = x.movedim(in_dims[0], 0).flatten(0, 1), slots.flatten(0, 1)
            source = shifted(source, rows)
        return _Copy.apply(x, source.flatten(), slots, whole).unflatten(0, (size, length)), 0


class _Add(_Moved):
    @staticmethod
    def transpose():
        return _Copy

    @staticmethod
    def forward(y, source, slots, whole):
        total = pick(y, slots[:, 0], whole)
        for copy in slots.unbind(1)[1:]:
            total = total + pick(y, copy, whole)
        return total

    @staticmethod
    def vmap(info, in_dims, y, source, slots, whole) -> Any:
        size = info.batch_size
        if in_dims[1] is None and in_dims[2] is None:
            return _Add.apply(y.movedim(in_dims[0], 1), source, slots, whole), 1
        source, slots = _lead(source, in_dims[1], size), _lead(slots, in_dims[2], size)
        y, rows = _lead(y, in_dims[0], size).flatten(0, 1), slots.shape[1]
        slots = shifted(slots, source.shape[1]).flatten(0, 1)
        source = shifted(source, rows).flatten()
        return _Add.apply(y, source, slots, whole).unflatten(0, (size, rows)), 0
