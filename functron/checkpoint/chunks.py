"""Chunks: how leaves are cut on disk, and which process writes which of the cuts.

Chunks are aligned with what every process holds, so that each lies wholly inside or outside of a
process's boxes and is written by one process alone. What several processes hold is divided among
them, so that replicas share the work. All of it is a pure function of the placement, which every
process computes for itself.

Dtypes by the names that checkpoints store, and tensors as NumPy arrays over the same memory.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
import torch

from functron.checkpoint.placement import Box, Leaf, Placement
from functron.core.errors import Problem, raise_problems

CHUNK_BYTES = 8 << 20
_SMALL = 1 << 20  # chunks are not made smaller than this only to give every replica some

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A chunk that a process writes.

    Attributes:
        cell: its position on the leaf's grid of chunks.
        start: its first index in the global leaf, per dim.
        size: its extent, cut at the leaf's end.
        local: its first index in the process's tensor.
    """

    cell: Cell
    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the process's tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.local, self.size, strict=True))

    def region(self) -> tuple[slice, ...]:
        """Where it lies in the global leaf."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


@dataclass(frozen=True)
class Division:
    """Who writes which chunks of a placement's leaves.

    Attributes:
        placement: of the leaves.
        chunk_bytes: how large chunks may be.
    """

    placement: Placement
    chunk_bytes: int = CHUNK_BYTES

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each leaf's chunks."""
        return tuple(
            chunk_shape(leaf, list(groups), max(map(len, groups.values()), default=1), limit)
            for leaf, groups, limit in self._grouped
        )

    @cached_property
    def _grouped(self) -> list[tuple[Leaf, dict[tuple[Box, ...], list[int]], int]]:
        """The processes with the same boxes of each leaf, together."""
        out = []
        for leaf in self.placement.leaves:
            groups: dict[tuple[Box, ...], list[int]] = {}
            for rank in range(self.placement.num_ranks):
                groups.setdefault(self.placement.boxes(leaf, rank), []).append(rank)
            groups.pop((), None)
            out.append((leaf, groups, self.chunk_bytes))
        return out

    @cached_property
    def writers(self) -> tuple[dict[Cell, int], ...]:
        """The process that writes each chunk of each leaf: of its holders, the least busy so far.

        Raises:
            ValueError: no process holds some part of a leaf.
        """
        load = [0] * self.placement.num_ranks
        found: list[Problem] = []
        out = []
        for (leaf, groups, _), chunk in zip(self._grouped, self.chunks, strict=True):
            holders: dict[Cell, list[int]] = {}
            for boxes, ranks in groups.items():
                for cell in itertools.chain.from_iterable(cells(box, chunk) for box in boxes):
                    holders[cell] = [*holders.get(cell, ()), *ranks]
            nbytes = math.prod(chunk) * leaf.dtype.itemsize
            writer: dict[Cell, int] = {}
            for cell in sorted(holders):
                writer[cell] = min(holders[cell], key=lambda rank: (load[rank], rank))
                load[writer[cell]] += nbytes
            missing = [cell for cell in grid(leaf.shape, chunk) if cell not in writer]
            if missing:
                got = f"no process that holds the chunk at {missing[0]} of {chunk}"
                found.append(Problem(leaf.path, got, "every part on some process"))
            out.append(writer)
        raise_problems("cannot divide the state among the processes", found)
        return tuple(out)

    @cached_property
    def pieces(self) -> tuple[list[Piece], ...]:
        """What this process writes of each leaf."""
        rank = self.placement.here
        out = []
        for leaf, chunk, writer in zip(
            self.placement.leaves, self.chunks, self.writers, strict=True
        ):
            mine = []
            for box in self.placement.boxes(leaf, rank):
                for cell in cells(box, chunk):
                    if writer[cell] == rank:
                        mine.append(_piece(cell, chunk, leaf.shape, box))
            out.append(mine)
        return tuple(out)

    @cached_property
    def digest(self) -> str:
        """A short text that differs where processes disagree on what they write."""
        rows = [
            (leaf.path, leaf.shape, str(leaf.dtype), str(leaf.spec), chunk)
            for leaf, chunk in zip(self.placement.leaves, self.chunks, strict=True)
        ]
        return f"{zlib.crc32(repr((rows, str(self.placement.mesh))).encode()):08x}"


