"""A long row of tokens, cut into windows: text as bytes, text through a tokenizer, tokens on disk.

`MockTokens` are random tokens without a file, of which any part can be made by itself. `Sliding`
windows go over texts one by one, so that every token is scored once, with what stands before it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from functron.core.errors import Problem, raise_problems, refuse
from functron.data.mapped_files import (
    Concatenated,
    TextTokenizer,
    TokenFile,
    byte_parts,
    check_ids,
    check_range,
    describe_file,
    find,
    fitting_dtype,
    python_text,
    raise_listed,
    refuse_order,
)
from functron.data.sampling import (
    IGNORED,
    Samples,
    check_index,
    mix,
    rounded_up,
    rows_of,
    shuffled,
    stack_leaves,
)
from functron.data.text_files import read_plain
from functron.data.tokenizer import end_of_text


def check_tokens(batch: dict[str, torch.Tensor], vocab_size: int, ignore_index: int = -100) -> None:
    """Check that a batch's tokens and targets are ids of the vocabulary.

    Args:
        batch: ``tokens`` and ``targets``, integers.
        vocab_size: ids are 0 to ``vocab_size - 1``.
        ignore_index: a target that stands for none.

    Raises:
        ValueError: ids outside the vocabulary; both leaves are reported, with their range.
    """
    problems = []
    for name in ("tokens", "targets"):
        ids = batch[name]
        outside = (ids < 0) | (ids >= vocab_size)
        if name == "targets":
            outside &= ids != ignore_index
        if bool(outside.any()):
            bad = ids[outside]
            got = f"{bad.numel()} ids outside, from {int(bad.min())} to {int(bad.max())}"
            fix = f"use a model with vocab_size > {int(bad.max())}, or another tokenizer"
            problems.append(Problem(f"batch/{name}", got, f"0 to {vocab_size - 1}", fix))
    raise_problems("tokens outside the vocabulary", problems)


_DRAWS = 4
_UNIT = 2.0**-64


@dataclass(frozen=True)
class FillInTheMiddle:
    """Some documents as PREFIX SUFFIX MIDDLE, each part after a token that announces it.

    A document is cut at two places, drawn from all those between, before and after its tokens; with
    ``<p>``, ``<m>`` and ``<s>`` for `prefix`, `middle` and `suffix` it becomes

    | kind | tokens                                             |
    |------|----------------------------------------------------|
    | PSM  | ``<p>`` prefix ``<s>`` suffix ``<m>`` middle       |
    | SPM  | ``<p> <s>`` suffix ``<m>`` prefix middle           |

    What is drawn is a function of `seed` and the sample's number alone.

    Source: Bavarian et al. 2022, "Efficient training of language models to fill in the middle",
    sections 3 and appendix D (SPM in its second variant), at the level of tokens.

    Attributes:
        prefix, middle, suffix: the ids of the tokens that announce them.
        rate: the share of documents that are rearranged.
        spm_rate: the share of these that are SPM.
        end: the id that ends a document, and stays at its end; None: there is none.
        begin: the ids that documents begin with, and which stay there; any sequence, kept as a
            tuple. They may be `end`, as where a model has one token for both.
        seed: selects documents and places.

    Raises:
        ValueError: rates outside 0 to 1, negative ids, or ids that are not different.
        TypeError: `begin` is no sequence of ids.
    """

    prefix: int
    middle: int
    suffix: int
    rate: float = 0.5
    spm_rate: float = 0.5
    end: int | None = None
    seed: int = 0
    begin: tuple[int, ...] = ()

    def __post_init__(self):
        problems = [
            Problem(name, str(value), "a share from 0 to 1")
            for name, value in (("rate", self.rate), ("spm_rate", self.spm_rate))
            if not 0 <= value <= 1
        ]
        if min(self.ids) < 0 or len(set(self.ids)) < len(self.ids):
            got = ", ".join(map(str, self.ids))
            problems.append(Problem("prefix, middle, suffix, end", got, "different ids from 0"))
        try:
            begin = tuple(operator.index(token) for token in self.begin)
        except TypeError:
            wanted, fix = "a sequence of ids", "such as (1,), or () where documents have none"
            got = repr(self.begin)
            refuse("cannot fill in the middle", "begin", got, wanted, fix, error=TypeError)
        object.__setattr__(self, "begin", begin)  # a list would equal no tuple of tokens
        announced = (self.prefix, self.middle, self.suffix)
        if any(token < 0 or token in announced for token in begin):
            wanted = "ids from 0, other than those of prefix, middle and suffix"
            problems.append(Problem("begin", str(begin), wanted, "give those of the tokenizer"))
        raise_problems("cannot fill in the middle", problems)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids that it gives a meaning."""
        found = (self.prefix, self.middle, self.suffix)
        return found if self.end is None else (*found, self.end)

    def rearranged(
        self, tokens: np.ndarray, begins: np.ndarray, number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A sample with some of its documents rearranged, as long as before.

        Each of these gets three tokens longer, so the sample loses as many at its end. A document
        that reaches the end is cut before it is rearranged: it has all its parts.

        Args:
            tokens: integers ``[n]``.
            begins: where documents begin in them, increasing, from 0.
            number: of the sample.

        Returns:
            The tokens, int64 ``[n]``, and where documents begin now, int64 ``[at most documents]``.
        """
        size, key = len(tokens), np.array([self.seed % 2**64, number], np.uint64)
        # raw words of a counter: their values are part of the algorithm's definition
        draws = np.random.Philox(key=key).random_raw(_DRAWS * len(begins))
        out, starts, at = np.empty(size, np.int64), [], 0
        ends = [*begins[1:].tolist(), size]
        for i, (begin, stop) in enumerate(zip(begins.tolist(), ends, strict=True)):
            piece = self._piece(tokens[begin:stop], size - at, draws[_DRAWS * i : _DRAWS * (i + 1)])
            starts.append(at)
            out[at : at + len(piece)] = piece
            at += len(piece)
            if at == size:
                break
        return out, np.array(starts, np.int64)

    def _piece(self, document: np.ndarray, room: int, draws: np.ndarray) -> np.ndarray:
        """The tokens that a document becomes, `room` at most."""
        chosen, kind, *cuts = draws.tolist()
        marks = 3
        body = document[: room - marks] if room > marks else document[:0]
        if chosen * _UNIT >= self.rate or not len(body):
            return document[:room]
        last = 1 if body[-1] == self.end else 0
        body, end = body[: len(body) - last], body[len(body) - last :]
        first = len(self.begin) * (tuple(body[: len(self.begin)].tolist()) == self.begin)
        begin, body = body[:first], body[first:]
        low, high = sorted(cut * (len(body) + 1) >> 64 for cut in cuts)
        before, inside, after = body[:low], body[low:high], body[high:]
        p, m, s = ([token] for token in (self.prefix, self.middle, self.suffix))
        if kind * _UNIT < self.spm_rate:
            parts = (begin, p, s, after, m, before, inside, end)
        else:
            parts = (begin, p, before, s, after, m, inside, end)
        return np.concatenate([np.asarray(part, np.int64) for part in parts])


class TokenWindows(Samples):
    """A file of tokens, cut into windows of `seq` tokens and shuffled anew in every epoch.

    Windows do not overlap but for the one token that is the last target of one and the first token
    of the next. Nothing is read but the windows of each batch, whatever the size of the file, and
    no index of samples is made: the order is arithmetic (`functron.data.permute`). Documents follow
    one another as they lie in the file.

    Args:
        file: of `functron.data.open_tokens`.
        seq: tokens per sample.
        seed: selects the order of the samples.
        vocab_size: how many ids the model has; None: any.
        mask_documents: say where documents begin, so that attention sees a token's own alone:
            batches are packed ones (`functron.data.packing`), whose positions count from 0 in every
            document, or from where the window begins in it. The last token of a document predicts
            nothing.
        middle: rearranges documents to fill in their middles.
        extra_token: read one token more than `seq`, the last target. False: samples are `seq`
            tokens that no other has, and the last predicts nothing (Megatron-LM's
            ``add_extra_token_to_sequence=False``).
        unit: the user's word for tokens.

    Attributes:
        num_samples: windows, which are the samples of an epoch.
        num_tokens, num_documents: in the whole file.
        vocab_size: of the model, or 0: what ids there are is not known without reading all.

    Raises:
        ValueError: there are fewer tokens than one sample and its last target, or `middle` has ids
            that the model has not.
    """

    def __init__(
        self,
        file: TokenFile,
        seq: int,
        *,
        seed: int = 0,
        vocab_size: int | None = None,
        mask_documents: bool = False,
        middle: FillInTheMiddle | None = None,
        extra_token: bool = True,
        unit: str = "tokens",
    ):
        self._file, self._most = file, vocab_size
        self.seq, self.seed, self.extra_token, self._unit = seq, seed, extra_token, unit
        self.mask_documents, self._middle = mask_documents, middle
        if middle is not None and vocab_size is not None and max(middle.ids) >= vocab_size:
            got, wanted = f"id {max(middle.ids)}", f"ids from 0 to {vocab_size - 1}"
            refuse("tokens outside the vocabulary", "middle", got, wanted)
        if middle is not None and not extra_token:
            refuse(
                "cannot fill in the middle",
                "extra_token",
                "False with middle",
                "True",
                "leave one of them out",
            )
        self.vocab_size = vocab_size or 0
        self.num_tokens, self.num_documents = file.num_tokens, file.num_documents
        self.num_samples = (self.num_tokens - extra_token) // seq if seq >= 1 else 0
        problems = []
        if seq < 1:
            problems.append(Problem("seq", str(seq), "at least 1"))
        elif self.num_samples < 1:
            got = f"{self.num_tokens} {unit}"
            fix = f"use at most seq={self.num_tokens - extra_token}, or more text"
            wanted = f"at least seq + 1 = {seq + 1}" if extra_token else f"at least seq = {seq}"
            fix = fix if self.num_tokens > 1 else "more text"
            problems.append(Problem(f"data {file.path}", got, wanted, fix))
        raise_problems("cannot cut the text into samples", problems)

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, ``[length]``; ValueError where one is no id of the model."""
        tokens = self._file.read(start, length)
        check_ids(self._file.path, tokens, start, self._most)
        return tokens

    def sample(self, index: int) -> np.ndarray:
        """The tokens of window `index`, ``[seq + 1]``: `seq` of them and the last one's target.

        Without an extra token that target is -100, which no loss counts. IndexError without such a
        window.
        """
        check_index(index, self.num_samples)
        tokens = self.read(index * self.seq, self.seq + self.extra_token)
        return tokens if self.extra_token else np.append(tokens.astype(np.int64), IGNORED)

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """``tokens`` and ``targets`` int64 ``[rows, seq]``, and with `mask_documents` also
        ``positions`` and ``segments``, the numbers of documents in the sample.
        """
        order = shuffled(np.asarray(numbers, np.int64), self.num_samples, self.seed)
        if self._middle is None and not self.mask_documents:
            samples = map(self.sample, order.tolist())
            return stack_leaves(("tokens", "targets"), ((x[:-1], x[1:]) for x in samples))
        names = ("tokens", "targets", *(("positions", "segments") if self.mask_documents else ()))
        leaves = {name: np.empty((len(numbers), self.seq), np.int64) for name in names}
        rows = zip(numbers.tolist(), order.tolist(), self._begins(order), strict=True)
        for row, (number, index, begins) in enumerate(rows):
            sample = self.sample(index)
            if self._middle is not None:
                sample, begins = self._middle.rearranged(sample, begins, number)
            leaves["tokens"][row], leaves["targets"][row] = sample[:-1], sample[1:]
            if self.mask_documents:
                mark_documents(leaves, row, begins)
        return {name: torch.from_numpy(leaf) for name, leaf in leaves.items()}

    def _begins(self, windows: np.ndarray) -> list[np.ndarray]:
        """Where documents begin in each window and its last target: 0, and increasing."""
        starts = windows * self.seq
        # all windows at once, as a look-up costs more than its bisection's arithmetic
        ends = starts + self.seq - (not self.extra_token)  # of the last token that is read
        first, last = self._file.documents_of(np.stack([starts, ends]))
        runs = [np.arange(a + 1, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        places = self._file.starts(np.concatenate([np.zeros(0, np.int64), *runs]))
        counts = last - first
        self._check_order(starts, counts, places)
        inside = np.split(places, np.cumsum(counts)[:-1])
        found = (np.append(0, x - start) for x, start in zip(inside, starts.tolist(), strict=True))
        # of documents that begin at the same token, only the last is not empty
        return [x[np.diff(x, append=self.seq + 1) > 0] for x in found]

    def _check_order(self, starts: np.ndarray, counts: np.ndarray, places: np.ndarray) -> None:
        """Raise ValueError for an index that is damaged.

        So many documents have to begin in each window, one after another, at `places`.
        """
        window = np.repeat(np.arange(len(starts)), np.maximum(counts, 0))
        within = places - starts[window]
        falls = (np.diff(within) < 0) & (window[1:] == window[:-1])
        wrong = np.unique(window[(within <= 0) | (within > self.seq) | np.append(falls, False)])
        wrong = np.concatenate([np.flatnonzero(counts < 0), wrong])
        if wrong.size:
            start = int(starts[wrong[0]])
            refuse_order(self._file.path, start, start + self.seq)

    def summary(self) -> str:
        return describe_file(self._file)


class TextWindows(TokenWindows):
    """Files of text as tokens, cut into windows of `seq` and shuffled anew in every epoch.

    Without a tokenizer these are bytes, ids 0 to 255, which are read where they are needed. With
    one, documents stand one after another, each with the tokenizer's BOS before it, if it has one,
    and the end-of-text token after it (`functron.data.mapped_files.TextRules`). All of the text is
    then tokenised when this is made, and its tokens stay in memory, 2 or 4 bytes each: some seconds
    and as many bytes as the text has for 10 MB of it. That is for corpora of up to some hundred MB;
    larger ones should be tokenised once, to disk.

    Args:
        path: a file or a folder of text files (see `functron.data.mapped_files.find`); None is the
            text that every Python installation carries.
        seq: tokens per sample.
        tokenizer: what makes tokens of it, of files in UTF-8; None: bytes.
        seed: selects the order of the samples.
        vocab_size: how many ids the model has; None: as many as there are.

    Attributes:
        num_documents, num_skipped: files that it is made of, and those of the folder left out.
        num_names: names of special tokens in the text.
        vocab_size: 256 of bytes, or else one more than the largest id in the text.

    Raises:
        ValueError: nothing is there, it cannot be read, it is empty, or it is shorter than one
            sample and its last target; a file is not UTF-8, the tokenizer has no end-of-text token,
            or an id is not among the model's.
    """

    def __init__(
        self,
        path: str | Path | None,
        seq: int,
        tokenizer: TextTokenizer | None = None,
        *,
        seed: int = 0,
        vocab_size: int | None = None,
    ):
        files, self.num_skipped = (python_text(), 0) if path is None else find(path)
        self._rules = None if tokenizer is None else tokenizer.rules
        self.num_names = 0
        if tokenizer is None:
            parts, largest, unit = byte_parts(files), 255, "bytes"
        else:
            begin, end = tokenizer.rules.begin_document(tokenizer), end_of_text(tokenizer)
            parts, unit = [], "tokens"
            for text, ids in _encode_files(files, tokenizer, vocab_size, begin, (end,)):
                self.num_names += tokenizer.names.count(text)
                parts.append(ids)
            largest = max(int(ids.max()) for ids in parts)
        file = Concatenated(parts, Path("of this Python" if path is None else path))
        super().__init__(file, seq, seed=seed, unit=unit)
        self.vocab_size = largest + 1

    def summary(self) -> str:
        skipped = f", {self.num_skipped} files skipped (not text)" if self.num_skipped else ""
        names = f"; {self._rules.describe_names(self.num_names)}" if self._rules else ""
        return f"{self.num_tokens:,} {self._unit} in {self.num_documents} documents{skipped}{names}"


def mark_documents(leaves: dict[str, np.ndarray], row: int, begins: np.ndarray) -> None:
    """Keep the documents of a row of a batch apart, in ``segments``, ``positions``, ``targets``.

    Args:
        leaves: of the batch, int64 ``[rows, seq]``; written to.
        row: which.
        begins: where documents begin in it and its last target: 0, and increasing.
    """
    seq = leaves["tokens"].shape[1]
    leaves["targets"][row, begins[1:] - 1] = IGNORED
    lengths = np.diff(begins, append=seq + 1)
    segments = np.repeat(np.arange(len(begins)), lengths)[:seq]
    leaves["segments"][row] = segments
    leaves["positions"][row] = np.arange(seq) - begins[segments]


def check_vocabulary(needed: int, vocab_size: int | None) -> None:
    """Raise ValueError unless a model with `vocab_size` ids (None: any) has the `needed` ones."""
    if vocab_size is not None and needed > vocab_size:
        got = f"token ids up to {needed - 1}"
        fix = f"set gpt.vocab_size to {needed} or more, or use the model's own tokenizer"
        refuse(
            "tokens outside the vocabulary",
            "tokenizer",
            got,
            f"ids below gpt.vocab_size={vocab_size}",
            fix,
        )


def texts_of(files: Iterable[Path | bytes]) -> Iterator[str]:
    """The texts of files, one at a time; those that are not UTF-8 are all refused at the end."""
    problems = []
    for text in read_plain(files, "convert it, leave it out, or train on bytes: --tokenizer bytes"):
        if text.problem is None:
            yield text.text
        else:
            problems.append(text.problem)
    raise_listed("cannot read the training text", problems)


class MockTokens:
    """Random tokens in documents of equal length, as a `functron.data.mapped_files.TokenFile`.

    Token i is a hash of (seed, i) modulo the vocabulary: nothing is kept, so there can be 10^15 of
    them, to measure loaders and steps with, or to try out a mesh before the data is there.

    Args:
        num_tokens: how many.
        vocab_size: ids are below it.
        document: tokens of each document; the last may have fewer.
        seed: selects the tokens.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, num_tokens: int, vocab_size: int, *, document: int = 1024, seed: int = 0):
        sizes = (("num_tokens", num_tokens), ("vocab_size", vocab_size), ("document", document))
        raise_problems("cannot make mock data", [
            Problem(name, str(size), "at least 1") for name, size in sizes if size < 1
        ])  # fmt: skip
        self.path, self.dtype = Path("mock"), fitting_dtype(vocab_size)
        self.num_tokens, self.num_documents = num_tokens, -(-num_tokens // document)
        self._vocab_size, self._document, self._seed = vocab_size, document, seed

    def read(self, start: int, length: int) -> np.ndarray:
        check_range(self.path, start, length, self.num_tokens)
        places = np.arange(start, start + length, dtype=np.int64).astype(np.uint64)
        return (mix(places, self._seed, 0) % np.uint64(self._vocab_size)).astype(self.dtype)

    def starts(self, documents: np.ndarray) -> np.ndarray:
        return np.minimum(np.asarray(documents, np.int64) * self._document, self.num_tokens)

    def documents_of(self, offsets: np.ndarray) -> np.ndarray:
        return np.asarray(offsets, np.int64) // self._document


# --- windows that slide over texts, so that every token is scored once


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


class StoredTokens:
    """Tokens on disk, as one text or each of its documents as one.

    Args:
        file: of `functron.data.open_tokens`.
        vocab_size: how many ids the model has; another one in a piece is a ValueError.
        by_document: whether no document sees another.
    """

    num_bytes: int | None = None

    def __init__(self, file: TokenFile, vocab_size: int, *, by_document: bool = False):
        self._file, self._most = file, vocab_size
        documents = np.arange(file.num_documents + 1) if by_document else None
        edges = np.array([0, file.num_tokens]) if documents is None else file.starts(documents)
        self._starts, self.lengths = edges[:-1], np.maximum(np.diff(edges) - 1, 0)

    def piece(self, text: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        first = int(self._starts[text]) + start
        found = self._file.read(first, length + 1)
        check_ids(self._file.path, found, first, self._most)
        return found[:-1], found[1:]

    def summary(self) -> str:
        return describe_file(self._file)


class Documents(StoredTokens):
    """Files of text, each as its tokens: bytes, or what a tokenizer gives.

    With a tokenizer, its BOS, if it has one, stands before the tokens of a text and is no target,
    as ``functron sample`` reads a prompt (`functron.data.mapped_files.TextRules`); nothing is put
    after them, unlike in training. All of the text is tokenised when this is made.

    Args:
        path: a file or a folder of them (see `functron.data.mapped_files.find`).
        tokenizer: what makes tokens of it; None: bytes.
        vocab_size: how many ids the model has.

    Raises:
        ValueError: a file cannot be read, is not UTF-8, or an id is not among the model's.
    """

    def __init__(self, path: str | Path, tokenizer: TextTokenizer | None, vocab_size: int):
        files, _ = find(path)
        begin = () if tokenizer is None else tokenizer.rules.begin_prompt(tokenizer)
        self._begin, count = len(begin), 0
        if tokenizer is None:
            parts = byte_parts(files)
        else:
            parts = []
            for text, ids in _encode_files(files, tokenizer, vocab_size, begin):
                parts.append(ids)
                count += len(text.encode()) - _first_bytes(text, int(ids[0]), tokenizer)
        parts = parts or [np.zeros(0, np.int64)]
        super().__init__(Concatenated(parts, Path(path)), vocab_size, by_document=True)
        self.num_bytes = int(self.lengths.sum()) if tokenizer is None else count

    def piece(self, text: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, targets = super().piece(text, start, length)
        if (hidden := self._begin - 1 - start) > 0:
            targets = np.where(np.arange(len(targets)) < hidden, IGNORED, targets.astype(np.int64))
        return tokens, targets

    def summary(self) -> str:
        return f"{self._file.num_tokens:,} tokens in {len(self.lengths):,} texts"


def _encode_files(
    files: Iterable[Path | bytes],
    tokenizer: TextTokenizer,
    vocab_size: int | None,
    begin: tuple[int, ...],
    end: tuple[int, ...] = (),
) -> Iterator[tuple[str, np.ndarray]]:
    """The text of each file that has tokens, and these, between those before and after a text."""
    for text in texts_of(files):
        ids = [*begin, *tokenizer.encode(text, special=False), *end]
        if ids:
            check_vocabulary(max(ids) + 1, vocab_size)
            yield text, np.array(ids, fitting_dtype(tokenizer.vocab_size))


def _first_bytes(text: str, token: int, tokenizer: TextTokenizer) -> int:
    """Bytes of a text that its first token stands for, which nothing predicts."""
    first = tokenizer.decode([token])  # nothing, of tokens that stand around texts
    if text.startswith(first):
        return len(first.encode())
    return 1  # a part of a character


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
        self._gap = -num_full % global_batch if exact else 0
        if exact:
            self._short = _group(self._short, global_batch)
        self._num_full = num_full
        rows = num_full + self._gap + len(self._short)
        self.num_samples = rounded_up(rows, global_batch)
        longest = seq if num_full else int(self._short[0, 2])
        self.longest = rounded_up(longest, multiple)

    def batch(
        self, step: int, global_batch: int, part: tuple[int, int] = (0, 1)
    ) -> dict[str, torch.Tensor]:
        """As `functron.data.Samples.batch`, of as many rows as `Sliding` was given.

        ``tokens`` and ``targets`` are int64 ``[rows, length]``; rows that no window is left for
        have no targets.
        """
        rows = rows_of(step * global_batch, global_batch, part)
        batches = self.num_samples // global_batch
        place = int(shuffled(np.array([step % batches]), batches, 0)[0]) * global_batch
        windows = [self._window(place + row) for row in range(global_batch)]
        length = rounded_up(max(1, *(size for _, _, size in windows)), self._multiple)
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
        return self._texts.num_bytes

    def summary(self) -> str:
        return self._texts.summary()


def _group(windows: np.ndarray, together: int) -> np.ndarray:
    """`windows` in order of their lengths, with rows of zeros so that each batch has one length."""
    pieces: list[np.ndarray] = []
    edges = np.flatnonzero(np.diff(windows[:, 2])) + 1
    groups: Sequence[np.ndarray] = np.split(windows, edges)
    for group in groups:
        pieces += [group, np.zeros((-len(group) % together, 3), np.int64)]
    return np.concatenate(pieces)
