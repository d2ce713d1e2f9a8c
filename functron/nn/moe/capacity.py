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
    axes = sequence_axes(stream)
    local = experts.shape[SEQ_DIM]

    def whole(x: Tensor) -> Tensor:
        return lax.all_gather(x, axes, axis=SEQ_DIM, tiled=True)

    experts, order = whole(experts), _rank(whole(positions))
    seq, choices = experts.shape[SEQ_DIM:]
    choice = torch.arange(choices, device=experts.device)
    # sorting by the last key first, as all these sorts are stable
    entries = torch.argsort((choice * seq + order.unsqueeze(-1)).flatten(1), dim=-1)
    if drop == "probability":
        by_weight = whole(lax.stop_gradient(weights)).flatten(1).gather(-1, entries)
        entries = entries.gather(-1, _stable_argsort(by_weight, descending=True))
    flat = experts.flatten(1)
    entries = entries.gather(-1, _stable_argsort(flat.gather(-1, entries)))
    fits = _rank_in_run(flat.gather(-1, entries)) < limit
    kept = torch.zeros_like(fits).scatter(-1, entries, fits).unflatten(1, (seq, choices))
    if not lax.axis_size(axes) > 1:
        return kept
    mine = lax.global_index(local, axes, device=kept.device)
    return torch.index_select(kept, SEQ_DIM, mine)


def _stable_argsort(x: Tensor, descending: bool = False) -> Tensor:
    return torch.sort(x, dim=-1, descending=descending, stable=True).indices


def _rank(x: Tensor) -> Tensor:
    """How many of the entries of the last dim are smaller than each: their ranks, if distinct."""
    return torch.argsort(torch.argsort(x, dim=-1), dim=-1)


def _rank_in_run(x: Tensor) -> Tensor:
    """The place of each entry within its run of equal neighbours: ``[3, 3, 5]`` gives [0, 1, 0]."""
    place = torch.arange(x.shape[-1], device=x.device)
    starts = torch.ones_like(x[..., :1], dtype=torch.bool)
    starts = torch.cat([starts, x[..., 1:] != x[..., :-1]], dim=-1)
    return place - torch.where(starts, place, 0).cummax(-1).values
