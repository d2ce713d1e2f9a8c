"""Numbers on a device, made without a copy that the host waits for; memory that is kept."""

import os
import subprocess
import sys

import pytest
import torch

from functron.core import compat

VALUES = [True, 3, 2.5, [1, 2, 3], (0.5, 1.0), [[True], [False]]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_constants_are_those_of_torch(value, device):
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        made = compat.constant(value, device)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(made, torch.tensor(value, device=device), rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(7)], ids=str)
def test_a_number_on_a_cpu_goes_anywhere(value):
    made = compat.constant(value, "meta")
    assert (made.device.type, made.dtype, made.shape) == ("meta", value.dtype, ())
    assert compat.constant(value, "cpu") is value


def test_freed_memory_is_kept_for_the_next_step():
    """A step that frees 80 MB has the system clear 20,000 pages in the next one, unless kept."""
    program = """
import resource
import torch
from functron.core import compat

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2 << 20) for _ in range(10)]
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = min(faults() for _ in range(4))
compat.keep_freed_memory()
print(given_back, min(faults() for _ in range(4)))
"""
    command = [sys.executable, "-c", program]
    # the C library's own first choice, which it else gives up at the first block that is freed
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    given_back, kept = map(int, run.stdout.split())
    assert 10 * kept < given_back  # 20,000, or fewer of larger pages
