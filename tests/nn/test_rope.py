"""Rotary positions against rotations of complex numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from jaxtyping import config as annotations
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from functron import nn
from functron.nn.attention import rope_frequencies

THETA, HEAD_DIM = 10000.0, 8


def rotations(positions, head_dim, theta, change=lambda frequency: frequency):
    """e^(i position theta^(-2j/d)) for every position and pair, in double precision."""
    return torch.tensor(
        [
            [
                complex(math.cos(angle), math.sin(angle))
                for j in range(head_dim // 2)
                for angle in [position * change(theta ** (-2 * j / head_dim))]
            ]
            for position in positions
        ],
        dtype=torch.complex128,
    )


def stretched(scaling):
    """Llama 3.1's rule for one frequency, written with branches."""

    def change(frequency):
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.original_max_seq / scaling.high_freq_factor:
            return frequency
        if wavelength > scaling.original_max_seq / scaling.low_freq_factor:
            return frequency / scaling.factor
        turns = scaling.original_max_seq / wavelength
        smooth = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return ((1 - smooth) / scaling.factor + smooth) * frequency

    return change


def table(positions, head_dim=HEAD_DIM, theta=THETA, scaling=None, dtype=torch.float64):
    return nn.rope_table(torch.tensor(positions), head_dim, theta, scaling, dtype)


