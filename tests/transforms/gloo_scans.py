"""Run by test_associative_scan.py with 2 processes: scans over ranks and slices at their indices.

The oracle is a loop over the whole sequence on this process, and torch's tape through it.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.func import jvp, vmap

import functron as ft
from functron import Mesh, P, lax, tree

torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(0)
ROWS = P(None, "cp")


def compare(got, want, specs, bound):
    """This rank's part of what one process has, in `want`."""
    mine = ft.shard(want, specs, bound)
    for a, b in zip(tree.leaves(got), tree.leaves(mine), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def loop(fn, x, reverse):
    """All prefixes of the sequences in dim 1."""
    rows = x.unbind(1)[:: -1 if reverse else 1]
    made = [rows[0]]
    for row in rows[1:]:
        made.append(fn(made[-1], row))
    return torch.stack(made[:: -1 if reverse else 1], 1)


def derive(scan, reduce, synchronised, x, v):
    """Values, gradients, and products with the Hessian by both modes."""
    loss = lambda x: reduce(scan(x).sin().sum())
    first = ft.grad(loss)
    second = ft.grad(lambda x: reduce((first(x) * v).sum()))(x)
    return scan(x), *synchronised((first(x), second, jvp(first, (x,), (v,))[1]))


def check_scans(bound):
    x, v = torch.rand(2, 4, 2, 2, generator=generator), torch.rand(2, 4, 2, 2, generator=generator)
    in_turn = lambda scan: lambda x: ft.scan(lambda c, row: (c, scan(row)), x, x)[1]
    parallel = lambda a, b: b / (1.0 + b / a)
    compiled = functools.partial(ft.jit, backend="eager")
    cases = ((torch.matmul, False, vmap, compiled), (parallel, True, in_turn, lambda run: run))
    for fn, reverse, mapped, run in cases:
        want = derive(lambda x: loop(fn, x, reverse), lambda y: y, lambda g: g, x, v)  # noqa: B023
        program = functools.partial(
            derive,
            mapped(lambda x: lax.associative_scan(fn, x, reverse, ("cp", 0))),  # noqa: B023
            lambda y: lax.psum(y, "cp"),
            lambda grads: ft.sync_gradients(grads, (ROWS,) * 3),
        )
        run = run(ft.shard_map(program, bound, (ROWS, ROWS), ROWS))
        compare(run(*ft.shard((x, v), (ROWS, ROWS), bound)), want, ROWS, bound)


def check_slices(bound):
    """Each rank reads and writes at places of its own, ints eagerly and tensors in a trace."""
    x, u = torch.randn(5, 3, generator=generator), torch.randn(2, 3, generator=generator)

    def one(x, u, index):
        row = lax.dynamic_slice_in_dim(x, 2 * index - 1, 2)
        return lax.dynamic_update_slice_in_dim(x, row * u, index + 3, 0)

    def whole(x, u):
        return sum((one(x, u, torch.tensor(rank)) ** 3).sum() for rank in range(2))

    def program(x, u):
        loss = lambda *both: lax.psum((one(*both, lax.axis_index("cp")) ** 3).sum(), "cp")
        value, grads = ft.value_and_grad(loss, (0, 1))(x, u)
        return value, ft.sync_gradients(grads, P())

    taped = [value.clone().requires_grad_() for value in (x, u)]
    total = whole(*taped)
    want = total.detach(), torch.autograd.grad(total, taped)
    program = ft.shard_map(program, bound, (P(), P()), P())
    for run in (program, ft.jit(program, backend="eager")):
        compare(run(x, u), want, P(), bound)


def check_no_steps(bound):
    """Shapes follow from the body, which communicates with nobody where it does not run."""
    step = lambda c, row: (c, (lax.psum(row, "cp") * c[0], lax.all_gather(c, "cp")))
    scan = lambda c, x: ft.scan(step, c, x)[1]
    loss = lambda c, x: sum(y.sum() for y in scan(c, x))
    for run in (lambda f: f, functools.partial(ft.jit, backend="eager")):
        mapped = run(ft.shard_map(scan, bound, (P("cp"), P()), (P(), P()), check=False))
        shapes = [tuple(y.shape) for y in mapped(torch.ones(3), torch.ones(0, 5))]
        assert shapes == [(0, 5), (0, 2, 3)]
        grad = run(ft.shard_map(ft.grad(loss), bound, (P("cp"), P()), P("cp"), check=False))
        assert grad(torch.ones(3), torch.ones(0, 5)).tolist() == [0.0, 0.0, 0.0]


def check_refusals(bound):
    """Before the first collective."""
    for fn, elems, message in (
        (torch.add, {"a": torch.ones(2), "b": torch.ones(3)}, "elems/b: got shape"),
        (lambda a, b: a, torch.ones(()), r"got shape \(\) and axis=0"),
    ):
        scan = lambda x: lax.associative_scan(fn, x, axis=("cp", 0))  # noqa: B023
        with pytest.raises(ValueError, match=message):
            ft.shard_map(scan, bound, P(), P("cp"), check=False)(elems)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = Mesh(cp=2).bind()
    for check in (check_scans, check_slices, check_no_steps, check_refusals):
        check(mesh)
        if mesh.rank == 0:
            print(f"{check.__name__}: ok", flush=True)
    dist.destroy_process_group()
