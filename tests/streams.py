"""Streams that run at once what they are given, and raise where a GPU could run it in a wrong order.

Every access to memory that came from `RecordedStreams` must be ordered, by events, streams or the
host's waiting, with each earlier one to the same bytes of which one writes. So vector clocks have
it: an access happens after another if its clock has reached the other's tick.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from functron.spmd.shared_memory import Streams

Clock = dict[str, int]


def _later(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        clock[name] = max(clock.get(name, 0), tick)


@dataclass
class Operation:
    stream: str
    name: str
    clock: Clock
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]

    def after(self, other: Operation) -> bool:
        return self.clock.get(other.stream, 0) >= other.clock[other.stream]


@dataclass
class Event:
    host: Clock
    clock: Clock

    def synchronize(self) -> None:
        _later(self.host, self.clock)


@dataclass
class Stream:
    name: str
    host: Clock
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> Event:
        return Event(self.host, dict(self.clock))

    def wait_event(self, event: Event) -> None:
        _later(self.clock, event.clock)

    def synchronize(self) -> None:
        _later(self.host, self.clock)


class RecordedStreams(Streams):
    """Inside ``with streams.watching():`` what torch computes belongs to the stream "compute"."""

    def __init__(self) -> None:
        self.log: list[Operation] = []
        self.host: Clock = {}
        self.streams = {"compute": Stream("compute", self.host)}
        self.near: list[torch.Tensor] = []  # what `empty` and `pinned` gave
        self.far: list[torch.Tensor] = []

    def on_device(self, tensor):
        if tensor.is_meta:
            return False
        at = tensor.untyped_storage().data_ptr()
        return at not in {memory.data_ptr() for memory in self.far}

    def current(self, device):
        return self.streams["compute"]

    def new(self, device):
        name = str(len(self.streams))
        return self.streams.setdefault(name, Stream(name, self.host))

    def copy_(self, stream, target, source):
        self.run(stream, "copy", [source], [target])
        with _Off():
            target.copy_(source)

    def empty(self, nbytes, device):
        self.near.append(torch.full((nbytes,), 0xA5, dtype=torch.uint8))
        return self.near[-1]

    def current_device(self):
        return 3 if threading.current_thread() is threading.main_thread() else 0

    def pinned(self, nbytes, device):
        self.far.append(torch.full((nbytes,), 0xA5, dtype=torch.uint8))
        return self.far[-1]

    def run(self, stream: Stream, name: str, reads: Iterable, writes: Iterable) -> None:
        _later(stream.clock, self.host)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        now = Operation(stream.name, name, dict(stream.clock), _spans(reads), _spans(writes))
        for before in self.log:
            if before.stream != now.stream and not now.after(before):
                for mine, theirs in ((now.writes, before.writes), (now.writes, before.reads),
                                     (now.reads, before.writes)):  # fmt: skip
                    clash = any(a < d and c < b for a, b in mine for c, d in theirs)
                    assert not clash, f"{now} is not ordered with {before}"
        self.log.append(now)

    def read_by_host(self, tensor: torch.Tensor) -> None:
        """See that what wrote these bytes is over."""
        self.run(Stream("host", self.host, self.host), "read", [tensor], [])

    def watching(self) -> TorchDispatchMode:
        return _Watch(self)


def _spans(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    found = []
    for x in tensors:
        extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        if x.numel():
            found.append((x.data_ptr(), x.data_ptr() + extent * x.element_size()))
    return found


class _Off(TorchDispatchMode):
    """Hides what it sees from a `_Watch` around it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with _disable_current_modes():
            return func(*args, **kwargs or {})


class _Watch(TorchDispatchMode):
    def __init__(self, streams: RecordedStreams):
        super().__init__()
        self.seen = streams

    def __torch_dispatch__(self, func: Any, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "aten" and not func.is_view:
            reads, writes = [], []
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                into = argument.alias_info is not None and argument.alias_info.is_write
                for x in tree_leaves(given.get(argument.name)):
                    if isinstance(x, torch.Tensor) and self._known(x):
                        (writes if into else reads).append(x)
            if reads or writes:
                self.seen.run(self.seen.streams["compute"], str(func), reads, writes)
        return func(*args, **kwargs)

    def _known(self, x: torch.Tensor) -> bool:
        if x.is_meta:
            return False
        at = x.untyped_storage().data_ptr()
        return any(at == m.data_ptr() for m in (*self.seen.near, *self.seen.far))
