"""Placements: the boxes of every leaf that each process holds; and their division into chunks.

Pure arithmetic over specs, meshes, pipeline partitions and padding: nothing is communicated, and
every process can compute the placement of every other one. A checkpoint holds the canonical form
of a state, every leaf whole and unpadded; a placement is the correspondence between that form and
the tensors of one particular run.

On disk leaves are cut into chunks that are aligned with every process's boxes, so that each chunk
lies wholly inside or outside of a box and is written by one process alone. What several processes
hold is divided among them, so that replicas share the work.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem, nearest, raise_problems, tensor_problem
from functron.pipeline.partition import Partition
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.params import ParamDef, pieces_of
from functron.spmd.spec import (
    P,
    dim_axes,
    dim_sizes,
    is_spec,
    part_span,
    problems,
)

CHUNK_BYTES = 8 << 20
_SMALL_CHUNK = 1 << 20  # chunks are not made smaller than this only to give every replica some


class JoinedPart(NamedTuple):
    """Where a leaf lies that processes hold joined with others (`ParamDef.pieces`).

    Attributes:
        path, shape, spec: of the joined leaf.
        start, size: the entries of its last dim but one; several are in the leaf's own dim before.
    """

    path: str
    shape: tuple[int, ...]
    spec: P
    start: int
    size: int


@dataclass(frozen=True)
class Leaf:
    """One leaf of a state in its canonical form.

    Attributes:
        path: such as ``params/blocks/up``.
        shape: global and unpadded.
        dtype: of its elements.
        spec: which mesh axes split it between steps.
        part: where processes hold it; None: as a tensor of its own.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    part: JoinedPart | None = None

    @property
    def held(self) -> Leaf:
        """The leaf of a process's tensor: itself, or the joined one that it is part of."""
        if self.part is None:
            return self
        return Leaf(self.part.path, self.part.shape, self.dtype, self.part.spec)

    @property
    def group(self) -> int:
        """How many neighbours of its last dim but one a process holds as entries of a dim."""
        return 1 if self.part is None else self.part.size

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the tensor of `held` that it is; neighbours of a `group` in a dim more."""
        if self.part is None:
            return tensor
        if self.part.size == 1:
            return tensor.select(-2, self.part.start)
        return tensor.narrow(-2, self.part.start, self.part.size)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


class Box(NamedTuple):
    """A part of a global leaf, and where it lies in the tensor of a process that holds it.

    Attributes:
        start, size: its first index in the global leaf and its extent, per dim.
        local: its first index in the process's tensor, per dim.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]


class _Run(NamedTuple):
    """`Box` along one dim."""

    start: int
    size: int
    local: int


