"""ZeRO and Muon on real processes over gloo."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

CHECKS = ("training", "pipeline", "compiled", "memory", "muon", "stochastic")


def test_processes(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_zero.py"), 4, *CHECKS, timeout=300)
    for check in CHECKS:
        assert f"{check}: ok" in done.stdout
