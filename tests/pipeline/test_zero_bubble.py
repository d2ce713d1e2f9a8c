"""Zero-bubble schedules against the papers' tables and torch's own orders."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from functron.pipeline import Schedule
from functron.pipeline.registry import v_half, v_min, zb_h1, zb_h2, zbv
from functron.pipeline.timeline import Costs

SCHEDULES = (zb_h1, zb_h2, zbv, v_min, v_half)
COUNTS = [(p, m) for p in range(1, 7) for m in range(1, 2 * p + 3)]


def torch_order(kind: type, num_ranks: int, num_chunks: int, num_microbatches: int):
    """Per rank what torch's schedule does, as "stage kind microbatch" such as 3I0, without idling."""
    stages = [
        SimpleNamespace(
            group_size=num_ranks,
            group_rank=0,
            num_stages=num_ranks * num_chunks,
            submod=None,
            stage_index=chunk,
        )
        for chunk in range(num_chunks)
    ]
    order = kind(stages, num_microbatches).pipeline_order
    return [[str(a) for a in order[rank] if a is not None] for rank in range(num_ranks)]


def our_order(schedule: Schedule):
    """The same of our schedule."""
    return [
        [f"{schedule.stage_of(r, a.chunk)[1]}{a.kind}{a.microbatch}" for _, a in schedule.column(r)]
        for r in range(schedule.num_ranks)
    ]


def peaks(schedule: Schedule, rank: int) -> tuple[int, int]:
    """The most that a rank holds before I, and the most that it holds while it does F or I after it.

    Table 2 of arXiv 2401.10241 counts the memory of ZB-H1 and ZB-H2 in these: M_B and M_W.
    """
    before = after = most_before = most_after = 0
    for _, action in schedule.column(rank):
        if action.kind == "W":
            after -= 1
            continue
        before += action.kind == "F"
        most_before, most_after = max(most_before, before), max(most_after, after)
        if action.kind == "I":
            before, after = before - 1, after + 1
    return most_before, most_after


def span_bubble(schedule: Schedule, costs: Costs) -> float:
    """The most that a rank idles between its first action and its last one: the papers' bubble."""
    rows = schedule.simulate(costs).rows
    idle = []
    for rank in range(schedule.num_ranks):
        mine = [row for row in rows if row.rank == rank]
        span = max(row.end for row in mine) - min(row.start for row in mine)
        idle.append(span - sum(row.end - row.start for row in mine))
    return max(idle)


def test_activations_that_wait_for_weights_gradients():
    """By hand, of F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3."""
    after = [(1, 0), (0, 1), (1, 1), (0, 2), (1, 1), (0, 2), (1, 1), (0, 2)]
    assert zb_h1(2, 4).list_held(1) == after


@pytest.mark.parametrize("make", SCHEDULES)
def test_tables_are_valid_for_all_small_counts(make: Callable[[int, int], Schedule]):
    for p, m in COUNTS:
        schedule = make(p, m)
        schedule.validate()
        assert (schedule.num_ranks, schedule.num_microbatches) == (p, m)
        assert {len(cell) for r in range(p) for cell in schedule.cells(r)} == {1}


