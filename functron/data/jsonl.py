"""JSONL files of text: one JSON object a line, whose key has a document; compressed ones too."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from functron.data.records import Text, kind_of
from functron.errors import Problem, nearest, raise_problems

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
        yield Text("", place, Problem(where(file, place), got, "the rest of the file", _AGAIN))


def where(file: Path, place: int) -> str:
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
    """What is in a Zstandard file, frame after frame.

    Raises:
        EOFError: it is cut off (the package's own stream ends there as if it were whole), or
            damaged.
    """
    if find_spec("zstandard") is None:
        fix = "pip install zstandard, or functron[zstd]"
        problem = Problem("zstandard", "no such package", f"it, to read {file}", fix)
        raise_problems("cannot read compressed text", [problem])
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
        return _wrong(file, place, kind_of(found), f"an object with {key!r}")
    if key not in found:
        fix = nearest(key, found) if found else ""
        return _wrong(file, place, f"an object without {key!r}", "one with it", f"--key: {fix}")
    text = found[key]
    if not isinstance(text, str):
        return _wrong(file, place, f"{kind_of(text)} as {key!r}", "text")
    return Text(text, place)


def _wrong(file: Path, place: int, got: str, wanted: str, fix: str = "") -> Text:
    return Text("", place, Problem(where(file, place), got, wanted, fix))
