"""custom_root, custom_linear_solve and linear_transpose against JAX, on eight CPU devices."""

from __future__ import annotations

import doctest
import functools
import inspect
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import functron as ft
from functron import Mesh, P, lax
from tests.transforms.implicit_programs import CONTEXTS, NAMES, OURS, PROGRAMS, derive, iterate
from tests.transforms.lives import LIVES

SHAPE = {"tp": 8}
ALL = tuple(SHAPE)
DEVICES = np.array(jax.devices()[:8])
JAXS = SimpleNamespace(
    **{n: getattr(jax.lax, n) for n in NAMES}, vmap=jax.vmap, remat=jax.checkpoint, sin=jnp.sin,
    grad=jax.grad, jvp=jax.jvp, linear_transpose=jax.linear_transpose, linearize=jax.linearize,
    ones=jnp.ones_like,
    scan=lambda f, xs: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, xs)[1],
)  # fmt: skip
draw = np.random.default_rng(0).normal
W, X, V = draw(size=(3, 3)) / 2, draw(size=3), (draw(size=(3, 3)), draw(size=3))
SCALES = np.array([0.3, -0.9])


def stacked(L, name, context, twice, *args):
    return jax.tree.map(lambda y: y[None], derive(L, name, context, twice, *args))


@functools.cache
def expected(name):
    S = PartitionSpec
    program = jax.shard_map(
        functools.partial(stacked, JAXS, name, "vmap", True),
        mesh=jax.sharding.Mesh(DEVICES, ALL), in_specs=(S(),) * 4, out_specs=S(ALL),
        check_vma=False,
    )  # fmt: skip
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(program)(W, X, SCALES, V))


@pytest.mark.pairwise
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("life", LIVES)
def test_is_jaxs(name, context, life):
    args = jax.tree.map(torch.from_numpy, (W, X, SCALES, V))
    twice = life == "simulated" or name in ("newton", "transposed")  # long programs, else
    program = functools.partial(stacked, OURS, name, context, twice)
    mapped = ft.shard_map(program, Mesh(**SHAPE), (P(),) * 4, P(ALL), check=False)
    got = jax.tree.leaves(LIVES[life](mapped)(*args))
    assert len(got) == (9 if twice else 3)
    for mine, jaxs in zip(got, jax.tree.leaves(expected(name)), strict=twice):
        assert mine.shape == jaxs.shape
        np.testing.assert_allclose(mine, jaxs, rtol=1e-8, atol=1e-8)


def test_forward_mode_needs_no_solver_of_the_transpose():
    a, b = torch.from_numpy(W * 0.2), torch.from_numpy(X)
    solve = lambda a: lax.custom_linear_solve(lambda v: v + a @ v, b, iterate(OURS))
    got = torch.func.jvp(solve, (a,), (torch.from_numpy(V[0]),))[1]
    with jax.enable_x64(True):
        dense = lambda a: jnp.linalg.solve(jnp.eye(3) + a, X)
        want = jax.jvp(dense, (jnp.asarray(W * 0.2),), (jnp.asarray(V[0]),))[1]
    np.testing.assert_allclose(got, want, rtol=1e-8)
    with pytest.raises(
        ValueError, match="transpose_solve: got reverse mode without it; wanted the s"
    ):
        ft.grad(lambda a: solve(a).sum())(a)


def test_solvers_run_once():
    calls = []

    def solve(f, x):
        calls.append(0)
        return (2 * x).sqrt()

    root = lambda a: lax.custom_root(lambda x: x * x - a, a / 2, solve, lambda g, y: y / g(1.0))
    assert ft.grad(root)(torch.tensor(4.0)) == 0.25
    assert len(calls) == 1


def replicated(a, b):
    """A system whose columns ranks divide, while all have the unknowns."""

    def program(a, b):
        part = lambda v: lax.dynamic_slice_in_dim(v, 2 * lax.axis_index("tp"), 2)
        once = lambda f, b: 2 * b - f(b)
        matvec = lambda v: v + lax.psum(a @ part(v), "tp")
        solve = lambda b: solved(b, once, matvec, transpose_solve=once)
        return ft.sync_gradients(ft.grad(lambda b: solve(b).sum())(b), P())

    return ft.shard_map(program, Mesh(tp=2), (P(None, "tp"), P()), P())(a, b)


