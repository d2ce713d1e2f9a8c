"""Formats of decoders that have more than names and entries of their own beside Llama.

| format    | beside Llama                                                                         |
|-----------|--------------------------------------------------------------------------------------|
| GPT-NeoX  | names of its own, LayerNorm, parallel sublayers, q, k, v of a head in a row          |
| Falcon    | the same; one norm for both sublayers, or two; few key heads                         |
| Phi       | LayerNorm, parallel sublayers, half of a head's dims rotated, a bias on the logits   |
| Cohere    | LayerNorm without a bias, parallel sublayers, neighbouring pairs, scaled logits      |
| Cohere2   | the same with windows, and no rope in layers without                                 |
| Apertus   | xIELU without a gate, norms of queries and keys                                      |
| Hunyuan   | norms of queries and keys after rope, whose base may be larger                       |
| Ministral3| queries that grow with their position                                                |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from functron.core.errors import Problem
from functron.hub.decoders import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    END,
    LAYER,
    LLAMA_RULES,
    MLP,
    NORMS,
    PLAIN_ROPE,
    QKV,
    START,
    check_head_width,
    check_square_heads,
    llama,
    read_settings,
    write_global_unrotated,
)
from functron.hub.entries import (
    ACTIVATIONS,
    EntryError,
    HubEntry,
    HubTable,
    activation,
    biases,
    fixed,
    get,
    get_whole,
    head_norms,
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
    OUT,
    UNEMBED,
    HubFormat,
    NameRule,
    Surplus,
    attention,
    linear,
    mlp,
    norm,
)
from functron.models.config import GPTConfig

# --- names of tensors


def _list_grouped(layer: str, embed: str, end: str, mixer: str) -> tuple[NameRule, ...]:
    """Names of GPT-NeoX and Falcon, but for norms: queries, keys and values by key head."""
    biases = tuple(f"{path[:-1]}b" for path in QKV)
    name = f"{layer}.{mixer}.query_key_value"
    widths = (f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h")
    return (
        NameRule(f"{embed}.weight", EMBED, ("embed",)),
        NameRule(f"{name}.weight", HEADS[0], QKV, grouped=True),
        NameRule(f"{name}.bias", HEADS[1], biases, grouped=True),
        *linear(f"{layer}.{mixer}.dense", "blocks/attention/out", *OUT),
        *mlp("blocks/mlp", *widths),
        *norm(end, "norm"),
        NameRule("lm_head.weight", UNEMBED, ("unembed",)),
    )


_NEOX = "gpt_neox.layers.{layer}"
_NEOX_RULES = (
    *_list_grouped(_NEOX, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "attention"),
    *norm(f"{_NEOX}.input_layernorm", "blocks/attention_norm"),
    *norm(f"{_NEOX}.post_attention_layernorm", "blocks/mlp_norm"),
)
_NEOX_FILES = tuple(
    replace(rule, name=rule.name.replace("lm_head", "embed_out")) for rule in _NEOX_RULES
)


def _list_falcon_names(config: GPTConfig, table: HubTable) -> list[Sequence[NameRule]]:
    """Falcon's names: norms of parallel sublayers have others, where there are two."""
    separate = config.parallel_residual and config.sublayer_norms == "before"
    names = ("ln_attn", "ln_mlp") if separate else ("input_layernorm", "post_attention_layernorm")
    return [(
        *_FALCON_RULES,
        *norm(f"{_BLOCK}.{names[0]}", "blocks/attention_norm"),
        *norm(f"{_BLOCK}.{names[1]}", "blocks/mlp_norm"),
    )]  # fmt: skip


