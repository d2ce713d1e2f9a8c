"""Published runs as `functron.apps.planner` predicts them, each by a fit without its model size.

python benchmarks/plan.py [--write] [--explain NAME] [--others [GROUP]]

Nothing is measured here. The layers of the published models are traced as functron's programs, in
the form that the software of the time gave them (`Layer`), and a few properties of the machines are
fitted to the published times: none of a model or a row. The table has held-out predictions alone.
With --others it is of runs of several libraries (`plan_rows.py`), by group, those that may be
fitted apart from those that are held out.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import torch
from plan_rows import PUBLISHED, Published, change, is_fitted
from torch import Tensor

import functron.apps.planner
from functron import nn
from functron.apps.planner import (
    Estimate,
    Hardware,
    PlannedStep,
    Software,
    StateBytes,
    TracedPieces,
    estimate_run,
    estimate_step,
    hardware,
    trace_pieces,
)
from functron.apps.planner.software import MEGATRON_2021, MEGATRON_2022, MEGATRON_2024
from functron.core.tables import table
from functron.models import gpt
from functron.models.config import GPTConfig
from functron.models.options import ModelOptions
from functron.pipeline import make
from functron.spmd import Mesh
from functron.spmd import collectives as lax
from functron.transforms import remat

# --- the layers of the published runs


@dataclass(frozen=True)
class Layer:
    """A layer as Megatron-LM computes it: a hook for `ModelOptions.block`.

    Attributes:
        attention: ``"unfused"``: scores are written, scaled, masked and exponentiated by one
            kernel, and dropped; ``"flash"``.
        dropout: masks of a byte are kept, of what sublayers add and of unfused scores. They are
            made of the values themselves: the same bytes move, and nothing is drawn.
        selective: the core of attention is computed again (Korthikanti et al. 2022, section 5).
    """

    attention: Literal["unfused", "flash"]
    dropout: bool
    selective: bool = False

    def __call__(self, layer: Any, weights: dict, x: Tensor, context: Any = None) -> Tensor:
        """The residual stream after the layer, which gathers the tokens of all ranks itself."""
        sequence = "tp" in (layer.options.stream[1] or ())
        own, mlp = weights["attention"], weights["mlp"]
        y = layer.norm(weights, "attention_norm", x)
        q, k, v = self._columns(y, own["qkv"], sequence).unbind(-2)
        core = remat(self._core) if self.selective else self._core
        y = self._rows(core(q, k, v), own["out"], sequence)
        x = x + self._dropped(y)
        y = layer.norm(weights, "mlp_norm", x)
        y = torch.nn.functional.gelu(self._columns(y, mlp["up"], sequence))
        return x + self._dropped(self._rows(y, mlp["down"], sequence))

    def _columns(self, y: Tensor, linear: dict, sequence: bool) -> Tensor:
        """``y w + b``, gathered before, and again in backward, where ranks split the sequence."""

        def product(y: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y = lax.all_gather(y, "tp", axis=1, tiled=True) if sequence else y
            return (y @ w.flatten(1)).unflatten(-1, w.shape[1:]) + b

        return (remat(product) if sequence else product)(y, linear["w"], linear["b"])

    def _rows(self, y: Tensor, linear: dict, sequence: bool) -> Tensor:
        w = linear["w"].flatten(0, -2)
        y = y.flatten(2) @ w
        if sequence:
            return lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True) + linear["b"]
        return lax.psum(y, "tp") + linear["b"]

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.attention == "flash":
            return nn.causal_attention(q, k, v)
        rows, seq, heads, dim = q.shape
        q, k, v = (z.transpose(1, 2).reshape(rows * heads, seq, dim) for z in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * (1 / math.sqrt(dim))
        places = torch.arange(seq, device=q.device)
        scores = torch.where(places[:, None] >= places, scores, -1e4)
        shares = self._dropped(torch.softmax(scores, -1))
        out = torch.bmm(shares, v).view(rows, heads, seq, dim)
        return out.transpose(1, 2)

    def _dropped(self, y: Tensor) -> Tensor:
        return y * (y != 0.125) if self.dropout else y


# --- the published rows


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        name: of its model size, which rows are held out by.
        variant: which of several runs of that size.
        source: where it was published.
        machine: the name of the hardware.
        software: how it was run.
        hidden, layers, heads, vocab, seq: the model.
        mesh: axes and sizes.
        batch: samples per step.
        rows: samples of a microbatch; several where the source does not say: the fastest is taken.
        chunks: stages per rank of the pipeline; several likewise.
        remat: what is computed again.
        sequence: the sequence of the residual stream is split.
        seconds: of a step; 0: by `flops_per_gpu`.
        flops_per_gpu: as published; `formula` says how that counts.
        activation_gib: of the fullest rank; 0: not published.
        zero: as of `Step`.
    """

    name: str
    variant: str
    source: str
    machine: str
    software: Software
    hidden: int
    layers: int
    heads: int
    mesh: Mesh
    batch: int
    rows: tuple[int, ...]
    vocab: int = 51200
    seq: int = 2048
    chunks: tuple[int, ...] = (1,)
    remat: Literal["none", "selective", "full"] = "full"
    sequence: bool = False
    seconds: float = 0.0
    flops_per_gpu: float = 0.0
    formula: Callable[[Row], float] | None = None
    activation_gib: float = 0.0
    zero: int = 0

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        if self.formula is None:
            return self.seconds
        return self.formula(self) / (self.flops_per_gpu * 1e12 * self.mesh.size)

    @property
    def title(self) -> str:
        """Its name and variant."""
        return f"{self.name} {self.variant}".strip()


