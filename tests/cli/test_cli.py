"""The command line: runs on every kind of mesh, their run folders, and mistakes as messages."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from functron import checkpoint, tree
from functron.cli import options as parsing
from functron.cli.main import COMMANDS, main
from functron.cli.train import parse_train
from functron.core.settings import setting
from functron.data import IndexedWriter
from functron.models import gpt
from functron.models.lora import trainable
from functron.spmd import Mesh
from functron.spmd.params import abstract_params, num_params
from functron.training.config import TrainConfig, configure, load, with_model
from functron.training.run import prepare
from functron.training.setup import make_setup

GUARD, ZOO = map(pytest.mark.applications, ("guard", "zoo"))
SMALL = ["--model", "llama3-tiny", "--seq", "32"]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


def test_a_run_leaves_its_folder_and_can_be_repeated_and_sampled(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("train", *SMALL, "--steps", 12, "--save-every", 5, "--seed", 3) == 0
    out = tmp_path / "runs" / "llama3-tiny-1"
    assert "functron sample runs/llama3-tiny-1 --prompt" in capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "checkpoints",
        "loss.svg",
    }
    assert checkpoint.steps(out / "checkpoints") == [5, 10, 12]
    assert ET.parse(out / "loss.svg")
    records = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert list(records[0]) == [
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "mfu",
        "peak_memory_bytes", "samples", "batch",
    ]  # fmt: skip
    assert [record["step"] for record in records] == list(range(1, 13))
    assert records[-1]["tokens"] == 12 * 8 * 32
    # a byte of no knowledge costs ln 256 = 5.55 nats
    assert records[0]["loss"] == pytest.approx(5.55, abs=0.1)
    assert records[-1]["loss"] < 4.5
    assert all(record["mfu"] > 0 for record in records)

    assert run("train", "--config", out / "config.toml") == 0
    assert losses(tmp_path / "runs" / "llama3-tiny-2") == losses(out)

    capsys.readouterr()
    texts = []
    for seed in (0, 0, 1):
        assert run("sample", out, "--prompt", "def ", "--tokens", 8, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def ")


def test_the_checkpoint_holds_the_state(tmp_path):
    assert (
        run(
            "train",
            *SMALL,
            "--steps",
            1,
            "--learning-rate.peak",
            0,
            "--learning-rate.end",
            0,
            "--out",
            tmp_path / "r",
        )
        == 0
    )
    config = load(tmp_path / "r" / "config.toml")
    fresh = prepare(config, Mesh()).state
    stored = checkpoint.restore(tmp_path / "r" / "checkpoints" / "1", fresh)
    assert int(stored.step) == 1
    assert torch.equal(stored.key, fresh.key)
    shapes = abstract_params(gpt.defs(config.gpt))
    assert stored.params["embed"].shape == shapes["embed"].shape
    # with a learning rate of 0 the parameters are still the initial ones
    assert torch.equal(
        stored.params["blocks"]["mlp"]["up"]["w"], fresh.params["blocks"]["mlp"]["up"]["w"]
    )


@pytest.mark.distributed
def test_every_mesh_trains_to_the_same_losses(tmp_path, capsys, in_processes):
    """In float64, so that rounding is no excuse."""
    common = ["train", *SMALL, "--gpt.dtype", "float64", "--steps", 4, "--seed", 0]
    common += ["--data", argparse.__file__, "--learning-rate.name", "constant"]
    common += ["--learning-rate.peak", 3e-3]
    common += ["--gpt.num-layers", 1]
    assert run(*common, "--out", tmp_path / "dense") == 0
    assert "simulated" not in capsys.readouterr().out
    split = ["--mesh", "dp=2,tp=2", "--sequence-parallel"]
    assert run(*common, *split, "--out", tmp_path / "simulated") == 0
    assert "4 ranks simulated in this process" in capsys.readouterr().out
    done = in_processes(2, *common, "--mesh", "tp=2", "--out", tmp_path / "processes")
    assert "2 processes" in done.stdout
    dense = losses(tmp_path / "dense")
    assert len(dense) == 4
    assert dense[-1] < dense[0] - 0.5
    for name in ("simulated", "processes"):
        assert losses(tmp_path / name) == pytest.approx(dense, rel=1e-9)
    # the checkpoint of a mesh is the dense model's
    trees = [
        checkpoint.restore(tmp_path / name / "checkpoints" / "4")["params"]
        for name in ("dense", "processes")
    ]
    for path, a, b in zip(tree.paths(trees[0]), *map(tree.leaves, trees), strict=True):
        assert a.dtype == torch.float64, path
        assert (a - b).abs().max() <= 1e-8 * a.abs().max(), path


def test_other_options_do_what_they_say(tmp_path):
    common = ["train", *SMALL, "--steps", 3]
    assert run(*common, "--out", tmp_path / "plain") == 0
    assert run(*common, "--microbatches", 4, "--remat", "full", "--out", tmp_path / "saving") == 0
    assert losses(tmp_path / "saving") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    (tmp_path / "ab.txt").write_text("ab" * 1000)
    assert (
        run(
            *common,
            "--data",
            tmp_path / "ab.txt",
            "--steps",
            15,
            "--learning-rate.peak",
            1e-2,
            "--out",
            tmp_path / "ab",
        )
        == 0
    )
    assert losses(tmp_path / "ab")[-1] < 2 < losses(tmp_path / "plain")[-1]


def test_precedence(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "gpt2"\nsteps = 7\nseq = 9\n[gpt]\nnum_layers = 3\n[optimizer]\nb1 = 0.5\n'
    )
    assert parse_train([]) == TrainConfig()
    assert parse_train(["--model", "gpt2"]).gpt == gpt.PRESETS["gpt2"]
    config = parse_train(["--config", str(path), "--seq", "11", "--optimizer.b2", "0.7"])
    assert (config.model, config.steps, config.data.seq, config.gpt.num_layers) == (
        "gpt2",
        7,
        11,
        3,
    )
    assert (config.gpt.embed_dim, config.optimizer.b1, config.optimizer.b2) == (768, 0.5, 0.7)
    config = parse_train([f"--config={path}", "--model=llama3-8b", "--gpt.num-heads", "64"])
    assert (config.gpt.num_layers, config.gpt.num_heads, config.steps) == (32, 64, 7)


def test_mistakes_are_messages(tmp_path, capsys):
    for arguments, message in [
        (["train", "--mesh", "dp=3"], "global_batch: got 8; wanted a multiple of 3"),
        (["train", "--mesh", "xp=3"], "cannot read the mesh 'xp=3'"),
        (["train", "--model", "tinny"], "did you mean 'tiny'?"),
        (["train", "--data", tmp_path / "none"], "got nothing there; wanted a file or a folder"),
        (["train", "--nproc", 3, "--mesh", "dp=2"], "nproc: got 3 for a mesh of 2"),
        (["train", "--nproc", 2], "nproc: got 2 for a mesh of 1"),
        (["train", "--gpt.num-heads", 7], "num_heads=7"),
        (["train", "--config", tmp_path / "none.toml"], "wanted a readable TOML file"),
        (["sample", tmp_path / "none", "--prompt", "x"], "wanted a readable TOML file"),
        (["params", "--model", "gpt5"], "did you mean 'gpt2'?"),
        (["params", "--mesh", "tp=3"], "num_heads: got 8; wanted a multiple of tp=3"),
        (["trian"], "did you mean 'train'?"),
    ]:
        assert run(*arguments) == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert "Traceback" not in shown


HUB = "HuggingFaceTB/SmolLM2-135M"


def test_a_name_on_the_hub_is_told_that_nothing_is_downloaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fetch = f"hf download {HUB} --local-dir FOLDER"
    for arguments, said in [
        (["train", "--model", HUB], "functron convert hf:FOLDER run:RUN"),
        (["train", "--tokenizer", HUB, "--steps", 1], fetch),
        (["train", "--data", HUB, "--steps", 1], f"hf download {HUB} --repo-type dataset"),
        (["sample", HUB, "--prompt", "x"], fetch),
        (["evaluate", HUB], fetch),
        (["convert", f"hf:{HUB}", "run:new"], fetch),
    ]:
        assert run(*arguments) == 2
        shown = capsys.readouterr().err
        assert "functron downloads nothing" in shown, arguments
        assert said in shown, arguments
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.toml", "steps: 10\ngpt:\n  num_layers: 2\n", "this is YAML"),
        ("run.conf", "model: gpt2\n", "this is YAML"),
        ("run.json", '{"steps": 10}', "this is JSON: write it as TOML"),
        ("config.json", '{"model_type": "llama"}', "functron convert hf:"),
        ("run.toml", "steps = = 3\n", "wanted a readable TOML file"),
    ],
)
def test_a_config_of_another_format_is_named(name, text, said, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert run("train", "--config", tmp_path / name) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert ("; fix: " in shown) == (text != "steps = = 3\n")


@pytest.mark.parametrize(
    ("command", "given", "meant"),
    [
        ("train", "--globl-batch", "--global-batch"),
        ("train", "--global_batchs", "--global-batch"),
        ("train", "--lr", "--learning-rate.peak"),
        ("train", "--batch-size", "--global-batch"),
        ("train", "--seq-length", "--seq"),
        ("train", "--epochs", "--steps"),
        ("train", "--n-layer", "--gpt.num-layers"),
        ("train", "--embed-dim", "--gpt.embed-dim"),
        ("train", "--max-grad-norm", "--optimizer.clip-norm"),
        ("train", "--tensor-model-parallel-size", "--mesh tp=N"),
        ("evaluate", "--batch-size", "--batch"),
        ("params", "--fsdp", "--mesh fsdp=N"),
        ("convert", "--dtyp", "--dtype"),
        ("doctor", "--jsn", "--json"),
    ],
)
def test_unknown_options_suggest_what_was_meant(command, given, meant, capsys):
    folders = {"evaluate": ["run"], "convert": ["hf:a", "run:b"]}.get(command, [])
    assert run(command, *folders, given, 4) == 2
    shown = capsys.readouterr().err
    assert f"{given}: got an unknown option" in shown
    assert f"did you mean {meant}?" in shown


@pytest.mark.parametrize("command", ["train", "params", "plan", "trace"])
def test_options_of_a_section_that_is_not_there_name_it(command, capsys):
    assert run(command, "--gpt.moe.top-k", 2, "--gpt.rope-scaling.factor=2.0") == 2
    shown = capsys.readouterr().err
    for section in ("gpt.moe", "gpt.rope_scaling"):
        assert f"choose a model that has {section}, or write its table [{section}]" in shown
    assert "did you mean" not in shown


def test_what_options_are_called_elsewhere_leads_to_options():
    """Every alias, and every name that is suggested, is an option of some command."""
    every = {
        name: {option.name for option in parsing.options_of(kind) if not option.positional}
        for name, (command, _) in COMMANDS.items()
        for kind in vars(importlib.import_module(f"functron.cli.{command.split('.')[0]}")).values()
        if isinstance(kind, type) and kind.__name__.lower() == f"{name}options"
    }
    assert every.keys() == COMMANDS.keys()
    known = {option for options in every.values() for option in options}
    assert not {option.split()[0] for option in parsing._ALIASES} - known
    assert {"learning-rate.peak", "gpt.num-layers", "config", "max-seq", "json"} <= known
    assert "run" not in every["sample"]  # which stands without its name


@pytest.mark.parametrize("command", COMMANDS)
def test_usages_name_what_they_want(command, capsys):
    assert run(command, "--help") == 0
    shown = capsys.readouterr().out
    usage = shown[: shown.index("\n\n")]
    assert "[[" not in shown
    assert "{None}" not in shown
    places = re.sub(r"\[[^\]]*\]", "", usage).split()  # without what is optional
    assert not {"STR", "INT", "FLOAT", "BOOL"} & {*places}


def test_params_of_a_model_that_fits_no_machine(capsys):
    assert run("params", "--model", "llama3-405b", "--mesh", "dp=2,tp=8") == 0
    lines = capsys.readouterr().out.splitlines()
    # Llama 3's paper: 405B; layers 126, model dim 16384, FFN 53248, 8 of 128 heads for keys
    exact = (
        126 * (2 * 16384 * 128 * (128 + 8) + 3 * 16384 * 53248 + 2 * 16384)
        + 16384
        + 2 * 128256 * 16384
    )
    assert f"{exact:,} parameters, {4 * exact:,} bytes" in lines[-1]
    up = next(line for line in lines if line.startswith("blocks/mlp/up/w"))
    for cell in (
        "(126, 16384, 53248)",
        "layers embed mlp",
        "P(None, None, 'tp')",
        "(126, 16384, 6656)",
    ):
        assert cell in up


def test_a_command_without_any_option_is_about_the_usual_model(capsys):
    """4 layers of 4 projections of attention, 3 of feed-forward and 2 norms, and the ends."""
    assert main(["params"]) == 0
    layer = 4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256
    total = 4 * layer + 256 + 2 * 384 * 256
    assert f"{total:,} parameters" in capsys.readouterr().out


def test_usage(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: functron COMMAND") == 2


def test_trace_shows_what_a_rank_of_a_large_mesh_does(capsys):
    start = time.perf_counter()
    assert main(["trace", "--model", "llama3-8b", "--mesh", "dp=64,tp=8"]) == 0
    assert time.perf_counter() - start < 30
    out = capsys.readouterr().out
    assert "llama3-8b, one of 512 ranks (dp=64,tp=8), 64 samples of 8192 tokens per step" in out
    assert "cost of step, per rank" in out
    assert "memory of step, per rank: peak" in out
    # all-reduces: two for each of 32 layers, the embedding, two in the loss; in backward also
    # those of the gradients of three kinds of norm scales, and forward one of the global norm
    assert re.search(r"tp +psum +backward +70 ", out)
    assert re.search(r"tp +psum +forward +68 ", out)


def test_trace_prints_the_program(capsys):
    arguments = ["--mesh", "dp=2,tp=2", "--seq", "64", "--microbatches", "2", "--program"]
    assert main(["trace", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("program step on Mesh(dp=2, tp=2)")
    assert "4 samples of 64 tokens" in out


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A run, small and unlike every preset, on tokens on disk, with adapters."""
    folder = tmp_path_factory.mktemp("packed")
    with IndexedWriter(folder / "tokens", np.uint16) as writer:
        for size in (30, 50, 70):
            writer.add(np.arange(size) % 250)
    options = [
        "--data", str(folder / "tokens"), "--pack", "best-fit", "--seq", "32", "--global-batch", "4",
        "--gpt.num-layers", "2", "--gpt.embed-dim", "32", "--gpt.mlp-dim", "40", "--lora-rank", "3",
    ]  # fmt: skip
    assert run("train", *options, "--steps", 1, "--out", folder / "run") == 0
    return folder / "run", options


