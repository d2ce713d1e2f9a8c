"""Pictures with matplotlib: losses, router loads, norms by layer, timelines, memory, communication.

Functions take data (histories of records, run folders, programs, schedules) and draw on axes, which
they return: ``viz.loss_curves("run", ax=ax)``. `live` draws while a loop runs. matplotlib comes
with the extra ``notebooks``, and is imported at use.
"""

from __future__ import annotations

import base64
import colorsys
import io
import itertools
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from functron.core.chart import Gantt, smooth
from functron.core.errors import public, refuse
from functron.core.tables import bytes_text
from functron.program.cost import sent_bytes
from functron.program.equations import Code
from functron.program.memory import CATEGORIES, ProgramMemory
from functron.program.memory import memory as measure_memory
from functron.program.text import axis_of
from functron.spmd import Mesh
from functron.training import records
from functron.training.loop import At, LoopHook

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "communication",
    "communication_matrix",
    "gradient_norms",
    "live",
    "loss_curves",
    "memory",
    "router_load",
    "timeline",
]


def _new_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    return _import_pyplot().subplots(figsize=size)[1]


def _import_pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "viz: got no matplotlib; wanted it installed; fix: pip install 'functron[notebooks]'",
            name="matplotlib",
        ) from error
    return plt


# --- curves of runs


@public
def loss_curves(
    runs: Any,
    *,
    name: str = "loss",
    by: str = "step",
    smoothed: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """A curve of a number of records for each run, and dots for the losses of held-out sets.

    Args:
        runs: a run: its history (a list of records, as ``record_to(history.append)`` makes it, or
            of numbers), its folder or its metrics.jsonl; or several by their names; or what
            `functron.training.compare` returns.
        name: of the number, such as ``"grad_norm"``; of nested ones ``"layers/embed/grad_norm"``.
        by: the number across, such as ``"tokens"``; of steps that were taken again the last counts.
        smoothed: draw means over a twentieth of the steps.

    Raises:
        ValueError: a run has no record with the number.
    """
    if isinstance(runs, records.Comparison):
        named = {run: dict(curve) for run, curve in runs.curves.items()}
        by, name, held_out = runs.x_label, "loss", {}
    else:
        given = runs if isinstance(runs, Mapping) else {"": runs}
        histories = {run: _read_history(history) for run, history in given.items()}
        named = {run: _points(history, name, by) for run, history in histories.items()}
        held_out = {run: _held_out(history, by) for run, history in histories.items()}
    ax = _new_axes(ax, (7, 3))
    for run, found in named.items():
        if not found:
            got = f"no record of {run!r} with it" if run else "no record with it"
            refuse("nothing to draw", name, got, "a number of the records", "name another one")
        points = smooth([*found.items()]) if smoothed else [*found.items()]
        (line,) = ax.plot(*zip(*points, strict=True), label=run or None)
        for each, losses in held_out.get(run, {}).items() if name == "loss" else ():
            label = "/".join(filter(None, (run, each)))
            dots = zip(*losses.items(), strict=True)
            ax.plot(*dots, "o", color=line.get_color(), markersize=4, label=label)
    ax.set(xlabel=by, ylabel="loss (nats per token)" if name == "loss" else name)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize=8)
    return ax


def _read_history(run: Any) -> Sequence[Any]:
    if isinstance(run, str | Path):
        path = Path(run)
        return records.read(path / records.METRICS if path.is_dir() else path)
    return list(run)


def _points(history: Sequence[Any], name: str, by: str) -> dict[float, float]:
    """The number of each step."""
    found = {}
    for index, record in enumerate(history):
        value: Any = record
        for part in name.split("/") if isinstance(record, Mapping) else ():
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            found[record.get(by, index) if isinstance(record, Mapping) else index] = float(value)
    return found


def _held_out(history: Sequence[Any], by: str) -> dict[str, dict[float, float]]:
    """The losses of held-out sets by their names."""
    kept = [r for r in history if isinstance(r, Mapping) and records.EVAL in r]
    names = dict.fromkeys(name for record in kept for name in record[records.EVAL])
    return {name: _points(kept, f"{records.EVAL}/{name}/loss", by) for name in names}


class LiveCurves(LoopHook):
    """A hook that draws numbers of records while a loop runs; made by `live`.

    Attributes:
        history: the records so far.
        picture: the last one, a PNG; b"" before the first.
    """

    def __init__(self, names: Sequence[str], every_seconds: float):
        self.history: list[dict[str, Any]] = []
        self.picture = b""
        self._names, self._every, self._drawn = tuple(names), every_seconds, 0.0
        self._show = records.open_display()

    def after(self, at: At) -> None:
        """Keep the record, and draw where it is time."""
        self.history.append(dict(at.record))
        if self._show is not None and time.monotonic() - self._drawn > self._every:
            self._draw()

    def end(self, at: At) -> None:
        """Draw all of it."""
        if self.history:
            self._draw()

    def _draw(self) -> None:
        pyplot, count = _import_pyplot(), len(self._names)
        figure, axes = pyplot.subplots(1, count, figsize=(4.5 * count, 2.6), squeeze=False)
        for name, ax in zip(self._names, axes[0], strict=True):
            if _points(self.history, name, "step"):
                loss_curves(self.history, name=name, ax=ax)
        figure.tight_layout()
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=80)
        pyplot.close(figure)
        self.picture, self._drawn = stream.getvalue(), time.monotonic()
        if self._show is not None:
            self._show({"image/png": base64.b64encode(self.picture).decode()})


