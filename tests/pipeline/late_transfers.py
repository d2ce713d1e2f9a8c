"""A stand-in for torch's point-to-point transfers that carries numbers as late as it may.

What is sent is read when its receiver waits for it, out of the very tensor that was sent: whoever
writes to it before, or lets go of it, makes the other side wrong. What is received is poison (NaN,
or the least integer) until it is waited for, and nothing but the wait may write it. Offences are
noted as well. It runs on real processes: each answers the others' waits from threads of its own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.compiler.late_collectives import poison, same

END = -1
PATIENCE = 120.0  # seconds in which whatever is sent is waited for


class Leaving:
    """A tensor that was sent, as the `dist.Work` of its transfer; not kept alive."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.copy = weakref.ref(tensor), tensor.clone()
        self.left = threading.Event()

    def wait(self) -> None:
        assert self.left.wait(PATIENCE), "nobody has waited for what was sent"

    def is_completed(self) -> bool:
        return self.left.is_set()


class Arriving:
    """A tensor that is being received, as the `dist.Work` of its transfer."""

    def __init__(self, transfers: Transfers, tensor: torch.Tensor, source: int, number: int):
        self.transfers, self.tensor, self.source, self.number = transfers, tensor, source, number
        self.tensor.copy_(poison(tensor))
        self.here = False

    def wait(self) -> None:
        if not self.here:
            if not same(self.tensor, poison(self.tensor)):
                self.transfers.found.append("a result was written before the wait")
            self.tensor.copy_(self.transfers.fetch(self.tensor, self.source, self.number))
            self.here = True

    def is_completed(self) -> bool:
        return self.here


class Transfers:
    """The transfers between this process and the others; every process makes one.

    Attributes:
        started: how many tensors were sent to, and received from, each rank.
        found: offences against the contract, in words.
    """

    def __init__(self):
        self.started: Counter = Counter()
        self.found: list[str] = []
        self._leaving: dict[tuple[int, int], Leaving] = {}
        self._changed = threading.Condition()
        self._asking, self._answering = dist.new_group(), dist.new_group()
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        self._threads = {
            rank: threading.Thread(target=self._answer, args=(rank,), daemon=True)
            for rank in others
        }
        for thread in self._threads.values():
            thread.start()

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None) -> Leaving:
        """In place of `dist.isend`."""
        leaving = Leaving(tensor)
        with self._changed:
            self._leaving[self._next("to", group, group_dst)] = leaving
            self._changed.notify_all()
        return leaving

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None) -> Any:
        """In place of `dist.irecv`."""
        return Arriving(self, tensor, *self._next("from", group, group_src))

    def fetch(self, like: torch.Tensor, source: int, number: int) -> torch.Tensor:
        """The tensor that a rank sent, as it is there now."""
        dist.send(torch.tensor(number), source, group=self._asking)
        value = torch.empty_like(like)
        dist.recv(value, source, group=self._answering)
        return value

    def held(self) -> threading.Condition:
        """In a with block: nobody is answered what begins to be sent there."""
        return self._changed

    def end(self) -> None:
        """End the threads, on every process at the same point."""
        for rank in self._threads:
            dist.send(torch.tensor(END), rank, group=self._asking)
        for thread in self._threads.values():
            thread.join()

    def _next(self, way: str, group: Any, peer: int) -> tuple[int, int]:
        rank = dist.get_global_rank(group, peer)
        self.started[way, rank] += 1
        return rank, self.started[way, rank]

    def _answer(self, rank: int) -> None:
        asked = torch.tensor(0)
        while True:
            dist.recv(asked, rank, group=self._asking)
            if asked == END:
                return
            key = rank, int(asked)
            with self._changed:
                self._changed.wait_for(lambda key=key: key in self._leaving)
                leaving = self._leaving.pop(key)
            tensor = leaving.tensor()
            if tensor is None:
                self.found.append("an operand was let go before the wait")
                tensor = poison(leaving.copy)
            elif not same(tensor, leaving.copy):
                self.found.append("an operand was written before the wait")
            dist.send(tensor.detach(), rank, group=self._answering)
            leaving.left.set()


@contextlib.contextmanager
def transfers() -> Iterator[Transfers]:
    """Inside this with block, `dist.isend` and `dist.irecv` are the stand-in's; on all processes."""
    made, real = Transfers(), (dist.isend, dist.irecv)
    dist.isend, dist.irecv = made.isend, made.irecv
    try:
        yield made
        made.end()
    finally:
        dist.isend, dist.irecv = real
