"""Scores against log-softmaxes taken one by one, on every mesh, and the harness's methods."""

from __future__ import annotations

import abc
import dataclasses
import sys
import types
from collections import namedtuple

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, random
from functron.models import scoring
from functron.nn.moe.config import MoEConfig

CONFIG = gpt.GPTConfig(
    vocab_size=60,
    num_layers=2,
    embed_dim=16,
    num_heads=2,
    mlp_dim=24,
    max_seq=8,
    vocab_multiple=16,
    init_stddev=0.5,
    dtype="float64",
)
WEIGHTS = ft.init_params(random.key(0), gpt.defs(CONFIG))
REQUESTS = [
    ([1, 2, 3], [4, 5]),
    ([9], [7]),
    ([3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14]),  # longer than max_seq + 1
    ([5, 5], []),
    ([8], [1, 2, 3, 4, 5, 6, 7, 8]),
]
Request = namedtuple("Request", "args")


def one_by_one(context, continuation):
    """The score by one forward pass for each token."""
    total, greedy = 0.0, True
    whole = [*context, *continuation]
    first = max(0, len(whole) - CONFIG.max_seq - 1)
    for end in range(len(context), len(whole)):
        seen = torch.tensor([whole[first:end]])
        logits = gpt.forward(CONFIG, WEIGHTS, seen)[0, -1, :60].tolist()
        total += torch.tensor(logits, dtype=torch.float64).log_softmax(0)[whole[end]].item()
        greedy &= max(range(60), key=logits.__getitem__) == whole[end]
    return total, greedy


@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2,tp=2", "fsdp=2"])
def test_log_likelihoods(mesh):
    greedy = ft.generate(WEIGHTS, CONFIG, torch.tensor([[1, 2]]), 3, temperature=0)[0].tolist()
    requests = [*REQUESTS, (greedy[:2], greedy[2:])]
    found = scoring.log_likelihoods(WEIGHTS, CONFIG, requests, batch_size=4, mesh=Mesh.parse(mesh))
    for request, score in zip(requests, found, strict=True):
        wanted = one_by_one(*request)
        assert score.log_likelihood == pytest.approx(wanted[0], rel=1e-10, abs=1e-10)
        assert score.is_greedy is wanted[1]
    assert found[-1].is_greedy
    assert not found[0].is_greedy


def test_rolling_scores_every_token_once():
    text = [(7 * i) % 60 for i in range(21)]
    wanted = 0.0
    for at in range(21):
        window = at // 8
        end = min(8 * window + 8, 21)
        first = end - 9  # one token before a full window
        seen = [0, *text[:at]] if window == 0 else text[first:at]
        logits = gpt.forward(CONFIG, WEIGHTS, torch.tensor([seen]))[0, -1, :60]
        wanted += logits.log_softmax(0)[text[at]].item()
    found = scoring.rolling_log_likelihoods(WEIGHTS, CONFIG, [text, []], 0, batch_size=2)
    assert found[0] == pytest.approx(wanted, rel=1e-10)
    assert found[1] == 0


class Letters:
    """A tokenizer whose tokens are characters from "@" on; "@" ends texts."""

    end_of_text = 0

    def encode(self, text, *, special=True):
        return [ord(c) - 64 for c in text]

    def decode(self, tokens):
        return "".join(chr(t + 64) for t in tokens)


def test_methods_of_the_harness():
    model = scoring.LanguageModel(WEIGHTS, CONFIG, Letters(), batch_size=2)
    requests = [Request(("ABC", "DE")), Request(("", "G"))]
    wanted = [one_by_one([1, 2, 3], [4, 5]), one_by_one([0], [7])]
    for got, want in zip(model.loglikelihood(requests), wanted, strict=True):
        assert got == pytest.approx(want)
    assert model.loglikelihood_rolling([Request(("G",))]) == pytest.approx([wanted[1][0]])

    said = ft.generate(WEIGHTS, CONFIG, torch.tensor([[1, 2]]), 5, temperature=0)[0, 2:].tolist()
    whole = Letters().decode(said[: said.index(0)] if 0 in said else said)
    settings = {"until": [whole[2]], "max_gen_toks": 5}
    free, stopped = model.generate_until(
        [Request(("AB", {"max_gen_toks": 5})), Request(("AB", settings))]
    )
    assert free == whole
    assert stopped == whole[: whole.index(whole[2])]


