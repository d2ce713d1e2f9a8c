"""The protocol: seven functions and a flag, extra arguments, and an optimizer as a user would write one."""

import inspect

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, optim, random, tree
from functron.spmd.spec import is_spec, spec_axes

GRADS = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}  # norms 5, 12 and 13


def copied(value=GRADS):
    return tree.map(torch.clone, value)


def test_there_are_seven_functions_and_a_flag():
    wanted = ("init", "update", "step_", "specs", "grad_specs", "bind", "elementwise", "widens")
    assert optim.GradientTransformation._fields == wanted
    for made in (optim.scale(0.1), optim.adamw(0.1), optim.chain(), optim.with_limit(optim.sgd(1))):
        assert isinstance(made.bind(P()), optim.GradientTransformation)
        assert isinstance(made.bind(P(), 1), optim.GradientTransformation)
    alone = optim.scale(0.1)
    assert alone.bind(P("tp")) is alone


def by_value(seen):
    """Steps by Polyak: the loss over the squared norm of the gradients."""

    def update(updates, state, params=None, *, value):
        seen.append(float(value))
        squares = sum(u.square().sum() for u in tree.leaves(updates))
        return tree.map(lambda u: -value * u / squares, updates), state

    return optim.transformation(lambda params: (), update, lambda param_specs: ())


def all_of_them(seen):
    def update(updates, state, params=None, **extra):
        seen.append(sorted(extra))
        return updates, state

    return optim.transformation(lambda params: (), update, lambda param_specs: ())


WRAPPERS = {
    "chain": lambda t: optim.chain(optim.identity(), t, optim.identity()),
    "only": lambda t: optim.only(t, True),
    "where": lambda t: optim.where({"a": True, "b": True}, t, optim.sgd(1.0)),
    "finite": lambda t: optim.apply_if_finite(t, 2),
    "scaled": lambda t: optim.with_loss_scale(t, optim.LossScale(initial=2.0)),
    "limit": optim.with_limit,
    "average": lambda t: optim.with_average(t, 0.9),
    "masters": optim.with_fp32_masters,
    "stochastic": optim.with_stochastic_rounding,
    "offload": optim.offload,
    "zero": lambda t: optim.zero(t._replace(elementwise=True), P(), P()),
    "injected": lambda t: optim.inject_hyperparams(lambda a: optim.chain(t, optim.scale(a)))(1.0),
}


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_extra_arguments_reach_whoever_names_them(name):
    seen = []
    optimizer = WRAPPERS[name](by_value(seen))
    state, params = optimizer.init(GRADS), copied()
    updates, state = optimizer.update(copied(), state, params, value=torch.tensor(16.9))
    want = tree.map(lambda g: -0.1 * g, GRADS)  # 16.9 / 169
    torch.testing.assert_close(updates, want)
    params, _ = optimizer.step_(copied(), state, params, value=torch.tensor(16.9), other=1)
    torch.testing.assert_close(params, tree.map(lambda g: 0.9 * g, GRADS))
    assert seen == [pytest.approx(16.9)] * 2
    with pytest.raises(TypeError, match="value"):
        optimizer.update(copied(), optimizer.init(GRADS), params)


def test_a_norm_is_for_the_first_of_a_chain_and_all_else_for_each():
    seen = []
    optimizer = optim.chain(all_of_them(seen), optim.scale(2.0), all_of_them(seen))
    optimizer.update(GRADS, optimizer.init(GRADS), norm=torch.tensor(13.0), value=1.0)
    assert seen == [["donated", "norm", "value"], ["donated", "value"]]


def clipped(norm, wrap=lambda t: t, grads=GRADS):
    optimizer = wrap(optim.clip_by_global_norm(1.0))
    return optimizer.update(grads, optimizer.init(grads), norm=norm)[0]["a"][0].item()


def test_a_norm_is_taken_for_that_of_the_very_updates_alone():
    """Wrong norms show which one was used: 3 over it is the first element."""
    wrong, a = torch.tensor(30.0), {"a": GRADS["a"], "b": None}
    first = lambda t: optim.where({"a": True, "b": False}, t, optim.identity())
    assert clipped(wrong) == pytest.approx(0.1)  # a plain tensor is that of all that is given
    assert clipped(optim.Norm(wrong, GRADS)) == pytest.approx(0.1)
    assert clipped(optim.Norm(wrong, copied())) == pytest.approx(3 / 13)
    assert clipped(optim.Norm(wrong, a)) == pytest.approx(3 / 13)
    for wrap in (first, lambda t: optim.only(t, {"a": True, "b": False})):
        assert clipped(optim.Norm(wrong, a), wrap) == pytest.approx(0.1)
        assert clipped(optim.Norm(wrong, GRADS), wrap) == pytest.approx(3 / 5)
        assert clipped(wrong, wrap) == pytest.approx(3 / 5)
    second = lambda t: optim.chain(optim.identity(), t)
    assert clipped(optim.Norm(wrong, GRADS), second) == pytest.approx(3 / 13)


def test_a_limit_goes_by_the_norm_that_is_given_and_by_what_counts():
    optimizer = optim.with_limit(optim.sgd(1.0), of={"a": True, "b": False})
    for norm, goes in ((None, True), (optim.Norm(torch.tensor(7.0), {"a": GRADS["a"]}), False)):
        state = optimizer.init(GRADS)
        optim.set_limit_(state, 6.0)  # 5 is below it, and the norm of all above
        extra = {} if norm is None else {"norm": norm}
        params, state = optimizer.step_(GRADS | copied({"b": GRADS["b"]}), state, copied(), **extra)
        assert bool((params["b"] == 0).all()) is goes
        assert int(state.left_out) == (not goes)


