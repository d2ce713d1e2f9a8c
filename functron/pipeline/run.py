"""One execution of a schedule's table: actions in order, pullbacks held between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from functron import tree
from functron.pipeline.action import Action
from functron.pipeline.partition import Partition
from functron.pipeline.schedule import Schedule
from functron.pipeline.traffic import Traffic
from functron.pipeline.work import Call, StageFunction, Work, check_tensors

Observer = Callable[[int, Action, float, float], None]
"""Called after each action with rank, action, and when it began and ended, in seconds."""

Place = tuple[int, int, int]  # pipe, stage, microbatch


class Run:
    """The state of an execution.

    Attributes:
        total: the sum of what the last stage returned here; None where it is not here.
        results: what it returned for each microbatch, where there is no backward.
        sums: gradients by stage, summed over microbatches.
        held: what backward will need, by pipe, stage and microbatch.
    """

    def __init__(
        self,
        stage: StageFunction,
        schedule: Schedule,
        partition: Partition,
        work: Work,
        traffic: Traffic,
        params: tree.Tree,
        batches: list[tree.Tree],
        shared: tuple,
        dtype: torch.dtype | None,
    ):
        self.stage, self.schedule, self.partition = stage, schedule, partition
        self.work, self.traffic = work, traffic
        self.batches, self.shared, self.dtype = batches, shared, dtype
        rank, self.given = traffic.rank, params
        params = traffic.gathered(params, partition)
        self.params = {s: partition.stage_params(params, s, rank) for s in partition.stages(rank)}
        self.memos: dict[int, dict] = {stage: {} for stage in self.params}
        self.total: Any = None
        self.results: dict[int, Any] = {}
        self.sums: dict[int, tree.Tree] = {}
        self.held: dict[Place, Any] = {}

    def all_ticks(self, observe: Observer | None) -> None:
        """Run the table."""
        for tick, row in enumerate(self.schedule.table):
            for rank in self.traffic.here:
                for action in row[rank]:
                    self._act(rank, action, observe)
            self.traffic.exchange(tick)
        self.traffic.finish()

    def _act(self, rank: int, action: Action, observe: Observer | None) -> None:
        pipe, stage = self.schedule.stage_of(rank, action.chunk)
        place = (pipe, stage, action.microbatch)
        given = self._given(action, place)  # waiting for it is not part of the action
        began = time.perf_counter()
        if action.kind == "F":
            self._forward(action, place, given)
        elif action.kind == "W":
            held, sums = self.held.pop(place), self._sums(stage)
            self.sums[stage] = self.work.backward_weight(held, sums)
        else:
            self._backward(action, place, given)
        if observe is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            observe(rank, action, began, time.perf_counter())

    def _given(self, action: Action, place: Place) -> Any:
        """What another stage made for an action."""
        stage = place[1]
        if action.kind == "F":
            return self.traffic.take("F", *place) if stage else None
        if action.kind == "W" or stage == self.schedule.num_stages - 1:
            return None
        return self.traffic.take("B", *place)

    def _forward(self, action: Action, place: Place, x: tree.Tree) -> None:
        pipe, stage, m = place
        part, last = self.partition.layout[stage], stage == self.schedule.num_stages - 1
        memo = self.memos[stage]
        call = Call(stage, part, last, self.params[stage], x, self.batches[m], self.shared, memo)
        if self.schedule.has_backward:
            y, self.held[place] = self.work.forward(call)
        else:
            y = self.stage(part, call.params, x, call.batch, *self.shared)
            check_tensors(call, y)
        if not last:
            self.traffic.check(*place, y)
            self.traffic.hand_over("F", action, pipe, stage + 1, y)
        elif self.schedule.has_backward:
            y = tree.map(torch.Tensor.detach, y)
            self.total = y if self.total is None else tree.map(torch.add, self.total, y)
        else:
            self.results[m] = y

    def _backward(self, action: Action, place: Place, cotangent: list | None) -> None:
        pipe, stage, _ = place
        held = self.held.pop(place)
        if action.kind == "B":
            x, self.sums[stage] = self.work.backward(held, cotangent, self._sums(stage))
        else:
            x, self.held[place] = self.work.backward_input(held, cotangent)
        if stage:
            self.traffic.hand_over("B", action, pipe, stage - 1, x)

    def _sums(self, stage: int) -> tree.Tree:
        """The sums of a stage's gradients so far, taken out."""
        if stage not in self.sums:
            return tree.map(lambda p: torch.zeros_like(p, dtype=self.dtype), self.params[stage])
        return self.sums.pop(stage)

    def gradients(self) -> dict:
        """This process's part of the gradients of what it holds."""
        sums = {stage: self._sums(stage) for stage in self.params}
        return self.traffic.add_up(sums, self.partition, self.given, self.dtype)
