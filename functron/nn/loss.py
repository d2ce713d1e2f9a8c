"""Vocabulary-parallel log-softmax, and cross-entropy of logits or of a last matrix's inputs."""

from __future__ import annotations

import torch

from functron.core.typing import Float, Int, Tensor
from functron.ops.cross_entropy import (
    check_ids,
    linear_log_sum_exp_and_target,
    log_sum_exp_and_target,
)
from functron.ops.operations import AUTO, Kernels
from functron.spmd import collectives as lax

IGNORE_INDEX = -100
CHUNK_TOKENS = 1024
"""Tokens whose logits `linear_cross_entropy` has at a time: enough for full matrix products."""


def cross_entropy(
    logits: Float[Tensor, "*batch columns"],
    targets: Int[Tensor, "*batch"],
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
    axis: str = "tp",
    kernels: Kernels = AUTO,
) -> Float[Tensor, "*batch"]:
    """loss_t = log sum_j exp(x_tj) - x_t,target + z_loss (log sum_j exp(x_tj))^2, per token.

    The logits stay split over `axis` (Shoeybi et al. 2019, section 3): ranks exchange three numbers
    per token. Columns from `vocab_size` on are padding and take no part. The z term is that of
    Chowdhery et al. 2022 (PaLM), section 5.

    Args:
        logits: ``[..., padded_vocab / n]``, this rank's columns.
        targets: int64 in ``[0, vocab_size)``, or `ignore_index`, which gives loss 0.
        z_loss: weight of the squared log-normaliser.
        kernels: of ``"cross_entropy"``.

    Returns:
        Losses in float32 at least, the same on all ranks of `axis`. Collectives: one max and two
        sum all-reduces of one number per token; backward two.

    Raises:
        ValueError: a target is outside of the vocabulary; on CUDA a device-side assertion.
    """
    check_ids(targets, "targets", vocab_size, ignore_index)
    first, valid = _own_columns(logits.shape[-1], vocab_size, axis)
    statistics = log_sum_exp_and_target(logits, targets - first, valid, kernels=kernels)
    return _losses(*statistics, targets, z_loss, ignore_index, axis)


def log_softmax(
    logits: Float[Tensor, "*batch columns"], *, vocab_size: int, axis: str = "tp"
) -> Float[Tensor, "*batch columns"]:
    """y_tj = x_tj - log sum_i exp(x_ti), the log-probabilities of a vocabulary split over `axis`.

    For losses that need more of the distribution than `cross_entropy` does, such as distillation or
    the entropy: a sum over this rank's columns, then ``lax.psum(..., axis)``.

    Both are ``[..., padded_vocab / n]``, this rank's columns; the result is float32 at least.
    Columns from `vocab_size` on are padding: the lowest finite number, of which exp is 0 and which
    times 0 is 0, without a gradient. Collectives: one max and one sum all-reduce of one number per
    token; backward one.
    """
    _, valid = _own_columns(logits.shape[-1], vocab_size, axis)
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if valid is None:
        return x - _over_ranks(x.logsumexp(-1, keepdim=True), axis)
    real = torch.arange(x.shape[-1], device=x.device) < valid
    lowest = torch.finfo(x.dtype).min
    lse = _over_ranks(torch.where(real, x, lowest).logsumexp(-1, keepdim=True), axis)
    return torch.where(real, x - lse, lowest)


def linear_cross_entropy(
    x: Float[Tensor, "*batch embed"],
    w: Float[Tensor, "embed columns"],
    targets: Int[Tensor, "*batch"],
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
    axis: str = "tp",
    chunk_tokens: int = CHUNK_TOKENS,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "*batch"]:
    """``cross_entropy(column_parallel(x, w), targets)`` without ever having all of the logits.

    The logits of `chunk_tokens` tokens exist at a time, and are computed a second time in backward
    (see `functron.ops.cross_entropy`): work of the unembedding grows by a third, while the
    largest activation of a model with a large vocabulary goes. What ranks exchange is the same.

    Args:
        x: the same on all ranks of `axis`: call `gather_sequence` first, as for `column_parallel`.
        w: ``[embed, padded_vocab / n]``, this rank's columns, in any layout; ``table.mT`` of a tied
            table of embeddings.
        chunk_tokens: fewer take less memory; below a few hundred, matrix products are slow.

    Other arguments, results and errors are those of `cross_entropy`, and so are collectives.
    Backward besides, as of `column_parallel`: x's cotangent is the sum over `axis` of the ranks'
    results, one all-reduce of x's bytes where x was computed from replicated values, or the
    reduce-scatter of `gather_sequence`.

    Raises:
        ValueError: `chunk_tokens` is below 1.
    """
    check_ids(targets, "targets", vocab_size, ignore_index)
    first, valid = _own_columns(w.shape[1], vocab_size, axis)
    lse, target = linear_log_sum_exp_and_target(
        x.reshape(-1, x.shape[-1]), w, (targets - first).reshape(-1), valid,
        chunk_tokens=chunk_tokens, kernels=kernels,
    )  # fmt: skip
    lse, target = (value.view(targets.shape) for value in (lse, target))
    return _losses(lse, target, targets, z_loss, ignore_index, axis)


def _own_columns(
    columns: int, vocab_size: int, axis: str
) -> tuple[Tensor | int, Tensor | int | None]:
    """This rank's first column, and how many of its columns are no padding; None: all."""
    first = lax.axis_index(axis) * columns
    padded = columns * lax.axis_size(axis) > vocab_size
    return first, vocab_size - first if padded else None


def _over_ranks(local_lse: Tensor, axis: str) -> Tensor:
    """The log-sum-exp of all ranks' columns from that of this rank's."""
    top = lax.pmax(lax.stop_gradient(local_lse), axis)
    return lax.psum((local_lse - top).exp(), axis).log() + top


def _losses(
    local_lse: Tensor,
    local_target: Tensor,
    targets: Tensor,
    z_loss: float,
    ignore_index: int,
    axis: str,
) -> Tensor:
    """The losses of all columns, from statistics of this rank's."""
    lse = _over_ranks(local_lse, axis)
    loss = lse - lax.psum(local_target, axis)
    if z_loss:
        loss = loss + z_loss * lse.square()
    return torch.where(targets != ignore_index, loss, torch.zeros_like(loss))
