"""The data of runs: blends, splits, documents by themselves, filled middles and random tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from functron import checkpoint
from functron.cli import main
from functron.core.errors import Problem
from functron.data import IndexedWriter, TokenWindows, Transformed, open_tokens, split
from functron.data.blend import parse_blend
from functron.data.sampling import SampleMaker
from functron.models import family
from functron.models.family import Objective
from functron.training.config import configure
from functron.training.data import (
    check,
    is_on_disk,
    objective_problems,
    open_samples,
    problems_of,
    target_length,
    useless_of,
)

SEQ = 16


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder, drawn = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for name, low in (("a", 0), ("b b", 100)):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for size in drawn.integers(3, 40, 60):
                writer.add(drawn.integers(low, low + 100, size))
    return str(folder / "a"), str(folder / "b b")


def test_blends_as_they_are_written(prefixes):
    a, b = prefixes
    assert parse_blend(f"0.3 {a} 0.7 '{b}'") == [("0.3", a), ("0.7", b)]
    assert not is_on_disk(configure(data="x" * 5000))
    for path in ("data", "my data", "it's", a, "", "7"):
        assert parse_blend(path) is None
    with pytest.raises(ValueError, match="data: got 'y' at its end; wanted weights and paths"):
        parse_blend("0.3 x y")
    with pytest.raises(ValueError, match="data: got 'x' before '7'; wanted a weight"):
        parse_blend("3 y x 7")


def test_a_blend_of_files(prefixes):
    a, b = prefixes
    config = configure(data=f"3 {a} 1 '{b}'", seq=SEQ, seed=5)
    assert is_on_disk(config)
    check(config)
    samples = open_samples(config)
    first = torch.cat([samples.batch(step, 8)["tokens"][:, 0] for step in range(10)])
    assert (first < 100).tolist() == [True, True, False, True] * 20
    for data in (f"0.3 {a} 0.3 '{b}'", f"nan {a}", f"1 {a} 1 {b}", f"1 {a} 1 missing"):
        with pytest.raises(ValueError, match="wanted"):
            check(configure(config, data=data))


def test_parts_of_files(prefixes):
    config = configure(data=f"1 {prefixes[0]}", seq=SEQ, split="90,10")
    parts = split(open_tokens(prefixes[0]), "90,10")
    for name, file in parts.items():
        wanted = TokenWindows(file, SEQ).batch(3, 4)
        got = open_samples(config, name).batch(3, 4)
        assert all(torch.equal(got[key], wanted[key]) for key in wanted)
    with pytest.raises(ValueError, match="split: got 90,10: nothing for test"):
        open_samples(config, "test")
    with pytest.raises(ValueError, match=r"a sum of 0\.9"):
        check(configure(config, split="0.8,0.1"))


def test_options_for_tokens_alone():
    config = configure(split="9,1", mask_documents=True, fim_rate=0.5)
    found = [problem.path for problem in problems_of(config)]
    assert found == ["split", "mask_documents", "fim_rate"]
    assert list(problems_of(configure(config, format="mock"))) == []
    assert [x.path for x in problems_of(configure(format="mock", data="x"))] == ["data"]


def test_filled_middles(prefixes):
    config = configure(data=prefixes[0], seq=SEQ, fim_rate=1.0, fim_tokens="250,251,252")
    assert (open_samples(config).batch(0, 4)["tokens"][:, 0] == 250).all()
    for ids in ("", "1,2", "1,x,3"):
        with pytest.raises(ValueError, match=r"fim_tokens: got .*; wanted three or four ids; fix"):
            check(configure(config, fim_tokens=ids))
    with pytest.raises(ValueError, match="middle: got id 256; wanted ids from 0 to 255"):
        check(configure(config, fim_tokens="250,251,256"))


def losses(out, *options) -> list[float]:
    run = ["train", "--steps", "2", "--seq", str(SEQ), "--global-batch", "4", "--out", str(out)]
    assert main.main([*run, *options]) == 0
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def masked(prefixes, tmp_path_factory):
    """How to train on a blend of masked documents, and the losses of one rank."""
    data = ("--data", f"0.75 {prefixes[0]} 0.25 '{prefixes[1]}'", "--split", "95,5")
    options = (*data, "--mask-documents", "--gpt.num-layers", "2")
    folder = tmp_path_factory.mktemp("runs")
    found = losses(folder / "one", *options, "--prefetch", "0")
    step = checkpoint.Checkpoint(checkpoint.latest(folder / "one" / "checkpoints"))
    assert step.metadata["sources"] == {prefixes[0]: 6, prefixes[1]: 2}
    unmasked = losses(folder / "plain", *(x for x in options if x != "--mask-documents"))
    assert abs(unmasked[0] - found[0]) > 1e-4
    return options, found


@pytest.mark.parametrize("mesh", [
    ("dp=2,cp=2",),
    pytest.param(("dp=2,tp=2", "--sequence-parallel"), marks=pytest.mark.full),
    pytest.param(("pp=2", "--microbatches", "2"), marks=pytest.mark.full),
], ids=lambda x: x[0])  # fmt: skip
def test_masked_documents_train_equally_on_every_mesh(masked, tmp_path, mesh):
    options, wanted = masked
    got = losses(tmp_path / "run", *options, "--mesh", *mesh)
    assert got == pytest.approx(wanted, rel=1e-5)


def test_random_tokens(tmp_path, capsys):
    out = tmp_path / "run"
    found = losses(out, "--format", "mock", "--mask-documents", "--gpt.num-layers", "1")
    assert found[0] == pytest.approx(np.log(256), abs=0.5)  # any token is as likely as any other
    introduced = [x for x in capsys.readouterr().out.splitlines() if x.startswith("data ")]
    assert introduced == [f"data   random tokens: {2**50:,} tokens in {2**40:,} documents"]


def test_an_objective_is_plain_functions(prefixes, monkeypatch):
    """A family of one's own: it reads text backwards, of which it predicts every second token."""

    def plan_samples(config, tokenizer):
        def over(samples, seed):
            def change(drawn, numbers):
                backwards = drawn["tokens"].flip(1)
                return {"tokens": backwards, "targets": backwards[:, ::2]}

            return Transformed(samples, change, 256)

        return SampleMaker(config.data.seq, 200, over)

    def find_problems(config, mesh):
        if config.data.mask_rate > 0.5:
            yield Problem("mask_rate", str(config.data.mask_rate), "a half at most")

    objective = Objective(
        plan_samples,
        ("mask_rate",),
        count_targets=lambda config: config.data.seq // 2,
        find_problems=find_problems,
    )
    config = configure(data=prefixes[0], seq=SEQ, seed=5)
    plain = open_samples(config).batch(2, 4)["tokens"]
    assert useless_of(config) == ("mask_rate", "mask_token", "mean_span", "end_token")
    monkeypatch.setattr(family, "GPT", replace(family.GPT, objective=objective))
    batch = open_samples(config).batch(2, 4)
    assert batch["tokens"].tolist() == [row[::-1] for row in plain.tolist()]
    assert batch["targets"].tolist() == [row[::-2] for row in plain.tolist()]
    assert target_length(config) == 8
    assert useless_of(config) == ("mask_token", "mean_span", "end_token")
    said = list(objective_problems(configure(config, mask_rate=0.6, end_token=3), None))
    assert [(each.path, each.wanted) for each in said] == [
        ("end_token", "nothing with a GPT"),
        ("mask_rate", "a half at most"),
    ]
