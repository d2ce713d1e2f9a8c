"""One chunk of text to one finished part: what a worker does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from functron.data.indexed_writer import IndexedWriter
from functron.data.records import Text
from functron.data.sources import Chunk, read, where
from functron.data.text_tokenizer import TextTokenizer, open_tokenizer
from functron.errors import Problem
from functron.preprocess.settings import Empty

BATCH_CHARACTERS = 1 << 20
BATCH_TEXTS = 4096
MAX_LISTED = 20


@dataclass(frozen=True)
class Task:
    """A chunk, and where its tokens go.

    Attributes:
        chunk: of the text.
        part: without endings.
    """

    chunk: Chunk
    part: Path


@dataclass(frozen=True)
class Counts:
    """What is in a part.

    Attributes:
        documents: those written.
        tokens: in all of them.
        empty: documents without tokens.
    """

    documents: int
    tokens: int
    empty: int


@dataclass(frozen=True)
class Plan:
    """How texts become tokens.

    Attributes:
        tokenizer: its path.
        pattern: for tiktoken's.
        end: the id that ends documents; None: none.
        dtype: of the tokens.
        key: of the text.
        empty: what becomes of documents without tokens.
    """

    tokenizer: str
    pattern: str
    end: int | None
    dtype: str
    key: str
    empty: Empty


class Encoder:
    """Tasks to parts.

    Args:
        plan: how.
        tokenizer: the plan's, where it is open already.
    """

    def __init__(self, plan: Plan, tokenizer: TextTokenizer | None = None):
        self._plan = plan
        self._tokenizer = tokenizer or open_tokenizer(plan.tokenizer, pattern=plan.pattern)

    def __call__(self, task: Task) -> Counts | list[Problem]:
        """Make the part of a task, or say why it cannot be made: then nothing is left of it."""
        try:
            counts = _encode(task, self._plan, self._tokenizer)
        except _UnreadableError as error:
            return error.problems
        except OSError as error:
            got = error.strerror or str(error)
            where = str(error.filename or task.part)
            return [Problem(where, got, "files that can be read, and room to write", "start again")]
        write_json(mark_of(task.part), asdict(counts))
        return counts


def mark_of(part: Path) -> Path:
    """The file that says what is in a part; without it there is no part."""
    return part.with_name(part.name + ".json")


def read_mark(part: Path) -> Counts | None:
    """What is in a finished part; None where it is not finished."""
    try:
        return Counts(**json.loads(mark_of(part).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_json(file: Path, value: object) -> None:
    """Write a file so that it is whole or not there."""
    beside = file.with_name(f".{file.name}.{os.getpid()}.new")
    with beside.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)


class _UnreadableError(Exception):
    """Ends the writing of a part."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems


def _encode(task: Task, plan: Plan, tokenizer: TextTokenizer) -> Counts:
    problems: list[Problem] = []
    empty = 0
    kept = plan.empty == "keep"
    options = {"vocab_size": tokenizer.vocab_size, "allow_empty": kept, "overwrite": True}
    with IndexedWriter(task.part, np.dtype(plan.dtype), **options) as writer:
        for batch in _batches(task.chunk, plan.key, problems):
            lists = tokenizer.encode_batch([text.text for text in batch])
            for text, ids in zip(batch, lists, strict=True):
                if ids and plan.end is not None:
                    ids.append(plan.end)
                elif not ids:
                    empty += 1
                    if plan.empty == "refuse" and len(problems) < MAX_LISTED:
                        problems.append(_empty_problem(task.chunk, text))
            lengths = [len(ids) for ids in lists if ids or kept]
            if lengths and not problems:
                tokens = np.fromiter(chain.from_iterable(lists), np.int64, sum(lengths))
                writer.extend(tokens, lengths)
        if problems:
            raise _UnreadableError(problems)
    return Counts(writer.num_documents, writer.num_tokens, empty)


def _empty_problem(chunk: Chunk, text: Text) -> Problem:
    got = "an empty text" if not text.text else f"a text without tokens: {text.text[:20]!r}"
    fix = "leave it out, or use --empty drop"
    return Problem(where(chunk, text.place), got, "at least one token", fix)


def _batches(chunk: Chunk, key: str, problems: list[Problem]) -> Iterator[list[Text]]:
    """The texts of a chunk, as many as are worth one call; what is wrong goes to `problems`."""
    batch: list[Text] = []
    size = 0
    for text in read(chunk, key):
        problem = text.problem or _encoding_problem(chunk, text)
        if problem is not None:
            problems.append(problem)
            if len(problems) >= MAX_LISTED:
                return
            continue
        batch.append(text)
        size += len(text.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoding_problem(chunk: Chunk, text: Text) -> Problem | None:
    """JSON can write lone surrogates, which no encoding can."""
    try:
        text.text.encode()
    except UnicodeEncodeError as error:
        got = f"half of a surrogate pair at character {error.start}"
        return Problem(where(chunk, text.place), got, "text")
    return None
