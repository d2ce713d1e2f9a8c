"""Vocabulary-parallel token embedding, and learned positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from functron.nn.linear import SEQ_DIM, reduce_partial, sequence_axes
from functron.spmd import collectives as lax
from functron.spmd.spec import P


def embed_tokens(table: Tensor, tokens: Tensor, *, stream: P, axis: str = "tp") -> Tensor:
    """x_t = table[token_t], with the rows of the table split over `axis`.

    Every rank looks up the tokens whose rows it holds and contributes zeros for the others.

    Args:
        table: ``[vocab / n, embed]``, this rank's rows.
        tokens: ``[batch, seq]`` int64, the whole sequence on every rank.
        stream: the spec of the result.

    Returns:
        ``[batch, seq, embed]`` with spec `stream`. Collectives: as `reduce_partial`.
    """
    rows = tokens - lax.axis_index(axis) * table.shape[0]
    here = (rows >= 0) & (rows < table.shape[0])
    found = F.embedding(rows.clamp(0, table.shape[0] - 1), table)
    zero = torch.zeros((), dtype=found.dtype, device=found.device)
    return reduce_partial(torch.where(here.unsqueeze(-1), found, zero), stream, axis)


def stream_positions(x: Tensor, stream: P) -> Tensor:
    """The positions in the sequence, int64 ``[seq]``, of the part of the stream that x holds."""
    return lax.global_index(x.shape[SEQ_DIM], sequence_axes(stream), device=x.device)


def add_positions(x: Tensor, table: Tensor, *, stream: P) -> Tensor:
    """x_t + table[t] (learned absolute positions; Radford et al. 2019).

    Args:
        x: ``[batch, seq, embed]`` with spec `stream`.
        table: ``[max_seq, embed]``, replicated.
    """
    return x + F.embedding(stream_positions(x, stream), table)
