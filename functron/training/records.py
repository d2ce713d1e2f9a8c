"""Records of a run: to a progress bar, metrics.jsonl, loss.svg, TensorBoard, W&B, and read back.

Each writer is a context manager that yields a function of one record: a dict of numbers by name,
some in nested dicts. `compare` reads run folders, and logs of other programs; it needs no torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import math
import re
import statistics
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from functron.core import chart
from functron.core.chart import line_chart
from functron.core.errors import (
    Problem,
    find_plugin,
    load_function,
    load_plugin,
    raise_problems,
    refuse,
)
from functron.core.settings import Need, setting
from functron.core.tables import shows_differences, table

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
_RATE = "tokens_per_second"
WANDB_ID = "wandb_id"
"""The file of a run folder with the id of its run at Weights & Biases, and where the folder was."""
EVAL = "eval"
"""The key of the numbers of held-out sets in a record."""

Record = Mapping[str, Any]
Reporter = AbstractContextManager[Callable[[Record], None]]
Naming = Callable[[Record], Iterable[tuple[str, Any, int]]]
"""``(record)`` to ``(name, number, position on the x axis)`` of each of its numbers."""

NAMINGS = "functron.record_names"
"""The group of plugins that name the numbers of records: functions of ``samples_after`` (number
of steps to number of samples) that return a `Naming`."""

REDRAW_SECONDS = 10.0
_SHOWN = (
    ("loss", "loss", ".4f"),
    ("norm", "grad_norm", ".2f"),
    ("tokens/s", _RATE, ",.0f"),
    ("MFU", "mfu", ".1%"),
)


_WRITER = Need(
    lambda logging: logging.tensorboard or logging.wandb,
    "TensorBoard, or Weights & Biases",
    "add --tensorboard",
)


@shows_differences
@dataclass(frozen=True)
class LoggingConfig:
    """Additional records and their destinations.

    Attributes:
        layers_every: at the first step and at multiples of this one, record by layer the norms of
            trained parameters and of their gradients, and, of a GPT, the root mean square of the
            residual stream after the layer; 0: never.
        tensorboard: write TensorBoard events into the run folder.
        wandb: log to Weights & Biases.
        names: the names of numbers in TensorBoard and Weights & Biases: empty: as in metrics.jsonl;
            those of another program, so that its charts show these runs as well; or those that your
            own function gives, package.module:function (functron.training.records.NAMINGS).
        metrics: functions of your own, package.module:function, separated by commas, that measure
            every step before its update and return numbers by name
            (functron.training.step.Metric).
    """

    layers_every: int = setting(0, short="log_layers_every", least=0)
    tensorboard: bool = setting(False, "common", short="tensorboard")
    wandb: bool = setting(False, "common", short="wandb")
    names: str = setting("", short="log_names", need=_WRITER)
    metrics: str = setting("", "step", short="metrics")

    def __post_init__(self):
        if self.names:
            find_plugin(NAMINGS, self.names, "log_names")

    @property
    def _metric_names(self) -> list[str]:
        return [name.strip() for name in self.metrics.split(",") if name.strip()]

    @property
    def own_metrics(self) -> list[Callable]:
        """The functions that `metrics` names.

        Raises:
            ValueError: there is no such function.
        """
        return [load_function(name, "metrics") for name in self._metric_names]

    def naming(self, samples_after: Callable[[int], int]) -> Naming:
        """The names of a record's numbers in TensorBoard and Weights & Biases.

        Args:
            samples_after: the number of samples in so many first steps.

        Raises:
            ValueError: `names` is unknown.
        """
        if not self.names:
            return by_path
        return load_plugin(NAMINGS, self.names, "log_names")(samples_after)

    def problems(self) -> Iterator[Problem]:
        """Everything wrong with these settings."""
        self.naming(lambda steps: steps)
        for name in self._metric_names:
            if ":" not in name:
                fix = "name the module of the function, too"
                yield Problem("metrics", repr(name), "package.module:function", fix)


def open_display() -> Callable[[Any], None] | None:
    """A function that shows a thing in the notebook's cell that runs, in place of its last one.

    It takes a dict of MIME types and contents. None outside of notebooks.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    display = importlib.import_module("IPython.display").display
    handle: Any = None

    def show(content: Mapping[str, Any]) -> None:
        nonlocal handle
        if handle is None:
            handle = display(dict(content), raw=True, display_id=True)
        else:
            handle.update(dict(content), raw=True)

    return show


