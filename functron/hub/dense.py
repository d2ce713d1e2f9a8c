"""Dense families with norms after sublayers, capped scores or heads that are rotated in part.

| family   | beside Llama                                                                         |
|----------|--------------------------------------------------------------------------------------|
| Gemma 2  | norms on both sides of sublayers, caps on scores and logits, a window in every other |
| Gemma 3  | norms on both sides, norms of queries and keys, a window and its own rope in 5 of 6  |
| OLMo 2   | norms after sublayers alone, norms of queries and keys over all heads together       |
| Nemotron | LayerNorm around 1, squared ReLU without a gate, half of a head's dims rotated       |
| SmolLM3  | every fourth layer without rope                                                      |
| OLMo     | LayerNorm without parameters, queries, keys and values that are clipped              |
| GLM      | rotated pairs next to each other, half of a head's dims rotated, biases on q, k, v   |
| GLM-4    | the same with norms on both sides of sublayers                                       |

What config.json says of attention in later families: caps, scales, ropes of some layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from functron.core.errors import Problem
from functron.hub import settings
from functron.hub.family import (
    ALL_DENSE,
    DECODER,
    DOWN,
    END,
    HEADS,
    LAYER,
    MLP,
    NO_BIASES,
    NO_LATENT,
    NO_QK_NORM,
    NO_WINDOW,
    OUT,
    PLAIN,
    START,
    UP,
    Family,
    Rule,
    common,
    linear,
    llama_like,
    norm,
)
from functron.hub.rope import rope
from functron.hub.settings import Aspect, Table, is_a
from functron.models.config import GPTConfig


def cap(theirs: str, ours: str, default: float | None) -> Aspect:
    """A cap whose null is our 0; `default` is what transformers takes where it is missing."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if value is not None and not (is_a(value, float) and 0 <= value < math.inf):
            problems.append(Problem(theirs, repr(value), "a positive number or null"))
            return {}
        return {ours: float(value or 0.0)}

    def write(config: GPTConfig, _: list[Problem]) -> dict:
        return {theirs: getattr(config, ours) or None}

    return Aspect((theirs,), (ours,), read, write)


def query_scalar(default: int) -> Aspect:
    """Gemma's ``query_pre_attn_scalar`` s, a whole number: scores are multiplied by 1 / sqrt(s)."""
    theirs = "query_pre_attn_scalar"

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if not is_a(value, float) or value <= 0:
            problems.append(Problem(theirs, repr(value), "a positive number"))
            return {}
        return {"attention_scale": value**-0.5}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        scale = config.attention_scale
        scalar = max(round(scale**-2), 1) if scale else config.head_size
        if scale and not math.isclose(scalar**-0.5, scale, rel_tol=1e-6):
            wanted = "one over the root of a whole number"
            problems.append(Problem("attention_scale", str(scale), wanted))
        return {theirs: scalar}

    return Aspect((theirs,), ("attention_scale",), read, write)


_LOCAL = "rope_local_base_freq"


def local_rope(theta: float, local: float) -> Aspect:
    """Gemma 3's two ropes; it comes after the aspect of windows.

    Args:
        theta: of layers without a window, where ``rope_theta`` is missing.
        local: of layers with one, where ``rope_local_base_freq`` is missing.
    """
    of_global = rope(theta)

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        both = table.get("rope_parameters")
        base = table.get(_LOCAL, local)
        if isinstance(both, Mapping) and "full_attention" in both:
            here = both.get("sliding_attention") or {}
            base = here.get("rope_theta", base)
            kind = here.get("rope_type", "default")
            if kind != "default":
                name = "rope_parameters.sliding_attention.rope_type"
                problems.append(Problem(name, repr(kind), "'default'"))
            table = {**table, "rope_parameters": both["full_attention"]}
        found = of_global.read(table, values, problems)
        if not is_a(base, float) or base <= 0:
            problems.append(Problem(_LOCAL, repr(base), "a positive number"))
            return found
        if "layer_types" in table and not values.get("window"):
            if "sliding_attention" not in (table["layer_types"] or ()):
                return {**found, "local_rope_theta": 0.0}
            wanted = "every layer, or all but every n-th: the others have another rope"
            problems.append(Problem("layer_types", "windows here and there", wanted))
        return {**found, "local_rope_theta": float(base) if values.get("window") else 0.0}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        if config.window and not config.local_rope_theta:
            same = config.rope_scaling is None
            if not same:
                wanted = "a theta of local layers, which nothing stretches"
                problems.append(Problem("local_rope_theta", "0", wanted))
            return {**of_global.write(config, problems), _LOCAL: config.rope_theta}
        base = config.local_rope_theta or local
        return {**of_global.write(config, problems), _LOCAL: base}

    ours = (*of_global.ours, "local_rope_theta")
    return Aspect((*of_global.theirs, _LOCAL), ours, read, write)