def bytes_table(memory) -> str:
    """Without where the peak is, which names the line that asked."""
    return str(memory).partition("\n\n")[2]


def test_a_run_is_shown_before_any_step(packed, tmp_path, capsys):
    """Of a run folder, of its file and of options alone: the same, in whatever way it is asked."""
    run_folder_, options = packed

    def said(*arguments: object) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    first = said("trace", run_folder_)
    assert first.startswith(
        "tiny with changes, one of 1 ranks (no mesh), 4 samples of 32 tokens per step\n"
    )
    config = load(run_folder_ / "config.toml")
    program = make_setup(config, Mesh()).program()
    assert str(program.cost()) in first
    held = program.memory()
    assert bytes_table(held) in first
    # the whole of the parameters, and two moments of the adapters alone
    defs = make_setup(config, Mesh()).whole_defs
    adapters = tree.partition(defs, trainable(defs))[0]
    assert held.at_rest["parameters"] == 4 * num_params(defs)
    assert 8 * num_params(adapters) <= held.at_rest["optimizer"] < 8 * num_params(adapters) + 32
    # the options that made it, and nothing written or begun
    out = tmp_path / "new"
    dry = said("train", *options, "--steps", 1, "--out", out, "--dry-run")
    assert dry.partition("\n\nexpected on ")[0].rstrip("\n") == first.rstrip("\n")
    assert not out.exists()
    # on another mesh, with other options
    mesh = ["--mesh", "dp=2,tp=2", "--microbatches", 2, "--seq", 16]
    there = said("trace", run_folder_, *mesh)
    assert "one of 4 ranks (dp=2,tp=2), 4 samples of 16 tokens per step" in there
    divided = configure(config, mesh="dp=2,tp=2", microbatches=2, seq=16)
    assert bytes_table(make_setup(divided, Mesh(dp=2, tp=2)).program().memory()) in there
    stages = said("trace", run_folder_, "--mesh", "pp=2", "--microbatches", 2)
    assert "1f1b: 2 microbatches, bubble" in stages
    table = said("params", run_folder_, "--mesh", "tp=2")
    assert table == said("params", run_folder_ / "config.toml", "--mesh", "tp=2")
    assert f"{num_params(defs):,} parameters" in table
    assert "blocks/attention/q/lora" in table.replace("lora_", "lora")
    assert not out.exists()


