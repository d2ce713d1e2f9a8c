"""A launch line of Megatron-LM, or a configuration of its kin, as a configuration of functron.

`migrate` reads a shell script, a list of arguments, or YAML of Megatron-LM, Megatron-Bridge or
NeMo, and makes the `TrainConfig` of the same run, with a table of what became of every argument.
Where the line is silent, Megatron-LM's defaults are written out. Unknown arguments, variables that
nothing sets and sizes that do not fit are refused, all at once.

The arguments in a checkpoint are read as those of a line: `config_of`. `architecture_arguments` are
those of a model.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from functron import nn
from functron.core.chart import table
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.settings import fields_under, name_of, value_at
from functron.data.sampling import parse_ramp_up
from functron.models.config import GPTConfig
from functron.models.family import FAMILIES, differing_fields, field_text
from functron.nn.moe import MoEConfig
from functron.training import megatron
from functron.training.anomalies import AnomalyConfig
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, dump, read_yaml
from functron.training.launch_line import LaunchLine, is_open, read_script
from functron.training.megatron import Arguments, Kind, Reading, Row, read_arguments
from functron.training.megatron_model import FamilyName, architecture, family_of_line, vocabulary
from functron.training.megatron_step import recast, step_settings
from functron.training.stragglers import StragglersConfig

TITLE = "cannot migrate"
_NONE = ("none", "None", "null", "")
_KINDS: Mapping[Kind, str] = MappingProxyType(
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
    """The configuration that a launch line became.

    Attributes:
        config: the configuration, complete and checked but for what only the machine that trains
            has: data, a tokenizer, packages.
        rows: what became of every argument.
        processes: ranks of the mesh.
        told: whether the launcher, or who migrates, says how many there are; otherwise they are as
            few as the sizes allow.
        absent: files that the configuration names, and which are not here.
    """

    config: TrainConfig
    rows: tuple[Row, ...]
    processes: int
    told: bool = True
    absent: tuple[str, ...] = ()

    def of(self, kind: Kind) -> list[Row]:
        """The rows of one kind."""
        return [row for row in self.rows if row.kind == kind]

    def __str__(self) -> str:
        parts = []
        for kind, title in _KINDS.items():
            if rows := self.of(kind):
                cells = [[row.name, row.value, _last(row)] for row in rows]
                parts.append(f"{title}:\n{_indented(table(cells, left=3))}")
        return "\n\n".join(parts)

    def toml(self) -> str:
        """The configuration as a file that ``functron train --config`` reads, what it does not have
        of the line at its head."""
        lines = ["# made by functron migrate"]
        lines += [f"# not supported: {r.name} {r.value}: {r.why}" for r in self.of("not supported")]
        return "\n".join([*(" ".join(line.split()) for line in lines), "", dump(self.config)])


def _last(row: Row) -> str:
    return "; ".join(filter(None, (row.ours, row.why)))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def migrate(
    source: str | Path,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    extra: str = "",
    without: Sequence[str] = (),
    processes: int = 0,
    closest: bool = False,
) -> Migration:
    """The configuration of the run that a launch line starts.

    Args:
        source: the file: a script, a list of arguments, or YAML.
        variables: of the script's surroundings, by name; ``"1"`` is its first argument.
        extra: arguments after those of the line, which win: as a line has them, or as
            ``NAME=VALUE`` and ``NAME``.
        without: arguments that are left out, without dashes, such as those of a fork.
        processes: ranks; 0: as many as the launcher starts.
        closest: make the nearest model where functron has not Megatron-LM's.

    Raises:
        ValueError: the file cannot be read or launches nothing; arguments are unknown, or describe
            what cannot be trained; or sizes do not fit. All such are listed with their fixes.
    """
    line, arguments = _read(Path(source), variables)
    arguments = _changed(arguments, extra, without)
    reading = Reading(arguments, closest)
    reading.problems += arguments.problems
    raise_problems(f"{TITLE} {source}", reading.problems)
    family = family_of_line(reading, line.program)
    try:
        model = architecture(reading, family)
    except ValueError as error:
        raise_problems(f"{TITLE} {source}", reading.problems)
        raise ValueError(f"{TITLE} {source}\n{error}") from None
    ranks = processes or line.processes or _nemo_ranks(arguments)
    told = ranks > 0
    config, ranks = _configured(reading, family, model, ranks)
    config = configure(config, model=family, source=f"launch:{Path(source).name}")
    raise_problems(f"{TITLE} {source}", reading.problems)
    return replace(_checked(source, config, reading, ranks), told=told)


def _read(path: Path, variables: Mapping[str, str]) -> tuple[LaunchLine, Arguments]:
    """The launch line in a file, and its arguments."""
    if path.suffix in (".yaml", ".yml"):
        mapping = read_yaml(path)
        _check_size(path, mapping)
        mapping = _filled(mapping, variables)
        program = str(mapping.get("TRAINING_SCRIPT", ""))
        target = mapping.get("model")
        target = str(target.get("_target_", "")) if isinstance(target, Mapping) else ""
        for word, name in (("T5", "t5"), ("Mamba", "mamba"), ("Bert", "bert")):
            program = f"pretrain_{name}" if word in target else program
        arguments = megatron.read_mapping(mapping)
        if isinstance(mapping.get("dataset"), Mapping) and not _DATA & arguments.given.keys():
            # Megatron-Bridge's, where there is no blend
            arguments.given["mock_data"] = megatron.Given("dataset.blend", True, "none")
        return LaunchLine(program, ()), arguments
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(TITLE, str(path), reason, "a readable script, list of arguments, or YAML")
    line = read_script(text, megatron.table().options, variables)
    arguments = megatron.read_words(line.words)
    if (inner := arguments.given.get("yaml_cfg")) and isinstance(inner.value, str):
        return line, _read(path.parent / inner.value, variables)[1]
    return line, arguments


_DATA = frozenset(("data_path", "train_data_path", "mock_data", "data_args_path"))


_MOST_VALUES = 100_000


def _check_size(path: Path, mapping: Mapping[str, Any]) -> None:
    """Refuse what references within a file make of it: much, or something without end."""
    values: list[Any] = [mapping]
    for _ in range(_MOST_VALUES):
        if not values:
            return
        value = values.pop()
        inner = value.values() if isinstance(value, Mapping) else value
        values += inner if isinstance(value, Mapping | list) else ()
    got, wanted = f"more than {_MOST_VALUES} values", "a configuration"
    refuse(TITLE, str(path), got, wanted)


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    """A configuration with ``${NAME}`` replaced where `variables` has it."""
    if isinstance(value, Mapping):
        return {key: _filled(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, variables) for inner in value]
    if not isinstance(value, str) or "$" not in value:
        return value
    line = read_script(f'x --lr "{value}"' if '"' not in value else "x --lr x", {"lr"}, variables)
    return line.words[1] if '"' not in value else value


def _changed(arguments: Arguments, extra: str, without: Sequence[str]) -> Arguments:
    """`arguments` with some more, and without others."""
    try:
        words = shlex.split(extra)
    except ValueError as error:
        refuse(TITLE, "--with", repr(extra), f"arguments ({error})")
    if words and not megatron.is_option(words[0]):
        words = [f"--{word}" for word in words]
    more = megatron.read_words(words)
    left = {name.lstrip("-").replace("_", "-") for name in without}
    options = megatron.table().options
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
    return Arguments(given | more.given, arguments.idle, [*problems, *more.problems])


def _nemo_ranks(arguments: Arguments) -> int:
    """Ranks that NeMo's trainer starts."""
    sizes = [arguments.given[n].value for n in ("devices", "num_nodes") if n in arguments.given]
    return math.prod(sizes) if sizes and all(type(size) is int for size in sizes) else 0