def unrotated_layers() -> Aspect:
    """SmolLM3's layers without rope: every n-th."""
    theirs = ("no_rope_layers", "no_rope_layer_interval")

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        every = table.get("no_rope_layer_interval", 4)
        listed = table.get("no_rope_layers")
        count = values.get("num_layers", 0)
        if not is_a(every, int) or every < 1 or not isinstance(listed, list | None):
            got = f"{listed!r} and {every!r}"
            problems.append(Problem(" and ".join(theirs), got, "a list or null, and a number"))
            return {}
        if listed is None:
            return {"nope_every": every}
        turns = [bool(each) for each in listed[:count]]
        every = turns.index(False) + 1 if False in turns else 0
        if turns != [not every or (i + 1) % every != 0 for i in range(count)]:
            wanted = "0 for every n-th layer, and 1 for the others"
            problems.append(Problem("no_rope_layers", str(listed), wanted))
        return {"nope_every": every}

    def write(config: GPTConfig, _: list[Problem]) -> dict[str, Any]:
        entries: dict[str, Any] = {"no_rope_layers": [int(not each) for each in config.unrotated]}
        return entries | {"no_rope_layer_interval": config.nope_every or config.num_layers + 1}

    return Aspect(theirs, ("nope_every",), read, write)


_ATTENTION = f"{LAYER}.self_attn"
_PROJECTIONS = (
    *linear(f"{_ATTENTION}.q_proj", "blocks/attention/q", *HEADS),
    *linear(f"{_ATTENTION}.k_proj", "blocks/attention/k", *HEADS),
    *linear(f"{_ATTENTION}.v_proj", "blocks/attention/v", *HEADS),
    *linear(f"{_ATTENTION}.o_proj", "blocks/attention/out", *OUT),
)
_BEFORE = (
    *norm(f"{LAYER}.input_layernorm", "blocks/attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "blocks/mlp_norm"),
)
_AROUND = (
    *norm(f"{LAYER}.input_layernorm", "blocks/attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "blocks/attention_out_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", "blocks/mlp_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "blocks/mlp_out_norm"),
)
_HEAD_NORMS = (
    *norm(f"{_ATTENTION}.q_norm", "blocks/attention/q_norm", "head"),
    *norm(f"{_ATTENTION}.k_norm", "blocks/attention/k_norm", "head"),
)
_ALL_HEADS = "(heads head) -> heads head"
_NORMS_ACROSS = tuple(
    Rule(f"{_ATTENTION}.{name}.weight", _ALL_HEADS, (f"blocks/attention/{name}/scale",))
    for name in ("q_norm", "k_norm")
)

_Sizes = dict[str, Any]
_GEMMA2: _Sizes = {"vocab_size": 256000, "embed_dim": 2304, "mlp_dim": 9216, "num_layers": 26,
                   "num_heads": 8, "num_kv_heads": 4, "max_seq": 8192, "head_dim": 256}  # fmt: skip
_GEMMA3 = {**_GEMMA2, "vocab_size": 262208, "max_seq": 131072}
_OLMO2: _Sizes = {"vocab_size": 50304, "embed_dim": 4096, "mlp_dim": 11008, "num_layers": 32,
                  "num_heads": 32, "num_kv_heads": None, "max_seq": 2048}  # fmt: skip
_SMOLLM3: _Sizes = {"vocab_size": 128256, "embed_dim": 2048, "mlp_dim": 11008, "num_layers": 36,
                    "num_heads": 16, "num_kv_heads": 4, "max_seq": 32768}  # fmt: skip

_OF_GEMMAS = ("sublayer_norms", "attention_scale", "score_cap", "logit_cap")
_GEMMAS = (
    settings.activation("hidden_activation", "gelu_pytorch_tanh", gelu="gelu_tanh"),
    settings.only("use_bidirectional_attention", None, False, why="attention to later tokens"),
    settings.only("attention_bias", False, why="biases on attention alone"),
    settings.fixed("sublayer_norms", "both"),
    settings.fixed("zero_centered_norm", True),
    settings.scaled_embedding(),
    query_scalar(256),
    ALL_DENSE,
    *NO_BIASES,
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (*START, *_PROJECTIONS, *_AROUND, *MLP, *END),
    (
        *llama_like(**_GEMMA2, tied=True, variants=common(*_OF_GEMMAS)),
        *_GEMMAS,
        NO_QK_NORM,
        settings.window(4096, layered=True),
        cap("attn_logit_softcapping", "score_cap", 50.0),
        cap("final_logit_softcapping", "logit_cap", 30.0),
    ),
    ignored=("cache_implementation", "hidden_act"),
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (*START, *_PROJECTIONS, *_HEAD_NORMS, *_AROUND, *MLP, *END),
    (
        *llama_like(
            **_GEMMA3,
            tied=True,
            window_aspects=(
                settings.window(
                    4096, layered=True, every="sliding_window_pattern", default_every=6
                ),
            ),
            rope_aspect=local_rope(1e6, 1e4),
            variants=common(*_OF_GEMMAS, "local_rope_theta"),
        ),
        *_GEMMAS,
        settings.fixed("qk_norm", True),
        cap("attn_logit_softcapping", "score_cap", None),
        cap("final_logit_softcapping", "logit_cap", None),
    ),
    ignored=("cache_implementation",),
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    (*START, *_PROJECTIONS, *_NORMS_ACROSS, *_AROUND, *MLP, *END),
    (
        *llama_like(**_OLMO2, norm_eps=1e-5, variants=common("sublayer_norms", "qk_norm_across")),
        *PLAIN,
        settings.fixed("qk_norm", True),
        settings.fixed("qk_norm_across", True),
        settings.fixed("sublayer_norms", "after"),
        settings.only("attention_bias", False, why="biases on attention alone"),
        settings.heads_divide(),
        ALL_DENSE,
        NO_WINDOW,
        *NO_BIASES,
    ),
)
NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    (
        *START,
        *_PROJECTIONS,
        *_BEFORE,
        *linear(f"{LAYER}.mlp.up_proj", "blocks/mlp/up", *UP),
        *linear(f"{LAYER}.mlp.down_proj", "blocks/mlp/down", *DOWN),
        *END,
    ),
    (
        settings.same("vocab_size", "vocab_size", 256000),
        settings.same("hidden_size", "embed_dim", 6144),
        settings.same("intermediate_size", "mlp_dim", 24576),
        settings.same("num_hidden_layers", "num_layers", 32),
        settings.same("num_attention_heads", "num_heads", 48),
        settings.same("max_position_embeddings", "max_seq", 4096),
        settings.same("norm_eps", "norm_eps", 1e-5),
        settings.same("tie_word_embeddings", "tied", False),
        settings.derived("num_key_value_heads", "num_kv_heads", None, "kv_heads"),
        settings.derived("head_dim", "head_dim", None, "head_size"),
        settings.activation("hidden_act", "relu2"),
        rope(partial=0.5),
        common(),
        settings.fixed("norm", "layer"),
        settings.fixed("zero_centered_norm", True),
        settings.fixed("embed_scale", 1.0),
        settings.fixed("gated", False),
        settings.fixed("positions", "rope"),
        settings.biases(),
        NO_QK_NORM,
        ALL_DENSE,
        NO_LATENT,
        NO_WINDOW,
        *DECODER,
    ),
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    (*START, *_PROJECTIONS, *_BEFORE, *MLP, *END),
    (
        *llama_like(**_SMOLLM3, tied=True, rope_aspect=rope(2e6), variants=common("nope_every")),
        *PLAIN,
        unrotated_layers(),
        settings.only("use_sliding_window", False, why="windows in layers without rope alone"),
        settings.biases(),
        settings.heads_divide(),
        NO_QK_NORM,
        ALL_DENSE,
        NO_WINDOW,
    ),
    ignored=("layer_types", "sliding_window"),
)
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    (*START, *_PROJECTIONS, *MLP, *END),
    (
        settings.same("vocab_size", "vocab_size", 50304),
        settings.same("hidden_size", "embed_dim", 4096),
        settings.same("intermediate_size", "mlp_dim", 11008),
        settings.same("num_hidden_layers", "num_layers", 32),
        settings.same("num_attention_heads", "num_heads", 32),
        settings.same("max_position_embeddings", "max_seq", 2048),
        settings.same("tie_word_embeddings", "tied", False),
        settings.derived("num_key_value_heads", "num_kv_heads", None, "kv_heads"),
        settings.derived("head_dim", "head_dim", None, "head_size"),
        rope(),
        cap("clip_qkv", "qkv_clip", None),
        common("qkv_clip"),
        settings.fixed("norm", "bare_layer"),
        settings.fixed("norm_eps", 1e-5),  # in its code
        settings.fixed("gated", True),
        settings.fixed("positions", "rope"),
        settings.only("attention_bias", False, why="biases on attention alone"),
        settings.heads_divide(),
        *PLAIN,
        NO_QK_NORM,
        ALL_DENSE,
        NO_LATENT,
        NO_WINDOW,
        *NO_BIASES,
        *DECODER,
    ),
)

