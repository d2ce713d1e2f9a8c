"""Attention of sequences that are split over ranks: context parallelism.

Two mesh axes split a sequence. Along `cp` keys and values come to the queries: passed around a
ring (Liu et al. 2023) or gathered (Dubey et al. 2024, Llama 3). Along `ulysses` heads are exchanged
for sequence, so that each rank has whole sequences of some heads (Jacobs et al. 2023). Both
together are a ring of groups (Fang & Zhao 2024). Positions of tokens, packed documents, windows and
sinks are the same as on one device, and so are the numbers.

Whether keys and values travel or are gathered, step i computes attention to those of the rank i
places before this one, and its result is joined to the others by their logsumexps. Only q, k, v,
the result and its logsumexp are kept: backward goes around a second time, in which the cotangents
of keys and values travel along.

Where every rank holds an early and a late half of the sequence (`to_balanced`), each step
but the first is two blocks of half a rank's queries and half a rank's keys, on all ranks alike:

* its late queries see the early keys of every rank;
* its early queries see the early keys of ranks before it, and its late queries the late keys of
  ranks after it: one of the two, chosen by `torch.where`.

The zigzag order of a sequence balances the ranks' work: an early and a late part on each. Under
causal attention the rank with the end of a sequence has most to do. So the sequence is cut
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

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from functron.core import compat
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.typing import Bool, Float, Int, Tensor
from functron.ops.attention import attention, block, block_backward
from functron.ops.chunked_attention import Visible
from functron.ops.operations import AUTO, Kernels, upcast
from functron.ops.softmax import merge
from functron.spmd import collectives as lax
from functron.spmd.axes import lookup
from functron.spmd.primitives import Ppermute
from functron.spmd.ragged import wait_for_rows
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.derivatives import jvp

RingOrder = Literal["contiguous", "zigzag"]


def own_positions(
    local_seq: int,
    order: RingOrder,
    *,
    axis: str = "cp",
    ulysses: str = "ulysses",
    device: torch.device | str = "cpu",
) -> Int[Tensor, " seq"]:
    """The places in the whole sequence, int64 ``[local_seq]``, of this rank's tokens.

    ``own_positions(2, "zigzag")`` is [0, 1, 6, 7] on both `ulysses` ranks of rank 0 together, on
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
    return _exchange_chunks(x, dim, axis, ulysses, back=False)


def to_contiguous(x: Tensor, dim: int, axis: str = "cp", ulysses: str = "ulysses") -> Tensor:
    """The inverse of `to_balanced`, at the same cost.

    Raises:
        ValueError: 2 cp does not divide the sequence.
    """
    return _exchange_chunks(x, dim, axis, ulysses, back=True)


def _exchange_chunks(x: Tensor, dim: int, axis: str, ulysses: str, *, back: bool) -> Tensor:
    size, dim = lax.axis_size(axis), dim % x.dim()
    chunk = _chunk(x.shape[dim], axis, ulysses)
    if size == 1:
        return x
    first, second = lax.all_gather(x, ulysses, axis=dim, tiled=True).split(chunk, dim)
    routes = _routes(size)
    if back:
        first, second = _order_by_parity(first, second, axis, dim).split(chunk, dim)
        routes = [[(target, source) for source, target in route] for route in routes]
    first, second = lax.ppermute(first, axis, routes[0]), lax.ppermute(second, axis, routes[1])
    # an even rank's early chunk and an odd rank's late chunk have even numbers
    made = torch.cat([first, second], dim) if back else _order_by_parity(first, second, axis, dim)
    return own_part(made, x.shape[dim], dim, ulysses)


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


def _order_by_parity(even: Tensor, odd: Tensor, axis: str, dim: int) -> Tensor:
    """(even, odd) joined on ranks of even number, (odd, even) on the others; its own inverse."""
    is_even = compat.constant(lax.axis_index(axis) % 2 == 0, even.device)
    return torch.cat([torch.where(is_even, even, odd), torch.where(is_even, odd, even)], dim)