def _configured(
    reading: Reading, family: FamilyName, model: Any, ranks: int
) -> tuple[TrainConfig, int]:
    """The configuration, and its ranks."""
    reading.say("not needed", "the mesh says it", "devices", "num_nodes")
    reading.say("not needed", "its arguments are read", "yaml_cfg")
    mesh, settings = step_settings(reading, family, ranks)
    settings |= data_settings(reading, family, settings["global_batch"])
    settings |= _checkpoints(reading) | _logs(reading)
    settings |= _evaluation(reading, settings, family)
    why = "initial parameters and dropout are other numbers of it; the order of samples is the same"
    if "order" not in settings:
        why = "initial parameters, dropout and the order of samples are other numbers of it"
    settings |= {"seed": reading.take("seed", "seed", why)}
    settings |= _anomalies(reading, settings)
    own: dict[str, Any] = {family: model}
    config = configure(**settings, **own)
    if family != "gpt":
        config = configure(config, gpt=TrainConfig().gpt)
    return recast(reading, config), mesh.size


def _checked(source: Any, config: TrainConfig, reading: Reading, ranks: int) -> Migration:
    """The migration, whose configuration is valid but for what is not on this machine."""
    missing = [path for path in _files(config) if not _is_here(path)]
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
    rows = reading.rows(_paths(config), _paths(default))
    return Migration(config, tuple(rows), ranks, absent=tuple(missing))


