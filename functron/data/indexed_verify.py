"""Reading all of an indexed file, to be sure of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from functron.data.indexed import HEADER, IndexedFile
from functron.data.token_file import dtype_problem
from functron.errors import Problem, raise_problems

BLOCK = 1 << 20
MAX_LISTED = 20


def verify(
    file: IndexedFile | str | Path, *, vocab_size: int | None = None, allow_empty: bool = False
) -> None:
    """Check every length, pointer, document index and token of an indexed file.

    Sequences must stand in .bin one after another without gaps, documents must be in order, ids at
    least 0 and below `vocab_size`. Reads everything once, a few MB at a time.

    Args:
        file: opened; or its path, as `IndexedFile` and `merge` take it.
        vocab_size: of the tokenizer; None: any ids that are not negative.
        allow_empty: let documents have no tokens. Megatron-LM writes such for texts that have none;
            nothing is ever drawn from them.

    Raises:
        ValueError: the first 20 places that are wrong, each with file, offset and what it is; or
            what `IndexedFile` raises.
    """
    file = file if isinstance(file, IndexedFile) else IndexedFile(file)
    problems = list(islice(_problems(file, vocab_size, allow_empty), MAX_LISTED + 1))
    more = f": the first {MAX_LISTED} mistakes" if len(problems) > MAX_LISTED else ""
    raise_problems(f"{file.path} is damaged{more}", problems[:MAX_LISTED])


def _problems(file: IndexedFile, vocab_size: int | None, allow_empty: bool) -> Iterator[Problem]:
    problem = None
    if vocab_size is not None:
        problem = dtype_problem(f"{file.idx_path}, offset 17", file.dtype, vocab_size)
    if problem:
        yield problem
    yield from _sequence_problems(file)
    yield from _document_problems(file, allow_empty)
    yield from _token_problems(file, vocab_size)


def _sequence_problems(file: IndexedFile) -> Iterator[Problem]:
    expected, item = 0, file.dtype.itemsize
    for begin in range(0, file.num_sequences, BLOCK):
        lengths = file.lengths[begin : begin + BLOCK].astype(np.int64)
        pointers = file.pointers[begin : begin + BLOCK].astype(np.int64)
        for index in np.flatnonzero(lengths < 0):
            where = f"{file.idx_path}, offset {HEADER.size + 4 * (begin + int(index))}"
            got = f"length {lengths[index]} of sequence {begin + index}"
            yield Problem(where, got, "at least 0")
        # each is compared with its neighbour, so that one wrong pointer is not all wrong pointers
        wanted = np.concatenate([[expected], (pointers + lengths * item)[:-1]])
        for index in np.flatnonzero(pointers != wanted):
            where = f"{file.idx_path}, offset {file.layout.pointers + 8 * (begin + int(index))}"
            got = f"pointer {pointers[index]} of sequence {begin + index}"
            yield Problem(where, got, f"{wanted[index]}, where the sequence before it ends")
        expected = int(pointers[-1] + lengths[-1] * item)


def _document_problems(file: IndexedFile, allow_empty: bool) -> Iterator[Problem]:
    for begin in range(0, file.num_documents, BLOCK):
        entries = file.documents[begin : begin + BLOCK + 1].astype(np.int64)
        steps = np.diff(entries)
        outside = (steps < 0) | (entries[1:] > file.num_sequences)
        tokens = np.zeros_like(steps)
        if not outside.any() and not allow_empty:
            count = min(BLOCK, file.num_documents - begin)
            tokens = np.diff(file.claimed_starts(np.arange(begin, begin + count + 1)))
        for index in np.flatnonzero(outside | ((tokens == 0) & (not allow_empty))):
            where = f"{file.idx_path}, offset {file.layout.documents + 8 * (begin + int(index))}"
            document = begin + int(index)
            if outside[index]:
                got = f"document {document} from sequence {entries[index]} to {entries[index + 1]}"
                yield Problem(where, got, f"sequences in order, at most {file.num_sequences}")
            elif not outside.any():
                got = f"document {document} without tokens"
                fix = "leave it out when writing, or verify with allow_empty=True"
                yield Problem(where, got, "at least 1", fix)


def _token_problems(file: IndexedFile, vocab_size: int | None) -> Iterator[Problem]:
    if file.dtype.kind not in "iu":
        return
    limit = vocab_size if vocab_size is not None else int(np.iinfo(file.dtype).max) + 1
    for begin in range(0, file.num_tokens, BLOCK):
        tokens = file.read(begin, min(BLOCK, file.num_tokens - begin))
        if int(tokens.min()) >= 0 and int(tokens.max()) < limit:
            continue
        wide = tokens.astype(np.int64)
        for index in np.flatnonzero((wide < 0) | (wide >= limit)):
            offset = begin + int(index)
            where = f"{file.bin_path}, offset {offset * file.dtype.itemsize}"
            got = f"token id {wide[index]} in document {file.document_of(offset)}"
            yield Problem(where, got, f"0 to {limit - 1}", "use the tokenizer that wrote it")
