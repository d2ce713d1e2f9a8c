"""Layers with registered ops in place of torch's operations: the same functions on any mesh."""

from __future__ import annotations

import pytest
import torch

from functron import nn
from functron.nn.moe import expert_defs, experts
from functron.ops import use
from functron.spmd import P

EMBED, MLP = 6, 8
KERNELS = use("kernel")
ON_MESHES = pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"], indirect=True)


def formula(params, x, center=False):
    scale = params["scale"] + float(center)
    if "bias" not in params:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + 1e-5).sqrt() * scale + params["bias"]


@pytest.mark.pairwise
@ON_MESHES
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms(agrees, draw, specs, randn, mesh, stream, kind, center):
    defs = nn.norm_defs(EMBED, kind, axis="embed", dtype=torch.float64)
    settings = {"eps": 1e-5, "zero_centered": center, "kernels": KERNELS}
    agrees(
        lambda params, x: nn.norm(params, x, **settings),
        lambda params, x: formula(params, x, center),
        (draw(defs), 3 * randn(4, 8, EMBED) + 1),
        mesh,
        (specs(defs), stream),
        stream,
    )

    def together(pair):
        return torch.cat(pair, -1)

    agrees(
        lambda params, x, y: together(nn.add_norm(params, x, y, **settings)),
        lambda params, x, y: together((formula(params, x + y, center), x + y)),
        (draw(defs), randn(4, 8, EMBED), randn(4, 8, EMBED)),
        mesh,
        (specs(defs), stream, stream),
        stream,
    )


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)])
def test_add_norm_without_kernels_is_what_it_replaces(kind, dtypes):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, EMBED, generator=generator).to(dtype) for dtype in dtypes)
    params = {"scale": torch.linspace(0.5, 2, EMBED), "bias": torch.linspace(-1, 1, EMBED)}
    if kind == "rms":
        del params["bias"]
    for kernels in (use(), KERNELS):
        normed, total = nn.add_norm(params, x, y, eps=1e-5, kernels=kernels)
        assert torch.equal(total, x + y)
        wanted = nn.norm(params, x + y, eps=1e-5)
        if kernels is KERNELS:
            torch.testing.assert_close(normed, wanted)
        else:
            assert torch.equal(normed, wanted)


@ON_MESHES
@pytest.mark.parametrize("gated", [True, False])
def test_mlp(agrees, draw, specs, randn, mesh, stream, gated):
    defs = nn.mlp_defs(
        EMBED, MLP, gated=gated, bias=True, stddev=1.0, out_stddev=1.0, dtype=torch.float64
    )

    def dense(params, x):
        up, gate = (
            x @ params[name]["w"] + params[name]["b"] if name in params else None
            for name in ("up", "gate")
        )
        act = lambda z: z / (1 + torch.exp(-z))
        hidden = act(gate) * up if gated else act(up)
        return hidden @ params["down"]["w"] + params["down"]["b"]

    agrees(
        lambda params, x: nn.mlp(params, x, activation="silu", stream=stream, kernels=KERNELS),
        dense,
        (draw(defs), randn(4, 8, EMBED)),
        mesh,
        (specs(defs), stream),
        stream,
    )


@pytest.mark.pairwise
@ON_MESHES
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("with_rope", [False, True])
def test_self_attention(agrees, draw, specs, randn, mesh, stream, qk_norm, with_rope):
    """Against the same layer of torch's operations, which tests of its own compare with formulas."""
    config = nn.AttentionConfig(
        embed_dim=EMBED, num_heads=8, num_kv_heads=4, head_dim=4,
        qk_norm=qk_norm, zero_centered_norm=True,
    )  # fmt: skip
    defs = nn.attention_defs(config, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
    angles = torch.arange(8, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3])
    rope = (angles.cos(), angles.sin()) if with_rope else None

    def layer(kernels, stream):
        settings = {"rope": rope, "stream": stream, "kernels": use(kernels)}
        return lambda params, x: nn.self_attention(params, x, config, **settings)

    args = (draw(defs), randn(4, 8, EMBED))
    dense = layer("reference", P())
    agrees(layer("kernel", stream), dense, args, mesh, (specs(defs), stream), stream)


@ON_MESHES
@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rope(agrees, randn, mesh, interleaved):
    """Positions of each sample; against complex numbers."""
    angles = randn(4, 8, 3)

    def dense(x):
        split = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = torch.complex(*split) * torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
        parts = (turned.real, turned.imag)
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    def layer(x, angles):
        table = angles.cos(), angles.sin()
        return nn.apply_rope(x, table, interleaved=interleaved, kernels=KERNELS)

    batch = P("dp")
    agrees(
        layer,
        lambda x, _: dense(x),
        (randn(4, 8, 2, 6),),
        mesh,
        (batch,),
        batch,
        (angles,),
        (batch,),
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_experts(draw, randn, activation):
    defs = expert_defs(
        3, EMBED, MLP, gated=True, bias=True, stddev=1.0, out_stddev=1.0, dtype=torch.float64
    )
    params, rows, sizes = draw(defs), 3 * randn(7, EMBED), torch.tensor([2, 0, 5])

    def total(kernels):
        def of(params, rows):
            y = experts(params, rows, sizes, activation=activation, kernels=use(kernels))
            return y.square().sum()

        return torch.func.grad_and_value(of, (0, 1))

    grads, value = total("kernel")(params, rows)
    wanted, exact = total("reference")(params, rows)
    torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-10)
