"""ZeRO and Muon on real processes over gloo."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

CHECKS = ("training", "pipeline", "memory", "muon", "stochastic")
MORE = ("more training", "more pipeline", "more compiled")


@pytest.mark.parametrize(
    ("nproc", "checks"),
    [(4, CHECKS), (2, ("compiled",)), pytest.param(4, MORE, marks=pytest.mark.full)],
    ids=["all", "compiled", "more"],
)
def test_processes(torchrun, nproc, checks):
    done = torchrun(Path(__file__).with_name("gloo_zero.py"), nproc, *checks, timeout=300)
    for check in checks:
        assert f"{check}: ok" in done.stdout
