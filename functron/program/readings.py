"""Readings of values, of how they lie on a mesh, and how equations carry them on.

A reading says of a value which axes split which of its dims, over which axes it is partial, and
over which it differs in a way that is not known. An equation of this rank's shards is read as one
of whole values by the rule of its operation, which gives dims letters as an einsum does, as rules
of `functron.partitioning` do for whole values. What no rule tells is varying.

A dim that several axes split, or one that was joined from others, has digits, major to minor: of
every axis how many blocks of the dim a rank holds, each of them a part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from functron.program.equations import Equation, Var
from functron.spmd.spec import P, dim_axes


@dataclass(frozen=True)
class DimSplit:
    """An axis that splits a dim.

    Attributes:
        blocks: how many blocks of the dim a rank holds, each of them a part of one.
        unit: where the dim was joined from one of a single place and others, whether the axis
            splits the former; None: it was not.
    """

    blocks: int
    axis: str
    unit: bool | None = field(default=None, compare=False)


DimSplits = tuple[DimSplit, ...]
"""The axes that split one dim, major to minor."""


@dataclass(frozen=True)
class ValueReading:
    """How a value lies on a mesh, as far as it is known.

    Attributes:
        dims: of every dim the axes that split it.
        partial, varying, unknown: axes; those named nowhere hold the same.
        even: dims along which the same numbers stand at all places, so that it is as well the part
            of a value that is split along them.
        zero: it is zero everywhere.
        minor: of every dim the one that was split off it and would be joined again, if any.
        index: it is this rank's index on that axis, and nothing else.
    """

    dims: tuple[DimSplits, ...]
    partial: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    even: frozenset[int] = frozenset()
    zero: bool = False
    minor: tuple[int | None, ...] = ()
    index: str | None = None

    @property
    def split(self) -> dict[str, int]:
        """The dim of every axis that splits one."""
        return {d.axis: dim for dim, digits in enumerate(self.dims) for d in digits}

    @property
    def axes(self) -> frozenset[str]:
        """Those over which it is not the same."""
        return self.partial | self.varying | self.unknown | frozenset(self.split)

    @property
    def bare(self) -> ValueReading:
        """The same without what is known of its numbers."""
        return ValueReading(self.dims, self.partial, self.varying, self.unknown)

    def losing(self, axes: Collection[str]) -> ValueReading:
        """The same, varying over these axes in a way that is not known."""
        lost = frozenset(axes) - self.unknown
        kept = self.without(lost)
        return replace(kept, varying=kept.varying | lost)

    def without(self, axes: Collection[str]) -> ValueReading:
        """The same, replicated over these axes."""
        gone = frozenset(axes)
        dims = tuple(tuple(d for d in digits if d.axis not in gone) for digits in self.dims)
        partial, varying, unknown = (x - gone for x in (self.partial, self.varying, self.unknown))
        return replace(self, dims=dims, partial=partial, varying=varying, unknown=unknown)

    def minor_of(self, dim: int) -> int | None:
        return self.minor[dim] if self.minor else None


def read_whole(value: Var, **fields: Any) -> ValueReading:
    """The reading of a value that no axis splits."""
    return ValueReading(((),) * len(value.shape), **fields)


def read_spec(spec: P, num_dims: int, sizes: Mapping[str, int]) -> ValueReading:
    """The reading of a spec, on a mesh with axes of these sizes."""
    rows = dim_axes(spec, num_dims)
    return ValueReading(tuple(tuple(DimSplit(1, a) for a in axes if a in sizes) for axes in rows))


def join_readings(one: ValueReading, other: ValueReading) -> ValueReading:
    """The reading of a value that is one of two."""
    unknown = one.unknown | other.unknown
    lost = one.varying | other.varying
    for axis in one.partial ^ other.partial:
        lost |= set() if (other if axis in one.partial else one).zero else {axis}
    dims = []
    for dim, (mine, others) in enumerate(zip(one.dims, other.dims, strict=True)):
        dims.append(mine or others)
        fits = (dim in one.even and not mine) or (dim in other.even and not others)
        if mine != others and not fits:
            lost |= {d.axis for d in (*mine, *others)}
    made = ValueReading(tuple(dims), one.partial | other.partial).losing(lost - unknown)
    even, zero = one.even & other.even, one.zero and other.zero
    return replace(made.without(unknown), unknown=unknown, even=even, zero=zero)


DimLetters = tuple[tuple[str, ...], ...]
"""Of every dim of a value its letters, major to minor; a dim that is broadcast has none."""


@dataclass(frozen=True)
class _DimRule:
    """How the dims of an equation's operands and results belong together, as an einsum says it.

    Attributes:
        operands, results: their letters.
        sizes: of the letters, on this rank.
        summed: letters that results lack since they are summed.
        whole: letters along which the operation is another one on parts.
        linear: sets of operands, by position, in which it is linear together.
        unread: operands of which results do not depend.
        copies: results have the numbers of the first operand, or are zero where operands are.
        source: of a view or a copy, the dims of the operand that dims of the result are, or are the
            last part of.
        minor: the dims of the result that are split off others; see `ValueReading`.
    """

    operands: tuple[DimLetters, ...]
    results: tuple[DimLetters, ...]
    sizes: Mapping[str, int]
    summed: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    unread: frozenset[int] = frozenset()
    copies: bool = False
    source: Mapping[int, int] = field(default_factory=dict)
    minor: Mapping[int, int] = field(default_factory=dict)


def _letters_of(
    labels: DimLetters, reading: ValueReading, sizes: Mapping[str, int]
) -> tuple[dict[str, DimSplits], set[str], set[str]]:
    """The digits of an operand's letters, axes that are at none, and letters of even dims."""
    found: dict[str, DimSplits] = {}
    lost: set[str] = set()
    even: set[str] = set()
    for dim, (letters, digits) in enumerate(zip(labels, reading.dims, strict=True)):
        found |= dict.fromkeys(letters, ())
        if not digits and (dim in reading.even or all(sizes[x] == 1 for x in letters)):
            even |= {*letters}
        for digit in digits:
            places = _find_places(digit, letters, sizes)
            if len(places) > 1 and digit.unit is not None and sizes[letters[0]] == 1:
                places = places[:1] if digit.unit else places[1:]
            if len(places) != 1:
                lost.add(digit.axis)
                continue
            letter, blocks = places[0]
            found[letter] = (*found[letter], replace(digit, blocks=blocks))
    return found, lost, even


