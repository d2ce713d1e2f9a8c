"""The executor: one scan over a schedule's table, simulated in one process or on this rank's own.

Every forward leaves its pullback, which is held until the table says that its backward comes up.
In one process the ranks of the pipeline run in turn, inside the vmaps of the other axes; on a bound
mesh each process runs its own column, and values travel between ticks, asynchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from functron import compat, tree
from functron.errors import Problem, raise_problems
from functron.pipeline.action import Action
from functron.pipeline.boundary import Arriving, Boundary, Post
from functron.pipeline.partition import Partition
from functron.pipeline.pieces import Pieces
from functron.pipeline.schedule import Schedule
from functron.pipeline.work import Call, Pullbacks, StageFunction, Work, check_boundary
from functron.program.recorder import active
from functron.spmd.axes import StageAxis, scope
from functron.spmd.stages import psum_stages
from functron.transforms.accumulate import microbatches
from functron.transforms.gradient import share

Observer = Callable[[int, Action, float, float], None]
"""Called after each action with rank, action, and when it began and ended, in seconds."""


class Pipeline:
    """A model's stages under a schedule; see `pipelined`.

    Attributes:
        stage: the function of one stage.
        partition: who holds which parameters.
        schedule: who does what when.
        dtype: what gradients are summed in; None: their own.
        compile: what `Program.compile` is called with for stages on a bound mesh; None: stages are
            not compiled.
        observe: told of every action.
    """

    def __init__(
        self,
        stage: StageFunction,
        partition: Partition,
        schedule: Schedule,
        dtype: torch.dtype | None = None,
        compile: Mapping[str, Any] | None = None,  # noqa: A002  (as the function that it is for)
        observe: Observer | None = None,
    ):
        self.stage, self.partition, self.schedule = stage, partition, schedule
        self.dtype, self.compile, self.observe = dtype, compile, observe
        kinds = {a.kind for row in schedule.table for cell in row for a in cell}
        self.split = bool(kinds & {"I", "W"})
        self.evaluated = Pieces(stage, self.split, dtype, None)
        self.compiled = Pieces(stage, self.split, dtype, compile)
        self.known: dict[Any, Boundary] = {}  # what travels, by signature and place

    def value_and_grad(self, params: tree.Tree, batch: tree.Tree, *shared: Any) -> tuple[Any, dict]:
        """The loss, summed over microbatches, and this rank's share of its gradient.

        Args:
            params: what `partition` says that this process holds.
            batch: a tree whose leading dims are cut into the schedule's microbatches.
            shared: what all microbatches share.

        Returns:
            ``(loss, gradients)``, or ``((loss, aux), gradients)``; the loss is the same on all
            ranks of the pipeline. Finish the gradients with `sync_gradients`.
        """
        if not self.schedule.has_backward:
            raise ValueError(
                f"value_and_grad: got schedule {self.schedule.name!r}, which has no backward; "
                "wanted one that has; fix: call forward, or choose another schedule"
            )
        run = Run(self, params, batch, shared)
        run.all_ticks()
        value = run.published(run.total)
        return value, run.gradients()

    def work(self, stages: StageAxis | None) -> Work:
        """How stages are computed where this is called."""
        if self.compile is not None and stages is not None and stages.index is not None:
            return self.compiled
        # a program that is being traced, or differentiated again, sees operations, not programs
        plain = not (active() or compat.differentiating() or compat.dispatch_modes_active())
        return self.evaluated if self.split and plain else Pullbacks(self.stage)

    def forward(self, params: tree.Tree, batch: tree.Tree, *shared: Any) -> list:
        """What the last stage returns for each microbatch, on every rank; no gradients.

        Arguments are those of `value_and_grad`. Of the schedule the forwards are run.
        """
        schedule = self.schedule.forward_only() if self.schedule.has_backward else self.schedule
        plain = Pipeline(self.stage, self.partition, schedule, observe=self.observe)
        plain.known = self.known
        with torch.no_grad():
            run = Run(plain, params, batch, shared)
            run.all_ticks()
            return run.collected()


def pipelined(
    stage: StageFunction,
    partition: Partition,
    schedule: Schedule,
    *,
    dtype: torch.dtype | None = None,
    compile: Mapping[str, Any] | None = None,  # noqa: A002
    observe: Observer | None = None,
) -> Pipeline:
    """The stages of a model under a schedule: its loss and gradients, exactly those without.

    Called in a program that `shard_map` maps with ``stages="pp"``. Where one process runs all
    ranks, it can be called without any mesh.

    Args:
        stage: ``(part, params, x, batch, *shared) -> y``; see `StageFunction`.
        partition: who holds which parameters.
        schedule: who does what when.
        dtype: add gradients of microbatches up in this dtype, such as torch.float32; None: theirs.
        compile: compile the stages, on a bound mesh; a mapping of settings of `Program.compile`,
            such as ``{}``. Where one process runs all ranks, `jit` compiles the whole step instead.
        observe: called with rank, action, and when it began and ended, in seconds: what a
            `Timeline` is made of. Waits for the device after every action.

    Collectives over the pipeline's ranks: per microbatch and boundary one send of what the stage
    returns and one of its cotangent; per step an all-reduce of the loss and, for parameters that
    several ranks hold, one exchange of their gradients. At the first call of a signature, shapes.

    Raises:
        ValueError: the schedule is not valid, or not the partition's.
    """
    schedule.validate()
    if schedule.pipes != partition.pipes:
        problem = Problem("partition.pipes", f"{partition.pipes}", f"{schedule.pipes}")
        raise_problems(f"the partition is not for the schedule {schedule.name!r}", [problem])
    return Pipeline(stage, partition, schedule, dtype, compile, observe)


class Run:
    """One execution of a table.

    Attributes:
        total: the sum of what the last stage returned here; None where it is not here.
    """

    def __init__(self, pipeline: Pipeline, params: tree.Tree, batch: tree.Tree, shared: tuple):
        self.pipeline, self.schedule = pipeline, pipeline.schedule
        self.partition, self.shared = pipeline.partition, shared
        self.stages = _stage_axis(self.schedule)
        self.rank = self.stages.index if self.stages is not None else None
        self.here = range(self.schedule.num_ranks) if self.rank is None else (self.rank,)
        self.batches = microbatches(batch, self.schedule.num_microbatches)
        self.params = {
            stage: self.partition.stage_params(params, stage, self.rank)
            for stage in self.partition.stages(self.rank)
        }
        # what one set of processes has told each other, another has not
        group = self.stages.group if self.stages is not None else ""
        self.signature = (group, Boundary.of(self.batches[0]))
        self.work = pipeline.work(self.stages)
        self.post = _post(self.stages, batch)
        self.total: Any = None
        self.sums: dict[int, tree.Tree] = {}
        self.inbox: dict[tuple, Any] = {}
        self.outbox: dict[Action, Any] = {}
        self.held: dict[tuple, Any] = {}
        self.results: dict[int, Any] = {}

    def all_ticks(self) -> None:
        """Run the table."""
        for tick, row in enumerate(self.schedule.table):
            for rank in self.here:
                for action in row[rank]:
                    self._act(rank, action)
            if self.post is not None:
                self._exchange(self.post, tick)
        if self.post is not None:
            self.post.finish()

    def _act(self, rank: int, action: Action) -> None:
        began = time.perf_counter()
        {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}[action.kind](
            rank, action
        )
        if self.pipeline.observe is not None:
            if self.post is not None and self.post.device.type == "cuda":
                torch.cuda.synchronize(self.post.device)
            self.pipeline.observe(rank, action, began, time.perf_counter())

    def _forward(self, rank: int, action: Action) -> None:
        pipe, stage = self.schedule.stage_of(rank, action.chunk)
        m, last = action.microbatch, stage == self.schedule.num_stages - 1
        x = self._take("F", pipe, stage, m) if stage else None
        part = self.partition.layout[stage]
        call = Call(stage, part, last, self.params[stage], x, self.batches[m], self.shared)
        if self.schedule.has_backward:
            y, self.held[pipe, stage, m] = self.work.forward(call)
        else:
            y = self.pipeline.stage(part, call.params, x, call.batch, *self.shared)
        if not last:
            check_boundary(call, y)
            self._known(pipe, stage, y).check(y, f"stage {stage}, microbatch {m}")
            self._hand_over("F", action, pipe, stage + 1, y)
        elif self.schedule.has_backward:
            y = tree.map(torch.Tensor.detach, y)
            self.total = y if self.total is None else tree.map(torch.add, self.total, y)
        else:
            self.results[m] = y

    def _backward(self, rank: int, action: Action) -> None:
        place = self._place(rank, action)
        x, self.sums[place[1]] = self.work.backward(
            self.held.pop(place), self._cotangent(place), self._sums(place[1])
        )
        self._return(action, place, x)

    def _input(self, rank: int, action: Action) -> None:
        place = self._place(rank, action)
        held, cotangent = self.held.pop(place), self._cotangent(place)
        x, self.held[place] = self.work.backward_input(held, cotangent)
        self._return(action, place, x)

    def _weight(self, rank: int, action: Action) -> None:
        place = self._place(rank, action)
        held, sums = self.held.pop(place), self._sums(place[1])
        self.sums[place[1]] = self.work.backward_weight(held, sums)

    def _place(self, rank: int, action: Action) -> tuple[int, int, int]:
        """Pipe, stage and microbatch."""
        return (*self.schedule.stage_of(rank, action.chunk), action.microbatch)

    def _cotangent(self, place: tuple[int, int, int]) -> list | None:
        return None if place[1] == self.schedule.num_stages - 1 else self._take("B", *place)

    def _return(self, action: Action, place: tuple[int, int, int], x: list) -> None:
        pipe, stage, _ = place
        if stage:
            self._hand_over("B", action, pipe, stage - 1, x)

    def _sums(self, stage: int) -> tree.Tree:
        """The sums of a stage's gradients so far, taken out."""
        if stage not in self.sums:
            return tree.map(self._zeros, self.params[stage])
        return self.sums.pop(stage)

    def _zeros(self, leaf: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(leaf, dtype=self.pipeline.dtype)

    def _hand_over(self, kind: str, action: Action, pipe: int, stage: int, value: Any) -> None:
        """Give a value to a stage of a rank here, or keep it until the tick's transfers."""
        receiver, _ = self.schedule.holder(pipe, stage)
        if receiver in self.here:
            self.inbox[kind, pipe, stage, action.microbatch] = value
        else:
            self.outbox[action] = value

    def _take(self, kind: str, pipe: int, stage: int, microbatch: int) -> Any:
        value = self.inbox.pop((kind, pipe, stage, microbatch))
        return value.wait() if isinstance(value, Arriving) else value

    def _known(self, pipe: int, stage: int, y: tree.Tree) -> Boundary:
        return self.pipeline.known.setdefault((self.signature, pipe, stage), Boundary.of(y))

    def _exchange(self, post: Post, tick: int) -> None:
        """Post this rank's part of the transfers that a tick made necessary."""
        for sender, receiver, action, chunk in self.schedule.transfers(tick):
            if sender == self.rank:
                self._send(post, receiver, action)
            elif receiver == self.rank:
                self._receive(post, sender, action, chunk)

    def _send(self, post: Post, receiver: int, action: Action) -> None:
        assert self.rank is not None
        pipe, stage = self.schedule.stage_of(self.rank, action.chunk)
        described = ("sent", self.signature, pipe, stage)
        if action.kind == "F" and described not in self.pipeline.known:
            boundary = self.pipeline.known[self.signature, pipe, stage]
            post.describe(boundary, receiver)
            self.pipeline.known[described] = boundary
        post.send(self.outbox.pop(action), receiver)

    def _receive(self, post: Post, sender: int, action: Action, chunk: int) -> None:
        assert self.rank is not None
        pipe, stage = self.schedule.stage_of(self.rank, chunk)
        maker = stage - 1 if action.kind == "F" else stage
        place = (self.signature, pipe, maker)
        if place not in self.pipeline.known:
            self.pipeline.known[place] = post.described(sender)
        boundary = self.pipeline.known[place]
        kind = "F" if action.kind == "F" else "B"
        wanted = boundary if kind == "F" else boundary.floats
        self.inbox[kind, pipe, stage, action.microbatch] = post.receive(wanted, sender)

    def gradients(self) -> dict:
        """This process's share of the gradients of what it holds."""
        for stage, params in self.params.items():
            self.sums.setdefault(stage, tree.map(self._zeros, params))
        if self.post is not None and len(self.schedule.pipes) > 1:
            for stage in range(self.schedule.num_stages):
                self._add_up(self.partition.holders(stage), stage)
        sums = self.partition.join(self.sums, self.rank)
        if self.post is not None:
            for name, letters in self.partition.uses.items():
                ranks = self.partition.sharers(name)
                if set(letters) == {"E", "L"} and self.rank in ranks and len(ranks) > 1:
                    sums[name] = self.post.add_up(sums[name], ranks, self.rank)
            self.post.finish()
        return tree.map(share, sums)

    def _add_up(self, ranks: Sequence[int], stage: int) -> None:
        """Sum the gradients of a stage that several ranks hold; tied ones are summed later."""
        if self.rank in ranks and len(ranks) > 1:
            assert self.post is not None
            assert self.rank is not None
            mine = self.sums[stage]
            own = {n: mine[n] for n in mine if set(self.partition.uses[n]) != {"E", "L"}}
            self.sums[stage] = {**mine, **self.post.add_up(own, ranks, self.rank)}

    def published(self, total: Any) -> Any:
        """What the last stage of all pipes returned, summed, on every rank."""
        if self.post is None:
            return total
        place = ("total", self.signature)
        if place not in self.pipeline.known:
            source, _ = self.schedule.holder(0, self.schedule.num_stages - 1)
            mine = None if total is None else Boundary.of(total)
            self.pipeline.known[place] = self.post.agree(mine, source)
        boundary = self.pipeline.known[place]
        if total is None:
            zeros = [torch.zeros(s, dtype=d, device=self.post.device) for s, d in boundary.kinds]
            total = tree.unflatten(boundary.structure, zeros)
        return tree.map(psum_stages, total)

    def collected(self) -> list:
        """What the last stage returned for each microbatch, on every rank."""
        if self.post is None:
            return [self.results[m] for m in range(len(self.batches))]
        out = []
        for m in range(len(self.batches)):
            source, _ = self.schedule.holder(self.schedule.pipe_of(m), self.schedule.num_stages - 1)
            place = ("result", self.signature)
            if place not in self.pipeline.known:
                mine = Boundary.of(self.results[m]) if m in self.results else None
                self.pipeline.known[place] = self.post.agree(mine, source)
            boundary = self.pipeline.known[place]
            empty = [torch.empty(s, dtype=d, device=self.post.device) for s, d in boundary.kinds]
            value = self.results.get(m, tree.unflatten(boundary.structure, empty))
            value = tree.map(torch.Tensor.contiguous, value)
            self.post.broadcast(value, source)
            out.append(value)
        return out


def _stage_axis(schedule: Schedule) -> StageAxis | None:
    """The axis whose ranks are those of the schedule."""
    stages = scope().stages
    size = stages.size if stages is not None else 1
    if stages is not None and size != schedule.num_ranks:
        raise ValueError(
            f"pipeline: got a schedule for {schedule.num_ranks} ranks on {stages.name}={size}; "
            f"wanted the same number; fix: make the schedule for {size} ranks"
        )
    if stages is not None and stages.index is not None and scope().axis_index is not None:
        raise ValueError(
            "pipeline: got a step on a bound mesh to trace or compile as one program; wanted it "
            "run stage by stage; fix: make_pipelined_step(..., compile=True) compiles the stages"
        )
    return stages


def _post(stages: StageAxis | None, batch: tree.Tree) -> Post | None:
    if stages is None or stages.index is None:
        return None
    return Post(stages, next(leaf.device for leaf in tree.leaves(batch)))