def _paths(config: TrainConfig) -> dict[str, Any]:
    """The settings and sections of a configuration by their names; `rope_scaling` as a whole."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        for field in dataclasses.fields(value):
            inner, where = getattr(value, field.name), f"{path}{field.name}"
            found[name_of(type(config), where)] = inner
            if dataclasses.is_dataclass(inner) and field.name != "rope_scaling":
                walk(inner, f"{where}.")

    walk(config, "")
    return found | {name: value_at(config, name) for name in fields_under(config)}


def _files(config: TrainConfig) -> list[str]:
    """The files of data and the tokenizer that a configuration names."""
    words = [word for word in shlex.split(config.data.path) if not _is_weight(word)]
    words += [word.partition("=")[2] for word in shlex.split(config.evaluation.data)]
    return list(filter(None, [*words, config.data.tokenizer]))


def _is_weight(word: str) -> bool:
    return word == "all" or re.fullmatch(r"[\d.]+(e-?\d+)?", word) is not None


def _is_here(path: str) -> bool:
    return Path(path).exists() or Path(f"{path}.bin").exists()


# --- data


DATA_ARGUMENTS = (
    "data_path", "data_args_path", "train_data_path", "per_split_data_args_path", "mock_data",
    "valid_data_path", "test_data_path", "split", "dataloader_type", "data_cache_path",
    "mid_level_dataset_surplus", "add_extra_token_to_sequence", "reset_position_ids",
    "reset_attention_mask", "eod_mask_loss", "train_samples", "train_iters",
)  # fmt: skip
"""The arguments that `data_settings` reads, of a model that predicts the next token."""


def data_settings(reading: Reading, family: FamilyName, batch: int) -> dict[str, Any]:
    """The settings of `TrainConfig` that say where samples come from, and in which order.

    Args:
        reading: the line; what becomes of its arguments is noted there.
        family: what it trains.
        batch: samples of a step, in the end.
    """
    found: dict[str, Any] = _documents(reading)
    why = "of a BERT's samples: they have all --seq tokens"
    reading.say("not supported" if family == "bert" else "not needed", why, "short_seq_prob")
    rate = reading.take("mask_prob", "mask_rate")
    found |= {"mask_rate": rate} if family in ("bert", "t5") else {}
    if family == "gpt":
        reading.unused("mask_prob")
    found |= _special_tokens(reading, family)
    names = ("train_data_path", "valid_data_path", "test_data_path")
    blend = _paths_of(reading, "data_path", "data_args_path")
    train = _paths_of(reading, "train_data_path", "per_split_data_args_path")
    reading.say("not supported", "functron evaluate RUN --data PREFIX, afterwards", names[2])
    if not reading.has(names[2]):
        reading.unused(names[2])
    split = reading.take("split", "split")
    mock = reading("mock_data")
    if mock:
        reading.taken("format", "mock_data")
    else:
        reading.unused("mock_data")
    if sum(map(bool, (blend, train, mock))) > 1:
        reading.refuse("data_path", "one of --data-path, --train-data-path and --mock-data")
    text = "" if split is None else ",".join(re.findall(r"[\d.]+", split))
    if split is None and (blend or mock):
        text = "969,30,1"  # Megatron-LM's own
        reading.taken("split", "split")
    if not (mock or blend or train):
        fix = "--with data-path=PREFIX, or mock-data for random tokens"
        reading.refuse("data_path", "files of tokens", fix)
    if mock or not (blend or train):
        found |= _order(reading, "", batch)
        return found | _tokens(reading, True) | {"format": "mock", "split": text or "969,30,1"}
    found |= {"data": blend or train, "format": "tokens", "split": text if blend else ""}
    found |= _order(reading, found["data"] if family in ("gpt", "mamba") else "", batch)
    if train:
        reading.unused("split")
    return found | _tokens(reading, False)


def _order(reading: Reading, data: str, batch: int) -> dict[str, Any]:
    """Megatron-LM's order of the samples of `data`; empty: of others, whose order is our own."""
    names = ("data_cache_path", "mid_level_dataset_surplus", "add_extra_token_to_sequence")
    reading.unused(*names)
    kind = reading.take("dataloader_type", "order")
    if kind not in (None, "single"):
        why = "samples come in one shuffled order, and again in another for the next epoch"
        reading.say("not supported", why, "dataloader_type")
        return {}
    reading.say("same", "samples come in one shuffled order", "dataloader_type")
    samples = reading("train_samples") or (reading("train_iters") or 0) * batch
    if not data or samples < 1:  # no number of steps is said elsewhere
        return {}
    found: dict[str, Any] = {"order": "megatron", "order_samples": samples}
    why = f"order = megatron, of {samples} samples: the same ones in every step"
    for name in ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path"):
        if reading.has(name) and reading.fates.get(name, ("",))[0] == "taken":
            reading.taken("data", name, why=why)
    cache = reading("data_cache_path")
    if cache and cache not in _NONE and not is_open(cache):
        found["order_cache"] = reading.take("data_cache_path", "order_cache")
    if len(data.split()) > 1:
        found["blend_surplus"] = reading.take("mid_level_dataset_surplus", "blend_surplus")
    found["extra_token"] = reading.take("add_extra_token_to_sequence", "extra_token")
    return found


