"""A training run: `train` composes the hooks of its loop, and answers anomalies.

`hooks_of` is the list: a run is its step, its batches and these hooks. Records have what the
machine could do and what the process used: the denominators of MFU and memory.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from functron import checkpoint
from functron.checkpoint.saver import own_store
from functron.core import compat, tree
from functron.core.errors import local_path, raise_problems
from functron.core.settings import sections_of
from functron.data import Blend
from functron.data.sampling import earlier_text
from functron.models import gpt
from functron.optim.schedules import read_schedule_count
from functron.program.cost import free_memory_bytes, peak_flops
from functron.spmd import BoundMesh
from functron.spmd.flight import Agreement
from functron.spmd.mesh import LostRanksError
from functron.training import data, records, restarts, run_folder
from functron.training.anomalies import (
    METRICS,
    Anomaly,
    AnomalyConfig,
    Guard,
    OverflowHook,
    Record,
    check_finite,
)
from functron.training.config import configure
from functron.training.data import prefetch
from functron.training.evaluation import EvaluationHook
from functron.training.loop import (
    At,
    LoopHook,
    Meter,
    PhaseHook,
    Step,
    as_hook,
    close_with,
    loop,
    record_to,
)
from functron.training.restarts import (
    EXIT_AFTER,
    RESHAPE,
    Request,
    StopHook,
    end_process,
    exit_code,
    stop_requests,
)
from functron.training.run import (
    Job,
    Run,
    Session,
    begin_state,
    count_samples,
    deterministic,
    memory_hook,
    own_hash,
    programs,
)
from functron.training.setup import Watch, make_setup
from functron.training.step import State


class Outcome(NamedTuple):
    """The end of a run, or of its steps so far.

    Attributes:
        state: after the last step.
        history: one record per step; see `Meter.measure`.
        stopped_by: as of `StopHook`; None where it has all its steps.
    """

    state: Any
    history: list[dict[str, Any]]
    stopped_by: int | None


_HURRIED = 5.0  # seconds without a sign of life after which a run that is to end waits no longer


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
        FloatingPointError: loss or gradients are not finite, or an anomaly is one too many; or
            float16 overflows without end.
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
    # measured on all ranks at the same time, as they will run
    peak = job.across(peak_flops(device, config.architecture.torch_dtype), dist.ReduceOp.SUM)
    with ExitStack() as stack:
        stack.enter_context(_note_checkpoints(out))
        if config.compute.deterministic:
            stack.enter_context(deterministic())
        stop = stack.enter_context(stop_requests())  # until the last save is complete
        if config.restarts.exit_after:
            stop.ends = began + restarts.seconds_of(config.restarts.exit_after)
        if config.restarts.elastic and job.main:
            stop.grown = lambda: restarts.can_grow(config)
        write = _write_nothing
        if job.main and out is not None:
            write = stack.enter_context(records.event_log(out / records.EVENTS))
        session = Session(run, out, job, write, stop, peak, hung, also, stack)
        session.hooks = [*_listen_for_recorder(run), *make_section_hooks(session)]
        return _train_on(session, job.broadcast(lambda: _read_past(run, out)))


def _train_on(session: Session, past: list[dict[str, Any]]) -> Outcome:
    """Take the steps of a run, and answer anomalies, until it ends.

    Args:
        session: the run.
        past: records of the steps before, by which anomalies are found.
    """
    run, most, history, answers = session.run, session.run.config.anomalies.most, [], 0
    while True:
        outcome, found = _take_steps(session, past)
        for hook in session.hooks:
            hook.phase("restore", outcome.history[-1]["step"] if outcome.history else run.start)
        history += outcome.history
        if found is None or outcome.stopped_by:
            _log_end(session.write, outcome)
            return outcome._replace(history=history)
        verdict = None
        if run.config.anomalies.attribute:
            verdict = attribute_fault(run, session.out, session.job, found.step, past + history)
            session.write("rerun", found.step, **verdict.event())
            check_hardware(verdict)
        answers += found.action in ("rollback", "lower-rate")
        _check_answers(found, answers, most, history)
        if found.action == "rollback":
            outcome = outcome._replace(state=None)  # there is no room for it beside an earlier one
        run = session.run = _answer_anomaly(session, outcome, found, verdict)
        history = [record for record in history if record["step"] <= run.start]
        past = [record for record in past if record["step"] <= run.start] + history


def _take_steps(session: Session, past: Sequence[records.Record]) -> tuple[Outcome, Anomaly | None]:
    """Take steps until all are taken, someone asks to stop, or an anomaly ends them: that, too."""
    run, reached, history = session.run, session.run.state, []
    stop = StopHook(session.stop, run.config.saves_after)
    guard = _make_guard(session, past)
    with _open_batches(session) as batches:
        steps = loop(
            run.step,
            run.state,
            batches.take,
            start=run.start,
            steps=run.config.steps,
            hooks=hooks_of(session, batches, stop, guard),
            agree=lambda number: int(session.job.across(number, dist.ReduceOp.MAX)),
            ahead=int(run.device.type == "cuda"),
        )
        try:
            for state, record in steps:
                reached = state
                history.append(record)
        except BaseException as error:
            steps.throw(error)  # an interrupt that comes here is one of this rank, which saves not
            raise
    # a mesh grows after an anomaly was answered
    waits = guard.found is not None and stop.stopped_by == RESHAPE
    return Outcome(reached, history, None if waits else stop.stopped_by), guard.found


def hooks_of(
    session: Session,
    batches: Batches,
    stop: StopHook,
    guard: Guard,
) -> list[LoopHook | Callable[[At], Any]]:
    """The hooks of a run, in their order; see `loop` for when each is called.

    Args:
        session: the run.
        batches: of its steps.
        stop: stops where someone asks for it.
        guard: judges the numbers.
    """
    run, config, out = session.run, session.run.config, session.out
    scaled = config.optimizer.loss_scale
    patience = scaled.patience if scaled.initial else 0
    found = [
        stop,
        _make_meter(session, batches),
        LayerHook(run.watch) if run.watch is not None else None,
        record_blanks,
        _make_evaluation_hook(run),
        *(hook for hook in session.hooks if not hook.judges),
        TargetsHook(run, batches),
        *(record_to(reporter) for reporter in _make_reporters(session)),
        OverflowHook(patience, run.setup.overflowing) if patience else None,
        guard,
        *(hook for hook in session.hooks if hook.judges),
        memory_hook(run),
        CheckpointHook(run, out, session.stop) if out is not None else None,
    ]
    return [hook for hook in found if hook is not None]


def make_section_hooks(session: Session) -> Iterator[LoopHook]:
    """The hooks of sections of the configuration: of each that has a method ``hook(session)``.

    It is called once, on all ranks alike, and returns a `LoopHook` or a function of a step, or None
    where the section asks for nothing. So a new ability with its options is one file: a section
    with its hook. These come after the record is made, and before it is written and judged, but for
    those that judge it.
    """
    for section in sections_of(session.run.config):
        make = getattr(section, "hook", None)
        hook = None if make is None else make(session)
        if hook is not None:
            yield as_hook(hook)


def record_blanks(at: At) -> None:
    """Leave losses out of the record of a step whose samples had no target."""
    at.record = records.blank_empty_losses(at.record)


class LayerHook(LoopHook):
    """Takes the twin of a step that measures layers where that is due, and records ``layers``."""

    def __init__(self, watch: Watch):
        self._watch = watch

    def before(self, at: At) -> None:
        """Take the twin."""
        if self._watch.due(at.index):
            at.take = self._watch.step

    def after(self, at: At) -> None:
        """Record what it measured."""
        if self._watch.due(at.index):
            at.record["layers"] = self._watch.layers(at.metrics)


class TargetsHook(LoopHook):
    """Takes the twin of a step for a batch without targets where no rank has any.

    After hooks that take other steps; the metrics have the count of updates that rates are of.
    """

    def __init__(self, run: Run, batches: Batches):
        self._run, self._batches = run, batches

    def before(self, at: At) -> None:
        """Take that twin: of the step that measures layers where that is due."""
        run, assumed = self._run, self._run.setup.reads_targets
        watched = run.watch is not None and run.watch.due(at.index)
        targets = 1 if assumed else self._batches.num_targets(at.index)
        at.take = _count_updates(run.taking(at.take, targets, watched=watched))


class CheckpointHook(LoopHook):
    """Saves checkpoints of a run while training goes on; at the end all are complete.

    Collective. After multiples of ``save_every`` steps, after the last, where the run is asked to
    stop, and where the body leaves the loop; of a state that is to be forgotten, none.

    Args:
        run: what is trained.
        out: its folder.
        stop: says whether there is time to wait for ranks that are silent.
    """

    def __init__(self, run: Run, out: Path, stop: Request):
        config, placement = run.config, run.setup.placement
        self._run, self._settings = run, run_folder.settings(config)

        def timeout() -> float:  # a rank's death may be why this one is to end: not waited for
            limit = config.watchdog.timeout_seconds
            return limit if stop.signal in (None, signal.SIGUSR1) else min(limit, _HURRIED)

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
    """The batches of a run on its device, and of each its checksum and its targets on all ranks.

    Both numbers are summed over the ranks while the step before is computed, so that nothing has to
    wait for them. Collective.

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
        except Exception as error:  # raised in its turn: till then the ranks go on together
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
        return batch, own_hash(run.mesh, batch), run.num_targets(batch)

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


