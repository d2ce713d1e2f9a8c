"""The setting of every test: shape checks, one thread, JAX on eight CPU devices, and `torchrun`."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import config as annotations

from tests import shapes
from tests.ranks import Ranks, environment, launcher

gc.set_threshold(500_000)  # what is imported and collected stays: see `pytest_collection_finish`
if importlib.util.find_spec("triton") is None:  # whose bindings would complain of leaks
    atexit.register(gc.freeze)  # nobody needs the memory at the end

ROOT = Path(__file__).resolve().parent.parent

# One process compiles what hundreds import, each in 1.5 s, also where the environment forbids it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# JAX reads these when it is first imported, here or in a test. Eight devices make meshes. Programs
# that run once are compiled in half of the time with fewer optimisations; the bits stay the same.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=1",
    )
).strip()

# Inductor reads this when it is first imported. One kernel at a time is compiled without processes
# for it, each of which would import torch: the tests are parallel processes already. That the
# compiler knows this processor's vectors is not tried first, which takes five seconds.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def _link_faster() -> None:
    """Have g++ link by ld.gold, where there is one: it reads torch's libraries in a third of the time.

    Of what Inductor's kernels take g++, a third was linking. Processes that are started from here
    inherit it.
    """
    gold = shutil.which("ld.gold")
    if gold is None or "COMPILER_PATH" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="functron-linker-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (Path(folder) / "ld").symlink_to(gold)
    os.environ["COMPILER_PATH"] = folder


_link_faster()


def _keep_in_memory() -> None:
    """Have the folders of tests in memory, where there is room: each fsync of a disk is a wait."""
    room = Path("/dev/shm")
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or not os.access(room, os.W_OK):
        return
    about = os.statvfs(room)
    if about.f_flag & os.ST_NOEXEC or about.f_bavail * about.f_frsize < 8 << 30:
        return  # kernels are compiled there too
    folder = room / f"functron-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)


_keep_in_memory()

# Checks the annotations of every function in these packages, so it must precede their import.
# Only these: they are where tensors meet, and below them functions take "anything, or else a
# taught error", which a checker would preempt with its own. Checking takes a quarter of the time of a
# test, so it is for some cases of each: see `_with_shapes`.
shapes.install(["functron.nn", "functron.models", "functron.ops"])

torch.set_num_threads(1)  # the tests run in parallel processes

settings.register_profile("functron", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("functron")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="configurations that test_fuzz.py draws: 5, or 100")
    parser.addoption("--full", action="store_true", help="whole products of parameters, 100 seeds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full = config.getoption("--full")
    if not full:
        left = _left_out(items)
        left |= {item.nodeid for item in items if item.get_closest_marker("full")}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
    # at the end one worker would run them alone
    items.sort(key=lambda item: item.nodeid.split("::")[0] not in LONGEST)
    config.stash[SHAPES] = None if full else _with_shapes(items)
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
        for folder in _left_out_applications(item):
            item.add_marker(pytest.mark.skip(reason=f"{folder} is not there"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # thousands of tests live as long as the session: garbage is not looked for in them
    gc.set_threshold(20_000, 20, 50)  # nor so often: it takes a twentieth of the time otherwise


def pytest_runtest_setup(item: pytest.Item) -> None:
    some = item.config.stash[SHAPES]
    annotations.update("jaxtyping_disable", some is not None and item.nodeid not in some)
    shapes.begin(all_calls=some is None)


ANNOTATED = ("tests/nn/", "tests/models/", "tests/ops/", "tests/core/test_typing.py")
SHAPES = pytest.StashKey[set[str] | None]()
LONGEST = ("tests/test_notebooks.py",)


def _left_out_applications(item: pytest.Item) -> list[str]:
    """The folders of applications that a test is marked with and that are not there."""
    from functron.apps import APPLICATIONS  # the import hook comes first
    from functron.core.errors import has_module

    names = {name for mark in item.iter_markers("applications") for name in mark.args}
    assert names <= APPLICATIONS.keys(), f"{item.nodeid}: {names - APPLICATIONS.keys()}"
    return [
        f"functron/apps/{name}" for name in sorted(names) if not has_module(f"functron.apps.{name}")
    ]


def _left_out(items: list[pytest.Item]) -> set[str]:
    """The cases that the tests marked ``pairwise`` do without.

    Those left have each pair of values of two parameters that the product has, but not each triple:
    what breaks, breaks for one value or for two that meet.
    """
    cases = [item for item in items if item.get_closest_marker("pairwise")]
    return {case.nodeid for case in cases} - _covering(cases, _pairs)


def _with_shapes(items: list[pytest.Item]) -> set[str]:
    """The cases whose calls are held against the annotations, the first ones of each function.

    Of each test of what is annotated, one with each value; of each other test, one.
    """
    own = [item for item in items if item.nodeid.startswith(ANNOTATED)]
    rest = [item for item in items if not item.nodeid.startswith(ANNOTATED)]
    return _covering(own, _values) | _covering(rest, lambda _: frozenset([()]))


def _covering(
    items: Sequence[pytest.Item], factors: Callable[[pytest.Item], frozenset]
) -> set[str]:
    """Cases of each test that have all the factors that its cases have."""
    products: dict[str, dict[str, frozenset]] = {}
    for item in items:
        products.setdefault(item.nodeid.split("[")[0], {})[item.nodeid] = factors(item)
    kept: set[str] = set()
    for cases in products.values():
        missing = frozenset().union(*cases.values())
        while missing:
            best = max(cases, key=lambda name: len(cases[name] & missing))
            kept.add(best)
            missing -= cases[best]
    return kept


def _values(item: pytest.Item) -> frozenset:
    """A case's parameters, or that it has none."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return frozenset((name, repr(value)) for name, value in given.items()) or frozenset([()])


