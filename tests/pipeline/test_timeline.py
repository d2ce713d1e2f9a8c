"""Timelines: simulated by hand-derived times, and measured ones."""

from __future__ import annotations

import functools
from collections import defaultdict

import pytest

from functron.pipeline import NAMES, Action, Costs, Schedule, Timeline, make
from functron.pipeline.registry import combined_one_f_one_b, one_f_one_b
from functron.pipeline.timeline import TimedAction


def times(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(row.action), row.start, row.end) for row in timeline.rows if row.rank == rank]


def test_transfers_delay_what_needs_them_and_ranks_compute_meanwhile():
    timeline = one_f_one_b(2, 2).simulate(Costs(transfer=1.0))
    assert times(timeline, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 6, 8), ("B1", 9, 11)]
    assert times(timeline, 1) == [("F0", 2, 3), ("B0", 3, 5), ("F1", 5, 6), ("B1", 6, 8)]
    assert (timeline.total, timeline.busy(0), timeline.busy(1)) == (11, 6, 6)
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 22)
    assert one_f_one_b(2, 2).bubble_fraction(Costs(transfer=1.0)) == timeline.bubble_fraction


def test_receives_posted_ahead_hide_transfers():
    """By hand. Forwards alone: behind its own cell a rank waits for each transfer, else for one.

    1F1B: F0 and F2 arrive late on rank 1, B0 and B2 on rank 0; B1 does where rank 0 posts its
    receive after F2, which ends half a transfer after B1 was made.
    """
    forwards, transfer = make("forward", 2, 4), Costs(transfer=0.25)
    assert forwards.simulate(transfer).exposed == (0, 0.25)
    assert forwards.simulate(transfer).total == 5 + 0.25
    assert forwards.simulate(transfer, ahead=False).exposed == (0, 4 * 0.25)
    assert forwards.simulate(transfer, ahead=False).total == 5 + 4 * 0.25
    both, transfer = one_f_one_b(2, 3), Costs(transfer=0.5)
    assert both.simulate(transfer).exposed == (1.0, 1.0)
    assert both.simulate(transfer, ahead=False).exposed == (1.5, 1.0)
    assert both.simulate().exposed == (0, 0)


def test_transfers_between_two_ranks_follow_one_another():
    """Both microbatches are made at once: the second one leaves when the first has arrived."""
    timeline = make("forward", 2, 2).simulate(Costs(forward=(0, 1), transfer=[4, 0]))
    assert times(timeline, 1) == [("F0", 4, 5), ("F1", 8, 9)]


def test_costs_per_stage():
    costs = Costs(forward=(1, 3), backward=(2, 5), transfer=[0.5, 0.25])
    timeline = one_f_one_b(2, 2).simulate(costs)
    assert times(timeline, 1) == [
        ("F0", 1.5, 4.5),
        ("B0", 4.5, 9.5),
        ("F1", 9.5, 12.5),
        ("B1", 12.5, 17.5),
    ]
    assert times(timeline, 0)[2:] == [("B0", 9.75, 11.75), ("B1", 17.75, 19.75)]


def test_whole_backwards_take_as_long_as_their_parts():
    split = Schedule.parse("F0 .\n. F0\n. I0\nI0 W0\nW0 .")
    costs = Costs(forward=1, backward_input=3, backward_weight=2)
    assert times(split.simulate(costs), 0) == [("F0", 0, 1), ("I0", 5, 8), ("W0", 8, 10)]
    assert times(split.simulate(costs), 1) == [("F0", 1, 2), ("I0", 2, 5), ("W0", 5, 7)]
    whole = one_f_one_b(2, 1).simulate(costs)
    assert times(whole, 1)[-1] == ("B0", 2, 7)


def test_actions_of_a_cell_share_its_time():
    schedule = combined_one_f_one_b(2, 3)
    timeline = schedule.simulate(Costs(combined=0.5))
    assert times(timeline, 1) == [
        ("F0", 1, 2), ("F1", 2, 3.5), ("B0", 2, 3.5), ("F2", 3.5, 5), ("B1", 3.5, 5), ("B2", 5, 7),
    ]  # fmt: skip
    assert timeline.busy(1) == 6
    assert schedule.simulate().busy(1) == 9


