"""Megatron-LM's indexed files of tokens: PREFIX.bin has them, PREFIX.idx their lengths and places.

All of .idx is little-endian, without padding; N sequences make D documents:

| offset        | bytes       | content                                                       |
|---------------|-------------|---------------------------------------------------------------|
| 0             | 9           | ``MMIDIDX\0\0``                                               |
| 9             | 8           | 1, the version                                                |
| 17            | 1           | the code of the tokens' dtype (`DTYPES`)                      |
| 18            | 8           | N                                                             |
| 26            | 8           | D + 1                                                         |
| 34            | 4 N         | int32: tokens of every sequence                               |
| 34 + 4 N      | 8 N         | int64: where every sequence begins in .bin, in bytes          |
| 34 + 12 N     | 8 (D + 1)   | int64: the first sequence of every document, and N at the end |
| the end       | N, or none  | int8: modes of sequences, in files of several modalities      |

`IndexedFile` reads them where they are needed; `IndexedWriter` and `merge` write them without
holding them in memory.

Source: ``megatron/core/datasets/indexed_dataset.py`` of Megatron-LM.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import IO

import numpy as np

from functron.core.errors import Problem, local_path, raise_problems, refuse
from functron.data.mapped_files import (
    MAX_LISTED,
    MappedRows,
    check_dtype,
    check_range,
    checked_offsets,
    dtype_problems,
    ids_outside,
    last_not_after,
)

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
DTYPES = MappingProxyType({code: np.dtype(name) for code, name in enumerate(_NAMES, 1)})
"""The dtypes by their codes."""

BLOCK = 1 << 20
COPY_BYTES = 1 << 24
_CANNOT = "cannot open an indexed file"
_CANNOT_WRITE = "cannot write an indexed file"


def code_of(dtype: np.dtype) -> int | None:
    """The code of a dtype; None where the format has none for it."""
    return {value: code for code, value in DTYPES.items()}.get(np.dtype(dtype))


def files_of(prefix: str | Path) -> tuple[Path, Path]:
    """The .bin and the .idx of a prefix; a path that ends with either is taken for its prefix."""
    name = str(local_path(prefix, "prefix"))
    stem = name[:-4] if name.endswith((".bin", ".idx")) else name
    return Path(stem + ".bin"), Path(stem + ".idx")


@dataclass(frozen=True)
class IndexLayout:
    """Where the parts of an .idx are: N sequences, D documents, and modes if there are any."""

    dtype: np.dtype
    num_sequences: int
    num_documents: int
    has_modes: bool = False

    @property
    def pointers(self) -> int:
        """Where the pointers begin; the lengths begin after the header."""
        return HEADER.size + 4 * self.num_sequences

    @property
    def documents(self) -> int:
        """Where the documents begin."""
        return self.pointers + 8 * self.num_sequences

    @property
    def modes(self) -> int:
        """Where the modes begin."""
        return self.documents + 8 * (self.num_documents + 1)

    @property
    def size(self) -> int:
        """Bytes of the whole .idx."""
        return self.modes + self.num_sequences * self.has_modes

    def header(self) -> bytes:
        """The first 34 bytes."""
        code = code_of(self.dtype)
        return HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1)


class IndexedFile:
    """Megatron-LM's indexed file, opened: a `functron.data.mapped_files.TokenFile`.

    Opening maps the files, reads some 60 bytes and checks that these, and the sizes of both files,
    agree: it takes as long for 10^9 documents as for one. `verify` reads everything.

    Args:
        path: the prefix, or either file.
        vocab_size: refuse a file whose dtype cannot hold ids below it; None: take any.

    Attributes:
        num_documents: D.
        num_sequences: N; Megatron writes one per document unless it splits sentences.
        lengths: int32 ``[N]``: tokens of every sequence.
        pointers: int64 ``[N]``: where each begins in .bin, in bytes.
        documents: int64 ``[D + 1]``: the first sequence of every document, then N.
        modes: int8 ``[N]``, or None where sequences have none.

    Raises:
        ValueError: a file is missing, cut off, or not what it should be; file and offset are named.
    """

    def __init__(self, path: str | Path, *, vocab_size: int | None = None):
        self.path, self._vocab_size = Path(path), vocab_size
        self.bin_path, self.idx_path = files_of(path)
        self.layout = layout = _read_layout(self.idx_path)
        check_dtype(f"{self.idx_path}, offset 17", layout.dtype, vocab_size)
        self._index = MappedRows(self.idx_path, np.uint8, 0, layout.size)
        raw = self._index.values
        self.dtype = layout.dtype
        self.num_sequences, self.num_documents = layout.num_sequences, layout.num_documents
        self.lengths = raw[HEADER.size : layout.pointers].view("<i4")
        self.pointers = raw[layout.pointers : layout.documents].view("<i8")
        self.documents = raw[layout.documents : layout.modes].view("<i8")
        self.modes = raw[layout.modes :].view(np.int8) if layout.has_modes else None
        raise_problems(_CANNOT, self._edge_problems())
        size = self.bin_path.stat().st_size
        self.num_tokens = size // self.dtype.itemsize

    def __reduce__(self):
        return functools.partial(IndexedFile, vocab_size=self._vocab_size), (self.path,)

    def _edge_problems(self) -> Iterator[Problem]:
        """Mistakes in the first and last entries, and in how long .bin is."""
        count, layout = self.num_sequences, self.layout
        ends = {0: 0, self.num_documents: count}
        for index, wanted in ends.items():
            if self.documents[index] != wanted:
                where = f"{self.idx_path}, offset {layout.documents + 8 * index}"
                got = f"document index {self.documents[index]}"
                yield Problem(where, got, str(wanted), "copy or write the file again")
        if count and self.pointers[0] != 0:
            where = f"{self.idx_path}, offset {layout.pointers}"
            yield Problem(where, f"pointer {self.pointers[0]}", "0: .bin begins with a sequence")
        needed = 0
        if count:
            needed = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        try:
            size = self.bin_path.stat().st_size
        except OSError as error:
            yield Problem(str(self.bin_path), error.strerror or str(error), "the tokens", "copy it")
            return
        if size != needed:
            short = "is cut off at" if size < needed else "goes on after"
            wanted = f"{needed} bytes, as the last pointer and length of {self.idx_path} say"
            fix = f"copy or write both again: it {short} offset {min(size, needed)}"
            yield Problem(str(self.bin_path), f"{size} bytes", wanted, fix)

    @functools.cached_property
    def _tokens(self) -> MappedRows:
        return MappedRows(self.bin_path, self.dtype.newbyteorder("<"), 0, self.num_tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        """A view of the file; OSError where it was cut short since it was opened."""
        check_range(self.path, start, length, self.num_tokens)
        if not self.num_tokens:
            return np.zeros(0, self.dtype)  # no system maps a file without bytes
        return self._tokens.values[start : start + length]

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """As of any `TokenFile`.

        Raises:
            ValueError: the index is damaged there: a document does not begin where the sequence
                before it ends. `functron.data.verify` checks the whole index.
        """
        found = self.claimed_starts(documents)
        self._check_after(np.asarray(documents, np.int64), found)
        return found

    def _check_index(self) -> None:
        """Check that .idx is as long as it was, before what is mapped of it is touched."""
        assert len(self._index.values)

    def claimed_starts(self, documents: np.ndarray) -> np.ndarray:
        """`starts` by the pointers alone, without a check."""
        self._check_index()
        sequences = self.documents[np.asarray(documents, np.int64)]
        if not self.num_sequences:
            return np.zeros_like(sequences)
        inside = np.clip(sequences, 0, self.num_sequences - 1)
        tokens = self.pointers[inside] // self.dtype.itemsize
        return np.where(sequences < self.num_sequences, tokens, self.num_tokens)

    def _ends(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The nearest sequences that there are, and where they end by their lengths."""
        inside = np.clip(sequences, 0, self.num_sequences - 1)
        return inside, self.pointers[inside] // self.dtype.itemsize + self.lengths[inside]

    def _check_after(self, documents: np.ndarray, starts: np.ndarray) -> None:
        """Check that documents begin at `starts`, by the sequences before them."""
        if not self.num_sequences:
            return
        before = self.documents[documents] - 1
        inside, ends = self._ends(before)
        wrong = np.flatnonzero(((before >= 0) & (starts != ends)) | (starts < 0))
        if wrong.size:
            values = (x.ravel()[wrong[0]] for x in (documents, starts, ends, inside))
            document, start, end, sequence = map(int, values)
            where = f"{self.idx_path}, offset {self.layout.pointers + 8 * (sequence + 1)}"
            _refuse_damage(where, f"document {document} at token {start}", f"at {end}")

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, a view of the file; IndexError without such a document."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"{self.path}: document {index}; wanted 0 to {self.num_documents - 1}")
        start, stop = self.starts(np.array([index, index + 1])).tolist()
        return self.read(start, stop - start)

    def sequence(self, index: int) -> np.ndarray:
        """The tokens of one sequence, a view of the file; IndexError without such a sequence."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"{self.path}: sequence {index}; wanted 0 to {self.num_sequences - 1}")
        self._check_index()
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.read(start, int(self.lengths[index]))

    def spans(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where sequences begin in the row of all tokens, and how many they have: int64 both."""
        self._check_index()
        places = self.pointers[sequences].astype(np.int64) // self.dtype.itemsize
        return places, self.lengths[sequences].astype(np.int64)

    def end_documents(self, sequences: np.ndarray) -> np.ndarray:
        """Whether sequences are the last of their documents: bool, the shape of `sequences`."""
        self._check_index()
        ends = np.asarray(sequences, np.int64) + 1
        after = last_not_after(lambda i: self.documents[i], self.num_documents + 1, ends)
        return self.documents[after] == ends

    def documents_of(self, offsets: np.ndarray) -> np.ndarray:
        """As of any `TokenFile`; some log2 D reads each.

        Raises:
            ValueError: the index is damaged where it was read: a token is in no document.
        """
        wanted = checked_offsets(self.path, offsets, self.num_tokens)
        # of documents that begin at the same token, only the last is not empty
        found = last_not_after(self.claimed_starts, self.num_documents, wanted)
        self._check_inside(found, wanted)
        return found

    def _check_inside(self, documents: np.ndarray, offsets: np.ndarray) -> None:
        """Check the documents that a bisection of pointers found against the lengths."""
        if not documents.size:
            return
        last, ends = self._ends(self.documents[documents + 1] - 1)
        begins = self.claimed_starts(documents)
        wrong = np.flatnonzero((offsets < begins) | (offsets >= ends))
        if wrong.size:
            values = (x.ravel()[wrong[0]] for x in (documents, begins, ends, offsets, last))
            document, begin, end, offset, sequence = map(int, values)
            where = f"{self.idx_path}, offset {self.layout.pointers + 8 * sequence}"
            got = f"document {document} of tokens {begin} to {end - 1}"
            _refuse_damage(where, got, f"one with token {offset}")


