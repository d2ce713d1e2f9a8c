"""What routing did, as sums that add up over ranks and microbatches, and what they say."""

from __future__ import annotations

from typing import NamedTuple

import torch

from functron.nn.linear import sequence_axes
from functron.nn.moe.config import MoEConfig
from functron.nn.moe.router import Routing
from functron.spmd import collectives as lax
from functron.spmd.mesh import CONTEXT_AXES
from functron.spmd.spec import P
from functron.typing import Bool, Float, Int, Tensor


class RouterSums(NamedTuple):
    """Sums over the tokens that count, as `statistics` takes them; add them up, then `summary`.

    Attributes:
        load: int64 ``[experts]``, assignments to each expert before any are dropped; where experts
            choose tokens, those that they chose.
        assignments: int64, their sum.
        dropped: int64, how many of them were beyond the capacity of their expert.
        unrouted: int64, tokens that no expert computes.
        tokens: int64.
        entropy: of every token's distribution over experts, in nats.
    """

    load: Tensor
    assignments: Tensor
    dropped: Tensor
    unrouted: Tensor
    tokens: Tensor
    entropy: Tensor


def expert_load(
    experts: Int[Tensor, "batch seq choices"],
    taken: Bool[Tensor, "batch seq choices"],
    num_experts: int,
) -> Int[Tensor, "batch {num_experts}"]:
    """How many of the assignments that are `taken` each expert has of each sample; int64."""
    index = experts.flatten(1)
    none = index.new_zeros(index.shape[0], num_experts)
    return none.scatter_add(-1, index, taken.flatten(1).to(torch.int64))


def distribution(routing: Routing, config: MoEConfig) -> Float[Tensor, "batch seq experts"]:
    """Each token's scores, divided by their sum where they are sigmoids (DeepSeek-V3, eq. 19)."""
    if config.score == "softmax":
        return routing.scores
    total = routing.scores.sum(-1, keepdim=True)
    return routing.scores / total.clamp_min(torch.finfo(total.dtype).tiny)


def over_context(x: Tensor, stream: P) -> Tensor:
    """A sum over this rank's tokens, made one whose psum over data and context axes is of all.

    The stream may be split by further axes, under sequence parallelism by the tensor-parallel one:
    one all-reduce over these, so that the result is the same on their ranks either way.
    """
    return lax.psum(x, tuple(name for name in sequence_axes(stream) if name not in CONTEXT_AXES))


def statistics(
    routing: Routing, config: MoEConfig, *, counted: Bool[Tensor, "batch seq"], stream: P
) -> RouterSums:
    """The sums of one layer over those of this rank's tokens that count; no gradient flows.

    Args:
        routing: of `route`.
        counted: bool ``[batch, seq]``, tokens with a target.
        stream: the spec of the residual stream.

    Returns:
        Sums whose psum over the data and context axes is that of all tokens. Collectives: under
        sequence parallelism one all-reduce of each.
    """
    every = counted.unsqueeze(-1).expand_as(routing.experts)
    taken = every & routing.kept if config.routing == "expert_choice" else every
    spread = lax.stop_gradient(distribution(routing, config))
    entropy = torch.special.entr(spread).sum(-1)
    sums = RouterSums(
        load=expert_load(routing.experts, taken, config.num_experts).sum(0),
        assignments=taken.sum(),
        dropped=(taken & ~routing.kept).sum(),
        unrouted=(counted & ~routing.kept.any(-1)).sum(),
        tokens=counted.sum(),
        entropy=torch.where(counted, entropy, torch.zeros_like(entropy)).sum(),
    )
    return RouterSums(*(over_context(x, stream) for x in sums))


def summary(sums: RouterSums) -> dict[str, float]:
    """What sums over a batch say, for people: numbers on the host.

    Args:
        sums: of all ranks; those of several layers may be stacked on leading dims.

    Returns:
        ``load_ratio``, the load of the busiest expert over the mean, of the worst layer; ``idle``,
        the fraction of experts without a token; ``drop_rate`` of assignments; ``unrouted_rate`` of
        tokens; and ``entropy``, the mean over tokens in nats. 0 where there was nothing.
    """
    load = sums.load.detach().double()
    mean = load.mean(-1).clamp_min(1e-9)

    def rate(part: Tensor, whole: Tensor) -> float:
        return float(part.detach().double().sum() / whole.double().sum().clamp_min(1))

    return {
        "load_ratio": float((load.amax(-1) / mean).max()),
        "idle": float((load == 0).double().mean()),
        "drop_rate": rate(sums.dropped, sums.assignments),
        "unrouted_rate": rate(sums.unrouted, sums.tokens),
        "entropy": rate(sums.entropy, sums.tokens),
    }
