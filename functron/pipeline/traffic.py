"""What travels between the stages of a pipeline in one execution of its table.

Between ranks that this process runs values are handed over as they are. Between processes they are
sent after the tick that made them, and awaited where they are needed.
"""

from __future__ import annotations

from typing import Any

import torch

from functron import tree
from functron.pipeline.action import Action
from functron.pipeline.boundary import Arriving, Boundary, Post
from functron.pipeline.partition import Partition
from functron.pipeline.schedule import Schedule
from functron.spmd.axes import StageAxis
from functron.spmd.stages import psum_stages


class Traffic:
    """The values under way.

    Attributes:
        schedule: whose table is run.
        rank: of this process in the pipeline; None where it runs all ranks.
        here: the ranks that this process runs.
        post: transfers between processes; None where one runs all ranks.
        known: what values look like, by where they are made: filled as it becomes known, and kept
            from one execution to the next.
        signature: what these looks are for.
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
            self.post = Post(stages, leaves[0].device)
        # what one set of processes has told each other, another has not
        self.signature = (stages.group if stages is not None else "", Boundary.of(batch))
        self.inbox: dict[tuple, Any] = {}
        self.outbox: dict[Action, Any] = {}

    def hand_over(self, kind: str, action: Action, pipe: int, stage: int, value: Any) -> None:
        """Give a value to a stage of a rank here, or keep it until the tick's transfers.

        Args:
            kind: "F" for what a stage returned, "B" for cotangents of what it was given.
            action: that made it.
            pipe, stage: that need it.
            value: a tree of tensors.
        """
        receiver, _ = self.schedule.holder(pipe, stage)
        if receiver in self.here:
            self.inbox[kind, pipe, stage, action.microbatch] = value
        else:
            self.outbox[action] = value

    def take(self, kind: str, pipe: int, stage: int, microbatch: int) -> Any:
        """What was handed over to a stage; waits for it."""
        value = self.inbox.pop((kind, pipe, stage, microbatch))
        return value.wait() if isinstance(value, Arriving) else value

    def check(self, pipe: int, stage: int, microbatch: int, y: tree.Tree) -> None:
        """Raise ValueError where a stage returns another shape than for earlier microbatches."""
        known = self.known.setdefault((self.signature, pipe, stage), Boundary.of(y))
        known.check(y, f"stage {stage}, microbatch {microbatch}")

    def exchange(self, tick: int) -> None:
        """Post this rank's part of the transfers that a tick made necessary."""
        if self.post is None or self.rank is None:
            return
        for sender, receiver, action, chunk in self.schedule.transfers_of(self.rank)[tick]:
            if sender == self.rank:
                self._send(self.post, receiver, action)
            else:
                self._receive(self.post, sender, action, chunk)
        self.post.flush()

    def _send(self, post: Post, receiver: int, action: Action) -> None:
        assert self.rank is not None
        pipe, stage = self.schedule.stage_of(self.rank, action.chunk)
        told = ("told", self.signature, pipe, stage)
        if action.kind == "F" and told not in self.known:
            self.known[told] = self.known[self.signature, pipe, stage]
            post.describe(self.known[told], receiver)
        post.send(self.outbox.pop(action), receiver)

    def _receive(self, post: Post, sender: int, action: Action, chunk: int) -> None:
        assert self.rank is not None
        pipe, stage = self.schedule.stage_of(self.rank, chunk)
        forward = action.kind == "F"
        made = (self.signature, pipe, stage - 1 if forward else stage)
        if made not in self.known:
            self.known[made] = post.described(sender)
        wanted = self.known[made] if forward else self.known[made].floats
        key = ("F" if forward else "B", pipe, stage, action.microbatch)
        self.inbox[key] = post.receive(wanted, sender)

    def finish(self) -> None:
        """Wait until everything has left."""
        if self.post is not None:
            self.post.finish()

    def published(self, total: Any) -> Any:
        """What the last stage of all pipes returned here, summed over ranks, on every rank."""
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
        """What the last stage returned for each microbatch, on every rank."""
        if self.post is None:
            return [results[m] for m in range(self.schedule.num_microbatches)]
        out = []
        for m in range(self.schedule.num_microbatches):
            pipe = self.schedule.pipe_of(m)
            source, _ = self.schedule.holder(pipe, self.schedule.num_stages - 1)
            place = ("result", self.signature)
            if place not in self.known:
                mine = Boundary.of(results[m]) if m in results else None
                self.known[place] = self.post.agree(mine, source)
            value = results.get(m)
            if value is None:
                value = self.known[place].fill(torch.empty, self.post.device)
            value = tree.map(torch.Tensor.contiguous, value)
            self.post.broadcast(value, source)
            out.append(value)
        return out

    def gathered(self, params: dict[str, Any], partition: Partition) -> dict[str, Any]:
        """The parameters with those that are spread whole on the ranks that use them."""
        if self.post is None or not partition.spread:
            return params
        assert self.rank is not None
        whole = dict(params)
        for name, dim in partition.spread.items():
            ranks = partition.sharers(name)
            size = self.schedule.num_ranks
            whole[name] = self.post.gather(params[name], dim, ranks, self.rank, size)
        return whole

    def add_up(
        self, sums: dict[int, tree.Tree], partition: Partition, params: dict[str, Any], dtype: Any
    ) -> dict[str, Any]:
        """This process's gradients from those of its stages, copies on other ranks added.

        Args:
            sums: by stage.
            partition: who holds what.
            params: what this process holds.
            dtype: of the sums; None: that of the parameters.
        """
        if self.post is None:
            return partition.join(sums, None)
        assert self.rank is not None
        tied = {name for name, letters in partition.uses.items() if set(letters) == {"E", "L"}}
        for stage in range(self.schedule.num_stages):
            ranks = partition.holders(stage)
            if self.rank in ranks and len(ranks) > 1:
                own = {name: v for name, v in sums[stage].items() if name not in tied}
                sums[stage] = {**sums[stage], **self.post.add_up(own, ranks, self.rank)}
        joined = partition.join(sums, self.rank)
        for name in partition.uses:
            ranks = partition.sharers(name) if name in tied else ()
            if self.rank in ranks and len(ranks) > 1:
                joined[name] = self.post.add_up(joined[name], ranks, self.rank)
        for name, dim in partition.spread.items():
            source, size = partition.sharers(name)[0], self.schedule.num_ranks
            part = Boundary.of(tree.map(lambda p: p.to(dtype or p.dtype), params[name]))
            whole = joined.get(name)
            joined[name] = self.post.scatter(whole, part, dim, source, self.rank, size)
        self.post.finish()
        return {name: joined[name] for name in params}
