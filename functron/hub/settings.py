"""How entries of config.json and fields of a `GPTConfig` say the same thing, both ways.

An `Aspect` is one such thing: reading it gives fields of ours, writing it gives entries of theirs.
What an aspect cannot express is a `Problem`; nothing that changes what a model computes is passed
over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from functron import nn
from functron.errors import Problem, nearest
from functron.models.config import GPTConfig

Table = Mapping[str, Any]
"""config.json."""


@dataclass(frozen=True)
class Aspect:
    """One thing that both sides say in their own way.

    Attributes:
        theirs: the entries of config.json that it reads.
        ours: the fields of `GPTConfig` that it gives.
        read: ``(config.json, fields so far, problems) -> fields``.
        write: ``(config, problems) -> entries``.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Callable[[Table, Mapping[str, Any], list[Problem]], dict[str, Any]]
    write: Callable[[GPTConfig, list[Problem]], dict[str, Any]]


def same(theirs: str, ours: str, default: Any) -> Aspect:
    """An entry that is a field of ours under another name.

    Args:
        theirs: the entry.
        ours: the field.
        default: what transformers takes where the entry is missing; its type is the entry's.
    """

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if not _is(value, type(default)):
            words = {int: "a whole number", float: "a number", bool: "true or false"}
            problems.append(Problem(theirs, repr(value), words[type(default)]))
            return {}
        return {ours: type(default)(value)}

    return Aspect((theirs,), (ours,), read, lambda config, _: {theirs: getattr(config, ours)})


def derived(theirs: str, ours: str, default: int | None, used: str) -> Aspect:
    """An entry whose null, ours 0, means a size that follows from others: our property `used`."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if value is not None and not _is(value, int):
            problems.append(Problem(theirs, repr(value), "a whole number or null"))
            return {}
        return {ours: value or 0}

    def write(config: GPTConfig, _: list[Problem]) -> dict:
        return {theirs: getattr(config, used)}

    return Aspect((theirs,), (ours,), read, write)


def fixed(ours: str, value: Any) -> Aspect:
    """A field that every model of the family has the same."""

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        got = getattr(config, ours)
        if got != value:
            problems.append(Problem(ours, repr(got), f"{value!r} in this family"))
        return {}

    return Aspect((), (ours,), lambda *_: {ours: value}, write)


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

    def write(config: GPTConfig, _: list[Problem]) -> dict:
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


_LLAMA3 = MappingProxyType(
    {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_seq",
    }
)
_ROPE_SIZES = ("rope_theta", "partial_rotary_factor")


def rope() -> Aspect:
    """Rotary positions: transformers 5's ``rope_parameters``, or what it replaced."""
    theirs = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return Aspect(theirs, ("rope_theta", "rope_scaling"), _read_rope, _write_rope)


def _read_rope(table: Table, _: Mapping, problems: list[Problem]) -> dict:
    name = "rope_scaling" if table.get("rope_scaling") else "rope_parameters"
    inner = table.get(name) or {}
    if not isinstance(inner, Mapping):
        problems.append(Problem(name, repr(inner), "an object or null"))
        return {}
    sizes = {key: table[key] for key in _ROPE_SIZES if table.get(key) is not None}
    settings = {**sizes, **inner}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    theta = settings.pop("rope_theta", 10000.0)
    partial = settings.pop("partial_rotary_factor", 1.0)
    if partial != 1:
        wanted = "1: this decoder rotates all dims of a head"
        problems.append(Problem("partial_rotary_factor", repr(partial), wanted))
    if not _is(theta, float) or theta <= 0:
        problems.append(Problem("rope_theta", repr(theta), "a positive number"))
        return {}
    wanted = {"default": (), "linear": ("factor",), "llama3": tuple(_LLAMA3)}
    if kind not in wanted:
        fix = nearest(str(kind), wanted)
        if kind in ("dynamic", "yarn", "longrope", "su"):
            fix = f"set {name} to null in config.json and use sequences as long as in pretraining"
        problems.append(Problem(f"{name}.rope_type", repr(kind), " or ".join(wanted), fix))
        return {}
    bad = [key for key in wanted[kind] if not _is(settings.get(key), float) or settings[key] <= 0]
    problems += [
        Problem(f"{name}.{key}", repr(settings.get(key)), f"a positive number for {kind!r}")
        for key in bad
    ]
    # a default rope has the sequence length of pretraining written down, and makes no use of it
    unknown = settings.keys() - _LLAMA3.keys()
    problems += [
        Problem(f"{name}.{key}", repr(settings[key]), f"no such setting for {kind!r}")
        for key in sorted(unknown)
        if settings[key] is not None
    ]
    if bad:
        return {}
    values: dict[str, Any] = {_LLAMA3[key]: settings[key] for key in wanted[kind]}
    for key in values:
        values[key] = int(values[key]) if key == "original_max_seq" else float(values[key])
    scaling = None if kind == "default" else nn.RopeScaling(**values, kind=kind)
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def _write_rope(config: GPTConfig, _: list[Problem]) -> dict:
    """The entries of transformers 4, which 5 and other readers understand too."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    keys = {"linear": ("factor",), "llama3": tuple(_LLAMA3)}[scaling.kind]
    values = {key: getattr(scaling, _LLAMA3[key]) for key in keys}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, "type": scaling.kind, **values},
    }


def window(default: int | None, *, switched: bool) -> Aspect:
    """Sliding windows: refused where a sequence would be longer than one.

    Args:
        default: the window that transformers takes where ``sliding_window`` is missing.
        switched: whether ``use_sliding_window`` and ``layer_types`` say if it is used, and where.
    """
    theirs = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        used = not switched or bool(table.get("use_sliding_window"))
        kinds = set(table.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            got = ", ".join(sorted(kinds))
            wanted = "full_attention: this decoder has no others"
            problems.append(Problem("layer_types", got, wanted))
        size = table.get("sliding_window", default)
        if not used or not size or size >= values.get("max_seq", 0):
            return {}
        if table.get("layer_types") and "sliding_attention" not in table["layer_types"]:
            return {}
        wanted = f"at least max_seq={values['max_seq']}: this decoder has no sliding windows"
        fix = f"load it for sequences that a window covers: max_seq={size}"
        problems.append(Problem("sliding_window", str(size), wanted, fix))
        return {}

    def write(*_: Any) -> dict:
        entries: dict[str, Any] = {"sliding_window": None}
        return {**entries, "use_sliding_window": False} if switched else entries

    return Aspect(theirs if switched else theirs[:1], (), read, write)


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
        if not _is(value, int):
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
    return Aspect((), ours, read, write)


def heads_divide() -> Aspect:
    """Llama's rule that the heads divide the embedding, which only its config checks."""

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        if config.embed_dim % config.num_heads:
            wanted = f"a multiple of num_heads={config.num_heads}"
            problems.append(Problem("embed_dim", str(config.embed_dim), wanted))
        return {}

    return Aspect((), (), lambda *_: {}, write)


def _is(value: Any, kind: type) -> bool:
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
