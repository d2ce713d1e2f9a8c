"""Convert launch scripts of Megatron-LM, and YAML of similar software, into configurations.

`migrate` reads a shell script, a list of arguments, or YAML of Megatron-LM, Megatron-Bridge or
NeMo, and makes the `TrainConfig` of the same run, with the fate of every argument. Megatron-LM's
defaults are written out. Unknown arguments, unset variables and sizes that do not fit are refused,
all at once.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from functron.apps.megatron import arguments as megatron
from functron.apps.megatron.architecture import FamilyName, find_family, read_model
from functron.apps.megatron.arguments import ArgumentRow, FateKind, GivenArguments, Reading
from functron.apps.megatron.launches import (
    LaunchLine,
    fill_variables,
    is_open,
    read_script,
    record_script,
)
from functron.apps.megatron.training_settings import (
    NONE,
    apply_precision,
    is_weight,
    read_data_settings,
    read_evaluation_settings,
    read_step_settings,
)
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.settings import fields_under, name_of, value_at
from functron.core.tables import table
from functron.data.sampling import parse_ramp_up
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, dump, read_yaml

TITLE = "cannot migrate"
_KINDS: Mapping[FateKind, str] = MappingProxyType(
    {
        "taken": "taken",
        "default": "Megatron-LM's defaults, where the line is silent",
        "same": "the same by default",
        "not needed": "not needed here",
        "not supported": "not supported",
    }
)


@dataclass(frozen=True)
class Migration:
    """The result of `migrate`.

    Attributes:
        config: the configuration, complete and checked, except for data, tokenizer and packages of
            the machine that trains.
        rows: the fate of every argument.
        processes: ranks of the mesh.
        told: the number of processes is given; otherwise it is as small as the sizes allow.
        absent: files of the configuration that are not on this machine.
    """

    config: TrainConfig
    rows: tuple[ArgumentRow, ...]
    processes: int
    told: bool = True
    absent: tuple[str, ...] = ()

    def rows_of(self, kind: FateKind) -> list[ArgumentRow]:
        """The rows of one kind."""
        return [row for row in self.rows if row.kind == kind]

    def __str__(self) -> str:
        parts = []
        for kind, title in _KINDS.items():
            if rows := self.rows_of(kind):
                cells = [[row.name, row.value, _explain(row)] for row in rows]
                parts.append(f"{title}:\n{_indent(table(cells, left=3))}")
        return "\n\n".join(parts)

    def toml(self) -> str:
        """The configuration as a file for ``functron train --config``, with arguments that are not
        supported as comments at the top."""
        lines = ["# made by functron migrate"]
        lines += [
            f"# not supported: {r.name} {r.value}: {r.why}" for r in self.rows_of("not supported")
        ]
        return "\n".join([*(" ".join(line.split()) for line in lines), "", dump(self.config)])


def _explain(row: ArgumentRow) -> str:
    return "; ".join(filter(None, (row.ours, row.why)))


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def migrate(
    source: str | Path,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    extra: str = "",
    without: Sequence[str] = (),
    processes: int = 0,
    closest: bool = False,
    run: bool = False,
) -> Migration:
    """The configuration of the run that a launch script starts.

    Args:
        source: a script, a list of arguments, or YAML.
        variables: environment variables of the script; ``"1"`` is its first argument.
        extra: more arguments, which replace the script's: as on a command line, or as
            ``NAME=VALUE`` and ``NAME``.
        without: arguments to ignore, without dashes, such as those of a fork.
        processes: number of ranks; 0: as the launcher starts.
        closest: use functron's most similar model, if it lacks Megatron-LM's.
        run: run the script in bash, with recorders in place of what launches a training; see
            `record_script`. Otherwise nothing is run.

    Raises:
        ValueError: the file cannot be read or launches nothing; arguments are unknown or not
            supported; or sizes do not fit. All are listed with fixes.
    """
    line, arguments = _read_source(Path(source), variables, run=run)
    arguments = _change_arguments(arguments, extra, without)
    reading = Reading(arguments, closest)
    reading.problems += arguments.problems
    raise_problems(f"{TITLE} {source}", reading.problems)
    family = find_family(reading, line.program)
    try:
        model = read_model(reading, family)
    except ValueError as error:
        raise_problems(f"{TITLE} {source}", reading.problems)
        raise ValueError(f"{TITLE} {source}\n{error}") from None
    ranks = processes or line.processes or _count_nemo_ranks(arguments)
    told = ranks > 0
    config, ranks = _make_config(reading, family, model, ranks)
    config = configure(config, model=family, source=f"launch:{Path(source).name}")
    raise_problems(f"{TITLE} {source}", reading.problems)
    return replace(_check_migration(source, config, reading, ranks), told=told)


def _read_source(
    path: Path, variables: Mapping[str, str], *, run: bool = False
) -> tuple[LaunchLine, GivenArguments]:
    """The launch line in a file, and its arguments."""
    if path.suffix in (".yaml", ".yml"):
        if run:
            refuse(TITLE, str(path), "--run with YAML", "a script", "leave it out")
        mapping = read_yaml(path)
        _check_size(path, mapping)
        mapping = _fill(mapping, variables)
        program = str(mapping.get("TRAINING_SCRIPT", ""))
        target = mapping.get("model")
        target = str(target.get("_target_", "")) if isinstance(target, Mapping) else ""
        for word, name in (("T5", "t5"), ("Mamba", "mamba"), ("Bert", "bert")):
            program = f"pretrain_{name}" if word in target else program
        arguments = megatron.read_mapping(mapping)
        if isinstance(mapping.get("dataset"), Mapping) and not _DATA & arguments.given.keys():
            # Megatron-Bridge's, where there is no blend
            arguments.given["mock_data"] = megatron.GivenValue("dataset.blend", True, "none")
        return LaunchLine(program, ()), arguments
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(TITLE, str(path), reason, "a readable script, list of arguments, or YAML")
    options = megatron.load_table().options
    line = record_script(path, options, variables) if run else read_script(text, options, variables)
    arguments = megatron.read_words(line.words)
    if (inner := arguments.given.get("yaml_cfg")) and isinstance(inner.value, str):
        return line, _read_source(path.parent / inner.value, variables)[1]
    return line, arguments


_DATA = frozenset(("data_path", "train_data_path", "mock_data", "data_args_path"))


_MOST_VALUES = 100_000


def _check_size(path: Path, mapping: Mapping[str, Any]) -> None:
    """Refuse YAML whose references make it huge or infinite."""
    values: list[Any] = [mapping]
    for _ in range(_MOST_VALUES):
        if not values:
            return
        value = values.pop()
        inner = value.values() if isinstance(value, Mapping) else value
        values += inner if isinstance(value, Mapping | list) else ()
    got, wanted = f"more than {_MOST_VALUES} values", "a configuration"
    refuse(TITLE, str(path), got, wanted)


def _fill(value: Any, variables: Mapping[str, str]) -> Any:
    """Replace ``${NAME}`` in a configuration."""
    if isinstance(value, Mapping):
        return {key: _fill(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, variables) for inner in value]
    is_text = isinstance(value, str) and "$" in value
    return fill_variables(value, variables) if is_text else value


def _change_arguments(
    arguments: GivenArguments, extra: str, without: Sequence[str]
) -> GivenArguments:
    """Add and remove arguments."""
    try:
        words = shlex.split(extra)
    except ValueError as error:
        refuse(TITLE, "--with", repr(extra), f"arguments ({error})")
    if words and not megatron.is_option(words[0]):
        words = [f"--{word}" for word in words]
    more = megatron.read_words(words)
    left = {name.lstrip("-").replace("_", "-") for name in without}
    options = megatron.load_table().options
    names = {options[name][0].name for name in left if name in options}
    given = {name: one for name, one in arguments.given.items() if name not in names}
    problems = [
        problem
        for problem in arguments.problems
        if problem.path.lstrip("-").rpartition(".")[2].replace("_", "-") not in left
    ]
    unread = {problem.path.lstrip("-").replace("_", "-") for problem in arguments.problems}
    for name in left - unread - {one.replace("_", "-") for one in arguments.given}:
        if not names & {entry[0].name for key, entry in options.items() if key == name}:
            fix = "leave it out"
            problems.append(Problem("--without", name, "an argument of the line", fix))
    return GivenArguments(given | more.given, arguments.idle, [*problems, *more.problems])


def _count_nemo_ranks(arguments: GivenArguments) -> int:
    sizes = [arguments.given[n].value for n in ("devices", "num_nodes") if n in arguments.given]
    return math.prod(sizes) if sizes and all(type(size) is int for size in sizes) else 0


def _make_config(
    reading: Reading, family: FamilyName, model: Any, ranks: int
) -> tuple[TrainConfig, int]:
    """The configuration, and its number of ranks."""
    reading.explain("not needed", "the mesh says it", "devices", "num_nodes")
    reading.explain("not needed", "its arguments are read", "yaml_cfg")
    mesh, settings = read_step_settings(reading, family, ranks)
    settings |= read_data_settings(reading, family, settings["global_batch"])
    settings |= _read_checkpoints(reading) | _read_logs(reading)
    settings |= read_evaluation_settings(reading, settings, family)
    why = "initial parameters and dropout are other numbers of it; the order of samples is the same"
    if "order" not in settings:
        why = "initial parameters, dropout and the order of samples are other numbers of it"
    settings |= {"seed": reading.take("seed", "seed", why)}
    settings |= _read_anomalies(reading, settings)
    own: dict[str, Any] = {family: model}
    config = configure(**settings, **own)
    if family != "gpt":
        config = configure(config, gpt=TrainConfig().gpt)
    return apply_precision(reading, config), mesh.size


def _check_migration(source: Any, config: TrainConfig, reading: Reading, ranks: int) -> Migration:
    """Check the configuration but for files and packages that are not on this machine."""
    missing = [path for path in _list_files(config) if not _is_here(path)]
    tried = configure(config, tensorboard=False, wandb=False, cuda_graph=False, device="cpu")
    if missing:
        named = bool(config.evaluation.data)
        tried = configure(tried, data="", tokenizer="", eval_data="", format="mock")
        tried = configure(tried, split=config.data.split or ("1,1" if named else ""))
    if not config.data.path and config.data.format != "mock":
        tried = configure(tried, format="mock", data="")
    if not tried.data.path:
        own = TrainConfig()
        names = ("order", "order_samples", "order_cache", "blend_surplus", "extra_token")
        tried = configure(tried, **{name: value_at(own, name) for name in names})
    if config.out and Path(config.out).exists():
        tried = configure(tried, out="", resume=False)
    tried = configure(tried, resume=False)
    try:
        validate(tried)
    except ValueError as error:
        raise ValueError(f"{TITLE} {source}\n{error}") from None
    default = configure(**{config.family.name: type(config.architecture)()})
    rows = reading.rows(_list_settings(config), _list_settings(default))
    return Migration(config, tuple(rows), ranks, absent=tuple(missing))


def _list_settings(config: TrainConfig) -> dict[str, Any]:
    """All settings and sections by name, and `rope_scaling` as a whole."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        for field in dataclasses.fields(value):
            inner, where = getattr(value, field.name), f"{path}{field.name}"
            found[name_of(type(config), where)] = inner
            if dataclasses.is_dataclass(inner) and field.name != "rope_scaling":
                walk(inner, f"{where}.")

    walk(config, "")
    return found | {name: value_at(config, name) for name in fields_under(config)}


