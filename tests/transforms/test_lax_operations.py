"""Running sums and the like where they are not smooth, against JAX; dtypes, barriers, wrong uses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

import functron as ft
from functron import Mesh, P, lax
from tests.transforms.lives import LIVES

WEIGHTS = np.arange(1.0, 8.0)
ROUGH = {
    "cumprod": [2.0, 0.0, 3.0, 0.0, 0.5, -1.0, 2.0],
    "cummax": [1.0, 3.0, 3.0, 2.0, 3.0, 5.0, 5.0],
    "cummin": [4.0, 3.0, 3.0, 2.0, 2.0, 2.0, 5.0],
    "cumlogsumexp": [-800.0, 800.0, -np.inf, 0.0, 799.0, 1.0, 3.0],
    "clamp": [-1.0, 0.0, 0.5, 1.0, 2.0, -0.0, 7.0],
}


def derive(L, grad, jvp, name, reverse, weights, x, v):
    of = {"clamp": lambda x: L.clamp(0.0, x, 1.0)}.get(name)
    of = of or functools.partial(getattr(L, name), reverse=reverse)
    slope = grad(lambda x: (of(x) ** 2 * weights).sum())
    return of(x), jvp(of, (x,), (v,))[1], *jvp(slope, (x,), (v,))


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ROUGH)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("life", LIVES)
def test_where_it_is_not_smooth(name, reverse, life):
    x, v = np.array(ROUGH[name]), np.cos(WEIGHTS)
    with jax.enable_x64(True):
        want = derive(jax.lax, jax.grad, jax.jvp, name, reverse, WEIGHTS, jnp.asarray(x), v)
    args = map(torch.from_numpy, (WEIGHTS, x, v))
    run = lambda *args: derive(lax, torch.func.grad, torch.func.jvp, name, reverse, *args)
    got = LIVES[life](ft.shard_map(run, Mesh(tp=2), P(), P()))(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_masked_logarithms_have_no_derivative():
    x = torch.tensor([-torch.inf, -torch.inf, 0.0, 1.0])
    found = ft.grad(lambda x: lax.cumlogsumexp(x)[2:].sum())(x)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 1.26894, 0.73106]))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "clamp"])
def test_dtypes_are_kept(name, dtype):
    x = [3, 1, 2, 5]
    if name == "clamp":
        got, want = (L.clamp(like(2), like(x), like(4)) for L, like in both(dtype))
    else:
        got, want = (getattr(L, name)(like(x), reverse=True) for L, like in both(dtype))
    assert str(got.dtype).removeprefix("torch.") == dtype == str(want.dtype)
    assert got.tolist() == want.astype(float).tolist()


def both(dtype):
    yield lax, functools.partial(torch.tensor, dtype=getattr(torch, dtype))
    yield jax.lax, functools.partial(jnp.array, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_reduced_precision_is_jaxs(dtype):
    draw = np.random.default_rng(0)
    values = draw.normal(size=2000) * 2.0 ** draw.integers(-60, 60, 2000)
    halfway = np.concatenate([(1 + np.arange(64) / 32) * 2.0**k for k in range(-20, 20)])
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 1e-8, 6.1e-5, 5e-324, 1e300]
    with jax.enable_x64(True):
        x = jnp.asarray(np.concatenate([values, -halfway, halfway, odd])).astype(dtype)
        for bits in ((5, 10), (8, 7), (4, 3), (5, 2), (8, 0), (2, 4), (11, 52), (3, 23)):
            want = np.asarray(jax.lax.reduce_precision(x, *bits).astype("float64"))
            ours = torch.from_numpy(np.asarray(x.astype("float64"))).to(getattr(torch, dtype))
            got = lax.reduce_precision(ours, *bits)
            np.testing.assert_array_equal(got.double().numpy(), want)
            assert (np.signbit(got.double().numpy()) == np.signbit(want))[~np.isnan(want)].all()


def test_nothing_is_moved_over_a_barrier():
    """Each result comes after all operands, in forward, of tangents and in backward."""

    def f(x, y):
        return lax.optimization_barrier((x.sin(), [y.cos()]))

    def program(x, y, s, t):
        out, pull = ft.vjp(f, x, y)
        return out, ft.jvp(f, (x, y), (s, t))[1], pull((s + 1, [t + 1]))

    x = torch.ones(3)
    found = ft.trace(program)(x, x, x, x).block.equations
    barriers = [e for e in found if e.name == "barrier"]
    assert [e.where.phase for e in barriers] == ["forward"] * 4 + ["backward"] * 2
    for first, last in zip(barriers[::2], barriers[1::2], strict=True):
        late, early = first.args
        assert last.args == (early, first.results[0])
        assert not {early, late} & {v for e in found if e not in (first, last) for v in e.operands}
    jitted = ft.jit(program, backend="eager")
    torch.testing.assert_close(jitted(x, x, x, x), program(x, x, x, x))


def test_partitions():
    """Of functions that were written for one device, where other dims are split."""
    f = lambda x: lax.reduce_precision(lax.cumprod(x.sin()), 8, 20)
    both = ft.value_and_grad(lambda x: lax.clamp(-0.1, f(x), 0.3).sum() + lax.cummax(x).sum())
    x = torch.rand(4, 6, dtype=torch.float64)
    got = ft.partition(both, Mesh(tp=2), P(None, "tp"), (P(), P(None, "tp")))(x)
    torch.testing.assert_close(got, both(x), rtol=1e-12, atol=1e-12)


ONES = torch.ones(3, 4)
NUMBER: Any = 1.0
WRONG = {
    "no such dim": (
        lambda: lax.cumsum(ONES, 2), ValueError, r"axis: got 2; wanted -2 to 1, as operand has",
    ),
    "no dims": (
        lambda: lax.cummax(torch.ones(())), ValueError, r"axis: got 0; wanted an operand with dims",
    ),
    "a number": (lambda: lax.cumprod(NUMBER), TypeError, r"operand: got float; wanted a tensor"),
    "a mask": (
        lambda: lax.cumsum(ONES > 0), TypeError, r"got bool; wanted numbers; fix: x.to\(torch.int32",
    ),
    "complex": (
        lambda: lax.cummin(ONES.to(torch.complex64)), TypeError, r"got torch.complex64; wanted a dt",
    ),
    "logarithms of integers": (
        lambda: lax.cumlogsumexp(torch.arange(3)), TypeError,
        r"operand: got torch.int64; wanted a floating-point dtype; fix: x.to\(torch.float32\)",
    ),
    "arguments of torch.clamp": (
        lambda: lax.clamp(ONES, NUMBER, 1.0), TypeError, r"x: got float; wanted a tensor",
    ),
    "another dtype": (
        lambda: lax.clamp(ONES.double(), ONES, 2.0), TypeError,
        r"min: got torch.float64; wanted a number, or a tensor of torch.float32.*fix: min.to\(",
    ),
    "a fraction for integers": (
        lambda: lax.clamp(0, torch.arange(3), 1.5), TypeError, r"max: got 1.5; wanted an int",
    ),
    "another shape": (
        lambda: lax.clamp(torch.ones(4), ONES, 2.0), ValueError,
        r"min: got shape \(4,\); wanted \(\), or \(3, 4\), as x has; fix: min.expand",
    ),
    "no exponent": (
        lambda: lax.reduce_precision(ONES, 0, 3), ValueError, r"exponent_bits: got 0; wanted at lea",
    ),
    "no mantissa": (
        lambda: lax.reduce_precision(ONES, 5, -1), ValueError, r"mantissa_bits: got -1; wanted at",
    ),
    "few bits": (
        lambda: lax.reduce_precision(ONES.to(torch.float8_e4m3fn), 4, 2), TypeError,
        r"got torch.float8_e4m3fn; wanted torch.float16, ",
    ),
    "a barrier for numbers": (
        lambda: lax.optimization_barrier({"a": 1.0}), TypeError, r"a: got float; wanted a tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
