"""Rotary position embedding (Su et al. 2021, eq. 34), in the half-split layout of Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from functron.typing import Float, Int, Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of low frequencies (Grattafiori et al. 2024, section 3.4.2).

    Attributes:
        factor: how many times longer the longest wavelengths become.
        low_freq_factor: wavelengths above ``original_max_seq / low_freq_factor`` are stretched.
        high_freq_factor: wavelengths below ``original_max_seq / high_freq_factor`` are kept.
        original_max_seq: the sequence length of pretraining, in tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dims: theta^(-2i / head_dim), float32 [head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    freqs = theta**-exponent
    if scaling is None:
        return freqs
    wavelength = 2 * math.pi / freqs
    low = scaling.original_max_seq / scaling.low_freq_factor
    high = scaling.original_max_seq / scaling.high_freq_factor
    blend = (scaling.original_max_seq / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = (1 - blend) * freqs / scaling.factor + blend * freqs
    stretched = torch.where(wavelength > low, freqs / scaling.factor, smooth)
    return torch.where(wavelength < high, freqs, stretched)


def rope_table(
    positions: Int[Tensor, " seq"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "seq half"], Float[Tensor, "seq half"]]:
    """(cos, sin) of position times frequency, each ``[seq, head_dim / 2]``; computed in float32."""
    freqs = rope_frequencies(head_dim, theta, scaling, positions.device)
    angles = positions.to(torch.float32).unsqueeze(-1) * freqs
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(
    x: Float[Tensor, "batch seq heads head_dim"],
    table: tuple[Float[Tensor, "seq half"], Float[Tensor, "seq half"]],
) -> Float[Tensor, "batch seq heads head_dim"]:
    """Rotate each pair (x_i, x_{i + d/2}) by its angle.

    Args:
        x: ``[batch, seq, heads, head_dim]``.
        table: cos and sin of `rope_table`, for the same positions.
    """
    cos, sin = (part.unsqueeze(-2) for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
