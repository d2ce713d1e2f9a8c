"""Letters: how a rule says which dims of operands and results belong together.

A `PartitionRule` gives every dim a letter, as an einsum does; see `functron.partitioning.rules`. It
is made of an `Equation`, by `product`, `pointwise` or `make_rule`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from functron.partitioning.placement import Reduction
from functron.partitioning.shards import EquationSite, RunShard, name_arguments
from functron.program.equations import Equation, Var

Labels = tuple[tuple[str, ...], ...]
"""Of every dim of a value its letters, major to minor; a dim of size 1 may have none."""

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class PartitionRule:
    """The ways in which a mesh may divide one equation.

    Attributes:
        operands: the letters of every tensor among the arguments, in order (`Equation.operands`).
        results: of every tensor that it returns (`Equation.results`).
        sizes: of the letters.
        combined: letters that some results lack, with how these of ranks that hold parts combine.
        inside: letters that results lack, which `run` combines itself.
        whole: letters that no axis may split.
        only: letters that no axes but these may split.
        beside: letters that an axis splits together with another one.
        linear: sets of operands: results are linear in those of a set together, so that they may
            all be partial sums where the results may be.
        run: the computation of a rank, ``(site, *args, **kwargs)`` on its shards; None: the
            operation.
        sent: the bytes that a rank sends in `run`, forward, by axis; None: none, or few.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    sizes: Mapping[str, int]
    combined: Mapping[str, Reduction] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    only: Mapping[str, Collection[str]] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    run: RunShard | None = None
    sent: Callable[[EquationSite], Mapping[str, int]] | None = None

    def allows(self, letter: str, axis: str) -> bool:
        """Whether this axis is one of those that may split it."""
        return letter not in self.whole and axis in self.only.get(letter, (axis,))

    def may_split(self, letter: str, axis: str) -> bool:
        """Whether an axis may split it: it is in a result, or combined."""
        combined = letter in self.combined or letter in self.inside
        return self.allows(letter, axis) and (combined or self.is_kept(letter))

    def is_kept(self, letter: str) -> bool:
        """Whether a result has it."""
        return any(letter in dim for labels in self.results for dim in labels)


MakeRule = Callable[[Equation], PartitionRule]
"""The rule of an equation."""


def sizes_of(values: Sequence[Var], labels: Sequence[Labels]) -> dict[str, int]:
    """The sizes of the letters of dims that have one."""
    found: dict[str, int] = {}
    for value, dims in zip(values, labels, strict=True):
        for size, letters in zip(value.shape, dims, strict=True):
            if len(letters) == 1:
                found[letters[0]] = size
    return found


def make_rule(
    equation: Equation,
    operands: Sequence[Labels],
    results: Sequence[Labels],
    *,
    linear: Iterable[Iterable[int]] = (),
    whole: Iterable[str] = (),
    sizes: Mapping[str, int] = _NONE,
    **fields: Any,
) -> PartitionRule:
    """The rule of an equation with these labels.

    Args:
        linear, whole: as in `PartitionRule`.
        sizes: of letters that share a dim; those of others follow from the equation.
        fields: the others of `PartitionRule`.
    """
    values = (*equation.results, *equation.operands)
    known = {**sizes_of(values, (*results, *operands)), **sizes}
    fields |= {"linear": tuple(map(frozenset, linear)), "whole": frozenset(whole)}
    return PartitionRule(tuple(operands), tuple(results), known, **fields)


FIRST_LINEAR = ((0,),)
"""Linear in the first operand."""


def parse_labels(text: str) -> tuple[tuple[Labels, ...], tuple[Labels, ...]]:
    """The labels of operands and of results of ``"mk,kn->mn"``; ``"(ab)"`` is one dim of two."""
    sides = []
    for side in text.replace(" ", "").split("->"):
        values = []
        for word in side.split(","):
            dims = re.findall(r"\([^)]*\)|[^()]", word)
            values.append(tuple(tuple(dim.strip("()")) for dim in dims))
        sides.append(tuple(values))
    return sides[0], sides[1]


def product(text: str) -> MakeRule:
    """A product that sums over letters that its result lacks, linear in each operand."""
    operands, results = parse_labels(text)

    def rule(equation: Equation) -> PartitionRule:
        sizes = sizes_of(equation.operands, operands)
        kept = {letter for labels in results for dim in labels for letter in dim}
        combined: dict[str, Reduction] = {letter: "sum" for letter in sizes if letter not in kept}
        linear = tuple(frozenset({i}) for i in range(len(operands)))
        return PartitionRule(operands, results, sizes, combined, linear=linear)

    return rule


def pointwise(*linear: Sequence[int], run: RunShard | None = None) -> MakeRule:
    """An operation on elements, with broadcasting.

    Args:
        linear: sets of arguments, by position among all, in which it is linear together.
        run: as in `PartitionRule`.
    """

    def rule(equation: Equation) -> PartitionRule:
        shape = broadcast_shapes([value.shape for value in (*equation.operands, *equation.results)])
        result = label_dims(shape)
        operands = [align_labels(value, shape, result) for value in equation.operands]
        results = [align_labels(value, shape, result) for value in equation.results]
        return make_rule(equation, operands, results, linear=linear_sets(equation, linear), run=run)

    return rule


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that values of these broadcast to; that of a number where there are none."""
    return tuple(torch.broadcast_shapes(*shapes)) if shapes else ()


def label_dims(shape: Sequence[int], prefix: str = "d") -> Labels:
    """A letter of its own for every dim of a shape, ``d0``, ``d1``; none where it has size 1."""
    return tuple((f"{prefix}{i}",) if size != 1 else () for i, size in enumerate(shape))


def align_labels(value: Var, shape: Sequence[int], labels: Labels) -> Labels:
    """The letters of a value that broadcasts to a shape with these."""
    offset = len(shape) - len(value.shape)
    return tuple(
        labels[offset + i] if size == shape[offset + i] else ()
        for i, size in enumerate(value.shape)
    )


def linear_sets(equation: Equation, linear: Sequence[Sequence[int]]) -> tuple[frozenset[int], ...]:
    """Positions among arguments as positions among operands; none with an argument that is none."""
    places, count = {}, 0
    for i, argument in enumerate(equation.args):
        if isinstance(argument, Var):
            places[i] = count
            count += 1
    return tuple(
        frozenset(places[i] for i in row) for row in linear if all(i in places for i in row)
    )


def read_argument(equation: Equation, name: str, default: Any = None) -> Any:
    """An argument by the name that the operation's schema gives it."""
    return name_arguments(equation.op, equation.args, equation.kwargs).get(name, default)


def without_units(rule: PartitionRule) -> PartitionRule:
    """`rule` whose letters of size 1 no axis may split."""
    units = {letter for letter, size in rule.sizes.items() if size == 1}
    return replace(rule, whole=rule.whole | units)
