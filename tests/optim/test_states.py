"""States are of the public types that describe them, and the small parts of optimizers by hand."""

from __future__ import annotations

import pytest
import torch

from functron import ParamDef, optim
from functron.spmd.params import Normal

NORMAL = Normal(0.02)
DEFS = {
    "w": ParamDef((2, 4, 6), ("layers", "embed", "mlp"), NORMAL),
    "b": ParamDef((6,), ("mlp",), NORMAL),
}
PARAMS = {name: torch.full(d.shape, 2.0) for name, d in DEFS.items()}
STATES = {
    "ApplyIfFiniteState": optim.apply_if_finite(optim.sgd(0.1), 3),
    "AverageState": optim.with_average(optim.sgd(0.1), 0.9),
    "EmaState": optim.ema(0.9),
    "FactoredState": optim.scale_by_factored_rms(),
    "InjectHyperparamsState": optim.inject_hyperparams(optim.sgd)(learning_rate=0.1),
    "MastersState": optim.with_fp32_masters(optim.adamw(1e-3)),
    "MultiTransformState": optim.multi_transform(
        {"fast": optim.sgd(0.2), "slow": optim.sgd(0.1)}, {"w": "slow", "b": "fast"}
    ),
    "ScaleByAdamMiniState": optim.scale_by_adam_mini(optim.blocks(DEFS)),
    "ScaleByAdamState": optim.scale_by_adam(),
    "ScaleByLionState": optim.scale_by_lion(),
    "ScaleByMuonState": optim.scale_by_muon(optim.matrices(DEFS)),
    "ScaleByScheduleState": optim.scale_by_learning_rate(optim.constant(0.1)),
    "TraceState": optim.trace(0.9),
    "WhereState": optim.where({"w": True, "b": False}, optim.trace(0.9), optim.identity()),
}


@pytest.mark.parametrize("name", STATES)
def test_states_are_of_their_public_types(name):
    assert type(STATES[name].init(PARAMS)) is getattr(optim, name)


def test_soap_is_of_matrices_alone():
    soap = optim.scale_by_soap({"w": optim.matrices(DEFS)["w"]})
    assert isinstance(soap.init({"w": PARAMS["w"]}), optim.ScaleBySoapState)


def test_stateless_sees_parameters_and_its_updates_are_applied_in_place():
    pull = optim.stateless(lambda updates, params: {n: -params[n] / 2 for n in updates})
    params = {name: p.clone() for name, p in PARAMS.items()}
    updates, state = pull.update(params, pull.init(params), params)
    assert state == ()
    kept = optim.apply_updates_(params, updates)
    assert kept["w"] is params["w"]
    assert all(torch.equal(p, torch.ones_like(p)) for p in params.values())


def test_norm_scale_brings_a_norm_down_and_leaves_smaller_ones():
    factors = [float(optim.norm_scale(torch.tensor(n), 1.0)) for n in (4.0, 0.5, torch.inf)]
    assert factors == [0.25, 1.0, 0.0]


def test_masks_are_told_leaf_by_leaf():
    assert optim.mask_leaves({"b": False, "w": True}, PARAMS) == [False, True]
    assert optim.mask_leaves(None, PARAMS) == [True, True]


def test_masters_are_of_the_low_precisions_and_widths_of_few_optimizers():
    made = {d: optim.with_fp32_masters(optim.sgd(0.1)) for d in optim.LOW_PRECISION}
    assert torch.bfloat16 in made
    assert torch.float32 not in made
    assert optim.width_problems(optim.OptimizerConfig(name="adamw")) == []
    (problem,) = optim.width_problems(optim.OptimizerConfig(name="soap"))
    assert problem.path == "optimizer.name"
