"""RMSNorm and LayerNorm against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import functron as ft
from functron import nn

EMBED = 6


def rms(params, x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * params["scale"]


def layer(params, x, eps):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / x.shape[-1]
    return centred / (variance + eps).sqrt() * params["scale"] + params["bias"]


FORMULAS = {"rms": rms, "layer": layer}


@pytest.mark.pairwise
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


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", list(FORMULAS))
def test_zero_centered_norms_multiply_by_one_plus_scale(
    agrees, draw, specs, randn, mesh, stream, kind
):
    defs = nn.norm_defs(EMBED, kind, axis="embed", dtype=torch.float64, zero_centered=True)

    def formula(params, x):
        return FORMULAS[kind]({**params, "scale": 1 + params["scale"]}, x, 1e-5)

    agrees(
        lambda params, x: nn.norm(params, x, eps=1e-5, zero_centered=True),
        formula,
        (draw(defs), 3 * randn(4, 8, EMBED) + 1),
        mesh,
        (specs(defs), stream),
        stream,
    )
    start = ft.init_params(ft.random.key(0), defs)
    assert start["scale"].eq(0).all()


@pytest.mark.parametrize("kind", list(FORMULAS))
def test_one_plus_scale_is_not_rounded_to_bfloat16(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 256, generator=generator).bfloat16()
    scale = torch.full((256,), 2.0**-9).bfloat16()  # 1 + scale lies between two bfloat16 numbers
    params = {"scale": scale, "bias": torch.zeros_like(scale)}
    if kind == "rms":
        del params["bias"]
    out = nn.norm(params, x, eps=1e-6, zero_centered=True)
    exact = {name: value.double() + (name == "scale") for name, value in params.items()}
    expected = FORMULAS[kind](exact, x.double(), 1e-6)
    assert out.dtype == torch.bfloat16
    # the nearest bfloat16 but where float32's own error tips a tie, so all but a few are equal
    assert (out == expected.bfloat16()).float().mean() > 0.99


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


def test_rms_norm_of_the_tape_alone_has_derivatives_of_any_order(randn):
    x, scale = (randn(2, 3, EMBED) * 3).requires_grad_(), randn(EMBED).requires_grad_()

    def normed(x, scale):
        return nn.rms_norm(x, scale, eps=1e-2)

    assert type(normed(x, scale).grad_fn).__name__ == "_RMSNormBackward"
    torch.testing.assert_close(normed(x, scale), rms({"scale": scale}, x, 1e-2))
    assert torch.autograd.gradcheck(normed, (x, scale))
    assert torch.autograd.gradgradcheck(normed, (x, scale))


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("outer", ["jvp", "dual"])
def test_the_tangent_of_layer_norm_is_a_function_of_x(randn, outer, bare):
    """In torch's own it is one of x - mean and of the deviation as constants (2.11 to 2.13)."""
    params = {} if bare else {"scale": randn(EMBED), "bias": randn(EMBED)}
    x, v, r = (randn(3, EMBED) for _ in range(3))

    def f(x):
        return (nn.norm(params, x, eps=1e-5) ** 2 * r).sum()

    def formula(x):
        full = params or {"scale": torch.ones(EMBED), "bias": torch.zeros(EMBED)}
        return (layer(full, x, 1e-5) ** 2 * r).sum()

    def tangent(x):
        if outer == "jvp":
            return torch.func.jvp(f, (x,), (v,))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent

    taped = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(tangent(taped), taped)
    slope = torch.func.grad(formula)
    want = torch.func.grad(lambda x: (slope(x) * v).sum())(x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
