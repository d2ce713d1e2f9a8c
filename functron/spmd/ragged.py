"""All-to-all of as many rows as there are: what a router sends to the ranks of its experts.

The idea is that of JAX's `jax.lax.ragged_all_to_all`: how many rows go where is data, shapes are
not, and only real rows are on the wire. Here rows are sorted by destination, so sizes say it all.

Rows are moved by gathers alone, in both directions. A matrix of zeros and at most one 1 per row
copies rows: y[r] = x[source[r]]. Its transpose adds up the copies of each row. Torch's own
derivative of indexing scatters with atomic additions, in no fixed order; here the caller also says
where every row went, so the transpose is a gather too: the same bits on every run, and no atomics.

Copying tokens to their experts, bringing rows that arrived from many ranks into order, and the ways
back are all of this kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functron.core import compat
from functron.core.compat import leading
from functron.core.errors import public
from functron.core.functions import Function
from functron.core.typing import Int, Shaped, Tensor
from functron.spmd.axes import (
    LIBRARY,
    Axis,
    AxisNames,
    BoundAxis,
    TracedAxis,
    define_op,
    lookup,
    user_line,
)
from functron.spmd.primitives import AllToAll, Annotate, refuse_escaped


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


def shift_indices(at: Tensor, by: int) -> Tensor:
    """[S, ...] indices into S tensors of `by` rows each as indices into their concatenation."""
    offsets = torch.arange(at.shape[0], device=at.device).view(-1, *[1] * (at.dim() - 1)) * by
    return torch.where(at >= 0, at + offsets, at)


class _Moved(Function):
    """A move of rows in either direction: indices have no derivative, and x enters linearly."""

    generate_vmap_rule = False
    transpose: type[_Moved]
    move_samples: Callable[..., Any]  # of x, its dim of samples, and indices that lead with one

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
        moved = cls.transpose.apply(cotangents[0], *ctx.saved_tensors, ctx.whole)
        return moved, None, None, None

    @classmethod
    def jvp(cls, ctx, *tangents) -> Any:
        return (
            None if tangents[0] is None else cls.apply(tangents[0], *ctx.saved_tensors, ctx.whole)
        )

    @classmethod
    def vmap(cls, info, in_dims, x, source, slots, whole) -> Any:
        size = info.batch_size
        if in_dims[1] is None and in_dims[2] is None:
            return cls.apply(x.movedim(in_dims[0], 1), source, slots, whole), 1
        source, slots = leading(source, in_dims[1], size), leading(slots, in_dims[2], size)
        return cls.move_samples(x, in_dims[0], source, slots, whole), 0


class _Copy(_Moved):
    @staticmethod
    def forward(x, source, slots, whole):
        return pick(x, source, whole)

    @staticmethod
    def move_samples(x, x_dim, source, slots, whole) -> Any:
        size, length, rows = *source.shape, slots.shape[1]
        slots = shift_indices(slots, length)
        if x_dim is None:  # copies of one tensor's rows for all: slots of one row, side by side
            slots = slots.transpose(0, 1).flatten(1)
        else:
            x, slots = x.movedim(x_dim, 0).flatten(0, 1), slots.flatten(0, 1)
            source = shift_indices(source, rows)
        return _Copy.apply(x, source.flatten(), slots, whole).unflatten(0, (size, length))


class _Add(_Moved):
    transpose = _Copy

    @staticmethod
    def forward(y, source, slots, whole):
        total = pick(y, slots[:, 0], whole)
        for copy in slots.unbind(1)[1:]:
            total = total + pick(y, copy, whole)
        return total

    @staticmethod
    def move_samples(y, y_dim, source, slots, whole) -> Any:
        size, rows = slots.shape[:2]
        y = leading(y, y_dim, size).flatten(0, 1)
        slots = shift_indices(slots, source.shape[1]).flatten(0, 1)
        source = shift_indices(source, rows).flatten()
        return _Add.apply(y, source, slots, whole).unflatten(0, (size, rows))


_Copy.transpose = _Add


_c10d = torch.ops._c10d_functional

LIBRARY.define(
    "ragged_all_to_all(Tensor x, str axis, int size, Tensor sends, Tensor receives, int capacity, "
    "int room=0, int expected=0) -> Tensor"
)


@public
def ragged_all_to_all(
    x: Shaped[Tensor, "rows *rest"],
    send_sizes: Int[Tensor, " ranks"],
    axis_name: AxisNames,
    *,
    capacity: int,
    room: int = 0,
) -> tuple[Shaped[Tensor, "capacity *rest"], Int[Tensor, " ranks"]]:
    """Send the first ``send_sizes[0]`` rows of x to rank 0, the next ``send_sizes[1]`` to rank 1...

    Varying -> varying. On ``Mesh(ep=2)``, where rank 0 holds ``[a, b, c]`` with sizes ``[1, 2]``
    and rank 1 holds ``[d, e, f]`` with sizes ``[1, 1]`` (so f goes nowhere), rank 0 gets
    ``[a, d, 0, 0]`` and rank 1 ``[b, c, e, 0]`` for a capacity of 4, with sizes ``[1, 1]`` and
    ``[2, 1]``.

    On a bound mesh one all-to-all of sizes and one of exactly these rows, whose sizes the host
    waits for; traced, an operation of at most x's bytes. With `room`, on GPUs, the host waits for
    nothing, and `room` rows go from each rank to each. Backward: the same with sizes exchanged.
    Over several axes (row-major ranks) axis by axis, major first, as `lax.all_to_all`: what has to
    cross both a node and a rank within it is sent twice, each time on the fitting link.

    Args:
        x: ``[M, ...]``, rows sorted by destination.
        send_sizes: int64 ``[n]``, n being the number of ranks; their sum is at most M.
        axis_name: one axis, or several, major to minor.
        capacity: the rows of the result: a bound on what any rank can receive, whatever the data.
            Sizes are not known when shapes have to be, so it must hold for the worst case.
        room: a bound on what one rank sends to another, whatever the data; 0: none is known.

    Returns:
        rows: ``[capacity, ...]``: those from rank 0 first, zeros after the last.
        sizes: int64 ``[n]``: how many came from each rank.

    Raises:
        ValueError: more rows arrive than `capacity` (on a bound mesh; simulated or compiled, rows
            beyond it would be lost, so choose a true bound); `send_sizes` is not one per rank.
    """
    axes = lookup(axis_name)
    _check_sizes(send_sizes, math.prod(axis.size for axis in axes))
    sizes = send_sizes.view(*(axis.size for axis in axes), 1)
    rows, received, layout = exchange(x, sizes, axes, capacity=capacity, room=room)
    if len(axes) > 1:
        natural = tuple(layout.index(dim) for dim in range(received.dim()))
        order = swap_blocks(received.permute(layout), natural, rows.shape[0])
        rows = copy_rows(rows, *order, whole=True)
    if rows.shape[0] < capacity:
        rows = torch.cat([rows, rows.new_zeros(capacity - rows.shape[0], *rows.shape[1:])])
    return rows, received.flatten()


def _check_sizes(sizes: Tensor, ranks: int) -> None:
    if sizes.shape != (ranks,) or sizes.dtype != torch.int64:
        raise ValueError(
            f"ragged_all_to_all at {user_line()}: got send_sizes {sizes.dtype} "
            f"{tuple(sizes.shape)}; wanted int64 ({ranks},), the number of rows for each rank"
        )


def exchange(
    x: Tensor,
    sizes: Tensor,
    axes: Sequence[Axis],
    *,
    capacity: int,
    room: int = 0,
    wait: bool = True,
    passing: int | None = None,
    backwards: bool = False,
    expected: int = 0,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """`ragged_all_to_all` for rows that are sorted by destination and then by something else.

    Args:
        x: ``[M, ...]``.
        sizes: int64 ``[n0, n1, ..., K]``: for each rank, a dim for each of `axes`, the rows of each
            of K kinds; blocks of rows are in row-major order.
        capacity: a bound on what any rank can receive.
        room: a bound on what one rank can send to another, worth sending always; 0: none is.
        wait: for the rows; otherwise they may still be on their way, and only `wait_for_rows` may
            touch them, after whatever does not need them.
        passing: a bound on what any rank passes on, on the way along several axes; None: none is
            known.
        backwards: along the last axis first: rows that came over some ranks go back over the same.
        expected: the rows that a rank sends and gets on average, for costs; 0: unknown.

    Returns:
        rows: ``[capacity, ...]``; on processes, outside of a trace and without `room`, exactly the
            rows that came.
        sizes: int64 ``[n0, n1, ..., K]``, by the rank that sent them.
        layout: the order of the dims of `sizes` by which the rows are sorted.
    """
    natural = tuple(range(sizes.dim()))
    if not axes:
        return _resize_rows(x, sizes, capacity), sizes, natural
    rows, layout, left = x, natural, math.prod(axis.size for axis in axes)
    turns = natural[: len(axes)]
    for position in reversed(turns) if backwards else turns:
        axis = axes[position]
        wanted = (position, *(dim for dim in natural if dim != position))
        if wanted != layout:
            dims = tuple(layout.index(dim) for dim in wanted)
            order = swap_blocks(sizes.permute(layout), dims, rows.shape[0])
            rows, layout = copy_rows(rows, *order, whole=True), wanted
        outgoing = sizes.movedim(position, 0)
        incoming = AllToAll.call(outgoing.contiguous(), axis)
        sends, receives = outgoing.flatten(1).sum(1), incoming.flatten(1).sum(1)
        # on the way to their ranks rows meet at others: not more than these have to pass on
        left //= axis.size
        bound = capacity * left if left == 1 or passing is None else passing
        if left > 1 and not isinstance(axis, BoundAxis):  # whose ranks may differ in rows by now
            bound = min(bound, rows.shape[0] * axis.size)
        last = position == (0 if backwards else len(axes) - 1)
        each = room * math.prod(axis.size for axis in axes) // axis.size
        call = RaggedCall(axis, bound, wait or not last, each if _should_pad(x, axis) else 0)
        call = replace(call, expected=expected)
        call = _count_rows(sends, receives, call)
        sent: Any = RaggedAllToAll.apply(rows, sends, receives, axis.token, call)
        rows, sizes = sent, incoming.movedim(0, position)
    return rows, sizes, layout


def wait_for_rows(rows: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The rows of an `exchange` over `axes` that did not wait."""
    last = axes[-1] if axes else None
    if not isinstance(last, BoundAxis):
        return rows
    with last.record_wait():
        out: Any = Annotate.apply(lambda x: _c10d.wait_tensor(x).view_as(x), rows)
    return out


