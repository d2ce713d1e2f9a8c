"""The loop of steps of a training run: what is saved, recorded, watched and answered in between.

Ctrl-C, SIGTERM and SIGUSR1 are requests to stop that a running step outlives. Records
have what the machine could do and what the process used: the denominators of MFU and memory.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from functron import checkpoint
from functron.checkpoint.saver import own_store
from functron.core import compat, tree
from functron.core.errors import local_path, raise_problems
from functron.data import Blend
from functron.data.order import earlier_text
from functron.models import gpt
from functron.optim.schedules import read_schedule_count
from functron.spmd import BoundMesh
from functron.spmd.flight import Agreement, DeviceClock
from functron.spmd.mesh import LostRanksError
from functron.training import data, records, restarts, run_folder, watchdog
from functron.training.anomalies import Anomaly, Guard
from functron.training.config import TrainConfig
from functron.training.data import prefetched
from functron.training.hardware import peak_flops, peak_memory_bytes
from functron.training.replicas import Replicas, checking
from functron.training.rerun import Verdict, attributed, check_hardware
from functron.training.run import (
    Job,
    Run,
    begin_state,
    deterministic,
    own_hash,
    programs,
    remembering,
    seen,
)
from functron.training.setup import Watch, make_setup
from functron.training.step import State
from functron.training.stragglers import PICTURE, Comparison, Stopwatch, axes_of

EXIT_AFTER = int(signal.NSIG)
"""That a run's time is over, where the number of a signal may stand as well."""
RESHAPE = EXIT_AFTER + 1
"""That a run goes on with more ranks, likewise."""


@dataclass
class Request:
    """Whether someone asked to stop.

    Attributes:
        signal: the signal that asked, or None.
        ends: when the time of the run is over, by ``time.monotonic()``.
        grown: whether there are processes for a larger mesh; asked where a checkpoint is saved.
    """

    signal: int | None = None
    ends: float = math.inf
    grown: Callable[[], bool] | None = None

    def asked(self, *, saving: bool = False) -> int:
        """The number of the signal, or `EXIT_AFTER` or `RESHAPE`; 0 where nobody asked."""
        if self.signal is not None:
            return self.signal
        if time.monotonic() >= self.ends:
            return EXIT_AFTER
        return RESHAPE if saving and self.grown is not None and self.grown() else 0


_ECHO_SECONDS = 2.0


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Turn the first SIGINT, SIGTERM or SIGUSR1 within the with block into a `Request`.

    The second one raises KeyboardInterrupt at once, but for SIGUSR1, which only ever asks, and a
    SIGTERM that comes twice within 2 seconds: a scheduler sends it to every process of a job, and
    its launcher passes it on. The handlers that were installed before are put back at the end.
    Outside the main thread, where Python allows no handlers, nothing changes.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    asked_at = 0.0

    def handle(number: int, frame: object) -> None:
        nonlocal asked_at
        recent = time.monotonic() - asked_at < _ECHO_SECONDS
        echo = number == signal.SIGUSR1 or (number == request.signal == signal.SIGTERM and recent)
        if request.signal in (None, signal.SIGUSR1):
            request.signal, asked_at = number, time.monotonic()
        elif not echo:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            # a handler that was not installed from Python comes as None and cannot be put back
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


Entries = dict[str, dict[str, float]]


METRICS = ("loss", "grad_norm", "loss_scale", "updates")


class Outcome(NamedTuple):
    """The end of a loop.

    Attributes:
        state: after the last step.
        history: one record per step; see `Meter.record`.
        stopped_by: the signal that ended it early, whichever rank received it, `EXIT_AFTER` or
            `RESHAPE`; None where it has all its steps.
    """

    state: Any
    history: list[dict[str, Any]]
    stopped_by: int | None


