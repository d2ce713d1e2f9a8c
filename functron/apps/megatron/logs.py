"""Megatron-LM's names of what it records, and what it printed of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from functron.core.errors import refuse
from functron.training.records import EVAL, LogReader, Naming, Record, flat

_NAMES = MappingProxyType({
    "loss": "lm loss", "lr": "learning-rate", "grad_norm": "grad-norm", "loss_scale": "loss-scale",
    "step_seconds": "iteration-time", "peak_memory_bytes": "mem-max-allocated-bytes",
})  # fmt: skip
"""Numbers of a record, and their names in Megatron-LM (``training_log`` of its training.py)."""

_BY_STEP = ("iteration-time", "mem-max-allocated-bytes")
"""Those that Megatron-LM does not draw over samples as well."""


def name_records(samples_after: Callable[[int], int]) -> Naming:
    """Name the numbers of records as Megatron-LM does.

    They are drawn over steps and, as it does, ``NAME vs samples`` over samples. What it has no name
    for keeps its own.

    Args:
        samples_after: of a number of steps how many samples they have.
    """

    def named(record: Record) -> Iterator[tuple[str, Any, int]]:
        step = record["step"]
        seen = samples_after(step)
        known = dict(_NAMES)
        if "next_token_loss" in record:  # of a loss with other terms, which Megatron-LM leaves out
            known |= {"next_token_loss": known.pop("loss")}
        rows = {known.get(name, name): v for name, v in record.items() if name != EVAL}
        rows["batch-size"] = seen - samples_after(step - 1)
        sets = record.get(EVAL, {})
        for name, numbers in sets.items():
            key = "lm loss validation" if len(sets) == 1 else f"lm loss validation {name}"
            rows |= {key: numbers["loss"], f"{key} ppl": numbers["perplexity"]}
        drawn = (*_NAMES.values(), "batch-size")
        for name, value in flat(rows).items():
            yield name, value, step
            over = name in drawn and name not in _BY_STEP
            if over or name.startswith("lm loss validation"):
                yield f"{name} vs samples", value, seen
        yield "samples vs steps", seen, step

    return named


def has_iterations(file: Path) -> bool:
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


def make_log_reader() -> LogReader:
    """Megatron-LM's logs, as ``functron compare`` reads them."""
    return LogReader("a log of Megatron-LM with its lines of iterations", has_iterations, read_log)


def read_log(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings and records in what Megatron-LM printed of a run.

    A record has ``step``, ``loss`` (the mean since the line before), ``grad_norm``, ``lr``,
    ``samples``, ``step_seconds``, and ``tokens`` and ``tokens_per_second`` where the arguments are
    printed; None where a line has no such number. An iteration that comes twice, after a restart,
    counts as it came last. Settings are those of the arguments that it printed first, if it did.

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
            rows[int(match[1])] = _make_record(int(match[1]), _read_numbers(match[2]))
        elif match := _HELD_OUT.search(line):
            numbers = _read_numbers(match[2])
            loss, ppl = numbers.get("lm loss value"), numbers.get("lm loss PPL")
            held_out[int(match[1])] = {"validation": {"loss": loss, "perplexity": ppl}}
        elif rows or len(line) > _MOST_SETTING:
            continue
        elif (match := _SETTING.match(line)) and match[1] in _SETTINGS:
            value = _parse_setting(match[2])
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


def _read_numbers(text: str) -> dict[str, float | None]:
    """The numbers of a line of ``name: number`` between bars."""
    pairs = (part.rpartition(":") for part in text.split("|"))
    return {name.strip(): _parse_number(value) for name, colon, value in pairs if colon}


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _parse_setting(text: str) -> int | float | None:
    """A number as a configuration has it: whole ones without a point are int."""
    number = _parse_number(text)
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
