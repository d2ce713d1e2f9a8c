"""The scale of the loss: Megatron-LM's rules, on every rank alike, eager and in programs."""

import math

import pytest
import torch

import functron as ft
from functron import Mesh, P, optim, shard_map, tree

RULES = optim.LossScale(initial=16.0, growth_interval=3, hysteresis=2, minimum=2.0)
OVERFLOWS = (1, 2, 3, 8, 9, 10, 11, 12, 13)
STEPS = 14
# by hand, of `DynamicGradScaler.update` in Megatron-LM, megatron/core/optimizer/grad_scaler.py:
# scale, growth tracker and hysteresis tracker after each step
BY_HAND = [
    (16, 1, 2),
    (16, 0, 1), (8, 0, 0), (4, 0, 0),
    (4, 1, 0), (4, 2, 0), (8, 0, 2), (8, 1, 2),
    (8, 0, 1), (4, 0, 0), (2, 0, 0), (2, 0, 0), (2, 0, 0), (2, 0, 0),
]  # fmt: skip
STUCK = [0] * 11 + [1, 2, 3]  # overflows of steps that began with the least


def grads(step: int) -> dict:
    value = {"a": torch.full((4,), 1.0 + step), "b": torch.full((2, 2), 2.0)}
    if step in OVERFLOWS:
        value["b"][1, 1] = float("inf" if step % 2 else "nan")
    return value


def params() -> dict:
    return {"a": torch.zeros(4), "b": torch.zeros(2, 2)}


def plain() -> dict:
    """The parameters after the steps without an overflow alone."""
    optimizer, values = optim.adamw(0.1), params()
    state = optimizer.init(values)
    for step in range(STEPS):
        if step not in OVERFLOWS:
            values, state = optimizer.step_(grads(step), state, values)
    return values


@pytest.mark.parametrize("how", ["eager", "pure", "traced"])
def test_it_falls_and_grows_as_megatrons(how):
    optimizer, values = optim.with_loss_scale(optim.adamw(0.1), RULES), params()
    state = optimizer.init(values)

    def pure(grads, state, values):
        updates, state = optimizer.update(grads, state, values)
        return optim.apply_updates(values, updates), state

    traced = ft.jit(optimizer.step_, backend="eager")
    step_ = {"eager": optimizer.step_, "pure": pure, "traced": traced}[how]
    for step, want in enumerate(BY_HAND):
        values, state = step_(grads(step), state, values)
        found = (state.scale, state.good_steps, state.hysteresis)
        assert tuple(map(float, found)) == want, f"step {step}"
        assert optim.loss_scale(state) is state.scale
        assert state.stuck == STUCK[step]
    torch.testing.assert_close(values, plain(), rtol=0 if how == "eager" else 1e-6, atol=0)


def test_a_scale_that_stays():
    rules = optim.LossScale(initial=8.0, growth_interval=0)
    optimizer, values = optim.with_loss_scale(optim.adamw(0.1), rules), params()
    state = optimizer.init(values)
    for step in range(STEPS):
        values, state = optimizer.step_(grads(step), state, values)
    assert state.scale == 8.0
    assert state.stuck == 6
    assert torch.equal(values["a"], plain()["a"])


@pytest.mark.parametrize("zero", [False, True])
def test_ranks_leave_out_the_same_steps(zero):
    """Whichever of them has what is not finite; the same state on all."""
    mesh, specs = Mesh(dp=2, tp=2), {"a": P("tp"), "b": P(None, "tp")}
    wide = {"a": P(("tp", "dp")), "b": P("dp", "tp")} if zero else specs
    inner = optim.zero(optim.adamw(0.1), specs, wide) if zero else optim.adamw(0.1)
    optimizer = optim.with_loss_scale(inner, RULES).bind(specs)

    def program(values, *several):
        state = optimizer.init(values)
        for each in several:
            values, state = optimizer.step_(each, state, values)
        return values, state

    out = (specs, optimizer.specs(specs))
    mapped = shard_map(program, mesh, (specs, *[wide] * STEPS), out, donate=0)
    values, state = mapped(params(), *map(grads, range(STEPS)))
    torch.testing.assert_close(values, plain(), rtol=1e-6, atol=0)
    assert (float(state.scale), int(state.good_steps), int(state.hysteresis)) == BY_HAND[-1]


def test_it_is_found_around_everything_or_not_at_all():
    inner = optim.with_loss_scale(optim.sgd(0.1), RULES)
    around = {
        "chain": lambda: optim.chain(optim.clip(1.0), inner),
        "with_fp32_masters": lambda: optim.with_fp32_masters(inner),
        "with_average": lambda: optim.with_average(inner, 0.9),
        "zero": lambda: optim.zero(inner, P(), P("dp")),
        "offload": lambda: optim.offload(inner),
        "apply_if_finite": lambda: optim.apply_if_finite(inner, 3),
        "with_loss_scale": lambda: optim.with_loss_scale(inner, RULES),
    }
    for name, make in around.items():
        with pytest.raises(ValueError, match="put with_loss_scale around it all") as caught:
            make()
        assert name in str(caught.value)
    mask = {"a": True, "b": False}
    both = optim.where(mask, inner, optim.sgd(1.0))
    state = both.init(params())
    assert isinstance(state.chosen, optim.LossScaleState)
    found = optim.loss_scale(("other state", {"inner": state}))
    assert found == 16.0
    assert optim.loss_scale(optim.chain(optim.clip(1.0), optim.adamw(0.1)).init(params())) is None
    assert tree.leaves(both.bind(P()).specs({"a": P(), "b": P()}))
    with pytest.raises(ValueError, match="let one do it for all"):
        optim.where(mask, inner, inner)


