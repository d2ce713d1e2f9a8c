"""Values inside a function by name: what a hand-written dense model computes, under everything."""

from __future__ import annotations

import functools

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, policies, tree

LAYERS, BATCH, WIDTH, HIDDEN = 3, 4, 6, 8


def weights():
    made = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=made, dtype=torch.float64) / 2

    blocks = {"up": draw(LAYERS, WIDTH, HIDDEN), "down": draw(LAYERS, HIDDEN, WIDTH)}
    return {"first": draw(WIDTH, WIDTH), "blocks": blocks}, draw(BATCH, WIDTH)


SPECS = {"first": P(), "blocks": {"up": P(None, None, "tp"), "down": P(None, "tp", None)}}
GIVEN = {"first/out": P("dp"), "mlp/hidden": P("dp", "tp"), "mlp/out": P("dp"), "sum": P()}


def model(remat=None):
    """A residual network whose hidden features tp splits, with names of all kinds."""

    def block(x, w):
        with ft.named_scope("mlp"):
            hidden = ft.checkpoint_name(torch.tanh(x @ w["up"]), "hidden")
            y = ft.checkpoint_name(lax.psum(hidden @ w["down"], "tp"), "out")
        ft.checkpoint_name(lax.psum(x.sum(), "dp"), "sum")
        return x + y, None

    policy = {"full": policies.nothing, "named": policies.names("hidden"), "dots": policies.dots}
    inner = block if remat is None else ft.remat(block, policy=policy[remat])

    def forward(w, x):
        with ft.named_scope("first"):
            x = ft.checkpoint_name(x @ w["first"], "out")
        with ft.named_scope("blocks"):
            x, _ = ft.scan(inner, x, w["blocks"])
        return x

    return forward


def dense(w, x, replaced=lambda name, value: value):
    """Every value, in the order of the program, and the result."""
    found = {}

    def named(name, value):
        found[name] = replaced(name, value)
        return found[name]

    x = named("first/out", x @ w["first"])
    for i in range(LAYERS):
        hidden = named(f"blocks/{i}/mlp/hidden", torch.tanh(x @ w["blocks"]["up"][i]))
        y = named(f"blocks/{i}/mlp/out", hidden @ w["blocks"]["down"][i])
        named(f"blocks/{i}/sum", x.sum())
        x = x + y
    return x, found


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12)


def mapped(mesh, remat=None):
    return ft.shard_map(model(remat), mesh, (SPECS, P("dp")), P("dp"))


