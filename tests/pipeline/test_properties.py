"""Properties of every schedule, for any counts; and no broken table passes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from functron.pipeline import NAMES, Action, Schedule, make, place
from functron.pipeline.schedule import Transfer

Place = tuple[int, int, int]  # tick, rank, position in the cell


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 5, max_microbatches: int = 14) -> Schedule:
    """Any schedule of any name, for counts that it admits: next to drawn ones."""
    name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(1, max_ranks))
    microbatches = draw(st.integers(1, max_microbatches))
    options = {}
    if name in ("interleaved", "breadth-first", "combined-1f1b", "forward"):
        options["num_chunks"] = draw(
            st.integers(2, 3) if name == "interleaved" else st.integers(1, 3)
        )
    if name in ("interleaved", "combined-1f1b"):
        options["group_size"] = draw(st.integers(ranks, ranks + 3))
    for _ in range(2):  # first the number of ranks may have to change, then that of microbatches
        try:
            return make(name, ranks, microbatches, **options)
        except ValueError as error:  # what the error names as admissible must be
            found = [line for line in str(error).splitlines() if line.startswith("  - ")]
            for line in found:
                nearest = int(line.replace("?", "").split()[-1])
                if "num_ranks" in line:
                    ranks = nearest
                else:
                    assert "num_microbatches" in line
                    microbatches = nearest
    return make(name, ranks, microbatches, **options)


@given(schedules())
def test_every_schedule_is_valid_and_prints_as_itself(schedule):
    schedule.validate(max_live=[schedule.peak_live(r) for r in range(schedule.num_ranks)])
    assert Schedule.parse(str(schedule)) == schedule
    assert 0 <= schedule.bubble_fraction() < 1
    schedule.forward_only().validate()
    assert not schedule.forward_only().has_backward
    assert schedule.forward_only().pipes == schedule.pipes


@given(schedules())
def test_placing_the_columns_again_changes_nothing(schedule):
    columns = [schedule.cells(r) for r in range(schedule.num_ranks)]
    again = place(schedule.name, schedule.pipes, schedule.num_microbatches, columns)
    assert again == schedule


@given(schedules())
def test_blocking_transfers_do_not_deadlock(schedule):
    """Every send waits for its receive: ranks that follow the table and `transfers` get through."""
    programs: list[deque] = [deque() for _ in range(schedule.num_ranks)]
    for tick, row in enumerate(schedule.table):
        for rank, cell in enumerate(row):
            programs[rank].append((rank, cell))
        for number, transfer in enumerate(schedule.transfers(tick)):
            programs[transfer.sender].append((tick, number, transfer))
            programs[transfer.receiver].append((tick, number, transfer))
    arrived: set[tuple[int, str, int, int]] = set()  # rank, "F" or "B" for, microbatch, chunk
    moved = True
    while moved:
        moved = False
        for program in programs:
            while program and len(program[0]) == 2:
                rank, cell = program.popleft()
                check_inputs(schedule, rank, cell, arrived)
                moved = True
        for program in programs:
            if not program or len(program[0]) == 2:
                continue
            transfer: Transfer = program[0][2]
            both = programs[transfer.sender], programs[transfer.receiver]
            if all(p and p[0] == program[0] for p in both):
                kind = "F" if transfer.action.kind == "F" else "B"
                arrived.add((transfer.receiver, kind, transfer.action.microbatch, transfer.chunk))
                for p in both:
                    p.popleft()
                moved = True
    assert not any(programs)


def check_inputs(schedule: Schedule, rank: int, cell, arrived) -> None:
    """Values that a cell needs from other ranks have been received before it."""
    for action in cell:
        pipe, stage = schedule.stage_of(rank, action.chunk)
        before = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(action.kind, -1)
        if 0 <= before < schedule.num_stages and schedule.holder(pipe, before)[0] != rank:
            kind = "F" if action.kind == "F" else "B"
            assert (rank, kind, action.microbatch, action.chunk) in arrived


def actions_of(schedule: Schedule) -> list[tuple[Place, Action]]:
    return [
        ((tick, rank, index), action)
        for tick, row in enumerate(schedule.table)
        for rank, cell in enumerate(row)
        for index, action in enumerate(cell)
    ]


def without(schedule: Schedule, at: Place) -> Schedule:
    tick, rank, index = at
    return with_cell(schedule, tick, rank, lambda c: (*c[:index], *c[index + 1 :]))


def with_cell(schedule: Schedule, tick: int, rank: int, change) -> Schedule:
    rows = [[*row] for row in schedule.table]
    while tick >= len(rows):
        rows.append([()] * schedule.num_ranks)
    rows[tick][rank] = change(rows[tick][rank])
    return replace(schedule, table=tuple(map(tuple, rows)))


def refused(schedule: Schedule, *expected: str) -> None:
    with pytest.raises(ValueError, match=f"schedule {schedule.name}") as caught:
        schedule.validate()
    for text in expected:
        assert text in str(caught.value)


@given(schedules(), st.data())
def test_a_missing_action_is_found(schedule, data):
    assume(len(actions_of(schedule)) > 2)  # else what is left is a forward-only table
    at, action = data.draw(st.sampled_from(actions_of(schedule)))
    refused(
        without(schedule, at), f"rank {at[1]}: got no ", str(action) if action.kind != "I" else ""
    )


@given(schedules(), st.data())
def test_a_doubled_action_is_found(schedule, data):
    (_, rank, _), action = data.draw(st.sampled_from(actions_of(schedule)))
    tick = schedule.num_ticks + data.draw(st.integers(0, 2))
    wrong = with_cell(schedule, tick, rank, lambda _: (action,))
    refused(wrong, f"tick {tick}, rank {rank}, {action}: got a second one")


@given(schedules(), st.data())
def test_swapped_actions_are_found(schedule, data):
    assume(schedule.has_backward)
    places = {(at[1], action): at for at, action in actions_of(schedule)}
    (rank, back), later = data.draw(
        st.sampled_from([(key, at) for key, at in places.items() if key[1].kind != "F"])
    )
    front = replace(back, kind="I" if back.kind == "W" else "F")
    earlier = places[rank, front]

    def put(table: Schedule, at: Place, action: Action) -> Schedule:
        return with_cell(table, at[0], rank, lambda c: (*c[: at[2]], action, *c[at[2] + 1 :]))

    refused(put(put(schedule, earlier, back), later, front), f"rank {rank}, {back}: got it needs")


@given(schedules(), st.data())
def test_an_action_on_another_rank_is_found(schedule, data):
    assume(schedule.num_ranks > 1)
    (tick, rank, index), action = data.draw(st.sampled_from(actions_of(schedule)))
    other = data.draw(st.sampled_from([r for r in range(schedule.num_ranks) if r != rank]))
    moved = with_cell(
        without(schedule, (tick, rank, index)), schedule.num_ticks, other, lambda _: (action,)
    )
    refused(moved, f"rank {rank}: got no ")


@given(schedules(), st.data())
def test_an_action_before_its_inputs_is_found(schedule, data):
    """One cell moved up to where what it needs is not made yet."""
    candidates = []
    for (tick, rank, index), action in actions_of(schedule):
        made = [
            at[0]
            for at, a in actions_of(schedule)
            if schedule.makes(at[1], a) in schedule.needs(rank, action)
        ]
        if made and max(made) < tick and index == 0:
            candidates.append((tick, rank, max(made)))
    assume(candidates)
    tick, rank, source = data.draw(st.sampled_from(candidates))
    cell = schedule.table[tick][rank]
    row = data.draw(st.integers(0, source))
    cleared = with_cell(schedule, tick, rank, lambda _: ())
    wrong = with_cell(cleared, row, rank, lambda c: cell + c)
    refused(wrong, f"tick {row}, rank {rank}, {cell[0]}: got it needs")


@given(schedules(max_microbatches=6), st.data())
def test_a_misspelt_cell_is_named(schedule, data):
    lines = str(schedule).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("#")) + 1
    number = data.draw(st.integers(first, len(lines) - 1))
    cells = lines[number].split()
    rank = data.draw(st.integers(0, len(cells) - 1))
    cells[rank] = data.draw(
        st.sampled_from(["F", "f0", "F-1", "B1.", "G0", "..", "F0+", "+", "F 0"])
    )
    broken = len(cells) if cells[rank] != "F 0" else len(cells) + 1
    lines[number] = " ".join(cells)
    with pytest.raises(ValueError, match="this text is no schedule") as caught:
        Schedule.parse("\n".join(lines))
    message = str(caught.value)
    assert f"line {number + 1}, rank {rank}: got " in message
    assert (f"line {number + 1}: got {broken} cells" in message) == (broken != len(cells))
