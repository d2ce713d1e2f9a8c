"""Optimizers of rows, blocks and matrices on real processes over gloo."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

CHECKS = ("adafactor", "soap", "groups")


def test_processes(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_families.py"), 4, timeout=300)
    for check in CHECKS:
        assert f"{check}: ok" in done.stdout