def _list_files(config: TrainConfig) -> list[str]:
    """The files of data and tokenizer of a configuration."""
    words = [word for word in shlex.split(config.data.path) if not is_weight(word)]
    words += [word.partition("=")[2] for word in shlex.split(config.evaluation.data)]
    return list(filter(None, [*words, config.data.tokenizer]))


def _is_here(path: str) -> bool:
    return Path(path).exists() or Path(f"{path}.bin").exists()


# --- checkpoints, logs, and what is watched


def _read_checkpoints(reading: Reading) -> dict[str, Any]:
    """The run folder, checkpoints, and the run to resume."""
    found: dict[str, Any] = {}
    folder = None if reading("save") in NONE else reading("save")
    every = kept = newest = None
    if folder is not None:
        reading.take("save", "out")
        every = reading.take("save_interval", "save_every")
        kept = reading.take("save_retain_interval", "keep_every")
        newest = reading.take("most_recent_k", "keep_last")
    why = "a run folder of its own: functron's checkpoints are not Megatron-LM's"
    if folder is not None and not is_open(folder):
        here = Path(folder)
        used = here.is_dir() and any(here.iterdir())
        found["out"] = str(here / "functron") if used else folder
        reading.note("out", "save", why=why)
        found["save_every"] = every or 0
        found |= {"keep_every": kept, "keep_last": 1} if kept else {}
        found |= {"keep_last": newest} if newest and newest > 0 else {}
    load, first = reading("load"), reading("pretrained_checkpoint")
    convert = "functron convert megatron:{} run:RUN first, then --out RUN --resume"
    begins = load is not None and load == folder and not reading("finetune")
    if begins and "out" in found:
        found["resume"] = "auto"
        why = "begins, or goes on with its own; with Megatron-LM's: " + convert
        reading.note("resume", "load", why=why.format("DIR"))
    else:
        for name, value in (("load", load), ("pretrained_checkpoint", first)):
            if value is not None:
                reading.explain("not supported", convert.format("DIR"), name)
    for name in ("finetune", "no_load_optim"):
        if reading(name):
            why = "a model converted from hf: begins with new state"
            reading.explain("not needed", why, name)
    minutes = reading.take("exit_duration_in_mins", "exit_after")
    if minutes:
        found["exit_after"] = f"{minutes}m"
    return found


