"""Cross-entropy's statistics of x w without the whole of x w: logits exist a chunk at a time.

Forward computes the logits of some tokens, keeps two numbers of each, and goes on to the next.
Backward computes them again, but those of all tokens in some columns: as the log of the sum is
known, a column's softmax needs no other column, and so its part of dw is one matrix product over
all tokens, accumulated where matrix products are, while dx, the smaller, is summed up in float32.
Rejected: chunks of tokens in backward too, as Liger-Kernel has it (Hsu et al. 2024): the sum of dw
is then as large as w in float32, and is read and written once per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from functron import compat
from functron.ops.cross_entropy import log_sum_exp_and_target, logits_cotangent
from functron.ops.kernels import AUTO, Kernels
from functron.scopes import in_phase
from functron.transforms.custom_vjp import custom_vjp
from functron.typing import Float, Int, Tensor

_ALIGNMENT = 8  # columns of a block: 16 bytes in half precision


def linear_log_sum_exp_and_target(
    x: Float[Tensor, "tokens embed"],
    w: Float[Tensor, "embed vocab"],
    ids: Int[Tensor, " tokens"],
    valid: Int[Tensor, ""] | int | None,
    *,
    chunk_tokens: int,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """``log_sum_exp_and_target(x @ w, ids, valid)``, with few of the logits alive at a time.

    Between forward and backward live x, w, ids and one number per token. Both make at most the
    logits of `chunk_tokens` tokens, or as many, or as many as x has elements; backward makes them
    once more, which is a third more work than x w and its derivatives, and overwrites them with
    their cotangents where nothing traces or transforms it. Derivatives of derivatives, and forward
    mode, keep all.

    Args:
        x: ``[N, D]``.
        w: ``[D, V]`` in any layout; for tied embeddings ``table.mT``.
        ids: int64 ``[N]``; see `log_sum_exp_and_target`.
        valid: how many columns count, as there.
        chunk_tokens: how many tokens' logits exist at a time in forward.
        kernels: of ``"cross_entropy"``.

    Returns:
        Two tensors ``[N]`` in float32 at least. No collectives, in backward neither: dx is that of
        these columns alone, to be summed over the ranks that split them.

    Raises:
        ValueError: `chunk_tokens` is below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(
            f"linear_log_sum_exp_and_target: got chunk_tokens={chunk_tokens}; wanted 1 or more; "
            "fix: 1024, or cross_entropy(x @ w, ...) to keep all logits"
        )

    def forward(x, w, ids, valid):
        parts = [
            log_sum_exp_and_target(x[rows] @ w, ids[rows], valid, kernels=kernels)
            for rows in _slices(x.shape[0], chunk_tokens)
        ]
        lse, target = (torch.cat(column) for column in zip(*parts, strict=True))
        return (lse, target), (x, w, ids, valid, lse)

    def backward(residuals, cotangents):
        x, w, ids, valid, lse = residuals
        d_lse, d_target = cotangents
        pieces = -(-x.shape[0] // chunk_tokens)
        moved = _backward(x, w, ids, valid, lse, d_lse, d_target, pieces, kernels)
        return *moved, None, None

    if compat.pushing_forward():  # which custom_vjp has no rule for
        return forward(x, w, ids, valid)[0]
    return custom_vjp(lambda *args: forward(*args)[0], forward, backward)(x, w, ids, valid)


def _slices(size: int, step: int) -> Iterator[slice]:
    """Consecutive parts of `size`; one where it is 0."""
    return (slice(start, min(start + step, size)) for start in range(0, max(size, 1), step))


def _width(x: Tensor, columns: int, pieces: int) -> int:
    """Columns of a block, for so many blocks or fewer: a block costs no less than x does."""
    width = max(-(-columns // max(pieces, 1)), min(x.shape[1], columns))
    return -(-width // _ALIGNMENT) * _ALIGNMENT


def _backward(
    x: Tensor,
    w: Tensor,
    ids: Tensor,
    valid: Tensor | int | None,
    lse: Tensor,
    d_lse: Tensor,
    d_target: Tensor,
    pieces: int,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """The cotangents of x and w, in at most `pieces` blocks of columns."""
    alone = compat.unobserved()
    dw = torch.empty_like(w) if alone else None
    dx, dws = None, []
    for columns in _slices(w.shape[1], _width(x, w.shape[1], pieces)):
        part = w[:, columns]
        with in_phase("recompute"):
            logits = x @ part
        moved = logits_cotangent(
            d_lse, d_target, logits, ids - columns.start, lse,
            None if valid is None else valid - columns.start, overwrite=alone, kernels=kernels,
        )  # fmt: skip
        more = moved @ part.mT
        dx = _upcast(more) if dx is None else dx.add_(more) if alone else dx + more
        if dw is None:
            dws.append(x.mT @ moved)
        else:
            torch.mm(x.mT, moved, out=dw[:, columns])
    assert dx is not None
    return dx.to(x.dtype), torch.cat(dws, 1) if dw is None else dw


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
