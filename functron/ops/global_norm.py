"""Sums of squares, of which the norm of gradients is the root: close to float64 at any size.

A float32 sum of squares that one accumulator adds up loses 1e-3 beyond ten million elements, and
another amount on every sharding: torch's norms do that on CPUs. Here no float32 sum is of more than
a bounded number of terms, and what these give is added up in float64.
"""

from __future__ import annotations

import torch

from functron.ops.define import Gradient, Launch, define, packable, type_name

CHUNK = 32768
"""Elements that one block adds up; part of the definition of the result, as it sets the order."""

_THREADS = 256

_BLOCK = 512
"""Elements that `squares` adds up in float32: their sum is within 1e-6 also where all are equal, so
that rounding errors have one sign."""


def squares(x: torch.Tensor, start_dim: int = 0) -> torch.Tensor:
    """``sum(x**2)`` over the dims from `start_dim` on, in float64, in torch's operations.

    Within 1e-6 of the exact sum at any size; in one pass over x, and without a copy of it where its
    memory is dense. Elements are squared and added up in float32, by blocks of `_BLOCK` (float64
    where x is); so it overflows where elements are above 1e18. Works under every transform and
    compiled; no collectives.

    Args:
        x: any shape, floating point.
        start_dim: how many leading dims stay: 1 for each layer of a stack.
    """
    wide = _accumulator(x)
    own = sorted(range(start_dim, x.dim()), key=x.stride, reverse=True)  # as it lies in memory
    flat = x.permute(*range(start_dim), *own).flatten(start_dim) if own else x.unsqueeze(-1)
    blocks, rest = divmod(flat.shape[-1], _BLOCK)
    if not blocks:
        return _norm(flat, wide).to(torch.float64).square()
    head = flat.narrow(-1, 0, blocks * _BLOCK) if rest else flat
    norms = _norm(head.unflatten(-1, (blocks, _BLOCK)), wide)
    total = _norm(norms, torch.float64).square()
    if not rest:
        return total
    tail = _norm(flat.narrow(-1, blocks * _BLOCK, rest), wide)
    return total + tail.to(torch.float64).square()


def _norm(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the last dim, which fake tensors do not drop where its size is 1 (2.11)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).squeeze(-1)


def sum_of_squares(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum(x**2)``, and whether an element is not finite: two 0-dim tensors, on x's device.

    Accumulated in float32 (float64 where x is), in an order that is a function of the number of
    elements alone: the same bits on every run and every GPU, with any alignment. Nothing is read
    back to the host. Infinities and NaN go through to the sum, which also overflows where finite
    elements are above 1e19; the second result, 1.0 or 0.0, is of the elements themselves: what a
    loss scale goes by. Differentiable; no collectives.

    Args:
        x: any shape; bfloat16, float16, float32 or (its reference only) float64. One pass over it
            where it is dense, in the order of its memory.
    """
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    sums, flags = SUM_OF_SQUARES(x.permute(order).reshape(1, -1))
    return sums[0], flags[0]


def _kernel(launch: Launch, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, dim = x.shape
    x = x if dim <= 1 or x.stride(1) == 1 else x.contiguous()
    if not dim:
        return x.new_zeros(rows, dtype=torch.float32), x.new_zeros(rows, dtype=torch.float32)
    chunks = -(-dim // CHUNK)
    types = {"ELEMENT": type_name(x, "sum_of_squares")}
    parts, flags = (x.new_empty(rows * chunks, dtype=torch.float32) for _ in range(2))
    launch(
        "global_norm", "sum_of_squares", rows * chunks, _THREADS,
        x, parts, flags, dim, x.stride(0), chunks, int(packable(dim, x)), defines=types,
    )  # fmt: skip
    if chunks == 1:
        return parts, flags
    sums, any_flag = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    launch(
        "global_norm", "finish", rows, _THREADS, parts, flags, sums, any_flag, chunks, defines=types
    )
    return sums, any_flag


def _reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(_accumulator(x))
    return wide.square().sum(1), (~wide.isfinite()).any(1).to(wide.dtype)


def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    return x.new_empty(rows, dtype=_accumulator(x)), x.new_empty(rows, dtype=_accumulator(x))


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _batch(size: int, in_dims: tuple, args: tuple, op) -> tuple:
    x = args[0].movedim(in_dims[0], 0)
    sums, flags = op(x.reshape(-1, x.shape[-1]) if x.numel() else x.new_zeros(x[..., 0].numel(), 0))
    return (sums.reshape(size, -1), flags.reshape(size, -1)), (0, 0)


def _backward(saved, cotangents) -> tuple[torch.Tensor]:
    (x,) = saved
    return ((2 * x * cotangents[0][:, None]).to(x.dtype),)


SUM_OF_SQUARES = define(
    "sum_of_squares(Tensor x) -> (Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=_fake,
    batch=_batch,
    gradient=Gradient(backward=_backward, auxiliary=(1,)),
)
"""Of every row of x, [rows, dim]: the sum of squares and 1.0 where an element is not finite."""