def _special_tokens(reading: Reading, family: FamilyName) -> dict[str, Any]:
    """The ids of a BERT's [MASK], and of a T5's end, in the tokenizers that Megatron-LM has."""
    kind = reading("tokenizer_type") or "BertWordPieceLowerCase"
    words = kind.startswith("BertWordPiece")
    if family == "bert" and words:
        return {"mask_token": 103}  # in both published vocabularies
    if family != "t5" or not (words or kind.startswith("Null")):
        return {}
    size, _ = vocabulary(reading, family)
    # [BOS], [EOS] and the sentinels follow the words
    return {"end_token": size - (reading("vocab_extra_ids") if words else 0) - 1}


def _documents(reading: Reading) -> dict[str, Any]:
    """Whether documents see one another."""
    names = ("reset_position_ids", "reset_attention_mask")
    both = [reading.take(name, "mask_documents") for name in names]
    unlearnt = reading.take("eod_mask_loss", "mask_documents")
    if any(both) and not all(both):
        name = names[both.index(True)]
        other = reading.spelled(names[both.index(False)])
        reading.refuse(name, f"{other} with it", "documents see themselves alone, or all that came")
    if all(both) and not unlearnt:
        why = "a document's last token predicts nothing, as with --eod-mask-loss"
        reading.taken("mask_documents", *names, why=why)
    if unlearnt and not all(both):
        why = "the end of a document is a target like others, where documents are not kept apart"
        reading.say("not supported", why, "eod_mask_loss")
    return {"mask_documents": True} if all(both) else {}


def _paths_of(reading: Reading, name: str, file: str) -> str:
    """A blend of files of tokens as functron writes it; empty: there is none."""
    reading.unused(file)
    words = list(reading.take(name, "data") or ())
    path = reading(file)
    if not words and path and not is_open(path):
        reading.taken("data", file)
        words = _listed(reading, file, path, name)
    words = [word.strip("\"'") for word in words]
    words = [piece for word in words for piece in word.split()]
    if len(words) < 2 or any(map(is_open, words)):
        return " ".join(words)
    if len(words) % 2 == 0 and all(map(_is_weight, words[::2])):
        return " ".join(map(shlex.quote, words))
    return " ".join(f"all {shlex.quote(word)}" for word in words)


