"""The architecture that Megatron-LM's arguments describe.

Where Megatron-LM has a model that functron has not, the arguments that say so are refused, unless
the nearest one is asked for; those for which there is no nearest are refused in any case.
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
from functron.models.config import GPTConfig, TextConfig
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
"""Programs of Megatron-LM, and what they train."""


def find_family(reading: Reading, program: str) -> FamilyName:
    """The family that a line trains: by its program, or else by its arguments."""
    name = Path(program).stem
    if name in PROGRAMS:
        return PROGRAMS[name]
    if reading.has("hybrid_layer_pattern") or reading("export_model_type") == "MambaModel":
        return "mamba"
    if reading.has("encoder_num_layers") and reading.has("decoder_num_layers"):
        return "t5"
    return "gpt"


def read_model(reading: Reading, family: FamilyName) -> TextConfig:
    """The model that the arguments describe; its dtype is that of the default.

    Args:
        reading: the line; what becomes of its arguments is noted there.
        family: what it trains.

    Raises:
        ValueError: the sizes describe no model, or its family was left out of this installation.
    """
    makers: Mapping[str, Callable[[Reading], TextConfig]] = {
        "gpt": _gpt, "bert": _bert, "t5": _t5, "mamba": _mamba,
    }  # fmt: skip
    if family not in families():
        wanted = f"a family of this installation: {', '.join(families())}"
        refuse("cannot read this launch line", "model", family, wanted)
    reading.explain("not needed", "the layers are functron's own", "spec")
    reading.explain("not needed", "the program says it", "export_model_type")
    for name in ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"):
        reading.ignore(name)
    return makers[family](reading)


def _size(reading: Reading, name: str, setting: str, *, least: int = 1) -> int:
    """A size that a line has to give."""
    value = reading.take(name, setting)
    if value is None or value < least:
        reading.refuse(
            name, f"a number of at least {least}", f"--with {reading.spell(name).lstrip('-')}=N"
        )
        return max(least, 1)
    return value


def _common(reading: Reading, family: FamilyName) -> dict[str, Any]:
    """The fields that the configs of all families have."""
    layers = "num_layers" if reading.has("num_layers") else "encoder_num_layers"
    found: dict[str, Any] = {}
    if family != "mamba":
        found["num_layers"] = _size(reading, layers, f"{family}.num_layers")
        if reading.has("num_layers") and reading.has("encoder_num_layers"):
            reading.refuse("encoder_num_layers", "one of it and --num-layers", "leave one out")
    found["embed_dim"] = _size(reading, "hidden_size", f"{family}.embed_dim")
    heads = "attention_heads" if family == "mamba" else "num_heads"
    found[heads] = _size(reading, "num_attention_heads", f"{family}.{heads}")
    found["dropout"] = reading.take("hidden_dropout", f"{family}.dropout")
    if family != "t5":
        found["init_stddev"] = reading.take("init_method_std", f"{family}.init_stddev")
    found["norm_eps"] = reading.take("norm_epsilon", f"{family}.norm_eps")
    found["vocab_size"], found["vocab_multiple"] = read_vocabulary(reading, family)
    hidden = found["embed_dim"]
    width = reading.take("ffn_hidden_size", f"{family}.mlp_dim")
    gated = reading("swiglu") or reading("quick_geglu") or reading("gated_linear_unit")
    if width is None:  # a gate is a third matrix, and two thirds of the width as many numbers
        width = int(4 * hidden * 2 / 3 / 64) * 64 if reading("swiglu") else 4 * hidden
    found["mlp_dim"] = width
    if family in ("gpt", "mamba"):
        found["gated"] = bool(gated)
        found["tied"] = not reading.take("untie_embeddings_and_output_weights", f"{family}.tied")
    return found


def _activation(reading: Reading, setting: str, family: FamilyName) -> str:
    """The activation of feed-forward layers."""
    names = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu", "activation_func")
    reading.note(setting, *names, "gated_linear_unit")
    fusion = (
        "bias_activation_fusion" if reading.has("bias_activation_fusion") else "bias_gelu_fusion"
    )
    fused = reading(fusion) and reading("add_bias_linear")
    reading.ignore("bias_activation_fusion", "bias_gelu_fusion")
    reading.note(setting, fusion, why="Megatron-LM's fused kernel is GELU by tanh")
    clamp, offset = reading("activation_func_clamp_value"), reading("glu_linear_offset")
    reading.ignore("activation_func_clamp_value", "glu_linear_offset")
    word = reading("activation_func")
    if reading("quick_geglu") or word == "quick_gelu":
        name = "quick_geglu" if reading("quick_geglu") else "activation_func"
        if (clamp, offset) == (7.0, 1.0) and reading("num_experts") and family == "gpt":
            reading.note(setting, "activation_func_clamp_value", "glu_linear_offset")
            return "clamped_swiglu"
        wanted = "silu, gelu or relu2; or of experts GPT-OSS's: clamped at 7, with an offset of 1"
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
"""Of tokenizers whose published files have one size."""


def read_vocabulary(reading: Reading, family: FamilyName) -> tuple[int, int]:
    """Ids of tokens, and the number that the rows of the embedding are a multiple of."""
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
        fix = "--with vocab-size=N, or tokenizer-model=FOLDER, one that is here"
        reading.refuse(
            "vocab_size", "the number of the tokenizer's ids, which no file here tells", fix
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
    """The ids of a tokenizer whose files are here, and the argument that names them."""
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


def _gpt(reading: Reading) -> GPTConfig:
    own = _common(reading, "gpt")
    norm = "layer" if reading.take("normalization", "gpt.norm") == "LayerNorm" else "rms"
    own |= {"norm": norm, "activation": _activation(reading, "gpt.activation", "gpt")}
    own["zero_centered_norm"] = reading.take("apply_layernorm_1p", "gpt.zero_centered_norm")
    own["bias"] = reading.take("add_bias_linear", "gpt.bias")
    own["qkv_bias"] = bool(reading.take("add_qkv_bias", "gpt.qkv_bias")) and not own["bias"]
    own["max_seq"] = _size(reading, "max_position_embeddings", "gpt.max_seq")
    own["fp32_residual"] = reading.take("fp32_residual_connection", "gpt.fp32_residual")
    own |= _positions(reading) | _attention(reading, own, norm)
    own |= _experts(reading, own)
    why = "ours balances experts there over tokens that have a target, Megatron-LM over all"
    depth = reading.take("mtp_num_layers", "gpt.mtp_depth", why if "moe" in own else "") or 0
    weight = reading.take("mtp_loss_scaling_factor", "gpt.mtp_weight")
    own |= {"mtp_depth": depth, "mtp_weight": weight} if depth else {}
    if reading.take("apply_residual_connection_post_layernorm", ""):
        reading.refuse("apply_residual_connection_post_layernorm", "norms before sublayers")
    reading.explain(
        "not needed", "norms are before sublayers", "apply_residual_connection_post_layernorm"
    )
    for name in ("decoder_num_layers", "decoder_seq_length", "bert_binary_head"):
        reading.ignore(name)
    reading.ignore("relative_attention_num_buckets", "relative_attention_max_distance")
    reading.ignore("hybrid_layer_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio")
    return GPTConfig(**own)


_YARN = (
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
    "original_max_position_embeddings",
)  # fmt: skip


def _positions(reading: Reading) -> dict[str, Any]:
    """Fields of positions."""
    kind = _kind_of_positions(reading)
    names = ("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling")
    reading.ignore(*names, "rope_scaling_factor", "rotary_seq_len_interpolation_factor")
    reading.ignore("no_rope_freq", "mrope_section", "rope_type", *_YARN)
    if kind in ("learned_absolute", "none"):
        return {"positions": "learned" if kind == "learned_absolute" else "none"}
    if kind not in ("rope", "mrope"):
        reading.refuse("position_embedding_type", "rope, learned_absolute or none")
        return {}
    own: dict[str, Any] = {"positions": "rope"}
    own["rope_theta"] = float(reading.take("rotary_base", "gpt.rope_theta"))
    own["rope_scaling"] = _scaling(reading)
    if reading("multi_latent_attention"):
        reading.explain("not needed", "rotated dims are --qk-pos-emb-head-dim", "rotary_percent")
        reading.explain("same", "latent attention rotates neighbours", "rotary_interleaved")
        return own
    own["rope_fraction"] = reading.take("rotary_percent", "gpt.rope_fraction")
    if reading.take("rotary_interleaved", "gpt.rope_pairs"):
        own["rope_pairs"] = "neighbours"
    reading.explain("same", "rotary positions are the plain ones", "rope_type")
    if reading("rope_type") not in (None, "rope"):
        reading.refuse("rope_type", "rope", "stretched positions: --use-rope-scaling")
    if kind == "mrope" and reading.take("mrope_section", "gpt.rope_sections"):
        own["rope_sections"] = reading("mrope_section")
    every = reading.take("no_rope_freq", "gpt.nope_every")
    if every is not None:
        own["nope_every"] = _every(reading, "no_rope_freq", "layers without rope", skipped=1)
    return own


def _kind_of_positions(reading: Reading) -> str:
    reading.note("gpt.positions", "position_embedding_type", "use_rotary_position_embeddings")
    rotary = reading("use_rotary_position_embeddings")
    return "rope" if rotary else reading("position_embedding_type")


def _scaling(reading: Reading) -> nn.RopeScaling | None:
    """How rotary wavelengths are stretched."""
    latent = reading("multi_latent_attention")
    if latent and reading("rope_type") != "rope":
        reading.note("gpt.rope_scaling", *_YARN, "rope_type", why="YaRN")
        factor = reading("rotary_scaling_factor")
        return None if factor <= 1 else nn.RopeScaling(
            float(factor), original_max_seq=reading("original_max_position_embeddings"),
            kind="yarn", beta_fast=reading("beta_fast"), beta_slow=reading("beta_slow"),
            mscale=reading("mscale"), mscale_all_dim=reading("mscale_all_dim"),
        )  # fmt: skip
    reading.explain("same", "rotary positions are the plain ones", "rope_type")
    if reading.take("use_rope_scaling", "gpt.rope_scaling"):
        factor = reading.take("rope_scaling_factor", "gpt.rope_scaling")
        reading.explain(
            "not supported", "one stretching at a time", "rotary_seq_len_interpolation_factor"
        )
        return nn.RopeScaling(factor=factor)
    factor = reading.take("rotary_seq_len_interpolation_factor", "gpt.rope_scaling")
    return nn.RopeScaling(float(factor), kind="linear") if factor and factor != 1 else None


def _attention(reading: Reading, own: Mapping[str, Any], norm: str) -> dict[str, Any]:
    """Fields of attention."""
    heads, hidden = own["num_heads"], own["embed_dim"]
    found: dict[str, Any] = {}
    if reading.take("qk_l2_norm", ""):
        reading.refuse("qk_l2_norm", "an RMSNorm with scales: --qk-layernorm, or none")
    reading.explain("not needed", "it is off", "qk_l2_norm")
    latent = _latent(reading)
    if latent:
        return latent
    if reading.take("group_query_attention", "gpt.num_kv_heads"):
        found["num_kv_heads"] = reading.take("num_query_groups", "gpt.num_kv_heads")
    else:
        reading.ignore("num_query_groups")
    size = reading.take("kv_channels", "gpt.head_dim")
    found["head_dim"] = 0 if size is None or size * heads == hidden else size
    found["qk_norm"] = reading.take("qk_layernorm", "gpt.qk_norm")
    if found["qk_norm"] and norm != "rms":
        reading.refuse("qk_layernorm", "--normalization RMSNorm with it: that norm is an RMSNorm")
    found["attention_gate"] = reading.take("attention_output_gate", "gpt.attention_gate")
    found["attention_scale"] = reading.take("softmax_scale", "gpt.attention_scale") or 0.0
    softmax = reading.take("softmax_type", "gpt.sinks")
    found["sinks"] = softmax == "learnable"
    if softmax not in ("vanilla", "learnable"):
        reading.refuse("softmax_type", "vanilla or learnable: an offset of 1 is learnable's first")
    return found | _windows(reading)


def _windows(reading: Reading) -> dict[str, Any]:
    """Fields of windows: ours count a query's own key, Megatron-LM's those before it."""
    text = reading.take("window_size", "gpt.window", "ours counts a query's own key")
    if text is None:
        reading.ignore("window_attn_skip_freq")
        return {}
    match = re.fullmatch(r"[(\[]?\s*(-?\d{1,9})\s*,\s*(-?\d{1,9})\s*[)\]]?", text)
    if match is None or int(match[1]) < 0 or int(match[2]) not in (0, -1):
        reading.refuse("window_size", "keys before a query, and 0 after it, such as 4095,0")
        return {}
    found: dict[str, Any] = {"window": int(match[1]) + 1}
    if reading.take("window_attn_skip_freq", "gpt.global_every") is not None:
        found["global_every"] = _every(reading, "window_attn_skip_freq", "layers of all keys", 0)
    return found


def _latent(reading: Reading) -> dict[str, Any]:
    """Fields of latent attention; none where there is none."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    if not reading.take("multi_latent_attention", "gpt.kv_rank"):
        reading.ignore(*names)
        return {}
    settings = ("gpt.q_rank", "gpt.kv_rank", "gpt.head_dim", "gpt.rope_head_dim", "gpt.v_head_dim")
    values = [reading.take(*pair) for pair in zip(names, settings, strict=True)]
    others = ("group_query_attention", "num_query_groups", "kv_channels")
    reading.explain("not needed", "heads of latent attention have sizes of their own", *others)
    for name in ("attention_output_gate", "softmax_scale", "window_size", "window_attn_skip_freq"):
        reading.ignore(name)
        if reading(name):
            reading.refuse(name, "nothing with latent attention")
    reading.explain("same", "scores go into a softmax", "softmax_type")
    if reading("softmax_type") != "vanilla":
        reading.refuse("softmax_type", "vanilla with latent attention")
    reading.explain(
        "same", "latent attention norms what it makes queries and keys of", "qk_layernorm"
    )
    if not reading("qk_layernorm"):
        reading.refuse("qk_layernorm", "norms of what queries and keys are made of", "add it")
    fields = (setting.removeprefix("gpt.") for setting in settings)
    return dict(zip(fields, (value or 0 for value in values), strict=True))


