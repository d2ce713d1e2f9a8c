"""Loading onto processes and exporting from them, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.apps.zoo import tiny_others
from tests.hub import tiny

NAMES = ("nemotron-h", "llava")


@pytest.mark.distributed
def test_processes(torchrun, tmp_path):
    models = {name: tiny_others.make(name) for name in NAMES}
    for name, model in models.items():
        tiny.store(model, tmp_path / name / "model", files=3)
    folders = [tmp_path / name for name in models]
    done = torchrun(Path(__file__).with_name("gloo_models.py"), 2, *folders)
    assert done.stdout.splitlines() == ["tp: ok", "fsdp: ok"] * len(models)
    for name, model in models.items():
        for layout in ("tp", "fsdp"):
            back = tiny_others.read_back(name, tmp_path / name / layout).state_dict()
            assert all(torch.equal(back[key], x) for key, x in model.state_dict().items())
