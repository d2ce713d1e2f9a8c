"""Formats of Mamba-2 and of its hybrid with attention and feed-forward layers, Nemotron-H.

Two things are computed otherwise in transformers, beside what rounding does:

* Step sizes: Mamba-2 keeps them within ``time_step_limit``, Nemotron-H above ``time_step_min``.
  Ours have a lower limit alone, `MambaConfig.dt_min`.
* ``residual_in_fp32``: the stream between layers is float32 in models of 16 bits. Ours is in the
  model's dtype, so the entry is not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from functron.core.errors import Problem
from functron.hub.entries import (
    Entry,
    EntryError,
    Table,
    activation,
    architecture,
    derived,
    fixed,
    is_a,
    only,
    same,
)
from functron.hub.format import EMBED, OUT, UNEMBED, Format, Rule, attention, linear, mlp, norm
from functron.models.family import FAMILIES
from functron.models.mamba import MambaConfig

_PROJECTED = ("z", "x", "b", "c", "dt")
_CONVOLVED = ("x", "b", "c")
_HEAD, _GROUP = "heads head", "groups state"
_INNER: Mapping[str, str] = {"z": _HEAD, "x": _HEAD, "b": _GROUP, "c": _GROUP, "dt": "heads"}


def _fused(name: str, kind: str, parts: tuple[str, ...], at: str, dims: str) -> Rule:
    """A tensor in which the leaves of `parts` stand one after another."""
    all_dims = tuple(dims.format(_INNER[part]) for part in parts)
    return Rule(name, all_dims, tuple(f"mamba/mixer/{at}{part}/{kind}" for part in parts))


def _rules(base: str) -> tuple[Rule, ...]:
    """The names of all layers, under ``backbone`` or ``model``."""
    layer = f"{base}.layers.{{layer}}"
    mixer, ours = f"{layer}.mixer", "mamba/mixer"
    each = "heads -> heads"
    return (
        Rule(f"{base}.embeddings.weight", EMBED, ("embed",)),
        *norm(f"{layer}.norm", "mamba/norm"),
        _fused(f"{mixer}.in_proj.weight", "w", _PROJECTED, "", "({0}) embed -> embed {0}"),
        _fused(f"{mixer}.in_proj.bias", "b", _PROJECTED, "", "({0}) -> {0}"),
        _fused(f"{mixer}.conv1d.weight", "w", _CONVOLVED, "conv/", "({0}) () width -> {0} width"),
        _fused(f"{mixer}.conv1d.bias", "b", _CONVOLVED, "conv/", "({0}) -> {0}"),
        Rule(f"{mixer}.A_log", each, (f"{ours}/a_log",)),
        Rule(f"{mixer}.D", each, (f"{ours}/d",)),
        Rule(f"{mixer}.dt_bias", each, (f"{ours}/dt_bias",)),
        Rule(f"{mixer}.norm.weight", f"({_HEAD}) -> {_HEAD}", (f"{ours}/norm/scale",)),
        *linear(f"{mixer}.out_proj", f"{ours}/out", *OUT),
        *norm(f"{layer}.norm", "attention/norm"),
        *attention("attention/mixer", *(f"{mixer}.{name}_proj" for name in "qkvo")),
        *norm(f"{layer}.norm", "mlp/norm"),
        *mlp("mlp/mixer", f"{mixer}.up_proj", f"{mixer}.down_proj"),
        *norm(f"{base}.norm_f", "norm"),
        Rule("lm_head.weight", UNEMBED, ("unembed",)),
    )


def _read_count(table: Table, _: Mapping) -> dict:
    """Mamba-2's pattern, which is a number of layers."""
    count = table.get("num_hidden_layers", 64)
    if not is_a(count, int) or count < 1:
        raise EntryError(Problem("num_hidden_layers", repr(count), "a whole number from 1 on"))
    return {"pattern": "M" * count}