def _make_evaluation_hook(run: Run) -> EvaluationHook | None:
    def evaluate(at: At) -> dict[str, dict[str, float]]:
        run.at("evaluate", at.step)
        return run.evaluate(at.state)

    return (
        EvaluationHook(evaluate, run.config.evaluation.every)
        if run.config.evaluation.every
        else None
    )


@contextmanager
def _note_checkpoints(out: Path | None) -> Iterator[None]:
    """Say, to an interrupt that may have come in an update, where the run goes on."""
    try:
        yield
    except (KeyboardInterrupt, LostRanksError) as error:
        newest = None
        with suppress(OSError, ValueError):  # a folder that cannot be read is no reason to say less
            newest = None if out is None else run_folder.newest(out)
        if newest is not None:
            error.add_note(f"--out {out} --resume goes on from the newest checkpoint, {newest}")
        raise


def _write_nothing(kind: str, step: int, **about: Any) -> None:
    """Write no event."""


def _read_past(run: Run, out: Path | None) -> list[dict[str, Any]]:
    """Of the records before the first step of `run`, the numbers that anomalies are found by."""
    if out is None or not run.start:
        return []
    last = run_folder.records(out)
    kept = [record for record in last if record["step"] <= run.start]
    names = ("step", "loss", "grad_norm", "targets")
    return [
        {name: record.get(name) for name in names}
        for record in kept[-run.config.anomalies.window - 1 :]
    ]


