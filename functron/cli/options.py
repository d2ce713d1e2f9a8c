"""Command-line options from a dataclass, with help from its docstring and suggestions for typos.

Fields may be dataclasses, whose options have the field's name as a prefix, or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
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
from functron.core.errors import Problem, describe_left_out, raise_problems
from functron.core.settings import (
    Needs,
    follow,
    hints_of,
    is_marked,
    mark_of,
    path_of,
    replace_settings,
    section_in,
    unused_problems,
)

T = TypeVar("T")

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
    needs: Needs = MappingProxyType({}),
) -> T:
    """The options of ``functron COMMAND`` in `arguments`.

    Metadata of settings (`functron.core.settings`) determine names, boxes of the help, and which
    options --help shows; --help-all shows all.

    Args:
        kind: a dataclass, whose fields are the options, described by its docstring.
        default: an instance with the values of missing options; None: the fields' defaults.
        needs: conditions under which options have an effect, by names of settings; options without
            one always have.

    Raises:
        functron.cli.process.InputError: options are unknown, or have no effect.
        SystemExit: arguments cannot be parsed (code 2), or --help (code 0).
    """
    found = list(options_of(kind if default is None else default))
    options = [option for option in found if not option.instead]
    arguments = with_values(with_names(arguments, found), found)
    asked = [word for word in arguments if word in ("-h", "--help", "--help-all")]
    if asked:
        print(_format_help(kind, f"functron {command}", options, everything="--help-all" in asked))
        raise SystemExit(0)
    title = f"functron {command} has no such options"
    with process.mistakes():
        raise_problems(title, _refuse_records(arguments, found))
    flat = _make_flat_kind(kind)
    given: dict[str, Any] = {} if default is None else {"default": _flatten(default, flat)}
    parsed, unknown = tyro.cli(
        flat,
        args=arguments,
        prog=f"functron {command}",
        # `_format_help` has its own descriptions; tyro would parse the sources for comments
        config=(tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff),
        return_unknown_args=True,
        **given,
    )
    made = parsed if flat is kind else _gather(kind() if default is None else default, parsed)
    known = [option.name for option in options if not option.positional]
    names = [word for word in unknown if word.startswith("-")] or unknown
    more = describe_left_out("functron.sections", "functron.families") if names else ""
    with process.mistakes():
        raise_problems(
            title,
            [
                Problem(word, "an unknown option", "a known one", fix + more)
                for word in names
                for fix in [_suggest_section(word, made) or _suggest_option(word, known)]
            ],
        )
        named = named_fields(arguments, options)
        unused = list(_find_unused(made, default, needs, named))
        raise_problems(f"functron {command} cannot be run with these options", unused)
    return made


def _find_unused(made: Any, default: Any, needs: Needs, named: Iterable[str]) -> Iterator[Problem]:
    """Problems of options that were given and have no effect, nested dataclasses included.

    Args:
        default: the values of missing options, such as those of a run; None: the fields' defaults.
        needs: conditions by names of settings.
        named: the names of settings that were given.
    """
    fields = [field.name for field in dataclasses.fields(made)]
    inside = [field for field in fields if _is_flat(type(made), field)]
    own = {x: need for x, need in needs.items() if not inside or x.partition(".")[0] in fields}
    given = [name for name in named if not _is_set_back(made, default, name)]
    yield from unused_problems(made, own, [] if default is None else [default], given)
    rest = {name: need for name, need in needs.items() if name not in own}
    for field in inside if rest else ():
        before = None if default is None else getattr(default, field)
        yield from _find_unused(getattr(made, field), before, rest, named)


def _is_set_back(made: Any, default: Any, name: str) -> bool:
    """Whether an option restores a default that a run had changed."""
    path = path_of(type(made), name)
    above, _, last = path.rpartition(".")
    if default is None or path.partition(".")[0] not in vars(made):
        return False
    owner, now = follow(made, above), follow(made, path)
    usual = [field.default for field in dataclasses.fields(owner) if field.name == last]
    return now in usual and now != follow(default, path)


def _is_flat(kind: type, name: str) -> bool:
    """Whether a field is a dataclass whose options have no prefix."""
    return _is_flat_hint(_find_hints(kind)[name])


def _is_flat_hint(hint: Any) -> bool:
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return any(getattr(mark, "name", None) == "" for mark in marks)


def named_fields(arguments: Sequence[str], options: Iterable[Option]) -> frozenset[str]:
    """The names of the settings in `arguments`, on or off."""
    words = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return frozenset(
        option.field
        for option in options
        if not words.isdisjoint((f"--{option.name}", f"--{_negate(option.name)}"))
    )


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The last value of an option in the command line, before it is parsed; None: it has none."""
    found = None
    for word, following in itertools.pairwise([*arguments, ""]):
        if word == option and following and not following.startswith("--"):
            found = following
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def _negate(name: str) -> str:
    group, dot, last = name.rpartition(".")
    return f"{group}{dot}no-{last}"