def test_which_run_is_meant_is_told(packed, tmp_path, capsys):
    run_folder_, options = packed
    for arguments, message in [
        (["trace", run_folder_.parent], f"without a run; wanted a run folder.*name {run_folder_}, which"),
        (["params", tmp_path / "no.toml"], "no.toml: got No such file or directory; wanted a readable"),
        (["trace", "--mesh", "dp=2", run_folder_], "wanted the first argument; fix: functron trace /"),
        (["train", *options, "--mesh", "dp=3", "--dry-run"], "global_batch: got 4; wanted a multiple"),
    ]:  # fmt: skip
        assert main([*map(str, arguments)]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_trace_teaches(capsys):
    assert main(["trace", "--model", "llama3-8b", "--mesh", "tp=3"]) == 2
    assert "a multiple of tp=3" in capsys.readouterr().err
    assert main(["trace", "--mesh", "dp=2", "--global-batch", "3"]) == 2
    assert "argument 1/" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    declared = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"functron {declared['project']['version']}\n"


BOXES = (
    "data", "model", "parallelism", "precision", "optimizer", "checkpoint", "evaluation",
    "resilience", "logging",
)  # fmt: skip


@pytest.mark.parametrize(
    "model",
    ["tiny", *(pytest.param(name, marks=ZOO) for name in ("mamba2-130m", "bert-base", "t5-small"))],
)
def test_every_option_of_training_is_in_one_box_of_the_help(model):
    options = list(parsing.options_of(with_model(TrainConfig(), model)))
    assert {option.box for option in options} == {*BOXES}


@GUARD  # whose options are those of resilience that are shown
def test_help_is_short_unless_all_of_it_is_asked_for(capsys):
    def shown(*arguments: str) -> tuple[str, set[str]]:
        assert run("train", *arguments) == 0
        text = capsys.readouterr().out
        return text, {*re.findall(r"^│ --([a-z0-9.-]+)", text, re.MULTILINE)}

    brief, few = shown("--help")
    whole, every = shown("--help-all", "--model", "tiny")
    names = {option.name for option in parsing.options_of(TrainConfig())}
    assert every == names - {"source"} | {"help-all", "config", "dry-run", "hardware"}
    assert few < every
    assert 25 <= len(few) <= 35
    titles = re.findall(r"^╭─ (.*?) ─", whole, re.MULTILINE)
    assert titles == ["options", *BOXES]
    assert titles == re.findall(r"^╭─ (.*?) ─", brief, re.MULTILINE)
    assert {len(line) for line in whole.splitlines() if line.startswith(("╭", "│", "╰"))} == {80}
    # the whole description of one, and the beginning of it
    text = " ".join(re.sub("[│]", " ", whole).split())
    assert "a prefix of .bin and .idx, or shards; mock: random tokens, without any file" in text
    assert "a prefix of .bin and .idx" not in brief
    assert "how data is read (default: auto)" in brief


@ZOO
def test_help_has_the_options_of_a_model(capsys):
    assert run("train", "--help-all", "--model", "mamba2-130m") == 0
    assert "--mamba.pattern" in capsys.readouterr().out


@GUARD
def test_there_are_as_many_options_as_before_there_were_sections_and_three():
    assert len({option.name for option in parsing.options_of(TrainConfig())}) == 235


def test_options_have_the_names_of_their_settings_and_their_paths(tmp_path):
    """A short one is the same option as the path of its setting, on and off, with = and without."""
    known = {option.name for option in parsing.options_of(TrainConfig())}
    assert {"save-every", "eval-every", "lora-rank", "data", "mesh", "optimizer.b1"} <= known
    short = [
        *("--save-every", "3", "--eval-every=4", "--data", "x", "--precision", "bf16"),
        *("--compile", "--no-zigzag", "--device", "cpu", "--lora-rank", "2", "--steps", "5"),
    ]
    paths = [
        *("--checkpoint.save-every", "3", "--evaluation.every=4", "--data.path", "x"),
        *("--precision.name", "bf16", "--compute.compile", "--parallelism.no-zigzag"),
        *("--compute.device", "cpu", "--lora.rank", "2", "--steps", "5"),
    ]
    made = parse_train(short)
    assert made == parse_train(paths) == parse_train([x.replace("-every", "_every") for x in paths])
    assert (made.checkpoint.save_every, made.evaluation.every, made.data.path) == (3, 4, "x")
    assert (made.compute.compile, made.parallelism.zigzag, made.lora.rank) == (True, False, 2)
    for off in (["--no-compile"], ["--compile", "False"], ["--compile=False", "--steps", "5"]):
        assert parse_train(off).compute.compile is False
    assert parse_train(["--compile", "auto"]).compute.compile == "auto"
    assert made.gpt.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checkpoint.save-evry", "3"], r"--checkpoint.save-evry: got an unknown option.*--save-every"),
        (["--checkpoint.save-every", "x"], r"--save-every"),
        (["--checkpoint.save-every", "-2"], r"save_every: got -2; wanted at least 0"),
        (["--checkpoint.keep-every", "2"], r"keep_every: got 2, which has no effect.*--keep-every out"),
    ],
)  # fmt: skip
def test_mistakes_name_options_as_written_or_by_their_short_names(words, said, capsys):
    assert run("train", "--dry-run", *words) == 2
    assert re.search(said, capsys.readouterr().err)


