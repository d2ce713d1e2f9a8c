"""Numbers of a run that are not as they should be, found a step late, and what is done about them.

A loss or gradient norm that is not finite, or far above those of the steps before: a spike. Every
rank reads the same numbers, and so decides alike. What a policy changes is in the configuration (a
rate that is lower from a step on, samples that are left out), so that a run which goes on has it,
and so has one that begins with the same configuration.

A step is a pure function: the same state and batch give the same bits. So a step whose numbers look
wrong is taken again from the newest checkpoint before it: other bits are a fault of the hardware
that was not there the second time. Equal bits may still be a fault, of one rank that makes the same
mistake every time: so every rank computes the whole step by itself, of the same state, and the
ranks are compared.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist

from functron import checkpoint
from functron.core import tree
from functron.core.errors import Problem, refuse
from functron.core.settings import Mark, Need, replace_settings, setting, value_at
from functron.core.tables import shows_differences
from functron.data.sampling import Gaps, earlier_text
from functron.optim import LimitState, set_limit_
from functron.program.cost import free_memory_bytes
from functron.spmd import BoundMesh
from functron.training.loop import LOSS_AND_NORM, At, LoopHook, Step, check_finite
from functron.training.records import METRICS as RECORDS
from functron.training.records import read

if TYPE_CHECKING:
    from functron.training.config import TrainConfig
    from functron.training.run import Job, Run, Session
    from functron.training.step import State, Watch

Record = Mapping[str, Any]


_ROLLBACK = Need(
    lambda c: "rollback" in (c.on_spike, c.on_nonfinite),
    "a rollback",
    "set on_spike or on_nonfinite to rollback",
)
_LOWER = Need(lambda c: c.on_spike == "lower-rate", "a lower rate", "set on_spike to lower-rate")
_ANSWERED = Need(
    lambda c: _ROLLBACK.holds(c) or _LOWER.holds(c),
    "rollbacks, or lower rates",
    "set on_spike to rollback or lower-rate",
)


@shows_differences
@dataclass(frozen=True)
class AnomalyConfig:
    """The numbers of a step that are anomalies, and what is done about them.

    Attributes:
        on_nonfinite: what is done about a loss or a gradient norm that is not finite: stop, or
            rollback (see on_spike). optimizer.skip_nonfinite leaves out such updates instead.
        on_spike: what is done about a loss or a gradient norm far above those before: record (write
            it into events.jsonl), stop, skip (leave out updates whose gradient norm is above the
            limit, which is known a step before), rollback (go back to a checkpoint from before it,
            and on without its samples) or lower-rate (multiply the learning rate from there on).
        window: over how many steps before it what is usual is measured: the median, and the median
            distance from it.
        minimum: how many of these steps there must be, before anything is a spike.
        threshold: how many such distances above the median a spike is; they count as at least 1% of
            a loss, and 5% of a gradient norm, which is measured by its logarithm.
        rollback_steps: how many of the steps before it a rollback takes back, beside the one of the
            anomaly.
        skip_data: whether the samples of the steps that are taken back are left out from then on;
            otherwise they come again.
        rate_factor: what lower-rate multiplies the learning rate by.
        most: rollbacks and lower rates, counted from where the run began or went on; at one more
            it stops.
        attribute: take the step again at an anomaly, from the newest checkpoint before it, to tell
            a fault of the hardware from one of the model or its samples, and to name the layer that
            is first not finite; as functron rerun does.
        skipped_samples: samples that are left out, by their numbers in the order of the data, such
            as "40:48 100:116"; rollbacks add theirs.
        rate_factors: factors of the learning rate from a step on (from 0), such as "120:0.5";
            lower-rate adds its own.
    """

    MARK: ClassVar[Mark] = Mark(box="resilience")

    on_nonfinite: Literal["stop", "rollback"] = "stop"
    on_spike: Literal["record", "stop", "skip", "rollback", "lower-rate"] = setting(
        "record", "common step"
    )
    window: int = 128
    minimum: int = 32
    threshold: float = 10.0
    rollback_steps: int = setting(0, need=_ROLLBACK)
    skip_data: bool = setting(True, need=_ROLLBACK)
    rate_factor: float = setting(0.5, need=_LOWER)
    most: int = setting(3, need=_ANSWERED)
    attribute: bool = False
    skipped_samples: str = ""
    rate_factors: str = setting("", "step")

    @property
    def gaps(self) -> Gaps:
        """`skipped_samples` as ranges.

        Raises:
            ValueError: it is no such text.
        """
        return Gaps.parse(self.skipped_samples)

    @property
    def factors(self) -> tuple[tuple[int, float], ...]:
        """`rate_factors` as pairs of a step and a factor, by step.

        Raises:
            ValueError: it is no such text.
        """
        words = self.rate_factors.replace(",", " ").split()
        found = [re.fullmatch(r"(\d+):([\d.]+(?:e-?\d+)?)", word) for word in words]
        if not all(found):
            wanted = 'steps and factors, such as "120:0.5"'
            refuse("cannot change the rate", "rate_factors", repr(self.rate_factors), wanted)
        return tuple(sorted((int(m[1]), float(m[2])) for m in found if m))

    def lower_rate(self, step: int) -> AnomalyConfig:
        """With the learning rate lower from `step` on, from 0."""
        pairs = [*self.factors, (step, self.rate_factor)]
        return replace(self, rate_factors=" ".join(f"{s}:{f:g}" for s, f in sorted(pairs)))

    def without(self, first: int, end: int) -> AnomalyConfig:
        """With the samples left out that now come as ``first ... end - 1``."""
        return replace(self, skipped_samples=str(self.gaps.without(first, end)))

    def problems(self) -> Iterator[Problem]:
        """Everything wrong with it."""
        least = {"window": 1, "minimum": 2, "rollback_steps": 0, "most": 0}
        for name, smallest in least.items():
            if (value := getattr(self, name)) < smallest:
                yield Problem(f"anomalies.{name}", str(value), f"at least {smallest}")
        if self.window < self.minimum:
            wanted = f"at least anomalies.minimum={self.minimum}"
            yield Problem("anomalies.window", str(self.window), wanted)
        if not 0 < self.threshold < math.inf:
            yield Problem("anomalies.threshold", f"{self.threshold:g}", "above 0, and finite")
        if not 0 < self.rate_factor < 1:
            yield Problem("anomalies.rate_factor", f"{self.rate_factor:g}", "between 0 and 1")
        for name, own in (("skipped_samples", "gaps"), ("rate_factors", "factors")):
            try:
                getattr(self, own)
            except ValueError as error:
                detail = str(error).partition("wanted ")[2]
                yield Problem(f"anomalies.{name}", repr(getattr(self, name)), detail or "ranges")

    @property
    def limits_updates(self) -> bool:
        """Whether updates whose gradients are too large are left out."""
        return self.on_spike == "skip"

    def change_rate(self, schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A schedule times the factors of all steps up to the one that it is asked for."""
        return with_factors(schedule, self.factors)

    def hook(self, session: Session) -> AnomalyHook:
        """Finds the anomalies of a run, and answers them."""
        return AnomalyHook(session)


