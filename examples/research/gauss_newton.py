"""The largest eigenvalues of a Gauss-Newton matrix, by Lanczos, of parameters that tp splits."""

import torch

import functron as ft
from functron import P, lax

mesh = ft.Mesh(dp=2, tp=2)
specs = {"up": P(None, "tp"), "down": P("tp")}


def model(w, x):
    return lax.psum((x @ w["up"]).tanh() @ w["down"], "tp")


def dot(a, b):
    """The inner product of two trees of which ranks have parts."""
    axes = {name: ft.spmd.spec_axes(spec) for name, spec in specs.items()}
    return torch.stack([lax.psum((a[k] * b[k]).sum(), axes[k]) for k in specs]).sum()


def add(v, factor, u):
    return ft.tree.map(lambda a, b: a + factor * b, v, u)


def gauss_newton(w, x, v):
    """J^T H J v of the mean squared error, whose H is 2 / count."""
    tangent = torch.func.jvp(lambda w: model(w, x), (w,), (v,))[1]
    _, pull = ft.vjp(lambda w: model(w, x), w)
    count = tangent.numel() * lax.axis_size("dp")
    (share,) = pull(2 / count * tangent / lax.axis_size("tp"))  # all ranks of tp have the output
    return ft.sync_gradients(share, specs)


def lanczos(w, x, v, steps=12):
    """The eigenvalues of the tridiagonal matrix, with all vectors made orthogonal again."""
    basis, diagonal, beside = [], [], []
    for _ in range(steps):
        v = add(v, 1 / dot(v, v).sqrt() - 1, v)
        basis.append(v)
        v = gauss_newton(w, x, v)
        diagonal.append(dot(v, basis[-1]))
        for u in [*basis, *basis]:
            v = add(v, -dot(u, v), u)
        beside.append(dot(v, v).sqrt())
    beside = torch.stack(beside[:-1]).diag(1)
    return torch.linalg.eigvalsh(torch.stack(diagonal).diag() + beside + beside.mT).flip(0)


keys = ft.random.split(ft.random.key(0), 5).unbind(0)
w, v = ({"up": ft.random.normal(one, (6, 8), torch.double),
         "down": ft.random.normal(two, (8, 2), torch.double)}
        for one, two in (keys[:2], keys[2:4]))  # fmt: skip
x = ft.random.normal(keys[4], (16, 6), torch.double)
run = ft.shard_map(lanczos, mesh, (specs, P("dp"), specs), P())
result = ft.gather(run(w, x, v), P(), mesh)[:3]
print("largest eigenvalues", *(f"{float(value):.6f}" for value in result))
