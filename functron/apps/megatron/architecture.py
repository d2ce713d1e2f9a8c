"""The architecture that Megatron-LM's arguments describe.

Arguments of models that functron lacks are refused. Where functron has a similar model, it can be
asked for instead (`Reading.closest`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from functron import nn
from functron.apps.megatron.arguments import Reading
from functron.apps.megatron.launches import is_open
from functron.core.errors import refuse
from functron.data.tokenizer import open_tokenizer
from functron.models.config import TextConfig
from functron.models.family import families
from functron.nn.moe import MoEConfig

FamilyName = Literal["gpt", "bert", "t5", "mamba"]

PROGRAMS: Mapping[str, FamilyName] = MappingProxyType(
    {
        "pretrain_gpt": "gpt",
        "pretrain_bert": "bert",
        "pretrain_t5": "t5",
        "pretrain_mamba": "mamba",
        "pretrain_hybrid": "mamba",
    }
)
"""The family that each of Megatron-LM's programs trains."""


GPT_FIELDS: Mapping[str, str] = MappingProxyType({
    "apply_layernorm_1p": "zero_centered_norm", "fp32_residual_connection": "fp32_residual",
})  # fmt: skip
"""Megatron-LM's arguments, and the fields of ours that have the same values."""
LATENT_FIELDS: Mapping[str, str] = MappingProxyType({
    "q_lora_rank": "q_rank", "kv_lora_rank": "kv_rank", "qk_head_dim": "head_dim",
    "qk_pos_emb_head_dim": "rope_head_dim", "v_head_dim": "v_head_dim",
})  # fmt: skip
MOE_FIELDS: Mapping[str, str] = MappingProxyType({
    "num_experts": "num_experts", "moe_router_topk": "top_k", "moe_ffn_hidden_size": "expert_dim",
    "moe_router_score_function": "score", "moe_router_topk_scaling_factor": "scale",
    "moe_router_enable_expert_bias": "balance_bias", "moe_router_bias_update_rate": "balance_rate",
    "moe_shared_expert_intermediate_size": "shared_dim", "moe_shared_expert_gate": "shared_gate",
    "moe_z_loss_coeff": "z_loss", "moe_input_jitter_eps": "jitter",
})  # fmt: skip
_T5_FIELDS: Mapping[str, str] = MappingProxyType({
    "decoder_num_layers": "decoder_layers", "kv_channels": "head_dim",
    "relative_attention_num_buckets": "num_buckets",
    "relative_attention_max_distance": "max_distance",
})  # fmt: skip
_MAMBA_FIELDS: Mapping[str, str] = MappingProxyType({
    "mamba_head_dim": "head_dim", "mamba_state_dim": "state_dim", "mamba_num_groups": "num_groups",
    "mamba_num_heads": "num_heads", "kv_channels": "attention_head_dim", "add_bias_linear": "bias",
})  # fmt: skip


def find_family(reading: Reading, program: str) -> FamilyName:
    """The family that a launch line trains: by its program, or else by its arguments."""
    name = Path(program).stem
    if name in PROGRAMS:
        return PROGRAMS[name]
    if reading.has("hybrid_layer_pattern") or reading("export_model_type") == "MambaModel":
        return "mamba"
    if reading.has("encoder_num_layers") and reading.has("decoder_num_layers"):
        return "t5"
    return "gpt"


def read_model(reading: Reading, family: FamilyName) -> TextConfig:
    """The model that the arguments describe, in the default dtype.

    Args:
        reading: the arguments, whose fates are noted there.

    Raises:
        ValueError: the sizes are not those of a model, or its family was left out.
    """
    readers: Mapping[str, Callable[[Reading], dict[str, Any]]] = {
        "gpt": _read_gpt, "bert": _read_bert, "t5": _read_t5, "mamba": _read_mamba,
    }  # fmt: skip
    if family not in families():
        wanted = f"a family of this installation: {', '.join(families())}"
        refuse("cannot read this launch line", "model", family, wanted)
    make: Any = families()[family].config
    reading.explain("not needed", "the layers are functron's own", "spec")
    reading.explain("not needed", "the program determines it", "export_model_type")
    return make(**readers[family](reading))


