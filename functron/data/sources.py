"""Files of text, whatever kind they are, cut into chunks that can be read by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from functron.data import jsonl, parquet
from functron.data.documents import find
from functron.data.records import Text
from functron.errors import Problem, raise_problems

Kind = Literal["jsonl", "parquet", "text"]
_CANNOT = "cannot read the text"


@dataclass(frozen=True)
class Chunk:
    """A part of the text that one process reads at a time.

    Attributes:
        kind: of its files.
        files: one; or several of plain text, each of which is a document.
        start: the first byte (of JSONL) or row group (of Parquet) of the file that is in it.
        stop: the first that is not; None: the end of the file.
        size: its bytes, roughly.
    """

    kind: Kind
    files: tuple[Path, ...]
    start: int = 0
    stop: int | None = None
    size: int = 0


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files of text that `inputs` name, in order.

    A file is taken as what its name says: ``.jsonl``, ``.ndjson``, ``.json`` (perhaps with
    ``.gz`` or ``.zst`` after it), ``.parquet``, or else one document of plain text. Of a folder,
    its JSONL and Parquet files at any depth, if it has any; else its text files (see
    `functron.data.documents.find`).

    Raises:
        ValueError: nothing is there, or nothing to read. All inputs at fault are named.
    """
    found: list[Path] = []
    mistakes: list[str] = []
    for given in inputs:
        structured = _structured_in(Path(given))
        try:
            found += structured or find(given)[0]
        except ValueError as error:
            mistakes += str(error).splitlines()[1:]
    if not inputs:
        raise_problems(_CANNOT, [Problem("inputs", "none", "at least one file or folder")])
    _raise(mistakes)
    return found


def _structured_in(root: Path) -> list[Path]:
    """The JSONL and Parquet files of a folder that are not hidden."""
    if not root.is_dir():
        return []
    visible = (p for p in root.rglob("*") if all(x[0] != "." for x in p.relative_to(root).parts))
    # a .json by itself is more likely settings than text
    named = (p for p in visible if kind_of(p) != "text" and p.suffix != ".json")
    return sorted(path for path in named if path.is_file())


def _raise(mistakes: Sequence[str]) -> None:
    """Raise the mistakes that others' errors listed as one error."""
    if mistakes:
        raise ValueError("\n".join([_CANNOT, *mistakes]))


def kind_of(file: Path) -> Kind:
    """What a file's name says it is."""
    if file.suffix == ".parquet":
        return "parquet"
    return "jsonl" if jsonl.is_jsonl(file) or file.suffix == ".json" else "text"


def cut(files: Sequence[Path], key: str, chunk_bytes: int) -> list[Chunk]:
    """Chunks of about `chunk_bytes` each, in order, that have every document once.

    JSONL is cut anywhere, between lines; Parquet between row groups; compressed files, which can
    be read from the beginning only, and files of plain text are not cut.

    Raises:
        ValueError: a Parquet file cannot be read, or lacks the column `key`. All such are named.
    """
    chunks: list[Chunk] = []
    mistakes: list[str] = []
    for kind, group in groupby(files, kind_of):
        if kind == "text":
            chunks += _together(list(group), chunk_bytes)
            continue
        for file in group:
            try:
                chunks += _parts(file, kind, key, chunk_bytes)
            except ValueError as error:
                mistakes += str(error).splitlines()[1:]
    _raise(mistakes)
    return chunks


def _together(files: Sequence[Path], chunk_bytes: int) -> Iterator[Chunk]:
    """Files of plain text, several to a chunk."""
    taken: list[Path] = []
    size = 0
    for file in files:
        taken.append(file)
        size += file.stat().st_size
        if size >= chunk_bytes:
            yield Chunk("text", tuple(taken), size=size)
            taken, size = [], 0
    if taken:
        yield Chunk("text", tuple(taken), size=size)


def _parts(file: Path, kind: Kind, key: str, chunk_bytes: int) -> Iterator[Chunk]:
    """The chunks of one file."""
    if kind == "jsonl":
        size = file.stat().st_size
        if jsonl.is_compressed(file):
            yield Chunk(kind, (file,), size=size)
            return
        for start in range(0, size, chunk_bytes):
            stop = min(start + chunk_bytes, size)
            yield Chunk(kind, (file,), start, stop, stop - start)
        return
    start = total = 0
    sizes = parquet.row_groups(file, key)
    for group, size in enumerate(sizes, 1):
        total += size
        if total >= chunk_bytes or group == len(sizes):
            yield Chunk(kind, (file,), start, group, total)
            start, total = group, 0


def read(chunk: Chunk, key: str = "text") -> Iterator[Text]:
    """The documents of a chunk, right or wrong."""
    if chunk.kind == "jsonl":
        return jsonl.read_jsonl(chunk.files[0], key, chunk.start, chunk.stop)
    if chunk.kind == "parquet":
        return parquet.read_parquet(chunk.files[0], key, chunk.start, chunk.stop)
    return _plain(chunk.files)


def where(chunk: Chunk, place: int) -> str:
    """What to call the document at `place` of a chunk: its file, and the line or row in it."""
    if chunk.kind == "jsonl":
        return jsonl.where(chunk.files[0], place)
    if chunk.kind == "parquet":
        return parquet.where(chunk.files[0], place)
    return str(chunk.files[place])


def _plain(files: Sequence[Path]) -> Iterator[Text]:
    for place, file in enumerate(files):
        try:
            yield Text(file.read_bytes().decode("utf-8"), place)
        except UnicodeDecodeError as error:
            got = f"byte {error.object[error.start]:#04x} at offset {error.start}"
            fix = "convert it, or leave it out"
            yield Text("", place, Problem(str(file), got, "UTF-8", fix))
        except OSError as error:
            problem = Problem(str(file), error.strerror or str(error), "a readable file")
            yield Text("", place, problem)
