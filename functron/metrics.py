"""What a machine could do and what a process used: the denominators of MFU and memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import torch

# Dense tensor-core rates without sparsity, and the float32 and float64 rates that torch uses by
# default (no TF32), in FLOP/s, from the vendor's data sheets. The longest matching name counts.
PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # name in torch.cuda.get_device_name, bfloat16, float32, float64
    ("B200", 2250e12, 75e12, 37e12),
    ("H200", 989e12, 67e12, 67e12),
    ("H100 PCIe", 756e12, 51e12, 51e12),
    ("H100", 989e12, 67e12, 67e12),
    ("A100", 312e12, 19.5e12, 19.5e12),
    ("L40S", 362e12, 91.6e12, 1.4e12),
    ("L4", 121e12, 30.3e12, 0.5e12),
    ("A10G", 70e12, 35e12, 0.5e12),
    ("RTX 4090", 165e12, 82.6e12, 1.3e12),
    ("RTX 3090", 71e12, 35.6e12, 0.6e12),
)


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """The matrix-multiply rate of one device in FLOP/s: the 100% of model FLOPs utilisation (MFU).

    For the GPUs of `PEAKS` the data sheet's rate. For a CPU, whose rate depends on its clock and
    on the threads this process has, and for any other GPU, what a large matrix product reaches
    here (`measured_flops`).
    """
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = sorted((row for row in PEAKS if row[0] in name), key=lambda row: len(row[0]))
        if found:
            _, bf16, fp32, fp64 = found[-1]
            return {torch.float32: fp32, torch.float64: fp64}.get(dtype, bf16)
    return measured_flops(device, dtype)


def measured_flops(device: torch.device | str, dtype: torch.dtype, size: int = 1024) -> float:
    """The rate of the fastest of five products of ``[size, size]`` matrices, in FLOP/s.

    Takes some 0.1 seconds on two CPU cores.
    """
    device = torch.device(device)
    a = torch.ones(size, size, dtype=dtype, device=device)
    fastest = float("inf")
    for _ in range(5):
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a)
        _synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def peak_memory_bytes(device: torch.device | str) -> int:
    """The most memory used so far: torch's allocations on a GPU, the resident process on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # unlike ru_maxrss, VmHWM does not start from what the parent process had used
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def free_memory_bytes(device: torch.device | str) -> int:
    """The memory that a process could still take: of a GPU, or of the machine without swapping."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    about = Path("/proc/meminfo")
    if about.exists():
        fields = dict(line.split(":", 1) for line in about.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
