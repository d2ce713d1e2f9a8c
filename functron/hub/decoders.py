"""Formats of dense decoders, most of them with Llama's names and entries.

| format    | beside Llama                                                                         |
|-----------|--------------------------------------------------------------------------------------|
| Mistral   | windows                                                                              |
| Qwen 2    | windows in some layers, biases on q, k, v                                            |
| Qwen 3    | windows in some layers, norms of queries and keys                                    |
| Phi 3     | windows, fused projections                                                           |
| Gemma     | norms around 1, a scaled embedding                                                   |
| Gemma 2   | norms on both sides of sublayers, caps on scores and logits, a window in every other |
| Gemma 3   | norms on both sides, norms of queries and keys, a window and its own rope in 5 of 6  |
| OLMo 2    | norms after sublayers alone, norms of queries and keys over all heads together       |
| Nemotron  | LayerNorm around 1, squared ReLU without a gate, half of a head's dims rotated       |
| SmolLM3   | every fourth layer without rope                                                      |
| OLMo      | LayerNorm without parameters, queries, keys and values that are clipped              |
| GLM       | rotated pairs next to each other, half of a head's dims rotated, biases on q, k, v   |
| GLM-4     | the same with norms on both sides of sublayers                                       |
| GPT-2     | names of its own, LayerNorm, learned positions                                       |
| Arcee     | squared ReLU without a gate                                                          |
| Seed-OSS  | biases on q, k, v                                                                    |
| ERNIE 4.5 | rotated pairs next to each other                                                     |
| Granite   | factors of embeddings, scores, residuals and logits                                  |
| EXAONE 4  | norms after sublayers, norms of queries and keys, windows; rope in layers with them  |
| OLMo 3    | OLMo 2 with windows in three of four layers, which nothing stretches                 |
| StarCoder2| LayerNorm, biases, no gate, windows                                                  |
| StableLM  | LayerNorm, a quarter of a head's dims rotated, perhaps parallel sublayers            |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from functron.core.errors import Problem
from functron.hub.entries import (
    ACTIVATIONS,
    EntryError,
    HubEntry,
    HubTable,
    activation,
    biases,
    derived,
    find_every,
    fixed,
    get,
    get_whole,
    head_norms,
    inverse,
    is_a,
    only,
    positive,
    required,
    rope,
    same,
    window,
)
from functron.hub.format import (
    EMBED,
    HEADS,
    UNEMBED,
    UP,
    HubFormat,
    NameRule,
    attention,
    linear,
    mlp,
    norm,
)
from functron.models.config import GPTConfig

# --- names of tensors

LAYER = "model.layers.{layer}"
START = (NameRule("model.embed_tokens.weight", EMBED, ("embed",)),)
END = (*norm("model.norm", "norm"), NameRule("lm_head.weight", UNEMBED, ("unembed",)))
NORMS = (
    *norm(f"{LAYER}.input_layernorm", "blocks/attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "blocks/mlp_norm"),
)
ATTENTION = (
    *attention("blocks/attention", *(f"{LAYER}.self_attn.{name}_proj" for name in "qkvo")),
    *norm(f"{LAYER}.self_attn.q_norm", "blocks/attention/q_norm", "head"),
    *norm(f"{LAYER}.self_attn.k_norm", "blocks/attention/k_norm", "head"),
)
GATED = ("gate_proj", "up_proj", "down_proj")
MLP = mlp("blocks/mlp", *(f"{LAYER}.mlp.{name}" for name in GATED))

LLAMA_RULES = (*START, *NORMS, *ATTENTION, *MLP, *END)
"""Llama's names, with biases and norms that other formats have."""