def with_factors(
    schedule: Callable[[Any], Any], factors: Sequence[tuple[int, float]]
) -> Callable[[Any], Any]:
    """A schedule times the factors of all steps up to the one that it is asked for."""
    if not factors:
        return schedule

    def rate(count: Any) -> Any:
        value = schedule(count)
        for step, factor in factors:
            if isinstance(count, torch.Tensor):
                value = value * torch.where(count >= step, factor, 1.0)
            else:
                value = value * (factor if count >= step else 1.0)
        return value

    return rate


_LEAST = {"loss": 0.01, "grad_norm": 0.05}
_NORMAL = 1.4826
"""Median distance from the median, times this, is the standard deviation of normal numbers."""


@dataclass(frozen=True)
class Anomaly:
    """A number of a step that is not as it should be.

    Attributes:
        kind: ``"nonfinite"`` or ``"spike"``.
        step: the one that it is of, from 1 as in records.
        metric: ``"loss"`` or ``"grad_norm"``.
        value: of it.
        score: of a spike, how many usual distances it is above the median.
        action: what the configuration says is to be done.
    """

    kind: Literal["nonfinite", "spike"]
    step: int
    metric: str
    value: float
    score: float | None
    action: str

    @property
    def keeps(self) -> bool:
        """Whether the run goes on with the state after it."""
        return self.action not in ("stop", "rollback")

    def __str__(self) -> str:
        name = {"loss": "a loss", "grad_norm": "gradients of norm"}[self.metric]
        how = "" if self.score is None else f", {self.score:.0f} usual distances above the median"
        return f"step {self.step}: {name} {self.value:.6g}{how}"


def usual(metric: str, values: Sequence[float]) -> tuple[float, float]:
    """The median of finite `values`, and the usual distance from it; of norms by logarithms."""
    middle = statistics.median(values)
    far = _NORMAL * statistics.median(abs(value - middle) for value in values)
    least = _LEAST[metric]
    return middle, max(far, least if metric == "grad_norm" else least * abs(middle), 1e-12)


