"""Megatron-Core's GPT models: names of tensors, arguments, and the optimizer's state, in and out.

| Megatron                                         | here                                        |
|--------------------------------------------------|---------------------------------------------|
| ``linear_qkv``: by key head its queries, key and value | q, k, v                               |
| ``linear_fc1``: gates, then ups                  | gate, up                                    |
| ``experts.E.linear_fc1``                         | rows of experts/gate, experts/up            |
| ``linear_q_down_proj``, ... of latent attention  | q_down, q_norm, q_up, kv_down, kv_norm, kv_up |
| ``mtp.layers.K``                                 | rows of mtp                                 |
| ``router.expert_bias``, no parameter             | router/balance                              |
| rows that pad the vocabulary                     | tokens: its loss counts them                |

`load` reads weights, moments and masters, each as a tree like the parameters; `save` writes them as
`torch_dist`, one tensor in memory at a time.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.hub.files import Source
from functron.hub.format import (
    DOWN,
    EMBED,
    HEADS,
    OUT,
    UNEMBED,
    UP,
    Format,
    Layout,
    Rule,
    attention,
    layouts,
    linear,
    norm,
    tensors,
)
from functron.hub.megatron_files import COMMON, METADATA, Opened, Tensors
from functron.hub.reader import local_on_mesh, match, read_layouts
from functron.models.config import GPTConfig
from functron.models.family import FAMILIES
from functron.nn.moe import MoEConfig

# --- names of tensors

_QKV = ("linear_qkv[q]", "linear_qkv[k]", "linear_qkv[v]", "linear_proj")
_ROUTER = ("expert embed -> embed expert", "expert -> expert")
_LATENT = "latent embed -> embed latent"
_OF_LATENT = "(heads head) latent -> latent heads head"
BALANCE = "router/balance"
"""The end of paths that Megatron has no optimizer's state of."""


def _fc(name: str, path: str, config: GPTConfig) -> tuple[Rule, ...]:
    """The two linear layers of a feed-forward layer, of an expert or of a shared one."""
    paths = ("gate", "up") if config.gated else ("up",)
    wide = tuple(
        Rule(f"{name}.linear_fc1.{theirs}", dims, tuple(f"{path}/{each}/{ours}" for each in paths))
        for theirs, ours, dims in (("weight", "w", UP[0]), ("bias", "b", UP[1]))
    )
    return (*wide, *linear(f"{name}.linear_fc2", f"{path}/down", *DOWN))


def _block(name: str, stack: str, config: GPTConfig, *, experts: bool) -> tuple[Rule, ...]:
    """The rules of a layer: ``name`` has the field of its number."""
    own = f"{name}.self_attention"
    mixer = attention(f"{stack}/attention", *(f"{own}.{each}" for each in _QKV))
    mixer += norm(f"{own}.q_layernorm", f"{stack}/attention/q_norm", "head")
    mixer += norm(f"{own}.k_layernorm", f"{stack}/attention/k_norm", "head")
    if config.kv_rank:
        mixer = (
            *linear(f"{own}.linear_proj", f"{stack}/attention/out", *OUT),
            Rule(f"{own}.linear_q_proj.weight", HEADS[0], (f"{stack}/attention/q/w",)),
            Rule(f"{own}.linear_q_down_proj.weight", _LATENT, (f"{stack}/attention/q_down/w",)),
            *norm(f"{own}.q_layernorm", f"{stack}/attention/q_norm", "latent"),
            Rule(f"{own}.linear_q_up_proj.weight", _OF_LATENT, (f"{stack}/attention/q_up/w",)),
            Rule(f"{own}.linear_kv_down_proj.weight", _LATENT, (f"{stack}/attention/kv_down/w",)),
            *norm(f"{own}.kv_layernorm", f"{stack}/attention/kv_norm", "latent"),
            Rule(f"{own}.linear_kv_up_proj.weight", _OF_LATENT, (f"{stack}/attention/kv_up/w",)),
        )  # fmt: skip
    norms = (
        *norm(f"{name}.input_layernorm", f"{stack}/attention_norm"),
        *norm(f"{name}.pre_mlp_layernorm", f"{stack}/mlp_norm"),
    )
    if not experts:
        return (*norms, *mixer, *_fc(f"{name}.mlp", f"{stack}/mlp", config))
    moe = f"{stack}/moe"
    return (
        *norms,
        *mixer,
        Rule(f"{name}.mlp.router.weight", _ROUTER[0], (f"{moe}/router/w",)),
        Rule(f"{name}.mlp.router.bias", _ROUTER[1], (f"{moe}/router/b",)),
        Rule(f"{name}.mlp.router.expert_bias", _ROUTER[1], (f"{moe}/{BALANCE}",)),
        *_fc(f"{name}.mlp.experts.{{expert}}", f"{moe}/experts", config),
        *_fc(f"{name}.mlp.shared_experts", f"{moe}/shared", config),
        Rule(f"{name}.mlp.shared_experts.gate_weight", "one embed -> embed one",
             (f"{moe}/shared_gate/w",)),
    )  # fmt: skip