_GLM: _Sizes = {"vocab_size": 151552, "embed_dim": 4096, "mlp_dim": 13696, "num_layers": 40,
                "num_heads": 32, "num_kv_heads": 2, "max_seq": 131072, "head_dim": 128,
                "norm_eps": 1.5625e-7}  # fmt: skip
_GLM_MLP = (
    Rule(f"{LAYER}.mlp.gate_up_proj.weight", UP[0], ("blocks/mlp/gate/w", "blocks/mlp/up/w")),
    *linear(f"{LAYER}.mlp.down_proj", "blocks/mlp/down", *DOWN),
)
_OF_GLM = (
    *PLAIN,
    settings.fixed("rope_pairs", "neighbours"),
    settings.same("attention_bias", "qkv_bias", True),
    settings.fixed("bias", False),
    NO_QK_NORM,
    ALL_DENSE,
    NO_WINDOW,
)
GLM = Family(
    "glm",
    "GlmForCausalLM",
    (*START, *_PROJECTIONS, *_BEFORE, *_GLM_MLP, *END),
    (
        *llama_like(**_GLM, rope_aspect=rope(partial=0.5), variants=common("rope_pairs")),
        *_OF_GLM,
    ),
)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    (
        *START,
        *_PROJECTIONS,
        *norm(f"{LAYER}.input_layernorm", "blocks/attention_norm"),
        *norm(f"{LAYER}.post_self_attn_layernorm", "blocks/attention_out_norm"),
        *norm(f"{LAYER}.post_attention_layernorm", "blocks/mlp_norm"),
        *norm(f"{LAYER}.post_mlp_layernorm", "blocks/mlp_out_norm"),
        *_GLM_MLP,
        *END,
    ),
    (
        *llama_like(
            **_GLM,
            rope_aspect=rope(partial=0.5),
            variants=common("rope_pairs", "sublayer_norms"),
        ),
        settings.fixed("sublayer_norms", "both"),
        *_OF_GLM,
    ),
)
DENSE = (GEMMA2, GEMMA3, OLMO2, NEMOTRON, SMOLLM3, OLMO, GLM, GLM4)
"""In the order in which one that fits is chosen."""
