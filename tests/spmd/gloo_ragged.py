"""Run by test_ragged.py under torchrun with 4 processes: the ragged all-to-all against simulation."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import functron as ft
from functron import Mesh, P, lax
from functron.spmd import ragged
from functron.spmd import spec as sharding

MESH = Mesh(ep=2, tp=2)
EVERY = P(("ep", "tp"))
AXES = {"ep": 2, "tp": 2, ("ep", "tp"): 4, ("tp", "ep"): 4}
ROWS = 5
generator = torch.Generator().manual_seed(0)


def arguments(parts):
    targets = torch.randint(0, parts + 1, (4, ROWS), generator=generator)
    sizes = torch.stack([(targets == part).sum(1) for part in range(parts)], 1).reshape(-1)
    return torch.randn(4 * ROWS, 3, generator=generator, dtype=torch.float64), sizes


def step(axes, capacity, room=0):
    def local(x, sizes):
        def loss(x):
            rows, got = lax.ragged_all_to_all(x, sizes, axes, capacity=capacity, room=room)
            weight = torch.arange(capacity, dtype=x.dtype).unsqueeze(1)
            return lax.psum((rows.sin() * weight).sum(), ("ep", "tp")), (rows, got)

        (value, (rows, got)), gradient = ft.value_and_grad(loss, has_aux=True)(x)
        return value, rows, got, gradient

    return local


def compare(run, axes, parts, bound, room=0):
    args = arguments(parts)
    specs = (P(), EVERY, EVERY, EVERY)
    local = step(axes, parts * ROWS, room)
    want = ft.shard_map(local, MESH, EVERY, specs)(*args)
    mine = [sharding.shard(x, EVERY, MESH, bound.coordinate) for x in args]
    got = run(ft.shard_map(local, bound, EVERY, specs))(*mine)
    for a, b, spec in zip(got, want, specs, strict=True):
        part = sharding.shard(b, spec, MESH, bound.coordinate)
        torch.testing.assert_close(a, part, rtol=1e-12, atol=1e-12)


class HostReads(TorchDispatchMode):
    """Counts how often the host reads a number of a tensor, as it would have to wait on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def counted(reads):
    """Runs a function, and adds to `reads` how often the host read."""

    def run(f):
        def call(*args):
            with pytest.MonkeyPatch.context() as patch, HostReads() as mode:
                real = torch.Tensor.tolist

                def tolist(x):
                    mode.count += 1
                    return real(x)

                patch.setattr(torch.Tensor, "tolist", tolist)
                out = f(*args)
            reads.append(mode.count)
            return out

        return call

    return run


def check_values(bound):
    for axes, parts in AXES.items():
        reads = []
        compare(counted(reads), axes, parts, bound)
        # once for each axis forward, not at all backward; never with a bound, on GPUs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ragged, "_should_pad", lambda x, axis: True)
            compare(counted(reads), axes, parts, bound, room=ROWS)
        assert reads == [1 if isinstance(axes, str) else 2, 0], reads


def check_compiled(bound):
    compare(functools.partial(ft.jit, backend="eager"), ("ep", "tp"), 4, bound, room=ROWS)


def check_inductor(bound):
    compare(ft.jit, ("ep", "tp"), 4, bound)


def check_refusal(bound):
    x, sizes = torch.ones(4, 1), torch.tensor([2, 2])
    local = lambda x, sizes: lax.ragged_all_to_all(x, sizes, "ep", capacity=3)[0]
    with pytest.raises(ValueError, match="got 4 rows for capacity=3"):
        ft.shard_map(local, bound, (P(), P()), P("ep"))(x, sizes)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = MESH.bind()
    checks = {"values": check_values, "refusal": check_refusal, "compiled": check_compiled}
    for name in sys.argv[1:]:
        {**checks, "inductor": check_inductor}[name](mesh)
        if mesh.rank == 0:
            print(f"{name}: ok", flush=True)
    dist.destroy_process_group()