def _every(reading: Reading, name: str, what: str, skipped: int) -> int:
    """N of "every N-th layer is one of `what`": of the number, or of a pattern of all layers."""
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
    """A number, or the list that an expression such as ``([0]*3+[1]*1)*8`` stands for.

    None: it is neither. Nothing is evaluated but lists, sums and repetitions.
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

_BALANCE = MappingProxyType({"aux_loss": "batch", "seq_aux_loss": "sequence"})
_BALANCE_NOTES = MappingProxyType(
    {
        "aux_loss": "ours is over the microbatch of all ranks, Megatron-LM's over that of one",
        "global_aux_loss": "ours is over a microbatch of all ranks, Megatron-LM's over the batch",
    }
)
_MOE_NAMES = (
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "moe_latent_size", "moe_router_load_balancing_type",
    "moe_router_dtype", "moe_router_score_function", "moe_router_topk", "moe_router_pre_softmax",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor",
    "moe_token_drop_policy", "moe_token_dispatcher_type", "moe_layer_recompute",
)  # fmt: skip


def _experts(reading: Reading, own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of experts; none where there are none."""
    count = reading.take("num_experts", "gpt.moe.num_experts")
    if not count:
        reading.ignore(*_MOE_NAMES)
        return {}

    def take(name: str, setting: str, why: str = "") -> Any:
        return reading.take(name, f"gpt.moe.{setting}", why)

    width = take("moe_ffn_hidden_size", "expert_dim")
    pre = take("moe_router_pre_softmax", "normalise")
    score, topk = take("moe_router_score_function", "score"), take("moe_router_topk", "top_k")
    sigmoid = score == "sigmoid"
    bias = own["bias"]
    fields: dict[str, Any] = {
        "num_experts": count,
        "top_k": topk,
        "expert_dim": own["mlp_dim"] if width is None else width,
        "score": score,
        # a softmax before the choice leaves weights as they are; one after it makes them sum to 1
        "normalise": "before" if pre or sigmoid else "after",
        "renormalise": sigmoid and topk > 1,
        "scale": take("moe_router_topk_scaling_factor", "scale") or 1.0,
        "balance_bias": take("moe_router_enable_expert_bias", "balance_bias"),
        "balance_rate": take("moe_router_bias_update_rate", "balance_rate"),
        "shared_dim": take("moe_shared_expert_intermediate_size", "shared_dim") or 0,
        "shared_gate": take("moe_shared_expert_gate", "shared_gate"),
        "latent_dim": take("moe_latent_size", "latent_dim") or 0,
        "expert_bias": bias,
        "router_bias": bias,
        "z_loss": take("moe_z_loss_coeff", "z_loss") or 0.0,
        "jitter": take("moe_input_jitter_eps", "jitter") or 0.0,
    }
    if sigmoid:
        reading.explain("not needed", "weights of sigmoid scores are divided by their sum",
                    "moe_router_pre_softmax")  # fmt: skip
    dispatch = take("moe_token_dispatcher_type", "dispatch")
    fields["dispatch"] = "gather" if dispatch == "allgather" else "alltoall"
    dtype = take("moe_router_dtype", "router_dtype", "float32 at least")
    fields["router_dtype"] = "float64" if dtype == "fp64" else "float32"
    fields |= _groups(reading, topk) | _balance(reading) | _capacity(reading)
    reading.explain("not needed", "memory alone: --remat full", "moe_layer_recompute")
    return {"moe": MoEConfig(**fields), "dense_layers": _dense_layers(reading, own)}


