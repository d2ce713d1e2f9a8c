"""A step that is taken again, to tell a fault of the hardware from one of the model or its samples.

A step is a pure function: the same state and batch give the same bits. So a step whose numbers look
wrong is taken again from the newest checkpoint before it: other bits are a fault of the hardware
that was not there the second time. Equal bits may still be a fault, of one rank that makes the same
mistake every time: so every rank computes the whole step by itself, of the same state, and the
ranks are compared.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from functron import checkpoint
from functron.core import tree
from functron.program.cost import free_memory_bytes
from functron.spmd import BoundMesh
from functron.training import records, run_folder
from functron.training.anomalies import METRICS, AnomalyConfig, Guard, Record
from functron.training.config import configure
from functron.training.loop import Step
from functron.training.run import Job, Run, begin_state, own_hash, programs
from functron.training.setup import Watch
from functron.training.step import State

Numbers = tuple[float, ...]
"""The loss and the gradient norm of a step."""

TITLES: Mapping[str, str] = {
    "transient": "transient: other bits when it is taken again, as from a fault of the hardware",
    "persistent": "persistent: ranks that compute the same do not agree, each time",
    "data": "data or model: the same bits again, on every rank that was asked",
    "unsteady": "unsteady: it does not repeat its own bits, which --deterministic operations do",
    "other batch": "other batch: the samples are not those that the run was given",
}


@dataclass(frozen=True)
class Verdict:
    """The cause of the numbers of a step, as far as taking it again tells.

    Attributes:
        step: from 1, as in records.
        kind: one of `TITLES`.
        begun: the steps that the state had taken from which it was taken again.
        recorded: the numbers that the run had; None: it has no record of the step.
        again: those of the second time.
        since: the first step, of those that were taken again, whose numbers are others; None: none.
        ranks: that differ from most; of two that differ, both.
        compared: how many ranks computed the step by themselves; 0: it was not compared.
        layer: the first in the order of the computation that has an activation or gradient which is
            not finite.
        samples: those of the step, as `functron.training.run.Run.samples_of`.
    """

    step: int
    kind: Literal["transient", "persistent", "data", "unsteady", "other batch"]
    begun: int
    recorded: Numbers | None
    again: Numbers
    since: int | None = None
    ranks: tuple[int, ...] = ()
    compared: int = 0
    layer: str | None = None
    samples: Mapping[str, Any] = field(default_factory=dict)

    def event(self) -> dict[str, Any]:
        """It as the entries of an event."""
        found = {
            "class": self.kind,
            "begun": self.begun,
            "since": self.since,
            "ranks": list(self.ranks),
            "compared": self.compared,
            "layer": self.layer,
            **dict(zip(METRICS, self.again, strict=False)),
        }
        return {name: value for name, value in found.items() if value is not None} | {
            **self.samples
        }

    def __str__(self) -> str:
        def shown(numbers: Numbers | None) -> str:
            rows = zip(("loss", "gradient norm"), numbers or (), strict=False)
            return ", ".join(f"{name} {value!r}" for name, value in rows) or "nothing"

        lines = [
            f"step {self.step}, from the state after {self.begun} steps",
            f"recorded  {shown(self.recorded)}",
            f"again     {shown(self.again)}",
            f"class     {TITLES[self.kind]}",
        ]
        if self.since is not None and self.since != self.step:
            lines.append(f"since     step {self.since}, the first whose numbers are others")
        if self.compared:
            lines.append(f"compared  {self.compared} ranks that each computed the whole step")
        if self.ranks:
            lines.append(f"ranks     {', '.join(map(str, self.ranks))}")
        if self.layer is not None:
            lines.append(f"layer     {self.layer} is the first that is not finite")
        if self.samples:
            first, end = self.samples["samples"]
            sources = self.samples.get("sources", ())
            named = (
                [f"{name}: {', '.join(map(str, x))}" for name, x in sources.items()]
                if (isinstance(sources, Mapping))
                else [str(source) for source in sources if source]
            )
            lines.append(f"samples   {first} to {end - 1}" + "".join(f"; {x}" for x in named))
        return "\n".join(lines)


@dataclass(frozen=True)
class Replay:
    """All that taking steps of a run again needs; made by `replay_of`.

    Attributes:
        config: what anomalies are, of which the limits of steps follow.
        begin: ``(index) -> (state, steps)``, the newest state that is known before a step, and how
            many steps it has taken; the same on every rank. Collective.
        step: ``(index) -> step``, what the run takes at a step.
        batch: ``(index) -> batch``.
        checksum: ``(index) -> text``, the checksum of that as records have it. Collective.
        alone: ``(state, index) -> numbers by rank``, of every rank the loss and gradient norm that
            it computes by itself; None where there are no ranks or no memory for it. Collective.
        watch: a step that says more of layers.
        samples: ``(index)`` to what is known of the samples.
        broadcast: ``(find) -> value``, what rank 0 finds. Collective.
    """

    config: AnomalyConfig
    begin: Callable[[int], tuple[Any, int]]
    step: Callable[[int], Step]
    batch: Callable[[int], Any]
    checksum: Callable[[int], str]
    alone: Callable[[Any, int], Sequence[Numbers] | None]
    watch: Callable[[], Watch]
    samples: Callable[[int], Mapping[str, Any]]
    broadcast: Callable[[Callable[[], Any]], Any]


def take_again(
    replay: Replay, step: int, recorded: Mapping[int, Record], *, exact: bool = True
) -> Verdict:
    """The verdict on a step of a run, from 1. Collective.

    Needs memory for two states. The state that the run itself has is left alone.

    Args:
        replay: of the run.
        step: which one, from 1 as in records.
        recorded: the records of the run, by step; those that lack are not compared.
        exact: whether numbers are compared bit for bit; otherwise, where the run was on other
            ranks, to one in a thousand.
    """
    index, same = step - 1, _same if exact else _close
    state, begun = replay.begin(index)
    past = [recorded[number] for number in sorted(recorded) if number <= begun]
    guard = Guard(replay.config, _ignore_event, lambda at: {}, past)
    since = None
    for at in range(begun, index):
        guard.set_limit(state, at)
        state, metrics = replay.step(at)(state, replay.batch(at))
        numbers = numbers_of(metrics)
        found = {"targets": 0} if "targets" in metrics else {}
        guard.observe({**dict(zip(METRICS, numbers, strict=False)), **found, "step": at + 1})
        if since is None and not _agrees(recorded.get(at + 1), numbers, same):
            since = at + 1
    guard.set_limit(state, index)
    batch = replay.batch(index)
    again, twice = (numbers_of(replay.step(index)(_copy(state), batch)[1]) for _ in range(2))
    record = recorded.get(step)
    if since is None and not _agrees(record, again, same):
        since = step
    known = None if record is None else _numbers(record, again)
    differs = record is not None and record.get("batch") not in (None, replay.checksum(index))
    finite = all(map(math.isfinite, again))
    layer = None if finite else _first_layer(replay.watch(), _copy(state), batch)
    facts: dict[str, Any] = {"layer": layer, "samples": replay.samples(index), "since": since}

    def verdict(kind: Any, **more: Any) -> Verdict:
        return Verdict(step, kind, begun, known, again, **facts, **more)

    if replay.broadcast(lambda: differs):
        return verdict("other batch")
    if replay.broadcast(lambda: not _same(again, twice)):
        return verdict("unsteady")
    if replay.broadcast(lambda: since is not None):
        return verdict("transient")
    by_rank = replay.alone(state, index)
    if by_rank is None:
        return verdict("data")
    wrong = unlike(by_rank)
    return verdict("persistent" if wrong else "data", ranks=tuple(wrong), compared=len(by_rank))


def unlike(found: Sequence[Numbers]) -> list[int]:
    """The places of numbers unlike those of most; all, where there is no most."""
    keys = [tuple(repr(number) for number in numbers) for numbers in found]
    (most, count), *others = Counter(keys).most_common()
    if not others:
        return []
    if 2 * count > len(keys):
        return [place for place, key in enumerate(keys) if key != most]
    return list(range(len(keys)))


def numbers_of(metrics: Mapping[str, Any]) -> Numbers:
    """The loss and the gradient norm in the metrics of a step, on the host."""
    return tuple(float(metrics[name]) for name in METRICS if name in metrics)


def _numbers(record: Record, like: Numbers) -> Numbers:
    """Those of a record; what JSON had no word for is NaN, and a step without targets has 0."""
    if record.get("targets") == 0:
        return (0.0,) * len(like)
    values = [record.get(name) for name in METRICS[: len(like)]]
    return tuple(math.nan if value is None else float(value) for value in values)


def _agrees(
    record: Record | None, numbers: Numbers, same: Callable[[Numbers, Numbers], bool]
) -> bool:
    return record is None or same(_numbers(record, numbers), numbers)


def _same(a: Numbers, b: Numbers) -> bool:
    """Whether numbers are equal, all that are not finite among one another, as records have it."""
    pairs = zip(a, b, strict=True)
    return all(x == y or not (math.isfinite(x) or math.isfinite(y)) for x, y in pairs)


def _close(a: Numbers, b: Numbers) -> bool:
    pairs = zip(a, b, strict=True)
    return all(math.isclose(x, y, rel_tol=1e-3) or _same((x,), (y,)) for x, y in pairs)


def _copy(state: Any) -> Any:
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def _ignore_event(kind: str, step: int, **about: Any) -> None:
    """Write no event."""


def _first_layer(watch: Watch, state: Any, batch: Any) -> str | None:
    """The first layer that is not finite in a step, which is given up the state.

    Of the residual stream the first in the order of the model; else of gradients the last, where
    backward begins.
    """
    _, metrics = watch.step(state, batch)
    found = watch.layers(metrics)
    streams = [name for name in watch.stream if not _finite(found[name], "activation_rms")]
    if streams:
        return f"{streams[0]}, its activations"
    parameters = [name for name in found if not _finite(found[name], "param_norm")]
    if parameters:
        return f"{parameters[0]}, its parameters"
    order = [*watch.stream, *(name for name in found if name not in watch.stream)]
    wrong = [name for name in order if not _finite(found[name], "grad_norm")]
    if not wrong:
        return None
    # what comes after the last layer of the stream is of the loss, where backward begins
    return f"{wrong[-1]}, its gradients"


def _finite(numbers: Mapping[str, float], name: str) -> bool:
    return math.isfinite(numbers.get(name, 0.0))


def check_hardware(verdict: Verdict) -> None:
    """Raise OSError where ranks make the same mistake each time."""
    if verdict.kind != "persistent":
        return
    who = ", ".join(map(str, verdict.ranks))
    raise OSError(
        f"step {verdict.step}: ranks {who} of {verdict.compared} compute other numbers than the "
        "others of the same state and batch, each time; wanted the same bits on all; fix: take "
        "their machine out, then go on with --resume"
    )


def replay_of(run: Run, out: Path | None, job: Job) -> Replay:
    """All that taking steps of `run` again needs."""
    folder = None if out is None else out / run_folder.CHECKPOINTS

    def begin(index: int) -> tuple[State, int]:
        def newest() -> int | None:
            saved = checkpoint.steps(folder) if folder is not None and folder.is_dir() else []
            return max((step for step in saved if step <= index), default=None)

        begun = job.broadcast(newest)
        where = run.begun_from if begun is None or folder is None else folder / str(begun)
        state, _ = begin_state(run.setup, where, run.device)
        return state, int(state.step)

    def step(index: int) -> Callable:
        (targets,) = job.start_sum(run.num_targets(run.host_batch(index)))()
        if run.watch is not None and run.watch.due(index):
            return run.taking(run.watch.step, targets, watched=True)
        return run.taking(run.step, targets)

    def checksum(index: int) -> str:
        (total,) = job.start_sum(own_hash(run.mesh, run.host_batch(index)))()
        return f"{total:016x}"

    def watch() -> Watch:
        found = run.setup.watching()
        return (
            found if run.around is None else dataclasses.replace(found, step=run.around(found.step))
        )

    return Replay(
        run.config.anomalies,
        begin,
        step,
        run.batch,
        checksum,
        lambda state, index: _alone(run, out, job, state, index),
        watch,
        run.samples_of,
        job.broadcast,
    )


def attribute_fault(
    run: Run,
    out: Path | None,
    job: Job,
    step: int,
    known: Sequence[records.Record],
    *,
    exact: bool = True,
) -> Verdict:
    """The verdict on a step of `run`, from 1, by taking it again. Collective.

    Args:
        run: its state is left alone.
        out: its folder.
        job: its processes.
        step: which one.
        known: records of this session, beside those in the folder.
        exact: as of `take_again`.
    """
    names = ("step", "batch", "loss", "grad_norm", "targets")

    def stored() -> list[dict[str, Any]]:
        rows = [] if out is None else run_folder.records(out)
        return [{name: row.get(name) for name in names} for row in rows if row["step"] <= step]

    found = {record["step"]: record for record in job.broadcast(stored)}
    found |= {record["step"]: record for record in known if "batch" in record}
    return take_again(replay_of(run, out, job), step, found, exact=exact)


def _alone(run: Run, out: Path | None, job: Job, state: State, index: int) -> list[Numbers] | None:
    """The numbers of a step that every rank computes by itself, all of it, simulating the others.

    The state goes through a checkpoint, which is removed. None where there are no other ranks, no
    folder for it, or no memory for the whole state on each.
    """
    mesh = run.mesh
    if not isinstance(mesh, BoundMesh) or out is None:
        return None
    leaves = run.setup.placement.leaves
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    free = -job.across(-free_memory_bytes(run.device), dist.ReduceOp.MAX)
    together = 1 if run.device.type == "cuda" else mesh.size
    if 3 * nbytes * together > free:
        return None
    path = out / run_folder.AGAIN
    checkpoint.save(
        path, state, placement=run.setup.placement, timeout=run.config.watchdog.timeout_seconds
    )
    config = configure(run.config, compile=False, cuda_graph=False, nproc=0)
    made = dataclasses.replace(run.setup, config=config, mesh=mesh.mesh)
    whole, _ = begin_state(made, path, run.device)
    simulated = dataclasses.replace(run, setup=made, state=whole)
    step, _ = programs(made, run.around)
    numbers = numbers_of(step(whole, simulated.batch(index))[1])
    found = job.gather(numbers)
    job.broadcast(lambda: shutil.rmtree(path, ignore_errors=True))
    return found
