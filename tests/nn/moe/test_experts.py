"""Stacked experts against one feed-forward layer after the other."""

from __future__ import annotations

import math

import pytest
import torch

from functron import Mesh, P, lax, tree
from functron.nn.moe.layer import expert_defs, experts
from functron.ops import grouped_matmul as grouped
from tests.nn.conftest import apart

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
    [
        *(("silu", True), ("gelu", True), ("clamped_swiglu", True), ("relu2", False)),
        *(("relu", False), ("silu", "fused"), ("clamped_swiglu", "fused")),
    ],
)
@pytest.mark.parametrize("where", ["", "tp=2"])
def test_experts(agrees, draw, specs, randn, where, activation, gated, bias):
    mesh = Mesh.parse(where)
    defs = expert_defs(
        EXPERTS, EMBED, HIDDEN,
        gated=bool(gated), bias=bias, stddev=1.0, out_stddev=1.0, dtype=torch.float64,
        fused=gated == "fused",
    )  # fmt: skip
    sizes = torch.tensor(SIZES)

    def layer(params, x):
        parts = lax.axis_size("tp")
        return lax.psum(experts(params, x, sizes, activation=activation, parts=parts), "tp")

    # of the clamped activation both sides of every limit
    args = draw(defs), 3 * randn(ROWS, EMBED)
    agrees(
        layer,
        lambda params, x: dense(apart(params), x, activation),
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


def grouped_mm(x, w, offs):
    """As torch's kernel: rows of no group, and what empty groups have, are as they are found."""
    spans = list(zip([0, *offs.tolist()], offs.tolist(), strict=False))
    if w.dim() == 3:
        y = torch.full((len(x), w.shape[2]), torch.nan, dtype=x.dtype)
        for matrix, (start, stop) in zip(w, spans, strict=True):
            y[start:stop] = x[start:stop] @ matrix
        return y
    parts = [x[:, start:stop] @ w[start:stop] for start, stop in spans]
    return torch.stack(
        [y if b > a else y + torch.nan for y, (a, b) in zip(parts, spans, strict=True)]
    )


@pytest.mark.parametrize("bias", [True, False])
def test_what_a_kernel_leaves_in_rows_of_no_expert_is_read_by_nobody(bias, monkeypatch):
    """Also backward; and not zeroed between the products, but where they begin and end."""
    kind = {"gated": True, "bias": bias, "stddev": 1.0, "out_stddev": 1.0}
    defs = expert_defs(EXPERTS, EMBED, HIDDEN, **kind, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    params, rows = tree.map(lambda d: draw(*d.shape), defs), draw(ROWS, EMBED)
    params, rows = tree.map(torch.Tensor.requires_grad_, (params, rows))
    weights = draw(ROWS, EMBED)

    def results():
        out = experts(params, rows, torch.tensor(SIZES), activation="silu")
        return [out, *torch.autograd.grad((out * weights).sum(), [rows, *tree.leaves(params)])]

    want = results()
    monkeypatch.setattr(grouped, "has_kernel", lambda *_: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    passes, where = [], torch.where

    def counted(*args):
        out = where(*args)
        passes.extend([out.shape] if out.dim() == 2 else [])  # others are of weights
        return out

    monkeypatch.setattr(torch, "where", counted)
    got = results()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    # the last product, also of its bias, and the derivatives of rows by two products
    assert passes == [(ROWS, EMBED)] * (4 if bias else 3)
