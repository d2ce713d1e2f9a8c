"""A run whose sizes its mesh does not divide: each command that reads it, against one rank."""

from __future__ import annotations

import argparse
import copy
import json
import shutil

import pytest
import torch

import functron as ft
from functron import Mesh, checkpoint, hub, tree
from functron.cli.main import main
from functron.models import gpt
from functron.models.generation import generate
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.config import load

SIZES = [
    "--seq", "16", "--global-batch", "12", "--gpt.num-layers", "1", "--gpt.embed-dim", "18", "--gpt.num-heads", "3",
    "--gpt.num-kv-heads", "3", "--gpt.head-dim", "4", "--gpt.mlp-dim", "24", "--gpt.vocab-size", "257",
    "--gpt.vocab-multiple", "1", "--gpt.dtype", "float64", "--learning-rate.total-steps", "4", "--optimizer.ema-decay", "0.5",
]  # fmt: skip
MESH = ["--mesh", "tp=2,fsdp=4", "--uneven", "embed,vocab,heads"]
"""Which divides neither the vocabulary of 257, nor 3 heads, nor an embed_dim of 18."""


def train(run, *words: object) -> None:
    given = ["--data", argparse.__file__, *SIZES, "--save-every", 1, "--out", run, *words]
    assert main(["train", *map(str, given)]) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps on one rank, and on the mesh."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "dense", "--steps", 2)
    train(folder / "uneven", "--steps", 2, *MESH)
    return folder


def test_evaluation(runs, capsys):
    found = []
    held_out = ["--data", f"x={copy.__file__}", "--batches", "2", "--json"]
    for run, words in [
        ("dense", []),
        ("uneven", []),
        ("uneven", ["--mesh", "tp=2,fsdp=4", "--averaged"]),
        ("uneven", ["--mesh", "tp=2,fsdp=4"]),
        ("uneven", ["--mesh", "tp=5", "--uneven", "vocab,heads,mlp"]),
        ("dense", ["--mesh", "fsdp=4", "--uneven", "embed"]),
    ]:
        assert main(["evaluate", str(runs / run), *held_out, "--batch", "32", *words]) == 0
        found.append(json.loads(capsys.readouterr().out)["x"]["loss"])
    averaged = found.pop(2)
    assert found == pytest.approx([found[0]] * len(found), rel=1e-10)
    assert abs(averaged - found[0]) > 1e-6  # another model
    assert main(["evaluate", str(runs / "dense"), *held_out, "--mesh", "fsdp=4"]) == 2
    assert "embed_dim: got 18; wanted a multiple of fsdp=4" in capsys.readouterr().err


def test_texts(runs, capsys):
    found = []
    drawn = ["--prompt", "def ", "--tokens", "6", "--seed", "3"]
    for run, words in [
        ("dense", []),
        ("uneven", ["--mesh", "tp=2"]),
        ("uneven", ["--mesh", "tp=2,fsdp=4", "--temperature", "0.8"]),
        ("dense", ["--mesh", "tp=2", "--uneven", "vocab,heads"]),
    ]:
        assert main(["sample", str(runs / run), *drawn, *words]) == 0
        found.append(capsys.readouterr().out)
    assert len(set(found)) == 1


def test_experts_that_tokens_reach_in_two_hops(tmp_path, capsys):
    """5 of them over 2 nodes of 2 ranks; commands that read the run have no axis of nodes."""
    index = SIZES.index("--gpt.mlp-dim")
    given = ["--model", "mixtral-tiny", *SIZES[:index], *SIZES[index + 2 :], "--steps", 1]
    given += ["--gpt.moe.num-experts", 5, "--gpt.moe.expert-dim", 8, "--uneven", "expert"]
    given += ["--mesh", "ep_node=2,ep=2", "--expert-axes", "ep_node,ep"]
    given += [
        "--gpt.moe.dispatch",
        "two-hop",
        "--data",
        argparse.__file__,
        "--out",
        tmp_path / "run",
    ]
    assert main(["train", *map(str, given)]) == 0
    for command in (
        ["evaluate", "--data", f"x={copy.__file__}", "--batches", "1", "--batch", "2", "--json"],
        ["sample", "--prompt", "def ", "--tokens", "4", "--temperature", "0"],
    ):
        found = []
        for mesh in ("", "ep=2"):
            capsys.readouterr()
            assert main([command[0], str(tmp_path / "run"), *command[1:], "--mesh", mesh]) == 0
            found.append(capsys.readouterr().out)
        if command[0] == "evaluate":
            losses = [json.loads(text)["x"]["loss"] for text in found]
            assert losses[0] == pytest.approx(losses[1], rel=1e-10)
        else:
            assert found[0] == found[1]


