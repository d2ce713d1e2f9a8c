"""Checkpoints in host memory: each process's state, and a copy of it in a neighbour's.

A process that dies takes its memory with it, so the copies are files in a folder of main memory
(``/dev/shm``), which lasts as long as the machine does. Every process keeps its own state there and
that of the neighbour before it on a data-parallel axis, which sends it: on another machine, where
there is one. So after any one machine is lost, all states of a step can still be had, and nothing
is read from a disk. They are of one mesh: on another one a run goes on from its checkpoints on
disk.

A thread copies and sends, over a process group of its own; the step waits only for the copy out of
its tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from functron.checkpoint.database import as_array, name_of, nbytes_of
from functron.checkpoint.placement import Division, Piece, Placement
from functron.core import tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.settings import Need, setting
from functron.core.tables import shows_differences
from functron.spmd import BoundMesh, Mesh
from functron.spmd.shared_memory import CUDA, Streams

AXES = ("dp", "fsdp")
"""The axes whose ranks keep copies for one another: the first of them that the mesh has."""
_TITLE = "cannot keep states in memory"
_GENERATIONS = 2  # the one that is whole everywhere, and the one that is being made


_SAVES_TO_MEMORY = Need(
    lambda memory: memory.save_every > 0, "states kept in memory", "set memory_save_every"
)


@shows_differences
@dataclass(frozen=True)
class MemoryConfig:
    """States that are kept in memory, for restarts that read no disk.

    Attributes:
        save_every: keep the state after every N steps in memory as well, each rank's own and
            that of a neighbour on dp or fsdp, on another machine where there is one: a restart on
            the same mesh goes on from there, without reading a disk, whichever one machine is lost;
            0: never.
        folder: a folder of main memory, where they lie until the run leaves, four times the bytes
            of a rank's state for each rank of the machine.
    """

    save_every: int = setting(0, short="memory_save_every", least=0)
    folder: str = setting("/dev/shm", "path", short="memory_folder", need=_SAVES_TO_MEMORY)


def folder_of(room: str | Path, run: str | Path) -> Path:
    """The folder in `room`, a folder of main memory, where this user's states of a run lie."""
    name = hashlib.sha256(str(Path(run).absolute()).encode()).hexdigest()[:16]
    return Path(room) / f"functron-{os.getuid()}-{name}"


def axis_of(mesh: Mesh | BoundMesh) -> str | None:
    """The axis whose ranks are neighbours; None where the mesh has none."""
    return next((axis for axis in AXES if mesh[axis] > 1), None)


def neighbours(mesh: Mesh, machines: Sequence[Any]) -> list[int]:
    """By rank, the one that keeps a copy of its state: another on the same axis.

    All are the same distance apart: the smallest at which the fewest neighbours share a machine.

    Args:
        mesh: the ranks.
        machines: of every rank, something that tells machines apart.

    Raises:
        ValueError: the mesh has no such axis.
    """
    axis = axis_of(mesh)
    if axis is None:
        fix = "add dp=N to the mesh, or leave it out"
        refuse(_TITLE, "mesh", str(mesh) or "one rank", "several dp or fsdp ranks", fix)
    where = [mesh.coordinate(rank) for rank in range(mesh.size)]
    rank_at = {tuple(at.values()): rank for rank, at in enumerate(where)}

    def at_distance(distance: int) -> list[int]:
        moved = ({**at, axis: (at[axis] + distance) % mesh[axis]} for at in where)
        return [rank_at[tuple(at.values())] for at in moved]

    def together(distance: int) -> int:
        pairs = enumerate(at_distance(distance))
        return sum(machines[rank] == machines[other] for rank, other in pairs)

    return at_distance(min(range(1, mesh[axis]), key=together))


