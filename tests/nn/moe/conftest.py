"""Routing written out token by token in Python, and the meshes on which ours must equal it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from functron import DATA_AXES, P
from functron.nn.moe import MoEConfig
from functron.spmd import Mesh
from functron.spmd.mesh import CONTEXT_AXES

BATCH, SEQ, EMBED, EXPERTS = 4, 8, 5, 8
WHOLE = P(DATA_AXES, CONTEXT_AXES)
SEQUENCE_PARALLEL = P(DATA_AXES, (*CONTEXT_AXES, "tp"))
ZIGZAG = [0, 1, 6, 7, 2, 3, 4, 5]  # chunks 0 and 3, then 1 and 2, of 4


@dataclass(frozen=True)
class Layout:
    """A mesh, how it splits the stream, and the original place of each token of a sample."""

    mesh: Mesh
    stream: P
    order: tuple[int, ...]

    @property
    def positions(self) -> Tensor:
        return torch.tensor(self.order).expand(BATCH, SEQ)


LAYOUTS = {
    "": (WHOLE, None),
    "dp=2": (WHOLE, None),
    "ep=2": (WHOLE, None),
    "cp=2": (WHOLE, None),
    "cp=2 zigzag": (WHOLE, ZIGZAG),
    "ulysses=2": (WHOLE, None),
    "tp=2": (WHOLE, None),
    "tp=2 split": (SEQUENCE_PARALLEL, None),
    "dp=2,cp=2,tp=2 split zigzag": (SEQUENCE_PARALLEL, ZIGZAG),
}


@pytest.fixture(params=list(LAYOUTS))
def layout(request) -> Layout:
    stream, order = LAYOUTS[request.param]
    mesh = Mesh.parse(request.param.split()[0] if request.param else "")
    return Layout(mesh, stream, tuple(order or range(SEQ)))


PLAIN = MoEConfig(num_experts=EXPERTS, top_k=2, expert_dim=4, router_bias=True)
GROUPED = replace(PLAIN, top_k=3, num_groups=4, top_groups=2)

CONFIGS = {
    "softmax": PLAIN,
    "renormalised": replace(PLAIN, renormalise=True),
    "after": replace(PLAIN, normalise="after", top_k=4, router_bias=False),
    "sigmoid": replace(PLAIN, score="sigmoid", scale=2.5),
    "all": replace(PLAIN, top_k=EXPERTS),
    "one": replace(PLAIN, top_k=1),
    "deepseek-v2": replace(GROUPED, group_score="max", scale=16.0),
    "deepseek-v3": replace(
        GROUPED, score="sigmoid", renormalise=True, scale=2.5, balance_bias=True
    ),
    "capacity": replace(PLAIN, capacity_factor=0.8, renormalise=True),
    "capacity-probability": replace(PLAIN, capacity_factor=0.8, drop="probability"),
    "capacity-of-batch": replace(PLAIN, capacity_factor=0.8, capacity_over="batch"),
    "expert-choice": replace(PLAIN, routing="expert_choice", capacity_factor=1.2),
    "expert-choice-of-batch": replace(
        PLAIN, routing="expert_choice", capacity_factor=1.2, capacity_over="batch"
    ),
    "sinkhorn": replace(PLAIN, routing="sinkhorn"),
    "sinkhorn-capacity": replace(
        PLAIN, routing="sinkhorn", top_k=1, score="sigmoid", capacity_factor=1.0
    ),
}


@pytest.fixture(params=list(CONFIGS))
def config(request) -> MoEConfig:
    return CONFIGS[request.param]


def factors(layout: str, config: str) -> list[dict]:
    """Each config, and on each layout each way in which tokens compete for experts."""
    own = CONFIGS[config]
    over = own.capacity_over if own.capacity_factor else ""
    return [{"config": config}, {"layout": layout, "competing": (own.routing, over, own.drop)}]


@pytest.fixture(scope="session")
def configs() -> dict[str, MoEConfig]:
    return CONFIGS


@pytest.fixture
def params(randn) -> Callable[[MoEConfig], dict]:
    """Parameters of a router; the bias that balances is large enough to change choices."""

    def make(config: MoEConfig) -> dict:
        made = {"w": randn(EMBED, config.num_experts)}
        if config.router_bias:
            made["b"] = 0.5 * randn(config.num_experts)
        if config.balance_bias:
            made["balance"] = 0.5 * randn(config.num_experts)
        return made

    return make


def descending(values: list[float]) -> list[int]:
    """Indices by value, the largest first, and of equal ones the first first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def chosen_by(ranking: list[float], config: MoEConfig) -> list[int]:
    """The experts of one token, best first."""
    size = len(ranking) // config.num_groups
    members = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    if config.num_groups > 1:
        best = [sorted((ranking[e] for e in group), reverse=True) for group in members]
        score = [v[0] if config.group_score == "max" else v[0] + v[1] for v in best]
        allowed = {e for g in descending(score)[: config.top_groups] for e in members[g]}
    else:
        allowed = set(members[0])
    return [e for e in descending(ranking) if e in allowed][: config.top_k]