def _groups(reading: Reading, topk: int) -> dict[str, Any]:
    groups = reading.take("moe_router_num_groups", "gpt.moe.num_groups")
    top = reading.take("moe_router_group_topk", "gpt.moe.top_groups")
    if not groups or not top:
        reading.ignore("moe_router_num_groups", "moe_router_group_topk")
        return {}
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


def _balance(reading: Reading) -> dict[str, Any]:
    """Fields of what balances experts."""
    kinds = reading("moe_router_load_balancing_type")
    kind = kinds[0] if len(kinds) == 1 else ""
    weights = reading.take("moe_aux_loss_coeff", "gpt.moe.aux_loss")
    why = _BALANCE_NOTES.get(kind, "")
    reading.take("moe_router_load_balancing_type", "gpt.moe.aux", why)
    if kind == "sinkhorn":
        reading.note("gpt.moe.routing", "moe_router_load_balancing_type")
        reading.ignore("moe_aux_loss_coeff")
        return {"routing": "sinkhorn"}
    if kind == "none":
        reading.note("gpt.moe.aux_loss", "moe_router_load_balancing_type")
        reading.ignore("moe_aux_loss_coeff")
        return {}
    if kind not in (*_BALANCE, "global_aux_loss") or len(weights) != 1:
        name = "moe_router_load_balancing_type" if len(kinds) != 1 else "moe_aux_loss_coeff"
        wanted = "one of aux_loss, seq_aux_loss, global_aux_loss, sinkhorn and none, and one weight"
        reading.refuse(name, wanted, "a router of your own: ModelOptions(router=...)")
        return {}
    return {"aux": _BALANCE.get(kind, "batch"), "aux_loss": weights[0]}


