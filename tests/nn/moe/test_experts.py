"""Stacked experts against one feed-forward layer after the other."""

from __future__ import annotations

import math

import pytest
import torch

from functron import Mesh, P, lax
from functron.nn.moe.layer import expert_defs, experts

EXPERTS, EMBED, HIDDEN = 3, 4, 6
SIZES = [3, 0, 5]
ROWS = 10  # two of which belong to no expert


def sigmoid(x):
    return 1 / (1 + (-x).exp())


FORMULAS = {
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "silu": lambda x: x * sigmoid(x),
}


def clamped(gate, up):
    gate = torch.where(gate > 7, 7.0, gate)
    up = torch.where(up > 7, 7.0, torch.where(up < -7, -7.0, up))
    return (up + 1) * gate * sigmoid(1.702 * gate)


def dense(params, x, activation):
    """Row by row."""
    owners = [expert for expert, size in enumerate(SIZES) for _ in range(size)]

    def project(layer, v, expert):
        y = torch.einsum("i,io->o", v, layer["w"][expert])
        return y + layer["b"][expert] if "b" in layer else y

    out = []
    for row in range(ROWS):
        if row >= len(owners):
            out.append(torch.zeros(EMBED, dtype=x.dtype))
            continue
        up = project(params["up"], x[row], owners[row])
        if "gate" in params:
            gate = project(params["gate"], x[row], owners[row])
            both = activation == "clamped_swiglu"
            hidden = clamped(gate, up) if both else FORMULAS[activation](gate) * up
        else:
            hidden = FORMULAS[activation](up)
        out.append(project(params["down"], hidden, owners[row]))
    return torch.stack(out)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "gated"),
    [("silu", True), ("gelu", True), ("clamped_swiglu", True), ("relu2", False), ("relu", False)],
)
@pytest.mark.parametrize("where", ["", "tp=2"])
def test_experts(agrees, draw, specs, randn, where, activation, gated, bias):
    mesh = Mesh.parse(where)
    defs = expert_defs(
        EXPERTS, EMBED, HIDDEN,
        gated=gated, bias=bias, stddev=1.0, out_stddev=1.0, dtype=torch.float64,
    )  # fmt: skip
    sizes = torch.tensor(SIZES)

    def layer(params, x):
        parts = lax.axis_size("tp")
        return lax.psum(experts(params, x, sizes, activation=activation, parts=parts), "tp")

    # of the clamped activation both sides of every limit
    args = draw(defs), 3 * randn(ROWS, EMBED)
    agrees(
        layer,
        lambda params, x: dense(params, x, activation),
        args,
        mesh,
        (specs(defs, expert_mlp="tp"), P()),
        P(),
    )


def test_defs():
    defs = expert_defs(
        8, 16, 32, gated=True, bias=True, stddev=0.1, out_stddev=0.05, dtype=torch.float32
    )
    assert set(defs) == {"up", "gate", "down"}
    assert defs["up"]["w"].shape == defs["gate"]["w"].shape == (8, 16, 32)
    assert defs["up"]["w"].axes == ("expert", "embed", "expert_mlp")
    assert defs["up"]["b"].axes == ("expert", "expert_mlp")
    assert defs["down"]["w"].shape == (8, 32, 16)
    assert defs["down"]["w"].axes == ("expert", "expert_mlp", "embed")
    assert defs["down"]["b"].shape == (8, 16)
    assert defs["down"]["w"].init.stddev == 0.05
    assert defs["down"]["w"].decay
    assert not defs["down"]["b"].decay


def test_refusals(draw, randn):
    defs = expert_defs(
        2, 4, 4, gated=False, bias=False, stddev=1.0, out_stddev=1.0, dtype=torch.float64
    )
    sizes = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="there is none"):
        experts(draw(defs), randn(2, 4), sizes, activation="clamped_swiglu")
