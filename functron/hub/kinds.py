"""Kinds of models: what reading and writing weights needs to know of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from functron.core.errors import Problem, raise_problems
from functron.hub import experts
from functron.models import bert, gpt, llava, mamba, t5, vit
from functron.models.bert import BertConfig
from functron.models.config import Dtype, GPTConfig
from functron.models.llava import LlavaConfig
from functron.models.mamba import KINDS as LETTERS
from functron.models.mamba import MambaConfig
from functron.models.t5 import T5Config
from functron.models.vit import ViTConfig
from functron.spmd import BoundMesh, Mesh
from functron.spmd.spec import Rules

Config = GPTConfig | MambaConfig | BertConfig | T5Config | ViTConfig | LlavaConfig
"""The architecture of a model."""

FREE = ("dropout", "z_loss", "init_stddev", "vocab_multiple", "dtype", "mtp_weight")
"""Fields of `GPTConfig` that config.json says nothing about: they do not change what the model is
(but for the rounding of its dtype). Nor does it say what `experts.FREE` has."""


@dataclass(frozen=True)
class Kind:
    """One kind of models.

    Attributes:
        name: what to call it in messages.
        config: its type of configs.
        defs: ``config -> parameters``.
        rules: ``(config, mesh) -> rules`` of how a mesh splits them.
        make: ``(fields, dtype) -> config``.
        vocab_size: ``config -> `` rows of the dim that is padded, without the padding.
        free: fields that config.json says nothing about, or that leave the model what it is.
        unread: ``config ->`` fields that nothing reads in a model like that.
        canonical: a config with what is derived written out, and what nothing reads at its default,
            to be compared.
        numbers: ``config ->`` by the name of a stack, the numbers that its layers have in names.
    """

    name: str
    config: type[Config]
    defs: Callable[[Any], dict]
    rules: Callable[[Any, Mesh | BoundMesh], Rules]
    make: Callable[[Mapping[str, Any], Dtype], Config]
    vocab_size: Callable[[Any], int] = lambda config: config.vocab_size
    free: tuple[str, ...] = ()
    unread: Callable[[Any], tuple[str, ...]] = lambda config: ()
    canonical: Callable[[Any], Config] = lambda config: config
    numbers: Callable[[Any], Mapping[str, Sequence[int]]] = lambda config: {}


def _decoder_numbers(config: GPTConfig) -> dict[str, range]:
    """Layers are counted through: those of the second stack go on from the first's, and modules
    that predict tokens further ahead from the last layer."""
    ahead = range(config.num_layers, config.num_layers + config.mtp_depth)
    return {**config.stacks, "mtp": ahead}


def _decoder_canonical(config: GPTConfig) -> GPTConfig:
    """`config` with what is derived written out, and what nothing reads left at its default."""
    changes: dict[str, Any] = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "qkv_bias": config.bias or config.qkv_bias,
    }
    if not config.kv_rank:
        changes["attention_scale"] = config.attention_scale or config.head_size**-0.5
    if config.nope_every > config.num_layers:
        changes["nope_every"] = 0
    if config.local_rope_theta == config.rope_theta and config.rope_scaling is None:
        changes["local_rope_theta"] = 0.0
    if config.positions != "rope":
        changes |= {"rope_theta": GPTConfig.rope_theta, "rope_scaling": None}
    if not config.kv_rank:
        changes["rope_interleaved"] = GPTConfig.rope_interleaved
    if config.moe is not None:
        changes["moe"] = experts.canonical(config.moe)
        changes |= {} if config.dense_layers else {"mlp_dim": GPTConfig.mlp_dim}
    return replace(config, **changes)


def _mamba_numbers(config: MambaConfig) -> dict[str, list[int]]:
    names = [LETTERS[letter] for letter in config.pattern]
    return {name: [i for i, each in enumerate(names) if each == name] for name in set(names)}


def _mamba_unread(config: MambaConfig) -> tuple[str, ...]:
    of_kind = {
        "attention": ("attention_heads", "attention_kv_heads", "attention_head_dim"),
        "mlp": ("mlp_dim", "activation", "gated"),
        "mamba": (
            *("num_heads", "head_dim", "num_groups", "state_dim", "conv_width"),
            *("conv_bias", "dt_min"),
        ),
    }
    return tuple(n for kind, names in of_kind.items() if kind not in config.counts for n in names)


def _mamba_canonical(config: MambaConfig) -> MambaConfig:
    derived = {
        "attention_kv_heads": config.kv_heads,
        "attention_head_dim": config.attention.head_dim,
    }
    plain = {name: getattr(MambaConfig, name) for name in _mamba_unread(config)}
    return replace(config, **{**derived, **plain})


def _t5_canonical(config: T5Config) -> T5Config:
    layers, head_dim = config.layers["decoder"], config.attention.head_dim
    return replace(config, decoder_layers=layers, head_dim=head_dim)


def _llava_make(values: Mapping[str, Any], dtype: Dtype) -> LlavaConfig:
    vision = ViTConfig(**values["vision"], dtype=dtype)
    text = GPTConfig(**values["text"], dtype=dtype)
    rest = {name: values[name] for name in values.keys() - {"vision", "text"}}
    return LlavaConfig(vision, text, **rest)


def _llava_canonical(config: LlavaConfig) -> LlavaConfig:
    text, vision = _decoder_canonical(config.text), config.vision
    plain: dict[str, Any] = {name: getattr(GPTConfig, name) for name in FREE}
    if text.positions == "rope":  # shorter sequences are as good
        plain["max_seq"] = GPTConfig.max_seq
    bare: dict[str, Any] = {name: getattr(ViTConfig, name) for name in VIT.free}
    return replace(config, text=replace(text, **plain), vision=replace(vision, **bare))


DECODER = Kind(
    "decoder",
    GPTConfig,
    gpt.defs,
    gpt.rules,
    lambda values, dtype: GPTConfig(**values, dtype=dtype),
    free=FREE,
    canonical=_decoder_canonical,
    numbers=_decoder_numbers,
)
MAMBA = Kind(
    "Mamba-2 model or hybrid",
    MambaConfig,
    mamba.defs,
    mamba.rules,
    lambda values, dtype: MambaConfig(**values, dtype=dtype),
    free=("dropout", "init_stddev", "vocab_multiple", "dtype", "chunk"),
    unread=_mamba_unread,
    canonical=_mamba_canonical,
    numbers=_mamba_numbers,
)
BERT = Kind(
    "BERT",
    BertConfig,
    bert.defs,
    bert.rules,
    lambda values, dtype: BertConfig(**values, dtype=dtype),
    free=("dropout", "init_stddev", "vocab_multiple", "dtype"),
)
T5 = Kind(
    "T5",
    T5Config,
    t5.defs,
    t5.rules,
    lambda values, dtype: T5Config(**values, dtype=dtype),
    free=("dropout", "init_factor", "vocab_multiple", "dtype"),
    canonical=_t5_canonical,
)
VIT = Kind(
    "vision transformer",
    ViTConfig,
    vit.defs,
    vit.rules,
    lambda values, dtype: ViTConfig(**values, dtype=dtype),
    vocab_size=lambda config: config.num_classes,
    free=("init_stddev", "class_multiple", "dtype"),
)
LLAVA = Kind(
    "LLaVA",
    LlavaConfig,
    llava.defs,
    llava.rules,
    _llava_make,
    vocab_size=lambda config: config.text.vocab_size,
    canonical=_llava_canonical,
)
KINDS = (DECODER, MAMBA, BERT, T5, VIT, LLAVA)


def dtype_of(config: Config) -> Dtype:
    """The dtype of a model's parameters."""
    return config.text.dtype if isinstance(config, LlavaConfig) else config.dtype


def kind_of(config: Config) -> Kind:
    """The kind of models that a config is of.

    Raises:
        ValueError: it is no config of a model.
    """
    for kind in KINDS:
        if isinstance(config, kind.config):
            return kind
    wanted = "one of " + ", ".join(kind.config.__name__ for kind in KINDS)
    problem = Problem("config", type(config).__name__, wanted, "pass what hub.read_config gives")
    raise_problems("this is no config of a model", [problem])
    raise AssertionError("unreachable")
