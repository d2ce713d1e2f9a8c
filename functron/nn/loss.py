"""Vocabulary-parallel cross-entropy."""

from __future__ import annotations

import torch

from functron.ops.cross_entropy import log_sum_exp_and_target
from functron.spmd import collectives as lax
from functron.typing import Float, Int, Tensor

IGNORE_INDEX = -100


def cross_entropy(
    logits: Float[Tensor, "*batch columns"],
    targets: Int[Tensor, "*batch"],
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
    axis: str = "tp",
) -> Float[Tensor, "*batch"]:
    """loss_t = log sum_j exp(x_tj) - x_t,target + z_loss (log sum_j exp(x_tj))^2, per token.

    The logits stay split over `axis` (Shoeybi et al. 2019, section 3): ranks exchange three numbers
    per token. Columns from `vocab_size` on are padding and take no part. The z term is that of
    Chowdhery et al. 2022 (PaLM), section 5.

    Args:
        logits: ``[..., padded_vocab / n]``, this rank's columns.
        targets: ``[...]`` int64 in ``[0, vocab_size)``, or `ignore_index`.
        vocab_size: the number of real columns over all ranks.
        z_loss: weight of the squared log-normaliser.
        ignore_index: targets with this value give loss 0.

    Returns:
        ``[...]`` losses in float32 at least, the same on all ranks of `axis`. Collectives: one
        max and two sum all-reduces of one number per token; backward two.
    """
    columns = logits.shape[-1]
    first = lax.axis_index(axis) * columns
    padded = columns * lax.axis_size(axis) > vocab_size
    real = lax.global_index(columns, axis, device=logits.device) < vocab_size if padded else None
    counted = targets != ignore_index
    local_lse, local_target = log_sum_exp_and_target(logits, targets - first, real)
    top = lax.pmax(lax.stop_gradient(local_lse), axis)
    lse = lax.psum((local_lse - top).exp(), axis).log() + top
    loss = lse - lax.psum(local_target, axis)
    if z_loss:
        loss = loss + z_loss * lse.square()
    return torch.where(counted, loss, torch.zeros_like(loss))
