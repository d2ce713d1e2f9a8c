"""The stand-in refuses what a driver refuses, and logs what programs do."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import pytest
import torch

from tests.fake_gpu import journal, standin

pytestmark = pytest.mark.fake_gpu
GIB = 1 << 30


def test_eight_cards():
    assert torch.cuda.device_count() == 8
    assert torch.cuda.get_device_name(7) == "NVIDIA H100 80GB HBM3"
    assert torch.cuda.get_device_capability(0) == (9, 0)


def test_memory_beyond_a_card_is_refused():
    kept = torch.empty(60 * GIB, dtype=torch.uint8, device="cuda:3")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 30\.00 GiB"):
        torch.empty(30 * GIB, dtype=torch.uint8, device="cuda:3")
    del kept
    torch.cuda.empty_cache()
    assert torch.empty(70 * GIB, dtype=torch.uint8, device="cuda:3").numel() == 70 * GIB
    torch.cuda.empty_cache()


def test_launches_beyond_a_cards_limits_are_refused():
    class Size(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint) for name in "xyz"]

    runtime = ctypes.CDLL(None)

    def launch(grid: tuple, block: tuple, shared: int = 0) -> int:
        return runtime.fake_launch(b"x", Size(*grid), Size(*block), ctypes.c_size_t(shared), None)

    torch.cuda.set_device(0)
    assert launch((1, 65535, 1), (1024, 1, 1), 232448) == 0
    for bad in (
        ((0, 1, 1), (32, 1, 1)), ((1, 65536, 1), (32, 1, 1)), ((1, 1, 1), (32, 33, 1)),
        ((1, 1, 1), (1, 1, 65)), ((1, 1, 1), (32, 1, 1), 232449),
    ):  # fmt: skip
        assert launch(*bad) == 9
    runtime.cudaGetLastError()


def test_pages_are_registered_once():
    runtime = torch.cuda.cudart()
    memory = torch.empty(4 * 4096, dtype=torch.uint8)
    start = -(-memory.data_ptr() // 4096) * 4096
    assert int(runtime.cudaHostRegister(start, 4096 + 10, 0)) == 0
    assert int(runtime.cudaHostRegister(start + 4096 + 10, 100, 0)) == 712
    assert int(runtime.cudaHostUnregister(start)) == 0
    assert int(runtime.cudaHostRegister(start + 4096 + 10, 100, 0)) == 0
    assert int(runtime.cudaHostUnregister(start + 4096 + 10)) == 0
    assert int(runtime.cudaHostUnregister(start)) == 713
    ctypes.CDLL(None).cudaGetLastError()  # which the next call of torch would raise


def test_a_graph_is_captured_and_replayed():
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        y = y * 2
    standin.forget()
    graph.replay()
    assert standin.counts() == {"cudaGraphLaunch": 1}
    refused = pytest.raises(Exception, match="not permitted when stream is capturing")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        y.sum().item()


def test_a_copy_to_memory_that_was_never_there_is_refused():
    runtime = ctypes.CDLL(None)
    host = ctypes.create_string_buffer(64)
    at = ctypes.c_void_p(ctypes.addressof(host))
    assert runtime.cudaMemcpy(at, at, ctypes.c_size_t(64), 1) == 1  # no device has this address
    runtime.cudaGetLastError()


RACE = """
import torch
x = torch.zeros(1 << 20, device="cuda")
host = torch.zeros(1 << 20).pin_memory()
side = torch.cuda.Stream()
torch.cuda.synchronize()
x.copy_(host, non_blocking=True)
if {ordered}: side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side): {use}
"""


@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
def test_a_race_of_two_streams_is_found(run, tmp_path, ordered):
    program = tmp_path / "race.py"
    program.write_text(RACE.format(ordered=ordered, use="host.copy_(x, non_blocking=True)"))
    (process,) = run(str(program))
    assert bool(journal.find_races(process)) is not ordered
    program.write_text(RACE.format(ordered=ordered, use="x.mul_(2)"))  # a kernel of torch's
    found = nullcontext() if ordered else pytest.raises(AssertionError, match="possible data race")
    with found:
        run(str(program), sanitized=True)


def test_arguments_of_kernels_are_held_against_their_declarations():
    parameters = standin.read_parameters("rms_norm", "rms_norm_scale_gradient")
    assert parameters == ("reads", "writes", *["integer"] * 5)
    here, elsewhere = torch.zeros(4, device="cuda"), torch.zeros(4)
    assert standin.find_misfits(parameters, (here, None, 1, 2, 3, 4, 5)) == []
    assert standin.find_misfits(parameters, (here, None, 1, 2, 3, 4)) == ["6 arguments of 7"]
    problems = standin.find_misfits(parameters, (here, elsewhere, 1, 2, 3, 4, 5.0))
    assert len(problems) == 2
    assert "argument 1: 16 bytes of no memory" in problems[0]
    assert problems[1] == "argument 6: number, wanted integer"