def _make_guard(session: Session, past: Sequence[records.Record]) -> Guard:
    config = session.run.config
    return Guard(
        config.anomalies,
        session.write,
        session.run.samples_of,
        past,
        skips=config.optimizer.skip_nonfinite > 0,
        overflows=config.optimizer.loss_scale.initial > 0,
    )


def _count_updates(step: Callable) -> Callable:
    """A step whose metrics have the count that its rates are of, as ``updates``.

    Where updates were left out, such as in float16, that is not the number of the step.
    """

    def counting(state: State, batch: tree.Tree) -> tuple[State, dict[str, Any]]:
        count = read_schedule_count(state.opt_state)
        before = {} if count is None else {"updates": count.clone()}  # the step overwrites it
        state, metrics = step(state, batch)
        return state, {**metrics, **before}

    return counting


def _make_reporters(session: Session) -> list[records.Reporter]:
    """Where rank 0 writes the records of a run: always a progress bar, and files of its folder.

    There, records of steps after its start, which will be taken again, are forgotten.
    """
    run, config, out, also = session.run, session.run.config, session.out, session.also
    if not session.job.main:
        return []
    found: list[records.Reporter] = [records.progress(config.steps, run.start)]
    if out is not None:
        before = run_folder.rewind(out, run.start)
        found.append(records.jsonl(out / run_folder.METRICS))
        found.append(records.loss_picture(out / "loss.svg", before, out / records.EVENTS))
        samples_after = config.data.batches.first_sample
        named = config.logging.naming(samples_after)
        if config.logging.tensorboard:
            found.append(records.tensorboard(out / "tensorboard", named, run.start, before))
        if config.logging.wandb:
            found.append(records.wandb(out, dataclasses.asdict(config), named))
    return [*found, records.report_missing_targets(), *([] if also is None else [also()])]


