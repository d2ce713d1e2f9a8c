"""The options of a command: those of a dataclass, its docstring the help, and what was meant.

A dataclass may have others as fields, whose options go under the field's name, or under none.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import tyro

from functron.cli import process
from functron.core.errors import Needs, Problem, raise_problems, unused_problems, value_at

T = TypeVar("T")

Boxes = Mapping[str, Sequence[str]]
"""By title, the names of fields, which stand for all options under them that no longer name has."""

_ALIASES: Mapping[str, str] = MappingProxyType({
    "learning-rate.peak": "lr learning-rate max-lr peak-lr",
    "learning-rate.end": "min-lr min-learning-rate end-lr",
    "learning-rate.name": "lr-decay-style lr-scheduler-type lr-schedule lr-scheduler scheduler",
    "learning-rate.warmup-steps": "warmup warmup-steps warmup-iters lr-warmup-iters "
    "num-warmup-steps",
    "learning-rate.decay-steps": "lr-wsd-decay-iters",
    "learning-rate.total-steps": "lr-decay-iters lr-decay-steps",
    "optimizer.name": "optim optimizer",
    "optimizer.weight-decay": "wd weight-decay",
    "optimizer.b1": "beta1 adam-beta1",
    "optimizer.b2": "beta2 adam-beta2",
    "optimizer.eps": "eps adam-eps adam-epsilon",
    "optimizer.clip-norm": "clip-grad grad-clip max-grad-norm gradient-clip-val clip",
    "global-batch": "batch batch-size bs global-batch-size train-batch-size "
    "per-device-train-batch-size train-micro-batch-size",
    "batch": "batch-size per-device-eval-batch-size eval-batch-size",
    "microbatches": "micro-batch-size gradient-accumulation-steps grad-accum accumulation-steps "
    "accumulate-grad-batches num-microbatches",
    "ramp-up": "rampup-batch-size",
    "order-cache": "data-cache-path",
    "blend-surplus": "mid-level-dataset-surplus",
    "seq": "seq-length seq-len sequence-length block-size context-length max-length max-seq-len "
    "max-seq-length",
    "max-seq": "max-position-embeddings",
    "steps": "epochs num-epochs num-train-epochs max-steps max-iters train-iters iterations "
    "num-steps train-steps",
    "gpt.num-layers": "num-layers n-layer n-layers layers depth",
    "gpt.embed-dim": "hidden-size n-embd d-model dim",
    "gpt.num-heads": "num-attention-heads n-head num-heads",
    "gpt.num-kv-heads": "num-query-groups num-key-value-heads",
    "gpt.mlp-dim": "ffn-hidden-size intermediate-size",
    "gpt.vocab-size": "vocab-size",
    "gpt.dtype": "dtype torch-dtype params-dtype",
    "precision": "bf16 fp16 fp32 fp8 mixed-precision",
    "optimizer.loss-scale.initial": "loss-scale initial-loss-scale",
    "optimizer.loss-scale.growth-interval": "loss-scale-window",
    "remat": "recompute recompute-activations recompute-granularity gradient-checkpointing "
    "activation-checkpointing",
    "zero": "use-distributed-optimizer zero-stage",
    "nproc": "gpus devices nproc-per-node num-processes world-size num-gpus",
    "data": "data-path dataset dataset-name train-data-path train-data train-file input-data",
    "tokenizer": "tokenizer-model tokenizer-name tokenizer-name-or-path tokenizer-type vocab-file",
    "model": "model-name model-name-or-path model-size preset init-from",
    "config": "config-file config-path yaml-cfg",
    "out": "save output output-dir out-dir save-dir output-prefix",
    "resume": "load resume-from-checkpoint resume-from load-dir",
    "save-every": "save-interval save-steps checkpoint-interval",
    "eval-every": "eval-interval eval-steps",
    "eval-batches": "eval-iters",
    "eval-data": "valid-data-path validation-file eval-dataset",
    "seed": "random-seed",
    "wandb": "wandb-log wandb-project report-to",
    "tensorboard": "tensorboard-dir",
    "compile": "torch-compile use-compile",
    "prefetch": "num-workers",
    "workers": "num-workers num-proc",
    "tokens": "max-new-tokens max-tokens num-tokens length max-length tokens-to-generate",
    "temperature": "temp",
    "prompt": "text input start",
    "key": "json-key json-keys text-column",
    "mesh dp=N": "dp data-parallel-size num-replicas",
    "mesh tp=N": "tp tensor-model-parallel-size tensor-parallel-size tensor-parallel",
    "mesh pp=N": "pp pipeline-model-parallel-size pipeline-parallel-size pipeline-parallel",
    "mesh cp=N": "cp context-parallel-size",
    "mesh ep=N": "ep expert-model-parallel-size expert-parallel-size",
    "mesh fsdp=N": "fsdp fully-shard data-parallel-sharding-strategy",
})  # fmt: skip
"""Options, and their names in Megatron-LM, transformers, nanoGPT and others."""


def parse(
    kind: type[T],
    arguments: Sequence[str],
    command: str,
    default: T | None = None,
    *,
    boxes: Boxes = MappingProxyType({}),
    common: Iterable[str] = (),
    recorded: Mapping[str, str] = MappingProxyType({}),
    needs: Needs = MappingProxyType({}),
) -> T:
    """The options of ``functron COMMAND`` in `arguments`.

    Args:
        kind: a dataclass, whose fields are the options and whose docstring describes them.
        arguments: those after the command.
        command: its name.
        default: an instance with the values of options that are not given; None: the fields' own.
        boxes: of the help, after that of the options that no box has.
        common: the fields in boxes that --help shows; --help-all shows all. None: all are shown.
        recorded: fields that are no options, and what to do in place of setting them.
        needs: what options need to have an effect, by the paths of their fields.

    Raises:
        functron.cli.process.InputError: options that do not exist, each with the nearest that do;
            or options that have no effect.
        SystemExit: arguments that do not parse (code 2), or --help (code 0).
    """
    options = [
        option
        for option in options_of(kind if default is None else default)
        if option.field not in recorded
    ]
    asked = [word for word in arguments if word in ("-h", "--help", "--help-all")]
    if asked:
        everything = "--help-all" in asked or not common
        print(_help(kind, f"functron {command}", options, boxes, None if everything else common))
        raise SystemExit(0)
    title = f"functron {command} has no such options"
    with process.mistakes():
        raise_problems(title, _recorded_problems(arguments, recorded))
    given: dict[str, Any] = {} if default is None else {"default": default}
    made, unknown = tyro.cli(
        kind,
        args=arguments,
        prog=f"functron {command}",
        # `_help` has its own descriptions; tyro would parse the sources for comments
        config=(tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff),
        return_unknown_args=True,
        **given,
    )
    known = [option.name for option in options if not option.positional]
    names = [word for word in unknown if word.startswith("-")] or unknown
    with process.mistakes():
        raise_problems(
            title,
            [
                Problem(word, "an unknown option", "a known one", _meant(word, known))
                for word in names
            ],
        )
        named = named_fields(arguments, options)
        unused = list(_unused_in(made, default, needs, named))
        raise_problems(f"functron {command} cannot be run with these options", unused)
    return made


def _unused_in(made: Any, default: Any, needs: Needs, named: Iterable[str]) -> Iterator[Problem]:
    """The options that somebody set and that have no effect, of those of dataclasses in it too.

    Args:
        made: the options.
        default: those where none is given, such as of a run; None: the fields' own.
        needs: by the paths of their fields.
        named: these paths, of the options that were given.
    """
    names = {field.name for field in dataclasses.fields(made)}
    own = {path: need for path, need in needs.items() if path.partition(".")[0] in names}
    given = [path for path in named if not _is_set_back(made, default, path)]
    yield from unused_problems(made, own, [] if default is None else [default], given)
    rest = {path: need for path, need in needs.items() if path not in own}
    for name in names if rest else ():
        if _is_flat(type(made), name):
            before = None if default is None else getattr(default, name)
            yield from _unused_in(getattr(made, name), before, rest, named)


def _is_set_back(made: Any, default: Any, path: str) -> bool:
    """Whether an option undoes what a run says, and leaves what is usual without one."""
    above, _, name = path.rpartition(".")
    if default is None or path.partition(".")[0] not in vars(made):
        return False
    section, now = value_at(made, above), value_at(made, path)
    usual = [field.default for field in dataclasses.fields(section) if field.name == name]
    return now in usual and now != value_at(default, path)


def _is_flat(kind: type, name: str) -> bool:
    """Whether a field is a dataclass whose options have no name of it before theirs."""
    marks = typing.get_args(_hints(kind)[name])[1:]
    return any(getattr(mark, "name", None) == "" for mark in marks)


def named_fields(arguments: Sequence[str], options: Iterable[Option]) -> frozenset[str]:
    """The paths of the fields whose options stand in `arguments`, on or off."""
    words = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return frozenset(
        option.field
        for option in options
        if not words.isdisjoint((f"--{option.name}", f"--{_negated(option.name)}"))
    )


def _negated(name: str) -> str:
    group, dot, last = name.rpartition(".")
    return f"{group}{dot}no-{last}"


def _recorded_problems(arguments: Sequence[str], recorded: Mapping[str, str]) -> Iterator[Problem]:
    for word in arguments:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        for field, fix in recorded.items():
            if word.startswith("--") and (name == field or name.startswith(f"{field}.")):
                got, wanted = "what a run records and nothing reads", "an option"
                yield Problem(word.partition("=")[0], got, wanted, fix)


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        name: without dashes: ``gpt.num-layers``.
        field: its path in the dataclass: ``gpt.num_layers``.
        metavar: placeholder of its value; empty where it is a switch.
        default: its value where it is not given; `dataclasses.MISSING`: it must be.
        text: the description.
        positional: whether it goes without its name.
    """

    name: str
    field: str
    metavar: str
    default: Any
    text: str
    positional: bool

    def __str__(self) -> str:
        if self.positional:
            return self.metavar
        if self.metavar:
            return f"--{self.name} {self.metavar}"
        return f"--{self.name}, --{_negated(self.name)}"


