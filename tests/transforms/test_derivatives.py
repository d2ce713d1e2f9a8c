"""jvp, linearize, jacfwd, jacrev, hessian and custom_jvp against JAX, on meshes and without.

The same function is written for both; dense ones are JAX's in float64. On meshes they are mapped,
simulated, traced and compiled.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

import functron as ft
from functron import Mesh, P, lax, tree
from tests.transforms.derivative_programs import (
    PROGRAMS,
    SPECS,
    TANGENTS,
    TANGENTS_T,
    W_T,
    X_T,
    W,
    X,
    on_ranks,
    push_hidden,
    to_torch,
)
from tests.transforms.implicit_programs import OURS
from tests.transforms.lives import LIVES

MESH = Mesh(dp=2, tp=2)
ALL = ("dp", "tp")
torch_side = SimpleNamespace(
    tanh=torch.tanh, vmap=torch.func.vmap, where=torch.where, remat=ft.remat, jvp=ft.jvp,
    linearize=ft.linearize, jacfwd=ft.jacfwd, jacrev=ft.jacrev, hessian=ft.hessian,
    grad=torch.func.grad, vjp=ft.vjp, scan=ft.scan, zeros=torch.zeros,
)  # fmt: skip
jax_side = SimpleNamespace(
    tanh=jnp.tanh, vmap=jax.vmap, where=jnp.where, remat=jax.checkpoint, jvp=jax.jvp,
    linearize=jax.linearize, jacfwd=jax.jacfwd, jacrev=jax.jacrev, hessian=jax.hessian,
    grad=jax.grad, vjp=jax.vjp, scan=jax.lax.scan, zeros=jnp.zeros,
)  # fmt: skip

JAX_LOOPS = SimpleNamespace(
    while_loop=jax.lax.while_loop, fori_loop=jax.lax.fori_loop, sin=jnp.sin, vmap=jax.vmap,
    linearize=jax.linearize,
    scan=lambda f, xs: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, xs)[1],
)  # fmt: skip


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def same(got, want, tolerance=1e-12):
    ours, theirs = tree.leaves(got), jax.tree.leaves(want)
    assert [tuple(x.shape) for x in ours] == [x.shape for x in theirs]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b, rtol=tolerance, atol=tolerance)


def dense(L, w, x):
    return L.tanh(L.tanh(x @ w["up"]) @ w["down"][0])


def loss(L, w, x):
    return (dense(L, w, x) ** 2).sum()


MODES = {
    "jvp": lambda L, f, g, w, x, t: L.jvp(f, (w, x), t),
    "linearize": lambda L, f, g, w, x, t: L.linearize(f, w, x)[1](*t),
    "jacfwd": lambda L, f, g, w, x, t: L.jacfwd(f, argnums=(0, 1))(w, x),
    "jacrev": lambda L, f, g, w, x, t: L.jacrev(f)(w, x),
    "hessian": lambda L, f, g, w, x, t: L.hessian(g)(w, x),
    "jvp-grad": lambda L, f, g, w, x, t: L.jvp(lambda w: L.grad(g)(w, x), (w,), t[:1])[1],
    "grad-jvp": lambda L, f, g, w, x, t: L.grad(lambda w: L.jvp(g, (w, x), t)[1])(w),
    "jvp-jvp": lambda L, f, g, w, x, t: L.jvp(
        lambda w: L.jvp(f, (w, x), t)[1], (w,), t[:1]
    )[1],
    "jacfwd-jacfwd": lambda L, f, g, w, x, t: L.jacfwd(L.jacfwd(g, 1), 1)(w, x),
    "vmap-jvp": lambda L, f, g, w, x, t: L.vmap(
        lambda s: L.jvp(lambda w: f(w, s * x), (w,), t[:1])[1]
    )(x[0]),
}  # fmt: skip


@functools.cache
def wanted(mode):
    f = lambda w, x: dense(jax_side, w, x)
    g = lambda w, x: loss(jax_side, w, x)
    as_jax = jax.tree.map(jnp.asarray, (W, X, TANGENTS))
    return jax.jit(lambda *args: MODES[mode](jax_side, f, g, *args))(*as_jax)


def mapped(program):
    f = ft.shard_map(program, MESH, (SPECS, P("dp")), P("dp"))
    total = lambda w, x: lax.psum(program(w, x).square().sum(), "dp")
    return f, ft.shard_map(total, MESH, (SPECS, P("dp")), P())


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("life", ["simulated", "jitted"])
def test_of_a_mapped_function(program, mode, life):
    f, g = mapped(PROGRAMS[program])
    make = lambda w, x, t: MODES[mode](torch_side, f, g, w, x, t)
    run = ft.jit(make, backend="eager") if life == "jitted" else make
    same(run(W_T, X_T, TANGENTS_T), wanted(mode))


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", ["jvp", "linearize", "jvp-grad", "grad-jvp", "jvp-jvp"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("life", ["simulated", "traced", "jitted"])
def test_inside_a_mapped_program(program, mode, life):
    run_inside(program, mode, life)


def run_inside(program, mode, life):
    inner = PROGRAMS[program]
    total = lambda w, x: lax.psum(inner(w, x).square().sum(), "dp")
    own = SimpleNamespace(**{**vars(torch_side), "grad": ft.grad})

    def of_ranks(w, x, t):
        made = MODES[mode](own, inner, total, w, x, t)
        return ft.sync_gradients(made, SPECS) if "grad" in mode else made

    outs = {"jvp": (P("dp"), P("dp")), "linearize": P("dp"), "jvp-jvp": P("dp")}
    in_specs = SPECS, P("dp"), (SPECS, P("dp"))
    made = ft.shard_map(of_ranks, MESH, in_specs, outs.get(mode, SPECS))
    args = W_T, X_T, TANGENTS_T
    if life == "traced":
        traced = ft.trace(made)(*args)
        traced.check()
        same(traced(*args), wanted(mode))
    else:
        run = ft.jit(made, backend="eager") if life == "jitted" else made
        same(run(*args), wanted(mode))


@pytest.mark.parametrize("mode", ["jacrev", "hessian", "jacfwd"])
def test_shares_of_jacobians_inside(mode):
    """Of replicated arguments and results; the ranks' shares add up."""

    def results(L, s, w, x, psum):
        y = psum(L.tanh(x * s["a"] + s["b"][0]) @ w["up"][:, :2] * s["b"][1])
        return y if mode != "hessian" else (y**2).sum()

    s = {"a": np.array([0.3, -0.2, 0.5, 1.0]), "b": [np.array(0.1), np.array([[0.7, 0.2]])]}
    dense = lambda s: results(jax_side, s, W, X, lambda v: v.sum(0))
    want = jax.jit(getattr(jax, mode)(dense))(jax.tree.map(jnp.asarray, s))

    def inside(s, w, x):
        psum = lambda v: lax.psum(v.sum(0), "dp")
        made = getattr(ft, mode)(lambda s: results(torch_side, s, w, x, psum))(s)
        return made if mode == "jacfwd" else ft.sync_gradients(made, P())

    f = ft.shard_map(inside, MESH, (P(), P(), P("dp")), P())
    args = to_torch(s), W_T, X_T
    same(f(*args), want)
    program = ft.trace(f)(*args)
    program.check()
    same(program(*args), want)


