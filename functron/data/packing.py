"""Packed batches: several documents in a sample, and the order in which ranks share them evenly.

A packed batch has, besides tokens and targets, the `positions` of tokens in their documents and the
numbers of these, `segments`; attention sees a token's own document only. Everything here is
arithmetic on the host, and the same on every host.

Which pieces of documents share a sample is best-fit packing, as arithmetic on their lengths
(`best_fit`, `fill`). Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling":
documents, longest first, go where the least room is left. Theirs leaves the last rooms empty;
`fill` cuts a few documents to fill these as well, so that how many samples there are follows from
the number of tokens alone.

Of documents on disk few are cut, and nothing is padded; conversations are not cut for it. No
document sees another.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from functron.core.errors import Problem, raise_problems, refuse
from functron.core.typing import Tensor
from functron.data.chat import IGNORED, Chat, Overlong
from functron.data.mapped_files import (
    TokenFile,
    check_ids,
    describe_file,
    raise_listed,
    refuse_order,
)
from functron.data.sampling import (
    Samples,
    check_index,
    rounded_up,
    shuffled,
    shuffled_blocks,
    stack_leaves,
)

LEAVES = ("tokens", "targets", "positions", "segments")
"""The leaves of a packed batch, in the order of the rows of `entries`."""

_TOKENS, _TARGETS, _POSITIONS, _SEGMENTS = range(len(LEAVES))


def pack(
    documents: Sequence[np.ndarray],
    seq: int,
    *,
    multiple: int = 1,
    decreasing: bool = True,
    overlong: Overlong = "refuse",
    pad: int = 0,
) -> dict[str, Tensor]:
    """Documents of many lengths, as samples of `seq` tokens with as many of them as fit in.

    Each goes into the first sample with room for it. Taken longest first, this needs at most
    11/9 of the fewest samples possible, and 6/9 of one (Dosa 2007); shuffle the samples then, as
    the first have the longest documents. The same documents give the same samples.

    Args:
        documents: token ids, integers ``[n]`` each.
        seq: tokens of a sample.
        multiple: every document is padded to a multiple of this: ``2 * cp`` for `balance`, which
            then leaves the length of samples as it is.
        decreasing: take them longest first, rather than in the order they come in.
        overlong: what becomes of documents of more than `seq` tokens: ``refuse`` them all, ``cut``
            off their ends, or ``drop`` them.
        pad: the token id of padding.

    Returns:
        int64 ``[samples, seq]`` each: ``tokens``; ``targets``, the next token of the document,
        `IGNORED` at its last and in padding; ``positions`` in the document, from 0; ``segments``,
        the document's index in `documents`. Padding continues the document before it, whose
        tokens do not see what comes after them. And ``rows`` int64 ``[samples]``, from 0.

    Raises:
        ValueError: documents are empty, no rows of integers, or too long; there are none; or an
            argument is out of range. The first 20 at fault are listed.
    """
    _check_arguments(seq, multiple, overlong)
    check_documents(documents)
    if overlong == "refuse":
        fix = f'raise seq to {max(map(len, documents))} or more, or overlong="cut" or "drop"'
        raise_listed("documents are longer than samples", [
            Problem(f"documents[{i}]", f"{len(x)} tokens", f"at most seq={seq}", fix)
            for i, x in enumerate(documents) if len(x) > seq
        ])  # fmt: skip
    kept = [i for i, x in enumerate(documents) if overlong != "drop" or len(x) <= seq]
    if not kept:
        got = f"{len(documents)} documents of more than {seq} tokens each"
        refuse("nothing to pack", "documents", got, "one that fits", "raise seq")
    lengths = {i: min(len(documents[i]), seq) for i in kept}
    if decreasing:
        kept.sort(key=lambda i: -lengths[i])  # stable: equal ones stay in order
    rooms = {i: rounded_up(lengths[i], multiple) for i in kept}
    samples = []
    for indices in _pack_first_fit(kept, rooms, seq):
        rest = seq - sum(rooms[i] for i in indices)
        rooms[indices[-1]] += rest
        pieces = [entries(documents[i][: lengths[i]], i, rooms[i], pad) for i in indices]
        samples.append(np.concatenate(pieces, 1))
    return as_batch(samples)


def balance(
    batch: Mapping[str, Tensor], cp: int, *, seq: int | None = None, pad: int = 0
) -> dict[str, Tensor]:
    """A packed batch in the order in which `cp` ranks have equal parts of every document.

    Every document is padded to 2 cp chunks of equal length, and rank r of cp has the chunks r and
    2 cp - 1 - r of each: first the early ones of all documents, then the late ones. So attention
    costs all ranks the same, whatever the lengths (the per-document zig-zag of Transformer Engine
    and Megatron-LM). Train with ``Context(order="balanced")``. On two ranks, of a document of 8
    tokens and one of 3:

    | rank 0: early, late       | rank 1: early, late         |
    |---------------------------|-----------------------------|
    | a0 a1 b0, a6 a7 (padding) | a2 a3 b1, a4 a5 b2          |

    Args:
        batch: what `pack` returns, or any batch of its kind: the tokens of a document lie side by
            side, in order.
        cp: ranks of that mesh axis.
        seq: tokens of a sample of the result, a multiple of 2 cp; None: as many as the largest
            needs. Samples that need fewer get more padding in their last document.
        pad: the token id of padding.

    Returns:
        The batch with ``seq`` tokens in a sample: without `seq`, at most ``T + (2 cp - 1) D``
        where samples of T tokens have at most D documents; T where `pack` was given
        ``multiple=2 * cp`` and T is such a multiple. A static `seq` keeps the shapes of all steps
        the same.

    Raises:
        ValueError: the batch is not packed, its documents are torn apart or out of order, or `seq`
            is too small or no multiple.
    """
    found = separate_documents(batch, cp)
    chunks = 2 * cp
    needed = max(sum(rounded_up(x.shape[1], chunks) for x in row) for row in found)
    length = needed if seq is None else seq
    if length < needed or length % chunks:
        wanted = f"a multiple of 2 cp = {chunks}, at least {needed}"
        fix = f"use seq={max(needed, rounded_up(length, chunks))}"
        refuse("cannot balance", "seq", length, wanted, fix)
    samples = []
    for row in found:
        rooms = [rounded_up(x.shape[1], chunks) for x in row]
        rooms[-1] += length - sum(rooms)
        shares = [zigzag(extend_document(x, n, pad), cp) for x, n in zip(row, rooms, strict=True)]
        early = [[both[rank][0] for both in shares] for rank in range(cp)]
        late = [[both[rank][1] for both in shares] for rank in range(cp)]
        samples.append(np.concatenate([x for r in range(cp) for x in early[r] + late[r]], 1))
    return as_batch(samples, batch.get("rows"))


def entries(tokens: np.ndarray, number: int, room: int, pad: int) -> np.ndarray:
    """int64 ``[4, room]``: the `LEAVES` of a document, and of the padding that continues it."""
    out = np.empty((len(LEAVES), room), np.int64)
    size = len(tokens)
    out[_TOKENS, :size], out[_TOKENS, size:] = tokens, pad
    out[_TARGETS] = IGNORED
    out[_TARGETS, : max(size - 1, 0)] = tokens[1:]
    out[_POSITIONS] = np.arange(room)
    out[_SEGMENTS] = number
    return out


def zigzag(document: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The early and the late chunk of each of `size` ranks; 2 size divides the document."""
    chunks = np.split(document, 2 * size, 1)
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(size)]