def own_part(x: Tensor, size: int, dim: int, axis: str, count: int | None = None) -> Tensor:
    """Of a value that all ranks of `axis` hold whole, this rank's `size` rows of dim `dim`.

    With `count`, the part by its place in its aligned group of so many ranks.

    Replicated -> varying; no collectives. A sum over all parts but one masked, not an index:
    Inductor (torch 2.13) compiles the gradient of an index that differs between simulated ranks to
    an addition into memory that several of them share.
    """
    count = lax.axis_size(axis) if count is None else count
    if count == 1:
        return x
    parts = x.unflatten(dim, (count, size))
    mine = torch.arange(count, device=x.device) == lax.axis_index(axis) % count
    mine = mine.view(-1, *[1] * (x.dim() - dim))
    return torch.where(mine, parts, torch.zeros((), dtype=x.dtype, device=x.device)).sum(
        dim, dtype=x.dtype
    )


_SEQ, _HEADS = 1, 2

ContextKind = Literal["ring", "gather"]
Flag = bool | Tensor
"""Known when the program is made, or a bool scalar that differs between ranks."""


@dataclass(frozen=True)
class Ring:
    """The static description of an exchange.

    Attributes:
        size: how many consecutive ranks of `axis` exchange.
        kind: keys travel, or have been gathered.
        balanced: every rank's tokens are an early half and a late half.
        seq: tokens of a rank.
        steps: how far the ranks are, around the ring, whose keys somebody needs; 0 is not among
            them.
        window: how many keys a query sees, where chunks at a distance are out of its reach; else 0.
        kernels: of ``"attention"``, ``"softmax"`` and ``"lse_merge"``.
        cap: of the scores; see `functron.ops.attention.block`.
        causal: queries see no keys after them; else all, so that every step is one whole block.
    """

    axis: str
    size: int
    kind: ContextKind
    balanced: bool
    seq: int
    steps: tuple[int, ...]
    window: int
    scale: float
    kernels: Kernels = AUTO
    cap: float = 0.0
    causal: bool = True

    def rank(self) -> int | Tensor:
        """This rank's place in its ring."""
        return lax.axis_index(self.axis) % self.size

    def shift(self, x: Tensor, distance: int, *, wait: bool = True) -> Tensor:
        """x of the rank `distance` before this one; without `wait`, to be waited for by `here`."""
        return shift(x, self.axis, self.size, distance, wait=wait)

    def here(self, x: Tensor) -> Tensor:
        """Wait for a tensor that `shift` did not wait for."""
        return wait_for_rows(x, lookup(self.axis))

    @property
    def by_step(self) -> bool:
        """Whether keys are gathered among a part of the ranks, in the order of the steps."""
        return self.kind == "gather" and 1 < self.size < lax.axis_size(self.axis)


def shift(x: Tensor, axis: str, size: int, distance: int, *, wait: bool = True) -> Tensor:
    """x of the rank `distance` before this one in its aligned group of `size` ranks of an axis.

    One ppermute of x; without `wait`, `functron.spmd.ragged.wait_for_rows` waits for it.
    """
    count = lax.axis_size(axis)
    pairs = [(r, r - r % size + (r % size + distance) % size) for r in range(count)]
    if wait:
        return lax.ppermute(x, axis, pairs)
    (found,) = lookup(axis)
    return Ppermute.call(x, found, perm=tuple(pairs), wait=False)