def _listed(reading: Reading, file: str, path: str, name: str) -> list[str]:
    """The words of a file that lists data."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if file.startswith("per_split"):
            key = name.partition("_")[0]
            found = read_yaml(Path(path)).get(key) or []
            return [str(word) for word in (found if isinstance(found, list) else [found])]
        return text.split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reading.refuse(file, f"a readable list of data ({reason})")
        return []


def _tokens(reading: Reading, mock: bool) -> dict[str, Any]:
    """The tokenizer, which a run on tokens needs for nothing but to show text."""
    why = "tokens on disk are made already; --tokenizer FOLDER shows samples as text"
    for name in ("tokenizer_type", "tokenizer_model", "tiktoken_pattern"):
        if reading.fates.get(name, ("",))[0] != "taken":  # of which the vocabulary is known
            reading.say("not needed", why, name)
    path = reading("tokenizer_model")
    if mock or not path or is_open(path) or not Path(path).exists():
        return {}
    reading.taken("tokenizer", "tokenizer_model")
    return {"tokenizer": path}


def _evaluation(
    reading: Reading, settings: Mapping[str, Any], family: FamilyName
) -> dict[str, Any]:
    """Held-out data."""
    every = reading.take("eval_interval", "eval_every") or 0
    batches = reading.take("eval_iters", "eval_batches")
    whole = reading.take("full_validation", "eval_batches")
    if whole and settings["format"] == "mock":
        reading.say("not needed", "random tokens have no end: --eval-iters", "full_validation")
        whole = False
    reading.say("same", "every held-out set has a loss of its own", "multiple_validation_sets")
    valid = [w for word in reading.take("valid_data_path", "eval_data") or () for w in word.split()]
    weights = len(valid) > 1 and len(valid) % 2 == 0 and all(map(_is_weight, valid[::2]))
    if weights and len(valid) > 2:
        why = "each of its files is a held-out set: a blend has no loss of its own"
        reading.taken("eval_data", "valid_data_path", why=why)
    paths = valid[1::2] if weights else valid
    names = [Path(path).name for path in paths]
    names = names if len(set(names)) == len(names) else [f"valid-{n}" for n in range(len(names))]
    names = [re.sub(r"[^\w.-]", "-", name) for name in names]
    pairs = zip(names, map(shlex.quote, paths), strict=True)
    named = " ".join(f"{name}={path}" for name, path in pairs)
    shares = [float(x) for x in re.findall(r"\d+\.?\d*|\.\d+", settings.get("split", ""))]
    some = bool(named) or (len(shares) > 1 and shares[1] > 0)
    if every < 1 or not some or (not whole and (batches or 0) < 1):
        why = "there is no held-out data"
        reading.say("not needed", why, "eval_interval", "eval_iters", "full_validation")
        return {}
    found: dict[str, Any] = {"eval_every": every, "eval_batches": 0 if whole else batches}
    return found | ({"eval_data": named} if named else {})


# --- checkpoints, logs, and what is watched


def _checkpoints(reading: Reading) -> dict[str, Any]:
    """The run folder, what is saved, and what a run goes on from."""
    found: dict[str, Any] = {}
    folder = reading.take("save", "out")
    every = reading.take("save_interval", "save_every")
    kept = reading.take("save_retain_interval", "keep_every")
    newest = reading.take("most_recent_k", "keep_last")
    why = "a run folder of its own: functron's checkpoints are not Megatron-LM's"
    if folder in _NONE or folder is None:
        reading.unused("save", "save_interval", "save_retain_interval", "most_recent_k")
    elif not is_open(folder):
        here = Path(folder)
        used = here.is_dir() and any(here.iterdir())
        found["out"] = str(here / "functron") if used else folder
        reading.taken("out", "save", why=why)
        found["save_every"] = every or 0
        found |= {"keep_every": kept, "keep_last": 1} if kept else {}
        found |= {"keep_last": newest} if newest and newest > 0 else {}
    load, first = reading("load"), reading("pretrained_checkpoint")
    convert = "functron convert megatron:{} run:RUN first, then --out RUN --resume"
    begins = load is not None and load == folder and not reading("finetune")
    if begins and "out" in found:
        found["resume"] = "auto"
        why = "begins, or goes on with its own; with Megatron-LM's: " + convert
        reading.taken("resume", "load", why=why.format("DIR"))
    else:
        for name, value in (("load", load), ("pretrained_checkpoint", first)):
            if value is not None:
                reading.say("not supported", convert.format("DIR"), name)
            else:
                reading.unused(name)
    reading.unused("exit_on_missing_checkpoint", "finetune", "no_load_optim")
    for name in ("finetune", "no_load_optim"):
        if reading(name):
            why = "a converted model begins with new state where it is converted from hf:"
            reading.say("not needed", why, name)
    minutes = reading.take("exit_duration_in_mins", "exit_after")
    if minutes:
        found["exit_after"] = f"{minutes}m"
    return found


def _logs(reading: Reading) -> dict[str, Any]:
    """Where records go: under Megatron-LM's names, so that pictures of them go on."""
    found: dict[str, Any] = {}
    for theirs, ours in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        reading.taken(
            ours, theirs, why="its scalars have Megatron-LM's names: --log-names megatron"
        )
        if reading(theirs) not in (None, *_NONE):
            found[ours] = True
        else:
            reading.unused(theirs)
    found |= {"log_names": "megatron"} if found else {}
    for name in ("log_params_norm", "log_l2_norm_grad_to_tensorboard"):
        reading.taken("log_layers_every", name, why="norms by layer, every 100 steps")
        found |= {"log_layers_every": 100} if reading(name) else {}
    slow = reading.take("log_straggler", "stragglers_every", "every five steps")
    return found | ({"stragglers_every": StragglersConfig.every} if slow else {})