@dataclass(frozen=True)
class Placement:
    """Which boxes of every leaf each process holds; made by `Placement.of`.

    Attributes:
        leaves: those of the canonical state, in tree order.
        mesh: names and sizes of the axes.
        rank: this process's; None where one process holds what all ranks of the mesh have.
        partition: which ranks of a pipeline hold which entries and rows.
        axis: the mesh axis of the pipeline's ranks.
    """

    leaves: tuple[Leaf, ...]
    mesh: Mesh
    rank: int | None = None
    partition: Partition | None = None
    axis: str = "pp"

    @classmethod
    def of(
        cls,
        like: tree.Tree,
        specs: tree.Tree = None,
        mesh: Mesh | BoundMesh | None = None,
        partition: Partition | None = None,
        *,
        axis: str = "pp",
        joined: Mapping[str, ParamDef] = MappingProxyType({}),
    ) -> Placement:
        """The placement of a state on a mesh.

        On a bound mesh every rank is a process that holds its shards. On a simulated one, and
        without any, this process holds everything.

        Dims that do not divide are padded as those of `functron.Uneven` and ZeRO's shards are: each
        axis in turn cuts the parts of those before it into parts of ``ceil(size / ranks)``, the
        last ones short or empty, and padded to that length. Where one process holds everything,
        `Uneven` dims have no padding.

        Args:
            like: the canonical state: tensors (meta ones, best) in their global, unpadded shapes.
                In a pipeline it is the whole model's.
            specs: how its leaves are split between steps; a prefix tree of `P`. None: not at all.
            mesh: where it lives.
            partition: which ranks of a pipeline hold what; the top-level entries it names are found
                anywhere in a leaf's path, so that it holds for an optimizer's state too.
            axis: the mesh axis of the pipeline's ranks.
            joined: the parameters with `pieces`, by path: these are leaves of the canonical state,
                here and wherever a path of the state ends with, or goes on from, the parameter's.

        Raises:
            ValueError: a leaf is not a tensor, has no parts for its pieces, or the specs do not
                fit; all offenders are listed.
        """
        abstract = mesh.mesh if isinstance(mesh, BoundMesh) else mesh or Mesh()
        flat = tree.broadcast_prefix(specs, like, is_leaf=is_spec, what="specs", wanted="a P")
        found: list[Problem] = []
        leaves = []
        for path, leaf, spec in zip(tree.paths(like), tree.leaves(like), flat, strict=True):
            if not isinstance(leaf, torch.Tensor):
                found.append(tensor_problem(path, leaf))
                continue
            spec = P() if spec is None else spec
            found += problems(path, None, spec, abstract)
            if len(spec) > leaf.dim():
                got = f"{spec} for shape {tuple(leaf.shape)}"
                found.append(Problem(path, got, f"at most {leaf.dim()} entries"))
            leaves += _separate(Leaf(path, tuple(leaf.shape), leaf.dtype, spec), joined, found)
        raise_problems("cannot place the state on the mesh", found)
        rank = mesh.rank if isinstance(mesh, BoundMesh) else None
        return cls(tuple(leaves), abstract, rank, partition, axis)

    @property
    def num_ranks(self) -> int:
        """The number of processes that hold the state."""
        return 1 if self.rank is None else self.mesh.size

    @property
    def here(self) -> int:
        """This process's number among them."""
        return self.rank or 0

    def boxes(self, leaf: Leaf, rank: int) -> tuple[Box, ...]:
        """The boxes of process `rank` in a leaf, padding left out; nothing where all is padding."""
        found = self._runs(leaf, rank)
        if found is None:
            return ()
        every = itertools.product(*(runs for runs, _ in found))
        boxes = [Box(*zip(*runs, strict=True)) if runs else Box((), (), ()) for runs in every]
        return tuple(box for box in boxes if 0 not in box.size)

    def local_shape(self, leaf: Leaf, rank: int) -> tuple[int, ...] | None:
        """The shape, padding included, of the tensor of process `rank`; None: it has none."""
        found = self._runs(leaf, rank)
        return None if found is None else tuple(length for _, length in found)

    def _runs(self, leaf: Leaf, rank: int) -> list[tuple[list[_Run], int]] | None:
        """Per dim the runs that a process holds and the length of its tensor."""
        if leaf.part is not None:
            found = self._runs(leaf.held, rank)
            return None if found is None else _group_runs(found, leaf.group)
        axes = dim_axes(leaf.spec, len(leaf.shape))
        if self.rank is None:
            real = dim_sizes(leaf.spec, len(leaf.shape))
            return [
                _all_runs(n, names, self.mesh) if size is None else ([_Run(0, n, 0)], n)
                for n, names, size in zip(leaf.shape, axes, real, strict=True)
            ]
        coordinate = self.mesh.coordinate(rank)
        rows = self._rows(leaf, coordinate.get(self.axis, 0))
        if rows is None:
            return None
        out = []
        for dim, (size, names) in enumerate(zip(leaf.shape, axes, strict=True)):
            mine = rows if dim == 0 and rows else range(size)
            begin, end, length = _span(len(mine), names, self.mesh, coordinate)
            out.append((_consecutive(mine[begin:end]), length))
        return out

    def _rows(self, leaf: Leaf, stage_rank: int) -> Sequence[int] | None:
        """The rows that a pipeline's rank holds of a leaf; empty: all; None: it holds none."""
        if self.partition is None or self.mesh[self.axis] == 1:
            return ()
        entry = self.partition.name_in(leaf.path)
        if entry is None:
            return ()  # counters, keys: the same on every rank
        if entry not in self.partition.held(stage_rank):
            return None
        stacked = self.partition.stack(entry) is not None
        return self.partition.rows(entry, stage_rank) if stacked else ()

    def separate(self, value: tree.Tree) -> dict[str, torch.Tensor]:
        """The leaves of the canonical state in what this process holds, by path: `Leaf.view`s."""
        given = dict(tree.items(value))
        rows = ((leaf, given.get(leaf.held.path)) for leaf in self.leaves)
        return {leaf.path: leaf.view(tensor) for leaf, tensor in rows if tensor is not None}

    def check(self, value: tree.Tree, *, what: str, some: bool = False) -> dict[str, torch.Tensor]:
        """The leaves of what this process holds, by path, checked against the placement.

        Args:
            value: a part of the canonical tree, with this process's tensors.
            what: the title of the error.
            some: whether leaves may be left out.

        Raises:
            ValueError: leaves are missing, unknown, no tensors, or have another shape or dtype.
        """
        given = dict(tree.items(value))
        known = {leaf.path: leaf for leaf in (each.held for each in self.leaves)}
        found = [
            Problem(path, "a leaf", "a leaf of the placement", nearest(path, known))
            for path in given
            if path not in known
        ]
        for leaf in known.values():
            shape = self.local_shape(leaf, self.here)
            if leaf.path not in given:
                if shape is not None and not some:
                    found.append(Problem(leaf.path, "nothing", f"{leaf.dtype} {shape}"))
                continue
            tensor = given[leaf.path]
            if not isinstance(tensor, torch.Tensor):
                found.append(tensor_problem(leaf.path, tensor))
            elif shape is None:
                found.append(Problem(leaf.path, "a leaf", "none on this rank of the pipeline"))
            elif (tuple(tensor.shape), tensor.dtype) != (shape, leaf.dtype):
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                wanted = f"{leaf.dtype} {shape}, this process's part of {leaf.shape}"
                found.append(Problem(leaf.path, got, wanted))
        raise_problems(what, found)
        return given


