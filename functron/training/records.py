"""The records of a run: where they go (a bar, metrics.jsonl, loss.svg, TensorBoard, W&B), and back.

Each place is a context manager that yields a function of one record. A record is a dict of numbers
by name, some of them in dicts of their own: `flat` names each of them.

`compare` sets several runs side by side: the settings that differ, losses, speeds, one picture. It
reads run folders, and logs of Megatron-LM: nothing is restored or computed, and no torch is needed.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from functron.core import chart
from functron.core.chart import line_chart, table
from functron.core.errors import Problem, load_function, raise_problems, refuse
from functron.core.settings import Need, setting

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
WANDB_ID = "wandb_id"
"""The file of a run folder with the id of its run at Weights & Biases, and where the folder was."""
EVAL = "eval"
"""The key of the numbers of held-out sets in a record."""

Record = Mapping[str, Any]
Reporter = AbstractContextManager[Callable[[Record], None]]
Naming = Callable[[Record], Iterable[tuple[str, Any, int]]]
"""``(record)`` to the name of each of its numbers, the number, and where it is drawn."""

REDRAW_SECONDS = 10.0


_WRITER = Need(
    lambda logging: logging.tensorboard or logging.wandb,
    "TensorBoard, or Weights & Biases",
    "add --tensorboard",
)


@dataclass(frozen=True)
class LoggingConfig:
    """Records beside the usual ones, and where they go.

    Attributes:
        layers_every: at the first step and at multiples of this one, records also have by layer the
            norms of the parameters that train and of their gradients, and, of a GPT, the root mean
            square of the residual stream after the layer; 0: never.
        tensorboard: write TensorBoard events into the run folder.
        wandb: log to Weights & Biases.
        names: what TensorBoard and Weights & Biases call the numbers of a record: empty: as
            metrics.jsonl does; megatron: as Megatron-LM does ("lm loss", "learning-rate"), so that
            pictures of its runs show these as well.
        metrics: functions of your own that measure every step, package.module:function, several of
            them separated by commas: of what a step sees before its update, to numbers by name
            (functron.training.step.Metric), which are recorded.
    """

    layers_every: int = setting(0, short="log_layers_every", least=0)
    tensorboard: bool = setting(False, "common", short="tensorboard")
    wandb: bool = setting(False, "common", short="wandb")
    names: Literal["", "megatron"] = setting("", short="log_names", need=_WRITER)
    metrics: str = setting("", "step", short="metrics")

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

    def problems(self) -> Iterator[Problem]:
        """Everything wrong with these settings."""
        for name in self._metric_names:
            if ":" not in name:
                fix = "name the module of the function, too"
                yield Problem("metrics", repr(name), "package.module:function", fix)


@contextmanager
def progress(steps: int, start: int = 0) -> Iterator[Callable[[Record], None]]:
    """A bar on standard error: loss, gradient norm, tokens per second, losses of held-out sets."""
    from tqdm import tqdm

    # into a file or a pipe, a line every ten seconds is enough
    interval = 0.1 if sys.stderr.isatty() else REDRAW_SECONDS
    with tqdm(
        total=steps, initial=start, unit="step", dynamic_ncols=True, mininterval=interval
    ) as bar:
        held_out: dict[str, str] = {}

        def write(record: Record) -> None:
            shown = {"loss": record.get("loss"), "norm": record.get("grad_norm")}
            shown["tokens/s"] = record.get("tokens_per_second")
            formats = {"loss": "{:.4f}", "norm": "{:.2f}", "tokens/s": "{:,.0f}"}
            text = {k: formats[k].format(v) for k, v in shown.items() if v is not None}
            sets = record.get(EVAL, {}).items()
            held_out.update({name: f"{numbers['loss']:.4f}" for name, numbers in sets})
            bar.set_postfix(text | held_out, refresh=False)
            bar.update()

        yield write


@contextmanager
def report_missing_targets() -> Iterator[Callable[[Record], None]]:
    """Says of the first step whose samples have no target that it has none, at the end of how many.

    The record of such a step has ``targets``, 0, and None for its loss; see `functron.make_step`.
    """
    steps: list[int] = []

    def say(text: str) -> None:
        print(f"functron: {text}", file=sys.stderr, flush=True)

    def write(record: Record) -> None:
        if record.get("targets") == 0:
            if not steps:
                step = record["step"]
                say(f"step {step}: no sample has a target: nothing is learned, training goes on")
            steps.append(record["step"])

    try:
        yield write
    finally:
        if len(steps) > 1:
            say(f"no sample had a target in {len(steps)} steps, from {steps[0]} to {steps[-1]}")


@contextmanager
def jsonl(path: Path) -> Iterator[Callable[[Record], None]]:
    """One JSON object a line, flushed at once so that a run can be followed.

    A number that is not finite becomes null: JSON has no word for it.
    """
    with path.open("a", encoding="utf-8") as stream:

        def write(record: Record) -> None:
            stream.write(json.dumps(_finite(record)) + "\n")
            stream.flush()

        yield write


@contextmanager
def event_log(path: Path) -> Iterator[Callable[..., None]]:
    """A function ``write(kind, step, **about)`` that adds an event of a run as a line to a file.

    A line has ``step``, ``kind``, ``time`` (in seconds, of the system's clock), ``rank`` (None:
    of no rank in particular) and what `about` says; a number that is not finite becomes null. It
    is one write at the end of the file, so that processes which share the file do not mix their
    lines, and there is no file before the first event.
    """
    file = None

    def write(kind: str, step: int, **about: Any) -> None:
        nonlocal file
        if file is None:
            file = path.open("ab", buffering=0)
        event = {"step": step, "kind": kind, "time": time.time(), "rank": None, **about}
        file.write((json.dumps(_finite(event)) + "\n").encode())

    try:
        yield write
    finally:
        if file is not None:
            file.close()


@contextmanager
def loss_picture(
    path: Path, before: Sequence[Record] = (), events: Path | None = None
) -> Iterator[Callable[[Record], None]]:
    """The loss curve as SVG, and those of held-out sets, redrawn every ten seconds and at the end.

    Args:
        path: the file.
        before: the records of steps that were taken earlier.
        events: a file of `event_log`, whose events are marked at their steps; None: none are.
    """
    steps: list[float] = [record["step"] for record in before]
    losses: list[float | None] = [record["loss"] for record in before]
    held_out: dict[str, list[tuple[float, float]]] = {}
    drawn = time.monotonic()

    def evaluated(record: Record) -> None:
        for name, numbers in record.get(EVAL, {}).items():
            loss = math.nan if numbers["loss"] is None else numbers["loss"]
            held_out.setdefault(name, []).append((record["step"], loss))

    def draw() -> None:
        marks: dict[str, list[float]] = {}
        for event in read(events) if events is not None else ():
            marks.setdefault(event["kind"], []).append(event["step"])
        shown = [math.nan if loss is None else loss for loss in losses]
        chart = line_chart(
            steps,
            shown,
            title="Training loss",
            x_label="step",
            y_label="loss (nats per token)",
            others=held_out,
            marks=marks,
        )
        path.write_text(chart, encoding="utf-8")

    def write(record: Record) -> None:
        nonlocal drawn
        steps.append(record["step"])
        losses.append(record["loss"])
        evaluated(record)
        if time.monotonic() - drawn > REDRAW_SECONDS:
            draw()
            drawn = time.monotonic()

    for record in before:
        evaluated(record)
    try:
        yield write
    finally:
        draw()


@contextmanager
def tensorboard(
    folder: Path, named: Naming | None = None, start: int = 0, before: Sequence[Record] = ()
) -> Iterator[Callable[[Record], None]]:
    """Event files for TensorBoard in `folder`: each record is there as soon as it is written.

    Where there are some already, those of steps after `start` no longer count: they are taken
    again.

    Args:
        folder: where they go.
        named: what numbers are called, and where they are drawn; None: `by_path`.
        start: how many steps were taken earlier, and stay.
        before: their records.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    require("tensorboard")
    naming = named or by_path
    first = start + 1
    purge = first if folder.is_dir() and any(folder.iterdir()) else None
    summaries: Any = importlib.import_module("torch.utils.tensorboard")
    writer = summaries.SummaryWriter(str(folder), purge_step=purge)

    def write(record: Record, least: int = 0) -> None:
        for name, value, at in naming(record):
            if name != "step" and isinstance(value, int | float) and at >= least:
                writer.add_scalar(name, value, at)

    def shown(record: Record) -> None:
        write(record)
        writer.flush()

    for record in before if purge is not None else ():
        write(record, first)  # what is drawn over samples, whose numbers are larger, is purged too
    try:
        yield shown
    finally:
        writer.close()


