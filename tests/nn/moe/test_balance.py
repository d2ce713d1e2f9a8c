"""Balance losses against their formulas, and what moves the bias that balances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import DATA_AXES, P, lax, tree
from functron.nn.layers import sequence_axes
from functron.nn.moe import MoEConfig, auxiliary, route
from functron.spmd.mesh import CONTEXT_AXES

BATCH, SEQ, EMBED, EXPERTS = 4, 8, 5, 8
SUMMED = (*DATA_AXES, *CONTEXT_AXES)
ROWS = torch.arange(BATCH)
POSITIONS = torch.arange(SEQ).expand(BATCH, SEQ)

LOSSES = {
    "sequence": {"aux_loss": 0.7},
    "batch": {"aux_loss": 0.7, "aux": "batch"},
    "z": {"z_loss": 0.3},
    "both": {"aux_loss": 0.7, "z_loss": 0.3},
    "none": {},
}
MASKS = {
    "all": [[1] * SEQ] * BATCH,
    "uneven": [[1, 0, 1, 1, 0, 1, 1, 1], [0] * SEQ, [0, 0, 0, 0, 0, 0, 1, 0], [1] * 4 + [0] * 4],
    "none": [[0] * SEQ] * BATCH,
}
ROUTERS = ["softmax", "one", "sigmoid", "after", "deepseek-v3", "deepseek-v2", "capacity"]


def count(choices, counted, num_experts: int) -> torch.Tensor:
    """Choices of the tokens that count, [B, E], one by one."""
    out = torch.zeros(len(choices), num_experts, dtype=torch.float64)
    for b, sample in enumerate(choices):
        for t, row in enumerate(sample):
            for e in row:
                out[b, e] += counted[b, t]
    return out


def formula(params: dict, x, counted, config: MoEConfig, oracle) -> torch.Tensor:
    """The layer's addition to the loss of a batch in its original order."""
    routed = oracle(params, x, config)
    plain = oracle({**params, "balance": torch.zeros(EXPERTS).to(x)}, x, config)
    loads = count(plain.choices, counted, EXPERTS)
    mask = counted.to(x)
    share = routed.scores / routed.scores.sum(-1, keepdim=True)
    total = x.new_zeros(())
    if config.aux == "sequence":
        for b in range(BATCH):
            n = mask[b].sum()
            if n:
                f = EXPERTS / config.top_k * loads[b] / n
                p = (share[b] * mask[b, :, None]).sum(0) / n
                total = total + config.aux_loss * n * (f * p).sum()
    elif mask.sum():
        n = mask.sum()
        f = EXPERTS / config.top_k * loads.sum(0) / n
        p = (share * mask[..., None]).sum((0, 1)) / n
        total = total + config.aux_loss * n * (f * p).sum()
    z = torch.log(routed.logits.exp().sum(-1))
    return total + config.z_loss * (z**2 * mask).sum()


