"""Formats of mixtures of experts: Mixtral, Qwen-MoE, DeepSeek, GPT-OSS and others.

| format      | files have                               | transformers 5 has in memory        |
|-------------|------------------------------------------|-------------------------------------|
| Mixtral     | ``block_sparse_moe.experts.E.w1, w2, w3``| ``mlp.experts.gate_up_proj``, ...   |
| Qwen3-MoE   | ``mlp.experts.E.gate_proj``, ...         | ``mlp.experts.gate_up_proj``, ...   |
| DeepSeek-V3 | ``mlp.experts.E.gate_proj``, ...         | ``mlp.experts.gate_up_proj``, ...   |
| MiniMax-M2  | ``block_sparse_moe.experts.E.w1, w2, w3``| ``mlp.experts.gate_up_proj``, ...   |
| GPT-OSS     | ``mlp.experts.gate_up_proj``, which is one tensor of all experts in both    |

Qwen2-MoE, OLMoE, GLM-4-MoE, dots.llm1, ERNIE 4.5 MoE, DeepSeek-V2 and Hunyuan have names as
Qwen3-MoE.

Both are read; files are written as transformers writes them.

DeepSeek-V3's multi-token prediction modules are layers after the last. They are read if the files
have them, and written without the copies of embedding and unembedding in DeepSeek's files.
transformers ignores them, or warns of them.

Layers compute the same; auxiliary losses differ, and are not read: as with dropout, the run's
configuration has them.

* `MoEConfig.aux_loss`: transformers adds ``router_aux_loss_coef`` times a loss that counts all of a
  token's experts, and is `top_k` at even routing; ours is 1 in each layer. It multiplies means over
  all layers; ours is a sum over layers. With one layer, aux "batch", targets everywhere and
  ``aux_loss = router_aux_loss_coef * top_k`` they are equal. transformers leaves it out unless
  ``output_router_logits`` is set, which published files do not.
* Jitter: in transformers' Mixtral the noise also reaches the experts' inputs.
* Precision: transformers computes routers' softmax in float32 (Mixtral, Qwen3-MoE) after a matrix
  product in the model's dtype; all in float32 (DeepSeek-V3); all in the model's dtype (GPT-OSS).
  Ours is float32, or float64 in a float64 model.
* Equal scores: ours chooses the lowest expert; transformers whatever topk returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from functron.core.errors import Problem
from functron.hub.decoders import (
    ATTENTION,
    ATTENTION_BIAS,
    DENSE,
    END,
    GATED,
    LAYER,
    MLP,
    NORMS,
    NORMS_ACROSS,
    START,
    llama,
)
from functron.hub.entries import (
    EntryError,
    HubEntry,
    HubTable,
    biases,
    derived,
    fixed,
    get,
    get_whole,
    is_a,
    only,
    required,
    rope,
    same,
    window,
)
from functron.hub.format import HEADS, HubFormat, NameRule, linear, mlp, norm
from functron.hub.variants import HUNYUAN_ATTENTION, HUNYUAN_ROPE, VARIANTS
from functron.models.config import GPTConfig
from functron.models.family import canonical_moe
from functron.nn.moe import MoEConfig

# --- names of tensors

_MOE = "blocks/moe"
_MIXER, _EXPERTS = f"{LAYER}.self_attn", f"{LAYER}.mlp.experts"
_ROUTER = ("expert embed -> embed expert", "expert -> expert")
_PLAIN_ROUTER = NameRule(f"{LAYER}.mlp.gate.weight", _ROUTER[0], (f"{_MOE}/router/w",))
_BLOCK = (*NORMS, *ATTENTION)


def _list_expert_rules(name: str, names: tuple[str, str, str]) -> tuple[NameRule, ...]:
    """The rules of experts' gate, up and down projections, a tensor each."""
    return mlp(f"{_MOE}/experts", *(f"{name}.{{expert}}.{each}" for each in names))


_FUSED = (
    NameRule(
        f"{_EXPERTS}.gate_up_proj",
        "expert mlp embed -> expert embed mlp",
        (f"{_MOE}/experts/gate/w", f"{_MOE}/experts/up/w"),
        fused=1,
    ),
    NameRule(
        f"{_EXPERTS}.down_proj",
        "expert embed mlp -> expert mlp embed",
        (f"{_MOE}/experts/down/w",),
    ),
)


