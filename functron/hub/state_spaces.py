"""Mamba-2 and its hybrid with attention and feed-forward layers, Nemotron-H.

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
from functron.hub import settings
from functron.hub import settings as entries
from functron.hub.family import DOWN, HEADS, OUT, UP, Family, Rule, linear, norm
from functron.hub.kinds import MAMBA
from functron.hub.settings import Aspect, Table, is_a
from functron.models.mamba import MambaConfig

_PROJECTED = ("z", "x", "b", "c", "dt")
_CONVOLVED = ("x", "b", "c")
_HEAD, _GROUP = "heads head", "groups state"
_INNER: Mapping[str, str] = {"z": _HEAD, "x": _HEAD, "b": _GROUP, "c": _GROUP, "dt": "heads"}


def _rules(base: str) -> tuple[Rule, ...]:
    """The names of all layers, under ``backbone`` or ``model``."""
    layer = f"{base}.layers.{{layer}}"
    mixer, ours = f"{layer}.mixer", "mamba/mixer"
    inner = [_INNER[name] for name in _PROJECTED]
    convolved = [_INNER[name] for name in _CONVOLVED]
    each = "heads -> heads"
    return (
        Rule(f"{base}.embeddings.weight", "vocab embed -> vocab embed", ("embed",)),
        *norm(f"{layer}.norm", "mamba/norm"),
        Rule(
            f"{mixer}.in_proj.weight",
            tuple(f"({dims}) embed -> embed {dims}" for dims in inner),
            tuple(f"{ours}/{name}/w" for name in _PROJECTED),
        ),
        Rule(
            f"{mixer}.in_proj.bias",
            tuple(f"({dims}) -> {dims}" for dims in inner),
            tuple(f"{ours}/{name}/b" for name in _PROJECTED),
        ),
        Rule(
            f"{mixer}.conv1d.weight",
            tuple(f"({dims}) () width -> {dims} width" for dims in convolved),
            tuple(f"{ours}/conv/{name}/w" for name in _CONVOLVED),
        ),
        Rule(
            f"{mixer}.conv1d.bias",
            tuple(f"({dims}) -> {dims}" for dims in convolved),
            tuple(f"{ours}/conv/{name}/b" for name in _CONVOLVED),
        ),
        Rule(f"{mixer}.A_log", each, (f"{ours}/a_log",)),
        Rule(f"{mixer}.D", each, (f"{ours}/d",)),
        Rule(f"{mixer}.dt_bias", each, (f"{ours}/dt_bias",)),
        Rule(f"{mixer}.norm.weight", f"({_HEAD}) -> {_HEAD}", (f"{ours}/norm/scale",)),
        *linear(f"{mixer}.out_proj", f"{ours}/out", *OUT),
        *norm(f"{layer}.norm", "attention/norm"),
        *linear(f"{mixer}.q_proj", "attention/mixer/q", *HEADS),
        *linear(f"{mixer}.k_proj", "attention/mixer/k", *HEADS),
        *linear(f"{mixer}.v_proj", "attention/mixer/v", *HEADS),
        *linear(f"{mixer}.o_proj", "attention/mixer/out", *OUT),
        *norm(f"{layer}.norm", "mlp/norm"),
        *linear(f"{mixer}.up_proj", "mlp/mixer/up", *UP),
        *linear(f"{mixer}.down_proj", "mlp/mixer/down", *DOWN),
        *norm(f"{base}.norm_f", "norm"),
        Rule("lm_head.weight", "vocab embed -> embed vocab", ("unembed",)),
    )


def _all_state_spaces() -> Aspect:
    """Mamba-2's pattern, which is a number of layers."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        count = table.get("num_hidden_layers", 64)
        if not is_a(count, int) or count < 1:
            problems.append(Problem("num_hidden_layers", repr(count), "a whole number from 1 on"))
            return {}
        return {"pattern": "M" * count}

    def write(config: MambaConfig, problems: list[Problem]) -> dict:
        if set(config.pattern) != {"M"}:
            problems.append(Problem("pattern", repr(config.pattern), "only M in this family"))
        return {"num_hidden_layers": len(config.pattern)}

    return Aspect(("num_hidden_layers",), ("pattern",), read, write)


