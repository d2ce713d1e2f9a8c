"""How entries of config.json and fields of a `GPTConfig` say the same thing, both ways.

An `Aspect` is one such thing: reading it gives fields of ours, writing it gives entries of theirs.
What an aspect cannot express is a `Problem`; nothing that changes what a model computes is passed
over.

Reading a whole config.json, and entries that architectures beside the decoder have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from functron.core.errors import Problem, nearest
from functron.models.config import GPTConfig

Table = Mapping[str, Any]
"""config.json."""

LONGEST = "_longest"
"""An entry that is added where sequences are cut shorter than the file says: what it says."""


@dataclass(frozen=True)
class Aspect:
    """One thing that both sides say in their own way.

    Attributes:
        theirs: the entries of config.json that it reads.
        ours: the fields of `GPTConfig`, or of another kind of config, that it gives.
        read: ``(config.json, fields so far, problems) -> fields``.
        write: ``(config, problems) -> entries``.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Callable[[Table, Mapping[str, Any], list[Problem]], dict[str, Any]]
    write: Callable[[Any, list[Problem]], dict[str, Any]]


def same(theirs: str, ours: str, default: Any) -> Aspect:
    """An entry that is a field of ours under another name.

    Args:
        theirs: the entry.
        ours: the field.
        default: what transformers takes where the entry is missing; its type is the entry's.
    """

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if not is_a(value, type(default)):
            words = {int: "a whole number", float: "a number", bool: "true or false"}
            problems.append(Problem(theirs, repr(value), words[type(default)]))
            return {}
        return {ours: type(default)(value)}

    return Aspect((theirs,), (ours,), read, lambda config, _: {theirs: getattr(config, ours)})


def derived(theirs: str, ours: str, default: int | None, used: str) -> Aspect:
    """An entry whose null is our 0; what is written is our field or property `used`."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if value is not None and not is_a(value, int):
            problems.append(Problem(theirs, repr(value), "a whole number or null"))
            return {}
        return {ours: value or 0}

    def write(config: GPTConfig, _: list[Problem]) -> dict:
        return {theirs: getattr(config, used) or None}

    return Aspect((theirs,), (ours,), read, write)


def fixed(ours: str, value: Any) -> Aspect:
    """A field that every model of the family has the same."""

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        got = getattr(config, ours)
        if got != value:
            problems.append(Problem(ours, repr(got), f"{value!r} in this family"))
        return {}

    return Aspect((), (ours,), lambda *_: {ours: value}, write)


def absent(*ours: str, fix: str = "") -> Aspect:
    """Fields that no model of the family makes use of: they stay at their defaults.

    Args:
        ours: the fields.
        fix: what to do about other values.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(GPTConfig)}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        problems += [
            Problem(name, repr(getattr(config, name)), f"{defaults[name]!r} in this family", fix)
            for name in ours
            if getattr(config, name) != defaults[name]
        ]
        return {}

    return Aspect((), ours, lambda *_: {}, write)