def _find_places(
    digit: DimSplit, letters: Sequence[str], sizes: Mapping[str, int]
) -> list[tuple[str, int]]:
    """The letters of a dim that a digit may be of, each with its blocks in the letter."""
    found, start = [], 1
    for letter in letters:
        blocks, size = digit.blocks // start, sizes[letter]
        # a boundary between letters is the start of the second
        inside = blocks < size or size == 1 or letter == letters[-1]
        if blocks and digit.blocks % start == 0 and size % blocks == 0 and inside:
            found.append((letter, blocks))
        start *= max(size, 1)
    return found


def _apply(rule: _DimRule, operands: Sequence[ValueReading]) -> list[ValueReading]:
    """The readings of the results of an equation with this rule."""
    operands = [
        ValueReading(((),) * len(x.dims)) if i in rule.unread else x for i, x in enumerate(operands)
    ]
    unknown = frozenset().union(*(x.unknown for x in operands))
    lost: set[str] = set().union(*(x.varying for x in operands))
    letters: dict[str, DimSplits] = {}
    uneven: set[str] = set()
    for labels, x in zip(rule.operands, operands, strict=True):
        found, none, even = _letters_of(labels, x, rule.sizes)
        lost |= none
        uneven |= found.keys() - even
        for letter, digits in found.items():
            if letter not in even and letters.setdefault(letter, digits) != digits:
                lost |= {d.axis for d in (*digits, *letters[letter])}
    places = [d.axis for digits in letters.values() for d in digits]
    lost |= {axis for axis in places if places.count(axis) > 1}
    lost |= {d.axis for letter in rule.whole for d in letters.get(letter, ())}
    partial = frozenset().union(*(x.partial for x in operands))
    for axis in partial:
        own = {i for i, x in enumerate(operands) if axis in x.partial}
        able = own | {i for i, x in enumerate(operands) if x.zero}
        if axis in places or not any(own <= s <= able for s in rule.linear):
            lost.add(axis)
    zero = bool(rule.copies and rule.linear) and all(x.zero for x in operands)
    made = []
    for labels in rule.results:
        dims = tuple(_join_letters(row, letters, rule.sizes) for row in labels)
        kept = {d.axis for digits in dims for d in digits}
        summed = {d.axis for letter in rule.summed for d in letters.get(letter, ())}
        gone = (lost | ({*places} - kept - summed)) - unknown
        reading = ValueReading(dims, partial | (summed - kept)).losing(gone).without(unknown)
        minor = _follow_minor(rule, operands[0], len(dims)) if rule.source else ()
        same = {i for i, row in enumerate(labels) if not {*row} & (uneven | rule.whole)}
        found = frozenset(i for i in same if not dims[i])
        made.append(replace(reading, unknown=unknown, even=found, zero=zero, minor=minor))
    return made


