"""How a run outlives its processes: restarts, meshes that shrink and grow, and requests to stop.

Nothing here starts a process: these are the decisions, of the launcher (`functron.cli.launch`) and
of the loop, as functions of a configuration and of what the run folder holds. Ctrl-C, SIGTERM,
SIGUSR1 and limits of time are requests to stop that a running step outlives.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from functron.checkpoint.memory import axis_of
from functron.core.errors import Problem, refuse
from functron.spmd import DATA_AXES, Mesh
from functron.training import run_folder
from functron.training.config import TrainConfig, configure
from functron.training.loop import At, LoopHook

LONGEST_PAUSE_SECONDS = 60.0
"""Between two starts, however many of them failed."""

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")
_UNITS = (86400, 3600, 60, 1)


def seconds_of(text: str) -> float:
    """The seconds that ``90s``, ``45m``, ``3h50m`` or ``1d12h`` stand for.

    Raises:
        ValueError: it is no such text, or no time at all.
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = sum(
        float(count) * unit
        for count, unit in zip(found.groups() if found else (), _UNITS, strict=bool(found))
        if count
    )
    if not seconds:
        wanted = "a duration such as 90s, 45m, 3h50m or 1d12h"
        refuse("cannot read the duration", "exit_after", repr(text), wanted)
    return seconds


@dataclass(frozen=True)
class Elastic:
    """Which sizes an axis of the mesh may have while a run goes on.

    Attributes:
        axis: of the ranks that share the batch and hold the same model: dp or fsdp.
        sizes: ascending.
    """

    axis: str
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Elastic:
        """The axis and sizes in ``dp=2:8`` (2 to 8), or in ``dp=2,4,8``.

        Raises:
            ValueError: it is no such text.
        """
        axis, _, rest = text.partition("=")
        span = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", rest)
        words = re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", rest)
        if span:
            least, most = map(int, span.groups())
            sizes = tuple(range(least, most + 1))
        else:
            sizes = tuple(sorted({int(word) for word in rest.split(",")})) if words else ()
        if axis.strip() not in ELASTIC_AXES or not sizes or sizes[0] < 1:
            wanted = "dp or fsdp and its sizes, such as dp=2:8 or dp=2,4,8"
            refuse("cannot read which sizes a mesh may have", "elastic", repr(text), wanted)
        return cls(axis.strip(), sizes)

    def __str__(self) -> str:
        return f"{self.axis}={','.join(map(str, self.sizes))}"


ELASTIC_AXES = ("dp", "fsdp")


