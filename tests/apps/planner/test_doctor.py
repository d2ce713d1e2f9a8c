"""``functron doctor --mesh``: the measurements of every rank, and mistakes as messages."""

from __future__ import annotations

import statistics

import pytest

from functron.apps.planner import hardware
from functron.apps.planner.measurements import Measurement
from functron.cli import doctor
from functron.cli.main import main


@pytest.mark.distributed
def test_ranks_of_a_mesh_are_measured(tmp_path, in_processes):
    """Real processes: every rank, axis and collective, and the bytes and picture of each."""
    out = tmp_path / "measured" / "rates.json"
    out.parent.mkdir()
    words = ["--mesh", "dp=2,pp=1", "--largest-bytes", "16384", "--out", str(out)]
    done = in_processes(2, "doctor", *words)
    found = Measurement.load(out)
    assert [one.rank for one in found.ranks] == [0, 1]
    assert {"float32 matmul", "memory", "operations", "disk write"} <= found.ranks[0].rates.keys()
    assert all(rate > 0 for one in found.ranks for rate in one.rates.values())
    ops = ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute")
    assert [(link.axis, link.op) for link in found.links] == [("dp", op) for op in ops]
    assert all(link.bytes == (1024, 4096, 16384) for link in found.links)
    assert all(second > 0 for link in found.links for row in link.seconds for second in row)
    assert out.with_suffix(".svg").read_text().startswith("<svg")
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "rates.json",
        "rates.svg",
        "rates.toml",
    ]
    machine = hardware(out.with_suffix(".toml"))
    assert machine.domain.gpus == 2
    assert machine.domain.bytes_per_second == pytest.approx(
        statistics.median(link.bytes_per_second for link in found.links[:3])
    )
    assert "no rank is slow" in done.stdout


def test_it_starts_the_processes_of_a_mesh(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "launch", lambda nproc, words: asked.append((nproc, words)) or 7)
    words = ["doctor", "--mesh", "dp=2", "--nproc", "2"]
    assert main(words) == 7
    assert asked == [(2, ["-m", "functron", *words])]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--mesh", "dp=2"], "nproc: got 0 for a mesh of 2; wanted a process for each rank"),
        (["--mesh", "dp=2", "--nproc", "3"], "nproc: got 3 for a mesh of 2"),
        (["--mesh", "dp=x", "--nproc", "2"], "dp=x"),
    ],
)
def test_a_mesh_without_its_processes_is_refused(words, reason, capsys):
    assert main(["doctor", *words]) == 2
    assert reason in capsys.readouterr().err