def test_gradients_without_the_scale():
    """Those in low precision in float32, where they are not lost; alone they stay."""
    grads = {"a": torch.tensor([2.0**-10, 6.0]).half(), "b": torch.tensor([3.0]).double()}
    found = optim.unscale(tree.map(torch.clone, grads), torch.tensor(2.0**16))
    want = {"a": torch.tensor([2.0**-26, 6 / 2**16]), "b": torch.tensor([3 / 2**16]).double()}
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    assert optim.unscale(grads, None) is grads


def test_what_is_impossible_is_told_at_once():
    rules = optim.LossScale(initial=3.0, growth_interval=-1, hysteresis=0, minimum=4.0, patience=0)
    config = optim.OptimizerConfig(loss_scale=rules, skip_nonfinite=2)
    found = {problem.path: str(problem) for problem in optim.optimizer_problems(config)}
    scale = [f"optimizer.loss_scale.{x}" for x in ("initial", "growth_interval", "hysteresis")]
    assert set(found) == {*scale, "optimizer.loss_scale.patience", "optimizer.skip_nonfinite"}
    with pytest.raises(ValueError, match="wanted a power of two; fix: use 65536"):
        optim.with_loss_scale(optim.sgd(0.1), optim.LossScale())


def test_a_limit_leaves_out_larger_gradients_alone():
    """Where the limit is above the norm, the steps are those of what it protects."""
    params = {"w": torch.ones(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    rng = torch.Generator().manual_seed(0)
    grads = [
        tree.map(lambda p: torch.randn(p.shape, generator=rng, dtype=p.dtype), params)
        for _ in range(4)
    ]
    grads[2] = tree.map(lambda g: 100 * g, grads[2])
    plain = optim.chain(optim.clip_by_global_norm(50.0), optim.adam(1e-2))
    limited = optim.with_limit(plain)
    state, other, ours, theirs = limited.init(params), plain.init(params), params, params
    for index, each in enumerate(grads):
        optim.set_limit_(state, 20.0)
        before = state
        updates, state = limited.update(each, state, ours)
        ours = optim.apply_updates(ours, updates)
        if index == 2:
            assert int(state.left_out) == int(before.left_out) + 1
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    tree.leaves(state.inner_state), tree.leaves(before.inner_state), strict=True
                )
            )
        else:
            updates, other = plain.update(each, other, theirs)
            theirs = optim.apply_updates(theirs, updates)
        assert all(
            torch.equal(a, b) for a, b in zip(tree.leaves(ours), tree.leaves(theirs), strict=True)
        )
    taken, end = limited.step_(tree.map(torch.clone, grads[2]), state, tree.map(torch.clone, ours))
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(taken), tree.leaves(ours), strict=True)
    )
    assert isinstance(end, optim.LimitState)
    assert int(end.left_out) == 2


def test_norms_that_are_not_finite_pass_a_limit_to_what_is_inside():
    params = {"w": torch.ones(3)}
    inner = optim.apply_if_finite(optim.sgd(0.1), 5)
    limited = optim.with_limit(inner)
    state = limited.init(params)
    optim.set_limit_(state, 1.0)
    updates, state = limited.update({"w": torch.tensor([1.0, math.nan, 0.0])}, state, params)
    assert tree.leaves(updates)[0].tolist() == [0, 0, 0]
    assert (int(state.left_out), int(state.inner_state.total_notfinite)) == (0, 1)


@pytest.mark.parametrize("skip", [True, False, torch.tensor(True), torch.tensor(False)], ids=str)
def test_an_update_is_left_out_on_demand_but_schedules_go_on(skip):
    optimizer = optim.adamw(optim.linear(1e-2, 10))
    params = {"w": torch.ones(3, dtype=torch.float64)}
    grads = {"w": torch.full((3,), 0.5, dtype=torch.float64)}
    whole, after = optimizer.update(grads, optimizer.init(params), params)
    wanted = params if skip else optim.apply_updates(params, whole)

    def step(params):
        step_ = optim.step_unless(skip, optimizer)
        return step_(tree.map(torch.clone, grads), optimizer.init(params), params)

    chosen = isinstance(skip, torch.Tensor)  # as under transforms, where nothing is overwritten
    mine = tree.map(torch.clone, params)
    got, state = torch.func.vmap(step)(tree.map(lambda x: x[None], mine)) if chosen else step(mine)
    got = tree.map(lambda x: x[0], got) if chosen else got
    torch.testing.assert_close(got, wanted)
    adam, _, schedule = state
    assert int(adam.count.sum()) == (0 if skip else 1)
    assert int(schedule.count.sum()) == int(after[2].count) == 1


def test_metrics_have_the_scale_where_there_is_one():
    params = {"w": torch.ones(3)}
    scaled = optim.with_loss_scale(optim.sgd(0.1), optim.LossScale(4.0))
    found = optim.scaling_metrics(scaled.init(params))
    assert {name: float(value) for name, value in found.items()} == {"loss_scale": 4, "stuck": 0}
    assert optim.scaling_metrics(optim.sgd(0.1).init(params)) == {}
    assert optim.loss_scale(optim.sgd(0.1).init(params)) is None
