"""Slices, and operations that torch lacks, against JAX, in the same program on eight CPU devices."""

from __future__ import annotations

import doctest
import functools
import inspect
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import functron as ft
from functron import Mesh, P, lax
from tests.transforms.lives import LIVES

SHAPE = {"dp": 2, "tp": 2, "ep": 2}
ALL = tuple(SHAPE)
MESH = Mesh(**SHAPE)
DEVICES = np.array(jax.devices()[:8]).reshape(tuple(SHAPE.values()))
NAMES = [
    "dynamic_slice", "dynamic_slice_in_dim", "dynamic_index_in_dim", "dynamic_update_slice",
    "dynamic_update_slice_in_dim", "dynamic_update_index_in_dim", "axis_index", "ppermute",
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "clamp", "reduce_precision",
    "optimization_barrier",
]  # fmt: skip


def side(of, **others):
    return SimpleNamespace(**{name: getattr(of, name) for name in NAMES}, **others)


OURS = side(
    lax, vmap=torch.func.vmap, remat=ft.remat, grad=torch.func.grad, jvp=torch.func.jvp,
    sin=torch.sin, scan=lambda f, xs: ft.scan(lambda c, x: (c, f(x)), torch.zeros(()), xs)[1],
)  # fmt: skip
JAXS = side(
    jax.lax, vmap=jax.vmap, remat=jax.checkpoint, grad=jax.grad, jvp=jax.jvp, sin=jnp.sin,
    scan=lambda f, xs: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, xs)[1],
)  # fmt: skip

# of x [6, 5], u [2, 3] and an index of any size and sign
CASES = {
    "slice": lambda L, x, u, i: L.dynamic_slice(x, (i, 1 - i), u.shape),
    "slice, an int": lambda L, x, u, i: L.dynamic_slice(x * i, (-9, i), (3, 4)),
    "slice in dim": lambda L, x, u, i: L.dynamic_slice_in_dim(x, i, 2, -1),
    "whole dim": lambda L, x, u, i: L.dynamic_slice_in_dim(x, i, 6) * i,
    "empty": lambda L, x, u, i: L.dynamic_slice_in_dim(x * i, i, 0),
    "index": lambda L, x, u, i: L.dynamic_index_in_dim(x, i),
    "index, without dim": lambda L, x, u, i: L.dynamic_index_in_dim(x, i, -1, keepdims=False),
    "update": lambda L, x, u, i: L.dynamic_update_slice(x, u, (i, 1 - i)),
    "update, an int": lambda L, x, u, i: L.dynamic_update_slice(x, u * i, (i, -2)),
    "update, ints": lambda L, x, u, i: L.dynamic_update_slice(x * i, u, (-1, 99)),
    "update in dim": lambda L, x, u, i: L.dynamic_update_slice_in_dim(x, u, i, 1),
    "update all": lambda L, x, u, i: L.dynamic_update_slice_in_dim(x, x * u[0, 0], i, 0),
    "update index": lambda L, x, u, i: L.dynamic_update_index_in_dim(x, x[2] * u[0, 0], i, 0),
    "sums": lambda L, x, u, i: L.cumsum(x * i, 1, reverse=True),
    "products": lambda L, x, u, i: L.cumprod(L.sin(x) * i),
    "maxima": lambda L, x, u, i: L.cummax(x * i, axis=0) * x,
    "minima": lambda L, x, u, i: L.cummin(u * i, axis=1, reverse=True) * u,
    "log of sums": lambda L, x, u, i: L.cumlogsumexp(x * i, reverse=True),
    "clamp": lambda L, x, u, i: L.clamp(u, u * x[:2, :3] * i, u + 1.0) ** 2,
    "clamp by numbers": lambda L, x, u, i: L.clamp(-0.5, x * i, 0.5) ** 2,
    "reduced": lambda L, x, u, i: L.reduce_precision(x * i, 5, 10),
    "barrier": lambda L, x, u, i: L.optimization_barrier({"x": x * x * i, "i": i, "u": u})["x"],
    "index with dim": lambda L, x, u, i: L.dynamic_update_index_in_dim(x, x[:, :1] ** 2, i, -1),
}
CONTEXTS = {
    "vmap": lambda L, f, i: L.vmap(f)(i),
    "scan": lambda L, f, i: L.scan(f, i),
    "remat": lambda L, f, i: L.remat(L.vmap(f))(i),
}


