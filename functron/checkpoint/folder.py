"""Checkpoints on disk: folders of them, listed and kept; one of them, read slice by slice.

The manifest of a checkpoint names its files with sizes and checksums, its leaves and metadata.
Values and the database's index carry checksums of their own. The manifest covers the rest: that
every file is there and as long as it was, the bytes of the small ones, and which checksum each
chunk of each leaf has, so that chunks which changed places are found. It has a checksum of itself.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from textwrap import indent
from typing import Any

import numpy as np
import torch

from functron.checkpoint import database
from functron.checkpoint.database import MEND, as_array, as_tensor, from_name, name_of
from functron.checkpoint.placement import Box, Leaf, Piece, cells, grid
from functron.core import tree
from functron.core.errors import Problem, local_path, nearest, raise_problems, refuse
from functron.core.tables import align_columns, bytes_text

MANIFEST = "functron.json"
FORMAT = 1
COMMITTED = "_CHECKPOINT_METADATA"
UNFINISHED = "orbax-checkpoint-tmp"
"""In the names of folders that are not complete."""
LATER = (COMMITTED, "commit_success.txt")
"""Written by Orbax after the manifest, and read by nothing here."""

_SMALL = 1 << 20  # values and index have checksums: large files are not read twice for another


def is_complete(path: Path) -> bool:
    """Whether `path` is a checkpoint that was written to its end, and renamed then."""
    named = UNFINISHED not in path.name
    return named and ((path / MANIFEST).is_file() or (path / COMMITTED).is_file())


def make_manifest(
    folder: Path,
    leaves: Sequence[tuple[Leaf, Sequence[int], Sequence[int]]],
    metadata: Mapping[str, Any],
    origin: Mapping[str, Any],
    progress: Callable[[], None] | None = None,
) -> None:
    """Write the manifest of the checkpoint in `folder`, which is complete but for it, and sync it.

    The processes' databases are on the disk already: each has synced its own.

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
        "files": {name: _describe_file(folder / name, progress) for name in files(folder)},
    }
    content = json.loads(json.dumps(content))  # as it will be read
    path = folder / MANIFEST
    path.write_text(json.dumps({"crc32": tree.json_checksum(content), "content": content}))
    databases = [path.name for path in folder.glob(f"{database.PROCESS}*")]
    sync_all(folder, progress, but=databases)


def read_manifest(folder: Path) -> tuple[dict[str, Any] | None, list[Problem]]:
    """The manifest of a checkpoint, or None where it has none, and what is wrong with it."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if not _expects_manifest(folder):
            return None, []
        return None, [Problem(str(path), "no such file", "the checkpoint's manifest", MEND)]
    except OSError as error:
        return None, [Problem(str(path), str(error), "a file that can be read", MEND)]
    try:
        whole = json.loads(text)
        content = whole["content"]
        if whole["crc32"] != tree.json_checksum(content):
            raise ValueError("its checksum differs from the recorded one")
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} for its content")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"damaged contents ({error})"
        return None, [Problem(str(path), got, "the manifest as it was written", MEND)]
    if content.get("format") != FORMAT:
        got = f"format {content.get('format')}"
        problem = Problem(str(path), got, f"format {FORMAT}", "use another version of functron")
        return None, [problem]
    found = [
        Problem(f"{path}: {where}", f"{value!r:.100}", wanted, MEND)
        for where, value, wanted in _find_invalid_entries(content)
    ]
    return (None, found) if found else (content, [])


def _find_invalid_entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """The entries of a manifest that no save has written: where, which, and what they are to be.

    A checksum shows damage, but not who wrote the file: names must stay inside the folder.
    """
    tables = {name: content.get(name) for name in ("metadata", "origin", "leaves", "files")}
    for name, table in tables.items():
        if not isinstance(table, dict):
            yield name, table, "names and what they are"
    leaves, listed = (t if isinstance(t, dict) else {} for t in (tables["leaves"], tables["files"]))
    for name, entry in leaves.items():
        found = entry if isinstance(entry, dict) else {}
        sizes = [found.get("shape"), found.get("chunk"), found.get("crc32c", [])]
        lists = all(isinstance(x, list) and all(map(_is_size, x)) for x in sizes)
        if not (lists and isinstance(found.get("dtype"), str)):
            yield f"leaves/{name}", entry, "a shape, chunk, dtype and checksums"
    for name, entry in listed.items():
        found = entry if isinstance(entry, dict) else {}
        if not (_is_size(found.get("size")) and _is_size(found.get("crc32", 0))):
            yield f"files/{name}", entry, "a size, and perhaps a checksum"
        if not name or "\0" in name or PurePosixPath(name).is_absolute() or ".." in name.split("/"):
            yield "files", name, "files in the checkpoint's own folder"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_files(folder: Path, content: Mapping[str, Any]) -> Iterator[Problem]:
    """The files that are missing, or differ in length or checksum from the manifest."""
    for name, entry in content["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry["size"]:
                yield Problem(str(path), f"{size} bytes", f"{entry['size']} bytes", MEND)
            elif "crc32" in entry and zlib.crc32(path.read_bytes()) != entry["crc32"]:
                yield Problem(str(path), "other bytes", "the bytes that were written", MEND)
        except FileNotFoundError:
            yield Problem(str(path), "no such file", f"{entry['size']} bytes", MEND)
        except OSError as error:
            yield Problem(str(path), str(error), "a file that can be read", MEND)


def files(folder: Path) -> list[str]:
    """The files of a checkpoint that its manifest lists, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in found)
    return sorted(name for name in names if name not in (MANIFEST, *LATER))


