"""Tensor-parallel feed-forward layers against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

import functron as ft
from functron import nn
from functron.nn.layers import xielu
from tests.nn.conftest import apart

EMBED, MLP = 6, 8

FORMULAS = {
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def test_every_activation_has_a_formula_here():
    assert set(FORMULAS) == set(nn.ACTIVATIONS)


@pytest.mark.pairwise
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False, "fused"])
@pytest.mark.parametrize("activation", list(FORMULAS))
def test_mlp(agrees, draw, specs, randn, mesh, stream, activation, gated, bias):
    defs = nn.mlp_defs(
        EMBED, MLP, gated=bool(gated), bias=bias, stddev=1.0, out_stddev=1.0, dtype=torch.float64,
        fused=gated == "fused",
    )  # fmt: skip
    assert ("gate_up" in defs) == (gated == "fused")

    def project(params, x):
        y = torch.einsum("...i,io->...o", x, params["w"])
        return y + params["b"] if bias else y

    def dense(params, x):
        params = apart(params)
        up = project(params["up"], x)
        act = FORMULAS[activation]
        hidden = act(project(params["gate"], x)) * up if gated else act(up)
        return project(params["down"], hidden)

    def layer(params, x):
        return nn.mlp(params, x, activation=activation, stream=stream)

    args = (draw(defs), randn(4, 8, EMBED))
    agrees(layer, dense, args, mesh, (specs(defs), stream), stream)


def test_defs():
    defs = nn.mlp_defs(
        EMBED, MLP, gated=True, bias=True, stddev=0.1, out_stddev=0.05, dtype=torch.float32
    )
    assert set(defs) == {"up", "gate", "down"}
    assert defs["up"]["w"].shape == defs["gate"]["w"].shape == (EMBED, MLP)
    assert defs["down"]["w"].shape == (MLP, EMBED)
    assert defs["gate"]["b"].shape == (MLP,)
    assert defs["down"]["b"].shape == (EMBED,)
    assert defs["down"]["b"].axes == ("embed",)
    assert defs["down"]["w"].init.stddev == 0.05


def test_xielu_is_that_of_its_paper():
    """With a = b = 0.8 at first: 0.8 x^2 + x / 2 above 0, and 0.8 (e^x - 1 - x) + x / 2 below."""
    defs = nn.xielu_defs(torch.float64)
    params = ft.init_params(ft.random.key(0), defs)
    x = torch.tensor([-2.0, -0.5, 0.5, 2.0], dtype=torch.float64)
    wanted = torch.where(x > 0, 0.8 * x * x, 0.8 * (x.exp() - 1 - x)) + x / 2
    torch.testing.assert_close(xielu(params, x), wanted, rtol=1e-12, atol=1e-12)
