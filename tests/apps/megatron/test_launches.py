"""Names of Megatron-LM's scalars, and what it prints, beside our records.

The names are those that `training_log` of its training.py writes, listed here by hand; the lines
of the log have the format of its version 0.16.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from functron.apps.megatron.launches import make_log_reader, name_records, read_log
from functron.data.sampling import RampUp
from functron.training import records, run_folder
from functron.training.config import configure
from functron.training.records import compare
from tests.training.test_reporters import scalars, taken

RECORD = {
    "step": 3, "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens": 96, "tokens_per_second": 10.0,
    "step_seconds": 0.25, "mfu": None, "peak_memory_bytes": 1024,
    "eval": {"wiki": {"loss": 2.0, "perplexity": 7.4}},
}  # fmt: skip


def test_names_are_megatrons():
    """Batches of 4, 4 and 6 samples: the third step ends after 14."""
    ramp = RampUp(4, 2, 8, 6)
    rows = list(name_records(ramp.first_sample)(RECORD))
    at_step = {name: value for name, value, at in rows if at == 3}
    expected = {
        "lm loss": 2.5, "learning-rate": 1e-3, "grad-norm": 0.5, "batch-size": 6,
        "iteration-time": 0.25, "mem-max-allocated-bytes": 1024, "samples vs steps": 14,
        "lm loss validation": 2.0, "lm loss validation ppl": 7.4,
    }  # fmt: skip
    assert expected.items() <= at_step.items()
    assert at_step["tokens"] == 96  # what it has no name for keeps ours
    assert not {"loss", "lr", "grad_norm", "eval"} & at_step.keys()
    over = {name: value for name, value, at in rows if at == 14}
    assert over == {
        "lm loss vs samples": 2.5, "learning-rate vs samples": 1e-3, "grad-norm vs samples": 0.5,
        "batch-size vs samples": 6, "lm loss validation vs samples": 2.0,
        "lm loss validation ppl vs samples": 7.4,
    }  # fmt: skip
    several = {"a": {"loss": 1.0, "perplexity": 2.7}, "b": {"loss": 2.0, "perplexity": 7.4}}
    with_terms = {**RECORD, "next_token_loss": 2.25, "loss_scale": 8.0, "eval": several}
    named = {name: value for name, value, _ in name_records(ramp.first_sample)(with_terms)}
    assert (named["lm loss"], named["loss"], named["loss-scale"]) == (2.25, 2.5, 8.0)
    assert named["lm loss validation b"] == 2.0


def test_reporters_write_them(tmp_path, monkeypatch):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    named = name_records(lambda steps: 4 * steps)
    with records.tensorboard(tmp_path, named) as write:
        write(RECORD)
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    (scalar,) = events.Scalars("lm loss")
    assert (scalar.step, scalar.value) == (3, 2.5)
    (scalar,) = events.Scalars("learning-rate vs samples")
    assert scalar.step == 12
    logged = []
    run = SimpleNamespace(log=lambda row, step: logged.append((row, step)), finish=lambda: None)
    monkeypatch.setattr(records, "require", lambda package: None)
    monkeypatch.setitem(__import__("sys").modules, "wandb", SimpleNamespace(init=lambda **_: run))
    with records.wandb(tmp_path, {}, named) as write:
        write(RECORD)
    ((row, step),) = logged
    assert (row["lm loss"], row["samples vs steps"], step) == (2.5, 12, 3)
    assert not [name for name in row if name.endswith("vs samples")]


LOG = """\
using world size: 8, data-parallel size: 8
------------------------ arguments ------------------------
  adam_beta2 ...................................... 0.95
  global_batch_size ............................... 4
  lr .............................................. 0.001
  seed ............................................ 7
  seq_length ...................................... 16
  train_iters ..................................... 40
-------------------- end of arguments ---------------------
 [2026-01-01 10:00:00.000000] iteration       10/      40 | consumed samples:           40 | elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-03 | global batch size:     4 | lm loss: 5.500000E+00 | loss scale: 1.0 | grad norm: 1.250 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration       20/      40 | consumed samples:           80 | elapsed time per iteration (ms): 250.0 | throughput per GPU (TFLOP/s/GPU): 1.5 | learning rate: 9.000000E-04 | global batch size:     4 | lm loss: 9.900000E+00 | loss scale: 1.0 | grad norm: nan |