def _join_letters(
    row: Sequence[str], letters: Mapping[str, DimSplits], sizes: Mapping[str, int]
) -> DimSplits:
    """The digits of a dim of these letters."""
    start, found = 1, []
    joins = len(row) > 1 and sizes[row[0]] == 1
    for place, letter in enumerate(row):
        for digit in letters.get(letter, ()):
            unit = place == 0 if joins else digit.unit
            found.append(DimSplit(start * digit.blocks, digit.axis, unit))
        start *= sizes[letter]
    return tuple(found)


def _follow_minor(rule: _DimRule, x: ValueReading, num_dims: int) -> tuple[int | None, ...]:
    """The minor dim of every dim of a result; see `ValueReading`."""
    found: list[int | None] = []
    for dim in range(num_dims):
        old = rule.source.get(dim)
        was = None if old is None else x.minor_of(old)
        goes = next((new for new, o in rule.source.items() if o == was), None)
        found.append(rule.minor.get(dim, None if was is None else goes))
    return tuple(found)


# --- the rules of operations


def _dims(shape: Sequence[int], prefix: str = "d") -> DimLetters:
    return tuple((f"{prefix}{i}",) for i in range(len(shape)))


def _make(equation: Equation, operands, results, **fields: Any) -> _DimRule:
    """A rule whose letters have the sizes of the dims that they are alone in."""
    sizes: dict[str, int] = dict(fields.pop("sizes", {}))
    rows = zip((*equation.operands, *equation.results), (*operands, *results), strict=True)
    for value, labels in rows:
        for size, row in zip(value.shape, labels, strict=True):
            if len(row) == 1:
                sizes.setdefault(row[0], size)
    fields |= {k: frozenset(fields[k]) for k in ("summed", "whole", "unread") if k in fields}
    fields |= {"linear": tuple(map(frozenset, fields.get("linear", ())))}
    return _DimRule(tuple(operands), tuple(results), sizes, **fields)


def _pointwise(equation: Equation, linear: Sequence[Sequence[int]] = ()) -> _DimRule:
    """An operation on elements, with broadcasting.

    Args:
        linear: sets of arguments, by position among all.
    """
    values = (*equation.operands, *equation.results)
    shape = torch.broadcast_shapes(*(v.shape for v in values))
    full = _dims(shape)

    def align(value: Var) -> DimLetters:
        offset = len(shape) - len(value.shape)
        return tuple(full[offset + i] if n == shape[offset + i] else ()
                     for i, n in enumerate(value.shape))  # fmt: skip

    count, places = itertools.count(), []
    for argument in equation.args:
        places.append(next(count) if isinstance(argument, Var) else None)
    sets = [[places[i] for i in row] for row in linear if len(places) > max(row)]
    alone = len(equation.operands) == 1 and equation.operands[0].shape == shape
    return _make(
        equation,
        [align(v) for v in equation.operands],
        [align(v) for v in equation.results],
        linear=[row for row in sets if None not in row],
        copies=True,
        source={d: d for d in range(len(shape))} if alone else {},
    )