def _resize_rows(x: Tensor, sizes: Tensor, capacity: int) -> Tensor:
    """x with `capacity` rows, of which those beyond the sum of sizes are zeros."""
    count = x.shape[0]
    if count > capacity:
        x = x[:capacity]
    elif count < capacity:
        x = torch.cat([x, x.new_zeros(capacity - count, *x.shape[1:])])
    real = torch.arange(capacity, device=x.device) < sizes.sum()
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(real.view(-1, *[1] * (x.dim() - 1)), x, zero)


def _should_pad(x: Tensor, axis: Axis) -> bool:
    """Whether sending what there is room for is better than waiting for how much there is."""
    return x.is_cuda or isinstance(axis, TracedAxis)


def _count_rows(sends: Tensor, receives: Tensor, call: RaggedCall) -> RaggedCall:
    """The call with the number of rows that arrive, where that is a fact already."""
    if not isinstance(call.axis, BoundAxis) or call.room or compat.physical(receives)[1]:
        return call
    outgoing, incoming = torch.stack([compat.plain(sends), compat.plain(receives)]).tolist()
    _check_capacity(sum(incoming), call.capacity)
    return replace(call, capacity=sum(incoming), counts=(outgoing, incoming))


def waits_for_sizes(x: Tensor, axes: Sequence[Axis], room: int) -> bool:
    """Whether the host waits for numbers of rows in an `exchange`, which are not static then."""
    return all(isinstance(axis, BoundAxis) for axis in axes) and not (room and x.is_cuda)


