"""ZeRO and Muon on real processes over gloo."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "checks", [("training", "memory", "muon"), ("pipeline", "compiled")], ids="-".join
)
def test_processes(torchrun, checks):
    done = torchrun(Path(__file__).with_name("gloo_zero.py"), 4, *checks, timeout=300)
    for check in checks:
        assert f"{check}: ok" in done.stdout