def _refuse_damage(where: str, got: str, wanted: str) -> None:
    fix = "copy it or write it again; functron.data.verify lists all mistakes in it"
    refuse("a damaged index", where, got, wanted, fix)


def _read_layout(idx: Path) -> IndexLayout:
    """The layout in the header of an .idx, if it is as long as that."""
    try:
        size = idx.stat().st_size
        with idx.open("rb") as stream:
            head = stream.read(HEADER.size)
    except OSError as error:
        fix = "give the path without .bin and .idx, of which there must be both"
        refuse(_CANNOT, str(idx), error.strerror or str(error), "the index of a .bin", fix)
    raise_problems(_CANNOT, _header_problems(idx, head))
    _, _, code, sequences, entries = HEADER.unpack(head)
    plain = IndexLayout(DTYPES[code], sequences, entries - 1)
    modes = IndexLayout(DTYPES[code], sequences, entries - 1, has_modes=True)
    if size not in (plain.size, modes.size):
        raise_problems(_CANNOT, [_size_problem(idx, size, plain)])
    return modes if sequences and size == modes.size else plain


def _header_problems(idx: Path, head: bytes) -> Iterator[Problem]:
    again = "copy or write the file again"
    if head.startswith(LEGACY_MAGIC):
        got = "TNTIDX: a file of Megatron's older kinds (lazy, cached)"
        yield Problem(f"{idx}, offset 0", got, "MMIDIDX", "write it with --dataset-impl mmap")
    elif head[:9] != MAGIC[: len(head[:9])]:
        got = f"the bytes {head[:9]!r}"
        yield Problem(f"{idx}, offset 0", got, f"{MAGIC!r}: Megatron's index", "check the path")
    elif len(head) < HEADER.size:
        got = f"the end of the file at offset {len(head)}"
        yield Problem(str(idx), got, f"a header of {HEADER.size} bytes", again)
    else:
        _, version, code, _, entries = HEADER.unpack(head)
        if version != VERSION:
            yield Problem(f"{idx}, offset 9", f"version {version}", f"version {VERSION}")
        if code not in DTYPES:
            known = ", ".join(f"{number} {dtype.name}" for number, dtype in DTYPES.items())
            yield Problem(f"{idx}, offset 17", f"dtype code {code}", f"one of {known}", again)
        if entries == 0:
            wanted = "at least 1: one more than there are documents"
            yield Problem(f"{idx}, offset 26", "0 document indices", wanted, again)


