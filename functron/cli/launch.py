"""The processes of a job: starting one per rank, joining those of torchrun, parting again.

This process has a place in the job, and ends with an exit code and a message. This is the only
module that reads environment variables: torchrun's, and `FULL_TRACEBACKS`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from functron.core.errors import Problem, full_tracebacks
from functron.spmd import BoundMesh, Mesh

MARK = "functron-"
"""How the run ids begin that `functron.cli.launch` gives to torchrun's launcher."""
FULL_TRACEBACKS = "FUNCTRON_FULL_TRACEBACKS"


@dataclass(frozen=True)
class Process:
    """This process among those of a job, as torchrun tells it.

    Attributes:
        rank: from 0, over all machines.
        local_rank: from 0, on this machine.
        world_size: the number of processes.
        error_file: where the launcher looks for why this process failed; empty: nowhere.
        launched_here: whether `launch.launch` started it, which prints that file.
    """

    rank: int
    local_rank: int
    world_size: int
    error_file: str
    launched_here: bool


def current() -> Process | None:
    """This process among those that torchrun (or `launch.launch`) started; None where none did."""
    env = os.environ
    if not all(name in env for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return None
    return Process(
        int(env["RANK"]),
        int(env["LOCAL_RANK"]),
        int(env["WORLD_SIZE"]),
        env.get("TORCHELASTIC_ERROR_FILE", ""),
        env.get("TORCHELASTIC_RUN_ID", "").startswith(MARK),
    )


class InputError(Exception):
    """A mistake in what the user asked for: its message is all there is to show."""


class OutsideError(Exception):
    """A failure of what surrounds a run, such as a disk: its message is all there is to show."""


@contextmanager
def outside() -> Iterator[None]:
    """Turn an OSError in a with block, which begins with good input, into an `OutsideError`."""
    try:
        yield
    except OSError as error:
        raise OutsideError(_message(error)) from error


def _message(error: OSError) -> str:
    """The message of an error, which has a file's name where the system raised it."""
    if error.filename is None:
        return error.strerror or str(error)
    problem = Problem(
        str(error.filename),
        error.strerror or type(error).__name__,
        "to read or write it",
        "see that its folder and disk are there, and that this user may; then go on with --resume",
    )
    return f"cannot go on\n  - {problem}"


@contextmanager
def mistakes() -> Iterator[None]:
    """Turn a ValueError or TypeError in a with block, which checks input, into an `InputError`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def guarded(program: Callable[[], int]) -> int:
    """The exit code of `program()`: what a process of a job, or a lone one, should end with.

    An `InputError` is printed as its message and gives 2; an `OutsideError` (a full disk) and a
    FloatingPointError (a loss that is not finite) likewise, and give 1. Anything else is a
    traceback and 1. Where the environment has `FULL_TRACEBACKS`, which processes inherit, messages
    come with their traceback too.
    """
    here = current()
    try:
        with full_tracebacks():  # anything but a message is a bug of functron
            return program()
    except SystemExit as error:  # of the option parser, which has printed why
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # the reader of our output has left, as head does; Python must not flush to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (InputError, OutsideError, FloatingPointError) as error:
        text, code = f"functron: {error}", 2 if isinstance(error, InputError) else 1
        if os.environ.get(FULL_TRACEBACKS):
            text = f"{traceback.format_exc()}{text}"
        failure: Exception = error
    except Exception as error:
        text, code = traceback.format_exc(), 1
        failure = error
    if here is not None:
        record_failure(here, failure, text)
        # The others may wait for this process in a collective: end without waiting for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(text, file=sys.stderr)
    return code


def record_failure(here: Process, error: BaseException, text: str) -> None:
    """Leave `text` for the launcher of this process, or print it where none would.

    The file has torch.distributed.elastic's format, so that torchrun's summary shows it too.
    """
    if not here.launched_here:
        lines = "".join(f"rank {here.rank}: {line}\n" for line in text.splitlines())
        print(lines, end="", file=sys.stderr, flush=True)
    if here.error_file:
        now = time.time()
        info = {"py_callstack": text, "timestamp": str(int(now)), "time": now}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": info}
        # whole or not at all: the launcher may stop this process while it writes
        unfinished = Path(here.error_file + ".unfinished")
        unfinished.write_text(json.dumps({"message": message}), encoding="utf-8")
        unfinished.replace(here.error_file)


TIMEOUT_SECONDS = 300.0
"""How long a collective waits for a rank, unless a run says otherwise."""
NOTICED_WITHIN_SECONDS = 2


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A run whose model is used, and the ranks that use it.

    Attributes:
        run: the run folder that training left, of which the newest checkpoint is read.
        averaged: take the average of the parameters that the run keeps (--optimizer.ema-decay).
        mesh: axes and sizes, such as pp=2,tp=2; empty: one rank.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh in this process.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    averaged: bool = False
    mesh: str = ""
    nproc: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def problems(self, mesh: Mesh, here: Process | None) -> Iterator[Problem]:
        """Processes that are not as many as the ranks of `mesh`, which is that of `self.mesh`."""
        processes = here.world_size if here else self.nproc
        if processes < 0 or (processes and processes != mesh.size):
            got = f"{processes} for a mesh of {mesh.size}"
            fix = f"set it to {mesh.size}, or to 0 to simulate them"
            yield Problem("nproc", got, "one process per rank", fix)


def device_type(name: str, processes: int = 1) -> str:
    """ "cpu" or "cuda" for the option --device and so many processes on this machine.

    Raises:
        ValueError: cuda is asked for and there is none, or fewer GPUs than processes.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got cuda; wanted a device of this machine; fix: --device cpu")
    kind = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and processes > torch.cuda.device_count():
        raise ValueError(
            f"nproc: got {processes} for {torch.cuda.device_count()} GPUs; wanted a GPU each; "
            "fix: simulate the mesh (--nproc 0), or --device cpu"
        )
    return kind


def join(
    mesh: Mesh, here: Process, device_type: str, timeout_seconds: float = TIMEOUT_SECONDS
) -> tuple[BoundMesh, torch.device]:
    """Meet the other processes, and bind `mesh` to them: (bound mesh, this process's device).

    Collective. Gloo on CPU, NCCL on CUDA. A collective that waits longer than `timeout_seconds` for
    a rank that has stopped fails, and with it the job.

    Raises:
        ValueError: the mesh has not one rank per process.
    """
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", here.local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout)
    return mesh.bind(device_type, timeout_seconds), device


def leave() -> None:
    """Part from the other processes, if this one had joined any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """Run ``python *arguments`` in `nproc` processes on this machine, through torchrun's launcher.

    When one fails, the others are stopped within seconds; its traceback is printed, then one line.
    SIGINT and SIGTERM are passed on, and the processes have 30 seconds to save and leave
    (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, where torch knows it, changes that).

    The processors are divided among the processes unless OMP_NUM_THREADS is set.

    Returns:
        The exit code: 0, that of the process that failed first, or 128 + the signal.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    threads = max(1, len(os.sched_getaffinity(0)) // nproc) if has_affinity else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        logs_specs=DefaultLogsSpecs(),
        run_id=MARK + uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    # what went wrong is printed below, once
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        print(_explain(rank, failure, nproc), file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and how.

    torch orders failures by whole seconds, in which the others have long failed as well for want
    of the first; so the finer time that `process.record_failure` wrote decides. SIGTERM is what the
    launcher stops the others with: who died of it is first only where nothing else happened.
    """
    return min(error.failures.items(), key=lambda row: _failure_order(row[1]))


def _failure_order(failure: ProcessFailure) -> tuple[bool, float]:
    # What dies without a word (killed, out of memory) is noticed only when the launcher next looks,
    # by when the others have complained.
    seconds = _details(failure).get("time", failure.timestamp - NOTICED_WITHIN_SECONDS)
    return failure.exitcode == -signal.SIGTERM, float(seconds)


def _details(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.message
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def _explain(rank: int, failure: ProcessFailure, nproc: int) -> str:
    signal_name = failure.signal_name() if failure.exitcode < 0 else ""
    ending = f"killed by {signal_name}" if signal_name else f"exit code {failure.exitcode}"
    trace = _details(failure).get("py_callstack", "").rstrip()
    summary = f"functron: rank {rank} failed first ({ending}); all {nproc} processes were stopped"
    return f"{trace}\n{summary}" if trace else summary