def resize(config: TrainConfig, axis: str, size: int) -> TrainConfig | None:
    """`config` on a mesh whose `axis` has another size, with the same batches of the same samples.

    Its microbatches are as few as there can be of no more samples than now: so ranks that are left
    take the parts of the others one after another, in the memory that a step takes now. In a
    pipeline they are a multiple of those now, as its schedule may ask for.

    Returns:
        None where ranks so many cannot divide the batches equally.
    """
    mesh = Mesh.parse(config.parallelism.mesh)
    if size == mesh[axis]:
        return config
    before = math.prod(mesh[name] for name in DATA_AXES)
    ranks = before // mesh[axis] * size
    batches = run_folder.sizes_to_come(config)
    if any(batch % ranks for batch in batches):
        return None
    rows = max(config.data.global_batch // (before * config.parallelism.microbatches), 1)
    unit = config.parallelism.microbatches if mesh["pp"] > 1 else 1
    most = config.data.global_batch // ranks
    count = next(
        (
            count
            for count in range(unit, most + 1, unit)
            if most <= count * rows and not any(batch % (ranks * count) for batch in batches)
        ),
        None,
    )
    if count is None:
        return None
    shape = {**mesh.shape, axis: size}
    text = ",".join(f"{name}={length}" for name, length in shape.items())
    processes = math.prod(shape.values()) if config.parallelism.nproc else 0
    return configure(config, mesh=text, nproc=processes, microbatches=count)


def usable_sizes(config: TrainConfig) -> tuple[int, ...]:
    """Those of the sizes in ``config.elastic`` among which batches can be divided equally."""
    elastic = Elastic.parse(config.restarts.elastic)
    found = (size for size in elastic.sizes if resize(config, elastic.axis, size) is not None)
    return tuple(found)


def num_slots(config: TrainConfig) -> int | None:
    """How many processes can be had here now: what a file says, or the GPUs; None: nobody knows."""
    if config.restarts.slots:
        try:
            return int(Path(config.restarts.slots).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # such as one that is just being written
            return None
    return (torch.cuda.device_count() or None) if config.compute.device != "cpu" else None


def fitting(config: TrainConfig, slots: int | None) -> TrainConfig | None:
    """`config` on the largest of its meshes that so many processes make; None: there is none.

    Where it is not elastic, or `slots` is not known, it is what it is.
    """
    if not config.restarts.elastic or slots is None:
        return config
    elastic, mesh = Elastic.parse(config.restarts.elastic), Mesh.parse(config.parallelism.mesh)
    others = mesh.size // mesh[elastic.axis]
    for size in sorted(elastic.sizes, reverse=True):
        if size * others <= slots:
            found = resize(config, elastic.axis, size)
            if found is not None:
                return found
    return None


def can_grow(config: TrainConfig) -> bool:
    """Whether there are processes now for a larger mesh than that of `config`.

    All its elastic sizes are taken to be usable: those that the launcher gives its processes are.
    """
    slots = num_slots(config)
    if not config.restarts.elastic or slots is None:
        return False
    elastic, mesh = Elastic.parse(config.restarts.elastic), Mesh.parse(config.parallelism.mesh)
    others = mesh.size // mesh[elastic.axis]
    return any(size > mesh[elastic.axis] and size * others <= slots for size in elastic.sizes)


def read_progress(out: Path) -> tuple[int, int]:
    """The step of the newest checkpoint of the run in `out`, and the last step that it recorded."""
    newest = run_folder.newest(out)
    records = run_folder.records(out)
    return int(newest.name) if newest else 0, records[-1]["step"] if records else 0


def pause_seconds(first: float, failures: int) -> float:
    """How long to wait before a start: `first`, doubled for each start that made no progress."""
    return min(first * 2.0 ** min(failures, 30), max(LONGEST_PAUSE_SECONDS, first))


def problems_of(
    config: TrainConfig, mesh: Mesh, processes: int | None, launched_here: bool
) -> Iterator[Problem]:
    """Settings of restarts that do not fit.

    Args:
        config: what is to be run.
        mesh: its mesh.
        processes: how many processes take part, where they run already.
        launched_here: whether functron's launcher started them, which has looked at most of this.
    """
    if config.restarts.exit_after:
        try:
            seconds_of(config.restarts.exit_after)
        except ValueError:
            wanted = "a duration such as 90s, 45m, 3h50m or 1d12h"
            yield Problem("exit_after", repr(config.restarts.exit_after), wanted)
    if config.memory.save_every > 0:
        yield from _memory_problems(config, mesh, processes)
    if launched_here:
        return
    if config.restarts.max_restarts and processes is not None:
        fix = (
            "leave it out; start the job again with --resume auto, as examples/slurm does; "
            "functron train --nproc restarts the processes of one machine"
        )
        yield Problem("max_restarts", f"{config.restarts.max_restarts} under torchrun", "0", fix)
    elif config.restarts.max_restarts and not config.parallelism.nproc:
        fix = f"add --nproc {mesh.size}, or leave it out"
        yield Problem(
            "max_restarts", f"{config.restarts.max_restarts}", "processes to restart", fix
        )
    if config.restarts.slots and not config.restarts.elastic:
        yield Problem(
            "slots", config.restarts.slots, "nothing without elastic", "add --elastic dp=1:N"
        )
    if config.restarts.elastic:
        yield from _elastic_problems(config, mesh, processes)


def _memory_problems(config: TrainConfig, mesh: Mesh, processes: int | None) -> Iterator[Problem]:
    name, got = "memory_save_every", str(config.memory.save_every)
    if axis_of(mesh) is None:
        wanted = "several dp or fsdp ranks, which keep copies for one another"
        yield Problem(name, f"{got} on {mesh or 'one rank'}", wanted, "add dp=2, or leave it out")
    if processes is None and not config.parallelism.nproc:
        yield Problem(name, f"{got} without processes", "processes", f"add --nproc {mesh.size}")
    if not Path(config.memory.folder).is_dir():
        wanted, fix = "a folder of main memory", "mount a tmpfs, and name it"
        yield Problem("memory_folder", f"{config.memory.folder}, where none is", wanted, fix)


def _elastic_problems(config: TrainConfig, mesh: Mesh, processes: int | None) -> Iterator[Problem]:
    try:
        elastic = Elastic.parse(config.restarts.elastic)
    except ValueError:
        wanted = "dp or fsdp and its sizes, such as dp=2:8 or dp=2,4,8"
        yield Problem("elastic", repr(config.restarts.elastic), wanted)
        return
    if processes is not None:
        fix = "leave it out: the scheduler starts the job again with another --mesh, and --resume"
        wanted = "nothing: only functron train --nproc shrinks and grows, on one machine"
        yield Problem("elastic", f"{config.restarts.elastic} under torchrun", wanted, fix)
    elif not config.restarts.max_restarts:
        wanted, fix = "max_restarts of at least 1, which it needs", "add --max-restarts 3"
        yield Problem("elastic", config.restarts.elastic, wanted, fix)
    if mesh[elastic.axis] not in elastic.sizes:
        got = f"{config.restarts.elastic} for {elastic.axis}={mesh[elastic.axis]}"
        yield Problem("elastic", got, "sizes with that of the mesh among them")
    usable = usable_sizes(config)
    ends = {elastic.sizes[0], elastic.sizes[-1]}
    # in dp=2:8 sizes between may not divide the batch, and are passed over
    listed = elastic.sizes if ":" not in config.restarts.elastic else sorted(ends)
    wrong = [size for size in listed if size not in usable]
    if wrong:
        got = f"{config.restarts.elastic}: {', '.join(map(str, wrong))} cannot divide the batch"
        sizes = ", ".join(map(str, usable)) or "none"
        batch = f"global_batch={config.data.global_batch}" + (
            ", ramp_up" if config.data.ramp_up else ""
        )
        wanted = f"sizes that divide it, of which there are {sizes} ({batch})"
        yield Problem("elastic", got, wanted, "choose of these, or another global_batch")
    if config.restarts.slots:
        if num_slots(config) is None:
            wanted = "a file with the number of processes that can be had"
            got = f"{config.restarts.slots}, which has none"
            yield Problem("slots", got, wanted, f"echo {mesh.size} > {config.restarts.slots}")
    elif num_slots(config) is None:
        wanted = "a file with the number of processes that can be had: CPUs are never lost"
        yield Problem("slots", "none", wanted, f"echo {mesh.size} > slots, and --slots slots")


# --- requests to stop


EXIT_AFTER = int(signal.NSIG)
"""That a run's time is over, where the number of a signal may stand as well."""
RESHAPE = EXIT_AFTER + 1
"""That a run goes on with more ranks, likewise."""

REQUEUE_CODE = 128 + signal.SIGUSR1
"""The exit code of a run that saved and left before its end, to be started again: 138."""
RESHAPE_CODE = 75
"""That of a run that saved, to be started with more ranks at once: EX_TEMPFAIL of sysexits.h."""

HANG_CODE = 124
"""The exit code of processes of a job that hung: that of timeout(1)."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ECHO_SECONDS = 2.0


def exit_code(stopped_by: int | None) -> int:
    """The exit code of a process that ended early: 128 + the signal's number, as shells have it.

    Where its time was over that of SIGUSR1, with which schedulers say so.
    """
    codes = {None: 0, EXIT_AFTER: REQUEUE_CODE, RESHAPE: RESHAPE_CODE}
    return codes[stopped_by] if stopped_by in codes else 128 + int(stopped_by or 0)


def end_process(text: str, first: bool) -> None:
    """End this process for a hang: say why, if it is the one to, and leave with `HANG_CODE`.

    Nothing is waited for: other threads are blocked.
    """
    if first:
        print(f"functron: {text}", file=sys.stderr, flush=True)
    os._exit(HANG_CODE)


@dataclass
class Request:
    """Whether someone asked to stop.

    Attributes:
        signal: the signal that asked, or None.
        ends: when the time of the run is over, by ``time.monotonic()``.
        grown: whether there are processes for a larger mesh; asked where a checkpoint is saved.
    """

    signal: int | None = None
    ends: float = math.inf
    grown: Callable[[], bool] | None = None
    _asked_at: float = field(default=0.0, init=False, repr=False)
    _previous: dict[int, Any] = field(default_factory=dict, init=False, repr=False)

    def asked(self, *, saving: bool = False) -> int:
        """The number of the signal, or `EXIT_AFTER` or `RESHAPE`; 0 where nobody asked."""
        if self.signal is not None:
            return self.signal
        if time.monotonic() >= self.ends:
            return EXIT_AFTER
        return RESHAPE if saving and self.grown is not None and self.grown() else 0

    def listen(self) -> None:
        """Install the handlers of `stop_requests`; nothing where they are installed.

        Outside the main thread, where Python allows no handlers, nothing changes.
        """
        if not self._previous and threading.current_thread() is threading.main_thread():
            # noted before each is installed, so that `restore` is right whenever it is interrupted
            for number in _SIGNALS:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back the handlers that were installed before."""
        for number, handler in self._previous.items():
            # a handler that was not installed from Python comes as None and cannot be put back
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous = {}

    def _handle(self, number: int, frame: object) -> None:
        recent = time.monotonic() - self._asked_at < _ECHO_SECONDS
        echo = number == signal.SIGUSR1 or (number == self.signal == signal.SIGTERM and recent)
        if self.signal in (None, signal.SIGUSR1):
            self.signal, self._asked_at = number, time.monotonic()
        elif not echo:
            raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Turn the first SIGINT, SIGTERM or SIGUSR1 within the with block into a `Request`.

    The second one raises KeyboardInterrupt at once, but for SIGUSR1, which only ever asks, and a
    SIGTERM that comes twice within 2 seconds: a scheduler sends it to every process of a job, and
    its launcher passes it on. The handlers that were installed before are put back at the end.
    Outside the main thread, where Python allows no handlers, nothing changes.
    """
    request = Request()
    try:
        request.listen()
        yield request
    finally:
        request.restore()


class StopHook(LoopHook):
    """Has a loop stop for a `Request`, on all ranks after the same step.

    Args:
        request: asked at every step; after what took long, for its signal alone.
        saves: whether a checkpoint is saved after so many steps; the mesh may grow there.
        listens: whether it turns signals into requests itself, as `stop_on_signals` says.

    Attributes:
        stopped_by: the signal that ended the loop early, whichever rank received it, `EXIT_AFTER`
            or `RESHAPE`; None where it did not.
    """

    def __init__(
        self,
        request: Request,
        saves: Callable[[int], bool] = lambda step: False,
        *,
        listens: bool = False,
    ):
        self.request, self._saves, self._listens = request, saves, listens
        self.stopped_by: int | None = None

    def begin(self, at: At) -> None:
        """Listen from here on."""
        self.stopped_by = None
        if self._listens:
            self.request.signal = None
            self.request.listen()

    def phase(self, name: str, index: int) -> None:
        """Listen while the loop runs, and not in its body, which may never come back."""
        if self._listens:
            (self.request.restore if name == "body" else self.request.listen)()

    def ask(self, at: At) -> int:
        """The request of this rank."""
        if at.stopped_by is not None:
            return self.request.signal or 0
        asked = self.request.asked(saving=self._saves(at.step) and not at.last)
        return 0 if at.last and asked == EXIT_AFTER else asked

    def end(self, at: At) -> None:
        """Say why the loop ended; the handlers of before are back."""
        self.stopped_by = at.stopped_by or None
        if self._listens:
            self.request.restore()


def stop_on_signals() -> StopHook:
    """A hook with which the first Ctrl-C, SIGTERM or SIGUSR1 ends a loop after its running step.

    So hooks can save, as at any end; the second one raises KeyboardInterrupt, as `stop_requests`
    has it. Handlers are installed only while the loop itself runs: in the body signals do what they
    did before, so that a Ctrl-C raises KeyboardInterrupt, and a loop that nobody goes on with
    leaves none behind. A body that takes long is within ``with stop_requests() as request``, and
    the hook `StopHook` of that. First in the list of hooks, it listens until all others have ended.
    """
    return StopHook(Request(), listens=True)