def with_names(arguments: Sequence[str], options: Iterable[Option]) -> list[str]:
    """Replace paths, such as ``--checkpoint.keep-last``, by the names of options."""
    names: dict[str, str] = {}
    for option in options:
        path = option.path.replace("_", "-")
        if path != option.name:
            names |= {path: option.name, _negate(path): _negate(option.name)}

    def spelled(word: str) -> str:
        path, given, value = word.removeprefix("--").partition("=")
        name = names.get(path.replace("_", "-")) if word.startswith("--") else None
        return word if name is None else f"--{name}{given}{value}"

    return [spelled(word) for word in arguments]


def with_values(arguments: Sequence[str], options: Iterable[Option]) -> list[str]:
    """Give options a value that stand alone as switches do, and have others than on and off.

    Such as ``--resume``, which may be auto.
    """
    known = {f"--{option.name}": option.words for option in options if "True" in option.words}
    off = {f"--{_negate(name.removeprefix('--'))}": name for name in known}
    found: list[str] = []
    for word, following in itertools.pairwise([*arguments, ""]):
        if word in off:
            found += [off[word], "False"]
        else:
            found += [word, "True"] if following not in known.get(word, following) else [word]
    return found


def _refuse_records(arguments: Sequence[str], options: Iterable[Option]) -> Iterator[Problem]:
    instead = {option.field: option.instead for option in options if option.instead}
    for word in arguments:
        given = word.partition("=")[0]
        name = given.removeprefix("--").partition(".")[0].replace("-", "_")
        if word.startswith("--") and name in instead:
            got, wanted = "what a run records", "an option"
            yield Problem(given, got, wanted, instead[name])


# --- settings with short names, which tyro parses as fields at the top


@functools.cache
def _list_flat_fields(kind: type) -> tuple[tuple[str, str, Any], ...]:
    """Name, path and annotation of the fields of `_make_flat_kind`."""
    found: list[tuple[str, str, Any]] = []
    for field in dataclasses.fields(kind):
        hint, path = _find_hints(kind)[field.name], field.name
        inner, optional = section_in(hints_of(kind)[field.name])
        if inner is None or optional:
            found.append((path, path, hint))
        elif _is_flat(kind, field.name):
            found.append(
                (path, path, Annotated[_make_flat_kind(inner), *typing.get_args(hint)[1:]])
            )
        elif any(mark_of(field).flat or mark_of(each).short for each in dataclasses.fields(inner)):
            found += _list_flat_settings(field, inner)
        else:
            found.append((path, path, hint))
    return tuple(found)


def _list_flat_settings(section: dataclasses.Field, inner: type) -> Iterator[tuple[str, str, Any]]:
    """The settings of a section, under their short names or their paths."""
    for field in dataclasses.fields(inner):
        short = mark_of(field).short or (field.name if mark_of(section).flat else "")
        path, hint = f"{section.name}.{field.name}", _find_hints(inner)[field.name]
        if not short:
            short = path.replace(".", "__")
            hint = Annotated[hint, tyro.conf.arg(name=path.replace("_", "-"))]
        yield short, path, hint


@functools.cache
def _make_flat_kind(kind: type) -> Any:
    """A dataclass with settings that have short names as fields at the top, for tyro.

    `kind` itself if there are none.
    """
    fields = _list_flat_fields(kind)
    if all(name == path and hint == _find_hints(kind)[path] for name, path, hint in fields):
        return kind
    rows = [(name, hint) for name, _, hint in fields]
    return dataclasses.make_dataclass(kind.__name__, rows, frozen=True, kw_only=True)


