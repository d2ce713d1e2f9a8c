"""Rules of derivatives that are transposed are linear, or refused, in every way to run them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool1d, conv1d, layer_norm, linear, pad
from torch.nn.functional import scaled_dot_product_attention as attend

import functron as ft
from functron import Mesh, P, lax
from tests.transforms.lives import LIVES

X = torch.from_numpy(np.random.default_rng(0).normal(size=8))
T = torch.cos(3 * X + 1)
NOTHING = torch.zeros(4)


def scan_rows(x, t, step):
    return ft.scan(step, torch.zeros((), dtype=x.dtype), (x, t))[1]


LINEAR = {
    "slope": lambda x, t: x.cos() * t,
    "chosen by arguments": lambda x, t: torch.where(x > 0, t, 2 * t),
    "convolution": lambda x, t: conv1d(t[None, None], x[None, None, :3], padding=1)[0, 0],
    "pooling": lambda x, t: avg_pool1d(t[None, None], 3, 1, 1)[0, 0],
    "reflection": lambda x, t: pad(t[None], (1, 1), mode="reflect")[0, 1:-1],
    "indices and sums": lambda x, t: t[x.argsort()].cumsum(0) + x * t.mean(),
    "a solution": lambda x, t: torch.linalg.solve(torch.outer(x, x) + torch.eye(4).to(x), t),
    "carries": lambda x, t: scan_rows(x, t, lambda c, row: (c + row[1], row[0].cos() * c + row[1])),
    "remat": lambda x, t: ft.remat(lambda x, t: x.cos() * t)(x, t),
    "a branch": lambda x, t: lax.cond(x.sum() > 0, lambda t: 2 * t, torch.neg, t),
    "scales of a norm": lambda x, t: layer_norm(x, x.shape, t),
    "values of attention": lambda x, t: attend(
        x.view(1, 1, 4, 1), x.view(1, 1, 4, 1).sin(), t.view(1, 1, 4, 1)
    ).flatten(),
    "a jvp": lambda x, t: ft.jvp(torch.sin, (x,), (t,))[1],
    "of no tangent": lambda x, t: torch.zeros_like(t),
    "zeros are added": lambda x, t: 0 + (0.0 * x + t + torch.zeros_like(x)) - x.new_zeros(4),
    "closed zeros are added": lambda x, t: t + NOTHING + torch.tensor(0.0),
    "detached arguments": lambda x, t: x.detach() * t + lax.stop_gradient(x.cos()) * t,
    "products with matrices": lambda x, t: linear(t, torch.outer(x, x)),
}
OTHERS = {
    "pow": lambda x, t: t**2,
    "mul": lambda x, t: x * t * t,
    "abs|sgn": lambda x, t: t.abs(),
    "clamp|ge": lambda x, t: t.clamp(-1, 1),
    "sign": lambda x, t: t.sign(),
    "gt": lambda x, t: torch.where(t > 0, t, 2 * t),
    "lt": lambda x, t: (t < 0).to(x) * x,
    "mul|scan": lambda x, t: scan_rows(x, t, lambda c, row: (c + row[1], row[0] * row[1] * c)),
    "remat|mul": lambda x, t: ft.remat(lambda x, t: x * t * t)(x, t),
    "detach": lambda x, t: x * t.detach() + t,
    "detach at": lambda x, t: lax.stop_gradient(x * t) + t,
    "detach|scan": lambda x, t: scan_rows(x, t, lambda c, row: (c, row[1].detach() + row[1])),
    "detach|data": lambda x, t: t.data,
    "mul|switch": lambda x, t: lax.cond(x.sum() > -99, lambda t: t * t, torch.neg, t),
}


def in_reverse(tangent):
    """The gradient of a function of which `tangent` is the tangent, on two ranks."""
    f = ft.custom_jvp(torch.sin, lambda args, ts: (args[0].sin(), tangent(args[0], ts[0])))

    def program(x, t):
        share = ft.grad(lambda x: lax.psum((f(x) * t).sum(), "dp"))(x)
        return ft.sync_gradients(share, P("dp"))

    return ft.shard_map(program, Mesh(dp=2), P("dp"), P("dp"))


def in_forward(tangent):
    """The tangent of a function of which `tangent` is the backward."""
    f = ft.custom_vjp(
        torch.sin, lambda x: (x.sin(), x), lambda x, cotangent: (tangent(x, cotangent),)
    )
    return ft.shard_map(
        lambda x, t: ft.jvp(f, (x,), (t,))[1], Mesh(dp=2), (P("dp"), P("dp")), P("dp")
    )


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_rule_has_the_transpose_that_its_matrix_has(name, life):
    halves = [(x, t) for x, t in zip(X.split(4), T.split(4), strict=True)]
    matrices = [torch.stack([LINEAR[name](x, e) for e in torch.eye(4).to(x)], 1) for x, _ in halves]
    want = torch.cat([matrix.mT @ t for matrix, (_, t) in zip(matrices, halves, strict=True)])
    for mode in (in_reverse, in_forward):
        run = LIVES[life](mode(LINEAR[name]))
        torch.testing.assert_close(run(X, T), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("cause", OTHERS)
def test_another_rule_is_refused_by_its_operation(cause, life):
    for mode, words in ((in_reverse, "custom_jvp, diff"), (in_forward, "custom_vjp, diff")):
        with pytest.raises(ValueError, match=f"{words}.*not linear in them, by ({cause})"):
            LIVES[life](mode(OTHERS[cause]))(X, T)


def square():
    return ft.custom_jvp(torch.sin, lambda args, ts: (args[0].sin(), ts[0] ** 2))


def test_it_is_refused_outside_of_meshes_too():
    f, taped = square(), X.clone().requires_grad_()
    calls = {
        "grad": lambda: ft.grad(lambda x: f(x).sum())(X),
        "func": lambda: torch.func.grad(lambda x: f(x).sum())(X),
        "vmap": lambda: torch.func.vmap(ft.grad(f))(X),
        "tape": lambda: f(taped).sum().backward(),
        "jit": lambda: ft.jit(ft.grad(lambda x: f(x).sum()), backend="eager")(X),
    }
    for call in [*calls.values(), calls["grad"]]:  # again: nothing was learnt
        with pytest.raises(ValueError, match=r"the rule <lambda> at .*: `return ft.custom_jvp\("):
            call()


OFFSETS = {
    "a number": lambda x, t: 2 * x * t + 1,
    "an argument": lambda x, t: x - t,
    "numbers of zeros": lambda x, t: t + torch.zeros_like(x).cos(),
    "a bias": lambda x, t: linear(t, torch.outer(x, x), x),
    "a product beside a bias": lambda x, t: linear(x, torch.outer(x, x), t),
    "carries": lambda x, t: ft.scan(lambda c, row: (c + row, c), x[0] + 1, t)[1],
    "a branch": lambda x, t: lax.cond(x.sum() > -99, lambda t: t + x, torch.neg, t),
}


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("name", OFFSETS)
def test_an_offset_is_refused(name, life):
    told = "a number that is not zero of tangents that are zero|not linear in them, by"
    for mode in (in_reverse, in_forward):
        with pytest.raises(ValueError, match=told):
            LIVES[life](mode(OFFSETS[name]))(X, T)


def test_a_call_is_followed_once_for_its_shapes_and_numbers():
    seen = SimpleNamespace(rows=[])  # a list itself would be a part of what tells calls apart

    def make(power):
        def rule(args, tangents):
            seen.rows.append(torch._C._len_torch_dispatch_stack())
            return args[0].sin(), tangents[0] ** power * args[0].cos() ** (2 - power)

        return ft.grad(lambda x: ft.custom_jvp(torch.sin, rule)(x).sum())

    linear = lambda args, tangents: (seen.rows.append(torch._C._len_torch_dispatch_stack()),
                                     ft.jvp(torch.sin, args, tangents))[1]  # fmt: skip
    gradient = ft.grad(lambda x: ft.custom_jvp(torch.sin, linear)(x).sum())
    for x in (X, X + 1, X[:4], X):
        torch.testing.assert_close(gradient(x), x.cos())
    assert seen.rows == [1, 0, 1, 0]
    for power in (2, 3):
        with pytest.raises(ValueError, match="by pow"):
            make(power)(X)


def test_linearize_is_jvp_where_backward_is_no_transpose():
    rule = lambda args, tangents: ft.jvp(torch.sin, args, tangents)
    backward = lambda x, cotangent: (cotangent.clamp(-0.1, 0.1),)
    clipped = ft.custom_vjp(torch.sin, lambda x: (x.sin(), x), backward, rule)
    out, push = ft.linearize(lambda x: clipped(2 * x), X)
    torch.testing.assert_close((out, push(T)), ((2 * X).sin(), 2 * (2 * X).cos() * T))
    silent = ft.custom_vjp(torch.sin, lambda x: (x.sin(), x), backward)
    with pytest.raises(ValueError, match="give custom_vjp a rule of forward mode, jvp="):
        ft.linearize(silent, X)[1](T)
