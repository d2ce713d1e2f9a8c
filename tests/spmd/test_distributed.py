"""The distributed binding on real processes over gloo."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


def test_bound_programs_equal_simulated_ones(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_program.py"), 4, timeout=180)
    for check in ("values", "derivatives", "closures", "refusals", "training"):
        assert f"check_{check}: ok" in done.stdout


LEAVING = """
import importlib
import os
import torch
import torch.distributed as dist
import functron as ft

def run():
    dist.init_process_group("gloo")
    mesh = ft.Mesh(tp=2).bind()
    f = ft.shard_map(lambda x: ft.lax.psum(x, "tp"), mesh, ft.P("tp"), ft.P())  # checked: traced
    f(torch.ones(2))
    importlib.import_module("torch._dynamo")  # as a compiler would, once there is a process group
    dist.destroy_process_group()

run()
tasks = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
assert not any("gloo" in name for name in tasks), tasks
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_no_thread_of_a_process_group_outlives_it(torchrun):
    # one that frees a tensor while Python exits aborts the process
    torchrun(LEAVING, 2)
