"""Routers against a token-by-token oracle: choices, weights and gradients, on every mesh."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import DATA_AXES, P, lax, random, tree
from functron.nn.moe import MoEConfig, Routing, route, router_defs
from functron.nn.moe.router import top_k_experts
from tests.nn.moe.conftest import factors

BATCH, SEQ, EMBED, EXPERTS = 4, 8, 5, 8
ROWS = torch.arange(BATCH)
STREAM = P(DATA_AXES)
POSITIONS = torch.arange(SEQ).expand(BATCH, SEQ)


def by_expert(routing: Routing, num_experts: int) -> torch.Tensor:
    """The weights as [B, T, E], of whatever is in them: the kept mask is not looked at."""
    here = routing.experts.unsqueeze(-1) == torch.arange(num_experts)
    return torch.where(here, routing.weights.unsqueeze(-1), 0.0).sum(-2)


def specs(layout, params) -> tuple:
    """Of parameters, stream, rows and positions."""
    return tree.map(lambda _: P(), params), layout.stream, P(DATA_AXES), layout.stream


@pytest.mark.pairwise(of=factors)
def test_weights_and_gradients(agrees, params, randn, oracle, layout, config):
    """Also of what is dropped: its weight is 0, and so is the gradient that a use of it sends back.

    (transformers 48687: zero weights hid foreign slots in the loss, not in the router's gradient.)
    """
    order = list(layout.order)

    def per_rank(params, x, rows, positions):
        routing = route(params, x, config, stream=layout.stream, rows=rows, positions=positions)
        return by_expert(routing, config.num_experts)

    def dense(params, x, *_):
        original = x[:, torch.tensor(order).argsort()]
        return oracle(params, original, config).weights[:, order]

    args = (params(config), randn(BATCH, SEQ, EMBED))
    param_specs, stream, row_spec, position_spec = specs(layout, args[0])
    others = (ROWS, layout.positions)
    agrees(
        per_rank, dense, args, layout.mesh, (param_specs, stream), stream, others,
        (row_spec, position_spec),
    )  # fmt: skip


@pytest.mark.pairwise(of=factors)
def test_choices(params, randn, oracle, layout, config):
    weights, x = params(config), randn(BATCH, SEQ, EMBED)

    def per_rank(params, x, rows, positions):
        return route(params, x, config, stream=layout.stream, rows=rows, positions=positions)

    order = list(layout.order)
    expected = oracle(weights, x[:, torch.tensor(order).argsort()], config)
    mapped = ft.shard_map(per_rank, layout.mesh, specs(layout, weights), layout.stream)
    got = mapped(weights, x, ROWS, layout.positions)
    assert got.experts.dtype == torch.int64
    assert got.kept.dtype == torch.bool
    assert got.experts.shape == got.weights.shape == got.kept.shape == (BATCH, SEQ, config.choices)
    torch.testing.assert_close(got.scores, expected.scores[:, order])
    torch.testing.assert_close(got.logits, expected.logits[:, order])
    choices = torch.tensor(expected.choices)[:, order]
    assert torch.equal(got.experts, choices)
    kept = [
        [[(order[t], e) in expected.kept[b] for e in row] for t, row in enumerate(rows)]
        for b, rows in enumerate(got.experts.tolist())
    ]
    assert torch.equal(got.kept, torch.tensor(kept))
    assert torch.equal(got.weights[~got.kept], torch.zeros_like(got.weights[~got.kept]))
    # the cases are worth something: capacities bind, and do not bind everywhere
    assert bool(config.capacity_factor) == (not got.kept.all())
    assert got.kept.any()


@pytest.mark.parametrize("mesh", [ft.Mesh(), ft.Mesh(dp=2, tp=2)], ids=str)
def test_capacity_of_a_batch_is_that_of_one_of_megatrons_ranks(params, randn, configs, mesh):
    """`apply_router_token_dropping` with its policy "probs": each expert's largest probabilities."""
    config = replace(configs["capacity-of-batch"], drop="probability")
    weights, x = params(config), randn(BATCH, SEQ, EMBED)

    def per_rank(config, params, x, rows, positions):
        stream = P(DATA_AXES, ("tp",))
        return route(params, x, config, stream=stream, rows=rows, positions=positions)[:2]

    every = replace(config, capacity_factor=0.0, capacity_over="sequence")
    experts, chosen = per_rank(every, weights, x, ROWS, POSITIONS)
    none = torch.zeros(BATCH, SEQ, EXPERTS, dtype=chosen.dtype)
    probabilities = none.scatter(-1, experts, chosen).flatten(0, 1)
    limit = math.ceil(BATCH * SEQ * config.top_k / EXPERTS * config.capacity_factor)
    _, indices = probabilities.topk(limit, dim=0)
    mask = torch.zeros_like(probabilities).scatter(0, indices, 1.0)

    spec = P(DATA_AXES, ("tp",))
    in_specs = (tree.map(lambda _: P(), weights), spec, P(DATA_AXES), spec)
    mapped = ft.shard_map(functools.partial(per_rank, config), mesh, in_specs, spec)
    got = none.scatter(-1, *mapped(weights, x, ROWS, POSITIONS)).flatten(0, 1)
    torch.testing.assert_close(got, probabilities * mask)
    assert not torch.equal(got, probabilities)


def experts_layer(experts, routing, x, split, stream):
    """Experts in the plainest way: ranks see all tokens of ep and tp, and add up their parts.

    What flows back to the routing weights of a rank is then a part of a sum: over the ranks of
    experts, each of which knows its own experts' share, and over those of the hidden width.
    """

    def whole(x):
        x = lax.all_gather(x, "ep", axis=0, tiled=True)
        return lax.all_gather(x, "tp", axis=1, tiled=True) if "tp" in stream[1] else x

    mine = lax.global_index(experts["up"].shape[0], split, device=x.device)
    here = whole(routing.experts).unsqueeze(-1) == mine
    weights = torch.where(here, whole(routing.weights).unsqueeze(-1), 0.0).sum(-2)
    hidden = torch.einsum("btd,edf->btef", whole(x), experts["up"]).tanh()
    out = torch.einsum("btef,efd,bte->btd", hidden, experts["down"], weights)
    out = lax.psum_scatter(out, "ep", scatter_dimension=0, tiled=True)
    if "tp" in stream[1]:
        return lax.psum_scatter(out, "tp", scatter_dimension=1, tiled=True)
    return lax.psum(out, "tp")


WHOLE, SPLIT = P(DATA_AXES, ("cp",)), P(DATA_AXES, ("cp", "tp"))


@pytest.mark.parametrize(
    ("mesh", "stream", "split", "width"),
    [
        ("ep=2", WHOLE, ("ep",), None),
        ("ep=2,cp=2", WHOLE, ("ep",), None),
        ("tp=2", WHOLE, ("ep",), "tp"),
        ("tp=2", SPLIT, ("ep",), "tp"),
        ("ep=2,tp=2", WHOLE, ("ep",), "tp"),
        ("ep=2,tp=2", SPLIT, ("ep",), "tp"),
        ("ep=2,tp=2", SPLIT, ("ep", "tp"), None),
        ("dp=2,ep=2,tp=2", SPLIT, ("ep", "tp"), None),
        ("ep=2,tp=2", WHOLE, ("ep", "tp"), None),
    ],
)
@pytest.mark.parametrize("name", ["deepseek-v3", "capacity"])
def test_gradients_through_split_experts(
    agrees, params, randn, oracle, configs, mesh, stream, split, width, name
):
    """Router gradients where experts are elsewhere (Megatron-LM 7452, torchtitan 2387)."""
    config = configs[name]
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    experts = {"up": randn(EXPERTS, EMBED, 4), "down": randn(EXPERTS, 4, EMBED)}
    expert_specs = {"up": P(split, None, width), "down": P(split, width)}

    def per_rank(params, experts, x, rows, positions):
        routing = route(params, x, config, stream=stream, rows=rows, positions=positions)
        return experts_layer(experts, routing, x, split, stream)

    def dense(params, experts, x, *_):
        weights = oracle(params, x, config).weights
        hidden = torch.einsum("btd,edf->btef", x, experts["up"]).tanh()
        return torch.einsum("btef,efd,bte->btd", hidden, experts["down"], weights)

    in_specs = (tree.map(lambda _: P(), weights), expert_specs, stream)
    agrees(
        per_rank, dense, (weights, experts, x), ft.Mesh.parse(mesh), in_specs, stream,
        (ROWS, POSITIONS), (P(DATA_AXES), stream),
    )  # fmt: skip


@pytest.mark.pairwise(of=lambda layout, name: [{"layout": layout}, {"name": name}])
@pytest.mark.parametrize("name", ["softmax", "deepseek-v2", "capacity", "sinkhorn"])
def test_ties_go_to_the_first_experts(params, configs, layout, name):
    """Nothing tells experts apart: which are chosen is the same on every mesh."""
    config = configs[name]
    weights = tree.map(torch.zeros_like, params(config))
    x = torch.ones(BATCH, SEQ, EMBED, dtype=torch.float64)

    def per_rank(params, x, rows, positions):
        return route(params, x, config, stream=layout.stream, rows=rows, positions=positions)

    mapped = ft.shard_map(per_rank, layout.mesh, specs(layout, weights), layout.stream)
    got = mapped(weights, x, ROWS, layout.positions)
    assert torch.equal(got.experts, torch.arange(config.top_k).expand_as(got.experts))
    if config.capacity_factor:  # the first in the original order, wherever they are now
        first = layout.positions < 2  # ceil(0.8 * 8 * 2 / 8)
        assert torch.equal(got.kept, first.unsqueeze(-1).expand_as(got.kept))


def test_ties_go_to_the_first_tokens(params, configs, layout):
    """Where experts choose and nothing tells tokens apart: in the original order."""
    config = configs["expert-choice"]
    weights = tree.map(torch.zeros_like, params(config))
    x = torch.ones(BATCH, SEQ, EMBED, dtype=torch.float64)

    def per_rank(params, x, rows, positions):
        routing = route(params, x, config, stream=layout.stream, rows=rows, positions=positions)
        return routing.kept

    mapped = ft.shard_map(per_rank, layout.mesh, specs(layout, weights), layout.stream)
    kept = mapped(weights, x, ROWS, layout.positions)
    first = layout.positions < 3  # ceil(1.2 * 8 * 2 / 8)
    assert torch.equal(kept, first.unsqueeze(-1).expand_as(kept))


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_all_tokens_to_one_expert(params, randn, configs, layout, factor):
    """Seven experts have no token; gradients are finite, and capacity keeps the first tokens."""
    config = replace(configs["one"], capacity_factor=factor)
    weights = params(config)
    weights["b"] = torch.where(torch.arange(EXPERTS) == 5, 100.0, 0.0).to(torch.float64)

    def per_rank(params, x, rows, positions):
        routing = route(params, x, config, stream=layout.stream, rows=rows, positions=positions)
        return routing.experts, routing.kept, routing.weights

    mapped = ft.shard_map(per_rank, layout.mesh, specs(layout, weights), layout.stream)
    x = randn(BATCH, SEQ, EMBED)
    experts, kept, got = mapped(weights, x, ROWS, layout.positions)
    assert torch.equal(experts, torch.full_like(experts, 5))
    limit = 1 if factor else SEQ
    assert torch.equal(kept[..., 0], layout.positions < limit)
    torch.testing.assert_close(got, kept.to(torch.float64))
    grads = torch.func.grad(lambda w: mapped(w, x, ROWS, layout.positions)[2].sum())(weights)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(grads))


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 1, 6, 0]])
def test_jitter(agrees, params, randn, oracle, configs, layout, rows):
    """One noise for each place in the global batch, whoever holds it."""
    config = replace(configs["renormalised"], jitter=0.3)
    key, order, rows = random.key(3), list(layout.order), torch.tensor(rows)
    noise = random.uniform(key, (7, SEQ, EMBED), torch.float64, 0.7, 1.3)[rows]

    def per_rank(params, x, rows, positions):
        routing = route(
            params, x, config, stream=layout.stream, rows=rows, positions=positions, key=key
        )
        return by_expert(routing, config.num_experts)

    def dense(params, x, *_):
        original = x[:, torch.tensor(order).argsort()]
        return oracle(params, original * noise, config).weights[:, order]

    args = (params(config), randn(BATCH, SEQ, EMBED))
    param_specs, stream, row_spec, position_spec = specs(layout, args[0])
    agrees(
        per_rank, dense, args, layout.mesh, (param_specs, stream), stream,
        (rows, layout.positions), (row_spec, position_spec),
    )  # fmt: skip


