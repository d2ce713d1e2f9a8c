"""A mixture of experts as a frozen config that refuses what cannot be built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from functron.core.errors import Problem, raise_problems
from functron.core.settings import Need, Needs, choice_problems
from functron.core.tables import shows_differences

RouterScore = Literal["softmax", "sigmoid"]
Normalise = Literal["before", "after"]
GroupScore = Literal["top2", "max"]
RoutingKind = Literal["top_k", "expert_choice", "sinkhorn"]
Drop = Literal["position", "probability"]
Balance = Literal["sequence", "batch"]
LossBalance = Literal["sequence", "batch", "global"]
BalanceRule = Literal["sign", "quantile"]
RouterDtype = Literal["float32", "float64"]
ExpertDispatch = Literal["alltoall", "gather", "two-hop"]

_POSITIVE = ("num_experts", "top_k", "expert_dim", "num_groups", "top_groups", "sinkhorn_steps")
_NOT_NEGATIVE = (
    "balance_rate", "capacity_factor", "aux_loss", "z_loss", "shared_dim", "latent_dim",
)  # fmt: skip


_GROUPS = Need(
    lambda c: c.num_groups > 1, "groups of experts, from some of which tokens choose",
    "set num_groups",
)  # fmt: skip

MOE_NEEDS: Needs = MappingProxyType(
    {
        "top_groups": _GROUPS,
        "group_score": _GROUPS,
        "sinkhorn_steps": Need(
            lambda c: c.routing == "sinkhorn", "routing by sinkhorn", "set routing to sinkhorn"
        ),
        "balance_by": Need(
            lambda c: c.balance_bias, "a bias that balances the load", "set balance_bias"
        ),
        "balance_rate": Need(
            lambda c: c.balance_bias and c.balance_by == "sign",
            "a bias that moves against the load by its sign",
            "set balance_bias, with balance_by at sign",
        ),
        "balance_decay": Need(
            lambda c: c.balance_bias and c.balance_by == "quantile",
            "a bias that follows quantiles of scores",
            "set balance_bias, and balance_by to quantile",
        ),
        "drop": Need(
            lambda c: c.capacity_factor > 0 and c.routing != "expert_choice",
            "experts of a limited capacity, which tokens choose",
            "set capacity_factor",
        ),
        "aux": Need(lambda c: c.aux_loss > 0, "a loss that balances the load", "set aux_loss"),
    }
)
"""The needs of the fields of a `MoEConfig`, to have an effect."""


@shows_differences
@dataclass(frozen=True)
class MoEConfig:
    """A mixture-of-experts layer.

    | model               | what it sets                                                          |
    |---------------------|-----------------------------------------------------------------------|
    | Switch (2021)       | top_k 1, jitter, capacity_factor 1.25, aux_loss 1e-2 "batch"          |
    | Mixtral (2024)      | 8 experts, top_k 2, renormalise, aux_loss "batch"                     |
    | Qwen3-MoE (2025)    | 128 experts, top_k 8, renormalise, aux_loss 1e-3 "batch"              |
    | GPT-OSS (2025)      | top_k 4, normalise "after", router_bias, expert_bias                  |
    | DeepSeek-V2 (2024)  | top_k 6, 8 groups of which 3, group_score "max", scale 16, shared_dim |
    | DeepSeek-V3 (2024)  | top_k 8 of 256, score "sigmoid", renormalise, scale 2.5, 8 groups of  |
    |                     | which 4 by "top2", balance_bias, aux_loss 1e-4 "sequence", shared_dim |
    | ST-MoE (2022)       | top_k 2, capacity_factor 1.25, aux_loss 1e-2, z_loss 1e-3             |
    | S-BASE (2022)       | top_k 1, routing "sinkhorn"                                           |
    | Zhou et al. (2022)  | routing "expert_choice", top_k 1, capacity_factor 2                   |

    Capacity, "expert_choice" and "sinkhorn" couple the tokens of one sequence: the experts of a
    token depend on other tokens, for the latter two and drop "probability" also on later ones; with
    capacity_over "batch" on those of other sequences.

    Attributes:
        num_experts: experts of the layer, over all ranks.
        top_k: experts of a token; under "expert_choice" that of the mean token at capacity 1.
        expert_dim: hidden width of one expert.
        score: ``"softmax"`` or ``"sigmoid"`` of the logits. Experts are chosen by it.
        normalise: ``"before"`` takes the weights of the chosen experts from the scores of all;
            ``"after"`` is the softmax over the chosen experts' logits alone.
        renormalise: divide a token's weights by their sum, to which 1e-20 is added (as DeepSeek's
            ``norm_topk_prob``). With softmax scores it is what "after" computes.
        scale: multiplies all weights (``routed_scaling_factor``).
        num_groups: groups of neighbouring experts, from some of which alone a token chooses.
        top_groups: the groups that a token chooses from.
        group_score: ranks groups by the sum of the ``"top2"`` scores in them (DeepSeek-V3), or by
            the ``"max"`` (DeepSeek-V2).
        routing: tokens choose the ``"top_k"`` experts; experts choose tokens, ``"expert_choice"``
            (Zhou et al. 2022); or tokens choose by scores that Sinkhorn's iteration balances over
            their sequence, ``"sinkhorn"`` (Clark et al. 2022), with the weights of the plain ones.
        sinkhorn_steps: iterations.
        router_bias: a bias on the logits.
        balance_bias: a bias on the scores, in choosing alone, that moves against the load (Wang et
            al. 2024, "auxiliary-loss-free"; DeepSeek-V3, eq. 16). Weights do not have it.
        balance_by: how: by the ``"sign"`` of an expert's excess of tokens; or to the
            ``"quantile"`` of its scores at which it would have its part of the tokens (Su 2026,
            "optimal allocation"; Megatron-LM's ``quantile_balancing``), of each sequence by itself
            and averaged over the batch, so that ranks and microbatches change nothing.
        balance_rate: how far that bias moves in a step, by its sign.
        balance_decay: how much of that bias stays in a step, by quantiles; the rest is new.
        jitter: the router's input is multiplied by uniform numbers of 1 - jitter to 1 + jitter
            (Fedus et al. 2021). The input of the experts is not.
        capacity_factor: an expert computes at most ceil(factor * tokens * top_k / num_experts) of
            the tokens of a sequence, or of a batch; 0 means all of them (dropless).
        capacity_over: which tokens compete for it: those of each ``"sequence"``, so that
            microbatches change nothing; or of the ``"batch"``, which is a microbatch over all
            ranks, so that sequences with many tokens for an expert may use what others leave.
        drop: where that is too few, keep assignments by ``"position"``: all first choices in the
            order of the sequence before the second ones (Lepikhin et al. 2020, algorithm 1), at
            each position of all samples; or by ``"probability"``: of the largest weights.
        aux_loss: weight of the load-balancing loss.
        aux: balance over each ``"sequence"`` (DeepSeek-V3, eq. 17); the ``"batch"``, which is a
            microbatch over all ranks (Fedus et al. 2021, eq. 4); or the ``"global"`` batch, which
            is all microbatches of all ranks (Qiu et al. 2025, "Demons in the Detail"). A run counts
            the load of all microbatches first, by one more forward pass where there are several,
            so that their number changes nothing. (Megatron-LM's ``global_aux_loss`` divides by a
            running mean of the microbatches so far.) A loss of one's own is of one microbatch, or
            takes the counts as `functron.models.decoder.tell_load` adds them to a batch.
        z_loss: weight of the router's squared log-normaliser (Zoph et al. 2022, eq. 5).
        shared_dim: hidden width of an expert of all tokens; 0 means none.
        shared_gate: multiply what that expert adds by a sigmoid of the token (Qwen2-MoE).
        latent_dim: experts work in a space of this width that all of them share; 0 means that of
            the stream.
        expert_bias: biases on the experts' layers.
        router_dtype: of logits, scores and weights, or that of the stream where it is wider.
        dispatch: how tokens reach experts on other ranks: ``"alltoall"`` sends each to the ranks of
            its experts; ``"gather"`` brings all to all; ``"two-hop"`` sends each once to every node
            that has some of its experts, which are the ranks along the first of the axes that split
            experts, and within nodes to the ranks of these; see `functron.nn.moe.layer`.
    """

    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 1024
    score: RouterScore = "softmax"
    normalise: Normalise = "before"
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2"
    routing: RoutingKind = "top_k"
    sinkhorn_steps: int = 8
    router_bias: bool = False
    balance_bias: bool = False
    balance_by: BalanceRule = "sign"
    balance_rate: float = 1e-3
    balance_decay: float = 0.9
    jitter: float = 0.0
    capacity_factor: float = 0.0
    capacity_over: Balance = "sequence"
    drop: Drop = "position"
    aux_loss: float = 0.0
    aux: LossBalance = "sequence"
    z_loss: float = 0.0
    shared_dim: int = 0
    shared_gate: bool = False
    latent_dim: int = 0
    expert_bias: bool = False
    router_dtype: RouterDtype = "float32"
    dispatch: ExpertDispatch = "alltoall"

    def __post_init__(self):
        found = [*choice_problems(self), *self._bad_numbers()]
        # sizes that are wrong by themselves would only be reported again
        raise_problems("invalid MoEConfig", found or [*self._misfits(), *self._conflicts()])

    def most_nodes(self, nodes: int) -> int:
        """Of so many nodes that experts are divided over, the most that one token goes to."""
        most = min(nodes, self.choices)
        if self.num_groups == 1 or self.routing != "top_k":
            return most
        if self.num_groups % nodes == 0:  # a node has whole groups
            return min(most, self.top_groups)
        if nodes % self.num_groups == 0:  # a group has whole nodes
            return min(most, self.top_groups * (nodes // self.num_groups))
        return most

    @property
    def choices(self) -> int:
        """Assignments of one token that routing returns: `top_k`, or all under "expert_choice"."""
        return self.num_experts if self.routing == "expert_choice" else self.top_k

    @property
    def torch_router_dtype(self) -> torch.dtype:
        """`router_dtype` as torch's."""
        return getattr(torch, self.router_dtype)

    def _bad_numbers(self) -> Iterator[Problem]:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                yield Problem(name, str(getattr(self, name)), "at least 1")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                fix = "0 drops no token" if name == "capacity_factor" else "0 switches it off"
                yield Problem(name, str(value), "a number of at least 0", fix)
        if not 0 < self.scale < math.inf:
            yield Problem("scale", str(self.scale), "a positive number", "1 leaves weights alone")
        for name in ("jitter", "balance_decay"):
            if not 0 <= getattr(self, name) < 1:
                yield Problem(name, str(getattr(self, name)), "at least 0 and below 1")

    def _misfits(self) -> Iterator[Problem]:
        """Sizes that are fine one by one and do not fit together."""
        if self.top_k > self.num_experts:
            wanted = f"at most num_experts={self.num_experts}"
            yield Problem("top_k", str(self.top_k), wanted, "lower it, or add experts")
        if self.num_experts % self.num_groups:
            wanted = f"a divisor of num_experts={self.num_experts}"
            yield Problem("num_groups", str(self.num_groups), wanted, "1 means no groups")
            return
        group = self.num_experts // self.num_groups
        if self.top_groups > self.num_groups:
            wanted = f"at most num_groups={self.num_groups}"
            yield Problem("top_groups", str(self.top_groups), wanted)
        elif self.top_groups * group < self.top_k <= self.num_experts:
            wanted = f"enough groups of {group} experts for top_k={self.top_k}"
            fix = f"at least {-(-self.top_k // group)}"
            yield Problem("top_groups", str(self.top_groups), wanted, fix)
        if self.num_groups > 1 and self.group_score == "top2" and group < 2:
            got = f"'top2' of groups of {group} expert"
            fix = "use group_score='max', or fewer groups"
            yield Problem("group_score", got, "two experts in a group at least", fix)

    def _conflicts(self) -> Iterator[Problem]:
        """Options that exclude each other."""
        if self.score == "sigmoid" and self.normalise == "after":
            wanted = "score='softmax': a sigmoid has nothing to normalise"
            fix = "use normalise='before' with renormalise=True"
            yield Problem("normalise", "'after' with score='sigmoid'", wanted, fix)
        if self.capacity_over == "batch" and not self.capacity_factor:
            wanted = "a positive number, for which the tokens of a batch compete"
            fix = "set capacity_factor, or capacity_over='sequence'"
            yield Problem("capacity_factor", "0 with capacity_over='batch'", wanted, fix)
        if self.aux == "global" and self.aux_loss and self.balance_bias:
            wanted = "'sequence' or 'batch': the bias balances the global batch already"
            yield Problem("aux", "'global' with balance_bias", wanted, "use aux='sequence'")
        if self.balance_by == "quantile" and self.num_groups > 1:
            wanted = "1 with balance_by='quantile', which compares an expert with all others"
            yield Problem("num_groups", str(self.num_groups), wanted, "use balance_by='sign'")
        if self.balance_by == "quantile" and self.top_k == self.num_experts:
            wanted = "fewer than num_experts with balance_by='quantile'"
            yield Problem("top_k", str(self.top_k), wanted, "leave out what balances: all do all")
        if self.shared_gate and not self.shared_dim:
            wanted = "the width of the shared expert that is gated"
            yield Problem("shared_dim", "0 with shared_gate=True", wanted, "set shared_dim")
        if self.routing == "expert_choice" and self.dispatch == "two-hop":
            got, wanted = "'two-hop' with routing='expert_choice'", "tokens of a few experts each"
            yield Problem("dispatch", got, wanted, "use dispatch='alltoall'")
        if self.routing == "top_k":
            return
        if self.routing == "expert_choice" and not self.capacity_factor:
            wanted = "a positive number: how many tokens an expert chooses"
            fix = "2 gives every token 2 * top_k experts on average"
            yield Problem("capacity_factor", "0 with routing='expert_choice'", wanted, fix)
        balances = f"routing={self.routing!r} balances the load by itself"
        excluded = {
            "aux_loss": (0, balances),
            "balance_bias": (False, balances),
            "num_groups": (1, "groups limit the experts that tokens choose"),
        }
        if self.routing == "expert_choice":
            excluded |= {
                "renormalise": (False, "a token has any number of experts, also none"),
                "normalise": ("before", "a token has any number of experts, also none"),
            }
        for name, (value, reason) in excluded.items():
            if getattr(self, name) != value:
                got = f"{getattr(self, name)!r} with routing={self.routing!r}"
                fix = f"set it to {value!r}, or use routing='top_k'"
                yield Problem(name, got, f"{value!r}: {reason}", fix)