def local(L, case, context, x, u, i, v):
    """Values, gradients, and products with the Hessian of a rank, of indices that ranks shift."""

    def loss(x, u):
        # so that cotangents come from another rank
        x, place = L.ppermute(x, "tp", [(0, 1), (1, 0)]), L.axis_index("tp")
        y = CONTEXTS[context](L, lambda i: CASES[case](L, x, u, i + place), i)
        return (L.sin(y) * (2.0 + place)).sum(), y

    first = L.grad(lambda *both: loss(*both)[0], (0, 1))
    along = lambda x, u: sum((g * t).sum() for g, t in zip(first(x, u), v, strict=True))
    made = loss(x, u)[1][None], first(x, u), L.grad(along, (0, 1))(x, u)
    return [*made, L.jvp(first, (x, u), tuple(v))[1]]


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


X, U = draw(12, 5), draw(2, 3, seed=1)
V = draw(12, 5, seed=2), draw(2, 3, seed=3)
INDICES = np.array([-9, -3, -1, 0, 2, 4, 9])


@functools.cache
def expected(case):
    """JAX's, under vmap."""
    S = PartitionSpec
    program = jax.shard_map(
        functools.partial(local, JAXS, case, "vmap"),
        mesh=jax.sharding.Mesh(DEVICES, ALL), in_specs=(S("dp"), S(), S(), (S("dp"), S())),
        out_specs=S(ALL), check_vma=False,
    )  # fmt: skip
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(program)(X, U, INDICES, V))


def factors(case, context, life):
    """Each case simulated and otherwise, in any context, and each context in each life."""
    return [{"case": case, "simulated": life == "simulated"}, {"context": context, "life": life}]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("life", LIVES)
def test_is_jaxs(case, context, life):
    args = jax.tree.map(torch.from_numpy, (X, U, INDICES, V))
    program = functools.partial(local, OURS, case, context)
    specs = P("dp"), P(), P(), (P("dp"), P())
    got = LIVES[life](ft.shard_map(program, MESH, specs, P(ALL), check=False))(*args)
    want = expected(case)
    for mine, jaxs in zip(got, want, strict=True):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(jaxs), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", [P(None, "tp"), P("tp")])
def test_partitions(spec):
    """Slices that were written for one device, where other dims are split, or their own."""
    x, index = torch.from_numpy(draw(6, 4)), torch.tensor(3)

    def loss(x, index):
        y = lax.dynamic_slice_in_dim(x, index, 2) ** 3
        return lax.dynamic_update_slice_in_dim(x, y, index - 2, 0).sin().sum()

    both = ft.value_and_grad(loss)
    got = ft.partition(both, Mesh(tp=2), (spec, P()), (P(), spec))(x, index)
    torch.testing.assert_close(got, both(x, index), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_indices_and_operands_of_any_dtype(dtype):
    for operand in (torch.arange(7), torch.arange(7) % 2 == 0, torch.arange(7).to(torch.bfloat16)):
        for place in (0, 3, 7, 200):
            index = torch.tensor(place).to(dtype)
            begin = min(place, 5)
            row = lax.dynamic_slice_in_dim(operand, index, 2)
            assert row.tolist() == operand[begin : begin + 2].tolist()
            put = lax.dynamic_update_slice(operand, operand[:2], index.view(1))
            want = [*operand[:begin], *operand[:2], *operand[begin + 2 :]]
            assert put.tolist() == torch.stack(want).tolist()


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("axis_index", "ppermute")] + ["associative_scan"]
)
def test_examples_run(name):
    text = inspect.getdoc(getattr(lax, name)) or ""
    names = {"torch": torch, "lax": lax, "ft": ft}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert example.examples
    report: list[str] = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert "".join(report) == ""


def wrong(name, *args, **kwargs):
    return lambda: getattr(lax, name)(*args, **kwargs)


