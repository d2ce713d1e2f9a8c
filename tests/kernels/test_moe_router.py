"""The router's kernels against token-by-token arithmetic in float64."""

from __future__ import annotations

import math

import pytest
import torch

from functron.ops import moe as router
from functron.ops.moe import ROUTER, ROUTER_BACKWARD, moe_router
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import Emulator, emulated

SCORES, WEIGHTINGS = (
    ("softmax", "sigmoid", "given"),
    ("scores", "renormalised", "softmax of chosen"),
)

# experts, choices, groups, chosen groups, top2
SHAPES = {
    "8 of 8": (8, 8, 1, 1, 1),
    "one expert": (1, 1, 1, 1, 1),
    "33": (33, 2, 1, 1, 1),
    "two groups of one": (2, 1, 2, 1, 0),
    "deepseek-v2": (60, 6, 4, 3, 0),
    "deepseek-v3": (256, 8, 8, 4, 1),
    "512 of 512": (512, 512, 1, 1, 1),
    "32 groups": (96, 5, 32, 2, 1),
}


def modes(score: str, weighting: str) -> tuple[int, int]:
    return SCORES.index(score), WEIGHTINGS.index(weighting)


def draw(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(tokens, experts, generator=generator)


def ranked(values: list[float], ties: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], -ties[i], i))


def chosen_experts(ranking: list[float], logits, choices, groups, top_groups, top_two) -> list[int]:
    """Of one token, by sorting."""
    size = len(ranking) // groups
    parts = [ranking[g * size : (g + 1) * size] for g in range(groups)]
    best = [sorted(part, reverse=True) for part in parts]
    numbers = [p[0] + p[1] if top_two and groups > 1 else p[0] for p in best]
    allowed = set(ranked(numbers, [0] * groups)[:top_groups])
    return [e for e in ranked(ranking, logits) if e // size in allowed][:choices]


def oracle(logits, chosen, score: str, weighting: str):
    """Weights and scores in float64, of given choices."""
    z = logits.double()
    if score == "softmax":
        scores = z.exp() / z.exp().sum(-1, keepdim=True)
    else:
        scores = 1 / (1 + (-z).exp()) if score == "sigmoid" else z
    weights = scores.gather(-1, chosen)
    if weighting == "renormalised":
        weights = weights / weights.sum(-1, keepdim=True)
    if weighting == "softmax of chosen":
        weights = z.gather(-1, chosen).exp()
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, scores


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("balanced", [False, True])
def test_choices_and_scores(shape, score, balanced):
    experts, choices, groups, top_groups, top_two = SHAPES[shape]
    logits = draw(5, experts)
    balance = draw(1, experts, seed=1)[0] if balanced else None
    chosen, weights, scores = emulated(
        router._router_kernel,
        logits,
        balance,
        choices,
        *modes(score, "scores"),
        groups,
        top_groups,
        top_two,
    )
    _, exact = oracle(logits, chosen, score, "scores")
    torch.testing.assert_close(scores.double(), exact, rtol=1e-6, atol=1e-12)
    # choices are by the scores as they are rounded: equal ones have to be seen as equal
    ranking = scores if balance is None else scores + balance
    rows = zip(ranking.tolist(), logits.tolist(), chosen.tolist(), strict=True)
    for row, ties, got in rows:
        assert got == chosen_experts(row, ties, choices, groups, top_groups, top_two)
    assert torch.equal(weights, scores.gather(-1, chosen))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("experts", [8, 40, 300])
def test_weights_and_gradients(experts, score, weighting):
    logits = draw(6, experts).abs() if score == "given" else draw(6, experts)
    kind, k = modes(score, weighting), 5
    chosen, weights, scores = emulated(router._router_kernel, logits, None, k, *kind, 1, 1, 1)
    z = logits.double().requires_grad_()
    exact, all_exact = oracle(z, chosen, score, weighting)
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=1e-12)

    d_weights, d_scores = draw(6, k, seed=2), draw(6, experts, seed=3)
    wanted = torch.autograd.grad((exact, all_exact), z, (d_weights.double(), d_scores.double()))[0]
    args = (d_weights, d_scores, chosen, weights, scores, *kind)
    got = emulated(router._router_backward_kernel, *args)
    scale = wanted.abs().amax(-1, keepdim=True)
    assert ((got - wanted).abs() <= 2e-6 * scale).all()
    torch.testing.assert_close(router._router_backward_reference(*args), got, rtol=1e-5, atol=1e-6)