@contextmanager
def wandb(
    folder: Path, config: Mapping[str, Any], named: Naming | None = None
) -> Iterator[Callable[[Record], None]]:
    """A Weights & Biases run named after `folder`, which also holds its local files and its id.

    Whoever goes on with the run in `folder` goes on with that run of Weights & Biases, by its id in
    the file `WANDB_ID`; without that file it is another run, and so is one whose folder is a copy
    of another, or was moved: the file says where it was written. Steps that it has and that are
    taken again stay as they are, since Weights & Biases takes none twice.

    Args:
        folder: where they go.
        config: the settings of the run.
        named: what numbers are called; those that are not drawn at steps are left out. None:
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
    """The id in a run folder, of the run at Weights & Biases that began there; else a new one."""
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
    """The run folder that `path` may have been meant for; None where there is none around it.

    The one that it lies in, or else that of the closest name among those in it, beside it, or in
    the folders beside it.
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
    """Folders in a folder, if there is one to look into."""
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []


def read(file: Path) -> list[dict[str, Any]]:
    """The records in a metrics.jsonl, in order; none where there is no such file.

    The last line may have been cut off by the end of its process; such a line is left out. Older
    records of steps without targets have losses of 0, which are None here.

    Raises:
        ValueError: another line is no JSON.
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
    """A record; of a step whose samples had no target, None in place of losses and gradient norms.

    A mean over no target is no number: 0, as the step has it, would be the best loss of all.
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
    """The numbers of a record by paths: ``layers/blocks/3/grad_norm``."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        inner = isinstance(value, Mapping)
        found |= flat(value, f"{under}{name}/") if inner else {f"{under}{name}": value}
    return found


def by_path(record: Record) -> Iterator[tuple[str, Any, int]]:
    """The numbers of a record by their paths, at its step."""
    for name, value in flat(record).items():
        yield name, value, record["step"]


_MEGATRON = MappingProxyType({
    "loss": "lm loss", "lr": "learning-rate", "grad_norm": "grad-norm", "loss_scale": "loss-scale",
    "step_seconds": "iteration-time", "peak_memory_bytes": "mem-max-allocated-bytes",
})  # fmt: skip
"""Numbers of a record, and their names in Megatron-LM (``training_log`` of its training.py)."""

_BY_STEP = ("iteration-time", "mem-max-allocated-bytes")
"""Those that Megatron-LM does not draw over samples as well."""


def megatron_names(samples_after: Callable[[int], int]) -> Naming:
    """Names as Megatron-LM's, over steps and, as it does, ``NAME vs samples`` over samples.

    What it has no name for keeps its own.

    Args:
        samples_after: of a number of steps how many samples they have.
    """

    def named(record: Record) -> Iterator[tuple[str, Any, int]]:
        step = record["step"]
        seen = samples_after(step)
        known = dict(_MEGATRON)
        if "next_token_loss" in record:  # of a loss with other terms, which Megatron-LM leaves out
            known |= {"next_token_loss": known.pop("loss")}
        rows = {known.get(name, name): v for name, v in record.items() if name != EVAL}
        rows["batch-size"] = seen - samples_after(step - 1)
        sets = record.get(EVAL, {})
        for name, numbers in sets.items():
            key = "lm loss validation" if len(sets) == 1 else f"lm loss validation {name}"
            rows |= {key: numbers["loss"], f"{key} ppl": numbers["perplexity"]}
        drawn = (*_MEGATRON.values(), "batch-size")
        for name, value in flat(rows).items():
            yield name, value, step
            over = name in drawn and name not in _BY_STEP
            if over or name.startswith("lm loss validation"):
                yield f"{name} vs samples", value, seen
        yield "samples vs steps", seen, step

    return named


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require(package: str) -> None:
    """Raise ValueError, with the command that helps, unless the optional `package` is installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{package}: got no such package; wanted it, since it is asked for; "
            f"fix: pip install 'functron[{package}]', or leave it out"
        )


