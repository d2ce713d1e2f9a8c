"""A run that goes on with another schedule says so, and can keep the old one or go over to the new."""

from __future__ import annotations

import argparse
import math
import re
import shutil
from dataclasses import fields, replace

import pytest

from functron.cli.main import main
from functron.optim import AdafactorConfig, OptimizerConfig, ScheduleConfig
from functron.training import records
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure
from functron.training.resume import rate_notes

SMALL = [
    "--data", argparse.__file__, "--seq", "8", "--global-batch", "4", "--gpt.num-layers", "1",
    "--gpt.embed-dim", "16", "--gpt.num-heads", "2", "--gpt.mlp-dim", "16", "--prefetch", "0",
]  # fmt: skip
PEAK, SHARE = 2e-3, 0.05


def cosine(step, total):
    """The default schedule, by hand: of step 1, 2, ..."""
    progress = min((step - 1) / total, 1)
    return PEAK * (SHARE + (1 - SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("rates") / "run"
    assert main(["train", *SMALL, "--steps", "8", "--out", str(run)]) == 0
    return run


@pytest.fixture
def longer(finished, tmp_path, capsys):
    """What `functron train --resume --steps 16` with more options says, and the rates that follow."""

    def resume(*options):
        run = tmp_path / "run"
        if not run.exists():
            shutil.copytree(finished, run)
        capsys.readouterr()
        assert main(["train", "--out", str(run), "--resume", "--steps", "16", *options]) == 0
        rates = {r["step"]: r["lr"] for r in records.read(run / records.METRICS)}
        return capsys.readouterr().out, [rates.get(step) for step in range(1, 17)]

    return resume


def test_a_longer_run_says_how_its_rate_jumps(longer):
    dry, _ = longer("--dry-run")
    said, rates = longer()
    old = [cosine(step, 8) for step in range(1, 9)]
    assert rates == pytest.approx([*old, *(cosine(step, 16) for step in range(9, 17))], rel=1e-5)
    shares = [f"{rate / PEAK:.1%}" for rate in (old[-1], cosine(9, 16), SHARE * PEAK)]
    for text in (dry, said):
        line = re.search("rate   step 8 had .*", text)[0]
        assert re.findall(r"[\d.]+%", line)[:3] == shares == ["8.6%", "52.5%", "5.0%"]
        assert "the last step, 16," in line
        assert "under the old schedule, whose last step was 8" in line
        assert "--learning-rate.total-steps 8\n" in text
    again, _ = longer()
    assert "rate  " not in again


def test_the_old_schedule_can_be_kept(longer):
    said, _ = longer("--dry-run")
    options = re.search("to keep the old schedule, add (.*)", said)[1].split()
    said, rates = longer(*options)
    assert rates == pytest.approx([cosine(step, 8) for step in range(1, 17)], rel=1e-5)
    assert "rate  " not in said


def test_the_rate_can_climb_to_the_new_schedule(longer):
    said, _ = longer("--dry-run")
    options = re.search("to go over to the new one, (.*)", said)[1].split()
    options[3] = "4"
    said, rates = longer(*options)
    begun = cosine(8, 8)
    climb = [begun + (cosine(step, 16) - begun) * (step - 9) / 4 for step in range(9, 13)]
    assert rates[8:] == pytest.approx([*climb, *(cosine(s, 16) for s in range(13, 17))], rel=1e-4)
    assert "it jumps" not in said


def test_whatever_changes_the_rate_is_said_and_can_be_kept():
    def notes(start=50, **changes):
        before = configure(steps=100, **changes.pop("before", {}))
        return rate_notes(before, configure(before, **changes), start)

    assert notes() == []
    assert notes(start=0, steps=200) == []
    assert notes(steps=100, seed=3) == []
    constant = {"before": {"learning_rate": ScheduleConfig("constant", total_steps=0)}}
    assert notes(steps=200, **constant) == []
    lower = notes(learning_rate=replace(TrainConfig().learning_rate, peak=1e-3))
    assert "--learning-rate.peak 0.002" in lower[1]
    by_samples = notes(steps=300, before={"rate_unit": "samples", "global_batch": 4})
    assert "--learning-rate.total-steps 400" in by_samples[1]
    assert "--learning-rate.rewarm-at 200 --learning-rate.rewarm-steps 100" in by_samples[2]
    own = replace(TrainConfig().optimizer, weight_decay_incr_style="linear", end_weight_decay=0.1)
    kept = replace(TrainConfig().learning_rate, name="constant")
    decays = notes(steps=200, before={"optimizer": own, "learning_rate": kept})
    assert "step 51 decays weights by 0.025, not 0.05" in decays


def by_options(config: TrainConfig, line: str) -> TrainConfig:
    """`config` with the fields of the learning rate that a note recommends."""
    found = re.findall(r"--learning-rate\.([\w-]+) (\S+)", line)
    kinds = {f.name: type(getattr(config.learning_rate, f.name)) for f in fields(ScheduleConfig)}
    named = {name.replace("-", "_"): value for name, value in found}
    values = {name: kinds[name](value) for name, value in named.items()}
    return configure(config, learning_rate=replace(config.learning_rate, **values))


def test_a_lower_peak_is_come_down_to():
    """As recommended: 10 steps along a straight line, by hand."""
    before = configure(steps=100, learning_rate=ScheduleConfig("constant", 1e-2, total_steps=0))
    now = configure(before, steps=150, learning_rate=replace(before.learning_rate, peak=1e-3))
    notes = rate_notes(before, now, 50)
    assert "to go over to the new one, " in notes[2]
    going = by_options(now, notes[2])
    validate(going)
    wanted = [1e-2 + (1e-3 - 1e-2) * n / 10 for n in range(10)]
    assert [float(going.rate(50 + n)) for n in range(12)] == pytest.approx([*wanted, 1e-3, 1e-3])


def test_of_an_optimizer_with_a_rate_of_its_own_only_the_decay_is_told():
    """Adafactor's relative steps read no schedule; a weight decay that changes reads its total."""
    own = OptimizerConfig("adafactor", adafactor=AdafactorConfig(relative_step=True))
    before = configure(steps=100, optimizer=own)
    assert rate_notes(before, configure(before, steps=200), 50) == []
    own = replace(own, weight_decay_incr_style="linear", end_weight_decay=0.1)
    before = configure(steps=100, optimizer=own)
    notes = rate_notes(before, configure(before, steps=200), 50)
    assert notes == ["step 51 decays weights by 0.025, not 0.05"]
    rate = replace(before.learning_rate, total_steps=100)
    longer = configure(before, steps=200, learning_rate=rate)
    assert float(longer.weight_decay(50)) == pytest.approx(0.05)
    validate(longer, given=["learning_rate.total_steps"])
    with pytest.raises(ValueError, match=r"learning_rate.peak: got 0.5, which has no effect") as e:
        validate(configure(longer, learning_rate=replace(rate, peak=0.5)))
    assert "total_steps" not in str(e.value)
    constant = replace(own, weight_decay_incr_style="constant", end_weight_decay=0.0)
    with pytest.raises(
        ValueError, match=r"learning_rate.total_steps: got 100, which has no effect"
    ):
        validate(configure(longer, optimizer=constant))


def test_a_climb_counts_samples_where_the_rate_does():
    rate = replace(TrainConfig().learning_rate, rewarm_at=40, rewarm_steps=8, name="constant")
    config = configure(rate_unit="samples", global_batch=4, steps=20, learning_rate=rate)
    rates = [float(config.rate(step)) for step in range(9, 13)]
    assert rates == pytest.approx([PEAK, 0.0, PEAK / 2, PEAK])
