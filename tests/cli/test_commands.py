"""``functron checkpoint`` and ``functron convert`` on real run folders."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from functron import checkpoint, tree
from functron.cli.main import main
from functron.training import run_folder
from functron.training.faults import flip_file

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
    flip_file(Path(f"{out}.bin"), 3, 0)
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


def test_what_cannot_be_converted(trained, tmp_path, capsys):
    assert main(["convert", str(trained), f"hf:{tmp_path / 'x'}"]) == 2
    assert "wanted hf:PATH, megatron:PATH or run:PATH" in capsys.readouterr().err


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