def test_own_results_of_ranks():
    """With `axes`: each rank differentiates its own rows."""
    f = lambda w, x: ft.jacfwd(lambda x: on_ranks(w, x).sum(-1), axes=("tp",))(x).sum(1)
    made = ft.shard_map(f, MESH, (SPECS, P("dp")), P("dp"))
    want = jax.jacfwd(lambda x: dense(jax_side, W, x).sum(-1))(jnp.asarray(X)).sum(1)
    same(made(W_T, X_T), want)


def test_auxiliary_values_and_integers():
    """Results that are integers have no tangent, and arguments none to give."""

    def f(p, x):
        return {"y": p["w"] * x, "n": p["n"] + 1}, {"seen": x.sum(), "name": "mean"}

    p = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([3])}
    x = torch.tensor([5.0, 7.0])
    given = (p, x), ({"w": torch.ones(2), "n": None}, torch.zeros(2))
    out, moved, aux = ft.jvp(f, *given, has_aux=True)
    assert out["n"] == 4
    assert moved["n"] is None
    assert torch.equal(moved["y"], x)
    assert (aux["seen"], aux["name"]) == (12.0, "mean")
    out, push, aux = ft.linearize(f, p, x, has_aux=True)
    assert torch.equal(push(*given[1])["y"], x)
    assert aux["name"] == "mean"
    out, pull, aux = ft.vjp(f, p, x, has_aux=True)
    assert torch.equal(pull({"y": torch.ones(2), "n": None})[1], p["w"])
    assert aux["seen"] == 12.0
    value = lambda w, x: (w * x, {"seen": x.sum()})
    for jacobian in (ft.jacfwd, ft.jacrev):
        made, aux = jacobian(value, 1, has_aux=True)(p["w"], x)
        assert torch.equal(made, torch.diag(p["w"]))
        assert aux["seen"] == 12.0
    made, aux = ft.hessian(lambda x: ((x**3).sum(), 1), has_aux=True)(x)
    assert torch.equal(made, torch.diag(6 * x))
    assert aux == 1
    assert ft.jacfwd(lambda x: x**2)(torch.zeros(0)).shape == (0, 0)
    assert ft.jacrev(lambda x: x**2)(torch.zeros(0)).shape == (0, 0)
    with pytest.raises(ValueError, match=r"tangents/0/w: got \(3,\).*wanted \(2,\)"):
        ft.jvp(f, (p, x), ({"w": torch.ones(3), "n": None}, x), has_aux=True)


