"""Collectives between the processes of one host, through memory that they share.

Over sockets (gloo) every byte goes through the kernel several times, in threads that take the
processor from the program. A `HostGroup` stands before a process group of gloo's, where functional
collectives find it by its name. All-reduces, all-gathers and reduce-scatters of tensors on CPUs go
through shared memory there: each rank writes what it sends to a ring of its own, and reads those of
the others.

**In lockstep.** All ranks of a group enter the same collectives in the same order, and cut them
into the same pieces, so a piece lies at the same place of every ring. A rank tells the others how
many pieces it has written and how many it has read, and with each piece which collective it is part
of: ranks that enter different ones find out, and none adds up numbers that do not belong together.

**Nothing runs in the background.** To enter a collective is to write as many pieces as there is
room for; waiting for it reads and adds up, and writes the rest. Both work on whatever was entered
before as well, in order.

Sums are taken in the order of ranks, and are the same bits on all of them. Nothing of this depends
on the ranks' processors being idle: who waits for long sleeps.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from functron.core import compat
from functron.spmd.flight import reduction

if sys.platform == "linux":
    import fcntl

MAX_RANKS = 8  # each reads the rings of all others
RINGS_BYTES = 16 << 20  # of all ranks of a group
_MAX_PIECES = 256  # in a ring
_ALIGN = 64  # bytes, a line of the cache
_FOLDER = Path("/dev/shm")
_YIELDS = 200  # before a rank that waits sleeps
_SLEEP_SECONDS, _LOOK_SECONDS = 5e-5, 0.2

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
_OPS = ("psum", "pmax", "pmin", "all_gather", "psum_scatter")
_COMBINE: dict[str, Any] = {
    "psum": torch.add,
    "pmax": torch.maximum,
    "pmin": torch.minimum,
    "psum_scatter": torch.add,
}


class HostError(dist.DistBackendError):
    """A rank of the host ended, came too late, or is in another collective."""


class Kind(NamedTuple):
    """The properties of a collective that its ranks must have in common.

    Attributes:
        op: as `functron.lax` names it.
        dtype: of its operand.
        numel: elements that one rank gets from another.
    """

    op: str
    dtype: torch.dtype
    numel: int

    def encode(self) -> int:
        """This as a positive number of 63 bits."""
        return (self.numel << 7) | (_OPS.index(self.op) << 4) | _DTYPES.index(self.dtype)

    @classmethod
    def decode(cls, code: int) -> Kind:
        """The kind that `encode` made a number of."""
        return cls(_OPS[code >> 4 & 7], _DTYPES[code & 15], code >> 7)

    def __str__(self) -> str:
        return f"{self.op} of {self.numel:,} x {str(self.dtype).removeprefix('torch.')}"


class _Piece(NamedTuple):
    """Elements `first` to `last` of what one rank gets from another, in an endless ring."""

    first: int
    last: int
    begin: int
    end: int


# --- the memory


class _Memory:
    """What the ranks of a group share: a ring for each, and counters.

    Attributes:
        file: descriptor, whose bytes `rank` a process has locked for as long as it takes part.
        written, read: by rank, pieces so far.
        kinds: by rank, of the last pieces that it wrote.
        ring_bytes: the size of a ring.
    """

    def __init__(self, file: int, rank: int, size: int, ring_bytes: int):
        self.file, self.rank, self.size, self.ring_bytes = file, rank, size, ring_bytes
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._map = mmap.mmap(file, _file_bytes(size, ring_bytes))
        numbers = memoryview(self._map).cast("q")
        lines = numbers[_NONCE : _NONCE + 16 * size]
        self.written, self.read = lines[::16], lines[8::16]
        self.kinds = numbers[_NONCE + 16 * size : _head(size) // 8]
        self._bytes = torch.frombuffer(
            self._map, dtype=torch.uint8, count=size * ring_bytes, offset=_head(size)
        ).view(size, ring_bytes)
        self._rings: dict[torch.dtype, list[torch.Tensor]] = {}

    def rings(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """By rank its ring, as elements of `dtype`."""
        found = self._rings.get(dtype)
        if found is None:
            found = self._rings[dtype] = list(self._bytes.view(dtype))
        return found

    def ended(self) -> list[int]:
        """The other ranks whose processes take part no more."""
        return [rank for rank in range(self.size) if rank != self.rank and self._is_free(rank)]

    def _is_free(self, rank: int) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        return True

    def __del__(self) -> None:
        os.close(self.file)


_NONCE = 8  # numbers before the counters, of which the first is drawn by the one who made the file


def _head(size: int) -> int:
    """Bytes before the rings."""
    numbers = _NONCE + 16 * size + _MAX_PIECES * size
    return -(-8 * numbers // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_bytes(size: int, ring_bytes: int) -> int:
    return _head(size) + size * ring_bytes


def _ring_bytes(size: int) -> int:
    return RINGS_BYTES // size // mmap.PAGESIZE * mmap.PAGESIZE


def _make_file(size: int) -> str:
    """The name of a file with room for `size` ranks, and the number in it; "" where there is none.

    All of it is there: a page that the system could not give when it is first written to would
    end the process.
    """
    try:
        file, name = tempfile.mkstemp(prefix="functron-", dir=_FOLDER)
    except OSError:
        return ""
    try:
        os.posix_fallocate(file, 0, _file_bytes(size, _ring_bytes(size)))
        nonce = secrets.token_bytes(7)
        os.pwrite(file, nonce, 0)
    except OSError:
        os.unlink(name)
        return ""
    finally:
        os.close(file)
    return f"{nonce.hex()} {name}"


def _join(group: dist.ProcessGroup) -> _Memory | None:
    """The memory that all ranks of a group share; None, on all, where one of them cannot.

    Those of another host find no file of that name, or another number in it.

    Collectives: a broadcast and an all-gather of some hundred bytes.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    names: list[Any] = [_make_file(size) if rank == 0 else ""]
    dist.broadcast_object_list(names, group=group, group_src=0)
    memory = _open(names[0], rank, size)
    joined: list[Any] = [None] * size
    dist.all_gather_object(joined, memory is not None, group=group)
    if rank == 0 and names[0]:
        os.unlink(names[0].partition(" ")[2])  # it lasts as long as somebody has it open
    return memory if all(joined) else None


