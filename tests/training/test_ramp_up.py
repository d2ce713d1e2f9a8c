"""Runs whose batches grow, or are changed half-way: the steps of a hand-written loop.

On every mesh, and when they go on.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
from functron.cli.train import parse_train
from functron.data import IndexedWriter, TextWindows
from functron.optim import OptimizerConfig
from functron.training import run_folder, with_changed_batch
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, load
from functron.training.run import prepare
from functron.training.setup import make_setup
from functron.training.train import train

RUN = configure(
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
    return train(prepare(config, Mesh.parse(config.parallelism.mesh)), None).history


@pytest.fixture(scope="module")
def alone():
    return taken(RUN)


def by_hand(sizes: list[int], rates=None) -> list[tuple[float, float]]:
    """Losses and gradient norms of `RUN` with batches of these sizes, of samples one after another."""
    params = ft.init_params(
        random.split(random.key(RUN.seed), 2)[0], make_setup(RUN, Mesh()).whole_defs
    )
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
    text, wanted, first = TextWindows(RUN.data.path, RUN.data.seq, seed=RUN.seed), [], 0
    for index, size in enumerate(sizes):
        data = {**text.draw(np.arange(first, first + size)), "rows": torch.arange(size)}
        value = gpt.loss(RUN.gpt, tree.unflatten(structure, leaves), data) / (size * RUN.data.seq)
        adamw.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, settings.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = float(rate(torch.tensor(index))) if rates is None else rates[index]
        adamw.step()
        wanted.append((value.item(), norm.item()))
        first += size
    return wanted


def test_losses_are_those_of_a_loop_by_hand(alone):
    got, wanted = [(record["loss"], record["grad_norm"]) for record in alone], by_hand(SIZES)
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
    found = taken(configure(RUN, **changes))
    for name in ("loss", "grad_norm", "tokens"):
        close([record[name] for record in found], [record[name] for record in alone])


def test_a_program_per_size(alone, monkeypatch):
    seen = []

    def jit(*args, **settings):
        seen.append(settings)
        return ft.jit(*args, **settings, backend="eager")

    monkeypatch.setattr(sys.modules["functron.training.run"], "jit", jit)
    config = configure(RUN, ramp_up="4 8 4", steps=2)
    found = taken(configure(config, compile=True))
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
    config = configure(RUN, optimizer=decays, learning_rate=rates, rate_unit="samples")
    found = taken(config)
    wanted = [1e-2 * share for share in (0, 4 / 10, 8 / 10, 24 / 30, 12 / 30)]
    assert [record["lr"] for record in found] == pytest.approx(wanted, rel=1e-6)
    again = taken(configure(config, **changes, steps=4))
    close([x["loss"] for x in again], [x["loss"] for x in found[:4]])
    assert configure(config, rate_unit="steps").rate_schedule.total_steps == 40
    assert configure(RUN, rate_unit="samples").rate_schedule.total_steps == FIRST[5]
    with pytest.raises(ValueError, match=r"first_steps: got .*; wanted 0, and increasing"):
        optim.by_samples(optim.constant(1.0), [1, 1], [2, 4])


# --- batches that are changed half-way ------------------------------------------------------------


def changed(out: Path, **changes) -> TrainConfig:
    """The run in `out`, to go on with these changes."""
    begun = configure(load(out / run_folder.CONFIG), out=str(out), resume=True, change_batch=True)
    config = with_changed_batch(configure(begun, **changes))
    validate(config)
    return config


def go_on(config: TrainConfig) -> list[dict]:
    out = Path(config.out)
    train(prepare(config, Mesh.parse(config.parallelism.mesh), "cpu", run_folder.newest(out)), out)
    return run_folder.records(out)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({}, marks=pytest.mark.full),  # the other's first steps are without a mesh
        {"mesh": "dp=2,tp=2", "microbatches": 2, "zero": 2},
    ],
)
def test_a_run_of_4_samples_a_step_goes_on_with_8(mesh, tmp_path):
    out = tmp_path / "run"
    rates = optim.ScheduleConfig("linear", 1e-2, warmup_steps=8, total_steps=80, end=0.0)
    base = configure(RUN, ramp_up="", global_batch=4, rate_unit="samples", learning_rate=rates)
    train(prepare(configure(base, steps=6), Mesh()), out)
    config = changed(out, global_batch=8, steps=8, **mesh)
    assert (config.data.earlier_batches, config.data.batches.sizes) == ("6x4", (4, 8))
    whole = prepare(config, Mesh())
    numbers = [whole.samples_of(step)["samples"] for step in range(8)]
    assert numbers == [*([n, n + 4] for n in range(0, 24, 4)), [24, 32], [32, 40]]
    go_on(config)
    # once more, with another size, and then as it is
    found = go_on(changed(out, global_batch=4, steps=9, **mesh))
    assert load(out / run_folder.CONFIG).data.earlier_batches == "6x4 2x8"
    again = configure(load(out / run_folder.CONFIG), out=str(out), resume=True, steps=10)
    validate(again)
    found = go_on(again)
    sizes = [4] * 6 + [8] * 2 + [4] * 2
    seen = np.cumsum(sizes).tolist()
    assert [record["samples"] for record in found] == seen
    assert [record["tokens"] for record in found] == [12 * n for n in seen]
    before = [0, *seen[:-1]]
    wanted = [1e-2 * min(n / 8, (80 - n) / 72) for n in before]
    assert [record["lr"] for record in found] == pytest.approx(wanted, rel=1e-6)
    got = [(record["loss"], record["grad_norm"]) for record in found]
    hand = by_hand(sizes, rates=wanted)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(hand), rtol=1e-6, atol=1e-6)
    about = checkpoint.metadata(out / "checkpoints" / "8")
    assert (about["samples"], about["tokens"]) == (40, 480)


def test_what_counts_samples_stays_as_it_was_planned(tmp_path):
    out = tmp_path / "run"
    base = configure(RUN, ramp_up="4 4 16", rate_unit="samples", steps=5)  # 40 samples
    train(prepare(configure(base, steps=3, learning_rate=replace(
        base.learning_rate, total_steps=40)), Mesh()), out)  # fmt: skip
    stopped = configure(base, out=str(out), order="megatron")
    run_folder.write_config(out, stopped)
    going_on = configure(stopped, resume=True, change_batch=True)
    # after 16 samples the batches have grown: what is left of the ramp is nothing
    config = with_changed_batch(configure(going_on, global_batch=10))
    assert (config.data.earlier_batches, config.data.ramp_up, config.data.global_batch) == (
        "2x4 1x8",
        "",
        10,
    )
    assert config.rate_schedule.total_steps == config.ordered_samples == 40
    # or it may grow again, by the samples of the whole run: 16 of 48 are a third of the increments
    config = with_changed_batch(configure(going_on, global_batch=16, ramp_up="4 4 48"))
    batches = config.data.batches
    assert [batches.batch_size(step) for step in range(8)] == [4, 4, 8, 8, 8, 12, 12, 16]
    assert batches.first_sample(3) == 16
    # where nothing is changed, nothing is noted
    assert with_changed_batch(going_on).data.earlier_batches == ""


def test_a_run_that_took_no_step_is_planned_anew(tmp_path):
    """100 steps of 8 samples are 800; the 10 of 4 that its folder names were never taken."""
    out = tmp_path / "run"
    out.mkdir()
    base = configure(RUN, ramp_up="", global_batch=4, steps=10, rate_unit="samples")
    for order in ("arithmetic", "megatron"):
        run_folder.write_config(out, configure(base, order=order))
        going_on = configure(base, order=order, out=str(out), resume=True, change_batch=True)
        config = with_changed_batch(configure(going_on, global_batch=8, steps=100))
        assert config.data.earlier_batches == ""
        assert config.rate_schedule.total_steps == config.ordered_samples == 800
        last = 2e-3 * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * 0.99)))
        assert float(config.rate(99)) == pytest.approx(last, rel=1e-5)


def test_a_constant_rate_is_given_no_total(tmp_path):
    out = tmp_path / "run"
    rate = optim.ScheduleConfig("constant", 1e-3, total_steps=0)
    base = configure(RUN, ramp_up="", global_batch=4, rate_unit="samples", learning_rate=rate)
    train(prepare(configure(base, steps=2), Mesh()), out)
    assert changed(out, global_batch=8, steps=4).learning_rate.total_steps == 0
    own = replace(RUN.optimizer, weight_decay_incr_style="linear", end_weight_decay=0.1)
    run_folder.write_config(out, configure(base, steps=2, optimizer=own))
    assert changed(out, global_batch=8, steps=4).learning_rate.total_steps == 8


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


def cut_after(run: Path, step: int, copy: Path, steps: int = 5) -> Path:
    shutil.copytree(run, copy)
    for number in range(step + 1, steps + 1):
        shutil.rmtree(copy / "checkpoints" / str(number), ignore_errors=True)
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


@pytest.fixture(scope="module")
def changing(whole, tmp_path_factory):
    """A run of 6 steps of 4 samples on a blend, and one that goes on with 8 for 3 more."""
    folder = tmp_path_factory.mktemp("changing")
    data = load(whole / run_folder.CONFIG).data.path
    sizes = ["--global-batch", 4, "--ramp-up", "", "--steps", 6, "--save-every", 3]
    assert command(*SMALL, *sizes, "--data", data, "--out", folder / "before") == 0
    shutil.copytree(folder / "before", folder / "after")
    more = ["--out", folder / "after", "--resume", "--steps", 9, "--global-batch", 8]
    assert command(*more, "--change-batch", "--save-every", 1) == 0
    return folder / "before", folder / "after"


def test_a_command_changes_the_batch(changing, tmp_path, capsys):
    _, after = changing
    for name in (run_folder.CONFIG, "checkpoints/9"):
        assert (after / name).exists()
    text = (after / run_folder.CONFIG).read_text()
    assert 'earlier_batches = "6x4"' in text
    assert "change_batch = false" in text
    records = run_folder.records(after)
    samples = [4, 8, 12, 16, 20, 24, 32, 40, 48]
    assert [record["samples"] for record in records] == samples
    assert [sum(x["samples"] for x in r["sources"].values()) for r in records] == samples
    config = configure(load(after / run_folder.CONFIG), out=str(after))
    run = prepare(config, Mesh(), "cpu", after / "checkpoints" / "9")
    for step, (first, end) in enumerate(itertools.pairwise([0, *samples])):
        drawn = run.text.draw(np.arange(first, end))  # every sample once, one after another
        assert torch.equal(run.host_batch(step)["tokens"], drawn["tokens"])
    # as a run that had these batches planned
    planned = tmp_path / "planned"
    assert command("--config", after / run_folder.CONFIG, "--out", planned) == 0
    assert losses(planned) == losses(after)
    hashes = [[x["batch"] for x in run_folder.records(folder)] for folder in (planned, after)]
    assert hashes[0] == hashes[1]
    # asked for again, as a job does that is started again, or resumed from where it was changed
    again = cut_after(after, 7, tmp_path / "again", 9)
    asked = ["--steps", 9, "--global-batch", 8, "--change-batch"]
    assert command("--out", again, "--resume", "auto", *asked) == 0
    assert losses(again) == losses(after)
    assert load(again / run_folder.CONFIG).data.earlier_batches == "6x4"
    back = cut_after(after, 3, tmp_path / "back", 9)
    assert command("--out", back, "--resume", "--steps", 8) == 0
    assert losses(back) == losses(after)[:8]
    back = cut_after(after, 3, tmp_path / "other", 9)
    capsys.readouterr()
    assert command("--out", back, "--resume", "--steps", 5, "--change-batch") == 0
    said = "batch  8 samples a step from step 4 on, whose first is number 12 of the run; before 3x4"
    assert said in capsys.readouterr().out
    assert [x["samples"] for x in run_folder.records(back)] == [4, 8, 12, 20, 28]


def test_a_changed_batch_on_a_mesh(changing, tmp_path, in_processes):
    before, after = changing
    run = tmp_path / "run"
    shutil.copytree(before, run)
    options = ["--global-batch", 8, "--change-batch", "--mesh", "dp=2", "--microbatches", 4]
    in_processes(2, "train", "--out", run, "--resume", *options, "--steps", 8)  # 4 do not go in 8
    torch.testing.assert_close(losses(run), losses(after)[:8], rtol=2e-6, atol=0)
    names = ("samples", "sources", "batch")
    rows = [[[x[n] for n in names] for x in run_folder.records(r)[:8]] for r in (run, after)]
    assert rows[0] == rows[1]
    assert (
        command("--out", run, "--resume", "--steps", 9, "--mesh", "fsdp=4", "--microbatches", 2)
        == 0
    )
    torch.testing.assert_close(losses(run), losses(after), rtol=2e-6, atol=0)


def test_batches_that_cannot_be_changed(changing, tmp_path, capsys):
    before, after = changing

    def said(*arguments) -> str:
        capsys.readouterr()
        assert command(*arguments) == 2
        return " ".join(capsys.readouterr().err.split())

    text = said("--out", before, "--resume", "--global-batch", 8)
    assert (
        "global_batch: got 8; wanted 4, as in the run; fix: --change-batch goes on so after" in text
    )
    more = ["--out", before, "--resume", "--change-batch", "--global-batch"]
    assert (
        "wanted a multiple of 4: data-parallel ranks 2 x microbatches 2; fix: set it to 8"
        in said(*more, 6, "--mesh", "dp=2", "--microbatches", 2)
    )
    assert "change_batch: got True, which has no effect; wanted a run that goes on" in said(
        "--out", tmp_path / "x", "--change-batch"
    )
    assert "earlier_batches: got '5x4'; wanted '6x4', as in the run" in said(
        "--out", after, "--resume", "--earlier-batches", "5x4"
    )
    assert "wanted steps and their samples, such as 6x4 10x8" in said("--earlier-batches", "6*4")
    # what is to be taken again must fit as well
    back = cut_after(after, 3, tmp_path / "back", 9)
    more = ["--out", back, "--resume", "--mesh", "dp=8"]
    assert "earlier_batches: got '6x4': batches of 4 samples, which are to come" in said(*more)
    validate(parse_train([*map(str, more), "--change-batch"]))
    shutil.rmtree(back / "checkpoints")
    assert "batches of 4 samples, which are to come" in said(*more)


def test_what_cannot_be(whole, tmp_path, capsys):
    cut = cut_after(whole, 2, tmp_path / "cut")
    assert command("--out", cut, "--resume", "--ramp-up", "4 8 16") == 2
    assert "ramp_up: got '4 8 16'; wanted '4 4 16', as in the run" in capsys.readouterr().err
    check = configure
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