@dataclass(frozen=True)
class Meter:
    """Makes a record of a step's metrics and its time; each part may be left unknown.

    Attributes:
        learning_rate: of each update, from 0: of the count that the optimizer took it by, where
            the metrics have it as ``updates``, and else of the step.
        tokens_seen: tokens that all ranks together train on in the first so many steps; None
            counts ``batch["tokens"]``, of which all steps have as many.
        flops_per_token: model FLOPs of a token, forward and backward.
        peak_flops: FLOP/s of all devices together.
        device: whose memory is recorded.
        details: makes more entries of a record out of what a step's metrics have as ``aux``.
        position: more entries of a record, by the number of steps taken: where the data is.
    """

    learning_rate: Callable[[int], Any] | None = None
    tokens_seen: Callable[[int], int] | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    device: torch.device | str = "cpu"
    details: Callable[[Any], Mapping[str, float]] | None = None
    position: Callable[[int], Mapping[str, Any]] | None = None

    def record(self, index: int, batch: Any, values: Mapping[str, float], seconds: float) -> dict:
        """The record of step `index` (from 0): every key, None where unknown.

        ``step`` and ``tokens`` count from the beginning, this step included; ``mfu`` is model
        FLOPs per second over `peak_flops`.
        """
        if self.tokens_seen is None:
            count = _count(batch)
            seen = None if count is None else (index + 1) * count
        else:
            seen = self.tokens_seen(index + 1)
            count = seen - self.tokens_seen(index)
        rate = None if count is None else count / seconds
        updates = int(values.get("updates", index))
        mfu = None
        if rate is not None and self.flops_per_token and self.peak_flops:
            mfu = rate * self.flops_per_token / self.peak_flops
        return {
            "step": index + 1,
            "loss": values["loss"],
            "grad_norm": values.get("grad_norm"),
            **({"loss_scale": values["loss_scale"]} if "loss_scale" in values else {}),
            "lr": None if self.learning_rate is None else float(self.learning_rate(updates)),
            "tokens": seen,
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "mfu": mfu,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            **({} if self.position is None else self.position(index + 1)),
        }


def _no_phase(name: str, step: int) -> None:
    """Nobody asks."""


