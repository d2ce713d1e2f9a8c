"""A stand-in for torch's asynchronous collectives that shows where a program uses them too early.

Every rank is taken to hold what this process holds, so that results need no other process. A
result is poison (NaN, or the least integer) until it is waited for, and nothing but the wait may
write it; an operand may not be written from the start to the wait. Both are checked at the wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from functron import Mesh
from functron.compiler import executable as compiling
from functron.core import compat
from functron.spmd.mesh import BoundMesh


@dataclass(frozen=True, eq=False)
class Work:
    """A collective under way: its operands, what they were, and what its result will be."""

    name: str
    result: torch.Tensor
    value: torch.Tensor
    operand: torch.Tensor | None
    copy: torch.Tensor | None


@dataclass(eq=False)
class Collectives:
    """The collectives that were started, and the mistakes found.

    Attributes:
        late: results come at the wait; else at once.
        started: how often each collective was started.
        pending: what has not been waited for, by the memory of its result.
        found: offences against the contract, in words.
        events: "start" and "wait" in the order in which they came, and what a test adds.
    """

    late: bool
    events: list[str] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    pending: dict[int, Work] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)

    def start(self, name: str, x: torch.Tensor, value: torch.Tensor, out=None) -> torch.Tensor:
        """The result of a collective of `x` that gives `value`, in `out` or in new memory."""
        self.started[name] = self.started.get(name, 0) + 1
        self.events.append("start")
        value = value.clone()
        copy = None if out is x else x.clone()
        result = torch.empty_like(value) if out is None else out
        result.copy_(poison(value) if self.late else value)
        place = result.untyped_storage().data_ptr()
        if place in self.pending:
            self.found.append(f"{name}: its result is that of another under way")
        self.pending[place] = Work(name, result, value, None if out is x else x, copy)
        return result

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, with its numbers."""
        work = self.pending.pop(x.untyped_storage().data_ptr(), None)
        if work is None:
            return x
        self.events.append("wait")
        if work.operand is not None and not same(work.operand, work.copy):
            self.found.append(f"{work.name}: its operand was written before the wait")
        if not same(work.result, poison(work.value) if self.late else work.value):
            self.found.append(f"{work.name}: its result was written before the wait")
        work.result.copy_(work.value)
        return x


def poison(value: torch.Tensor) -> torch.Tensor:
    """NaN, or the least integer, in the shape of `value`."""
    worst = float("nan") if value.is_floating_point() else torch.iinfo(value.dtype).min
    return torch.full_like(value, worst)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    one, other = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(one, other)


@contextlib.contextmanager
def collectives(*, late: bool) -> Iterator[Collectives]:
    """Inside this with block, functional collectives of tensors on CPUs are the stand-in's."""
    made = Collectives(late)
    library = torch.library.Library("_c10d_functional", "IMPL")

    def reduced(x, operation, group):
        return x * compat.group(group).size() if operation == "sum" else x

    def scattered(x, size):
        return (x * size).chunk(size)[0]

    def all_reduce(x, operation, group):
        return made.start("all_reduce", x, reduced(x, operation, group))

    def all_reduce_(x, operation, group):
        return made.start("all_reduce_", x, reduced(x, operation, group), x)

    def all_gather(x, size, group):
        return made.start("all_gather_into_tensor", x, torch.cat([x] * size))

    def all_gather_out(x, size, group, *, out):
        return made.start("all_gather_into_tensor_out", x, torch.cat([x] * size), out)

    def reduce_scatter(x, operation, size, group):
        return made.start("reduce_scatter_tensor", x, scattered(x, size))

    def reduce_scatter_out(x, operation, size, group, *, out):
        return made.start("reduce_scatter_tensor_out", x, scattered(x, size), out)

    def all_to_all(x, outputs: Sequence[int], inputs: Sequence[int], group):
        return made.start("all_to_all_single", x, torch.cat([x[:rows] for rows in outputs]))

    def many(start):
        return lambda xs, *rest: [start(x, *rest) for x in xs]

    for name, function in {
        "all_reduce": all_reduce,
        "all_reduce_": all_reduce_,
        "all_reduce_coalesced": many(all_reduce),
        "all_reduce_coalesced_": many(all_reduce_),
        "all_gather_into_tensor": all_gather,
        "all_gather_into_tensor_out": all_gather_out,
        "all_gather_into_tensor_coalesced": many(all_gather),
        "reduce_scatter_tensor": reduce_scatter,
        "reduce_scatter_tensor_out": reduce_scatter_out,
        "reduce_scatter_tensor_coalesced": many(reduce_scatter),
        "all_to_all_single": all_to_all,
        "wait_tensor": made.wait,
    }.items():
        library.impl(name, function, "CPU")
    try:
        yield made
    finally:
        library._destroy()


@contextlib.contextmanager
def lone(mesh: Mesh, monkeypatch) -> Iterator[BoundMesh]:
    """The mesh, bound in this process alone, which is rank 0; no other rank has to agree."""
    monkeypatch.setattr(compiling, "check_agreement", lambda program, mesh: None)
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    try:
        yield mesh.bind()
    finally:
        dist.destroy_process_group()
