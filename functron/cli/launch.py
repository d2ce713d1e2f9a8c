"""The processes of a job: starting one per rank, and again, joining those of torchrun, parting."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from functron import apps
from functron.checkpoint.memory import folder_of
from functron.cli.options import parse
from functron.cli.process import (
    MARK,
    UNSET,
    InputError,
    Process,
    current,
    local_world_size,
    mistakes,
    read_token,
)
from functron.core.errors import Problem, load_plugin, refuse
from functron.spmd import BoundMesh, Mesh
from functron.spmd.flight import FlightRecorder
from functron.spmd.mesh import listen_for_ranks
from functron.training.config import TrainConfig
from functron.training.loop import REQUEUE_CODE, RESHAPE_CODE
from functron.training.records import CONFIG, EVENTS, event_log

guard: Any = apps.find("guard")
"""Decides how a run is started again; None: none is."""

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
        uneven: logical axes of parameters that ranks of the mesh need not divide, as for functron
            train; empty: those of the run.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh in this process.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    averaged: bool = False
    mesh: str = ""
    uneven: str = ""
    nproc: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def problems(self, mesh: Mesh, here: Process | None) -> Iterator[Problem]:
        """Processes that are not as many as the ranks of `mesh`, which is that of ``self.mesh``."""
        yield from count_problems(here.world_size if here else self.nproc, mesh)
        yield from started_problems(self.nproc, here)


def count_problems(processes: int, mesh: Mesh) -> Iterator[Problem]:
    """Processes that are neither as many as the ranks of a mesh nor 0, which simulates them."""
    if processes < 0 or (processes and processes != mesh.size):
        got = f"{processes} for a mesh of {mesh.size}"
        fix = f"set it to {mesh.size}, or to 0 to simulate them"
        yield Problem("nproc", got, "one process per rank", fix)


def started_problems(nproc: int, here: Process | None) -> Iterator[Problem]:
    """Processes that are asked for where torchrun has started them."""
    if nproc > 0 and here is not None and not here.launched_here:
        got, wanted = f"{nproc}, which has no effect", "processes that nothing else started"
        fix = f"leave --nproc out: there are {here.world_size} already, of torchrun"
        yield Problem("nproc", got, wanted, fix)


def choose_device(name: str, processes: int = 1) -> str:
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
    mesh: Mesh,
    here: Process | None,
    device_type: str,
    timeout_seconds: float = TIMEOUT_SECONDS,
    recorder: FlightRecorder | None = None,
) -> tuple[Mesh | BoundMesh, torch.device]:
    """Meet the other processes, and bind `mesh` to them: (bound mesh, this process's device).

    Without a job (None) nothing is met, and `mesh` stays a simulated one. Collective: gloo on CPU,
    NCCL on CUDA. A collective that waits longer than `timeout_seconds` for a rank that has stopped
    fails, and with it the job. What goes over the axes is recorded by `recorder`.

    Raises:
        functron.cli.process.InputError: the others do not come; see `meet`.
        ValueError: the mesh has not one rank per process.
    """
    device = torch.device(device_type)
    if here is None:
        return mesh, device
    if device_type == "cuda":
        device = torch.device("cuda", here.local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    store = meet(here, timeout_seconds)
    store.set_timeout(timeout)
    place: dict[str, Any] = {"store": store, "rank": here.rank, "world_size": here.world_size}
    if device_type == "cuda":  # groups connect when they are made, and know their device
        dist.init_process_group("nccl", timeout=timeout, device_id=device, **place)
    else:
        dist.init_process_group("gloo", timeout=timeout, **place)
    return mesh.bind(device_type, timeout_seconds, recorder), device


_ALONE = 1 / 5  # of the time that ranks are waited for, where none has come and that is known
_TELL_SECONDS, _TELL_LAUNCHED_SECONDS = 0.5, 10.0
_LISTED = 8


def meet(here: Process, timeout_seconds: float = TIMEOUT_SECONDS) -> dist.Store:
    """The store of the job, which all of its processes have come to.

    Who waits says at once what for, as nobody may be on the way: variables of torchrun may be left
    over in the environment. Rank 0 gives up after a fifth of `timeout_seconds` where nobody else
    has come, and so does the other one of two. Everybody else waits as long as in a collective, as
    others may have come as well: who waits for rank 0, where they meet, cannot tell.

    Raises:
        functron.cli.process.InputError: some did not come, or this one cannot listen.
    """
    wait = _Waiting(here, timeout_seconds)
    hosts = here.rank == 0 and here.attempt is None
    if not here.port:
        fix = f"set it, or start with torchrun; or, where the others are left over: {UNSET}"
        raise _cannot_meet(Problem("environment variable MASTER_PORT", "none", "a port", fix))
    while not hosts and not _listens(here):
        launched = here.attempt is not None
        alone = launched or here.world_size == 2
        wait.on("their launcher" if launched else "rank 0", alone=alone)
    try:
        there = dist.TCPStore(
            here.meeting_at, here.port, here.world_size, is_master=hosts,
            timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False, multi_tenant=hosts,
        )  # fmt: skip
        store = dist.PrefixStore(f"functron/attempt_{here.attempt or 0}", there)
        keys = [f"here/{rank}" for rank in range(here.world_size)]
        store.set(keys[here.rank], "")
        if here.rank == 0:
            _await_ranks(store, wait, keys, alone_counts=here.attempt is None)
        while not store.check(["all"]):
            known = store.check(["missing"])
            wait.on(store.get("missing").decode() if known else "rank 0", alone=False)
    except RuntimeError as error:  # torch's DistError
        got = str(error).strip().partition("\n")[0]
        wanted = "a port where rank 0 can listen" if hosts else f"to stay connected to {wait.place}"
        raise _cannot_meet(Problem(wait.place, got, wanted, wait.fix)) from error
    return dist.PrefixStore("default_pg", store)


def _await_ranks(
    store: dist.Store, wait: _Waiting, keys: Sequence[str], *, alone_counts: bool
) -> None:
    """Wait as rank 0 for all others, and tell these who is missing.

    It alone asks for each of them: all asking would be as many requests as the square of the ranks.
    """
    missing, told = list(range(len(keys))), ""
    while missing := [rank for rank in missing if not store.check([keys[rank]])]:
        names = ", ".join(map(str, missing[:_LISTED])) + ", ..." * (len(missing) > _LISTED)
        text = f"rank{'s' * (len(missing) > 1)} {names}"
        if text != told:
            store.set("missing", text)
            told = text
        wait.on(text, alone=alone_counts and len(missing) == len(keys) - 1)
    store.set("all", "")


def _cannot_meet(problem: Problem) -> InputError:
    return InputError(f"cannot meet the other processes\n  - {problem}")


def _listens(here: Process) -> bool:
    try:
        socket.create_connection((here.meeting_at, here.port), 1).close()
    except OSError:
        return False
    return True


class _Waiting:
    """A process that waits for others: what it says, and when it gives up."""

    def __init__(self, here: Process, timeout_seconds: float):
        self._begun, self._told = time.monotonic(), False
        self._here, self._timeout = here, timeout_seconds
        self.place = f"{here.meeting_at}:{here.port}"
        size = here.world_size
        self.fix = f"start all {size} with torchrun (or --nproc {size}), or, where variables of "
        self.fix += f"torchrun are left over: {UNSET}"

    def on(self, missing: str, *, alone: bool) -> None:
        """Wait on for these; `alone`: nobody else has come.

        Raises:
            InputError: it was long enough.
        """
        waited, here = time.monotonic() - self._begun, self._here
        limit = self._timeout * (_ALONE if alone else 1)
        which = f"RANK={here.rank} and WORLD_SIZE={here.world_size}"
        if waited > limit:
            got = f"no {missing} at {self.place} in {waited:.0f} s"
            wanted = f"all {here.world_size} processes that WORLD_SIZE in the environment says"
            raise _cannot_meet(Problem(f"rank {here.rank}", got, wanted, self.fix))
        tell = _TELL_SECONDS if here.attempt is None else _TELL_LAUNCHED_SECONDS
        if waited > tell and not self._told:
            self._told = True
            text = f"functron: rank {here.rank} of {here.world_size} waits at {self.place} for "
            text += f"{missing}, as {which} are in the environment; it gives up in "
            text += f"{limit - waited:.0f} s; fix: {self.fix}"
            print(text, file=sys.stderr, flush=True)
        time.sleep(min(max(waited / 10, 0.005), 0.5))


def leave() -> None:
    """Part from the other processes, if this one had joined any."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class JoinOptions:
    """Be ranks of a mesh that a notebook on another host has started (Mesh.start with hosts).

    torchrun starts this command, with as many processes as this host has ranks. They run what the
    notebook sends, and end with it. The environment variable FUNCTRON_TOKEN is the notebook's word.

    Attributes:
        address: of the notebook, host:port.
        device: cpu, cuda, or auto: cuda where there is a GPU for each process.
    """

    address: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="HOST:PORT")]]
    device: Literal["auto", "cpu", "cuda"] = "auto"