def test_a_pullback_made_before_its_cotangent_is_differentiated():
    """It was a constant of the cotangent, in silence."""
    f, x, c = (lambda x: torch.sin(x) * x), X_T, TANGENTS_T[1]
    want = ft.vjp(f, x)[1](torch.ones_like(x))[0]
    pulled = lambda pull: lambda c: pull(c)[0].sum()
    for of in (torch.func.grad, ft.grad):
        assert torch.equal(of(pulled(ft.vjp(f, x)[1]))(c), want)
    taped = c.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(pulled(ft.vjp(f, x)[1])(taped), taped)[0], want)


def test_linearize_runs_once():
    calls = []

    def f(x):
        calls.append(1)
        return torch.tanh(x)

    out, push = ft.linearize(f, X_T)
    for scale in (1.0, 2.0):
        assert torch.allclose(push(scale * X_T), scale * X_T * (1 - out**2))
    assert calls == [1]


LOOPS = {
    "while": lambda L, x: L.while_loop(lambda c: c.sum() > 1, lambda c: c / 2 * L.sin(x), x * x),
    "fori": lambda L, x: L.fori_loop(0, 3, lambda i, c: L.sin(c * x) + i, x),
    "scan": lambda L, x: L.scan(lambda row: LOOPS["while"](L, x * row), x),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("life", LIVES)
def test_linearize_of_loops(name, life):
    """Applied to several tangents, at once and one by one."""

    def use(L, x, s, t):
        out, push = L.linearize(functools.partial(LOOPS[name], L), x)
        return out, push(s), push(t), L.vmap(push)(L.sin(s * t[:, None]))

    given = [np.array([1.0, 2.0, 3.0]), np.array([0.5, -1.0, 2.0]), np.array([3.0, 0.1, 0.2])]
    want = use(JAX_LOOPS, *map(jnp.asarray, given))
    run = ft.shard_map(functools.partial(use, OURS), Mesh(tp=2), P(), P())
    same(LIVES[life](run)(*map(torch.from_numpy, given)), want)


def test_remat_saves_memory_of_a_product_with_the_hessian():
    """Tangents are computed again too: of ten layers the inputs are kept, not what is inside."""

    def bytes_kept(wrap):
        kept = 0

        def pack(x):
            nonlocal kept
            kept += x.nbytes
            return x

        layer = wrap(lambda x: torch.tanh(torch.sin(torch.cos(torch.sin(x))) * x))

        def f(x):
            return ft.scan(lambda x, _: (layer(x), None), x, None, length=10)[0].sum()

        x = X_T.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            slope = ft.jvp(f, (x,), (TANGENTS_T[1],))[1]
        return kept, torch.autograd.grad(slope, x)[0]

    (most, want), (least, got) = bytes_kept(lambda f: f), bytes_kept(ft.remat)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert least < most / 3


def turn(x):
    for _ in range(3):
        x = -x
    return x


# what backward ties to its cotangent: an operand without a tangent, and a tangent alone
TIED = {
    "integers": lambda L, w, x, ids: L.tanh(x @ w) * (ids * ids + 1)[:, None],
    "tangents": lambda L, w, x, ids: L.tanh(turn(x) @ w),
    "both": lambda L, w, x, ids: L.where(ids[:, None] * x < 1, L.tanh(turn(x))[:, ids // 2], w),
}
SECOND = {
    "all": lambda L, g, w, x, dw, dx: L.jvp(L.grad(g), (w, x), (dw, dx))[1],
    "x": lambda L, g, w, x, dw, dx: L.jvp(lambda x: L.grad(g)(w, x), (x,), (dx,))[1],
    "mapped": lambda L, g, w, x, dw, dx: L.vmap(
        lambda dx: L.jvp(lambda x: L.grad(g)(w, x), (x,), (dx,))[1]
    )(dx[None]),
    "third": lambda L, g, w, x, dw, dx: L.grad(
        lambda w: (L.jvp(L.grad(g), (w, x), (dw, dx))[1] ** 2).sum()
    )(w),
}  # fmt: skip


@pytest.mark.parametrize("mode", SECOND)
@pytest.mark.parametrize("f", TIED)
@pytest.mark.parametrize("life", ["eager", "traced", "jitted"])
def test_remat_of_operands_that_backward_ties(f, mode, life):
    def derive(L, w, x, ids, dw, dx):
        layer = L.remat(functools.partial(TIED[f], L))
        return SECOND[mode](L, lambda w, x: (layer(w, x, ids) ** 2).sum(), w, x, dw, dx)

    (dw, dx), ids = TANGENTS, np.arange(4)
    args = W["up"][:, :4], X, ids, dw["up"][:, :4], dx
    want = jax.jit(functools.partial(derive, jax_side))(*args)
    ours, given = functools.partial(derive, torch_side), to_torch(args)
    if life == "traced":
        same(ft.trace(ours)(*given)(*given), want)
    else:
        same((ft.jit(ours, backend="eager") if life == "jitted" else ours)(*given), want)


def test_what_remat_recomputes_with_tangents_depends_on_the_cotangent():
    """So that no compiler merges it with forward: tangents too, which are computed by themselves."""

    def f(w, x):
        return torch.tanh(turn(x) @ w)

    gradient = ft.grad(lambda w, x: ft.remat(f)(w, x).square().sum(), (0, 1))
    w, x = W_T["up"], X_T
    program = ft.trace(lambda *tangents: ft.jvp(gradient, (w, x), tangents))(w, x)
    equations = [equation for equation, _ in program.block.walk()]
    after = {e.results[0] for e in equations if e.name == "barrier"}
    again = [e for e in equations if e.where.phase == "recompute" and e.name != "barrier"]
    assert {"neg", "mm", "tanh"} <= {e.name for e in again}
    for equation in again:
        if equation.operands and not equation.aliases:
            assert after & set(equation.operands), equation.name
        if after & set(equation.operands):
            after |= set(equation.results)


@pytest.mark.parametrize("name", ["plain", "remat", "custom_vjp", "custom_jvp"])
def test_in_a_partitioned_function(name):
    """Written out, where calls of transforms would have stayed whole."""
    layer = {
        "plain": lambda w, x: torch.tanh(x @ w),
        "remat": ft.remat(lambda w, x: torch.tanh(x @ w)),
        "custom_vjp": ft.custom_vjp(
            lambda w, x: torch.tanh(x @ w),
            lambda w, x: (torch.tanh(x @ w), (w, x)),
            lambda kept, c: ft.vjp(lambda w, x: torch.tanh(x @ w), *kept)[1](c),
        ),
        "custom_jvp": ft.custom_jvp(lambda w, x: torch.tanh(x @ w), push_hidden),
    }[name]
    f = lambda w, x: torch.tanh(layer(w["up"], x) @ w["down"][0])
    g = lambda w, x: f(w, x).square().sum()
    in_specs = SPECS, P("dp"), (SPECS, P("dp"))
    for mode in ("jvp", "linearize", "jacrev", "hessian", "grad-jvp"):
        own = SimpleNamespace(**{**vars(torch_side), "grad": ft.grad})
        make = lambda w, x, t, mode=mode, own=own: MODES[mode](own, f, g, w, x, t)
        same(ft.partition(make, MESH, in_specs)(W_T, X_T, TANGENTS_T), wanted(mode))


def test_captured_values_come_out():
    def f(w, x):
        return ft.checkpoint_name(on_ranks(w, x), "hidden")

    def both(w, x, t):
        return ft.jvp(lambda w: f(w, x).square(), (w,), t[:1])

    (_, moved), found = ft.capture(both, "hidden")(W_T, X_T, TANGENTS_T)
    same(found["hidden"], dense(jax_side, W, X))
    want = jax.jvp(lambda w: dense(jax_side, w, X) ** 2, (W,), TANGENTS[:1])[1]
    same(moved, want)


def square_root():
    def rule(args, tangents):
        (x,), (t,) = args, tangents
        return x.sqrt(), t * torch.where(x > 0, 0.5 / x.sqrt(), 0.0)

    return ft.custom_jvp(torch.sqrt, rule)


def test_custom_jvp_is_jaxs():
    @jax.custom_jvp
    def theirs(x, n):
        return jnp.sin(x) * n

    theirs.defjvp(lambda p, t: (theirs(*p), 7 * jnp.cos(p[0]) * t[0] * p[1]))
    calls = []

    def rule(args, tangents):
        (x, n), (t, none) = args, tangents
        calls.append(none)
        return torch.sin(x) * n, 7 * torch.cos(x) * t * n

    ours = ft.custom_jvp(lambda x, n: torch.sin(x) * n, rule)
    f = lambda x: theirs(x, 3).sum()
    g = lambda x: ours(x, torch.tensor([3])).sum()
    x, t = jnp.asarray(X), jnp.asarray(TANGENTS[1])
    for mode in (
        lambda jax, f, x, t: jax.grad(f)(x),
        lambda jax, f, x, t: jax.jvp(f, (x,), (t,)),
        lambda jax, f, x, t: jax.jvp(jax.grad(f), (x,), (t,))[1],
        lambda jax, f, x, t: jax.grad(lambda x: jax.jvp(f, (x,), (t,))[1])(x),
        lambda jax, f, x, t: jax.vmap(jax.grad(f))(x),
    ):
        own = SimpleNamespace(grad=torch.func.grad, jvp=torch.func.jvp, vmap=torch.func.vmap)
        same(mode(own, g, X_T, TANGENTS_T[1]), mode(jax, f, x, t))
    assert set(calls) == {None}
    taped = torch.tensor([4.0, 0.0], requires_grad=True)
    square_root()(taped).sum().backward()
    assert torch.equal(taped.grad, torch.tensor([0.25, 0.0]))


def of_numbers(L):
    """Derivatives of and by Python's floats, and in trees."""
    f = lambda x, y: x * x * y["a"]
    y = {"a": 2.0, "b": [L.tanh(L.zeros(3))]}
    value, push = L.linearize(lambda x: f(x, {"a": 2.0}), 3.0)
    return [
        L.jvp(f, (3.0, {"a": 2.0}), (1.0, {"a": 0.5})),
        L.jvp(L.tanh, (L.zeros(()),), (0.5,)),
        L.grad(f)(3.0, y), L.grad(f, (0, 1))(3.0, y), L.value_and_grad(f)(3.0, {"a": 7}),
        value, push(0.5), L.jacfwd(f)(3.0, y), L.jacrev(f)(3.0, y), L.hessian(f)(3.0, y),
    ]  # fmt: skip


@pytest.mark.parametrize("life", LIVES)
def test_floats_of_python_are_differentiated(life):
    extra = {"grad": ft.grad, "value_and_grad": ft.value_and_grad}
    ours = SimpleNamespace(**{**vars(torch_side), **extra})
    theirs = SimpleNamespace(**{**vars(jax_side), "value_and_grad": jax.value_and_grad})
    with jax.enable_x64(False):
        want = of_numbers(theirs)
    got = LIVES[life](lambda: of_numbers(ours))()
    assert {x.dtype for x in tree.leaves(got)} == {torch.float32}
    same(got, want, 1e-6)


def test_a_float_without_a_tangent_stays_a_number():
    seen = []
    f = lambda x, n: (seen.append(type(n)), x * n)[1]
    assert ft.jvp(f, (torch.tensor(2.0), 3.0), (torch.tensor(1.0), None))[1] == 3
    assert seen == [float]


@pytest.mark.parametrize("life", LIVES)
def test_a_rule_is_called_by_its_name_where_it_closes_over_what_moves(life):
    def loss(w):
        return ft.custom_jvp(lambda x: x * w, lambda p, t: (p[0] * w, t[0] * w))(w.detach())

    with pytest.raises(ValueError, match=r"custom_jvp at .*test_derivatives.*make it an argument"):
        LIVES[life](ft.grad(loss))(torch.tensor(2.0))
    still = lambda w: loss(w.detach()) * w
    assert LIVES[life](ft.grad(still))(torch.tensor(2.0)) == 4


def custom_rule(make):
    return lambda: ft.jvp(ft.custom_jvp(torch.sin, make), (X_T,), (X_T,))


WRONG = {
    "primals that are no tuple": (
        lambda: ft.jvp(torch.sin, X_T, X_T), TypeError, "fix: jvp(f, (x,), (tangent,))"
    ),
    "tangents of another structure": (
        lambda: ft.jvp(dense, (X_T, X_T), (X_T,)), ValueError,
        "the tangents does not match the structure of the primals",
    ),
    "a tangent of another dtype": (
        lambda: ft.jvp(torch.sin, (X_T,), (X_T.float(),)), ValueError,
        "tangents/0: got (4, 4) torch.float32; wanted (4, 4) torch.float64; fix: expand or convert",
    ),
    "a tangent to a linearized function": (
        lambda: ft.linearize(torch.sin, X_T)[1](X_T[0]), ValueError,
        "linearize: tangents must be like the primals",
    ),
    "integers": (
        lambda: ft.jacfwd(lambda n: n * 2.0)(torch.tensor([1])), TypeError,
        "got torch.int64; wanted a floating-point tensor, or a float; fix: pass it as another argument",
    ),
    "results that are integers": (
        lambda: ft.jacrev(lambda x: {"y": x, "n": x.long()})(X_T), TypeError,
        "n: got no floating-point tensor; wanted one; fix: return it as auxiliary value, with",
    ),
    "an argument that is not there": (
        lambda: ft.jacfwd(torch.sin, 2)(X_T), ValueError,
        "got argnums=2 for 1 positional arguments",
    ),
    "columns of ranks": (
        lambda: ft.shard_map(
            lambda x: ft.jacfwd(lambda x: lax.psum(x.square().sum(), "tp"))(x), MESH, P("tp"), P()
        )(X_T),
        ValueError, "got one that varies over 'tp'; wanted one that all ranks have",
    ),
    "results of ranks": (
        lambda: ft.shard_map(
            lambda x, y: ft.jacrev(lambda x: (x * y).sum(0))(x), MESH, (P(), P("tp")), P()
        )(X_T[:2], X_T),
        ValueError, "got a result that varies over 'tp'; wanted one replicated over the mesh",
    ),
    "Hessians of parts": (
        lambda: ft.shard_map(
            lambda x: ft.hessian(lambda x: lax.psum(x.square().sum(), "tp"))(x), MESH, P("tp"), P()
        )(X_T),
        ValueError, "fix: differentiate the mapped function, outside of shard_map",
    ),
    "a rule with one result": (
        custom_rule(lambda args, t: t[0]), ValueError,
        "returned Tensor; wanted (f(*args), its tangent), trees of the same structure",
    ),
    "a tangent of another shape": (
        custom_rule(lambda args, t: (args[0], t[0].sum())), ValueError,
        "returned a tangent () torch.float64 for the result, (4, 4) torch.float64",
    ),
    "a tangent of another tree": (
        custom_rule(lambda args, t: (args[0], {"t": t[0]})), ValueError,
        "returned a tangent {'t': tensor(",
    ),
    "a rule that closes over what is differentiated": (
        lambda: ft.grad(lambda w: ft.custom_jvp(
            lambda x: x * w, lambda args, t: (args[0] * w, t[0] * w)
        )(X_T[0, 0]))(X_T[0, 1]),
        ValueError, "the function or its rule closes over a tensor that is being differentiated",
    ),
    "a Python int": (
        lambda: ft.grad(lambda x: x * x)(3), TypeError,
        "0: got int; wanted a floating-point tensor, or a float; fix: 3.0, if a number is meant",
    ),
    "a tangent of an int": (
        lambda: ft.jvp(lambda x: x * x, (3,), (1.0,)), TypeError,
        "tangents/0: got one, of a primal of int; wanted None; fix: make the primal floating-point",
    ),
    "a tangent that is not reduced": (
        lambda: torch.func.jvp(ft.shard_map(
            ft.custom_jvp(
                lambda x: lax.psum(x, "tp"), lambda args, t: (lax.psum(args[0], "tp"), t[0])
            ), MESH, P("tp"), P(),
        ), (X_T,), (X_T,)),
        ValueError, "fix: reduce it as the result is, such as by lax.psum",
    ),
    "a compiled function": (
        lambda: ft.jvp(ft.jit(torch.sin, backend="eager"), (X_T,), (X_T,)), ValueError,
        "wanted jit outermost",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    run, error, message = WRONG[name]
    with pytest.raises(error, match=re.escape(message)):
        run()


@pytest.mark.distributed
def test_on_processes(torchrun):
    """Two ranks get what the simulation of them does."""
    done = torchrun(Path(__file__).with_name("gloo_derivatives.py"), 2)
    assert "check: ok" in done.stdout
