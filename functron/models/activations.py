"""How large the residual stream is after the embedding and after every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functron.models.config import GPTConfig
from functron.spmd import P
from functron.spmd import collectives as lax
from functron.spmd.spec import spec_axes
from functron.typing import Float, Tensor


def squares_of(x: Float[Tensor, "batch seq embed"]) -> Float[Tensor, ""]:
    """sum over tokens of mean(x^2), in float32 at least, without a derivative."""
    wide = lax.stop_gradient(x).to(torch.promote_types(x.dtype, torch.float32))
    return wide.square().mean(-1).sum()


def watched(layer: Callable) -> Callable:
    """`layer`, for `scan`, that returns with what it says the size of the stream that it makes."""

    def block(x: Tensor, row: tuple) -> tuple[Tensor, tuple[Any, Tensor]]:
        x, said = layer(x, row)
        return x, (said, squares_of(x))

    return block


def placed(before: Tensor | None, rows: Tensor, start: int, total: int) -> Tensor:
    """`before` (None: zeros) with `rows`, which are those from `start` on of `total`, added."""
    after = rows.new_zeros(total - start - rows.shape[0])
    mine = torch.cat([rows.new_zeros(start), rows, after])
    return mine if before is None else before + mine


def summed(squares: Tensor, x: Float[Tensor, "batch seq embed"], stream: P) -> dict[str, Tensor]:
    """The sums over all ranks' tokens, and how many tokens these are.

    One all-reduce of a number per layer.

    Args:
        squares: of `Watched`.
        x: the stream, for its shape.
        stream: its spec.
    """
    axes = spec_axes(stream)
    tokens = x.shape[0] * x.shape[1] * lax.axis_size(axes)
    count = torch.full((), tokens, dtype=torch.int64, device=x.device)
    return {"squares": lax.psum(lax.stop_gradient(squares), axes), "count": count}


def watched_names(config: GPTConfig) -> tuple[str, ...]:
    """What the rows of `Watched.squares` are of: ``embed``, ``blocks/0``, ``blocks/1``, ..."""
    stacks = config.stacks.items()
    return ("embed", *(f"{name}/{row}" for name, layers in stacks for row in range(len(layers))))
