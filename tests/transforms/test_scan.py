"""scan against jax.lax.scan and a plain loop."""

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch.multiprocessing.reductions import StorageWeakRef

import functron as ft
from functron import lax
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.scan import ScanTurn, scan_in_turn
from tests.transforms.lives import LIVES


def test_against_jax():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(5, 3, 3)), rng.normal(size=3)

    def ours(c, layer):
        c = torch.tanh(c @ layer["w"])
        return c, {"sum": c.sum(), "c": c}

    def theirs(c, layer):
        c = jnp.tanh(c @ layer["w"])
        return c, {"sum": c.sum(), "c": c}

    with jax.enable_x64(True):
        want = jax.lax.scan(theirs, jnp.asarray(x), {"w": jnp.asarray(w)})
        grads = jax.grad(lambda w: jax.lax.scan(theirs, jnp.asarray(x), {"w": w})[0].sum())(w)
    got = ft.scan(ours, torch.from_numpy(x), {"w": torch.from_numpy(w)})
    for a, b in zip(ft.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    dw = ft.grad(lambda w: ft.scan(ours, torch.from_numpy(x), {"w": w})[0].sum())
    np.testing.assert_allclose(dw(torch.from_numpy(w)), grads, rtol=1e-12)


def test_without_xs_it_counts():
    carry, ys = ft.scan(lambda c, _: (c + 1, c), torch.tensor(0), None, length=4)
    assert carry == 4
    assert ys.tolist() == [0, 1, 2, 3]


def test_ys_may_be_none():
    carry, ys = ft.scan(lambda c, x: (c + x, None), torch.tensor(0.0), torch.ones(3))
    assert carry == 3
    assert ys is None


def no_steps(scan, each, jnp, w, x):
    """Scans of 0 steps by w [3, 2], whose ys x [0, 3] tells nothing of."""

    def step(c, row):
        y = {"row": row @ w * c, "sum": (row > 0).sum()}
        return c * y["row"].sum(), (y, c)

    kinds = [{}, {"reverse": True}, {"unroll": 3}, {"unroll": True}]
    made = [scan(step, w[0, 0], x, **kind) for kind in kinds]
    counted = scan(lambda c, _: (c, {"a": c, "b": [w.sum(1)]}), w, None, length=0)
    rows = [each(lambda row: row * w[:, 0], x, batch_size=size) for size in (None, 4)]
    return *made, counted, rows


@pytest.mark.parametrize("life", LIVES)
def test_no_steps_give_no_rows_of_ys(life):
    w, x = np.ones((3, 2), np.float32), np.zeros((0, 3), np.float32)
    want = no_steps(jax.lax.scan, jax.lax.map, jnp, jnp.asarray(w), jnp.asarray(x))
    given = torch.from_numpy(w), torch.from_numpy(x)
    got = LIVES[life](lambda w, x: no_steps(ft.scan, lax.map, torch, w, x))(*given)
    assert ft.tree.paths(got) == [
        "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)
        for path, _ in jax.tree_util.tree_flatten_with_path(want)[0]
    ]
    for a, b in zip(ft.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert tuple(a.shape) == b.shape
        assert a.is_floating_point() == jnp.issubdtype(b.dtype, jnp.floating)

    def loss(w):
        c, *_, (_, ys), _ = no_steps(ft.scan, lax.map, torch, w, given[1])
        return c[0] + ys["b"][0].sum() + ys["a"].sum()

    for grad in (ft.grad, torch.func.grad, torch.func.jacfwd):
        assert LIVES[life](grad(loss))(given[0]).tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_no_steps_on_a_mesh():
    """Ranks gather nothing of their parts of ys, written out and by partition."""
    mesh, rows = ft.Mesh(dp=2, tp=2), ft.P("dp")
    f = lambda x: ft.scan(lambda c, _: (2 * c, c), x, None, length=0)[1]
    gathered = lambda x: lax.all_gather(f(x), ("dp", "tp"), axis=1, tiled=True)
    x = torch.ones(4, 3)
    assert ft.partition(f, mesh, rows, ft.P())(x).shape == (0, 4, 3)
    assert ft.shard_map(gathered, mesh, rows, ft.P())(x).shape == (0, 8, 3)


def test_no_steps_are_refused_where_shapes_do_not_follow():
    x = torch.zeros(0, 3)
    with pytest.raises(ValueError, match="the carry must keep"):
        ft.scan(lambda c, row: (row, None), torch.tensor(0.0), x)
    with pytest.raises(ValueError, match=r"(?s)scan of 0 steps at .*test_scan.*reads numbers"):
        ft.scan(lambda c, row: (c, row[: int(c)]), torch.tensor(1.0), x)


@pytest.mark.parametrize(
    ("f", "init", "words"),
    [
        (
            lambda c, x: (c + torch.ones(4), None),
            torch.zeros(()),
            r"carry: got \(4,\) .* wanted \(\)",
        ),
        (lambda c, x: (c + x, None), torch.tensor(0), r"got \(\) torch.float32 .* torch.int64"),
        (lambda c, x: ({"a": c["a"] + x.double()}, None), {"a": torch.ones(())}, "carry/a: got"),
        (lambda c, x: ([c[0] + x], None), (torch.ones(()),), "structure"),
    ],
)
def test_a_carry_that_changes_is_refused_as_in_a_trace(f, init, words):
    xs = torch.arange(4.0)
    for run in (ft.scan, ft.trace(lambda init, xs: ft.scan(f, init, xs))):
        with pytest.raises(ValueError, match=words):
            run(*((f, init, xs) if run is ft.scan else (init, xs)))


def test_errors():
    xs = {"a": torch.ones(3, 2), "b": torch.ones(4), "c": torch.ones(())}
    with pytest.raises(ValueError, match=r"(?s)xs/b: got shape \(4,\).*xs/c: got shape \(\)"):
        ft.scan(lambda c, x: (c, None), 0, xs)
    with pytest.raises(ValueError, match="pass length="):
        ft.scan(lambda c, x: (c, None), 0, None)


def product(x, w):
    return torch.sin(x @ w)


def with_rule(x, w):
    """The same with its derivative written down."""

    def forward(x, w):
        return torch.sin(x @ w), (x, w)

    def backward(kept, cotangent):
        x, w = kept
        inner = cotangent * torch.cos(x @ w)
        return inner @ w.mT, x.mT @ inner

    return custom_vjp(product, forward, backward)(x, w)


@pytest.mark.parametrize("layer", [product, ft.remat(product), with_rule])
def test_what_a_layer_read_is_freed_after_its_backward(layer):
    """Of 5 layers 4 inputs are left when the last one has been gone through, and so on."""
    inputs, num_left = [], []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            inputs.append(StorageWeakRef(x.untyped_storage()))
            return x.view_as(x)

        @staticmethod
        def backward(ctx, *cotangents):
            num_left.append(sum(not x.expired() for x in inputs))
            return cotangents

    def loss(w, x):
        return ft.scan(lambda x, w: (layer(Watch.apply(x), w), None), x @ w[0], w)[0].sum()

    ft.grad(loss)(torch.randn(5, 8, 8), torch.randn(4, 8))
    assert num_left == [4, 3, 2, 1, 0]


def test_stacks_take_turns():
    """Turns that come again are one scan of a program, and what comes once stays as it is."""
    xs = {name: torch.randn(n, 3, dtype=torch.float64) for name, n in (("a", 5), ("b", 2))}
    start = torch.ones(3, dtype=torch.float64)

    def grow(carry, x):
        return torch.tanh(carry + x), carry * x

    def mix(carry, x):
        return carry * x.exp(), None

    turns = [ScanTurn("a", 2, grow), ScanTurn("b", 1, mix)] * 2 + [ScanTurn("a", 1, grow)]

    def in_turn(xs):
        carry, ys = scan_in_turn(turns, start, xs)
        return carry.sum() + ys["a"].square().sum(), (carry, ys["a"])

    def loop(xs):
        carry, ys = start, []
        for at in ("a0", "a1", "b0", "a2", "a3", "b1", "a4"):
            carry, y = (grow if at[0] == "a" else mix)(carry, xs[at[0]][int(at[1])])
            ys += [] if y is None else [y]
        ys = torch.stack(ys)
        return carry.sum() + ys.square().sum(), (carry, ys)

    want = ft.value_and_grad(loop, has_aux=True)(xs)
    traced = ft.jit(ft.value_and_grad(in_turn, has_aux=True), backend="eager")
    for got in (ft.value_and_grad(in_turn, has_aux=True)(xs), traced(xs)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    program = ft.trace(in_turn)(xs)
    assert len([e for e in program.block.equations if e.name.startswith("scan")]) == 2
