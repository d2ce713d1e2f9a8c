"""All-to-all of as many rows as there are: what a router sends to the ranks of its experts.

The idea is that of JAX's `jax.lax.ragged_all_to_all`: how many rows go where is data, shapes are
not, and only real rows are on the wire. Here rows are sorted by destination, so sizes say it all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Function

from functron import compat
from functron.errors import public
from functron.spmd.axes import Axis, AxisNames, BoundAxis, SimulatedAxis, lookup, user_line
from functron.spmd.primitives import AllToAll
from functron.spmd.rows import blocks_of, copy_rows, pick, swap_blocks
from functron.spmd.traced import LIBRARY, TracedAxis
from functron.typing import Int, Shaped, Tensor

_c10d = torch.ops._c10d_functional

LIBRARY.define(
    "ragged_all_to_all(Tensor x, str axis, int size, Tensor sends, Tensor receives, int capacity)"
    " -> Tensor"
)
LIBRARY.define(
    "ragged_ranks(Tensor x, str group, Tensor sends, Tensor receives, int capacity) -> Tensor"
)


@public
def ragged_all_to_all(
    x: Shaped[Tensor, "rows *rest"],
    send_sizes: Int[Tensor, " ranks"],
    axis_name: AxisNames,
    *,
    capacity: int,
) -> tuple[Shaped[Tensor, "capacity *rest"], Int[Tensor, " ranks"]]:
    """Send the first ``send_sizes[0]`` rows of x to rank 0, the next ``send_sizes[1]`` to rank 1...

    Varying -> varying. On ``Mesh(ep=2)``, where rank 0 holds ``[a, b, c]`` with sizes ``[1, 2]``
    and rank 1 holds ``[d, e, f]`` with sizes ``[1, 1]`` (so f goes nowhere), rank 0 gets
    ``[a, d, 0, 0]`` and rank 1 ``[b, c, e, 0]`` for a capacity of 4, with sizes ``[1, 1]`` and
    ``[2, 1]``.

    On a bound mesh one all-to-all of sizes and one of exactly these rows, whose sizes the host
    waits for; traced, an operation of at most x's bytes. Backward: the same with sizes exchanged.
    Over several axes (row-major ranks) axis by axis, major first, as `lax.all_to_all`: what has to
    cross both a node and a rank within it is sent twice, each time on the fitting link.

    Args:
        x: ``[M, ...]``, rows sorted by destination.
        send_sizes: int64 ``[n]``, n being the number of ranks; their sum is at most M.
        axis_name: one axis, or several, major to minor.
        capacity: the rows of the result: a bound on what any rank can receive, whatever the data.
            Sizes are not known when shapes have to be, so it must hold for the worst case.

    Returns:
        rows: ``[capacity, ...]``: those from rank 0 first, zeros after the last.
        sizes: int64 ``[n]``: how many came from each rank.

    Raises:
        ValueError: more rows arrive than `capacity` (on a bound mesh; simulated or compiled, rows
            beyond it would be lost, so choose a true bound); `send_sizes` is not one per rank.
    """
    axes = lookup(axis_name)
    _check(send_sizes, math.prod(axis.size for axis in axes))
    sizes = send_sizes.view(*(axis.size for axis in axes), 1)
    rows, received, layout = exchange(x, sizes, axes, capacity=capacity)
    if len(axes) > 1:
        natural = tuple(layout.index(dim) for dim in range(received.dim()))
        order = swap_blocks(received.permute(layout), natural, rows.shape[0])
        rows = copy_rows(rows, *order, whole=True)
    if rows.shape[0] < capacity:
        rows = torch.cat([rows, rows.new_zeros(capacity - rows.shape[0], *rows.shape[1:])])
    return rows, received.flatten()


def _check(sizes: Tensor, ranks: int) -> None:
    if sizes.shape != (ranks,) or sizes.dtype != torch.int64:
        raise ValueError(
            f"ragged_all_to_all at {user_line()}: got send_sizes {sizes.dtype} "
            f"{tuple(sizes.shape)}; wanted int64 ({ranks},), the number of rows for each rank"
        )


def exchange(
    x: Tensor, sizes: Tensor, axes: Sequence[Axis], *, capacity: int, wait: bool = True
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """`ragged_all_to_all` for rows that are sorted by destination and then by something else.

    Args:
        x: ``[M, ...]``.
        sizes: int64 ``[n0, n1, ..., K]``: for each rank, a dim for each of `axes`, the rows of each
            of K kinds; blocks of rows are in row-major order.
        axes: the axes, major to minor.
        capacity: a bound on what any rank can receive.
        wait: for the rows; otherwise they may still be on their way, and only `arrived` may touch
            them, after whatever does not need them.

    Returns:
        rows: ``[capacity, ...]``; on processes, outside of a trace, exactly the rows that came.
        sizes: int64 ``[n0, n1, ..., K]``, by the rank that sent them.
        layout: the order of the dims of `sizes` by which the rows are sorted.
    """
    natural = tuple(range(sizes.dim()))
    if not axes:
        return _resized(x, sizes, capacity), sizes, natural
    rows, layout = x, natural
    for position, axis in enumerate(axes):
        wanted = (position, *(dim for dim in natural if dim != position))
        if wanted != layout:
            dims = tuple(layout.index(dim) for dim in wanted)
            order = swap_blocks(sizes.permute(layout), dims, rows.shape[0])
            rows, layout = copy_rows(rows, *order, whole=True), wanted
        outgoing = sizes.movedim(position, 0)
        incoming = AllToAll.call(outgoing.contiguous(), axis)
        sends, receives = outgoing.flatten(1).sum(1), incoming.flatten(1).sum(1)
        # on the way to their ranks rows meet at others: not more than these have to pass on
        later = math.prod(axis.size for axis in axes[position + 1 :])
        bound = capacity * later
        if later > 1 and not isinstance(axis, BoundAxis):  # whose ranks may differ in rows by now
            bound = min(bound, rows.shape[0] * axis.size)
        last = position == len(axes) - 1
        call = RaggedCall(axis, _exactly(receives, axis, bound), wait or not last)
        sent: Any = RaggedAllToAll.apply(rows, sends, receives, axis.token, call)
        rows, sizes = sent, incoming.movedim(0, position)
    return rows, sizes, layout


def arrived(rows: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The rows of an `exchange` over `axes` that did not wait."""
    out: Any = _Wait.apply(rows) if axes and isinstance(axes[-1], BoundAxis) else rows
    return out


