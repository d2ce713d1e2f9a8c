"""A training run: `train` takes its steps, with the hooks that `hooks_of` lists."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from functron import checkpoint
from functron.checkpoint.saver import own_store
from functron.core import compat, tree
from functron.core.errors import local_path, raise_problems
from functron.core.settings import sections_of
from functron.data import Blend
from functron.models import gpt
from functron.optim.schedules import read_schedule_count
from functron.program.cost import peak_flops
from functron.spmd import BoundMesh
from functron.spmd.flight import Agreement
from functron.spmd.mesh import LostRanksError
from functron.training import data, records, run_folder
from functron.training.data import prefetch
from functron.training.evaluation import EvaluationHook
from functron.training.loop import (
    COMPILE_SECONDS,
    EXIT_AFTER,
    RESHAPE,
    At,
    LoopHook,
    Meter,
    OverflowHook,
    PhaseHook,
    Request,
    StopHook,
    as_hook,
    close_with,
    end_process,
    exit_code,
    loop,
    record_to,
    stop_requests,
)
from functron.training.run import (
    Job,
    Run,
    Session,
    count_samples,
    memory_hook,
    torch_settings,
)
from functron.training.step import State, Watch
from functron.training.tasks import TASKS


class Outcome(NamedTuple):
    """The end of a run, or of its steps so far.

    Attributes:
        state: after the last step.
        history: one record per step; see `Meter`.
        stopped_by: as of `StopHook`; None where it has all its steps.
    """

    state: Any
    history: list[dict[str, Any]]
    stopped_by: int | None


_HURRIED_SECONDS = 5.0  # without a sign of life, after which a run that is to end does not wait


def train(
    run: Run,
    out: Path | None,
    *,
    began: float | None = None,
    hung: Callable[[str, bool], None] = end_process,
    also: Callable[[], records.Reporter] | None = None,
) -> Outcome:
    """Take the steps of `run`, and leave what a run folder holds in `out` (None: no files).

    On a bound mesh every rank calls it, with the same `out`, which all must reach: each writes its
    part of checkpoints, while training goes on, and rank 0 all else. Collectives: those of the
    step, and per step one all-reduce of a scalar, and one of two that nothing waits for.

    Args:
        run: made by `prepare`.
        out: the run folder.
        began: when the process did, by ``time.monotonic()``: ``exit_after`` counts from then; None:
            now.
        hung: ends the process where the job hangs; see `Session`.
        also: makes one more reporter of records, for rank 0.

    Raises:
        ValueError: the configuration says where the model came from, and its parameters are random;
            or `out` is no path of this machine.
        FloatingPointError: loss or gradients are not finite, or float16 overflows without end; or
            a hook ends the run for its numbers.
        OSError, TimeoutError: a checkpoint could not be written.
    """
    config, device = run.config, run.device
    out = None if out is None else local_path(out, "out")
    if run.start == 0:
        unread = run_folder.origin_problems(config, run.begun_from)
        raise_problems("cannot train this model", unread)
    began = time.monotonic() if began is None else began
    job = Job.of(run)
    if job.main and out is not None:
        out.mkdir(parents=True, exist_ok=True)
        run_folder.keep_tokenizer(out, config)
        run_folder.write_config(out, config)
    with ExitStack() as stack:
        stack.enter_context(_note_checkpoints(out))
        stack.enter_context(torch_settings(config))
        # measured on all ranks at the same time, as they will run
        peak = job.across(peak_flops(device, config.architecture.torch_dtype), dist.ReduceOp.SUM)
        stop = stack.enter_context(stop_requests())  # until the last save is complete
        events = out / records.EVENTS if job.main and out is not None else None
        write = stack.enter_context(records.event_log(events))
        session = Session(run, out, job, write, stop, peak, began, hung, also, stack)
        first = [*_listen_for_recorder(run), *_wait_for_compilers(session)]
        session.hooks = [*first, *make_section_hooks(session)]
        return _train_on(session)


def _train_on(session: Session) -> Outcome:
    """Take the steps of a run, which hooks may have go on otherwise, until it ends."""
    while True:
        begun = session.run.start
        stopped_by = _take_steps(session)
        for hook in session.hooks:
            hook.phase("restore", session.run.start)
        # a mesh grows after a hook had the run go on
        if stopped_by in (None, RESHAPE) and any(hook.go_on(session) for hook in session.hooks):
            kept = session.run.start
            session.history = [record for record in session.history if record["step"] <= kept]
            continue
        if session.run.start > begun:
            _log_end(session, stopped_by)
        return Outcome(session.run.state, session.history, stopped_by)


def _take_steps(session: Session) -> int | None:
    """Take steps until all are taken, or something stops them: as of `StopHook`."""
    run, reached, taken = session.run, session.run.state, session.run.start
    stop = StopHook(session.stop, run.config.saves_after)
    # under a dispatch mode, such as CUDA's sanitizer, states are not donated: none is written ahead
    ahead = run.device.type == "cuda" and not compat.dispatch_modes_active()
    with _open_batches(session) as batches:
        steps = loop(
            run.step,
            run.state,
            batches.take,
            start=run.start,
            steps=run.config.steps,
            hooks=hooks_of(session, batches, stop),
            agree=lambda number: int(session.job.across(number, dist.ReduceOp.MAX)),
            ahead=int(ahead),
        )
        try:
            for state, record in steps:
                reached, taken = state, record["step"]
                session.history.append(record)
        except BaseException as error:
            steps.throw(error)  # an interrupt here is of this rank alone, which must not save
            raise
    session.run = dataclasses.replace(run, state=reached, start=taken)
    return stop.stopped_by


def hooks_of(
    session: Session, batches: Batches, stop: StopHook
) -> list[LoopHook | Callable[[At], Any]]:
    """The hooks of a run, in their order; see `loop` for when each is called.

    Args:
        session: the run.
        batches: of its steps.
        stop: ends the loop where someone asks for it.
    """
    run, config, out = session.run, session.run.config, session.out
    scaled = config.optimizer.loss_scale
    patience = scaled.patience if scaled.initial else 0

    def evaluate(at: At) -> dict[str, dict[str, float]]:
        run.at("evaluate", at.step)
        return run.evaluate(at.state)

    def score_tasks(at: At) -> dict[str, dict[str, float]]:
        run.at("evaluate", at.step)
        return run.score_tasks(at.state)

    found = [
        stop,
        _make_meter(session, batches),
        LayerHook(run.watch) if run.watch is not None else None,
        record_blanks,
        EvaluationHook(evaluate, config.evaluation.every) if config.evaluation.every else None,
        EvaluationHook(score_tasks, config.tasks.every, TASKS) if config.tasks.is_asked else None,
        *(hook for hook in session.hooks if not hook.judges),
        TargetsHook(run, batches),
        *map(record_to, _make_reporters(session)),
        OverflowHook(patience, run.setup.overflowing) if patience else None,
        *(hook for hook in session.hooks if hook.judges),
        memory_hook(run),
        CheckpointHook(run, out, session.stop) if out is not None else None,
    ]
    return [hook for hook in found if hook is not None]


def make_section_hooks(session: Session) -> Iterator[LoopHook]:
    """The hooks of sections of the configuration: of each that has a method ``hook(session)``.

    It is called once, on all ranks alike, and returns a `LoopHook` or a function of a step, or None
    where the section asks for nothing. They come after the record is made, and before it is
    written; those that judge it, after that.
    """
    for section in sections_of(session.run.config):
        hook = section.hook(session) if hasattr(section, "hook") else None
        if hook is not None:
            yield as_hook(hook)


def record_blanks(at: At) -> None:
    """Leave losses out of the record of a step whose samples had no target."""
    at.record = records.blank_empty_losses(at.record)


class LayerHook(LoopHook):
    """Takes the step that measures layers where that is due, and records ``layers``."""

    def __init__(self, watch: Watch):
        self._watch = watch

    def before(self, at: At) -> None:
        """Take that step."""
        if self._watch.due(at.index):
            at.take = self._watch.step

    def after(self, at: At) -> None:
        """Record what it measured."""
        if self._watch.due(at.index):
            at.record["layers"] = self._watch.layers(at.metrics)


class TargetsHook(LoopHook):
    """Takes the step for batches without targets where no rank has any; records ``updates``.

    Comes after hooks that take other steps.
    """

    def __init__(self, run: Run, batches: Batches):
        self._run, self._batches = run, batches

    def before(self, at: At) -> None:
        """Take that step, which measures layers where that is due."""
        run, assumed = self._run, self._run.setup.reads_targets
        watched = run.watch is not None and run.watch.due(at.index)
        targets = 1 if assumed else self._batches.num_targets(at.index)
        at.take = _count_updates(run.taking(at.take, targets, watched=watched))


class CheckpointHook(LoopHook):
    """Saves checkpoints of a run while training goes on; at the end all are complete.

    Collective. Saves after multiples of ``save_every`` steps, after the last, where the run is
    asked to stop, and where the body leaves the loop, unless `At.keeps` is false.

    Args:
        run: what is trained.
        out: its folder.
        stop: says whether there is time to wait for ranks that are silent.
    """

    def __init__(self, run: Run, out: Path, stop: Request):
        config, placement = run.config, run.setup.placement
        self._run, self._settings = run, run_folder.settings(config)

        def timeout() -> float:  # a rank's death may be why this one is to end
            limit = config.watchdog.timeout_seconds
            return limit if stop.signal in (None, signal.SIGUSR1) else min(limit, _HURRIED_SECONDS)

        keep = checkpoint.Keep(config.checkpoint.keep_last or None, config.checkpoint.keep_every)
        given: dict[str, Any] = {"keep": keep, "timeout": timeout, "device": run.device}
        folder = out / run_folder.CHECKPOINTS
        self._make = lambda: checkpoint.Saver(folder, placement, **given, at=run.at)

    def begin(self, at: At) -> None:
        """Prepare to save."""
        self._saver, self._saved = self._make(), at.step

    def due(self, step: int) -> bool:
        """Whether to save after so many steps."""
        return self._run.config.saves_after(step)

    def after(self, at: At) -> None:
        """Save where it is due."""
        if at.last or at.stopped_by or self.due(at.step):
            self._save(at)

    def _save(self, at: At) -> None:
        if not at.keeps or at.step == self._saved:
            return
        at.phase("save")
        run, step = self._run, at.step
        run.at("save", step)
        samples = run.batches.first_sample(step)
        about = {"step": step, "samples": samples, "tokens": samples * run.config.data.seq}
        about |= {"mesh": run.config.parallelism.mesh, "config": self._settings}
        if isinstance(run.text, Blend):
            about["sources"] = run.text.positions(run.gaps.number(samples))
        self._saver.save(step, at.state, about)
        self._saved = step

    def end(self, at: At) -> None:
        """Wait for what is being saved, unless the run ends with an exception."""
        if at.left:
            self._save(at)
        close_with(self._saver, at.error)


class Batches:
    """The batches of a run on its device, with the checksum and number of targets of each.

    Both numbers are summed over the ranks while the step before is computed. Collective.

    Args:
        session: the run.
        make: of a step its batch in host memory, this rank's share of the checksum, and its number
            of targets.
    """

    def __init__(self, session: Session, make: Callable[[int], tuple[Any, int, int]]):
        self._run, self._job, self._make = session.run, session.job, make
        self._begun: dict[int, tuple[Any, Callable[[], list[int]]]] = {}
        self._sums: dict[int, Callable[[], list[int]]] = {}

    def take(self, index: int) -> dict[str, torch.Tensor]:
        """The batch of a step, from 0, on the device; the sums of the next one begin."""
        run = self._run
        run.at("step", index)
        for number in range(index, min(index + 2, run.config.steps)):
            if number not in self._begun:
                self._begun[number] = self._begin(number)
        host, self._sums[index] = self._begun.pop(index)
        if isinstance(host, Exception):
            raise host
        # the copy to the device stays in this thread: which GPU is current is a thread's own affair
        return run.on_device(host)

    def _begin(self, index: int) -> tuple[Any, Callable[[], list[int]]]:
        try:
            host, share, targets = self._make(index)
        except Exception as error:  # `take` raises it; until then the ranks go on together
            return error, self._job.start_sum(0, 0)
        return host, self._job.start_sum(share, targets)

    def num_targets(self, index: int) -> int:
        """The targets of all ranks in the batch of a step that was taken."""
        return self._sums[index]()[1]

    def checksum(self, index: int) -> str:
        """The checksum of the batch of a step that was taken; it can be asked for once."""
        return f"{self._sums.pop(index)()[0]:016x}"


@contextmanager
def _open_batches(session: Session) -> Iterator[Batches]:
    run = session.run

    def make(index: int) -> tuple[dict[str, torch.Tensor], int, int]:
        batch = run.host_batch(index)
        return batch, run.own_hash(batch), run.num_targets(batch)

    with prefetch(make, run.start, run.config.steps, run.config.data.prefetch) as made:
        yield Batches(session, made)


def _make_meter(session: Session, batches: Batches) -> Meter:
    run, config = session.run, session.run.config
    detailed = config.family.has_details(config.architecture)
    return Meter(
        learning_rate=run.setup.learning_rate,
        tokens_seen=lambda steps: run.batches.first_sample(steps) * config.data.seq,
        flops_per_token=data.flops_per_token(config),
        peak_flops=session.peak_flops,
        device=run.device,
        details=gpt.summary if detailed else None,
        position=lambda steps: {**count_samples(run, steps), "batch": batches.checksum(steps - 1)},
    )


@contextmanager
def _note_checkpoints(out: Path | None) -> Iterator[None]:
    """Add a note to an interrupt of the training: which checkpoint the run goes on from."""
    try:
        yield
    except (KeyboardInterrupt, LostRanksError) as error:
        with suppress(OSError, ValueError):  # the folder cannot be read
            if out is not None and (newest := run_folder.newest(out)) is not None:
                error.add_note(f"--out {out} --resume goes on from the newest checkpoint, {newest}")
        raise


def _count_updates(step: Callable) -> Callable:
    """A step whose metrics have ``updates``, the count that its learning rate is of.

    Where updates were left out, such as in float16, that is not the number of the step.
    """

    def step_and_count(state: State, batch: tree.Tree) -> tuple[State, dict[str, Any]]:
        count = read_schedule_count(state.opt_state)
        before = {} if count is None else {"updates": count.clone()}  # the step overwrites it
        state, metrics = step(state, batch)
        return state, {**metrics, **before}

    return step_and_count


def _make_reporters(session: Session) -> list[records.Reporter]:
    """The writers of records, on rank 0: a progress bar, and files of the run's folder.

    Records there of steps after its start, which will be taken again, are dropped.
    """
    run, config, out, also = session.run, session.run.config, session.out, session.also
    if not session.job.main:
        return []
    found: list[records.Reporter] = [records.progress(config.steps, run.start)]
    if out is not None:
        before = run_folder.rewind(out, run.start)
        found.append(records.jsonl(out / run_folder.METRICS))
        found.append(records.loss_picture(out / "loss.svg", before, out / records.EVENTS))
        named = config.logging.naming(config.data.batches.first_sample)
        if config.logging.tensorboard:
            found.append(records.tensorboard(out / "tensorboard", named, run.start, before))
        if config.logging.wandb:
            found.append(records.wandb(out, dataclasses.asdict(config), named))
    return [*found, records.report_missing_targets(), *([] if also is None else [also()])]


def _listen_for_recorder(run: Run) -> list[LoopHook]:
    """Tell the recorder of the mesh when a step begins; it compares ranks, if asked to."""
    waiting, mesh = run.config.watchdog, run.mesh
    if not isinstance(mesh, BoundMesh) or mesh.recorder is None:
        return []
    recorder, seconds = mesh.recorder, waiting.timeout_seconds
    if waiting.check_programs:
        store = own_store(compat.default_store(), seconds)
        recorder.agreement = Agreement(store, mesh.rank, seconds, mesh["pp"] == 1)

    def begin(name: str, step: int) -> None:
        if name == "data":
            recorder.begin(step)

    return [PhaseHook(begin)]


def _wait_for_compilers(session: Session) -> list[LoopHook]:
    """Have collectives wait longer where ranks compile, which takes some longer than others."""
    run, job = session.run, session.job
    mesh, seconds = run.mesh, run.config.watchdog.timeout_seconds
    if not isinstance(mesh, BoundMesh) or not run.setup.is_compiled:
        return []
    longer = False

    def wait(name: str, step: int) -> None:
        nonlocal longer
        before = longer
        first = name == "step" and session.run.is_first_of_kind(step)
        # ranks agree with those that compile yet
        longer = first or name == "evaluate" or (before and name == "agree")
        if longer != before:
            limit = seconds + COMPILE_SECONDS if longer else seconds
            mesh.set_timeout(limit)
            compat.set_group_timeout(job.group, limit)

    return [PhaseHook(wait)]


def _log_end(session: Session, stopped_by: int | None) -> None:
    """Record why a run left early, unless it grows, which the launcher records."""
    about = {"code": exit_code(stopped_by)}
    if stopped_by == EXIT_AFTER:
        session.write("exit_after", session.run.start, **about)
    elif stopped_by not in (None, RESHAPE):
        name = signal.Signals(stopped_by).name
        session.write("signal", session.run.start, signal=name, **about)
