"""A scan in a traced program against the eager loop: values, gradients and its size."""

import pytest
import torch
from torch.autograd import forward_ad

import functron as ft
from functron.program.interpreter import run_in_lockstep
from functron.program.trace import trace

CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


@case
def carries_and_stacks(w, x):
    c, ys = ft.scan(lambda c, row: (torch.tanh(c * row), c.sin()), x, w)
    return c.sum() + (ys**3).sum()


@case
def returns_one_tensor_twice(w, x):
    def step(c, row):
        new = torch.tanh(c * row)
        return new, new

    c, ys = ft.scan(step, x, w)
    return (c**2).sum() + (ys**3).sum()


@case
def closes_over_parameters(w, x):
    scale = w.mean(0)
    c, _ = ft.scan(lambda c, row: (torch.tanh(c * row) * scale + x, None), x, w)
    return c.sum()


@case
def carries_what_starts_constant(w, x):
    c, _ = ft.scan(lambda c, row: (c + row.sin(), None), torch.zeros_like(x), w)
    return (c * x).sum()


@case
def hands_the_carry_on(w, x):
    def step(carry, row):
        a, b, n = carry
        return (b, a * row, n + 1), (a, n)

    (a, b, n), (ys, ns) = ft.scan(step, (x, x.cos(), torch.zeros((), dtype=torch.int64)), w)
    return (a * b).sum() * n + (ys * ns[:, None]).sum()


@case
def transposes(w, x):
    def step(c, row):
        return (c @ c.mT + row.outer(row).mT).mT, c.mT

    c, ys = ft.scan(step, torch.outer(x, x).mT, w)
    return c.sum() + ys.cos().sum()


@case
def nests(w, x):
    def outer(c, row):
        inner, _ = ft.scan(lambda d, value: (torch.tanh(d + value * row), None), c, row)
        return inner, None

    return ft.scan(outer, x, w)[0].sum()


@case
def rematerialises(w, x):
    step = ft.remat(lambda c, row: (torch.tanh(c * row) + c.sin() * w.sum(), c))
    c, ys = ft.scan(step, x, w)
    return c.sum() + ys.sum()


@case
def scans_under_remat(w, x):
    return ft.remat(lambda w, x: ft.scan(lambda c, row: (torch.tanh(c * row), None), x, w)[0])(
        w, x
    ).sum()


@case
def ignores_the_carry(w, x):
    c, ys = ft.scan(lambda c, row: (row.detach() * 1.0, row * x), x, w)
    return c.sum() + ys.sum()


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_loop(name):
    torch.manual_seed(0)
    w, x = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 3), (3,)))
    f = ft.value_and_grad(CASES[name], argnums=(0, 1))
    program = trace(f)(w, x)
    value, (dw, dx) = run_in_lockstep(program, w, x)
    want, (want_dw, want_dx) = torch.func.grad_and_value(CASES[name], argnums=(0, 1))(w, x)[::-1]
    torch.testing.assert_close(value, want)
    torch.testing.assert_close((dw, dx), (want_dw, want_dx))


def test_the_size_of_a_program_does_not_depend_on_depth():
    def loss(w, x):
        return ft.scan(lambda c, row: (torch.tanh(c * row), None), x, w)[0].sum()

    sizes = [
        sum(1 for _ in trace(ft.grad(loss))(torch.ones(depth, 3), torch.ones(3)).block.walk())
        for depth in (2, 64)
    ]
    assert sizes[0] == sizes[1]


def test_forward_keeps_only_what_backward_needs():
    def loss(w, x):
        return ft.scan(lambda c, row: (torch.tanh(c * row), None), x, w)[0].sum()

    program = trace(ft.grad(loss))(torch.ones(4, 3), torch.ones(3))
    forward = next(e for e in program.block.equations if e.name == "scan")
    # tanh' needs its result, the product's derivative the carry; rows are read again, not kept
    assert [v.shape for v in forward.results] == [(3,), (4, 3), (4, 3)]
    values_only = trace(loss)(torch.ones(4, 3), torch.ones(3))
    forward = next(e for e in values_only.block.equations if e.name == "scan")
    assert [v.shape for v in forward.results] == [(3,)]


def test_a_carry_that_changes_is_refused():
    def grows(w, x):
        return ft.scan(lambda c, row: (torch.cat([c, row]), None), x, w)[0].sum()

    with pytest.raises(ValueError, match=r"carry: got \(6,\).*wanted \(3,\)"):
        trace(grows)(torch.ones(4, 3), torch.ones(3))


def test_forward_mode_by_dual_numbers_writes_the_scan_out():
    x, v = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 3, 2)

    def tangent(x, v):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, v)
            out = ft.scan(lambda c, row: (torch.tanh(c * row), None), dual[0], dual)[0].sum()
            return forward_ad.unpack_dual(out).tangent

    torch.testing.assert_close(trace(tangent)(x, v)(x, v), tangent(x, v), rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", ["grad", "functional"])
def test_a_second_derivative_of_torchs_tape_is_refused(order):
    """It was zero."""

    def f(x):
        return ft.scan(lambda c, row: (torch.tanh(c * row), None), x[0], x)[0].sum()

    def product(x, v):
        if order == "functional":
            return torch.autograd.functional.hvp(f, x, v)[1]
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(f(y), y, create_graph=True)
            return torch.autograd.grad((g * v).sum(), y)[0]

    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)
    with pytest.raises(ValueError, match=r"differentiates the gradients of a scan again.*ft\.grad"):
        trace(product)(x, x)

    def once(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return torch.autograd.grad(f(y), y, create_graph=True)[0].detach()

    torch.testing.assert_close(trace(once)(x)(x), once(x))
