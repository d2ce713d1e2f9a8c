"""Bytes of partitioned blocks, against those of XLA's SPMD partitioner for the same specs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("optax")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import partition as blocks

ALWAYS = {"MLP, tp"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else [pytest.mark.full]) for n in blocks.CASES]
)
def test_sends_at_most_what_xla_sends(name):
    """Bytes of a block, and what one more adds, an all-reduce that XLA slices as a reduce-scatter."""
    case = blocks.CASES[name]
    depths = (1,) if case.integers else (1, 2)
    ours = [blocks.functron_sends(case, depth).total() for depth in depths]
    theirs = [
        blocks.xla_sends(blocks.compiled(case, depth), scatter=True).total() for depth in depths
    ]
    assert 0 < ours[0] <= theirs[0]
    assert case.integers or 0 < ours[1] - ours[0] <= theirs[1] - theirs[0]
