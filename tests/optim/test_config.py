"""Configs: every problem at once, and the optimizers that they stand for."""

from dataclasses import replace

import pytest
import torch

from functron import optim, tree
from functron.spmd import Mesh, P
from functron.spmd.params import Normal, ParamDef


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
                optim.clip_by_global_norm(1.0),
                optim.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=MASK),
            ),
        ),
        (
            optim.OptimizerConfig(clip_norm=0),
            optim.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=MASK),
        ),
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


def test_a_schedule_ends_at_a_fraction_of_its_peak_and_never_above_it():
    for peak in (2e-3, 1e-5):
        config = optim.ScheduleConfig("cosine", peak, total_steps=10, end_fraction=0.05)
        assert float(optim.make_schedule(config)(10)) == pytest.approx(0.05 * peak, rel=1e-6)
    assert float(optim.make_schedule(replace(config, end=4e-6))(10)) == pytest.approx(4e-6)
    for name in ("linear", "cosine", "exponential", "polynomial", "wsd", "inverse_square_root"):
        above = optim.ScheduleConfig(name, 1e-5, end=1e-4, init=1e-3)
        found = {p.path: (p.got, p.wanted) for p in optim.schedule_problems(above, "lr")}
        wanted = "at most the peak, 1e-05"
        assert found == {"lr.end": ("0.0001", wanted), "lr.init": ("0.001", wanted)}
    above = optim.ScheduleConfig(end_fraction=1.5)
    assert [p.path for p in optim.schedule_problems(above)] == ["schedule.end_fraction"]


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "adam_mini", "muon", "soap"])
def test_weight_decay_that_increases_is_that_of_each_step(name):
    """Of the update with count n, the decay is the schedule's at n, in float32."""
    config = optim.OptimizerConfig(
        name, start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style="linear",
        groups="norm decay=0.5",
    )  # fmt: skip
    made = optim.make_optimizer(config, 0.1, defs=DEFS, total_steps=2)
    value = params()
    state = made.init(value)
    for step, decay in enumerate((0.1, 0.2, 0.3, 0.3)):
        plain = replace(config, weight_decay_incr_style="constant", weight_decay=decay)
        plain = replace(plain, start_weight_decay=0.0, end_weight_decay=0.0)
        grads = {
            k: torch.randn(v.shape, generator=torch.Generator().manual_seed(step))
            for k, v in value.items()
        }
        fixed = optim.make_optimizer(plain, 0.1, defs=DEFS)
        kept = _without_hyperparams(state)
        want, _ = fixed.update(grads, kept, value)
        updates, state = made.update(grads, state, value)
        for key in value:
            torch.testing.assert_close(updates[key], want[key], rtol=1e-6, atol=2e-8)
        value = optim.apply_updates(value, updates)
    with pytest.raises(ValueError, match=r"total_steps: got None"):
        optim.make_optimizer(config, 0.1, defs=DEFS)
    adam = replace(config, name="adam", groups="")
    assert [p.path for p in optim.optimizer_problems(adam, "o")] == ["o.weight_decay_incr_style"]


def _without_hyperparams(state):
    """The state of the same optimizer with a weight decay that is a number."""
    is_one = lambda x: isinstance(x, optim.InjectHyperparamsState)
    return tree.map(lambda x: x.inner_state if is_one(x) else x, state, is_leaf=is_one)


def test_a_share_of_the_steps_warms_up():
    """Rounded up, and fewer than all; 3 of 50 at 0.05."""
    for total, steps in ((50, 3), (5, 1), (1, 0), (200, 10)):
        config = optim.ScheduleConfig("cosine", 2.0, total_steps=total, warmup_ratio=0.05)
        plain = optim.ScheduleConfig("cosine", 2.0, steps, total)
        rates = [[float(optim.make_schedule(c)(t)) for t in range(6)] for c in (config, plain)]
        assert rates[0] == rates[1]
    wrong = optim.ScheduleConfig("cosine", -1.0, 10, 100, warmup_ratio=1.0)
    found = [str(problem) for problem in optim.schedule_problems(wrong)]
    assert [text.partition(":")[0] for text in found] == [
        "schedule.warmup_ratio",
        "schedule.warmup_ratio",
        "schedule.peak",
    ]


