"""A run folder: the configuration, the records and the checkpoints of one training run."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import shutil
import tomllib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from functron import checkpoint
from functron.core.errors import Problem, local_path, refuse
from functron.core.settings import nest_table, settings_of
from functron.data.sampling import ARITHMETIC, earlier_text
from functron.data.text_files import replace_text
from functron.data.tokenizer import BYTES, TOKENIZER, Tokenizer, kind_of, tokenizers_in
from functron.hub.writer import TOKENIZER_FILES
from functron.training.config import TrainConfig, configure, dump, load
from functron.training.records import CONFIG, METRICS, is_run, read

CHECKPOINTS = "checkpoints"
HUB = "hub"
"""The folder of the config.json and tokenizer that a run's model came with."""


def claim(config: TrainConfig) -> Path:
    """Create the folder that `config` names, or the first free of runs/MODEL-1, runs/MODEL-2, ...

    Raises:
        ValueError: it cannot be created or written to.
    """
    _, _, name = config.model.rpartition(":")  # of a scheme, such as hf-module:PATH
    name = Path(name).name or "run"
    numbered = (Path("runs") / f"{name}-{number}" for number in itertools.count(1))
    fix = "choose a place that this user may write to: --out"
    for path in [local_path(config.out, "out")] if config.out else numbered:
        try:
            path.mkdir(parents=True, exist_ok=bool(config.out))
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        except FileExistsError:
            if not config.out:
                continue
            got, where = "a file", path
        except OSError as error:
            got, where = error.strerror or str(error), error.filename or path
        else:
            return path
        refuse(f"cannot make the run folder {path}", str(where), got, "a folder to write in", fix)
    raise AssertionError("unreachable")


def origin_problems(config: TrainConfig, begins_with: Path | None) -> Iterator[Problem]:
    """A converted model whose run would begin with random parameters."""
    if config.has_origin and begins_with is None:
        wanted = "no source for a run that begins with random parameters"
        instead = next(x.mark.instead for x in settings_of(type(config)) if x.name == "source")
        fix = f"{instead}; or take source and model out, to train its architecture anew"
        yield Problem("source", repr(config.source), wanted, fix)


def newest(path: Path) -> Path | None:
    """The newest complete checkpoint of the run in `path`, or None."""
    folder = path / CHECKPOINTS
    found = checkpoint.steps(folder)
    return folder / str(found[-1]) if found else None


def write_config(path: Path, config: TrainConfig) -> None:
    """Write the whole configuration, except for out, resume and change_batch."""
    replace_text(path / CONFIG, _dump_lasting(config))


def settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that `write_config` writes, as plain nested dicts."""
    return tomllib.loads(_dump_lasting(config))


def _dump_lasting(config: TrainConfig) -> str:
    return dump(configure(config, out="", resume=False, change_batch=False))


def begins_with(config: TrainConfig) -> Path | None:
    """The newest checkpoint in `out`, where a run resumes; None: it has random parameters.

    Raises:
        ValueError: the folder of checkpoints cannot be read.
    """
    return newest(Path(config.out)) if config.resume and config.out else None


def steps_done(config: TrainConfig) -> int:
    """The number of steps in the checkpoint that a run resumes from; 0 where it begins."""
    found = begins_with(config)
    return 0 if found is None else int(found.name)


def describe_old_targets(config: TrainConfig) -> str | None:
    """A line about `lora_targets` of an older run that are refused now; None: they stay."""
    file = Path(config.out) / CONFIG
    if not (config.resume and config.out and config.lora.rank and file.is_file()):
        return None
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    before = nest_table(table, TrainConfig).get("lora", {}).get("targets")
    if before in (None, config.lora.targets):
        return None
    return (
        f"targets {before} of this run name routed experts, which have no adapters: it goes on "
        f"with {config.lora.targets}, as it began"
    )


def sizes_to_come(config: TrainConfig) -> tuple[int, ...]:
    """The sizes of the batches of the remaining steps, which the mesh must divide.

    Raises:
        ValueError: ramp_up or earlier_batches describes no such sizes.
    """
    return config.data.batches.sizes_from(steps_done(config))


def with_changed_batch(config: TrainConfig) -> TrainConfig:
    """`config` with the batches that its run had before they change (`change_batch`).

    They go into `earlier_batches`, so that the run continues with its next sample. Once steps were
    taken, plans that count samples stay as they were: the rates of rate_unit=samples, and the order
    of an application. A ramp_up that is over is left out.

    Returns:
        `config` itself where it resumes no run, or nothing changes.

    Raises:
        ValueError: the configuration of the run cannot be read.
    """
    path = Path(config.out)
    if not (config.change_batch and config.resume and config.out and is_run(path)):
        return config
    begun, done = load(path / CONFIG, kind=type(config)), steps_done(config)
    batches = begun.data.batches
    changed: dict[str, Any] = {"earlier_batches": begun.data.earlier_batches}
    same = (config.data.global_batch, config.data.ramp_up) == (
        begun.data.global_batch,
        begun.data.ramp_up,
    )
    if not same or done < sum(steps for steps, _ in batches.earlier):
        over = (
            begun.data.ramp_up == config.data.ramp_up
            and batches.first_sample(done) >= batches.samples
        )
        ramp_up = "" if over else config.data.ramp_up
        earlier = batches.until(done)
        if earlier and not ramp_up and earlier[-1][1] == config.data.global_batch:
            earlier = earlier[:-1]
        changed = {"earlier_batches": earlier_text(earlier), "ramp_up": ramp_up}
    planned = done > 0 and config.rate_unit == begun.rate_unit == "samples"
    if planned and config.reads_total_steps and not config.learning_rate.total_steps:
        changed["learning_rate"] = dataclasses.replace(
            config.learning_rate, total_steps=begun.rate_schedule.total_steps
        )
    if (
        done > 0
        and config.data.order == begun.data.order != ARITHMETIC
        and not config.data.order_samples
    ):
        changed["order_samples"] = begun.ordered_samples
    return configure(config, **changed)


def tokenizer_path(config: TrainConfig) -> Path | None:
    """The path of a run's tokenizer, in its folder once it began; None: bytes.

    Raises:
        ValueError: the configuration of the run cannot be read.
    """
    if config.data.tokenizer == BYTES:
        return None
    kept = Path(config.out) / HUB if config.out else None
    if kept is None or not tokenizers_in(kept):
        return Path(config.data.tokenizer) if config.data.tokenizer else None
    run = Path(config.out)
    # a new run may use another tokenizer than the one that its model came with
    begun = load(run / CONFIG, kind=type(config)) if is_run(run) else None
    same = begun is not None and begun.data.tokenizer == config.data.tokenizer
    return kept if same or not config.data.tokenizer else Path(config.data.tokenizer)


def keep_tokenizer(path: Path, config: TrainConfig) -> None:
    """Copy the tokenizer of a run into its folder.

    Must precede `write_config`, after which other processes read the copy.
    """
    source = tokenizer_path(configure(config, out=str(path)))
    kept = path / HUB
    if source is None or source == kept:
        return
    kept.mkdir(exist_ok=True)
    files = _files_of(source)
    for name, file in files.items():
        beside = kept / (name + ".new")
        shutil.copyfile(file, beside)
        beside.replace(kept / name)
    others = [*(kept / name for name in TOKENIZER_FILES), *kept.glob("*.model")]
    for other in (*others, *kept.glob("*.tiktoken")):
        if other.name not in files:
            other.unlink(missing_ok=True)


def _files_of(source: Path) -> dict[str, Path]:
    """The files of a tokenizer, by their names in a run folder."""
    file = source if source.is_file() else tokenizers_in(source)[0]
    if kind_of(file) is not Tokenizer:
        return {file.name: file}
    beside = {name: file.parent / name for name in TOKENIZER_FILES}
    return {TOKENIZER: file} | {
        name: path for name, path in beside.items() if name != TOKENIZER and path.is_file()
    }


def records(path: Path) -> list[dict[str, Any]]:
    """The records of the steps taken so far, as `functron.training.records.read`."""
    return read(path / METRICS)


def rewind(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the records of steps after `step`, which will be taken again; returns the others."""
    kept = [record for record in records(path) if record["step"] <= step]
    if (path / METRICS).is_file():
        replace_text(path / METRICS, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def refuse_existing(out: Path, title: str) -> None:
    """Raise ValueError with this title if `out` exists."""
    local_path(out, "out")
    if out.exists():
        refuse(title, str(out), "an existing path", "a new one", "choose another")


def make(out: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name, and rename it to `out` when it is complete.

    Raises:
        ValueError: it cannot be written.
    """
    partial = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
        fill(partial)
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        got = error.strerror or str(error)
        fix = "choose a place with room that this user may write to"
        refuse(f"cannot write {out}", str(error.filename or out), got, "a new folder", fix)