_SMOOTHED = 50  # curves of more points than these are drawn as their moving average
_TOKENS_A_STEP = ("data.seq", "data.global_batch", "data.ramp_up", "data.earlier_batches")


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; it prints as a table, and notebooks show its picture.

    Attributes:
        runs: their names: of their folders, or the paths where several folders have one name.
        settings: by path, as ``optimizer.b1``, the values of all runs where they are not the same;
            None where a run has no such setting.
        results: by name, the numbers of all runs: ``steps``; ``tokens`` trained on; ``first loss``,
            ``last loss``, ``best loss`` (nats per token) and ``best step``, of steps whose samples
            had targets; ``NAME loss`` and
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
            name: chart.smooth(points) if len(points) > _SMOOTHED else points
            for name, points in self.curves.items()
        }
        y_label = "loss (nats per token)"
        return chart.line_chart(
            [], [], title="Training loss", x_label=self.x_label, y_label=y_label, others=curves
        )

    def _repr_svg_(self) -> str:
        return self.svg()


Nest = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Puts settings that stand at the top of a file, as all did in functron 0.1, into sections."""


def compare(folders: Iterable[str | Path], *, nest: Nest | None = None) -> Comparison:
    """Runs side by side.

    Args:
        folders: run folders, or files with what Megatron-LM printed, two or more. A log's losses
            are means over its intervals. It has tokens, and settings to compare, where it begins
            with the arguments of the run.
        nest: gives settings of functron 0.1 the names of today; None: they keep their own.

    Raises:
        ValueError: a folder is no run's, a file no such log, one is given twice, or its files
            cannot be read; or there are less than two. All such are listed.
    """
    paths = [Path(folder) for folder in folders]
    _check(paths)
    names = Counter(path.resolve().name for path in paths)
    runs = tuple(
        path.resolve().name if names[path.resolve().name] == 1 else str(path) for path in paths
    )
    opened = [_open_run(path, nest) for path in paths]
    configs, records = [settings for settings, _ in opened], [rows for _, rows in opened]
    told = [config for path, config in zip(paths, configs, strict=True) if path.is_file()]
    settings = {}
    for name in dict.fromkeys(name for config in configs for name in config):
        values = tuple(config.get(name) for config in configs)
        if any(name not in config for config in told):
            continue  # a log says little of its run
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            settings[name] = values
    sets = dict.fromkeys(name for of_run in records for r in of_run for name in r.get(EVAL, {}))
    results = [_results(of_run, sets) for of_run in records]
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


def _check(paths: Sequence[Path]) -> None:
    title = "cannot compare"
    if len(paths) < 2:
        got = str(paths[0]) if paths else "no run"
        refuse(title, "runs", got, "at least two run folders", "name another")
    problems = []
    for index, path in enumerate(paths):
        if path.is_file():
            if not is_log(path):
                wanted = "a run folder, or a log of Megatron-LM with its lines of iterations"
                problems.append(Problem(str(path), "a file of another kind", wanted))
        elif not is_run(path):
            near = nearest(path)
            fix = "" if near is None else f"name {near}, which is one"
            got = "a folder where no run is" if path.is_dir() else "no such folder"
            problems.append(Problem(str(path), got, "a run folder", fix))
        if path.exists() and path.resolve() in [other.resolve() for other in paths[:index]]:
            problems.append(Problem(str(path), "the same run twice", "each once", "name it once"))
    raise_problems(title, problems)


def _open_run(path: Path, nest: Nest | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of a run, and its records: of a run folder, or of a log."""
    if path.is_dir():
        return _settings(path / CONFIG, nest), _records(path / METRICS)
    return read_log(path)


