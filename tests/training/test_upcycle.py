"""A mixture of experts made of a dense model computes what that does, before it is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import gpt, random, tree
from functron.cli import main
from functron.nn.moe import MoEConfig
from functron.training.config import load
from functron.training.convert import upcycle, upcycled_config

LLAMA = gpt.GPTConfig(
    vocab_size=48, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24, max_seq=12,
    init_stddev=0.3, vocab_multiple=48, dtype="float64",
)  # fmt: skip
GPT2 = replace(
    LLAMA, norm="layer", gated=False, bias=True, activation="gelu", positions="learned", tied=True
)


@pytest.mark.parametrize("dense", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "moe",
    [
        MoEConfig(4, 2, 24, renormalise=True),
        MoEConfig(4, 1, 24, normalise="after"),
        MoEConfig(8, 4, 8 * 3 // 2, score="sigmoid", renormalise=True, balance_bias=True),
        MoEConfig(9, 3, 8, normalise="after", router_bias=True, aux_loss=0.1),
    ],
    ids=["copies", "top-1", "halves", "thirds"],
)
def test_it_computes_what_the_dense_model_does(dense, moe):
    moe = replace(moe, expert_bias=dense.bias)
    params = ft.init_params(random.key(0), gpt.defs(dense))
    params = tree.map(lambda p: p + 0.1 * torch.randn_like(p), params)  # biases are zero at first
    tokens = torch.randint(0, 48, (3, 12))
    made, config = upcycle(params, dense, moe)
    wanted = gpt.defs(config)
    assert sorted(tree.paths(made)) == sorted(tree.paths(wanted))
    assert all(a.shape == b.shape for a, b in zip(*map(tree.leaves, (made, wanted)), strict=True))
    want = gpt.forward(dense, params, tokens)
    got = gpt.forward(config, made, tokens)
    assert (got - want).abs().max() < 1e-12 * want.abs().max()


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        (MoEConfig(4, 2, 16, renormalise=True), "expert_dim: got 16; wanted a divisor of 24"),
        (MoEConfig(6, 3, 12, renormalise=True), "top_k: got 3; wanted a multiple of 2"),
        (MoEConfig(4, 2, 24), "wanted tokens that choose"),
        (MoEConfig(4, 2, 24, renormalise=True, capacity_factor=1.0), "leave the others out"),
    ],
)
def test_settings_that_would_change_the_model_are_refused(moe, words):
    with pytest.raises(ValueError, match=words):
        upcycled_config(LLAMA, moe)


def test_a_run_is_made_of_a_run_and_trains(tmp_path, capsys):
    dense, made = str(tmp_path / "dense"), str(tmp_path / "made")
    small = ["--model", "llama3-tiny", "--seq", "32", "--global-batch", "4"]
    assert main.main(["train", *small, "--steps", "2", "--out", dense]) == 0
    assert main.main(["upcycle", dense, made, "--experts", "4", "--expert-dim", "96"]) == 0
    assert "4 experts" in capsys.readouterr().out
    assert main.main(["upcycle", dense, made]) == 2  # it is there already
    # its recipe is that of the dense run
    first, then = (load(f"{run}/config.toml") for run in (dense, made))
    assert (then.data.seq, then.data.global_batch) == (32, 4)
    assert (then.optimizer, then.learning_rate) == (first.optimizer, first.learning_rate)
    assert then.title == f"llama3-tiny-experts of run:{dense}"
    more = ["--steps", "2", "--mesh", "ep=2"]
    assert main.main(["train", "--resume", "--out", made, *more]) == 0