def sync(path: Path) -> None:
    """Have the disk hold a file's contents, or a folder's entries, before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_SYNCS = 8  # files at once: disks are faster at several
_PATIENCE = 60.0  # seconds for which waiting for one file counts as progress


def sync_all(
    folder: Path, progress: Callable[[], None] | None = None, *, but: Sequence[str] = ()
) -> None:
    """Have the disk hold everything in a folder before going on, several files at once.

    Args:
        folder: with all that is below it.
        progress: called after each file, and every second for a minute: a large one takes long.
        but: folders in it whose contents are on the disk already; their own entries are not.
    """
    left = {folder / name for name in but}
    paths: list[Path] = []
    for found, below, names in os.walk(folder):
        directory = Path(found)
        paths += [*(directory / name for name in names), directory]
        below[:] = [name for name in below if directory / name not in left]
    with futures.ThreadPoolExecutor(_SYNCS, "sync") as threads:
        waiting = {threads.submit(sync, path) for path in paths}
        last = time.monotonic()
        while waiting:
            ended, waiting = futures.wait(waiting, 1, futures.FIRST_COMPLETED)
            for each in ended:
                each.result()
            last = time.monotonic() if ended else last
            if progress is not None and time.monotonic() - last < _PATIENCE:
                progress()


class WriteBehind:
    """Has the disk take the files of a folder while later ones are written, in a thread.

    What is left for `sync_all` then takes less. An fsync of each file at once would be slower: the
    file system commits its journal every time, and other writers wait for that. The pages of what
    the disk has are given up, and used again for what comes next: a checkpoint that fills the
    memory with its pages drives out those of the data, and memory that a virtual machine has not
    used for a while takes longer to use first than the disk does.

    Args:
        folder: with all that is below it; it need not be there yet.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._seen: dict[Path, None] = {}
        self._thread = futures.ThreadPoolExecutor(1, "write behind")

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def go_on(self) -> None:
        """Something was written."""
        self._thread.submit(self._drop_new_pages)

    def _drop_new_pages(self) -> None:
        for found, _, names in os.walk(self._folder):
            for path in (Path(found) / name for name in names):
                if path not in self._seen and _is_large(path):
                    self._seen[path] = None
                    # of a new file the disk begins to take what is there, of the one `_BEHIND`
                    # before it has taken most, whose pages are given up
                    _drop_pages(path)
                    if len(self._seen) > _BEHIND:
                        _drop_pages([*self._seen][-1 - _BEHIND])