def as_batch(samples: Sequence[np.ndarray], rows: Tensor | None = None) -> dict[str, Tensor]:
    """A batch of samples ``[4, seq]`` as `entries` makes them; `rows` count from 0 if None."""
    return {
        **stack_leaves(LEAVES, samples),
        "rows": torch.arange(len(samples)) if rows is None else rows,
    }


def check_documents(documents: Sequence[np.ndarray]) -> None:
    """Raise ValueError unless each is a row of integers, and not an empty one."""
    problems = []
    for i, x in enumerate(documents):
        if not isinstance(x, np.ndarray) or x.ndim != 1 or x.dtype.kind not in "iu":
            got = f"{x.dtype} {list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
            problems.append(Problem(f"documents[{i}]", got, "a numpy array [n] of integers"))
        elif not len(x):
            fix = "leave it out: it has nothing to learn from"
            problems.append(Problem(f"documents[{i}]", "no tokens", "at least 1", fix))
    if not len(documents):
        problems.append(Problem("documents", "none", "at least 1"))
    raise_listed("invalid documents", problems)


def _check_arguments(seq: int, multiple: int, overlong: str) -> None:
    problems = []
    if multiple < 1:
        problems.append(Problem("multiple", str(multiple), "at least 1"))
    elif seq < 1 or seq % multiple:
        fix = f"use seq={rounded_up(max(seq, 1), multiple)}"
        problems.append(Problem("seq", str(seq), f"a positive multiple of {multiple}", fix))
    if overlong not in ("refuse", "cut", "drop"):
        problems.append(Problem("overlong", repr(overlong), "refuse, cut or drop"))
    raise_problems("cannot pack", problems)


