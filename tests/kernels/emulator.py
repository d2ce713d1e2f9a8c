"""Runs the CUDA kernels on the CPU: compiled by g++ from their own source, see emulator.h.

An `Emulator` stands where `functron.ops.launch.cuda` does: host code calls it the same way, with
CPU tensors. Each launch copies its tensors to memory that ends (even seeds) or starts (odd seeds)
at a page without access, and back. What a GPU leaves undefined raises `EmulationError`.

    y, rstd = rms_norm._forward(Emulator(seed=1), x, scale, eps)
    y, rstd = emulated(rms_norm._forward, x, scale, eps)  # seeds 0 to 2, which must agree

The tests that use it are skipped where there is no g++ or no header of the CUDA runtime.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import math
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from functron.ops import sources

HERE = Path(__file__).parent
KERNELS = sources.FOLDER
COMPILER = "g++"
SHARED_LIMIT = 163 * 1024  # of a block on sm_80, the least of the architectures
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
THREADS_LIMIT = 1024

_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+__launch_bounds__\(((?:[^()]|\([^()]*\))*)\)\s*(\w+)\s*\('
)
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\d+\)\s*|alignas\(\d+\)\s*)?([\w:<>\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_SANITIZE = "alignment,null,bounds,signed-integer-overflow,integer-divide-by-zero,shift,return"
_OPTIONS = (
    "-std=c++20", "-O1", "-fPIC", "-w", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE", f"-fsanitize={_SANITIZE}", f"-fno-sanitize-recover={_SANITIZE}",
)  # fmt: skip
# what NVIDIA's headers include that wheels of the CUDA runtime lack; emulator.h defines their macros
_STUBS = {
    "crt/host_defines.h": "",
    "nv/target": "#pragma once\n"
    "#define NV_IF_ELSE_TARGET(target, then, otherwise) otherwise\n"
    "#define NV_IF_TARGET(target, ...)\n",
}
_KINDS = {
    "S": (torch.float32,),
    "H": (torch.float16,),
    "B": (torch.bfloat16,),
    "L": (torch.int64,),
    "I": (torch.int32,),
    "T": (torch.bool,),
    "8": (torch.float8_e4m3fn, torch.float8_e5m2),
    "C": (torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
}
_lock = threading.Lock()


class EmulationError(RuntimeError):
    """A kernel did, or a launch asked for, what a GPU would refuse or leave undefined."""


@dataclass(frozen=True)
class Emulator:
    """Launches kernels on the CPU.

    Attributes:
        seed: of the order in which threads and blocks run, and of where tensors are.
        edits: textual substitutions ``(old, new)`` in the source of the kernels, and of the headers
            that it includes; each must apply.
        folder: of the sources.
    """

    seed: int = 0
    edits: tuple[tuple[str, str], ...] = ()
    folder: Path = KERNELS

    def __call__(
        self,
        source: str,
        name: str,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        *arguments: Any,
        defines: Mapping[str, str] | None = None,
        shared_bytes: int = 0,
    ) -> None:
        """Run the kernel `name` of ``kernels/<source>.cu``.

        Args:
            grid: blocks, one to three numbers.
            block: threads of a block, one to three numbers.
            arguments: tensors, None, integers and floats.
            defines: the macros that the kernel is compiled with.
            shared_bytes: of dynamic shared memory.

        Raises:
            EmulationError: see the class.
        """
        library = load(source, tuple(sorted((defines or {}).items())), self.edits, self.folder)
        try:
            if 0 in _three(grid):  # functron.ops.launch does nothing either
                return
            _launch(library, name, _three(grid), _three(block), arguments, shared_bytes, self.seed)
        except EmulationError as error:
            raise EmulationError(f"{source}.cu, {name}: {error}") from None

    def processors(self, device: torch.device | None = None) -> int:
        """How many multiprocessors the device has: few, so that blocks take more than one turn."""
        return 3


def emulated(forward: Callable[..., Any], *args: Any, seeds: Sequence[int] = (0, 1, 2)) -> Any:
    """``forward(launch, *args)`` on the emulator: results are the same bits for all seeds.

    Uninitialised memory is NaN (integers: the largest), so what a kernel does not write shows.
    """
    results = []
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills empty tensors
    try:
        for seed in seeds:
            results.append(forward(Emulator(seed), *args))
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    for seed, result in zip(seeds, results, strict=True):
        for i, (first, other) in enumerate(zip(_leaves(results[0]), _leaves(result), strict=True)):
            assert torch.equal(_bytes(first), _bytes(other)), f"result {i}: seed {seed} differs"
    return results[0]


def missing() -> str | None:
    """What the emulator lacks on this machine; None if nothing."""
    if shutil.which(COMPILER) is None:
        return f"no {COMPILER}"
    if headers() is None:
        return "no headers of the CUDA runtime; pip install nvidia-cuda-runtime"
    return None


@functools.cache
def headers() -> Path | None:
    """The folder of cuda_bf16.h: that of a wheel, or of an installed toolkit."""
    found = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        found += sorted(Path(root).glob("*/include"), reverse=True)
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        found += [Path(home) / "include"] if home else []
    return next((path for path in found if (path / "cuda_bf16.h").exists()), None)


@functools.cache
def load(
    source: str,
    defines: tuple[tuple[str, str], ...],
    edits: tuple[tuple[str, str], ...] = (),
    folder: Path = KERNELS,
) -> ctypes.CDLL:
    """The compiled ``kernels/<source>.cu``; skips the test where nothing can compile it."""
    sources.check_defines(sources.read(source, folder), dict(defines))  # as the launcher does
    lack = missing()
    if lack:
        pytest.skip(f"emulator: {lack}")
    text = _expanded(folder / f"{source}.cu", set())
    for old, new in edits:
        if old not in text:
            raise ValueError(f"edit: {source}.cu has no {old!r}")
        text = text.replace(old, new)
    kernels = _KERNEL.findall(text)
    text = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic);", text)
    lines = [f"#define {name} {value}" for name, value in defines]
    # unnamed: g++ puts shared variables of inline functions and of others into one section only if
    # all of them are local to the file
    lines += ["namespace {", text, "}"]
    lines += [f"EMULATED_KERNEL({name}, {bound})" for bound, name in kernels]
    return ctypes.CDLL(str(_compiled(source, "\n".join(lines))))


def _expanded(path: Path, seen: set[Path]) -> str:
    """The source with those of the project's headers that it includes."""
    if path in seen:
        return ""
    seen.add(path)
    text = re.sub(r"#\s*pragma\s+once", "", path.read_text())

    def included(match: re.Match) -> str:
        line = text.count("\n", 0, match.start()) + 2
        inner = path.parent / match[1]
        return f'{_expanded(inner, seen)}\n#line {line} "{path}"' if inner.exists() else match[0]

    return f'#line 1 "{path}"\n' + _LOCAL_INCLUDE.sub(included, text)


