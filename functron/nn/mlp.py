"""Tensor-parallel feed-forward layers, plain and gated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch.nn import functional as F

from functron.core.typing import Float, Tensor
from functron.nn.linear import column_parallel, gather_sequence, linear_defs, row_parallel, weights
from functron.ops.define import AUTO, Kernels
from functron.ops.glu import GLU
from functron.spmd.spec import P

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "silu": F.silu,
    }
)


def mlp_defs(
    embed_dim: int,
    mlp_dim: int,
    *,
    gated: bool,
    bias: bool,
    stddev: float,
    out_stddev: float,
    dtype: torch.dtype,
) -> dict:
    """Defs ``{"up", "gate"?, "down"}``, each ``{"w", "b"?}``."""

    def widen() -> dict:
        return linear_defs(
            (embed_dim, mlp_dim),
            ("embed", "mlp"),
            stddev=stddev,
            bias=(mlp_dim,) if bias else None,
            bias_axes=("mlp",),
            dtype=dtype,
        )

    defs = {
        "up": widen(),
        "down": linear_defs(
            (mlp_dim, embed_dim),
            ("mlp", "embed"),
            stddev=out_stddev,
            bias=(embed_dim,) if bias else None,
            bias_axes=("embed",),
            dtype=dtype,
        ),
    }
    if gated:
        defs["gate"] = widen()
    return defs


def mlp(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    *,
    activation: Activation,
    stream: P,
    axis: str = "tp",
    kernels: Kernels = AUTO,
) -> Float[Tensor, "batch seq embed"]:
    """y = act(x up) down, or (act(x gate) * (x up)) down where there is a gate (Shazeer 2020).

    Args:
        params: this rank's part of `mlp_defs`.
        x: ``[batch, seq, embed]`` with spec `stream`.
        activation: one of `ACTIVATIONS`.
        kernels: of ``"glu"``.

    Returns:
        ``[batch, seq, embed]`` with spec `stream`. Collectives: one all-reduce forward and one
        backward; with a split sequence, all-gather and reduce-scatter each.
    """
    x = gather_sequence(x, stream, axis)
    act = ACTIVATIONS[activation]
    up = column_parallel(x, *weights(params["up"]))
    if "gate" in params:
        gate = column_parallel(x, *weights(params["gate"]))
        by_kernel = kernels.takes("glu", gate, up)
        hidden = GLU(gate, up, activation) if by_kernel else act(gate) * up
    else:
        hidden = act(up)
    return row_parallel(hidden, *weights(params["down"]), stream=stream, axis=axis)