def options_of(value: Any, prefix: str = "") -> Iterator[Option]:
    """The options of a dataclass or an instance of it, those of dataclasses in it among them."""
    is_class = isinstance(value, type)
    kind = value if is_class else type(value)
    hints, texts = _hints(kind), _texts(kind)
    for field in dataclasses.fields(kind):
        hint, marks = hints[field.name], ()
        if typing.get_origin(hint) is Annotated:
            hint, *marks = typing.get_args(hint)
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        default = default if is_class else getattr(value, field.name)
        if dataclasses.is_dataclass(inner := hint if default is MISSING else default):
            flat = _is_flat(kind, field.name)
            yield from options_of(inner, prefix if flat else f"{prefix}{field.name}.")
        elif not any(map(dataclasses.is_dataclass, typing.get_args(hint))):
            path = f"{prefix}{field.name}"
            called = [mark.name for mark in marks if getattr(mark, "name", None)]
            name = f"{prefix}{called[0]}" if called else path.replace("_", "-")
            own = [mark.metavar for mark in marks if getattr(mark, "metavar", None)]
            metavar = own[0] if own else _metavar(hint)
            positional = tyro.conf.Positional in marks
            yield Option(name, path, metavar, default, texts.get(field.name, ""), positional)


def _metavar(hint: Any) -> str:
    """The placeholder of a value of this kind; empty for a switch."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return ""
    if origin is Literal:
        return f"{{{','.join(map(str, inside))}}}"
    if origin is tuple:
        return f"[{_metavar(inside[0])} [{_metavar(inside[0])} ...]]"
    if origin in (typing.Union, types.UnionType):
        several = [one for one in inside if one is not types.NoneType]
        if bool in several:
            several = [Literal["True", "False"], *(one for one in several if one is not bool)]
        words = [_metavar(one) for one in several]
        braced = all(word.startswith("{") for word in words)
        return f"{{{','.join(word[1:-1] for word in words)}}}" if braced else "|".join(words)
    return getattr(hint, "__name__", str(hint)).upper()


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The annotations of a dataclass's fields."""
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    """The descriptions of a dataclass's fields, from its docstring and those of its bases."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        _, _, attributes = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")
        for entry in re.split(r"\n(?=    \w)", "\n" + attributes.partition("\n\n")[0]):
            names, _, text = entry.strip().partition(":")
            found |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()))
    return found


def _meant(word: str, known: Sequence[str]) -> str:
    """The fix for an option that does not exist."""
    typed = re.split("=", word.lstrip("-").replace("_", "-").lower(), maxsplit=1)[0]
    found = list(dict.fromkeys(_candidates(typed.removeprefix("no-"), known)))
    return f"did you mean {' or '.join(found[:3])}?" if found else "see --help"


def _candidates(typed: str, known: Sequence[str]) -> list[str]:
    """Options that go by this name elsewhere, or that end in it; else those nearest to it."""
    meant = [o for o, names in _ALIASES.items() if typed in names.split() and o.split()[0] in known]
    last = {option: option.rpartition(".")[2] for option in known}
    meant += [option for option in known if last[option] == typed]
    if not meant:
        close = difflib.get_close_matches(typed, [*known, *last.values()], n=1)
        meant = [option for option in known if {option, last[option]} & {*close}]
    return [f"--{option}" for option in meant]


# --- help

_MOST_COLUMNS = 100
_OPTION_COLUMNS = 32
_FIRST_STATEMENT = re.compile(r"(?<!such as)(; |: |\. )")


def _help(
    kind: type, prog: str, options: Sequence[Option], boxes: Boxes, shown: Iterable[str] | None
) -> str:
    """The help of a command: how to call it, its description, and its options in boxes.

    Args:
        kind: the dataclass of the options, whose docstring has the description.
        prog: the command.
        options: its options.
        boxes: titles and what is in them.
        shown: the fields that are shown of those in boxes, each with the beginning of its
            description; None: all, with all of theirs.
    """
    places = [option.metavar for option in options if option.positional]
    doc = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:")[0]
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    usage = " ".join([f"usage: {prog}", *places, "[OPTIONS]"])
    parts = [usage, "\n\n".join(textwrap.fill(p, columns) for p in doc.split("\n\n"))]
    own = [("-h, --help", "show this help and exit")]
    if boxes:
        own[0] = ("-h, --help", "show the options that most runs use, and exit")
        own.append(("--help-all", "show all options, and exit"))
    rows: dict[str, list[tuple[str, str]]] = {"options": own, **{title: [] for title in boxes}}
    for option in options:
        title = box_of(option.field, boxes)
        if title is None or shown is None:
            rows[title or "options"].append((str(option), _described(option)))
        elif option.field in shown:
            rows[title].append((str(option), _described(option, brief=True)))
    parts += [_box(title, lines, columns) for title, lines in rows.items() if lines]
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:])


def box_of(field: str, boxes: Boxes) -> str | None:
    """The box that has this field: that with the longest name that it is, or is under, if any."""
    found = {
        name: title
        for title, names in boxes.items()
        for name in names
        if field == name or field.startswith(f"{name}.")
    }
    return found[max(found, key=len)] if found else None


def _described(option: Option, *, brief: bool = False) -> str:
    text = option.text.replace("``", "").replace("`", "")
    if brief:
        text = _FIRST_STATEMENT.split(text, maxsplit=1)[0].rstrip(".")
    if option.default is MISSING:
        return f"{text} (required)"
    if option.positional or option.default in (None, "", ()):
        return text
    return f"{text} (default: {option.default})"


def _box(title: str, rows: Iterable[tuple[str, str]], columns: int) -> str:
    """Options and their descriptions beside them, or below long options, in a frame."""
    inner = columns - 4
    lines = []
    for name, text in rows:
        beside = textwrap.wrap(text, inner - _OPTION_COLUMNS) or [""]
        if len(name) < _OPTION_COLUMNS - 1:
            lines.append(f"{name:{_OPTION_COLUMNS}}{beside.pop(0)}")
        else:
            lines += textwrap.wrap(name, inner, subsequent_indent="  ", break_on_hyphens=False)
        lines += [" " * _OPTION_COLUMNS + line for line in beside]
    body = "\n".join(f"│ {line:{inner}} │" for line in lines)
    return f"╭─ {title} {'─' * (inner - len(title) - 1)}╮\n{body}\n╰{'─' * (inner + 2)}╯"