def balanced(logits: Tensor, steps: int) -> Tensor:
    """Sinkhorn's iteration on one sequence [T, E], as Megatron-LM writes it."""
    cost = (logits - logits.amax(1, keepdim=True)).exp()
    tokens, experts = cost.shape
    d0, d1 = torch.ones(tokens).to(cost), torch.ones(experts).to(cost)
    for _ in range(steps):
        d0 = 1 / tokens / ((d1 * cost).sum(1) + 1e-8)
        d1 = 1 / experts / ((d0[:, None] * cost).sum(0) + 1e-8)
    return d1 * cost * d0[:, None]


def fill(choices: list[list[int]], weight, limit: int, drop: str) -> set[tuple[int, int]]:
    """The kept (token, expert) of one sequence in its order: experts fill up one by one."""
    queue = [(t, c, e) for t, row in enumerate(choices) for c, e in enumerate(row)]
    if drop == "position":
        queue.sort(key=lambda entry: (entry[1], entry[0]))
    else:
        queue.sort(key=lambda entry: (-float(weight[entry[0], entry[2]]), entry[1], entry[0]))
    room, kept = {}, set()
    for token, _, expert in queue:
        room[expert] = room.get(expert, limit) - 1
        if room[expert] >= 0:
            kept.add((token, expert))
    return kept


@dataclass(frozen=True)
class Dense:
    """Routing of one whole batch [B, T]: weights by expert, who chose whom, and who was kept."""

    weights: Tensor
    scores: Tensor
    logits: Tensor
    choices: list[list[list[int]]]
    kept: list[set[tuple[int, int]]]


def dense(params: dict, x: Tensor, config: MoEConfig) -> Dense:
    """The oracle: x in the original order; ``weights`` [B, T, E] is differentiable."""
    if config.capacity_over == "batch":
        return dense_over_batch(params, x, replace(config, capacity_over="sequence"))
    logits = x @ params["w"] + params.get("b", 0.0)
    if config.score == "sigmoid":
        scores = 1 / (1 + (-logits).exp())
    else:
        scores = logits.exp() / logits.exp().sum(-1, keepdim=True)
    tokens, experts = logits.shape[1:]
    ranking = (scores + params.get("balance", 0.0)).detach()
    if config.routing == "sinkhorn":
        ranking = torch.stack([balanced(row.detach(), config.sinkhorn_steps) for row in logits])
    room = math.ceil(config.capacity_factor * tokens * config.top_k / experts - 1e-9)
    limit = room if config.capacity_factor else tokens
    weights, all_choices, all_kept = [], [], []
    for b in range(len(x)):
        if config.routing == "expert_choice":
            choices = [list(range(experts))] * tokens
        else:
            choices = [chosen_by(row.tolist(), config) for row in ranking[b]]
        chosen = torch.tensor([[e in row for e in range(experts)] for row in choices])
        if config.normalise == "after":
            masked = torch.where(chosen, logits[b].exp(), 0.0)
            weight = masked / masked.sum(-1, keepdim=True)
        else:
            weight = torch.where(chosen, scores[b], 0.0)
            if config.renormalise:
                weight = weight / weight.sum(-1, keepdim=True)
        drop = "probability" if config.routing == "expert_choice" else config.drop
        kept = fill(choices, weight.detach(), limit, drop)
        mask = torch.tensor([[(t, e) in kept for e in range(experts)] for t in range(tokens)])
        weights.append(torch.where(mask, weight * config.scale, 0.0))
        all_choices.append(choices)
        all_kept.append(kept)
    return Dense(torch.stack(weights), scores, logits, all_choices, all_kept)


def dense_over_batch(params: dict, x: Tensor, config: MoEConfig) -> Dense:
    """Of a batch that competes: one sequence of all samples' first tokens, their second ones, ..."""
    batch = len(x)
    one = dense(params, x.transpose(0, 1).flatten(0, 1)[None], config)
    apart = (
        part.squeeze(0).unflatten(0, (-1, batch)).transpose(0, 1)
        for part in (one.weights, one.scores, one.logits)
    )
    choices = [one.choices[0][b::batch] for b in range(batch)]
    kept = [{(t // batch, e) for t, e in one.kept[0] if t % batch == b} for b in range(batch)]
    return Dense(*apart, choices, kept)


@pytest.fixture
def oracle() -> Callable[[dict, Tensor, MoEConfig], Dense]:
    return dense


@pytest.fixture(scope="session")
def oracle_choice() -> Callable[[list[float], MoEConfig], list[int]]:
    return chosen_by


@pytest.fixture(scope="session")
def oracle_fill() -> Callable:
    return fill
