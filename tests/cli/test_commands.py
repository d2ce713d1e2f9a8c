"""``functron checkpoint`` and ``functron convert`` on real run folders; options of all commands."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from functron import checkpoint, tree
from functron.cli import launch, plan
from functron.cli import main as commands
from functron.cli import options as parsing
from functron.cli.main import main
from functron.cli.process import Process
from functron.core.settings import names_with_tag, settings_of
from functron.training import run_folder
from functron.training.config import TrainConfig
from tests.damage import flip_bit

GUARD, PLANNER, ZOO = map(pytest.mark.applications, ("guard", "planner", "zoo"))
SMALL = [
    "--data", argparse.__file__, "--seq", "16", "--global-batch", "4", "--gpt.num-layers", "2",
    "--gpt.embed-dim", "32", "--gpt.num-heads", "4", "--gpt.num-kv-heads", "2",
    "--gpt.mlp-dim", "48",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *SMALL, "--steps", "2", "--save-every", "1", "--out", str(run)]) == 0
    return run


def test_lists_shows_and_verifies(trained, capsys):
    assert main(["checkpoint", "ls", str(trained)]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["step", "1", "2"]
    assert main(["checkpoint", "show", str(trained)]) == 0
    shown = capsys.readouterr().out
    assert "params/blocks/mlp/down/w" in shown
    assert '"samples": 8' in shown
    assert '"num_layers": 2' in shown
    for path in (trained, trained / "checkpoints", trained / "checkpoints" / "1"):
        assert main(["checkpoint", "verify", str(path)]) == 0
        assert "all files and checksums are right" in capsys.readouterr().out


def test_a_damaged_file_is_named(trained, capsys):
    file = next((trained / "checkpoints" / "1").glob("**/d/*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    try:
        assert main(["checkpoint", "verify", str(trained / "checkpoints" / "1")]) == 2
        assert file.name in capsys.readouterr().err
    finally:
        file.write_bytes(whole)


def test_tokens_are_verified_too(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "tokens"
    text.write_text("a fox and a dog")
    assert main(["preprocess", str(text), "--tokenizer", "bytes", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "verify", f"{out}.bin"]) == 0
    assert capsys.readouterr().out == f"{out}.bin: no damage found\n"
    flip_bit(Path(f"{out}.bin"), 3, 0)
    assert main(["checkpoint", "verify", str(out)]) == 2
    assert f"{out}.bin, offsets 0 to 31: got other bytes" in capsys.readouterr().err
    Path(f"{out}.json").unlink()
    assert main(["checkpoint", "verify", str(out)]) == 0
    assert "not checked" in capsys.readouterr().out


def test_a_run_becomes_a_hugging_face_model_and_a_run_that_trains(trained, tmp_path, capsys):
    out, back = tmp_path / "exported", tmp_path / "back"
    assert main(["convert", f"run:{trained}", f"hf:{out}"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    tensors = load_file(out / "model.safetensors")
    params = checkpoint.restore(run_folder.newest(trained))["params"]
    assert torch.equal(tensors["model.norm.weight"], params["norm"]["scale"])
    assert torch.equal(tensors["lm_head.weight"], params["unembed"].mT[:256])

    assert main(["convert", f"hf:{out}", f"run:{back}"]) == 0
    again = checkpoint.restore(run_folder.newest(back))["params"]
    for model in (params, again):  # padding of the vocabulary is not exported
        model["embed"], model["unembed"] = model["embed"][:256], model["unembed"][:, :256]
    for path, a, b in zip(tree.paths(params), *map(tree.leaves, (params, again)), strict=True):
        assert torch.equal(a, b), path
    # another batch than the folder says: nothing was trained on yet
    assert main(["train", "--out", str(back), "--resume", *SMALL[:6], "--steps", "1"]) == 0
    (record,) = run_folder.records(back)
    last = run_folder.records(trained)[-1]
    assert record["loss"] < last["loss"] + 0.2


@pytest.mark.applications("megatron")
def test_what_cannot_be_converted(trained, tmp_path, capsys):
    assert main(["convert", str(trained), f"hf:{tmp_path / 'x'}"]) == 2
    assert (
        "wanted hf:PATH, megatron:PATH, hf-module:PATH, hf-classifier:PATH, hf-embedder:PATH or"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("words", [["--source", "hf:/x"], ["--source=hf:/x"], ["--source.x", "1"]])
def test_where_a_model_came_from_is_no_option(words, capsys):
    assert main(["train", "--steps", "1", *words]) == 2
    text = capsys.readouterr().err
    assert f"{words[0].partition('=')[0]}: got what a run records" in text
    assert "functron convert hf:PATH run:RUN" in text
    assert main(["train", "--help-all"]) == 0
    assert "--source" not in capsys.readouterr().out
    assert main(["train", "--model", "hf:/x"]) == 2
    assert "functron convert hf:/x run:RUN" in capsys.readouterr().err


# --- options that have no effect

WORDS = {
    "preprocess": ["x", "--tokenizer", "bytes", "--out", "y"], "sample": ["r", "--prompt", "x"],
    "evaluate": ["r"], "compare": ["r"], "rerun": ["r", "--step", "1"],
    "checkpoint": ["ls", "r"], "convert": ["hf:x", "run:y"], "migrate": ["x"],
    "upcycle": ["r", "s"], "schedule": ["1f1b"], "recipe": ["ls"],
}  # fmt: skip
"""The arguments without which a command is refused."""


class AskedError(Exception):
    """Ends a command where it asks for its options."""


def asked_of(command, monkeypatch):
    """The fields of a command's options, and the table of what they need."""
    module = importlib.import_module(
        f"functron.cli.{commands.COMMANDS[command][0].partition('.')[0]}"
    )
    asked = []

    def asks(kind, arguments, name, default=None, **given):
        asked.append((kind if default is None else default, given.get("needs", {})))
        raise AskedError

    monkeypatch.setattr(module, "parse", asks)
    with pytest.raises(AskedError):
        getattr(module, commands.COMMANDS[command][0].partition(".")[2])(WORDS.get(command, []))
    ((kind, needs),) = asked
    return {option.field for option in parsing.options_of(kind)}, needs