def _separate(leaf: Leaf, joined: Mapping[str, ParamDef], found: list[Problem]) -> list[Leaf]:
    """A leaf of the state that processes hold, as leaves of the canonical one."""
    for path, d in joined.items():
        before, own, after = f"/{leaf.path}/".partition(f"/{path}/")
        if not own:
            continue
        axes = [*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec))]
        if leaf.shape[:-1] != d.shape[:-1] or axes[-2]:
            got, fix = f"{leaf.shape} split by {leaf.spec}", "set gpt.fused_projections to false"
            wanted = f"whole pieces, as of the parameter's {d.shape}"
            found.append(Problem(leaf.path, got, wanted, fix))
            return []
        return [
            Leaf(
                f"{before}/{one.path}/{after}".strip("/"),
                (*one.shape[:-1], leaf.shape[-1]),
                leaf.dtype,
                P(*axes[:-2], axes[-1]),
                JoinedPart(leaf.path, leaf.shape, leaf.spec, one.start, one.size),
            )
            for one in pieces_of(path, d)
        ]
    return [leaf]


def _group_runs(found: list[tuple[list[_Run], int]], size: int) -> list[tuple[list[_Run], int]]:
    """The runs of a joined leaf as those of a part with so many entries of the last dim but one."""
    *before, _, last = found
    if size > 1:
        runs, length = before[-1]
        before[-1] = [_Run(*(size * n for n in run)) for run in runs], size * length
    return [*before, last]


def _span(
    size: int, axes: Sequence[str], mesh: Mesh, coordinate: Mapping[str, int]
) -> tuple[int, int, int]:
    """Where the shard at `coordinate` begins and ends in a dim, and its length with padding."""
    counts = [mesh[name] for name in axes]
    return part_span(size, counts, [coordinate.get(name, 0) for name in axes])


def _all_runs(size: int, axes: Sequence[str], mesh: Mesh) -> tuple[list[_Run], int]:
    """The runs of all shards of a dim, one after the other with their padding."""
    runs: list[_Run] = []
    total = 0
    for indices in itertools.product(*(range(mesh[name]) for name in axes)):
        coordinate = dict(zip(axes, indices, strict=True))
        begin, end, length = _span(size, axes, mesh, coordinate)
        last = runs[-1] if runs else _Run(0, 0, 0)
        if (begin, total) == (last.start + last.size, last.local + last.size):
            runs[-1:] = [_Run(last.start, last.size + end - begin, last.local)]
        elif end > begin:
            runs.append(_Run(begin, end - begin, total))
        total += length
    return runs, total


def _consecutive(indices: Sequence[int]) -> list[_Run]:
    """Increasing stretches of indices as runs: [4, 5, 9] is 4 and 5 at 0, and 9 at 2."""
    if isinstance(indices, range):
        return [_Run(indices.start, len(indices), 0)]
    runs: list[_Run] = []
    for local, index in enumerate(indices):
        if runs and index == runs[-1].start + runs[-1].size:
            runs[-1] = _Run(runs[-1].start, runs[-1].size + 1, runs[-1].local)
        else:
            runs.append(_Run(index, 1, local))
    return runs