def _is_large(path: Path) -> bool:
    """Whether a file has values; others are written anew, for which they must not be in use."""
    try:
        return path.stat().st_size > _SMALL
    except FileNotFoundError:  # it had a name of its own while it was written
        return False


_BEHIND = 2  # files


def _drop_pages(path: Path) -> None:
    """Have the disk begin to take a file's pages, and forget those that it has."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _expects_manifest(folder: Path) -> bool:
    """Whether Orbax's own metadata shows that a checkpoint had a manifest once."""
    try:
        return b'"functron"' in (folder / "_METADATA").read_bytes()
    except OSError:
        return False


def _describe_file(path: Path, progress: Callable[[], None] | None) -> dict[str, int]:
    size = path.stat().st_size
    entry = {"size": size}
    if size <= _SMALL:
        entry["crc32"] = zlib.crc32(path.read_bytes())
    if progress is not None:
        progress()
    return entry


class Checkpoint(Mapping[str, "StoredLeaf"]):
    """A checkpoint opened for reading: its leaves by path, of which nothing is read yet.

    >>> stored = Checkpoint("run/checkpoints/100")
    >>> stored["params/embed"].shape
    (50304, 768)
    >>> stored["params/embed"][:10]  # reads only the chunks that these rows are in

    Its files are looked at, not read: all must be there and as long as they were, and the small
    ones have the checksums they had. The values' checksums are compared when they are read, with
    those that were written for that chunk of that leaf.

    Plain Orbax checkpoints open too, if they are PyTrees in OCDBT databases; what has no manifest,
    or one of before functron recorded the checksum of each chunk, is checked less. A UserWarning
    is given when values are read; see `unbound`.

    Args:
        path: a complete checkpoint.

    Raises:
        ValueError: nothing is there, it is incomplete or damaged; all files at fault are listed.
    """

    def __init__(self, path: str | Path):
        self.path = local_path(path).absolute()
        if not is_complete(self.path):
            got = "an incomplete checkpoint" if self.path.is_dir() else "nothing there"
            wanted, fix = "a complete checkpoint", "see which there are: ls RUN/checkpoints"
            refuse("cannot read the checkpoint", str(path), got, wanted, fix)
        self._content, found = read_manifest(self.path)
        if self._content is not None:
            found += check_files(self.path, self._content)
        raise_problems(f"the checkpoint {path} is damaged", found)
        self._context = database.context()
        self._driver, names = (
            ("zarr3", self._content["leaves"]) if self._content else self._read_orbax()
        )
        self._names = dict.fromkeys(names)
        self._opened: dict[str, Any] = {}

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that was passed to `save`."""
        if self._content is not None:
            return self._content["metadata"]
        try:
            text = (self.path / "_CHECKPOINT_METADATA").read_text()
            return dict(json.loads(text).get("custom_metadata") or {})
        except (OSError, ValueError, RecursionError):
            return {}

    @property
    def origin(self) -> dict[str, Any]:
        """Where it was made: mesh, number of processes, time, versions; empty where unknown."""
        return {} if self._content is None else self._content["origin"]

    @property
    def unbound(self) -> str:
        """The checks that are left out where no checksum of each chunk is recorded; empty: none."""
        leaves = self._content["leaves"].values() if self._content else [{}]
        if all("crc32c" in entry for entry in leaves):
            return ""
        return (
            f"{self.path} was written by Orbax alone or by an older functron, which does not "
            "record the checksum of each part of each leaf: parts that changed places would not be "
            "noticed; fix: restore it, evaluate it, and save it again"
        )

    @property
    def nbytes(self) -> int:
        """The bytes of its files."""
        files = (path for path in self.path.rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files)

    def __getitem__(self, path: str) -> StoredLeaf:
        """The leaf at `path`; KeyError without one, ValueError where its description is damaged."""
        if path not in self._names:
            raise KeyError(f"{self.path} has no leaf {path!r}; {nearest(path, self._names)}")
        if path not in self._opened:
            self.open([path])
        return self._opened[path]

    def __contains__(self, path: object) -> bool:
        return path in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def open(self, paths: Sequence[str] | None = None) -> None:
        """Read the descriptions of these leaves, or of all, together; ValueError lists damaged
        ones.
        """
        import tensorstore as ts

        wanted = [p for p in (self if paths is None else paths) if p not in self._opened]
        opening = {
            path: ts.open(
                database.reading(self.path, path, self._driver),
                read=True,
                open=True,
                context=self._context,
            )
            for path in wanted
        }
        found = []
        for path, future in opening.items():
            try:
                leaf = StoredLeaf(self, path, future.result())
            except Exception as error:
                found.append(database.explain_reading(error, path, "its description"))
                continue
            found += leaf.differences(self._content)
            self._opened[path] = leaf
        raise_problems(f"the checkpoint {self.path} is damaged", found)

    def present(self, leaves: Mapping[str, Any], *, without: Sequence[str]) -> None:
        """Have it hold leaves that are made of its own, without some of these."""
        for path in without:
            del self._names[path]
        self._names |= dict.fromkeys(leaves)
        self._opened |= leaves

    def checksum_written(self, path: str, number: int) -> int | None:
        """The CRC-32C of a leaf's chunk `number`, in the order of `grid`.

        None where none is recorded, of which the first call warns.
        """
        if self._warned:
            return None
        assert self._content is not None
        return self._content["leaves"][path]["crc32c"][number]

    @cached_property
    def _warned(self) -> bool:
        if text := self.unbound:
            warnings.warn(text, stacklevel=2)
        return bool(text)

    @cached_property
    def begin_checksum(self) -> Callable[[str], Callable[[], int]]:
        """Begins to read the CRC-32C that a chunk ends with; see `database.open_checksums`."""
        return database.open_checksums(self.path, self._context)

    def _read_orbax(self) -> tuple[str, list[str]]:
        """The array format and the leaves of what has only Orbax's own metadata."""
        path = self.path / "_METADATA"
        problem = None
        try:
            found = json.loads(path.read_text())
            entries = found["tree_metadata"].values()
            if not found.get("use_ocdbt", True):
                problem = Problem(str(path), "arrays in folders", "an OCDBT database")
            names = [
                "/".join(str(step["key"]) for step in entry["key_metadata"])
                for entry in entries
                if entry["value_metadata"]["value_type"] not in ("None", "Dict", "List", "Tuple")
            ]
            driver = "zarr3" if found.get("use_zarr3") else "zarr"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            got = f"{type(error).__name__}: {error}"
            problem = Problem(str(path), got, "the metadata of an Orbax PyTree")
            driver, names = "", []
        raise_problems(f"cannot read the checkpoint {self.path}", [problem] if problem else [])
        return driver, names


