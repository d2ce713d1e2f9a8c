"""Numbers that are not as they should be: found, written down, and answered as the policy has it."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from functron import checkpoint, tree
from functron.apps.guard.anomalies import AnomalyConfig, Detector, Guard, with_factors
from functron.apps.guard.faults import Corrupt, inject
from functron.cli.main import main
from functron.data.sampling import shuffled
from functron.spmd import Mesh
from functron.training import records, run_folder
from functron.training.config import configure, load
from functron.training.run import prepare
from functron.training.train import train
from tests.training.test_ramp_up import RUN, changed

SMALL = [
    "--seq", "16", "--global-batch", "8", "--gpt.num-layers", "2", "--gpt.embed-dim", "16",
    "--gpt.num-heads", "2", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "16",
    "--learning-rate.name", "constant", "--learning-rate.peak", "3e-2",
]  # fmt: skip
STEPS = 24
FOUND = [
    "--anomalies.window",
    "12",
    "--anomalies.minimum",
    "6",
    "--anomalies.threshold",
    "6",
]
MOST = ["--anomalies.most", "9"]


def run(*arguments) -> int:
    return main(["train", *SMALL, *map(str, arguments)])


def losses(folder) -> list[float]:
    return [record["loss"] for record in run_folder.records(folder)]


def events(folder, *kinds: str) -> list[dict]:
    found = records.read(folder / records.EVENTS)
    return [event for event in found if not kinds or event["kind"] in kinds]


def same_end(a, b) -> None:
    ends = [checkpoint.restore(folder / "checkpoints" / str(STEPS)) for folder in (a, b)]
    for path, x, y in zip(
        tree.paths(ends[0]["params"]), *(tree.leaves(e["params"]) for e in ends), strict=True
    ):
        assert torch.equal(x, y), path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text that is easy to learn, but for a few samples of noise."""
    file = tmp_path_factory.mktemp("text") / "text"
    letters = [b"abcd"[i % 4] for i in range(16 * 400)]
    rng = random.Random(0)
    # three samples of step 19, and three of step 23
    for place in shuffled(np.array([144, 145, 146, 176, 177, 178]), 400, 0).tolist():
        letters[16 * place : 16 * place + 16] = [rng.randrange(256) for _ in range(16)]
    file.write_bytes(bytes(letters))
    return file


@pytest.fixture(scope="module")
def rolled(text, tmp_path_factory):
    """A run that went back at its spikes."""
    out = tmp_path_factory.mktemp("rolled") / "run"
    policy = ["--anomalies.on-spike", "rollback", *FOUND, *MOST, "--save-every", 4]
    assert run("--data", text, "--steps", STEPS, "--out", out, *policy) == 0
    return out


# --- what an anomaly is


def record(step: int, loss: float | None = 1.0, norm: float | None = 1.0) -> dict:
    return {"step": step, "loss": loss, "grad_norm": norm}


def test_a_spike_is_far_above_the_median_by_the_usual_distance():
    config = AnomalyConfig(window=50, minimum=10, threshold=5.0)
    rng = random.Random(1)
    past = [rng.gauss(3.0, 0.1) for _ in range(50)]
    middle = statistics.median(past)
    usual = 1.4826 * statistics.median(abs(x - middle) for x in past)
    for score, found in ((4.9, False), (5.1, True), (-9.0, False)):
        detector = Detector(config, [record(i + 1, x) for i, x in enumerate(past)])
        anomaly = detector.find(record(51, middle + score * usual))
        assert (anomaly is not None) == found
        if anomaly is not None:
            assert (anomaly.kind, anomaly.metric, anomaly.action) == ("spike", "loss", "record")
            assert anomaly.score == pytest.approx(score)


def test_the_first_steps_are_no_spikes_and_what_is_not_finite_is_found_at_once():
    detector = Detector(AnomalyConfig(minimum=5, window=5))
    assert [detector.find(record(i, 10.0**i)) for i in range(1, 6)] == [None] * 5
    anomaly = Detector(AnomalyConfig()).find(record(1, 1.0, math.nan))
    assert anomaly is not None
    assert (anomaly.kind, anomaly.metric) == ("nonfinite", "grad_norm")


def test_the_limit_of_a_step_needs_no_number_of_the_step_before():
    config = AnomalyConfig(window=8, minimum=4, threshold=3.0, on_spike="skip")
    detector, late = Detector(config), []
    for step in range(1, 12):
        late.append(detector.limit())
        detector.find(record(step, 1.0, 2.0 if step < 8 else 1e6))
    assert late[:5] == [math.inf] * 5  # four are known from the sixth step on
    assert late[5:9] == [pytest.approx(2.0 * math.exp(3 * 0.05))] * 4


