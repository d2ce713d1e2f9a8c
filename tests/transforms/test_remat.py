"""remat: the function's own numbers under every transform, with collectives, keys and closures."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, random

torch.manual_seed(0)
W = torch.randn(6, 6, dtype=torch.float64)
X = torch.randn(4, 6, dtype=torch.float64)


def block(w, x):
    return torch.tanh(x @ w) @ w


def same(got, want):
    for a, b in zip(ft.tree.leaves(got), ft.tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_values_gradients_and_hessians():
    f = lambda w, x: block(w, x).square().sum()
    r = lambda w, x: ft.remat(block)(w, x).square().sum()
    same(r(W, X), f(W, X))
    same(torch.func.grad(r, (0, 1))(W, X), torch.func.grad(f, (0, 1))(W, X))
    same(ft.grad(r)(W, X), torch.func.grad(f)(W, X))
    same(torch.func.jacrev(torch.func.grad(r))(W, X), torch.func.hessian(f)(W, X))
    rows = torch.func.vmap(torch.func.grad(r), (None, 0))
    want = torch.func.vmap(torch.func.grad(f), (None, 0))
    same(rows(W, X[:, None]), want(W, X[:, None]))
    batched = torch.func.grad(lambda w: torch.func.vmap(r, (None, 0))(w, X[:, None]).sum())
    same(batched(W), torch.func.grad(f)(W, X))


def test_it_runs_twice():
    calls = []

    def counted(w, x):
        calls.append(1)
        return block(w, x)

    ft.grad(lambda w: ft.remat(counted)(w, X).sum())(W)
    assert len(calls) == 2


def test_trees_keywords_and_integers():
    def f(p, *, scale, ids):
        return {"y": p["x"][ids] * scale, "ids": ids + 1}

    ids = torch.tensor([0, 2])
    r = lambda p, s: ft.remat(f)(p, scale=s, ids=ids)["y"].sum()
    want = torch.func.grad(lambda p, s: f(p, scale=s, ids=ids)["y"].sum(), (0, 1))
    s = torch.tensor(2.0, dtype=torch.float64)
    same(torch.func.grad(r, (0, 1))({"x": X}, s), want({"x": X}, s))
    assert ft.remat(f)({"x": X}, scale=2.0, ids=ids)["ids"].tolist() == [1, 3]


def test_closed_over_tensors_get_their_gradients():
    w = W.clone().requires_grad_()
    ft.remat(lambda x: block(w, x))(X).sum().backward()
    want = torch.func.grad(lambda w: block(w, X).sum())(W)
    same(w.grad, want)
    same(torch.func.grad(lambda w: ft.remat(lambda x: block(w, x))(X).sum())(W), want)
    nested = lambda w: ft.remat(lambda x: ft.remat(lambda y: block(w, y))(x))(X).sum()
    same(ft.grad(nested)(W), want)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=2, tp=3)], ids=str)
def test_collectives_inside(mesh):
    def layer(w, x):
        return lax.psum(torch.tanh(x @ w["up"]) @ w["down"], "tp")

    w = {"up": W, "down": W.mT.contiguous()}
    specs = {"up": P(None, "tp"), "down": P("tp")}

    def program(w, x):
        value, grads = ft.value_and_grad(
            lambda w: lax.pmean(ft.remat(layer)(w, x).square().mean(), "dp")
        )(w)
        return value, ft.sync_gradients(grads, specs)

    got = ft.shard_map(program, mesh, (specs, P("dp")), (P(), specs))(w, X)
    dense = lambda w: (torch.tanh(X @ w["up"]) @ w["down"]).square().mean()
    want = torch.func.grad_and_value(dense)(w)
    same(got, (want[1], want[0]))


def test_replicated_outputs_stay_replicated():
    def program(w, x):
        return ft.remat(lambda w, x: lax.psum(x @ w, "tp"))(w, x)

    ft.shard_map(program, Mesh(tp=2), (P("tp"), P(None, "tp")), P())(W, X)
    with pytest.raises(ValueError, match="redundant reduction"):
        ft.shard_map(
            lambda w, x: lax.psum(program(w, x), "tp"), Mesh(tp=2), (P("tp"), P(None, "tp")), P()
        )(W, X)


def test_keyed_randomness_is_drawn_alike_both_times():
    def noisy(w, x, key):
        return torch.where(random.bernoulli(key, 0.5, tuple(x.shape)), x @ w, 0.0)

    key = random.key(3)
    f = lambda w: noisy(w, X, key).square().sum()
    r = lambda w: ft.remat(noisy)(w, X, key).square().sum()
    same(ft.grad(r)(W), torch.func.grad(f)(W))


@pytest.mark.parametrize("way", ["tape", "grad", "torch.func", "policy"])
def test_torchs_own_random_numbers_are_refused(way):
    """Backward would draw others, so that gradients would be those of another function."""
    policy = ft.policies.dots if way == "policy" else ft.policies.nothing
    dropped = ft.remat(lambda x: torch.nn.functional.dropout(x, 0.5).sum(), policy=policy)
    x = torch.ones(64, requires_grad=way == "tape")
    calls = {
        "tape": lambda: dropped(x),
        "torch.func": lambda: torch.func.grad(dropped)(x),
    }
    with pytest.raises(ValueError, match=r"draws torch's own random.*functron\.random"):
        calls.get(way, lambda: ft.grad(dropped)(x))()
    with torch.no_grad():
        dropped(x)  # nothing is computed again


def test_dual_numbers_of_torchs_own_say_what_to_do():
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"fix: functron\.jvp"):
        ft.remat(block)(forward_ad.make_dual(W, W), X)