@pytest.mark.parametrize("head_dim", [2, 8, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_table(head_dim, theta):
    positions = [0, 1, 2, 17, 63]
    cos, sin = table(positions, head_dim, theta)
    expected = rotations(positions, head_dim, theta)
    torch.testing.assert_close(torch.complex(cos, sin), expected, rtol=0, atol=2e-5)
    assert cos.shape == (5, head_dim // 2)
    assert cos[0].eq(1).all()
    assert sin[0].eq(0).all()


@pytest.mark.parametrize(
    "scaling",
    [
        nn.RopeScaling(),
        nn.RopeScaling(factor=32.0),
        nn.RopeScaling(4.0, low_freq_factor=2.0, high_freq_factor=8.0, original_max_seq=512),
    ],
)
def test_scaling(scaling):
    positions = [0, 1, 5, 60]
    change = stretched(scaling)
    kinds = {
        round(change(f) / f * scaling.factor, 6)
        for f in (500000.0 ** (-2 * j / 128) for j in range(64))
    }
    assert {1.0, scaling.factor} < kinds  # some kept, some stretched, some between
    cos, sin = table(positions, 128, 500000.0, scaling)
    expected = rotations(positions, 128, 500000.0, change)
    torch.testing.assert_close(torch.complex(cos, sin), expected, rtol=0, atol=2e-5)


def test_linear_scaling():
    positions = [0, 1, 5, 60]
    cos, sin = table(positions, scaling=nn.RopeScaling(factor=4.0, kind="linear"))
    expected = rotations([position / 4 for position in positions], HEAD_DIM, THETA)
    torch.testing.assert_close(torch.complex(cos, sin), expected, rtol=0, atol=2e-5)


def test_far_positions_stay_within_float32():
    positions = [8191, 131071]
    cos, sin = table(positions)
    # an angle of p radians is rounded to p 2^-24, and its frequency with the same relative error
    errors = (torch.complex(cos, sin) - rotations(positions, HEAD_DIM, THETA)).abs().amax(1)
    assert errors[0] < 8191 * 2**-23
    assert errors[1] < 131071 * 2**-23


def test_apply_rotates_complex_pairs():
    x = torch.randn(2, 5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).double()
    angles = torch.randn(5, HEAD_DIM // 2, dtype=torch.float64)
    rotated = nn.apply_rope(x, (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)  # the half-split layout: x_i pairs with x_(i + d/2)
    expected = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(
        rotated, torch.cat([expected.real, expected.imag], -1), rtol=1e-12, atol=1e-12
    )


def test_scores_depend_on_distances_only():
    q, k = torch.randn(2, HEAD_DIM, generator=torch.Generator().manual_seed(0)).double()

    def score(at_q, at_k):
        rotated = [
            nn.apply_rope(x.view(1, 1, 1, -1), table([position]))
            for x, position in ((q, at_q), (k, at_k))
        ]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(9, 4), score(25, 20), rtol=1e-5, atol=1e-5)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-2


def test_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = table([3], dtype=dtype)
        assert cos.dtype == sin.dtype == dtype
    # computed in float32 and rounded once, although bfloat16 cannot hold position 1001
    cos, _ = table([1001], dtype=torch.bfloat16)
    exact = rotations([1001], HEAD_DIM, THETA).real
    torch.testing.assert_close(cos.double(), exact, rtol=2**-8, atol=1e-4)


# --- yarn

YARN = nn.RopeScaling(factor=40.0, original_max_seq=4096, kind="yarn")
YARNS = {
    "plain": YARN,
    "deepseek-v3": replace(YARN, mscale=1.0, mscale_all_dim=1.0),
    "deepseek-v2": replace(YARN, mscale=0.707, mscale_all_dim=0.707),
    "uneven": replace(YARN, mscale=1.3, mscale_all_dim=0.707),
    "one mscale": replace(YARN, mscale=0.8),
    "gpt-oss": replace(YARN, factor=32.0, truncate=False),
    "short": replace(YARN, factor=4.0, original_max_seq=64, beta_fast=4.0, beta_slow=2.0),
    "step": replace(YARN, original_max_seq=512, beta_fast=3.0, beta_slow=3.0, truncate=False),
    "given": replace(YARN, attention_factor=1.7, mscale=1.0, mscale_all_dim=0.5),
    "no longer": replace(YARN, factor=1.0),
}


@pytest.mark.parametrize("name", YARNS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (64, 150000.0), (8, 10000.0)])
def test_yarn_against_transformers(name, head_dim, theta):
    scaling = YARNS[name]
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_seq,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
        "mscale": scaling.mscale or None,
        "mscale_all_dim": scaling.mscale_all_dim or None,
        "attention_factor": scaling.attention_factor or None,
    }
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        rope_parameters=rope,
        max_position_embeddings=int(scaling.factor * scaling.original_max_seq),
    )
    freqs, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = rope_frequencies(head_dim, theta, scaling, torch.device("cpu"))
    torch.testing.assert_close(ours, freqs, rtol=2e-6, atol=0)
    assert scaling.table_factor == pytest.approx(factor, rel=1e-15)
    cos, sin = table([0, 3, 50], head_dim, theta, scaling)
    angles = torch.tensor([0.0, 3.0, 50.0])[:, None] * freqs
    torch.testing.assert_close(cos, (factor * angles.cos()).double(), rtol=0, atol=2e-5)
    torch.testing.assert_close(sin, (factor * angles.sin()).double(), rtol=0, atol=2e-5)
    whole = yarn_apply_mscale(rope, 1.0)
    assert scaling.softmax_factor == pytest.approx(whole, rel=1e-15)


def test_yarn_keeps_what_turns_often_and_stretches_what_turns_seldom():
    """Over 4096 positions pairs below 11 turn more than 32 times, and those above 23 less than once."""
    freqs = rope_frequencies(64, 10000.0, YARN, torch.device("cpu")).double()
    plain = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    turns = 4096 * plain / (2 * math.pi)
    assert turns[10] > 32 > turns[11]
    assert turns[22] > 1 > turns[23]
    torch.testing.assert_close(freqs[:11], plain[:11], rtol=1e-6, atol=0)
    torch.testing.assert_close(freqs[23:], plain[23:] / 40, rtol=1e-6, atol=0)
    ramp = (torch.arange(10, 24) - 10) / 13  # rounded outwards
    between = plain[10:24] * (1 - ramp) + plain[10:24] / 40 * ramp
    torch.testing.assert_close(freqs[10:24], between, rtol=1e-6, atol=0)


def test_other_scalings_have_no_factors():
    for scaling in (
        nn.RopeScaling(),
        nn.RopeScaling(kind="linear", mscale=1.0, mscale_all_dim=1.0),
    ):
        assert scaling.table_factor == scaling.softmax_factor == 1


# --- packed documents, and the other layout


@pytest.mark.parametrize("interleaved", [False, True])
def test_samples_with_positions_of_their_own(interleaved):
    positions = [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    x = torch.randn(2, 5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).double()
    cos, sin = table(positions)
    assert cos.shape == (2, 5, HEAD_DIM // 2)
    rotated = nn.apply_rope(x, (cos, sin), interleaved=interleaved)
    for row in range(2):
        alone = nn.apply_rope(x[row : row + 1], table(positions[row]), interleaved=interleaved)
        assert torch.equal(rotated[row : row + 1], alone)


def test_interleaved_pairs():
    x = torch.randn(2, 5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).double()
    angles = torch.randn(5, HEAD_DIM // 2, dtype=torch.float64)
    rotated = nn.apply_rope(x, (angles.cos(), angles.sin()), interleaved=True)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(
        rotated, torch.view_as_real(expected).flatten(-2), rtol=1e-12, atol=1e-12
    )


def test_rotations_of_the_tape_alone_have_derivatives_of_any_order():
    x = torch.randn(2, 5, 3, HEAD_DIM, dtype=torch.float64).requires_grad_()
    turns = rotations(range(5), HEAD_DIM, THETA)
    table = turns.real.contiguous(), turns.imag.contiguous()

    def turned(x):
        return nn.apply_rope(x, table)

    assert type(turned(x).grad_fn).__name__ == "_RotatedHalvesBackward"
    pairs = torch.complex(*x.chunk(2, -1)) * turns.unsqueeze(-2)
    torch.testing.assert_close(turned(x), torch.cat([pairs.real, pairs.imag], -1))
    assert torch.autograd.gradcheck(turned, (x,))
    assert torch.autograd.gradgradcheck(turned, (x,))


def test_an_unknown_scaling_is_refused():
    """It was that of Llama 3 in silence."""
    annotations.update("jaxtyping_disable", True)  # which refuses it first, in tests alone
    with pytest.raises(ValueError, match=r"kind: got 'yarm'; wanted .*'yarn'"):
        nn.RopeScaling(kind="yarm")
