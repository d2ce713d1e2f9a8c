"""associative_scan, along dims and over ranks, against jax.lax.associative_scan of whole sequences.

In a mapped program it is the function that JAX has of the sequence that ranks divide, so JAX's one
device is the oracle of every mesh: values, gradients, and products with the Hessian, forward over
reverse and reverse over reverse.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch.func import jvp, vmap

import functron as ft
from functron import Mesh, P, lax
from tests.transforms.lives import LIVES

ROWS = 2  # sequences, that programs are mapped or scanned over


def affine(one, two):
    """h -> a h + b, one after the other."""
    return {"a": one["a"] * two["a"], "b": two["a"] * one["b"] + two["b"]}


def product(one, two):
    return one @ two


def parallel(one, two):
    """Of resistors; its derivative would be NaN at zeros that a rank receives from nowhere."""
    return two / (1.0 + two / one)


FUNCTIONS = {"affine": affine, "product": product, "parallel": parallel}
NUM = 6  # elements in a sequence
MESHES = {
    "along a dim": (Mesh(), 0),
    "one axis": (Mesh(cp=3), ("cp", 0)),
    "beside another": (Mesh(dp=2, cp=2), ("cp", 0)),
    "two axes": (Mesh(dp=2, tp=2, cp=3), ("dp", "cp", 0)),
    "an element a rank": (Mesh(cp=6), "cp"),
    "and two axes": (Mesh(cp=2, dp=3), ("cp", "dp")),
}
CONTEXTS = {
    "vmap": lambda one, x: vmap(one)(x),
    "scan": lambda one, x: ft.scan(lambda c, row: (c, one(row)), torch.zeros(1), x)[1],
    "remat": lambda one, x: ft.remat(vmap(one))(x),
}


def elements(name, seed):
    """Rows of sequences of elements, whose products stay near 1."""
    draw = lambda *shape: np.random.default_rng(seed).uniform(0.5, 1.5, (ROWS, NUM, *shape))
    if name == "affine":
        return {"a": draw(2), "b": 1 - draw(2)}
    return draw(2, 2) / 2 if name == "product" else draw(3)


@functools.cache
def expected(name, reverse):
    """JAX's values, gradient, and product of the Hessian with a vector."""
    scan = jax.vmap(lambda x: jax.lax.associative_scan(FUNCTIONS[name], x, reverse=reverse))
    loss = lambda x: sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(scan(x)))

    def derive(x, v):
        gradient, second = jax.jvp(jax.grad(loss), (x,), (v,))
        return scan(x), gradient, second

    with jax.enable_x64(True):
        found = jax.jit(derive)(elements(name, 0), elements(name, 1))
        return jax.tree.map(np.asarray, found)


def program(name, mesh, axis, reverse, context):
    """The rank's part of values, gradients and products with the Hessian, twice."""
    names = tuple(n for n in mesh.axis_names if n in (axis if isinstance(axis, tuple) else (axis,)))
    spec = P(None, names)

    def local(x, v):
        one = lambda x: lax.associative_scan(FUNCTIONS[name], x, reverse, axis)
        scan = functools.partial(CONTEXTS[context], one)

        def loss(x):
            return lax.psum(sum(leaf.sin().sum() for leaf in ft.tree.leaves(scan(x))), names)

        def along(x):
            found = zip(ft.tree.leaves(ft.grad(loss)(x)), ft.tree.leaves(v), strict=True)
            return lax.psum(sum((g * t).sum() for g, t in found), mesh.axis_names)  # of shares

        derivatives = [ft.grad(loss)(x), ft.grad(along)(x), *jvp(ft.grad(loss), (x,), (v,))]
        return scan(x), *ft.sync_gradients(derivatives, [spec] * len(derivatives))

    return ft.shard_map(local, mesh, (spec, spec), spec)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("life", LIVES)
def test_is_jaxs_of_the_whole_sequence(name, mesh, reverse, context, life):
    mesh, axis = MESHES[mesh]
    args = [jax.tree.map(torch.from_numpy, elements(name, seed)) for seed in (0, 1)]
    got = LIVES[life](program(name, mesh, axis, reverse, context))(*args)
    values, gradient, second = expected(name, reverse)
    wanted = [values, gradient, second, gradient, second]
    for mine, jaxs in zip(got, wanted, strict=True):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(jaxs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [1, -1, ("cp", -2)])
def test_any_dim_any_size_and_other_dtypes(axis, reverse):
    dim = axis[-1] if isinstance(axis, tuple) else axis
    for size in (0, 1, 2, 9):
        shape = [3, 3, 3]
        shape[dim] = size
        x = np.arange(math.prod(shape)).reshape(shape)
        for fn, ufunc in ((torch.add, np.add), (torch.maximum, np.maximum)):
            turn = (lambda x: np.flip(x, dim)) if reverse else (lambda x: x)
            want = turn(ufunc.accumulate(turn(x), dim))
            got = lax.associative_scan(fn, torch.from_numpy(x), reverse=reverse, axis=axis)
            np.testing.assert_array_equal(got, want)
    x = torch.tensor([False, True, False])
    for mesh in (Mesh(), Mesh(cp=3), Mesh(dp=2, cp=1)):
        some = ft.shard_map(
            lambda x: lax.associative_scan(torch.logical_or, x, reverse, ("cp", 0)),
            mesh, P("cp"), P("cp"),
        )  # fmt: skip
        assert some(x).tolist() == ([True, True, False] if reverse else [False, True, True])


