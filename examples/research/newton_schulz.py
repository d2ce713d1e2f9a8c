"""Muon's orthogonalisation of matrices that tp splits: ranks sum the products of their columns."""

import torch

import functron as ft
from functron import P, lax

mesh = ft.Mesh(dp=2, tp=2)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(x, steps=12):
    """The nearest matrix with singular values near 1 (Jordan et al. 2024), of columns of x.

    The last steps are Newton's own, which go to 1 exactly.
    """
    x = x / lax.psum(x.square().sum(), "tp").sqrt()
    for step in range(steps):
        a, b, c = COEFFICIENTS if step < 6 else (1.875, -1.25, 0.375)
        gram = lax.psum(x @ x.mT, "tp")
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def update(weights, x, y):
    """A step of a linear model by the orthogonalised gradient of its columns, and its loss."""

    def loss(w):
        hidden = x @ w["in"]
        out = lax.psum(hidden.tanh() @ w["out"], "tp")
        return lax.pmean((out - y).square().mean(), "dp")

    value, grads = ft.value_and_grad(loss)(weights)
    grads = ft.sync_gradients(grads, specs)
    step = {"in": orthogonalise(grads["in"]), "out": orthogonalise(grads["out"].mT).mT}
    return ft.tree.map(lambda w, g: w - 0.05 * g, weights, step), value, step["in"]


specs = {"in": P(None, "tp"), "out": P("tp")}
keys = ft.random.split(ft.random.key(0), 4).unbind(0)
weights = {"in": ft.random.normal(keys[0], (8, 32), torch.double) / 3,
           "out": ft.random.normal(keys[1], (32, 8), torch.double) / 6}  # fmt: skip
x, y = (ft.random.normal(key, (16, 8), torch.double) for key in keys[2:])
step = ft.shard_map(update, mesh, (specs, P("dp"), P("dp")), (specs, P(), P(None, "tp")))
losses = []
for _ in range(20):
    weights, value, change = step(weights, x, y)
    losses.append(float(value))
result = losses, weights, change
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} by updates with singular values of 1")