def _pack_first_fit(
    order: Sequence[int], rooms: Mapping[int, int], seq: int
) -> Iterator[list[int]]:
    """Which documents go into each sample: each into the first that has room for it.

    A tree whose nodes know the largest gap below them finds that sample in log steps.
    """
    leaves = 1 << (len(order) - 1).bit_length()
    gaps, samples = [seq] * (2 * leaves), [[] for _ in range(leaves)]
    for i in order:
        node = 1
        while node < leaves:
            node = 2 * node + (gaps[2 * node] < rooms[i])
        samples[node - leaves].append(i)
        gaps[node] -= rooms[i]
        while node > 1:
            node //= 2
            gaps[node] = max(gaps[2 * node], gaps[2 * node + 1])
    return (indices for indices in samples if indices)


def extend_document(document: np.ndarray, room: int, pad: int) -> np.ndarray:
    """A document ``[4, n]`` with padding that continues it."""
    rest = np.empty((len(LEAVES), room - document.shape[1]), np.int64)
    rest[_TOKENS], rest[_TARGETS] = pad, IGNORED
    rest[_POSITIONS] = document[_POSITIONS, -1] + 1 + np.arange(rest.shape[1])
    rest[_SEGMENTS] = document[_SEGMENTS, -1]
    return np.concatenate([document, rest], 1)


def separate_documents(
    batch: Mapping[str, Tensor], cp: int = 1, title: str = "cannot balance"
) -> list[list[np.ndarray]]:
    """Of every sample of a packed batch its documents, the `LEAVES` ``[4, n]`` of each.

    Raises:
        ValueError: under this title: the batch is not packed, or documents are torn apart or out
            of order.
    """
    problems = [
        Problem(f"batch[{name!r}]", "nothing", "int64 [samples, seq]", "make it with pack")
        for name in LEAVES if name not in batch
    ]  # fmt: skip
    if cp < 1:
        problems.append(Problem("cp", str(cp), "at least 1"))
    shapes = {tuple(batch[name].shape) for name in LEAVES if name in batch}
    if len(shapes) > 1 or any(len(s) != 2 or not math.prod(s) for s in shapes):
        problems.append(Problem("batch", f"shapes {sorted(shapes)}", "one [samples, seq]"))
    raise_problems(title, problems)
    stacked = np.stack([batch[name].numpy() for name in LEAVES], 1).astype(np.int64)
    found = []
    for number, row in enumerate(stacked):
        starts = np.flatnonzero(np.diff(row[_SEGMENTS])) + 1
        documents = np.split(row, starts, 1)
        torn = len({int(x[_SEGMENTS, 0]) for x in documents}) < len(documents)
        if torn or any((np.diff(x[_POSITIONS]) != 1).any() for x in documents):
            got = "a document in several places" if torn else "positions that do not count by 1"
            fix = "give it what pack returns, and only once"
            problems.append(Problem(f"sample {number}", got, "documents side by side", fix))
        found.append(documents)
    raise_listed(title, problems)
    return found


class Rooms:
    """Samples by how much room is left in them, which a bisection of the different rooms finds."""

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
        return self._take_sample(bisect_left(self._rooms, length))

    def largest(self) -> tuple[int, int] | None:
        """Take out a sample with the most room, and its room; None where all are full."""
        return self._take_sample(max(len(self._rooms) - 1, 0))

    def _take_sample(self, place: int) -> tuple[int, int] | None:
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
        begins, lengths: int64 ``[pieces]``, of each piece in the row; increasing within a sample.
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
    pieces = _fill_rooms(rest[order].tolist(), samples - number, seq)
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


def _fill_rooms(lengths: Sequence[int], samples: int, seq: int) -> list[tuple[int, int, int, int]]:
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


