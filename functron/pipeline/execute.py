"""The executor: one scan over a schedule's table, simulated in one process or on this rank's own.

Every forward leaves its residuals, which are kept until the table has its backward. In one process
the ranks of the pipeline run in turn, inside the vmaps of the other axes; on a bound mesh each
process runs its own column, and values travel between ticks, asynchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.closure import hoist
from functron.core.errors import public, refuse
from functron.pipeline.p2p import Boundary, PendingValues
from functron.pipeline.partition import Partition
from functron.pipeline.schedule import Schedule
from functron.pipeline.stage_backward import (
    CutStages,
    Pullbacks,
    StageCall,
    StageFunction,
    StageSteps,
    check_tensors,
    finish_steps,
)
from functron.pipeline.timeline import Action, ScheduleCell
from functron.program.recorder import active
from functron.spmd.axes import StageAxis, scope
from functron.spmd.mesh import BoundMesh, Mesh
from functron.transforms.capture import is_watched, watched_scope
from functron.transforms.gradient import share
from functron.transforms.gradient_functions import BoundGradients, GradientFunction, Views
from functron.transforms.scan import microbatches

Observer = Callable[[int, Action, float, float], None]
"""Called after each action with rank, action, and when it began and ended, in seconds."""

PipePlace = tuple[int, int, int]  # pipe, stage, microbatch


class _Execution:
    """One execution of a table: actions in order, residuals kept between them.

    Attributes:
        total: the sum of the last stage's outputs here; None where it is not here.
        results: its output for each microbatch, where there is no backward.
        sums: gradients by stage, summed over microbatches.
        residuals: for backwards to come, by pipe, stage and microbatch.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        params: tree.Tree,
        batch: tree.Tree,
        shared: tuple,
    ):
        stages = _stage_axis(schedule)
        self.stage, self.partition, self.dtype = pipeline.stage, pipeline.partition, pipeline.dtype
        self.schedule, self.work = schedule, pipeline.work(stages)
        self.batches = list(microbatches(batch, schedule.num_microbatches))
        self.traffic = PendingValues(schedule, stages, self.batches[0], pipeline.known)
        self.shared, self.given, partition = shared, params, self.partition
        rank, params = self.traffic.rank, self.traffic.gathered(params, partition)
        self.params = {s: partition.stage_params(params, s, rank) for s in partition.stages(rank)}
        self.memos: dict[int, dict] = {stage: {} for stage in self.params}
        self.total: Any = None
        self.results: dict[int, Any] = {}
        self.sums: dict[int, tree.Tree] = {}
        self.residuals: dict[PipePlace, Any] = {}

    def all_ticks(self, observe: Observer | None) -> None:
        """Run the table."""
        for tick, row in enumerate(self.schedule.table):
            self.traffic.expect(tick)
            for rank in self.traffic.here:
                self._cell(rank, row[rank], observe)
            self.traffic.exchange(tick)
        self.traffic.finish()

    def _cell(self, rank: int, cell: ScheduleCell, observe: Observer | None) -> None:
        """Do the actions of a cell: compiled, two that do not need one another as one program."""
        if len(cell) == 2 and self._can_join(rank, *cell):
            self._run_actions(rank, cell, observe)
            return
        for action in cell:
            self._run_actions(rank, (action,), observe)

    def _can_join(self, rank: int, first: Action, second: Action) -> bool:
        """Whether, of compiled ones, one is a forward that the other, a backward, is not of."""
        compiled = isinstance(self.work, CutStages) and self.work.settings is not None
        forwards = [first.kind, second.kind].count("F")
        made = self.schedule.makes(rank, first)
        return compiled and forwards == 1 and made not in self.schedule.needs(rank, second)

    def _run_actions(self, rank: int, cell: ScheduleCell, observe: Observer | None) -> None:
        given = [
            self._take_input(rank, action) for action in cell
        ]  # waiting is not part of the action
        began = time.perf_counter()
        steps = [self._steps(rank, action, x) for action, x in zip(cell, given, strict=True)]
        del given
        if len(steps) == 2:
            assert isinstance(self.work, CutStages)
            self.work.together(*steps)
        else:
            finish_steps(*steps)
        if observe is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ended = time.perf_counter()
            for action in cell:
                observe(rank, action, began, ended)

    def _steps(self, rank: int, action: Action, given: Any) -> StageSteps:
        """The steps of an action; pieces of compiled programs are yielded to be run."""
        pipe, stage = self.schedule.stage_of(rank, action.chunk)
        place = (pipe, stage, action.microbatch)
        if action.kind == "F":
            yield from self._forward(action, place, given)
        elif action.kind == "W":
            residuals, sums = self.residuals.pop(place), self._take_sums(stage)
            self.sums[stage] = yield from self.work.backward_weight(residuals, sums)
        else:
            yield from self._backward(action, place, given)

    def _take_input(self, rank: int, action: Action) -> Any:
        """The value that another stage made for an action."""
        pipe, stage = self.schedule.stage_of(rank, action.chunk)
        place = (pipe, stage, action.microbatch)
        if action.kind == "F":
            return self.traffic.take("F", *place) if stage else None
        if action.kind == "W" or stage == self.schedule.num_stages - 1:
            return None
        return self.traffic.take("B", *place)

    def _forward(self, action: Action, place: PipePlace, x: tree.Tree) -> StageSteps:
        pipe, stage, m = place
        part, last = self.partition.layout[stage], stage == self.schedule.num_stages - 1
        memo = self.memos[stage]
        call = StageCall(
            stage, part, last, self.params[stage], x, self.batches[m], self.shared, memo
        )
        with watched_scope(*(["microbatches", m] if len(self.batches) > 1 else [])):
            if self.schedule.has_backward:
                y, self.residuals[place] = yield from self.work.forward(call)
            else:
                y = self.stage(part, call.params, x, call.batch, *self.shared)
                check_tensors(call, y)
        if not last:
            self.traffic.check(*place, y)
            self.traffic.hand_over("F", action, pipe, stage + 1, y)
        elif self.schedule.has_backward:
            if not compat.differentiating():
                y = tree.map(torch.Tensor.detach, y)
            self.total = y if self.total is None else tree.map(torch.add, self.total, y)
        else:
            self.results[m] = y

    def _backward(self, action: Action, place: PipePlace, cotangent: list | None) -> StageSteps:
        pipe, stage, _ = place
        residuals = self.residuals.pop(place)
        if action.kind == "B":
            backward = self.work.backward(residuals, cotangent, self._take_sums(stage))
            x, self.sums[stage] = yield from backward
        else:
            backward = self.work.backward_input(residuals, cotangent)
            x, self.residuals[place] = yield from backward
        if stage:
            self.traffic.hand_over("B", action, pipe, stage - 1, x)

    def _take_sums(self, stage: int) -> tree.Tree:
        """The sums of a stage's gradients so far, taken out."""
        if stage not in self.sums:
            return tree.map(lambda p: torch.zeros_like(p, dtype=self.dtype), self.params[stage])
        return self.sums.pop(stage)

    def gradients(self) -> dict:
        """This process's part of the gradients of what it holds."""
        sums = {stage: self._take_sums(stage) for stage in self.params}
        return self.traffic.add_up(sums, self.partition, self.given, self.dtype)


