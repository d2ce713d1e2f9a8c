"""Which tokens an expert of limited capacity computes: decided for whole sequences, on any mesh.

Tokens compete with those of their own sequence and no others, so that neither the ranks nor the
microbatches that a batch is cut into change what is dropped.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from functron.nn.linear import SEQ_DIM, sequence_axes
from functron.nn.moe.config import Drop, MoEConfig
from functron.spmd import collectives as lax
from functron.spmd.spec import P
from functron.typing import Bool, Float, Int, Tensor


def capacity(config: MoEConfig, seq: int) -> int:
    """How many tokens of one sequence an expert computes at most.

    ceil(capacity_factor * seq * top_k / num_experts), and no more than there are; all of them where
    the factor is 0. The factor counts as the decimal number that it is written as.

    Args:
        seq: the length of the whole sequence, over all ranks that share it.
    """
    if not config.capacity_factor:
        return seq
    # in floating point 1.1 * 100 / 10 is above 11
    wanted = Fraction(str(config.capacity_factor)) * seq * config.top_k / config.num_experts
    return min(math.ceil(wanted), seq)


def keep(
    experts: Int[Tensor, "batch seq choices"],
    weights: Float[Tensor, "batch seq choices"],
    *,
    limit: int,
    drop: Drop,
    positions: Int[Tensor, "batch seq"],
    stream: P,
) -> Bool[Tensor, "batch seq choices"]:
    """Which assignments are among the first `limit` of their expert in their sequence.

    The first are, by ``"position"``, those of the smallest choice and then of the smallest position
    (Lepikhin et al. 2020, algorithm 1); by ``"probability"`` those of the largest weight, equal
    ones ordered as by position.

    Args:
        experts: int64 ``[batch, seq, choices]``, this rank's part; each token's best choice first.
        weights: ``[batch, seq, choices]``, for "probability" alone; no gradient flows.
        limit: the capacity of an expert.
        positions: int64 ``[batch, seq]``, distinct within a sample and in its original order.
        stream: the spec of the residual stream.

    Returns:
        bool ``[batch, seq, choices]``, this rank's part. Collectives: one all-gather of experts and
        one of positions (and weights) over the axes that split the sequence; none in backward.
    """
    experts, positions = _whole(experts, stream), _whole(positions, stream)
    seq, choices = experts.shape[SEQ_DIM:]
    choice = torch.arange(choices, device=experts.device)
    rank = _inverse(_argsort(positions))  # as positions may have gaps
    # sorting by the last key first: all these sorts are stable
    entries = _inverse((choice * seq + rank.unsqueeze(-1)).flatten(1))
    if drop == "probability":
        by_weight = _whole(lax.stop_gradient(weights), stream).flatten(1).gather(-1, entries)
        entries = entries.gather(-1, _argsort(by_weight, descending=True))
    flat = experts.flatten(1)
    entries = entries.gather(-1, _argsort(flat.gather(-1, entries)))
    fits = _rank_in_run(flat.gather(-1, entries)) < limit
    kept = torch.zeros_like(fits).scatter(-1, entries, fits)
    return _own(kept.unflatten(1, (seq, choices)), stream)


def choose_tokens(
    scores: Float[Tensor, "batch seq experts"],
    *,
    limit: int,
    positions: Int[Tensor, "batch seq"],
    stream: P,
) -> Bool[Tensor, "batch seq experts"]:
    """Which tokens are among the `limit` of their sequence that score highest for each expert.

    Equal scores are ordered by position (Zhou et al. 2022, section 3.1).

    Args:
        scores: ``[batch, seq, experts]``, this rank's part; no gradient flows.
        limit, positions, stream: as for `keep`.

    Returns:
        bool ``[batch, seq, experts]``, this rank's part. Collectives: one all-gather of scores and
        one of positions over the axes that split the sequence; none in backward.
    """
    in_order = _argsort(_whole(positions, stream)).unsqueeze(1)
    tokens = _whole(lax.stop_gradient(scores), stream).mT
    in_order = in_order.expand_as(tokens)
    best = _argsort(tokens.gather(-1, in_order), descending=True)[..., :limit]
    best = in_order.gather(-1, best)
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    return _own(chosen.scatter(-1, best, torch.ones_like(best, dtype=torch.bool)).mT, stream)


def _whole(x: Tensor, stream: P) -> Tensor:
    """The whole sequence, on all ranks that share it, in the order in which they hold it."""
    return lax.all_gather(x, sequence_axes(stream), axis=SEQ_DIM, tiled=True)


def _own(x: Tensor, stream: P) -> Tensor:
    """This rank's part of what is known of the whole sequence."""
    axes = sequence_axes(stream)
    parts = lax.axis_size(axes)
    if parts == 1:
        return x
    mine = lax.global_index(x.shape[SEQ_DIM] // parts, axes, device=x.device)
    return torch.index_select(x, SEQ_DIM, mine)


def _argsort(x: Tensor, descending: bool = False) -> Tensor:
    """Indices that sort the last dim; equals keep their order."""
    return torch.sort(x, dim=-1, descending=descending, stable=True).indices


def _inverse(permutation: Tensor) -> Tensor:
    """The place of each of 0, 1, ... in the last dim: of indices that sort, the ranks."""
    place = torch.arange(permutation.shape[-1], device=permutation.device)
    return torch.zeros_like(permutation).scatter(-1, permutation, place.expand_as(permutation))


def _rank_in_run(x: Tensor) -> Tensor:
    """The place of each entry within its run of equal neighbours: ``[3, 3, 5]`` gives [0, 1, 0]."""
    place = torch.arange(x.shape[-1], device=x.device)
    starts = torch.ones_like(x[..., :1], dtype=torch.bool)
    starts = torch.cat([starts, x[..., 1:] != x[..., :-1]], dim=-1)
    return place - torch.where(starts, place, 0).cummax(-1).values
