"""grad, value_and_grad, vjp: torch.func's numbers, autograd's memory, and their errors."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax

torch.manual_seed(0)


def params():
    return {"w": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}


X = torch.randn(5, 4, dtype=torch.float64)


def loss(p, x):
    return torch.tanh(x @ p["w"] + p["b"]).square().sum()


def same(got, want):
    for a, b in zip(ft.tree.leaves(got), ft.tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_value_and_grad_is_torch_funcs():
    want, value = torch.func.grad_and_value(loss)(p := params(), X)
    got_value, got = ft.value_and_grad(loss)(p, X)
    same((got_value, got), (value, want))
    assert not got_value.requires_grad
    same(ft.grad(loss)(p, X), want)


def test_argnums_and_aux():
    def with_aux(p, x):
        return loss(p, x), {"mean": x.mean(), "note": "kept"}

    (_, aux), (gp, gx) = ft.value_and_grad(with_aux, (0, 1), has_aux=True)(p := params(), X)
    same((gp, gx), torch.func.grad(loss, (0, 1))(p, X))
    assert aux["note"] == "kept"
    grads, aux = ft.grad(with_aux, 1, has_aux=True)(p, X)
    same(grads, torch.func.grad(loss, 1)(p, X))


def test_unused_parameters_get_zeros():
    grads = ft.grad(lambda p: p["w"].sum())(params())
    same(grads, {"w": torch.ones(4, 3).double(), "b": torch.zeros(3).double()})
    same(ft.grad(lambda p: torch.zeros(()).double())(params())["b"], torch.zeros(3).double())


@pytest.mark.parametrize("outer", ["func", "tape", "vmap", "jvp"])
def test_second_order_through_any_outer_transform(outer):
    p = params()

    def slope(grad):
        return lambda p: sum(g.square().sum() for g in ft.tree.leaves(grad(loss)(p, X)))

    want = torch.func.grad(slope(torch.func.grad))(p)
    if outer == "func":
        same(torch.func.grad(slope(ft.grad))(p), want)
        same(ft.grad(slope(ft.grad))(p), want)
    elif outer == "tape":
        taped = ft.tree.map(lambda leaf: leaf.clone().requires_grad_(), p)
        slope(ft.grad)(taped).backward()
        same({k: v.grad for k, v in taped.items()}, want)
    elif outer == "vmap":
        rows = torch.func.vmap(lambda x: ft.grad(loss)(p, x[None]))(X)
        same(ft.tree.map(lambda leaf: leaf.sum(0), rows), torch.func.grad(loss)(p, X))
    else:
        v = ft.tree.map(torch.cos, p)
        got = torch.func.jvp(lambda p: ft.grad(loss)(p, X), (p,), (v,))[1]
        same(got, torch.func.jvp(lambda p: torch.func.grad(loss)(p, X), (p,), (v,))[1])


def test_second_order_through_a_mapped_program():
    """The tape outside lies under the batched tensors of simulated ranks."""
    p = params()

    def gradient(p, x):
        return ft.sync_gradients(ft.grad(lambda p: lax.psum(loss(p, x), "dp"))(p), P())

    mapped = ft.shard_map(gradient, Mesh(dp=5), (P(), P("dp")), P())

    def slope(grad):
        return lambda p: sum(g.square().sum() for g in ft.tree.leaves(grad(p, X)))

    want = torch.func.grad(slope(torch.func.grad(loss)))(p)
    same(torch.func.grad(slope(mapped))(p), want)
    same(ft.grad(slope(mapped))(p), want)


def test_outer_tape_through_a_closure():
    """The gradient depends on a tensor that is only closed over, as in meta-learning."""
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    p = params()

    def inner(q):
        return (rate * loss(q, X)).sin()

    stepped = ft.tree.map(lambda a, g: a - g, p, ft.grad(inner)(p))
    loss(stepped, X).backward()

    def outer(rate):
        g = torch.func.grad(lambda q: (rate * loss(q, X)).sin())(p)
        return loss(ft.tree.map(lambda a, b: a - b, p, g), X)

    same(rate.grad, torch.func.grad(outer)(rate.detach()))


def test_vjp_maps_cotangents_back():
    def f(p, x):
        return {"y": x @ p["w"], "n": x.sum()}

    out, pullback = ft.vjp(f, p := params(), X)
    cotangent = {"y": torch.randn(5, 3).double(), "n": torch.randn(()).double()}
    want_out, want = torch.func.vjp(f, p, X)
    same(out, want_out)
    same(pullback(cotangent), want(cotangent))


def test_vjp_skips_integers():
    out, pullback = ft.vjp(lambda x, i: x[i], X, torch.tensor([0, 2]))
    dx, di = pullback(torch.ones_like(out))
    assert di is None
    assert dx.sum() == 8


def test_errors():
    with pytest.raises(TypeError, match=r"(?s)0/i: got torch.int64; wanted a floating-point"):
        ft.grad(lambda p: p["x"].sum())({"x": X, "i": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"shape \(5,\); wanted a floating-point scalar"):
        ft.grad(lambda x: x.sum(1))(X)


def deep(layers=12, width=256, rows=2048):
    weights = torch.randn(layers, width, width) / width**0.5
    x = torch.randn(rows, width)

    def run(weights, block):
        y, _ = ft.scan(block, x, weights)
        return y.square().mean()

    def block(x, w):
        return x + torch.tanh(torch.tanh(x @ w) * 2), None

    return weights, run, block


def test_memory_is_that_of_autograd_and_remat_saves_most_of_it(peak_bytes):
    weights, run, block = deep()

    def tape():
        leaf = weights.detach().requires_grad_()
        return torch.autograd.grad(run(leaf, block), leaf)

    plain = peak_bytes(tape)
    ours = peak_bytes(lambda: ft.value_and_grad(lambda w: run(w, block))(weights))
    saved = peak_bytes(lambda: ft.value_and_grad(lambda w: run(w, ft.remat(block)))(weights))
    assert ours <= 1.05 * plain
    assert saved <= 0.6 * plain


def test_memory_inside_a_transform_is_below_torch_funcs(peak_bytes):
    weights, run, block = deep()
    stack = weights[None]

    def mapped(grad):
        return lambda: torch.func.vmap(grad(lambda w: run(w, block)))(stack)

    ours, theirs = peak_bytes(mapped(ft.grad)), peak_bytes(mapped(torch.func.grad))
    assert ours <= 0.75 * theirs


def test_shares_add_up_on_any_mesh():
    """The shares of a replicated parameter sum to its gradient, whatever splits the batch."""
    want = torch.func.grad(lambda p: loss(p, X[:4]) / 4)(p := params())
    for mesh, spec in ((Mesh(dp=2, tp=2), P("dp")), (Mesh(dp=4), P("dp")), (Mesh(tp=4), P())):

        def program(p, x):
            grads = ft.grad(lambda p: lax.psum(loss(p, x), "dp") / 4)(p)
            return ft.sync_gradients(grads, P())

        same(ft.shard_map(program, mesh, (P(), spec), P())(p, X[:4]), want)