def _write_count(config: MambaConfig) -> dict:
    if set(config.pattern) != {"M"}:
        raise EntryError(Problem("pattern", repr(config.pattern), "only M in this family"))
    return {"num_hidden_layers": len(config.pattern)}


_LAYERS: Mapping[str, str] = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "mamba": "M",
    "attention": "*",
}
"""Letters of a pattern by transformers' names of layers: of version 5, then older ones."""
_PATTERN = ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers")


def _read_pattern(table: Table, _: Mapping) -> dict:
    """Nemotron-H's layers: a list of their names, or the pattern itself."""
    types, pattern = table.get(_PATTERN[0]), table.get(_PATTERN[1])
    name, found = (_PATTERN[0], types) if types is not None else (_PATTERN[1], pattern)
    letters = [_LAYERS.get(str(kind)) for kind in types or ()] or list(pattern or "")
    others = [str(kind) for kind in found or () if kind not in {*_LAYERS, *_LAYERS.values()}]
    if others or not letters:
        got = ", ".join(sorted(set(others))) or repr(found)
        wanted = "layers of state spaces (M), attention (*) and feed-forward (-)"
        raise EntryError(Problem(name, got, wanted, "our model has no others"))
    return {"pattern": "".join(str(letter) for letter in letters)}


def _write_pattern(config: MambaConfig) -> dict:
    names = {letter: name for name, letter in reversed([*_LAYERS.items()])}
    types = [names[letter] for letter in config.pattern]
    return dict(zip(_PATTERN, (types, config.pattern, len(types)), strict=True))


def _step_limits(*, lower: bool) -> Entry:
    """Limits of step sizes: the lower one is ours in Mamba-2; Nemotron-H has neither."""
    theirs = "time_step_limit"

    def read(table: Table, _: Mapping) -> dict:
        value = table.get(theirs) or [0.0, math.inf]
        limits = [_number(each) for each in value] if isinstance(value, list) else []
        if len(limits) != 2 or limits[0] is None or limits[1] != math.inf:
            wanted, fix = "a number and infinity", "our model has no upper limit"
            raise EntryError(Problem(theirs, repr(value), wanted, fix))
        if not lower and limits[0] != 0:
            wanted = "0 and infinity: time_step_min is the limit"
            raise EntryError(Problem(theirs, repr(value), wanted))
        return {"dt_min": limits[0]} if lower else {}

    def write(config: MambaConfig) -> dict:
        return {theirs: [config.dt_min, {"__float__": "Infinity"}]} if lower else {}

    return Entry((theirs,), ("dt_min",) if lower else (), read, write)


def _number(value: Any) -> float | None:
    """A number of JSON, which has infinity only as transformers 5 writes it, or older ones did."""
    if isinstance(value, Mapping):
        return math.inf if value.get("__float__") == "Infinity" else None
    return float(value) if is_a(value, float) else None


def _read_expand(table: Table, values: Mapping) -> dict:
    """The inner width as a multiple of the stream's, which Mamba-2 insists on."""
    expand = table.get("expand", 2)
    inner = values.get("num_heads", 0) * values.get("head_dim", 0)
    if inner != values.get("embed_dim", 0) * (expand if is_a(expand, int) else 0):
        wanted = f"{inner}, num_heads times head_dim, over hidden_size"
        raise EntryError(Problem("expand", repr(expand), wanted))
    return {}


