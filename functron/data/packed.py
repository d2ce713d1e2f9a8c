"""Packed samples of tokens on disk, and of conversations: neither document sees the other.

Of documents on disk few are cut, and nothing is padded; conversations are not cut for it.
"""

from __future__ import annotations

import numpy as np
import torch

from functron.core.errors import Problem, raise_problems
from functron.data.chat import IGNORED, Chat
from functron.data.order import Samples, check_index, shuffled, shuffled_blocks
from functron.data.packing import LEAVES, Filled, best_fit, fill
from functron.data.token_file import TokenFile, check_ids, refuse_order

TOGETHER = 16
"""Blocks whose samples are shuffled among one another, and whose packing is kept."""

_BLOCK_TOKENS = 1 << 22


class PackedTokens(Samples):
    """A file of tokens, packed best-fit into samples of `seq` tokens and shuffled in every epoch.

    The row of all tokens is cut into blocks of some 2^22 tokens, and the documents of a block fill
    its samples by `functron.data.packing.fill`: of all documents that are no longer than a
    sample, few are cut. An epoch has every token once but the last ``num_tokens % seq``, of
    which there is no whole sample. Which tokens are in a sample follows from its block alone, and
    which sample comes when is arithmetic (`functron.data.order.shuffled_blocks`): there is no index
    of samples, and nothing is read but the documents of some blocks and the tokens of each batch,
    whatever the size of the file. Kept are some 20 bytes for each piece of the last 16 blocks.

    Attention sees a token's own document alone: batches are packed ones
    (`functron.data.packing`). As in `TokenWindows` positions count from 0 where a document begins
    in the sample, whether it was cut before or not. The last token of a document predicts nothing;
    the last one before a cut predicts the one after it.

    Args:
        file: of `functron.data.open_tokens`.
        seq: tokens per sample.
        seed: selects the order of the samples.
        vocab_size: how many ids the model has; None: any.
        block: samples of a block, which are packed together; None: of 2^22 tokens, but from 64 to
            2048. More of them cut fewer documents.

    Attributes:
        seq: tokens per sample.
        block: samples of a block; the last may have fewer.
        num_samples: samples in an epoch.
        num_tokens: tokens in the whole file.
        num_documents: documents that it is made of.
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
        """The samples that come as `numbers`, as `Samples.draw`.

        Returns:
            ``tokens``, ``targets``, ``positions`` and ``segments``, the numbers of documents in the
            sample from 0: int64 ``[rows, seq]`` each.

        Raises:
            ValueError: a token is no id of the model.
        """
        rows = np.empty((len(LEAVES), len(numbers), self.seq), np.int64)
        places = np.asarray(numbers, np.int64)
        order = shuffled_blocks(places, self.num_samples, self.block, TOGETHER, self.seed)
        for row, index in enumerate(order.tolist()):
            self._write(rows[:, row], index)
        return {name: torch.from_numpy(x) for name, x in zip(LEAVES, rows, strict=True)}

    def pieces(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of sample `index`.

        Returns:
            Where its pieces begin in the row of all tokens, int64; their lengths, int64; and
            whether their documents go on after them, bool.

        Raises:
            IndexError: there is no such sample.
        """
        check_index(index, self.num_samples)
        block, inside = divmod(index, self.block)
        found = self._packed.get(block)
        if found is None:
            found = self._pack(block)
            # a new dict each time, so that threads may share it
            kept = list(self._packed.items())[1 - TOGETHER :]
            self._packed = dict([*kept, (block, found)])
        filled, goes_on = found
        mine = slice(*filled.first[inside : inside + 2].tolist())
        begins = filled.begins[mine] + block * self.block * self.seq
        return begins, filled.lengths[mine], goes_on[mine]

    def _pack(self, block: int) -> tuple[Filled, np.ndarray]:
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

    def _write(self, sample: np.ndarray, index: int) -> None:
        """Write sample `index` into ``[4, seq]``, the `LEAVES`."""
        tokens, targets, positions, segments = sample
        begins, lengths, goes_on = self.pieces(index)
        at = 0
        pieces = list(zip(begins.tolist(), lengths.tolist(), goes_on.tolist(), strict=True))
        for begin, length, more in pieces:
            end = at + length
            found = self._file.read(begin, length + more)
            tokens[at:end], targets[at : end - 1] = found[:length], found[1:length]
            targets[end - 1] = found[length] if more else IGNORED
            at = end
        segments[:] = np.repeat(np.arange(len(lengths)), lengths)
        positions[:] = np.arange(self.seq) - (np.cumsum(lengths) - lengths)[segments]
        if self._most is not None:
            ids = np.concatenate([tokens, targets[targets != IGNORED]])
            if not 0 <= ids.min() <= ids.max() < self._most:
                for begin, length, more in pieces:  # which of them it is
                    found = self._file.read(begin, length + more)
                    check_ids(self._file.path, found, begin, self._most)

    def summary(self) -> str:
        """The samples, in a few words for the user."""
        counts = f"{self.num_tokens:,} tokens in {self.num_documents:,} documents, on disk"
        return f"{counts}, packed into {self.num_samples:,} samples"


class PackedChat(Samples):
    """Conversations packed best-fit into samples, which every epoch shuffles anew.

    All of them are packed once, longest first, each into the sample with the least room that it
    fits into: which ones share a sample is the same in every epoch. Attention sees a token's own
    conversation alone and positions count from 0 in each, so that every target has the loss that it
    has in a sample of its own. A step has as many more targets as its samples have more
    conversations; losses are means over targets. What couples the tokens of a sequence, such as
    balance losses of experts, couples those of a sample. Padding continues the last conversation
    of a sample, which does not see what comes after it.

    Args:
        chat: the conversations, all in memory; what is too long has been cut or dropped there.

    Attributes:
        seq: tokens per sample.
        num_samples: samples in an epoch.
        num_conversations: in all of them together.
        num_tokens: in all samples, without padding.
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
        """Which conversations sample `index` has, in their order there: int64.

        Raises:
            IndexError: there is no such sample.
        """
        check_index(index, self.num_samples)
        return self._members[self._first[index] : self._first[index + 1]]

    def sample(self, index: int) -> np.ndarray:
        """The tokens, targets, positions and segments of sample `index`: int64 ``[4, seq]``.

        Raises:
            IndexError: there is no such sample.
        """
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
        """The samples that come as `numbers`, with the leaves of `PackedTokens.draw`."""
        order = shuffled(np.asarray(numbers, np.int64), self.num_samples, self.seed)
        stacked = np.stack([self.sample(index) for index in order.tolist()], 1)
        return {name: torch.from_numpy(x) for name, x in zip(LEAVES, stacked, strict=True)}

    def summary(self) -> str:
        """The samples, in a few words for the user."""
        share = self.num_tokens / (self.num_samples * self.seq)
        packed = f"packed into {self.num_samples:,} samples, {share:.0%} full"
        return f"{self._chat.summary()}, {packed}"