def join_notebook(arguments: Sequence[str]) -> int:
    """Be a rank of a notebook's until it is gone; see `JoinOptions`."""
    with mistakes():
        options = parse(JoinOptions, arguments, "join")
        host, _, port = options.address.rpartition(":")
        if not (host and port.isdecimal()):
            refuse("cannot join", "address", repr(options.address), "host:port of a notebook")
    here = current()
    rank, local, size = (here.rank, here.local_rank, here.world_size) if here else (0, 0, 1)
    num_local = local_world_size(size)
    token = read_token()
    with mistakes():
        run: Any = load_plugin("functron.worker_programs", "processes", "join")
        place = rank, num_local, options.device, local, socket.gethostname()
        run((host, int(port)), token, *place)
    return 0


@dataclass(frozen=True)
class Ending:
    """How the processes of a job ended.

    Attributes:
        code: 0, the exit code of the process that failed first, or 128 + the signal.
        text: for the user: its traceback, if it left one, and a line; empty where none failed.
        rank: which one failed first; None: none did, or the launcher was told to stop.
        final: whether starting it again is of no use: it is done, was told to stop, or would fail
            in the same way.
    """

    code: int
    text: str = ""
    rank: int | None = None
    final: bool = True


Start = Callable[[int, Sequence[str]], Ending]
"""Runs ``python *arguments`` in so many processes, until they ended."""
PROGRAM = ("-m", "functron")
"""The arguments of Python that run the command line."""


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """`start` processes; the exit code, after what there is to say about it."""
    ending = start(nproc, arguments)
    if ending.text:
        print(ending.text, file=sys.stderr, flush=True)
    return ending.code


