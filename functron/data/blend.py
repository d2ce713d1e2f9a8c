"""Blends: several sources of samples as one, in proportions; and the parts of a corpus.

Which source has which sample is arithmetic, exact and without an index (`Mixture`, `Exhaustive`).
`split` makes the training, validation and test parts of a file of tokens: contiguous runs of its
documents.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from functron.core.errors import Problem, is_number, raise_problems, refuse
from functron.data.mapped_files import TokenFile, check_range, checked_offsets
from functron.data.sampling import Samples

TOLERANCE = Fraction(1, 1000)
"""By how much fractions may miss 1: as much as rounding them to some digits does."""


def proportions(
    values: Sequence[float | int | str | Fraction], what: str, *, zero: bool = False
) -> tuple[Fraction, ...]:
    """``value / sum(values)``, exactly.

    Whole numbers are shares of their sum, whatever that is: 969, 30 and 1 say the same as 0.969,
    0.03 and 0.001. Where one of them is not whole, all are fractions that have to sum to 1: another
    sum means that one is missing or mistyped.

    Args:
        values: numbers, or how they are written.
        what: the name of `values` in errors.
        zero: allow zeros, though not zeros alone.

    Raises:
        ValueError: no numbers, NaN or infinite, negative, zero, or fractions that do not sum to 1;
            all of them are listed.
    """
    raise_problems(f"invalid {what}", _find_bad_weights(values, what, zero))
    exact = [Fraction(str(value)) for value in values]
    total = sum(exact)
    whole = all(value.denominator == 1 for value in exact)
    if not total or (not whole and abs(total - 1) > TOLERANCE):
        got = f"{', '.join(map(str, values)) or 'nothing'}, a sum of {float(total):g}"
        fix = "add what is missing, or give whole numbers, which are shares of their sum"
        if total:
            written = ", ".join(f"{float(value / total):.4g}" for value in exact)
            fix += f"; for the same proportions: {written}"
        refuse(f"invalid {what}", what, got, "fractions that sum to 1", fix)
    return tuple(value / total for value in exact)


def _find_bad_weights(values: Sequence, what: str, zero: bool) -> Iterator[Problem]:
    wanted = "a finite number, at least 0" if zero else "a finite number above 0"
    for index, value in enumerate(values):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            fix = "" if zero or number != 0 else "leave out what is not to be used"
            yield Problem(f"{what}[{index}]", str(value), wanted, fix)


BLOCK = 1 << 16
ALL = "all"
MOST = 1 << 30
_LARGEST = 1 << 58


def parse_blend(text: str) -> list[tuple[str, str]] | None:
    """Weights and paths of ``"0.3 PREFIX1 0.7 PREFIX2"``; None where that is no blend but a path.

    ``"all PREFIX1 all PREFIX2"`` has `ALL` in place of weights: every sample of each once an epoch.
    Paths with spaces are quoted as in a shell.

    Raises:
        ValueError: it begins with a number, but weights and paths do not alternate.
    """
    words = _split_words(text)
    if not words:
        return None
    pairs = list(zip(words[::2], words[1::2], strict=False))
    problems = [
        Problem("data", f"{weight!r} before {path!r}", "all" if words[0] == ALL else "a weight")
        for weight, path in pairs
        if not (weight == ALL if words[0] == ALL else is_number(weight))
    ]
    if len(words) % 2:
        fix = "write WEIGHT PREFIX WEIGHT PREFIX ..., paths with spaces in quotation marks"
        problems.append(Problem("data", f"{words[-1]!r} at its end", "weights and paths", fix))
    raise_problems("cannot blend", problems)
    return pairs


def is_blend(text: str) -> bool:
    """Whether `parse_blend` takes it for a blend, well-formed or not."""
    return bool(_split_words(text))


def _split_words(text: str) -> list[str]:
    """The weights and paths of a blend; none where it is a path."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation mark that is not closed is part of a path
        return []
    begins = len(words) > 1 and (is_number(words[0]) or words[0] == ALL)
    return words if begins else []


