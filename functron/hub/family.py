"""What a family of models is, and what most of them say in the same words.

Name rules: which Hugging Face tensor holds which of our parameters, and in what layout.

A family of models is a table of them, read in both directions. A rule's `dims` says, as einops
would, how the dims of one tensor become those of ours; a dim in parentheses is a product.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import Problem
from functron.hub import settings
from functron.hub.kinds import DECODER as DECODERS
from functron.hub.kinds import Config, Kind, kind_of
from functron.hub.rope import rope
from functron.hub.settings import Aspect

Box = tuple[tuple[int, int], ...]
"""From where to where, per dim."""

VOCAB = "vocab"
"""The dim that we pad: rows beyond the vocabulary's real size are zeros, and no file holds them."""


@dataclass(frozen=True)
class Rule:
    """One Hugging Face tensor, or one of each layer, and the leaves of ours that it holds.

    Attributes:
        name: the tensor's name. A field, as in ``"layers.{layer}.ln.weight"``, stands for a number:
            that of a row of our leaf, whose leading dims are the fields in order.
        dims: ``"(heads head_dim) embed -> embed heads head_dim"``: the dims of the tensor, then
            those of our leaf without the stacked ones; ``()`` is a dim of size 1 that our leaf
            lacks. One for each of `paths` where they differ.
        paths: our leaves. Several are fused into one tensor.
        fused: the tensor's dim along which the leaves of `paths` stand one after another.
        interleaved: along it they take turns instead: the first entry of each, the second of each.
    """

    name: str
    dims: str | tuple[str, ...]
    paths: tuple[str, ...]
    fused: int = 0
    interleaved: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the name, in order: our stacked dims."""
        return tuple(re.findall(r"{(\w+)}", self.name))

    def theirs(self, turn: int = 0) -> tuple[tuple[str, ...], ...]:
        """The factors of each dim of the tensor, major to minor, in the leaf ``paths[turn]``."""
        left = self._dims(turn).split("->")[0]
        return tuple(tuple(dim.strip("()").split()) for dim in re.findall(r"\([^)]*\)|\w+", left))

    def ours(self, turn: int = 0) -> tuple[str, ...]:
        """The dims of the leaf ``paths[turn]`` after the stacked ones."""
        return tuple(self._dims(turn).split("->")[1].split())

    def _dims(self, turn: int) -> str:
        return self.dims if isinstance(self.dims, str) else self.dims[turn]

    def pattern(self) -> re.Pattern[str]:
        """What matches the names of this rule's tensors; the groups are the fields."""
        parts = re.split(r"{\w+}", self.name)
        return re.compile(r"(\d+)".join(map(re.escape, parts)) + r"\Z")


@dataclass(frozen=True)
class Part:
    """One leaf of ours inside one rule's tensors.

    Attributes:
        path: of the leaf.
        shape: of the leaf, without the stacked dims, with the padding of the vocabulary.
        real: `shape` without that padding.
        start: where the part begins along the tensor's fused dim.
        theirs: the factors of each dim of the tensor; see `Rule`.
        ours: the dims of the leaf.
        step: from one of its entries to the next.
    """

    path: str
    shape: tuple[int, ...]
    real: tuple[int, ...]
    start: int
    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    step: int = 1

    @property
    def size(self) -> dict[str, int]:
        """The size of every dim of the leaf, without padding."""
        return dict(zip(self.ours, self.real, strict=True))

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of the part in the tensor."""
        return tuple(math.prod(self.size[name] for name in factors) for factors in self.theirs)


@dataclass(frozen=True)
class Layout:
    """A rule with the sizes of a model filled in.

    Attributes:
        rule: the rule.
        stacked: the sizes of the rule's fields.
        parts: the leaves.
        shape: of each Hugging Face tensor.
        numbers: those that the rows of the rule's first field have in names.
    """

    rule: Rule
    stacked: tuple[int, ...]
    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    numbers: Sequence[int] = ()

    def name(self, index: Sequence[int]) -> str:
        """The name of the tensor that holds this row of the stacked dims."""
        index = (self.numbers[index[0]], *index[1:]) if index else ()
        return self.rule.name.format(**dict(zip(self.rule.fields, index, strict=True)))

    def source(self, part: Part, box: Box) -> tuple[slice, ...]:
        """The least slices of the tensor that hold `box` of the leaf; it must not reach padding."""
        within = dict(zip(part.ours, box, strict=True))
        slices = []
        for dim, factors in enumerate(part.theirs):
            start, stop = within[factors[0]] if factors else (0, 1)
            inner = math.prod(part.size[name] for name in factors[1:])
            offset, step = (part.start, part.step) if dim == self.rule.fused else (0, 1)
            start, stop = offset + start * inner * step, offset + (stop * inner - 1) * step + 1
            slices.append(slice(start, stop, None if step == 1 else step))
        return tuple(slices)

    def to_ours(self, part: Part, box: Box, piece: torch.Tensor) -> torch.Tensor:
        """`box` of the leaf from what `source` says of the tensor: a view."""
        order = [name for factors in part.theirs for name in factors]
        within = dict(zip(part.ours, box, strict=True))
        outer = {factors[0] for factors in part.theirs if factors}
        sizes = [
            within[name][1] - within[name][0] if name in outer else part.size[name]
            for name in order
        ]
        piece = piece.reshape(sizes)
        for dim, name in enumerate(order):
            if name not in outer:
                start, stop = within[name]
                piece = piece.narrow(dim, start, stop - start)
        return piece.permute([order.index(name) for name in part.ours])

    def to_theirs(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor from the whole leaves of `parts`, in their order, without stacked dims."""
        pieces = []
        for part, leaf in zip(self.parts, leaves, strict=True):
            for dim, size in enumerate(part.real):
                leaf = leaf.narrow(dim, 0, size)
            order = [name for factors in part.theirs for name in factors]
            leaf = leaf.permute([part.ours.index(name) for name in order])
            pieces.append(leaf.reshape(part.their_shape))
        if len(pieces) == 1:
            return pieces[0]
        dim = self.rule.fused
        if self.rule.interleaved:
            return torch.stack(pieces, dim + 1).flatten(dim, dim + 1)
        return torch.cat(pieces, dim)