def _listen_for_recorder(run: Run) -> list[LoopHook]:
    """Tell the recorder of the mesh when a step begins; it compares ranks, if asked to."""
    config, mesh = run.config, run.mesh
    if not isinstance(mesh, BoundMesh) or mesh.recorder is None:
        return []
    recorder = mesh.recorder
    if config.watchdog.check_programs:
        store = own_store(compat.default_store(), config.watchdog.timeout_seconds)
        seconds, one_order = config.watchdog.timeout_seconds, mesh["pp"] == 1
        recorder.agreement = Agreement(store, mesh.rank, seconds, one_order)

    def begin(name: str, step: int) -> None:
        if name == "data":
            recorder.begin(step)

    return [PhaseHook(begin)]


def _log_end(write: Callable[..., None], outcome: Outcome) -> None:
    """Record why a run left early; the launcher records it where it grows."""
    if outcome.stopped_by is None or not outcome.history:
        return
    step, code = outcome.history[-1]["step"], exit_code(outcome.stopped_by)
    if outcome.stopped_by == EXIT_AFTER:
        write("exit_after", step, code=code)
    elif outcome.stopped_by != RESHAPE:
        write("signal", step, signal=signal.Signals(outcome.stopped_by).name, code=code)


def _check_answers(
    found: Anomaly, answers: int, most: int, history: Sequence[records.Record]
) -> None:
    """Raise FloatingPointError where the run is to stop for an anomaly."""
    if found.action == "stop" and found.kind == "nonfinite":
        check_finite(history[-1], (found.metric,))
    if found.action == "stop":
        raise FloatingPointError(
            f"{found}: a spike; wanted none (--anomalies.on-spike stop); fix: go on from a "
            "checkpoint before it, with --resume --anomalies.on-spike rollback or lower-rate"
        )
    if answers > most:
        raise FloatingPointError(
            f"{found}; wanted no more after {most} times {found.action}; fix: see events.jsonl, "
            "lower the learning rate, or raise --anomalies.most"
        )


def _answer_anomaly(
    session: Session, outcome: Outcome, found: Anomaly, verdict: Verdict | None
) -> Run:
    """The run that goes on after an anomaly, as the policy has it. Collective."""
    run, out, taken = session.run, session.out, outcome.history[-1]["step"]
    if found.action == "rollback":
        # samples have no part in what does not happen again
        skips = verdict is None or verdict.kind != "transient"
        return _roll_back(session, found, skips=skips)
    on = dataclasses.replace(run, state=outcome.state, start=taken)
    if found.action != "lower-rate":
        return on
    anomalies = run.config.anomalies.lower_rate(taken)
    config = configure(run.config, anomalies=anomalies)
    made = make_setup(config, run.mesh)
    step, watch = programs(made, run.around)
    session.write("lower-rate", taken, factor=anomalies.rate_factor, since=found.step)
    if session.job.main and out is not None:
        run_folder.write_config(out, config)
    return dataclasses.replace(on, setup=made, step=step, watch=watch)


