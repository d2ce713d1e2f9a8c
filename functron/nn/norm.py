"""Normalisation over the embedding dim, which is never split."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from functron.params import ParamDef, ones, zeros
from functron.typing import Float, Tensor

NormKind = Literal["rms", "layer"]


def norm_defs(
    size: int,
    kind: NormKind,
    *,
    axis: str | None,
    dtype: torch.dtype,
    zero_centered: bool = False,
) -> dict:
    """Defs ``{"scale"}`` of an RMSNorm, or ``{"scale", "bias"}`` of a LayerNorm, over `size`.

    The scale starts at 1; with `zero_centered` it is what is added to 1, and starts at 0.
    """
    start = zeros if zero_centered else ones
    defs = {"scale": ParamDef((size,), (axis,), start, dtype, decay=False)}
    if kind == "layer":
        defs["bias"] = ParamDef((size,), (axis,), zeros, dtype, decay=False)
    return defs


def rms_norm(
    x: Float[Tensor, "*batch embed"], scale: Float[Tensor, " embed"], *, eps: float
) -> Float[Tensor, "*batch embed"]:
    """y = x / sqrt(mean(x^2) + eps) * scale over the last dim (Zhang & Sennrich 2019, eq. 4).

    Args:
        x: ``[..., embed]``; computed in float32 at least, returned in its own dtype.
        scale: ``[embed]``.
    """
    return F.rms_norm(x, scale.shape, scale, eps)


def layer_norm(
    x: Float[Tensor, "*batch embed"],
    scale: Float[Tensor, " embed"],
    bias: Float[Tensor, " embed"],
    *,
    eps: float,
) -> Float[Tensor, "*batch embed"]:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last dim (Ba et al. 2016).

    Args:
        x: ``[..., embed]``.
        scale: ``[embed]``.
        bias: ``[embed]``.
    """
    return F.layer_norm(x, scale.shape, scale, bias, eps)


def norm(
    params: dict, x: Float[Tensor, "*batch embed"], *, eps: float, zero_centered: bool = False
) -> Float[Tensor, "*batch embed"]:
    """The norm whose parameters these are: LayerNorm where there is a bias, else RMSNorm.

    Args:
        params: as `norm_defs`.
        x: ``[..., embed]``.
        zero_centered: multiply by 1 + scale (Gemma; Megatron's zero-centered gamma).
    """
    scale, bias, dtype = params["scale"], params.get("bias"), x.dtype
    if zero_centered:
        # in bfloat16, 1 + scale would lose the digits that this parametrisation is there to keep
        wide = torch.promote_types(dtype, torch.float32)
        x, scale, bias = x.to(wide), 1 + scale.to(wide), None if bias is None else bias.to(wide)
    if bias is not None:
        return layer_norm(x, scale, bias, eps=eps).to(dtype)
    return rms_norm(x, scale, eps=eps).to(dtype)
