"""Two machines, as far as processes can tell: namespaces of Linux, joined by a cable.

Each has processes, a network, a name and shared memory of its own; they share the disk. A machine
is the first process of its namespaces. It ends when its standard input does, as where the test is
killed, and with it end all processes of the machine, and its network goes.

Processes of torchrun's launchers are forks of the one that has imported everything: `tests.ranks`.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("machine-a", "machine-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29_400
CABLE = "cable"  # the name of either end
TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
OWN = ("net", "uts", "ipc", "pid", "mnt")  # what a machine has of its own

_BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$OWN"
mkdir "$OWN/shm"
case "$SHARED" in /dev/shm/*)
    mkdir -p "$OWN/shm${SHARED#/dev/shm}"
    mount --bind "$SHARED" "$OWN/shm${SHARED#/dev/shm}" ;;
esac
mount --rbind "$OWN/shm" /dev/shm
echo "$HOSTS" > "$OWN/hosts"
mount --bind "$OWN/hosts" /etc/hosts
hostname "$NAME"
ip link set lo up
echo booted
exec cat
"""


@dataclass
class Launched:
    """Launchers on both machines, and the files of all that they and their processes print."""

    folder: Path
    thread: threading.Thread

    def read(self, index: int) -> str:
        """What was printed on a machine."""
        log = self.folder / f"{NAMES[index]}.log"
        return log.read_text() if log.exists() else ""

    def wait(self, seconds: float) -> list[tuple[int, str]]:
        """The exit code and the output of each; the test fails where one has not ended by then."""
        self.thread.join(seconds)
        texts = [self.read(index) for index in range(2)]
        if self.thread.is_alive():
            pytest.fail("\n".join([f"no end after {seconds} s", *texts]))
        codes = [int((self.folder / f"{name}.code").read_text()) for name in NAMES]
        return list(zip(codes, texts, strict=True))