@public
def live(names: str | Sequence[str] = "loss", *, every_seconds: float = 1.0) -> LiveCurves:
    """A hook for `functron.training.loop` that draws curves in the notebook's cell that runs.

    ``loop(step, state, batches, steps=100, hooks=[viz.live(["loss", "grad_norm"])])``. Give it
    after the hooks that complete records. Outside of notebooks it draws once, at the end:
    `LiveCurves.picture`.

    Args:
        names: of numbers in records, as of `loss_curves`; a picture each.
        every_seconds: that pass between two drawings.
    """
    _import_pyplot()
    return LiveCurves([names] if isinstance(names, str) else names, every_seconds)


# --- heat maps


@public
def router_load(loads: Any, *, ax: Axes | None = None) -> Axes:
    """The load of experts over steps, as a heat map; or the busiest expert's, of records.

    Args:
        loads: ``[steps, experts]``, tokens of each expert; of several layers
            ``[steps, layers, experts]``, whose loads are shown side by side. Or a history, a run's
            folder, or several by name, whose ``router_load_ratio`` is drawn: the load of the
            busiest expert over the mean.
    """
    if not isinstance(loads, torch.Tensor | np.ndarray):
        return loss_curves(loads, name="router_load_ratio", ax=ax)
    values = torch.as_tensor(loads).detach().double().cpu()
    ax = _new_axes(ax, (7, 3))
    share = values / values.sum(-1, keepdim=True).clamp_min(1e-9) * values.shape[-1]
    image = ax.imshow(share.flatten(1).T, aspect="auto", interpolation="none", cmap="magma", vmin=0)
    label = "expert" if values.dim() == 2 else "expert of a layer, layer after layer"
    ax.set(xlabel="step", ylabel=label)
    ax.figure.colorbar(image, ax=ax, label="load over the mean")
    return ax