def _roll_back(session: Session, found: Anomaly, *, skips: bool = True) -> Run:
    """The run from a checkpoint before an anomaly, without the samples that led to it. Collective.

    What was saved after that checkpoint is removed: it has seen them. Steps that were taken before
    the batches changed are taken again with the batches of now, which the mesh can divide.
    """
    run, out, job = session.run, session.out, session.job
    policy, batches = run.config.anomalies, run.batches
    first = max(found.step - 1 - policy.rollback_steps, 0)  # the first step that is forgotten
    config, skips = run.config, skips and policy.skip_data
    if skips:
        numbers = (batches.first_sample(step) for step in (first, found.step))
        config = configure(config, anomalies=policy.without(*numbers))
    folder = None if out is None else out / run_folder.CHECKPOINTS

    def begin() -> int | None:
        saved = checkpoint.steps(folder) if folder is not None and folder.is_dir() else []
        begun = max((step for step in saved if step <= first), default=None)
        for step in saved:
            if folder is not None and step > (begun or 0):
                shutil.rmtree(folder / str(step))
        if out is not None:
            run_folder.write_config(out, config)
        return begun

    begun = job.broadcast(begin)
    where = run.begun_from if begun is None or folder is None else folder / str(begun)
    state, _ = begin_state(run.setup, where, run.device)
    start = int(state.step)
    skipped = {"skipped": config.anomalies.skipped_samples} if skips else {}
    session.write("rollback", found.step, to=start, since=first + 1, **skipped)
    # the programs are the same, of which samples are no part; but rates may count them
    made, step, watch = dataclasses.replace(run.setup, config=config), run.step, run.watch
    if start < sum(steps for steps, _ in batches.earlier):
        config = configure(config, earlier_batches=earlier_text(batches.until(start)))
        job.broadcast(lambda: None if out is None else run_folder.write_config(out, config))
        made = make_setup(config, run.mesh)
        step, watch = programs(made, run.around)
    return Run(
        made, run.text, state, step, watch, run.device, start,
        run.held_out, run.held_out_loss, run.notes, run.begun_from, run.around, run.at, run.memory,
    )  # fmt: skip


# --- a step again, to tell a fault of the hardware from one of the model or its samples

Numbers = tuple[float, ...]
"""The loss and the gradient norm of a step."""

TITLES: Mapping[str, str] = {
    "transient": "transient: other bits when it is taken again, as from a fault of the hardware",
    "persistent": "persistent: ranks that compute the same do not agree, each time",
    "data": "data or model: the same bits again, on every rank that was asked",
    "unsteady": "unsteady: it does not repeat its own bits, which --deterministic operations do",
    "other batch": "other batch: the samples are not those that the run was given",
}


@dataclass(frozen=True)
class Verdict:
    """The cause of the numbers of a step, as far as taking it again tells.

    Attributes:
        step: from 1, as in records.
        kind: one of `TITLES`.
        begun: the steps that the state had taken from which it was taken again.
        recorded: the numbers that the run had; None: it has no record of the step.
        again: those of the second time.
        since: the first step, of those that were taken again, whose numbers are others; None: none.
        ranks: that differ from most; of two that differ, both.
        compared: how many ranks computed the step by themselves; 0: it was not compared.
        layer: the first in the order of the computation that has an activation or gradient which is
            not finite.
        samples: those of the step, as `functron.training.run.Run.samples_of`.
    """

    step: int
    kind: Literal["transient", "persistent", "data", "unsteady", "other batch"]
    begun: int
    recorded: Numbers | None
    again: Numbers
    since: int | None = None
    ranks: tuple[int, ...] = ()
    compared: int = 0
    layer: str | None = None
    samples: Mapping[str, Any] = field(default_factory=dict)

    def event(self) -> dict[str, Any]:
        """It as the entries of an event."""
        found = {
            "class": self.kind,
            "begun": self.begun,
            "since": self.since,
            "ranks": list(self.ranks),
            "compared": self.compared,
            "layer": self.layer,
            **dict(zip(METRICS, self.again, strict=False)),
        }
        return {name: value for name, value in found.items() if value is not None} | {
            **self.samples
        }

    def __str__(self) -> str:
        def shown(numbers: Numbers | None) -> str:
            rows = zip(("loss", "gradient norm"), numbers or (), strict=False)
            return ", ".join(f"{name} {value!r}" for name, value in rows) or "nothing"

        lines = [
            f"step {self.step}, from the state after {self.begun} steps",
            f"recorded  {shown(self.recorded)}",
            f"again     {shown(self.again)}",
            f"class     {TITLES[self.kind]}",
        ]
        if self.since is not None and self.since != self.step:
            lines.append(f"since     step {self.since}, the first whose numbers are others")
        if self.compared:
            lines.append(f"compared  {self.compared} ranks that each computed the whole step")
        if self.ranks:
            lines.append(f"ranks     {', '.join(map(str, self.ranks))}")
        if self.layer is not None:
            lines.append(f"layer     {self.layer} is the first that is not finite")
        if self.samples:
            first, end = self.samples["samples"]
            sources = self.samples.get("sources", ())
            named = (
                [f"{name}: {', '.join(map(str, x))}" for name, x in sources.items()]
                if (isinstance(sources, Mapping))
                else [str(source) for source in sources if source]
            )
            lines.append(f"samples   {first} to {end - 1}" + "".join(f"; {x}" for x in named))
        return "\n".join(lines)