def _roll(x: Tensor, by: int | Tensor, size: int) -> Tensor:
    """x ``[size, ...]``, whose row i is row ``(i + by) % size``; `by` may differ between ranks.

    By powers of two where it does, as an index that differs between ranks has a gradient that
    Inductor compiles wrongly in simulation (`own_part`).
    """
    if isinstance(by, int):
        return torch.roll(x, -by, 0)
    for bit in range((size - 1).bit_length()):
        moves = compat.constant(by // 2**bit % 2 == 1, x.device)
        x = torch.where(moves, torch.roll(x, -(2**bit), 0), x)
    return x


def group_all_to_all(x: Tensor, axis: str, size: int, split_axis: int, concat_axis: int) -> Tensor:
    """`functron.lax.all_to_all`, tiled, among every aligned group of `size` ranks of an axis.

    One all-to-all where that is the whole axis, else ``size - 1`` ppermutes of a `size`-th of x
    each; backward the inverse.
    """
    if size == lax.axis_size(axis):
        return lax.all_to_all(x, axis, split_axis, concat_axis, tiled=True)
    if size == 1:
        return x
    rank = lax.axis_index(axis) % size
    parts = x.unflatten(split_axis, (size, -1)).movedim(split_axis, 0)
    sent = _roll(parts, rank, size)  # in the order of how far they go
    came = [sent[0], *(shift(sent[step], axis, size, step) for step in range(1, size))]
    # of the rank as far before this one, so that the last comes from the next
    found = _roll(torch.stack(came).flip(0), size - 1 - rank, size)
    return found.movedim(0, concat_axis).flatten(concat_axis, concat_axis + 1)


def group_all_gather(x: Tensor, axis: str, size: int, dim: int) -> Tensor:
    """`functron.lax.all_gather`, tiled, among every aligned group of `size` ranks of an axis.

    One all-gather where that is the whole axis, else ``size - 1`` ppermutes of x.
    """
    if size == lax.axis_size(axis):
        return lax.all_gather(x, axis, axis=dim, tiled=True)
    if size == 1:
        return x
    rank = lax.axis_index(axis) % size
    came = [x, *(shift(x, axis, size, step) for step in range(1, size))]
    found = _roll(torch.stack(came).flip(0), size - 1 - rank, size)
    return found.movedim(0, dim).flatten(dim, dim + 1)


def distances(size: int, step: int, balanced: bool) -> tuple[int, ...]:
    """How many chunks lie at least between the queries and the keys of each part of a step."""
    if not balanced:
        return (step,)
    late_early = min(2 * size - 1 - rank - (rank - step) % size for rank in range(size))
    return late_early, min(step, size - step)


def in_reach(window: int, chunk: int, distance: int) -> bool:
    """Whether a window reaches from one chunk into another; 0 is no window."""
    return not window or (distance - 1) * chunk + 1 < window


def needed_steps(size: int, seq: int, window: int, balanced: bool) -> tuple[int, ...]:
    """The distances around the ring at which some rank sees keys; all, unless there is a window."""
    chunk = seq // 2 if balanced else seq
    return tuple(
        step
        for step in range(1, size)
        if any(in_reach(window, chunk, d) for d in distances(size, step, balanced))
    )


@dataclass(frozen=True, eq=False)
class RingPart:
    """One block of a step.

    Attributes:
        queries: which half of its rows: False the early, True the late one; None for all.
        keys: which half.
        valid: whether there is anything to see.
        apart: as in `functron.ops.chunked_attention.Visible`.
    """

    queries: Flag | None = None
    keys: Flag | None = None
    valid: Flag = True
    apart: int | None = None


@dataclass(frozen=True, eq=False)
class MaskInputs:
    """The integers that `Visible` compares, this rank's and those of every step's source.

    Attributes:
        segments: ``[batch, seq]``, own first; empty where samples are not packed.
        positions: ``[batch or 1, seq]``, own first; empty where no window needs them.
        window: as in `Visible`.
        pairs: ``[batch or 1, seq, size * seq]``, of own queries with the keys of every rank.
    """

    segments: list[Int[Tensor, "_ seq"]] = field(default_factory=list)
    positions: list[Int[Tensor, "_ seq"]] = field(default_factory=list)
    window: int | Tensor = 0
    pairs: Bool[Tensor, "_ seq keys"] | None = None

    def visible(self, ring: Ring, at: int, part: RingPart) -> Any:
        """The test of a part of the step number `at`; None where there is nothing to test."""
        if not self.segments and not self.positions and self.pairs is None:
            return None
        none: Any = (None, None)
        segments = (self.segments[0], self.segments[at]) if self.segments else none
        positions = (self.positions[0], self.positions[at]) if self.positions else none
        return Visible(
            take(segments[0], part.queries, 1),
            take(segments[1], part.keys, 1),
            take(positions[0], part.queries, 1),
            take(positions[1], part.keys, 1),
            self.window,
            part.apart,
            self._pairs(ring, (0, *ring.steps)[at]),
        )

    def _pairs(self, ring: Ring, step: int) -> Tensor | None:
        if self.pairs is None:
            return None
        source = compat.constant((ring.rank() - step) % ring.size, self.pairs.device)
        columns = self.pairs.unflatten(2, (ring.size, -1))
        return torch.index_select(columns, 2, source.reshape(1)).squeeze(2)


def take(x: Any, half: Flag | None, dim: int) -> Any:
    """The early (False) or late (True) half of x along `dim`; all of it for None."""
    if x is None or half is None:
        return x
    early, late = x.chunk(2, dim)
    if isinstance(half, bool):
        return late if half else early
    return torch.where(half, late, early)


def parts(ring: Ring, step: int, device: torch.device) -> list[RingPart]:
    """The blocks of a step that some rank needs, with flags on the device of the keys."""
    if step == 0:
        return [RingPart(apart=0 if ring.window else None)]
    if not ring.causal:
        return [RingPart()]
    from_before = ring.rank() >= step  # or else the ring has closed, and it is a rank after mine
    if isinstance(from_before, Tensor):
        from_before = compat.constant(from_before, device)
    if ring.balanced:
        after = _not(from_before)
        halves = [(True, False, True), (after, after, True)]
    else:
        # a tensor on every mesh: a rank that left a block out would differ from the others in
        # which collectives the derivatives of this have
        halves = [(None, None, compat.constant(from_before, device))]
    chunk = ring.seq // 2 if ring.balanced else ring.seq
    return [
        RingPart(*which, distance * chunk if ring.window else None)
        for which, distance in zip(halves, distances(ring.size, step, ring.balanced), strict=True)
        if in_reach(ring.window, chunk, distance)
    ]


def _not(flag: Flag) -> Flag:
    return (not flag) if isinstance(flag, bool) else ~flag


def _where(flag: Flag, x: Tensor, otherwise: float) -> Tensor:
    return x if isinstance(flag, bool) else torch.where(flag, x, otherwise)


class _RingRows:
    """A sum of parts, each of some rows of dim 2; kept by halves where balanced."""

    def __init__(self, whole: Tensor, balanced: bool):
        self.pieces = list(whole.chunk(2, 2)) if balanced else [whole]

    def pieces_of(self, half: Flag | None, valid: Flag = True) -> list[tuple[int, Flag]]:
        """The pieces that a part may have rows of, and whether it has."""
        if half is None:
            return [(0, valid)]
        return [(i, flag) for i, flag in enumerate((_not(half), half)) if flag is not False]

    def add(self, part: Tensor, half: Flag | None) -> None:
        """Add to the rows of that half."""
        for i, flag in self.pieces_of(half):
            self.pieces[i] = self.pieces[i] + _where(flag, part, 0.0)

    def whole(self) -> Tensor:
        """All rows."""
        return torch.cat(self.pieces, 2) if len(self.pieces) > 1 else self.pieces[0]


def _merge(
    out: _RingRows, lse: _RingRows, made: tuple[Tensor, Tensor], part: RingPart, kernels: Kernels
) -> None:
    for i, flag in out.pieces_of(part.queries, part.valid):
        more = _where(flag, made[1], float("-inf"))
        sofar = out.pieces[i], lse.pieces[i]
        out.pieces[i], lse.pieces[i] = merge(*sofar, made[0], more, kernels=kernels)


class _Keys:
    """Keys and values of every step's source, and in backward the return of their cotangents.

    Tensors are sent on before the current step is computed: keys and values as they arrive,
    cotangents once this rank's part is added, for the step after the next.
    """

    def __init__(self, ring: Ring, k: Tensor, v: Tensor):
        self.ring, self.k, self.v = ring, k, v
        self.at = 0
        self.travelling: list[Tensor] = []
        self.coming = self._send([k, v], ring.steps[0]) if ring.steps else []

    def _send(self, values: Sequence[Tensor], to: int) -> list[Tensor]:
        """Send values that are here to where they are at step `to`."""
        return [self.ring.shift(x, to - self.at, wait=False) for x in values]

    def own(self) -> tuple[Tensor, Tensor]:
        """This rank's."""
        return self.k, self.v

    def _next(self, step: int) -> int:
        """The step after this one; 0, at home, after the last."""
        after = self.ring.steps[self.ring.steps.index(step) + 1 :]
        return after[0] if after else 0

    def arrivals(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Step, keys and values, for every step; then `give` their cotangents."""
        for step in self.ring.steps:
            k, v = (self.ring.here(x) for x in self.coming)
            self.at = step
            following = self._next(step)
            self.coming = self._send([k, v], following) if following else []
            yield step, k, v

    def give(self, dk: Tensor, dv: Tensor) -> None:
        """Add cotangents of the keys and values that are here; float32 at least."""
        given = [dk, dv]
        if self.travelling:
            rows = zip(self.travelling, given, strict=True)
            given = [self.ring.here(before) + more for before, more in rows]
        self.travelling = self._send(given, self._next(self.at))

    def home(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The cotangents of this rank's own; `dk` and `dv` are its own part."""
        if not self.travelling:
            return dk, dv
        other_k, other_v = (self.ring.here(x) for x in self.travelling)
        return dk + other_k, dv + other_v


class _Gathered(_Keys):
    """The same where every rank has all keys, ``[size, ...]``: nothing travels.

    They are in the order of ranks, or in that of steps (`Ring.by_step`).
    """

    def __init__(self, ring: Ring, k: Tensor, v: Tensor):
        self.ring, self.k, self.v, self.at = ring, k, v, 0
        self.given: dict[int, tuple[Tensor, Tensor]] = {}

    def _select(self, x: Tensor, step: int) -> Tensor:
        if self.ring.by_step:
            return x[(0, *self.ring.steps).index(step)]
        source = compat.constant((self.ring.rank() - step) % self.ring.size, x.device)
        return torch.index_select(x, 0, source.reshape(1)).squeeze(0)

    def own(self) -> tuple[Tensor, Tensor]:
        return self._select(self.k, 0), self._select(self.v, 0)

    def arrivals(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for step in self.ring.steps:
            self.at = step
            yield step, self._select(self.k, step), self._select(self.v, step)

    def give(self, dk: Tensor, dv: Tensor) -> None:
        self.given[self.at] = dk, dv

    def home(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros_like(dk), torch.zeros_like(dv)
        self.given[0] = dk, dv
        if self.ring.by_step:
            rows = [self.given[step] for step in (0, *self.ring.steps)]
            return torch.stack([x for x, _ in rows]), torch.stack([x for _, x in rows])
        rows = [self.given.get(step, nothing) for step in range(self.ring.size)]
        source = torch.arange(self.ring.size, device=dk.device)
        steps = (self.ring.rank() - source) % self.ring.size
        dks, dvs = (torch.stack(x) for x in zip(*rows, strict=True))
        return torch.index_select(dks, 0, steps), torch.index_select(dvs, 0, steps)


def _start(ring: Ring, k: Tensor, v: Tensor) -> tuple[_Keys, RingPart, dict[str, Any]]:
    """The keys of all steps, the block of the first, and the options of all blocks."""
    gathered = ring.kind == "gather" and ring.size > 1
    keys = _Gathered(ring, k, v) if gathered else _Keys(ring, k, v)
    (whole,) = parts(ring, 0, k.device)
    return keys, whole, {"scale": ring.scale, "cap": ring.cap, "kernels": ring.kernels}


def _forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, mask: MaskInputs, sinks: Tensor | None):
    keys, whole, options = _start(ring, k, v)
    visible = mask.visible(ring, 0, whole)
    first = block(q, *keys.own(), visible, causal=ring.causal, **options)
    out, lse = (_RingRows(upcast(x), ring.balanced) for x in first)
    for number, (step, k_there, v_there) in enumerate(keys.arrivals(), 1):
        for part in parts(ring, step, q.device):
            there = take(k_there, part.keys, 2), take(v_there, part.keys, 2)
            visible = mask.visible(ring, number, part)
            mine = take(q, part.queries, 2)
            made = block(mine, *there, visible, causal=False, **options)
            _merge(out, lse, made, part, ring.kernels)
    total, log_sum = out.whole(), lse.whole()
    if sinks is not None:
        joined = torch.logaddexp(log_sum, upcast(sinks)[:, None])
        total, log_sum = total * (log_sum - joined).exp().unsqueeze(-1), joined
    return total.to(q.dtype), log_sum


def _backward(ring: Ring, residuals: tuple, cotangent: Tensor):
    q, k, v, mask, sinks, out, lse = residuals
    keys, whole, options = _start(ring, k, v)
    rows = (cotangent, q, out, lse)
    visible = mask.visible(ring, 0, whole)
    dq_first, *own = block_backward(
        cotangent, q, *keys.own(), out, lse, visible, causal=ring.causal, **options
    )
    dq, own = _RingRows(upcast(dq_first), ring.balanced), [upcast(x) for x in own]
    for number, (step, k_there, v_there) in enumerate(keys.arrivals(), 1):
        given = [_RingRows(torch.zeros_like(upcast(x)), ring.balanced) for x in (k_there, v_there)]
        for part in parts(ring, step, q.device):
            there = take(k_there, part.keys, 2), take(v_there, part.keys, 2)
            visible = mask.visible(ring, number, part)
            d_mine, q_mine, out_mine, lse_mine = (take(x, part.queries, 2) for x in rows)
            # exp(score - lse) is 0 then, whatever the keys that are not to be seen
            lse_mine = _where(part.valid, lse_mine, torch.finfo(lse.dtype).max / 4)
            moved = block_backward(
                d_mine, q_mine, *there, out_mine, lse_mine, visible, causal=False, **options
            )
            dq.add(upcast(moved[0]), part.queries)
            for total, more in zip(given, moved[1:], strict=True):
                total.add(upcast(more), part.keys)
        keys.give(*(total.whole() for total in given))
    dk, dv = keys.home(*own)
    d_sinks = None
    if sinks is not None:
        delta = (upcast(cotangent) * upcast(out)).sum(-1)
        weight = (upcast(sinks)[:, None] - lse).exp()
        d_sinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
    return dq.whole().to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks


def ring_attention(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, mask: MaskInputs, sinks: Tensor | None
) -> Tensor:
    """softmax(scale q k^T) v over the keys of all ranks of a ring.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k: ``[batch, kv_heads, seq, head_dim]``; where gathered ``[size, batch, ...]``.
        v: as `k`, maybe of another width.
        mask: documents, windows and pairs.
        sinks: ``[heads]`` or None.

    Returns:
        ``[batch, heads, seq, value_dim]`` in q's dtype. Collectives: see
        `functron.nn.context_attention`.
    """

    def forward(q, k, v, sinks, values):
        out, lse = _forward(ring, q, k, v, MaskInputs(**values), sinks)
        return out, (q, k, v, sinks, values, out, lse)

    def backward(residuals, cotangent):
        q, k, v, sinks, values, out, lse = residuals
        kept = (q, k, v, MaskInputs(**values), sinks, out, lse)
        return *_backward(ring, kept, cotangent), None

    def values_of(*args):
        return forward(*args)[0]

    attend = custom_vjp(values_of, forward, backward, functools.partial(jvp, values_of))
    return attend(q, k, v, sinks, dict(vars(mask)))


def context_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads value_dim"],
    *,
    positions: Int[Tensor, "*batch seq"] | None = None,
    segments: Int[Tensor, "batch seq"] | None = None,
    window: int | Int[Tensor, ""] = 0,
    sinks: Float[Tensor, " heads"] | None = None,
    pairs: Bool[Tensor, "*batch seq keys"] | None = None,
    kind: ContextKind = "ring",
    causal: bool = True,
    balanced: bool = False,
    scale: float | None = None,
    cap: float = 0.0,
    axis: str = "cp",
    ulysses: str = "ulysses",
    ring_size: int | None = None,
    exchange_size: int | None = None,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """softmax(scale q k^T + mask) v for this rank's queries over the keys of all ranks.

    The sequence is split over ``(axis, ulysses)``, major to minor. A query sees the keys of its
    document up to itself and, with a window, the last `window` of them; without `causal`, all keys
    of its document.

    Collectives, for n = `ring_size` ranks that exchange, the m steps around the ring at which
    somebody sees keys (n - 1 without a window), u = `exchange_size` ranks of `ulysses`, and K, V,
    Q, O the bytes of this rank's operands and result (K and V count u / gcd(u, kv_heads) times):

    * `ulysses`: four all-to-alls, of Q, K, V and O; the same backward. Among a part of its ranks,
      u - 1 ppermutes of a u-th in place of each.
    * "ring": forward m ppermutes of K and m of V over `axis`. Backward the same once more, and m
      of dk and m of dv, which are K and V in float32 at least.
    * "gather": two all-gathers, results n K and n V; backward two reduce-scatters of these. Among a
      part of `axis`, m ppermutes of K and m of V in their place, and as many backward.
    * Integers of 4 bytes a token: segments if given; positions if given per sample and with a
      window. Each is all-gathered over `ulysses`, then sent m times ("ring") or all-gathered over
      `axis`; once, in forward.

    Between forward and backward live q, k, v (of a gather: all ranks' k and v), the result, one
    number per query and head, and the integers. Work is that of the visible half of the scores
    where `balanced`, else up to twice that: every rank computes as many blocks as the last. Without
    `causal` all scores are visible, and ranks have equal work in any order.

    Args:
        q: this rank's heads and part of the sequence.
        k: each of its heads serves heads / kv_heads consecutive heads of q.
        v: its width may be another than k's.
        positions: ``[batch, seq]`` places in the document, increasing by one within each. Needed
            where data was arranged per document (`balanced`, `segments` and a window). None, or
            ``[seq]``: places in the sequence, which follow from the order.
        segments: document numbers of packed samples; None where each sample is one document.
        window: how many keys a query sees at most, itself included; 0 for all. An integer tensor
            may differ between layers that are scanned, but every step is then taken.
        sinks: logits that join the softmax's denominator only (Xiao et al. 2024; gpt-oss). This
            rank's heads, the same on all ranks of both axes.
        pairs: ``[batch or 1, seq, keys]``: whether each of this rank's queries may see each key of
            all ranks; None: it may. Not where `balanced`, nor over `ulysses`.
        kind: "ring", or "gather": fewer and larger messages, more memory.
        causal: mask keys after the query.
        balanced: every rank of `axis` holds an early half and a late half of every document, as
            `functron.nn.context.to_balanced` arranges them; else consecutive parts.
        scale: of the scores; None for 1 / sqrt(head_dim).
        cap: scores s are cap tanh(s / cap) before masks (Gemma 2); 0: as they are.
        axis: along which keys travel.
        ulysses: along which heads are exchanged; it must divide them.
        ring_size: only the aligned groups of so many ranks of `axis` exchange keys: sequences, or
            packed documents, that span no more. Static; a divisor of its size. None for all.
        exchange_size: only the aligned groups of so many ranks of `ulysses` exchange heads, as
            `ring_size`, which then must be 1: what they hold together is in order.
        kernels: of ``"attention"`` and ``"softmax"``, for masked blocks, and of ``"lse_merge"``.

    Returns:
        In q's dtype.

    Raises:
        ValueError: heads, halves, window, pairs or ring size do not fit; a window, or halves, of
            attention that is not causal.
    """
    size = lax.axis_size(axis) if ring_size is None else ring_size
    group = lax.axis_size(ulysses) if exchange_size is None else exchange_size
    _check(q, k, window, pairs, kind, causal, balanced, axis, ulysses, ring_size, group)
    static_window = window if isinstance(window, int) else 0
    q, k, v = _exchange_heads(q, k, v, ulysses, group)
    plain = isinstance(window, int) and window == 0 and segments is sinks is pairs is None
    if size == 1 and plain and not cap:
        out = attention(q, k, v, causal=causal, scale=scale)
    else:
        seq = q.shape[_SEQ]
        if balanced and positions is not None and positions.dim() == 2:
            static_window = 0  # parts of short documents are short: near in another sense
        steps = needed_steps(size, seq, static_window, balanced)
        balanced = balanced and size > 1
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        fixed = seq, steps, static_window, scale, kernels, cap, causal
        ring = Ring(axis, size, kind, balanced, *fixed)
        mask = _mask_inputs(ring, q, positions, segments, window, ulysses, group)
        mask = replace(mask, pairs=pairs)
        own = None if sinks is None else own_part(sinks, q.shape[_HEADS], 0, ulysses, group)
        q, k, v = (x.transpose(_SEQ, _HEADS) for x in (q, k, v))
        if ring.by_step:
            k, v = (torch.stack([x, *(ring.shift(x, step) for step in steps)]) for x in (k, v))
        elif kind == "gather" and size > 1:
            k, v = lax.all_gather((k, v), axis)
        out = ring_attention(ring, q, k, v, mask, own).transpose(_SEQ, _HEADS)
    return group_all_to_all(out, ulysses, group, _SEQ, _HEADS)


def _check(q, k, window, pairs, kind, causal, balanced, axis, ulysses, ring_size, group) -> None:
    """Raise ValueError for everything that does not fit."""
    size, whole = lax.axis_size(axis), lax.axis_size(ulysses)
    heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
    ring = size if ring_size is None else ring_size
    found = []

    def wrong(path: str, got: str, wanted: str, fix: str = "") -> None:
        found.append(Problem(path, got, wanted, fix))

    if heads % kv_heads:
        wrong("k", f"{kv_heads} heads", f"a divisor of q's {heads}")
    if heads % group:
        fix = f"split the sequence over {axis!r} instead"
        wrong("q", f"{heads} heads", f"a multiple of the {group} ranks of {ulysses!r}", fix)
    if group < 1 or whole % group:
        wrong("exchange_size", str(group), f"a divisor of the {whole} ranks of {ulysses!r}")
    elif group < whole and ring > 1:
        wrong("exchange_size", f"{group} with {ring} ranks of {axis!r}", f"{whole}, or ring_size=1")
    if kind not in ("ring", "gather"):
        wrong("kind", repr(kind), "ring or gather", nearest(kind, ("ring", "gather")))
    if ring < 1 or size % ring:
        wrong("ring_size", str(ring), f"a divisor of the {size} ranks of {axis!r}")
    per_rank = q.shape[_SEQ] * group
    if balanced and ring > 1 and per_rank % 2:
        fix = "pad the sequence, or use the contiguous order"
        wrong("balanced", f"{per_rank} tokens on each rank of {axis!r}", "two halves", fix)
    if isinstance(window, int) and window < 0:
        wrong("window", str(window), "0 for no window, or a number of keys")
    if pairs is not None:
        wanted = q.shape[_SEQ], ring * k.shape[_SEQ]
        if tuple(pairs.shape[1:]) != wanted or balanced or group > 1:
            got = f"{list(pairs.shape)}" + (", balanced" if balanced else "")
            fix = "the contiguous order, and no exchange of heads"
            wrong("pairs", got, f"[batch or 1, {wanted[0]}, {wanted[1]}] in order", fix)
    if not causal and (balanced or isinstance(window, Tensor) or window):
        what = "balanced" if balanced else "a window"
        wrong("causal", f"False with {what}", "True", f"leave {what} out, or mask by causality")
    raise_problems("context_attention", found)


def _exchange_heads(
    q: Tensor, k: Tensor, v: Tensor, ulysses: str, group: int
) -> tuple[Tensor, ...]:
    """Whole sequences (of this rank of cp, or of its group) of this rank's heads."""
    kv_heads = k.shape[_HEADS]
    repeats = group // math.gcd(group, kv_heads)
    if repeats > 1:  # just enough for every rank to have one
        k, v = (x.repeat_interleave(repeats, _HEADS) for x in (k, v))
    return tuple(group_all_to_all(x, ulysses, group, _HEADS, _SEQ) for x in (q, k, v))


def _mask_inputs(
    ring: Ring,
    q: Tensor,
    positions: Tensor | None,
    segments: Tensor | None,
    window: int | Tensor,
    ulysses: str,
    group: int,
) -> MaskInputs:
    """The integers of this rank's tokens and of those of every step's source."""
    given: dict[str, Tensor] = {}
    if segments is not None:
        given["segments"] = segments
    has_window = isinstance(window, Tensor) or window > 0
    if has_window and positions is not None and positions.dim() == 2:
        given["positions"] = positions
    found = {name: _from_sources(ring, x, ulysses, group) for name, x in given.items()}
    if has_window and "positions" not in found:
        found["positions"] = [_places(ring, step, q.device) for step in (0, *ring.steps)]
    return MaskInputs(found.get("segments", []), found.get("positions", []), window)


def _from_sources(ring: Ring, x: Tensor, ulysses: str, group: int) -> list[Tensor]:
    x = group_all_gather(x.to(torch.int32), ulysses, group, _SEQ)
    if ring.size == 1:
        return [x]
    if ring.kind == "ring" or ring.by_step:
        return [x, *(ring.shift(x, step) for step in ring.steps)]
    everywhere, rank = lax.all_gather(x, ring.axis), ring.rank()
    sources = [compat.constant((rank - step) % ring.size, x.device) for step in ring.steps]
    return [x, *(torch.index_select(everywhere, 0, s.reshape(1)).squeeze(0) for s in sources)]


def _places(ring: Ring, step: int, device: torch.device) -> Tensor:
    """``[1, seq]``: the places in the sequence of the tokens of this step's source."""
    source = (ring.rank() - step) % ring.size
    here = torch.arange(ring.seq, device=device)
    if not ring.balanced:
        return (here + source * ring.seq)[None]
    chunk = ring.seq // 2
    late = here - chunk + (2 * ring.size - 1 - source) * chunk
    return torch.where(here < chunk, here + source * chunk, late)[None]
