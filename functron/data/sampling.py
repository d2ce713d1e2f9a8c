"""The order of samples: shuffled epochs, and the rows of batches, by arithmetic alone.

Shuffles are keyed pseudorandom permutations of 0 ... size-1 in O(1) memory: they need no table.
Batch sizes may grow during training, as a pure function of the step. Applications add orders of
their own, with or without tables (`SampleOrder`).
"""

from __future__ import annotations

import bisect
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from functron.core.errors import Problem, raise_problems, refuse

ROUNDS = 8


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where the permutation of ``range(size)`` that `key` selects sends each of `indices`.

    A Feistel network on pairs (a, b) of digits in base ``ceil(sqrt(size))``: every round maps
    ``(a, b)`` to ``(b, a + f(b))``, which can be undone whatever f is, so the network is a
    permutation of the square. What lands outside ``range(size)`` is sent through again until it
    does not (cycle walking), which keeps it a permutation; less than two passes on average.
    Statistically good, not cryptographic.

    Args:
        indices: integers in ``range(size)``, any shape; another one is a ValueError.
        size: at least 1, at most 2^62.
        key: any integer; its low 64 bits select the permutation.

    Returns:
        int64, the shape of `indices`.
    """
    values = np.asarray(indices, dtype=np.int64)
    if values.size and not (values.min() >= 0 and values.max() < size <= 2**62):
        raise ValueError(
            f"permute: got indices from {values.min()} to {values.max()}; wanted 0 to {size - 1}"
        )
    base = math.isqrt(max(size - 1, 0)) + 1
    flat = _apply_rounds(values.reshape(-1), base, key)
    outside = np.flatnonzero(flat >= size)
    while outside.size:
        flat[outside] = _apply_rounds(flat[outside], base, key)
        outside = outside[flat[outside] >= size]
    return flat.reshape(values.shape)


def _apply_rounds(values: np.ndarray, base: int, key: int) -> np.ndarray:
    a, b = np.divmod(values.astype(np.uint64), np.uint64(base))
    for index in range(ROUNDS):
        a, b = b, (a + mix(b, key, index) % np.uint64(base)) % np.uint64(base)
    return (a * np.uint64(base) + b).astype(np.int64)


def mix(values: np.ndarray, key: int, index: int) -> np.ndarray:
    """SplitMix64's finaliser of (value, key, round), twice. Steele, Lea and Flood 2014."""
    for salt in (key, index + 1):
        values = values + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values = values ^ (values >> np.uint64(31))
    return values