@dataclass(frozen=True)
class Replay:
    """All that taking steps of a run again needs; made by `replay_of`.

    Attributes:
        config: what anomalies are, of which the limits of steps follow.
        begin: ``(index) -> (state, steps)``, the newest state that is known before a step, and how
            many steps it has taken; the same on every rank. Collective.
        step: ``(index) -> step``, what the run takes at a step.
        batch: ``(index) -> batch``.
        checksum: ``(index) -> text``, the checksum of that as records have it. Collective.
        alone: ``(state, index) -> numbers by rank``, of every rank the loss and gradient norm that
            it computes by itself; None where there are no ranks or no memory for it. Collective.
        watch: a step that says more of layers.
        samples: ``(index)`` to what is known of the samples.
        broadcast: ``(find) -> value``, what rank 0 finds. Collective.
    """

    config: AnomalyConfig
    begin: Callable[[int], tuple[Any, int]]
    step: Callable[[int], Step]
    batch: Callable[[int], Any]
    checksum: Callable[[int], str]
    alone: Callable[[Any, int], Sequence[Numbers] | None]
    watch: Callable[[], Watch]
    samples: Callable[[int], Mapping[str, Any]]
    broadcast: Callable[[Callable[[], Any]], Any]


def take_again(
    replay: Replay, step: int, recorded: Mapping[int, Record], *, exact: bool = True
) -> Verdict:
    """The verdict on a step of a run, from 1. Collective.

    Needs memory for two states. The state that the run itself has is left alone.

    Args:
        replay: of the run.
        step: which one, from 1 as in records.
        recorded: the records of the run, by step; those that lack are not compared.
        exact: whether numbers are compared bit for bit; otherwise, where the run was on other
            ranks, to one in a thousand.
    """
    index, same = step - 1, _same if exact else _close
    state, begun = replay.begin(index)
    past = [recorded[number] for number in sorted(recorded) if number <= begun]
    guard = Guard(replay.config, _ignore_event, lambda at: {}, past)
    since = None
    for at in range(begun, index):
        guard.set_limit(state, at)
        state, metrics = replay.step(at)(state, replay.batch(at))
        numbers = numbers_of(metrics)
        found = {"targets": 0} if "targets" in metrics else {}
        guard.observe({**dict(zip(METRICS, numbers, strict=False)), **found, "step": at + 1})
        if since is None and not _agrees(recorded.get(at + 1), numbers, same):
            since = at + 1
    guard.set_limit(state, index)
    batch = replay.batch(index)
    again, twice = (numbers_of(replay.step(index)(_copy(state), batch)[1]) for _ in range(2))
    record = recorded.get(step)
    if since is None and not _agrees(record, again, same):
        since = step
    known = None if record is None else _numbers(record, again)
    differs = record is not None and record.get("batch") not in (None, replay.checksum(index))
    finite = all(map(math.isfinite, again))
    layer = None if finite else _first_layer(replay.watch(), _copy(state), batch)
    facts: dict[str, Any] = {"layer": layer, "samples": replay.samples(index), "since": since}

    def verdict(kind: Any, **more: Any) -> Verdict:
        return Verdict(step, kind, begun, known, again, **facts, **more)

    if replay.broadcast(lambda: differs):
        return verdict("other batch")
    if replay.broadcast(lambda: not _same(again, twice)):
        return verdict("unsteady")
    if replay.broadcast(lambda: since is not None):
        return verdict("transient")
    by_rank = replay.alone(state, index)
    if by_rank is None:
        return verdict("data")
    wrong = unlike(by_rank)
    return verdict("persistent" if wrong else "data", ranks=tuple(wrong), compared=len(by_rank))


