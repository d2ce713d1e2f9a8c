"""Normalisation over the embedding dim, which is never split."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from functron.params import ParamDef, ones, zeros
from functron.typing import Float, Tensor

NormKind = Literal["rms", "layer"]


def norm_defs(size: int, kind: NormKind, *, axis: str | None, dtype: torch.dtype) -> dict:
    """Defs ``{"scale"}`` of an RMSNorm, or ``{"scale", "bias"}`` of a LayerNorm, over `size`."""
    defs = {"scale": ParamDef((size,), (axis,), ones, dtype, decay=False)}
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
    params: dict, x: Float[Tensor, "*batch embed"], *, eps: float
) -> Float[Tensor, "*batch embed"]:
    """The norm whose parameters these are: LayerNorm where there is a bias, else RMSNorm."""
    if "bias" in params:
        return layer_norm(x, params["scale"], params["bias"], eps=eps)
    return rms_norm(x, params["scale"], eps=eps)