def sc21_flops(row: Row) -> float:
    """Of a step, with what is computed again: Narayanan et al. 2021, equation 3."""
    s, h, v, n = row.seq, row.hidden, row.vocab, row.layers
    return 96 * row.batch * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))


def readme_flops(row: Row) -> float:
    """Of a step, whole attention, nothing again: Megatron-LM's README; Chowdhery et al. 2022."""
    s, h, v, n = row.seq, row.hidden, row.vocab, row.layers
    return 72 * row.batch * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))


def _sc21() -> list[Row]:
    """Narayanan et al. 2021, table 1; microbatches and chunks by Megatron-LM's run_table_1.sh."""
    source = "Narayanan et al. 2021, table 1"
    # name, hidden, layers, heads, tp, pp, GPUs, batch, TFLOP/s, samples of a microbatch, chunks
    found = [
        ("1.7B", 2304, 24, 24, 1, 1, 32, 512, 137, 16, 1),
        ("3.6B", 3072, 30, 32, 2, 1, 64, 512, 138, 16, 1),
        ("7.5B", 4096, 36, 32, 4, 1, 128, 512, 142, 16, 1),
        ("18B", 6144, 40, 48, 8, 1, 256, 1024, 135, 8, 1),
        ("39B", 8192, 48, 64, 8, 2, 512, 1536, 138, 4, 1),
        ("76B", 10240, 60, 80, 8, 4, 1024, 1792, 140, 2, 3),
        ("145B", 12288, 80, 96, 8, 8, 1536, 2304, 148, 2, 2),
        ("310B", 16384, 96, 128, 8, 16, 1920, 2160, 155, 1, 2),
        ("530B", 20480, 105, 128, 8, 35, 2520, 2520, 163, 1, 3),
        ("1T", 25600, 128, 160, 8, 64, 3072, 3072, 163, 1, 1),
    ]
    return [
        Row(
            name, "SC21", source, "a100", MEGATRON_2021, hidden, layers, heads,
            Mesh(pp=pp, dp=gpus // (tp * pp), tp=tp), batch, (rows,), chunks=(chunks,),
            flops_per_gpu=rate, formula=sc21_flops,
        )
        for name, hidden, layers, heads, tp, pp, gpus, batch, rate, rows, chunks in found
    ]  # fmt: skip


def _korthikanti() -> list[Row]:
    """Korthikanti et al. 2022, table 5 and figure 7; microbatches of table 3."""
    source = "Korthikanti et al. 2022, table 5"
    found = []
    for name, hidden, layers, heads, pp, chunks, batch, rows, full, both, gib, less in (
        ("22B", 6144, 48, 64, 1, 1, 4, 4, 1.42, 1.10, 59.3, 9.6),
        ("530B", 20480, 105, 128, 35, 3, 280, 1, 49.05, 37.83, 114.0, 23.1),
    ):
        base = Row(
            name, "full recomputation", source, "a100", MEGATRON_2022, hidden, layers, heads,
            Mesh(pp=pp, tp=8), batch, (rows,), chunks=(chunks,), seconds=full,
        )  # fmt: skip
        less_again = {"remat": "selective", "sequence": True}
        none = {"remat": "none", "seconds": 0.0}
        found += [
            base,
            replace(base, variant="sequence parallel, selective", seconds=both,
                    activation_gib=less, **less_again),
            replace(base, variant="nothing again", activation_gib=gib, **none),
        ]  # fmt: skip
    return found


def _readme() -> list[Row]:
    """Megatron-LM's README of 2024, H100; it says neither microbatches nor chunks."""
    source = "Megatron-LM, README.md, 2024"
    # name, hidden, layers, heads, tp, pp, GPUs, batch, TFLOP/s, chunks
    found = [
        ("1.7B", 2048, 24, 16, 1, 1, 48, 192, 408.8, (1,)),
        ("70B", 8192, 84, 64, 8, 2, 768, 384, 419.7, (1, 3, 7)),
        ("462B", 18432, 112, 144, 8, 16, 6144, 3072, 459.9, (1, 7)),
    ]
    return [
        Row(
            name, "H100", source, "h100", MEGATRON_2024, hidden, layers, heads,
            Mesh(pp=pp, dp=gpus // (tp * pp), tp=tp), batch, (1, 2, 4), vocab=131072, seq=4096,
            chunks=chunks, remat="none", sequence=tp > 1, flops_per_gpu=rate,
            formula=readme_flops, zero=1,
        )
        for name, hidden, layers, heads, tp, pp, gpus, batch, rate, chunks in found
    ]  # fmt: skip


ROWS: tuple[Row, ...] = (*_sc21(), *_korthikanti(), *_readme())
"""Every published row that is compared with."""


# --- predictions


@functools.cache
def traced(row: Row, rows: int) -> TracedPieces:
    """The pieces of a row's model, for so many samples of a microbatch."""
    modern = row.software is MEGATRON_2024
    config = GPTConfig(
        vocab_size=row.vocab, num_layers=row.layers, embed_dim=row.hidden, num_heads=row.heads,
        mlp_dim=4 * row.hidden, max_seq=row.seq, norm="layer", activation="gelu", gated=False,
        bias=True, positions="learned", tied=not modern, vocab_multiple=128 * row.mesh["tp"],
        dtype="bfloat16" if modern else "float16", fused_projections=True,
    )  # fmt: skip
    layer = Layer("flash" if modern else "unfused", not modern, row.remat == "selective")
    again = "full" if row.remat == "full" else "none"
    stream = gpt.SEQUENCE_PARALLEL_STREAM if row.sequence else gpt.STREAM
    options = ModelOptions(stream, again, block=layer)
    sums = torch.float16 if row.software is MEGATRON_2021 else torch.float32
    mesh = Mesh(tp=row.mesh["tp"])
    return trace_pieces(config, mesh, options, rows=rows, seq=row.seq, grad_dtype=sums)


@functools.cache
def steps(row: Row) -> tuple[PlannedStep, ...]:
    """The steps that a row may have been: of every choice that the source leaves open."""
    found = []
    each = row.batch // row.mesh["dp"]
    state = StateBytes(grad=2 if row.software is MEGATRON_2021 else 4, optimizer=16)
    for rows in row.rows:
        for chunks in row.chunks:
            if each % rows or (chunks > 1 and each // rows % row.mesh["pp"]):
                continue
            kind = ("interleaved" if chunks > 1 else "1f1b", chunks)
            found.append(PlannedStep(
                traced(row, rows), row.mesh, each // rows, *kind, zero=row.zero, state=state
            ))  # fmt: skip
    return tuple(found)


def predicted(row: Row, machine: Hardware, exact: bool = False) -> Estimate:
    """The estimate of a row; of the choices that its source leaves open, the fastest that fits."""
    made = [estimate_step(step, machine, software=row.software, exact=exact) for step in steps(row)]
    fits = [each for each in made if each.fits] or made
    return min(fits, key=lambda each: each.step_seconds)


# --- the fit


@dataclass(frozen=True)
class Free:
    """A property of machines that is fitted.

    Attributes:
        path: of the entry in their files.
        machines: that have it in common.
        start: where the fit begins, which is its most likely value before.
        spread: by what factor it may well differ, as the logarithm.
    """

    path: str
    machines: tuple[str, ...]
    start: float
    spread: float


Values = Sequence[float] | np.ndarray

BOTH = ("a100", "h100")
FREE: tuple[Free, ...] = (
    Free("matmul.efficiency", ("a100",), 0.82, 0.1),
    Free("matmul.efficiency", ("h100",), 0.70, 0.1),
    Free("matmul.overhead_k", BOTH, 96.0, 0.5),
    Free("memory.efficiency", BOTH, 0.85, 0.1),
    Free("domain.efficiency", BOTH, 0.75, 0.1),
    Free("network.efficiency", BOTH, 0.70, 0.3),
    Free("kernel_seconds", BOTH, 3e-6, 0.5),
    Free("host.step_seconds", BOTH, 0.03, 0.7),
    Free("jitter", BOTH, 0.004, 0.7),
)
"""Properties that no data sheet has, with what was known of them before any row."""

NOISE = 0.03
"""By how much rows may differ from the model, as the logarithm: against `Free.spread`."""


def machines_of(values: Values) -> dict[str, Hardware]:
    """The machines with these values of `FREE`."""
    found = {name: hardware(name) for name in BOTH}
    for free, value in zip(FREE, values, strict=True):
        for name in free.machines:
            found[name] = change(found[name], free.path, float(value))
    return found


TIMED = tuple(row for row in ROWS if row.measured)
"""The rows that have a time."""


def errors(values: Values, rows: Sequence[Row] = TIMED) -> np.ndarray:
    """log(predicted / measured) of each row."""
    known = machines_of(values)
    seconds = [predicted(row, known[row.machine]).step_seconds for row in rows]
    return np.log(np.array(seconds) / np.array([row.measured for row in rows]))


def fitted(use: np.ndarray, start: np.ndarray, slopes: np.ndarray, found: np.ndarray) -> np.ndarray:
    """One step of Gauss and Newton from `start`, in logarithms, by the rows in `use`.

    The most likely values, where rows have the spread `NOISE` and properties theirs.

    Args:
        use: which rows, as booleans.
        start: logarithms of the values that `slopes` and `found` are at.
        slopes: of the rows' errors.
        found: these errors.
    """
    before = np.log([free.start for free in FREE])
    widths = np.array([free.spread for free in FREE])
    a = np.concatenate([slopes[use] / NOISE, np.diag(1 / widths)])
    b = np.concatenate([found[use] / NOISE, (start - before) / widths])
    step = np.linalg.lstsq(a, -b, rcond=None)[0]
    made = start + np.clip(step, -0.5, 0.5)
    return np.minimum(made, [0.0 if "efficiency" in free.path else np.inf for free in FREE])


def slopes_at(logs: np.ndarray, found: np.ndarray) -> np.ndarray:
    """How the rows' errors change with the logarithm of each value."""
    columns = []
    for index in range(len(FREE)):
        moved = logs.copy()
        moved[index] -= 0.02
        columns.append((found - errors(np.exp(moved))) / 0.02)
    return np.stack(columns, 1)


@dataclass(frozen=True)
class Fit:
    """The machines as rows of measured runs say that they are.

    Attributes:
        values: of `FREE`, by all rows.
        errors: of the rows, by all.
        held_out: of each row by the fit to the rows of other model sizes.
    """

    values: np.ndarray
    errors: np.ndarray
    held_out: np.ndarray


def fit(turns: int = 4) -> Fit:
    """Fit all rows, and for each model size those of the others."""
    everything = np.ones(len(TIMED), dtype=bool)
    logs = np.log([free.start for free in FREE])
    for _ in range(turns):
        found = errors(np.exp(logs))
        slopes = slopes_at(logs, found)
        logs = fitted(everything, logs, slopes, found)
    found = errors(np.exp(logs))
    slopes = slopes_at(logs, found)
    held = np.zeros(len(TIMED))
    for name in dict.fromkeys(row.name for row in TIMED):
        out = np.array([row.name == name for row in TIMED])
        values = np.exp(fitted(~out, logs, slopes, found))
        held[out] = errors(values, [row for row in TIMED if row.name == name])
    return Fit(np.exp(logs), found, held)


# --- the table


def spread_of(held_out: np.ndarray) -> float:
    """The spread of a further row, as the logarithm: wider than those of few rows."""
    count = len(held_out)
    return math.sqrt(np.mean(held_out**2) * (count + 1) / (count - 1))


def spreads(made: Fit) -> dict[str, float]:
    """Of each machine, by the rows that were held out."""
    of = {name: np.array([row.machine == name for row in TIMED]) for name in BOTH}
    return {name: spread_of(made.held_out[rows]) for name, rows in of.items()}


def report(made: Fit) -> str:
    """The tables: held-out times, activation memory, and what was fitted."""
    known, lines = spreads(made), []
    z = NormalDist().inv_cdf(0.95)
    rows = [["run", "machine", "GPUs", "measured s", "predicted s", "90% interval", "error", "in"]]
    inside = 0
    for row, error in zip(TIMED, made.held_out, strict=True):
        seconds, factor = row.measured * math.exp(error), math.exp(z * known[row.machine])
        hit = 1 / factor <= math.exp(-error) <= factor
        inside += hit
        rows.append([
            row.title, row.machine, f"{row.mesh.size:,}", f"{row.measured:.3f}", f"{seconds:.3f}",
            f"{seconds / factor:.3f} to {seconds * factor:.3f}", f"{math.expm1(error):+.1%}",
            "yes" if hit else "no",
        ])  # fmt: skip
    off = np.abs(np.expm1(made.held_out))
    lines += ["step times, each by the rows of other model sizes", table(rows, left=2)]
    lines.append(
        f"mean error {off.mean():.1%}, worst {off.max():.1%}; {inside} of {len(TIMED)} in their "
        f"interval (of the fit to all rows: mean {np.abs(np.expm1(made.errors)).mean():.1%})"
    )
    rows = [["run", "published GiB", "traced GiB", "error"]]
    for row in ROWS:
        if row.activation_gib:
            found = activation_gib(row)
            off_by = f"{found / row.activation_gib - 1:+.1%}"
            rows.append([row.title, f"{row.activation_gib:.1f}", f"{found:.1f}", off_by])
    lines += ["", "activations of layers on the fullest rank: traced, nothing fitted", table(rows)]
    rows = [["property", "machines", "before", "fitted"]]
    for free, value in zip(FREE, made.values, strict=True):
        both = " ".join(free.machines)
        rows.append([free.path, both, f"{free.start:g}", f"{value:.3g}"])
    lines += ["", "what was fitted, by all rows", table(rows, left=2), "", MISSES]
    return "\n".join(lines)


MISSES = """\
What is missed, and why:
* 76B of SC21 is predicted 6% faster than it was. Its neighbours, 39B and 145B, are right to 2%; a
  property of the machine that would explain it would move them too.
* 22B with full recomputation is one microbatch in 1.4 s, where what a step costs the processor
  counts most. Without the rows of 22B only the smallest others say how much that is.
* The README does not say what microbatches and chunks its runs had: the fastest that fits is taken,
  and the smallest run, 1.7B, is then predicted too fast.
* The shape of the model (which kernels are apart, that a step costs the processor something, that
  products add to sums) was chosen with all rows in view; only the values are held out."""


# --- other libraries


@functools.cache
def estimated(row: Published) -> Estimate:
    """The estimate of a row."""
    return estimate_run(row.run, row.hardware, software=row.software)


def seconds_at(row: Published, pace: float) -> float:
    """The step's seconds at another pace of its software, by the parts of a step."""
    found = estimated(row)
    paced = found.parts["products"] + found.parts["attention"]
    return found.step_seconds + paced * (row.software.pace / pace - 1)


def tells_pace(row: Published) -> bool:
    """Whether a row says how fast its software is, and not how wrong another part of a plan.

    On machines that are calibrated, of dense models, in samples of a usual length.
    """
    usual = row.group not in ("mixtures of experts", "long context") and not row.guessed
    return usual and bool(row.software.spread and row.hardware.calibration.rows)


def fit_pace(rows: Sequence[Published]) -> float:
    """The most likely pace: rows have the spread 0.1, and paces 0.3 around 1 before any row."""
    tried = np.exp(np.linspace(math.log(0.4), math.log(1.6), 400))
    measured = np.log([row.seconds for row in rows])
    off = [np.log([seconds_at(row, x) for row in rows]) - measured for x in tried]
    loss = [
        np.sum((one / 0.1) ** 2) + (math.log(x) / 0.3) ** 2
        for one, x in zip(off, tried, strict=True)
    ]
    return float(tried[int(np.argmin(loss))])


def _describe(row: Published, seconds: float) -> list[str]:
    low, high = (x / estimated(row).step_seconds * seconds for x in estimated(row).interval)
    return [
        row.name, row.software.name, row.machine, f"{row.seconds:.3f}", f"{seconds:.3f}",
        f"{low:.3f} to {high:.3f}", f"{seconds / row.seconds - 1:+.1%}",
        "yes" if low <= row.seconds <= high else "no", row.guessed,
    ]  # fmt: skip


def report_others(rows: Sequence[Published] = PUBLISHED) -> str:
    """Tables by group, and every software's pace."""
    head = ["run", "software", "machine", "published s", "predicted s", "90% interval", "error"]
    head += ["in", "not published"]
    lines, summary = [], [["group", "held out", "mean error", "worst", "in their interval"]]
    inside = total = 0
    for group in dict.fromkeys(row.group for row in rows):
        same = [row for row in rows if row.group == group]
        held = [row for row in same if not is_fitted(row)]
        found = {row: _describe(row, estimated(row).step_seconds) for row in same}
        made = [cells for row, cells in found.items() if is_fitted(row)]
        lines += [f"{group}: may be fitted", table([head, *made], left=3), ""]
        made = [found[row] for row in held]
        lines += [f"{group}: held out", table([head, *made], left=3), ""]
        off = [abs(estimated(row).step_seconds / row.seconds - 1) for row in held]
        hits = sum(cells[-2] == "yes" for cells in made)
        inside, total = inside + hits, total + len(held)
        numbers = (
            [f"{np.mean(off):.1%}", f"{max(off):.1%}", f"{hits} of {len(held)}"] if off else []
        )
        summary.append([group, str(len(held)), *numbers])
    lines += ["held out, by group", table(summary, left=1)]
    lines += [f"{inside} of {total} in their interval", "", *_report_paces(rows)]
    return "\n".join(lines)


def _report_paces(rows: Sequence[Published]) -> list[str]:
    """By software: its pace, without each of its model sizes, and of other software."""
    may = [row for row in rows if is_fitted(row) and tells_pace(row)]
    found = [["software", "pace", "fitted", "without a size: mean error", "by other software"]]
    for software in dict.fromkeys(row.software for row in may):
        own = [row for row in may if row.software == software]
        others = [row for row in may if row.software != software]
        off = []
        for row in own:
            without = fit_pace([one for one in own if one.model != row.model])
            off.append(abs(seconds_at(row, without) / row.seconds - 1))
        pace = fit_pace(others)
        alone = [abs(seconds_at(row, pace) / row.seconds - 1) for row in own]
        found.append([
            software.name, f"{software.pace:.3g}", f"{fit_pace(own):.3g}",
            f"{np.mean(off):.1%} of {len(own)}", f"{np.mean(alone):.1%}",
        ])  # fmt: skip
    return ["what is fitted, leaving out one size, and one software", table(found, left=1)]


def activation_gib(row: Row) -> float:
    """The bytes that layers of the first rank keep at the peak of its schedule."""
    (step,) = steps(row)
    ((piece, _),) = row_layers(step)
    stage = row.layers / (row.mesh["pp"] * step.chunks)
    return live(step) * stage * piece.held_bytes[0] / 2**30


def row_layers(step: PlannedStep) -> list[tuple[Any, tuple[int, ...]]]:
    """The one kind of layers that these models have."""
    return list(step.pieces.layers.values())


def live(step: PlannedStep) -> int:
    """The stages' activations that the first rank keeps at a time, by the schedule."""
    few = min(step.num_microbatches, 2 * step.num_ranks)
    chunks = step.chunks if step.chunks > 1 else None
    return make(step.schedule, step.num_ranks, few, chunks).peak_live(0)


def write(made: Fit) -> None:
    """Put the fitted values into the files of the machines, and of those that follow them."""
    folder = Path(functron.apps.planner.__file__).parent / "machine_files"
    known = spreads(made)
    kin = {"a100": ("a100",), "h100": ("h100", "h200", "b200", "gb200")}
    for free, value in zip(FREE, made.values, strict=True):
        for name in (x for machine in free.machines for x in kin[machine]):
            section, _, entry = free.path.rpartition(".")
            if section == "matmul" and entry == "efficiency" and name in ("b200", "gb200"):
                continue  # which have their own
            put(folder / f"{name}.toml", section, entry, f"{value:.3g}")
    for name in BOTH:
        count = sum(row.machine == name for row in TIMED)
        put(folder / f"{name}.toml", "calibration", "rows", str(count))
        put(folder / f"{name}.toml", "calibration", "spread", f"{known[name]:.3g}")


def put(path: Path, section: str, entry: str, value: str) -> None:
    """Change a value of a TOML file, and leave its comments."""
    lines, here = path.read_text().splitlines(), ""
    for index, line in enumerate(lines):
        found = re.match(r"\[(\w+)\]", line)
        here = found[1] if found else here
        if here == section and re.match(rf"{entry} = ", line):
            lines[index] = re.sub(r"= \S+", f"= {value}", line, count=1)
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("--write", action="store_true", help="put the values into the machines")
    parser.add_argument("--explain", metavar="NAME", help="the parts of the runs of a model size")
    other = "runs of several libraries, instead: of groups with this in their name, or of all"
    parser.add_argument("--others", nargs="?", const="", metavar="GROUP", help=other)
    options = parser.parse_args()
    if options.others is not None:
        print(report_others([row for row in PUBLISHED if options.others in row.group]))
        return
    made = fit()
    print(report(made))
    for row in TIMED:
        if options.explain == row.name:
            machine = machines_of(made.values)[row.machine]
            print(f"\n{row.title}, {row.source}\n{predicted(row, machine, exact=True)}")
    if options.write:
        write(made)


RAW = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