def _product(text: str, added: bool = False):
    """A product that sums over the letters that its result lacks; `added` to its first operand."""
    left, _, right = text.partition("->")
    rows = [tuple((letter,) for letter in word) for word in left.split(",")]

    def rule(equation: Equation) -> _DimRule:
        operands, out = list(rows), tuple((letter,) for letter in right)
        gone = {letter for row in rows for (letter,) in row if letter not in right}
        linear: list = [{0}, {1}]
        if added:
            first = equation.operands[0].shape
            shape = equation.results[0].shape[len(out) - len(first) :]
            last = zip(out[len(out) - len(first) :], first, shape, strict=True)
            bias = tuple(row if n == size else () for row, n, size in last)
            operands, linear = [bias, *rows], [{0, 1}, {0, 2}]
        fields: dict[str, Any] = {"whole": gone} if added else {"summed": gone}
        return _make(equation, operands, [out], linear=linear, **fields)

    return rule


def _argument(equation: Equation, name: str, default: Any = None) -> Any:
    """An argument by the name that the operation's schema gives it."""
    op: Any = equation.op
    if name in equation.kwargs:
        return equation.kwargs[name]
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            given = equation.args[position : position + 1]
            return given[0] if given else (argument.default_value if argument.has_default_value()
                                           else default)  # fmt: skip
    return default


def _dims_of(equation: Equation, name: str = "dim") -> list[int]:
    """The dims that an argument names, of the first operand; all where it names none."""
    count = len(equation.operands[0].shape)
    given = _argument(equation, name)
    if given is None or given == []:
        return list(range(count))
    dims: Sequence[int] = given if isinstance(given, (list, tuple)) else [given]
    return [d % max(count, 1) for d in dims]


def _reduction(summed: bool = False, linear: bool = False):
    def rule(equation: Equation) -> _DimRule:
        x, *others = equation.operands
        if others:  # torch.max of two tensors, say
            return _pointwise(equation)
        labels, dims = _dims(x.shape), _dims_of(equation)
        letters = {labels[d][0] for d in dims if d < len(labels)}
        results = []
        for value in equation.results:
            keep = len(value.shape) == len(labels)
            row = [() if i in dims else r for i, r in enumerate(labels) if keep or i not in dims]
            results.append(tuple(row))
        fields: dict[str, Any] = {"summed": letters} if summed else {"whole": letters}
        return _make(equation, [labels], results, linear=[{0}] if linear else [], **fields)

    return rule


def _along(name: str = "dim", *, count: int = 1, linear: Sequence[Collection[int]] = ()):
    """An operation along some dims, the same at every place of the others.

    Args:
        count: how many operands have the dims of the result; others are not split.
    """

    def rule(equation: Equation) -> _DimRule:
        shape = equation.operands[0].shape
        labels, dims = _dims(shape), _dims_of(equation, name)

        def own(value: Var, key: str) -> DimLetters:
            if len(value.shape) != len(shape):
                return _dims(value.shape, key)
            return tuple(row if n == size and i not in dims else (f"{key}{i}",)
                         for i, (row, n, size) in enumerate(zip(labels, value.shape, shape,
                                                                strict=True)))  # fmt: skip

        operands = [own(v, f"o{k}.") if k < count else _dims(v.shape, f"o{k}.")
                    for k, v in enumerate(equation.operands)]  # fmt: skip
        results = [own(v, f"r{k}.") for k, v in enumerate(equation.results)]
        made = _make(equation, operands, results, linear=linear)
        return replace(made, whole=frozenset(x for x in made.sizes if "." in x))

    return rule


