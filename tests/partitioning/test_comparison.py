"""Gradients of partitioned functions compared with the functions': wrong rules do not go unseen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import P
from functron.partitioning.comparison import find_differences
from functron.partitioning.labels import product

MESH = ft.Mesh(dp=2, tp=2)
SPECS = {"up": P(None, "tp"), "down": P("tp", None)}, P("dp")


def forget_sum(equation):
    """The rule of products, whose ranks take their part of a sum for the whole."""
    made = product("mk, kn -> mn")(equation)
    return replace(made, combined={}, inside=frozenset("k"), linear=())


def draw():
    drawn = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {"up": drawn[0], "down": drawn[1]}, drawn[2]


def loss(params, x):
    return ((x @ params["up"]).tanh() @ params["down"]).square().sum()


def test_it_compares_once_and_the_numbers_are_the_function_s():
    calls = []

    def counted(params, x):
        calls.append(x.shape)
        return loss(params, x)

    f = ft.partition(counted, MESH, SPECS, P(), check="gradients")
    value = f(*draw())
    torch.testing.assert_close(value, loss(*draw()))
    count = len(calls)
    f(*draw())
    grads = ft.grad(f)(*draw())
    torch.testing.assert_close(grads, ft.grad(loss)(*draw()))
    assert len(calls) == count
    f(draw()[0], draw()[1][:2])
    assert len(calls) > count


def test_a_rule_that_forgets_a_sum_is_caught_before_the_first_call():
    own = {"mm": forget_sum}
    wrong = ft.partition(loss, MESH, SPECS, P(), rules=own, check=False)
    assert float(wrong(*draw())) != pytest.approx(float(loss(*draw())), rel=0.01)
    f = ft.partition(loss, MESH, SPECS, P(), rules=own, check="gradients")
    said = r"on dp=2,tp=2, simulated, loss has other numbers than unpartitioned"
    with pytest.raises(ValueError, match=said) as caught:
        f(*draw())
    text = str(caught.value)
    for path in ("results", "gradients/0/up", "gradients/0/down", "gradients/1"):
        assert f"{path}: got an entry that differs by" in text
    assert "run without dp or tp" in text


def test_functions_that_differentiate_are_compared_by_their_results():
    def step(params, x):
        return ft.value_and_grad(loss)(params, x)

    specs = (P(), SPECS[0])
    ft.partition(step, MESH, SPECS, specs, check="gradients")(*draw())
    own = {"mm": forget_sum}
    with pytest.raises(ValueError, match="results/1/up: got an entry that differs"):
        ft.partition(step, MESH, SPECS, specs, rules=own, check="gradients")(*draw())


def test_shapes_that_were_not_compared_are_refused_where_values_are_not_known():
    f = ft.partition(loss, MESH, SPECS, P(), check="gradients")
    with pytest.raises(ValueError, match=r"fix: call compare\(\.\.\.\) with values"):
        ft.trace(f)(*draw())
    f.compare(*draw())
    assert "psum" in str(ft.trace(f)(*draw()))
    with pytest.raises(ValueError, match="check: got 'gradient'; wanted True, False or"):
        ft.partition(loss, MESH, SPECS, P(), check="gradient")  # pyright: ignore[reportArgumentType]


def test_differences_of_order_are_none_and_small_gradients_have_their_own_scale():
    one = {"gradients": {"a": torch.ones(4), "b": 1e-3 * torch.ones(4), "n": torch.arange(4)}}
    near = {"gradients": {**one["gradients"], "a": torch.ones(4) + 1e-4}}
    assert not find_differences(near, one).problems
    wrong = {"gradients": {**one["gradients"], "b": 1.1e-3 * torch.ones(4)}}
    (found,) = find_differences(wrong, one).problems
    assert found.path == "gradients/b"
    assert "10% of the largest one" in found.got
    nan = {"gradients": {**one["gradients"], "a": torch.full((4,), torch.nan)}}
    assert [x.path for x in find_differences(nan, one).problems] == ["gradients/a"]
    assert not find_differences(nan, nan).problems
    other = {"gradients": {**one["gradients"], "n": torch.arange(4) + 1}}
    assert [x.path for x in find_differences(other, one).problems] == ["gradients/n"]
