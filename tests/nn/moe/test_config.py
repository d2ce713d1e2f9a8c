"""Impossible mixtures of experts are refused, all mistakes at once and with their fixes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import jaxtyping
import pytest
import torch

from functron.nn.moe import MoEConfig


@pytest.fixture(autouse=True)
def unchecked():
    """Without the test suite's checks of annotations, which would speak first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts: got 0; wanted at least 1"),
        ({"top_k": 0}, "top_k: got 0; wanted at least 1"),
        ({"expert_dim": -4}, "expert_dim: got -4; wanted at least 1"),
        ({"top_k": 9}, "top_k: got 9; wanted at most num_experts=8; fix: lower it, or add experts"),
        ({"capacity_factor": -1.0}, "capacity_factor: got -1.0; .* fix: 0 drops no token"),
        ({"capacity_factor": float("nan")}, "capacity_factor: got nan"),
        ({"aux_loss": -0.1}, "aux_loss: got -0.1; .* fix: 0 switches it off"),
        ({"z_loss": float("inf")}, "z_loss: got inf"),
        ({"balance_rate": -1.0}, "balance_rate: got -1.0"),
        ({"balance_decay": 1.0}, "balance_decay: got 1.0; wanted at least 0 and below 1"),
        ({"balance_by": "median"}, "balance_by: got 'median'"),
        (
            {"balance_by": "quantile", "num_groups": 2, "top_groups": 1},
            "num_groups: got 2; wanted 1 with balance_by='quantile'.* fix: use balance_by='sign'",
        ),
        ({"balance_by": "quantile", "top_k": 8}, "top_k: got 8; wanted fewer than num_experts"),
        ({"shared_dim": -1}, "shared_dim: got -1"),
        ({"latent_dim": -1}, "latent_dim: got -1"),
        ({"scale": 0.0}, "scale: got 0.0; wanted a positive number"),
        ({"jitter": 1.0}, "jitter: got 1.0; wanted at least 0 and below 1"),
        ({"sinkhorn_steps": 0}, "sinkhorn_steps: got 0; wanted at least 1"),
        ({"num_groups": 3}, "num_groups: got 3; wanted a divisor of num_experts=8"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups: got 5; wanted at most num_groups=4"),
        (
            {"num_groups": 4, "top_groups": 1, "top_k": 3},
            "top_groups: got 1; wanted enough groups of 2 experts for top_k=3; fix: at least 2",
        ),
        (
            {"num_groups": 8, "top_groups": 4},
            "group_score: got 'top2' of groups of 1 expert; .* fix: use group_score='max'",
        ),
        (
            {"score": "sigmoid", "normalise": "after"},
            "normalise: got 'after' with score='sigmoid'; .* renormalise=True",
        ),
        ({"shared_gate": True}, "shared_dim: got 0 with shared_gate=True"),
        ({"capacity_over": "batch"}, "capacity_factor: got 0 with capacity_over='batch'"),
        (
            {"routing": "expert_choice"},
            "capacity_factor: got 0 with routing='expert_choice'; wanted a positive number",
        ),
        (
            {"routing": "expert_choice", "capacity_factor": 1.0, "renormalise": True},
            "renormalise: got True with routing='expert_choice'; wanted False",
        ),
        (
            {"routing": "expert_choice", "capacity_factor": 1.0, "normalise": "after"},
            "normalise: got 'after' with routing='expert_choice'; wanted 'before'",
        ),
        (
            {"routing": "sinkhorn", "aux_loss": 0.1},
            "aux_loss: got 0.1 with routing='sinkhorn'; wanted 0: routing='sinkhorn' balances",
        ),
        (
            {"routing": "sinkhorn", "balance_bias": True},
            "balance_bias: got True with routing='sinkhorn'; wanted False",
        ),
        (
            {"routing": "sinkhorn", "num_groups": 2, "top_groups": 1},
            "num_groups: got 2 with routing='sinkhorn'; wanted 1",
        ),
        ({"score": "softmin"}, "score: got 'softmin'; wanted a known name; fix: .*'softmax'"),
        ({"normalise": "first"}, "normalise: got 'first'"),
        ({"routing": "expertchoice"}, "fix: did you mean 'expert_choice'"),
        ({"group_score": "mean"}, "group_score: got 'mean'"),
        ({"drop": "random"}, "drop: got 'random'"),
        ({"aux": "globe"}, "aux: got 'globe'"),
        (
            {"aux": "global", "aux_loss": 0.1, "balance_bias": True},
            "aux: got 'global' with balance_bias; .* fix: use aux='sequence'",
        ),
        ({"router_dtype": "bfloat16"}, "router_dtype: got 'bfloat16'"),
        ({"dispatch": "all_to_all"}, "fix: did you mean 'alltoall'"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**changes)


def test_all_problems_at_once():
    with pytest.raises(ValueError, match="invalid MoEConfig") as caught:
        MoEConfig(num_experts=0, jitter=2.0, drop="none", aux_loss=-1)
    assert len(str(caught.value).splitlines()) == 5
    with pytest.raises(ValueError, match="invalid MoEConfig") as caught:
        MoEConfig(top_k=9, num_groups=5, shared_gate=True, routing="expert_choice")
    assert len(str(caught.value).splitlines()) == 6


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 1, "top_k": 1},
        {"num_experts": 8, "top_k": 8},
        {"num_experts": 256, "top_k": 8, "num_groups": 8, "top_groups": 4, "score": "sigmoid"},
        {"num_experts": 8, "num_groups": 8, "top_groups": 2, "group_score": "max"},
        {"routing": "expert_choice", "capacity_factor": 2.0, "top_k": 1},
        {"routing": "sinkhorn", "top_k": 1, "capacity_factor": 1.0},
        {"shared_dim": 64, "shared_gate": True, "latent_dim": 16},
    ],
)
def test_accepted(config):
    made = MoEConfig(**config)
    assert all(getattr(made, name) == value for name, value in config.items())
    assert made == replace(made)


def test_choices():
    assert MoEConfig(num_experts=8, top_k=3).choices == 3
    experts_choose = MoEConfig(routing="expert_choice", capacity_factor=1.0, num_experts=8)
    assert experts_choose.choices == 8


def test_frozen():
    config = MoEConfig()
    with pytest.raises(FrozenInstanceError):
        config.top_k = 3
    assert config.torch_router_dtype == torch.float32
