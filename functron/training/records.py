"""The records of a run: where they go (a bar, metrics.jsonl, loss.svg, TensorBoard, W&B), and back.

Each place is a context manager that yields a function of one record. A record is a dict of numbers
by name, some of them in dicts of their own: `flat` names each of them.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from functron.core import plot

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
EVAL = "eval"
"""The key of the numbers of held-out sets in a record."""

Record = Mapping[str, Any]
Reporter = AbstractContextManager[Callable[[Record], None]]

REDRAW_SECONDS = 10.0


@contextmanager
def progress(steps: int, start: int = 0) -> Iterator[Callable[[Record], None]]:
    """A bar on standard error: loss, gradient norm, tokens per second, losses of held-out sets."""
    # into a file or a pipe, a line every ten seconds is enough
    interval = 0.1 if sys.stderr.isatty() else REDRAW_SECONDS
    with tqdm(
        total=steps, initial=start, unit="step", dynamic_ncols=True, mininterval=interval
    ) as bar:
        held_out: dict[str, str] = {}

        def write(record: Record) -> None:
            shown = {"loss": record["loss"], "norm": record["grad_norm"]}
            shown["tokens/s"] = record["tokens_per_second"]
            formats = {"loss": "{:.4f}", "norm": "{:.2f}", "tokens/s": "{:,.0f}"}
            text = {k: formats[k].format(v) for k, v in shown.items() if v is not None}
            sets = record.get(EVAL, {}).items()
            held_out.update({name: f"{numbers['loss']:.4f}" for name, numbers in sets})
            bar.set_postfix(text | held_out, refresh=False)
            bar.update()

        yield write


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
def loss_picture(path: Path, before: Sequence[Record] = ()) -> Iterator[Callable[[Record], None]]:
    """The loss curve as SVG, and those of held-out sets, redrawn every ten seconds and at the end.

    Args:
        path: the file.
        before: the records of steps that were taken earlier.
    """
    steps: list[float] = [record["step"] for record in before]
    losses: list[float] = [record["loss"] for record in before]
    held_out: dict[str, list[tuple[float, float]]] = {}
    drawn = time.monotonic()

    def evaluated(record: Record) -> None:
        for name, numbers in record.get(EVAL, {}).items():
            loss = math.nan if numbers["loss"] is None else numbers["loss"]
            held_out.setdefault(name, []).append((record["step"], loss))

    def draw() -> None:
        names = {"x_label": "step", "y_label": "loss (nats per token)"}
        title = "Training loss"
        chart = plot.line_chart(steps, losses, title=title, **names, others=held_out)
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
def tensorboard(folder: Path) -> Iterator[Callable[[Record], None]]:
    """Event files for TensorBoard in `folder`.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    require("tensorboard")
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(record: Record) -> None:
        for name, value in flat(record).items():
            if name != "step" and value is not None:
                writer.add_scalar(name, value, record["step"])

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def wandb(folder: Path, config: Mapping[str, Any]) -> Iterator[Callable[[Record], None]]:
    """A Weights & Biases run named after `folder`, which also holds its local files.

    Raises:
        ValueError: wandb is not installed.
    """
    require("wandb")
    run = importlib.import_module("wandb").init(
        project="functron", name=folder.name, dir=str(folder), config=dict(config)
    )

    def write(record: Record) -> None:
        known = {name: value for name, value in flat(record).items() if value is not None}
        run.log(known, step=record["step"])

    try:
        yield write
    finally:
        run.finish()


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

    The last line may have been cut off by the end of its process; such a line is left out.

    Raises:
        ValueError: another line is no JSON.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(
                    f"{file}, line {number}: got {line[:60]!r}; wanted a JSON object ({error}); "
                    "fix: remove the line"
                ) from None
    return found


def flat(record: Record, under: str = "") -> dict[str, Any]:
    """The numbers of a record by paths: ``layers/blocks/3/grad_norm``."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        inner = isinstance(value, Mapping)
        found |= flat(value, f"{under}{name}/") if inner else {f"{under}{name}": value}
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require(package: str) -> None:
    """Raise ValueError, with the command that helps, unless the optional `package` is installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{package}: got no such package; wanted it, since it is asked for; "
            f"fix: pip install 'functron[{package}]', or leave it out"
        )