def _anomalies(reading: Reading, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Steps that are left out, and replicas that are compared."""
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
        text = _ranges((ramp.first_sample(n - 1), ramp.first_sample(n)) for n in sorted(skipped))
        found["anomalies"] = AnomalyConfig(skipped_samples=text)
        why = "the samples are left out, and later steps have those that come next"
        reading.taken("anomalies.skipped_samples", "iterations_to_skip", why=why)
    return found


def _ranges(pairs: Iterable[tuple[int, int]]) -> str:
    """Ranges of samples, neighbours joined."""
    joined: list[list[int]] = []
    for first, end in pairs:
        if joined and joined[-1][1] == first:
            joined[-1][1] = end
        else:
            joined.append([first, end])
    return " ".join(f"{first}:{end}" for first, end in joined)


# --- the arguments in a checkpoint

_SAME = MappingProxyType(
    {
        "num_layers": "num_layers", "hidden_size": "embed_dim", "num_attention_heads": "num_heads",
        "max_position_embeddings": "max_seq", "norm_epsilon": "norm_eps", "swiglu": "gated",
        "apply_layernorm_1p": "zero_centered_norm", "init_method_std": "init_stddev",
        "fp32_residual_connection": "fp32_residual",
    }
)  # fmt: skip
"""Megatron-LM's arguments, and the fields of ours that mean the same."""
_LATENT_SAME = MappingProxyType(
    {"q_lora_rank": "q_rank", "kv_lora_rank": "kv_rank", "qk_head_dim": "head_dim",
     "qk_pos_emb_head_dim": "rope_head_dim", "v_head_dim": "v_head_dim"}
)  # fmt: skip
_MOE_SAME = MappingProxyType(
    {
        "num_experts": "num_experts", "moe_router_topk": "top_k",
        "moe_ffn_hidden_size": "expert_dim",
        "moe_router_score_function": "score", "moe_router_topk_scaling_factor": "scale",
        "moe_router_num_groups": "num_groups", "moe_router_group_topk": "top_groups",
        "moe_router_enable_expert_bias": "balance_bias",
        "moe_router_bias_update_rate": "balance_rate",
        "moe_shared_expert_intermediate_size": "shared_dim",
        "moe_shared_expert_gate": "shared_gate",
        "moe_z_loss_coeff": "z_loss", "moe_input_jitter_eps": "jitter",
        "moe_expert_capacity_factor": "capacity_factor",
    }
)  # fmt: skip
_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "is_hybrid_model": ((False, None), "hybrids in a Megatron checkpoint yet"),
        "hybrid_override_pattern": ((None,), "hybrids in a Megatron checkpoint yet"),
        "hybrid_layer_pattern": ((None,), "hybrids in a Megatron checkpoint yet"),
        "num_moe_experts_per_layer": ((None,), "layers of different numbers of experts"),
        "moe_use_upcycling": ((False, None), "checkpoints before they are upcycled"),
        "moe_router_force_load_balancing": ((False, None), "routers that choose at random"),
        "moe_latent_size": ((None,), "such experts in a Megatron checkpoint yet"),
        "softmax_type": (("vanilla", None), "such a softmax in a Megatron checkpoint yet"),
        "attention_output_gate": ((False, None), "that gate in a Megatron checkpoint yet"),
        "scale_logits_with_mup": ((False, None), "Megatron's width rules"),
        "linear_attention_freq": ((None,), "linear attention"),
        "experimental_attention_variant": ((None,), "that attention"),
        "encoder_num_layers": ((None,), "encoders"),
    }
)
"""Arguments that a checkpoint may have at these values alone, and what our model lacks of others.

An encoder's number of layers repeats the decoder's in old ones, and is passed over there."""
_OF_VOCABULARY = (
    "vocab_size", "vocab_extra_ids", "tokenizer_type", "tokenizer_model", "vocab_file",
    "merge_file", "make_vocab_size_divisible_by",
)  # fmt: skip


MASKED_VOCABULARY = "functron_vocab_size"
"""Our argument beside Megatron-LM's: rows of the embedding from there on are in no softmax.

Megatron-LM, which has no such mask, passes it over and does not write it: what it has trained since
counts them all.
"""


def reading_of(args: Mapping[str, Any]) -> Reading:
    """The arguments in a checkpoint, to be read as those of a launch line.

    Its vocabulary is the padded one, whose rows are all in Megatron's softmax.
    """
    dropped = {*_OF_VOCABULARY, "encoder_num_layers"}
    return Reading(read_arguments({n: v for n, v in args.items() if n not in dropped}))


def problems_of(reading: Reading) -> list[Problem]:
    """The problems of a checkpoint's arguments, of those that were read.

    Fixes of a launch line, which would be given other arguments, are none here.
    """
    kinds = [each for each in reading.arguments.problems if each.path in reading.fates]
    return [
        replace(each, fix="") if each.fix.startswith("--") else each
        for each in (*kinds, *reading.problems)
    ]


