"""Run by test_context.py under torchrun with 4 processes: bound attention against simulated."""

from __future__ import annotations

import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, lax
from functron.nn.context import context_attention, to_balanced, to_contiguous
from functron.spmd import spec as sharding
from tests.ranks import on_the_first

STREAM = P(None, ("cp", "ulysses"))
SPECS = (STREAM, STREAM, STREAM, P(), STREAM)
CASES = (
    (Mesh(cp=4), ({}, {"balanced": True, "plain": True})),
    (Mesh(cp=2, ulysses=2), ({"kind": "gather", "window": 5}, {"balanced": True, "window": 5})),
)


def step(mesh, options):
    """Value, gradients and a Hessian-vector product of attention in the balanced order."""

    plain = options.get("plain", False)

    def loss(q, k, v, sinks, segments):
        rest = {name: option for name, option in options.items() if name != "plain"}
        if options.get("balanced"):
            q, k, v, segments = (to_balanced(x, 1) for x in (q, k, v, segments))
        if not plain:
            rest.update(sinks=sinks, segments=segments)
        out = context_attention(q, k, v, **rest)
        out = to_contiguous(out, 1) if options.get("balanced") else out
        return lax.psum(out.sin().square().sum(), ("cp", "ulysses"))

    def program(*args):
        moving = (0, 1, 2, 3)
        value, grads = ft.value_and_grad(ft.remat(loss), moving)(*args)

        def along(*moved):
            inner = ft.grad(loss, moving)(*moved, args[4])
            shares = [(g * x.detach().cos()).sum() for g, x in zip(inner, moved, strict=True)]
            return lax.psum(sum(shares), ("cp", "ulysses"))

        second = ft.grad(along, moving)(*args[:4])
        sync = [ft.sync_gradients(g, SPECS[:4]) for g in (grads, second)]
        return value, *sync

    simulated = isinstance(mesh, Mesh)  # it is checked there
    return ft.shard_map(program, mesh, SPECS, (P(), SPECS[:4], SPECS[:4]), check=simulated)


def check(mesh: Mesh, cases: tuple[dict, ...]) -> None:
    """Processes compute their parts of the simulation's results."""
    bound = mesh.bind()
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    q, k, v = randn(2, 16, 4, 4), randn(2, 16, 2, 4), randn(2, 16, 2, 4)
    segments = torch.arange(16).expand(2, -1) // 7
    args = (q, k, v, randn(4), segments)
    for options in cases:
        want = on_the_first(lambda options=options: step(mesh, options)(*args))
        got = step(bound, options)(*ft.shard(args, SPECS, bound))
        torch.testing.assert_close(got[0], want[0], rtol=1e-11, atol=1e-11)
        for mine, whole in zip(got[1:], want[1:], strict=True):
            for a, b, spec in zip(mine, whole, SPECS, strict=False):
                part = sharding.shard(b, spec, mesh, bound.coordinate)
                torch.testing.assert_close(a, part, rtol=1e-11, atol=1e-11)
    if dist.get_rank() == 0:
        print(f"{mesh}: ok", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for mesh, cases in CASES:
        check(mesh, cases)
    dist.destroy_process_group()