def only(theirs: str, *allowed: Any, why: str) -> Aspect:
    """An entry that may be missing, or have one of these values: we have no others."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            problems.append(Problem(theirs, repr(value), wanted, f"this decoder has no {why}"))
        return {}

    return Aspect((theirs,), (), read, lambda *_: {})


_ACTIVATIONS = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu": "gelu",
        "relu": "relu",
        "relu2": "relu2",
    }
)


def activation(theirs: str, default: str, **aliases: str) -> Aspect:
    """The activation, by the names of both sides.

    Args:
        theirs: the entry.
        default: what transformers takes where it is missing.
        aliases: names that mean something else in this family.
    """

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        name = table.get(theirs, default)
        known = {**_ACTIVATIONS, **aliases}
        if name in known:
            return {"activation": known[name]}
        fix = nearest(str(name), known)
        problems.append(Problem(theirs, repr(name), "an activation that nn.mlp has", fix))
        return {}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        if config.activation not in _ACTIVATIONS.values():
            wanted = f"one of {', '.join(sorted(set(_ACTIVATIONS.values())))} in this family"
            problems.append(Problem("activation", repr(config.activation), wanted))
            return {}
        if {**_ACTIVATIONS, **aliases}[default] == config.activation:
            return {theirs: default}
        names = {ours: name for name, ours in reversed(list(_ACTIVATIONS.items()))}
        return {theirs: names[config.activation]}

    return Aspect((theirs,), ("activation",), read, write)


def biases(always: str = "") -> Aspect:
    """Biases of linear layers: ``attention_bias`` and ``mlp_bias``, or those the family has always.

    Args:
        always: the field of ours (``"qkv_bias"``) that is on in every model; empty: entries say.
    """

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        attention = bool(table.get("attention_bias"))
        mlp = bool(table.get("mlp_bias"))
        if attention != mlp:
            got = f"{attention} and {mlp}"
            wanted = "the same: this decoder has biases on all linear layers or none"
            fix = "where they are zeros, remove them and set both to false"
            problems.append(Problem("attention_bias and mlp_bias", got, wanted, fix))
        return {"bias": attention and mlp, "qkv_bias": always == "qkv_bias"}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        if config.qkv_bias != (always == "qkv_bias") or (always and config.bias):
            got = f"bias={config.bias}, qkv_bias={config.qkv_bias}"
            problems.append(Problem("biases", got, f"only {always or 'bias'} in this family"))
        return {} if always else {"attention_bias": config.bias, "mlp_bias": config.bias}

    return Aspect(("attention_bias", "mlp_bias"), ("bias", "qkv_bias"), read, write)


def window(
    default: int | None,
    *,
    switched: bool = False,
    layered: bool = False,
    every: str = "",
    default_every: int = 2,
) -> Aspect:
    """Sliding windows: in both worlds a query sees so many keys at most, its own among them.

    Args:
        default: the window that transformers takes where ``sliding_window`` is missing.
        switched: whether ``use_sliding_window`` says if it is used.
        layered: whether ``layer_types`` or ``max_window_layers`` say in which layers.
        every: the entry that says it where ``layer_types`` does not: all but every n-th.
        default_every: that number where it is missing.
    """
    theirs = ["sliding_window"]
    theirs += ["use_sliding_window"] if switched else []
    theirs += ["layer_types"] if layered else []
    theirs += ["max_window_layers"] if switched else []
    theirs += [every] if every else []

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        size = table.get("sliding_window", default)
        if size is not None and not is_a(size, int):
            problems.append(Problem("sliding_window", repr(size), "a whole number or null"))
            return {}
        wide = table.get(every, default_every) if every else default_every
        kinds = _layer_kinds(table, values.get("num_layers", 0), switched, wide, problems)
        pattern = _global_every(kinds) if layered else 0
        used = not switched or bool(table.get("use_sliding_window"))
        if not used or not size or (layered and True not in kinds):
            return {}
        if pattern is not None:
            return {"window": size, "global_every": pattern}
        longest = values.get("max_seq", 0)
        if size < longest:
            got = f"{size} in layers {', '.join(str(i) for i, yes in enumerate(kinds) if yes)}"
            wanted = f"every layer, or all but every n-th, or at least max_seq={longest}"
            fix = f"load it for sequences that a window covers: max_seq={size}"
            problems.append(Problem("sliding_window", got, wanted, fix))
        return {}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        if config.global_every and not layered:
            wanted = "0 in this family: all layers have the window"
            problems.append(Problem("global_every", str(config.global_every), wanted))
        entries: dict[str, Any] = {"sliding_window": config.window or None}
        if switched:
            entries["use_sliding_window"] = bool(config.window)
        if layered:
            names = ("full_attention", "sliding_attention")
            types = [names[bool(size)] for size in config.windows]
            entries["layer_types"] = types if config.window or not switched else None
        return entries

    return Aspect(tuple(theirs), ("window", "global_every"), read, write)


def _layer_kinds(
    table: Table, num_layers: int, switched: bool, wide: int, problems: list[Problem]
) -> list[bool]:
    """Whether each layer has a window, as ``layer_types`` says or transformers would fill it in."""
    types = table.get("layer_types")
    if types:
        known = ("full_attention", "sliding_attention")
        others = sorted({str(kind) for kind in types} - set(known))
        if others or len(types) != num_layers:
            got = ", ".join(others) or f"{len(types)} of them"
            wanted = f"{num_layers} of {' and '.join(known)}: this decoder has no others"
            problems.append(Problem("layer_types", got, wanted))
        return [kind == known[1] for kind in types]
    if switched:
        return [layer >= table.get("max_window_layers", 28) for layer in range(num_layers)]
    return [(layer + 1) % wide != 0 for layer in range(num_layers)]


def _global_every(kinds: Sequence[bool]) -> int | None:
    """Our `global_every` of layers that have a window or not; None if they come otherwise."""
    every = kinds.index(False) + 1 if False in kinds else 0
    fits = all(yes == bool(not every or (i + 1) % every) for i, yes in enumerate(kinds))
    return every if fits else None


def scaled_embedding() -> Aspect:
    """Gemma's embedding, multiplied by sqrt(embed_dim)."""

    def read(_: Table, values: Mapping, __: list[Problem]) -> dict:
        return {"embed_scale": math.sqrt(values["embed_dim"])} if "embed_dim" in values else {}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        wanted = math.sqrt(config.embed_dim)
        if not math.isclose(config.embed_scale, wanted, rel_tol=1e-6):
            got = str(config.embed_scale)
            problems.append(Problem("embed_scale", got, f"{wanted}, sqrt(embed_dim)"))
        return {}

    return Aspect((), ("embed_scale",), read, write)


