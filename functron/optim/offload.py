"""Optimizer state in host memory, copied to the device piece by piece for the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from functron.core import compat, tree
from functron.core.errors import public
from functron.optim.transformation import GradientTransformation, bindable, name_norm, purely
from functron.program.recorder import active
from functron.spmd.shared_memory import CUDA, Streams
from functron.spmd.spec import P, is_spec

_GROUP_BYTES = 64 << 20
_ALIGNED = 256  # bytes, as of what torch allocates

OffloadBox = tuple[slice, ...]
"""A part of a leaf: ``leaf[box]``; ``()``: all of it."""

OffloadPiece = dict[int, OffloadBox]
"""The unit of an update: parts of leaves, by the leaf's number."""


@public
@bindable
def offload(
    inner: GradientTransformation, *, group_bytes: int = _GROUP_BYTES, streams: Streams = CUDA
) -> GradientTransformation:
    """`inner`, with its state in host memory (ZeRO-Offload's placement, computed on the device).

    `init` and `step_` take some parameters at a time: their state is copied to their device, used,
    and copied back. Where `inner` is elementwise (AdamW, Lion, SGD, also on masters) leaves are cut
    into pieces of `group_bytes`; otherwise they stay whole. On CUDA the device holds the state of
    two pieces (of one, if a whole leaf is larger): one is updated while the last is copied back and
    the next is copied in, on streams of their own. Every step moves all of the state twice: with
    AdamW on masters 24 bytes per parameter over the bus. Nothing moves, and nothing is cut, for
    parameters on the CPU. Counters stay with the parameters. On CUDA the host memory is
    page-locked, and `step_` returns when it has the new state.

    Structure, specs and numbers of the state are `inner`'s, and so are checkpoints; only the device
    differs. A state that was restored to another device is used there. With `zero` put this inside:
    ``zero(offload(with_fp32_masters(adamw(...))), ...)``.

    Args:
        inner: its update of a parameter depends on no other one (chain `clip_by_global_norm`
            before).
        group_bytes: of parameters in a piece at most, unless it is one uncut leaf.
        streams: copies go through these.

    Raises:
        ValueError: (when called) state on another device than the parameters in a traced or
            compiled program, or in `step_` under transforms of torch.func.
    """
    made = _Offloaded(inner, group_bytes, streams)
    return GradientTransformation(made.init, made.update, made.step_, inner.specs, inner.grad_specs)