def _take_size(reading: Reading, name: str, setting: str) -> int:
    """A size that has no default."""
    value = reading.take(name, setting)
    if value is None or value < 1:
        fix = f"--with {reading.spell(name).lstrip('-')}=N"
        reading.refuse(name, "a number of at least 1", fix)
        return 1
    return value


def _read_common(reading: Reading, family: FamilyName) -> dict[str, Any]:
    layers = "num_layers" if reading.has("num_layers") else "encoder_num_layers"
    found: dict[str, Any] = {}
    if family != "mamba":
        found["num_layers"] = _take_size(reading, layers, f"{family}.num_layers")
        if reading.has("num_layers") and reading.has("encoder_num_layers"):
            reading.refuse("encoder_num_layers", "one of it and --num-layers", "leave one out")
    found["embed_dim"] = _take_size(reading, "hidden_size", f"{family}.embed_dim")
    heads = "attention_heads" if family == "mamba" else "num_heads"
    found[heads] = _take_size(reading, "num_attention_heads", f"{family}.{heads}")
    found["dropout"] = reading.take("hidden_dropout", f"{family}.dropout")
    if family != "t5":
        found["init_stddev"] = reading.take("init_method_std", f"{family}.init_stddev")
    found["norm_eps"] = reading.take("norm_epsilon", f"{family}.norm_eps")
    found["vocab_size"], found["vocab_multiple"] = read_vocabulary(reading, family)
    hidden = found["embed_dim"]
    width = reading.take("ffn_hidden_size", f"{family}.mlp_dim")
    gated = reading("swiglu") or reading("quick_geglu") or reading("gated_linear_unit")
    if width is None:  # with a gate, two thirds of the width have as many parameters
        width = int(4 * hidden * 2 / 3 / 64) * 64 if reading("swiglu") else 4 * hidden
    found["mlp_dim"] = width
    if family in ("gpt", "mamba"):
        found["gated"] = bool(gated)
        found["tied"] = not reading.take("untie_embeddings_and_output_weights", f"{family}.tied")
    return found


def _read_activation(reading: Reading, setting: str, family: FamilyName) -> str:
    names = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu", "activation_func")
    reading.note(setting, *names, "gated_linear_unit")
    fusion = (
        "bias_activation_fusion" if reading.has("bias_activation_fusion") else "bias_gelu_fusion"
    )
    fused = reading(fusion) and reading("add_bias_linear")
    reading.note(setting, fusion, why="Megatron-LM's fused kernel is GELU by tanh")
    clamp, offset = reading("activation_func_clamp_value"), reading("glu_linear_offset")
    word = reading("activation_func")
    if reading("quick_geglu") or word == "quick_gelu":
        name = "quick_geglu" if reading("quick_geglu") else "activation_func"
        if (clamp, offset) == (7.0, 1.0) and reading("num_experts") and family == "gpt":
            reading.note(setting, "activation_func_clamp_value", "glu_linear_offset")
            return "clamped_swiglu"
        wanted = (
            "silu, gelu or relu2; or, of experts, GPT-OSS's with a clamp of 7 and an offset of 1"
        )
        reading.refuse(name, wanted)
        return "silu"
    if clamp is not None or offset:
        reading.refuse("glu_linear_offset" if offset else "activation_func_clamp_value", "neither")
    if reading("swiglu") or word == "silu":
        return "silu"
    if reading("squared_relu") or word == "relu2":
        return "relu2"
    if reading("openai_gelu") or fused:
        return "gelu_tanh"
    return "gelu"


# --- the vocabulary

_SIZES: Mapping[str, int] = MappingProxyType({
    "GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996,
    "Llama2Tokenizer": 32000, "TikTokenizer": 2**17,
})  # fmt: skip
"""Sizes of the published vocabularies."""


