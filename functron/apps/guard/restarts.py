"""How a run outlives its processes: restarts, and meshes that shrink and grow.

Nothing here starts a process: these are the decisions, of the launcher (`functron.cli.launch`) and
of the loop, as functions of a configuration and of what the run folder holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from functron import training
from functron.core.errors import Problem, refuse
from functron.core.settings import Mark, Need, setting, value_at
from functron.core.tables import shows_differences
from functron.spmd import DATA_AXES, Mesh

if TYPE_CHECKING:
    from functron.training.config import TrainConfig
    from functron.training.run import Session

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


_STARTED = Need(
    lambda restarts: restarts.max_restarts > 0,
    "processes that are started again",
    "set max_restarts",
)


@shows_differences
@dataclass(frozen=True)
class RestartsConfig:
    """How a run goes on after a process died, and when it leaves by itself.

    Attributes:
        max_restarts: how often processes that `nproc` started are started again after one died,
            from the newest complete checkpoint: so often without progress, which is a step or a
            checkpoint beyond all before; progress sets the count back. Mistakes and numbers that
            are not finite end the run at once.
        pause_seconds: how long to wait before that; twice as long after each start without
            progress, up to a minute.
        elastic: the sizes that an axis of the mesh may have, such as dp=2:8, or dp=2,4,8: a restart
            goes on with as many ranks as there are `slots` for, and with the same batches, of which
            each rank then has more microbatches; at a checkpoint the run grows again. Sizes that do
            not divide the batches are passed over.
        slots: a file with the number of processes that can be had now, which a scheduler or a
            person may change at any time; empty: as many as there are GPUs.
        exit_after: save and leave after so long, such as 3h50m, with the exit code 138, which says
            to start the job again, as after SIGUSR1; empty: never.
    """

    MARK: ClassVar[Mark] = Mark(box="resilience", flat=True)

    max_restarts: int = setting(0, "common", least=0)
    pause_seconds: float = setting(1.0, short="restart_pause_seconds", least=0, need=_STARTED)
    elastic: str = ""
    slots: str = setting("", "path")
    exit_after: str = ""

    def hook(self, session: Session) -> None:
        """Have a run leave when its time is over, and where its mesh can grow."""
        stop, config = session.stop, session.run.config
        if self.exit_after:
            stop.ends = session.began + seconds_of(self.exit_after)
        if self.elastic and session.job.main:
            stop.grown = lambda: can_grow(config)

    def run_problems(
        self, config: TrainConfig, mesh: Mesh, processes: int | None, launched_here: bool
    ) -> Iterator[Problem]:
        """Settings of restarts that do not fit.

        Args:
            config: what is to be run.
            mesh: its mesh.
            processes: how many processes take part, where they run already.
            launched_here: whether functron's launcher started them, which has looked at most of it.
        """
        if self.exit_after:
            try:
                seconds_of(self.exit_after)
            except ValueError:
                wanted = "a duration such as 90s, 45m, 3h50m or 1d12h"
                yield Problem("exit_after", repr(self.exit_after), wanted)
        if launched_here:
            return
        if self.max_restarts and processes is not None:
            fix = (
                "leave it out; start the job again with --resume auto, as examples/slurm does; "
                "functron train --nproc restarts the processes of one machine"
            )
            yield Problem("max_restarts", f"{self.max_restarts} under torchrun", "0", fix)
        elif self.max_restarts and not config.parallelism.nproc:
            fix = f"add --nproc {mesh.size}, or leave it out"
            yield Problem("max_restarts", f"{self.max_restarts}", "processes to restart", fix)
        if self.slots and not self.elastic:
            yield Problem("slots", self.slots, "nothing without elastic", "add --elastic dp=1:N")
        if self.elastic:
            yield from _elastic_problems(config, mesh, processes)


def settings_of_restarts(config: TrainConfig) -> RestartsConfig:
    """The section of a configuration."""
    return value_at(config, "restarts")


def resize(config: TrainConfig, axis: str, size: int) -> TrainConfig | None:
    """`config` on a mesh whose `axis` has another size, with the same batches of the same samples.

    Its microbatches are as few as there can be of no more samples than now: so ranks that are left
    take the parts of the others one after another, in the memory that a step takes now. In a
    pipeline they are a multiple of those now, as its schedule may ask for. Samples that are
    compared with each other (`functron.models.family.Objective.compares_rows`) stay in one, which
    takes more memory.

    Returns:
        None where ranks so many cannot divide the batches equally.
    """
    mesh = Mesh.parse(config.parallelism.mesh)
    if size == mesh[axis]:
        return config
    before = math.prod(mesh[name] for name in DATA_AXES)
    ranks = before // mesh[axis] * size
    batches = training.run_folder.sizes_to_come(config)
    if any(batch % ranks for batch in batches):
        return None
    unit = config.parallelism.microbatches if mesh["pp"] > 1 else 1
    most = config.data.global_batch // ranks
    rows = max(config.data.global_batch // (before * config.parallelism.microbatches), 1)
    objective = config.family.objective
    if objective is not None and objective.compares_rows(config):
        rows = most
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
    return training.configure(config, mesh=text, nproc=processes, microbatches=count)


def usable_sizes(config: TrainConfig) -> tuple[int, ...]:
    """Those of the sizes in ``config.elastic`` among which batches can be divided equally."""
    elastic = Elastic.parse(settings_of_restarts(config).elastic)
    found = (size for size in elastic.sizes if resize(config, elastic.axis, size) is not None)
    return tuple(found)


def num_slots(config: TrainConfig) -> int | None:
    """How many processes can be had here now: what a file says, or the GPUs; None: nobody knows."""
    if settings_of_restarts(config).slots:
        try:
            return int(Path(settings_of_restarts(config).slots).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # such as one that is just being written
            return None
    return (torch.cuda.device_count() or None) if config.compute.device != "cpu" else None


def fitting(config: TrainConfig, slots: int | None) -> TrainConfig | None:
    """`config` on the largest of its meshes that so many processes make; None: there is none.

    Where it is not elastic, or `slots` is not known, it is what it is.
    """
    allowed = settings_of_restarts(config).elastic
    if not allowed or slots is None:
        return config
    elastic, mesh = (
        Elastic.parse(settings_of_restarts(config).elastic),
        Mesh.parse(config.parallelism.mesh),
    )
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
    allowed = settings_of_restarts(config).elastic
    if not allowed or slots is None:
        return False
    elastic, mesh = (
        Elastic.parse(settings_of_restarts(config).elastic),
        Mesh.parse(config.parallelism.mesh),
    )
    others = mesh.size // mesh[elastic.axis]
    return any(size > mesh[elastic.axis] and size * others <= slots for size in elastic.sizes)


def read_progress(out: Path) -> tuple[int, int]:
    """The step of the newest checkpoint of the run in `out`, and the last step that it recorded."""
    newest = training.run_folder.newest(out)
    records = training.run_folder.records(out)
    return int(newest.name) if newest else 0, records[-1]["step"] if records else 0


def pause_seconds(first: float, failures: int) -> float:
    """How long to wait before a start: `first`, doubled for each start that made no progress."""
    return min(first * 2.0 ** min(failures, 30), max(LONGEST_PAUSE_SECONDS, first))


def _elastic_problems(config: TrainConfig, mesh: Mesh, processes: int | None) -> Iterator[Problem]:
    own = settings_of_restarts(config)
    try:
        elastic = Elastic.parse(own.elastic)
    except ValueError:
        wanted = "dp or fsdp and its sizes, such as dp=2:8 or dp=2,4,8"
        yield Problem("elastic", repr(own.elastic), wanted)
        return
    if processes is not None:
        fix = "leave it out: the scheduler starts the job again with another --mesh, and --resume"
        wanted = "nothing: only functron train --nproc shrinks and grows, on one machine"
        yield Problem("elastic", f"{own.elastic} under torchrun", wanted, fix)
    elif not own.max_restarts:
        wanted, fix = "max_restarts of at least 1, which it needs", "add --max-restarts 3"
        yield Problem("elastic", own.elastic, wanted, fix)
    if mesh[elastic.axis] not in elastic.sizes:
        got = f"{own.elastic} for {elastic.axis}={mesh[elastic.axis]}"
        yield Problem("elastic", got, "sizes with that of the mesh among them")
    usable = usable_sizes(config)
    ends = {elastic.sizes[0], elastic.sizes[-1]}
    # in dp=2:8 sizes between may not divide the batch, and are passed over
    listed = elastic.sizes if ":" not in own.elastic else sorted(ends)
    wrong = [size for size in listed if size not in usable]
    if wrong:
        got = f"{own.elastic}: {', '.join(map(str, wrong))} cannot divide the batch"
        sizes = ", ".join(map(str, usable)) or "none"
        batch = f"global_batch={config.data.global_batch}" + (
            ", ramp_up" if config.data.ramp_up else ""
        )
        wanted = f"sizes that divide it, of which there are {sizes} ({batch})"
        yield Problem("elastic", got, wanted, "choose of these, or another global_batch")
    if own.slots:
        if num_slots(config) is None:
            wanted = "a file with the number of processes that can be had"
            got = f"{own.slots}, which has none"
            yield Problem("slots", got, wanted, f"echo {mesh.size} > {own.slots}")
    elif num_slots(config) is None:
        wanted = "a file with the number of processes that can be had: CPUs are never lost"
        yield Problem("slots", "none", wanted, f"echo {mesh.size} > slots, and --slots slots")