def inner_size(theirs: str) -> Aspect:
    """GPT-2's feed-forward width, whose null is 4 embed_dim."""

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs)
        value = 4 * values.get("embed_dim", 1) if value is None else value
        if not is_a(value, int):
            problems.append(Problem(theirs, repr(value), "a whole number or null"))
            return {}
        return {"mlp_dim": value}

    return Aspect((theirs,), ("mlp_dim",), read, lambda config, _: {theirs: config.mlp_dim})


def square_heads() -> Aspect:
    """GPT-2's heads: they divide the embedding, have keys of their own, and learned positions."""

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        if config.kv_heads != config.num_heads:
            wanted = f"{config.num_heads}, as many as query heads"
            problems.append(Problem("num_kv_heads", str(config.kv_heads), wanted))
        if config.head_size * config.num_heads != config.embed_dim:
            wanted = f"embed_dim / num_heads = {config.embed_dim / config.num_heads:g}"
            problems.append(Problem("head_dim", str(config.head_size), wanted))
        return {}

    def read(*_: Any) -> dict:
        return {"num_kv_heads": 0, "head_dim": 0}

    ours = ("num_kv_heads", "head_dim", "qkv_bias", "rope_theta", "rope_scaling")
    ours = (*ours, "rope_fraction")
    return Aspect((), ours, read, write)


def heads_divide() -> Aspect:
    """Llama's rule that the heads divide the embedding, which only its config checks."""

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        if config.embed_dim % config.num_heads:
            wanted = f"a multiple of num_heads={config.num_heads}"
            problems.append(Problem("embed_dim", str(config.embed_dim), wanted))
        return {}

    return Aspect((), (), lambda *_: {}, write)


def is_a(value: Any, kind: type) -> bool:
    """Whether a JSON value is of this kind; whole numbers are numbers, true and false are not."""
    fits = (int, float) if kind is float else kind
    return isinstance(value, fits) and (kind is bool or not isinstance(value, bool))


GENERAL: Sequence[str] = (
    # names and versions
    *("architectures", "model_type", "transformers_version", "tokenizer_class", "dtype"),
    *("torch_dtype", "transformers.js_config", "is_llama_config", "task_specific_params"),
    *("finetuning_task", "problem_type", "id2label", "label2id", "num_labels"),
    # initial values, training, and how the same numbers are computed
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("use_cache", "pretraining_tp", "reorder_and_upcast_attn", "chunk_size_feed_forward"),
    *("torchscript", "use_bfloat16", "tf_legacy_loss", "return_dict", "return_dict_in_generate"),
    *("output_hidden_states", "output_attentions", "output_scores", "attn_implementation"),
    # generation
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "suppress_tokens"),
    *("begin_suppress_tokens", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("prefix", "is_decoder", "tie_encoder_decoder"),
)
"""Entries of config.json that do not change what a model computes, in every family.

Nor do names that end in ``_token_id``."""


