"""Run by test_shared_memory.py under torchrun with 4 processes: collectives through shared memory."""

from __future__ import annotations

import os
import sys
import time
from functools import reduce

import pytest
import torch
import torch.distributed as dist

from functron import Mesh
from functron.core import compat
from functron.spmd import shared_memory

_c10d = torch.ops._c10d_functional
wait = _c10d.wait_tensor
REDUCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def operands(numel, dtype, ranks):
    generator = torch.Generator().manual_seed(numel)
    return [(torch.randn(numel, generator=generator) * 10).to(dtype) for _ in range(ranks)]


def check_values(mesh):
    """Collectives of all ranks' operands, added in the order of ranks, to the bit.

    The longest are of more pieces than a ring has room for.
    """
    for bound, axis in ((mesh, "dp"), (mesh, "tp"), (Mesh(fsdp=4).bind(), "fsdp")):
        name, ranks, me = bound.groups[axis], bound[axis], bound.coordinate[axis]
        assert isinstance(compat.find_group(name), shared_memory.HostGroup)
        for numel in (4, 516, 2_500_000):
            for dtype in shared_memory._DTYPES if numel == 516 else (torch.float32,):
                every = operands(numel, dtype, ranks)
                mine = every[me]
                for operation in REDUCTIONS if numel < 1000 else ("sum",):
                    got = wait(_c10d.all_reduce(mine, operation, name))
                    want = reduce(REDUCTIONS[operation], every)
                    torch.testing.assert_close(got, want, rtol=0, atol=0)
                got = wait(_c10d.all_gather_into_tensor(mine, ranks, name))
                torch.testing.assert_close(got, torch.cat(every), rtol=0, atol=0)
                got = wait(_c10d.reduce_scatter_tensor(mine, "sum", ranks, name))
                want = reduce(torch.add, every).chunk(ranks)[me]
                torch.testing.assert_close(got, want, rtol=0, atol=0)


def check_layouts(mesh):
    """Operands and results that do not lie in a row, and empty ones."""
    name, rank = mesh.groups["dp"], mesh.coordinate["dp"]
    x = torch.arange(12.0).view(3, 4)
    got = wait(_c10d.all_reduce((x * (rank + 1)).T, "sum", name))
    torch.testing.assert_close(got, 3 * x.T)
    y = (x * (rank + 1)).T
    wait(_c10d.all_reduce_(y, "sum", name))
    torch.testing.assert_close(y, 3 * x.T)
    assert wait(_c10d.all_reduce(torch.ones(0), "sum", name)).shape == (0,)


def check_others(mesh):
    """Gloo does what does not go through memory."""
    name, rank = mesh.groups["dp"], mesh.coordinate["dp"]
    group = compat.group(name)
    assert wait(_c10d.all_reduce(torch.tensor([rank == 1]), "max", name)).item()
    got = wait(_c10d.all_to_all_single(torch.arange(2.0) + 10 * rank, [1, 1], [1, 1], name))
    assert got.tolist() == [rank, 10 + rank]
    assert wait(_c10d.broadcast(torch.full((2,), rank), 0, name)).tolist() == [0, 0]
    found = [None, None]
    dist.all_gather_object(found, f"of {rank}", group=group)
    assert found == ["of 0", "of 1"]


def check_orders(mesh):
    """Ranks wait for axes in different orders, with more under way than rings have room for."""
    x = torch.arange(2_000_000, dtype=torch.float32)
    begun = {
        axis: [_c10d.all_reduce(x + i, "sum", mesh.groups[axis]) for i in range(3)]
        for axis in ("dp", "tp")
    }
    for axis in ("dp", "tp") if mesh.rank in (0, 3) else ("tp", "dp"):
        for i, value in enumerate(begun[axis]):
            assert torch.equal(wait(value), 2 * (x + i))


def check_transfers(mesh):
    """Ranks send one another more than rings have room for, before any of them waits."""
    name, me = mesh.groups["dp"], mesh.coordinate["dp"]
    group = compat.find_group(name)
    assert isinstance(group, shared_memory.HostGroup)
    sizes = (5, 700_000, 300_000)
    works = [group.isend(torch.full((n,), float(n + me)), 1 - me) for n in sizes]
    dist.barrier(group=compat.group(name))  # waits, and does not go on with them
    got = [torch.zeros(n) for n in sizes]
    works += [group.irecv(x, 1 - me) for x in got]
    works += [group.isend(torch.tensor([bool(me)]), 1 - me)]  # by gloo
    flag = torch.tensor([False])
    works += [group.irecv(flag, 1 - me)]
    for work in works:
        work.wait()
    assert all(
        torch.equal(x, torch.full((n,), n + 1.0 - me)) for x, n in zip(got, sizes, strict=True)
    )
    assert flag.item() is (me == 0)


def check_busy(mesh):
    """A rank that waits elsewhere goes on with what it entered, which others wait for."""
    x = torch.arange(3_000_000, dtype=torch.float32)
    begun = _c10d.all_reduce(x, "sum", mesh.groups["tp"])
    if mesh.rank == 0:
        dist.barrier()
    assert torch.equal(wait(begun), 2 * x)
    if mesh.rank != 0:
        dist.barrier()


def check_mismatch(mesh):
    """Ranks that are in different collectives are told both."""
    if mesh.coordinate["dp"] == 0:
        return
    name, me = mesh.groups["tp"], mesh.coordinate["tp"]
    kinds = ["psum of 6 x float32", "psum of 8 x float32"]
    with pytest.raises(shared_memory.HostError) as told:
        wait(_c10d.all_reduce(torch.ones(6 + 2 * me), "sum", name))
    want = f"rank {me} of the axis is in {kinds[me]}, rank {1 - me} in {kinds[1 - me]}"
    assert str(told.value) == want
    with pytest.raises(shared_memory.HostError):  # for good
        wait(_c10d.all_reduce(torch.ones(2), "sum", name))


def check_late(mesh):
    """Who does not come in time is named, and so is who has ended."""
    mesh = Mesh(dp=4).bind(timeout_seconds=0.6)
    name = mesh.groups["dp"]
    if mesh.rank in (1, 2):
        time.sleep(1.2)
        os._exit(0)
    if mesh.rank == 3:
        time.sleep(1.6)
    begun = time.monotonic()
    with pytest.raises(shared_memory.HostError) as told:
        wait(_c10d.all_reduce(torch.ones(5), "sum", name))
    late = ["ranks 1, 2, 3 did not come to psum of 5 x float32 for 0.6 s"]
    late.append("ranks 1, 2 of the axis ended before psum of 5 x float32")
    assert str(told.value) == late[mesh.rank == 3]
    assert mesh.rank == 0 or time.monotonic() - begun < 0.5


if __name__ == "__main__":
    dist.init_process_group("gloo")
    both = Mesh(dp=2, tp=2).bind()
    for check in sys.argv[1:]:
        globals()[f"check_{check}"](both)
        print(f"{check} on {both.rank}: ok", flush=True)