def config_of(args: Mapping[str, Any], *, where: str = "args") -> GPTConfig:
    """The architecture that Megatron-LM's arguments in a checkpoint describe.

    It is that of a launch line with them, but for what was derived since: the padded vocabulary, or
    as much of it as `MASKED_VOCABULARY` says; and of one module of multi-token prediction a weight
    that is larger by ``seq / (seq - 1)``, since Megatron takes the mean over tokens that have one.

    Raises:
        ValueError: the arguments are not there, or describe what our decoder does not compute; all
            offenders are listed.
    """
    problems: list[Problem] = []
    for name, (allowed, lacks) in _ONLY.items():
        value = args.get(name)
        if value not in allowed and not (
            name == "encoder_num_layers" and value == args.get("num_layers")
        ):
            wanted = " or ".join(repr(each) for each in allowed if each is not None) or "None"
            problems.append(Problem(name, repr(value), wanted, f"our decoder has not {lacks}"))
    needed = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size")
    problems += [
        Problem(name, "no such argument", "the model's", "pass --model")
        for name in needed
        if type(args.get(name)) is not int
    ]
    problems += [] if problems else _vocabulary_problems(args)
    title = f"cannot tell the model of {where}"
    raise_problems(title, problems)
    reading = reading_of(args)
    try:
        made = architecture(reading, "gpt")
    except ValueError as error:
        raise_problems(title, problems_of(reading))
        raise ValueError(f"{title}\n{error}") from None
    raise_problems(title, problems_of(reading))
    bits = {"bf16": "bfloat16", "fp16": "float16"}
    dtype: Any = next((bits[name] for name in bits if args.get(name)), "float32")
    assert isinstance(made, GPTConfig)
    made = replace(made, **_vocabulary_of(args), dtype=dtype)
    return replace(made, mtp_weight=_ahead_weight(args)) if made.mtp_depth else made


def _vocabulary_problems(args: Mapping[str, Any]) -> list[Problem]:
    real, padded = args.get(MASKED_VOCABULARY), args["padded_vocab_size"]
    if real is None or (type(real) is int and 0 < real <= padded):
        return []
    fix = "set it to the number of tokens that the model has, or remove it: the padded size counts"
    return [Problem(MASKED_VOCABULARY, repr(real), f"1 to padded_vocab_size={padded}", fix)]


