"""Rotary position embedding (Su et al. 2021, eq. 34), with what stretches it to longer sequences.

Pairs of dims are (x_i, x_{i + d/2}), the half-split layout of Llama, or (x_{2i}, x_{2i+1}), the
interleaved one of the paper and of DeepSeek. A model's weights belong to one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from functron.core.typing import Float, Int, Tensor
from functron.ops.define import AUTO, Kernels
from functron.ops.qk_norm_rope import QK_NORM_ROPE

_SEVERAL = 3  # dims of positions, where a token has several


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary wavelengths, for sequences longer than those of pretraining.

    Attributes:
        factor: how many times longer the longest wavelengths become.
        low_freq_factor: wavelengths above ``original_max_seq / low_freq_factor`` are stretched.
        high_freq_factor: wavelengths below ``original_max_seq / high_freq_factor`` are kept.
        original_max_seq: the sequence length of pretraining, in tokens.
        kind: ``"llama3"`` stretches long wavelengths alone (Grattafiori et al. 2024, section
            3.4.2); ``"yarn"`` those that turn seldom, and makes attention sharper (Peng et al.
            2023, section 3; DeepSeek-V3, GPT-OSS); ``"linear"`` stretches all by `factor` and takes
            no notice of the other fields (Chen et al. 2023).
        beta_fast: yarn keeps wavelengths that turn more often than this in `original_max_seq`.
        beta_slow: yarn stretches by `factor` those that turn less often.
        mscale: together with `mscale_all_dim`, yarn multiplies cos and sin by m(mscale) /
            m(mscale_all_dim), where m(s) = 0.1 s ln(factor) + 1; if one is 0, by m(1).
        mscale_all_dim: see `mscale` and `softmax_factor`.
        truncate: yarn rounds the first and last pair of dims that it blends outwards to whole ones
            (GPT-OSS does not).
        attention_factor: yarn multiplies cos and sin by this instead; 0: by what `mscale` says.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192
    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float = 0.0

    @property
    def table_factor(self) -> float:
        """The factor of cos and sin: scores of rotated dims by its square."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)
        return self._sharper(1.0)

    @property
    def softmax_factor(self) -> float:
        """DeepSeek's factor of the scores of all dims: m(mscale_all_dim)^2; see `mscale`."""
        return self._sharper(self.mscale_all_dim) ** 2 if self.kind == "yarn" else 1.0

    def _sharper(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


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
    if scaling.kind == "yarn":
        kept = _yarn_kept(head_dim, theta, scaling, device)
        return freqs / scaling.factor * (1 - kept) + freqs * kept
    wavelength = 2 * math.pi / freqs
    low = scaling.original_max_seq / scaling.low_freq_factor
    high = scaling.original_max_seq / scaling.high_freq_factor
    blend = (scaling.original_max_seq / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = (1 - blend) * freqs / scaling.factor + blend * freqs
    stretched = torch.where(wavelength > low, freqs / scaling.factor, smooth)
    return torch.where(wavelength < high, freqs, stretched)


def _yarn_kept(head_dim: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """How much of each pair's frequency yarn keeps, from 1 to 0: a ramp over pairs (section 3.2).

    Pair i turns t times in the sequences of pretraining where theta^(2i / d) is original_max_seq /
    (2 pi t): the ramp begins at the pair that turns `beta_fast` times, and ends at `beta_slow`.
    """

    def pair(turns: float) -> float:
        wavelength = scaling.original_max_seq / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    width = last - first if last != first else 1e-3  # a step; as small as where this comes from
    return 1 - ((pairs - first) / width).clamp(0, 1)


def rope_table(
    positions: Int[Tensor, "*places"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
    sections: Sequence[int] = (),
) -> tuple[Float[Tensor, "*rows seq half"], Float[Tensor, "*rows seq half"]]:
    """(cos, sin) of position times frequency, times yarn's factor; computed in float32.

    Args:
        positions: int64 ``[seq]``, or ``[batch, seq]`` where samples differ (packed documents), or
            ``[batch, seq, sections]`` where tokens have several.
        head_dim: the dims that are rotated.
        theta: the longest wavelength is about 2 pi theta.
        scaling: stretches wavelengths.
        dtype: of the result.
        sections: how many pairs of dims, one after the other, turn by each of a token's positions
            (Qwen2-VL, section 2.1: time, height and width).

    Returns:
        Two of ``[seq, head_dim / 2]`` or ``[batch, seq, head_dim / 2]``.
    """
    freqs = rope_frequencies(head_dim, theta, scaling, positions.device)
    places = positions.to(torch.float32)
    if positions.dim() == _SEVERAL:  # that of each pair
        each = zip(places.unbind(-1), sections, strict=True)
        places = torch.cat([x.unsqueeze(-1).expand(*x.shape, size) for x, size in each], -1)
    else:
        places = places.unsqueeze(-1)
    angles = places * freqs
    factor = 1.0 if scaling is None else scaling.table_factor
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def apply_rope(
    x: Float[Tensor, "batch seq heads head_dim"],
    table: tuple[Float[Tensor, "*rows seq half"], Float[Tensor, "*rows seq half"]],
    *,
    interleaved: bool = False,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "batch seq heads head_dim"]:
    """Rotate each pair of dims by its angle.

    Args:
        x: ``[batch, seq, heads, head_dim]``.
        table: cos and sin of `rope_table` for the same positions, of each sample or of all.
        interleaved: pairs are (x_{2i}, x_{2i+1}), as in DeepSeek's models; otherwise (x_i, x_{i +
            d/2}), as in Llama.
        kernels: of ``"qk_norm_rope"``.
    """
    if kernels.takes("qk_norm_rope", x, *table):
        # keys of no heads
        return QK_NORM_ROPE(x, x[..., :0, :], None, None, *table, 0.0, False, interleaved)[0]
    cos, sin = (part.unsqueeze(-2) for part in table)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
