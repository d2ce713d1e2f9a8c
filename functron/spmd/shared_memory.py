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

**In the program's own thread.** To enter a collective is to write as many pieces as there is room
for; waiting for it reads and adds up, and writes the rest. Both work on whatever was entered before
as well, in order. A thread looks fifty times a second whether there is something to go on with, so
that no rank depends on where another one waits.

Transfers from one rank to another go the same way, through a ring of the two.

Sums are taken in the order of ranks, and are the same bits on all of them. Nothing of this depends
on the ranks' processors being idle: a rank that waits for long sleeps.
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

import numpy as np
import torch
import torch.distributed as dist

from functron.core import compat
from functron.spmd.flight import list_ranks, reduction

if sys.platform == "linux":
    import fcntl

MAX_RANKS = 8  # each reads the rings of all others
RINGS_BYTES = 8 << 20  # for collectives, of all ranks of a group
CHANNELS_BYTES = 4 << 20  # for transfers between two, of all pairs
_MAX_PIECES = 64  # in a ring
_ALIGN = 64  # bytes, a line of the cache
_LEFT_AT = 64  # in the first page, a byte for each rank
_FOLDER = Path("/dev/shm")
_YIELDS = 200  # before a rank that waits sleeps
_SLEEP_SECONDS, _LOOK_SECONDS = 5e-5, 0.2
_BUSY_SECONDS, _MOVED_SECONDS = 2e-2, 1e-3  # between looks of a thread beside the program

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
_OPS = ("psum", "pmax", "pmin", "all_gather", "psum_scatter", "send")
_COMBINE: dict[str, Any] = {
    "psum": torch.add,
    "pmax": torch.maximum,
    "pmin": torch.minimum,
    "psum_scatter": torch.add,
}


class HostError(dist.DistBackendError):
    """A rank of the host ended, came too late, or is in another collective."""


class ExchangeKind(NamedTuple):
    """The properties of a collective that its ranks must have in common.

    Attributes:
        numel: elements that one rank gets from another.
    """

    op: str
    dtype: torch.dtype
    numel: int

    def encode(self) -> int:
        """This as a positive number of 63 bits."""
        return (self.numel << 7) | (_OPS.index(self.op) << 4) | _DTYPES.index(self.dtype)

    @classmethod
    def decode(cls, code: int) -> ExchangeKind:
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

    @property
    def length(self) -> int:
        return self.last - self.first


# --- the memory


