"""Writing Megatron-LM's indexed files, without holding them in memory, and merging them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from functron.core.errors import Problem, raise_problems, refuse
from functron.data.indexed import DTYPES, HEADER, IndexedFile, Layout, code_of, files_of
from functron.data.token_file import check_dtype

BLOCK = 1 << 20
COPY_BYTES = 1 << 24
_CANNOT = "cannot write an indexed file"


class IndexedWriter:
    """A context manager that writes PREFIX.bin and PREFIX.idx as Megatron-LM does, byte for byte.

    Memory does not grow with what is written. Until the context ends, all of it stands in hidden
    files beside, which an exception removes; then .bin gets its name, and .idx, without which .bin
    is nothing, gets it last.

    Args:
        prefix: where to.
        dtype: of the tokens, one of `functron.data.indexed.DTYPES`.
        vocab_size: ids must be below it; None: any that `dtype` holds.
        modes: whether sequences have modes.
        allow_empty: let documents have no tokens, as Megatron-LM does.
        overwrite: replace what is there.

    Attributes:
        num_tokens: written so far.
        num_documents: likewise.

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
        raise_problems(_CANNOT, problems)
        check_dtype("dtype", self.dtype, vocab_size)
        mark = uuid.uuid4().hex[:8]
        self._names = [
            self.bin_path.with_name(f".{self.bin_path.name}.{mark}.{part}")
            for part in ("bin", "idx", "lengths", "documents", "modes")
        ]

    def __enter__(self) -> IndexedWriter:
        self._files: list[IO[bytes]] = []
        try:
            self.bin_path.parent.mkdir(parents=True, exist_ok=True)
            for name in self._names:
                self._files.append(name.open("w+b"))
        except OSError as error:
            self._clean()
            refuse(_CANNOT, str(error.filename), error.strerror or str(error), "a new file")
        self._bin, self._idx, self._lengths, self._documents, self._modes = self._files
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._clean()

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
        """Write documents of one sequence each, whose tokens stand one after another.

        Raises:
            ValueError: as `add`.
        """
        sizes = np.asarray(lengths, np.int64)
        present = sizes > 0  # documents without tokens have no sequence either
        self._write(np.asarray(tokens), sizes[present], present.astype(np.int64), None)

    def append(self, file: IndexedFile) -> None:
        """Write all documents of another file after those that are there.

        Raises:
            ValueError: it has another dtype, or modes where this one has none, or the other way.
        """
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
        """Write ``len(counts)`` documents, of so many sequences each."""
        raise_problems(_CANNOT, self._problems(tokens, lengths, counts, modes))
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
        kinds = "iu" if self.dtype.kind in "iu" else "iuf"
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in kinds):
            got = f"{tokens.dtype} {list(tokens.shape)}"
            return [Problem(f"{where} {self.num_documents}", got, f"{self.dtype.name} [n]")]
        if int(lengths.sum()) != len(tokens) or (lengths < 0).any():
            got, wanted = f"sequences of {int(lengths.sum())} tokens", f"{len(tokens)} tokens"
            return [Problem(f"{where} {self.num_documents}", got, wanted)]
        if modes is not None and (not self._has_modes or len(modes) != len(lengths)):
            wanted = f"{len(lengths)}" if self._has_modes else "none: this file has no modes"
            return [Problem(f"{where} {self.num_documents}", f"{len(modes)} modes", wanted)]
        if len(lengths) and int(lengths.max()) >= 1 << 31:
            got = f"a sequence of {int(lengths.max())} tokens"
            found.append(Problem(f"{where} {self.num_documents}", got, "less than 2^31", "cut it"))
        sizes = np.add.reduceat(np.append(lengths, 0), np.cumsum(counts) - counts) * (counts > 0)
        if not self._allow_empty:
            for index in np.flatnonzero(sizes == 0)[:20]:
                at = f"{where} {self.num_documents + index}, offset {self._offset(sizes, index)}"
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
        for index in np.flatnonzero((tokens < low) | (tokens > high))[:20]:
            number = int(np.searchsorted(np.cumsum(sizes), index, side="right"))
            offset = (self.num_tokens + int(index)) * self.dtype.itemsize
            at = f"{where} {self.num_documents + number}, offset {offset}"
            fix = "" if self._limit is not None else "choose a wider dtype"
            found.append(Problem(at, f"token id {tokens[index]}", f"{low} to {high}", fix))
        return found

    def _offset(self, sizes: np.ndarray, index: int) -> int:
        return (self.num_tokens + int(sizes[:index].sum())) * self.dtype.itemsize

    def _finish(self) -> None:
        layout = Layout(self.dtype, self.num_sequences, self.num_documents, self._has_modes)
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
        self._names[0].replace(self.bin_path)
        self._names[1].replace(self.idx_path)

    def _clean(self) -> None:
        for stream in self._files:
            stream.close()
        for name in self._names:
            name.unlink(missing_ok=True)


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