@dataclass(frozen=True)
class Profile:
    """A section that no module of functron knows.

    Attributes:
        every: measure after every so many steps; 0: never.
        names: of the figures; empty: all.
    """

    every: int = setting(0, "common", least=0)
    names: str = setting("", short="profile_names")


def test_a_section_of_a_program_is_one_of_ours(tmp_path, capsys):
    def program(*arguments: object) -> int:
        return main([str(argument) for argument in arguments], sections={"profile": Profile})

    small = ["--model", "gpt2-tiny", "--seq", 8, "--global-batch", 1, "--device", "cpu"]
    brief, whole = (
        program("train", word) or capsys.readouterr().out for word in ("--help", "--help-all")
    )
    assert "╭─ profile ─" in brief
    assert "--profile.every INT" in brief
    assert "--profile-names STR" in whole
    assert "measure after every so many steps; 0: never" in " ".join(
        whole.replace("│", " ").split()
    )
    assert "profile" not in (run("train", "--help-all") or capsys.readouterr().out)
    assert program("train", *small, "--profile.every", -1) == 2
    assert "profile.every: got -1; wanted at least 0" in capsys.readouterr().err
    assert program("train", *small, "--profile.evry", 1) == 2
    assert "did you mean --profile.every" in capsys.readouterr().err
    assert run("train", *small, "--profile.every", 1) == 2

    out = tmp_path / "run"
    given = ("--profile.every", 2, "--profile.names", "loss")
    assert program("train", *small, "--steps", 1, "--out", out, *given) == 0
    assert tomllib.loads((out / "config.toml").read_text())["profile"] == {
        "every": 2,
        "names": "loss",
    }
    # it goes on as it began, and its model is one that others read
    assert program("train", "--out", out, "--resume", "--steps", 2, "--device", "cpu") == 0
    assert tomllib.loads((out / "config.toml").read_text())["profile"]["every"] == 2
    assert run("sample", out, "--prompt", "x", "--tokens", 1, "--device", "cpu") == 0
    assert run("train", "--out", out, "--resume", "--steps", 3) == 2
    assert "profile: got an unknown key" in capsys.readouterr().err
