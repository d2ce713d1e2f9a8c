"""Classic schedules against tables derived by hand, and published formulas."""

from __future__ import annotations

import pytest

from functron.pipeline import Costs, Schedule
from functron.pipeline.registry import (
    breadth_first,
    combined_one_f_one_b,
    eager_one_f_one_b,
    forward,
    gpipe,
    interleaved,
    one_f_one_b,
)

COUNTS = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 5, 8, 12)]
CHUNKED = [(p, m, v) for p in (1, 2, 3, 4) for m in (p, 2 * p, 5 * p) for v in (2, 3)]


def order(schedule: Schedule, rank: int) -> str:
    return " ".join("+".join(map(str, cell)) for cell in schedule.cells(rank))


def table(text: str) -> tuple:
    return Schedule.parse(text).table


def test_gpipe_by_hand():
    assert gpipe(2, 2).table == table("F0 .\nF1 F0\n. F1\n. B0\nB0 B1\nB1 .")


def test_1f1b_by_hand():
    assert one_f_one_b(2, 3).table == table("F0 .\nF1 F0\n. B0\nB0 F1\nF2 B1\nB1 F2\n. B2\nB2 .")
    # figure 4 (top) of Narayanan et al. 2021: four devices, the first of two groups of four
    schedule = one_f_one_b(4, 8)
    assert order(schedule, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert order(schedule, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"
    assert order(schedule, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"
    assert order(schedule, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_eager_1f1b_by_hand():
    schedule = eager_one_f_one_b(3, 4)
    assert order(schedule, 0) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert order(schedule, 1) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_interleaved_by_hand():
    schedule = interleaved(2, 2)
    assert schedule.pipes == (((0, 0), (1, 0), (0, 1), (1, 1)),)
    assert schedule.table == Schedule.parse(
        """
        pipe: 0 1 0.1 1.1
        F0    .
        F1    F0
        F0.1  F1
        F1.1  F0.1
        .     B0.1
        B0.1  F1.1
        .     B1.1
        B1.1  B0
        B0    B1
        B1    .
        """
    ).table  # fmt: skip


def test_interleaved_groups_as_in_megatrons_example():
    # the example in the comments of Megatron-LM's get_schedule_table: two ranks, two chunks, five
    # microbatches in groups of three: 0 1 2 0 1 2 3 4 3 4 on chunks 0 0 0 1 1 1 0 0 1 1
    schedule = interleaved(2, 5, group_size=3)
    for rank in range(2):
        column = [a for _, a in schedule.column(rank)]
        forwards = [(a.microbatch, a.chunk) for a in column if a.kind == "F"]
        backwards = [(a.microbatch, a.chunk) for a in column if a.kind == "B"]
        microbatches = [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
        assert forwards == [*zip(microbatches, [0, 0, 0, 1, 1, 1, 0, 0, 1, 1], strict=True)]
        assert backwards == [*zip(microbatches, [1, 1, 1, 0, 0, 0, 1, 1, 0, 0], strict=True)]
        warmup = [a.kind for a in column].index("B") - 1
        assert warmup == 2 * (2 - 1 - rank) + (2 - 1) * 3


def test_split_backwards_of_1f1b_by_hand():
    """Cotangents leave before the gradients of weights are computed; no more is live."""
    split = one_f_one_b(2, 2, split=1)
    assert split.table == Schedule.parse(
        """
        pipe: 0 1
        F0    .
        F1    F0
        .     I0
        I0    W0
        W0    F1
        .     I1
        I1    W1
        W1    .
        """
    ).table  # fmt: skip
    for counts in ((2, 2), (4, 3), (3, 8)):
        split, whole = one_f_one_b(*counts, split=1), one_f_one_b(*counts)
        split.validate()
        ranks = range(counts[0])
        assert [split.peak_live(r) for r in ranks] == [whole.peak_live(r) for r in ranks]
        for rank in ranks:
            kinds = "".join(a.kind for _, a in split.column(rank))
            assert kinds.replace("IW", "B") == "".join(a.kind for _, a in whole.column(rank))


def test_breadth_first_by_hand():
    assert breadth_first(2, 2).table == Schedule.parse(
        """
        pipe: 0 1 0.1 1.1
        F0    .
        F1    F0
        F0.1  F1
        F1.1  F0.1
        .     F1.1
        .     B0.1
        B0.1  B1.1
        B1.1  B0
        B0    B1
        B1    .
        """
    ).table  # fmt: skip


def test_combined_1f1b_by_hand():
    assert combined_one_f_one_b(2, 3).table == table("F0 .\nF1 F0\nF2 F1+B0\nB0 F2+B1\nB1 B2\nB2 .")


def test_forward_by_hand():
    assert forward(2, 2).table == table("F0 .\nF1 F0\n. F1")
    two = Schedule.parse("pipe: 0 1 0.1 1.1\nF0 .\nF1 F0\nF0.1 F1\nF1.1 F0.1\n. F1.1")
    assert forward(2, 2, 2).table == two.table
    assert not two.has_backward


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_bubbles_and_live_activations_of_one_chunk(p, m):
    for make in (gpipe, one_f_one_b, eager_one_f_one_b):
        schedule = make(p, m)
        schedule.validate()
        assert schedule.bubble_fraction() == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    for r in range(p):
        assert gpipe(p, m).peak_live(r) == m
        assert one_f_one_b(p, m).peak_live(r) == min(m, p - r)
        assert eager_one_f_one_b(p, m).peak_live(r) == min(m, 2 * (p - r) - 1)
        assert combined_one_f_one_b(p, m).peak_live(r) == min(m, 2 * (p - r))
        assert forward(p, m).peak_live(r) == 0
    forward(p, m).validate()
    combined_one_f_one_b(p, m).validate(max_live=[min(m, 2 * (p - r)) for r in range(p)])


@pytest.mark.parametrize(("p", "m", "v"), CHUNKED)
def test_bubbles_and_live_activations_of_chunks(p, m, v):
    bubble = pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    for schedule in (interleaved(p, m, v), breadth_first(p, m, v), forward(p, m, v)):
        schedule.validate()
        assert schedule.bubble_fraction() == bubble
    whole = interleaved(p, m, v, group_size=m)  # the largest group
    whole.validate()
    assert whole.bubble_fraction() == bubble
    for r in range(p):
        # Megatron's warm-up and the one forward of the steady state before its backward
        ahead = 2 * (p - 1 - r) + (v - 1) * p
        assert interleaved(p, m, v).peak_live(r) == min(v * m, ahead + 1)
        assert combined_one_f_one_b(p, m, v).peak_live(r) == min(v * m, ahead + 2)
        assert breadth_first(p, m, v).peak_live(r) == v * m


@pytest.mark.parametrize(("p", "m", "v"), [(2, 8, 1), (4, 8, 1), (3, 9, 2), (4, 16, 3)])
def test_pairs_of_combined_1f1b_are_independent_and_fill_the_steady_state(p, m, v):
    schedule = combined_one_f_one_b(p, m, v)
    for r in range(p):
        pairs = [cell for cell in schedule.cells(r) if len(cell) == 2]
        assert len(pairs) == v * m - (2 * (p - 1 - r) + (v - 1) * p + 1)
        for f, b in pairs:
            assert (f.kind, b.kind) == ("F", "B")
            assert f.microbatch != b.microbatch
    # no rank waits between its first pair and its last one
    first = [next(t for t, row in enumerate(schedule.table) if len(row[r]) == 2) for r in range(p)]
    last = [max(t for t, row in enumerate(schedule.table) if len(row[r]) == 2) for r in range(p)]
    for r in range(p):
        assert all(schedule.table[t][r] for t in range(first[r], last[r]))


def test_eager_1f1b_hides_transfers():
    costs = Costs(transfer=0.5)
    p, m = 4, 16
    assert eager_one_f_one_b(p, m).simulate(costs).total == 3 * (m + p - 1) + 2 * (p - 1) * 0.5
    assert one_f_one_b(p, m).simulate(costs).total > eager_one_f_one_b(p, m).simulate(costs).total


@pytest.mark.parametrize(
    ("m", "group", "nearest"),
    [(6, None, "take 4 or 8"), (3, None, "take 4$"), (9, None, "take 8 or 12"),
     (7, 5, "take 5 or 9"), (11, 5, "take 10 or 14")],
)  # fmt: skip
def test_interleaved_names_the_nearest_counts(m, group, nearest):
    for make in (interleaved, combined_one_f_one_b):
        with pytest.raises(ValueError, match=nearest) as caught:
            make(4, m, 2, group_size=group)
        for count in str(caught.value).rpartition("take ")[2].split(" or "):
            make(4, int(count), 2, group_size=group).validate()


def test_counts_that_no_schedule_admits():
    for make in (gpipe, one_f_one_b, eager_one_f_one_b, interleaved, breadth_first, forward):
        with pytest.raises(ValueError, match=r"num_ranks: got 0; wanted 1 or more\n.*num_micro"):
            make(0, -1)
    with pytest.raises(ValueError, match=r"num_chunks: got 1; wanted 2 or more; fix: .*1f1b"):
        interleaved(2, 4, 1)
    with pytest.raises(ValueError, match="num_chunks: got 0"):
        breadth_first(2, 4, 0)
    with pytest.raises(ValueError, match=r"group_size: got 3; wanted 4 \(the number of ranks\)"):
        interleaved(4, 8, group_size=3)
