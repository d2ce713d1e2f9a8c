"""Reporters that need extras: what they write is read back by the package it is for."""

import json
import sys
from types import SimpleNamespace

import pytest

from functron.training import records

RECORDS = [
    {"step": 1, "loss": 3.5, "grad_norm": 1.25, "mfu": None},
    {"step": 2, "loss": 3.0, "grad_norm": 0.5, "mfu": 0.25},
]


def test_tensorboard_reads_what_was_written(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with records.tensorboard(tmp_path) as write:
        for record in RECORDS:
            write(record)
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "grad_norm", "mfu"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 3.5), (2, 3.0)]
    assert [(e.step, e.value) for e in events.Scalars("mfu")] == [(2, 0.25)]


NESTED = {
    "step": 1, "loss": 2.0, "grad_norm": None, "tokens_per_second": None,
    "layers": {"blocks/3": {"grad_norm": 0.5, "param_norm": float("inf")}, "norm": {}},
}  # fmt: skip


def test_dicts_in_records_are_named_by_their_paths(tmp_path, capsys):
    assert records.flat(NESTED)["layers/blocks/3/grad_norm"] == 0.5
    assert records.flat({"a": {"b": {"c": 1}}, "d": None}) == {"a/b/c": 1, "d": None}
    with records.jsonl(tmp_path / "m.jsonl") as write:
        write(NESTED)
    assert json.loads((tmp_path / "m.jsonl").read_text()) == NESTED | {
        "layers": {"blocks/3": {"grad_norm": 0.5, "param_norm": None}, "norm": {}}
    }
    with records.progress(1) as write:
        write(NESTED)
    assert "blocks" not in capsys.readouterr().err


def test_tensorboard_has_layers(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with records.tensorboard(tmp_path) as write:
        write(NESTED)
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("layers/blocks/3/grad_norm")[0].value == 0.5


def test_wandb_is_given_layers(tmp_path, monkeypatch):
    logged = []
    run = SimpleNamespace(log=lambda row, step: logged.append((row, step)), finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **settings: run)
    monkeypatch.setattr(records, "require", lambda package: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with records.wandb(tmp_path, {}) as write:
        write(NESTED)
    row, step = logged[0]
    assert step == 1
    assert row["layers/blocks/3/grad_norm"] == 0.5
    assert "grad_norm" not in row