def loop(
    step: Callable,
    state: Any,
    batches: Callable[[int], Any],
    *,
    steps: int,
    start: int = 0,
    meter: Meter | None = None,
    save: Callable[[Any, int], None] | None = None,
    save_every: int = 0,
    remember: Callable[[Any, int], None] | None = None,
    remember_every: int = 0,
    evaluate: Callable[[Any], Mapping[str, Mapping[str, float]]] | None = None,
    evaluate_every: int = 0,
    reporters: Sequence[records.Reporter] | None = None,
    agree: Callable[[int], int] = int,
    watch: Watch | None = None,
    stop: Request | None = None,
    ahead: int = 0,
    patience: int = 0,
    skips: bool = False,
    overflowing: Callable[[Any, Any], Sequence[str]] | None = None,
    guard: Guard | None = None,
    check: Callable[[Any, int], bool] | None = None,
    check_every: int = 0,
    phase: Callable[[str, int], None] = _no_phase,
    ranks: Callable[[int], Mapping[str, Any]] | None = None,
) -> Outcome:
    """Take steps `start` to ``steps - 1``, record each, and save at the end.

    Nothing but `step` and `batches` is needed, so that a notebook can run any step; and no file is
    written but by what is passed as `save` and `reporters`.

    The first Ctrl-C, SIGTERM or SIGUSR1 lets the running step finish, saves, and returns; the
    second one raises KeyboardInterrupt, as `stop_requests` has it.

    Args:
        step: ``(state, batch) -> (state, metrics)``, metrics with ``loss`` and, if it likes,
            ``grad_norm``.
        state: before step `start`.
        batches: the batch of each step, a pure function of its number.
        steps: how many steps the whole run has.
        start: how many of them are done.
        meter: what is known about tokens, rates and FLOPs, for the records.
        save: called with the state and the number of steps taken.
        save_every: save after every so many steps too; 0: only at the end.
        remember: called as `save` is, for what keeps the state elsewhere while steps go on.
        remember_every: after every so many steps; 0: never.
        evaluate: called with the state; what it returns, numbers of held-out sets by name, is the
            record's ``eval``. Its time is not that of a step. Not called once the run is to stop.
        evaluate_every: evaluate after every so many steps, and after the last; 0: never.
        reporters: context managers from `functron.training.records`; None shows a progress bar.
        agree: the largest of all ranks' numbers: so that every rank stops at the same step.
        watch: what is taken in place of `step` where it is due; its records have ``layers`` too.
        stop: what `stop_requests` of the caller says, who has more to end than the steps; None: the
            loop listens itself.
        ahead: how many steps are started before the numbers of one are read. Where a device
            computes while Python goes on, 1 keeps it busy: reading waits for it. What is to be
            saved or evaluated has been read.
        patience: raise where so many steps in a row overflow, and the scale of the loss cannot
            fall; 0: never.
        skips: whether `step` itself leaves out updates that are not finite, as far as it is asked
            to: gradients need not be, then.
        overflowing: ``(state, batch)`` to the names of the layers whose gradients then are not
            finite, for that error; it may give up the state.
        guard: what sees every record, and may end the loop for an anomaly, which it then has as
            `found`. Nothing is raised for what is not finite, since it says what that is.
        check: called with the state and the number of steps taken, which it may repair in place
            (whether it did, it returns) or raise for. Before what is saved, and where a number is
            not finite, too.
        check_every: call it after every so many steps; 0: never.
        phase: told what the loop goes over to, with the number of the step: ``data``, ``step``,
            ``agree``, ``record``, ``evaluate`` or ``save``.
        ranks: called after every step with its number; what it returns, of all ranks, is added to
            the record of the step.

    Returns:
        The `Outcome`; its records are those of `Meter.record`.

    Raises:
        FloatingPointError: the loss or the gradients' norm is not finite, or steps overflow. The
            state is not saved.
    """
    meter = meter or Meter()
    bar = [records.progress(steps, start)] if reporters is None else reporters
    history: list[dict[str, Any]] = []
    with ExitStack() as stack:
        request = stack.enter_context(stop_requests()) if stop is None else stop
        writers = [stack.enter_context(reporter) for reporter in bar]
        taken: deque[_Taken] = deque()
        settled = time.perf_counter()
        anomaly: Anomaly | None = None
        of_ranks: dict[int, Mapping[str, Any]] = {}
        for index in range(start, steps):
            began = time.perf_counter()
            phase("data", index)
            batch = batches(index)
            phase("step", index)
            if guard is not None:
                guard.before(state, index)
            watched = watch if watch is not None and watch.due(index) else None
            state, metrics = (step if watched is None else watched.step)(state, batch)
            taken.append(_Taken.of(index, batch, metrics, watched, began))
            phase("agree", index)
            last = index + 1 == steps
            evaluating = evaluate is not None and _is_due(index + 1, evaluate_every, steps)
            saving = last or bool(save_every and (index + 1) % save_every == 0)
            stopped_by = agree(request.asked(saving=saving and not last))
            stopped_by = 0 if last and stopped_by == EXIT_AFTER else stopped_by
            hurried = stopped_by not in (0, RESHAPE)  # which is asked for at checkpoints
            if ranks is not None:
                of_ranks[index] = ranks(index)
            left = 0 if evaluating or saving or stopped_by else ahead
            while len(taken) > (0 if anomaly else left):
                done = taken.popleft()
                phase("record", index)
                record = done.record(meter, settled)
                record |= of_ranks.pop(done.index, {})
                finite = math.isfinite(record["loss"] or 0.0)  # all ranks agree on that
                if evaluate is not None and evaluating and not (taken or hurried) and finite:
                    phase("evaluate", index)
                    record[records.EVAL] = evaluate(state)
                    phase("record", index)
                    stopped_by = agree(request.signal or 0) or stopped_by  # it may have taken long
                history.append(record)
                for write in writers:
                    write(record)
                if patience and done.metrics.get("stuck", 0) >= patience:
                    names = [] if overflowing is None else overflowing(state, batch)
                    raise FloatingPointError(_stuck(record, patience, names))
                bad = not all(math.isfinite(record[name] or 0.0) for name in ("loss", "grad_norm"))
                if bad and check is not None and check(state, index + 1) and skips:
                    pass  # the state that made it is repaired, and the update was left out
                elif guard is not None:
                    anomaly = guard.observe(record) or anomaly
                elif patience == 0 or math.isfinite(record["grad_norm"] or 0.0):
                    _check_finite(record, ("loss",) if skips else ("loss", "grad_norm"))
                settled = time.perf_counter()
            kept = anomaly is None or anomaly.keeps
            if check is not None and check_every and (saving or (index + 1) % check_every == 0):
                check(state, index + 1)
            if remember is not None and kept and _is_multiple(index + 1, remember_every):
                remember(state, index + 1)
                settled = time.perf_counter()
            if save is not None and kept and (saving or stopped_by):
                phase("save", index)
                save(state, index + 1)
                settled = time.perf_counter()
            if stopped_by == RESHAPE and anomaly is not None:
                stopped_by = None  # it is answered first
            if stopped_by or anomaly is not None:
                return Outcome(state, history, stopped_by or None)
    return Outcome(state, history, None)


