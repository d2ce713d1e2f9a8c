"""Families of models: the functions, presets and facts of each architecture, as one value.

Training, reading and writing of weights ask the family of a config and do not ask which
architecture it is; all functions are pure, and take the config first.

`GPT` is the decoder. Applications add families by their table (`functron.apps.PLUGINS`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from functron.core.errors import Problem, list_plugins, load_plugin, refuse
from functron.core.settings import Needs
from functron.core.typing import Tensor
from functron.data.sampling import SampleMaker
from functron.models import decoder, gpt
from functron.models.config import GPT_NEEDS, Dtype, GPTConfig, Named, TextConfig
from functron.models.options import ModelOptions
from functron.nn.moe import MoEConfig

Config = Any
"""The config of a model of any family: a frozen dataclass that has a `dtype`.

Those that ``functron train`` trains are `TextConfig`."""

OptionName = Literal["adapters", "context", "expert_axes", "kernels", "loss_chunk_tokens", "matmul"]
"""Fields of `ModelOptions` that the losses of some families read, beside those of all."""


def _keep_text(config: Any, tokenizer: Any) -> SampleMaker:
    return SampleMaker(config.data.seq, config.architecture.vocab_size)


@dataclass(frozen=True)
class Objective:
    """A family's task in training; its functions take the `TrainConfig` of a run first.

    ``Objective()`` is to predict the next token.

    Attributes:
        plan_samples: ``(config, tokenizer)`` to the `functron.data.sampling.SampleMaker` of a run;
            the tokenizer is None where that of tokens on disk is not known.
        settings: the settings that it reads, of those of the data tagged ``"objective"``.
        count_targets: ``(config)`` to how many targets a sample has; None: one for each token.
        find_problems: ``(config, mesh)`` to the problems of its settings, without reading a file;
            the mesh is None where it cannot be read.
        compares_rows: ``(config)`` to whether the loss of a sample depends on the others of its
            batch: it is then not cut into microbatches, and evaluation keeps the run's batch.
        prompt: a prompt to try the model with, where words of its data take the place of ``{}``;
            None: it answers none.
        open_prompts: ``(config, tokenizer)`` to what has ``encode(text, tokenizer)``,
            ``decode(tokens, tokenizer)`` and the id ``end``, for `Family.respond`.
    """

    plan_samples: Callable[..., SampleMaker] = _keep_text
    settings: tuple[str, ...] = ()
    count_targets: Callable[[Any], int] | None = None
    find_problems: Callable[..., Iterable[Problem]] = lambda config, mesh: ()
    compares_rows: Callable[[Any], bool] = lambda config: False
    prompt: str | None = "{}"
    open_prompts: Callable[..., Any] | None = None

    @property
    def predicts_next(self) -> bool:
        """Whether the next token is what it predicts."""
        return self.plan_samples is _keep_text


NEXT_TOKEN = Objective()

UNEVEN = frozenset({"uneven"})
"""`Family.rules_settings` where rules take logical axes that are split unevenly."""


def _not_counted(config: Any, *sizes: int) -> NoReturn:
    title, fix = "cannot count the FLOPs of a step", "count those of its program: ft.trace(fn)"
    refuse(title, "config", type(config).__name__, "a model that functron train trains", fix)


@dataclass(frozen=True)
class StageFunctions:
    """How a family's models are cut into the stages of a pipeline; functions of the config first.

    Attributes:
        num_layers: ``(config)`` to how many layers there are to divide.
        uses: ``(config)`` to which stages use each entry of the parameters, for
            `functron.pipeline.Partition`.
        loss: ``(config, part, params, x, batch, options, *, key)`` to what a stage passes on, and
            at the last one to the sum of the losses.
    """

    num_layers: Callable[[Any], int]
    uses: Callable[[Any], Mapping[str, Any]]
    loss: Callable[..., Any]


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
            `Objective.count_targets` also of how many targets a sample has.
        settings: the fields of the options that `loss` reads besides.
        rules_settings: the keywords that `rules` takes besides.
        draws: ``(config, options)`` to whether `loss` may draw random numbers; if not, its key is
            None, and a step makes none.
        adapters: whether LoRA has a place in it.
        packs: whether its loss keeps the documents of packed samples apart.
        objective: what ``functron train`` has it learn, such as `NEXT_TOKEN`; None: it does not
            train it.
        make: ``(fields, dtype)`` to a config, where that is not the type's constructor.
        vocab_size: ``(config)`` to the rows of the dim that is padded, without the padding.
        free: fields of the config that leave the model what it is, but for the rounding of its
            dtype: of training, initial values and padding.
        needs: what fields of the config need, to have an effect.
        unread: ``(config)`` to fields that nothing reads in a model like that.
        canonical: ``(config)`` to the config with what is derived written out, and what nothing
            reads at its default: two configs of one model are equal there, but for `free`.
        numbers: ``(config)`` to the numbers in the whole model of the layers of each stack, by the
            stack's name, where they are not counted from 0.
        without_extras: ``(config)`` to the same model whose loss has no terms that are for training
            only, such as those of routers.
        measures: ``(config)`` to functions ``(config, params, batch, options)`` by name: to other
            sums over targets than that of the losses, whose means evaluation gives, such as
            accuracy; or to pairs ``[rows, 2]`` of what is found and what is wanted, NaN in rows
            without a target, whose rank correlation (Spearman's) it gives.
        schemes: by the word before a colon, what makes a config of a model's whole name, such as
            ``hf-module:PATH``; beside presets.
        stages: the functions of the stages of pipelines; None: it has none.
    """

    name: str
    title: str
    config: type
    presets: Mapping[str, Any]
    defs: Callable[..., dict]
    rules: Callable
    loss: Callable
    num_targets: Callable
    flops_per_token: Callable[..., int] = _not_counted
    settings: frozenset[OptionName] = field(default_factory=frozenset)
    rules_settings: frozenset[str] = field(default_factory=frozenset)
    draws: Callable[[Any, ModelOptions], bool] = lambda config, options: True
    adapters: bool = False
    packs: bool = False
    objective: Objective | None = None
    make: Callable[[Mapping[str, Any], Dtype], Config] | None = None
    vocab_size: Callable[[Any], int] = lambda config: config.vocab_size
    free: tuple[str, ...] = ("dropout", "init_stddev", "vocab_multiple", "dtype")
    needs: Needs = field(default_factory=dict)
    unread: Callable[[Any], tuple[str, ...]] = lambda config: ()
    canonical: Callable[[Any], Config] = lambda config: config
    numbers: Callable[[Any], Mapping[str, Sequence[int]]] = lambda config: {}
    without_extras: Callable[[Any], Config] = lambda config: config
    measures: Callable[[Any], Mapping[str, Callable]] = lambda config: {}
    schemes: Mapping[str, Callable[[str], Config]] = field(default_factory=dict)
    iterate_logits: Callable[..., Any] | None = None
    respond: Callable[..., Tensor] | None = None
    stages: StageFunctions | None = None

    def __repr__(self) -> str:
        return f"<Family {self.name}: {self.title}>"

    def has_details(self, config: Config) -> bool:
        """Whether the loss of `config` has several terms: those of `gpt.loss_and_details`."""
        return isinstance(config, GPTConfig) and config.has_details