def read_vocabulary(reading: Reading, family: FamilyName) -> tuple[int, int]:
    """The size of the vocabulary, and the number that it is padded to a multiple of."""
    setting = f"{family}.vocab_size"
    padded, written = reading("padded_vocab_size"), reading("vocab_size")
    kind = reading("tokenizer_type")
    kind = kind or ("BertWordPieceLowerCase" if family in ("bert", "t5") else "GPT2BPETokenizer")
    size, source = _count_vocabulary(reading, kind)
    if size is None:
        size, source = (written, "vocab_size") if written else (padded, "padded_vocab_size")
        if size is not None and source == "vocab_size" and kind.startswith("Null"):
            size += 1  # for the end of a document
    if size is None and not is_open(kind):
        size, source = _SIZES.get(kind), "tokenizer_type"
        extra = 2 if size and kind.startswith("BertWordPiece") else 0  # [BOS] and [EOS]
        size = None if size is None else size + extra + (reading("vocab_extra_ids") or 0)
    known = {name: f"of {reading.spell(source)}" for name in ("vocab_size", "padded_vocab_size")}
    for name in ("vocab_size", "padded_vocab_size", "vocab_extra_ids", "vocab_file", "merge_file"):
        reading.explain(
            "not needed", f"the vocabulary is known {known.get(name, '')}".strip(), name
        )
    if size is None or size < 1:
        fix = "--with vocab-size=N, or tokenizer-model=FOLDER on this machine"
        reading.refuse(
            "vocab_size", "the size of the vocabulary, which no file on this machine has", fix
        )
        return 256, 1
    reading.note(setting, source)
    if reading("vocab_extra_ids") and source == "tokenizer_type":
        reading.note(setting, "vocab_extra_ids")
    multiple = reading.take("make_vocab_size_divisible_by", f"{family}.vocab_multiple", "times tp")
    multiple = max(multiple, 1) * max(reading("tensor_model_parallel_size"), 1)
    if padded:
        reading.note(f"{family}.vocab_multiple", "padded_vocab_size")
        reading.explain("not needed", "the padded size is given", "make_vocab_size_divisible_by")
        multiple = padded if size <= padded else multiple
    return size, multiple


def _count_vocabulary(reading: Reading, kind: str) -> tuple[int | None, str]:
    """The vocabulary's size by a tokenizer on this machine, and the argument that names it."""
    for name in ("tokenizer_model", "vocab_file"):
        path = reading(name)
        if not path or is_open(path) or not Path(path).exists():
            continue
        if name == "vocab_file":
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            if kind.startswith("BertWordPiece"):
                return len(text.splitlines()) + 2 + (reading("vocab_extra_ids") or 0), name
            try:
                return len(json.loads(text)), name
            except (ValueError, TypeError):
                reading.refuse(name, "a JSON object of tokens")
                return 256, name
        try:
            return open_tokenizer(path).vocab_size, name
        except ValueError as error:
            reading.refuse(name, f"a tokenizer that functron reads ({error})")
            return 256, name
    return None, ""


# --- GPT


def _read_gpt(reading: Reading) -> dict[str, Any]:
    own = _read_common(reading, "gpt") | reading.take_fields("gpt", GPT_FIELDS)
    norm = "layer" if reading.take("normalization", "gpt.norm") == "LayerNorm" else "rms"
    own |= {"norm": norm, "activation": _read_activation(reading, "gpt.activation", "gpt")}
    own["bias"] = reading.take("add_bias_linear", "gpt.bias")
    own["qkv_bias"] = bool(reading.take("add_qkv_bias", "gpt.qkv_bias")) and not own["bias"]
    own["max_seq"] = _take_size(reading, "max_position_embeddings", "gpt.max_seq")
    own |= _read_positions(reading) | _read_attention(reading, own, norm)
    own |= _read_experts(reading, own)
    why = "ours balances experts there over tokens that have a target, Megatron-LM over all"
    depth = reading.take("mtp_num_layers", "gpt.mtp_depth", why if "moe" in own else "") or 0
    weight = reading.take("mtp_loss_scaling_factor", "gpt.mtp_weight")
    repeated = bool(reading.take("mtp_use_repeated_layer", "gpt.mtp_repeated")) and depth > 1
    why = "ours clips gradients by one norm, newer versions of Megatron-LM by one of modules apart"
    detached = bool(reading.take("mtp_detach_heads", "gpt.mtp_detached", why))
    own |= {"mtp_depth": depth, "mtp_weight": weight} if depth else {}
    own |= {"mtp_repeated": repeated, "mtp_detached": detached} if depth else {}
    if reading.take("apply_residual_connection_post_layernorm", ""):
        reading.refuse("apply_residual_connection_post_layernorm", "norms before sublayers")
    reading.explain(
        "not needed", "norms are before sublayers", "apply_residual_connection_post_layernorm"
    )
    return own


_YARN = (
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
    "original_max_position_embeddings",
)  # fmt: skip


