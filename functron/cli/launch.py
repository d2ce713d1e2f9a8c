"""The processes of a job: starting one per rank, joining those of torchrun, parting again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
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

from functron.cli.process import MARK, Process
from functron.core.errors import Problem
from functron.spmd import BoundMesh, Mesh

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
    if device_type == "cuda":  # groups connect when they are made, and know their device
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
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
