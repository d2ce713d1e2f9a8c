"""Runs whose batches grow: the steps of a hand-written loop, on every mesh and when they go on."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import functron as ft
from functron import Mesh, checkpoint, gpt, optim, random, tree
from functron.checkpoint.restore import read_params
from functron.cli.main import main
from functron.data import ByteText, IndexedWriter
from functron.optim import OptimizerConfig
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.config import TrainConfig, load
from functron.training.plan import plan
from functron.training.run import prepare
from functron.training.train import train

RUN = TrainConfig(
    gpt=gpt.GPTConfig(
        vocab_size=256, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24,
        max_seq=12, init_stddev=0.2, dtype="float64", vocab_multiple=8, dropout=0.0,
    ),
    data=argparse.__file__, seq=12, global_batch=12, ramp_up="4 4 16", steps=5,
    optimizer=OptimizerConfig(clip_norm=0.5, weight_decay=0.1),
)  # fmt: skip
# two increments of 8 samples: a size holds until a step begins at sample 8 or later, then 16
SIZES, FIRST = [4, 4, 8, 12, 12], [0, 4, 8, 16, 28, 40]


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def taken(config: TrainConfig) -> list[dict]:
    return train(prepare(config, Mesh.parse(config.mesh)), None).history


@pytest.fixture(scope="module")
def alone():
    return taken(RUN)


def test_losses_are_those_of_a_loop_by_hand(alone):
    params = ft.init_params(random.split(random.key(RUN.seed), 2)[0], plan(RUN, Mesh()).whole_defs)
    leaves, structure = tree.flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    decays = ["norm" not in path for path in tree.paths(params)]
    settings = RUN.optimizer
    groups = [
        {
            "params": [x for x, flag in zip(leaves, decays, strict=True) if flag == decay],
            "weight_decay": 0.1 * decay,
        }
        for decay in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, betas=(settings.b1, settings.b2), eps=settings.eps)
    rate = optim.make_schedule(RUN.rate_schedule)
    text, wanted = ByteText(RUN.data, RUN.seq, seed=RUN.seed), []
    for index, (size, first) in enumerate(zip(SIZES, FIRST, strict=False)):
        data = {**text.draw(np.arange(first, first + size)), "rows": torch.arange(size)}
        value = gpt.loss(RUN.gpt, tree.unflatten(structure, leaves), data) / (size * RUN.seq)
        adamw.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, settings.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = float(rate(torch.tensor(index)))
        adamw.step()
        wanted.append((value.item(), norm.item()))
    got = [(record["loss"], record["grad_norm"]) for record in alone]
    # learning rates are float32, rounded differently
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_records_count_what_there_was(alone):
    assert [record["tokens"] for record in alone] == [first * 12 for first in FIRST[1:]]
    for record, size in zip(alone, SIZES, strict=True):
        assert record["tokens_per_second"] == pytest.approx(size * 12 / record["step_seconds"])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mesh": "dp=2", "microbatches": 2}, marks=pytest.mark.full),
        {"mesh": "dp=2,tp=2", "zero": 2, "microbatches": 2, "prefetch": 0},
        {"mesh": "fsdp=2", "microbatches": 2, "gather": "step"},
        {"mesh": "pp=2,dp=2", "microbatches": 2},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_every_mesh_sees_the_same_samples(changes, alone):
    found = taken(replace(RUN, **changes))
    for name in ("loss", "grad_norm", "tokens"):
        close([record[name] for record in found], [record[name] for record in alone])


def test_a_program_per_size(alone, monkeypatch):
    seen = []

    def jit(*args, **settings):
        seen.append(settings)
        return ft.jit(*args, **settings, backend="eager")

    monkeypatch.setattr(sys.modules["functron.training.run"], "jit", jit)
    config = replace(RUN, ramp_up="4 8 4", steps=2)
    found = taken(replace(config, compile=True))
    assert found[1]["tokens"] == (4 + 12) * 12
    close([record["loss"] for record in found], [record["loss"] for record in taken(config)])
    assert seen == [{"donate": 0, "num_signatures": 2, "graph": False}]


@pytest.mark.parametrize(
    "changes", [pytest.param({"compile": True}, marks=pytest.mark.full), {"mesh": "dp=2"}]
)
def test_rates_may_count_samples(changes, monkeypatch):
    """Linear, up over 10 samples and down over 30, before those that `FIRST` has."""
    jit = functools.partial(ft.jit, backend="eager")
    monkeypatch.setattr(sys.modules["functron.training.run"], "jit", jit)
    decays = replace(
        RUN.optimizer, weight_decay_incr_style="linear", start_weight_decay=0.1,
        end_weight_decay=0.9,
    )  # fmt: skip
    rates = optim.ScheduleConfig("linear", 1e-2, warmup_steps=10, total_steps=40, end=0.0)
    config = replace(RUN, optimizer=decays, learning_rate=rates, rate_unit="samples")
    found = taken(config)
    wanted = [1e-2 * share for share in (0, 4 / 10, 8 / 10, 24 / 30, 12 / 30)]
    assert [record["lr"] for record in found] == pytest.approx(wanted, rel=1e-6)
    again = taken(replace(config, **changes, steps=4))
    close([x["loss"] for x in again], [x["loss"] for x in found[:4]])
    assert replace(config, rate_unit="steps").rate_schedule.total_steps == 40
    assert replace(RUN, rate_unit="samples").rate_schedule.total_steps == FIRST[5]
    with pytest.raises(ValueError, match=r"first_steps: got .*; wanted 0, and increasing"):
        optim.by_samples(optim.constant(1.0), [1, 1], [2, 4])


# --- as a command ---------------------------------------------------------------------------------

SMALL = [
    "--seq", "12", "--global-batch", "12", "--ramp-up", "4 4 16", "--gpt.num-layers", "2",
    "--gpt.embed-dim", "16", "--gpt.num-heads", "4", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim",
    "24", "--steps", "5", "--learning-rate.total-steps", "5", "--save-every", "1",
    "--optimizer.ema-decay", "0.7",
]  # fmt: skip


def command(*arguments) -> int:
    return main(["train", *map(str, arguments)])


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in run_folder.records(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 5 steps on a blend of two files, of which every step is saved."""
    folder, source = tmp_path_factory.mktemp("ramp"), np.random.default_rng(0)
    for name in "ab":
        with IndexedWriter(folder / name, np.uint16) as writer:
            for size in source.integers(3, 40, 60):
                writer.add(source.integers(0, 256, size))
    data = f"3 {folder / 'a'} 1 {folder / 'b'}"
    held = ["--eval-every", "5", "--eval-data", f"a={folder / 'a'}", "--eval-averaged"]
    assert command(*SMALL, *held, "--data", data, "--out", folder / "run") == 0
    return folder / "run"