@contextmanager
def progress(steps: int, start: int = 0) -> Iterator[Callable[[Record], None]]:
    """A progress bar: loss, gradient norm, tokens/s, MFU, losses of held-out sets, time left.

    It is in the cell that runs in a notebook, and else on standard error.
    """
    from tqdm import tqdm

    show = open_display()
    # into a file or a pipe, a line every ten seconds is enough
    interval = 0.1 if sys.stderr.isatty() or show else REDRAW_SECONDS
    # in a notebook tqdm counts alone: what it prints goes nowhere
    nowhere = SimpleNamespace(write=lambda text: None, flush=lambda: None)
    stream: Any = sys.stderr if show is None else nowhere
    with tqdm(
        total=steps, initial=start, unit="step", dynamic_ncols=show is None, mininterval=interval,
        file=stream,
    ) as bar:  # fmt: skip
        held_out: dict[str, str] = {}

        def write(record: Record) -> None:
            text = {
                title: f"{record[name]:{form}}"
                for title, name, form in _SHOWN
                if record.get(name) is not None
            }
            sets = record.get(EVAL, {}).items()
            held_out.update({name: f"{numbers['loss']:.4f}" for name, numbers in sets})
            bar.set_postfix(text | held_out, refresh=False)
            if bar.update() and show is not None:
                show(_draw_bar(bar))

        try:
            yield write
        finally:
            if show is not None:
                show(_draw_bar(bar))


_BAR = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def _draw_bar(bar: Any) -> dict[str, str]:
    """A progress bar of tqdm for a notebook."""
    about = bar.format_dict
    line = bar.format_meter(**{**about, "ncols": None, "bar_format": _BAR})
    page = f'<progress value="{about["n"]}" max="{about["total"]}"></progress> {escape(line)}'
    return {"text/plain": line, "text/html": page}


@contextmanager
def report_missing_targets() -> Iterator[Callable[[Record], None]]:
    """Warns at the first step without targets, and at the end with the number of such steps.

    The record of such a step has ``targets`` 0 and the loss None; see `functron.make_step`.
    """
    steps: list[int] = []

    def say(text: str) -> None:
        print(f"functron: {text}", file=sys.stderr, flush=True)

    def write(record: Record) -> None:
        if record.get("targets") == 0:
            steps.append(record["step"])
            if len(steps) == 1:
                say(
                    f"step {steps[0]}: no sample has a target: nothing is learned, training goes on"
                )

    try:
        yield write
    finally:
        if len(steps) > 1:
            say(f"no sample had a target in {len(steps)} steps, from {steps[0]} to {steps[-1]}")


@contextmanager
def jsonl(path: Path) -> Iterator[Callable[[Record], None]]:
    """One JSON object a line, flushed at once; a number that is not finite becomes null."""
    with path.open("a", encoding="utf-8") as stream:

        def write(record: Record) -> None:
            stream.write(json.dumps(finite(record)) + "\n")
            stream.flush()

        yield write


@contextmanager
def event_log(path: Path | None) -> Iterator[Callable[..., None]]:
    """A function ``write(kind, step, **about)`` that appends an event of a run to a file.

    A line has ``step``, ``kind``, ``time`` (Unix time in seconds), ``rank`` (None: of the whole
    run) and `about`; a number that is not finite becomes null. Each line is a single write, so
    processes that share the file do not mix lines. The first event creates the file. None: nothing
    is written.
    """
    file = None

    def write(kind: str, step: int, **about: Any) -> None:
        nonlocal file
        if path is None:
            return
        if file is None:
            file = path.open("ab", buffering=0)
        event = {"step": step, "kind": kind, "time": time.time(), "rank": None, **about}
        file.write((json.dumps(finite(event)) + "\n").encode())

    try:
        yield write
    finally:
        if file is not None:
            file.close()


@contextmanager
def loss_picture(
    path: Path, before: Sequence[Record] = (), events: Path | None = None
) -> Iterator[Callable[[Record], None]]:
    """Loss curves of training and held-out sets as SVG, redrawn every ten seconds and at the end.

    Args:
        path: the file.
        before: records of earlier steps.
        events: a file of `event_log`, whose events are marked at their steps; None: no marks.
    """
    steps: list[float] = []
    losses: list[float] = []
    held_out: dict[str, list[tuple[float, float]]] = {}
    drawn = time.monotonic()

    def add(record: Record) -> None:
        steps.append(record["step"])
        losses.append(math.nan if record["loss"] is None else record["loss"])
        for name, numbers in record.get(EVAL, {}).items():
            loss = math.nan if numbers["loss"] is None else numbers["loss"]
            held_out.setdefault(name, []).append((record["step"], loss))

    def draw() -> None:
        marks: dict[str, list[float]] = {}
        for event in read(events) if events is not None else ():
            marks.setdefault(event["kind"], []).append(event["step"])
        chart = line_chart(steps, losses, **_LABELS, x_label="step", others=held_out, marks=marks)
        path.write_text(chart, encoding="utf-8")

    def write(record: Record) -> None:
        nonlocal drawn
        add(record)
        if time.monotonic() - drawn > REDRAW_SECONDS:
            draw()
            drawn = time.monotonic()

    for record in before:
        add(record)
    try:
        yield write
    finally:
        draw()


