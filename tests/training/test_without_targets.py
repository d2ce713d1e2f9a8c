"""Batches and held-out sets without any target: their loss is that of 0 targets, 0 or none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from functron import tree
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
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def write_tokens(folder):
    """Documents of one token, which have no target; and among these such as have some."""
    for name, lengths in (("ones", [1] * 60), ("mixed", [1] * 18 + [76] * 6)):
        with IndexedWriter(folder / name, np.dtype(np.uint16)) as writer:
            for number, length in enumerate(lengths):
                writer.add(np.arange(number, number + length) % 256)
    return folder


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


WAYS = (["--mask-documents"], ["--pack", "best-fit"])


@pytest.mark.parametrize("more", WAYS, ids=str)
def test_a_run_goes_on(tokens, tmp_path, capfd, more):
    out = tmp_path / "run"
    more = [*more, "--data", str(tokens / "mixed"), "--steps", "12", "--out", str(out)]
    assert main(["train", *SHORT, *more]) == 0
    rows = records(out)
    empty = [row for row in rows if "targets" in row]
    assert 0 < len(empty) < 12
    assert {(row["targets"], row["loss"], row["grad_norm"]) for row in empty} == {(0, None, None)}
    assert all(row["loss"] > 1 and row["grad_norm"] > 0 for row in rows if row not in empty)
    said = capfd.readouterr()
    assert f"step {empty[0]['step']}: no sample has a target" in said.err
    full = [row["loss"] for row in rows if row not in empty]
    assert f"loss {full[0]:.3f} -> {full[-1]:.3f}" in said.out


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


def check_refused(out, data, held_out, more, said, capfd):
    more = [*SHORT, *more, "--steps", "1", "--out", str(out), "--data", str(data)]
    assert main(["train", *more]) == 0
    held_out = f"short={held_out}"
    assert main(["evaluate", str(out), "--data", held_out, "--device", "cpu"]) == 2
    assert said in capfd.readouterr().err


def test_evaluate_refuses_texts_of_one_token_each(tokens, tmp_path, capfd):
    data, held_out = tokens / "mixed", tokens / "ones"
    said = "none with two tokens"
    check_refused(tmp_path / "run", data, held_out, ["--mask-documents"], said, capfd)


@pytest.mark.applications("zoo")
def test_evaluate_refuses_texts_of_which_nothing_is_masked(tmp_path, capfd):
    text = tmp_path / "text.txt"
    text.write_text("some text " * 20)
    masked = ["--model", "bert-tiny", "--mask-rate", "1e-9", "--mask-token", "3"]
    check_refused(tmp_path / "run", text, text, masked, "batches without any target", capfd)