def measured(metric: str, value: float) -> float:
    """A number as spikes of it are measured: a norm by its logarithm."""
    return math.log(max(value, 1e-30)) if metric == "grad_norm" else value


class Detector:
    """Finds anomalies in the records of a run, one after another.

    Args:
        config: what is one.
        before: records of steps before the first, of which the last ones are what is usual.
    """

    def __init__(self, config: AnomalyConfig, before: Iterable[Record] = ()):
        self.config = config
        self._past: dict[str, deque[float]] = {
            metric: deque(maxlen=config.window + 1) for metric in LOSS_AND_NORM
        }
        for record in before:
            self._remember(record)

    def _remember(self, record: Record) -> None:
        for metric, past in self._past.items():
            value = None if record.get("targets") == 0 else record.get(metric)
            value = math.nan if value is None else value
            # a step without a number has its place, so that limits are those of a step
            past.append(measured(metric, value) if math.isfinite(value) else math.nan)

    def find(self, record: Record) -> Anomaly | None:
        """The anomaly in a record, that of its loss first; and remember the record.

        A record without any target has none, and says nothing of what is usual.
        """
        found = None if record.get("targets") == 0 else self._look(record)
        self._remember(record)
        return found

    def _look(self, record: Record) -> Anomaly | None:
        step, own = record["step"], self.config
        for metric in LOSS_AND_NORM:
            value = record.get(metric)
            if value is not None and not math.isfinite(value):
                return Anomaly("nonfinite", step, metric, value, None, own.on_nonfinite)
        for metric in LOSS_AND_NORM:
            value, known = record.get(metric), self._list_known(metric)
            if value is None or len(known) < own.minimum:
                continue
            at = measured(metric, value)
            if at <= min(known):
                continue
            middle, distance = usual(metric, known)
            if (score := (at - middle) / distance) > own.threshold:
                return Anomaly("spike", step, metric, value, score, own.on_spike)
        return None

    def _list_known(self, metric: str, late: int = 0) -> list[float]:
        past = list(self._past[metric])
        past = past[: len(past) - late][-self.config.window :]
        return [value for value in past if not math.isnan(value)]

    def limit(self) -> float:
        """The gradient norm above which the update of the next step is a spike's.

        Of the records but the last, which may not have been read when the step begins; infinite
        where they are too few.
        """
        known = self._list_known("grad_norm", late=1)
        if len(known) < self.config.minimum:
            return math.inf
        middle, distance = usual("grad_norm", known)
        return math.exp(min(middle + self.config.threshold * distance, 80.0))


class Guard(LoopHook):
    """The guard of a run: finds anomalies, writes them down, and ends the loop for them.

    After the hooks that write records, and before those that save.

    Args:
        config: what is an anomaly, and what to do about it.
        write: an event, as `functron.training.records.event_log` yields it.
        samples: what is known of the samples of a step, from 0, for events.
        before: records of the steps before the first.
        skips: whether gradients need not be finite, since the step leaves out such updates. What
            they came from may be repaired by a hook then, which is no anomaly.
        overflows: whether nothing need be finite where gradients are not: the loss is scaled.

    Attributes:
        found: the anomaly that the loop ended for; None: it did not.
    """

    def __init__(
        self,
        config: AnomalyConfig,
        write: Callable[..., None],
        samples: Callable[[int], Mapping[str, Any]],
        before: Iterable[Record] = (),
        *,
        skips: bool = False,
        overflows: bool = False,
    ):
        self.config, self.write, self._samples = config, write, samples
        self._skips, self._overflows = skips, overflows
        self.found: Anomaly | None = None
        self._detector = Detector(config, before)
        self._limits: dict[int, float] = {}

    def before(self, at: At) -> None:
        """Set the limit of the step."""
        self.set_limit(at.state, at.index)

    def after(self, at: At) -> None:
        """Look at the record; the state of a step that is to be forgotten is not saved."""
        finite = all(math.isfinite(at.record.get(name) or 0.0) for name in LOSS_AND_NORM)
        if not finite and at.repair() and self._skips:
            return
        found = self.observe(at.record)
        if found is not None:
            at.stop(keeps=found.keeps)

    def set_limit(self, state: Any, index: int) -> None:
        """Set the limit of step `index`, from 0, where updates of larger norms are left out."""
        if self.config.on_spike == "skip" and isinstance(state.opt_state, LimitState):
            limit = float(torch.tensor(self._detector.limit(), dtype=torch.float32))
            self._limits[index + 1] = limit
            set_limit_(state.opt_state, limit)

    def observe(self, record: Record) -> Anomaly | None:
        """The anomaly in a record that the loop must end for; None: it goes on.

        Every anomaly is written down.
        """
        self._left_out(record)
        if record.get("targets") == 0:
            self.write("no_targets", record["step"], **self._samples(record["step"] - 1))
        found = self._detector.find(self._drop_infinite(record))
        if found is None:
            return None
        about = self._samples(found.step - 1)
        score = {} if found.score is None else {"score": round(found.score, 2)}
        self.write(
            found.kind,
            found.step,
            metric=found.metric,
            value=found.value,
            **score,
            action=found.action,
            **about,
        )
        acts = found.action in ("stop", "rollback", "lower-rate")
        if not (acts or self.config.attribute):
            return None
        self.found = self.found or found
        return self.found

    def _drop_infinite(self, record: Record) -> Record:
        """The record without what may be infinite."""
        if math.isfinite(record.get("grad_norm") or 0.0):
            return record
        names = LOSS_AND_NORM if self._overflows else LOSS_AND_NORM[1:] if self._skips else ()
        return {**record, **dict.fromkeys(names)}

    def _left_out(self, record: Record) -> None:
        limit = self._limits.pop(record["step"], math.inf)
        norm = record.get("grad_norm")
        if norm is not None and math.isfinite(norm) and norm > limit:
            about = self._samples(record["step"] - 1)
            self.write("skip", record["step"], grad_norm=norm, limit=limit, **about)


