"""Name rules: which Hugging Face tensor holds which of our parameters, and in what layout.

A family of models is a table of them, read in both directions. A rule's `dims` says, as einops
would, how the dims of one tensor become those of ours; a dim in parentheses is a product.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from functron import tree

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
