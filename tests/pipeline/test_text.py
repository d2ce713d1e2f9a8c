"""The text format of schedules: what is written, what may be left out, and its errors."""

from __future__ import annotations

import pytest

from functron.pipeline import Action, Schedule
from functron.pipeline.registry import combined_one_f_one_b, interleaved, one_f_one_b


def test_a_schedule_prints_as_a_line_per_tick():
    assert str(one_f_one_b(2, 2)) == (
        "name: 1f1b\n"
        "microbatches: 2\n"
        "pipe: 0 1\n"
        "\n"
        "# 0   1\n"
        "  F0  .\n"
        "  F1  F0\n"
        "  .   B0\n"
        "  B0  F1\n"
        "  .   B1\n"
        "  B1  .\n"
    )
    lines = str(combined_one_f_one_b(2, 4, 2)).splitlines()
    assert lines[2] == "pipe: 0 1 0.1 1.1"
    assert any(line.split()[1:] == ["F1.1+B0.1"] for line in lines)


def test_headers_may_be_left_out():
    schedule = Schedule.parse("F0 .  # start\n\n# a comment\nF1 F0\n . B0\nB0 F1\n. B1\nB1 .")
    assert schedule.table == one_f_one_b(2, 2).table
    assert (schedule.name, schedule.num_microbatches) == ("table", 2)
    assert schedule.pipes == (((0, 0), (1, 0)),)
    named = Schedule.parse("name: mine: the second\nmicrobatches: 1\nF0")
    assert (named.name, named.num_ranks) == ("mine: the second", 1)


def test_several_pipes():
    schedule = Schedule.parse("pipe: 0 1\npipe: 1.1 0.1\nF0 F1.1\nF1.1 F0")
    assert schedule.pipes == (((0, 0), (1, 0)), ((1, 1), (0, 1)))
    assert schedule.table[1] == ((Action("F", 1, 1),), (Action("F", 0),))
    assert Schedule.parse(str(schedule)) == schedule


def test_files(tmp_path):
    schedule = interleaved(2, 4)
    path = tmp_path / "my table.txt"
    schedule.save(path)
    assert Schedule.load(path) == schedule
    path.write_text("F0 .\n. F0\n")
    assert Schedule.load(path).name == "my table"


def test_errors_name_every_line_and_cell():
    text = "nam: x\nmicrobatches: two\npipe: 0 1 one\nF0 .\nF1 F0 .\n. G0\nF2.1 F1+\n"
    with pytest.raises(ValueError, match="this text is no schedule") as caught:
        Schedule.parse(text)
    message = str(caught.value)
    for expected in [
        "line 1: got nam; wanted a header name, microbatches or pipe; fix: did you mean 'name'?",
        "line 2: got microbatches: two; wanted a positive number",
        "line 3, stage 2: got 'one'; wanted a rank, or rank.chunk; fix: write such as 0 1 1.1 0.1",
        "line 5: got 3 cells; wanted 2, one per rank; fix: write a dot for a rank that does nothing",
        "line 6, rank 1: got 'G0'; wanted an action such as F3, B3, I3, W3 or F3.1",
        "line 7, rank 0: got F2.1; wanted a chunk of rank 0: [0]; fix: add the stage to a header",
        "line 7, rank 1: got 'F1+'; wanted an action such as",
    ]:
        assert expected in message
    assert message.count("\n") == 7
    for text, expected in [
        ("", "table: got no line of cells"),
        ("name: a\nname: b\nF0", "line 2: got a second name: b; wanted one; fix: delete it"),
        ("microbatches: 0\nF0", "line 1: got microbatches: 0; wanted a positive number"),
        ("pipe:\nF0", "line 2: got 1 cells; wanted 0"),
    ]:
        with pytest.raises(ValueError, match="this text is no schedule") as caught:
            Schedule.parse(text)
        assert expected in str(caught.value)
