"""Tokens to experts and back, against a loop over tokens and their choices."""

from __future__ import annotations

import math

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, tree
from functron.nn.moe import layer as layer_module
from functron.nn.moe.layer import dispatched, permute, sort_by_expert, unpermute
from functron.nn.moe.room import RowBounds
from functron.ops.grouped_matmul import grouped_matmul

EXPERTS, EMBED, OUT, TOKENS = 8, 3, 4, 3  # tokens of each rank

MESHES = {
    "": ("ep",),
    "ep=2": ("ep",),
    "ep=4": ("ep",),
    "ep=2,tp=2": ("ep", "tp"),
    "dp=2,ep=2": ("dp", "ep"),
    "dp=2,ep=2 ep": ("ep",),
    "cp=2,ep=2": ("cp", "ep"),
    "dp=2,ep=2,tp=2": ("tp", "ep", "dp"),
}
ROUTINGS = ("random", "dropped", "one expert", "all experts", "limited", "none")


def draw_routing(kind: str, tokens: int, groups: int):
    """experts, weights, kept and per_expert for all tokens; per_expert is for each of `groups`."""
    generator = torch.Generator().manual_seed(1)
    k = {"one expert": 1, "all experts": EXPERTS, "limited": EXPERTS}.get(kind, 3)
    experts = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :k]
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64)
    kept = torch.ones(tokens, k, dtype=torch.bool)
    if kind == "one expert":
        experts = torch.full_like(experts, EXPERTS - 1)
    if kind == "dropped":
        kept = torch.rand(tokens, k, generator=generator) < 0.5
    if kind == "none":
        kept = torch.zeros_like(kept)
    if kind == "limited":
        experts = torch.arange(EXPERTS).expand(tokens, EXPERTS)
        # each expert chooses one token of each group
        rows = torch.rand(groups, tokens // groups, k, generator=generator)
        kept = (rows.argsort(1).argsort(1) == 0).flatten(0, 1)
    return experts, weights, kept, 1 if kind == "limited" else None


def dense(x, weights, w, experts, kept):
    out = []
    for token in range(x.shape[0]):
        y = x.new_zeros(OUT)
        for choice in range(experts.shape[1]):
            if kept[token, choice]:
                y = y + weights[token, choice] * (x[token] @ w[experts[token, choice]]).tanh()
        out.append(y)
    return torch.stack(out)


@pytest.mark.pairwise
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["alltoall", "gather", "two-hop"])
@pytest.mark.parametrize("where", list(MESHES))
def test_dispatched(agrees, randn, where, kind, routing):
    mesh, axes = Mesh.parse(where.split()[0] if where else ""), MESHES[where]
    split = P(mesh.axis_names)
    experts, weights, kept, per_expert = draw_routing(routing, TOKENS * mesh.size, mesh.size)

    def layer(x, weights, w, experts, kept):
        def compute(rows, sizes):
            return grouped_matmul(rows, w, sizes).tanh()

        return dispatched(
            x, experts, weights, kept, compute,
            num_experts=EXPERTS, axes=axes, kind=kind, per_expert=per_expert,
        )  # fmt: skip

    args = randn(TOKENS * mesh.size, EMBED), weights, randn(EXPERTS, EMBED, OUT)
    specs = (split, split, P(axes))
    agrees(layer, dense, args, mesh, specs, split, (experts, kept), (split, split))


@pytest.mark.parametrize("rows", [12, 7])
def test_permute_and_unpermute_are_transposes(randn, rows):
    experts = torch.tensor([[0, 3, 1], [3, 1, 0], [2, 0, 3], [1, 0, 2]])
    kept = torch.tensor([[True, False, True]] * 3 + [[False, False, True]])
    order = sort_by_expert(experts, kept, 4, rows=rows)
    assert order.sizes.tolist() == [2, 1, 2, 2]
    at = experts.flatten()[order.assignment[:7]]
    assert at.tolist() == sorted(at.tolist())
    assert kept.flatten()[order.assignment[:7]].all()
    x, y = randn(4, 5), randn(rows, 5)
    ones = kept.to(x.dtype)
    y = torch.where(kept.flatten()[order.assignment].unsqueeze(1), y, 0)
    torch.testing.assert_close((permute(x, order) * y).sum(), (x * unpermute(y, ones, order)).sum())


