"""Gradients of modules that are compared before the first step: cut, wrong, and unchecked."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from torch import nn

from functron import Mesh
from functron.apps.zoo import module_check, module_layers
from functron.partitioning import rules
from functron.training.config import configure
from functron.training.run import prepare
from functron.training.train import train
from tests.apps.zoo.tiny_modules import write_folder
from tests.partitioning.test_comparison import forget_sum

pytest.importorskip("transformers")
USUAL: dict[str, Any] = {
    "seq": 16,
    "global_batch": 4,
    "format": "mock",
    "steps": 1,
    "mesh": "dp=2,tp=2",
}


def open_run(origin: str, **settings):
    config = configure(model=origin, **{**USUAL, **settings})
    return prepare(config, Mesh.parse(config.parallelism.mesh))


RULES = "(q|k|v|gate|up)_proj = tp; (o|down)_proj = -,tp; embed_tokens|lm_head = tp"
FUSED = "c_fc.weight = -,tp; c_fc.bias = tp; mlp.c_proj.weight = tp"
EXPERTS = "(q|k|v)_proj = tp; o_proj = -,tp; experts.gate_up_proj = tp"


@pytest.mark.parametrize(
    ("kind", "changes", "split"),
    [
        ("llama", {"hidden_size": 192, "intermediate_size": 1024, "num_hidden_layers": 3}, RULES),
        ("gpt2", {"n_embd": 192, "n_inner": 1024}, FUSED),  # its output is tied
        ("mixtral", {"intermediate_size": 4096}, EXPERTS),
    ],
)
def test_gradients_of_a_copy_that_is_cut_are_the_module_s(tmp_path, kind, changes, split):
    """A run begins with the line, and has the weights of the whole."""
    run = open_run(write_folder(kind, tmp_path, **changes), module__rules=split)
    model: Any = run.config.architecture
    (line,) = model.introduce(run)
    assert line.startswith("check  gradients on dp=2,tp=2, simulated, ")
    assert "the loss of a copy cut from " in line


def test_a_wrong_rule_is_caught_before_the_first_step(tmp_path, monkeypatch):
    table = {**rules.TABLE, "mm": forget_sum}
    origin = write_folder("llama", tmp_path)
    monkeypatch.setattr(rules, "TABLE", MappingProxyType(table))
    run = open_run(origin, mesh="tp=2", module__rules=RULES)
    with pytest.raises(ValueError, match="gradients of the module are not the module's") as caught:
        train(run, None)
    text = str(caught.value)
    assert "on tp=2, simulated" in text
    assert "run without tp" in text
    assert "gradients/model/layers/0/self_attn/o_proj/weight: got an entry that differs" in text


class Small(nn.Module):
    """A module that a function makes."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def test_what_cannot_be_cut_is_recorded_as_unchecked(tmp_path, monkeypatch):
    monkeypatch.setattr(module_check, "MOST_PARAMETERS", 1000)
    run = open_run("module:tests.apps.zoo.test_module_check.Small", mesh="dp=2")
    model: Any = run.config.architecture
    (line,) = model.introduce(run)
    assert line.startswith("check  unchecked: gradients of this module were not compared: ")
    assert "1,088 parameters, more than 1,000, and a function makes it" in line
    train(run, tmp_path)
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["step"], event["compared"]) == ("check", 0, False)
    assert f"check  {event['text']}" == line
    assert list(replace(model, check="off").introduce(run)) == []


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("gpt2", "pp=4"),
        ("llama", "pp=2,fsdp=2,tp=2"),
        pytest.param("mixtral", "pp=3", marks=pytest.mark.full),
    ],
)
def test_stages_of_pipelines_are_compared(tmp_path, kind, mesh):
    """Also of weights that two stages hold."""
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    routed = {"output_router_logits": True} if kind == "mixtral" else {}
    origin = write_folder(kind, tmp_path, **routed, **{layers: 4})
    split = {"module__rules": RULES} if kind == "llama" else {}
    run = open_run(origin, mesh=mesh, global_batch=12, microbatches=4, **split)
    model: Any = run.config.architecture
    (line,) = model.introduce(run)
    at = "pp=2,fsdp=2,tp=2" if kind == "llama" else "pp=2"
    assert line.startswith(f"check  gradients on {at}, simulated, ")


def test_a_stage_that_gets_other_values_is_caught(tmp_path, monkeypatch):
    usual = module_layers.run_sections

    def scaled(cut, sections, params, data, entering, gather):
        return usual(cut, sections, params, data, [x * 0.5 for x in entering], gather)

    monkeypatch.setattr(module_layers, "run_sections", scaled)
    run = open_run(write_folder("llama", tmp_path), mesh="pp=2", microbatches=2)
    with pytest.raises(ValueError, match=r"on pp=2, simulated, gradients of the module are not"):
        train(run, None)


def test_nothing_is_compared_on_one_device(tmp_path):
    run = open_run(write_folder("llama", tmp_path), mesh="dp=1")
    assert module_check.find_check(run, lambda *_: None) is None  # pyright: ignore
