"""Several runs side by side: the settings that differ, losses, speeds, and one picture.

Of run folders alone: nothing is restored or computed, and no torch is needed.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functron.core import plot
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.table import table
from functron.training.records import CONFIG, EVAL, METRICS, Record, flat, is_run, nearest, read

_SMOOTHED = 50  # curves of more points than these are drawn as their moving average
_TOKENS_A_STEP = ("seq", "global_batch", "ramp_up")


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; it prints as a table, and notebooks show its picture.

    Attributes:
        runs: their names: of their folders, or the paths where several folders have one name.
        settings: by path, as ``optimizer.b1``, the values of all runs where they are not the same;
            None where a run has no such setting.
        results: by name, the numbers of all runs: ``steps``; ``tokens`` trained on; ``first loss``,
            ``last loss``, ``best loss`` (nats per token) and ``best step``; ``NAME loss`` and
            ``NAME best loss`` of the held-out set NAME, at its last evaluation and its best;
            ``tokens/s`` and ``step seconds``, medians over the steps; ``peak memory bytes`` of a
            rank. None where a run has none: no step, no such set, or a loss that is not finite.
        curves: by run, its training losses as points (step, loss), or (tokens, loss) where the
            steps of the runs have not as many tokens.
        x_label: ``"step"`` or ``"tokens"``.
    """

    runs: tuple[str, ...]
    settings: Mapping[str, tuple[Any, ...]]
    results: Mapping[str, tuple[float | None, ...]]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    x_label: str

    def __str__(self) -> str:
        rows = [["", *self.runs]]
        for name, values in self.settings.items():
            rows.append([name, *("-" if value is None else str(value) or "''" for value in values)])
        rows.append([])
        for name, values in self.results.items():
            rows.append([name, *(_number(name, value) for value in values)])
        return table(rows)

    def svg(self) -> str:
        """The training losses of all runs in one chart, as an SVG document."""
        curves = {
            name: plot.smooth(points) if len(points) > _SMOOTHED else points
            for name, points in self.curves.items()
        }
        names = {"x_label": self.x_label, "y_label": "loss (nats per token)"}
        return plot.line_chart([], [], title="Training loss", **names, others=curves)

    def _repr_svg_(self) -> str:
        return self.svg()


def compare(folders: Iterable[str | Path]) -> Comparison:
    """Runs side by side.

    Args:
        folders: run folders, two or more.

    Raises:
        ValueError: a folder is no run's, or is given twice, or its files cannot be read; or there
            are less than two. All such folders are listed.
    """
    paths = [Path(folder) for folder in folders]
    _check(paths)
    names = Counter(path.resolve().name for path in paths)
    runs = tuple(
        path.resolve().name if names[path.resolve().name] == 1 else str(path) for path in paths
    )
    configs = [_settings(path / CONFIG) for path in paths]
    records = [_records(path / METRICS) for path in paths]
    settings = {}
    for name in dict.fromkeys(name for config in configs for name in config):
        values = tuple(config.get(name) for config in configs)
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            settings[name] = values
    sets = dict.fromkeys(name for of_run in records for r in of_run for name in r.get(EVAL, {}))
    results = [_results(of_run, sets) for of_run in records]
    x_label = "tokens" if any(name in settings for name in _TOKENS_A_STEP) else "step"
    return Comparison(
        runs,
        settings,
        {name: tuple(result[name] for result in results) for name in results[0]},
        {
            run: [(r[x_label], r["loss"]) for r in of_run if r["loss"] is not None]
            for run, of_run in zip(runs, records, strict=True)
        },
        x_label,
    )


def _check(paths: Sequence[Path]) -> None:
    title = "cannot compare"
    if len(paths) < 2:
        got = str(paths[0]) if paths else "no run"
        refuse(title, "runs", got, "at least two run folders", "name another")
    problems = []
    for index, path in enumerate(paths):
        if not is_run(path):
            near = nearest(path)
            fix = "" if near is None else f"name {near}, which is one"
            got = "a folder where no run is" if path.is_dir() else "no such folder"
            problems.append(Problem(str(path), got, "a run folder", fix))
        elif path.resolve() in [other.resolve() for other in paths[:index]]:
            problems.append(Problem(str(path), "the same run twice", "each once", "name it once"))
    raise_problems(title, problems)


def _settings(file: Path) -> dict[str, Any]:
    """The settings in a file, by paths."""
    try:
        found = flat(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse("cannot compare", str(file), reason, "a readable TOML file")
    return {name.replace("/", "."): value for name, value in found.items()}


def _records(file: Path) -> list[dict[str, Any]]:
    """The records in a file, which all have a step, its loss and the tokens until then."""
    found = read(file)
    for number, record in enumerate(found, 1):
        if not (isinstance(record, dict) and {"step", "loss", "tokens"} <= record.keys()):
            got, wanted = f"line {number} without them", "step, loss and tokens in every line"
            refuse("cannot compare", str(file), got, wanted, "remove the line")
    return found


def _results(records: Sequence[Record], sets: Iterable[str]) -> dict[str, float | None]:
    """The numbers of a run, of these held-out sets as well, as `Comparison.results` has them."""
    losses = [(r["loss"], r["step"]) for r in records if r["loss"] is not None]
    best, best_step = min(losses, default=(None, None))
    found: dict[str, float | None] = {
        "steps": records[-1]["step"] if records else 0,
        "tokens": records[-1]["tokens"] if records else 0,
        "first loss": records[0]["loss"] if records else None,
        "last loss": records[-1]["loss"] if records else None,
        "best loss": best,
        "best step": best_step,
    }
    for name in sets:
        held_out = [r[EVAL][name]["loss"] for r in records if name in r.get(EVAL, {})]
        found[f"{name} loss"] = held_out[-1] if held_out else None
        found[f"{name} best loss"] = min((x for x in held_out if x is not None), default=None)
    peaks = [r.get("peak_memory_bytes") or 0 for r in records]
    return found | {
        "tokens/s": _median(r.get("tokens_per_second") for r in records),
        "step seconds": _median(r.get("step_seconds") for r in records),
        "peak memory bytes": max(peaks, default=0) or None,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("loss"):
        return f"{value:.4f}"
    return f"{value:.4g}" if name == "step seconds" else f"{value:,.0f}"
