"""Steps that are taken again: what their numbers come from."""

from __future__ import annotations

import argparse
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from functron.apps.guard.anomalies import TITLES, AnomalyConfig, Verdict, unlike
from functron.apps.guard.faults import Corrupt, inject
from functron.cli.main import main
from functron.models.gpt import GPTConfig
from functron.spmd import Mesh
from functron.training import records, run_folder
from functron.training.config import configure
from functron.training.run import prepare
from functron.training.train import train
from tests.training.test_without_targets import SHORT, WAYS, write_tokens

GPT = GPTConfig(vocab_size=256, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=16)
BASE = configure(
    gpt=GPT, data=argparse.__file__, seq=16, global_batch=4, steps=8, save_every=3,
    anomalies=AnomalyConfig(on_nonfinite="rollback", attribute=True),
)  # fmt: skip
NAN = Corrupt(step=4, leaf="params/blocks/mlp/up/w", element=None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to, on a simulated mesh."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(prepare(configure(BASE, mesh="dp=2"), Mesh(dp=2)), out)
    return out


def events(out) -> list[dict]:
    return records.read(out / records.EVENTS)


def rerun(capsys, *arguments) -> dict[str, str]:
    capsys.readouterr()
    assert main(["rerun", *map(str, arguments)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def test_a_fault_that_does_not_come_again_is_transient_and_costs_no_samples(tmp_path):
    around = partial(inject, faults=[NAN])
    history = train(prepare(BASE, Mesh(), around=around), tmp_path).history
    plain = train(prepare(BASE, Mesh()), None).history
    assert [r["loss"] for r in history] == [r["loss"] for r in plain]
    kinds = [event["kind"] for event in events(tmp_path)]
    assert kinds == ["nonfinite", "rerun", "rollback"]
    verdict = events(tmp_path)[1]
    assert (verdict["class"], verdict["begun"], verdict["since"]) == ("transient", 3, 5)
    assert verdict["loss"] == plain[4]["loss"]
    assert "skipped" not in events(tmp_path)[2]


def test_what_comes_again_is_of_the_data_or_the_model_with_its_layer_and_samples(tmp_path):
    around = partial(inject, faults=[replace(NAN, times=None)])
    config = configure(BASE, anomalies=replace(BASE.anomalies, on_nonfinite="stop"))
    with pytest.raises(FloatingPointError, match="step 5: got loss nan"):
        train(prepare(config, Mesh(), around=around), tmp_path)
    verdict = events(tmp_path)[1]
    assert verdict["kind"] == "rerun"
    assert verdict["class"] == "data"
    assert verdict["layer"] == "blocks/0, its activations"
    assert verdict["samples"] == [16, 20]
    assert verdict["loss"] is None


def test_the_steps_of_a_run_are_the_same_again(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    said = rerun(capsys, whole, "--step", 5)
    record = run_folder.records(whole)[4]
    assert said["recorded"] == said["again"]
    assert f"loss {record['loss']!r}" in said["again"]
    assert said["class"].startswith("data or model")
    assert said["samples"].startswith("16 to 19")
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_the_first_step_is_taken_from_the_beginning(whole, capsys):
    assert rerun(capsys, whole, "--step", 1)["class"].startswith("data or model")


def test_on_another_mesh_numbers_are_close(whole, capsys):
    said = rerun(capsys, whole, "--step", 5, "--mesh", "tp=2")
    assert said["class"].startswith("data or model")


def test_other_records_are_a_fault_since_their_step(whole, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    rows = run_folder.records(out)
    for row in rows[4:]:
        row["loss"] = math.nextafter(row["loss"], 9.0)
    with records.jsonl(out / "new") as write:
        for row in rows:
            write(row)
    (out / "new").replace(out / "metrics.jsonl")
    said = rerun(capsys, out, "--step", 6)
    assert said["class"].startswith("transient")
    assert said["since"].startswith("step 5")
    assert rerun(capsys, out, "--step", 4)["class"].startswith("data or model")


def test_other_samples_are_named(whole, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    config = (out / "config.toml").read_text()
    (out / "config.toml").write_text(
        config.replace('skipped_samples = ""', 'skipped_samples = "16:20"')
    )
    assert rerun(capsys, out, "--step", 5)["class"].startswith("other batch")


@pytest.mark.parametrize("more", WAYS, ids=str)
def test_steps_without_targets_are_written_down_and_the_same_again(more, tmp_path, capsys):
    out, data = tmp_path / "run", write_tokens(tmp_path) / "mixed"
    more = [*more, "--data", str(data), "--steps", "12", "--out", str(out)]
    assert main(["train", *SHORT, *more]) == 0
    empty = [row["step"] for row in run_folder.records(out) if "targets" in row]
    events = records.read(out / records.EVENTS)
    assert [(event["step"], event["kind"]) for event in events] == [
        (step, "no_targets") for step in empty
    ]
    capsys.readouterr()
    assert main(["rerun", str(out), "--step", str(empty[-1]), "--device", "cpu"]) == 0
    assert "recorded  loss 0.0, gradient norm 0.0\n" in (said := capsys.readouterr().out)
    assert TITLES["transient"] not in said


def test_a_step_that_was_not_taken_is_refused(whole, capsys):
    assert main(["rerun", str(whole), "--step", "9"]) == 2
    assert "step: got 9; wanted one of the 8 that the run took" in capsys.readouterr().err


def test_most_ranks_say_which_is_wrong():
    assert unlike([(1.0, 2.0)] * 3) == []
    assert unlike([(1.0, 2.0), (1.0, math.nan), (1.0, 2.0)]) == [1]
    assert unlike([(1.0,), (2.0,)]) == [0, 1]
    text = str(Verdict(5, "persistent", 3, (1.0, 2.0), (1.0, 2.0), ranks=(1,), compared=3))
    assert "ranks     1" in text


@pytest.mark.distributed
def test_processes_name_the_rank_that_is_always_wrong(torchrun, tmp_path):
    torchrun(Path(__file__).with_name("gloo_replay.py"), 3, tmp_path, timeout=180)
