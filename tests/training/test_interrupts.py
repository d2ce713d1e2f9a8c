"""An interrupted step leaves a state that is whole or gone: 12 points of each way, or 200.

See `tests.training.interrupts`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training import interrupts


@pytest.mark.parametrize("way", interrupts.WAYS)
def test_a_state_is_whole_or_gone(way, request):
    full = request.config.getoption("--full")
    found = interrupts.check(way, 200 if full else 12)
    assert found["whole"] or way == "compiled", found
    assert found["gone"], found


@pytest.mark.distributed
def test_no_rank_goes_on_with_one_that_was_interrupted(torchrun, request):
    full = request.config.getoption("--full")
    count = 50 if full else 2
    program = Path(interrupts.__file__)
    said = torchrun(program, 2, "ranks", count, 0, timeout=60 + 12 * 4 * count).stdout
    assert said.count(" ends") == 2 * len(interrupts.ON_RANKS), said