@given(st.sampled_from(SCHEDULES), st.integers(1, 16), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_tables_are_valid_for_any_counts(make: Callable[[int, int], Schedule], p: int, m: int):
    make(p, m).validate()


@pytest.mark.parametrize("make", SCHEDULES)
def test_counts_below_one_are_refused(make: Callable[[int, int], Schedule]):
    with pytest.raises(ValueError, match="num_ranks: got 0; wanted at least 1") as caught:
        make(0, -2)
    assert "num_microbatches: got -2" in str(caught.value)


def test_two_rank_columns_by_hand():
    # ZB-H1 of two ranks as the rules of section 2.1 give it: rank 1's W one microbatch behind
    assert [" ".join(map(str, (a for _, a in zb_h1(2, 3).column(r)))) for r in (0, 1)] == [
        "F0 F1 I0 W0 F2 I1 W1 I2 W2",
        "F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert [" ".join(map(str, (a for _, a in zb_h2(2, 4).column(r)))) for r in (0, 1)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zb_h1_has_the_order_of_torch():
    checked = 0
    for p, m in COUNTS:
        try:
            wanted = torch_order(torch_schedules.ScheduleInterleavedZeroBubble, p, 1, m)
        except ValueError:  # torch wants a multiple of its rounds, which one chunk does not need
            continue
        assert our_order(zb_h1(p, m)) == wanted, (p, m)
        checked += 1
    assert checked > 40


def test_zbv_has_the_order_of_torch():
    for p, m in COUNTS:
        wanted = torch_order(torch_schedules.ScheduleZBVZeroBubble, p, 2, m)
        assert our_order(zbv(p, m)) == wanted, (p, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_memory_of_the_handcrafted_schedules(p: int):
    for m in (2 * p, 4 * p):
        h1, h2, v = zb_h1(p, m), zb_h2(p, m), zbv(p, m)
        for r in range(p):
            # arXiv 2401.10241, table 2, for its stage r + 1: (p-i+1) M_B + (i-1) M_W for ZB-H1,
            # (2p-2i+1) M_B + (2i-2) M_W for ZB-H2
            assert peaks(h1, r) == (p - r, r)
            assert h1.peak_live(r) == p
            assert peaks(h2, r) == (2 * p - 2 * r - 1, 2 * r)
            assert h2.peak_live(r) == 2 * p - 1
            assert v.peak_live(r) == 2 * p  # section 6: p of both of a rank's stages


@pytest.mark.parametrize("p", range(1, 17))
def test_memory_of_the_schedules_with_controllable_memory(p: int):
    # arXiv 2405.15362 and its published table: (p+4)//3 and (p+2)//2 microbatches, of two stages
    for make, microbatches in ((v_min, (p + 4) // 3), (v_half, (p + 2) // 2)):
        schedule = make(p, 2 * p + 1)
        assert max(schedule.peak_live(r) for r in range(p)) == 2 * microbatches


EQUAL = Costs(1, None, 1, 1)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.5, 0.5), (2, 1, 1), (1, 2, 1)])
def test_bubbles_of_zb_h1_and_zb_h2_are_those_of_table_2(p: int, f: float, i: float, w: float):
    costs = Costs(f, None, i, w)
    for m in (2 * p, 4 * p):
        h1 = zb_h1(p, m)
        assert span_bubble(h1, costs) == pytest.approx((p - 1) * (f + i - w))
        # rank 0 starts first and ends last: the step as a whole has the same bubble
        assert h1.simulate(costs).total == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w))
        assert span_bubble(zb_h2(p, m), costs) == pytest.approx((p - 1) * (f + i - 2 * w))


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(p: int):
    # 1F1B's is (p-1)(tF + tB), from p microbatches on (arXiv 2401.10241, section 2.1)
    for m in (p, p + 1, 3 * p):
        assert zb_h1(p, m).simulate(EQUAL).total - 3 * m == (p - 1) * (1 + 1 + 1) / 3


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_zero_bubble_from_2p_minus_1_microbatches_on(p: int):
    for m in (2 * p - 1, 2 * p, 5 * p):
        for schedule, work in ((zb_h2(p, m), 3 * m), (zbv(p, m), 6 * m)):
            assert span_bubble(schedule, EQUAL) == 0
            # with all ranks in step, only the skew of the first forwards is left
            assert schedule.simulate(EQUAL).total == work + p - 1
    # a rank 0 with fewer forwards than 2p-1 must wait for the first cotangent
    assert span_bubble(zb_h2(p, 2 * p - 2), EQUAL) > 0
    assert span_bubble(zbv(p, 2 * p - 2), EQUAL) > 0


def test_zb_h2_is_never_slower_than_zb_h1():
    for p, m in COUNTS:
        assert zb_h2(p, m).simulate(EQUAL).total <= zb_h1(p, m).simulate(EQUAL).total, (p, m)


@pytest.mark.parametrize("p", [8, 12, 16, 24])
def test_bubbles_of_the_schedules_with_controllable_memory(p: int):
    # The published rates are about 2p/3m and p/2m, of 6m units of work on two stages of a rank
    m = 2 * p
    assert span_bubble(v_min(p, m), EQUAL) == pytest.approx(6 * m * 2 * p / (3 * m), rel=0.2)
    assert span_bubble(v_half(p, m), EQUAL) == pytest.approx(6 * m * p / (2 * m), rel=0.2)