def test_more_tokens_than_warps():
    """Warps compute several tokens one after the other, each as if it were alone."""
    logits = draw(230, 8)
    args = (None, 2, *modes("softmax", "renormalised"), 4, 2, 1)
    whole = emulated(router._router_kernel, logits, *args)
    assert whole[0].shape == (230, 2)
    alone = emulated(router._router_kernel, logits[227:], *args, seeds=(1,))
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[227:], b)
    cotangents = torch.ones(230, 2), logits
    d_logits = emulated(router._router_backward_kernel, *cotangents, *whole, *args[2:4])
    wanted = router._router_backward_reference(*cotangents, *whole, *args[2:4])
    torch.testing.assert_close(d_logits, wanted)


def test_rows_may_have_gaps():
    wide = draw(7, 50)
    args = (None, 3, *modes("sigmoid", "renormalised"), 1, 1, 1)
    for view in (wide[:, 3:43], wide[:, 3:43].t().contiguous().t(), wide[::2, :40]):
        want = emulated(router._router_kernel, view.contiguous(), *args, seeds=(0,))
        for a, b in zip(emulated(router._router_kernel, view, *args), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("groups", [1, 4])
def test_equals_go_to_the_first(groups):
    logits = torch.zeros(2, 64)
    logits[1, 7::16] = 1.0
    args = (None, 6, *modes("sigmoid", "scores"), groups, 2 if groups > 1 else 1, 1)
    chosen = emulated(router._router_kernel, logits, *args)[0]
    assert chosen[0].tolist() == [0, 1, 2, 3, 4, 5]
    first = [7, 23, 39, 55, 0, 1] if groups == 1 else [7, 23, 0, 1, 2, 3]
    assert chosen[1].tolist() == first
    assert torch.equal(chosen, router._router_reference(logits, *args)[0])


# experts, choices, groups, chosen groups, top2
LIMITED = {"all": (16, 4, 1, 1, 1), "top2": (16, 4, 4, 2, 1), "max": (16, 4, 4, 2, 0)}


@pytest.mark.parametrize("shape", list(LIMITED))
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("shift", [-100.0, -80.0, 24.0])
def test_choices_among_sigmoids_that_round(shape, balanced, shift):
    """Those of float64, which tells apart what is 0, or 1, in float32; also where all is 0."""
    size, sizes = LIMITED[shape][0], LIMITED[shape]
    logits = (8 * draw(12, size, seed=3)).round() / 8 + shift  # exact in float32
    exact = 1 / (1 + (-logits.double()).exp())
    balance = torch.full((size,), 0.0) if balanced else None
    wanted = torch.tensor([chosen_experts(row, row, *sizes[1:]) for row in exact.tolist()])
    args = (balance, sizes[1], *modes("sigmoid", "scores"), *sizes[2:])
    for lower in (0, 9900) if shift == -100 else (0,):  # e^-lower times the scores
        found = router._router_reference(logits - lower, *args)[0]
        assert torch.equal(found, wanted)
        assert torch.equal(emulated(router._router_kernel, logits - lower, *args)[0], wanted)
    assert torch.equal(router._router_reference(logits.double(), *args)[0], wanted)


def test_zeros_of_both_signs_are_equal():
    logits = torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]])
    args = (None, 2, *modes("given", "scores"), 1, 1, 1)
    assert emulated(router._router_kernel, logits, *args)[0].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -math.nan])
