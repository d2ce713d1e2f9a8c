"""The arguments of Megatron-LM: their spellings, kinds, defaults, and what becomes of each here.

They are a table, ``arguments.txt`` beside this module. A row is an argument of Megatron-LM's
``megatron/training/arguments.py``, of the versions 0.8 to 0.16, or a field of Megatron-Core's
configurations: its spellings on a command line, its kind, its value where a line is silent (``-``:
None, or off), its fate, and a reason:

| fate     | the argument                                                                     |
|----------|----------------------------------------------------------------------------------|
| take     | is translated by `functron.apps.megatron.migrate`                                     |
| same     | says what functron does in any case                                              |
| need     | has nothing to do here; the reason says why                                      |
| lack     | has no counterpart; the reason says what to do. ``lack=V``: but for the value V  |

A reason that several rows share is named ``@name``. Of kind ``off`` is a switch that turns
something off, whose name follows: ``off:add_bias_linear``. Below the arguments are the names that
configurations in YAML have for them: ``=`` another name, ``!`` that of its opposite, ``~`` one
with nothing to do here.

`read_words` makes values of the words of a command line, `read_mapping` of the keys and values of
a configuration of Megatron-Core, Megatron-Bridge or NeMo, `read_arguments` of a checkpoint's.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from functron.apps.megatron.launches import RUN_IT, is_open, list_open, show_open
from functron.core.errors import Problem

Fate = Literal["take", "same", "need", "lack"]

TABLE = Path(__file__).with_suffix(".txt")


@dataclass(frozen=True)
class MegatronArgument:
    """An argument of Megatron-LM.

    Attributes:
        name: where Megatron-LM keeps the value, as in ``args.num_layers``.
        options: its spellings on a command line, without dashes.
        kind: ``"int" "float" "str"``, several of them ``"ints" "floats" "strs"``, a switch
            ``"flag"``, or one that turns something off, ``"off"``.
        default: the value of a silent line.
        fate: what becomes of it.
        neutral: the value at which an argument without a counterpart asks for nothing.
        why: the reason.
    """

    name: str
    options: tuple[str, ...]
    kind: str
    default: Any
    fate: Fate
    neutral: Any
    why: str


class GivenValue(NamedTuple):
    """A value as it was given: under which name, the value, and the text that says it."""

    spelled: str
    value: Any
    text: str = ""


@dataclass(frozen=True)
class GivenArguments:
    """The values that a line or a configuration gives.

    Attributes:
        given: by `MegatronArgument.name`; of an argument that is given twice the last one.
        idle: keys of a configuration that have nothing to do here, and why.
        problems: words and keys that nothing is known of, and values of the wrong kind.
    """

    given: dict[str, GivenValue] = field(default_factory=dict)
    idle: dict[str, tuple[GivenValue, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _ArgumentTable(NamedTuple):
    arguments: Mapping[str, MegatronArgument]
    options: Mapping[str, tuple[MegatronArgument, bool]]
    """By spelling: the argument, and whether the spelling turns it off."""
    keys: Mapping[str, tuple[str, str]]
    """By another name in YAML: its sign and what follows it."""


@functools.cache
def load_table() -> _ArgumentTable:
    """The table in ``arguments.txt``."""
    reasons: dict[str, str] = {}
    arguments: dict[str, MegatronArgument] = {}
    options: dict[str, tuple[MegatronArgument, bool]] = {}
    keys: dict[str, tuple[str, str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("@"):
            name, text = line.split(None, 1)
            reasons[name] = text
        elif line[0] in "=!~":
            sign, name, text = line.split(None, 2)
            keys[name] = (sign, reasons.get(text, text))
        else:
            one, off = _parse_row(line, reasons)
            # a switch and its opposite are two rows, and one argument, of the first
            kept = arguments.setdefault(one.name, one)
            options |= dict.fromkeys(one.options, (kept, off))
    return _ArgumentTable(arguments, options, keys)


def _parse_row(line: str, reasons: Mapping[str, str]) -> tuple[MegatronArgument, bool]:
    """The argument of a row, and whether its options turn it off."""
    spelled, kind, default, fate, *rest = line.split(None, 4)
    options = tuple(spelled.split(","))
    kind, _, name = kind.partition(":")
    name = name or options[0].replace("-", "_")
    fate, _, neutral = fate.partition("=")
    off = kind == "off"
    why = reasons.get("".join(rest), "".join(rest))
    silent = _parse_default(kind, default)
    calm = _parse_default(kind, neutral) if neutral else silent
    kind = "flag" if off else kind
    return MegatronArgument(name, options, kind, silent, _check_fate(fate), calm, why), off


def _check_fate(word: str) -> Fate:
    assert word in ("take", "same", "need", "lack"), word
    return word


def _parse_default(kind: str, text: str) -> Any:
    if kind in ("flag", "off"):
        return text == "on" or kind == "off"
    return None if text == "-" else _convert(kind, [text])


def _convert(kind: str, words: Sequence[str]) -> Any:
    """The value of an argument's words.

    Raises:
        ValueError: they are not of its kind.
    """
    makers = {"int": _parse_whole, "ints": _parse_whole, "float": float, "floats": float}
    make = makers.get(kind, str)
    if kind.endswith("s"):
        return tuple(make(word) for word in words)
    (word,) = words
    return None if word == "None" else make(word)


def _parse_whole(word: str) -> int:
    value = float(word)
    if not value.is_integer():
        raise ValueError(word)
    return int(value)


_KINDS = {"int": "a whole number", "float": "a number", "str": "a value", "flag": "true or false"}
_KINDS |= {"ints": "whole numbers", "floats": "numbers", "strs": "values"}


# --- what becomes of values

FateKind = Literal["taken", "default", "same", "not needed", "not supported"]


@dataclass(frozen=True)
class ArgumentRow:
    """The fate of one argument.

    Attributes:
        kind: it was taken; is Megatron-LM's default, which the line leaves out; functron does the
            same by default; there is nothing to do; there is no counterpart.
        name: of the argument as it was given, or as a command line spells it.
        value: of the argument.
        ours: the setting that it became, and its value; empty: none.
        why: the reason, or what differs, or what to do.
    """

    kind: FateKind
    name: str
    value: str
    ours: str = ""
    why: str = ""


@dataclass
class Reading:
    """The values of a line while they are translated, and what becomes of each.

    ``reading(name)`` is a value, Megatron-LM's default where the line is silent.

    Attributes:
        arguments: what the line gives.
        closest: whether a model that functron does not have becomes the nearest that it has.
        problems: what cannot be translated.
        fates: by name: the kind, the setting that it became, and the reason.
    """

    arguments: GivenArguments
    closest: bool = False
    problems: list[Problem] = field(default_factory=list)
    fates: dict[str, tuple[FateKind, str, str]] = field(default_factory=dict)

    def __call__(self, name: str) -> Any:
        """The value of an argument."""
        given = self.arguments.given.get(name)
        if given is not None:
            return given.value
        return None if name in DERIVED else load_table().arguments[name].default

    def has(self, name: str) -> bool:
        """Whether the line gives an argument."""
        return name in self.arguments.given

    def spell(self, name: str) -> str:
        """An argument as the line spells it, or as a command line does."""
        if name in self.arguments.given:
            return self.arguments.given[name].spelled
        return name if name in DERIVED else f"--{load_table().arguments[name].options[0]}"

    def take(self, name: str, setting: str, why: str = "") -> Any:
        """The value of an argument that becomes a setting, a path such as ``gpt.num_layers``."""
        self.fates[name] = ("taken", setting, why)
        value = self(name)
        words = value if isinstance(value, tuple) else (value,)
        for word in words:
            if isinstance(word, str) and is_open(word):
                self.problems.append(describe_unset(self.spell(name), word))
        return value

    def take_fields(self, section: str, fields: Mapping[str, str]) -> dict[str, Any]:
        """The fields of a section that are arguments of the same values, by the latter's names."""
        return {ours: self.take(name, f"{section}.{ours}") for name, ours in fields.items()}

    def note(self, setting: str, *names: str, why: str = "") -> None:
        """Note that these arguments became a setting."""
        for name in names:
            self.fates[name] = ("taken", setting, why)

    def explain(self, kind: FateKind, why: str, *names: str) -> None:
        """Note that these arguments became no setting, and why."""
        for name in names:
            self.fates[name] = (kind, "", why)

    def refuse(self, name: str, wanted: str, fix: str = "") -> None:
        """Note that an argument has a value that cannot be translated."""
        self.fates[name] = ("not supported", "", wanted)
        self.problems.append(Problem(self.spell(name), _show(self(name)), wanted, fix))

    def refuse_unless_closest(self, name: str, wanted: str) -> None:
        """Refuse an argument of a model that functron lacks, unless the closest is asked for."""
        if self.closest:
            self.explain("not supported", f"the model has {wanted}", name)
        else:
            self.refuse(name, wanted, "--closest makes the nearest model that there is, a new one")

    def rows(self, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[ArgumentRow]:
        """The fate of every argument, in the order of the line, and of silent ones that differ.

        Args:
            settings: by path, those of the configuration that was made.
            defaults: those that functron has by default.
        """
        found = [self._make_row(name, settings, defaults) for name in self.arguments.given]
        found += [
            ArgumentRow("not needed", given.spelled, given.text, why=why)
            for given, why in self.arguments.idle.values()
        ]
        said = {fate[1] for name, fate in self.fates.items() if name in self.arguments.given}
        silent: dict[str, ArgumentRow] = {}
        for name, (kind, setting, why) in self.fates.items():
            if kind != "taken" or setting not in settings or setting in said:
                continue
            value = self(name)
            if value is not None and settings[setting] != defaults.get(setting):
                ours = f"{setting} = {_show(settings[setting])}"
                row = ArgumentRow("default", name.replace("_", "-"), _show(value), ours, why)
                # of several arguments that make a setting the one that says most
                if setting not in silent or why or silent[setting].value == "false":
                    silent[setting] = row
        found += silent.values()
        for name, (kind, _, why) in self.fates.items():
            if kind == "not supported" and name not in self.arguments.given:
                value = _show(self(name))
                found.append(ArgumentRow("not supported", name.replace("_", "-"), value, "", why))
        for name, one in load_table().arguments.items():
            silent_one = one.fate == "lack" and name not in self.arguments.given
            if silent_one and one.default != one.neutral:
                value = _show(one.default)
                found.append(
                    ArgumentRow("not supported", name.replace("_", "-"), value, "", one.why)
                )
        return found

    def _make_row(
        self, name: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> ArgumentRow:
        spelled, value, text = self.arguments.given[name]
        if name in self.fates:
            kind, setting, why = self.fates[name]
            if kind == "taken" and setting in settings:
                ours = f"{setting} = {_show(settings[setting])}"
                kind = "same" if settings[setting] == defaults.get(setting, _MISSING) else kind
                return ArgumentRow(kind, spelled, text, ours, why)
            return ArgumentRow(kind, spelled, text, setting, why)
        argument = load_table().arguments[name]
        if argument.fate == "lack":
            if value == argument.neutral:
                return ArgumentRow("same", spelled, text, "", "it asks for nothing")
            return ArgumentRow("not supported", spelled, text, "", argument.why)
        kind = "same" if argument.fate == "same" else "not needed"
        idle = "of an option that is not in force"  # what reads it did not come to it
        return ArgumentRow(
            kind, spelled, text, "", idle if argument.fate == "take" else argument.why
        )


_MISSING = object()


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    if isinstance(value, Mapping):  # such as {_target_: torch.float32}
        value = value.get("_target_", value)
    if value is None:
        return "none"
    text = repr(value) if isinstance(value, float) else str(value)
    return show_open(text)


# --- the words of a command line

_MOST_PROBLEMS = 30  # a file with more is of another kind
_VALUE = re.compile(r"-\.?\d")


def is_option(word: str) -> bool:
    """Whether a word is the name of an option rather than a value."""
    return word.startswith("-") and len(word) > 1 and not _VALUE.match(word)


def read_words(words: Sequence[str]) -> GivenArguments:
    """The values that the words after the program give, as Megatron-LM's parser reads them.

    Nothing is raised: `GivenArguments.problems` lists what cannot be read.
    """
    found = GivenArguments()
    index = 0
    while index < len(words) and len(found.problems) < _MOST_PROBLEMS:
        word = words[index]
        index += 1
        if not is_option(word):
            if is_open(word):
                if all(re.fullmatch(r"\w+", name) for name in list_open(word)):
                    continue  # nothing, where nothing sets it
                found.problems.append(describe_unset("arguments", word))
                continue
            fix = "leave it out, or quote a value that has spaces"
            found.problems.append(Problem(repr(word), "a value of no option", "an option", fix))
            continue
        name, equals, value = word.lstrip("-").partition("=")
        end = index
        while end < len(words) and not is_option(words[end]):
            end += 1
        values = [value] if equals else list(words[index:end])
        entry = load_table().options.get(name)
        if entry is None:
            found.problems.append(describe_unknown(f"--{name}", name, load_table().options))
            index = end
            continue
        kind = entry[0].kind
        count = 0 if kind == "flag" else len(values) if kind.endswith("s") else 1
        index += 0 if equals else min(count, len(values))
        _note_value(found, f"--{name}", entry, values[:count] if not equals else values)
    return found


def describe_unset(spelled: str, word: str) -> Problem:
    """The problem of a value with a variable that nothing sets, or with a command's output."""
    names = dict.fromkeys(list_open(word))
    if not all(re.fullmatch(r"\w+", name) for name in names):
        wanted = "a value without command substitution and patterns"
        return Problem(spelled, show_open(word), wanted, RUN_IT)
    fix = " ".join(f"{name}=VALUE" for name in names)
    return Problem(spelled, show_open(word), "variables that are set", f"--env {fix}")


def describe_unknown(spelled: str, name: str, known: Iterable[str]) -> Problem:
    """The problem of a name that Megatron-LM does not have."""
    close = difflib.get_close_matches(name, list(known), n=1)
    fix = f"did you mean {close[0]!r}? " if close else ""
    fix += "--without leaves out what is a fork's"
    return Problem(spelled, "an unknown argument", "one of Megatron-LM's", fix)


def _note_value(
    found: GivenArguments, spelled: str, entry: tuple[MegatronArgument, bool], words: Sequence[str]
) -> None:
    """Note the value of an option, or a problem with it."""
    argument, off = entry
    if argument.kind == "flag":
        if words:
            fix = "leave the value out"
            problem = Problem(spelled, repr(" ".join(words)), "no value: it is a switch", fix)
            found.problems.append(problem)
        found.given[argument.name] = GivenValue(spelled, not off)  # a switch has no text
        return
    unset = [name for word in words for name in list_open(word)]
    if unset and argument.fate in ("take", "lack") and not argument.kind.startswith("str"):
        found.problems.append(describe_unset(spelled, " ".join(words)))
        return
    try:
        value = None if unset and argument.kind != "strs" else _convert(argument.kind, words)
        value = words[0] if unset and argument.kind == "str" else value
    except (ValueError, OverflowError):
        got = repr(" ".join(words)) if words else "nothing"
        found.problems.append(Problem(spelled, got, _KINDS[argument.kind]))
        return
    found.given[argument.name] = GivenValue(spelled, value, show_open(" ".join(words)))


# --- the keys and values of a configuration

_SECTIONS = frozenset((
    "language_model", "model_parallel", "model", "train", "validation", "optimizer", "scheduler",
    "dataset", "ddp", "logger", "tokenizer", "checkpoint", "rng", "dist", "mixed_precision",
    "straggler", "profiling", "comm_overlap", "rerun_state_machine", "data",
    "trainer", "exp_manager", "optim", "run", "config", "optimizer_config",
    "wandb_logger_kwargs",
))  # fmt: skip
"""Tables of configurations, whose keys are those of arguments."""

_WINNING = frozenset(("mixed_precision", "comm_overlap"))
"""Sections of Megatron-Bridge whose values replace those of others."""
DERIVED = ("activation_func", "devices", "num_nodes")
"""Names of values that no option of a command line has."""
_ADAPTERS = "peft"
_NOTHING = (None, "", [], {}, "null")


def read_mapping(config: Mapping[str, Any]) -> GivenArguments:
    """The values in a configuration in YAML, whose sections may be nested.

    It is Megatron-LM's (``--yaml-cfg``), a ``ConfigContainer`` of Megatron-Bridge, NeMo's with
    ``trainer`` and ``model``, or has options of a command line as keys, as Megatron-LM's own tests
    (``MODEL_ARGS``). Nothing is raised: `GivenArguments.problems` lists what cannot be read.
    """
    found = GivenArguments()
    if isinstance(config.get("MODEL_ARGS"), Mapping):
        return read_words(list(_list_words(config["MODEL_ARGS"])))
    for path, key, value in _list_leaves(config, ""):
        if len(found.problems) < _MOST_PROBLEMS:
            _read_key(found, path, key, value)
    return found


def _list_words(table_: Mapping[str, Any]) -> Iterator[str]:
    """The command line of a mapping of options."""
    for name, value in table_.items():
        if value is True or value == "true":
            yield name
        elif value == "false":
            continue
        elif isinstance(value, str):
            # "[384 384 97656250]" is a list of Megatron-LM's tests
            inner = re.fullmatch(r"\[([^\[\]]*)\]", value)
            plain = inner and not re.search(r"[*+]", value)
            yield from (name, *(inner[1].replace(",", " ").split() if plain and inner else [value]))
        elif isinstance(value, list):
            yield from (name, *map(str, value))
        elif value is not None and value is not False:
            yield from (name, repr(value) if isinstance(value, float) else str(value))


def _list_leaves(config: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    """Path, key and value of every value that is not a section."""
    for key, value in config.items():
        where = f"{path}{key}"
        if isinstance(value, Mapping) and key in _SECTIONS:
            yield from _list_leaves(value, f"{where}.")
        else:
            yield where, key, value


def _read_key(found: GivenArguments, path: str, key: str, value: Any) -> None:
    if key.startswith("_"):  # of what makes objects of it
        return
    if special := _SPECIAL.get(key):
        for name, one in special(path, value):
            if name in load_table().arguments or name in DERIVED:
                found.given[name] = GivenValue(path, one, _show(one))
            else:
                found.problems.append(Problem(path, repr(value), name))
        return
    sign, other = load_table().keys.get(key, ("=", key))
    if sign == "~":
        text = "" if isinstance(value, Mapping) else _show(value)
        found.idle[path] = (GivenValue(path, value, text), other)
        return
    argument, off = _find_argument(other)
    if argument is None:
        if value in (*_NOTHING, False):  # what asks for nothing need not be known
            return
        if key == _ADAPTERS:
            fix = f"--without {key}, and then functron train --lora-rank N"
            found.problems.append(Problem(path, "low-rank adapters", "nothing", fix))
            return
        known = [*load_table().arguments, *load_table().keys, *_SPECIAL]
        found.problems.append(describe_unknown(path, key, known))
        return
    if value is None:
        return
    if (made := _convert_value(argument, value)) is None:
        found.problems.append(Problem(path, repr(value), _KINDS[argument.kind]))
        return
    one = GivenValue(path, not made if (sign == "!") != off else made, _show(value))
    before = found.given.get(argument.name, one)
    section = path.partition(".")[0]
    if before.value != one.value and not {section, before.spelled.partition(".")[0]} & _WINNING:
        wanted = f"{before.value!r}, as {before.spelled} says"
        found.problems.append(Problem(path, repr(one.value), wanted, "leave one of them out"))
    if before is one or section in _WINNING or before.spelled.partition(".")[0] not in _WINNING:
        found.given[argument.name] = one


def read_arguments(values: Mapping[str, Any]) -> GivenArguments:
    """The values of a checkpoint's ``args``, under the names where Megatron-LM keeps them.

    Those that are None have their defaults, and other names are passed over: Megatron-LM derives
    many. Nothing is raised: `GivenArguments.problems` lists values of other kinds.
    """
    found = GivenArguments()
    for name, value in values.items():
        argument = load_table().arguments.get(name)
        if argument is None or value is None:
            continue
        value = list(value) if isinstance(value, tuple) else value
        if argument.kind == "str" and isinstance(value, list):
            value = str(value)
        if (made := _convert_value(argument, value)) is None:
            found.problems.append(Problem(name, repr(value), _KINDS[argument.kind]))
        else:
            found.given[name] = GivenValue(name, made, _show(value))
    return found


def _find_argument(name: str) -> tuple[MegatronArgument | None, bool]:
    """The argument of a name with underscores, and whether that turns it off."""
    here = load_table()
    if name in here.arguments:
        return here.arguments[name], False
    return here.options.get(name.replace("_", "-"), (None, False))


def _convert_value(argument: MegatronArgument, value: Any) -> Any:
    """A value of YAML as an argument's; None: it is of another kind."""
    kind = argument.kind
    if kind == "flag":
        known = isinstance(value, bool)
        # what has nothing to do here may be a number too, as Megatron-Bridge's manual_gc_eval is
        return value if known else True if argument.fate == "need" and value else None
    if isinstance(value, Mapping):  # such as {_target_: torch.float32}
        value = str(value.get("_target_", value)).rpartition(".")[2]
    if isinstance(value, bool):
        return None
    if kind == "str":
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    words = value if isinstance(value, list) else [value]
    if any(isinstance(word, Mapping | list | bool) for word in words):
        return None
    try:
        return _convert(kind, [str(word) for word in words])
    except (ValueError, OverflowError):
        return None


def _last_name(value: Any) -> str:
    """The last name of a function or class: of ``torch.nn.functional.silu`` ``silu``."""
    if isinstance(value, Mapping):
        value = value.get("_target_", "")
    return str(value).rpartition(".")[2].lower()


_ACTIVATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "silu": {"activation_func": "silu"}, "gelu": {"activation_func": "gelu"},
    "squared_relu": {"activation_func": "relu2"}, "quick_gelu": {"activation_func": "quick_gelu"},
    **{key: {"swiglu": True} for key in ("swiglu", "fast_swiglu")},
    **{key: {"openai_gelu": True} for key in ("openai_gelu", "approx_gelu")},
})  # fmt: skip
"""Words of ``activation_func``, whose gating is another key, and ``activation``."""
_PRECISIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    **{key: {"bf16": True} for key in ("bf16", "bf16_mixed", "bf16_with_fp8_mixed")},
    **{key: {"fp16": True} for key in ("16", "fp16", "16_mixed", "fp16_mixed")},
    **{key: {} for key in ("32", "fp32", "32_true", "none")},
})  # fmt: skip
_NORMS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "layernorm": {"normalization": "LayerNorm"}, "rmsnorm": {"normalization": "RMSNorm"},
    "layernorm1p": {"normalization": "LayerNorm", "apply_layernorm_1p": True},
})  # fmt: skip


