"""Entries of config.json and the corresponding fields of our configs, in both directions.

A `HubEntry` is one such correspondence: reading it gives our fields, writing it their entries. What
one side cannot express raises `EntryError`, whose problems `read_entries` and `write_entries`
collect: nothing that changes what a model computes is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from functron import nn
from functron.core.errors import Problem, nearest
from functron.models.config import GPTConfig

HubTable = Mapping[str, Any]
"""config.json."""

LONGEST = "_longest"
"""An entry that is added if sequences are shorter than in the file: the file's longest."""


class EntryError(Exception):
    """An entry or a field that the other side cannot express; its arguments are `Problem`s."""


@dataclass(frozen=True)
class HubEntry:
    """Entries of config.json and the corresponding fields of a config.

    Attributes:
        theirs: the entries that it reads.
        ours: the fields that it gives.
        read: ``(config.json, fields so far)`` to fields; raises `EntryError`.
        write: ``(config)`` to entries; raises `EntryError`.
    """

    theirs: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    read: Callable[[HubTable, Mapping[str, Any]], dict[str, Any]] = lambda table, values: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}


NO_TOKENS = MappingProxyType({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
"""Written if nothing else is known: without them readers assume those of a format's first model."""

GENERAL: Sequence[str] = (
    # names and versions
    *("architectures", "model_type", "transformers_version", "tokenizer_class", "dtype"),
    *("torch_dtype", "transformers.js_config", "is_llama_config", "task_specific_params"),
    *("finetuning_task", "problem_type", "id2label", "label2id", "num_labels"),
    # initial values, training, and how the same numbers are computed
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("hidden_dropout", "residual_dropout", "embedding_dropout", "classifier_dropout"),
    *("neftune_noise_alpha", "gradient_checkpointing", "unsloth_fixed", "unsloth_version"),
    *("use_cache", "pretraining_tp", "reorder_and_upcast_attn", "chunk_size_feed_forward"),
    *("torchscript", "use_bfloat16", "tf_legacy_loss", "return_dict", "return_dict_in_generate"),
    *("output_hidden_states", "output_attentions", "output_scores", "attn_implementation"),
    # generation
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "suppress_tokens"),
    *("begin_suppress_tokens", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("prefix", "is_decoder", "tie_encoder_decoder", "model_max_length"),
)
"""Entries of config.json that never change what a model computes, beside ``..._token_id``."""

_OFF = (
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "bias", "add_bias_linear", "attn_bias",
    "use_sliding_window", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "use_mrope",
    "rope_interleaved", "num_nextn_predict_layers", "alibi", "lm_head_bias",
)  # fmt: skip
_ONE = (
    "partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    "logit_scale", "routed_scaling_factor", "moe_layer_freq", "decoder_sparse_step",
    "rotary_scaling_factor",
)  # fmt: skip
NEUTRAL: Mapping[str, Callable[[Any, HubTable], bool]] = MappingProxyType(
    {
        **dict.fromkeys(_OFF, lambda value, table: value in (False, 0)),
        **dict.fromkeys(_ONE, lambda value, table: value == 1),
        "max_window_layers": lambda value, table: not table.get("use_sliding_window"),
        "kv_channels": lambda value, table: value == _find_head_dim(table),
        "head_dim": lambda value, table: value == _find_head_dim({**table, "head_dim": None}),
        "num_key_value_heads": lambda value, table: value == table.get("num_attention_heads"),
        "auto_map": lambda value, table: _names_own_classes(value, table),
    }
)
"""Whether an entry that a format does not have means nothing, of its value and config.json.

Those of other formats, such as a scale of 1, and code beside the weights (``auto_map``) for the
class that config.json names, which transformers has since it has the format. Other values are
refused.
"""


def _find_head_dim(table: HubTable) -> float | None:
    """The width of heads by config.json, where it tells."""
    size, heads = (table.get(name) for name in ("hidden_size", "num_attention_heads"))
    derived = size / heads if is_a(size, int) and is_a(heads, int) and heads else None
    return table.get("head_dim") or derived


def _names_own_classes(value: Any, table: HubTable) -> bool:
    """Whether an ``auto_map`` has no models but those of ``architectures``."""
    names = table.get("architectures")
    if not isinstance(value, Mapping) or not isinstance(names, list) or not names:
        return False
    stem = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)\Z", "", str(names[0]))
    classes = [str(one).rpartition(".")[2] for key, one in value.items() if "Token" not in key]
    return bool(stem) and all(each.startswith(stem) for each in classes)


def read_entries(
    entries: Sequence[HubEntry],
    ignored: Sequence[str],
    table: HubTable,
    problems: list[Problem],
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """Our fields of a config.json.

    Args:
        ignored: names that change nothing, beside `GENERAL`.
        problems: of entries that are invalid or unknown; they are added to these.
        ignore: further names to ignore.
    """
    known = {*GENERAL, *ignored, *ignore, *(name for entry in entries for name in entry.theirs)}
    fix = "if it does not change what the model computes, pass ignore=[{name!r}] (--ignore {name})"
    problems += [
        Problem(name, repr(value), "an entry that is known here", fix.format(name=name))
        for name, value in table.items()
        # null and empty containers enable nothing, and names with _ are internal to transformers
        if name not in known
        and not (name.startswith("_") or name.endswith("_token_id"))
        and value not in (None, {}, [], "")
        and not (name in NEUTRAL and NEUTRAL[name](value, table))
    ]
    values: dict[str, Any] = {}
    for entry in entries:
        try:
            values |= entry.read(table, values)
        except EntryError as error:
            problems += error.args
    return values


def write_entries(
    entries: Sequence[HubEntry], config: Any, problems: list[Problem]
) -> dict[str, Any]:
    """The entries of a config; what they cannot express is added to `problems`."""
    out: dict[str, Any] = {}
    for entry in entries:
        try:
            out |= entry.write(config)
        except EntryError as error:
            problems += error.args
    return out


# --- names of families

_OTHERS = frozenset((
    "bart", "beit", "bit", "flava", "gemma3n_text", "git", "glm4v", "glm4v_moe", "gpt_neo", "ibert",
    "mllama", "molmo2", "mt5", "pixtral", "vilt", "vits", "xglm", "xlm", "zamba2",
))  # fmt: skip
"""Other architectures of transformers, whose names are one letter away from one of ours."""


ANY_MODULE = (
    "train others as they are, as transformers' own module: functron train --model "
    "hf-module:PATH, or ft.from_module and ft.partition in Python"
)
"""Said of families that have no format."""


def family_fix(kind: str, known: Iterable[str]) -> str:
    """The fix for an unknown family: the nearest, or a list.

    Only a difference of case, separators or one letter is a misspelling: other similar names are
    often those of other architectures (DeepSeek-V3.2, Pixtral).
    """
    names = sorted(known)
    meant = [name for name in names if _is_slip(kind, name)]
    if meant and kind not in _OTHERS:
        same = [name for name in meant if _normalise(name) == _normalise(kind)]
        return f"did you mean {[*same, *meant][0]!r}?"
    return f"{kind!r} is not supported; supported: {', '.join(names)}; {ANY_MODULE}"


def _is_slip(one: str, other: str) -> bool:
    """Whether two names have the same digits, and differ by at most one letter."""
    a, b = _normalise(one), _normalise(other)
    if re.sub(r"\D", "", a) != re.sub(r"\D", "", b):
        return False
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    swapped = a[:2] == b[1::-1] and a[2:] == b[2:]
    return swapped or a[1:] == b[1:] or a[1:] == b or a == b[1:]


def _normalise(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# --- values


_WORDS = MappingProxyType({int: "a whole number", float: "a number", bool: "true or false"})


def is_a(value: Any, kind: type) -> bool:
    """Whether a JSON value is of this kind; integers are numbers, booleans are not."""
    fits = (int, float) if kind is float else kind
    return isinstance(value, fits) and (kind is bool or not isinstance(value, bool))


def get(table: HubTable, name: str, default: Any) -> Any:
    """The entry `name`, of the default's type, or the default."""
    value, kind = table.get(name, default), type(default)
    if not is_a(value, kind):
        raise EntryError(Problem(name, repr(value), _WORDS[kind]))
    return kind(value)


def get_whole(table: HubTable, name: str, default: int | None) -> int | None:
    """The entry `name`, a whole number or null."""
    value = table.get(name, default)
    if value is not None and not is_a(value, int):
        raise EntryError(Problem(name, repr(value), "a whole number or null"))
    return value


def positive(name: str, value: Any) -> float:
    """`value`, which is a positive number."""
    if not is_a(value, float) or value <= 0:
        raise EntryError(Problem(name, repr(value), "a positive number"))
    return float(value)


# --- entries of all architectures


def same(theirs: str, ours: str, default: Any) -> HubEntry:
    """An entry that is our field under another name.

    Args:
        default: transformers', of the entry's type.
    """
    return HubEntry(
        (theirs,),
        (ours,),
        lambda table, _: {ours: get(table, theirs, default)},
        lambda config: {theirs: getattr(config, ours)},
    )


def inverse(theirs: str, ours: str) -> HubEntry:
    """A factor that is one over our field; 1 where there is none."""

    def write(config: Any) -> dict:
        value = 1 / getattr(config, ours)
        whole = float(round(value))
        return {theirs: whole if math.isclose(whole, value, rel_tol=1e-12) else value}

    return HubEntry(
        (theirs,),
        (ours,),
        lambda table, _: {ours: 1 / positive(theirs, table.get(theirs, 1.0))},
        write,
    )


def derived(theirs: str, ours: str, default: int | None, used: Callable[[Any], int]) -> HubEntry:
    """A whole number, where null means our 0; ``used(config)`` is written, null for 0."""
    return HubEntry(
        (theirs,),
        (ours,),
        lambda table, _: {ours: get_whole(table, theirs, default) or 0},
        lambda config: {theirs: used(config) or None},
    )


def required(*ours: str, check: Callable[[Any], Iterable[Problem]]) -> HubEntry:
    """Conditions of fields that config.json does not have: `check` of a config finds problems."""

    def write(config: Any) -> dict:
        if found := list(check(config)):
            raise EntryError(*found)
        return {}

    return HubEntry((), ours, write=write)


def fixed(**values: Any) -> HubEntry:
    """Constants of a format that are not our defaults."""
    entry = required(*values, check=lambda config: (
        Problem(name, repr(getattr(config, name)), f"{value!r} in this family")
        for name, value in values.items()
        if getattr(config, name) != value
    ))  # fmt: skip
    return replace(entry, read=lambda *_: values)


def only(theirs: str, *allowed: Any, why: str) -> HubEntry:
    """An entry that must be missing or have one of these values."""

    def read(table: HubTable, _: Mapping) -> dict:
        value = table.get(theirs, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise EntryError(Problem(theirs, repr(value), wanted, f"our model has no {why}"))
        return {}

    return HubEntry((theirs,), (), read)


def head_norms(name: str, kind: str) -> HubEntry:
    """Whether queries and keys have LayerNorms of this kind."""

    def read(table: HubTable, _: Mapping) -> dict:
        return {"qk_norm": True, "qk_norm_kind": kind} if get(table, name, False) else {}

    def write(config: GPTConfig) -> dict:
        if config.qk_norm and config.qk_norm_kind != kind:
            wanted = f"{kind!r} in this family"
            raise EntryError(Problem("qk_norm_kind", repr(config.qk_norm_kind), wanted))
        return {name: config.qk_norm}

    return HubEntry((name,), ("qk_norm", "qk_norm_kind"), read, write)


def architecture(name: str, *others: str) -> HubEntry:
    """The stored class of model: `name`, or one that contains it."""

    def read(table: HubTable, _: Mapping) -> dict:
        found = table.get("architectures") or [name]
        if not set(found) & {name, *others}:
            fix = f"store it as one: transformers' {name}.from_pretrained, then save_pretrained"
            raise EntryError(Problem("architectures", repr(found), f"[{name!r}]", fix))
        return {}

    return HubEntry(("architectures",), (), read)


ACTIVATIONS: Mapping[str, str] = MappingProxyType(
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
"""Our activations by transformers' names; of several the first is written."""


def activation(theirs: str, default: str, names: Mapping[str, str] = ACTIVATIONS) -> HubEntry:
    """The activation.

    Args:
        default: transformers'.
        names: ours by theirs.
    """

    def read(table: HubTable, _: Mapping) -> dict:
        name = table.get(theirs, default)
        if not isinstance(name, str) or name not in names:
            fix = nearest(str(name), names)
            raise EntryError(Problem(theirs, repr(name), "an activation that our model has", fix))
        return {"activation": names[name]}

    def write(config: Any) -> dict:
        value = config.activation
        found = [name for name, meaning in names.items() if meaning == value]
        if not found:
            wanted = f"one of {', '.join(sorted(set(names.values())))} in this family"
            raise EntryError(Problem("activation", repr(value), wanted))
        return {theirs: default if default in found else found[0]}

    return HubEntry((theirs,), ("activation",), read, write)


def square(theirs: str, ours: str, default: int) -> HubEntry:
    """The side of a square: one number, or two equal ones."""

    def read(table: HubTable, _: Mapping) -> dict:
        value = table.get(theirs, default)
        sides = value if isinstance(value, list) and value else [value]
        if not all(is_a(side, int) and side == sides[0] for side in sides) or len(sides) > 2:
            wanted, fix = "one number, or two that are equal", "our images are squares"
            raise EntryError(Problem(theirs, repr(value), wanted, fix))
        return {ours: sides[0]}

    return HubEntry((theirs,), (ours,), read, lambda config: {theirs: getattr(config, ours)})


# --- entries of decoders


BiasEntry = bool | str | tuple[str, bool]
"""Whether layers have biases: always or never, or by an entry, with its default (False)."""


def biases(
    qkv: BiasEntry = "attention_bias", out: BiasEntry | None = None, mlp: BiasEntry = "mlp_bias"
) -> HubEntry:
    """Biases of linear layers.

    Args:
        qkv: of queries, keys and values.
        out: of the output of attention; None: as `qkv`.
        mlp: of feed-forward layers.
    """
    rows = {"qkv_bias": qkv, "out_bias": qkv if out is None else out, "mlp_bias": mlp}
    entries = {ours: (x, False) if isinstance(x, str) else x for ours, x in rows.items()}
    names = tuple(dict.fromkeys(x[0] for x in entries.values() if isinstance(x, tuple)))

    def read(table: HubTable, _: Mapping) -> dict:
        found = {
            ours: x if isinstance(x, bool) else get(table, x[0], x[1])
            for ours, x in entries.items()
        }
        whole = all(found.values())
        return {"bias": whole, **(dict.fromkeys(found, False) if whole else found)}

    def write(config: GPTConfig) -> dict:
        out: dict[str, bool] = {}
        for ours, x in entries.items():
            has = config.bias or getattr(config, ours)
            wanted = x if isinstance(x, bool) else out.setdefault(x[0], has)
            if has != wanted:
                same = "in this family" if isinstance(x, bool) else f"as others that {x[0]} gives"
                raise EntryError(Problem(ours, str(has), f"{wanted} {same}"))
        return out

    return HubEntry(names, ("bias", *rows), read, write)


def window(
    default: int | None,
    *,
    switched: bool = False,
    layered: bool = False,
    first: int | None = None,
    every: str = "",
    default_every: int = 2,
) -> HubEntry:
    """Sliding windows: the most keys that a query sees, its own included.

    Args:
        default: transformers' ``sliding_window``.
        switched: ``use_sliding_window`` enables it.
        layered: ``layer_types`` or ``max_window_layers`` select layers.
        first: transformers' ``max_window_layers``, the first layer with a window, where there is
            such an entry; with `switched` 28.
        every: an entry n without ``layer_types``: all but every n-th layer have windows.
        default_every: transformers' n.
    """
    first = 28 if switched and first is None else first
    theirs = ["sliding_window", *(["use_sliding_window"] if switched else [])]
    theirs += ["max_window_layers"] if first is not None else []
    theirs += ["layer_types"] if layered else []
    theirs += [every] if every else []

    def read(table: HubTable, values: Mapping) -> dict:
        size = get_whole(table, "sliding_window", default)
        wide = (get_whole(table, every, None) if every else None) or default_every
        windowed = _find_windowed_layers(table, values.get("num_layers", 0), first, wide)
        pattern = find_every(windowed) if layered else 0
        used = not switched or bool(table.get("use_sliding_window"))
        if not used or not size or (layered and True not in windowed):
            return {}
        if pattern is not None:
            return {"window": size, "global_every": pattern}
        longest = values.get("max_seq", 0)
        if size < longest:
            got = f"{size} in layers {', '.join(str(i) for i, yes in enumerate(windowed) if yes)}"
            wanted = f"every layer, or all but every n-th, or at least max_seq={longest}"
            fix = f"load it for sequences that a window covers: max_seq={size}"
            raise EntryError(Problem("sliding_window", got, wanted, fix))
        return {}

    def write(config: GPTConfig) -> dict:
        if config.global_every and not layered:
            wanted = "0 in this family: all layers have the window"
            raise EntryError(Problem("global_every", str(config.global_every), wanted))
        # with layer_types, transformers requires a window even if no layer has one
        unused = default if layered and not switched else None
        entries: dict[str, Any] = {"sliding_window": config.window or unused}
        if switched:
            entries["use_sliding_window"] = bool(config.window)
        if layered:
            names = ("full_attention", "sliding_attention")
            types = [names[bool(size)] for size in config.windows]
            entries["layer_types"] = types if config.window or not switched else None
        return entries

    return HubEntry(tuple(theirs), ("window", "global_every"), read, write)


def _find_windowed_layers(
    table: HubTable, num_layers: int, first: int | None, wide: int
) -> list[bool]:
    """Which layers have a window, by ``layer_types`` or transformers' defaults."""
    types = table.get("layer_types")
    if types:
        known = ("full_attention", "sliding_attention")
        others = sorted({str(kind) for kind in types} - set(known))
        if others or len(types) != num_layers:
            got = ", ".join(others) or f"{len(types)} of them"
            wanted = f"{num_layers} of {' and '.join(known)}: this decoder has no others"
            raise EntryError(Problem("layer_types", got, wanted))
        return [kind == known[1] for kind in types]
    if first is not None:
        return [layer >= table.get("max_window_layers", first) for layer in range(num_layers)]
    return [(layer + 1) % wide != 0 for layer in range(num_layers)]


def find_every(layers: Sequence[bool]) -> int | None:
    """The n of layers of which all but every n-th are chosen; 0: all are; None: there is none."""
    every = layers.index(False) + 1 if False in layers else 0
    fits = all(yes == bool(not every or (i + 1) % every) for i, yes in enumerate(layers))
    return every if fits else None


# --- rotary positions

_ORIGINAL = "original_max_position_embeddings"
_SCALING_FIELDS = MappingProxyType({_ORIGINAL: "original_max_seq"})
"""Fields of `nn.RopeScaling` by transformers' names of them, where these differ."""
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
_LONG = ("short_factor", "long_factor")
_NEEDED = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": _LLAMA3,
        "yarn": ("factor", _ORIGINAL),
        "dynamic": ("factor",),
        "longrope": (*_LONG, _ORIGINAL),
    }
)
_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
"""Optional settings of yarn; null means the default of `nn.RopeScaling`."""


def rope(
    theta: float = 10000.0,
    default: Mapping[str, Any] = MappingProxyType({}),
    partial: float | None = None,
) -> HubEntry:
    """Rotary positions: ``rope_parameters`` of transformers 5, or the entries of 4.

    The entries of 4 are written, which 5 and other readers understand, too.

    Args:
        theta: transformers' ``rope_theta``.
        default: transformers' other settings.
        partial: transformers' fraction of a head's dims that is rotated; None: always all.
    """
    theirs = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

    def read(table: HubTable, values: Mapping) -> dict:
        name = "rope_scaling" if table.get("rope_scaling") else "rope_parameters"
        inner = table.get(name) or default
        if not isinstance(inner, Mapping):
            raise EntryError(Problem(name, repr(inner), "an object or null"))
        sizes = ("rope_theta", "partial_rotary_factor")
        settings = {key: table[key] for key in sizes if table.get(key) is not None} | dict(inner)
        kind = str(settings.pop("rope_type", settings.pop("type", "default")))
        settings.pop("type", None)
        fraction = settings.pop("partial_rotary_factor", partial or 1.0)
        if not is_a(fraction, float) or not (0 < fraction <= 1 if partial else fraction == 1):
            wanted = "a number up to 1" if partial else "1: this family rotates all dims of a head"
            raise EntryError(Problem("partial_rotary_factor", repr(fraction), wanted))
        base = positive("rope_theta", settings.pop("rope_theta", theta))
        kind = "longrope" if kind == "su" else kind
        if kind not in _NEEDED:
            fix = nearest(str(kind), _NEEDED)
            raise EntryError(Problem(f"{name}.rope_type", repr(kind), " or ".join(_NEEDED), fix))
        if kind == "yarn" and settings.get(_ORIGINAL) is None and "max_seq" in values:
            settings[_ORIGINAL] = table.get(LONGEST, values["max_seq"])
        found = {"rope_theta": base, "rope_fraction": float(fraction), "rope_scaling": None}
        if kind == "longrope":
            settings.setdefault(_ORIGINAL, table.get(_ORIGINAL))
            return {**found, "rope_scaling": _read_long(settings, name, table, values)}
        return {**found, "rope_scaling": _read_scaling(kind, settings, name)}

    def write(config: GPTConfig) -> dict:
        if partial is None and config.rope_fraction != 1:
            got = str(config.rope_fraction)
            raise EntryError(Problem("rope_fraction", got, "1.0 in this family"))
        scaling, written = config.rope_scaling, None
        if scaling is not None and scaling.kind == "longrope":
            # one set of factors, for all that it reads
            long: dict[str, Any] = {key: list(scaling.factors) for key in _LONG}
            long |= {_ORIGINAL: config.max_seq, "attention_factor": scaling.table_factor}
            written = {"rope_type": "longrope", "type": "longrope", **long}
        elif scaling is not None:
            keys = [*_NEEDED[scaling.kind]]
            if scaling.kind == "yarn":
                zero = ("mscale", "mscale_all_dim", "attention_factor")  # in ours: not given
                keys += [key for key in _OPTIONAL if key not in zero or getattr(scaling, key)]
            values = {key: getattr(scaling, _SCALING_FIELDS.get(key, key)) for key in keys}
            written = {"rope_type": scaling.kind, "type": scaling.kind, **values}
        elif default:  # null would mean that
            written = {"rope_type": "default", "type": "default"}
        entries = {"rope_theta": config.rope_theta, "rope_scaling": written}
        return entries | (
            {} if partial is None else {"partial_rotary_factor": config.rope_fraction}
        )

    return HubEntry(theirs, ("rope_theta", "rope_scaling", "rope_fraction"), read, write)


def _read_long(
    settings: Mapping[str, Any], name: str, table: HubTable, values: Mapping
) -> nn.RopeScaling:
    """Longrope, whose factors depend on how long the longest sequences are.

    transformers chooses by the longest position of each batch: the short ones up to the sequences
    of pretraining. A model here has one of them, by its `max_seq`, and above these only where that
    was asked for.
    """
    original, given = settings.get(_ORIGINAL), settings.get("attention_factor")
    longest = values.get("max_seq", 0)
    if not isinstance(original, int) or original < 1:
        raise EntryError(Problem(f"{name}.{_ORIGINAL}", repr(original), "a whole number"))
    if longest > original and LONGEST not in table:
        got = f"two sets of factors, for sequences of up to {original} tokens and for longer ones"
        fix = f"pass max_seq={original} (--max-seq {original}) for the first, or {longest}"
        raise EntryError(Problem(f"{name}.long_factor", got, "the choice of one of them", fix))
    chosen = _LONG[longest > original]
    factors = settings.get(chosen)
    if not isinstance(factors, list) or not all(is_a(x, float) and x > 0 for x in factors):
        raise EntryError(Problem(f"{name}.{chosen}", repr(factors), "a list of positive numbers"))
    ratio = settings.get("factor") or table.get(LONGEST, longest) / original
    if not isinstance(ratio, int | float) or not (given is None or is_a(given, float)):
        got = f"{given!r} and {ratio!r}"
        raise EntryError(Problem(f"{name}.attention_factor and factor", got, "numbers or null"))
    grown = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return nn.RopeScaling(
        kind="longrope",
        factors=tuple(map(float, factors)),
        attention_factor=float(given or grown),
    )


def _read_scaling(kind: str, settings: Mapping[str, Any], name: str) -> nn.RopeScaling | None:
    optional = _OPTIONAL if kind == "yarn" else ()
    given = [key for key in optional if settings.get(key) is not None]
    needed = _NEEDED[kind]
    bad = [key for key in needed if not is_a(settings.get(key), float) or settings[key] <= 0]
    bad += [key for key in given if not is_a(settings[key], bool if key == "truncate" else float)]
    problems = [
        Problem(f"{name}.{key}", repr(settings.get(key)), f"a positive number for {kind!r}")
        for key in bad
    ]
    # a default rope may have the longest sequence of pretraining, which has no effect
    problems += [
        Problem(f"{name}.{key}", repr(settings[key]), f"no such setting for {kind!r}")
        for key in sorted(settings.keys() - set(_LLAMA3) - set(optional))
        if settings[key] is not None
    ]
    if problems:
        raise EntryError(*problems)
    if kind in ("default", "dynamic"):
        # dynamic: that of sequences up to max_seq, which ours never exceed
        return None
    kinds = {_ORIGINAL: int, "truncate": bool}
    values: dict[str, Any] = {
        _SCALING_FIELDS.get(key, key): kinds.get(key, float)(settings[key])
        for key in (*needed, *given)
    }
    return nn.RopeScaling(kind=kind, **values)  # type: ignore[arg-type]  # a key of _NEEDED