_BLOCK = "transformer.h.{layer}"
_FALCON_RULES = _list_grouped(
    _BLOCK, "transformer.word_embeddings", "transformer.ln_f", "self_attention"
)
_PHI_RULES = (
    *START,
    *norm(f"{LAYER}.input_layernorm", "blocks/attention_norm"),
    *attention(
        "blocks/attention",
        *(f"{LAYER}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "dense")),
    ),
    *norm(f"{LAYER}.self_attn.q_layernorm", "blocks/attention/q_norm", "head"),
    *norm(f"{LAYER}.self_attn.k_layernorm", "blocks/attention/k_norm", "head"),
    *mlp("blocks/mlp", f"{LAYER}.mlp.fc1", f"{LAYER}.mlp.fc2"),
    *norm("model.final_layernorm", "norm"),
    NameRule("lm_head.weight", UNEMBED, ("unembed",)),
    NameRule("lm_head.bias", "vocab -> vocab", ("unembed_bias",)),
)
_APERTUS_RULES = (
    *START,
    *norm(f"{LAYER}.attention_layernorm", "blocks/attention_norm"),
    *norm(f"{LAYER}.feedforward_layernorm", "blocks/mlp_norm"),
    *ATTENTION,
    *MLP,
    NameRule(f"{LAYER}.mlp.act_fn.alpha_p", "() -> ", ("blocks/mlp/activation/positive",)),
    NameRule(f"{LAYER}.mlp.act_fn.alpha_n", "() -> ", ("blocks/mlp/activation/negative",)),
    *END,
)
_COHERE_RULES = (
    *(rule for rule in LLAMA_RULES if not {"q_norm", "k_norm"} & {*rule.paths[0].split("/")}),
    *(
        NameRule(f"{LAYER}.self_attn.{name}.weight", "heads head -> heads head", (path,))
        for name in ("q_norm", "k_norm")
        for path in (f"blocks/attention/{name}/layer_scale",)
    ),
)
HUNYUAN_ATTENTION = (
    *ATTENTION[:8],
    *norm(f"{LAYER}.self_attn.query_layernorm", "blocks/attention/q_norm", "head"),
    *norm(f"{LAYER}.self_attn.key_layernorm", "blocks/attention/k_norm", "head"),
)

# --- entries of config.json


def _read_all_unrotated(table: HubTable, values: Mapping) -> dict:
    if not values.get("window"):
        got = f"{table.get('sliding_window', 4096)!r}, and layers of other kinds"
        wanted = "windows in some layers: those without have no rope"
        raise EntryError(Problem("sliding_window and layer_types", got, wanted))
    return {"nope_every": values.get("global_every", 0)}


def _write_all_unrotated(config: GPTConfig) -> dict:
    if not config.window:
        raise EntryError(Problem("window", "0", "windows in some layers of this family"))
    return write_global_unrotated(config)


_WINDOWS_ROTATED = HubEntry((), ("nope_every",), _read_all_unrotated, _write_all_unrotated)
"""Cohere2's layers without a window, which have no rope; after windows."""


def _rename(inner: HubEntry, names: Mapping[str, str]) -> HubEntry:
    """`inner` with other names of some entries: older ones, which are written.

    Args:
        names: those of `inner` by the others.
    """

    def read(table: HubTable, values: Mapping) -> dict:
        own = {inside: table[name] for name, inside in names.items() if name in table}
        return inner.read({**own, **table}, values)

    def write(config: GPTConfig) -> dict:
        outside = {inside: name for name, inside in names.items()}
        return {outside.get(name, name): x for name, x in inner.write(config).items()}

    return HubEntry((*inner.theirs, *names), inner.ours, read, write)


def _temper(inner: HubEntry, beta: float, seq: int) -> HubEntry:
    """Ministral 3's rope, whose settings have the temperatures of queries as well.

    Args:
        beta, seq: transformers' defaults, where there are no settings.
    """

    def read(table: HubTable, values: Mapping) -> dict:
        name = "rope_scaling" if table.get("rope_scaling") else "rope_parameters"
        given = read_settings(name, table.get(name))
        own = {_BETA: beta, _SEQ: seq} if not given else {**dict.fromkeys((_BETA, _SEQ)), **given}
        bad = [key for key in (_BETA, _SEQ) if not is_a(own[key], float) or own[key] < 0]
        if bad:
            raise EntryError(*(Problem(f"{name}.{key}", repr(own[key]), "a number") for key in bad))
        plain = {key: x for key, x in given.items() if key not in (_BETA, _LONGEST)}
        found = inner.read({**table, name: plain} if given else table, values)
        seen = {"temperature_seq": int(own[_SEQ])} if own[_BETA] else {}
        return {**found, "temperature": float(own[_BETA]), **seen}

    def write(config: GPTConfig) -> dict:
        out = inner.write(config)
        settings = {**(out["rope_scaling"] or PLAIN_ROPE), "rope_theta": out["rope_theta"]}
        original = settings.setdefault(_SEQ, config.temperature_seq)
        if config.temperature and original != config.temperature_seq:
            wanted = f"{original}, rope_scaling.original_max_seq"
            raise EntryError(Problem("temperature_seq", str(config.temperature_seq), wanted))
        return {"rope_parameters": {**settings, _BETA: config.temperature}, "rope_scaling": None}

    return HubEntry(inner.theirs, (*inner.ours, "temperature", "temperature_seq"), read, write)


_BETA, _SEQ = "llama_4_scaling_beta", "original_max_position_embeddings"
_LONGEST = "max_position_embeddings"


def _stretch_base(inner: HubEntry) -> HubEntry:
    """Hunyuan's rope, of which "dynamic" with an ``alpha`` makes theta larger for all lengths."""

    def read(table: HubTable, values: Mapping) -> dict:
        name = "rope_scaling" if table.get("rope_scaling") else "rope_parameters"
        given = read_settings(name, table.get(name))
        alpha = given.get("alpha")
        if not alpha:
            return inner.read(table, values)
        if given.get("rope_type", given.get("type")) != "dynamic":
            raise EntryError(Problem(f"{name}.alpha", repr(alpha), "none but of dynamic rope"))
        theta = given.get("rope_theta", table.get("rope_theta"))
        plain = {key: table[key] for key in table if key not in ("rope_scaling", "rope_parameters")}
        found = inner.read(plain if theta is None else {**plain, "rope_theta": theta}, values)
        heads, dims = values.get("num_heads", 1), values.get("head_dim")
        dims = dims or values.get("embed_dim", 4) // heads
        grown = positive(f"{name}.alpha", alpha) ** (dims / (dims - 2))
        return {**found, "rope_theta": found["rope_theta"] * grown}

    return HubEntry(inner.theirs, inner.ours, read, inner.write)


HUNYUAN_ROPE = _stretch_base(rope())


_PARALLEL_BY_DEFAULT = HubEntry(
    ("use_parallel_residual",),
    ("parallel_residual",),
    lambda table, _: {"parallel_residual": get(table, "use_parallel_residual", True)},
    lambda config: {"use_parallel_residual": config.parallel_residual},
)
"""GPT-NeoX's sublayers side by side, each with a norm."""

_FALCON = (
    "new_decoder_architecture", "multi_query", "parallel_attn", "num_kv_heads",
    "num_ln_in_parallel_attn",
)  # fmt: skip


def _read_falcon(table: HubTable, values: Mapping) -> dict:
    new, parallel = get(table, _FALCON[0], False), get(table, _FALCON[2], True)
    heads = get_whole(table, _FALCON[3], None)
    norms = get_whole(table, _FALCON[4], 2 if new else 1)
    norms = (2 if new else 1) if norms is None else norms
    if (new and not parallel) or norms not in ((1, 2) if new else (1,)):
        got = f"{new}, {parallel} and {norms}"
        wanted = "parallel layers in the new architecture, and two norms in it alone"
        raise EntryError(Problem(f"{_FALCON[0]}, {_FALCON[2]} and {_FALCON[4]}", got, wanted))
    if not new:
        heads = 1 if get(table, _FALCON[1], True) else None
    kind = "shared" if parallel and norms == 1 else "before"
    heads = values.get("num_heads", 1) if heads is None else heads
    return {"num_kv_heads": heads, "parallel_residual": parallel, "sublayer_norms": kind}


def _write_falcon(config: GPTConfig) -> dict:
    parallel, count = config.parallel_residual, config.kv_heads
    kind = ("before", "shared") if parallel else ("before",)
    if config.sublayer_norms not in kind:
        wanted = " or ".join(map(repr, kind)) + " in this family"
        raise EntryError(Problem("sublayer_norms", repr(config.sublayer_norms), wanted))
    separate = parallel and config.sublayer_norms == "before"
    new = separate or count not in (1, config.num_heads)
    if new and not parallel:
        wanted = f"1 or num_heads={config.num_heads} where sublayers are not parallel"
        raise EntryError(Problem("num_kv_heads", str(count), wanted))
    values = (new, count == 1, parallel, count, (2 if separate else 1) if new else None)
    return dict(zip(_FALCON, values, strict=True))


_FALCON_LAYERS = HubEntry(
    _FALCON,
    ("num_kv_heads", "parallel_residual", "sublayer_norms"),
    _read_falcon,
    _write_falcon,
)
"""Falcon's key heads, and its sublayers side by side."""


def _read_ffn(table: HubTable, values: Mapping) -> dict:
    value = get_whole(table, "ffn_hidden_size", None)
    return {"mlp_dim": 4 * values.get("embed_dim", 1) if value is None else value}


_FFN = HubEntry(
    ("ffn_hidden_size",),
    ("mlp_dim",),
    _read_ffn,
    lambda config: {"ffn_hidden_size": config.mlp_dim},
)
"""Falcon's feed-forward width, where null means 4 embed_dim."""


def _list_xielu_constants(config: GPTConfig) -> dict[str, tuple[tuple[int, ...], float]]:
    """The numbers of xIELU that are not learned."""
    values = {"beta": 0.5, "eps": -1e-6} if config.activation == "xielu" else {}
    return {
        f"{LAYER.format(layer=layer)}.mlp.act_fn.{name}": ((), value)
        for layer in range(config.num_layers)
        for name, value in values.items()
    }


# --- formats

_Sizes = dict[str, Any]
GPT_NEOX = HubFormat(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    _NEOX_FILES,
    (
        same("vocab_size", "vocab_size", 50432),
        same("hidden_size", "embed_dim", 6144),
        same("intermediate_size", "mlp_dim", 24576),
        same("num_hidden_layers", "num_layers", 44),
        same("num_attention_heads", "num_heads", 64),
        same("max_position_embeddings", "max_seq", 2048),
        same("layer_norm_eps", "norm_eps", 1e-5),
        same("tie_word_embeddings", "tied", False),
        _rename(
            rope(partial=0.25),
            {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        ),
        activation("hidden_act", "gelu"),
        fixed(norm="layer", gated=False),
        _PARALLEL_BY_DEFAULT,
        required("num_kv_heads", "head_dim", check=check_square_heads),
        biases(("attention_bias", True), mlp=True),
        *DECODER,
    ),
    in_memory=_NEOX_RULES,
    prefix="gpt_neox.",
    unused=(r".*rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias"),
)
FALCON = HubFormat(
    "falcon",
    "FalconForCausalLM",
    (),
    (
        same("vocab_size", "vocab_size", 65024),
        same("hidden_size", "embed_dim", 4544),
        same("num_hidden_layers", "num_layers", 32),
        same("num_attention_heads", "num_heads", 71),
        same("max_position_embeddings", "max_seq", 2048),
        same("layer_norm_epsilon", "norm_eps", 1e-5),
        same("tie_word_embeddings", "tied", True),
        _FFN,
        _FALCON_LAYERS,
        rope(),
        activation("activation", "gelu"),
        fixed(norm="layer", gated=False),
        required("head_dim", check=check_head_width),
        only("alibi", False, why="alibi, biases of scores by distance"),
        only("apply_residual_connection_post_layernorm", False, why="residuals after norms"),
        biases("bias", mlp="bias"),
        *DECODER,
    ),
    prefix="transformer.",
    naming=_list_falcon_names,
)
PHI = HubFormat(
    "phi",
    "PhiForCausalLM",
    _PHI_RULES,
    (
        *llama(vocab_size=51200, embed_dim=2048, mlp_dim=8192, num_layers=24, num_heads=32,
               num_kv_heads=None, max_seq=2048, norm_eps=None,
               act=activation("hidden_act", "gelu_new"), positions=rope(partial=0.5)),
        same("layer_norm_eps", "norm_eps", 1e-5),
        fixed(norm="layer", gated=False, parallel_residual=True, sublayer_norms="shared",
              unembed_bias=True),
        head_norms("qk_layernorm", "layer"),
        biases(True, mlp=True),
    ),
)  # fmt: skip
_COHERES = (
    same("layer_norm_eps", "norm_eps", 1e-5),
    same("logit_scale", "logit_scale", 0.0625),
    fixed(norm="scaled_layer", parallel_residual=True, sublayer_norms="shared",
          rope_pairs="neighbours"),
    ATTENTION_BIAS,
)  # fmt: skip
_COHERE_SIZES: _Sizes = {"vocab_size": 256000, "embed_dim": 8192, "mlp_dim": 22528,
                         "num_layers": 40, "num_heads": 64, "num_kv_heads": None,
                         "max_seq": 8192, "norm_eps": None, "tied": True}  # fmt: skip
COHERE = HubFormat(
    "cohere",
    "CohereForCausalLM",
    _COHERE_RULES,
    (
        *llama(**_COHERE_SIZES, positions=rope(5e5)),
        *_COHERES,
        head_norms("use_qk_norm", "head_layer"),
    ),
)
COHERE2 = HubFormat(
    "cohere2",
    "Cohere2ForCausalLM",
    LLAMA_RULES,
    (
        *llama(**_COHERE_SIZES),
        *_COHERES,
        window(4096, layered=True, every="sliding_window_pattern", default_every=4),
        _WINDOWS_ROTATED,
    ),
    ignored=(  # which transformers does not read
        "cache_implementation", "layer_switch", "order_of_interleaved_layers", "rotary_pct",
        "position_embedding_type", "use_embedding_sharing", "use_gated_activation",
        "use_parallel_block", "use_parallel_embedding", "use_qk_norm",
    ),
)  # fmt: skip
APERTUS = HubFormat(
    "apertus",
    "ApertusForCausalLM",
    _APERTUS_RULES,
    (
        *llama(vocab_size=131072, embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=65536, norm_eps=1e-5,
               act=activation("hidden_act", "xielu", {**ACTIVATIONS, "xielu": "xielu"}),
               positions=rope(12e6, {
                   "rope_type": "llama3", "factor": 8.0, _SEQ: 8192, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0,
               })),
        fixed(qk_norm=True, gated=False),
        ATTENTION_BIAS,
    ),
    surplus=Surplus(
        lambda config, name: bool(re.search(r"\.act_fn\.(beta|eps)\Z", name)),
        lambda name: name,
        _list_xielu_constants,
        exact=True,
    ),
    ignored=("mlp_bias", "post_norm", "qk_norm"),  # which transformers does not read
)  # fmt: skip
HUNYUAN = HubFormat(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    (*START, *NORMS, *HUNYUAN_ATTENTION, *MLP, *END),
    (
        *llama(vocab_size=290943, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=2048, norm_eps=1e-5, positions=HUNYUAN_ROPE),
        fixed(qk_norm=True, qk_norm_last=True),
        ATTENTION_BIAS,
    ),
)  # fmt: skip
MINISTRAL3 = HubFormat(
    "ministral3",
    "Ministral3ForCausalLM",
    LLAMA_RULES,
    (
        *llama(vocab_size=131072, embed_dim=4096, mlp_dim=14336, num_layers=34, num_heads=32,
               num_kv_heads=8, max_seq=262144, head_dim=128, norm_eps=1e-5,
               positions=_temper(rope(1e6, {
                   "rope_type": "yarn", "factor": 16.0, _SEQ: 16384, "beta_fast": 32.0,
                   "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
               }), 0.1, 16384)),
        window(None),
    ),
)  # fmt: skip

VARIANTS = (GPT_NEOX, FALCON, PHI, COHERE, COHERE2, APERTUS, HUNYUAN, MINISTRAL3)
"""Those of this module, which are of dense decoders."""
