"""Dropout whose mask is the same on every mesh."""

from __future__ import annotations

import torch

from functron.core import random
from functron.core.typing import Float, Int, Key, Tensor
from functron.nn.embedding import stream_positions
from functron.nn.linear import SEQ_DIM, sequence_axes
from functron.spmd import collectives as lax
from functron.spmd.spec import P


def dropout(
    x: Float[Tensor, "batch seq *features"],
    key: Key | None,
    *,
    rate: float,
    rows: Int[Tensor, " batch"],
    stream: P,
    positions: Int[Tensor, " whole_seq"] | None = None,
) -> Float[Tensor, "batch seq *features"]:
    """y = x * mask / (1 - rate), mask ~ Bernoulli(1 - rate) (Srivastava et al. 2014).

    The mask is a function of the key and of the *global* position of each element, so data,
    sequence and microbatch splits all see the same one. Each rank draws only its own elements.

    Args:
        x: ``[batch, seq, embed]`` with spec `stream`.
        key: a key, or None for no dropout (evaluation).
        rate: the fraction dropped; 0 is the identity.
        rows: ``[batch]`` int64, the index of each sample within the global batch.
        stream: the spec of x.
        positions: as in `stream_positions`, of places in the sample and not in its documents.

    Raises:
        ValueError: the rate is not in [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: got rate={rate}; wanted at least 0 and below 1")
    if key is None or rate == 0:
        return x
    seq = x.shape[SEQ_DIM] * lax.axis_size(sequence_axes(stream))
    # the batch size does not enter the numbers: the first dim is the slowest of the counter
    shape = (x.shape[0], seq, *x.shape[SEQ_DIM + 1 :])
    index = (rows, stream_positions(x, stream, positions), *[None] * (x.dim() - 2))
    keep = random.bernoulli(key, 1 - rate, shape, index=index)
    return torch.where(keep, x / (1 - rate), torch.zeros((), dtype=x.dtype, device=x.device))