_NORMS_AROUND = (
    *norm(f"{LAYER}.input_layernorm", "blocks/attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "blocks/attention_out_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", "blocks/mlp_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "blocks/mlp_out_norm"),
)
_GLM4_NORMS = (
    *norm(f"{LAYER}.input_layernorm", "blocks/attention_norm"),
    *norm(f"{LAYER}.post_self_attn_layernorm", "blocks/attention_out_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "blocks/mlp_norm"),
    *norm(f"{LAYER}.post_mlp_layernorm", "blocks/mlp_out_norm"),
)
NORMS_ACROSS = tuple(
    NameRule(f"{LAYER}.self_attn.{name}.weight", HEADS[1], (f"blocks/attention/{name}/scale",))
    for name in ("q_norm", "k_norm")
)
QKV = ("blocks/attention/q/w", "blocks/attention/k/w", "blocks/attention/v/w")
_OUT = ATTENTION[6:8]
_FUSED_QKV = (NameRule(f"{LAYER}.self_attn.qkv_proj.weight", HEADS[0], QKV), *_OUT)
_FUSED_MLP = (
    NameRule(f"{LAYER}.mlp.gate_up_proj.weight", UP[0], ("blocks/mlp/gate/w", "blocks/mlp/up/w")),
    *MLP[4:],
)

_H = "transformer.h.{layer}"
GPT2_RULES = (  # its Conv1D stores weights as we do, [in, out]
    NameRule("transformer.wte.weight", EMBED, ("embed",)),
    NameRule("transformer.wpe.weight", "position embed -> position embed", ("positions",)),
    *norm(f"{_H}.ln_1", "blocks/attention_norm"),
    NameRule(f"{_H}.attn.c_attn.weight", "embed (heads head) -> embed heads head", QKV, fused=1),
    NameRule(f"{_H}.attn.c_attn.bias", HEADS[1], tuple(f"{path[:-1]}b" for path in QKV)),
    *linear(
        f"{_H}.attn.c_proj",
        "blocks/attention/out",
        "(heads head) embed -> heads head embed",
        "embed -> embed",
    ),
    *norm(f"{_H}.ln_2", "blocks/mlp_norm"),
    *linear(f"{_H}.mlp.c_fc", "blocks/mlp/up", "embed mlp -> embed mlp", "mlp -> mlp"),
    *linear(f"{_H}.mlp.c_proj", "blocks/mlp/down", "mlp embed -> mlp embed", "embed -> embed"),
    *norm("transformer.ln_f", "norm"),
    NameRule("lm_head.weight", UNEMBED, ("unembed",)),
)


# --- entries of config.json


def _check_mup(config: GPTConfig) -> Iterator[Problem]:
    fix = "fold it into the parameters first: gpt.folded(config, params)"
    for name in ("mup_base_dim", "mup_base_head_dim"):
        if value := getattr(config, name):
            yield Problem(name, repr(value), "0 in this family", fix)


DECODER = (
    required("mup_base_dim", "mup_base_head_dim", check=_check_mup),
    only("is_encoder_decoder", False, why="encoder"),
    only("add_cross_attention", False, why="attention to another sequence"),
)
SILU = activation("hidden_act", "silu")


def llama(
    *,
    vocab_size: int,
    embed_dim: int,
    mlp_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None,
    max_seq: int,
    head_dim: int | tuple[HubEntry, ...] | None = None,
    norm_eps: float | None = 1e-6,
    tied: bool = False,
    act: HubEntry | None = SILU,
    positions: HubEntry | None = rope(),  # noqa: B008
) -> tuple[HubEntry, ...]:
    """The entries of Llama and similar formats.

    Args:
        vocab_size, embed_dim, mlp_dim, num_layers, num_heads, num_kv_heads, max_seq, head_dim,
            norm_eps, tied: transformers' defaults; `norm_eps` None: there is no such entry;
            `head_dim` may be other entries of the sizes of heads.
        act, positions: the entries of the activation and the rope; None: they are listed later.
    """
    heads = head_dim if isinstance(head_dim, tuple) else (
        derived("head_dim", "head_dim", head_dim, lambda config: config.head_size),
    )  # fmt: skip
    found = (
        same("vocab_size", "vocab_size", vocab_size),
        same("hidden_size", "embed_dim", embed_dim),
        same("intermediate_size", "mlp_dim", mlp_dim),
        same("num_hidden_layers", "num_layers", num_layers),
        same("num_attention_heads", "num_heads", num_heads),
        same("max_position_embeddings", "max_seq", max_seq),
        None if norm_eps is None else same("rms_norm_eps", "norm_eps", norm_eps),
        same("tie_word_embeddings", "tied", tied),
        derived("num_key_value_heads", "num_kv_heads", num_kv_heads, lambda c: c.kv_heads),
        *heads,
        positions,
        act,
        only("rope_interleaved", False, why="interleaved rope"),
        only("use_mrope", False, why="positions of images"),
        *DECODER,
    )
    return tuple(entry for entry in found if entry is not None)


ATTENTION_BIAS = biases(mlp=False)
"""Biases of attention, as ``attention_bias`` has it; feed-forward layers have none."""


def _check_heads(config: GPTConfig) -> Iterator[Problem]:
    if config.embed_dim % config.num_heads:
        wanted = f"a multiple of num_heads={config.num_heads}"
        yield Problem("embed_dim", str(config.embed_dim), wanted)


HEADS_DIVIDE = required(check=_check_heads)
"""Llama's config requires that num_heads divides embed_dim."""


def _read_scale(_: HubTable, values: Mapping) -> dict:
    return {"embed_scale": math.sqrt(values["embed_dim"])} if "embed_dim" in values else {}


def _check_scale(config: GPTConfig) -> Iterator[Problem]:
    wanted = math.sqrt(config.embed_dim)
    if not math.isclose(config.embed_scale, wanted, rel_tol=1e-6):
        yield Problem("embed_scale", str(config.embed_scale), f"{wanted}, sqrt(embed_dim)")


SCALED_EMBEDDING = replace(required("embed_scale", check=_check_scale), read=_read_scale)
"""Gemma's embedding is multiplied by sqrt(embed_dim)."""


def _cap(theirs: str, ours: str, default: float | None) -> HubEntry:
    """A cap, where null means our 0; `default` is transformers'."""

    def read(table: HubTable, _: Mapping) -> dict:
        value = table.get(theirs, default)
        if value is not None and not (is_a(value, float) and 0 < value < math.inf):
            raise EntryError(Problem(theirs, repr(value), "a positive number or null"))
        return {ours: float(value or 0.0)}

    return HubEntry(
        (theirs,), (ours,), read, lambda config: {theirs: getattr(config, ours) or None}
    )


_SCALAR = "query_pre_attn_scalar"


def _write_scalar(config: GPTConfig) -> dict:
    scale = config.attention_scale
    scalar = max(round(scale**-2), 1) if scale else config.head_size
    if scale and not math.isclose(scalar**-0.5, scale, rel_tol=1e-6):
        wanted = "one over the root of a whole number"
        raise EntryError(Problem("attention_scale", str(scale), wanted))
    return {_SCALAR: scalar}


_QUERY_SCALAR = HubEntry(
    (_SCALAR,),
    ("attention_scale",),
    lambda table, _: {"attention_scale": positive(_SCALAR, table.get(_SCALAR, 256)) ** -0.5},
    _write_scalar,
)
"""Gemma's ``query_pre_attn_scalar`` s, an integer: scores are multiplied by 1 / sqrt(s)."""

_LOCAL = "rope_local_base_freq"
PLAIN_ROPE: Mapping[str, Any] = MappingProxyType({"rope_type": "default"})


def read_settings(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise EntryError(Problem(name, repr(value), "an object or null"))
    return value or {}


def _make_local_rope(theta: float, local: float | None) -> HubEntry:
    """Gemma 3's two ropes, and OLMo 3's; listed after the entry of windows.

    Args:
        theta: transformers' ``rope_theta``, of layers without a window.
        local: transformers' ``rope_local_base_freq``, of layers with one; None: no such entry,
            and that of the others.
    """
    of_global = rope(theta)

    def read(table: HubTable, values: Mapping) -> dict:
        both = table.get("rope_parameters")
        base = table.get("rope_theta", theta) if local is None else table.get(_LOCAL, local)
        if both and not (isinstance(both, Mapping) and "full_attention" in both):
            wanted = "those of full_attention and of sliding_attention: transformers uses no others"
            raise EntryError(Problem("rope_parameters", repr(both), wanted))
        if both:
            names = ("full_attention", "sliding_attention")
            whole, here = (read_settings(f"rope_parameters.{n}", both.get(n)) for n in names)
            older = read_settings("rope_scaling", table.get("rope_scaling"))
            base = here.get("rope_theta", base)
            if (kind := here.get("rope_type", "default")) != "default":
                name = "rope_parameters.sliding_attention.rope_type"
                raise EntryError(Problem(name, repr(kind), "'default'"))
            table = {**table, "rope_parameters": {**whole, **older}, "rope_scaling": None}
        found = of_global.read(table, values)
        base = positive(_LOCAL, base)
        if values.get("window"):
            return {**found, "local_rope_theta": base}
        if "layer_types" in table and "sliding_attention" in (table["layer_types"] or ()):
            wanted = "every layer, or all but every n-th: the others have another rope"
            raise EntryError(Problem("layer_types", "windows here and there", wanted))
        return {**found, "local_rope_theta": 0.0}

    def write(config: GPTConfig) -> dict:
        base = config.local_rope_theta or local or config.rope_theta
        if config.window and not config.local_rope_theta:
            if config.rope_scaling is not None:
                wanted = "a theta of local layers, which nothing stretches"
                raise EntryError(Problem("local_rope_theta", "0", wanted))
            base = config.rope_theta
        written = of_global.write(config)
        if local is not None:
            return {**written, _LOCAL: base}
        whole = {"rope_theta": written["rope_theta"], **(written["rope_scaling"] or PLAIN_ROPE)}
        here = {"rope_theta": base, **PLAIN_ROPE}
        both = {"full_attention": whole, "sliding_attention": here}
        return {"rope_parameters": both, "rope_theta": config.rope_theta, "rope_scaling": None}

    ours = (*of_global.ours, "local_rope_theta")
    theirs = of_global.theirs if local is None else (*of_global.theirs, _LOCAL)
    return HubEntry(theirs, ours, read, write)


def _read_global_unrotated(table: HubTable, values: Mapping) -> dict:
    if table.get("sliding_window", 4096) is None:
        return {}
    if not values.get("window"):
        got = "full_attention alone beside a sliding_window: layers without rope"
        wanted = "windows in all layers but every n-th; or no sliding_window, and rope in all"
        raise EntryError(Problem("layer_types", got, wanted))
    return {"nope_every": values.get("global_every", 0)}


def write_global_unrotated(config: GPTConfig) -> dict:
    wanted = config.global_every if config.window else 0
    if (config.nope_every if any(config.unrotated) else 0) != wanted:
        got, words = str(config.nope_every), f"{wanted}: layers without a window have no rope"
        raise EntryError(Problem("nope_every", got, words))
    return {} if config.window else {"sliding_window": None}


_GLOBAL_UNROTATED = HubEntry((), ("nope_every",), _read_global_unrotated, write_global_unrotated)
"""EXAONE 4's layers without a window, which have no rope where others have one; after windows."""

_PARALLEL = HubEntry(
    ("use_parallel_residual",),
    ("parallel_residual", "sublayer_norms"),
    lambda table, _: (
        {"parallel_residual": True, "sublayer_norms": "shared"}
        if get(table, "use_parallel_residual", False)
        else {}
    ),
    lambda config: {"use_parallel_residual": config.sublayer_norms == "shared"},
)
"""StableLM's sublayers side by side, which read one norm."""


def _check_kinds(config: GPTConfig) -> Iterator[Problem]:
    norms = ("before", "shared")[config.parallel_residual]
    if config.sublayer_norms != norms:
        yield Problem("sublayer_norms", repr(config.sublayer_norms), f"{norms!r} in this family")
    yield from check_head_width(config)


def check_head_width(config: GPTConfig) -> Iterator[Problem]:
    if config.head_size * config.num_heads != config.embed_dim:
        wanted = f"{config.embed_dim / config.num_heads:g}: embed_dim / num_heads"
        yield Problem("head_dim", str(config.head_size), wanted)


_UNROTATED = ("no_rope_layers", "no_rope_layer_interval")


def _read_unrotated(table: HubTable, values: Mapping) -> dict:
    every = table.get("no_rope_layer_interval", 4)
    listed = table.get("no_rope_layers")
    count = values.get("num_layers", 0)
    if not is_a(every, int) or every < 1 or not isinstance(listed, list | None):
        got = f"{listed!r} and {every!r}"
        raise EntryError(Problem(" and ".join(_UNROTATED), got, "a list or null, and a number"))
    if listed is None:
        return {"nope_every": every}
    every = find_every([bool(each) for each in listed[:count]])
    if every is None or len(listed) < count:
        wanted = "0 for every n-th layer, and 1 for the others"
        raise EntryError(Problem("no_rope_layers", str(listed), wanted))
    return {"nope_every": every}


def _write_unrotated(config: GPTConfig) -> dict[str, Any]:
    entries: dict[str, Any] = {"no_rope_layers": [int(not each) for each in config.unrotated]}
    return entries | {"no_rope_layer_interval": config.nope_every or config.num_layers + 1}


_UNROTATED_LAYERS = HubEntry(_UNROTATED, ("nope_every",), _read_unrotated, _write_unrotated)
"""SmolLM3's layers without rope: every n-th."""


def _read_inner(table: HubTable, values: Mapping) -> dict:
    value = get_whole(table, "n_inner", None)
    return {"mlp_dim": 4 * values.get("embed_dim", 1) if value is None else value}


_INNER = HubEntry(
    ("n_inner",), ("mlp_dim",), _read_inner, lambda config: {"n_inner": config.mlp_dim}
)
"""GPT-2's feed-forward width, where null means 4 embed_dim."""


def check_square_heads(config: GPTConfig) -> Iterator[Problem]:
    if config.kv_heads != config.num_heads:
        wanted = f"{config.num_heads}, as many as query heads"
        yield Problem("num_kv_heads", str(config.kv_heads), wanted)
    if config.head_size * config.num_heads != config.embed_dim:
        wanted = f"embed_dim / num_heads = {config.embed_dim / config.num_heads:g}"
        yield Problem("head_dim", str(config.head_size), wanted)


_SQUARE_HEADS = required(
    *("num_kv_heads", "head_dim", "qkv_bias", "rope_theta", "rope_scaling", "rope_fraction"),
    check=check_square_heads,
)
"""GPT-2's heads: embed_dim / num_heads dims each, as many key heads, and no rope."""

# --- formats

_Sizes = dict[str, Any]
_QWEN: _Sizes = {"vocab_size": 151936, "embed_dim": 4096, "mlp_dim": 22016, "num_layers": 32,
         "num_heads": 32, "num_kv_heads": 32, "max_seq": 32768}  # fmt: skip
_GEMMA2_SIZES: _Sizes = {"vocab_size": 256000, "embed_dim": 2304, "mlp_dim": 9216, "num_layers": 26,
                   "num_heads": 8, "num_kv_heads": 4, "max_seq": 8192, "head_dim": 256}  # fmt: skip
_GLM_SIZES: _Sizes = {"vocab_size": 151552, "embed_dim": 4096, "mlp_dim": 13696, "num_layers": 40,
                "num_heads": 32, "num_kv_heads": 2, "max_seq": 131072, "head_dim": 128,
                "norm_eps": 1.5625e-7}  # fmt: skip
_QWEN_WINDOW = window(4096, switched=True, layered=True)
# "gelu" of Gemma's first releases means the tanh approximation, as transformers knows
_GELUS = {**ACTIVATIONS, "gelu": "gelu_tanh"}
_BIDIRECTIONAL = only("use_bidirectional_attention", None, False, why="attention to later tokens")

LLAMA = HubFormat(
    "llama",
    "LlamaForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=32000, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=2048),
        biases(),
        HEADS_DIVIDE,
    ),
)  # fmt: skip
MISTRAL = HubFormat(
    "mistral",
    "MistralForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=32000, embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32,
               num_kv_heads=8, max_seq=131072),
        window(4096),
    ),
)  # fmt: skip
QWEN2 = HubFormat(
    "qwen2",
    "Qwen2ForCausalLM",
    LLAMA_RULES,
    (*llama(**_QWEN), _QWEN_WINDOW, biases(True, False, False)),
)
QWEN3 = HubFormat(
    "qwen3",
    "Qwen3ForCausalLM",
    LLAMA_RULES,
    (*llama(**_QWEN, head_dim=128), fixed(qk_norm=True), _QWEN_WINDOW, ATTENTION_BIAS),
)
PHI3 = HubFormat(
    "phi3",
    "Phi3ForCausalLM",
    (*START, *NORMS, *_FUSED_QKV, *_FUSED_MLP, *END),
    (
        *llama(vocab_size=32064, embed_dim=3072, mlp_dim=8192, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=4096, norm_eps=1e-5, positions=rope(partial=1.0)),
        window(None),
    ),
    ignored=("original_max_position_embeddings", "full_attn_mod", "interpolate_factor"),
)  # fmt: skip
GEMMA = HubFormat(
    "gemma",
    "GemmaForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=256000, embed_dim=3072, mlp_dim=24576, num_layers=28, num_heads=16,
               num_kv_heads=16, max_seq=8192, head_dim=256, tied=True,
               act=activation("hidden_act", "gelu_pytorch_tanh", _GELUS)),
        only("hidden_activation", None, "gelu_pytorch_tanh", why="second activation"),
        _BIDIRECTIONAL,
        ATTENTION_BIAS,
        fixed(zero_centered_norm=True),
        SCALED_EMBEDDING,
    ),
)  # fmt: skip
_GEMMAS = (
    _BIDIRECTIONAL,
    ATTENTION_BIAS,
    fixed(sublayer_norms="both", zero_centered_norm=True),
    SCALED_EMBEDDING,
    _QUERY_SCALAR,
)
_GEMMAS_ACT = activation("hidden_activation", "gelu_pytorch_tanh")
GEMMA2 = HubFormat(
    "gemma2",
    "Gemma2ForCausalLM",
    (*START, *ATTENTION, *_NORMS_AROUND, *MLP, *END),
    (
        *llama(**_GEMMA2_SIZES, tied=True, act=_GEMMAS_ACT),
        *_GEMMAS,
        window(4096, layered=True),
        _cap("attn_logit_softcapping", "score_cap", 50.0),
        _cap("final_logit_softcapping", "logit_cap", 30.0),
    ),
    ignored=("cache_implementation", "hidden_act", "sliding_window_size"),
)
GEMMA3 = HubFormat(
    "gemma3_text",
    "Gemma3ForCausalLM",
    GEMMA2.rules,
    (
        *llama(
            **{**_GEMMA2_SIZES, "vocab_size": 262208, "max_seq": 131072},
            tied=True, act=_GEMMAS_ACT, positions=None,
        ),
        window(4096, layered=True, every="sliding_window_pattern", default_every=6),
        _make_local_rope(1e6, 1e4),
        *_GEMMAS,
        fixed(qk_norm=True),
        _cap("final_logit_softcapping", "logit_cap", None),
    ),
    ignored=("cache_implementation", "attn_logit_softcapping"),  # transformers applies no such cap
)  # fmt: skip
OLMO2 = HubFormat(
    "olmo2",
    "Olmo2ForCausalLM",
    (*START, *ATTENTION[:8], *NORMS_ACROSS, *_NORMS_AROUND, *MLP, *END),
    (
        *llama(vocab_size=50304, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=2048, norm_eps=1e-5),
        fixed(qk_norm=True, qk_norm_across=True, sublayer_norms="after"),
        ATTENTION_BIAS,
        HEADS_DIVIDE,
    ),
)  # fmt: skip
NEMOTRON = HubFormat(
    "nemotron",
    "NemotronForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=256000, embed_dim=6144, mlp_dim=24576, num_layers=32, num_heads=48,
               num_kv_heads=None, max_seq=4096, norm_eps=None,
               act=activation("hidden_act", "relu2"), positions=rope(partial=0.5)),
        same("norm_eps", "norm_eps", 1e-5),
        fixed(norm="layer", zero_centered_norm=True, gated=False),
        biases(),
    ),
)  # fmt: skip
SMOLLM3 = HubFormat(
    "smollm3",
    "SmolLM3ForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=128256, embed_dim=2048, mlp_dim=11008, num_layers=36, num_heads=16,
               num_kv_heads=4, max_seq=32768, tied=True, positions=rope(2e6)),
        _UNROTATED_LAYERS,
        only("use_sliding_window", False, why="windows in layers without rope alone"),
        biases(),
        HEADS_DIVIDE,
    ),
    ignored=("layer_types", "sliding_window"),
)  # fmt: skip
OLMO = HubFormat(
    "olmo",
    "OlmoForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=50304, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=2048, norm_eps=None),
        _cap("clip_qkv", "qkv_clip", None),
        fixed(norm="bare_layer", norm_eps=1e-5),  # the latter in its code
        ATTENTION_BIAS,
        HEADS_DIVIDE,
    ),
)  # fmt: skip
_GLMS = (
    *llama(**_GLM_SIZES, positions=rope(partial=0.5)),
    fixed(rope_pairs="neighbours"),
    biases(("attention_bias", True), False, False),
)
GLM = HubFormat("glm", "GlmForCausalLM", (*START, *NORMS, *ATTENTION, *_FUSED_MLP, *END), _GLMS)
GLM4 = HubFormat(
    "glm4",
    "Glm4ForCausalLM",
    (*START, *_GLM4_NORMS, *ATTENTION, *_FUSED_MLP, *END),
    (*_GLMS, fixed(sublayer_norms="both")),
)
ARCEE = HubFormat(
    "arcee",
    "ArceeForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=32000, embed_dim=2560, mlp_dim=18432, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=4096, norm_eps=1e-5,
               act=activation("hidden_act", "relu2")),
        fixed(gated=False),
        biases(),
        HEADS_DIVIDE,
    ),
)  # fmt: skip
SEED_OSS = HubFormat(
    "seed_oss",
    "SeedOssForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=155136, embed_dim=4096, mlp_dim=27648, num_layers=64, num_heads=80,
               num_kv_heads=8, max_seq=524288, head_dim=128),
        biases(("attention_bias", True), "attention_out_bias"),
    ),
)  # fmt: skip
ERNIE = HubFormat(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=103424, embed_dim=1024, mlp_dim=3072, num_layers=18, num_heads=16,
               num_kv_heads=2, max_seq=131072, head_dim=128, norm_eps=1e-5, tied=True,
               positions=rope(5e5)),
        fixed(rope_pairs="neighbours"),
        biases("use_bias", mlp="use_bias"),
    ),
)  # fmt: skip
GRANITE = HubFormat(
    "granite",
    "GraniteForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=32000, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=2048),
        same("embedding_multiplier", "embed_scale", 1.0),
        HubEntry(
            ("attention_multiplier",),
            ("attention_scale",),
            lambda table, _: {"attention_scale": get(table, "attention_multiplier", 1.0)},
            lambda c: {"attention_multiplier": c.attention_scale or c.head_size**-0.5},
        ),
        same("residual_multiplier", "residual_scale", 1.0),
        inverse("logits_scaling", "logit_scale"),
        biases(),
    ),
)  # fmt: skip
EXAONE4 = HubFormat(
    "exaone4",
    "Exaone4ForCausalLM",
    GEMMA2.rules,
    (
        *llama(vocab_size=102400, embed_dim=4096, mlp_dim=16384, num_layers=32, num_heads=32,
               num_kv_heads=32, max_seq=2048, norm_eps=1e-5),
        window(4096, layered=True, every="sliding_window_pattern", default_every=4),
        _GLOBAL_UNROTATED,
        fixed(qk_norm=True, sublayer_norms="after"),
    ),
)  # fmt: skip
OLMO3 = HubFormat(
    "olmo3",
    "Olmo3ForCausalLM",
    OLMO2.rules,
    (
        *llama(vocab_size=50304, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=2048, norm_eps=1e-5, positions=None),
        window(4096, layered=True, default_every=4),
        _make_local_rope(5e5, None),
        fixed(qk_norm=True, qk_norm_across=True, sublayer_norms="after"),
        ATTENTION_BIAS,
    ),
)  # fmt: skip
STARCODER2 = HubFormat(
    "starcoder2",
    "Starcoder2ForCausalLM",
    (
        *START, *NORMS, *ATTENTION,
        *mlp("blocks/mlp", f"{LAYER}.mlp.c_fc", f"{LAYER}.mlp.c_proj"), *END,
    ),
    (
        *llama(vocab_size=49152, embed_dim=3072, mlp_dim=12288, num_layers=30, num_heads=24,
               num_kv_heads=2, max_seq=4096, norm_eps=None, tied=True,
               act=activation("hidden_act", "gelu_pytorch_tanh")),
        same("norm_epsilon", "norm_eps", 1e-5),
        fixed(norm="layer", gated=False),
        window(None),
        biases(("use_bias", True), mlp=("use_bias", True)),
    ),
    ignored=(  # which transformers does not read
        "activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type",
        "norm_type", "scale_attention_softmax_in_fp32", "scale_attn_weights",
    ),
)  # fmt: skip
_STABLELM_RULES = (
    *(rule for rule in LLAMA_RULES if not {"q_norm", "k_norm"} & {*rule.paths[0].split("/")}),
    *(
        NameRule(
            f"{LAYER}.self_attn.{name}_layernorm.norms.{{head}}.weight",
            "size -> size",
            (f"blocks/attention/{name}_norm/layer_scale",),
        )
        for name in "qk"
    ),
)
STABLELM = HubFormat(
    "stablelm",
    "StableLmForCausalLM",
    _STABLELM_RULES,
    (
        *llama(vocab_size=50304, embed_dim=2560, mlp_dim=6912, num_layers=32, num_heads=32,
               num_kv_heads=32, max_seq=4096, norm_eps=None, positions=rope(partial=0.25)),
        same("layer_norm_eps", "norm_eps", 1e-5),
        fixed(norm="layer"),
        _PARALLEL,
        required(check=_check_kinds),
        biases("use_qkv_bias", False, False),
        head_norms("qk_layernorm", "head_layer"),
    ),
)  # fmt: skip
GPT2 = HubFormat(
    "gpt2",
    "GPT2LMHeadModel",
    GPT2_RULES,
    (
        same("vocab_size", "vocab_size", 50257),
        same("n_embd", "embed_dim", 768),
        same("n_layer", "num_layers", 12),
        same("n_head", "num_heads", 12),
        same("n_positions", "max_seq", 1024),
        same("layer_norm_epsilon", "norm_eps", 1e-5),
        same("tie_word_embeddings", "tied", True),
        _INNER,
        activation("activation_function", "gelu_new"),
        fixed(norm="layer", positions="learned", bias=True, gated=False),
        _SQUARE_HEADS,
        only("scale_attn_weights", True, why="unscaled attention"),
        only("scale_attn_by_inverse_layer_idx", False, why="attention scaled by its layer"),
        *DECODER,
    ),
    prefix="transformer.",
    max_seq="n_positions",
    unused=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
    ignored=(
        *("n_ctx", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "summary_first_dropout"),
    ),
)

DENSE = (
    *(LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, PHI3, GPT2),
    *(GEMMA2, GEMMA3, OLMO2, NEMOTRON, SMOLLM3, OLMO, GLM, GLM4),
    *(ARCEE, SEED_OSS, ERNIE, GRANITE, EXAONE4, OLMO3, STARCODER2, STABLELM),
)
"""Those of dense decoders."""

LACKING: Mapping[str, str] = MappingProxyType(
    {
        "llama4_text": "layers without rope, attention in chunks and temperatures of queries",
        "gemma3": "images of Gemma 3; its text model alone is gemma3_text",
        "mistral3": "images of Mistral 3; its text model alone is ministral3 or mistral",
        "qwen2_vl": "images of Qwen2-VL, though positions of its kind (rope_sections)",
    }
)
"""Decoders that are not supported, and what ours lacks."""
