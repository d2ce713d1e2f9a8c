"""The arrays on disk: zarr3 arrays in OCDBT databases, opened with tensorstore; dtypes and faults.

This is the layout that Orbax reads and writes: every process has a database of its own in
``ocdbt.process_<rank>``, and the checkpoint's database refers to them. Chunks are raw
little-endian values followed by their CRC-32C, which is compared whenever they are read. That alone
does not tell one chunk from another: the manifest holds the checksum of every chunk as well.
"""

from __future__ import annotations

import errno
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from functron.checkpoint.placement import Leaf
from functron.core import compat
from functron.core.errors import Problem, raise_problems

PROCESS = "ocdbt.process_"
IN_FLIGHT = 64 << 20
"""Bytes that are read or written at the same time."""

_CHECKSUM = 4  # bytes, at the end of a chunk


# --- dtypes and arrays

# dtypes that NumPy lacks, which ml_dtypes has by the same name, and the integers of their size
_FOREIGN = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}
_NATIVE = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NATIVE, *_FOREIGN)}


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a checkpoint: torch's, which is NumPy's too."""
    return str(dtype).removeprefix("torch.")


def from_name(name: str) -> torch.dtype | None:
    """The dtype of that name; None where torch, or this module, knows none."""
    return _BY_NAME.get(name)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a NumPy array over the same memory, strides included."""
    tensor = tensor.detach()
    if tensor.dtype in _FOREIGN:
        import ml_dtypes

        kind = getattr(ml_dtypes, name_of(tensor.dtype))
        return tensor.view(_FOREIGN[tensor.dtype]).numpy().view(kind)
    return tensor.numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of its own memory with the values of an array; ValueError of unknown dtypes."""
    array = np.array(array)  # owned and writable
    dtype = from_name(array.dtype.name)
    if dtype is None:
        raise ValueError(f"got an array of {array.dtype.name}; wanted a dtype that torch has")
    if dtype in _FOREIGN:
        bits = np.int16 if array.dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


# --- databases


def key_of(path: str) -> str:
    """The name of a leaf in the database."""
    return path.replace("/", ".")


def chunk_key(path: str, cell: Sequence[int]) -> str:
    """The name of a leaf's chunk in the database."""
    return "/".join([key_of(path), "c", *map(str, cell)])


def context() -> Any:
    """The context that a checkpoint's arrays share: threads, and a cache of the database's index.

    Files are not synced one by one: that is done once, at the end.
    """
    import tensorstore as ts

    compat.keep_freed_memory()  # buffers of chunks, for the next chunks: a fifth of a save
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 8},
            "file_io_sync": False,
            "cache_pool#ocdbt": {"total_bytes_limit": 64 << 20},
        }
    )


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


def open_checksums(folder: Path, shared: Any) -> Callable[[str], Callable[[], int]]:
    """The CRC-32C at the end of each chunk of a database, read without the values before it.

    Args:
        folder: of the database.
        shared: its `context`.

    Returns:
        ``begin(key)``, which begins to read that of a `chunk_key`, and returns what waits for it.
    """
    import tensorstore as ts

    opened = ts.KvStore.open(store(folder), context=shared).result()

    def begin(key: str) -> Callable[[], int]:
        future = opened.read(key, byte_range=slice(-_CHECKSUM, None))
        return lambda: int.from_bytes(future.result().value, "little")

    return begin


class Window:
    """Reads or writes that are under way, of at most so many bytes together.

    Args:
        limit: bytes in flight; a single larger one goes alone.
        done: called after each, to show that there is progress.
    """

    def __init__(self, limit: int = IN_FLIGHT, done: Callable[[], None] | None = None):
        self._limit, self._done = limit, done
        self._in_flight = 0
        self._queue: deque[tuple[Callable[[], Any], int]] = deque()

    def add(self, nbytes: int, begin: Callable[[], Callable[[], Any]]) -> None:
        """Begin something of `nbytes` when there is room for it; `begin()` returns a function to
        wait.

        Raises the error of one that ended before.
        """
        while self._queue and self._in_flight + nbytes > self._limit:
            self._finish()
        self._in_flight += nbytes
        self._queue.append((begin(), nbytes))

    def drain(self) -> None:
        """Wait for all."""
        while self._queue:
            self._finish()

    def abandon(self) -> None:
        """Wait for all and ignore their errors: afterwards nothing touches their memory."""
        while self._queue:
            try:
                self._finish()
            except Exception:  # the first failure is reported, these follow from it
                continue

    def _finish(self) -> None:
        wait, nbytes = self._queue.popleft()
        self._in_flight -= nbytes
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


# --- faults

MEND = "restore an older checkpoint, or copy this one again"

_FULL = ("no space left", "file too large", "quota exceeded", "resource_exhausted")
_DENIED = ("permission denied", "permission_denied", "read-only file system")
_FULL_CODES = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def explain_writing(error: Exception, what: str, folder: Path) -> Problem:
    """The problem behind an error of writing `what`, a leaf or a file, into `folder`."""
    text = one_line(error)
    low = text.lower()
    code = error.errno if isinstance(error, OSError) else None
    if code in _FULL_CODES or any(word in low for word in _FULL):
        fix = "free space on that disk, or save fewer checkpoints"
        return Problem(what, text, f"room for it in {folder}", fix)
    if isinstance(error, PermissionError) or any(word in low for word in _DENIED):
        return Problem(what, text, f"permission to write in {folder}", "save somewhere else")
    return Problem(what, text, f"to be written in {folder}", "see that the disk works")


@contextmanager
def naming_file(what: str, file: Callable[[], str], checkpoint: Path) -> Iterator[None]:
    """Turn an error of reading the leaf `what` in a with block into one that names the file."""
    try:
        yield
    except Exception as error:
        raise_problems(
            f"the checkpoint {checkpoint} is damaged", [explain_reading(error, what, file())]
        )


def explain_reading(error: Exception, what: str, file: str) -> Problem:
    """The problem behind an error of reading the leaf `what`, which lies in `file`."""
    return Problem(what, f"{one_line(error)}, in {file}", "the values that were saved", MEND)


def one_line(error: BaseException) -> str:
    """An error's message without the line breaks and addresses inside the libraries."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(" [source locations=")[0].split(" [tensorstore_spec=")[0]
