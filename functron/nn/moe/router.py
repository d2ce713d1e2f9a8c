"""Routers: which experts each token goes to, with which weights, and losses that balance the load.

The router's weight is whole on every rank, and each rank routes its own tokens. Tensor-parallel
ranks have the same tokens, or others under sequence parallelism; either way gradients are right
because specs do not mention the axis. Where tokens compete (capacity, expert choice, Sinkhorn) they
do so with those of their own sequence only, so that neither ranks nor microbatches change which are
dropped; with `capacity_over` "batch" with those of a microbatch over all ranks, so that ranks
change nothing.

With k choices of E experts, f_e the fraction of tokens that choose expert e times E / k, and P_e
the mean of its share of the tokens' scores, the load-balancing loss is

    sum over e of f_e P_e

which is 1 for even routing: eq. 4 to 6 of Fedus et al. 2021, divided by k as in DeepSeek-V3, eq.
17 to 20. (transformers' Mixtral and its kin do not divide: a weight of w there is k w here.) f has
no gradient. It counts what tokens would choose without the bias that balances them (eq. 18), and
before any are dropped.

Losses are over tokens that count (with a target), and weighted by their number, as the loss is a
sum over tokens: divided by that number, both are means over tokens.

`statistics` are sums over tokens, which add up over ranks and microbatches, for `summary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from functron.core import compat, random
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.typing import Bool, Float, Int, Key, Scalar, Tensor
from functron.nn.layers import SEQ_DIM, linear_defs, sequence_axes
from functron.nn.moe.config import Drop, MoEConfig
from functron.nn.moe.room import needed_room
from functron.ops.moe import (
    KernelScore,
    Weighting,
    best,
    choose,
    fits,
    moe_router,
    weights_of,
)
from functron.ops.operations import AUTO, Kernels
from functron.spmd import DATA_AXES
from functron.spmd import collectives as lax
from functron.spmd.mesh import CONTEXT_AXES
from functron.spmd.params import ParamDef, zeros
from functron.spmd.spec import P
from functron.transforms.custom_vjp import custom_vjp


def capacity(config: MoEConfig, tokens: int) -> int:
    """How many of the tokens that compete an expert computes at most.

    ceil(capacity_factor * tokens * top_k / num_experts), with the factor as the decimal number that
    it is written as, and at most all; 0: all. `tokens` are those of a whole sequence, over all
    ranks that share it; under `capacity_over` "batch" those of all sequences of a microbatch.
    """
    if not config.capacity_factor:
        return tokens
    # in floating point 1.1 * 100 / 10 is above 11
    wanted = Fraction(str(config.capacity_factor)) * tokens * config.top_k / config.num_experts
    return min(math.ceil(wanted), tokens)


def competing(config: MoEConfig, batch: int, seq: int, stream: P) -> int:
    """How many tokens compete for an expert, where a rank has `seq` of `batch` sequences each."""
    whole = seq * lax.axis_size(sequence_axes(stream))
    return whole * batch * lax.axis_size(DATA_AXES) if config.capacity_over == "batch" else whole


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

    By ``"position"`` they are ordered by choice, then by position (Lepikhin et al. 2020, algorithm
    1); by ``"probability"`` by weight, the largest first, and equal ones as by position.

    Args:
        experts: int64, this rank's part; each token's best choice first.
        weights: for "probability" alone; no gradient flows.
        limit: the capacity of an expert.
        positions: int64, distinct within a sample and in its original order.
        stream: the spec of the residual stream.

    Returns:
        This rank's part. Collectives: one all-gather of experts and one of positions (and weights)
        over the axes that split the sequence; none in backward.
    """
    experts, positions = _gather_whole(experts, stream), _gather_whole(positions, stream)
    seq, choices = experts.shape[SEQ_DIM:]
    choice = torch.arange(choices, device=experts.device)
    rank = _invert(_argsort(positions))  # as positions may have gaps
    # sorting by the last key first: all these sorts are stable
    entries = _invert((choice * seq + rank.unsqueeze(-1)).flatten(1))
    if drop == "probability":
        by_weight = _gather_whole(lax.stop_gradient(weights), stream).flatten(1).gather(-1, entries)
        entries = entries.gather(-1, _argsort(by_weight, descending=True))
    flat = experts.flatten(1)
    entries = entries.gather(-1, _argsort(flat.gather(-1, entries)))
    fits = _rank_in_run(flat.gather(-1, entries)) < limit
    kept = torch.zeros_like(fits).scatter(-1, entries, fits)
    return _select_own(kept.unflatten(1, (seq, choices)), stream)


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
        scores: this rank's part; no gradient flows.
        limit, positions, stream: as for `keep`.

    Returns:
        This rank's part. Collectives: one all-gather of scores and one of positions over the axes
        that split the sequence; none in backward.
    """
    in_order = _argsort(_gather_whole(positions, stream)).unsqueeze(1)
    tokens = _gather_whole(lax.stop_gradient(scores), stream).mT
    in_order = in_order.expand_as(tokens)
    best = _argsort(tokens.gather(-1, in_order), descending=True)[..., :limit]
    best = in_order.gather(-1, best)
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    return _select_own(chosen.scatter(-1, best, torch.ones_like(best, dtype=torch.bool)).mT, stream)


def _join_samples(x: Tensor, stream: P) -> Tensor:
    """``[batch, seq, n]`` of this rank as one sequence ``[1, tokens, n]`` of all ranks' tokens."""
    return lax.all_gather(_gather_whole(x, stream), DATA_AXES, axis=0, tiled=True).flatten(0, 1)[
        None
    ]


