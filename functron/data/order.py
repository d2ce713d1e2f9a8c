"""Which samples a step trains on: rows of a batch, and shuffled epochs, by arithmetic alone."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from functron.data.permutation import mix, permute
from functron.errors import Problem, raise_problems

IGNORED = -100
"""The target that stands for none; `functron.nn.IGNORE_INDEX`."""


class Samples(Protocol):
    """What a training run draws its batches from: `ByteText`, `TokenText` or `Chat`.

    Attributes:
        vocab_size: a model of these samples needs at least as many token ids.
    """

    vocab_size: int

    def batch(
        self, step: int, global_batch: int, part: tuple[int, int] = (0, 1)
    ) -> dict[str, torch.Tensor]:
        """This part's rows of the batch of `step`, where all have one size: `drawn` of that."""
        ...

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples that a run sees as numbers `numbers`, from 0: all but ``rows``."""
        ...

    def summary(self) -> str:
        """What there is, in a few words for the user."""
        ...


class Draws(Protocol):
    """What has samples by their numbers, as all `Samples` do."""

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples that a run sees as numbers `numbers`, from 0: all but ``rows``."""
        ...


def drawn(
    samples: Draws, first: int, count: int, part: tuple[int, int] = (0, 1)
) -> dict[str, torch.Tensor]:
    """This part's rows of a batch of samples `first` to ``first + count - 1`` of a run.

    The same samples however many parts there are, and whatever sizes the batches before had: row r
    of the batch is sample number ``first + r``. The parts' batches, concatenated in order, are the
    batch of part ``(0, 1)``.

    Args:
        samples: what to draw from.
        first: the number of the batch's first sample, from 0: ``step * count`` where all batches
            have one size, or `functron.data.ramp.RampUp.first_sample`.
        count: rows of all parts together.
        part: ``(index, count)``: which of how many contiguous parts.

    Returns:
        What `samples` draws, and ``rows`` int64 ``[rows]``, the rows' indices in the batch.

    Raises:
        ValueError: what `rows_of` raises.
    """
    rows = rows_of(first, count, part)
    return {**samples.draw(first + rows), "rows": torch.from_numpy(rows)}


def rows_of(first: int, global_batch: int, part: tuple[int, int] = (0, 1)) -> np.ndarray:
    """The rows of a global batch that one of its equal, contiguous parts has: int64.

    Args:
        first: the number of its first sample, from 0.
        global_batch: rows of all parts together.
        part: ``(index, count)``: which of how many.

    Raises:
        ValueError: `count` does not divide `global_batch`, or no such part.
    """
    index, count = part
    problems = []
    if count < 1 or not 0 <= index < count or first < 0:
        got = f"part ({index}, {count}) of samples from {first}"
        problems.append(Problem("part", got, "0 <= index < count, and samples from 0"))
    elif global_batch < 1 or global_batch % count:
        fix = f"use a global batch of {max(-(-global_batch // count), 1) * count}"
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
    epochs, within = np.divmod(numbers, size)
    found = np.empty_like(within)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        # an odd multiplier makes the keys of two (seed, epoch) pairs differ below 2^32 epochs
        found[chosen] = permute(within[chosen], size, seed * 0x1_0000_0001 + int(epoch))
    return found


def shuffled_blocks(
    numbers: np.ndarray, size: int, block: int, together: int, seed: int
) -> np.ndarray:
    """As `shuffled`, but of blocks of samples, some of them at a time.

    Every epoch takes the blocks in an order of its own, `together` of them at a time, and the
    samples of those in any order. So what must be known of blocks is needed of few at once, and
    samples that come together are from as many places.

    Args:
        numbers: from 0, any shape; number n is in epoch ``n // size``.
        size: how many samples there are.
        block: samples of a block; the last may have fewer.
        together: blocks at a time.
        seed: selects the orders.

    Returns:
        int64 in ``range(size)``, the shape of `numbers`.
    """
    epochs, within = np.divmod(numbers, size)
    found = np.empty_like(within)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        key = seed * 0x1_0000_0001 + int(epoch)
        found[chosen] = _in_blocks(within[chosen], size, block, together, key)
    return found


def _in_blocks(places: np.ndarray, size: int, block: int, together: int, key: int) -> np.ndarray:
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