@dataclass(frozen=True)
class Header:
    """The header of a file of a state.

    Attributes:
        step: the number of steps taken.
        owner: the rank whose state it is.
        digest: of the mesh, of all leaves, and of the run: equal where states are of the same run.
        sizes, checksums: of its blocks, in bytes and CRC-32.
    """

    step: int
    owner: int
    digest: str
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]

    def encode(self) -> bytes:
        """It as bytes: JSON."""
        return json.dumps(self.__dict__).encode()

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """It from `encode`; ValueError of other bytes."""
        try:
            found = json.loads(data)
            sizes, checksums = (tuple(map(int, found[name])) for name in ("sizes", "checksums"))
            header = cls(
                int(found["step"]), int(found["owner"]), str(found["digest"]), sizes, checksums
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no header of a state: {error}") from None
        if len(sizes) != len(checksums) or min(sizes, default=0) < 0:
            raise ValueError("no header of a state: as many checksums as sizes are wanted")
        return header


_LOCKED_BYTES = 256 << 20  # locked at once: so long a first copy may wait


class Snapshot:
    """Copies of a process's pieces in host memory, which later snapshots use again.

    From a GPU the copies are asynchronous, into page-locked memory, on a stream of their own: a
    reader waits for the memory that its piece lies in, the GPU's next work for all of them. That
    work may be the next step of a compiled program, which overwrites the state at its end and has
    no place before that where it could wait.

    Args:
        division: who writes what.
        streams: through which copies are made.
    """

    def __init__(self, division: Division, streams: Streams = CUDA):
        self._division, self._streams = division, streams
        self._parts: list[list[tuple[int, Piece, int]]] = []  # and where in its memory each lies
        self._sizes: list[int] = []
        for index, pieces in enumerate(division.pieces):
            itemsize = division.placement.leaves[index].dtype.itemsize
            for piece in pieces:
                size = -(-nbytes_of(piece.size, itemsize) // 64) * 64  # aligned
                if not self._sizes or self._sizes[-1] + size > _LOCKED_BYTES:
                    self._parts.append([])
                    self._sizes.append(0)
                self._parts[-1].append((index, piece, self._sizes[-1]))
                self._sizes[-1] += size
        self._memory: list[Future[torch.Tensor]] = []
        self._views: dict[tuple[int, tuple[int, ...]], tuple[int, torch.Tensor]] = {}
        self._copied: list[Any] = []
        self._side: Any = None

    @property
    def nbytes(self) -> int:
        """The host memory that it takes."""
        return sum(self._sizes)

    def reserve(self, *, locked: bool) -> None:
        """Begin to allocate the memory, in a thread; page-locked, for copies from a GPU."""
        if not self._memory:

            def pageable(nbytes: int) -> torch.Tensor:
                return torch.empty(nbytes, dtype=torch.uint8)

            make = pageable
            if locked:
                device = self._streams.current_device()
                make = functools.partial(self._streams.pinned, device=device)
            thread = ThreadPoolExecutor(1, "memory of snapshots")
            self._memory = [thread.submit(make, size) for size in self._sizes]
            thread.shutdown(wait=False)

    def take(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy this process's pieces of its tensors, one per leaf (None where it has none).

        MemoryError where so much host memory cannot be locked.
        """
        found = (t.device for t in tensors if t is not None and self._streams.on_device(t))
        device = next(found, None)
        self.reserve(locked=device is not None)
        self._copied = []
        if device is not None:
            compute = self._streams.current(device)
            self._side = self._streams.new(device) if self._side is None else self._side
            self._side.wait_event(compute.record_event())
        for number, part in enumerate(self._parts):
            for index, piece, at in part:
                view = self._view(number, index, piece, at)
                values = slice_values(tensors, index, piece)
                view = view.view(values.shape)
                if device is None:
                    view.copy_(values)
                else:
                    self._streams.copy_(self._side, view, values)
            if device is not None:
                self._copied.append(self._side.record_event())
        if device is not None:
            compute.wait_event(self._side.record_event())

    def source(self, index: int, piece: Piece) -> np.ndarray:
        """The copy of a piece; a `Source`."""
        number, view = self._views[index, piece.cell]
        if self._copied:
            self._copied[number].synchronize()
        return as_array(view)

    def _view(self, number: int, index: int, piece: Piece, at: int) -> torch.Tensor:
        """Where a piece is copied to; waits until that part of the memory is there."""
        if (index, piece.cell) not in self._views:
            dtype = self._division.placement.leaves[index].dtype
            size = nbytes_of(piece.size, dtype.itemsize)
            flat = self._memory[number].result()[at : at + size].view(dtype)
            self._views[index, piece.cell] = number, flat.view(piece.size)
        return self._views[index, piece.cell][1]


def slice_values(tensors: Sequence[torch.Tensor | None], index: int, piece: Piece) -> torch.Tensor:
    """A piece of this process's tensor of a leaf, with a dim more where a view of the leaf has."""
    tensor, where = tensors[index], piece.slices()
    assert tensor is not None
    if tensor.dim() > len(where):
        *before, heads, last = where
        size = tensor.shape[-2]
        where = (*before, slice(heads.start // size, heads.stop // size), slice(None), last)
    return tensor.detach()[where]


_LOOK_UP = 0.1  # seconds for which no signal may be noticed while a save is waited for


class BackgroundThread:
    """One thread at a time beside the program, whose error `wait` raises."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object], name: str) -> None:
        """Call `work` in a thread of this name."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # a daemon: a program that fails elsewhere ends, and leaves an unfinished checkpoint
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread, if any, has ended."""
        # Python handles signals in the main thread alone, which one that another thread of the
        # process receives does not wake: without looking up, a rank would not learn that it is to
        # end
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_UP)
        self._thread = None

    def wait(self) -> None:
        """Wait until the thread has ended, and raise its error."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


class Memory:
    """The states of a run in host memory, as one of its processes.

    Every process of a bound mesh makes one at the same point and calls the same methods.

    Args:
        folder: of this machine's main memory; made where it is missing, for this user alone.
        mesh: the processes.
        like: this process's state: tensors or meta tensors.
        about: text that must be equal for a state to be of this run, such as its seed.

    Raises:
        ValueError: no rank is a neighbour, the folder is somebody else's, or has no room.
    """

    def __init__(self, folder: Path, mesh: BoundMesh, like: tree.Tree, about: str = ""):
        self._folder, self._mesh, self._structure = folder, mesh, tree.structure(like)
        self._like = tree.leaves(like)
        leaves = [(path, list(x.shape), name_of(x.dtype)) for path, x in tree.items(like)]
        text = json.dumps([str(mesh.mesh), mesh.rank, leaves, about])
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        abstract = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), like)
        self._division = Division(Placement.of(abstract))
        self._snapshot = Snapshot(self._division)
        self._group: Any = dist.new_group(backend="gloo")
        self._thread = BackgroundThread()
        self._digests = self._gather_from_all(self._digest)
        machines = self._gather_from_all((socket.gethostname(), str(folder)))
        self._to = neighbours(mesh.mesh, machines)
        self._from = self._to.index(mesh.rank)
        problems = self._gather_from_all(self._check_folder(machines.count(machines[mesh.rank])))
        raise_problems(_TITLE, filter(None, problems))

    @property
    def _own_folder(self) -> Path:
        return self._folder / f"rank-{self._mesh.rank}"

    def _check_folder(self, processes: int) -> Problem | None:
        """The mistake of the folder, if any."""
        name, other = "memory_folder", "choose another folder of main memory"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid():
                got = f"{self._folder}, which is another user's"
                return Problem(name, got, "a folder of your own", other)
            self._own_folder.mkdir(mode=0o700, exist_ok=True)
            there = sum(path.stat().st_size for path in self._own_folder.iterdir())
            free = shutil.disk_usage(self._folder).free + there * processes
        except OSError as error:
            got = f"{self._folder}: {error.strerror}"
            return Problem(name, got, "a folder to write in", other)
        wanted = 2 * _GENERATIONS * self._snapshot.nbytes * processes
        if free < wanted:
            got = f"{free:,} bytes free in {self._folder}"
            fix = "leave memory_save_every out, or have fewer processes a machine"
            text = f"{wanted:,}: {2 * _GENERATIONS} states for each process"
            return Problem(name, got, text, fix)
        return None

    def save(self, step: int, state: tree.Tree) -> None:
        """Begin to keep the state after `step`; returns when it may change again.

        Raises what went wrong with the one before: OSError or RuntimeError.
        """
        self.wait()
        self._snapshot.take(tree.leaves(state))
        self._thread.start(functools.partial(self._keep_state, step), f"memory {step}")

    def wait(self) -> None:
        """Wait for the state that is being kept, and raise what went wrong with it."""
        self._thread.wait()

    def newest(self, at_least: int) -> tuple[int, tree.Tree] | None:
        """The newest step from `at_least` on, and this process's state after it; None without one.

        A state is read where its owner's machine has it, and otherwise sent by a rank with a copy.
        Damaged states count as absent. Collective.
        """
        mine = self._list_files()
        while True:
            held = self._gather_from_all(sorted(mine))
            step = _find_newest(held, self._mesh.size, at_least)
            if step is None:
                return None
            givers = {
                owner: owner
                if (step, owner) in held[owner]
                else min(rank for rank, there in enumerate(held) if (step, owner) in there)
                for owner in range(self._mesh.size)
            }
            state = self._receive_state(step, givers, mine)
            whole = self._gather_from_all(state is not None)
            if state is not None and all(whole):
                return step, state
            for owner, giver in givers.items():
                if giver == self._mesh.rank and not whole[owner]:  # what it gave is none
                    mine[step, owner].pop(0)
                    if not mine[step, owner]:
                        del mine[step, owner]

    def forget(self, but: int | None = None) -> None:
        """Remove what this process keeps, but for the states after one step."""
        for path in self._own_folder.glob("*"):
            if but is None or path.name.partition("-of-")[0] != str(but):
                path.unlink(missing_ok=True)
        if but is None:
            for folder in (self._own_folder, self._folder):  # the others may have left them already
                with suppress(OSError):
                    folder.rmdir()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.wait()
            self.forget()

    # --- of the thread

    def _keep_state(self, step: int) -> None:
        blocks = list(self._copy_blocks())
        sizes = tuple(block.size for block in blocks)
        checksums = tuple(zlib.crc32(block.data) for block in blocks)
        header = Header(step, self._mesh.rank, self._digest, sizes, checksums)
        _write_state(self._own_folder, header, blocks)
        theirs = Header.decode(self._exchange_bytes(np.frombuffer(header.encode(), np.uint8)))
        _write_state(self._own_folder, theirs, self._exchange_blocks(blocks, theirs))
        dist.barrier(group=self._group)  # now every state is whole, and older ones may go
        self.forget(but=step)

    def _copy_blocks(self) -> Iterator[np.ndarray]:
        for index, pieces in enumerate(self._division.pieces):
            for piece in pieces:
                values = np.ascontiguousarray(self._snapshot.source(index, piece))
                yield values.reshape(-1).view(np.uint8)

    def _exchange_bytes(self, data: np.ndarray) -> bytes:
        """The bytes of the neighbour before this one, whose size is sent first."""
        size = torch.empty(1, dtype=torch.int64)
        self._exchange_tensors(torch.tensor([data.size]), size)
        found = torch.empty(int(size), dtype=torch.uint8)
        self._exchange_tensors(torch.from_numpy(data.copy()), found)
        return found.numpy().tobytes()

    def _exchange_blocks(
        self, blocks: Sequence[np.ndarray], theirs: Header
    ) -> Iterator[np.ndarray]:
        """The blocks of the neighbour before this one, while this one's are sent on."""
        for index in range(max(len(blocks), len(theirs.sizes))):
            out = torch.from_numpy(blocks[index]) if index < len(blocks) else None
            size = theirs.sizes[index] if index < len(theirs.sizes) else None
            into = None if size is None else torch.empty(size, dtype=torch.uint8)
            self._exchange_tensors(out, into)
            if into is not None:
                yield into.numpy()

    def _exchange_tensors(self, out: torch.Tensor | None, into: torch.Tensor | None) -> None:
        works: list[Any] = []
        if out is not None and out.numel():
            works.append(dist.isend(out, self._to[self._mesh.rank], group=self._group))
        if into is not None and into.numel():
            works.append(dist.irecv(into, self._from, group=self._group))
        for work in works:
            work.wait()

    # --- of what is there

    def _gather_from_all(self, value: Any) -> list[Any]:
        """Every rank's value. Collective."""
        found: list[Any] = [None] * self._mesh.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def _list_files(self) -> dict[tuple[int, int], list[Path]]:
        """The files of this machine by step and owner, those of this process's own folder first."""
        found: dict[tuple[int, int], list[Path]] = {}
        folders = sorted(self._folder.glob("rank-*"), key=lambda path: path != self._own_folder)
        for path in (path for folder in folders for path in sorted(folder.glob("*-of-*"))):
            step, _, owner = path.name.partition("-of-")
            if step.isdigit() and owner.isdigit():
                found.setdefault((int(step), int(owner)), []).append(path)
        return found

    def _receive_state(
        self, step: int, givers: Mapping[int, int], mine: dict[tuple[int, int], list[Path]]
    ) -> tree.Tree | None:
        """This process's state after `step`; None where what was given is damaged."""
        rank, state = self._mesh.rank, None
        for owner, giver in givers.items():
            if rank not in (owner, giver):
                continue
            data = None
            if rank == giver:
                data = _read_file(mine[step, owner][0], step, owner, self._digests[owner])
            if owner != giver:
                data = self._transfer_state(data, owner, giver)
            if rank == owner and data is not None:
                state = self._decode(*data)
        return state

    def _transfer_state(
        self, data: tuple[Header, list[np.ndarray]] | None, owner: int, giver: int
    ) -> tuple[Header, list[np.ndarray]] | None:
        """A state, from who has it to whose it is."""
        header, blocks = data or (None, [])
        if self._mesh.rank == giver:
            dist.send_object_list([header], owner, group=self._group)
            for block in blocks:
                if block.size:
                    dist.send(torch.from_numpy(block.copy()), owner, group=self._group)
            return None
        found: list[Header | None] = [None]
        dist.recv_object_list(found, giver, group=self._group)
        if (header := found[0]) is None:
            return None
        return header, [self._receive(giver, size) for size in header.sizes]

    def _receive(self, giver: int, size: int) -> np.ndarray:
        into = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(into, giver, group=self._group)
        return into.numpy()

    def _decode(self, header: Header, blocks: Sequence[np.ndarray]) -> tree.Tree | None:
        """The state in blocks; None where it is damaged, or of another process."""
        pieces = [(index, p) for index, each in enumerate(self._division.pieces) for p in each]
        sizes = tuple(
            nbytes_of(piece.size, self._division.placement.leaves[index].dtype.itemsize)
            for index, piece in pieces
        )
        if (header.digest, header.sizes) != (self._digest, sizes) or not _checksums_match(
            header, blocks
        ):
            return None
        tensors = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in self._like]
        for (index, piece), block in zip(pieces, blocks, strict=True):
            values = torch.from_numpy(block).view(tensors[index].dtype)
            tensors[index][piece.slices()] = values.view(piece.size)
        return tree.unflatten(self._structure, tensors)


def _find_newest(held: Sequence[Sequence[tuple[int, int]]], size: int, at_least: int) -> int | None:
    """The newest step after which somebody has the state of every rank."""
    there = {(step, owner) for each in held for step, owner in each if owner < size}
    counts = Counter(step for step, _ in there)
    return max((step for step, n in counts.items() if n == size and step >= at_least), default=None)


_LENGTH_BYTES = 8


def _write_state(
    folder: Path, header: Header, blocks: Iterator[np.ndarray] | list[np.ndarray]
) -> None:
    """Write a state, which gets its name when it is whole; OSError without room."""
    path = folder / f"{header.step}-of-{header.owner}"
    partial = path.with_suffix(".partial")
    encoded = header.encode()
    with partial.open("wb") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little"))
        file.write(encoded)
        for block in blocks:
            file.write(block.data)
    partial.replace(path)


def _read_file(
    path: Path, step: int, owner: int, digest: str
) -> tuple[Header, list[np.ndarray]] | None:
    """The state in a file; None where it is damaged, or is another one."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > size:
                return None
            header = Header.decode(file.read(length))
            if _LENGTH_BYTES + length + sum(header.sizes) != size:
                return None
            blocks = [np.frombuffer(bytearray(file.read(n)), np.uint8) for n in header.sizes]
    except (OSError, ValueError):
        return None
    about = header.step, header.owner, header.digest
    good = about == (step, owner, digest) and _checksums_match(header, blocks)
    return (header, blocks) if good else None


def _checksums_match(header: Header, blocks: Sequence[np.ndarray]) -> bool:
    rows = zip(blocks, header.sizes, header.checksums, strict=True)
    return all(block.size == n and zlib.crc32(block.data) == crc for block, n, crc in rows)
