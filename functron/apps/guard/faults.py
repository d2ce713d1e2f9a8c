"""Faults: values that say what goes wrong where, and functions that put them into a run.

A fault is put in by wrapping what a run is given (`inject` around its step), or by changing a
file; nothing is patched but the clock, and a process without the wrapper is untouched. For tests of
runs that are meant to survive, ours and our users'.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from functron.core import compat, tree
from functron.core.errors import nearest, refuse
from functron.spmd import BoundMesh
from functron.spmd.flight import EVERYWHERE, FlightRecorder

# --- wrong bits: in tensors, in files


def flip_(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element, in place.

    Args:
        tensor: of any dtype and strides.
        element: in row-major order.
        bit: from 0, the least significant one.

    Raises:
        ValueError: there is no such element, or no such bit in it.
    """
    size = tensor.element_size()
    if not (0 <= element < tensor.numel() and 0 <= bit < 8 * size):
        got, wanted = f"bit {bit} of element {element}", f"one of {tensor.numel()} x {8 * size}"
        refuse("cannot flip a bit", "tensor", got, wanted)
    place = np.unravel_index(element, tensor.shape)
    # hardware tells nobody: autograd's count of changes stays, too
    raw = tensor.data[tuple(map(int, place))].unsqueeze(0).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8  # little-endian on all that torch runs on


def flip_file(path: Path, byte: int, bit: int) -> None:
    """Flip one bit of one byte of a file.

    Raises:
        ValueError: the file has no such byte.
    """
    size = path.stat().st_size
    if not (0 <= byte < size and 0 <= bit < 8):
        got, wanted = f"bit {bit} of byte {byte}", f"one of {size} bytes, of 8 bits"
        refuse("cannot flip a bit", str(path), got, wanted)
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


@dataclass(frozen=True)
class Corrupt:
    """Wrong numbers in one leaf of the state as a step begins.

    Attributes:
        step: from 0.
        leaf: the path of a leaf of the state, such as ``params/embed``.
        rank: of the process; None: of every process, as a bad sample or a mistake in the model is.
        element: which one, in row-major order; None: all of them.
        bit: the bit that is flipped; None: the value is set instead.
        value: what is set, such as NaN.
        scale: multiply by `value`, rather than set it.
        times: how often the step goes wrong; None: whenever it is taken, as on broken hardware. 1
            is a transient fault, which is not there when the step is taken again.
        layer: of a leaf that has all layers' values in its first dim, the layer that `element` is
            of; None: the whole leaf.
    """

    step: int
    leaf: str
    rank: int | None = None
    element: int | None = 0
    bit: int | None = None
    value: float = float("nan")
    scale: bool = False
    times: int | None = 1
    layer: int | None = None