@dataclass(frozen=True)
class Gaps:
    """Samples of a run that are left out: those after them move up.

    Attributes:
        ranges: of sample numbers, ``(first, end)`` each, ascending and apart from one another.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Gaps:
        """The gaps that these ranges make together, in any order and overlapping or not."""
        joined: list[tuple[int, int]] = []
        for first, end in sorted(ranges):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            elif end > first:
                joined.append((first, end))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, text: str) -> Gaps:
        """The gaps of ``"40:48 100:116"``: samples 40 to 47, and 100 to 115; ValueError for other
        text.
        """
        words = text.replace(",", " ").split()
        if not all(re.fullmatch(r"\d+:\d+", word) for word in words):
            wanted = "ranges such as 40:48, the first sample and the one after the last"
            refuse("cannot leave out samples", "samples", repr(text), wanted)
        found = [tuple(map(int, word.split(":"))) for word in words]
        raise_problems("cannot leave out samples", [
            Problem(word, "no sample", "the one after the last to be larger than the first")
            for word, (first, end) in zip(words, found, strict=True) if end <= first
        ])  # fmt: skip
        return cls.of((first, end) for first, end in found)

    def __str__(self) -> str:
        return " ".join(f"{first}:{end}" for first, end in self.ranges)

    def number(self, count: Any) -> Any:
        """The number of the sample that comes after `count` others: an int, or an array of them."""
        for first, end in self.ranges:
            count = count + (end - first) * (count >= first)
        return count

    def without(self, first: int, end: int) -> Gaps:
        """With the samples that now come as ``first ... end - 1`` left out as well."""
        return Gaps.of([*self.ranges, (self.number(first), self.number(end - 1) + 1)])


NO_GAPS = Gaps()

IGNORED = -100
"""The target that stands for none; `functron.nn.IGNORE_INDEX`."""


class Samples(Protocol):
    """A source of a run's batches, such as `TokenWindows`, `Chat`, or a `Blend` of others.

    There is no iterator state: a batch is a function of its step. A class needs `draw`, `summary`
    and `vocab_size`, and may take `batch` from here.

    Attributes:
        vocab_size: a model of these samples needs at least as many token ids.
    """

    vocab_size: int

    def batch(
        self, step: int, global_batch: int, part: tuple[int, int] = (0, 1)
    ) -> dict[str, torch.Tensor]:
        """This part's rows of the batch of `step`, where all batches have one size.

        Row r of step s is sample number ``s * global_batch + r``, however many parts there are: the
        parts' batches, concatenated in order, are the batch of part ``(0, 1)``.

        Args:
            step: from 0.
            global_batch: rows of all parts together.
            part: ``(index, count)``: which of how many contiguous parts.

        Returns:
            The leaves of `draw`, and ``rows`` int64 ``[rows]``, the rows' indices in the global
            batch.

        Raises:
            ValueError: `count` does not divide `global_batch`, or no such part.
        """
        return drawn(self, step * global_batch, global_batch, part)

    @abstractmethod
    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples that come as `numbers` in a run: all leaves of a batch but ``rows``.

        Args:
            numbers: int64 ``[rows]``, from 0; of n samples, number i is in epoch ``i // n``, which
                has an order of its own.
        """
        ...

    @abstractmethod
    def summary(self) -> str:
        """The samples, in a few words for the user."""
        ...


Transform = Callable[[dict[str, torch.Tensor], np.ndarray], dict[str, torch.Tensor]]
"""``(drawn, numbers)`` to what is drawn instead: a pure function, of each sample by itself."""


class Transformed(Samples):
    """Samples made of others by a function of what is drawn and its numbers.

    As numbers count from the beginning of a run, a sample may be another one in every epoch; it is
    the same on every mesh, in batches of any size, and after resuming.

    Args:
        source: to draw from; has `num_samples`.
        transform: makes other samples of those that were drawn.
        vocab_size: a model of the others needs at least as many token ids.
    """

    def __init__(self, source: Any, transform: Transform, vocab_size: int):
        self._source, self._transform, self.vocab_size = source, transform, vocab_size

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        return self._transform(self._source.draw(numbers), numbers)

    def summary(self) -> str:
        """The source's, in a few words for the user."""
        return self._source.summary()


@dataclass(frozen=True)
class SampleMaker:
    """How samples of text become those of a model.

    Attributes:
        length: tokens of text in a sample.
        vocab_size: upper bound of the token ids of text; the objective may add ids above.
        over: ``(samples of text, seed)`` to the samples of the model.
        open: ``(part)`` to the samples of a model that reads its files by itself, such as texts
            with labels; None: `over` makes them of text.
    """

    length: int
    vocab_size: int
    over: Callable[[Any, int], Samples] = lambda samples, seed: samples
    open: Callable[[str], Samples] | None = None


ARITHMETIC = "arithmetic"
"""The name of the order that this module computes."""
ORDERS = "functron.sample_orders"
"""The entry points of others: functions without arguments that return a `SampleOrder`."""


@dataclass(frozen=True)
class SampleOrder:
    """An order of the samples in indexed files (`functron.data.IndexedFile`), as plain functions.

    Attributes:
        draw: ``draw(files, seq, num_samples, *, weights, names, split, part, surplus, cache, build,
            seed, vocab_size, extra_token, mask_documents)`` gives the `Samples` of a part of these
            files. Settings of the same names are those of `functron.data.text_files.DataConfig`;
            `num_samples` is how many the run takes, None: every sample once; `weights` are of the
            files, None: all of each; `names` are the user's for them; `cache` is a folder for
            tables; with `build` they are made now rather than with the first batch.
        count: ``count(samples)`` says how many samples the order of such `Samples` has.
        divide: ``divide(split, num_sequences)`` gives the sequences of a file that each part of
            `split` has, by its name.
        num_seeds: seeds are 0 to num_seeds - 1.
    """

    draw: Callable[..., Samples]
    count: Callable[[Any], int]
    divide: Callable[[str, int], Mapping[str, range]]
    num_seeds: int = 1 << 63