class _SplitTable:
    """Who has each sample of a row that several share, as a binary tree of divisions in two.

    A node of the tree has a row of samples, numbered from 0, of which one child has the share a:

        of the first m it has ``L(m) = floor(m a + 1/2)``,

    sample m is its own if ``L(m + 1) > L(m)``, and then the child's number L(m); or else the other
    child's number ``m - L(m)``. The root has all samples, and every leaf is one of those that share
    them. Sources of large weight are near the root, and where sample n belongs takes one division
    for every node above its leaf: nothing is stored but the tree.

    **No count is 2 from its share**, for n below 2^56 and up to 64 leaves. Let e(v) be by how much
    the count of node v misses its share of n, so that ``e(root) = 0``, and a child that has the
    part p of its parent ``|e| <= p |e(parent)| + 1/2``, from rounding. A child that is no leaf has
    at most 2/3 of its parent: leaves are dealt by descending share, each to the side that has less.
    So where the larger side S of 1 has several leaves, the last one it was given, x, came when
    ``S - x <= 1 - S``, and ``x <= S - x``, since it is none of the larger ones; hence
    ``S / 2 <= S - x <= 1 - S``. Under d such nodes then

        ``|e| <= 1/2 + (2/3) 1/2 + (2/3)^2 1/2 + ... = 3/2 - 3/2 (2/3)^d``,

    and at a leaf below them, however much of its parent it has, ``|e| <= 2 - 3/2 (2/3)^d``. Parts
    are multiples of 2^-64, which moves the count of a child by ``n P 2^-64`` at most, where P is
    the share of its parent, and of the leaf by ``n 2^-64 (2/3)^d (3/2 d + 1)`` in all: less than
    what is left to 2. All is computed in whole numbers, so every machine has the same.

    Args:
        shares: whole numbers above 0, of any size: whose sum is all.
    """

    def __init__(self, shares: Sequence[int]):
        self._size = len(shares)
        children: list[list[int]] = []
        parts: list[int] = []
        # the leaves of nodes to come, and which child of which node these are
        waiting = [(sorted(range(len(shares)), key=lambda leaf: -shares[leaf]), -1, 0)]
        while waiting:
            leaves, above, side = waiting.pop()
            name = len(children) if len(leaves) > 1 else ~leaves[0]
            if above >= 0:
                children[above][side] = name
            if len(leaves) > 1:
                sides = _deal(leaves, shares)
                part, whole = (sum(shares[leaf] for leaf in some) for some in (sides[0], leaves))
                nearest = ((part << 65) + whole) // (2 * whole)
                parts.append(min(max(nearest, 1), (1 << 64) - 1))
                children.append([0, 0])
                waiting += [(sides[0], name, 1), (sides[1], name, 0)]
        self._nodes = list(zip(children, parts, strict=True))
        self._children = np.array(children, np.int64).reshape(-1, 2)
        self._parts = np.array(parts, np.uint64)  # of child 1

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `BlendShares.at`, of leaves and ``0 <= n < 2^63``."""
        places = np.asarray(numbers, np.int64).reshape(-1).astype(np.uint64)
        leaves, own = np.zeros(places.shape, np.int64), places.copy()
        rows = np.arange(places.size if self._nodes else 0)
        nodes, places = np.zeros(rows.shape, np.int64), places[: rows.size]
        while rows.size:
            parts = self._parts[nodes]
            before = _round_product(places, parts)
            # L(m + 1) > L(m): adding the share carries out of the 64 bits behind the point
            ones = places * parts + _HALF > ~parts
            places = np.where(ones, before, places - before)
            nodes = self._children[nodes, ones.astype(np.int64)]
            ends = nodes < 0
            if ends.any():
                leaves[rows[ends]], own[rows[ends]] = ~nodes[ends], places[ends]
                rows, nodes, places = rows[~ends], nodes[~ends], places[~ends]
        shape = np.shape(numbers)
        return leaves.reshape(shape), own.astype(np.int64).reshape(shape)

    def positions(self, samples: int) -> np.ndarray:
        """As `BlendShares.positions`, of leaves."""
        found = np.zeros(self._size, np.int64)
        waiting = [(0 if self._nodes else -1, int(samples))]
        while waiting:
            node, count = waiting.pop()
            if node < 0:
                found[~node] = count
                continue
            (other, one), part = self._nodes[node]
            ones = (count * part + (1 << 63)) >> 64
            waiting += [(one, ones), (other, count - ones)]
        return found


def _deal(leaves: Sequence[int], shares: Sequence[int]) -> tuple[list[int], list[int]]:
    """`leaves`, by descending share, each to the one of two sides that has less."""
    sides: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for leaf in leaves:
        side = int(totals[0] > totals[1])
        sides[side].append(leaf)
        totals[side] += shares[leaf]
    return sides


_HALF = np.uint64(1 << 63)
_32 = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)


def _round_product(counts: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """``floor(counts * parts / 2^64 + 1/2)`` of uint64, counts below 2^63."""
    high, low = counts >> _32, counts & _LOW
    part_high, part_low = parts >> _32, parts & _LOW
    middle = low * part_high + ((low * part_low) >> _32)
    rest = high * part_low + (middle & _LOW) + (_HALF >> _32)
    return high * part_high + (middle >> _32) + (rest >> _32)


@runtime_checkable
class BlendShares(Protocol):
    """Which source each sample of a blend comes from, such as `Mixture` and `Exhaustive`.

    Attributes:
        weights: of the sources, of sum 1.
    """

    weights: Any

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sources of samples `numbers` (from 0), and how many earlier ones each has given.

        Both int64, the shape of `numbers`.
        """
        ...

    def positions(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples came from each source: int64 ``[k]``."""
        ...


class Mixture(_SplitTable):
    """Which source sample n of a run comes from, and which sample of that source it is.

    The sources are spread evenly: of the first n samples, for every n below 2^56 and up to 64
    sources of any weights,

        ``|count_i - w_i n| < 2``.

    Samples are divided in two, again and again, down to single sources, each time by Bresenham's
    line ``floor(m a + 1/2)``. So all of it is arithmetic in whole numbers, without a table, and no
    sample depends on those before it.

    Args:
        weights: above 0: shares of their sum if all are whole, or else fractions that sum to 1.

    Attributes:
        weights: exact fractions that sum to 1.

    Raises:
        ValueError: weights are none, not finite, not positive or fractions that do not sum to 1.
    """

    def __init__(self, weights: Sequence[float | int | str | Fraction]):
        self.weights = proportions(weights, "weights")
        scale = math.lcm(*(weight.denominator for weight in self.weights))
        super().__init__([int(weight * scale) for weight in self.weights])


class _RepeatedTable:
    """Shares that repeat after as many samples as `counts` has in all, in the order of a table."""

    def __init__(self, weights: tuple[Fraction, ...], counts: np.ndarray, table: Any):
        self.weights, self.counts, self._table = weights, counts, table
        self._total = int(counts.sum())

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, within = np.divmod(np.asarray(numbers, np.int64), self._total)
        sources, own = self._table.at(within)
        return sources, epochs * self.counts[sources] + own

    def positions(self, samples: int) -> np.ndarray:
        epochs, within = divmod(samples, self._total)
        return epochs * self.counts + self._table.positions(within)


class Exhaustive(_RepeatedTable):
    """Which source sample n comes from where every sample of all sources comes once an epoch.

    The sources are spread evenly over an epoch, in proportion to how many samples each has, as
    `Mixture` spreads them, and as close to their shares. Megatron-LM's exhaustive blend has as many
    of each in another order.

    Args:
        sizes: how many samples each source has, at least 1.

    Attributes:
        weights: exact fractions that sum to 1.
        counts: int64 ``[k]``: `sizes`.

    Raises:
        ValueError: there are none, one is below 1, or more than 2^30 samples in all.
    """

    _make_table: Any = _SplitTable

    def __init__(self, sizes: Sequence[int]):
        total = sum(sizes)
        found = [
            Problem(f"sizes[{i}]", str(size), "at least 1")
            for i, size in enumerate(sizes)
            if size < 1
        ]
        if total > MOST:
            fix = "give weights in place of all"
            found.append(Problem("sizes", f"{total} samples", f"at most {MOST} in all", fix))
        if not sizes:
            found.append(Problem("sizes", "none", "at least one"))
        raise_problems("cannot blend all samples", found)
        weights = tuple(Fraction(int(size), total) for size in sizes)
        table = self._make_table([int(size) for size in sizes])
        super().__init__(weights, np.asarray(sizes, np.int64), table)


class GreedyMixture(_RepeatedTable):
    """`Mixture` in the order of runs that began with order 1.

    The order of a block of 2^16 samples is the greedy one: source i of weight w_i goes next if its
    deficit ``w_i (n + 1) - count_i`` is the largest, the first such source on a tie. It is computed
    once, in integers, and repeats, so that all else is arithmetic; exactly, but where the common
    denominator of the weights is above 2^58. With k sources, after n samples,

        ``-(1 - 1 / k) <= w_i n - count_i <= 1/2 + 1/3 + ... + 1/k``

    in the first block: counts are within 1 of their shares for up to three sources, and below
    ``ln k`` behind for more. The last count of a block is repeated with it; so in later blocks the
    weights are those of whole blocks, multiples of 2^-16, which is far off for small ones.

    Arguments, attributes and errors are those of `Mixture`; `counts`, int64 ``[k]``, are samples of
    every source in a block, and it is a ValueError where a block has none of one.
    """

    def __init__(self, weights: Sequence[float | int | str | Fraction]):
        exact = proportions(weights, "weights")
        table = _OrderTable(_order_greedily(exact), len(exact))
        super().__init__(exact, table.positions(BLOCK), table)
        raise_problems("cannot blend", [
            Problem(f"weights[{i}]", f"{float(weight):.3g} of all", f"at least {1 / BLOCK:.3g}",
                    "raise it or leave it out: a block of 2^16 samples has none of it")
            for i, (weight, count) in enumerate(zip(self.weights, self.counts, strict=True))
            if not count
        ])  # fmt: skip


class _OrderTable:
    """The sources of samples in a list, with the methods of `_SplitTable`."""

    def __init__(self, order: np.ndarray, num_sources: int):
        self._order, self._num_sources = order, num_sources
        self._own = np.empty(len(order), np.int64)
        for source, count in enumerate(self.positions(len(order))):
            self._own[order == source] = np.arange(count)

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._order[numbers], self._own[numbers]

    def positions(self, samples: int) -> np.ndarray:
        return np.bincount(self._order[:samples], minlength=self._num_sources)


class _ChainTable:
    """One source divided from the others after another, with the methods of `_SplitTable`."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        left, within = sum(self._sizes), numbers
        sources = np.full(within.shape, len(self._sizes) - 1)
        own = np.zeros_like(within)
        free = np.ones(within.shape, bool)
        for source, size in enumerate(self._sizes):
            before, after = (_share(within + more, size, left) for more in (0, 1))
            mine = free & (after > before)
            sources[mine], own[mine] = source, before[mine]
            free &= ~mine
            within, left = within - before, left - size
        return sources, own

    def positions(self, samples: int) -> np.ndarray:
        left, found = sum(self._sizes), []
        for size in self._sizes:
            found.append(_share(samples, size, left))
            samples, left = samples - found[-1], left - size
        return np.array(found)


def _share(count: Any, size: int, total: int) -> Any:
    """How many of the first `count` of `total` are the `size` that are spread among them."""
    return (2 * count * size + total) // (2 * total) if total else count * 0


class ChainedExhaustive(Exhaustive):
    """`Exhaustive` in the order of runs that began with order 1.

    Source 0 of a of N samples has sample n of an epoch where ``floor((2 (n + 1) a + N) / 2N)`` is
    larger than the same of n (Bresenham's line); what is left is divided in the same way among the
    others.
    """

    _make_table = _ChainTable


BlendOrder = Literal[1, 2]
MakeShares = Callable[..., BlendShares]
ORDERS: Mapping[int, tuple[MakeShares, MakeShares]] = MappingProxyType({
    1: (GreedyMixture, ChainedExhaustive),
    2: (Mixture, Exhaustive),
})  # fmt: skip
"""The orders of blends by their version: those of weights, and those of all samples."""
NEWEST: BlendOrder = 2


class Blend(Samples):
    """Samples of several sources in proportion to their weights.

    There is no index: sample n of the run is sample m of source i by `Mixture`, and the source
    knows by itself which one that is in its own shuffled epochs. A small source comes round more
    often than a large one.

    Args:
        sources: what to draw from; their samples have the same leaves and as many tokens.
        weights: of each, as `Mixture` takes them; None: every sample of all sources comes once an
            epoch, as `Exhaustive` orders them; or a `BlendShares`.
        names: the user's, for them; None: their numbers.
        order: a version of `ORDERS`: 1 is that of runs which began before there was another, with
            `GreedyMixture` and `ChainedExhaustive`.

    Attributes:
        mixture: the `BlendShares`.
        vocab_size: the largest of the sources'.

    Raises:
        ValueError: there are not as many weights or names as sources, no such order, or what
            `Mixture` raises.
    """

    def __init__(
        self,
        sources: Sequence[Samples],
        weights: Sequence[float | int | str | Fraction] | BlendShares | None,
        names: Sequence[str] | None = None,
        order: int = NEWEST,
    ):
        if order not in ORDERS:
            refuse("cannot blend", "order", order, f"one of {', '.join(map(str, ORDERS))}")
        by_weights, exhaustive = ORDERS[order]
        self.names = tuple(map(str, range(len(sources))) if names is None else names)
        if weights is None:
            weights = exhaustive(_sizes(sources)) if sources else []
        given = len(weights.weights if isinstance(weights, BlendShares) else weights)
        size, wanted = len(sources), "one for each, and at least 1 source"
        counts = {"weights": (given, "all samples of each"), "names": (len(self.names), "numbers")}
        raise_problems("cannot blend", [
            Problem(what, f"{got} for {size} sources", wanted, f"give as many, or None: {none}")
            for what, (got, none) in counts.items()
            if got != size or not size
        ])  # fmt: skip
        self._sources = tuple(sources)
        self.mixture: BlendShares = (
            weights if isinstance(weights, BlendShares) else by_weights(weights)
        )
        self.vocab_size = max(source.vocab_size for source in sources)

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """All leaves but ``rows``; so a blend can be a source of another."""
        sources, own = self.mixture.at(numbers)
        found: dict[str, torch.Tensor] = {}
        for source in np.unique(sources):
            chosen = np.flatnonzero(sources == source)
            part = self._sources[source].draw(own[chosen])
            for name, leaf in part.items():
                if name not in found:
                    found[name] = leaf.new_empty((len(numbers), *leaf.shape[1:]))
                found[name].numpy()[chosen] = leaf.numpy()  # faster than torch's indexing
        return found

    def positions(self, samples: int) -> dict[str, int]:
        """Samples from each source among the first `samples` of a run, by name; equal names are
        added up.
        """
        return {name: int(entry["samples"]) for name, entry in self.progress(samples).items()}

    def progress(self, samples: int) -> dict[str, dict[str, float]]:
        """`positions`, and how often each source has come round: ``{"samples", "epochs"}`` by name.

        Half of a source's samples are 0.5 epochs. Epochs of sources of the same name are added up,
        too: each has an order of its own. A source without `num_samples`, such as another blend,
        has no epochs.
        """
        counts = self.mixture.positions(samples).tolist()
        found: dict[str, dict[str, float]] = {name: {"samples": 0} for name in self.names}
        for name, source, count in zip(self.names, self._sources, counts, strict=True):
            entry, size = found[name], getattr(source, "num_samples", 0)
            entry["samples"] += count
            if size:
                entry["epochs"] = entry.get("epochs", 0.0) + count / size
        return found

    def note(self) -> str | None:
        """A line for the user on proportions that are not the weights'; None: they are."""
        if not isinstance(self.mixture, GreedyMixture):
            return None
        pairs = zip(self.mixture.counts.tolist(), self.mixture.weights, strict=True)
        missed = [float(count / (BLOCK * weight) - 1) for count, weight in pairs]
        worst = max(range(len(missed)), key=lambda source: abs(missed[source]))
        if abs(missed[worst]) < _NOTED:
            return None
        return (
            f"order 1, as the run began: of {self.names[worst]} come "
            f"{abs(missed[worst]):.1%} too {'many' if missed[worst] > 0 else 'few'} samples; "
            "a new run has them right"
        )

    def summary(self) -> str:
        parts = zip(self.mixture.weights, self.names, self._sources, strict=True)
        return "; ".join(f"{float(w):.4g} {name}: {x.summary()}" for w, name, x in parts)


_NOTED = 0.005


def _sizes(sources: Sequence[Samples]) -> list[int]:
    sizes = [getattr(source, "num_samples", None) for source in sources]
    raise_problems("cannot blend all samples", [
        Problem(f"sources[{i}]", "no num_samples", "a source of so many samples", "give weights")
        for i, size in enumerate(sizes)
        if size is None
    ])  # fmt: skip
    return [int(size) for size in sizes if size is not None]


def _order_greedily(weights: Sequence[Fraction]) -> np.ndarray:
    """The sources of a block's samples, in order: int64 ``[2^16]``."""
    # integers, so that ties are ties; deficits are below ln k times their sum, which int64 holds
    scale = min(math.lcm(*(weight.denominator for weight in weights)), _LARGEST)
    shares = np.array([max(math.floor(weight * scale), 1) for weight in weights], np.int64)
    total = int(shares.sum())
    order = np.empty(BLOCK, np.int64)
    deficits = np.zeros(len(shares), np.int64)
    for sample in range(BLOCK):
        deficits += shares
        chosen = deficits.argmax()
        deficits[chosen] -= total
        order[sample] = chosen
    return order


PARTS = ("train", "validation", "test")


def split_documents(num_documents: int, weights: str | Sequence[float | str]) -> dict[str, range]:
    """Which documents each part has: ``round(N * cumulative weight)`` bounds the parts.

    Every document is in exactly one part, and documents of a part lie side by side. Rounding goes
    to the nearest, halves to the even one, as Megatron-LM's does; but the weights are exact, so
    that no document depends on how floats add up.

    Args:
        num_documents: N.
        weights: of `PARTS`, one to three of them, as numbers or as ``"969,30,1"``: shares of their
            sum if they are whole, or else fractions that sum to 1. Those left out are 0.

    Returns:
        The documents of each of `PARTS` whose weight is not 0.

    Raises:
        ValueError: what `functron.data.blend.proportions` raises, more than three weights, or too
            few documents for each part of nonzero weight to have one.
    """
    written = weights.split(",") if isinstance(weights, str) else list(weights)
    if len(written) > len(PARTS):
        got, wanted = f"{len(written)} weights", f"at most {len(PARTS)}: {', '.join(PARTS)}"
        refuse("cannot split", "split", got, wanted, "leave the others out")
    stripped = [x.strip() if isinstance(x, str) else x for x in written]
    shares = proportions(stripped, "split", zero=True)
    shares += (Fraction(0),) * (len(PARTS) - len(shares))
    bounds = [round(num_documents * x) for x in itertools.accumulate(shares, initial=Fraction(0))]
    found, problems = {}, []
    for name, share, (begin, end) in zip(PARTS, shares, itertools.pairwise(bounds), strict=True):
        if not share:
            continue
        found[name] = range(begin, end)
        if begin == end:
            got = f"{float(share):.3g} of {num_documents} documents, which is none of them"
            fix = f"raise its weight to {1 / max(num_documents, 1):.2g} of all, or set it to 0"
            problems.append(Problem(f"split, {name}", got, "at least 1 document", fix))
    raise_problems("cannot split", problems)
    return found


def split(file: TokenFile, weights: str | Sequence[float | str]) -> dict[str, DocumentRange]:
    """The parts of a file by the rule, and with the errors, of `split_documents`; nothing is
    copied.
    """
    found = split_documents(file.num_documents, weights)
    return {name: DocumentRange(file, documents, name) for name, documents in found.items()}


class DocumentRange:
    """Neighbouring documents of a file, as a `TokenFile` of their own.

    Args:
        file: that has them.
        documents: which.
        name: of these in errors, in brackets behind the path of the file.
    """

    def __init__(self, file: TokenFile, documents: range, name: str):
        self.documents, self._file, self._name = documents, file, name
        self.path = Path(f"{file.path} ({name})")
        edges = np.array([documents.start, documents.stop])
        self._start, stop = file.starts(edges).tolist()
        self.dtype, self.num_tokens = file.dtype, stop - self._start
        self.num_documents = len(documents)

    def __reduce__(self):
        return DocumentRange, (self._file, self.documents, self._name)

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, ``[length]``, counted from the first document's."""
        check_range(self.path, start, length, self.num_tokens)
        return self._file.read(self._start + start, length)

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin, both counted from the first one: int64."""
        numbers = np.asarray(documents, np.int64) + self.documents.start
        return self._file.starts(numbers) - self._start

    def documents_of(self, offsets: np.ndarray) -> np.ndarray:
        wanted = checked_offsets(self.path, offsets, self.num_tokens)
        return self._file.documents_of(wanted + self._start) - self.documents.start