def _read_positions(reading: Reading) -> dict[str, Any]:
    reading.note("gpt.positions", "position_embedding_type", "use_rotary_position_embeddings")
    rotary = reading("use_rotary_position_embeddings")
    kind = "rope" if rotary else reading("position_embedding_type")
    if kind in ("learned_absolute", "none"):
        return {"positions": "learned" if kind == "learned_absolute" else "none"}
    if kind not in ("rope", "mrope"):
        reading.refuse("position_embedding_type", "rope, learned_absolute or none")
        return {}
    own: dict[str, Any] = {"positions": "rope"}
    own["rope_theta"] = float(reading.take("rotary_base", "gpt.rope_theta"))
    own["rope_scaling"] = _read_rope_scaling(reading)
    if reading("multi_latent_attention"):
        reading.explain("not needed", "--qk-pos-emb-head-dim dims are rotated", "rotary_percent")
        reading.explain("same", "latent attention rotates adjacent pairs", "rotary_interleaved")
        return own
    own["rope_fraction"] = reading.take("rotary_percent", "gpt.rope_fraction")
    if reading.take("rotary_interleaved", "gpt.rope_pairs"):
        own["rope_pairs"] = "neighbours"
    if reading("rope_type") not in (None, "rope"):
        reading.refuse("rope_type", "rope", "stretched positions: --use-rope-scaling")
    if kind == "mrope" and reading.take("mrope_section", "gpt.rope_sections"):
        own["rope_sections"] = reading("mrope_section")
    every = reading.take("no_rope_freq", "gpt.nope_every")
    if every is not None:
        own["nope_every"] = _read_every(reading, "no_rope_freq", "layers without rope", skipped=1)
    return own


def _read_rope_scaling(reading: Reading) -> nn.RopeScaling | None:
    latent = reading("multi_latent_attention")
    if latent and reading("rope_type") != "rope":
        reading.note("gpt.rope_scaling", *_YARN, "rope_type", why="YaRN")
        factor = reading("rotary_scaling_factor")
        return None if factor <= 1 else nn.RopeScaling(
            float(factor), original_max_seq=reading("original_max_position_embeddings"),
            kind="yarn", beta_fast=reading("beta_fast"), beta_slow=reading("beta_slow"),
            mscale=reading("mscale"), mscale_all_dim=reading("mscale_all_dim"),
        )  # fmt: skip
    reading.explain("same", "rotary positions are plain", "rope_type")
    if reading.take("use_rope_scaling", "gpt.rope_scaling"):
        factor = reading.take("rope_scaling_factor", "gpt.rope_scaling")
        reading.explain(
            "not supported", "one scaling at a time", "rotary_seq_len_interpolation_factor"
        )
        return nn.RopeScaling(factor=factor)
    factor = reading.take("rotary_seq_len_interpolation_factor", "gpt.rope_scaling")
    return nn.RopeScaling(float(factor), kind="linear") if factor and factor != 1 else None


def _read_attention(reading: Reading, own: Mapping[str, Any], norm: str) -> dict[str, Any]:
    heads, hidden = own["num_heads"], own["embed_dim"]
    found: dict[str, Any] = {}
    if reading.take("qk_l2_norm", ""):
        reading.refuse("qk_l2_norm", "an RMSNorm with scales: --qk-layernorm, or none")
    reading.explain("not needed", "it is off", "qk_l2_norm")
    if reading.take("multi_latent_attention", "gpt.kv_rank"):
        return _read_latent_attention(reading)
    if reading.take("group_query_attention", "gpt.num_kv_heads"):
        found["num_kv_heads"] = reading.take("num_query_groups", "gpt.num_kv_heads")
    size = reading.take("kv_channels", "gpt.head_dim")
    found["head_dim"] = 0 if size is None or size * heads == hidden else size
    found["qk_norm"] = reading.take("qk_layernorm", "gpt.qk_norm")
    if found["qk_norm"] and norm != "rms":
        reading.refuse("qk_layernorm", "--normalization RMSNorm with it")
    found["attention_gate"] = reading.take("attention_output_gate", "gpt.attention_gate")
    found["attention_scale"] = reading.take("softmax_scale", "gpt.attention_scale") or 0.0
    softmax = reading.take("softmax_type", "gpt.sinks")
    found["sinks"] = softmax == "learnable"
    if softmax not in ("vanilla", "learnable"):
        reading.refuse("softmax_type", "vanilla or learnable, whose initial offset is 1")
    return found | _read_windows(reading)


