"""The configuration of a training run: frozen, complete, checked at once, and TOML on disk."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from functron import report, staging
from functron.data import ByteText
from functron.errors import Problem, nearest, raise_problems
from functron.models import gpt
from functron.models.gpt import GPTConfig
from functron.optim import (
    OptimizerConfig,
    ScheduleConfig,
    optimizer_problems,
    schedule_problems,
)
from functron.spmd import DATA_AXES, Mesh


@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a training run.

    Attributes:
        model: name of a preset; it fills `gpt`.
        gpt: the architecture.
        data: a text file or a folder of them; empty: the English and code of this Python.
        mesh: axes and sizes, such as dp=2,tp=2; empty: one rank.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh in this process.
        sequence_parallel: split the residual stream's sequence over tp.
        steps: optimization steps.
        seq: tokens per sample.
        global_batch: samples per step, over all ranks and microbatches.
        microbatches: parts of each rank's batch, one after another, to save activation memory and
            to keep all ranks of a pipeline at work.
        schedule: who computes which microbatch when, where the mesh has pp: 1f1b, gpipe,
            interleaved, zb-h1, zb-h2, zbv, dualpipe, dualpipev and others, or the path of a table.
        chunks: stages per pipeline rank; 0: what the schedule is made for.
        layout: which stage has which layers: empty or even; cost: by the cost of the traced
            program; first=N,last=N; or written out, such as "Et|tt|tL" (E embedding, t layer, L
            loss, | between stages, (tt|)*3 repeats).
        vocab_over_pp: divide embedding and unembedding among all ranks of the pipeline, which each
            update a part; the first and last stage gather them for a step.
        remat: what backward computes again: none, full (all of a block but its input), selective
            (the core of attention) or dots (all but matrix products and attention).
        compile: compile the step with Inductor before the first one, which then takes longer.
        seed: of initial parameters, order of the data, and dropout.
        out: run folder, new or empty; empty: the next free runs/MODEL-1, runs/MODEL-2, ...
        checkpoint_every: save after every so many steps as well; 0: only at the end.
        device: cpu, cuda, or auto: cuda where there is one.
        tensorboard: write TensorBoard events into the run folder.
        wandb: log to Weights & Biases.
        optimizer: the optimizer.
        learning_rate: its schedule; total_steps 0 stands for steps.
    """

    model: str = "tiny"
    gpt: GPTConfig = field(default_factory=lambda: gpt.PRESETS["tiny"])
    data: str = ""
    mesh: str = ""
    nproc: int = 0
    sequence_parallel: bool = False
    steps: int = 200
    seq: int = 128
    global_batch: int = 8
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    layout: str = ""
    vocab_over_pp: bool = False
    remat: gpt.Remat = "none"
    compile: bool = False
    seed: int = 0
    out: str = ""
    checkpoint_every: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensorboard: bool = False
    wandb: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(name="cosine", peak=2e-3, total_steps=0, end=1e-4)
    )

    @property
    def rate_schedule(self) -> ScheduleConfig:
        """`learning_rate` with its total_steps filled in."""
        total = self.learning_rate.total_steps or self.steps
        return dataclasses.replace(self.learning_rate, total_steps=total)


def with_model(config: TrainConfig, name: str) -> TrainConfig:
    """`config` with the architecture of the preset `name`.

    Raises:
        ValueError: there is no such preset; the nearest is suggested.
    """
    return dataclasses.replace(config, model=name, gpt=gpt.PRESETS[name])