class Pipeline:
    """A model's stages under a schedule; see `pipelined`.

    Attributes:
        dtype: of the sums of gradients; None: their own.
        compile: settings of `functron.compiler.compile` for stages on a bound mesh; None: stages
            are not compiled.
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
        self.evaluated = CutStages(stage, self.split, dtype, None)
        pairs = any(len(cell) == 2 for row in schedule.table for cell in row)
        self.compiled = CutStages(stage, self.split, dtype, compile, pairs=pairs)
        self.known: dict[Any, Boundary] = {}  # what travels, by signature and place

    def value_and_grad(self, params: tree.Tree, batch: tree.Tree, *shared: Any) -> tuple[Any, dict]:
        """The loss, summed over microbatches, and this rank's share of its gradient.

        Args:
            params: those that this process holds by `partition`.
            batch: a tree whose leading dims are dealt into the schedule's microbatches, as
                `accumulate` does: microbatch m of M has samples m, m + M, ...

        Returns:
            ``(loss, gradients)``, or ``((loss, aux), gradients)``; the loss is the same on all
            ranks of the pipeline. Finish the gradients with `sync_gradients`.
        """
        if not self.schedule.has_backward:
            raise ValueError(
                f"value_and_grad: got schedule {self.schedule.name!r}, which has no backward; "
                "wanted one that has; fix: call forward, or choose another schedule"
            )
        run = _Execution(self, self.schedule, params, batch, shared)
        run.all_ticks(self.observe)
        value = run.traffic.published(run.total)
        return value, tree.map(share, run.gradients())

    def work(self, stages: StageAxis | None) -> Pullbacks | CutStages:
        """The object that computes stages where this is called."""
        hidden, _ = hoist(self.stage)  # mapped or differentiated tensors that it closes over
        watched = is_watched()
        if self.compile is not None and stages is not None and stages.index is not None:
            if watched:
                refuse(
                    "capture cannot see into the compiled stages of a pipeline",
                    "compile",
                    "settings",
                    "None, where values are captured or replaced",
                    "leave compile out of pipelined(...)",
                )
            if hidden:
                raise ValueError(
                    f"pipelined: got a stage that closes over {len(hidden)} tensors of the program "
                    "around it; wanted one that can be compiled once; fix: pass them to "
                    "value_and_grad as shared"
                )
            return self.compiled
        # a program that is being traced, or differentiated again, sees operations, not programs
        traced = active() or compat.differentiating() or compat.dispatch_modes_active()
        evaluate = self.split and not traced and not hidden and not watched
        return self.evaluated if evaluate else Pullbacks(self.stage)

    def forward(self, params: tree.Tree, batch: tree.Tree, *shared: Any) -> list:
        """The output of the last stage for each microbatch, on every rank; no gradients.

        Arguments are those of `value_and_grad`. Of the schedule the forwards are run, uncompiled.
        Rows of M microbatches' samples are in the batch's order in
        ``torch.stack(results, 1).flatten(0, 1)``.
        """
        schedule = self.schedule.forward_only() if self.schedule.has_backward else self.schedule
        with torch.no_grad():
            run = _Execution(self, schedule, params, batch, shared)
            run.all_ticks(self.observe)
            return run.traffic.collected(run.results)


def pipelined(
    stage: StageFunction,
    partition: Partition,
    schedule: Schedule,
    *,
    dtype: torch.dtype | None = None,
    compile: Mapping[str, Any] | None = None,  # noqa: A002
    observe: Observer | None = None,
) -> Pipeline:
    """A model's stages under a schedule: its loss and gradients, equal to those without a pipeline.

    Called in a program that `shard_map` maps with ``stages="pp"``. Where one process runs all
    ranks, it can be called without any mesh.

    Args:
        stage: ``(part, params, x, batch, *shared) -> y``; see `StageFunction`.
        dtype: add gradients of microbatches up in this dtype, such as torch.float32; None: theirs.
        compile: compile the stages, on a bound mesh; a mapping of settings of
            `functron.compiler.compile`, such as ``{}``. Where one process runs all ranks, `jit`
            compiles the whole step instead.
        observe: called with rank, action, and when it began and ended, in seconds: what a
            `Timeline` is made of. Waits for the device after every action.

    Collectives over the pipeline's ranks: per microbatch and boundary one send of what the stage
    returns and one of its cotangent, whose receives are posted a tick ahead; per step an all-reduce
    of the loss and, for parameters that several ranks hold, one exchange of their gradients. At the
    first call of a signature, shapes. At the first call on GPUs, a process group for each of a
    rank's links is made (`BoundMesh.connect`).

    Raises:
        ValueError: the schedule is not valid, or not the partition's; or `compile` has ``graph``.
    """
    schedule.validate()
    if compile is not None and compile.get("graph"):
        refuse(
            "pipelined runs stage by stage",
            "compile['graph']",
            "True",
            "settings of one stage's program",
            "leave it out: a CUDA graph holds a whole step, without pp on processes",
        )
    if schedule.pipes != partition.pipes:
        refuse(
            f"the partition is not for the schedule {schedule.name!r}",
            "partition.pipes",
            f"{partition.pipes}",
            f"{schedule.pipes}",
        )
    return Pipeline(stage, partition, schedule, dtype, compile, observe)


@public
def gradients(
    stages: Pipeline,
    num_targets: Callable,
    *,
    reduce_dtype: torch.dtype | None = None,
    checks_sum: bool = True,
    draws: bool = True,
    axis: str = "pp",
) -> GradientFunction:
    """The gradients of a mean loss whose stages are divided among the ranks of `axis`.

    The same kind of gradient function as `functron.mean_gradients`, for `functron.make_step` and
    the same wrappers but `accumulated`: the schedule deals the batch. On a bound mesh the state is
    that of the parameters that `Partition.local_defs` says this rank holds, and norms must know
    `Partition.copies`. Gradients are added up in the dtype of `stages`; where these are compiled on
    a bound mesh, the update is too. Of a simulated mesh, `jit` compiles the whole step instead.

    Args:
        stages: the stages under a schedule; they share ``(key, total)``: the step's key, and the
            number of targets by which the last stage divides its loss. Metrics have ``aux`` where
            it returns a pair with that.
        num_targets: ``batch`` to the number of terms in the loss, over all ranks.
        reduce_dtype: sum gradients over ranks in this dtype; None: their own.
        checks_sum, draws: as of `functron.mean_gradients`.
        axis: the mesh axis of the pipeline's ranks.

    Collectives: those of `pipelined`.
    """
    base = _PipelinedLoss(stages, num_targets, reduce_dtype, checks_sum, draws, axis)
    return GradientFunction(base, ("pipeline.gradients",), reduce_dtype=reduce_dtype)


@dataclass(frozen=True)
class _PipelinedLoss:
    """The base of `gradients`."""

    stages: Pipeline
    num_targets: Callable
    reduce_dtype: torch.dtype | None
    checks_sum: bool
    draws: bool
    axis: str

    def bind(
        self, views: Views, mesh: Mesh | BoundMesh, specs: tree.Tree, wanted: tree.Tree
    ) -> BoundGradients:
        partition, axis = self.stages.partition, self.axis
        spread = partition.spread
        if spread and any(view.name == "frozen" for view in views.views):
            got = f"{', '.join(spread)} spread over the pipeline's ranks, and frozen ones"
            title = "cannot train a part of these parameters"
            refuse(title, "trainable", got, "True", "train all, or spread nothing")
        rank = mesh.coordinate[axis] if isinstance(mesh, BoundMesh) and mesh[axis] > 1 else None

        def into(specs):
            return {name: (specs if name in spread else wanted)[name] for name in specs}

        levels = views.levels(specs, into)
        parts = see_stages(self.stages, views, levels, rank) if views.views else self.stages

        def shared(aside, key, divisor):
            return (aside, key, divisor) if views.views else (key, divisor)

        def of(params, batch, key, divisor):
            chosen, aside = views.split(params, levels)
            value, grads = parts.value_and_grad(chosen, batch, *shared(aside, key, divisor))
            return (value[0], {"aux": value[1]}) if isinstance(value, tuple) else (value, {}), grads

        def forward(params, batch, key):
            chosen, aside = views.split(params, levels)
            one = torch.ones((), device=tree.leaves(batch)[0].device)
            return parts.forward(chosen, batch, *shared(aside, key, one))

        def total(params, batch, key):
            found = forward(params, batch, key)
            return sum(x[0] if isinstance(x, tuple) else x for x in found)

        def survey(params, batch, key):
            return tree.map(lambda *parts: sum(parts), *(x[1] for x in forward(params, batch, key)))

        return BoundGradients(
            of,
            self.num_targets,
            levels[-1][0],
            total,
            survey,
            num_microbatches=self.stages.schedule.num_microbatches,
            reduce_dtype=self.reduce_dtype,
            checks_sum=self.checks_sum,
            draws=self.draws,
            copies=partition.copies(rank),
            stages=axis,
            compile=self.stages.compile,
        )


def see_stages(
    stages: Pipeline, views: Views, levels: list[tuple[dict, dict]], rank: int | None
) -> Pipeline:
    """`stages` whose parameters are transformed by `views`, which set some aside as shared values.

    Args:
        views: through which their parameters are seen.
        levels: of the views, of all that this process holds.
        rank: this process's of the pipeline; None: it has all stages.
    """
    partition = stages.partition

    def levels_of(number: int) -> list[tuple[dict, ...]]:
        names = partition.names(number)
        return [
            tuple(partition.nest(partition.entries(each, names)) for each in level)
            for level in levels
        ]

    own = {number: levels_of(number) for number in partition.stages(rank)}

    def stage(part, params, x, batch, aside, *shared):
        number = partition.layout.index(part)
        mine = {name: partition.stage_params(value, number, rank) for name, value in aside.items()}
        with views.joined(params, mine, own[number]) as given:
            return stages.stage(part, given, x, batch, *shared)

    return Pipeline(stage, partition, stages.schedule, stages.dtype, stages.compile, stages.observe)


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
            "run stage by stage; fix: pipelined(..., compile={}) compiles the stages"
        )
    return stages