def chunk_shape(
    leaf: Leaf, boxes: Sequence[tuple[Box, ...]], copies: int = 1, limit: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """The largest shape up to about `limit` bytes whose grid has a line at every edge of a box.

    Args:
        leaf: what is cut.
        boxes: what processes hold of it, each kind once.
        copies: the most processes that hold the same; large boxes get a chunk for each.
        limit: bytes of a chunk at most, unless the lines of a box force nothing and one row of
            the leaf is larger; a dim is then cut as far as need be.
    """
    shape = [max(1, size) for size in leaf.shape]
    free = [True] * len(shape)
    held = [box for several in boxes for box in several]
    for dim, size in enumerate(leaf.shape):
        edges = {edge for box in held for edge in (box.start[dim], box.start[dim] + box.size[dim])}
        edges -= {0, size}
        if edges:
            shape[dim], free[dim] = math.gcd(*edges), False
    if copies > 1 and held:
        largest = max(math.prod(box.size) for box in held) * leaf.dtype.itemsize
        limit = min(limit, max(_SMALL, largest // copies))
    return _cut(shape, free, max(1, limit // leaf.dtype.itemsize))


def _cut(shape: list[int], free: list[bool], limit: int) -> tuple[int, ...]:
    """A shape of at most `limit` elements: slow dims cut first, those not free into equal parts."""
    for patience in (8, math.inf):  # first without many more parts than needed
        for dim, size in enumerate(shape):
            parts = -(-math.prod(shape) // limit)
            if parts <= 1:
                return tuple(shape)
            if free[dim] or size <= parts:
                shape[dim] = -(-size // parts)
                continue
            several = range(parts, int(min(size, parts * patience)) + 1)
            divisor = next((k for k in several if size % k == 0), None)
            shape[dim] = size if divisor is None else size // divisor
    return tuple(shape)


def grid(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Cell]:
    """Every chunk's position."""
    return itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True)))


def cells(box: Box, chunk: Sequence[int]) -> Iterator[Cell]:
    """The positions of the chunks that a box touches."""
    return itertools.product(
        *(
            range(start // c, -(-(start + size) // c) if size else start // c)
            for start, size, c in zip(box.start, box.size, chunk, strict=True)
        )
    )


def _piece(cell: Cell, chunk: Sequence[int], shape: Sequence[int], box: Box) -> Piece:
    """The part of a chunk that a box holds: all of it, by the choice of chunks."""
    start = tuple(i * c for i, c in zip(cell, chunk, strict=True))
    size = tuple(min(c, n - a) for a, c, n in zip(start, chunk, shape, strict=True))
    local = tuple(a - b + at for a, b, at in zip(start, box.start, box.local, strict=True))
    return Piece(cell, start, size, local)


# dtypes that NumPy lacks: the integers of their size, and ml_dtypes' type for them
_FOREIGN = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}
_NATIVE = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NATIVE, *_FOREIGN)}


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a checkpoint: torch's, which is NumPy's too."""
    return str(dtype).removeprefix("torch.")


def storable(dtype: torch.dtype) -> bool:
    """Whether checkpoints can hold tensors of this dtype."""
    return name_of(dtype) in _BY_NAME


def from_name(name: str) -> torch.dtype | None:
    """The dtype of that name; None where torch, or this module, knows none."""
    return _BY_NAME.get(name)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a NumPy array over the same memory, strides included."""
    tensor = tensor.detach()
    if tensor.dtype in _FOREIGN:
        bits, kind = _FOREIGN[tensor.dtype]
        return tensor.view(bits).numpy().view(kind)
    return tensor.numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of its own memory with the values of a NumPy array.

    Raises:
        ValueError: torch has no such dtype.
    """
    array = np.array(array)  # owned and writable
    dtype = from_name(array.dtype.name)
    if dtype is None:
        raise ValueError(f"got an array of {array.dtype.name}; wanted a dtype that torch has")
    if dtype in _FOREIGN:
        bits = np.int16 if array.dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)