def _capacity(reading: Reading) -> dict[str, Any]:
    """Fields of how many tokens an expert takes.

    Megatron-LM's are those of a rank's microbatch, which are those of a sequence where it has one
    sample and no axis splits sequences. Of several samples, ours compete over all ranks.
    """
    one = (reading("micro_batch_size") or 1) == 1
    why = "of each sequence's tokens, which a rank's microbatch has there"
    if not one:
        why = "ours is of the microbatch of all ranks, Megatron-LM's of that of one"
    elif (reading("context_parallel_size") or 1) > 1 or reading("sequence_parallel"):
        why = "ours is of each sequence's tokens, Megatron-LM's of a rank's part of them"
    factor = reading.take("moe_expert_capacity_factor", "gpt.moe.capacity_factor", why)
    policy = reading.take("moe_token_drop_policy", "gpt.moe.drop")
    if not factor or factor < 0:
        reading.ignore("moe_token_drop_policy", "moe_expert_capacity_factor")
        return {}
    drop = "probability" if policy == "probs" else "position"
    over = "sequence" if one else "batch"
    return {"capacity_factor": factor, "capacity_over": over, "drop": drop}


def _dense_layers(reading: Reading, own: Mapping[str, Any]) -> int:
    """How many of the first layers have no experts."""
    layers = own["num_layers"]
    values = parse_pattern(str(reading.take("moe_layer_freq", "gpt.dense_layers")))
    if isinstance(values, int):
        values = [int(i % max(values, 1) == 0) for i in range(layers)]
    first = 0 if values is None else values.index(1) if 1 in values else len(values)
    if values is None or len(values) != layers or any(value != 1 for value in values[first:]):
        wanted = f"{layers} layers of which the first ones alone have no experts"
        reading.refuse("moe_layer_freq", wanted, "such as ([0]*3+[1]*58)")
        return 0
    return first