def load(path: str | Path, *, model: str | None = None) -> TrainConfig:
    """The configuration in a TOML file: what it leaves out has the preset's or default value.

    Args:
        path: the file.
        model: a preset that replaces the file's model and its [gpt] table.

    Raises:
        ValueError: the file cannot be read, is no TOML, has unknown keys, values of the wrong
            kind, or describes an impossible model. All unknown keys and wrong kinds are listed.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = Problem(str(path), reason, "a readable TOML file")
        raise_problems("cannot read the configuration", [problem])
        raise AssertionError("unreachable") from error
    if model is not None:
        table = {key: value for key, value in table.items() if key != "gpt"} | {"model": model}
    problems: list[Problem] = []
    name = table.get("model", "tiny")
    if name in gpt.PRESETS:
        base = with_model(TrainConfig(), name)
    else:
        base = TrainConfig()
        problems.append(Problem("model", repr(name), "a preset", nearest(str(name), gpt.PRESETS)))
    values = _read(table, base, "", problems)
    raise_problems(f"cannot use the configuration {path}", problems)
    return _rebuild(base, values)


def dump(config: TrainConfig) -> str:
    """`config` as TOML text that `load` reads back: complete, down to every default."""
    return tomli_w.dumps(_plain(dataclasses.asdict(config)))


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    # TOML has no null; single values stand before tables so that they belong to this one
    rows = {key: "none" if value is None else value for key, value in table.items()}
    values = {key: value for key, value in rows.items() if not isinstance(value, Mapping)}
    tables = {key: _plain(value) for key, value in rows.items() if isinstance(value, Mapping)}
    return values | tables


def _read(table: Mapping[str, Any], base: Any, prefix: str, problems: list[Problem]) -> dict:
    """`table`, checked against the fields of the dataclass instance `base`."""
    hints = typing.get_type_hints(type(base))
    names = [f.name for f in dataclasses.fields(base)]
    out = {}
    for key, value in table.items():
        where = f"{prefix}{key}"
        if key not in names:
            problems.append(Problem(where, "an unknown key", "a known one", nearest(key, names)))
            continue
        nested, optional = _dataclass_in(hints[key])
        if nested is not None and isinstance(value, Mapping):
            inner = getattr(base, key)
            out[key] = _read(value, inner if inner is not None else nested(), f"{where}.", problems)
        elif optional and value == "none":
            out[key] = None
        elif nested is None and (kind := _kind(hints[key], value)) is None:
            out[key] = float(value) if hints[key] is float else value
        else:
            kind = "a table" if nested is not None else _kind(hints[key], value)
            problems.append(Problem(where, repr(value), str(kind)))
    return out


def _dataclass_in(hint: Any) -> tuple[Any, bool]:
    """The dataclass of an annotation ``X`` or ``X | None``, and whether None is allowed."""
    options = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return (found[0] if found else None), types.NoneType in options


_UNIONS = (typing.Union, types.UnionType)


def _kind(hint: Any, value: Any) -> str | None:
    """What was wanted where `value` is not of the annotated kind, else None."""
    if typing.get_origin(hint) is Literal:
        options = typing.get_args(hint)
        return None if value in options else f"one of {', '.join(map(repr, options))}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    fits = (int, float) if hint is float else (hint,)
    ok = isinstance(value, fits) and (hint is bool or not isinstance(value, bool))
    return None if ok else words.get(hint, str(hint))


def _rebuild(base: Any, values: Mapping[str, Any]) -> Any:
    """`base` with `values` replaced, at any depth."""
    hints = typing.get_type_hints(type(base))
    new = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = getattr(base, key)
            value = _rebuild(_dataclass_in(hints[key])[0]() if inner is None else inner, value)
        new[key] = value
    return dataclasses.replace(base, **new)


def validate(config: TrainConfig, *, processes: int | None = None) -> None:
    """Check everything that can be known before training; changes nothing.

    Args:
        config: what is to be run.
        processes: how many processes take part, where they run already (under torchrun).

    Raises:
        ValueError: listing everything that is wrong, each with its fix.
    """
    messages: list[str] = []
    problems: list[Problem] = []
    mesh = _try(lambda: Mesh.parse(config.mesh), messages)
    if mesh is not None:
        problems += _mesh_problems(config, mesh, processes)
        _pipeline_problems(config, mesh, messages)
        _try(lambda: gpt.rules(config.gpt, mesh), messages)
    problems += _number_problems(config)
    problems += optimizer_problems(config.optimizer)
    if config.steps >= 1:
        problems += schedule_problems(config.rate_schedule, "learning_rate")
    problems += _out_problems(config.out)
    if config.gpt.vocab_size < ByteText.vocab_size:
        got = f"{config.gpt.vocab_size} token ids"
        wanted = f"at least {ByteText.vocab_size}: the text is read as bytes"
        problems.append(Problem("gpt.vocab_size", got, wanted, "set it to 256 or choose a model"))
    if config.seq >= 1:
        _try(lambda: ByteText(config.data or None, config.seq), messages)
    for package in ("tensorboard", "wandb"):
        if getattr(config, package):
            _try(lambda name=package: report.require(name), messages)
    _try(lambda: raise_problems("these settings do not fit", problems), messages)
    if messages:
        raise ValueError("cannot train with this configuration\n" + "\n".join(messages))


def _try(check: Callable[[], Any], messages: list[str]) -> Any:
    """What `check` returns; None, and its message collected, where it raises ValueError."""
    try:
        return check()
    except ValueError as error:
        if str(error) not in messages:  # two checks may need the same thing
            messages.append(str(error))
        return None


def _mesh_problems(config: TrainConfig, mesh: Mesh, processes: int | None) -> Iterator[Problem]:
    parts = 1
    for axis in DATA_AXES:
        parts *= mesh[axis]
    share = parts * max(config.microbatches, 1)
    if config.global_batch % share:
        yield Problem(
            "global_batch",
            str(config.global_batch),
            f"a multiple of {share}: data-parallel ranks {parts} x microbatches "
            f"{config.microbatches}",
            f"set it to {-(-config.global_batch // share) * share}",
        )
    if config.sequence_parallel and config.seq % mesh["tp"]:
        yield Problem(
            "seq",
            str(config.seq),
            f"a multiple of tp={mesh['tp']} under sequence_parallel",
            f"set it to {-(-config.seq // mesh['tp']) * mesh['tp']}",
        )
    if config.nproc and config.nproc != mesh.size:
        fix = f"set nproc={mesh.size}, or 0 to simulate, or change the mesh"
        got = f"{config.nproc} for a mesh of {mesh.size}"
        yield Problem("nproc", got, "one process per rank", fix)
    if processes is not None and processes != mesh.size:
        fix = f"start torchrun with --nproc-per-node {mesh.size}, or change --mesh"
        got = f"{processes} processes for a mesh of {mesh.size}"
        yield Problem("mesh", got, "one process per rank", fix)


def _pipeline_problems(config: TrainConfig, mesh: Mesh, messages: list[str]) -> None:
    """Collect what is wrong with schedule and layout, where the mesh has a pipeline."""
    if mesh["pp"] > 1:
        if min(config.microbatches, config.seq, config.global_batch) < 1 or config.chunks < 0:
            return  # said elsewhere
        schedule = _try(lambda: staging.schedule_for(config, mesh), messages)
        if schedule is not None:
            _try(lambda: staging.partition_for(config, mesh, schedule), messages)
        return
    unused = [
        Problem(name, repr(getattr(config, name)), "nothing without pp in the mesh", fix)
        for name, fix in (
            ("schedule", "leave it out, or add pp=N"),
            ("layout", "leave it out, or add pp=N"),
            ("chunks", "leave it out"),
            ("vocab_over_pp", "leave it out, or add pp=N"),
        )
        if getattr(config, name) != getattr(TrainConfig, name)
    ]
    _try(lambda: raise_problems("these are for pipelines", unused), messages)


def _number_problems(config: TrainConfig) -> Iterator[Problem]:
    least = {"steps": 1, "seq": 1, "global_batch": 1, "microbatches": 1}
    least |= {"nproc": 0, "seed": 0, "checkpoint_every": 0, "chunks": 0}
    for name, smallest in least.items():
        value = getattr(config, name)
        if value < smallest:
            yield Problem(name, str(value), f"at least {smallest}")
    if config.seq > config.gpt.max_seq:
        fix = "shorten the samples or raise gpt.max_seq"
        yield Problem("seq", str(config.seq), f"at most gpt.max_seq={config.gpt.max_seq}", fix)


def _out_problems(out: str) -> Sequence[Problem]:
    if not out:
        return []
    path = Path(out)
    fix = "choose another folder, or remove it"
    if path.is_file():
        return [Problem("out", f"{out}, a file", "a new or empty folder", fix)]
    if path.is_dir() and any(path.iterdir()):
        return [Problem("out", f"{out}, a folder with files", "a new or empty folder", fix)]
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        return [Problem("out", out, f"a place to write; {above} is not", "choose another folder")]
    return []