def test_overflows_of_a_scaled_loss_are_no_anomalies():
    seen: list = []
    make = lambda **flags: Guard(
        AnomalyConfig(), lambda *a, **k: seen.append(a), lambda s: {}, **flags
    )
    assert make(overflows=True).observe(record(1, math.inf, math.inf)) is None
    assert make(skips=True).observe(record(1, 1.0, math.inf)) is None
    assert seen == []
    assert make(skips=True).observe(record(1, math.nan, math.inf)) is not None


def test_factors_hold_from_their_step_on():
    rate = with_factors(lambda count: 2.0, ((3, 0.5), (5, 0.1)))
    assert [rate(i) for i in range(7)] == pytest.approx([2, 2, 2, 1, 1, 0.1, 0.1])
    assert [float(rate(torch.tensor(i))) for i in range(7)] == pytest.approx(
        [rate(i) for i in range(7)]
    )


def test_settings_that_make_no_sense_are_all_named(text, tmp_path, capsys):
    wrong = [
        "window=2",
        "threshold=0.0",
        "rate-factor=2.0",
        "skipped-samples=8:4",
        "rate-factors=x",
    ]
    given = [word for each in wrong for word in (f"--anomalies.{each}",)]
    assert run("--data", text, "--out", tmp_path / "run", *given) == 2
    said = capsys.readouterr().err
    for each in wrong:
        assert f"anomalies.{each.partition('=')[0].replace('-', '_')}: got" in said


# --- what is done about it


def test_a_rollback_leaves_a_run_that_never_saw_the_samples(rolled, text, tmp_path):
    found = events(rolled, "rollback")
    assert found
    assert all(event["to"] < event["step"] for event in found)
    config = load(rolled / "config.toml")
    assert config.anomalies.skipped_samples == found[-1]["skipped"]
    plain = tmp_path / "plain"
    skipped = ["--anomalies.skipped-samples", config.anomalies.skipped_samples]
    assert run("--data", text, "--steps", STEPS, "--out", plain, *skipped) == 0
    assert losses(rolled) == losses(plain)
    assert max(losses(rolled)[10:]) < 2
    same_end(rolled, plain)
    # nothing else is in the records than in those of that run, and the picture shows where
    assert [r["step"] for r in run_folder.records(rolled)] == list(range(1, STEPS + 1))
    assert "rollback" in (rolled / "loss.svg").read_text()


def test_a_run_that_goes_on_leaves_out_the_same_samples(rolled, text, tmp_path, capsys):
    cut = tmp_path / "cut"
    shutil.copytree(rolled, cut)
    for step in (20, 24):
        shutil.rmtree(cut / "checkpoints" / str(step))
    assert main(["train", "--out", str(cut), "--resume"]) == 0
    assert losses(cut) == losses(rolled)
    capsys.readouterr()
    other = ["--anomalies.skipped-samples", "0:8"]
    shutil.rmtree(cut / "checkpoints" / "24")
    assert main(["train", "--out", str(cut), "--resume", *other]) == 2
    assert "anomalies.skipped_samples: got 0:8; wanted" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.distributed
def test_ranks_go_back_together(rolled, text, tmp_path, in_processes):
    out = tmp_path / "run"
    policy = ["--anomalies.on-spike", "rollback", *FOUND, *MOST, "--save-every", 4]
    options = ["--data", text, "--steps", STEPS, "--out", out, "--mesh", "dp=2"]
    in_processes(2, "train", *SMALL, *options, *policy)
    skipped = [load(folder / "config.toml").anomalies.skipped_samples for folder in (out, rolled)]
    assert skipped[0] == skipped[1]
    torch.testing.assert_close(losses(out), losses(rolled), rtol=1e-4, atol=1e-4)


def test_spikes_are_written_down_with_their_samples(text, tmp_path):
    out = tmp_path / "run"
    assert run("--data", text, "--steps", STEPS, "--out", out, *FOUND) == 0
    found = events(out, "spike")
    assert found
    step = found[0]["step"]
    assert found[0]["samples"] == [8 * (step - 1), 8 * step]
    assert found[0]["sources"] == [str(text)]
    assert found[0]["value"] == run_folder.records(out)[step - 1][found[0]["metric"]]
    assert len(losses(out)) == STEPS


def test_stop_ends_the_run_and_names_the_spike(text, tmp_path, capsys):
    out = tmp_path / "run"
    policy = ["--anomalies.on-spike", "stop", *FOUND]
    assert run("--data", text, "--steps", STEPS, "--out", out, *policy) == 1
    said = capsys.readouterr().err
    step = events(out, "spike")[0]["step"]
    assert f"step {step}: " in said
    assert "usual distances above the median" in said
    assert len(losses(out)) == step


def test_a_loss_that_is_not_finite_is_a_message(tmp_path, capsys):
    small = ["--model", "llama3-tiny", "--seq", "32", "--steps", "9", "--out", str(tmp_path / "r")]
    rates = ["--learning-rate.peak", "1e30", "--optimizer.clip-norm", "0"]
    assert main(["train", *small, *rates]) == 1
    shown = capsys.readouterr().err
    assert "wanted a finite number; fix: lower the learning rate" in shown
    assert "Traceback" not in shown


