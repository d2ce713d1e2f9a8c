"""Rotary position embedding (Su et al. 2021, eq. 34), in the half-split layout of Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from functron.typing import Float, Int, Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary wavelengths, for sequences longer than those of pretraining.

    Attributes:
        factor: how many times longer the longest wavelengths become.
        low_freq_factor: wavelengths above ``original_max_seq / low_freq_factor`` are stretched.
        high_freq_factor: wavelengths below ``original_max_seq / high_freq_factor`` are kept.
        original_max_seq: the sequence length of pretraining, in tokens.
        kind: ``"llama3"`` stretches long wavelengths alone (Grattafiori et al. 2024, section
            3.4.2); ``"linear"`` stretches all by `factor` and takes no notice of the other fields
            (Chen et al. 2023).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192
    kind: Literal["llama3", "linear"] = "llama3"


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dims: theta^(-2i / head_dim), float32 [head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    freqs = theta**-exponent
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
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
