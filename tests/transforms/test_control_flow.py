"""Branches and loops against jax.lax under jax.shard_map, against dense programs, on processes."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import functron as ft
from functron import Mesh, P, lax, shard_map, tree

SHAPE = {"dp": 2, "tp": 2, "ep": 2}
ALL = ("dp", "tp", "ep")
MESH = Mesh(**SHAPE)
OURS = SimpleNamespace(
    **{name: getattr(lax, name) for name in dir(lax) if not name.startswith("_")},
    **{name: getattr(torch, name) for name in ("tanh", "sin", "exp", "log", "sqrt", "where")},
    vmap=torch.func.vmap,
    remat=ft.remat,
    none=lambda x: torch.zeros_like(x),
    arange=torch.arange,
)
THEIRS = SimpleNamespace(
    **{name: getattr(jax.lax, name) for name in dir(jax.lax) if not name.startswith("_")}
    | {name: getattr(jnp, name) for name in ("tanh", "sin", "exp", "log", "sqrt", "where")},
    vmap=jax.vmap,
    remat=jax.checkpoint,
    none=jnp.zeros_like,
    arange=jnp.arange,
)


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(before)


def random(*shape):
    return np.random.default_rng(0).normal(size=shape)


def assert_same(got, want, tol=1e-12):
    for a, b in zip(tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a.detach().numpy(), np.asarray(b), rtol=tol, atol=tol)


# ---- scalars of w [8, 16], split P(None, "tp"), and x [24, 8], split P(("dp", "ep"))


def cond_by_rank(L, w, x):
    """A branch that is not finite for ranks that do not take it."""
    y = x @ w
    first = L.axis_index(("dp", "tp")) == 1
    safe = L.where(first, L.exp(y), -1 - y * y)
    out = L.cond(first, lambda s, y: L.log(s) * L.sqrt(s), lambda s, y: L.tanh(y) * s, safe, y)
    return L.psum(out.sum(), ALL)


def cond_agreed(L, w, x):
    """All ranks take the branch, and meet in it."""
    y = x @ w
    meet = lambda y: L.tanh(L.psum(y, ALL)) * w[0]
    out = L.cond(L.psum(y.sum(), ALL) > 0, meet, lambda y: y * y * (1.0 + L.axis_index("tp")), y)
    return L.psum((out**2).sum(), ALL)


def cond_partly_agreed(L, w, x):
    """Ranks differ along dp, and meet along the others."""
    y = x @ w
    pred = L.psum(y.sum(), ("tp", "ep")) * (1.0 - 2.0 * L.axis_index("dp")) > 0
    meet = lambda y: L.tanh(L.psum(y, "tp")) * w[1]
    out = L.cond(pred, meet, lambda y: L.sin(L.all_gather(y, "ep").sum(0)), y)
    return L.psum((out * x[:, :1]).sum(), ALL)


def switch(L, w, x):
    y = x @ w
    index = L.axis_index(ALL) - 3  # below the first for some, above the last for others
    branches = [L.tanh, lambda y: y * w[2], lambda y: y**3]
    return L.psum((L.switch(index, branches, y) ** 2).sum(), ALL)


def cond_nested(L, w, x):
    y = x @ w
    inner = lambda y: L.cond(y.sum() > 0, L.sin, lambda y: y * w[0], y)
    return L.psum(L.cond(L.axis_index("dp") == 0, inner, lambda y: y**3, y).sum(), ALL)


def cond_in_vmap(L, w, x):
    """Rows take different branches."""
    row = lambda y: L.cond(y.sum() > 0, L.tanh, lambda y: y * w[0] * y, y)
    return L.psum((L.vmap(row)(x @ w) ** 2).sum(), ALL)


def cond_in_vmap_agreed(L, w, x):
    """Rows take different branches, the same on ranks that meet in them."""
    y = L.psum(x @ w, "ep")
    row = lambda y: L.cond(y.sum() > 0, lambda y: L.psum(y * x[0, 0], "ep"), L.sin, y)
    return L.psum((L.vmap(row)(y) ** 2).sum(), ("dp", "tp"))


def cond_in_scan(L, w, x):
    def step(c, row):
        c = L.cond((c * row).sum() > 0, L.sin, lambda c: c * w[0] + row, c)
        return c, c * c

    last, ys = L.scan(step, (x @ w)[0], x @ w)
    return L.psum(last.sum() + (ys * ys).sum(), ALL)


def cond_in_remat(L, w, x):
    def f(w, y):
        meet = lambda y: L.tanh(L.psum(y, "tp")) * w[0]
        return L.cond(L.psum(y.sum(), "tp") > 0, meet, lambda y: y**3, y)

    return L.psum((L.remat(f)(w, x @ w) ** 2).sum(), ALL)


def remat_in_cond(L, w, x):
    f = L.remat(lambda y: L.sin(y) * w[0])
    return L.psum(L.cond(L.axis_index("tp") == 0, f, lambda y: y**2, x @ w).sum(), ALL)


def fori(L, w, x):
    y = x @ w
    body = lambda i, c: (L.tanh(L.psum(c[0], "tp") * w[1]) + i * y, c[1] + 1)
    out, steps = L.fori_loop(1, 4, body, (y, 0))
    return L.psum((out**2).sum() * steps, ALL)


def fori_in_vmap_in_remat(L, w, x):
    row = lambda y: L.fori_loop(0, 3, lambda i, c: L.sin(c * w[0]) + i, y)
    return L.psum((L.remat(L.vmap(row))(x @ w) ** 2).sum(), ALL)


def scan_reversed(L, w, x):
    step = lambda c, row: (L.tanh(c * w[0] + row), c * row)
    last, ys = L.scan(step, w[0], x @ w, reverse=True, unroll=2)
    return L.psum((last * (1.0 + L.arange(8)) + ys).sum(), ALL)


def mapped(L, w, x):
    ys = L.map(lambda row: (row * w[0], L.tanh(L.psum(row, "ep"))), x @ w)
    return L.psum((ys[0] * ys[1]).sum(), ALL)


def mapped_by_fours(L, w, x):
    ys = L.map(lambda row: L.tanh(L.psum(row, "tp")) * w[0], x @ w, batch_size=4)
    return L.psum((ys**2).sum(), ALL)


def selected(L, w, x):
    y = x @ w
    three = L.select_n((y > 0) * 1 + (y > 1), y**2, L.sin(y), y * w[0])
    return L.psum(L.select_n(y[0] > 0, three[0], three[1] ** 2).sum() + three.sum(), ALL)


ROWS = [
    cond_by_rank, cond_agreed, cond_partly_agreed, switch, cond_nested, cond_in_vmap,
    cond_in_vmap_agreed, cond_in_scan, cond_in_remat, remat_in_cond, fori, fori_in_vmap_in_remat,
    scan_reversed, mapped, mapped_by_fours, selected,
]  # fmt: skip


def while_by_rank(L, w, x):
    """Ranks go round a different number of times."""
    more = lambda c: (c[0] ** 2).sum() > 1
    y, steps = L.while_loop(more, lambda c: (L.sin(c[0]) * w[0] / 2, c[1] + 1), (x @ w, 0))
    return L.psum((y**2).sum() * steps, ALL)


def while_agreed(L, w, x):
    y = x @ w
    more = lambda c: L.psum((c**2).sum(), ALL) > 1
    return L.psum((L.while_loop(more, lambda c: L.psum(c * y, "tp") / 9, y) ** 2).sum(), ALL)


def while_in_vmap(L, w, x):
    more = lambda c: (c**2).sum() > 1
    row = lambda y: L.while_loop(more, lambda c: L.psum(c * x[0, 0], "ep") * w[0] / 9, y)
    return L.psum((L.vmap(row)(L.psum(x @ w, "ep")) ** 2).sum(), ("dp", "tp"))


def while_counted(L, w, x):
    """A loop whose bound is a number on each rank."""
    y, bound = x @ w, L.axis_index("dp") + 2
    return L.psum((L.fori_loop(0, bound, lambda i, c: L.sin(c * w[0]) + i, y) ** 2).sum(), ALL)


LOOPS = [while_by_rank, while_agreed, while_in_vmap, while_counted]


FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def pair(program, ours=OURS):
    specs = lambda S: (S(None, "tp"), S(("dp", "ep")))
    mine = shard_map(functools.partial(program, ours), MESH, specs(P), P(), check=True)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(SHAPE))
    theirs = jax.shard_map(
        functools.partial(program, THEIRS), mesh=mesh, in_specs=specs(PartitionSpec),
        out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    w, x = random(8, 16) / 2, random(24, 8)
    given = tuple(map(torch.from_numpy, (w, x)))
    return mine, theirs, (jnp.asarray(w), jnp.asarray(x)), given


def derivatives_of(f, w, x, v):
    """By JAX: the value, gradients, a tangent and a Hessian times v."""
    gradient = jax.grad(f)
    tangent = jax.jvp(lambda w: f(w, x), (w,), (v,))[1]
    hvp = jax.grad(lambda w: (gradient(w, x) * v).sum())(w)
    return f(w, x), jax.grad(f, (0, 1))(w, x), tangent, hvp


@pytest.mark.parametrize("program", ROWS, ids=lambda f: f.__name__)
def test_derivatives_are_those_of_jax(program):
    mine, theirs, (w, x), given = pair(program)
    v, tv = jnp.cos(w), given[0].cos()
    value, gradients, tangent, hvp = jax.jit(
        functools.partial(derivatives_of, theirs), compiler_options=FAST
    )(w, x, v)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves((gradients, hvp)))
    assert_same(mine(*given), value)
    assert_same(torch.func.grad(mine, (0, 1))(*given), gradients)
    taped = [each.clone().requires_grad_() for each in given]
    mine(*taped).backward()
    assert_same([each.grad for each in taped], gradients)
    if "remat" in program.__name__:  # which has no forward mode
        mine = pair(program, SimpleNamespace(**vars(OURS) | {"remat": lambda f: f}))[0]
    assert_same(torch.func.jvp(lambda w: mine(w, given[1]), given[:1], (tv,))[1], tangent)
    once = torch.func.grad(mine)
    product = torch.func.grad(lambda w: (once(w, given[1]) * tv).sum())(given[0])
    assert_same(product, hvp, 1e-10)
    moved = torch.func.jvp(lambda w: once(w, given[1]), given[:1], (tv,))[1]
    assert_same(moved, hvp, 1e-10)


@pytest.mark.parametrize("program", LOOPS, ids=lambda f: f.__name__)
def test_loops_are_those_of_jax(program):
    mine, theirs, (w, x), given = pair(program)
    v, tv = jnp.cos(w), given[0].cos()
    want = jax.jit(lambda w: jax.jvp(lambda w: theirs(w, x), (w,), (v,)), compiler_options=FAST)(w)
    got = torch.func.jvp(lambda w: mine(w, given[1]), given[:1], (tv,))
    assert_same(got, want)
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(theirs)(w, x)
    with pytest.raises(ValueError, match=r"(while|fori)_loop at .*test_control_flow.*in reverse"):
        torch.func.grad(mine)(*given)


@pytest.mark.distributed
def test_processes_equal_simulated_ranks(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_control_flow.py"), 2)
    for check in ("derivatives", "loops", "refusals"):
        assert f"check_{check}: ok" in done.stdout
