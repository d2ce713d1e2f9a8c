"""Token shards: .npy files, raw files, and those of llm.c, read as one row of tokens.

`open_tokens` opens tokens on disk whatever wrote them. `functron preprocess` writes a record beside
them: which tokenizer made them (`provenance`), and the checksums of their files, which `verify`
compares.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from types import MappingProxyType
from typing import Any

import numpy as np

from functron.core import tree
from functron.core.errors import Problem, local_path, raise_problems, refuse
from functron.data.indexed import IndexedFile, files_of, mistakes_in
from functron.data.mapped_files import (
    MAX_LISTED,
    OLD_RULES,
    RULES,
    Concatenated,
    FilePart,
    MappedRows,
    TextRules,
    TokenFile,
    check_dtype,
    ids_outside,
    raise_listed,
)
from functron.data.tokenizer import BYTES

SUFFIXES = MappingProxyType(
    {".u8": "uint8", ".u16": "uint16", ".u32": "uint32", ".i32": "int32", ".i64": "int64"}
)
"""Raw files whose names say their dtype."""

LLM_C = MappingProxyType({(20240520, 1): "uint16", (20240801, 7): "uint32"})
"""Magic and version in the headers of llm.c's files, and the dtype of their tokens.

Source: ``dev/data/data_common.py`` of llm.c. The header is 256 int32: magic, version, and the
number of tokens that follow it.
"""

LLM_C_HEADER = 1024
DOCUMENTS_SUFFIX = ".documents.npy"
SCANNED = 1 << 22
RULE_KEYS = ("text_rules", "begin_of_text", "prepend_bos", "special_tokens")
"""The part of a record that has the rules by which text became tokens; older ones have none."""
_CANNOT = "cannot open token shards"
_DAMAGED = "the record of tokens is damaged"
_AGAIN = "copy it again, or preprocess again"


class Shards(Concatenated):
    """Token shards, read as if concatenated: a `functron.data.mapped_files.TokenFile`.

    Opening reads the headers of the files, so it takes as long for large files as for small ones.

    Documents are, in this order of preference, those of the table that stands beside an .npy file
    (``tokens.documents.npy`` of ``tokens.npy``: int64, where each document begins, and the number
    of tokens at the end; `functron preprocess --format npy` writes it); those that the token
    `end_of_text` ends, for which all tokens are read when documents are first asked for; or the
    files themselves.

    Args:
        paths: files of one dtype, in order: .npy; llm.c's, by their header; or raw tokens.
        dtype: of raw tokens; None: as their names say (``.u16``, ``.u32``; see `SUFFIXES`).
        end_of_text: the id that ends a document; None: no id does.
        vocab_size: refuse a dtype that cannot hold ids below it; None: take any.

    Attributes:
        path: of the first.
        files: all of them.

    Raises:
        ValueError: a file is missing, empty, cut off, or no file of tokens; dtypes differ or are
            not known. All files at fault are named.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        dtype: str | np.dtype | type | None = None,
        end_of_text: int | None = None,
        vocab_size: int | None = None,
    ):
        self.files, problems = _open_shards(paths, None if dtype is None else np.dtype(dtype))
        raise_listed(_CANNOT, problems)
        first = self.files[0]
        check_dtype(str(first.path), first.dtype, vocab_size)
        little = [file._replace(dtype=file.dtype.newbyteorder("<")) for file in self.files]
        super().__init__(little, first.path)
        self.dtype, self._end = first.dtype, end_of_text

    @property
    def edges(self) -> np.ndarray:
        found = self._found
        return found.values if isinstance(found, MappedRows) else found

    @functools.cached_property
    def _found(self) -> np.ndarray | MappedRows:
        tables = [_find_table(file.path) for file in self.files]
        if all(table is not None for table in tables):
            begins = super().edges.tolist()
            whole = [_read_table(t, f) for t, f in zip(tables, self.files, strict=True) if t]
            if len(whole) == 1:
                return whole[0]
            parts = [x.values[:-1] + begin for x, begin in zip(whole, begins, strict=False)]
            return np.concatenate([*parts, [self.num_tokens]])
        if self._end is None:
            return super().edges
        found = [np.zeros(1, np.int64)]
        for begin in range(0, self.num_tokens, SCANNED):
            tokens = self.read(begin, min(SCANNED, self.num_tokens - begin))
            found.append(np.flatnonzero(tokens == self._end) + begin + 1)
        ends = np.concatenate(found)
        return ends if ends[-1] == self.num_tokens else np.append(ends, self.num_tokens)


