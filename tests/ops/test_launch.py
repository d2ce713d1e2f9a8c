"""The launcher: its calls to the driver (driver.cpp), and its refusals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from functron.ops import launch, nvrtc

CPU = torch.device("cpu")
HERE = Path(__file__).parent

PROGRAM = """
import ctypes, sys
from pathlib import Path
import torch
from functron.core import compat
from functron.ops import launch, nvrtc

class Told(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_uint64), ("function", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 16),
    ]

class OnGPU(torch.Tensor):  # as far as the launcher looks
    index = 0
    is_cuda = True
    @property
    def device(self):
        return torch.device("cuda", self.index)
    def get_device(self):
        return self.index

class Properties:
    multi_processor_count, shared_memory_per_block_optin = 132, 232448

def tensor(index=0):
    made = torch.zeros(4).as_subclass(OnGPU)
    made.index = index
    return made

class Device:  # torch.cuda.device
    current = 0
    def __init__(self, index):
        self.index = index
    def __enter__(self):
        self.before, Device.current = Device.current, self.index
    def __exit__(self, *_):
        Device.current = self.before

capability = (9, 0)
torch.version.cuda = "13.0"
torch.cuda.device, torch.cuda.current_device = Device, lambda: Device.current
torch.cuda.get_device_capability = lambda device: capability
torch.cuda.get_device_properties = lambda device: Properties
compat.current_raw_stream = lambda index: 1000 + index + 16 * (Device.current == index)

driver = ctypes.CDLL("libcuda.so.1")
driver.launched.restype = ctypes.POINTER(Told)
own, cache = Path(sys.argv[1]), Path(sys.argv[2])
read = nvrtc.read
nvrtc.read = lambda name: read(name, own)
run = launch.Launcher(cache)
told = lambda: driver.launched().contents

def refused(error, *args, **kwargs):
    before = driver.number_of_launches()
    try:
        run(*args, **kwargs)
    except error as e:
        assert driver.number_of_launches() == before
        return str(e)
    raise AssertionError("not refused")

# what is passed arrives: pointers, null, 64-bit integers, floats; the current stream of the device
x, y = tensor(), tensor()
driver.expect(b"ppplllf")
args = (x, None, y, -(2**40), True, 7, 0.1)
run("sum", "sum", (3, 2), 64, *args, defines={"T_": "1"}, shared_bytes=100_000)
now = told()
assert (list(now.grid), list(now.block), now.shared) == ([3, 2, 1], [64, 1, 1], 100_000)
assert (now.function, now.stream) == (11, 1016)
assert list(now.arguments)[:6] == [x.data_ptr(), 0, y.data_ptr(), 2**64 - 2**40, 1, 7]
assert now.arguments[6] == int.from_bytes(memoryview(torch.tensor(0.1).numpy()), "little")
assert driver.dynamic_shared_bytes() == 232448 - 1024
driver.expect(b"")

# loaded once for a device, and per variant and device
call = lambda *args, **kw: run("sum", "sum", 1, 32, *args, **{"defines": {"T_": "1"}, **kw})
call(x)
assert driver.number_of_loads() == 1
call(tensor(1))
assert told().stream == 1017 and driver.number_of_loads() == 2 and Device.current == 0
call(x, defines={"T_": "2"})
assert driver.number_of_loads() == 3
assert len(list(cache.glob("[!.]*"))) == 2  # beside locks

# nothing runs on an empty grid; a thread without a context gets torch's
before = driver.number_of_launches()
run("sum", "sum", (0, 5), 32, x, defines={"T_": "1"})
assert driver.number_of_launches() == before
driver.lose_context()
call(x)
assert driver.number_of_launches() == before + 1