def _resized(x: Tensor, sizes: Tensor, capacity: int) -> Tensor:
    """x with `capacity` rows, of which those beyond the sum of sizes are zeros."""
    count = x.shape[0]
    if count > capacity:
        x = x[:capacity]
    elif count < capacity:
        x = torch.cat([x, x.new_zeros(capacity - count, *x.shape[1:])])
    real = torch.arange(capacity, device=x.device) < sizes.sum()
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(real.view(-1, *[1] * (x.dim() - 1)), x, zero)


def _exactly(receives: Tensor, axis: Axis, bound: int) -> int:
    """How many rows arrive where that is a fact already, or else the bound."""
    if not isinstance(axis, BoundAxis) or compat.physical(receives)[1]:
        return bound
    total = int(compat.plain(receives).sum())
    _check_capacity(total, bound)
    return total


def _check_capacity(total: int, capacity: int) -> None:
    if total > capacity:
        raise ValueError(
            f"ragged_all_to_all at {user_line()}: got {total} rows for capacity={capacity}; wanted "
            "a bound that holds for any data, such as the ranks times the rows of each; fix: raise "
            "it"
        )


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """What `RaggedAllToAll` needs besides tensors; opaque to functorch.

    Attributes:
        axis: the mesh axis.
        capacity: the rows of the result.
        wait: for them; see `exchange`.
    """

    axis: Axis
    capacity: int
    wait: bool = True


