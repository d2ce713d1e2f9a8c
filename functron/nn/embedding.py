"""Vocabulary-parallel token embedding, and learned positions."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from functron.core.typing import Float, Int, Tensor
from functron.nn.linear import SEQ_DIM, reduce_partial, sequence_axes
from functron.ops.ids import check_ids
from functron.spmd import collectives as lax
from functron.spmd.spec import P


def embed_tokens(
    table: Float[Tensor, "rows embed"],
    tokens: Int[Tensor, "batch whole_seq"],
    *,
    stream: P,
    axis: str = "tp",
    scale: float = 1.0,
    vocab_size: int | None = None,
) -> Float[Tensor, "batch seq embed"]:
    """x_t = scale table[token_t], with the rows of the table split over `axis`.

    Every rank looks up the tokens whose rows it holds and contributes zeros for the others.

    Args:
        table: ``[vocab / n, embed]``, this rank's rows.
        tokens: ``[batch, seq]`` int64, the whole sequence on every rank.
        stream: the spec of the result.
        scale: rounded to the table's dtype before it multiplies, as where it comes from (Gemma).
        vocab_size: how many rows over all ranks are no padding; None: all.

    Returns:
        ``[batch, seq, embed]`` with spec `stream`. Collectives: as `reduce_partial`.

    Raises:
        ValueError: a token is outside of the vocabulary; on CUDA a device-side assertion.
    """
    whole = table.shape[0] * lax.axis_size(axis) if vocab_size is None else vocab_size
    check_ids(tokens, "tokens", whole)
    rows = tokens - lax.axis_index(axis) * table.shape[0]
    here = (rows >= 0) & (rows < table.shape[0])
    found = F.embedding(rows.clamp(0, table.shape[0] - 1), table)
    if scale != 1:
        found = found * torch.full((), scale, dtype=found.dtype, device=found.device)
    zero = torch.zeros((), dtype=found.dtype, device=found.device)
    return reduce_partial(torch.where(here.unsqueeze(-1), found, zero), stream, axis)


def stream_positions(
    x: Float[Tensor, "batch seq *features"],
    stream: P,
    positions: Int[Tensor, "*batch whole_seq"] | None = None,
    axis: str = "tp",
) -> Int[Tensor, "*batch seq"]:
    """The positions in the sequence, int64 ``[seq]``, of the part of the stream that x holds.

    Args:
        x: this rank's part of the stream.
        stream: its spec.
        positions: those of the tokens that all ranks of `axis` hold together, ``[whole_seq]`` or
            ``[batch, whole_seq]``; None: they are in order (see `functron.nn.zigzag`).
    """
    size, axes = x.shape[SEQ_DIM], sequence_axes(stream)
    if positions is None:
        return lax.global_index(size, axes, device=x.device)
    if axis not in axes or lax.axis_size(axis) == 1:
        return positions
    return torch.index_select(positions, -1, lax.global_index(size, axis, device=x.device))


def add_positions(
    x: Float[Tensor, "batch seq embed"],
    table: Float[Tensor, "max_seq embed"],
    *,
    stream: P,
    positions: Int[Tensor, "*batch whole_seq"] | None = None,
) -> Float[Tensor, "batch seq embed"]:
    """x_t + table[t] (learned absolute positions; Radford et al. 2019).

    Args:
        x: ``[batch, seq, embed]`` with spec `stream`.
        table: ``[max_seq, embed]``, replicated.
        positions: as in `stream_positions`.
    """
    return x + F.embedding(stream_positions(x, stream, positions), table)
