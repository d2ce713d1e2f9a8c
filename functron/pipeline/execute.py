"""The executor: one scan over a schedule's table, simulated in one process or on this rank's own.

Every forward leaves its pullback, which is held until the table says that its backward comes up.
In one process the ranks of the pipeline run in turn, inside the vmaps of the other axes; on a bound
mesh each process runs its own column, and values travel between ticks, asynchronously.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from functron import compat, tree
from functron.closure import hoist
from functron.errors import Problem, raise_problems
from functron.pipeline.boundary import Boundary
from functron.pipeline.partition import Partition
from functron.pipeline.pieces import Pieces
from functron.pipeline.run import Observer, Run
from functron.pipeline.schedule import Schedule
from functron.pipeline.traffic import Traffic
from functron.pipeline.work import Pullbacks, StageFunction, Work
from functron.program.recorder import active
from functron.spmd.axes import StageAxis, scope
from functron.transforms.accumulate import microbatches
from functron.transforms.gradient import share


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
            batch: a tree whose leading dims are dealt into the schedule's microbatches, as
                `accumulate` does: microbatch m of M has samples m, m + M, ...
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
        run = self._run(self.schedule, params, batch, shared)
        value = run.traffic.published(run.total)
        return value, tree.map(share, run.gradients())

    def work(self, stages: StageAxis | None) -> Work:
        """How stages are computed where this is called."""
        hidden, _ = hoist(self.stage)  # mapped or differentiated tensors that it closes over
        if self.compile is not None and stages is not None and stages.index is not None:
            if hidden:
                raise ValueError(
                    f"pipelined: got a stage that closes over {len(hidden)} tensors of the program "
                    "around it; wanted one that can be compiled once; fix: pass them to "
                    "value_and_grad as shared"
                )
            return self.compiled
        # a program that is being traced, or differentiated again, sees operations, not programs
        traced = active() or compat.differentiating() or compat.dispatch_modes_active()
        evaluate = self.split and not traced and not hidden
        return self.evaluated if evaluate else Pullbacks(self.stage)

    def forward(self, params: tree.Tree, batch: tree.Tree, *shared: Any) -> list:
        """What the last stage returns for each microbatch, on every rank; no gradients.

        Arguments are those of `value_and_grad`. Of the schedule the forwards are run, uncompiled.
        What is made of M microbatches' samples comes in the batch's order by
        ``torch.stack(results, 1).flatten(0, 1)``.
        """
        schedule = self.schedule.forward_only() if self.schedule.has_backward else self.schedule
        with torch.no_grad():
            run = self._run(schedule, params, batch, shared)
            return run.traffic.collected(run.results)

    def _run(self, schedule: Schedule, params: tree.Tree, batch: tree.Tree, shared: tuple) -> Run:
        """One execution of a table."""
        stages = _stage_axis(schedule)
        batches = list(microbatches(batch, schedule.num_microbatches))
        traffic = Traffic(schedule, stages, batches[0], self.known)
        run = Run(
            self.stage, schedule, self.partition, self.work(stages), traffic,
            params, batches, shared, self.dtype,
        )  # fmt: skip
        run.all_ticks(self.observe)
        return run


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
