"""Multiples of learning rates by width: each optimizer's, derived by hand."""

import math

import pytest
import torch

from functron import optim, params
from functron.spmd.params import Normal, ParamDef, Width

R, C, E = 12, 48, 4  # outputs and inputs of a matrix that is three times as wide; experts


def matrix(inputs, outputs, width, axes=("embed", "mlp")):
    return ParamDef((2, inputs, outputs), ("layers", *axes), Normal(1.0), width=width)


DEFS = {
    "hidden": matrix(C, R, Width(3, 3)),
    "router": matrix(C, E, Width(3, 1), ("embed", None)),
    "first": matrix(E, R, Width(1, 3), (None, "embed")),
    "table": ParamDef((E, R), ("vocab", "embed"), Normal(1.0)),
    "unembed": ParamDef((C, E), ("embed", "vocab"), Normal(1.0), width=Width(3, 1)),
    "norm": ParamDef((2, R), ("layers", "embed"), params.ones, decay=False),
}
ADAM = {"hidden": 1 / 3, "router": 1 / 3, "unembed": 1 / 3}
# spectral norms of updates: 0.2 sqrt(48) here and 0.2 sqrt(16) at the base, where those of the
# router must be sqrt(4 / 48) and sqrt(4 / 16)
MUON = {"hidden": 1 / math.sqrt(3), "router": 1 / 3, "unembed": 1 / 3}
SPECTRAL = {"router": 1 / math.sqrt(3), "unembed": 1 / 3}
KINDS = [(name, ADAM) for name in ("adamw", "adam", "lion", "adam_mini")] + [("muon", MUON)]


@pytest.mark.parametrize(("name", "want"), KINDS)
def test_multiples(name, want):
    assert optim.width_multiples(optim.OptimizerConfig(name), DEFS) == pytest.approx(want)


def test_muon_with_spectral_scale_keeps_hidden_rates():
    config = optim.OptimizerConfig("muon", muon=optim.MuonConfig(scale="spectral"))
    assert optim.width_multiples(config, DEFS) == pytest.approx(SPECTRAL)


def test_rates_are_multiplied_and_decays_divided_beside_those_of_groups():
    weights = {name: torch.ones(d.shape, dtype=torch.float64) for name, d in DEFS.items()}
    config = optim.OptimizerConfig(
        "lion", weight_decay=0.5, clip_norm=0, groups="hidden lr=0.5; unembed decay=0"
    )
    rule = optim.make_optimizer(config, 0.1, defs=DEFS, mask=params.decay_mask(DEFS))
    grads = {name: torch.ones_like(w) for name, w in weights.items()}
    updates, _ = rule.update(grads, rule.init(weights), weights)
    # -lr (sign of the gradient + decay * weight)
    third = 0.1 / 3
    want = {
        "hidden": -third / 2 * (1 + 1.5),
        "router": -third * (1 + 1.5),
        "first": -0.1 * (1 + 0.5),
        "table": -0.1 * (1 + 0.5),
        "unembed": -third,
        "norm": -0.1,
    }
    for name, value in want.items():
        torch.testing.assert_close(updates[name], torch.full_like(updates[name], value))


def test_a_part_of_a_model_has_the_states_of_the_whole():
    part = {"table": DEFS["table"]}
    weights = {"table": torch.ones(E, R)}
    config = optim.OptimizerConfig("adamw")
    whole = optim.make_optimizer(config, 0.1, defs=part, whole=DEFS).init(weights)
    alone = optim.make_optimizer(config, 0.1, defs=DEFS).init(
        {name: torch.ones(d.shape) for name, d in DEFS.items()}
    )
    assert list(whole[1].inner_states) == list(alone[1].inner_states)
    assert len(whole[1].inner_states) == 2
