"""DualPipe and DualPipeV against their papers' formulas and torch's own order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from functron.pipeline import Action, Schedule
from functron.pipeline.registry import dualpipe, dualpipe_half, dualpipev
from functron.pipeline.timeline import Costs


def torch_cells(num_ranks: int, num_microbatches: int) -> list[list[tuple[Action, ...]]]:
    """Per rank the cells of torch's ScheduleDualPipeV; its stages from the tip on are chunk 1."""
    stages = [
        SimpleNamespace(
            group_size=num_ranks, group_rank=0, num_stages=2 * num_ranks, submod=None, stage_index=i
        )
        for i in range(2)
    ]

    def ours(action) -> Action:
        kind = action.computation_type.value
        return Action(kind, action.microbatch_index, int(action.stage_index >= num_ranks))

    order = torch_schedules.ScheduleDualPipeV(stages, num_microbatches).pipeline_order
    return [
        [tuple(map(ours, action.sub_actions or (action,))) for action in order[rank]]
        for rank in range(num_ranks)
    ]


def all_cells(schedule: Schedule) -> list[list[tuple[Action, ...]]]:
    return [schedule.cells(rank) for rank in range(schedule.num_ranks)]


def in_first_direction(cells: list[tuple[Action, ...]], each: int, swapped: bool):
    """A rank's cells of DualPipe as those of a V: its first direction down, the other one up."""
    return [
        tuple(Action(a.kind, a.microbatch - a.chunk * each, a.chunk ^ swapped) for a in cell)
        for cell in cells
    ]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_dualpipev_has_the_order_of_torch(p: int):
    for m in range(2 * p, 4 * p + 2):
        assert all_cells(dualpipev(p, m)) == torch_cells(p, m), m


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_dualpipe_is_two_of_torchs_vs(p: int):
    # Cutting DualPipe in half gives DualPipeV of half the ranks and microbatches (Sea AI Lab), and
    # the second half of the ranks mirrors the first one, with the directions swapped.
    for m in (2 * p, 2 * p + 2, 4 * p):
        ours, wanted = all_cells(dualpipe(p, m)), torch_cells(p // 2, m // 2)
        for r in range(p // 2):
            assert in_first_direction(ours[r], m // 2, False) == wanted[r]
            assert in_first_direction(ours[p - 1 - r], m // 2, True) == wanted[r]


def test_tables_are_valid_for_all_small_counts():
    for p in range(1, 9):
        for m in range(2 * p, 4 * p + 3):
            v = dualpipev(p, m)
            v.validate()
            assert v.num_stages == 2 * p
            if p % 2 == 0 and m % 2 == 0:
                both = dualpipe(p, m)
                both.validate()
                assert (both.num_stages, len(both.pipes)) == (p, 2)


@given(st.integers(1, 6), st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_tables_are_valid_for_any_counts(half: int, more: int):
    dualpipe(2 * half, 4 * half + 2 * more).validate()
    dualpipev(2 * half - 1, 4 * half + more).validate()


@pytest.mark.parametrize("p", [2, 4, 6, 16])
def test_half_of_the_gradients_of_weights_wait(p: int):
    m = 2 * p + 2
    both, light = dualpipe(p, m), dualpipe_half(p, m)
    light.validate()
    late = [
        [max(late for _, late in table.list_held(r)) for r in range(p)] for table in (both, light)
    ]
    # rank r from an end of the pipeline keeps r + 1, and half of them, at least one
    ends = [min(r, p - 1 - r) + 1 for r in range(p)]
    assert late == [ends, [-(-n // 2) for n in ends]]
    assert [light.peak_live(r) for r in range(p)] == [both.peak_live(r) for r in range(p)]
    costs = Costs(1.0, None, 1.0, 1.0)
    longer = light.simulate(costs).total / both.simulate(costs).total
    assert 1 <= longer < 1.02 if p == 2 else 1 < longer < 1.1


def test_directions_go_through_the_same_stages_in_opposite_order():
    schedule = dualpipe(4, 8)
    assert schedule.pipes == (
        ((0, 0), (1, 0), (2, 0), (3, 0)),
        ((3, 1), (2, 1), (1, 1), (0, 1)),
    )
    assert dualpipev(2, 4).pipes == (((0, 0), (1, 0), (1, 1), (0, 1)),)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_memory_of_the_papers(p: int):
    # DeepSeek-V3, table 2: p + 1 activations; DualPipeV has those of twice as many stages
    for m in (2 * p, 4 * p):
        both, v = dualpipe(p, m), dualpipev(p, m)
        assert {both.peak_live(r) for r in range(p)} == {p + 1}
        assert {v.peak_live(r) for r in range(p)} == {2 * p + 1}


@pytest.mark.parametrize(
    ("p", "m", "fixes"),
    [
        (3, 12, ["num_ranks: got 3; wanted an even number, at least 2; fix: use 2 or 4"]),
        (0, 8, ["num_ranks: got 0; wanted an even number, at least 2; fix: use 2"]),
        (4, 6, ["num_microbatches: got 6", "at least twice the 4 ranks; fix: use 8"]),
        (4, 9, ["num_microbatches: got 9", "fix: use 8 or 10"]),
        (4, 7, ["num_microbatches: got 7", "fix: use 8"]),
        (5, 11, ["num_ranks: got 5", "fix: use 4 or 6", "num_microbatches: got 11"]),
    ],
)
def test_dualpipe_names_the_nearest_counts(p: int, m: int, fixes: list[str]):
    with pytest.raises(ValueError, match="dualpipe: counts that it does not admit") as caught:
        dualpipe(p, m)
    for fix in fixes:
        assert fix in str(caught.value)


def test_dualpipev_names_the_nearest_counts():
    with pytest.raises(ValueError, match=r"num_microbatches: got 5; .*; fix: use 6$"):
        dualpipev(3, 5)
    with pytest.raises(ValueError, match="num_ranks: got 0; wanted at least 1; fix: use 1"):
        dualpipev(0, 5)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize(("f", "w", "fb"), [(1, 1, 3), (1, 1, 2.4), (1, 0.7, 2.7), (2, 1, 4)])
def test_bubbles_of_the_papers(p: int, f: float, w: float, fb: float):
    # DeepSeek-V3, table 2: (p/2-1)(tFB + tB - 3tW); with as many stages, DualPipeV's is the same.
    # The formula takes a backward for inputs to be as long as a forward: tB = tF + tW.
    b = f + w
    costs = Costs(f, None, f, w, combined=fb / (f + b))
    wanted = (p // 2 - 1) * (fb + b - 3 * w)
    for schedule in (dualpipe(p, 2 * p), dualpipe(p, 4 * p), dualpipev(p // 2, 2 * p)):
        timeline = schedule.simulate(costs)
        idle = [timeline.total - timeline.busy(r) for r in range(schedule.num_ranks)]
        assert max(idle) == pytest.approx(wanted, abs=1e-9)


def test_overlap_hides_most_of_a_long_step():
    # All forwards of the steady state and their backwards run together: as the microbatches grow,
    # a step takes a combined cell for each of them at each of a rank's stages.
    costs = Costs(combined=0.6)
    more = dualpipe(4, 40).simulate(costs).total - dualpipe(4, 20).simulate(costs).total
    assert more == pytest.approx(20 * 3 * 0.6)