class RaggedAllToAll(Function):
    """The primitive over one axis: (x ``[M, ...]``, sizes ``[n]`` twice) to ``[capacity, ...]``.

    Sizes may lead with a dim of samples, ``[L, n]``, and x then does too. Transpose: itself, with
    `sends` and `receives` exchanged. See `functron.spmd.primitives`, whose rules it follows.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x, sends, receives, token, call):
        if isinstance(call.axis, SimulatedAxis):
            raise ValueError(
                f"a value of the simulated axis {call.axis.name!r} was used after its shard_map "
                "returned; return it from the mapped function instead of keeping it"
            )
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
        call = replace(ctx.call, capacity=ctx.rows, wait=True)
        back = RaggedAllToAll.apply(cotangents[0], receives, sends, ctx.token, call)
        return back, None, None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        if not isinstance(ctx.call.axis, SimulatedAxis):
            compat.refuse_nested_jvp()
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
        x, sends = _lead(x, x_dim, size), _lead(sends, sends_dim, size)
        receives = _lead(receives, receives_dim, size)
        if token_dim is not None:
            return _across(x, sends, call.capacity), 0
        if samples == 1:
            return RaggedAllToAll.apply(x, sends, receives, token, call), 0
        shape = x.shape[:2]
        flat = (value.flatten(0, 1) for value in (x, sends, receives))
        out: Any = RaggedAllToAll.apply(*flat, token, call)
        return out.unflatten(0, shape), 0


def _lead(value: Tensor, dim: int | None, size: int) -> Tensor:
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _across(x: Tensor, sends: Tensor, capacity: int) -> Tensor:
    """The exchange in simulation: ``[n, M, ...]`` and ``[n, n]`` to ``[n, capacity, ...]``.

    Either may have a dim of samples after the first.
    """
    if sends.dim() == 2:
        return _across(x.unsqueeze(1), sends.unsqueeze(1), capacity).squeeze(1)
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
        return op(x, axis.name, axis.size, sends, receives, call.capacity)
    assert isinstance(axis, BoundAxis)
    return _ragged_ranks(x, axis.group, sends, receives, call.capacity, call.wait)


def _ragged_ranks(
    x: Tensor, group: str, sends: Tensor, receives: Tensor, capacity: int, wait: bool = True
) -> Tensor:
    """The exchange between the processes of a group.

    One operation for the compiler, since how much is sent where is data. The host waits for sizes.
    """
    outgoing, incoming = torch.stack([sends, receives]).tolist()
    total = sum(incoming)
    _check_capacity(total, capacity)
    real = x[: sum(outgoing)].contiguous()
    got = _c10d.all_to_all_single(real, incoming, outgoing, group)
    if total == capacity:
        return _c10d.wait_tensor(got) if wait else got
    return torch.cat([_c10d.wait_tensor(got), x.new_zeros(capacity - total, *x.shape[1:])])


class _Wait(Function):
    """y = x, when it is there."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return _c10d.wait_tensor(x).view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        return cotangents[0]

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        return tangents[0].view_as(tangents[0])

    @staticmethod
    def vmap(info, in_dims, x):
        return _Wait.apply(x), in_dims[0]


def _traced(x, axis, size, sends, receives, capacity):
    return x.new_empty(capacity, *x.shape[1:])


def _fake_ranks(x, group, sends, receives, capacity):
    return x.new_empty(capacity, *x.shape[1:])


LIBRARY.impl("ragged_all_to_all", _traced, "Meta")
LIBRARY.impl("ragged_ranks", _ragged_ranks, "CompositeExplicitAutograd")
torch.library.register_fake("functron::ragged_ranks", _fake_ranks, lib=LIBRARY)
