"""Running kernels on a GPU: on torch's current stream, also while a CUDA graph is captured."""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functron.core import compat
from functron.ops import nvrtc

KernelArgument = torch.Tensor | int | float | None
Dims = int | Sequence[int]

NO_DEFINES: Mapping[str, str] = MappingProxyType({})
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_FALLBACK = 'pass kernels=functron.ops.use("reference")'


@dataclass(frozen=True)
class Launcher:
    """Runs kernels of ``functron/kernels`` on the GPU that holds their operands.

    Attributes:
        cache: folder of compiled kernels; None: `functron.ops.nvrtc.default_folder`.
    """

    cache: Path | None = None

    def __call__(
        self,
        source: str | nvrtc.SourceText,
        kernel: str,
        grid: Dims,
        block: Dims,
        *args: KernelArgument,
        defines: Mapping[str, str] = NO_DEFINES,
        shared_bytes: int = 0,
    ) -> None:
        """Run ``kernel`` of ``kernels/<source>.cu``, as `functron.ops.operations.Launch` says.

        It is compiled and loaded at the first call on a device, and returns before it is done. Of a
        `SourceText` its text is compiled.

        Raises:
            ValueError: kernels cannot be used on this GPU (`usable`), operands that are not on one
                GPU, more blocks, threads or shared memory than it has; nothing has run.
            TypeError: an argument that kernels have no type for.
            RuntimeError: the driver refused.
        """
        blocks, threads = _three(grid), _three(block)
        values, types, index = _pack_arguments(kernel, args)
        if 0 in blocks:
            return
        macros = tuple(defines.items())
        function = _load(self.cache, source, kernel, macros, index)
        _check_limits(kernel, blocks, threads, shared_bytes, function)
        with torch.cuda.device(index):
            stream = compat.current_raw_stream(index)
            call = (function.handle, *blocks, *threads, shared_bytes, stream, (values, types), 0)
            (status,) = function.driver.cuLaunchKernel(*call)
            if int(status) == _INVALID_CONTEXT:
                # a thread in which nothing but torch's caching allocator has run has none yet
                _make_current(function.driver, index)
                (status,) = function.driver.cuLaunchKernel(*call)
        if int(status):
            raise RuntimeError(f"{kernel}: the driver says {status.name}")

    def processors(self, device: torch.device) -> int:
        """How many multiprocessors the device has."""
        return _processors(_index(device))


cuda = Launcher()
"""Runs kernels, and keeps them compiled in the user's cache."""


def arch_of(device: torch.device) -> str:
    """The architecture to compile for: ``"sm_90a"`` on a Hopper.

    The suffix allows instructions that later architectures lack; Ampere and Ada have no such ones.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def usable(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, with the fix; None where they can.

    What it finds stays true: dynamo takes it for a constant, and it is looked for once.
    """
    if device.type != "cuda":
        return f"device: got {device}; wanted a CUDA GPU"
    return _why_not(_index(device))


compat.mark_constant(usable)


@functools.cache
def _why_not(index: int) -> str | None:
    if torch.version.cuda is None:
        return f"torch: got {torch.__version__}; wanted a build for CUDA"
    if missing := nvrtc.missing():
        return missing
    try:
        nvrtc.check_arch(arch_of(torch.device("cuda", index)))
    except ValueError as error:
        return str(error)
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _three(size: Dims) -> tuple[int, int, int]:
    x, y, z, *_ = (size, 1, 1) if isinstance(size, int) else (*size, 1, 1)
    return x, y, z


def _pack_arguments(kernel: str, args: Sequence[KernelArgument]) -> tuple[tuple, tuple, int]:
    """Arguments as cuda.bindings takes them, their C types, and the GPU of all tensors."""
    values: list[Any] = []
    types: list[Any] = []
    index = -1
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            own = arg.get_device() if arg.is_cuda else -1
            if own < 0 or own != index >= 0:
                raise _elsewhere(kernel, args)
            index = own
            value, kind = arg.data_ptr(), ctypes.c_void_p
        elif arg is None:
            value, kind = 0, ctypes.c_void_p
        elif isinstance(arg, int):
            value, kind = int(arg), ctypes.c_longlong
        elif isinstance(arg, float):
            value, kind = arg, ctypes.c_float
        else:
            raise TypeError(
                f"{kernel}: got argument {position} of type {type(arg).__name__}; wanted a "
                "tensor, None, an integer or a float; fix: convert it in the op's host code"
            )
        values.append(value)
        types.append(kind)
    if index < 0:
        raise _elsewhere(kernel, args)
    return tuple(values), tuple(types), index