@pytest.mark.parametrize("rows", [6, 4])
def test_second_derivatives_on_the_tape(randn, rows):
    experts = torch.tensor([[0, 1], [2, 1], [0, 2]])
    kept = torch.tensor([[True, False], [True, True], [True, rows == 6]])
    order = sort_by_expert(experts, kept, 3, rows=rows)

    def function(x, weights):
        weights = torch.where(kept, weights, 0)
        return unpermute(permute(x, order).sin(), weights, order)

    leaves = randn(3, 2).requires_grad_(), randn(3, 2).requires_grad_()
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_low_precision_is_weighted_in_that_of_the_router(randn):
    experts, weights, kept, _ = draw_routing("random", 5, 1)
    order = sort_by_expert(experts, kept, EXPERTS, rows=15)
    rows = randn(15, 2).bfloat16().requires_grad_()
    y = unpermute(rows, weights.float(), order)
    assert y.dtype == torch.float32
    exact = unpermute(rows.double(), weights.float().double(), order)
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(y.sum(), rows)
    assert gradient.dtype == torch.bfloat16


def test_one_rank_has_a_row_for_each_assignment_and_no_more(randn):
    seen = []

    def compute(rows, sizes):
        seen.append((tuple(rows.shape), sizes.tolist()))
        return rows

    experts, weights, kept, _ = draw_routing("random", 6, 1)
    dispatched(randn(6, EMBED), experts, weights, kept, compute, num_experts=EXPERTS, axes=())
    counts = [int((experts == expert).sum()) for expert in range(EXPERTS)]
    assert seen == [((18, EMBED), counts)]