print(refused(ValueError, "sum", "sum", 1, 32, x, tensor(1), defines={"T_": "1"}))
print(refused(ValueError, "sum", "sum", 1, 32, torch.zeros(2), defines={"T_": "1"}))
print(refused(ValueError, "sum", "sum", 1, 32, 5, defines={"T_": "1"}))
print(refused(TypeError, "sum", "sum", 1, 32, x, "7", defines={"T_": "1"}))
print(refused(ValueError, "sum", "sum", 2**31, 32, x, defines={"T_": "1"}))
print(refused(ValueError, "sum", "sum", (1, 65536), 32, x, defines={"T_": "1"}))
print(refused(ValueError, "sum", "sum", 1, 257, x, defines={"T_": "1"}))
print(refused(ValueError, "sum", "sum", 1, 32, x, defines={"T_": "1"}, shared_bytes=231425))
print(refused(ValueError, "sum", "sum", 1, 32, x))
print(refused(ValueError, "sun", "sum", 1, 32, x))
print(refused(RuntimeError, "sum", "sum_of_nothing", 1, 32, x, defines={"T_": "1"}))
run("sum", "sum", (2**31 - 1, 65535, 65535), 256, x, defines={"T_": "1"}, shared_bytes=231424)
assert list(told().grid) == [2**31 - 1, 65535, 65535]

assert run.processors(torch.device("cuda")) == 132
assert launch.usable(torch.device("cuda", 0)) is None
assert launch.arch_of(torch.device("cuda", 0)) == "sm_90a"
capability = (7, 5)
print(launch.usable(torch.device("cuda", 2)))
print(refused(ValueError, "sum", "sum", 1, 32, tensor(3), defines={"T_": "1"}))
capability = (8, 6)
assert launch.arch_of(torch.device("cuda", 4)) == "sm_86"
"""

REFUSALS = [
    r"sum: got operands on cuda:0, cuda:1; wanted all of them on one GPU; .*reference",
    r"sum: got operands on cpu; wanted all of them on one GPU; .*reference",
    r"sum: got operands on no tensor;",
    r"sum: got argument 1 of type str; wanted a tensor, None, an integer or a float;",
    r"sum: got a grid of \(2147483648, 1, 1\), .*at most \(2147483647, 65535, 65535\), .*reference",
    r"sum: got a grid of \(1, 65536, 1\),",
    r"sum: got .* blocks of \(257, 1, 1\) .* 256 threads",
    r"sum: got .* 231425 bytes of shared memory; .* 231424 bytes on this GPU",
    r"defines of sum: got \[\]; wanted \['T_'\]",
    r"source: got 'sun', .*did you mean 'sum'",
    r"the CUDA driver says CUDA_ERROR_NOT_FOUND",
    r"arch: got sm_75; wanted sm_80 .*reference",
    r"sum: arch: got sm_75; wanted sm_80 .*reference",
]


@pytest.mark.skipif(nvrtc.missing() is not None, reason="kernels cannot be compiled here")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_driver_is_told_what_the_call_says(tmp_path):
    library = tmp_path / "libcuda.so.1"
    source = str(HERE / "driver.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", str(library), "-ldl"], check=True)
    own = tmp_path / "kernels"
    own.mkdir()
    (own / "sum.cu").write_text(
        '// build: T_ = 1, 2\nextern "C" __global__ void __launch_bounds__(256) sum(float* x) {}\n'
    )
    for build in ("1", "2"):  # NVRTC asks the driver for more than this one knows
        nvrtc.cubin(nvrtc.read("sum", own), {"T_": build}, "sm_90a", tmp_path / "cache")
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(HERE.parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(own), str(tmp_path / "cache")],
        env=os.environ | paths, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(REFUSALS)
    for line, pattern in zip(said, REFUSALS, strict=True):
        assert re.match(pattern, line), line


def test_kernels_are_not_usable_without_a_gpu():
    assert launch.usable(CPU) == "device: got cpu; wanted a CUDA GPU"


def test_usable_is_a_constant_to_dynamo():
    @torch.compile(backend="eager", fullgraph=True)
    def program(x):
        return x + 1 if launch.usable(x.device) else x + 2

    assert program(torch.zeros(1)).item() == 1


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch")
def test_a_torch_without_cuda_is_named():
    launch._why_not.cache_clear()
    message = launch.usable(torch.device("cuda", 0))
    launch._why_not.cache_clear()
    assert re.match(r"torch: got .*cpu; wanted a build for CUDA", message or "")
