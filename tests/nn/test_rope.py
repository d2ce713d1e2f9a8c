"""Rotary positions against rotations of complex numbers."""

from __future__ import annotations

import math

import pytest
import torch

from functron import nn

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
