"""Families with layers of experts: Mixtral, Qwen3-MoE, DeepSeek-V3 and GPT-OSS.

| family      | files have                               | transformers 5 has in memory        |
|-------------|------------------------------------------|-------------------------------------|
| Mixtral     | ``block_sparse_moe.experts.E.w1, w2, w3``| ``mlp.experts.gate_up_proj``, ...   |
| Qwen3-MoE   | ``mlp.experts.E.gate_proj``, ...         | ``mlp.experts.gate_up_proj``, ...   |
| DeepSeek-V3 | ``mlp.experts.E.gate_proj``, ...         | ``mlp.experts.gate_up_proj``, ...   |
| GPT-OSS     | ``mlp.experts.gate_up_proj``, which is one tensor of all experts in both    |

Both are read; the former are written, as transformers writes them. See `functron.hub.experts` for
what transformers computes otherwise.

DeepSeek-V3's modules of multi-token prediction are the layers after the last. They are read where
the files have them (`read_config` looks), and written as such layers, without the copies of the
embedding and unembedding that DeepSeek's own files have there. transformers passes them over as it
reads models, or says that it has not expected them.
"""

from __future__ import annotations

from functron.hub import experts, settings
from functron.hub.family import (
    AROUND,
    ATTENTION,
    DOWN,
    END,
    LAYER,
    MLP,
    NO_BIASES,
    NO_QK_NORM,
    NO_WINDOW,
    PLAIN,
    START,
    UNSCALED,
    UP,
    Family,
    Rule,
    linear,
    llama_like,
    mlp,
    norm,
    within,
)
from functron.hub.rope import rope

_MOE = "blocks/moe"
_GATE, _GATE_UP_DOWN = f"{LAYER}.mlp.gate", ("gate_proj", "up_proj", "down_proj")
_ROUTER = "expert embed -> embed expert"