_LAYERS: Mapping[str, str] = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "mamba": "M",
    "attention": "*",
}
"""Letters of a pattern by transformers' names of layers: of version 5, then older ones."""


def _pattern() -> Aspect:
    """Nemotron-H's layers: a list of their names, or the pattern itself."""
    theirs = ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers")

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        types, pattern = table.get(theirs[0]), table.get(theirs[1])
        name, found = (theirs[0], types) if types is not None else (theirs[1], pattern)
        letters = [_LAYERS.get(str(kind)) for kind in types or ()] or list(pattern or "")
        others = [str(kind) for kind in found or () if kind not in {*_LAYERS, *_LAYERS.values()}]
        if others or not letters:
            got = ", ".join(sorted(set(others))) or repr(found)
            wanted = "layers of state spaces (M), attention (*) and feed-forward (-)"
            problems.append(Problem(name, got, wanted, "our model has no others"))
            return {}
        return {"pattern": "".join(str(letter) for letter in letters)}

    def write(config: MambaConfig, _: list[Problem]) -> dict:
        names = {letter: name for name, letter in reversed([*_LAYERS.items()])}
        types = [names[letter] for letter in config.pattern]
        return dict(zip(theirs, (types, config.pattern, len(types)), strict=True))

    return Aspect(theirs, ("pattern",), read, write)


def _step_limits(*, lower: bool) -> Aspect:
    """Limits of step sizes: the lower one is ours in Mamba-2; Nemotron-H has neither."""
    theirs = "time_step_limit"

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs) or [0.0, math.inf]
        limits = [_number(each) for each in value] if isinstance(value, list) else []
        if len(limits) != 2 or limits[0] is None or limits[1] != math.inf:
            wanted, fix = "a number and infinity", "our model has no upper limit"
            problems.append(Problem(theirs, repr(value), wanted, fix))
            return {}
        if not lower and limits[0] != 0:
            wanted = "0 and infinity: time_step_min is the limit"
            problems.append(Problem(theirs, repr(value), wanted))
        return {"dt_min": limits[0]} if lower else {}

    def write(config: MambaConfig, _: list[Problem]) -> dict:
        return {theirs: [config.dt_min, {"__float__": "Infinity"}]} if lower else {}

    return Aspect((theirs,), ("dt_min",) if lower else (), read, write)


def _number(value: Any) -> float | None:
    """A number of JSON, which has infinity only as transformers 5 writes it, or older ones did."""
    if isinstance(value, Mapping):
        return math.inf if value.get("__float__") == "Infinity" else None
    return float(value) if is_a(value, float) else None


