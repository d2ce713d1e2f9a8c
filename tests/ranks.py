"""A process that starts once a session, and whose forks run programs, for each worker one at a time.

Importing torch and functron is what a short program in four processes costs most. Here one process
imports them once, with the compiler and the headers that it compiles first, and each rank of each
program runs in a fork of it: as far apart from the program before as processes of its own would be,
and with the environment that torchrun gives.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import torch.distributed as dist
from filelock import FileLock
from tqdm import tqdm

T = TypeVar("T")
PORTS = range(20_000, 32_000)  # below those that systems give to whoever asks for any
END_SECONDS = 300


@dataclass(frozen=True)
class Job:
    """A program for `nproc` processes."""

    script: str
    arguments: tuple[str, ...]
    nproc: int
    port: int
    folder: str
    cwd: str
    environment: dict[str, str]

    def output(self, rank: int, stream: str) -> Path:
        return Path(self.folder) / f"{stream}.{rank}"


class Ranks:
    """A process that runs programs, as torchrun does, for the process that made this.

    Args:
        folder: for what the processes print.
        root: of the source tree, which they import from.
        shared: a folder of one session's processes, of which the first starts the process that has
            imported everything, and each talks to a fork of it; None: one for this alone.
    """

    def __init__(self, folder: Path, root: Path, shared: Path | None = None):
        self._folder, self._root, self._num_jobs = folder, root, 0
        self._process: subprocess.Popen | None = None
        self._is_shared = shared is not None
        if shared is None:
            self._ranks = _connected(self._start())
            return
        file = shared / "ranks.port"
        with FileLock(shared / "ranks.lock"):
            try:
                self._ranks = _connected(int(file.read_text()))
            except (FileNotFoundError, ConnectionRefusedError):  # nobody's yet, or any more
                port = self._start()
                file.write_text(str(port))
                self._ranks = _connected(port)

    def _start(self) -> int:
        """Start the process; the port where it can be reached, from now on."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            descriptor = listener.fileno()
            with (self._folder / "ranks.log").open("w") as log:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(descriptor)], stdout=log, stderr=log,
                    env=environment(self._root), start_new_session=True, pass_fds=[descriptor],
                )  # fmt: skip
            return listener.getsockname()[1]

    def run(
        self, script: Path, nproc: int, arguments: Sequence[object], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in `nproc` processes; what they print comes rank by rank.

        When one fails, the others are killed. The exit code is that of the first that failed.

        Raises:
            subprocess.TimeoutExpired: some had not ended after `timeout` seconds; all are killed.
        """
        self._num_jobs += 1
        folder = self._folder / f"job-{self._num_jobs}"
        folder.mkdir()
        given = tuple(map(str, arguments))
        places = str(folder), os.getcwd()
        job = Job(str(script), given, nproc, _free_port(), *places, environment(self._root))
        self._ranks.send(job)
        pids: list[int] = self._ranks.recv()
        until, codes, late = time.monotonic() + timeout, [], False
        while len(codes) < nproc:
            if not (late or any(codes)):
                late = not self._ranks.poll(max(0.0, until - time.monotonic()))
            if late or any(codes):
                for pid in pids:
                    _kill(pid)
            pid, code = self._ranks.recv()
            pids.remove(pid)
            codes.append(code)
        out, err = (
            "".join(job.output(rank, stream).read_text() for rank in range(nproc))
            for stream in ("out", "err")
        )
        if late:
            raise subprocess.TimeoutExpired(str(script), timeout, out, err)
        code = next(filter(None, codes), 0)
        return subprocess.CompletedProcess([str(script), *given], code, out, err)

    def close(self) -> None:
        """End the process; one that is shared ends once nobody has a use for it any more."""
        self._ranks.close()
        if self._process is not None and self._is_shared:
            self._process.returncode = 0  # others use it still: Popen warns of what it leaves
        elif self._process is not None:
            self._process.wait(END_SECONDS)


def _connected(port: int) -> Connection:
    return Connection(socket.create_connection(("127.0.0.1", port)).detach())


def launcher(nproc: int) -> list[str]:
    """The command that runs the script, whose name follows, in `nproc` processes of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # torchrun would start Python with -u, where a line and its end are two writes: the lines of two
    # processes mix
    return [*command, f"--nproc-per-node={nproc}", "--no-python", sys.executable]


def environment(root: Path) -> dict[str, str]:
    """The environment of a test's processes: one thread each, and the source tree to import from."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    found.pop("PYTHONUNBUFFERED", None)  # it would mix the processes' lines
    return found


def on_the_first(compute: Callable[[], T]) -> T:
    """The result of `compute()` in the first process, in every process of the default group.

    For what every process compares with, and each would compute alike. Collective.
    """
    told = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return cast(T, told[0])


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it may not have a group of its own yet
        os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    first = PORTS[(os.getpid() * 101 + time.monotonic_ns() // 1000) % len(PORTS)]
    for port in [*range(first, PORTS.stop), *range(PORTS.start, first)]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port in {PORTS}")


def _serve(descriptor: int) -> None:
    """Import everything, and fork for each process that connects, until all of them are gone."""
    _import()
    listener = socket.socket(fileno=descriptor)
    listener.settimeout(1.0)
    forks: list[int] = []
    while True:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            forks.append(os.fork())
            if forks[-1] == 0:
                listener.close()
                _answer(Connection(connection.detach()))
                return
            connection.close()
        ended = [fork for fork in forks if os.waitpid(fork, os.WNOHANG)[0]]
        forks = [fork for fork in forks if fork not in ended]
        if ended and not forks:
            return


def _answer(connection: Connection) -> None:
    """Fork for each rank of a program, and tell how each ended, until nobody asks."""
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        pids = []
        for rank in range(job.nproc):
            pids.append(os.fork())
            if pids[-1] == 0:
                connection.close()
                _end(_run(job, rank))
        connection.send(pids)
        for _ in pids:
            pid, status = os.wait()
            connection.send((pid, os.waitstatus_to_exitcode(status)))


def _import() -> None:
    """Import what programs would import, and find the headers that Inductor compiles first."""
    import IPython.core.interactiveshell  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import nbformat  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo
    import torch._inductor.codecache
    import torch._inductor.compile_fx
    import torch.testing

    import functron as ft
    import functron.cli.evaluate
    import functron.cli.train
    import functron.hub
    from functron import data
    from functron.checkpoint import saver
    from functron.training.config import configure

    saver._import_orbax()
    tqdm.monitor_interval = 0  # no thread beside the one that forks
    with tempfile.TemporaryDirectory() as kernels:
        ft.jit(lambda x: x + 1, cache=kernels)(torch.ones(2))
    data.python_text()  # what runs without data of their own are trained on
    # a first backward starts a thread for each GPU, even of torch's fakes, which no fork would have
    if not torch.backends.cuda.is_built():
        # how operations change shapes is found out when they are first traced
        config = configure(mesh="dp=2,tp=2", seq=16, global_batch=4)
        ft.training.make_setup(config, ft.Mesh.parse(config.parallelism.mesh)).program()
    gc.collect()
    gc.freeze()  # forks look for no garbage in what they share
    gc.set_threshold(20_000, 20, 50)


def _run(job: Job, rank: int) -> int:
    os.setsid()
    # tqdm's own lock is one for all forks, and stays locked when its holder is killed
    tqdm.set_lock(threading.RLock())
    for stream, descriptor in (("out", 1), ("err", 2)):
        target = os.open(job.output(rank, stream), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
    os.chdir(job.cwd)
    size, there = str(job.nproc), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size)
    sizes |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    # the store is the first process's own, as there is no launcher that would have one
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({**job.environment, **sizes, **there, **own})
    sys.argv = [job.script, *job.arguments]
    sys.path[0] = str(Path(job.script).parent)
    try:
        runpy.run_path(job.script, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End this fork as Python ends, but for taking apart all that it shares, which takes 0.4 s."""
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