class StoredLeaf:
    """A leaf of a checkpoint on disk: ``leaf[3, 10:20]`` reads only the chunks that these are in.

    Attributes:
        path: in the tree.
        shape: global and unpadded.
        dtype: of its elements; None where torch has no such dtype.
    """

    def __init__(self, checkpoint: Checkpoint, path: str, array: Any):
        self._checkpoint, self._array = checkpoint, array
        self.path = path
        self.shape = tuple(array.shape)
        self.dtype_name = array.dtype.name
        self.dtype: torch.dtype | None = from_name(array.dtype.name)
        self.chunk = tuple(array.chunk_layout.read_chunk.shape or ())

    def __repr__(self) -> str:
        return f"StoredLeaf({self.path}, {self.dtype_name}, {self.shape})"

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return database.nbytes_of(self.shape, self.itemsize)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self._array.dtype.numpy_dtype.itemsize

    def __getitem__(self, where: Any) -> torch.Tensor:
        """The values there, as a tensor on the CPU: integers, slices and ``...``, as for a tensor.

        Raises:
            ValueError: values are damaged.
            IndexError: it is out of range, or something else than these.
        """
        position = normalise_index(where, self.shape)
        folder = self._checkpoint.path
        checks = [self._begin_check(cell) for cell in cells(_bounding_box(position), self.chunk)]
        with database.naming_file(self.path, lambda: f"a file of {folder}", folder):
            found = as_tensor(np.asarray(self._array[position].read().result()))
            for check in checks:
                check()
            return found

    def read(self, boxes: Sequence[Box], out: torch.Tensor, window: database.Window) -> None:
        """Begin to read boxes of the leaf into `out`; done when the window is drained.

        Chunk by chunk; straight into `out` where that is in host memory and of the same dtype.
        """
        size = database.nbytes_of(self.chunk, self.itemsize)
        direct = out.device.type == "cpu" and out.dtype == self.dtype
        for box in boxes:
            for cell in cells(box, self.chunk):
                part = Piece.of(cell, self.chunk, box)
                target = out.detach()[part.slices()]
                window.add(size, partial(self._begin_read, part, target, direct))

    def checking(self, cell: Sequence[int], found: list[Problem]) -> Callable[[], None]:
        """Begin to read a chunk; what is returned waits, and adds what is wrong to `found`."""
        size = zip(cell, self.chunk, self.shape, strict=True)
        region = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in size)
        future, check = self._array[region].read(), self._begin_check(cell)

        def wait() -> None:
            try:
                future.result()
                check()
            except Exception as error:
                found.append(database.explain_reading(error, self.path, self._file_of(cell)))

        return wait

    def differences(self, content: Mapping[str, Any] | None) -> list[Problem]:
        """Where its description on disk is not that of the manifest."""
        if content is None:
            return []
        entry = content["leaves"][self.path]
        got = f"{self.dtype_name} {list(self.shape)} in chunks of {list(self.chunk)}"
        wanted = f"{entry['dtype']} {entry['shape']} in chunks of {entry['chunk']}"
        if got == wanted and (known := entry.get("crc32c")) is not None:
            count = math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))
            got, wanted = f"{len(known)} checksums of chunks", f"{count} checksums of chunks"
        return [] if got == wanted else [Problem(self.path, got, wanted, MEND)]

    def _begin_read(self, part: Piece, target: torch.Tensor, direct: bool) -> Callable[[], None]:
        """Begin to read a part of a chunk; what is returned waits, and checks it."""
        import tensorstore as ts

        source = self._array[part.region()]
        if direct:
            source = source[ts.d[:].translate_to[0]] if source.rank else source
            future = ts.array(as_array(target)).write(source)
        else:
            future = source.read()
        check, folder = self._begin_check(part.cell), self._checkpoint.path

        def wait() -> None:
            with database.naming_file(self.path, lambda: self._file_of(part.cell), folder):
                found = future.result()
                check()
            if not direct:
                target.copy_(as_tensor(np.asarray(found)))

        return wait

    def _begin_check(self, cell: Sequence[int]) -> Callable[[], None]:
        """Begin to check that a chunk is the one that was written there; wait, and raise if not.

        Values agree with the checksum beside them wherever the two went together.
        """
        counts = [-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True)]
        number = 0
        for i, count in zip(cell, counts, strict=True):
            number = number * count + i
        written = self._checkpoint.checksum_written(self.path, number)
        if written is None:
            return lambda: None
        read = self._checkpoint.begin_checksum(database.chunk_key(self.path, cell))

        def check() -> None:
            if (got := read()) != written:
                raise ValueError(
                    f"another chunk at {list(cell)}, whose CRC-32C is {got:08x} and not "
                    f"{written:08x}"
                )

        return check

    def _file_of(self, cell: Sequence[int]) -> str:
        return database.file_of(self._checkpoint.path, database.chunk_key(self.path, cell))