@dataclass(frozen=True)
class _Taken:
    """A step whose numbers are on their way to the host, which may go on meanwhile."""

    index: int
    batch: Any
    metrics: Any
    arrived: torch.cuda.Event | None
    watched: Watch | None
    began: float

    @classmethod
    def of(
        cls, index: int, batch: Any, metrics: Any, watched: Watch | None, began: float
    ) -> _Taken:
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree.leaves(metrics))
        if not on_gpu:
            return cls(index, batch, metrics, None, watched, began)
        # copied before the next step starts: a copy that is asked for later waits for that step
        metrics = tree.map(
            lambda x: x.to("cpu", non_blocking=True) if isinstance(x, torch.Tensor) else x, metrics
        )
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(index, batch, metrics, arrived, watched, began)

    def record(self, meter: Meter, settled: float) -> dict[str, Any]:
        """The step's record: its time began when the step before it was `settled`, or later."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values = {name: float(self.metrics[name]) for name in METRICS if name in self.metrics}
        seconds = time.perf_counter() - max(self.began, settled)
        record = meter.record(self.index, self.batch, values, seconds)
        if "targets" in self.metrics:
            record["targets"] = int(self.metrics["targets"])
        if meter.details is not None:
            record |= meter.details(self.metrics["aux"])
        if self.watched is not None:
            record["layers"] = self.watched.layers(self.metrics)
        return records.blank_empty_losses(record)


def _is_due(step: int, every: int, steps: int) -> bool:
    """Whether to evaluate after `step`."""
    return every > 0 and (step % every == 0 or step == steps)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _count(batch: Any) -> int | None:
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, torch.Tensor) else None


def _check_finite(record: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if not math.isfinite(record[name] or 0.0):
            what = {"loss": "loss", "grad_norm": "gradients of norm"}[name]
            raise FloatingPointError(
                f"step {record['step']}: got {what} {record[name]}; wanted a finite number; fix: "
                "lower the learning rate, lengthen the warm-up, clip gradients, or train in float32"
            )


def _stuck(record: Mapping[str, Any], patience: int, names: Sequence[str]) -> str:
    where = f", in {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""
    return (
        f"step {record['step']}: got gradients that are not finite in {patience} steps in a row"
        f"{where}, with the loss times {record['loss_scale']:g}, the least; wanted finite ones; "
        "fix: train in bf16 (--precision bf16), lower the learning rate, or lengthen the warm-up"
    )


REQUEUE_CODE = 128 + signal.SIGUSR1
"""The exit code of a run that saved and left before its end, to be started again: 138."""
RESHAPE_CODE = 75
"""That of a run that saved, to be started with more ranks at once: EX_TEMPFAIL of sysexits.h."""


def exit_code(stopped_by: int | None) -> int:
    """The exit code of a process that ended early: 128 + the signal's number, as shells have it.

    Where its time was over that of SIGUSR1, with which schedulers say so.
    """
    codes = {None: 0, EXIT_AFTER: REQUEUE_CODE, RESHAPE: RESHAPE_CODE}
    return codes[stopped_by] if stopped_by in codes else 128 + int(stopped_by or 0)


_HURRIED = 5.0  # seconds without a sign of life after which a run that is to end waits no longer


def train(
    run: Run,
    out: Path | None,
    *,
    began: float | None = None,
    hung: Callable[[str, bool], None] = watchdog.ended,
    also: Callable[[], records.Reporter] | None = None,
) -> Outcome:
    """Take the steps of `run`, and leave what a run folder holds in `out` (None: no files).

    On a bound mesh every rank calls it, with the same `out`, which all must reach: each writes its
    part of checkpoints, while training goes on, and rank 0 all else. Collectives: those of the
    step, and one all-reduce of a scalar per step.

    Args:
        run: made by `prepare`.
        out: the run folder.
        began: when the process did, by ``time.monotonic()``: `TrainConfig.exit_after` counts from
            then; None: now.
        hung: ends the process where the job hangs; see `functron.training.watchdog.Watchdog`.
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
        stack.enter_context(_noting_checkpoints(out))
        if config.deterministic:
            stack.enter_context(deterministic())
        stop = stack.enter_context(stop_requests())  # until the last save is complete
        if config.exit_after:
            stop.ends = began + restarts.seconds_of(config.exit_after)
        if config.elastic and job.main:
            stop.grown = lambda: restarts.can_grow(config)
        write = _nowhere
        if job.main and out is not None:
            write = stack.enter_context(records.event_log(out / records.EVENTS))
        phase = stack.enter_context(_watched(run, out, job, hung))
        past = job.told(lambda: _past(run, out))
        history: list[dict[str, Any]] = []
        answers = 0
        phase = _both(*_recording(run), phase)
        compared = _compared(run, out, job, write)
        if compared is not None:
            stack.enter_context(compared.drawing())
            phase = _both(phase, compared.stopwatch.phase)
        while True:
            guard = _guard(run, write, past)
            outcome = _stretch(run, out, job, stop, guard, write, peak, phase, compared, also)
            phase("restore", outcome.history[-1]["step"] if outcome.history else run.start)
            history += outcome.history
            found = guard.found
            if found is None or outcome.stopped_by:
                _log_end(write, outcome)
                return outcome._replace(history=history)
            verdict = None
            if config.anomalies.attribute:
                verdict = attributed(run, out, job, found.step, past + history)
                write("rerun", found.step, **verdict.event())
                check_hardware(verdict)
            answers += found.action in ("rollback", "lower-rate")
            _check_answers(found, answers, config.anomalies.most, history)
            run = _answered(run, out, job, outcome, found, verdict, write)
            del outcome  # of a state that a rollback forgets
            history = [record for record in history if record["step"] <= run.start]
            past = [record for record in past if record["step"] <= run.start] + history


