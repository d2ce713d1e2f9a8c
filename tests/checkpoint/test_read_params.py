"""Averages of parameters, read out of checkpoints: the mean by hand of every step's parameters."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import Mesh, checkpoint, gpt, hub, lora, optim, random, tree
from functron.checkpoint import Checkpoint
from functron.checkpoint.restore import read_params, stored_params
from functron.cli.main import main
from functron.nn import Adapter
from functron.nn.moe import MoEConfig
from functron.optim import OptimizerConfig
from functron.spmd.params import weight_mask
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure
from functron.training.convert import convert, upcycle, upcycle_run
from functron.training.run import prepare
from functron.training.setup import make_setup
from functron.training.train import train

DECAY, STEPS = 0.7, 4
RUN = configure(
    gpt=gpt.GPTConfig(
        vocab_size=256, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24,
        max_seq=12, init_stddev=0.2, dtype="float64", vocab_multiple=8,
    ),
    data=argparse.__file__, seq=12, global_batch=12, steps=STEPS, save_every=1,
    optimizer=OptimizerConfig(clip_norm=0.5, ema_decay=DECAY),
)  # fmt: skip


def run_of(config: TrainConfig, out: Path):
    return train(prepare(config, Mesh.parse(config.parallelism.mesh)), out)


def last(run: Path) -> Checkpoint:
    return Checkpoint(checkpoint.latest(run / run_folder.CHECKPOINTS))


def by_hand(run: Path):
    """The mean of what every step left, in float64: the t-th from the end weighs 0.7^t."""
    saved = [checkpoint.restore(run / "checkpoints" / str(t + 1)) for t in range(STEPS)]
    weights = [DECAY ** (STEPS - 1 - t) for t in range(STEPS)]
    return tree.map(
        lambda *xs: sum(w * x.double() for w, x in zip(weights, xs, strict=True)) / sum(weights),
        *(state["params"] for state in saved),
    )


def close(got, want, tolerance=1e-12):
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averages")
    state = run_of(RUN, folder / "run").state
    return folder / "run", state, by_hand(folder / "run")


def test_a_checkpoint_has_the_mean_of_all_steps(alone):
    run, state, wanted = alone
    defs = gpt.defs(RUN.gpt)
    got = read_params(last(run), defs, averaged=True)
    close(got, wanted)
    close(optim.averaged(state.opt_state, state.params), wanted)
    now = read_params(last(run), defs)
    close(now, state.params, 0)
    assert not torch.allclose(now["embed"], got["embed"], atol=1e-4)
    rows = stored_params(last(run), defs, averaged=True)["blocks"]["mlp"]["up"]["w"]
    assert (rows.shape, rows.dtype) == ((2, 16, 24), torch.float64)
    close([rows[1, 3:5]], [wanted["blocks"]["mlp"]["up"]["w"][1, 3:5]])


def test_commands_take_it(alone, tmp_path, capsys):
    run, _, wanted = alone
    assert main(["sample", str(run), "--prompt", "def ", "--tokens", "6", "--averaged"]) == 0
    key, prompt = random.key(0), torch.tensor([list(b"def ")])
    tokens = ft.generate(wanted, RUN.gpt, prompt, 6, temperature=0.8, key=key)[0].tolist()
    assert capsys.readouterr().out == bytes(tokens).decode(errors="replace") + "\n"
    assert main(["convert", f"run:{run}", f"hf:{tmp_path / 'hf'}", "--averaged"]) == 0
    close(hub.load(tmp_path / "hf", RUN.gpt), wanted)
    moe = MoEConfig(num_experts=2, top_k=2, expert_dim=24, renormalise=True)
    upcycle_run(run, tmp_path / "moe", moe, averaged=True)
    made, config = upcycle(wanted, RUN.gpt, moe)
    close(read_params(last(tmp_path / "moe"), gpt.defs(config)), made)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_process_reads_its_shards(alone, averaged, rank):
    run, _, _ = alone
    mesh, defs = Mesh(fsdp=2, dp=2, tp=2), gpt.defs(RUN.gpt)
    bound = ft.BoundMesh(mesh, rank, mesh.coordinate(rank), {}, "cpu")
    rules = gpt.rules(RUN.gpt, mesh)
    got = read_params(last(run), defs, averaged=averaged, rules=rules, mesh=bound)
    whole = read_params(last(run), defs, averaged=averaged)
    close(got, ft.shard(whole, ft.param_specs(defs, rules), bound), 0)


@pytest.fixture(scope="module")
def held_out(alone, tmp_path_factory):
    """A text of 20 samples, and the loss on it of the mean by hand."""
    file = tmp_path_factory.mktemp("held") / "out.txt"
    file.write_bytes(Path(argparse.__file__).read_bytes()[5000 : 5000 + 20 * 12 + 1])
    ids = torch.tensor(list(file.read_bytes()))
    batch = {"tokens": ids[:-1].reshape(20, 12), "targets": ids[1:].reshape(20, 12)}
    return file, gpt.loss(RUN.gpt, alone[2], {**batch, "rows": torch.arange(20)}) / 240


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"mesh": "dp=2,tp=2"}, marks=pytest.mark.full),
        {"mesh": "fsdp=2", "gather": "step"},
        {"mesh": "dp=3", "zero": 1},  # divides no dim: parts are padded
        {"mesh": "dp=2,tp=2", "zero": 2, "microbatches": 2},
        {"mesh": "pp=2,dp=2", "zero": 1, "microbatches": 2, "vocab_over_pp": True},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_every_mesh_keeps_and_evaluates_the_same(changes, alone, held_out, tmp_path):
    file, loss = held_out
    asked = {"eval_every": STEPS, "eval_data": f"held={file}", "eval_averaged": True}
    found = run_of(configure(RUN, **changes, **asked, save_every=0), tmp_path / "run")
    got = read_params(last(tmp_path / "run"), gpt.defs(RUN.gpt), averaged=True)
    close(got, alone[2], 1e-10)
    said = found.history[-1]["eval"]["held"]["loss"]
    close([torch.tensor(said, dtype=torch.float64)], [loss], 1e-10)


def test_parts_of_averages_are_not_taken_for_averages(alone):
    state = alone[1]
    params = {**state.params, "embed": state.params["embed"][:100]}
    with pytest.raises(ValueError, match=r"embed: got an average .*; fix: pass specs and shards"):
        optim.averaged(state.opt_state, params)


def test_adapters_are_averaged_and_merged(tmp_path):
    config = configure(RUN, lora_rank=3, lora_alpha=7.0, mesh="dp=2", zero=1)
    run_of(config, tmp_path / "run")
    found = read_params(
        last(tmp_path / "run"), make_setup(config, Mesh()).whole_defs, averaged=True
    )
    wanted = by_hand(tmp_path / "run")  # frozen ones are their own mean
    flat = dict(zip(tree.paths(found), tree.leaves(found), strict=True))
    named = dict(zip(tree.paths(wanted), tree.leaves(wanted), strict=True))
    assert flat.keys() == named.keys()
    close(flat, named)
    convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'hf'}", averaged=True)
    merged = hub.load(tmp_path / "hf", RUN.gpt)
    layer = found["blocks"]["mlp"]["up"]
    added = torch.einsum("lir,lro->lio", layer[lora.LORA].a, layer[lora.LORA].b)
    assert isinstance(layer[lora.LORA], Adapter)
    assert added.abs().max() > 1e-6
    close([merged["blocks"]["mlp"]["up"]["w"]], [layer["w"] + 7 / 3 * added])


def test_masters_are_averaged_and_what_balances_routers_is_not(tmp_path):
    experts = MoEConfig(num_experts=2, top_k=1, expert_dim=8, score="sigmoid", balance_bias=True)
    tiny = replace(RUN.gpt, moe=experts, dtype="bfloat16")
    config = configure(RUN, gpt=tiny, optimizer=replace(RUN.optimizer, fp32_masters=True))
    state = run_of(config, tmp_path / "run").state
    found = read_params(last(tmp_path / "run"), gpt.defs(tiny), averaged=True)
    close(found, optim.averaged(state.opt_state, state.params), 0)
    moved = tree.map(lambda a, b: not torch.equal(a, b), found, state.params)
    weights, balance = tree.partition(moved, weight_mask(gpt.defs(tiny)))
    assert weights["embed"]
    assert tree.leaves(balance) == [False]  # read as it is


def test_runs_without_averages_are_told_how_to_keep_them(alone, tmp_path, capsys):
    kept = replace(RUN.optimizer, ema_decay=0.0)
    run_of(configure(RUN, optimizer=kept, steps=1), tmp_path / "run")
    for line in (
        ["sample", tmp_path / "run", "--prompt", "a"],
        ["convert", f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'hf'}"],
    ):
        assert main([*map(str, line), "--averaged"]) == 2
        said = capsys.readouterr().err
        assert "averaged: got a checkpoint with no averages; wanted the averages that a run" in said
        assert "or train with --optimizer.ema-decay 0.999" in said
    assert main(["convert", f"hf:{alone[0]}", f"run:{tmp_path / 'new'}", "--averaged"]) == 2
    assert "averaged: got true from a Hugging Face folder" in capsys.readouterr().err
    for fields, line in (
        ({"eval_every": 2, "eval_data": f"a={argparse.__file__}"}, "wanted a run that keeps"),
        ({}, "eval_averaged: got True, which has no effect; wanted held-out"),
    ):
        with pytest.raises(ValueError, match=line):
            validate(configure(RUN, optimizer=kept, eval_averaged=True, **fields))
