"""``functron migrate``: from a launch line to a run, and mistakes as messages."""

from __future__ import annotations

import json

import pytest

from functron.cli.main import main
from functron.training.config import load
from functron.training.run_folder import records

LINE = """\
NUM_LAYERS=${NUM_LAYERS:-2}
ARGS=(
    --num-layers $NUM_LAYERS --hidden-size 32 --num-attention-heads 4 --swiglu # small
    --seq-length 16 --max-position-embeddings 16 --position-embedding-type rope
    --normalization RMSNorm --disable-bias-linear --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-2 --min-lr 1e-3
    --lr-warmup-iters 1 --mock-data --vocab-size 63 --tokenizer-type NullTokenizer
    --save $1 --save-interval 1 --eval-interval 2 --eval-iters 1
)
torchrun --nproc_per_node 2 pretrain_gpt.py ${ARGS[@]} --tensorboard-dir $2
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "launch.sh"
    file.write_text(LINE)
    return file


def test_a_migrated_line_trains(script, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    file, run = tmp_path / "made.toml", tmp_path / "run"
    given = ["--env", f"1={run}", "2=logs", "--out", str(file), "--processes", "2"]
    assert main(["migrate", str(script), *given]) == 0
    told = capsys.readouterr().out
    assert "--hidden-size" in told
    assert "gpt.embed_dim = 32" in told
    assert f"functron train --config {file} --dry-run" in told
    assert "1 argument has no counterpart" in told  # attention-dropout
    assert load(file).parallelism.mesh == "dp=2"
    assert main(["train", "--config", str(file), "--device", "cpu"]) == 0
    rows = records(run)
    # a batch of 8 on two ranks; a warm-up of one step, then half of the way to 1e-3
    assert [row["lr"] for row in rows] == pytest.approx([0.0, 1e-2])
    assert rows[1]["eval"]["validation"]["loss"] > 0
    names = {path.name.partition(".")[0] for path in (run / "tensorboard").iterdir()}
    assert names == {"events"}
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    (last,) = [one for one in events.Scalars("lm loss vs samples") if one.step == 16]
    assert last.value == pytest.approx(rows[1]["loss"])


def test_mistakes_are_messages(script, tmp_path, capsys):
    out = ["--out", str(tmp_path / "made.toml")]
    assert main(["migrate", str(script), *out]) == 2
    assert "--env 1=VALUE" in capsys.readouterr().err
    assert main(["migrate", str(script), "--env", "1", *out]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err
    assert main(["migrate", str(script), "--env", "1=x", "--strict", *out]) == 2
    assert "attention-dropout: got 0.1" in capsys.readouterr().err
    assert main(["migrate", str(tmp_path / "none.sh"), *out]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["migrate", str(script), "--env", "1=x", "--with", "sed=1", *out]) == 2
    assert "did you mean 'seed'?" in capsys.readouterr().err
    assert not (tmp_path / "made.toml").exists()
    (tmp_path / "made.toml").touch()
    assert main(["migrate", str(script), "--env", "1=x", *out]) == 2
    assert "a file that is there" in capsys.readouterr().err


def test_json_has_every_row(script, tmp_path, capsys):
    given = [
        "--env",
        "1=x",
        "--with",
        "bf16",
        "seed=5",
        "--out",
        str(tmp_path / "made.toml"),
        "--json",
    ]
    assert main(["migrate", str(script), *given]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["--bf16"] == {
        "kind": "taken", "name": "--bf16", "value": "", "ours": "precision = bf16", "why": "",
    }  # fmt: skip
    assert (rows["--seed"]["value"], rows["--seed"]["ours"]) == ("5", "seed = 5")
    assert rows["attention-dropout"]["kind"] == "not supported"


def test_help_calls_options_as_they_are_given(capsys):
    assert main(["migrate", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--with NAME=VALUE" in said
    assert "--extra" not in said
