"""The emulator of GPUs: that it computes what CUDA defines, and refuses what CUDA leaves undefined."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.kernels import emulator, emulator_source
from tests.kernels.emulator import EmulationError, Emulator, emulated

PREAMBLE = """
#include <cuda_bf16.h>
#include <cuda_fp8.h>
typedef long long i64;
"""
CORRECT = """
// build: T = float, __half, __nv_bfloat16
template <class U> __device__ inline U block_total(U x) {
    __shared__ U parts[8];
    for (int other = 16; other; other >>= 1) x += __shfl_down_sync(~0u, x, other);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    U total = 0;
    for (int i = 0; i < blockDim.x / 32; ++i) total += parts[i];
    return total;
}
KERNEL totals(const T* __restrict__ x, float* __restrict__ y, i64 dim, i64 stride) {
    float sum = 0;
    for (i64 i = threadIdx.x; i < dim; i += blockDim.x) sum += (float)x[blockIdx.x * stride + i];
    sum = block_total(sum);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
KERNEL reversed_block(const i64* x, i64* y) {
    extern __shared__ __align__(16) i64 all[];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}
KERNEL warp_operations(const int* x, int* y) {
    const int i = threadIdx.x, value = x[i];
    y[i] = __shfl_sync(~0u, value, i + 1, 8);
    y[32 + i] = __shfl_up_sync(~0u, value, 3);
    y[64 + i] = __shfl_xor_sync(~0u, value, 5);
    y[96 + i] = __ballot_sync(~0u, value & 1);
    y[128 + i] = __match_any_sync(~0u, value & 3);
    y[160 + i] = __reduce_max_sync(~0u, value);
    if (i < 16) y[192 + i] = __shfl_down_sync(0xFFFFu, value, 1, 16);
    y[224 + i] = __syncthreads_count(value & 1);
}
KERNEL to_float8(const T* x, __nv_fp8_e4m3* y, unsigned char* z, i64 n) {
    for (i64 i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) {
        y[i] = __nv_fp8_e4m3((float)x[i]);
        z[i] = __nv_cvt_float_to_fp8((float)x[i], __NV_SATFINITE, __NV_E5M2);
    }
}
KERNEL count(const i64* x, int* counts, i64 n) {
    const i64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&counts[x[i]], 1);
}
KERNEL optional(const float* x, float* y, float scale) { y[threadIdx.x] = x ? x[threadIdx.x] * scale : scale; }
"""
WRONG = """
struct alignas(16) Four { float at[4]; };
KERNEL beyond(float* x, i64 at) { x[at] = 0; }
KERNEL reads(const float* x, float* y, i64 at) { y[0] = x[at]; }
KERNEL misaligned(const float* x, float* y) { *(Four*)y = *(const Four*)x; }
KERNEL divergent() { if (threadIdx.x < 32) __syncthreads(); }
KERNEL two_barriers() { if (threadIdx.x < 32) { __syncthreads(); } else {
    __syncthreads(); } }
KERNEL left_out(int* y) { y[threadIdx.x] = __shfl_sync(0xFFu, 1, 0); }
KERNEL unreached(int* y) { if (threadIdx.x < 31) y[threadIdx.x] = __shfl_sync(~0u, 1, 0); }
KERNEL inactive(int* y) { if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0xFFFFu, 1, 20); }
KERNEL different(int* y) { if (threadIdx.x & 1) y[0] = __any_sync(~0u, 1); else
    y[0] = __any_sync(~0u, 1); }
