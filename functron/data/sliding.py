"""Windows that slide over texts, so that every token is scored once, with what stands before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from functron.core.errors import refuse
from functron.data.chat import IGNORED, Chat
from functron.data.documents import (
    TextTokenizer,
    TokenFile,
    check_ids,
    encode_prompt,
    find,
)
from functron.data.order import rows_of, shuffled
from functron.data.windows import check_vocabulary, texts_of, token_dtype


class Texts(Protocol):
    """Texts that are scored one by one: none sees another.

    Attributes:
        lengths: targets of each, int64 ``[texts]``: one fewer than its tokens.
        num_bytes: of the text that all targets together stand for; None: that is not known.
    """

    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def num_bytes(self) -> int | None: ...

    def piece(self, text: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` tokens of a text from `start` on, and the target of each: ``[length]``."""
        ...

    def summary(self) -> str:
        """Their number, in a few words for the user."""
        ...


class Documents:
    """Files of text, each as its tokens: bytes, or what a tokenizer gives.

    Of a tokenizer these are the tokens of the text with its BOS before them, if it has one, as
    ``functron sample`` reads a prompt (`functron.data.documents.TextRules`); unlike in training
    nothing is put after them, and what is before them is no target. All of the text is tokenised
    when this is made.

    Args:
        path: a file or a folder of them (see `functron.data.documents.find`).
        tokenizer: what makes tokens of it; None: bytes.
        vocab_size: how many ids the model has.

    Raises:
        ValueError: a file cannot be read, is not UTF-8, or an id is not among the model's.
    """

    def __init__(self, path: str | Path, tokenizer: TextTokenizer | None, vocab_size: int):
        files, _ = find(path)
        self._begin = 0 if tokenizer is None else len(tokenizer.rules.begin_prompt(tokenizer))
        if tokenizer is None:
            self._tokens = [np.memmap(file, np.uint8, mode="r") for file in files]
            self.num_bytes = sum(len(tokens) - 1 for tokens in self._tokens)
        else:
            self._tokens, self.num_bytes = _tokenised(files, tokenizer, vocab_size)
        self.lengths = np.array([len(tokens) - 1 for tokens in self._tokens], np.int64)

    def piece(self, text: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._tokens[text][start : start + length + 1]
        tokens, targets = found[:-1], found[1:]
        if (hidden := self._begin - 1 - start) > 0:
            targets = np.where(np.arange(len(targets)) < hidden, IGNORED, targets.astype(np.int64))
        return tokens, targets

    def summary(self) -> str:
        """Their number, in a few words for the user."""
        total = int(self.lengths.sum()) + len(self.lengths)
        return f"{total:,} tokens in {len(self.lengths):,} texts"


def _tokenised(
    files: list[Path], tokenizer: TextTokenizer, vocab_size: int
) -> tuple[list[np.ndarray], int]:
    """The tokens of each file that has some, and the bytes of all but the first ones."""
    found, count = [], 0
    for text in texts_of(files):
        ids = np.array(encode_prompt(tokenizer, text), token_dtype(tokenizer))
        if len(ids):
            check_vocabulary(int(ids.max()) + 1, vocab_size)
            found.append(ids)
            count += len(text.encode()) - _first_bytes(text, int(ids[0]), tokenizer)
    return found, count


def _first_bytes(text: str, token: int, tokenizer: TextTokenizer) -> int:
    """Bytes of a text that its first token stands for, which nothing predicts."""
    first = tokenizer.decode([token])  # nothing, of tokens that stand around texts
    if text.startswith(first):
        return len(first.encode())
    return 1  # a part of a character


class StoredTokens:
    """Tokens on disk, as one text, or each of its documents as one.

    Args:
        file: of `functron.data.open_tokens`.
        vocab_size: how many ids the model has.
        by_document: whether no document sees another.
    """

    num_bytes = None

    def __init__(self, file: TokenFile, vocab_size: int, *, by_document: bool = False):
        self._file, self._most = file, vocab_size
        documents = np.arange(file.num_documents + 1) if by_document else None
        edges = np.array([0, file.num_tokens]) if documents is None else file.starts(documents)
        self._starts, self.lengths = edges[:-1], np.maximum(np.diff(edges) - 1, 0)

    def piece(self, text: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Texts.piece`; ValueError where a token is no id of the model."""
        first = int(self._starts[text]) + start
        found = self._file.read(first, length + 1)
        check_ids(self._file.path, found, first, self._most)
        return found[:-1], found[1:]

    def summary(self) -> str:
        """Their number, in a few words for the user."""
        counts = f"{self._file.num_tokens:,} tokens in {self._file.num_documents:,} documents"
        return f"{counts}, on disk"


class Conversations:
    """Conversations, whose targets are the assistant's tokens.

    Args:
        chat: of which `Chat.conversation` is read.
    """

    num_bytes = None

    def __init__(self, chat: Chat):
        self._chat, self.lengths = chat, chat.lengths

    def piece(self, text: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, targets = self._chat.conversation(text)
        return tokens[start : start + length], targets[start : start + length]

    def summary(self) -> str:
        """Their number, in a few words for the user."""
        return self._chat.summary()


class Sliding:
    """Windows of up to `seq` tokens over each of some texts, whose targets count once altogether.

    The first window of a text has its first `seq` targets. Every other one begins `stride` tokens
    after the one before and counts its last `stride` targets; the last one may be shorter, and
    counts those that are left. So every token of a text but its first is a target once, with at
    least ``seq - stride`` tokens before it: Hugging Face's guide to perplexity with
    ``max_length = seq + 1``, whose windows are counted with their last target.

    Shorter windows are padded at the end, to the longest of their batch, with tokens 0 and
    `IGNORED` targets. As of `functron.data.Samples`, batches are a function of the step; those of
    an epoch come in an order that does not depend on a seed.

    Args:
        texts: what to score.
        seq: tokens that a window has at most.
        stride: tokens between the beginnings of two windows; at most `seq`.
        global_batch: rows of a batch.
        multiple: lengths of batches are multiples of it, as a mesh splits them.
        exact: batches have windows of one length, so that none of them is padded but by
            `multiple`: for models of which padding changes the outputs of tokens before it.

    Attributes:
        num_samples: rows of all batches, with those that no window is left for.
        num_windows: how many of these are windows.
        longest: tokens of the longest batch.

    Raises:
        ValueError: `stride` is not from 1 to `seq`, or no text has two tokens.
    """

    def __init__(
        self,
        texts: Texts,
        seq: int,
        stride: int,
        global_batch: int,
        *,
        multiple: int = 1,
        exact: bool = False,
    ):
        if not 1 <= stride <= seq:
            refuse(
                "cannot slide over texts", "stride", stride, f"from 1 to seq={seq}", "leave it out"
            )
        self._texts, self._seq, self._stride = texts, seq, stride
        self._multiple = multiple
        lengths = texts.lengths
        if not (lengths > 0).any():
            got = f"{len(lengths)} texts, none with two tokens"
            refuse(
                "nothing to score", "data", got, "a token to predict from another", "take more text"
            )
        full = np.where(lengths >= seq, (lengths - seq) // stride + 1, 0)
        self._full_ends = np.cumsum(full)
        # what is left of a text after its full windows: its last window
        left = np.where(full > 0, lengths - seq - (full - 1) * stride, lengths)
        short = np.flatnonzero(left > 0)
        begins = full[short] * stride
        sizes = lengths[short] - begins
        order = np.argsort(-sizes, kind="stable")
        self._short = np.stack([short, begins, sizes], 1)[order]
        num_full = int(full.sum())
        self.num_windows = num_full + len(order)
        self._gap = -num_full % global_batch if exact else 0
        if exact:
            self._short = _grouped(self._short, global_batch)
        self._num_full = num_full
        rows = num_full + self._gap + len(self._short)
        self.num_samples = -(-rows // global_batch) * global_batch
        longest = seq if num_full else int(self._short[0, 2])
        self.longest = self._padded(longest)

    def _padded(self, length: int) -> int:
        return -(-max(length, 1) // self._multiple) * self._multiple

    def batch(
        self, step: int, global_batch: int, part: tuple[int, int] = (0, 1)
    ) -> dict[str, torch.Tensor]:
        """As `functron.data.Samples.batch`, of as many rows as `Sliding` was given.

        Returns:
            ``tokens`` and ``targets`` int64 ``[rows, length]`` and ``rows`` int64 ``[rows]``, the
            rows' indices in the global batch. Rows that no window is left for have no targets.
        """
        rows = rows_of(step * global_batch, global_batch, part)
        batches = self.num_samples // global_batch
        place = int(shuffled(np.array([step % batches]), batches, 0)[0]) * global_batch
        windows = [self._window(place + row) for row in range(global_batch)]
        length = self._padded(max(size for _, _, size in windows))
        tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        for at, row in enumerate(rows.tolist()):
            text, begin, size = windows[row]
            if not size:
                continue
            found, wanted = self._texts.piece(text, begin, size)
            tokens[at, :size] = torch.from_numpy(found.astype(np.int64))
            again = self._seq - self._stride if begin else 0
            targets[at, again:size] = torch.from_numpy(wanted.astype(np.int64))[again:]
        return {"tokens": tokens, "targets": targets, "rows": torch.from_numpy(rows)}

    def _window(self, index: int) -> tuple[int, int, int]:
        """The text, first token and length of a window; length 0: there is none."""
        if index < self._num_full:
            index = int(shuffled(np.array([index]), self._num_full, 0)[0])
            text = int(np.searchsorted(self._full_ends, index, side="right"))
            before = int(self._full_ends[text - 1]) if text else 0
            return text, (index - before) * self._stride, self._seq
        index -= self._num_full + self._gap
        if not 0 <= index < len(self._short):
            return 0, 0, 0
        text, begin, size = self._short[index].tolist()
        return text, begin, size

    @property
    def num_bytes(self) -> int | None:
        """Of the text that all targets together stand for; None: that is not known."""
        return self._texts.num_bytes

    def summary(self) -> str:
        """Their number, in a few words for the user."""
        return self._texts.summary()


def _grouped(windows: np.ndarray, together: int) -> np.ndarray:
    """`windows` in order of their lengths, with rows of zeros so that each batch has one length."""
    pieces: list[np.ndarray] = []
    edges = np.flatnonzero(np.diff(windows[:, 2])) + 1
    groups: Sequence[np.ndarray] = np.split(windows, edges)
    for group in groups:
        pieces += [group, np.zeros((-len(group) % together, 3), np.int64)]
    return np.concatenate(pieces)