def _rules(config: GPTConfig) -> tuple[Rule, ...]:
    layer, ahead = "decoder.layers.{layer}", "mtp.layers.{layer}"
    sparse = config.moe is not None
    return (
        Rule("embedding.word_embeddings.weight", EMBED, ("embed",)),
        Rule("embedding.position_embeddings.weight", "at embed -> at embed", ("positions",)),
        *_block(layer, "dense", config, experts=False),
        *_block(layer, "blocks", config, experts=sparse),
        *norm("decoder.final_layernorm", "norm"),
        *norm(f"{ahead}.enorm", "mtp/embed_norm"),
        *norm(f"{ahead}.hnorm", "mtp/stream_norm"),
        Rule(f"{ahead}.eh_proj.weight", "embed both -> both embed", ("mtp/proj/w",)),
        *_block(f"{ahead}.transformer_layer", "mtp/block", config, experts=sparse),
        *norm(f"{ahead}.final_layernorm", "mtp/norm"),
        Rule("output_layer.weight", UNEMBED, ("unembed",)),
    )


def _layouts(config: GPTConfig) -> list[Layout]:
    family = FAMILIES["gpt"]
    numbers = {**family.numbers(config), "mtp": range(config.mtp_depth)}
    return layouts(_rules(config), family.defs(config), config.vocab_size, numbers)


def _form(config: GPTConfig) -> Format:
    return Format(
        "Megatron", "GPTModel", _rules(config), (), prefix="", unused=(), describes="its arguments"
    )


class _Split:
    """Tensors with queries, keys and values by themselves.

    Megatron has the heads of one group together: its queries, then its key, then its value.
    """

    def __init__(self, inner: Source, config: GPTConfig):
        per = config.num_heads // config.kv_heads
        self._inner, self._head = inner, config.head_size
        self._rows = {"q": (0, per), "k": (per, per + 1), "v": (per + 1, per + 2)}
        self._of: dict[str, tuple[str, str]] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        group = (per + 2) * config.head_size
        for name, (shape, dtype) in inner.shapes().items():
            before, fused, kind = name.partition(".linear_qkv.")
            if fused and shape and shape[0] % group == 0:
                for which, (first, last) in self._rows.items():
                    own = f"{before}.linear_qkv[{which}].{kind}"
                    self._of[own] = (name, which)
                    count = shape[0] // group * (last - first) * config.head_size
                    self._shapes[own] = ((count, *shape[1:]), dtype)
            else:
                self._shapes[name] = (shape, dtype)

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._shapes

    def read(self, name: str, slices: Sequence[slice]) -> torch.Tensor:
        if name not in self._of:
            return self._inner.read(name, slices)
        fused, which = self._of[name]
        first, last = self._rows[which]
        heads, per = self._rows["v"][1], last - first
        start, stop, _ = slices[0].indices(self._shapes[name][0][0])
        low, high = start // (per * self._head), -(-stop // (per * self._head))
        rows = slice(low * heads * self._head, high * heads * self._head)
        found = self._inner.read(fused, (rows, *slices[1:]))
        found = found.unflatten(0, (high - low, heads, self._head))[:, first:last].flatten(0, 2)
        skip = low * per * self._head
        return found[start - skip : stop - skip]


