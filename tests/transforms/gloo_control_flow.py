"""Run by test_control_flow.py in 2 processes: branches and loops on processes and simulated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, lax, tree
from tests.transforms.implicit_programs import OURS, derive

torch.set_default_dtype(torch.float64)
MESH = Mesh(tp=2)
S = P("tp")


def choose(x, w):
    """Ranks take different branches, one of which is not finite for the other rank."""
    fall = lambda x: torch.log(x.sum()) * w
    return lax.psum(lax.cond(x.sum() > 0, fall, lambda x: x[0] * w.exp(), x), "tp")


def agree(x, w):
    """All ranks take the same branch, and meet in it."""
    pred = lax.psum(x.sum(), "tp") > 0
    meet = lambda x: lax.psum(torch.sin(x * w), "tp").sum() * (1 + lax.axis_index("tp"))
    return lax.psum(lax.cond(pred, meet, lambda x: lax.psum(x, "tp").sum() * w, x), "tp")


def pick(x, w):
    branches = [torch.sin, lambda x: x * w, lambda x: x**3 * w]
    return lax.psum(lax.switch(2 * lax.axis_index("tp"), branches, x).sum(), "tp")


def count(x, w):
    body = lambda i, c: lax.psum(c * w, "tp") * torch.sin(x + i)
    return lax.psum(lax.fori_loop(0, 3, body, x).sum(), "tp")


def each(x, w):
    """Rows of a vmap take different branches, on each rank."""
    row = lambda x: lax.cond(x > 0, torch.sqrt, lambda x: w * x, x)
    return lax.psum(torch.func.vmap(row)(x).sum(), "tp")


def halve(x, w):
    """Ranks go round a different number of times."""
    size, steps = lax.while_loop(
        lambda c: c[0].abs().sum() > 1, lambda c: (c[0] / 2 * w, c[1] + 1), (x, 0)
    )
    return lax.psum(size.sum(), "tp") + lax.psum(steps, "tp")


def meet(x, w):
    """Ranks go round together, and meet in each step."""
    more = lambda c: lax.psum(c.abs().sum(), "tp") > 1
    return lax.psum(lax.while_loop(more, lambda c: lax.psum(c, "tp") / 5 * w, x).sum(), "tp")


x, w = torch.tensor([[2.0, -0.5, 3.0], [-7.0, 4.0, -20.0]]).view(6), torch.tensor(0.7)


def shard(value, bound):
    return ft.shard(value, S, bound)


def compare(got, want):
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert a.isfinite().all()


def check_derivatives(bound):
    mine = shard(x, bound)
    for program in (choose, agree, pick, count, each):
        own, one = (ft.shard_map(program, mesh, (S, P()), P()) for mesh in (bound, MESH))
        compare(own(mine, w), one(x, w))
        got, want = (torch.func.grad(f, (0, 1))(a, w) for f, a in ((own, mine), (one, x)))
        compare(got, (shard(want[0], bound), want[1]))
        twice = [torch.func.grad(lambda w, f=f, a=a: torch.func.grad(f)(a, w).pow(2).sum())(w)
                 for f, a in ((own, mine), (one, x))]  # fmt: skip
        compare(*twice)
        moved = [torch.func.jvp(lambda w, f=f, a=a: f(a, w), (w,), (torch.ones(()),))[1]
                 for f, a in ((own, mine), (one, x))]  # fmt: skip
        compare(*moved)
        taped = mine.clone().requires_grad_()
        own(taped, w).backward()
        compare(taped.grad, got[0])


def check_loops(bound):
    mine = shard(x, bound)
    for program in (halve, meet):
        own, one = (ft.shard_map(program, mesh, (S, P()), P()) for mesh in (bound, MESH))
        compare(own(mine, w), one(x, w))
        moved = [torch.func.jvp(lambda w, f=f, a=a: f(a, w), (w,), (torch.ones(()),))[1]
                 for f, a in ((own, mine), (one, x))]  # fmt: skip
        compare(*moved)
        with pytest.raises(ValueError, match=r"while_loop at .*gloo_control_flow.*in reverse"):
            torch.func.grad(own)(mine, w)
    either = lambda x, w: lax.cond(w > 9, lambda w: halve(x, w), lambda w: w, w)
    with pytest.raises(ValueError, match=r"while_loop at .*gloo_control_flow.*in reverse"):
        ft.shard_map(ft.grad(either, 1), bound, (S, P()), P(), check=False)(mine, w)


def check_equations(bound):
    """Solutions, and what is mapped, of ranks that hold other parts."""
    w = torch.linspace(-0.5, 0.5, 9).view(3, 3)
    scales, v = torch.tensor([0.3, -0.9]), (w.T, x[:3])
    for name in ("between_ranks", "shared_system"):

        def program(w, x, name=name):
            found = derive(OURS, name, "vmap", False, w, x, scales, v)
            return tree.map(lambda y: y[None], found)

        own, one = (ft.shard_map(program, mesh, P(), S, check=False) for mesh in (bound, MESH))
        compare(own(w, x[:3]), shard(one(w, x[:3]), bound))

    def mapped(x, w):
        row = lambda x, y: lax.psum(lax.cumprod(lax.cummax(x * y), reverse=True), "tp")
        rows = ft.vmap(row, (0, None), -1)(x.view(3, 1) * torch.ones(3), lax.clamp(0.0, x, w))
        return lax.optimization_barrier(rows).sum()

    own, one = (ft.shard_map(ft.value_and_grad(mapped), mesh, (S, P()), (P(), S))
                for mesh in (bound, MESH))  # fmt: skip
    compare(own(shard(x, bound), w[2, 2]), (lambda y, g: (y, shard(g, bound)))(*one(x, w[2, 2])))


def check_refusals(bound):
    """Of a program that would hang, no rank waits."""
    mine = shard(x, bound)
    alone = lambda x: lax.psum(x, "tp")
    for program in (
        lambda x, w: lax.cond(x.sum() > 0, alone, lambda x: x, x),
        lambda x, w: lax.switch(lax.axis_index("tp"), [alone, torch.sin], x),
        lambda x, w: lax.while_loop(lambda c: c.sum() > 0, alone, x),
        lambda x, w: lax.while_loop(
            lambda c: lax.psum(c, "tp").sum() + c[0] > 0, lambda c: c / 2, x
        ),
    ):
        with pytest.raises(
            ValueError, match=r"psum over 'tp': got a collective that ranks.*not all"
        ):
            ft.shard_map(program, bound, (S, P()), S)(mine, w)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    bound = MESH.bind()
    for check in (check_derivatives, check_loops, check_equations, check_refusals):
        check(bound)
        if dist.get_rank() == 0:
            print(f"{check.__name__}: ok", flush=True)
    dist.destroy_process_group()