def _view(equation: Equation) -> _DimRule:
    """A reshape: dims of both shapes as products of the same letters."""
    shapes = equation.operands[0].shape, equation.results[0].shape
    rows: tuple[list, list] = ([], [])
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    source: dict[int, int] = {}
    minor: dict[int, int] = {}
    groups = _group_dims(*shapes)
    last = [shape[-1:] for shape in shapes]
    if equation.name == "_unsafe_view" and last[0] == last[1] and 0 not in shapes[0]:
        # of a product of matrices: dims of one place belong to its rows
        groups = _group_dims(shapes[0][:-1], shapes[1][:-1])
        groups.append(([len(shapes[0]) - 1], [len(shapes[1]) - 1]))
    for number, group in enumerate(groups):
        found, own = _letters_of_group(f"g{number}", group, shapes)
        for side in (0, 1):
            rows[side].extend(found[side])
        sizes |= own
        whole |= {letter for letter in own if "?" in letter}
        if len(group[0]) == 1 and group[1]:
            minor |= dict(itertools.pairwise(group[1]))
            source[group[1][-1]] = group[0][0]
    return _DimRule(
        (tuple(rows[0]),), (tuple(rows[1]),), sizes, whole=frozenset(whole),
        linear=(frozenset({0}),), copies=True, source=source, minor=minor,
    )  # fmt: skip


ViewGroup = tuple[list[int], list[int]]