def test_no_jitter_without_a_key(params, randn, configs):
    config = replace(configs["softmax"], jitter=0.3)
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    places = {"stream": STREAM, "rows": ROWS, "positions": POSITIONS}
    still = route(weights, x, config, **places)
    assert torch.equal(still.logits, route(weights, x, configs["softmax"], **places).logits)
    noisy = route(weights, x, config, key=random.key(0), **places)
    assert not torch.equal(still.logits, noisy.logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", ["float32", "float64"])
def test_dtypes(params, randn, configs, dtype, wanted):
    """Logits are in float32 at least, from parameters and stream as they are rounded."""
    config = replace(configs["deepseek-v3"], router_dtype=wanted)
    weights = {**tree.map(lambda leaf: leaf.to(dtype), params(config)), "balance": torch.zeros(8)}
    x = randn(BATCH, SEQ, EMBED).to(dtype)
    got = route(weights, x, config, stream=STREAM, rows=ROWS, positions=POSITIONS)
    wide = torch.promote_types(dtype, getattr(torch, wanted))
    assert got.weights.dtype == got.scores.dtype == got.logits.dtype == wide
    expected = x.double() @ weights["w"].double() + weights["b"].double()
    torch.testing.assert_close(got.logits.double(), expected, rtol=1e-5, atol=1e-5)


def test_defs(configs):
    config = configs["deepseek-v3"]
    defs = router_defs(config, EMBED, stddev=0.1, dtype=torch.bfloat16)
    assert set(defs) == {"w", "b", "balance"}
    assert defs["w"].shape == (EMBED, EXPERTS)
    assert defs["w"].axes == ("embed", None)
    assert defs["w"].init.stddev == 0.1
    assert defs["b"].shape == defs["balance"].shape == (EXPERTS,)
    assert defs["balance"].dtype == torch.float32
    assert not defs["balance"].decay
    assert defs["balance"].balance
    assert not defs["w"].balance
    plain = replace(config, router_bias=False, balance_bias=False)
    assert set(router_defs(plain, EMBED, stddev=0.1, dtype=torch.float32)) == {"w"}


@given(
    scores=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    groups=st.sampled_from([(1, 1), (2, 1), (3, 2), (6, 3), (4, 4)]),
    kind=st.sampled_from(["top2", "max"]),
    top_k=st.integers(1, 6),
)
def test_choices_among_many_ties(oracle_choice, scores, groups, kind, top_k):
    config = MoEConfig(
        num_experts=12, top_k=top_k, num_groups=groups[0], top_groups=groups[1], group_score=kind
    )
    row = torch.tensor(scores, dtype=torch.float64)
    got = top_k_experts(row.view(1, 1, -1), config)
    assert got.flatten().tolist() == oracle_choice(scores, config)


def test_sinkhorn_evens_the_load(randn, params, configs):
    """With a bias that sends every token to two experts, balanced choices still use all."""
    config = replace(configs["sinkhorn"], top_k=1, sinkhorn_steps=50)
    weights = params(config)
    weights["b"][:2] += 8
    x = randn(1, 64, EMBED)
    places = {"stream": STREAM, "rows": ROWS[:1], "positions": torch.arange(64).view(1, -1)}
    plain = route(weights, x, replace(config, routing="top_k"), **places).experts
    balanced = route(weights, x, config, **places).experts
    assert plain.unique().numel() == 2
    assert balanced.flatten().bincount(minlength=EXPERTS).max() <= 16


@pytest.mark.parametrize("name", ["deepseek-v3", "capacity", "expert-choice", "sinkhorn"])
def test_traces(params, randn, configs, name):
    """The program is a graph of its own: nothing reads a number back from the device."""
    config = configs[name]
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    stream = P(DATA_AXES, ("cp", "tp"))

    def per_rank(params, x, rows, positions):
        return route(params, x, config, stream=stream, rows=rows, positions=positions).weights

    in_specs = (tree.map(lambda _: P(), weights), stream, P(DATA_AXES), stream)
    mapped = ft.shard_map(per_rank, ft.Mesh(dp=2, cp=2, tp=2), in_specs, stream)
    text = str(ft.trace(mapped)(weights, x, ROWS, POSITIONS))
    gathers = text.count("all_gather(")
    assert (gathers > 0) == bool(config.capacity_factor), text


@pytest.mark.gpu
def test_a_gpu_chooses_what_the_cpu_chooses(randn, params, config):
    """Among many ties as well: stream and weights are small whole numbers."""
    weights, x = tree.map(torch.round, (params(config), randn(BATCH, SEQ, EMBED)))
    operands = (weights, x, ROWS, POSITIONS)

    def run(weights, x, rows, positions):
        return route(weights, x, config, stream=STREAM, rows=rows, positions=positions)

    got = run(*tree.map(lambda leaf: leaf.cuda(), operands))
    torch.testing.assert_close(tree.map(lambda leaf: leaf.cpu(), got), run(*operands))