def _open(made: str, rank: int, size: int) -> _Memory | None:
    """The memory in the file that `_make_file` made, if this process sees the same one."""
    nonce, _, name = made.partition(" ")
    try:
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.pread(file, 7, 0).hex() != nonce:
        os.close(file)
        return None
    return _Memory(file, rank, size, _ring_bytes(size))


# --- the collectives


@dataclass(eq=False)
class _Entered:
    """A collective that was entered.

    Attributes:
        kind: that its ranks have in common.
        into: the result, in a row; of an all-gather a row for every rank.
        operand: of this rank, in a row; of a reduce-scatter a row for every rank.
        output: that gets the result at the end, where `into` is none of its memory.
        pieces: that it is cut into.
        written, read: how many of them were.
        error: that it ended with.
    """

    kind: Kind
    into: torch.Tensor
    operand: torch.Tensor
    output: torch.Tensor | None
    pieces: Sequence[_Piece] = ()
    written: int = 0
    read: int = 0
    error: HostError | None = None

    @property
    def done(self) -> bool:
        return self.read == len(self.pieces)


class _Lockstep:
    """The collectives of one rank of a group, in the order in which they were entered."""

    def __init__(self, memory: _Memory):
        self.memory, self.rank, self.size = memory, memory.rank, memory.size
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._entered: deque[_Entered] = deque()
        self._places: deque[_Piece] = deque()  # of pieces that some rank has not read
        self._end = 0  # of what is cut, in bytes of the endless ring
        self._num_written = self._num_read = self._num_free = 0
        self._lock = threading.Lock()
        self._error: HostError | None = None

    def enter(self, found: _Entered) -> None:
        """Cut a collective into pieces, and write those that there is room for."""
        with self._lock:
            if self._error is not None:
                raise self._error
            found.pieces = self._cut(found.kind)
            self._entered.append(found)
        self.go_on()

    def _cut(self, kind: Kind) -> list[_Piece]:
        width, ring = kind.dtype.itemsize, self.memory.ring_bytes
        rows = len(self._others) if kind.op == "psum_scatter" else 1
        longest = ring // 4 // rows // _ALIGN * _ALIGN // width
        pieces = []
        for first in range(0, kind.numel, longest):
            last = min(kind.numel, first + longest)
            length = rows * _aligned((last - first) * width)
            if self._end % ring + length > ring:
                self._end += ring - self._end % ring
            pieces.append(_Piece(first, last, self._end, self._end + length))
            self._end += length
        return pieces

    def go_on(self) -> bool:
        """Write and read what can be without waiting; whether that was anything."""
        with self._lock:
            if self._error is not None:
                return False
            moved = False
            while self._write() or self._read():
                moved = True
            return moved

    def _write(self) -> bool:
        found = next((e for e in self._entered if e.written < len(e.pieces)), None)
        if found is None:
            return False
        piece, memory = found.pieces[found.written], self.memory
        if not self._has_room(piece):
            return False
        ring = memory.rings(found.kind.dtype)[self.rank]
        place, length = self._place(found.kind, piece), piece.last - piece.first
        if found.kind.op == "psum_scatter":
            stride = self._stride(found.kind, piece)
            for slot, rank in enumerate(self._others):
                at = place + slot * stride
                ring[at : at + length] = found.operand[rank, piece.first : piece.last]
        else:
            ring[place : place + length] = found.operand[piece.first : piece.last]
        number = self._num_written
        memory.kinds[self.rank * _MAX_PIECES + number % _MAX_PIECES] = found.kind.encode()
        self._num_written = memory.written[self.rank] = number + 1
        found.written += 1
        self._places.append(piece)
        return True

    def _has_room(self, piece: _Piece) -> bool:
        read = min(self.memory.read)
        while self._num_free < read:
            self._places.popleft()
            self._num_free += 1
        if not self._places:
            return True
        room = piece.end - self._places[0].begin <= self.memory.ring_bytes
        return room and len(self._places) < _MAX_PIECES

    def _place(self, kind: Kind, piece: _Piece) -> int:
        return piece.begin % self.memory.ring_bytes // kind.dtype.itemsize

    @staticmethod
    def _stride(kind: Kind, piece: _Piece) -> int:
        return _aligned((piece.last - piece.first) * kind.dtype.itemsize) // kind.dtype.itemsize

    def _read(self) -> bool:
        if not self._entered:
            return False
        found = self._entered[0]
        if found.read < len(found.pieces):
            if min(self.memory.written) <= self._num_read:
                return False
            self._check(found.kind)
            self._take(found, found.pieces[found.read])
            found.read += 1
            self._num_read = self.memory.read[self.rank] = self._num_read + 1
        if found.done:
            self._entered.popleft()
            if found.output is not None:
                found.output.copy_(found.into.view(found.output.shape))
        return True

    def _check(self, mine: Kind) -> None:
        code, at = mine.encode(), self._num_read % _MAX_PIECES
        theirs = [self.memory.kinds[rank * _MAX_PIECES + at] for rank in range(self.size)]
        others = [f"rank {r} in {Kind.decode(k)}" for r, k in enumerate(theirs) if k != code]
        if others:
            raise self._fail(f"rank {self.rank} of the axis is in {mine}, {', '.join(others)}")

    def _take(self, found: _Entered, piece: _Piece) -> None:
        kind, first, last = found.kind, piece.first, piece.last
        rings, at, length = self.memory.rings(kind.dtype), self._place(kind, piece), last - first
        if kind.op == "all_gather":
            for rank, ring in enumerate(rings):
                mine = rank == self.rank
                found.into[rank, first:last] = (
                    found.operand[first:last] if mine else ring[at : at + length]
                )
            return
        into, parts = found.into[first:last], []
        for rank, ring in enumerate(rings):
            start = at
            if kind.op == "psum_scatter":
                if rank == self.rank:
                    parts.append(found.operand[rank, first:last])
                    continue
                start += (self.rank - (self.rank > rank)) * self._stride(kind, piece)
            parts.append(ring[start : start + length])
        combine = _COMBINE[kind.op]
        combine(parts[0], parts[1], out=into)
        for part in parts[2:]:
            combine(into, part, out=into)

    def _fail(self, why: str) -> HostError:
        self._error = HostError(why)
        for entered in self._entered:
            entered.error = self._error
        return self._error

    def wait(self, found: _Entered, host: Host, seconds: float) -> None:
        """Return when a collective has ended.

        Raises:
            HostError: a rank ended, is in another collective, or did not come for `seconds`.
        """
        tries, began = 0, 0.0
        while True:
            moved = self.go_on()
            if found.error is not None:
                raise found.error
            if found.done:
                return
            if moved or host.go_on(self):
                tries = 0
                continue
            tries += 1
            if tries <= _YIELDS:
                os.sched_yield()
                continue
            if tries == _YIELDS + 1:
                began = looked = time.monotonic()
            time.sleep(_SLEEP_SECONDS)
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                self._look(found, now - began, seconds)

    def _look(self, found: _Entered, waited: float, seconds: float) -> None:
        late = [r for r in self._others if self.memory.written[r] <= self._num_read]
        ended = [rank for rank in self.memory.ended() if rank in late]
        with self._lock:
            if ended:
                raise self._fail(f"{_ranks(ended)} of the axis ended before {found.kind}")
            if waited > seconds:
                who = _ranks(late) if late else "a rank that must read first"
                raise self._fail(f"{who} did not come to {found.kind} for {seconds:g} s")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


