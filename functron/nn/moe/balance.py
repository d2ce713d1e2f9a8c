"""Losses that keep experts evenly used and logits small, and the bias that balances without one.

With k choices of E experts, f_e the fraction of tokens that choose expert e times E / k, and P_e
the mean of its share of the tokens' scores, the load-balancing loss is

    sum over e of f_e P_e

which is 1 for even routing: eq. 4 to 6 of Fedus et al. 2021, divided by k as in DeepSeek-V3, eq.
17 to 20. (transformers' Mixtral and its kin do not divide: a weight of w there is k w here.) f has
no gradient. It counts what tokens would choose without the bias that balances them (eq. 18), and
before any are dropped.

All of it is over tokens that count, and weighted by how many these are, as the loss is a sum over
tokens: dividing that by their number gives the mean over tokens of loss and balance alike.

`statistics` are sums over tokens, which add up over ranks and microbatches; `summary` reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from functron.core import compat
from functron.core.typing import Bool, Float, Int, Scalar, Tensor
from functron.nn.linear import SEQ_DIM, sequence_axes
from functron.nn.moe.config import MoEConfig
from functron.nn.moe.router import Routing, top_k_experts
from functron.ops.define import AUTO, Kernels
from functron.spmd import DATA_AXES
from functron.spmd import collectives as lax
from functron.spmd.mesh import CONTEXT_AXES
from functron.spmd.spec import P
from functron.transforms.custom_vjp import custom_vjp


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
    """Rates and ratios of sums over a batch, for people: numbers on the host.

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


def auxiliary(
    params: dict,
    routing: Routing,
    config: MoEConfig,
    *,
    counted: Bool[Tensor, "batch seq"],
    stream: P,
    kernels: Kernels = AUTO,
) -> Scalar:
    """This rank's share of what the layer adds to the loss.

    The sum of ``aux_loss`` times the load-balancing loss (of each sequence times its tokens, or of
    the microbatch times its tokens), ``z_loss`` times the squared log-normaliser of each token's
    logits, and of a term for the bias that balances. The latter is 0, and its derivative by that
    bias is num_experts times each expert's load minus that of all: an integer that is positive for
    those with more than their part. A rule that subtracts `balance_rate` times its sign is that of
    Wang et al. 2024. That derivative is not scaled with the loss, by whose number of targets the
    step divides: sums of these integers over ranks and microbatches are exact in float32 below
    2^24, so that the sign is 0 on every mesh where loads are equal.

    Args:
        params: this rank's `router_defs`.
        routing: of `route`.
        counted: bool ``[batch, seq]``, tokens with a target.
        stream: the spec of the residual stream.
        kernels: of ``"moe_router"``.

    Returns:
        A scalar, whose psum over the data and context axes is the term. Collectives: for the load-
        balancing loss one all-reduce of ``[batch, experts]`` or ``[experts]`` integers over the
        axes that split what it balances; under sequence parallelism one of a scalar. In backward
        the latter alone.
    """
    zero = torch.zeros_like(routing.logits[:1, :1, 0]).sum()
    share = lax.stop_gradient(zero)
    if config.aux_loss:
        share = share + config.aux_loss * _imbalance(routing, config, counted, stream, kernels)
    if config.z_loss:
        lse = routing.logits.logsumexp(-1)
        share = share + config.z_loss * torch.where(counted, lse.square(), 0).sum()
    if "balance" in params:
        share = share + _against_load(params["balance"], routing, config, counted, stream)
    return over_context(share, stream)


def _imbalance(
    routing: Routing, config: MoEConfig, counted: Tensor, stream: P, kernels: Kernels
) -> Tensor:
    """The sum over this rank's tokens t of sum over e of f_e P_te.

    f is of all ranks' tokens and P of this rank's own, so that backward needs no collective.
    """
    chosen = routing.experts
    if config.balance_bias:
        chosen = top_k_experts(routing.scores, config, kernels=kernels)
    taken = counted.unsqueeze(-1).expand_as(chosen)
    load = expert_load(chosen, taken, config.num_experts)
    tokens = counted.sum(SEQ_DIM, keepdim=True)
    if config.aux == "sequence":
        load, tokens = lax.psum((load, tokens), sequence_axes(stream))
    else:
        axes = (*DATA_AXES, *sequence_axes(stream))
        load, tokens = lax.psum((load.sum(0, keepdim=True), tokens.sum(0, keepdim=True)), axes)
    shares = distribution(routing, config)
    shares = torch.where(counted.unsqueeze(-1), shares, torch.zeros_like(shares)).sum(SEQ_DIM)
    f = load.to(shares.dtype) * config.num_experts / (config.top_k * tokens.clamp_min(1))
    return (f * shares).sum()


def _against_load(
    balance: Tensor, routing: Routing, config: MoEConfig, counted: Tensor, stream: P
) -> Tensor:
    """0, with the derivative by `balance` in `auxiliary`: of the experts that tokens did choose."""
    taken = counted.unsqueeze(-1).expand_as(routing.experts)
    load = expert_load(routing.experts, taken, config.num_experts).sum(0)
    excess = load * config.num_experts - load.sum()
    excess = excess.to(balance.dtype)

    def zero(balance, excess):
        return ((balance - lax.stop_gradient(balance)) * excess).sum()

    def forward(balance, excess):
        return zero(balance, excess), excess

    def backward(excess, _):
        # counts, not a share of the cotangent; where ranks of tp have the same tokens, of the first
        once = "tp" in sequence_axes(stream) or lax.axis_index("tp") == 0
        return torch.where(torch.as_tensor(once, device=excess.device), excess, 0.0), None

    counts = zero if compat.pushing_forward() else custom_vjp(zero, forward, backward)
    return counts(balance, excess).to(routing.logits.dtype)