# --- the other families

_PLAIN_LAYERS = (
    "softmax_scale", "window_size", "attention_output_gate", "qk_l2_norm", "rotary_interleaved",
    "use_rope_scaling", "rotary_seq_len_interpolation_factor", "mrope_section", "no_rope_freq",
    "multi_latent_attention", "num_experts", "mtp_num_layers", "fp32_residual_connection",
    "qk_layernorm",
)  # fmt: skip
_OF_GPT = (
    *_MOE_NAMES, "rope_type", "rope_scaling_factor", "window_attn_skip_freq", "rotary_base",
    "rotary_percent", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim", "mtp_loss_scaling_factor", *_YARN,
)  # fmt: skip


def _plain(reading: Reading, title: str) -> None:
    """Refuse what only GPTs have a place for."""
    reading.ignore(*_OF_GPT, *_PLAIN_LAYERS, "softmax_type")
    for name in _PLAIN_LAYERS:
        if reading(name):
            reading.refuse(name, f"nothing with {title}")
    if reading("softmax_type") != "vanilla":
        reading.refuse("softmax_type", f"vanilla with {title}")


def _expect(reading: Reading, wanted: Mapping[str, tuple[Sequence[Any], str]], title: str) -> None:
    """Note or refuse values of a model other than functron's own of this kind.

    Args:
        reading: the line.
        wanted: by argument, the values that describe functron's model, and what it has.
        title: that model.
    """
    for name, (values, what) in wanted.items():
        if reading(name) in values:
            reading.explain("same", f"{title} has {what}", name)
        else:
            reading.refuse_unless_closest(name, f"{what}, as {title} has")


