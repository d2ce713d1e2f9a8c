"""The architectures: one table of the functions, presets and facts of each.

Training, reading and writing of weights ask the family of a config and do not ask which
architecture it is; all functions are pure, and take the config first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from functron.core.errors import refuse
from functron.models import bert, gpt, llava, mamba, t5, vit
from functron.models.bert import BertConfig
from functron.models.config import Dtype, GPTConfig, Named
from functron.models.llava import LlavaConfig
from functron.models.mamba import MambaConfig
from functron.models.t5 import T5Config
from functron.models.vit import ViTConfig
from functron.nn.moe import MoEConfig

TrainedConfig = GPTConfig | MambaConfig | BertConfig | T5Config
"""An architecture that ``functron train`` trains."""

Config = TrainedConfig | ViTConfig | LlavaConfig
"""Any architecture."""

OptionName = Literal["context", "experts", "kernels", "loss_chunk_tokens", "matmul"]
"""Fields of `ModelOptions` that the losses of some families read, beside those of all."""


def _not_counted(config: Any, *sizes: int) -> NoReturn:
    title, fix = "cannot count the FLOPs of a step", "count those of its program: ft.trace(fn)"
    refuse(title, "config", type(config).__name__, "a model that functron train trains", fix)


@dataclass(frozen=True)
class Family:
    """An architecture's functions, each of its config first.

    Attributes:
        name: of its table in a configuration.
        title: its name in messages, with an article.
        config: the type of its configs.
        presets: named configs.
        defs: ``(config)`` to the definitions of the parameters.
        rules: ``(config, mesh, *, fsdp)`` to how a mesh splits them.
        loss: ``(config, params, batch, options, *, key)`` to the sum of the losses.
        num_targets: ``(batch)`` to how many terms that sum has; LLaVA's takes its config first.
        flops_per_token: ``(config, seq)`` to those of a step, forward and backward; with
            ``objective="spans"`` also of how many targets a sample has.
        settings: the fields of the options that `loss` reads besides.
        rules_settings: the keywords that `rules` takes besides.
        adapters: whether LoRA has a place in it.
        objective: what ``functron train`` has it learn: the next token, masked ones, or spans that
            are taken out; None: it trains none of these.
        make: ``(fields, dtype)`` to a config, where that is not the type's constructor.
        vocab_size: ``(config)`` to the rows of the dim that is padded, without the padding.
        free: fields of the config that leave the model what it is, but for the rounding of its
            dtype: of training, initial values and padding.
        unread: ``(config)`` to fields that nothing reads in a model like that.
        canonical: ``(config)`` to the config with what is derived written out, and what nothing
            reads at its default: two configs of one model are equal there, but for `free`.
        numbers: ``(config)`` to the numbers in the whole model of the layers of each stack, by the
            stack's name, where they are not counted from 0.
    """

    name: str
    title: str
    config: type[Config]
    presets: Mapping[str, Any]
    defs: Callable[..., dict]
    rules: Callable
    loss: Callable
    num_targets: Callable
    flops_per_token: Callable[..., int] = _not_counted
    settings: frozenset[OptionName] = field(default_factory=frozenset)
    rules_settings: frozenset[str] = field(default_factory=frozenset)
    adapters: bool = False
    objective: Literal["next", "masked", "spans"] | None = None
    make: Callable[[Mapping[str, Any], Dtype], Config] | None = None
    vocab_size: Callable[[Any], int] = lambda config: config.vocab_size
    free: tuple[str, ...] = ("dropout", "init_stddev", "vocab_multiple", "dtype")
    unread: Callable[[Any], tuple[str, ...]] = lambda config: ()
    canonical: Callable[[Any], Config] = lambda config: config
    numbers: Callable[[Any], Mapping[str, Sequence[int]]] = lambda config: {}

    def has_details(self, config: Config) -> bool:
        """Whether the loss of `config` has several terms: those of `gpt.loss_and_details`."""
        return isinstance(config, GPTConfig) and config.has_details


_GPT_FREE = (
    "dropout", "z_loss", "init_stddev", "vocab_multiple", "dtype", "mtp_weight",
    "fused_projections", "fp32_residual",
)  # fmt: skip
MOE_FREE = (
    "aux_loss", "aux", "z_loss", "balance_rate", "jitter", "router_dtype", "dispatch",
    "capacity_factor", "capacity_over", "drop",
)  # fmt: skip
"""Fields of `MoEConfig` that are of training."""


def canonical_moe(moe: MoEConfig) -> MoEConfig:
    """`moe` with what is not the model's, or is not used, left at its default."""
    plain = MoEConfig()
    changes: dict[str, Any] = {name: getattr(plain, name) for name in MOE_FREE}
    if moe.routing == "expert_choice":
        # how many tokens experts choose, and of which
        changes |= {name: getattr(moe, name) for name in ("capacity_factor", "capacity_over")}
    if moe.num_groups == 1:
        changes |= {"top_groups": 1, "group_score": plain.group_score}
    if moe.normalise == "after":  # the same, computed another way
        changes |= {"normalise": "before", "renormalise": True}
    return replace(moe, **changes)


def _gpt_canonical(config: GPTConfig) -> GPTConfig:
    changes: dict[str, Any] = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "qkv_bias": config.bias or config.qkv_bias,
    }
    if not config.kv_rank:
        changes["attention_scale"] = config.attention_scale or config.head_size**-0.5
        changes["rope_interleaved"] = GPTConfig.rope_interleaved
    if config.nope_every > config.num_layers:
        changes["nope_every"] = 0
    if config.local_rope_theta == config.rope_theta and config.rope_scaling is None:
        changes["local_rope_theta"] = 0.0
    if config.positions != "rope":
        changes |= {"rope_theta": GPTConfig.rope_theta, "rope_scaling": None}
    if config.moe is not None:
        changes["moe"] = canonical_moe(config.moe)
        changes |= {} if config.dense_layers else {"mlp_dim": GPTConfig.mlp_dim}
    return replace(config, **changes)