_GPT_FREE = (
    "dropout", "z_loss", "init_stddev", "vocab_multiple", "dtype", "mtp_weight",
    "mtp_detached", "fused_projections", "fp32_residual",
)  # fmt: skip
MOE_FREE = (
    "aux_loss", "aux", "z_loss", "balance_by", "balance_rate", "balance_decay", "jitter",
    "router_dtype", "dispatch", "capacity_factor", "capacity_over", "drop",
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
    }
    names = ("qkv_bias", "out_bias", "mlp_bias")
    flags = [config.bias or getattr(config, name) for name in names]
    if config.moe is not None and "dense" not in config.stacks:  # nothing reads the last
        flags[2] = flags[0] and flags[1]
    changes |= dict(zip(names, flags, strict=True)) | {"bias": all(flags)}
    if config.kv_rank:
        changes["latent_eps"] = config.latent_norm_eps
    else:
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
        changes |= {} if "dense" in config.stacks else {"mlp_dim": GPTConfig.mlp_dim}
    return replace(config, **changes)


def _gpt_numbers(config: GPTConfig) -> dict[str, Sequence[int]]:
    """Layers of both stacks are counted through, and modules that predict tokens further ahead from
    the last one."""
    ahead = range(config.num_layers, config.num_layers + config.mtp_modules)
    return {**config.stacks, "mtp": ahead}


GPT = Family(
    "gpt", "a GPT", GPTConfig, gpt.PRESETS, gpt.defs, gpt.rules, gpt.loss, gpt.num_targets,
    gpt.flops_per_token,
    settings=frozenset({"context", "expert_axes", "kernels", "loss_chunk_tokens", "matmul"}),
    rules_settings=frozenset({"expert_axes"}) | UNEVEN, draws=decoder.draws, adapters=True,
    packs=True, objective=NEXT_TOKEN, free=_GPT_FREE, needs=GPT_NEEDS, canonical=_gpt_canonical,
    numbers=_gpt_numbers, without_extras=lambda config: replace(config, z_loss=0.0, mtp_depth=0),
    stages=StageFunctions(lambda config: config.num_layers, gpt.uses, gpt.stage_loss),
)  # fmt: skip
"""The decoder, the family that the library itself has."""


@functools.cache
def families() -> Mapping[str, Family]:
    """All families by name, which is that of their table in a configuration.

    The decoder comes first; the others are those of applications, by the group
    ``"functron.families"`` of their table.
    """
    group = "functron.families"
    others = {name: load_plugin(group, name, "family")() for name in list_plugins(group)}
    return MappingProxyType({GPT.name: GPT, **others})


@functools.cache
def trained_families() -> Mapping[str, Family]:
    """The families that ``functron train`` trains, by name."""
    trained = {name: family for name, family in families().items() if family.objective is not None}
    return MappingProxyType(trained)


@functools.cache
def list_presets() -> Mapping[str, TextConfig]:
    """The presets of the families that are trained; no two have the same name.

    Names of their `Family.schemes` are in it, too, though they are not listed.
    """
    trained = trained_families().values()
    presets = {name: config for family in trained for name, config in family.presets.items()}
    return Named(presets, {name: make for one in trained for name, make in one.schemes.items()})


def family_of(config: object) -> Family:
    """The family that a config belongs to.

    Raises:
        TypeError: it belongs to none of them.
    """
    if isinstance(config, GPTConfig):
        return GPT
    for family in families().values():
        if isinstance(config, family.config):
            return family
    known = ", ".join(family.config.__name__ for family in families().values())
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
