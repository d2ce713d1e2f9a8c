"""Memory between pages without access, for the tensors of an emulated launch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch

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


class Placed:
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

    def finish(self) -> bool:
        """Copy back; whether what is around it on its pages is as it was."""
        before = self.address - self.first
        pages = ctypes.string_at(self.first, self.inside)
        around = pages[:before] + pages[before + self.size :]
        ctypes.memmove(self.original, self.address, self.size)
        return around.count(_POISON) == len(around)

    def free(self) -> None:
        _libc.munmap(self.mapped, self.inside + 2 * _GUARD_BYTES)


def extent(x: torch.Tensor) -> tuple[int, int]:
    """Where its elements are: the first byte and that after the last."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    if not x.numel() or not y.numel():
        return False
    (begin, end), (other_begin, other_end) = extent(x), extent(y)
    if end <= other_begin or other_end <= begin:
        return False
    return bool(torch.isin(_bytes_of(x), _bytes_of(y)).any())


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The addresses of all its bytes."""
    at = torch.tensor([x.data_ptr()])
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = at.unsqueeze(-1) + torch.arange(size) * stride * x.element_size()
    return (at.unsqueeze(-1) + torch.arange(x.element_size())).flatten()


def placed(arguments: Sequence[Any], at_end: bool) -> list[Placed]:
    """The memory that the tensors use, overlapping ones together."""
    extents = [
        (*extent(x), i)
        for i, x in enumerate(arguments)
        if isinstance(x, torch.Tensor) and x.numel()
    ]
    merged: list[tuple[int, int, int]] = []
    for begin, end, i in sorted(extents):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2])
        else:
            merged.append((begin, end, i))
    return [Placed(begin, end - begin, i, at_end) for begin, end, i in merged]