def _read_windows(reading: Reading) -> dict[str, Any]:
    """Our windows include a query's own key, Megatron-LM's count those before it."""
    text = reading.take("window_size", "gpt.window", "ours counts a query's own key")
    if text is None:
        return {}
    match = re.fullmatch(r"[(\[]?\s*(-?\d{1,9})\s*,\s*(-?\d{1,9})\s*[)\]]?", text)
    if match is None or int(match[1]) < 0 or int(match[2]) not in (0, -1):
        reading.refuse("window_size", "keys before a query, and 0 after it, such as 4095,0")
        return {}
    found: dict[str, Any] = {"window": int(match[1]) + 1}
    if reading.take("window_attn_skip_freq", "gpt.global_every") is not None:
        found["global_every"] = _read_every(reading, "window_attn_skip_freq", "global layers", 0)
    return found


def _read_latent_attention(reading: Reading) -> dict[str, Any]:
    found = reading.take_fields("gpt", LATENT_FIELDS)
    others = ("group_query_attention", "num_query_groups", "kv_channels")
    reading.explain("not needed", "heads of latent attention have sizes of their own", *others)
    for name in ("attention_output_gate", "softmax_scale", "window_size", "window_attn_skip_freq"):
        if reading(name):
            reading.refuse(name, "nothing with latent attention")
    reading.explain("same", "the softmax is the plain one", "softmax_type")
    if reading("softmax_type") != "vanilla":
        reading.refuse("softmax_type", "vanilla with latent attention")
    reading.explain("same", "latent attention has norms of latents", "qk_layernorm")
    if not reading("qk_layernorm"):
        reading.refuse("qk_layernorm", "norms of latents", "add it")
    return {ours: value or 0 for ours, value in found.items()}


def _read_every(reading: Reading, name: str, what: str, skipped: int) -> int:
    """N of "every N-th layer is one of `what`", from a number or a pattern of all layers."""
    layers = reading("num_layers") or 0
    values = parse_pattern(str(reading(name)))
    if values is None:
        reading.refuse(name, "a number, or a list such as ([0]*3+[1])*8")
        return 0
    if isinstance(values, int):
        return max(values, 0)
    places = [i + 1 for i, value in enumerate(values) if value == skipped]
    first = places[0] if places else layers + 1
    if list(range(first, layers + 1, first)) != places or len(values) != layers:
        reading.refuse(name, f"{what} at every N-th layer of {layers}, counted from 1")
    return first if places else 0


_MOST_LAYERS = 10_000
_ITEM = re.compile(r"\s*(\[[\d\s,]*\]|\(|\)|\+|\*\s*\d{1,5}|,)")


def parse_pattern(text: str) -> list[int] | int | None:
    """A number, or the list that an expression such as ``([0]*3+[1]*1)*8`` describes.

    None: it is neither. Only lists, sums and repetitions are evaluated.
    """
    text = text.strip().strip("\"'")
    if text.isdigit() and len(text) < 10:
        return int(text)
    stack: list[list[int]] = [[]]
    last: list[list[int]] = [[]]  # the operand that a repetition is of
    at = 0
    while at < len(text):
        match = _ITEM.match(text, at)
        if match is None:
            return None
        word, at = match[1], match.end()
        if word[0] == "[":
            last[-1] = [int(x) for x in re.findall(r"\d{1,9}", word)]
            stack[-1] += last[-1]
        elif word == "(":
            stack.append([])
            last.append([])
        elif word == ")":
            if len(stack) < 2:
                return None
            inner = stack.pop()
            last.pop()
            last[-1] = inner
            stack[-1] += inner
        elif word[0] == "*":
            count = int(word[1:])
            if len(last[-1]) * count > _MOST_LAYERS or not last[-1]:
                return None
            stack[-1][-len(last[-1]) :] = last[-1] * count
            last[-1] = last[-1] * count
    return stack[0] if len(stack) == 1 and stack[0] else None


# --- experts

_BALANCE = MappingProxyType(
    {"aux_loss": "batch", "seq_aux_loss": "sequence", "global_aux_loss": "global"}
)
_BALANCE_NOTES = MappingProxyType(
    {
        "aux_loss": "ours is over the microbatch of all ranks, Megatron-LM's over that of one",
        "global_aux_loss": "ours counts the whole batch first, Megatron-LM's microbatches so far",
    }
)