def test_fields_that_a_schedule_does_not_use_are_not_judged():
    assert not optim.schedule_problems(optim.ScheduleConfig("constant", total_steps=0, decay="x"))
    assert optim.schedule_problems(optim.ScheduleConfig("linear", total_steps=0))


DEFS = {
    "w": ParamDef((2, 64, 128), ("layers", "embed", "mlp"), Normal(1.0)),
    "norm": ParamDef((2, 64), ("layers", "embed"), Normal(1.0), decay=False),
}


def params(dtype=torch.float32):
    return {name: torch.ones(d.shape, dtype=dtype) for name, d in DEFS.items()}


def test_moments_masters_and_offload_are_wired():
    config = optim.OptimizerConfig(
        mu_dtype="int8", nu_dtype="bfloat16", fp32_masters=True, offload=True, clip_norm=0
    )
    state = optim.make_optimizer(config, 0.1, defs=DEFS).init(params(torch.bfloat16))
    assert state.masters["w"].dtype == torch.float32
    adam = state.inner[0]
    assert adam.mu["w"].codes.dtype == torch.uint8
    assert adam.mu["norm"].dtype == torch.float32
    assert adam.nu["w"].dtype == torch.bfloat16


def test_muon_is_wired():
    settings = optim.MuonConfig(momentum=0.8, scale="spectral", dtype="")
    config = optim.OptimizerConfig("muon", weight_decay=0.2, clip_norm=0, muon=settings)
    meant = optim.muon(
        0.1, optim.matrices(DEFS), 0.8, True, 0.2, MASK, scale="spectral", dtype=None,
        others=optim.adamw(0.1, 0.9, 0.95, weight_decay=0.2, mask=MASK),
    )  # fmt: skip
    grads = {name: torch.randn(d.shape) for name, d in DEFS.items()}
    got = optim.make_optimizer(config, 0.1, defs=DEFS)
    for optimizer in (got, meant):
        start = params()
        copy = {name: g.clone() for name, g in grads.items()}
        out = optimizer.step_(copy, optimizer.init(start), start)[0]
        want = out if optimizer is got else want
    for name in want:
        torch.testing.assert_close(out[name], want[name], rtol=0, atol=0)


def moved(optimizer):
    """The parameters after three updates."""
    now = params()
    state = optimizer.init(now)
    for step in range(3):
        grads = {
            name: torch.randn(d.shape, generator=torch.Generator().manual_seed(step))
            for name, d in DEFS.items()
        }
        now, state = optimizer.step_(grads, state, now)
    return now


