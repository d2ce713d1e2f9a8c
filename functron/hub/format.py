"""Formats of Hugging Face models: the names and layouts of tensors, and config.json.

A `HubFormat` is a table of name rules and of the entries of config.json, both used in both
directions. A rule's `dims` describes how the dims of a tensor become those of our leaf, in einops'
notation; a dim in parentheses is a product.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem
from functron.hub.entries import HubEntry, write_entries
from functron.models.family import GPT, Config, Family, family_of, field_text
from functron.spmd.params import ParamDef, pieces_of

LeafBox = tuple[tuple[int, int], ...]
"""Start and end, per dim."""

VOCAB = "vocab"
"""The dim that we pad with zeros, which files do not have."""


@dataclass(frozen=True)
class NameRule:
    """A Hugging Face tensor, or one of each layer, and the leaves of ours that it holds.

    Attributes:
        name: of the tensor. A field, as in ``"layers.{layer}.ln.weight"``, is the index of a row of
            our leaf, whose leading dims are the fields in order.
        dims: ``"(heads head_dim) embed -> embed heads head_dim"``: the dims of the tensor, then
            those of our leaf without the stacked ones; ``()`` is a dim of size 1 that our leaf
            lacks. One for each of `paths` if they differ.
        paths: our leaves, or `pieces_of` leaves; several are fused into one tensor.
        fused: the tensor's dim along which leaves are concatenated.
        interleaved: leaves are interleaved along it instead.
        grouped: leaves are cut into as many equal parts along it as the last has entries, which
            stand part by part: the queries of a key head, its key and its value (Falcon, GPT-NeoX).
    """

    name: str
    dims: str | tuple[str, ...]
    paths: tuple[str, ...]
    fused: int = 0
    interleaved: bool = False
    grouped: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the name: our stacked dims."""
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
        """A pattern of the names of this rule's tensors; groups are the fields."""
        parts = re.split(r"{\w+}", self.name)
        return re.compile(r"(\d+)".join(map(re.escape, parts)) + r"\Z")


