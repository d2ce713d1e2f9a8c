"""Reporters that need extras: what they write is read back by the package it is for."""

import json
import shutil
import sys
from pathlib import Path
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


def scalars(folder, name="loss"):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def taken(*steps, loss=0.0):
    return [{"step": step, "loss": loss + step, "grad_norm": None} for step in steps]


@pytest.mark.parametrize("kept", [0, 4], ids=["from the beginning", "from a checkpoint"])
def test_tensorboard_has_a_step_once_after_a_kill_and_a_resume(kept, tmp_path):
    """Nobody closed the first writer: what it wrote is there, as after kill -9."""
    first = records.tensorboard(tmp_path)
    write = first.__enter__()
    for record in taken(*range(1, 8)):
        write(record)
    assert [step for step, _ in scalars(tmp_path)] == [*range(1, 8)]
    with records.tensorboard(tmp_path, start=kept) as write:
        for record in taken(*range(kept + 1, 11), loss=100.0):
            write(record)
    wanted = [(s, float(s)) for s in range(1, kept + 1)]
    wanted += [(s, 100.0 + s) for s in range(kept + 1, 11)]
    assert scalars(tmp_path) == wanted
    del first


def test_wandb_goes_on_with_the_run_that_the_folder_began(tmp_path, monkeypatch):
    begun, logged = [], []

    def init(**settings):
        begun.append(settings)
        return SimpleNamespace(
            log=lambda row, step: logged.append(step), finish=lambda: None,
            starting_step=max(logged, default=-1) + 1,
        )  # fmt: skip

    monkeypatch.setattr(records, "require", lambda package: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for folder, steps in (("a", (1, 2, 3)), ("a", (2, 3, 4)), ("b", (5,))):
        (tmp_path / folder).mkdir(exist_ok=True)
        with records.wandb(tmp_path / folder, {}) as write:
            for record in taken(*steps):
                write(record)
    first, again, other = begun
    assert first["id"] == again["id"] != other["id"]
    assert len(first["id"]) >= 8
    assert {each["resume"] for each in begun} == {"allow"}
    assert logged == [1, 2, 3, 4, 5]


def test_a_copied_folder_is_another_run_at_wandb(tmp_path, monkeypatch):
    """Also of a folder that has its id alone, from before places were noted."""
    begun = []
    run = SimpleNamespace(log=lambda row, step: None, finish=lambda: None)
    fake = SimpleNamespace(init=lambda **settings: begun.append(settings["id"]) or run)
    monkeypatch.setattr(records, "require", lambda package: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.chdir(tmp_path)

    def report(folder):
        with records.wandb(folder, {}):
            return begun[-1]

    first, old = tmp_path / "a", tmp_path / "old"
    for folder in (first, old):
        folder.mkdir()
    (old / records.WANDB_ID).write_text("0123456789abcdef\n")
    ids = [report(first), report(old)]
    assert ids[1] == "0123456789abcdef"
    for folder, known in zip((first, old), ids, strict=True):
        copy = folder.with_name(folder.name + "-copy")
        shutil.copytree(folder, copy)
        other = report(copy)
        assert other not in ids
        assert report(copy) == other
        assert report(folder) == report(Path(folder.name)) == known


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
