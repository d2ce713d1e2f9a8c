"""Compiling kernels with NVRTC, CUDA's compiler as a library: it needs no GPU, driver or nvcc.

``cuda.bindings`` is imported in functions only: an installation for CPUs has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functron.ops import sources
from functron.ops.sources import Defines, Source

INSTALL = "pip install 'functron[kernels]'"
ARCHS = ("sm_80", "sm_90a", "sm_100a")
"""What kernels are proven for: Ampere, Hopper and Blackwell of data centres."""

OPTIONS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v")
"""What everything is compiled with; lines are for profilers, and cost nothing."""

_OLDEST = 80
"""bfloat16 arithmetic came with it."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor.

    Attributes:
        kernel: its name.
        registers: per thread.
        stack: bytes per thread of local memory that arrays take.
        spills: bytes per thread stored to and loaded from local memory for want of registers.
        shared: bytes per block that the kernel declares itself.
    """

    kernel: str
    registers: int
    stack: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Compiled:
    """A source compiled for one architecture.

    Attributes:
        cubin: what a GPU loads.
        resources: of each kernel, by name.
        warnings: what the compiler warned of, one line each.
    """

    cubin: bytes
    resources: tuple[Resources, ...]
    warnings: tuple[str, ...] = ()


class CompileError(RuntimeError):
    """A source that does not compile: the message is the compiler's, with files and lines."""


def compile_source(source: Source, defines: Defines, arch: str) -> Compiled:
    """Compile for `arch`, such as ``"sm_90a"``. Threads may do so at the same time.

    Raises:
        ValueError: NVRTC or CUDA's headers are missing; an architecture that it does not know or
            that kernels do not support; macros that the source does not declare.
        CompileError: what the source is told of.
    """
    check_arch(arch)
    sources.check_defines(source, defines)
    text = source.text.encode()
    library = _library()
    headers = [text.encode() for text in source.headers.values()]
    included = [name.encode() for name in source.headers]
    path = str(source.path).encode()
    create = library.nvrtcCreateProgram
    program = _checked(create(text, path, len(headers), headers, included))
    try:
        flags = [flag.encode() for flag in options(defines, arch)]
        (status,) = library.nvrtcCompileProgram(program, len(flags), flags)
        log = _text(library, program)
        if int(status):
            raise CompileError(f"{source.name} ({sources.label(defines)}) for {arch}:\n{log}")
        cubin = bytearray(_checked(library.nvrtcGetCUBINSize(program)))
        _checked(library.nvrtcGetCUBIN(program, cubin))
    finally:
        library.nvrtcDestroyProgram(program)
    warned = tuple(line for line in log.splitlines() if ": warning" in line)
    return Compiled(bytes(cubin), resources(log), warned)


def options(defines: Defines, arch: str) -> list[str]:
    """The compiler's options."""
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    return [f"--gpu-architecture={arch}", *OPTIONS, f"-I{include_folder()}", *macros]


def _text(library: Any, program: Any) -> str:
    log = bytearray(_checked(library.nvrtcGetProgramLogSize(program)))
    _checked(library.nvrtcGetProgramLog(program, log))
    return bytes(log).rstrip(b"\0").decode(errors="replace").strip()


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_NUMBERS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "stores": re.compile(r"(\d+) bytes spill stores"),
    "loads": re.compile(r"(\d+) bytes spill loads"),
    "shared": re.compile(r"(\d+) bytes smem"),
}


def resources(log: str) -> tuple[Resources, ...]:
    """What ``--ptxas-options=-v`` said of each kernel, by name."""
    _, *parts = _ENTRY.split(log)
    found = []
    for name, said in zip(parts[::2], parts[1::2], strict=True):
        matches = {key: pattern.search(said) for key, pattern in _NUMBERS.items()}
        n = {key: int(match[1]) if match else 0 for key, match in matches.items()}
        spills = n["stores"] + n["loads"]
        found.append(Resources(name, n["registers"], n["stack"], spills, n["shared"]))
    return tuple(sorted(found, key=lambda one: one.kernel))


def check_arch(arch: str) -> None:
    """Refuse what kernels cannot be compiled for.

    Raises:
        ValueError: no architecture, one before sm_80, or one that this NVRTC does not know.
    """
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise ValueError(f"arch: got {arch!r}; wanted a name such as {', '.join(ARCHS)}")
    number = int(match[1])
    if number < _OLDEST:
        raise ValueError(
            f"arch: got {arch}; wanted sm_{_OLDEST} (A100) or newer; "
            'fix: pass kernels=functron.ops.use("reference") on such a GPU'
        )
    if number not in supported():
        known = ", ".join(f"sm_{n}" for n in supported() if n >= _OLDEST)
        raise ValueError(
            f"arch: got {arch}, which NVRTC {version()} does not know; wanted one of {known}; "
            'fix: a newer nvidia-cuda-nvrtc, or pass kernels=functron.ops.use("reference")'
        )


@functools.cache
def supported() -> tuple[int, ...]:
    """The architectures that this NVRTC compiles for: 80, 90, ..."""
    return tuple(_checked(_library().nvrtcGetSupportedArchs()))


@functools.cache
def version() -> str:
    """NVRTC's version: ``"13.0"``."""
    return "{}.{}".format(*_checked(_library().nvrtcVersion()))


@functools.cache
def release() -> str:
    """Its version and, as that is the same for patch releases, the size of its library."""
    return f"{version()}, {library_path().stat().st_size} bytes"


def missing() -> str | None:
    """Why nothing can be compiled here, and what to do about it; None where it can."""
    try:
        _library()
        include_folder()
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def library_path() -> Path:
    """The file of libnvrtc, which is loaded with this.

    Raises:
        ValueError: it is missing, or the package ``cuda-bindings`` is.
    """
    if not _found("cuda.bindings") or not _found("cuda.pathfinder"):
        raise ValueError(
            f"NVRTC: got a Python without cuda-bindings; wanted it to compile kernels; "
            f'fix: {INSTALL}, or pass kernels=functron.ops.use("reference")'
        )
    from cuda import pathfinder

    try:
        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception as error:  # its errors differ between versions
        raise ValueError(
            f"NVRTC: got no libnvrtc ({type(error).__name__}); wanted it to compile kernels; "
            f'fix: {INSTALL}, or pass kernels=functron.ops.use("reference")'
        ) from error
    found = Path(str(path)).resolve()
    # libnvrtc looks for its builtins by name when it first compiles, and not beside itself
    for builtins in found.parent.glob("libnvrtc-builtins.so.*"):
        with contextlib.suppress(OSError):  # then its own search may find them
            ctypes.CDLL(str(builtins))
    return found


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


@functools.cache
def _library() -> Any:
    library_path()
    return importlib.import_module("cuda.bindings.nvrtc")


@functools.cache
def include_folder() -> Path:
    """The folder of CUDA's headers: beside libnvrtc, in a wheel or a toolkit, or else a toolkit's.

    Raises:
        ValueError: there is none with ``cuda_bf16.h`` and ``cuda_fp8.h``.
    """
    beside = library_path().parent.parent / "include"
    if _has_headers(beside):
        return beside
    from cuda import pathfinder

    # may start a process, and is not in every version
    find = getattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    found = find("cudart")
    if found and _has_headers(Path(found)):
        return Path(found)
    raise ValueError(
        f"CUDA's headers: got none in {beside}; wanted cuda_bf16.h and cuda_fp8.h; "
        f'fix: {INSTALL}, or pass kernels=functron.ops.use("reference")'
    )


def _has_headers(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("cuda_bf16.h", "cuda_fp8.h"))


def _checked(result: tuple) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else values
