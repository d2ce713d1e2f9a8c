"""benchmarks/plan_ranking.py, as far as nothing need be timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from functron.apps.planner.estimates import Estimate
from functron.apps.planner.machines import hardware
from functron.apps.planner.software import FUNCTRON
from functron.spmd import Mesh

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import plan_ranking as ranking


def step(seconds: float, bubble: float = 0.0) -> Estimate:
    parts = {"products": seconds - bubble, "bubble": bubble}
    return Estimate("a step", hardware("cpu"), FUNCTRON, 4, 0, seconds, parts, {}, bubble, 0, 0, 0)


@pytest.mark.parametrize(
    ("a", "b", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1),
        ([1, 2, 3, 4], [1, 3, 2, 4], 4 / 6),  # five pairs of six
        ([2, 4, 1, 3], [3, 4, 2, 1], 2 / 6),  # four of six
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),  # two pairs, of two and of three that are told apart
    ],
)
def test_kendalls_tau_by_hand(a, b, tau):
    assert ranking.kendall(a, b) == pytest.approx(tau)
    assert ranking.kendall(b, a) == pytest.approx(tau)


def test_ranks_that_wait_leave_their_processors_to_others():
    """Four processes on two processors, at half of one's rate each while all of them compute."""
    assert ranking.shared(step(4.0, 1.0), 2, 2) == 4.0  # nobody else could have it
    assert ranking.shared(step(4.0, 1.0), 4, 2) == 3.0  # three seconds of work for each
    assert ranking.shared(step(4.0, 3.0), 4, 2) == 2.0  # the critical path at the whole rate
    assert ranking.shared(step(4.0), 4, 2) == 4.0


def test_the_table_and_its_verdict():
    seconds = {"dp=2": 0.3, "tp=2": 0.4, "cp=2": 0.5, "dp=4": 0.2}
    times = {name: [x, x, 1.2 * x] for name, x in seconds.items()}
    as_found = {name: (2 * x, step(2 * x)) for name, x in seconds.items()}
    text, good = ranking.compared(times, as_found)
    assert good
    assert "the planner's best is dp=4: 0.0% slower" in text
    assert "Kendall's tau of 4 ways: 1.00" in text
    swapped = {**as_found, "dp=4": (2.0, step(2.0))}  # the last place: three pairs of six
    text, good = ranking.compared(times, swapped)
    assert not good
    assert "the planner's best is dp=2: 50.0% slower than the best, dp=4" in text
    assert "Kendall's tau of 4 ways: 0.00" in text
    assert "of 3 on 2 processes: 1.00" in text


def test_twenty_ways_differ_and_have_their_axes():
    kinds = {str(ranking.config_of(name)) for name in ranking.WAYS}
    assert len(kinds) == len(ranking.WAYS) == 20
    meshes = [ranking.mesh_of(name) for name in ranking.WAYS]
    assert {mesh.size for mesh in meshes} == {2, 4}
    axes = {name for mesh in meshes for name in mesh.axis_names}
    assert axes == {"dp", "fsdp", "tp", "pp", "cp"}
    assert ranking.mesh_of("pp=2,dp=2 1f1b in 4") == Mesh(pp=2, dp=2)