def _select_own_samples(x: Tensor, batch: int, stream: P) -> Tensor:
    """This rank's ``[batch, seq, n]`` of a value laid out as by `_join_samples`."""
    ranks = lax.axis_size(DATA_AXES)
    x = x.squeeze(0).unflatten(0, (batch * ranks, -1))
    if ranks > 1:
        x = torch.index_select(x, 0, lax.global_index(batch, DATA_AXES, device=x.device))
    return _select_own(x, stream)


def _order_tokens(rows: Tensor, positions: Tensor, stream: P) -> Tensor:
    """The order of the tokens in `_join_samples`: by position, and at each of them by sample."""
    rows = lax.all_gather(rows, DATA_AXES, axis=0, tiled=True)
    positions = _join_samples(positions.unsqueeze(-1), stream).view(len(rows), -1)
    at, row = _invert(_argsort(positions)), _invert(_argsort(rows))
    return (at * len(rows) + row.unsqueeze(-1)).view(1, -1)


def _gather_whole(x: Tensor, stream: P) -> Tensor:
    """The whole sequence, on all ranks that share it, in the order in which they hold it."""
    return lax.all_gather(x, sequence_axes(stream), axis=SEQ_DIM, tiled=True)


def _select_own(x: Tensor, stream: P) -> Tensor:
    """This rank's part of a value of the whole sequence."""
    axes = sequence_axes(stream)
    parts = lax.axis_size(axes)
    if parts == 1:
        return x
    mine = lax.global_index(x.shape[SEQ_DIM] // parts, axes, device=x.device)
    return torch.index_select(x, SEQ_DIM, mine)


def _argsort(x: Tensor, descending: bool = False) -> Tensor:
    """Indices that sort the last dim; equals keep their order."""
    return torch.sort(x, dim=-1, descending=descending, stable=True).indices


def _invert(permutation: Tensor) -> Tensor:
    """The place of each of 0, 1, ... in the last dim: of indices that sort, the ranks."""
    place = torch.arange(permutation.shape[-1], device=permutation.device)
    return torch.zeros_like(permutation).scatter(-1, permutation, place.expand_as(permutation))


def _rank_in_run(x: Tensor) -> Tensor:
    """The place of each entry within its run of equal neighbours: ``[3, 3, 5]`` gives [0, 1, 0]."""
    place = torch.arange(x.shape[-1], device=x.device)
    starts = torch.ones_like(x[..., :1], dtype=torch.bool)
    starts = torch.cat([starts, x[..., 1:] != x[..., :-1]], dim=-1)
    return place - torch.where(starts, place, 0).cummax(-1).values


_SINKHORN_EPS = 1e-8  # for experts whose share of every token vanishes


class Routing(NamedTuple):
    """Where tokens go: this rank's part of the stream, with a number of choices for each token.

    Attributes:
        experts: int64 ``[batch, seq, choices]``, no expert twice; a token's best first, or all in
            order where experts choose.
        weights: ``[batch, seq, choices]`` in float32 at least: factors of experts' outputs, exactly
            0, without a gradient, where these are not kept.
        kept: bool ``[batch, seq, choices]``: False where the expert does not compute the token.
        scores: ``[batch, seq, experts]`` in float32 at least, of all experts, without the bias that
            balances them.
        logits: ``[batch, seq, experts]``, of which scores are the softmax or sigmoid; None where a
            router of one's own gave scores, which then add up to 1.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor
    scores: Tensor
    logits: Tensor | None = None


class RouterOutput(NamedTuple):
    """The result of a router of one's own, for this rank's part of the stream; see `Router`.

    Attributes:
        experts: int64 ``[batch, seq, choices]``, no expert twice; a token's best first.
        weights: ``[batch, seq, choices]``, factors of experts' outputs.
        kept: bool ``[batch, seq, choices]``: False where the expert does not compute the token;
            None: all, or those of `keep` under `capacity_factor`.
        scores: ``[batch, seq, experts]``: divided by their sum, the distribution whose entropy is
            recorded; None: that of the weights.
        auxiliary: 0-dim: the term of the loss, summed over this rank's tokens that count; None: 0.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None = None
    scores: Tensor | None = None
    auxiliary: Tensor | None = None


class RouterInput(NamedTuple):
    """The tokens of this rank, for a router of one's own; see `Router`.

    Attributes:
        x: ``[batch, seq, embed]`` with spec `stream`.
        config: of the layer.
        counted: bool ``[batch, seq]``, tokens with a target: those that auxiliary terms are of.
        stream: the spec of the residual stream.
        rows, positions, key, kernels: as in `route`.
        load: int64 ``[experts]``, the assignments of the whole batch to each expert, of a pass
            before this one, under `aux` "global"; None: there was none.
    """

    x: Tensor
    config: MoEConfig
    counted: Tensor
    stream: P
    rows: Tensor
    positions: Tensor
    key: Tensor | None
    kernels: Kernels
    load: Tensor | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which tokens are divided: a psum over them is of the whole batch."""
        return (*DATA_AXES, *sequence_axes(self.stream))


Router = Callable[[dict, RouterInput], RouterOutput]
"""``router(params, inputs)``: a router of one's own, for `nn.moe.moe` and models.

It is part of the per-rank program. `params` are the parameters of the router (of `router_defs`, or
the `router` passed to `moe_defs`; whole on every rank). Every token of this rank gets experts, also
one without a target. `experts` and `weights`, of any number of choices, must be functions of the
token, the parameters and sums over ranks alone, so that ranks with the same tokens choose the same
experts.

Of `MoEConfig` the layer itself reads num_experts, expert_dim, capacity_factor and drop, shared_dim,
shared_gate, latent_dim, expert_bias and dispatch. A router may read the others (top_k, score,
scale, aux_loss, ...).

`auxiliary` is the sum over *this rank's* tokens that count, without any psum: the layer sums it
over the axes that split the sequence besides the context axes, as under sequence parallelism, and
the loss over data and context axes; tokens that ranks share count once. As the loss is divided by
the number of targets, multiply a mean over tokens by their number. Statistics of the whole batch,
such as the load of each expert, are ``lax.psum(load, inputs.axes)``:

    def router(params, inputs):
        k, experts = inputs.config.top_k, inputs.config.num_experts
        scores = (inputs.x @ params["w"]).softmax(-1)
        weights, chosen = scores.topk(k)
        counted = inputs.counted.unsqueeze(-1)
        load = (torch.zeros_like(scores).scatter(-1, chosen, 1.0) * counted).sum((0, 1))
        load, tokens = lax.psum((lax.stop_gradient(load), counted.sum()), inputs.axes)
        balance = experts * (load / (k * tokens) * scores * counted).sum()  # 1 a token when even
        return RouterOutput(chosen, weights, auxiliary=0.01 * balance)
"""


def router_defs(config: MoEConfig, embed_dim: int, *, stddev: float, dtype: torch.dtype) -> dict:
    """Defs ``{"w", "b"?, "balance"?}``: of the logits, and the bias that balances the load.

    The latter is float32 whatever the `dtype`: it moves by small steps.
    """
    experts = (config.num_experts,)
    defs = linear_defs(
        (embed_dim, *experts),
        ("embed", None),
        stddev=stddev,
        bias=experts if config.router_bias else None,
        bias_axes=(None,),
        dtype=dtype,
    )
    if config.balance_bias:
        defs["balance"] = ParamDef(experts, (None,), zeros, decay=False, balance=True)
    return defs


def route(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    config: MoEConfig,
    *,
    stream: P,
    rows: Int[Tensor, " batch"],
    positions: Int[Tensor, "batch seq"],
    key: Key | None = None,
    kernels: Kernels = AUTO,
) -> Routing:
    """Choose the experts of every token.

    Equal scores go to the expert of the lowest index, so that choices are the same on every mesh.
    Every token takes part, also those without a target: a prompt needs experts too.

    Args:
        params: this rank's `router_defs`.
        x: has spec `stream`.
        rows: int64, the index of each sample within the global batch, for jitter.
        positions: int64, distinct within a sample and in the order of the original sequence, such
            as 0, 1, ... wherever the tokens are now; of packed documents that were rearranged, a
            token's document times the length of the sample, plus its place in that document.
        key: the key of the jitter, or None for none (evaluation).
        kernels: of ``"moe_router"``, where tokens choose without Sinkhorn's iteration.

    Returns:
        This rank's `Routing`. Collectives: none for top-k without capacity; else those of `keep` or
        `choose_tokens`, over the data axes too where the capacity is that of a batch; "sinkhorn"
        sums one number per sample and expert in each step, over the axes that split the sequence.
        None in backward.
    """
    if key is not None and config.jitter:
        x = x * _draw_jitter(key, x, config, rows, positions, stream)
    logits = _logits(params, x, config)
    experts, weights, scores = _choose_experts(params, logits, config, stream, kernels)
    kept = _fit_capacity(experts, weights, config, rows, positions, stream)
    # a zero alone would hide what is dropped from the loss but not from the gradient
    weights = torch.where(kept, weights * config.scale, torch.zeros_like(weights))
    return Routing(experts, weights, kept, scores, logits)


def route_by(router: Router, params: dict, inputs: RouterInput) -> tuple[Routing, Tensor]:
    """The routing of a router of one's own, which has no logits, and its auxiliary sum.

    An expert that does not exist, or that a token has twice, cannot be refused without waiting for
    the device: the weights of that token are NaN, and so is the loss.

    Raises:
        TypeError: it does not return a `RouterOutput`.
        ValueError: a result has other shapes or dtypes than `RouterOutput` describes, or is `kept`
            beside `capacity_factor`; or the config's `routing` is not "top_k".
    """
    config, title = inputs.config, "cannot route with this router"
    if config.routing != "top_k":
        got = f"{config.routing!r} beside router="
        refuse(title, "routing", got, "'top_k'", "leave it out: the router decides who chooses")
    out = router(params, inputs)
    if not isinstance(out, RouterOutput):
        raise TypeError(
            f"{title}: got {type(out).__name__} from router=; wanted a RouterOutput; "
            "fix: return nn.moe.RouterOutput(experts, weights)"
        )
    raise_problems(title, list(_find_misshapen(out, inputs)))
    listed = out.experts.sort(-1).values
    bad = (listed[..., :1] < 0) | (listed[..., -1:] >= config.num_experts)
    bad = bad | (listed[..., 1:] == listed[..., :-1]).any(-1, keepdim=True)
    weights = torch.where(bad, math.nan, out.weights)
    experts = torch.where(bad, torch.arange(listed.shape[-1], device=listed.device), out.experts)
    kept, scores = out.kept, out.scores
    if kept is None:
        places = (inputs.rows, inputs.positions, inputs.stream)
        kept = _fit_capacity(experts, weights, config, *places)
    weights = torch.where(kept, weights, torch.zeros_like(weights))
    if scores is None:
        scores = lax.stop_gradient(out.weights).clamp_min(0)
    scores = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    share = weights.new_zeros(()) if out.auxiliary is None else out.auxiliary
    return Routing(experts, weights, kept, scores), share


def _find_misshapen(out: RouterOutput, inputs: RouterInput) -> Iterator[Problem]:
    """Fields whose shapes or dtypes are not those that `RouterOutput` describes."""
    tokens, experts = tuple(inputs.x.shape[:2]), inputs.config.num_experts
    choices = out.experts.shape[-1] if out.experts.dim() else 0
    most = f"[{tokens[0]}, {tokens[1]}, choices], at most {experts} choices"
    if out.experts.dtype != torch.int64 or not 0 < choices <= experts:
        got = f"{out.experts.dtype} {list(out.experts.shape)}"
        yield Problem("experts", got, f"torch.int64 {most}", "return the index of each expert")
    each = (*tokens, choices)
    wanted = {"experts": each, "weights": each, "kept": each, "scores": (*tokens, experts)}
    for name, shape in {**wanted, "auxiliary": ()}.items():
        value = getattr(out, name)
        if value is not None and tuple(value.shape) != shape:
            fix = "return one for each of this rank's tokens"
            if name == "auxiliary":
                fix = "return a sum over this rank's tokens"
            yield Problem(name, str(list(value.shape)), str(list(shape)), fix)
    for name in ("weights", "scores", "auxiliary"):
        value = getattr(out, name)
        if value is not None and not value.is_floating_point():
            yield Problem(name, str(value.dtype), "a floating dtype")
    if out.kept is not None and inputs.config.capacity_factor:
        got = f"given beside capacity_factor={inputs.config.capacity_factor}"
        yield Problem("kept", got, "None", "set capacity_factor=0, or leave kept out")
    if out.kept is not None and out.kept.dtype != torch.bool:
        yield Problem("kept", str(out.kept.dtype), "torch.bool", "compare: kept > 0")


def top_k_experts(
    scores: Float[Tensor, "batch seq experts"],
    config: MoEConfig,
    balance: Float[Tensor, " experts"] | None = None,
    *,
    logits: Float[Tensor, "batch seq experts"] | None = None,
    kernels: Kernels = AUTO,
) -> Int[Tensor, "batch seq choices"]:
    """The `top_k` experts of each token by score plus `balance`, in the chosen groups; best first.

    Args:
        scores: no gradient flows.
        balance: added to the scores of all tokens.
        logits: that scores were made of: among equal scores the expert of the larger logit is
            chosen. None: by scores alone.
        kernels: of ``"moe_router"``.
    """
    score: KernelScore = "given" if logits is None else config.score
    ranked, own = (lax.stop_gradient(x) for x in (scores, scores if logits is None else logits))
    if _has_kernel(kernels, config, own):
        return _route_by_kernel(own, balance, config, score, "scores")[0]
    return choose(
        ranked, own, lax.stop_gradient(balance), score,
        top_k=config.top_k, num_groups=config.num_groups, top_groups=config.top_groups,
        top_two=config.group_score == "top2",
    )  # fmt: skip


def _choose_experts(
    params: dict, logits: Tensor, config: MoEConfig, stream: P, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, their weights before `scale`, in which dropping has no part, and all scores."""
    weighting: Weighting = "renormalised" if config.renormalise else "scores"
    if config.normalise == "after":
        weighting = "softmax of chosen"
    if config.routing == "top_k" and _has_kernel(kernels, config, logits):
        return _route_by_kernel(logits, params.get("balance"), config, config.score, weighting)
    scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(-1)
    if config.routing == "expert_choice":
        experts = torch.arange(config.num_experts, device=logits.device).expand_as(scores)
        return experts, scores, scores
    if config.routing == "sinkhorn":
        ranking = _sinkhorn(lax.stop_gradient(logits), config.sinkhorn_steps, stream)
        experts = best(ranking, config.top_k)
    else:
        balance = params.get("balance")
        experts = top_k_experts(scores, config, balance, logits=logits, kernels=kernels)
    return experts, weights_of(experts, logits, scores, weighting), scores


def _has_kernel(kernels: Kernels, config: MoEConfig, x: Tensor) -> bool:
    room = fits(config.num_experts, config.num_groups)
    return room and kernels.takes("moe_router", x)


def _route_by_kernel(
    x: Tensor, balance: Tensor | None, config: MoEConfig, score: KernelScore, weighting: Weighting
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_router` of logits, or given scores, ``[batch, seq, experts]``."""
    found = moe_router(
        x.flatten(0, 1), None if balance is None else lax.stop_gradient(balance),
        top_k=config.top_k, score=score, weighting=weighting, num_groups=config.num_groups,
        top_groups=config.top_groups, group_score=config.group_score,
    )  # fmt: skip
    experts, weights, scores = (part.unflatten(0, x.shape[:2]) for part in found)
    return experts, weights, scores


def _draw_jitter(
    key: Tensor, x: Tensor, config: MoEConfig, rows: Tensor, positions: Tensor, stream: P
) -> Tensor:
    """Uniform numbers around 1, a function of the token's place in the global batch."""
    seq = x.shape[SEQ_DIM] * lax.axis_size(sequence_axes(stream))
    places = (rows.unsqueeze(-1) * seq + positions).flatten()
    bounds = (1 - config.jitter, 1 + config.jitter)
    wide = torch.promote_types(x.dtype, config.torch_router_dtype)
    shape = (places.shape[0], x.shape[-1])
    return random.uniform(key, shape, wide, *bounds, index=(places, None)).view_as(x)


def _logits(params: dict, x: Tensor, config: MoEConfig) -> Tensor:
    wide = torch.promote_types(x.dtype, config.torch_router_dtype)
    logits = x.to(wide) @ params["w"].to(wide)
    return logits + params["b"].to(wide) if "b" in params else logits


def _fit_capacity(
    experts: Tensor,
    weights: Tensor,
    config: MoEConfig,
    rows: Tensor,
    positions: Tensor,
    stream: P,
) -> Tensor:
    """The assignments within the capacity; all without one."""
    if not config.capacity_factor:
        return torch.ones_like(experts, dtype=torch.bool)
    batch, seq = experts.shape[:2]
    limit = capacity(config, competing(config, batch, seq, stream))
    if config.capacity_over == "batch":
        positions, where = _order_tokens(rows, positions, stream), P()
        experts = _join_samples(experts, stream)
        weights = _join_samples(lax.stop_gradient(weights), stream)
    else:
        where = stream
    if config.routing == "expert_choice":
        kept = choose_tokens(weights, limit=limit, positions=positions, stream=where)
    else:
        own: Any = {"limit": limit, "positions": positions, "stream": where}
        kept = keep(experts, weights, drop=config.drop, **own)
    return kept if where is stream else _select_own_samples(kept, batch, stream)


def _sinkhorn(logits: Tensor, steps: int, stream: P) -> Tensor:
    """exp(logits) with experts scaled so that a sequence gives each of them as much as the others.

    Sinkhorn's iteration also scales tokens, to one each; what is returned leaves that out, as it
    does not change the order of a token's experts.
    """
    axes = sequence_axes(stream)
    tokens = logits.shape[SEQ_DIM] * lax.axis_size(axes)
    cost = (logits - logits.amax(-1, keepdim=True)).exp()
    column = torch.ones_like(cost[:, :1])
    for _ in range(steps):
        row = 1 / (tokens * ((column * cost).sum(-1, keepdim=True) + _SINKHORN_EPS))
        share = lax.psum((row * cost).sum(SEQ_DIM, keepdim=True), axes)
        column = 1 / (cost.shape[-1] * (share + _SINKHORN_EPS))
    return column * cost


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


class FilledSums(NamedTuple):
    """`RouterSums`, and how full ranks were, where experts have a bounded room.

    Attributes:
        load, assignments, dropped, unrouted, tokens, entropy: of `RouterSums`.
        fill: int64 ``[len(ROOMS) + 1]``, for how many ranks and microbatches each room of `ROOMS`
            was just enough, for all tokens; see `Fit`.
    """

    load: Tensor
    assignments: Tensor
    dropped: Tensor
    unrouted: Tensor
    tokens: Tensor
    entropy: Tensor
    fill: Tensor


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
    """Each token's scores, divided by their sum where they are sigmoids (DeepSeek-V3, eq. 19).

    By their logarithms, as sigmoids vanish in float32 where logits are near -100. Those of a router
    of one's own are divided already.
    """
    if config.score == "softmax" or routing.logits is None:
        return routing.scores
    return torch.nn.functional.logsigmoid(routing.logits).softmax(-1)


def over_context(x: Tensor, stream: P) -> Tensor:
    """A sum over this rank's tokens, made one whose psum over data and context axes is of all.

    The stream may be split by further axes, under sequence parallelism by the tensor-parallel one:
    one all-reduce over these, so that the result is the same on their ranks either way.
    """
    return lax.psum(x, split_further(stream))


def split_further(stream: P) -> tuple[str, ...]:
    """The axes that split the stream's sequence besides the context axes."""
    return tuple(name for name in sequence_axes(stream) if name not in CONTEXT_AXES)


def statistics(
    routing: Routing, config: MoEConfig, *, counted: Bool[Tensor, "batch seq"], stream: P
) -> RouterSums:
    """The sums of one layer over this rank's tokens with a target, `counted`; no gradient flows.

    Their psum over the data and context axes is that of all tokens. Collectives: under sequence
    parallelism one all-reduce of each.
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


def summary(sums: RouterSums | FilledSums) -> dict[str, float]:
    """Rates and ratios of the sums of all ranks, as numbers on the host.

    Those of several layers may be stacked on leading dims. ``load_ratio`` is the load of the
    busiest expert over the mean, of the worst layer; ``idle`` the fraction of experts without a
    token; ``drop_rate`` of assignments; ``unrouted_rate`` of tokens; and ``entropy`` the mean over
    tokens in nats. 0 where there was nothing. ``fullest``, if it was measured, is the room that the
    fullest rank needed, as a multiple of balanced rows (0: more than the largest of `ROOMS`).
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
        **({"fullest": needed_room(sums.fill)} if isinstance(sums, FilledSums) else {}),
    }


def auxiliary(
    params: dict,
    routing: Routing,
    config: MoEConfig,
    *,
    counted: Bool[Tensor, "batch seq"],
    stream: P,
    load: Int[Tensor, " experts"] | None = None,
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

    Under `balance_by` "quantile" the derivative is scaled as the loss is, and divided by the number
    of targets the mean over sequences, by their tokens, of beta_e - mean(beta): with n tokens that
    count in the sequence, scores s, the bias b, and alpha_t the (k + 1)-th largest of s_t + b,
    beta_e is the value of s_te - alpha_t that floor(n k / E) tokens exceed. So many tokens would
    choose expert e if its bias were -beta_e. The rule is b = decay b - (1 - decay) beta (Su 2026,
    https://kexue.fm/archives/11619: a step of coordinate descent on the dual of the assignment that
    maximises the sum of scores under equal loads; Megatron-LM's qb_dual_update, there of each
    rank's microbatch). Modules that predict further ahead have fewer targets, and the mean is with
    zeros for the others.

    Args:
        params: this rank's `router_defs`.
        counted: tokens with a target.
        stream: the spec of the residual stream.
        load: the assignments of the global batch to each expert, which f is of under `aux`
            "global"; None: of this microbatch, as under "batch".
        kernels: of ``"moe_router"``.

    Returns:
        A scalar, whose psum over the data and context axes is the term. Collectives: for the load-
        balancing loss one all-reduce of ``[batch, experts]`` or ``[experts]`` integers over the
        axes that split what it balances; by quantiles one all-gather of scores ``[batch, seq,
        experts]`` over those that split the sequence; under sequence parallelism one of a scalar.
        In backward the latter alone.
    """
    zero = torch.zeros_like(routing.scores[..., 0]).sum()
    share = lax.stop_gradient(zero)
    if config.aux_loss:
        whole = load if config.aux == "global" else None
        own = _imbalance(routing, config, counted, stream, kernels, whole)
        share = share + config.aux_loss * own
    if config.z_loss and routing.logits is not None:
        lse = routing.logits.logsumexp(-1)
        share = share + config.z_loss * torch.where(counted, lse.square(), 0).sum()
    if "balance" in params:
        term = _quantile_term if config.balance_by == "quantile" else _balance_term
        share = share + term(params["balance"], routing, config, counted, stream)
    return over_context(share, stream)


def _imbalance(
    routing: Routing,
    config: MoEConfig,
    counted: Tensor,
    stream: P,
    kernels: Kernels,
    whole: Tensor | None,
) -> Tensor:
    """The sum over this rank's tokens t of sum over e of f_e P_te.

    f is of all ranks' tokens, or of the `whole` load of all microbatches too, and P of this rank's
    own, so that backward needs no collective.
    """
    shares = distribution(routing, config)
    shares = torch.where(counted.unsqueeze(-1), shares, torch.zeros_like(shares)).sum(SEQ_DIM)
    load, choices = _count_load(routing, config, counted, stream, kernels, whole)
    f = load.to(shares.dtype) * config.num_experts / choices.clamp_min(1)
    return (f * shares).sum()


def _count_load(
    routing: Routing,
    config: MoEConfig,
    counted: Tensor,
    stream: P,
    kernels: Kernels,
    whole: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The assignments to each expert that are to be balanced, by sequence or in all; their sum."""
    if whole is not None:
        return whole, whole.sum()
    chosen = routing.experts
    if config.balance_bias:
        scores, logits = routing.scores, routing.logits
        chosen = top_k_experts(scores, config, logits=logits, kernels=kernels)
    taken = counted.unsqueeze(-1).expand_as(chosen)
    load = expert_load(chosen, taken, config.num_experts)
    tokens = counted.sum(SEQ_DIM, keepdim=True)
    if config.aux == "sequence":
        load, tokens = lax.psum((load, tokens), sequence_axes(stream))
    else:
        axes = (*DATA_AXES, *sequence_axes(stream))
        load, tokens = lax.psum((load.sum(0, keepdim=True), tokens.sum(0, keepdim=True)), axes)
    return load, config.top_k * tokens


def _balance_term(
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
        return torch.where(compat.constant(once, excess.device), excess, 0.0), None

    counts = zero if compat.pushing_forward() else custom_vjp(zero, forward, backward)
    return counts(balance, excess).to(routing.scores.dtype)


def _quantile_term(
    balance: Tensor, routing: Routing, config: MoEConfig, counted: Tensor, stream: P
) -> Tensor:
    """0, with the derivative by `balance` in `auxiliary`: sums over sequences of n beta."""
    scores, bias = lax.stop_gradient((routing.scores, balance.to(routing.scores.dtype)))
    alpha = (scores + bias).topk(config.top_k + 1, dim=-1).values[..., -1:]
    above = torch.where(counted.unsqueeze(-1), scores - alpha, -math.inf)
    tokens = lax.psum(counted.sum(SEQ_DIM), sequence_axes(stream))
    above = torch.sort(_gather_whole(above, stream), dim=SEQ_DIM, descending=True).values
    part = (tokens * config.top_k // config.num_experts).view(-1, 1, 1)
    beta = above.gather(SEQ_DIM, part.expand(-1, 1, above.shape[-1])).squeeze(SEQ_DIM)
    beta = torch.where(tokens.unsqueeze(-1) > 0, beta - beta.mean(-1, keepdim=True), 0.0)
    here = (counted.sum(SEQ_DIM).unsqueeze(-1) * beta).sum(0).to(balance.dtype)
    return ((balance - lax.stop_gradient(balance)) * here).sum().to(routing.scores.dtype)
