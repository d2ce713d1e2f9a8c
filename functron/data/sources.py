"""Files of text, whatever kind they are, cut into chunks that can be read by themselves.

JSONL has one JSON object a line, whose key has a document; compressed files too. Parquet has a
column with a document in every row. Other files are one document of plain text each.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from functron.core.errors import Problem, local_path, nearest, refuse
from functron.data.documents import find, require_package


class Text(NamedTuple):
    """One document of a file.

    Attributes:
        text: of the document; empty where there is a problem.
        place: in the file or chunk, for `where`.
        problem: why it cannot be read; None where it can.
    """

    text: str
    place: int
    problem: Problem | None = None


def json_kind(value: object) -> str:
    """The user's word for the kind of a JSON value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED = tuple(stem + suffix for stem in (*SUFFIXES, ".json") for suffix in (".gz", ".zst"))
"""Files that can be read from their beginning only."""

BLOCK = 1 << 17
_AGAIN = "copy or download it again"


def is_jsonl(path: Path) -> bool:
    """Whether a file's name is that of JSONL, or of compressed JSONL."""
    return path.name.endswith((*SUFFIXES, *COMPRESSED))


def is_compressed(path: Path) -> bool:
    """Whether a file's name ends with that of a compression."""
    return path.suffix in (".gz", ".zst")