def under(path, names):
    return any(path == name or path.startswith(f"{name}.") for name in names)


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_conditions_of_options_are_of_options_that_exist(command, monkeypatch):
    fields, needs = asked_of(command, monkeypatch)
    if command not in ("params", "trace"):  # whose settings may be of another model
        unknown = [n for n in needs if not any(under(path, [n]) for path in fields)]
        assert all(name.startswith(("gpt.moe", "gpt.rope_scaling")) for name in unknown)


OF_SHAPES = {
    "model", "gpt", "mamba", "bert", "t5", "module", "mesh", "expert_axes", "uneven", "zero", "lora_rank",
    "lora_targets", "lora_base", "lora_dora", "classifier", "embedder", "precision", "products",
}  # fmt: skip
OF_STEPS = {
    *OF_SHAPES, "sequence_parallel", "context", "zigzag", "steps", "seq", "global_batch",
    "microbatches", "schedule", "chunks", "layout", "vocab_over_pp", "gather", "gather_as",
    "lora_alpha", "remat", "kernels", "loss_chunk_tokens", "anomalies.on_spike",
    "anomalies.rate_factors", "optimizer", "learning_rate", "rate_unit", "ramp_up",
    "earlier_batches", "nproc", "mask_documents", "pack", "mask_rate", "mean_span",
    "metrics", "expert_room",
}  # fmt: skip


@pytest.mark.applications("guard", "zoo")
def test_which_settings_are_of_steps():
    """Those of which functron trace and params show something, and no others."""
    for tag, wanted in (("shapes", OF_SHAPES), ("step", OF_STEPS)):
        names = [each.name for each in settings_of(TrainConfig)]
        assert {*names_with_tag(TrainConfig, tag)} == {
            name for name in names if under(name, wanted)
        }
        assert all(any(under(name, [one]) for name in names) for one in wanted)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("sample r --prompt x --temperature 0 --top-k 5", "top_k"),
        ("sample r --prompt x --temperature 0.0 --top_p=0.9", "top_p"),
        ("sample r --prompt x --temperature 0 --seed 7", "seed"),
        ("sample r --prompt x --tokens 0 --temperature 0.8", "temperature"),
        ("doctor --device cpu", "device"),
        ("doctor --out hardware.json", "out"),
        ("doctor --nproc 1 --largest-bytes 4096", "largest_bytes"),
        pytest.param("plan --optimizer.mu-dtype int8", "optimizer.mu_dtype", marks=PLANNER),
        pytest.param("plan --optimizer.offload", "optimizer.offload", marks=PLANNER),
        pytest.param("plan --gpt.dtype float32", "gpt.dtype", marks=PLANNER),
        pytest.param("plan --optimizer.momentum 0.9", "optimizer.momentum", marks=PLANNER),
        pytest.param(
            "plan --precision bf16 --precisions bf16,fp8-block", "precision", marks=PLANNER
        ),
        pytest.param("plan --precisions bf16 --fix precision=bf16", "precisions", marks=PLANNER),
        pytest.param(
            "plan --model gpt2-tiny --gpt.rope-theta 10000.0", "gpt.rope_theta", marks=PLANNER
        ),
        ("trace --data x", "data"),
        ("trace --save-every 3", "save_every"),
        ("trace --optimizer.fp32-masters", "optimizer.fp32_masters"),
        ("trace --zero 1", "zero"),
        ("trace --chunks 2", "chunks"),
        ("trace --no-zigzag", "zigzag"),
        pytest.param("trace --anomalies.window 5", "anomalies.window", marks=GUARD),
        pytest.param("trace --anomalies.on-spike stop", "anomalies.on_spike", marks=GUARD),
        pytest.param(
            "trace --model bert-tiny --loss-chunk-tokens 64", "loss_chunk_tokens", marks=ZOO
        ),
        pytest.param("trace --model bert-tiny --gpt.num-layers 7", "gpt.num_layers", marks=ZOO),
        pytest.param("params --model t5-tiny --gpt.norm rms", "gpt.norm", marks=ZOO),
        ("params --seq 64", "seq"),
        ("params --zero 1 --mesh dp=2", "zero"),
        ("params --products fp8-row", "products"),
    ],
)
def test_options_of_commands_have_an_effect_or_are_refused(line, path, capsys):
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert f"{path}: got " in said
    assert "which has no effect; wanted " in said
    assert f"fix: leave --{path.replace('_', '-')} out, or " in said


