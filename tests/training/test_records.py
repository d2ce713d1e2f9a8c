"""The records of ``functron train``: positions in the data, and layers where asked for."""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections import Counter

import numpy as np
import pytest

from functron.cli.main import main
from functron.data import Blend, IndexedWriter, Mixture, TextWindows
from functron.data.blend import GreedyMixture
from functron.training import data, run_folder
from functron.training import records as report
from functron.training.config import load

SEQ, BATCH = 16, 4
SMALL = [
    "--seq", "16", "--global-batch", "4", "--gpt.num-layers", "2", "--gpt.embed-dim", "16",
    "--gpt.num-heads", "2", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "16",
    "--gpt.vocab-size", "64", "--learning-rate.total-steps", "6", "--log-layers-every", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Two files of tokens, of 12 and of 5 samples."""
    folder, rng = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    found = []
    for name, samples in (("a", 12), ("b", 5)):
        found.append(folder / name)
        with IndexedWriter(found[-1], np.uint16) as writer:
            writer.add(rng.integers(0, 64, samples * SEQ + 1))
    return found


@pytest.fixture(scope="module")
def whole(prefixes, tmp_path_factory):
    """A run of 6 steps on a blend, that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert (
        train(*SMALL, "--data", blend(prefixes), "--steps", 6, "--save-every", 3, "--out", out) == 0
    )
    return out


def blend(prefixes) -> str:
    return f"0.25 {prefixes[0]} 0.75 {prefixes[1]}"


def train(*arguments) -> int:
    return main(["train", *map(str, arguments)])


def test_every_record_says_where_the_data_is(whole, prefixes):
    records = run_folder.records(whole)
    sources, _ = Mixture([0.25, 0.75]).at(np.arange(6 * BATCH))
    for index, record in enumerate(records):
        seen = Counter(sources[: BATCH * (index + 1)].tolist())  # one after another
        assert record["step"] == index + 1
        assert record["samples"] == BATCH * (index + 1)
        assert record["tokens"] == SEQ * record["samples"]
        assert record["lr"] > 0
        assert record["sources"] == {
            str(path): {"samples": seen[i], "epochs": pytest.approx(seen[i] / size)}
            for i, (path, size) in enumerate(zip(prefixes, (12, 5), strict=True))
        }
    assert records[-1]["sources"][str(prefixes[1])]["epochs"] == pytest.approx(18 / 5)


def test_layers_are_in_the_records_that_were_asked_for(whole):
    records = run_folder.records(whole)
    assert [record["step"] for record in records if "layers" in record] == [1, 3, 6]
    for record in records:
        if "layers" not in record:
            continue
        layers = record["layers"]
        assert list(layers) == ["embed", "norm", "blocks/0", "blocks/1", "unembed"]
        assert set(layers["blocks/1"]) == {"param_norm", "grad_norm", "activation_rms"}
        assert set(layers["unembed"]) == {"param_norm", "grad_norm"}
        total = math.sqrt(sum(entry["grad_norm"] ** 2 for entry in layers.values()))
        assert total == pytest.approx(record["grad_norm"], rel=1e-5)


def test_a_run_that_goes_on_says_the_same(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "6")
    assert train("--out", run, "--resume") == 0
    names = ("step", "loss", "lr", "tokens", "samples", "sources", "layers")
    got, want = (
        [{name: record.get(name) for name in names} for record in run_folder.records(folder)]
        for folder in (run, whole)
    )
    assert got == want


@pytest.fixture(scope="module")
def before(prefixes, tmp_path_factory):
    """A run of 6 steps on a blend, as runs were that began before orders had versions."""
    out, (a, b) = tmp_path_factory.mktemp("before") / "run", prefixes
    given = ["--data", f"1 {a} 2 {b} 7 {a}", "--steps", 6, "--save-every", 3]
    assert train(*SMALL, *given, "--blend-order", 1, "--out", out) == 0
    config = out / run_folder.CONFIG
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("blend_order")))
    return out