# --- chunks

GridCell = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The part of a chunk that a process writes or reads: of one that it writes, all of it.

    Attributes:
        cell: the chunk's position on the leaf's grid of chunks.
        start, size: its first index in the global leaf, and its extent.
        local: its first index in the process's tensor.
    """

    cell: GridCell
    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    @classmethod
    def of(cls, cell: GridCell, chunk: Sequence[int], box: Box) -> Piece:
        """The part of a chunk that a box holds."""
        start, size, local = [], [], []
        for i, c, begin, extent, at in zip(cell, chunk, *box, strict=True):
            first = max(i * c, begin)
            start.append(first)
            size.append(min((i + 1) * c, begin + extent) - first)
            local.append(first - begin + at)
        return cls(cell, tuple(start), tuple(size), tuple(local))

    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the process's tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.local, self.size, strict=True))

    def region(self) -> tuple[slice, ...]:
        """Where it lies in the global leaf."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


@dataclass(frozen=True)
class Division:
    """Who writes which chunks, of at most `chunk_bytes`, of a placement's leaves."""

    placement: Placement
    chunk_bytes: int = CHUNK_BYTES

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each leaf's chunks."""
        return tuple(
            chunk_shape(
                leaf, list(groups), max(map(len, groups.values()), default=1), self.chunk_bytes
            )
            for leaf, groups in self._holders
        )

    @cached_property
    def _holders(self) -> list[tuple[Leaf, dict[tuple[Box, ...], list[int]]]]:
        """The processes with the same boxes of each leaf, together."""
        out = []
        for leaf in self.placement.leaves:
            groups: dict[tuple[Box, ...], list[int]] = {}
            for rank in range(self.placement.num_ranks):
                groups.setdefault(self.placement.boxes(leaf, rank), []).append(rank)
            groups.pop((), None)
            out.append((leaf, groups))
        return out

    @cached_property
    def writers(self) -> tuple[dict[GridCell, int], ...]:
        """The process that writes each chunk of each leaf: of its holders, the least busy so far.

        ValueError where no process holds some part of a leaf.
        """
        load = [0] * self.placement.num_ranks
        found: list[Problem] = []
        out = []
        for (leaf, groups), chunk in zip(self._holders, self.chunks, strict=True):
            holders: dict[GridCell, list[int]] = {}
            for boxes, ranks in groups.items():
                for cell in itertools.chain.from_iterable(cells(box, chunk) for box in boxes):
                    holders[cell] = [*holders.get(cell, ()), *ranks]
            nbytes = math.prod(chunk) * leaf.dtype.itemsize
            writer: dict[GridCell, int] = {}
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
        """The pieces of each leaf that this process writes."""
        rank = self.placement.here
        out = []
        for leaf, chunk, writer in zip(
            self.placement.leaves, self.chunks, self.writers, strict=True
        ):
            mine = []
            for box in self.placement.boxes(leaf, rank):
                for cell in cells(box, chunk):
                    if writer[cell] == rank:
                        mine.append(Piece.of(cell, chunk, box))
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
    flat = [box for several in boxes for box in several]
    for dim, size in enumerate(leaf.shape):
        edges = {edge for box in flat for edge in (box.start[dim], box.start[dim] + box.size[dim])}
        edges -= {0, size}
        if edges:
            shape[dim], free[dim] = math.gcd(*edges), False
    if copies > 1 and flat:
        largest = max(math.prod(box.size) for box in flat) * leaf.dtype.itemsize
        limit = min(limit, max(_SMALL_CHUNK, largest // copies))
    if leaf.group == 1:
        return _cut_shape(shape, free, max(1, limit // leaf.dtype.itemsize))
    shape[-2] //= leaf.group
    cut = _cut_shape(shape, free, max(1, limit // leaf.dtype.itemsize // leaf.group))
    return (*cut[:-2], cut[-2] * leaf.group, cut[-1])


def _cut_shape(shape: list[int], free: list[bool], limit: int) -> tuple[int, ...]:
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


def grid(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[GridCell]:
    """Every chunk's position."""
    return itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True)))


def cells(box: Box, chunk: Sequence[int]) -> Iterator[GridCell]:
    """The positions of the chunks that a box touches."""
    return itertools.product(
        *(
            range(start // c, -(-(start + size) // c) if size else start // c)
            for start, size, c in zip(box.start, box.size, chunk, strict=True)
        )
    )