def unlike(found: Sequence[Numbers]) -> list[int]:
    """The places of numbers unlike those of most; all, where there is no most."""
    keys = [tuple(repr(number) for number in numbers) for numbers in found]
    (most, count), *others = Counter(keys).most_common()
    if not others:
        return []
    if 2 * count > len(keys):
        return [place for place, key in enumerate(keys) if key != most]
    return list(range(len(keys)))


def numbers_of(metrics: Mapping[str, Any]) -> Numbers:
    """The loss and the gradient norm in the metrics of a step, on the host."""
    return tuple(float(metrics[name]) for name in METRICS if name in metrics)


def _numbers(record: Record, like: Numbers) -> Numbers:
    """Those of a record; what JSON had no word for is NaN, and a step without targets has 0."""
    if record.get("targets") == 0:
        return (0.0,) * len(like)
    values = [record.get(name) for name in METRICS[: len(like)]]
    return tuple(math.nan if value is None else float(value) for value in values)


def _agrees(
    record: Record | None, numbers: Numbers, same: Callable[[Numbers, Numbers], bool]
) -> bool:
    return record is None or same(_numbers(record, numbers), numbers)


def _same(a: Numbers, b: Numbers) -> bool:
    """Whether numbers are equal, all that are not finite among one another, as records have it."""
    pairs = zip(a, b, strict=True)
    return all(x == y or not (math.isfinite(x) or math.isfinite(y)) for x, y in pairs)


def _close(a: Numbers, b: Numbers) -> bool:
    pairs = zip(a, b, strict=True)
    return all(math.isclose(x, y, rel_tol=1e-3) or _same((x,), (y,)) for x, y in pairs)


def _copy(state: Any) -> Any:
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def _ignore_event(kind: str, step: int, **about: Any) -> None:
    """Write no event."""


def _first_layer(watch: Watch, state: Any, batch: Any) -> str | None:
    """The first layer that is not finite in a step, which is given up the state.

    Of the residual stream the first in the order of the model; else of gradients the last, where
    backward begins.
    """
    _, metrics = watch.step(state, batch)
    found = watch.layers(metrics)
    streams = [name for name in watch.stream if not _finite(found[name], "activation_rms")]
    if streams:
        return f"{streams[0]}, its activations"
    parameters = [name for name in found if not _finite(found[name], "param_norm")]
    if parameters:
        return f"{parameters[0]}, its parameters"
    order = [*watch.stream, *(name for name in found if name not in watch.stream)]
    wrong = [name for name in order if not _finite(found[name], "grad_norm")]
    if not wrong:
        return None
    # what comes after the last layer of the stream is of the loss, where backward begins
    return f"{wrong[-1]}, its gradients"


def _finite(numbers: Mapping[str, float], name: str) -> bool:
    return math.isfinite(numbers.get(name, 0.0))


