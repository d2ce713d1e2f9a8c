"""Refusals to load or export: every offender named, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import gpt, hub, tree
from functron.hub import files
from functron.hub.files import open_folder
from functron.training.convert import convert

LLAMA = gpt.GPTConfig(
    vocab_size=13, num_layers=3, embed_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=12, max_seq=8,
    vocab_multiple=8,
)  # fmt: skip


def weights(config=LLAMA) -> dict:
    return ft.init_params(ft.random.key(0), gpt.defs(config))


@pytest.fixture
def model(tmp_path) -> Path:
    hub.save(tmp_path / "model", LLAMA, weights())
    return tmp_path / "model"


def named(folder: Path) -> dict:
    found = open_folder(folder)
    return {
        name: found.read(name, tuple(slice(0, n) for n in shape))
        for name, (shape, _) in found.shapes().items()
    }


def rewrite(folder: Path, tensors: dict, **entries) -> None:
    """Store other tensors, and other entries of config.json, in the folder."""
    listed = [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    files.write_files(folder, files.plan(listed, 10**9), tensors.items())
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, **options) -> str:
    with pytest.raises(ValueError, match="wanted") as caught:
        hub.load(folder, **options)
    return str(caught.value)


def test_every_tensor_that_does_not_fit_is_listed(model):
    tensors = named(model)
    layer = "model.layers.{}."
    for i in range(3):
        del tensors[layer.format(i) + "mlp.up_proj.weight"]
        tensors[layer.format(i) + "mlp.upp_proj.weight"] = torch.zeros(12, 8)
    del tensors[layer.format(1) + "input_layernorm.weight"]
    tensors[layer.format(3) + "input_layernorm.weight"] = torch.ones(8)
    tensors[layer.format(2) + "self_attn.q_proj.weight"] = torch.zeros(8, 9)
    tensors[layer.format(0) + "mlp.down_proj.weight"] = torch.zeros(8, 12, dtype=torch.int8)
    tensors["visual.weight"] = torch.zeros(2)
    rewrite(model, tensors)
    text = refusal(model)
    for line in (
        "model.layers.0.mlp.up_proj.weight: got no such tensor, nor 2 more of that name; wanted one of shape [12, 8]",
        "model.layers.1.input_layernorm.weight: got no such tensor; wanted one of shape [8]",
        "model.layers.0.mlp.upp_proj.weight: got a tensor, and 2 like it; wanted none of this name: nothing would use it; fix: did you mean 'model.layers.0.mlp.up_proj.weight'?",
        "model.layers.3.input_layernorm.weight: got a tensor; wanted none",
        "visual.weight: got a tensor; wanted none of this name: nothing would use it; fix: does config.json belong",
        "model.layers.2.self_attn.q_proj.weight: got [8, 9]; wanted [8, 8]",
        "model.layers.0.mlp.down_proj.weight: got torch.int8; wanted a floating dtype",
    ):
        assert f"\n  - {line}" in text, line
    assert text.count("\n  - ") == 7


def test_tied_weights_may_be_stored_twice(model):
    tied = replace(LLAMA, tied=True)
    tensors = named(model)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(model, tensors, tie_word_embeddings=True)
    assert tree.paths(hub.load(model, tied)) == tree.paths(gpt.defs(tied))
    tensors["lm_head.weight"][12, 7] += 1
    rewrite(model, tensors)
    text = refusal(model)
    assert "lm_head.weight: got other numbers than the embedding; wanted the same" in text
    del tensors["lm_head.weight"]
    rewrite(model, tensors, tie_word_embeddings=False)
    assert "lm_head.weight: got no such tensor; wanted one of shape [13, 8]" in refusal(model)


def test_base_models_lack_the_prefix(model):
    tied = replace(LLAMA, tied=True)
    tensors = {
        name.removeprefix("model."): value
        for name, value in named(model).items()
        if name != "lm_head.weight"
    }
    rewrite(model, tensors, tie_word_embeddings=True)
    params = hub.load(model, tied)
    assert torch.equal(params["embed"][:13], weights()["embed"][:13])
    assert torch.equal(params["blocks"]["mlp"]["up"]["w"], weights()["blocks"]["mlp"]["up"]["w"])


def test_buffers_are_passed_over(tmp_path):
    config = replace(
        LLAMA, num_kv_heads=0, norm="layer", activation="gelu_tanh", gated=False, bias=True,
        positions="learned", tied=True,
    )  # fmt: skip
    hub.save(tmp_path / "model", config, weights(config))
    tensors = named(tmp_path / "model")
    for i in range(3):
        tensors[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        tensors[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    rewrite(tmp_path / "model", tensors)
    hub.load(tmp_path / "model", config)
    # the first GPT-2s were stored without a prefix
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    rewrite(tmp_path / "model", bare)
    params = hub.load(tmp_path / "model", config)
    assert torch.equal(params["positions"], weights(config)["positions"])


def test_a_config_of_another_model(model):
    changed = replace(LLAMA, rope_theta=500000.0, norm_eps=1e-6, max_seq=16)
    with pytest.raises(ValueError, match="the config is not that of") as caught:
        hub.load(model, changed)
    for name in ("rope_theta: got 500000.0; wanted 10000.0, as stored", "norm_eps", "max_seq"):
        assert f"\n  - {name}" in str(caught.value)
    assert str(caught.value).count("\n  - ") == 3
    hub.load(model, replace(LLAMA, max_seq=4, dropout=0.1, dtype="bfloat16"))


def test_pointers_of_git_lfs_are_named(model):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n"
    (model / "model.safetensors").write_text(pointer)
    wanted = r"model.safetensors: got a pointer of git-lfs, .*; fix: fetch it: git lfs pull"
    with pytest.raises(ValueError, match=wanted):
        hub.load(model)
    (model / "config.json").write_text(pointer)
    with pytest.raises(ValueError, match=r"config.json: got a pointer of git-lfs"):
        hub.load(model)


def test_weights_that_are_no_numbers(model):
    tensors = named(model)
    names = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight")
    for name in names:
        tensors[name][3, 5] = float("nan")
    rewrite(model, tensors)
    text = refusal(model)
    for name in names:
        assert f"\n  - {name}: got NaN; wanted numbers; fix: copy" in text
    assert text.count("\n  - ") == 2


# Exports


def test_parameters_that_are_not_those_of_the_config(tmp_path):
    params = weights()
    params["embed"] = params["embed"][:13]
    params["norm"]["scale"] = torch.ones(9)
    with pytest.raises(ValueError, match="not the parameters of the config") as caught:
        hub.save(tmp_path / "out", LLAMA, params)
    assert "embed: got [13, 8]; wanted [16, 8]" in str(caught.value)
    assert "norm/scale: got [9]; wanted [8]" in str(caught.value)
    del params["unembed"]
    with pytest.raises(ValueError, match="unembed"):
        hub.save(tmp_path / "out", LLAMA, params)
    assert not list(tmp_path.iterdir())


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"dtype: got 'bf16'.*did you mean 'bfloat16'"):
        hub.save(tmp_path / "out", LLAMA, weights(), dtype="bf16")
    with pytest.raises(ValueError, match="max_shard_bytes: got 0"):
        hub.save(tmp_path / "out", LLAMA, weights(), max_shard_bytes=0)
    with pytest.raises(ValueError, match=r"model_type: got 'lama'.*did you mean 'llama'"):
        hub.save(tmp_path / "out", LLAMA, weights(), model_type="lama")
    with pytest.raises(ValueError, match="this model cannot be stored as gpt2"):
        hub.save(tmp_path / "out", LLAMA, weights(), model_type="gpt2")
    with pytest.raises(ValueError, match=r"config.json: got No such file"):
        hub.save(tmp_path / "out", LLAMA, weights(), like=tmp_path)
    assert not list(tmp_path.iterdir())


def test_existing_paths_are_left_alone(model):
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    for target in (model, model / "config.json"):
        with pytest.raises(ValueError, match="got an existing path; wanted a new one"):
            hub.save(target, LLAMA, weights())
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    assert os.listdir(model.parent) == ["model"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    usual, written = files.write_tensor, []

    def full(stream, name, *how):
        if len(written) == 7:
            raise OSError(errno.ENOSPC, "No space left on device", stream.name)
        written.append(name)
        usual(stream, name, *how)

    monkeypatch.setattr(files, "write_tensor", full)
    with pytest.raises(
        ValueError, match=r"got No space left on device.*choose a folder with free space"
    ):
        hub.save(tmp_path / "out", LLAMA, weights())
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_tensor", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.save(tmp_path / "out", LLAMA, weights())
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="got Permission denied"):
        hub.save(tmp_path / "out", LLAMA, weights())


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="got Not a directory"):
        hub.save(tmp_path / "file" / "out", LLAMA, weights())


def test_companions_go_with_the_weights(model, tmp_path):
    for name in ("tokenizer.json", "generation_config.json", "merges.txt", "notes.md", "code.py"):
        (model / name).write_text(name)
    config = hub.read_config(model)
    hub.save(tmp_path / "out", config, hub.load(model, config), like=model)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges.txt"


def test_an_adapter_is_not_passed_over(model, tmp_path):
    """Of a base with an adapter of PEFT beside it the base alone was read."""
    about = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"}
    (model / "adapter_config.json").write_text(json.dumps(about))
    calls = (
        lambda: hub.load(model),
        lambda: hub.load_model(model),
        lambda: hub.read_config(model),
    )
    wanted = r"adapter_config.json: got an adapter \(PEFT\); wanted a merged model.*reads both"
    for call in calls:
        with pytest.raises(ValueError, match=wanted):
            call()
    with pytest.raises(ValueError, match="r: got None; wanted a rank"):  # it reads both
        convert(f"hf:{model}", f"run:{tmp_path / 'run'}")
    (model / "config.json").unlink()
    wanted = r"got an adapter \(PEFT\) of meta-llama/Llama-3.1-8B; wanted a folder with config.json"
    with pytest.raises(ValueError, match=wanted):
        hub.read_config(model)
    assert not (tmp_path / "run").exists()