MESHES = [Mesh(dp=2), Mesh(tp=2), Mesh(dp=2, tp=2)]
REMATS = [None, "full", "named", "dots"]


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("life", ["eager", "traced", "compiled"])
@pytest.mark.pairwise
def test_values_of_ranks_are_those_of_a_dense_model(mesh, remat, life):
    w, x = weights()
    f = ft.capture(mapped(mesh, remat), "*", specs=GIVEN)
    if life == "traced":
        f = ft.trace(f)(w, x)
        assert "scan" in str(f)  # of any length
    f = ft.jit(f, backend="eager") if life == "compiled" else f
    out, values = f(w, x)
    wanted, found = dense(w, x)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    close(values, found)
    if life == "eager":
        assert [*values] == [*found]


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("mesh", [None, *MESHES], ids=str)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.pairwise
def test_gradients_flow_through_captured_and_replaced_values(mesh, remat, traced):
    """Of a loss of the result and of what is captured, with respect to what is put in, too."""
    w, x = weights()
    scale = torch.tensor(0.7, dtype=torch.float64)

    def change(scale, name, value):
        return value.tanh() * scale if name == "blocks/1/mlp/out" else value

    def loss(both, x):
        w, scale = both
        put = {"blocks/1/*/out": lambda value, name: change(scale, name, value)}
        f = model(remat) if mesh is None else mapped(mesh, remat)
        specs = {} if mesh is None else {"specs": {"hidden": P("dp", "tp"), "out": P("dp")}}
        f = ft.capture(ft.intervene(f, put), "mlp/hidden", "mlp/out", **specs)
        out, values = f(w, x)
        return out.square().sum() + sum((v * v.detach()).sum() for v in values.values())

    def wanted(both, x):
        w, scale = both
        out, values = dense(w, x, functools.partial(change, scale))
        kept = [v for name, v in values.items() if "/mlp/" in name]
        return out.square().sum() + sum((v * v.detach()).sum() for v in kept)

    grads = torch.func.grad(wanted)((w, scale), x)
    if traced and mesh is None:
        got = ft.trace(ft.grad(loss))((w, scale), x)((w, scale), x)
    else:
        got = (torch.func.grad if traced else ft.grad)(loss)((w, scale), x)
    for a, b in zip(tree.leaves(got), tree.leaves(grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.pairwise
def test_a_gradient_inside_returns_what_its_loss_names(mesh, remat):
    """`ft.grad` runs on a tape of its own, whose values are handed on; microbatches are numbered."""
    w, x = weights()

    def program(w, x):
        def loss(w, x):
            return lax.psum(model(remat)(w, x).square().sum(), "dp")

        both = ft.accumulate(ft.value_and_grad(loss), 2)
        value, grads = both(w, x)
        return value, ft.sync_gradients(grads, SPECS)

    f = ft.shard_map(program, mesh, (SPECS, P("dp")), (P(), SPECS))
    (value, grads), found = ft.capture(f, "mlp/hidden", specs={"*": P("dp", "tp")})(w, x)
    wanted = torch.func.grad_and_value(lambda w: dense(w, x)[0].square().sum())(w)
    torch.testing.assert_close(value, wanted[1], rtol=1e-12, atol=1e-12)
    for a, b in zip(tree.leaves(grads), tree.leaves(wanted[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    ranks = mesh["dp"]
    own = torch.arange(BATCH).view(ranks, -1)  # microbatch m: samples m, m + 2, ... of each rank
    for m in range(2):
        _, values = dense(w, x[own[:, m::2].flatten()])
        for i in range(LAYERS):
            name = f"blocks/{i}/mlp/hidden"
            torch.testing.assert_close(
                found[f"microbatches/{m}/{name}"], values[name], rtol=1e-12, atol=1e-12
            )
    assert len(found) == 2 * LAYERS
    traced, again = ft.trace(ft.capture(f, "mlp/hidden", specs={"*": P("dp", "tp")}))(w, x)(w, x)
    close(again, found)
    torch.testing.assert_close(traced[0], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("remat", REMATS)
def test_transforms_around_and_inside(remat):
    """vmap's results have its dim first, also of a vmap or a gradient that the function calls."""
    w, x = weights()
    f, samples = model(remat), x[:, None]
    _, each = zip(*(dense(w, sample) for sample in samples), strict=True)
    wanted = {name: torch.stack([values[name] for values in each]) for name in each[0]}

    around = torch.func.vmap(ft.capture(f, "*"), in_dims=(None, 0))
    close(around(w, samples)[1], wanted)
    inside = ft.capture(torch.func.vmap(f, in_dims=(None, 0)), "*")
    close(inside(w, samples)[1], wanted)

    def per_sample(w, x):
        return torch.func.vmap(torch.func.grad(lambda w, x: f(w, x).sum()), (None, 0))(w, x)

    grads, values = ft.capture(per_sample, "*")(w, samples)
    close(values, wanted)
    assert grads["first"].shape == (BATCH, WIDTH, WIDTH)
    nested = torch.func.vmap(ft.capture(torch.func.vmap(f, (None, 0)), "*"), (None, 0))
    pairs = samples.unflatten(0, (2, 2))
    close(nested(w, pairs)[1], {name: v.unflatten(0, (2, 2)) for name, v in wanted.items()})
    nothing_leaks = torch.stack([v.flatten()[0] for v in values.values()]) + 1
    assert nothing_leaks.isfinite().all()


def test_a_value_that_no_row_changes_has_vmaps_dim_too():
    def f(x):
        ft.checkpoint_name(torch.ones(2, dtype=torch.float64), "same")
        return x

    _, values = ft.capture(torch.func.vmap(f), "same")(torch.zeros(3))
    assert values["same"].shape == (3, 2)
    with torch.no_grad():
        _, jacobian = ft.capture(torch.func.jacfwd(lambda x: f(x.sin())), "same")(torch.zeros(3))
    assert jacobian["same"].shape == (3, 2) or jacobian["same"].shape == (2,)


def test_the_nearest_capture_sees_a_value_before_what_is_around_it():
    w, x = weights()
    name, zero = "blocks/0/mlp/out", {"blocks/0/mlp/out": lambda value, name: 0 * value}
    plain = dense(w, x)[1][name]
    inner, after = ft.capture(ft.intervene(model(), zero), name)(w, x)
    assert not after[name].any()
    outer, before = ft.intervene(ft.capture(model(), name), zero)(w, x)
    torch.testing.assert_close(before[name], plain)
    torch.testing.assert_close(inner, outer)
    (_, first), second = ft.capture(ft.capture(mapped(MESHES[1]), "sum"), name)(w, x)
    assert [*first] == [f"blocks/{i}/sum" for i in range(LAYERS)]
    assert [*second] == [name]
    seen = []
    ft.intervene(model(), {"out": lambda value, name: seen.append(name) or value})(w, x)
    assert seen == ["first/out", *(f"blocks/{i}/mlp/out" for i in range(LAYERS))]


def test_what_cannot_be_captured_is_refused_with_the_fix():
    w, x = weights()
    with pytest.raises(
        ValueError, match=r"blocks/\*/mlp/hiden: .*did you mean 'blocks/.*/mlp/hidden'"
    ):
        ft.capture(model(), "blocks/*/mlp/hiden", "out")(w, x)
    consumed = ft.shard_map(model(), MESHES[2], (SPECS, P("dp")), P("dp"), donate=1)
    with pytest.raises(ValueError, match="gives no value such a name"):
        ft.intervene(consumed, {"blocks/7/*": lambda value, name: value})(w, x)
    assert x.isfinite().all()  # nothing was run
    with pytest.raises(
        ValueError, match=r"blocks/0/mlp/hidden: .*varies over 'dp', 'tp'.*specs=\{"
    ):
        ft.capture(mapped(MESHES[2]), "hidden")(w, x)
    with pytest.raises(ValueError, match=r"varies over 'tp', with spec P\('dp'"):
        ft.capture(mapped(MESHES[2]), "hidden", specs={"hidden": P("dp")})(w, x)
    with pytest.raises(ValueError, match=r"specs=...\): .*"):
        ft.capture(mapped(MESHES[0]), "first/out", specs={"none": P("dp")})(w, x)
    with pytest.raises(ValueError, match="names several values"):
        ft.capture(lambda w, x: model()(w, model()(w, x)), "first/out")(w, x)
    with pytest.raises(ValueError, match="the function that shard_map returned"):
        ft.capture(lambda w, x: mapped(MESHES[0])(w, x), "sum")(w, x)
    with pytest.raises(ValueError, match=r"returned \(4, 5\)"):
        ft.intervene(model(), {"first/out": lambda value, name: value[:, :5]})(w, x)
    with pytest.raises(TypeError, match=r"ft\.jit\(ft\.capture"):
        ft.capture(ft.jit(model(), backend="eager"), "out")(w, x)
    with pytest.raises(ValueError, match="got no patterns"):
        ft.capture(model())
    with pytest.raises(TypeError, match="a function of a value and its name"):
        ft.intervene(model(), {"out": x})


def test_a_custom_backward_is_not_looked_into():
    def square(x):
        return ft.checkpoint_name(x * x, "inside")

    f = ft.custom_vjp(square, lambda x: (square(x), x), lambda x, ct: (2 * x * ct,))
    x = torch.ones(2, requires_grad=True)
    out, values = ft.capture(lambda x: ft.checkpoint_name(f(x).sum(), "sum"), "*")(x)
    assert [*values] == ["sum"]
    assert out == 2


@pytest.mark.parametrize("remat", ["full", "named"])
def test_a_partitioned_function_is_captured_inside(remat):
    """`ft.partition` keeps rematerialised and differentiated functions whole."""
    w, x = weights()

    def gradients(w, x):
        return ft.value_and_grad(lambda w, x: model(remat)(w, x).square().sum())(w, x)

    def program(w, x):
        return ft.capture(gradients, "*")(w, x)

    f = ft.partition(program, Mesh(dp=2), in_specs=(P(), P("dp")), out_specs=P())
    (value, grads), values = f(w, x)
    close(values, dense(w, x)[1])
    wanted = torch.func.grad_and_value(lambda w: dense(w, x)[0].square().sum())(w)
    torch.testing.assert_close(value, wanted[1], rtol=1e-12, atol=1e-12)
    for a, b in zip(tree.leaves(grads), tree.leaves(wanted[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_program_that_needs_numbers_is_explained():
    def f(x):
        return ft.checkpoint_name(x, "x") if x.sum() > 0 else x

    mapped = ft.shard_map(f, Mesh(dp=2), P("dp"), P("dp"))
    with pytest.raises(ValueError, match="asks for the number in a tensor"):
        ft.capture(mapped, "x")(torch.ones(2))
