"""custom_vjp and custom_jvp as decorators, against JAX's; rules differ from what they stand for."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

import functron as ft
from functron import Mesh, P

OURS = SimpleNamespace(
    custom_vjp=ft.custom_vjp, custom_jvp=ft.custom_jvp, grad=torch.func.grad, jvp=torch.func.jvp,
    vmap=torch.func.vmap, sin=torch.sin, cos=torch.cos, remat=ft.remat,
    scan=lambda f, xs: ft.scan(lambda c, x: (c, f(x)), torch.zeros(()), xs)[1],
)  # fmt: skip
JAXS = SimpleNamespace(
    custom_vjp=jax.custom_vjp, custom_jvp=jax.custom_jvp, grad=jax.grad, jvp=jax.jvp,
    vmap=jax.vmap, sin=jnp.sin, cos=jnp.cos, remat=jax.checkpoint,
    scan=lambda f, xs: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, xs)[1],
)  # fmt: skip


def defvjp(L):
    @functools.partial(L.custom_vjp, nondiff_argnums=(1, 3))
    def f(x, curve, y, power=2):
        return curve(x) * y**power

    def forward(x, curve, y, power):
        return f(x, curve, y, power), {"x": x, "y": y}

    def backward(curve, power, kept, ct):
        return 3 * ct * L.cos(kept["x"]) * kept["y"], 5 * ct * curve(kept["x"]) * power

    f.defvjp(forward, backward)
    return lambda x: f(x, L.sin, y=L.cos(x)) + f(x, L.cos, x, power=3)


def defjvp(L):
    @functools.partial(L.custom_jvp, nondiff_argnums=(0,))
    def f(curve, x, y):
        return {"out": curve(x) * y, "y": y}

    @f.defjvp
    def _(curve, args, tangents):
        (x, y), (s, t) = args, tangents
        return f(curve, x, y), {"out": 3 * L.cos(x) * y * s + curve(x) * t, "y": 7 * t}

    def both(x):
        made = f(L.sin, x, y=x**2)
        return made["out"] * made["y"]

    return both


def defjvps(L):
    @L.custom_jvp
    def f(x, y, z=2.0):
        return L.sin(x) * y * z

    f.defjvps(
        lambda t, out, x, y, z: 3 * t * L.cos(x) * y, lambda t, out, x, y, z: 5 * t * out, None
    )
    return lambda x: f(x, L.cos(x)) + f(y=x, x=x * x)


X, V = np.random.default_rng(0).normal(size=(2, 5))
MODES = {
    "value": lambda L, f, x, v: f(x),
    "grad": lambda L, f, x, v: L.grad(lambda x: L.sin(f(x)).sum())(x),
    "grad of grad": lambda L, f, x, v: L.grad(
        lambda x: (L.grad(lambda x: L.sin(f(x)).sum())(x) * v).sum()
    )(x),
    "vmap of scan": lambda L, f, x, v: L.vmap(lambda s: L.scan(L.remat(L.grad(f)), s * x))(v),
}  # fmt: skip
FORWARD = {
    "jvp": lambda L, f, x, v: L.jvp(f, (x,), (v,)),
    "jvp of grad": lambda L, f, x, v: L.jvp(L.grad(lambda x: L.sin(f(x)).sum()), (x,), (v,)),
    "jvp of jvp": lambda L, f, x, v: L.jvp(lambda x: L.jvp(f, (x,), (v,))[1], (x,), (v,)),
}


@pytest.mark.parametrize("make", [defvjp, defjvp, defjvps])
def test_is_jaxs(make):
    """Of custom_vjp JAX has no forward mode."""
    modes = MODES if make is defvjp else MODES | FORWARD
    with jax.enable_x64(True):
        for mode in modes.values():
            want = mode(JAXS, make(JAXS), jnp.asarray(X), jnp.asarray(V))
            got = mode(OURS, make(OURS), torch.from_numpy(X), torch.from_numpy(V))
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_partitions():
    """Where a rule calls its function, which has but one level of rules there."""
    slope = lambda L: L.grad(lambda x: L.sin(defvjp(L)(x)).sum())
    with jax.enable_x64(True):
        want = slope(JAXS)(jnp.asarray(X[:4]))
    own = SimpleNamespace(**{**vars(OURS), "grad": ft.grad})
    got = ft.partition(slope(own), Mesh(tp=2), P("tp"), P("tp"))(torch.from_numpy(X[:4]))
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_rules_with_arguments_by_position_and_methods():
    """Rules may come with the function, be given again, and take tensors that are mapped."""
    f = ft.custom_vjp(
        lambda n, x: n * x, lambda n, x: (n * x, None), lambda n, _, ct: (10 * n * ct,),
        lambda n, args, tangents: (n * args[0], 100 * n * tangents[0]), nondiff_argnums=0,
    )  # fmt: skip
    x, rows = torch.tensor(2.0), torch.tensor([1.0, 3.0])
    assert ft.grad(lambda x: f(2.0, x))(x) == 20
    assert ft.jvp(lambda x: f(2.0, x), (x,), (x,))[1] == 400
    assert torch.func.vmap(lambda n: ft.grad(lambda x: f(n, x))(x))(rows).tolist() == [10, 30]
    g = ft.custom_jvp(torch.sqrt)
    for factor in (1.0, 2.0):
        rule = lambda args, tangents, factor=factor: (args[0].sqrt(), factor * tangents[0])
        assert g.defjvp(rule) is rule
        assert ft.grad(g)(torch.tensor(4.0)) == factor


def sine(**options):
    return ft.custom_jvp(lambda x, n: torch.sin(x) * n, **options)


def ruled(*rules):
    f = sine()
    f.defjvps(*rules)
    return ft.grad(lambda x: f(x, 1.0))(torch.tensor(1.0))


ONE = torch.tensor(1.0)
POSITIONS: Any = (0,)
WRONG = {
    "no rule yet": (
        lambda: sine()(ONE, 2), ValueError,
        r"got a call before its rules are given; wanted <lambda>.defjvp\(jvp\)",
    ),
    "no rules yet": (
        lambda: ft.custom_vjp(torch.sin)(ONE), ValueError, r"(?s)custom_vjp of sin .*defvjp\(forward",
    ),
    "half a rule": (
        lambda: ft.custom_vjp(torch.sin, lambda x: (x, None)), TypeError,
        r"backward: got None; wanted a function",
    ),
    "JAX's second argument": (
        lambda: ft.custom_jvp(torch.sin, POSITIONS), TypeError, r"jvp: .*function",
    ),
    "no such argument": (
        lambda: sine(nondiff_argnums=(2,)), ValueError,
        r"nondiff_argnums: got \(2,\); wanted positions of arguments of f, which has 2 positional",
    ),
    "the same twice": (
        lambda: sine(nondiff_argnums=(1, -1)), ValueError, r"got \(1, -1\); wanted .*each once",
    ),
    "a name": (lambda: sine(nondiff_argnums=("n",)), TypeError, r"got \('n',\); wanted positions"),
    "differentiated": (
        lambda: ft.grad(lambda n: ft.custom_jvp(
            lambda x, n: x * n, lambda n, a, t: (a[0] * n, t[0]), nondiff_argnums=1
        )(ONE, n))(ONE), ValueError,
        r"argument 1: got a tensor that is differentiated; wanted a value that nothing",
    ),
    "a rule that is none": (
        lambda: ft.custom_vjp(lambda *, x: x).defvjp(1, 2), TypeError, r"forward: got 1; wanted a",
    ),
    "a rule too many": (
        lambda: ruled(None, None, None), ValueError,
        r"jvps: got 3 rules; wanted one for each of 2 arguments",
    ),
    "another shape": (
        lambda: ruled(lambda t, out, x, n: t.expand(3), None), ValueError,
        r"its tangent: got \(3,\) torch.float32; wanted \(\) torch.float32",
    ),
    "defjvps with others": (
        lambda: sine(nondiff_argnums=(1,)).defjvps(None), TypeError,
        r"got nondiff_argnums=\(1,\); wanted a rule for each argument; fix: defjvp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_keywords_that_rules_cannot_take():
    f = ft.custom_vjp(lambda x, *, scale: x * scale)
    f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    with pytest.raises(
        TypeError, match="keywords: got scale; wanted arguments that have a positio"
    ):
        f(ONE, scale=2)
