"""One process's part of a save: its pieces, copied and written into a database of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from functron.checkpoint import database, manifest
from functron.checkpoint.database import as_array
from functron.checkpoint.placement import Division, Leaf, Piece, grid
from functron.core.errors import Problem, raise_problems

Source = Callable[[int, Piece], np.ndarray]
"""``source(leaf index, piece)``: the values of a piece on the host, which stay as they are."""


class Snapshot:
    """Copies of a process's pieces in host memory, which later snapshots use again.

    From a GPU the copies are asynchronous, into page-locked memory: the GPU goes on with what comes
    after them, and a reader of the snapshot waits for them first.
    """

    def __init__(self, division: Division):
        self._pieces = division.pieces
        self._leaves = division.placement.leaves
        self._buffer: torch.Tensor | None = None
        self._views: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._copied: Any = None

    @property
    def nbytes(self) -> int:
        """The host memory that it takes."""
        return sum(_aligned(size) for _, _, size in self._sizes())

    def take(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy this process's pieces of its tensors, one per leaf (None where it has none)."""
        device = next((t.device for t in tensors if t is not None and t.is_cuda), None)
        if self._buffer is None:
            self._allocate(pinned=device is not None)
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                for piece in self._pieces[index]:
                    assert tensor is not None
                    view = self._views[index, piece.cell]
                    view.copy_(tensor[piece.slices()], non_blocking=True)
        if device is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def source(self, index: int, piece: Piece) -> np.ndarray:
        """The copy of a piece; a `Source`."""
        if self._copied is not None:
            self._copied.synchronize()
        return as_array(self._views[index, piece.cell])

    def _sizes(self) -> list[tuple[int, Piece, int]]:
        return [
            (index, piece, database.nbytes_of(piece.size, self._leaves[index].dtype.itemsize))
            for index, pieces in enumerate(self._pieces)
            for piece in pieces
        ]

    def _allocate(self, pinned: bool) -> None:
        self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        at = 0
        for index, piece, size in self._sizes():
            flat = self._buffer[at : at + size].view(self._leaves[index].dtype)
            self._views[index, piece.cell] = flat.view(piece.size)
            at += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def live(tensors: Sequence[torch.Tensor | None]) -> Source:
    """The values of the tensors themselves, for a caller that waits until they are written."""

    def source(index: int, piece: Piece) -> np.ndarray:
        tensor = tensors[index]
        assert tensor is not None
        return as_array(tensor.detach()[piece.slices()].cpu())

    return source


def write(
    folder: Path,
    division: Division,
    source: Source,
    *,
    in_flight: int = database.IN_FLIGHT,
    progress: Callable[[], None] | None = None,
) -> dict[str, int]:
    """Write this process's pieces into its database in `folder`; process 0 describes the arrays.

    Args:
        folder: of the checkpoint that is being made.
        division: who writes what.
        source: where the values are.
        in_flight: bytes that are written at the same time.
        progress: called after each piece.

    Returns:
        The CRC-32C that was written with each piece, by `database.chunk_key`.

    Raises:
        OSError: something could not be written; its leaf is named.
    """
    import tensorstore as ts

    placement = division.placement
    mine = folder / f"{database.PROCESS}{placement.here}"
    first = placement.here == 0
    mode: dict[str, Any] = {"create": True} if first else {"assume_metadata": True}
    shared = database.context()
    opening = {
        index: ts.open(database.writing(mine, leaf, chunk), open=True, context=shared, **mode)
        for index, (leaf, chunk) in enumerate(zip(placement.leaves, division.chunks, strict=True))
        if first or division.pieces[index]
    }
    window = database.Window(in_flight, progress)
    try:
        for index, future in opening.items():
            leaf = placement.leaves[index]
            array = _named(leaf, folder, future.result)()
            for piece in division.pieces[index]:
                begin = _begin(array, piece, source(index, piece))
                size = database.nbytes_of(piece.size, leaf.dtype.itemsize)
                window.add(size, lambda b=begin, at=leaf: _named(at, folder, b().result))
        window.drain()
    finally:
        window.abandon()
    if not mine.exists():  # all of this process's values are other ones' to write
        return {}
    written = _checksums(mine, division, shared)
    manifest.sync_all(mine, progress)
    return written


def _checksums(mine: Path, division: Division, shared: Any) -> dict[str, int]:
    """The checksums that this process's pieces ended with: a few bytes of each are read."""
    stored = database.Checksums(mine, shared)
    waiting = {
        database.chunk_key(leaf.path, piece.cell): stored.begin(leaf.path, piece.cell)
        for leaf, pieces in zip(division.placement.leaves, division.pieces, strict=True)
        for piece in pieces
    }
    return {key: wait() for key, wait in waiting.items()}


def _begin(array: Any, piece: Piece, values: np.ndarray) -> Callable[[], Any]:
    return lambda: array[piece.region()].write(values, can_reference_source_data_indefinitely=True)


def _named(leaf: Leaf, folder: Path, wait: Callable[[], Any]) -> Callable[[], Any]:
    """`wait`, whose errors say which leaf it was."""

    def waiting() -> Any:
        try:
            return wait()
        except Exception as error:
            problem = database.of_writing(error, leaf.path, folder)
            raise_problems(f"cannot write the checkpoint {folder}", [problem], OSError)

    return waiting


def check_complete(folder: Path, division: Division) -> None:
    """See that every chunk of every leaf is in exactly one process's database in `folder`.

    Raises:
        OSError: chunks are missing, or were written twice; the leaves are named.
    """
    import tensorstore as ts

    shared = database.context()
    written: dict[str, int] = {}
    for rank in range(division.placement.num_ranks):
        mine = folder / f"{database.PROCESS}{rank}"
        if (mine / "manifest.ocdbt").exists():
            opened = ts.KvStore.open(database.store(mine), context=shared).result()
            for key in opened.list().result():
                written[key.decode()] = written.get(key.decode(), 0) + 1
    found = []
    for leaf, chunk in zip(division.placement.leaves, division.chunks, strict=True):
        name = database.key_of(leaf.path)
        wanted = [f"{name}/zarr.json"]
        wanted += [database.chunk_key(leaf.path, cell) for cell in grid(leaf.shape, chunk)]
        counts = [written.pop(key, 0) for key in wanted]
        if missing := counts.count(0):
            fix = f"see that all processes reach the same {folder.parent}"
            got = f"{missing} of {len(wanted)} chunks missing"
            found.append(Problem(leaf.path, got, "all of them", fix))
        if max(counts) > 1:
            found.append(Problem(leaf.path, "a chunk written twice", "each by one process"))
    found += [Problem(key, "a chunk that no leaf has", "none") for key in written]
    raise_problems(f"the checkpoint {folder} is not complete", found, OSError)
