"""Estimates as results: figures, intervals, text, pictures and timelines of a step.

`functron.apps.planner.estimates` makes them. An interval is as wide as the machine's calibration
was wrong on runs that were held out, and wider for everything that the calibration did not have
(`list_doubts`): other software, quantised products, experts, long samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import NamedTuple

from functron.apps.planner.machines import Hardware, write_whole
from functron.apps.planner.software import Software
from functron.core import chart
from functron.core.tables import bytes_text, count_text, table

CONFIDENCE = 0.9
"""The probability of an estimate's interval, by the machine's calibration."""


class Lane(NamedTuple):
    """An interval of a row of the timeline.

    Attributes:
        row: such as ``"rank 0"`` or ``"rank 0, tp"``.
        what: the operation.
        start, end: in seconds.
        kind: "F", "B", "I", "W"; "compute"; "hidden" or "exposed" communication; "update".
    """

    row: str
    what: str
    start: float
    end: float
    kind: str


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """The time and memory of a step; prints as `explain`, and is drawn in notebooks.

    Attributes:
        name: of the step.
        hardware: the machine.
        software: that runs the program.
        num_gpus: of the mesh.
        tokens: per step, of all ranks.
        step_seconds: the expected time.
        parts: seconds by cause, which add up to `step_seconds`.
        exposed: by axis, seconds of communication that is not overlapped.
        sent: by axis, seconds of all communication of the rank that computes longest.
        bubble_seconds: waits for other ranks of the pipeline.
        model_flops: per step on all GPUs, half of causal attention; see `functron.program.cost`.
        model_flops_whole: with all of causal attention.
        hardware_flops: with recomputation.
        memory: of the fullest rank, bytes by category; empty: not estimated.
        lanes: the timeline.
        notes: limits of the estimate.
        doubts: by how far the step is from what was calibrated, standard deviations of
            log(measured / predicted) by cause; see `list_doubts`.
    """

    name: str
    hardware: Hardware
    software: Software
    num_gpus: int
    tokens: int
    step_seconds: float
    parts: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble_seconds: float
    model_flops: float
    model_flops_whole: float
    hardware_flops: float
    memory: Mapping[str, int] = field(default_factory=dict)
    lanes: tuple[Lane, ...] = ()
    notes: tuple[str, ...] = ()
    doubts: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> Mapping[str, float]:
        """By axis, seconds of communication under which the rank computes."""
        return {
            axis: max(0.0, seconds - self.exposed.get(axis, 0.0))
            for axis, seconds in self.sent.items()
        }

    @property
    def spread(self) -> float:
        """The standard deviation of log(measured / predicted).

        That of the machine's calibration on held-out model sizes, and all `doubts`. The spread of a
        software's own runs is over whole steps: what a calibrated machine misses is in it already.
        """
        made = self.hardware.calibration
        known = self.software.spread and made.rows
        return math.hypot(0.0 if known else made.spread, *self.doubts.values())

    @property
    def interval(self) -> tuple[float, float]:
        """The seconds between which a step is with probability `CONFIDENCE`, by its spread."""
        z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
        factor = math.exp(z * self.spread)
        return self.step_seconds / factor, self.step_seconds * factor

    @property
    def bubble_fraction(self) -> float:
        """The fraction of the step that is the pipeline's bubble."""
        return self.bubble_seconds / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.step_seconds

    def _find_utilisation(self, flops: float) -> float:
        peak = self.hardware.peak_flops.get("bfloat16") or max(self.hardware.peak_flops.values())
        return flops / self.step_seconds / self.num_gpus / peak

    @property
    def mfu(self) -> float:
        """Model FLOPs (half of causal attention) over the bfloat16 peak of all GPUs."""
        return self._find_utilisation(self.model_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs over the bfloat16 peak of all GPUs."""
        return self._find_utilisation(self.hardware_flops)

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s per GPU with all of causal attention, as publications report it."""
        return self.model_flops_whole / self.step_seconds / self.num_gpus

    def gpu_hours(self, tokens: float) -> float:
        """GPU hours of training on so many tokens."""
        return tokens / self.tokens_per_second * self.num_gpus / 3600

    def energy_joules(self, tokens: float) -> float:
        """The energy of training on so many tokens."""
        return self.gpu_hours(tokens) * 3600 * self.hardware.power_watts

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank; 0: not estimated."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.memory_bytes <= self.hardware.memory_bytes

    @property
    def limits(self) -> str:
        """The largest losses, in words."""
        lost = [(x, name) for name, x in self.parts.items() if name != "products"]
        rows = sorted(lost, reverse=True)[:3]
        return ", ".join(f"{name} {x / self.step_seconds:.0%}" for x, name in rows if x > 0)

    def explain(self) -> str:
        """The figures and the parts of the step, as text."""
        low, high = self.interval
        head = [
            f"{self.name} on {self.num_gpus:,} x {self.hardware.name}",
            f"step {self.step_seconds:.4g} s ({CONFIDENCE:.0%}: {low:.4g} to {high:.4g} s), "
            f"{self.tokens_per_second:,.0f} tokens/s, MFU {self.mfu:.1%}, HFU {self.hfu:.1%}, "
            f"{count_text(self.flops_per_gpu)}FLOP/s a GPU with whole attention",
            "",
        ]
        rows = [["part", "seconds", "of the step", "made of"]]
        for name, seconds in sorted(self.parts.items(), key=lambda row: -row[1]):
            share = f"{seconds / self.step_seconds:.1%}"
            rows.append([name, f"{seconds:.4g}", share, _MADE_OF.get(name, _OVER)])
        rows.append(["all", f"{sum(self.parts.values()):.4g}", "100.0%", ""])
        lines = [*head, table(rows)]
        if any(self.sent.values()):
            lines += ["", self._list_communication()]
        if self.memory:
            sizes = [["memory of the fullest rank", "bytes"]]
            sizes += [[name, bytes_text(x)] for name, x in self.memory.items()]
            has = f"{bytes_text(self.memory_bytes)} of {bytes_text(self.hardware.memory_bytes)}"
            lines += ["", table([*sizes, ["all", has]])]
        return "\n".join([*lines, "", *self._list_remarks()])

    def _list_communication(self) -> str:
        """The seconds of communication by axis as a table: all, hidden and exposed."""
        rows = [["communication over", "seconds", "hidden", "exposed", "of the step"]]
        for axis, seconds in sorted(self.sent.items(), key=lambda row: -row[1]):
            exposed, hidden = self.exposed.get(axis, 0.0), self.hidden[axis]
            cells = [f"{x:.4g}" for x in (seconds, hidden, exposed)]
            rows.append([axis, *cells, f"{exposed / self.step_seconds:.1%}"])
        return table(rows, left=1)

    def _list_remarks(self) -> list[str]:
        made = self.hardware.calibration
        if made.rows:
            seen = f"compared with {made.rows} measured runs of {made.software}"
        else:
            kin = f", efficiencies are those of {made.kin}" if made.kin else ""
            seen = f"never compared with a run{kin}"
        within = ", within that of its software" if self.software.spread and made.rows else ""
        rows = [f"{self.hardware.name}: {seen}; spread {made.spread:.1%}{within}"]
        listed = ", ".join(f"{name} {x:.0%}" for name, x in self.doubts.items())
        rows += [f"the interval allows for {listed}"] if listed else []
        return [*rows, *self.notes]

    def svg(self) -> str:
        """The timeline as an SVG picture: a row per rank, or per stream of a rank."""
        return self.bars().svg()

    def bars(self) -> chart.Gantt:
        """The timeline as data."""
        names = list(dict.fromkeys(lane.row for lane in self.lanes))
        boxes = [
            chart.SvgBar(
                names.index(lane.row), lane.start, lane.end, lane.what,
                f"{lane.what}: {lane.end - lane.start:.3g} s", _COLOURS[lane.kind],
            )
            for lane in self.lanes
        ]  # fmt: skip
        kinds = dict.fromkeys(lane.kind for lane in self.lanes)
        legend = [(_KINDS[kind], _COLOURS[kind]) for kind in kinds]
        return chart.Gantt(boxes, names, f"{self.name}: {self.step_seconds:.4g} s", legend)

    def chrome_trace(self, path: str | Path) -> None:
        """Write the timeline as JSON for chrome://tracing and Perfetto."""
        names = list(dict.fromkeys(lane.row for lane in self.lanes))
        events: list[dict] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}}
            for i, name in enumerate(names)
        ]
        for lane in self.lanes:
            start, end = round(lane.start * 1e9), round(lane.end * 1e9)  # whole nanoseconds
            row = {"ph": "X", "name": lane.what, "cat": lane.kind, "pid": 0}
            row |= {"tid": names.index(lane.row), "ts": start / 1e3, "dur": (end - start) / 1e3}
            events.append(row)
        write_whole(Path(path), json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        return self.explain()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        picture = self.svg() if self.lanes else ""
        return f"<div><pre>{self.explain()}</pre>{picture}</div>"


_MADE_OF = MappingProxyType(
    {
        "products": "FLOPs over the rate of their tiles and waves",
        "attention": "FLOPs over the rate of fused attention",
        "memory": "bytes of fused kernels over the memory's bandwidth, and launches",
        "bubble": "by simulation of the schedule, or by a formula",
        "sends": "between stages of the pipeline",
        "update": "bytes of gradients, moments and masters over the memory's bandwidth",
        "processor": "the CPU's time per step, and launches that take longer than kernels",
        "slowest GPU": "the expected maximum of all GPUs' times",
    }
)
_OVER = "bytes over the slowest link, and latency, without overlap"
_KINDS = MappingProxyType(
    {
        "F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights",
        "compute": "computed", "hidden": "hidden", "exposed": "exposed", "update": "update",
    }
)  # fmt: skip
_COLOURS = MappingProxyType(
    {
        "F": "hsl(215,60%,66%)", "B": "hsl(135,60%,66%)", "I": "hsl(175,60%,66%)",
        "W": "hsl(35,60%,66%)", "compute": "hsl(215,60%,66%)", "hidden": "hsl(35,60%,76%)",
        "exposed": "hsl(10,70%,50%)", "update": "hsl(280,40%,66%)",
    }
)  # fmt: skip


def compare_software(estimates: Iterable[Estimate]) -> str:
    """The time and memory of a step in several libraries, as a table."""
    rows = [["in other libraries", "seconds", f"{CONFIDENCE:.0%}", "memory"]]
    for one in estimates:
        low, high = one.interval
        seconds, memory = f"{one.step_seconds:.3g}", bytes_text(one.memory_bytes)
        rows.append([one.software.name, seconds, f"{low:.3g} to {high:.3g}", memory])
    return table(rows, left=1)


def list_doubts(
    hardware: Hardware,
    software: Software,
    *,
    quantised: bool = False,
    experts: bool = False,
    seq: int = 0,
) -> Mapping[str, float]:
    """By how far a step is from what its machine was calibrated with, by cause.

    Standard deviations of log(measured / predicted) over the rows of `benchmarks/plan_rows.py` that
    may be fitted; `benchmarks/plan.py` checks how many of the others the intervals hold.
    """
    found, made = {}, hardware.calibration
    if software.spread:
        found[f"what runs of {software.name} differ by"] = software.spread
    elif (made.rows or made.kin) and software.name not in made.software.split(", "):
        found[f"{software.name}, which the calibration does not know"] = _OTHER_SOFTWARE
    if quantised and not software.spread:  # whose runs have them
        found["quantised products"] = _QUANTISED
    if experts:
        found["experts"] = _EXPERTS
    if seq > _LONG:
        found["long samples"] = _DOUBLED * math.log2(seq / _LONG)
    return MappingProxyType(found)


_OTHER_SOFTWARE, _QUANTISED, _EXPERTS = 0.18, 0.05, 0.2
"""Of other software: the spread of what the paces of four libraries are fitted to."""
_LONG, _DOUBLED = 8192, 0.05
"""Tokens of a sample that are calibrated, and the doubt of each further doubling."""