@contextmanager
def _noting_checkpoints(out: Path | None) -> Iterator[None]:
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


def _nowhere(kind: str, step: int, **about: Any) -> None:
    """Write no event."""


def _past(run: Run, out: Path | None) -> list[dict[str, Any]]:
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


def _guard(run: Run, write: Callable[..., None], past: Sequence[records.Record]) -> Guard:
    optimizer = run.config.optimizer
    return Guard(
        run.config.anomalies,
        write,
        run.samples_of,
        past,
        skips=optimizer.skip_nonfinite > 0,
        overflows=optimizer.loss_scale.initial > 0,
    )


def _stretch(
    run: Run,
    out: Path | None,
    job: Job,
    stop: Request,
    guard: Guard,
    write: Callable[..., None],
    peak: float,
    phase: Callable[[str, int], None],
    compared: Comparison | None,
    also: Callable[[], records.Reporter] | None,
) -> Outcome:
    """The steps of `run` until all are taken, someone asks to stop, or an anomaly ends them."""
    config, family, scaled = run.config, run.config.family, run.config.optimizer.loss_scale
    sums: dict[int, Callable[[], int]] = {}
    replicas = replicas_of(run, job) if config.check_replicas_every else None
    repairs = config.on_corruption == "repair"

    def position(steps: int) -> dict[str, Any]:
        return {**seen(run, steps), "batch": f"{sums.pop(steps - 1)():016x}"}

    def made(step: int) -> tuple[dict[str, torch.Tensor], int, int]:
        batch = run.host_batch(step)
        return batch, own_hash(run.mesh, batch), run.num_targets(batch)

    meter = Meter(
        learning_rate=run.setup.learning_rate,
        tokens_seen=lambda steps: run.batches.first_sample(steps) * config.seq,
        flops_per_token=data.flops_per_token(config),
        peak_flops=peak,
        device=run.device,
        details=gpt.summary if family.has_details(config.architecture) else None,
        position=position,
    )
    with ExitStack() as stack:
        save = stack.enter_context(_saving(run, out, stop)) if out is not None else None
        # the copy to the device stays in this thread: which GPU is current is a thread's own affair
        ahead = prefetched(made, run.start, config.steps, config.prefetch)
        host_batch = stack.enter_context(ahead)
        remember = stack.enter_context(remembering(run))
        reached, targets = int(run.start), 0

        def batch(step: int) -> dict[str, torch.Tensor]:
            nonlocal reached, targets
            reached = step + 1
            run.at("step", step)
            host, part, own_targets = host_batch(step)
            sums[step] = job.summed(part)
            targets = 1 if run.setup.reads_targets else job.summed(own_targets)()
            return run.on_device(host)

        def taken(state: State, batch: tree.Tree) -> tuple[State, dict[str, Any]]:
            return _count_updates(run.taking(run.step, targets))(state, batch)

        def watched(state: State, batch: tree.Tree) -> tuple[State, dict[str, Any]]:
            assert run.watch is not None
            return _count_updates(run.taking(run.watch.step, targets, watched=True))(state, batch)

        def evaluated(state: State) -> dict[str, dict[str, float]]:
            run.at("evaluate", reached)
            return run.evaluate(state)

        return loop(
            taken,
            run.state,
            batch,
            steps=config.steps,
            start=run.start,
            meter=meter,
            save=save,
            save_every=config.save_every,
            remember=remember,
            remember_every=config.memory_save_every,
            evaluate=evaluated,
            evaluate_every=config.eval_every,
            reporters=_reporters(run, out, also) if job.main else [],
            agree=lambda number: int(job.across(number, dist.ReduceOp.MAX)),
            watch=None if run.watch is None else dataclasses.replace(run.watch, step=watched),
            stop=stop,
            ahead=int(run.device.type == "cuda"),
            patience=scaled.patience if scaled.initial else 0,
            skips=config.optimizer.skip_nonfinite > 0,
            overflowing=run.setup.overflowing,
            guard=guard,
            check=None if replicas is None else checking(replicas, write, repairs=repairs),
            check_every=config.check_replicas_every,
            phase=phase,
            ranks=(lambda index: {}) if compared is None else compared.gathered,
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


def _reporters(
    run: Run, out: Path | None, also: Callable[[], records.Reporter] | None
) -> list[records.Reporter]:
    found = [*reporters(run.config, out, run.start), records.report_missing_targets()]
    return [*found, *([] if also is None else [also()])]


def _both(*phases: Callable[[str, int], None]) -> Callable[[str, int], None]:
    def tell(name: str, step: int) -> None:
        for phase in phases:
            phase(name, step)

    return tell


def _recording(run: Run) -> list[Callable[[str, int], None]]:
    """Tell the recorder of the mesh when a step begins; it compares ranks, if asked to."""
    config, mesh = run.config, run.mesh
    if not isinstance(mesh, BoundMesh) or mesh.recorder is None:
        return []
    recorder = mesh.recorder
    if config.check_programs:
        store = own_store(compat.default_store(), config.timeout_seconds)
        seconds, one_order = config.timeout_seconds, mesh["pp"] == 1
        recorder.agreement = Agreement(store, mesh.rank, seconds, one_order)

    def begin(name: str, step: int) -> None:
        if name == "data":
            recorder.begin(step)

    return [begin]


def _compared(
    run: Run, out: Path | None, job: Job, write: Callable[..., None]
) -> Comparison | None:
    """The search for ranks that are slow; None: there is one, or nobody asks. Collective."""
    every, mesh = run.config.stragglers_every, run.mesh
    if not (every and isinstance(mesh, BoundMesh) and mesh.size > 1 and mesh.recorder is not None):
        return None

    def gather(mine: torch.Tensor) -> torch.Tensor:
        found = [torch.empty_like(mine) for _ in range(mesh.size)]
        dist.all_gather(found, mine, group=job.group)
        return torch.stack(found)

    def say(text: str) -> None:
        print(f"functron: {text}", file=sys.stderr, flush=True)

    clock = DeviceClock() if run.device.type == "cuda" else None
    watch = Stopwatch(mesh.recorder, axes_of(mesh), clock)
    hosts = job.gathered(socket.gethostname())
    picture = out / PICTURE if out is not None and job.main else None
    return Comparison(mesh, hosts, every, watch, gather, write, say if job.main else None, picture)


@contextmanager
def _watched(
    run: Run, out: Path | None, job: Job, hung: Callable[[str, bool], None]
) -> Iterator[Callable[[str, int], None]]:
    """A listener to the phases of the loop; it ends the process where the job hangs. Collective."""
    config, mesh, batches = run.config, run.mesh, run.batches
    watched = config.hang_after > 0 and out is not None
    if not (watched and isinstance(mesh, BoundMesh) and mesh.recorder is not None):
        yield _no_phase
        return

    def compiles(step: int) -> bool:
        grown = step > run.start and batches.batch_size(step) != batches.batch_size(step - 1)
        return step == run.start or grown or (run.watch is not None and run.watch.due(step))

    assert out is not None
    dog = watchdog.Watchdog.of(
        mesh,
        out,
        job.across(time.time(), dist.ReduceOp.MAX),
        hang_after=config.hang_after,
        timeout=config.timeout_seconds,
        fresh=compiles,
        end=hung,
        group=job.group,
    )
    with dog.watching():
        yield dog.phase


def replicas_of(run: Run, job: Job) -> Replicas | None:
    """The replicas of the state of `run`; None where this process has all of it."""
    if not isinstance(run.mesh, BoundMesh):
        return None

    def largest(number: int) -> int:
        return int(job.across(number, dist.ReduceOp.MAX))

    stages = "pp" if run.setup.is_pipelined else None
    return Replicas(run.mesh, run.setup.state_specs, stages, largest, job.gathered)


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
        _check_finite(history[-1], (found.metric,))
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


def _answered(
    run: Run,
    out: Path | None,
    job: Job,
    outcome: Outcome,
    found: Anomaly,
    verdict: Verdict | None,
    write: Callable[..., None],
) -> Run:
    """The run that goes on after an anomaly, as the policy has it. Collective."""
    taken = outcome.history[-1]["step"]
    if found.action == "rollback":
        # samples have no part in what does not happen again
        skips = verdict is None or verdict.kind != "transient"
        return _rolled_back(run, out, job, found, write, skips=skips)
    on = dataclasses.replace(run, state=outcome.state, start=taken)
    if found.action != "lower-rate":
        return on
    anomalies = run.config.anomalies.lowered(taken)
    config = dataclasses.replace(run.config, anomalies=anomalies)
    made = make_setup(config, run.mesh)
    step, watch = programs(made, run.around)
    write("lower-rate", taken, factor=anomalies.rate_factor, since=found.step)
    if job.main and out is not None:
        run_folder.write_config(out, config)
    return dataclasses.replace(on, setup=made, step=step, watch=watch)


def _rolled_back(
    run: Run,
    out: Path | None,
    job: Job,
    found: Anomaly,
    write: Callable[..., None],
    *,
    skips: bool = True,
) -> Run:
    """The run from a checkpoint before an anomaly, without the samples that led to it. Collective.

    What was saved after that checkpoint is removed: it has seen them. Steps that were taken before
    the batches changed are taken again with the batches of now, which the mesh can divide.
    """
    policy, batches = run.config.anomalies, run.batches
    first = max(found.step - 1 - policy.rollback_steps, 0)  # the first step that is forgotten
    config, skips = run.config, skips and policy.skip_data
    if skips:
        numbers = (batches.first_sample(step) for step in (first, found.step))
        config = dataclasses.replace(config, anomalies=policy.without(*numbers))
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

    begun = job.told(begin)
    where = run.begun_from if begun is None or folder is None else folder / str(begun)
    state, _ = begin_state(run.setup, where, run.device)
    start = int(state.step)
    skipped = {"skipped": config.anomalies.skipped_samples} if skips else {}
    write("rollback", found.step, to=start, since=first + 1, **skipped)
    # the programs are the same, of which samples are no part; but rates may count them
    made, step, watch = dataclasses.replace(run.setup, config=config), run.step, run.watch
    if start < sum(steps for steps, _ in batches.earlier):
        config = dataclasses.replace(config, earlier_batches=earlier_text(batches.until(start)))
        job.told(lambda: None if out is None else run_folder.write_config(out, config))
        made = make_setup(config, run.mesh)
        step, watch = programs(made, run.around)
    return Run(
        made, run.text, state, step, watch, run.device, start,
        run.held_out, run.held_out_loss, run.notes, run.begun_from, run.around, run.at, run.memory,
    )  # fmt: skip


@contextmanager
def _saving(run: Run, out: Path, stop: Request) -> Iterator[Callable[[State, int], None]]:
    """A function that saves the state after a step; after the block all saves are complete."""
    config = run.config
    keep = checkpoint.Keep(config.keep_last or None, config.keep_every)
    folder, settings = out / run_folder.CHECKPOINTS, run_folder.settings(config)

    def timeout() -> float:  # a rank's death may be why this one is to end: it is not waited for
        limit = config.timeout_seconds
        return limit if stop.signal in (None, signal.SIGUSR1) else min(limit, _HURRIED)

    placement, device = run.setup.placement, run.device
    given: dict[str, Any] = {"keep": keep, "timeout": timeout, "device": device, "at": run.at}
    with checkpoint.Saver(folder, placement, **given) as saver:

        def save(state: State, step: int) -> None:
            run.at("save", step)
            samples = run.batches.first_sample(step)
            about = {"step": step, "samples": samples, "tokens": samples * config.seq}
            about |= {"mesh": config.mesh, "config": settings}
            if isinstance(run.text, Blend):
                about["sources"] = run.text.positions(run.gaps.number(samples))
            saver.save(step, state, about)

        yield save


def reporters(config: TrainConfig, out: Path | None, start: int = 0) -> list[records.Reporter]:
    """Where the records of a run go: always a progress bar, and the files of the run folder.

    There, records of steps after `start`, which will be taken again, are forgotten.
    """
    found: list[records.Reporter] = [records.progress(config.steps, start)]
    if out is None:
        return found
    before = run_folder.rewind(out, start)
    found.append(records.jsonl(out / run_folder.METRICS))
    found.append(records.loss_picture(out / "loss.svg", before, out / records.EVENTS))
    samples_after = config.batches.first_sample
    named = records.megatron_names(samples_after) if config.log_names else records.by_path
    if config.tensorboard:
        found.append(records.tensorboard(out / "tensorboard", named, start, before))
    if config.wandb:
        found.append(records.wandb(out, dataclasses.asdict(config), named))
    return found