(min, max) time across ranks (ms):
 validation loss at iteration 20 | lm loss value: 4.250000E+00 | lm loss PPL: 7.010541E+01 |
 [2026-01-01 11:00:00.000000] iteration       20/      40 | consumed samples:           80 | elapsed time per iteration (ms): 250.0 | learning rate: 9.000000E-04 | global batch size:     4 | lm loss: 4.500000E+00 | loss scale: 1.0 | grad norm: 0.750 |
7:  iteration       30/      40 | consumed samples:          120 | elapsed time per iteration (ms): 250.0 | learning rate: 8.000000E-04 | global batch size:     4 | loss scale: 1.0 | grad norm: inf |
"""


@pytest.mark.parametrize("loss", [0.0, None], ids=["old", "new"])
def test_a_step_without_targets_has_no_loss(loss, tmp_path):
    """Its record has 0 in runs from before it had None."""
    named = name_records(lambda steps: steps)
    rows = [{"step": 1, "loss": loss, "grad_norm": loss, "tokens": 1, "targets": 0}]
    rows += [{"step": 2, "loss": 5.0, "grad_norm": 1.0, "tokens": 2}]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = [{name: value for name, value, _ in named(row)} for row in records.read(file)]
    found = [(each["lm loss"], each["grad-norm"]) for each in values]
    assert found == [(None, None), (5.0, 1.0)]


def test_tensorboard_keeps_what_is_drawn_over_samples(tmp_path):
    named = name_records(lambda steps: 8 * steps)
    before = taken(1, 2, 3, 4)
    with records.tensorboard(tmp_path, named) as write:
        for record in [*before, *taken(5, 6)]:
            write(record)
    with records.tensorboard(tmp_path, named, 4, before) as write:
        for record in taken(5, 6, 7, loss=100.0):
            write(record)
    losses = [1.0, 2.0, 3.0, 4.0, 105.0, 106.0, 107.0]
    over = list(zip(range(8, 64, 8), losses, strict=True))
    assert sorted(scalars(tmp_path, "lm loss vs samples")) == over
    assert scalars(tmp_path, "lm loss") == list(enumerate(losses, 1))


def test_logs_are_read(tmp_path):
    """The iteration that comes again after a restart counts as it came last."""
    file = tmp_path / "megatron.log"
    file.write_text(LOG)
    settings, rows = read_log(file)
    assert settings == {
        "optimizer.b2": 0.95, "data.global_batch": 4, "learning_rate.peak": 0.001, "seed": 7, "data.seq": 16,
        "steps": 40,
    }  # fmt: skip
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert [row["loss"] for row in rows] == [5.5, 4.5, None]
    assert [row["grad_norm"] for row in rows] == [1.25, 0.75, None]
    assert [row["tokens"] for row in rows] == [640, 1280, 1920]
    assert [row["tokens_per_second"] for row in rows] == [128.0, 256.0, 256.0]
    assert rows[1]["eval"] == {"validation": {"loss": 4.25, "perplexity": 70.10541}}
    assert "eval" not in rows[0]


def test_a_log_is_compared_with_a_run(tmp_path):
    run = tmp_path / "ours"
    run.mkdir()
    run_folder.write_config(run, configure(seed=8, seq=16, global_batch=4, steps=40))
    lines = [
        {"step": s, "loss": loss, "tokens": 64 * s, "tokens_per_second": 64.0, "step_seconds": 1.0}
        for s, loss in ((10, 5.25), (20, 4.0))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = tmp_path / "megatron.log"
    log.write_text(LOG)
    found = compare([run, log], logs=[make_log_reader()])
    assert found.runs == ("ours", "megatron.log")
    # of the settings that the log tells those that differ
    assert found.settings == {"seed": (8, 7), "learning_rate.peak": (0.002, 0.001)}
    assert found.results["last loss"] == (4.0, None)
    assert found.results["best loss"] == (4.0, 4.5)
    assert found.results["validation loss"] == (None, 4.25)
    assert found.results["tokens/s"] == (64.0, 256.0)
    assert found.x_label == "tokens"
    assert found.curves["megatron.log"] == [(640, 5.5), (1280, 4.5)]
    log.write_text("".join(line for line in LOG.splitlines(True) if "seq_length" not in line))
    again = compare([run, log], logs=[make_log_reader()])
    assert (again.x_label, again.results["tokens"]) == ("step", (1280, None))
    assert again.curves["megatron.log"] == [(10, 5.5), (20, 4.5)]
    (tmp_path / "other.txt").write_text("iteration without numbers\n")
    with pytest.raises(ValueError, match="a file of another kind"):
        compare([run, tmp_path / "other.txt"], logs=[make_log_reader()])
