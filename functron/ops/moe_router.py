"""Which experts the logits of tokens choose, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from functron.core.errors import nearest
from functron.ops.define import Gradient, Launch, define, leading, one_by_one

Score = Literal["softmax", "sigmoid", "given"]
Weighting = Literal["scores", "renormalised", "softmax of chosen"]

RENORMALISE_EPS = 1e-20
"""DeepSeek's: a token whose scores all vanish gets weights of 0."""

_SCORES, _WEIGHTINGS = (
    get_args(Score),
    get_args(Weighting),
)  # by the numbers of kernels/moe_router.cu
_WARPS, _LANES = 4, 32
_ITEMS = (1, 2, 4, 8, 16)  # experts of a lane
_MOST_GROUPS = 32
_BLOCKS_PER_PROCESSOR = 16


def moe_router(
    logits: torch.Tensor,
    balance: torch.Tensor | None = None,
    *,
    top_k: int,
    score: Score = "softmax",
    weighting: Weighting = "scores",
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: Literal["top2", "max"] = "top2",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores s of logits, the experts e_1 ... e_k with the largest s + balance, and their weights.

    Weights are s[e_j]; or divided by their sum, to which 1e-20 is added; or the softmax of the
    chosen logits. Of equal experts the first is chosen. NaN is above all numbers, so choices are
    always experts, and no expert is chosen twice.

    Args:
        logits: ``[N, E]``; float32, or (its reference only) another floating dtype.
        balance: ``[E]`` or None. It has no gradient.
        top_k: choices of each token.
        score: ``"given"`` takes the logits for the scores.
        weighting: ``"scores"``, ``"renormalised"`` or ``"softmax of chosen"``.
        num_groups: groups of neighbouring experts; at most 32 in the kernel.
        top_groups: how many of these a token chooses from.
        group_score: groups are chosen by the sum of their best two, or by their best.

    Returns:
        experts: int64 ``[N, top_k]``, best first.
        weights: ``[N, top_k]``.
        scores: ``[N, E]``. Differentiable in reverse, any number of times; no collectives.

    Raises:
        ValueError: sizes that do not fit, more than 512 experts (kernel).
    """
    for name, value, known in (("score", score, _SCORES), ("weighting", weighting, _WEIGHTINGS)):
        if value not in known:
            raise ValueError(f"moe_router: got {name}={value!r}; {nearest(value, known)}")
    experts = logits.shape[-1]
    if not 1 <= top_k <= experts or experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"moe_router: got {top_k} choices among {top_groups} of {num_groups} groups of "
            f"{experts} experts; wanted 1 to {experts} choices, groups of one size, and at most "
            "all of them; fix: change the sizes that do not fit"
        )
    if top_k > experts // num_groups * top_groups:
        raise ValueError(
            f"moe_router: got {top_k} choices among {experts // num_groups * top_groups} experts "
            f"of {top_groups} groups; wanted at most as many; fix: raise top_groups"
        )
    modes = _SCORES.index(score), _WEIGHTINGS.index(weighting)
    return ROUTER(
        logits, balance, top_k, *modes, num_groups, top_groups, int(group_score == "top2")
    )


def fits(num_experts: int, num_groups: int = 1) -> bool:
    """Whether the kernel has room for so many experts and groups."""
    return num_experts <= _LANES * _ITEMS[-1] and num_groups <= _MOST_GROUPS


def choose(
    ranking: torch.Tensor, top_k: int, num_groups: int, top_groups: int, top_two: bool
) -> torch.Tensor:
    """The `top_k` experts of largest ``ranking [..., E]`` in the best groups; best first."""
    if num_groups > 1:
        groups = ranking.unflatten(-1, (num_groups, -1))
        if top_two:
            group_scores = groups.topk(2, dim=-1).values.sum(-1)
        else:
            group_scores = groups.amax(-1)
        chosen = best(group_scores, top_groups).unsqueeze(-1)
        index = torch.arange(num_groups, device=chosen.device)
        allowed = (chosen == index).any(-2).unsqueeze(-1)
        ranking = torch.where(allowed, groups, -torch.inf).flatten(-2)
    return best(ranking, top_k)


def best(x: torch.Tensor, num: int) -> torch.Tensor:
    """The indices of the `num` largest of the last dim, in order; of equals the first.

    One maximum after the other: for the few experts of a token that takes a third of the time of a
    stable sort, and `topk` leaves it open which of equals it returns.
    """
    found = [x.argmax(-1, keepdim=True)]
    while len(found) < num:
        x = x.scatter(-1, found[-1], -torch.inf)
        found.append(x.argmax(-1, keepdim=True))
    return torch.cat(found, dim=-1)


def _kernel(
    launch: Launch,
    logits: torch.Tensor,
    balance: torch.Tensor | None,
    top_k: int,
    score: int,
    weighting: int,
    num_groups: int,
    top_groups: int,
    top_two: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    _check(logits, num_groups)
    logits = logits if logits.stride(1) == 1 or experts == 1 else logits.contiguous()
    if balance is not None:
        balance = balance.to(torch.float32).contiguous()
    chosen = logits.new_empty(tokens, top_k, dtype=torch.int64)
    weights, scores = logits.new_empty(tokens, top_k), logits.new_empty(tokens, experts)
    launch(
        "moe_router", "route", _grid(launch, logits), _LANES * _WARPS,
        logits, balance, chosen, weights, scores, tokens, experts, logits.stride(0), top_k,
        score, weighting, num_groups, top_groups, top_two,
        defines=_items(experts), shared_bytes=_WARPS * (experts + top_k) * 4,
    )  # fmt: skip
    return chosen, weights, scores


def _backward_kernel(
    launch: Launch,
    d_weights: torch.Tensor,
    d_scores: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    scores: torch.Tensor,
    score: int,
    weighting: int,
) -> torch.Tensor:
    tokens, experts = scores.shape
    _check(scores, 1)
    d_logits = scores.new_empty(tokens, experts)
    tensors = (x.contiguous() for x in (d_weights, d_scores, chosen, weights, scores))
    launch(
        "moe_router", "route_backward", _grid(launch, scores), _LANES * _WARPS,
        *tensors, d_logits, tokens, experts, chosen.shape[1], score, weighting,
        defines=_items(experts), shared_bytes=_WARPS * experts * 4,
    )  # fmt: skip
    return d_logits


def _check(x: torch.Tensor, num_groups: int) -> None:
    fix = 'fix: pass kernels=functron.ops.use("reference")'
    if x.dtype != torch.float32:
        raise TypeError(f"moe_router: got {x.dtype} logits; wanted float32; {fix}")
    if not fits(x.shape[1], num_groups):
        raise ValueError(
            f"moe_router: got {x.shape[1]} experts in {num_groups} groups; wanted at most "
            f"{_LANES * _ITEMS[-1]} in {_MOST_GROUPS}; {fix}"
        )


def _grid(launch: Launch, x: torch.Tensor) -> int:
    return min(-(-x.shape[0] // _WARPS), _BLOCKS_PER_PROCESSOR * launch.processors(x.device))


def _items(experts: int) -> dict[str, str]:
    return {"ITEMS": str(next(items for items in _ITEMS if items * _LANES >= experts))}


def _reference(
    logits: torch.Tensor,
    balance: torch.Tensor | None,
    top_k: int,
    score: int,
    weighting: int,
    num_groups: int,
    top_groups: int,
    top_two: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kinds: tuple[Callable, ...] = (lambda x: x.softmax(-1), torch.sigmoid, torch.clone)
    scores = kinds[score](logits)
    ranking = scores if balance is None else scores + balance.to(scores.dtype)
    chosen = choose(ranking.detach(), top_k, num_groups, top_groups, bool(top_two))
    if _WEIGHTINGS[weighting] == "softmax of chosen":
        return chosen, logits.gather(-1, chosen).softmax(-1), scores
    weights = scores.gather(-1, chosen)
    if _WEIGHTINGS[weighting] == "renormalised":
        weights = weights / (weights.sum(-1, keepdim=True) + RENORMALISE_EPS)
    return chosen, weights, scores


def _backward_reference(
    d_weights: torch.Tensor,
    d_scores: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    scores: torch.Tensor,
    score: int,
    weighting: int,
) -> torch.Tensor:
    kind, of_chosen = _SCORES[score], _WEIGHTINGS[weighting]
    if of_chosen != "scores":
        d_weights = d_weights - (weights * d_weights).sum(-1, keepdim=True)
    if of_chosen == "renormalised":
        total = scores.gather(-1, chosen).sum(-1, keepdim=True)
        d_weights = d_weights / (total + RENORMALISE_EPS)
    if of_chosen != "softmax of chosen":
        d_scores = d_scores.scatter_add(-1, chosen, d_weights)
    if kind == "softmax":
        d_logits = scores * (d_scores - (scores * d_scores).sum(-1, keepdim=True))
    elif kind == "sigmoid":
        d_logits = d_scores * scores * (1 - scores)
    else:
        d_logits = d_scores
    if of_chosen == "softmax of chosen":
        return d_logits.scatter_add(-1, chosen, weights * d_weights)
    return d_logits.contiguous()


def _fake(logits: torch.Tensor, balance: torch.Tensor | None, top_k: int, *modes: int) -> tuple:
    tokens, experts = logits.shape
    chosen = logits.new_empty(tokens, top_k, dtype=torch.int64)
    return chosen, logits.new_empty(tokens, top_k), logits.new_empty(tokens, experts)


def _backward_fake(d_weights: torch.Tensor, d_scores: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(d_scores, memory_format=torch.contiguous_format)


def _batch(size: int, in_dims: tuple, args: tuple, op: Callable) -> tuple:
    if in_dims[1] is not None:  # a ranking of its own for every element
        return one_by_one(size, in_dims, args, op)
    rows = args[0].movedim(in_dims[0], 0)
    found = op(rows.flatten(0, 1), *args[1:])
    return tuple(x.unflatten(0, rows.shape[:2]) for x in found), (0, 0, 0)


def _backward_batch(size: int, in_dims: tuple, args: tuple, op: Callable) -> tuple:
    pairs = zip(args[:5], in_dims[:5], strict=True)
    tensors = [leading(x, dim, size) for x, dim in pairs]
    rows = op(*[x.flatten(0, 1) for x in tensors], *args[5:])
    return rows.unflatten(0, tensors[1].shape[:2]), 0


ROUTER_BACKWARD = define(
    "moe_router_backward(Tensor d_weights, Tensor d_scores, Tensor chosen, Tensor weights, "
    "Tensor scores, int score, int weighting) -> Tensor",
    kernel=_backward_kernel,
    reference=_backward_reference,
    fake=_backward_fake,
    batch=_backward_batch,
    gradient=_backward_reference,
)


def _backward(saved: Any, cotangents: tuple) -> tuple:
    chosen, weights, scores, score, weighting = saved
    _, d_weights, d_scores = cotangents
    d_logits = ROUTER_BACKWARD(d_weights, d_scores, chosen, weights, scores, score, weighting)
    return d_logits, *[None] * 7


ROUTER = define(
    "moe_router(Tensor logits, Tensor? balance, int top_k, int score, int weighting, "
    "int num_groups, int top_groups, int top_two) -> (Tensor, Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=_fake,
    batch=_batch,
    gradient=Gradient(save=lambda args, outputs: (*outputs, args[3], args[4]), backward=_backward),
)
"""`moe_router`, with numbers for what it names."""