def layouts(
    rules: Sequence[Rule],
    defs: tree.Tree,
    vocab_size: int,
    numbers: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> list[Layout]:
    """The rules that a model with these `ParamDef` uses, with its sizes.

    A rule whose leaves the model lacks (biases, say) is left out.

    Args:
        rules: of a family.
        defs: of the model.
        vocab_size: without padding.
        numbers: by the first name in the path of stacked leaves, the numbers of their rows, if not
            counted from 0.

    Raises:
        ValueError: some leaves stand in no rule: this family has no such models.
    """
    shapes = {path: d.shape for path, d in zip(tree.paths(defs), tree.leaves(defs), strict=True)}
    used = [rule for rule in rules if rule.paths[0] in shapes]
    found = [_layout(rule, shapes, vocab_size, numbers) for rule in used]
    held = [part.path for layout in found for part in layout.parts]
    missing = sorted(shapes.keys() - set(held))
    if missing:
        raise ValueError(f"no tensors of this family hold {', '.join(missing)}")
    assert len(held) == len(set(held)), held
    return found


def tensors(found: Sequence[Layout]) -> Iterator[tuple[Layout, tuple[int, ...]]]:
    """Every Hugging Face tensor, as its layout and its numbers, layer by layer."""
    for _, group in itertools.groupby(
        found, lambda layout: (layout.rule.fields[:1], tuple(layout.numbers))
    ):
        members = list(group)
        if not members[0].stacked:
            yield from ((layout, ()) for layout in members)
            continue
        for first in range(members[0].stacked[0]):
            for layout in members:
                for rest in itertools.product(*map(range, layout.stacked[1:])):
                    yield layout, (first, *rest)


def _layout(
    rule: Rule,
    shapes: Mapping[str, tuple[int, ...]],
    vocab_size: int,
    numbers: Mapping[str, Sequence[int]],
) -> Layout:
    count = len(rule.fields)
    parts, start = [], 0
    for turn, path in enumerate(rule.paths):
        shape, ours = shapes[path][count:], rule.ours(turn)
        names = zip(ours, shape, strict=True)
        real = tuple(vocab_size if name == VOCAB else size for name, size in names)
        begin, step = (turn, len(rule.paths)) if rule.interleaved else (start, 1)
        parts.append(Part(path, shape, real, begin, rule.theirs(turn), ours, step))
        start += parts[-1].their_shape[rule.fused]
    whole = list(parts[0].their_shape)
    whole[rule.fused] = start
    stacked = shapes[rule.paths[0]][:count]
    named = numbers.get(rule.paths[0].split("/")[0], range(stacked[0])) if count else ()
    return Layout(rule, stacked, tuple(parts), tuple(whole), named)


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