# --- arguments

_SAME = MappingProxyType(
    {
        "num_layers": "num_layers", "hidden_size": "embed_dim", "num_attention_heads": "num_heads",
        "max_position_embeddings": "max_seq", "norm_epsilon": "norm_eps", "swiglu": "gated",
        "apply_layernorm_1p": "zero_centered_norm", "init_method_std": "init_stddev",
        "fp32_residual_connection": "fp32_residual",
    }
)  # fmt: skip
"""Megatron-LM's arguments, and the fields of ours that mean the same."""
_LATENT_SAME = MappingProxyType(
    {"q_lora_rank": "q_rank", "kv_lora_rank": "kv_rank", "qk_head_dim": "head_dim",
     "qk_pos_emb_head_dim": "rope_head_dim", "v_head_dim": "v_head_dim"}
)  # fmt: skip
_MOE_SAME = MappingProxyType(
    {
        "num_experts": "num_experts", "moe_router_topk": "top_k",
        "moe_ffn_hidden_size": "expert_dim",
        "moe_router_score_function": "score", "moe_router_topk_scaling_factor": "scale",
        "moe_router_num_groups": "num_groups", "moe_router_group_topk": "top_groups",
        "moe_router_enable_expert_bias": "balance_bias",
        "moe_router_bias_update_rate": "balance_rate",
        "moe_shared_expert_intermediate_size": "shared_dim",
        "moe_shared_expert_gate": "shared_gate",
        "moe_z_loss_coeff": "z_loss", "moe_input_jitter_eps": "jitter",
    }
)  # fmt: skip
_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "add_qkv_bias": ((False, True, None), ""),
        "rotary_interleaved": ((False, None), "multi-head attention of such pairs"),
        "use_rope_scaling": ((False, None), "Llama 3.1's stretched rope from these arguments"),
        "rotary_seq_len_interpolation_factor": ((None, 1), "interpolated positions"),
        "qk_l2_norm": ((False, None), "that norm of queries and keys"),
        "apply_residual_connection_post_layernorm": ((False, None), "such residual streams"),
        "is_hybrid_model": ((False, None), "hybrids in a Megatron checkpoint yet"),
        "hybrid_override_pattern": ((None,), "hybrids in a Megatron checkpoint yet"),
        "num_moe_experts_per_layer": ((None,), "layers of different numbers of experts"),
        "moe_use_upcycling": ((False, None), "checkpoints before they are upcycled"),
        "moe_router_force_load_balancing": ((False, None), "routers that choose at random"),
        "moe_router_pre_softmax": ((False, True, None), ""),
        "moe_expert_capacity_factor": ((None,), "Megatron's capacity, which is over a batch, yet"),
        "softmax_type": (("vanilla", None), "such a softmax in a Megatron checkpoint yet"),
        "window_size": ((None,), "windows in a Megatron checkpoint yet"),
        "window_attn_skip_freq": ((None,), "windows in a Megatron checkpoint yet"),
        "no_rope_freq": ((None,), "layers without rope in a Megatron checkpoint yet"),
        "attention_output_gate": ((False, None), "that gate in a Megatron checkpoint yet"),
        "scale_logits_with_mup": ((False, None), "Megatron's width rules"),
        "linear_attention_freq": ((None,), "linear attention"),
        "experimental_attention_variant": ((None,), "that attention"),
        "encoder_num_layers": ((None,), "encoders"),
    }
)
"""Arguments that a checkpoint may have at these values alone, and what our model lacks of others.

An encoder's number of layers repeats the decoder's in old ones, and is passed over there."""


