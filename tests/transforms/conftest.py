"""The peak of live tensor bytes while a function runs, counted storage by storage."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Live(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._track(leaf.untyped_storage())
        return out

    def _track(self, storage) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        self.seen[key] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.seen.pop(key, 0)


@pytest.fixture
def peak_bytes():
    """The most bytes that tensors made inside ``fn()`` held at once, as a function of ``fn``."""

    def measure(fn) -> int:
        with _Live() as live:
            out = fn()
        del out
        return live.peak

    return measure
