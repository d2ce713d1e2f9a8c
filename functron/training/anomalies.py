"""Numbers of a run that are not as they should be, found a step late, and what is done about them.

A loss or gradient norm that is not finite, or far above those of the steps before: a spike. Every
rank reads the same numbers, and so decides alike. What a policy changes is in the configuration (a
rate that is lower from a step on, samples that are left out), so that a run which goes on has it,
and so has one that begins with the same configuration.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from functron.core.errors import Problem, refuse
from functron.core.settings import Need, Needs, setting
from functron.data.sampling import Gaps
from functron.optim import LimitState, set_limit_
from functron.training.loop import At, LoopHook

Record = Mapping[str, Any]


_ROLLBACK = Need(
    lambda c: "rollback" in (c.on_spike, c.on_nonfinite),
    "a rollback",
    "set on_spike or on_nonfinite to rollback",
)
ANOMALY_NEEDS: Needs = MappingProxyType(
    {
        "rollback_steps": _ROLLBACK,
        "skip_data": _ROLLBACK,
        "rate_factor": Need(
            lambda c: c.on_spike == "lower-rate", "a lower rate", "set on_spike to lower-rate"
        ),
        "most": Need(
            lambda c: _ROLLBACK.holds(c) or c.on_spike == "lower-rate",
            "rollbacks, or lower rates",
            "set on_spike to rollback or lower-rate",
        ),
    }
)
"""The needs of the fields of an `AnomalyConfig`, to have an effect."""


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

    on_nonfinite: Literal["stop", "rollback"] = "stop"
    on_spike: Literal["record", "stop", "skip", "rollback", "lower-rate"] = setting(
        "record", "common step"
    )
    window: int = 128
    minimum: int = 32
    threshold: float = 10.0
    rollback_steps: int = 0
    skip_data: bool = True
    rate_factor: float = 0.5
    most: int = 3
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


def anomaly_problems(config: AnomalyConfig, path: str = "anomalies") -> Iterator[Problem]:
    """Everything wrong with `config`."""
    least = {"window": 1, "minimum": 2, "rollback_steps": 0, "most": 0}
    for name, smallest in least.items():
        if (value := getattr(config, name)) < smallest:
            yield Problem(f"{path}.{name}", str(value), f"at least {smallest}")
    if config.window < config.minimum:
        wanted = f"at least {path}.minimum={config.minimum}"
        yield Problem(f"{path}.window", str(config.window), wanted)
    if not 0 < config.threshold < math.inf:
        yield Problem(f"{path}.threshold", f"{config.threshold:g}", "above 0, and finite")
    if not 0 < config.rate_factor < 1:
        yield Problem(f"{path}.rate_factor", f"{config.rate_factor:g}", "between 0 and 1")
    for name, read in (("skipped_samples", "gaps"), ("rate_factors", "factors")):
        try:
            getattr(config, read)
        except ValueError as error:
            detail = str(error).partition("wanted ")[2]
            yield Problem(f"{path}.{name}", repr(getattr(config, name)), detail or "ranges")


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


METRICS = ("loss", "grad_norm")
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
            metric: deque(maxlen=config.window + 1) for metric in METRICS
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
        for metric in METRICS:
            value = record.get(metric)
            if value is not None and not math.isfinite(value):
                return Anomaly("nonfinite", step, metric, value, None, own.on_nonfinite)
        for metric in METRICS:
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


def check_finite(record: Record, names: Sequence[str] = METRICS) -> None:
    """Raise FloatingPointError where one of these numbers of a record is not finite."""
    for name in names:
        if not math.isfinite(record.get(name) or 0.0):
            what = {"loss": "loss", "grad_norm": "gradients of norm"}[name]
            raise FloatingPointError(
                f"step {record['step']}: got {what} {record[name]}; wanted a finite number; fix: "
                "lower the learning rate, lengthen the warm-up, clip gradients, or train in float32"
            )


class FiniteHook(LoopHook):
    """Ends a loop with FloatingPointError where loss or gradients are not finite.

    After the hooks that write records, and before those that save.

    Args:
        skips: whether gradients need not be, since the step leaves out such updates.
    """

    def __init__(self, *, skips: bool = False):
        self._names = METRICS[:1] if skips else METRICS

    def after(self, at: At) -> None:
        """Check the record."""
        check_finite(at.record, self._names)


class OverflowHook(LoopHook):
    """Ends a loop where gradients overflow in step after step, and the scale of the loss is least.

    Args:
        patience: raise FloatingPointError after so many steps in a row.
        layers: ``(state, batch)`` to the names of the layers whose gradients then are not finite,
            for the message; it may give up the state. None: nobody knows.
    """

    def __init__(self, patience: int, layers: Callable[[Any, Any], Sequence[str]] | None = None):
        self._patience, self._layers = patience, layers

    def after(self, at: At) -> None:
        """Look at how many steps the optimizer has left out in a row."""
        if at.metrics.get("stuck", 0) < self._patience:
            return
        newest = at.newest  # the one whose state is whole
        names = [] if self._layers is None else self._layers(newest.state, newest.batch)
        where = f", in {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""
        raise FloatingPointError(
            f"step {at.step}: got gradients that are not finite in {self._patience} steps in a row"
            f"{where}, with the loss times {at.record['loss_scale']:g}, the least; wanted finite "
            "ones; fix: train in bf16 (--precision bf16), lower the learning rate, or lengthen the "
            "warm-up"
        )


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
        finite = all(math.isfinite(at.record.get(name) or 0.0) for name in METRICS)
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
        names = METRICS if self._overflows else METRICS[1:] if self._skips else ()
        return {**record, **dict.fromkeys(names)}

    def _left_out(self, record: Record) -> None:
        limit = self._limits.pop(record["step"], math.inf)
        norm = record.get("grad_norm")
        if norm is not None and math.isfinite(norm) and norm > limit:
            about = self._samples(record["step"] - 1)
            self.write("skip", record["step"], grad_norm=norm, limit=limit, **about)
