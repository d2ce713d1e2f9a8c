"""What every test gets: shape checks, one thread, JAX on eight CPU devices, and `torchrun`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent

# JAX reads these when it is first imported, here or in a test. Eight devices make meshes.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

# Checks the annotations of every function in these packages, so it must precede their import.
# Only these: they are where tensors meet, and below them functions take "anything, or else a
# taught error", which a checker would preempt with its own.
install_import_hook(["functron.nn", "functron.models", "functron.ops"], "beartype.beartype")

torch.set_num_threads(1)  # the tests run in parallel processes

settings.register_profile("functron", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("functron")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=8, help="configurations that test_fuzz.py draws")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True, scope="session")
def _full_tracebacks() -> Iterator[None]:
    """Failing tests show functron's own frames."""
    from functron.errors import full_tracebacks  # the import hook comes first

    with full_tracebacks():
        yield


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in several processes: `torchrun(program, nproc, *args, timeout=120)`.

    `program` is the path of a script, or the source of one. Standard output and error come back
    as text. A failure fails the test with both, unless `check=False`; a program that takes
    longer than `timeout` seconds is killed with all its processes and fails the test.
    """

    def run(
        program: str | Path, nproc: int, *args: object, timeout: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        script = program if isinstance(program, Path) else tmp_path / "program.py"
        if not isinstance(program, Path):
            script.write_text(program)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        # torchrun would start Python with -u, where a line and its end are two writes: the lines of
        # two processes mix
        launcher += [f"--nproc-per-node={nproc}", "--no-python", sys.executable]
        command = [*launcher, str(script), *map(str, args)]
        done = _run_bounded(command, timeout)
        if check:
            assert done.returncode == 0, f"rc {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def _run_bounded(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    env.pop("PYTHONUNBUFFERED", None)  # it would mix the processes' lines
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:  # also an interrupted or failing test session
        _kill(process.pid)
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            pytest.fail(f"no end after {timeout} s: {' '.join(command)}\n{out}\n{err}")
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _kill(leader: int) -> None:
    """Kill a launcher and its workers, which torchrun puts into sessions of their own."""
    for pid in [*_descendants(leader), leader]:
        try:
            os.killpg(os.getpgid(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listing.read_text().split()):
            found += [child, *_descendants(child)]
    return found
