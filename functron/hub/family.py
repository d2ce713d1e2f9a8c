"""What a family of models is, and what most of them say in the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from functron.errors import Problem
from functron.hub import settings
from functron.hub.kinds import DECODER as DECODERS
from functron.hub.kinds import Config, Kind, kind_of
from functron.hub.rope import rope
from functron.hub.rules import Layout, Rule, layouts
from functron.hub.settings import Aspect


@dataclass(frozen=True)
class Surplus:
    """Tensors that transformers' models have and ours do not need.

    They are passed over when reading. A model is stored with those of the folder that it came from
    where config.json is that folder's, too; else with constants.

    Attributes:
        holds: ``(config, name) ->`` whether the tensor is one.
        name: what a tensor of another naming is called in files that we write.
        constants: ``config ->`` shapes and values, by name, of those that cannot be left out.
    """

    holds: Callable[[Any, str], bool]
    name: Callable[[str], str]
    constants: Callable[[Any], Mapping[str, tuple[tuple[int, ...], float]]]


@dataclass(frozen=True)
class Family:
    """Models that transformers builds with one class.

    Attributes:
        model_type: transformers' name of the family in config.json.
        architecture: transformers' class of the models.
        rules: which tensor of a file holds what.
        aspects: what config.json says.
        in_memory: where transformers renames and fuses tensors as it reads them, which tensor of
            its models in memory holds what; read as well, never written.
        prefix: of tensors of the model proper; base models are stored without it.
        max_seq: the entry of config.json with the longest sequence; empty: there is none.
        unused: regular expressions of tensors that the model has no use for.
        copies: regular expressions of tensors that repeat one of our leaves, and its path.
        ignored: entries of config.json that change nothing, beside `settings.GENERAL`.
        kind: what kind of models they are.
        naming: in place of `rules`, where names depend on the model or there are several: all ways,
            of which the first is written.
        surplus: what transformers' models have beyond ours.
    """

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    aspects: tuple[Aspect, ...]
    in_memory: tuple[Rule, ...] = ()
    prefix: str = "model."
    max_seq: str = "max_position_embeddings"
    unused: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    copies: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    kind: Kind = DECODERS
    naming: Callable[[Any], Sequence[Sequence[Rule]]] | None = None
    surplus: Surplus | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether its models may have modules that predict tokens further ahead."""
        return any("mtp_depth" in aspect.ours and aspect.theirs for aspect in self.aspects)

    def ways(self, config: Config) -> list[Sequence[Rule]]:
        """All namings of this model's tensors, the one that is written first."""
        named = [self.rules] if self.naming is None else self.naming(config)
        return [*named, self.in_memory] if self.in_memory else [*named]


def layouts_of(family: Family, config: Config, rules: Sequence[Rule] | None = None) -> list[Layout]:
    """The tensors of this model in files of the family, or by other `rules`; see `layouts`."""
    kind, rules = family.kind, family.ways(config)[0] if rules is None else rules
    return layouts(rules, kind.defs(config), kind.vocab_size(config), kind.numbers(config))


def config_problems(config: Config, family: Family) -> list[Problem]:
    """Why models of this family are not like `config`; empty where they are."""
    problems: list[Problem] = []
    kind = family.kind
    if kind_of(config) is not kind:
        got = type(config).__name__
        return [Problem("config", got, f"{kind.config.__name__}, of a {kind.name}")]
    for aspect in family.aspects:
        aspect.write(config, problems)
    covered = {name for aspect in family.aspects for name in aspect.ours}
    covered |= {*kind.free, *kind.unread(config)}
    for f in fields(kind.config):
        value = getattr(config, f.name)
        if f.name not in covered and value != f.default:
            problems.append(Problem(f.name, repr(value), f"{f.default!r} in this family"))
    return problems


def linear(name: str, path: str, weight: str, bias: str) -> tuple[Rule, Rule]:
    """The rules of a linear layer: its weight ``[out, in]``, and its bias where there is one."""
    return (
        Rule(f"{name}.weight", weight, (f"{path}/w",)),
        Rule(f"{name}.bias", bias, (f"{path}/b",)),
    )


def norm(name: str, path: str, dim: str = "embed") -> tuple[Rule, Rule]:
    """The rules of a norm: its scale, and its bias where there is one."""
    return (
        Rule(f"{name}.weight", f"{dim} -> {dim}", (f"{path}/scale",)),
        Rule(f"{name}.bias", f"{dim} -> {dim}", (f"{path}/bias",)),
    )


def mlp(name: str, path: str) -> tuple[Rule, ...]:
    """The rules of a gated feed-forward layer."""
    return (
        *linear(f"{name}.gate_proj", f"{path}/gate", *UP),
        *linear(f"{name}.up_proj", f"{path}/up", *UP),
        *linear(f"{name}.down_proj", f"{path}/down", *DOWN),
    )