@pytest.mark.pairwise
@pytest.mark.parametrize("routing", ["random", "limited"])
@pytest.mark.parametrize("kind", ["alltoall", "gather", "two-hop"])
@pytest.mark.parametrize("where", ["ep=2", "ep=2,tp=2"])
def test_traced_and_compiled(randn, where, kind, routing):
    mesh, axes = Mesh.parse(where), MESHES[where]
    split = P(mesh.axis_names)
    experts, weights, kept, per_expert = draw_routing(routing, TOKENS * mesh.size, mesh.size)

    def step(x, weights, w, experts, kept):
        def loss(x, weights, w):
            y = dispatched(
                x, experts, weights, kept, lambda rows, sizes: grouped_matmul(rows, w, sizes),
                num_experts=EXPERTS, axes=axes, kind=kind, per_expert=per_expert,
            )  # fmt: skip
            return lax.psum(y.sin().sum(), mesh.axis_names)

        return ft.value_and_grad(loss, (0, 1, 2))(x, weights, w)

    specs = (split, split, P(axes), split, split)
    f = ft.shard_map(step, mesh, specs, (P(), (split, split, P(axes))))
    args = randn(TOKENS * mesh.size, EMBED), weights, randn(EXPERTS, EMBED, OUT), experts, kept
    program = ft.trace(f)(*args)
    program.check()
    assert not program.diff(str(program))
    expected = tree.leaves(f(*args))
    for got, want in zip(tree.leaves(program(*args)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    compiled = ft.jit(f, backend="eager")
    for got, want in zip(tree.leaves(compiled(*args)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    traffic = [row for row in program.cost().collectives if row.op == "ragged_all_to_all"]
    if kind == "gather":
        assert not traffic
        return
    # of one axis: rows there, results back, cotangents there and back
    k, ranks = experts.shape[1], math.prod(mesh[axis] for axis in axes)
    rows = min(TOKENS * k, EXPERTS * (per_expert or TOKENS))
    if ranks == 2:
        forward = next(row for row in traffic if row.phase == "forward")
        assert forward.payload_bytes == 8 * rows * (EMBED + OUT)


def test_compiled(randn):
    """The simulation of all ranks as one graph; tests/ops/test_grouped_matmul.py compiles products."""
    experts, kept = torch.tensor([[0], [1], [1], [0]]), torch.tensor([[True]] * 3 + [[False]])

    def step(x, experts, kept):
        def loss(x):
            double = lambda rows, sizes: rows + rows
            ones = torch.ones_like(x[:, :1])
            y = dispatched(x, experts, ones, kept, double, num_experts=2)
            return lax.psum(y.square().sum(), "ep")

        return ft.value_and_grad(loss)(x)

    f = ft.shard_map(step, Mesh(ep=2), P("ep"), (P(), P("ep")))
    x = randn(4, 2)
    value, gradient = ft.jit(f)(x, experts, kept)
    torch.testing.assert_close(value, 4 * x[:3].square().sum())
    torch.testing.assert_close(gradient, 8 * x * kept)


def test_refuses_experts_that_do_not_divide(randn):
    def layer(x):
        experts = torch.zeros(x.shape[0], 1, dtype=torch.int64)
        return dispatched(
            x, experts, x[:, :1], experts == 0, lambda rows, sizes: rows, num_experts=3
        )

    with pytest.raises(ValueError, match="num_experts: got 3; wanted a multiple of 2"):
        ft.shard_map(layer, Mesh(ep=2), P("ep"), P("ep"))(randn(4, EMBED))


def count_sent(kind, top_k, nodes, width):
    """Bytes that a rank sends between nodes, and within them, forward; of 6 tokens for 16 experts."""
    mesh, axes = Mesh(ep_node=4, ep=2), ("ep_node", "ep")
    split, tokens = P(axes), 6 * mesh.size

    def layer(x, weights, experts):
        bounds = RowBounds(nodes=nodes)
        return dispatched(
            x, experts, weights, experts >= 0, lambda rows, sizes: rows, num_experts=16,
            axes=axes, kind=kind, bounds=bounds,
        )  # fmt: skip

    x, weights = torch.zeros(tokens, width), torch.zeros(tokens, top_k)
    experts = torch.zeros(tokens, top_k, dtype=torch.int64)
    program = ft.trace(ft.shard_map(layer, mesh, split, split))(x, weights, experts)
    rows = [row for row in program.cost().collectives if row.op == "ragged_all_to_all"]
    return [sum(row.sent_bytes for row in rows if row.axis == axis) for axis in axes]


@pytest.mark.parametrize(
    ("top_k", "nodes", "mean"),
    [
        # of even draws without replacement a node, 4 of 16 experts, has none of k
        (2, 0, 4 * (1 - (12 * 11) / (16 * 15))),
        (8, 0, 4 * (1 - math.comb(12, 8) / math.comb(16, 8))),
        (8, 2, 2),  # groups of 4 experts, of which tokens choose from 2
    ],
)
def test_bytes_between_nodes(top_k, nodes, mean):
    width, tokens = 64, 6
    # float32, there and back; three of four nodes, one of two ranks in them, are others
    each = tokens * top_k * 2 * width * 4
    assert count_sent("alltoall", top_k, nodes, width) == [each * 3 // 4, each // 2]
    rows = math.ceil(tokens * mean)
    between = rows * (2 * width + 2 * top_k) * 4  # with a weight and a number of each choice
    assert count_sent("two-hop", top_k, nodes, width) == [between * 3 // 4, each // 2]
    assert between < each


def test_tokens_go_once_to_every_node(monkeypatch):
    """The rows that are really sent: of each token one for every node that has its experts."""
    experts, weights, kept, _ = draw_routing("dropped", 4 * TOKENS, 4)
    sent, send = [], layer_module.exchange

    def watched(x, sizes, axes, **more):
        if axes[0].name == "ep_node" and x.shape[1] == EMBED:
            sent.append(sizes)
        return send(x, sizes, axes, **more)

    monkeypatch.setattr(layer_module, "exchange", watched)
    counted = []

    def layer(x, weights, experts, kept):
        sent.clear()
        y = dispatched(
            x, experts, weights, kept, lambda rows, sizes: rows, num_experts=EXPERTS,
            axes=("ep_node", "ep"), kind="two-hop",
        )  # fmt: skip
        counted.append(len(sent))
        return y, sent[0].sum().view(1)

    mesh, split = Mesh(ep_node=2, ep=2), P(("ep_node", "ep"))
    run = ft.shard_map(layer, mesh, split, (split, split), check=False)
    _, rows = run(torch.zeros(4 * TOKENS, EMBED), weights.float(), experts, kept)
    chosen = [{e // 4 for e, k in zip(*row, strict=True) if k}
              for row in zip(experts.tolist(), kept.tolist(), strict=True)]  # fmt: skip
    wanted = [sum(map(len, chosen[i : i + TOKENS])) for i in range(0, 4 * TOKENS, TOKENS)]
    assert rows.tolist() == wanted
    assert counted == [2]  # there and back