class HostWork(dist._Work):
    """Collectives through shared memory that are under way.

    Args:
        lockstep: of the group.
        host: of this process.
        entered: what was entered.
        seconds: that other ranks have to come.
    """

    def __init__(
        self, lockstep: _Lockstep, host: Host, entered: Sequence[_Entered], seconds: float
    ):
        super().__init__()
        self._lockstep, self._host, self._entered = lockstep, host, entered
        self._seconds = seconds

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for their end."""
        for entered in self._entered:
            seconds = timeout.total_seconds() if timeout else self._seconds
            self._lockstep.wait(entered, self._host, seconds)
        return True

    def is_completed(self) -> bool:
        """Whether they have ended."""
        self._lockstep.go_on()
        return all(entered.done or entered.error is not None for entered in self._entered)


class HostGroup(dist.ProcessGroup):
    """A process group whose sums, gathers and scatters go through shared memory.

    Args:
        group: of gloo, of the same ranks: it does everything else.
        memory: that the ranks share.
        host: of this process.
    """

    def __init__(self, group: dist.ProcessGroup, memory: _Memory, host: Host):
        rank_and_size: tuple[Any, ...] = (memory.rank, memory.size)
        super().__init__(*rank_and_size)
        self._whole, self._host = weakref.ref(group), host
        self.lockstep: _Lockstep | None = _Lockstep(memory)
        host.groups.add(self.lockstep)
        # who parts from the others lets the memory go, by which they find out
        weakref.finalize(group, HostGroup.close, self).atexit = False

    @property
    def whole(self) -> Any:
        """The process group that this one stands before."""
        return self._whole()

    def close(self) -> None:
        """Take part no more."""
        self.lockstep = None

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """The name that torch has for it."""
        return "memory"

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """A sum, maximum or minimum, in place."""
        op = reduction(opts)
        if op not in _COMBINE or not _fit(tensors):
            return self.whole.allreduce(tensors, opts)
        return self._enter([(op, x, x) for x in tensors])

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        """Several at once."""
        op = reduction(opts)
        if op not in _COMBINE or not _fit(tensors):
            return self.whole.allreduce_coalesced(tensors, opts)
        return self._enter([(op, x, x) for x in tensors])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *opts: Any) -> Any:
        """All ranks' tensors, on all."""
        if not _fit(inputs):
            return self.whole.allgather_into_tensor_coalesced(outputs, inputs, *opts)
        return self._enter([("all_gather", *row) for row in zip(outputs, inputs, strict=True)])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, *opts: Any) -> Any:
        """A part of a sum for each."""
        if not _fit(inputs) or reduction(opts[0]) != "psum":
            return self.whole.reduce_scatter_tensor_coalesced(outputs, inputs, *opts)
        return self._enter([("psum_scatter", *row) for row in zip(outputs, inputs, strict=True)])

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """One rank's tensors, on all."""
        return self.whole.broadcast(tensors, opts)

    def alltoall_base(self, output: Any, operand: Any, receives: Any, sends: Any, opts: Any) -> Any:
        """A part of each rank's tensor for each; how much may differ by rank."""
        return self.whole.alltoall_base(output, operand, receives, sends, opts)

    def _enter(self, rows: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> HostWork:
        if self.lockstep is None:
            raise HostError("this process has left the group")
        entered = [self._entered(*row) for row in rows]
        for each in entered:
            self.lockstep.enter(each)
        seconds = compat.gloo_timeout_seconds(self.whole)
        return HostWork(self.lockstep, self._host, entered, seconds)

    def _entered(self, op: str, output: torch.Tensor, operand: torch.Tensor) -> _Entered:
        size, operand = self.size(), operand.detach().contiguous()
        into = output.detach().contiguous()  # in a row, if not of the output's memory
        numel = operand.numel() // size if op == "psum_scatter" else operand.numel()
        rows = (size, numel)
        return _Entered(
            Kind(op, operand.dtype, numel),
            into.view(rows) if op == "all_gather" else into.view(-1),
            operand.view(rows) if op == "psum_scatter" else operand.view(-1),
            None if output.is_contiguous() else output.detach(),
        )


def _fit(tensors: Sequence[torch.Tensor]) -> bool:
    return all(x.dtype in _DTYPES and x.device.type == "cpu" for x in tensors)


class Host:
    """The groups of a mesh that one process takes part in.

    Who waits in one group goes on with what was entered in the others, so that ranks may wait for
    collectives over different axes in different orders, as over sockets.
    """

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[_Lockstep] = weakref.WeakSet()

    def go_on(self, but: _Lockstep) -> bool:
        """Write and read what can be of other groups; whether that was anything."""
        moved = False
        for group in self.groups:
            moved |= group is not but and group.go_on()
        return moved

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A `HostGroup` of the same ranks, where all of them share this host; else `group`.

        On Linux and processors of x86 alone: others may show that a piece is written before what is
        in it.
        """
        here = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
        if not here or not compat.runs_gloo(group) or not 1 < group.size() <= MAX_RANKS:
            return group
        memory = _join(group)
        return group if memory is None else compat.kept(HostGroup(group, memory, self))