def _compiled(name: str, text: str) -> Path:
    """The shared library of a program, from the cache or compiled. Safe among processes."""
    folder = _prepared()
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    library = folder / f"{name}-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            program, compiled = Path(work) / f"{name}.o", Path(work) / f"{name}.so"
            header = ["-include", str(folder / "emulator.h")]
            _run([*_options(folder), *header, "-x", "c++", "-c", "-", "-o", str(program)], text)
            # linked apart from -fsanitize: emulator.h has what it calls
            _run(["-shared", str(program), "-o", str(compiled)], "")
            os.replace(compiled, library)
    return library


@functools.cache
def _prepared() -> Path:
    """The folder of this version's artefacts: with stubs, and emulator.h precompiled."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    found = headers()
    about = [(HERE / "emulator.h").read_text(), repr(_OPTIONS), repr(_STUBS), str(found)]
    key = hashlib.sha256("\n".join(about).encode() + version + _processor()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"functron-emulator-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    folder = cache / key
    if not folder.exists():
        work = Path(tempfile.mkdtemp(dir=cache))
        for stub, content in _STUBS.items():
            (work / stub).parent.mkdir(parents=True, exist_ok=True)
            (work / stub).write_text(content)
        header = work / "emulator.h"
        header.write_text(about[0])
        try:
            _run([*_options(work), "-x", "c++-header", str(header), "-o", f"{header}.gch"], "")
            work.rename(folder)
        except OSError:  # another process was first
            pass
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _options(folder: Path) -> list[str]:
    return [*_OPTIONS, *_poisoned_locals(), f"-I{folder}", "-isystem", str(headers())]


@functools.cache
def _poisoned_locals() -> tuple[str, ...]:
    """What makes uninitialised variables -1e37 (integers: -2^24 or so), where g++ has it: from 12."""
    option = "-ftrivial-auto-var-init=pattern"
    asked = [COMPILER, option, "-E", "-x", "c++", "/dev/null"]
    known = subprocess.run(asked, capture_output=True).returncode == 0
    return (option,) if known else ()


def _processor() -> bytes:
    """What -march=native means here."""
    asked = [COMPILER, "-march=native", "-Q", "--help=target"]
    return subprocess.run(asked, capture_output=True, check=True).stdout


def _run(options: list[str], text: str) -> None:
    done = subprocess.run([COMPILER, *options], input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{COMPILER} cannot compile for the emulator:\n{done.stderr[:4000]}")


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("argument", ctypes.c_longlong),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_longlong * 3),
        ("block", ctypes.c_longlong * 3),
        ("dynamic_bytes", ctypes.c_longlong),
        ("seed", ctypes.c_longlong),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("regions", ctypes.POINTER(_Region)),
        ("num_regions", ctypes.c_longlong),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_longlong),
    )


def _launch(library, name, grid, block, arguments, shared_bytes, seed) -> None:
    try:
        function = getattr(library, f"emulated_{name}")
    except AttributeError:
        raise EmulationError('no such extern "C" kernel with __launch_bounds__') from None
    about = getattr(library, f"emulated_kinds_{name}")
    about.restype = ctypes.c_char_p
    kinds = about().decode()
    _check_size(library, name, grid, block, shared_bytes)
    _check_arguments(kinds, arguments)
    with _lock:
        regions = _placed(arguments, at_end=seed % 2 == 0)
        try:
            boxes = [
                _boxed(argument, kind, regions)
                for argument, kind in zip(arguments, kinds, strict=True)
            ]
            pointers = (ctypes.c_void_p * len(boxes))(*[ctypes.addressof(box) for box in boxes])
            table = (_Region * len(regions))(
                *[_Region(r.address, r.address + r.size, r.argument) for r in regions]
            )
            message = ctypes.create_string_buffer(500)
            call = _Call(
                (ctypes.c_longlong * 3)(*grid), (ctypes.c_longlong * 3)(*block), shared_bytes, seed,
                ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p)),
                ctypes.cast(table, ctypes.POINTER(_Region)), len(regions),
                ctypes.cast(message, ctypes.c_char_p), len(message),
            )  # fmt: skip
            failed = function(ctypes.byref(call))
            if failed:
                raise EmulationError(message.value.decode())
            for region in regions:
                region.finish()
        finally:
            for region in regions:
                region.free()


def _check_size(library, name, grid, block, shared_bytes) -> None:
    bound = getattr(library, f"emulated_bound_{name}")
    static = getattr(library, f"emulated_shared_{name}")
    bound.restype = static.restype = ctypes.c_longlong
    if any(not 1 <= n <= most for n, most in zip(grid, GRID_LIMITS, strict=True)):
        raise EmulationError(f"got a grid of {grid}; wanted 1 to {GRID_LIMITS}")
    if any(not 1 <= n <= most for n, most in zip(block, BLOCK_LIMITS, strict=True)):
        raise EmulationError(f"got a block of {block}; wanted 1 to {BLOCK_LIMITS}")
    most = min(bound(), THREADS_LIMIT)
    if math.prod(block) > most:
        raise EmulationError(f"got a block of {block}; wanted at most {most} threads")
    if static() + shared_bytes > SHARED_LIMIT:
        got = f"{static()} + {shared_bytes} bytes of shared memory"
        raise EmulationError(f"got {got}; wanted at most {SHARED_LIMIT}")


def _check_arguments(kinds: str, arguments: Sequence[Any]) -> None:
    if len(kinds) != len(arguments):
        raise EmulationError(f"got {len(arguments)} arguments; wanted {len(kinds)}")
    for i, (argument, kind) in enumerate(zip(arguments, kinds, strict=True)):
        if kind in "if":
            fits = isinstance(argument, int if kind == "i" else float)
            wanted = "an integer" if kind == "i" else "a float"
        else:
            dtypes = _KINDS.get(kind)
            wanted = f"a CPU tensor of {' or '.join(map(str, dtypes or ['any dtype']))}, or None"
            fits = argument is None or (
                isinstance(argument, torch.Tensor)
                and argument.device.type == "cpu"
                and (dtypes is None or argument.dtype in dtypes)
            )
        if not fits:
            got = argument.dtype if isinstance(argument, torch.Tensor) else repr(argument)
            raise EmulationError(f"argument {i}: got {got}; wanted {wanted}")


def _boxed(argument: Any, kind: str, regions: Sequence[_Placed]) -> Any:
    if kind == "i":
        return ctypes.c_longlong(argument)
    if kind == "f":
        return ctypes.c_float(argument)
    if argument is None or not argument.numel():
        return ctypes.c_void_p(None)
    at = argument.data_ptr()
    region = next(r for r in regions if r.original <= at < r.original + r.size)
    return ctypes.c_void_p(region.address + at - region.original)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong
)  # fmt: skip
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_GUARD_BYTES = 256 << 20  # without access; costs address space alone
_PRIVATE, _ANONYMOUS, _NO_RESERVE = 0x02, 0x20, 0x4000
_PACK_BYTES = 16
_POISON = 0xFF


class _Placed:
    """A copy of some memory between pages without access, as far from 16 bytes as the original."""

    def __init__(self, original: int, size: int, argument: int, at_end: bool):
        self.original, self.size, self.argument = original, size, argument
        self.inside = -(-(size + _PACK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        length = self.inside + 2 * _GUARD_BYTES
        flags = _PRIVATE | _ANONYMOUS | _NO_RESERVE
        self.mapped = _libc.mmap(None, length, 0, flags, -1, 0)
        self.first = self.mapped + _GUARD_BYTES
        _libc.mprotect(self.first, self.inside, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(self.first, _POISON, self.inside)
        offset = original % _PACK_BYTES
        if at_end:
            last = self.first + self.inside - size
            self.address = last - (last - offset) % _PACK_BYTES
        else:
            self.address = self.first + offset
        ctypes.memmove(self.address, original, size)

    def finish(self) -> None:
        """Copy back; what is around it on its pages must be as it was."""
        before = self.address - self.first
        pages = ctypes.string_at(self.first, self.inside)
        around = pages[:before] + pages[before + self.size :]
        if around.count(_POISON) != len(around):
            raise EmulationError(f"out of bounds: writes next to argument {self.argument}")
        ctypes.memmove(self.original, self.address, self.size)

    def free(self) -> None:
        _libc.munmap(self.mapped, self.inside + 2 * _GUARD_BYTES)


def _placed(arguments: Sequence[Any], at_end: bool) -> list[_Placed]:
    """The memory that the tensors use, overlapping ones together."""
    extents = []
    for i, x in enumerate(arguments):
        if isinstance(x, torch.Tensor) and x.numel():
            last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            extents.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size(), i))
    merged: list[tuple[int, int, int]] = []
    for begin, end, i in sorted(extents):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2])
        else:
            merged.append((begin, end, i))
    return [_Placed(begin, end - begin, i, at_end) for begin, end, i in merged]


def _three(size: Sequence[int] | int) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, *[1] * (3 - len(sizes)))  # type: ignore[return-value]


def _leaves(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [] if result is None else [leaf for part in result for leaf in _leaves(part)]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)