def _letters_of_group(
    name: str, group: ViewGroup, shapes: tuple[Sequence[int], Sequence[int]]
) -> tuple[list[list[tuple[str, ...]]], dict[str, int]]:
    """The letters of dims of two shapes with the same elements, and the sizes of the letters.

    Letters with a question mark are where parts of dims do not nest.
    """
    sizes = [[shape[d] for d in dims] for dims, shape in zip(group, shapes, strict=True)]
    ends = [list(itertools.accumulate(s, lambda a, b: a * b, initial=1)) for s in sizes]
    cuts = sorted({*ends[0], *ends[1]})
    if 0 in cuts or any(b % a for a, b in itertools.pairwise(cuts)):
        rows = [[(f"{name}?{side}.{i}",) for i in range(len(s))] for side, s in enumerate(sizes)]
        return rows, {
            row[0]: n for r, s in zip(rows, sizes, strict=True) for row, n in zip(r, s, strict=True)
        }
    own = {f"{name}.{b}": b // a for a, b in itertools.pairwise(cuts)}
    first = any(s and s[0] == 1 for s in sizes)  # a dim of one place, which may be a part
    own |= {f"{name}.1": 1} if first else {}
    rows = []
    for s, bounds in zip(sizes, ends, strict=True):
        pairs = [[f"{name}.{c}" for c in cuts if a < c <= b] for a, b in itertools.pairwise(bounds)]
        if first and s:
            pairs[0].insert(0, f"{name}.1")
        rows.append([tuple(row) for row in pairs])
    return rows, own


def _group_dims(x: Sequence[int], y: Sequence[int]) -> list[ViewGroup]:
    """The dims of two shapes of as many elements, in groups of equal products."""
    groups, i, j = [], 0, 0
    if 0 in x:
        return [(list(range(len(x))), list(range(len(y))))]
    while i < len(x) or j < len(y):
        mine, others = [i] if i < len(x) else [], [j] if j < len(y) else []
        i, j = i + len(mine), j + len(others)
        a, b = math.prod(x[d] for d in mine), math.prod(y[d] for d in others)
        while a != b:
            if (a < b or j >= len(y)) and i < len(x):
                mine.append(i)
                a *= x[i]
                i += 1
            else:
                others.append(j)
                b *= y[j]
                j += 1
        groups.append((mine, others))
    return groups


def _reorder(order):
    """A permutation; `order(equation, num_dims)` has the operand's dim of every result's, or -1."""

    def rule(equation: Equation) -> _DimRule:
        (x,) = equation.operands
        labels, found = _dims(x.shape), order(equation, len(x.shape))
        rows = tuple(labels[d] if d >= 0 else ("new",) for d in found)
        source = {new: d for new, d in enumerate(found) if d >= 0}
        return _make(equation, [labels], [rows], linear=[{0}], copies=True, source=source)

    return rule


def _transposed(e: Equation, n: int) -> list[int]:
    order = list(range(n))
    if n > 1:
        a, b = (_argument(e, f"dim{k}") % n for k in (0, 1))
        order[a], order[b] = b, a
    return order


def _unsqueezed(e: Equation, n: int) -> list[int]:
    dim = _argument(e, "dim") % (n + 1)
    return [*range(dim), -1, *range(dim, n)]


def _squeeze(equation: Equation) -> _DimRule:
    (x,) = equation.operands
    dims = [d for d in _dims_of(equation) if d < len(x.shape) and x.shape[d] == 1]
    return _reorder(lambda e, n: [d for d in range(n) if d not in dims])(equation)


def _select(equation: Equation) -> _DimRule:
    """One place of a dim, or some in a row."""
    (x,), (y,) = equation.operands, equation.results
    labels, dim = _dims(x.shape), _argument(equation, "dim", 0) % len(x.shape)
    rest = [row for i, row in enumerate(labels) if i != dim]
    whole = {labels[dim][0]}
    if len(y.shape) == len(x.shape):
        same = y.shape[dim] == x.shape[dim]
        rest.insert(dim, labels[dim] if same else ("some",))
        whole = set() if same else whole
    return _make(equation, [labels], [tuple(rest)], linear=[{0}], copies=True, whole=whole)


def _split(equation: Equation) -> _DimRule:
    x = equation.operands[0]
    labels, dim = _dims(x.shape), _argument(equation, "dim", 0) % len(x.shape)
    one = len(equation.results) == 1 and equation.results[0].shape == x.shape
    rows = []
    for k, value in enumerate(equation.results):
        row: list = [r for i, r in enumerate(labels) if i != dim]
        if len(value.shape) == len(x.shape):
            row.insert(dim, labels[dim] if one else (f"part{k}",))
        rows.append(tuple(row))
    whole = [] if one else [labels[dim][0]]
    return _make(equation, [labels], rows, linear=[{0}], copies=True, whole=whole)


def _concatenate(equation: Equation) -> _DimRule:
    (y,), stack = equation.results, equation.name == "stack"
    dim = _argument(equation, "dim", 0) % max(len(y.shape), 1)
    labels = _dims(y.shape)
    rows = []
    for k, value in enumerate(equation.operands):
        if not stack and len(value.shape) != len(y.shape):  # torch passes over empty ones
            rows.append(_dims(value.shape, f"empty{k}."))
            continue
        rows.append(tuple(
            (f"part{k}",) if i == dim else row for i, row in enumerate(labels)
            if not (stack and i == dim)
        ))  # fmt: skip
    whole = {labels[dim][0], *(f"part{k}" for k in range(len(rows)))}
    return _make(equation, rows, [labels], linear=[range(len(rows))], whole=whole)


def _pad(equation: Equation) -> _DimRule:
    (x,), (y,) = equation.operands, equation.results
    labels = _dims(x.shape)
    out = [r if n == m else (f"p{i}",) for i, (r, n, m) in enumerate(zip(labels, x.shape, y.shape,
                                                                         strict=True))]  # fmt: skip
    whole = {f"d{i}" for i, row in enumerate(out) if row[0].startswith("p")}
    linear = [] if _argument(equation, "value", 0) else [{0}]
    return _make(equation, [labels], [tuple(out)], linear=linear, whole=whole)


def _embedding(equation: Equation) -> _DimRule:
    rows = _dims(equation.operands[1].shape, "i")
    result = (*rows, ("d",))
    return _make(equation, [(("v",), ("d",)), rows], [result], linear=[{0}], whole="v")


def _norm(equation: Equation) -> _DimRule:
    """A norm over the last dims, and weights of them."""
    x, *rest = equation.operands
    shape = _argument(equation, "normalized_shape")
    count, labels = len(shape) if shape is not None else 1, _dims(x.shape)
    last = {row[0] for row in labels[len(labels) - count :]}
    rows = [labels, *(labels[len(labels) - len(w.shape) :] for w in rest)]
    results = []
    for value in equation.results:
        few = len(value.shape) < len(labels) or value.shape != x.shape
        row = labels[: len(value.shape)]
        results.append(tuple(() if few and r[0] in last else r for r in row))
    return _make(equation, rows, results, whole=last)


def _attention(equation: Equation) -> _DimRule | None:
    """Attention of as many heads of keys as of queries, without a mask of numbers."""
    q, k = equation.operands[:2]
    if q.shape[1] != k.shape[1] or len(equation.operands) > 3:
        return None
    rows = [(("b",), ("h",), (s,), (d,)) for s, d in (("s", "d"), ("t", "d"), ("t", "e"))]
    out = (*rows[0][:3], ("e",))
    whole = {"d", "t", *("s" if _argument(equation, "is_causal") else "")}
    results = [out, *(out[: len(r.shape)] if len(r.shape) == 3 and r.shape == q.shape[:3]
                      else _dims(r.shape, f"r{i}.") for i, r in
                      enumerate(equation.results[1:]))]  # fmt: skip
    return _make(equation, rows, results, whole=whole)


def _attention_backward(equation: Equation) -> _DimRule | None:
    """The cotangents of queries, keys and values: of keys sums over queries."""
    q, k = equation.operands[1:3]
    if q.shape[1] != k.shape[1] or len(equation.operands) != 6:
        return None
    q_row, k_row, v_row, out = (
        (("b",), ("h",), (s,), (d,)) for s, d in (("s", "d"), ("t", "d"), ("t", "e"), ("s", "e"))
    )
    causal = bool(_argument(equation, "is_causal"))
    operands = [out, q_row, k_row, v_row, out, out[:3]]
    return _make(
        equation, operands, [q_row, k_row, v_row], linear=[{0}],
        whole={"d", "e", "t", *("s" if causal else "")}, summed=() if causal else {"s"},
    )  # fmt: skip


def _embedding_backward(equation: Equation) -> _DimRule:
    rows = _dims(equation.operands[1].shape, "i")
    summed = {row[0] for row in rows}
    return _make(equation, [(*rows, ("d",)), rows], [(("v",), ("d",))], linear=[{0}], summed=summed)


def _norm_backward(equation: Equation) -> _DimRule:
    """The cotangents of x, and of weights and biases that there are: of these sums over rows."""
    dy, _, *rest = equation.operands
    count, labels = len(_argument(equation, "normalized_shape")), _dims(dy.shape)
    first, last = labels[: len(labels) - count], labels[len(labels) - count :]
    rows = [labels, labels]
    rows += [last if v.shape == dy.shape[len(first) :] else (*first, *[()] * count) for v in rest]
    found = [labels if v.shape == dy.shape else last for v in equation.results]
    summed, whole = ({row[0] for row in each} for each in (first, last))
    return _make(equation, rows, found, linear=[{0}], summed=summed, whole=whole)


def _loss(equation: Equation) -> _DimRule | None:
    """The negative log-likelihood of classes, its sum, and the sum of weights."""
    x, *rest = equation.operands
    labels, kept = _dims(x.shape), _argument(equation, "reduction")
    rows, classes = labels[:-1], labels[-1:]
    if len(x.shape) > 2 or len(rest) > 1 or kept == 1:  # a mean of a rank's own
        return None
    summed = {row[0] for row in rows}
    found = [() if kept else rows, ()]
    return _make(equation, [labels, rows], found, linear=[], summed=summed, whole=classes[0])


def _loss_backward(equation: Equation) -> _DimRule | None:
    dy, x, target, *rest = equation.operands
    labels, kept = _dims(x.shape), _argument(equation, "reduction")
    if len(x.shape) > 2 or len(rest) > 1 or kept == 1:
        return None
    operands = [labels[: len(dy.shape)], labels, labels[: len(target.shape)], ()]
    return _make(equation, operands, [labels], linear=[{0}], unread={3}, whole=labels[-1])


def _triangle(equation: Equation) -> _DimRule:
    labels = _dims(equation.operands[0].shape)
    whole = {row[0] for row in labels[-2:]}
    return _make(equation, [labels], [labels], linear=[{0}], whole=whole)


def _linear(*sets: Sequence[int]):
    return lambda equation: _pointwise(equation, sets)


def _linear_if(holds):
    return lambda equation: _pointwise(equation, ((0,),) if holds(equation) else ())


def _rows(names: str, rule: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), rule)