def open_tokens(
    path: str | Path,
    *,
    dtype: str | np.dtype | type | None = None,
    end_of_text: int | None = None,
    vocab_size: int | None = None,
) -> TokenFile:
    """Open tokens on disk, whatever wrote them.

    Args:
        path: the prefix, .bin or .idx of Megatron-LM's indexed files (see
            `functron.data.indexed`); a shard (see `Shards`); or a folder of shards, all .npy or all
            raw, which are taken in the order of their names.
        dtype: of raw tokens.
        end_of_text: the id that ends documents in shards.
        vocab_size: refuse a dtype that cannot hold ids below it; None: take any.

    Raises:
        ValueError: there is nothing of the kind, or it cannot be opened.
    """
    found = local_path(path)
    shards = functools.partial(Shards, dtype=dtype, end_of_text=end_of_text, vocab_size=vocab_size)
    if files_of(path)[1].is_file():
        return IndexedFile(path, vocab_size=vocab_size)
    if found.is_dir():
        return shards(_find_shards(found))
    if not found.is_file():
        wanted = f"{path}.idx and .bin, a shard of tokens, or a folder of shards"
        refuse(_CANNOT, str(path), "nothing there", wanted, "check the spelling")
    return shards([found])


def is_tokens(path: str | Path) -> bool:
    """Whether `path` looks like tokens on disk rather than text: by names, without reading."""
    found = Path(path)
    if files_of(path)[1].is_file():
        return True
    known = {".npy", ".bin", *SUFFIXES}
    if found.is_dir():
        names = [file for file in found.iterdir() if file.is_file() and file.name[0] != "."]
        tokens = [file for file in names if file.suffix in known]
        # functron preprocess leaves a .json beside what it makes
        return bool(tokens) and all(file in tokens or file.suffix == ".json" for file in names)
    return found.is_file() and found.suffix in known


def _find_shards(folder: Path) -> list[Path]:
    visible = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name[0] != "."]
    arrays = [f for f in visible if f.suffix == ".npy" and not f.name.endswith(DOCUMENTS_SUFFIX)]
    raw = [file for file in visible if file.suffix == ".bin" or file.suffix in SUFFIXES]
    problems = []
    if any(file.suffix == ".idx" for file in visible):
        fix = "name one of them, or merge them with functron.data.merge"
        problems = [Problem(str(folder), "a folder of indexed files", "a prefix", fix)]
    elif arrays and raw:
        got = f"both {arrays[0].name} and {raw[0].name}"
        problems = [Problem(str(folder), got, "shards of one kind")]
    elif not (arrays or raw):
        kinds = ", ".join([".npy", ".bin", *SUFFIXES])
        problems = [Problem(str(folder), "a folder without shards", f"files named {kinds}")]
    raise_problems(_CANNOT, problems)
    return arrays or raw


def _open_shards(
    paths: Sequence[str | Path], dtype: np.dtype | None
) -> tuple[list[FilePart], list[Problem]]:
    """The files, and what is wrong with them."""
    found, problems = [], []
    for path in map(Path, paths):
        try:
            shard = _open_numpy(path) if path.suffix == ".npy" else _open_raw(path, dtype)
        except OSError as error:
            shard = Problem(str(path), error.strerror or str(error), "a file of tokens")
        if isinstance(shard, Problem):
            problems.append(shard)
        elif not shard.count:
            problems.append(Problem(str(path), "no tokens", "at least 1", "leave it out"))
        elif found and shard.dtype != found[0].dtype:
            got, wanted = shard.dtype.name, f"{found[0].dtype.name}, as {found[0].path} has"
            problems.append(Problem(str(path), got, wanted))
        else:
            found.append(shard)
    if not paths:
        problems.append(Problem("shards", "none", "at least one"))
    return found, problems