def _flatten(value: Any, flat: Any) -> Any:
    """An instance of a dataclass as one of its `_make_flat_kind`."""
    if type(value) is flat:
        return value
    fields = {}
    for name, path, hint in _list_flat_fields(type(value)):
        inner = follow(value, path)
        is_flat = _is_flat_hint(hint)
        fields[name] = _flatten(inner, typing.get_args(hint)[0]) if is_flat else inner
    return flat(**fields)


def _gather(base: Any, parsed: Any) -> Any:
    """The inverse of `_flatten`, on `base`."""
    if type(parsed) is type(base):
        return parsed
    values = {}
    for name, path, hint in _list_flat_fields(type(base)):
        value = getattr(parsed, name)
        values[path] = _gather(follow(base, path), value) if _is_flat_hint(hint) else value
    return replace_settings(base, values)


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        name: without dashes: ``save-every``, ``gpt.num-layers``.
        field: the name of its setting: ``save_every``, ``gpt.num_layers``.
        path: where it is in the dataclass: ``checkpoint.save_every``, ``gpt.num_layers``.
        metavar: placeholder of its value; empty where it is a switch.
        default: its value if it is not given; `dataclasses.MISSING`: it is required.
        text: the description.
        positional: it has no name on the command line.
        box: of the help; empty: the first one.
        common: --help shows it, if it is in a box.
        instead: what to do instead, if it is not an option but a record.
    """

    name: str
    field: str
    path: str
    metavar: str
    default: Any
    text: str
    positional: bool
    box: str
    common: bool
    instead: str

    @property
    def words(self) -> tuple[str, ...]:
        """The values that it may have, where only some words are; empty: others, or a switch."""
        return tuple(self.metavar[1:-1].split(",")) if self.metavar.startswith("{") else ()

    def __str__(self) -> str:
        if self.positional:
            return self.metavar
        if self.metavar:
            return f"--{self.name} {self.metavar}"
        return f"--{self.name}, --{_negate(self.name)}"


def options_of(value: Any, prefix: str = "", box: str = "", flat: bool = False) -> Iterator[Option]:
    """The options of a dataclass or an instance of it, those of its sections among them.

    Args:
        value: the dataclass or the instance.
        box, flat: as the section says where `value` is one.
    """
    is_class = isinstance(value, type)
    kind = value if is_class else type(value)
    hints, texts = _find_hints(kind), _read_texts(kind)
    for field in dataclasses.fields(kind):
        hint, marks, mark = hints[field.name], (), mark_of(field)
        if typing.get_origin(hint) is Annotated:
            hint, *marks = typing.get_args(hint)
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        default = default if is_class else getattr(value, field.name)
        own, path = mark.box or box, f"{prefix}{field.name}"
        if dataclasses.is_dataclass(inner := hint if default is MISSING else default):
            if _is_flat(kind, field.name):
                yield from options_of(inner, prefix, own)
            else:
                yield from options_of(inner, f"{path}.", own or _own_box(field), mark.flat)
        elif not any(map(dataclasses.is_dataclass, typing.get_args(hint))):
            setting = mark.short or (field.name if flat else path)
            called = [each.name for each in marks if getattr(each, "name", None)]
            name = f"{prefix}{called[0]}" if called else setting.replace("_", "-")
            metavars = [each.metavar for each in marks if getattr(each, "metavar", None)]
            metavar = metavars[0] if metavars else _find_metavar(hint)
            text, positional = texts.get(field.name, ""), tyro.conf.Positional in marks
            yield Option(
                name, setting, path, metavar, default, text, positional, own,
                "common" in mark.tags, mark.instead,
            )  # fmt: skip


def _own_box(field: dataclasses.Field) -> str:
    """The box of a section that names none."""
    return field.name if is_marked(field) else ""


def _list_boxes(kind: type) -> Iterator[str]:
    """The boxes of a dataclass, in the order of its fields."""
    for field in dataclasses.fields(kind):
        if _is_flat(kind, field.name):
            yield from _list_boxes(hints_of(kind)[field.name])
        elif is_marked(field):
            yield mark_of(field).box or field.name


def _find_metavar(hint: Any) -> str:
    """The placeholder of a value; empty: a switch."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return ""
    if origin is Literal:
        return f"{{{','.join(map(str, inside))}}}"
    if origin is tuple:
        return f"[{_find_metavar(inside[0])} [{_find_metavar(inside[0])} ...]]"
    if origin in (typing.Union, types.UnionType):
        several = [one for one in inside if one is not types.NoneType]
        if bool in several:
            several = [Literal["True", "False"], *(one for one in several if one is not bool)]
        words = [_find_metavar(one) for one in several]
        braced = all(word.startswith("{") for word in words)
        return f"{{{','.join(word[1:-1] for word in words)}}}" if braced else "|".join(words)
    return getattr(hint, "__name__", str(hint)).upper()