def _read_word(
    words: Mapping[str, Mapping[str, Any]], path: str, value: Any
) -> Iterator[tuple[str, Any]]:
    """The arguments that a word stands for."""
    found = words.get(_last_name(value).replace("-", "_"))
    yield from [(f"one of {', '.join(words)}", None)] if found is None else found.items()


def _read_moments(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and len(value) == 2 and all(_is_number(x) for x in value):
        yield from zip(("adam_beta1", "adam_beta2"), map(float, value), strict=True)
    else:
        yield "two numbers", None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_schedule(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """NeMo's ``sched``."""
    value = value if isinstance(value, Mapping) else {}
    styles = {"cosineannealing": "cosine", "": "constant", "warmupholdpolicy": "constant"}
    style = styles.get(str(value.get("name", "")).lower())
    if style is None:
        yield "CosineAnnealing or WarmupHoldPolicy", None
        return
    yield "lr_decay_style", style
    for key, name in (("warmup_steps", "lr_warmup_iters"), ("min_lr", "min_lr")):
        if value.get(key) is not None:
            yield (name, value[key]) if _is_number(value[key]) else ("a number", None)
    if value.get("constant_steps"):
        yield "no steps of the last rate within those of the decay: 0", None


def _read_groups(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``num_query_groups``, which needs no switch in a configuration."""
    if value is None:
        return
    if isinstance(value, int) and not isinstance(value, bool):
        yield "num_query_groups", value
        yield "group_query_attention", True
    else:
        yield "a whole number", None


def _read_optimizer(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``name`` of NeMo's ``optim``, whose optimizers are variants of Adam."""
    if ".optim" in path or path.startswith("optim"):
        word = str(value).lower()
        known = word if word in ("sgd", "muon", "dist_muon") else "adam" if "adam" in word else ""
        yield ("optimizer", known) if known else ("a known one: distributed_fused_adam", None)


def _read_tokenizer(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``type`` of NeMo's ``tokenizer``: a name or a folder."""
    if isinstance(value, str) and "tokenizer" in path:
        yield "tokenizer_model", value


def _read_rope_scaling(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``scale_factor`` and similar keys of Megatron-Bridge's Llama 3.1."""
    if _is_number(value):
        yield "use_rope_scaling", True
        yield "rope_scaling_factor", float(value)
    elif value is not None:
        yield "a number", None


def _read_blend(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Megatron-Bridge's ``blend``: files, and optional weights."""
    words = _join_blend(value)
    if words:
        yield "data_path", words
    elif value:
        yield "a list of files, and one of weights", None


def _read_blends(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    names = ("train_data_path", "valid_data_path", "test_data_path")
    if not value:
        return
    if not isinstance(value, list) or len(value) > len(names):
        yield "a blend for training, validation and test", None
        return
    for name, one in zip(names, value, strict=False):
        if words := _join_blend(one):
            yield name, words
        elif one:
            yield "a list of files, and one of weights", None


def _join_blend(value: Any) -> tuple[str, ...]:
    """A blend as on a command line; (): it is not one."""
    if not isinstance(value, list) or not value:
        return ()
    files = value[0] if isinstance(value[0], list) else value
    weights = value[1] if len(value) == 2 and isinstance(value[1], list) else []
    if any(not isinstance(file, str) for file in files):
        return tuple(map(str, files)) if not isinstance(value[0], list) else ()
    if not weights:
        return tuple(files)
    if len(weights) != len(files) or not all(map(_is_number, weights)):
        return ()
    return tuple(w for pair in zip(map(str, weights), files, strict=True) for w in pair)


_SPECIAL = {
    "blend": _read_blend,
    "blend_per_split": _read_blends,
    "activation_func": functools.partial(_read_word, {**_ACTIVATIONS, "none": {}}),
    "activation": functools.partial(_read_word, {**_ACTIVATIONS, "none": {}}),
    "betas": _read_moments,
    "sched": _read_schedule,
    "precision": functools.partial(_read_word, _PRECISIONS),
    "mixed_precision": functools.partial(_read_word, _PRECISIONS),
    "normalization": functools.partial(_read_word, _NORMS),
    "num_query_groups": _read_groups,
    "name": _read_optimizer,
    "type": _read_tokenizer,
    "scale_factor": _read_rope_scaling,
    "devices": lambda path, value: [("devices", value)],
    "num_nodes": lambda path, value: [("num_nodes", value)],
}