class _Rings:
    """Rings in shared memory, and the counters of the ranks that write and read them.

    Attributes:
        written, read: by rank, pieces so far.
        kinds: by ring, of the last pieces that were written to it.
    """

    def __init__(self, memory: mmap.mmap, at: int, num_ranks: int, num_rings: int, ring_bytes: int):
        numbers = memoryview(memory).cast("q")[at // 8 :]
        counters = 2 * _LINE * num_ranks
        self.written, self.read = numbers[:counters:_LINE][::2], numbers[:counters:_LINE][1::2]
        self.kinds = numbers[counters : counters + _MAX_PIECES * num_rings]
        self.ring_bytes = ring_bytes
        at += self.head_bytes(num_ranks, num_rings)
        count = num_rings * ring_bytes
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=at)
        self._bytes, self._views = flat.view(num_rings, ring_bytes), {}

    @staticmethod
    def head_bytes(num_ranks: int, num_rings: int) -> int:
        """The size of the counters before the rings."""
        numbers = 2 * _LINE * num_ranks + _MAX_PIECES * num_rings
        return -(-8 * numbers // mmap.PAGESIZE) * mmap.PAGESIZE

    def of(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The rings, as elements of `dtype`."""
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = list(self._bytes.view(dtype))
        return found


_LINE = 8  # numbers to a line of the cache: ranks do not wait for lines that others write


class _Memory:
    """A file in memory, which the ranks of a group share.

    A number by which its ranks know it, rings for collectives, one for each rank, and a ring for
    transfers of each pair.
    """

    def __init__(self, file: int, rank: int, size: int):
        self._file, self.rank, self.size = file, rank, size
        # a process has its byte locked for as long as it takes part, however it ends
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._map = mmap.mmap(file, _file_bytes(size))
        self.rings = _Rings(self._map, mmap.PAGESIZE, size, size, _ring_bytes(size))

    def channel(self, source: int, target: int) -> _Rings:
        """The ring for transfers from one rank to another."""
        number = source * (self.size - 1) + target - (target > source)
        at = _channels_at(self.size) + number * _channel_bytes(self.size)
        return _Rings(self._map, at, 2, 1, _channel_ring_bytes(self.size))

    def leave(self) -> None:
        """Tell the others that this process takes part no more, though it goes on."""
        self._map[_LEFT_AT + self.rank] = 1
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self.rank)

    def have_left(self, ranks: Sequence[int]) -> bool:
        """Whether all of these, whose processes take part no more, go on."""
        return all(self._map[_LEFT_AT + rank] for rank in ranks)

    def ended(self) -> list[int]:
        """The other ranks whose processes take part no more."""
        return [rank for rank in range(self.size) if rank != self.rank and self._is_free(rank)]

    def _is_free(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def __del__(self) -> None:
        os.close(self._file)


def _ring_bytes(size: int) -> int:
    return RINGS_BYTES // size // mmap.PAGESIZE * mmap.PAGESIZE


def _channels_at(size: int) -> int:
    return mmap.PAGESIZE + _Rings.head_bytes(size, size) + size * _ring_bytes(size)


def _channel_ring_bytes(size: int) -> int:
    return CHANNELS_BYTES // (size * (size - 1)) // mmap.PAGESIZE * mmap.PAGESIZE


def _channel_bytes(size: int) -> int:
    return _Rings.head_bytes(2, 1) + _channel_ring_bytes(size)


def _file_bytes(size: int) -> int:
    return _channels_at(size) + size * (size - 1) * _channel_bytes(size)


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
        os.posix_fallocate(file, 0, _file_bytes(size))
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
    return _Memory(file, rank, size)


# --- collectives and transfers


@dataclass(eq=False)
class _Entered:
    """A collective or a transfer that was entered.

    Attributes:
        into: the result, in a row; of an all-gather a row for every rank.
        operand: of this rank, in a row; of a reduce-scatter a row for every rank.
        output: that the result is copied to at the end, where `into` is other memory.
        done: whether this rank has no more to do with it.
    """

    kind: ExchangeKind
    into: torch.Tensor
    operand: torch.Tensor
    output: torch.Tensor | None = None
    pieces: Sequence[_Piece] = ()
    written: int = 0
    read: int = 0
    done: bool = False
    error: HostError | None = None


class _Lockstep:
    """The collectives that one rank enters with others, in the order in which all enter them.

    Args:
        ranks: of the group that take part; each counts its pieces in this order.
        writers: those that write, by their places in `ranks`: each to a ring of its own.
        readers: those that read, by their places.
    """

    def __init__(
        self,
        memory: _Memory,
        rings: _Rings,
        ranks: Sequence[int],
        writers: Sequence[int],
        readers: Sequence[int],
    ):
        self._memory, self._rings, self._ranks = memory, rings, ranks
        self._writers, self._readers = writers, readers
        self._me = ranks.index(memory.rank)
        self._others = [place for place in range(len(ranks)) if place != self._me]
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

    def _cut(self, kind: ExchangeKind) -> list[_Piece]:
        width, ring = kind.dtype.itemsize, self._rings.ring_bytes
        rows = len(self._others) if kind.op == "psum_scatter" else 1
        longest = ring // 4 // rows // _ALIGN * _ALIGN // width
        pieces = []
        for first in range(0, kind.numel, longest):
            last = min(kind.numel, first + longest)
            length = rows * _align_bytes((last - first) * width)
            if self._end % ring + length > ring:
                self._end += ring - self._end % ring
            pieces.append(_Piece(first, last, self._end, self._end + length))
            self._end += length
        return pieces

    def go_on(self) -> bool:
        """Write and read what can be without waiting; whether that was anything."""
        moved = False
        if self._entered:
            with self._lock, torch.no_grad():
                while self._error is None and (self._write() or self._read()):
                    moved = True
        return moved

    def _write(self) -> bool:
        if self._me not in self._writers:
            return False
        found = next((e for e in self._entered if e.written < len(e.pieces)), None)
        if found is None or not self._has_room(found.pieces[found.written]):
            return False
        piece, kind, rings = found.pieces[found.written], found.kind, self._rings
        ring, place, length = rings.of(kind.dtype)[self._me], self._place(kind, piece), piece.length
        if kind.op == "psum_scatter":
            for slot, other in enumerate(self._others):
                at = place + slot * self._stride(kind, piece)
                ring[at : at + length] = found.operand[other, piece.first : piece.last]
        else:
            ring[place : place + length] = found.operand[piece.first : piece.last]
        rings.kinds[self._me * _MAX_PIECES + self._num_written % _MAX_PIECES] = kind.encode()
        self._num_written += 1
        rings.written[self._me] = self._num_written
        found.written += 1
        self._places.append(piece)
        return True

    def _has_room(self, piece: _Piece) -> bool:
        read = min(self._rings.read[reader] for reader in self._readers)
        while self._num_free < read:
            self._places.popleft()
            self._num_free += 1
        if not self._places:
            return True
        room = piece.end - self._places[0].begin <= self._rings.ring_bytes
        return room and len(self._places) < _MAX_PIECES

    def _place(self, kind: ExchangeKind, piece: _Piece) -> int:
        return piece.begin % self._rings.ring_bytes // kind.dtype.itemsize

    @staticmethod
    def _stride(kind: ExchangeKind, piece: _Piece) -> int:
        return _align_bytes(piece.length * kind.dtype.itemsize) // kind.dtype.itemsize

    def _read(self) -> bool:
        if not self._entered:
            return False
        found, reads = self._entered[0], self._me in self._readers
        if reads and found.read < len(found.pieces):
            if self._find_late() or not self._check_kinds(found.kind):
                return False
            self._combine_piece(found, found.pieces[found.read])
            found.read += 1
            self._num_read += 1
            self._rings.read[self._me] = self._num_read
            return True
        if not reads and found.written < len(found.pieces):
            return False
        if found.output is not None:
            found.output.copy_(found.into.view(found.output.shape))
        self._entered.popleft()
        found.done = True
        return True

    def _find_late(self) -> list[int]:
        """The places of those that have not written what is to be read next."""
        return [w for w in self._writers if self._rings.written[w] <= self._num_read]

    def _check_kinds(self, mine: ExchangeKind) -> bool:
        code, at = mine.encode(), self._num_read % _MAX_PIECES
        theirs = {w: self._rings.kinds[w * _MAX_PIECES + at] for w in self._writers}
        others = [
            f"rank {self._ranks[place]} in {ExchangeKind.decode(kind)}"
            for place, kind in theirs.items()
            if kind != code
        ]
        if others:
            self._fail(f"rank {self._memory.rank} of the axis is in {mine}, {', '.join(others)}")
        return not others

    def _combine_piece(self, found: _Entered, piece: _Piece) -> None:
        kind, first, last = found.kind, piece.first, piece.last
        rings, at = self._rings.of(kind.dtype), self._place(kind, piece)
        if kind.op == "send":
            found.into[first:last] = rings[0][at : at + piece.length]
        elif kind.op == "all_gather":
            for place, ring in enumerate(rings):
                own = place == self._me
                part = found.operand[first:last] if own else ring[at : at + piece.length]
                found.into[place, first:last] = part
        else:
            parts = []
            for place, ring in enumerate(rings):
                start = at
                if kind.op == "psum_scatter":
                    start += (self._me - (self._me > place)) * self._stride(kind, piece)
                parts.append(ring[start : start + piece.length])
            if kind.op == "psum_scatter":
                parts[self._me] = found.operand[self._me, first:last]
            elif self._me < 2:  # read before anything is written over it
                parts[self._me] = found.operand[first:last]
            into, combine = found.into[first:last], _COMBINE[kind.op]
            combine(parts[0], parts[1], out=into)
            for part in parts[2:]:
                combine(into, part, out=into)

    def end(self) -> None:
        """Enter and go on with nothing any more."""
        with self._lock:
            self._fail("this process has left the group")

    def _fail(self, why: str) -> None:
        self._error = HostError(why)
        for entered in self._entered:
            entered.error = self._error

    def wait(self, found: _Entered, host: HostGroups, seconds: float) -> None:
        """Return when a collective has ended.

        Raises:
            HostError: a rank ended, is in another collective, or did not come for `seconds`.
        """
        tries, began, looked = 0, 0.0, 0.0
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
                self._check_others(found, now - began, seconds)

    def _check_others(self, found: _Entered, waited: float, seconds: float) -> None:
        if self._me in self._readers and found.read < len(found.pieces):
            late = [self._ranks[place] for place in self._find_late()]
        else:  # the ring is full and not being read
            late = [self._ranks[r] for r in self._readers if self._ranks[r] != self._memory.rank]
        ended = [rank for rank in self._memory.ended() if rank in late]
        with self._lock:
            if ended:
                how = "left the group" if self._memory.have_left(ended) else "ended"
                self._fail(f"{list_ranks(ended)} of the axis {how} before {found.kind}")
            elif waited > seconds:
                self._fail(f"{list_ranks(late)} did not come to {found.kind} for {seconds:g} s")


def _align_bytes(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


class HostWork(dist._Work):
    """Collectives through shared memory that are under way."""

    def __init__(
        self, lockstep: _Lockstep, host: HostGroups, entered: Sequence[_Entered], seconds: float
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
    """

    def __init__(self, group: dist.ProcessGroup, memory: _Memory, host: HostGroups):
        rank_and_size: tuple[Any, ...] = (memory.rank, memory.size)
        super().__init__(*rank_and_size)
        self._whole = weakref.ref(group)
        self._host: HostGroups | None = host
        self._memory: _Memory | None = memory
        everyone = range(memory.size)
        self._lockstep: _Lockstep | None
        self._lockstep = _Lockstep(memory, memory.rings, everyone, everyone, everyone)
        self._channels: dict[tuple[int, int], _Lockstep] = {}
        host.locksteps.add(self._lockstep)
        # a process that leaves releases the memory, by which the others find out
        weakref.finalize(group, HostGroup.close, self).atexit = False

    @property
    def whole(self) -> Any:
        """The process group that this one stands before."""
        return self._whole()

    def close(self) -> None:
        """Take part no more; ranks that wait for this one find out."""
        if self._memory is not None:
            self._memory.leave()
        for lockstep in (self._lockstep, *self._channels.values()):
            if lockstep is not None:
                lockstep.end()
        self._host = self._memory = self._lockstep = None
        self._channels = {}

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """The name that torch has for it."""
        return "memory"

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """A sum, maximum or minimum, in place."""
        return self._reduce(tensors, opts) or self.whole.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        """Several at once."""
        return self._reduce(tensors, opts) or self.whole.allreduce_coalesced(tensors, opts)

    def _reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> HostWork | None:
        op = reduction(opts)
        if op not in _COMBINE or not _fit(tensors):
            return None
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

    def isend(self, tensor: torch.Tensor, peer: int) -> Any:
        """Start to send a contiguous tensor to another rank, which receives in the same order."""
        if not _fit([tensor]):
            return dist.isend(tensor, None, self.whole, 0, peer)
        return self._transfer(tensor, self.rank(), peer)

    def irecv(self, tensor: torch.Tensor, peer: int) -> Any:
        """Start to receive a contiguous tensor from another rank."""
        if not _fit([tensor]):
            return dist.irecv(tensor, None, self.whole, 0, peer)
        return self._transfer(tensor, peer, self.rank())

    def _transfer(self, tensor: torch.Tensor, source: int, target: int) -> HostWork:
        row = tensor.detach().view(-1)
        entered = _Entered(ExchangeKind("send", tensor.dtype, tensor.numel()), row, row)
        return self._enter_all(self._channel(source, target), [entered])

    def _channel(self, source: int, target: int) -> _Lockstep | None:
        found = self._channels.get((source, target))
        if found is None and self._memory is not None and self._host is not None:
            rings = self._memory.channel(source, target)
            found = _Lockstep(self._memory, rings, (source, target), (0,), (1,))
            self._channels[source, target] = found
            self._host.locksteps.add(found)
        return found

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """One rank's tensors, on all."""
        return self.whole.broadcast(tensors, opts)

    def alltoall_base(self, output: Any, operand: Any, receives: Any, sends: Any, opts: Any) -> Any:
        """A part of each rank's tensor for each; how much may differ by rank."""
        return self.whole.alltoall_base(output, operand, receives, sends, opts)

    def _enter(self, rows: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> HostWork:
        return self._enter_all(self._lockstep, [self._entered(*row) for row in rows])

    def _enter_all(self, lockstep: _Lockstep | None, entered: Sequence[_Entered]) -> HostWork:
        if lockstep is None or self._host is None:
            raise HostError("this process has left the group")
        for each in entered:
            lockstep.enter(each)
        seconds = compat.timeout_seconds(self.whole)
        return HostWork(lockstep, self._host, entered, seconds)

    def _entered(self, op: str, output: torch.Tensor, operand: torch.Tensor) -> _Entered:
        size, operand = self.size(), operand.detach().contiguous()
        into = output.detach().contiguous()  # in a row, if not of the output's memory
        numel = operand.numel() // size if op == "psum_scatter" else operand.numel()
        rows = (size, numel)
        return _Entered(
            ExchangeKind(op, operand.dtype, numel),
            into.view(rows) if op == "all_gather" else into.view(-1),
            operand.view(rows) if op == "psum_scatter" else operand.view(-1),
            None if output.is_contiguous() else output.detach(),
        )


def _fit(tensors: Sequence[torch.Tensor]) -> bool:
    return all(x.dtype in _DTYPES and x.device.type == "cpu" for x in tensors)


class HostGroups:
    """The groups of a mesh that one process takes part in.

    Who waits in one group goes on with what was entered in the others, so that ranks may wait for
    collectives over different axes in different orders, as over sockets.
    """

    def __init__(self) -> None:
        self.locksteps: weakref.WeakSet[_Lockstep] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def go_on(self, but: _Lockstep | None = None) -> bool:
        """Write and read what can be without waiting, but of one; whether that was anything."""
        moved = False
        for lockstep in list(self.locksteps):
            moved |= lockstep is not but and lockstep.go_on()
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
        if memory is None:
            return group
        if self._thread is None:
            self._thread = threading.Thread(
                target=_keep_going, args=(weakref.ref(self),), daemon=True
            )
            self._thread.start()
        return compat.keep_group(HostGroup(group, memory, self))


def _keep_going(host: weakref.ref[HostGroups]) -> None:
    """Go on with what was entered, while the process may be computing, or waiting elsewhere."""
    moved = False
    while True:
        time.sleep(_MOVED_SECONDS if moved else _BUSY_SECONDS)
        found = host()
        if found is None:
            return
        moved = found.go_on()
        del found


# --- copies between a GPU and host memory, on streams beside the one that computes


class Streams:
    """CUDA's streams and pinned memory, as far as copies between host and device need them.

    Streams have torch.cuda.Stream's ``record_event``, ``wait_event`` and ``synchronize``. What
    arranges copies takes one of these as an argument, so that a test can put others in its place,
    which see the order of everything.
    """

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the memory of a GPU."""
        return tensor.is_cuda

    def current(self, device: torch.device) -> Any:
        """The stream on which a device computes what is called now."""
        return torch.cuda.current_stream(device)

    def new(self, device: torch.device) -> Any:
        """Another stream of the device."""
        return torch.cuda.Stream(device)

    def copy_(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Have `stream` copy `source` into `target`, while the caller goes on."""
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of the device, uint8 [nbytes], for the stream that computes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def current_device(self) -> int:
        """The GPU of this thread. Another thread begins with GPU 0, whoever starts it."""
        return torch.cuda.current_device()

    def pinned(self, nbytes: int, device: int) -> torch.Tensor:
        """Page-locked memory of the host, uint8 [nbytes], as long as a tensor uses it.

        It has pages of its own, since a page is locked once. Not of torch's allocator, which takes
        the next power of two: up to twice as much.

        Args:
            nbytes: its size.
            device: the number of a GPU that this process uses, whose context locks it for all.

        Raises:
            MemoryError: the system locks no more pages.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE), np.uint8)
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            code = int(cudart.cudaHostRegister(memory.ctypes.data, nbytes, _PORTABLE))
        if code:
            raise MemoryError(
                f"page-locked memory: got CUDA's error {code} for {nbytes} bytes; wanted them "
                "locked; fix: free host memory, or raise `ulimit -l`"
            )
        # NumPy calls this before it frees the memory, which may be the last that a tensor does
        last = weakref.finalize(memory, cudart.cudaHostUnregister, memory.ctypes.data)
        last.atexit = False
        return torch.from_numpy(memory)


_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of the process

CUDA = Streams()