def _rename_stack(stack: str, rules: Sequence[NameRule]) -> tuple[NameRule, ...]:
    """The rules of `blocks` for another stack of layers."""
    return tuple(
        replace(rule, paths=tuple(path.replace("blocks", stack, 1) for path in rule.paths))
        for rule in rules
    )


def _list_qwen3_rules(
    *layers: NameRule, block: Sequence[NameRule] = _BLOCK, ahead: bool = False
) -> tuple[NameRule, ...]:
    """Names as Qwen3-MoE's: of a block, dense layers, a router, and `layers` of experts."""
    sparse = (*block, _PLAIN_ROUTER, *layers)
    found = (*START, *_rename_stack("dense", (*block, *MLP)), *sparse)
    return (*found, *_AHEAD, *_rename_stack("mtp/block", sparse), *END) if ahead else (*found, *END)


_SHARED = mlp(f"{_MOE}/shared", *(f"{LAYER}.mlp.shared_experts.{name}" for name in GATED))
_SHARED_GATED = (
    *mlp(f"{_MOE}/shared", *(f"{LAYER}.mlp.shared_expert.{name}" for name in GATED)),
    NameRule(
        f"{LAYER}.mlp.shared_expert_gate.weight",
        "one embed -> embed one",
        (f"{_MOE}/shared_gate/w",),
    ),
)


def _list_balance_rules(name: str, dims: str = _ROUTER[1]) -> tuple[NameRule, ...]:
    """The rule of the bias that balances a router."""
    return (
        NameRule(f"{LAYER}.mlp.{name}e_score_correction_bias", dims, (f"{_MOE}/router/balance",)),
    )


_LATENT = ("latent embed -> embed latent", "latent -> latent")
_HEADS_OF_LATENT = "(heads head) latent -> latent heads head"
_LATENT_BLOCK = (
    *NORMS,
    *ATTENTION[6:8],
    *linear(f"{_MIXER}.q_a_proj", "blocks/attention/q_down", *_LATENT),
    *norm(f"{_MIXER}.q_a_layernorm", "blocks/attention/q_norm", "latent"),
    NameRule(f"{_MIXER}.q_b_proj.weight", _HEADS_OF_LATENT, ("blocks/attention/q_up/w",)),
    NameRule(f"{_MIXER}.q_proj.weight", HEADS[0], ("blocks/attention/q/w",)),
    *linear(f"{_MIXER}.kv_a_proj_with_mqa", "blocks/attention/kv_down", *_LATENT),
    *norm(f"{_MIXER}.kv_a_layernorm", "blocks/attention/kv_norm", "latent"),
    NameRule(f"{_MIXER}.kv_b_proj.weight", _HEADS_OF_LATENT, ("blocks/attention/kv_up/w",)),
)
_AHEAD = (
    *norm(f"{LAYER}.enorm", "mtp/embed_norm"),
    *norm(f"{LAYER}.hnorm", "mtp/stream_norm"),
    NameRule(f"{LAYER}.eh_proj.weight", "embed both -> both embed", ("mtp/proj/w",)),
    *norm(f"{LAYER}.shared_head.norm", "mtp/norm"),
)


_ACROSS = (*NORMS, *ATTENTION[:8], *NORMS_ACROSS)
_BALANCED = (*_list_balance_rules("gate."), *_SHARED)


def _list_minimax_rules(name: str, *layers: NameRule) -> tuple[NameRule, ...]:
    """Those of MiniMax-M2, whose mixtures have this name."""
    router = (
        NameRule(f"{LAYER}.{name}.gate.weight", _ROUTER[0], (f"{_MOE}/router/w",)),
        NameRule(
            f"{LAYER}.{name}.e_score_correction_bias", _ROUTER[1], (f"{_MOE}/router/balance",)
        ),
    )
    return (*START, *_ACROSS, *router, *layers, *END)


def _make_interleaved(name: str, dims: str, kind: str, fused: int) -> NameRule:
    """A tensor of all experts with interleaved gates and ups."""
    paths = (f"{_MOE}/experts/gate/{kind}", f"{_MOE}/experts/up/{kind}")
    return NameRule(f"{_EXPERTS}.{name}", dims, paths, fused=fused, interleaved=True)


