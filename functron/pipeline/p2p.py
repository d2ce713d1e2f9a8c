"""Values between the stages of a pipeline, and their transfers from process to process.

Between ranks that this process runs values are handed over as they are. Between processes they are
sent after the tick that made them, and awaited where they are needed. A GPU begins a transfer when
it has computed what it was given before. So a receive is posted ahead, before the rank's own part
of the tick in which the other rank makes the value: else it would wait for that part too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from functron.core import compat, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.pipeline.partition import Partition
from functron.pipeline.schedule import Schedule, Transfer
from functron.pipeline.timeline import Action
from functron.spmd.axes import StageAxis
from functron.spmd.collectives import psum_stages
from functron.spmd.mesh import Link
from functron.spmd.shared_memory import HostGroup


@dataclass(frozen=True)
class Boundary:
    """The structure, shapes and dtypes of a stage's output: the same for all microbatches."""

    structure: tree.Structure
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, value: tree.Tree) -> Boundary:
        """The boundary that `value`, a tree of tensors, has."""
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
            refuse(
                "a stage returned another structure",
                where,
                f"structure {other.structure}",
                f"{self.structure}, as before",
            )
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
    """A value that is being received; `wait` gives it once it is here."""

    def __init__(
        self,
        boundary: Boundary,
        buffers: list[torch.Tensor],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.boundary, self.buffers, self.waiting = boundary, buffers, waiting
        self.works: list[dist.Work] = []

    def wait(self) -> tree.Tree:
        with self.waiting():
            for work in self.works:
                work.wait()
        return tree.unflatten(self.boundary.structure, self.buffers)


class Post:
    """Asynchronous transfers between this rank of a pipeline and others.

    Transfers are collected and begun together by `flush`. Of every pair of ranks the one flushes
    what it sends in the order in which the other flushes what it receives, which is how they find
    one another.

    Args:
        links: the (sender, receiver) of transfers that must not wait for others: where transfers
            run in order, as those of NCCL do, each has a group of its own (`BoundMesh.connect`).
    """

    def __init__(self, stages: StageAxis, device: torch.device, links: Collection[Link]):
        assert stages.index is not None
        assert stages.mesh is not None
        self.group, self.rank, self.size = compat.group(stages.group), stages.index, stages.size
        self.axis, self.recorder = stages.name, stages.recorder
        self.device = device
        self.batched = not compat.runs_gloo(self.group)  # which has no batches
        known = compat.find_group(stages.group)
        self.host = known if isinstance(known, HostGroup) else None
        names = stages.mesh.connect(stages.name, links) if self.batched else {}
        self.links = {link: compat.group(name) for link, name in names.items()}
        self.waiting: list[tuple[torch.Tensor, int, Arriving | None]] = []
        self.leaving: list[tuple[dist.Work, torch.Tensor, int]] = []

    def _waiting(
        self, op: str, peer: int | None = None, value: torch.Tensor | None = None
    ) -> AbstractContextManager[None]:
        """A with block in which this process waits for rank `peer` of the pipeline, or for all."""
        if self.recorder is None:
            return nullcontext()
        rank = None if peer is None else self.recorder.ranks[self.axis][peer]
        return self.recorder.record(op, self.axis, value, rank)

    def send(self, value: tree.Tree, to: int) -> None:
        """Send the leaves of `value` with the next flush; they are kept until they have left."""
        self.waiting += [(leaf.contiguous(), to, None) for leaf in tree.leaves(value)]

    def receive(self, boundary: Boundary, source: int) -> Arriving:
        """Receive what `boundary` describes with the next flush."""
        buffers = tree.leaves(boundary.fill(torch.empty, self.device))
        largest = max(buffers, key=lambda buffer: buffer.nbytes, default=None)
        waiting = functools.partial(self._waiting, "receive", source, largest)
        arriving = Arriving(boundary, buffers, waiting)
        self.waiting += [(buffer, source, arriving) for buffer in arriving.buffers]
        return arriving

    def flush(self) -> None:
        """Begin what has been collected, in one batch of each group."""
        if not self.waiting:
            return
        rows, self.waiting = self.waiting, []
        works = self._begin(rows)
        self.leaving = [row for row in self.leaving if not row[0].is_completed()]
        for (tensor, peer, arriving), work in zip(rows, works, strict=True):
            if arriving is None:
                self.leaving.append((work, tensor, peer))
            else:
                arriving.works.append(work)

    def _begin(self, rows: list[tuple[torch.Tensor, int, Arriving | None]]) -> list[Any]:
        if self.host is not None:
            send, receive = self.host.isend, self.host.irecv
            return [(send if a is None else receive)(tensor, peer) for tensor, peer, a in rows]
        calls = [
            (dist.isend if arriving is None else dist.irecv, tensor, peer)
            for tensor, peer, arriving in rows
        ]
        if not self.batched:
            return [call(tensor, None, self.group, 0, peer) for call, tensor, peer in calls]
        batches: dict[dist.ProcessGroup, list[int]] = {}
        for place, (_, peer, arriving) in enumerate(rows):
            link = (self.rank, peer) if arriving is None else (peer, self.rank)
            batches.setdefault(self.links.get(link, self.group), []).append(place)
        works: list[Any] = [None] * len(rows)
        for group, places in batches.items():
            batch = [
                dist.P2POp(call, x, group=group, group_peer=peer)
                for call, x, peer in (calls[place] for place in places)
            ]
            made = dist.batch_isend_irecv(batch)
            every = made if len(made) == len(batch) else made * len(batch)  # NCCL has one for all
            for place, work in zip(places, every, strict=True):
                works[place] = work
        return works

    def finish(self) -> None:
        """Wait until everything has left."""
        self.flush()
        for work, tensor, peer in self.leaving:
            with self._waiting("send", peer, tensor):
                work.wait()
        self.leaving = []

    def describe(self, boundary: Boundary, to: int) -> None:
        """Tell rank `to` what it will receive; blocks."""
        with self._waiting("send", to):
            dist.send_object_list([boundary], group=self.group, group_dst=to, device=self.device)

    def described(self, source: int) -> Boundary:
        """The boundary of what rank `source` will send, as it describes it; blocks."""
        found: list[Any] = [None]
        with self._waiting("receive", source):
            dist.recv_object_list(found, group=self.group, group_src=source, device=self.device)
        return found[0]

    def agree(self, boundary: Boundary | None, source: int) -> Boundary:
        """The boundary that rank `source` has, on every rank."""
        found: list[Any] = [boundary]
        with self._waiting("pbroadcast"):
            dist.broadcast_object_list(
                found, group=self.group, group_src=source, device=self.device
            )
        return found[0]

    def broadcast(self, value: tree.Tree, source: int) -> None:
        """Fill the leaves of `value` on every rank with those of rank `source`."""
        for leaf in tree.leaves(value):
            with self._waiting("pbroadcast", value=leaf):
                dist.broadcast(leaf, group=self.group, group_src=source)

    def add_up(self, value: tree.Tree, ranks: Sequence[int]) -> tree.Tree:
        """The sum of `value` over some ranks, added in their order, on each of them."""
        boundary = Boundary.of(value)
        others = [rank for rank in ranks if rank != self.rank]
        for rank in others:
            self.send(value, rank)
        theirs = {rank: self.receive(boundary, rank) for rank in others}
        self.flush()
        total = None
        for rank in ranks:
            part = value if rank == self.rank else theirs[rank].wait()
            total = part if total is None else tree.map(torch.add, total, part)
        return total

    def gather(self, value: tree.Tree, dim: int, ranks: Sequence[int]) -> tree.Tree:
        """The parts of all ranks joined along `dim`, on some ranks; None on the others."""
        me, everyone = self.rank, range(self.size)
        for rank in ranks:
            if rank != me:
                self.send(value, rank)
        if me not in ranks:
            self.flush()
            return None
        boundary = Boundary.of(value)
        theirs = {rank: self.receive(boundary, rank) for rank in everyone if rank != me}
        self.flush()
        parts = [value if rank == me else theirs[rank].wait() for rank in everyone]
        return tree.map(lambda *leaves: torch.cat(leaves, dim), *parts)

    def scatter(self, whole: tree.Tree, part: Boundary, dim: int, source: int) -> tree.Tree:
        """This rank's part along `dim` of `whole`, of rank `source`; it looks like `part`."""
        me, size = self.rank, self.size
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


class PendingValues:
    """The values that stages have sent or made and that others have yet to use.

    Attributes:
        rank: of this process in the pipeline; None where it runs all ranks.
        post: transfers between processes; None where one runs all ranks.
        known: the boundaries of values, by where they are made: filled as they become known, and
            kept from one execution to the next.
        signature: of the microbatches that these are for.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: StageAxis | None,
        batch: tree.Tree,
        known: dict[Any, Boundary],
    ):
        self.schedule, self.known = schedule, known
        self.rank = stages.index if stages is not None else None
        self.here = range(schedule.num_ranks) if self.rank is None else (self.rank,)
        leaves = tree.leaves(batch)
        self.post = None
        if stages is not None and stages.index is not None:
            self.post = Post(stages, leaves[0].device, schedule.links)
        # boundaries that one set of processes knows of each other, another does not
        self.signature = (stages.group if stages is not None else "", Boundary.of(batch))
        self.inbox: dict[tuple, Any] = {}
        self.outbox: dict[Action, Any] = {}
        self.behind: list[Transfer] = []  # receives that wait for a description

    def hand_over(self, kind: str, action: Action, pipe: int, stage: int, value: Any) -> None:
        """Give a value to a stage of a rank here, or keep it until the tick's transfers.

        Args:
            kind: "F" of a stage's output, "B" of the cotangents of its input.
        """
        receiver, _ = self.schedule.holder(pipe, stage)
        if receiver in self.here:
            self.inbox[kind, pipe, stage, action.microbatch] = value
        else:
            self.outbox[action] = value

    def take(self, kind: str, pipe: int, stage: int, microbatch: int) -> Any:
        """The value that was handed over to a stage; waits for it."""
        value = self.inbox.pop((kind, pipe, stage, microbatch))
        return value.wait() if isinstance(value, Arriving) else value

    def check(self, pipe: int, stage: int, microbatch: int, y: tree.Tree) -> None:
        """Raise ValueError where a stage returns another shape than for earlier microbatches."""
        known = self.known.setdefault((self.signature, pipe, stage), Boundary.of(y))
        known.check(y, f"stage {stage}, microbatch {microbatch}")

    def expect(self, tick: int) -> None:
        """Post the receives of what a tick will make for this rank, before its own part of it.

        What was never received is described by its sender once it is made, for which this process
        waits: the receives of such a tick are posted by `exchange`, all of them to keep the order.
        """
        if self.post is None or self.rank is None:
            return
        transfers = self.schedule.transfers_by_rank[self.rank][tick]
        mine = [t for t in transfers if t.receiver == self.rank]
        self.behind = mine if any(self._made(t) not in self.known for t in mine) else []
        for transfer in mine if not self.behind else ():
            self._receive(self.post, transfer)
        self.post.flush()

    def exchange(self, tick: int) -> None:
        """Post the transfers that a tick made necessary, but for the receives posted ahead."""
        if self.post is None or self.rank is None:
            return
        for transfer in self.schedule.transfers_by_rank[self.rank][tick]:
            if transfer.sender == self.rank:
                self._send(self.post, transfer.receiver, transfer.action)
            elif transfer in self.behind:
                self._receive(self.post, transfer)
        self.post.flush()

    def _made(self, transfer: Transfer) -> tuple:
        """The place, in `known`, of what has the shapes of a transfer to this rank."""
        pipe, stage = self.schedule.stage_of(transfer.receiver, transfer.chunk)
        return self.signature, pipe, stage - 1 if transfer.action.kind == "F" else stage

    def _send(self, post: Post, receiver: int, action: Action) -> None:
        assert self.rank is not None
        pipe, stage = self.schedule.stage_of(self.rank, action.chunk)
        described = ("described", self.signature, pipe, stage)
        if action.kind == "F" and described not in self.known:
            self.known[described] = self.known[self.signature, pipe, stage]
            post.describe(self.known[described], receiver)
        post.send(self.outbox.pop(action), receiver)

    def _receive(self, post: Post, transfer: Transfer) -> None:
        sender, receiver, action, chunk = transfer
        forward, made = action.kind == "F", self._made(transfer)
        if made not in self.known:
            self.known[made] = post.described(sender)
        wanted = self.known[made] if forward else self.known[made].floats
        key = ("F" if forward else "B", *self.schedule.stage_of(receiver, chunk), action.microbatch)
        self.inbox[key] = post.receive(wanted, sender)

    def finish(self) -> None:
        """Wait until everything has left."""
        if self.post is not None:
            self.post.finish()

    def published(self, total: Any) -> Any:
        """`total`, of the last stages of all pipes here, summed over ranks, on every rank."""
        if self.post is None:
            return total
        place = ("total", self.signature)
        if place not in self.known:
            source, _ = self.schedule.holder(0, self.schedule.num_stages - 1)
            self.known[place] = self.post.agree(
                None if total is None else Boundary.of(total), source
            )
        if total is None:
            total = self.known[place].fill(torch.zeros, self.post.device)
        return tree.map(psum_stages, total)

    def collected(self, results: dict[int, Any]) -> list:
        """The output of the last stage for each microbatch, on every rank."""
        if self.post is None:
            return [results[m] for m in range(self.schedule.num_microbatches)]
        out, place = [], ("result", self.signature)
        for m in range(self.schedule.num_microbatches):
            source, _ = self.schedule.holder(self.schedule.pipe_of(m), self.schedule.num_stages - 1)
            if place not in self.known:
                mine = Boundary.of(results[m]) if m in results else None
                self.known[place] = self.post.agree(mine, source)
            value = results.get(m)
            if value is None:
                value = self.known[place].fill(torch.empty, self.post.device)
            out.append(tree.map(torch.Tensor.contiguous, value))
            self.post.broadcast(out[-1], source)
        return out

    def gathered(self, params: dict[str, Any], partition: Partition) -> dict[str, Any]:
        """The parameters with those that are spread whole on the ranks that use them."""
        if self.post is None:
            return params
        return dict(params) | {
            name: self.post.gather(params[name], dim, partition.sharers(name))
            for name, dim in partition.spread.items()
        }

    def add_up(
        self, sums: dict[int, tree.Tree], partition: Partition, params: dict[str, Any], dtype: Any
    ) -> dict[str, Any]:
        """This process's gradients from those of its stages, copies on other ranks added.

        Args:
            sums: by stage.
            dtype: of the sums; None: that of the parameters.
        """
        if self.post is None:
            return partition.join(sums, None)
        tied = {name for name in partition.uses if partition.is_tied(name)}
        for stage in range(self.schedule.num_stages):
            ranks = partition.holders(stage)
            if self.rank in ranks and len(ranks) > 1:
                held = partition.entries(sums[stage])
                own = {name: v for name, v in held.items() if name not in tied}
                sums[stage] = partition.nest({**held, **self.post.add_up(own, ranks)})
        joined = partition.entries(partition.join(sums, self.rank))
        for name in partition.uses:
            ranks = partition.sharers(name) if name in tied else ()
            if self.rank in ranks and len(ranks) > 1:
                joined[name] = self.post.add_up(joined[name], ranks)
        for name, dim in partition.spread.items():
            part = Boundary.of(tree.map(lambda p: p.to(dtype or p.dtype), params[name]))
            source = partition.sharers(name)[0]
            joined[name] = self.post.scatter(joined.get(name), part, dim, source)
        self.post.finish()
        return partition.nest({name: joined[name] for name in partition.entries(params)})