def is_log(file: Path) -> bool:
    """Whether a file has lines that Megatron-LM prints of its iterations."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return any(_ITERATION.search(line) for line in lines)
    except OSError:
        return False


_ITERATION = re.compile(r"iteration\s+(\d{1,15})/\s*\d+\s*\|(.*)")
_HELD_OUT = re.compile(r"validation loss at iteration\s+(\d{1,15})\b[^|]*\|(.*)")
_MOST_SETTING = 400  # characters of a line that has one
_SETTING = re.compile(r"^\s*(?:\S+:\s+)?(\w+) \.{2,} (\S.*?)\s*$")
_SETTINGS = MappingProxyType({
    "seq_length": "data.seq", "global_batch_size": "data.global_batch",
    "train_iters": "steps", "seed": "seed",
    "lr": "learning_rate.peak", "min_lr": "learning_rate.end",
    "lr_warmup_iters": "learning_rate.warmup_steps", "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2", "adam_eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay", "clip_grad": "optimizer.clip_norm",
})  # fmt: skip
"""Arguments that Megatron-LM prints, and the settings that say the same."""


def read_log(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings and records in what Megatron-LM printed of a run.

    A record has ``step``, ``loss`` (the mean since the line before), ``grad_norm``, ``lr``,
    ``samples``, ``step_seconds``, and ``tokens`` and ``tokens_per_second`` where the arguments are
    printed; None where a line has no such number. An iteration that comes twice, after a restart,
    counts as it came last.

    Raises:
        ValueError: the file cannot be read.
    """
    settings: dict[str, Any] = {}
    rows: dict[int, dict[str, Any]] = {}
    held_out: dict[int, dict[str, Any]] = {}
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        refuse("cannot compare", str(file), error.strerror or str(error), "a readable log")
    for line in text.splitlines():
        if match := _ITERATION.search(line):
            rows[int(match[1])] = _make_record(int(match[1]), _fields(match[2]))
        elif match := _HELD_OUT.search(line):
            numbers = _fields(match[2])
            loss, ppl = numbers.get("lm loss value"), numbers.get("lm loss PPL")
            held_out[int(match[1])] = {"validation": {"loss": loss, "perplexity": ppl}}
        elif rows or len(line) > _MOST_SETTING:
            continue
        elif (match := _SETTING.match(line)) and match[1] in _SETTINGS:
            value = _value(match[2])
            settings |= {} if value is None else {_SETTINGS[match[1]]: value}
    seq = settings.get("data.seq")
    for step, row in rows.items():
        if isinstance(seq, int) and row["samples"] is not None:
            row["tokens"] = row["samples"] * seq
            seconds, batch = row["step_seconds"], row["batch"]
            if seconds and batch is not None:
                row["tokens_per_second"] = batch * seq / seconds
        row.pop("batch", None)
        if step in held_out:
            row[EVAL] = held_out[step]
    return settings, [rows[step] for step in sorted(rows)]


