"""Schedules as values: actions, places, ticks and transfers."""

from __future__ import annotations

import pytest

from functron.pipeline import Action, Schedule, Transfer, place


def actions(text: str) -> list[tuple[Action, ...]]:
    """Cells from ``"F0 F1+B0"``."""
    return [tuple(Action.parse(a) for a in cell.split("+")) for cell in text.split()]


ONE_PIPE = (((0, 0), (1, 0)),)
V_PIPE = (((0, 0), (1, 0), (1, 1), (0, 1)),)


def test_actions_print_and_parse():
    assert str(Action("F", 3)) == "F3"
    assert str(Action("W", 12, 1)) == "W12.1"
    assert Action.parse("W12.1") == Action("W", 12, 1)
    assert Action.parse("B0.0") == Action("B", 0)
    with pytest.raises(ValueError, match="wanted one of F B I W"):
        Action.parse("G3")


def test_place_puts_every_action_at_its_earliest_tick():
    # 1F1B on two ranks by hand: rank 1 waits a tick for F0, rank 0 for B0 until rank 1 has done it
    schedule = place("1f1b", ONE_PIPE, 2, [actions("F0 F1 B0 B1"), actions("F0 B0 F1 B1")])
    assert schedule.table == tuple(
        tuple(tuple(actions(cell)[0]) if cell != "." else () for cell in row.split())
        for row in ["F0 .", "F1 F0", ". B0", "B0 F1", ". B1", "B1 ."]
    )
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_ticks) == (2, 2, 6)
    assert schedule.column(0)[2] == (3, Action("B", 0))
    assert schedule.cells(1) == actions("F0 B0 F1 B1")


def test_a_cell_may_use_what_it_makes_itself():
    column = [actions("F0")[0], actions("F0.1+B0.1")[0], actions("B0")[0]]
    schedule = place("v", V_PIPE, 1, [column, actions("F0+F0.1 B0.1+B0")])
    assert schedule.num_ticks == 5
    assert schedule.stage_of(1, 1) == (0, 2)
    assert schedule.holder(0, 3) == (0, 1)


def test_place_names_what_each_rank_waits_for():
    with pytest.raises(ValueError, match="wait for one another") as caught:
        place("mine", ONE_PIPE, 2, [actions("F0 B0 F1 B1"), actions("F0 F1 B0 B1")])
    text = str(caught.value)
    assert "rank 0, B0: got a wait for the cotangent of microbatch 0 (B0 of rank 1)" in text
    assert "rank 1, F1: got a wait for the activation of microbatch 1 (F1 of rank 0)" in text
    with pytest.raises(ValueError, match=r"activation of microbatch 0 \(made by nobody\)"):
        place("mine", ONE_PIPE, 1, [[], actions("F0")])
    with pytest.raises(ValueError, match=r"rank 1: got F0.3; wanted a chunk that this rank holds"):
        place("mine", ONE_PIPE, 1, [actions("F0"), actions("F0.3")])


def test_microbatches_are_divided_among_pipes_in_order():
    both = (((0, 0), (1, 0)), ((1, 1), (0, 1)))
    assert [Schedule("two", both, 4, ()).pipe_of(m) for m in range(4)] == [0, 0, 1, 1]
    assert [Schedule("two", both, 5, ()).pipe_of(m) for m in range(5)] == [0, 0, 0, 1, 1]


def test_transfers_go_along_the_pipe_between_ranks_only():
    column = [actions("F0")[0], actions("F0.1+B0.1")[0], actions("B0")[0]]
    schedule = place("v", V_PIPE, 1, [column, actions("F0+F0.1 B0.1+B0")])
    assert [schedule.transfers(t) for t in range(schedule.num_ticks)] == [
        [Transfer(0, 1, Action("F", 0), 0)],
        [Transfer(1, 0, Action("F", 0, 1), 1)],
        [Transfer(0, 1, Action("B", 0, 1), 1)],
        [Transfer(1, 0, Action("B", 0), 0)],
        [],
    ]