def _keeps_dtype(equation: Equation) -> bool:
    return equation.operands[0].dtype == equation.results[0].dtype


_RULES: Mapping[str, Any] = MappingProxyType(
    {
        "mm": _product("mk,kn->mn"),
        "bmm": _product("bmk,bkn->bmn"),
        "mv": _product("mk,k->m"),
        "dot": _product("k,k->"),
        "addmm": _product("mk,kn->mn", added=True),
        "baddbmm": _product("bmk,bkn->bmn", added=True),
        "addmv": _product("mk,k->m", added=True),
        **_rows("add sub rsub", _linear((0, 1))),
        "mul": _linear((0,), (1,)),
        "div": _linear_if(lambda e: not e.kwargs.get("rounding_mode")),
        "where": _linear((1, 2)),
        **_rows("neg clone alias detach lift_fresh_copy contiguous conj real", _linear((0,))),
        **_rows("expand checkpoint_name view_as", _linear((0,))),
        "_to_copy": _linear_if(_keeps_dtype),
        "masked_fill": _linear_if(lambda e: e.args[2] == 0),
        "sum": _reduction(summed=True, linear=True),
        "mean": _reduction(linear=True),
        **_rows("amax amin any all prod var std argmax argmin max min var_mean", _reduction()),
        **_rows("logsumexp linalg_vector_norm", _reduction()),
        **_rows("_softmax _log_softmax _safe_softmax", _along()),
        **_rows("cumsum", _along(linear=[{0}])),
        **_rows("flip roll", _along("dims", linear=[{0}])),
        **_rows("cumprod sort topk argsort kthvalue logcumsumexp", _along()),
        "gather": _along(count=2, linear=[{0}]),
        "scatter_add": _along(count=3, linear=[{0, 2}]),
        "slice_scatter": _along(count=2, linear=[{0, 1}]),
        **_rows("index_select slice_backward", _along(linear=[{0}])),
        **_rows("_softmax_backward_data _log_softmax_backward_data", _along(count=2, linear=[{0}])),
        **_rows("view _unsafe_view reshape _reshape_alias", _view),
        "t": _reorder(lambda e, n: list(range(n))[::-1]),
        "transpose": _reorder(_transposed),
        "permute": _reorder(lambda e, n: [d % n for d in _argument(e, "dims")]),
        "unsqueeze": _reorder(_unsqueezed),
        "squeeze": _squeeze,
        **_rows("select slice", _select),
        **_rows("split split_with_sizes unsafe_split chunk unbind", _split),
        **_rows("cat stack", _concatenate),
        "constant_pad_nd": _pad,
        "embedding": _embedding,
        **_rows("native_layer_norm _fused_rms_norm rms_norm layer_norm", _norm),
        **_rows("tril triu", _triangle),
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "native_layer_norm_backward": _norm_backward,
        "nll_loss_forward": _loss,
        "nll_loss_backward": _loss_backward,
        **_rows("embedding_dense_backward sum_rows", _embedding_backward),
    }
)
"""Rules by the name of operations; those that torch tags as pointwise need no row."""

