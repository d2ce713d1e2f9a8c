"""Sampling against greedy loops, softmax frequencies, and its errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import gpt, random
from functron.models.generation import Draw

CONFIG = gpt.GPTConfig(
    vocab_size=11,
    num_layers=2,
    embed_dim=16,
    num_heads=2,
    mlp_dim=24,
    max_seq=6,
    vocab_multiple=16,
    init_stddev=0.5,
    dtype="float64",
)


@pytest.fixture(scope="module")
def weights():
    drawn = ft.init_params(random.key(0), gpt.defs(CONFIG))
    # columns of padding that would win every draw if they took part
    drawn["unembed"][:, CONFIG.vocab_size :] = 100.0
    return drawn


def logits(weights, tokens, config=CONFIG):
    """Of the next token, from the forward pass that test_hugging_face.py checks."""
    return gpt.forward(config, weights, tokens)[:, -1, : config.vocab_size]


def prompt(rows=3, seq=2):
    return torch.randint(0, 11, (rows, seq), generator=torch.Generator().manual_seed(0))


def test_greedy(weights):
    tokens = prompt()
    out = ft.generate(weights, CONFIG, tokens, 3, temperature=0)
    for row, start in zip(out, tokens, strict=True):
        expected = start.tolist()
        for _ in range(3):  # row by row, so that rows cannot mix
            scores = logits(weights, torch.tensor([expected]))[0].tolist()
            expected.append(scores.index(max(scores)))
        assert row.tolist() == expected


def test_greedy_beyond_the_context(weights):
    out = ft.generate(weights, CONFIG, prompt(), 10, temperature=0)
    assert out.shape == (3, 12)
    for end in range(2, 12):  # each token follows from the six before it at most
        context = out[:, max(0, end - CONFIG.max_seq) : end]
        assert torch.equal(out[:, end], logits(weights, context).argmax(-1))


def test_a_long_prompt(weights):
    tokens = prompt(seq=9)
    out = ft.generate(weights, CONFIG, tokens, 1, temperature=0)
    assert torch.equal(out[:, :9], tokens)
    assert torch.equal(out[:, 9], logits(weights, tokens[:, -6:]).argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_those_of_the_softmax(weights, temperature):
    count = 20000
    tokens = prompt(rows=1).expand(count, 2)
    drawn = ft.generate(weights, CONFIG, tokens, 1, temperature=temperature, key=random.key(1))
    found = torch.bincount(drawn[:, -1], minlength=11).double()
    chances = torch.softmax(logits(weights, tokens[:1])[0] / temperature, -1)
    assert found.numel() == 11
    sigma = (count * chances * (1 - chances)).sqrt()
    assert ((found - count * chances).abs() < 5 * sigma + 1).all()
    assert chances.max() < 0.95  # a distribution, not one token


def test_draws_of_later_tokens_are_independent(weights):
    uniform = {**weights, "unembed": torch.zeros_like(weights["unembed"])}
    count = 20000
    out = ft.generate(uniform, CONFIG, prompt(rows=1).expand(count, 2), 2, key=random.key(2))
    pairs = torch.bincount(out[:, 2] * 11 + out[:, 3], minlength=121).double()
    expected = count / 121
    assert ((pairs - expected).abs() < 5 * math.sqrt(expected)).all()


def test_a_key_decides_the_draws(weights):
    def run(seed):
        return ft.generate(weights, CONFIG, prompt(), 10, temperature=2.0, key=random.key(seed))

    drawn = run(5)
    assert torch.equal(run(5), drawn)
    assert not torch.equal(run(6), drawn)
    assert len({tuple(row) for row in drawn[:, 2:].tolist()}) == 3


def test_low_temperatures_are_greedy(weights):
    greedy = ft.generate(weights, CONFIG, prompt(), 4, temperature=0)
    drawn = ft.generate(weights, CONFIG, prompt(), 4, temperature=1e-4, key=random.key(0))
    assert torch.equal(drawn, greedy)


def test_nothing_to_add(weights):
    assert torch.equal(ft.generate(weights, CONFIG, prompt(), 0, temperature=0), prompt())


def test_no_graph_is_kept(weights):
    leaves = ft.tree.map(lambda leaf: leaf.clone().requires_grad_(), weights)
    # grad mode is off inside, and as before after it
    out = ft.generate(leaves, CONFIG, prompt(), 1, temperature=0)
    assert not out.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(weights, dtype):
    config = replace(CONFIG, dtype=dtype)
    cast = ft.tree.map(lambda leaf: leaf.to(config.torch_dtype), weights)
    out = ft.generate(cast, config, prompt(), 3, key=random.key(0))
    assert out.dtype == torch.int64
    assert int(out.max()) < 11


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, r"tokens: got shape \(2, 0\)"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"tokens: got shape \(3,\)"),
        (
            {"tokens": torch.tensor([[1, 11]])},
            "tokens: got ids from 1 to 11; wanted ids from 0 to 10",
        ),
        ({"tokens": torch.tensor([[-1, 3]])}, "tokens: got ids from -1 to 3"),
        ({"num_tokens": -1}, "num_tokens: got -1; wanted at least 0"),
        ({"temperature": -0.5}, r"temperature: got -0\.5; wanted at least 0"),
        ({"key": None}, "key: got None; wanted a key; fix: pass random.key"),
    ],
)
def test_errors(weights, changes, message):
    options = {"tokens": prompt(), "num_tokens": 1, "temperature": 1.0, "key": random.key(0)}
    options |= changes
    tokens, num_tokens = options.pop("tokens"), options.pop("num_tokens")
    with pytest.raises(ValueError, match=message):
        ft.generate(weights, CONFIG, tokens, num_tokens, **options)


def test_all_problems_at_once(weights):
    with pytest.raises(ValueError, match="cannot sample") as caught:
        ft.generate(weights, CONFIG, torch.tensor([[99]]), -1, temperature=1.0)
    assert str(caught.value).count("\n  - ") == 3


def test_stops(weights):
    tokens = prompt(rows=4)
    free = ft.generate(weights, CONFIG, tokens, 8, temperature=0)
    stop = int(free[0, 3])
    out = ft.generate(weights, CONFIG, tokens, 8, temperature=0, stop={stop, 10**6})
    ends = []
    for row, whole in zip(out.tolist(), free.tolist(), strict=True):
        said = whole[2:]
        end = said.index(stop) + 1 if stop in said else len(said)
        ends.append(end)
        assert row[2 : 2 + end] == said[:end]
        assert all(token == stop for token in row[2 + end :])
    assert ends[0] <= 2
    assert out.shape[1] == 2 + max(ends)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cold_draws_are_the_likeliest_token(dtype, filters):
    """Logits over 1e-38 and less are infinite in float32, and 1e-46 is 0 there."""
    logits = torch.tensor([[1.0, 5.0, 6.0, -3e4], [70.0, 2.0, 3.0, 60.0]], dtype=dtype)
    for temperature in (1e-6, 1e-20, 1e-38, 1e-40, 1e-46, 5e-324):
        draw = Draw(temperature, **filters)
        for seed in range(4):
            assert draw(logits, random.key(seed), torch.arange(2)).tolist() == [2, 0]
