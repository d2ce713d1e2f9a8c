"""The state space by chunks against its recurrence, and the Mamba-2 mixer against a dense formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import Mesh
from functron.apps.zoo.state_space import (
    Mamba2Config,
    mamba,
    mamba_cache,
    mamba_defs,
    mamba_step,
    ssd,
    ssd_step,
)

BATCH, SEQ, EMBED, HEADS, HEAD_DIM, STATE = 4, 12, 6, 8, 3, 5


def config(num_groups, **options):
    return Mamba2Config(EMBED, HEADS, HEAD_DIM, num_groups, STATE, conv_width=3, chunk=5, **options)


def recurrence(x, dt, a, b, c, state):
    rows = []
    for t in range(x.shape[1]):
        y, state = ssd_step(state, x[:, t], dt[:, t], a, b[:, t], c[:, t])
        rows.append(y)
    return torch.stack(rows, 1), state


@pytest.fixture
def operands(randn):
    return (
        randn(2, 11, 4, HEAD_DIM), randn(2, 11, 4).abs(), -randn(4).abs() * 3,
        randn(2, 11, 2, STATE), randn(2, 11, 2, STATE), randn(2, 4, HEAD_DIM, STATE),
    )  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 64])
def test_chunks_are_the_recurrence(operands, chunk):
    def chunked(*args):
        return ssd(*args[:5], chunk=chunk, state=args[5])

    want, pull = torch.func.vjp(recurrence, *operands)
    got, own_pull = torch.func.vjp(chunked, *operands)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cotangents = tuple(torch.cos(x) for x in want)
    torch.testing.assert_close(own_pull(cotangents), pull(cotangents), rtol=1e-10, atol=1e-11)
    zeros = torch.zeros_like(operands[5])
    torch.testing.assert_close(
        ssd(*operands[:5], chunk=chunk), recurrence(*operands[:5], zeros), rtol=1e-12, atol=1e-12
    )


def test_a_step_by_hand():
    """S = exp(dt a) S + dt x b^T with numbers: 1/2 * 2 + ln 2 * 3 * 5, read by c = 7."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    dt, a = torch.full((1, 1), math.log(2), dtype=torch.float64), torch.tensor([-1.0]).double()
    y, state = ssd_step(2 * one[..., None], 3 * one, dt, a, 5 * one, 7 * one)
    assert state.item() == pytest.approx(1 + 15 * math.log(2), rel=1e-15)
    assert y.item() == pytest.approx(7 * (1 + 15 * math.log(2)), rel=1e-15)


def formula(c):
    """The mixer token by token and head by head, with the convolution as a loop."""

    def project(params, u):
        y = torch.einsum("btd,d...->bt...", u, params["w"])
        return y + params["b"] if "b" in params else y

    def conv(params, x):
        width = params["w"].shape[-1]
        rows = []
        for t in range(x.shape[1]):
            y = torch.zeros_like(x[:, 0])
            for back in range(min(width, t + 1)):
                y = y + params["w"][..., width - 1 - back] * x[:, t - back]
            rows.append(y + params["b"] if "b" in params else y)
        return F.silu(torch.stack(rows, 1))

    def dense(params, u):
        z, x, b, cc = (project(params[n], u) for n in ("z", "x", "b", "c"))
        dt = torch.log1p(torch.exp(project(params["dt"], u) + params["dt_bias"]))
        x, b, cc = (conv(params["conv"][n], y) for n, y in (("x", x), ("b", b), ("c", cc)))
        state = torch.zeros(len(u), HEADS, HEAD_DIM, STATE, dtype=u.dtype)
        y, _ = recurrence(x, dt, -torch.exp(params["a_log"]), b, cc, state)
        g = (y + params["d"][:, None] * x) * z * torch.sigmoid(z)
        groups = g.reshape(*g.shape[:2], c.num_groups, -1)
        groups = groups / (groups.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()
        out = groups.reshape(g.shape) * params["norm"]["scale"]
        out = torch.einsum("bthp,hpd->btd", out, params["out"]["w"])
        return out + params["out"]["b"] if "b" in params["out"] else out

    return dense


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2), Mesh(tp=4)], ids=str)
@pytest.mark.parametrize(
    ("num_groups", "options"),
    [(1, {}), (2, {"bias": True}), (8, {"conv_bias": False})],
    ids=["one-group", "shared-groups", "own-groups"],
)
def test_mixer(agrees, draw, specs, randn, mesh, stream, num_groups, options):
    c = config(num_groups, **options)
    defs = mamba_defs(c, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
    whole = num_groups < mesh["tp"]
    args = (draw(defs), randn(BATCH, SEQ, EMBED))
    layer_specs = specs(defs, groups=None if whole else "tp")

    def layer(params, u):
        return mamba(params, u, c, stream=stream)

    agrees(layer, formula(c), args, mesh, (layer_specs, stream), stream)


@pytest.mark.parametrize("tp", [1, 4])
def test_steps_are_the_mixer(draw, specs, randn, tp):
    c = config(2)
    defs = mamba_defs(c, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
    params, u = draw(defs), randn(BATCH, SEQ, EMBED)
    layer_specs = specs(defs, groups=None if tp > 2 else "tp")

    def generate(params, u):
        cache, rows = mamba_cache(params, c, BATCH), []
        for t in range(SEQ):
            y, cache = mamba_step(params, u[:, t : t + 1], cache, c)
            rows.append(y)
        return torch.cat(rows, 1)

    got = ft.shard_map(generate, Mesh(tp=tp), (layer_specs, ft.P()), ft.P())(params, u)
    torch.testing.assert_close(got, formula(c)(params, u), rtol=1e-10, atol=1e-10)


def test_initial_steps_and_decays_are_as_published():
    """dt between 0.001 and 0.1 and a between -16 and -1 (the defaults of the authors' code)."""
    c = Mamba2Config(8, 256, 4)
    params = ft.init_params(
        ft.random.key(0), mamba_defs(c, stddev=0.02, out_stddev=0.02, dtype=torch.bfloat16)
    )
    steps, rates = F.softplus(params["dt_bias"]), params["a_log"].exp()
    assert steps.dtype == rates.dtype == torch.float32
    assert 1e-3 < steps.min() < 2e-3 < 5e-2 < steps.max() < 1e-1
    assert 1 < rates.min() < 2 < 15 < rates.max() < 16
    assert params["conv"]["x"]["w"].abs().max() <= 0.5


def test_what_does_not_fit_is_said(operands):
    x, dt, a, b, c, _ = operands
    with pytest.raises(ValueError, match="chunk=0"):
        ssd(x, dt, a, b, c, chunk=0)
    with pytest.raises(ValueError, match="4 heads and 3 groups"):
        ssd(x, dt, a, b[:, :, :1].repeat(1, 1, 3, 1), c[:, :, :1].repeat(1, 1, 3, 1), chunk=4)
