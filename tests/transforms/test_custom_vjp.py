"""custom_vjp: its backward is used, in every order of vmap and derivatives, with collectives."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax
from functron.transforms.custom_vjp import custom_vjp

generator = torch.Generator().manual_seed(0)
W = torch.randn(4, 6, generator=generator, dtype=torch.float64)
X = torch.randn(8, 4, generator=generator, dtype=torch.float64)


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def plain(w, x):
    return torch.tanh(x @ w)


def with_rule(calls=None):
    """tanh(x w), its backward written down; `calls` counts what ran."""
    calls = [] if calls is None else calls

    def f(w, x):
        calls.append("f")
        return plain(w, x)

    def forward(w, x):
        calls.append("forward")
        y = plain(w, x)
        return y, (w, x, y, 1.0 - y.square())

    def backward(residuals, cotangent):
        calls.append("backward")
        w, x, _, slope = residuals
        inner = cotangent * slope
        return x.mT @ inner, inner @ w.mT

    return custom_vjp(f, forward, backward)


def energy(f):
    return lambda w, x: f(w, x).sin().square().sum()


def test_which_functions_run():
    calls = []
    f = with_rule(calls)
    f(W, X)
    assert calls == ["f"]
    calls.clear()
    ft.grad(lambda w: f(w, X).sum())(W)
    assert calls == ["forward", "backward"]


def test_the_rule_is_what_counts():
    f = custom_vjp(torch.sin, lambda x: (torch.sin(x), None), lambda _, g: (7 * g,))
    x = torch.tensor(2.0, requires_grad=True)
    f(x).backward()
    assert x.grad == 7.0
    assert torch.func.grad(f)(x.detach()) == 7.0
    rows = torch.func.vmap(torch.func.grad(f))(X[0])
    assert torch.equal(rows, torch.full_like(rows, 7.0))
    assert torch.equal(torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(X[0]), rows)


def test_gradients_on_the_tape_and_under_func():
    ours, want = energy(with_rule()), torch.func.grad(energy(plain), (0, 1))(W, X)
    same(torch.func.grad(ours, (0, 1))(W, X), want)
    same(ft.grad(ours, (0, 1))(W, X), want)
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    same(torch.autograd.grad(ours(w, x), (w, x)), want)
    same(torch.autograd.grad(ours(w, X), w)[0], want[0])


@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (0, 0), (1, 2)])
def test_vmap_and_gradients_in_both_orders(in_dims):
    w = W if in_dims[0] is None else torch.stack([W, 2 * W, -W], in_dims[0])
    x = X if in_dims[1] is None else torch.stack([X, X + 1, X.cos()], in_dims[1])
    ours, dense = energy(with_rule()), energy(plain)
    for program in (
        lambda e: torch.func.vmap(e, in_dims)(w, x),
        lambda e: torch.func.vmap(torch.func.grad(e, (0, 1)), in_dims)(w, x),
        lambda e: torch.func.grad(
            lambda *a: torch.func.vmap(e, in_dims)(*a).square().sum(), (0, 1)
        )(w, x),
    ):
        same(program(ours), program(dense))


def test_second_derivatives():
    t = (torch.cos(W), torch.sin(X))
    ours, dense = energy(with_rule()), energy(plain)

    def reverse(e, w, x):
        return torch.func.vjp(torch.func.grad(e, (0, 1)), w, x)[1](t)

    want = reverse(dense, W, X)
    same(reverse(ours, W, X), want)
    for of in (lambda e: e, lambda e: torch.func.grad(e, (0, 1))):
        pushed = lambda e, of=of: torch.func.jvp(of(e), (W, X), t)
        same(pushed(ours), pushed(dense))
    hvp = ft.grad(lambda w: (ft.grad(ours)(w, X) * t[0]).sum())(W)
    same(hvp, torch.func.grad(lambda w: (torch.func.grad(dense)(w, X) * t[0]).sum())(W))
    w = W.clone().requires_grad_()
    (first,) = torch.autograd.grad(ours(w, X), w, create_graph=True)
    same(torch.autograd.grad((first * t[0]).sum(), w)[0], hvp)
    third = lambda e: torch.func.grad(
        lambda s: torch.func.grad(torch.func.grad(lambda r: e(r * W, X)))(s)
    )(torch.tensor(0.7, dtype=torch.float64))
    same(third(ours), third(dense))


def ring_product():
    """sum over ranks s of x_s w_s, on rank s shifted by one: collectives in both directions."""

    def shift(x, by):
        n = lax.axis_size("cp")
        return lax.ppermute(x, "cp", [(r, (r + by) % n) for r in range(n)])

    def f(w, x):
        return shift(torch.tanh(x @ w), 1)

    def forward(w, x):
        y = torch.tanh(x @ w)
        return shift(y, 1), {"saved": (w, x), "y": y}

    def backward(residuals, cotangent):
        w, x = residuals["saved"]
        inner = shift(cotangent, -1) * (1 - residuals["y"].square())
        return x.mT @ inner, inner @ w.mT

    return f, custom_vjp(f, forward, backward)


MESHES = pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)


@MESHES
def test_collectives_in_both_directions(mesh):
    plain, ours = ring_product()
    stream = P(("dp", "cp"))

    def value_and_grads(f):
        def loss(w, x):
            rank = 1.0 + lax.axis_index("cp")
            return lax.psum((f(w, x) * rank).sin().sum(), ("dp", "cp"))

        def program(w, x):
            value, grads = ft.value_and_grad(loss, (0, 1))(w, x)
            return value, ft.sync_gradients(grads, (P(), stream))

        inside = ft.shard_map(program, mesh, (P(), stream), (P(), (P(), stream)))
        outside = ft.shard_map(loss, mesh, (P(), stream), P())
        return inside, outside

    got, want = value_and_grads(ours), value_and_grads(plain)
    same(got[0](W, X), want[0](W, X))
    same(torch.func.grad(got[1], (0, 1))(W, X), torch.func.grad(want[1], (0, 1))(W, X))
    same(got[0](W, X)[1], torch.func.grad(want[1], (0, 1))(W, X))
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    got[1](w, x).backward()
    same((w.grad, x.grad), got[0](W, X)[1])

    def hvp(f):
        return torch.func.vjp(torch.func.grad(f, (0, 1)), W, X)[1]((W.cos(), X.sin()))

    same(hvp(got[1]), hvp(want[1]))


def mean_square():
    """A replicated output: backward gets every rank's own share of its cotangent."""

    def f(x):
        return lax.psum(x.square().sum(), "cp")

    def backward(x, cotangent):
        return (2 * x * lax.psum(cotangent, "cp"),)

    return f, custom_vjp(f, lambda x: (f(x), x), backward)