AT, ONES = torch.tensor(1), torch.ones(3, 4)
WRONG = {
    "sizes for other dims": (
        wrong("dynamic_slice", ONES, (AT, 0), (2,)), ValueError,
        r"slice_sizes: got 1 sizes, \(2,\); wanted one for each dim of \(3, 4\)",
    ),
    "too large": (
        wrong("dynamic_slice", ONES, (AT, 0), (2, 5)), ValueError,
        r"slice_sizes: got 5 in dim 1; wanted 0 to 4, as operand has shape \(3, 4\)",
    ),
    "negative": (
        wrong("dynamic_slice_in_dim", ONES, AT, -1), ValueError, r"slice_size: got -1 in dim 0",
    ),
    "an index too few": (
        wrong("dynamic_slice", ONES, (AT,), (1, 1)), ValueError,
        r"start_indices: got 1 indices; wanted one for each dim of \(3, 4\); fix: give 0 for dims",
    ),
    "indices in a matrix": (
        wrong("dynamic_slice", ONES, torch.zeros(1, 2).long(), (1, 1)), ValueError,
        r"start_indices: got shape \(1, 2\); wanted shape \(2,\)",
    ),
    "a float": (
        wrong("dynamic_slice_in_dim", ONES, torch.tensor(1.0), 2), TypeError,
        r"start_index: got a tensor of shape \(\) and torch.float32; wanted an int, or a 0-dim",
    ),
    "several indices": (
        wrong("dynamic_index_in_dim", ONES, torch.tensor([0, 1])), TypeError,
        r"got a tensor of shape \(2,\).*fix: .*torch.func.vmap over several",
    ),
    "a Python float": (
        wrong("dynamic_slice", ONES, (0, 1.5), (1, 1)), TypeError, r"start_indices/1: got 1.5;",
    ),
    "no such dim": (
        wrong("dynamic_slice_in_dim", ONES, AT, 1, 2), ValueError, r"axis: got 2; wanted -2 to 1",
    ),
    "no dims": (
        wrong("dynamic_index_in_dim", torch.ones(()), AT), ValueError, "wanted an operand with dims",
    ),
    "another dtype": (
        wrong("dynamic_update_slice", ONES, torch.ones(1, 1).double(), (AT, AT)), TypeError,
        r"update: got torch.float64; wanted torch.float32, as operand has; fix: update.to\(",
    ),
    "another number of dims": (
        wrong("dynamic_update_slice_in_dim", ONES, torch.ones(2), AT, 0), ValueError,
        r"update: got 1 sizes, \(2,\); wanted one for each dim of \(3, 4\)",
    ),
    "a larger update": (
        wrong("dynamic_update_slice", ONES, torch.ones(4, 1), (AT, AT)), ValueError,
        r"update: got 4 in dim 0; wanted 0 to 3",
    ),
    "a number": (
        wrong("dynamic_update_index_in_dim", torch.ones(3), 2.0, AT, 0), TypeError,
        r"update: got float; wanted a tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert "test_indexing.py" in str(caught.value) or error is TypeError


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("split", [False, True])
def test_updates_at_the_index_of_a_rank_are_differentiated_twice_in_reverse(split, life):
    """Against JAX's product with the Hessian, of an operand that ranks along another axis divide."""
    x, u = torch.linspace(-1, 1, 8).double(), torch.linspace(1, 2, 2).double()
    spec = P("tp") if split else P()

    def product(x, u):
        of_rank = lambda x, u: lax.dynamic_update_slice(x, u, (lax.axis_index("dp"),)).sin().sum()
        rows = torch.func.vjp(torch.func.grad(of_rank, (0, 1)), x, u)[1]((x, u))
        return tuple(row[None] for row in rows)

    def hessian_product(x, u, i):
        of_rank = lambda x, u: jnp.sin(jax.lax.dynamic_update_slice(x, u, (i,))).sum()
        return jax.vjp(jax.grad(of_rank, (0, 1)), x, u)[1]((x, u))

    mapped = ft.shard_map(product, Mesh(dp=2, tp=2), (spec, P()), P(("dp", "tp")))
    got = LIVES[life](mapped)(x, u)
    with jax.enable_x64(True):
        parts = np.split(x.numpy(), 2) if split else [x.numpy()] * 2
        want = [hessian_product(part, u.numpy(), i) for i in range(2) for part in parts]
    for one, column in zip(got, zip(*want, strict=True), strict=True):
        np.testing.assert_allclose(one, np.stack(column), rtol=1e-10, atol=1e-12)
