"""Formats of mixtures of experts: Mixtral, Qwen3-MoE, DeepSeek-V3 and GPT-OSS.

| format      | files have                               | transformers 5 has in memory        |
|-------------|------------------------------------------|-------------------------------------|
| Mixtral     | ``block_sparse_moe.experts.E.w1, w2, w3``| ``mlp.experts.gate_up_proj``, ...   |
| Qwen3-MoE   | ``mlp.experts.E.gate_proj``, ...         | ``mlp.experts.gate_up_proj``, ...   |
| DeepSeek-V3 | ``mlp.experts.E.gate_proj``, ...         | ``mlp.experts.gate_up_proj``, ...   |
| GPT-OSS     | ``mlp.experts.gate_up_proj``, which is one tensor of all experts in both    |

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
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
    START,
    llama,
)
from functron.hub.entries import (
    EntryError,
    HubEntry,
    HubTable,
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


def _list_qwen3_rules(*layers: NameRule) -> tuple[NameRule, ...]:
    return (*START, *_rename_stack("dense", (*_BLOCK, *MLP)), *_BLOCK, _PLAIN_ROUTER, *layers, *END)


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


def _list_deepseek_rules(*layers: NameRule) -> tuple[NameRule, ...]:
    sparse = (
        *_LATENT_BLOCK,
        _PLAIN_ROUTER,
        NameRule(
            f"{LAYER}.mlp.gate.e_score_correction_bias", _ROUTER[1], (f"{_MOE}/router/balance",)
        ),
        *layers,
        *mlp(f"{_MOE}/shared", *(f"{LAYER}.mlp.shared_experts.{name}" for name in GATED)),
    )
    dense = _rename_stack("dense", (*_LATENT_BLOCK, *MLP))
    return (*START, *dense, *sparse, *_AHEAD, *_rename_stack("mtp/block", sparse), *END)


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


def experts(*settings: MixtureSetting, shared: str = "", **constants: Any) -> HubEntry:
    """Layers of experts.

    Args:
        shared: the entry of the number of shared experts, as wide as routed ones; empty: none.
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
        if shared:
            count = table.get(shared, 1)
            if not is_a(count, int) or count < 1:
                problems.append(Problem(shared, repr(count), "at least 1 in this family"))
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
        stored = fields | ({"shared_dim"} if shared else set())
        problems = _compare_fields(moe, stored, constants)
        if shared and (not moe.shared_dim or moe.shared_dim % moe.expert_dim):
            wanted = f"a multiple of expert_dim={moe.expert_dim}"
            problems.append(Problem("moe.shared_dim", str(moe.shared_dim), wanted))
        if problems:
            raise EntryError(*problems)
        out = {name: getattr(moe, field) for names, field, _ in settings for name in names}
        return {**out, shared: moe.shared_dim // moe.expert_dim} if shared else out

    fields = {field for _, field, _ in settings}
    names = [name for setting in settings for name in setting[0]]
    return HubEntry((*names, *([shared] if shared else [])), ("moe",), read, write)


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


_DENSE_LAYERS = HubEntry(
    ("first_k_dense_replace",),
    ("dense_layers",),
    lambda table, values: {
        "dense_layers": min(
            get(table, "first_k_dense_replace", 3), values.get("num_layers", 1 << 30)
        )
    },
    lambda config: {"first_k_dense_replace": config.dense_layers},
)
"""The number of leading dense layers (DeepSeek)."""

_SPARSE = ("decoder_sparse_step", "mlp_only_layers")


def _read_sparse(table: HubTable, values: Mapping) -> dict:
    step, dense_ones = table.get(_SPARSE[0], 1), table.get(_SPARSE[1]) or []
    if not is_a(step, int) or step < 1 or not isinstance(dense_ones, list):
        got = f"{step!r} and {dense_ones!r}"
        raise EntryError(Problem(" and ".join(_SPARSE), got, "a whole number and a list"))
    layers = range(values.get("num_layers", 0))
    dense = [layer for layer in layers if layer in dense_ones or (layer + 1) % step]
    if dense != list(range(len(dense))):
        named = ", ".join(map(str, dense[:8])) + (", ..." if len(dense) > 8 else "")
        got = f"{step} and {dense_ones}: dense layers {named}"
        wanted = "the first ones dense, and experts in all after them"
        fix = "this decoder has two stacks of layers: it cannot alternate between them"
        raise EntryError(Problem(" and ".join(_SPARSE), got, wanted, fix))
    return {"dense_layers": len(dense)}


_SPARSE_LAYERS = HubEntry(
    _SPARSE,
    ("dense_layers",),
    _read_sparse,
    lambda config: {_SPARSE[0]: 1, _SPARSE[1]: list(range(config.dense_layers))},
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
_OF_TRAINING = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")

# --- formats

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
    _list_deepseek_rules(*_list_expert_rules(_EXPERTS, GATED)),
    (
        *llama(
            vocab_size=129280, embed_dim=7168, mlp_dim=18432, num_layers=61, num_heads=128,
            num_kv_heads=128, max_seq=4096,
            head_dim=(
                derived("qk_nope_head_dim", "head_dim", 128, lambda config: config.head_size),
                same("qk_rope_head_dim", "rope_head_dim", 64),
                same("v_head_dim", "v_head_dim", 128),
                same("kv_lora_rank", "kv_rank", 512),
                same("rope_interleave", "rope_interleaved", True),
                derived("q_lora_rank", "q_rank", 1536, lambda config: config.q_rank),
            ),
        ),
        _LATENT_EPS,
        only("attention_bias", False, why="biases on attention alone, where it is latent"),
        only("topk_method", "noaux_tc", why="other choice of experts in this family"),
        only("scoring_func", "sigmoid", why="other scores in this family"),
        only("moe_layer_freq", 1, why="dense layers among those of experts"),
        _DENSE_LAYERS,
        _TOKENS_AHEAD,
        experts(
            (("n_routed_experts",), "num_experts", 256),
            (("num_experts_per_tok",), "top_k", 8),
            (("moe_intermediate_size",), "expert_dim", 2048),
            (("norm_topk_prob",), "renormalise", True),
            (("routed_scaling_factor",), "scale", 2.5),
            (("n_group",), "num_groups", 8),
            (("topk_group",), "top_groups", 4),
            shared="n_shared_experts",
            score="sigmoid",
            balance_bias=True,
        ),
    ),
    in_memory=_list_deepseek_rules(*_FUSED),
    copies=(
        (r"model\.layers\.(\d+)\.embed_tokens\.weight", "embed"),
        (r"model\.layers\.(\d+)\.shared_head\.head\.weight", "unembed"),
    ),
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

DECODERS: Mapping[str, HubFormat] = MappingProxyType(
    {form.model_type: form for form in (*DENSE, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS)}
)
"""All decoders, by transformers' ``model_type``."""