GPT_OSS_RULES = (
    *START,
    *_BLOCK,
    NameRule(f"{_MIXER}.sinks", "heads -> heads", ("blocks/attention/sinks",)),
    *linear(f"{LAYER}.mlp.router", f"{_MOE}/router", *_ROUTER),
    _make_interleaved("gate_up_proj", "expert embed mlp -> expert embed mlp", "w", 2),
    _make_interleaved("gate_up_proj_bias", "expert mlp -> expert mlp", "b", 1),
    NameRule(
        f"{_EXPERTS}.down_proj",
        "expert mlp embed -> expert mlp embed",
        (f"{_MOE}/experts/down/w",),
    ),
    NameRule(
        f"{_EXPERTS}.down_proj_bias", "expert embed -> expert embed", (f"{_MOE}/experts/down/b",)
    ),
    *END,
)

# --- entries of config.json

MixtureSetting = tuple[Sequence[str], str, Any]
"""Names of an entry (all are written, the first present one is read), the field of `MoEConfig`, and
transformers' default."""


def experts(
    *settings: MixtureSetting,
    shared: tuple[str, int] | None = None,
    least_shared: int = 1,
    **constants: Any,
) -> HubEntry:
    """Layers of experts.

    Args:
        shared: the entry of the number of shared experts, as wide as routed ones, and transformers'
            default; None: no such entry.
        least_shared: the fewest that there may be.
        constants: fields of `MoEConfig` with the same value in all models.
    """

    def read(table: HubTable, _: Mapping) -> dict:
        values, problems = dict(constants), []
        for names, field, default in settings:
            name = next((name for name in names if name in table), names[0])
            try:
                values[field] = get(table, name, default)
            except EntryError as error:
                problems += error.args
        if shared is not None:
            count = table.get(*shared)
            if not is_a(count, int) or count < least_shared:
                wanted = f"at least {least_shared} in this family"
                problems.append(Problem(shared[0], repr(count), wanted))
            else:
                values["shared_dim"] = count * values.get("expert_dim", 1)
        if problems:
            raise EntryError(*problems)
        return {"moe": MoEConfig(**values)}

    def write(config: GPTConfig) -> dict:
        moe = config.moe
        if moe is None:
            raise EntryError(Problem("moe", "None", "layers of experts in this family", "set it"))
        if moe.normalise == "after" and "renormalise" in fields:  # the same, computed another way
            moe = replace(moe, normalise="before", renormalise=True)
        if constants.get("shared_gate") and not moe.shared_dim:
            wanted = "the width of the shared expert that this family has"
            raise EntryError(Problem("moe.shared_dim", "0", wanted))
        stored = fields | ({"shared_dim"} if shared else set())
        problems = _compare_fields(moe, stored, constants)
        if shared and (moe.shared_dim < least_shared or moe.shared_dim % moe.expert_dim):
            wanted = f"a multiple of expert_dim={moe.expert_dim}"
            problems.append(Problem("moe.shared_dim", str(moe.shared_dim), wanted))
        if problems:
            raise EntryError(*problems)
        out = {name: getattr(moe, field) for names, field, _ in settings for name in names}
        return {**out, shared[0]: moe.shared_dim // moe.expert_dim} if shared else out

    fields = {field for _, field, _ in settings}
    names = [name for setting in settings for name in setting[0]]
    return HubEntry((*names, *(shared[:1] if shared else ())), ("moe",), read, write)


def _compare_fields(
    moe: MoEConfig, stored: set[str], constants: Mapping[str, Any]
) -> list[Problem]:
    """Problems of fields that a format neither stores nor has as constants."""
    own = {name: getattr(moe, name) for name in stored}
    wanted = canonical_moe(replace(MoEConfig(), **{**constants, **own}))
    got = canonical_moe(moe)
    found = []
    for field in dataclasses.fields(MoEConfig):
        value, want = getattr(moe, field.name), getattr(wanted, field.name)
        if getattr(got, field.name) != want:
            want = constants.get(field.name, want)
            found.append(Problem(f"moe.{field.name}", repr(value), f"{want!r} in this family"))
        elif field.name == "capacity_factor" and value:
            fix = "set it to 0 to export the model without it"
            wanted_words = "0: models of this family drop no tokens"
            found.append(Problem("moe.capacity_factor", str(value), wanted_words, fix))
    return found


def _make_dense_layers(default: int, name: str = "first_k_dense_replace") -> HubEntry:
    """The number of leading dense layers (DeepSeek), of transformers' default."""

    def read(table: HubTable, values: Mapping) -> dict:
        return {"dense_layers": min(get(table, name, default), values.get("num_layers", 1 << 30))}

    return HubEntry((name,), ("dense_layers",), read, lambda config: {name: config.dense_layers})


_DENSE_FIELDS = ("dense_layers", "dense_at")


def _split_dense(dense: Container[int], num_layers: int) -> dict[str, Any]:
    """Our fields of these dense layers: how many come first, and the numbers of the others."""
    first = next((i for i in range(num_layers) if i not in dense), num_layers)
    others = tuple(i for i in range(first, num_layers) if i in dense)
    return {"dense_layers": first, "dense_at": others}


_INTERVAL = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")


def _read_interval(table: HubTable, values: Mapping) -> dict:
    count, last = values.get("num_layers", 0), get_whole(table, _INTERVAL[1], -1)
    start, step = (get_whole(table, name, 1) for name in (_INTERVAL[0], _INTERVAL[2]))
    if start is None or last is None or not step or step < 1:
        got = f"{start}, {last} and {step}"
        raise EntryError(Problem(" and ".join(_INTERVAL), got, "whole numbers, the last 1 or more"))
    stop = count if last == -1 else last + 1
    sparse = {i for i in range(max(start, 0), stop) if (i + 1) % step == 0}
    return _split_dense({*range(count)} - sparse, count)


def _write_interval(config: GPTConfig) -> dict:
    dense, count = config.stacks.get("dense", ()), config.num_layers
    sparse = [layer for layer in range(count) if layer not in dense]
    start, last = (sparse[0], sparse[-1]) if sparse else (count, count - 1)
    step = sparse[1] - start if config.dense_at and len(sparse) > 1 else 1
    last = -1 if last + step >= count else last
    found: dict[str, Any] = dict(zip(_INTERVAL, (start, last, step), strict=True))
    if _read_interval(found, {"num_layers": count}) != _split_dense(dense, count):
        wanted = "experts in every n-th layer, counted from 1, between a first and a last one"
        raise EntryError(Problem("dense_at", str(config.dense_at), f"{wanted}, in this family"))
    return found


_DENSE_INTERVAL = HubEntry(_INTERVAL, _DENSE_FIELDS, _read_interval, _write_interval)
"""ERNIE's first and last layer with experts, and that every n-th has them."""


def _choose_greedily(experts: HubEntry) -> HubEntry:
    """DeepSeek-V2's experts: by ``topk_method`` "greedy" there are no groups."""
    groups = ("n_group", "topk_group")

    def read(table: HubTable, values: Mapping) -> dict:
        method = table.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            wanted = "'greedy' or 'group_limited_greedy'"
            raise EntryError(Problem("topk_method", repr(method), wanted))
        table = {**table, **dict.fromkeys(groups, 1)} if method == "greedy" else table
        return experts.read(table, values)

    def write(config: GPTConfig) -> dict:
        out = experts.write(config)
        grouped = config.moe is not None and config.moe.num_groups > 1
        return {**out, "topk_method": "group_limited_greedy" if grouped else "greedy"}

    return HubEntry((*experts.theirs, "topk_method"), experts.ours, read, write)


def _rotate_by_dims(inner: HubEntry) -> HubEntry:
    """MiniMax's rope, whose ``rotary_dim`` counts the rotated dims of a head."""

    def read(table: HubTable, values: Mapping) -> dict:
        dims, size = get_whole(table, "rotary_dim", None), values.get("head_dim")
        if dims is not None and size:
            table = {"partial_rotary_factor": dims / size, **table}
        return inner.read(table, values)

    def write(config: GPTConfig) -> dict:
        return {**inner.write(config), "rotary_dim": config.rotated_dims}

    return HubEntry((*inner.theirs, "rotary_dim"), inner.ours, read, write)


_SPARSE = ("decoder_sparse_step", "mlp_only_layers")


def _read_sparse(table: HubTable, values: Mapping) -> dict:
    step, dense_ones = table.get(_SPARSE[0], 1), table.get(_SPARSE[1]) or []
    if not is_a(step, int) or step < 1 or not isinstance(dense_ones, list):
        got = f"{step!r} and {dense_ones!r}"
        raise EntryError(Problem(" and ".join(_SPARSE), got, "a whole number and a list"))
    count = values.get("num_layers", 0)
    return _split_dense({i for i in range(count) if i in dense_ones or (i + 1) % step}, count)


_SPARSE_LAYERS = HubEntry(
    _SPARSE,
    _DENSE_FIELDS,
    _read_sparse,
    lambda config: {_SPARSE[0]: 1, _SPARSE[1]: [*config.stacks.get("dense", ())]},
)
"""Qwen's ``decoder_sparse_step`` and ``mlp_only_layers``: which layers are dense."""

_MTP = ("num_nextn_predict_layers", "num_mtp_layers")


def _read_tokens_ahead(table: HubTable, _: Mapping) -> dict:
    name = next((name for name in _MTP if name in table), _MTP[0])
    return {"mtp_depth": get_whole(table, name, 1) or 0}


_TOKENS_AHEAD = HubEntry(
    _MTP, ("mtp_depth",), _read_tokens_ahead, lambda config: {_MTP[0]: config.mtp_depth}
)
"""Multi-token prediction modules, which files may lack although config.json has them."""


_EPS = 1e-6
"""That of the norms of latents, which no entry has."""


def _check_eps(config: GPTConfig) -> Iterator[Problem]:
    if config.latent_norm_eps != _EPS:
        yield Problem("latent_eps", repr(config.latent_norm_eps), f"{_EPS} in this family")


_LATENT_EPS = replace(
    required("latent_eps", check=_check_eps),
    read=lambda _, values: {"latent_eps": 0.0 if values.get("norm_eps") == _EPS else _EPS},
)


def _list_latent_sizes(*others: HubEntry) -> tuple[HubEntry, ...]:
    """The sizes of DeepSeek's latent attention."""
    return (
        derived("qk_nope_head_dim", "head_dim", 128, lambda config: config.head_size),
        same("qk_rope_head_dim", "rope_head_dim", 64),
        same("v_head_dim", "v_head_dim", 128),
        same("kv_lora_rank", "kv_rank", 512),
        *others,
        derived("q_lora_rank", "q_rank", 1536, lambda config: config.q_rank),
    )


_OF_TRAINING = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")

# --- formats

_SEPARATE = _list_expert_rules(_EXPERTS, GATED)
_COPIES = (
    (r"model\.layers\.(\d+)\.embed_tokens\.weight", "embed"),
    (r"model\.layers\.(\d+)\.shared_head\.head\.weight", "unembed"),
)

MIXTRAL = HubFormat(
    "mixtral",
    "MixtralForCausalLM",
    (
        *START,
        *_BLOCK,
        NameRule(f"{LAYER}.block_sparse_moe.gate.weight", _ROUTER[0], (f"{_MOE}/router/w",)),
        *_list_expert_rules(f"{LAYER}.block_sparse_moe.experts", ("w1", "w3", "w2")),
        *END,
    ),
    (
        *llama(vocab_size=32000, embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32,
               num_kv_heads=8, max_seq=131072, norm_eps=1e-5, positions=rope(1e6)),
        window(None),
        experts(
            (("num_local_experts",), "num_experts", 8),
            (("num_experts_per_tok",), "top_k", 2),
            (("intermediate_size",), "expert_dim", 14336),
            renormalise=True,
        ),
    ),
    in_memory=(*START, *_BLOCK, _PLAIN_ROUTER, *_FUSED, *END),
    ignored=_OF_TRAINING,
)  # fmt: skip
QWEN3_MOE = HubFormat(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _list_qwen3_rules(*_list_expert_rules(_EXPERTS, GATED)),
    (
        *llama(vocab_size=151936, embed_dim=2048, mlp_dim=6144, num_layers=24, num_heads=32,
               num_kv_heads=4, max_seq=32768),
        fixed(qk_norm=True),
        window(4096, switched=True),
        ATTENTION_BIAS,
        _SPARSE_LAYERS,
        experts(
            (("num_experts", "num_local_experts"), "num_experts", 128),
            (("num_experts_per_tok",), "top_k", 8),
            (("moe_intermediate_size",), "expert_dim", 768),
            (("norm_topk_prob",), "renormalise", False),
        ),
    ),
    in_memory=_list_qwen3_rules(*_FUSED),
    ignored=_OF_TRAINING,
)  # fmt: skip
DEEPSEEK_V3 = HubFormat(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _list_qwen3_rules(*_BALANCED, *_SEPARATE, block=_LATENT_BLOCK, ahead=True),
    (
        *llama(
            vocab_size=129280, embed_dim=7168, mlp_dim=18432, num_layers=61, num_heads=128,
            num_kv_heads=128, max_seq=4096,
            head_dim=_list_latent_sizes(same("rope_interleave", "rope_interleaved", True)),
        ),
        _LATENT_EPS,
        only("attention_bias", False, why="biases on attention alone, where it is latent"),
        only("topk_method", "noaux_tc", why="other choice of experts in this family"),
        only("scoring_func", "sigmoid", why="other scores in this family"),
        only("moe_layer_freq", 1, why="dense layers among those of experts"),
        _make_dense_layers(3),
        _TOKENS_AHEAD,
        experts(
            (("n_routed_experts",), "num_experts", 256),
            (("num_experts_per_tok",), "top_k", 8),
            (("moe_intermediate_size",), "expert_dim", 2048),
            (("norm_topk_prob",), "renormalise", True),
            (("routed_scaling_factor",), "scale", 2.5),
            (("n_group",), "num_groups", 8),
            (("topk_group",), "top_groups", 4),
            shared=("n_shared_experts", 1),
            score="sigmoid",
            balance_bias=True,
        ),
    ),
    in_memory=_list_qwen3_rules(*_BALANCED, *_FUSED, block=_LATENT_BLOCK, ahead=True),
    copies=_COPIES,
    ignored=(*_OF_TRAINING, "head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha"),
    aliases=("kimi_k2",),
)  # fmt: skip
GPT_OSS = HubFormat(
    "gpt_oss",
    "GptOssForCausalLM",
    GPT_OSS_RULES,
    (
        *llama(
            vocab_size=201088, embed_dim=2880, mlp_dim=2880, num_layers=36, num_heads=64,
            num_kv_heads=8, max_seq=131072, head_dim=64, norm_eps=1e-5, act=None,
            positions=rope(
                150000.0,
                {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            ),
        ),
        only("hidden_act", "silu", why="other activation in this family"),
        only("swiglu_alpha", 1.702, why="other slope of the clamped SwiGLU"),
        only("swiglu_limit", 7.0, why="other limit of the clamped SwiGLU"),
        fixed(activation="clamped_swiglu", sinks=True, bias=True),
        window(128, layered=True),
        only("attention_bias", True, why="models of this family without biases"),
        experts(
            (("num_local_experts",), "num_experts", 128),
            (("num_experts_per_tok",), "top_k", 4),
            (("intermediate_size",), "expert_dim", 2880),
            normalise="after",
            router_bias=True,
            expert_bias=True,
        ),
    ),
    ignored=(
        *_OF_TRAINING,
        *("experts_per_token", "initial_context_length", "rope_ntk_alpha", "rope_ntk_beta"),
    ),
)  # fmt: skip

_TOP_K = (("num_experts_per_tok",), "top_k", 8)
_SCALED_GROUPS: tuple[MixtureSetting, ...] = (
    (("routed_scaling_factor",), "scale", 1.0),
    (("n_group",), "num_groups", 1),
    (("topk_group",), "top_groups", 1),
)
_BALANCED_EXPERTS: tuple[MixtureSetting, ...] = (  # as DeepSeek-V3's
    (("n_routed_experts",), "num_experts", 128),
    _TOP_K,
    (("moe_intermediate_size",), "expert_dim", 1408),
    *_SCALED_GROUPS,
)
QWEN2_MOE = HubFormat(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _list_qwen3_rules(*_SHARED_GATED, *_SEPARATE),
    (
        *llama(vocab_size=151936, embed_dim=2048, mlp_dim=5632, num_layers=24, num_heads=16,
               num_kv_heads=16, max_seq=32768),
        window(4096, switched=True, layered=True),
        biases(("qkv_bias", True), False, False),
        _SPARSE_LAYERS,
        experts(
            (("num_experts",), "num_experts", 60),
            (("num_experts_per_tok",), "top_k", 4),
            (("moe_intermediate_size",), "expert_dim", 1408),
            (("shared_expert_intermediate_size",), "shared_dim", 5632),
            (("norm_topk_prob",), "renormalise", False),
            shared_gate=True,
        ),
    ),
    in_memory=_list_qwen3_rules(*_SHARED_GATED, *_FUSED),
    ignored=_OF_TRAINING,
)  # fmt: skip
OLMOE = HubFormat(
    "olmoe",
    "OlmoeForCausalLM",
    _list_qwen3_rules(*_SEPARATE, block=_ACROSS),
    (
        *llama(vocab_size=50304, embed_dim=2048, mlp_dim=2048, num_layers=16, num_heads=16,
               num_kv_heads=None, max_seq=4096, norm_eps=1e-5),
        only("clip_qkv", None, why="clamps after norms of queries and keys"),
        fixed(qk_norm=True, qk_norm_across=True),
        ATTENTION_BIAS,
        experts(
            (("num_experts",), "num_experts", 64),
            _TOP_K,
            (("intermediate_size",), "expert_dim", 2048),
            (("norm_topk_prob",), "renormalise", False),
        ),
    ),
    in_memory=_list_qwen3_rules(*_FUSED, block=_ACROSS),
    ignored=_OF_TRAINING,
)  # fmt: skip
GLM4_MOE = HubFormat(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _list_qwen3_rules(*_BALANCED, *_SEPARATE, ahead=True),
    (
        *llama(vocab_size=151552, embed_dim=4096, mlp_dim=10944, num_layers=46, num_heads=96,
               num_kv_heads=8, max_seq=131072, norm_eps=1e-5, positions=rope(partial=0.5)),
        same("use_qk_norm", "qk_norm", False),
        biases("attention_bias", False, False),
        _make_dense_layers(1),
        _TOKENS_AHEAD,
        experts(
            *_BALANCED_EXPERTS,
            (("norm_topk_prob",), "renormalise", True),
            shared=("n_shared_experts", 1),
            score="sigmoid",
            balance_bias=True,
        ),
    ),
    in_memory=_list_qwen3_rules(*_BALANCED, *_FUSED, ahead=True),
    copies=_COPIES,
    ignored=_OF_TRAINING,
)  # fmt: skip
DOTS1 = HubFormat(
    "dots1",
    "Dots1ForCausalLM",
    _list_qwen3_rules(*_BALANCED, *_SEPARATE),
    (
        *llama(vocab_size=152064, embed_dim=4608, mlp_dim=10944, num_layers=62, num_heads=32,
               num_kv_heads=32, max_seq=2048),
        window(4096, layered=True, first=62),
        fixed(qk_norm=True),
        ATTENTION_BIAS,
        only("scoring_func", "noaux_tc", "sigmoid", why="other scores in this family"),
        only("topk_method", "noaux_tc", why="other choice of experts in this family"),
        only("moe_layer_freq", 1, why="dense layers among those of experts"),
        _make_dense_layers(0),
        experts(
            *_BALANCED_EXPERTS,
            (("norm_topk_prob",), "renormalise", False),
            shared=("n_shared_experts", 1),
            score="sigmoid",
            balance_bias=True,
        ),
    ),
    in_memory=_list_qwen3_rules(*_BALANCED, *_FUSED),
    ignored=_OF_TRAINING,
)  # fmt: skip
_ERNIE_BIAS = "() expert -> expert"
ERNIE_MOE = HubFormat(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    _list_qwen3_rules(*_list_balance_rules("moe_statics.", _ERNIE_BIAS), *_SHARED, *_SEPARATE),
    (
        *llama(vocab_size=103424, embed_dim=2560, mlp_dim=12288, num_layers=28, num_heads=20,
               num_kv_heads=4, max_seq=131072, norm_eps=1e-5, tied=True, positions=rope(5e5)),
        fixed(rope_pairs="neighbours"),
        _DENSE_INTERVAL,
        only("moe_norm_min", 1e-12, why="other smallest sum of weights"),
        only("use_rmsnorm", True, why="LayerNorm in this family"),
        only("moe_gate", "topk", why="other choice of experts in this family"),
        experts(
            (("moe_num_experts",), "num_experts", 64),
            (("moe_k",), "top_k", 6),
            (("moe_intermediate_size",), "expert_dim", 1536),
            shared=("moe_num_shared_experts", 2),
            least_shared=0,
            renormalise=True,
            balance_bias=True,
        ),
    ),
    in_memory=_list_qwen3_rules(
        *_list_balance_rules("gate.moe_statics.", _ERNIE_BIAS), *_SHARED, *_FUSED
    ),
    ignored=(*_OF_TRAINING, "moe_capacity", "moe_use_aux_free"),
)  # fmt: skip
MINIMAX_M2 = HubFormat(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _list_minimax_rules(
        "block_sparse_moe",
        *_list_expert_rules(f"{LAYER}.block_sparse_moe.experts", ("w1", "w3", "w2")),
    ),
    (
        *llama(vocab_size=200064, embed_dim=3072, mlp_dim=1536, num_layers=62, num_heads=48,
               num_kv_heads=8, max_seq=196608, head_dim=128,
               positions=None),
        _rotate_by_dims(rope(5e6, partial=1.0)),
        fixed(qk_norm=True, qk_norm_across=True),
        only("scoring_func", "sigmoid", why="other scores in this family"),
        only("use_qk_norm", True, why="models of this family without norms of queries"),
        only("use_routing_bias", True, why="models of this family without a routing bias"),
        only("shared_intermediate_size", 0, why="shared experts in this family"),
        experts(
            (("num_local_experts",), "num_experts", 256),
            _TOP_K,
            (("intermediate_size",), "expert_dim", 1536),
            score="sigmoid",
            renormalise=True,
            balance_bias=True,
        ),
    ),
    in_memory=_list_minimax_rules("mlp", *_FUSED),
    ignored=_OF_TRAINING,
)  # fmt: skip
DEEPSEEK_V2 = HubFormat(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _list_qwen3_rules(*_SHARED, *_SEPARATE, block=_LATENT_BLOCK),
    (
        *llama(
            vocab_size=102400, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32,
            num_kv_heads=None, max_seq=2048, head_dim=_list_latent_sizes(),
        ),
        _LATENT_EPS,
        only("scoring_func", "softmax", why="other scores in this family"),
        only("norm_topk_prob", False, None, why="weights whose sum is 1 in this family"),
        _make_dense_layers(0),
        _choose_greedily(
            experts(
                (("n_routed_experts",), "num_experts", 64),
                _TOP_K,
                (("moe_intermediate_size",), "expert_dim", 1407),
                *_SCALED_GROUPS,
                shared=("n_shared_experts", 2),
                group_score="max",
            )
        ),
    ),
    in_memory=_list_qwen3_rules(*_SHARED, *_FUSED, block=_LATENT_BLOCK),
    ignored=DEEPSEEK_V3.ignored,
)  # fmt: skip


def _share_one(inner: HubEntry) -> HubEntry:
    """Hunyuan's experts: a shared one as wide as the others, and ``moe_topk`` perhaps by layer."""
    name = "moe_topk"

    def read(table: HubTable, values: Mapping) -> dict:
        each = table.get(name, 1)
        if isinstance(each, list):
            if len(set(map(str, each))) != 1:
                raise EntryError(Problem(name, str(each), "the same for all layers"))
            table = {**table, name: each[0]}
        moe = inner.read(table, values)["moe"]
        return {"moe": replace(moe, shared_dim=moe.expert_dim)}

    def write(config: GPTConfig) -> dict:
        moe = config.moe
        if moe is not None and moe.shared_dim != moe.expert_dim:
            wanted = f"{moe.expert_dim}, moe.expert_dim, in this family"
            raise EntryError(Problem("moe.shared_dim", str(moe.shared_dim), wanted))
        alone = None if moe is None else replace(moe, shared_dim=0)
        return inner.write(SimpleNamespace(moe=alone))

    return replace(inner, read=read, write=write)


def _list_hunyuan_rules(*layers: NameRule) -> tuple[NameRule, ...]:
    router = NameRule(f"{LAYER}.mlp.gate.wg.weight", _ROUTER[0], (f"{_MOE}/router/w",))
    shared = mlp(f"{_MOE}/shared", *(f"{LAYER}.mlp.shared_mlp.{name}" for name in GATED))
    return (*START, *NORMS, *HUNYUAN_ATTENTION, router, *shared, *layers, *END)


HUNYUAN_MOE = HubFormat(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    _list_hunyuan_rules(*_SEPARATE),
    (
        *llama(vocab_size=290943, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32,
               num_kv_heads=None, max_seq=2048, norm_eps=1e-5, positions=HUNYUAN_ROPE),
        fixed(qk_norm=True, qk_norm_last=True),
        ATTENTION_BIAS,
        _share_one(
            experts(
                (("num_experts",), "num_experts", 1),
                (("moe_topk",), "top_k", 1),
                (("intermediate_size",), "expert_dim", 11008),
                renormalise=True,
            )
        ),
    ),
    in_memory=_list_hunyuan_rules(*_FUSED),
    ignored=_OF_TRAINING,
)  # fmt: skip

_MIXTURES = (
    *(MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS, QWEN2_MOE, OLMOE, GLM4_MOE, DOTS1, ERNIE_MOE),
    *(MINIMAX_M2, DEEPSEEK_V2, HUNYUAN_MOE),
)

DECODERS: Mapping[str, HubFormat] = MappingProxyType(
    {form.model_type: form for form in (*DENSE, *VARIANTS, *_MIXTURES)}
)
"""All decoders, by transformers' ``model_type``."""