def inject(
    step: Callable[[Any, Any], tuple[Any, Any]], faults: Sequence[Corrupt], rank: int = 0
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`step` of a run on the process `rank`, into which these faults are put.

    It counts how often each has happened, by itself: two wrapped steps share nothing.

    Raises:
        ValueError: (when called) the state has no such leaf.
    """
    left = [fault.times for fault in faults]

    def wrapped(state: Any, batch: Any) -> tuple[Any, Any]:
        index = int(state.step)
        for number, fault in enumerate(faults):
            here = fault.rank in (None, rank) and fault.step == index
            if not here or left[number] == 0:
                continue
            if (remaining := left[number]) is not None:
                left[number] = remaining - 1
            _corrupt_(state, fault)
        return step(state, batch)

    return wrapped


def _corrupt_(state: Any, fault: Corrupt) -> None:
    leaves = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
    if fault.leaf not in leaves:
        refuse(
            "no such leaf", fault.leaf, "no leaf of the state", "one", nearest(fault.leaf, leaves)
        )
    leaf = leaves[fault.leaf].detach()
    if fault.layer is not None:
        layers = leaf.shape[0] if leaf.dim() else 0
        if not 0 <= fault.layer < layers:
            refuse("no such layer", fault.leaf, f"layer {fault.layer}", f"one of {layers}")
        leaf = leaf[fault.layer]
    if fault.bit is not None:
        flip_(leaf, fault.element or 0, fault.bit)
        return
    part = leaf if fault.element is None else leaf.view(-1)[fault.element]
    if fault.scale:
        part.mul_(fault.value)
    else:
        part.fill_(fault.value)


# --- hangs: ranks that stop, wait elsewhere, or cannot be heard


@dataclass(frozen=True)
class Stop:
    """The process of a rank stops in a step (SIGSTOP): it does not end, and does nothing.

    Attributes:
        rank: whose.
        step: from 0.
        collective: before which collective of the step; None: as the step begins.
    """

    rank: int
    step: int
    collective: int | None = None


@dataclass(frozen=True)
class Detour:
    """A rank takes another branch in a step, in which it enters a collective that others do not.

    Attributes:
        rank: that does.
        step: from 0.
        collective: before which collective of the step; None: it leaves out the whole step.
        axis: over which it is, a sum of 12 bytes.
    """

    rank: int
    step: int
    collective: int | None = 0
    axis: str = EVERYWHERE


@dataclass(frozen=True)
class Cut:
    """The network of a rank is dead as a step begins: nothing comes, and nothing arrives.

    Attributes:
        rank: whose.
        step: from 0.
        spared: ports whose connections stay, such as that of the job's store.
    """

    rank: int
    step: int
    spared: tuple[int, ...] = ()


@dataclass(frozen=True)
class Garble:
    """A bit flips in what a rank sends into a collective, on its way: its own copy stays right.

    Attributes:
        rank: that sends.
        step: from 0.
        collective: which one of the step; it must send something.
        element: of what is sent, in row-major order.
        bit: from 0, the least significant one.
    """

    rank: int
    step: int
    collective: int
    element: int = 0
    bit: int = 30


@dataclass(frozen=True)
class Slow:
    """A rank takes longer for its own work in every step, from one on.

    Attributes:
        rank: that does.
        share: of the processor's time that its steps take: 0.2 makes them take a fifth more.
        step: the first one, from 0.
        how: ``"compute"`` (its processor is slow) or ``"sleep"`` (it does not run).
    """

    rank: int
    share: float
    step: int = 0
    how: str = "compute"


def hanging(
    step: Callable[[Any, Any], tuple[Any, Any]],
    faults: Sequence[Stop | Detour | Cut | Garble | Slow],
    mesh: BoundMesh,
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`step` of a run on the processes of `mesh`, into which these faults are put.

    Args:
        step: ``(state, batch) -> (state, metrics)``; the state has its number as ``step``.
        faults: of any rank.
        mesh: bound; a fault before a collective needs its recorder.

    Raises:
        ValueError: there is such a fault, and no recorder.
    """
    here, recorder = [fault for fault in faults if fault.rank == mesh.rank], mesh.recorder
    within = [x for x in here if isinstance(x, Stop | Detour | Garble)]
    within = [x for x in within if x.collective is not None]
    if within and recorder is None:
        fix = "bind the mesh with one"
        refuse("cannot put a fault within a step", "mesh.recorder", "None", "a recorder", fix)
    held: list[socket.socket] = []

    def wrapped(state: Any, batch: Any) -> tuple[Any, Any]:
        index = int(state.step)
        for fault in here:
            if isinstance(fault, Slow) or fault.step != index:
                continue
            if isinstance(fault, Cut):
                held.extend(cut_connections(fault.spared))
            elif fault.collective is not None:
                _before(mesh, fault.collective, functools.partial(_act, mesh, fault))
            elif isinstance(fault, Detour):
                return state, {"loss": torch.zeros(())}
            else:
                _act(mesh, fault)
        began = time.thread_time()
        out = step(state, batch)
        for fault in here:
            if isinstance(fault, Slow) and index >= fault.step:
                _idle(fault.share * (time.thread_time() - began), fault.how)
        return out

    return wrapped


def _act(
    mesh: BoundMesh, fault: Stop | Detour | Garble, operand: torch.Tensor | None = None
) -> None:
    """Stop this process, change what it sends, or enter a collective that nobody else does."""
    if isinstance(fault, Stop):
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    assert mesh.recorder is not None
    if isinstance(fault, Garble):
        _garble(mesh.recorder, fault, operand)
        return
    name, extra = mesh.groups.get(fault.axis), torch.zeros(3)
    with mesh.recorder.record("psum", fault.axis, extra):
        dist.all_reduce(extra, group=None if name is None else compat.group(name))


def _garble(recorder: FlightRecorder, fault: Garble, operand: torch.Tensor | None) -> None:
    if operand is None or not operand.numel():
        got = "one that sends nothing"
        refuse("cannot change what a rank sends", "collective", got, "one that sends numbers")
    flip_(operand, fault.element, fault.bit)
    if recorder.find_line(2) is None:
        return  # compiled code sends what it needs no more, or receives there
    leave = recorder.leave

    def righted() -> None:
        setattr(recorder, "leave", leave)  # noqa: B010  (of this one object)
        flip_(operand, fault.element, fault.bit)
        leave()

    setattr(recorder, "leave", righted)  # noqa: B010


def _before(mesh: BoundMesh, number: int, act: Callable[[torch.Tensor | None], None]) -> None:
    """Call `act` with what the collective of that number in the step sends, before it, once."""
    recorder = mesh.recorder
    assert recorder is not None
    enter = recorder.enter

    def diverted(*about: Any) -> Any:
        if len(recorder.sequence) == number:
            setattr(recorder, "enter", enter)  # noqa: B010  (of this one object)
            act(about[2])
        return enter(*about)

    setattr(recorder, "enter", diverted)  # noqa: B010


def _idle(seconds: float, how: str) -> None:
    """Take so much time: of the processor, or of the clock."""
    if how == "sleep":
        time.sleep(seconds)
        return
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def cut_connections(spared: Sequence[int] = ()) -> list[socket.socket]:
    """Cut this process's TCP connections, so that neither end notices: Linux only.

    Each stays open, and is read and written by nobody: what was its number is a socket that nobody
    listens to, and no event of it is reported any more.

    Args:
        spared: ports whose connections stay.

    Returns:
        The connections; closing them, as the end of the process does, tells the other ends.
    """
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    polls = [n for n in numbers if _read_link(n) == "anon_inode:[eventpoll]"]
    kept = []
    for number in numbers:
        if not _read_link(number).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(number)) as connection:
            if not _is_connection(connection, spared):
                continue
            kept.append(connection.dup())
        dead, other = socket.socketpair()
        dead.setblocking(False)
        for poll in polls:
            with select.epoll.fromfd(os.dup(poll)) as events, suppress(OSError):
                events.unregister(number)  # raises where it is not this one's
                os.dup2(dead.fileno(), number)
                events.register(number, 0)  # who changes what it waits for finds it there
        os.dup2(dead.fileno(), number)
        dead.close()
        kept.append(other)
    return kept


