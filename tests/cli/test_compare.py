"""``functron compare``: run folders made by hand, with what must come out worked out by hand."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import functron as ft
from functron.cli.main import main
from functron.training import records, run_folder
from functron.training.config import TrainConfig, configure, load

SVG = "{http://www.w3.org/2000/svg}"


def make_run(folder, config, records):
    folder.mkdir(parents=True)
    run_folder.write_config(folder, config)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def record(step, loss, seconds, tokens, speed, memory, **more):
    return {
        "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens": tokens,
        "tokens_per_second": speed, "step_seconds": seconds, "mfu": None,
        "peak_memory_bytes": memory, **more,
    }  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    """Two runs of 4 and 3 steps, of which the second has twice the batch and held-out sets."""
    base = configure(seed=3)
    first = make_run(
        tmp_path / "dense", base,
        [
            record(1, 5.5, 9.0, 1024, 100.0, 10), record(2, 4.0, 1.0, 2048, 1000.0, 30),
            record(3, None, 2.0, 3072, 500.0, 20), record(4, 4.25, 3.0, 4096, 900.0, 20),
        ],
    )  # fmt: skip
    rate = replace(base.learning_rate, peak=0.01)
    wide = configure(base, global_batch=16, mesh="dp=2", learning_rate=rate)
    held_out = [{"wiki": {"loss": loss, "perplexity": 2.0}} for loss in (3.5, 3.25, 3.75)]
    second = make_run(
        tmp_path / "wide", wide,
        [
            record(1, 5.25, 4.0, 2048, 512.0, None, eval=held_out[0]),
            record(2, 3.5, 2.0, 4096, 1024.0, None, eval=held_out[1]),
            record(3, 3.0, 1.0, 6144, 2048.0, None, eval=held_out[2]),
        ],
    )  # fmt: skip
    return first, second


def test_settings_that_differ_and_numbers(runs):
    found = ft.training.compare(runs)
    assert found.runs == ("dense", "wide")
    assert found.settings == {
        "parallelism.mesh": ("", "dp=2"), "data.global_batch": (8, 16), "learning_rate.peak": (0.002, 0.01),
    }  # fmt: skip
    assert found.results == {
        "steps": (4, 3), "tokens": (4096, 6144), "first loss": (5.5, 5.25), "last loss": (4.25, 3.0),
        "best loss": (4.0, 3.0), "best step": (2, 3), "wiki loss": (None, 3.75),
        "wiki best loss": (None, 3.25),
        "tokens/s": (700.0, 1024.0),  # medians of 100 500 900 1000, and of 512 1024 2048
        "step seconds": (2.5, 2.0),  # of 1 2 3 9, and of 1 2 4
        "peak memory bytes": (30, None),
    }  # fmt: skip
    # steps of other sizes: over tokens, without the loss that is not finite
    assert found.x_label == "tokens"
    assert found.curves["dense"] == [(1024, 5.5), (2048, 4.0), (4096, 4.25)]
    same = ft.training.compare([runs[0], make_run(runs[0].parent / "b", configure(seed=4), [])])
    assert same.settings == {"seed": (3, 4)}
    assert same.x_label == "step"
    assert same.results["last loss"] == (4.25, None)
    assert same.results["steps"] == (4, 0)


@pytest.mark.parametrize("loss", [0.0, None], ids=["old", "new"])
def test_a_step_without_targets_has_no_loss(tmp_path, loss):
    """Its record has 0 in runs from before it had None; neither is the best loss or the last."""
    empty = [
        record(n, loss, 1.0, n, 1.0, None, targets=0, next_token_loss=loss) | {"grad_norm": loss}
        for n in (1, 4)
    ]
    full = [record(2, 5.0, 1.0, 2, 1.0, None), record(3, 4.5, 1.0, 3, 1.0, None)]
    rows = [empty[0], *full, empty[1]]
    run = make_run(tmp_path / "a", TrainConfig(), rows)
    other = make_run(tmp_path / "b", configure(seed=1), full)
    found = ft.training.compare([run, other])
    for name in ("first loss", "last loss", "best loss", "best step"):
        assert found.results[name][0] == found.results[name][1], name
    assert found.curves["a"] == [(2, 5.0), (3, 4.5)]
    assert "0.0000" not in str(found)
    with records.loss_picture(tmp_path / "loss.svg", records.read(run / "metrics.jsonl")):
        pass
    with records.loss_picture(tmp_path / "full.svg", full):
        pass
    lines = [
        re.findall(r'points="([^"]*)"', (tmp_path / f"{n}.svg").read_text())
        for n in ("loss", "full")
    ]
    assert [[len(line.split()) for line in found] for found in lines] == [[2], [2]]


def test_the_command_prints_a_table_and_draws_all_curves(runs, tmp_path, capsys):
    picture = tmp_path / "both.svg"
    assert main(["compare", *map(str, runs), "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert rows[0] == ["dense", "wide"]
    for row in (
        ["parallelism.mesh", "''", "dp=2"],
        ["data.global_batch", "8", "16"],
        ["last loss", "4.2500", "3.0000"],
        ["wiki best loss", "-", "3.2500"],
        ["tokens/s", "700", "1,024"],
        ["step seconds", "2.5", "2"],
    ):
        assert row in rows
    assert str(picture) in rows[-1][-1]
    root = ET.parse(picture).getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"dense", "wide", "tokens"} <= {*texts}
    drawn = [line.get("points") for line in root.iter(f"{SVG}polyline") if line.get("points")]
    assert [len(points.split()) for points in drawn] == [3, 3]

    assert main(["compare", *map(str, runs), "--svg", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"]["best step"] == [2, 3]
    assert found["settings"]["parallelism.mesh"] == ["", "dp=2"]


def test_folders_of_one_name_go_by_their_paths(runs, tmp_path):
    other = make_run(tmp_path / "more" / "dense", configure(seed=3), [])
    found = ft.training.compare([runs[0], other])
    assert found.runs == (str(runs[0]), str(other))
    assert not found.settings


def test_mistakes_are_messages(runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    broken = make_run(tmp_path / "broken", TrainConfig(), [{"step": 1}, {"step": 2}])
    unread = make_run(tmp_path / "unread", TrainConfig(), [])
    (unread / "config.toml").write_text("steps = = 3\n")
    for arguments, messages in [
        ([runs[0]], ["wanted at least two run folders"]),
        (
            [tmp_path / "empty", tmp_path / "wied", runs[0], runs[0]],
            ["empty: got a folder where no run is; wanted a run folder", "wied: got no such folder",
             f"fix: name {runs[1]}, which is one", "dense: got the same run twice"],
        ),
        ([runs[0], broken], ["metrics.jsonl: got line 1 without them; wanted step, loss and tokens"]),
        ([runs[0], unread], ["unread/config.toml: got ", "wanted a readable TOML file"]),
        ([*runs, "--svg", tmp_path / "no" / "a.svg"], ["got No such file or directory", "--svg FILE"]),
    ]:  # fmt: skip
        assert main(["compare", *map(str, arguments)]) == 2
        shown = capsys.readouterr().err
        assert "Traceback" not in shown
        for message in messages:
            assert message in shown


def test_it_needs_no_torch_and_reads_real_runs(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 200)
    small = ["--steps", "2", "--seq", "16", "--gpt.num-layers", "1", "--gpt.embed-dim", "32"]
    data = ["--data", str(tmp_path / "a.txt"), "--eval-data", f"a={tmp_path / 'a.txt'}"]
    out = ["--eval-every", "2", "--out", str(tmp_path / "0")]
    assert main(["train", *small, *data, *out]) == 0
    config = configure(load(tmp_path / "0" / "config.toml"), seed=1)
    make_run(tmp_path / "1", config, run_folder.records(tmp_path / "0"))
    command = ["-m", "functron", "compare", str(tmp_path / "0"), str(tmp_path / "1")]
    command += ["--svg", str(tmp_path / "a.svg"), "--json"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not {"torch", "numpy"} & {x.rpartition("|")[2].strip() for x in done.stderr.splitlines()}
    found = json.loads(done.stdout)
    assert found["settings"] == {"seed": [0, 1]}
    assert found["results"]["tokens"] == [2 * 8 * 16] * 2
    for name in ("last loss", "a loss", "tokens/s", "step seconds"):
        assert all(math.isfinite(value) for value in found["results"][name])
