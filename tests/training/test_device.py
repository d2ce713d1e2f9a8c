"""Steps on a device that this machine does not have."""

from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("device_program.py")


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="a list on this device is traced as a copy from a CPU"
)
@pytest.mark.parametrize(
    ("models", "count"),
    [(["mixtral-tiny", "gemma2-tiny"], 2), pytest.param([], 11, marks=pytest.mark.full)],
)
def test_a_step_makes_nothing_elsewhere(torchrun, models, count):
    """In a process of its own, since a device is there for the whole of one."""
    assert torchrun(PROGRAM, 1, *models).stdout == f"traced {count}\n"