KERNEL beyond_static(float* y, i64 at) { __shared__ float all[32]; all[at] = 1; y[0] = all[0]; }
KERNEL beyond_dynamic(i64 at) { extern __shared__ float all[]; all[at] = 1; }
KERNEL overflows(i64* y, i64 n) { const int i = (int)n * 65536; y[0] = i; }
KERNEL divides(i64* y, i64 n) { y[0] = 1 / n; }
KERNEL unwritten_shared(float* y) { __shared__ float all[32]; y[threadIdx.x] = all[threadIdx.x]; }
KERNEL racing(float* y) { __shared__ float all[64]; all[threadIdx.x] = threadIdx.x; y[threadIdx.x] = all[63 - threadIdx.x]; }
KERNEL restricted(const float* __restrict__ x, float* __restrict__ y) { y[threadIdx.x] = x[threadIdx.x]; }
KERNEL block_order(float* y) { y[0] = blockIdx.x; }
KERNEL lazy(float* y) { if (threadIdx.x) y[threadIdx.x] = 0; }
"""


KERNEL = 'extern "C" __global__ void __launch_bounds__(256)'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("kernels")
    (path / "toy.cuh").write_text("#pragma once\n" + PREAMBLE)
    (path / "correct.cu").write_text('#include "toy.cuh"\n' + CORRECT.replace("KERNEL", KERNEL))
    (path / "wrong.cu").write_text('#include "toy.cuh"\n' + WRONG.replace("KERNEL", KERNEL))
    return path


SINGLE = {"T": "float"}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "float"), (torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16")],
)
def test_blocks_barriers_and_shuffles(folder, dtype, name):
    x = torch.arange(3 * 500).view(3, 500).remainder(17).to(dtype)[:, 1:401]

    def totals(launch, x):
        y = torch.empty(3)
        launch("correct", "totals", 3, 256, x, y, 400, x.stride(0), defines={"T": name})
        return y

    for seed in range(4):
        y = totals(Emulator(seed, folder=folder), x)
        assert torch.equal(y, x.float().sum(1)), seed


def test_dynamic_shared_memory(folder):
    x, y = torch.arange(96), torch.zeros(96, dtype=torch.int64)
    for seed in range(4):
        launch = Emulator(seed, folder=folder)
        launch("correct", "reversed_block", 1, 96, x, y, defines=SINGLE, shared_bytes=96 * 8)
        assert torch.equal(y, x.flip(0))


def test_warp_operations(folder):
    x = torch.arange(32, dtype=torch.int32).mul(7).remainder(13)
    lanes, values = list(range(32)), x.tolist()
    bits = lambda chosen: sum(1 << i for i in lanes if chosen(i))
    signed = lambda mask: mask - 2**32 if mask >= 2**31 else mask
    for seed in range(3):
        y = torch.zeros(256, dtype=torch.int32)
        Emulator(seed, folder=folder)("correct", "warp_operations", 1, 32, x, y, defines=SINGLE)
        rows = y.view(8, 32).tolist()
        assert rows[0] == [values[i // 8 * 8 + (i + 1) % 8] for i in lanes]
        assert rows[1] == [values[max(i - 3, 0) if i >= 3 else i] for i in lanes]
        assert rows[2] == [values[i ^ 5] for i in lanes]
        assert rows[3] == [signed(bits(lambda i: values[i] & 1))] * 32
        assert rows[4] == [signed(bits(lambda j: values[j] & 3 == values[i] & 3)) for i in lanes]  # noqa: B023
        assert rows[5] == [12] * 32
        assert rows[6][:16] == [values[min(i + 1, 15)] for i in lanes[:16]]
        assert rows[7] == [sum(v & 1 for v in values)] * 32


def test_float8_is_that_of_torch(folder):
    """Every finite float16, and float8's own ties: NVIDIA's conversions saturate, torch's do not."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = x[x.abs() <= 448]
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    z = torch.empty(x.shape, dtype=torch.float8_e5m2)
    launch = Emulator(folder=folder)
    launch("correct", "to_float8", 2, 256, x, y, z, x.numel(), defines=SINGLE)
    assert torch.equal(y.view(torch.uint8), x.to(y.dtype).view(torch.uint8))
    assert torch.equal(z.view(torch.uint8), x.to(z.dtype).view(torch.uint8))


def test_atomics_and_empty_grids(folder):
    x, counts = torch.arange(600) % 7, torch.zeros(7, dtype=torch.int32)
    launch = Emulator(2, folder=folder)
    launch("correct", "count", (3, 1), 256, x, counts, 600, defines=SINGLE)
    assert counts.tolist() == torch.bincount(x).tolist()
    launch("correct", "count", 0, 256, x, counts, 600, defines=SINGLE)
    assert counts.sum() == 600