def drawn(
    samples: Samples,
    first: int,
    count: int,
    part: tuple[int, int] = (0, 1),
    gaps: Gaps = NO_GAPS,
) -> dict[str, torch.Tensor]:
    """This part's rows of a batch of samples `first` to ``first + count - 1`` of a run.

    As `Samples.batch`, whatever sizes the batches before had.

    Args:
        samples: their source.
        first: the number of the batch's first sample, from 0: ``step * count`` where all batches
            have one size, or `functron.data.sampling.RampUp.first_sample`.
        count: rows of all parts together.
        part: ``(index, count)``: which of how many contiguous parts.
        gaps: samples that the run leaves out; `first` counts those that it does not.
    """
    rows = rows_of(first, count, part)
    return {**samples.draw(gaps.number(first + rows)), "rows": torch.from_numpy(rows)}


def stack_leaves(names: Sequence[str], rows: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Leaves int64 ``[rows, seq]`` by name, of samples with as many arrays ``[seq]`` each."""
    stacked = np.stack([np.asarray(row, np.int64) for row in rows], 1)
    return {name: torch.from_numpy(x) for name, x in zip(names, stacked, strict=True)}


def rounded_up(size: int, multiple: int) -> int:
    """The least multiple that is no less than `size`."""
    return -(-size // multiple) * multiple


def check_index(index: int, count: int) -> None:
    """Raise IndexError unless there is a sample `index` among `count`."""
    if not 0 <= index < count:
        raise IndexError(f"sample {index}: wanted 0 to {count - 1}")


def rows_of(first: int, global_batch: int, part: tuple[int, int] = (0, 1)) -> np.ndarray:
    """The rows of a global batch that one of its equal, contiguous parts has: int64.

    Arguments and errors are those of `Samples.batch`; `first` is the number of its first sample.
    """
    index, count = part
    problems = []
    if count < 1 or not 0 <= index < count or first < 0:
        got = f"part ({index}, {count}) of samples from {first}"
        problems.append(Problem("part", got, "0 <= index < count, and samples from 0"))
    elif global_batch < 1 or global_batch % count:
        fix = f"use a global batch of {rounded_up(max(global_batch, 1), count)}"
        problems.append(
            Problem("global_batch", str(global_batch), f"a positive multiple of {count}", fix)
        )
    raise_problems("cannot cut the batch into parts", problems)
    size = global_batch // count
    return np.arange(index * size, (index + 1) * size, dtype=np.int64)


def shuffled(numbers: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Which samples come as number n of a run: every epoch has all `size`, in an order of its own.

    Args:
        numbers: from 0, any shape; number n is in epoch ``n // size``.
        size: how many samples there are.
        seed: selects the orders.

    Returns:
        int64 in ``range(size)``, the shape of `numbers`.
    """
    return _shuffle_epochs(numbers, size, seed, permute)


def _shuffle_epochs(numbers: np.ndarray, size: int, seed: int, shuffle: Callable) -> np.ndarray:
    """Each epoch of `numbers` by ``shuffle(places, size, key)``, with a key of its own."""
    epochs, within = np.divmod(numbers, size)
    found = np.empty_like(within)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        # an odd multiplier makes the keys of two (seed, epoch) pairs differ below 2^32 epochs
        found[chosen] = shuffle(within[chosen], size, seed * 0x1_0000_0001 + int(epoch))
    return found


def shuffled_blocks(
    numbers: np.ndarray, size: int, block: int, together: int, seed: int
) -> np.ndarray:
    """As `shuffled`, but blocks of samples are shuffled, and then the samples of some blocks at a
    time.

    Every epoch takes the blocks in an order of its own, `together` of them at a time, and the
    samples of those in any order. So only a few blocks have to be known at once, and samples that
    come together are from several places.

    Args:
        numbers, size, seed: as in `shuffled`.
        block: samples of a block; the last may have fewer.
        together: blocks at a time.
    """
    shuffle = partial(_shuffle_blocks, block=block, together=together)
    return _shuffle_epochs(numbers, size, seed, shuffle)


def _shuffle_blocks(
    places: np.ndarray, size: int, key: int, *, block: int, together: int
) -> np.ndarray:
    """The samples at places of one epoch: int64 ``[n]``."""

    def drawn(index: int) -> int:
        return int(mix(np.array([index], np.uint64), key, 0)[0])

    full, rest = divmod(size, block)
    # the block that is not full comes at any turn; before its samples places are left out, so that
    # all turns have as many
    short, hole = (drawn(0) % (full + 1), block - rest) if rest else (full, 0)

    def wide(place: np.ndarray | int) -> Any:
        return place + hole * (place >= short * block)

    def begin(turn: int) -> int:
        return min(turn * block - hole * (turn > short), size)

    groups = wide(places) // (block * together)
    mixed = np.empty_like(places)
    for group in np.unique(groups).tolist():
        chosen = groups == group
        low, high = begin(group * together), begin((group + 1) * together)
        mixed[chosen] = low + permute(places[chosen] - low, high - low, drawn(group + 2))
    turns, inside = np.divmod(wide(mixed), block)
    blocks = np.full_like(turns, full)
    others = turns != short
    blocks[others] = permute(turns[others] - (turns[others] > short), full, drawn(1))
    return blocks * block + inside - hole * ~others


_CANNOT_GROW = "batch sizes cannot grow like this"


@dataclass(frozen=True)
class RampUp:
    """Batch sizes that grow, as Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES``.

    The batch size goes from `start` to `final` in steps of `increment`, each of which lasts for the
    same number of samples: with n increments, after c samples it is
    ``start + increment * floor(c n / samples)``, and `final` once c is `samples`. A step reads what
    there is before it begins, so that sizes change between steps only, and a size is left out where
    one step goes beyond all of its samples. Which samples a step has follows in closed form.

    Attributes:
        start: the size of the first batches.
        increment: what is added each time.
        samples: over how many samples the size grows.
        final: the size afterwards.
        earlier: the steps that a run began with, whose batches were changed half-way:
            ``(steps, size)`` each, in order; their samples count among those over which it grows.

    Raises:
        ValueError: sizes or steps below 1, a final size that increments do not reach, or fewer
            samples than increments.
    """

    start: int
    increment: int
    samples: int
    final: int
    earlier: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        names = ("start", "increment", "samples", "final")
        problems = list(_find_mistakes({name: getattr(self, name) for name in names}))
        wanted, fix = "at least 1 step of at least 1 sample", "leave out sizes that no step had"
        problems += [
            Problem(f"earlier[{i}]", f"{steps} steps of {size} samples", wanted, fix)
            for i, (steps, size) in enumerate(self.earlier)
            if min(steps, size) < 1
        ]
        raise_problems(_CANNOT_GROW, problems)

    @cached_property
    def _stages(self) -> tuple[list[int], list[int], list[int]]:
        """Of every size that comes up: its first step, the samples before that, and the size."""
        increments = (self.final - self.start) // self.increment
        step = consumed = 0
        rows = []
        for count, size in self.earlier:
            rows.append((step, consumed, size))
            step, consumed = step + count, consumed + count * size
        for stage in range(increments):
            size = self.start + stage * self.increment
            # the first count of samples that is floor(c * increments / samples) > stage
            end = -(-(stage + 1) * self.samples // increments)
            count = max(0, -(-(end - consumed) // size))
            if count:
                rows.append((step, consumed, size))
            step, consumed = step + count, consumed + count * size
        rows.append((step, consumed, self.final))
        steps, samples, sizes = zip(*rows, strict=True)
        return list(steps), list(samples), list(sizes)

    def batch_size(self, step: int) -> int:
        """How many samples the step has; the first step is 0."""
        steps, _, sizes = self._stages
        return sizes[bisect.bisect_right(steps, step) - 1]

    def first_sample(self, step: int) -> int:
        """How many samples all steps before this one have together: where it begins."""
        steps, samples, sizes = self._stages
        stage = bisect.bisect_right(steps, step) - 1
        return samples[stage] + (step - steps[stage]) * sizes[stage]

    def step_of(self, sample: int) -> int:
        """The step that has this sample."""
        steps, samples, sizes = self._stages
        stage = bisect.bisect_right(samples, sample) - 1
        return steps[stage] + (sample - samples[stage]) // sizes[stage]

    @property
    def first_steps(self) -> tuple[int, ...]:
        """The first step of each of `sizes`."""
        return tuple(self._stages[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that come up, one after another."""
        return tuple(self._stages[2])

    def sizes_from(self, step: int) -> tuple[int, ...]:
        """Those of `step` and the steps after it: what a mesh must be able to divide."""
        steps, _, sizes = self._stages
        return tuple(sizes[bisect.bisect_right(steps, step) - 1 :])

    def until(self, step: int) -> tuple[tuple[int, int], ...]:
        """The first `step` steps as `earlier` has them: how many have which size."""
        steps, _, sizes = self._stages
        found: list[tuple[int, int]] = []
        for first, end, size in zip(steps, [*steps[1:], step], sizes, strict=True):
            if (count := min(end, step) - first) < 1:
                break
            if found and found[-1][1] == size:
                count += found.pop()[0]
            found.append((count, size))
        return tuple(found)


def parse_earlier(text: str) -> tuple[tuple[int, int], ...]:
    """The ``(steps, size)`` of ``"6x4 10x8"``: 6 steps of 4 samples, 10 of 8; else ValueError."""
    words = text.replace(",", " ").split()
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", word) for word in words):
        wanted = "steps and their samples, such as 6x4 10x8"
        refuse("no such batches", "earlier_batches", repr(text), wanted, "leave it out")
    return tuple((int(n), int(size)) for n, size in (word.split("x") for word in words))


def earlier_text(earlier: Iterable[tuple[int, int]]) -> str:
    """Earlier batches as the text that `parse_earlier` reads."""
    return " ".join(f"{steps}x{size}" for steps, size in earlier)


def parse_ramp_up(text: str, final: int, earlier: str = "") -> RampUp:
    """The batch sizes that ``"START INCREMENT SAMPLES"`` describes; of empty text, `final` always.

    Args:
        text: three whole numbers, as Megatron-LM's --rampup-batch-size takes them.
        final: the size afterwards.
        earlier: the batches before, as `parse_earlier` reads them.

    Raises:
        ValueError: it is no such text, or what `RampUp` raises, in the words of `TrainConfig`.
    """
    words = text.split() or [str(final), "1", "1"]
    if len(words) != 3 or not all(word.isdecimal() for word in words):
        part = max(final // 4, 1)
        fix = f'write --ramp-up "{part} {part} 1000", or leave it out'
        wanted = "three whole numbers: START INCREMENT SAMPLES"
        refuse(_CANNOT_GROW, "ramp_up", repr(text), wanted, fix)
    start, increment, samples = map(int, words)
    if text.strip():
        given = {"START": start, "INCREMENT": increment, "SAMPLES": samples}
        named = {f"ramp_up={text!r}: {name}": value for name, value in given.items()}
        raise_problems(_CANNOT_GROW, _find_mistakes({**named, "global_batch": final}))
    return RampUp(start, increment, samples, final, parse_earlier(earlier))


def _find_mistakes(numbers: Mapping[str, int]) -> Iterator[Problem]:
    """The mistakes of the start, increment, samples and final size of a ramp, by their names."""
    small = [
        Problem(name, repr(value), "a whole number of at least 1")
        for name, value in numbers.items()
        if not isinstance(value, int) or value < 1
    ]
    yield from small
    if small:
        return
    (_, start), (_, increment), (of_samples, samples), (of_final, final) = numbers.items()
    grown = final - start
    if grown < 0 or grown % increment:
        fix = f"set it to {start + max(0, round(grown / increment)) * increment}"
        yield Problem(of_final, str(final), f"{start} and a multiple of {increment}", fix)
    elif samples < grown // increment:
        wanted = f"at least the {grown // increment} increments"
        yield Problem(of_samples, str(samples), wanted, f"set it to {grown // increment} or more")