@public
def gradient_norms(history: Any, *, what: str = "grad_norm", ax: Axes | None = None) -> Axes:
    """A number of every layer over steps as a heat map, logarithmic; of records with ``layers``.

    Args:
        history: records, or a run's folder; those of steps that measured layers
            (``functron train --log-layers-every 10``) count.
        what: ``"grad_norm"``, ``"param_norm"`` or ``"activation_rms"``.

    Raises:
        ValueError: no record has it.
    """
    rows = [r for r in _read_history(history) if isinstance(r, Mapping) and "layers" in r]
    found = (n for r in rows for n, numbers in r["layers"].items() if what in numbers)
    names = [*dict.fromkeys(found)]
    if not names:
        fix = "measure them: functron train --log-layers-every 10"
        refuse("nothing to draw", what, "no record with it", "records with layers", fix)
    table = [[r["layers"].get(name, {}).get(what, math.nan) for r in rows] for name in names]
    values = np.log10(np.maximum(np.array(table, dtype=float), 1e-30))
    ax = _new_axes(ax, (7, 0.6 + 0.22 * max(len(names), 8)))
    steps = [r["step"] for r in rows]
    image = ax.imshow(values, aspect="auto", interpolation="none", cmap="viridis")
    shown = range(0, len(steps), -(-len(steps) // 8))
    ax.set(xlabel="step", xticks=[*shown], xticklabels=[str(steps[k]) for k in shown])
    ax.set(yticks=range(len(names)), yticklabels=names)
    ax.figure.colorbar(image, ax=ax, label=f"log10 {what}")
    return ax


@public
def communication_matrix(program: Code) -> torch.Tensor:
    """The bytes that each rank sends to each in one run: float64 ``[ranks, ranks]``.

    All-reduces, gathers and scatters as rings over their axis, all-to-alls evenly to all, and
    ppermutes along their pairs. So a row adds up to what ``program.cost()`` says of all axes, but
    for ranks that a ppermute has nothing to send from.
    """
    mesh = Mesh(**dict(program.mesh.axes))
    if mesh.size > 4096:
        fix = "trace it on a smaller mesh"
        refuse("no matrix of so many ranks", "program", f"{mesh.size} ranks", "4096 at most", fix)
    pairs: dict[tuple[str, int, int], float] = {}
    for equation, times in program.block.walk():
        axis = axis_of(equation)
        if axis is None:
            continue
        count, sent = mesh[axis], times * sent_bytes(equation)
        links = [(i, (i + 1) % count, sent) for i in range(count)]
        if equation.name == "ppermute":
            links = [(*pair, sent) for pair in zip(*equation.args[3:5], strict=True)]
        elif "all_to_all" in equation.name:
            everyone = itertools.permutations(range(count), 2)
            links = [(i, j, sent / (count - 1)) for i, j in everyone]
        for source, target, each in links:
            pairs[axis, source, target] = pairs.get((axis, source, target), 0.0) + each
    matrix = torch.zeros(mesh.size, mesh.size, dtype=torch.float64)
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        for (axis, source, target), each in pairs.items():
            if place[axis] == source and source != target:
                matrix[rank, mesh.rank_at({**place, axis: target})] += each
    return matrix


@public
def communication(program: Code, *, ax: Axes | None = None) -> Axes:
    """`communication_matrix` as a heat map: who sends how much to whom in one run."""
    matrix = communication_matrix(program)
    ax = _new_axes(ax, (4.5, 3.6))
    image = ax.imshow(matrix / 2**20, cmap="Blues", interpolation="none", vmin=0)
    ax.set(xlabel="to rank", ylabel="from rank", title=f"{program.name} on Mesh({program.mesh})")
    ax.locator_params(integer=True)
    ax.figure.colorbar(image, ax=ax, label="MiB")
    return ax


# --- in time


@public
def timeline(shown: Any, *, ax: Axes | None = None) -> Axes:
    """A Gantt chart: of a pipeline's schedule or timeline, of a program's, or of an estimate.

    Args:
        shown: what has a method ``bars``, such as `functron.pipeline.Schedule` (in ticks),
            `functron.pipeline.Timeline`, ``program.timeline(costs)``, or a planned step.
    """
    chart: Gantt = shown.bars()
    ax = _new_axes(ax, (11, 0.8 + 0.32 * max(len(chart.names), 2)))
    total = max((box.end for box in chart.boxes), default=1.0) or 1.0
    for row in range(len(chart.names)):
        ax.broken_barh([(0, total)], (row - 0.45, 0.9), facecolor="#f0f0f0")
    spans: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for box in chart.boxes:
        slot, count = box.slot
        place, width = (box.row - 0.45 + slot * 0.9 / count, 0.9 / count), box.end - box.start
        spans[place, box.colour].append((box.start, width))
        if width / total * 130 > len(box.label):
            ink = "white" if box.dark else "black"
            middle = box.start + width / 2, place[0] + place[1] / 2
            ax.text(*middle, box.label, ha="center", va="center", fontsize=7, color=ink)
    for (place, colour), found in spans.items():
        ax.broken_barh(found, place, facecolor=_rgb(colour), edgecolor="white", lw=0.4)
    for name, *colours in chart.legend:
        if colours:
            ax.bar(0, 0, color=_rgb(colours[0]), label=name)
    ax.set(xlim=(0, total), ylim=(len(chart.names) - 0.5, -0.5), title=chart.title)
    ax.set(yticks=range(len(chart.names)), yticklabels=chart.names)
    if chart.legend:
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _rgb(colour: str) -> Any:
    """A colour of CSS as matplotlib has it."""
    found = re.fullmatch(r"hsl\((\d+),\s*(\d+)%,\s*(\d+)%\)", colour)
    if found is None:
        return colour
    hue, saturation, light = map(int, found.groups())
    return colorsys.hls_to_rgb(hue / 360, light / 100, saturation / 100)


@public
def memory(program: Code | ProgramMemory, *, ax: Axes | None = None) -> Axes:
    """The bytes that are live on a rank at each equation of a program, stacked by cause."""
    found = program if isinstance(program, ProgramMemory) else measure_memory(program)
    rows = [moment.live for moment in found.timeline]
    live = np.array(rows, dtype=float).reshape(-1, len(CATEGORIES))
    kept = [k for k in range(len(CATEGORIES)) if live[:, k].any()]
    unit, scale = bytes_text(found.peak_bytes).split()[-1], 1.0
    scale = 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    ax = _new_axes(ax, (7, 3))
    colours = [_COLOURS[CATEGORIES[k]] for k in kept]
    names = [CATEGORIES[k] for k in kept]
    ax.stackplot(
        range(len(live)), live[:, kept].T / scale, labels=names, colors=colours, step="mid", lw=0
    )
    ax.set(xlabel="equations, in order", ylabel=f"live ({unit})")
    ax.set_title(f"memory of {found.name}: peak {bytes_text(found.peak_bytes)}", fontsize=10)
    ax.legend(fontsize=8, loc="upper right")
    return ax


_COLOURS = MappingProxyType(
    {
        "parameters": "#08519c",
        "optimizer": "#6baed6",
        "gradients": "#e6550d",
        "activations": "#31a354",
        "workspace": "#bdbdbd",
        "inputs": "#756bb1",
    }
)