TOGETHER = 16
"""Blocks whose samples are shuffled among one another, and whose packing is kept."""

_BLOCK_TOKENS = 1 << 22


class PackedTokens(Samples):
    """A file of tokens, packed best-fit into samples of `seq` tokens and shuffled in every epoch.

    The row of all tokens is cut into blocks of some 2^22 tokens, and the documents of a block fill
    its samples by `functron.data.packing.fill`: few documents no longer than a sample are cut. An
    epoch has every token once but the last ``num_tokens % seq``, of which there is no whole sample.
    Which tokens are in a sample follows from its block alone, and which sample comes when is
    arithmetic (`functron.data.sampling.shuffled_blocks`): there is no index of samples. Only the
    documents of some blocks and the tokens of each batch are read, whatever the size of the file;
    some 20 bytes for each piece of the last 16 blocks are kept.

    Attention sees a token's own document alone: batches are packed ones
    (`functron.data.packing`). As in `TokenWindows` positions count from 0 where a document begins
    in the sample, whether it was cut before or not. The last token of a document predicts nothing;
    the last one before a cut predicts the one after it.

    Args:
        file: of `functron.data.open_tokens`.
        seq: tokens per sample.
        seed: selects the order of the samples.
        vocab_size: how many ids the model has; None: any.
        block: samples of a block, of which the last may have fewer; None: of 2^22 tokens, but from
            64 to 2048. More of them cut fewer documents.

    Attributes:
        num_samples: samples in an epoch.
        num_tokens, num_documents: in the whole file.
        vocab_size: of the model, or 0: what ids there are is not known without reading all.

    Raises:
        ValueError: there are fewer tokens than one sample has, or `seq` or `block` is below 1.
    """

    def __init__(
        self,
        file: TokenFile,
        seq: int,
        *,
        seed: int = 0,
        vocab_size: int | None = None,
        block: int | None = None,
    ):
        sizes = {"seq": seq} if block is None else {"seq": seq, "block": block}
        problems = [Problem(x, str(size), "at least 1") for x, size in sizes.items() if size < 1]
        if not problems and file.num_tokens < seq:
            got, few = f"{file.num_tokens} tokens", "more text"
            fix = f"use at most seq={file.num_tokens}, or more text" if file.num_tokens else few
            problems.append(Problem(f"data {file.path}", got, f"at least seq={seq}", fix))
        raise_problems("cannot pack the documents into samples", problems)
        self._file, self._most = file, vocab_size
        self.seq, self.seed, self.vocab_size = seq, seed, vocab_size or 0
        self.block = min(max(_BLOCK_TOKENS // seq, 64), 2048) if block is None else block
        self.num_tokens, self.num_documents = file.num_tokens, file.num_documents
        self.num_samples = file.num_tokens // seq
        self._packed: dict[int, tuple[Filled, np.ndarray]] = {}

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """``tokens``, ``targets``, ``positions`` and ``segments``, the numbers of documents in the
        sample from 0: int64 ``[rows, seq]`` each; ValueError where a token is no id of the model.
        """
        rows = np.empty((len(LEAVES), len(numbers), self.seq), np.int64)
        places = np.asarray(numbers, np.int64)
        order = shuffled_blocks(places, self.num_samples, self.block, TOGETHER, self.seed)
        for row, index in enumerate(order.tolist()):
            self._write_sample(rows[:, row], index)
        return {name: torch.from_numpy(x) for name, x in zip(LEAVES, rows, strict=True)}

    def pieces(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of sample `index`; IndexError without such a sample.

        Returns:
            Where they begin in the row of all tokens and their lengths, int64, and whether their
            documents go on after them, bool.
        """
        check_index(index, self.num_samples)
        block, inside = divmod(index, self.block)
        found = self._packed.get(block)
        if found is None:
            found = self._pack_block(block)
            # a new dict each time, so that threads may share it
            kept = list(self._packed.items())[1 - TOGETHER :]
            self._packed = dict([*kept, (block, found)])
        filled, goes_on = found
        mine = slice(*filled.first[inside : inside + 2].tolist())
        begins = filled.begins[mine] + block * self.block * self.seq
        return begins, filled.lengths[mine], goes_on[mine]

    def _pack_block(self, block: int) -> tuple[Filled, np.ndarray]:
        """A block's pieces, and whether their documents go on after them."""
        samples = min(self.block, self.num_samples - block * self.block)
        start, length = block * self.block * self.seq, samples * self.seq
        first, last = self._file.documents_of(np.array([start, start + length - 1])).tolist()
        # of documents that begin at the same token, only the last is not empty
        starts = self._file.starts(np.arange(first, last + 2)) - start
        if last < first or (np.diff(starts) < 0).any() or starts[0] > 0 or starts[-1] < length:
            refuse_order(self._file.path, start, start + length)
        edges = np.unique(starts)
        filled = fill(np.maximum(edges[:-1], 0), samples, self.seq)
        ends = filled.begins + filled.lengths
        return filled, edges[np.searchsorted(edges, ends)] != ends

    def _write_sample(self, sample: np.ndarray, index: int) -> None:
        """Write sample `index` into ``[4, seq]``, the `LEAVES`."""
        tokens, targets, positions, segments = sample
        begins, lengths, goes_on = self.pieces(index)
        at = 0
        pieces = zip(begins.tolist(), lengths.tolist(), goes_on.tolist(), strict=True)
        for begin, length, more in pieces:
            end = at + length
            found = self._file.read(begin, length + more)
            check_ids(self._file.path, found, begin, self._most)
            tokens[at:end], targets[at : end - 1] = found[:length], found[1:length]
            targets[end - 1] = found[length] if more else IGNORED
            at = end
        segments[:] = np.repeat(np.arange(len(lengths)), lengths)
        positions[:] = np.arange(self.seq) - (np.cumsum(lengths) - lengths)[segments]

    def summary(self) -> str:
        return f"{describe_file(self._file)}, packed into {self.num_samples:,} samples"


class PackedChat(Samples):
    """Conversations packed best-fit into samples, which every epoch shuffles anew.

    All of them are packed once, longest first, each into the sample with the least room that it
    fits into: which ones share a sample is the same in every epoch. Attention sees a token's own
    conversation alone and positions count from 0 in each, so that every target has the loss that it
    has in a sample of its own. A step has as many more targets as its samples have more
    conversations; losses are means over targets. Losses that couple the tokens of a sequence, such
    as balance losses of experts, couple those of a sample. Padding continues the last conversation
    of a sample, which does not see what comes after it.

    Args:
        chat: the conversations, all in memory; those that are too long have been cut or dropped.

    Attributes:
        seq: tokens per sample.
        num_samples: samples in an epoch.
        num_conversations, num_tokens: in all samples, without padding.
        vocab_size: one more than the largest id that occurs.
    """

    def __init__(self, chat: Chat):
        self._chat, self.seq, self.seed = chat, chat.seq, chat.seed
        self.vocab_size, self.num_conversations = chat.vocab_size, chat.num_samples
        lengths = chat.lengths
        self.num_tokens = int(lengths.sum())
        samples = best_fit(lengths.tolist(), chat.seq)
        self.num_samples = len(samples)
        self._members = np.concatenate([np.array(x, np.int64) for x in samples])
        self._first = np.cumsum([0, *map(len, samples)])

    def conversations(self, index: int) -> np.ndarray:
        """The conversations of sample `index`, in order: int64; IndexError without such one."""
        check_index(index, self.num_samples)
        return self._members[self._first[index] : self._first[index + 1]]

    def sample(self, index: int) -> np.ndarray:
        """The tokens, targets, positions and segments of sample `index`: int64 ``[4, seq]``."""
        out = np.empty((len(LEAVES), self.seq), np.int64)
        tokens, targets, positions, segments = out
        tokens[:], targets[:] = self._chat.pad, IGNORED
        at = 0
        for number, conversation in enumerate(self.conversations(index).tolist()):
            ids, wanted = self._chat.conversation(conversation)
            end = at + len(ids)
            tokens[at:end], targets[at:end] = ids, wanted
            # to the end of the sample, for the padding after the last
            positions[at:], segments[at:] = np.arange(self.seq - at), number
            at = end
        return out

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        order = shuffled(np.asarray(numbers, np.int64), self.num_samples, self.seed)
        return stack_leaves(LEAVES, map(self.sample, order.tolist()))

    def summary(self) -> str:
        share = self.num_tokens / (self.num_samples * self.seq)
        packed = f", packed into {self.num_samples:,} samples, {share:.0%} full"
        return self._chat.summary(packed)