def start(nproc: int, arguments: Sequence[str]) -> Ending:
    """Run ``python *arguments`` in `nproc` processes on this machine, through torchrun's launcher.

    They meet at a port of 127.0.0.1, which no other machine reaches. (torchrun's own rendezvous
    listens at every address; who runs it on several machines chooses the network.)
    When one fails, the others are stopped within seconds.
    SIGINT and SIGTERM are passed on, and the processes have 30 seconds to save and leave
    (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, where torch knows it, changes that). SIGUSR1 is passed on as
    well, and they have as long as they need.

    The processors are divided among the processes unless OMP_NUM_THREADS is set.
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
        rdzv_backend=_LOOPBACK,
        rdzv_endpoint=_HOST,
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    rendezvous_handler_registry.register(_LOOPBACK, _Loopback)
    # what went wrong is printed below, once
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        with _passed_on(signal.SIGUSR1):
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        return _ending(rank, failure, nproc)
    except SignalException as error:
        return Ending(128 + int(error.sigval))
    return Ending(0)


_LOOPBACK, _HOST = "functron-loopback", "127.0.0.1"


class _Loopback(RendezvousHandler):
    """One machine's meeting place: a store that listens at the loopback address alone."""

    def __init__(self, parameters: RendezvousParameters):
        self._run_id = parameters.run_id
        self._store, port = listen_for_ranks(_HOST)
        self._info = RendezvousStoreInfo(_HOST, port)

    def get_backend(self) -> str:
        return _LOOPBACK

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, self._info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else comes."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


@contextmanager
def _passed_on(number: int) -> Iterator[None]:
    """Within the with block, pass a signal on to the processes that this one started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        for pid in _find_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    previous = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _find_processes() -> list[int]:
    """The processes that torch's launcher started here: each leads a session of its own."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    mine = [pid for pid, parent in rows if parent == os.getpid()]
    return [pid for pid in mine if _session(pid) == pid]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and how.

    torch orders failures by whole seconds, in which the others have long failed as well for want
    of the first; so the finer time that `functron.cli.process.record_failure` wrote decides.
    SIGTERM is what the launcher stops the others with: who died of it is first only where nothing
    else happened.
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


