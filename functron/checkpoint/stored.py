"""Checkpoints opened for reading: their leaves, and any slice of them, read when asked for."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from functron.checkpoint import database, manifest
from functron.checkpoint.database import as_array, as_tensor, from_name
from functron.checkpoint.placement import Box, cells, grid
from functron.core.errors import Problem, nearest, raise_problems, refuse


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
        self.path = _existing(path)
        self._content, found = manifest.read(self.path)
        if self._content is not None:
            found += manifest.check(self.path, self._content)
        raise_problems(f"the checkpoint {path} is damaged", found)
        self._context = database.context()
        self._driver, names = ("zarr3", self._content["leaves"]) if self._content else self._orbax()
        self._names = dict.fromkeys(names)
        self._opened: dict[str, StoredLeaf] = {}

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that was passed to `save`."""
        if self._content is not None:
            return self._content["metadata"]
        try:
            text = (self.path / "_CHECKPOINT_METADATA").read_text()
            return dict(json.loads(text).get("custom_metadata") or {})
        except (OSError, ValueError):
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
        """The leaf at `path`.

        Raises:
            KeyError: there is none.
            ValueError: its description is damaged.
        """
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
        """Read the descriptions of these leaves, or of all, together.

        Raises:
            ValueError: some are damaged; all are listed.
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
                found.append(database.of_reading(error, path, "its description"))
                continue
            found += leaf.differences(self._content)
            self._opened[path] = leaf
        raise_problems(f"the checkpoint {self.path} is damaged", found)

    def file_of(self, path: str, cell: Sequence[int]) -> str:
        """The file that a chunk lies in."""
        return database.file_of(self.path, database.chunk_key(path, cell))

    def checksum_read(self, path: str, cell: Sequence[int]) -> Callable[[], int]:
        """Begin to read the CRC-32C that a chunk ends with; what is returned waits for it."""
        return self._checksums.begin(path, cell)

    def checksum_written(self, path: str, number: int) -> int | None:
        """The CRC-32C of a leaf's chunk `number`, in the order of `grid`.

        None where none is recorded, which the first call warns of.
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
    def _checksums(self) -> database.Checksums:
        return database.Checksums(self.path, self._context)

    def _orbax(self) -> tuple[str, list[str]]:
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            got = f"{type(error).__name__}: {error}"
            problem = Problem(str(path), got, "the metadata of an Orbax PyTree")
            driver, names = "", []
        raise_problems(f"cannot read the checkpoint {self.path}", [problem] if problem else [])
        return driver, names


class StoredLeaf:
    """A leaf of a checkpoint on disk: ``leaf[3, 10:20]`` reads what it needs.

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
        position = _position(where, self.shape)
        folder = self._checkpoint.path
        checks = [self._check(cell) for cell in cells(_bounds(position), self.chunk)]
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
                region, local = _overlap(cell, self.chunk, box)
                target = out.detach()[local]
                reader = self._into if direct else self._via
                window.add(size, reader(target, region, cell))

    def checking(self, cell: Sequence[int], found: list[Problem]) -> Callable[[], None]:
        """Begin to read a chunk; what is returned waits, and adds what is wrong to `found`."""
        size = zip(cell, self.chunk, self.shape, strict=True)
        region = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in size)
        future, check = self._array[region].read(), self._check(cell)

        def wait() -> None:
            try:
                future.result()
                check()
            except Exception as error:
                found.append(database.of_reading(error, self.path, self._file(cell)))

        return wait

    def differences(self, content: Mapping[str, Any] | None) -> list[Problem]:
        """Where its description on disk is not that of the manifest."""
        if content is None:
            return []
        entry = content["leaves"][self.path]
        got = f"{self.dtype_name} {list(self.shape)} in chunks of {list(self.chunk)}"
        wanted = f"{entry['dtype']} {entry['shape']} in chunks of {entry['chunk']}"
        fix = "restore an older checkpoint, or copy this one again"
        return [] if got == wanted else [Problem(self.path, got, wanted, fix)]

    def _into(self, target: torch.Tensor, region: Any, cell: Any) -> Callable[[], Callable]:
        import tensorstore as ts

        def begin() -> Callable[[], Any]:
            source = self._array[region]
            source = source[ts.d[:].translate_to[0]] if source.rank else source
            return self._wait(ts.array(as_array(target)).write(source), cell)

        return begin

    def _via(self, target: torch.Tensor, region: Any, cell: Any) -> Callable[[], Callable]:
        def begin() -> Callable[[], Any]:
            wait = self._wait(self._array[region].read(), cell)
            return lambda: target.copy_(as_tensor(np.asarray(wait())))

        return begin

    def _wait(self, future: Any, cell: Sequence[int]) -> Callable[[], Any]:
        check = self._check(cell)

        def wait() -> Any:
            with database.naming_file(self.path, lambda: self._file(cell), self._checkpoint.path):
                found = future.result()
                check()
                return found

        return wait

    def _check(self, cell: Sequence[int]) -> Callable[[], None]:
        """Begin to see whether a chunk is the one that was written there; wait, and raise if not.

        Values agree with the checksum beside them wherever the two went together.
        """
        counts = [-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True)]
        number = 0
        for i, count in zip(cell, counts, strict=True):
            number = number * count + i
        written = self._checkpoint.checksum_written(self.path, number)
        if written is None:
            return lambda: None
        read = self._checkpoint.checksum_read(self.path, cell)

        def check() -> None:
            if (got := read()) != written:
                raise ValueError(
                    f"another chunk at {list(cell)}, whose CRC-32C is {got:08x} and not "
                    f"{written:08x}"
                )

        return check

    def _file(self, cell: Sequence[int]) -> str:
        return self._checkpoint.file_of(self.path, cell)


def _overlap(cell: Sequence[int], chunk: Sequence[int], box: Box) -> tuple[tuple, tuple]:
    """The part of a chunk that a box has: where in the leaf, and where in the tensor."""
    region, local = [], []
    for i, c, start, size, at in zip(cell, chunk, box.start, box.size, box.local, strict=True):
        first, last = max(i * c, start), min((i + 1) * c, start + size)
        region.append(slice(first, last))
        local.append(slice(first - start + at, last - start + at))
    return tuple(region), tuple(local)


def _position(where: Any, shape: Sequence[int]) -> tuple[int | slice, ...]:
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


def _bounds(position: Sequence[int | slice]) -> Box:
    """The smallest box around an index that `_position` made."""
    spans = [(p.start, p.stop - p.start) if isinstance(p, slice) else (p, 1) for p in position]
    start, size = tuple(a for a, _ in spans), tuple(n for _, n in spans)
    return Box(start, size, start)


def _existing(path: str | Path) -> Path:
    source = Path(path).absolute()
    if not manifest.is_complete(source):
        got = "an incomplete checkpoint" if source.is_dir() else "nothing there"
        wanted, fix = "a complete checkpoint", "see which there are: ls RUN/checkpoints"
        refuse("cannot read the checkpoint", str(path), got, wanted, fix)
    return source


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