def test_what_is_not_given_up_stays():
    for optimizer in (
        optim.chain(optim.clip_by_global_norm(1.0), optim.lion(0.1), optim.scale(2.0)),
        optim.chain(
            optim.trace(0.9), optim.scale(0.5), optim.scale_by_learning_rate(lambda n: 1.0)
        ),
    ):
        grads, state = copied(), optimizer.init(GRADS)
        before = tree.map(torch.clone, state)
        pure, kept = optimizer.update(grads, state, GRADS)
        torch.testing.assert_close((grads, state), (GRADS, before), rtol=0, atol=0)
        donated, after = optimizer.update(grads, state, GRADS, donated=True)
        torch.testing.assert_close((donated, after), (pure, kept), rtol=1e-6, atol=1e-7)


# a whole optimizer in one file, by its user: normalised momentum, on any mesh
def scale_by_unit(specs=None):
    def unit(m, spec):
        return m / lax.psum(m.square().sum(), tuple(spec_axes(spec))).sqrt()

    def update(updates, state, params=None):
        momentum = tree.map(lambda m, g: 0.9 * m + g, state, updates)
        flat = tree.broadcast_prefix(P() if specs is None else specs, updates, is_leaf=is_spec)
        new = [unit(*row) for row in zip(tree.leaves(momentum), flat, strict=True)]
        return tree.unflatten(tree.structure(updates), new), momentum

    zeros = lambda params: tree.map(torch.zeros_like, params)
    return optim.transformation(zeros, update, lambda param_specs: param_specs, bind=scale_by_unit)


def test_an_optimizer_of_one_s_own():
    defs = {"w": ft.ParamDef((4, 6), (None, None), ft.spmd.params.Normal(0.5), torch.float64)}
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), scale_by_unit(), optim.scale(-0.1))
    data = {"x": torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)}

    def trained(mesh, specs):
        loss = lambda p, batch, key: lax.psum((batch["x"] @ p["w"]).square().sum(), ("dp", "tp"))
        made = ft.mean_gradients(loss, lambda batch: 8)
        step = ft.make_step(made, optimizer, mesh, specs, batch_specs=P("dp"))
        state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)
        for _ in range(3):
            state, _ = step(state, data)
        return state.params["w"]

    w = ft.init_params(random.split(random.key(0))[0], defs)["w"].clone()
    momentum = torch.zeros_like(w)
    for _ in range(3):
        g = 2 * data["x"].T @ (data["x"] @ w) / 8
        momentum = 0.9 * momentum + g / max(g.norm(), 1)
        w = w - 0.1 * momentum / momentum.norm()
    for mesh, spec in ((Mesh(), P()), (Mesh(dp=2, tp=2), P(None, "tp"))):
        torch.testing.assert_close(trained(mesh, {"w": spec}), w, rtol=1e-12, atol=1e-12)
    assert "norm" not in inspect.signature(scale_by_unit().update).parameters


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
def test_a_norm_is_not_that_of_gradients_that_were_edited(mesh):
    """Whether a step measures the norm does not change its update."""

    def shrink(inner):
        def update(updates, state, params=None, **extra):
            in_place = extra.get("donated")
            small = tree.map(lambda u: u.mul_(0.01) if in_place else u * 0.01, updates)
            return inner.update(small, state, params, **extra)

        bind = lambda specs, copies: shrink(inner.bind(specs, copies))
        return optim.transformation(inner.init, update, inner.specs, bind=bind)

    optimizer = optim.chain(shrink(optim.clip_by_global_norm(1.0)), optim.sgd(1.0))
    defs = {"w": ft.ParamDef((3,), (None,), ft.spmd.params.ones, torch.float64)}
    loss = lambda p, batch, key: lax.psum((batch @ p["w"]).square().sum(), "dp")
    g = ft.mean_gradients(loss, lambda batch: lax.psum(len(batch), "dp"))
    data, found = torch.arange(12.0, dtype=torch.float64).view(4, 3), []
    for metrics in ((), (ft.grad_norm,)):
        step = ft.make_step(g, optimizer, mesh, {"w": P()}, metrics=metrics)
        state = ft.init_state(random.key(0), defs, {"w": P()}, optimizer, mesh)
        found.append(step(state, data)[0].params["w"])
    torch.testing.assert_close(*found)
    small = 0.02 * data.T @ (data @ torch.ones(3, dtype=torch.float64)) / 4
    torch.testing.assert_close(found[0], 1 - small / small.norm().clamp(min=1))


def test_a_state_keeps_its_kinds_and_structure():
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    zero = lambda p: {"n": torch.zeros((), dtype=torch.int64)}
    half = lambda u, s, p=None: (u, {"n": s["n"] + 0.5})
    more = lambda u, s, p=None: (u, {**s, "m": s["n"]})
    for update, text in ((half, "torch.float32 in place of torch.int64"), (more, "got 2 leaves")):
        made = optim.transformation(zero, update, lambda specs: {"n": P()}, elementwise=True)
        with pytest.raises(ValueError, match=text):
            made.update(grads, made.init(params), params)
