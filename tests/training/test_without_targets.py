"""Batches and held-out sets without any target: their loss is that of 0 targets, 0 or none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from functron import tree
from functron.apps.guard.anomalies import TITLES, AnomalyConfig, Detector
from functron.cli.main import main
from functron.data import IndexedWriter
from functron.optim import LossScale, OptimizerConfig, ScheduleConfig
from functron.optim.schedules import read_schedule_count
from functron.spmd import Mesh
from functron.training.config import TrainConfig, configure, with_model
from functron.training.run import prepare
from functron.training.train import train

SHORT = ["--model", "gpt2-tiny", "--seq", "8", "--global-batch", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Documents of one token, which have no target; and among these such as have some."""
    folder = tmp_path_factory.mktemp("tokens")
    for name, lengths in (("ones", [1] * 60), ("mixed", [1] * 18 + [76] * 6)):
        with IndexedWriter(folder / name, np.dtype(np.uint16)) as writer:
            for number, length in enumerate(lengths):
                writer.add(np.arange(number, number + length) % 256)
    return folder


def records(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("more", [["--mask-documents"], ["--pack", "best-fit"]], ids=str)
def test_a_run_goes_on(tokens, tmp_path, capfd, more):
    out = tmp_path / "run"
    more = [*more, "--data", str(tokens / "mixed"), "--steps", "12", "--out", str(out)]
    assert main(["train", *SHORT, *more]) == 0
    rows = records(out)
    empty = [row for row in rows if "targets" in row]
    assert 0 < len(empty) < 12
    assert {(row["targets"], row["loss"], row["grad_norm"]) for row in empty} == {(0, None, None)}
    assert all(row["loss"] > 1 and row["grad_norm"] > 0 for row in rows if row not in empty)
    events = records(out, "events.jsonl")
    assert [e["step"] for e in events] == [row["step"] for row in empty]
    assert {e["kind"] for e in events} == {"no_targets"}
    said = capfd.readouterr()
    assert f"step {empty[0]['step']}: no sample has a target" in said.err
    full = [row["loss"] for row in rows if row not in empty]
    assert f"loss {full[0]:.3f} -> {full[-1]:.3f}" in said.out
    assert main(["rerun", str(out), "--step", str(empty[-1]["step"]), "--device", "cpu"]) == 0
    assert "recorded  loss 0.0, gradient norm 0.0\n" in (said := capfd.readouterr().out)
    assert TITLES["transient"] not in said


MESHES = [
    {"mesh": "pp=2", "microbatches": 2},
    {"mesh": "dp=2,tp=2", "zero": 2},
    {"compile": True, "log_layers_every": 1},
]


@pytest.mark.parametrize("how", MESHES, ids=str)
def test_the_state_stays(tokens, how):
    """Also of float32 masters and moments under a loss scale; on pipelines and compiled."""
    config = with_model(TrainConfig(), "gpt2-tiny")
    own = {"data": str(tokens / "ones"), "mask_documents": True, "seq": 8, "global_batch": 4}
    config = configure(config, **own, **how)
    run = prepare(config, Mesh.parse(config.parallelism.mesh))
    before = tree.map(torch.clone, run.state)
    batch = run.host_batch(0)
    assert run.num_targets(batch) == 0
    watched = run.watch is not None
    step = run.taking(run.watch.step if watched else run.step, 0, watched=watched)
    state, metrics = step(run.state, batch)
    numbers = [float(metrics[name]) for name in ("loss", "grad_norm", "targets")]
    assert numbers == [0, 0, 0]
    assert state.step == 1
    assert read_schedule_count(state.opt_state) == 1  # what the rate goes by
    assert read_schedule_count(before.opt_state) == 0
    pairs = zip(tree.paths(before), tree.leaves(before), tree.leaves(state), strict=True)
    changed = [path for path, old, new in pairs if not torch.equal(old, new)]
    assert len(changed) == 2
    assert changed[0] == "step"
    assert changed[1].startswith("opt_state/")
    assert changed[1].endswith("/count")


CASES = {
    "steps": {},
    "samples": {"rate_unit": "samples", "ramp_up": "1 1 12"},
    "overflows": {},
    "watched": {"log_layers_every": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_the_recorded_rate_is_the_rate_taken(tokens, case):
    """Of gradient descent: how far parameters move, by the norm of the gradient."""
    config = with_model(TrainConfig(), "gpt2-tiny")
    rate = ScheduleConfig("constant", 1e-2, warmup_steps=40, total_steps=0, init=1e-3)
    overflows = case == "overflows"
    scale = LossScale(initial=2.0**126 if overflows else 0.0, hysteresis=1)
    own = OptimizerConfig("sgd", clip_norm=0.0, momentum=0.0, loss_scale=scale)
    own_data = {"data": str(tokens / "mixed"), "mask_documents": True, "seq": 8, "prefetch": 0}
    config = configure(
        config, **own_data, global_batch=2 if case == "samples" else 1, steps=16, optimizer=own,
        learning_rate=rate, **CASES[case],
    )  # fmt: skip
    lrs = [row["lr"] for row in train(prepare(config, Mesh()), None).history]
    run = prepare(config, Mesh())
    state, idle, skipped, moved = run.state, 0, 0, []
    for index in range(config.steps):
        before = tree.map(torch.clone, state.params)
        num = run.num_targets(run.host_batch(index))
        samples = run.batches.first_sample(index) if case == "samples" else index
        wanted = 1e-3 + 9e-3 * min((samples - skipped) / 40, 1)
        assert lrs[index] == pytest.approx(wanted, rel=1e-5)
        state, metrics = run.taking(run.step, num)(state, run.batch(index))
        idle += not num
        parts = zip(tree.leaves(before), tree.leaves(state.params), strict=True)
        far = math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in parts))
        norm = float(metrics["grad_norm"])
        if num and not math.isfinite(norm):
            skipped += 1
        elif num:
            moved.append((far / norm, wanted))
    assert idle > 0
    assert (skipped > 0) == overflows
    assert len(moved) > 3
    assert [got for got, _ in moved] == pytest.approx([want for _, want in moved], rel=1e-3)


def test_a_held_out_set_is_refused_before_training(tokens, tmp_path, capfd):
    out = tmp_path / "run"
    more = ["--mask-documents", "--steps", "2", "--out", str(out)]
    more += ["--data", str(tokens / "mixed"), "--eval-data", f"short={tokens / 'ones'}"]
    assert main(["train", *SHORT, *more, "--eval-every", "1"]) == 2
    said = capfd.readouterr().err
    assert "held-out set 'short': got 7 batches without any target" in said
    assert not (out / "metrics.jsonl").exists()


def test_evaluate_refuses_one(tokens, tmp_path, capfd):
    """A BERT's, of which nothing is masked, and texts of one token each."""
    text = tmp_path / "text.txt"
    text.write_text("some text " * 20)
    masked = ["--model", "bert-tiny", "--mask-rate", "1e-9", "--mask-token", "3"]
    for name, more in (("gpt", ["--mask-documents"]), ("bert", masked)):
        out, gpt = tmp_path / name, name == "gpt"
        data = str(tokens / "mixed") if gpt else str(text)
        more = [*SHORT, *more, "--steps", "1", "--out", str(out), "--data", data]
        assert main(["train", *more]) == 0
        data = f"short={tokens / 'ones' if gpt else data}"
        assert main(["evaluate", str(out), "--data", data, "--device", "cpu"]) == 2
        wanted = "none with two tokens" if gpt else "batches without any target"
        assert wanted in capfd.readouterr().err


def test_it_is_no_part_of_what_is_usual():
    detector = Detector(AnomalyConfig(minimum=4, threshold=5.0))
    for step in range(1, 20):
        record = {
            "step": step,
            "loss": 2.0 + 0.01 * (step % 3),
            "grad_norm": 1.0 + 0.1 * (step % 2),
        }
        if step % 2:
            record |= {"loss": 0.0, "grad_norm": 0.0, "targets": 0}
        assert detector.find(record) is None
    assert detector.limit() < math.exp(5)
    assert detector.find({"step": 20, "loss": 9.0, "grad_norm": 1.0}) is not None
