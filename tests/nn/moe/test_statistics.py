"""Routing statistics against counting, on every mesh and over microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import DATA_AXES, P, lax, tree
from functron.nn.moe import RouterSums, route, statistics, summary
from functron.spmd.mesh import CONTEXT_AXES
from tests.nn.moe.conftest import factors

BATCH, SEQ, EMBED, EXPERTS = 4, 8, 5, 8
ROWS = torch.arange(BATCH)
COUNTED = torch.tensor(
    [[1, 0, 1, 1, 0, 1, 1, 1], [0] * SEQ, [0, 0, 0, 0, 0, 0, 1, 0], [1] * 4 + [0] * 4],
    dtype=torch.bool,
)


def counts(routed, counted, config) -> dict:
    """The sums, one token at a time, of a batch in its original order."""
    load = [0] * EXPERTS
    dropped = unrouted = tokens = 0
    for b in range(BATCH):
        for t in range(SEQ):
            if not counted[b, t]:
                continue
            row = routed.choices[b][t]
            kept = [e for e in row if (t, e) in routed.kept[b]]
            chosen = kept if config.routing == "expert_choice" else row
            for e in chosen:
                load[e] += 1
            dropped += len(chosen) - len(kept)
            unrouted += not kept
            tokens += 1
    share = routed.scores / routed.scores.sum(-1, keepdim=True)
    entropy = -(share * share.log()).sum(-1)[counted].sum()
    return {
        "load": load,
        "assignments": sum(load),
        "dropped": dropped,
        "unrouted": unrouted,
        "tokens": tokens,
        "entropy": entropy,
    }


@pytest.mark.pairwise(of=factors)
def test_sums(params, randn, oracle, layout, config):
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    order = list(layout.order)

    def per_rank(params, x, rows, positions, counted):
        routing = route(params, x, config, stream=layout.stream, rows=rows, positions=positions)
        sums = statistics(routing, config, counted=counted, stream=layout.stream)
        return lax.psum(sums, (*DATA_AXES, *CONTEXT_AXES))

    token = layout.stream
    in_specs = (tree.map(lambda _: P(), weights), token, P(DATA_AXES), token, token)
    got = ft.shard_map(per_rank, layout.mesh, in_specs, P())(
        weights, x, ROWS, layout.positions, COUNTED
    )
    back = torch.tensor(order).argsort()
    expected = counts(oracle(weights, x[:, back], config), COUNTED[:, back], config)
    assert got.load.dtype == got.tokens.dtype == torch.int64
    for name, value in expected.items():
        torch.testing.assert_close(
            getattr(got, name), torch.as_tensor(value), rtol=1e-10, atol=1e-10, check_dtype=False
        )


def test_microbatches_and_layers(params, randn, configs):
    config = configs["capacity"]
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    positions = torch.arange(SEQ).expand(BATCH, SEQ)

    def sums(rows):
        routing = route(weights, x[rows], config, stream=P(), rows=rows, positions=positions[rows])
        return statistics(routing, config, counted=COUNTED[rows], stream=P())

    whole = sums(ROWS)
    parts = tree.map(lambda a, b: a + b, sums(ROWS[:1]), sums(ROWS[1:]))
    torch.testing.assert_close(parts, whole)
    # a second layer with half of everything changes no rate, and is no worse
    stacked = tree.map(lambda a: torch.stack([2 * a, a]), whole)
    assert summary(stacked) == pytest.approx(summary(whole))


def test_no_gradient(params, randn, configs):
    config = configs["sigmoid"]
    weights, x = params(config), randn(BATCH, SEQ, EMBED)

    def entropy(weights):
        routing = route(
            weights, x, config, stream=P(), rows=ROWS,
            positions=torch.arange(SEQ).expand(BATCH, SEQ),
        )  # fmt: skip
        return statistics(routing, config, counted=COUNTED, stream=P()).entropy

    assert all((leaf == 0).all() for leaf in tree.leaves(torch.func.grad(entropy)(weights)))


def test_summary():
    sums = RouterSums(
        load=torch.tensor([[6, 2, 0, 0], [2, 2, 2, 2]]),
        assignments=torch.tensor([8, 8]),
        dropped=torch.tensor([3, 1]),
        unrouted=torch.tensor([1, 0]),
        tokens=torch.tensor([4, 4]),
        entropy=torch.tensor([1.0, 3.0]),
    )
    assert summary(sums) == {
        "load_ratio": 3.0,
        "idle": 0.25,
        "drop_rate": 0.25,
        "unrouted_rate": 0.125,
        "entropy": 0.5,
    }


def test_summary_of_nothing():
    none = RouterSums(torch.zeros(4, dtype=torch.int64), *[torch.zeros(()) for _ in range(5)])
    assert summary(none) == {
        "load_ratio": 0.0,
        "idle": 1.0,
        "drop_rate": 0.0,
        "unrouted_rate": 0.0,
        "entropy": 0.0,
    }


def test_unrouted_tokens_of_expert_choice(params, randn, configs):
    """Experts that all want the same tokens leave others to none."""
    config = replace(configs["expert-choice"], capacity_factor=0.5)
    weights = tree.map(torch.zeros_like, params(config))
    x = randn(BATCH, SEQ, EMBED)
    routing = route(
        weights, x, config, stream=P(), rows=ROWS, positions=torch.arange(SEQ).expand(BATCH, SEQ)
    )
    counted = torch.ones(BATCH, SEQ, dtype=torch.bool)
    sums = statistics(routing, config, counted=counted, stream=P())
    # of equal scores the first token: ceil(0.5 * 8 * 2 / 8) for each expert and sample
    assert sums.load.tolist() == [BATCH] * EXPERTS
    assert sums.unrouted == BATCH * (SEQ - 1)
    assert sums.dropped == 0