def config_of(args: Mapping[str, Any], *, where: str = "args") -> GPTConfig:
    """The architecture that Megatron-LM's arguments describe.

    The feed-forward activation is the one that Megatron computes: with biases its fused kernel of
    GELU is the one by tanh. A load-balancing loss is ``moe_aux_loss_coeff``: "seq_aux_loss" is of
    each sequence, "aux_loss" of each microbatch. Of one module of multi-token prediction the weight
    is larger by ``seq / (seq - 1)``, since Megatron takes the mean over the tokens that have one.

    Raises:
        ValueError: the arguments are not there, or describe what our decoder does not compute; all
            offenders are listed.
    """
    problems: list[Problem] = []
    for name, (allowed, lacks) in _ONLY.items():
        value = args.get(name)
        if value not in allowed and not (
            name == "encoder_num_layers" and value == args.get("num_layers")
        ):
            wanted = " or ".join(repr(each) for each in allowed if each is not None) or "None"
            problems.append(Problem(name, repr(value), wanted, f"our decoder has not {lacks}"))
    needed = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size")
    problems += [
        Problem(name, "no such argument", "the model's", "pass --model")
        for name in needed
        if type(args.get(name)) is not int
    ]
    raise_problems(f"cannot tell the model of {where}", problems)
    values: dict[str, Any] = {
        ours: args[theirs] for theirs, ours in _SAME.items() if args.get(theirs) is not None
    }
    values |= _sizes(args) | _attention_of(args) | _activation_of(args)
    if args.get("num_experts"):
        values |= _experts_of(args, where)
    if args.get("mtp_num_layers"):
        values |= {"mtp_depth": args["mtp_num_layers"], "mtp_weight": _ahead_weight(args)}
    try:
        return GPTConfig(**values)
    except TypeError as error:
        refuse(f"cannot tell the model of {where}", "args", error, "arguments of Megatron-LM")


def _ahead_weight(args: Mapping[str, Any]) -> float:
    factor, seq = args.get("mtp_loss_scaling_factor"), args.get("seq_length") or 0
    factor = 0.1 if factor is None else factor
    return factor * seq / (seq - 1) if args["mtp_num_layers"] == 1 and seq > 1 else factor


def _sizes(args: Mapping[str, Any]) -> dict[str, Any]:
    padded = args["padded_vocab_size"]  # all of it: Megatron's softmax has the padding in it
    bits = {"bf16": "bfloat16", "fp16": "float16"}
    dtype = next((bits[name] for name in bits if args.get(name)), "float32")
    width = args.get("ffn_hidden_size") or 4 * args["hidden_size"]
    return {
        "vocab_size": padded, "vocab_multiple": padded, "dtype": dtype, "mlp_dim": width,
        "norm": "rms" if args.get("normalization") == "RMSNorm" else "layer",
        "tied": not args.get("untie_embeddings_and_output_weights"),
        "bias": bool(args.get("add_bias_linear")), "qkv_bias": bool(args.get("add_qkv_bias")),
        "dropout": args.get("hidden_dropout") or 0.0,
    }  # fmt: skip