def _elsewhere(kernel: str, args: Sequence[KernelArgument]) -> ValueError:
    devices = dict.fromkeys(arg.device for arg in args if isinstance(arg, torch.Tensor))
    got = ", ".join(map(str, devices)) or "no tensor"
    return ValueError(
        f"{kernel}: got operands on {got}; wanted all of them on one GPU; "
        f"fix: move them there, or {_FALLBACK}"
    )


class KernelFunction(NamedTuple):
    """A kernel that is loaded on a GPU, and its limits there.

    Attributes:
        driver: ``cuda.bindings.driver``.
        handle: what it launches.
        threads: per block at most.
        shared: bytes of dynamic shared memory per block at most.
    """

    driver: Any
    handle: Any
    threads: int
    shared: int


@functools.cache
def _load(
    cache: Path | None,
    source: str | nvrtc.SourceText,
    kernel: str,
    macros: tuple[tuple[str, str], ...],
    index: int,
) -> KernelFunction:
    device = torch.device("cuda", index)
    if reason := usable(device):
        raise ValueError(f"{kernel}: {reason}")
    compiled = nvrtc.cubin(nvrtc.read(source), dict(macros), arch_of(device), cache)
    driver = importlib.import_module("cuda.bindings.driver")
    with torch.cuda.device(index):
        _make_current(driver, index)
        # loading is allowed while this thread captures a graph only if it says so
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = _check_result(driver.cuThreadExchangeStreamCaptureMode(mode))
        try:
            return _load_kernel(driver, compiled.cubin, kernel, index)
        finally:
            _check_result(driver.cuThreadExchangeStreamCaptureMode(before))


def _load_kernel(driver: Any, cubin: bytes, kernel: str, index: int) -> KernelFunction:
    library = _check_result(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    found = _check_result(driver.cuLibraryGetKernel(library, kernel.encode()))
    handle = _check_result(driver.cuKernelGetFunction(found))  # loads it in the current context
    names = driver.CUfunction_attribute
    threads = driver.cuFuncGetAttribute(names.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, handle)
    static = driver.cuFuncGetAttribute(names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle)
    most = torch.cuda.get_device_properties(index).shared_memory_per_block_optin
    shared = most - _check_result(static)
    # more than 48 KiB must be asked for; asking for all costs nothing
    limit = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check_result(driver.cuFuncSetAttribute(handle, limit, shared))
    return KernelFunction(driver, handle, _check_result(threads), shared)


def _make_current(driver: Any, index: int) -> None:
    """Make the context that torch uses on this GPU this thread's."""
    _check_result(driver.cuInit(0))
    device = _check_result(driver.cuDeviceGet(index))
    _check_result(driver.cuCtxSetCurrent(_check_result(driver.cuDevicePrimaryCtxRetain(device))))


def _check_limits(
    kernel: str, blocks: Sequence[int], threads: Sequence[int], shared: int, f: KernelFunction
) -> None:
    within = all(size <= most for size, most in zip(blocks, _GRID_LIMITS, strict=True))
    if not within or math.prod(threads) > f.threads or shared > f.shared:
        raise ValueError(
            f"{kernel}: got a grid of {tuple(blocks)}, blocks of {tuple(threads)} and {shared} "
            f"bytes of shared memory; wanted at most {_GRID_LIMITS}, {f.threads} threads and "
            f"{f.shared} bytes on this GPU; fix: smaller operands, or {_FALLBACK}"
        )


_check_result = functools.partial(nvrtc.check_result, says="the CUDA driver says")