def _each(name: str, names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """The rules of one expert's gate, up and down projection, a tensor each."""
    kinds = zip(names, ("gate", "up", "down"), (UP, UP, DOWN), strict=True)
    return tuple(
        Rule(f"{name}.{{expert}}.{theirs}.weight", dims[0], (f"{_MOE}/experts/{ours}/w",))
        for theirs, ours, dims in kinds
    )


_FUSED = (
    Rule(
        f"{LAYER}.mlp.experts.gate_up_proj",
        "expert mlp embed -> expert embed mlp",
        (f"{_MOE}/experts/gate/w", f"{_MOE}/experts/up/w"),
        fused=1,
    ),
    Rule(
        f"{LAYER}.mlp.experts.down_proj",
        "expert embed mlp -> expert mlp embed",
        (f"{_MOE}/experts/down/w",),
    ),
)
_SPARSE = f"{LAYER}.block_sparse_moe"
_PLAIN_ROUTER = Rule(f"{_GATE}.weight", _ROUTER, (f"{_MOE}/router/w",))


def _mixtral(*layers: Rule) -> tuple[Rule, ...]:
    return (*START, *ATTENTION, *layers, *END)


def _qwen3(*layers: Rule) -> tuple[Rule, ...]:
    dense = within("dense", (*ATTENTION, *MLP))
    return (*START, *dense, *ATTENTION, _PLAIN_ROUTER, *layers, *END)


_LATENT = (
    *AROUND,
    *linear(
        f"{LAYER}.self_attn.q_a_proj",
        "blocks/attention/q_down",
        "latent embed -> embed latent",
        "latent -> latent",
    ),
    *norm(f"{LAYER}.self_attn.q_a_layernorm", "blocks/attention/q_norm", "latent"),
    Rule(
        f"{LAYER}.self_attn.q_b_proj.weight",
        "(heads head) latent -> latent heads head",
        ("blocks/attention/q_up/w",),
    ),
    Rule(
        f"{LAYER}.self_attn.q_proj.weight",
        "(heads head) embed -> embed heads head",
        ("blocks/attention/q/w",),
    ),
    *linear(
        f"{LAYER}.self_attn.kv_a_proj_with_mqa",
        "blocks/attention/kv_down",
        "latent embed -> embed latent",
        "latent -> latent",
    ),
    *norm(f"{LAYER}.self_attn.kv_a_layernorm", "blocks/attention/kv_norm", "latent"),
    Rule(
        f"{LAYER}.self_attn.kv_b_proj.weight",
        "(heads head) latent -> latent heads head",
        ("blocks/attention/kv_up/w",),
    ),
)
_AHEAD = (
    *norm(f"{LAYER}.enorm", "mtp/embed_norm"),
    *norm(f"{LAYER}.hnorm", "mtp/stream_norm"),
    Rule(f"{LAYER}.eh_proj.weight", "embed both -> both embed", ("mtp/proj/w",)),
    *norm(f"{LAYER}.shared_head.norm", "mtp/norm"),
)


def _deepseek(*layers: Rule) -> tuple[Rule, ...]:
    sparse = (
        *_LATENT,
        _PLAIN_ROUTER,
        Rule(f"{_GATE}.e_score_correction_bias", "expert -> expert", (f"{_MOE}/router/balance",)),
        *layers,
        *mlp(f"{LAYER}.mlp.shared_experts", f"{_MOE}/shared"),
    )
    return (
        *START,
        *within("dense", (*_LATENT, *MLP)),
        *sparse,
        *_AHEAD,
        *within("mtp/block", sparse),
        *END,
    )


_EXPERTS = f"{LAYER}.mlp.experts"

GPT_OSS_RULES = (
    *START,
    *ATTENTION,
    Rule(f"{LAYER}.self_attn.sinks", "heads -> heads", ("blocks/attention/sinks",)),
    *linear(f"{LAYER}.mlp.router", f"{_MOE}/router", _ROUTER, "expert -> expert"),
    Rule(
        f"{_EXPERTS}.gate_up_proj",
        "expert embed mlp -> expert embed mlp",
        (f"{_MOE}/experts/gate/w", f"{_MOE}/experts/up/w"),
        fused=2,
        interleaved=True,
    ),
    Rule(
        f"{_EXPERTS}.gate_up_proj_bias",
        "expert mlp -> expert mlp",
        (f"{_MOE}/experts/gate/b", f"{_MOE}/experts/up/b"),
        fused=1,
        interleaved=True,
    ),
    Rule(
        f"{_EXPERTS}.down_proj",
        "expert mlp embed -> expert mlp embed",
        (f"{_MOE}/experts/down/w",),
    ),
    Rule(f"{_EXPERTS}.down_proj_bias", "expert embed -> expert embed", (f"{_MOE}/experts/down/b",)),
    *END,
)
"""Llama's, sinks, and tensors of all experts in which gates and ups take turns."""

_TRAINING = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
_NO_SINKS = settings.absent("sinks")
_ALL_SPARSE = settings.absent("dense_layers", "mtp_depth")

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _mixtral(
        Rule(f"{_SPARSE}.gate.weight", _ROUTER, (f"{_MOE}/router/w",)),
        *_each(f"{_SPARSE}.experts", ("w1", "w3", "w2")),
    ),
    (
        *llama_like(
            vocab_size=32000,
            embed_dim=4096,
            mlp_dim=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            max_seq=131072,
            norm_eps=1e-5,
            rope_aspect=rope(1e6),
        ),
        *PLAIN,
        NO_QK_NORM,
        _NO_SINKS,
        _ALL_SPARSE,
        settings.window(None),
        *NO_BIASES,
        experts.experts(
            (("num_local_experts",), "num_experts", 8),
            (("num_experts_per_tok",), "top_k", 2),
            (("intermediate_size",), "expert_dim", 14336),
            renormalise=True,
        ),
    ),
    in_memory=_mixtral(_PLAIN_ROUTER, *_FUSED),
    ignored=_TRAINING,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _qwen3(*_each(f"{LAYER}.mlp.experts", _GATE_UP_DOWN)),
    (
        *llama_like(
            vocab_size=151936,
            embed_dim=2048,
            mlp_dim=6144,
            num_layers=24,
            num_heads=32,
            num_kv_heads=4,
            max_seq=32768,
        ),
        *PLAIN,
        settings.fixed("qk_norm", True),
        _NO_SINKS,
        settings.absent("mtp_depth"),
        settings.window(4096, switched=True),
        settings.only("attention_bias", False, why="biases on attention alone"),
        *NO_BIASES,
        experts.sparse_layers(),
        experts.experts(
            (("num_experts", "num_local_experts"), "num_experts", 128),
            (("num_experts_per_tok",), "top_k", 8),
            (("moe_intermediate_size",), "expert_dim", 768),
            (("norm_topk_prob",), "renormalise", False),
        ),
    ),
    in_memory=_qwen3(*_FUSED),
    ignored=_TRAINING,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _deepseek(*_each(f"{LAYER}.mlp.experts", _GATE_UP_DOWN)),
    (
        *llama_like(
            vocab_size=129280,
            embed_dim=7168,
            mlp_dim=18432,
            num_layers=61,
            num_heads=128,
            num_kv_heads=128,
            max_seq=4096,
            head_aspects=(
                settings.derived("qk_nope_head_dim", "head_dim", 128, "head_size"),
                settings.same("qk_rope_head_dim", "rope_head_dim", 64),
                settings.same("v_head_dim", "v_head_dim", 128),
                settings.same("kv_lora_rank", "kv_rank", 512),
                settings.same("rope_interleave", "rope_interleaved", True),
                settings.derived("q_lora_rank", "q_rank", 1536, "q_rank"),
            ),
        ),
        *PLAIN,
        experts.exactly("norm_eps", 1e-6, "that of the norms of latents, which no entry says"),
        NO_QK_NORM,
        _NO_SINKS,
        NO_WINDOW,
        settings.only("attention_bias", False, why="biases on attention alone"),
        *NO_BIASES,
        settings.only("topk_method", "noaux_tc", why="other choice of experts in this family"),
        settings.only("scoring_func", "sigmoid", why="other scores in this family"),
        settings.only("moe_layer_freq", 1, why="dense layers among those of experts"),
        experts.dense_layers("first_k_dense_replace", 3),
        experts.tokens_ahead(),
        experts.experts(
            (("n_routed_experts",), "num_experts", 256),
            (("num_experts_per_tok",), "top_k", 8),
            (("moe_intermediate_size",), "expert_dim", 2048),
            (("norm_topk_prob",), "renormalise", True),
            (("routed_scaling_factor",), "scale", 2.5),
            (("n_group",), "num_groups", 8),
            (("topk_group",), "top_groups", 4),
            shared=("n_shared_experts",),
            score="sigmoid",
            balance_bias=True,
        ),
    ),
    in_memory=_deepseek(*_FUSED),
    copies=(
        (r"model\.layers\.(\d+)\.embed_tokens\.weight", "embed"),
        (r"model\.layers\.(\d+)\.shared_head\.head\.weight", "unembed"),
    ),
    ignored=(*_TRAINING, "head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha"),
)
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    GPT_OSS_RULES,
    (
        *llama_like(
            vocab_size=201088,
            embed_dim=2880,
            mlp_dim=2880,
            num_layers=36,
            num_heads=64,
            num_kv_heads=8,
            max_seq=131072,
            head_dim=64,
            norm_eps=1e-5,
            rope_aspect=rope(
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
        *UNSCALED,
        settings.only("hidden_act", "silu", why="other activation in this family"),
        settings.only("swiglu_alpha", 1.702, why="other slope of the clamped SwiGLU"),
        settings.only("swiglu_limit", 7.0, why="other limit of the clamped SwiGLU"),
        settings.fixed("activation", "clamped_swiglu"),
        NO_QK_NORM,
        settings.fixed("sinks", True),
        _ALL_SPARSE,
        settings.window(128, layered=True),
        settings.only("attention_bias", True, why="models of this family without biases"),
        settings.fixed("bias", True),
        settings.fixed("qkv_bias", False),
        experts.experts(
            (("num_local_experts",), "num_experts", 128),
            (("num_experts_per_tok",), "top_k", 4),
            (("intermediate_size",), "expert_dim", 2880),
            normalise="after",
            router_bias=True,
            expert_bias=True,
        ),
    ),
    ignored=(
        *_TRAINING,
        *("experts_per_token", "initial_context_length", "rope_ntk_alpha", "rope_ntk_beta"),
    ),
)

MIXTURES = (MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS)