def _attention_of(args: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
    kind = args.get("position_embedding_type") or "learned_absolute"
    if kind not in kinds:
        wanted, fix = " or ".join(kinds), nearest(str(kind), kinds)
        refuse("cannot tell the model", "position_embedding_type", repr(kind), wanted, fix)
    values: dict[str, Any] = {"positions": kinds[kind]}
    if kind == "rope":
        values["rope_theta"] = float(args.get("rotary_base") or 10000)
    if args.get("multi_latent_attention"):
        own = {ours: args.get(theirs) or 0 for theirs, ours in _LATENT_SAME.items()}
        rope = args.get("rope_type", "rope") or "yarn"  # what None means there
        found = [
            Problem(name, repr(value), wanted, "our latent attention has no other")
            for name, value, wanted, bad in (
                ("qk_layernorm", args.get("qk_layernorm"), "True", not args.get("qk_layernorm")),
                ("rope_type", rope, "'rope'", rope != "rope"),
            )
            if bad
        ]  # fmt: skip
        raise_problems("cannot tell the model", found)
        return values | own | {"positions": "rope", "rope_interleaved": True}
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    values |= {"num_kv_heads": groups or 0, "head_dim": args.get("kv_channels") or 0}
    values |= {"qk_norm": bool(args.get("qk_layernorm"))}
    if kind == "rope":
        values["rope_fraction"] = float(args.get("rotary_percent") or 1.0)
    return values


def _activation_of(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("swiglu"):
        return {"activation": "silu"}
    if args.get("squared_relu"):
        return {"activation": "relu2"}
    fused = args.get("bias_gelu_fusion", True) and args.get("add_bias_linear")
    return {"activation": "gelu_tanh" if fused or args.get("openai_gelu") else "gelu"}


def _experts_of(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    own = {ours: args[theirs] for theirs, ours in _MOE_SAME.items() if args.get(theirs) is not None}
    own.setdefault("expert_dim", args.get("ffn_hidden_size"))
    kinds, coefficients = (
        args.get("moe_router_load_balancing_type", "aux_loss"),
        args.get("moe_aux_loss_coeff", 0.0),
    )
    kinds = kinds if isinstance(kinds, list) else [kinds]
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
    known = {"aux_loss": "batch", "seq_aux_loss": "sequence", "none": "sequence"}
    frequency, layers = args.get("moe_layer_freq", 1), args["num_layers"]
    pattern = frequency if isinstance(frequency, list) else [
        int(at % frequency == 0) for at in range(layers)
    ] if isinstance(frequency, int) and frequency > 0 else []  # fmt: skip
    dense = pattern.index(1) if 1 in pattern else layers
    found = []
    if pattern != [0] * dense + [1] * (layers - dense):
        wanted = "the first layers dense, and experts in all after them"
        found.append(Problem("moe_layer_freq", repr(frequency), wanted))
    if len(kinds) != 1 or kinds[0] not in known:
        wanted = " or ".join(known)
        found.append(Problem("moe_router_load_balancing_type", repr(kinds), wanted))
    if own.get("num_groups", 1) > 1 and own.get("score") != "sigmoid":
        wanted = "'sigmoid', whose groups Megatron ranks by their best two"
        found.append(Problem("moe_router_score_function", repr(own.get("score")), wanted))
    raise_problems(f"cannot tell the experts of {where}", found)
    weight = float(coefficients[0] or 0.0) if kinds[0] != "none" else 0.0
    own |= {"aux_loss": weight, "aux": known[kinds[0]] if weight else "sequence"}
    if own.get("score", "softmax") == "sigmoid":
        own["renormalise"] = own.get("top_k", 2) > 1
    elif not args.get("moe_router_pre_softmax"):
        own["normalise"] = "after"
    if args.get("add_bias_linear"):
        own |= {"expert_bias": True, "router_bias": True}
    return {"moe": MoEConfig(**own), "dense_layers": dense}


# --- in


@dataclass(frozen=True)
class Loaded:
    """The tensors of a Megatron checkpoint, each a tree like the parameters.

    Attributes:
        params: in the config's dtype.
        mu: running means of gradients, in float32; None: the checkpoint has none.
        nu: of their squares.
        masters: in float32; None: the parameters are their own.
    """

    params: dict
    mu: dict | None = None
    nu: dict | None = None
    masters: dict | None = None


def load(opened: Opened, config: GPTConfig) -> Loaded:
    """All tensors of a checkpoint, whole. Of experts' biases the moments are zeros.

    Raises:
        ValueError: tensors are missing, unknown, or of another shape; all offenders are listed.
    """
    found, form = _layouts(config), _form(config)
    local = local_on_mesh(config, None, None)

    def read(source: Tensors, kind: GPTConfig, chosen: list[Layout]) -> dict:
        split = _Split(source, config)
        stored = match(form, config, chosen, split)
        return read_layouts(chosen, stored, kind, split, local)

    params = read(opened.weights, config, found)
    if not opened.state:
        return Loaded(params)
    missing = [
        Problem(f"optimizer.state.{name}", "nothing", "it beside the other moment")
        for name in ("exp_avg", "exp_avg_sq")
        if name not in opened.state
    ]
    others = sorted(opened.state.keys() - {"exp_avg", "exp_avg_sq", "master"})
    missing += [
        Problem(f"optimizer.state.{name}", "an optimizer's state", "Adam's", "use --weights-only")
        for name in others
    ]
    raise_problems("cannot read the optimizer's state", missing)
    wide = dataclasses.replace(config, dtype="float32")
    trained = [layout for layout in found if not layout.rule.paths[0].endswith(BALANCE)]
    kept = {}
    for name, source in opened.state.items():
        made = read(source, wide, trained)
        rest = [layout for layout in found if layout.rule.paths[0].endswith(BALANCE)]
        for path in (part.path for layout in rest for part in layout.parts):
            _put(made, path, torch.zeros_like(_at(params, path)))
        kept[name] = made
    return Loaded(params, kept["exp_avg"], kept["exp_avg_sq"], kept.get("master"))


def _at(params: Any, path: str) -> torch.Tensor:
    for key in path.split("/"):
        params = params[key]
    return params


def _put(params: dict, path: str, leaf: torch.Tensor) -> None:
    *above, name = path.split("/")
    for key in above:
        params = params.setdefault(key, {})
    params[name] = leaf


# --- out


def arguments_of(config: GPTConfig, *, seq: int = 0) -> dict[str, Any]:
    """Megatron-LM's arguments of an architecture.

    Args:
        config: the architecture.
        seq: tokens of a sample, which the weight of multi-token prediction is scaled by.

    Raises:
        ValueError: Megatron's arguments cannot express it; all fields are listed.
    """
    c, moe = config, config.moe
    made: dict[str, Any] = {theirs: getattr(c, ours) for theirs, ours in _SAME.items()}
    made |= {
        "ffn_hidden_size": c.mlp_dim, "padded_vocab_size": c.padded_vocab,
        "make_vocab_size_divisible_by": c.vocab_multiple, "vocab_size": c.vocab_size,
        "normalization": "RMSNorm" if c.norm == "rms" else "LayerNorm",
        "untie_embeddings_and_output_weights": not c.tied, "add_bias_linear": c.bias,
        "add_qkv_bias": c.qkv_bias, "hidden_dropout": c.dropout, "attention_dropout": 0.0,
        "position_embedding_type": "learned_absolute" if c.positions == "learned" else c.positions,
        "rotary_base": int(c.rope_theta), "rotary_percent": c.rope_fraction,
        "squared_relu": c.activation == "relu2", "openai_gelu": c.activation == "gelu_tanh",
        "bias_gelu_fusion": False, "bf16": c.dtype == "bfloat16", "fp16": c.dtype == "float16",
        "params_dtype": c.torch_dtype, "qk_layernorm": c.qk_norm or bool(c.kv_rank),
        "multi_latent_attention": bool(c.kv_rank), "seq_length": seq or c.max_seq,
        "num_experts": None, "mtp_num_layers": c.mtp_depth or None,
    }  # fmt: skip
    if c.kv_rank:
        made |= {theirs: getattr(c, ours) or None for theirs, ours in _LATENT_SAME.items()}
        made["rope_type"] = "rope"
    else:
        made |= {"group_query_attention": c.kv_heads != c.num_heads, "num_query_groups": c.kv_heads}
        made |= {"kv_channels": c.head_size}
    if moe is not None:
        kinds = {"batch": "aux_loss", "sequence": "seq_aux_loss"}
        made |= {theirs: getattr(moe, ours) for theirs, ours in _MOE_SAME.items()}
        if moe.num_groups == 1:
            made |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
        made |= {
            "moe_layer_freq": [0] * c.dense_layers + [1] * (c.num_layers - c.dense_layers)
            if c.dense_layers else 1,
            "moe_router_load_balancing_type": kinds[moe.aux] if moe.aux_loss else "none",
            "moe_aux_loss_coeff": moe.aux_loss,
            "moe_router_pre_softmax": moe.score == "softmax" and moe.normalise == "before",
            "moe_shared_expert_intermediate_size": moe.shared_dim or None,
            "moe_z_loss_coeff": moe.z_loss or None, "moe_input_jitter_eps": moe.jitter or None,
        }  # fmt: skip
    if c.mtp_depth:
        made["mtp_loss_scaling_factor"] = c.mtp_weight
        made["mtp_loss_scaling_factor"] = c.mtp_weight**2 / (_ahead_weight(made) or 1.0)
    _check_back(config, made)
    return made


def _check_back(config: GPTConfig, made: Mapping[str, Any]) -> None:
    """Refuse a config that is another one when it is read from its arguments."""
    canonical = FAMILIES["gpt"].canonical
    # rows of padding, and how parameters are joined, are of the layout alone
    plain = dataclasses.replace(
        config, vocab_size=config.padded_vocab, vocab_multiple=config.padded_vocab,
        fused_projections=False,
    )  # fmt: skip
    back = dataclasses.replace(config_of(made), mtp_weight=plain.mtp_weight)
    wanted, got = canonical(plain), canonical(back)
    found = [
        Problem(f.name, repr(getattr(config, f.name)), f"{getattr(got, f.name)!r}, in Megatron")
        for f in dataclasses.fields(config)
        if getattr(wanted, f.name) != getattr(got, f.name)
    ]
    raise_problems("Megatron has no such model", found)


@dataclass(frozen=True)
class Saving:
    """The things of a run that `save` writes.

    Attributes:
        config: the architecture.
        params: leaves that are read where they are indexed, as `checkpoint.stored_params` gives.
        state: trees of the optimizer's by Megatron's names (exp_avg, exp_avg_sq, param); empty: it
            is not written.
        common: args, iteration, opt_param_scheduler, ... of ``common.pt``.
    """

    config: GPTConfig
    params: Any
    state: Mapping[str, Any]
    common: Mapping[str, Any]


def save(folder: Path, saving: Saving) -> None:
    """Write a `torch_dist` checkpoint into an empty folder; one tensor at a time is in memory.

    Megatron-Core loads it on any division, with the distributed optimizer or without.
    """
    config = saving.config
    found = _layouts(config)
    stacked = not config.dense_layers
    with (folder / _SHARD).open("wb") as stream:
        writer = _Shards(stream)
        _write_tree(writer, "", config, found, saving.params, stacked)
        trained = [layout for layout in found if not layout.rule.paths[0].endswith(BALANCE)]
        for name, values in saving.state.items():
            _write_tree(writer, f"optimizer.state.{name}.", config, trained, values, stacked)
        for key in _extra_states(config, found, stacked):
            writer.add_bytes(key, [None])
        stream.flush()
        os.fsync(stream.fileno())
    with (folder / METADATA).open("wb") as stream:
        pickle.dump(writer.metadata(), stream)
    torch.save(dict(saving.common), folder / COMMON)
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
             "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(about), encoding="utf-8")


_SHARD = "__0_0.distcp"


class _Shards:
    """A file of shards, and the metadata of what was written into it."""

    def __init__(self, stream: Any):
        self._stream, self._entries, self._places = stream, {}, {}

    def add(
        self, key: str, tensor: torch.Tensor, start: Sequence[int], whole: Sequence[int]
    ) -> None:
        """Write a shard of the tensor `key`, which begins at `start` of its shape `whole`."""
        known = self._entries.setdefault(
            key,
            dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=tensor.dtype), torch.Size(whole), []
            ),
        )
        index = dcp.MetadataIndex(key, torch.Size(start), len(known.chunks))
        known.chunks.append(dcp.ChunkStorageMetadata(torch.Size(start), tensor.shape))
        self._places[index] = self._dump(tensor)

    def add_bytes(self, key: str, value: Any) -> None:
        """Write an object."""
        self._entries[key] = dcp.BytesStorageMetadata()
        self._places[dcp.MetadataIndex(key)] = self._dump(value)

    def _dump(self, value: Any) -> Any:
        kept = io.BytesIO()
        torch.save(value, kept)
        start = self._stream.tell()
        self._stream.write(kept.getbuffer())
        return filesystem._StorageInfo(_SHARD, start, kept.getbuffer().nbytes)

    def metadata(self) -> dcp.Metadata:
        """That of all shards."""
        return dcp.Metadata(self._entries, None, self._places, dcp.StorageMeta())


def _write_tree(
    writer: _Shards, prefix: str, config: GPTConfig, found: list[Layout], params: Any, stacked: bool
) -> None:
    """Write a tree like the parameters, layer by layer."""
    for name, tensor in _fused(config, _named(found, params)):
        for each in _names_of_norm(name):
            key, start, lead = _sharded(each, config, stacked)
            made = tensor.reshape((*[1] * len(lead), *tensor.shape)).clone()
            whole = (*lead, *tensor.shape)
            writer.add(prefix + key, made, (*start, *[0] * tensor.dim()), whole)


def _named(found: list[Layout], params: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron's tensors one by one, by their names."""
    for layout, index in tensors(found):
        leaves = [_at(params, part.path)[index if index else ...] for part in layout.parts]
        yield layout.name(index), layout.to_theirs(leaves)


def _fused(
    config: GPTConfig, named: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, with queries, keys and values of a layer as one by groups."""
    waiting: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named:
        if "linear_qkv[" not in name:
            yield name, tensor
            continue
        fused = name[: name.index("[")] + name[name.index("]") + 1 :]
        kept = waiting.setdefault(fused, [])
        kept.append(tensor.unflatten(0, (config.kv_heads, -1, config.head_size)))
        if len(kept) == 3:
            yield fused, torch.cat(waiting.pop(fused), 1).flatten(0, 2)


_NUMBER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)$")
_EXPERT_NUMBER = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(.*)$")


def _sharded(
    name: str, config: GPTConfig, stacked: bool
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The key of a tensor in `torch_dist`, and of stacked dims its places and their sizes."""
    place: list[int] = []
    sizes: list[int] = []
    if stacked and (match := _NUMBER.match(name)):
        place, sizes, name = [int(match[2])], [config.num_layers], match[1] + match[3]
    if (match := _EXPERT_NUMBER.match(name)) and config.moe is not None:
        place.append(int(match[2]))
        sizes.append(config.moe.num_experts)
        name = f"{match[1]}experts.{match[3]}"
    return name, tuple(place), tuple(sizes)


_NORMS = MappingProxyType(
    {
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
        ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
        ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
    }
)


def _names_of_norm(name: str) -> list[str]:
    """The names of a tensor: of a norm also as a part of the layer after it.

    It depends on the layers (local or Transformer Engine's) and the model which one is asked for;
    the other is passed over, and norms are small.
    """
    others = [name.replace(part, new) for part, new in _NORMS.items() if part in name]
    return [name, *others]


def _extra_states(config: GPTConfig, found: list[Layout], stacked: bool) -> list[str]:
    """Keys of the states of FP8 scaling, empty ones, without which Megatron does not load."""
    modules: dict[str, None] = {}
    for layout, index in tensors(found):
        name, _, kind = re.sub(r"\[\w\]", "", layout.name(index)).rpartition(".")
        if kind == "weight" and name.rpartition(".")[2].startswith(("linear_", "eh_proj")):
            modules[name] = None
            if name.endswith(".linear_proj"):
                modules[name.replace("linear_proj", "core_attention")] = None
    keys = []
    for name in modules:
        key, place, sizes = _sharded(f"{name}.", config, stacked)
        places = [".".join(map(str, each or (end,))) for each, end in ((place, 0), (sizes, 1))]
        keys.append(f"{key}_extra_state/shard_{'_'.join(places)}")
    return keys