def _pairs(case: pytest.Item) -> frozenset:
    """Any two of a case's parameters, or of what its mark makes of them; one where it has one.

    The mark's `of` gives the factors for the parameters, or a list of such groups: only what is in
    one group meets.
    """
    assert isinstance(case, pytest.Function)
    mark, given = case.get_closest_marker("pairwise"), case.callspec.params
    assert mark is not None
    made = mark.kwargs["of"](**given) if mark.kwargs else given
    pairs: set = set()
    for factors in made if isinstance(made, list) else [made]:
        values = sorted((name, repr(value)) for name, value in factors.items())
        pairs.update(combinations(values, 2) if len(values) > 1 else [tuple(values)])
    return frozenset(pairs)


@pytest.fixture(autouse=True, scope="session")
def _full_tracebacks() -> Iterator[None]:
    """Failing tests show functron's own frames."""
    from functron.core.errors import full_tracebacks  # the import hook comes first

    with full_tracebacks():
        yield


@pytest.fixture(scope="session")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Ranks]]:
    made: list[Ranks] = []
    # the workers of one session have folders in that of the session
    folder, worker = tmp_path_factory.getbasetemp(), "PYTEST_XDIST_WORKER" in os.environ

    def ranks() -> Ranks:
        if not made:
            shared = folder.parent if worker else None
            made.append(Ranks(tmp_path_factory.mktemp("ranks"), ROOT, shared))
        return made[0]

    yield ranks
    for some in made:
        some.close()


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def torchrun(tmp_path: Path, _ranks: Callable[[], Ranks]) -> Run:
    """Run a program in several processes: `torchrun(program, nproc, *args, timeout=120)`.

    `program` is the path of a script, or the source of one. Standard output and error come back
    as text. A failure fails the test with both; a program that takes longer than `timeout` seconds
    is killed with all its processes and fails the test. The processes are forks of one that starts
    once a session: see `tests.ranks`. With ``check=False`` it is returned how a program ends that
    fails; with ``own=True`` torchrun itself starts the processes, for this program alone.
    """

    def run(
        program: str | Path,
        nproc: int,
        *args: object,
        timeout: float = 120,
        check: bool = True,
        own: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        script = program if isinstance(program, Path) else tmp_path / "program.py"
        if not isinstance(program, Path):
            script.write_text(program)
        try:
            start = _own if own else _ranks().run
            done = start(script, nproc, args, timeout)
        except subprocess.TimeoutExpired as late:
            pytest.fail(f"no end after {timeout} s: {script}\n{late.stdout}\n{late.stderr}")
        if check:
            assert done.returncode == 0, f"rc {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


COMMAND = "import sys; from functron.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def in_processes(torchrun: Run) -> Run:
    """Run `functron *arguments` in several processes, which cost less than those that --nproc starts.

    `in_processes(nproc, *arguments)` is `torchrun` of that command. Tests of --nproc are in
    test_launch.py.
    """
    return functools.partial(torchrun, COMMAND, timeout=300)


def _own(
    script: Path, nproc: int, args: Sequence[object], timeout: float
) -> subprocess.CompletedProcess[str]:
    command = [*launcher(nproc), str(script), *map(str, args)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(ROOT),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:  # also an interrupted or failing test session
        _kill(process.pid)
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise subprocess.TimeoutExpired(command, timeout, out, err) from None
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