def _gpt_numbers(config: GPTConfig) -> dict[str, range]:
    """Layers are counted through: those of the second stack go on from the first's, and modules
    that predict tokens further ahead from the last layer."""
    ahead = range(config.num_layers, config.num_layers + config.mtp_depth)
    return {**config.stacks, "mtp": ahead}


def _mamba_numbers(config: MambaConfig) -> dict[str, list[int]]:
    names = [mamba.KINDS[letter] for letter in config.pattern]
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
        "attention_head_dim": config.attention.head_size,
    }
    plain = {name: getattr(MambaConfig, name) for name in _mamba_unread(config)}
    return replace(config, **{**derived, **plain})


def _t5_canonical(config: T5Config) -> T5Config:
    layers, head_dim = config.layers["decoder"], config.attention.head_size
    return replace(config, decoder_layers=layers, head_dim=head_dim)


_VIT_FREE = ("init_stddev", "class_multiple", "dtype")


def _llava_make(values: Mapping[str, Any], dtype: Dtype) -> LlavaConfig:
    parts = {
        "vision": ViTConfig(**values["vision"], dtype=dtype),
        "text": GPTConfig(**values["text"], dtype=dtype),
    }
    return LlavaConfig(**{**values, **parts})


def _llava_canonical(config: LlavaConfig) -> LlavaConfig:
    text, vision = _gpt_canonical(config.text), config.vision
    plain: dict[str, Any] = {name: getattr(GPTConfig, name) for name in _GPT_FREE}
    if text.positions == "rope":  # shorter sequences are as good
        plain["max_seq"] = GPTConfig.max_seq
    bare: dict[str, Any] = {name: getattr(ViTConfig, name) for name in _VIT_FREE}
    return replace(config, text=replace(text, **plain), vision=replace(vision, **bare))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt": Family(
            "gpt", "a GPT", GPTConfig, gpt.PRESETS, gpt.defs, gpt.rules, gpt.loss,
            gpt.num_targets, gpt.flops_per_token,
            settings=frozenset({"context", "experts", "kernels", "loss_chunk_tokens", "matmul"}),
            rules_settings=frozenset({"experts"}), adapters=True, objective="next",
            free=_GPT_FREE, canonical=_gpt_canonical, numbers=_gpt_numbers,
        ),
        "mamba": Family(
            "mamba", "a Mamba-2 model", MambaConfig, mamba.PRESETS, mamba.defs, mamba.rules,
            mamba.loss, mamba.num_targets, mamba.flops_per_token, objective="next",
            free=("dropout", "init_stddev", "vocab_multiple", "dtype", "chunk"),
            unread=_mamba_unread, canonical=_mamba_canonical, numbers=_mamba_numbers,
        ),
        "bert": Family(
            "bert", "a BERT", BertConfig, bert.PRESETS, bert.defs, bert.rules, bert.loss,
            bert.num_targets, bert.flops_per_token, objective="masked",
        ),
        "t5": Family(
            "t5", "a T5", T5Config, t5.PRESETS, t5.defs, t5.rules, t5.loss, t5.num_targets,
            t5.flops_per_token, objective="spans",
            free=("dropout", "init_factor", "vocab_multiple", "dtype"), canonical=_t5_canonical,
        ),
        "vit": Family(
            "vit", "a vision transformer", ViTConfig, vit.PRESETS, vit.defs, vit.rules, vit.loss,
            vit.num_targets, vocab_size=lambda config: config.num_classes, free=_VIT_FREE,
        ),
        "llava": Family(
            "llava", "a LLaVA", LlavaConfig, llava.PRESETS, llava.defs, llava.rules, llava.loss,
            llava.num_targets, make=_llava_make, free=(), canonical=_llava_canonical,
            vocab_size=lambda config: config.text.vocab_size,
        ),
    }
)  # fmt: skip
"""All of them, by name: of its module and, where it is trained, of its table."""

TRAINED: Mapping[str, Family] = MappingProxyType(
    {name: family for name, family in FAMILIES.items() if family.objective is not None}
)
"""Those that ``functron train`` trains."""

PRESETS: Mapping[str, TrainedConfig] = Named(
    {name: config for family in TRAINED.values() for name, config in family.presets.items()}
)
"""The presets of the families that are trained; no two have the same name."""


def family_of(config: object) -> Family:
    """The family that a config belongs to.

    Raises:
        TypeError: it belongs to none of them.
    """
    for family in FAMILIES.values():
        if isinstance(config, family.config):
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise TypeError(f"family_of: got {type(config).__name__}; wanted one of {known}")


def differing_fields(one: Any, two: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two configs of a class differ, and both values.

    Where both have a part (`MoEConfig`, `RopeScaling`), it is its fields: ``moe.top_k``.
    """
    for each in dataclasses.fields(one):
        a, b = getattr(one, each.name), getattr(two, each.name)
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            yield from differing_fields(a, b, f"{path}{each.name}.")
        elif a != b:
            yield f"{path}{each.name}", a, b


def field_text(value: Any) -> str:
    """A value of a config, for a message: of a part, what is not at its default."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = [(each, getattr(value, each.name)) for each in dataclasses.fields(value)]
    changed = ", ".join(f"{each.name}={x!r}" for each, x in given if x != each.default)
    return f"{type(value).__name__}({changed})"


def dtype_of(config: Config) -> Dtype:
    """The dtype of a model's parameters."""
    return config.text.dtype if isinstance(config, LlavaConfig) else config.dtype