def _vocabulary_of(args: Mapping[str, Any]) -> dict[str, int]:
    """The fields of a checkpoint's vocabulary, which has as many rows as the padded one."""
    padded = args["padded_vocab_size"]
    real, multiple = args.get(MASKED_VOCABULARY, padded), args.get("make_vocab_size_divisible_by")
    found = {"vocab_size": real, "vocab_multiple": padded}
    if MASKED_VOCABULARY not in args or type(multiple) is not int or multiple < 1:
        return found
    fits = -(-real // multiple) * multiple == padded
    return {**found, "vocab_multiple": multiple} if fits else found


def _ahead_weight(args: Mapping[str, Any]) -> float:
    factor, seq = args.get("mtp_loss_scaling_factor"), args.get("seq_length") or 0
    factor = 0.1 if factor is None else factor
    return factor * seq / (seq - 1) if args["mtp_num_layers"] == 1 and seq > 1 else factor


def architecture_arguments(config: GPTConfig, *, seq: int = 0) -> dict[str, Any]:
    """Megatron-LM's arguments of an architecture.

    Args:
        config: the architecture.
        seq: tokens of a sample, which the weight of multi-token prediction is scaled by.

    Raises:
        ValueError: Megatron's arguments cannot express it; all fields are listed.
    """
    c, moe = config, config.moe
    made: dict[str, Any] = {theirs: getattr(c, ours) for theirs, ours in _SAME.items()}
    made |= {
        "ffn_hidden_size": c.mlp_dim, "padded_vocab_size": c.padded_vocab,
        "make_vocab_size_divisible_by": c.vocab_multiple, "vocab_size": c.vocab_size,
        "normalization": "RMSNorm" if c.norm == "rms" else "LayerNorm",
        "untie_embeddings_and_output_weights": not c.tied, "add_bias_linear": c.bias,
        "add_qkv_bias": c.qkv_bias, "hidden_dropout": c.dropout, "attention_dropout": 0.0,
        "position_embedding_type": "learned_absolute" if c.positions == "learned" else c.positions,
        "rotary_base": int(c.rope_theta), "rotary_percent": c.rope_fraction,
        "squared_relu": c.activation == "relu2", "openai_gelu": c.activation == "gelu_tanh",
        "bias_gelu_fusion": False, "bf16": c.dtype == "bfloat16", "fp16": c.dtype == "float16",
        "params_dtype": c.torch_dtype, "qk_layernorm": c.qk_norm or bool(c.kv_rank),
        "multi_latent_attention": bool(c.kv_rank), "seq_length": seq or c.max_seq,
        "num_experts": None, "mtp_num_layers": c.mtp_depth or None,
    }  # fmt: skip
    if c.kv_rank:
        made |= {theirs: getattr(c, ours) or None for theirs, ours in _LATENT_SAME.items()}
        made |= {"rope_type": "rope"} | _yarn_arguments(c.rope_scaling)
    else:
        made |= {"group_query_attention": c.kv_heads != c.num_heads, "num_query_groups": c.kv_heads}
        made |= {"kv_channels": c.head_size, "rotary_interleaved": c.rope_pairs == "neighbours"}
        if c.window:
            skipped = {"window_attn_skip_freq": c.global_every} if c.global_every else {}
            made |= {"window_size": (c.window - 1, 0), **skipped}
        if c.rope_scaling is not None and c.rope_scaling.kind == "llama3":
            made |= {"use_rope_scaling": True, "rope_scaling_factor": c.rope_scaling.factor}
    if moe is not None:
        kinds = {"batch": "aux_loss", "sequence": "seq_aux_loss"}
        made |= {theirs: getattr(moe, ours) for theirs, ours in _MOE_SAME.items()}
        if moe.num_groups == 1:
            made |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
        made |= {
            "moe_layer_freq": [0] * c.dense_layers + [1] * (c.num_layers - c.dense_layers)
            if c.dense_layers else 1,
            "moe_router_load_balancing_type": kinds[moe.aux] if moe.aux_loss else "none",
            "moe_aux_loss_coeff": moe.aux_loss,
            "moe_router_pre_softmax": moe.score == "softmax" and not _sums_to_one(moe),
            "moe_shared_expert_intermediate_size": moe.shared_dim or None,
            "moe_z_loss_coeff": moe.z_loss or None, "moe_input_jitter_eps": moe.jitter or None,
            "moe_expert_capacity_factor": moe.capacity_factor or None,
            "moe_token_drop_policy": "probs" if moe.drop == "probability" else "position",
            "moe_token_dispatcher_type": "allgather" if moe.dispatch == "gather" else "alltoall",
            "moe_router_dtype": "fp64" if moe.router_dtype == "float64" else "fp32",
        }  # fmt: skip
    if c.mtp_depth:
        made["mtp_loss_scaling_factor"] = c.mtp_weight
        made["mtp_loss_scaling_factor"] = c.mtp_weight**2 / (_ahead_weight(made) or 1.0)
    _check_back(config, made)
    return made


_KEEP = (
    "keep the model as a run, or write it for transformers, functron convert run:RUN hf:PATH; a "
    "model that is to become Megatron's must be trained with what Megatron has"
)


def _routing_problems(moe: MoEConfig) -> Iterator[Problem]:
    """Routing that Megatron-LM refuses or does otherwise, where weights are a softmax of few."""
    if moe.score != "softmax" or not _sums_to_one(moe):
        return
    if moe.top_k == 1:
        got, wanted = "1, whose weight is 1", "2 at least: with 1 Megatron-LM weighs by probability"
        yield Problem("moe.top_k", got, wanted, _KEEP)
    if moe.num_groups > 1 and moe.group_score == "top2":
        got, wanted = "'top2', of probabilities", "'max': Megatron-LM ranks groups by logits there"
        yield Problem("moe.group_score", got, wanted, _KEEP)


def _sums_to_one(moe: MoEConfig) -> bool:
    """Whether a token's weights sum to 1, as those of a softmax over its experts alone do."""
    return moe.normalise == "after" or moe.renormalise


def _yarn_arguments(scaling: nn.RopeScaling | None) -> dict[str, Any]:
    """The arguments of latent attention's stretched positions; none where they are plain."""
    if scaling is None or scaling.kind != "yarn":
        return {}
    return {
        "rope_type": "yarn", "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_seq,
        "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim,
    }  # fmt: skip


def _check_back(config: GPTConfig, made: Mapping[str, Any]) -> None:
    """Refuse a config that is another one when it is read from its arguments."""
    title = "Megatron has no such model"
    raise_problems(title, [] if config.moe is None else [*_routing_problems(config.moe)])
    canonical = FAMILIES["gpt"].canonical
    # rows of padding, and how parameters are joined, are of the layout alone
    plain = replace(
        config, vocab_size=config.padded_vocab, vocab_multiple=config.padded_vocab,
        fused_projections=False,
    )  # fmt: skip
    back = replace(config_of(made), mtp_weight=plain.mtp_weight)
    wanted, got = canonical(plain), canonical(back)
    found = [
        Problem(
            path, field_text(attrgetter(path)(config)), f"{field_text(theirs)}, in Megatron", _KEEP
        )
        for path, _, theirs in differing_fields(wanted, got)
    ]
    raise_problems(title, found)