def longest_path(schedule: Schedule, costs: Costs) -> float:
    """The end of a schedule, as the longest path through cells and transfers; no rank has a clock."""
    cells = {
        (r, t): cell for t, row in enumerate(schedule.table) for r, cell in enumerate(row) if cell
    }
    sent: dict[tuple[int, int], list[tuple]] = defaultdict(
        list
    )  # by link: tick and value, in order
    last = schedule.num_stages - 1
    for (r, t), cell in cells.items():
        for a in cell:
            pipe, stage = schedule.stage_of(r, a.chunk)
            to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(a.kind, -1)
            if 0 <= to <= last:
                sent[r, schedule.holder(pipe, to)[0]].append(
                    (t, (a.kind == "F", a.microbatch, pipe, to))
                )

    @functools.cache
    def free(rank: int, tick: int) -> float:
        """When a rank has done its cells before a tick."""
        return (
            end(rank, tick - 1)
            if (rank, tick - 1) in cells
            else free(rank, tick - 1)
            if tick
            else 0.0
        )

    @functools.cache
    def arrival(sender: int, receiver: int, index: int) -> float:
        """When a value that a rank sends has arrived."""
        tick = sent[sender, receiver][index][0]
        if sender == receiver:
            return end(sender, tick)
        before = arrival(sender, receiver, index - 1) if index else 0.0
        return max(end(sender, tick), free(receiver, tick), before) + costs.sending(0)

    @functools.cache
    def end(rank: int, tick: int) -> float:
        starts, spent = [free(rank, tick)], 0.0
        for a in cells[rank, tick]:
            pipe, stage = schedule.stage_of(rank, a.chunk)
            spent += costs.of(a.kind, stage)
            value = (a.kind == "F", a.microbatch, pipe, stage)
            for (sender, receiver), values in sent.items() if a.kind != "W" else ():
                for index, (made, other) in enumerate(values):
                    if receiver == rank and other == value and made < tick:
                        starts.append(arrival(sender, receiver, index))
        return max(starts) + spent * (costs.combined if len(cells[rank, tick]) == 2 else 1)

    return max(end(*at) for at in cells)


@pytest.mark.parametrize("name", NAMES)
def test_the_total_is_the_longest_path(name):
    schedule = make(name, 4, 8)
    varied = [1 + 0.1 * stage for stage in range(schedule.num_stages)]
    costs = Costs(varied, None, 1.5, varied, 0.3, 0.8)
    assert schedule.simulate(costs).total == pytest.approx(longest_path(schedule, costs))


def test_costs_that_do_not_fit():
    with pytest.raises(ValueError, match="costs of schedule 1f1b") as caught:
        one_f_one_b(2, 2).simulate(Costs((1, 2, 3), -1.0, transfer=float("nan"), combined=-1))
    message = str(caught.value)
    assert "costs.forward: got 3 numbers; wanted 2, one per stage" in message
    for name, value in [("backward", -1.0), ("transfer", "nan"), ("combined", -1)]:
        assert f"costs.{name}: got {value}; wanted finite numbers, 0 or more" in message


def test_a_table_that_deadlocks_is_not_simulated():
    with pytest.raises(
        ValueError, match="rank 0, B0: got a wait for the cotangent of microbatch 0"
    ):
        Schedule.parse("F0 .\n. F0\nB0 .\nF1 F1\n. B0").simulate()


def test_measured_timelines():
    rows = [
        (1, Action("F", 0), 10.0, 11.0),
        (0, Action("F", 0), 9.0, 10.0),
        (1, Action("B", 0), 11.5, 13.0),
        (0, Action("B", 0), 13.0, 15.0),
    ]
    timeline = Timeline.of("measured", rows)
    assert timeline.rows[0] == TimedAction(0, Action("F", 0), 0.0, 1.0)
    assert (timeline.num_ranks, timeline.total) == (2, 6.0)
    assert timeline.bubble_fraction == pytest.approx(1 - 5.5 / 12)
    assert Timeline.of("nothing", []).bubble_fraction == 0.0


def test_costs_of_a_timeline_foretell_it():
    for schedule in (one_f_one_b(3, 6), make("zb-h1", 3, 6), combined_one_f_one_b(2, 6)):
        stages = range(schedule.num_stages)
        truth = Costs([1.0 + s for s in stages], None, [2.0 - 0.1 * s for s in stages], 0.7)
        measured = Timeline.of("measured", schedule.simulate(truth).rows)
        again = schedule.simulate(measured.costs(schedule))
        if any(len(cell) == 2 for row in schedule.table for cell in row):
            assert again.total > 0  # how a cell divides its time is not seen
        else:
            assert again.total == pytest.approx(measured.total)
    # the median: one slow run of an action does not count
    rows = [(0, Action("F", m), 10.0 * m, 10.0 * m + (9.0 if m == 2 else 1.0)) for m in range(5)]
    assert Timeline.of("one", rows).costs(make("forward", 1, 5)).forward == (1.0,)
