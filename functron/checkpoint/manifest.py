"""The manifest of a checkpoint: its files with sizes and checksums, its leaves, its metadata.

Values and the database's index carry checksums of their own. The manifest covers the rest: that
every file is there and as long as it was, the bytes of the small ones, and which checksum each
chunk of each leaf has, so that chunks which changed places are found. It has a checksum of itself.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from functron.checkpoint.database import name_of
from functron.checkpoint.placement import Leaf
from functron.core.errors import Problem

NAME = "functron.json"
FORMAT = 1
COMMITTED = "_CHECKPOINT_METADATA"
UNFINISHED = "orbax-checkpoint-tmp"
"""In the names of folders that are not complete."""
LATER = (COMMITTED, "commit_success.txt")
"""Written by Orbax after the manifest, and read by nothing here."""

_SMALL = 1 << 20  # values and index have checksums: large files are not read twice for another


def is_complete(path: Path) -> bool:
    """Whether `path` is a checkpoint that was written to its end.

    It is written under a temporary name, and renamed when all is there.
    """
    named = UNFINISHED not in path.name
    return named and ((path / NAME).is_file() or (path / COMMITTED).is_file())


def make(
    folder: Path,
    leaves: Sequence[tuple[Leaf, Sequence[int], Sequence[int]]],
    metadata: Mapping[str, Any],
    origin: Mapping[str, Any],
    progress: Callable[[], None] | None = None,
) -> None:
    """Write the manifest of the checkpoint in `folder`, which is complete but for it, and sync all.

    Args:
        folder: of the checkpoint.
        leaves: each with the shape of its chunks, and their CRC-32C in the order of `grid`.
        metadata: the user's.
        origin: where it was made: mesh, processes, versions.
        progress: called after each file.
    """
    content = {
        "format": FORMAT,
        "metadata": dict(metadata),
        "origin": dict(origin),
        "leaves": {
            leaf.path: {
                "shape": list(leaf.shape),
                "dtype": name_of(leaf.dtype),
                "chunk": list(chunk),
                "crc32c": list(checksums),
            }
            for leaf, chunk, checksums in leaves
        },
        "files": {name: _entry(folder / name, progress) for name in files(folder)},
    }
    content = json.loads(json.dumps(content))  # as it will be read
    path = folder / NAME
    path.write_text(json.dumps({"crc32": _checksum_of(content), "content": content}))
    sync_all(folder, progress)


def read(folder: Path) -> tuple[dict[str, Any] | None, list[Problem]]:
    """The manifest of a checkpoint, or None where it has none, and what is wrong with it."""
    path = folder / NAME
    fix = "restore an older checkpoint, or copy this one again"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if not _expects_manifest(folder):
            return None, []
        return None, [Problem(str(path), "no such file", "the checkpoint's manifest", fix)]
    except OSError as error:
        return None, [Problem(str(path), str(error), "a file that can be read", fix)]
    try:
        whole = json.loads(text)
        content = whole["content"]
        if whole["crc32"] != _checksum_of(content):
            raise ValueError("another checksum than it says")
    except (ValueError, KeyError, TypeError) as error:
        got = f"damaged contents ({error})"
        return None, [Problem(str(path), got, "the manifest as it was written", fix)]
    if content.get("format") != FORMAT:
        got = f"format {content.get('format')}"
        problem = Problem(str(path), got, f"format {FORMAT}", "use another version of functron")
        return None, [problem]
    return content, []


def check(folder: Path, content: Mapping[str, Any]) -> Iterator[Problem]:
    """The files that are missing, or differ in length or checksum from the manifest."""
    fix = "restore an older checkpoint, or copy this one again"
    for name, entry in content["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry["size"]:
                yield Problem(str(path), f"{size} bytes", f"{entry['size']} bytes", fix)
            elif "crc32" in entry and _checksum(path) != entry["crc32"]:
                yield Problem(str(path), "other bytes", "the bytes that were written", fix)
        except FileNotFoundError:
            yield Problem(str(path), "no such file", f"{entry['size']} bytes", fix)
        except OSError as error:
            yield Problem(str(path), str(error), "a file that can be read", fix)


def files(folder: Path) -> list[str]:
    """The files of a checkpoint that its manifest lists, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in found)
    return sorted(name for name in names if name not in (NAME, *LATER))


def sync(path: Path, progress: Callable[[], None] | None = None) -> None:
    """Have the disk hold a file's contents, or a folder's entries, before going on.

    Args:
        path: of the file or folder.
        progress: called every second for a minute, and at the end: one large file takes long.
    """
    handle = os.open(path, os.O_RDONLY)
    ended = threading.Event()

    def show() -> None:
        for _ in range(60):
            if ended.wait(1) or progress is None:
                return
            progress()

    shower = threading.Thread(target=show, daemon=True)
    try:
        if progress is not None:
            shower.start()
        os.fsync(handle)
    finally:
        ended.set()
        os.close(handle)
    if progress is not None:
        shower.join()
        progress()


def sync_all(folder: Path, progress: Callable[[], None] | None = None) -> None:
    """Have the disk hold everything in a folder before going on."""
    for directory, _, names in os.walk(folder):
        for path in [*(Path(directory) / name for name in names), Path(directory)]:
            sync(path, progress)


def _expects_manifest(folder: Path) -> bool:
    """Whether Orbax's own metadata shows that a checkpoint had a manifest once."""
    try:
        return b'"functron"' in (folder / "_METADATA").read_bytes()
    except OSError:
        return False


def _entry(path: Path, progress: Callable[[], None] | None) -> dict[str, int]:
    size = path.stat().st_size
    entry = {"size": size}
    if size <= _SMALL:
        entry["crc32"] = _checksum(path)
    if progress is not None:
        progress()
    return entry


def _checksum(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _checksum_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