def test_null_and_floats(folder):
    x, y = torch.ones(32), torch.empty(32)
    launch = Emulator(folder=folder)
    launch("correct", "optional", 1, 32, x, y, 2.5, defines=SINGLE)
    assert (y == 2.5).all()
    launch("correct", "optional", 1, 32, None, y, 1.5, defines=SINGLE)
    assert (y == 1.5).all()
    launch("correct", "optional", 1, 32, torch.empty(0), y, 0.5, defines=SINGLE)
    assert (y == 0.5).all()


def test_tensors_that_overlap_stay_so(folder):
    """An operand that is a view of the result is read as it is then."""
    memory = torch.arange(64.0)
    Emulator(0, folder=folder)(
        "correct", "optional", 1, 32, memory[16:48], memory[:32], 2.0, defines=SINGLE
    )
    assert memory[:16].tolist() == [2.0 * i for i in range(16, 32)]


def test_restricted_tensors_must_not_overlap(folder):
    memory = torch.zeros(4, 64)
    launch = Emulator(folder=folder)
    launch("wrong", "restricted", 1, 32, memory[:, :32], memory[:, 32:])  # side by side
    with pytest.raises(EmulationError, match="arguments 0 and 1 overlap"):
        launch("wrong", "restricted", 1, 32, memory[0], memory[0])
    with pytest.raises(EmulationError, match="arguments 0 and 1 overlap"):
        launch("wrong", "restricted", 1, 32, memory[:, :33], memory[:, 32:])


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "block", "arguments", "message"),
    [
        ("beyond", 1, lambda: (torch.zeros(7), 10**6), "accesses byte 4000000 of argument 0, which has 28"),
        ("beyond", 1, lambda: (torch.zeros(7), 7), "argument 0"),
        ("beyond", 1, lambda: (torch.zeros(7), -1), "argument 0"),
        ("beyond", 1, lambda: (torch.zeros(50)[20:27], 7), "argument 0"),
        ("beyond", 1, lambda: (torch.zeros(50)[20:27], -1), "argument 0"),
        ("beyond", 1, lambda: (None, 1), "address 0x4|null"),
        ("reads", 1, lambda: (torch.zeros(8), torch.zeros(1), -6000), "24000 bytes before argument 0"),
        ("misaligned", 1, lambda: (torch.zeros(9)[1:], torch.zeros(4)), "wrong.cu:6: misaligned access"),
        ("divergent", 64, lambda: (), r"deadlock: waits at wrong.cu:7 for the block, .* 32 have ended"),
        ("two_barriers", 64, lambda: (), r"waits at the barrier wrong.cu:\d while others wait at"),
        ("left_out", 32, lambda: (torch.zeros(32, dtype=torch.int32),), "mask 000000ff leaves it out"),
        ("unreached", 32, lambda: (torch.zeros(32, dtype=torch.int32),), "deadlock: .* lanes of its warp"),
        ("inactive", 32, lambda: (torch.zeros(32, dtype=torch.int32),), "reads lane 20, which the mask"),
        ("different", 32, lambda: (torch.zeros(1, dtype=torch.int32),), "meet at different operations"),
        ("beyond_static", 1, lambda: (torch.zeros(1), 32), "an index beyond the array's size"),
        ("beyond_dynamic", 1, lambda: (4,), "byte 16 of the 16 of dynamic shared memory"),
        ("overflows", 1, lambda: (torch.zeros(1, dtype=torch.int64), 65536), "wrong.cu:.*integer overflow"),
        ("divides", 1, lambda: (torch.zeros(1, dtype=torch.int64), 0), "divides an integer by zero"),
    ],
)  # fmt: skip
def test_undefined_behaviour_is_an_error(folder, kernel, block, arguments, message, seed):
    values = arguments()
    handler = signal.getsignal(signal.SIGSEGV)
    with pytest.raises(EmulationError, match=rf"wrong\.cu, {kernel}: .*({message})"):
        Emulator(seed, folder=folder)("wrong", kernel, 1, block, *values, shared_bytes=16)
    assert signal.getsignal(signal.SIGSEGV) is handler


