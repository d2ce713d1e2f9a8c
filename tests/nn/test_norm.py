"""RMSNorm and LayerNorm against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import functron as ft
from functron import nn
from functron.ops.norms import LEAN_LAYER_NORM, LEAN_RMS_NORM, is_lean

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


def torch_norm(params, x, centred):
    """torch's own, and of 1 + scale in float32."""
    wide = torch.float32 if centred else x.dtype
    scale = params["scale"].to(wide) + (1 if centred else 0)
    if "bias" in params:
        y = F.layer_norm(x.to(wide), x.shape[-1:], scale, params["bias"].to(wide), 1e-5)
    else:
        y = F.rms_norm(x.to(wide), x.shape[-1:], scale, 1e-5)
    return y.to(x.dtype)


def bytes_kept(f, *args) -> int:
    """Of tensors that torch's tape keeps for backward, each memory once."""
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = f(*args)
    del y
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize(
    ("kind", "centred"), [("rms", False), ("rms", True), ("layer", True)]
)  # of the fourth torch's own keeps no more
def test_norms_keep_narrow_rows_as_they_are(kind, centred):
    """Of bfloat16 rows these, and a number or two for each; results are torch's to the bit."""
    generator = torch.Generator().manual_seed(0)
    x, *vectors = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((64, 256), (256,), (256,))
    )
    params = dict(zip(("scale", "bias")[: 1 + (kind == "layer")], vectors, strict=False))

    def normed(params, x):
        return nn.norm(params, x, eps=1e-5, zero_centered=centred)

    assert torch.equal(normed(params, x), torch_norm(params, x, centred))
    statistics = 64 * 4 * len(params)
    assert bytes_kept(normed, params, x) <= 64 * 256 * 2 + 256 * 2 * len(params) + statistics
    double = {name: v.detach().double().requires_grad_() for name, v in params.items()}
    rows, dy = x.detach().double().requires_grad_(), torch.randn(64, 256, generator=generator)
    scale = double["scale"] + (1 if centred else 0)
    FORMULAS[kind]({**double, "scale": scale}, rows, 1e-5).backward(dy.double())
    normed(params, x).backward(dy.bfloat16())
    for got, want in ((x, rows), *zip(params.values(), double.values(), strict=True)):
        assert (got.grad.double() - want.grad).norm() < 8e-3 * want.grad.norm()


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", list(FORMULAS))
def test_norms_in_torchs_operations_have_reverse_derivatives_of_any_order(randn, kind, centred):
    lean = {"rms": LEAN_RMS_NORM, "layer": LEAN_LAYER_NORM}[kind]
    names = ("scale", "bias")[: 1 + (kind == "layer")]
    x, *vectors = (randn(2, 3, EMBED), *(randn(EMBED) for _ in names))

    def normed(x, *vectors):
        return lean(x, *vectors, 1e-2, centred)[0]

    def formula(x, *vectors):
        params = dict(zip(names, vectors, strict=True))
        return FORMULAS[kind]({**params, "scale": params["scale"] + centred}, x, 1e-2)

    args = tuple(v.requires_grad_() for v in (x, *vectors))
    torch.testing.assert_close(normed(*args), formula(*args))
    assert torch.autograd.gradcheck(normed, args)
    assert torch.autograd.gradgradcheck(normed, args)
    args = tuple(v.detach() for v in args)
    weights = randn(2, 3, EMBED)
    for f in (  # derivatives of derivatives, and both orders of grad and vmap
        lambda of: torch.func.jacrev(
            torch.func.grad(lambda x: (of(x, *args[1:]) ** 2 * weights).sum())
        ),
        lambda of: torch.func.vmap(torch.func.grad(lambda x: (of(x, *args[1:]) ** 2).sum())),
        lambda of: torch.func.grad(
            lambda x: (torch.func.vmap(lambda x: of(x, *args[1:]))(x) ** 2 * weights).sum()
        ),
        lambda of: torch.func.jacrev(lambda x: of(x, *args[1:])),
        lambda of: torch.func.grad(
            lambda x: torch.func.jacrev(lambda x: of(x, *args[1:]))(x).pow(3).sum()
        ),
    ):
        torch.testing.assert_close(f(normed)(x.detach()), f(formula)(x.detach()))


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


def test_dynamo_sees_through_the_choice_of_derivatives():
    chosen = torch.compile(lambda x: x + is_lean(), backend="eager", fullgraph=True)
    assert chosen(torch.zeros(())) == 0
