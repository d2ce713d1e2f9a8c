"""What is kept of compiled graphs: for which GPUs it is the same, and who compiles it.

No GPU is used: what Inductor reads of one is made up here.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from functron.compiler import executable as executables
from functron.compiler import inductor
from functron.program.equations import Var
from tests.compiler.test_compile_steps import made, randn, scaled_step

H100 = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132,
    "warp_size": 32, "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048,
    "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472, "L2_cache_size": 52428800,
    "uuid": "9fb4a2ea", "pci_bus_id": 24, "pci_device_id": 0, "pci_domain_id": 0,
    "total_memory": 85017755648,
}  # fmt: skip
ANOTHER = {"uuid": "1c3d5e7f", "pci_bus_id": 155, "pci_domain_id": 2, "total_memory": 85014806528}


def doubling(number: int, kind: str = "cuda") -> tuple[fx.GraphModule, list[Var]]:
    """A graph that doubles a tensor on a device, and adds ones that it makes there."""
    device = torch.device(kind, number) if kind == "cuda" else torch.device("cpu")
    graph = fx.Graph()
    x = graph.placeholder("operand_0")
    ones = graph.call_function(torch.ops.aten.ones.default, ([4],), {"device": device})
    twice = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (twice, ones)),))
    operand = Var("x", (4,), (1,), torch.float32, device, 0, 16)
    return fx.GraphModule(torch.nn.Module(), graph), [operand]


@pytest.fixture
def name_on(monkeypatch, tmp_path):
    """``name_on(number, **facts)``: what the graph is kept as, of an H100 that has these facts."""
    names: list[str] = []

    def note(graph, operands, path, *rest):
        names.append(path.name)
        return list, ""

    def name(number: int, **facts) -> str:
        of = SimpleNamespace(**{**H100, **facts})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *which: of)
        inductor.compile_graph(*doubling(number), {}, tmp_path)
        return names[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(inductor, "_compile", note)
    return name


def test_gpus_of_one_kind_share_what_is_compiled(name_on):
    assert name_on(3, **ANOTHER) == name_on(0)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("name", "NVIDIA H200"),
        ("major", 10),
        ("minor", 3),
        ("multi_processor_count", 114),
        ("shared_memory_per_block_optin", 101376),
        ("L2_cache_size", 62914560),
    ],
)
def test_gpus_of_other_kinds_do_not(name_on, fact, value):
    assert name_on(0, **{fact: value}) != name_on(0)


def test_the_processor_beside_a_gpu_does_not_count(name_on, monkeypatch):
    name = name_on(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 71)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with inductor.config.patch({"compile_threads": 71, "cpp.cxx": (None, "clang++")}):
        assert name_on(0) == name


@pytest.mark.parametrize(
    "of", [(torch, "__version__"), (inductor, "_digest_of_source"), (inductor, "_triton_version")]
)
def test_versions_count(name_on, monkeypatch, of):
    name = name_on(0)
    monkeypatch.setattr(*of, "other" if of[0] is torch else lambda: "other")
    assert name_on(0) != name


# what Inductor writes of a graph on the second GPU, where its number matters and where it does not
TEMPLATE = """\
triton_poi_0 = async_compile.triton('triton_poi_0', '''
    triton_meta={'device': DeviceProperties(type='cuda', index=@, multi_processor_count=132)},
''', device_str='cuda')
        with torch.cuda._DeviceGuard(@):
            torch.cuda.set_device(@)
            buf0 = empty_strided_cuda((1, ), (1, ), torch.float32)
            buf1 = torch.ops.aten.ones.default([1], device=device(type='cuda', index=@))
            raw_stream1 = get_raw_stream(@)
            triton_poi_0.run(buf0, 1, stream=raw_stream1)
    arg0_1 = rand_strided((1, ), (1, ), device='cuda:@', dtype=torch.float32)
"""
CODE, ON_THE_SEVENTH = TEMPLATE.replace("@", "1"), TEMPLATE.replace("@", "6")


def test_code_for_another_gpu_of_the_machine():
    assert inductor._renumber(CODE, 6) == ON_THE_SEVENTH


def test_what_another_rank_compiled_runs_on_the_own_gpu(tmp_path):
    """The code that is loaded, not only its text, is that for the own GPU."""
    graph, operands = doubling(0, "cpu")
    inductor.compile_graph(graph, operands, {}, tmp_path)
    (path,) = tmp_path.glob("*.kernel")
    gpus, code = pickle.loads(path.read_bytes())
    assert gpus == ()
    code.source_code += "\ncall = lambda operands: ['cuda:1']\n"
    path.write_bytes(pickle.dumps(((1,), code)))
    function, text = inductor._load(path, operands, inductor.GraphDevices(False, (6,), ""))
    assert function([]) == ["cuda:6"]
    assert "cuda:1" not in text


HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_whoever_is_killed_leaves_no_lock(tmp_path):
    graph, operands = doubling(0, "cpu")
    inductor.compile_graph(graph, operands, {}, tmp_path)
    (path,), (lock,) = tmp_path.glob("*.kernel"), tmp_path.glob("*.lock")
    path.unlink()
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            assert inductor.compile_graph(graph, operands, {}, tmp_path, wait=False) is None
            assert not path.exists()
        finally:
            holder.kill()
        found = inductor.compile_graph(graph, operands, {}, tmp_path)
    assert found is not None
    (got,) = found[0]([torch.arange(4.0)])
    assert got.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert path.exists()


def test_kernels_that_others_compile_are_waited_for_last(monkeypatch, tmp_path):
    """While another rank compiles the first kernel, this one compiles all others."""
    asked: list[tuple[str, bool]] = []
    compiling = inductor.compile_graph

    def note(graph, operands, options, folder, *, wait=True):
        text = str(graph.graph)
        asked.append((text, wait))
        busy = text == asked[0][0] and not wait
        return None if busy else compiling(graph, operands, options, folder, wait=wait)

    monkeypatch.setattr(inductor, "compile_graph", note)
    w, x = randn(3, 2, 2), randn(5, 2)
    program = made(scaled_step, w, x, donate=0, backend="inductor", cache=tmp_path)
    assert isinstance(program, executables.Executable)
    first = asked[0][0]
    assert len({text for text, _ in asked}) == len(program.code) >= 2
    assert asked[-1] == (first, True)
    assert [wait for text, wait in asked if text != first] == [False] * (len(program.code) - 1)


def test_triton_finds_what_it_compiled_before_the_folder_moved(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    triton = old / "triton" / "0" / "HASH"
    triton.mkdir(parents=True)
    listed = {name: str(triton / name) for name in ("k.json", "k.cubin")}
    for name in listed:
        (triton / name).write_text(name)
    (triton / "__grp__k.json").write_text(json.dumps({"child_paths": listed}))
    old.rename(new)
    for _ in range(2):  # the second time it is known
        with inductor.directory(new):
            assert os.environ["TRITON_CACHE_DIR"] == str(new / "triton" / "0")
    moved = json.loads((new / "triton/0/HASH/__grp__k.json").read_text())["child_paths"]
    assert {name: open(path).read() for name, path in moved.items()} == {  # noqa: SIM115
        "k.json": "k.json",
        "k.cubin": "k.cubin",
    }
    assert "TRITON_CACHE_DIR" not in os.environ