@pytest.mark.pairwise
@pytest.mark.parametrize("aux", ["sequence", "batch"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("balance_bias", [False, True])
@pytest.mark.parametrize("shift", [-1e4, -100.0, 100.0])
def test_sigmoids_that_vanish_in_float32(aux, groups, balance_bias, shift):
    """exp(shift) cancels in every share, far below 0; far above it shares are even."""
    config = MoEConfig(
        num_experts=EXPERTS, top_k=2, score="sigmoid", num_groups=groups,
        top_groups=max(groups // 2, 1), router_bias=True, balance_bias=balance_bias,
        aux_loss=1.0, aux=aux,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-4, 5, (BATCH, SEQ, EMBED), generator=generator)
    x, w = whole / 2, torch.randint(-4, 5, (EMBED, EXPERTS), generator=generator) / 4
    params = {"w": w, "b": torch.full((EXPERTS,), shift)}  # logits are exact
    params |= {"balance": torch.zeros(EXPERTS)} if balance_bias else {}
    counted = torch.tensor(MASKS["uneven"], dtype=torch.bool)

    def ours(w):
        given = {**params, "w": w}
        routing = route(given, x, config, stream=P(), rows=ROWS, positions=POSITIONS)
        return auxiliary(given, routing, config, counted=counted, stream=P())

    plain = x.double() @ w.double()
    odds = plain.exp() if shift < 0 else -(-plain).exp()  # what is added to 0, or to 1
    members = odds.unflatten(-1, (groups, -1))
    best = members.topk(2 if groups > 1 else 1, dim=-1).values.sum(-1)
    allowed = torch.sort(best, dim=-1, descending=True, stable=True).indices[..., :2]
    allowed = torch.zeros_like(best).scatter(-1, allowed, 1.0).bool().unsqueeze(-1)
    odds = torch.where(allowed, members, -torch.inf).flatten(-2)
    choices = torch.sort(odds, dim=-1, descending=True, stable=True).indices[..., :2]
    loads = count(choices.tolist(), counted, EXPERTS)

    def by_hand(w):
        plain = x.double() @ w
        share = plain.softmax(-1) if shift < 0 else torch.full_like(plain, 1 / EXPERTS)
        load, mask = loads, counted.double()
        total = (share * mask[..., None]).sum(1)
        if aux == "batch":
            load, total, mask = load.sum(0), total.sum(0), mask.flatten()
        return (load * total / mask.sum(-1, keepdim=True).clamp_min(1)).sum() * EXPERTS / 2

    got = torch.func.grad_and_value(ours)(w)
    wanted = torch.func.grad_and_value(by_hand)(w.double())
    assert wanted[1] > 10
    torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6, check_dtype=False)


CASES = [(loss, name) for loss in ("sequence", "batch") for name in ROUTERS]
CASES += [(loss, name) for loss in ("z", "both", "none") for name in ("softmax", "deepseek-v3")]


@pytest.mark.pairwise
@pytest.mark.parametrize(("loss", "name"), CASES)
def test_losses_and_gradients(agrees, params, randn, oracle, configs, layout, loss, name):
    """Also Megatron-LM 7452's: counts under a mask, with the sequence split over tp."""
    counted = torch.tensor(MASKS["uneven"], dtype=torch.bool)
    check(agrees, params, randn, oracle, replace(configs[name], **LOSSES[loss]), layout, counted)


@pytest.mark.pairwise
@pytest.mark.parametrize("mask", ["all", "none"])
@pytest.mark.parametrize("loss", ["sequence", "batch"])
def test_all_tokens_and_none(agrees, params, randn, oracle, configs, layout, loss, mask):
    counted = torch.tensor(MASKS[mask], dtype=torch.bool)
    config = replace(configs["deepseek-v3"], **LOSSES[loss], z_loss=0.3)
    check(agrees, params, randn, oracle, config, layout, counted)


def check(agrees, params, randn, oracle, config, layout, counted):
    order = list(layout.order)
    weights = params(config)
    # its derivative is a count, which no cotangent scales: `test_bias_moves_against_the_load`
    balance = [weights.pop("balance")] if config.balance_bias else []

    def whole(params, balance):
        return {**params, "balance": balance[0]} if balance else params

    def per_rank(params, x, rows, positions, counted, *balance):
        params = whole(params, balance)
        routing = route(params, x, config, stream=layout.stream, rows=rows, positions=positions)
        share = auxiliary(params, routing, config, counted=counted, stream=layout.stream)
        return lax.psum(share, SUMMED).view(1)

    def dense(params, x, rows, positions, _, *balance):
        params, back = whole(params, balance), torch.tensor(order).argsort()
        return formula(params, x[:, back], counted[:, back], config, oracle).view(1)

    args = (weights, randn(BATCH, SEQ, EMBED))
    others = (ROWS, layout.positions, counted, *balance)
    agrees(
        per_rank, dense, args, layout.mesh, (tree.map(lambda _: P(), args[0]), layout.stream), P(),
        others, (P(DATA_AXES), layout.stream, layout.stream, *(P() for _ in balance)),
    )  # fmt: skip


@pytest.mark.parametrize("loss", ["sequence", "z"])
def test_microbatches_add_up(params, randn, configs, loss):
    """A batch in parts, of different numbers of tokens that count, is the batch."""
    config = replace(configs["deepseek-v3"], **LOSSES[loss])
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    counted = torch.tensor(MASKS["uneven"], dtype=torch.bool)

    def share(weights, rows):
        part = x[rows]
        routing = route(
            weights, part, config, stream=P(), rows=rows, positions=POSITIONS[: len(rows)]
        )
        return auxiliary(weights, routing, config, counted=counted[rows], stream=P())

    whole = torch.func.grad_and_value(share)(weights, ROWS)
    parts = [torch.func.grad_and_value(share)(weights, rows) for rows in (ROWS[:1], ROWS[1:])]
    torch.testing.assert_close(tree.map(lambda a, b: a + b, *parts), whole, rtol=1e-12, atol=1e-12)


def test_microbatches_of_a_load_that_was_counted_before(params, randn, configs, oracle):
    """They add up to the formula of the whole batch, which those by themselves do not."""
    config = replace(configs["sigmoid"], aux_loss=0.7, aux="global")
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    counted = torch.tensor(MASKS["uneven"], dtype=torch.bool)
    load = count(oracle(weights, x, config).choices, counted, EXPERTS).sum(0).long()

    def share(weights, rows, load):
        part = x[rows]
        routing = route(
            weights, part, config, stream=P(), rows=rows, positions=POSITIONS[: len(rows)]
        )
        return auxiliary(weights, routing, config, counted=counted[rows], stream=P(), load=load)

    def added(load):
        parts = (ROWS[:1], ROWS[1:3], ROWS[3:])
        found = [torch.func.grad_and_value(share)(weights, rows, load) for rows in parts]
        return tree.map(lambda *parts: sum(parts), *found)

    whole = torch.func.grad_and_value(
        lambda w: formula(w, x, counted, replace(config, aux="batch"), oracle)
    )(weights)
    torch.testing.assert_close(added(load), whole, rtol=1e-12, atol=1e-12)
    assert abs(added(None)[1] - whole[1]) > 1e-3


@pytest.mark.parametrize("scale", [1.0, 0.0])
@pytest.mark.parametrize("aux", ["sequence", "batch"])
def test_even_routing_costs_one_per_token(configs, scale, aux):
    """Token t prefers expert t: as even as can be, whatever the scores' sharpness."""
    config = replace(configs["one"], aux_loss=1.0, aux=aux, router_bias=False)
    weights = {"w": torch.eye(EXPERTS, dtype=torch.float64)}
    x = torch.eye(SEQ, dtype=torch.float64).expand(BATCH, SEQ, SEQ) * (scale + 1e-9)
    routing = route(weights, x, config, stream=P(), rows=ROWS, positions=POSITIONS)
    counted = torch.ones(BATCH, SEQ, dtype=torch.bool)
    share = auxiliary(weights, routing, config, counted=counted, stream=P())
    torch.testing.assert_close(share, torch.tensor(float(BATCH * SEQ), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_moves_against_the_load(params, randn, configs, dtype):
    """The derivative is a whole number, exact where experts differ by a single token."""
    config = replace(configs["deepseek-v3"], num_groups=1, top_groups=1, balance_bias=True)
    weights = {**tree.map(lambda leaf: leaf.to(dtype), params(config)), "balance": torch.zeros(8)}
    x = randn(BATCH, SEQ, EMBED).to(dtype)
    counted = torch.tensor(MASKS["uneven"], dtype=torch.bool)
    routing = route(weights, x, config, stream=P(), rows=ROWS, positions=POSITIONS)

    def term(balance):
        return auxiliary(
            {**weights, "balance": balance}, routing, config, counted=counted, stream=P()
        )

    gradient, value = torch.func.grad_and_value(term)(weights["balance"])
    load = routing.experts[counted].flatten().bincount(minlength=EXPERTS)
    assert value == 0
    assert value.dtype == gradient.dtype == torch.float32
    assert torch.equal(gradient, (load * EXPERTS - load.sum()).float())
    mean = torch.func.grad(lambda balance: term(balance) / 7)(weights["balance"])
    assert torch.equal(mean, gradient)  # a count all the same


def test_steps_of_the_bias_even_the_load(randn, configs):
    """Wang et al. 2024's rule: subtract the rate times the derivative's sign."""
    config = replace(
        configs["sigmoid"], top_k=2, router_bias=False, balance_bias=True, balance_rate=0.02
    )
    weights = {"w": randn(EMBED, EXPERTS), "balance": torch.zeros(EXPERTS)}
    x = randn(16, 32, EMBED) + 1  # some experts are everyone's
    places = {
        "stream": P(),
        "rows": torch.arange(16),
        "positions": torch.arange(32).expand(16, 32),
    }
    counted = torch.ones(16, 32, dtype=torch.bool)

    def excess(weights):
        routing = route(weights, x, config, **places)
        share = lambda w: auxiliary(w, routing, config, counted=counted, stream=P())
        return torch.func.grad(share)(weights)["balance"]

    first = excess(weights).abs().max()
    for _ in range(60):
        step = config.balance_rate * excess(weights).sign()
        weights = {**weights, "balance": weights["balance"] - step}
    assert excess(weights).abs().max() < 0.3 * first


QUANTILES = {
    "sigmoid": MoEConfig(
        num_experts=EXPERTS, top_k=3, expert_dim=4, score="sigmoid", balance_bias=True,
        balance_by="quantile",
    ),
    "softmax": MoEConfig(
        num_experts=EXPERTS, top_k=1, expert_dim=4, balance_bias=True, balance_by="quantile"
    ),
}  # fmt: skip


def quantiles_by_hand(scores, bias, counted, k) -> torch.Tensor:
    """Su 2026's dual variables, of each sequence by itself: the mean weighted by tokens."""
    total, weights = torch.zeros(EXPERTS, dtype=torch.float64), 0
    for sample, mask in zip(scores, counted, strict=True):
        rows = [row for row, counts in zip(sample.tolist(), mask.tolist(), strict=True) if counts]
        if not rows:
            continue
        alphas = [sorted((s + b for s, b in zip(row, bias, strict=True)), reverse=True)[k]
                  for row in rows]  # fmt: skip
        beta = []
        for expert in range(EXPERTS):
            margins = sorted(
                (r[expert] - a for r, a in zip(rows, alphas, strict=True)), reverse=True
            )
            beta.append(margins[len(rows) * k // EXPERTS])
        centred = torch.tensor([each - sum(beta) / EXPERTS for each in beta], dtype=torch.float64)
        total, weights = total + len(rows) * centred, weights + len(rows)
    return total / max(weights, 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", QUANTILES)
def test_quantiles_of_scores(params, randn, layout, name, mask):
    """The derivative is the mean over sequences, on every mesh."""
    config = QUANTILES[name]
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    counted = torch.tensor(MASKS[mask], dtype=torch.bool)

    def per_rank(params, x, rows, positions, counted):
        def term(balance):
            given = {**params, "balance": balance}
            routing = route(given, x, config, stream=layout.stream, rows=rows, positions=positions)
            share = auxiliary(given, routing, config, counted=counted, stream=layout.stream)
            tokens = lax.psum(counted.sum(), (*DATA_AXES, *sequence_axes(layout.stream)))
            return lax.psum(share, SUMMED) / tokens.clamp_min(1)

        value, found = ft.value_and_grad(term)(params["balance"])
        return value, ft.sync_gradients(found, P())

    in_specs = (tree.map(lambda _: P(), weights), layout.stream, P(DATA_AXES))
    in_specs = (*in_specs, layout.stream, layout.stream)
    mapped = ft.shard_map(per_rank, layout.mesh, in_specs, (P(), P()))
    given = (weights, x, ROWS, layout.positions, counted)
    value, got = mapped(*given)
    logits = x @ weights["w"]
    scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(-1)
    want = quantiles_by_hand(scores, weights["balance"].tolist(), counted, config.top_k)
    assert value == 0
    assert want.abs().max() > 0.01 or mask == "none"
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_steps_by_quantiles_even_the_load(randn):
    """Without decay a few steps do: of as many tokens as there are, each expert has its part."""
    config = replace(QUANTILES["sigmoid"], top_k=2)
    weights, x = {"w": randn(EMBED, EXPERTS), "balance": torch.zeros(EXPERTS)}, randn(1, 512, EMBED)
    places = {"stream": P(), "rows": torch.arange(1), "positions": torch.arange(512)[None]}
    counted = torch.ones(1, 512, dtype=torch.bool)

    def taken(balance):
        given = {**weights, "balance": balance}
        routing = route(given, x + 1, config, **places)
        load = routing.experts.flatten().bincount(minlength=EXPERTS)
        share = lambda b: auxiliary({**given, "balance": b}, routing, config, counted=counted,
                                    stream=P())  # fmt: skip
        return load, torch.func.grad(share)(balance) / 512

    balance, loads = weights["balance"], []
    for _ in range(30):
        load, beta = taken(balance)
        loads.append(load)
        balance = -beta
    assert loads[0].max() > 2 * 128
    assert loads[-1].max() < 1.1 * 128


def test_against_transformers(params, randn, configs):
    """Its loss is over all tokens and not divided by k; in float32."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = replace(configs["renormalised"], aux_loss=1.0, aux="batch")
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    counted = torch.tensor(MASKS["uneven"], dtype=torch.bool)

    def ours(weights):
        routing = route(weights, x, config, stream=P(), rows=ROWS, positions=POSITIONS)
        share = auxiliary(weights, routing, config, counted=counted, stream=P())
        return share / counted.sum() * config.top_k

    def theirs(weights):
        logits = F.linear(x.flatten(0, 1), weights["w"].T, weights["b"])
        return modeling.load_balancing_loss_func(
            (logits,), EXPERTS, config.top_k, attention_mask=counted
        )

    ours, theirs = (torch.func.grad_and_value(f)(weights) for f in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, check_dtype=False)


def test_the_share_varies_also_where_nothing_is_added(params, randn, configs):
    """So that a psum of it is no redundant one."""
    config = configs["softmax"]
    stream = P(DATA_AXES, ("cp", "tp"))

    def per_rank(params, x, rows, positions, counted):
        routing = route(params, x, config, stream=stream, rows=rows, positions=positions)
        share = auxiliary(params, routing, config, counted=counted, stream=stream)
        return lax.psum(share, ("dp", "cp"))

    weights = params(config)
    in_specs = (tree.map(lambda _: P(), weights), stream, P(DATA_AXES), stream, stream)
    mapped = ft.shard_map(per_rank, ft.Mesh(dp=2, cp=2, tp=2), in_specs, P())
    counted = torch.ones(BATCH, SEQ, dtype=torch.bool)
    assert mapped(weights, randn(BATCH, SEQ, EMBED), ROWS, POSITIONS, counted) == 0