class Hosts:
    """Two machines in a with block; the test is skipped where none can be made.

    Args:
        folder: that both have, and that is there.
        run: runs a script in processes that have imported everything: the fixture `torchrun`.
    """

    def __init__(self, folder: Path, run: Callable):
        self.folder = folder
        self._run = run
        self._machines: list[subprocess.Popen] = []
        self._launched: list[Launched] = []
        self._user: list[str] = []

    def __enter__(self) -> Hosts:
        lacking = [name for name in TOOLS if shutil.which(name) is None]
        if sys.platform != "linux" or lacking:
            pytest.skip(f"no {', '.join(lacking) or 'Linux'} here, for namespaces")
        why = []
        # where this process may not, its own root may
        for self._user in ([], ["--user", "--preserve-credentials"]):
            try:
                self._make()
                return self
            except (OSError, subprocess.CalledProcessError) as error:
                why.append(f"{error} {getattr(error, 'stderr', None) or ''}".strip())
                self.close()
        pytest.skip(f"no namespaces here: {'; '.join(why)}")

    def __exit__(self, *_: object) -> None:
        self.close()

    def inside(self, index: int) -> list[str]:
        """What runs the command that follows on a machine, in the shared folder."""
        inside = self._inside(index, "net", "uts", "ipc", "pid", "mount")
        return [*inside, f"--wd={self.folder}"]

    def list_processes(self, index: int) -> list[str]:
        """The command lines of the Python processes of a machine."""
        listed = subprocess.run(
            [*self.inside(index), "ps", "-A", "-o", "stat=,args="],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        rows = [line.split(None, 1) for line in listed.stdout.splitlines()]
        return [row[1] for row in rows if "python" in row[1] and not row[0].startswith("Z")]

    def launch(self, *arguments: object, nproc: int = 2) -> Launched:
        """Run ``functron *arguments`` by a launcher of torchrun on each machine."""
        folder = self.folder / f"launch-{len(self._launched)}"
        folder.mkdir()
        firsts = ",".join(str(self._first(index)) for index in range(2))
        given = folder, firsts, bool(self._user), nproc, *arguments
        work = lambda: self._run(Path(__file__), 2, *given, check=False, timeout=600)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._launched.append(Launched(folder, thread))
        return self._launched[-1]

    def cut(self) -> None:
        """Pull the cable out of the first machine."""
        self._network(0, "ip", "link", "set", CABLE, "down")

    def slow(self, bits_per_second: int) -> None:
        """Have the cable carry no more than that in either direction.

        The test is skipped where the kernel cannot do that.
        """
        shape = ["tbf", "rate", str(bits_per_second), "burst", "64kb", "latency", "200ms"]
        for index in range(2):
            try:
                self._network(index, "tc", "qdisc", "replace", "dev", CABLE, "root", *shape)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no slow networks here: {error}")

    def kill(self, index: int) -> None:
        """Have all processes of a machine die at once."""
        os.kill(self._first(index), 9)
        self._machines[index].wait()

    def close(self) -> None:
        """End both machines."""
        for machine in self._machines:
            machine.kill()  # and with it its child
            machine.communicate()
        for launched in self._launched:
            launched.thread.join()
        self._machines, self._launched = [], []

    def _make(self) -> None:
        own = self.folder / "own"
        own.mkdir(exist_ok=True)
        for name in NAMES:
            # two networks are joined by whoever owns both: the second machine is of the first's user
            enter = self._inside(0) if self._machines and self._user else []
            flags = [] if enter or not self._user else ["--user", "--map-root-user"]
            flags += ["--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc"]
            hosts = [f"{address} {of}" for address, of in zip(ADDRESSES, NAMES, strict=True)]
            variables = {"OWN": str(own), "SHARED": str(self.folder), "NAME": name}
            variables["HOSTS"] = "\n".join(["127.0.0.1 localhost", *hosts])
            machine = subprocess.Popen(
                [*enter, "unshare", *flags, "--fork", "--kill-child", "sh", "-c", _BOOT],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | variables,
            )  # fmt: skip
            self._machines.append(machine)
            assert machine.stdout is not None
            if machine.stdout.readline() != "booted\n":
                raise OSError(machine.communicate()[1].strip())
        peer = ["peer", "name", CABLE, "netns", str(self._first(1))]
        self._network(0, "ip", "link", "add", CABLE, "type", "veth", *peer)
        for index, address in enumerate(ADDRESSES):
            self._network(index, "ip", "address", "add", f"{address}/24", "dev", CABLE)
            # the cable goes with either machine; the other one still has its address then
            self._network(index, "ip", "address", "add", f"{address}/32", "dev", "lo")
            self._network(index, "ip", "link", "set", CABLE, "up")

    def _first(self, index: int) -> int:
        """The first process of a machine, by the number that it has here."""
        pid = self._machines[index].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def _inside(self, index: int, *namespaces: str) -> list[str]:
        flags = [*self._user, *(f"--{name}" for name in namespaces)]
        return ["nsenter", f"--target={self._first(index)}", *flags]

    def _network(self, index: int, *command: str) -> None:
        """Run a command that changes the network of a machine.

        Raises:
            subprocess.CalledProcessError: it fails.
        """
        inside = self._inside(index, "net")
        subprocess.run([*inside, *command], check=True, capture_output=True, text=True, timeout=30)


# --- in a fork of the process that has imported everything


def _run_launcher(folder: Path, first: int, as_user: bool, nproc: int, arguments: list[str]) -> int:
    """Go to a machine, and be a launcher there: its exit code."""
    name = NAMES[int(os.environ["RANK"])]
    _go_inside(first, as_user)
    pid = os.fork()  # a process of the machine
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.chdir(folder)
    log = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for variable in [*os.environ]:
        if re.match("TORCHELASTIC_|MASTER_|.*RANK$|.*WORLD_SIZE$", variable):
            del os.environ[variable]
    options = ["--nnodes=2", f"--nproc-per-node={nproc}", "--rdzv-backend=c10d", "--rdzv-id=tests"]
    options += [f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", "-m", "functron"]
    config, _, _ = run.config_from_args(run.parse_args([*options, *arguments]))
    config.start_method = "fork"
    elastic_launch(config, _run_command)(arguments)
    return 0


def _run_command(arguments: list[str]) -> None:
    from functron.cli.main import main  # after the import hook of conftest.py, in tests

    code = main(arguments)
    if code:
        sys.exit(code)


def _go_inside(first: int, as_user: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    names = [*["user"] * as_user, *OWN]
    # all are opened first: another /proc is seen from inside
    for file in [os.open(f"/proc/{first}/ns/{name}", os.O_RDONLY) for name in names]:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "cannot go to another machine")
        os.close(file)


if __name__ == "__main__":
    folder, firsts, as_user, nproc, *arguments = sys.argv[1:]
    index = int(os.environ["RANK"])
    first = int(firsts.split(",")[index])
    code = _run_launcher(Path(folder), first, as_user == "True", int(nproc), arguments)
    Path(folder, f"{NAMES[index]}.code").write_text(str(code))
