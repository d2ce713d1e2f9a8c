"""Which pieces of documents share a sample: best-fit packing, as arithmetic on their lengths.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling": documents, longest first,
go where the least room is left. Theirs leaves the last rooms empty; `fill` cuts a few documents to
fill these as well, so that how many samples there are follows from the number of tokens alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class Rooms:
    """Samples by how much room is left in them.

    Finding one takes a bisection of the different rooms that there are.
    """

    def __init__(self):
        self._rooms: list[int] = []
        self._samples: dict[int, list[int]] = {}

    def add(self, sample: int, room: int) -> None:
        """A sample with room for `room` tokens; one that is full is forgotten."""
        if room in self._samples:
            self._samples[room].append(sample)
        elif room:
            self._samples[room] = [sample]
            insort(self._rooms, room)

    def best(self, length: int) -> tuple[int, int] | None:
        """Take out the sample with the least room that `length` tokens fit into, and its room.

        Of several with as much room the last that was added; None where there is no such sample.
        """
        return self._take(bisect_left(self._rooms, length))

    def largest(self) -> tuple[int, int] | None:
        """Take out a sample with the most room, and its room; None where all are full."""
        return self._take(max(len(self._rooms) - 1, 0))

    def _take(self, place: int) -> tuple[int, int] | None:
        if place >= len(self._rooms):
            return None
        room = self._rooms[place]
        samples = self._samples[room]
        sample = samples.pop()
        if not samples:
            del self._samples[room], self._rooms[place]
        return sample, room


def best_fit(lengths: Sequence[int], seq: int) -> list[list[int]]:
    """Which of `lengths` go into each sample, longest first; none is cut, and rooms stay.

    Needs at most 11/9 of the fewest samples possible and 4 more (Johnson et al. 1974).

    Args:
        lengths: from 1 to `seq`.
        seq: tokens of a sample.

    Returns:
        Of every sample, the indices in `lengths`, longest first, of equal ones the first.
    """
    rooms, samples = Rooms(), []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        found = rooms.best(lengths[index])
        sample, room = found or (len(samples), seq)
        if found is None:
            samples.append([])
        samples[sample].append(index)
        rooms.add(sample, room - lengths[index])
    return samples


@dataclass(frozen=True)
class Filled:
    """Samples without any room left, made of pieces of a row of tokens.

    Attributes:
        begins: int64 ``[pieces]``: where each begins in the row, increasing within a sample.
        lengths: int64 ``[pieces]``.
        first: int64 ``[samples + 1]``: the first piece of each sample; the last one's end.
    """

    begins: np.ndarray
    lengths: np.ndarray
    first: np.ndarray


def fill(begins: np.ndarray, samples: int, seq: int) -> Filled:
    """Cut a row of ``samples * seq`` tokens into pieces that fill as many samples.

    Documents of more than `seq` tokens are cut into pieces of `seq` and a rest. Rests and shorter
    documents go where they fit best, longest first; one that fits nowhere fills the largest room
    with its beginning, and so on with what is left of it. Should this cut more often than the
    samples in a row would, they are taken in a row. So every token is in one sample, no two pieces
    of a document are in the same, and there are at most ``samples - 1`` cuts that do not have to
    be: never more than without packing.

    Args:
        begins: where documents begin in the row, integers, increasing from 0.
        samples: how many, at least 1.
        seq: tokens of each.
    """
    lengths = np.diff(begins, append=samples * seq)
    whole, rest = np.divmod(lengths, seq)
    number = int(whole.sum())
    before = np.repeat(np.cumsum(whole) - whole, whole)
    starts = np.repeat(begins, whole) + seq * (np.arange(number) - before)
    order = np.argsort(-rest, kind="stable")
    order = order[: np.count_nonzero(rest)]
    pieces = _fitted(rest[order].tolist(), samples - number, seq)
    which, skipped, sizes, where = np.array(pieces, np.int64).reshape(-1, 4).T
    inside = order[which]
    starts = np.concatenate([starts, begins[inside] + seq * whole[inside] + skipped])
    where = np.concatenate([np.arange(number), number + where])
    sizes = np.concatenate([np.full(number, seq), sizes])
    in_a_row = np.union1d(begins, seq * np.arange(samples))
    if len(in_a_row) < len(starts):
        starts, where = in_a_row, in_a_row // seq
        sizes = np.diff(in_a_row, append=samples * seq)
    order = np.lexsort((starts, where))
    first = np.searchsorted(where[order], np.arange(samples + 1))
    return Filled(starts[order], sizes[order], first)


def _fitted(lengths: Sequence[int], samples: int, seq: int) -> list[tuple[int, int, int, int]]:
    """Fill samples with pieces, given longest first: which, how much of it before, length, sample.

    The lengths add up to ``samples * seq``.
    """
    rooms, placed, left = Rooms(), [], []
    for sample in reversed(range(samples)):
        rooms.add(sample, seq)
    for index, length in enumerate(lengths):
        found = rooms.best(length)
        if found is None:  # after the others: what is shorter may fit
            left.append((index, length))
            continue
        sample, room = found
        placed.append((index, 0, length, sample))
        rooms.add(sample, room - length)
    for index, length in left:
        done = 0
        while done < length:
            found = rooms.best(length - done) or rooms.largest()
            assert found is not None  # there is as much room as there are tokens
            sample, room = found
            size = min(room, length - done)
            placed.append((index, done, size, sample))
            rooms.add(sample, room - size)
            done += size
    return placed