def read_jsonl(
    file: Path, key: str = "text", start: int = 0, stop: int | None = None
) -> Iterator[Text]:
    """The texts of the lines that begin at bytes `start` to `stop`; blank lines are passed over.

    So the ranges of a file that is cut anywhere have each line once. A line that cannot be read
    comes with its problem; a compressed file that cannot be read any further ends with one.

    Args:
        file: JSONL in UTF-8; by the end of its name, as gzip (``.gz``) or Zstandard (``.zst``).
        key: of the text in every line's object.
        start: of a file that is not compressed.
        stop: likewise; None: the end.

    Raises:
        ValueError: the package zstandard is missing.
        OSError: the file cannot be opened.
    """
    place = start
    try:
        for place, line in _lines(file, start):
            if stop is not None and place >= stop:
                return
            if line.strip():
                yield _text(file, key, place, line)
            place += len(line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        got = f"{error or 'the end'} after {place} bytes of text"
        yield Text(
            "", place, Problem(where_in_jsonl(file, place), got, "the rest of the file", _AGAIN)
        )


def where_in_jsonl(file: Path, place: int) -> str:
    """``FILE:LINE`` of the line at byte `place` of the text; reads the file up to it."""
    number = 1
    try:
        for begin, line in _lines(file, 0):
            if begin + len(line) > place:
                break
            number += line.endswith(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        pass  # it is the line at which reading ended
    return f"{file}:{number}"


def _lines(file: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Where lines begin, and they, from the first that begins at `start` or after."""
    if file.suffix == ".gz":
        with gzip.open(file, "rb") as stream:
            yield from _placed(stream, 0)
    elif file.suffix == ".zst":
        yield from _placed(_split(_unpacked(file)), 0)
    else:
        with file.open("rb") as stream:
            if start:
                stream.seek(start - 1)
                start += len(stream.readline()) - 1  # the rest of a line that began before
            yield from _placed(stream, start)


def _placed(lines: Any, place: int) -> Iterator[tuple[int, bytes]]:
    for line in lines:
        yield place, line
        place += len(line)


def _split(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines with their ends."""
    rest: list[bytes] = []
    for block in blocks:
        *whole, last = block.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line, b"\n"])
            rest = []
        rest.append(last)
    if last := b"".join(rest):
        yield last


def _unpacked(file: Path) -> Iterator[bytes]:
    """The bytes in a Zstandard file, frame after frame.

    Raises:
        EOFError: it is cut off (the package's own stream ends there as if it were whole), or
            damaged.
    """
    require_package("zstandard", "zstd", "cannot read compressed text", f"it, to read {file}")
    import zstandard

    frame, begun = None, False
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            while block:
                # windows of up to 2 GiB: what zstd --long writes
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(f"damaged data ({error})") from error
                begun = not frame.eof
                block = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if begun:
        raise EOFError("the end of the file in the middle of a frame")


def _text(file: Path, key: str, place: int, line: bytes) -> Text:
    try:
        found = json.loads(line.rstrip().decode("utf-8-sig" if place == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        got = f"byte {line[error.start]:#04x} at offset {place + error.start}"
        return _wrong(file, place, got, "UTF-8")
    except json.JSONDecodeError as error:
        return _wrong(file, place, f"{error.msg} at column {error.colno}", "one JSON object a line")
    except RecursionError:
        return _wrong(file, place, "JSON too deep to read", "an object")
    if not isinstance(found, dict):
        return _wrong(file, place, json_kind(found), f"an object with {key!r}")
    if key not in found:
        fix = nearest(key, found) if found else ""
        return _wrong(file, place, f"an object without {key!r}", "one with it", f"--key: {fix}")
    text = found[key]
    if not isinstance(text, str):
        return _wrong(file, place, f"{json_kind(text)} as {key!r}", "text")
    return Text(text, place)


def _wrong(file: Path, place: int, got: str, wanted: str, fix: str = "") -> Text:
    return Text("", place, Problem(where_in_jsonl(file, place), got, wanted, fix))


ROWS = 256
_NOT_PARQUET = "cannot read Parquet"


def row_groups(file: Path, key: str = "text") -> list[int]:
    """The rough sizes of a file's row groups, in bytes, from its footer alone.

    Raises:
        ValueError: the package pyarrow is missing, the file is damaged, or no column of text is
            called `key`.
    """
    metadata = _open(file, key).metadata
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def read_parquet(
    file: Path, key: str = "text", start: int = 0, stop: int | None = None
) -> Iterator[Text]:
    """The texts of row groups `start` to `stop`, some rows at a time; a text's place is its row.

    A row that has none (null: None or NaN in pandas) comes with its problem, and a damaged row
    group ends with one.

    Raises:
        ValueError: what `row_groups` raises.
    """
    import pyarrow

    opened = _open(file, key)
    counts = _counts(opened)
    last = len(counts) if stop is None else stop
    for group in range(start, last):
        row = sum(counts[:group])
        try:
            for batch in opened.iter_batches(ROWS, row_groups=[group], columns=[key]):
                yield from _texts(file, key, row, batch.column(0), counts)
                row += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            got = f"damaged data ({str(error).splitlines()[0]})"
            place = f"{file}, row group {group}, row {row - sum(counts[:group])} or after"
            problem = Problem(place, got, "rows of text", "copy or download the file again")
            yield Text("", row, problem)


def where_in_parquet(file: Path, place: int) -> str:
    """``FILE, row group G, row R``, both from 0, of a row of the file."""
    import pyarrow.parquet

    return _where(file, place, _counts(pyarrow.parquet.ParquetFile(file)))


def _counts(opened: Any) -> list[int]:
    metadata = opened.metadata
    return [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]


def _where(file: Path, place: int, counts: list[int]) -> str:
    for group, count in enumerate(counts):
        if place < count:
            return f"{file}, row group {group}, row {place}"
        place -= count
    raise AssertionError("unreachable")


def _texts(file: Path, key: str, row: int, column: Any, counts: list[int]) -> Iterator[Text]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} in column {key!r}"
        place = f"{_where(file, row, counts)} or one of the {len(column) - 1} after it"
        yield Text("", row, Problem(place, got, "UTF-8"))
        return
    for place, text in enumerate(values, row):
        if text is None:
            fix = "leave such rows out when writing the file"
            got = f"null (None or NaN) in column {key!r}"
            yield Text("", place, Problem(_where(file, place, counts), got, "text", fix))
        else:
            yield Text(text, place)


def _open(file: Path, key: str) -> Any:
    require_package("pyarrow", "parquet", _NOT_PARQUET, f"it, to read {file}")
    import pyarrow
    import pyarrow.parquet

    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names in no UTF-8
        got = str(error).splitlines()[0]
        fix = "copy or download it again"
        refuse(_NOT_PARQUET, str(file), got, "a Parquet file", fix)
    schema = opened.schema_arrow
    if key not in schema.names:
        got = f"no column {key!r}"
        fix = f"--key: {nearest(key, schema.names)}"
        refuse(_NOT_PARQUET, str(file), got, "a column of text", fix)
    kind = schema.field(key).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        fix = "write it as text; a column that is NaN in every row becomes one of numbers"
        refuse(_NOT_PARQUET, f"{file}, column {key!r}", kind, "strings", fix)
    return opened


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

    The kind of a file follows from its name: ``.jsonl``, ``.ndjson``, ``.json`` (perhaps with
    ``.gz`` or ``.zst`` after it), ``.parquet``, or else one document of plain text. Of a folder,
    its JSONL and Parquet files at any depth, if it has any; else its text files (see
    `functron.data.documents.find`).

    Raises:
        ValueError: nothing is there, or nothing to read. All inputs at fault are named.
    """
    found: list[Path] = []
    mistakes: list[str] = []
    for given in inputs:
        structured = _structured_in(local_path(given, "inputs"))
        try:
            found += structured or find(given)[0]
        except ValueError as error:
            mistakes += str(error).splitlines()[1:]
    if not inputs:
        refuse(_CANNOT, "inputs", "none", "at least one file or folder")
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
    """The kind of a file, by its name."""
    if file.suffix == ".parquet":
        return "parquet"
    return "jsonl" if is_jsonl(file) or file.suffix == ".json" else "text"


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
        if is_compressed(file):
            yield Chunk(kind, (file,), size=size)
            return
        for start in range(0, size, chunk_bytes):
            stop = min(start + chunk_bytes, size)
            yield Chunk(kind, (file,), start, stop, stop - start)
        return
    start = total = 0
    sizes = row_groups(file, key)
    for group, size in enumerate(sizes, 1):
        total += size
        if total >= chunk_bytes or group == len(sizes):
            yield Chunk(kind, (file,), start, group, total)
            start, total = group, 0


def read(chunk: Chunk, key: str = "text") -> Iterator[Text]:
    """The documents of a chunk, right or wrong."""
    if chunk.kind == "jsonl":
        return read_jsonl(chunk.files[0], key, chunk.start, chunk.stop)
    if chunk.kind == "parquet":
        return read_parquet(chunk.files[0], key, chunk.start, chunk.stop)
    return _plain(chunk.files)


def where(chunk: Chunk, place: int) -> str:
    """The user's name of the document at `place` of a chunk: its file, and line or row."""
    if chunk.kind == "jsonl":
        return where_in_jsonl(chunk.files[0], place)
    if chunk.kind == "parquet":
        return where_in_parquet(chunk.files[0], place)
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
