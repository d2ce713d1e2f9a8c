"""Vmap rules of registered ops, for `functron.ops.define.define`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def one_by_one(size: int, in_dims: Sequence, args: Sequence, op: Callable) -> tuple[Any, Any]:
    """The op called once for each element of the mapped dim, results stacked: always right."""
    calls = [
        op(*[x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)])
        for i in range(size)
    ]
    if isinstance(calls[0], torch.Tensor):
        return torch.stack(calls), 0
    return tuple(torch.stack(column) for column in zip(*calls, strict=True)), (0,) * len(calls[0])


def of_rows(whole: Sequence[int]) -> Callable:
    """The rule of an op whose operands are rows, except those at the positions `whole`.

    Rows are independent of each other, and have any number of dims in front: the mapped dim becomes
    the first of these, unless an operand that all rows share is mapped.
    """

    def rule(size: int, in_dims: Sequence, args: Sequence, op: Callable) -> tuple[Any, Any]:
        if any(in_dims[i] is not None for i in whole):
            return one_by_one(size, in_dims, args, op)
        folded = [
            x if i in whole or not isinstance(x, torch.Tensor) else leading(x, dim, size)
            for i, (x, dim) in enumerate(zip(args, in_dims, strict=True))
        ]
        out = op(*folded)
        return out, (0,) * len(out) if isinstance(out, tuple) else 0

    return rule


def leading(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """`x` with its mapped dim first; expanded where it is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
