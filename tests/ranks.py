"""Processes that torchrun starts once a session, and that run one program after another.

Importing torch and functron is what a short program in four processes costs most. Here four
processes import them once, and each program runs in forks of them: as far apart from the program
before as processes of its own would be, and with the environment that torchrun gives.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

SIZE = 4
PORTS = range(20_000, 32_000)  # below those that systems give to whoever asks for any
START_SECONDS = 120


@dataclass(frozen=True)
class Job:
    """A program for the first `nproc` processes, as each of them gets it."""

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
    """Four processes under torchrun, which run programs for the process that made this.

    Args:
        folder: for what the processes print.
        root: of the source tree, which they import from.
    """

    def __init__(self, folder: Path, root: Path):
        self._folder, self._root, self._num_jobs = folder, root, 0
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(START_SECONDS)
        command = [*launcher(SIZE), __file__, str(server.getsockname()[1])]
        log = (folder / "ranks.log").open("w")
        self._launcher = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(root), start_new_session=True
        )
        log.close()
        met = [Connection(server.accept()[0].detach()) for _ in range(SIZE)]
        server.close()
        self._ranks = [rank for _, rank in sorted((rank.recv(), rank) for rank in met)]

    def run(
        self, script: Path, nproc: int, arguments: Sequence[object], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the first `nproc` processes; what they print comes rank by rank.

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
        ranks = self._ranks[:nproc]
        for rank in ranks:
            rank.send(job)
        pids = {rank: rank.recv() for rank in ranks}
        until, codes, late = time.monotonic() + timeout, [], False
        running = list(ranks)
        while running:
            ended = wait(running, max(0.0, until - time.monotonic()))
            late = late or not ended
            for rank in ended:
                assert isinstance(rank, Connection)
                running.remove(rank)
                codes.append(rank.recv())
            if late or any(codes):
                for rank in running:
                    _kill(pids[rank])
                codes += [rank.recv() for rank in running]
                running = []
        out, err = (
            "".join(job.output(rank, stream).read_text() for rank in range(nproc))
            for stream in ("out", "err")
        )
        if late:
            raise subprocess.TimeoutExpired(str(script), timeout, out, err)
        code = next(filter(None, codes), 0)
        return subprocess.CompletedProcess([str(script), *given], code, out, err)

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.close()
        self._launcher.wait(START_SECONDS)


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


def _serve(port: int) -> None:
    """Run in each process: fork for a program, and tell how it ended, until nobody asks."""
    import functron.cli.train  # noqa: F401  (what every program would import)

    rank = int(os.environ["RANK"])
    connection = Connection(socket.create_connection(("127.0.0.1", port)).detach())
    connection.send(rank)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            sys.exit(_run(job, rank))
        connection.send(pid)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(job: Job, rank: int) -> int:
    os.setsid()
    for stream, descriptor in (("out", 1), ("err", 2)):
        target = os.open(job.output(rank, stream), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
    os.chdir(job.cwd)
    size, there = str(job.nproc), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size)
    # the launcher's store has the keys of the program before, and its files are for its failures
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_ERROR_FILE": ""}
    os.environ.update({**job.environment, **sizes, **there, **own})
    sys.argv = [job.script, *job.arguments]
    sys.path[0] = str(Path(job.script).parent)
    try:
        runpy.run_path(job.script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