def test_errors_name_block_and_thread(folder):
    x = torch.zeros(8)
    with pytest.raises(
        EmulationError, match=r"^wrong.cu, reads: block \(0, 0, 0\), thread \(0, 0, 0\): "
    ):
        Emulator(folder=folder)("wrong", "reads", 2, 1, x, x[:1], 10**7)
    with pytest.raises(EmulationError, match=r"block \(1, 0, 0\), thread \(0, 0, 0\)"):
        Emulator(1, folder=folder)("wrong", "reads", 2, 1, x, x[:1], 10**7)


@pytest.mark.parametrize(
    ("kernel", "grid", "block", "arguments", "message"),
    [
        ("beyond", 1, 1, (torch.zeros(1),), "got 1 arguments; wanted 2"),
        ("beyond", 1, 1, (torch.zeros(1), 1.0), "argument 1: got 1.0; wanted an integer"),
        (
            "beyond",
            1,
            1,
            (torch.zeros(1).double(), 0),
            "argument 0: got torch.float64; wanted a CPU",
        ),
        ("beyond", 1, 257, (torch.zeros(1), 0), "wanted at most 256 threads"),
        ("beyond", (1, 65536), 1, (torch.zeros(1), 0), "got a grid of"),
        ("beyond", 2**31, 1, (torch.zeros(1), 0), "got a grid of"),
        ("beyond", 1, (1, 1, 65), (torch.zeros(1), 0), "got a block of"),
        ("nothing", 1, 1, (), "no such"),
    ],
)
def test_launches_that_a_gpu_refuses(folder, kernel, grid, block, arguments, message):
    with pytest.raises(EmulationError, match=message):
        Emulator(folder=folder)("wrong", kernel, grid, block, *arguments)


def test_too_much_shared_memory(folder):
    with pytest.raises(EmulationError, match="bytes of shared memory; wanted at most 166912"):
        Emulator(folder=folder)("wrong", "beyond_dynamic", 1, 1, 0, shared_bytes=166912)


def test_macros_must_be_declared(folder):
    with pytest.raises(ValueError, match="defines of correct"):
        Emulator(folder=folder)("correct", "count", 0, 1, defines={"T": "double"})


def forward(kernel, block, size, grid=1):
    def run(launch):
        y = torch.empty(size)
        launch("wrong", kernel, grid, block, y)
        return y

    return run


def test_shared_memory_starts_as_nan(folder):
    y = forward("unwritten_shared", 32, 32)(Emulator(folder=folder))
    assert y.isnan().all()


@pytest.mark.parametrize("make", [("racing", 64, 64), ("block_order", 1, 1, 5)], ids=lambda m: m[0])
def test_seeds_show_races(folder, monkeypatch, make):
    monkeypatch.setattr(emulator, "Emulator", lambda *args: Emulator(*args, folder=folder))
    with pytest.raises(AssertionError, match="seed 1 differs"):
        emulated(forward(*make))


def test_what_is_not_written_is_nan(folder, monkeypatch):
    monkeypatch.setattr(emulator, "Emulator", lambda *args: Emulator(*args, folder=folder))
    y = emulated(forward("lazy", 32, 32))
    assert y[0].isnan()
    assert (y[1:] == 0).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_edits_must_apply(folder):
    x, y = torch.ones(32), torch.empty(32)
    twice = Emulator(edits=(("* scale", "* scale * 2"),), folder=folder)
    twice("correct", "optional", 1, 32, x, y, 2.0, defines=SINGLE)
    assert (y == 4).all()
    with pytest.raises(ValueError, match=r"correct.cu has no 'no such text'"):
        Emulator(edits=(("no such text", ""),), folder=folder)(
            "correct", "optional", 1, 1, defines=SINGLE
        )


def test_without_a_compiler_tests_skip(folder, monkeypatch):
    monkeypatch.setattr(emulator_source, "COMPILER", "no-such-compiler")
    emulator_source.load.cache_clear()
    with pytest.raises(pytest.skip.Exception, match="no no-such-compiler"):
        Emulator(folder=folder)("wrong", "divergent", 1, 1)
    emulator_source.load.cache_clear()