@contextmanager
def tensorboard(
    folder: Path, named: Naming | None = None, start: int = 0, before: Sequence[Record] = ()
) -> Iterator[Callable[[Record], None]]:
    """Event files for TensorBoard in `folder`, flushed at every record.

    Events of steps after `start` that are there already are purged: those steps are taken again.

    Args:
        folder: of the event files.
        named: names of the numbers; None: `by_path`.
        start: the number of earlier steps, which stay.
        before: their records.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    require("tensorboard")
    naming, first = named or by_path, start + 1
    purge = first if folder.is_dir() and any(folder.iterdir()) else None
    summaries: Any = importlib.import_module("torch.utils.tensorboard")
    writer = summaries.SummaryWriter(str(folder), purge_step=purge)

    def write(record: Record, least: int = 0) -> None:
        for name, value, at in naming(record):
            if name != "step" and isinstance(value, int | float) and at >= least:
                writer.add_scalar(name, value, at)
        writer.flush()

    for record in before if purge is not None else ():
        write(record, first)  # numbers drawn over samples lie beyond `start`, and were purged
    try:
        yield write
    finally:
        writer.close()


@contextmanager
def wandb(
    folder: Path, config: Mapping[str, Any], named: Naming | None = None
) -> Iterator[Callable[[Record], None]]:
    """A Weights & Biases run named after `folder`, which also holds its local files and its id.

    A run that is resumed in `folder` continues the run of Weights & Biases whose id is in the file
    `WANDB_ID`. Without that file, or in a folder that was copied or moved, it is a new run. Steps
    that are taken again keep their first records, since Weights & Biases accepts a step once.

    Args:
        folder: of its local files.
        config: the settings of the run.
        named: names of the numbers; those that are not drawn over steps are left out. None:
            `by_path`.

    Raises:
        ValueError: wandb is not installed.
    """
    require("wandb")
    run = importlib.import_module("wandb").init(
        project="functron", name=folder.name, dir=str(folder), config=dict(config),
        id=_claim_wandb_id(folder), resume="allow", allow_val_change=True,
    )  # fmt: skip
    begun = getattr(run, "starting_step", 0)
    first = begun if isinstance(begun, int) else 0

    def write(record: Record) -> None:
        step, rows = record["step"], (named or by_path)(record)
        if step >= first:
            run.log({name: x for name, x, at in rows if x is not None and at == step}, step=step)

    try:
        yield write
    finally:
        run.finish()


def _claim_wandb_id(folder: Path) -> str:
    """The id of the Weights & Biases run that began in a folder, or a new one."""
    file, here = folder / WANDB_ID, str(folder.resolve())
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    known = bool(lines) and lines[1:] in ([], [here])  # older files have the id alone
    made = lines[0].strip() if known else uuid.uuid4().hex[:16]
    file.write_text(f"{made}\n{here}\n", encoding="utf-8")
    return made


def is_run(path: Path) -> bool:
    """Whether `path` is a folder in which a run began."""
    return (path / CONFIG).is_file()


def nearest(path: Path) -> Path | None:
    """The run folder that `path` was probably meant for; None where there is none nearby.

    The one that contains it, or else the closest name inside it, beside it, or one level further.
    """
    above = next((folder for folder in path.parents if is_run(folder)), None)
    if above is not None:
        return above
    beside = _folders_in(path.parent)
    for folders in (_folders_in(path), beside, [x for y in beside for x in _folders_in(y)]):
        runs = {folder.name: folder for folder in folders if is_run(folder)}
        close = difflib.get_close_matches(path.name, sorted(runs), n=1, cutoff=0)
        if close:
            return runs[close[0]]
    return None


def _folders_in(path: Path) -> list[Path]:
    """The folders in a folder; none if it cannot be read."""
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []


def read(file: Path) -> list[dict[str, Any]]:
    """The records in a metrics.jsonl, in order; none where there is no such file.

    A last line that was cut off is left out. Losses of 0 in older records of steps without targets
    become None.

    Raises:
        ValueError: another line is not JSON.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(blank_empty_losses(json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            if number < len(lines):
                raise ValueError(
                    f"{file}, line {number}: got {line[:60]!r}; wanted a JSON object ({error}); "
                    "fix: remove the line"
                ) from None
    return found


def blank_empty_losses(record: Any) -> Any:
    """A record, with None for losses and gradient norms of a step without targets.

    A mean over no targets is undefined, and the step's 0 would be the best loss of all.
    """
    if not isinstance(record, Mapping) or record.get("targets") != 0:
        return record

    def measured(name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and name != EVAL:
            return {inner: measured(inner, x) for inner, x in value.items()}
        empty = name == "grad_norm" or name == "loss" or _TERM.fullmatch(name)
        return None if empty else value

    return {name: measured(name, value) for name, value in record.items()}


_TERM = re.compile(r"next_token_loss|ahead_loss_\d+")
"""The terms of a GPT's loss in a record; see `functron.models.gpt.summary`."""


def flat(record: Record, under: str = "") -> dict[str, Any]:
    """The numbers of a record by path, such as ``layers/blocks/3/grad_norm``."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        inner = isinstance(value, Mapping)
        found |= flat(value, f"{under}{name}/") if inner else {f"{under}{name}": value}
    return found


def by_path(record: Record) -> Iterator[tuple[str, Any, int]]:
    """The numbers of a record by their paths, at its step."""
    for name, value in flat(record).items():
        yield name, value, record["step"]


def finite(value: Any) -> Any:
    """A value for JSON, in which a number that is not finite is None."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require(package: str) -> None:
    """Raise ValueError with the command to install it unless the optional `package` is there."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{package}: got no such package; wanted it installed, since a setting asks for it; "
            f"fix: pip install 'functron[{package}]', or leave it out"
        )


_LABELS: Mapping[str, Any] = {"title": "Training loss", "y_label": "loss (nats per token)"}
_SMOOTHED = 50  # curves of more points than these are drawn as their moving average
_TOKENS_A_STEP = ("data.seq", "data.global_batch", "data.ramp_up", "data.earlier_batches")


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; prints as a table, and shows as a chart in notebooks.

    Attributes:
        runs: names of their folders, or paths where several folders have the same name.
        settings: by path, such as ``optimizer.b1``, the values of all runs where they differ; None
            where a run has no such setting.
        results: by name, the numbers of all runs: ``steps``; ``tokens`` trained on; ``first loss``,
            ``last loss``, ``best loss`` (nats per token) and ``best step``, of steps whose samples
            had targets; ``NAME loss`` and ``NAME best loss`` of the held-out set NAME, at its last
            and best evaluation; ``tokens/s`` and ``step seconds``, medians over the steps; ``peak
            memory bytes`` of a rank. None where a run has no such number.
        curves: by run, its training losses as points (step, loss), or (tokens, loss) where steps of
            the runs differ in tokens.
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
            rows.append([name, *(_format(name, value) for value in values)])
        return table(rows)

    def svg(self) -> str:
        """The training losses of all runs in one chart, as an SVG document."""
        curves = {
            name: chart.smooth(points) if len(points) > _SMOOTHED else points
            for name, points in self.curves.items()
        }
        return chart.line_chart([], [], **_LABELS, x_label=self.x_label, others=curves)

    def _repr_svg_(self) -> str:
        return self.svg()


Nest = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Sorts the settings of a file of functron 0.1, which had no sections, into sections."""


@dataclass(frozen=True)
class LogReader:
    """A format of logs that another program writes, for `compare`.

    Attributes:
        title: of such a file in messages: ``"a log of ..."``.
        matches: whether a file has this format.
        read: a file to the settings in it, by path, and its records with at least ``step``,
            ``loss`` and ``tokens`` (None: unknown).
    """

    title: str
    matches: Callable[[Path], bool]
    read: Callable[[Path], tuple[dict[str, Any], list[dict[str, Any]]]]


def compare(
    folders: Iterable[str | Path], *, nest: Nest | None = None, logs: Iterable[LogReader] = ()
) -> Comparison:
    """Runs side by side.

    Args:
        folders: two or more run folders or logs.
        nest: renames settings of functron 0.1; None: they keep their names.
        logs: formats of files that are not run folders.

    Raises:
        ValueError: fewer than two are given, one is given twice, or is neither a run folder nor
            such a log, or cannot be read. All such are listed.
    """
    paths, logs = [Path(folder) for folder in folders], list(logs)
    _check_runs(paths, logs)
    short = [path.resolve().name for path in paths]
    pairs = zip(short, paths, strict=True)
    runs = tuple(name if short.count(name) == 1 else str(path) for name, path in pairs)
    opened = [_read_run(path, nest, logs) for path in paths]
    configs, records = zip(*opened, strict=True)
    told = [config for path, config in zip(paths, configs, strict=True) if path.is_file()]
    settings = {}
    for name in dict.fromkeys(name for config in configs for name in config):
        values = tuple(config.get(name) for config in configs)
        if any(name not in config for config in told):
            continue  # a log has few of its run's settings
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            settings[name] = values
    sets = dict.fromkeys(name for of_run in records for r in of_run for name in r.get(EVAL, {}))
    results = [_summarise(of_run, sets) for of_run in records]
    counted = all(row["tokens"] is not None for of_run in records for row in of_run)
    differ = any(name in settings for name in _TOKENS_A_STEP)
    x_label = "tokens" if counted and (differ or told) else "step"
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


def _check_runs(paths: Sequence[Path], logs: Sequence[LogReader]) -> None:
    title = "cannot compare"
    if len(paths) < 2:
        got = str(paths[0]) if paths else "no run"
        refuse(title, "runs", got, "at least two run folders", "name another")
    problems = []
    for index, path in enumerate(paths):
        if path.is_file():
            if not any(log.matches(path) for log in logs):
                wanted = ", or ".join(["a run folder", *(log.title for log in logs)])
                problems.append(Problem(str(path), "a file of another kind", wanted))
        elif not is_run(path):
            near = nearest(path)
            fix = "" if near is None else f"name {near}, which is one"
            got = "a folder where no run is" if path.is_dir() else "no such folder"
            problems.append(Problem(str(path), got, "a run folder", fix))
        if path.exists() and path.resolve() in [other.resolve() for other in paths[:index]]:
            problems.append(Problem(str(path), "the same run twice", "each once", "name it once"))
    raise_problems(title, problems)


def _read_run(
    path: Path, nest: Nest | None, logs: Sequence[LogReader]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings and records of a run folder or log."""
    if path.is_dir():
        return _read_settings(path / CONFIG, nest), _read_records(path / METRICS)
    return next(log for log in logs if log.matches(path)).read(path)


def _read_settings(file: Path, nest: Nest | None) -> dict[str, Any]:
    """The settings in a file, by path."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        is_old = not isinstance(table.get("data"), Mapping)
        found = flat(nest(table) if is_old and nest is not None else table)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse("cannot compare", str(file), reason, "a readable TOML file")
    return {name.replace("/", "."): value for name, value in found.items()}


def _read_records(file: Path) -> list[dict[str, Any]]:
    """The records in a file, each of which must have step, loss and tokens."""
    found = read(file)
    for number, record in enumerate(found, 1):
        if not (isinstance(record, dict) and {"step", "loss", "tokens"} <= record.keys()):
            got, wanted = f"line {number} without them", "step, loss and tokens in every line"
            refuse("cannot compare", str(file), got, wanted, "remove the line")
    return found


def _summarise(records: Sequence[Record], sets: Iterable[str]) -> dict[str, float | None]:
    """The numbers of a run and its held-out sets, as in `Comparison.results`."""
    losses = [(r["loss"], r["step"]) for r in records if r["loss"] is not None]
    best, best_step = min(losses, default=(None, None))
    with_targets = [r for r in records if r.get("targets") != 0]
    found: dict[str, float | None] = {
        "steps": records[-1]["step"] if records else 0,
        "tokens": records[-1]["tokens"] if records else 0,
        "first loss": with_targets[0]["loss"] if with_targets else None,
        "last loss": with_targets[-1]["loss"] if with_targets else None,
        "best loss": best,
        "best step": best_step,
    }
    for name in sets:
        held_out = [r[EVAL][name]["loss"] for r in records if name in r.get(EVAL, {})]
        found[f"{name} loss"] = held_out[-1] if held_out else None
        found[f"{name} best loss"] = min((x for x in held_out if x is not None), default=None)
    peaks = [r.get("peak_memory_bytes") or 0 for r in records]
    return found | {
        "tokens/s": _median(r.get(_RATE) for r in records),
        "step seconds": _median(r.get("step_seconds") for r in records),
        "peak memory bytes": max(peaks, default=0) or None,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def _format(name: str, value: float | None) -> str:
    form = ".4f" if name.endswith("loss") else ".4g" if name == "step seconds" else ",.0f"
    return "-" if value is None else format(value, form)