_COPIES = ("view", "reshape", "clone", "alias", "detach", "_to_copy", "unsqueeze", "squeeze")
"""Operations whose results have the operand's numbers."""

FILLS: Mapping[str, Any] = MappingProxyType(
    {
        **_rows("zeros zeros_like new_zeros", lambda e: 0.0),
        **_rows("ones ones_like new_ones", lambda e: 1.0),
        **_rows("full full_like new_full", lambda e: float(_argument(e, "fill_value"))),
        "scalar_tensor": lambda e: float(e.args[0]),
    }
)
"""The number that new tensors are filled with."""


def follow_rule(equation: Equation, operands: Sequence[ValueReading]) -> list[ValueReading] | None:
    """The readings of the results of an equation by the rule of its operation; None: it has none.

    Args:
        operands: the readings of `Equation.operands`.
    """
    op: Any = equation.op
    make = _RULES.get(equation.name)
    if make is None and torch.Tag.pointwise in op.tags:
        make = _pointwise
    rule = make(equation) if make is not None and operands else None
    if rule is None:
        return None
    found = _apply(rule, operands)
    same = equation.name in _COPIES or (equation.name == "add" and equation.args[1] == 0)
    kept = operands[0].index if same else None
    return [replace(x, index=kept) for x in found] if kept else found