RATE = optim.linear(0.1, 10)
NAMED = {
    "lion": (
        {"b2": 0.99, "mu_dtype": "bfloat16"},
        lambda: optim.lion(RATE, 0.9, 0.99, weight_decay=0.1, mask=MASK, mu_dtype=torch.bfloat16),
    ),
    "adafactor": (
        {"adafactor": optim.AdafactorConfig(momentum=0.5, clip=0, min_dim=8, decay_rate=0.7)},
        lambda: optim.adafactor(
            RATE, 8, 0.7, clipping_threshold=None, momentum=0.5, defs=DEFS,
            weight_decay_rate=lambda count: 0.1 * RATE(count), weight_decay_mask=MASK,
        ),
    ),
    "adam_mini": (
        {}, lambda: optim.adam_mini(RATE, optim.blocks(DEFS), 0.9, 0.95, weight_decay=0.1, mask=MASK)
    ),
    "soap": (
        {"soap": optim.SoapConfig(frequency=1, max_dim=64, decay=0.8)},
        lambda: optim.soap(
            RATE, optim.matrices(DEFS), 0.9, 0.95, weight_decay=0.1, mask=MASK, frequency=1,
            max_dim=64, precondition_decay=0.8,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_further_optimizers_are_wired(name):
    fields, meant = NAMED[name]
    config = optim.OptimizerConfig(name, clip_norm=0, **fields)
    got, want = moved(optim.make_optimizer(config, RATE, defs=DEFS)), moved(meant())
    for leaf in want:
        torch.testing.assert_close(got[leaf], want[leaf], rtol=0, atol=0)


def test_groups_averages_and_skipping_are_wired():
    relative = optim.AdafactorConfig(relative_step=True, parameter_scale=False, clip=0)
    config = optim.OptimizerConfig(
        "adafactor", groups="norm lr=0", ema_decay=0.9, skip_nonfinite=2, adafactor=relative
    )
    made = optim.make_optimizer(config, 0.5, defs=DEFS)
    start = params()
    state = made.init(start)
    grads = {name: torch.ones(d.shape) for name, d in DEFS.items()}
    out, state = made.step_(grads, state, start)
    assert torch.equal(out["norm"], params()["norm"])
    rate = 0.01  # of the paper, not 0.5; the first update is of ones
    torch.testing.assert_close(out["w"], params()["w"] - rate * (1 + 0.1))
    torch.testing.assert_close(optim.averaged(state, out)["w"], out["w"])
    bad = {name: torch.full(d.shape, float("nan")) for name, d in DEFS.items()}
    again, state = made.step_(bad, state, tree.map(torch.clone, out))
    assert torch.equal(again["w"], out["w"])
    assert state.total_notfinite == 1


def test_shards_make_it_zero_and_blocks_must_not_be_divided():
    mesh, specs = Mesh(dp=4), {"w": P(None, None, "tp"), "norm": P()}
    shards = optim.shard_specs(DEFS, specs, mesh)
    assert shards == {"w": P(None, "dp", "tp"), "norm": P(None, "dp")}
    config = optim.OptimizerConfig(mu_dtype="int8")
    given = {"defs": DEFS, "specs": specs}
    optimizer = optim.make_optimizer(config, 0.1, shards=shards, mesh=mesh, **given)
    assert optimizer.grad_specs(specs) == shards
    assert optimizer.specs(specs)[1][0].mu == shards
    with pytest.raises(ValueError, match="w: got shards of 32 along the last dim"):
        optim.make_optimizer(config, 0.1, mesh=Mesh(tp=4), **given)


def test_every_problem_of_the_new_fields_is_named():
    config = optim.OptimizerConfig(
        "muon", mu_dtype="int4", grad_dtype="float8", muon=optim.MuonConfig(1.5, scale="x", steps=0)
    )
    with pytest.raises(ValueError, match="the optimizer cannot be built") as caught:
        optim.make_optimizer(config, 0.1)
    for text in (
        "optimizer.mu_dtype: got 'int4'; wanted one of '', 'float32', 'bfloat16', 'int8', 'fp8'",
        "optimizer.grad_dtype: got 'float8'",
        "optimizer.muon.momentum: got 1.5",
        "optimizer.muon.scale: got 'x'",
        "optimizer.muon.steps: got 0",
        "defs: got None",
    ):
        assert text in str(caught.value)
    fields = {
        "lion": {"mu_dtype": "int8", "groups": "w rl=1"},
        "adafactor": {
            "nu_dtype": "float32",
            "adafactor": optim.AdafactorConfig(momentum=1, clip=-1),
        },
        "soap": {
            "ema_decay": 1,
            "skip_nonfinite": -1,
            "soap": optim.SoapConfig(frequency=0, decay=2),
        },
        "adam_mini": {"nu_dtype": "bfloat16"},
    }
    found = [
        p.path
        for name, own in fields.items()
        for p in optim.optimizer_problems(optim.OptimizerConfig(name, **own), name)
    ]
    assert found == [
        "lion.mu_dtype", "lion.groups", "adafactor.nu_dtype", "adafactor.adafactor.momentum",
        "adafactor.adafactor.clip", "soap.ema_decay", "soap.skip_nonfinite", "soap.soap.decay",
        "soap.soap.frequency", "adam_mini.nu_dtype",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"optimizer.groups: got pattern 'x'.*use one of: norm, w"):
        optim.make_optimizer(optim.OptimizerConfig(groups="x lr=1"), 0.1, defs=DEFS)
    with pytest.raises(ValueError, match="defs: got None"):
        optim.make_optimizer(optim.OptimizerConfig(groups="x lr=1"), 0.1)
    sgd = optim.OptimizerConfig("sgd", mu_dtype="int8")
    assert [p.path for p in optim.optimizer_problems(sgd)] == ["optimizer.mu_dtype"]