def within(stack: str, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules of blocks for another stack of layers of that kind."""
    return tuple(
        replace(rule, paths=tuple(path.replace("blocks", stack, 1) for path in rule.paths))
        for rule in rules
    )


LAYER = "model.layers.{layer}"
HEADS = ("(heads head) embed -> embed heads head", "(heads head) -> heads head")
OUT = ("embed (heads head) -> heads head embed", "embed -> embed")
UP = ("mlp embed -> embed mlp", "mlp -> mlp")
DOWN = ("embed mlp -> mlp embed", "embed -> embed")

START = (Rule("model.embed_tokens.weight", "vocab embed -> vocab embed", ("embed",)),)
END = (
    *norm("model.norm", "norm"),
    Rule("lm_head.weight", "vocab embed -> embed vocab", ("unembed",)),
)
AROUND = (
    *norm(f"{LAYER}.input_layernorm", "blocks/attention_norm"),
    *linear(f"{LAYER}.self_attn.o_proj", "blocks/attention/out", *OUT),
    *norm(f"{LAYER}.post_attention_layernorm", "blocks/mlp_norm"),
)
"""What all blocks have."""
ATTENTION = (
    *AROUND,
    *linear(f"{LAYER}.self_attn.q_proj", "blocks/attention/q", *HEADS),
    *linear(f"{LAYER}.self_attn.k_proj", "blocks/attention/k", *HEADS),
    *linear(f"{LAYER}.self_attn.v_proj", "blocks/attention/v", *HEADS),
    *norm(f"{LAYER}.self_attn.q_norm", "blocks/attention/q_norm", "head"),
    *norm(f"{LAYER}.self_attn.k_norm", "blocks/attention/k_norm", "head"),
)
"""Llama's names in a block beside its feed-forward layer."""
MLP = mlp(f"{LAYER}.mlp", "blocks/mlp")

DECODER = (
    settings.absent(
        "mup_base_dim",
        "mup_base_head_dim",
        fix="put it into the parameters first: gpt.folded(config, params)",
    ),
    settings.only("is_encoder_decoder", False, why="encoder"),
    settings.only("add_cross_attention", False, why="attention to another sequence"),
)
NO_LATENT = settings.absent("kv_rank", "q_rank", "rope_head_dim", "v_head_dim", "rope_interleaved")
ALL_DENSE = settings.absent("moe", "dense_layers", "mtp_depth", "sinks")
NO_WINDOW = settings.absent("window", "global_every")
_VARIANTS = ("sublayer_norms", "attention_scale", "score_cap", "logit_cap")
_VARIANTS = (*_VARIANTS, "qk_norm_across", "nope_every", "local_rope_theta", "attention_gate")
_VARIANTS = (*_VARIANTS, "qkv_clip", "rope_pairs", "rope_sections")


def common(*but: str) -> Aspect:
    """Norms, scores, logits and layers as in Llama, except those fields that have their own say."""
    return settings.absent(*(name for name in _VARIANTS if name not in but))


def llama_like(
    *,
    vocab_size: int,
    embed_dim: int,
    mlp_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None,
    max_seq: int,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    tied: bool = False,
    rope_aspect: Aspect | None = None,
    head_aspects: tuple[Aspect, ...] | None = None,
    window_aspects: tuple[Aspect, ...] = (),
    variants: Aspect | None = None,
) -> tuple[Aspect, ...]:
    """What Llama and its descendants say in the same words; numbers are transformers' defaults."""
    same, fixed = settings.same, settings.fixed
    if head_aspects is None:
        head_aspects = (settings.derived("head_dim", "head_dim", head_dim, "head_size"), NO_LATENT)
    return (
        same("vocab_size", "vocab_size", vocab_size),
        same("hidden_size", "embed_dim", embed_dim),
        same("intermediate_size", "mlp_dim", mlp_dim),
        same("num_hidden_layers", "num_layers", num_layers),
        same("num_attention_heads", "num_heads", num_heads),
        same("max_position_embeddings", "max_seq", max_seq),
        same("rms_norm_eps", "norm_eps", norm_eps),
        same("tie_word_embeddings", "tied", tied),
        settings.derived("num_key_value_heads", "num_kv_heads", num_kv_heads, "kv_heads"),
        *head_aspects,
        *window_aspects,
        rope_aspect or rope(),
        variants or common(),
        fixed("norm", "rms"),
        fixed("gated", True),
        fixed("positions", "rope"),
        settings.only("rope_interleaved", False, why="interleaved rope"),
        settings.only("use_mrope", False, why="positions of images"),
        *DECODER,
    )


UNSCALED = (settings.fixed("zero_centered_norm", False), settings.fixed("embed_scale", 1.0))
PLAIN = (settings.activation("hidden_act", "silu"), *UNSCALED)
NO_QK_NORM = settings.fixed("qk_norm", False)
NO_BIASES = (settings.fixed("bias", False), settings.fixed("qkv_bias", False))