def _read_link(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def _is_connection(connection: socket.socket, spared: Sequence[int]) -> bool:
    """Whether this is a TCP connection to another process, and to none of these ports."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        ends = connection.getpeername()[1], connection.getsockname()[1]
    except OSError:  # it listens
        return False
    return not {*ends} & {*spared}


# --- the clock


@contextmanager
def clock_jump(seconds: float) -> Iterator[None]:
    """In a with block the machine's time of day is another one in this process: `time.time`.

    As where a clock is set, by hand or by its network. Clocks that only go forward stay, as they do
    then. What is asked of the system otherwise, such as the times of files, stays too.
    """
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + round(seconds * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = real, real_ns


# --- ends: of a process, of the room on a disk

Moment = Literal[
    "open", "restored", "step", "evaluate", "save", "write", "written", "commit", "committed"
]
"""The moments of a run; ``prepare`` and ``Run.at`` of functron/training/run.py say when each is."""


@dataclass(frozen=True)
class Kill:
    """The end of a process, by a signal that it cannot handle.

    Attributes:
        moment: when.
        rank: of the process; None: every process that comes there.
        step: at which step's; None: the first time.
        after_seconds: so long after that, wherever the process is then.
        signal: which one; SIGTERM and SIGUSR1 ask a run to leave.
    """

    moment: Moment
    rank: int | None = 0
    step: int | None = None
    after_seconds: float = 0.0
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class FullDisk:
    """A disk without room, as the system reports it to a process that writes.

    Attributes:
        rank: of the process; None: every one.
        step: whose checkpoint cannot be written; None: none can.
    """

    rank: int | None = 0
    step: int | None = None


def moments(faults: Sequence[Kill | FullDisk], rank: int = 0) -> Callable[[str, int], None]:
    """Brings these faults about, as the `at` of `functron.training.run.prepare`."""

    def at(moment: str, step: int) -> None:
        for fault in faults:
            if fault.rank not in (None, rank) or fault.step not in (None, step):
                continue
            if isinstance(fault, Kill) and moment == fault.moment:
                _kill(fault)
            if isinstance(fault, FullDisk) and moment == "write":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return at


def _kill(fault: Kill) -> None:
    if not fault.after_seconds:
        os.kill(os.getpid(), fault.signal)
        return
    timer = threading.Timer(fault.after_seconds, os.kill, (os.getpid(), fault.signal))
    timer.daemon = True
    timer.start()