def test_one_too_many_stops(text, tmp_path, capsys):
    out = tmp_path / "run"
    policy = ["--anomalies.on-spike", "lower-rate", *FOUND[:4], "--anomalies.most", 0]
    assert run("--data", text, "--steps", STEPS, "--out", out, *policy) == 1
    assert "after 0 times lower-rate" in capsys.readouterr().err


def test_a_lower_rate_stays_lower(text, tmp_path):
    out, again = tmp_path / "run", tmp_path / "again"
    policy = ["--anomalies.on-spike", "lower-rate", *FOUND, *MOST]
    assert run("--data", text, "--steps", STEPS, "--out", out, *policy) == 0
    found = events(out, "lower-rate")
    rates = [r["lr"] for r in run_folder.records(out)]
    for step, rate in enumerate(rates):
        assert rate == pytest.approx(3e-2 * 0.5 ** sum(e["step"] <= step for e in found))
    assert found
    factors = ["--anomalies.rate-factors", load(out / "config.toml").anomalies.rate_factors]
    assert run("--data", text, "--steps", STEPS, "--out", again, *factors) == 0
    assert losses(again) == losses(out)
    same_end(again, out)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.full),  # as one rank of the next
        ["--mesh", "dp=2,tp=2", "--zero", "1"],
        pytest.param(["--compile"], marks=pytest.mark.full),
    ],
)
def test_skip_leaves_out_the_update(options, text, tmp_path):
    out = tmp_path / "run"
    policy = ["--anomalies.on-spike", "skip", *FOUND, "--save-every", 1, *options]
    assert run("--data", text, "--steps", STEPS, "--out", out, *policy) == 0
    found = events(out, "skip")
    assert found
    for event in found:
        assert event["grad_norm"] > event["limit"]
        both = [checkpoint.restore(out / "checkpoints" / str(event["step"] - i)) for i in (1, 0)]
        for name in ("params", "opt_state"):
            pairs = zip(
                tree.paths(both[0][name]), *(tree.leaves(b[name]) for b in both), strict=True
            )
            changed = [path for path, a, b in pairs if not torch.equal(a, b)]
            own = ["left_out"] if name == "opt_state" else []
            assert [path for path in changed if path != "limit"] == own
    last = checkpoint.restore(out / "checkpoints" / str(STEPS))
    assert int(last["opt_state"]["left_out"]) == len(found)


def test_a_skipping_run_begins_where_another_went_on(text, tmp_path):
    out = tmp_path / "run"
    assert run("--data", text, "--steps", 4, "--out", out) == 0
    policy = ["--anomalies.on-spike", "skip"]
    assert main(["train", "--out", str(out), "--resume", "--steps", "6", *policy]) == 0
    assert (
        main(
            [
                "train",
                "--out",
                str(out),
                "--resume",
                "--steps",
                "8",
                "--anomalies.on-spike",
                "record",
            ]
        )
        == 0
    )


def test_a_loss_that_is_not_finite_goes_back_too(text, tmp_path):
    small = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 8}
    base = configure(data=str(text), seq=16, global_batch=4, steps=8, save_every=2)
    base = configure(base, gpt=replace(base.gpt, **small))
    faulty = configure(base, anomalies=AnomalyConfig(on_nonfinite="rollback", skip_data=False))
    made = prepare(faulty, Mesh())
    step = inject(made.step, [Corrupt(step=4, leaf="params/embed", element=None)])
    history = train(replace(made, step=step), tmp_path / "run").history
    plain = train(prepare(base, Mesh()), None).history
    assert [r["loss"] for r in history] == [r["loss"] for r in plain]
    assert [e["kind"] for e in events(tmp_path / "run")] == ["nonfinite", "rollback"]
    assert (
        json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])["value"] is None
    )


def test_a_rollback_beyond_the_change_takes_its_steps_with_the_batches_of_now(tmp_path):
    out = tmp_path / "run"
    base = configure(RUN, ramp_up="", global_batch=4, save_every=2)
    train(prepare(configure(base, steps=4), Mesh()), out)
    policy = AnomalyConfig(on_nonfinite="rollback", rollback_steps=2, skip_data=False)
    config = changed(out, global_batch=8, steps=8, anomalies=policy)
    made = prepare(config, Mesh(), "cpu", run_folder.newest(out))
    fault = Corrupt(step=5, leaf="params/embed", element=None)
    train(replace(made, step=inject(made.step, [fault])), out)
    assert load(out / run_folder.CONFIG).data.earlier_batches == "2x4"
    samples = [record["samples"] for record in run_folder.records(out)]
    assert samples == [4, 8, 16, 24, 32, 40, 48, 56]


def test_a_step_without_targets_is_no_part_of_what_is_usual():
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
