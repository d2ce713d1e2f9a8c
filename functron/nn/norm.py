"""Normalisation over the embedding dim, which is never split."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from functron.core.typing import Float, Tensor
from functron.ops.define import AUTO, Kernels
from functron.ops.norms import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from functron.params import ParamDef, ones, zeros

NormKind = Literal["rms", "layer", "bare_layer"]


def norm_defs(
    size: int,
    kind: NormKind,
    *,
    axis: str | None,
    dtype: torch.dtype,
    zero_centered: bool = False,
) -> dict:
    """Defs ``{"scale"}`` of an RMSNorm, or ``{"scale", "bias"}`` of a LayerNorm, over `size`.

    A "bare_layer" is a LayerNorm without parameters: ``{}``. The scale starts at 1; with
    `zero_centered` it is what is added to 1, and starts at 0.
    """
    if kind == "bare_layer":
        return {}
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
    params: dict,
    x: Float[Tensor, "*batch embed"],
    *,
    eps: float,
    zero_centered: bool = False,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "*batch embed"]:
    """The norm whose parameters these are: LayerNorm with a bias or nothing, RMSNorm with a scale.

    Args:
        params: as `norm_defs`; ``{}``: LayerNorm without scale and bias (OLMo; Groeneveld et al.
            2024), which no kernel computes.
        x: ``[..., embed]``.
        zero_centered: multiply by 1 + scale (Gemma; Megatron's zero-centered gamma).
        kernels: of ``"rms_norm"`` and ``"layer_norm"``.
    """
    if not params:
        return F.layer_norm(x, x.shape[-1:], None, None, eps)
    scale, bias, dtype = params["scale"], params.get("bias"), x.dtype
    if kernels.takes("rms_norm" if bias is None else "layer_norm", x, scale, bias):
        if bias is None:
            return RMS_NORM(x, scale, eps, zero_centered)[0]
        return LAYER_NORM(x, scale, bias, eps, zero_centered)[0]
    if zero_centered:
        # in bfloat16, 1 + scale would lose the digits that this parametrisation is there to keep
        wide = torch.promote_types(dtype, torch.float32)
        x, scale, bias = x.to(wide), 1 + scale.to(wide), None if bias is None else bias.to(wide)
    if bias is not None:
        return layer_norm(x, scale, bias, eps=eps).to(dtype)
    return rms_norm(x, scale, eps=eps).to(dtype)


def add_norm(
    params: dict,
    x: Float[Tensor, "*batch embed"],
    residual: Float[Tensor, "*batch embed"],
    *,
    eps: float,
    zero_centered: bool = False,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, "*batch embed"], Float[Tensor, "*batch embed"]]:
    """``(norm(x + residual), x + residual)``: what a residual stream is read as, and goes on as.

    By kernels in one pass over both. Arguments are those of `norm`.

    Args:
        residual: ``[..., embed]``, as x.
    """
    scale, bias = params.get("scale"), params.get("bias")
    op = "rms_norm" if bias is None else "layer_norm"
    alike = x.dtype == residual.dtype and x.shape == residual.shape
    if scale is not None and alike and kernels.takes(op, x, residual, scale, bias):
        if bias is None:
            return ADD_RMS_NORM(x, residual, scale, eps, zero_centered)[:2]
        return ADD_LAYER_NORM(x, residual, scale, bias, eps, zero_centered)[:2]
    total = x + residual
    return norm(params, total, eps=eps, zero_centered=zero_centered, kernels=kernels), total
