"""Collectives and shard_map against jax.shard_map(check_vma=False), the same program in both."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from functron import Mesh, P, lax, shard_map

SHAPE = {"dp": 2, "tp": 2, "ep": 2}
ALL = ("dp", "tp", "ep")
MESH = Mesh(**SHAPE)


def jax_mesh(**shape):
    devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))])
    return jax.sharding.Mesh(devices.reshape(tuple(shape.values())), tuple(shape))


JAX_MESH = jax_mesh(**SHAPE)

torch_side = SimpleNamespace(
    **{name: getattr(lax, name) for name in lax.__all__},
    tanh=torch.tanh,
    sum=torch.sum,
    where=torch.where,
    P=P,
)
jax_side = SimpleNamespace(
    **{
        name: getattr(jax.lax, name)
        for name in [
            "psum",
            "pmean",
            "pmax",
            "pmin",
            "all_gather",
            "psum_scatter",
            "all_to_all",
            "ppermute",
            "axis_index",
            "stop_gradient",
        ]
    },
    # jax.lax.pbroadcast has no rule on the CPU, so its definition stands in
    pbroadcast=lambda x, names, source: jax.lax.all_gather(x, names)[source],
    axis_size=lambda names: jax.lax.psum(1, names),
    tanh=jnp.tanh,
    sum=jnp.sum,
    where=jnp.where,
    P=PartitionSpec,
)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def ours(program, in_specs, out_specs):
    return shard_map(
        lambda *a: program(torch_side, *a), MESH, in_specs(P), out_specs(P), check=False
    )


def theirs(program, in_specs, out_specs):
    return jax.shard_map(
        lambda *a: program(jax_side, *a),
        mesh=JAX_MESH,
        in_specs=in_specs(PartitionSpec),
        out_specs=out_specs(PartitionSpec),
        check_vma=False,
    )


def assert_same(got, want, tol=1e-12):
    got_leaves = [np.asarray(x) for x in jax.tree.leaves(jax.tree.map(np.asarray, got))]
    want_leaves = [np.asarray(x) for x in jax.tree.leaves(want)]
    assert len(got_leaves) == len(want_leaves)
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


def random(*shape):
    return np.random.default_rng(0).normal(size=shape)


# ---- values and gradients of scalar programs of w [8, 16] split P(None, "tp") and x [8, 8] P("dp")

SCALAR = {
    "psum": lambda L, y: L.psum(L.tanh(y).sum(), ALL),
    "psum_tuple": lambda L, y: L.psum((L.tanh(L.psum(y, ("tp", "ep"))) ** 2).sum(), "dp"),
    "psum_of_replicated": lambda L, y: L.psum(
        (L.tanh(L.psum(L.psum(y, "ep"), "ep"))).sum(), ("dp", "tp")
    ),
    "pmean": lambda L, y: L.pmean((L.tanh(L.pmean(y, "tp")) ** 2).sum(), ALL),
    "pmax_stopped": lambda L, y: L.psum(
        (L.tanh(y - L.pmax(L.stop_gradient(y), "tp")) ** 2).sum(), ALL
    ),
    "pmin_stopped": lambda L, y: L.psum(
        (L.tanh(y - L.pmin(L.stop_gradient(y), ("dp", "tp"))) ** 2).sum(), ALL
    ),
    "all_gather": lambda L, y: L.psum(
        (L.tanh(L.all_gather(y, "tp")) ** 3).sum() * (1.0 + L.axis_index("tp")), ALL
    ),
    "all_gather_negative_dim": lambda L, y: L.psum(
        (L.tanh(L.all_gather(y, "tp", axis=-1)) ** 3).sum() * (1.0 + L.axis_index("tp")), ALL
    ),
    "all_gather_tiled": lambda L, y: L.psum(
        (L.tanh(L.all_gather(y, "tp", axis=1, tiled=True)[:, ::3]) ** 3).sum()
        * (1.0 + L.axis_index("tp")),
        ALL,
    ),
    "all_gather_tuple": lambda L, y: L.psum(
        (L.tanh(L.all_gather(y, ("tp", "ep"), axis=0, tiled=True)[1:5]) ** 3).sum()
        * (1.0 + L.axis_index(("tp", "ep"))),
        ALL,
    ),
    "psum_scatter_tiled": lambda L, y: L.psum(
        (L.tanh(L.psum_scatter(y, "tp", scatter_dimension=1, tiled=True)) ** 3).sum()
        * (1.0 + L.axis_index("tp")),
        ALL,
    ),
    "psum_scatter_tuple": lambda L, y: L.psum(
        (L.tanh(L.psum_scatter(y, ("tp", "dp"), scatter_dimension=1, tiled=True)) ** 3).sum()
        * (1.0 + L.axis_index(("dp", "tp"))),
        ALL,
    ),
    "psum_scatter_untiled": lambda L, y: L.psum(
        (L.tanh(L.psum_scatter(y[:2], "tp", scatter_dimension=0)) ** 3).sum()
        * (1.0 + L.axis_index("tp")),
        ALL,
    ),
    "all_to_all_tiled": lambda L, y: L.psum(
        (L.tanh(L.all_to_all(y, "ep", 1, 0, tiled=True)) ** 3 * (1.0 + L.axis_index("ep")))[
            1:
        ].sum(),
        ALL,
    ),
    "all_to_all_untiled": lambda L, y: L.psum(
        (L.tanh(L.all_to_all(y[:2], "tp", 0, 0)) ** 3 * (1.0 + L.axis_index("tp")))[1:].sum(), ALL
    ),
    "all_to_all_tuple": lambda L, y: L.psum(
        (L.tanh(L.all_to_all(y, ("ep", "tp"), 1, 0, tiled=True)) ** 3)[1:5].sum()
        * (1.0 + L.axis_index("tp")),
        ALL,
    ),
    "ppermute": lambda L, y: L.psum(
        (L.tanh(L.ppermute(y, "tp", [(0, 1), (1, 0)])) ** 3 * (1.0 + L.axis_index("tp"))).sum(), ALL
    ),
    "ppermute_partial": lambda L, y: L.psum(
        (L.tanh(L.ppermute(y, "tp", [(0, 1)])) ** 3 * (1.0 + L.axis_index("tp"))).sum(), ALL
    ),
    "ppermute_tuple": lambda L, y: L.psum(
        (
            L.tanh(L.ppermute(y, ("dp", "tp"), [(0, 3), (3, 1), (1, 2)])) ** 3
            * (1.0 + L.axis_index("tp"))
        ).sum(),
        ALL,
    ),
    "pbroadcast": lambda L, y: L.psum(
        (L.tanh(L.pbroadcast(y, ("tp",), 1)) ** 3 * (1.0 + L.axis_index("tp"))).sum(), ALL
    ),
    "axis_size": lambda L, y: L.psum(L.tanh(y).sum(), ALL) * L.axis_size(("dp", "tp")),
}

IN = lambda S: (S(None, "tp"), S("dp", None))


def _pair(name):
    body = SCALAR[name]
    program = lambda L, w, x: body(L, x @ w)
    w, x = random(8, 16), random(8, 8)
    mine = ours(program, IN, lambda S: S())
    jaxs = theirs(program, IN, lambda S: S())
    return program, mine, jaxs, (w, x)


@pytest.mark.parametrize("name", SCALAR)
def test_value_and_outer_gradients(name):
    _, mine, jaxs, (w, x) = _pair(name)
    args = torch.from_numpy(w), torch.from_numpy(x)
    assert_same(mine(*args), jax.jit(jaxs)(w, x))
    want = jax.jit(jax.grad(jaxs, (0, 1)))(w, x)
    assert_same(torch.func.grad(mine, (0, 1))(*args), want)
    taped = [a.clone().requires_grad_() for a in args]
    mine(*taped).backward()
    assert_same([a.grad for a in taped], want)


@pytest.mark.parametrize("name", SCALAR)
def test_gradient_inside_the_program(name):
    body = SCALAR[name]
    w, x = random(8, 16), random(8, 8)
    out = lambda S: S(ALL)
    mine = shard_map(
        lambda w, x: torch.func.grad(lambda w: body(torch_side, x @ w))(w),
        MESH, IN(P), out(P), check=False,
    )  # fmt: skip
    jaxs = jax.shard_map(
        lambda w, x: jax.grad(lambda w: body(jax_side, x @ w))(w),
        mesh=JAX_MESH, in_specs=IN(PartitionSpec), out_specs=out(PartitionSpec), check_vma=False,
    )  # fmt: skip
    assert_same(mine(torch.from_numpy(w), torch.from_numpy(x)), jax.jit(jaxs)(w, x))


# gradients of these are compared above, and those of the same collectives without _tuple here
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name.endswith("_tuple") else ())
        for name in SCALAR
    ],
)
def test_forward_mode_and_second_order(name):
    _, mine, jaxs, (w, x) = _pair(name)
    v = np.cos(np.arange(w.size, dtype=np.float64)).reshape(w.shape)
    tw, tx, tv = map(torch.from_numpy, (w, x, v))
    v = jnp.asarray(v)
    jvp = jax.jit(lambda w: jax.jvp(lambda w: jaxs(w, x), (w,), (v,))[1])(w)
    assert_same(torch.func.jvp(lambda w: mine(w, tx), (tw,), (tv,))[1], jvp)
    hvp = jax.jit(lambda w: jax.grad(lambda w: (jax.grad(jaxs)(w, x) * v).sum())(w))(w)
    g = torch.func.grad(mine)
    assert_same(torch.func.grad(lambda w: (g(w, tx) * tv).sum())(tw), hvp, 1e-10)
    assert_same(torch.func.jvp(lambda w: g(w, tx), (tw,), (tv,))[1], hvp, 1e-10)


@pytest.mark.parametrize("name", SCALAR)
def test_second_order_inside_the_program(name):
    body = SCALAR[name]
    w, x = random(8, 16), random(8, 8)
    v = np.cos(np.arange(w.size, dtype=np.float64)).reshape(w.shape)
    ins = lambda S: (*IN(S), S(None, "tp"))

    def hvp(grad, L):
        def program(w, x, v):
            return grad(lambda w: (grad(lambda w: body(L, x @ w))(w) * v).sum())(w)

        return program

    mine = shard_map(hvp(torch.func.grad, torch_side), MESH, ins(P), P(ALL), check=False)
    jaxs = jax.shard_map(
        hvp(jax.grad, jax_side), mesh=JAX_MESH, in_specs=ins(PartitionSpec),
        out_specs=PartitionSpec(ALL), check_vma=False,
    )  # fmt: skip
    assert_same(mine(*map(torch.from_numpy, (w, x, v))), jax.jit(jaxs)(w, x, v), 1e-10)


@pytest.mark.parametrize("name", ["psum", "all_gather_tiled", "ppermute_partial", "pmean"])
def test_both_orders_of_vmap_and_grad(name):
    """Per-example gradients inside the program, and a batch of programs outside it."""
    body = SCALAR[name]
    w, x = random(8, 16), random(8, 8)
    tw, tx = torch.from_numpy(w), torch.from_numpy(x)

    def inner(vmap, grad, L):
        return lambda w, x: vmap(lambda row: grad(lambda w: body(L, row[None] @ w))(w))(x)

    mine = shard_map(
        inner(torch.func.vmap, torch.func.grad, torch_side), MESH, IN(P), P(ALL), check=False
    )
    jaxs = jax.shard_map(
        inner(jax.vmap, jax.grad, jax_side), mesh=JAX_MESH, in_specs=IN(PartitionSpec),
        out_specs=PartitionSpec(ALL), check_vma=False,
    )  # fmt: skip
    assert_same(mine(tw, tx), jax.jit(jaxs)(w, x))
    _, whole, jax_whole, _ = _pair(name)
    stack = np.stack([w, 2 * w, w - 1])
    want = jax.jit(jax.vmap(jax.grad(lambda w: jax_whole(w, x))))(stack)
    got = torch.func.vmap(torch.func.grad(lambda w: whole(w, tx)))(torch.from_numpy(stack))
    assert_same(got, want)
    total = torch.func.grad(lambda s: torch.func.vmap(lambda w: whole(w, tx))(s).sum())
    assert_same(total(torch.from_numpy(stack)), want)


# ---- values of programs with other types, shapes and specs

S3 = lambda S: S("dp", "tp")


def _index(L):
    return L.axis_index(("dp", "tp"))


VALUES = {
    # name: (program, arguments, in_specs, out_specs)
    "psum_int": (lambda L, x: L.psum(x, "tp"), lambda: [np.arange(16).reshape(4, 4)], S3, S3),
    "psum_bool": (lambda L, x: L.psum(x, "tp"), lambda: [random(4, 4) > 0], S3, S3),
    "psum_python_number": (
        lambda L, x: x * L.psum(3, ("dp", "tp")), lambda: [random(4, 4)], S3, S3,
    ),
    "psum_tree": (
        lambda L, x: L.psum({"a": x, "b": (x, 2 * x)}, "tp"), lambda: [random(4, 4)], S3, S3,
    ),
    "pmean_int": (lambda L, x: L.pmean(x, "tp"), lambda: [np.arange(16).reshape(4, 4)], S3, S3),
    "pmax_int": (lambda L, x: L.pmax(x, "tp"), lambda: [np.arange(16).reshape(4, 4)], S3, S3),
    "pmin_tuple": (lambda L, x: L.pmin(x, ("dp", "tp")), lambda: [random(4, 4)], S3, S3),
    "all_gather_bool": (
        lambda L, x: L.all_gather(x, "tp", tiled=True), lambda: [random(4, 4) > 0], S3,
        lambda S: S("dp"),
    ),
    "all_gather_middle_dim": (
        lambda L, x: L.all_gather(x, "tp", axis=1), lambda: [random(4, 4, 3)], S3,
        lambda S: S("dp"),
    ),
    "all_gather_tuple_order": (
        lambda L, x: L.all_gather(x, ("tp", "dp"), axis=2), lambda: [random(4, 4)], S3,
        lambda S: S(),
    ),
    "psum_scatter_int": (
        lambda L, x: L.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
        lambda: [np.arange(32).reshape(4, 8)], S3, S3,
    ),
    "psum_scatter_tuple_untiled": (
        lambda L, x: L.psum_scatter(x, ("dp", "tp"), scatter_dimension=1),
        lambda: [random(4, 8)], S3, lambda S: S(("dp", "tp")),
    ),
    "all_to_all_negative_dims": (
        lambda L, x: L.all_to_all(x, "tp", split_axis=2, concat_axis=0, tiled=True),
        lambda: [random(4, 4, 6)], S3, S3,
    ),
    "all_to_all_same_dim": (
        lambda L, x: L.all_to_all(x, "tp", 0, 0, tiled=True), lambda: [random(8, 4)], S3, S3,
    ),
    "all_to_all_untiled_moves_dim": (
        lambda L, x: L.all_to_all(x, "tp", 2, 0), lambda: [random(4, 4, 2)], S3,
        lambda S: S(None, "dp", "tp"),
    ),
    "all_to_all_int": (
        lambda L, x: L.all_to_all(x, "tp", 1, 0, tiled=True),
        lambda: [np.arange(32).reshape(4, 8)], S3, S3,
    ),
    "ppermute_ring": (
        lambda L, x: L.ppermute(x, "tp", [(i, (i + 1) % 2) for i in range(2)]),
        lambda: [random(4, 4)], S3, S3,
    ),
    "ppermute_nothing": (lambda L, x: L.ppermute(x, "tp", []), lambda: [random(4, 4)], S3, S3),
    "ppermute_int_partial": (
        lambda L, x: L.ppermute(x, "tp", [(1, 0)]), lambda: [np.arange(16).reshape(4, 4)], S3, S3,
    ),
    "axis_index_single": (lambda L, x: x * 0 + L.axis_index("tp"), lambda: [random(4, 4)], S3, S3),
    "axis_index_tuple": (lambda L, x: x * 0 + _index(L), lambda: [random(4, 4)], S3, S3),
    "axis_index_tuple_reversed": (
        lambda L, x: x * 0 + L.axis_index(("tp", "dp")), lambda: [random(4, 4)], S3, S3,
    ),
    "two_axes_on_one_dim": (
        lambda L, x: x * (1 + _index(L)), lambda: [random(8, 3)],
        lambda S: S(("dp", "tp")), lambda S: S(("dp", "tp")),
    ),
    "two_axes_minor_first": (
        lambda L, x: x * (1 + _index(L)), lambda: [random(8, 3)],
        lambda S: S(("tp", "dp")), lambda S: S(("tp", "dp")),
    ),
    "resharding_by_specs": (
        lambda L, x: L.all_to_all(x, "tp", 0, 1, tiled=True), lambda: [random(8, 8)],
        lambda S: S(None, "tp"), lambda S: S("tp", None),
    ),
    "prefix_specs": (
        lambda L, t: {"a": t["a"]["x"] + t["b"][0], "b": t["b"]},
        lambda: [{"a": {"x": random(4)}, "b": (random(4), random(4, 2))}],
        lambda S: ({"a": S("dp"), "b": S("dp")},), lambda S: S("dp"),
    ),
    "single_spec_for_all_arguments": (
        lambda L, x, y: L.psum(x * y, "dp"), lambda: [random(4), random(4)],
        lambda S: S("dp"), lambda S: S(),
    ),
    "zero_arguments": (
        lambda L: L.psum(1.0 * L.axis_index("tp"), "tp"), list, lambda S: (), lambda S: S(),
    ),
    "replicated_input_used_locally": (
        lambda L, w, x: x * w, lambda: [random(4), random(4, 4)], lambda S: (S(), S("dp")),
        lambda S: S("dp"),
    ),
    "scalar_outputs_stack_nothing": (
        lambda L, x: L.psum(x.sum(), ("dp", "tp")), lambda: [random(4, 4)], S3, lambda S: S(),
    ),
    "concatenate_replicated_along_axis": (
        lambda L, x: x, lambda: [random(4, 3)], lambda S: S(), lambda S: S(("dp", "tp")),
    ),
    "none_containers_in_values": (
        lambda L, t: {"a": t["a"], "n": None}, lambda: [{"a": random(4), "n": None}],
        lambda S: S("dp"), lambda S: S("dp"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_value(name):
    program, make, in_specs, out_specs = VALUES[name]
    args = make()
    want = jax.jit(theirs(program, in_specs, out_specs))(*args)
    got = ours(program, in_specs, out_specs)(*jax.tree.map(torch.from_numpy, args))
    assert_same(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        kind = "f" if a.is_floating_point() else "b" if a.dtype == torch.bool else "i"
        assert np.dtype(b.dtype).kind == kind


def test_size_one_axes_are_the_identity():
    def program(L, x):
        y = L.psum(L.all_gather(L.ppermute(x, "tp", [(0, 0)]), "tp", tiled=True), "tp")
        y = L.psum_scatter(L.all_to_all(y, "tp", 0, 1, tiled=True), "tp", tiled=True)
        return L.pmean(y * (1 + L.axis_index("tp")), "tp") * (1 + L.axis_index("dp"))

    x = random(4, 4)
    mesh = jax_mesh(dp=2, tp=1)
    want = jax.shard_map(
        lambda x: program(jax_side, x), mesh=mesh, in_specs=PartitionSpec("dp", "tp"),
        out_specs=PartitionSpec("dp", "tp"), check_vma=False,
    )(x)  # fmt: skip
    got = shard_map(
        lambda x: program(torch_side, x), Mesh(dp=2, tp=1), P("dp", "tp"), P("dp", "tp")
    )(torch.from_numpy(x))
    assert_same(got, want)


def test_closures_are_replicated_and_differentiable():
    w, x = random(4), random(8, 4)

    def outer(L, shard_map_, w, x):
        return shard_map_(lambda x: L.psum(L.tanh(x * w).sum(), "dp"), x)

    def mine(w):
        f = lambda body, x: shard_map(body, MESH, P("dp"), P(), check=False)(x)
        return outer(torch_side, f, w, torch.from_numpy(x))

    def jaxs(w):
        f = lambda body, x: jax.shard_map(
            body, mesh=JAX_MESH, in_specs=PartitionSpec("dp"), out_specs=PartitionSpec(),
            check_vma=False,
        )(x)  # fmt: skip
        return outer(jax_side, f, w, x)

    want = jax.jit(jax.grad(jaxs))(w)
    assert_same(torch.func.grad(mine)(torch.from_numpy(w)), want)
    taped = torch.from_numpy(w).requires_grad_()
    mine(taped).backward()
    assert_same(taped.grad, want)


# ---- errors: what JAX refuses, we refuse

ERRORS = {
    "indivisible": (lambda L, x: x, (5, 4), lambda S: S("dp"), lambda S: S("dp")),
    "indivisible_by_two_axes": (lambda L, x: x, (6,), lambda S: S(("dp", "tp")), lambda S: S()),
    "unknown_axis_in_in_specs": (lambda L, x: x, (4,), lambda S: S("nope"), lambda S: S()),
    "unknown_axis_in_out_specs": (lambda L, x: x, (4,), lambda S: S(), lambda S: S("nope")),
    "axis_twice_in_a_spec": (lambda L, x: x, (4, 4), lambda S: S("dp", "dp"), lambda S: S()),
    "spec_longer_than_rank": (lambda L, x: x, (4,), lambda S: S("dp", None, None), lambda S: S()),
    "out_spec_longer_than_rank": (
        lambda L, x: x.sum(), (4,), lambda S: S("dp"), lambda S: S("dp"),
    ),
    "unbound_axis": (lambda L, x: L.psum(x, "nope"), (4,), lambda S: S("dp"), lambda S: S()),
    "unbound_axis_index": (
        lambda L, x: x + L.axis_index("nope"), (4,), lambda S: S("dp"), lambda S: S("dp"),
    ),
    "too_many_in_specs": (lambda L, x: x, (4,), lambda S: (S("dp"), S()), lambda S: S()),
    "in_specs_of_another_structure": (
        lambda L, x: x, (4,), lambda S: ({"a": S("dp")},), lambda S: S(),
    ),
    "out_specs_of_another_structure": (
        lambda L, x: {"a": x}, (4,), lambda S: S("dp"), lambda S: {"b": S("dp")},
    ),
    "ppermute_duplicate_source": (
        lambda L, x: L.ppermute(x, "tp", [(0, 1), (0, 0)]), (4,), lambda S: S("dp"), lambda S: S("dp"),
    ),
    "ppermute_duplicate_target": (
        lambda L, x: L.ppermute(x, "tp", [(0, 1), (1, 1)]), (4,), lambda S: S("dp"), lambda S: S("dp"),
    ),
    "psum_scatter_indivisible": (
        lambda L, x: L.psum_scatter(x, "tp", tiled=True), (3, 4), lambda S: S(), lambda S: S(),
    ),
    "psum_scatter_untiled_size": (
        lambda L, x: L.psum_scatter(x, "tp"), (3, 4), lambda S: S(), lambda S: S(),
    ),
    "all_to_all_indivisible": (
        lambda L, x: L.all_to_all(x, "tp", 0, 1, tiled=True), (3, 4), lambda S: S(), lambda S: S(),
    ),
    "all_to_all_untiled_size": (
        lambda L, x: L.all_to_all(x, "tp", 0, 1), (4, 4), lambda S: S(), lambda S: S(),
    ),
    "all_gather_dim_out_of_range": (
        lambda L, x: L.all_gather(x, "tp", axis=7), (4, 4), lambda S: S(), lambda S: S(),
    ),
    "no_derivative_of_pmax": (
        lambda L, x: (torch.func.grad if L is torch_side else jax.grad)(
            lambda x: L.pmax(x, "tp").sum()
        )(x),
        (4,), lambda S: S("dp"), lambda S: S("dp"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_both_refuse(name):
    program, shape, in_specs, out_specs = ERRORS[name]
    x = random(*shape)
    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever JAX raises)
        jax.jit(theirs(program, in_specs, out_specs))(x)
    with pytest.raises((ValueError, TypeError), match=r"(?s)."):
        ours(program, in_specs, out_specs)(torch.from_numpy(x))