def test_a_run_keeps_the_order_of_its_blend(before, prefixes, tmp_path, capsys):
    own, (a, b) = tmp_path / "own.toml", prefixes
    own.write_text(f'data = "1 {a} 2 {b} 7 {a}"\n')
    ways = ([], ["--config", own, *SMALL], ["--mesh", "dp=2"], ["--config", before / "config.toml"])
    for way in ways:
        run = tmp_path / f"run{ways.index(way)}"
        shutil.copytree(before, run)
        shutil.rmtree(run / "checkpoints" / "6")
        assert train("--out", run, "--resume", "auto", "--save-every", 3, "--steps", 6, *way) == 0
        assert load(run / run_folder.CONFIG).data.blend_order == 1
        assert "blend_order = 1" in (run / run_folder.CONFIG).read_text()
        got, want = map(run_folder.records, (run, before))
        for name in ("sources", "samples", "batch"):
            assert [x[name] for x in got] == [x[name] for x in want]
        assert [x["loss"] for x in got] == pytest.approx([x["loss"] for x in want], rel=1e-5)
    sources, _ = GreedyMixture([1, 2, 7]).at(np.arange(6 * BATCH))
    for step, record in enumerate(run_folder.records(before), 1):
        assert record["sources"][str(b)]["samples"] == (sources[: step * BATCH] == 1).sum()
    capsys.readouterr()
    assert train("--out", run, "--resume", "--steps", 7, "--blend-order", 2) == 2
    assert "blend_order: got 2; wanted 1, as in the run" in capsys.readouterr().err


def test_a_run_that_begins_records_the_newest_order(whole, before, tmp_path, capsys):
    assert "blend_order = 2" in (whole / run_folder.CONFIG).read_text()
    own, run = tmp_path / "config.toml", tmp_path / "runs"
    own.write_text(
        f'data = "{load(before / run_folder.CONFIG).data.path}"\n'
    )  # a user's, of no run
    assert train("--config", own, *SMALL, "--steps", 6, "--out", run) == 0
    assert load(run / run_folder.CONFIG).data.blend_order == 2
    hashes = [[x["batch"] for x in run_folder.records(folder)] for folder in (run, before)]
    assert hashes[0] != hashes[1]
    capsys.readouterr()
    assert train(*SMALL, "--steps", 1, "--blend-order", 1, "--out", tmp_path / "none") == 2
    assert "blend_order: got 1, which has no effect; wanted a blend" in capsys.readouterr().err


@pytest.mark.distributed
def test_processes_say_what_one_says(whole, prefixes, tmp_path, in_processes):
    out = tmp_path / "run"
    command = ["train", *SMALL, "--data", blend(prefixes), "--steps", 3]
    in_processes(2, *command, "--mesh", "pp=2", "--microbatches", 2, "--out", out)
    got, want = run_folder.records(out), run_folder.records(whole)[:3]
    for a, b in zip(got, want, strict=True):
        assert a["sources"] == b["sources"]
        flat_a, flat_b = (report.flat(record.get("layers", {})) for record in (a, b))
        assert flat_a == pytest.approx(flat_b, rel=1e-4)


def test_batches_that_grow_are_counted(prefixes, tmp_path):
    given = ["--data", blend(prefixes), "--ramp-up", "2 2 4", "--steps", 4, "--out", tmp_path / "x"]
    assert train(*SMALL, *given) == 0
    records = run_folder.records(tmp_path / "x")
    assert [record["samples"] for record in records] == [2, 4, 8, 12]
    for record in records:
        assert sum(row["samples"] for row in record["sources"].values()) == record["samples"]


def test_a_blend_of_a_blend_and_sources_of_one_name():
    text = [TextWindows(argparse.__file__, SEQ, seed=seed) for seed in range(2)]
    both = Blend(text, [1, 1], ["x", "x"])
    assert both.progress(6) == {"x": {"samples": 6, "epochs": 6 / text[0].num_samples}}
    outer = Blend([both, text[0]], [1, 1], ["both", "x"])
    assert outer.progress(2)["both"] == {"samples": 1}


def test_positions_cost_little(whole):
    text = data.open_samples(load(whole / run_folder.CONFIG))
    assert isinstance(text, Blend)
    began = time.perf_counter()
    for step in range(100):
        text.progress(10**12 + step)
    assert time.perf_counter() - began < 1  # some 10 microseconds each


def test_events_are_lines_of_one_write_each(tmp_path):
    path = tmp_path / report.EVENTS
    with report.event_log(path) as write:
        assert not path.exists()
        write("spike", 3, loss=math.inf, parts=[1.0, math.nan])
        with report.event_log(path) as other:
            other("hang", 4, rank=1)
        write("stop", 5)
    found = report.read(path)
    assert [(row["kind"], row["step"], row["rank"]) for row in found] == [
        ("spike", 3, None), ("hang", 4, 1), ("stop", 5, None)
    ]  # fmt: skip
    assert found[0]["loss"] is None
    assert found[0]["parts"] == [1.0, None]
    assert abs(found[0]["time"] - time.time()) < 60