def _read_experts(reading: Reading, own: Mapping[str, Any]) -> dict[str, Any]:
    if not reading("num_experts"):
        return {}
    found = reading.take_fields("gpt.moe", {**MOE_FIELDS, "moe_latent_size": "latent_dim"})
    fields: dict[str, Any] = {"expert_dim": own["mlp_dim"]}
    fields |= {name: value for name, value in found.items() if value is not None}
    pre = reading.take("moe_router_pre_softmax", "gpt.moe.normalise")
    sigmoid, topk = fields["score"] == "sigmoid", fields["top_k"]
    # a softmax over the chosen experts alone makes weights sum to 1
    fields["normalise"] = "before" if pre or sigmoid else "after"
    fields |= {"renormalise": sigmoid and topk > 1, "scale": fields.get("scale") or 1.0}
    fields |= {"expert_bias": own["bias"], "router_bias": own["bias"]}
    if sigmoid:
        why = "weights of sigmoid scores are divided by their sum"
        reading.explain("not needed", why, "moe_router_pre_softmax")
    dispatch = reading.take("moe_token_dispatcher_type", "gpt.moe.dispatch")
    fields["dispatch"] = "gather" if dispatch == "allgather" else "alltoall"
    dtype = reading.take("moe_router_dtype", "gpt.moe.router_dtype", "float32 at least")
    fields["router_dtype"] = "float64" if dtype == "fp64" else "float32"
    fields |= _read_groups(reading, topk) | _read_balance(reading) | _read_capacity(reading)
    reading.explain("not needed", "memory alone: --remat full", "moe_layer_recompute")
    return {"moe": MoEConfig(**fields), **_read_dense_layers(reading, own)}