def _fields(text: str) -> dict[str, float | None]:
    """The numbers of a line of ``name: number`` between bars."""
    pairs = (part.rpartition(":") for part in text.split("|"))
    return {name.strip(): _number_in(value) for name, colon, value in pairs if colon}


def _number_in(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _value(text: str) -> int | float | None:
    """A number as a configuration has it: whole ones without a point are int."""
    number = _number_in(text)
    whole = number is not None and re.fullmatch(r"-?\d+", text)
    return int(text) if whole else number


def _make_record(step: int, numbers: Mapping[str, float | None]) -> dict[str, Any]:
    """The record of a line of an iteration."""
    milliseconds = numbers.get("elapsed time per iteration (ms)")
    samples, batch = numbers.get("consumed samples"), numbers.get("global batch size")
    return {
        "step": step,
        "loss": numbers.get("lm loss", numbers.get("loss")),
        "grad_norm": numbers.get("grad norm"),
        "lr": numbers.get("learning rate"),
        "samples": None if samples is None else int(samples),
        "batch": None if batch is None else int(batch),
        "tokens": None,
        "tokens_per_second": None,
        "step_seconds": None if milliseconds is None else milliseconds / 1000,
    }


def _settings(file: Path, nest: Nest | None) -> dict[str, Any]:
    """The settings in a file, by paths."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        is_old = not isinstance(table.get("data"), Mapping)
        found = flat(nest(table) if is_old and nest is not None else table)
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