def _expansion() -> Aspect:
    """The inner width as a multiple of the stream's, which Mamba-2 insists on."""

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        expand = table.get("expand", 2)
        inner = values.get("num_heads", 0) * values.get("head_dim", 0)
        if inner != values.get("embed_dim", 0) * (expand if is_a(expand, int) else 0):
            wanted = f"{inner}, num_heads times head_dim, over hidden_size"
            problems.append(Problem("expand", repr(expand), wanted))
        return {}

    def write(config: MambaConfig, problems: list[Problem]) -> dict:
        inner = config.num_heads * config.head_dim
        if inner % config.embed_dim:
            wanted = f"a multiple of embed_dim={config.embed_dim} in this family"
            problems.append(Problem("num_heads times head_dim", str(inner), wanted))
        return {"expand": inner // config.embed_dim}

    return Aspect(("expand",), (), read, write)


_BIASES: Mapping[str, str] = {"use_bias": "mamba", "attention_bias": "attention", "mlp_bias": "mlp"}


def _biases() -> Aspect:
    """Nemotron-H's biases, of each kind of layers; ours are on all of them or none."""

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        letters = {"mamba": "M", "attention": "*", "mlp": "-"}
        pattern = values.get("pattern", "")
        used = {e: bool(table.get(e)) for e, kind in _BIASES.items() if letters[kind] in pattern}
        if len(set(used.values())) > 1:
            got = ", ".join(f"{name}={value}" for name, value in used.items())
            wanted = "the same: our model has biases on all linear layers or none"
            problems.append(Problem("biases", got, wanted))
        return {"bias": any(used.values())}

    def write(config: MambaConfig, _: list[Problem]) -> dict:
        return dict.fromkeys(_BIASES, config.bias)

    return Aspect(tuple(_BIASES), ("bias",), read, write)


_same = settings.same
_SHARED = (
    _same("hidden_size", "embed_dim", 4096),
    _same("n_groups", "num_groups", 8),
    _same("conv_kernel", "conv_width", 4),
    _same("use_conv_bias", "conv_bias", True),
    _same("layer_norm_epsilon", "norm_eps", 1e-5),
    _same("tie_word_embeddings", "tied", False),
)
_PASSED = (
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_max", "time_step_floor"),
    *("time_step_rank", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
    *("hidden_dropout", "max_position_embeddings"),
)
_TIED = ((r"lm_head\.weight", "embed"),)

MAMBA2 = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    _rules("backbone"),
    (
        entries.architecture("Mamba2ForCausalLM"),
        _all_state_spaces(),
        _same("vocab_size", "vocab_size", 32768),
        *_SHARED,
        _same("num_heads", "num_heads", 128),
        _same("head_dim", "head_dim", 64),
        _same("state_size", "state_dim", 128),
        _same("chunk_size", "chunk", 256),
        _same("use_bias", "bias", False),
        _step_limits(lower=True),
        _expansion(),
        entries.only_entry("hidden_act", "silu", "swish", why="other activation of state spaces"),
        entries.only_entry("rms_norm", True, why="state space without its norm"),
    ),
    prefix="backbone.",
    max_seq="",
    copies=_TIED,
    ignored=(*_PASSED, "time_step_min", "norm_before_gate"),  # transformers norms after the gate
    kind=MAMBA,
)
_OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "num_experts_per_tok"),
    *("norm_topk_prob", "routed_scaling_factor", "output_router_logits", "moe_intermediate_size"),
    *("moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
"""Entries about layers of experts, of which `_pattern` allows none, and modules for tokens further
ahead."""

NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _rules("backbone"),
    (
        entries.architecture("NemotronHForCausalLM"),
        _pattern(),
        _same("vocab_size", "vocab_size", 131072),
        *_SHARED,
        _same("mamba_num_heads", "num_heads", 128),
        _same("mamba_head_dim", "head_dim", 64),
        _same("ssm_state_size", "state_dim", 128),
        _same("chunk_size", "chunk", 128),
        _same("time_step_min", "dt_min", 0.001),
        _same("num_attention_heads", "attention_heads", 32),
        entries.size("num_key_value_heads", "attention_kv_heads", 8, lambda c: c.kv_heads),
        entries.size("head_dim", "attention_head_dim", 128, lambda c: c.attention.head_dim),
        _same("intermediate_size", "mlp_dim", 21504),
        entries.choice("mlp_hidden_act", "activation", "relu2", entries.ACTIVATIONS),
        _step_limits(lower=False),
        _biases(),
        settings.fixed("gated", False),
        entries.only_entry(
            "mamba_hidden_act", "silu", "swish", why="other activation of state spaces"
        ),
        entries.only_entry("mamba_proj_bias", False, None, why="biases of state spaces alone"),
        entries.only_entry("sliding_window", None, why="window in attention layers"),
        entries.only_entry("num_nextn_predict_layers", 0, why="modules for tokens further ahead"),
    ),
    in_memory=_rules("model"),
    prefix="backbone.",
    max_seq="",
    copies=_TIED,
    ignored=(*_PASSED, *_OF_EXPERTS, "expand", "auto_map"),
    kind=MAMBA,
)
