"""Experts: as many feed-forward layers as there are, in three stacked weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, cast, get_args

import torch

from functron.core.errors import nearest
from functron.core.typing import Float, Int, Tensor
from functron.nn.mlp import ACTIVATIONS, Activation
from functron.ops.define import AUTO, Kernels
from functron.ops.glu import GLU
from functron.ops.grouped_matmul import grouped_matmul
from functron.params import Normal, ParamDef, zeros

ExpertActivation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "clamped_swiglu"]
"""Those of `nn.mlp`, and that of GPT-OSS, which needs a gate; see `clamped_swiglu`."""

_LIMIT, _SLOPE = 7.0, 1.702
_BIAS_WIDTH = 8  # the inner dim of a product with ones: whole 16 bytes for kernels


def expert_defs(
    num_experts: int,
    embed_dim: int,
    expert_dim: int,
    *,
    gated: bool,
    bias: bool,
    stddev: float,
    out_stddev: float,
    dtype: torch.dtype,
) -> dict:
    """Defs ``{"up", "gate"?, "down"}``, each ``{"w": [E, in, out], "b"?: [E, out]}``.

    The hidden dim has the logical axis "expert_mlp": split by a tensor-parallel axis (over which
    tokens are not), each rank holds a part of every one of its experts.
    """

    def layer(sizes: tuple[int, int], axes: tuple[str, str], stddev: float) -> dict:
        w = ParamDef((num_experts, *sizes), ("expert", *axes), Normal(stddev), dtype)
        if not bias:
            return {"w": w}
        b = ParamDef((num_experts, sizes[1]), ("expert", axes[1]), zeros, dtype, decay=False)
        return {"w": w, "b": b}

    def widen() -> dict:
        return layer((embed_dim, expert_dim), ("embed", "expert_mlp"), stddev)

    defs = {
        "up": widen(),
        "down": layer((expert_dim, embed_dim), ("expert_mlp", "embed"), out_stddev),
    }
    if gated:
        defs["gate"] = widen()
    return defs


def clamped_swiglu(gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"]) -> Tensor:
    """(u + 1) g sigmoid(1.702 g), with g = min(gate, 7) and u = up within [-7, 7] (GPT-OSS)."""
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return (up + 1) * gate * (_SLOPE * gate).sigmoid()


def _times(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: act(gate) * up


GATED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        **{name: _times(act) for name, act in ACTIVATIONS.items()},
        "clamped_swiglu": clamped_swiglu,
    }
)
"""The hidden features of gated experts, of (gate, up)."""


def check_activation(activation: str, *, gated: bool) -> None:
    """Refuse an activation that is unknown, or that needs a gate where there is none.

    Raises:
        ValueError: with the known ones.
    """
    known = GATED if gated else get_args(Activation)
    if activation not in known:
        why = "" if activation not in GATED else " (it multiplies a gate, and there is none)"
        raise ValueError(
            f"experts: got activation {activation!r}{why}; {nearest(activation, known)}"
        )


def experts(
    params: dict,
    rows: Float[Tensor, "rows embed"],
    sizes: Int[Tensor, " experts"],
    *,
    activation: ExpertActivation,
    parts: int = 1,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "rows embed"]:
    """y = act(x up) down, or (act(x gate) * (x up)) down, by the expert of each row.

    Args:
        params: this rank's part of `expert_defs`.
        rows: ``[R, embed]``, sorted by expert.
        sizes: int64 ``[E]``, how many rows each of this rank's experts has.
        activation: one of `ACTIVATIONS`, or "clamped_swiglu" for gated experts.
        parts: among how many ranks the hidden dim is split. Their results are then parts of a sum,
            and each adds its part of the last bias.
        kernels: of ``"glu"``.

    Returns:
        ``[R, embed]``; zeros in rows that belong to no expert. No collectives.

    Raises:
        ValueError: see `check_activation`.
    """
    check_activation(activation, gated="gate" in params)
    up = _linear(params["up"], rows, sizes)
    if "gate" in params:
        gate = _linear(params["gate"], rows, sizes)
        by_kernel = kernels.takes("glu", gate, up)
        hidden = GLU(gate, up, activation) if by_kernel else GATED[activation](gate, up)
    else:
        hidden = ACTIVATIONS[cast(Activation, activation)](up)
    return _linear(params["down"], hidden, sizes, parts)


def _linear(layer: dict, rows: Tensor, sizes: Tensor, parts: int = 1) -> Tensor:
    y = grouped_matmul(rows, layer["w"], sizes)
    if "b" not in layer:
        return y
    # as a product with ones: no row outside of all groups gets one, and its gradient is a sum of
    # rows by group, in a fixed order
    bias = layer["b"].unsqueeze(1) / parts
    bias = torch.nn.functional.pad(bias, (0, 0, 0, _BIAS_WIDTH - 1))
    return y + grouped_matmul(rows.new_ones(rows.shape[0], _BIAS_WIDTH), bias, sizes)