def _bert(reading: Reading) -> TextConfig:
    own = _common(reading, "bert")
    _plain(reading, "a BERT")
    own["activation"] = _activation(reading, "bert.activation", "bert")
    if own["activation"] == "silu":
        reading.refuse("swiglu", "an activation without a gate in a BERT")
    own["max_seq"] = _size(reading, "max_position_embeddings", "bert.max_seq")
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
    reading.ignore("num_query_groups", "decoder_num_layers", "decoder_seq_length")
    reading.ignore("relative_attention_num_buckets", "relative_attention_max_distance")
    reading.ignore("hybrid_layer_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio")
    return families()["bert"].config(**own)


def _t5(reading: Reading) -> TextConfig:
    own = _common(reading, "t5")
    _plain(reading, "a T5")
    own["decoder_layers"] = reading.take("decoder_num_layers", "t5.decoder_layers") or 0
    size = reading.take("kv_channels", "t5.head_dim")
    own["head_dim"] = size or 0
    own["tied"] = not reading.take("untie_embeddings_and_output_weights", "t5.tied")
    activation = _activation(reading, "t5.activation", "t5")
    own |= {"activation": activation, "gated": bool(reading("swiglu"))}
    own["num_buckets"] = reading.take("relative_attention_num_buckets", "t5.num_buckets")
    own["max_distance"] = reading.take("relative_attention_max_distance", "t5.max_distance")
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
    why = "initial matrices have the paper's deviations: --t5.init-factor multiplies them"
    reading.explain("not supported", why, "init_method_std")
    reading.ignore("num_query_groups", "bert_binary_head")
    reading.explain("not needed", "positions are relative", "max_position_embeddings")
    reading.explain(
        "not needed", "norms are before sublayers", "apply_residual_connection_post_layernorm"
    )
    reading.ignore("hybrid_layer_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio")
    return families()["t5"].config(**own)