def _read_groups(reading: Reading, topk: int) -> dict[str, Any]:
    groups, top = reading("moe_router_num_groups"), reading("moe_router_group_topk")
    if not groups or not top:
        return {}
    reading.note("gpt.moe.num_groups", "moe_router_num_groups")
    reading.note("gpt.moe.top_groups", "moe_router_group_topk")
    # a group is ranked by its best topk / top experts
    score = {1: "max", 2: "top2"}.get(topk // top)
    if score is None:
        wanted = "a half of --moe-router-topk, or all of it: groups rank by one or two experts"
        reading.refuse("moe_router_group_topk", wanted)
        return {}
    softmax = reading("moe_router_score_function") == "softmax"
    if softmax and score == "top2" and not reading("moe_router_pre_softmax"):
        wanted = "--moe-router-pre-softmax with it: else two logits rank a group, and no scores"
        reading.refuse("moe_router_group_topk", wanted)
        return {}
    return {"num_groups": groups, "top_groups": top, "group_score": score}


def _read_balance(reading: Reading) -> dict[str, Any]:
    kinds = reading("moe_router_load_balancing_type")
    kind = kinds[0] if len(kinds) == 1 else ""
    weights = reading("moe_aux_loss_coeff")
    why = _BALANCE_NOTES.get(kind, "")
    reading.take("moe_router_load_balancing_type", "gpt.moe.aux", why)
    if kind == "sinkhorn":
        reading.note("gpt.moe.routing", "moe_router_load_balancing_type")
        return {"routing": "sinkhorn"}
    if kind == "none":
        reading.note("gpt.moe.aux_loss", "moe_router_load_balancing_type")
        return {}
    decay = reading.take("moe_router_quantile_balancing_ema", "gpt.moe.balance_decay")
    if kind == "quantile_balancing":
        why = "ours ranks experts by scores, and takes quantiles of each sequence; Megatron-LM by "
        why += "logits, and those of a rank's microbatch"
        reading.note("gpt.moe.balance_by", "moe_router_load_balancing_type", why=why)
        return {"balance_bias": True, "balance_by": "quantile", "balance_decay": decay}
    if kind not in _BALANCE or len(weights) != 1:
        name = "moe_router_load_balancing_type" if len(kinds) != 1 else "moe_aux_loss_coeff"
        wanted = "one of aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, quantile_balancing and "
        wanted += "none, and one weight"
        reading.refuse(name, wanted, "a router of your own: ModelOptions(router=...)")
        return {}
    reading.note("gpt.moe.aux_loss", "moe_aux_loss_coeff")
    aux = _BALANCE[kind]
    if aux == "global" and weights[0] and reading("moe_router_enable_expert_bias"):
        aux, why = "batch", "of a microbatch, as a bias balances the global batch already"
        reading.note("gpt.moe.aux", "moe_router_load_balancing_type", why=why)
    return {"aux": aux, "aux_loss": weights[0]}


def _read_capacity(reading: Reading) -> dict[str, Any]:
    """The capacity of experts.

    Megatron-LM's is a share of a rank's microbatch: of a sequence, where that has one sample and no
    axis splits sequences. With several samples, ours is a share of the microbatch of all ranks.
    """
    factor = reading("moe_expert_capacity_factor")
    if not factor or factor < 0:
        return {}
    one = (reading("micro_batch_size") or 1) == 1
    why = "of each sequence's tokens: a microbatch has one sequence"
    if not one:
        why = "ours is of the microbatch of all ranks, Megatron-LM's of one rank's"
    elif (reading("context_parallel_size") or 1) > 1 or reading("sequence_parallel"):
        why = "ours is of each sequence's tokens, Megatron-LM's of a rank's part of them"
    reading.note("gpt.moe.capacity_factor", "moe_expert_capacity_factor", why=why)
    policy = reading.take("moe_token_drop_policy", "gpt.moe.drop")
    drop = "probability" if policy == "probs" else "position"
    over = "sequence" if one else "batch"
    return {"capacity_factor": factor, "capacity_over": over, "drop": drop}


def _read_dense_layers(reading: Reading, own: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have no experts: how many leading ones, and the numbers of further ones."""
    layers = own["num_layers"]
    values = parse_pattern(str(reading.take("moe_layer_freq", "gpt.dense_layers")))
    if isinstance(values, int):
        values = [int(i % max(values, 1) == 0) for i in range(layers)]
    if values is None or len(values) != layers or {*values} - {0, 1}:
        reading.refuse("moe_layer_freq", f"0 or 1 for each of {layers} layers", "([0]*3+[1]*58)")
        return {}
    first = values.index(1) if 1 in values else layers
    others = tuple(layer for layer in range(first, layers) if not values[layer])
    return {"dense_layers": first} | ({"dense_at": others} if others else {})


# --- the other families

_PLAIN_LAYERS = (
    "softmax_scale", "window_size", "attention_output_gate", "qk_l2_norm", "rotary_interleaved",
    "use_rope_scaling", "rotary_seq_len_interpolation_factor", "mrope_section", "no_rope_freq",
    "multi_latent_attention", "num_experts", "mtp_num_layers", "fp32_residual_connection",
    "qk_layernorm",
)  # fmt: skip
"""Arguments that only GPTs have a setting for."""


def _refuse_gpt_options(reading: Reading, title: str) -> None:
    for name in _PLAIN_LAYERS:
        if reading(name):
            reading.refuse(name, f"nothing with {title}")
    if reading("softmax_type") != "vanilla":
        reading.refuse("softmax_type", f"vanilla with {title}")


def _expect(reading: Reading, wanted: Mapping[str, tuple[Sequence[Any], str]], title: str) -> None:
    """Note values that describe functron's model of a family, and refuse others.

    Args:
        wanted: by argument, its values for functron's model, and in words what that has.
    """
    for name, (values, what) in wanted.items():
        if reading(name) in values:
            reading.explain("same", f"{title} has {what}", name)
        else:
            reading.refuse_unless_closest(name, f"{what}, as {title} has")


def _read_bert(reading: Reading) -> dict[str, Any]:
    own = _read_common(reading, "bert")
    _refuse_gpt_options(reading, "a BERT")
    own["activation"] = _read_activation(reading, "bert.activation", "bert")
    if own["activation"] == "silu":
        reading.refuse("swiglu", "an activation without a gate in a BERT")
    own["max_seq"] = _take_size(reading, "max_position_embeddings", "bert.max_seq")
    title = "Devlin et al.'s BERT"
    _expect(reading, {
        "apply_residual_connection_post_layernorm": ((True,), "norms after sublayers"),
        "bert_binary_head": ((False,), "no head for pairs of sentences"),
        "normalization": (("LayerNorm",), "LayerNorms"),
        "apply_layernorm_1p": ((False,), "scales around 1"),
        "add_bias_linear": ((True,), "biases"),
        "untie_embeddings_and_output_weights": ((False,), "one matrix of embeddings"),
        "position_embedding_type": (("learned_absolute",), "learned positions"),
        "use_rotary_position_embeddings": ((False,), "learned positions"),
        "group_query_attention": ((False,), "as many key as query heads"),
    }, title)  # fmt: skip
    reading.explain("same", "all linear layers have biases", "add_qkv_bias")
    heads = "heads have hidden-size / num-attention-heads dims"
    reading.explain("same", heads, "kv_channels")
    if reading("kv_channels") not in (None, own["embed_dim"] // own["num_heads"]):
        reading.refuse("kv_channels", heads)
    return own


def _read_t5(reading: Reading) -> dict[str, Any]:
    own = _read_common(reading, "t5") | reading.take_fields("t5", _T5_FIELDS)
    _refuse_gpt_options(reading, "a T5")
    own |= {name: own[name] or 0 for name in ("decoder_layers", "head_dim")}
    own["tied"] = not reading.take("untie_embeddings_and_output_weights", "t5.tied")
    activation = _read_activation(reading, "t5.activation", "t5")
    own |= {"activation": activation, "gated": bool(reading("swiglu"))}
    title = "Raffel et al.'s T5"
    _expect(reading, {
        "normalization": (("RMSNorm",), "RMSNorms"),
        "apply_layernorm_1p": ((False,), "scales around 1"),
        "add_bias_linear": ((False,), "no biases"),
        "add_qkv_bias": ((False,), "no biases"),
        "position_embedding_type": (("relative",), "relative positions"),
        "use_rotary_position_embeddings": ((False,), "relative positions"),
        "group_query_attention": ((False,), "as many key as query heads"),
    }, title)  # fmt: skip
    why = "initial weights have the paper's standard deviations, times --t5.init-factor"
    reading.explain("not supported", why, "init_method_std")
    reading.explain("not needed", "positions are relative", "max_position_embeddings")
    reading.explain(
        "not needed", "norms are before sublayers", "apply_residual_connection_post_layernorm"
    )
    return own


_LAYER_LETTERS = "M*-"  # state spaces, attention and feed-forward layers, in patterns of hybrids


def _read_mamba(reading: Reading) -> dict[str, Any]:
    own = _read_common(reading, "mamba") | reading.take_fields("mamba", _MAMBA_FIELDS)
    _refuse_gpt_options(reading, "a Mamba-2 model")
    layers = reading.take("num_layers", "mamba.pattern")
    names = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
    text = reading.take("hybrid_layer_pattern", "mamba.pattern")
    if text is None and any(reading(name) for name in names):
        fix = "write the pattern out: --with hybrid-override-pattern=M-M*..."
        reading.refuse(names[0], "a pattern: how ratios are laid out differs by version", fix)
    text = "M" * (layers or 1) if text is None else text.replace("|", "")
    if set(text) - set(_LAYER_LETTERS) or not text:
        reading.refuse(
            "hybrid_layer_pattern", f"letters of {' '.join(_LAYER_LETTERS)}", "experts: a GPT"
        )
        text = "M"
    own |= {"pattern": text, "activation": _read_activation(reading, "mamba.activation", "mamba")}
    own["num_heads"] = own["num_heads"] or 2 * own["embed_dim"] // own["head_dim"]
    own["attention_head_dim"] = own["attention_head_dim"] or 0
    if reading.take("group_query_attention", "mamba.attention_kv_heads"):
        groups = reading.take("num_query_groups", "mamba.attention_kv_heads")
        own["attention_kv_heads"] = groups
    _expect(reading, {
        "normalization": (("RMSNorm",), "RMSNorms"),
        "apply_layernorm_1p": ((False,), "scales around 1"),
        "add_qkv_bias": ((False, own["bias"]), "biases on all linear layers or none"),
        "position_embedding_type": (("none",), "no positions"),
        "use_rotary_position_embeddings": ((False,), "no positions"),
    }, "functron's hybrid")  # fmt: skip
    reading.explain("same", "sequences may be of any length", "max_position_embeddings")
    reading.explain(
        "not needed", "norms are before sublayers", "apply_residual_connection_post_layernorm"
    )
    return own
