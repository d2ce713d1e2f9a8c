"""The training loop: steps, their records, and a graceful end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from functron import report
from functron.interrupt import Request, stop_requests
from functron.metrics import peak_memory_bytes
from functron.watch import Watch

METRICS = ("loss", "grad_norm")


class Outcome(NamedTuple):
    """What a loop leaves behind.

    Attributes:
        state: after the last step.
        history: one record per step; see `Meter.record`.
        stopped_by: the signal that ended it early, whichever rank received it, or None.
    """

    state: Any
    history: list[dict[str, Any]]
    stopped_by: int | None


@dataclass(frozen=True)
class Meter:
    """What turns a step's metrics and its time into a record; each part may be left unknown.

    Attributes:
        learning_rate: of each step, from 0.
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
        mfu = None
        if rate is not None and self.flops_per_token and self.peak_flops:
            mfu = rate * self.flops_per_token / self.peak_flops
        return {
            "step": index + 1,
            "loss": values["loss"],
            "grad_norm": values.get("grad_norm"),
            "lr": None if self.learning_rate is None else float(self.learning_rate(index)),
            "tokens": seen,
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "mfu": mfu,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            **({} if self.position is None else self.position(index + 1)),
        }


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
    evaluate: Callable[[Any], Mapping[str, Mapping[str, float]]] | None = None,
    evaluate_every: int = 0,
    reporters: Sequence[report.Reporter] | None = None,
    agree: Callable[[int], int] = int,
    watch: Watch | None = None,
    stop: Request | None = None,
) -> Outcome:
    """Take steps `start` to ``steps - 1``, record each, and save at the end.

    Nothing but `step` and `batches` is needed, so that a notebook can run any step; and no file is
    written but by what is passed as `save` and `reporters`.

    The first Ctrl-C or SIGTERM lets the running step finish, saves, and returns; the second one
    raises KeyboardInterrupt.

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
        evaluate: called with the state; what it returns, numbers of held-out sets by name, is the
            record's ``eval``. Its time is not that of a step. Not called once the run is to stop.
        evaluate_every: evaluate after every so many steps, and after the last; 0: never.
        reporters: context managers from `functron.report`; None shows a progress bar.
        agree: the largest of all ranks' numbers: so that every rank stops at the same step.
        watch: what is taken in place of `step` where it is due; its records have ``layers`` too.
        stop: what `stop_requests` of the caller says, who has more to end than the steps; None: the
            loop listens itself.

    Returns:
        The `Outcome`; its records are those of `Meter.record`.

    Raises:
        FloatingPointError: the loss is not finite. The state is not saved.
    """
    meter = meter or Meter()
    bar = [report.progress(steps, start)] if reporters is None else reporters
    history: list[dict[str, Any]] = []
    with ExitStack() as stack:
        request = stack.enter_context(stop_requests()) if stop is None else stop
        writers = [stack.enter_context(reporter) for reporter in bar]
        for index in range(start, steps):
            began = time.perf_counter()
            batch = batches(index)
            watched = watch if watch is not None and watch.due(index) else None
            state, metrics = (step if watched is None else watched.step)(state, batch)
            # reading the numbers waits for the device, so the time is that of the whole step
            values = {name: float(metrics[name]) for name in METRICS if name in metrics}
            record = meter.record(index, batch, values, time.perf_counter() - began)
            if meter.details is not None:
                record |= meter.details(metrics["aux"])
            if watched is not None:
                record["layers"] = watched.layers(metrics)
            due = evaluate is not None and _is_due(index + 1, evaluate_every, steps, record)
            if evaluate is not None and due and not agree(request.signal or 0):  # it may take long
                record[report.EVAL] = evaluate(state)
            history.append(record)
            for write in writers:
                write(record)
            _check_finite(record)
            stopped_by = agree(request.signal or 0)
            due = save_every and (index + 1) % save_every == 0
            if save is not None and (stopped_by or due or index + 1 == steps):
                save(state, index + 1)
            if stopped_by:
                return Outcome(state, history, stopped_by)
    return Outcome(state, history, None)


def _is_due(step: int, every: int, steps: int, record: Mapping[str, Any]) -> bool:
    """Whether to evaluate after `step`: all ranks agree on it, as they do on the loss."""
    return every > 0 and (step % every == 0 or step == steps) and math.isfinite(record["loss"])


def _count(batch: Any) -> int | None:
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, torch.Tensor) else None


def _check_finite(record: Mapping[str, Any]) -> None:
    if not math.isfinite(record["loss"]):
        raise FloatingPointError(
            f"step {record['step']}: got loss {record['loss']}; wanted a finite number; fix: lower "
            "the learning rate, lengthen the warm-up, clip gradients, or train in float32"
        )


def exit_code(stopped_by: int | None) -> int:
    """The exit code of a process that a signal ended: 128 + its number, as shells have it."""
    return 0 if stopped_by is None else 128 + stopped_by