_LAYER_LETTERS = "M*-"  # state spaces, attention and feed-forward layers, in patterns of hybrids


def _mamba(reading: Reading) -> TextConfig:
    own = _common(reading, "mamba")
    _plain(reading, "a Mamba-2 model")
    layers = reading.take("num_layers", "mamba.pattern")
    names = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
    reading.ignore(*names, "encoder_num_layers")
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
    own |= {"pattern": text, "activation": _activation(reading, "mamba.activation", "mamba")}
    hidden, size = own["embed_dim"], reading.take("mamba_head_dim", "mamba.head_dim")
    own |= {"head_dim": size, "state_dim": reading.take("mamba_state_dim", "mamba.state_dim")}
    own["num_groups"] = reading.take("mamba_num_groups", "mamba.num_groups")
    own["num_heads"] = reading.take("mamba_num_heads", "mamba.num_heads") or 2 * hidden // size
    if reading.take("group_query_attention", "mamba.attention_kv_heads"):
        groups = reading.take("num_query_groups", "mamba.attention_kv_heads")
        own["attention_kv_heads"] = groups
    else:
        reading.ignore("num_query_groups")
    own["attention_head_dim"] = reading.take("kv_channels", "mamba.attention_head_dim") or 0
    own["bias"] = reading.take("add_bias_linear", "mamba.bias")
    _expect(reading, {
        "normalization": (("RMSNorm",), "RMSNorms"),
        "apply_layernorm_1p": ((False,), "scales around 1"),
        "add_qkv_bias": ((False, own["bias"]), "biases on all linear layers or none"),
        "position_embedding_type": (("none",), "no positions"),
        "use_rotary_position_embeddings": ((False,), "no positions"),
    }, "functron's hybrid")  # fmt: skip
    reading.ignore("bert_binary_head", "decoder_num_layers", "decoder_seq_length")
    reading.ignore("relative_attention_num_buckets", "relative_attention_max_distance")
    reading.explain("same", "sequences may be of any length", "max_position_embeddings")
    reading.explain(
        "not needed", "norms are before sublayers", "apply_residual_connection_post_layernorm"
    )
    return families()["mamba"].config(**own)
