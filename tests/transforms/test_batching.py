"""ft.vmap against jax.vmap: trees of axes, over all that a per-rank program is made of."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

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
DEVICES = np.array(jax.devices()[:8]).reshape(2, 2, 2)
BOTH = ["psum", "all_gather", "axis_index", "cond", "while_loop", "cumsum"]
OURS = SimpleNamespace(
    **{n: getattr(lax, n) for n in BOTH}, vmap=ft.vmap, grad=torch.func.grad, jvp=torch.func.jvp,
    sin=torch.sin, remat=ft.remat, scan=ft.scan, custom_vjp=ft.custom_vjp, tree=ft.tree,
)  # fmt: skip
JAXS = SimpleNamespace(
    **{n: getattr(jax.lax, n) for n in BOTH}, vmap=jax.vmap, grad=jax.grad, jvp=jax.jvp,
    sin=jnp.sin, remat=jax.checkpoint, scan=jax.lax.scan, custom_vjp=jax.custom_vjp, tree=jax.tree,
)  # fmt: skip


def square(L):
    f = L.custom_vjp(lambda x: x * x)
    f.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))
    return f


ELEMENTS = {
    "collectives": lambda L, w, row: L.all_gather(L.psum(row @ w, "tp"), "dp"),
    "scan": lambda L, w, row: L.scan(
        lambda c, r: (c + L.psum(L.sin(r) * c, "tp"), c * r), row[0], L.remat(L.sin)(row @ w)
    ),
    "cond": lambda L, w, row: L.cond(row[0] > 0, L.sin, square(L), row @ w),
    "ranks": lambda L, w, row: row @ w * (1 + L.axis_index("tp")),
    "mapped again": lambda L, w, row: L.vmap(lambda c, r: L.sin(c * r), (1, None), -1)(w, row[0]),
}


def local(L, name, w, x, v):
    """A rank's mapped results, derivatives through them, and derivatives that are mapped."""
    one = lambda params, x, scale: {
        "y": ELEMENTS[name](L, params["w"] * params["b"], x * scale), "b": params["b"],
    }  # fmt: skip
    axes = {"in_axes": ({"w": 1, "b": None}, -1, None), "out_axes": {"y": -1, "b": None}}
    whole = L.vmap(one, **axes)
    total = lambda made: sum(L.sin(y).sum() for y in L.tree.leaves(made))
    loss = lambda w, x: total(whole({"w": w, "b": w.sum()}, x, 0.5))
    slope = L.grad(lambda p, x, scale: total(one(p, x, scale)["y"]))
    rows = L.vmap(slope, axes["in_axes"], {"w": 1, "b": 0})({"w": w, "b": w[0, 0, 0]}, x, 2.0)
    first = L.grad(loss, (0, 1))
    return [whole({"w": w, "b": w.sum()}, x, 0.5)["y"], rows, first(w, x),
            L.jvp(lambda w: first(w, x), (w,), (v,))[1]]  # fmt: skip


draw = np.random.default_rng(0).normal
W, X, V = draw(size=(4, 3, 2)), draw(size=(4, 3)), draw(size=(4, 3, 2))


@functools.cache
def expected(name):
    S = PartitionSpec
    program = jax.shard_map(
        lambda *args: jax.tree.map(lambda y: y[None], local(JAXS, name, *args)),
        mesh=jax.sharding.Mesh(DEVICES, tuple(SHAPE)), in_specs=(S(), S(), S()),
        out_specs=S(tuple(SHAPE)), check_vma=False,
    )  # fmt: skip
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(program)(W, X, V))


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("life", LIVES)
def test_is_jaxs(name, life):
    def program(*args):
        return jax.tree.map(lambda y: y[None], local(OURS, name, *args))

    mapped = ft.shard_map(program, Mesh(**SHAPE), P(), P(tuple(SHAPE)), check=False)
    got = LIVES[life](mapped)(*map(torch.from_numpy, (W, X, V)))
    mine, theirs = jax.tree.leaves(got), jax.tree.leaves(expected(name))
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_other_ways_to_say_it():
    x, y = torch.arange(6.0).view(2, 3), torch.arange(2.0)
    assert ft.vmap(lambda x, *, y: x * y, in_axes=[0])(x, y=y).equal(x * y[:, None])
    assert ft.vmap(lambda: torch.tensor(3.0), axis_size=2)().tolist() == [3, 3]
    made = ft.vmap(lambda x, f, n: (f(x), n, 1), in_axes=(1, None, None))(x, torch.sum, 2)
    assert [made[0].tolist(), made[1].tolist(), made[2].tolist()] == [[3, 5, 7], [2] * 3, [1] * 3]
    assert ft.vmap(lambda x: {"x": x})(x[:0])["x"].shape == (0, 3)


def test_captured_values_are_of_all_elements():
    f = lambda x: ft.checkpoint_name(x.sin(), "hidden") * 2
    x = torch.arange(4.0)
    out, found = ft.capture(ft.vmap(f), "hidden")(x)
    assert out.equal(2 * x.sin())
    assert found["hidden"].equal(x.sin())


def test_replicated_results_stay_replicated():
    mapped = lambda x: ft.vmap(lambda x: lax.psum(x, "tp"))(x)
    x = torch.arange(8.0).view(4, 2)
    got = ft.shard_map(mapped, Mesh(tp=2), P(None, "tp"), P())(x)
    assert got.equal(x.sum(1, keepdim=True))


def add(*args):
    return sum(args)


ONES = torch.ones(2, 3)
ANY: Any = "i"
WRONG = {
    "a name for the axis": (
        lambda: ft.vmap(add, axis_name="i"), ValueError,
        r"axis_name: got 'i'; wanted None: .*fix: ft.shard_map\(f, ft.Mesh\(i=n\), P\('i'\)",
    ),
    "no axes": (lambda: ft.vmap(add, in_axes=ANY), TypeError, "in_axes: got 'i'; wanted an int, No"),
    "an entry too few": (
        lambda: ft.vmap(add, (0,))(ONES, ONES), ValueError, r"got 1 entries; wanted one for each of 2",
    ),
    "no prefix": (
        lambda: ft.vmap(add, ({"a": 0},))({"b": ONES}), ValueError, "in_axes is not a prefix",
    ),
    "sizes differ": (
        lambda: ft.vmap(add, (0, 1))(ONES, ONES), ValueError,
        r"sizes of what is mapped differ(?s:.)*argument 1: got 3 along.*wanted 2, as argument 0",
    ),
    "another axis_size": (
        lambda: ft.vmap(add, axis_size=3)(ONES), ValueError, r"got 2 along.*wanted 3, as axis_size",
    ),
    "nothing mapped": (
        lambda: ft.vmap(add, None)(ONES), ValueError, r"got nothing to map over.*give axis_size",
    ),
    "no such axis": (
        lambda: ft.vmap(add, 2)(ONES), ValueError, r"got shape \(2, 3\), to be mapped over axis 2",
    ),
    "a number": (
        lambda: ft.vmap(add)(ONES, 1.0), TypeError, r"argument 1: got a float, to be mapped over a",
    ),
    "differs": (
        lambda: ft.vmap(add, out_axes=None)(ONES), ValueError,
        r"the result: got None in out_axes, but it differs between elements; wanted an int",
    ),
    "no such axis of a result": (
        lambda: ft.vmap(add, out_axes=2)(ONES), ValueError, r"got out_axes=2 for an element of shape",
    ),
    "a result of text": (
        lambda: ft.vmap(lambda x: {"x": "text"})(ONES), TypeError, r"x: got a str; wanted a tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
