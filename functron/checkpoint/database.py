"""The arrays on disk: zarr3 arrays in OCDBT databases, opened with tensorstore.

This is the layout that Orbax reads and writes: every process has a database of its own in
``ocdbt.process_<rank>``, and the checkpoint's database refers to them. Chunks are raw
little-endian values followed by their CRC-32C, which is compared whenever they are read. That alone
says nothing of which chunk it is: the manifest holds the checksum of every chunk as well.

The index of a checkpoint's database: which file each chunk lies in, for error messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from functron.checkpoint.chunks import name_of
from functron.checkpoint.placement import Leaf

PROCESS = "ocdbt.process_"
IN_FLIGHT = 64 << 20
"""Bytes that are read or written at the same time."""

_CHECKSUM = 4  # bytes, at the end of a chunk


def key_of(path: str) -> str:
    """The name of a leaf in the database."""
    return path.replace("/", ".")


def chunk_key(path: str, cell: Sequence[int]) -> str:
    """The name of a leaf's chunk in the database."""
    return "/".join([key_of(path), "c", *map(str, cell)])


def context() -> Any:
    """What the arrays of one checkpoint share: threads, and a cache of the database's index.

    Files are not synced one by one: that is done once, at the end.
    """
    import tensorstore as ts

    _keep_buffers()
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 8},  # each thread keeps memory that it used
            "file_io_sync": False,
            "cache_pool#ocdbt": {"total_bytes_limit": 64 << 20},
        }
    )


def _keep_buffers() -> None:
    """Have the allocator keep the buffers of chunks that are freed, for the next chunks.

    glibc gives large blocks back to the system, which clears them before they are used again: a
    fifth of the time of a save. It stops to do so up to the size of a block that it saw freed, of
    32 MiB at most; this one is never touched, so it costs nothing.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def store(folder: Path, key: str = "", *, write: bool = False) -> dict[str, Any]:
    """The spec of a database, or of what it holds under `key`."""
    base: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    spec: dict[str, Any] = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
    if write:
        # one process writes each file, under a name that is new
        base["file_io_locking"] = {"mode": "non_atomic"}
        spec |= {
            "manifest": {"driver": "file", "path": f"{folder}/"},
            # arrays' descriptions must lie in the index, which has checksums
            "config": {
                "max_inline_value_bytes": 4096,
                "max_decoded_node_bytes": 100_000_000,
                "manifest_kind": "single",
            },
            "assume_config": True,
            "target_data_file_size": 2**31,
        }
    return spec | {"path": f"{key}/"} if key else spec


def writing(folder: Path, leaf: Leaf, chunk: Sequence[int]) -> dict[str, Any]:
    """The spec of a new array for a leaf."""
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    return {
        "driver": "zarr3",
        "kvstore": store(folder, key_of(leaf.path), write=True),
        "dtype": name_of(leaf.dtype),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        # absent chunks mean that something is lost, never that they are zero
        "store_data_equal_to_fill_value": True,
        "metadata": {"shape": list(leaf.shape), "chunk_grid": grid, "codecs": codecs},
    }


def reading(folder: Path, path: str, driver: str = "zarr3") -> dict[str, Any]:
    """The spec of a leaf's array."""
    return {
        "driver": driver,
        "kvstore": store(folder, key_of(path)),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": False,
    }


class Checksums:
    """The CRC-32C at the end of each chunk of a database, read without the values before it.

    Args:
        folder: of the database.
        shared: its `context`.
    """

    def __init__(self, folder: Path, shared: Any):
        import tensorstore as ts

        self._opened = ts.KvStore.open(store(folder), context=shared).result()

    def begin(self, path: str, cell: Sequence[int]) -> Callable[[], int]:
        """Begin to read that of a chunk; what is returned waits for it."""
        future = self._opened.read(chunk_key(path, cell), byte_range=slice(-_CHECKSUM, None))
        return lambda: int.from_bytes(future.result().value, "little")


class Window:
    """Reads or writes that are under way, of at most so many bytes together.

    Args:
        limit: bytes in flight; a single larger one goes alone.
        done: called after each, to show that there is progress.
    """

    def __init__(self, limit: int = IN_FLIGHT, done: Callable[[], None] | None = None):
        self._limit, self._done = limit, done
        self._held = 0
        self._queue: deque[tuple[Callable[[], Any], int]] = deque()

    def add(self, nbytes: int, begin: Callable[[], Callable[[], Any]]) -> None:
        """Begin something of `nbytes` as soon as there is room; `begin()` returns what awaits it.

        Raises whatever one that ended before raised.
        """
        while self._queue and self._held + nbytes > self._limit:
            self._finish()
        self._held += nbytes
        self._queue.append((begin(), nbytes))

    def drain(self) -> None:
        """Wait for all."""
        while self._queue:
            self._finish()

    def abandon(self) -> None:
        """Wait for all, whatever becomes of them: afterwards nothing touches their memory."""
        while self._queue:
            try:
                self._finish()
            except Exception:  # the first failure is reported, these follow from it
                continue

    def _finish(self) -> None:
        wait, nbytes = self._queue.popleft()
        self._held -= nbytes
        wait()
        if self._done is not None:
            self._done()


def nbytes_of(shape: Sequence[int], itemsize: int) -> int:
    """The bytes of an array."""
    return math.prod(shape) * itemsize


def file_of(folder: Path, key: str) -> str:
    """The path of the file that holds a key; that of the folder where the index does not say."""
    try:
        found = next((location for name, location in _entries(folder) if name == key), None)
    except Exception:  # the index is damaged too
        found = None
    if found is None:
        return str(folder)
    # "value:<folder>:<file in it>:<offset>:<length>", percent-encoded
    parts = found.split(":")
    return str(folder / unquote("".join(parts[1:-2])))


def _entries(folder: Path) -> Iterator[tuple[str, str]]:
    """The keys of all values that do not lie in the index itself, and where they do."""
    import tensorstore as ts

    shared = context()
    spec = {"driver": "file", "path": f"{folder}/"}
    base = ts.KvStore.open(spec, context=shared).result()
    whole = ts.ocdbt.dump(base, context=shared).result()
    waiting = [(version["root"]["location"], b"") for version in whole["versions"][-1:]]
    while waiting:
        location, prefix = waiting.pop()
        node: Any = ts.ocdbt.dump(base, location, context=shared).result()
        for entry in node["entries"]:
            if node.get("height", 0):
                common = entry.get("subtree_common_prefix", b"")
                waiting.append((entry["location"], prefix + common))
            elif "indirect_value" in entry:
                yield (prefix + entry["key"]).decode(), str(entry["indirect_value"])