@MESHES
def test_replicated_outputs_stay_replicated_and_count_once(mesh):
    plain, ours = mean_square()
    stream = P(("dp", "cp"))

    def loss(f):
        return ft.shard_map(lambda x: lax.psum(f(x).sin(), "dp"), mesh, (stream,), P())

    same(loss(ours)(X), loss(plain)(X))
    same(torch.func.grad(loss(ours))(X), torch.func.grad(loss(plain))(X))

    def inside(f):
        def program(x):
            return ft.grad(lambda x: lax.psum(f(x).sin(), "dp"))(x)

        return ft.shard_map(program, mesh, (stream,), stream)(X)

    same(inside(ours), inside(plain))
    with pytest.raises(ValueError, match="redundant reduction"):
        ft.shard_map(
            lambda x: torch.func.vjp(lambda x: lax.psum(ours(x), "cp"), x)[0], mesh, (stream,), P()
        )(X)


def test_traced():
    plain, ours = ring_product()
    mesh, stream = Mesh(cp=4), P("cp")

    def step(f):
        def program(w, x):
            value, grads = ft.value_and_grad(lambda w, x: lax.psum(f(w, x).sum(), "cp"), (0, 1))(
                w, x
            )
            return value, ft.sync_gradients(grads, (P(), stream))

        return ft.shard_map(program, mesh, (P(), stream), (P(), (P(), stream)))

    program = ft.trace(step(ours))(W, X)
    permutes = [row for row in program.cost().collectives if row.op == "ppermute"]
    assert {(row.phase, row.count) for row in permutes} == {("forward", 1), ("backward", 1)}
    same(ft.jit(step(ours))(W, X), step(plain)(W, X))


def test_integers_trees_and_unused_arguments():
    def f(p, ids, unused):
        return {"y": p["x"][ids] * p["s"], "ids": ids + 1}

    def forward(p, ids, unused):
        return f(p, ids, unused), (p, ids, "a static residual")

    def backward(residuals, cotangents):
        p, ids, text = residuals
        assert text == "a static residual"
        assert cotangents["ids"] is None
        dy = cotangents["y"]
        dx = torch.zeros_like(p["x"]).index_add(0, ids, dy * p["s"])
        return {"x": dx, "s": (dy * p["x"][ids]).sum()}, None, None

    ours = custom_vjp(f, forward, backward)
    p, ids = {"x": X, "s": torch.tensor(2.0, dtype=torch.float64)}, torch.tensor([2, 0, 2])
    loss = lambda g: lambda p, u: g(p, ids, u)["y"].cos().sum() + 0 * u.sum()
    same(torch.func.grad(loss(ours), (0, 1))(p, W), torch.func.grad(loss(f), (0, 1))(p, W))
    assert ours(p, ids, W)["ids"].tolist() == [3, 1, 3]
    taped = W.clone().requires_grad_()
    assert ours(p, ids, taped)["ids"].tolist() == [3, 1, 3]


def test_remat_and_scan_around_it():
    f = with_rule()
    ours = energy(ft.remat(f))
    same(ft.grad(ours)(W, X), torch.func.grad(energy(plain))(W, X))
    square = torch.stack([torch.eye(4, dtype=torch.float64), W[:, :4]])

    def layers(f):
        return lambda w: ft.scan(lambda x, w: (f(w, x), None), X, w)[0].square().sum()

    same(ft.grad(layers(f))(square), torch.func.grad(layers(plain))(square))


def test_refusals():
    w = W.clone().requires_grad_()
    f = custom_vjp(lambda x: x @ w, lambda x: (x @ w, None), lambda _, g: (g @ w.mT,))
    x = X.clone().requires_grad_()
    with pytest.raises(ValueError, match="make it an argument"):
        f(x).sum().backward()
    f = custom_vjp(plain, lambda w, x: (plain(w, x), None), lambda _, g: (g,))
    with pytest.raises(ValueError, match="one for each of the 2 arguments"):
        ft.grad(lambda w: f(w, X).sum())(W)
    f = custom_vjp(plain, lambda w, x: ((plain(w, x), 3), None), lambda _, g: (g,))
    with pytest.raises(TypeError, match="wanted a tree of tensors"):
        ft.grad(lambda w: f(w, X)[0].sum())(W)