def cut_after(run: Path, step: int, copy: Path) -> Path:
    shutil.copytree(run, copy)
    for number in range(step + 1, 6):
        shutil.rmtree(copy / "checkpoints" / str(number))
    return copy


def test_checkpoints_say_what_was_seen(whole):
    for step in range(1, 6):
        about = checkpoint.metadata(whole / "checkpoints" / str(step))
        assert (about["samples"], about["tokens"]) == (FIRST[step], FIRST[step] * 12)
        counts = list(about["sources"].values())
        assert counts == [FIRST[step] - FIRST[step] // 4, FIRST[step] // 4]


@pytest.mark.parametrize("step", [*(pytest.param(n, marks=pytest.mark.full) for n in (1, 2)), 3])
def test_goes_on_to_the_bit_from_any_step(step, whole, tmp_path):
    cut = cut_after(whole, step, tmp_path / "cut")
    assert command("--out", cut, "--resume") == 0
    lines = [json.loads(x) for x in (cut / "metrics.jsonl").read_text().splitlines()]
    before = run_folder.records(whole)
    for name in ("step", "loss", "grad_norm", "tokens"):
        assert [x[name] for x in lines] == [x[name] for x in before]
    ends = [checkpoint.restore(run / "checkpoints" / "5") for run in (whole, cut)]
    assert all(map(torch.equal, *map(tree.leaves, ends)))


def test_goes_on_on_processes(whole, tmp_path, in_processes):
    cut = cut_after(whole, 1, tmp_path / "cut")
    options = ["--mesh", "pp=2", "--microbatches", 2]
    in_processes(2, "train", "--out", cut, "--resume", *options)
    torch.testing.assert_close(losses(cut), losses(whole), rtol=2e-6, atol=0)
    # what the processes keep of an average is one in the checkpoint
    means = [
        read_params(
            checkpoint.Checkpoint(run / "checkpoints" / "5"),
            gpt.defs(load(run / run_folder.CONFIG).gpt),
            averaged=True,
        )
        for run in (cut, whole)
    ]
    close(means[0], means[1], 1e-5)
    evals = [run_folder.records(run)[-1]["eval"]["a"] for run in (cut, whole)]
    torch.testing.assert_close(*(x["loss"] for x in evals), rtol=2e-6, atol=0)


def test_what_cannot_be(whole, tmp_path, capsys):
    cut = cut_after(whole, 2, tmp_path / "cut")
    assert command("--out", cut, "--resume", "--ramp-up", "4 8 16") == 2
    assert "ramp_up: got '4 8 16'; wanted '4 4 16', as in the run" in capsys.readouterr().err
    check = functools.partial(replace, TrainConfig())
    for config, line in (
        (check(ramp_up="4"), 'wanted three whole numbers: START INCREMENT SAMPLES; fix: write --ramp-up "2 2 1000"'),
        (check(ramp_up="4 -4 16"), "ramp_up: got '4 -4 16'; wanted three whole numbers"),
        (check(ramp_up="0 4 16"), "ramp_up='0 4 16': START: got 0; wanted a whole number of at least 1"),
        (check(ramp_up="4 3 16"), "global_batch: got 8; wanted 4 and a multiple of 3; fix: set it to 7"),
        (check(ramp_up="4 1 3"), "ramp_up='4 1 3': SAMPLES: got 3; wanted at least the 4 increments; fix: set it to 4"),
        (
            check(ramp_up="2 2 99", mesh="dp=2", microbatches=2),
            "ramp_up: got '2 2 99': batches of 2, 6 samples; wanted multiples of 4: "
            "data-parallel ranks 2 x microbatches 2; fix: write \"4 4 99\"",
        ),
        (check(ramp_up="2 2 99", mesh="dp=3"), "fix: make START and INCREMENT such multiples"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(line)):
            validate(config)
    validate(check(ramp_up="2 6 6"))
    validate(check(ramp_up="4 4 99", mesh="dp=2", microbatches=2))
