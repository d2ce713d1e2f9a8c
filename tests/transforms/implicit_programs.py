"""Per-rank programs that solve equations by loops of unknown length, in torch's words and JAX's."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import functron as ft
from functron import lax

NAMES = ["psum", "axis_index", "while_loop", "custom_root", "custom_linear_solve", "fori_loop"]
OURS = SimpleNamespace(
    **{n: getattr(lax, n) for n in NAMES}, vmap=torch.func.vmap, remat=ft.remat, sin=torch.sin,
    grad=torch.func.grad, jvp=torch.func.jvp, linear_transpose=ft.linear_transpose,
    linearize=ft.linearize, ones=torch.ones_like,
    scan=lambda f, xs: ft.scan(lambda c, x: (c, f(x)), torch.zeros(()), xs)[1],
)  # fmt: skip


def iterate(L, goes_on=lambda far: far > 1e-20):
    """A solver of linear equations near the identity."""

    def solve(matvec, b):
        far = lambda c: goes_on(((b - matvec(c[0])) ** 2).sum()) & (c[1] < 300)
        step = lambda c: (c[0] + (b - matvec(c[0])), c[1] + 1)
        return L.while_loop(far, step, (0 * b, 0))[0]

    return solve


def together(L):
    """The same, until it has converged on all ranks of tp."""
    return iterate(L, lambda far: L.psum(far, "tp") > 1e-20)


def newton(L, w, x):
    """Roots of cubic equations, element by element."""
    a = 2 + L.sin(w[0])

    def solve(f, y):
        step = lambda y: y - f(y) / (3 * y * y + a)
        return L.while_loop(lambda y: (f(y) ** 2).sum() > 1e-20, step, y)

    return L.custom_root(lambda y: y**3 + a * y - x, 0 * x, solve, lambda g, y: y / g(L.ones(y)))


def between_ranks(L, w, x):
    """A fixed point that ranks have in common, by its tangent's own loop."""
    f = lambda y: {"y": y["y"] + 0.02 * L.sin(L.psum(w @ y["y"], "tp")) - x}

    def solve(f, y):
        own = lambda y: f({"y": y})["y"]
        far = lambda y: L.psum((own(y) ** 2).sum(), "tp") > 1e-20
        y = L.while_loop(far, lambda y: y - own(y), y["y"])
        return {"y": y}, {"far": (own(y) ** 2).sum()}

    def tangent_solve(g, v):
        flat = lambda v: g({"y": v})["y"]
        return {"y": L.custom_linear_solve(flat, v["y"], together(L), together(L))}

    made, aux = L.custom_root(f, {"y": x}, solve, tangent_solve, has_aux=True)
    return made["y"] + 0 * aux["far"]


def near(w):
    return 0.1 * w + 0.01 * w @ w.T


def own_systems(L, w, x):
    a = near(w)
    return L.custom_linear_solve(lambda v: v + a @ v * 0.5, x, iterate(L), iterate(L))


def shared_system(L, w, x):
    """Unknowns that ranks divide, in a symmetric matrix."""
    a = 0.05 * (w + w.T)

    def solve(matvec, b):
        y = together(L)(matvec, b)
        return y, (matvec(y) - b).sum()

    matvec = lambda v: v + a @ L.psum(a.T @ v, "tp")
    y, far = L.custom_linear_solve(matvec, x, solve, symmetric=True, has_aux=True)
    return y + 0 * far


def transposed(L, w, x):
    f = lambda y, z: L.psum(w @ y, "tp") * x - L.sin(w)[0] * z
    moved = L.linear_transpose(f, x, x)(L.sin(x))
    return moved[0] * 2 + moved[1]


PROGRAMS = {f.__name__: f for f in (newton, between_ranks, own_systems, shared_system, transposed)}
CONTEXTS = {
    "vmap": lambda L, f, s: L.vmap(f)(s),
    "scan": lambda L, f, s: L.scan(f, s),
    "remat": lambda L, f, s: L.remat(L.vmap(f))(s),
}


def derive(L, name, context, twice, w, x, scales, v):
    """Values, gradients, and products with the Hessian of a rank's own copy, by both modes."""
    place = 1.0 + L.axis_index("tp")

    def loss(w, x):
        one = lambda scale: PROGRAMS[name](L, w * scale, x * place)
        y = CONTEXTS[context](L, one, scales)
        return (L.sin(y) * place).sum(), y

    first = L.grad(lambda *both: loss(*both)[0], (0, 1))
    if not twice:
        return [loss(w, x)[1], first(w, x)]
    along = lambda w, x: sum((g * t).sum() for g, t in zip(first(w, x), v, strict=True))
    made = loss(w, x)[1], first(w, x), L.grad(along, (0, 1))(w, x)
    return [*made, *L.jvp(first, (w, x), tuple(v))]
