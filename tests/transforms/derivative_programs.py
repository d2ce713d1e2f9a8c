"""Per-rank programs that compute one function in different ways, for derivatives of them."""

from __future__ import annotations

import functools

import numpy as np
import torch

import functron as ft
from functron import P, lax, tree

generator = np.random.default_rng(0)
W = {"up": generator.normal(size=(4, 6)), "down": [generator.normal(size=(6, 3))]}
X = generator.normal(size=(4, 4))
SPECS = {"up": P(None, "tp"), "down": [P("tp", None)]}


def tangents(value):
    return tree.map(lambda x: np.cos(3 * x + 1), value)


def to_torch(value):
    return tree.map(torch.from_numpy, value)


W_T, X_T = to_torch(W), to_torch(X)
TANGENTS = tangents(W), tangents(X)
TANGENTS_T = to_torch(TANGENTS)


def on_ranks(w, x):
    return torch.tanh(lax.psum(torch.tanh(x @ w["up"]) @ w["down"][0], "tp"))


def with_rule(jvp=None):
    """`on_ranks`, whose hidden layer has a backward written down."""

    def hidden(w, x):
        return torch.tanh(x @ w)

    def forward(w, x):
        y = hidden(w, x)
        return y, (w, x, y)

    def backward(residuals, cotangent):
        w, x, y = residuals
        inner = cotangent * (1 - y**2)
        return x.mT @ inner, inner @ w.mT

    rule = ft.custom_vjp(hidden, forward, backward, jvp)
    return lambda w, x: torch.tanh(lax.psum(rule(w["up"], x) @ w["down"][0], "tp"))


def push_hidden(args, tangents):
    (w, x), (dw, dx) = args, tangents
    y = torch.tanh(x @ w)
    return y, (1 - y**2) * (dx @ w + x @ dw)


def by_custom_jvp(w, x):
    hidden = ft.custom_jvp(lambda w, x: torch.tanh(x @ w), push_hidden)
    return torch.tanh(lax.psum(hidden(w["up"], x) @ w["down"][0], "tp"))


def with_rules_given_later():
    """The same with decorators; the hidden layer's nonlinearity and depth have no derivatives."""

    @functools.partial(ft.custom_vjp, nondiff_argnums=(0, -1))
    def hidden(curve, w, x, options=None):
        return curve(x @ w)

    def forward(curve, w, x, options):
        y = hidden(curve, w, x, options=options)  # has the rule, as in JAX
        return y, (w, x)

    def backward(curve, options, residuals, cotangent):
        w, x = residuals
        inner = cotangent * options["slope"](curve(x @ w))
        return x.mT @ inner, inner @ w.mT

    hidden.defvjp(forward, backward)
    slope = {"slope": lambda y: 1 - y**2}
    rule = lambda w, x: hidden(torch.tanh, x=x, w=w, options=slope)
    return lambda w, x: torch.tanh(lax.psum(rule(w["up"], x) @ w["down"][0], "tp"))


def by_defjvps(w, x):
    """Each argument's rule; the last has none."""

    @ft.custom_jvp
    def hidden(w, x, scale=1.0):
        return torch.tanh(x @ w) * scale

    hidden.defjvps(
        lambda t, y, w, x, scale: (1 - y**2) * (x @ t),
        lambda t, y, w, x, scale: (1 - y**2) * (t @ w),
        None,
    )
    return torch.tanh(lax.psum(hidden(w["up"], x) @ w["down"][0], "tp"))


def by_scan(w, x):
    """Rows one after another."""
    return ft.scan(lambda carry, row: (carry, on_ranks(w, row)), torch.zeros(()), x)[1]


OP = ft.ops.register("test_tanh_product", lambda x, w: torch.tanh(x @ w))
PROGRAMS = {
    "plain": on_ranks,
    "remat": ft.remat(on_ranks),
    "remat-dots": ft.remat(on_ranks, policy=ft.policies.dots),
    "custom_vjp": with_rule(),
    "custom_vjp-jvp": with_rule(push_hidden),
    "custom_jvp": by_custom_jvp,
    "defvjp": with_rules_given_later(),
    "defjvps": by_defjvps,
    "scan": by_scan,
    "op": lambda w, x: torch.tanh(lax.psum(OP(x, w["up"]) @ w["down"][0], "tp")),
}
