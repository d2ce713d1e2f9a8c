"""Configs: every problem at once, and the optimizers that they stand for."""

import pytest
import torch

from functron import optim
from functron.spmd import P


def step(optimizer):
    params = {"w": torch.full((4,), 2.0), "norm": torch.full((4,), 2.0)}
    grads = {"w": torch.arange(4.0), "norm": torch.ones(4)}
    return optimizer.step_(grads, optimizer.init(params), params)[0]


MASK = {"w": True, "norm": False}


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        (
            optim.OptimizerConfig(),
            optim.chain(
                optim.clip_by_global_norm(1.0), optim.adamw(0.1, 0.9, 0.95, 1e-8, 0.1, MASK)
            ),
        ),
        (optim.OptimizerConfig(clip_norm=0), optim.adamw(0.1, 0.9, 0.95, 1e-8, 0.1, MASK)),
        (
            optim.OptimizerConfig("adam", 0.8, 0.9, 1e-3, clip_norm=0),
            optim.adam(0.1, 0.8, 0.9, 1e-3),
        ),
        (optim.OptimizerConfig("sgd", clip_norm=0, nesterov=True), optim.sgd(0.1, 0.9, True)),
        (optim.OptimizerConfig("sgd", clip_norm=0, momentum=0), optim.sgd(0.1)),
    ],
)
def test_configs_make_what_they_say(config, meant):
    got, want = step(optim.make_optimizer(config, 0.1)), step(meant)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)


def test_masters_and_specs_are_wired():
    config = optim.OptimizerConfig(fp32_masters=True)
    optimizer = optim.make_optimizer(config, 0.1, specs={"w": P("tp"), "norm": P()})
    state = optimizer.init({"w": torch.ones(2, dtype=torch.bfloat16)})
    assert state[1].masters["w"].dtype == torch.float32


def test_every_problem_of_an_optimizer_is_named():
    config = optim.OptimizerConfig("adanw", b1=1.0, eps=-1.0, clip_norm=float("nan"))
    with pytest.raises(ValueError, match="the optimizer cannot be built") as caught:
        optim.make_optimizer(config, 0.1)
    message = str(caught.value)
    assert "optimizer.name: got 'adanw'; wanted an optimizer; fix: did you mean 'adamw'?" in message
    for field in ("b1: got 1.0", "eps: got -1.0", "clip_norm: got nan"):
        assert f"optimizer.{field}" in message
    nesterov = optim.OptimizerConfig("sgd", momentum=0, nesterov=True)
    assert [p.path for p in optim.optimizer_problems(nesterov, "opt")] == ["opt.nesterov"]


def test_every_problem_of_a_schedule_is_named():
    config = optim.ScheduleConfig("wsd", -1.0, 10, 5, decay="exp")
    with pytest.raises(ValueError, match="schedule cannot be built") as caught:
        optim.make_schedule(config)
    assert "schedule.peak: got -1.0" in str(caught.value)
    assert "schedule.decay: got 'exp'" in str(caught.value)
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        optim.make_schedule(optim.ScheduleConfig("cosin"))


def test_fields_that_a_schedule_does_not_use_are_not_judged():
    assert not optim.schedule_problems(optim.ScheduleConfig("constant", total_steps=0, decay="x"))
    assert optim.schedule_problems(optim.ScheduleConfig("linear", total_steps=0))