def _read_logs(reading: Reading) -> dict[str, Any]:
    """Records, under Megatron-LM's names, so that its charts continue."""
    found: dict[str, Any] = {}
    for theirs, ours in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        if reading(theirs) not in (None, *NONE):
            why = "its scalars have Megatron-LM's names: --log-names megatron"
            reading.note(ours, theirs, why=why)
            found[ours] = True
    found |= {"log_names": "megatron"} if found else {}
    for name in ("log_params_norm", "log_l2_norm_grad_to_tensorboard"):
        reading.note("log_layers_every", name, why="norms by layer, every 100 steps")
        found |= {"log_layers_every": 100} if reading(name) else {}
    slow = reading.take("log_straggler", "stragglers_every", "every five steps")
    return found | ({"stragglers_every": 5} if slow else {})


def _read_anomalies(reading: Reading, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Skipped steps, and comparisons of replicas."""
    found: dict[str, Any] = {}
    every = reading.take("check_weight_hash_across_dp_replicas_interval", "check_replicas_every")
    if every:
        found["check_replicas_every"] = every
    skipped = reading.take("iterations_to_skip", "anomalies.skipped_samples")
    if skipped:
        try:
            ramp = parse_ramp_up(settings.get("ramp_up", ""), settings["global_batch"])
        except ValueError:
            return found  # said elsewhere
        text = _join_ranges(
            (ramp.first_sample(n - 1), ramp.first_sample(n)) for n in sorted(skipped)
        )
        found["anomalies.skipped_samples"] = text
        why = "the samples are left out, and later steps have those that come next"
        reading.note("anomalies.skipped_samples", "iterations_to_skip", why=why)
    return found


def _join_ranges(pairs: Iterable[tuple[int, int]]) -> str:
    """Join adjacent ranges of samples."""
    joined: list[list[int]] = []
    for first, end in pairs:
        if joined and joined[-1][1] == first:
            joined[-1][1] = end
        else:
            joined.append([first, end])
    return " ".join(f"{first}:{end}" for first, end in joined)