def _open_numpy(path: Path) -> FilePart | Problem:
    wanted = "a row of integers, as numpy.save writes it"
    size = path.stat().st_size
    with path.open("rb") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
            shape, _, dtype = read[version[0]](stream)
        except (ValueError, KeyError, SyntaxError, TokenError, RecursionError) as error:
            return Problem(f"{path}, offset 0", f"no .npy file ({error})", wanted)
        offset = stream.tell()
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.str[0] == ">":
        return Problem(f"{path}, offset 0", f"{dtype.str} {list(shape)}", wanted)
    needed = offset + shape[0] * dtype.itemsize
    if size != needed:
        got = f"{size} bytes"
        fix = f"copy or write it again: it ends at offset {size}"
        return Problem(str(path), got, f"{needed}, for the {shape[0]} tokens of its header", fix)
    return FilePart(path, dtype.newbyteorder("="), offset, shape[0])


def _open_raw(path: Path, dtype: np.dtype | None) -> FilePart | Problem:
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = np.frombuffer(stream.read(LLM_C_HEADER), np.uint8)
    if len(header) == LLM_C_HEADER:
        magic, version, count = header.view("<i4")[:3].tolist()
        kind = LLM_C.get((magic, version))
        if kind is not None and (dtype is None or dtype == kind):
            needed = LLM_C_HEADER + count * np.dtype(kind).itemsize
            if size == needed:
                return FilePart(path, np.dtype(kind), LLM_C_HEADER, count)
            wanted = f"{needed}, for the {count} tokens of its header (llm.c's, at offset 8)"
            fix = f"copy or write it again: it ends at offset {size}"
            return Problem(str(path), f"{size} bytes", wanted, fix)
    named = SUFFIXES.get(path.suffix)
    if dtype is None and named is None:
        names = ", ".join(SUFFIXES)
        fix = f"give its dtype, such as uint16, or a name that ends with one of {names}"
        got = "neither an .idx beside it nor llm.c's header"
        return Problem(str(path), got, "a file of tokens whose dtype is known", fix)
    kind = np.dtype(named) if dtype is None else dtype
    if kind.kind not in "iu":
        return Problem(str(path), f"dtype {kind.name}", "one of integers")
    if size % kind.itemsize:
        whole = size - size % kind.itemsize
        wanted = f"a multiple of {kind.itemsize}, for {kind.name}"
        fix = f"copy it again, or give its dtype: there is half a token at offset {whole}"
        return Problem(str(path), f"{size} bytes", wanted, fix)
    return FilePart(path, kind, 0, size // kind.itemsize)


def _find_table(tokens: Path) -> Path | None:
    table = tokens.with_name(tokens.name.removesuffix(".npy") + DOCUMENTS_SUFFIX)
    return table if tokens.suffix == ".npy" and table.is_file() else None


def _read_table(path: Path, shard: FilePart) -> MappedRows:
    """Where the documents of a shard begin: int64 ``[documents + 1]``."""
    try:
        table = np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        refuse(_CANNOT, str(path), f"no .npy file ({error})", "where documents begin: int64")
    whole = table.ndim == 1 and table.dtype == np.int64 and len(table) > 1
    if not whole or table[0] != 0 or table[-1] != shard.count:
        got = f"{table.dtype} {list(table.shape)}"
        got += f", from {table[0]} to {table[-1]}" if whole else ""
        wanted = f"int64, from 0 to the {shard.count} tokens of {shard.path}"
        refuse(_CANNOT, str(path), got, wanted, "copy or write both again")
    return MappedRows(path, table.dtype, table.offset, len(table))


_ENDINGS = (DOCUMENTS_SUFFIX, ".npy", ".bin", ".idx")


@dataclass(frozen=True)
class Provenance:
    """The tokenizer that made tokens.

    Attributes:
        tokenizer: the path of its file when it did, or ``bytes``.
        pattern: how it split text; empty: by the file, or its name.
        sha256: of the file.
        end: the id that ends documents; None: none does, or that is not recorded.
        begin: the ids that documents begin with.
        names: how many names of special tokens were in the text.
        rules: by which it made them; those of version 1 where they are not recorded.
    """

    tokenizer: str
    pattern: str
    sha256: str
    end: int | None = None
    begin: tuple[int, ...] = ()
    names: int = 0
    rules: TextRules = OLD_RULES

    @property
    def is_there(self) -> bool:
        """Whether the file is still where it was, and the same."""
        if self.tokenizer == BYTES:
            return True
        try:
            return hashlib.sha256(Path(self.tokenizer).read_bytes()).hexdigest() == self.sha256
        except (OSError, ValueError):  # no name of a file
            return False


def provenance(paths: Sequence[str | Path]) -> Provenance | None:
    """The tokenizer of all these tokens, of paths as `open_tokens` takes them.

    None where one of them has no record of it; ValueError where different tokenizers made them, so
    that no model can learn from both.
    """
    found = {str(path): read_provenance(path) for path in paths}
    known = {path: made for path, made in found.items() if made is not None}
    one = {path: (made.sha256, made.pattern) for path, made in known.items()}
    title, fix = "tokens of different tokenizers", "preprocess all with one tokenizer"
    _require_same(title, one, lambda path: f"tokens of {known[path].tokenizer}", fix)
    return next(iter(known.values())) if known and len(known) == len(found) else None


def rules_of(paths: Sequence[str | Path]) -> TextRules | None:
    """The rules by which all of these tokens were made that record them; None where none does.

    ValueError where they differ, so that no prompt is as both begin, or where a record is wrong.
    """
    made = {str(path): read_provenance(path) for path in paths}
    known = {path: one.rules for path, one in made.items() if one and one.rules.version > 1}

    def say(path: str) -> str:
        rules = known[path]
        return f"special_tokens={rules.special_tokens!r}, prepend_bos={rules.prepend_bos}"

    title = "tokens made by different rules of text"
    _require_same(title, known, say, "preprocess all of them by the same rules")
    return next(iter(known.values()), None)


def _require_same(title: str, known: Mapping, say: Callable[[str], str], fix: str) -> None:
    """Raise ValueError, with words for each, where records of tokens are not as the first's."""
    first = next(iter(known), "")
    fix = f"{fix}, or leave one out"
    raise_problems(title, [
        Problem(f"data {path}", say(path), f"{say(first)}, as in {first}", fix)
        for path in known if known[path] != known[first]
    ])  # fmt: skip


def read_provenance(path: str | Path) -> Provenance | None:
    """The maker and the rules of some tokens; None where there is no record of them.

    Raises:
        ValueError: the record names rules that it does not have whole, or that are not known.
    """
    file = _record_path(path)
    record = _read_record(file) or {}
    names = ("tokenizer", "pattern", "tokenizer_sha256")
    has_rules = not record.keys().isdisjoint(RULE_KEYS)
    if has_rules:
        raise_problems("the record of tokens has rules that cannot be read", [
            Problem(f"{file}: {name}", f"{record.get(name)!r:.100}", wanted, fix)
            for name, (holds, wanted, fix) in _CLAIMED.items()
            if not holds(record.get(name))
        ])  # fmt: skip
    texts = [field for name in names if isinstance(field := record.get(name), str)]
    if len(texts) != len(names):
        return None  # another program's
    path, pattern, sha256 = texts
    end = record.get("end_of_text")
    made = Provenance(path, pattern, sha256, end if isinstance(end, int) else None)
    if not has_rules:
        return made
    rules = TextRules(record["special_tokens"], record["prepend_bos"])
    begin = tuple(record["begin_of_text"])
    return replace(made, begin=begin, names=record["names"], rules=rules)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_CLAIMED: Mapping[str, tuple[Callable[[Any], bool], str, str]] = MappingProxyType({
    "text_rules": (
        lambda x: x == RULES.version and type(x) is int,
        f"{RULES.version}, the rules that this version of functron knows",
        "update functron, or preprocess again",
    ),
    "special_tokens": (lambda x: x in ("text", "parse"), "'text' or 'parse'", _AGAIN),
    "prepend_bos": (lambda x: isinstance(x, bool), "true or false", _AGAIN),
    "begin_of_text": (
        lambda x: isinstance(x, list) and all(map(_is_count, x)), "a list of ids", _AGAIN,
    ),
    "end_of_text": (lambda x: x is None or _is_count(x), "an id, or null", _AGAIN),
    "names": (_is_count, "how many names of special tokens were in the text", _AGAIN),
    "tokenizer": (lambda x: isinstance(x, str), "a path, or bytes", _AGAIN),
    "tokenizer_sha256": (lambda x: isinstance(x, str), "a checksum", _AGAIN),
    "pattern": (lambda x: isinstance(x, str), "a pattern, or an empty text", _AGAIN),
})  # fmt: skip
"""The fields of a record that names rules: what holds of each, in words, and how to mend it."""


def _record_path(path: str | Path) -> Path:
    stem = str(path)
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    return Path(f"{stem}.json")


def _read_record(file: Path) -> dict[str, Any] | None:
    """The record in a file; None: there is none; ValueError where it is not as it was written."""
    found = read_object(file)
    if found is None:
        return None
    whole = {name: value for name, value in found.items() if name != "crc32"}
    if ("files" in found or "crc32" in found) and found.get("crc32") != tree.json_checksum(whole):
        refuse(_DAMAGED, str(file), "damaged contents", "the record as it was written", _AGAIN)
    return whole


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where it has none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def with_checksums(record: Mapping[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """A record for JSON, with its own checksum, and the sizes and checksums of `files`."""
    content = {**record, "files": {file.name: _describe_contents(file) for file in files}}
    content = json.loads(json.dumps(content))  # as it will be read
    return {**content, "crc32": tree.json_checksum(content)}


def _describe_contents(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "crc32": list(_read_checksums(file))}


def _read_checksums(file: Path) -> Iterator[int]:
    """The CRC-32 of every `CHECKED_BYTES` of a file."""
    with file.open("rb") as stream:
        while block := stream.read(CHECKED_BYTES):
            yield zlib.crc32(block)


def _find_differences(record: Path) -> Iterator[Problem]:
    """Where files of tokens differ from the record beside them."""
    content = _read_record(record)
    if content is None:
        yield Problem(str(record), "damaged contents", "the record as it was written", _AGAIN)
        return
    files = content.get("files", {})
    if not isinstance(files, dict):
        yield Problem(f"{record}: files", f"{files!r:.100}", "names and checksums", _AGAIN)
        return
    for name, entry in files.items():
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            yield Problem(str(record), f"{name!r:.100}", "names of files beside it", _AGAIN)
            continue
        file = record.with_name(name)
        try:
            size = file.stat().st_size
            if size != entry["bytes"]:
                yield Problem(str(file), f"{size} bytes", f"{entry['bytes']} bytes", _AGAIN)
                continue
            for number, (found, wanted) in enumerate(
                zip(_read_checksums(file), entry["crc32"], strict=True)
            ):
                if found != wanted:
                    begin = number * CHECKED_BYTES
                    where = f"{file}, offsets {begin} to {min(begin + CHECKED_BYTES, size) - 1}"
                    yield Problem(where, "other bytes", "the bytes that were written", _AGAIN)
        except OSError as error:
            got = error.strerror or str(error)
            yield Problem(str(file), got, "a file that can be read", _AGAIN)
        except (KeyError, TypeError, ValueError):  # a record of another make
            wanted = "a size and a checksum of each block"
            yield Problem(f"{record}: {name}", f"{entry!r:.100}", wanted, _AGAIN)


def verify(
    tokens: TokenFile | str | Path, *, vocab_size: int | None = None, allow_empty: bool = False
) -> bool:
    """Read all of the tokens that `open_tokens` opens, and check that they are what was written.

    Compares the checksums of the record beside them, where `functron preprocess` left one. Then
    every id must be at least 0 and below `vocab_size`; in indexed files sequences must stand one
    after another without gaps, and documents in order. A few MB at a time.

    Args:
        tokens: opened; or where they are, as `open_tokens` takes it.
        vocab_size: of the tokenizer; None: any ids that are not negative.
        allow_empty: let documents of indexed files have no tokens. Megatron-LM writes such for
            texts that have none; nothing is ever drawn from them.

    Returns:
        Whether there are checksums. Without them, a token may be another one unnoticed.

    Raises:
        ValueError: the first 20 places that are wrong, each with file, offset and what it is; or
            what `open_tokens` raises.
    """
    file = open_tokens(tokens) if isinstance(tokens, str | Path) else tokens
    paths = [part.path for part in file.files] if isinstance(file, Shards) else [file.path]
    records = [_record_path(path) for path in paths]
    if isinstance(file, IndexedFile):
        places = mistakes_in(file, vocab_size, allow_empty)
    else:
        places = ids_outside(file, file.path, vocab_size)
    there = [record for record in records if record.is_file()]
    found = itertools.chain(places, *map(_find_differences, there))
    problems = list(itertools.islice(found, MAX_LISTED + 1))
    more = f": the first {MAX_LISTED} mistakes" if len(problems) > MAX_LISTED else ""
    raise_problems(f"{file.path} is damaged{more}", problems[:MAX_LISTED])
    return all("files" in (_read_record(record) or {}) for record in records)


CHECKED_BYTES = 1 << 26
"""Bytes of a file that one checksum is of."""