def harness() -> types.ModuleType:
    """The part of lm-evaluation-harness 0.4.13 that `simple_evaluate` holds a model against."""
    module = types.ModuleType("lm_eval.api.model")

    class LM(abc.ABC):
        @abc.abstractmethod
        def loglikelihood(self, requests): ...

    setattr(module, "LM", LM)  # noqa: B010
    return module


@pytest.mark.parametrize("when", ["before", "after"])
def test_is_a_model_of_the_harness(when, monkeypatch):
    """Whether that is loaded before the model is made or, as `simple_evaluate` does, after it."""
    loaded = harness()
    if when == "before":
        monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    model = scoring.LanguageModel(WEIGHTS, CONFIG, Letters(), batch_size=2)
    assert isinstance(model, scoring.LanguageModel)
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    assert isinstance(model, loaded.LM)
    assert not isinstance(Letters(), loaded.LM)
    assert (model.rank, model.world_size, model.device) == (0, 1, torch.device("cpu"))
    model.set_cache_hook(None)
    assert model.tokenizer_name == "Letters-60"
    assert dataclasses.replace(model, batch_size=3).batch_size == 3
    assert model.chat_template() == ""
    with pytest.raises(ValueError, match="got 1 messages; wanted texts; fix: leave apply_chat"):
        model.apply_chat_template([{"role": "user", "content": "A"}])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (([], [1]), "requests/0/0: got an empty context"),
        (([1], [60]), "requests/0: got token 60; wanted ids from 0 to 59"),
        (([1], [1] * 9), "requests/0/1: got a continuation of 9 tokens; wanted at most max_seq=8"),
    ],
)
def test_errors(request_, message):
    with pytest.raises(ValueError, match=message):
        scoring.log_likelihoods(WEIGHTS, CONFIG, [request_])


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
def test_rows_are_generated_as_one_by_one(mesh):
    """Prompts of different lengths, in rounds, up to a stop or a text."""
    config = dataclasses.replace(CONFIG, max_seq=64)
    weights = ft.init_params(random.key(1), gpt.defs(config))
    prompts = [[1, 2], [3], [5, 6, 7, 8, 9], list(range(40))]
    whole = [
        ft.generate(weights, config, torch.tensor([p[-24:]]), 40, temperature=0)[0, -40:].tolist()
        for p in prompts
    ]
    stop, last = whole[0][20], whole[2][9]
    how, given = scoring.Continue(40, stop=(stop,)), {"mesh": Mesh.parse(mesh), "batch_size": 3}
    found = scoring.generate_rows(weights, config, prompts, how, **given)
    assert found == [row[: row.index(stop)] if stop in row else row for row in whole]
    found = scoring.generate_rows(
        weights, config, prompts, scoring.Continue(40), ends=lambda row: last in row, **given
    )
    assert found == [row[: 16 if last in row[:16] else 40] for row in whole]
    assert len(found[2]) == 16


def test_settings_of_requests():
    model = scoring.LanguageModel(WEIGHTS, CONFIG, Letters(), batch_size=2, seed=3)
    drawn = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 5, "until": None}
    pairs = [("AB", drawn), ("AB", {**drawn, "do_sample": False})]
    first, greedy = model.generate_until(pairs)
    assert model.generate_until(pairs) == [first, greedy]
    assert greedy == model.generate_until([("AB", {"max_gen_toks": 5})])[0]
    assert first != greedy
    with pytest.raises(ValueError, match="num_beams: got 2; wanted until, do_sample"):
        model.generate_until([("AB", {"num_beams": 2})])
    with pytest.raises(ValueError, match="num_tokens: got 8; wanted from 1 to max_seq - 1 = 7"):
        model.generate_until([("AB", {"max_gen_toks": 8})])


def test_a_score_that_depends_on_others_is_refused():
    moe = MoEConfig(num_experts=4, top_k=2, capacity_factor=1.0)
    config = dataclasses.replace(CONFIG, moe=moe)
    with pytest.raises(ValueError, match=r"gpt.moe: got tokens that compete for experts"):
        scoring.log_likelihoods(WEIGHTS, config, REQUESTS)
    with pytest.raises(ValueError, match="mesh: got cp=2; wanted data, expert and tensor-parallel"):
        scoring.log_likelihoods(WEIGHTS, CONFIG, REQUESTS, mesh=Mesh(cp=2))