def test_a_name_is_asked_for_where_texts_have_one(tmp_path, capsys):
    text, lines = tmp_path / "text.txt", tmp_path / "lines.jsonl"
    text.write_text("a fox")
    lines.write_text('{"text": "a dog"}\n')
    made = ["--tokenizer", "bytes", "--key", "text", "--workers", "1"]
    made += ["--out", str(tmp_path / "tokens")]
    assert main(["preprocess", str(text), *made]) == 2
    assert (
        "key: got 'text', which has no effect; wanted JSONL or Parquet" in capsys.readouterr().err
    )
    assert main(["preprocess", str(text), str(lines), *made]) == 0


@pytest.mark.parametrize(
    "line",
    [
        "params --model llama3-tiny --mesh fsdp=2 --precision bf16",
        "params --zero 3 --mesh dp=2 --gpt.num-layers 4 --gpt.dropout 0.1",
        "trace --schedule 1f1b --context ring --gather use --chunks 0 --zero 0 --seq 32",
        pytest.param("trace --model t5-tiny --seq 32 --mask-rate 0.2", marks=ZOO),
        "trace --seq 32 --pack best-fit --learning-rate.peak 1e-3 --steps 5",
        "schedule 1f1b --pp 4 --microbatches 8",
        pytest.param("recipe show llama3-8b-8 --sbatch", marks=[GUARD, PLANNER]),
    ],
)
def test_options_that_have_an_effect_or_say_that_there_is_nothing_are_taken(line, monkeypatch):
    monkeypatch.setattr(plan, "step_report", lambda *args, **kwargs: "")  # which takes its time
    assert main(line.split()) == 0


def test_a_draw_is_asked_for_as_before(trained, capsys):
    said = []
    for words in (
        ["--temperature", "0"],
        ["--temperature", "0", "--top-k", "0", "--top-p", "1.0", "--seed", "0", "--no-chat"],
        ["--temperature", "1", "--top-k", "9", "--top-p", "0.9", "--seed", "3"],
    ):
        assert main(["sample", str(trained), "--prompt", "def ", "--tokens", "4", *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_processes_are_not_started_where_torchrun_has(trained):
    here = Process(0, 0, 1, "", False, "127.0.0.1")
    options = launch.RunOptions(run=trained, nproc=1)
    mesh = launch.Mesh()
    (problem,) = options.problems(mesh, here)
    assert str(problem).startswith("nproc: got 1, which has no effect; wanted processes that")
    assert not [*options.problems(mesh, dataclasses.replace(here, launched_here=True))]
    assert not [*options.problems(mesh, None)]


def test_what_a_run_has_may_be_set_back(trained, tmp_path, monkeypatch):
    """Options from the file of a run, and those that undo them, are taken; new ones are checked."""
    monkeypatch.setattr(plan, "step_report", lambda *args, **kwargs: "")
    text = (trained / "config.toml").read_text()
    file = tmp_path / "config.toml"
    assert "zigzag = true" in text
    file.write_text(text.replace("zigzag = true", "zigzag = false"))
    assert main(["params", str(file)]) == 0
    assert main(["trace", str(file), "--zigzag"]) == 0
    assert main(["trace", str(trained), "--no-zigzag"]) == 2
