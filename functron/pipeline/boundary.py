"""What stages hand on to one another, and how it gets from process to process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from functron import compat, tree
from functron.errors import Problem, raise_problems
from functron.spmd.axes import StageAxis


@dataclass(frozen=True)
class Boundary:
    """The structure, shapes and dtypes of what a stage hands on: the same for all microbatches.

    Attributes:
        structure: of the tree.
        kinds: shape and dtype of its leaves.
    """

    structure: tree.Structure
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, value: tree.Tree) -> Boundary:
        """What `value`, a tree of tensors, looks like."""
        leaves, structure = tree.flatten(value)
        return cls(structure, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves))

    @property
    def floats(self) -> Boundary:
        """The cotangents of such a value, a list."""
        kinds = tuple(kind for kind in self.kinds if kind[1].is_floating_point)
        return Boundary(tree.structure([0] * len(kinds)), kinds)

    def fill(self, make: Callable, device: torch.device) -> tree.Tree:
        """A value that looks like this, of what `make` (torch.zeros, torch.empty) gives."""
        leaves = [make(shape, dtype=dtype, device=device) for shape, dtype in self.kinds]
        return tree.unflatten(self.structure, leaves)

    def check(self, value: tree.Tree, where: str) -> None:
        """Raise ValueError where `value` does not look like this."""
        other = Boundary.of(value)
        if other.structure != self.structure:
            problem = Problem(where, f"structure {other.structure}", f"{self.structure}, as before")
            raise_problems("a stage returned another structure", [problem])
        raise_problems(
            "microbatches must have one shape",
            [
                Problem(
                    f"{where}, output {path}" if path else where,
                    f"{got[0]} {got[1]}",
                    f"{want[0]} {want[1]}, as of the microbatches before",
                    "pad the microbatches to one shape",
                )
                for path, got, want in zip(tree.paths(value), other.kinds, self.kinds, strict=True)
                if got != want
            ],
        )


class Arriving:
    """A value that is being received.

    `wait` gives it once it is here.
    """

    def __init__(self, boundary: Boundary, buffers: list[torch.Tensor]):
        self.boundary, self.buffers = boundary, buffers
        self.works: list[dist.Work] = []

    def wait(self) -> tree.Tree:
        """The value."""
        for work in self.works:
            work.wait()
        return tree.unflatten(self.boundary.structure, self.buffers)


class Post:
    """Asynchronous transfers between this rank of a pipeline and others.

    Transfers are collected and begun together by `flush`. Every pair of ranks flushes its transfers
    in the same order, which is how they find one another.
    """

    def __init__(self, stages: StageAxis, device: torch.device):
        self.group = compat.group(stages.group)
        self.device = device
        self.batched = not compat.runs_gloo(self.group)  # which has no batches
        self.waiting: list[tuple[torch.Tensor, int, Arriving | None]] = []
        self.leaving: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, value: tree.Tree, to: int) -> None:
        """Send the leaves of `value` with the next flush; they are kept until they have left."""
        self.waiting += [(leaf.contiguous(), to, None) for leaf in tree.leaves(value)]

    def receive(self, boundary: Boundary, source: int) -> Arriving:
        """Receive what `boundary` describes with the next flush."""
        arriving = Arriving(boundary, tree.leaves(boundary.fill(torch.empty, self.device)))
        self.waiting += [(buffer, source, arriving) for buffer in arriving.buffers]
        return arriving

    def flush(self) -> None:
        """Begin what has been collected, in one batch."""
        if not self.waiting:
            return
        rows, self.waiting = self.waiting, []
        works = self._begin(rows)
        self.leaving = [row for row in self.leaving if not row[0].is_completed()]
        for (tensor, _, arriving), work in zip(rows, works, strict=True):
            if arriving is None:
                self.leaving.append((work, tensor))
            else:
                arriving.works.append(work)

    def _begin(self, rows: list[tuple[torch.Tensor, int, Arriving | None]]) -> list[Any]:
        calls = [
            (dist.isend if arriving is None else dist.irecv, tensor, peer)
            for tensor, peer, arriving in rows
        ]
        if not self.batched:
            return [call(tensor, None, self.group, 0, peer) for call, tensor, peer in calls]
        works = dist.batch_isend_irecv(
            [dist.P2POp(call, x, group=self.group, group_peer=peer) for call, x, peer in calls]
        )
        return works if len(works) == len(rows) else works * len(rows)  # NCCL has one for all

    def finish(self) -> None:
        """Wait until everything has left."""
        self.flush()
        for work, _ in self.leaving:
            work.wait()
        self.leaving = []

    def describe(self, boundary: Boundary, to: int) -> None:
        """Tell rank `to` what it will receive; blocks."""
        dist.send_object_list([boundary], group=self.group, group_dst=to, device=self.device)

    def described(self, source: int) -> Boundary:
        """What rank `source` says it will send; blocks."""
        told: list[Any] = [None]
        dist.recv_object_list(told, group=self.group, group_src=source, device=self.device)
        return told[0]

    def agree(self, boundary: Boundary | None, source: int) -> Boundary:
        """The boundary that rank `source` has, on every rank."""
        told: list[Any] = [boundary]
        dist.broadcast_object_list(told, group=self.group, group_src=source, device=self.device)
        return told[0]

    def broadcast(self, value: tree.Tree, source: int) -> None:
        """Fill the leaves of `value` on every rank with those of rank `source`."""
        for leaf in tree.leaves(value):
            dist.broadcast(leaf, group=self.group, group_src=source)

    def add_up(self, value: tree.Tree, ranks: Sequence[int], me: int) -> tree.Tree:
        """The sum of `value` over some ranks, added in their order, on each of them."""
        boundary = Boundary.of(value)
        others = [rank for rank in ranks if rank != me]
        for rank in others:
            self.send(value, rank)
        theirs = {rank: self.receive(boundary, rank) for rank in others}
        self.flush()
        total = None
        for rank in ranks:
            part = value if rank == me else theirs[rank].wait()
            total = part if total is None else tree.map(torch.add, total, part)
        return total

    def gather(
        self, value: tree.Tree, dim: int, ranks: Sequence[int], me: int, size: int
    ) -> tree.Tree:
        """The parts of all ranks joined along `dim`, on some ranks; None on the others."""
        for rank in ranks:
            if rank != me:
                self.send(value, rank)
        if me not in ranks:
            self.flush()
            return None
        boundary = Boundary.of(value)
        theirs = {rank: self.receive(boundary, rank) for rank in range(size) if rank != me}
        self.flush()
        parts = [value if rank == me else theirs[rank].wait() for rank in range(size)]
        return tree.map(lambda *leaves: torch.cat(leaves, dim), *parts)

    def scatter(
        self, whole: tree.Tree, part: Boundary, dim: int, source: int, me: int, size: int
    ) -> tree.Tree:
        """This rank's part along `dim` of what rank `source` has; it looks like `part`."""
        if me != source:
            arriving = self.receive(part, source)
            self.flush()
            return arriving.wait()
        parts = [tree.map(lambda x, r=rank: x.chunk(size, dim)[r], whole) for rank in range(size)]
        for rank in range(size):
            if rank != me:
                self.send(parts[rank], rank)
        self.flush()
        return tree.map(torch.Tensor.contiguous, parts[me])