@pytest.mark.parametrize("groups", [1, 4])
def test_what_is_not_finite_chooses_experts_too(value, groups):
    """A diverged run must not read out of bounds; no expert comes twice."""
    logits = draw(8, 32)
    logits[torch.arange(8), torch.arange(8) * 4] = value
    logits[7] = value
    args = (None, 6, *modes("given", "scores"), groups, 2 if groups > 1 else 1, 1)
    chosen = emulated(router._router_kernel, logits, *args)[0]
    assert all(len(set(row)) == 6 and set(row) <= set(range(32)) for row in chosen.tolist())
    if groups == 1 and value != -math.inf:
        assert torch.equal(chosen, router._router_reference(logits, *args)[0])


def test_extreme_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4], [-1e30, -1e30, -1e30, -1e30], [3e38, 0, 0, 0]])
    for score in ("softmax", "sigmoid"):
        args = (None, 2, *modes(score, "renormalised"), 1, 1, 1)
        _, weights, scores = emulated(router._router_kernel, logits, *args)
        torch.testing.assert_close(scores, router._router_reference(logits, *args)[2])
        assert weights.isfinite().all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    logits = draw(tokens, 8)
    args = (None, 2, *modes("softmax", "scores"), 1, 1, 1)
    results = emulated(router._router_kernel, logits, *args)
    assert [x.shape for x in results] == [(tokens, 2), (tokens, 2), (tokens, 8)]
    gradient = emulated(router._router_backward_kernel, results[1], logits, *results, *args[2:4])
    assert gradient.shape == (tokens, 8)


def test_what_kernels_refuse():
    with pytest.raises(TypeError, match=r"got torch\.float64 logits; wanted float32; fix: "):
        router._router_kernel(Emulator(), draw(2, 8).double(), None, 2, 0, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="got 513 experts in 1 groups; wanted at most 512 in 32"):
        router._router_kernel(Emulator(), draw(2, 513), None, 2, 0, 0, 1, 1, 1)
    assert not router.fits(513)
    assert not router.fits(66, 33)
    assert router.fits(512, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "9 choices among 1 of 1 groups of 8 experts"),
        ({"num_groups": 3}, "3 groups of 8 experts"),
        ({"num_groups": 4, "top_k": 3}, "3 choices among 2 experts of 1 groups"),
    ],
)
def test_arguments_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        moe_router(draw(2, 8), **{"top_k": 2, **changes})


@pytest.mark.parametrize("name", ["score", "weighting"])
def test_names_that_are_unknown(name):
    with pytest.raises(
        Exception, match="tanh"
    ):  # of the type checker here, of moe_router elsewhere
        moe_router(draw(2, 8), **{"top_k": 2, name: "tanh"})


def plain(logits, balance, top_k, score, weighting, num_groups, top_groups, top_two):
    return router._router_reference(
        logits, balance, top_k, score, weighting, num_groups, top_groups, top_two
    )


def of_logits(score, weighting):
    return (
        draw(6, 8).double(),
        draw(1, 8, seed=1)[0].double(),
        3,
        *modes(score, weighting),
        4,
        2,
        1,
    )


def backward_args(score, weighting):
    args = of_logits(score, weighting)
    return (draw(6, 3).double(), draw(6, 8).double(), *router._router_reference(*args), *args[3:5])


CASES = [
    Case(ROUTER, plain, of_logits("softmax", "softmax of chosen"), outputs=(1, 2)),
    Case(ROUTER, plain, of_logits("sigmoid", "renormalised"), outputs=(1, 2)),
    Case(
        ROUTER_BACKWARD,
        router._router_backward_reference,
        backward_args("sigmoid", "renormalised"),
        moving=(0, 1, 3, 4),
    ),
]


@conform(CASES)
def test_conformance(case, check):
    check(case)


def test_a_bias_of_each_element_is_mapped():
    logits, balance = draw(5, 8), draw(3, 8, seed=1)
    choose = lambda bias: moe_router(logits, bias, top_k=2, score="sigmoid")
    got = torch.func.vmap(choose)(balance)
    for i, bias in enumerate(balance):
        for a, b in zip(got, choose(bias), strict=True):
            assert torch.equal(a[i], b)