@functools.cache
def _find_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _read_texts(kind: type) -> dict[str, str]:
    """The descriptions of a dataclass's fields, from its docstring and those of its bases."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        _, _, attributes = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")
        for entry in re.split(r"\n(?=    \w)", "\n" + attributes.partition("\n\n")[0]):
            names, _, text = entry.strip().partition(":")
            found |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()))
    return found


def _suggest_section(word: str, made: Any) -> str:
    """The fix for an option of a section that this configuration is without; else empty."""
    above = word.lstrip("-").replace("-", "_").split("=")[0].rpartition(".")[0]
    fields = [field.name for field in dataclasses.fields(made)]
    if above.partition(".")[0] in fields:
        with contextlib.suppress(AttributeError):  # no section at all
            if above and follow(made, above) is None:
                table = f"write its table [{above}] into a config.toml"
                return f"choose a model that has {above}, or {table}"
    inside = (getattr(made, field) for field in fields if _is_flat(type(made), field))
    return next(filter(None, (_suggest_section(word, each) for each in inside)), "")


def _suggest_option(word: str, known: Sequence[str]) -> str:
    typed = re.split("=", word.lstrip("-").replace("_", "-").lower(), maxsplit=1)[0]
    found = list(dict.fromkeys(_find_candidates(typed.removeprefix("no-"), known)))
    return f"did you mean {' or '.join(found[:3])}?" if found else "see --help"


def _find_candidates(typed: str, known: Sequence[str]) -> list[str]:
    """Options with this name elsewhere, or that end in it; otherwise the nearest names."""
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


def _format_help(kind: type, prog: str, options: Sequence[Option], *, everything: bool) -> str:
    """The help of a command: how to call it, its description, and its options in boxes.

    Args:
        kind: the dataclass of the options.
        everything: show all options with full descriptions; otherwise common ones, each with the
            beginning of its description.
    """
    places = [option.metavar for option in options if option.positional]
    doc = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:")[0]
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    usage = " ".join([f"usage: {prog}", *places, "[OPTIONS]"])
    parts = [usage, "\n\n".join(textwrap.fill(p, columns) for p in doc.split("\n\n"))]
    own = [("-h, --help", "show this help and exit")]
    if any(option.box for option in options):
        own[0] = ("-h, --help", "show the options that most runs use, and exit")
        own.append(("--help-all", "show all options, and exit"))
    boxes = dict.fromkeys(_list_boxes(kind))
    rows: dict[str, list[tuple[str, str]]] = {"options": own, **{title: [] for title in boxes}}
    for option in options:
        brief = bool(option.box) and not everything
        if option.common or not brief:
            row = (str(option), _describe(option, brief=brief))
            rows.setdefault(option.box or "options", []).append(row)
    parts += [_format_box(title, lines, columns) for title, lines in rows.items() if lines]
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:])


def _describe(option: Option, *, brief: bool = False) -> str:
    text = option.text.replace("``", "").replace("`", "")
    if brief:
        text = _FIRST_STATEMENT.split(text, maxsplit=1)[0].rstrip(".")
    if option.default is MISSING:
        return f"{text} (required)"
    if option.positional or option.default in (None, "", ()):
        return text
    return f"{text} (default: {option.default})"


def _format_box(title: str, rows: Iterable[tuple[str, str]], columns: int) -> str:
    """Options and descriptions in a frame, side by side, or below long options."""
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
