"""The distributed binding on real processes over gloo."""

import re
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
from functron.core import compat

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


LEFT_ALONE = """
import os
import torch, torch.distributed as dist
import functron as ft
from functron import P, lax
from functron.pipeline import Partition, even_layout, make, pipelined
from functron.compiler import executor

dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank}:", flush=True)
mesh = ft.Mesh(dp=2).bind()


def total(x):
    return lax.psum(x, "dp")


def step(w, x):
    def layer(x, p):
        return torch.tanh(x @ lax.all_gather(p, "fsdp", axis=0, tiled=True)), None

    return ft.grad(lambda w: ft.scan(layer, x, w)[0].square().sum())(w)


def stage(part, params, x, batch):
    y = torch.tanh((batch if x is None else x) @ params["w"][0])
    return y.sum() if part.loss else y


# who lost the others has left the groups of that mesh: each place where it is noticed has its own
mapped, mapped_too = (ft.shard_map(total, m, P("dp"), P()) for m in (mesh, ft.Mesh(dp=2).bind()))
try:
    mapped(torch.ones(4 + rank))
except ValueError as error:
    print(error, flush=True)
print(mapped(torch.ones(4)).tolist(), flush=True)

split = P(None, "fsdp"), P("fsdp")
sharded, sharded_too = (
    ft.shard_map(step, ft.Mesh(fsdp=2).bind(), split, split[0], check=False) for _ in range(2)
)
layout, schedule = even_layout(2, 2), make("1f1b", 2, 2)
stages = pipelined(stage, Partition(layout, schedule.pipes, {"w": "t"}), schedule)
staged = ft.shard_map(stages.value_and_grad, ft.Mesh(pp=2).bind(), P(), P(), stages="pp")
compiled, compiled_total = (ft.jit(fn, backend="eager") for fn in (sharded, mapped))
calls = [
    lambda: compiled(torch.ones(3, 4, 8), torch.ones(2, 8)),
    lambda: compiled_total(torch.ones(4)),
    lambda: mapped_too(torch.ones(4)),
    lambda: ft.jit(sharded_too, backend="eager")(torch.ones(3, 4, 8), torch.ones(2, 8)),
    lambda: staged({"w": torch.ones(1, 5, 5)}, torch.ones(4, 5)),
]
for call in calls:
    call()
dist.barrier()
if rank == 1:
    waits = []

    def wait(value, before=executor._wait):
        waits.append(value)
        if len(waits) == 4:  # three layers' gathers, then reductions
            os._exit(0)  # any other would have the rank that is left ended before it can speak
        return before(value)

    executor._wait = wait
for call in calls:
    try:
        call()
    except RuntimeError as error:
        print(error, flush=True)
print("at the end", flush=True)
os._exit(0)
"""


def test_ranks_that_disagree_or_end_are_told_by_axis_and_line(torchrun, tmp_path):
    said = torchrun(LEFT_ALONE, 2).stdout.removeprefix("rank 0:").split("rank 1:")
    assert ["at the end" in text for text in said] == [True, False], said
    disagree = (
        "ranks disagree about its arguments\n  - argument 0: "
        "got float32[4] on rank dp=0, float32[5] on rank dp=1; wanted one shape on all ranks"
    )
    for text in said:
        assert disagree in text
        assert "[2.0, 2.0, 2.0, 2.0]" in text
    lost = re.findall(
        r"^(?:compiling )?(\w+) over '(\w+)' at (\S+?): .*process 0 of 2 lost the others \(\w",
        said[0],
        re.M,
    )
    lines = LEFT_ALONE.splitlines()

    def at(text: str) -> str:
        return f"{tmp_path / 'program.py'}:{[text in line for line in lines].index(True) + 1}"

    # at a wait in a compiled program, at its start, uncompiled, while compiling, between stages
    assert lost == [
        ("psum_scatter", "fsdp", at("lax.all_gather(")),
        ("psum", "dp", at("lax.psum(")),
        ("psum", "dp", at("lax.psum(")),
        ("step", "fsdp", at("lambda: ft.jit(")),
        ("value_and_grad", "pp", at("lambda: staged(")),
    ], said[0]
    assert "gloo/" not in said[0]
