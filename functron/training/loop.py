"""The training loop: steps, their records, and a graceful end.

Ctrl-C and SIGTERM as a request that a running step outlives.

Steps that also say how large every layer's parameters, gradients and results are.

What a machine could do and what a process used: the denominators of MFU and memory.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functron.training import records
from functron.training.plan import Watch


@dataclass
class Request:
    """Whether someone asked to stop.

    Attributes:
        signal: the signal that asked, or None.
    """

    signal: int | None = None


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Turn the first SIGINT or SIGTERM within the with block into a `Request`.

    The second one raises KeyboardInterrupt at once. The handlers that were installed before are
    put back at the end. Outside the main thread, where Python allows no handlers, nothing changes.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: object) -> None:
        if request.signal is not None:
            raise KeyboardInterrupt
        request.signal = number

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            # a handler that was not installed from Python comes as None and cannot be put back
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


Entries = dict[str, dict[str, float]]


# Dense tensor-core rates without sparsity, and the float32 and float64 rates that torch uses by
# default (no TF32), in FLOP/s, from the vendor's data sheets. The longest matching name counts.
PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # name in torch.cuda.get_device_name, bfloat16, float32, float64
    ("B200", 2250e12, 75e12, 37e12),
    ("H200", 989e12, 67e12, 67e12),
    ("H100 PCIe", 756e12, 51e12, 51e12),
    ("H100", 989e12, 67e12, 67e12),
    ("A100", 312e12, 19.5e12, 19.5e12),
    ("L40S", 362e12, 91.6e12, 1.4e12),
    ("L4", 121e12, 30.3e12, 0.5e12),
    ("A10G", 70e12, 35e12, 0.5e12),
    ("RTX 4090", 165e12, 82.6e12, 1.3e12),
    ("RTX 3090", 71e12, 35.6e12, 0.6e12),
)


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """The matrix-multiply rate of one device in FLOP/s: the 100% of model FLOPs utilisation (MFU).

    For the GPUs of `PEAKS` the data sheet's rate. For a CPU, whose rate depends on its clock and
    on the threads this process has, and for any other GPU, what a large matrix product reaches
    here (`measured_flops`).
    """
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = sorted((row for row in PEAKS if row[0] in name), key=lambda row: len(row[0]))
        if found:
            _, bf16, fp32, fp64 = found[-1]
            return {torch.float32: fp32, torch.float64: fp64}.get(dtype, bf16)
    return measured_flops(device, dtype)


def measured_flops(device: torch.device | str, dtype: torch.dtype, size: int = 1024) -> float:
    """The rate of the fastest of five products of ``[size, size]`` matrices, in FLOP/s.

    Takes some 0.1 seconds on two CPU cores.
    """
    device = torch.device(device)
    a = torch.ones(size, size, dtype=dtype, device=device)
    fastest = float("inf")
    for _ in range(5):
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a)
        _synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def peak_memory_bytes(device: torch.device | str) -> int:
    """The most memory used so far: torch's allocations on a GPU, the resident process on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # unlike ru_maxrss, VmHWM does not start from what the parent process had used
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def free_memory_bytes(device: torch.device | str) -> int:
    """The memory that a process could still take: of a GPU, or of the machine without swapping."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    about = Path("/proc/meminfo")
    if about.exists():
        fields = dict(line.split(":", 1) for line in about.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


METRICS = ("loss", "grad_norm")


class Outcome(NamedTuple):
    """The end of a loop.

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
    """Makes a record of a step's metrics and its time; each part may be left unknown.

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
    reporters: Sequence[records.Reporter] | None = None,
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
        reporters: context managers from `functron.training.records`; None shows a progress bar.
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
    bar = [records.progress(steps, start)] if reporters is None else reporters
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
                record[records.EVAL] = evaluate(state)
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
