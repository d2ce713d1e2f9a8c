"""Experts of limited capacity, against filling them one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import DATA_AXES, P
from functron.nn.moe import MoEConfig, capacity
from functron.nn.moe.router import keep

STREAM = P(DATA_AXES, ("cp", "tp"))


@pytest.mark.parametrize(
    ("factor", "seq", "top_k", "experts", "expected"),
    [
        (0.0, 100, 2, 8, 100),  # dropless
        (1.0, 16, 2, 8, 4),
        (1.25, 16, 2, 8, 5),
        (1.1, 100, 1, 10, 11),  # 1.1 * 100 / 10 is more than 11 in floating point
        (1.0, 5, 1, 4, 2),  # rounded up
        (1e-6, 16, 2, 8, 1),
        (100.0, 16, 2, 8, 16),  # no more than there are
    ],
)
def test_capacity(factor, seq, top_k, experts, expected):
    config = MoEConfig(num_experts=experts, top_k=top_k, capacity_factor=factor)
    assert capacity(config, seq) == expected


@st.composite
def routings(draw):
    """Experts and tied weights [T, k] of a sequence, a capacity, and a rearrangement."""
    tokens = 4 * draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 4))
    top_k = draw(st.integers(1, num_experts))
    row = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    choices = draw(st.lists(row, min_size=tokens, max_size=tokens))
    weight = st.lists(st.integers(0, 2), min_size=num_experts, max_size=num_experts)
    weights = draw(st.lists(weight, min_size=tokens, max_size=tokens))
    order = draw(st.permutations(range(tokens)))
    limit = draw(st.integers(1, tokens))
    return choices, torch.tensor(weights, dtype=torch.float64), order, limit


@given(routing=routings(), drop=st.sampled_from(["position", "probability"]), stride=st.booleans())
def test_keep(oracle_fill, routing, drop, stride):
    """In any arrangement, on one rank and on four; with gaps between positions too."""
    choices, weights, order, limit = routing
    kept = oracle_fill(choices, weights, limit, drop)
    experts = torch.tensor(choices)
    expected = [[(t, e) in kept for e in choices[t]] for t in order]

    def per_rank(experts, weights, positions):
        return keep(experts, weights, limit=limit, drop=drop, positions=positions, stream=STREAM)

    positions = torch.tensor(order) * (1000 if stride else 1) + 7 * stride
    operands = (experts[order], weights.gather(1, experts)[order], positions)
    for mesh in (ft.Mesh(), ft.Mesh(cp=2, tp=2)):
        mapped = ft.shard_map(per_rank, mesh, (STREAM,) * 3, STREAM)
        got = mapped(*(x.unsqueeze(0) for x in operands))
        assert got.tolist() == [expected]


def test_samples_do_not_compete():
    """Each has its own capacity: what one drops does not depend on the others."""
    experts = torch.zeros(3, 6, 1, dtype=torch.int64)
    experts[1, ::2] = 1
    kept = keep(
        experts,
        torch.ones(3, 6, 1),
        limit=2,
        drop="position",
        positions=torch.arange(6).expand(3, 6),
        stream=STREAM,
    )
    assert kept[..., 0].tolist() == [
        [True, True, False, False, False, False],
        [True, True, True, True, False, False],
        [True, True, False, False, False, False],
    ]


def test_first_choices_precede_second_ones():
    """Token 0's second choice yields to the first choice of token 2, though it comes later."""
    experts = torch.tensor([[[0, 1], [1, 0], [1, 0]]])
    places = {"positions": torch.arange(3).view(1, 3), "stream": STREAM}
    by_position = keep(experts, torch.ones(1, 3, 2), limit=2, drop="position", **places)
    assert by_position.tolist() == [[[True, False], [True, True], [True, False]]]
    weights = torch.tensor([[[0.1, 0.9], [0.2, 0.3], [0.8, 0.4]]])
    by_weight = keep(experts, weights, limit=1, drop="probability", **places)
    assert by_weight.tolist() == [[[False, True], [False, False], [False, True]]]