def check_hardware(verdict: Verdict) -> None:
    """Raise OSError where ranks make the same mistake each time."""
    if verdict.kind != "persistent":
        return
    who = ", ".join(map(str, verdict.ranks))
    raise OSError(
        f"step {verdict.step}: ranks {who} of {verdict.compared} compute other numbers than the "
        "others of the same state and batch, each time; wanted the same bits on all; fix: take "
        "their machine out, then go on with --resume"
    )


def replay_of(run: Run, out: Path | None, job: Job) -> Replay:
    """All that taking steps of `run` again needs."""
    folder = None if out is None else out / run_folder.CHECKPOINTS

    def begin(index: int) -> tuple[State, int]:
        def newest() -> int | None:
            saved = checkpoint.steps(folder) if folder is not None and folder.is_dir() else []
            return max((step for step in saved if step <= index), default=None)

        begun = job.broadcast(newest)
        where = run.begun_from if begun is None or folder is None else folder / str(begun)
        state, _ = begin_state(run.setup, where, run.device)
        return state, int(state.step)

    def step(index: int) -> Callable:
        (targets,) = job.start_sum(run.num_targets(run.host_batch(index)))()
        if run.watch is not None and run.watch.due(index):
            return run.taking(run.watch.step, targets, watched=True)
        return run.taking(run.step, targets)

    def checksum(index: int) -> str:
        (total,) = job.start_sum(own_hash(run.mesh, run.host_batch(index)))()
        return f"{total:016x}"

    def watch() -> Watch:
        found = run.setup.watching()
        return (
            found if run.around is None else dataclasses.replace(found, step=run.around(found.step))
        )

    return Replay(
        run.config.anomalies,
        begin,
        step,
        run.batch,
        checksum,
        lambda state, index: _alone(run, out, job, state, index),
        watch,
        run.samples_of,
        job.broadcast,
    )


def attribute_fault(
    run: Run,
    out: Path | None,
    job: Job,
    step: int,
    known: Sequence[records.Record],
    *,
    exact: bool = True,
) -> Verdict:
    """The verdict on a step of `run`, from 1, by taking it again. Collective.

    Args:
        run: its state is left alone.
        out: its folder.
        job: its processes.
        step: which one.
        known: records of this session, beside those in the folder.
        exact: as of `take_again`.
    """
    names = ("step", "batch", "loss", "grad_norm", "targets")

    def stored() -> list[dict[str, Any]]:
        rows = [] if out is None else run_folder.records(out)
        return [{name: row.get(name) for name in names} for row in rows if row["step"] <= step]

    found = {record["step"]: record for record in job.broadcast(stored)}
    found |= {record["step"]: record for record in known if "batch" in record}
    return take_again(replay_of(run, out, job), step, found, exact=exact)


def _alone(run: Run, out: Path | None, job: Job, state: State, index: int) -> list[Numbers] | None:
    """The numbers of a step that every rank computes by itself, all of it, simulating the others.

    The state goes through a checkpoint, which is removed. None where there are no other ranks, no
    folder for it, or no memory for the whole state on each.
    """
    mesh = run.mesh
    if not isinstance(mesh, BoundMesh) or out is None:
        return None
    leaves = run.setup.placement.leaves
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    free = -job.across(-free_memory_bytes(run.device), dist.ReduceOp.MAX)
    together = 1 if run.device.type == "cuda" else mesh.size
    if 3 * nbytes * together > free:
        return None
    path = out / run_folder.AGAIN
    checkpoint.save(
        path, state, placement=run.setup.placement, timeout=run.config.watchdog.timeout_seconds
    )
    config = configure(run.config, compile=False, cuda_graph=False, nproc=0)
    made = dataclasses.replace(run.setup, config=config, mesh=mesh.mesh)
    whole, _ = begin_state(made, path, run.device)
    simulated = dataclasses.replace(run, setup=made, state=whole)
    step, _ = programs(made, run.around)
    numbers = numbers_of(step(whole, simulated.batch(index))[1])
    found = job.gather(numbers)
    job.broadcast(lambda: shutil.rmtree(path, ignore_errors=True))
    return found