def _write_expand(config: MambaConfig) -> dict:
    inner = config.num_heads * config.head_dim
    if inner % config.embed_dim:
        wanted = f"a multiple of embed_dim={config.embed_dim} in this family"
        raise EntryError(Problem("num_heads times head_dim", str(inner), wanted))
    return {"expand": inner // config.embed_dim}


_BIASES: Mapping[str, str] = {"use_bias": "M", "attention_bias": "*", "mlp_bias": "-"}


def _read_biases(table: Table, values: Mapping) -> dict:
    """Nemotron-H's biases, of each kind of layers; ours are on all of them or none."""
    pattern = values.get("pattern", "")
    used = {name: bool(table.get(name)) for name, kind in _BIASES.items() if kind in pattern}
    if len(set(used.values())) > 1:
        got = ", ".join(f"{name}={value}" for name, value in used.items())
        wanted = "the same: our model has biases on all linear layers or none"
        raise EntryError(Problem("biases", got, wanted))
    return {"bias": any(used.values())}


_SHARED = (
    same("hidden_size", "embed_dim", 4096),
    same("n_groups", "num_groups", 8),
    same("conv_kernel", "conv_width", 4),
    same("use_conv_bias", "conv_bias", True),
    same("layer_norm_epsilon", "norm_eps", 1e-5),
    same("tie_word_embeddings", "tied", False),
)
_IGNORED = (
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_max", "time_step_floor"),
    *("time_step_rank", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
    *("hidden_dropout", "max_position_embeddings"),
)
_TIED = ((r"lm_head\.weight", "embed"),)

MAMBA2 = Format(
    "mamba2",
    "Mamba2ForCausalLM",
    _rules("backbone"),
    (
        architecture("Mamba2ForCausalLM"),
        Entry(("num_hidden_layers",), ("pattern",), _read_count, _write_count),
        same("vocab_size", "vocab_size", 32768),
        *_SHARED,
        same("num_heads", "num_heads", 128),
        same("head_dim", "head_dim", 64),
        same("state_size", "state_dim", 128),
        same("chunk_size", "chunk", 256),
        same("use_bias", "bias", False),
        _step_limits(lower=True),
        Entry(("expand",), (), _read_expand, _write_expand),
        only("hidden_act", "silu", "swish", why="other activation of state spaces"),
        only("rms_norm", True, why="state space without its norm"),
    ),
    prefix="backbone.",
    max_seq="",
    copies=_TIED,
    ignored=(*_IGNORED, "time_step_min", "norm_before_gate"),  # transformers norms after the gate
    family=FAMILIES["mamba"],
)
_OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "num_experts_per_tok"),
    *("norm_topk_prob", "routed_scaling_factor", "output_router_logits", "moe_intermediate_size"),
    *("moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
"""Entries about layers of experts, of which `_read_pattern` allows none, and modules for tokens
further ahead."""

NEMOTRON_H = Format(
    "nemotron_h",
    "NemotronHForCausalLM",
    _rules("backbone"),
    (
        architecture("NemotronHForCausalLM"),
        Entry(_PATTERN, ("pattern",), _read_pattern, _write_pattern),
        same("vocab_size", "vocab_size", 131072),
        *_SHARED,
        same("mamba_num_heads", "num_heads", 128),
        same("mamba_head_dim", "head_dim", 64),
        same("ssm_state_size", "state_dim", 128),
        same("chunk_size", "chunk", 128),
        same("time_step_min", "dt_min", 0.001),
        same("num_attention_heads", "attention_heads", 32),
        derived("num_key_value_heads", "attention_kv_heads", 8, lambda c: c.kv_heads),
        derived("head_dim", "attention_head_dim", 128, lambda c: c.attention.head_dim),
        same("intermediate_size", "mlp_dim", 21504),
        activation("mlp_hidden_act", "relu2"),
        _step_limits(lower=False),
        Entry(tuple(_BIASES), ("bias",), _read_biases, lambda c: dict.fromkeys(_BIASES, c.bias)),
        fixed(gated=False),
        only("mamba_hidden_act", "silu", "swish", why="other activation of state spaces"),
        only("mamba_proj_bias", False, None, why="biases of state spaces alone"),
        only("sliding_window", None, why="window in attention layers"),
        only("num_nextn_predict_layers", 0, why="modules for tokens further ahead"),
    ),
    in_memory=_rules("model"),
    prefix="backbone.",
    max_seq="",
    copies=_TIED,
    ignored=(*_IGNORED, *_OF_EXPERTS, "expand", "auto_map"),
    family=FAMILIES["mamba"],
)