class AnomalyHook(LoopHook):
    """Has a run stop, or go on in another way, for the anomalies that a `Guard` finds in each loop.

    Args:
        session: the run. Collective: rank 0 reads the records of the steps before.
    """

    judges = True

    def __init__(self, session: Session):
        self._session, self._answers = session, 0
        names, start = ("step", "loss", "grad_norm", "targets"), session.run.start
        window = settings_of_run(session.run).window

        def read_past() -> list[Record]:
            rows = session.read_records() if start else []
            kept = [row for row in rows if row["step"] <= start]
            return [{name: row.get(name) for name in names} for row in kept[-window - 1 :]]

        self._past = session.job.broadcast(read_past)

    def begin(self, at: At) -> None:
        """Guard a loop, which begins where the one before ended, or before an anomaly."""
        session, optimizer = self._session, self._session.run.config.optimizer
        self._past = [record for record in self._past if record["step"] <= at.step]
        self._guard = Guard(
            settings_of_run(session.run),
            session.write,
            session.run.samples_of,
            [*self._past, *session.history],
            skips=optimizer.skip_nonfinite > 0,
            overflows=optimizer.loss_scale.initial > 0,
        )

    def before(self, at: At) -> None:
        """Set the limit of the step."""
        self._guard.before(at)

    def after(self, at: At) -> None:
        """Look at the record."""
        self._guard.after(at)

    def go_on(self, session: Session) -> bool:
        """Answer the anomaly that the loop ended for, as the policy has it."""
        found, own = self._guard.found, settings_of_run(session.run)
        if found is None:
            return False
        verdict = None
        if own.attribute:
            known = [*self._past, *session.history]
            verdict = attribute_fault(session.run, session.out, session.job, found.step, known)
            session.write("rerun", found.step, **verdict.event())
            check_hardware(verdict)
        self._answers += found.action in ("rollback", "lower-rate")
        _check_answers(found, self._answers, own.most, session.history)
        if found.action == "rollback":
            # samples have no part in what does not happen again
            skips = verdict is None or verdict.kind != "transient"
            _roll_back(session, found, skips=skips and own.skip_data)
        elif found.action == "lower-rate":
            taken = session.run.start
            lower = own.lower_rate(taken)
            session.run = session.run.with_config(_change(session.run.config, anomalies=lower))
            session.write("lower-rate", taken, factor=own.rate_factor, since=found.step)
            session.write_config()
        return True


def settings_of_run(run: Run) -> AnomalyConfig:
    """The section of a run's configuration."""
    return value_at(run.config, "anomalies")


def _change(config: TrainConfig, **settings: Any) -> TrainConfig:
    return replace_settings(config, settings)


