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
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.kernels.emulator_memory import Placed, overlap, placed
from tests.kernels.emulator_source import KERNELS, Parameter, Program, load, missing

__all__ = ["EmulationError", "Emulator", "emulated", "missing"]

SHARED_LIMIT = 163 * 1024  # of a block on sm_80, the least of the architectures
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
THREADS_LIMIT = 1024

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
        program = load(source, tuple(sorted((defines or {}).items())), self.edits, self.folder)
        try:
            if 0 in _three(grid):  # functron.ops.launch does nothing either
                return
            _launch(program, name, _three(grid), _three(block), arguments, shared_bytes, self.seed)
        except EmulationError as error:
            raise EmulationError(f"{source}.cu, {name}: {error}") from None

    def processors(self, device: torch.device | None = None) -> int:
        """How many multiprocessors the device has: few, so that blocks take more than one turn."""
        return 3


def emulated(
    forward: Callable[..., Any],
    *args: Any,
    seeds: Sequence[int] = (0, 1, 2),
    edits: tuple[tuple[str, str], ...] = (),
) -> Any:
    """``forward(launch, *args)`` on the emulator: results are the same bits for all seeds.

    Uninitialised memory is NaN (integers: the largest), so what a kernel does not write shows.
    `edits` are those of `Emulator`.
    """
    first, wanted = None, []
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills empty tensors
    try:
        for number, seed in enumerate(seeds):
            result = forward(Emulator(seed, edits), *args)
            if not number:
                first, wanted = result, [_bytes(leaf) for leaf in _leaves(result)]
            for i, (one, other) in enumerate(zip(wanted, _leaves(result), strict=True)):
                assert torch.equal(one, _bytes(other)), f"result {i}: seed {seed} differs"
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return first


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


def _launch(
    program: Program,
    name: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: Sequence[Any],
    shared_bytes: int,
    seed: int,
) -> None:
    library = program.library
    if name not in program.kernels:
        raise EmulationError('no such extern "C" kernel with __launch_bounds__')
    about = getattr(library, f"emulated_kinds_{name}")
    about.restype = ctypes.c_char_p
    kinds = about().decode()
    _check_size(library, name, grid, block, shared_bytes)
    _check_arguments(kinds, arguments)
    _check_aliases(program.kernels[name], arguments)
    with _lock:
        regions = placed(arguments, at_end=seed % 2 == 0)
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
            if getattr(library, f"emulated_{name}")(ctypes.byref(call)):
                raise EmulationError(message.value.decode())
            for region in regions:
                if not region.finish():
                    raise EmulationError(
                        f"out of bounds: writes next to argument {region.argument}"
                    )
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


def _check_aliases(parameters: Sequence[Parameter], arguments: Sequence[Any]) -> None:
    """Memory written through one pointer must not be what ``__restrict__`` keeps to another."""
    for i, one in enumerate(parameters):
        for j, other in enumerate(parameters[:i]):
            matters = (one.written or other.written) and (one.restrict or other.restrict)
            pair = arguments[i], arguments[j]
            if matters and all(isinstance(x, torch.Tensor) for x in pair) and overlap(*pair):
                raise EmulationError(f"arguments {j} and {i} overlap, in spite of __restrict__")


def _boxed(argument: Any, kind: str, regions: Sequence[Placed]) -> Any:
    if kind == "i":
        return ctypes.c_longlong(argument)
    if kind == "f":
        return ctypes.c_float(argument)
    if argument is None or not argument.numel():
        return ctypes.c_void_p(None)
    at = argument.data_ptr()
    region = next(r for r in regions if r.original <= at < r.original + r.size)
    return ctypes.c_void_p(region.address + at - region.original)


def _three(size: Sequence[int] | int) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, *[1] * (3 - len(sizes)))  # type: ignore[return-value]


def _leaves(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [] if result is None else [leaf for part in result for leaf in _leaves(part)]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)