def count_kept(kept: Tensor, bound: int) -> int:
    """The number of those that are, which the host waits for; `bound` under a vmap of samples."""
    return bound if compat.physical(kept)[1] else min(bound, int(compat.plain(kept).sum()))


def _check_capacity(total: int, capacity: int) -> None:
    if total > capacity:
        raise ValueError(
            f"ragged_all_to_all at {user_line()}: got {total} rows for capacity={capacity}; wanted "
            "a bound that holds for any data, such as the ranks times the rows of each; fix: raise "
            "it"
        )


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """The static operands of `RaggedAllToAll`; opaque to functorch.

    Attributes:
        capacity: the rows of the result.
        room: of rows from one rank to another; 0: exactly as many as there are.
        counts: of rows to each rank, and from each, where the host knows them.
        expected: the rows that a rank sends and gets on average; 0: unknown.
    """

    axis: Axis
    capacity: int
    wait: bool = True
    room: int = 0
    counts: tuple[list[int], list[int]] | None = None
    expected: int = 0


class RaggedAllToAll(Function):
    """The primitive over one axis: (x ``[M, ...]``, sizes ``[n]`` twice) to ``[capacity, ...]``.

    Sizes may lead with a dim of samples, ``[L, n]``, and x then does too. Transpose: itself, with
    `sends` and `receives` exchanged. See `functron.spmd.primitives`, whose rules it follows.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x, sends, receives, token, call):
        refuse_escaped(call.axis)
        if sends.dim() == 1:
            return _send(x, sends, receives, call)
        samples, call = zip(x, sends, receives, strict=True), replace(call, wait=True)
        return torch.stack([_send(*sample, call) for sample in samples])

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, sends, receives, ctx.token, ctx.call = inputs
        ctx.rows = x.shape[sends.dim() - 1]
        ctx.save_for_backward(sends, receives)
        ctx.save_for_forward(sends, receives)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        if cotangents[0] is None:
            return None, None, None, None, None
        sends, receives = ctx.saved_tensors
        counts = ctx.call.counts and ctx.call.counts[::-1]
        call = replace(ctx.call, capacity=ctx.rows, wait=True, counts=counts)
        back = RaggedAllToAll.apply(cotangents[0], receives, sends, ctx.token, call)
        return back, None, None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        if tangents[0] is None:
            return None
        call = replace(ctx.call, wait=True)
        return RaggedAllToAll.apply(tangents[0], *ctx.saved_tensors, ctx.token, call)

    @staticmethod
    def vmap(info, in_dims, x, sends, receives, token, call) -> Any:
        x_dim, sends_dim, receives_dim, token_dim, _ = in_dims
        size, samples = info.batch_size, sends.dim() - (sends_dim is not None)
        if token_dim is None and sends_dim is None and receives_dim is None:
            # one pattern for all samples: they are a part of what a row is
            moved = x.movedim(x_dim, samples)
            return RaggedAllToAll.apply(moved, sends, receives, token, call), samples
        x, sends = leading(x, x_dim, size), leading(sends, sends_dim, size)
        receives = leading(receives, receives_dim, size)
        if token_dim is not None:
            return exchange_of_ranks(x, sends, call.capacity), 0
        if samples == 1:
            return RaggedAllToAll.apply(x, sends, receives, token, call), 0
        shape = x.shape[:2]
        flat = (value.flatten(0, 1) for value in (x, sends, receives))
        out: Any = RaggedAllToAll.apply(*flat, token, call)
        return out.unflatten(0, shape), 0


def exchange_of_ranks(x: Tensor, sends: Tensor, capacity: int) -> Tensor:
    """The exchange in one process, of ranks whose values are stacked.

    Args:
        x: ``[n, M, ...]``: the rows of every rank; or ``[n, L, M, ...]``, of L samples.
        sends: int64 ``[n, n]``: how many rows each rank sends to each; or ``[n, L, n]``.
        capacity: the rows of the result; more are lost.

    Returns:
        ``[n, capacity, ...]``, or ``[n, L, capacity, ...]``: zeros after what came.
    """
    if sends.dim() == 2:
        return exchange_of_ranks(x.unsqueeze(1), sends.unsqueeze(1), capacity).squeeze(1)
    ranks, samples, rows = x.shape[:3]
    starts = sends.cumsum(2) - sends  # of what each rank sends to each, in its own rows
    places = torch.arange(ranks * samples, device=x.device).view(ranks, samples, 1) * rows
    receives = sends.permute(2, 1, 0)  # [receiver, sample, sender]
    shift = (starts + places).permute(2, 1, 0) - (receives.cumsum(2) - receives)
    shift = torch.cat([shift, torch.zeros_like(shift[..., :1])], -1)
    blocks = blocks_of(receives, capacity)
    at = shift.gather(2, blocks) + torch.arange(capacity, device=x.device)
    at = torch.where(blocks < ranks, at, -1)
    return pick(x.flatten(0, 2), at.flatten()).unflatten(0, at.shape)


def _send(x: Tensor, sends: Tensor, receives: Tensor, call: RaggedCall) -> Tensor:
    axis = call.axis
    if isinstance(axis, TracedAxis):
        op = torch.ops.functron.ragged_all_to_all
        more = (call.room, call.expected) if call.expected else (call.room,) * bool(call.room)
        return op(x, axis.name, axis.size, sends, receives, call.capacity, *more)
    assert isinstance(axis, BoundAxis)
    if call.room:
        with axis.record("ragged_all_to_all", x):
            got = _c10d.wait_tensor(_begin_exchange(x, axis.group, sends, call.room))
            return _end_exchange(got, receives, call.capacity, call.room)
    counts = call.counts or torch.stack([sends, receives]).tolist()
    return _exchange_exact(x, axis.group, counts, call.capacity, call.wait)


def pads(device: torch.device, room: int = 0) -> bool:
    """Whether a compiled exchange sends all that there is room for, and no host waits for sizes."""
    return bool(room) and device.type == "cuda"


def _exchange_ranks(
    x: Tensor, group: str, sends: Tensor, receives: Tensor, capacity: int, room: int = 0
) -> Tensor:
    """The exchange between the processes of a group, which has to be waited for.

    One operation for the compiler, since how much is sent where is data. On CPUs, and where no
    bound is known, the host waits for sizes, and for the rows; else, for ``ragged_end``, the rows
    come as they are sent.
    """
    if pads(x.device, room):
        return _begin_exchange(x, group, sends, room)
    return _exchange_exact(x, group, torch.stack([sends, receives]).tolist(), capacity)


def _begin_exchange(x: Tensor, group: str, sends: Tensor, room: int) -> Tensor:
    """`room` rows for each rank, on their way."""
    places, ranks = torch.arange(room, device=x.device), sends.shape[0]
    first = (sends.cumsum(0) - sends).unsqueeze(1)
    at = torch.where(places < sends.unsqueeze(1), first + places, -1)
    rows = pick(x, at.flatten())
    return _c10d.all_to_all_single(rows, [room] * ranks, [room] * ranks, group)


def _end_exchange(got: Tensor, receives: Tensor, capacity: int, room: int) -> Tensor:
    """The real ones of `room` rows from each rank, then zeros."""
    ranks = receives.shape[0]
    # of each row that arrives the block, and its place there
    block, each = blocks_of(receives, capacity), torch.arange(capacity, device=got.device)
    starts = torch.cat([receives.cumsum(0) - receives, receives.new_zeros(1)])
    at = block * room + each - starts.index_select(0, block)
    return pick(got, torch.where(block < ranks, at, -1))


def _exchange_exact(
    x: Tensor, group: str, counts: Sequence[list[int]], capacity: int, wait: bool = True
) -> Tensor:
    """The exchange of as many rows as there are, to and from each rank."""
    outgoing, incoming = counts
    total = sum(incoming)
    _check_capacity(total, capacity)
    real = x[: sum(outgoing)].contiguous()
    got = _c10d.all_to_all_single(real, incoming, outgoing, group)
    if total == capacity:
        return _c10d.wait_tensor(got) if wait else got
    return torch.cat([_c10d.wait_tensor(got), x.new_zeros(capacity - total, *x.shape[1:])])


def _fake_exchange(x, axis, size, sends, receives, capacity, room=0, expected=0):
    return x.new_empty(capacity, *x.shape[1:])


def _fake_ranks(x, group, sends, receives, capacity, room=0):
    rows = room * sends.shape[0] if pads(x.device, room) else capacity
    return x.new_empty(rows, *x.shape[1:])


LIBRARY.impl("ragged_all_to_all", _fake_exchange, "Meta")
define_op(
    "ragged_ranks(Tensor x, str group, Tensor sends, Tensor receives, int capacity, int room=0) "
    "-> Tensor",
    _exchange_ranks,
    _fake_ranks,
)
define_op(
    "ragged_end(Tensor got, Tensor receives, int capacity, int room) -> Tensor",
    _end_exchange,
    lambda got, receives, capacity, room: got.new_empty(capacity, *got.shape[1:]),
)