def _check_answers(found: Anomaly, answers: int, most: int, history: Sequence[Record]) -> None:
    """Raise FloatingPointError where the run is to stop for an anomaly."""
    if found.action == "stop" and found.kind == "nonfinite":
        check_finite(history[-1], (found.metric,))
    if found.action == "stop":
        raise FloatingPointError(
            f"{found}: a spike; wanted none (--anomalies.on-spike stop); fix: go on from a "
            "checkpoint before it, with --resume --anomalies.on-spike rollback or lower-rate"
        )
    if answers > most:
        raise FloatingPointError(
            f"{found}; wanted no more after {most} times {found.action}; fix: see events.jsonl, "
            "lower the learning rate, or raise --anomalies.most"
        )


def _roll_back(session: Session, found: Anomaly, *, skips: bool) -> None:
    """Go back to a checkpoint before an anomaly, without the samples that led to it. Collective.

    What was saved after that checkpoint is removed: it has seen them. Steps that were taken before
    the batches changed are taken again with the batches of now, which the mesh can divide.

    Args:
        session: the run.
        found: its anomaly.
        skips: whether samples are left out.
    """
    run, own, batches = session.run, settings_of_run(session.run), session.run.batches
    first = max(found.step - 1 - own.rollback_steps, 0)  # the first step that is forgotten
    config = run.config
    if skips:
        numbers = (batches.first_sample(step) for step in (first, found.step))
        config = _change(config, anomalies=own.without(*numbers))
    # there is no room for its state beside an earlier one
    run = session.run = replace(run, state=None)
    state = run.restore(session.out, session.job, first, forget=True)
    start = int(state.step)
    skipped = {"skipped": value_at(config, "anomalies.skipped_samples")} if skips else {}
    session.write("rollback", found.step, to=start, since=first + 1, **skipped)
    if start < sum(steps for steps, _ in batches.earlier):
        config = _change(config, earlier_batches=earlier_text(batches.until(start)))
        run = run.with_config(config)
    else:  # the programs are the same, of which samples are no part; but rates may count them
        run = replace(run, setup=replace(run.setup, config=config))
    session.run = replace(run, state=state, start=start)
    session.write_config()


# --- a step again, to tell a fault of the hardware from one of the model or its samples

AGAIN = "again"
"""The folder in that of a run where a state lies while ranks compute a step by themselves."""
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
            **dict(zip(LOSS_AND_NORM, self.again, strict=False)),
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
    """All that taking steps of a run again needs; made by `make_replay`.

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


def replay_step(
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
        guard.observe({**dict(zip(LOSS_AND_NORM, numbers, strict=False)), **found, "step": at + 1})
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
    return tuple(float(metrics[name]) for name in LOSS_AND_NORM if name in metrics)


def _numbers(record: Record, like: Numbers) -> Numbers:
    """Those of a record; what JSON had no word for is NaN, and a step without targets has 0."""
    if record.get("targets") == 0:
        return (0.0,) * len(like)
    values = [record.get(name) for name in LOSS_AND_NORM[: len(like)]]
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


def make_replay(run: Run, out: Path | None, job: Job) -> Replay:
    """All that taking steps of `run` again needs."""

    def begin(index: int) -> tuple[State, int]:
        state = run.restore(out, job, index)
        return state, int(state.step)

    def step(index: int) -> Callable:
        (targets,) = job.start_sum(run.num_targets(run.host_batch(index)))()
        if run.watch is not None and run.watch.due(index):
            return run.taking(run.watch.step, targets, watched=True)
        return run.taking(run.step, targets)

    def checksum(index: int) -> str:
        (total,) = job.start_sum(run.own_hash(run.host_batch(index)))()
        return f"{total:016x}"

    def watch() -> Watch:
        found, around = run.setup.watching(), run.around
        return found if around is None else replace(found, step=around(found.step))

    return Replay(
        settings_of_run(run),
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
    known: Sequence[Record],
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
        exact: as of `replay_step`.
    """
    names = ("step", "batch", "loss", "grad_norm", "targets")

    def stored() -> list[dict[str, Any]]:
        rows = [] if out is None else read(out / RECORDS)
        return [{name: row.get(name) for name in names} for row in rows if row["step"] <= step]

    found = {record["step"]: record for record in job.broadcast(stored)}
    found |= {record["step"]: record for record in known if "batch" in record}
    return replay_step(make_replay(run, out, job), step, found, exact=exact)


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
    path = out / AGAIN
    timeout = run.config.watchdog.timeout_seconds
    checkpoint.save(path, state, placement=run.setup.placement, timeout=timeout)
    alone = run.simulate(path)
    numbers = numbers_of(alone.step(alone.state, alone.batch(index))[1])
    found = job.gather(numbers)
    job.broadcast(lambda: shutil.rmtree(path, ignore_errors=True))
    return found
