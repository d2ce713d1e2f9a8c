"""RMSNorm and LayerNorm against their formulas."""

from __future__ import annotations

import pytest
import torch

from functron import nn

EMBED = 6


def rms(params, x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * params["scale"]


def layer(params, x, eps):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / x.shape[-1]
    return centred / (variance + eps).sqrt() * params["scale"] + params["bias"]


FORMULAS = {"rms": rms, "layer": layer}


@pytest.mark.parametrize("eps", [1e-5, 0.5])
@pytest.mark.parametrize("kind", list(FORMULAS))
def test_norm(agrees, draw, specs, randn, mesh, stream, kind, eps):
    defs = nn.norm_defs(EMBED, kind, axis="embed", dtype=torch.float64)
    agrees(
        lambda params, x: nn.norm(params, x, eps=eps),
        lambda params, x: FORMULAS[kind](params, x, eps),
        (draw(defs), 3 * randn(4, 8, EMBED) + 1),
        mesh,
        (specs(defs), stream),
        stream,
    )


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.ones(256, dtype=torch.bfloat16)
    out = nn.rms_norm(x, scale, eps=1e-6)
    assert out.dtype == torch.bfloat16
    expected = rms({"scale": scale.double()}, x.double(), 1e-6)
    # half a unit in the last place of bfloat16: rounded once, at the end
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("kind", list(FORMULAS))
def test_zeros_stay_finite(kind):
    params = {"scale": torch.ones(EMBED), "bias": torch.zeros(EMBED)}
    if kind == "rms":
        del params["bias"]
    x = torch.zeros(2, EMBED, requires_grad=True)
    out = nn.norm(params, x, eps=1e-5)
    out.sum().backward()
    assert out.eq(0).all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_defs_carry_no_decay():
    defs = nn.norm_defs(EMBED, "layer", axis="embed", dtype=torch.float32)
    assert {name: (d.shape, d.axes, d.decay) for name, d in defs.items()} == {
        "scale": ((EMBED,), ("embed",), False),
        "bias": ((EMBED,), ("embed",), False),
    }
    assert set(nn.norm_defs(EMBED, "rms", axis=None, dtype=torch.float32)) == {"scale"}