@dataclass(frozen=True)
class LeafPart:
    """One leaf of ours inside one rule's tensors.

    Attributes:
        path: of the leaf.
        shape: of the leaf, without the stacked dims, with the padding of the vocabulary.
        real: `shape` without that padding.
        start: of the part along the tensor's fused dim; of grouped ones, in a group.
        theirs: the factors of each dim of the tensor; see `NameRule`.
        ours: the dims of the leaf.
        begin: of the part in the leaf, per dim: 0, except for a piece of it.
        step: between its entries.
        groups: how many groups the fused dim has, of `step` rows each; 0: none.
    """

    path: str
    shape: tuple[int, ...]
    real: tuple[int, ...]
    start: int
    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    begin: tuple[int, ...]
    step: int = 1
    groups: int = 0

    @property
    def size(self) -> dict[str, int]:
        """The size of every dim of the leaf, without padding."""
        return dict(zip(self.ours, self.real, strict=True))

    @property
    def joined(self) -> bool:
        """Whether the leaf has other parts, too."""
        return _SLOT in self.ours

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of the part in the tensor."""
        return tuple(math.prod(self.size[name] for name in factors) for factors in self.theirs)


@dataclass(frozen=True)
class HubLayout:
    """A rule with the sizes of a model.

    Attributes:
        rule: the rule.
        stacked: sizes of the rule's fields.
        parts: the leaves.
        shape: of each Hugging Face tensor.
        numbers: of the rows of the rule's first field, in names.
    """

    rule: NameRule
    stacked: tuple[int, ...]
    parts: tuple[LeafPart, ...]
    shape: tuple[int, ...]
    numbers: Sequence[int] = ()

    def name(self, index: Sequence[int]) -> str:
        """The name of the tensor of a row of the stacked dims."""
        index = (self.numbers[index[0]], *index[1:]) if index else ()
        return self.rule.name.format(**dict(zip(self.rule.fields, index, strict=True)))

    def source(self, part: LeafPart, box: LeafBox) -> tuple[slice, ...]:
        """The smallest slices of the tensor that hold `box` of the leaf, without padding."""
        within = dict(zip(part.ours, box, strict=True))
        slices = []
        for dim, factors in enumerate(part.theirs):
            start, stop = within[factors[0]] if factors else (0, 1)
            inner = math.prod(part.size[name] for name in factors[1:])
            if dim == self.rule.fused and part.groups:
                first, last = _find_groups(part, dim, start * inner, stop * inner)
                slices.append(slice(first * part.step, last * part.step))
                continue
            offset, step = (part.start, part.step) if dim == self.rule.fused else (0, 1)
            start, stop = offset + start * inner * step, offset + (stop * inner - 1) * step + 1
            slices.append(slice(start, stop, None if step == 1 else step))
        return tuple(slices)

    def to_ours(self, part: LeafPart, box: LeafBox, piece: torch.Tensor) -> torch.Tensor:
        """`box` of the leaf from the slices of `source`: a view, but of a grouped rule's."""
        order = [name for factors in part.theirs for name in factors]
        within = dict(zip(part.ours, box, strict=True))
        if part.groups:
            piece = self._leave_out_others(part, within, piece)
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

    def _leave_out_others(
        self, part: LeafPart, within: Mapping[str, tuple[int, int]], piece: torch.Tensor
    ) -> torch.Tensor:
        """The rows of this part among those of its groups."""
        dim = self.rule.fused
        outer, *rest = part.theirs[dim]
        inner, rows = math.prod(part.size[name] for name in rest), part.their_shape[dim]
        start, stop = (place * inner for place in within[outer])
        first, _ = _find_groups(part, dim, start, stop)
        each = rows // part.groups
        piece = piece.unflatten(dim, (-1, part.step)).narrow(dim + 1, part.start, each)
        return piece.flatten(dim, dim + 1).narrow(dim, start - first * each, stop - start)

    def to_theirs(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor of the leaves of `parts`, without stacked dims."""
        pieces = []
        for part, leaf in zip(self.parts, leaves, strict=True):
            for dim, (start, size) in enumerate(zip(part.begin, part.real, strict=True)):
                leaf = leaf.narrow(dim, start, size)
            order = [name for factors in part.theirs for name in factors]
            leaf = leaf.permute([part.ours.index(name) for name in order])
            pieces.append(leaf.reshape(part.their_shape))
        if len(pieces) == 1:
            return pieces[0]
        dim = self.rule.fused
        if self.rule.interleaved:
            return torch.stack(pieces, dim + 1).flatten(dim, dim + 1)
        if self.rule.grouped:
            apart = [x.unflatten(dim, (self.parts[0].groups, -1)) for x in pieces]
            return torch.cat(apart, dim + 1).flatten(dim, dim + 1)
        return torch.cat(pieces, dim)


def _find_groups(part: LeafPart, dim: int, start: int, stop: int) -> tuple[int, int]:
    """The first group that has rows `start` to `stop` of the part, and the one after the last."""
    each = part.their_shape[dim] // part.groups
    return start // each, -(-stop // each)


def layouts(
    rules: Sequence[NameRule],
    defs: tree.Tree,
    vocab_size: int,
    numbers: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> list[HubLayout]:
    """The rules that apply to a model, with its sizes; rules of leaves that it lacks do not.

    Args:
        vocab_size: without padding.
        numbers: by the first name in the path of stacked leaves, numbers of their rows that do not
            start at 0.

    Raises:
        ValueError: leaves are in no rule: this format has no such models.
    """
    places = {
        place.alone: place
        for path, d in zip(tree.paths(defs), tree.leaves(defs), strict=True)
        for place in _list_places(path, d)
    }
    used = [rule for rule in rules if rule.paths[0] in places]
    named = [path for rule in used for path in rule.paths]
    missing = sorted(places.keys() - set(named))
    if missing:
        raise ValueError(f"no tensors of this family hold {', '.join(missing)}")
    assert len(named) == len(set(named)), named
    return [_make_layout(rule, places, vocab_size, numbers) for rule in used]


_SLOT = "slot"
"""The second to last dim of leaves that are made of pieces."""


class _LeafPlace(NamedTuple):
    """A leaf of the model, or a piece of one, that rules name.

    Attributes:
        alone: its path in rules.
        path: of the model's leaf.
        shape: in that leaf.
        begin: of the piece, per dim.
        joined: whether it is a piece.
    """

    alone: str
    path: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    joined: bool

    def dims(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The dims of the part; `names` are those of a separate leaf."""
        return (*names[:-1], _SLOT, names[-1]) if self.joined else names

    def factors(self, dim: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
        """The factors of a tensor's dim, with a piece's slots."""
        if not self.joined or (outer := names[-2:][0]) not in dim:
            return dim
        at = dim.index(outer) + 1
        return (*dim[:at], _SLOT, *dim[at:])


def _list_places(path: str, d: ParamDef) -> list[_LeafPlace]:
    if not d.pieces:
        return [_LeafPlace(path, path, d.shape, (0,) * len(d.shape), False)]
    before = (0,) * (len(d.shape) - 2)
    return [
        _LeafPlace(p.path, path, (*d.shape[:-2], p.size, d.shape[-1]), (*before, p.start, 0), True)
        for p in pieces_of(path, d)
    ]


def tensors(found: Sequence[HubLayout]) -> Iterator[tuple[HubLayout, tuple[int, ...]]]:
    """The layout and indices of every Hugging Face tensor, layer by layer."""
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


def _make_layout(
    rule: NameRule,
    places: Mapping[str, _LeafPlace],
    vocab_size: int,
    numbers: Mapping[str, Sequence[int]],
) -> HubLayout:
    count = len(rule.fields)
    parts, start = [], 0
    for turn, path in enumerate(rule.paths):
        place, alone = places[path], rule.ours(turn)
        shape, ours = place.shape[count:], place.dims(alone)
        names = zip(ours, shape, strict=True)
        real = tuple(vocab_size if name == VOCAB else size for name, size in names)
        theirs = tuple(place.factors(dim, alone) for dim in rule.theirs(turn))
        first, step = (turn, len(rule.paths)) if rule.interleaved else (start, 1)
        begin = place.begin[count:]
        parts.append(LeafPart(place.path, shape, real, first, theirs, ours, begin, step))
        start += parts[-1].their_shape[rule.fused]
    whole = list(parts[0].their_shape)
    whole[rule.fused] = start
    if rule.grouped:
        parts = _group(parts, rule.fused)
    stacked = places[rule.paths[0]].shape[:count]
    named = numbers.get(rule.paths[0].split("/")[0], range(stacked[0])) if count else ()
    return HubLayout(rule, stacked, tuple(parts), tuple(whole), named)


def _group(parts: Sequence[LeafPart], dim: int) -> list[LeafPart]:
    """The parts of a rule that is grouped along `dim`, with their places in a group."""
    last = parts[-1]
    groups = last.size[last.theirs[dim][0]]
    sizes = [part.their_shape[dim] // groups for part in parts]
    starts = itertools.accumulate(sizes, initial=0)
    own = zip(parts, starts, strict=False)
    return [replace(x, start=start, step=sum(sizes), groups=groups) for x, start in own]


@dataclass(frozen=True)
class Surplus:
    """Tensors that transformers' models have and ours do not need.

    They are ignored when reading. A model is stored with those of its original folder if its config
    is still the same; otherwise with constants.

    Attributes:
        holds: ``(config, name)`` to whether the tensor is one.
        name: the name in files that we write, by its name in any naming.
        constants: ``(config)`` to shapes and values, by name, of those that are required.
        exact: others than these are refused, as they would change what the model computes.
    """

    holds: Callable[[Any, str], bool]
    name: Callable[[str], str]
    constants: Callable[[Any], Mapping[str, tuple[tuple[int, ...], float]]]
    exact: bool = False


@dataclass(frozen=True)
class HubFormat:
    """The format of a class of transformers' models.

    Attributes:
        model_type: in config.json.
        architecture: the class of transformers.
        rules: of tensors in files.
        entries: of config.json. Fields of our config without an entry must have their defaults.
        in_memory: rules of transformers' models in memory, if they differ from files; only read.
        prefix: of the names of tensors; base models are stored without it.
        max_seq: the entry of config.json with the longest sequence; empty: there is none.
        unused: regular expressions of tensors to ignore.
        copies: regular expressions of tensors that repeat one of our leaves, and its path.
        ignored: entries of config.json that change nothing, beside `functron.hub.entries.GENERAL`.
        family: the architecture.
        naming: in place of `rules`, if names depend on the model or there are several namings: all
            of them, of which the first is written, by the config and a config.json or {}.
        surplus: tensors that ours lack.
        describes: the file that describes the model, for messages.
        stand_ins: tensors that files may lack, and those that they are equal to then.
        aliases: other names of the same in ``model_type``; they are kept where a model has them.
    """

    model_type: str
    architecture: str
    rules: tuple[NameRule, ...]
    entries: tuple[HubEntry, ...]
    in_memory: tuple[NameRule, ...] = ()
    prefix: str = "model."
    max_seq: str = "max_position_embeddings"
    unused: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    copies: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    family: Family = GPT
    naming: Callable[[Any, Mapping[str, Any]], Sequence[Sequence[NameRule]]] | None = None
    surplus: Surplus | None = None
    describes: str = "config.json"
    stand_ins: tuple[tuple[str, str], ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def looks_ahead(self) -> bool:
        """Whether its models may have multi-token prediction modules."""
        return any("mtp_depth" in entry.ours for entry in self.entries)

    def namings(
        self, config: Config, table: Mapping[str, Any] = MappingProxyType({})
    ) -> list[Sequence[NameRule]]:
        """All namings of the model's tensors, first the one that is written with `table`."""
        named = [self.rules] if self.naming is None else self.naming(config, table)
        return [*named, self.in_memory] if self.in_memory else [*named]


def layouts_of(
    form: HubFormat, config: Config, rules: Sequence[NameRule] | None = None
) -> list[HubLayout]:
    """The `layouts` of a model in files of the format, or by other `rules`."""
    family, rules = form.family, form.namings(config)[0] if rules is None else rules
    return layouts(rules, family.defs(config), family.vocab_size(config), family.numbers(config))


def config_problems(config: Config, form: HubFormat) -> list[Problem]:
    """Why the format cannot express `config`; empty: it can."""
    family = form.family
    if family_of(config) is not family:
        wanted = f"{family.config.__name__}, of {family.title}"
        return [Problem("config", type(config).__name__, wanted)]
    problems: list[Problem] = []
    write_entries(form.entries, config, problems)
    covered = {name for entry in form.entries for name in entry.ours}
    covered |= {*family.free, *family.unread(config)}
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name not in covered and value != f.default:
            wanted = f"{f.default!r} in this family"
            problems.append(Problem(f.name, field_text(value), wanted))
    return problems


def linear(name: str, path: str, weight: str, bias: str) -> tuple[NameRule, NameRule]:
    """The rules of a linear layer: its weight ``[out, in]``, and its bias if it has one."""
    return (
        NameRule(f"{name}.weight", weight, (f"{path}/w",)),
        NameRule(f"{name}.bias", bias, (f"{path}/b",)),
    )


def norm(name: str, path: str, dim: str = "embed") -> tuple[NameRule, ...]:
    """The rules of a norm: its scale, and its bias if it has one."""
    rows = (("weight", "scale"), ("bias", "bias"), ("weight", "layer_scale"))
    return tuple(
        NameRule(f"{name}.{theirs}", f"{dim} -> {dim}", (f"{path}/{ours}",))
        for theirs, ours in rows
    )


HEADS = ("(heads head) embed -> embed heads head", "(heads head) -> heads head")
"""Dims of the weight and the bias of queries, keys and values."""
OUT = ("embed (heads head) -> heads head embed", "embed -> embed")
UP = ("mlp embed -> embed mlp", "mlp -> mlp")
DOWN = ("embed mlp -> mlp embed", "embed -> embed")
SQUARE = ("out embed -> embed out", "out -> out")
"""Dims of a linear layer from the residual stream to itself."""
EMBED = "vocab embed -> vocab embed"
UNEMBED = "vocab embed -> embed vocab"


def attention(path: str, *names: str) -> tuple[NameRule, ...]:
    """The rules of queries, keys, values and output, in this order of names."""
    layers = zip(names, ("q", "k", "v", "out"), (HEADS, HEADS, HEADS, OUT), strict=True)
    return tuple(r for name, ours, dims in layers for r in linear(name, f"{path}/{ours}", *dims))


def mlp(path: str, *names: str) -> tuple[NameRule, ...]:
    """The rules of a feed-forward layer: its projections gate (if there is one), up and down."""
    layers = zip(
        names, ("gate", "up", "down")[-len(names) :], (UP, UP, DOWN)[-len(names) :], strict=True
    )
    return tuple(r for name, ours, dims in layers for r in linear(name, f"{path}/{ours}", *dims))


def under(path: str, rules: Sequence[NameRule]) -> tuple[NameRule, ...]:
    """The rules of a model that is a part of another."""
    return tuple(replace(rule, paths=tuple(f"{path}/{p}" for p in rule.paths)) for rule in rules)