_UNQUANTISED = (
    "quantised weights are not read: use the model's files in bfloat16, or make them: "
    "transformers' from_pretrained with the method's dequantize=True, then save_pretrained"
)


def values_of(
    aspects: Sequence[Aspect],
    ignored: Sequence[str],
    table: Table,
    problems: list[Problem],
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """The fields of ours that a config.json gives.

    Args:
        aspects: what the family's config.json says.
        ignored: its entries that change nothing, beside `GENERAL`.
        table: the config.json.
        problems: what is wrong or unknown is added to them.
        ignore: further entries that are passed over.
    """
    known = {*GENERAL, *ignored, *ignore, *(name for aspect in aspects for name in aspect.theirs)}
    fix = "if it does not change what the model computes, pass ignore=[{name!r}]"
    problems += [
        Problem(name, repr(value), "no such entry", _UNQUANTISED)
        if name == "quantization_config"
        else Problem(name, repr(value), "an entry that is known here", fix.format(name=name))
        for name, value in table.items()
        # null and empty containers switch nothing on, and names with _ are transformers' own
        if name not in known
        and not (name.startswith("_") or name.endswith("_token_id"))
        and value not in (None, {}, [], "")
    ]
    values: dict[str, Any] = {}
    for aspect in aspects:
        values |= aspect.read(table, values, problems)
    return values


def only_entry(theirs: str, *allowed: Any, why: str) -> Aspect:
    """An entry that may be missing, or have one of these values: our models have no others."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            problems.append(Problem(theirs, repr(value), wanted, f"our model has no {why}"))
        return {}

    return Aspect((theirs,), (), read, lambda *_: {})


def architecture(name: str, *others: str) -> Aspect:
    """The class of model that was stored: `name`, or one of which it is a part."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        found = table.get("architectures") or [name]
        if not set(found) & {name, *others}:
            fix = f"store it as one: transformers' {name}.from_pretrained, then save_pretrained"
            problems.append(Problem("architectures", repr(found), f"[{name!r}]", fix))
        return {}

    return Aspect(("architectures",), (), read, lambda *_: {})


def choice(theirs: str, ours: str, default: str, names: Mapping[str, str]) -> Aspect:
    """An entry that chooses one of several things, by the names of both sides.

    Args:
        theirs: the entry.
        ours: the field.
        default: what transformers takes where the entry is missing.
        names: ours by theirs; of several with one meaning the first is written.
    """

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if isinstance(value, str) and value in names:
            return {ours: names[value]}
        wanted = "one that our model has"
        problems.append(Problem(theirs, repr(value), wanted, nearest(str(value), names)))
        return {}

    def write(config: Any, problems: list[Problem]) -> dict:
        value = getattr(config, ours)
        found = [name for name, meaning in names.items() if meaning == value]
        if not found:
            wanted = f"one of {', '.join(sorted(set(names.values())))} in this family"
            problems.append(Problem(ours, repr(value), wanted))
            return {}
        return {theirs: default if default in found else found[0]}

    return Aspect((theirs,), (ours,), read, write)


ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
        "relu2": "relu2",
    }
)
"""Our activations by transformers' names."""


def size(
    theirs: str, ours: str, default: int | None, used: Callable[[Any], int] | None = None
) -> Aspect:
    """A whole number, whose null is our 0 where there is `used`: what is written of a config."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if not (is_a(value, int) or (value is None and used is not None)):
            wanted = "a whole number" + (" or null" if used else "")
            problems.append(Problem(theirs, repr(value), wanted))
            return {}
        return {ours: value or 0}

    def write(config: Any, _: list[Problem]) -> dict:
        return {theirs: used(config) if used else getattr(config, ours)}

    return Aspect((theirs,), (ours,), read, write)


def square(theirs: str, ours: str, default: int) -> Aspect:
    """A side of a square: one number, or two that are equal."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        sides = value if isinstance(value, list) and value else [value]
        if not all(is_a(side, int) and side == sides[0] for side in sides) or len(sides) > 2:
            wanted, fix = "one number, or two that are equal", "our images are squares"
            problems.append(Problem(theirs, repr(value), wanted, fix))
            return {}
        return {ours: sides[0]}

    return Aspect((theirs,), (ours,), read, lambda config, _: {theirs: getattr(config, ours)})
