"""`functron schedule`: what it prints and writes, and its mistakes."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from functron.cli.main import main
from functron.cli.plan import ScheduleOptions
from functron.pipeline import NAMES, Schedule, make


def run(*arguments: object) -> int:
    return main(["schedule", *map(str, arguments)])


def test_it_draws_and_counts(capsys, tmp_path):
    picture = tmp_path / "picture.svg"
    assert run("interleaved", "--pp", 2, "--chunks", 2, "--microbatches", 4, "--svg", picture) == 0
    out = capsys.readouterr().out
    schedule = make("interleaved", 2, 4, 2)
    assert out.startswith("interleaved: 2 ranks, 2 chunks each, 4 microbatches\n\nrank 0 │F0")
    assert schedule.simulate().gantt() in out
    assert "bubble            11.1% of the ranks' time" in out  # (p-1)/(vm+p-1) = 1/9
    assert "live activations  5 3:" in out  # 2(p-1-r) + (v-1)p + 1
    assert ET.parse(picture)


def test_tables_can_be_edited_and_given_back(capsys, tmp_path):
    assert run("1f1b", "--pp", 3, "--microbatches", 5, "--table") == 0
    text = capsys.readouterr().out
    assert Schedule.parse(text) == make("1f1b", 3, 5)
    path = tmp_path / "mine.txt"
    path.write_text(text)
    assert run(path) == 0
    assert "1f1b: 3 ranks, 5 microbatches" in capsys.readouterr().out
    assert run(path, "--pp", 2) == 2
    assert "num_ranks: got 2; wanted 3, as in the schedule" in capsys.readouterr().err


def test_mistakes_are_messages(capsys):
    assert run("interleaved", "--pp", 4, "--microbatches", 6) == 2
    assert "take 4 or 8" in capsys.readouterr().err
    assert run("zbw") == 2
    assert "did you mean 'zbv'" in capsys.readouterr().err


def test_help_names_every_schedule():
    listed = " ".join(str(ScheduleOptions.__doc__).split())
    for name in NAMES:
        assert f" {name}," in listed
