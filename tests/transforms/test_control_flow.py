"""Branches and loops against jax.lax under jax.shard_map, against dense programs, on processes."""

from __future__ import annotations

import doctest
import functools
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import PartitionSpec
from torch.fx.experimental.proxy_tensor import make_fx

import functron as ft
from functron import Mesh, P, lax, shard_map, tree
from tests.transforms.lives import LIVES

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


# by others but for their combination
COVERED = {f: [pytest.mark.full] for f in (cond_nested, remat_in_cond, mapped, selected)}


@pytest.mark.parametrize(
    "program", [pytest.param(f, marks=COVERED.get(f, ()), id=f.__name__) for f in ROWS]
)
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
        jax.eval_shape(jax.grad(theirs), w, x)
    with pytest.raises(ValueError, match=r"(while|fori)_loop at .*test_control_flow.*in reverse"):
        torch.func.grad(mine)(*given)


@pytest.mark.distributed
def test_processes_equal_simulated_ranks(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_control_flow.py"), 2)
    for check in ("derivatives", "loops", "equations", "refusals"):
        assert f"check_{check}: ok" in done.stdout


TRACED = [cond_by_rank, cond_partly_agreed, cond_in_scan, cond_in_vmap_agreed, remat_in_cond, fori]


@pytest.mark.parametrize("program", [*TRACED, *LOOPS[:2]], ids=lambda f: f.__name__)
def test_programs_are_those_that_are_simulated(program):
    specs, given = (P(None, "tp"), P(("dp", "ep"))), pair(program)[3]

    def step(w, x):
        if program in LOOPS:
            return program(OURS, w, x), (w, x)
        value, grads = ft.value_and_grad(functools.partial(program, OURS), (0, 1))(w, x)
        return value, ft.sync_gradients(grads, specs)

    mapped = shard_map(step, MESH, specs, (P(), specs))
    want = tree.map(lambda x: x.detach().numpy(), mapped(*given))
    traced = ft.trace(mapped)(*given)
    traced.check()
    assert_same(traced(*given), want)
    assert_same(ft.jit(mapped, backend="eager")(*given), want)


# ---- dense programs


def experts(w, x, axes):
    """Blocks by cond, switch, loops and collectives, whose result is the same on any mesh."""
    over = lambda value: lax.psum(value, axes) if axes else value
    x = lax.cond(over(x.sum()) > 0, torch.sin, lambda x: x * w, x)

    def row(x):
        x = lax.cond(x.sum() > 0, torch.sqrt, torch.square, x.abs())
        three = [torch.tanh, lambda x: x * w, lambda x: torch.log(x - 1.5) + w]
        return lax.switch((2 * x[0]).to(torch.int64), three, x)

    x = lax.map(row, x)
    x = lax.fori_loop(0, 3, lambda i, c: torch.sin(c * w) + i / 7, x)
    x, _ = lax.scan(lambda c, k: (c * torch.cos(k * c), None), x, torch.arange(4.0), reverse=True)
    return over((x**2).sum()) / 10


@pytest.mark.parametrize("shape", [{"dp": 2}, {"dp": 4, "tp": 1}, {"dp": 2, "cp": 2}, {"dp": 8}])
def test_any_mesh_has_the_numbers_of_one_device(shape):
    w, x = torch.tensor([0.3, -1.2, 0.7]), torch.from_numpy(random(8, 3))
    axes = tuple(name for name, size in shape.items() if size > 1)
    f = shard_map(lambda w, x: experts(w, x, axes), Mesh(**shape), (P(), P(axes)), P())
    want = experts(w, x, ())
    once = torch.func.grad(lambda w: experts(w, x, ()))
    assert_same(f(w, x), want)
    assert_same(torch.func.grad(f, (0, 1))(w, x), torch.func.grad(experts, (0, 1))(w, x, ()))
    hessian = torch.func.jacrev(torch.func.grad(f))(w, x)
    assert_same(hessian, torch.func.jacrev(once)(w))
    assert_same(torch.func.jacfwd(torch.func.grad(f))(w, x), hessian)


def test_a_branch_that_is_not_taken_has_no_part_in_any_derivative():
    """Not of any order and mode, of operands or of what branches close over."""
    x, v = torch.tensor([4.0, 0.0, -1.0, 9.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    scale = torch.tensor(2.0)
    rows = torch.func.vmap(
        lambda x, s: lax.cond(x > 0, lambda x: s * torch.sqrt(x), lambda x: s / (x - 4), x),
        in_dims=(0, None),
    )

    def by_hand(x, s):  # the branches, each where it is taken
        up, down = x[[0, 3]], x[[1, 2]]
        high, low = s * torch.sqrt(up), s / (down - 4)
        return torch.stack([high[0], low[0], low[1], high[1]])

    def derivatives(f):
        loss = lambda x, s: (f(x, s) ** 3).sum()
        gradient = torch.func.grad(loss, (0, 1))
        tangent = torch.func.jvp(f, (x, scale), (v, scale))
        hvp = torch.func.jvp(gradient, (x, scale), (v, scale))
        pulled = torch.func.grad(lambda x: (gradient(x, scale)[0] * v).sum())(x)
        pushed = torch.func.grad(lambda x: torch.func.jvp(f, (x, scale), (v, scale))[1].sum())(x)
        twice = torch.func.jvp(
            lambda x: torch.func.jvp(lambda x: f(x, scale), (x,), (v,))[1], (x,), (v,)
        )
        taped = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(taped, scale), taped, create_graph=True)
        (second,) = torch.autograd.grad((first * v).sum(), taped)
        return gradient(x, scale), tangent, hvp, pulled, pushed, twice, first, second

    got = derivatives(rows)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(got))
    assert_same(got, jax.tree.map(lambda leaf: leaf.detach().numpy(), derivatives(by_hand)))


def test_only_the_chosen_branch_runs():
    ran = []

    def noted(name, f):
        def branch(x):
            if not ft.core.compat.faking():
                ran.append(name)
            return f(x)

        return branch

    branches = [noted("zero", torch.sin), noted("one", torch.cos), noted("two", torch.exp)]
    for index in (torch.tensor(1), 1, np.int64(1)):
        lax.switch(index, branches, torch.ones(2))
    torch.func.grad(lambda x: lax.cond(x > 0, *branches[:2], x))(torch.tensor(1.0))
    torch.func.vmap(lambda x: lax.cond(torch.tensor(False), *branches[1:], x))(torch.ones(3))
    f = lambda x: lax.cond(lax.psum(x.sum(), "tp") > 0, *branches[:2], x)
    shard_map(f, Mesh(tp=2), P("tp"), P("tp"))(torch.ones(2))
    assert ran == ["one"] * 3 + ["zero", "two", "zero"]


def one_row(x):
    return {"a": [x, x[:1]]}


def all_rows(x):
    return {"a": [x, x.int()]}


@pytest.mark.parametrize("life", LIVES)
def test_branches_that_differ_are_named_with_their_lines(life):
    f = lambda x: lax.cond(x.sum() > 0, one_row, all_rows, x)
    with pytest.raises(ValueError, match="true_fun/a/1: got ") as caught:
        LIVES[life](f)(torch.ones(3))
    head, row, *rest = str(caught.value).splitlines()
    assert re.match(r"cond at .*test_control_flow.py:\d+: `f = lambda x: lax.cond", head)
    wanted = r"\(1,\) torch.float64 at .*`def one_row\(x\):`; wanted \(3,\) torch.int32, as in "
    assert re.search(wanted + r"false_fun at .*`def all_rows\(x\):`; fix: cast", row)
    assert not rest


def by_a_loop(L, x):
    """A branch with a loop of unknown length, and results that do not all depend on it."""

    def halve(x):
        last, steps = L.while_loop(lambda c: c[0] > 1, lambda c: (c[0] / 2, c[1] + 1), (x, 0))
        return last, L.sin(x) * steps

    return L.cond(x > 9, halve, lambda x: (L.cond(x < 0, halve, lambda x: (x, x), x)[0], x), x)


@pytest.mark.parametrize("life", LIVES)
def test_a_loop_in_a_branch_has_no_derivative_in_reverse_also_where_it_is_not_taken(life):
    x = torch.tensor(2.0)
    first, second = (lambda x, i=i: by_a_loop(OURS, x)[i] for i in (0, 1))
    told = pytest.raises(ValueError, match=r"while_loop at .*test_control_flow.*in reverse")
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(lambda x: by_a_loop(THEIRS, x)[0])(2.0)
    for grad in (ft.grad, torch.func.grad):
        with told:
            LIVES[life](grad(first))(x)
    # which the other result does not depend on
    want = jax.grad(lambda x: by_a_loop(THEIRS, x)[1])(2.0)
    assert_same(LIVES[life](ft.grad(second))(x), want)
    assert_same(LIVES[life](lambda x: ft.jvp(first, (x,), (x,)))(x), (np.array(2.0),) * 2)
    mesh, agreed = Mesh(tp=2), lambda x: lax.psum(first(lax.pmean(x[0], "tp")), "tp")
    mapped = shard_map(ft.grad(agreed), mesh, P("tp"), P("tp"), check=False)
    with told:
        LIVES[life](mapped)(torch.ones(2))
    if life == "simulated":
        with told:
            first(x.requires_grad_()).backward()


def test_a_loop_of_rows_ends_for_each_by_itself():
    steps = torch.func.vmap(
        lambda n: lax.while_loop(lambda c: c[0] > 1, lambda c: (c[0] / 2, c[1] + 1), (n, 0))
    )
    size, count = steps(torch.tensor([1.0, 5.0, 8.0, 0.0]))
    assert_same((size, count), (np.array([1.0, 0.625, 1.0, 0.0]), np.array([0, 3, 3, 0])))
    # rows that are done do not see what a step would make of them
    root = torch.func.vmap(
        lambda x: lax.while_loop(lambda c: c > 2, lambda c: torch.log(c - 2) + 1, x)
    )
    x = torch.tensor([2.0, 4.0])
    value, tangent = torch.func.jvp(root, (x,), (torch.ones(2),))
    assert_same((value, tangent), (np.array([2.0, np.log(2) + 1]), np.array([1.0, 0.5])))


def test_a_tracer_of_torch_sees_all_branches():
    """As torch.func.linearize has one."""
    x = torch.tensor([1.0, 2.0])
    f = lambda x: lax.cond(x.sum() > 0, torch.sin, torch.exp, x)
    traced = make_fx(f)(x)
    assert_same((traced(x), traced(-x)), (np.sin([1.0, 2.0]), np.exp([-1.0, -2.0])))
    with pytest.raises(ValueError, match=r"while_loop at (?s:.*)got a trace by make_fx"):
        make_fx(lambda x: lax.while_loop(lambda c: c.sum() < 9, torch.exp, x))(x)


# ---- replication


def count_down(x):
    more = lambda c: lax.psum(c.sum(), "tp") > 0
    return lax.while_loop(more, lambda c: lax.psum(c, "tp") - 3, x)


def test_results_vary_as_what_may_run():
    """Whatever the numbers: a program is not refused, and not passed, by what one batch takes."""
    mesh = Mesh(tp=2)

    def by(pred, true_fun, false_fun, out):
        f = lambda x: lax.cond(pred(x), true_fun, false_fun, x)
        return shard_map(f, mesh, P("tp"), out)

    agreed, own = lambda x: lax.psum(x.sum(), "tp") > 0, lambda x: x.sum() > 0
    total, constant = lambda x: lax.psum(x.sum(), "tp"), lambda x: torch.ones(())
    for x in (torch.ones(2), -torch.ones(2)):
        by(agreed, total, constant, P())(x)
        for pred, *branches in ((agreed, total, torch.sum), (own, constant, constant)):
            with pytest.raises(ValueError, match="varies over 'tp'"):
                by(pred, *branches, P())(x)
        f = lambda x: lax.psum(lax.cond(agreed(x), total, torch.sum, x), "tp")
        shard_map(f, mesh, P("tp"), P())(x)  # not redundant
        shard_map(lambda x: lax.psum(count_down(x), "tp"), mesh, P("tp"), P())(x)
        with pytest.raises(ValueError, match="varies over 'tp'"):
            shard_map(count_down, mesh, P("tp"), P())(x)


def test_a_share_of_a_gradient_chooses_for_itself():
    """As where a step is left out when a gradient is not finite."""
    specs = {"w": P()}

    def step(w, x):
        gradient = ft.grad(lambda w: lax.psum((w["w"] * x).sum(), "dp"))(w)
        total = ft.sync_gradients(gradient, specs)
        fine = lax.pmin(total["w"].isfinite(), "dp").all()
        clip = lambda g: tree.map(lambda leaf: leaf.clamp(max=1.0), g)
        return lax.cond(fine, clip, lambda g: tree.map(torch.zeros_like, g), total)

    f = shard_map(step, Mesh(dp=2), (specs, P("dp")), specs)
    w = {"w": torch.ones(())}
    assert f(w, torch.tensor([1.0, 2.0]))["w"] == 1.0
    assert f(w, torch.tensor([1.0, torch.inf]))["w"] == 0.0
    own = lambda w, x: lax.cond(
        ft.grad(lambda w: (w["w"] * x).sum(), axes=())(w)["w"] > 1, torch.sin, torch.cos, x
    )
    got = shard_map(own, Mesh(dp=2), (specs, P("dp")), P("dp"))(w, torch.tensor([0.5, 2.0]))
    assert_same(got, np.array([np.cos(0.5), np.sin(2.0)]))


# ---- scan


@pytest.mark.parametrize("unroll", [1, 2, 3, 7, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_run_from_either_end_as_many_steps_at_a_time(unroll, reverse):
    def f(scan, sin, w, xs, **options):
        step = lambda c, x: ((sin(c[0] * w) + x["a"], c[1] + 1), c[0] * x["a"])
        return scan(step, (w, 0 * w), xs, reverse=reverse, unroll=unroll)

    w, xs = torch.tensor(1.3), {"a": torch.from_numpy(random(7))}
    mine = lambda w, a: f(ft.scan, torch.sin, w, {"a": a})
    loss = lambda out: out[0][0] + (out[1] ** 2).sum()
    theirs = lambda w, a: f(jax.lax.scan, jnp.sin, w, {"a": a})
    want = theirs(1.3, jnp.asarray(xs["a"].numpy()))
    moved = jax.grad(lambda w, a: loss(theirs(w, a)), (0, 1))(1.3, jnp.asarray(xs["a"].numpy()))
    both = lambda w, a: (mine(w, a), ft.grad(lambda w, a: loss(mine(w, a)), (0, 1))(w, a))
    assert_same(both(w, xs["a"]), (want, moved))
    traced = ft.trace(both)(w, xs["a"])
    assert_same(traced(w, xs["a"]), (want, moved))
    scans = re.findall(r"scan\[length=(\d+)(, reverse)?]", str(traced))
    length = 0 if unroll is True or unroll == 7 else 7 // unroll
    ways = [reverse, reverse, not reverse] if length else []
    assert scans == [(str(length), ", reverse" * way) for way in ways]


def test_names_of_values_in_a_scan_do_not_depend_on_its_options():
    step = lambda c, x: (ft.checkpoint_name(c * x, "c"), None)
    f = lambda x: ft.scan(step, x[0], x, reverse=True, unroll=2)[0]
    x = torch.tensor([2.0, 3.0, 5.0])
    _, found = ft.capture(f, "*/c")(x)
    assert {name: float(value) for name, value in found.items()} == {
        "2/c": 10.0,
        "1/c": 30.0,
        "0/c": 60.0,
    }
    _, again = ft.trace(ft.capture(f, "*/c"))(x)(x)
    assert {name: float(value) for name, value in again.items()} == {
        name: float(value) for name, value in found.items()
    }


def test_bounds_and_numbers_are_as_in_jax():
    assert lax.fori_loop(3, 1, lambda i, c: c + i, 5) == 5
    assert lax.fori_loop(torch.tensor(3), 1, lambda i, c: c + i, 5) == 5
    last = lax.fori_loop(2, 5, lambda i, c: (c[0] + i, c[1] * 0.5), (0, torch.ones(2)))
    want = jax.lax.fori_loop(2, 5, lambda i, c: (c[0] + i, c[1] * 0.5), (0, jnp.ones(2)))
    assert_same(last, want)
    assert last[0].dtype == torch.int64
    out = lax.cond(torch.tensor(2), lambda: (1, 2.0, True), lambda: (0, 1.0, False))
    assert [x.dtype for x in out] == [torch.int64, torch.float64, torch.bool]
    assert lax.cond(torch.tensor(0.0), lambda: 1, lambda: 0) == 0


# ---- wrong uses

ONES = torch.ones(3)
same = lambda x: x


class Holder:
    def __init__(self):
        self.value = torch.ones(2, requires_grad=True)


WRONG = {
    "a predicate for each element": (
        lambda: lax.cond(ONES > 0, same, same, ONES),
        ValueError, "pred: got a tensor of shape (3,); wanted a 0-dim one of bool; fix: reduce it",
    ),
    "a predicate that is no number": (
        lambda: lax.cond("yes", same, same, ONES), TypeError, "pred: got a str; wanted a number",
    ),
    "complex": (
        lambda: lax.cond(torch.tensor(1j), same, same), TypeError, "pred: got torch.complex",
    ),
    "no functions": (
        lambda: lax.cond(True, ONES, 3), TypeError, "true_fun: got tensor", "false_fun: got 3",
    ),
    "no branches": (
        lambda: lax.switch(0, [], ONES), TypeError, "branches: got none; wanted a list of functions",
    ),
    "one function": (lambda: lax.switch(0, same), TypeError, "branches: got a function; wanted a list"),
    "a branch that is none": (
        lambda: lax.switch(0, [same, None, 1], ONES), TypeError, "branches[1]: got None", "branches[2]",
    ),
    "a float index": (lambda: lax.switch(1.5, [same], ONES), TypeError, "index: got 1.5; wanted an int"),
    "a bool index": (
        lambda: lax.switch(torch.tensor(True), [same], ONES), TypeError, "got torch.bool; wanted an int",
    ),
    "other containers": (
        lambda: lax.cond(torch.tensor(True), lambda x: (x, x), lambda x: {"a": x}, ONES),
        ValueError, "true_fun/a: got nothing at ", "true_fun/0: got (3,)", "/1: got",
    ),
    "other shapes and dtypes": (
        lambda: lax.switch(
            torch.tensor(0),
            [lambda x: (x, x), lambda x: (x[:2], x), lambda x: (x, x.int())], ONES,
        ),
        ValueError, "branches[1]/0: got (2,)", "branches[2]/1: got (3,) torch.int32 at ",
    ),
    "other shapes under vmap": (
        lambda: torch.func.vmap(lambda x: lax.cond(x > 0, same, lambda x: x[None], x))(ONES),
        ValueError, "true_fun: got () torch.float32 at ", "wanted (1,) torch.float32, as in false_fun at ",
    ),
    "no tensors": (
        lambda: lax.cond(True, lambda: {"a": "word"}, lambda: 0), TypeError, "true_fun/a: got a str",
    ),
    "an object with tensors": (
        lambda: lax.cond(True, same, same, Holder()), TypeError, "operand 0: got a Holder with tensors",
    ),
    "an object in a carry": (
        lambda: lax.while_loop(same, same, {"a": Holder()}), TypeError, "init_val a: got a Holder",
    ),
    "a predicate of floats": (
        lambda: lax.while_loop(same, lambda c: c - 1, torch.tensor(3.0)),
        TypeError, "cond_fun: got torch.float32; wanted bool; fix: compare it",
    ),
    "a predicate of each element": (
        lambda: lax.while_loop(lambda c: c > 0, lambda c: c - 1, ONES), ValueError, "cond_fun: got a tensor",
    ),
    "a carry that changes": (
        lambda: lax.while_loop(
            lambda c: c["a"] > 0, lambda c: {"a": c["a"] - 0.5, "b": c["b"][:2]}, {"a": 3, "b": ONES}
        ),
        ValueError, "carry/a: got () torch.float32; wanted () torch.int64", "carry/b: got (2,)",
    ),
    "a carry that grows": (
        lambda: lax.fori_loop(0, 3, lambda i, c: (c, c), ONES),
        ValueError, "fori_loop: the carry must keep", "carry: got nothing", "carry/1: got (3,)",
    ),
    "a float bound": (lambda: lax.fori_loop(0, 2.5, same, ONES), TypeError, "upper: got 2.5; wanted an int"),
    "an unknown length, unrolled": (
        lambda: lax.fori_loop(0, torch.tensor(3), lambda i, c: c, ONES, unroll=2),
        ValueError, "unroll: got 2 with a bound that is a tensor; wanted ints",
    ),
    "reverse mode": (
        lambda: torch.func.grad(lambda x: lax.fori_loop(0, torch.tensor(3), lambda i, c: c * x, x))(ONES[0]),
        ValueError, "fori_loop at", "in reverse", "fix: ints as bounds",
    ),
    "reverse mode by a tape": (
        lambda: lax.while_loop(lambda c: c < 5, lambda c: 2 * c, torch.ones((), requires_grad=True)).backward(),
        ValueError, "while_loop at", "fix: lax.fori_loop with ints as bounds, or ft.scan",
    ),
    "no dim of rows": (lambda: lax.map(same, torch.zeros(())), ValueError, "xs: got leaves of shapes [()]"),
    "rows that differ": (
        lambda: lax.map(same, (ONES, ONES[:2]), batch_size=2), ValueError, "got leaves of shapes [(3,), (2,)]",
    ),
    "no batches": (lambda: lax.map(same, ONES, batch_size=0), ValueError, "batch_size: got 0; wanted"),
    "no cases": (lambda: lax.select_n(ONES > 0), ValueError, "cases: got none"),
    "too many cases": (lambda: lax.select_n(ONES > 0, *[ONES] * 3), ValueError, "got 3; wanted at most 2"),
    "cases that differ": (
        lambda: lax.select_n(ONES > 0, ONES, ONES.double()), ValueError, "cases[1]: got (3,) torch.float64",
    ),
    "a choice of floats": (lambda: lax.select_n(ONES, ONES, ONES), TypeError, "which: got torch.float"),
    "another shape of choices": (
        lambda: lax.select_n(ONES[:2] > 0, ONES, ONES), ValueError, "which: got shape (2,); wanted (), or (3,)",
    ),
    "no steps at a time": (
        lambda: ft.scan(lambda c, x: (c, x), ONES, ONES, unroll=0), ValueError, "unroll: got 0; wanted",
    ),
    "a value that may not be there": (
        lambda: ft.capture(
            lambda x: lax.cond(x.sum() > 0, lambda x: ft.checkpoint_name(x, "x"), same, x), "x"
        )(ONES),
        ValueError, "capture: got 'x', a value in true_fun of lax.cond, which may run or not",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["cond", "switch", "while_loop", "fori_loop", "map", "select_n", "scan"]
)
def test_examples_run(name):
    torch.set_default_dtype(torch.float32)
    names = {"ft": ft, "torch": torch, "lax": lax}
    text = inspect.getdoc(getattr(lax, name)) or ""
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    report: list[str] = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert example.examples
    assert "".join(report) == ""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_is_told_with_the_fix(name):
    torch.set_default_dtype(torch.float32)
    call, error, *words = WRONG[name]
    with pytest.raises(error) as told:
        call()
    assert all(word in str(told.value) for word in words), str(told.value)


def collect(x):
    return lax.all_gather(x, "tp").sum(0)


UNEVEN = {
    "cond": lambda x: lax.cond(x.sum() > 0, collect, same, x),
    "switch": lambda x: lax.switch(lax.axis_index("tp"), [same, collect], x),
    "deep": lambda x: lax.cond(
        x.sum() > 0, lambda x: ft.remat(lambda x: lax.map(collect, x))(x), same, x
    ),
    "body": lambda x: lax.while_loop(lambda c: c.sum() > 0, collect, x),
    "condition": lambda x: lax.while_loop(lambda c: (collect(c) + c).sum() > 9, lambda c: c / 2, x),
    "condition that comes to vary": lambda x: lax.while_loop(
        lambda c: collect(c).sum() + c[0] > 9, lambda c: c + lax.axis_index("tp"), lax.psum(x, "tp")
    ),
    "bound": lambda x: lax.fori_loop(0, lax.axis_index("tp"), lambda i, c: collect(c), x),
    "rows": lambda x: torch.func.vmap(lambda x: lax.cond(x > 0, collect, same, x))(x),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", UNEVEN)
def test_collectives_that_not_all_ranks_come_to_are_refused(name, check):
    f = shard_map(UNEVEN[name], Mesh(dp=2, tp=2), P(("dp", "tp")), P(("dp", "tp")), check=check)
    with pytest.raises(ValueError, match="may not all come to") as told:
        f(torch.from_numpy(random(8)))
    for words in (
        "all_gather over 'tp': got a collective that ranks of 'tp' may not",
        "lax.all_gather(x, \"tp\").sum(0)`", "test_control_flow.py", "varies over 'tp'", "lax.pmax(",
    ):  # fmt: skip
        assert words in str(told.value)


@pytest.mark.parametrize("name", UNEVEN)
def test_simulations_that_are_compiled_refuse_them_too(name):
    f = shard_map(UNEVEN[name], Mesh(dp=2, tp=2), P(("dp", "tp")), P(("dp", "tp")))
    with pytest.raises(ValueError, match="may not all come to"):
        ft.jit(f, backend="eager")(torch.from_numpy(random(8)))


@pytest.mark.parametrize("name", [name for name in UNEVEN if name != "rows"])
def test_programs_that_would_not_end_are_not_run(name):
    f = shard_map(UNEVEN[name], Mesh(dp=2, tp=2), P(("dp", "tp")), P(("dp", "tp")), check=False)
    x = torch.from_numpy(random(8))
    with pytest.raises(ValueError, match="would not end on the processes"):
        ft.trace(f)(x)(x)


def test_a_program_tells_of_rows_that_choose_apart():
    """In a trace too, where rows of a vmap meet other ranks in a branch."""
    specs = Mesh(dp=2, tp=2), P(("dp", "tp")), P(("dp", "tp"))
    x = torch.from_numpy(random(8))
    apart = ft.trace(shard_map(UNEVEN["rows"], *specs))(x)
    with pytest.raises(ValueError, match=r"a collective over 'tp' in a branch at .*test_control"):
        apart.check()
    choose = lambda x: lax.cond(x > 0, lambda x: lax.psum(x * lax.axis_index("tp"), "tp"), same, x)
    agree = lambda x: torch.func.vmap(choose)(lax.psum(x, "tp"))
    ft.trace(shard_map(agree, *specs))(x).check()


def test_collectives_along_which_ranks_agree_are_not_refused():
    def f(x):
        pred = lax.psum(x.sum(), "tp") > 0  # varies over dp alone
        x = lax.cond(pred, collect, lambda x: x + lax.axis_index("tp"), x)
        return lax.while_loop(lambda c: lax.psum(c.sum(), "tp") > 1, lambda c: collect(c) / 9, x)

    x = torch.from_numpy(random(8))
    out = shard_map(f, Mesh(dp=2, tp=2), P(("dp", "tp")), P(("dp", "tp")))(x)
    for half, got in zip(x.view(2, 2, 2), out.view(2, 2, 2), strict=True):
        want = half.sum(0).expand(2, 2) if half.sum() > 0 else half + torch.tensor([[0.0], [1.0]])
        while want.sum() > 1:
            want = want.sum(0).expand(2, 2) / 9
        torch.testing.assert_close(got, want)