def test_going_on_with_other_ranks(runs, tmp_path):
    for name, words in {
        "dense": ["--mesh", "fsdp=4", "--uneven", "embed"],
        "uneven": ["--mesh", "", "--uneven", ""],
        "other": ["--mesh", "tp=5", "--uneven", "vocab,heads,mlp"],
    }.items():
        shutil.copytree(runs / name.replace("other", "uneven"), tmp_path / name)
        train(tmp_path / name, "--steps", 3, "--resume", *words)
    losses = [
        [record["loss"] for record in run_folder.records(tmp_path / name)]
        for name in ("dense", "uneven", "other")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert losses[2] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.full
def test_export_plan_and_trace(runs, tmp_path, capsys):
    run, out = str(runs / "uneven"), tmp_path / "hub"
    assert main(["convert", f"run:{run}", f"hf:{out}"]) == 0
    model = load(runs / "uneven" / run_folder.CONFIG).gpt
    loaded = dict(tree.items(hub.load(out, model)))
    stored = checkpoint.restore(runs / "uneven" / "checkpoints" / "2")["params"]
    for path, leaf in tree.items(stored):
        assert torch.equal(leaf, loaded[path]), path
    capsys.readouterr()
    assert main(["trace", run]) == 0
    assert "tp=2,fsdp=4" in capsys.readouterr().out
    assert main(["params", run]) == 0
    assert "Uneven('tp', 257)" in capsys.readouterr().out
    # the planner finds meshes that need it, and writes it with those alone
    hardware = ["--gpus", "8", "--hardware", "cpu", "--precision", "float32"]
    for mesh, uneven in (("tp=2,fsdp=4", "embed,vocab,heads"), ("dp=8", "")):
        file = tmp_path / f"{mesh}.toml"
        words = ["--fix", f"{mesh},rows=1", "--global-batch", "8", "--out", str(file)]
        assert main(["plan", run, *hardware, *words]) == 0
        planned = load(file)
        assert planned.parallelism.uneven == uneven
        validate(planned)
    words = ["--fix", "tp=2,fsdp=4", "--uneven", "", "--global-batch", "8"]
    assert main(["plan", run, *hardware, *words]) == 2
    assert "num_heads: got 3" in capsys.readouterr().err


def test_generation_has_the_specs_of_its_options():
    config = gpt.GPTConfig(
        vocab_size=257, num_layers=1, embed_dim=18, num_heads=3, head_dim=4, mlp_dim=24,
        vocab_multiple=1, max_seq=12, dtype="float64", init_stddev=0.5,
    )  # fmt: skip
    defs, mesh, uneven = gpt.defs(config), Mesh(tp=2, fsdp=4), ("embed", "vocab", "heads")
    params = ft.init_params(ft.random.key(0), defs)
    tokens = torch.arange(12).view(4, 3)
    options = ft.ModelOptions(
        gather=ft.Gather(ft.param_specs(defs, gpt.rules(config, mesh, uneven=uneven)))
    )
    for count in (5, 11):  # with kept keys, and without
        want = generate(params, config, tokens, count, temperature=0)
        got = generate(params, config, tokens, count, temperature=0, mesh=mesh, options=options)
        assert torch.equal(got, want)
    with pytest.raises(ValueError, match="embed_dim: got 18"):
        generate(params, config, tokens, 5, temperature=0, mesh=mesh)


@pytest.mark.distributed
def test_processes_read_their_parts_of_files(runs, in_processes, tmp_path, capfd):
    words = ["--mesh", "fsdp=4", "--device", "cpu", "--prompt", "def ", "--tokens", 5]
    assert main(["sample", str(runs / "uneven"), *map(str, words[4:]), "--device", "cpu"]) == 0
    want = capfd.readouterr().out
    done = in_processes(4, "sample", runs / "uneven", *words)
    assert want in done.stdout
