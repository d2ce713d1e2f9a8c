"""The distributed binding on real processes over gloo."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


def test_bound_programs_equal_simulated_ones(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_program.py"), 4, timeout=180)
    for check in ("values", "derivatives", "closures", "refusals", "training"):
        assert f"check_{check}: ok" in done.stdout
