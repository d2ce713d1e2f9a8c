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


IN_ORDER = """
from datetime import timedelta
import torch
import torch.distributed as dist
import functron as ft
from functron import compat

dist.init_process_group("gloo", timeout=timedelta(minutes=7))
mesh = ft.Mesh(fsdp=1).bind()
name, c10d, x = mesh.groups["fsdp"], torch.ops._c10d_functional, torch.ones(4)
for _ in range(2000):  # on torch's own groups about 60,000 end in "unaligned tcache chunk detected"
    made = [c10d.all_gather_into_tensor(x, 1, name) for _ in range(25)]
    made += [c10d.reduce_scatter_tensor(x, "sum", 1, name) for _ in range(25)]
    for value in made[::2] + made[1::2]:
        c10d.wait_tensor(value)
options = compat.group(name)._get_backend(torch.device("cpu")).options
assert options._threads == 1, options._threads
assert options._timeout == timedelta(minutes=7), options._timeout
dist.destroy_process_group()
"""


def test_collectives_of_a_mesh_run_in_order_on_one_thread_of_a_group(torchrun):
    # torch's two race for a string, and corrupt the heap
    torchrun(IN_ORDER, 1)