class _Offloaded(NamedTuple):
    """The functions of `offload`, and its arguments."""

    inner: GradientTransformation
    group_bytes: int
    streams: Streams

    def find_owners(self, params: tree.Tree) -> tuple[list[int | None], tree.Structure, set[int]]:
        """The parameter that every part of a state belongs to (None: a counter).

        A part is what stands where the state's specs have one: a tensor, None, or a few tensors.
        It belongs to parameter i if a state of some of the parameters has it just when i is among
        them; made of those with each bit of their numbers, there are few to look at. Last come the
        parameters that have state of other shapes than their own.
        """
        leaves, structure = tree.flatten(params)
        like = [torch.empty_like(leaf, device="meta") for leaf in leaves]
        replicated = tree.unflatten(structure, [P()] * len(like))
        _, parts = tree.flatten(self.inner.specs(replicated), is_spec)

        def state_of(group: Sequence[int]) -> list[list[torch.Tensor]]:
            state = self.inner.init(_cut(structure, like, dict.fromkeys(group, ())))
            return [tree.leaves(part) for part in parts.flatten_up_to(state)]

        owners: list[int | None] = [None if always else 0 for always in map(bool, state_of([]))]
        for bit in range(len(like).bit_length()):
            here = state_of([i for i in range(len(like)) if i >> bit & 1])
            owners = [
                None if i is None else i | (bool(on) << bit)
                for i, on in zip(owners, here, strict=True)
            ]
        rows = zip(owners, state_of(range(len(like))), strict=True)
        other = {i for i, of in rows if i is not None for x in of if x.shape != like[i].shape}
        return owners, parts, other

    def moving(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether state moves by streams: under transforms, as in simulation, it does in line."""
        return not compat.transforms_active() and any(map(self.streams.on_device, leaves))

    def pieces_of(self, leaves: Sequence[torch.Tensor], other: set[int]) -> list[OffloadPiece]:
        cuts = self.inner.elementwise and self.moving(leaves)

        def limit(i: int, x: torch.Tensor) -> int | None:
            whole = i in other or not (self.streams.on_device(x) and x.is_contiguous())
            return None if whole or not cuts else self.group_bytes

        return _pieces(leaves, [limit(*row) for row in enumerate(leaves)], self.group_bytes)

    def init(self, params):
        leaves, structure = tree.flatten(params)
        owners, parts, other = self.find_owners(params)
        found: list[Any] = [None] * len(owners)
        for piece in self.pieces_of(leaves, other):
            made = parts.flatten_up_to(self.inner.init(_cut(structure, leaves, piece)))
            for position, i in enumerate(owners):
                if i is None:
                    found[position] = made[position]
                elif i in piece:
                    room = lambda x, i=i, box=piece[i]: _room(self.streams, x, leaves[i].shape, box)  # noqa: E731
                    if found[position] is None:
                        found[position] = tree.map(room, made[position])
                    tree.map(
                        lambda kept, x, box=piece[i]: kept if kept is x else kept[box].copy_(x),
                        found[position],
                        made[position],
                    )
        return tree.unflatten(parts, found)

    def update(self, updates, state, params=None, *, donated=False, **extra):
        if active() is not None:
            _refuse_apart(state, updates)
        device = tree.leaves(updates)[0].device
        near = tree.map(lambda x: x.to(device), state)
        updates, new = self.inner.update(updates, near, params, **extra)
        return updates, tree.map(lambda old, new: new.to(old.device), state, new)

    def step_(self, grads, state, params, **extra):
        extra = name_norm(extra, grads)  # of a piece it is not
        if purely():
            _refuse_apart(state, params)
            return self.inner.step_(grads, state, params, **extra)
        leaves, structure = tree.flatten(params)
        gradients = tree.same_structure(params, grads, names=("params", "grads"))
        owners, parts, other = self.find_owners(params)
        before = parts.flatten_up_to(state)
        after = list(before)
        pieces = self.pieces_of(leaves, other)

        def part(position: int, piece: OffloadPiece) -> tree.Tree:
            """The rows of a part of the state that belong to a piece; of a counter a copy."""
            i = owners[position]
            if i is None:
                return tree.map(torch.Tensor.clone, before[position])
            if i not in piece:
                return None
            return tree.map(lambda x: x[piece[i]] if piece[i] else x, before[position])

        def step(piece: OffloadPiece, near: list[tree.Tree]) -> list[tree.Tree]:
            _, new = self.inner.step_(
                _cut(structure, gradients, piece),
                tree.unflatten(parts, near),
                _cut(structure, leaves, piece),
                **extra,
            )
            new = parts.flatten_up_to(new)
            for position, i in enumerate(owners):
                if i is None:
                    after[position] = new[position]
            return new

        positions = range(len(owners))
        if self.moving(leaves):
            far = [[part(position, piece) for position in positions] for piece in pieces]
            _by_streams(self.streams, leaves, owners, self.group_bytes, pieces, far, step)
            return params, tree.unflatten(parts, after)
        for piece in pieces:
            near = [part(position, piece) for position in positions]
            near = [
                x if i is None else tree.map(lambda x, to=leaves[i].device: x.to(to), x)
                for x, i in zip(near, owners, strict=True)
            ]
            new = step(piece, near)
            for position in positions:
                if owners[position] in piece:
                    after[position] = tree.map(_back, before[position], new[position])
        return params, tree.unflatten(parts, after)


def _pieces(
    leaves: Sequence[torch.Tensor], limits: Sequence[int | None], group_bytes: int
) -> list[OffloadPiece]:
    """Consecutive parts of leaves, of `group_bytes` together, or one that is larger.

    Args:
        leaves: whole.
        limits: the largest bytes of a part of each; None: it is not cut.
        group_bytes: of a piece.
    """
    pieces: list[OffloadPiece] = []
    size = 0
    for i, (leaf, limit) in enumerate(zip(leaves, limits, strict=True)):
        for box in _boxes(leaf.shape, leaf.element_size(), limit):
            nbytes = leaf[box].nbytes
            if not pieces or size + nbytes > group_bytes or i in pieces[-1]:
                pieces.append({})
                size = 0
            pieces[-1][i] = box
            size += nbytes
    return pieces


def _boxes(shape: Sequence[int], itemsize: int, limit: int | None) -> Iterator[OffloadBox]:
    """Boxes, each without gaps in memory, that make up a contiguous tensor, in its order."""
    row = math.prod(shape[1:]) * itemsize
    if limit is None or not shape or row * shape[0] <= limit:
        yield ()
        return
    step = max(1, limit // row)
    for first in range(0, shape[0], step):
        rows = slice(first, min(first + step, shape[0]))
        for box in _boxes(shape[1:], itemsize, limit if row > limit else None):
            yield (rows, *box)


def _cut(
    structure: tree.Structure, leaves: Sequence[torch.Tensor], piece: OffloadPiece
) -> tree.Tree:
    """A tree of the parts of its leaves that a piece has; None in the places of others."""
    parts = [(x[piece[i]] if piece[i] else x) if i in piece else None for i, x in enumerate(leaves)]
    return tree.unflatten(structure, parts)


def _room(streams: Streams, x: torch.Tensor, shape: Sequence[int], box: OffloadBox) -> torch.Tensor:
    """Page-locked memory for state, all of it or a box in a shape, that is now `x` on a GPU."""
    if not streams.on_device(x):
        return x
    if compat.is_wrapped(x):
        return torch.empty_like(x, device="cpu", pin_memory=True)
    like = torch.empty(shape, dtype=x.dtype, device="meta") if box else x
    return _carve_tensor(streams.pinned(like.nbytes, x.device.index or 0), like)


def _carve_tensor(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of `memory` as a tensor like another one."""
    strides = torch.empty_like(like, device="meta").stride()
    return memory[: like.nbytes].view(like.dtype).as_strided(like.shape, strides)


def _place_in_buffer(
    streams: Streams, parts: Iterable[tree.Tree]
) -> list[tuple[torch.Tensor, int, int]]:
    """The tensors in host memory, each with the first and last byte of its copy in a buffer."""
    end, rows = 0, []
    for x in tree.leaves(list(parts)):
        if not streams.on_device(x):
            rows.append((x, end, end + x.nbytes))
            end += -(-x.nbytes // _ALIGNED) * _ALIGNED
    return rows


def _by_streams(
    streams: Streams,
    leaves: Sequence[torch.Tensor],
    owners: Sequence[int | None],
    group_bytes: int,
    pieces: Sequence[OffloadPiece],
    far: Sequence[Sequence[tree.Tree]],
    step: Callable[[OffloadPiece, list[tree.Tree]], list[tree.Tree]],
) -> None:
    """Run ``step(piece, its state)``, which returns the new state, on each piece; overwrites `far`.

    On three streams: copies in, steps, copies back. Events order them: a step waits for its state;
    a copy back for the step; a copy in for the copies back from its place, two pieces ago.
    """
    device = next(leaf.device for leaf in leaves if streams.on_device(leaf))
    compute, into, out = streams.current(device), streams.new(device), streams.new(device)
    moves = [i is not None and streams.on_device(leaves[i]) for i in owners]
    rows = [_place_in_buffer(streams, compress(state, moves)) for state in far]
    sizes = [row[-1][2] if row else 0 for row in rows]
    alone = any(sum(leaves[i][box].nbytes for i, box in p.items()) > group_bytes for p in pieces)
    count = 1 if alone else 2
    buffers = [streams.empty(max(sizes[b::count], default=0), device) for b in range(count)]
    leaving: list[list[tuple[int, int, Any]]] = [[] for _ in buffers]
    into.wait_event(compute.record_event())  # what had the buffers' memory before

    def fetch(k: int) -> tuple[list[torch.Tensor], Any]:
        """Begin to copy the state of a piece in; and when it is there."""
        found, at = [], k % len(buffers)
        for x, start, end in rows[k]:
            for leave in [it for it in leaving[at] if it[0] < end and start < it[1]]:
                into.wait_event(leave[2])
                leaving[at].remove(leave)
            found.append(_carve_tensor(buffers[at][start:], x))
            streams.copy_(into, found[-1], x)
        return found, into.record_event()

    def put(k: int, near: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Begin to copy a piece's new state back."""
        for x, result in zip(near, new, strict=True):
            if result.data_ptr() != x.data_ptr():
                x.copy_(result)
        out.wait_event(compute.record_event())
        for (x, start, end), result in zip(rows[k], near, strict=True):
            streams.copy_(out, x, result)
            leaving[k % len(buffers)].append((start, end, out.record_event()))

    try:
        coming = fetch(0) if pieces else ([], None)
        for k, piece in enumerate(pieces):
            near, ready = coming
            if not alone and k + 1 < len(pieces):
                coming = fetch(k + 1)
            compute.wait_event(ready)
            places = {id(x): y for (x, _, _), y in zip(rows[k], near, strict=True)}
            state = [tree.map(lambda x, to=places: to.get(id(x), x), part) for part in far[k]]
            new = step(piece, state)
            moved = []
            for i, old, result in zip(owners, far[k], new, strict=True):
                for x, y in zip(tree.leaves(old), tree.leaves(result), strict=True):
                    if id(x) in places:
                        moved.append(y)
                    elif i is not None and x.data_ptr() != y.data_ptr():
                        x.copy_(y)
            put(k, near, moved)
            if alone and k + 1 < len(pieces):
                coming = fetch(k + 1)
    finally:
        for stream in (into, out):  # the buffers go back to what computes
            compute.wait_event(stream.record_event())
        out.synchronize()


def _back(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`after` where `before` is, in its memory if that is another device's."""
    if before.device == after.device:
        return after
    return before.copy_(after)


def _refuse_apart(state: tree.Tree, near: tree.Tree) -> None:
    """Refuse a program whose operations have their tensors on one device, with state on another."""
    devices = {leaf.device for leaf in tree.leaves(state)} - {tree.leaves(near)[0].device}
    if not devices:
        return
    names = ", ".join(f"torch.func.{name}" for name in compat.transform_names())
    what, fix = "a program to trace or compile", "run the update uncompiled"
    if active() is None:
        what, fix = f"a step under {names}", "take steps one by one, use update"
    raise ValueError(
        f"offload: got {what} with state on {', '.join(sorted(map(str, devices)))}; wanted it on "
        f"one device; fix: {fix}, or leave offload out"
    )