def normalise_index(where: Any, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """An index with one entry per dim, none of them negative."""
    entries = list(where) if isinstance(where, tuple) else [where]
    if len(entries) - entries.count(...) > len(shape):
        raise IndexError(f"got {len(entries)} indices; wanted at most {len(shape)}, one per dim")
    at = entries.index(...) if ... in entries else len(entries)
    after = entries[at + 1 :]
    rest = [slice(None)] * (len(shape) - at - len(after))
    out: list[int | slice] = []
    for dim, (entry, size) in enumerate(zip([*entries[:at], *rest, *after], shape, strict=True)):
        if isinstance(entry, slice) and (entry.step is None or entry.step > 0):
            start, stop, step = entry.indices(size)
            out.append(slice(start, max(start, stop), step))
        elif isinstance(entry, int) and -size <= entry < size:
            out.append(entry % size)
        else:
            wanted = f"an integer from {-size} to {size - 1}, or a slice with a positive step"
            raise IndexError(f"dim {dim}: got {entry!r}; wanted {wanted}")
    return tuple(out)


def _bounding_box(position: Sequence[int | slice]) -> Box:
    """The smallest box around an index that `normalise_index` made."""
    spans = [(p.start, p.stop - p.start) if isinstance(p, slice) else (p, 1) for p in position]
    start, size = tuple(a for a, _ in spans), tuple(n for _, n in spans)
    return Box(start, size, start)


def verify(path: str | Path, *, in_flight: int = database.IN_FLIGHT) -> int:
    """Read all of a checkpoint and compare all checksums; returns the bytes of its values.

    Only bytes that nothing refers to may differ unnoticed, in files too large for the manifest to
    have a checksum of: replaced parts of a process's index. Where the checkpoint does not record
    the checksum of each chunk, chunks may have changed places too, of which a UserWarning warns.

    Raises:
        ValueError: something is missing or damaged; every leaf at fault is listed, with its file.
    """
    stored = Checkpoint(path)
    stored.open()
    found: list[Problem] = []
    window = database.Window(in_flight)
    for leaf in stored.values():
        size = database.nbytes_of(leaf.chunk, leaf.itemsize)
        for cell in grid(leaf.shape, leaf.chunk):
            window.add(size, lambda leaf=leaf, cell=cell: leaf.checking(cell, found))
    window.drain()
    raise_problems(f"the checkpoint {path} is damaged", found)
    return sum(leaf.nbytes for leaf in stored.values())


_REMOVED = f"{UNFINISHED}-removed"


def steps(folder: str | Path) -> list[int]:
    """The steps of the complete checkpoints in `folder`, increasing; those half written are not."""
    root = local_path(folder, "folder")
    entries = root.iterdir() if root.is_dir() else ()
    return sorted(int(p.name) for p in entries if p.name.isdigit() and is_complete(p))


def latest(folder: str | Path) -> Path:
    """The newest complete checkpoint in `folder`; ValueError where it holds none."""
    found = steps(folder)
    if not found:
        got = "no complete checkpoint" if Path(folder).is_dir() else "no such folder"
        wanted, fix = "a folder such as RUN/checkpoints", "train first, or check the path"
        refuse("no checkpoint to read", str(folder), got, wanted, fix)
    return Path(folder) / str(found[-1])


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a folder stay when a new one is complete; the newest always does.

    Attributes:
        last: number of the newest; None keeps all.
        every: also those whose step is a multiple of it; 0 for none.
        best: also this number of those with the best `metric`.
        metric: the entry of their metadata that `best` goes by; those without it do not count.
        largest: whether large numbers are good.

    Raises:
        ValueError: a number is negative, or `last` is 0.
    """

    last: int | None = None
    every: int = 0
    best: int = 0
    metric: str = "loss"
    largest: bool = False

    def __post_init__(self):
        found = [
            Problem(f"Keep.{name}", str(getattr(self, name)), "at least 0")
            for name in ("every", "best")
            if getattr(self, name) < 0
        ]
        if self.last is not None and self.last < 1:
            wanted = "at least 1, or None for all"
            found.append(Problem("Keep.last", str(self.last), wanted))
        raise_problems("no such choice of checkpoints", found)

    def choose(self, metadata: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """The steps that are kept, given the metadata of every step's checkpoint."""
        ordered = sorted(metadata)
        kept = set(ordered if self.last is None else ordered[-self.last :])
        if self.every:
            kept |= {step for step in ordered if step % self.every == 0}
        values = {step: metadata[step].get(self.metric) for step in ordered}
        scores = {
            step: -value if self.largest else value
            for step, value in values.items()
            if isinstance(value, (int, float)) and not math.isnan(value)
        }
        kept |= set(sorted(scores, key=scores.__getitem__)[: self.best])
        return kept


def prune(folder: Path, keep: Keep) -> None:
    """Remove the complete checkpoints of `folder` that `keep` does not keep."""
    found = steps(folder)
    if keep.last is None or len(found) <= keep.last:
        return
    read = {step: read_manifest(folder / str(step))[0] if keep.best else None for step in found}
    kept = keep.choose(
        {step: content["metadata"] if content else {} for step, content in read.items()}
    )
    for step in found:
        if step not in kept:
            # invisible at once, whatever happens to its files
            removed = folder / f"{step}.{_REMOVED}"
            (folder / str(step)).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what saves left in `folder` that did not come to their end; none may be under way."""
    leftovers: Sequence[Path] = list(folder.iterdir()) if folder.is_dir() else ()
    for path in leftovers:
        if UNFINISHED in path.name and path.name.partition(".")[0].isdigit():
            shutil.rmtree(path, ignore_errors=True)


# --- as text


def list_text(folder: str | Path) -> str:
    """A line for each checkpoint of a folder: step, size, leaves, mesh, and when it was made.

    ValueError where there is no folder.
    """
    root = Path(folder)
    if not root.is_dir():
        wanted = "a folder such as RUN/checkpoints"
        refuse("no checkpoints to list", str(folder), "no such folder", wanted, "check the path")
    rows = [("step", "bytes", "leaves", "mesh", "made", "metadata")]
    rows += [_describe_row(root / str(step)) for step in steps(root)]
    unfinished = sorted(path.name for path in root.iterdir() if UNFINISHED in path.name)
    lines = align_columns(rows) if len(rows) > 1 else ["no complete checkpoint"]
    return "\n".join([*lines, *(f"unfinished: {name}" for name in unfinished)])


def show_text(path: str | Path) -> str:
    """A checkpoint as text: where it was made, its metadata, and every leaf.

    ValueError where nothing is there, or it is incomplete or damaged.
    """
    stored = Checkpoint(path)
    stored.open()
    lines = [f"checkpoint {path}"]
    origin = stored.origin
    if origin:
        mesh = origin["mesh"] or "no mesh"
        lines.append(
            f"made {_format_time(origin['time'])} on {mesh}, processes: {origin['processes']}"
        )
        lines.append(f"with torch {origin['torch']}, Python {origin['python']}")
    else:
        lines.append("without a manifest: written by Orbax alone")
    values = sum(leaf.nbytes for leaf in stored.values())
    sizes = f"{bytes_text(values)} of values in {bytes_text(stored.nbytes)} of files"
    lines.append(f"{len(stored)} leaves, {sizes}")
    if stored.metadata:
        lines += ["metadata", indent(json.dumps(stored.metadata, indent=2), "  ")]
    rows = [("leaf", "dtype", "shape", "bytes", "chunks of")]
    rows += [
        (leaf.path, leaf.dtype_name, str(leaf.shape), bytes_text(leaf.nbytes), str(leaf.chunk))
        for leaf in stored.values()
    ]
    return "\n".join([*lines, "leaves", indent("\n".join(align_columns(rows)), "  ")])


def verify_text(path: str | Path) -> str:
    """A line that a checkpoint is undamaged, after reading all of it; ValueError as of `verify`.

    Where some checks were not possible, a second line names them.
    """
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the second line has it
        nbytes = verify(path)
    took = f"{bytes_text(nbytes)} of values in {time.perf_counter() - begun:.1f} s"
    if left := Checkpoint(path).unbound:
        return f"{path}: no damage found; {took}\nnot checked: {left}"
    return f"{path}: all files and checksums are right; {took}"


def _describe_row(path: Path) -> tuple[str, ...]:
    try:
        stored = Checkpoint(path)
    except ValueError as error:
        return (path.name, "", "", "", "", f"damaged: {str(error).splitlines()[-1].strip(' -')}")
    origin = stored.origin
    made = _format_time(origin["time"]) if origin else ""
    mesh, about = str(origin.get("mesh") or "none"), json.dumps(stored.metadata)
    return (
        path.name,
        bytes_text(stored.nbytes),
        str(len(stored)),
        mesh,
        made,
        about if len(about) <= 60 else f"{about[:57]}...",
    )


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