def _size_problem(idx: Path, size: int, layout: IndexLayout) -> Problem:
    counts = f"{layout.num_sequences} sequences and {layout.num_documents} documents"
    wanted = f"{layout.size} bytes, for {counts}"
    if size > layout.size:
        fix = f"copy or write it again: the index ends at offset {layout.size}"
        return Problem(str(idx), f"{size} bytes", wanted, fix)
    begins = {"lengths": 34, "pointers": layout.pointers, "document indices": layout.documents}
    part = [name for name, begin in begins.items() if begin <= size][-1]
    fix = f"copy or write it again: it is cut off at offset {size}, in its {part}"
    return Problem(str(idx), f"{size} bytes", wanted, fix)


def mistakes_in(file: IndexedFile, vocab_size: int | None, allow_empty: bool) -> Iterator[Problem]:
    """Every length, pointer, document index and token of an indexed file that cannot be.

    See `functron.data.verify`, which asks. Reads everything once, a few MB at a time.
    """
    yield from dtype_problems(f"{file.idx_path}, offset 17", file.dtype, vocab_size)
    yield from _sequence_problems(file)
    yield from _document_problems(file, allow_empty)
    yield from ids_outside(file, file.bin_path, vocab_size)


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


class IndexedWriter:
    """A context manager that writes PREFIX.bin and PREFIX.idx as Megatron-LM does, byte for byte.

    Memory does not grow with what is written. Until the context ends, all of it stands in a hidden
    folder beside, which an exception removes; then .bin gets its name, and .idx, without which .bin
    is nothing, gets it last.

    Args:
        prefix: where to.
        dtype: of the tokens, one of `functron.data.indexed.DTYPES`.
        vocab_size: ids must be below it; None: any that `dtype` holds.
        modes: whether sequences have modes.
        allow_empty: let documents have no tokens, as Megatron-LM does.
        overwrite: replace what is there.

    Attributes:
        num_tokens, num_documents: written so far.

    Raises:
        ValueError: the format has no such dtype, it is too small for the vocabulary, or there is
            something at `prefix` already.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type,
        *,
        vocab_size: int | None = None,
        modes: bool = False,
        allow_empty: bool = False,
        overwrite: bool = False,
    ):
        self.bin_path, self.idx_path = files_of(prefix)
        self.dtype, self._limit = np.dtype(dtype), vocab_size
        self._has_modes, self._allow_empty = modes, allow_empty
        self.num_tokens = self.num_documents = self.num_sequences = 0
        problems = []
        if code_of(self.dtype) is None:
            known = ", ".join(x.name for x in DTYPES.values())
            problems.append(Problem("dtype", self.dtype.name, f"one of {known}"))
        taken = [path for path in (self.bin_path, self.idx_path) if path.exists()]
        if not overwrite:
            problems += [Problem(str(x), "an existing file", "a new one") for x in taken]
        raise_problems(_CANNOT_WRITE, problems)
        check_dtype("dtype", self.dtype, vocab_size)

    def __enter__(self) -> IndexedWriter:
        folder = self.bin_path.parent
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                made = TemporaryDirectory(prefix=f".{self.bin_path.name}.", dir=folder)
                self._folder = Path(stack.enter_context(made))
                self._bin, self._idx, self._lengths, self._documents, self._modes = (
                    stack.enter_context((self._folder / part).open("w+b"))
                    for part in ("bin", "idx", "lengths", "documents", "modes")
                )
            except OSError as error:
                got = error.strerror or str(error)
                refuse(_CANNOT_WRITE, str(error.filename), got, "a new file")
            self._opened = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._opened:
            if kind is None:
                self._finish()

    def add(
        self,
        tokens: np.ndarray | Sequence[int],
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Write a document.

        Args:
            tokens: its ids ``[n]``.
            lengths: of its sequences; None: it is one sequence (none, where it has no tokens).
            modes: of its sequences; None: 0.

        Raises:
            ValueError: no tokens, an id that does not fit, or lengths that are not those of `n`.
        """
        ids = np.asarray(tokens)
        if lengths is None:
            lengths = [len(ids)] if len(ids) else []
        self._write(ids, np.asarray(lengths, np.int64), np.array([len(lengths)]), modes)

    def extend(self, tokens: np.ndarray | Sequence[int], lengths: Sequence[int]) -> None:
        """Write documents of one sequence each, one after another; errors are those of `add`."""
        sizes = np.asarray(lengths, np.int64)
        present = sizes > 0  # documents without tokens have no sequence either
        self._write(np.asarray(tokens), sizes[present], present.astype(np.int64), None)

    def append(self, file: IndexedFile) -> None:
        """Write all documents of another file; ValueError unless dtype and modes are the same."""
        problems = []
        if file.dtype != self.dtype:
            got, fix = file.dtype.name, "merge files of one dtype"
            problems.append(Problem(f"{file.idx_path}, offset 17", got, self.dtype.name, fix))
        if (file.modes is not None) != self._has_modes:
            have = ["without modes", "with modes"]
            got = have[file.modes is not None]
            problems.append(Problem(str(file.idx_path), got, have[self._has_modes]))
        raise_problems("cannot merge", problems)
        total = 0
        for begin in range(0, file.num_sequences, BLOCK):
            lengths = file.lengths[begin : begin + BLOCK]
            total += int(lengths.sum(dtype=np.int64))
            self._lengths.write(lengths.tobytes())
            if file.modes is not None:
                self._modes.write(file.modes[begin : begin + BLOCK].tobytes())
        for begin in range(1, file.num_documents + 1, BLOCK):
            entries = file.documents[begin : begin + BLOCK] + self.num_sequences
            self._documents.write(entries.astype("<i8").tobytes())
        if total != file.num_tokens:
            got, wanted = f"lengths of {total} tokens in all", f"{file.num_tokens}, as .bin has"
            refuse("cannot merge", f"{file.idx_path}, offset {HEADER.size}", got, wanted)
        with file.bin_path.open("rb") as stream:
            shutil.copyfileobj(stream, self._bin, COPY_BYTES)
        self._count(total, file.num_sequences, file.num_documents)

    def _write(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        counts: np.ndarray,
        modes: Sequence[int] | None,
    ) -> None:
        """Write documents; `counts` are the numbers of their sequences."""
        raise_problems(_CANNOT_WRITE, self._problems(tokens, lengths, counts, modes))
        self._bin.write(tokens.astype(self.dtype.newbyteorder("<"), copy=False).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        ends = self.num_sequences + np.cumsum(counts)
        self._documents.write(ends.astype("<i8").tobytes())
        if self._has_modes:
            given = np.zeros(len(lengths), np.int8) if modes is None else np.asarray(modes, np.int8)
            self._modes.write(given.tobytes())
        self._count(len(tokens), len(lengths), len(counts))

    def _count(self, tokens: int, sequences: int, documents: int) -> None:
        self.num_tokens += tokens
        self.num_sequences += sequences
        self.num_documents += documents

    def _problems(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        counts: np.ndarray,
        modes: Sequence[int] | None,
    ) -> list[Problem]:
        found, where = [], f"{self.bin_path}: document"
        here, kinds = f"{where} {self.num_documents}", "iu" if self.dtype.kind in "iu" else "iuf"
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in kinds):
            got = f"{tokens.dtype} {list(tokens.shape)}"
            return [Problem(here, got, f"{self.dtype.name} [n]")]
        if int(lengths.sum()) != len(tokens) or (lengths < 0).any():
            got = f"sequences of {int(lengths.sum())} tokens"
            return [Problem(here, got, f"{len(tokens)} tokens")]
        if modes is not None and (not self._has_modes or len(modes) != len(lengths)):
            wanted = f"{len(lengths)}" if self._has_modes else "none: this file has no modes"
            return [Problem(here, f"{len(modes)} modes", wanted)]
        if len(lengths) and int(lengths.max()) >= 1 << 31:
            got = f"a sequence of {int(lengths.max())} tokens"
            found.append(Problem(here, got, "less than 2^31", "cut it"))
        sizes = np.add.reduceat(np.append(lengths, 0), np.cumsum(counts) - counts) * (counts > 0)
        if not self._allow_empty:
            for index in np.flatnonzero(sizes == 0)[:MAX_LISTED]:
                offset = (self.num_tokens + int(sizes[:index].sum())) * self.dtype.itemsize
                at = f"{where} {self.num_documents + index}, offset {offset}"
                found.append(Problem(at, "no tokens", "at least 1", "leave it out"))
        if self.dtype.kind in "iu" and len(tokens):
            found += self._id_problems(tokens, sizes, where)
        return found

    def _id_problems(self, tokens: np.ndarray, sizes: np.ndarray, where: str) -> list[Problem]:
        kept = np.iinfo(self.dtype)
        low = 0 if self._limit is not None else int(kept.min)
        high = int(kept.max) if self._limit is None else self._limit - 1
        if low <= int(tokens.min()) and int(tokens.max()) <= high:
            return []
        found = []
        for index in np.flatnonzero((tokens < low) | (tokens > high))[:MAX_LISTED]:
            number = int(np.searchsorted(np.cumsum(sizes), index, side="right"))
            offset = (self.num_tokens + int(index)) * self.dtype.itemsize
            at = f"{where} {self.num_documents + number}, offset {offset}"
            fix = "" if self._limit is not None else "choose a wider dtype"
            found.append(Problem(at, f"token id {tokens[index]}", f"{low} to {high}", fix))
        return found

    def _finish(self) -> None:
        layout = IndexLayout(self.dtype, self.num_sequences, self.num_documents, self._has_modes)
        self._idx.write(layout.header())
        _copy(self._lengths, self._idx)
        pointer = 0
        self._lengths.seek(0)
        while block := self._lengths.read(4 * BLOCK):
            sizes = np.frombuffer(block, "<i4").astype(np.int64) * self.dtype.itemsize
            ends = pointer + np.cumsum(sizes)
            self._idx.write((ends - sizes).astype("<i8").tobytes())
            pointer = int(ends[-1])
        self._idx.write(np.zeros(1, "<i8").tobytes())  # the first document's first sequence
        _copy(self._documents, self._idx)
        _copy(self._modes, self._idx)
        for stream in (self._bin, self._idx):
            stream.flush()
            os.fsync(stream.fileno())
        self.idx_path.unlink(missing_ok=True)  # an old index with a new .bin would be wrong
        (self._folder / "bin").replace(self.bin_path)
        (self._folder / "idx").replace(self.idx_path)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, COPY_BYTES)


def merge(
    prefix: str | Path, sources: Sequence[str | Path], *, overwrite: bool = False
) -> IndexedFile:
    """Write one indexed file with the documents of several, in order, and open it.

    The bytes are those that Megatron-LM's ``tools/merge_datasets.py`` writes of the same order.

    Raises:
        ValueError: there are none, one cannot be opened, or they are not of one dtype.
    """
    if not sources:
        refuse("cannot merge", "sources", "none", "at least one file")
    first = IndexedFile(sources[0])
    options = {"modes": first.modes is not None, "overwrite": overwrite}
    with IndexedWriter(prefix, first.dtype, **options) as writer:
        for source in sources:
            writer.append(IndexedFile(source))
    return IndexedFile(prefix)
