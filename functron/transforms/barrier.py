"""Keeping a compiler from undoing rematerialisation.

In a traced program the second run of a function is the same equations on the same values as the
first, which every compiler merges: the intermediates then live until backward after all. A barrier
makes a value depend, as far as anyone can see, on the cotangent that backward starts from. It costs
a copy of that value, so only those operands get one that make large intermediates distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("barrier(Tensor x, Tensor dep) -> Tensor")
_LIBRARY.impl("barrier", lambda x, dep: x.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("barrier", lambda x, dep: torch.empty_like(x), "Meta")


def tie(x: torch.Tensor, dep: torch.Tensor) -> torch.Tensor:
    """`x`, available only after `dep`; works under torch.func transforms."""
    out: Any = _Barrier.apply(x, dep)
    return out


def tie_plain(x: torch.Tensor, dep: torch.Tensor) -> torch.Tensor:
    """`tie` for plain tensors, from inside a dispatch mode."""
    return torch.ops.functron.barrier(x, dep)


class _Barrier(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x, dep):
        return torch.ops.functron.barrier(x, dep)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        return cotangents[0], None

    @staticmethod
    def vmap(info, in_dims, x, dep):
        return _Barrier.apply(x, dep), in_dims[0]


class Reach(TorchDispatchMode):
    """Finds which operands the intermediates of a with block are computed from."""

    def __init__(self, operands: Sequence[torch.Tensor]):
        super().__init__()
        self.operands = list(operands)
        # per storage the set of operands that it depends on, as bits
        self._from: dict[int, int] = {}
        for position, operand in enumerate(self.operands):
            key = storage_key(operand)
            self._from[key] = self._from.get(key, 0) | 1 << position
        self._made: list[tuple[int, int]] = []  # dependencies and bytes of every intermediate

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        used = 0
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for x in given:
            used |= self._from.get(storage_key(x), 0)
        held = {storage_key(x) for x in given}
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and storage_key(x) not in held:
                self._from[storage_key(x)] = used
                self._made.append((used, x.untyped_storage().nbytes()))
        return out

    def choose(self) -> tuple[int, ...]:
        """The operands to tie: each makes more bytes distinct than its copy costs."""
        chosen: list[int] = []
        left = self._made
        while True:
            gains = [
                sum(size for used, size in left if used >> i & 1) - operand.nbytes
                for i, operand in enumerate(self.operands)
            ]
            best = max(range(len(gains)), key=gains.__getitem__, default=None)
            if best is None or gains[best] <= 0:
                return tuple(chosen)
            chosen.append(best)
            left = [(used, size) for used, size in left if not used >> best & 1]


def storage_key(value: torch.Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    return value.untyped_storage()._cdata