LEFT_CODES = frozenset(128 + n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
"""The exit codes of processes that were told to save and leave, and did."""


def _ending(rank: int, failure: ProcessFailure, nproc: int) -> Ending:
    code, details = failure.exitcode, _details(failure)
    if code == -signal.SIGUSR1:  # before it could save: there is as much as before
        return Ending(REQUEUE_CODE)
    if code in LEFT_CODES or code == RESHAPE_CODE:
        return Ending(code)
    name = failure.signal_name() if code < 0 else ""
    ending = f"killed by {name}" if name else f"exit code {code}"
    trace = details.get("py_callstack", "").rstrip()
    summary = f"functron: rank {rank} failed first ({ending}); all {nproc} processes were stopped"
    final = code == 2 or bool(details.get("final"))  # 2: a mistake of the user
    text = f"{trace}\n{summary}" if trace else summary
    return Ending(code if code > 0 else 128 - code, text, rank, final)


def supervise(
    config: TrainConfig,
    arguments: Sequence[str],
    out: Path,
    start: Start = start,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Run ``functron train`` on processes, and start it again as often as `config` says.

    A job that ended because a process died is started again, from the newest complete checkpoint
    of its folder. What counts is progress: ``max_restarts`` is how many starts in a row may end
    with no checkpoint and no record of a step beyond all that there were before. Where the run is
    elastic, each start has the largest mesh that there are processes for; a run that left because
    there were more is started at once. Events: ``restart``, ``shrink``, ``grow``.

    Args:
        config: that of `arguments`.
        arguments: the options of the command.
        out: the run's folder, which is there.
        start: what runs the processes.
        program: what Python is given to run the command line.

    Returns:
        The exit code: 0, or that of the last start.
    """
    try:
        return _supervise(config, arguments, out, lambda n, x: start(n, [*program, *x]))
    except SignalException as error:  # between two starts: torch's launcher leaves its handlers
        return 128 + int(error.sigval)
    finally:  # what the last start left, or ranks that were lost
        shutil.rmtree(folder_of(config.memory.folder, out), ignore_errors=True)


def _supervise(config: TrainConfig, arguments: Sequence[str], out: Path, start: Start) -> int:
    own = guard.settings_of_restarts(config)
    ends = time.monotonic() + (guard.seconds_of(own.exit_after) if own.exit_after else math.inf)
    failures, best, now = 0, guard.read_progress(out), config
    with event_log(out / EVENTS) as write:
        while (left := ends - time.monotonic()) > 0:
            wanted = guard.fitting(config, guard.num_slots(config))
            if wanted is not None and wanted.parallelism.mesh != now.parallelism.mesh:
                _log_reshape(write, now, wanted, guard.read_progress(out)[0])
            now = wanted or now
            arguments_now = _again(config, now, arguments, out, left)
            ending = _TOO_FEW if wanted is None else start(now.parallelism.nproc, arguments_now)
            if ending.code == RESHAPE_CODE:
                continue
            if ending.text:
                print(ending.text, file=sys.stderr, flush=True)
            if ending.final:
                return ending.code
            done = guard.read_progress(out)
            progress = any(new > old for new, old in zip(done, best, strict=True))
            best = max(done[0], best[0]), max(done[1], best[1])
            failures = 1 if progress else failures + 1
            if failures > own.max_restarts:
                print(_given_up(own.max_restarts, failures), file=sys.stderr, flush=True)
                return ending.code
            pause = guard.pause_seconds(own.pause_seconds, failures - 1)
            about = {"rank": ending.rank, "code": ending.code, "why": ending.text.splitlines()[-1]}
            write("restart", done[0], **about, failures=failures, pause_seconds=pause)
            print(
                _announce(failures, own.max_restarts, done[0], pause), file=sys.stderr, flush=True
            )
            time.sleep(max(min(pause, ends - time.monotonic()), 0))
    return REQUEUE_CODE


_TOO_FEW = Ending(1, "functron: too few processes can be had for any of the sizes", final=False)


def _again(
    config: TrainConfig, now: TrainConfig, arguments: Sequence[str], out: Path, left: float
) -> list[str]:
    """The command line of a start: later options override earlier ones."""
    more = ["--out", str(out), "--resume", "auto"]
    if (out / CONFIG).is_file():  # where a run notes what became of it, such as samples left out
        more += ["--config", str(out / CONFIG)]
    own = guard.settings_of_restarts(config)
    if own.elastic:
        sizes = guard.Elastic(guard.Elastic.parse(own.elastic).axis, guard.usable_sizes(config))
        ranks = now.parallelism
        more += ["--mesh", ranks.mesh, "--nproc", str(ranks.nproc), "--elastic", str(sizes)]
        more += ["--microbatches", str(ranks.microbatches)]
    if own.exit_after:
        more += ["--exit-after", f"{left:.3f}s"]
    return ["train", *arguments, *more]


def _log_reshape(
    write: Callable[..., None], before: TrainConfig, after: TrainConfig, step: int
) -> None:
    kind = "grow" if after.parallelism.nproc > before.parallelism.nproc else "shrink"
    about = {
        "before": before.parallelism.mesh,
        "mesh": after.parallelism.mesh,
        "microbatches": after.parallelism.microbatches,
    }
    write(kind, step, **about)
    print(
        f"functron: goes on with {after.parallelism.mesh}, {after.parallelism.nproc} processes",
        file=sys.stderr,
    )


def _announce(failures: int, most: int, step: int, pause: float) -> str:
    where = f"from step {step}" if step else "from the beginning: nothing is saved yet"
    return (
        f"functron: starts again in {pause:g} s, {where} "
        f"(failure {failures} without progress; --max-restarts {most})"
    )


def _given_up(most: int, failures: int) -> str:
    return (
        f"functron: given up after {failures} starts without progress; "
        f"fix: see why, then go on with --resume (--max-restarts {most})"
    )