@pytest.mark.parametrize("size", range(1, 9))
def test_bytes_are_what_the_docstring_says(size):
    """ceil(log2 n) ppermutes of an element, forward and backward, however long the parts are."""
    steps = math.ceil(math.log2(size))
    for length in (1, 16):
        x = torch.ones(length * size, 5)

        def loss(x):
            y = lax.associative_scan(lambda a, b: a * b, x, axis=("cp", 0))
            return lax.psum(y.sum(), "cp")

        made = ft.shard_map(ft.value_and_grad(loss), Mesh(cp=size), P("cp"), (P(), P("cp")))
        sent = [row for row in ft.trace(made)(x).cost().collectives if row.op == "ppermute"]
        rows = {row.phase: (row.count, row.payload_bytes) for row in sent}
        assert rows == (
            dict.fromkeys(("forward", "backward"), (steps, steps * 20)) if steps else {}
        )


def test_a_further_axis_takes_a_broadcast():
    mesh = Mesh(dp=4, cp=8)
    every = P(("dp", "cp"))
    scan = lambda x: lax.associative_scan(torch.add, x, axis=("dp", "cp", 0))
    cost = ft.trace(ft.shard_map(scan, mesh, every, every))(torch.ones(64, 5)).cost()
    found = {(row.axis, row.op): (row.count, row.payload_bytes) for row in cost.collectives}
    assert found == {
        ("cp", "ppermute"): (3, 60), ("cp", "pbroadcast"): (1, 20), ("dp", "ppermute"): (2, 40),
    }  # fmt: skip


def test_work_is_linear():
    """Elements that fn takes: some twice as many as there are, not n log n."""
    taken = []

    def add(a, b):
        taken.append(len(a))
        return a + b

    lax.associative_scan(add, torch.ones(1024))
    assert sum(taken) < 2 * 1024
    assert len(taken) == 2 * 10 - 1


def test_replicated_elements_are_counted():
    ranks = ft.shard_map(
        lambda x: lax.associative_scan(torch.add, x, axis="cp"), Mesh(cp=4), P(), P("cp")
    )
    assert ranks(torch.ones(1)).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("spec", [P(None, "tp"), P("tp")])
def test_partitions(spec):
    """A scan that was written for one device, where other dims are split, or its own."""
    x = torch.rand(6, 4, dtype=torch.float64)
    both = lambda x: ft.value_and_grad(lambda x: lax.associative_scan(parallel, x).sin().sum())(x)
    got = ft.partition(both, Mesh(tp=2), spec, (P(), spec))(x)
    torch.testing.assert_close(got, both(x), rtol=1e-12, atol=1e-12)


@pytest.mark.distributed
def test_on_processes(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_scans.py"), 2)
    for check in ("scans", "slices", "no_steps", "refusals"):
        assert f"check_{check}: ok" in done.stdout


def scan(fn=torch.add, elems=None, axis=0, **sizes):
    elems = torch.ones(4, 2) if elems is None else elems
    program = lambda x: lax.associative_scan(fn, x, axis=axis)
    return ft.shard_map(program, Mesh(**sizes), P(), P(), check=False)(elems)


WRONG = {
    "no function": (lambda: lax.associative_scan("add", torch.ones(2)), TypeError, r"fn: got 'add'"),
    "no axis": (lambda: scan(axis=1.5), ValueError, r"axis: got 1.5; wanted a dim, the name of"),
    "none": (lambda: scan(axis=()), ValueError, r"axis: got \(\); wanted a dim"),
    "a dim first": (
        lambda: scan(axis=(0, "cp"), cp=2), ValueError, r'got \(0, .cp.\).*fix: .*axis=\("cp", 0\)',
    ),
    "twice": (lambda: scan(axis=("cp", "cp", 0), cp=2), ValueError, r"names, each once"),
    "a bool": (lambda: scan(axis=True), ValueError, r"axis: got True; wanted a dim"),
    "unbound": (lambda: scan(axis="cq", cp=2), ValueError, r"unbound axis name 'cq' at .*: cp, "),
    "no such dim": (
        lambda: scan(axis=2), ValueError, r"elems: got shape \(4, 2\) and axis=2; wanted a dim from",
    ),
    "scalars": (lambda: scan(elems=torch.ones(())), ValueError, r"got shape \(\) and axis=0"),
    "other sizes": (
        lambda: scan(elems={"a": torch.ones(4), "b": torch.ones(3)}), ValueError,
        r"elems/b: got shape \(3,\); wanted 4 elements in dim 0, as elems/a",
    ),
    "no tensor": (lambda: scan(elems={"n": 3}), TypeError, r"elems/n: got int; wanted a tensor"),
    "nothing": (lambda: scan(elems={}), ValueError, r"elems: got a tree without leaves"),
    "a part": (
        lambda: scan(lambda a, b: a["x"], {"x": torch.ones(2)}), ValueError,
        r"what it returned does not match the structure of the first argument of fn",
    ),
    "another shape": (
        lambda: scan(lambda a, b: (a + b).sum(-1)), ValueError,
        r"fn must return an element .*(?s:.)*got \(2,\) torch.float32; wanted \(2, 2\)",
    ),
    "another dtype": (
        lambda: scan(lambda a, b: a.double() + b, axis="cp", cp=2), ValueError,
        r"result: got \(4, 2\) torch.float64; wanted \(4, 2\) torch.float32.*fix: cast or reshape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
