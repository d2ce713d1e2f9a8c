"""Schedules by name and by file."""

from __future__ import annotations

import pytest

from functron.pipeline import NAMES, make
from functron.pipeline.registry import forward, interleaved, one_f_one_b


def test_names_make_their_schedules():
    assert {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"} < {
        *NAMES
    }
    for name in NAMES:
        schedule = make(name, 4, 8)
        schedule.validate()
        assert schedule.name == name
        assert (schedule.num_ranks, schedule.num_microbatches) == (4, 8)


def test_chunks():
    assert make("interleaved", 2, 4) == interleaved(2, 4, 2)
    assert make("interleaved", 2, 4, 3) == interleaved(2, 4, 3)
    assert make("interleaved", 2, 4, 2, group_size=4) == interleaved(2, 4, group_size=4)
    assert make("interleaved", 2, 4, group_size=None) == interleaved(2, 4)
    assert make("forward", 2, 4, 2) == forward(2, 4, 2)
    # a schedule that chooses its chunks itself takes no other number
    assert make("zbv", 2, 4, 2) == make("zbv", 2, 4)
    assert make("1f1b", 2, 4, 1) == one_f_one_b(2, 4)
    for name, chunks, wanted in [("zbv", 1, 2), ("dualpipe", 3, 2), ("1f1b", 2, 1)]:
        with pytest.raises(ValueError, match=f"num_chunks: got {chunks}; wanted {wanted}, as in"):
            make(name, 2, 4, chunks)


def test_mistakes():
    with pytest.raises(ValueError, match="got '1f1'; wanted a schedule; fix: did you mean '1f1b'"):
        make("1f1", 2, 4)
    with pytest.raises(ValueError, match="group_sise: got group_sise=3; wanted an option"):
        make("interleaved", 2, 4, group_sise=3)
    with pytest.raises(ValueError, match="group_size: got group_size=3; wanted an option"):
        make("gpipe", 2, 4, group_size=3)
    with pytest.raises(ValueError, match="take 4 or 8"):
        make("interleaved", 4, 7)


def test_files(tmp_path):
    path = tmp_path / "mine.txt"
    one_f_one_b(2, 4).save(path)
    assert make(str(path), 2, 4) == one_f_one_b(2, 4)
    with pytest.raises(
        ValueError,
        match=r"num_ranks: got 3; wanted 2.*\n.*num_microbatches: got 8; wanted 4.*\n.*num_chunks: got 2; wanted 1",
    ):
        make(str(path), 3, 8, 2)
    with pytest.raises(ValueError, match="group_size"):
        make(str(path), 2, 4, group_size=2)
    path.write_text("F0 .\nF1 F0\n. B0\n. F1\n. B1\nB1 .\n")
    with pytest.raises(ValueError, match=r"schedule mine\n.*rank 0: got no B0"):
        make(str(path), 2, 2)
    with pytest.raises(ValueError, match="or the path of a table"):
        make(str(tmp_path / "none.txt"), 2, 2)
