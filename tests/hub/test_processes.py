"""Loading onto processes and exporting from them, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from functron import hub
from tests.hub import tiny
from tests.hub.gloo_hub import QUANTISED, layouts_of

pytestmark = pytest.mark.distributed


LAYERS = {
    "qwen2": {"num_hidden_layers": 4},
    "gpt2": {"n_layer": 4},
    "mixtral": {"num_hidden_layers": 4},
    "gpt-oss": {"num_hidden_layers": 4},
    "deepseek-v3": {"num_hidden_layers": 4, "first_k_dense_replace": 2},
}


def test_processes(torchrun, tmp_path, pytestconfig):
    full = pytestconfig.getoption("--full")
    models = {name: tiny.make(name, **LAYERS[name]) for name in LAYERS}
    for name, model in models.items():
        tiny.store(model, tmp_path / name / "model", files=3)
    folders = [tmp_path / name for name in models]
    done = torchrun(Path(__file__).with_name("gloo_hub.py"), 2, full, *folders)
    checks = [c for name in models for c in (*layouts_of(name, full), "failures", "numbers")]
    assert done.stdout.splitlines() == [f"{check}: ok" for check in checks]
    for name, model in models.items():
        check_exports(tmp_path / name, layouts_of(name, full), model.state_dict())


def check_exports(folder: Path, layouts: tuple[str, ...], expected: dict) -> None:
    """Every layout's export is what went in, and the same to the last byte of every file."""
    first = {file.name: file.read_bytes() for file in (folder / "tp").iterdir()}
    assert sum(name.endswith(".safetensors") for name in first) > 2
    for layout in layouts:
        back = tiny.read_back(folder / layout).state_dict()
        assert back.keys() == expected.keys()
        assert all(torch.equal(back[key], value) for key, value in expected.items())
        assert {file.name: file.read_bytes() for file in (folder / layout).iterdir()} == first
    more = ["fp8"] if folder.name in QUANTISED else []
    assert sorted(path.name for path in folder.iterdir()) == sorted(["model", *layouts, *more])
    if more:
        config, params = hub.load_model(folder / "model")
        hub.save(folder / "one", config, params, quantise="fp8-row")
        for file in (folder / "one").iterdir():
            assert (folder / "fp8" / file.name).read_bytes() == file.read_bytes()
