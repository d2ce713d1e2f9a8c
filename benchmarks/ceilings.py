"""A machine's facts, and the ceilings of measurements on it: products, memory, launches."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_case import Clock, bandwidth
from measure import Row, row, tried


def facts(args: argparse.Namespace) -> Iterator[Row]:
    """This machine and installation, and the ceilings of what is measured on it."""
    names = ("triton", "tyro", "tqdm", "tensorstore", "orbax", "pytest", "transformers")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    about = {"torch": torch.__version__, "python": platform.python_version()}
    about |= {"processors": os.cpu_count(), "missing": missing, "device": platform.machine()}
    if args.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        about |= {"device": found.name, "gib": round(found.total_memory / 2**30, 1)}
        about |= {"cuda": torch.version.cuda, "multiprocessors": found.multi_processor_count}
    yield row("machine", **about)
    device = torch.device(args.device)
    clock = Clock(device, 2 if args.tiny else 10)
    for name in ("bfloat16", "fp8", "tf32", "float32"):
        yield tried(f"matmul {name}", multiply, clock, name, 64 if args.tiny else 8192)
    copied = bandwidth(clock, args.tiny)
    yield row("memory, a copy", gb_per_s=copied / 1e9)
    if args.device == "cuda":
        yield tried("launches", launch, clock)
        yield tried("host to device, pinned", transfer, clock, args.tiny, True)
        yield tried("device to host, pinned", transfer, clock, args.tiny, False)


def multiply(name: str, clock: Any, kind: str, size: int) -> Row:
    """The rate of a square product of normal numbers."""
    dtype = torch.bfloat16 if kind in ("bfloat16", "fp8") else torch.float32
    x, y = (torch.randn(size, size, device=clock.device, dtype=dtype) for _ in range(2))
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    run: Callable[[], Any] = lambda: x @ y  # noqa: E731
    if kind == "fp8":
        one = torch.ones((), device=clock.device)
        a, b = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn).T
        run = lambda: torch._scaled_mm(a, b, one, one, out_dtype=dtype)  # noqa: E731
    seconds = clock.median(run)
    return row(name, tflops=2 * size**3 / seconds / 1e12, size=size)


def launch(name: str, clock: Any) -> Row:
    """The cost of a small kernel: to the host, to the device within a graph, and to wait for it."""
    x, many = torch.zeros(32, device=clock.device), 200

    def run() -> None:
        for _ in range(many):
            x.add_(1)

    def time_host(call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begun)

    run()
    host = statistics.median(time_host(run) for _ in range(5)) / many
    both = statistics.median(
        time_host(lambda: (x.add_(1), torch.cuda.synchronize())) for _ in range(50)
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay = 1e6 * clock.median(graph.replay) / many
    return row(name, host_us=host, graph_us=replay, launch_and_wait_us=both)


def transfer(name: str, clock: Any, tiny: bool, up: bool) -> Row:
    """The rate of copies between the device and locked memory of the host."""
    host = torch.empty(2**20 if tiny else 2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=clock.device)
    into, source = (there, host) if up else (host, there)
    seconds = clock.median(lambda: into.copy_(source, non_blocking=True))
    return row(name, gb_per_s=len(host) / seconds / 1e9)