def solved(b=None, solve=lambda f, b: b, matvec=lambda v: v, **options):
    return lax.custom_linear_solve(matvec, torch.ones(2) if b is None else b, solve, **options)


def root(f=lambda x: x, solve=lambda f, x: x, tangent=lambda g, y: y, x: Any = 1.0, **options):
    return lax.custom_root(f, x, solve, tangent, **options)


def transpose(f, ct=None):
    x = torch.ones(2)
    return ft.linear_transpose(f, x)(x if ct is None else ct)


ANY: Any = None
WRONG = {
    "shared unknowns": (
        lambda: replicated(torch.ones(4, 4), torch.ones(4)), ValueError,
        "got psum over 'tp' in matvec, along which x is replicated, in reverse mode; wanted",
    ),
    "a function in global view": (
        lambda: ft.partition(solved, Mesh(tp=2), P("tp"), P("tp"))(torch.ones(2)), ValueError,
        "the equation: got a function that functron.partition cuts.*fix: ft.shard_map",
    ),
    "no solver": (lambda: solved(solve=ANY), TypeError, r"solve: got None \(NoneType\); wanted a f"),
    "integers": (lambda: solved(torch.ones(2).int()), TypeError, "b: got torch.int32; wanted a flo"),
    "another shape": (
        lambda: solved(solve=lambda f, b: b[:1]), ValueError,
        r"what solve returned: got \(1,\) torch.float32; wanted \(2,\) torch.float32, as b has",
    ),
    "no auxiliary values": (
        lambda: solved(has_aux=True), ValueError, r"got Tensor; wanted \(x, aux\), as has_aux=True",
    ),
    "a matrix that is not square": (
        lambda: solved(solve=lambda f, b: f(b), matvec=lambda v: v[:1]), ValueError,
        r"what matvec returned: got \(1,\)",
    ),
    "no solver of tangents": (
        lambda: root(tangent=ANY), TypeError, r"tangent_solve: got None \(NoneType\); wanted a f",
    ),
    "a guess of text": (lambda: root(x="text"), TypeError, "initial_guess: got str; wanted a tensor"),
    "another root": (
        lambda: root(solve=lambda f, x: x.double()), ValueError,
        r"what solve returned: got \(\) torch.float64; wanted \(\) torch.float32",
    ),
    "another equation": (
        lambda: root(lambda x: (x, x), lambda f, x: f(x)), ValueError, "what f returned",
    ),
    "another tangent": (
        lambda: ft.grad(lambda a: root(lambda x: x - a, tangent=lambda g, y: y.expand(2)))(
            torch.ones(())
        ), ValueError, r"what tangent_solve returned: got \(2,\)",
    ),
    "affine": (lambda: transpose(lambda x: x + 1e-9), ValueError, "a function that is not linear"),
    "square": (lambda: transpose(lambda x: x * x), ValueError, r"wanted fun\(-2 x\) = -2 fun\(x\)"),
    "relu": (lambda: transpose(torch.relu), ValueError, "a function that is not linear"),
    "a mapped norm": (
        lambda: torch.func.vmap(lambda x: transpose(lambda y: y.norm() * x))(torch.ones(3, 2)),
        ValueError, "a function that is not linear",
    ),
    "a cotangent of something else": (
        lambda: transpose(lambda x: 2 * x, torch.ones(3)), ValueError,
        r"cotangents: got \(3,\) torch.float32; wanted \(2,\) torch.float32, as the result of fun",
    ),
    "a primal of integers": (
        lambda: ft.linear_transpose(lambda x: x, torch.arange(2)), TypeError,
        "primals/0: got torch.int64; wanted a floating-point tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["custom_root", "custom_linear_solve"])
def test_examples_run(name):
    names = {"torch": torch, "lax": lax, "ft": ft}
    text = inspect.getdoc(getattr(lax, name)) or ""
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert example.examples
    report: list[str] = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert "".join(report) == ""
